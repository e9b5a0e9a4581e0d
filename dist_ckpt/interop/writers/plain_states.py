"""States of plain dicts whose tensors are bytes: the input of a save without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Protocol, TypeGuard

from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.geometry import Shape
from dist_ckpt.core.format.index.index import Node
from dist_ckpt.core.format.objects.plain_codec import check_plain
from dist_ckpt.core.planning.plan import Inventory, TensorEntry, Whole


class PlainTensor(Protocol):
    """A tensor given by its bytes: `Array`, `StoredTensor` or `FileTensor`.

    Its bytes are row-major and little-endian; `dtype` is a code of the format.
    """

    @property
    def dtype(self) -> str:
        """The dtype's name, as torch has it."""

    @property
    def shape(self) -> Shape:
        """The sizes of its dimensions."""

    @property
    def nbytes(self) -> int:
        """Its size."""


def is_tensor(value: object) -> TypeGuard[PlainTensor]:
    """Return True for a `PlainTensor`; False for tensors of torch and numpy, and plain data."""
    return type(getattr(value, "dtype", None)) is str


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor whose bytes are in a file, from byte `start` on."""

    dtype: str
    shape: Shape
    start: int

    @property
    def nbytes(self) -> int:
        """Its size."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class PlainState:
    """The state that one process saves: `tensors` and `values` by the inventory's names."""

    inventory: Inventory
    tensors: Mapping[str, PlainTensor]
    values: Mapping[str, object]


def described(state: Mapping[str, object]) -> PlainState:
    """Return the inventory, tensors and values of a state, named as `dc.save` names them.

    A dict that contains a tensor is a container, everything else is a value. TypeError for a value
    that is not plain data. Names, which are keys joined by dots, must be unique.
    """
    tree: list[Node] = []
    components: dict[str, int] = {}
    entries: list[TensorEntry] = []
    tensors: dict[str, PlainTensor] = {}
    values: dict[str, object] = {}

    def add(fqn: str, value: object) -> None:
        if is_tensor(value):
            component = components.setdefault(fqn.partition(".")[0], len(components))
            entries.append(TensorEntry(fqn, value.dtype, value.shape, 0, component))
            tensors[fqn] = value
        elif isinstance(value, dict) and _holds_tensors(value):
            tree.append(Node(fqn, "dict", tuple(value)))
            for key, child in value.items():
                add(f"{fqn}.{key}", child)
        else:
            check_plain(value, fqn)
            values[fqn] = value

    tree.append(Node("", "dict", tuple(state)))
    for key, child in state.items():
        add(key, child)
    names = len(tree) - 1 + len(tensors) + len(values)
    assert names == len({*(n.fqn for n in tree[1:]), *tensors, *values}), "a name of two things"
    inventory = Inventory(
        mesh=(),
        components=tuple(components),
        views=(Whole(),) if entries else (),
        tensors=tuple(entries),
        aliases=(),
        values=tuple(values),
        per_rank=(),
        tree=tuple(tree),
        name_lists=(),
        numpy=(),
    )
    return PlainState(inventory, tensors, values)


def _holds_tensors(value: dict[str, object]) -> bool:
    return any(
        _holds_tensors(child) if isinstance(child, dict) else is_tensor(child)
        for child in value.values()
    )
