"""The values of a load: functions that return the new value of a name.

They are called after all tensors are created and read.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from dist_ckpt.core.shard_io.memory.torch_tensor import as_words
from dist_ckpt.core.state.tensors.local_tensors import is_array, is_ordinary
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


# --- copies that each rank has saved -----------------------------------------------------------


def own_copy_setter(name: str, parts: Sequence[torch.Tensor], saved: object) -> Callable[[], None]:
    """Return the call that copies this rank's own saved copy into its parts of a tensor.

    Raises ValueError if a shape or dtype differs.
    """
    every: list[Any] = saved if isinstance(saved, list) else [saved]
    copies = [torch.from_numpy(one) if is_array(one) else one for one in every]
    here = [(str(part.dtype), tuple(part.shape)) for part in parts]
    stored = [(str(c.dtype), tuple(c.shape)) for c in copies if isinstance(c, torch.Tensor)]
    if here != stored or len(stored) < len(copies):
        raise ValueError(
            f"{name}: this rank has saved its own copy as {_parts_text(stored)}, the state has "
            f"{_parts_text(here)}: create the model as it was saved, or exclude the name"
        )

    def copy() -> None:
        with torch.no_grad():
            for part, value in zip(parts, copies, strict=True):
                as_words(part).copy_(as_words(value))

    return copy


def new_own_copy(name: str, saved: object, parameter: object, *, on_host: bool) -> object:
    """Return this rank's own copy of optimizer state as new state of a parameter.

    Raises TypeError for a sharded parameter: its state must exist before the load.
    """
    if not isinstance(saved, torch.Tensor | list):
        return saved
    if isinstance(saved, torch.Tensor) and on_host:
        return saved
    if isinstance(saved, torch.Tensor) and is_ordinary(parameter):
        return saved.to(parameter.device)
    raise TypeError(
        f"{name}: this rank has saved its own copy, and the optimizer has no such state yet: run "
        "one step before the load, or exclude it"
    )


def _parts_text(parts: Sequence[tuple[str, tuple[int, ...]]]) -> str:
    return " and ".join(f"{dtype} of shape {shape}" for dtype, shape in parts) or "no tensor"
