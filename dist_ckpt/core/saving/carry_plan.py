"""Plan what a save carries over from a checkpoint: the names, and their files. Pure.

If the world size is the same, a component that is carried over completely keeps its files. All
other tensors are cut and written again, as in a reshard.
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
    Node,
    ShardFileRecord,
    TensorRecord,
)
from dist_ckpt.core.format.objects.objects_file import ObjectsFile
from dist_ckpt.core.planning.module_versions import join_versions
from dist_ckpt.core.planning.name_selection import Selection, names_above
from dist_ckpt.core.planning.plan import SavePlan
from dist_ckpt.core.planning.sharding_config import ShardingConfig, plan_reshard
from dist_ckpt.core.state.binding.sources.saved_tree import state_name
from dist_ckpt.core.state.tree.containers import child_name, find_enclosing_subclass, is_mapping
from dist_ckpt.message_text import listed

_PARAMS = ".params"


@dataclass(frozen=True, slots=True)
class CarriedNames:
    """The names that are carried over, in the order of the source.

    `tensors` maps names to the tensors of the source with their data. `aliases` maps names to the
    tensors of the new checkpoint that they are tied to. `hidden` names are not carried over,
    because the state has something else there.
    """

    tensors: Mapping[str, str]
    aliases: Mapping[str, str]
    values: tuple[str, ...]
    per_rank: tuple[str, ...]
    hidden: tuple[str, ...] = ()

    @property
    def all(self) -> frozenset[str]:
        """All names that are carried over."""
        return frozenset((*self.tensors, *self.aliases, *self.values, *self.per_rank))


def find_not_loaded(
    source: Catalog, done: Collection[str], excluded: Selection
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return two tuples: the names that were not loaded, and those that are also not excluded.

    The inner tensors of a tensor subclass count as one tensor, under the name of the subclass.
    """
    wholes = {name: whole_or_name(name, source) for name in source.names}
    loaded = {whole_or_name(name, source) for name in done}
    remaining = [name for name, whole in wholes.items() if whole not in loaded]
    selected = tuple(name for name in remaining if wholes[name] in excluded)
    return tuple(wholes[name] for name in remaining), selected


def whole_or_name(name: str, source: Catalog) -> str:
    """Return the name of the tensor subclass that `name` is inside, or `name` itself."""
    return find_enclosing_subclass(name, source.values) or name


def select_carried_names(
    source: Catalog, names: Iterable[str], live: Catalog, tree: Iterable[Node]
) -> CarriedNames:
    """Return the `names` that are carried over: the state does not have them.

    `live` and `tree` are the catalog and the containers of the state. A name is `hidden` if it is
    inside a tensor or value of the state, or if the state has a container of that name.
    """
    in_state = frozenset(live.names)
    remaining = frozenset(names) - in_state
    # In one checkpoint no name is inside another: it never has both `lr` and `lr.max`.
    new = in_state - frozenset(source.names)
    above_new = {above for fqn in new for above in names_above(fqn)} | {node.fqn for node in tree}
    below_new = {fqn for fqn in remaining if not new.isdisjoint(names_above(fqn))}
    hidden = (above_new & remaining) | below_new
    chosen = remaining - hidden
    tensors, aliases = _split_tied(source, chosen, live)
    return CarriedNames(
        tensors,
        aliases,
        tuple(fqn for fqn in source.values if fqn in chosen),
        tuple(fqn for fqn in source.per_rank if fqn in chosen),
        tuple(sorted(hidden)),
    )


def _split_tied(
    source: Catalog, chosen: Collection[str], live: Catalog
) -> tuple[dict[str, str], dict[str, str]]:
    """Split chosen names into tensors and aliases.

    A name that is tied to a tensor of the state becomes an alias of that tensor.
    """
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
        twin = stored.get(data) or _find_live_twin(source, live, (data, *ties.get(data, ())))
        if twin is None:
            stored[data] = fqn
            tensors[fqn] = data
        else:
            aliases[fqn] = twin
    return tensors, aliases


def _find_live_twin(source: Catalog, live: Catalog, names: Iterable[str]) -> str | None:
    """Return the tensor of the state with one of these tied names, and equal dtype and shape."""
    for name in names:
        canonical = live.aliases.get(name, name)
        saved, record = source.tensors[source.aliases.get(name, name)], live.tensors.get(canonical)
        if record is not None and (record.dtype, record.shape) == (saved.dtype, saved.shape):
            return canonical
    return None


# --- the global objects file -----------------------------------------------------------------


def merge_objects_files(
    live: ObjectsFile, source: ObjectsFile, carried: CarriedNames, values: Mapping[str, object]
) -> ObjectsFile:
    """Merge the global objects files of the state and the source, with the carried `values`.

    ValueError if they have containers of different kinds under one name.
    """
    names = carried.all
    return replace(
        live,
        tree=_merge_trees(live.tree, source.tree, names),
        values={**live.values, **values, **dict(_name_lists(live, source, names))},
        numpy=(*live.numpy, *(fqn for fqn in source.numpy if fqn in names)),
        objects=tuple(dict.fromkeys((*live.objects, *_carried_objects(source, names)))),
        has_text_keys=live.has_text_keys or source.has_text_keys,
        uncut={**{fqn: how for fqn, how in source.uncut.items() if fqn in names}, **live.uncut},
    )


