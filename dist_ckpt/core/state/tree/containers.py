"""The containers of a state: their kinds, and how one is made again. Pure."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Container, Iterable, Mapping, MutableMapping
from typing import Any

from dist_ckpt.core.format.objects.plain_types import FACTORIES
from dist_ckpt.core.planning.selection import names_above
from dist_ckpt.errors import IncompatibleError

PathKey = str | int

# What is saved, and what is loaded into. Its keys are `PathKey`s, which `read_tree` checks, but are
# not typed so: to a type checker no `dict[str, Any]` is a mapping with keys `str | int`,
# and no `dict[str, nn.Module]` is one that anything may be put into.
State = Mapping[Any, object]
MutableState = MutableMapping[Any, Any]

# Of containers in containers, in a state and in a checkpoint.
MAX_DEPTH = 100

# Under a compound tensor's name: what its inner tensors are parts of. No attribute of an object
# that is a tensor can have this name.
RECORD = "__class__"

_MAPPING = "dict"
_DEFAULT = "defaultdict:"

_KINDS: Mapping[type, str] = {
    dict: _MAPPING,
    OrderedDict: "OrderedDict",
    list: "list",
    tuple: "tuple",
}
_TYPES = {kind: cls for cls, kind in _KINDS.items()}


def kind_of(value: object) -> str | None:
    """Return the kind of a container that may hold tensors, or None for anything else."""
    if type(value) is defaultdict:
        names = [name for name, cls in FACTORIES.items() if cls is value.default_factory]
        return f"{_DEFAULT}{names[0]}" if names else None
    return _KINDS.get(type(value))


def is_mapping(kind: str) -> bool:
    """Say whether a kind of container has keys of its own."""
    return kind not in ("list", "tuple")


def check_kind(kind: str) -> None:
    """Raise IncompatibleError for a kind that `kind_of` never returns."""
    factory = kind.removeprefix(_DEFAULT)
    if kind not in _TYPES and (factory == kind or factory not in FACTORIES):
        raise IncompatibleError(
            f"a container of the kind {kind[:100]!r} is unknown: upgrade dist_ckpt"
        )


def container(kind: str, items: Iterable[tuple[PathKey, object]]) -> object:
    """Return a new container of a kind that `check_kind` has passed."""
    if kind.startswith(_DEFAULT):
        return defaultdict(FACTORIES[kind.removeprefix(_DEFAULT)], items)
    return _TYPES[kind](items if is_mapping(kind) else (value for _, value in items))


def entries_of(value: object) -> Mapping[PathKey, object] | None:
    """Return what a container holds by its keys, or None for anything else."""
    if kind_of(value) is None:
        return None
    assert isinstance(value, Mapping | list | tuple)
    return value if isinstance(value, Mapping) else dict(enumerate(value))


def whole_of(name: str, values: Container[str]) -> str | None:
    """Return the compound tensor that a name is a part of, the outermost; None if it is of none.

    `values` are the names of a checkpoint's values, by which it tells what is compound.
    """
    _, *above = names_above(name)
    return next((one for one in reversed(above) if join(one, RECORD) in values), None)


def join(fqn: str, key: PathKey) -> str:
    """Return the name of a container's child."""
    return f"{fqn}.{key}" if fqn else str(key)
