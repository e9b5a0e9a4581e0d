"""Find the part of a tensor leaf that is on this rank: `locate_for_save`, `locate_for_load`.

A save calls the first, a load the second. `_local_tensor` recognises, in this order: numpy arrays;
LocalShard and FlatShard; DTensor; ShardedTensor; classes with torch's `__create_chunk_list__` and
`__get_tensor_shard__`; strided tensors. All other classes are refused. `tensor_subclasses.py` has
already split tensors that are made of inner tensors.

- A new tensor class or subclass: `_local_tensor`, `is_tensor_leaf` and `is_meta` in this module.
  If `to_plain_tensor` in `local_tensors.py` refuses the class: `_remedy_of_class` there.
- A new parallelism: a view in `planning/tensor_views.py`, and `planning/save/inventories.py`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor

from dist_ckpt.core.format.geometry import Cell, ElementRange, Region, Shape
from dist_ckpt.core.planning import tensor_views
from dist_ckpt.core.runtime.torch_private import ShardedTensor
from dist_ckpt.core.shard_io.memory.torch_tensor import overlaps_itself
from dist_ckpt.core.state.tensors.dtensors import (
    dtensor_like,
    local_cells,
    local_of,
    plan_mesh,
    plan_placement,
    split_boxes,
)
from dist_ckpt.core.state.tensors.local_tensors import (
    PLAIN,
    class_name,
    dtype_name,
    from_numpy,
    is_array,
    to_plain_tensor,
)
from dist_ckpt.core.state.tensors.tensor_subclasses import unwrap
from dist_ckpt.core.state.wrappers import FlatShard, LocalShard


@dataclass(frozen=True, slots=True, eq=False)
class LocalTensor:
    """A tensor on this rank: `parts[i]` is the local memory of `cells[i]`.

    A part has the shape of its Region; the part of an ElementRange has one dimension. A part shares
    memory with the leaf, so a load writes into the part. Only an empty tensor has an empty cell. A
    rank outside the tensor's mesh has no cells.
    """

    dtype: str
    shape: Shape
    view: tensor_views.View
    cells: tuple[Cell, ...]
    parts: tuple[torch.Tensor, ...]


def is_tensor_leaf(value: object) -> bool:
    """Return True if a value is read as a tensor. `locate_for_save` may still refuse it."""
    return isinstance(value, torch.Tensor | LocalShard | FlatShard) or _is_chunked(value)


def locate_for_save(
    value: object, fqn: str, *, rank: int, group_ranks: Sequence[int]
) -> LocalTensor:
    """Return the part of a leaf that this rank would save. Moves no data.

    `group_ranks[r]` is the global rank of rank r of the group; `rank` is this rank in the group.
    Raises TypeError for a class that cannot be stored. Raises ValueError for a tensor without data
    (meta or freed), or on ranks outside the group. Both errors have `fqn` and the remedy.
    """
    local = _local_tensor(value, fqn, rank, tuple(group_ranks), writable=False)
    for part in local.parts:
        if part.is_meta:
            raise ValueError(
                f"{fqn}: a meta tensor has no data to save: materialize it first "
                "(`to_empty` and initialise, or load a checkpoint)"
            )
    return local


def locate_for_load(
    value: object, fqn: str, *, rank: int, group_ranks: Sequence[int]
) -> LocalTensor:
    """Return the part of a leaf that a load would fill; like `locate_for_save`, but writable.

    Raises ValueError also for memory that overlaps itself (`expand`) and for a meta tensor. Replace
    a meta tensor by the result of `materialize` first.
    """
    local = _local_tensor(value, fqn, rank, tuple(group_ranks), writable=True)
    for part in local.parts:
        if part.is_meta:
            raise ValueError(f"{fqn}: a meta tensor has no memory to load into: materialize it")
        if overlaps_itself(part):
            raise ValueError(
                f"{fqn}: shape {tuple(part.shape)} with strides {part.stride()} overlaps itself, "
                "as after `expand`: load into a `clone()` of it"
            )
    return local


def is_meta(value: object) -> bool:
    """Return True if a leaf has a shape but no data."""
    if type(value) in PLAIN:
        return bool(value.is_meta)  # type: ignore[attr-defined]
    match value:
        case LocalShard() | FlatShard():
            return is_meta(value.tensor)
        case DTensor():
            return bool(local_of(value).is_meta)
        case ShardedTensor():
            # Its own `is_meta` works only with exactly one shard.
            return False
        case torch.Tensor():
            return bool(value.is_meta)
    return False


def materialize(value: object) -> object:
    """Return a leaf like this meta leaf, with memory to load into.

    A DTensor gets memory on its mesh's device, all other leaves on the CPU. A Parameter stays a
    Parameter. The content is undefined.
    """
    if isinstance(value, LocalShard | FlatShard):
        return replace(value, tensor=empty_like(value.tensor, value.tensor.dtype))
    assert isinstance(value, torch.Tensor)
    tensor = empty_like(value, value.dtype)
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(tensor, requires_grad=value.requires_grad)
    return tensor


def empty_like(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a new tensor like `value` with a given dtype, without gradient.

    A meta tensor gets memory as in `materialize`. The content is undefined.
    """
    if isinstance(value, DTensor):
        local = unwrap(local_of(value)).detach()
        device = value.device_mesh.device_type if local.is_meta else local.device
        return dtensor_like(value, torch.empty_like(local, dtype=dtype, device=device))
    value = unwrap(value).detach()
    device = "cpu" if value.is_meta else value.device
    return torch.empty_like(value, dtype=dtype, device=device)


