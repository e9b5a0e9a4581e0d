"""A checkpoint as DCP sees it: its metadata, by the keys of a flattened state dict, and reading."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, closing, contextmanager
from functools import cache
from typing import TypeVar

import torch
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from dist_ckpt.core.commit import attempts
from dist_ckpt.core.format import filenames
from dist_ckpt.core.format.geometry import Region
from dist_ckpt.core.format.index.index import Catalog, TensorRecord
from dist_ckpt.core.format.objects.objects_file import ObjectsFile
from dist_ckpt.core.loading.collective_read import CollectiveReader, OpenedInput, read_together
from dist_ckpt.core.planning.load.load_planner import plan_load
from dist_ckpt.core.planning.plan import TensorRequest
from dist_ckpt.core.planning.selection import Selection, names_above
from dist_ckpt.core.shard_io.memory.protocol import Target
from dist_ckpt.core.shard_io.memory.torch_tensor import TensorTarget, synchronize
from dist_ckpt.core.shard_io.read.open_files import open_files, read_objects
from dist_ckpt.core.shard_io.read.read_windows import StoredTensors
from dist_ckpt.core.state.tensors.local_tensors import torch_dtype
from dist_ckpt.core.state.tensors.plain_torch import make
from dist_ckpt.core.state.tree.containers import is_mapping, join
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import CorruptError, IncompatibleError
from dist_ckpt.interop.dcp.planner_items import join_all
from dist_ckpt.interop.readers.nested_state import Path
from dist_ckpt.interop.registry import open_source

K = TypeVar("K")
T = TypeVar("T")

# The boxes that are wanted of each tensor, and where they go.
_WantedBoxes = dict[str, list[tuple[Region, torch.Tensor]]]

# The names of the parameters in a group of an optimizer.
_PARAMS = re.compile(r"(.+)\.param_groups\.\d+\.params")


class DcpCheckpoint:
    """A checkpoint that was found: `name` is its attempt's. `rank` is who loads.

    Raises NotFoundError, CorruptError or IncompatibleError if it cannot be read.
    """

    def __init__(self, storage: Storage, path: str, rank: int) -> None:
        attempt, self._index = attempts.find(storage, path)
        self.name = attempt.name
        self._attempt = attempt
        self._storage = storage
        self._path = path
        self._folder = f"{path}/{attempt.name}"
        self._objects = {record.name: record for record in self._index.objects}
        main = self._objects_file(filenames.OBJECTS)
        values = {**main.values, **dict(self._further_values(rank))}
        tensors = (*self._catalog.tensors, *self._catalog.aliases)
        above = {join(node.fqn, key): node.fqn for node in main.tree for key in node.keys}
        paths, models = _paths_of(main), models_of(values, frozenset(tensors), above)
        # By DCP's keys: where each is in the nested state, which tensor it is, and each value.
        self._tree = main.tree
        self._paths: dict[str, Path] = {}
        self._tensors: dict[str, str] = {}
        self._values: dict[str, object] = {}
        # The name in the checkpoint that each key is of.
        self.names: dict[str, str] = {}
        for fqn in tensors:
            self._tensors[self._add(_path_of(fqn, paths, models), fqn)] = fqn
        for fqn, value in values.items():
            for where, leaf in _leaves(_path_of(fqn, paths, models), value):
                self._values[self._add(where, fqn)] = relative(fqn, leaf, models)

    def _add(self, path: Path, fqn: str) -> str:
        key = join_all(path)
        if key in self.names:
            raise IncompatibleError(
                f"{self._path}: DCP has one key, {key!r}, for two names of it: load it with dc.load"
            )
        self._paths[key], self.names[key] = path, fqn
        return key

    def _further_values(self, rank: int) -> Iterator[tuple[str, object]]:
        """Yield the values that other files have, and those of this rank."""
        read = cache(lambda holder: self._objects_file(filenames.objects_file(holder)))
        for fqn, holder in self._catalog.values.items():
            if holder:
                yield fqn, _held(read(holder).values, fqn, self._folder)
        for fqn, keys in self._catalog.per_rank.items():
            for key, holder in keys:
                if key == rank:
                    per_rank = _held(read(holder).per_rank, fqn, self._folder)
                    yield fqn, _held(per_rank, key, self._folder)

    def _objects_file(self, name: str) -> ObjectsFile:
        if name not in self._objects:
            return ObjectsFile()
        with attempts.not_found_if_removed(self._storage, self._path, self._attempt):
            return read_objects(self._storage, self._folder, self._objects[name], make=make)

    @property
    def _catalog(self) -> Catalog:
        return self._index.catalog

    def metadata(self, storage_meta: StorageMeta) -> Metadata:
        """Return what DCP plans with: each tensor is one chunk, of which any part may be read."""
        entries: dict[str, STORAGE_TYPES] = {
            key: _described(self._record(key)) for key in self._tensors
        }
        entries.update((key, BytesStorageMetadata()) for key in self._values)
        return Metadata(entries, planner_data=self._paths, storage_meta=storage_meta)

    def value(self, key: str) -> object:
        """Return a value that the metadata names."""
        return self._values[key]

    @property
    def per_rank(self) -> list[str]:
        """The names of the values per rank."""
        return [*self._catalog.per_rank]

    def chosen(self, selection: Selection) -> set[str]:
        """Return the names that are selected.

        The groups of an optimizer are as long as anything of it is, as in a save.
        """
        found = {name for name in self.names.values() if name in selection}
        within = {above for name in found for above in names_above(name)}
        groups = (name for name in self.names.values() if _PARAMS.fullmatch(name))
        kept = [name for name in groups if _PARAMS.sub(r"\1", name) in within]
        return found.union(kept, (name.removesuffix(".params") for name in kept))

    def broken_lists(self, kept: Set[str]) -> Iterator[str]:
        """Yield the lists in which something is kept behind what is left out."""
        within = {above for name in kept for above in names_above(name)}
        there = {above for name in self.names.values() for above in names_above(name)}
        for node in self._tree:
            if not is_mapping(node.kind):
                children = [join(node.fqn, key) for key in node.keys]
                # Of what is empty there is no name.
                are_kept = [name in within or name not in there for name in children]
                if are_kept != sorted(are_kept, reverse=True):
                    yield node.fqn

    def fqn(self, key: str) -> str:
        """Return the name of the tensor that has the data of one that the metadata names."""
        fqn = self._tensors[key]
        return self._catalog.aliases.get(fqn, fqn)

    def wanted(self, key: str) -> TensorRequest:
        """Return what says which tensor to read, and nothing of it yet."""
        record = self._record(key)
        return TensorRequest(self.fqn(key), record.dtype, record.shape, ())

    @contextmanager
    def tensors(self) -> Iterator[StoredTensors]:
        """Open the tensors, to be read a part at a time. NotFoundError if they go meanwhile."""
        with (
            self._there(self._storage),
            closing(StoredTensors(self._storage, self._folder, self._index)) as tensors,
        ):
            yield tensors

    def fill(
        self,
        items: Sequence[ReadItem],
        planner: LoadPlanner,
        together: CollectiveReader,
        *,
        direct_reads: bool,
    ) -> tuple[int, int]:
        """Fill the tensors of a planner. Collective: all ranks of `together` call this.

        Returns how many bytes came from storage, and how many from other ranks. CorruptError, on
        all ranks, if what one of them reads is damaged.
        """
        storage, _ = open_source(self._path, direct_reads=direct_reads)
        asked = _PlannedReads(planner)

        def opened() -> OpenedInput:
            for item in items:
                asked.add(item, torch_dtype(self._record(item.storage_index.fqn).dtype))
            return self._open(storage, asked.parts, together.ranks.config.threads)

        with together.ranks.operation(f"load of {self._folder}"):
            moved = read_together(together, opened, lambda: self._there(storage))
        with together.phases.phase("place"):
            asked.place()
        return moved

    def _there(self, storage: Storage) -> AbstractContextManager[None]:
        return attempts.not_found_if_removed(storage, self._path, self._attempt)

    def _open(self, storage: Storage, tensors: _WantedBoxes, threads: int) -> OpenedInput:
        """Open the files that these boxes are in, and wait for devices that use their memory."""
        wanted = []
        targets: dict[tuple[str, int], Target] = {}
        for key, every_part in tensors.items():
            record, fqn = self._record(key), self._tensors[key]
            parts = [(region, tensor) for region, tensor in every_part if region.numel]
            wanted.append(
                TensorRequest(fqn, record.dtype, record.shape, tuple(region for region, _ in parts))
            )
            for number, (region, tensor) in enumerate(parts):
                targets[fqn, number] = TensorTarget(tensor, region)
        plan = plan_load(self._index, wanted)
        synchronize(tensor for parts in tensors.values() for _, tensor in parts)
        files = open_files(storage, self._folder, self._index, plan, threads=threads)
        return OpenedInput(files, targets)

    def _record(self, key: str) -> TensorRecord:
        return self._catalog.tensors[self.fqn(key)]


class _PlannedReads:
    """What a planner asks for: the boxes of each tensor, by DCP's key, and where they go."""

    def __init__(self, planner: LoadPlanner) -> None:
        self.parts: _WantedBoxes = {}
        self._planner = planner
        self._converted: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._resolved: list[tuple[ReadItem, torch.Tensor]] = []

    def add(self, item: ReadItem, stored: torch.dtype) -> None:
        """Ask the planner where an item goes; through memory of our own if that has another dtype.

        That is taken now: all that a rank may lack is lacking before anything lands anywhere.
        """
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

    def place(self) -> None:
        """Convert what is to be converted, and tell the planner that all is there."""
        synchronize(tensor for parts in self.parts.values() for _, tensor in parts)
        for target, read in self._converted:
            target.copy_(read)
        for item, own in self._resolved:
            self._planner.commit_tensor(item, own)


