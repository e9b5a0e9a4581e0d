"""Read a state as a tree of leaves: one leaf class for each kind of value.

`state/inventory_builder.py` stores the leaves; `state/binding/bind.py` finds their saved values.
Reading calls `state_dict` of each object and module once, in the order of their names, and changes
nothing. An optimizer class with its own `state_dict` is read by it; others are read directly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dist_ckpt.core.format.geometry import Shape
from dist_ckpt.core.format.strict_json import is_text
from dist_ckpt.core.planning.name_selection import Selection
from dist_ckpt.core.runtime.torch_private import local_tensor
from dist_ckpt.core.state.fsdp1.fsdp1_modules import check_not_flattened
from dist_ckpt.core.state.module_tensors import ModuleState, flat_state, merge_states, module_state
from dist_ckpt.core.state.optimizer_state import (
    OptimizerState,
    check_unnamed,
    direct_state,
    reported_state,
)
from dist_ckpt.core.state.tensors.local_tensors import PLAIN, is_array
from dist_ckpt.core.state.tensors.locate_tensor import is_meta, is_tensor_leaf
from dist_ckpt.core.state.tensors.tensor_subclasses import (
    inner_shards,
    inner_tensors,
    is_wrapper_subclass,
    subclass_record,
    unwrap,
)
from dist_ckpt.core.state.tree.containers import (
    MAX_DEPTH,
    RECORD,
    PathKey,
    State,
    child_name,
    container_entries,
    container_kind,
    is_mapping,
)
from dist_ckpt.core.state.wrappers import RNG, Named, PerRank
from dist_ckpt.errors import CheckpointError


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """A container with tensors in it. `live` is the user's container; None if the user has none."""

    kind: str
    live: object
    children: Mapping[PathKey, Tree]


@dataclass(frozen=True, slots=True, eq=False)
class TensorLeaf:
    """A tensor, a local part of one, or a numpy array.

    For optimizer state, `parameter` has the parameter's name in the rules of a ShardingConfig, and
    its local shape.
    """

    value: object
    parameter: tuple[str, Shape] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SubclassLeaf:
    """A tensor subclass: its inner tensors by attribute, and the record that describes it."""

    value: torch.Tensor
    inner: Mapping[str, TensorLeaf | SubclassLeaf]
    record: Mapping[str, object]


@dataclass(frozen=True, slots=True, eq=False)
class PlainLeaf:
    """Plain data, or any other value: a save refuses it if it is not plain data."""

    value: object


@dataclass(frozen=True, slots=True, eq=False)
class ModuleLeaf:
    """A module, and the leaves of its state dict. `live` is the user's module, or list of parts."""

    state: ModuleState
    children: Mapping[PathKey, Tree]
    live: object


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerLeaf:
    """An optimizer, with the user's names of its parameters, by id().

    `further` are the entries of its `state_dict` besides the groups and the parameters' state. A
    view replaces an optimizer over flat parameters of FSDP1: `state/fsdp1/fsdp1_optimizers.py`.
    `live` is the user's optimizer, or its `Named`.
    """

    state: OptimizerState
    names: Mapping[int, str] | None
    further: Mapping[PathKey, Tree]
    live: object


@dataclass(frozen=True, slots=True, eq=False)
class ObjectLeaf:
    """An object with `load_state_dict`, and the result of its `state_dict`."""

    owner: object
    content: Tree


Tree = (
    Branch
    | TensorLeaf
    | SubclassLeaf
    | PlainLeaf
    | PerRank
    | RNG
    | ModuleLeaf
    | OptimizerLeaf
    | ObjectLeaf
)


def walk(tree: Tree, fqn: str = "", *, tensors: bool = True) -> Iterator[tuple[str, Tree]]:
    """Yield the name and node of all nodes at and below `fqn`. `tensors=False` is much faster."""
    if fqn:
        yield fqn, tree
    if isinstance(tree, ObjectLeaf):
        yield from walk(tree.content, fqn, tensors=tensors)
        return
    for key, child in children_of(tree).items():
        if not isinstance(child, TensorLeaf):
            yield from walk(child, child_name(fqn, key), tensors=tensors)
        elif tensors:
            yield child_name(fqn, key), child  # without a generator for each


