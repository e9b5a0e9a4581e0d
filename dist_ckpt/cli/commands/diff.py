"""The command `diff`: show the differences of two checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from dist_ckpt.cli import output, shared_options
from dist_ckpt.cli.results import DiffResult, Pair, extend
from dist_ckpt.message_text import format_count, listed
from dist_ckpt.tools.inspect.diff import Difference
from dist_ckpt.tools.inspect.diff import diff as differ


@click.command()
@click.argument("a", type=shared_options.PATH)
@click.argument("b", type=shared_options.PATH)
@click.option("--values", is_flag=True, help="Read and compare every value, bit for bit.")
@click.option("--rtol", type=float, help="With --values: tolerance relative to the value in B.")
@click.option("--atol", type=float, help="With --values: absolute tolerance.")
@shared_options.selection
@shared_options.json
def diff(a: str, b: str, *, as_json: bool, **options: Any) -> None:
    """Show the differences between the checkpoints A and B.

    The command compares configurations, names, dtypes, shapes and plain values. It compares tensors
    by their stored digests. It counts tensors that are cut differently, and files of other systems
    have no digests; --values compares all of them. Step, metadata, attached files and per-rank
    values are never compared. Exit code 0 if all else is equal, 1 if something differs, or if a
    tensor was not compared.

    \b
    dist-ckpt diff runs/a@1000 runs/a@latest
    dist-ckpt diff runs/a@latest resharded --values
    dist-ckpt diff runs/a@latest runs/b@latest --values --rtol 1e-5 -g model
    """
    with output.progress("diff") as update:
        difference = differ(a, b, **options, progress=update)
    is_equal = difference.same and not difference.not_compared
    with output.exit_with(output.FINE if is_equal else output.PROBLEM_FOUND):
        if as_json:
            parts = {part: _pairs(getattr(difference, part)) for part in _PAIRS}
            output.print_json(extend(difference, DiffResult, **parts))
        else:
            for line in _diff_lines(difference):
                click.echo(output.printable(line))


_PAIRS = ("config", "changed", "objects")
_NOTHING = "nothing differs; step, metadata, attached files and per-rank values are not compared"


def _pairs(differing: Mapping[str, tuple[str, str]]) -> dict[str, Pair]:
    return {name: Pair(a=a, b=b) for name, (a, b) in differing.items()}


def _diff_lines(difference: Difference) -> list[str]:
    lines = [f"config.{name}: {a} -> {b}" for name, (a, b) in difference.config.items()]
    lines += [f"only in {difference.a}: {name}" for name in difference.removed]
    lines += [f"only in {difference.b}: {name}" for name in difference.added]
    lines += [f"{name}: {a} -> {b}" for name, (a, b) in difference.changed.items()]
    lines += [f"{name}: {a} -> {b}" for name, (a, b) in difference.objects.items()]
    for tensor in difference.values or ():
        most = "" if tensor.max_difference is None else f", by {tensor.max_difference:.6g} at most"
        lines.append(f"{tensor.name}: {tensor.num_differing} of {tensor.numel} values differ{most}")
    of = f"of {format_count(difference.num_tensors, 'tensor')}"
    if digests := difference.digests:
        text = f"the values of {len(digests)} {of} differ: {listed(digests)}"
        lines.append(f"{text}; --values shows by how much")
    if num := len(difference.not_compared):
        why = "not compared (cut differently, or without digests)"
        lines.append(f"{num} {of} {why}: --values compares them")
    return lines or [_NOTHING]
