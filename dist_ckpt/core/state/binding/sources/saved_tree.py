"""The content of one or several checkpoints, under the names of the state. Pure."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain

from dist_ckpt.core.format.index.index import Catalog, Key, Node, TensorRecord
from dist_ckpt.core.format.objects.objects_file import ObjectsFile
from dist_ckpt.core.format.strict_json import Json
from dist_ckpt.core.planning.module_versions import decode_metadata, default_entry, modules_above
from dist_ckpt.core.planning.name_selection import Selection, names_above
from dist_ckpt.core.planning.tensor_operations import DerivedTensor
from dist_ckpt.core.state.binding.sources.derived_tensors import (
    Derivation,
    SavedStates,
    derive_tensors,
)
from dist_ckpt.core.state.binding.sources.rename import RenameRules, parse_rename, rename_modules
from dist_ckpt.core.state.tree.containers import (
    MAX_DEPTH,
    RECORD,
    PathKey,
    check_kind,
    child_name,
    is_mapping,
)
from dist_ckpt.errors import CorruptError

_SOURCE = "source "
# The start of the names of derived tensors, and the number of their layout.
_DERIVED, _NO_LAYOUT = "rename: ", -1
_PARAMS = ".params"
GROUPS_INFIX = ".param_groups."
_GROUP = re.compile(r"(?:.*\.)?param_groups\.[0-9]+", re.DOTALL)


def with_source(number: int, fqn: str) -> str:
    """Return the name of an entry with the number of its checkpoint in front."""
    return f"{_SOURCE}{number}: {fqn}"


def split_source(name: str) -> tuple[int, str]:
    """Split such a name into the number of its checkpoint and its name there."""
    number, _, fqn = name[len(_SOURCE) :].partition(": ")
    return int(number), fqn


@dataclass(frozen=True, slots=True)
class SourceCatalog:
    """One of several checkpoints of a load."""

    path: str
    catalog: Catalog


@dataclass(frozen=True, slots=True)
class Scope:
    """The saved names that a load takes from one source: the selected names at and below `key`.

    An empty `key` means all names. `path` is the source's path, for messages.
    """

    path: str
    key: str
    selection: Selection

    def contains(self, name: str) -> bool:
        """Return True if a name is at or below the key."""
        return not self.key or name == self.key or name.startswith(f"{self.key}.")

    def provides(self, name: str) -> bool:
        """Return True if a saved name is loaded from this source."""
        return self.contains(name) and name in self.selection

    def can_have(self, name: str) -> bool:
        """Return True if a name of the state, or a name below it, may come from this source."""
        return self.contains(name) or self.key.startswith(f"{name}.")


@dataclass(frozen=True, slots=True)
class Scopes:
    """The selected names of a load from several sources, in place of a `Selection`.

    The load has one `selection`, and each source has a selection in `scopes`.

    - A name is left out if `selection` leaves it out, or each source that may have it does.
    - A name that no source may have is missing.

    For example, only source A may have "model.head", and A excludes "model.head". Then this name is
    left out, not missing.
    """

    selection: Selection
    scopes: Sequence[Scope]

    def __contains__(self, name: str) -> bool:
        if name not in self.selection:
            return False
        scopes = [scope for scope in self.scopes if scope.can_have(name)]
        return not scopes or any(name in scope.selection for scope in scopes)

    def pattern_problems(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the problem of each pattern of the load itself that matches no name."""
        return self.selection.pattern_problems(names)

    def searched_paths(self, name: str) -> tuple[str, ...]:
        """Return the paths of the sources that may have a name and do not leave it out."""
        scopes = (
            scope for scope in self.scopes if scope.can_have(name) and name in scope.selection
        )
        return tuple(dict.fromkeys(scope.path for scope in scopes))


