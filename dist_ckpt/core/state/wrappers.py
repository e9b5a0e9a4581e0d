"""Wrappers that the user puts around values of a state. The module does not import torch.

`LocalShard` and `FlatShard` describe the part of a tensor on this rank. `PerRank` and `RNG` mark
values of one rank. `Named` gives names to an optimizer's parameters.
"""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from math import prod
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from dist_ckpt.core.format.geometry import Shape
from dist_ckpt.core.format.index.index import Key
from dist_ckpt.core.format.strict_json import is_text
from dist_ckpt.errors import IncompatibleError

if TYPE_CHECKING:
    from torch import Tensor

# The action of a load if the keys or the mesh differ from the saved ones. "error" raises and "drop"
# keeps the current value. A function `f(values_by_key, key)` returns the value. The user chooses
# the types of keys and values.
OnReshard = Literal["error", "drop"] | Callable[[Mapping[Any, Any], Any], object]


@dataclass(frozen=True, slots=True, eq=False)
class LocalShard:
    """A box of a global tensor: `tensor` is its part that begins at `offset` in `global_shape`."""

    tensor: Tensor
    global_shape: Shape
    offset: Shape

    def __init__(self, tensor: Tensor, global_shape: Sequence[int], offset: Sequence[int]) -> None:
        shape = _read_shape(tensor, "LocalShard")
        object.__setattr__(self, "tensor", tensor)
        object.__setattr__(self, "global_shape", _check_ints(global_shape, "global_shape"))
        object.__setattr__(self, "offset", _check_ints(offset, "offset"))
        if not len(shape) == len(self.global_shape) == len(self.offset):
            raise ValueError(
                f"LocalShard of shape {shape} at {self.offset} in {self.global_shape}: give as "
                "many numbers in `global_shape` and `offset` as the tensor has dimensions"
            )
        if any(o + n > g for o, n, g in zip(self.offset, shape, self.global_shape, strict=True)):
            raise ValueError(
                f"LocalShard of shape {shape} at {self.offset} reaches beyond "
                f"{self.global_shape}: correct `offset` or `global_shape`"
            )


@dataclass(frozen=True, slots=True, eq=False)
class FlatShard:
    """A range of a global tensor: `tensor` has the elements of `global_shape` from `start` on.

    Elements are counted in row-major order. The shape of `tensor` itself does not matter.
    """

    tensor: Tensor
    global_shape: Shape
    start: int

    def __init__(self, tensor: Tensor, global_shape: Sequence[int], start: int) -> None:
        numel = prod(_read_shape(tensor, "FlatShard"))
        object.__setattr__(self, "tensor", tensor)
        object.__setattr__(self, "global_shape", _check_ints(global_shape, "global_shape"))
        object.__setattr__(self, "start", _check_ints((start,), "start")[0])
        if self.start + numel > prod(self.global_shape):
            raise ValueError(
                f"FlatShard of {numel} elements from {self.start} on reaches beyond the "
                f"{prod(self.global_shape)} of {self.global_shape}: correct `start` or "
                f"`global_shape`"
            )


@dataclass(slots=True)
class PerRank:
    """A value that belongs to one rank, or to all ranks with the same `key`.

    Without a key the value belongs to the rank. Ranks with equal keys must have equal values. A
    load replaces `value`, or calls its `load_state_dict` if it has one. If the keys differ from the
    saved keys, the `on_reshard` of the loaded state decides. "error" raises, and "drop" leaves the
    value unchanged. A function `f(values_by_key, key)` returns the value of a key.
    """

    value: object
    _: KW_ONLY
    key: Key | None = None
    on_reshard: OnReshard = "error"

    def __post_init__(self) -> None:
        if isinstance(self.value, PerRank | RNG):
            raise TypeError(
                f"PerRank holds a {type(self.value).__name__}: put that into the state itself"
            )
        _check_options(self.key, self.on_reshard)


