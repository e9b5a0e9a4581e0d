"""The command `export`: write a checkpoint for another system."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import click

from dist_ckpt.cli import output, shared_options
from dist_ckpt.cli.results import ExportResult
from dist_ckpt.core.planning.sharding_config import check_unique_keys
from dist_ckpt.core.state.binding.sources.rename import rules_from_json
from dist_ckpt.interop.hf.export import DEFAULT_SHARD_SIZE
from dist_ckpt.interop.registry import reader_module
from dist_ckpt.message_text import format_size
from dist_ckpt.tools.new_files import WritePlan

# The module of each format in `interop/`, its function that plans, and the options that it takes.
_GLOBS = frozenset({"include", "exclude"})
_NAMES = _GLOBS | {"rename"}
_HF_OPTIONS = _NAMES | {"only", "dtype", "max_shard_size", "reflink", "adapter", "name"}
_FORMATS: Mapping[str, tuple[str, str, frozenset[str]]] = {
    "shrew": ("shrew.files", "plan_export_file", _GLOBS | {"version", "overwrite"}),
    "hf": ("hf.export", "plan_export", _HF_OPTIONS | {"overwrite"}),
    "dcp": ("dcp.export", "plan_export", _NAMES),
    "torch": ("torch_save.export", "plan_export_file", _NAMES | {"only", "overwrite"}),
    "lightning": ("frameworks.write_files", "plan_lightning", frozenset({"exclude", "overwrite"})),
    "accelerate": ("frameworks.write_files", "plan_accelerate", frozenset({"exclude"})),
}


def _read_rules(context: click.Context, option: click.Parameter, file: str | None) -> object:
    del context, option
    if file is None:
        return None
    try:
        text = Path(file).read_text(encoding="utf-8")
        return rules_from_json(json.loads(text, object_pairs_hook=check_unique_keys))
    except (OSError, TypeError, ValueError, RecursionError) as error:  # such as a JSONDecodeError
        raise click.BadParameter(f"{file}: {error}") from None


@click.command()
@click.option(
    "--format", "format_", type=click.Choice([*_FORMATS]), required=True, help="The format of FILE."
)
@click.argument("source", type=shared_options.PATH)
@click.argument("file", type=shared_options.PATH)
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace FILE once the new one is durable. Not for dcp and accelerate.",
)
@click.option(
    "--version",
    type=click.IntRange(1, 2),
    help="shrew: the version of the file; 1 has only the model.  [default: as needed]",
)
@click.option(
    "--only",
    shell_complete=shared_options.complete_names,
    help="hf, torch: the component to write, or the names below one, such as model.module.  "
    "[default: model for hf, all for torch]",
)
@click.option("--dtype", help="hf: convert floating-point tensors to this dtype, such as bf16.")
@click.option(
    "--max-shard-size",
    help=f"hf: maximum data per file, such as 500MiB.  [default: {DEFAULT_SHARD_SIZE}]",
)
@shared_options.selection
@click.option(
    "--rename",
    type=shared_options.PATH,
    callback=_read_rules,
    help="hf, dcp, torch: a JSON file with rules from names to new names, also with operations "
    "such as stack and transpose. Other options then take the new names.",
)
@click.option("--adapter", help="hf: write only this adapter of peft, as its library does.")
@click.option("--name", help="hf: the name of the files.  [default: model, or adapter_model]")
@click.option(
    "--reflink", is_flag=True, help="hf: share data blocks with SOURCE if the file system can."
)
@shared_options.dry_run
@shared_options.json
def export(
    format_: str, source: str, file: str, *, dry_run: bool, as_json: bool, **of_format: object
) -> None:
    """Write the checkpoint SOURCE as FILE, for another system.

    \b
    hf     a folder of safetensors files with the model, for transformers
    dcp    a folder for torch.distributed.checkpoint.load
    torch  a file for torch.load
    shrew  a .shrew file
    lightning   a .ckpt file, for Trainer.fit(ckpt_path=FILE)
    accelerate  a folder for Accelerator.load_state

    If the format cannot hold a value, the error names the value. With --overwrite, other files in a
    folder of hf stay, such as config.json. The export of an imported .shrew file has the same
    bytes.

    \b
    dist-ckpt export --format shrew runs/a@latest training.shrew
    dist-ckpt export --format hf --dtype bf16 runs/a@latest exported
    dist-ckpt export --format dcp runs/a@latest for-dcp
    dist-ckpt export --format torch --only model runs/a@latest model.pt
    """
    module, function, names = _FORMATS[format_]
    options = {name: value for name, value in of_format.items() if value not in (None, (), False)}
    for name in options.keys() - names:
        way = ": remove the folder first" if name == "overwrite" else ""
        raise click.UsageError(f"--{name.replace('_', '-')} is not for --format {format_}{way}")
    with output.needs_torch("--dtype" if "dtype" in options else f"--format {format_}"):
        plan: WritePlan[int] = getattr(reader_module(module), function)(source, file, **options)
        nbytes = output.run_plan(plan, "export", dry_run=dry_run, as_json=as_json)
    if nbytes is not None:
        document = ExportResult(path=file, format=format_, nbytes=nbytes)
        output.print_result(document, f"{file}: {format_size(nbytes)}", as_json=as_json)