@dataclass(frozen=True, slots=True)
class SavedTree:
    """The names of a checkpoint after a rename, or of several checkpoints (`merge_sources`).

    - `leaves`: the names of tensors, values and per-rank values, with their names in the catalog.
    - `kinds`, `entries`: the class of each container, and the key and name of each child in order.
      A rename may move a leaf out of its container. Then it is a child of the nearest container
      above it, and the rest of its name is the key.
    - `params`: the parameter names of each optimizer group, by the name of the group.
    - `main`: the plain values of rank 0's objects file, by their names in the catalog.
      `read(rank)` returns the objects file of another rank.
    - `dropped`: the saved names that the rename leaves out.
    - `objects`: the names of objects whose `state_dict` was saved, sorted.
    - `uncut`: how tensors of optimizers were on the ranks, as in `ObjectsFile`.
    - `derived`: the tensors that operations of the rename make, by their names in `leaves`. They
      are made of tensors of the catalog, which does not have them.
    - `equal`: names with one value that several saved values must agree on, with their names in the
      catalog.
    - `state_problems`: the new names of optimizer state that operations cannot make, and why. They
      are errors only if the name is loaded.
    - `versions`: the listed entries of modules (`planning/module_versions.py`), by their names.
      `models` are the modules and state dicts whose versions were saved. `unversioned` are modules
      whose tensors operations make of tensors of other modules.
    - `has_text_keys`: True if DCP has made text of all keys, and "dict" of all mappings.

    Only for several checkpoints, `origins`. The catalog then has names of `with_source`:

    - `name_problems`: error texts for requested names that no source has.
    - `left_out`: the names that the sources' selections leave out.
    - `stepless`: the names of the state of parameters that may have been saved without any state.
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
    state_problems: tuple[tuple[str, str], ...] = ()
    order: Sequence[str] = field(default=())
    versions: Mapping[str, Json] = field(default_factory=dict)
    models: frozenset[str] = frozenset()
    unversioned: frozenset[str] = frozenset()
    origins: Sequence[SourceCatalog] = ()
    name_problems: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    stepless: frozenset[str] = frozenset()
    objects: Sequence[str] = ()
    uncut: Mapping[str, str] = field(default_factory=dict)
    derived: Mapping[str, DerivedTensor] = field(default_factory=dict)
    equal: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    has_text_keys: bool = False

    @property
    def derived_names(self) -> tuple[str, ...]:
        """The names of the tensors that operations make."""
        if not self.derived:
            return ()
        return tuple(name for name, fqn in self.leaves.items() if fqn in self.derived)

    def has_copies(self, name: str) -> bool:
        """Return True if each rank has saved its own copy, by the option `replicas`."""
        if not self.origins:
            replicas = self.catalog.replicas
            return bool(replicas) and replicas.get(self.leaves.get(name, "")) == "per_rank"
        if (fqn := self.leaves.get(name)) is None:
            return False
        return self.catalog_of(name).replicas.get(split_source(fqn)[1]) == "per_rank"

    def source_number(self, name: str) -> int:
        """Return the number of the checkpoint that has a name, or the first name below it."""
        if not self.origins:
            return 0
        fqns = (self.leaves[above] for above in names_above(name) if above in self.leaves)
        fqn = next(fqns, None) or next((self.leaves[leaf] for leaf in self.below(name)), None)
        return 0 if fqn is None else split_source(fqn)[0]

    def source_text(self, name: str) -> str:
        """Return a text with the checkpoint of a name, among several; "" for a single one."""
        return f" in {self.origins[self.source_number(name)].path}" if self.origins else ""

    def catalog_of(self, name: str) -> Catalog:
        """Return the catalog of the checkpoint that has a name."""
        return self.origins[self.source_number(name)].catalog if self.origins else self.catalog

    def is_stepless(self, name: str) -> bool:
        """Return True if a parameter has no saved state because it had none at the save."""
        return not self.origins or name in self.stepless

    def tensor(self, name: str) -> tuple[str, TensorRecord] | None:
        """Return a tensor's name in the index, and its record; None if it is not a tensor."""
        if (fqn := self.leaves.get(name)) is None:
            return None
        if (made := self.derived.get(fqn)) is not None:
            return fqn, TensorRecord(made.dtype, made.shape, _NO_LAYOUT, 0, 0)
        fqn = self.catalog.aliases.get(fqn, fqn)
        record = self.catalog.tensors.get(fqn)
        return None if record is None else (fqn, record)

    def first_of_tied(self, name: str) -> str | None:
        """Return the first name of the tensor that a name was tied to; None if it is the first."""
        return self.catalog.aliases.get(self.leaves.get(name, ""))

    def is_wrapper_subclass(self, name: str) -> bool:
        """Return True if the name is that of a tensor subclass."""
        return child_name(name, RECORD) in self.leaves

    def describe_kind(self, name: str) -> str | None:
        """Return a text for the kind of a saved name; None if nothing was saved."""
        if self.tensor(name) is not None:
            return "a tensor"
        if self.per_rank_keys(name) is not None:
            return "a per-rank value"
        if self.is_value(name):
            return "a value without tensors"
        if self.is_wrapper_subclass(name):
            saved = self.main.get(self.leaves[child_name(name, RECORD)])
            name_of_class = saved.get("class") if isinstance(saved, Mapping) else None
            return f"the parts of a {name_of_class or 'tensor subclass'}"
        return "a container with tensors" if self.contains(name) else None

    def is_of_mesh(self, name: str, mesh: Sequence[tuple[str, int]], world_size: int) -> bool:
        """Return True if each rank has the same place in the mesh as at the save, if known."""
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
        """Return True if the name is a value that is neither a tensor nor per-rank."""
        return self.leaves.get(name) in self.catalog.values

    def per_rank_keys(self, name: str) -> tuple[tuple[Key, int], ...] | None:
        """Return the keys of a per-rank value and the ranks that stored them, or None."""
        return self.catalog.per_rank.get(self.leaves.get(name, ""))

    def value(self, name: str) -> object:
        """Return a plain value. CorruptError if no file has it, and the errors of `read`."""
        fqn = self.leaves[name]
        values = self.main if fqn in self.main else self.read(self.catalog.values[fqn]).values
        if fqn not in values:
            raise CorruptError(f"{name}: no objects file has it: load an older checkpoint")
        value = values[fqn]
        if name in self.params and isinstance(value, dict):
            return {**value, "params": list(self.params[name])}
        return value

    def per_rank(self, name: str, keys: Collection[Key]) -> dict[Key, object]:
        """Return a per-rank value for some of its keys; raises the errors of `value`."""
        fqn = self.leaves[name]
        result: dict[Key, object] = {}
        for key, rank in self.catalog.per_rank[fqn]:
            if key in keys:
                values = self.read(rank).per_rank.get(fqn, {})
                if key not in values:
                    raise CorruptError(
                        f"{name}: no objects file has it for {key!r}: load an older checkpoint"
                    )
                result[key] = values[key]
        return result

    def module_metadata(self, name: str) -> dict[str, Json] | None:
        """Return torch's metadata of a saved module, {} if it had none; None if it is unknown.

        It is unknown in checkpoints from before 2026-12, in those that DCP has written, and if
        operations make the module.
        """
        if self.catalog_of(name).versions is None:
            return None
        if name in self.versions:
            return decode_metadata(self.versions[name])
        if name in self.unversioned:
            return None
        is_module = not self.models.isdisjoint((*names_above(name), ""))
        return decode_metadata(default_entry(has_names=is_module and self.contains(name)))

    def model_metadata(self, model: str) -> dict[str, dict[str, Json]]:
        """Return torch's metadata of all saved modules of a model, by their paths in it."""
        start = len(model) + 1 if model else 0
        names = [name[start:] for name in self.below(model)]
        listed = [n[start:] for n in self.versions if not model or n.startswith(f"{model}.")]
        metadata: dict[str, dict[str, Json]] = {}
        for path in sorted({"", *modules_above(names), *listed}):
            full = child_name(model, path) if path else model
            # Skip the containers inside of a model, such as an extra state.
            if (of := self.module_metadata(full)) and not (path and full in self.kinds):
                metadata[path] = of
        return metadata

    def below(self, name: str) -> Sequence[str]:
        """Return the leaves below a name, sorted."""
        return _names_below(name, self.order)

    def leaves_at(self, name: str) -> Sequence[str]:
        """Return the leaves at and below a name."""
        return (name, *self.below(name)) if name in self.leaves else self.below(name)

    def objects_below(self, name: str) -> Sequence[str]:
        """Return the objects below a name, sorted."""
        return _names_below(name, self.objects)

    def contains(self, name: str) -> bool:
        """Return True if a leaf or a container has this name, or a leaf is below it."""
        return name in self.leaves or name in self.kinds or bool(self.below(name))

    def children(self, name: str) -> Sequence[tuple[PathKey, str]]:
        """Return the key and the name of each child of a saved name.

        For a name that is not a saved container, the children are the names below it. A leaf has
        no children: `lr` is not the container of `lr.max`.
        """
        if name in self.kinds:
            return self.entries[name]
        if name in self.leaves:
            return ()
        tops: dict[str, None] = {}
        for leaf in self.below(name):
            # The highest container of the leaf that is still below `name`.
            above = [up for up in names_above(leaf) if len(up) > len(name) and up in self.kinds]
            tops[above[-1] if above else leaf] = None
        return tuple((top[len(name) + 1 :] if name else top, top) for top in tops)


