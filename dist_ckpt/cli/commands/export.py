"""The command `export`: write a checkpoint for another system.

A format is a line in a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import click

from dist_ckpt.cli import output
from dist_ckpt.cli import shared_options as options
from dist_ckpt.cli.shared_options import names_in
from dist_ckpt.interop.hf import export as hf
from dist_ckpt.interop.shrew import files
from dist_ckpt.reports import size
from dist_ckpt.tools.rewrite.dry_run import DryRun


@contextmanager
def _needing_torch(what: str) -> Iterator[None]:
    """Do what needs torch; without that say what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(f'{what} needs torch: pip install "dist-ckpt[torch]"') from None


def _dcp_export() -> Any:
    from dist_ckpt.interop.dcp import export as dcp_export  # noqa: PLC0415  (it needs torch)

    return dcp_export


def _torch_export() -> Any:
    from dist_ckpt.interop.torch_save import export as torch_export  # noqa: PLC0415  (it needs torch)

    return torch_export


def _export_dcp(source: str, file: str, *, overwrite: bool, **given: Any) -> int:
    _check_overwrite(overwrite=overwrite)
    nbytes: int = _dcp_export().export_folder(source, file, **given)
    return nbytes


def _plan_export_dcp(source: str, file: str, *, overwrite: bool, **given: Any) -> DryRun:
    _check_overwrite(overwrite=overwrite)
    plan: DryRun = _dcp_export().plan_export(source, file, **given)
    return plan


def _check_overwrite(*, overwrite: bool) -> None:
    if overwrite:
        raise click.UsageError("--overwrite is not for --format dcp: remove the folder first")


def _export_torch(source: str, file: str, **given: Any) -> int:
    nbytes: int = _torch_export().export_file(source, file, **given)
    return nbytes


def _plan_export_torch(source: str, file: str, **given: Any) -> DryRun:
    plan: DryRun = _torch_export().plan_export_file(source, file, **given)
    return plan


@dataclass(frozen=True, slots=True)
class _ExportFormat:
    """What writes a format, what says what that would write, and which options both take."""

    write: Callable[..., int]
    plan_write: Callable[..., DryRun]
    options: frozenset[str]


_GLOBS = frozenset({"include", "exclude"})
_OF_HF = _GLOBS | {"only", "dtype", "max_shard_size", "reflink"}
_EXPORTS: Mapping[str, _ExportFormat] = {
    "shrew": _ExportFormat(files.export_file, files.plan_export_file, _GLOBS | {"version"}),
    "hf": _ExportFormat(hf.export_folder, hf.plan_export, _OF_HF),
    "dcp": _ExportFormat(_export_dcp, _plan_export_dcp, _GLOBS),
    "torch": _ExportFormat(_export_torch, _plan_export_torch, _GLOBS | {"only"}),
}


@click.command()
@click.option(
    "--format", "format_", type=click.Choice([*_EXPORTS]), required=True, help="What FILE is to be."
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
    chosen = _EXPORTS[format_]
    given = {name: value for name, value in of_format.items() if value not in (None, (), False)}
    for name in given.keys() - chosen.options:
        raise click.UsageError(f"--{name.replace('_', '-')} is not for --format {format_}")
    what = "--dtype" if "dtype" in given else f"--format {format_}"
    if dry_run:
        with _needing_torch(what):
            plan = chosen.plan_write(source, file, overwrite=overwrite, **given)
        output.print_dry_run(plan, as_json=as_json)
        return
    with output.progress("export") as update, _needing_torch(what):
        nbytes = chosen.write(source, file, overwrite=overwrite, progress=update, **given)
    if as_json:
        output.print_json("export", {"path": file, "format": format_, "nbytes": nbytes})
    else:
        click.echo(f"{output.printable(file)}: {size(nbytes)}")
