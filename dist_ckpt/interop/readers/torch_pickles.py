"""The names in pickles of torch.save, with their placeholders; torch is not needed."""

from __future__ import annotations

import datetime
import pathlib
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.geometry import Shape, row_major_strides
from dist_ckpt.core.format.objects.plain_types import (
    FACTORIES,
    ArrayValue,
    Device,
    DTypeValue,
    NumpyScalar,
    Size,
)
from dist_ckpt.errors import IncompatibleError
from dist_ckpt.interop.readers.restricted_pickle import PlaceholderFactory, members, quote

_MAX_NDIM = 64
_MAX_KEY_CHARS = 1 << 16

# The classes of typed storages, which torch still writes.
STORAGES = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexDouble": "complex128",
    "ComplexFloat": "complex64",
}


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A storage of tensors: the record with its bytes, and its dtype if it has one."""

    key: str
    dtype: str | None


@dataclass(frozen=True, slots=True)
class TensorView:
    """A tensor in a file: elements of a record, from index `start` on, with `strides`."""

    storage: StorageRef
    dtype: str
    start: int
    shape: Shape
    strides: Shape

    @property
    def itemsize(self) -> int:
        """The size of an element in bytes."""
        return DTYPES[self.dtype].itemsize

    @property
    def is_contiguous(self) -> bool:
        """True if the elements are stored row-major without gaps."""
        row_major = row_major_strides(self.shape)
        dims = zip(self.shape, self.strides, row_major, strict=True)
        return 0 in self.shape or all(size == 1 or a == b for size, a, b in dims)

    @property
    def num_spanned(self) -> int:
        """The number of elements from the first to the last, both included."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))


def storage_of(identity: object) -> object:
    """Return the storage of a persistent id of torch.save."""
    match identity:
        case ("storage", DTypeValue(name), str(key), _, int()):
            return StorageRef(key, name)
        case ("storage", "a storage", str(key), _, int()):
            return StorageRef(key, None)
    raise TypeError("a persistent id that is not a storage")


def _tensor(
    storage: object, start: object, shape: object, strides: object, *rest: object
) -> TensorView:
    """`_rebuild_tensor_v2`: the rest is requires_grad, hooks and metadata."""
    if not isinstance(storage, StorageRef) or storage.dtype is None:
        raise TypeError("a tensor without a storage")
    return _view(storage, storage.dtype, start, shape, strides, *rest[2:])


def _tensor_of_dtype(
    storage: object, start: object, shape: object, strides: object, *rest: object
) -> TensorView:
    """`_rebuild_tensor_v3`: of an untyped storage; a dtype comes before the metadata."""
    if not isinstance(storage, StorageRef) or len(rest) < 3:
        raise TypeError("a tensor without a storage")
    if not isinstance(rest[2], DTypeValue):
        raise TypeError("a tensor without a dtype")
    return _view(storage, rest[2].name, start, shape, strides, *rest[3:])


def _view(
    storage: StorageRef, dtype: str, start: object, shape: object, strides: object, *rest: object
) -> TensorView:
    if any(rest):
        raise IncompatibleError(
            "a tensor is a conjugate or negative view: save it again after resolve_conj() and "
            "resolve_neg()"
        )
    sizes, steps = _sizes(shape), _sizes(strides)
    if type(start) is not int or start < 0 or len(sizes) != len(steps):
        raise TypeError("a tensor without a location")
    return TensorView(storage, dtype, start, sizes, steps)


def _sizes(value: object) -> Shape:
    value = value.shape if isinstance(value, Size) else value
    if not isinstance(value, tuple | list) or len(value) > _MAX_NDIM:
        raise TypeError("invalid sizes")
    for size in value:
        if type(size) is not int or not 0 <= size < 1 << 63:
            raise ValueError(f"{quote(size)} is not a size")
    return tuple(value)


def _parameter(tensor: object, *_: object) -> TensorView:
    if not isinstance(tensor, TensorView):
        raise TypeError("a parameter without a tensor")
    return tensor


def _tensor_of_class(function: object, cls: object, args: object, _: object) -> object:
    """`_rebuild_from_type_v2`: a tensor with attributes, which are dropped."""
    if (
        cls not in _TENSOR_CLASSES
        or not isinstance(function, PlaceholderFactory)
        or type(args) is not tuple
    ):
        raise TypeError("a tensor of another class")
    if function.make is _tensor_of_class:  # again and again: as deep as a file likes
        raise TypeError("a tensor of a class within another")
    return _parameter(function.make(*args))


