"""The command `import`: make a checkpoint from files of another system.

A format is a line in a table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import click

from dist_ckpt.cli import output
from dist_ckpt.cli import shared_options as options
from dist_ckpt.core.format.index.catalog_json import MAX_WORLD_SIZE
from dist_ckpt.core.format.index.index import MAX_STEP
from dist_ckpt.interop import imports
from dist_ckpt.interop.shrew import files
from dist_ckpt.reports import SaveReport, size

_IMPORTS: Mapping[str, Callable[..., SaveReport]] = {
    "dcp": imports.from_dcp,
    "hf": imports.from_hf,
    "torch": imports.from_torch,
    "lightning": imports.from_lightning,
    "accelerate": imports.from_accelerate,
    "deepspeed": imports.from_deepspeed,
    "megatron": imports.from_megatron,
}


@click.command("import")
@click.option(
    "--from",
    "from_",
    type=click.Choice([*_IMPORTS, "shrew"]),
    required=True,
    help="What SOURCE is.",
)
@click.argument("source", type=options.PATH)
@click.argument("target", type=options.PATH)
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
@click.option(
    "-g", "--include", multiple=True, help="Glob of names in TARGET to write; may be repeated."
)
@click.option(
    "--exclude",
    multiple=True,
    help="Glob of names in TARGET to leave out, and not to look into; may be repeated.",
)
@options.dry_run
@options.json
def import_(  # noqa: PLR0913 - the options of the command
    from_: str,
    source: str,
    target: str,
    *,
    ranks: int | None,
    step: int | None,
    overwrite: bool,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
) -> None:
    """Make the checkpoint TARGET of SOURCE, which another system has written.

    SOURCE is a folder of torch.distributed.checkpoint (dcp), a folder of Hugging Face or a
    safetensors file (hf), a file of torch.save (torch), a checkpoint of Lightning (lightning), a
    folder of accelerate's save_state (accelerate), of DeepSpeed's ZeRO (deepspeed), or of
    Megatron's torch_dist (megatron). A file of a model's tensors alone becomes
    {"model": {name: tensor}}.

    A .shrew file becomes {"model": {name: tensor}}; one of version 2 has "optim", "epoch",
    "global_step", "best_loss" and "loss_history" besides. Nothing in a file is executed.

    \b
    dist-ckpt import --from dcp old/step-500 runs/a/step-00000500 --step 500 --ranks 8
    dist-ckpt import --from torch old.pt runs/b/step-00000500 --step 500
    dist-ckpt import --from lightning epoch=3.ckpt runs/c/step-00000500 --exclude hyper_parameters
    """  # noqa: D301 - click knows the backspace
    if from_ == "shrew":
        if ranks is not None or step is not None or include or exclude:
            raise click.UsageError(
                "a .shrew file is imported whole, for one rank, of the step that it says: reshard "
                "it then"
            )
        if dry_run:
            plan = files.plan_import_file(source, target, overwrite=overwrite)
            output.print_dry_run(plan, as_json=as_json)
            return
        with output.progress("import") as update:
            report = files.import_file(source, target, overwrite=overwrite, progress=update)
    else:
        given = imports.ImportOptions(
            world_size=ranks or 1,
            step=step,
            include=include or None,
            exclude=exclude,
            overwrite=overwrite,
        )
        if dry_run:
            plan = imports.plan_import(from_, source, target, **given)
            output.print_dry_run(plan, as_json=as_json)
            return
        with output.progress("import") as update:
            report = _IMPORTS[from_](source, target, **given, progress=update)
    summary = f"{report.num_tensors} tensors, {size(report.nbytes)} in {report.num_files} files"
    output.print_written("import", report, f"{report.path}: {summary}", as_json=as_json)
