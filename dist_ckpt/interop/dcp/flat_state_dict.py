"""The flattened state dict of DCP: a checkpoint by DCP's keys, and the items of DCP's planners.

A key is the path in the nested state, joined by dots; the planner's data has these paths. `dc.save`
would give a tensor or value the same name, except for the parameters in an optimizer's state.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence, Set
from contextlib import ExitStack
from typing import Any

import torch
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItemType

from dist_ckpt.core.checkpoint.open_checkpoint import OpenCheckpoint
from dist_ckpt.core.comm.exchange.channel import fits_exchange
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.format.geometry import Region
from dist_ckpt.core.format.index.index import TensorRecord
from dist_ckpt.core.format.index.index_json import MAX_FQN_CHARS
from dist_ckpt.core.format.objects.objects_file import ObjectsFile
from dist_ckpt.core.format.objects.plain_codec import check_plain
from dist_ckpt.core.format.strict_json import is_text
from dist_ckpt.core.loading.load import read_blocks
from dist_ckpt.core.loading.shared_read.shared_read_group import (
    SharedReadGroup,
    UnreachableRanks,
    find_shared_requests,
    gather_requests,
    open_shared_read,
)
from dist_ckpt.core.planning.load.load_planner import plan_load
from dist_ckpt.core.planning.name_selection import Selection, names_above
from dist_ckpt.core.planning.plan import Inventory, TensorEntry, TensorRequest
from dist_ckpt.core.planning.tensor_views import View
from dist_ckpt.core.runtime.typed_msgpack import Message
from dist_ckpt.core.shard_io.memory.cell_memory import Target
from dist_ckpt.core.shard_io.memory.torch_tensor import TensorTarget, synchronize
from dist_ckpt.core.shard_io.read.block_reader import BlockReader
from dist_ckpt.core.shard_io.read.open_files import OpenFiles, open_files
from dist_ckpt.core.shard_io.read.read_grouping import CellTargets
from dist_ckpt.core.state.inventory_builder import LocalState
from dist_ckpt.core.state.tensors.local_tensors import class_name, torch_dtype
from dist_ckpt.core.state.tensors.locate_tensor import locate_for_save
from dist_ckpt.core.state.tensors.plain_torch import without_tensors
from dist_ckpt.core.state.tensors.tensor_subclasses import is_wrapper_subclass
from dist_ckpt.core.state.tree.containers import child_name, is_mapping
from dist_ckpt.errors import IncompatibleError
from dist_ckpt.interop.readers.nested_state import Path, build_tree, join_path
from dist_ckpt.interop.readers.virtual_checkpoint import TOP_LEVEL_COMPONENT
from dist_ckpt.reports import Phases

# The names of the parameters in a group of an optimizer.
_PARAMS = re.compile(r"(.+)\.param_groups\.\d+\.params")


class DcpKeys:
    """The contents of a checkpoint by the keys of a flattened state dict, for a load by `rank`.

    Raises CorruptError if values cannot be read, IncompatibleError if two names have one key.
    """

    def __init__(self, opened: OpenCheckpoint, rank: int) -> None:
        self._catalog, self._path = opened.catalog, opened.path
        main = opened.objects()
        values = dict(main.values)
        for fqn, holder in self._catalog.values.items():
            if holder:  # another rank's objects file has the value
                values[fqn] = opened.value(fqn)
        self.per_rank = [*self._catalog.per_rank]
        for fqn, keys in self._catalog.per_rank.items():
            if any(key == rank for key, _ in keys):
                values[fqn] = opened.value_of_rank(fqn, rank)
        tensors = (*self._catalog.tensors, *self._catalog.aliases)
        above = {child_name(node.fqn, key): node.fqn for node in main.tree for key in node.keys}
        paths = _container_paths(main)
        models = find_trained_models(values, frozenset(tensors), above)
        self._tree = main.tree
        # By DCP's key: the nested path, the name in the checkpoint, and the value.
        self._paths: dict[str, Path] = {}
        self.names: dict[str, str] = {}
        self.values: dict[str, object] = {}
        self._tensors = [self._add(_dcp_path(fqn, paths, models), fqn) for fqn in tensors]
        for fqn, value in values.items():
            for path, leaf in _flatten(_dcp_path(fqn, paths, models), value):
                self.values[self._add(path, fqn)] = relative_param_names(fqn, leaf, models)

    def _add(self, path: Path, fqn: str) -> str:
        key = join_path(path)
        if key in self.names:
            raise IncompatibleError(
                f"{self._path}: two names would have the key {key!r} in DCP: load it with dc.load"
            )
        self._paths[key], self.names[key] = path, fqn
        return key

    def metadata(self, storage_meta: StorageMeta) -> Metadata:
        """Return DCP's metadata. Each tensor is one chunk: a planner may read any part of it."""
        entries: dict[str, STORAGE_TYPES] = {}
        for key in self._tensors:
            record = self.record(key)
            size, properties = torch.Size(record.shape), TensorProperties(torch_dtype(record.dtype))
            whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
            entries[key] = TensorStorageMetadata(properties, size, [whole])
        entries.update((key, BytesStorageMetadata()) for key in self.values)
        return Metadata(entries, planner_data=self._paths, storage_meta=storage_meta)

    def select(self, selection: Selection) -> set[str]:
        """Return the selected names. As in a save, a part of an optimizer selects its groups."""
        chosen_names = {name for name in self.names.values() if name in selection}
        within = {above for name in chosen_names for above in names_above(name)}
        groups = (name for name in self.names.values() if _PARAMS.fullmatch(name))
        params = [name for name in groups if _PARAMS.sub(r"\1", name) in within]
        return chosen_names.union(params, (name.removesuffix(".params") for name in params))

    def find_broken_lists(self, chosen: Set[str]) -> Iterator[str]:
        """Yield the lists in which a chosen item comes after one that is not chosen."""
        within = {above for name in chosen for above in names_above(name)}
        nonempty = {above for name in self.names.values() for above in names_above(name)}
        for node in self._tree:
            if not is_mapping(node.kind):
                children = [child_name(node.fqn, key) for key in node.keys]
                # An empty container has no name, so it counts as chosen.
                are_chosen = [name in within or name not in nonempty for name in children]
                if are_chosen != sorted(are_chosen, reverse=True):
                    yield node.fqn

    def fqn(self, key: str) -> str:
        """Return the name under which a key's tensor is stored: `names` may have an alias."""
        return self._catalog.aliases.get(self.names[key], self.names[key])

    def record(self, key: str) -> TensorRecord:
        """Return the index entry of a key's tensor."""
        return self._catalog.tensors[self.fqn(key)]


