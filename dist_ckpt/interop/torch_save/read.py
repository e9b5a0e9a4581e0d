"""Files of torch.save: zip archives with a pickle, which is read without unpickling it.

The bytes of a tensor are uncompressed in the archive and are read in place. The format:
torch/serialization.py, and `interop/pickles/restricted_pickle.py` here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from math import prod
from typing import Any

from dist_ckpt.core.storage import ReadableFile, Storage, real_path
from dist_ckpt.errors import (
    CheckpointError,
    CorruptError,
    IncompatibleError,
    NotFoundError,
    StorageError,
)
from dist_ckpt.interop.pickles import restricted_pickle
from dist_ckpt.interop.pickles.restricted_pickle import PickleBudget, UnknownObject, remedied
from dist_ckpt.interop.pickles.torch_pickles import TABLE, TensorView, storage_of
from dist_ckpt.interop.pickles.zip_records import ZipRecords
from dist_ckpt.interop.readers.nested_state import ALL, ImportFilter, Nested
from dist_ckpt.interop.readers.virtual_checkpoint import ForeignState

MAX_PICKLE_NBYTES = 1 << 30

# The top-level key for a state dict of tensors alone, as for a safetensors file.
MODEL = "model"

# Views of one storage are stored one by one, up to this multiple of the file's size in all.
_MOST_TIMES = 16
_FREE_NBYTES = 1 << 20

# An archive of at most this size is read as a whole.
_SMALL_NBYTES = 64 << 10


def read(storage: Storage, path: str, interest: ImportFilter = ALL) -> ForeignState:
    """Return the state in a file; a state dict of tensors alone becomes `{"model": ...}`.

    CorruptError, IncompatibleError for another kind of file, or values that cannot be stored.
    """
    with opened(storage, path) as archive:
        state = dict_of(archive)
        if all(isinstance(value, TensorView) for value in state.values()):
            state = {MODEL: dict(state)}
        nested = Nested(path, interest)
        nested.add_top(state, archive)
    return nested.state()


def dict_of(archive: Archive) -> dict[Any, object]:
    """Return the nonempty dict in an archive. IncompatibleError for anything else."""
    state = archive.read()
    if isinstance(state, UnknownObject):
        raise remedied(state, archive.label)
    if not isinstance(state, dict) or not state:
        raise IncompatibleError(
            f"{archive.label} contains a {type(state).__name__}, not a nonempty dict: save a dict "
            f"with torch.save"
        )
    return state


@contextmanager
def opened(storage: Storage, path: str, table: Mapping[str, object] = TABLE) -> Iterator[Archive]:
    """Open a file of torch.save; `table` has the allowed names. NotFoundError if it is missing."""
    try:
        file = opened_file(storage, path)
    except FileNotFoundError:
        raise NotFoundError(f"{path}: the file does not exist; check the path") from None
    except CorruptError:
        raise IncompatibleError(
            f"{path} is not a regular file. Pass the path of a file of torch.save. For a folder, "
            f"name the system that wrote it (see `dist-ckpt import --help`)"
        ) from None
    with closing(file):
        yield Archive(file, path, 0, file.nbytes, path, table)


class Archive:
    """An archive of torch.save in a file: the bytes `start` to `start + nbytes`.

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
        table: Mapping[str, object] = TABLE,
    ) -> None:
        self._file = file
        self._path = path
        self._start = start
        self._nbytes = nbytes
        self.label = label
        self._left = _MOST_TIMES * nbytes + _FREE_NBYTES
        self._located: set[TensorView] = set()
        self._table = table
        self._all: bytes | None = None
        if start + nbytes > file.nbytes:
            raise CorruptError(f"{label}: {path} is cut off; restore it from a copy")
        if nbytes <= _SMALL_NBYTES:
            self._all = self._pread(0, nbytes)
        start_of_it = self._read(0, min(nbytes, 4))
        if start_of_it[:2] == b"\x80\x02":
            raise IncompatibleError(
                f"{label} is one pickle, written by an old torch: load it with "
                f"torch.load(weights_only=True) and save it again with torch.save"
            )
        if start_of_it != b"PK\x03\x04":
            raise CorruptError(
                f"{label} is not a file of torch.save; check the path, or fetch it again"
            )
        self._records = ZipRecords(self._read, nbytes, label)
        self.budget = PickleBudget(0)

    def read(self) -> object:
        """Return the saved value: plain data, with a `TensorView` in place of each tensor."""
        records = self._records.records
        if "constants.pkl" in records:
            raise IncompatibleError(
                f"{self.label} contains a TorchScript program: save its state_dict() instead"
            )
        if "byteorder" in records and self._records.bytes_of("byteorder", 16) != b"little":
            raise IncompatibleError(
                f"{self.label} was saved on a big-endian machine: load it with torch and save it "
                f"again"
            )
        data = self._records.bytes_of("data.pkl", MAX_PICKLE_NBYTES)
        self.budget = PickleBudget(len(data))
        return restricted_pickle.read(data, self._table, self.label, storage_of, keep_unknown=True)

    def locate(self, view: TensorView, fqn: str) -> tuple[str, int]:
        """Return the file with a tensor's elements, and their offset."""
        start, nbytes = self._records.span_of(f"data/{view.storage.key}")
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
        self._count(view, fqn)
        return self._path, self._start + start + first

    def _count(self, view: TensorView, fqn: str) -> None:
        """Raise CorruptError if the tensors are far larger than the archive."""
        if view not in self._located:
            self._located.add(view)
            self._left -= prod(view.shape) * view.itemsize
        if self._left < 0:
            raise CorruptError(
                f"{self.label}: its tensors up to {fqn} have more than {_MOST_TIMES} times its "
                f"{self._nbytes} bytes: save clones of them"
            )

    def bytes_of(self, view: TensorView, fqn: str) -> bytes:
        """Return the bytes of a small contiguous tensor."""
        _, start = self.locate(view, fqn)
        nbytes = prod(view.shape) * view.itemsize
        if not view.is_contiguous or nbytes > MAX_PICKLE_NBYTES:
            raise CorruptError(f"{self.label}: {fqn} is not small and contiguous; use another file")
        return self._read(start - self._start, nbytes)

    def _read(self, offset: int, nbytes: int) -> bytes:
        if self._all is not None:
            return self._all[offset : offset + nbytes]
        return self._pread(offset, nbytes)

    def _pread(self, offset: int, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        count = self._file.read_into(self._start + offset, memoryview(data))
        return bytes(data[:count])


def opened_file(storage: Storage, path: str) -> ReadableFile:
    """Open a file, following links. FileNotFoundError, also if a parent is a file."""
    try:
        return storage.open(real_path(path))
    except StorageError as error:
        if isinstance(error.__cause__, NotADirectoryError):
            raise FileNotFoundError(path) from None
        raise


def is_file(storage: Storage, path: str) -> bool:
    """Return True if a file exists at a path."""
    try:
        storage.open(real_path(path)).close()
    except (FileNotFoundError, CheckpointError):
        return False
    return True


def whole_file(storage: Storage, path: str, most: int) -> bytes:
    """Return the bytes of a file. FileNotFoundError, CorruptError if it has more than `most`."""
    with closing(opened_file(storage, path)) as file:
        if file.nbytes > most:
            raise CorruptError(
                f"{path} has {file.nbytes} bytes, {most} are the most; fetch it again"
            )
        data = bytearray(file.nbytes)
        count = file.read_into(0, memoryview(data))
    return bytes(data[:count])
