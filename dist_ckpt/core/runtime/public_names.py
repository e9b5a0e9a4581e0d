"""Public names: imported at their first use, and refused if 0.2.0 has renamed them.

The error gives the new name; old names have no aliases.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from opcode import opname
from types import MappingProxyType
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

    Define it under `not TYPE_CHECKING`, so that type checkers still report unknown names.
    """

    def get(_: object, name: str) -> object:
        if (new := new_names.get(name)) is not None:
            raise AttributeError(
                f"{owner}.{name} is called {new} since dist_ckpt 0.2.0: write {owner}.{new}"
            )
        raise AttributeError(f"{owner!r} object has no attribute {name!r}")

    return get


def refuse_old_names(module: str, new_names: Mapping[str, str]) -> Callable[[str], object]:
    """Return a `__getattr__` for a module whose public names were renamed.

    `from module import name` would replace an AttributeError by an error without the new name. So
    this raises ImportError there.
    """

    def get(name: str) -> object:
        if (new := new_names.get(name)) is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        message = f"{module}.{name} is called {new} since dist_ckpt 0.2.0: write {module}.{new}"
        raise ImportError(message) if _is_from_import() else AttributeError(message)

    return get


def _is_from_import() -> bool:
    """Return True if the caller outside the package executes `from module import name`."""
    frame = sys._getframe()
    while frame.f_back and str(frame.f_globals.get("__name__")).split(".")[0] == "dist_ckpt":
        frame = frame.f_back
    return opname[frame.f_code.co_code[frame.f_lasti]] == "IMPORT_FROM"


def lazy_exports(
    package: str, modules: Mapping[str, str], new_names: Mapping[str, str] = MappingProxyType({})
) -> Callable[[str], object]:
    """Return a `__getattr__` that imports names at their first use, and refuses old names."""

    def get(name: str) -> object:
        if (module := modules.get(name)) is None:
            return refuse_old_names(package, new_names)(name)
        return getattr(importlib.import_module(f"{package}.{module}"), name)

    return get
