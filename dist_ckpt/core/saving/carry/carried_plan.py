"""How what is carried on is stored: the catalog of it and the state, and who links or copies. Pure.

A component of the source of which all is carried keeps its files, one a rank, if as many ranks save
as then. All other tensors are cut and stored anew, as a reshard does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count

from dist_ckpt.core.format import filenames
from dist_ckpt.core.format.index.index import (
    Catalog,
    Component,
    Index,
    Key,
    ShardFileRecord,
    TensorRecord,
)
from dist_ckpt.core.planning.plan import SavePlan
from dist_ckpt.core.planning.sharded_views import plan_stored
from dist_ckpt.core.planning.sharding_config import ShardingConfig
from dist_ckpt.core.saving.carry.carried_names import CarriedNames
from dist_ckpt.errors import listed


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