def without_frozen(selection: Selection, root: Tree) -> Selection:
    """Add the names of the state's frozen parameters to a selection that leaves them out."""
    if selection.include_frozen:
        return selection
    trained = requires_grad(root)
    frozen = frozenset(name for name in trained if not trained[name])
    return replace(selection, frozen=frozen, has_parameters=bool(trained))


def requires_grad(root: Tree) -> dict[str, bool]:
    """Return for each parameter of a state, by name, whether it requires a gradient."""
    named: dict[str, bool] = {}
    for fqn, tree in walk(root):
        if isinstance(tree, ModuleLeaf):
            named |= {
                child_name(fqn, name): trained for name, trained in tree.state.parameters().items()
            }
        elif isinstance(tree, TensorLeaf) and isinstance(tree.value, torch.nn.Parameter):
            named[fqn] = tree.value.requires_grad
    return named


# A function that returns the names of an optimizer that a selection can match.
OptimizerNames = Callable[[str, OptimizerLeaf], Iterable[str]]


def selectable_names(tree: Tree, optimizer_names: OptimizerNames, fqn: str = "") -> Iterator[str]:
    """Yield the names at and below `fqn` that a selection can match."""
    if fqn:
        yield fqn
    if isinstance(tree, OptimizerLeaf):
        yield from optimizer_names(fqn, tree)
    elif isinstance(tree, Branch | ModuleLeaf):
        for key, child in tree.children.items():
            yield from selectable_names(child, optimizer_names, child_name(fqn, key))


def select_leaves(
    tree: Tree, fqn: str, selection: Selection, optimizer_names: OptimizerNames
) -> Tree | None:
    """Return the selected part of a tree; None if nothing is selected.

    An object or a tensor subclass is selected as a whole. An optimizer is selected if any name in
    it is. Raises ValueError if a list would lose an item.
    """
    if isinstance(tree, OptimizerLeaf):
        names = (fqn, *optimizer_names(fqn, tree))
        return tree if any(name in selection for name in names) else None
    if not isinstance(tree, Branch | ModuleLeaf):
        return tree if fqn in selection else None
    chosen = {
        key: child
        for key, whole in tree.children.items()
        if (child := select_leaves(whole, child_name(fqn, key), selection, optimizer_names))
        is not None
    }
    if not chosen and (tree.children or fqn not in selection):
        return None
    if isinstance(tree, ModuleLeaf):
        return replace(tree, children=chosen)
    if not is_mapping(tree.kind) and len(chosen) < len(tree.children):
        lost = next(key for key in tree.children if key not in chosen)
        raise ValueError(
            f"{child_name(fqn, lost)}: an item of a {tree.kind} cannot be left out of a save, "
            f"because the others would move. Leave all of {fqn!r} out, or make it a dict"
        )
    return replace(tree, children=chosen)


def children_of(tree: Tree | None) -> Mapping[PathKey, Tree]:
    """Return the children of a leaf or branch by key; for an object, those of its content."""
    match tree:
        case Branch() | ModuleLeaf():
            return tree.children
        case SubclassLeaf():
            children: dict[PathKey, Tree] = {RECORD: PlainLeaf(tree.record)}
            return dict(tree.inner) | children
        case OptimizerLeaf():
            return tree.further
        case ObjectLeaf():
            return children_of(tree.content)
    return {}


def read_state(state: State) -> Branch:
    """Read a state as a tree.

    Raises TypeError if the state is not a mapping, TypeError or ValueError for a value in it.
    """
    if not isinstance(state, Mapping):
        raise TypeError(
            f"the state is a {type(state).__name__}: give a mapping such as "
            "{'model': model, 'optim': optimizer}"
        )
    return Branch(container_kind(state) or "dict", state, _children(dict(state), "", (id(state),)))


def read_value(value: object, fqn: str, above: tuple[int, ...] = ()) -> Tree:
    """Read a value as a tree. `above` are the id()s of its containers, to refuse a cycle."""
    leaf = _leaf(value, fqn)
    return leaf if leaf is not None else _read_further(value, fqn, above)