def _container_paths(main: ObjectsFile) -> dict[str, Path]:
    """Return the path of each name in the saved containers."""
    paths: dict[str, Path] = {"": ()}
    for node in main.tree:
        above = paths.get(node.fqn, (node.fqn,))
        for key in node.keys:
            paths[child_name(node.fqn, key)] = (*above, str(key) if is_mapping(node.kind) else key)
    return paths


def _dcp_path(fqn: str, paths: Mapping[str, Path], models: Mapping[str, str]) -> Path:
    """Return the path of a name in DCP's nested state. Below a value, the rest is one key."""
    above = fqn
    while above not in paths:
        above = above.rpartition(".")[0]
    below = fqn[len(above) :].removeprefix(".")
    path = (*paths[above], below) if below else paths[above]
    for number in range(1, len(path)):
        model = models.get(join_path(path[:number]))
        key = path[number]
        if model is not None and isinstance(key, str) and key.startswith(f"{model}."):
            return (*path[:number], key.removeprefix(f"{model}."), *path[number + 1 :])
    return path


def find_trained_models(
    values: Mapping[str, object], tensors: Collection[str], above: Mapping[str, str]
) -> dict[str, str]:
    """Return the model of each optimizer that trains only one, by the name of the state.

    `dc.save` names a parameter within the whole state ("model.0.weight"), and torch within its
    model ("0.weight"). `above` has the container of each name.
    """
    models_by_optimizer: dict[str, set[str]] = {}
    for fqn, value in values.items():
        if (match := _PARAMS.fullmatch(fqn)) and isinstance(value, list):
            names = [str(name) for name in value]
            # If no tensor here has the name, torch has named it.
            models = {above.get(name, "") if name in tensors else "" for name in names}
            models_by_optimizer.setdefault(match[1], set()).update(models)
    common_models = {}
    for optimizer, models in models_by_optimizer.items():
        in_all = set.intersection(*({*names_above(model)} for model in models)) if models else ()
        if model := max(in_all, key=len, default=""):
            common_models[f"{optimizer}.state"] = model
    return common_models


