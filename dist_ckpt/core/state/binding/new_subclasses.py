"""Create tensor subclasses in a load, such as the state of 8-bit optimizers before a first step.

A class is never imported by a name in the file. The saved name selects one of the classes that the
live optimizer uses. Its `__tensor_unflatten__` gets the inner tensors and the saved context, which
is plain data. Before the read, a trial on meta tensors must give a tensor that fits the record.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dist_ckpt.core.format.geometry import Region, Shape, row_major_strides
from dist_ckpt.core.runtime.torch_private import local_tensor
from dist_ckpt.core.state.binding.sources.saved_tree import SavedTree
from dist_ckpt.core.state.binding.targets import FillTargets, NewTensor
from dist_ckpt.core.state.elementwise_state import PlacementHint
from dist_ckpt.core.state.fsdp1.fsdp1_modules import ParameterPart
from dist_ckpt.core.state.optimizer_state import with_inner_optimizers
from dist_ckpt.core.state.tensors.dtensors import dtensor_like, local_of
from dist_ckpt.core.state.tensors.local_tensors import class_name, full_name, torch_dtype
from dist_ckpt.core.state.tensors.tensor_subclasses import (
    LocalBox,
    difference,
    find_inner_box,
    find_local_box,
    inner_tensors,
    is_wrapper_subclass,
    is_wrapper_subclass_type,
    resize_context,
    subclass_record,
    unwrap,
)
from dist_ckpt.core.state.tree.containers import RECORD, child_name
from dist_ckpt.core.state.tree.state_tree import calling_user_code
from dist_ckpt.errors import IncompatibleError

_REMEDY = (
    "let the optimizer create its state before the load, such as by a step: the load replaces all "
    "changes of that step"
)

_KEYS = {"class", "dtype", "shape", "context", "exact"}


def subclass_types(optimizer: Optimizer) -> dict[str, type[torch.Tensor]]:
    """Return the tensor subclasses that an optimizer may use for its state, by their full names.

    These are the classes of its parameters, and classes of its package in the modules that define
    the class and the base classes of the optimizer, and of the optimizers that it wraps.
    """
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    types = [type(local_tensor(p) if isinstance(p, DTensor) else p) for p in parameters]
    owners = (owner for each in with_inner_optimizers(optimizer) for owner in type(each).__mro__)
    for owner in dict.fromkeys(owners):
        module = sys.modules.get(owner.__module__)
        named = vars(module).values() if module is not None else ()
        types += [
            cls
            for cls in named
            if is_wrapper_subclass_type(cls) and _package_of(cls) == _package_of(owner)
        ]
    return {full_name(cls): cls for cls in types if is_wrapper_subclass_type(cls)}


def _package_of(cls: type) -> str:
    return cls.__module__.partition(".")[0]


@dataclass(frozen=True, slots=True, eq=False)
class NewSubclassTensor:
    """A tensor subclass that is created after its inner tensors are filled.

    `like` is the local tensor on the meta device; `context` is the argument for its class. If
    `parameter` is a DTensor, the new tensor is a DTensor too.
    """

    name: str
    like: torch.Tensor
    context: object
    inner: Mapping[str, NewTensor | NewSubclassTensor]
    parameter: torch.Tensor

    def __call__(self) -> object:
        """Create the tensor. Raises CheckpointError if its class fails."""
        tensor = self._local()
        if not isinstance(self.parameter, DTensor):
            return tensor
        with calling_user_code(self.name, tensor, "a view"), torch.no_grad():
            return dtensor_like(self.parameter, tensor)

    def _local(self) -> torch.Tensor:
        inner = {
            name: part._local() if isinstance(part, NewSubclassTensor) else part.value
            for name, part in self.inner.items()
        }
        shape = tuple(self.like.shape)
        return _unflatten(type(self.like), self.context, inner, shape, self.name)


def new_subclass_tensor(
    saved: SavedTree, targets: FillTargets, name: str, hint: PlacementHint
) -> NewSubclassTensor:
    """Request the inner tensors of a saved subclass, in new memory.

    Raises CheckpointError if the class or the record does not fit.
    """
    whole, resized = _trial(saved, name, hint), targets.matcher.resized_names
    if resized.find_rows(name) is not None and whole.shape != hint.parameter.shape:
        raise IncompatibleError(
            f"{name}: saved as a {class_name(whole)}, which cannot follow a parameter that is "
            "resized: exclude it"
        )
    if isinstance(hint.parameter, ParameterPart):
        raise IncompatibleError(
            f"{name}: saved as a {class_name(whole)} for a parameter that FSDP1 has cut into "
            "flat parts: exclude it, or load into `fully_shard`"
        )
    parameter = unwrap(hint.parameter)
    shape = tuple(whole.shape)
    if not isinstance(parameter, DTensor):
        cut = LocalBox(shape, Region.whole(shape))
    elif shape == tuple(parameter.shape):
        cut = find_local_box(parameter, name)
    else:
        raise IncompatibleError(
            f"{name}: saved with shape {shape} under a parameter of shape "
            f"{tuple(parameter.shape)}, which is sharded: {_REMEDY}"
        )
    return _request_parts(saved, targets, name, hint, whole, cut)


def _trial(saved: SavedTree, name: str, hint: PlacementHint) -> torch.Tensor:
    """Create the whole tensor on the meta device, and compare it with the record."""
    cls, record = _read_class(saved, name, hint)
    inner: dict[str, torch.Tensor] = {}
    for attribute, child in _inner_names(saved, name):
        if (stored := saved.tensor(child)) is None:
            if not saved.is_wrapper_subclass(child):
                raise IncompatibleError(
                    f"{child}: saved as {saved.describe_kind(child)}, where a part of a "
                    f"{record['class']} is a tensor: {_REMEDY}"
                )
            inner[attribute] = _trial(saved, child, hint)
            continue
        dtype = torch_dtype(stored[1].dtype)
        inner[attribute] = torch.empty(stored[1].shape, dtype=dtype, device="meta")
    shape = record["shape"]
    assert isinstance(shape, tuple)
    tensor = _unflatten(cls, record["context"], inner, shape, name)
    with calling_user_code(name, tensor, "__tensor_flatten__"):
        created, parts = subclass_record(tensor, name), inner_tensors(tensor, name)
    problem = difference(record, created)
    if problem is None and parts.keys() != inner.keys():
        problem = f"saved with the parts {', '.join(inner)}, the state has other parts"
    if problem is not None:
        raise IncompatibleError(
            f"{name}: {class_name(tensor)} does not match its parts: {problem}; exclude the name"
        )
    return tensor


def _request_parts(
    saved: SavedTree,
    targets: FillTargets,
    name: str,
    hint: PlacementHint,
    whole: torch.Tensor,
    cut: LocalBox,
) -> NewSubclassTensor:
    """Request the inner tensors of this rank's part (`cut`) of the `whole` tensor."""
    parameter, local = hint.parameter, whole
    assert isinstance(parameter, torch.Tensor)
    device = local_of(parameter).device if isinstance(parameter, DTensor) else parameter.device
    for dim in cut.dims:
        with calling_user_code(name, whole, f"narrow({dim}, ...)"):
            local = local.narrow(dim, cut.box.offset[dim], cut.box.shape[dim])
    if type(local) is not type(whole):
        raise IncompatibleError(
            f"{name}: a part of a {class_name(whole)} is a {class_name(local)}: {_REMEDY}"
        )
    _, record = _read_class(saved, name, hint)
    with calling_user_code(name, local, "__tensor_flatten__"):
        parts, wholes = inner_tensors(local, name), inner_tensors(whole, name)
    if parts.keys() != wholes.keys():
        raise IncompatibleError(
            f"{name}: a part of a {class_name(whole)} is made of {', '.join(parts)}, the whole of "
            f"{', '.join(wholes)}: {_REMEDY}"
        )
    inner: dict[str, NewTensor | NewSubclassTensor] = {}
    for attribute, child in _inner_names(saved, name):
        part, shape = parts[attribute], tuple(wholes[attribute].shape)
        box = find_inner_box(cut, tuple(part.shape), is_table=tuple(part.shape) == shape)
        if box is None or box.shape != shape:
            raise IncompatibleError(
                f"{name}: this rank needs a part of shape {tuple(part.shape)} of its "
                f"{attribute!r}, which has shape {shape}. The position of the part is unknown: "
                f"{_REMEDY}"
            )
        if is_wrapper_subclass(wholes[attribute]):
            inner[attribute] = _request_parts(saved, targets, child, hint, wholes[attribute], box)
        else:
            inner[attribute] = targets.request_box(child, box.box, device)
    context = resize_context(record["context"], cut.shape, cut.box.shape)
    return NewSubclassTensor(name, local, context, inner, parameter)


