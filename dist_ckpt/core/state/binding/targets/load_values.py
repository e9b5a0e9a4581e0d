"""The values that a load assigns in a state: constants, or results of the read.

A `Value` is called after all tensors are created and read. It returns the new value of a name in
the state, or assigns it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, MutableSequence
from dataclasses import dataclass

from dist_ckpt.core.format.index.index import Key
from dist_ckpt.core.state.tree.containers import PathKey, container
from dist_ckpt.core.state.tree.read_tree import calling_user_code

Value = Callable[[], object]


@dataclass(frozen=True, slots=True, eq=False)
class ConstantValue:
    """A plain value, or memory of the state."""

    value: object

    def __call__(self) -> object:
        """Return the value."""
        return self.value


@dataclass(frozen=True, slots=True, eq=False)
class NewContainer:
    """A new container of a saved kind."""

    kind: str
    items: Mapping[PathKey, Value]

    def __call__(self) -> object:
        """Return the new container."""
        return container(self.kind, ((key, item()) for key, item in self.items.items()))


def resharded(
    name: str,
    on_reshard: Callable[[dict[Key, object], Key], object],
    values: dict[Key, object],
    key: Key,
) -> object:
    """Return the result of the user's `on_reshard`; CheckpointError if it raises."""
    with calling_user_code(name, on_reshard, "on_reshard"):
        return on_reshard(dict(values), key)


def fill_container(kind: str, live: object, items: Mapping[PathKey, Value]) -> object:
    """Replace some items of a container of the user; a tuple is created again."""
    new = {key: item() for key, item in items.items()}
    if isinstance(live, tuple):
        return container(kind, enumerate(new.get(n, old) for n, old in enumerate(live)))
    assert isinstance(live, MutableMapping | MutableSequence)
    for key, item in new.items():
        live[key] = item  # type: ignore[index]  # a list's keys are its indices
    return live


def fill_mapping(live: object, saved: Value) -> object:
    """Return the saved value, where the state has an empty mapping or None.

    A mapping of the user is filled if the saved one is of the same class.
    """
    value = saved()
    if type(value) is type(live) and isinstance(live, MutableMapping):
        live.update(value)  # type: ignore[call-overload]  # a mapping, like `live`
        return live
    return value
