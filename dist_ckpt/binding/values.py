"""What a load puts into a state: known as it is bound, or there once its tensors are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, MutableSequence
from dataclasses import dataclass
from typing import Protocol

from dist_ckpt.format.index import Key
from dist_ckpt.state.containers import PathKey, container
from dist_ckpt.state.read_tree import users_code


class Value(Protocol):
    """What will be at some place of a state."""

    def get(self) -> object:
        """Return it, or put it there; once all tensors are made and read."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """A plain value, or memory that the state has."""

    value: object

    def get(self) -> object:
        """Return it."""
        return self.value


@dataclass(frozen=True, slots=True, eq=False)
class Resharded:
    """What a function of the user's makes of a per-rank value, for one of other keys than saved."""

    name: str
    on_reshard: Callable[[dict[Key, object], Key], object]
    values: dict[Key, object]
    key: Key

    def get(self) -> object:
        """Call it. Raises CheckpointError if it does."""
        with users_code(self.name, self.on_reshard, "on_reshard"):
            return self.on_reshard(dict(self.values), self.key)


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """A new container of a saved kind."""

    kind: str
    items: Mapping[PathKey, Value]

    def get(self) -> object:
        """Make it."""
        return container(self.kind, ((key, item.get()) for key, item in self.items.items()))


@dataclass(frozen=True, slots=True, eq=False)
class Filled:
    """A container of the user's, in which some items are replaced; a tuple is made again."""

    kind: str
    live: object
    items: Mapping[PathKey, Value]

    def get(self) -> object:
        """Put the items into it."""
        live, items = self.live, {key: item.get() for key, item in self.items.items()}
        if isinstance(live, tuple):
            return container(self.kind, enumerate(items.get(n, old) for n, old in enumerate(live)))
        assert isinstance(live, MutableMapping | MutableSequence)
        for key, item in items.items():
            live[key] = item  # type: ignore[index]  # a list's keys are its numbers
        return live


@dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """What was saved, where the state has an empty mapping or None.

    The user's own mapping is filled if the saved one is of the same class.
    """

    live: object
    saved: Value

    def get(self) -> object:
        """Make it, or fill the mapping."""
        made, live = self.saved.get(), self.live
        if type(made) is type(live) and isinstance(live, MutableMapping):
            live.update(made)  # type: ignore[call-overload]  # a mapping, like `live`
            return live
        return made
