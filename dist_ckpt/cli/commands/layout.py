"""The command `layout`: show the files and ranks that store each tensor."""

from __future__ import annotations

from typing import Any

import click

from dist_ckpt.cli import output, shared_options
from dist_ckpt.cli.results import FileRow, LayoutResult, ShardRow
from dist_ckpt.core.format.geometry import Cell, Region
from dist_ckpt.reports import format_size
from dist_ckpt.tools.inspect.describe import CheckpointLayout, ShardPlacement
from dist_ckpt.tools.inspect.describe import layout as layout_of


@click.command()
@shared_options.path
@shared_options.selected
@shared_options.json
def layout(path: str, *, include: tuple[str, ...], exclude: tuple[str, ...], as_json: bool) -> None:
    """Show the shard files, their ranks, and the balance between ranks.

    With a glob, also show the shards of the matching tensors in each file. '*' selects all tensors.

    \b
    dist-ckpt layout runs/a@latest
    dist-ckpt layout runs/a@latest -g 'model.*.weight'
    """  # noqa: D301 - click knows the backspace
    shard_layout = layout_of(path, include=include or None, exclude=exclude or None)
    if as_json:
        output.print_json(_document(shard_layout))
        return
    rows = []
    for file in shard_layout.files:
        rows.append(
            (file.name, str(file.rank), format_size(file.nbytes), f"{file.num_shards} shards")
        )
        rows += [
            ("", "", format_size(shard.nbytes), f"{shard.tensor} {_cell_text(shard)}")
            for shard in file.shards
        ]
    output.print_table(("FILE", "RANK", "SIZE", "HOLDS"), rows, right=frozenset({1, 2}))
    ranks = shard_layout.nbytes_by_rank
    most = max(range(len(ranks)), key=ranks.__getitem__)
    click.echo(
        f"{len(ranks)} ranks, {format_size(sum(ranks))}; the most is {format_size(ranks[most])} "
        f"on rank {most}, {shard_layout.imbalance:.2f} times the mean"
    )


def _cell_text(shard: ShardPlacement) -> str:
    cell = shard.cell
    return str(cell) if isinstance(cell, Region) else f"elements {cell}"


def _cell_fields(cell: Cell) -> dict[str, Any]:
    if isinstance(cell, Region):
        return {"offset": cell.offset, "shape": cell.shape}
    return {"start": cell.start, "stop": cell.stop}


def _document(shard_layout: CheckpointLayout) -> LayoutResult:
    files = [
        FileRow(
            name=file.name,
            rank=file.rank,
            component=file.component,
            nbytes=file.nbytes,
            num_shards=file.num_shards,
            shards=tuple(
                ShardRow(tensor=shard.tensor, nbytes=shard.nbytes, **_cell_fields(shard.cell))
                for shard in file.shards
            ),
        )
        for file in shard_layout.files
    ]
    return LayoutResult(
        path=shard_layout.path,
        nbytes_by_rank=shard_layout.nbytes_by_rank,
        imbalance=shard_layout.imbalance,
        files=tuple(files),
    )
