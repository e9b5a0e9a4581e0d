"""The state in foreign files with its 8-bit weights multiplied by their scales, as float32.

    state = dequantize(storage, selection.__contains__, state)

The weights stay in their files. A read multiplies what it has read, with torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING

from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.geometry import Region
from dist_ckpt.core.format.index.index import Node
from dist_ckpt.core.planning.weight_scales import (
    QUANTIZATION,
    ScaledWeight,
    WeightScales,
    parse_blocks,
)
from dist_ckpt.core.state.tree.containers import child_name
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import IncompatibleError
from dist_ckpt.interop.readers.virtual_checkpoint import (
    ForeignChunk,
    ForeignState,
    ForeignTensor,
    read_chunk,
)
from dist_ckpt.message_text import listed

if TYPE_CHECKING:
    import torch


def dequantize(
    storage: Storage, is_selected: Callable[[str], bool], state: ForeignState
) -> ForeignState:
    """Return the state without the scales of its weights, which a read applies.

    IncompatibleError names selected weights that cannot be dequantized, such as packed ones.
    """
    tensors = {tensor.fqn: tensor for tensor in state.tensors}
    scales = WeightScales(
        tensors, state.aliases, stated_blocks=parse_blocks(state.metadata.get(QUANTIZATION))
    )
    found, left_out = {fqn: scales.find(fqn) for fqn in tensors}, scales.applied
    problems = [text for fqn, text in found.items() if isinstance(text, str) and is_selected(fqn)]
    if problems:
        raise IncompatibleError(
            f"{listed(problems, '; ')}: dequantize with the library that wrote it, or exclude it"
        )
    loaders: dict[str, _ScaleLoader] = {}
    for fqn, weight in found.items():
        if isinstance(weight, ScaledWeight):
            loader = loaders.setdefault(weight.scale, _ScaleLoader(storage, tensors[weight.scale]))
            tensors[fqn] = _scaled(tensors[fqn], weight, loader)
    names = frozenset(name for name, to in state.aliases.items() if to in left_out)
    return replace(
        state,
        tensors=[tensor for fqn, tensor in tensors.items() if fqn not in left_out],
        aliases={n: to for n, to in state.aliases.items() if to not in left_out},
        tree=tuple(_without(node, left_out | names) for node in state.tree),
        metadata={k: value for k, value in state.metadata.items() if k != QUANTIZATION},
    )


def _without(node: Node, names: frozenset[str]) -> Node:
    keys = tuple(key for key in node.keys if child_name(node.fqn, key) not in names)
    return Node(node.fqn, node.kind, keys)


def _scaled(tensor: ForeignTensor, weight: ScaledWeight, loader: _ScaleLoader) -> ForeignTensor:
    chunks = tuple(
        replace(chunk, multiply=partial(_multiply, tensor, chunk, weight, loader))
        for chunk in tensor.chunks
    )
    return replace(tensor, dtype="float32", chunks=chunks)


def _multiply(
    tensor: ForeignTensor,
    chunk: ForeignChunk,
    weight: ScaledWeight,
    loader: _ScaleLoader,
    first: int,
    data: memoryview,
) -> memoryview:
    """Return the float32 of elements of a chunk, from its element `first` on."""
    from dist_ckpt.core.shard_io.memory.dequantize import dequantized_bytes  # noqa: PLC0415  (only this needs torch)

    assert isinstance(chunk.cell, Region), "only DeepSpeed cuts flat tensors, of float32"
    return dequantized_bytes(data, tensor.dtype, first, chunk.cell, weight, loader())


class _ScaleLoader:
    """Reads a scale as a whole, when it is first needed. Thread-safe."""

    def __init__(self, storage: Storage, tensor: ForeignTensor) -> None:
        self._storage = storage
        self._tensor = tensor
        self._scale: torch.Tensor | None = None
        self._lock = Lock()

    def __call__(self) -> torch.Tensor:
        with self._lock:
            if self._scale is None:
                self._scale = self._read()
            return self._scale

    def _read(self) -> torch.Tensor:
        import torch  # noqa: PLC0415  (only this needs torch)

        tensor = self._tensor
        dtype, itemsize = getattr(torch, tensor.dtype), DTYPES[tensor.dtype].itemsize
        scale = torch.empty(tensor.shape, dtype=dtype)
        for chunk in tensor.chunks:
            values = torch.frombuffer(read_chunk(self._storage, chunk, itemsize), dtype=dtype)
            assert isinstance(chunk.cell, Region)
            place = tuple(map(slice, chunk.cell.offset, chunk.cell.stop))
            scale[place] = values.reshape(chunk.cell.shape)
        return scale
