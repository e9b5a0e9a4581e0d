"""The tensors that a rank requests from a checkpoint, and the memory that each one fills.

Two tensors of a state may share memory, although they were saved with different values. A direct
read would silently keep the last value. So each of them is read into a separate buffer, and then
copied. If the copies do not agree on the shared bytes, `finish_tensors` raises IncompatibleError.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from dist_ckpt.core.format.geometry import Cell, Region, Shape
from dist_ckpt.core.format.index.index import JOINED, WHOLE, TensorRecord
from dist_ckpt.core.planning.plan import TensorRequest
from dist_ckpt.core.planning.tensor_views import Flattened, Whole, compute_cells
from dist_ckpt.core.planning.weight_scales import ScaledWeight
from dist_ckpt.core.shard_io.memory.cell_memory import Target, Targets, find_sources
from dist_ckpt.core.shard_io.memory.pinned_buffers import PinnedBuffers, open_buffers
from dist_ckpt.core.shard_io.memory.torch_tensor import (
    AliasBuffers,
    CastTarget,
    TensorTarget,
    can_cast,
    find_aliased_tensors,
    overwrites,
    synchronize,
)
from dist_ckpt.core.state.binding.matching.dequantizer import (
    NO_CASTING,
    Casting,
    Dequantizer,
    multiply_all,
)
from dist_ckpt.core.state.binding.matching.resizing import Resized
from dist_ckpt.core.state.binding.matching.tensor_matcher import TensorMatcher
from dist_ckpt.core.state.binding.sources.saved_tree import SavedTree
from dist_ckpt.core.state.binding.template import Template
from dist_ckpt.core.state.elementwise_state import PlacementHint, uncut_problem
from dist_ckpt.core.state.fsdp1.fsdp1_modules import ParameterPart
from dist_ckpt.core.state.tensors.dtensors import new_uncut, split_boxes
from dist_ckpt.core.state.tensors.local_tensors import as_numpy, is_ordinary, torch_dtype
from dist_ckpt.core.state.tensors.locate_tensor import empty_like, is_meta, tie_key
from dist_ckpt.core.state.tree.state_tree import TensorLeaf
from dist_ckpt.errors import CorruptError, IncompatibleError
from dist_ckpt.message_text import names_around_remedy


@dataclass(slots=True, eq=False)
class NewTensor:
    """A tensor that a load creates; `value` is set by `FillTargets.allocate`."""

    make: Callable[[], object]
    value: object = None

    def __call__(self) -> object:
        """Return the tensor, created and read."""
        return self.value


class _Fill(NamedTuple):
    """One request for cells of a stored tensor, and the memory that they fill.

    `cells[i]` has the number `first + i` among all requested cells of the tensor. `parts[i]` is its
    memory; for a `NewTensor` it is allocated later. `cast_from` is the saved dtype if it differs.
    With `scaling`, its elements are multiplied by a scale. If it is `resized`, `parts` have memory
    of more cells.
    """

    name: str
    fqn: str
    cells: tuple[Cell, ...]
    parts: tuple[torch.Tensor, ...] | NewTensor
    cast_from: str | None = None
    scaling: _Scaling | None = None
    resized: Resized | None = None
    first: int = 0


class _Scaling(NamedTuple):
    """The scale of a weight of some shape, and the new tensor that it is read into."""

    weight: ScaledWeight
    shape: Shape
    scale: NewTensor


class FillTargets:
    """The tensors that a rank requests, and the memory to fill. Each `request_` method adds one.

    - `problems`: error texts for tensors that do not fit.
    - `resharded`: names whose requested cells are not all cells of the stored layout.
    - `new_tensors`: the tensors that `allocate` creates.
    - `matcher`: compares them with the saved ones.
    - `dequantizer`: finds the scales by which weights are multiplied.
    """

    def __init__(self, template: Template, saved: SavedTree, casting: Casting = NO_CASTING) -> None:
        self.problems: list[str] = []
        self.matcher = TensorMatcher(template, saved, self.problems, casting.resize)
        self.resharded: list[str] = []
        self._template = template
        self._saved = saved
        self._cast = casting.cast
        self.dequantizer = Dequantizer(template, saved, casting, self.problems)
        self._scale_tensors: dict[str, NewTensor] = {}
        self._to_scale: list[tuple[_Fill, tuple[torch.Tensor, ...]]] = []
        self._casts: list[tuple[str, CastTarget]] = []
        # All requested cells of each stored tensor.
        self._cells: dict[str, tuple[Cell, ...]] = {}
        self._fills: list[_Fill] = []
        self.new_tensors: list[NewTensor] = []
        # Checked cells by dtype, shape and layout: other tensors with the same key need no check.
        self._cells_by_kind: dict[Hashable, tuple[Cell, ...]] = {}
        # The live value of each name, the first name at each address, and the first name of each
        # tie: see `_is_first_reader`.
        self._values: dict[str, object] = {}
        self._name_by_address: dict[int, str] = {}
        self._name_by_tie: dict[Hashable, str] = {}
        self._whole_tensors: dict[tuple[str, bool], NewTensor] = {}
        self._device_tensors: list[torch.Tensor] = []
        self._alias_buffers: list[AliasBuffers] = []
        self._stored_cells: dict[int, frozenset[Cell]] = {}

    def request_fill(self, name: str, leaf: TensorLeaf, *, as_bits: bool = False) -> object:
        """Request a tensor in the memory of a leaf; return the leaf's value, or its replacement.

        Meta tensors and read-only arrays are replaced. With `as_bits` values are never cast.
        """
        value = leaf.value
        fqn, record = self.matcher.saved_tensor(name)
        # Ordinary tensors with the same key need the same cells.
        key = (
            (value.dtype, value.shape, record.dtype, record.shape, record.layout)
            if self._template.rules is None and is_ordinary(value)
            else None
        )
        if (kind_cells := self._cells_by_kind.get(key)) is not None:
            # A tensor with the same key has passed the checks below.
            assert isinstance(value, torch.Tensor)
            if self._is_first_reader(name, value, value):
                self._request(_Fill(name, fqn, kind_cells, (value,)))
            return value
        try:
            value, local = self.matcher.locate(name, leaf)
        except (TypeError, ValueError) as error:
            self.problems.append(str(error))
            return value
        cells, resized = self.matcher.find_cells(name, local, leaf, record.shape), None
        if cells is None and not as_bits:
            resized = self.matcher.find_resized(name, local, leaf)
            cells = resized.cells if resized else None
        if cells is None:
            packed = self.dequantizer.packed_text(name)
            self.problems.append(self.matcher.mismatch_text(name, local, leaf, packed))
            return value
        cast_from = record.dtype if cells and local.dtype != record.dtype else None
        scaling = self._scaling(name, local.dtype) if cast_from and not as_bits else None
        if cast_from and not self.check_dtype(name, local.dtype, as_bits=as_bits):
            return value
        if not local.parts or self._is_first_reader(name, value, local.parts[0]):
            self._request(_Fill(name, fqn, cells, local.parts, cast_from, scaling, resized))
            self.matcher.note_unknown_pieces(name, local, leaf)
            # `cast` selects by name, so a cast tensor says nothing about other names.
            is_kind = key is not None and cast_from is None and resized is None
            if self._check_stored_layout(name, record, cells) and is_kind:
                self._cells_by_kind[key] = cells
        return value

    def check_dtype(self, name: str, dtype: str, *, as_bits: bool = False) -> bool:
        """Return True if a saved tensor has this dtype or may be cast to it; else report it."""
        saved = self.matcher.saved_tensor(name)[1].dtype
        if dtype == saved or (not as_bits and self.dequantizer.is_settled(name, dtype)):
            return True
        if (why := self._why_no_cast(name, dtype, as_bits=as_bits)) is None:
            return True
        self.problems.append(
            f"{name}: saved as {saved}{self._saved.source_text(name)}, the state has {dtype}: "
            f"{why}; {self.dequantizer.conversion(name)}"
        )
        return False

    def _why_no_cast(self, name: str, dtype: str, *, as_bits: bool) -> str | None:
        """Return the reason why a saved tensor is not converted; None if it is."""
        if as_bits:
            return "the inner tensors of a subclass are never cast"
        if self._cast is None or name not in self._cast:
            return "values are converted only with `cast`"
        if not can_cast(self.matcher.saved_tensor(name)[1].dtype, dtype):
            return "`cast` converts only between floating dtypes, or without loss"
        return None

    def local_parts(self, name: str, value: object) -> tuple[torch.Tensor, ...]:
        """Return the parts of a tensor on this rank. TypeError or ValueError as for a load."""
        return self.matcher.describe(value, name).parts

    def can_fill(self, name: str, leaf: TensorLeaf) -> bool:
        """Return True if `request_fill` would accept class, shape and dtype."""
        if is_meta(leaf.value):
            return False
        try:
            local = self.matcher.describe(leaf.value, name)
        except (TypeError, ValueError):
            return False
        record = self.matcher.saved_tensor(name)[1]
        fits = self.matcher.find_cells(name, local, leaf, record.shape) is not None
        return (fits or self.matcher.can_resize(name, local.shape)) and local.dtype == record.dtype

    def request_whole(self, name: str) -> NewTensor:
        """Request a whole tensor in new host memory. Tied names share one new tensor."""
        fqn, record = self.matcher.saved_tensor(name)
        as_array = name in self._saved.numpy
        if (fqn, as_array) not in self._whole_tensors:
            scaling = self._scaling(name, "float32")
            dtype = record.dtype if scaling is None else "float32"

            def make() -> object:
                tensor = torch.empty(record.shape, dtype=torch_dtype(dtype), device="cpu")
                try:
                    return as_numpy(tensor) if as_array else tensor
                except ValueError as error:
                    raise CorruptError(f"{name}: {error}; load an older checkpoint") from None

            cells = (Region.whole(record.shape),)
            self._whole_tensors[fqn, as_array] = self._request_new(name, cells, make, scaling)
        return self._whole_tensors[fqn, as_array]

    def _scaling(self, name: str, dtype: str) -> _Scaling | None:
        """Request the scale of a weight that is dequantized, in new host memory; else None."""
        if (weight := self.dequantizer.find(name, dtype)) is None:
            return None
        tensors, scale = self._saved.catalog.tensors, weight.scale
        if scale not in self._scale_tensors:
            shape, scale_dtype = tensors[scale].shape, torch_dtype(tensors[scale].dtype)
            new = NewTensor(partial(torch.empty, shape, dtype=scale_dtype, device="cpu"))
            self._scale_tensors[scale] = new
            self.new_tensors.append(new)
            self._request(_Fill(scale, scale, (Region.whole(shape),), new))
        return _Scaling(
            weight, self.matcher.saved_tensor(name)[1].shape, self._scale_tensors[scale]
        )

    def request_like(self, name: str, hint: PlacementHint) -> NewTensor:
        """Request a new tensor: sharded like a parameter of the same shape, otherwise whole."""
        parameter = hint.parameter
        if (found := self.matcher.find_resized_state(name, parameter, hint.rule_name)) is not None:
            (resized, shape), dtype = found, self.matcher.saved_tensor(name)[1].dtype
            make = partial(_zeros, parameter, shape, dtype)
            return self._request_new(name, resized.cells, make, resized=resized)
        return self._request_like(name, hint)

    def _request_like(self, name: str, hint: PlacementHint) -> NewTensor:
        record = self.matcher.saved_tensor(name)[1]
        whole, dtype, parameter = Region.whole(record.shape), record.dtype, hint.parameter
        if hint.on_host:
            return self.request_box(name, whole, torch.device("cpu"))
        if isinstance(parameter, ParameterPart):
            return self._like_part(name, parameter, record, hint)
        local, like = self.matcher.describe(parameter, name), parameter.detach()
        rules = self._template.rules
        was_whole = self._saved.uncut.get(name) == WHOLE
        is_alike = record.shape == local.shape and isinstance(local.view, Whole)
        is_alike = is_alike and hint.fits(record.shape)
        if is_alike and rules is not None and rules.sharding.flat and record.shape:
            flat = Flattened(rules.sharding.ranks())
            cells = compute_cells(flat, self._template.rank, record.shape)
            numel = sum(cell.numel for cell in cells)
            return self._request_new(name, cells, partial(_new, like, (numel,), dtype))
        leaf = TensorLeaf(parameter, (hint.rule_name, tuple(parameter.shape)))
        found = None if was_whole else self.matcher.find_cells(name, local, leaf, record.shape)
        if found is not None and self._is_cut(name, record, found, hint):
            return self._request_new(
                name, found, lambda: empty_like(parameter, torch_dtype(record.dtype))
            )
        if not record.shape or was_whole:
            return self.request_box(name, whole, parameter.device)
        # The result of `new_zeros` in an optimizer: replicated if the parameter is a DTensor.
        make = partial(new_uncut, like, record.shape, torch_dtype(dtype))
        return self._request_new(name, (whole,), make)

    def _is_cut(
        self, name: str, record: TensorRecord, cells: tuple[Cell, ...], hint: PlacementHint
    ) -> bool:
        """Return True if new state is cut like its parameter; report state that may not be."""
        was_cut = self._saved.catalog.layouts[record.layout].cut.num_cells > 1
        rules = self._template.rules
        if hint.fits(record.shape) or was_cut or (rules is not None and rules.names_state(name)):
            return True
        is_unknown = hint.elementwise is None
        if is_unknown and cells != (Region.whole(record.shape),):
            self.problems.append(uncut_problem(name))
        return is_unknown

    def request_box(self, name: str, box: Region, device: torch.device) -> NewTensor:
        """Request a box of a tensor in new memory."""
        dtype = torch_dtype(self.matcher.saved_tensor(name)[1].dtype)
        cells = (box,) if box.numel else ()
        return self._request_new(
            name, cells, lambda: torch.empty(box.shape, dtype=dtype, device=device)
        )

    def _like_part(
        self, name: str, part: ParameterPart, record: TensorRecord, hint: PlacementHint
    ) -> NewTensor:
        """Request new state for FSDP1's part of a parameter: cut like the part, or a scalar."""
        if record.shape == part.global_shape and hint.fits(record.shape):
            return self._request_new(
                name,
                self.matcher.describe(part, name).cells,
                lambda: replace(part, tensor=_new(part.tensor, part.tensor.shape, record.dtype)),
            )
        if record.shape:
            self.problems.append(
                f"{name}: saved with shape {record.shape} for a parameter of shape "
                f"{part.global_shape}, which FSDP1 has cut into flat parts: exclude it, or load "
                "into `fully_shard`"
            )
        return self.request_box(name, Region.whole(record.shape), part.tensor.device)

    def wanted(self) -> tuple[TensorRequest, ...]:
        """Return the requests for a load plan."""
        tensors, derived = self._saved.catalog.tensors, self._saved.derived
        wanted = find_sources(self._cells.items(), derived)[0] if derived else self._cells
        return tuple(
            TensorRequest(fqn, tensors[fqn].dtype, tensors[fqn].shape, tuple(cells))
            for fqn, cells in wanted.items()
        )

    def allocate(self) -> Targets:
        """Create new tensors; return the memory of each cell of `wanted`."""
        for tensor in self.new_tensors:
            tensor.value = tensor.make()
        targets: dict[tuple[str, int], Target] = {}
        all_parts = [self._find_memory(fill) for fill in self._fills]
        shared = find_aliased_tensors(all_parts)
        self._device_tensors += [part for parts in all_parts for part in parts if not part.is_cpu]
        for index, (fill, parts) in enumerate(zip(self._fills, all_parts, strict=True)):
            memory = parts
            if index in shared:
                memory = tuple(torch.empty(p.shape, dtype=p.dtype, device="cpu") for p in parts)
                self._alias_buffers.append(AliasBuffers(fill.name, parts, memory))
            made = [
                self._make_target(fill, part, cell)
                for cell, part in zip(fill.cells, memory, strict=True)
            ]
            for number, target in enumerate(made, fill.first):
                targets[fill.fqn, number] = target
            if fill.scaling is not None:
                self._to_scale.append((fill, memory))
        synchronize(self._device_tensors)  # before the first byte is written
        derived = self._saved.derived
        return find_sources(self._cells.items(), derived, targets)[1] if derived else targets

    def open_buffers(
        self, *, threads: int, block_nbytes: int
    ) -> AbstractContextManager[PinnedBuffers | None]:
        """Open the buffers from which devices copy; None if they do not help. After `allocate`."""
        return open_buffers(self._device_tensors, threads=threads, block_nbytes=block_nbytes)

    def finish_tensors(self) -> None:
        """Fill the tensors that share memory, and wait for the accelerators.

        Weights are multiplied by their scales first. Raises IncompatibleError if saved values
        differ on shared bytes, or if a cast overflowed.
        """
        overflown = self._multiply_by_scales()
        for buffers in self._alias_buffers:
            buffers.copy_to_parts()
        for buffers in self._alias_buffers:
            if not buffers.is_in_place():
                other = next(other for other in self._alias_buffers if overwrites(other, buffers))
                raise IncompatibleError(
                    f"{buffers.name} and {other.name} share memory in the state, but were saved "
                    "with different values, so the state cannot hold both. Give one of them "
                    "separate memory (untie them, or `clone()`), or exclude one, and load again"
                )
        self._alias_buffers.clear()
        synchronize(self._device_tensors)
        overflown += [name for name, cast in self._casts if cast.has_overflown]
        if lost := list(dict.fromkeys(overflown)):
            text, rest = names_around_remedy(lost)
            raise IncompatibleError(
                f"{text}: saved values are too large for the dtype in the state, which now "
                "has infinite values. Use a wider dtype (bfloat16 or float32) and load again"
                f"{rest}"
            )

    def _multiply_by_scales(self) -> list[str]:
        """Multiply weights by their scales; return the names with values that are too large."""
        synchronize(self._device_tensors if self._to_scale else ())
        overflown: list[str] = []
        for fill, memory in self._to_scale:
            assert fill.scaling is not None
            weight, shape, scale = fill.scaling
            parts = [*zip(fill.cells, memory, strict=True)]
            overflown += multiply_all(fill.name, parts, shape, weight, scale.value)
        self._to_scale.clear()
        return overflown

    def _find_memory(self, fill: _Fill) -> tuple[torch.Tensor, ...]:
        """Return the memory of each cell of a request."""
        parts = fill.parts
        if isinstance(parts, NewTensor):
            parts = self.matcher.describe(parts.value, fill.name).parts
        cells = fill.resized.live_cells if fill.resized else fill.cells
        if len(parts) < len(cells):  # a local tensor of several pieces is one part
            parts = tuple(split_boxes(parts[0], cells))
        return fill.resized.clip_parts(parts) if fill.resized else parts

    def _make_target(self, fill: _Fill, part: torch.Tensor, cell: Cell) -> Target:
        if fill.cast_from is None:
            return TensorTarget(part, cell)
        target = CastTarget(part, cell, torch_dtype(fill.cast_from))
        self._casts.append((fill.name, target))
        return target

    def _is_first_reader(self, name: str, value: object, part: torch.Tensor) -> bool:
        """Return True if no earlier name reads the same saved tensor into the same memory.

        `part` is the first part of the value. Two names of one live tensor may have been saved as
        two tensors: then both are read, and `finish_tensors` compares them.
        """
        self._values[name] = value
        # Tensors with different addresses are not tied: most need no further check.
        earlier = self._name_by_address.setdefault(part.data_ptr(), name)
        if earlier == name:
            return True
        first = name
        for other in (earlier, name):
            if (tie := tie_key(self.matcher.describe(self._values[other], other))) is not None:
                first = self._name_by_tie.setdefault(tie, other)
        stored = self.matcher.saved_tensor(name)[0]
        return first == name or self.matcher.saved_tensor(first)[0] != stored

    def _request_new(
        self,
        name: str,
        cells: tuple[Cell, ...],
        make: Callable[[], object],
        scaling: _Scaling | None = None,
        resized: Resized | None = None,
    ) -> NewTensor:
        tensor = NewTensor(make)
        self.new_tensors.append(tensor)
        fqn, record = self.matcher.saved_tensor(name)
        cast_from = record.dtype if scaling else None
        self._request(_Fill(name, fqn, cells, tensor, cast_from, scaling, resized))
        self._check_stored_layout(name, record, cells)
        return tensor

    def _request(self, fill: _Fill) -> None:
        """Add a request. Without cells the local tensor is empty, and nothing is filled."""
        wanted = self._cells.get(fill.fqn, ())
        self._cells[fill.fqn] = wanted + fill.cells
        if fill.cells:
            self._fills.append(fill._replace(first=len(wanted)) if wanted else fill)

    def _check_stored_layout(
        self, name: str, record: TensorRecord, cells: tuple[Cell, ...]
    ) -> bool:
        """Return True if all cells are cells of the stored layout; else record a resharded name."""
        if self.matcher.saved_tensor(name)[0] in self._saved.derived:
            return True  # it is stored in other tensors
        layout = self._saved.catalog.layouts[record.layout]
        if record.layout not in self._stored_cells:
            stored = (layout.cell(number) for number in range(layout.cut.num_cells))
            self._stored_cells[record.layout] = frozenset(stored)
        if self._stored_cells[record.layout].issuperset(cells):
            return True
        rules = self._template.rules
        if self._saved.uncut.get(name) == JOINED and not (rules and rules.names_state(name)):
            self.problems.append(uncut_problem(name))
        self.resharded.append(name)
        return False


def _new(like: torch.Tensor, shape: Shape, dtype: str) -> torch.Tensor:
    return like.new_empty(shape, dtype=torch_dtype(dtype))


def _zeros(like: torch.Tensor | ParameterPart, shape: Shape | None, dtype: str) -> object:
    """Return zeros of a shape on the device of a parameter, or cut like it without a shape."""
    if isinstance(like, ParameterPart):
        tensor = like.tensor.new_zeros(shape or like.tensor.shape, dtype=torch_dtype(dtype))
        return tensor if shape else replace(like, tensor=tensor)
    if shape is None:
        return empty_like(like, torch_dtype(dtype)).zero_()
    return like.detach().new_zeros(shape, dtype=torch_dtype(dtype))
