"""Tensors that are made of others: quantized weights, the state of 8-bit optimizers.

We call them compound; torch, traceable wrapper subclasses: `__tensor_flatten__` names the
attributes that are tensors and gives what else there is, the context; `__tensor_unflatten__` makes
one again. A checkpoint has each inner tensor under a name of its own, `<fqn>.<attribute>`, and in
`<fqn>.__class__` a record of what they are parts of, which a load compares with the live tensor's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, TypeGuard

import torch
from torch.distributed.tensor import DTensor

from dist_ckpt.format.geometry import Shape
from dist_ckpt.format.objects_file import check_plain
from dist_ckpt.runtime.torch_private import AsyncCollectiveTensor
from dist_ckpt.state.containers import join
from dist_ckpt.state.local_tensors import PLAIN, class_name


def is_compound(value: object) -> TypeGuard[torch.Tensor]:
    """Say whether a value is a tensor that is made of others, and is not known by another name."""
    return (
        is_compound_class(type(value))
        # The sizes of these are symbols, which are made of the values of their inner tensors.
        and not value.is_nested  # type: ignore[attr-defined]
    )


def is_compound_class(cls: object) -> TypeGuard[type[torch.Tensor]]:
    """Say whether the tensors of a class are made of others."""
    return (
        isinstance(cls, type)
        and issubclass(cls, torch.Tensor)
        and not issubclass(cls, DTensor | AsyncCollectiveTensor)
        and hasattr(cls, "__tensor_flatten__")
        and hasattr(cls, "__tensor_unflatten__")
    )


def unwrapped(value: Any) -> Any:
    """Return the tensor that a compound one stands for, or the value itself if it is more.

    Such a one (that of float8 all-gather) holds one tensor of its own shape and dtype. What it
    stands for is stored under its name, and loads into a model without it.
    """
    while type(value) not in PLAIN and is_compound(value):
        names = list(_flattened(value)[0])
        alike = [name for name in names if _is_alike(getattr(value, name, None), value)]
        if len(alike) != 1 or (len(names) > 1 and _names_kept(value) != alike):
            return value
        value = getattr(value, alike[0])
    return value


def inner_tensors(value: torch.Tensor, fqn: str) -> dict[str, torch.Tensor]:
    """Return what a tensor is made of, by attribute. Raises TypeError if that is no tensor."""
    inner = {}
    for name in _flattened(value)[0]:
        tensor = getattr(value, name, None)
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"{fqn}: {class_name(value)} names {name!r} in `__tensor_flatten__`, which is a "
                f"{class_name(tensor)}: mend the class, or store its tensors in a dict"
            )
        inner[name] = tensor
    return inner


def record_of(value: torch.Tensor, fqn: str, shape: Shape | None = None) -> dict[str, object]:
    """Return what a checkpoint says of a tensor beside its inner ones: plain data.

    `shape` is that of the whole, if the value is a part. `exact` says whether `context` is the
    context itself, so that one could be made of it.
    """
    described = _Described(f"{fqn}: the context of {class_name(value)}")
    whole = tuple(value.shape) if shape is None else shape
    return {
        "class": class_name(value),
        "dtype": value.dtype,
        "shape": whole,
        "context": resized(described.of(_flattened(value)[1]), tuple(value.shape), whole),
        "exact": described.is_exact,
    }


def resized(context: object, shape: Shape, new: Shape) -> object:
    """Return a described context with the size of another part of the whole, where it has one."""
    if isinstance(context, torch.Size):
        return torch.Size(new) if tuple(context) == shape else context
    if type(context) is dict:
        return {key: resized(item, shape, new) for key, item in context.items()}
    if type(context) in (list, tuple):
        assert isinstance(context, list | tuple)
        return type(context)([resized(item, shape, new) for item in context])
    return context


def difference(saved: object, own: object, name: str = "") -> str | None:
    """Say in what a saved record and one's own differ, or None if they are alike."""
    if isinstance(saved, Mapping) and isinstance(own, Mapping):
        for key in {**own, **saved}:
            found = difference(saved.get(key), own.get(key), join(name, key))
            if found is not None:
                return found
        return None
    return None if saved == own else f"saved with {name} {saved!r}, the state has {own!r}"


def _flattened(value: torch.Tensor) -> tuple[Sequence[str], object]:
    flattened: tuple[Sequence[str], object] = value.__tensor_flatten__()  # type: ignore[attr-defined]
    return flattened


def _is_alike(inner: object, outer: torch.Tensor) -> bool:
    if not isinstance(inner, torch.Tensor):
        return False
    return inner.dtype == outer.dtype and inner.shape == outer.shape


def _names_kept(value: torch.Tensor) -> list[str]:
    """Return the inner tensors that a state dict would have: what `detach` drops is a cache."""
    kept = value.detach()
    return list(_flattened(kept)[0]) if is_compound(kept) else []


class _Described:
    """A context in words that can be stored and compared; nothing of it is ever looked up."""

    def __init__(self, what: str) -> None:
        self._what = what
        self.is_exact = True

    def of(self, value: object) -> object:
        if type(value) is dict:
            return {key: self.of(item) for key, item in value.items()}
        if type(value) in (list, tuple):
            assert isinstance(value, list | tuple)
            return type(value)([self.of(item) for item in value])
        if (named := _fields_of(value)) is not None:
            self.is_exact = False
            return {"class": class_name(value), **{k: self.of(v) for k, v in named.items()}}
        if (text := _text_of(value)) is not None:
            self.is_exact = False
            return text
        try:
            check_plain(value, self._what)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"{self._what} has a {class_name(value)}, which cannot be compared: make it a "
                "dataclass, or store the inner tensors in a dict"
            ) from error
        return value


def _fields_of(value: object) -> Mapping[str, object] | None:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        named: Mapping[str, object] = value._asdict()
        return named
    return None


def _text_of(value: object) -> str | None:
    if isinstance(value, Enum):
        return f"{class_name(value)}.{value.name}"
    if isinstance(value, type | FunctionType | BuiltinFunctionType | MethodType):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, torch.device):
        return "a device"  # where a tensor is, is no part of what it is
    if isinstance(value, torch.layout | torch.memory_format):
        return str(value)
    return None
