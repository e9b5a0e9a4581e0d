"""Read files of torch.save: zip archives with a pickle, which is read without unpickling it.

A tensor's bytes are one record of the archive, uncompressed, and are read in place. The format is
in torch/serialization.py. Parts of DCP's files and the files of frameworks are such archives too.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

from dist_ckpt.core.format.geometry import Region
from dist_ckpt.core.planning.module_versions import state_dict_metadata
from dist_ckpt.core.storage import ReadableFile, Storage
from dist_ckpt.errors import CheckpointError, CorruptError, IncompatibleError
from dist_ckpt.interop.readers import restricted_pickle
from dist_ckpt.interop.readers.model_files import (
    MAX_INDEX_NBYTES,
    find_model,
    is_index,
    parse_index,
)
from dist_ckpt.interop.readers.nested_state import ImportFilter, NestedState
from dist_ckpt.interop.readers.restricted_pickle import PickleBudget, UnknownObject, unknown_error
from dist_ckpt.interop.readers.torch_pickles import TORCH_NAMES, TensorView, resolve_storage
from dist_ckpt.interop.readers.virtual_checkpoint import (
    MODEL,
    CheckedRange,
    ForeignChunk,
    ForeignState,
)
from dist_ckpt.interop.registry import is_file, open_foreign_file, read_bytes
from dist_ckpt.message_text import listed

_MODEL_SUFFIX = ".bin"

_MAX_PICKLE_NBYTES = 1 << 30

# Views of one storage become separate tensors. All together may have at most this multiple of the
# archive's size, and `_FREE_NBYTES` more.
_MAX_EXPANSION = 16
_FREE_NBYTES = 1 << 20

# An archive of at most this size is read as a whole.
_SMALL_NBYTES = 64 << 10


def read(storage: Storage, path: str, import_filter: ImportFilter) -> ForeignState:
    """Return the state in a file. A state dict with only tensors becomes `{"model": ...}`.

    A path may also be a folder with a model in such files, or their index. CorruptError,
    IncompatibleError for another kind of file, or values that cannot be stored.
    """
    nested = NestedState(path, import_filter)
    if (files := _find_model_files(storage, path)) is not None:
        for file, names in sorted(files.items()):
            _add_part(nested, storage, file, names)
        return nested.state()
    with open_archive(storage, path) as archive:
        state = read_dict(archive)
        if all(isinstance(value, TensorView) for value in state.values()):
            state = {MODEL: state if state_dict_metadata(state) else dict(state)}
        nested.add_top(state, archive)
    return nested.state()


def _find_model_files(storage: Storage, path: str) -> dict[str, set[str] | None] | None:
    """Return the files of a model, each with its names in the index; None if a path is a file.

    Without an index the names are None: all that are in the file.
    """
    if is_index(path.rpartition("/")[2], _MODEL_SUFFIX):
        return _read_index(storage, path)
    try:
        entries = [entry.name for entry in storage.list(path)]
    except (FileNotFoundError, NotADirectoryError, CheckpointError):
        return None
    if (model := find_model(entries, _MODEL_SUFFIX, path)) is None:
        return None
    if model.index is not None:
        return _read_index(storage, f"{path}/{model.index}")
    return {f"{path}/{file}": None for file in model.files}


def _read_index(storage: Storage, path: str) -> dict[str, set[str] | None]:
    files_by_name, _ = parse_index(read_bytes(storage, path, MAX_INDEX_NBYTES), path)
    names: dict[str, set[str]] = {}
    for name, file in files_by_name.items():
        names.setdefault(f"{path.rpartition('/')[0]}/{file}", set()).add(name)
    return {**names}


def _add_part(nested: NestedState, storage: Storage, path: str, names: set[str] | None) -> None:
    """Add the tensors in one of a model's files, below `model`."""
    with open_archive(storage, path) as archive:
        state = read_dict(archive)
        if missing := sorted((names or set()) - state.keys()):
            raise CorruptError(
                f"{path} lacks tensors that the index names for it: {listed(missing)}; fetch it "
                f"again"
            )
        chosen = {k: value for k, value in state.items() if names is None or k in names}
        nested.add_versions(MODEL, state, chosen, archive.budget)
        for name, value in chosen.items():
            nested.add((MODEL, name), value, archive)