def relative_param_names(fqn: str, value: object, models: Mapping[str, str]) -> object:
    """Return the value of a name. An optimizer's list of parameters gets the names of torch."""
    match = _PARAMS.fullmatch(fqn)
    model = models.get(f"{match[1]}.state") if match else None
    if model is None or not isinstance(value, list):
        return value
    return [str(name).removeprefix(f"{model}.") for name in value]


def _flatten(path: Path, value: object) -> Iterator[tuple[Path, object]]:
    """Yield the leaves of a value as DCP flattens it: dicts, and lists that contain dicts."""
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from _flatten((*path, str(key)), child)
    elif isinstance(value, list) and any(map(_contains_dict, value)):
        for number, child in enumerate(value):
            yield from _flatten((*path, number), child)
    else:
        yield path, value


def _contains_dict(value: object) -> bool:
    return isinstance(value, Mapping) or (
        isinstance(value, list) and any(map(_contains_dict, value))
    )


def read_local_state(
    plan: SavePlan, planner: SavePlanner, session: Session
) -> tuple[LocalState, list[tuple[MetadataIndex, int]]]:
    """Return the state that this rank saves for a plan, and the size in bytes of each item.

    The planner resolves each tensor once. TypeError for a value that is not plain data, ValueError
    for a tensor or a key that cannot be stored.
    """
    paths = _nested_paths(plan)
    sizes: list[tuple[MetadataIndex, int]] = []
    values: dict[str, object] = {}
    items_by_tensor: dict[str, list[WriteItem]] = {}
    for item in plan.items:
        fqn = item.index.fqn
        _check_name(fqn)
        if item.type == WriteItemType.BYTE_IO:
            values[fqn] = without_tensors(_find_value(planner, item), fqn)
            check_plain(values[fqn], fqn)
            sizes.append((item.index, 0))
        else:
            items_by_tensor.setdefault(fqn, []).append(item)
    components: dict[str, int] = {}
    views: dict[View, int] = {}
    tensors: list[TensorEntry] = []
    parts: dict[str, tuple[torch.Tensor, ...]] = {}
    for fqn, items in items_by_tensor.items():
        chunks = _Chunks(planner, items)
        local = locate_for_save(
            chunks, fqn, rank=session.channel.rank, group_ranks=session.group_ranks
        )
        component = str(paths[fqn][0]) if len(paths[fqn]) > 1 else TOP_LEVEL_COMPONENT
        number = components.setdefault(component, len(components))
        view = views.setdefault(local.view, len(views))
        tensors.append(TensorEntry(fqn, local.dtype, local.shape, view, number))
        parts[fqn] = local.parts
        nbytes = (tensor.nbytes for tensor in chunks.tensors)
        sizes += zip((item.index for item in items), nbytes, strict=True)
    inventory = Inventory(
        mesh=(),
        components=tuple(components),
        views=tuple(views),
        tensors=tuple(tensors),
        aliases=(),
        values=tuple(values),
        per_rank=(),
        tree=build_tree(paths.values()),
        name_lists=(),
        numpy=(),
        has_text_keys=True,
    )
    return LocalState(inventory, parts, values, {}, ()), sizes


def _nested_paths(plan: SavePlan) -> dict[str, Path]:
    """Return the path of each key in the nested state dict of this rank."""
    paths: dict[str, Path] = {item.index.fqn: (item.index.fqn,) for item in plan.items}
    data = plan.planner_data if isinstance(plan.planner_data, Mapping) else {}
    for fqn, path in data.items():
        if isinstance(fqn, str) and isinstance(path, tuple) and join_path(path) == fqn:
            paths[fqn] = path
    return paths


