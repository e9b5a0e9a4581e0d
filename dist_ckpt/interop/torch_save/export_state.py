"""The state of a checkpoint as `torch.save` pickles it: containers, values, tensors by number."""

from __future__ import annotations

import io
import pickle  # noqa: TID251 - what torch.load reads has one; written here, never read
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch

from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.geometry import Shape
from dist_ckpt.core.format.index.index import TensorRecord
from dist_ckpt.core.planning.selection import Selection, excluded_names
from dist_ckpt.core.state.binding.sources.saved_tree import SavedTree
from dist_ckpt.core.state.tensors.local_tensors import torch_dtype
from dist_ckpt.core.state.tree.containers import RECORD, container, is_mapping
from dist_ckpt.errors import CorruptError, IncompatibleError, listed
from dist_ckpt.interop.dcp.metadata import models_of, relative
from dist_ckpt.interop.hf.export_plan import ExportContents
from dist_ckpt.interop.pickles.torch_pickles import STORAGES

# What torch.load takes with weights_only=True, besides containers of them.
_PLAIN = (type(None), bool, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)

# It takes no integers whose pickles say their size in four bytes.
_MOST_BITS = 8 * 255


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


@dataclass(frozen=True, slots=True)
class TorchState:
    """The state of a checkpoint for torch.save: what to pickle, and the tensors' data, by number.

    `not_plain` are the names of values that `torch.load` takes with `weights_only=False` alone.
    """

    value: object
    tensors: tuple[ExportContents, ...]
    not_plain: tuple[str, ...]


def torch_state(saved: SavedTree, path: str, only: str | None, selection: Selection) -> TorchState:
    """Return what is chosen of a checkpoint, nested as it was saved, or a container in it.

    IncompatibleError names all that torch.save has no place for. ValueError for a pattern that
    matches nothing, and for patterns that leave nothing.
    """
    if problems := selection.unmatched(saved.leaves):
        raise ValueError("; ".join(problems))
    if only is not None and not saved.holds(only):
        there = [name for _, name in saved.children("")]
        raise IncompatibleError(
            f"{path} has no {only!r}: of what it has ({listed(there) or 'nothing'}), or of what "
            f"lies below that, give one (only=, on the command line --only)"
        )
    names = (*((only,) if only in saved.leaves else ()), *saved.below(only or ""))
    if not selection.is_everything and not any(name in selection for name in names):
        raise ValueError(f"{selection} leaves nothing: give other patterns")
    walk = _Walk(saved, selection)
    value = walk.at(only or "")
    if walk.problems:
        raise IncompatibleError(
            f"{path}: torch.save has no place for all of it: {listed(walk.problems, '; ')}"
        )
    return TorchState(value, tuple(walk.tensors), tuple(walk.not_plain))