def read_tensor(value: object, fqn: str) -> TensorLeaf | SubclassLeaf:
    """Read a tensor as a leaf; a tensor subclass is split into its inner tensors.

    Raises TypeError if an inner tensor is not a tensor.
    """
    if isinstance(value, DTensor):
        local = local_tensor(value)
        return TensorLeaf(value) if type(local) in PLAIN else _read_sharded(value, local, fqn)
    if not is_meta(value):
        value = unwrap(value)
    if type(value) in PLAIN or not is_wrapper_subclass(value):
        return TensorLeaf(value)
    inner = inner_tensors(value, fqn)
    leaves = {name: read_tensor(tensor, child_name(fqn, name)) for name, tensor in inner.items()}
    return SubclassLeaf(value, leaves, subclass_record(value, fqn))


def _read_sharded(value: DTensor, local: torch.Tensor, fqn: str) -> TensorLeaf | SubclassLeaf:
    if is_wrapper_subclass(local) and local.is_meta:
        inner = inner_tensors(local, fqn)
        return SubclassLeaf(value, {name: TensorLeaf(t) for name, t in inner.items()}, {})
    local = unwrap(local)
    if type(local) in PLAIN or not is_wrapper_subclass(local):
        return TensorLeaf(value)
    shards, single = inner_shards(value, local, fqn)
    record = subclass_record(local, fqn, tuple(value.shape))
    if single is not None:
        record["for_each_shard"] = single
    return SubclassLeaf(value, {name: TensorLeaf(shard) for name, shard in shards.items()}, record)


def has_state(value: object) -> bool:
    """Return True for an object with `state_dict` and `load_state_dict`."""
    return not isinstance(value, type) and all(
        callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict")
    )


def read_state_dict(value: object, fqn: str) -> object:
    """Return an object's state dict, or the value itself."""
    if not has_state(value):
        return value
    get: Callable[[], object] = value.state_dict  # type: ignore[attr-defined]  # checked above
    with calling_user_code(fqn, value, "state_dict"):
        return get()


