"""Folders of safetensors files as Hugging Face reads them, out of a checkpoint.

    hf.export_folder("runs/a@latest", "exported", dtype="bf16")
    model.config.save_pretrained("exported")
    AutoModelForCausalLM.from_pretrained("exported")

The other way needs no function: `dc.load`, `dc.open` and `dc.reshard` read such a folder where it
lies, as `{"model": ...}`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dist_ckpt.commit import attempts
from dist_ckpt.foreign.find import open_source
from dist_ckpt.foreign.safetensors_files import INDEX, MODEL
from dist_ckpt.interop.hf_files import FileWriter
from dist_ckpt.interop.hf_plan import chosen, dtype_of, index_of, nbytes_of, packed
from dist_ckpt.interop.new_folder import check_replaceable, new_folder
from dist_ckpt.planning.selection import selection_of
from dist_ckpt.reports import Progress
from dist_ckpt.runs.selectors import resolve
from dist_ckpt.storage import Storage, open_storage, real_path

if TYPE_CHECKING:
    import torch

__all__ = ["export_folder"]


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
    selection = selection_of(include, exclude)
    wanted, most = dtype_of(dtype), nbytes_of(max_shard_size)
    if type(reflink) is not bool:
        raise TypeError(f"reflink={reflink!r}: give True or False")
    if not isinstance(only, str) or not only:
        raise ValueError(f"only={only!r}: give the name of a component")
    storage, path = open_source(resolve(source))
    target, target_path = open_storage(folder)
    target_path = real_path(target_path)
    if target_path.startswith(f"{real_path(path)}/"):
        raise ValueError(f"the folder {target_path} lies in the source: give another one")
    check_replaceable(target, target_path, overwrite=overwrite)
    attempt, index = attempts.find(storage, path)
    with attempts.while_it_is_there(storage, path, attempt):
        tensors = chosen(index.catalog, path, only, selection, wanted)
        total, done = sum(tensor.nbytes for tensor in tensors), 0

        def tell(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if progress is not None:
                progress(done, total)

        writer = FileWriter(storage, f"{path}/{attempt.name}", index, tell)
        files = packed(tensors, most, writer.whole_files(tensors) if reflink else {})
        with new_folder(target, target_path, overwrite=overwrite) as new:
            for file in files:
                writer.write(target, new, file)
            nbytes = sum(file.nbytes for file in files)
            if len(files) > 1:
                nbytes += _put_index(target, new, index_of(files))
    return nbytes


def _put_index(storage: Storage, folder: str, data: bytes) -> int:
    file = storage.create(f"{folder}/{INDEX}", len(data))
    try:
        file.write_at(0, data)
        return file.finish()
    finally:
        file.discard()
