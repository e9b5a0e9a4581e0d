"""Local tensors whose memory is their value; names of dtypes; numpy arrays as tensors."""

from __future__ import annotations

import sys
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, TypeGuard

import torch

from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.runtime.torch_private import AsyncCollectiveTensor
from dist_ckpt.core.state.tensors.hollow_tensors import partition_reason
from dist_ckpt.errors import IncompatibleError

if TYPE_CHECKING:
    import numpy as np


# Exactly these classes. The memory of a subclass may not be its value.
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})

_NAMES = {
    dtype: name for name in DTYPES if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}


def to_plain_tensor(tensor: torch.Tensor, fqn: str) -> torch.Tensor:
    """Return the detached plain tensor behind a tensor whose memory is its value.

    Raises TypeError for a class or layout that cannot be stored, ValueError for freed memory.
    """
    if type(tensor) not in PLAIN and isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.wait()
    if remedy := _remedy(tensor):
        raise TypeError(f"{fqn}: {class_name(tensor)} cannot be stored: {remedy}")
    if not tensor.numel() and (reason := partition_reason(tensor)):
        raise ValueError(f"{fqn}: {reason}")
    tensor = tensor.detach()
    if type(tensor) not in PLAIN:
        tensor = torch.Tensor.as_subclass(tensor, torch.Tensor)
    if tensor.numel() and not tensor.is_meta and not _has_memory(tensor):
        raise ValueError(
            f"{fqn}: the memory of this tensor is missing: it was freed (a resharded or offloaded "
            "parameter), or belongs to a torch transform. Save the tensor when it is whole"
        )
    return tensor


def check_class(tensor: torch.Tensor, fqn: str) -> None:
    """Raise TypeError for a parameter of a class whose value is more than its memory.

    The `state_dict` of its module may return a plain tensor instead, which a load cannot use.
    """
    if remedy := _remedy_of_class(tensor):
        raise TypeError(
            f"{fqn}: {class_name(tensor)} cannot be stored: {remedy}. To save only what is "
            "trained, such as the weights of LoRA, pass include_frozen=False"
        )


def is_ordinary(value: object) -> TypeGuard[torch.Tensor]:
    """Return True for a tensor in host memory that `is_contiguous_memory`."""
    return is_contiguous_memory(value) and value.is_cpu


def is_contiguous_memory(value: object) -> TypeGuard[torch.Tensor]:
    """Return True if a leaf is a contiguous tensor that `to_plain_tensor` accepts.

    This fast check is True for most leaves on the CPU and on CUDA devices. If it is False,
    `to_plain_tensor` may still accept the leaf. The dtype is not checked.
    """
    if type(value) not in PLAIN:
        return False
    assert isinstance(value, torch.Tensor)
    is_known = value.is_cpu or value.is_cuda
    if not is_known or value.is_nested or value.layout != torch.strided:
        return False
    try:
        stop = value.storage_offset() * value.itemsize + value.nbytes
        has_memory = value.data_ptr() != 0
        return has_memory and value.is_contiguous() and value.untyped_storage().nbytes() >= stop
    except RuntimeError:
        return False


def _remedy(tensor: torch.Tensor) -> str | None:
    if tensor.is_nested:
        return "a nested tensor; store its `values()` and `offsets()`, or the parts of `unbind()`"
    if type(tensor) not in PLAIN:
        if torch.nn.parameter.is_lazy(tensor):
            return "run the module once, so that its parameters exist"
        if remedy := _remedy_of_class(tensor):
            return remedy
    if tensor.layout != torch.strided:
        return f"its layout is {tensor.layout}; store `to_dense()`, or its indices and values"
    if tensor.is_quantized:
        return (
            "it is quantised; store `int_repr()`, the scales and the zero points, or "
            "`dequantize()`; the quantized tensors of torchao are stored as they are"
        )
    return None


def _remedy_of_class(tensor: torch.Tensor) -> str | None:
    """Return the remedy for a subclass with more than the memory of a plain tensor; else None."""
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return (
            "its memory is not its value; store the plain tensors in it, or give the class "
            "`__tensor_flatten__` and `__tensor_unflatten__`"
        )
    if tensor.dtype == torch.int8 and "SCB" in vars(tensor):  # Int8Params, also after a forward
        return (
            "its scales are outside of it (bitsandbytes), and cannot be loaded; save and load the "
            "model before it is quantized, and quantize it after that"
        )
    for name, value in vars(tensor).items():
        if not _is_setting(value):
            return (
                f"its {name!r} is a {class_name(value)}, which would be lost; store that, and its "
                "`as_subclass(torch.Tensor)`"
            )
    return None


def _is_setting(value: object) -> bool:
    """Return True for an attribute of a tensor that may be left out: a setting or a hook."""
    if isinstance(value, tuple | list):
        return all(map(_is_setting, value))
    return (value is None) or isinstance(value, _SETTINGS)


_SETTINGS = (bool, int, float, str, torch.dtype, torch.device, FunctionType, MethodType, type)


def _has_memory(tensor: torch.Tensor) -> bool:
    needed = tensor.storage_offset() + tensor.numel()
    if not tensor.is_contiguous():
        dims = zip(tensor.shape, tensor.stride(), strict=True)
        needed = 1 + tensor.storage_offset() + sum((n - 1) * stride for n, stride in dims)
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr() != 0 and storage.nbytes() >= needed * tensor.itemsize
    except RuntimeError:
        return False


def dtype_name(dtype: torch.dtype, fqn: str) -> str:
    """Return the name of a torch dtype in checkpoints. TypeError if it cannot be stored."""
    if (name := _NAMES.get(dtype)) is None:
        raise TypeError(
            f"{fqn}: dtype {str(dtype).removeprefix('torch.')} cannot be stored: convert it to one "
            "that can"
        )
    return name


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a name in checkpoints. IncompatibleError if torch lacks it."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise IncompatibleError(f"torch {torch.__version__} has no dtype {name}: upgrade torch")
    return dtype


def from_numpy(array: np.ndarray, fqn: str, *, writable: bool) -> torch.Tensor:
    """Return a tensor over a numpy array's memory.

    If torch cannot use the array's memory, return a copy; with `writable` raise ValueError. Raises
    TypeError for a class or dtype that torch lacks.
    """
    if type(array).__name__ not in ("ndarray", "memmap"):
        raise TypeError(f"{fqn}: {class_name(array)} is more than an array: store its parts")
    steps = [stride >= 0 and stride % array.itemsize == 0 for stride in array.strides]
    fits = array.flags.writeable and all(steps)
    if writable and not fits:
        raise ValueError(
            f"{fqn}: an array that is read-only, reversed or a field cannot be loaded into: copy it"
        )
    try:
        return torch.from_numpy(array if fits else array.copy())
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{fqn}: a numpy array of dtype {array.dtype} cannot be stored ({error}): convert it "
            "to a dtype that torch has"
        ) from error


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return the array over a CPU tensor's memory. ValueError for a dtype that numpy lacks."""
    try:
        return tensor.numpy()
    except TypeError:
        raise ValueError(f"numpy has no arrays of dtype {tensor.dtype}") from None


def class_name(value: object) -> str:
    """Return the full name of a value's class, for messages."""
    return full_name(type(value))


def full_name(cls: type) -> str:
    """Return the name of a class with that of its module."""
    return f"{cls.__module__}.{cls.__qualname__}"


def is_array(value: object) -> TypeGuard[np.ndarray]:
    """Return True if a value is a numpy array, without importing numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)