def _device(kind: object, index: object = None) -> Device:
    if type(kind) is not str or type(index) not in (int, type(None)):
        raise TypeError("an invalid device")
    return Device(kind if index is None else f"{kind}:{index}")


def _encode(text: object, encoding: object = "latin1") -> bytes:
    """Return the bytes that protocol 2 wrote as text."""
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise TypeError("bytes in an encoding other than latin1")
    return text.encode("latin-1")


def _list(items: object = ()) -> list[object]:
    if not isinstance(items, list | tuple):
        raise TypeError("invalid items")
    return list(items)


def _ordered_dict(pairs: object = ()) -> OrderedDict[Any, object]:
    if not isinstance(pairs, list | tuple) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs
    ):
        raise TypeError("invalid pairs")
    if any(type(key) in (str, bytes) and len(key) > _MAX_KEY_CHARS for key, _ in pairs):
        raise TypeError("a long key")  # compared whole, again and again
    list(members([key for key, _ in pairs]))
    return OrderedDict((key, value) for key, value in pairs)


def _counter(counts: object = None) -> Counter[Any]:
    if type(counts) is not dict or not all(type(n) is int for n in counts.values()):
        raise TypeError("invalid counts")
    return Counter(counts)


def _defaultdict(factory: object = None) -> defaultdict[Any, object]:
    name = factory.name if isinstance(factory, PlaceholderFactory) else "None"
    if name not in FACTORIES or (factory is not None and name == "None"):
        raise TypeError("a defaultdict whose factory is not a builtin type")
    return defaultdict(FACTORIES[name])


def _deque(items: object = (), most: object = None) -> deque[object]:
    if type(most) not in (int, type(None)) or not isinstance(items, list | tuple):
        raise TypeError("an invalid deque")
    return deque(items, most if isinstance(most, int) else None)


def _complex(real: object, imaginary: object) -> complex:
    if type(real) is not float or type(imaginary) is not float:
        raise TypeError("an invalid complex number")
    return complex(real, imaginary)


def _path(cls: type[pathlib.PurePath]) -> PlaceholderFactory:
    def make(*parts: object) -> pathlib.PurePath:
        if not all(type(part) is str for part in parts):
            raise TypeError("an invalid path")
        return cls(*parts)  # type: ignore[arg-type]

    return PlaceholderFactory(cls.__name__, make)


def _time(cls: type[datetime.datetime] | type[datetime.date]) -> PlaceholderFactory:
    def make(packed: object, *_: object) -> object:
        packed = packed.encode("latin-1") if type(packed) is str else packed
        if type(packed) is not bytes or _:
            raise TypeError("an invalid time, or one with a time zone: save it as text")
        return cls(packed)  # type: ignore[arg-type,call-arg]

    return PlaceholderFactory(cls.__name__, make)


def _refuse(*_: object) -> object:
    raise TypeError("a call of a type")


# --- numpy -----------------------------------------------------------------------------------


class _NumpyDType:
    """A numpy dtype: its code, such as "<f8"."""

    def __init__(self, code: object, *_: object) -> None:
        if type(code) is not str or len(code) > 16:
            raise TypeError("an invalid numpy dtype")
        self._name = code
        self.code = f"|{code}"

    def set_state(self, state: object) -> None:
        """Set the byte order from the second field; the next fields are of structs and units."""
        if not isinstance(state, tuple) or len(state) < 5 or type(state[1]) is not str:
            raise TypeError("a numpy dtype without a state")
        # A dtype with fields, or a big-endian one, has no name here.
        order = state[1] if all(part is None for part in state[2:5]) else ">"
        self.code = f"{order}{self._name}"


# The numpy codes of dtypes that are stored as tensors.
_OF_NUMPY = {
    **{f"i{n}": f"int{n * 8}" for n in (1, 2, 4, 8)},
    **{f"u{n}": f"uint{n * 8}" for n in (1, 2, 4, 8)},
    **{f"f{n}": f"float{n * 8}" for n in (2, 4, 8)},
    **{f"c{n}": f"complex{n * 8}" for n in (8, 16)},
    "b1": "bool",
}