def _described(record: TensorRecord) -> TensorStorageMetadata:
    size = torch.Size(record.shape)
    whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return TensorStorageMetadata(TensorProperties(torch_dtype(record.dtype)), size, [whole])


def _paths_of(main: ObjectsFile) -> dict[str, Path]:
    """Return the path of each name in the containers that were saved."""
    paths: dict[str, Path] = {"": ()}
    for node in main.tree:
        above = paths.get(node.fqn, (node.fqn,))
        for key in node.keys:
            own = str(key) if is_mapping(node.kind) else key
            paths[join(node.fqn, key)] = (*above, own)
    return paths


def _held(values: Mapping[K, T], name: K, folder: str) -> T:
    if name not in values:
        raise CorruptError(f"{folder}: its objects files lack {name!r}; load an older checkpoint")
    return values[name]


def _path_of(fqn: str, paths: Mapping[str, Path], models: Mapping[str, str]) -> Path:
    """Return where a name is in DCP's nested state; below what is no container it is one key."""
    above = fqn
    while above not in paths:
        above = above.rpartition(".")[0]
    below = fqn[len(above) :].removeprefix(".")
    path = (*paths[above], below) if below else paths[above]
    for number in range(1, len(path)):
        model = models.get(join_all(path[:number]))
        key = path[number]
        if model is not None and isinstance(key, str) and key.startswith(f"{model}."):
            return (*path[:number], key.removeprefix(f"{model}."), *path[number + 1 :])
    return path


