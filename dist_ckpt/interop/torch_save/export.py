"""Export a checkpoint as one file for `torch.load`, also with `weights_only=True`.

torch_save.export_file("runs/a@latest", "model.pt", only="model")
model.load_state_dict(torch.load("model.pt"))
"""

from __future__ import annotations

import io
import logging
import os
import pickle  # noqa: TID251 - torch.load reads pickles; they are only written here
import struct
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import IO, Any

import torch

from dist_ckpt.core.checkpoint.open_checkpoint import OpenCheckpoint
from dist_ckpt.core.checkpoint.renamed_checkpoint import rename_checkpoint
from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.geometry import row_major_strides
from dist_ckpt.core.format.index.index import JOINED, TensorRecord
from dist_ckpt.core.planning.name_selection import Selection, excluded_names, parse_selection
from dist_ckpt.core.state.binding.sources.rename import RenameRules
from dist_ckpt.core.state.binding.sources.saved_tree import SavedTree, build_saved_tree
from dist_ckpt.core.state.tensors.local_tensors import torch_dtype
from dist_ckpt.core.state.tensors.plain_torch import make_torch_value
from dist_ckpt.core.state.tree.containers import RECORD, create_container, is_mapping
from dist_ckpt.core.storage import real_path
from dist_ckpt.default_opener import OPENER
from dist_ckpt.errors import CorruptError, IncompatibleError
from dist_ckpt.interop.dcp.flat_state_dict import find_trained_models, relative_param_names
from dist_ckpt.interop.hf.export import WINDOW_NBYTES, ExportedTensor
from dist_ckpt.interop.readers.torch_pickles import STORAGES
from dist_ckpt.interop.registry import SAFETENSORS
from dist_ckpt.message_text import listed
from dist_ckpt.reports import CopyProgress, Progress
from dist_ckpt.tools.new_files import (
    WritePlan,
    check_new_file,
    check_outside,
    new_file,
    plan_file_export,
)

__all__ = ["export_file"]

_log = logging.getLogger("dist_ckpt")

# The folder in the archive, as torch.save names it for a file object, and that of the data in it.
_FOLDER, _DATA_FOLDER = "archive", "data/"

# Torch writes tensors at multiples of this offset, so that they can be mapped into memory.
_ALIGNMENT = 64

# The header of a record: 30 bytes before its name, a zip64 field that zipfile writes after it, and
# a padding field. That begins with torch's letters "FB" and its size.
_HEADER_NBYTES, _ZIP64_NBYTES, _PADDING = 30, 20, struct.Struct("<2sH")


