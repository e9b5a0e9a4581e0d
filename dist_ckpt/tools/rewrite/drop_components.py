"""A checkpoint's catalog without some of its components: what is left, and in which files."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from dist_ckpt.core.format.index.index import Catalog, Index, Node, ShardFileRecord
from dist_ckpt.errors import listed


@dataclass(frozen=True, slots=True)
class ReducedCheckpoint:
    """What is left of an index: its catalog, and its shard files, which keep their names."""

    catalog: Catalog
    files: tuple[ShardFileRecord, ...]


def drop_from_index(
    index: Index, names: Collection[str], keys: Collection[str]
) -> ReducedCheckpoint:
    """Return what is left without these top-level keys of the state; `keys` are those of all. Pure.

    ValueError for a name that is none, for tensors that share files with others that stay, and for
    a tied tensor that stays while its data would go.
    """
    catalog = index.catalog
    if unknown := [name for name in names if name not in keys]:
        raise ValueError(
            f"{listed(unknown)}: no such component is here; there are {listed(list(keys))}"
        )
    if not set(keys) - set(names):
        raise ValueError(
            f"{listed(sorted(names))} are all that is here, and nothing would be left: delete the "
            f"checkpoint instead (dc.delete, on the command line `dist-ckpt rm`)"
        )
    dropped = {fqn for fqn in catalog.tensors if owner_of(fqn, keys) in names}
    numbers = {catalog.tensors[fqn].component for fqn in dropped}
    _check_files(catalog, dropped, numbers, names)
    aliases = {f: to for f, to in catalog.aliases.items() if owner_of(f, keys) not in names}
    if tied := sorted(fqn for fqn, to in aliases.items() if to in dropped):
        raise ValueError(
            f"{listed(tied)} would lose their data, which is stored as "
            f"{listed(sorted({aliases[fqn] for fqn in tied}))}: strip both, or neither"
        )
    return _without(index, dropped, numbers, aliases, names, keys)


def _check_files(
    catalog: Catalog, dropped: Collection[str], numbers: Collection[int], names: Collection[str]
) -> None:
    """Raise ValueError if a tensor that stays is in a file that goes."""
    for fqn, record in catalog.tensors.items():
        if record.component in numbers and fqn not in dropped:
            raise ValueError(
                f"{fqn} is stored in the same files as tensors of {listed(sorted(names))}, as all "
                f"are of a state with many top-level keys: load what you want of it and save that"
            )


def _without(
    index: Index,
    dropped: Collection[str],
    numbers: Collection[int],
    aliases: Mapping[str, str],
    names: Collection[str],
    keys: Collection[str],
) -> ReducedCheckpoint:
    catalog = index.catalog
    kept = {fqn: one for fqn, one in catalog.tensors.items() if fqn not in dropped}
    components = [n for n in range(len(catalog.components)) if n not in numbers]
    layouts = sorted({record.layout for record in kept.values()})
    new_component = {old: new for new, old in enumerate(components)}
    new_layout = {old: new for new, old in enumerate(layouts)}
    stripped = replace(
        catalog,
        components=tuple(catalog.components[n] for n in components),
        layouts=tuple(catalog.layouts[n] for n in layouts),
        tensors={
            fqn: replace(one, component=new_component[one.component], layout=new_layout[one.layout])
            for fqn, one in kept.items()
        },
        aliases=aliases,
        values={f: rank for f, rank in catalog.values.items() if owner_of(f, keys) not in names},
        per_rank={f: ks for f, ks in catalog.per_rank.items() if owner_of(f, keys) not in names},
        parameters={f: trained for f, trained in catalog.parameters.items() if f in kept},
    )
    files = tuple(
        replace(file, component=new_component[file.component])
        for file in index.files
        if file.component not in numbers
    )
    return ReducedCheckpoint(stripped, files)


def drop_from_tree(
    tree: Iterable[Node], names: Collection[str], keys: Collection[str]
) -> list[Node]:
    """Return the containers without those of some top-level keys, and the root without the keys."""
    kept = [node for node in tree if owner_of(node.fqn, keys) not in names]
    return [node if node.fqn else _root_without(node, names) for node in kept]


def _root_without(root: Node, names: Collection[str]) -> Node:
    return Node(root.fqn, root.kind, tuple(key for key in root.keys if str(key) not in names))


def top_level_keys(tree: Iterable[Node]) -> dict[str, None]:
    """Return the top-level keys of a state, in order."""
    return {str(key): None for node in tree if not node.fqn for key in node.keys}


def owner_of(fqn: str, keys: Collection[str]) -> str | None:
    """Return the top-level key that a name lies under: of several that fit, the longest."""
    while fqn not in keys:
        if "." not in fqn:
            return None
        fqn = fqn.rpartition(".")[0]
    return fqn