@dataclass(frozen=True, slots=True, kw_only=True)
class RNG:
    """The random generators of this rank, Python's, numpy's and torch's; a load sets them last."""

    on_reshard: OnReshard = "error"
    key: Key | None = None

    def __post_init__(self) -> None:
        _check_options(self.key, self.on_reshard)

    def capture(self) -> dict[str, object]:
        """Return the states as plain data; those of numpy and torch only if imported."""
        data: dict[str, object] = {"python": random.getstate()}
        if "numpy" in sys.modules:
            state = sys.modules["numpy"].random.get_state(legacy=False)
            if (kind := state["bit_generator"]) != "MT19937":
                raise TypeError(
                    f"numpy's global generator is {kind}, which RNG does not support: store its "
                    "state in a PerRank"
                )
            key = state["state"]["key"].astype("<u4").tobytes()
            data["numpy"] = key, state["state"]["pos"], state["has_gauss"], state["gauss"]
        if "torch" in sys.modules:
            torch = sys.modules["torch"]
            data["torch"] = _to_bytes(torch.get_rng_state())
            device = _accelerator_type(torch)
            module = None if device is None else getattr(torch, device)
            # Only if the program has used the accelerator; this must not initialise it.
            if module and (not hasattr(module, "is_initialized") or module.is_initialized()):
                data["accelerator"] = (device, _to_bytes(module.get_rng_state()))
        return data

    def check(self, data: object) -> None:
        """Raise IncompatibleError if `restore` cannot set a result of `capture`. Sets nothing."""
        if not isinstance(data, dict) or not data.keys() <= _SETTERS.keys():
            raise IncompatibleError(
                "the saved value is not a state of random generators: exclude it from the load"
            )
        for part, state in data.items():
            try:
                _SETTERS[part](state, trial=True)
            except (TypeError, ValueError, RuntimeError, KeyError, OverflowError) as error:
                raise IncompatibleError(
                    f"the saved state of the {part} generator cannot be set here ({error}): "
                    "exclude it from the load, and seed the generators yourself"
                ) from error

    def restore(self, data: object) -> None:
        """Set the generators to a result of `capture`, after checking all of it."""
        self.check(data)
        assert isinstance(data, dict)
        for part, set_state in _SETTERS.items():
            if part in data:
                set_state(data[part], trial=False)


class _Optimizer(Protocol):
    @property
    def param_groups(self) -> Sequence[Mapping[str, Any]]: ...


@dataclass(frozen=True, slots=True, eq=False)
class Named:
    """An optimizer with names for its parameters, if no module of the state has these parameters.

    `names` is a name for each parameter, in the order of the groups, or a mapping from name to
    parameter such as `dict(model.named_parameters())`.
    """

    optimizer: _Optimizer
    names: Sequence[str] | Mapping[str, object]

    def __post_init__(self) -> None:
        if not hasattr(self.optimizer, "param_groups"):
            raise TypeError(f"Named takes an optimizer, not a {type(self.optimizer).__name__}")
        if isinstance(self.names, str) or not isinstance(self.names, Sequence | Mapping):
            raise TypeError(
                f"`names` is a {type(self.names).__name__}: give a list of names or a mapping from "
                "name to parameter, such as dict(model.named_parameters())"
            )
        if any(not isinstance(name, str) for name in self.names):
            raise TypeError("`names` has a name that is not a string")
        if isinstance(self.names, Sequence) and len(set(self.names)) != len(self.names):
            raise ValueError("`names` has a name twice: give each parameter its own")
        self.by_id()

    def by_id(self) -> dict[int, str]:
        """Return the name of each of the optimizer's parameters by the parameter's id()."""
        parameters = [
            (f"parameter {number} of group {group}", id(parameter))
            for group, options in enumerate(self.optimizer.param_groups)
            for number, parameter in enumerate(options["params"])
        ]
        if isinstance(self.names, Mapping):
            names = {id(tensor): name for name, tensor in reversed([*self.names.items()])}
            for position, key in parameters:
                if key not in names:
                    raise ValueError(f"`names` has no name for {position} of the optimizer: add it")
            return {key: names[key] for _, key in parameters}
        if len(self.names) != len(parameters):
            raise ValueError(
                f"`names` has {len(self.names)} names for {len(parameters)} parameters: give one "
                "each, in the order of the groups"
            )
        return {key: name for name, (_, key) in zip(self.names, parameters, strict=True)}


