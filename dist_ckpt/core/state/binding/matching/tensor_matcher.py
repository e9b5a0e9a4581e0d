"""Match a live tensor with a saved one: which cells of the saved tensor fill it on this rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from operator import mul

import torch

from dist_ckpt.core.format.geometry import Cell, ElementRange, Region, Shape
from dist_ckpt.core.format.index.index import TensorRecord
from dist_ckpt.core.planning.tensor_views import (
    Flattened,
    RuleSharded,
    Whole,
    chunked_view,
    compute_cells,
    find_pieces_problem,
)
from dist_ckpt.core.state.binding.matching.resizing import (
    Resized,
    ResizedNames,
    ResizedTensor,
    find_resized_dim,
    find_resized_shape,
)
from dist_ckpt.core.state.binding.sources.saved_tree import SavedTree
from dist_ckpt.core.state.binding.template import Template
from dist_ckpt.core.state.fsdp1.fsdp1_modules import ParameterPart
from dist_ckpt.core.state.sharding_rules import target_cells
from dist_ckpt.core.state.tensors.local_tensors import is_array
from dist_ckpt.core.state.tensors.locate_tensor import (
    LocalTensor,
    is_meta,
    locate_for_load,
    materialize,
)
from dist_ckpt.core.state.tree.state_tree import TensorLeaf


class TensorMatcher:
    """Compares the tensors of a state with the saved ones, for one load on one rank.

    - `resized_names`: the names that are resized.
    - `resized`: the rows of each resized tensor.
    - `unknown_pieces`: names with pieces in their rule, stored in parts without pieces.

    Texts of `problems` are for tensors that do not fit.
    """

    def __init__(
        self, template: Template, saved: SavedTree, problems: list[str], resize: Mapping[str, int]
    ) -> None:
        self._template = template
        self._saved = saved
        self._problems = problems
        self.resized_names = ResizedNames(resize, template, saved, problems)
        self.resized: list[ResizedTensor] = []
        self.unknown_pieces: list[str] = []

    def saved_tensor(self, name: str) -> tuple[str, TensorRecord]:
        """Return the stored name and the record of a saved tensor."""
        tensor = self._saved.tensor(name)
        assert tensor is not None, name
        return tensor

    def describe(self, value: object, name: str) -> LocalTensor:
        """Return the part of a live tensor on this rank. Raises TypeError or ValueError."""
        template = self._template
        return locate_for_load(value, name, rank=template.rank, group_ranks=template.group_ranks)

    def locate(self, name: str, leaf: TensorLeaf) -> tuple[object, LocalTensor]:
        """Return the value of a leaf, or its replacement, and its part on this rank."""
        value = leaf.value
        if is_meta(value):
            value = materialize(value)
        elif is_array(value) and not value.flags.writeable:
            value = value.copy()
        local = self.describe(value, name)
        if (rules := self._template.rules) is not None:
            rules.check_dtensor(name, leaf, local)
        return value, local

    def find_cells(
        self, name: str, local: LocalTensor, leaf: TensorLeaf, shape: Shape
    ) -> tuple[Cell, ...] | None:
        """Return the cells of a saved tensor of `shape` that fill a leaf; None if it differs."""
        if (view := self._find_rule_view(name, local, leaf)) is not None:
            if self._find_pieces_problem(name, view, leaf):
                return None
            return target_cells(view, local.shape, self._template.rank, shape)
        return local.cells if local.shape == shape else None

    def _find_live_cells(
        self, name: str, local: LocalTensor, leaf: TensorLeaf
    ) -> tuple[Shape, tuple[Cell, ...]]:
        """Return the shape of a whole tensor of the state, and the cells that this rank has of it.

        A rule's dimensions are taken as evenly cut; the ranks compare their results.
        """
        rules, rank = self._template.rules, self._template.rank
        ruled = rules and isinstance(local.view, Whole) and rules.view(name, leaf, local.shape)
        if not ruled:
            return local.shape, local.cells
        view, shape = ruled
        if isinstance(view, Flattened):
            return shape, compute_cells(view, rank, shape)
        counts = (prod(view.mesh.shape[axis] for axis in axes) for axes in view.axes)
        shape = tuple(map(mul, local.shape, counts))
        if view.pieces:
            return shape, ()
        return shape, compute_cells(chunked_view(view, shape), rank, shape)

    def find_resized(self, name: str, local: LocalTensor, leaf: TensorLeaf) -> Resized | None:
        """Return the rows of a tensor that are loaded; None if it is not resized."""
        if (rows := self.resized_names.find_rows(name)) is None:
            return None
        shape, cells = self._find_live_cells(name, local, leaf)
        if find_resized_dim(shape, self.saved_tensor(name)[1].shape) is None:
            return None
        if self._find_fusion_problem(name, local, leaf, shape):
            return None  # `mismatch_text` has it
        resized = self._resize(name, shape, cells, rows, is_new=False)
        if resized and is_meta(leaf.value) and rows < resized.live:
            self._problems.append(
                f"{name}: on the meta device it has no values for {rows}:{resized.live}, which "
                "resize keeps: materialize the model (`to_empty`), and initialize it"
            )
        return resized

    def can_resize(self, name: str, shape: Shape) -> bool:
        """Return True if `find_resized` may fill a tensor of this shape."""
        saved = self.saved_tensor(name)[1].shape
        is_named = self.resized_names.find_rows(name) is not None
        return is_named and find_resized_dim(shape, saved) is not None

    def find_resized_state(
        self, name: str, parameter: torch.Tensor | ParameterPart, rule_name: str
    ) -> tuple[Resized, Shape | None] | None:
        """Return the rows of new state that are loaded, and the shape of its memory.

        The shape is None if the state is cut like its parameter. Return None if the parameter is
        not resized, or if this state keeps its saved shape.
        """
        record = self.saved_tensor(name)[1]
        if not record.shape or (rows := self.resized_names.find_rows(name)) is None:
            return None
        local = self.describe(parameter, name)
        leaf = TensorLeaf(parameter, (rule_name, local.shape))
        shape, cells = self._find_live_cells(name, local, leaf)
        saved = self.resized_names.find_parameter_shape(name) or record.shape
        wanted = find_resized_shape(record.shape, saved=saved, live=shape)
        if wanted is None:
            self._problems.append(
                f"{name}: saved with shape {record.shape} for a parameter of shape {saved} that is "
                f"resized to {shape}: which dimension follows is not clear: exclude the name"
            )
        if wanted is None or wanted == record.shape:
            return None
        if problem := self._find_fusion_problem(name, local, leaf, wanted):
            self._problems.append(f"{name}: {problem}")
            return None
        memory, rules = None, self._template.rules
        if wanted != shape:
            cells, memory = (Region.whole(wanted),), wanted
        elif rules is not None and rules.sharding.flat and isinstance(local.view, Whole):
            cells = compute_cells(Flattened(rules.sharding.ranks()), self._template.rank, shape)
            memory = (sum(cell.numel for cell in cells),)
        resized = self._resize(name, wanted, cells, rows, is_new=True)
        return None if resized is None else (resized, memory)

    def _resize(
        self, name: str, shape: Shape, cells: tuple[Cell, ...], rows: int, *, is_new: bool
    ) -> Resized | None:
        saved = self.saved_tensor(name)[1].shape
        dim = find_resized_dim(shape, saved)
        assert dim is not None
        if rows > (most := min(shape[dim], saved[dim])):
            self._problems.append(
                f"{name}: resize keeps {rows} along dimension {dim}, but the checkpoint has "
                f"{saved[dim]}, the state {shape[dim]}: give at most {most}, or a larger state"
            )
            return None
        flat = any(isinstance(cell, ElementRange) for cell in cells)
        if flat and dim:
            self._problems.append(
                f"{name}: its flat parts cannot be resized along dimension {dim}, only along the "
                "first: load into whole tensors or DTensors"
            )
            return None
        resized = Resized(dim, rows, saved[dim], shape[dim], shape, cells)
        self.resized.append(ResizedTensor(name, resized, is_new))
        return resized

    def _find_fusion_problem(
        self, name: str, local: LocalTensor, leaf: TensorLeaf, shape: Shape
    ) -> str | None:
        """Return why a fused tensor cannot be resized to a shape, or None."""
        fqn, record = self.saved_tensor(name)
        view, fusion = self._find_rule_view(name, local, leaf), self._saved.catalog.fused.get(fqn)
        sizes: Sequence[int] = ()
        if isinstance(view, RuleSharded) and view.pieces:
            sizes = [piece.size for piece in view.pieces]
        elif fusion is not None and fusion.dim == find_resized_dim(shape, record.shape):
            sizes = fusion.sizes
        if not sizes:
            return None
        return (
            f"it is fused of the pieces {[*sizes]}, and resize cannot say what counts of each: "
            "split it with rename (dc.Split) and resize these parts, or exclude the name"
        )

    def _find_pieces_problem(
        self, name: str, view: RuleSharded | Flattened, leaf: TensorLeaf
    ) -> str | None:
        """Return why the pieces of a rule do not fit a saved tensor, or None."""
        if not isinstance(view, RuleSharded):
            return None
        fqn, record = self.saved_tensor(name)
        if view.pieces and len(record.shape) == len(view.axes):
            return find_pieces_problem(view, record.shape)
        fusion, rules = self._saved.catalog.fused.get(fqn), self._template.rules
        if fusion is None or rules is None or fusion.dim >= len(view.axes):
            return None
        if rules.cuts_plainly(name, leaf, view, fusion.dim):
            return (
                f"it is fused of the pieces {[*fusion.sizes]} along dimension {fusion.dim}, which "
                'the rule of the ShardingConfig cuts plainly: give the rule "pieces": '
                f"{[*fusion.sizes]}, or [{sum(fusion.sizes)}] if the ranks have plain parts"
            )
        return None

    def note_unknown_pieces(self, name: str, local: LocalTensor, leaf: TensorLeaf) -> None:
        """Record a tensor whose rule has pieces, but that is stored in parts without pieces."""
        rules, (fqn, record) = self._template.rules, self.saved_tensor(name)
        if rules is None or not rules.sharding.has_pieces or fqn in self._saved.catalog.fused:
            return
        view = self._find_rule_view(name, local, leaf)
        is_fused = isinstance(view, RuleSharded) and len(view.pieces) > 1
        if is_fused and self._saved.catalog.layouts[record.layout].cut.num_cells > 1:
            self.unknown_pieces.append(name)

    def _find_rule_view(
        self, name: str, local: LocalTensor, leaf: TensorLeaf
    ) -> RuleSharded | Flattened | None:
        rules = self._template.rules
        if rules is None or not isinstance(local.view, Whole):
            return None
        ruled = rules.view(name, leaf, local.shape)
        return None if ruled is None else ruled[0]

    def mismatch_text(self, name: str, local: LocalTensor, leaf: TensorLeaf, packed: str) -> str:
        """Return the error text for a tensor whose saved shape differs.

        `packed` is not empty if the saved tensor seems to be packed.
        """
        saved = self.saved_tensor(name)[1].shape
        text = f"{name}: saved with shape {saved}{self._saved.source_text(name)}"
        if packed:
            return (
                f"{text}{packed}: dequantize it with the library that wrote it, or exclude the name"
            )
        view = self._find_rule_view(name, local, leaf)
        if view is not None and (problem := self._find_pieces_problem(name, view, leaf)):
            return f"{text}: {problem}"
        if view is None:
            text += (
                f", the state has {local.shape}: create the model as it was saved, or exclude "
                "the name"
            )
        else:
            text += (
                f". By the ShardingConfig this rank has another part of it than the {local.shape} "
                "in the state: change the rule or the shape"
            )
        shape, _ = self._find_live_cells(name, local, leaf)
        # The state of an optimizer follows its parameter, which is reported too.
        if leaf.parameter is not None or (dim := find_resized_dim(shape, saved)) is None:
            return text
        if problem := self._find_fusion_problem(name, local, leaf, shape):
            return f"{text}; {problem}"
        return (
            f"{text}. If only padding differs along dimension {dim}, load with "
            f"resize={{{name!r}: N}}: the first N count, at most {min(shape[dim], saved[dim])}"
        )
