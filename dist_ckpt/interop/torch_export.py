"""A checkpoint as one file that `torch.load` reads, also with `weights_only=True`.

    torch_export.export_file("runs/a@latest", "model.pt", only="model")
    model.load_state_dict(torch.load("model.pt"))

The other way needs no function: `dist_ckpt.interop.dcp.load` reads such a file where it lies.
"""

from __future__ import annotations

import io
import logging
import os
import pickle  # noqa: TID251 - what torch.load reads has one; written here, never read
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from math import prod
from typing import IO, Any

import torch

from dist_ckpt.binding.saved_tree import Saved, saved_of
from dist_ckpt.commit import attempts
from dist_ckpt.errors import IncompatibleError, listed
from dist_ckpt.foreign.find import open_source
from dist_ckpt.foreign.torch_pickles import STORAGES
from dist_ckpt.format import filenames
from dist_ckpt.format.dtypes import DTYPES
from dist_ckpt.format.geometry import Shape
from dist_ckpt.format.index import TensorRecord
from dist_ckpt.format.objects_file import ObjectsFile
from dist_ckpt.interop.dcp_metadata import models_of, relative
from dist_ckpt.interop.hf_files import FileWriter
from dist_ckpt.interop.hf_plan import Exported, ExportedFile
from dist_ckpt.interop.local_files import check_new_file, new_file
from dist_ckpt.interop.new_folder import check_outside
from dist_ckpt.offline.rewriting import CopyProgress, DryRun
from dist_ckpt.planning.selection import Selection, selection_of
from dist_ckpt.reports import Progress
from dist_ckpt.runs.selectors import resolve
from dist_ckpt.shard_io.open_files import read_objects
from dist_ckpt.state.containers import RECORD, container
from dist_ckpt.state.local_tensors import torch_dtype
from dist_ckpt.state.plain_torch import make
from dist_ckpt.storage import real_path

__all__ = ["export_file"]

_log = logging.getLogger("dist_ckpt")

# What torch.save calls the folder in an archive that it writes to no path.
_FOLDER = "archive"

# Torch writes tensors at such offsets, so that they can be mapped into memory.
_ALIGNMENT = 64

# Before a record's name; after it, what zipfile puts there for records of any size; and how what
# fills the place up begins: its two letters, as torch has them, and its size.
_HEADER_NBYTES, _ZIP64_NBYTES, _PADDING = 30, 20, struct.Struct("<2sH")

# What torch.load takes with weights_only=True, besides containers of them.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)


