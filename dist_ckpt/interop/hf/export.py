"""Export a model in a checkpoint as a Hugging Face folder of safetensors files.

    hf.export_folder("runs/a@latest", "exported", dtype="bf16")
    model.config.save_pretrained("exported")
    AutoModelForCausalLM.from_pretrained("exported")

No import is needed: `dc.load`, `dc.open` and `dc.reshard` read such a folder as `{"model": ...}`.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from json import dumps
from math import prod
from typing import TYPE_CHECKING

from dist_ckpt.core.checkpoint.open_checkpoint import OpenCheckpoint, TensorWindow
from dist_ckpt.core.checkpoint.renamed_checkpoint import rename_checkpoint
from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.geometry import Region, Shape
from dist_ckpt.core.format.index.index import Catalog
from dist_ckpt.core.planning.name_selection import Selection, excluded_names, parse_selection
from dist_ckpt.core.planning.plan import TensorRequest
from dist_ckpt.core.planning.weight_scales import WeightScales
from dist_ckpt.core.runtime.arguments import check_flag
from dist_ckpt.core.shard_io.read.open_files import open_file
from dist_ckpt.core.state.binding.sources.rename import RenameRules
from dist_ckpt.core.state.tree.containers import RECORD
from dist_ckpt.core.storage import Storage, open_storage, real_path
from dist_ckpt.default_opener import OPENER
from dist_ckpt.errors import CorruptError, ExistsError, IncompatibleError, StorageError
from dist_ckpt.interop.hf import read
from dist_ckpt.interop.hf.adapters import ADAPTER_FILE, file_name, select_adapter
from dist_ckpt.interop.hf.read import MAX_HEADER_NBYTES
from dist_ckpt.interop.readers.virtual_checkpoint import MODEL
from dist_ckpt.interop.registry import SAFETENSORS
from dist_ckpt.message_text import listed
from dist_ckpt.reports import CopyProgress, Progress
from dist_ckpt.tools.new_files import (
    WritePlan,
    check_outside,
    list_target,
    new_folder,
    write_durable_file,
)

if TYPE_CHECKING:
    import torch

__all__ = ["export_folder"]

# Three windows are in memory at the same time, with the blocks that are read for them.
WINDOW_NBYTES = 16 << 20

# The metadata of each file. transformers requires "format"; an export replaces a file only if it
# has "exported_by".
EXPORT_METADATA = {"format": "pt", "exported_by": "dist_ckpt"}

INDEX_SUFFIX = f"{SAFETENSORS}.index.json"

DEFAULT_SHARD_SIZE = "5GB"

# The data begins on a page, as in shard files. So it can be cloned, and bypass the page cache.
_ALIGNMENT = 4096

_FLOATS = re.compile(r"(b?float16|float32|float64|float8_\w+)")
_SHORT_NAMES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
_UNIT_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}

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
    rename: RenameRules | None = None,
    adapter: str | None = None,
    name: str | None = None,
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
    names in the checkpoint. `rename` is that of `dc.load`, also with operations; the other options
    then take the new names, such as "model.embed". With `reflink` and no `rename`, a file of the
    checkpoint is cloned if it contains only whole tensors of the export. If the file system cannot,
    the kernel copies it. Such a file may be larger than `max_shard_size`. `progress` is called with
    the bytes done and in all.

    `name` is that of the files, such as "diffusion_pytorch_model"; by default it is "model".
    `adapter` is the name of one in a model of peft: only it is written, with the names and the file
    of peft. Otherwise such a model is exported with the names of the live one, and a warning.

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
        rename=rename,
        adapter=adapter,
        name=name,
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
    rename: RenameRules | None = None,
    adapter: str | None = None,
    name: str | None = None,
    overwrite: bool = False,
    reflink: bool = False,
) -> WritePlan[int]:
    """Return the plan of `export_folder`. Raises the errors that it raises before it writes.

    The conversion to a narrower dtype can still fail in `run`, for values that do not fit.
    """
    selection = parse_selection(include, exclude)
    new_dtype, max_nbytes = parse_dtype(dtype), parse_size(max_shard_size)
    check_flag("reflink", reflink)
    stem = _parse_name(name, ADAPTER_FILE if adapter is not None else MODEL)
    if not isinstance(only, str) or not only:
        raise ValueError(f"only={only!r}: give the name of a component")
    storage, source_path = OPENER.find(source)
    target, path = open_storage(folder)
    path = real_path(path)
    if path != real_path(source_path):  # an export may replace a folder that is its source
        check_outside(real_path(source_path), path)
    retained = _check_replaceable(target, path, overwrite=overwrite)
    opened = rename_checkpoint(OpenCheckpoint.at(storage, source_path), rename)
    with opened.handle_damage():
        tensors = select_tensors(opened.catalog, source_path, only, selection, new_dtype, adapter)
        cloned = _whole_files(opened, tensors) if reflink and not rename and not adapter else {}
        files = pack_files(tensors, max_nbytes, cloned, stem)
    names = os.listdir(path) if os.path.isdir(path) else []
    return WritePlan(
        path,
        partial(_write, opened, files, (target, path), overwrite=overwrite),
        partial(_file_sizes, files),
        tuple(f"{path}/{file}" for file in sorted({*names} - {*retained})),
    )


def _file_sizes(files: Sequence[ExportedFile]) -> dict[str, int]:
    sizes = {file.name: file.nbytes for file in files}
    return sizes if len(files) == 1 else {**sizes, _index_name(files): len(encode_index(files))}


def _index_name(files: Sequence[ExportedFile]) -> str:
    return f"{files[0].name.rpartition('-00001-of-')[0]}{INDEX_SUFFIX}"


def _parse_name(name: object, default: str) -> str:
    """Return the name of the files. ValueError unless it is letters, digits, `-` and `_`."""
    if name is None:
        return default
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise ValueError(f"name={name!r}: give letters and digits, such as 'adapter_model'")
    return name


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
            nbytes += write_durable_file(
                storage, f"{new}/{_index_name(files)}", encode_index(files)
            )
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
    others = (entry.name for entry in entries if entry.name not in tensor_files)
    return tuple(name for name in others if not name.endswith(INDEX_SUFFIX))


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


# --- the tensors to write, and their files. Pure ------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExportedTensor:
    """A tensor to write: `fqn` is the name of its stored data, whose dtype is `saved_dtype`."""

    name: str
    fqn: str
    saved_dtype: str
    dtype: str
    shape: Shape

    @property
    def nbytes(self) -> int:
        """The size that is written."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class ExportedFile:
    """A file to write: its header, and the tensors after it, without gaps.

    `clone_of` is the number of the checkpoint's file that has the same data after its own header.
    """

    name: str
    header: bytes
    tensors: tuple[ExportedTensor, ...]
    clone_of: int | None = None

    @property
    def data_nbytes(self) -> int:
        """The size of all its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        """Its size."""
        return len(self.header) + self.data_nbytes


def parse_dtype(option: object) -> str | None:
    """Return the dtype that an option names, for floating tensors. ValueError if it is unknown."""
    if option is None:
        return None
    name = str(option).removeprefix("torch.")
    name = _SHORT_NAMES.get(name, name)
    if name not in _SHORT_NAMES.values():
        names = ", ".join((*_SHORT_NAMES.values(), *_SHORT_NAMES))
        raise ValueError(f"dtype={option!r}: give one of {names}")
    return name


def parse_size(size: int | str) -> int:
    """Return a size such as "5GB" or "500MiB" in bytes. ValueError for an invalid one."""
    if type(size) is int and size > 0:
        return size
    if isinstance(size, str) and (match := _SIZE.fullmatch(size.strip())):
        base = 1024 if match[3] else 1000
        if nbytes := int(float(match[1]) * base ** _UNIT_POWERS[match[2].upper()]):
            return nbytes
    raise ValueError(f"max_shard_size={size!r}: give a number of bytes, or one like 5GB or 500MiB")


def select_tensors(
    catalog: Catalog,
    path: str,
    only: str,
    selection: Selection,
    dtype: str | None,
    adapter: str | None = None,
) -> tuple[ExportedTensor, ...]:
    """Return the tensors of a component to write, in its order. A tied tensor is written once.

    IncompatibleError names everything that safetensors cannot store, with remedies. ValueError for
    a pattern that matches nothing.
    """
    prefix = f"{only}."
    tables = (catalog.tensors, catalog.aliases, catalog.values, catalog.per_rank)
    below = [name for name in chain(*tables) if name.startswith(prefix) or name == only]
    if not any(name in catalog.tensors or name in catalog.aliases for name in below):
        names_of_tensors = chain(catalog.tensors, catalog.aliases)
        components = dict.fromkeys(n.partition(".")[0] for n in names_of_tensors if "." in n)
        raise IncompatibleError(
            f"{path} has no tensors in {only!r}: give a component that has some (only=, on the "
            f"command line --only): {listed([*components]) or 'none has'}"
        )
    if texts := selection.pattern_problems(chain(*tables)):
        raise ValueError(listed(texts, "; "))
    chosen = [name for name in below if name in selection]
    names = select_adapter(catalog, chosen, prefix, adapter)
    problems = [*_value_problems(catalog, names)]
    scales = WeightScales(catalog.tensors, catalog.aliases)
    tensors: dict[str, ExportedTensor] = {}
    for name in names:
        data = catalog.aliases.get(name, name)
        if data not in catalog.tensors or data in tensors:
            continue
        record = catalog.tensors[data]
        new_dtype = dtype if dtype and _FLOATS.fullmatch(record.dtype) else record.dtype
        short = name.removeprefix(prefix)
        short = short if adapter is None else file_name(short, adapter) or short
        tensors[data] = ExportedTensor(short, data, record.dtype, new_dtype, record.shape)
        problems += _tensor_problems(name, tensors[data], only)
        if new_dtype != record.dtype and scales.scales_of(data):
            problems.append(
                f"{name} is {record.dtype} with a scale, without which {new_dtype} would be wrong: "
                f"leave dtype out, or save it after a load with dequantize=True"
            )
    if not problems and not tensors:
        raise ValueError(f"{selection} leaves no tensor of {only!r}: give other patterns")
    if problems:
        raise IncompatibleError(
            f"{path}: safetensors files cannot store all of {only!r}: {listed(problems, '; ')}"
        )
    return tuple(tensors.values())


def _value_problems(catalog: Catalog, names: Sequence[str]) -> Iterator[str]:
    # A tensor subclass has a record of its inner tensors, which is a value.
    subclasses = {n.removesuffix(f".{RECORD}") for n in names if n.endswith(f".{RECORD}")}
    for fqn in sorted(subclasses):
        yield (
            f"{fqn} is a quantized tensor, made of others: save it dequantized, or leave it out "
            f"({excluded_names(fqn)})"
        )
    for name in names:
        if any(name.startswith(f"{fqn}.") for fqn in subclasses):
            continue
        if name in catalog.per_rank:
            yield f"{name} has a value for each rank: leave it out ({excluded_names(name)})"
        elif name in catalog.values:
            yield (
                f"{name} is not a tensor: leave it out ({excluded_names(name)}), and store it "
                f"elsewhere"
            )


def _tensor_problems(fqn: str, tensor: ExportedTensor, only: str) -> Iterator[str]:
    leave_out = f"leave it out ({excluded_names(fqn)})"
    rename = f"rename it before the save, or {leave_out}"
    if fqn == only or not tensor.name:
        yield f"{fqn} has no name within {only!r}: {rename}"
    if tensor.name == "__metadata__":
        yield f"{fqn}: {tensor.name!r} is a reserved name in safetensors: {rename}"
    if DTYPES[tensor.dtype].safetensors is None:
        convert = "convert it (dtype=), or " if _FLOATS.fullmatch(tensor.dtype) else ""
        yield f"{fqn} is {tensor.dtype}, which safetensors lacks: {convert}{leave_out}"


def pack_files(
    tensors: Sequence[ExportedTensor],
    max_nbytes: int,
    cloned: Mapping[int, Sequence[ExportedTensor]],
    stem: str = MODEL,
) -> tuple[ExportedFile, ...]:
    """Distribute tensors, in their order, to files with at most `max_nbytes` of data.

    A larger tensor gets a separate file. `cloned` has the tensors of whole files of the checkpoint,
    by the number of the file. Each such file becomes one file of the export, whatever its size.
    """
    groups: list[tuple[int | None, Sequence[ExportedTensor]]] = [*cloned.items()]
    cloned_names = {entry.name for group in cloned.values() for entry in group}
    free, group = 0, list[ExportedTensor]()
    for tensor in tensors:
        if tensor.name in cloned_names:
            continue
        if not group or tensor.nbytes > free:
            group, free = [], max_nbytes
            groups.append((None, group))
        group.append(tensor)
        free -= tensor.nbytes
    count = len(groups)
    files = []
    for number, (clone_of, members) in enumerate(groups, 1):
        part = f"-{number:05}-of-{count:05}" if count > 1 else ""
        name = f"{stem}{part}{SAFETENSORS}"
        # As in safetensors: the widest dtype first, so that each tensor is aligned to it.
        by_width = sorted(members, key=lambda t: (-DTYPES[t.dtype].itemsize, t.name))
        files.append(_plan_file(name, by_width if clone_of is None else members, clone_of))
    return tuple(files)


def _plan_file(name: str, tensors: Sequence[ExportedTensor], clone_of: int | None) -> ExportedFile:
    doc: dict[str, object] = {"__metadata__": EXPORT_METADATA}
    start = 0
    for tensor in tensors:
        stop = start + tensor.nbytes
        doc[tensor.name] = {
            "dtype": DTYPES[tensor.dtype].safetensors,
            "shape": [*tensor.shape],
            "data_offsets": [start, stop],
        }
        start = stop
    text = dumps(doc, ensure_ascii=False, separators=(",", ":")).encode()
    room = -(-(8 + len(text)) // _ALIGNMENT) * _ALIGNMENT - 8
    if room > MAX_HEADER_NBYTES:
        raise IncompatibleError(
            f"{name}: {len(tensors)} tensors need a header of {room} bytes, more than the limit "
            f"of safetensors: give a smaller max_shard_size"
        )
    header = room.to_bytes(8, "little") + text.ljust(room)
    return ExportedFile(name, header, tuple(tensors), clone_of)


def encode_index(files: Sequence[ExportedFile]) -> bytes:
    """Return the index of several files, as transformers writes it."""
    weight_map = {tensor.name: file.name for file in files for tensor in file.tensors}
    doc = {
        "metadata": {"total_size": sum(file.data_nbytes for file in files)},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return (dumps(doc, indent=2, ensure_ascii=False) + "\n").encode()
