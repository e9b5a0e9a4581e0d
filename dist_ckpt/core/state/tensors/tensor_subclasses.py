"""Tensor subclasses made of inner tensors: quantized weights, state of 8-bit optimizers.

Torch calls them traceable wrapper subclasses. `__tensor_flatten__` returns the attributes that are
tensors, and the rest as a context; `__tensor_unflatten__` creates the tensor again. A checkpoint
stores each inner tensor under `<fqn>.<attribute>`. A record in `<fqn>.__class__` describes the
outer tensor, and a load compares the record with that of the live tensor. For a class without inner
tensors see `_local_tensor` in `locate_tensor.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from math import gcd, isnan, prod
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from dist_ckpt.core.format.geometry import Region, Shape
from dist_ckpt.core.format.objects.plain_codec import check_plain
from dist_ckpt.core.planning import tensor_views
from dist_ckpt.core.runtime.torch_private import AsyncCollectiveTensor, StridedShard, local_tensor
from dist_ckpt.core.state.tensors.dtensors import local_cells, plan_mesh, plan_placement
from dist_ckpt.core.state.tensors.local_tensors import PLAIN, class_name
from dist_ckpt.core.state.tree.containers import child_name
from dist_ckpt.core.state.wrappers import LocalShard


def is_wrapper_subclass(value: object) -> TypeGuard[torch.Tensor]:
    """Return True for a tensor that is stored as its inner tensors."""
    return (
        is_wrapper_subclass_type(type(value))
        # The sizes of nested tensors are symbols, which depend on values of the inner tensors.
        and not value.is_nested  # type: ignore[attr-defined]
    )


def is_wrapper_subclass_type(cls: object) -> TypeGuard[type[torch.Tensor]]:
    """Return True if the tensors of a class are made of inner tensors."""
    return (
        isinstance(cls, type)
        and issubclass(cls, torch.Tensor)
        and not issubclass(cls, DTensor | AsyncCollectiveTensor)
        and hasattr(cls, "__tensor_flatten__")
        and hasattr(cls, "__tensor_unflatten__")
    )


def unwrap(value: Any) -> Any:
    """Return the single tensor that a subclass wraps (float8 all-gather), else the value itself.

    The wrapped tensor has the same shape and dtype. It is stored under the name of the outer one,
    so a load does not need the subclass.
    """
    while type(value) not in PLAIN and is_wrapper_subclass(value):
        names = list(_flatten(value)[0])
        inner = ((name, getattr(value, name, None)) for name in names)
        alike = [
            name
            for name, tensor in inner
            if isinstance(tensor, torch.Tensor)
            and (tensor.dtype, tensor.shape) == (value.dtype, value.shape)
        ]
        if len(alike) != 1 or (len(names) > 1 and _stored_names(value) != alike):
            return value
        value = getattr(value, alike[0])
    return value


def inner_tensors(value: torch.Tensor, fqn: str) -> dict[str, torch.Tensor]:
    """Return the inner tensors by attribute. Raises TypeError if one is not a tensor."""
    inner = {}
    for name in _flatten(value)[0]:
        tensor = getattr(value, name, None)
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"{fqn}: {class_name(value)} names {name!r} in `__tensor_flatten__`, which is a "
                f"{class_name(tensor)}: fix the class, or store its tensors in a dict"
            )
        inner[name] = tensor
    return inner


def subclass_record(value: torch.Tensor, fqn: str, shape: Shape | None = None) -> dict[str, object]:
    """Return the record of a tensor subclass, as plain data.

    `shape` is the shape of the whole tensor, if the value is a part. In the record, `exact` is True
    if `context` equals the class's own context, so that a load can create a tensor from it.
    """
    context = _flatten(value)[1]
    described = _describe(context, f"{fqn}: the context of {class_name(value)}")
    whole = tuple(value.shape) if shape is None else shape
    return {
        "class": class_name(value),
        "dtype": value.dtype,
        "shape": whole,
        "context": resize_context(described, tuple(value.shape), whole),
        "exact": _are_alike(described, context),
    }


def resize_context(context: object, shape: Shape, new: Shape) -> object:
    """Replace the size `shape` by `new` in a described context."""
    if isinstance(context, torch.Size):
        return torch.Size(new) if tuple(context) == shape else context
    if type(context) is dict:
        return {key: resize_context(item, shape, new) for key, item in context.items()}
    if type(context) in (list, tuple):
        assert isinstance(context, list | tuple)
        return type(context)([resize_context(item, shape, new) for item in context])
    return context


def difference(saved: object, now: object, name: str = "") -> str | None:
    """Return a text about the first difference of two records, or None if they are equal."""
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        both = {key: (saved.get(key), now.get(key)) for key in {**now, **saved}}
        problems = (difference(*pair, child_name(name, key)) for key, pair in both.items())
        return next(filter(None, problems), None)
    return None if _are_alike(saved, now) else f"saved with {name} {saved!r}, the state has {now!r}"


def _are_alike(saved: object, now: object) -> bool:
    """Compare plain values: a NaN equals another one, and a list does not equal a tuple."""
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        return saved.keys() == now.keys() and all(_are_alike(saved[k], now[k]) for k in saved)
    if isinstance(saved, list | tuple) and isinstance(now, list | tuple):
        if isinstance(saved, list) != isinstance(now, list) or len(saved) != len(now):
            return False
        return all(map(_are_alike, saved, now))
    if isinstance(saved, float) and isinstance(now, float) and isnan(saved):
        return isnan(now)
    return saved is now or saved == now


def _flatten(value: torch.Tensor) -> tuple[Sequence[str], object]:
    flattened: tuple[Sequence[str], object] = value.__tensor_flatten__()  # type: ignore[attr-defined]
    return flattened


def _stored_names(value: torch.Tensor) -> list[str]:
    """Return the inner tensors that a state dict would have: `detach` drops cached ones."""
    detached = value.detach()
    return list(_flatten(detached)[0]) if is_wrapper_subclass(detached) else []


def _describe(value: object, label: str) -> object:
    if type(value) is dict:
        return {key: _describe(item, label) for key, item in value.items()}
    if type(value) in (list, tuple):
        assert isinstance(value, list | tuple)
        return type(value)([_describe(item, label) for item in value])
    named: Mapping[str, object] | None = None
    if is_dataclass(value) and not isinstance(value, type):
        named = {field.name: getattr(value, field.name) for field in fields(value)}
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        named = value._asdict()
    if named is not None:
        return {"class": class_name(value), **{k: _describe(v, label) for k, v in named.items()}}
    if (text := _text_of(value)) is not None:
        return text
    try:
        check_plain(value, label)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{label} has a {class_name(value)}, which cannot be compared: make it a "
            "dataclass, or store the inner tensors in a dict"
        ) from error
    return value


def _text_of(value: object) -> str | None:
    if isinstance(value, Enum):
        return f"{class_name(value)}.{value.name}"
    if isinstance(value, type | FunctionType | BuiltinFunctionType | MethodType):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, torch.device):
        return "a device"  # the device is not part of the value
    if isinstance(value, torch.layout | torch.memory_format):
        return str(value)
    return None


# --- cut over ranks --------------------------------------------------------------------------
#
# `__tensor_flatten__` does not return the sizes of the whole. So the cut of each inner tensor is
# derived from shapes.
#
# - The same shape as the local tensor: it is cut like the whole.
# - Each dimension divides that of the local tensor, as for the scales of rows: cut in blocks.
# - The shape does not decide: slice some rows of the local tensor. If the inner tensor shrinks, it
#   is cut. If not, it is a table that every rank has.
# - Otherwise it is stored once for each shard, and loads only with the same cut.


@dataclass(frozen=True, slots=True)
class LocalBox:
    """The box of a tensor of `shape` that a rank has."""

    shape: Shape
    box: Region

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions in which the box is smaller than the tensor."""
        sizes = zip(self.shape, self.box.shape, strict=True)
        return tuple(dim for dim, (whole, part) in enumerate(sizes) if whole != part)


