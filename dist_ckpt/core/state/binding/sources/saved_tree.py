"""What a checkpoint holds, under the names by which the state asks for it. Pure."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from dist_ckpt.core.format.index.index import Catalog, Key, Node, TensorRecord
from dist_ckpt.core.format.objects.objects_file import ObjectsFile
from dist_ckpt.core.planning.selection import names_above
from dist_ckpt.core.state.binding.sources.rename import rename_of
from dist_ckpt.core.state.binding.sources.scopes import SourceCatalog, untagged
from dist_ckpt.core.state.tree.containers import (
    MAX_DEPTH,
    RECORD,
    PathKey,
    check_kind,
    is_mapping,
    join,
)
from dist_ckpt.errors import CorruptError

_PARAMS = ".params"
_GROUPS = ".param_groups."
_GROUP = re.compile(r"(?:.*\.)?param_groups\.[0-9]+", re.DOTALL)


@dataclass(frozen=True, slots=True)
class SavedTree:
    """A checkpoint seen through a rename; or several, as `merged` sees them as one.

    `leaves` are all names: of tensors, of values, of per-rank values. Each maps to the name that
    the catalog knows it by. `kinds` and `entries` are the containers: the class, and in order the
    key and the name of each child; a leaf that the rename has moved away from its container is a
    child of the nearest one above, under what is left of its name. `params` are the parameters'
    names of an optimizer's groups, by the name of the group. `main` are the plain values of rank
    0's objects file, by the catalog's names; `read(rank)` returns what a rank alone has stored.
    `dropped` are the saved names that the rename leaves out.

    Of several checkpoints `origins` are these, and the catalog, which is of all, has names that are
    `tagged`. `unmatched` is what no source has and a user asks for, in words; `left_out` are the
    names that the sources' selections leave out. `stepless` are the names of the state of
    parameters that a source gives, which may have been saved without any.
    """

    catalog: Catalog
    leaves: Mapping[str, str]
    kinds: Mapping[str, str]
    entries: Mapping[str, Sequence[tuple[PathKey, str]]]
    params: Mapping[str, Sequence[str]]
    numpy: frozenset[str]
    main: Mapping[str, object]
    read: Callable[[int], ObjectsFile]
    dropped: tuple[str, ...]
    problems: tuple[str, ...]
    order: Sequence[str] = field(default=())
    origins: Sequence[SourceCatalog] = ()
    unmatched: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    stepless: frozenset[str] = frozenset()

    def number_of(self, name: str) -> int:
        """Return the number of the checkpoint that a name, or the first one below it, is of."""
        if not self.origins:
            return 0
        own = (self.leaves[above] for above in names_above(name) if above in self.leaves)
        fqn = next(own, None) or next((self.leaves[leaf] for leaf in self.below(name)), None)
        return 0 if fqn is None else untagged(fqn)[0]

    def where(self, name: str) -> str:
        """Word which of several checkpoints a name is of; "" if there is one."""
        return f" in {self.origins[self.number_of(name)].path}" if self.origins else ""

    def catalog_of(self, name: str) -> Catalog:
        """Return the catalog of the checkpoint that a name is of."""
        return self.origins[self.number_of(name)].catalog if self.origins else self.catalog

    def says_stepless(self, name: str) -> bool:
        """Say whether a parameter's state that is not there was not there at the save either."""
        return not self.origins or name in self.stepless

    def tensor(self, name: str) -> tuple[str, TensorRecord] | None:
        """Return a tensor's fqn in the index, and its record; None if the name is no tensor."""
        fqn = self.leaves.get(name)
        if fqn is None:
            return None
        fqn = self.catalog.aliases.get(fqn, fqn)
        record = self.catalog.tensors.get(fqn)
        return None if record is None else (fqn, record)

    def is_as_saved(self) -> bool:
        """Say whether all names are those of the catalog: no rename has touched them."""
        return not self.dropped and all(name == fqn for name, fqn in self.leaves.items())

    def is_wrapper_subclass(self, name: str) -> bool:
        """Say whether the name is that of a tensor which is made of others."""
        return join(name, RECORD) in self.leaves

    def kind_of(self, name: str) -> str | None:
        """Say in words what was saved under a name; None if nothing was."""
        if self.tensor(name) is not None:
            return "a tensor"
        if self.keys_of(name) is not None:
            return "a per-rank value"
        if self.is_value(name):
            return "a value without tensors"
        if self.is_wrapper_subclass(name):
            saved = self.main.get(self.leaves[join(name, RECORD)])
            what = saved.get("class") if isinstance(saved, Mapping) else None
            return f"the parts of a {what or 'tensor of a class of its own'}"
        return "a container with tensors" if self.holds(name) else None

    def is_of_mesh(self, name: str, mesh: Sequence[tuple[str, int]], world_size: int) -> bool:
        """Say whether a rank means what it meant when a name was saved, as far as is known."""
        catalog = self.catalog_of(name)
        if catalog.world_size != world_size:
            return False
        saved = [axis for axis in catalog.mesh if axis[1] > 1]
        now = [axis for axis in mesh if axis[1] > 1]
        if not saved or not now:
            return True
        if [size for _, size in saved] != [size for _, size in now]:
            return False
        return all(a == b or not (a and b) for (a, _), (b, _) in zip(saved, now, strict=True))

    def is_value(self, name: str) -> bool:
        """Say whether the name is a value that is no tensor and nobody's alone."""
        return self.leaves.get(name) in self.catalog.values

    def keys_of(self, name: str) -> tuple[tuple[Key, int], ...] | None:
        """Return the keys of a per-rank value and the ranks that stored them, or None."""
        return self.catalog.per_rank.get(self.leaves.get(name, ""))

    def value(self, name: str) -> object:
        """Return what `is_value`. Raises CorruptError if no file has it, and what `read` raises."""
        fqn = self.leaves[name]
        values = self.main if fqn in self.main else self.read(self.catalog.values[fqn]).values
        if fqn not in values:
            raise CorruptError(f"{name}: no objects file has it: load an older checkpoint")
        value = values[fqn]
        if name in self.params and isinstance(value, dict):
            return {**value, "params": list(self.params[name])}
        return value

    def per_rank(self, name: str, keys: Collection[Key]) -> dict[Key, object]:
        """Return what a per-rank value is for some of its keys; raises what `value` raises."""
        fqn = self.leaves[name]
        found: dict[Key, object] = {}
        for key, rank in self.catalog.per_rank[fqn]:
            if key in keys:
                values = self.read(rank).per_rank.get(fqn, {})
                if key not in values:
                    raise CorruptError(
                        f"{name}: no objects file has it for {key!r}: load an older checkpoint"
                    )
                found[key] = values[key]
        return found

    def below(self, name: str) -> Iterator[str]:
        """Yield the leaves below a name, sorted."""
        prefix = f"{name}." if name else ""
        for number in range(bisect_left(self.order, prefix), len(self.order)):
            if not self.order[number].startswith(prefix):
                return
            yield self.order[number]

    def holds(self, name: str) -> bool:
        """Say whether there is a leaf or a container of this name, or a leaf below it."""
        return name in self.leaves or name in self.kinds or next(self.below(name), None) is not None

    def children(self, name: str) -> Sequence[tuple[PathKey, str]]:
        """Return the key and the name of each child of what is saved under a name.

        Where nothing was saved under it, the names below it are its keys: what has a value of its
        own is no container of names that only begin alike, such as `lr` beside `lr.max`.
        """
        if name in self.kinds:
            return self.entries[name]
        if name in self.leaves:
            return ()
        tops = dict.fromkeys(self._top(leaf, name) for leaf in self.below(name))
        return tuple((top[len(name) + 1 :] if name else top, top) for top in tops)

    def _top(self, leaf: str, name: str) -> str:
        """Return the highest container of a leaf that still is below `name`."""
        cut = len(name) + 1 if name else 0
        while (cut := leaf.find(".", cut)) >= 0:
            if leaf[:cut] in self.kinds:
                return leaf[:cut]
            cut += 1
        return leaf


