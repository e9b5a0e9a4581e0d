"""Export a checkpoint as a folder of `torch.distributed.checkpoint`, for `dcp.load`."""

from __future__ import annotations

import os
import pickle  # noqa: TID251 - DCP reads pickles; they are only written here
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import closing
from functools import partial

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from dist_ckpt.core.checkpoint.open_checkpoint import OpenCheckpoint, cut_into_boxes
from dist_ckpt.core.checkpoint.renamed_checkpoint import rename_checkpoint
from dist_ckpt.core.format.geometry import Region
from dist_ckpt.core.format.index.index import JOINED
from dist_ckpt.core.planning.name_selection import Selection, excluded_names, parse_selection
from dist_ckpt.core.runtime.torch_private import DCP_VERSION, DcpStorageInfo
from dist_ckpt.core.state.binding.sources.rename import RenameRules
from dist_ckpt.core.state.tensors.local_tensors import torch_dtype
from dist_ckpt.core.state.tensors.plain_torch import make_torch_value
from dist_ckpt.core.state.tree.containers import RECORD
from dist_ckpt.core.storage import Storage, open_storage, real_path
from dist_ckpt.default_opener import OPENER
from dist_ckpt.errors import IncompatibleError, StorageError
from dist_ckpt.interop.dcp.flat_state_dict import DcpKeys
from dist_ckpt.interop.registry import DCP_METADATA
from dist_ckpt.interop.torch_save.export import JOINED_PARTS, can_be_saved
from dist_ckpt.message_text import listed
from dist_ckpt.reports import CopyProgress, Progress
from dist_ckpt.tools.new_files import (
    StreamedFile,
    WritePlan,
    check_no_folder,
    check_outside,
    new_folder,
    write_durable_file,
)

_DATA_FILE = "__0_0.distcp"

# A larger tensor is written in parts. Three windows of this size are in memory.
_PART_NBYTES = 32 << 20


def export_folder(
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    rename: RenameRules | None = None,
    progress: Progress | None = None,
) -> int:
    """Write the checkpoint at `source` as a folder that `dcp.load` reads; return its size in bytes.

    `source` is a path for `dc.open`, such as "runs/a@latest". `dcp.load` reshards the folder on any
    number of ranks. Names are those of `get_state_dict`. Tied tensors are written once. `include`
    and `exclude` are globs on names in the checkpoint. `rename` is that of `dc.load`, also with
    operations; the other two then take the new names. One process calls this; it needs about
    150 MB for tensors of any size. `progress` is called with the bytes done and in all.

    On return the folder is durable. Until then it has another name, and after an error it does not
    exist. ExistsError if something exists there. IncompatibleError names all that DCP cannot store,
    as `export_file` of `interop.torch_save` does. Otherwise the errors of reading.
    """
    plan = plan_export(source, folder, include=include, exclude=exclude, rename=rename)
    return plan.run(progress)


def plan_export(
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    rename: RenameRules | None = None,
) -> WritePlan[int]:
    """Return the plan of `export_folder`. Raises the errors that it raises before it writes.

    Its sizes are minimums: they do not count what torch.save writes around each tensor.
    """
    selection = parse_selection(include, exclude)
    opened, stored, metadata = _open_selected(source, folder, selection, rename)
    target, path = open_storage(folder)
    path = real_path(path)
    check_no_folder(target, path)
    entries = metadata.state_dict_metadata.items()
    tensors = {stored.fqn(key) for key, e in entries if isinstance(e, TensorStorageMetadata)}
    sizes = {_DATA_FILE: opened.tensor_nbytes(tensors), DCP_METADATA: len(pickle.dumps(metadata))}
    return WritePlan(path, partial(_write, opened, stored, metadata, (target, path)), lambda: sizes)


def _write(
    opened: OpenCheckpoint,
    stored: DcpKeys,
    metadata: Metadata,
    target: tuple[Storage, str],
    progress: Progress | None,
) -> int:
    storage, path = target
    entries = metadata.state_dict_metadata
    tensors = {
        key: entry for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)
    }
    first: dict[str, str] = {}
    for key, entry in tensors.items():
        whole, itemsize = Region.whole(tuple(entry.size)), entry.properties.dtype.itemsize
        # The boxes of `stream`.
        entry.chunks = [
            ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))
            for box in cut_into_boxes(whole, _PART_NBYTES // itemsize)
        ]
        first.setdefault(stored.fqn(key), key)
    metadata.version = DCP_VERSION
    with new_folder(storage, path) as new:
        with (
            opened,
            StreamedFile(storage, f"{new}/{_DATA_FILE}", opened.tensor_nbytes(first)) as data,
        ):
            values = ((key, value) for key, value in stored.values.items() if key in entries)
            items = {MetadataIndex(key): _write_item(data, value) for key, value in values}
            items |= _write_tensors(opened, first, data, progress)
            data.finish()
        # Tied tensors have the same chunks.
        metadata.storage_data = dict(items)
        for key, entry in tensors.items():
            stored_key = first[stored.fqn(key)]
            for offsets in (chunk.offsets for chunk in entry.chunks):
                location = items[MetadataIndex(stored_key, offsets)]
                metadata.storage_data[MetadataIndex(key, offsets)] = location
        return data.nbytes + write_durable_file(
            storage, f"{new}/{DCP_METADATA}", pickle.dumps(metadata)
        )


