"""The commands that look at the tensors of a checkpoint: tensors, tree, stats, layout.

None of them imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Literal

import click

from dist_ckpt.cli import output, shared_options
from dist_ckpt.core.checkpoint import checkpoint
from dist_ckpt.core.checkpoint.checkpoint import TensorInfo
from dist_ckpt.core.format.geometry import Region
from dist_ckpt.core.format.index.model_description import as_json as told
from dist_ckpt.core.planning.selection import selection_of
from dist_ckpt.openers import OPENER
from dist_ckpt.reports import size
from dist_ckpt.runs.selectors import resolve
from dist_ckpt.tools.inspect.shard_layout import CheckpointLayout, ShardPlacement
from dist_ckpt.tools.inspect.shard_layout import layout as layout_of
from dist_ckpt.tools.inspect.tensor_stats import TensorStats
from dist_ckpt.tools.inspect.tensor_stats import stats as stats_of


def _chosen(
    path: str, include: tuple[str, ...], exclude: tuple[str, ...]
) -> tuple[str, dict[str, TensorInfo]]:
    """Return a checkpoint's path and its chosen tensors. ValueError if a glob matches nothing."""
    selection = selection_of(include or None, exclude or None)
    with checkpoint.open(path, opener=OPENER) as ck:
        found = ck.tensors
        if problems := selection.unmatched(found):
            raise ValueError("; ".join(problems))
        return ck.path, {name: info for name, info in found.items() if name in selection}


@click.command()
@shared_options.path
@shared_options.selected
@click.option(
    "--sort",
    type=click.Choice(["saved", "name", "size"]),
    default="saved",
    show_default=True,
    help="By which order; size begins with the largest.",
)
@shared_options.json
def tensors(
    path: str,
    *,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    sort: Literal["saved", "name", "size"],
    as_json: bool,
) -> None:
    """List the tensors in a checkpoint: name, shape, dtype, size, component.

    A glob selects what it matches, and all that is below; a * crosses dots.

    \b
    dist-ckpt tensors runs/a@latest
    dist-ckpt tensors runs/a@latest -g model -g '*.exp_avg' --sort size
    """  # noqa: D301 - click knows the backspace
    where, found = _chosen(path, include, exclude)
    rows = [*found.items()]
    if sort == "name":
        rows.sort()
    elif sort == "size":
        rows.sort(key=lambda row: (-row[1].nbytes, row[0]))
    if as_json:
        facts = [{"name": name, **asdict(info)} for name, info in rows]
        output.print_json("tensors", {"path": where, "tensors": facts})
        return
    output.print_table(
        ("NAME", "DTYPE", "SHAPE", "SIZE", "COMPONENT", "SHARDS", "NOTES"),
        [
            (
                name,
                info.dtype,
                str(list(info.shape)),
                size(info.nbytes),
                info.component,
                str(info.num_shards),
                f"tied to {info.alias_of}" if info.alias_of else "",
            )
            for name, info in rows
        ],
        right=frozenset({3, 5}),
    )
    nbytes = sum(info.nbytes for _, info in rows if info.alias_of is None)
    click.echo(f"{len(rows)} tensors, {size(nbytes)}")


@click.command()
@shared_options.path
@shared_options.selected
@click.option("--depth", type=click.IntRange(min=1), default=3, show_default=True)
@shared_options.json
def tree(
    path: str, depth: int, *, include: tuple[str, ...], exclude: tuple[str, ...], as_json: bool
) -> None:
    """Show the names in a checkpoint as a tree, with their sizes.

    \b
    dist-ckpt tree runs/a@latest --depth 2
    dist-ckpt tree runs/a@latest -g model
    """  # noqa: D301 - click knows the backspace
    path, found = _chosen(path, include, exclude)
    nbytes: dict[tuple[str, ...], int] = {}
    leaves: dict[tuple[str, ...], str] = {}
    for fqn, info in found.items():
        parts = tuple(fqn.split("."))
        own = info.nbytes if info.alias_of is None else 0
        for length in range(min(depth, len(parts)) + 1):
            nbytes[parts[:length]] = nbytes.get(parts[:length], 0) + own
        if len(parts) <= depth:
            tied = f" (tied to {info.alias_of})" if info.alias_of else ""
            leaves[parts] = f"{info.dtype} {list(info.shape)}{tied}"
    if as_json:
        rows = [
            {"name": ".".join(parts), "nbytes": n, "tensor": leaves.get(parts)}
            for parts, n in nbytes.items()
        ]
        output.print_json("tree", {"path": path, "depth": depth, "nodes": rows})
        return
    click.echo(f"{output.printable(path)}  {size(nbytes.get((), 0))}")
    for parts in sorted(part for part in nbytes if part):
        name = output.printable("  " * len(parts) + parts[-1])
        what = output.printable(leaves.get(parts, ""))
        click.echo(f"{name:<48}  {size(nbytes[parts]):>8}  {what}".rstrip())


