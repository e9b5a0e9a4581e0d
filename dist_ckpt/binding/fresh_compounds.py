"""Compound tensors that a load has to make: the state of 8-bit optimizers before their first step.

A class is never looked up by the name that the file has: the table is made of what the live
optimizer shows, and the name chooses from it. `__tensor_unflatten__` of that class gets the inner
tensors and the saved context, which is plain data. It is tried on tensors without memory first, and
what comes out is compared with the record, before anything is read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from dist_ckpt.binding.saved_tree import Saved
from dist_ckpt.binding.targets import Beside, Fresh, Targets
from dist_ckpt.errors import IncompatibleError
from dist_ckpt.format.geometry import row_major_strides
from dist_ckpt.state.compounds import difference, inner_tensors, is_compound_class, record_of
from dist_ckpt.state.containers import RECORD, join
from dist_ckpt.state.local_tensors import class_name, full_name, torch_dtype
from dist_ckpt.state.tree import users_code

_REMEDY = (
    "let the optimizer make its state before the load, such as by a step: the load replaces all "
    "that it changes"
)


def compound_classes(optimizer: Optimizer) -> dict[str, type[torch.Tensor]]:
    """Return the classes that an optimizer may keep its state in, by their full names.

    They are those of its parameters, and those in the modules that define its own classes.
    """
    found: list[object] = [type(p) for group in optimizer.param_groups for p in group["params"]]
    for cls in type(optimizer).__mro__:
        found += vars(sys.modules[cls.__module__]).values() if cls.__module__ in sys.modules else ()
    return {full_name(cls): cls for cls in found if is_compound_class(cls)}


@dataclass(frozen=True, slots=True, eq=False)
class FreshCompound:
    """A compound tensor that is made once the memory of its inner ones is there and filled."""

    name: str
    cls: type[torch.Tensor]
    record: Mapping[str, object]
    inner: Mapping[str, Fresh | FreshCompound]

    def make(self) -> object:
        """Return it. Raises CheckpointError if its class does not make it."""
        inner = {
            name: one.make() if isinstance(one, FreshCompound) else one.value
            for name, one in self.inner.items()
        }
        return _unflattened(self.cls, self.record, inner, self.name)


def fresh_compound(saved: Saved, targets: Targets, name: str, beside: Beside) -> FreshCompound:
    """Want the inner tensors of a compound one that was saved, in new memory.

    Raises CheckpointError if it could not be made of them.
    """
    _trial(saved, name, beside)
    return _wanted(saved, targets, name, beside)


def _trial(saved: Saved, name: str, beside: Beside) -> torch.Tensor:
    """Make one without memory, and see that it is what was saved."""
    cls, record = _class_of(saved, name, beside)
    inner = {}
    for attribute, child in _inner_names(saved, name):
        if (stored := saved.tensor(child)) is None:
            inner[attribute] = _trial(saved, child, beside)
            continue
        dtype = torch_dtype(stored[1].dtype)
        inner[attribute] = torch.empty(stored[1].shape, dtype=dtype, device="meta")
    made = _unflattened(cls, record, inner, name)
    found = difference(record, record_of(made, name))
    if found is None and inner_tensors(made, name).keys() != inner.keys():
        found = f"saved with the parts {', '.join(inner)}, it has others"
    if found is not None:
        raise IncompatibleError(f"{name}: what {class_name(made)} makes of its parts: {found}")
    return made


def _wanted(saved: Saved, targets: Targets, name: str, beside: Beside) -> FreshCompound:
    cls, record = _class_of(saved, name, beside)
    inner = {
        attribute: (
            targets.beside(child, beside)
            if saved.tensor(child) is not None
            else _wanted(saved, targets, child, beside)
        )
        for attribute, child in _inner_names(saved, name)
    }
    return FreshCompound(name, cls, record, inner)


def _class_of(
    saved: Saved, name: str, beside: Beside
) -> tuple[type[torch.Tensor], Mapping[str, object]]:
    record = saved.values.get(saved.leaves[join(name, RECORD)])
    if not isinstance(record, Mapping):
        raise IncompatibleError(
            f"{name}: what it is made of is written in another rank's objects file: {_REMEDY}"
        )
    cls = beside.classes.get(str(record.get("class")))
    if cls is None or record.get("exact") is not True or not _is_shape(record.get("shape")):
        raise IncompatibleError(
            f"{name}: saved as the parts of a {record.get('class')}, and there is none here to "
            f"fill: {_REMEDY}"
        )
    return cls, record


def _is_shape(value: object) -> bool:
    return isinstance(value, tuple) and all(type(size) is int and size >= 0 for size in value)


def _inner_names(saved: Saved, name: str) -> Iterator[tuple[str, str]]:
    return ((str(key), child) for key, child in saved.children(name) if key != RECORD)


def _unflattened(
    cls: type[torch.Tensor], record: Mapping[str, object], inner: Mapping[str, object], name: str
) -> torch.Tensor:
    shape = record["shape"]
    assert isinstance(shape, tuple)
    strides = row_major_strides(shape)
    with users_code(name, cls, "__tensor_unflatten__"), torch.no_grad():
        made: torch.Tensor = cls.__tensor_unflatten__(  # type: ignore[attr-defined]
            inner, record["context"], torch.Size(shape), strides
        )
    return made
