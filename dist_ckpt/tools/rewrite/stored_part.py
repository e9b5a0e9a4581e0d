"""A part of what a checkpoint holds, by names: its catalog and its global objects file. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from dist_ckpt.core.format.index.index import Catalog, Node
from dist_ckpt.core.format.objects.objects_file import ObjectsFile
from dist_ckpt.core.planning.selection import Selection, names_above
from dist_ckpt.core.saving.carry.carried_names import (
    carried_names,
    names_of,
    whole_or_name,
    with_carried,
)
from dist_ckpt.core.state.tree.containers import is_mapping, join
from dist_ckpt.errors import listed


def select_part(
    catalog: Catalog, main: ObjectsFile, selection: Selection
) -> tuple[Catalog, ObjectsFile]:
    """Return what a selection leaves of a catalog, and of the objects file with all its values.

    ValueError for a pattern that matches nothing, if nothing is left, for a tied tensor without the
    one that has its data, and where a list would lose an item.
    """
    names = names_of(catalog)
    if problems := selection.unmatched(names):
        raise ValueError(listed(problems, "; "))
    chosen = {name for name in names if whole_or_name(name, catalog) in selection}
    if not chosen:
        raise ValueError(f"{selection} leaves nothing: give other patterns")
    _check_lists(main.tree, {above for name in chosen for above in names_above(name)})
    # Carried on into a checkpoint that holds nothing.
    nothing = replace(catalog, tensors={}, aliases={}, values={}, per_rank={}, parameters={})
    part = carried_names(catalog, chosen, nothing, ())
    if tied := [f"{name} (of {data})" for name, data in part.tensors.items() if name != data]:
        raise ValueError(
            f"tied tensors would lose their data: {listed(tied)}: leave both in or out"
        )
    values = {fqn: main.values[fqn] for fqn in part.values}
    root = next(node for node in main.tree if not node.fqn)
    left = with_carried(ObjectsFile((Node("", root.kind, ()),)), main, part, values)
    return (
        replace(
            catalog,
            tensors={fqn: catalog.tensors[fqn] for fqn in part.tensors},
            aliases=part.aliases,
            values={fqn: catalog.values[fqn] for fqn in part.values},
            per_rank={fqn: catalog.per_rank[fqn] for fqn in part.per_rank},
            parameters={f: is_on for f, is_on in catalog.parameters.items() if f in part.tensors},
        ),
        replace(left, metadata=main.metadata),
    )


def _check_lists(tree: Iterable[Node], left: Collection[str]) -> None:
    """Raise ValueError for a list of which only some items are among the names that are left."""
    for node in tree:
        lost = [key for key in node.keys if join(node.fqn, key) not in left]
        if not is_mapping(node.kind) and 0 < len(lost) < len(node.keys):
            raise ValueError(
                f"{join(node.fqn, lost[0])}: an item of a {node.kind} cannot be left out, as the "
                f"others would move: leave all of {node.fqn!r} out"
            )