class NumpyArray:
    """A numpy array, valid once it has its state."""

    def __init__(self, *_: object) -> None:
        self.value: ArrayValue | None = None

    def set_state(self, state: object) -> None:
        """Set the shape, the dtype and the bytes; `value` stays None for unsupported arrays."""
        match state:
            case (int(), shape, _NumpyDType() as dtype, False, bytes(data)):
                name, sizes = _OF_NUMPY.get(dtype.code[1:]), _sizes(shape)
                if name is None or dtype.code[0] not in "<|":
                    return
                if prod(sizes) * DTYPES[name].itemsize != len(data):
                    raise ValueError("an array with too many or too few bytes")
                self.value = ArrayValue(name, sizes, data, "numpy")
            case (int(), _, _NumpyDType(), bool(), bytes() | list()):
                return  # in column order, or of objects
            case _:
                raise TypeError("an invalid numpy array")


def _numpy_scalar(dtype: object, data: object) -> NumpyScalar:
    if not isinstance(dtype, _NumpyDType) or type(data) is not bytes or dtype.code[0] == ">":
        raise TypeError("an invalid numpy scalar")
    return NumpyScalar(dtype.code, data)


# --- the table -------------------------------------------------------------------------------

_TENSOR_CLASSES = ("torch Tensor", "torch.nn.parameter Parameter", "torch.nn.parameter Buffer")


_BUILTINS: Mapping[str, Callable[..., object]] = {
    "list": _list,
    "set": lambda items=(): set(members(items)),
    "frozenset": lambda items=(): frozenset(members(items)),
    "complex": _complex,
    "range": range,
    # Only the names are used: for a defaultdict.
    **dict.fromkeys(("dict", "int", "float", "bool", "str", "tuple"), _refuse),
    # Protocol 2 writes the empty bytes as a call.
    "bytes": lambda *args: _encode(None if args else ""),
}
_PATHS = {
    "PosixPath": pathlib.PurePosixPath if sys.platform == "win32" else pathlib.PosixPath,
    "WindowsPath": pathlib.PureWindowsPath,
    "PurePosixPath": pathlib.PurePosixPath,
    "PureWindowsPath": pathlib.PureWindowsPath,
}
_NUMPY_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")

TABLE: Mapping[str, object] = {
    **{f"torch {name}": DTypeValue(name) for name in DTYPES},
    **{f"torch {name}Storage": DTypeValue(dtype) for name, dtype in STORAGES.items()},
    "torch.storage UntypedStorage": "a storage",
    **{name: name for name in _TENSOR_CLASSES},
    "torch._utils _rebuild_tensor_v2": PlaceholderFactory("tensor", _tensor),
    "torch._utils _rebuild_tensor_v3": PlaceholderFactory("tensor", _tensor_of_dtype),
    "torch._utils _rebuild_parameter": PlaceholderFactory("parameter", _parameter),
    "torch._utils _rebuild_parameter_with_state": PlaceholderFactory("parameter", _parameter),
    "torch._tensor _rebuild_from_type_v2": PlaceholderFactory("tensor", _tensor_of_class),
    "torch Size": PlaceholderFactory("Size", lambda sizes: Size(_sizes(sizes))),
    "torch device": PlaceholderFactory("device", _device),
    "collections OrderedDict": PlaceholderFactory("OrderedDict", _ordered_dict),
    "collections Counter": PlaceholderFactory("Counter", _counter),
    "collections defaultdict": PlaceholderFactory("defaultdict", _defaultdict),
    "collections deque": PlaceholderFactory("deque", _deque),
    "_codecs encode": PlaceholderFactory("encode", _encode),
    "datetime datetime": _time(datetime.datetime),
    "datetime date": _time(datetime.date),
    **{
        f"{module} {name}": _path(cls)
        for module in ("pathlib", "pathlib._local")
        for name, cls in _PATHS.items()
    },
    **{
        f"{module} {name}": PlaceholderFactory(name, make)
        for module in ("builtins", "__builtin__")
        for name, make in _BUILTINS.items()
    },
    "__builtin__ xrange": PlaceholderFactory("range", range),
    "numpy dtype": PlaceholderFactory("dtype", _NumpyDType),
    "numpy ndarray": "an array",
    **{f"{m} scalar": PlaceholderFactory("scalar", _numpy_scalar) for m in _NUMPY_MODULES},
    **{f"{m} _reconstruct": PlaceholderFactory("_reconstruct", NumpyArray) for m in _NUMPY_MODULES},
}
