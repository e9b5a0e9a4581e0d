"""A checkpoint as a folder of `torch.distributed.checkpoint`, which `dcp.load` reads."""

from __future__ import annotations

import os
import pickle  # noqa: TID251 - what DCP reads is one; written here, never read
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, closing
from dataclasses import dataclass
from math import prod

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from dist_ckpt.core.format.geometry import Region
from dist_ckpt.core.planning.plan import TensorRequest
from dist_ckpt.core.planning.selection import Selection, excluded_names, selection_of
from dist_ckpt.core.runtime.buffers import BufferPool
from dist_ckpt.core.runtime.threads import results_of
from dist_ckpt.core.runtime.torch_private import DCP_VERSION, DcpStorageInfo
from dist_ckpt.core.state.tree.containers import RECORD
from dist_ckpt.core.storage import Storage, open_storage, real_path
from dist_ckpt.core.storage.streamed_file import StreamedFile
from dist_ckpt.errors import IncompatibleError, StorageError, listed
from dist_ckpt.interop.dcp.metadata import DcpCheckpoint
from dist_ckpt.interop.registry import open_source
from dist_ckpt.interop.torch_save.export_state import can_be_saved
from dist_ckpt.interop.writers.local_files import check_outside
from dist_ckpt.interop.writers.new_folder import check_replaceable, new_folder
from dist_ckpt.reports import Progress
from dist_ckpt.runs.selectors import resolve
from dist_ckpt.tools.rewrite.dry_run import DryRun

_DATA = "__0_0.distcp"
_METADATA = ".metadata"

# A larger tensor is written in parts; three times as much is in memory, as windows.
_PART_NBYTES = 32 << 20


def export_folder(
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    progress: Progress | None = None,
) -> int:
    """Write the checkpoint at `source` as a folder that `dcp.load` reads; return its size in bytes.

    `source` is what `dc.open` takes, such as "runs/a@latest"; however it was sharded, `dcp.load`
    reshards it on any number of ranks. Names are as `get_state_dict` has them; tied tensors lie
    there once. `include` and `exclude` are globs on names in the checkpoint. One process does it,
    with about 150 MB for tensors however large they are.
    `progress` is called with the bytes done, and those in all.

    On return the folder is durable; until then it has another name, and if this raises there is
    none. ExistsError if something is there; IncompatibleError, with all names, for what DCP has no
    place for, as `export_file` of `torch_export`; and what reading raises.
    """
    stored, metadata = _opened(source, folder, selection_of(include, exclude))
    target, path = open_storage(folder)
    entries = metadata.state_dict_metadata
    tensors = {
        key: entry for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)
    }
    first: dict[str, str] = {}
    parts: list[_BoxItem] = []
    for key, entry in tensors.items():
        own = [*_parts_of(key, entry)]
        entry.chunks = [_chunk(part.region) for part in own]
        if first.setdefault(stored.fqn(key), key) == key:
            parts += own
    metadata.version = DCP_VERSION
    with new_folder(target, real_path(path), overwrite=None) as there:
        least = sum(part.nbytes for part in parts)
        with StreamedFile(target, f"{there}/{_DATA}", least) as data:
            places = {
                MetadataIndex(key): _put_item(data, stored.value(key))
                for key in entries
                if key not in tensors
            }
            places |= _put_parts(stored, parts, data, progress)
            data.finish()
        # Tied tensors are cut alike.
        metadata.storage_data = places | {
            MetadataIndex(key, chunk.offsets): places[
                MetadataIndex(first[stored.fqn(key)], chunk.offsets)
            ]
            for key, entry in tensors.items()
            for chunk in entry.chunks
        }
        return data.nbytes + _put(target, f"{there}/{_METADATA}", pickle.dumps(metadata))


