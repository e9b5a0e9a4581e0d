"""Files of torch.save: zip archives with a pickle, which is read without unpickling it.

The bytes of a tensor lie in the archive uncompressed, so it is read from there, as from a
safetensors file. The format: torch/serialization.py, and `restricted_pickle.py` here.
"""

from __future__ import annotations

from contextlib import closing
from math import prod

from dist_ckpt.errors import CorruptError, IncompatibleError, NotFoundError
from dist_ckpt.foreign import restricted_pickle
from dist_ckpt.foreign.nested_state import Nested
from dist_ckpt.foreign.restricted_pickle import PickleBudget
from dist_ckpt.foreign.torch_pickles import TABLE, TensorView, storage_of
from dist_ckpt.foreign.virtual_checkpoint import ForeignState
from dist_ckpt.foreign.zip_records import ZipRecords
from dist_ckpt.format.dtypes import DTYPES
from dist_ckpt.storage import ReadableFile, Storage, real_path

MAX_PICKLE_NBYTES = 1 << 30

# As of a safetensors file: what the tensors are parts of, if there is nothing else.
MODEL = "model"

# Views of one storage may be stored one by one; a file may not come to more than so many times
# its size by that.
_MOST_TIMES = 16
_FREE_NBYTES = 1 << 20

# What is read whole at once, of an archive that is a part of a file.
_SMALL_NBYTES = 64 << 10


def read_file(storage: Storage, path: str) -> ForeignState:
    """Return what a file holds; a state dict of tensors alone is that of `{"model": model}`.

    CorruptError, IncompatibleError for what is no such file, or holds what no checkpoint does.
    """
    try:
        file = storage.open(real_path(path))
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError(f"{path}: there is no such file; check the path") from None
    with closing(file):
        archive = Archive(file, path, 0, file.nbytes, path)
        state = archive.read()
        if not isinstance(state, dict) or not state:
            raise IncompatibleError(
                f"{path} holds a {type(state).__name__}, no dict with anything in it: save a dict "
                f"with torch.save"
            )
        if all(isinstance(value, TensorView) for value in state.values()):
            state = {MODEL: dict(state)}
        found = Nested(path)
        found.add("", state, archive.locate, archive.budget)
        nbytes = sum(prod(t.shape) * DTYPES[t.dtype].itemsize for t in found.tensors.values())
        if nbytes > _MOST_TIMES * file.nbytes + _FREE_NBYTES:
            raise CorruptError(
                f"{path}: its tensors come to {nbytes} bytes, and it has {file.nbytes}: save "
                f"clones of them"
            )
    return ForeignState([*found.tensors.values()], (*found.nodes,), found.values, {}, found.aliases)


class Archive:
    """An archive of torch.save that lies in a file: the bytes `start` to `start + nbytes`.

    `what` names it in errors. Close it not: the file is the caller's.
    """

    def __init__(self, file: ReadableFile, path: str, start: int, nbytes: int, what: str) -> None:
        self._file = file
        self._path = path
        self._start = start
        self._what = what
        self._all: bytes | None = None
        if start + nbytes > file.nbytes:
            raise CorruptError(f"{what}: {path} is cut off; restore it from a copy")
        if nbytes <= _SMALL_NBYTES:
            self._all = self._pread(0, nbytes)
        start_of_it = self._read(0, min(nbytes, 4))
        if start_of_it[:2] == b"\x80\x02":
            raise IncompatibleError(
                f"{what} was saved by an old torch, as one pickle: load it with "
                f"torch.load(weights_only=True) and save it again with torch.save"
            )
        if start_of_it != b"PK\x03\x04":
            raise CorruptError(f"{what} is no file of torch.save; check the path, or fetch it anew")
        self._records = ZipRecords(self._read, nbytes, what)
        self.budget = PickleBudget(0)

    def read(self) -> object:
        """Return what was saved: plain data, with a `TensorView` in place of each tensor."""
        records = self._records.records
        if "constants.pkl" in records:
            raise IncompatibleError(
                f"{self._what} holds a program of TorchScript: save its state_dict() instead"
            )
        if "byteorder" in records and self._records.bytes_of("byteorder", 16) != b"little":
            raise IncompatibleError(
                f"{self._what} was saved on a big-endian machine: load it with torch and save it "
                f"again"
            )
        data = self._records.bytes_of("data.pkl", MAX_PICKLE_NBYTES)
        self.budget = PickleBudget(len(data))
        return restricted_pickle.read(data, TABLE, self._what, storage_of)

    def locate(self, view: TensorView, fqn: str) -> tuple[str, int]:
        """Return the file that a tensor's elements lie in, and where they begin."""
        start, nbytes = self._records.span_of(f"data/{view.storage.key}")
        first, end = (n * view.itemsize for n in (view.start, view.start + view.num_spanned))
        if end > nbytes and view.num_spanned:
            raise CorruptError(
                f"{self._what}: {fqn}, {list(view.shape)} of {view.dtype}, goes beyond its "
                f"{nbytes} bytes; fetch the file anew"
            )
        if prod(view.shape) > view.num_spanned:
            raise IncompatibleError(
                f"{self._what}: {fqn} is expanded, its elements share memory: save it again after "
                f"contiguous()"
            )
        return self._path, self._start + start + first

    def _read(self, offset: int, nbytes: int) -> bytes:
        if self._all is not None:
            return self._all[offset : offset + nbytes]
        return self._pread(offset, nbytes)

    def _pread(self, offset: int, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        count = self._file.read_into(self._start + offset, memoryview(data))
        return bytes(data[:count])


def whole_file(storage: Storage, path: str, most: int) -> bytes:
    """Return the bytes of a file. FileNotFoundError, CorruptError if it has more than `most`."""
    with closing(storage.open(real_path(path))) as file:
        if file.nbytes > most:
            raise CorruptError(f"{path} has {file.nbytes} bytes: too many for what it is to be")
        data = bytearray(file.nbytes)
        count = file.read_into(0, memoryview(data))
    return bytes(data[:count])
