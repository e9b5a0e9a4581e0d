"""A checkpoint under other names, and with tensors that operations make: for exports. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dist_ckpt.core.checkpoint.open_checkpoint import OpenCheckpoint, iterate_parts
from dist_ckpt.core.format import filenames
from dist_ckpt.core.format.geometry import Region
from dist_ckpt.core.format.index.index import Catalog, Index, Key, Node, TensorRecord
from dist_ckpt.core.format.objects.objects_file import ObjectsFile
from dist_ckpt.core.format.strict_json import Json
from dist_ckpt.core.planning.name_selection import names_above
from dist_ckpt.core.planning.plan import TensorRequest
from dist_ckpt.core.planning.tensor_operations import DerivedTensor
from dist_ckpt.core.planning.tensor_views import whole_layout
from dist_ckpt.core.shard_io.memory.cell_memory import Targets, find_sources
from dist_ckpt.core.state.binding.sources.derived_tensors import STATE_REMEDY
from dist_ckpt.core.state.binding.sources.rename import RenameRules
from dist_ckpt.core.state.binding.sources.saved_tree import (
    SavedTree,
    build_saved_tree,
    split_source,
)
from dist_ckpt.errors import IncompatibleError
from dist_ckpt.message_text import listed


def rename_checkpoint(opened: OpenCheckpoint, rename: RenameRules | None) -> OpenCheckpoint:
    """Return a checkpoint as if it was saved under the new names. Without rules, return it.

    A tensor that operations make is read in parts of any size, directly from the saved ones.
    TypeError or ValueError for rules that are not valid, IncompatibleError for rules that do not
    fit the checkpoint.
    """
    if not rename:
        return opened
    saved = build_saved_tree(opened.catalog, opened.objects(), opened.objects, rename=rename)
    of_states = tuple(text for _, text in saved.state_problems)
    problems = saved.problems or of_states or tuple(find_unequal(saved, [opened]))
    if problems:
        raise IncompatibleError(f"{opened.path}: {listed(problems, '; ')}")
    names = _Names.of(saved)
    index = replace(opened.index, catalog=names.catalog)
    translation = _Translation(opened.index, names.stored, saved.derived)
    renamed = replace(opened, index=index, translation=translation)
    renamed.add_objects(_rename_objects(opened, saved, names))
    return renamed


@dataclass(frozen=True, slots=True)
class _Names:
    """The catalog under the new names, with what an export reads of it.

    `stored` has the saved name of each tensor in it.
    """

    catalog: Catalog
    stored: Mapping[str, str]

    @staticmethod
    def of(saved: SavedTree) -> _Names:
        catalog = saved.catalog
        position = {name: number for number, name in enumerate(catalog.names)}
        made = len(position)
        ordered = sorted(saved.leaves.items(), key=lambda item: position.get(item[1], made))
        stored: dict[str, str] = {}
        first: dict[str, str] = {}
        aliases: dict[str, str] = {}
        tensors: dict[str, TensorRecord] = {}
        layouts = [*catalog.layouts]
        for name, _ in ordered:
            if (tensor := saved.tensor(name)) is None:
                continue
            fqn, record = tensor
            if first.setdefault(fqn, name) != name:
                aliases[name] = first[fqn]
                continue
            if fqn in saved.derived:
                layouts.append(whole_layout(record.shape, (0,)))
                record = replace(record, layout=len(layouts) - 1)
            stored[name], tensors[name] = fqn, record
        return _Names(
            replace(
                catalog,
                layouts=tuple(layouts),
                tensors=tensors,
                aliases=aliases,
                values={name: 0 for name, fqn in ordered if fqn in catalog.values},
                per_rank={n: catalog.per_rank[f] for n, f in ordered if f in catalog.per_rank},
                parameters={},
                fused={},
                replicas={},
                versions=None if catalog.versions is None else _list_versions(saved),
            ),
            stored,
        )


def _list_versions(saved: SavedTree) -> dict[str, dict[str, Json]]:
    """Return the versions of modules as an index has them: by the nearest model above."""
    listed: dict[str, dict[str, Json]] = {model: {} for model in saved.models}
    for name, entry in saved.versions.items():
        model = next((up for up in (*names_above(name), "") if up in listed), None)
        if model is not None:
            listed[model][name[len(model) :].removeprefix(".")] = entry
    return listed


@dataclass(frozen=True, slots=True)
class _Translation:
    """Turns requests under the new names into requests of the stored tensors."""

    index: Index
    stored: Mapping[str, str]
    derived: Mapping[str, DerivedTensor]

    def translate(
        self, wanted: Sequence[TensorRequest], targets: Targets | None
    ) -> tuple[list[TensorRequest], Targets | None]:
        """Return the requests, and the memory of each of their cells."""
        stored, tensors = self.stored, self.index.catalog.tensors
        moved = targets and {(stored[fqn], n): target for (fqn, n), target in targets.items()}
        named = ((stored[want.fqn], want.cells) for want in wanted)
        cells, memory = find_sources(named, self.derived, moved)
        requests = [
            TensorRequest(fqn, tensors[fqn].dtype, tensors[fqn].shape, tuple(boxes))
            for fqn, boxes in cells.items()
        ]
        return requests, None if targets is None else memory


def _rename_objects(
    opened: OpenCheckpoint, saved: SavedTree, names: _Names
) -> dict[str, ObjectsFile]:
    """Return the objects files under the new names. The global file has all values."""
    catalog, main = saved.catalog, opened.objects()
    values = {name: saved.value(name) for name in names.catalog.values}
    lists = {f"{group}.params": list(params) for group, params in saved.params.items()}
    for group in saved.params:
        if isinstance(group_value := values.get(group), dict):
            values[group] = {k: v for k, v in group_value.items() if k != "params"}
    tree = tuple(
        Node(name, kind, tuple(key for key, _ in saved.children(name)))
        for name, kind in saved.kinds.items()
        if name not in saved.params or name not in values
    )
    files = {
        filenames.OBJECTS: ObjectsFile(
            tree,
            {**values, **lists},
            {},
            tuple(sorted(saved.numpy)),
            main.metadata,
            uncut=saved.uncut,
        )
    }
    ranks = {rank for keys in catalog.per_rank.values() for _, rank in keys}
    for rank in ranks:
        files[filenames.objects_file(rank)] = ObjectsFile(
            per_rank=_per_rank(saved, opened.objects(rank))
        )
    return files


def _per_rank(saved: SavedTree, file: ObjectsFile) -> dict[str, Mapping[Key, object]]:
    return {name: file.per_rank[fqn] for name, fqn in saved.leaves.items() if fqn in file.per_rank}


# --- values that must be equal ----------------------------------------------------------------


def find_unequal(saved: SavedTree, checkpoints: Sequence[OpenCheckpoint]) -> Iterator[str]:
    """Yield a problem for each scalar whose sources differ. Reads the scalars."""
    tensors = saved.catalog.tensors
    needed = dict.fromkeys(fqn for fqns in saved.equal.values() for fqn in fqns if fqn in tensors)
    requests: dict[int, list[TensorRequest]] = {}
    for fqn in needed:
        number, name = split_source(fqn) if saved.origins else (0, fqn)
        dtype, shape = tensors[fqn].dtype, tensors[fqn].shape
        request = TensorRequest(name, dtype, shape, (Region.whole(shape),))
        requests.setdefault(number, []).append(request)
    contents: dict[tuple[int, str], object] = {}
    for number, wanted in requests.items():
        memory = memoryview(bytearray(checkpoints[number].tensor_nbytes([w.fqn for w in wanted])))
        checkpoints[number].read(wanted, memory)
        for want, data in iterate_parts(wanted, memory):
            contents[number, want.fqn] = want.dtype, bytes(data)

    def content(fqn: str) -> object:
        if fqn in tensors:
            return contents[split_source(fqn) if saved.origins else (0, fqn)]
        values = saved.main if fqn in saved.main else saved.read(saved.catalog.values[fqn]).values
        return values[fqn]

    for name, (first, *further) in saved.equal.items():
        if other := next((fqn for fqn in further if content(fqn) != content(first)), None):
            yield (
                f"rename: {name!r} would be one value, but {first!r} and {other!r} differ: "
                f"{STATE_REMEDY}"
            )
