"""Folders of safetensors files as Hugging Face reads them, out of a checkpoint.

    hf.export_folder("runs/a@latest", "exported", dtype="bf16")
    model.config.save_pretrained("exported")
    AutoModelForCausalLM.from_pretrained("exported")

The other way needs no function: `dc.load`, `dc.open` and `dc.reshard` read such a folder where it
lies, as `{"model": ...}`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict, Unpack

from dist_ckpt.core.commit import attempts
from dist_ckpt.core.format.index.index import Index
from dist_ckpt.core.planning.selection import selection_of
from dist_ckpt.core.storage import Storage, open_storage, real_path
from dist_ckpt.interop.hf.export_files import ExportReader
from dist_ckpt.interop.hf.export_plan import (
    ExportedFile,
    chosen,
    dtype_of,
    index_of,
    nbytes_of,
    packed,
)
from dist_ckpt.interop.hf.read import INDEX, MODEL
from dist_ckpt.interop.registry import open_source
from dist_ckpt.interop.writers.local_files import check_outside
from dist_ckpt.interop.writers.new_folder import check_replaceable, new_folder
from dist_ckpt.reports import CopyProgress, Progress
from dist_ckpt.runs.selectors import resolve
from dist_ckpt.tools.rewrite.dry_run import DryRun

if TYPE_CHECKING:
    import torch

__all__ = ["export_folder"]


class ExportOptions(TypedDict, total=False):
    """What `export_folder` takes, but for its progress."""

    only: str
    dtype: str | torch.dtype | None
    max_shard_size: int | str
    include: str | Sequence[str] | None
    exclude: str | Sequence[str] | None
    overwrite: bool
    reflink: bool


def export_folder(  # noqa: PLR0913 - a front door
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    only: str = MODEL,
    dtype: str | torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    overwrite: bool = False,
    reflink: bool = False,
    progress: Progress | None = None,
) -> int:
    """Write the model in the checkpoint at `source` as a folder of safetensors files.

    As transformers does: `model-00001-of-0000n.safetensors` with an index, or one
    `model.safetensors`; names without the component's, each tensor whole in one file, and of tied
    tensors the first name alone, which `from_pretrained` and `dc.load` tie again. No config.json.
    One process calls it, with some tens of MiB however large the tensors are, without torch; every
    block that is read is checked. Returns how many bytes the files have.

    `source` may name one of a run, such as "runs/a@latest". `only` is the component, or a name
    within one, that is written. `dtype` ("bf16", "float16", ...) converts floating tensors, as
    `cast` of a load does. `max_shard_size` bounds the data of a file. `include` and `exclude` are
    globs on names in the checkpoint. With `reflink`, what is whole in a file of the checkpoint that
    holds nothing else is cloned where the file system can, else copied by the kernel; then a file
    may be larger than `max_shard_size`. `progress` is called with the bytes done, and those in all.

    On return the folder is durable; until then it has another name, and if this raises there is
    none. `overwrite` replaces one that an export has made, and leaves its other files in it. Raises
    IncompatibleError for what such files cannot hold, with all names: values that are no tensors,
    quantized tensors, dtypes that they lack, values that a dtype would make infinite. ExistsError
    if something is there; otherwise what `dc.open` and reading raise.
    """
    options = ExportOptions(
        only=only,
        dtype=dtype,
        max_shard_size=max_shard_size,
        include=include,
        exclude=exclude,
        overwrite=overwrite,
        reflink=reflink,
    )
    with _planned(source, folder, options) as plan:
        tell = CopyProgress(sum(file.data_nbytes for file in plan.files), progress)
        writer = ExportReader(plan.storage, plan.attempt, plan.index, tell)
        with new_folder(plan.target, plan.path, overwrite=overwrite) as new:
            for file in plan.files:
                writer.write(plan.target, new, file)
            nbytes = sum(file.nbytes for file in plan.files)
            if len(plan.files) > 1:
                nbytes += _put_index(plan.target, new, index_of(plan.files))
    return nbytes


def would_export(
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    **options: Unpack[ExportOptions],
) -> DryRun:
    """Return what `export_folder` would write. Nothing is changed. Raises what it does before.

    Whether all values fit into a narrower dtype is seen only as they are converted.
    """
    with _planned(source, folder, options) as plan:
        files = {file.name: file.nbytes for file in plan.files}
        if len(files) > 1:
            files[INDEX] = len(index_of(plan.files))
        return DryRun(plan.path, files, plan.replaces)


@dataclass(frozen=True, slots=True)
class _ExportPlan:
    """What is read, which files are made of it, and where; `replaces` are those that then go."""

    storage: Storage
    attempt: str
    index: Index
    files: tuple[ExportedFile, ...]
    target: Storage
    path: str
    replaces: tuple[str, ...]


@contextmanager
def _planned(
    source: str | os.PathLike[str], folder: str | os.PathLike[str], options: ExportOptions
) -> Iterator[_ExportPlan]:
    """Check all that can be before anything is written."""
    only, reflink = options.get("only", MODEL), options.get("reflink", False)
    selection = selection_of(options.get("include"), options.get("exclude"))
    wanted, most = dtype_of(options.get("dtype")), nbytes_of(options.get("max_shard_size", "5GB"))
    if type(reflink) is not bool:
        raise TypeError(f"reflink={reflink!r}: give True or False")
    if not isinstance(only, str) or not only:
        raise ValueError(f"only={only!r}: give the name of a component")
    storage, path = open_source(resolve(source))
    target, target_path = open_storage(folder)
    target_path = real_path(target_path)
    if target_path != real_path(path):  # a folder of an export may take its own place
        check_outside(real_path(path), target_path)
    stays = check_replaceable(target, target_path, overwrite=options.get("overwrite", False))
    attempt, index = attempts.find(storage, path)
    with attempts.not_found_if_removed(storage, path, attempt):
        tensors = chosen(index.catalog, path, only, selection, wanted)
        folder_of = f"{path}/{attempt.name}"
        reader = ExportReader(storage, folder_of, index, lambda _: None)
        files = packed(tensors, most, reader.whole_files(tensors) if reflink else {})
        there = os.listdir(target_path) if os.path.isdir(target_path) else []
        gone = tuple(f"{target_path}/{name}" for name in sorted({*there} - {*stays}))
        yield _ExportPlan(storage, folder_of, index, files, target, target_path, gone)


def _put_index(storage: Storage, folder: str, data: bytes) -> int:
    file = storage.create(f"{folder}/{INDEX}", len(data))
    try:
        file.write_at(0, data)
        return file.finish()
    finally:
        file.discard()