def _check_name(fqn: str) -> None:
    if not fqn or not is_text(fqn):
        raise ValueError(f"the state dict has the invalid key {fqn!r}: rename it")
    if len(fqn) > MAX_FQN_CHARS:
        raise ValueError(
            f"{fqn[:100]}...: a name of {len(fqn)} characters, {MAX_FQN_CHARS} are the most: use "
            f"shorter keys"
        )


class _Chunks:
    """The chunks of a tensor that a rank writes. It has torch's protocol for tensors in chunks."""

    def __init__(self, planner: SavePlanner, items: Sequence[WriteItem]) -> None:
        data = items[0].tensor_data
        assert data is not None, items[0].index
        self.shape = tuple(data.size)
        self.items = items
        self.tensors = [_resolve_tensor(planner, item) for item in items]
        self.dtype = self.tensors[0].dtype

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [item.tensor_data.chunk for item in self.items if item.tensor_data is not None]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.index is not None
        return self.tensors[index.index]


def _resolve_tensor(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    value = planner.resolve_data(item)
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"{item.index.fqn}: {type(planner).__name__} resolves a tensor to a "
            f"{type(value).__name__}: let it return the tensor"
        )
    if is_wrapper_subclass(value):
        raise TypeError(
            f"{item.index.fqn}: {class_name(value)} is made of other tensors, which DCP's planner "
            f"cannot describe: save it with dc.save, and load it with dc.load"
        )
    return value.detach()


def _find_value(planner: SavePlanner, item: WriteItem) -> object:
    """Return the value itself: `resolve_data` of DCP's planners returns its pickle."""
    look_up = getattr(planner, "lookup_object", None)
    if look_up is not None:
        return look_up(item.index)
    data: Any = planner.resolve_data(item)
    data.seek(0)
    return torch.load(data, weights_only=True)  # noqa: TID251 - the planner has just pickled it


def set_under_live_keys(planner: LoadPlanner, fqn: str, value: object) -> bool:
    """Set a value in the state dict of a load if its path there has keys that are not text.

    DCP's planner knows the path only as text. It would add the value under the key "3", and leave
    the key 3 of the state dict as it is. Return False if the planner shall set the value.
    """
    if not isinstance(planner, DefaultLoadPlanner) or not planner.flatten_state_dict:
        return False
    if type(planner).load_bytes is not DefaultLoadPlanner.load_bytes:
        return False
    *above, last = planner.mappings[fqn]
    container: Any = planner.original_state_dict
    is_text = True
    for text in above:
        key = _live_key(container, text)
        is_text = is_text and key is text
        container = container[key]
    key = _live_key(container, last)
    if (is_text and key is last) or not isinstance(container, MutableMapping | list):
        return False
    container[key] = value
    return True


def _live_key(container: object, text: str | int) -> Any:
    """Return the key of a mapping that DCP has turned into a text; of a list, the number itself."""
    if not isinstance(container, Mapping) or text in container:
        return text
    return {str(key): key for key in container}.get(str(text), text)


# --- reads -------------------------------------------------------------------------------------


class _ReadRequests(Message, frozen=True):
    """The encoded requests of one rank, or None if they are too long.

    `connection_generation` numbers the bulk connections.
    """

    encoded_requests: bytes | None
    connection_generation: int


class _SharedRequests(Message, frozen=True):
    """True if ranks need the same blocks, and all requests if they are short enough."""

    ranks_share_blocks: bool
    encoded_requests: tuple[bytes, ...]
    connection_generation: int


