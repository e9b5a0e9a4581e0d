"""The commands for files of other systems: import, export. A new format is a line in each table."""

from __future__ import annotations

import click

from dist_ckpt.cli import output
from dist_ckpt.format.catalog_json import MAX_WORLD_SIZE
from dist_ckpt.format.index import MAX_STEP
from dist_ckpt.interop import imports, shrew
from dist_ckpt.reports import size

_IMPORTS = {"dcp": imports.from_dcp, "hf": imports.from_hf, "torch": imports.from_torch}
_EXPORTS = {"shrew": shrew.export_file}


@click.command("import")
@click.option(
    "--from",
    "from_",
    type=click.Choice([*_IMPORTS, "shrew"]),
    required=True,
    help="What SOURCE is.",
)
@click.argument("source", type=click.Path())
@click.argument("target", type=click.Path())
@click.option(
    "--ranks",
    type=click.IntRange(1, MAX_WORLD_SIZE),
    help="Cut every tensor evenly for so many ranks.  [default: 1]",
)
@click.option(
    "--step", type=click.IntRange(0, MAX_STEP), help="Of a run, what it is a checkpoint of."
)
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace the checkpoint at TARGET once the new one is durable.",
)
def import_(
    from_: str,
    source: str,
    target: str,
    *,
    ranks: int | None,
    step: int | None,
    overwrite: bool,
) -> None:
    """Make the checkpoint TARGET of SOURCE, which another system has written.

    SOURCE is a folder of torch.distributed.checkpoint (dcp), a folder of Hugging Face or a
    safetensors file (hf), or a file of torch.save (torch). A file of a model's tensors alone
    becomes {"model": {name: tensor}}.

    A .shrew file becomes {"model": {name: tensor}}; one of version 2 has "optim", "epoch",
    "global_step", "best_loss" and "loss_history" besides. Nothing in a file is executed.

    \b
    dist-ckpt import --from dcp old/step-500 runs/a/step-00000500 --step 500 --ranks 8
    dist-ckpt import --from torch old.pt runs/b/step-00000500 --step 500
    """  # noqa: D301 - click knows the backspace
    if from_ == "shrew":
        if ranks is not None or step is not None:
            raise click.UsageError(
                "a .shrew file is imported for one rank, of the step that it says: reshard it then"
            )
        report = shrew.import_file(source, target, overwrite=overwrite)
    else:
        make = _IMPORTS[from_]
        with output.progress("import") as update:
            report = make(
                source,
                target,
                world_size=ranks or 1,
                step=step,
                overwrite=overwrite,
                progress=update,
            )
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
