"""What stands for the objects of a pickle that is read without unpickling it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dist_ckpt.errors import IncompatibleError

# A list or dict may be in several others, by two bytes each; what is made of a stream may be so
# many times as large as it.
_MOST_TIMES = 64
_FREE = 1 << 16


class PlaceholderFactory:
    """A function of ours, for what a stream wants to be called under a name."""

    __slots__ = ("make", "name")

    def __init__(self, name: str, make: Callable[..., object]) -> None:
        self.name = name
        self.make = make


class Settable(Protocol):
    """A stand-in that takes a state after it was made."""

    def set_state(self, state: object) -> None:
        """Take it. ValueError or TypeError if it is none."""


class PickledRecord:
    """An instance of a class that is not looked up: its fields."""

    __slots__ = ("fields", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.fields: dict[str, object] = {}

    def set_state(self, state: object) -> None:
        """Take the fields."""
        if not isinstance(state, dict):
            raise TypeError(f"the state of a {self.name} is no dict")
        self.fields = state


def record_maker(name: str, cls: type[PickledRecord] = PickledRecord) -> PlaceholderFactory:
    """Return what stands for a class: it makes records, which get their fields afterwards."""

    def make(*args: object) -> PickledRecord:
        if args:
            raise TypeError(f"a {name} that is made of something")
        return cls(name)

    return PlaceholderFactory(name, make)


class UnknownObject:
    """What a stream names and no table has, or what that was called for: nothing but the name."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return f"names {self.name}, which is not run here: it is no plain data"


class PickleBudget:
    """What may still be made of a stream of so many bytes. ValueError when it is spent."""

    def __init__(self, nbytes: int) -> None:
        self._left = _MOST_TIMES * nbytes + _FREE

    def spend(self, count: int) -> None:
        """Note that so much is made."""
        self._left -= count
        if self._left < 0:
            raise ValueError("it is short, and would make far more than it has bytes")


def remedied(unknown: UnknownObject, what: str) -> IncompatibleError:
    """Return the error for what is unknown, and cannot be left out."""
    return IncompatibleError(f"{what} {unknown}; save it again without that")


def shown(value: object) -> str:
    """Return a value in short, for messages; a number may be too long for `repr`."""
    if type(value) is int and value.bit_length() > 64:
        return "a number beyond 64 bits"
    if isinstance(value, str):
        return ascii(value[:60])
    return str(value) if type(value) in (int, bool, float) else f"a {type(value).__name__}"