@contextmanager
def calling_user_code(fqn: str, owner: object, method: str) -> Iterator[None]:
    """Convert errors of the user's code to a CheckpointError with the name and the method."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # user code may raise anything
        cls = owner if isinstance(owner, type) else type(owner)
        raise CheckpointError(
            f"{fqn}: {method} of {cls.__name__} raised {type(error).__name__} ({error}): "
            "fix it and call again"
        ) from error


# A container with only values of these types is plain. Long containers need no walk.
_ATOMS = frozenset({bool, int, float, complex, str, bytes, type(None)})


def _read_further(value: object, fqn: str, above: tuple[int, ...]) -> Tree:
    if isinstance(value, Named | Optimizer):
        return _read_optimizer(value, fqn, above)
    entries = container_entries(value)
    if entries is None and not has_state(value):
        return PlainLeaf(value)
    if id(value) in above:
        raise ValueError(f"{fqn}: the state contains itself here: break the cycle")
    if len(above) >= MAX_DEPTH:
        raise ValueError(f"{fqn}: nested deeper than {MAX_DEPTH}: flatten the state")
    above = (*above, id(value))
    if isinstance(value, nn.Module):
        return _read_module(value, _read_module_state(value, fqn), fqn, above)
    if entries is None:
        return ObjectLeaf(value, read_value(read_state_dict(value, fqn), fqn, above))
    return _read_container(value, entries, fqn, above)


def _read_container(
    value: object, entries: Mapping[PathKey, object], fqn: str, above: tuple[int, ...]
) -> Branch | ModuleLeaf | PlainLeaf:
    if _ATOMS.issuperset(map(type, entries.values())):
        return PlainLeaf(value)
    if isinstance(value, list | tuple) and all(isinstance(part, nn.Module) for part in value):
        # The modules are parts of one model, unless two of them have the same names.
        states = [_read_module_state(module, child_name(fqn, n)) for n, module in enumerate(value)]
        if (whole := merge_states(states)) is not None:
            return _read_module(value, whole, fqn, above)
        models: dict[PathKey, Tree] = {
            n: _read_module(module, state, child_name(fqn, n), above)
            for n, (module, state) in enumerate(zip(value, states, strict=True))
        }
        return Branch(container_kind(value) or "list", value, models)
    children = _children(entries, fqn, above)
    if all(isinstance(child, PlainLeaf) for child in children.values()):
        return PlainLeaf(value)
    return Branch(container_kind(value) or "dict", value, children)


def _leaf(value: object, fqn: str) -> Tree | None:
    if type(value) in _ATOMS:
        return PlainLeaf(value)
    if type(value) in PLAIN or is_array(value):
        check_not_flattened(value, fqn)
        return TensorLeaf(value)
    if is_tensor_leaf(value):
        return read_tensor(value, fqn)
    if isinstance(value, PerRank | RNG):
        return value
    return None


def _children(
    entries: Mapping[PathKey, object], fqn: str, above: tuple[int, ...]
) -> dict[PathKey, Tree]:
    for key in entries:
        _check_key(key, fqn or "the state")
    leaves = {  # most children are tensors, for which no name is built here
        key: TensorLeaf(child)
        if type(child) is torch.Tensor
        else _leaf(child, child_name(fqn, key))
        for key, child in entries.items()
    }
    # All other children may run user code with collectives. So all ranks read them in the same
    # order, sorted by key.
    further = {
        key: _read_further(entries[key], child_name(fqn, key), above)
        for key in sorted((key for key, leaf in leaves.items() if leaf is None), key=str)
    }
    return {key: further[key] if leaf is None else leaf for key, leaf in leaves.items()}


def _check_key(key: object, parent: str) -> None:
    if type(key) is not str and type(key) is not int:
        raise TypeError(
            f"{parent} has the key {key!r} of class {type(key).__name__}: use str or int keys"
        )
    if isinstance(key, int) and not -(1 << 63) <= key < 1 << 64:
        raise ValueError(f"{parent} has the key {f'{key:#x}'[:40]}, outside of 64 bits: use a str")
    if key == "":
        raise ValueError(f"{parent} has an empty key: give it a name")
    if isinstance(key, str) and not is_text(key):
        raise ValueError(f"{parent} has the key {key!r}, which is not valid text: rename it")


def _read_module_state(module: nn.Module, fqn: str) -> ModuleState:
    if (flat := flat_state(module, fqn)) is not None:
        return flat
    with calling_user_code(fqn, module, "state_dict"):
        state = module_state(module)
    for name, tensor in (*state.live.items(), *state.left_out.items()):
        check_not_flattened(tensor, fqn, name)
    return state


def _read_module(live: object, state: ModuleState, fqn: str, above: tuple[int, ...]) -> ModuleLeaf:
    children: dict[PathKey, Tree] = {}
    for name, value in state.entries.items():
        if name not in state.live:
            children[name] = read_value(value, child_name(fqn, name), above)
        else:
            plain = type(value) in PLAIN  # most are, and then no name is built here
            children[name] = (
                TensorLeaf(value) if plain else read_tensor(value, child_name(fqn, name))
            )
    return ModuleLeaf(state, children, live)


def _read_optimizer(
    value: Named | Optimizer, fqn: str, above: tuple[int, ...]
) -> OptimizerLeaf | ObjectLeaf:
    optimizer, names = (
        (value.optimizer, value.by_id()) if isinstance(value, Named) else (value, None)
    )
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"{fqn}: Named holds a {type(optimizer).__name__}: give it an optimizer")
    if (state := direct_state(optimizer, fqn)) is not None:
        return OptimizerLeaf(state, names, {}, value)
    reported = read_state_dict(optimizer, fqn)
    if (state := reported_state(optimizer, reported)) is None:
        check_unnamed(optimizer, fqn)
    try:
        if state is None:
            return ObjectLeaf(optimizer, read_value(reported, fqn, above))
        return OptimizerLeaf(state, names, _children(state.further(), fqn, above), value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{error}: state_dict() of {type(optimizer).__name__} returns it; save a wrapper object"
            " whose state_dict and load_state_dict call the optimizer's and convert the value"
        ) from error