def mesh_text(mesh: Sequence[tuple[str, int]]) -> str:
    """Word a mesh, for messages."""
    return " x ".join(f"{name} {size}".strip() for name, size in mesh) or "unknown"


def saved_tree_of(
    catalog: Catalog,
    main: ObjectsFile,
    read: Callable[[int], ObjectsFile],
    *,
    rename: Mapping[str, str | None] | None = None,
) -> SavedTree:
    """Return what a checkpoint holds; `main` is its `objects.msgpack`, `read(rank)` gets another's.

    Raises TypeError or ValueError for a rename that makes no sense in itself; one that does not
    fit the checkpoint is in `problems`. CorruptError or IncompatibleError for a tree that no
    state has made.
    """
    rules = rename_of(rename)
    names = (*catalog.tensors, *catalog.aliases, *catalog.values, *catalog.per_rank)
    groups = _groups(catalog, main)
    both = {node.fqn for node in main.tree}.intersection(names)
    if both:
        raise CorruptError(
            f"{min(both)[:100]}: saved as a container and as a tensor or value: load an older "
            "checkpoint"
        )
    # The parameters that have no state yet are named in the groups only.
    stems = ((state_of(group), params) for group, params in groups.items())
    states = {join(stem, p): (stem, p) for stem, params in stems for p in params}
    # A name that no saved tensor has is one of before, or of torch's helpers, within its module.
    known = {*catalog.tensors, *catalog.aliases, *catalog.values} if rename else set()
    own = {n: of for n, of in states.items() if of[1] in known or join(of[1], RECORD) in known}
    renamed, problems = rules.of_all(dict.fromkeys((*names, *states)), own)
    if problems:
        renamed = dict(zip(names, names, strict=True))
    leaves = {new: name for name in names if (new := renamed[name]) is not None}
    params = dict(_renamed_groups(groups, renamed))
    kinds, entries = _containers(main.tree, renamed, leaves, params)
    _check_tree(kinds, entries)
    problems += tuple(
        f"rename: {name!r} would be a container and {leaves[name]!r}: change the rules, or drop "
        "one of the two with None"
        for name in kinds
        if name in leaves and name not in params
    )
    numpy = set(main.numpy)
    return SavedTree(
        catalog=catalog,
        leaves=leaves,
        kinds=kinds,
        entries=entries,
        params=params,
        numpy=frozenset(new for new, name in leaves.items() if name in numpy),
        main=main.values,
        read=cache(read),
        dropped=tuple(name for name in names if renamed[name] is None),
        problems=problems,
        order=sorted(leaves),
    )


