"""The arguments and options of several commands, and what a shell completes in them."""

from __future__ import annotations

import glob
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import click
from click.shell_completion import CompletionItem

from dist_ckpt.core.checkpoint import checkpoint
from dist_ckpt.core.commit.records.recorded_checks import recording_nothing
from dist_ckpt.core.storage import open_storage
from dist_ckpt.default_opener import OPENER
from dist_ckpt.errors import CheckpointError
from dist_ckpt.runs.listing import Listing, list_run

_Command = Callable[..., Any]

# A completion ignores these errors: the shell then offers no words, and prints nothing.
_EXPECTED = (CheckpointError, OSError, ValueError, TypeError)


class CheckpointPath(click.Path):
    """A path, or a checkpoint of a run such as runs/a@latest."""

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the selectors after an @. Without an @ the shell completes. Called by click."""
        root, at, _ = incomplete.rpartition("@")
        if not at:
            return super().shell_complete(ctx, param, incomplete)
        with suppress(*_EXPECTED):
            storage, folder = open_storage(root)
            listing = list_run(storage, folder, now=time.time())
            return _matching((f"{root}@{selector}" for selector in _selectors(listing)), incomplete)
        return []


def _selectors(listing: Listing) -> Iterator[str]:
    yield "latest"
    yield from (str(saved.step) for saved in listing.not_orphaned)
    for metric in sorted({name for saved in listing.not_orphaned for name in saved.metrics}):
        yield from (f"min:{metric}", f"max:{metric}")
    for tag in sorted({name for saved in listing.checkpoints for name in saved.tags}):
        yield f"tag:{tag}"


def complete_names(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return globs that name tensors or groups, up to the next dot. Called by click."""
    # click stops parsing at an option without a value. Earlier arguments are then in `args`.
    values = [ctx.params.get(name) for name in ("path", "source", "a")]
    path = next((value for value in [*values, *ctx.args] if isinstance(value, str)), "")
    patterns: set[str] = set()
    with suppress(*_EXPECTED), checkpoint.open(path, opener=OPENER) as ck:
        for pattern in map(glob.escape, ck):
            if pattern.startswith(incomplete):
                rest, _, _ = pattern[len(incomplete) :].partition(".")
                patterns.add(incomplete + rest)
    return _matching(iter(sorted(patterns)), incomplete)


def complete_components(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the components of the checkpoint in the arguments. Called by click."""
    with suppress(*_EXPECTED), checkpoint.open(str(ctx.params.get("path")), opener=OPENER) as ck:
        return _matching((component.name for component in ck.index.catalog.components), incomplete)
    return []


def _matching(words: Iterator[str], incomplete: str) -> list[CompletionItem]:
    return [
        CompletionItem(word) for word in words if word.startswith(incomplete) and word.isprintable()
    ]


class Bytes(click.ParamType):  # type: ignore[type-arg]  # before click 8.4 it takes none
    """A size such as 512MB or 4GiB, in bytes."""

    name = "size"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Return the number of bytes. Any other text is a usage error. Called by click."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d{1,18})\s*([kMGT]?)(i?)B?", str(value))
        if match is None:
            self.fail(f"{value!r} is not a size: give one such as 512MB or 4GiB", param, ctx)
        base = 1024 if match[3] else 1000
        factor: int = base ** " kMGT".index(match[2] or " ")
        return int(match[1]) * factor


# click does not check the path: the error of the command is better.
PATH = CheckpointPath(readable=False)

path = click.argument("path", type=PATH)
paths = click.argument("paths", type=PATH, nargs=-1, required=True)
json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
yes = click.option("--yes", is_flag=True, help="Do not ask for confirmation.")


def _record_nothing(ctx: click.Context, _: click.Parameter, is_dry: object) -> object:
    if is_dry:
        ctx.with_resource(recording_nothing())
    return is_dry


dry_run = click.option(
    "--dry-run",
    is_flag=True,
    callback=_record_nothing,
    help="Change nothing; print what would be done.",
)
overwrite = click.option(
    "--overwrite",
    is_flag=True,
    help="Replace the checkpoint at TARGET once the new one is durable.",
)


def repeatable_option(*names: str, **attributes: Any) -> Callable[[_Command], _Command]:
    """Return a decorator that adds a repeatable option. Without it the value is None."""
    return click.option(
        *names, multiple=True, callback=lambda _, __, values: values or None, **attributes
    )


def selection(command: _Command) -> _Command:
    """Add the options --include (short: -g) and --exclude, which take globs."""
    include = repeatable_option(
        *("-g", "--include"),
        shell_complete=complete_names,
        help="Select only names that match this glob. May be repeated.",
    )
    exclude = repeatable_option(
        "--exclude",
        shell_complete=complete_names,
        help="Leave out names that match this glob. May be repeated.",
    )
    return include(exclude(command))
