"""Apply a ShardingConfig to a state: find the plain tensors that are parts of larger tensors."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dist_ckpt.core.format.geometry import Cell, Region, Shape
from dist_ckpt.core.planning.name_selection import names_above
from dist_ckpt.core.planning.sharding_config import (
    ShardingConfig,
    find_parameter,
    find_rule_view,
    strip_component,
)
from dist_ckpt.core.planning.tensor_views import (
    Flattened,
    MeshPlaced,
    ReplicatedAxis,
    RuleSharded,
    View,
    chunked_view,
    compute_cells,
    find_pieces_problem,
    fits_memory,
)
from dist_ckpt.core.state.tensors.local_tensors import class_name
from dist_ckpt.core.state.tensors.locate_tensor import LocalTensor
from dist_ckpt.core.state.tree.containers import child_name
from dist_ckpt.core.state.tree.state_tree import Branch, ModuleLeaf, SubclassLeaf, TensorLeaf, walk


class ShardingRules:
    """The rules of a ShardingConfig for one state. A rule applies to a name and all names below it.

    Raises ValueError if the config is for another number of ranks.
    """

    def __init__(
        self, sharding: ShardingConfig, root: Branch, *, rank: int, world_size: int
    ) -> None:
        if sharding.world_size != world_size:
            raise ValueError(
                f"the ShardingConfig's mesh {dict(sharding.mesh)} has {sharding.world_size} ranks, "
                f"the group has {world_size}: give the config of this job"
            )
        self.sharding = sharding
        self._rank = rank
        self._components = frozenset(
            str(key) for key, child in root.children.items() if not isinstance(child, TensorLeaf)
        )
        # A plain dict may be the optimizer state from torch's helpers. Its tensors follow the rule
        # of their parameter, which is in another component of the state.
        self._rule_names: dict[str, str] = {}
        shapes: dict[str, Shape] = {}
        buffers: set[str] = set()
        for fqn, leaf in walk(root):
            if isinstance(leaf, TensorLeaf) and isinstance(leaf.value, torch.Tensor):
                # Torch's helpers use the parameter names of the model (`0.weight`). Optimizers
                # here use those of the state (`model.0.weight`).
                for name in (rule_name := self._name(fqn), fqn):
                    shapes.setdefault(name, tuple(leaf.value.shape))
                    self._rule_names.setdefault(name, rule_name)
            elif isinstance(leaf, ModuleLeaf):
                live = leaf.state.live.items()
                buffers.update(
                    child_name(fqn, n) for n, t in live if not isinstance(t, nn.Parameter)
                )
        self._shapes = {**shapes, **sharding.shapes}
        self._buffers = frozenset(buffers)

    def view(
        self, fqn: str, leaf: TensorLeaf, shape: Shape
    ) -> tuple[RuleSharded, Shape] | tuple[Flattened, Shape] | None:
        """Return how the config cuts a tensor, and the shape of its entry; None if it is not cut.

        Raises ValueError if the tensor may be a flat part, but its whole shape is unknown.
        """
        name, parameter = self._find_names(fqn, leaf)
        if self.sharding.flat:
            self._check_known(fqn, leaf, parameter[0] if parameter else name, shape)
            whole = self._flat_shape(name, parameter, shape)
            return None if whole is None else (Flattened(self.sharding.ranks()), whole)
        view = find_rule_view(self.sharding, name, shape, parameter)
        return (view, shape) if any(view.axes) else None

    def names_state(self, fqn: str) -> bool:
        """Return True if a rule is for this entry of optimizer state."""
        return self.sharding.names_state(self._name(fqn))

    def cuts_plainly(self, fqn: str, leaf: TensorLeaf, view: RuleSharded, dim: int) -> bool:
        """Return True if a rule, not the default, cuts a dimension over ranks without pieces."""
        name, parameter = self._find_names(fqn, leaf)
        is_cut = prod(view.mesh.shape[axis] for axis in view.axes[dim]) > 1
        has_rule = self.sharding.has_rule(parameter[0] if parameter else name)
        return is_cut and has_rule and not view.pieces

    def check_dtensor(self, fqn: str, leaf: TensorLeaf, local: LocalTensor) -> None:
        """Raise ValueError if a rule has pieces for a DTensor that an axis of the rule cuts.

        FSDP2 may cut a whole fused parameter: its axis is another one, and the cut is plain.
        """
        placed = local.view
        if not isinstance(placed, MeshPlaced) or not self.sharding.has_pieces:
            return
        name, parameter = self._find_names(fqn, leaf)
        view = find_rule_view(self.sharding, name, local.shape, parameter)
        names = {view.mesh.names[axis] for axis in (view.axes[view.dim] if view.pieces else ())}
        for axis, size, placement in zip(
            placed.mesh.names, placed.mesh.shape, placed.placements, strict=True
        ):
            cuts = not isinstance(placement, ReplicatedAxis) and placement.dim == view.dim
            if cuts and axis in names and size > 1:
                raise ValueError(
                    f"{fqn}: its rule has pieces, but it is a DTensor that {axis!r} cuts along "
                    f"dimension {view.dim}: a DTensor has no pieces. If each rank has its part of "
                    "each piece, make it a plain tensor (`to_local()`). Otherwise leave out the "
                    "pieces"
                )

    def check_whole(self, fqn: str, leaf: SubclassLeaf) -> None:
        """Raise TypeError if the config cuts a tensor subclass: no rules cut its inner tensors."""
        value = leaf.value
        if isinstance(value, DTensor):
            return
        if self.view(fqn, TensorLeaf(value), tuple(value.shape)) is not None:
            raise TypeError(
                f"{fqn}: the ShardingConfig cuts a {class_name(value)}, which is made of other "
                "tensors: put those into the state as dc.LocalShard, or make it a DTensor"
            )

    def _find_names(self, fqn: str, leaf: TensorLeaf) -> tuple[str, tuple[str, Shape] | None]:
        """Return the name that rules match, and the parameter that the tensor belongs to."""
        name, parameter = self._name(fqn), leaf.parameter
        if parameter is None and (above := find_parameter(name, self._shapes)) is not None:
            rule_name = self._rule_names.get(above[0], above[0])
            parameter = rule_name, self._shapes[rule_name]
        return name, parameter

    def _name(self, fqn: str) -> str:
        component = next((name for name in names_above(fqn) if name in self._components), "")
        return strip_component(fqn, component)

    def _check_known(self, fqn: str, leaf: TensorLeaf, name: str, shape: Shape) -> None:
        if self.sharding.zero_stage < 3 or len(shape) != 1 or 0 in shape:
            return
        # ZeRO partitions only tensors of torch, and no buffers.
        if fqn in self._buffers or not isinstance(leaf.value, torch.Tensor):
            return
        if name not in self.sharding.shapes:
            raise ValueError(
                f"{fqn}: with flat=True and zero_stage=3 a tensor of shape {shape} may be a part "
                f"of one of any shape. Give the ShardingConfig shapes={{{name!r}: ..., ...}}, the "
                "shapes of all parameters before they are partitioned. For a tensor that is whole "
                "on every rank give its own"
            )

    def _flat_shape(
        self, name: str, parameter: tuple[str, Shape] | None, shape: Shape
    ) -> Shape | None:
        """Return the shape of the whole tensor if this tensor is a flat part, else None."""
        if parameter is None and self.sharding.zero_stage < 3:
            return None
        whole = self._shapes.get(parameter[0] if parameter else name)
        if whole is None or len(shape) != 1:
            return None
        cells = compute_cells(Flattened(self.sharding.ranks()), self._rank, whole)
        return whole if prod(shape) == sum(cell.numel for cell in cells) else None


def find_job_mesh(
    rules: ShardingRules | None, views: Iterable[View]
) -> tuple[tuple[str, int], ...]:
    """Return the job's mesh: the config's mesh, or else the largest mesh of a tensor."""
    if rules is not None:
        return tuple(rules.sharding.mesh.items())
    meshes = [view.mesh for view in views if isinstance(view, MeshPlaced)]
    if not meshes:
        return ()
    mesh = max(meshes, key=lambda mesh: prod(mesh.shape))
    return tuple(zip(mesh.names, mesh.shape, strict=True))


def target_cells(
    view: RuleSharded | Flattened, shape: Shape, rank: int, saved: Shape
) -> tuple[Cell, ...] | None:
    """Return the cells of a saved tensor in a part of `shape`; None if the shape differs."""
    if isinstance(view, RuleSharded) and (
        len(shape) != len(saved) or find_pieces_problem(view, saved)
    ):
        return None
    cells = compute_cells(
        chunked_view(view, saved) if isinstance(view, RuleSharded) else view, rank, saved
    )
    if isinstance(view, RuleSharded) and view.pieces:
        return cells if fits_memory(cells, view.dim, shape) else None
    if not cells:
        return () if 0 in shape else None
    (cell,) = cells
    if isinstance(view, RuleSharded) and isinstance(cell, Region):
        return cells if cell.shape == shape else None
    return cells if (cell.numel,) == shape else None
