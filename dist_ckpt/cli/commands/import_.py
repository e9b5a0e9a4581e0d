"""The command `import`: make a checkpoint from files of another system."""

from __future__ import annotations

from typing import Unpack

import click

from dist_ckpt.cli import output, shared_options
from dist_ckpt.cli.results import ImportResult
from dist_ckpt.core.format.index.index import MAX_STEP
from dist_ckpt.core.format.index.index_json import MAX_WORLD_SIZE
from dist_ckpt.interop import imports
from dist_ckpt.interop.shrew import files

_FORMATS = (
    *("auto", "dcp", "hf", "torch", "lightning", "accelerate", "deepspeed", "megatron", "shrew"),
)


@click.command("import")
@click.option(
    "--from",
    "from_",
    type=click.Choice(_FORMATS),
    default="auto",
    show_default=True,
    help="The format of SOURCE; auto finds it by the files.",
)
@click.argument("source", type=shared_options.PATH)
@click.argument("target", type=shared_options.PATH)
@click.option(
    "--ranks",
    type=click.IntRange(1, MAX_WORLD_SIZE),
    help="Split every tensor evenly across this many ranks.  [default: 1]",
)
@click.option(
    "--step", type=click.IntRange(0, MAX_STEP), help="The step of the checkpoint in its run."
)
@shared_options.overwrite
@shared_options.repeatable_option(
    "-g", "--include", help="Write only names that match this glob. May be repeated."
)
@shared_options.repeatable_option(
    "--exclude", help="Leave out names that match this glob. May be repeated."
)
@click.option(
    "--dequantize",
    is_flag=True,
    default=None,
    help="Multiply 8-bit weights by their scales, into float32.",
)
@shared_options.dry_run
@shared_options.json
def import_(
    from_: str,
    source: str,
    target: str,
    *,
    ranks: int | None,
    dry_run: bool,
    as_json: bool,
    **options: Unpack[imports.ImportOptions],
) -> None:
    """Write the checkpoint TARGET from the SOURCE of another system.

    \b
    dcp         a folder of torch.distributed.checkpoint
    hf          a Hugging Face folder, or a safetensors file
    torch       a file of torch.save
    lightning   a checkpoint of Lightning
    accelerate  a folder of accelerate's save_state
    deepspeed   a folder of DeepSpeed's ZeRO
    megatron    a folder of Megatron's torch_dist
    shrew       a .shrew file

    A file with only the tensors of a model becomes {"model": {name: tensor}}. A .shrew file of
    version 2 also has "optim", "epoch", "global_step", "best_loss" and "loss_history". Nothing in a
    file is executed.

    \b
    dist-ckpt import old/global_step100 runs/a/step-00000100
    dist-ckpt import --from dcp old/step-500 runs/a/step-00000500 --step 500 --ranks 8
    dist-ckpt import --from torch old.pt runs/b/step-00000500 --step 500
    dist-ckpt import --from lightning epoch=3.ckpt runs/c/step-00000500 --exclude hyper_parameters
    """
    if from_ == "auto":
        from_ = imports.detect_format(source)
        click.echo(f"{output.printable(source)}: the format is {from_}", err=True)
    if from_ == "shrew":
        overwrite = options.pop("overwrite")
        if ranks is not None or any(value is not None for value in options.values()):
            raise click.UsageError(
                "a .shrew file is imported whole, for one rank, with the step in the file: leave "
                "out --ranks, --step, --include, --exclude and --dequantize. Reshard the "
                "checkpoint if needed"
            )
        plan = files.plan_import_file(source, target, overwrite=overwrite)
    else:
        options["world_size"] = ranks or 1
        options["dequantize"] = bool(options.get("dequantize"))
        plan = imports.plan_import(from_, source, target, options)
    output.write_checkpoint(plan, ImportResult, dry_run=dry_run, as_json=as_json)
