"""The command `diff`: show the differences of two checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from dist_ckpt.cli import output, shared_options
from dist_ckpt.cli.results import DiffResult, Pair, extend
from dist_ckpt.tools.inspect.diff import Difference
from dist_ckpt.tools.inspect.diff import diff as differ


@click.command()
@click.argument("a", type=shared_options.PATH)
@click.argument("b", type=shared_options.PATH)
@click.option("--values", is_flag=True, help="Also compare every value, bit for bit.")
@click.option("--rtol", type=float, help="With --values: tolerance relative to the value in B.")
@click.option("--atol", type=float, help="With --values: absolute tolerance.")
@shared_options.selection
@shared_options.json
def diff(a: str, b: str, *, as_json: bool, **options: Any) -> None:
    """Show the differences between the checkpoints A and B.

    The command compares configurations, names, dtypes and shapes; with --values also the values.
    The layouts do not matter. Exit code 0 if A and B are equal, 1 if not.

    \b
    dist-ckpt diff runs/a@1000 runs/a@latest
    dist-ckpt diff runs/a@latest resharded --values
    dist-ckpt diff runs/a@latest runs/b@latest --values --rtol 1e-5 -g model
    """
    with output.progress("diff") as update:
        difference = differ(a, b, **options, progress=update)
    with output.exit_with(output.FINE if difference.same else output.FINDING):
        if as_json:
            objects = None if difference.objects is None else _pairs(difference.objects)
            config, changed = _pairs(difference.config), _pairs(difference.changed)
            document = extend(
                difference, DiffResult, config=config, changed=changed, objects=objects
            )
            output.print_json(document)
        else:
            for line in _diff_lines(difference):
                click.echo(output.printable(line))


def _pairs(differing: Mapping[str, tuple[str, str]]) -> dict[str, Pair]:
    return {name: Pair(a=a, b=b) for name, (a, b) in differing.items()}


def _diff_lines(difference: Difference) -> list[str]:
    lines = [f"config.{name}: {a} -> {b}" for name, (a, b) in difference.config.items()]
    lines += [f"only in {difference.a}: {name}" for name in difference.removed]
    lines += [f"only in {difference.b}: {name}" for name in difference.added]
    lines += [f"{name}: {a} -> {b}" for name, (a, b) in difference.changed.items()]
    lines += [f"{name}: {a} -> {b}" for name, (a, b) in (difference.objects or {}).items()]
    for tensor in difference.values or ():
        most = "" if tensor.max_difference is None else f", by {tensor.max_difference:.6g} at most"
        lines.append(f"{tensor.name}: {tensor.num_differing} of {tensor.numel} values differ{most}")
    hint = "" if difference.values is not None else "; values were not compared, see --values"
    return lines or [f"nothing differs{hint}"]
