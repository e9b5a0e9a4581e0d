"""`BindContext`: the saved values and tensors that a load requests, name by name.

Each request returns a `Value`, which is called after all tensors are created and read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache

from dist_ckpt.core.format.index.index import Key
from dist_ckpt.core.planning.name_selection import Selection
from dist_ckpt.core.state.binding.matching.dequantizer import Casting
from dist_ckpt.core.state.binding.new_subclasses import new_subclass_tensor
from dist_ckpt.core.state.binding.sources.saved_tree import SavedTree, Scopes
from dist_ckpt.core.state.binding.targets import FillTargets
from dist_ckpt.core.state.binding.template import Template, has_entries, live_children, live_value
from dist_ckpt.core.state.binding.values import (
    FixedValue,
    NewContainer,
    Value,
    new_own_copy,
    own_copy_setter,
)
from dist_ckpt.core.state.elementwise_state import PlacementHint
from dist_ckpt.core.state.tensors.local_tensors import class_name
from dist_ckpt.core.state.tensors.locate_tensor import is_meta
from dist_ckpt.core.state.tensors.tensor_subclasses import difference
from dist_ckpt.core.state.tree.containers import (
    RECORD,
    PathKey,
    child_name,
    container_entries,
    container_kind,
)
from dist_ckpt.core.state.tree.live_keys import is_integer_text, match_keys
from dist_ckpt.core.state.tree.state_tree import (
    ModuleLeaf,
    ObjectLeaf,
    OptimizerLeaf,
    PlainLeaf,
    SubclassLeaf,
    TensorLeaf,
    Tree,
    calling_user_code,
    children_of,
    walk,
)
from dist_ckpt.core.state.wrappers import RNG, PerRank, per_rank_key
from dist_ckpt.errors import CheckpointError
from dist_ckpt.message_text import format_mesh, listed

# What loads itself, also where another object's state dict has it.
Loadable = ObjectLeaf | ModuleLeaf | OptimizerLeaf | PerRank | RNG


class BindContext:
    """The requests of one rank, and the calls that use them after the read.

    The `request_` methods mark the saved names that they read. These calls follow after the read:

    1. `tensor_setters` replace the tensors of meta modules.
    2. `value_setters` set all other values.
    3. `conversions` let classes of optimizers convert their state, which is complete now.
    4. `object_loads` call the `load_state_dict` of objects. `inner_loads` has the calls of objects
       inside others, by id(): such an object is loaded once, whatever its names.
    5. `generators` are set to their saved states.

    `bind_inner` binds a leaf that another object's state dict has, and returns its live value.
    """

    bind_inner: Callable[[BindContext, str, Loadable, PlacementHint | None], Value]

    def __init__(
        self,
        template: Template,
        saved: SavedTree,
        selection: Selection | Scopes,
        keys: Mapping[str, Sequence[Key]] | None,
        *,
        strict: bool,
        casting: Casting,
    ) -> None:
        self.strict = strict
        self.template = template
        self.saved = saved
        self.targets = FillTargets(template, saved, casting)
        self._casting = casting
        self.problems = self.targets.problems
        self.warnings: list[str] = []
        self.assumed: list[str] = []
        self.unsaved_meta: list[Callable[[], list[str]]] = []
        self.missing: dict[str, None] = {}
        self.dropped: list[str] = [*saved.dropped]
        self.restored: dict[str, None] = {}
        self.requested: set[str] = set()
        self.tensor_setters: list[tuple[str, Callable[[], None]]] = []
        self.value_setters: list[Callable[[], object]] = []
        self.conversions: list[tuple[str, Callable[[], None]]] = []
        self.object_loads: list[tuple[str, Callable[[], None]]] = []
        self.inner_loads: dict[int, Callable[[], None]] = {}
        # The containers whose text keys became keys of the state, and those without such keys.
        self.converted_keys: dict[str, None] = {}
        self.unknown_keys: dict[str, None] = {}
        # The saved objects for which the state has an object or a dict.
        self.live_objects: set[str] = set()
        self.generators: list[tuple[str, RNG, Value]] = []
        self.parameter_states: list[tuple[int, str]] = []  # id() of parameters, and their state
        self.moved: dict[str, str] = {}  # saved names of parameters that conversions rename
        self.state_checks: list[Callable[[], None]] = []
        self._selection, self._keys = selection, keys or {}
        self._split: dict[str, object] = {}  # the items of split values by name
        self._split_children: dict[str, tuple[tuple[PathKey, str], ...]] = {}
        # `mesh` reads every tensor of the state, so it runs at most once, and only if needed.
        self._live_mesh = cache(template.mesh)

    # --- names -------------------------------------------------------------------------------

    def searched_paths(self, name: str) -> tuple[str, ...] | None:
        """Return the paths of the sources that may have a name; None for a single source."""
        scopes = self._selection
        return scopes.searched_paths(name) if isinstance(scopes, Scopes) else None

    def is_selected(self, name: str) -> bool:
        """Return True if `include` and `exclude` leave a name in."""
        return name in self._selection

    def pattern_problems(self) -> tuple[str, ...]:
        """Return the problem of each pattern that matches no name, saved or of this state."""

        def names() -> Iterator[str]:  # lazy: only patterns need the names
            yield from self.saved.leaves
            yield from self.template.names()

        return (
            *self.saved.name_problems,
            *self._selection.pattern_problems(names()),
            *self._casting.pattern_problems(names),
        )

    def unrequested(self) -> tuple[str, ...]:
        """Return the saved names that the state does not have, as in the catalog."""
        derived, scales = self.saved.derived, self.targets.dequantizer.used_scales
        leaves = [(n, f) for n, f in self.saved.leaves.items() if f not in self.requested]
        unrequested = [f for name, f in leaves if self.is_selected(name)]
        if not (derived or scales):
            return tuple(unrequested)
        used = {s for f in self.requested if f in derived for s in derived[f].sources} | scales
        sources = (s for f in unrequested for s in (derived[f].sources if f in derived else (f,)))
        return tuple(s for s in dict.fromkeys(sources) if s not in used)

    def unrequested_parts(self) -> tuple[str, ...]:
        """Return the tensors that a rename makes, and that the state does not have."""
        derived = self.saved.derived
        return tuple(
            name
            for name, fqn in self.saved.leaves.items()
            if fqn in derived and fqn not in self.requested and self.is_selected(name)
        )

    def selected_leaves(self, name: str) -> list[str]:
        """Return the selected saved leaves at and below a name."""
        split = self._split_below(name) if self._split else ()
        return [leaf for leaf in (*self.saved.leaves_at(name), *split) if self.is_selected(leaf)]

    def has(self, name: str) -> bool:
        """Return True if anything is saved at or below a name."""
        is_split = name in self._split or name in self._split_children
        return is_split or self.saved.contains(name)

    def is_missing(self, name: str) -> bool:
        """Return True if nothing is saved at or below a name; record a selected name as missing."""
        if self.has(name):
            return False
        if self.is_selected(name):
            self.missing[name] = None
        return True

    def is_container(self, name: str) -> bool:
        """Return True if a container with tensors was saved under a name."""
        return name not in self._split and name not in self.saved.leaves and self.has(name)

    def is_plain(self, name: str) -> bool:
        """Return True if a container, or a value without tensors, was saved under a name."""
        return self.is_container(name) or self.peek_value(name) is not None

    def request_tensor(self, name: str) -> bool:
        """Request a tensor; return True if the name is selected and saved as a tensor.

        A selected name that is not saved as a tensor is reported.
        """
        if name not in self._selection:
            return False
        if self.saved.tensor(name) is None:
            self.report_mismatch(name, "a tensor")
            return False
        self.restore(name)
        return True

    def report_mismatch(self, name: str, wanted: str, remedy: str = "make them alike") -> None:
        """Report a name that is missing, or that was saved as another kind of value."""
        kind = "a value without tensors" if name in self._split else self.saved.describe_kind(name)
        if kind is None:
            self.missing[name] = None
            return
        for leaf in (name, *self.saved.below(name)):
            self.mark_requested(leaf)
        kind += self.targets.dequantizer.packed_text(name)
        self.problems.append(
            f"{name}: saved as {kind}{self.saved.source_text(name)}, the state has {wanted}: "
            f"{remedy}, set None there to load the saved value, or exclude the name"
        )

    def mark_requested(self, name: str) -> None:
        """Record that a saved name is requested."""
        if name in self.saved.leaves:
            self.requested.add(self.saved.leaves[name])

    def restore(self, name: str) -> None:
        """Record that a saved name is requested and will be loaded."""
        self.mark_requested(name)
        self.restored[name] = None

    # --- values ------------------------------------------------------------------------------

    def request_value(self, name: str) -> FixedValue | None:
        """Request a plain value; None if the name was not saved as a plain value."""
        if (value := self.peek_value(name)) is not None:
            self.restore(name)
        return value

    def peek_value(self, name: str) -> FixedValue | None:
        """Return a plain value without a request, to compare it; None for any other name."""
        if name in self._split:
            return FixedValue(self._split[name])
        return FixedValue(self.saved.value(name)) if self.saved.is_value(name) else None

    def check_keys(self, name: str, keys: Mapping[PathKey, Tree]) -> None:
        """Report keys of a container that were saved as another class, such as 0 and "0"."""
        entries = self.saved.entries.get(name, ())
        if {*map(type, keys), *(type(key) for key, _ in entries)} <= {str}:
            return
        saved = {str(key): key for key, _ in entries}
        texts = [*saved.values()] if self.saved.has_text_keys else []
        matched = self.match_keys(name, texts, keys)
        for key in keys:
            other = saved.get(str(key), key)
            other = matched.get(other, other)
            if type(other) is not type(key) and self.is_selected(child_name(name, key)):
                self.problems.append(
                    f"{child_name(name, key)}: saved under the key {other!r}, the state has "
                    f"{key!r}: use the same class of key"
                )

    def match_keys(
        self, name: str, saved: Sequence[PathKey], live: Collection[object]
    ) -> Mapping[PathKey, PathKey]:
        """Return the key of the state for each saved text key that another key became in DCP."""
        if matched := match_keys(saved, live):
            self.converted_keys[name] = None
        elif self.saved.has_text_keys and not live and any(map(is_integer_text, saved)):
            self.unknown_keys[name] = None
        return matched

    def saved_length(self, name: str) -> int | None:
        """Return the number of items of a saved list or tuple; None for anything else."""
        if (value := self.peek_value(name)) is not None:
            return len(value.value) if isinstance(value.value, list | tuple) else None
        is_list = self.saved.kinds.get(name) in ("list", "tuple")
        return len(self.saved.entries[name]) if is_list else None

    def split_value(self, name: str) -> None:
        """Replace a saved plain container by its items: the state has tensors in this container."""
        if name in self._split:
            value = self._split.pop(name)
        elif self.saved.is_value(name) and self.saved.leaves[name] in self.saved.main:
            value = self.saved.value(name)
        else:
            return
        if (entries := container_entries(value)) is not None:
            self.mark_requested(name)
            children = tuple((key, child_name(name, key)) for key in entries)
            self._split_children[name] = children
            self._split.update((child, entries[key]) for key, child in children)

    def children(self, name: str) -> Sequence[tuple[PathKey, str]]:
        """Return the key and the name of each child below a saved name."""
        return *self.saved.children(name), *self._split_children.get(name, ())

    def _split_below(self, name: str) -> Iterator[str]:
        if name in self._split:
            yield name
        for _, child in self._split_children.get(name, ()):
            yield from self._split_below(child)

    def parameter_names(self, group: str) -> Sequence[str]:
        """Return the saved parameter names of an optimizer's group. Torch saves them as numbers."""
        value = self._split.get(group)
        params: object = None
        if isinstance(value, dict) and isinstance(value.get("params"), list):
            params = value["params"]
        elif group in self.saved.params:
            return self.saved.params[group]
        # A group with tensors in it was saved as a container. DCP saves every group so.
        elif self.saved.is_value(full := f"{group}.params"):
            params = self.saved.value(full)
        names = params if isinstance(params, list) else ()
        return [str(name) for name in names if type(name) in (str, int)]

    # --- tensor subclasses -------------------------------------------------------------------

    def request_subclass(self, name: str, leaf: SubclassLeaf) -> None:
        """Request the inner tensors of a tensor subclass. Report a record that differs."""
        cls = class_name(leaf.value)
        if is_meta(leaf.value) and self.selected_leaves(name):
            self.problems.append(
                f"{name}: a {cls} on the meta device has no memory, and only its class can "
                "allocate it: before the load, materialize it (`to_empty`), or materialize the "
                "model and then convert it"
            )
            return
        if name in self.saved.leaves and self.is_selected(name):
            self.report_mismatch(name, f"a {cls}", "load into a plain tensor, then convert that")
            return
        for attribute, inner in leaf.inner.items():
            full = child_name(name, attribute)
            if isinstance(inner, SubclassLeaf):
                self.request_subclass(full, inner)
            elif self.request_tensor(full):
                self.targets.request_fill(full, inner, as_bits=True)
        if not self.is_selected(full := child_name(name, RECORD)):
            return
        if (record := self.request_value(full)) is None:
            self.report_mismatch(full, "the record of a tensor subclass")
        elif problem := difference(record.value, leaf.record):
            self.problems.append(
                f"{name}: a {cls} {problem}{self.saved.source_text(name)}: convert the state in "
                "the same way as the saved one, or exclude the name"
            )

    def _new_subclass_tensor(self, name: str, hint: PlacementHint) -> Value | None:
        parts = [*self.saved.below(name)]
        if len(self.selected_leaves(name)) < len(parts):
            return None
        if self.template.rules is not None:
            self.problems.append(
                f"{name}: a ShardingConfig has no rules for such state: exclude it"
            )
            return None
        for part in parts:
            self.restore(part)
            self.peek_value(part)  # a damaged objects file must raise, outside of the `try`
        try:
            return new_subclass_tensor(self.saved, self.targets, name, hint)
        except CheckpointError as error:
            self.problems.append(str(error))
            return None

    # --- per-rank values ---------------------------------------------------------------------

    def request_per_rank(self, name: str, wrapper: PerRank | RNG) -> Value | None:
        """Request the value of this rank's key; after a reshard, `on_reshard` decides."""
        if (saved := self.saved.per_rank_keys(name)) is None:
            self.report_mismatch(name, f"a {type(wrapper).__name__}")
            return None
        key, keys = per_rank_key(wrapper, self.template.rank), dict(saved)
        now = self._keys.get(name, (key,))
        if set(now) == keys.keys() and (wrapper.key is not None or self._is_same_mesh(name)):
            return self._request_key(name, key)
        self.mark_requested(name)
        policy = wrapper.on_reshard
        if policy == "drop":
            self.dropped.append(name)
        elif policy == "error":
            self.problems.append(
                f"{name}: saved{self.saved.source_text(name)} for the keys {_list_keys([*keys])} "
                f"(mesh {format_mesh(self.saved.catalog_of(name).mesh)}), the state has "
                f"{_list_keys(now)} (mesh {format_mesh(self._live_mesh())}): the value of one rank "
                'has no meaning for another; choose on_reshard="drop" or a function for it (an '
                f"argument of its dc.{type(wrapper).__name__}, not of dc.load), or exclude it"
            )
        else:
            self.restore(name)
            values = self.saved.per_rank(name, keys)

            def reshard() -> object:
                with calling_user_code(name, policy, "on_reshard"):
                    return policy(dict(values), key)

            return reshard
        return None

    def request_copy(self, name: str, leaf: TensorLeaf) -> bool:
        """Fill a tensor with the copy that this rank has saved. Return False if there is none.

        The value is read now. It is copied after the tensors are read.
        """
        if not self.saved.has_copies(name) or not self.is_selected(name):
            return False
        if (saved := self.request_own_copy(name)) is not None:
            try:
                parts = self.targets.local_parts(name, leaf.value)
                copy = own_copy_setter(name, parts, saved.value)
            except (TypeError, ValueError) as error:
                self.problems.append(str(error))
            else:
                self.value_setters.append(copy)
        return True

    def request_own_copy(self, name: str) -> FixedValue | None:
        """Request the value that this rank has saved. Report it if the ranks are not the same."""
        keys = {key for key, _ in self.saved.per_rank_keys(name) or ()}
        rank, world_size = self.template.rank, self.template.world_size
        ranks = {key for key in keys if isinstance(key, int) and key < world_size}
        if rank in keys and ranks == keys and self._is_same_mesh(name):
            return self._request_key(name, rank)
        self.mark_requested(name)
        catalog = self.saved.catalog_of(name)
        self.problems.append(
            f'{name}: saved with a copy of each rank (replicas="per_rank") by {len(keys)} of '
            f"{catalog.world_size} ranks (mesh {format_mesh(catalog.mesh)}), the state is on "
            f"{world_size} (mesh {format_mesh(self._live_mesh())}): the copy of one rank has no "
            "meaning for another. Load on the same ranks, or exclude it"
        )
        return None

    def _request_unwrapped(self, name: str, keys: set[Key]) -> FixedValue | None:
        """Request a per-rank value for which the state has no wrapper, if its keys are ranks."""
        if keys == {*range(self.template.world_size)} and self._is_same_mesh(name):
            return FixedValue(PerRank(self._request_key(name, self.template.rank).value))
        self.mark_requested(name)
        self.dropped.append(name)
        return None

    def _request_key(self, name: str, key: Key) -> FixedValue:
        self.restore(name)
        return FixedValue(self.saved.per_rank(name, [key])[key])

    def _is_same_mesh(self, name: str) -> bool:
        return self.saved.is_of_mesh(name, self._live_mesh(), self.template.world_size)

    # --- whole subtrees ----------------------------------------------------------------------

    def request_entries(self, fqn: str, trees: Mapping[PathKey, Tree]) -> dict[str, Value]:
        """Request the saved entries of an object for each of its current entries, `trees`."""
        return {
            str(key): value
            for key, tree in trees.items()
            if not self.is_missing(name := child_name(fqn, key))
            and (value := self.request_subtree(name, tree)) is not None
        }

    def request_subtree(
        self, name: str, tree: Tree | None = None, hint: PlacementHint | None = None
    ) -> Value | None:
        """Request everything saved at and below a name, as new containers of the saved kinds.

        A fitting tensor of `tree` is filled in place. Otherwise a new tensor is created: placed
        like the parameter of `hint`, or whole in host memory. An object of `tree` loads what was
        saved, and is the value itself. Return None if no name is selected.
        """
        if has_entries(tree):
            self.live_objects.add(name)
        if isinstance(tree, ObjectLeaf | ModuleLeaf | OptimizerLeaf) and self._fits(name, tree):
            is_needed = self.selected_leaves(name) or self.is_selected(name)
            return self.bind_inner(self, name, tree, hint) if is_needed else None
        if isinstance(tree, SubclassLeaf):
            self.request_subclass(name, tree)
            return FixedValue(tree.value)
        if hint is not None and self.saved.is_wrapper_subclass(name):
            return self._new_subclass_tensor(name, hint)
        leaf = self._request_leaf(name, tree, hint)
        whole = leaf.value if isinstance(leaf, FixedValue) else None
        items: dict[PathKey, Value] = {}
        for key, child, subtree in (
            *self._saved_children(name, tree),
            *self._objects_in_value(name, tree, whole),
        ):
            if (value := self.request_subtree(child, subtree, hint)) is not None:
                items[key] = value
        kind = self.saved.kinds.get(name)
        if items:
            before = container_entries(whole) or self._empty_mappings(tree)
            constants = {key: FixedValue(value) for key, value in before.items()}
            kind = kind or container_kind(whole) or "dict"
            metadata = self.saved.model_metadata(name) if name in self.saved.models else None
            like = self._class_like(tree)
            return NewContainer(kind, {**constants, **items}, metadata, like)
        is_empty = not self.saved.children(name)
        if leaf is None and kind is not None and is_empty and self.is_selected(name):
            return NewContainer(kind, {})
        return leaf

    def _empty_mappings(self, tree: Tree | None) -> Mapping[PathKey, object]:
        """Return the empty mappings of an object's state, which DCP does not store."""
        live = live_children(tree) if self.saved.has_text_keys else {}
        values = {key: part.value for key, part in live.items() if isinstance(part, PlainLeaf)}
        return {k: value for k, value in values.items() if isinstance(value, Mapping) and not value}

    def _class_like(self, tree: Tree | None) -> object:
        """Return the live container whose class a new one gets, as DCP does not store classes."""
        live = live_value(tree)
        # `dc.save` stores the class of a container, and no Counter as one.
        return live if self.saved.has_text_keys or type(live) is Counter else None

    def _saved_children(
        self, name: str, tree: Tree | None
    ) -> Iterator[tuple[PathKey, str, Tree | None]]:
        """Yield the key and name of each saved child, and the live value of that key."""
        live, saved = live_children(tree), self.saved.children(name)
        matched = self.match_keys(name, [key for key, _ in saved], live)
        children = [(matched.get(key, key), child) for key, child in saved]
        if self.saved.has_text_keys:  # a folder of DCP has the values before the tensors
            order = {key: number for number, key in enumerate(live)}
            children.sort(key=lambda child: order.get(child[0], len(order)))
        for key, child in children:
            yield key, child, live.get(key)

    def _objects_in_value(
        self, name: str, tree: Tree | None, whole: object
    ) -> Iterator[tuple[PathKey, str, Tree]]:
        """Yield the entries of a saved value without tensors for which `tree` has an object."""
        live, saved = children_of(tree), container_entries(whole) or {}
        for key in filter(live.__contains__, saved):
            if any(isinstance(part, Loadable) for _, part in walk(live[key], "_")):
                self._split[child := child_name(name, key)] = saved[key]
                yield key, child, live[key]

    def check_objects(self, name: str, remedy: str) -> None:
        """Report requested objects below a name for which the state has no object.

        Only their class can load them. `remedy` is the way to make them.
        """
        lacking: list[str] = []
        for full in self.saved.objects_below(name):
            leaves = (self.saved.leaves.get(leaf) for leaf in (full, *self.saved.below(full)))
            is_inside = lacking and full.startswith(f"{lacking[-1]}.")
            if not (full in self.live_objects or is_inside or self.requested.isdisjoint(leaves)):
                lacking.append(full)
        if lacking:
            self.problems.append(
                f"{listed(lacking)}: saved by the state_dict of an object, and the state has no "
                f"object there that could load it: {remedy}"
            )

    def _fits(self, name: str, leaf: ObjectLeaf | ModuleLeaf | OptimizerLeaf) -> bool:
        """Return True unless something else was saved in the place of an object, such as None."""
        saved = self.peek_value(name)
        if saved is None or isinstance(saved.value, Mapping):
            return True
        content = leaf.content if isinstance(leaf, ObjectLeaf) else None
        return isinstance(content, PlainLeaf) and not isinstance(content.value, Mapping)

    def _request_saved_tensor(
        self, name: str, leaf: Tree | None, hint: PlacementHint | None
    ) -> Value:
        self.restore(name)
        if isinstance(leaf, TensorLeaf) and self.targets.can_fill(name, leaf):
            return FixedValue(self.targets.request_fill(name, leaf))
        if hint is None:
            return self.targets.request_whole(name)
        return self.targets.request_like(name, hint)

    def _request_leaf(
        self, name: str, leaf: Tree | None, hint: PlacementHint | None
    ) -> Value | None:
        if not self.is_selected(name) or self.targets.dequantizer.drops(name):
            return None
        if self.saved.tensor(name) is not None:
            return self._request_saved_tensor(name, leaf, hint)
        if (keys := self.saved.per_rank_keys(name)) is None:
            return self.request_value(name)
        if isinstance(leaf, PerRank | RNG):
            self.live_objects.add(name)
            return self.bind_inner(self, name, leaf, hint)
        if self.saved.has_copies(name):
            return self._request_new_copy(name, leaf, hint)
        return self._request_unwrapped(name, {key for key, _ in keys})

    def _request_new_copy(
        self, name: str, leaf: Tree | None, hint: PlacementHint | None
    ) -> Value | None:
        """Request this rank's copy in a tensor of the state, or as a new value."""
        if isinstance(leaf, TensorLeaf):
            self.request_copy(name, leaf)
            return FixedValue(leaf.value)
        if (saved := self.request_own_copy(name)) is None or hint is None:
            return saved
        try:
            copy = new_own_copy(name, saved.value, hint.parameter, on_host=hint.on_host)
            return FixedValue(copy)
        except (TypeError, ValueError) as error:
            self.problems.append(str(error))
            return None


def _list_keys(keys: Sequence[Key]) -> str:
    more = f" and {len(keys) - 8} more" if len(keys) > 8 else ""
    return ", ".join(map(repr, keys[:8])) + more