def export_file(  # noqa: PLR0913 - a front door
    source: str | os.PathLike[str],
    file: str | os.PathLike[str],
    *,
    only: str | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> int:
    """Write the checkpoint at `source` as a file for `torch.load`; return its size in bytes.

    `source` is what `dc.open` takes, such as "runs/a@latest"; however it was sharded, tensors are
    whole, on the CPU, and those that are tied share a storage. It is the state that was saved:
    containers and values as they were; parameters of an optimizer that `dc.save` has named go by
    the names that they have in their model, as torch's `get_optimizer_state_dict` has it, which the
    optimizer's `load_state_dict` takes as well. `only` is the component, or a container within one,
    that is written instead of all. `include` and `exclude` are globs on names in the checkpoint.

    One process does it, with some tens of MiB however large the tensors are; every block that is
    read is checked.
    `progress` is called with the bytes done, and those in all.

    On return the file is durable; until then it has another name, and if this raises there is none.
    Of values that `torch.load` takes with `weights_only=False` alone a warning is logged. Raises
    IncompatibleError for what such a file cannot hold, with all names: values of each rank and
    quantized tensors. ExistsError without `overwrite` if something is there; otherwise what
    `dc.open` and reading raise.
    """
    selection = selection_of(include, exclude)
    with _planned(source, file, only, selection, overwrite=overwrite) as plan:
        if plan.not_plain:
            _log.warning(
                "%s: torch.load needs weights_only=False for %s", file, listed(plan.not_plain)
            )
        tell = CopyProgress(plan.data_nbytes, progress)
        with new_file(file, overwrite=overwrite, nbytes=plan.nbytes) as out:
            with zipfile.ZipFile(out, "w") as archive:
                _put(archive, "data.pkl", plan.pickled)
                _put(archive, "byteorder", b"little")
                _put_tensors(archive, plan, tell)
                _put(archive, "version", b"3\n")
            return out.nbytes


def would_export_file(
    source: str | os.PathLike[str],
    file: str | os.PathLike[str],
    *,
    only: str | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    overwrite: bool = False,
) -> DryRun:
    """Return what `export_file` would write. Nothing is changed. Raises what it does before.

    The size is the least: what lies around each tensor in the archive is not counted.
    """
    selection = selection_of(include, exclude)
    with _planned(source, file, only, selection, overwrite=overwrite) as plan:
        nbytes = plan.nbytes
    where = check_new_file(file, overwrite=overwrite)
    return DryRun(where, {os.path.basename(where): nbytes}, (where,) * os.path.lexists(where))


@dataclass(frozen=True, slots=True)
class _ArchivePlan:
    """What is read, and written: `tensors` are the records of data, in their order."""

    reader: FileWriter
    pickled: bytes
    tensors: tuple[Exported, ...]
    not_plain: tuple[str, ...]

    @property
    def data_nbytes(self) -> int:
        return sum(one.nbytes for one in self.tensors)

    @property
    def nbytes(self) -> int:
        """What the archive has at least: not what lies around each record."""
        return len(self.pickled) + self.data_nbytes


@contextmanager
def _planned(
    source: str | os.PathLike[str],
    file: str | os.PathLike[str],
    only: str | None,
    selection: Selection,
    *,
    overwrite: bool,
) -> Iterator[_ArchivePlan]:
    """Check all that can be before anything is written."""
    if only is not None and (not isinstance(only, str) or not only):
        raise ValueError(f"only={only!r}: give the name of a component, or None for all")
    storage, path = open_source(resolve(source))
    check_outside(real_path(path), real_path(check_new_file(file, overwrite=overwrite)))
    attempt, index = attempts.find(storage, path)
    folder = f"{path}/{attempt.name}"
    with attempts.while_it_is_there(storage, path, attempt):
        records = {record.name: record for record in index.objects}

        def read(name: str) -> ObjectsFile:
            if name not in records:
                return ObjectsFile()
            return read_objects(storage, folder, records[name], make=make)

        saved = saved_of(
            index.catalog,
            read(filenames.OBJECTS),
            lambda rank: read(filenames.objects_file(rank)),
        )
        contents = _NestedState(saved, selection)
        pickled = _pickled(contents.of(path, only))
        reader = FileWriter(storage, folder, index, lambda _: None)
        # The widest first: so each is aligned to its own size, and no window ends in an element.
        tensors = sorted(contents.tensors, key=lambda one: -DTYPES[one.dtype].itemsize)
        yield _ArchivePlan(reader, pickled, tuple(tensors), tuple(contents.not_plain))


# --- the state ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _DataRecord:
    """The data of a tensor: the number of its record, and what it is made of."""

    number: int
    dtype: str
    numel: int


@dataclass(frozen=True, slots=True, eq=False)
class _PickledTensor:
    """A tensor in the state that is pickled."""

    storage: _DataRecord
    shape: Shape


class _NestedState:
    """The state of a checkpoint, nested as it was saved."""

    def __init__(self, saved: Saved, selection: Selection) -> None:
        self.tensors: list[Exported] = []
        self.not_plain: list[str] = []
        self._saved = saved
        self._selection = selection
        self._models = models_of(
            saved.main, frozenset((*saved.catalog.tensors, *saved.catalog.aliases))
        )
        self._storages: dict[str, _DataRecord] = {}
        self._problems: list[str] = []

    def of(self, path: str, only: str | None) -> object:
        """Return all of it, or a container. IncompatibleError names all that has no place.

        ValueError for a pattern that matches nothing, and for patterns that leave nothing.
        """
        if problems := self._selection.unmatched(self._saved.leaves):
            raise ValueError("; ".join(problems))
        if only is not None and only not in self._saved.kinds:
            there = [name for _, name in self._saved.children("") if name in self._saved.kinds]
            raise IncompatibleError(
                f"{path} has no container {only!r}: of what it has "
                f"({listed(there) or 'nothing'}) give one (only=, on the command line --only)"
            )
        below = self._saved.below(only or "")
        is_some = any(name in self._selection for name in below)
        if not self._selection.is_everything and not is_some:
            raise ValueError(f"{self._selection} leaves nothing: give other patterns")
        state = self._at(only or "")
        if self._problems:
            raise IncompatibleError(
                f"{path}: torch.save has no place for all of it: {listed(self._problems, '; ')}"
            )
        return state

    def _at(self, name: str) -> object:
        saved = self._saved
        if (found := saved.tensor(name)) is not None:
            return self._tensor(*found)
        if saved.keys_of(name) is not None:
            self._refuse(name, "has a value for each rank")
            return None
        if name in saved.kinds:
            return self._container(name)
        value = relative(name, saved.value(name), self._models)
        if name.endswith(f".{RECORD}"):
            self._refuse(name.removesuffix(f".{RECORD}"), "is a quantized tensor, made of others")
        else:
            self._look_at(name, value)
        return value

    def _look_at(self, name: str, value: object) -> None:
        if not _is_plain(value):
            self.not_plain.append(name)

    def _container(self, name: str) -> object:
        kind, model = self._saved.kinds[name], self._models.get(name)
        children = self._saved.children(name)
        items = [(key, self._at(child)) for key, child in children if self._takes(child)]
        if model is not None:
            items = [(str(key).removeprefix(f"{model}."), child) for key, child in items]
        if name in self._saved.params:  # a group of an optimizer: the items are what is not in it
            value = self._saved.value(name)
            assert isinstance(value, dict)
            self._look_at(name, value)
            params = relative(f"{name}.params", value["params"], self._models)
            items = [*{**value, "params": params}.items(), *items]
        if kind not in ("dict", "OrderedDict", "list", "tuple"):
            self.not_plain.append(name)
        return container(kind, items)

    def _takes(self, name: str) -> bool:
        """Say whether something is chosen of what is at and below a name, or nothing lies there."""
        if self._selection.is_everything:
            return True
        leaves = [name] if name in self._saved.leaves else [*self._saved.below(name)]
        return not leaves or any(leaf in self._selection for leaf in leaves)

    def _tensor(self, fqn: str, record: TensorRecord) -> _PickledTensor:
        if fqn not in self._storages:
            number, shape, dtype = len(self.tensors), record.shape, record.dtype
            self.tensors.append(Exported(f"data/{number}", fqn, dtype, dtype, shape))
            self._storages[fqn] = _DataRecord(number, dtype, prod(shape))
        return _PickledTensor(self._storages[fqn], record.shape)

    def _refuse(self, name: str, why: str) -> None:
        self._problems.append(f"{name} {why}: leave it out (exclude={name!r})")


def _is_plain(value: object) -> bool:
    """Say whether torch.load takes a value with weights_only=True."""
    if type(value) in (dict, OrderedDict):
        assert isinstance(value, Mapping)
        return all(_is_plain(key) and _is_plain(child) for key, child in value.items())
    if type(value) in (list, tuple, set):
        assert isinstance(value, Collection)
        return all(map(_is_plain, value))
    return type(value) in _PLAIN and value != b""  # of which a pickle has a call of bytes


# --- the archive -------------------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    """Pickles a state as torch.save does, but for the data of its tensors."""

    def persistent_id(self, value: object) -> tuple[object, ...] | None:
        if type(value) is not _DataRecord:
            return None
        kind = _kinds_of_storages().get(value.dtype)
        if kind is None:
            nbytes = value.numel * DTYPES[value.dtype].itemsize
            return "storage", torch.UntypedStorage, str(value.number), "cpu", nbytes
        return "storage", kind, str(value.number), "cpu", value.numel

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not _PickledTensor:
            return NotImplemented
        # Which function makes it again, of a storage with a dtype or without, torch says itself.
        function, like = torch.empty(0, dtype=torch_dtype(value.storage.dtype)).__reduce_ex__(2)
        _, start, _, _, *further = like
        return function, (value.storage, start, value.shape, _strides(value.shape), *further)


def _kinds_of_storages() -> dict[str, type]:
    return {dtype: getattr(torch, f"{name}Storage") for name, dtype in STORAGES.items()}


def _strides(shape: Shape) -> Shape:
    return tuple(prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))