def _groups(catalog: Catalog, main: ObjectsFile) -> dict[str, Sequence[str]]:
    """Return the parameters' names of each optimizer group: name lists beside the group's value."""
    groups: dict[str, Sequence[str]] = {}
    for name, value in main.values.items():
        group = name.removesuffix(_PARAMS)
        if group == name or group not in catalog.values or not isinstance(value, list):
            continue
        if not isinstance(main.values.get(group, {}), dict) or not _GROUP.fullmatch(group):
            continue  # a value of the user's beside another one
        if all(isinstance(param, str) for param in value):  # else it is a value of the user's
            groups[group] = value
    return groups


def state_of(group: str) -> str:
    """Return the name under which the state of a group's parameters is: `optim.state`."""
    return f"{group[: group.rindex(_GROUPS)]}.state" if _GROUPS in group else group


def _renamed_groups(
    groups: Mapping[str, Sequence[str]], renamed: Mapping[str, str | None]
) -> Iterator[tuple[str, Sequence[str]]]:
    for group, params in groups.items():
        new_group = renamed[group]
        if new_group is None:
            continue
        before, after = f"{state_of(group)}.", f"{state_of(new_group)}."
        new = (renamed.get(before + p, before + p) for p in params)
        yield new_group, [p.removeprefix(after) for p in new if p is not None]


