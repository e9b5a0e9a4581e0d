"""Merge the inventories of all ranks.

Ranks with equal inventories share a body: the inventory, and the ranks that sent it. Bodies are in
the order of their lowest ranks, so the lowest rank with a tensor decides its position.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count

from msgspec import structs

from dist_ckpt.core.format.filenames import is_stem
from dist_ckpt.core.format.index.index import Component, Key, Node, TensorRecord
from dist_ckpt.core.planning.plan import Inventory, NameList
from dist_ckpt.core.planning.save.layouts import difference_text
from dist_ckpt.errors import ranks_text

# With more components, all tensors are stored as one.
MAX_COMPONENTS = 16
ONLY_COMPONENT = "state"


@dataclass(frozen=True, slots=True)
class InventoryBody:
    """An inventory, and the ranks, ascending, that sent it."""

    inventory: Inventory
    ranks: tuple[int, ...]


def sort_inventories(
    inventories: Iterable[tuple[Inventory, tuple[int, ...]]], world_size: int
) -> list[InventoryBody]:
    """Return the bodies in order. Every rank must have sent exactly one inventory."""
    bodies = [InventoryBody(inventory, tuple(sorted(ranks))) for inventory, ranks in inventories]
    bodies.sort(key=lambda body: body.ranks)
    sent = sorted(rank for body in bodies for rank in body.ranks)
    if sent != list(range(world_size)):
        raise ValueError(f"inventories of {ranks_text(sent)} for a world of {world_size}")
    return bodies


def merge_aliases(bodies: Sequence[InventoryBody]) -> tuple[list[InventoryBody], dict[str, str]]:
    """Return the bodies without aliases that differ between ranks, and the common aliases.

    An alias that is not common becomes a tensor.
    """
    tensors = {entry.fqn for body in bodies for entry in body.inventory.tensors}
    tied: dict[str, set[str]] = {}
    for body in bodies:
        for fqn, canonical in body.inventory.aliases:
            tied.setdefault(fqn, set()).add(canonical)
    common = {
        fqn: next(iter(targets))
        for fqn, targets in tied.items()
        if len(targets) == 1 and fqn not in tensors
    }
    if len(common) == len(tied):
        return list(bodies), common
    with_untied = []
    for body in bodies:
        entries = {entry.fqn: entry for entry in body.inventory.tensors}
        untied = (
            structs.replace(entries[canonical], fqn=fqn)
            for fqn, canonical in body.inventory.aliases
            if fqn not in common
        )
        tensors_here = (*body.inventory.tensors, *untied)
        inventory = structs.replace(body.inventory, tensors=tensors_here)
        with_untied.append(InventoryBody(inventory, body.ranks))
    return with_untied, common


def find_kind_problems(bodies: Sequence[InventoryBody]) -> list[str]:
    """Return a problem for each name that has different kinds on different ranks."""
    kinds: dict[str, str] = {}
    mixed: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for body in bodies:
        for kind, names in _names_by_kind(body.inventory).items():
            for fqn in names:
                if kinds.setdefault(fqn, kind) != kind:
                    mixed[fqn] = []
    for body in bodies if mixed else ():
        for kind, names in _names_by_kind(body.inventory).items():
            for fqn in mixed.keys() & set(names):
                mixed[fqn].append((kind, body.ranks))
    return [f"{fqn or 'the state'}: {difference_text(sorted(mixed[fqn]))}" for fqn in sorted(mixed)]


def _names_by_kind(inventory: Inventory) -> dict[str, list[str]]:
    tensors = [entry.fqn for entry in inventory.tensors]
    return {
        "a tensor": tensors + [fqn for fqn, _ in inventory.aliases],
        "a container of tensors": [node.fqn for node in inventory.tree],
        "a value": list(inventory.values),
        "a value per rank": [fqn for fqn, _ in inventory.per_rank],
        "a list of names": [names.fqn for names in inventory.name_lists],
    }


def find_value_holders(bodies: Sequence[InventoryBody]) -> dict[str, tuple[int, ...]]:
    """Return the ranks, ascending, that have each value."""
    bodies_by_value: dict[str, list[InventoryBody]] = {}
    for body in bodies:
        for fqn in body.inventory.values:
            bodies_by_value.setdefault(fqn, []).append(body)
    # One tuple for each set of bodies: they may have many values.
    ranks_by_bodies: dict[tuple[int, ...], tuple[int, ...]] = {}
    value_ranks = {}
    for fqn, value_bodies in bodies_by_value.items():
        key = tuple(body.ranks[0] for body in value_bodies)
        if key not in ranks_by_bodies:
            ranks_by_bodies[key] = tuple(
                sorted(rank for body in value_bodies for rank in body.ranks)
            )
        value_ranks[fqn] = ranks_by_bodies[key]
    return value_ranks


def find_key_holders(
    bodies: Sequence[InventoryBody],
) -> dict[str, tuple[tuple[Key, tuple[int, ...]], ...]]:
    """Return the keys of each per-rank value, and the ranks, ascending, that have each key."""
    holders: dict[str, dict[Key, list[int]]] = {}
    for body in bodies:
        for fqn, key in body.inventory.per_rank:
            keys = holders.setdefault(fqn, {})
            for rank in body.ranks:
                keys.setdefault(rank if key is None else key, []).append(rank)
    return {
        fqn: tuple(
            sorted(((key, tuple(sorted(ranks))) for key, ranks in keys.items()), key=lambda k: k[1])
        )
        for fqn, keys in holders.items()
    }


def merge_trees(bodies: Sequence[InventoryBody], problems: list[str]) -> tuple[Node, ...]:
    """Return the containers of all ranks, each with the keys of all ranks. Add problems."""
    kinds: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    keys: dict[str, dict[str, str | int]] = {}
    for body in bodies:
        for node in body.inventory.tree:
            kinds.setdefault(node.fqn, []).append((node.kind, body.ranks))
            node_keys = keys.setdefault(node.fqn, {})
            for key in node.keys:
                if type(node_keys.setdefault(str(key), key)) is not type(key):
                    problems.append(
                        f"{node.fqn or 'the state'}: the key {key} is a number on some ranks and "
                        f"a text on other ranks, such as {ranks_text(body.ranks)}"
                    )
    for fqn, node_kinds in kinds.items():
        if len({kind for kind, _ in node_kinds}) > 1:
            problems.append(
                f"{fqn or 'the state'}: {difference_text(node_kinds)}: use one class of container "
                "on all ranks (a list of modules counts as one dict where no two of them share a "
                "name)"
            )
    return tuple(
        Node(fqn, kinds[fqn][0][0], tuple(node_keys.values())) for fqn, node_keys in keys.items()
    )


def merge_name_lists(bodies: Sequence[InventoryBody]) -> tuple[NameList, ...]:
    """Return the lists of names, each with the names of all ranks."""
    lists: dict[str, dict[str, None]] = {}
    for body in bodies:
        for names in body.inventory.name_lists:
            lists.setdefault(names.fqn, {}).update(dict.fromkeys(names.names))
    return tuple(NameList(fqn, tuple(names)) for fqn, names in lists.items())


def merge_parameters(bodies: Sequence[InventoryBody]) -> dict[str, bool]:
    """Return True for each parameter that any rank trains, and False for other parameters."""
    trainable: dict[str, bool] = {}
    for body in bodies:
        inventory = body.inventory
        for first, length, is_trained in inventory.parameters:
            for entry in inventory.tensors[first : first + length]:
                trainable[entry.fqn] = is_trained or trainable.get(entry.fqn, False)
        for fqn, canonical in inventory.aliases if inventory.parameters else ():
            if canonical in trainable:  # other ranks may store the alias separately
                trainable[fqn] = trainable[canonical] or trainable.get(fqn, False)
    return trainable


def merge_components(bodies: Sequence[InventoryBody]) -> tuple[Component, ...]:
    """Return the components that have tensors, in order, with the stems of their files."""
    inventories = [body.inventory for body in bodies]
    used = dict.fromkeys(i.components[entry.component] for i in inventories for entry in i.tensors)
    if len(used) > MAX_COMPONENTS:
        return (Component(ONLY_COMPONENT, ONLY_COMPONENT),)
    plain = {name for name in used if is_stem(name)}
    free = (stem for n in count() if (stem := f"c{n:02d}") not in plain)
    stems = {name: next(free) for name in sorted(used) if name not in plain}
    return tuple(Component(name, stems.get(name, name)) for name in used)


def split_off_linkable(
    components: tuple[Component, ...], records: dict[str, TensorRecord], linkable: frozenset[str]
) -> tuple[tuple[Component, ...], frozenset[int]]:
    """Move linkable tensors to separate components, and change `records` accordingly.

    Return all components, and the numbers of the linkable components.
    """
    fqns = [fqn for fqn in records if fqn in linkable]
    fully_linkable = {records[fqn].component for fqn in fqns} - {
        record.component for fqn, record in records.items() if fqn not in linkable
    }
    partly_linkable = sorted({records[fqn].component for fqn in fqns} - fully_linkable)
    new_numbers = {old: len(components) + n for n, old in enumerate(partly_linkable)}
    equal_records: dict[TensorRecord, TensorRecord] = {}
    for fqn in fqns:
        if (number := new_numbers.get(records[fqn].component)) is not None:
            record = replace(records[fqn], component=number)
            records[fqn] = equal_records.setdefault(record, record)
    used = {component.stem for component in components}
    free = (stem for n in count() if (stem := f"r{n:02d}") not in used)
    added = (Component(components[old].name, next(free)) for old in partly_linkable)
    return (*components, *added), frozenset((*fully_linkable, *new_numbers.values()))