def _names_below(name: str, ordered: Sequence[str]) -> Sequence[str]:
    if not name:
        return ordered
    start = bisect_left(ordered, f"{name}.")
    return ordered[start : bisect_left(ordered, f"{name}/", start)]  # "/" follows "."


def build_saved_tree(
    catalog: Catalog,
    main: ObjectsFile,
    read: Callable[[int], ObjectsFile],
    *,
    rename: RenameRules | None = None,
) -> SavedTree:
    """Return a checkpoint as a tree. `main` is the objects file of rank 0.

    `read(rank)` returns the objects file of another rank. A rename that does not fit the checkpoint
    is reported in `problems`. Raises TypeError or ValueError for an invalid rename, CorruptError or
    IncompatibleError for a tree that no save has written.
    """
    rules = parse_rename(rename)
    names = catalog.names
    groups = _read_groups(catalog, main)
    if both := {node.fqn for node in main.tree}.intersection(names):
        raise CorruptError(
            f"{min(both)[:100]}: saved as a container and as a tensor or value: load an older "
            "checkpoint"
        )
    # A parameter without saved state has its name only in the groups.
    stems = [(group, state_name(group), params) for group, params in groups.items()]
    groups_by_state = {child_name(stem, p): group for group, stem, params in stems for p in params}
    states = {child_name(stem, p): (stem, p) for _, stem, params in stems for p in params}
    # Only state of saved parameters moves with its parameter. Older checkpoints, and those of
    # torch's helpers, have other names in the groups.
    saved = {*catalog.tensors, *catalog.aliases, *catalog.values} if rename else set()
    movable = {
        state: (stem, name)
        for state, (stem, name) in states.items()
        if (name in saved or child_name(name, RECORD) in saved)
        if not (rules.with_operations and rules.drops(state))
    }
    new_stems = rules.find_stems(stem for stem, _ in movable.values())
    saved_states = SavedStates(movable, groups_by_state, new_stems, main.uncut)
    made = derive_tensors(rules.with_operations, catalog, saved_states)
    all_names = (*names, *states) if made.rules else ()
    used = {name for name in all_names if not made.rules.keys().isdisjoint(names_above(name))}
    unused = dict.fromkeys((*names, *states))
    for name in used:
        unused.pop(name, None)
    renamed, problems = rules.apply(unused, movable)
    problems = (*made.problems, *rules.shared_problems(made.rules), *problems)
    leaves = {new: name for name in names if (new := renamed.get(name)) is not None}
    problems += tuple(_find_clashes(leaves, made))
    if problems:
        made, used = Derivation(), set()
        renamed = {name: name for name in (*names, *states)}
        leaves = dict(zip(names, names, strict=True))
    leaves |= {name: _DERIVED + name for name in made.tensors} | made.copies
    params = dict(_rename_groups(groups, renamed, made.params))
    moved = _move_containers(main.tree, renamed) if rename else {n.fqn: n.fqn for n in main.tree}
    containers = _find_containers(made)
    kinds, entries = _read_containers(main.tree, renamed, moved, leaves, (params, *containers))
    _check_tree(kinds, entries)
    problems += tuple(
        f"rename: {name!r} would be a container and {leaves[name]!r}: change the rules, or drop "
        "one of the two with None"
        for name in kinds
        if name in leaves and name not in params
    )
    numpy = set(main.numpy)
    moved_names = ((fqn, new) for new, tensor in made.tensors.items() for fqn in tensor.sources)
    models, versions, moved_modules = rename_modules(
        catalog.versions or {}, chain(renamed.items() if rename else (), moved_names)
    )
    return SavedTree(
        catalog=catalog,
        leaves=leaves,
        kinds=kinds,
        entries=entries,
        params=params,
        numpy=frozenset(new for new, name in leaves.items() if name in numpy),
        main=main.values,
        read=cache(read),
        dropped=tuple(name for name in names if name not in used and renamed[name] is None),
        problems=problems,
        order=sorted(leaves),
        objects=sorted(
            new for name in main.objects if (new := moved.get(name, renamed.get(name))) is not None
        ),
        uncut={new: main.uncut[name] for new, name in leaves.items() if name in main.uncut},
        derived={_DERIVED + name: tensor for name, tensor in made.tensors.items()},
        equal=made.equal,
        state_problems=tuple(made.state_problems),
        versions=versions,
        models=models,
        unversioned=frozenset(modules_above(made.tensors) - moved_modules),
        has_text_keys=main.has_text_keys,
    )


