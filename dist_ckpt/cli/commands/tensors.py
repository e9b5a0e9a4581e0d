"""The command `tensors`: list the tensors in a checkpoint."""

from __future__ import annotations

from typing import Any, Literal

import click

from dist_ckpt.cli import output, shared_options
from dist_ckpt.cli.results import TensorRow, TensorsResult, extend
from dist_ckpt.core.checkpoint import checkpoint
from dist_ckpt.core.checkpoint.checkpoint import TensorInfo
from dist_ckpt.core.planning.name_selection import parse_selection
from dist_ckpt.default_opener import OPENER
from dist_ckpt.message_text import format_count, format_size


@click.command()
@shared_options.path
@shared_options.selection
@click.option(
    "--sort",
    type=click.Choice(["saved", "name", "size"]),
    default="saved",
    show_default=True,
    help="The order. size begins with the largest.",
)
@shared_options.json
def tensors(
    path: str, *, sort: Literal["saved", "name", "size"], as_json: bool, **selection: Any
) -> None:
    """List the tensors in a checkpoint: name, shape, dtype, size, component.

    A glob selects the names that it matches, and all names below them. A * also matches dots.

    \b
    dist-ckpt tensors runs/a@latest
    dist-ckpt tensors runs/a@latest -g model -g '*.exp_avg' --sort size
    """
    path, selected = select_tensors(path, **selection)
    rows = [*selected.items()]
    if sort == "name":
        rows.sort()
    elif sort == "size":
        rows.sort(key=lambda row: (-row[1].nbytes, row[0]))
    if as_json:
        documents = tuple(extend(info, TensorRow, name=name) for name, info in rows)
        output.print_json(TensorsResult(path=path, tensors=documents))
        return
    output.print_table(
        ("NAME", "DTYPE", "SHAPE", "SIZE", "COMPONENT", "SHARDS", "NOTES"),
        [
            (
                name,
                info.dtype,
                str(list(info.shape)),
                format_size(info.nbytes),
                info.component,
                str(info.num_shards),
                _notes(info),
            )
            for name, info in rows
        ],
        right=frozenset({3, 5}),
    )
    nbytes = sum(info.nbytes for _, info in rows if info.alias_of is None)
    click.echo(f"{format_count(len(rows), 'tensor')}, {format_size(nbytes)}")


def _notes(info: TensorInfo) -> str:
    notes = [f"tied to {info.alias_of}"] if info.alias_of else []
    if info.pieces:
        notes.append(f"pieces {[*info.pieces]} along dimension {info.fused_dim}")
    return "; ".join(notes)


def select_tensors(path: str, **globs: Any) -> tuple[str, dict[str, TensorInfo]]:
    """Return a checkpoint's path and the selected tensors. ValueError if a glob matches nothing."""
    selection = parse_selection(**globs)
    with checkpoint.open(path, opener=OPENER) as ck:
        tensors = ck.tensors
        if problems := selection.pattern_problems(tensors):
            raise ValueError("; ".join(problems))
        return ck.path, {name: info for name, info in tensors.items() if name in selection}
