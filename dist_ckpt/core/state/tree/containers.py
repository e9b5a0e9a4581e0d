"""The containers of a state: their kinds, and how they are created. Pure."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Container, Iterable, Mapping, MutableMapping
from typing import Any

from dist_ckpt.core.format.objects.plain_types import FACTORIES
from dist_ckpt.core.planning.name_selection import names_above
from dist_ckpt.errors import IncompatibleError

PathKey = str | int

# The state of a save or a load. `state_tree.py` checks that its keys are `PathKey`s. The type does
# not: for a type checker a `dict[str, Any]` is not a mapping with keys `str | int`.
State = Mapping[Any, object]
MutableState = MutableMapping[Any, Any]

# The limit of nested containers, in a state and in a checkpoint.
MAX_DEPTH = 100

# The key of a tensor subclass's record, under its name. No inner tensor can have this name.
RECORD = "__class__"

_DEFAULT = "defaultdict:"
_KINDS: Mapping[type, str] = {
    dict: "dict",
    OrderedDict: "OrderedDict",
    list: "list",
    tuple: "tuple",
}
_TYPES = {kind: cls for cls, kind in _KINDS.items()}


def container_kind(value: object) -> str | None:
    """Return the kind of a container that may hold tensors, or None for anything else."""
    if type(value) is defaultdict:
        names = [name for name, cls in FACTORIES.items() if cls is value.default_factory]
        return f"{_DEFAULT}{names[0]}" if names else None
    return _KINDS.get(type(value))


def is_mapping(kind: str) -> bool:
    """Return True if a kind of container has keys."""
    return kind not in ("list", "tuple")


def check_kind(kind: str) -> None:
    """Raise IncompatibleError for a kind that `container_kind` never returns."""
    factory = kind.removeprefix(_DEFAULT)
    if kind not in _TYPES and (factory == kind or factory not in FACTORIES):
        raise IncompatibleError(
            f"a container of the kind {kind[:100]!r} is unknown: upgrade dist_ckpt"
        )


def create_container(kind: str, items: Iterable[tuple[PathKey, object]]) -> object:
    """Return a new container of a kind that `check_kind` has accepted."""
    if kind.startswith(_DEFAULT):
        return defaultdict(FACTORIES[kind.removeprefix(_DEFAULT)], items)
    return _TYPES[kind](items if is_mapping(kind) else (value for _, value in items))


def container_entries(value: object) -> Mapping[PathKey, object] | None:
    """Return the values of a container by key, or None for anything else."""
    if container_kind(value) is None:
        return None
    assert isinstance(value, Mapping | list | tuple)
    return value if isinstance(value, Mapping) else dict(enumerate(value))


def find_enclosing_subclass(name: str, values: Container[str]) -> str | None:
    """Return the outermost tensor subclass that a name is inside; None if there is none.

    `values` are the names of a checkpoint's values, among them the records of tensor subclasses.
    """
    _, *above = names_above(name)
    return next((outer for outer in reversed(above) if child_name(outer, RECORD) in values), None)


def child_name(fqn: str, key: PathKey) -> str:
    """Return the name of a container's child."""
    return f"{fqn}.{key}" if fqn else str(key)
