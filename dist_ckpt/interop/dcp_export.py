"""A checkpoint as a folder of `torch.distributed.checkpoint`, which `dcp.load` reads."""

from __future__ import annotations

import os
import pickle  # noqa: TID251 - what DCP reads is one; written here, never read
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from dist_ckpt.errors import ExistsError, IncompatibleError, StorageError, listed
from dist_ckpt.format.geometry import Region
from dist_ckpt.interop.dcp_metadata import StoredState
from dist_ckpt.interop.local_files import check_parent, sync_folder, temporary_beside
from dist_ckpt.offline.rewriting import CopyProgress, DryRun
from dist_ckpt.reports import Progress
from dist_ckpt.runs.selectors import resolve
from dist_ckpt.runtime.torch_private import DCP_VERSION, DcpStorageInfo
from dist_ckpt.storage import open_storage
from dist_ckpt.storage.exclusive_rename import rename_exclusively

_DATA = "__0_0.distcp"

# A larger tensor is written in parts, which are in memory one at a time.
_PART_NBYTES = 256 << 20


def export_folder(
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    progress: Progress | None = None,
) -> int:
    """Write the checkpoint at `source` as a folder that `dcp.load` reads; return its size in bytes.

    `source` may name one of a run, such as "runs/a@latest"; however it was sharded, `dcp.load`
    reshards it on any number of ranks. Names are as `get_state_dict` has them. One process does
    it, with some hundred MB for tensors at a time. On return the folder is durable; until then it
    has another name, and if this raises there is none. ExistsError if something is there,
    IncompatibleError for values per rank, which DCP has no place for, and what reading raises.
    """
    stored, metadata = _opened(source, folder)
    tell = CopyProgress(_tensor_nbytes(metadata), progress)
    with _new_folder(folder) as there, open(os.path.join(there, _DATA), "xb") as data:
        places = {}
        for key, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                places[MetadataIndex(key)] = _write(data, stored.value(key))
                continue
            dtype = entry.properties.dtype
            entry.chunks = [
                ChunkStorageMetadata(torch.Size(one.offset), torch.Size(one.shape))
                for one in _parts(tuple(entry.size), dtype.itemsize)
            ]
            for chunk in entry.chunks:
                tensor = torch.empty(chunk.sizes, dtype=dtype)
                stored.read_into(key, Region(tuple(chunk.offsets), tuple(chunk.sizes)), tensor)
                places[MetadataIndex(key, chunk.offsets)] = _write(data, tensor)
                tell(tensor.nbytes)
        metadata.storage_data = places
        metadata.version = DCP_VERSION
        _sync(data)
        with open(os.path.join(there, ".metadata"), "xb") as file:
            pickle.dump(metadata, file)
            _sync(file)
            return data.tell() + file.tell()


def would_export(source: str | os.PathLike[str], folder: str | os.PathLike[str]) -> DryRun:
    """Return what `export_folder` would write. Nothing is changed. Raises what it does before.

    Sizes are the least: what torch.save puts around each tensor is not known before.
    """
    _, metadata = _opened(source, folder)
    where = _check_new(folder)
    known = {_DATA: _tensor_nbytes(metadata), ".metadata": len(pickle.dumps(metadata))}
    return DryRun(where, known)


def _opened(
    source: str | os.PathLike[str], folder: str | os.PathLike[str]
) -> tuple[StoredState, Metadata]:
    stored = StoredState(*open_storage(resolve(source)), rank=0)
    if per_rank := stored.per_rank:
        raise IncompatibleError(
            f"{source} has values of each rank, and a folder of DCP has none: {listed(per_rank)}; "
            f"make a copy without them first (reshard with exclude)"
        )
    return stored, stored.metadata(StorageMeta(checkpoint_id=os.fspath(folder)))


def _tensor_nbytes(metadata: Metadata) -> int:
    tensors = [
        one
        for one in metadata.state_dict_metadata.values()
        if isinstance(one, TensorStorageMetadata)
    ]
    return sum(one.size.numel() * one.properties.dtype.itemsize for one in tensors)


def _write(file: IO[bytes], value: object) -> DcpStorageInfo:
    start = file.tell()
    torch.save(value, file)  # noqa: TID251 - as DCP has it
    return DcpStorageInfo(_DATA, start, file.tell() - start)


def _parts(shape: tuple[int, ...], itemsize: int) -> Iterator[Region]:
    """Yield boxes of rows, of a size that is easily in memory; all of it if it has no rows."""
    whole = Region.whole(shape)
    if not shape or whole.numel * itemsize <= _PART_NBYTES:
        yield whole
        return
    rows = max(_PART_NBYTES // (whole.numel // shape[0] * itemsize), 1)
    for start in range(0, shape[0], rows):
        count = min(rows, shape[0] - start)
        yield Region((start, *whole.offset[1:]), (count, *shape[1:]))


@contextmanager
def _new_folder(path: str | os.PathLike[str]) -> Iterator[str]:
    """Fill a folder under another name beside it, which is removed after an error."""
    where = _check_new(path)
    temporary = temporary_beside(where)
    try:
        os.mkdir(temporary)
        yield temporary
        sync_folder(temporary)
        rename_exclusively(temporary, where)
        sync_folder(os.path.dirname(where))
    except FileExistsError:
        raise _exists(where) from None
    except OSError as error:
        raise StorageError(f"{where} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _check_new(path: str | os.PathLike[str]) -> str:
    where = os.path.abspath(os.fspath(path))
    check_parent(where)
    if os.path.lexists(where):
        raise _exists(where)
    return where


def _exists(where: str) -> ExistsError:
    return ExistsError(f"{where}: something is there already: choose another path, or remove it")


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