def _open_selected(
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    selection: Selection,
    rename: RenameRules | None,
) -> tuple[OpenCheckpoint, DcpKeys, Metadata]:
    storage, path = OPENER.find(source)
    check_outside(real_path(path), real_path(open_storage(folder)[1]))
    opened = rename_checkpoint(OpenCheckpoint.at(storage, path, make=make_torch_value), rename)
    stored = DcpKeys(opened, rank=0)
    if texts := selection.pattern_problems((*stored.names.values(), *stored.per_rank)):
        raise ValueError("; ".join(texts))
    metadata = stored.metadata(StorageMeta(checkpoint_id=os.fspath(folder)))
    names = stored.names
    entries, paths = metadata.state_dict_metadata, metadata.planner_data
    chosen_names = stored.select(selection)
    chosen = {key: entry for key, entry in entries.items() if names[key] in chosen_names}
    uncut = opened.objects().uncut
    problems = [
        f"{name} {why}: leave it out ({excluded_names(name)})"
        for name, why in (
            *_problems(stored, chosen, chosen_names, selection),
            *((n, JOINED_PARTS) for n in sorted(chosen_names) if uncut.get(n) == JOINED),
        )
    ]
    if problems:
        raise IncompatibleError(
            f"{path}: a folder of DCP cannot store all of it: {listed(problems, '; ')}"
        )
    if entries and not chosen:
        raise ValueError(f"{selection} leaves nothing: give other patterns")
    metadata.state_dict_metadata = chosen
    metadata.planner_data = {key: nested for key, nested in paths.items() if key in chosen}
    return opened, stored, metadata


def _problems(
    stored: DcpKeys, chosen: Mapping[str, object], chosen_names: Set[str], selection: Selection
) -> Iterator[tuple[str, str]]:
    """Yield the names of parts that cannot be written, and the reasons."""
    for name in stored.find_broken_lists(chosen_names):
        yield name, "is a list whose items would move, as earlier ones are left out"
    for name in sorted(chosen_names):
        if name.endswith(f".{RECORD}"):
            yield name.removesuffix(f".{RECORD}"), "is a quantized tensor, made of others"
    for name in filter(selection.__contains__, stored.per_rank):
        yield name, "has a value for each rank"
    for key, entry in chosen.items():
        is_tensor = isinstance(entry, TensorStorageMetadata)
        if is_tensor and not can_be_saved(dtype := stored.record(key).dtype):
            yield stored.names[key], f"is {dtype}, which torch.save does not support"


def _write_tensors(
    opened: OpenCheckpoint, keys: Mapping[str, str], data: StreamedFile, progress: Progress | None
) -> dict[MetadataIndex, DcpStorageInfo]:
    """Write tensors as boxes; return the location of each box. `keys` has DCP's keys by name.

    A tensor without elements is one item.
    """
    locations, count_copied = {}, CopyProgress(opened.tensor_nbytes(keys), progress)
    for fqn, key in keys.items():
        record = opened.catalog.tensors[fqn]
        if 0 in record.shape:
            empty = torch.empty(record.shape, dtype=torch_dtype(record.dtype))
            index = MetadataIndex(key, torch.Size([0] * len(record.shape)))
            locations[index] = _write_item(data, empty)
    windows = opened.stream(keys, window_nbytes=_PART_NBYTES, order="names")
    with closing(windows):
        for want, memory in (part for window in windows for part in window.parts):
            (box,) = want.cells
            assert isinstance(box, Region)
            tensor = torch.frombuffer(memory, dtype=torch_dtype(want.dtype)).view(box.shape)
            index = MetadataIndex(keys[want.fqn], torch.Size(box.offset))
            locations[index] = _write_item(data, tensor)
            count_copied(memory.nbytes)
    return locations


def _write_item(data: StreamedFile, value: object) -> DcpStorageInfo:
    """Write an item, which is an archive of torch.save; return its location."""
    start = data.nbytes
    try:
        torch.save(value, data)  # type: ignore[arg-type]  # noqa: TID251 - as DCP has it
    except RuntimeError:
        # Torch's error does not have the cause, even for an interrupt.
        raise data.failure or StorageError(f"{_DATA_FILE} cannot be written") from None
    return DcpStorageInfo(_DATA_FILE, start, data.nbytes - start)