class _Walk:
    """A walk through a state, which gathers what it comes upon."""

    def __init__(self, saved: SavedTree, selection: Selection) -> None:
        self.tensors: list[ExportContents] = []
        self.not_plain: list[str] = []
        self.problems: list[str] = []
        self._saved = saved
        self._selection = selection
        above = {child: name for name, items in saved.entries.items() for _, child in items}
        self._models = models_of(saved.main, saved.leaves.keys() & _tensors_of(saved), above)
        self._storages: dict[str, _DataRecord] = {}
        # Of each group, and the list of them, which optimizer's it is.
        self._optimizers: dict[str, str] = {}
        for group in saved.params:
            groups = group.rpartition(".")[0]
            self._optimizers |= dict.fromkeys((group, groups), groups.rpartition(".")[0])

    def at(self, name: str) -> object:
        """Return what lies under a name."""
        saved = self._saved
        if (found := saved.tensor(name)) is not None:
            return self._tensor(name, *found)
        if saved.keys_of(name) is not None:
            self._refuse(name, "has a value for each rank")
            return None
        if name not in saved.leaves or name in saved.kinds:
            return self._container(name)
        if name.endswith(f".{RECORD}"):
            self._refuse(name.removesuffix(f".{RECORD}"), "is a quantized tensor, made of others")
            return None
        return self._plain(name, saved.value(name))

    def _plain(self, name: str, value: object) -> object:
        if not _is_plain(value):
            self.not_plain.append(name)
        return value

    def _container(self, name: str) -> object:
        kind, model = self._saved.kinds.get(name, "dict"), self._models.get(name)
        children = self._saved.children(name)
        taken = [(key, child) for key, child in children if self._takes(child)]
        if not is_mapping(kind) and taken != list(children)[: len(taken)]:
            self._refuse(name, f"is a {kind} whose items would move up where others are left out")
        items = [(key, self.at(child)) for key, child in taken]
        if model is not None:
            items = [(str(key).removeprefix(f"{model}."), child) for key, child in items]
        if name in self._saved.params:
            items = [*self._of_group(name).items(), *items]
        if kind not in ("dict", "OrderedDict", "list", "tuple"):
            self.not_plain.append(name)
        return container(kind, items)

    def _of_group(self, name: str) -> dict[str, object]:
        """Return what is said of a group of parameters, but for what are tensors."""
        value = self._plain(name, self._saved.value(name))
        if not isinstance(value, dict):
            raise CorruptError(
                f"{name}: a group of parameters is no dict: load an older checkpoint"
            )
        return {**value, "params": relative(f"{name}.params", value["params"], self._models)}

    def _takes(self, name: str) -> bool:
        """Say whether something is chosen of what is at and below a name, or nothing lies there.

        The groups of an optimizer stay as long as anything of it does, as in a save.
        """
        if self._selection.is_everything:
            return True
        own = [name] if name in self._saved.leaves else []
        leaves = [*own, *self._saved.below(self._optimizers.get(name, name))]
        return not leaves or any(leaf in self._selection for leaf in leaves)

    def _tensor(self, name: str, fqn: str, record: TensorRecord) -> _PickledTensor:
        if not can_be_saved(record.dtype):
            self._refuse(name, f"is {record.dtype}, which torch.save does not know")
        if fqn not in self._storages:
            number, shape, dtype = len(self.tensors), record.shape, record.dtype
            self.tensors.append(ExportContents(f"data/{number}", fqn, dtype, dtype, shape))
            self._storages[fqn] = _DataRecord(number, dtype, prod(shape))
        return _PickledTensor(self._storages[fqn], record.shape)

    def _refuse(self, name: str, why: str) -> None:
        self.problems.append(f"{name} {why}: leave it out ({excluded_names(name)})")


def _tensors_of(saved: SavedTree) -> frozenset[str]:
    return frozenset((*saved.catalog.tensors, *saved.catalog.aliases))


@cache
def can_be_saved(dtype: str) -> bool:
    """Say whether torch.save knows a dtype: not those of less than a byte."""
    with suppress(KeyError):
        torch.save(torch.empty(0, dtype=torch_dtype(dtype)), io.BytesIO())  # noqa: TID251
        return True
    return False


def _is_plain(value: object) -> bool:
    """Say whether torch.load takes a value with weights_only=True."""
    if type(value) in (dict, OrderedDict, Counter):
        assert isinstance(value, Mapping)
        return all(_is_plain(key) and _is_plain(child) for key, child in value.items())
    if type(value) in (list, tuple, set):
        assert isinstance(value, Collection)
        return all(map(_is_plain, value))
    if type(value) is int:
        return value.bit_length() < _MOST_BITS
    return type(value) in _PLAIN and value != b""  # of which a pickle has a call of bytes


def pickled(state: TorchState) -> bytes:
    """Return the pickle of a state, as torch.save makes it, but for the data of its tensors."""
    held = io.BytesIO()
    _Pickler(held, protocol=2).dump(state.value)
    return held.getvalue()


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: object) -> tuple[object, ...] | None:
        if type(value) is not _DataRecord:
            return None
        if (kind := _KINDS.get(value.dtype)) is not None:
            return "storage", kind, str(value.number), "cpu", value.numel
        nbytes = value.numel * DTYPES[value.dtype].itemsize
        return "storage", torch.UntypedStorage, str(value.number), "cpu", nbytes

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not _PickledTensor:
            return NotImplemented
        function, further = _rebuilt_by(value.storage.dtype)
        # Of each its own: the hooks of a tensor that is loaded are in there.
        own = map(copy, further)
        return function, (value.storage, 0, value.shape, _strides(value.shape), *own)


_KINDS = {dtype: getattr(torch, f"{name}Storage") for name, dtype in STORAGES.items()}


@cache
def _rebuilt_by(dtype: str) -> tuple[Any, list[Any]]:
    """Return what makes a tensor again, of a storage with a dtype or without, as torch has it.

    With what it is given besides the storage, the offset, the shape and the strides.
    """
    function, (_, _, _, _, *further) = torch.empty(0, dtype=torch_dtype(dtype)).__reduce_ex__(2)
    return function, further


def _strides(shape: Shape) -> Shape:
    return tuple(prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))
