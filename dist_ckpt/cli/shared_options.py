"""What several commands take, spelt alike in all of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import click

from dist_ckpt.cli.completion import CheckpointPath, names_in

_Command = Callable[..., Any]


class Bytes(click.ParamType):  # type: ignore[type-arg]  # before click 8.4 it takes none
    """A size such as 512MB or 4GiB, in bytes."""

    name = "size"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Return the number of bytes; what is no size is a usage error."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d{1,18})\s*([kMGT]?)(i?)B?", str(value))
        if match is None:
            self.fail(f"{value!r} is no size: write it like 512MB or 4GiB", param, ctx)
        base = 1024 if match[3] else 1000
        factor: int = base ** " kMGT".index(match[2] or " ")
        return int(match[1]) * factor


# Whether it can be read is found out by who reads it, who says more than click does.
PATH = CheckpointPath(readable=False)

path = click.argument("path", type=PATH)
paths = click.argument("paths", type=PATH, nargs=-1, required=True)
json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
yes = click.option("--yes", is_flag=True, help="Do not ask.")
dry_run = click.option("--dry-run", is_flag=True, help="Change nothing, only say what would be.")
overwrite = click.option(
    "--overwrite",
    is_flag=True,
    help="Replace the checkpoint at TARGET once the new one is durable.",
)


def selected(command: _Command) -> _Command:
    """Have a command take globs on the names in a checkpoint: --include, short -g, and --exclude.

    They mean the same everywhere, in Python too.
    """
    take = click.option(
        *("-g", "--include"),
        multiple=True,
        shell_complete=names_in,
        help="Only names that match; may be given again.",
    )
    leave = click.option(
        "--exclude",
        multiple=True,
        shell_complete=names_in,
        help="Not what matches; may be given again.",
    )
    return take(leave(command))
