"""The loading side of a state: which live memory each saved name goes to.

    read_template(state) -> Template    the names and memory of the state (template.py)
    bind(template, saved) -> Binding    decides by names and kinds; every problem is listed
    binding.wanted -> load plan         all ranks agree that no rank has a problem
    binding.allocate() -> targets       new memory; the reader fills all targets
    binding.finish_tensors()            tensors that share memory are filled
    binding.assign_values()             plain values and new tensors are assigned, and converted
    binding.load_objects()              load_state_dict, set_extra_state; generators last

`bind` changes no object of the user. `allocate` creates optimizer state, `assign_values` sets it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache, partial
from operator import itemgetter
from typing import assert_never

from dist_ckpt.core.format.index.index import Key
from dist_ckpt.core.planning.module_versions import modules_above, state_dict_metadata
from dist_ckpt.core.planning.name_selection import Selection
from dist_ckpt.core.planning.plan import TensorRequest
from dist_ckpt.core.runtime.processes import paused_collector
from dist_ckpt.core.shard_io.memory.cell_memory import Target
from dist_ckpt.core.shard_io.memory.pinned_buffers import PinnedBuffers
from dist_ckpt.core.state.binding.bind_context import BindContext, Loadable
from dist_ckpt.core.state.binding.bind_modules import bind_module
from dist_ckpt.core.state.binding.bind_optimizers import bind_optimizer
from dist_ckpt.core.state.binding.conversions.conversion_decision import is_in
from dist_ckpt.core.state.binding.matching.dequantizer import NO_CASTING, Casting
from dist_ckpt.core.state.binding.required_keys import find_missing_keys, read_keys
from dist_ckpt.core.state.binding.sources.rename import (
    suggest_moves,
    suggest_rules,
    weight_norm_twins,
)
from dist_ckpt.core.state.binding.sources.saved_tree import SavedTree, Scopes, build_saved_tree
from dist_ckpt.core.state.binding.template import Template, live_children, read_template
from dist_ckpt.core.state.binding.values import (
    FixedValue,
    NewContainer,
    Value,
    fill_container,
    fill_empty,
    set_metadata,
)
from dist_ckpt.core.state.elementwise_state import PlacementHint
from dist_ckpt.core.state.tree.containers import (
    child_name,
    container_entries,
    container_kind,
    is_mapping,
)
from dist_ckpt.core.state.tree.state_tree import (
    Branch,
    ModuleLeaf,
    ObjectLeaf,
    OptimizerLeaf,
    PlainLeaf,
    SubclassLeaf,
    TensorLeaf,
    Tree,
    calling_user_code,
    has_state,
    read_state_dict,
    requires_grad,
)
from dist_ckpt.core.state.wrappers import RNG, PerRank
from dist_ckpt.data import DataPosition, check_ranks, load_position
from dist_ckpt.errors import IncompatibleError
from dist_ckpt.message_text import MAX_LISTED, listed, names_around_remedy

__all__ = ["Binding", "Template", "bind", "build_saved_tree", "read_template", "unexpected_problem"]


def bind(
    template: Template,
    saved: SavedTree,
    *,
    strict: bool,
    selection: Selection | Scopes,
    keys: Mapping[str, Sequence[Key]] | None = None,
    casting: Casting = NO_CASTING,
) -> Binding:
    """Decide which memory each saved name fills. Problems are listed in `Binding.problems`.

    `casting` says which differences are accepted. `keys` has the per-rank keys of all ranks, by
    name; None for a single process. Raises CorruptError if the index lists a value that no objects
    file has.
    """
    of_states = tuple(text for name, text in saved.state_problems if name in selection)
    saved = replace(saved, problems=(*saved.problems, *of_states)) if of_states else saved
    context = BindContext(template, saved, selection, keys, strict=strict, casting=casting)
    context.bind_inner = _bind_inner
    if not saved.problems and (fill_root := _bind_root(context)) is not None:
        context.value_setters.append(fill_root)
    for check in context.state_checks:
        check()
    return Binding(context)


class Binding:
    """The memory or object that each saved name fills on this rank, and the steps that fill it.

    - `problems`: error texts about shape, dtype or kind; with `strict` also about missing names.
    - `missing`: names of the state that the checkpoint lacks.
    - `unrequested`: saved names, as in the catalog, that this rank's state does not have. A name
      that is unrequested on every rank is unexpected (see `unexpected_problem`).
    - `unrequested_parts`: tensors that a rename makes, and that this rank's state does not have. It
      may have other parts of the same saved tensor.
    - `dropped`: names that a policy or a rename left out.
    - `assumed`: texts about what the load assumes, and `warnings`: about what may be wrong.
    - `resized`: the tensors of which only some rows are loaded.
    - `dequantized`: names of 8-bit weights that are multiplied by their scales.
    - `pattern_problems`: error texts for patterns that match no name.
    - `makes_memory`: True if `allocate` creates tensors besides those of the state.
    - `assigns_values`, `loads_objects`: True if `assign_values` and `load_objects` have work.
    """

    def __init__(self, context: BindContext) -> None:
        self._context = context
        saved = context.saved
        self.missing = tuple(context.missing)
        self.dropped = (*context.dropped, *context.targets.dequantizer.dropped)
        self.restored = tuple(context.restored)
        self.warnings = context.warnings  # a conversion may add some
        self.resharded = tuple(context.targets.resharded)
        self.assumed = (*_list_assumptions(context), *context.assumed)
        self.resized = tuple(context.targets.matcher.resized)
        self.wanted: tuple[TensorRequest, ...] = context.targets.wanted()
        self.makes_memory = bool(context.targets.new_tensors)
        self.assigns_values = bool(
            context.tensor_setters or context.value_setters or context.conversions
        )
        self.loads_objects = bool(context.object_loads or context.generators)
        self.unrequested = context.unrequested()
        self.unrequested_parts = context.unrequested_parts()
        self.pattern_problems = () if saved.problems else context.pattern_problems()
        dequantizer = context.targets.dequantizer
        scale_problems = dequantizer.problems(context.requested, context.missing)
        self.problems = (*saved.problems, *context.problems, *scale_problems)
        self.dequantized = tuple(dequantizer.names)
        if saved.problems:
            # With an invalid rename the names are unknown.
            self.unrequested = ()
        elif context.strict and (self.missing or context.moved):
            self._explain_missing()
        # This check may call user code, so it runs only without other problems.
        for name, generators, value in () if self.problems else context.generators:
            try:
                generators.check(value())
            except IncompatibleError as error:
                self.problems += (f"{name}: {error}",)

    def _explain_missing(self) -> None:
        """Report missing names. Names saved with another prefix get one report, with a rename."""
        saved = self._context.saved
        requested = saved.leaves.keys() - set(self.unrequested)
        # A suggested rule could not apply after the user's own rename.
        is_renamed = saved.dropped or any(name != fqn for name, fqn in saved.leaves.items())
        unrequested = () if is_renamed else self.unrequested
        moved = {**self._context.moved, **weight_norm_twins(self.missing, unrequested)}
        rules, misnamed = suggest_moves(unrequested, moved, saved.leaves)
        fact = "other names"
        if not misnamed:
            rules, misnamed = suggest_rules(self.missing, unrequested, requested)
            fact = "another prefix"
        if misnamed:
            text, _ = _list_names([*misnamed])
            like = ", as if the module was inside a wrapper or a list" * (fact == "another prefix")
            self.problems += (
                f"the checkpoint has {fact} for {text}{like}: load with rename={rules!r}",
            )
        # A saved parameter group is missing too if its parameters have other names.
        explained = {*misnamed, *(n for n in self.missing if misnamed and n in saved.leaves)}
        known = {*misnamed.values(), *explained}
        self.unrequested = tuple(name for name in self.unrequested if name not in known)
        lacking: dict[tuple[str, ...] | None, list[str]] = {}
        for name in self.missing:
            if name not in explained:
                lacking.setdefault(self._context.searched_paths(name), []).append(name)
        trained = requires_grad(self._context.template.root) if lacking else {}
        for paths, names in lacking.items():
            are_frozen = all(trained.get(name) is False for name in names)
            self.problems += (_missing_problem(names, paths, are_frozen=are_frozen),)

    def allocate(self) -> Mapping[tuple[str, int], Target]:
        """Return the memory of each wanted cell, by tensor and cell number. Call this once."""
        with paused_collector():
            return self._context.targets.allocate()

    def open_buffers(
        self, *, threads: int, block_nbytes: int
    ) -> AbstractContextManager[PinnedBuffers | None]:
        """Open the buffers of a load into devices; see `FillTargets.open_buffers`."""
        return self._context.targets.open_buffers(threads=threads, block_nbytes=block_nbytes)

    def finish_tensors(self) -> None:
        """Fill the tensors that share memory, after all reads; see `FillTargets.finish_tensors`."""
        self._context.targets.finish_tensors()

    def assign_values(self) -> None:
        """Assign plain values and new tensors; modules first, in the order of `load_objects`."""
        for _, assign in sorted(self._context.tensor_setters, key=itemgetter(0)):
            assign()
        for set_value in self._context.value_setters:
            set_value()
        for _, convert in sorted(self._context.conversions, key=itemgetter(0)):
            convert()

    def find_unfilled(self) -> tuple[str, ...]:
        """Return the tensors of loaded modules that are in no state dict, and still on meta."""
        names = (name for find in self._context.unsaved_meta for name in find())
        return tuple(dict.fromkeys(names))

    def load_objects(self) -> None:
        """Call load_state_dict and set_extra_state of the state's objects; set generators last.

        The calls are sorted by name: user code may contain collectives, and each rank may have
        its keys in another order. An object inside another one is loaded before that one.
        """
        for _, load in sorted(self._context.object_loads, key=lambda call: f"{call[0]}.\U0010ffff"):
            load()
        for _, generators, saved in self._context.generators:
            generators.restore(saved())


def _list_assumptions(context: BindContext) -> tuple[str, ...]:
    texts: list[str] = []
    if names := context.targets.matcher.unknown_pieces:
        texts.append(
            f"{listed(names)}: stored in parts without pieces, and taken as whole fused tensors. "
            "If a plain rule saved each rank's pieces, load with that rule on the number of ranks "
            "that saved, then save with pieces"
        )
    if context.converted_keys:
        texts.append(
            f"{listed([*context.converted_keys])}: saved with text keys, which DCP makes of all "
            "keys, and loaded with the keys of the state"
        )
    if context.unknown_keys:
        texts.append(
            f"{listed([*context.unknown_keys])}: loaded with text keys such as '3', as DCP stores "
            "all keys. If they were integers, load into a dict that has these integers as keys"
        )
    return tuple(texts)


def _missing_problem(
    names: Sequence[str], searched_paths: Sequence[str] | None, *, are_frozen: bool
) -> str:
    """Return the error text for names of the state that the checkpoint lacks.

    `searched_paths` are the sources that may have the names; None for a single source.
    `are_frozen` is True if all names are parameters that require no gradient.
    """
    fact = "the checkpoint lacks"
    if searched_paths is not None:
        fact = f"{' and '.join(searched_paths)} lack{'s' * (len(searched_paths) == 1)}"
    them = "them" if len(names) > 1 else "it"
    remedy = f"remove {them} from the state or `exclude` {them} from the load"
    text, rest = _list_names(names)
    if are_frozen:
        text += f", which require{'s' * (len(names) == 1)} no gradient"
        remedy += ", load with include_frozen=False if it was saved with that"
    if searched_paths == ():
        fact, remedy = "no source is given for", f"give {them} one, {remedy}"
    return f"{fact} {text}: {remedy}, or load with strict=False{rest}"


def unexpected_problem(names: Sequence[str], holder: str = "the checkpoint") -> str:
    """Return the error text for saved names that are not in the state of any rank."""
    text, rest = _list_names(names)
    return (
        f"the state does not have {text}, which {holder} holds: set None or "
        "{} there to load the saved value, select the names to load with `include` (such as "
        f"include=['model']), or load with strict=False{rest}"
    )


def _list_names(names: Sequence[str]) -> tuple[str, str]:
    """Return the number of names and the names, in two parts as of `names_around_remedy`."""
    text, rest = names_around_remedy(names, _group_names(names))
    return f"{len(names)} names: " * (len(names) > 1) + text, rest


def _group_names(names: Sequence[str]) -> str:
    if len(names) <= MAX_LISTED:
        return ", ".join(names)
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.partition(".")[0], []).append(name)
    texts = [
        group[0] + f" and {len(group) - 1} more in {above!r}" * (len(group) > 1)
        for above, group in groups.items()
    ]
    more = f", and more in {len(texts) - MAX_LISTED} others" if len(texts) > MAX_LISTED else ""
    return f"{', '.join(texts[:MAX_LISTED])}{more}"


# --- one walk over a template: each leaf requests the saved value of its name ----------------


def _bind_root(context: BindContext) -> Value | None:
    """Bind the whole state; return the call that fills it. An empty state loads everything."""
    root = context.template.root
    if root.children:
        return _bind_branch(context, "", root)
    saved = context.request_subtree("")
    _bind_versions(context, "", root.live)
    if isinstance(saved, NewContainer):
        return partial(fill_container, root.kind, root.live, saved.items)
    return saved


def _bind_node(context: BindContext, name: str, tree: Tree) -> Value | None:
    """Bind a node; return its new value, or None to leave it unchanged."""
    match tree:
        case Branch():
            return _bind_branch(context, name, tree)
        case TensorLeaf():
            return _bind_tensor(context, name, tree)
        case SubclassLeaf():
            context.request_subclass(name, tree)
        case PlainLeaf():
            return _bind_plain(context, name, tree.value)
        case PerRank() | RNG():
            _bind_per_rank(context, name, tree)
        case ModuleLeaf():
            bind_module(context, name, tree)
        case OptimizerLeaf():
            bind_optimizer(context, name, tree)
        case ObjectLeaf():
            _bind_object(context, name, tree)
        case _:
            assert_never(tree)
    return None


def _bind_branch(context: BindContext, name: str, tree: Branch) -> Value | None:
    if _has_another_length(context, name, tree):
        return None
    context.split_value(name)
    context.check_keys(name, tree.children)
    bound = {
        key: _bind_node(context, child_name(name, key), child)
        for key, child in tree.children.items()
    }
    _bind_versions(context, name, tree.live)
    values = {key: value for key, value in bound.items() if value is not None}
    return partial(fill_container, tree.kind, tree.live, values) if values else None


def _has_another_length(context: BindContext, name: str, tree: Branch) -> bool:
    """Return True, and report it, if a list or tuple was saved with another number of items."""
    length = context.saved_length(name)
    if length is None or is_mapping(tree.kind) or not context.strict:
        return False
    now = len(tree.children)
    differing = (child_name(name, number) for number in range(min(length, now), max(length, now)))
    if not any(context.selected_leaves(n) or context.is_selected(n) for n in differing):
        return False
    for leaf in (name, *context.saved.below(name)):
        context.mark_requested(leaf)
    can_be_empty = not any(isinstance(child, Loadable) for child in tree.children.values())
    empty = f", give it an empty {tree.kind} to take what was saved" * can_be_empty
    context.problems.append(
        f"{name}: saved with {length} items{context.saved.source_text(name)}, the {tree.kind} in "
        f"the state has {now}: create it with {length}{empty}, or exclude {name!r}"
    )
    return True


def _bind_versions(context: BindContext, name: str, live: object) -> None:
    """Give a state dict the saved versions of its modules, if anything of it is loaded.

    Modules of which nothing is loaded keep their versions. If the saved ones are unknown, all do.
    """
    before = state_dict_metadata(live)
    if context.saved.catalog_of(name).versions is None:
        return
    if before is None and name not in context.saved.models:
        return
    start = len(name) + 1 if name else 0
    restored = modules_above(n[start:] for n in context.restored if not name or is_in(n, (name,)))
    if not restored and not any(is_in(n, (name,)) for n in context.restored):
        return
    saved = context.saved.model_metadata(name)
    if not hasattr(live, "__dict__"):
        if any(module != {"version": 1} for module in saved.values()):
            context.assumed.append(
                f"{name or 'the state'}: a {type(live).__name__} cannot have the saved versions "
                "of modules, so a class with a `_version` may convert its tensors once more: load "
                "into an OrderedDict, or into the module itself"
            )
        return
    metadata: dict[str, Mapping[str, object]] = {}
    for path in {**(before or {}), **saved}:
        is_kept = before is not None and path != "" and path not in restored
        if (module := (before or {} if is_kept else saved).get(path)) is not None:
            metadata[path] = module
    context.value_setters.append(partial(set_metadata, live, metadata))


def _bind_tensor(context: BindContext, name: str, leaf: TensorLeaf) -> Value | None:
    if context.request_copy(name, leaf) or not context.request_tensor(name):
        return None
    value = context.targets.request_fill(name, leaf)
    return None if value is leaf.value else FixedValue(value)


def _bind_plain(context: BindContext, name: str, live: object) -> Value | None:
    is_list = isinstance(live, list | tuple | deque) and context.is_plain(name)
    if live is None or (not live and (is_list or isinstance(live, Mapping))):
        return _bind_empty(context, name, live)
    if not context.selected_leaves(name) and not context.is_selected(name):
        return None
    has_copies = context.saved.has_copies(name)
    request = context.request_own_copy if has_copies else context.request_value
    if context.is_selected(name) and ((value := request(name)) is not None or has_copies):
        return value
    entries = container_entries(live)
    if not context.is_container(name) or (entries is None and not isinstance(live, Mapping)):
        context.report_mismatch(name, "a value without tensors")
        return None
    if entries is None:  # a Counter, which DCP takes apart
        return context.request_subtree(name, PlainLeaf(live))
    children = {key: PlainLeaf(item) for key, item in entries.items()}
    return _bind_branch(context, name, Branch(container_kind(live) or "dict", live, children))


def _bind_empty(context: BindContext, name: str, live: object) -> Value | None:
    """Bind None or an empty container: it takes what was saved, but a list takes no mapping."""
    if context.is_missing(name):
        return None
    if isinstance(live, list | tuple | deque):
        kind = "" if isinstance(live, deque) else context.saved.kinds.get(name, "")
        if context.is_container(name) and kind not in ("list", "tuple"):
            if context.selected_leaves(name):
                context.report_mismatch(name, f"an empty {type(live).__name__}")
            return None
    saved = context.request_subtree(name, PlainLeaf(live))
    if isinstance(live, list | tuple | deque):
        context.check_objects(name, f"give {name!r} a list of these objects, or exclude it")
    return None if saved is None else partial(fill_empty, live, saved)


def _bind_per_rank(
    context: BindContext, name: str, wrapper: PerRank | RNG, *, is_inner: bool = False
) -> None:
    if not context.is_selected(name):
        return
    if (saved := context.request_per_rank(name, wrapper)) is None:
        return
    if isinstance(wrapper, RNG):
        # Cached: it is read before anything is set, and a user function may not be pure.
        context.generators.append((name, wrapper, cache(saved)))
    elif has_state(wrapper.value):
        state = saved.value if isinstance(saved, FixedValue) else None
        if isinstance(state, Mapping) and read_keys(type(wrapper.value)) - state.keys():
            live = PlainLeaf(read_state_dict(wrapper.value, name))
            _check_read_keys(context, name, wrapper.value, live, saved)
        _load_object(context, name, wrapper.value, saved, is_inner=is_inner)
    else:
        context.value_setters.append(lambda: setattr(wrapper, "value", saved()))


def _bind_inner(
    context: BindContext, name: str, leaf: Loadable, hint: PlacementHint | None
) -> Value:
    """Bind an object that another object's state dict has; return the value which that one gets.

    It is the live object, as after a `torch.load`; for a PerRank, the value of this rank.
    """
    match leaf:
        case PerRank():
            _bind_per_rank(context, name, leaf, is_inner=True)
            return lambda: leaf.value
        case RNG():
            _bind_per_rank(context, name, leaf)
            return FixedValue(leaf)
        case ObjectLeaf():
            _bind_object(context, name, leaf, hint, is_inner=True)
            return FixedValue(leaf.owner)
        case ModuleLeaf() | OptimizerLeaf():
            if _is_loaded_outside(context, leaf):
                for full in context.selected_leaves(name):
                    context.restore(full)
            else:
                _bind_node(context, name, leaf)
            return FixedValue(leaf.live)
    assert_never(leaf)


def _is_loaded_outside(context: BindContext, leaf: ModuleLeaf | OptimizerLeaf) -> bool:
    """Return True if the load also fills a module or optimizer outside of other objects."""

    def owner(tree: ModuleLeaf | OptimizerLeaf) -> object:
        return tree.live if isinstance(tree, ModuleLeaf) else tree.state.optimizer

    def names(tree: Tree, fqn: str) -> Iterator[str]:
        if isinstance(tree, ModuleLeaf | OptimizerLeaf) and owner(tree) is owner(leaf):
            yield fqn
        for key, child in tree.children.items() if isinstance(tree, Branch) else ():
            yield from names(child, child_name(fqn, key))

    return any(map(context.selected_leaves, names(context.template.root, "")))


def _bind_object(
    context: BindContext,
    name: str,
    leaf: ObjectLeaf,
    hint: PlacementHint | None = None,
    *,
    is_inner: bool = False,
) -> None:
    """Request the complete state of an object: its class decides which part it loads."""
    is_per_rank = context.saved.per_rank_keys(name) is not None
    if context.is_selected(name) and is_per_rank and not context.saved.has_copies(name):
        remedy = "load it in a dc.PerRank, as it was saved"
        context.report_mismatch(name, f"a {type(leaf.owner).__name__}", remedy)
        return
    if context.is_missing(name):
        return
    if (state := context.request_subtree(name, leaf.content, hint)) is None:
        return
    saved = [name, *context.saved.below(name)]
    left_out = [
        leaf for leaf in saved if leaf in context.saved.leaves and not context.is_selected(leaf)
    ]
    left_out += [out for out in context.saved.left_out if out.startswith(f"{name}.")]
    fact = f"{name}: a {type(leaf.owner).__name__} is loaded as a whole, but "
    if left_out:
        context.problems.append(f"{fact}{left_out[0]!r} is left out: exclude all of it")
    sources = dict.fromkeys(map(context.saved.source_text, context.saved.below(name)))
    first, *further = sources or [""]
    if further:
        context.problems.append(
            f"{fact}a part of it was saved{first}, and another{further[0]}: exclude it from one "
            "of the two"
        )
    try:
        saved_by = context.saved.catalog_of(saved[0]).world_size
        check_ranks(leaf.owner, saved_by, context.template.world_size)
        if isinstance(leaf.owner, DataPosition):
            leaf.owner.check(state())  # it has no tensors, so nothing is left to read
    except IncompatibleError as error:
        context.problems.append(f"{name}: {error}")
    _check_read_keys(context, name, leaf.owner, leaf.content, state)
    if not is_inner:  # the outer one also checks the objects inside this one
        what = f"state_dict() of {type(leaf.owner).__name__}"
        remedy = f"make it before the load, so that {what} returns it, or exclude {name!r}"
        context.check_objects(name, remedy)
    _load_object(context, name, leaf.owner, state, is_inner=is_inner)


def _check_read_keys(
    context: BindContext, name: str, owner: object, live: Tree, saved: Value
) -> None:
    """Report keys that an object reads and that were not saved, as of a disabled GradScaler."""
    live_keys = live_children(live)
    saved_keys: Collection[object] = ()
    if isinstance(saved, NewContainer):
        saved_keys = saved.items
    elif isinstance(saved, FixedValue) and isinstance(saved.value, Mapping):
        saved_keys = saved.value
    if keys := find_missing_keys(owner, live_keys, saved_keys):
        cls = type(owner).__name__
        is_empty = " (it was saved with an empty state, as if disabled)" * (not saved_keys)
        context.problems.append(
            f"{name}: load_state_dict of {cls} needs {listed(keys)}, which "
            f"{'were' if len(keys) > 1 else 'was'} not saved{context.saved.source_text(name)}"
            f"{is_empty}: create the {cls} as it was saved, or exclude {name!r} to start it anew"
        )


def _load_object(
    context: BindContext, name: str, owner: object, saved: Value, *, is_inner: bool
) -> None:
    def load() -> None:
        state = saved()
        with calling_user_code(name, owner, "load_state_dict"):
            load_position(owner, state)

    inner_loads = context.inner_loads
    if is_inner:
        inner_loads.setdefault(id(owner), cache(load))

    def load_once() -> None:
        inner_loads.get(id(owner), load)()  # the inner one may be bound after this

    context.object_loads.append((name, load_once))
