"""Which names of a checkpoint a save carries over, and how they are stored. Pure.

A component of the source of which all is carried over keeps its files, one a rank, if as many ranks
save as then. All other tensors are cut and stored anew, as a reshard does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count

from dist_ckpt.core.format import filenames
from dist_ckpt.core.format.index.index import (
    Catalog,
    Component,
    Index,
    Key,
    Node,
    ShardFileRecord,
    TensorRecord,
)
from dist_ckpt.core.format.objects.objects_file import ObjectsFile
from dist_ckpt.core.planning.plan import SavePlan
from dist_ckpt.core.planning.selection import Selection, names_above
from dist_ckpt.core.planning.sharded_views import plan_stored
from dist_ckpt.core.planning.sharding_config import ShardingConfig
from dist_ckpt.core.state.binding.sources.saved_tree import state_of
from dist_ckpt.core.state.tree.containers import is_mapping, join, whole_of
from dist_ckpt.errors import listed

_PARAMS = ".params"


@dataclass(frozen=True, slots=True)
class CarriedNames:
    """What is carried on, in the order of the source.

    `tensors` maps names to the tensors of the source that have their data, `aliases` to those of
    the new checkpoint that they are tied to; `values` and `per_rank` are names. `hidden` are names
    that are not carried on, since the state has something else there.
    """

    tensors: Mapping[str, str]
    aliases: Mapping[str, str]
    values: tuple[str, ...]
    per_rank: tuple[str, ...]
    hidden: tuple[str, ...] = ()

    @property
    def all(self) -> frozenset[str]:
        """All names."""
        return frozenset((*self.tensors, *self.aliases, *self.values, *self.per_rank))


def names_of(catalog: Catalog) -> tuple[str, ...]:
    """Return the names of all that is stored."""
    return (*catalog.tensors, *catalog.aliases, *catalog.values, *catalog.per_rank)


def not_loaded(
    source: Catalog, done: Collection[str], excluded: Selection
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of which nothing was loaded, and those of them that are not left out.

    A tensor that is made of others is taken as a whole, by its own name.
    """
    wholes = {name: whole_or_name(name, source) for name in names_of(source)}
    loaded = {whole_or_name(name, source) for name in done}
    left = [name for name, whole in wholes.items() if whole not in loaded]
    found = tuple(wholes[name] for name in left)
    return found, tuple(name for name in left if wholes[name] in excluded)


def whole_or_name(name: str, source: Catalog) -> str:
    """Return the tensor of which a name is a part, or the name itself."""
    return whole_of(name, source.values) or name


def carried_names(
    source: Catalog, names: Iterable[str], live: Catalog, tree: Iterable[Node]
) -> CarriedNames:
    """Return which of these `names` are carried on: those that the state does not hold itself.

    `live` and `tree` are what is saved of the state. What lies in a tensor or value of the state,
    or is one where the state has a container, is `hidden` by that.
    """
    held = frozenset(names_of(live))
    left = frozenset(names) - held
    hidden = _hidden(left, held, {node.fqn for node in tree}, frozenset(names_of(source)))
    chosen = left - hidden
    tensors, aliases = _tied(source, chosen, live)
    return CarriedNames(
        tensors,
        aliases,
        tuple(fqn for fqn in source.values if fqn in chosen),
        tuple(fqn for fqn in source.per_rank if fqn in chosen),
        tuple(sorted(hidden)),
    )


def _hidden(
    left: Collection[str], held: Collection[str], nodes: Collection[str], saved: Collection[str]
) -> frozenset[str]:
    # Of what the source has beside each other, nothing lies in the other: `lr` and `lr.max`.
    above_new = {above for fqn in held if fqn not in saved for above in names_above(fqn)}
    new = {fqn for fqn in held if fqn not in saved}
    below_new = (fqn for fqn in left if not new.isdisjoint(names_above(fqn)))
    return frozenset((*above_new.union(nodes).intersection(left), *below_new))