def per_rank_key(wrapper: PerRank | RNG, rank: int) -> Key:
    """Return the key of a per-rank value: the rank, unless the user has set one."""
    return rank if wrapper.key is None else wrapper.key


def _read_shape(tensor: object, wrapper: str) -> Shape:
    try:
        shape = getattr(tensor, "shape", None)
    except RuntimeError as error:  # torch's nested and uninitialised tensors have no shape
        raise TypeError(f"{wrapper} holds a tensor without a shape: {error}") from error
    if shape is None:
        raise TypeError(f"{wrapper} holds a {type(tensor).__name__}: give it a tensor")
    return tuple(shape)


def _check_ints(value: Sequence[int], name: str) -> Shape:
    if not isinstance(value, Iterable):
        raise TypeError(f"`{name}` is {value!r}: give a tuple of integers")
    numbers = tuple(value)
    if any(isinstance(n, bool) or not isinstance(n, int) for n in numbers):
        raise TypeError(f"`{name}` is {value!r}: give integers")
    if any(n < 0 for n in numbers):
        raise ValueError(f"`{name}` is {value!r}: it cannot be negative")
    return numbers


def _check_options(key: Key | None, on_reshard: OnReshard) -> None:
    if key is not None and not _is_key(key):
        raise TypeError(
            f"`key` is {key!r}: give an integer of 64 bits, a text, or a tuple of them such as "
            '("dp", dp_rank)'
        )
    if on_reshard not in ("error", "drop") and not callable(on_reshard):
        raise ValueError(
            f'`on_reshard` is {on_reshard!r}: give "error", "drop" or a function '
            "f(values_by_key, key) -> value"
        )


def _is_key(key: object) -> bool:
    if isinstance(key, tuple):
        return len(key) > 0 and all(_is_key(part) for part in key)
    if isinstance(key, str):
        return is_text(key)
    return isinstance(key, int) and not isinstance(key, bool) and -(1 << 63) <= key < 1 << 63


# --- random generators -----------------------------------------------------------------------
#
# Numpy and torch are looked up, not imported: a program that did not import them has not used their
# generators.


def _set_python(state: Any, *, trial: bool) -> None:
    generator: Any = random.Random() if trial else random  # noqa: S311 - it only tries the state
    generator.setstate(state)


def _set_numpy(state: Any, *, trial: bool) -> None:
    key, position, has_gauss, gauss = state
    if len(key) != 624 * 4:
        raise ValueError(f"its key has {len(key)} bytes instead of 2496")
    numbers = [int.from_bytes(key[i : i + 4], "little") for i in range(0, len(key), 4)]
    arguments = "MT19937", numbers, position, has_gauss, gauss
    if numpy := _import_if_installed("numpy"):
        (numpy.random.RandomState() if trial else numpy.random).set_state(arguments)


def _set_torch(state: Any, *, trial: bool) -> None:
    if torch := _import_if_installed("torch"):
        generator = torch.Generator() if trial else torch.default_generator
        generator.set_state(_to_tensor(torch, state))


def _set_accelerator(state: Any, *, trial: bool) -> None:
    device, data = state
    torch = _import_if_installed("torch")
    here = _accelerator_type(torch) if torch else None
    if torch is None or here is None or device != here:
        raise ValueError(f"it is for {device!r}, the accelerator here is {here!r}")
    set_state = torch.Generator(device).set_state if trial else getattr(torch, device).set_rng_state
    set_state(_to_tensor(torch, data))


# Each function sets a generator. With `trial` it sets a new one, to find out if the state is valid.
_SETTERS: dict[str, Callable[..., None]] = {
    "python": _set_python,
    "numpy": _set_numpy,
    "torch": _set_torch,
    "accelerator": _set_accelerator,
}


def _import_if_installed(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


def _accelerator_type(torch: ModuleType) -> str | None:
    if not torch.accelerator.is_available():
        return None
    return str(torch.accelerator.current_accelerator().type)


def _to_bytes(state: Any) -> bytes:
    return bytes(state.cpu().tolist())


def _to_tensor(torch: ModuleType, state: bytes) -> Any:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
