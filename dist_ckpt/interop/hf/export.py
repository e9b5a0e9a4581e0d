"""Export a model in a checkpoint as a Hugging Face folder of safetensors files.

    hf.export_folder("runs/a@latest", "exported", dtype="bf16")
    model.config.save_pretrained("exported")
    AutoModelForCausalLM.from_pretrained("exported")

No import is needed: `dc.load`, `dc.open` and `dc.reshard` read such a folder as `{"model": ...}`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import TYPE_CHECKING

from dist_ckpt.core.checkpoint.open_checkpoint import OpenCheckpoint, TensorWindow
from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.geometry import Region
from dist_ckpt.core.planning.name_selection import parse_selection
from dist_ckpt.core.planning.plan import TensorRequest
from dist_ckpt.core.shard_io.read.open_files import open_file
from dist_ckpt.core.storage import Storage, open_storage, real_path
from dist_ckpt.default_opener import OPENER
from dist_ckpt.errors import CorruptError, ExistsError, IncompatibleError, StorageError, check_flag
from dist_ckpt.interop.hf import read
from dist_ckpt.interop.hf.export_plan import (
    DEFAULT_SHARD_SIZE,
    EXPORT_METADATA,
    WINDOW_NBYTES,
    ExportedFile,
    ExportedTensor,
    encode_index,
    pack_files,
    parse_dtype,
    parse_size,
    select_tensors,
)
from dist_ckpt.interop.new_folder import list_target, new_folder, write_document
from dist_ckpt.interop.readers.virtual_checkpoint import MODEL
from dist_ckpt.interop.registry import HF_INDEX, SAFETENSORS
from dist_ckpt.reports import CopyProgress, Progress
from dist_ckpt.tools.new_file import check_outside
from dist_ckpt.tools.rewrite.write_plan import WritePlan

if TYPE_CHECKING:
    import torch

__all__ = ["export_folder"]

# Error codes of file systems that can neither clone nor copy a file in the kernel.
_CANNOT_CLONE = (
    *(errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP),
    *(errno.EBADF, errno.EPERM, errno.ETXTBSY),
)


def export_folder(  # noqa: PLR0913 - a front door
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    only: str = MODEL,
    dtype: str | torch.dtype | None = None,
    max_shard_size: int | str = DEFAULT_SHARD_SIZE,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    overwrite: bool = False,
    reflink: bool = False,
    progress: Progress | None = None,
) -> int:
    """Write the model in the checkpoint at `source` as a folder of safetensors files.

    Return the size of the files in bytes. The files are those of transformers:
    `model-00001-of-0000n.safetensors` with an index, or one `model.safetensors`; no config.json.
    Names have no component prefix, and each tensor is whole in one file. A tied tensor is written
    under its first name: `from_pretrained` and `dc.load` tie it again. One process calls this. It
    needs some tens of MiB, and no torch. Every block read is checked.

    `source` may be a selector of a run, such as "runs/a@latest". `only` is the component to write,
    or a name within one. `dtype` ("bf16", "float16", ...) converts floating tensors, as `cast` of a
    load does. `max_shard_size` limits the data of a file. `include` and `exclude` are globs on
    names in the checkpoint. With `reflink`, a file of the checkpoint that contains only whole
    tensors of the export is cloned if the file system can, else copied by the kernel; such a file
    may be larger than `max_shard_size`. `progress` is called with the bytes done and in all.

    On return the folder is durable. Until then it has another name, and after an error it does not
    exist. `overwrite` replaces the folder of an earlier export, and keeps its other files.
    IncompatibleError names all that such files cannot store: values that are not tensors, quantized
    tensors, unsupported dtypes, and values that `dtype` would make infinite. ExistsError if
    something exists there; otherwise the errors of `dc.open` and of reading.
    """
    plan = plan_export(
        source,
        folder,
        only=only,
        dtype=dtype,
        max_shard_size=max_shard_size,
        include=include,
        exclude=exclude,
        overwrite=overwrite,
        reflink=reflink,
    )
    return plan.run(progress)


def plan_export(  # noqa: PLR0913 - those of `export_folder`
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    only: str = MODEL,
    dtype: str | torch.dtype | None = None,
    max_shard_size: int | str = DEFAULT_SHARD_SIZE,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    overwrite: bool = False,
    reflink: bool = False,
) -> WritePlan[int]:
    """Return the plan of `export_folder`. Raises the errors that it raises before it writes.

    The conversion to a narrower dtype can still fail in `run`, for values that do not fit.
    """
    selection = parse_selection(include, exclude)
    new_dtype, max_nbytes = parse_dtype(dtype), parse_size(max_shard_size)
    check_flag("reflink", reflink)
    if not isinstance(only, str) or not only:
        raise ValueError(f"only={only!r}: give the name of a component")
    storage, source_path = OPENER.find(source)
    target, path = open_storage(folder)
    path = real_path(path)
    if path != real_path(source_path):  # an export may replace a folder that is its source
        check_outside(real_path(source_path), path)
    retained = _check_replaceable(target, path, overwrite=overwrite)
    opened = OpenCheckpoint.at(storage, source_path)
    with opened.handle_damage():
        tensors = select_tensors(opened.catalog, source_path, only, selection, new_dtype)
        files = pack_files(tensors, max_nbytes, _whole_files(opened, tensors) if reflink else {})
    names = os.listdir(path) if os.path.isdir(path) else []
    return WritePlan(
        path,
        partial(_write, opened, files, (target, path), overwrite=overwrite),
        partial(_file_sizes, files),
        tuple(f"{path}/{name}" for name in sorted({*names} - {*retained})),
    )


def _file_sizes(files: Sequence[ExportedFile]) -> dict[str, int]:
    sizes = {file.name: file.nbytes for file in files}
    return sizes if len(files) == 1 else {**sizes, HF_INDEX: len(encode_index(files))}


def _write(
    source: OpenCheckpoint,
    files: Sequence[ExportedFile],
    target: tuple[Storage, str],
    progress: Progress | None,
    *,
    overwrite: bool,
) -> int:
    storage, path = target
    check = partial(_check_replaceable, overwrite=overwrite)
    count_copied = CopyProgress(sum(file.data_nbytes for file in files), progress)
    with (
        source,
        source.handle_damage(),
        new_folder(storage, path, check, replaces=overwrite) as new,
    ):
        for file in files:
            _write_file(source, storage, new, file, count_copied)
        nbytes = sum(file.nbytes for file in files)
        if len(files) > 1:
            nbytes += write_document(storage, f"{new}/{HF_INDEX}", encode_index(files))
    return nbytes


def _check_replaceable(storage: Storage, path: str, *, overwrite: bool) -> tuple[str, ...]:
    """Return the files to keep of a folder at `path`. ExistsError if it must not be replaced.

    With `overwrite`, a folder can be replaced if exports wrote all its safetensors files. Its other
    files, such as config.json, are kept.
    """
    check_flag("overwrite", overwrite)
    entries = list_target(storage, path)
    if entries and not overwrite:
        raise ExistsError(
            f"{path}: something is there already: choose another path, or replace it "
            f"(overwrite=True, on the command line --overwrite)"
        )
    tensor_files = {entry.name for entry in entries if entry.name.endswith(SAFETENSORS)}
    foreign = sorted(
        entry.name
        for entry in entries
        if entry.kind != "file"
        or (entry.name in tensor_files and not _is_of_export(storage, f"{path}/{entry.name}"))
    )
    if foreign:
        raise ExistsError(
            f"{path} has {', '.join(foreign[:5])}, which no export has written, so it is not "
            f"replaced: choose another path, or remove it"
        )
    return tuple(entry.name for entry in entries if entry.name not in {*tensor_files, HF_INDEX})


def _is_of_export(storage: Storage, path: str) -> bool:
    try:
        metadata = read.read_file(storage, path).metadata
    except (CorruptError, IncompatibleError):
        return False
    return metadata.get("exported_by") == EXPORT_METADATA["exported_by"]


# --- files -------------------------------------------------------------------------------------


def _write_file(
    source: OpenCheckpoint,
    target: Storage,
    folder: str,
    file: ExportedFile,
    count_copied: Callable[[int], None],
) -> None:
    """Write one file, durably. CorruptError if its source is damaged."""
    path = f"{folder}/{file.name}"
    if file.clone_of is not None:
        wanted = [
            TensorRequest(t.fqn, t.saved_dtype, t.shape, (Region.whole(t.shape),))
            for t in file.tensors
        ]
        source.check(wanted)
        record = source.index.files[file.clone_of]
        stored = f"{source.folder}/{source.index.file_name(record)}"
        if clone(stored, record.header_nbytes, path, file):
            count_copied(file.data_nbytes)
            return
    tensors = {tensor.fqn: tensor for tensor in file.tensors}
    # Converted tensors may be larger: they must fit into memory, too.
    ratio = max(
        DTYPES[e.dtype].itemsize // DTYPES[e.saved_dtype].itemsize for e in tensors.values()
    )
    windows = source.stream(tensors, window_nbytes=WINDOW_NBYTES // max(1, ratio), order="names")
    out = target.create(path, file.nbytes)
    try:
        out.write_at(0, file.header)
        start = len(file.header)
        with closing(windows):
            for window in windows:
                for part in _convert(window, tensors):
                    out.write_at(start, part)
                    start += part.nbytes
                    count_copied(part.nbytes)
        if out.finish() != file.nbytes:
            raise StorageError(f"{path} does not have the size that was written: try again")
    finally:
        out.discard()


def _whole_files(
    source: OpenCheckpoint, tensors: Sequence[ExportedTensor]
) -> dict[int, tuple[ExportedTensor, ...]]:
    """Return the files that contain only whole tensors of the export, by number."""
    index = source.index
    by_fqn = {tensor.fqn: tensor for tensor in tensors if tensor.saved_dtype == tensor.dtype}
    components = {index.catalog.tensors[fqn].component for fqn in by_fqn}
    whole_files = {}
    for number, record in enumerate(index.files if index.has_digests else ()):
        if record.component not in components:
            continue
        shards = open_file(source.storage, source.folder, index, record, keep=False).shards
        if len(shards) and all(
            shard.fqn in by_fqn and shard.cell == Region.whole(shard.shape) for shard in shards
        ):
            whole_files[number] = tuple(by_fqn[shard.fqn] for shard in shards)
    return whole_files


def _convert(window: TensorWindow, tensors: Mapping[str, ExportedTensor]) -> Iterator[memoryview]:
    """Yield the bytes to write for a window: tensor by tensor if one has a new dtype."""
    parts = [(tensors[want.fqn], data) for want, data in window.parts]
    if all(tensor.saved_dtype == tensor.dtype for tensor, _ in parts):
        yield window.data
        return
    from dist_ckpt.core.shard_io.memory.torch_tensor import cast_elements  # noqa: PLC0415  (only this needs torch)

    for tensor, data in parts:
        is_converted = tensor.saved_dtype != tensor.dtype
        part = cast_elements(data, tensor.saved_dtype, tensor.dtype) if is_converted else data
        if part is None:
            raise IncompatibleError(
                f"{tensor.fqn} has finite values that would be infinite in {tensor.dtype}: choose "
                f"another dtype (bfloat16 has nearly the range of float32)"
            )
        yield part


def clone(source: str, start: int, path: str, file: ExportedFile) -> bool:
    """Write the header, and the data of a source file from `start` on, to a durable file.

    On XFS and btrfs `copy_file_range` shares whole pages, and both headers end at a page. Other
    file systems copy the data. Return False, without a file, if the kernel can do neither.
    """
    if not hasattr(os, "copy_file_range"):  # it is Linux's
        return False
    try:
        with open(source, "rb") as source_file, open(path, "xb") as out:
            out.write(file.header)
            out.flush()
            done, nbytes = 0, file.data_nbytes
            while done < nbytes:
                count = os.copy_file_range(
                    *(source_file.fileno(), out.fileno(), nbytes - done),
                    *(start + done, len(file.header) + done),
                )
                if not count:
                    raise OSError(errno.EIO, "the source was truncated while it was copied")
                done += count
            os.fsync(out.fileno())
    except OSError as error:
        with suppress(OSError):
            os.unlink(path)
        if error.errno in _CANNOT_CLONE and not os.path.lexists(path):
            return False
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error
    return True