@click.command()
@shared_options.path
@shared_options.selected
@shared_options.json
def stats(path: str, *, include: tuple[str, ...], exclude: tuple[str, ...], as_json: bool) -> None:
    """Show what the values of each tensor are like: min, max, mean, rms, zeros, nan, inf.

    The first four are of the finite values. All of it is read and checked, a part at a time. Exit
    code 1 if there is a nan or an infinity: leave a mask that is to have some out.

    \b
    dist-ckpt stats runs/a@latest -g model
    dist-ckpt stats runs/a@latest --exclude '*.mask'
    """  # noqa: D301 - click knows the backspace
    path = os.fspath(resolve(path))
    with output.progress("stats") as update:
        found = stats_of(path, include=include or None, exclude=exclude or None, progress=update)
    bad = [one for one in found if not one.is_finite and one.alias_of is None]
    with output.exit_with(output.FINDING if bad else output.FINE):
        if as_json:
            facts = [told(_facts(one)) for one in found]
            output.print_json("stats", {"path": path, "ok": not bad, "tensors": facts})
        else:
            _print_stats(found, len(bad))


def _facts(one: TensorStats) -> Mapping[str, object]:
    return asdict(one)


def _print_stats(found: tuple[TensorStats, ...], num_bad: int) -> None:
    output.print_table(
        ("NAME", "DTYPE", "MIN", "MAX", "MEAN", "RMS", "ZEROS", "NAN", "INF"),
        [
            (
                one.name,
                one.dtype,
                *(_number(value) for value in (one.min, one.max, one.mean, one.rms)),
                *("-" if num is None else str(num) for num in (one.zeros, one.nan, one.inf)),
            )
            for one in found
        ],
        right=frozenset(range(2, 9)),
    )
    click.echo(f"{len(found)} tensors, {num_bad} with a nan or an infinity")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


@click.command()
@shared_options.path
@shared_options.selected
@shared_options.json
def layout(path: str, *, include: tuple[str, ...], exclude: tuple[str, ...], as_json: bool) -> None:
    """Show which file and rank holds what, the bytes of each rank, and how even that is.

    With a glob, also which part of which tensor lies in which file: '*' is all.

    \b
    dist-ckpt layout runs/a@latest
    dist-ckpt layout runs/a@latest -g 'model.*.weight'
    """  # noqa: D301 - click knows the backspace
    found = layout_of(path, include=include or None, exclude=exclude or None)
    if as_json:
        output.print_json("layout", _layout_facts(found))
        return
    rows = []
    for file in found.files:
        rows.append((file.name, str(file.rank), size(file.nbytes), f"{file.num_shards} shards"))
        rows += [
            ("", "", size(one.nbytes), f"{one.tensor} {_cell_text(one)}") for one in file.shards
        ]
    output.print_table(("FILE", "RANK", "SIZE", "HOLDS"), rows, right=frozenset({1, 2}))
    ranks = found.nbytes_by_rank
    most = max(range(len(ranks)), key=ranks.__getitem__)
    click.echo(
        f"{len(ranks)} ranks, {size(sum(ranks))}; the most is {size(ranks[most])} on rank {most}, "
        f"{found.imbalance:.2f} times the mean"
    )


def _cell_text(one: ShardPlacement) -> str:
    cell = one.cell
    return str(cell) if isinstance(cell, Region) else f"elements {cell}"


def _layout_facts(found: CheckpointLayout) -> dict[str, object]:
    return {
        "path": found.path,
        "nbytes_by_rank": list(found.nbytes_by_rank),
        "imbalance": found.imbalance,
        "files": [
            {
                "name": file.name,
                "rank": file.rank,
                "component": file.component,
                "nbytes": file.nbytes,
                "num_shards": file.num_shards,
                "shards": [
                    {"tensor": one.tensor, "nbytes": one.nbytes, **_cell_facts(one)}
                    for one in file.shards
                ],
            }
            for file in found.files
        ],
    }


def _cell_facts(one: ShardPlacement) -> dict[str, object]:
    cell = one.cell
    if isinstance(cell, Region):
        return {"offset": list(cell.offset), "shape": list(cell.shape)}
    return {"start": cell.start, "stop": cell.stop}