def tie_key(local: LocalTensor) -> Hashable | None:
    """Return a key that equal views of the same memory share.

    Return None for a tensor that is empty, on the meta device, or not on this rank.
    """
    if not local.parts:
        return None
    parts = []
    for part in local.parts:
        if part.is_meta or not part.numel():
            return None
        layout = (part.shape, part.stride(), part.is_conj(), part.is_neg())
        parts.append((part.device, part.data_ptr(), *layout))
    return local.dtype, local.shape, local.view, *parts


# --- the classes of leaves -------------------------------------------------------------------


def _local_tensor(
    value: Any, fqn: str, rank: int, group_ranks: tuple[int, ...], *, writable: bool
) -> LocalTensor:
    if type(value) not in PLAIN and is_array(value):
        value = from_numpy(value, fqn, writable=writable)
    if type(value) in PLAIN:  # the most frequent case; the checks below are slow
        return _read_whole(value, fqn)
    if isinstance(value, LocalShard | FlatShard):
        return _read_wrapper(value, fqn)
    if isinstance(value, DTensor):
        return _read_dtensor(value, fqn, rank, group_ranks)
    if isinstance(value, ShardedTensor):
        return _read_sharded(value, fqn)
    if _is_chunked(value):
        return _read_parts(fqn, value.dtype, tuple(value.shape), _read_chunks(value, fqn))
    if isinstance(value, torch.Tensor):
        return _read_whole(unwrap(value), fqn)
    raise TypeError(f"{fqn}: {class_name(value)} is not a tensor")


_whole_cell = lru_cache(maxsize=1024)(Region.whole)  # thousands of tensors have a few shapes


def _read_whole(value: torch.Tensor, fqn: str) -> LocalTensor:
    local = to_plain_tensor(value, fqn)
    cell = _whole_cell(tuple(local.shape))
    return LocalTensor(
        dtype_name(local.dtype, fqn), cell.shape, tensor_views.Whole(), (cell,), (local,)
    )


def _read_wrapper(shard: LocalShard | FlatShard, fqn: str) -> LocalTensor:
    if not isinstance(shard.tensor, torch.Tensor):
        raise TypeError(
            f"{fqn}: {type(shard).__name__} holds a {class_name(shard.tensor)}: give it a tensor, "
            "such as torch.from_numpy(array)"
        )
    local = to_plain_tensor(shard.tensor, fqn)
    if isinstance(shard, LocalShard):
        return _read_parts(fqn, local.dtype, shard.global_shape, [(shard.offset, local)])
    if 0 in shard.global_shape or not local.numel():
        return _read_parts(fqn, local.dtype, shard.global_shape, [])
    try:
        flat = local.view(-1)
    except RuntimeError:
        raise ValueError(
            f"{fqn}: the tensor of a FlatShard, shape {tuple(local.shape)} with strides "
            f"{local.stride()}, has no flat view: make it contiguous"
        ) from None
    cells = (ElementRange(shard.start, shard.start + flat.numel()),)
    dtype = dtype_name(local.dtype, fqn)
    return LocalTensor(dtype, shard.global_shape, tensor_views.Parts(cells), cells, (flat,))