def _tied(
    source: Catalog, chosen: Collection[str], live: Catalog
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the tensors, and what is tied to one: of the state if that has it, by any name."""
    ties: dict[str, list[str]] = {}
    for fqn, data in source.aliases.items():
        ties.setdefault(data, []).append(fqn)
    tensors: dict[str, str] = {}
    aliases: dict[str, str] = {}
    stored: dict[str, str] = {}
    for fqn in (*source.tensors, *source.aliases):
        if fqn not in chosen:
            continue
        data = source.aliases.get(fqn, fqn)
        twin = stored.get(data) or _live_twin(source, live, (data, *ties.get(data, ())))
        if twin is None:
            stored[data] = fqn
            tensors[fqn] = data
        else:
            aliases[fqn] = twin
    return tensors, aliases


def _live_twin(source: Catalog, live: Catalog, names: Iterable[str]) -> str | None:
    """Return the tensor of the state that has one of the tied names, and is like it was."""
    for name in names:
        canonical = live.aliases.get(name, name)
        was, record = source.tensors[source.aliases.get(name, name)], live.tensors.get(canonical)
        if record is not None and (record.dtype, record.shape) == (was.dtype, was.shape):
            return canonical
    return None


# --- the global objects file -----------------------------------------------------------------


def with_carried(
    live: ObjectsFile, source: ObjectsFile, carried: CarriedNames, values: Mapping[str, object]
) -> ObjectsFile:
    """Return the global objects file of both; `values` are those that are carried.

    ValueError where the state and the source have containers of one name that do not mix.
    """
    names = carried.all
    return replace(
        live,
        tree=_merged_tree(live.tree, source.tree, names),
        values={**live.values, **values, **dict(_name_lists(live, source, names))},
        numpy=(*live.numpy, *(fqn for fqn in source.numpy if fqn in names)),
    )


def _name_lists(
    live: ObjectsFile, source: ObjectsFile, names: Collection[str]
) -> Iterator[tuple[str, list[str]]]:
    """Yield the parameters' names of optimizer groups of which something is carried."""
    known = {above for name in names for above in names_above(name)}
    for fqn, params in source.values.items():
        group = fqn.removesuffix(_PARAMS)
        if group == fqn or fqn in names or not isinstance(params, list):
            continue
        if group in known and fqn not in live.values:
            yield fqn, params
        elif isinstance(there := live.values.get(fqn), list) and group in live.values:
            stem = state_of(group)
            more = (p for p in params if p not in there and join(stem, p) in known)
            yield fqn, [*there, *more]


def _merged_tree(
    live: Sequence[Node], source: Sequence[Node], names: Collection[str]
) -> tuple[Node, ...]:
    """Return the containers of the state, with what is carried in them, and those carried."""
    own = {node.fqn for node in live}
    empty = {node.fqn for node in source if not node.keys}
    kept = {"", *names, *(above for name in names for above in names_above(name))}
    carried: dict[str, Node] = {}
    for node in source:
        # An empty one comes with what it was in.
        more = empty if node.fqn not in own else ()
        keys = [key for key in node.keys if (c := join(node.fqn, key)) in kept or c in more]
        if node.fqn in kept and keys:
            carried[node.fqn] = Node(node.fqn, node.kind, tuple(keys))
    for node in source:
        above = carried.get(node.fqn.rpartition(".")[0])
        if node.fqn in empty - own and above is not None and above.fqn not in own:
            carried[node.fqn] = node
    merged = [_merged(node, carried.pop(node.fqn, None)) for node in live]
    for node in (*merged, *carried.values()):
        _check_list(node)
    return (*merged, *carried.values())


def _merged(live: Node, carried: Node | None) -> Node:
    if carried is None:
        return live
    if is_mapping(live.kind) != is_mapping(carried.kind):
        one = join(live.fqn, carried.keys[0])
        raise ValueError(
            f"carry_over: {live.fqn} is a {live.kind} in the state, and was saved as a "
            f"{carried.kind}: leave out what would be carried on in it (exclude={one!r})"
        )
    held = {str(key) for key in live.keys}
    return Node(live.fqn, live.kind, (*live.keys, *(k for k in carried.keys if str(k) not in held)))


def _check_list(node: Node) -> None:
    """Raise ValueError for a list that lacks an item: the others would move."""
    if not is_mapping(node.kind) and node.keys != (*range(len(node.keys)),):
        lacking = next(number for number, key in enumerate(node.keys) if number != key)
        raise ValueError(
            f"carry_over: {node.fqn} would be a {node.kind} without its item {lacking}, and the "
            f"others would move: leave out what would be carried on of it (exclude={node.fqn!r}), "
            f"or load all of it"
        )


# --- how it is stored ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CarryPlan:
    """What all ranks store: `catalog` is of all, the state's part of it as it was planned.

    `linked` are the source's files that the new checkpoint has as well, by their names there;
    `copied` is the plan of the tensors that are written anew, None without any.
    """

    catalog: Catalog
    names: CarriedNames
    linked: Mapping[str, ShardFileRecord]
    copied: SavePlan | None


def plan_carried(live: Catalog, source: Index, names: CarriedNames) -> CarryPlan:
    """Return the plan of a save of a state, `live`, and of what it carries on.

    ValueError for values per rank of another mesh than this one.
    """
    _check_mesh(live, source.catalog, names)
    whole = _whole(source.catalog, names) if source.catalog.world_size == live.world_size else []
    own = source.catalog.components
    stems = _with_free_stems(live.components, [own[number] for number in whole])
    linked = _linked_part(source.catalog, names, dict(zip(whole, stems, strict=True)))
    copied = _plan_copied(live, source.catalog, names, linked.tensors)
    if copied is not None:
        components = _with_free_stems((*live.components, *stems), copied.catalog.components)
        copied = replace(copied, catalog=replace(copied.catalog, components=components))
    stem_of = {number: one.stem for number, one in zip(whole, stems, strict=True)}
    return CarryPlan(
        _joined(live, source.catalog, names, [linked, *([copied.catalog] if copied else [])]),
        names,
        {
            filenames.shard_file(stem_of[file.component], file.rank): file
            for file in source.files
            if file.component in stem_of
        },
        copied,
    )


def _check_mesh(live: Catalog, source: Catalog, names: CarriedNames) -> None:
    """Raise ValueError where ranks that have the same numbers mean something else now."""
    now = [axis for axis in live.mesh if axis[1] > 1]
    then = [axis for axis in source.mesh if axis[1] > 1]
    of_ranks = [
        fqn for fqn in names.per_rank if any(type(k) is int for k, _ in source.per_rank[fqn])
    ]
    if of_ranks and live.world_size == source.world_size and now and then and now != then:
        raise ValueError(
            f"carry_over: {listed(of_ranks)} belongs to the ranks of the mesh {then}, and this one "
            f"is {now}: exclude it (exclude={of_ranks[0]!r})"
        )


def _whole(source: Catalog, names: CarriedNames) -> list[int]:
    """Return the components all tensors of which are carried, under their own names."""
    cut = {one.component for fqn, one in source.tensors.items() if names.tensors.get(fqn) != fqn}
    return sorted({one.component for one in source.tensors.values()} - cut)


def _with_free_stems(
    taken: Iterable[Component], components: Iterable[Component]
) -> tuple[Component, ...]:
    """Return components with the stems that they have, or others where those are taken."""
    stems = {one.stem for one in taken}
    found = []
    for one in components:
        free = chain([one.stem], (f"k{number:02d}" for number in count()))
        stem = next(stem for stem in free if stem not in stems)
        stems.add(stem)
        found.append(Component(one.name, stem))
    return tuple(found)


def _linked_part(
    source: Catalog, names: CarriedNames, components: Mapping[int, Component]
) -> Catalog:
    """Return the catalog of the tensors in these components of the source, by their numbers."""
    kept = {
        fqn: source.tensors[fqn]
        for fqn in names.tensors
        if fqn in source.tensors and source.tensors[fqn].component in components
    }
    layouts = sorted({record.layout for record in kept.values()})
    new_component = {old: new for new, old in enumerate(components)}
    new_layout = {old: new for new, old in enumerate(layouts)}
    return replace(
        source,
        components=tuple(components.values()),
        layouts=tuple(source.layouts[number] for number in layouts),
        tensors={
            fqn: replace(one, component=new_component[one.component], layout=new_layout[one.layout])
            for fqn, one in kept.items()
        },
        parameters={fqn: known for fqn, known in source.parameters.items() if fqn in kept},
    )


def _plan_copied(
    live: Catalog, source: Catalog, names: CarriedNames, linked: Collection[str]
) -> SavePlan | None:
    """Plan the tensors that are not linked, as a reshard for the ranks of the save does."""
    copied = {fqn: data for fqn, data in names.tensors.items() if fqn not in linked}
    if not copied:
        return None
    known = source.parameters
    catalog = replace(
        source,
        tensors={fqn: source.tensors[data] for fqn, data in copied.items()},
        aliases={},
        values={},
        per_rank={},
        parameters={fqn: known[data] for fqn, data in copied.items() if data in known},
    )
    return plan_stored(catalog, ShardingConfig.even(live.world_size), (), ())


def _joined(
    live: Catalog, source: Catalog, names: CarriedNames, parts: Iterable[Catalog]
) -> Catalog:
    """Return one catalog of the state, of the carried tensors in the parts, and of the rest."""
    components, layouts, tensors = [*live.components], [*live.layouts], {**live.tensors}
    parameters = {**live.parameters}
    for part in parts:
        moved: dict[int, TensorRecord] = {}  # tensors that are alike share their record
        for fqn, one in part.tensors.items():
            if id(one) not in moved:
                moved[id(one)] = replace(
                    one,
                    component=one.component + len(components),
                    layout=one.layout + len(layouts),
                )
            tensors[fqn] = moved[id(one)]
        components += part.components
        layouts += part.layouts
        parameters.update(part.parameters)
    return replace(
        live,
        mesh=live.mesh or (source.mesh if live.world_size == source.world_size else ()),
        components=tuple(components),
        layouts=tuple(layouts),
        tensors=tensors,
        aliases={**live.aliases, **names.aliases},
        values={**live.values, **dict.fromkeys(names.values, 0)},
        per_rank={
            **live.per_rank,
            **{fqn: _holders(source.per_rank[fqn], source, live) for fqn in names.per_rank},
        },
        parameters={fqn: parameters[fqn] for fqn in tensors if fqn in parameters},
    )


def _holders(
    keys: Sequence[tuple[Key, int]], source: Catalog, live: Catalog
) -> tuple[tuple[Key, int], ...]:
    """Return who stores each key: who did so, or with other ranks one after another."""
    if source.world_size == live.world_size:
        return tuple(keys)
    return tuple((key, number % live.world_size) for number, (key, _) in enumerate(keys))