def read_dict(archive: Archive) -> dict[Any, object]:
    """Return the nonempty dict in an archive. IncompatibleError for anything else."""
    state = archive.read()
    if isinstance(state, UnknownObject):
        raise unknown_error(state, archive.label)
    if not isinstance(state, dict) or not state:
        raise IncompatibleError(
            f"{archive.label} contains a {type(state).__name__}, not a nonempty dict: save a dict "
            f"with torch.save"
        )
    return state


@contextmanager
def open_archive(
    storage: Storage, path: str, table: Mapping[str, object] = TORCH_NAMES
) -> Iterator[Archive]:
    """Open a file of torch.save; `table` has the allowed names. NotFoundError if it is missing."""
    try:
        file = open_foreign_file(storage, path)
    except CorruptError:
        if is_file(storage, path):
            raise
        raise IncompatibleError(
            f"{path} is not a regular file. Pass the path of a file of torch.save. For a folder, "
            f"name the system that wrote it (see `dist-ckpt import --help`)"
        ) from None
    with closing(file):
        yield Archive(file, path, 0, file.nbytes, path, table)


class Archive:
    """An archive of torch.save: `nbytes` bytes of a file, from `start` on.

    `label` names it in errors; `table` has the allowed names of its pickle. The caller closes the
    file.
    """

    def __init__(
        self,
        file: ReadableFile,
        path: str,
        start: int,
        nbytes: int,
        label: str,
        table: Mapping[str, object] = TORCH_NAMES,
    ) -> None:
        self._file = file
        self._path = path
        self._start = start
        self._nbytes = nbytes
        self._whole: bytes | None = None
        self.label = label
        self.budget = PickleBudget(0)
        self._nbytes_left = _MAX_EXPANSION * nbytes + _FREE_NBYTES
        self._located: set[TensorView] = set()
        self._table = table
        if start + nbytes > file.nbytes:
            raise CorruptError(f"{label}: {path} is cut off; restore it from a copy")
        self._whole = self._read(0, nbytes) if nbytes <= _SMALL_NBYTES else None
        first_bytes = self._read(0, min(nbytes, 4))
        if first_bytes[:2] == b"\x80\x02":
            raise IncompatibleError(
                f"{label} is one pickle, written by an old torch: load it with "
                f"torch.load(weights_only=True) and save it again with torch.save"
            )
        if first_bytes != b"PK\x03\x04":
            raise CorruptError(
                f"{label} is not a file of torch.save; check the path, or fetch it again"
            )
        self._records = ZipRecords(self._read, nbytes, label)

    def read(self) -> object:
        """Return the saved value: plain data, with a `TensorView` in place of each tensor."""
        records = self._records.records
        if "constants.pkl" in records:
            raise IncompatibleError(
                f"{self.label} contains a TorchScript program: save its state_dict() instead"
            )
        if "byteorder" in records and self._records.read("byteorder", 16) != b"little":
            raise IncompatibleError(
                f"{self.label} was saved on a big-endian machine: load it with torch and save it "
                f"again"
            )
        data = self._records.read("data.pkl", _MAX_PICKLE_NBYTES)
        self.budget = PickleBudget(len(data))
        return restricted_pickle.read(
            data, self._table, self.label, resolve_storage, keep_unknown=True
        )

    def locate(self, view: TensorView, fqn: str) -> ForeignChunk:
        """Return the location of a tensor's elements, as a whole tensor."""
        name, data = f"data/{view.storage.key}", view.storage.data
        start, nbytes = self._records.locate(name) if data is None else (0, len(data))
        first, end = (n * view.itemsize for n in (view.start, view.start + view.num_spanned))
        if end > nbytes and view.num_spanned:
            raise CorruptError(
                f"{self.label}: {fqn}, {list(view.shape)} of {view.dtype}, needs more than its "
                f"{nbytes} bytes; fetch the file again"
            )
        if prod(view.shape) > view.num_spanned:
            raise IncompatibleError(
                f"{self.label}: {fqn} is an expanded tensor, whose elements share memory: save it "
                f"again after contiguous()"
            )
        if view not in self._located:
            self._located.add(view)
            self._nbytes_left -= prod(view.shape) * view.itemsize
        if self._nbytes_left < 0:
            raise CorruptError(
                f"{self.label}: its tensors up to {fqn} have more than {_MAX_EXPANSION} times its "
                f"{self._nbytes} bytes: save clones of them"
            )
        cell, strides = Region.whole(view.shape), None if view.is_contiguous else view.strides
        if data is not None:  # the pickle has a checksum, which was checked
            return ForeignChunk(cell, self._path, first, strides, data=data)
        label, crc32 = f"{self.label}: its record {name}", self._records.records[name].checksum
        return ForeignChunk(
            cell,
            self._path,
            self._start + start + first,
            strides,
            CheckedRange(label, self._start + start, nbytes, crc32),
        )

    def read_tensor(self, view: TensorView, fqn: str) -> bytes:
        """Return the bytes of a small contiguous tensor."""
        chunk = self.locate(view, fqn)
        nbytes = prod(view.shape) * view.itemsize
        if not view.is_contiguous or nbytes > _MAX_PICKLE_NBYTES:
            raise CorruptError(f"{self.label}: {fqn} is not small and contiguous; use another file")
        if chunk.data is not None:
            return chunk.data[chunk.start :][:nbytes]
        assert chunk.record is not None
        chunk.record.check(self._file)
        return self._read(chunk.start - self._start, nbytes)

    def _read(self, offset: int, nbytes: int) -> bytes:
        if self._whole is not None:
            return self._whole[offset : offset + nbytes]
        data = bytearray(nbytes)
        count = self._file.read_into(self._start + offset, memoryview(data))
        return bytes(data[:count])


