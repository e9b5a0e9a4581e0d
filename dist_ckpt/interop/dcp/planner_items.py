"""What a planner of DCP's wants to be saved, as the state of a rank, and what it wants to read.

Items name tensors by the keys of a flattened state dict; the planner's data says how the keys were
nested. By these paths they get the names that `dc.save` would give them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)

from dist_ckpt.core.checkpoint.open_checkpoint import OpenCheckpoint
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.format.geometry import Region
from dist_ckpt.core.format.index.catalog_json import MAX_FQN_CHARS
from dist_ckpt.core.format.index.index import Node
from dist_ckpt.core.format.objects.plain_codec import check_plain
from dist_ckpt.core.format.strict_json import is_text
from dist_ckpt.core.loading.shared_read import CollectiveReader, OpenedInput, read_together
from dist_ckpt.core.planning.load.load_planner import plan_load
from dist_ckpt.core.planning.plan import Inventory, TensorEntry, TensorRequest, View
from dist_ckpt.core.shard_io.memory.protocol import Target
from dist_ckpt.core.shard_io.memory.torch_tensor import TensorTarget, synchronize
from dist_ckpt.core.shard_io.read.open_files import open_files
from dist_ckpt.core.state.inventory_builder import LocalState
from dist_ckpt.core.state.tensors.local_tensors import class_name, torch_dtype
from dist_ckpt.core.state.tensors.plain_torch import without_tensors
from dist_ckpt.core.state.tensors.read_tensor import describe
from dist_ckpt.core.state.tensors.tensor_subclasses import is_wrapper_subclass
from dist_ckpt.interop.dcp.metadata import DcpKeys, join_all
from dist_ckpt.interop.readers.nested_state import Path, tree_of

# The component of tensors that are themselves at the top of the state dict.
_LOOSE = "state"


def local_state_of(
    plan: SavePlan, planner: SavePlanner, ranks: Session
) -> tuple[LocalState, list[tuple[MetadataIndex, int]]]:
    """Return what this rank saves of a plan, and the size in bytes of each item.

    Every tensor is asked for once, when this is called. TypeError names a value that is no plain
    data, ValueError a tensor or a key that cannot be stored.
    """
    taker = _Collected(ranks)
    tensors: dict[str, list[WriteItem]] = {}
    paths = _paths_of(plan)
    for item in plan.items:
        fqn = item.index.fqn
        _check_name(fqn)
        if item.type == WriteItemType.BYTE_IO:
            taker.add_value(fqn, planner, item)
        else:
            tensors.setdefault(fqn, []).append(item)
    for fqn, items in tensors.items():
        component = str(paths[fqn][0]) if len(paths[fqn]) > 1 else _LOOSE
        taker.add_tensor(fqn, component, _Chunks(planner, items))
    return taker.taken(tree_of(paths.values())), taker.sizes


def _paths_of(plan: SavePlan) -> dict[str, Path]:
    """Return where each key was in the state dict that this rank was given, before it was flat."""
    data = plan.planner_data
    paths = {
        fqn: path
        for fqn, path in (data.items() if isinstance(data, Mapping) else ())
        if isinstance(fqn, str) and isinstance(path, tuple) and join_all(path) == fqn
    }
    alone: dict[str, Path] = {item.index.fqn: (item.index.fqn,) for item in plan.items}
    return alone | paths


def _check_name(fqn: str) -> None:
    if not fqn or not is_text(fqn):
        raise ValueError(f"the state dict has the key {fqn!r}, which is no text: rename it")
    if len(fqn) > MAX_FQN_CHARS:
        raise ValueError(
            f"{fqn[:100]}...: a name of {len(fqn)} characters, {MAX_FQN_CHARS} are the most: use "
            f"shorter keys"
        )


class _Chunks:
    """The chunks of one tensor that a rank writes, as a tensor in parts of which torch can tell."""

    def __init__(self, planner: SavePlanner, items: Sequence[WriteItem]) -> None:
        data = items[0].tensor_data
        assert data is not None, items[0].index
        self.shape = tuple(data.size)
        self.items = items
        self.tensors = [_resolved(planner, item) for item in items]
        self.dtype = self.tensors[0].dtype

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [item.tensor_data.chunk for item in self.items if item.tensor_data is not None]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.index is not None
        return self.tensors[index.index]


def _resolved(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    value = planner.resolve_data(item)
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"{item.index.fqn}: {type(planner).__name__} resolves a tensor to a "
            f"{type(value).__name__}: let it return the tensor"
        )
    if is_wrapper_subclass(value):
        raise TypeError(
            f"{item.index.fqn}: {class_name(value)} is made of other tensors, which have no place "
            f"below DCP's planner: save it with dc.save, and load it with dc.load"
        )
    return value.detach()


class _Collected:
    """Adds one item after another to what a rank holds."""

    def __init__(self, ranks: Session) -> None:
        self.sizes: list[tuple[MetadataIndex, int]] = []
        self._ranks = ranks
        self._components: dict[str, int] = {}
        self._views: dict[View, int] = {}
        self._entries: list[TensorEntry] = []
        self._parts: dict[str, tuple[torch.Tensor, ...]] = {}
        self._values: dict[str, object] = {}

    def add_tensor(self, fqn: str, component: str, chunks: _Chunks) -> None:
        local_tensor = describe(
            chunks, fqn, rank=self._ranks.channel.rank, group=self._ranks.group_ranks
        )
        view = self._views.setdefault(local_tensor.view, len(self._views))
        number = self._components.setdefault(component, len(self._components))
        self._entries.append(TensorEntry(fqn, local_tensor.dtype, local_tensor.shape, view, number))
        self._parts[fqn] = local_tensor.parts
        for item, tensor in zip(chunks.items, chunks.tensors, strict=True):
            self.sizes.append((item.index, tensor.nbytes))

    def add_value(self, fqn: str, planner: SavePlanner, item: WriteItem) -> None:
        value = without_tensors(_looked_up(planner, item), fqn)
        check_plain(value, fqn)
        self._values[fqn] = value
        self.sizes.append((item.index, 0))

    def taken(self, tree: tuple[Node, ...]) -> LocalState:
        inventory = Inventory(
            mesh=(),
            components=tuple(self._components),
            views=tuple(self._views),
            tensors=tuple(self._entries),
            aliases=(),
            values=tuple(self._values),
            per_rank=(),
            tree=tree,
            name_lists=(),
            numpy=(),
        )
        return LocalState(inventory, self._parts, self._values, {}, ())


def _looked_up(planner: SavePlanner, item: WriteItem) -> object:
    """Return the value itself: of DCP's planners, `resolve_data` returns what is pickled of it."""
    look_up = getattr(planner, "lookup_object", None)
    if look_up is not None:
        return look_up(item.index)
    data: Any = planner.resolve_data(item)
    data.seek(0)
    return torch.load(data, weights_only=True)  # noqa: TID251 - of the planner, just now