def export_file(  # noqa: PLR0913 - a front door
    source: str | os.PathLike[str],
    file: str | os.PathLike[str],
    *,
    only: str | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    rename: RenameRules | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> int:
    """Write the checkpoint at `source` as a file for `torch.load`; return its size in bytes.

    `source` is a path for `dc.open`, such as "runs/a@latest". The file has the saved state with its
    containers and values. Tensors are whole and on the CPU, and tied ones share a storage. Numpy
    arrays become tensors. Parameters of an optimizer get the names of torch's
    `get_optimizer_state_dict`, which the optimizer's `load_state_dict` also accepts. `only` is the
    one component, or container within one, to write. `include` and `exclude` are globs on names in
    the checkpoint. `rename` is that of `dc.load`, also with operations; the other options then
    take the new names.

    One process calls this. It needs some tens of MiB for tensors of any size, and checks every
    block that it reads. `progress` is called with the bytes done and in all.

    On return the file is durable. Until then it has another name, and after an error it does not
    exist. A warning lists values for which `torch.load` needs `weights_only=False`.
    IncompatibleError names all that such a file cannot store: values of each rank, quantized
    tensors, integers of less than a byte, and lists with an excluded item before others. ValueError
    for a name that torch.load would read as another format (.safetensors). ExistsError without
    `overwrite` if something exists there; otherwise the errors of `dc.open` and of reading.
    """
    plan = plan_export_file(
        source,
        file,
        only=only,
        include=include,
        exclude=exclude,
        rename=rename,
        overwrite=overwrite,
    )
    return plan.run(progress)


def plan_export_file(
    source: str | os.PathLike[str],
    file: str | os.PathLike[str],
    *,
    only: str | None = None,
    rename: RenameRules | None = None,
    overwrite: bool = False,
    **patterns: str | Sequence[str] | None,
) -> WritePlan[int]:
    """Return the plan of `export_file`. Raises the errors that it raises before it writes.

    `patterns` are `include` and `exclude`. Its size is a minimum: it does not count the archive's
    headers and padding.
    """
    selection = parse_selection(patterns.get("include"), patterns.get("exclude"))
    if only is not None and (not isinstance(only, str) or not only):
        raise ValueError(f"only={only!r}: give the name of a component, or None for all")

    def build(saved: SavedTree, path: str) -> TorchState:
        return build_torch_state(saved, path, only, selection)

    return plan_state_file(source, file, build, rename=rename, overwrite=overwrite)


# The state to pickle, its tensors, and the names of values that need `weights_only=False`.
TorchState = tuple[object, list[ExportedTensor], list[str]]


def plan_state_file(
    source: str | os.PathLike[str],
    file: str | os.PathLike[str],
    build: Callable[[SavedTree, str], TorchState],
    *,
    rename: RenameRules | None = None,
    overwrite: bool = False,
) -> WritePlan[int]:
    """Return the plan to write a file for `torch.load` with what `build` returns.

    `build` gets the saved tree and the checkpoint's path, and calls `build_torch_state`.
    """
    if os.fspath(file).endswith(SAFETENSORS):
        raise ValueError(
            f"torch.load reads files named *{SAFETENSORS} as safetensors: choose another name"
        )
    storage, source_path = OPENER.find(source)
    path = check_new_file(file, overwrite=overwrite)
    check_outside(real_path(source_path), real_path(path))
    opened = rename_checkpoint(
        OpenCheckpoint.at(storage, source_path, make=make_torch_value), rename
    )
    saved = build_saved_tree(opened.catalog, opened.objects(), opened.objects)
    state, contained, not_plain = build(saved, source_path)
    # The widest dtype first, so that each tensor is aligned to it.
    tensors = sorted(contained, key=lambda tensor: -DTYPES[tensor.dtype].itemsize)
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump(state)
    contents = _ArchiveContents(opened, buffer.getvalue(), tensors, not_plain)
    return plan_file_export(
        path, partial(_write, contents, file, overwrite=overwrite), contents.nbytes
    )


@dataclass(frozen=True, slots=True)
class _ArchiveContents:
    """The contents of an archive: `tensors` are the records of data, in their order."""

    source: OpenCheckpoint
    pickled: bytes
    tensors: Sequence[ExportedTensor]
    not_plain: Sequence[str]

    @property
    def data_nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        """The minimum size of the archive, without headers and padding."""
        return len(self.pickled) + self.data_nbytes


# --- the archive -------------------------------------------------------------------------------


def _write(
    contents: _ArchiveContents,
    file: str | os.PathLike[str],
    progress: Progress | None,
    *,
    overwrite: bool,
) -> int:
    if contents.not_plain:
        _log.warning(
            "%s: torch.load needs weights_only=False for %s", file, listed(contents.not_plain)
        )
    count_copied = CopyProgress(contents.data_nbytes, progress)
    with contents.source, new_file(file, overwrite=overwrite, nbytes=contents.nbytes) as out:
        with zipfile.ZipFile(out, "w") as archive:
            _write_record(archive, "data.pkl", contents.pickled)
            _write_record(archive, "byteorder", b"little")
            _write_tensors(archive, contents, count_copied)
            _write_record(archive, "version", b"3\n")
        return out.nbytes


def _write_record(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    with _open_record(archive, name) as record:
        record.write(data)


def _write_tensors(
    archive: zipfile.ZipFile, contents: _ArchiveContents, count_copied: CopyProgress
) -> None:
    """Write each tensor's data as a record, from windows that are read one by one."""
    names = [tensor.fqn for tensor in contents.tensors]
    windows = contents.source.stream(names, window_nbytes=WINDOW_NBYTES, order="names")
    with closing(windows):
        # Each part belongs to one tensor.
        parts = (data for window in windows for _, data in window.parts)
        for tensor in contents.tensors:
            with _open_record(archive, tensor.name) as record:
                left = tensor.nbytes
                while left:
                    part = next(parts)
                    record.write(part)
                    count_copied(part.nbytes)
                    left -= part.nbytes


@contextmanager
def _open_record(archive: zipfile.ZipFile, name: str) -> Iterator[IO[bytes]]:
    """Write a record whose data begins at an offset that torch would choose."""
    info = zipfile.ZipInfo(f"{_FOLDER}/{name}")
    assert archive.fp is not None
    before = archive.fp.tell() + _HEADER_NBYTES + len(info.filename) + _ZIP64_NBYTES
    room = -(before + _PADDING.size) % _ALIGNMENT
    info.extra = _PADDING.pack(b"FB", room) + bytes(room)
    with archive.open(info, "w", force_zip64=True) as record:
        yield record


# --- the pickled state -----------------------------------------------------------------------


# The types that torch.load accepts with weights_only=True, besides containers of them.
_PLAIN = (type(None), bool, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)

# It refuses larger integers, whose pickle has a size of four bytes.
_MAX_BITS = 8 * 255


@dataclass(frozen=True, slots=True, eq=False)
class _PickledTensor:
    """A tensor in the state that is pickled. Tied tensors have the same `data`."""

    data: ExportedTensor


def build_torch_state(
    saved: SavedTree, path: str, only: str | None, selection: Selection
) -> TorchState:
    """Return the selected state, nested as it was saved, or the container `only` in it.

    Also return its tensors by number, and the names of values for which `torch.load` needs
    `weights_only=False`. IncompatibleError names all that torch.save cannot store. ValueError for a
    pattern that matches nothing, and for patterns that leave nothing.
    """
    if problems := selection.pattern_problems(saved.leaves):
        raise ValueError("; ".join(problems))
    if only is not None and not saved.contains(only):
        components = [name for _, name in saved.children("")]
        raise IncompatibleError(
            f"{path} has no {only!r}: give a component, or a container within one (only=, on the "
            f"command line --only), of {listed(components) or 'none'}"
        )
    names = (*((only,) if only in saved.leaves else ()), *saved.below(only or ""))
    if not selection.is_everything and not any(name in selection for name in names):
        raise ValueError(f"{selection} leaves nothing: give other patterns")
    walk = _StateWalk(saved, selection)
    value = walk.build(only or "")
    if walk.problems:
        raise IncompatibleError(
            f"{path}: torch.save cannot store all of it: {listed(walk.problems, '; ')}"
        )
    return value, [*walk.tensors.values()], walk.not_plain


class _StateWalk:
    """Builds the nested state to pickle, and collects its tensors and problems on the way."""

    def __init__(self, saved: SavedTree, selection: Selection) -> None:
        self.tensors: dict[str, ExportedTensor] = {}  # by the name in the index
        self.not_plain: list[str] = []
        self.problems: list[str] = []
        self._saved = saved
        self._selection = selection
        above = {child: name for name, items in saved.entries.items() for _, child in items}
        tensors = saved.leaves.keys() & (
            saved.catalog.tensors.keys() | saved.catalog.aliases.keys()
        )
        self._models = find_trained_models(saved.main, tensors, above)
        # The optimizer of each group, of each list of groups, and of each state: `load_state_dict`
        # needs both.
        self._optimizers: dict[str, str] = {}
        for group in saved.params:
            groups = group.rpartition(".")[0]
            optimizer = groups.rpartition(".")[0]
            self._optimizers |= dict.fromkeys((group, groups, f"{optimizer}.state"), optimizer)

    def build(self, name: str) -> object:
        """Return the value under a name."""
        saved = self._saved
        if (stored := saved.tensor(name)) is not None:
            return self._build_tensor(name, *stored)
        if saved.per_rank_keys(name) is not None:
            self._refuse(name, "has a value for each rank")
            return None
        if name not in saved.leaves or name in saved.kinds:
            return self._build_container(name)
        if name.endswith(f".{RECORD}"):
            self._refuse(name.removesuffix(f".{RECORD}"), "is a quantized tensor, made of others")
            return None
        return self._build_plain(name, saved.value(name))

    def _build_plain(self, name: str, value: object) -> object:
        if not _is_plain(value):
            self.not_plain.append(name)
        return value

    def _build_container(self, name: str) -> object:
        kind, model = self._saved.kinds.get(name, "dict"), self._models.get(name)
        children = self._saved.children(name)
        chosen = [(key, child) for key, child in children if self._is_chosen(child)]
        if not is_mapping(kind) and chosen != list(children)[: len(chosen)]:
            self._refuse(name, f"is a {kind} whose items would move, as earlier ones are left out")
        items = [(key, self.build(child)) for key, child in chosen]
        if model is not None:
            items = [(str(key).removeprefix(f"{model}."), child) for key, child in items]
        if name in self._saved.params:
            group = self._build_plain(name, self._saved.value(name))
            if not isinstance(group, dict):
                raise CorruptError(
                    f"{name}: a group of parameters is not a dict: load an older checkpoint"
                )
            params = relative_param_names(f"{name}.params", group["params"], self._models)
            items = [*{**group, "params": params}.items(), *items]
        if kind not in ("dict", "OrderedDict", "list", "tuple"):
            self.not_plain.append(name)
        if name not in self._saved.models:
            return create_container(kind, items)
        state = OrderedDict(items)
        # The versions of modules, for `load_state_dict`.
        state._metadata = OrderedDict(self._saved.model_metadata(name))  # type: ignore[attr-defined]
        return state

    def _is_chosen(self, name: str) -> bool:
        """Return True if something at or below a name is selected, or if nothing is below it.

        As in a save, an optimizer's groups are included if any part of the optimizer is.
        """
        if self._selection.is_everything:
            return True
        leaves = [*self._saved.below(self._optimizers.get(name, name))]
        if name in self._saved.leaves:
            leaves.append(name)
        return not leaves or any(leaf in self._selection for leaf in leaves)

    def _build_tensor(self, name: str, fqn: str, record: TensorRecord) -> _PickledTensor:
        if not can_be_saved(record.dtype):
            self._refuse(name, f"is {record.dtype}, which torch.save does not support")
        if self._saved.uncut.get(name) == JOINED:
            self._refuse(name, JOINED_PARTS)
        path, dtype = f"{_DATA_FOLDER}{len(self.tensors)}", record.dtype
        new = ExportedTensor(path, fqn, dtype, dtype, record.shape)
        return _PickledTensor(self.tensors.setdefault(fqn, new))

    def _refuse(self, name: str, why: str) -> None:
        self.problems.append(f"{name} {why}: leave it out ({excluded_names(name)})")


# Why state of an optimizer cannot become one tensor: see `ObjectsFile.uncut`.
JOINED_PARTS = "has parts that may have a meaning only on the ranks that saved them"


@cache
def can_be_saved(dtype: str) -> bool:
    """Return True if torch.save supports a dtype: none of less than a byte."""
    with suppress(KeyError):
        torch.save(torch.empty(0, dtype=torch_dtype(dtype)), io.BytesIO())  # noqa: TID251
        return True
    return False


def _is_plain(value: object) -> bool:
    """Return True if torch.load accepts a value with weights_only=True."""
    if type(value) in (dict, OrderedDict, Counter):
        assert isinstance(value, Mapping)
        return all(_is_plain(key) and _is_plain(child) for key, child in value.items())
    if type(value) in (list, tuple, set):
        assert isinstance(value, Collection)
        return all(map(_is_plain, value))
    if type(value) is int:
        return value.bit_length() < _MAX_BITS
    return type(value) in _PLAIN and value != b""  # pickled as a call of bytes


class _Pickler(pickle.Pickler):
    """Pickles as torch.save does, without the tensors' data."""

    def persistent_id(self, value: object) -> tuple[object, ...] | None:
        if type(value) is not ExportedTensor:
            return None
        key = value.name.removeprefix(_DATA_FOLDER)
        if (kind := _STORAGE_CLASSES.get(value.dtype)) is not None:
            return "storage", kind, key, "cpu", prod(value.shape)
        return "storage", torch.UntypedStorage, key, "cpu", value.nbytes

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not _PickledTensor:
            return NotImplemented
        function, further = _rebuild_call(value.data.dtype)
        # Copies: torch.load stores the hooks of each loaded tensor in its arguments.
        copies = map(copy, further)
        shape = value.data.shape
        strides = row_major_strides(tuple(max(size, 1) for size in shape))
        return function, (value.data, 0, shape, strides, *copies)


_STORAGE_CLASSES = {dtype: getattr(torch, f"{name}Storage") for name, dtype in STORAGES.items()}


@cache
def _rebuild_call(dtype: str) -> tuple[Any, list[Any]]:
    """Return torch's function that rebuilds a tensor of a dtype, and its last arguments.

    The first arguments are the storage, the offset, the shape and the strides.
    """
    function, (_, _, _, _, *further) = torch.empty(0, dtype=torch_dtype(dtype)).__reduce_ex__(2)
    return function, further
