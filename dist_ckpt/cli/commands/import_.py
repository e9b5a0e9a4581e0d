"""The command `import`: make a checkpoint from files of another system."""

from __future__ import annotations

import click

from dist_ckpt.cli import output, shared_options
from dist_ckpt.core.format.index.catalog_json import MAX_WORLD_SIZE
from dist_ckpt.core.format.index.index import MAX_STEP
from dist_ckpt.interop import imports
from dist_ckpt.interop.shrew import files
from dist_ckpt.reports import size

_FORMATS = (
    *("dcp", "hf", "torch", "lightning", "accelerate", "deepspeed", "megatron"),
    "shrew",
)


@click.command("import")
@click.option(
    "--from",
    "from_",
    type=click.Choice(_FORMATS),
    required=True,
    help="What SOURCE is.",
)
@click.argument("source", type=shared_options.PATH)
@click.argument("target", type=shared_options.PATH)
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
@shared_options.dry_run
@shared_options.json
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
        plan = files.plan_import_file(source, target, overwrite=overwrite)
    else:
        options = imports.ImportOptions(
            world_size=ranks or 1,
            step=step,
            include=include or None,
            exclude=exclude,
            overwrite=overwrite,
        )
        plan = imports.plan_import(from_, source, target, options)
    report = output.run_plan(plan, "import", dry_run=dry_run, as_json=as_json)
    if report is None:
        return
    summary = f"{report.num_tensors} tensors, {size(report.nbytes)} in {report.num_files} files"
    output.print_written("import", report, f"{report.path}: {summary}", as_json=as_json)