def _read_dtensor(value: DTensor, fqn: str, rank: int, group_ranks: tuple[int, ...]) -> LocalTensor:
    shape = tuple(value.shape)
    placements = tuple(plan_placement(placement, value, fqn) for placement in value.placements)
    local = unwrap(local_of(value))
    if _is_chunked(local):
        return _read_parts(fqn, local.dtype, shape, _read_chunks(local, fqn))
    mesh = plan_mesh(value.device_mesh, group_ranks, fqn)
    view = tensor_views.MeshPlaced(mesh, placements) if mesh else tensor_views.Parts(())
    if isinstance(view, tensor_views.Parts) or rank not in view.mesh.ranks:
        return LocalTensor(dtype_name(value.dtype, fqn), shape, view, (), ())
    local = to_plain_tensor(local, fqn)
    dtype = dtype_name(local.dtype, fqn)
    if 0 in shape:
        return LocalTensor(dtype, shape, view, (Region.whole(shape),), (local.new_empty(shape),))
    seen, cells = local_cells(view, rank, local, value, fqn)
    return LocalTensor(dtype, shape, seen, cells, tuple(split_boxes(local, cells)))


def _read_sharded(value: ShardedTensor, fqn: str) -> LocalTensor:
    metadata = value.metadata()
    shards = [
        (tuple(shard.metadata.shard_offsets), to_plain_tensor(shard.tensor, fqn))
        for shard in value.local_shards()
    ]
    return _read_parts(fqn, metadata.tensor_properties.dtype, tuple(metadata.size), shards)


def _is_chunked(value: object) -> bool:
    """Return True for third-party classes with the methods for torch's own checkpoints."""
    methods = ("__create_chunk_list__", "__get_tensor_shard__")
    has_methods = all(hasattr(type(value), name) for name in methods)
    return has_methods and hasattr(value, "shape") and hasattr(value, "dtype")


def _read_chunks(value: Any, fqn: str) -> list[tuple[Shape, torch.Tensor]]:
    shards = []
    for number, chunk in enumerate(value.__create_chunk_list__()):
        if 0 not in chunk.sizes:
            index = MetadataIndex(fqn, chunk.offsets, number)
            local = to_plain_tensor(value.__get_tensor_shard__(index), fqn)
            if local.shape != chunk.sizes:
                raise ValueError(
                    f"{fqn}: {class_name(value)} reports a chunk of {tuple(chunk.sizes)} at "
                    f"{tuple(chunk.offsets)}, but returns a tensor of {tuple(local.shape)}"
                )
            shards.append((tuple(chunk.offsets), local))
    return shards


def _read_parts(
    fqn: str, dtype: torch.dtype, shape: Shape, shards: Iterable[tuple[Shape, torch.Tensor]]
) -> LocalTensor:
    """Return the local tensor of a list of shards: the offset and the memory of each.

    `dtype` is used only without shards: torch's LocalShardsWrapper always reports float32.
    """
    shards = list(shards)
    dtype = shards[0][1].dtype if shards else dtype
    if 0 in shape:
        shards = [((0,) * len(shape), torch.empty(shape, dtype=dtype, device="cpu"))]
    else:
        shards = [(offset, tensor) for offset, tensor in shards if tensor.numel()]
    cells = tuple(Region(offset, tuple(tensor.shape)) for offset, tensor in shards)
    for cell in cells:
        if len(cell.shape) != len(shape) or not Region.whole(shape).covers(cell):
            raise ValueError(
                f"{fqn}: a shard of shape {cell.shape} at {cell.offset} is outside of the whole "
                f"tensor's shape {shape}: wrap it in dist_ckpt.LocalShard with the true shape"
            )
    name = dtype_name(dtype, fqn)
    return LocalTensor(
        name, shape, tensor_views.Parts(cells), cells, tuple(tensor for _, tensor in shards)
    )
