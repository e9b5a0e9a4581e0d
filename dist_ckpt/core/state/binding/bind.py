"""The loading side of a state: which live memory each saved name goes to.

    survey(state) -> Template           what the state asks for (template.py)
    bind(template, saved) -> Binding    decides by names and kinds; every problem is listed
    binding.wanted -> load plan         all ranks agree that there is no problem
    binding.allocate() -> targets       memory that does not exist yet; the reader fills all
    binding.settle()                    what shares memory gets what was read for it
    binding.place()                     plain values and new tensors go where they belong
    binding.load_objects()              load_state_dict, set_extra_state; generators last

`bind` changes nothing that the user holds, and no optimizer state is made before `allocate`,
which makes memory that `place` hangs in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from operator import itemgetter
from typing import assert_never

from dist_ckpt.core.format.index.index import Key
from dist_ckpt.core.planning.plan import TensorRequest
from dist_ckpt.core.planning.selection import Selection
from dist_ckpt.core.runtime.gc_pause import paused_collector
from dist_ckpt.core.shard_io.memory.protocol import Target
from dist_ckpt.core.state.binding.bind_modules import bind_module
from dist_ckpt.core.state.binding.bind_optimizers import bind_optimizer
from dist_ckpt.core.state.binding.bind_requests import BindContext
from dist_ckpt.core.state.binding.sources.rename import rules_for
from dist_ckpt.core.state.binding.sources.saved_tree import SavedTree, saved_tree_of
from dist_ckpt.core.state.binding.sources.scopes import Scopes
from dist_ckpt.core.state.binding.targets.load_values import (
    ConstantValue,
    NewContainer,
    Value,
    filled,
    taken,
)
from dist_ckpt.core.state.binding.template import Template, read_template
from dist_ckpt.core.state.tree.containers import entries_of, join, kind_of
from dist_ckpt.core.state.tree.leaves import (
    Branch,
    ModuleLeaf,
    ObjectLeaf,
    OptimizerLeaf,
    PerRankLeaf,
    PlainLeaf,
    SubclassLeaf,
    TensorLeaf,
    Tree,
    frozen_names,
)
from dist_ckpt.core.state.tree.read_tree import calling_user_code, has_state
from dist_ckpt.core.state.wrappers import RNG
from dist_ckpt.data.data_position import DataPosition, check_ranks
from dist_ckpt.errors import MAX_LISTED, IncompatibleError

__all__ = ["Binding", "Template", "bind", "read_template", "saved_tree_of", "unexpected_problem"]


def bind(
    template: Template,
    saved: SavedTree,
    *,
    strict: bool,
    selection: Selection | Scopes,
    keys: Mapping[str, Sequence[Key]] | None = None,
    cast: Selection | None = None,
) -> Binding:
    """Decide what goes where. What does not fit is not raised, but in `Binding.problems`.

    `cast` are the names whose values may be converted into another dtype; None for none. `keys` are
    the keys of all ranks' per-rank templates; None where this rank is alone. Raises CorruptError if
    a value is in none of the files.
    """
    requests = BindContext(template, saved, selection, keys, strict=strict, cast=cast)
    if not saved.problems:
        _bind_root(requests, template.root)
    return Binding(requests)


class Binding:
    """Where everything goes, on this rank.

    `problems`: shape, dtype, kind, coverage; under `strict` also missing names. `missing`:
    names that the state asks for and the checkpoint lacks. `unclaimed`: saved names that this
    rank's state does not ask for, as the catalog has them; those that no rank asks for are
    unexpected (`unexpected_problem` words the error). `dropped`: what a policy or a rename left
    out. `unmatched`: the problems of patterns that match no name. `makes_memory`: whether
    `allocate` makes tensors, or only says where those of the state are; `places`, `loads_objects`:
    whether the methods `place` and `load_objects` have anything to do.
    """

    def __init__(self, requests: BindContext) -> None:
        self._requests = requests
        saved = requests.saved
        self.missing = tuple(requests.missing)
        self.dropped = tuple(requests.dropped)
        self.restored = tuple(requests.restored)
        self.resharded = tuple(requests.targets.resharded)
        self.wanted: tuple[TensorRequest, ...] = requests.targets.wanted()
        self.makes_memory = bool(requests.targets.fresh)
        self.places = bool(requests.assigns or requests.effects)
        self.loads_objects = bool(requests.loads or requests.generators)
        self.unclaimed = requests.unclaimed()
        self.unmatched = () if saved.problems else requests.unmatched()
        self.problems = (*saved.problems, *requests.problems)
        if saved.problems:
            # A rename that makes no sense: what is at which name will only be known without it.
            self.unclaimed = ()
        elif requests.strict and self.missing:
            self._explain_missing()
        if not self.problems:
            self.problems = tuple(self._strange_generators())

    def _strange_generators(self) -> Iterator[str]:
        """Yield what cannot be set: where all else fits, for it may need a function of the user."""
        for name, generators, saved in self._requests.generators:
            try:
                generators.check(saved())
            except IncompatibleError as error:
                yield f"{name}: {error}"

    def _explain_missing(self) -> None:
        """Report missing names, and those which are only called otherwise as that alone."""
        saved = self._requests.saved
        taken = saved.leaves.keys() - set(self.unclaimed)
        # Rules for names that the user's own rename has made would say nothing of what to add.
        free = self.unclaimed if saved.is_as_saved() else ()
        rules, found = rules_for(self.missing, free, taken)
        if found:
            self.problems += (misnamed_problem([*found], rules),)
            self.unclaimed = tuple(fqn for fqn in self.unclaimed if fqn not in found.values())
        # A group of parameters that are called otherwise is missing, though it is there.
        known = {*found, *(name for name in self.missing if found and name in saved.leaves)}
        lacking: dict[tuple[str, ...] | None, list[str]] = {}
        for name in self.missing:
            if name not in known:
                lacking.setdefault(self._requests.looked_in(name), []).append(name)
        frozen = frozen_names(self._requests.template.root) if lacking else frozenset()
        self.problems += tuple(
            missing_problem(some, where, are_frozen=frozen.issuperset(some))
            for where, some in lacking.items()
        )

    def allocate(self) -> Mapping[tuple[str, int], Target]:
        """Return the memory of each wanted cell, by tensor and number. Call it once."""
        with paused_collector():
            return self._requests.targets.allocate()

    def settle(self) -> None:
        """Fill the tensors that share memory, once all is read, and wait for accelerators.

        Raises IncompatibleError if what was saved differs where they share it.
        """
        self._requests.targets.settle()

    def place(self) -> None:
        """Put plain values and new tensors where they belong; those of modules first.

        These by their names in order, as in `load_objects`: a class may have its own way to load.
        """
        for _, assign in sorted(self._requests.assigns, key=itemgetter(0)):
            assign()
        for effect in self._requests.effects:
            effect()

    def load_objects(self) -> None:
        """Call load_state_dict and set_extra_state of the state's objects; generators last.

        By their names in order: there may be collectives in it, and ranks' keys may not be in one.
        """
        for _, load in sorted(self._requests.loads, key=itemgetter(0)):
            load()
        for _, generators, saved in self._requests.generators:
            generators.restore(saved())


def missing_problem(
    names: Sequence[str], looked_in: Sequence[str] | None = None, *, are_frozen: bool = False
) -> str:
    """Word the error about names that the state asks for and the checkpoint lacks.

    Of several sources `looked_in` are those in which they were looked for; None if there is one.
    `are_frozen`: all of them are parameters that require no gradient.
    """
    who = "the checkpoint lacks"
    if looked_in is not None:
        who = f"{' and '.join(looked_in)} lack{'s' * (len(looked_in) == 1)}"
    remedy = f"remove {_them(names)} from the state or `exclude` what it shall not restore"
    told = _counted(names)
    if are_frozen:
        told += f", which require{'s' * (len(names) == 1)} no gradient"
        remedy += ", load with include_frozen=False if it was saved with that"
    if looked_in == ():
        who, remedy = "no source is given for", f"give {_them(names)} one, {remedy}"
    return f"{who} {told}: {remedy}, or load with strict=False"


def misnamed_problem(names: Sequence[str], rules: Mapping[str, str]) -> str:
    """Word the error about names that the checkpoint has with another prefix."""
    return (
        f"the checkpoint has another prefix for {_counted(names)}, as a module has inside and "
        f"outside of a wrapper or a list: load with rename={dict(rules)!r}"
    )


def unexpected_problem(names: Sequence[str], holder: str = "the checkpoint") -> str:
    """Word the error about saved names that no rank asks for."""
    return (
        f"the state does not ask for {_counted(names)}, which {holder} holds: put None or "
        "{} there to take what was saved, say with `include` what to load (such as "
        "include=['model']), or load with strict=False"
    )


def _counted(names: Sequence[str]) -> str:
    if len(names) <= MAX_LISTED:
        return f"{len(names)} names: " * (len(names) > 1) + ", ".join(names)
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.partition(".")[0], []).append(name)
    some = [_some(group) for group in groups.values()]
    more = f", and more in {len(some) - MAX_LISTED} others" if len(some) > MAX_LISTED else ""
    return f"{len(names)} names: {', '.join(some[:MAX_LISTED])}{more}"


def _some(group: Sequence[str]) -> str:
    above = group[0].partition(".")[0]
    return group[0] + f" and {len(group) - 1} more in {above!r}" * (len(group) > 1)


def _them(names: Sequence[str]) -> str:
    return "them" if len(names) > 1 else "it"


# --- one walk over a template: each leaf asks for what was saved under its name ---------------


def _bind_root(requests: BindContext, root: Branch) -> None:
    value = _branch(requests, "", root) if root.children else requests.subtree("")
    if isinstance(value, NewContainer):  # an empty state takes all
        value = partial(filled, root.kind, root.live, value.items)
    if value is not None:
        requests.effects.append(value)


def _bind(requests: BindContext, name: str, tree: Tree) -> Value | None:
    """Bind what is at a name; return what to put there instead, or None to leave it."""
    match tree:
        case Branch():
            return _branch(requests, name, tree)
        case TensorLeaf():
            return _tensor(requests, name, tree)
        case SubclassLeaf():
            requests.subclass_tensor(name, tree)
        case PlainLeaf():
            return _plain(requests, name, tree.value)
        case PerRankLeaf():
            _per_rank(requests, name, tree)
        case ModuleLeaf():
            bind_module(requests, name, tree)
        case OptimizerLeaf():
            bind_optimizer(requests, name, tree)
        case ObjectLeaf():
            _object(requests, name, tree)
        case _:
            assert_never(tree)
    return None


def _branch(requests: BindContext, name: str, tree: Branch) -> Value | None:
    requests.split(name)
    requests.check_keys(name, tree.children)
    bound = {key: _bind(requests, join(name, key), child) for key, child in tree.children.items()}
    found = {key: value for key, value in bound.items() if value is not None}
    return partial(filled, tree.kind, tree.live, found) if found else None


def _tensor(requests: BindContext, name: str, leaf: TensorLeaf) -> Value | None:
    if not requests.takes(name):
        return None
    value = requests.targets.fill(name, leaf)
    return None if value is leaf.value else ConstantValue(value)


def _plain(requests: BindContext, name: str, live: object) -> Value | None:
    if live is None or (isinstance(live, Mapping) and not live):
        saved = None if requests.is_missing(name) else requests.subtree(name)
        return None if saved is None else partial(taken, live, saved)
    if not requests.selected(name) and not requests.chosen(name):
        return None
    value = requests.value(name) if requests.selected(name) else None
    if value is not None:
        return value
    entries = entries_of(live)
    if entries is None or not requests.is_container(name):
        requests.report_mismatch(name, "a value without tensors")
        return None
    children = {key: PlainLeaf(item) for key, item in entries.items()}
    return _branch(requests, name, Branch(kind_of(live) or "dict", live, children))


def _per_rank(requests: BindContext, name: str, leaf: PerRankLeaf) -> None:
    wrapper = leaf.wrapper
    if not requests.selected(name):
        return
    saved = requests.per_rank(name, wrapper)
    if saved is None:
        return
    if isinstance(wrapper, RNG):
        # It is looked at before anything is set, and a function of the user may not be pure.
        requests.generators.append((name, wrapper, cache(saved)))
    elif has_state(wrapper.value):
        _load(requests, name, wrapper.value, saved)
    else:
        requests.effects.append(lambda: setattr(wrapper, "value", saved()))


def _object(requests: BindContext, name: str, leaf: ObjectLeaf) -> None:
    """Ask for all of an object's state: it says itself what it takes of it."""
    if requests.selected(name) and requests.saved.keys_of(name) is not None:
        remedy = "load it in a dc.PerRank as it was saved in"
        requests.report_mismatch(name, f"a {type(leaf.owner).__name__}", remedy)
        return
    if requests.is_missing(name) or (state := requests.subtree(name, leaf.content)) is None:
        return
    saved = [name, *requests.saved.below(name)]
    left_out = [
        leaf for leaf in saved if leaf in requests.saved.leaves and not requests.selected(leaf)
    ]
    left_out += [out for out in requests.saved.left_out if out.startswith(f"{name}.")]
    what = f"{name}: a {type(leaf.owner).__name__} is loaded as a whole, but "
    if left_out:
        requests.problems.append(f"{what}{left_out[0]!r} is left out: exclude all of it")
    first, *others = dict.fromkeys(map(requests.saved.where, requests.saved.below(name))) or [""]
    if others:
        requests.problems.append(
            f"{what}some of it is found{first}, and some{others[0]}: exclude it from one of the two"
        )
    try:
        saved_by = requests.saved.catalog_of(saved[0]).world_size
        check_ranks(leaf.owner, saved_by, requests.template.world_size)
        if isinstance(leaf.owner, DataPosition):
            leaf.owner.check(state())  # it has no tensors: all of it is known
    except IncompatibleError as error:
        requests.problems.append(f"{name}: {error}")
    _load(requests, name, leaf.owner, state)


def _load(requests: BindContext, name: str, owner: object, saved: Value) -> None:
    def load() -> None:
        state = saved()
        with calling_user_code(name, owner, "load_state_dict"):
            owner.load_state_dict(state)  # type: ignore[attr-defined]

    requests.loads.append((name, load))
