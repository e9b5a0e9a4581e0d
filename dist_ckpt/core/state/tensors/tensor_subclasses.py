"""Tensors that are made of others: quantized weights, the state of 8-bit optimizers.

We call them compound; torch, traceable wrapper subclasses: `__tensor_flatten__` names the
attributes that are tensors and gives what else there is, the context; `__tensor_unflatten__` makes
one again. A checkpoint has each inner tensor under a name of its own, `<fqn>.<attribute>`, and in
`<fqn>.__class__` a record of what they are parts of, which a load compares with the live tensor's.
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
from dist_ckpt.core.planning import plan
from dist_ckpt.core.runtime.torch_private import AsyncCollectiveTensor, StridedShard, local_tensor
from dist_ckpt.core.state.tensors.dtensors import local_cells, mesh_within, placement_of
from dist_ckpt.core.state.tensors.local_tensors import PLAIN, class_name
from dist_ckpt.core.state.tree.containers import join
from dist_ckpt.core.state.wrappers import LocalShard


def is_wrapper_subclass(value: object) -> TypeGuard[torch.Tensor]:
    """Say whether a value is a tensor that is made of others, and is not known by another name."""
    return (
        is_wrapper_subclass_type(type(value))
        # The sizes of these are symbols, which are made of the values of their inner tensors.
        and not value.is_nested  # type: ignore[attr-defined]
    )


def is_wrapper_subclass_type(cls: object) -> TypeGuard[type[torch.Tensor]]:
    """Say whether the tensors of a class are made of others."""
    return (
        isinstance(cls, type)
        and issubclass(cls, torch.Tensor)
        and not issubclass(cls, DTensor | AsyncCollectiveTensor)
        and hasattr(cls, "__tensor_flatten__")
        and hasattr(cls, "__tensor_unflatten__")
    )


def unwrapped(value: Any) -> Any:
    """Return the tensor that a compound one stands for, or the value itself if it is more.

    Such a one (that of float8 all-gather) holds one tensor of its own shape and dtype. What it
    stands for is stored under its name, and loads into a model without it.
    """
    while type(value) not in PLAIN and is_wrapper_subclass(value):
        names = list(_flattened(value)[0])
        alike = [name for name in names if _is_alike(getattr(value, name, None), value)]
        if len(alike) != 1 or (len(names) > 1 and _names_kept(value) != alike):
            return value
        value = getattr(value, alike[0])
    return value


def inner_tensors(value: torch.Tensor, fqn: str) -> dict[str, torch.Tensor]:
    """Return what a tensor is made of, by attribute. Raises TypeError if that is no tensor."""
    inner = {}
    for name in _flattened(value)[0]:
        tensor = getattr(value, name, None)
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"{fqn}: {class_name(value)} names {name!r} in `__tensor_flatten__`, which is a "
                f"{class_name(tensor)}: mend the class, or store its tensors in a dict"
            )
        inner[name] = tensor
    return inner


def flatten_context_of(
    value: torch.Tensor, fqn: str, shape: Shape | None = None
) -> dict[str, object]:
    """Return what a checkpoint says of a tensor beside its inner ones: plain data.

    `shape` is that of the whole, if the value is a part. `exact` says whether `context` is the
    context itself, so that one could be made of it.
    """
    context = _flattened(value)[1]
    described = _described(context, f"{fqn}: the context of {class_name(value)}")
    whole = tuple(value.shape) if shape is None else shape
    return {
        "class": class_name(value),
        "dtype": value.dtype,
        "shape": whole,
        "context": resized(described, tuple(value.shape), whole),
        "exact": _are_alike(described, context),
    }


def resized(context: object, shape: Shape, new: Shape) -> object:
    """Return a described context with the size of another part of the whole, where it has one."""
    if isinstance(context, torch.Size):
        return torch.Size(new) if tuple(context) == shape else context
    if type(context) is dict:
        return {key: resized(item, shape, new) for key, item in context.items()}
    if type(context) in (list, tuple):
        assert isinstance(context, list | tuple)
        return type(context)([resized(item, shape, new) for item in context])
    return context


def difference(saved: object, own: object, name: str = "") -> str | None:
    """Say in what a saved record and one's own differ, or None if they are alike."""
    if isinstance(saved, Mapping) and isinstance(own, Mapping):
        for key in {**own, **saved}:
            found = difference(saved.get(key), own.get(key), join(name, key))
            if found is not None:
                return found
        return None
    return None if _are_alike(saved, own) else f"saved with {name} {saved!r}, the state has {own!r}"


