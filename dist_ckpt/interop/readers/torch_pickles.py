"""The names that a pickle of torch.save may have, and what is made for each, without torch."""

from __future__ import annotations

import datetime
import pathlib
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
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
    numpy_itemsize,
)
from dist_ckpt.errors import IncompatibleError
from dist_ckpt.interop.readers.restricted_pickle import (
    PlaceholderFactory,
    UnknownObject,
    check_members,
    quote,
)

_MAX_NDIM = 64
_MAX_KEY_CHARS = 1 << 16

# The dtype of each typed storage: torch still writes these classes.
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
    """A storage of tensors: the record with its bytes, and its dtype if it has one.

    If the bytes are in the pickle itself, they are in `data`, and no record has them.
    """

    key: str
    dtype: str | None
    data: bytes | None = None


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


def resolve_storage(identity: object) -> object:
    """Return the storage that a persistent id of torch.save names."""
    match identity:
        case ("storage", DTypeValue(name), str(key), _, int()):
            return StorageRef(key, name)
        case ("storage", "a storage", str(key), _, int()):
            return StorageRef(key, None)
    raise TypeError("a persistent id that is not a storage")


def _make_tensor(
    storage: object, start: object, shape: object, strides: object, *rest: object
) -> TensorView:
    """`_rebuild_tensor_v2`. The rest is requires_grad, hooks and metadata."""
    if not isinstance(storage, StorageRef) or storage.dtype is None:
        raise TypeError("a tensor without a storage")
    return _make_view(storage, storage.dtype, start, shape, strides, *rest[2:])


def _make_tensor_of_dtype(
    storage: object, start: object, shape: object, strides: object, *rest: object
) -> TensorView:
    """`_rebuild_tensor_v3`, of an untyped storage. The rest is as above, with the dtype third."""
    if not isinstance(storage, StorageRef) or len(rest) < 3:
        raise TypeError("a tensor without a storage")
    if not isinstance(rest[2], DTypeValue):
        raise TypeError("a tensor without a dtype")
    return _make_view(storage, rest[2].name, start, shape, strides, *rest[3:])


def _make_view(
    storage: StorageRef, dtype: str, start: object, shape: object, strides: object, *rest: object
) -> TensorView:
    if any(rest):
        raise IncompatibleError(
            "a tensor is a conjugate or negative view: save it again after resolve_conj() and "
            "resolve_neg()"
        )
    sizes, steps = _check_sizes(shape), _check_sizes(strides)
    if type(start) is not int or start < 0 or len(sizes) != len(steps):
        raise TypeError("a tensor without a location")
    return TensorView(storage, dtype, start, sizes, steps)


def _check_sizes(value: object) -> Shape:
    value = value.shape if isinstance(value, Size) else value
    if not isinstance(value, tuple | list) or len(value) > _MAX_NDIM:
        raise TypeError("invalid sizes")
    for size in value:
        if type(size) is not int or not 0 <= size < 1 << 63:
            raise ValueError(f"{quote(size)} is not a size")
    return tuple(value)


def _make_parameter(tensor: object, *_: object) -> TensorView:
    if not isinstance(tensor, TensorView):
        raise TypeError("a parameter without a tensor")
    return tensor


def _make_tensor_of_class(function: object, cls: object, args: object, _: object) -> object:
    """`_rebuild_from_type_v2`, a tensor with attributes. They are dropped."""
    if (
        cls not in _TENSOR_CLASSES
        or not isinstance(function, PlaceholderFactory)
        or type(args) is not tuple
    ):
        raise TypeError("a tensor of another class")
    if function.make is _make_tensor_of_class:  # a file could nest them without limit
        raise TypeError("a tensor of a class within another")
    return _make_parameter(function.make(*args))


def _make_device(kind: object, index: object = None) -> Device:
    if type(kind) is not str or type(index) not in (int, type(None)):
        raise TypeError("an invalid device")
    return Device(kind if index is None else f"{kind}:{index}")


def _encode_latin1(text: object, encoding: object = "latin1") -> bytes:
    """Return the bytes that protocol 2 wrote as text."""
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise TypeError("bytes in an encoding other than latin1")
    return text.encode("latin-1")


def _make_list(items: object = ()) -> list[object]:
    if not isinstance(items, list | tuple):
        raise TypeError("invalid items")
    return list(items)


def _make_ordered_dict(pairs: object = ()) -> OrderedDict[Any, object]:
    if not isinstance(pairs, list | tuple) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs
    ):
        raise TypeError("invalid pairs")
    if any(type(key) in (str, bytes) and len(key) > _MAX_KEY_CHARS for key, _ in pairs):
        raise TypeError("a long key")  # each comparison of two keys takes their length
    list(check_members([key for key, _ in pairs]))
    return OrderedDict((key, value) for key, value in pairs)


def _make_counter(counts: object = None) -> Counter[Any]:
    if type(counts) is not dict or not all(type(n) is int for n in counts.values()):
        raise TypeError("invalid counts")
    return Counter(counts)