def find_local_box(value: DTensor, fqn: str) -> LocalBox:
    """Return the box that this rank has of a DTensor. TypeError if it is more than one."""
    shape = tuple(value.shape)
    ranks: list[int] = value.device_mesh.mesh.flatten().tolist()
    mesh = plan_mesh(value.device_mesh, tuple(ranks), fqn)
    assert mesh is not None
    placements = tuple(plan_placement(placement, value, fqn) for placement in value.placements)
    rank = ranks.index(dist.get_rank())
    view = tensor_views.MeshPlaced(mesh, placements)
    _, cells = local_cells(view, rank, local_tensor(value), value, fqn)
    if len(cells) > 1:
        raise TypeError(
            f"{fqn}: the tensor subclass on this rank is {len(cells)} boxes of the whole under "
            f"{value.placements}: choose sizes that divide evenly over the mesh"
        )
    for cell in cells:
        assert isinstance(cell, Region)
        return LocalBox(shape, cell)
    return LocalBox(shape, Region((0,) * len(shape), (0, *shape[1:])))


def inner_shards(
    value: DTensor, local: torch.Tensor, fqn: str
) -> tuple[dict[str, LocalShard], dict[str, object] | None]:
    """Return this rank's shard of each inner tensor of a DTensor over a tensor subclass.

    The second result is the record of inner tensors that are stored once for each shard; None if
    there are none.
    """
    cut = find_local_box(value, fqn)
    inner = inner_tensors(local, fqn)
    tables = _tables(local, cut, inner)
    shards, single = {}, []
    for name, tensor in inner.items():
        box = find_inner_box(cut, tuple(tensor.shape), is_table=tables.get(name))
        if box is not None:
            shards[name] = LocalShard(tensor, box.shape, box.box.offset)
            continue
        single.append(name)
        number, count = _shard_position(value)
        shape, offset = (count, *tensor.shape), (number, *(0 for _ in tensor.shape))
        shards[name] = LocalShard(tensor.detach().unsqueeze(0), shape, offset)
    if not single:
        return shards, None
    mesh = tuple(value.device_mesh.shape)
    return shards, {"parts": single, "placements": str(value.placements), "mesh": mesh}


