"""Refuse names that 0.2.0 has changed: the error says the new name. There are no aliases."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


def refuse_old_parameters(**new_names: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorate a function whose parameters were renamed: an old name raises TypeError."""

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            for old, new in new_names.items():
                if old in kwargs:
                    raise TypeError(f"{old}= is called {new}= since dist_ckpt 0.2.0: write {new}=")
            return function(*args, **kwargs)

        return checked

    return decorate


def refuse_old_attributes(
    owner: str, new_names: Mapping[str, str]
) -> Callable[[object, str], object]:
    """Return a `__getattr__` for a class whose attributes were renamed.

    It is called only for names that the class does not have. Define it under `not TYPE_CHECKING`,
    so that type checkers still report unknown names.
    """

    def get(_: object, name: str) -> object:
        if (new := new_names.get(name)) is not None:
            raise AttributeError(
                f"{owner}.{name} is called {new} since dist_ckpt 0.2.0: write {owner}.{new}"
            )
        raise AttributeError(f"{owner!r} object has no attribute {name!r}")

    return get