# --- containers ------------------------------------------------------------------------------


def _containers(
    tree: Iterable[Node],
    renamed: Mapping[str, str | None],
    leaves: Iterable[str],
    groups: Iterable[str],
) -> tuple[dict[str, str], dict[str, Sequence[tuple[PathKey, str]]]]:
    """Return the kind and the entries of each container, by its name in the state."""
    nodes = {node.fqn: node for node in tree}
    moved: dict[str, str] = {}
    for fqn in sorted(nodes, key=len, reverse=True):
        moved[fqn] = _moved(nodes[fqn], renamed, moved)
    kinds: dict[str, str] = {}
    entries: dict[str, list[tuple[PathKey, str]]] = {}
    fitted: set[str] = set()
    for fqn, node in nodes.items():
        new = moved[fqn]
        kept = [
            (key, child)
            for key, child in _children(node, renamed, moved)
            if child == join(new, key)
        ]
        if not node.keys or kept or not fqn:
            if kinds.setdefault(new, node.kind) != node.kind:
                kinds[new] = "dict"  # a rename has put two containers into one
            entries.setdefault(new, []).extend(kept)
            fitted.update(child for _, child in kept)
    for group in groups:
        # A group's value is a dict; hyperparameters that are tensors belong in it.
        kinds.setdefault(group, "dict")
        entries.setdefault(group, [])
    for name in dict.fromkeys((*leaves, *kinds)):
        if name and name not in fitted:
            _adopt(name, kinds, entries)
    return kinds, dict(entries)


def _check_tree(
    kinds: Mapping[str, str], entries: Mapping[str, Sequence[tuple[PathKey, str]]]
) -> None:
    """Raise an error for a tree that no state has made."""
    if not is_mapping(kinds.get("", "dict")):
        raise CorruptError("the state was saved as no mapping: load an older checkpoint")
    depths: dict[str, int] = {}
    for name in sorted(kinds, key=len):
        check_kind(kinds[name])
        if not is_mapping(kinds[name]) and any(type(key) is str for key, _ in entries[name]):
            raise CorruptError(
                f"{name[:100]}: saved as a {kinds[name]} with keys: load an older checkpoint"
            )
        depth = depths.get(name, 0) + 1
        if depth > MAX_DEPTH:
            raise CorruptError(
                f"{name[:100]}: nested deeper than {MAX_DEPTH}: load an older checkpoint"
            )
        for _, child in entries[name]:
            depths[child] = max(depth, depths.get(child, 0))


def _children(
    node: Node, renamed: Mapping[str, str | None], moved: Mapping[str, str]
) -> Iterator[tuple[PathKey, str]]:
    """Yield each key of a container and where its child is now; not what is dropped."""
    for key in node.keys:
        child = join(node.fqn, key)
        # No key is empty in what we write; one would make a container its own child.
        new = moved[child] if child in moved else renamed.get(child)
        if new is not None and key != "":
            yield key, new


def _moved(node: Node, renamed: Mapping[str, str | None], moved: Mapping[str, str]) -> str:
    """Return where a container is now: where all its children have gone, else where it was."""
    above = set()
    for key, child in _children(node, renamed, moved):
        if child != str(key) and not child.endswith(f".{key}"):
            return node.fqn
        above.add(child[: -len(str(key)) - 1])
    return above.pop() if len(above) == 1 and node.fqn else node.fqn


def _adopt(
    name: str, kinds: Mapping[str, str], entries: Mapping[str, list[tuple[PathKey, str]]]
) -> None:
    """Make a leaf or container that lost its own a child of the nearest mapping above it."""
    above = name
    while above:
        above = above.rpartition(".")[0]
        if above in kinds and is_mapping(kinds[above]):
            entries[above].append((name[len(above) + 1 :] if above else name, name))
            return
