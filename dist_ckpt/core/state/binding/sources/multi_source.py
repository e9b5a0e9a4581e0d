"""Merge several checkpoints: each name comes from the first source that has it. Pure.

Three kinds of names come from one source together: the inner tensors of a tensor subclass, a
parameter group, and the optimizer state of one parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

from dist_ckpt.core.format.geometry import Layout
from dist_ckpt.core.format.index.index import Catalog, Fusion, Key, TensorRecord
from dist_ckpt.core.format.objects.objects_file import ObjectsFile
from dist_ckpt.core.planning.name_selection import names_above
from dist_ckpt.core.planning.tensor_operations import DerivedTensor
from dist_ckpt.core.state.binding.sources.saved_tree import (
    GROUPS_INFIX,
    SavedTree,
    Scope,
    SourceCatalog,
    optimizer_name,
    state_name,
    with_source,
)
from dist_ckpt.core.state.tree.containers import RECORD, PathKey, child_name, is_mapping


@dataclass(frozen=True, slots=True)
class SourceView:
    """One source: a checkpoint, by number, after the source's rename.

    Several sources may read from the same checkpoint.
    """

    number: int
    saved: SavedTree
    scope: Scope


def merge_sources(views: Sequence[SourceView], paths: Sequence[str]) -> SavedTree:
    """Merge several sources into one tree. `paths` are the paths of the checkpoints.

    The first source of a key that has a name provides it. If sources of two keys have a name, the
    tree's `problems` report it. They contain the problems of each source too. `left_out` are the
    names that the selections of sources leave out.
    """
    views = [_number_derived(view, position) for position, view in enumerate(views)]
    catalogs = {view.number: view.saved.catalog for view in views}
    origins = tuple(SourceCatalog(path, catalogs[number]) for number, path in enumerate(paths))
    allocation = _Allocation()
    provided = [allocation.allocate(view) for view in views]
    leaves = {
        name: with_source(names.number, fqn)
        for names in provided
        for name, fqn in names.leaves.items()
    }
    kinds, entries = _merge_containers(provided)
    problems = [f"{view.scope.path}: {text}" for view in views for text in view.saved.problems]
    mains = {view.number: view.saved.main for view in views}
    return replace(
        views[0].saved,
        catalog=_merge_catalogs(origins),
        leaves=leaves,
        kinds=kinds,
        entries=entries,
        params={group: params for names in provided for group, params in names.params.items()},
        numpy=frozenset(
            name for names in provided for name in names.saved.numpy & names.leaves.keys()
        ),
        derived=_merge_derived(views),
        equal={
            name: tuple(with_source(names.number, fqn) for fqn in fqns)
            for names in provided
            for name, fqns in names.saved.equal.items()
            if name in names.leaves
        },
        main={with_source(n, fqn): v for n, main in mains.items() for fqn, v in main.items()},
        read=_merge_readers({view.number: view.saved.read for view in views}),
        dropped=tuple(dict.fromkeys(name for view in views for name in view.saved.dropped)),
        problems=(*problems, *allocation.clashes()),
        state_problems=tuple(
            (state, f"{view.scope.path}: {text}")
            for number, view in enumerate(views)
            for state, text in view.saved.state_problems
            if view.scope.provides(state)
            if not any(state in earlier.all_names for earlier in provided[:number])
        ),
        order=sorted(leaves),
        objects=sorted(
            {name for names in provided for name in names.saved.objects if name in names.all_names}
        ),
        versions={
            name: entry
            for names in reversed(provided)  # the first source of a name counts
            for name, entry in names.saved.versions.items()
            if name in names.all_names
        },
        models=frozenset().union(*(names.saved.models for names in provided)),
        unversioned=frozenset().union(*(names.saved.unversioned for names in provided)),
        has_text_keys=any(view.saved.has_text_keys for view in views),
        uncut={
            name: how
            for names in provided
            for name, how in names.saved.uncut.items()
            if name in names.leaves
        },
        origins=origins,
        name_problems=tuple(_find_name_problems(views)),
        left_out=tuple(sorted(name for view in views for name in _find_left_out(view, leaves))),
        stepless=frozenset(
            state
            for view in views
            for state in _state_names(view.saved)
            if view.scope.provides(state)
        ),
    )


# --- the source of each name -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _SourceNames:
    """The names that one source provides. `all_names` also has the names above them."""

    number: int
    saved: SavedTree
    leaves: Mapping[str, str]
    params: Mapping[str, Sequence[str]]
    all_names: frozenset[str]


@dataclass(slots=True)
class _Allocation:
    """The names that are already allocated to a source.

    `units` and `above` map each unit, and each name above a unit, to the key that provides it.
    `groups` and `numbers` are by key and optimizer: the parameters in its parameter groups, and the
    next free group number. `clashing` are names in the sources of two keys.
    """

    units: dict[str, str] = field(default_factory=dict)
    above: dict[str, str] = field(default_factory=dict)
    groups: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    numbers: dict[tuple[str, str], int] = field(default_factory=dict)
    clashing: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    def allocate(self, view: SourceView) -> _SourceNames:
        """Allocate to a source the names that earlier sources do not provide; return them."""
        key, saved = view.scope.key, self._regroup(view)
        records = (name for name in saved.leaves if name.endswith(f".{RECORD}"))
        subclasses = (record.removesuffix(f".{RECORD}") for record in records)
        units = frozenset((*subclasses, *saved.params, *_state_names(saved)))
        provided: dict[str, str] = {}
        empty = (name for name in saved.kinds if name and not saved.children(name))
        for name in (*saved.leaves, *(name for name in empty if name not in saved.leaves)):
            if not view.scope.provides(name):
                continue
            # A name belongs to the outermost unit that contains it.
            unit = next((n for n in reversed([*names_above(name)]) if n in units), name)
            if (other := self._find_key(unit)) is None:
                provided[name] = unit
            elif other != key:
                self.clashing.setdefault((other, key), []).append(name)
        for unit in provided.values():
            self.units[unit] = key
            _, *above = names_above(unit)
            self.above.update(dict.fromkeys(above, key))
        params = {group: names for group, names in saved.params.items() if group in provided}
        for group, names in params.items():
            self.groups.setdefault((key, optimizer_name(group)), []).extend(names)
            self.numbers[key, optimizer_name(group)] = _group_number(group) + 1
        leaves = {name: saved.leaves[name] for name in provided if name in saved.leaves}
        all_names = frozenset(above for name in provided for above in names_above(name))
        return _SourceNames(view.number, saved, leaves, params, all_names)

    def clashes(self) -> Iterator[str]:
        """Yield a problem for names in the sources of two keys."""
        for (key, other), names in self.clashing.items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            yield (
                f"{names[0]}{more}: the sources of {key!r} and of {other!r} both have it: "
                f"`exclude` it from one of them, or give one key a list of both sources, where the "
                f"first source that has a name provides it"
            )

    def _find_key(self, unit: str) -> str | None:
        """Return the key that provides a unit, or a unit above or below it; None if no key does."""
        if unit in self.above:
            return self.above[unit]
        return next((self.units[name] for name in names_above(unit) if name in self.units), None)

    def _regroup(self, view: SourceView) -> SavedTree:
        """Renumber a source's parameter groups to follow the groups of earlier sources.

        Parameters that an earlier source provides are removed from the groups. Groups of two
        sources are unrelated, even if they have the same number.
        """
        saved, key = view.saved, view.scope.key
        moved: dict[str, str | None] = {}
        # Kept apart from `saved.params`: a new number may be the old number of another group.
        renumbered: dict[str, Sequence[str]] = {}
        for group in sorted(saved.params, key=_group_number):
            optimizer = optimizer_name(group)
            if (key, optimizer) not in self.groups:
                continue
            moved[group] = None
            former = set(self.groups[key, optimizer])
            remaining = [name for name in saved.params[group] if name not in former]
            if remaining and view.scope.provides(group):
                number = self.numbers[key, optimizer]
                self.numbers[key, optimizer] = number + 1
                moved[group] = new = f"{optimizer}{GROUPS_INFIX}{number}"
                renumbered[new] = remaining
        if not moved:
            return saved
        params = {group: names for group, names in saved.params.items() if group not in moved}
        return _renumber(replace(saved, params=params | renumbered), moved)


def _renumber(saved: SavedTree, groups: Mapping[str, str | None]) -> SavedTree:
    """Replace the names of groups, also in the names below them. None removes a group."""

    def new(name: str) -> str | None:
        for above in names_above(name):
            if above in groups:
                to = groups[above]
                return None if to is None else to + name[len(above) :]
        return name

    return replace(
        saved,
        leaves={to: fqn for name, fqn in saved.leaves.items() if (to := new(name)) is not None},
        kinds={to: kind for name, kind in saved.kinds.items() if (to := new(name)) is not None},
        entries={
            to: tuple(
                (_group_number(now) if child in groups else key, now)
                for key, child in children
                if (now := new(child)) is not None
            )
            for name, children in saved.entries.items()
            if (to := new(name)) is not None
        },
        numpy=frozenset(to for name in saved.numpy if (to := new(name)) is not None),
        objects=[to for name in saved.objects if (to := new(name)) is not None],
    )


def _state_names(saved: SavedTree) -> Iterator[str]:
    """Yield the name of the state of each parameter in the groups."""
    for group, params in saved.params.items():
        yield from (child_name(state_name(group), name) for name in params)


def _group_number(group: str) -> int:
    number = group.rpartition(".")[2]
    return int(number) if number.isdecimal() else 0


def _find_left_out(view: SourceView, leaves: Mapping[str, str]) -> Iterator[str]:
    scope, names = view.scope, view.saved.leaves.keys() - leaves.keys()
    return (name for name in names if scope.contains(name) and name not in scope.selection)


def _find_name_problems(views: Iterable[SourceView]) -> Iterator[str]:
    paths: dict[str, list[str]] = {}
    existing: set[str] = set()
    for scope, saved in ((view.scope, view.saved) for view in views):
        names = [name for name in saved.leaves if scope.contains(name)]
        yield from (
            f"{scope.path}: {problem}" for problem in scope.selection.pattern_problems(names)
        )
        paths.setdefault(scope.key, []).append(scope.path)
        if not scope.key or saved.contains(scope.key):
            existing.add(scope.key)
    for key, here in paths.items():
        if key not in existing:
            yield f"{key}: nothing is saved under this key in {' or '.join(here)}: change the key"


# --- one catalog, one tree -------------------------------------------------------------------


def _merge_containers(
    provided: Sequence[_SourceNames],
) -> tuple[dict[str, str], dict[str, Sequence[tuple[PathKey, str]]]]:
    kinds: dict[str, str] = {}
    entries: dict[str, dict[str, PathKey]] = {}
    for names in provided:
        for name, kind in names.saved.kinds.items():
            if name and name not in names.all_names:
                continue
            if kinds.setdefault(name, kind) != kind:
                kinds[name] = "dict"
            children = entries.setdefault(name, {})
            for key, child in names.saved.entries.get(name, ()):
                if child in names.all_names:
                    children.setdefault(child, key)
    ordered: dict[str, Sequence[tuple[PathKey, str]]] = {}
    for name, children in entries.items():
        ordered[name] = items = [(key, child) for child, key in children.items()]
        if not is_mapping(kinds[name]):  # items of a list may come from several sources
            items.sort(key=lambda item: int(item[0]))
    return kinds, ordered


def _merge_catalogs(origins: Sequence[SourceCatalog]) -> Catalog:
    """Merge the catalogs of all checkpoints. A rank number also encodes its checkpoint."""
    layouts: list[Layout] = []
    tensors: dict[str, TensorRecord] = {}
    aliases: dict[str, str] = {}
    values: dict[str, int] = {}
    per_rank: dict[str, tuple[tuple[Key, int], ...]] = {}
    parameters: dict[str, bool] = {}
    fused: dict[str, Fusion] = {}
    for number, origin in enumerate(origins):
        catalog, records = origin.catalog, dict[int, TensorRecord]()
        for fqn, record in catalog.tensors.items():
            if id(record) not in records:  # equal tensors mostly share a record
                records[id(record)] = replace(record, layout=record.layout + len(layouts))
            tensors[with_source(number, fqn)] = records[id(record)]
        layouts += catalog.layouts
        here = partial(with_source, number)
        aliases |= {here(alias): here(fqn) for alias, fqn in catalog.aliases.items()}
        parameters |= {here(fqn): is_trained for fqn, is_trained in catalog.parameters.items()}
        fused |= {here(fqn): fusion for fqn, fusion in catalog.fused.items()}
        values |= {here(fqn): rank * len(origins) + number for fqn, rank in catalog.values.items()}
        for fqn, keys in catalog.per_rank.items():
            numbers = ((key, rank * len(origins) + number) for key, rank in keys)
            per_rank[here(fqn)] = tuple(numbers)
    return replace(
        origins[0].catalog,
        layouts=tuple(layouts),
        tensors=tensors,
        aliases=aliases,
        values=values,
        per_rank=per_rank,
        parameters=parameters,
        fused=fused,
    )


def _number_derived(view: SourceView, position: int) -> SourceView:
    """Give derived tensors unique names: several views may be of one checkpoint."""
    if not view.saved.derived:
        return view
    new = {fqn: f"{position} {fqn}" for fqn in view.saved.derived}
    leaves = {name: new.get(fqn, fqn) for name, fqn in view.saved.leaves.items()}
    derived = {new[fqn]: tensor for fqn, tensor in view.saved.derived.items()}
    return replace(view, saved=replace(view.saved, leaves=leaves, derived=derived))


def _merge_derived(views: Sequence[SourceView]) -> dict[str, DerivedTensor]:
    return {
        with_source(view.number, fqn): tensor.map_sources(partial(with_source, view.number))
        for view in views
        for fqn, tensor in view.saved.derived.items()
    }


def _merge_readers(
    reads: Mapping[int, Callable[[int], ObjectsFile]],
) -> Callable[[int], ObjectsFile]:
    @cache
    def read(file: int) -> ObjectsFile:
        rank, number = divmod(file, len(reads))
        stored = reads[number](rank)
        return ObjectsFile(
            values={with_source(number, fqn): value for fqn, value in stored.values.items()},
            per_rank={with_source(number, fqn): of for fqn, of in stored.per_rank.items()},
        )

    return read