def would_export(
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
) -> DryRun:
    """Return what `export_folder` would write. Nothing is changed. Raises what it does before.

    Sizes are the least: what torch.save puts around each tensor is not known before.
    """
    stored, metadata = _opened(source, folder, selection_of(include, exclude))
    target, path = open_storage(folder)
    check_replaceable(target, real_path(path), overwrite=None)
    whole = {
        stored.fqn(key): entry.size.numel() * entry.properties.dtype.itemsize
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    sizes = {_DATA: sum(whole.values()), _METADATA: len(pickle.dumps(metadata))}
    return DryRun(real_path(path), sizes)


def _opened(
    source: str | os.PathLike[str], folder: str | os.PathLike[str], selection: Selection
) -> tuple[DcpCheckpoint, Metadata]:
    storage, path = open_source(resolve(source))
    check_outside(real_path(path), real_path(open_storage(folder)[1]))
    stored = DcpCheckpoint(storage, path, rank=0)
    if unmatched := selection.unmatched((*stored.names.values(), *stored.per_rank)):
        raise ValueError("; ".join(unmatched))
    metadata = stored.metadata(StorageMeta(checkpoint_id=os.fspath(folder)))
    names = stored.names
    entries, paths = metadata.state_dict_metadata, metadata.planner_data
    kept = stored.chosen(selection)
    chosen = {key: entry for key, entry in entries.items() if names[key] in kept}
    if problems := [*_problems(stored, chosen, kept, selection)]:
        raise IncompatibleError(
            f"{path}: a folder of DCP has no place for all of it: {listed(problems, '; ')}"
        )
    if entries and not chosen:
        raise ValueError(f"{selection} leaves nothing: give other patterns")
    metadata.state_dict_metadata = chosen
    metadata.planner_data = {key: where for key, where in paths.items() if key in chosen}
    return stored, metadata


def _problems(
    stored: DcpCheckpoint, chosen: Mapping[str, object], kept: Set[str], selection: Selection
) -> Iterator[str]:
    """Yield what cannot be written, with what to do."""
    for name in stored.broken_lists(kept):
        remedy = f"leave all of it out ({excluded_names(name)})"
        yield f"{name} is a list out of whose midst something is left out: {remedy}"
    for name in sorted(kept):
        if name.endswith(f".{RECORD}"):
            whole = name.removesuffix(f".{RECORD}")
            remedy = f"leave it out ({excluded_names(whole)})"
            yield f"{whole} is a quantized tensor, made of others: {remedy}"
    for name in stored.per_rank:
        if name in selection:
            yield f"{name} has a value for each rank: leave it out ({excluded_names(name)})"
    for key, entry in chosen.items():
        if isinstance(entry, TensorStorageMetadata):
            dtype, name = stored.wanted(key).dtype, stored.names[key]
            if not can_be_saved(dtype):
                remedy = f"leave it out ({excluded_names(name)})"
                yield f"{name} is {dtype}, which torch.save does not know: {remedy}"


@dataclass(frozen=True, slots=True)
class _BoxItem:
    """A box of a tensor, which is an item of the file."""

    key: str
    dtype: torch.dtype
    region: Region

    @property
    def nbytes(self) -> int:
        return self.region.numel * self.dtype.itemsize


def _parts_of(key: str, entry: TensorStorageMetadata) -> Iterator[_BoxItem]:
    """Yield a tensor as boxes, whose elements lie in order, and are easily in memory."""
    dtype = entry.properties.dtype
    for region in _cut(Region.whole(tuple(entry.size)), _PART_NBYTES // dtype.itemsize):
        yield _BoxItem(key, dtype, region)


def _cut(box: Region, most: int) -> Iterator[Region]:
    """Cut a box along its first dimension that can be, until no part has more elements."""
    if box.numel <= most:
        yield box
        return
    dim = next(dim for dim, size in enumerate(box.shape) if size > 1)
    rows = max(most // prod(box.shape[dim + 1 :]), 1)
    for start in range(0, box.shape[dim], rows):
        offset, shape = [*box.offset], [*box.shape]
        offset[dim] += start
        shape[dim] = min(rows, box.shape[dim] - start)
        yield from _cut(Region(tuple(offset), tuple(shape)), most)


def _put_parts(
    stored: DcpCheckpoint, parts: Sequence[_BoxItem], data: StreamedFile, progress: Progress | None
) -> dict[MetadataIndex, DcpStorageInfo]:
    places, done, nbytes = {}, 0, sum(part.nbytes for part in parts)
    for part, tensor in _read(stored, parts):
        places[MetadataIndex(part.key, torch.Size(part.region.offset))] = _put_item(data, tensor)
        done += part.nbytes
        if progress is not None:
            progress(done, nbytes)
    return places


def _chunk(region: Region) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(region.offset), torch.Size(region.shape))


def _windows(parts: Iterable[_BoxItem]) -> Iterator[Sequence[_BoxItem]]:
    """Yield parts together that are read at once."""
    window: list[_BoxItem] = []
    free = _PART_NBYTES
    for part in parts:
        if window and part.nbytes > free:
            yield window
            window, free = [], _PART_NBYTES
        window.append(part)
        free -= part.nbytes
    if window:
        yield window


def _read(
    stored: DcpCheckpoint, parts: Iterable[_BoxItem]
) -> Iterator[tuple[_BoxItem, torch.Tensor]]:
    """Yield parts as tensors, each until the next; a window is read while one is written."""
    slots = BufferPool(_PART_NBYTES)
    with stored.tensors() as tensors:

        def read(window: Sequence[_BoxItem]) -> tuple[Sequence[_BoxItem], memoryview, ExitStack]:
            lent = ExitStack()
            memory = lent.enter_context(slots.one())
            tensors.fetch([*_wanted(stored, window)], memory)
            return window, memory, lent

        with closing(results_of(read, _windows(parts), threads=1, waiting=1)) as ready:
            for window, memory, lent in ready:
                with lent:
                    yield from zip(window, _tensors_in(memory, window), strict=True)


def _wanted(stored: DcpCheckpoint, window: Sequence[_BoxItem]) -> Iterator[TensorRequest]:
    """Yield what is read for a window: the boxes of a tensor, of which each has some, as one."""
    boxes: dict[str, list[Region]] = {}
    for part in window:
        if part.nbytes:
            boxes.setdefault(part.key, []).append(part.region)
    for key, some in boxes.items():
        yield stored.wanted(key)._replace(cells=tuple(some))


def _tensors_in(memory: memoryview, window: Sequence[_BoxItem]) -> Iterator[torch.Tensor]:
    start = 0
    for part in window:
        if part.nbytes:
            flat = torch.frombuffer(memory, dtype=part.dtype, count=part.region.numel, offset=start)
            yield flat.view(part.region.shape)
        else:
            yield torch.empty(part.region.shape, dtype=part.dtype)
        start += part.nbytes


def _put_item(data: StreamedFile, value: object) -> DcpStorageInfo:
    """Write an item, an archive of torch.save; return where it is."""
    start = data.nbytes
    try:
        torch.save(value, data)  # type: ignore[arg-type]  # noqa: TID251 - as DCP has it
    except RuntimeError:
        # Torch tells only that something went wrong while it wrote, if only an interrupt.
        raise data.failure or StorageError(f"{_DATA} cannot be written") from None
    return DcpStorageInfo(_DATA, start, data.nbytes - start)


def _put(storage: Storage, path: str, data: bytes) -> int:
    file = storage.create(path, len(data))
    try:
        file.write_at(0, data)
        return file.finish()
    finally:
        file.discard()