def models_of(
    values: Mapping[str, object], tensors: Collection[str], above: Mapping[str, str]
) -> dict[str, str]:
    """Return for the state of each optimizer the name of the one model that it trains.

    `dc.save` names parameters as the whole state does, "model.0.weight", and torch as their model.
    `above` is the container that each name is in.
    """
    found: dict[str, set[str]] = {}
    for fqn, value in values.items():
        if (match := _PARAMS.fullmatch(fqn)) and isinstance(value, list):
            names = [str(name) for name in value]
            # A name that is no tensor's here is one of torch's already.
            models = {above.get(name, "") if name in tensors else "" for name in names}
            found.setdefault(match[1], set()).update(models)
    return {
        f"{optimizer}.state": _common(models)
        for optimizer, models in found.items()
        if _common(models)
    }


def _common(names: Collection[str]) -> str:
    """Return the container that all of these are or lie in; "" if only the state is."""
    in_all = set.intersection(*({*names_above(name)} for name in names)) if names else ()
    return max(in_all, key=len, default="")


def relative(fqn: str, value: object, models: Mapping[str, str]) -> object:
    """Return an optimizer's list of names as torch has them; anything else as it is."""
    match = _PARAMS.fullmatch(fqn)
    model = models.get(f"{match[1]}.state") if match else None
    if model is None or not isinstance(value, list):
        return value
    return [str(name).removeprefix(f"{model}.") for name in value]


def _leaves(path: Path, value: object) -> Iterator[tuple[Path, object]]:
    """Yield what DCP takes for the values in a value: it looks into dicts, and lists of those."""
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from _leaves((*path, str(key)), child)
    elif isinstance(value, list) and any(map(_holds_mappings, value)):
        for number, child in enumerate(value):
            yield from _leaves((*path, number), child)
    else:
        yield path, value


def _holds_mappings(value: object) -> bool:
    return isinstance(value, Mapping) or (
        isinstance(value, list) and any(map(_holds_mappings, value))
    )
