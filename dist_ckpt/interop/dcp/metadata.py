"""A checkpoint as DCP sees it: its metadata and values, by the keys of a flattened state dict."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Set

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

from dist_ckpt.core.checkpoint.open_checkpoint import OpenCheckpoint
from dist_ckpt.core.format.index.index import TensorRecord
from dist_ckpt.core.format.objects.objects_file import ObjectsFile
from dist_ckpt.core.planning.selection import Selection, names_above
from dist_ckpt.core.state.tensors.local_tensors import torch_dtype
from dist_ckpt.core.state.tree.containers import is_mapping, join
from dist_ckpt.errors import IncompatibleError
from dist_ckpt.interop.readers.nested_state import Path

# The names of the parameters in a group of an optimizer.
_PARAMS = re.compile(r"(.+)\.param_groups\.\d+\.params")


class DcpKeys:
    """What a checkpoint holds, by the keys of a flattened state dict. `rank` is who loads.

    Raises CorruptError if values cannot be read, IncompatibleError if two names have one key.
    """

    def __init__(self, opened: OpenCheckpoint, rank: int) -> None:
        self._catalog, self._path = opened.catalog, opened.path
        main = opened.objects()
        values = {**main.values, **dict(_further_values(opened, rank))}
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

    def metadata(self, storage_meta: StorageMeta) -> Metadata:
        """Return what DCP plans with: each tensor is one chunk, of which any part may be read."""
        entries: dict[str, STORAGE_TYPES] = {
            key: _described(self.record(key)) for key in self._tensors
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
        chosen_names = {name for name in self.names.values() if name in selection}
        within = {above for name in chosen_names for above in names_above(name)}
        groups = (name for name in self.names.values() if _PARAMS.fullmatch(name))
        kept = [name for name in groups if _PARAMS.sub(r"\1", name) in within]
        return chosen_names.union(kept, (name.removesuffix(".params") for name in kept))

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

    def name_of(self, key: str) -> str:
        """Return the name of a tensor that the metadata names, which may be tied."""
        return self._tensors[key]

    def fqn(self, key: str) -> str:
        """Return the name of the tensor that has the data of one that the metadata names."""
        fqn = self._tensors[key]
        return self._catalog.aliases.get(fqn, fqn)

    def record(self, key: str) -> TensorRecord:
        """Return what the index says of a tensor that the metadata names."""
        return self._catalog.tensors[self.fqn(key)]


def join_all(path: Path) -> str:
    """Return the name of what is at a path."""
    return ".".join(map(str, path))


def _further_values(opened: OpenCheckpoint, rank: int) -> Iterator[tuple[str, object]]:
    """Yield the values that other files than the global one have, and those of this rank."""
    for fqn, holder in opened.catalog.values.items():
        if holder:
            yield fqn, opened.value(fqn)
    for fqn, keys in opened.catalog.per_rank.items():
        if any(key == rank for key, _ in keys):
            yield fqn, opened.value_of_rank(fqn, rank)


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
    models_by_optimizer: dict[str, set[str]] = {}
    for fqn, value in values.items():
        if (match := _PARAMS.fullmatch(fqn)) and isinstance(value, list):
            names = [str(name) for name in value]
            # A name that is no tensor's here is one of torch's already.
            models = {above.get(name, "") if name in tensors else "" for name in names}
            models_by_optimizer.setdefault(match[1], set()).update(models)
    return {
        f"{optimizer}.state": _common(models)
        for optimizer, models in models_by_optimizer.items()
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
