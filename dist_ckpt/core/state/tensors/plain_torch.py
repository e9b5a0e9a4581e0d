"""Plain data with torch or numpy objects: convert placeholders to the objects, and back."""

from __future__ import annotations

import importlib
from typing import Literal

import torch

from dist_ckpt.core.format.objects.plain_types import (
    ArrayValue,
    Device,
    DTypeValue,
    NumpyScalar,
    Placeholder,
    Size,
)
from dist_ckpt.core.shard_io.memory.torch_tensor import TensorReader
from dist_ckpt.core.state.tensors.local_tensors import (
    as_numpy,
    dtype_name,
    from_numpy,
    is_array,
    to_plain_tensor,
    torch_dtype,
)
from dist_ckpt.core.state.tree.containers import (
    MAX_DEPTH,
    child_name,
    container_entries,
    container_kind,
    create_container,
)
from dist_ckpt.errors import IncompatibleError


def make_torch_value(value: Placeholder) -> object:
    """Create the object of a placeholder; see `objects_file.decode`.

    Raises ValueError for damaged data, IncompatibleError for types that are missing here.
    """
    match value:
        case DTypeValue(name):
            return torch_dtype(name)
        case Device(name):
            try:
                return torch.device(name)
            except RuntimeError as error:
                raise ValueError(f"{name!r} is not a device: {error}") from None
        case Size(shape):
            return torch.Size(shape)
        case NumpyScalar(code, data):
            return _numpy_scalar(code, data)
        case ArrayValue(dtype, shape, data, kind):
            tensor = torch.empty(shape, dtype=torch_dtype(dtype), device="cpu")
            if data:
                # A copy, so that it is writable.
                raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                tensor = raw.view(tensor.dtype).reshape(shape)
            return as_numpy(tensor) if kind == "numpy" else tensor


def without_tensors(value: object, fqn: str, depth: int = 0) -> object:
    """Replace each tensor and numpy array in plain data by an `ArrayValue`.

    Raises TypeError for a tensor whose class cannot be stored, such as a DTensor. Raises ValueError
    for a tensor without data, and for a container that contains itself.
    """
    if depth > MAX_DEPTH:
        raise ValueError(
            f"{fqn[:100]}: nested deeper than {MAX_DEPTH}, or contains itself: flatten it"
        )
    depth += 1
    if is_array(value):
        return _placeholder(from_numpy(value, fqn, writable=False), fqn, "numpy")
    if isinstance(value, torch.Tensor):
        return _placeholder(value, fqn, "tensor")
    entries, kind = container_entries(value), container_kind(value)
    if entries is None or kind is None:
        return value
    return create_container(
        kind, ((k, without_tensors(v, child_name(fqn, k), depth)) for k, v in entries.items())
    )


def _placeholder(tensor: torch.Tensor, fqn: str, kind: Literal["tensor", "numpy"]) -> ArrayValue:
    local = to_plain_tensor(tensor, fqn)
    if local.is_meta:
        raise ValueError(f"{fqn}: a meta tensor has no data to save: materialize it first")
    reader = TensorReader(local)
    data = reader.read(0, reader.nbytes, memoryview(bytearray(reader.nbytes)))
    return ArrayValue(dtype_name(local.dtype, fqn), tuple(local.shape), bytes(data), kind)


def _numpy_scalar(code: str, data: bytes) -> object:
    try:
        numpy = importlib.import_module("numpy")
    except ModuleNotFoundError:
        raise IncompatibleError("the checkpoint holds numpy scalars: install numpy") from None
    try:
        return numpy.frombuffer(data, dtype=code)[0]
    except TypeError as error:  # such as an unknown unit of time
        raise ValueError(f"{code!r} is not a dtype of numpy: {error}") from None
