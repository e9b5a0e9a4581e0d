"""Which saved weights of 8 bits a load multiplies by their scales, and which it must not cast."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from dist_ckpt.core.format.geometry import Cell, Shape
from dist_ckpt.core.format.index.index import TensorRecord
from dist_ckpt.core.planning.name_selection import Resize, Selection
from dist_ckpt.core.planning.weight_scales import ScaledWeight, WeightScales, is_one_byte
from dist_ckpt.core.shard_io.memory.dequantize import multiply_by_scale
from dist_ckpt.core.state.binding.sources.saved_tree import SavedTree
from dist_ckpt.core.state.binding.template import Template
from dist_ckpt.message_text import listed

_FLOATS = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Casting:
    """Which tensors of the state may differ from the saved ones, and how they convert.

    `cast` selects the names whose dtype may differ; None for none. With `dequantize`, an 8-bit
    weight is multiplied by its scale. `stated_blocks` are sizes of the blocks of scales that the
    checkpoints state. `resize` has the patterns of names whose padding may differ, with their rows.
    """

    cast: Selection | None = None
    dequantize: bool = False
    stated_blocks: Sequence[Shape] = ()
    resize: Resize = field(default_factory=dict)

    def pattern_problems(self, names: Callable[[], Iterable[str]]) -> Iterator[str]:
        """Yield a problem for each pattern that matches none of `names()`, read only if needed."""
        resized = Selection(tuple(self.resize)) if self.resize else None
        selections = {"cast": self.cast, "resize": resized}
        for option, selection in selections.items():
            for problem in selection.pattern_problems(names()) if selection is not None else ():
                yield problem.replace("include", option, 1)


NO_CASTING = Casting()


class Dequantizer:
    """Finds the scales of the weights that a state requests.

    - `names`: those whose values are multiplied by a scale.
    - `used_scales`: their scales, and those of the same modules' activations, as in the catalog.
    - `dropped`: the saved names of scales that are left out of new containers.
    """

    def __init__(
        self, template: Template, saved: SavedTree, casting: Casting, problems: list[str]
    ) -> None:
        self._template = template
        self._saved = saved
        self._is_on = casting.dequantize
        self._problems = problems
        self._scales = WeightScales(
            saved.catalog.tensors, saved.catalog.aliases, stated_blocks=casting.stated_blocks
        )
        self._refused: set[str] = set()
        self._unscaled: list[tuple[str, str]] = []
        self.names: list[str] = []
        self.used_scales: set[str] = set()
        self.dropped: list[str] = []

    def find(self, name: str, dtype: str = "float32") -> ScaledWeight | None:
        """Return the scale by which a tensor is multiplied to become one of a dtype.

        Return None if it has none, or is not to be dequantized. A scale that cannot be applied is a
        problem.
        """
        fqn = self._tensor(name)[0]
        if not self._is_on or dtype not in _FLOATS:
            return None
        scales = self._scales.scales_of(fqn)
        if fqn in self._saved.derived or self._scales_in_state.intersection(scales):
            return None  # a rename makes no tensors of scaled ones
        if (weight := self._scales.find(fqn)) is None:
            return None
        self._use({*scales, *self._scales.activation_scales_of(fqn)})
        if isinstance(weight, ScaledWeight):
            self.names.append(name)
            return weight
        self._refused.add(name)
        self._problems.append(
            f"{name}: {weight}, so it is not dequantized here: use the library that wrote it, or "
            f"exclude it"
        )
        return None

    def is_settled(self, name: str, dtype: str) -> bool:
        """Return True if a tensor is dequantized to a dtype, or has a problem; note any other.

        Whether the scale of that is loaded too is known after the last request: see `problems`.
        """
        fqn, record = self._tensor(name)
        if name in self._refused or (name in self.names and dtype in _FLOATS):
            return True
        if is_one_byte(record.dtype) and dtype in _FLOATS:
            self._unscaled.append((name, fqn))
        return False

    def conversion(self, name: str) -> str:
        """Return the remedy for a tensor of another dtype that may not be cast."""
        fqn, record = self._tensor(name)
        if self._scales.scales_of(fqn):
            return "load with dequantize=True, which applies its scale"
        return f"make it {record.dtype}, load, and convert"

    def packed_text(self, name: str) -> str:
        """Return the form of a weight that is packed, for messages; "" for any other."""
        fqn = self._saved.leaves.get(name) or self._scales.packed_of(name) or ""
        form = self._scales.packed_form(fqn) if fqn in self._saved.catalog.tensors else None
        return "" if form is None else f" in the packed form of {form}"

    def drops(self, name: str) -> bool:
        """Return True if a saved tensor is only the scale of weights, all of them dequantized."""
        if not self._is_on or (tensor := self._saved.tensor(name)) is None:
            return False
        if tensor[0] not in self._scales.applied or tensor[0] in self._scales_in_state:
            return False
        self.dropped.append(name)
        self._use({tensor[0]})
        return True

    def problems(self, requested: Collection[str], missing: Collection[str]) -> Iterator[str]:
        """Yield the weights whose scales are not requested, and missing ones that are packed."""
        aliases, derived = self._saved.catalog.aliases, self._saved.derived
        loaded = {aliases.get(f, f) for f in requested} if self._unscaled else set()
        loaded |= {s for f in loaded & derived.keys() for s in derived[f].sources}
        for name, fqn in self._unscaled:
            if lost := [scale for scale in self._scales.scales_of(fqn) if scale not in loaded]:
                yield (
                    f"{name}: saved in 8 bits{self._saved.source_text(name)} with the scale "
                    f"{listed(lost)}, which is left out, so its values would be wrong: load with "
                    f"dequantize=True, or exclude it"
                )
        for name in missing:
            packed = self._scales.packed_of(self._saved.leaves.get(name, name))
            if packed is not None and packed not in requested:
                yield (
                    f"{name}: saved as {packed}, packed in the form of "
                    f"{self._scales.packed_form(packed)}: dequantize it with the library that "
                    f"wrote it, or exclude {name}"
                )

    def _tensor(self, name: str) -> tuple[str, TensorRecord]:
        tensor = self._saved.tensor(name)
        assert tensor is not None, name
        return tensor

    def _use(self, scales: set[str]) -> None:
        aliases = self._saved.catalog.aliases
        self.used_scales |= scales | {name for name, data in aliases.items() if data in scales}

    @cached_property
    def _scales_in_state(self) -> set[str]:
        """The saved tensors that the state itself has: it applies such scales."""
        names, aliases = {*self._template.names()}, self._saved.catalog.aliases
        return {aliases.get(f, f) for name, f in self._saved.leaves.items() if name in names}


def multiply_all(
    name: str,
    parts: Sequence[tuple[Cell, torch.Tensor]],
    shape: Shape,
    weight: ScaledWeight,
    scale: object,
) -> list[str]:
    """Multiply the cells of a weight by its scale; return the name if values are too large."""
    assert isinstance(scale, torch.Tensor)
    overflown = [multiply_by_scale(part, cell, shape, weight, scale) for cell, part in parts]
    return [name] if any(overflown) else []
