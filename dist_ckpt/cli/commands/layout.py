"""The command `layout`: show the files and ranks that store each tensor."""

from __future__ import annotations

from typing import Any

import click
from msgspec.structs import asdict

from dist_ckpt.cli import output, shared_options
from dist_ckpt.cli.results import FileRow, LayoutResult, extend
from dist_ckpt.core.format.geometry import Region
from dist_ckpt.message_text import format_count, format_size
from dist_ckpt.tools.inspect.describe import layout as layout_of


@click.command()
@shared_options.path
@shared_options.selection
@shared_options.json
def layout(path: str, *, as_json: bool, **selection: Any) -> None:
    """Show the shard files, their ranks, and the balance between ranks.

    With a glob, also show the shards of the matching tensors in each file. '*' selects all tensors.

    \b
    dist-ckpt layout runs/a@latest
    dist-ckpt layout runs/a@latest -g 'model.*.weight'
    """
    shard_layout = layout_of(path, **selection)
    if as_json:
        files = []
        for file in shard_layout.files:
            shards = [
                {"tensor": shard.tensor, "nbytes": shard.nbytes, **asdict(shard.cell)}
                for shard in file.shards
            ]
            files.append(extend(file, FileRow, shards=shards))
        output.print_json(extend(shard_layout, LayoutResult, files=files))
        return
    rows = []
    for file in shard_layout.files:
        count = format_count(file.num_shards, "shard")
        rows.append((file.name, str(file.rank), format_size(file.nbytes), count))
        for shard in file.shards:
            elements = "" if isinstance(shard.cell, Region) else "elements "
            text = f"{shard.tensor} {elements}{shard.cell}"
            rows.append(("", "", format_size(shard.nbytes), text))
    output.print_table(("FILE", "RANK", "SIZE", "HOLDS"), rows, right=frozenset({1, 2}))
    ranks = shard_layout.nbytes_by_rank
    most = max(range(len(ranks)), key=ranks.__getitem__)
    click.echo(
        f"{format_count(len(ranks), 'rank')}, {format_size(sum(ranks))}; the most is "
        f"{format_size(ranks[most])} on rank {most}, {shard_layout.imbalance:.2f} times the mean"
    )