def find_inner_box(cut: LocalBox, shape: Shape, *, is_table: bool | None) -> LocalBox | None:
    """Return the box of an inner tensor with the local `shape`; None if it is unknown.

    `is_table` is True if every rank has the whole inner tensor, None if that is unknown.
    """
    if not cut.dims or is_table:
        return LocalBox(shape, Region.whole(shape))
    if shape == cut.box.shape:
        return cut
    if len(shape) == len(cut.shape) and (box := _in_blocks(cut, shape)):
        return box
    return _in_runs(cut, shape) if is_table is False else None


def _in_blocks(cut: LocalBox, shape: Shape) -> LocalBox | None:
    """Return the box of a tensor with an element for each block of the whole, as a scale."""
    sizes, offset = [], []
    for dim, size in enumerate(shape):
        whole, part, start = cut.shape[dim], cut.box.shape[dim], cut.box.offset[dim]
        if dim not in cut.dims:
            sizes.append(size)
            offset.append(0)
            continue
        # A single element may be for this rank's part, or for the whole dimension.
        if part % max(size, 1) or (size < 2 and size != part):
            return None
        block = part // max(size, 1) or 1
        if whole % block or start % block:
            return None
        sizes.append(whole // block)
        offset.append(start // block)
    return LocalBox(tuple(sizes), Region(tuple(offset), shape))


def _in_runs(cut: LocalBox, shape: Shape) -> LocalBox | None:
    """Return the box of a tensor with an element for each run of the whole's row-major elements."""
    if len(shape) != 1 or cut.dims != (0,) or not prod(shape):
        return None
    start = cut.box.offset[0] * prod(cut.shape[1:])
    run = cut.box.numel // shape[0]
    if not run or cut.box.numel % shape[0] or start % run or prod(cut.shape) % run:
        return None
    return LocalBox((prod(cut.shape) // run,), Region((start // run,), shape))


def _tables(
    local: torch.Tensor, cut: LocalBox, inner: Mapping[str, torch.Tensor]
) -> dict[str, bool]:
    """Slice a few rows to find out, for each inner tensor, if it is cut with the whole."""
    if cut.dims != (0,):
        return {}
    rows, row = cut.box.shape[0], prod(cut.shape[1:])
    runs = {rows * row // t.numel() for t in inner.values() if t.ndim == 1 and t.numel()}
    for count in sorted({run // gcd(run, row) for run in runs if run}):
        if 0 < count < rows and (sliced := _slice_rows(local, count)):
            # A single element may be for this rank's part, or for the whole.
            return {
                name: sliced[name].shape == tensor.shape
                for name, tensor in inner.items()
                if tensor.numel() > 1 and name in sliced
            }
    return {}


def _slice_rows(local: torch.Tensor, count: int) -> dict[str, torch.Tensor] | None:
    try:
        with torch.no_grad():
            rows = local[:count]
    except (AssertionError, RuntimeError, TypeError, ValueError):
        return None  # it cannot be cut
    return inner_tensors(rows, "") if type(rows) is type(local) else None


def _shard_position(value: DTensor) -> tuple[int, int]:
    number, count = 0, 1
    coordinate = value.device_mesh.get_coordinate()
    assert coordinate is not None
    sizes = zip(value.placements, coordinate, value.device_mesh.shape, strict=True)
    for placement, at, size in sizes:
        if isinstance(placement, Shard | StridedShard):
            number, count = number * size + at, count * size
    return number, count