def _find_clashes(leaves: Mapping[str, str], made: Derivation) -> Iterator[str]:
    """Yield a problem for each new name that two rules make."""
    for name in (*made.tensors, *made.copies):
        if name in leaves:
            yield (
                f"rename: {name!r} would be made by operations, and {leaves[name]!r} has that name "
                "too: change the rules, or drop one of the two with None"
            )


def _read_groups(catalog: Catalog, main: ObjectsFile) -> dict[str, Sequence[str]]:
    """Return the parameter names of each optimizer group, from its name list."""
    groups: dict[str, Sequence[str]] = {}
    for name, value in main.values.items():
        group = name.removesuffix(_PARAMS)
        if group == name or group not in catalog.values or not isinstance(value, list):
            continue
        if not isinstance(main.values.get(group, {}), dict) or not _GROUP.fullmatch(group):
            continue  # a list in the user's state that is called `params` too
        if all(isinstance(param, str) for param in value):  # otherwise it is the user's list
            groups[group] = value
    return groups


def optimizer_name(group: str) -> str:
    """Return the name of the optimizer that has a group; without one, the group's name."""
    return group[: group.rindex(GROUPS_INFIX)] if GROUPS_INFIX in group else group


def state_name(group: str) -> str:
    """Return the name of the state of a group's parameters: `optim.state`."""
    return f"{optimizer_name(group)}.state" if GROUPS_INFIX in group else group


