"""Convert optimizers over FSDP1's flat parameters to optimizers over the original parameters.

With `use_orig_params=True` an optimizer has this rank's elements of each parameter. Otherwise it
has the flat parameters, and one state for all parameters in a flat parameter. A checkpoint always
has the state of each parameter under its name, as from any other optimizer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dist_ckpt.core.state.fsdp1.fsdp1_modules import ParameterPart
from dist_ckpt.core.state.fsdp1.fsdp1_private_names import is_flattened
from dist_ckpt.core.state.optimizer_state import OptimizerState
from dist_ckpt.core.state.tree.containers import child_name
from dist_ckpt.core.state.tree.state_tree import (
    Branch,
    ModuleLeaf,
    ObjectLeaf,
    OptimizerLeaf,
    PlainLeaf,
    SubclassLeaf,
    TensorLeaf,
    Tree,
    children_of,
    read_value,
    walk,
)
from dist_ckpt.core.state.wrappers import FlatShard
from dist_ckpt.errors import IncompatibleError

ByParameter = Mapping[int, tuple[ParameterPart, ...]]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FlatOptimizer(OptimizerState):
    """A view of an optimizer over flat parameters. Its state is by part, not by flat parameter.

    `real` is the optimizer's own state. `parts` are the parts in each of its parameters. The
    tensors of `state` are views of the optimizer's memory, so a load fills them in place.
    `write_back` copies all other loaded values, and the groups, to the optimizer.
    """

    real: OptimizerState
    parts: Mapping[torch.Tensor, tuple[ParameterPart, ...]]
    fqn: str

    @staticmethod
    def wrap(real: OptimizerState, by_parameter: ByParameter, fqn: str) -> FlatOptimizer:
        """Create the view of an optimizer. Raises ValueError for state that cannot be cut."""
        parts = {
            parameter: by_parameter[id(parameter)]
            for group in real.groups
            for parameter in group["params"]
            if id(parameter) in by_parameter
        }
        groups = [
            {**group, "params": [part for p in group["params"] for part in parts.get(p, (p,))]}
            for group in real.groups
        ]
        flat = FlatOptimizer(
            real.optimizer,
            groups,
            defaultdict(dict),
            real.defaults,
            real=real,
            parts=parts,
            fqn=fqn,
        )
        for parameter, entries in real.state.items():
            if parameter not in parts:
                flat.state[parameter] = entries
                continue
            for part in parts[parameter]:
                if part.original.parameter is not None and not part.original.numel:
                    continue  # without elements here, its state (a step count) is not needed
                flat.state[part] = {
                    key: flat._slice_entry(value, part, key) for key, value in entries.items()
                }
        return flat

    def parts_in_one_state(self) -> list[tuple[ParameterPart, ...]]:
        """Return the parts of each flat parameter, if they share one state."""
        return [parts for parts in self.parts.values() if parts[0].original.parameter is None]

    def write_back(self) -> None:
        """Copy loaded values to the optimizer.

        Raises IncompatibleError if parts that share one state were saved with different values.
        """
        for group, seen in zip(self.real.groups, self.groups, strict=True):
            group.update((key, value) for key, value in seen.items() if key != "params")
        real = self.real.state
        whole = {k: v for k, v in self.state.items() if not isinstance(k, ParameterPart)}
        for parameter in [key for key in real if key not in self.parts and key not in whole]:
            del real[parameter]
        real.update(whole)
        for parameter, parts in self.parts.items():
            if not any(self.state.get(part) for part in parts):
                real.pop(parameter, None)
            # Parts without elements get no gradient from FSDP1, and so no optimizer state.
            elif parameter in real or any(part.original.numel for part in parts):
                entries = self._join_parts(parameter, parts)
                real[parameter].clear()
                real[parameter].update(entries)
            for part in parts:
                self.state.pop(part, None)

    def _slice_entry(self, value: object, part: ParameterPart, key: str) -> object:
        """Return the slice of a state entry that belongs to a part."""
        original, has_own = part.original, part.original.parameter is not None
        shape = part.shape if has_own else tuple(part.flat.shard.shape)
        if isinstance(value, torch.Tensor) and tuple(value.shape) == shape:
            local = value if has_own else original.slice_row(value.detach())
            return FlatShard(local, original.shape, original.start)
        if isinstance(value, torch.Tensor) and not value.ndim:
            # A copy for each part, as each may have been saved with another value.
            return value if has_own else value.detach().clone()
        if isinstance(read_value(value, key), PlainLeaf):
            return value
        raise ValueError(
            f"{self.fqn}: the state {key!r} of {type(self.optimizer).__name__} cannot be cut "
            f"into that of the parameters in FSDP1's flat one of shape {shape}: use `fully_shard`"
        )

    def _join_parts(
        self, parameter: torch.Tensor, parts: Sequence[ParameterPart]
    ) -> dict[str, object]:
        states = [self.state.get(part, {}) for part in parts]
        if any(state.keys() != states[0].keys() for state in states):
            raise self._mismatch_error("state")
        before = self.real.state.get(parameter, {})
        return {
            key: self._join_entries([state[key] for state in states], parts, before.get(key), key)
            for key in states[0]
        }

    def _join_entries(
        self, values: Sequence[Any], parts: Sequence[ParameterPart], before: Any, key: str
    ) -> object:
        first, part = values[0], parts[0]
        if part.original.parameter is not None:
            if isinstance(first, FlatShard):  # in the shape of the optimizer's parameter
                first = first.tensor
                return first if first.shape == part.shape else first.view(part.shape)
            return first
        if isinstance(first, FlatShard):  # FSDP1's tensor has the entries of all parts in one row
            like = part.flat.shard
            if isinstance(before, torch.Tensor) and before.shape == like.shape:
                row = before
            else:
                row = torch.zeros_like(like, dtype=first.tensor.dtype)
            for value, part in zip(values, parts, strict=True):
                target = part.original.slice_row(row)
                if target.data_ptr() != value.tensor.data_ptr():
                    target.copy_(value.tensor)
            return row
        if any(not _equal(first, value) for value in values):
            raise self._mismatch_error(repr(key))
        if isinstance(before, torch.Tensor) and isinstance(first, torch.Tensor):
            return before.copy_(first)
        return first

    def _mismatch_error(self, label: str) -> IncompatibleError:
        return IncompatibleError(
            f"{self.fqn}: parameters that were saved with another {label} each are in one flat "
            "parameter here, which has one for all: wrap the model with use_orig_params=True"
        )


def with_original_params(root: Branch) -> Branch:
    """Replace each optimizer over flat parameters by a `FlatOptimizer`, and return the state.

    Raises ValueError if the module of a flat parameter is not in the state, or is in it twice.
    """
    parts: dict[int, tuple[ParameterPart, ...]] = {}
    is_over_flat = False
    for fqn, leaf in walk(root, tensors=False):
        if isinstance(leaf, OptimizerLeaf):
            is_over_flat = is_over_flat or any(map(is_flattened, leaf.state.parameters()))
        elif isinstance(leaf, ModuleLeaf):
            flats = (part.flat for part in leaf.state.parts if part.flat is not None)
            for key, flat_parts in (pair for flat in flats for pair in flat.parts().items()):
                if parts.setdefault(key, flat_parts) is not flat_parts:
                    raise ValueError(
                        f"{fqn}: its FullyShardedDataParallel is in the state twice: add it once"
                    )
    if not is_over_flat:
        return root
    children = {
        key: _replace_optimizers(child, str(key), parts) for key, child in root.children.items()
    }
    return replace(root, children=children)


def _replace_optimizers(tree: Tree, fqn: str, parts: ByParameter) -> Tree:
    match tree:
        case Branch():
            children = {
                k: _replace_optimizers(t, child_name(fqn, k), parts)
                for k, t in tree.children.items()
            }
            return replace(tree, children=children)
        case ObjectLeaf():
            return ObjectLeaf(tree.owner, _replace_optimizers(tree.content, fqn, parts))
        case OptimizerLeaf():
            return _replace_optimizer(tree, fqn, parts)
    return tree


def _replace_optimizer(leaf: OptimizerLeaf, fqn: str, parts: ByParameter) -> OptimizerLeaf:
    parameters = leaf.state.parameters()
    for parameter in parameters:
        if is_flattened(parameter) and id(parameter) not in parts:
            raise ValueError(
                f"{fqn}: a parameter of shape {tuple(parameter.shape)} is a flat part of one of "
                "FullyShardedDataParallel: add that module itself to the state too"
            )
    if not any(id(parameter) in parts for parameter in parameters):
        return leaf
    # The parameter of a tensor outside `state` is unknown.
    for key, tree in leaf.further.items():
        if _has_tensors(tree):
            raise ValueError(
                f"{child_name(fqn, key)}: {type(leaf.state.optimizer).__name__} returns tensors "
                "besides its state, which cannot be cut into those of the parameters in FSDP1's "
                "flat ones: use `fully_shard`"
            )
    flat, names = FlatOptimizer.wrap(leaf.state, parts, fqn), leaf.names
    if names is not None and flat.parts_in_one_state():
        raise ValueError(
            f"{fqn}: dc.Named names a flat parameter of FullyShardedDataParallel, which is several "
            "in one: remove dc.Named, the module gives their names"
        )
    if names is not None:
        names = {
            id(part): names[id(parameter)]
            for parameter in parameters
            for part in parts.get(id(parameter), (parameter,))
        }
    return OptimizerLeaf(flat, names, leaf.further, leaf.live)


def _has_tensors(tree: Tree) -> bool:
    if isinstance(tree, TensorLeaf):
        return not isinstance(tree.value, torch.Tensor) or tree.value.ndim > 0
    return isinstance(tree, SubclassLeaf) or any(map(_has_tensors, children_of(tree).values()))


def _equal(first: object, second: object) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return torch.equal(first, second)
    return first == second