def _make_defaultdict(factory: object = None) -> defaultdict[Any, object]:
    name = factory.name if isinstance(factory, PlaceholderFactory) else "None"
    if name not in FACTORIES or (factory is not None and name == "None"):
        raise TypeError("a defaultdict whose factory is not a builtin type")
    return defaultdict(FACTORIES[name])


def _make_deque(items: object = (), most: object = None) -> deque[object]:
    if type(most) not in (int, type(None)) or not isinstance(items, list | tuple):
        raise TypeError("an invalid deque")
    return deque(items, most if isinstance(most, int) else None)


def _make_complex(real: object, imaginary: object) -> complex:
    if type(real) is not float or type(imaginary) is not float:
        raise TypeError("an invalid complex number")
    return complex(real, imaginary)


def _make_path(cls: type[pathlib.PurePath], *parts: object) -> pathlib.PurePath:
    if not all(type(part) is str for part in parts):
        raise TypeError("an invalid path")
    return cls(*parts)  # type: ignore[arg-type]


def _make_time(
    cls: type[datetime.datetime] | type[datetime.date], packed: object, *zone: object
) -> object:
    packed = packed.encode("latin-1") if type(packed) is str else packed
    if type(packed) is not bytes or zone:
        raise TypeError("an invalid time, or one with a time zone: save it as text")
    return cls(packed)  # type: ignore[arg-type,call-arg]


def _refuse_call(*_: object) -> object:
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
        """Set the byte order from the second field, and the unit of a time from the last one."""
        if not isinstance(state, tuple) or len(state) < 5 or type(state[1]) is not str:
            raise TypeError("a numpy dtype without a state")
        # A dtype with fields, or a big-endian one, has no name here.
        order = state[1] if all(part is None for part in state[2:5]) else ">"
        is_time = self._name in ("M8", "m8") and len(state) > 8
        self.code = f"{order}{self._name}{_time_unit(state[8]) if is_time else ''}"


_TIME_UNITS = (b"Y", b"M", b"W", b"D", b"h", b"m", b"s", b"ms", b"us", b"ns", b"ps", b"fs", b"as")


def _time_unit(metadata: object) -> str:
    """Return a unit of datetime64 or timedelta64 as in numpy's code, such as "[ms]" or "[25s]"."""
    match metadata:
        case (_, (b"generic", _, _, _)):
            return ""
        case (_, (unit, int(count), 1, 1)) if unit in _TIME_UNITS and 0 < count < 1 << 31:
            return f"[{count if count > 1 else ''}{unit.decode()}]"
    raise TypeError("an invalid unit of a numpy time")


# The dtypes that are stored as tensors, by numpy's code without the byte order.
_NUMPY_DTYPES = {
    **{f"i{n}": f"int{n * 8}" for n in (1, 2, 4, 8)},
    **{f"u{n}": f"uint{n * 8}" for n in (1, 2, 4, 8)},
    **{f"f{n}": f"float{n * 8}" for n in (2, 4, 8)},
    **{f"c{n}": f"complex{n * 8}" for n in (8, 16)},
    "b1": "bool",
}


class NumpyArray:
    """A numpy array. `value` is set with its state, and stays None for an unsupported array."""

    def __init__(self, *_: object) -> None:
        self.value: ArrayValue | None = None
        self.dtype = "unknown"
        self._is_bfloat16: bool | None = None

    def is_bfloat16(self) -> bool:
        """Return True if no value of a float32 array has more digits than bfloat16."""
        if self._is_bfloat16 is None:  # a hostile file may ask many times
            data = self.value.data if self.value is not None else b""
            self._is_bfloat16 = not any(data[half::4].strip(b"\0") for half in (0, 1))
        return self._is_bfloat16

    def set_state(self, state: object) -> None:
        """Set the dtype, the shape and the bytes."""
        match state:
            case (int(), shape, _NumpyDType() as dtype, False, bytes(data)):
                self.dtype = dtype.code
                name, sizes = _NUMPY_DTYPES.get(dtype.code[1:]), _check_sizes(shape)
                if name is None or dtype.code[0] not in "<|":
                    return
                if prod(sizes) * DTYPES[name].itemsize != len(data):
                    raise ValueError("an array with too many or too few bytes")
                self.value = ArrayValue(name, sizes, data, "numpy")
            case (int(), _, _NumpyDType() as dtype, bool(), bytes() | list()):
                self.dtype = f"{dtype.code} in column order"  # or of objects: "|O8"
            case _:
                raise TypeError("an invalid numpy array")