def _rename_groups(
    groups: Mapping[str, Sequence[str]],
    renamed: Mapping[str, str | None],
    made: Mapping[str, Sequence[str]],
) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield each group with its parameters' new names. `made` has those that operations make."""
    for group, params in groups.items():
        if (new_group := renamed[group]) is None:
            continue
        before, after = f"{state_name(group)}.", f"{state_name(new_group)}."
        new: dict[str | None, None] = {}
        for full in (before + p for p in params):
            new.update(dict.fromkeys(made.get(full) or (renamed.get(full, full),)))
        yield new_group, [p.removeprefix(after) for p in new if p is not None]


# --- containers ------------------------------------------------------------------------------


def _move_containers(tree: Iterable[Node], renamed: Mapping[str, str | None]) -> dict[str, str]:
    """Return the new name of each container."""
    moved: dict[str, str] = {}
    nodes = {node.fqn: node for node in tree}
    for fqn in sorted(nodes, key=len, reverse=True):
        moved[fqn] = _new_name(nodes[fqn], renamed, moved)
    return moved


def _find_containers(made: Derivation) -> tuple[list[str], frozenset[str]]:
    """Return the states of parameters that operations make, and all names above new tensors."""
    above = frozenset(
        up for name in (*made.tensors, *made.copies) for up in names_above(name) if up != name
    )
    states = dict.fromkeys(state for states in made.params.values() for state in states)
    return [state for state in states if state in above], above