def _pickled(state: object) -> bytes:
    held = io.BytesIO()
    _Pickler(held, protocol=2).dump(state)
    return held.getvalue()


def _put(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    with _record(archive, name) as record:
        record.write(data)


def _put_tensors(archive: zipfile.ZipFile, plan: _ArchivePlan, tell: CopyProgress) -> None:
    """Write the data of all tensors, a record each, from windows that are read one by one."""
    placed, start = [], 0
    for tensor in plan.tensors:
        placed.append((tensor, start))
        start += tensor.nbytes
    with closing(_parts(plan.reader, ExportedFile("", b"", tuple(placed)))) as parts:
        for tensor in plan.tensors:
            with _record(archive, tensor.name) as record:
                left = tensor.nbytes
                while left:
                    part = next(parts)
                    record.write(part)
                    tell(part.nbytes)
                    left -= part.nbytes


def _parts(reader: FileWriter, file: ExportedFile) -> Generator[memoryview]:
    """Yield the data of the tensors, in order; no part is of two of them."""
    for window, memory in reader.windows(file):
        start = 0
        for tensor, numel in window.parts:
            stop = start + numel * DTYPES[tensor.dtype].itemsize
            yield memory[start:stop]
            start = stop


@contextmanager
def _record(archive: zipfile.ZipFile, name: str) -> Iterator[IO[bytes]]:
    """Write a record, whose data begins where torch would have it begin."""
    info = zipfile.ZipInfo(f"{_FOLDER}/{name}")
    assert archive.fp is not None
    before = archive.fp.tell() + _HEADER_NBYTES + len(info.filename) + _ZIP64_NBYTES
    room = -(before + _PADDING.size) % _ALIGNMENT
    info.extra = _PADDING.pack(b"FB", room) + bytes(room)
    with archive.open(info, "w", force_zip64=True) as record:
        yield record