def _make_tensor_of_numpy(
    array: object, dtype: object, device: object, _: object
) -> TensorView | UnknownObject:
    """`_rebuild_device_tensor_from_numpy`: a tensor of a device without storages, such as XLA."""
    if not isinstance(array, NumpyArray) or not isinstance(dtype, DTypeValue):
        raise TypeError("a tensor without an array")
    if (value := array.value) is None:
        fact = f"is a tensor of {quote(device)} in a numpy array of dtype {array.dtype}"
        return UnknownObject("torch.Tensor", f"{fact}, which cannot be stored")
    strides = row_major_strides(value.shape)
    storage = StorageRef("in the pickle", dtype.name, value.data)
    if value.dtype == dtype.name:
        return TensorView(storage, dtype.name, 0, value.shape, strides)
    if (value.dtype, dtype.name) != ("float32", "bfloat16") or not array.is_bfloat16():
        fact = f"is a tensor of {dtype.name}, saved by {quote(device)} as {value.dtype}"
        return UnknownObject("torch.Tensor", f"{fact}: save it from the CPU (`tensor.cpu()`)")
    # numpy has no bfloat16. In the float32 of such a value, the high two bytes are the value.
    return TensorView(storage, dtype.name, 1, value.shape, tuple(2 * step for step in strides))


def _make_numpy_scalar(dtype: object, data: object) -> NumpyScalar | UnknownObject:
    if not isinstance(dtype, _NumpyDType) or type(data) is not bytes:
        raise TypeError("an invalid numpy scalar")
    code, itemsize = dtype.code, numpy_itemsize(dtype.code)
    if itemsize is None or code[0] == ">":
        return UnknownObject(code, f"is a numpy scalar of dtype {code}, which cannot be stored")
    if len(data) != itemsize:
        raise ValueError(f"{len(data)} bytes for a numpy scalar of dtype {code}")
    if code[1] in "SU" and data.endswith(b"\0" * (4 if code[1] == "U" else 1)):
        return UnknownObject(
            code, f"is a numpy scalar of dtype {code} with NULs at its end, which numpy drops"
        )
    return NumpyScalar(code, data)


# --- the table -------------------------------------------------------------------------------

_TENSOR_CLASSES = ("torch Tensor", "torch.nn.parameter Parameter", "torch.nn.parameter Buffer")

_PATHS: Mapping[str, type[pathlib.PurePath]] = {
    "PosixPath": pathlib.PurePosixPath if sys.platform == "win32" else pathlib.PosixPath,
    "WindowsPath": pathlib.PureWindowsPath,
    "PurePosixPath": pathlib.PurePosixPath,
    "PureWindowsPath": pathlib.PureWindowsPath,
}

_BUILTINS: Mapping[str, Callable[..., object]] = {
    "list": _make_list,
    "set": lambda items=(): set(check_members(items)),
    "frozenset": lambda items=(): frozenset(check_members(items)),
    "complex": _make_complex,
    "range": range,
    # Only the names are used: for a defaultdict.
    **dict.fromkeys(("dict", "int", "float", "bool", "str", "tuple"), _refuse_call),
    # Protocol 2 writes the empty bytes as a call.
    "bytes": lambda *args: _encode_latin1(None if args else ""),
}

_FUNCTIONS: Mapping[str, Callable[..., object]] = {
    "torch._utils _rebuild_tensor_v2": _make_tensor,
    "torch._utils _rebuild_tensor_v3": _make_tensor_of_dtype,
    "torch._utils _rebuild_device_tensor_from_numpy": _make_tensor_of_numpy,
    "torch._utils _rebuild_xla_tensor": _make_tensor_of_numpy,  # its name in old versions
    "torch._utils _rebuild_parameter": _make_parameter,
    "torch._utils _rebuild_parameter_with_state": _make_parameter,
    "torch._tensor _rebuild_from_type_v2": _make_tensor_of_class,
    "torch Size": lambda sizes: Size(_check_sizes(sizes)),
    "torch device": _make_device,
    "collections OrderedDict": _make_ordered_dict,
    "collections Counter": _make_counter,
    "collections defaultdict": _make_defaultdict,
    "collections deque": _make_deque,
    "_codecs encode": _encode_latin1,
    "datetime datetime": partial(_make_time, datetime.datetime),
    "datetime date": partial(_make_time, datetime.date),
    "__builtin__ xrange": range,
    "numpy dtype": _NumpyDType,
    **{
        f"{module} {name}": partial(_make_path, cls)
        for module in ("pathlib", "pathlib._local")
        for name, cls in _PATHS.items()
    },
    **{
        f"{module} {name}": make
        for module in ("builtins", "__builtin__")
        for name, make in _BUILTINS.items()
    },
    **{
        f"{module} {name}": make
        for module in ("numpy.core.multiarray", "numpy._core.multiarray")
        for name, make in (("scalar", _make_numpy_scalar), ("_reconstruct", NumpyArray))
    },
}

# The value or function for each name in a pickle of torch.save.
TORCH_NAMES: Mapping[str, object] = {
    **{f"torch {name}": DTypeValue(name) for name in DTYPES},
    **{f"torch {name}Storage": DTypeValue(dtype) for name, dtype in STORAGES.items()},
    "torch.storage UntypedStorage": "a storage",
    **{name: name for name in _TENSOR_CLASSES},
    "numpy ndarray": "an array",
    **{name: PlaceholderFactory(name.split()[1], make) for name, make in _FUNCTIONS.items()},
}