def _read_containers(
    tree: Iterable[Node],
    renamed: Mapping[str, str | None],
    moved: Mapping[str, str],
    leaves: Iterable[str],
    mappings: tuple[Iterable[str], Iterable[str], Collection[str]],
) -> tuple[dict[str, str], dict[str, Sequence[tuple[PathKey, str]]]]:
    """Return the containers and their children. `mappings`: see below, and `_find_containers`."""
    groups, states, above_made = mappings
    kinds: dict[str, str] = {}
    entries: dict[str, list[tuple[PathKey, str]]] = {}
    fitted: set[str] = set()
    for node in tree:
        fqn, new = node.fqn, moved[node.fqn]
        children = _children(node, renamed, moved)
        fitting = [(key, child) for key, child in children if child == child_name(new, key)]
        if not node.keys or fitting or not fqn or new in above_made:
            if kinds.setdefault(new, node.kind) != node.kind:
                kinds[new] = "dict"  # a rename has merged two containers
            entries.setdefault(new, []).extend(fitting)
            fitted.update(child for _, child in fitting)
    for name in (*groups, *states):
        # The value of a group is a dict. Its tensor hyperparameters are items of this dict.
        kinds.setdefault(name, "dict")
        entries.setdefault(name, [])
    for name in dict.fromkeys((*leaves, *kinds)):
        if not name or name in fitted:
            continue
        # The name has lost its container: add it to the nearest mapping above it.
        above = (*names_above(name), "")[1:]
        parent = next((up for up in above if up in kinds and is_mapping(kinds[up])), None)
        if parent is not None:
            entries[parent].append((name[len(parent) + 1 :] if parent else name, name))
    return kinds, dict(entries)


def _check_tree(
    kinds: Mapping[str, str], entries: Mapping[str, Sequence[tuple[PathKey, str]]]
) -> None:
    if not is_mapping(kinds.get("", "dict")):
        raise CorruptError("the saved state is not a mapping: load an older checkpoint")
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
    """Yield each key of a container and the new name of its child, without dropped children."""
    for key in node.keys:
        child = child_name(node.fqn, key)
        # A save writes no empty keys; one would make a container its own child.
        new = moved[child] if child in moved else renamed.get(child)
        if new is not None and key != "":
            yield key, new


def _new_name(node: Node, renamed: Mapping[str, str | None], moved: Mapping[str, str]) -> str:
    """Return the new name of a container: its children's new parent if it is one, else its own."""
    above = set()
    for key, child in _children(node, renamed, moved):
        if child != str(key) and not child.endswith(f".{key}"):
            return node.fqn
        above.add(child[: -len(str(key)) - 1])
    return above.pop() if len(above) == 1 and node.fqn else node.fqn