def _are_alike(saved: object, own: object) -> bool:
    """Compare plain values: a NaN is like another one, and a list is not like a tuple."""
    if isinstance(saved, Mapping) and isinstance(own, Mapping):
        return saved.keys() == own.keys() and all(_are_alike(saved[k], own[k]) for k in saved)
    if isinstance(saved, list | tuple) and isinstance(own, list | tuple):
        if isinstance(saved, list) != isinstance(own, list) or len(saved) != len(own):
            return False
        return all(map(_are_alike, saved, own))
    if isinstance(saved, float) and isinstance(own, float) and isnan(saved):
        return isnan(own)
    return saved is own or saved == own


def _flattened(value: torch.Tensor) -> tuple[Sequence[str], object]:
    flattened: tuple[Sequence[str], object] = value.__tensor_flatten__()  # type: ignore[attr-defined]
    return flattened


def _is_alike(inner: object, outer: torch.Tensor) -> bool:
    if not isinstance(inner, torch.Tensor):
        return False
    return inner.dtype == outer.dtype and inner.shape == outer.shape


def _names_kept(value: torch.Tensor) -> list[str]:
    """Return the inner tensors that a state dict would have: what `detach` drops is a cache."""
    kept = value.detach()
    return list(_flattened(kept)[0]) if is_wrapper_subclass(kept) else []


def _described(value: object, what: str) -> object:
    """Return a context in words that can be stored and compared; nothing of it is looked up."""
    if type(value) is dict:
        return {key: _described(item, what) for key, item in value.items()}
    if type(value) in (list, tuple):
        assert isinstance(value, list | tuple)
        return type(value)([_described(item, what) for item in value])
    if (named := _fields_of(value)) is not None:
        return {"class": class_name(value), **{k: _described(v, what) for k, v in named.items()}}
    if (text := _text_of(value)) is not None:
        return text
    try:
        check_plain(value, what)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{what} has a {class_name(value)}, which cannot be compared: make it a "
            "dataclass, or store the inner tensors in a dict"
        ) from error
    return value


def _fields_of(value: object) -> Mapping[str, object] | None:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        named: Mapping[str, object] = value._asdict()
        return named
    return None


def _text_of(value: object) -> str | None:
    if isinstance(value, Enum):
        return f"{class_name(value)}.{value.name}"
    if isinstance(value, type | FunctionType | BuiltinFunctionType | MethodType):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, torch.device):
        return "a device"  # where a tensor is, is no part of what it is
    if isinstance(value, torch.layout | torch.memory_format):
        return str(value)
    return None


# --- cut over ranks --------------------------------------------------------------------------
#
# Nothing says how the tensors in one are cut along with it: `__tensor_flatten__` has no sizes of
# the whole. So an inner tensor is cut like the whole if it has its shape; in blocks if each of its
# dimensions divides that of the local tensor, as the scales of rows do; and where its shape leaves
# it open, the class is asked: it cuts a tensor of its own, and what comes out shows which of the
# inner ones are cut, and which are tables that every rank has. What cannot be told so is stored for
# each shard, and loads only where the whole is cut in the same way.