# --- what is read ------------------------------------------------------------------------------


class PlannedReads:
    """What a planner asks for: the boxes of each tensor, by DCP's key, and where they go."""

    def __init__(self, items: Sequence[ReadItem], planner: LoadPlanner, keys: DcpKeys) -> None:
        self.parts: dict[str, list[tuple[Region, torch.Tensor]]] = {}
        self._items = items
        self._planner = planner
        self._keys = keys
        self._converted: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._resolved: list[tuple[ReadItem, torch.Tensor]] = []

    def fill(self, source: OpenCheckpoint, together: CollectiveReader) -> tuple[int, int]:
        """Fill the tensors of the planner. Collective: all ranks of `together` call this.

        Returns how many bytes came from storage, and how many from other ranks. CorruptError, on
        all ranks, if what one of them reads is damaged.
        """

        def opened() -> OpenedInput:
            for item in self._items:
                self._add(item)
            return self._open(source, together.ranks.config.threads)

        with together.ranks.operation(f"load of {source.folder}"):
            moved = read_together(together, opened, source.not_found_if_removed)
        with together.phases.phase("place"):
            self._place()
        return moved

    def _open(self, source: OpenCheckpoint, threads: int) -> OpenedInput:
        """Open the files that the boxes are in, and wait for devices that use their memory."""
        wanted = []
        targets: dict[tuple[str, int], Target] = {}
        for key, every_part in self.parts.items():
            record, fqn = self._keys.record(key), self._keys.name_of(key)
            parts = [(region, tensor) for region, tensor in every_part if region.numel]
            wanted.append(
                TensorRequest(fqn, record.dtype, record.shape, tuple(region for region, _ in parts))
            )
            for number, (region, tensor) in enumerate(parts):
                targets[fqn, number] = TensorTarget(tensor, region)
        plan = plan_load(source.index, wanted)
        synchronize(tensor for parts in self.parts.values() for _, tensor in parts)
        files = open_files(source.storage, source.folder, source.index, plan, threads=threads)
        return OpenedInput(files, targets)

    def _add(self, item: ReadItem) -> None:
        """Ask the planner where an item goes; through memory of our own if that has another dtype.

        That is taken now: all that a rank may lack is lacking before anything lands anywhere.
        """
        stored = torch_dtype(self._keys.record(item.storage_index.fqn).dtype)
        own = self._planner.resolve_tensor(item)
        self._resolved.append((item, own))
        target = own.detach()
        if target.dtype != stored:
            self._converted.append((target, torch.empty(target.shape, dtype=stored)))
            target = self._converted[-1][1]
        where = item.storage_index.offset or torch.Size([0] * len(item.lengths))
        offset = tuple(a + b for a, b in zip(where, item.storage_offsets, strict=True))
        region = Region(offset, tuple(item.lengths))
        self.parts.setdefault(item.storage_index.fqn, []).append((region, target))

    def _place(self) -> None:
        """Convert what is to be converted, and tell the planner that all is there."""
        synchronize(tensor for parts in self.parts.values() for _, tensor in parts)
        for target, read in self._converted:
            target.copy_(read)
        for item, own in self._resolved:
            self._planner.commit_tensor(item, own)