class PlannedReads:
    """The reads that a planner requests: boxes of tensors, by DCP's key, with their targets."""

    def __init__(
        self, items: Sequence[ReadItem], planner: LoadPlanner, keys: DcpKeys, source: OpenCheckpoint
    ) -> None:
        self.parts: dict[str, list[tuple[Region, torch.Tensor]]] = {}
        self._source = source
        self._items = items
        self._planner = planner
        self._keys = keys
        self._converted: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._resolved: list[tuple[ReadItem, torch.Tensor]] = []

    def fill(self, session: Session, phases: Phases, shared_read_id: str) -> tuple[int, int]:
        """Fill the tensors of the planner. Collective: every rank of the session calls this.

        `shared_read_id` is a name that only this read has, the same on all ranks, or "" if the
        ranks share nothing. No tensor changes before all ranks have opened their files. Return the
        bytes from storage, and from other ranks. All ranks raise the error of any rank, such as
        CorruptError for damaged data.
        """
        source = self._source
        with session.operation(f"load of {source.folder}"), ExitStack() as stack:
            with phases.phase("check"):
                files, targets, group = self._link_ranks(session, shared_read_id, stack)
            with phases.phase("read"), session.channel.exchange("read"), source.handle_damage():
                reader = BlockReader(files, targets, verify=True, buffers=session.scratch_buffers)
                moved = read_blocks(session, group, reader)
        with phases.phase("place"):
            synchronize(tensor for parts in self.parts.values() for _, tensor in parts)
            for target, buffer in self._converted:
                target.copy_(buffer)
            for item, resolved in self._resolved:
                self._planner.commit_tensor(item, resolved)
        return moved

    def _link_ranks(
        self, session: Session, shared_read_id: str, stack: ExitStack
    ) -> tuple[OpenFiles, CellTargets, SharedReadGroup | None]:
        """Open the files, exchange the requests, and link the ranks that need the same blocks."""
        with session.channel.exchange("check") as checking:
            with self._source.handle_damage():
                files, targets = self._open(session.settings.threads)
            stack.callback(files.close)
            links, own = open_shared_read(session, shared_read_id, files, stack)
            encoded = own if fits_exchange(len(own), session.channel.world_size) else None
            gathered = checking.gather(_ReadRequests(encoded, session.collective.generation))
            if gathered is not None:
                ranks_share_blocks, encoded_requests = find_shared_requests(
                    [request.encoded_requests for request in gathered], between_hosts=False
                )
                generation = max(request.connection_generation for request in gathered)
                checking.decide(
                    _SharedRequests(ranks_share_blocks, tuple(encoded_requests), generation)
                )
        shared = checking.result(_SharedRequests)
        session.collective.renew(shared.connection_generation)
        if not shared.ranks_share_blocks:
            return files, targets, None
        with session.channel.exchange("prepare") as preparing:
            requests_by_rank = gather_requests(session, shared.encoded_requests, own)
            group = SharedReadGroup.link(
                session, files, links, requests_by_rank, between_hosts=False, stack=stack
            )
            group.decide_unreachable(preparing)
        return files, targets, group.without_unreachable(preparing.result(UnreachableRanks))

    def _open(self, threads: int) -> tuple[OpenFiles, dict[tuple[str, int], Target]]:
        """Open the files with the boxes, and wait for devices that use the target memory."""
        source = self._source
        for item in self._items:
            self._add(item)
        wanted = []
        targets: dict[tuple[str, int], Target] = {}
        for key, every_part in self.parts.items():
            record, fqn = self._keys.record(key), self._keys.names[key]
            parts = [(region, tensor) for region, tensor in every_part if region.numel]
            regions = tuple(region for region, _ in parts)
            wanted.append(TensorRequest(fqn, record.dtype, record.shape, regions))
            for number, (region, tensor) in enumerate(parts):
                targets[fqn, number] = TensorTarget(tensor, region)
        plan = plan_load(source.index, wanted)
        synchronize(tensor for parts in self.parts.values() for _, tensor in parts)
        files = open_files(source.storage, source.folder, source.index, plan, threads=threads)
        return files, targets

    def _add(self, item: ReadItem) -> None:
        """Get the target of an item from the planner. If its dtype differs, read into a buffer.

        The buffer is allocated now: if memory is exhausted, nothing is filled yet.
        """
        stored = torch_dtype(self._keys.record(item.storage_index.fqn).dtype)
        resolved = self._planner.resolve_tensor(item)
        self._resolved.append((item, resolved))
        target = resolved.detach()
        if target.dtype != stored:
            self._converted.append((target, torch.empty(target.shape, dtype=stored)))
            target = self._converted[-1][1]
        chunk_offset = item.storage_index.offset or torch.Size([0] * len(item.lengths))
        offset = tuple(a + b for a, b in zip(chunk_offset, item.storage_offsets, strict=True))
        region = Region(offset, tuple(item.lengths))
        self.parts.setdefault(item.storage_index.fqn, []).append((region, target))
