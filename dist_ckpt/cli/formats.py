"""The commands for files of other systems: import, export. A new format is a line in each table."""

from __future__ import annotations

import click

from dist_ckpt.cli import output
from dist_ckpt.interop import shrew
from dist_ckpt.reports import size

_IMPORTS = {"shrew": shrew.import_file}
_EXPORTS = {"shrew": shrew.export_file}


@click.command("import")
@click.option(
    "--from", "from_", type=click.Choice([*_IMPORTS]), required=True, help="What FILE is."
)
@click.argument("file", type=click.Path())
@click.argument("target", type=click.Path())
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace the checkpoint at TARGET once the new one is durable.",
)
def import_(from_: str, file: str, target: str, *, overwrite: bool) -> None:
    """Make the checkpoint TARGET of FILE, which another system has written.

    A .shrew file becomes {"model": {name: tensor}}; one of version 2 has "optim", "epoch",
    "global_step", "best_loss" and "loss_history" besides. Nothing in a file is executed.

    \b
    dist-ckpt import --from shrew training.shrew runs/a/step-00000500
    """  # noqa: D301 - click knows the backspace
    report = _IMPORTS[from_](file, target, overwrite=overwrite)
    click.echo(
        f"{output.printable(report.path)}: {report.num_tensors} tensors, {size(report.nbytes)} "
        f"in {report.num_files} files"
    )


@click.command()
@click.option(
    "--format", "format_", type=click.Choice([*_EXPORTS]), required=True, help="What FILE is to be."
)
@click.argument("source", type=click.Path())
@click.argument("file", type=click.Path())
@click.option(
    "--version",
    type=click.IntRange(1, 2),
    help="Of a .shrew file; 1 takes the model alone.  [default: the one that fits]",
)
@click.option("--overwrite", is_flag=True, help="Replace FILE once the new one is durable.")
def export(format_: str, source: str, file: str, *, version: int | None, overwrite: bool) -> None:
    """Write the checkpoint SOURCE as FILE, for another system.

    What FILE cannot hold is refused by name. Of an imported checkpoint it has the same bytes as
    the file that was imported.

    \b
    dist-ckpt export --format shrew runs/a@latest training.shrew
    """  # noqa: D301 - click knows the backspace
    nbytes = _EXPORTS[format_](source, file, version=version, overwrite=overwrite)
    click.echo(f"{output.printable(file)}: {size(nbytes)}")