def _carried_objects(source: ObjectsFile, names: Collection[str]) -> Iterator[str]:
    on_path = {above for name in names for above in names_above(name)}
    return (fqn for fqn in source.objects if fqn in on_path)


def _name_lists(
    live: ObjectsFile, source: ObjectsFile, names: Collection[str]
) -> Iterator[tuple[str, list[str]]]:
    """Yield the `params` lists of optimizer groups of which some parameters are carried over."""
    carried = {above for name in names for above in names_above(name)}
    for fqn, params in source.values.items():
        group = fqn.removesuffix(_PARAMS)
        if group == fqn or fqn in names or not isinstance(params, list):
            continue
        if group in carried and fqn not in live.values:
            yield fqn, params
        elif isinstance(live_params := live.values.get(fqn), list) and group in live.values:
            stem = state_name(group)
            more = (p for p in params if p not in live_params and child_name(stem, p) in carried)
            yield fqn, [*live_params, *more]


def _merge_trees(
    live: Sequence[Node], source: Sequence[Node], names: Collection[str]
) -> tuple[Node, ...]:
    """Merge the containers of the state with the carried ones."""
    in_state = {node.fqn for node in live}
    empty = {node.fqn for node in source if not node.keys}
    on_path = {"", *names, *(above for name in names for above in names_above(name))}
    carried: dict[str, Node] = {}
    for node in source:
        # An empty container comes with its parent.
        kept_empty = empty if node.fqn not in in_state else ()
        children = ((key, child_name(node.fqn, key)) for key in node.keys)
        keys = [key for key, fqn in children if fqn in on_path or fqn in kept_empty]
        if node.fqn in on_path and keys:
            carried[node.fqn] = Node(node.fqn, node.kind, tuple(keys))
    for node in source:
        above = carried.get(node.fqn.rpartition(".")[0])
        if node.fqn in empty - in_state and above is not None and above.fqn not in in_state:
            carried[node.fqn] = node
    nodes = [_merge_nodes(node, carried.pop(node.fqn, None)) for node in live]
    nodes += carried.values()
    for node in nodes:
        # A list without one of its items would give the next items other indices.
        if not is_mapping(node.kind) and node.keys != (*range(len(node.keys)),):
            missing = next(number for number, key in enumerate(node.keys) if number != key)
            raise ValueError(
                f"carry_over: {node.fqn} would be a {node.kind} without its item {missing}, and "
                f"the others would move. Leave it out (exclude={node.fqn!r}), or load all of it"
            )
    return tuple(nodes)


def _merge_nodes(live: Node, carried: Node | None) -> Node:
    if carried is None:
        return live
    if is_mapping(live.kind) != is_mapping(carried.kind):
        example = child_name(live.fqn, carried.keys[0])
        raise ValueError(
            f"carry_over: {live.fqn} is a {live.kind} in the state, but was saved as a "
            f"{carried.kind}: exclude its remaining names (exclude={example!r})"
        )
    live_keys = {str(key) for key in live.keys}
    more = (key for key in carried.keys if str(key) not in live_keys)
    return Node(live.fqn, live.kind, (*live.keys, *more))


# --- the files -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CarryPlan:
    """The plan of all ranks. `catalog` is that of the whole new checkpoint.

    `linked` has files of the source that the new checkpoint shares, by their new names. `copied`
    plans the tensors that are read and written again; None without such tensors.
    """

    catalog: Catalog
    names: CarriedNames
    linked: Mapping[str, ShardFileRecord]
    copied: SavePlan | None


def plan_carried(live: Catalog, source: Index, names: CarriedNames) -> CarryPlan:
    """Plan a save of a state with the catalog `live`, with names that are carried over.

    ValueError for per-rank values of another mesh.
    """
    saved = source.catalog
    _check_mesh(live, saved, names)
    numbers: list[int] = []
    if saved.world_size == live.world_size:  # components whose tensors are all carried over
        tensors = saved.tensors.items()
        cut = {record.component for fqn, record in tensors if names.tensors.get(fqn) != fqn}
        numbers = sorted({record.component for _, record in tensors} - cut)
    components = _assign_free_stems(live.components, [saved.components[n] for n in numbers])
    component_of = dict(zip(numbers, components, strict=True))
    linked = _build_linked_catalog(saved, names, component_of)
    copied = _plan_copied(live, saved, names, linked.tensors)
    if copied is not None:
        stems = _assign_free_stems((*live.components, *components), copied.catalog.components)
        copied = replace(copied, catalog=replace(copied.catalog, components=stems))
    files = {
        filenames.shard_file(component_of[file.component].stem, file.rank): file
        for file in source.files
        if file.component in component_of
    }
    parts = [linked, *([copied.catalog] if copied else [])]
    return CarryPlan(_join_catalogs(live, saved, names, parts), names, files, copied)


