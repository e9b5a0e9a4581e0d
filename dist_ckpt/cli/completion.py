"""Completion in a shell: commands, options, paths, selectors and names."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    split_arg_string,
)

from dist_ckpt.core.checkpoint import checkpoint
from dist_ckpt.core.storage import open_storage
from dist_ckpt.errors import CheckpointError
from dist_ckpt.openers import OPENER
from dist_ckpt.runs.listing import Listing, list_run


class BashWords(BashComplete):
    """Completes in bash, for which a word ends at an @ or a colon, and so in runs/a@min:loss.

    click would be given bash's words. Here they are taken from the line, and bash is given what
    takes the place of the last of its own.
    """

    source_template = """\
%(complete_func)s() {
    local IFS=$'\\n' found type value
    found=$(env COMP_LINE="${COMP_LINE:0:COMP_POINT}" COMP_BREAKS="$COMP_WORDBREAKS" \\
        %(complete_var)s=bash_complete "$1")
    COMPREPLY=()
    while IFS=, read -r type value; do
        case $type in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            plain) COMPREPLY+=("$value") ;;
        esac
    done <<< "$found"
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the cursor, and the one that is begun. Called by click."""
        line = os.environ["COMP_LINE"]
        words = split_arg_string(line)
        begun = "" if line[-1:].isspace() or len(words) < 2 else words.pop()
        return words[1:], begun

    def format_completion(self, item: CompletionItem) -> str:
        """Return what bash puts in the place of its own last word. Called by click."""
        _, begun = self.get_completion_args()
        breaks = [char for char in ":=@" if char in os.environ.get("COMP_BREAKS", "")]
        end = max((begun.rfind(char) for char in breaks), default=-1)
        # readline ends a word before an @ and behind the others.
        there = begun[: end + (begun[end : end + 1] != "@")]
        return f"{item.type},{item.value.removeprefix(there)}"


# While a shell waits nothing is printed: whatever goes wrong, nothing is offered.
_EXPECTED = (CheckpointError, OSError, ValueError, TypeError)


class CheckpointPath(click.Path):
    """A path, or a checkpoint of a run such as runs/a@latest."""

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return what may follow an @, else have the shell complete a path. Called by click."""
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
    yield from (str(saved.step) for saved in listing.alive)
    for metric in sorted({name for saved in listing.alive for name in saved.metrics}):
        yield from (f"min:{metric}", f"max:{metric}")
    for tag in sorted({name for saved in listing.checkpoints for name in saved.tags}):
        yield f"tag:{tag}"


def names_in(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the names of tensors, and what they lie below, up to the next dot. Called by click."""
    # An option that lacks its value ends click's parsing: what was given before is no argument yet.
    given = [ctx.params.get(name) for name in ("path", "source", "a")]
    path = next((value for value in [*given, *ctx.args] if isinstance(value, str)), "")
    names: set[str] = set()
    with suppress(*_EXPECTED), checkpoint.open(path, opener=OPENER) as ck:
        for fqn in ck:
            if fqn.startswith(incomplete):
                more, _, _ = fqn[len(incomplete) :].partition(".")
                names.add(incomplete + more)
    return _matching(iter(sorted(names)), incomplete)


def components_in(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the components of the checkpoint that was given before. Called by click."""
    with suppress(*_EXPECTED), checkpoint.open(str(ctx.params.get("path")), opener=OPENER) as ck:
        return _matching((component.name for component in ck.index.catalog.components), incomplete)
    return []


def _matching(offered: Iterator[str], incomplete: str) -> list[CompletionItem]:
    return [
        CompletionItem(word)
        for word in offered
        if word.startswith(incomplete) and word.isprintable()
    ]
