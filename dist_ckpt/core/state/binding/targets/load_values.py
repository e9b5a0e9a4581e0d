"""What a load puts into a state: known as it is bound, or there once its tensors are read.

A `Value` is called once all tensors are made and read; it returns what will be at some place of a
state, or puts it there.
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
    """A plain value, or memory that the state has."""

    value: object

    def __call__(self) -> object:
        """Return it."""
        return self.value


@dataclass(frozen=True, slots=True, eq=False)
class NewContainer:
    """A new container of a saved kind."""

    kind: str
    items: Mapping[PathKey, Value]

    def __call__(self) -> object:
        """Make it."""
        return container(self.kind, ((key, item()) for key, item in self.items.items()))


def resharded(
    name: str,
    on_reshard: Callable[[dict[Key, object], Key], object],
    values: dict[Key, object],
    key: Key,
) -> object:
    """Return what a function of the user's makes of a per-rank value, for another key than saved.

    Raises CheckpointError if it does.
    """
    with calling_user_code(name, on_reshard, "on_reshard"):
        return on_reshard(dict(values), key)


def filled(kind: str, live: object, items: Mapping[PathKey, Value]) -> object:
    """Replace some items of a container of the user's; a tuple is made again."""
    new = {key: item() for key, item in items.items()}
    if isinstance(live, tuple):
        return container(kind, enumerate(new.get(n, old) for n, old in enumerate(live)))
    assert isinstance(live, MutableMapping | MutableSequence)
    for key, item in new.items():
        live[key] = item  # type: ignore[index]  # a list's keys are its numbers
    return live


def taken(live: object, saved: Value) -> object:
    """Return what was saved, where the state has an empty mapping or None.

    The user's own mapping is filled if the saved one is of the same class.
    """
    made = saved()
    if type(made) is type(live) and isinstance(live, MutableMapping):
        live.update(made)  # type: ignore[call-overload]  # a mapping, like `live`
        return live
    return made
