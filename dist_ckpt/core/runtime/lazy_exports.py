"""Public names of a package that are imported at their first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType

from dist_ckpt.core.runtime.renamed import refuse_old_names

_NONE: Mapping[str, str] = MappingProxyType({})


def lazy_exports(
    package: str, modules: Mapping[str, str], new_names: Mapping[str, str] = _NONE
) -> Callable[[str], object]:
    """Return a `__getattr__` that imports names at their first use, and refuses old names."""
    refuse = refuse_old_names(package, new_names)

    def get(name: str) -> object:
        module = modules.get(name)
        if module is None:
            return refuse(name)
        return getattr(importlib.import_module(f"{package}.{module}"), name)

    return get
