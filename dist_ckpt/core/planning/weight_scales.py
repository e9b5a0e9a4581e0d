"""Scales of 8-bit weights: which tensor is the scale of which, by their names and shapes. Pure.

    layers.0.weight            float8 or int8; it is multiplied by its scale.
    layers.0.weight_scale_inv  DeepSeek's name; also a factor, one for each block of 128 x 128.
    layers.0.weight_scale      One for each row or group, or a single one.
    layers.0.input_scale       The scale of activations says nothing about the weight.

The libraries: compressed-tensors, modelopt, transformers' FP8, torchao, quanto, ComfyUI. Weights
that are packed, such as two of 4 bits in a byte, are only named.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from dist_ckpt.core.format.geometry import Shape
from dist_ckpt.message_text import listed

# The name of the `quantization_config` of a config.json in the metadata of a checkpoint.
QUANTIZATION = "quantization_config"

DEFAULT_BLOCK = 128  # of DeepSeek, and of all that follow it

_FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
_SCALE_DTYPES = ("float32", "bfloat16", "float16", "float64", "float8_e8m0fnu", "float8_e4m3fn")

# Words in names. A scale has a word of the first kind, and none of the second.
_SCALE_WORDS = {"scale", "scales", "qscale", "descale", "scaling", "scb", "absmax"}
_OTHER_WORDS = {"input", "output", "act", "activation", "activations", "prequant", "kv"} | {*"qkv"}
_NEUTRAL_WORDS = {"inv", "global", "2", "factor", "quantizer", "quant", "block", "fp8", "e8m0"} | {
    *("inverse", "reciprocal")
}
_DATA_WORDS = {"data", "qdata", "blocks", "packed"}
_FURTHER_WORDS = {"zero", "zeros", "zp", "idx"}
_SMOOTHING_WORDS = {"pre", "prequant", "smooth"}  # such a scale was divided out of the weight
_UNCLEAR_WORDS = {"dequant"}  # of SmoothQuant: it may include the scale of activations
# No format defines it: code calls the factor and its inverse so. `scale_inv` is DeepSeek's factor.
_INVERSE = re.compile(r"inv(erse)?_(de|q)?scale|inverse|reciprocal")
_WEIGHT_WORDS = {"weight", "w", "kernel"}

_PACKED = {
    "qweight": "GPTQ or AWQ",
    "weight_packed": "compressed-tensors",
    "W_q": "HQQ",
    "_weight_qdata": "torchao",
    "_data": "quanto",
}


def is_one_byte(dtype: str) -> bool:
    """Return True for a dtype of 8 bits whose values need a scale to be weights."""
    return dtype.startswith("float8_") or dtype in ("int8", "uint8")


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """A weight whose values are the product of its elements and of `scale`.

    Each element of the scale belongs to a block of the weight. `blocks` has the sizes of a block,
    `scale_shape` those of the scale, one for each dimension of the weight.
    """

    scale: str
    scale_shape: Shape
    blocks: Shape


class _Saved(Protocol):
    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> Shape: ...


class WeightScales:
    """The scales of the 8-bit weights in a checkpoint with these tensors, by their first names.

    `aliases` has the first name of each other one: weights may share a scale. `stated_blocks` are
    sizes of blocks that its files state (`parse_blocks`), for all dimensions from the last one on.
    """

    def __init__(
        self,
        tensors: Mapping[str, _Saved],
        aliases: Mapping[str, str],
        *,
        stated_blocks: Sequence[Shape] = (),
    ) -> None:
        self._tensors = tensors
        self._aliases = aliases
        self._stated_blocks = stated_blocks

    def scales_of(self, fqn: str) -> tuple[str, ...]:
        """Return the scales of an 8-bit weight, without those of activations."""
        if fqn not in self._tensors or not is_one_byte(self._tensors[fqn].dtype):
            return ()
        found = (name for name, text in self._beside(fqn) if _is_scale(text, _leaf(fqn)))
        return tuple(dict.fromkeys(found))

    def activation_scales_of(self, fqn: str) -> tuple[str, ...]:
        """Return the scales of the activations of the module that has a weight."""
        found = ((name, _words(text)) for name, text in self._beside(fqn))
        return tuple(n for n, words in found if words & _SCALE_WORDS and words & _OTHER_WORDS)

    def find(self, fqn: str) -> ScaledWeight | str | None:
        """Return the scale of a weight; why it cannot be applied; None if it has none."""
        scales = self.scales_of(fqn)
        if (problem := self._why_not_applied(fqn, scales)) is not None:
            return problem
        if not scales:
            return None
        record, scale = self._tensors[fqn], self._tensors[scales[0]]
        try:
            shape = _align(record.shape, scale.shape)
            blocks = _find_blocks(record.shape, shape, self._stated_blocks)
        except ValueError as error:
            return f"{fqn} has the shape {list(record.shape)}, its scale {scales[0]} {error}"
        return ScaledWeight(scales[0], shape, blocks)

    def _why_not_applied(self, fqn: str, scales: Sequence[str]) -> str | None:
        """Return why the scales of a tensor cannot be applied, whatever their shapes."""
        if (form := self.packed_form(fqn)) is not None:
            return f"{fqn} is packed in the form of {form}"
        if len(scales) > 1:
            return f"{fqn} has {len(scales)} scales: {listed(scales)}"
        dtype = self._tensors[fqn].dtype
        for scale in scales:
            others = (n for n, text in self._beside(fqn) if _is_further(_words(text)))
            if (other := next(others, None)) is not None:
                return f"{fqn} has {other} next to its scale"
            if (doubt := _find_doubt(_leaf(scale))) is not None:
                return f"{fqn} has a scale that may {doubt}, {scale}"
            of_scale = self._tensors[scale].dtype
            is_e8m0 = of_scale == "uint8" and dtype in _FLOAT8
            if dtype not in (*_FLOAT8, "int8") or not (of_scale in _SCALE_DTYPES or is_e8m0):
                return f"{fqn} is {dtype} with a scale of {of_scale}, {scale}"
        return None

    @cached_property
    def applied(self) -> frozenset[str]:
        """All scales that `find` returns, and those of activations of the same modules."""
        names: set[str] = set()
        for fqn, record in self._tensors.items():
            if is_one_byte(record.dtype) and isinstance(weight := self.find(fqn), ScaledWeight):
                names |= {weight.scale, *self.activation_scales_of(fqn)}
        return frozenset(names)

    def packed_form(self, fqn: str) -> str | None:
        """Return the form of a weight that is packed; None if it is not known to be."""
        leaf, record = _leaf(fqn), self._tensors[fqn]
        beside = {text for _, text in self._beside(fqn)}
        if leaf in _PACKED and any(
            _words(text) & _SCALE_WORDS or "scale" in text for text in beside
        ):
            return _PACKED[leaf]
        if leaf.endswith("_blocks") and leaf.replace("_blocks", "_scales") in beside:
            return "MXFP4"
        if {f"{leaf}.absmax", f"{leaf}.quant_map"} & beside or "SCB" in beside:
            return "bitsandbytes" if is_one_byte(record.dtype) else None
        if record.dtype == "uint8" and {f"{leaf}_scale_2", f"{leaf}_global_scale"} & beside:
            return "NVFP4"
        return None

    def packed_of(self, fqn: str) -> str | None:
        """Return the packed tensor from which a weight of this name could be made, or None."""
        parent, leaf = fqn.rpartition(".")[0], _leaf(fqn)
        for other in (*_PACKED, f"{leaf}_blocks", f"{leaf}._data"):
            name = f"{parent}.{other}"
            if name in self._tensors and self.packed_form(name) is not None:
                return name
        return None

    def _beside(self, fqn: str) -> Iterator[tuple[str, str]]:
        """Yield the other tensors of a module, with their names in it."""
        parent = fqn.rpartition(".")[0]
        for name in self._by_module.get(parent, ()):
            if name != fqn:
                yield self._aliases.get(name, name), name[len(parent) + 1 :]

    @cached_property
    def _by_module(self) -> dict[str, list[str]]:
        by_module: dict[str, list[str]] = {}
        for name in (*self._tensors, *self._aliases):
            parent = name.rpartition(".")[0]
            by_module.setdefault(parent, []).append(name)
            if parent:  # a scale may be one level further down: `weight.absmax`
                by_module.setdefault(parent.rpartition(".")[0], []).append(name)
        return by_module


def _leaf(fqn: str) -> str:
    return fqn.rpartition(".")[2]


def _words(text: str) -> set[str]:
    return {word.removesuffix("s") if word == "weights" else word for word in _split(text)}


def _split(text: str) -> list[str]:
    return [word for word in re.split(r"[._:]+", text.lower()) if word]


def _is_scale(text: str, leaf: str) -> bool:
    """Return True if a name in a module is that of a scale of the weight `leaf`."""
    words, weight = _words(text), _words(leaf) - _DATA_WORDS
    if not words & _SCALE_WORDS or (words - weight) & _OTHER_WORDS:
        return False
    is_weight = weight <= _WEIGHT_WORDS
    aliases = _WEIGHT_WORDS if is_weight else set()
    if words - weight - _SCALE_WORDS - _NEUTRAL_WORDS - _UNCLEAR_WORDS - aliases:
        return False  # it is the scale of another tensor
    return is_weight or weight <= words


def _find_doubt(text: str) -> str | None:
    """Return what a scale with an unclear name may do, for an error; None for a clear name."""
    if _words(text) & _UNCLEAR_WORDS:
        return "include that of activations"
    return "be a factor or a divisor" if _INVERSE.search(text.lower()) else None


def _is_further(words: set[str]) -> bool:
    """Return True for the name of a tensor without which a scale alone gives wrong values."""
    return bool(words & _FURTHER_WORDS or (words & _SMOOTHING_WORDS and words & _SCALE_WORDS))


# --- blocks ------------------------------------------------------------------------------------


def _align(shape: Shape, scale: Shape) -> Shape:
    """Return the shape of a scale with as many dimensions as its weight. ValueError if it cannot.

    Missing dimensions are the last ones: a scale of rows has one dimension.
    """
    if len(scale) > len(shape):  # such as [rows / 128, 1, columns / 128, 1]
        scale = tuple(size for size in scale if size != 1)
    if scale in ((), (1,)):
        return (1,) * len(shape)
    aligned = (*scale, *(1 for _ in shape[len(scale) :]))
    if len(aligned) > len(shape) or any(s > n for s, n in zip(aligned, shape, strict=True)):
        raise ValueError(f"{list(scale)}")
    return aligned


def _find_blocks(shape: Shape, scale: Shape, stated: Sequence[Shape]) -> Shape:
    """Return the sizes of the blocks of a weight. ValueError if they do not follow."""
    cut = [dim for dim, (n, s) in enumerate(zip(shape, scale, strict=True)) if 1 < s < n]
    simple = tuple(n if s == 1 else 1 for n, s in zip(shape, scale, strict=True))
    if not cut:
        return simple
    if stated:
        wide = [(*simple[: len(shape) - len(block)], *block) for block in stated]
        fits = [block for block in wide if len(block) == len(shape) and _fits(shape, scale, block)]
        if len({*fits}) != 1:
            raise ValueError(
                f"{list(scale)}, and not that of blocks of {listed([*map(str, stated)])}"
            )
        return fits[0]
    is_group = len(cut) == 1 and all(
        simple[dim] == 1 for dim in range(len(shape)) if dim not in cut
    )
    sizes = {dim: _guess(shape[dim], scale[dim], is_group=is_group) for dim in cut}
    # One factor for several rows, but all columns: parts of any size that were fused, such as qkv.
    may_be_fused = not is_group and max(simple) > DEFAULT_BLOCK
    if may_be_fused or any(size is None for size in sizes.values()):
        raise ValueError(f"{list(scale)}, and no quantization_config states the size of its blocks")
    return tuple(sizes.get(dim) or size for dim, size in enumerate(simple))


def _fits(shape: Shape, scale: Shape, block: Shape) -> bool:
    return all(s == -(-n // b) for n, s, b in zip(shape, scale, block, strict=True))


def _guess(n: int, s: int, *, is_group: bool) -> int | None:
    """Return the only usual size of `s` blocks of `n` elements: 128, or that of equal groups."""
    sizes = {DEFAULT_BLOCK} if -(-n // DEFAULT_BLOCK) == s else set()
    if is_group and n % s == 0:
        sizes.add(n // s)
    return sizes.pop() if len(sizes) == 1 else None


def parse_blocks(config: object) -> tuple[Shape, ...]:
    """Return the sizes of blocks that a `quantization_config` of a config.json states."""
    if not isinstance(config, Mapping):
        return ()
    groups = config.get("config_groups")
    parts = (
        [group.get("weights") for group in groups.values() if isinstance(group, Mapping)]
        if (isinstance(groups, Mapping))
        else []
    )
    found = (_stated(part) for part in (config, *parts) if isinstance(part, Mapping))
    return tuple(dict.fromkeys(block for block in found if block is not None))


def _stated(config: Mapping[object, object]) -> Shape | None:
    block = config.get("weight_block_size") or config.get("block_structure")
    if isinstance(block, str):
        block = [int(part) for part in block.split("x") if part.isdecimal()]
    if isinstance(block, Sequence) and block and all(type(n) is int and n > 0 for n in block):
        return tuple(block)
    size = config.get("group_size")
    return (1, size) if type(size) is int and size > 0 else None