def _check_mesh(live: Catalog, source: Catalog, names: CarriedNames) -> None:
    """Raise ValueError if a carried per-rank value was saved under another mesh of ranks."""
    now = [axis for axis in live.mesh if axis[1] > 1]
    then = [axis for axis in source.mesh if axis[1] > 1]
    of_ranks = [
        fqn for fqn in names.per_rank if any(type(k) is int for k, _ in source.per_rank[fqn])
    ]
    if of_ranks and live.world_size == source.world_size and now and then and now != then:
        raise ValueError(
            f"carry_over: {listed(of_ranks)} belongs to the ranks of the mesh {then}, but the mesh "
            f"of this save is {now}: exclude the name (exclude={of_ranks[0]!r})"
        )


def _assign_free_stems(
    used: Iterable[Component], components: Iterable[Component]
) -> tuple[Component, ...]:
    """Return the components; a component gets a new stem if its stem is used already."""
    stems = {component.stem for component in used}
    renamed = []
    for component in components:
        candidates = chain([component.stem], (f"k{number:02d}" for number in count()))
        stem = next(stem for stem in candidates if stem not in stems)
        stems.add(stem)
        renamed.append(Component(component.name, stem))
    return tuple(renamed)


def _build_linked_catalog(
    source: Catalog, names: CarriedNames, components: Mapping[int, Component]
) -> Catalog:
    """Return the catalog of carried tensors in these components of the source, by their numbers."""
    tensors = {
        fqn: source.tensors[fqn]
        for fqn in names.tensors
        if fqn in source.tensors and source.tensors[fqn].component in components
    }
    layouts = sorted({record.layout for record in tensors.values()})
    new_component = {old: new for new, old in enumerate(components)}
    new_layout = {old: new for new, old in enumerate(layouts)}
    return replace(
        source,
        components=tuple(components.values()),
        layouts=tuple(source.layouts[number] for number in layouts),
        tensors={
            fqn: replace(
                record, component=new_component[record.component], layout=new_layout[record.layout]
            )
            for fqn, record in tensors.items()
        },
        parameters={fqn: value for fqn, value in source.parameters.items() if fqn in tensors},
        fused={fqn: of for fqn, of in source.fused.items() if fqn in tensors},
    )


def _plan_copied(
    live: Catalog, source: Catalog, names: CarriedNames, linked: Collection[str]
) -> SavePlan | None:
    """Plan the tensors that are not linked, as in a reshard for the ranks of the save."""
    copied = {fqn: data for fqn, data in names.tensors.items() if fqn not in linked}
    if not copied:
        return None
    parameters = source.parameters
    catalog = replace(
        source,
        tensors={fqn: source.tensors[data] for fqn, data in copied.items()},
        aliases={},
        values={},
        per_rank={},
        parameters={fqn: parameters[data] for fqn, data in copied.items() if data in parameters},
        fused={fqn: source.fused[data] for fqn, data in copied.items() if data in source.fused},
    )
    return plan_reshard(catalog, ShardingConfig.even(live.world_size), (), ())


def _join_catalogs(
    live: Catalog, source: Catalog, names: CarriedNames, parts: Iterable[Catalog]
) -> Catalog:
    """Join the catalogs of the state and of the carried tensors, and add the carried values."""
    components, layouts, tensors = [*live.components], [*live.layouts], {**live.tensors}
    parameters, fused = {**live.parameters}, {**live.fused}
    for part in parts:
        moved: dict[int, TensorRecord] = {}  # equal tensors share their record
        for fqn, record in part.tensors.items():
            if id(record) not in moved:
                moved[id(record)] = replace(
                    record,
                    component=record.component + len(components),
                    layout=record.layout + len(layouts),
                )
            tensors[fqn] = moved[id(record)]
        components += part.components
        layouts += part.layouts
        parameters.update(part.parameters)
        fused.update(part.fused)
    per_rank = {fqn: source.per_rank[fqn] for fqn in names.per_rank}
    if source.world_size != live.world_size:  # the ranks store the keys in turn
        per_rank = {
            fqn: tuple((key, number % live.world_size) for number, (key, _) in enumerate(keys))
            for fqn, keys in per_rank.items()
        }
    return replace(
        live,
        mesh=live.mesh or (source.mesh if live.world_size == source.world_size else ()),
        components=tuple(components),
        layouts=tuple(layouts),
        tensors=tensors,
        aliases={**live.aliases, **names.aliases},
        values={**live.values, **dict.fromkeys(names.values, 0)},
        per_rank={**live.per_rank, **per_rank},
        parameters={fqn: parameters[fqn] for fqn in tensors if fqn in parameters},
        fused=fused,
        versions=join_versions(live.versions, source.versions, live.names, names.all),
        replicas={**_select_rules(source, names), **live.replicas},
    )


def _select_rules(source: Catalog, names: CarriedNames) -> dict[str, str]:
    return {fqn: rule for fqn, rule in source.replicas.items() if fqn in names.all}
