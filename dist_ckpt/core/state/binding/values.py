"""The values of a load: functions that return the new value of a name.

They are called after all tensors are created and read.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from dist_ckpt.core.state.tree.containers import PathKey, create_container
from dist_ckpt.core.state.tree.live_keys import with_live_class

Value = Callable[[], object]


@dataclass(frozen=True, slots=True, eq=False)
class FixedValue:
    """A value that is known before the read, or a tensor of the state that is filled in place."""

    value: object

    def __call__(self) -> object:
        """Return the value."""
        return self.value


@dataclass(frozen=True, slots=True, eq=False)
class NewContainer:
    """A new container of a saved kind, with requested items.

    The state dict of a module has `metadata`, the versions of its modules, as torch's has.
    """

    kind: str
    items: Mapping[PathKey, Value]
    metadata: Mapping[str, Mapping[str, object]] | None = None
    like: object = None

    def __call__(self) -> object:
        """Return the new container, of the class of `like` if its own class is unknown."""
        items = ((key, item()) for key, item in self.items.items())
        if self.metadata is None:
            return with_live_class(create_container(self.kind, items), self.like)
        container = create_container("OrderedDict", items)
        set_metadata(container, self.metadata)
        return container


def set_metadata(state: object, metadata: Mapping[str, Mapping[str, object]]) -> None:
    """Give a state dict the versions of modules, for torch's `load_state_dict`."""
    state._metadata = OrderedDict(deepcopy({**metadata}))  # type: ignore[attr-defined]


def fill_container(kind: str, live: object, items: Mapping[PathKey, Value]) -> object:
    """Replace some items of the user's container, and return it; a tuple is created again."""
    new = {key: item() for key, item in items.items()}
    if isinstance(live, tuple):
        return create_container(kind, enumerate(new.get(n, old) for n, old in enumerate(live)))
    assert isinstance(live, MutableMapping | MutableSequence)
    for key, item in new.items():
        live[key] = item  # type: ignore[index]  # a list's keys are its indices
    return live


def fill_empty(live: object, saved: Value) -> object:
    """Return the saved value for a name where the state has None or an empty container.

    If the user's container and the saved one have the same class, fill the user's one instead. A
    plain dict is filled too, if the saved value is the state dict of a module. But it cannot have
    the versions of modules, so the saved value replaces it.
    """
    value: Any = saved()
    metadata = saved.metadata if isinstance(saved, NewContainer) else None
    is_alike = type(value) is type(live) and _max_length(value) == _max_length(live)
    if isinstance(live, MutableMapping) and (is_alike or (metadata and type(live) is dict)):
        live.update(value)
        if is_alike and metadata is not None:
            set_metadata(live, metadata)
        return live if is_alike else value
    # A list that the state has under two names is filled once: the second name gets its own.
    if is_alike and isinstance(live, list | deque) and not live:
        live.extend(value)
        return live
    return value


def _max_length(container: object) -> int | None:
    return container.maxlen if isinstance(container, deque) else None