# --- zip records -----------------------------------------------------------------------------

_END = struct.Struct("<4s4H2LH")
_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s4x2H4x3L3H8xL")
_LOCAL = struct.Struct("<4s5H3L2H")
_IN_ZIP64_FIELD = 0xFFFFFFFF  # in place of a number that needs 64 bits
_ENCRYPTED = 1

# The size of the first read, at the archive's end.
_TAIL_NBYTES = 4096

# A directory is read whole, so a larger one is refused. This is enough for some million records.
_MAX_DIRECTORY_NBYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class ZipRecord:
    """A record: the size of its data, the offset of its header, and its name with the folder.

    `is_plain` is True if it is neither compressed nor encrypted. `checksum` is its CRC-32, or 0 if
    torch wrote none.
    """

    nbytes: int
    header_at: int
    full_name: bytes
    is_plain: bool
    checksum: int


class ZipRecords:
    """The uncompressed records of a zip archive of `nbytes` bytes.

    `read_bytes(offset, nbytes)` reads the archive; `label` names it in errors. CorruptError for an
    incomplete archive, IncompatibleError for a compressed record. `zipfile` is not used. It does
    not return the offset of a record's data, and accepts a directory of any size and two records of
    one name.
    """

    def __init__(self, read_bytes: Callable[[int, int], bytes], nbytes: int, label: str) -> None:
        self._read_bytes = read_bytes
        self._nbytes = nbytes
        self._label = label
        self.records: dict[str, ZipRecord] = {}
        start, size = self._find_directory()
        if size > _MAX_DIRECTORY_NBYTES:
            raise self._corrupt(f"a directory of {size} bytes")
        data = self._read_exactly(start, size)
        at = 0
        while at < size:
            at = self._add_entry(data, at)

    def read(self, name: str, max_nbytes: int) -> bytes:
        """Return the data of a record, after a check of its checksum."""
        start, nbytes = self.locate(name)
        if nbytes > max_nbytes:
            raise self._corrupt(f"its record {name} has {nbytes} bytes, more than {max_nbytes}")
        data = self._read_exactly(start, nbytes)
        checksum = self.records[name].checksum
        if checksum and zlib.crc32(data) != checksum:
            raise self._corrupt(f"its record {name} has another checksum than was written")
        return data

    def locate(self, name: str) -> tuple[int, int]:
        """Return the offset of a record's data, and its size."""
        record = self.records.get(name)
        if record is None:
            raise self._corrupt(f"it has no record {name}")
        if not record.is_plain:
            raise IncompatibleError(
                f"{self._label}: its record {name!r} is compressed: save it again with torch.save"
            )
        head = self._read_exactly(record.header_at, _LOCAL.size + len(record.full_name))
        sign, *_, name_nbytes, extra_nbytes = _LOCAL.unpack_from(head)
        if sign != b"PK\x03\x04" or head[_LOCAL.size :][:name_nbytes] != record.full_name:
            raise self._corrupt(f"the header of its record {name} is damaged")
        start = record.header_at + _LOCAL.size + name_nbytes + extra_nbytes
        if start + record.nbytes > self._nbytes:
            raise self._corrupt(f"its record {name} ends after the file")
        return start, record.nbytes

    def _find_directory(self) -> tuple[int, int]:
        """Return the offset of the directory, and its size."""
        tail_at = max(self._nbytes - _TAIL_NBYTES, 0)
        tail = self._read_exactly(tail_at, self._nbytes - tail_at)
        at = tail.rfind(b"PK\x05\x06")
        if at < 0 or at + _END.size > len(tail):
            raise self._corrupt("not an archive of torch.save, or cut off")
        *_, size, start, _ = _END.unpack_from(tail, at)
        locator_at = at - _LOCATOR.size
        if locator_at >= 0 and tail[locator_at:][:4] == b"PK\x06\x07":
            _, _, end_at, _ = _LOCATOR.unpack_from(tail, locator_at)
            end = self._read_exactly(end_at, _END64.size)
            sign, *_, size, start = _END64.unpack(end)
            if sign != b"PK\x06\x06":
                raise self._corrupt("the end of its directory is damaged")
        return start, size

    def _add_entry(self, data: bytes, at: int) -> int:
        """Add the record of a directory entry; return the offset of the next entry."""
        if at + _ENTRY.size > len(data):
            raise self._corrupt("its directory is cut off")
        fields = _ENTRY.unpack_from(data, at)
        sign, flags, method, checksum, packed, size, *lengths, header_at = fields
        name_nbytes, extra_nbytes, comment_nbytes = lengths
        name_at = at + _ENTRY.size
        extra_at = name_at + name_nbytes
        end: int = extra_at + extra_nbytes + comment_nbytes
        if sign != b"PK\x01\x02" or end > len(data):
            raise self._corrupt("its directory is damaged")
        full_name = data[name_at:extra_at]
        name = full_name.decode("utf-8", "replace").partition("/")[2]
        wide = _zip64_numbers(data[extra_at : extra_at + extra_nbytes])
        size, packed, header_at = (
            next(wide, -1) if value == _IN_ZIP64_FIELD else value
            for value in (size, packed, header_at)
        )
        if min(size, packed, header_at) < 0:
            raise self._corrupt("its directory is damaged")
        if name in self.records:
            raise self._corrupt(f"two records of the name {name!r}")
        is_plain = not method and packed == size and not flags & _ENCRYPTED
        self.records[name] = ZipRecord(size, header_at, full_name, is_plain, checksum)
        return end

    def _read_exactly(self, offset: int, nbytes: int) -> bytes:
        if offset < 0 or nbytes < 0 or offset + nbytes > self._nbytes:
            raise self._corrupt("it is cut off")
        data = self._read_bytes(offset, nbytes)
        if len(data) < nbytes:
            raise self._corrupt("it ended while it was read")
        return data

    def _corrupt(self, why: str) -> CorruptError:
        return CorruptError(f"{self._label}: {why}; fetch it again")


def _zip64_numbers(extra: bytes) -> Iterator[int]:
    """Yield the numbers of 64 bits in the extra fields of an entry."""
    at = 0
    while at + 4 <= len(extra):
        field_id, nbytes = struct.unpack_from("<2H", extra, at)
        if field_id == 1:
            for position in range(at + 4, min(at + 4 + nbytes, len(extra)) - 7, 8):
                yield struct.unpack_from("<Q", extra, position)[0]
        at += 4 + nbytes