@dataclass(frozen=True, slots=True)
class LocalBox:
    """Which box of the tensor of `shape` a rank has."""

    shape: Shape
    box: Region

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions of which it has not all."""
        sizes = zip(self.shape, self.box.shape, strict=True)
        return tuple(dim for dim, (whole, part) in enumerate(sizes) if whole != part)


def local_box(value: DTensor, fqn: str) -> LocalBox:
    """Return which box of a DTensor this rank has. Raises TypeError if it is more than one."""
    shape = tuple(value.shape)
    ranks: list[int] = value.device_mesh.mesh.flatten().tolist()
    mesh = mesh_within(value.device_mesh, tuple(ranks), fqn)
    assert mesh is not None
    placements = tuple(placement_of(placement, value, fqn) for placement in value.placements)
    rank = ranks.index(dist.get_rank())
    view = plan.MeshPlaced(mesh, placements)
    _, cells = local_cells(view, rank, local_tensor(value), value, fqn)
    if len(cells) > 1:
        raise TypeError(
            f"{fqn}: the compound tensor on this rank is {len(cells)} boxes of the whole under "
            f"{value.placements}: choose sizes that divide evenly over the mesh"
        )
    for cell in cells:
        assert isinstance(cell, Region)
        return LocalBox(shape, cell)
    return LocalBox(shape, Region((0,) * len(shape), (0, *shape[1:])))


def inner_shards(
    value: DTensor, local: torch.Tensor, fqn: str
) -> tuple[dict[str, LocalShard], dict[str, object] | None]:
    """Return what this rank has of each tensor in a DTensor of compound ones.

    And what the record says of those that are stored for each shard, if there are any.
    """
    cut = local_box(value, fqn)
    inner = inner_tensors(local, fqn)
    tables = _tables(local, cut, inner)
    shards, single = {}, []
    for name, tensor in inner.items():
        found = inner_cut(cut, tuple(tensor.shape), is_table=tables.get(name))
        if found is not None:
            shards[name] = LocalShard(tensor, found.shape, found.box.offset)
            continue
        single.append(name)
        number, count = _place_of(value)
        shape, offset = (count, *tensor.shape), (number, *(0 for _ in tensor.shape))
        shards[name] = LocalShard(tensor.detach().unsqueeze(0), shape, offset)
    if not single:
        return shards, None
    mesh = tuple(value.device_mesh.shape)
    return shards, {"parts": single, "placements": str(value.placements), "mesh": mesh}


def inner_cut(cut: LocalBox, shape: Shape, *, is_table: bool | None) -> LocalBox | None:
    """Return which box an inner tensor of a local `shape` is, or None if that cannot be told.

    `is_table` says whether every rank has all of it, where the shape leaves that open; None if
    that is not known.
    """
    if not cut.dims or is_table:
        return LocalBox(shape, Region.whole(shape))
    if shape == cut.box.shape:
        return cut
    if len(shape) == len(cut.shape) and (found := _in_blocks(cut, shape)):
        return found
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
        # One element for all that a rank has of a dimension may be one for all of the whole.
        if part % max(size, 1) or (size < 2 and size != part):
            return None
        block = part // max(size, 1) or 1
        if whole % block or start % block:
            return None
        sizes.append(whole // block)
        offset.append(start // block)
    return LocalBox(tuple(sizes), Region(tuple(offset), shape))


def _in_runs(cut: LocalBox, shape: Shape) -> LocalBox | None:
    """Return the box of a tensor with an element for each run of the whole's row-major ones."""
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
    """Ask the class which inner tensors are cut with it, by a few rows: those that are not."""
    if cut.dims != (0,):
        return {}
    rows, row = cut.box.shape[0], prod(cut.shape[1:])
    runs = {rows * row // t.numel() for t in inner.values() if t.ndim == 1 and t.numel()}
    for count in sorted({run // gcd(run, row) for run in runs if run}):
        if 0 < count < rows and (some := _rows_of(local, count)):
            # One element may be of all that this rank has, or of the whole.
            return {
                name: some[name].shape == tensor.shape
                for name, tensor in inner.items()
                if tensor.numel() > 1 and name in some
            }
    return {}


def _rows_of(local: torch.Tensor, count: int) -> dict[str, torch.Tensor] | None:
    try:
        with torch.no_grad():
            some = local[:count]
    except (AssertionError, RuntimeError, TypeError, ValueError):
        return None  # it cannot be cut there
    return inner_tensors(some, "") if type(some) is type(local) else None


def _place_of(value: DTensor) -> tuple[int, int]:
    """Return the number of this rank's shard, and how many there are."""
    number, count = 0, 1
    coordinate = value.device_mesh.get_coordinate()
    assert coordinate is not None
    sizes = zip(value.placements, coordinate, value.device_mesh.shape, strict=True)
    for placement, at, size in sizes:
        if isinstance(placement, Shard | StridedShard):
            number, count = number * size + at, count * size
    return number, count