def _read_class(
    saved: SavedTree, name: str, hint: PlacementHint
) -> tuple[type[torch.Tensor], Mapping[str, object]]:
    full = child_name(name, RECORD)
    record = saved.value(full) if saved.is_value(full) else None
    if not _is_record(record):
        raise IncompatibleError(
            f"{name}: the saved {RECORD!r} is not a valid record: exclude the name, or load an "
            "older checkpoint"
        )
    cls = hint.classes.get(str(record["class"]))
    if cls is None or not record["exact"] or "for_each_shard" in record:
        raise IncompatibleError(
            f"{name}: saved as the parts of a {record['class']}, and the state has none to fill: "
            f"{_REMEDY}"
        )
    return cls, record


def _is_record(record: object) -> TypeGuard[Mapping[str, object]]:
    if not isinstance(record, Mapping) or record.keys() - {"for_each_shard"} != _KEYS:
        return False
    shape = record["shape"]
    return (
        isinstance(record["class"], str)
        and isinstance(record["dtype"], torch.dtype)
        and isinstance(record["exact"], bool)
        and isinstance(shape, tuple)
        and all(type(size) is int and size >= 0 for size in shape)
    )


def _inner_names(saved: SavedTree, name: str) -> Iterator[tuple[str, str]]:
    return ((str(key), child) for key, child in saved.children(name) if key != RECORD)


def _unflatten(
    cls: type[torch.Tensor], context: object, inner: Mapping[str, object], shape: Shape, name: str
) -> torch.Tensor:
    strides = row_major_strides(shape)
    with calling_user_code(name, cls, "__tensor_unflatten__"), torch.no_grad():
        tensor: torch.Tensor = cls.__tensor_unflatten__(  # type: ignore[attr-defined]
            inner, context, torch.Size(shape), strides
        )
    if not isinstance(tensor, cls):
        raise IncompatibleError(
            f"{name}: __tensor_unflatten__ of {cls.__name__} returned a {class_name(tensor)}: fix "
            "the class"
        )
    return tensor
