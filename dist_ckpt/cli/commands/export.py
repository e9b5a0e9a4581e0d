"""The command `export`: write a checkpoint for another system."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import click

from dist_ckpt.cli import output
from dist_ckpt.cli import shared_options as options
from dist_ckpt.cli.shared_options import names_in
from dist_ckpt.interop.hf import export as hf
from dist_ckpt.interop.shrew import files
from dist_ckpt.reports import size
from dist_ckpt.tools.rewrite.write_plan import WritePlan


@contextmanager
def _needing_torch(what: str) -> Iterator[None]:
    """Do what needs torch; without that say what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(f'{what} needs torch: pip install "dist-ckpt[torch]"') from None


def _plan_dcp(source: str, file: str, *, overwrite: bool, **options: Any) -> WritePlan[int]:
    from dist_ckpt.interop.dcp.export import plan_export  # noqa: PLC0415  (it needs torch)

    if overwrite:
        raise click.UsageError("--overwrite is not for --format dcp: remove the folder first")
    return plan_export(source, file, **options)


def _plan_torch(source: str, file: str, **options: Any) -> WritePlan[int]:
    from dist_ckpt.interop.torch_save.export import plan_export_file  # noqa: PLC0415  (it needs torch)

    return plan_export_file(source, file, **options)


# The plan of each format, and the options that it takes.
_GLOBS = frozenset({"include", "exclude"})
_HF_OPTIONS = _GLOBS | {"only", "dtype", "max_shard_size", "reflink"}
_FORMATS: Mapping[str, tuple[Callable[..., WritePlan[int]], frozenset[str]]] = {
    "shrew": (files.plan_export_file, _GLOBS | {"version"}),
    "hf": (hf.plan_export, _HF_OPTIONS),
    "dcp": (_plan_dcp, _GLOBS),
    "torch": (_plan_torch, _GLOBS | {"only"}),
}


@click.command()
@click.option(
    "--format", "format_", type=click.Choice([*_FORMATS]), required=True, help="What FILE is to be."
)
@click.argument("source", type=options.PATH)
@click.argument("file", type=options.PATH)
@click.option(
    "--overwrite", is_flag=True, help="Replace FILE once the new one is durable; not for dcp."
)
@click.option(
    "--version",
    type=click.IntRange(1, 2),
    help="shrew: of the file; 1 takes the model alone.  [default: the one that fits]",
)
@click.option(
    "--only",
    shell_complete=names_in,
    help="hf, torch: the component to write, or what lies below a name in it, such as "
    "model.module.  [default: model for hf, all for torch]",
)
@click.option("--dtype", help="hf: convert floating tensors to this, such as bf16.")
@click.option("--max-shard-size", help="hf: most data of a file, as 500MiB.  [default: 5GB]")
@options.selected
@click.option(
    "--reflink", is_flag=True, help="hf: share the data with SOURCE where the file system can."
)
@options.dry_run
@options.json
def export(
    format_: str,
    source: str,
    file: str,
    *,
    overwrite: bool,
    dry_run: bool,
    as_json: bool,
    **of_format: object,
) -> None:
    """Write the checkpoint SOURCE as FILE, for another system.

    What FILE cannot hold is refused by name. As shrew, it has of an imported checkpoint the same
    bytes as the file that was imported. As hf, it is a folder of safetensors files with the model,
    as transformers reads it; with --overwrite its other files stay, such as config.json. As dcp, it
    is a folder that torch.distributed.checkpoint.load reads. As torch, it is a file for torch.load.

    \b
    dist-ckpt export --format shrew runs/a@latest training.shrew
    dist-ckpt export --format hf --dtype bf16 runs/a@latest exported
    dist-ckpt export --format dcp runs/a@latest for-dcp
    dist-ckpt export --format torch --only model runs/a@latest model.pt
    """  # noqa: D301 - click knows the backspace
    make_plan, names = _FORMATS[format_]
    given = {name: value for name, value in of_format.items() if value not in (None, (), False)}
    for name in given.keys() - names:
        raise click.UsageError(f"--{name.replace('_', '-')} is not for --format {format_}")
    with _needing_torch("--dtype" if "dtype" in given else f"--format {format_}"):
        plan = make_plan(source, file, overwrite=overwrite, **given)
        nbytes = output.run_plan(plan, "export", dry_run=dry_run, as_json=as_json)
    if nbytes is None:
        return
    if as_json:
        output.print_json("export", {"path": file, "format": format_, "nbytes": nbytes})
    else:
        click.echo(f"{output.printable(file)}: {size(nbytes)}")
