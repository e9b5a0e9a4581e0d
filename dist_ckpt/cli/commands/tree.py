"""The command `tree`: show the names in a checkpoint as a tree."""

from __future__ import annotations

from typing import Any

import click

from dist_ckpt.cli import output, shared_options
from dist_ckpt.cli.commands.tensors import select_tensors
from dist_ckpt.cli.results import TreeNode, TreeResult
from dist_ckpt.message_text import format_size


@click.command()
@shared_options.path
@shared_options.selection
@click.option(
    "--depth", type=click.IntRange(min=1), default=3, show_default=True, help="Levels of names."
)
@shared_options.json
def tree(path: str, depth: int, *, as_json: bool, **selection: Any) -> None:
    """Show the names in a checkpoint as a tree, with their sizes.

    \b
    dist-ckpt tree runs/a@latest --depth 2
    dist-ckpt tree runs/a@latest -g model
    """
    path, selected = select_tensors(path, **selection)
    nbytes: dict[tuple[str, ...], int] = {}
    leaves: dict[tuple[str, ...], str] = {}
    for fqn, info in selected.items():
        parts = tuple(fqn.split("."))
        num = info.nbytes if info.alias_of is None else 0
        for length in range(min(depth, len(parts)) + 1):
            nbytes[parts[:length]] = nbytes.get(parts[:length], 0) + num
        if len(parts) <= depth:
            tied = f" (tied to {info.alias_of})" if info.alias_of else ""
            leaves[parts] = f"{info.dtype} {list(info.shape)}{tied}"
    if as_json:
        nodes = (
            TreeNode(name=".".join(parts), nbytes=num, tensor=leaves.get(parts))
            for parts, num in nbytes.items()
        )
        output.print_json(TreeResult(path=path, depth=depth, nodes=tuple(nodes)))
        return
    click.echo(f"{output.printable(path)}  {format_size(nbytes.get((), 0))}")
    for parts in sorted(part for part in nbytes if part):
        name = output.printable("  " * len(parts) + parts[-1])
        tensor = output.printable(leaves.get(parts, ""))
        click.echo(f"{name:<48}  {format_size(nbytes[parts]):>8}  {tensor}".rstrip())
