"""States of plain dicts, whose tensors are just bytes: what a save takes of one, without torch."""

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
    """A tensor of which the bytes are somewhere: `Array`, `StoredTensor`, `FileTensor`.

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
    """Say whether a value is a `PlainTensor`; of torch and numpy none is, nor of plain data."""
    return type(getattr(value, "dtype", None)) is str


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor whose bytes lie in a file, from byte `start` on."""

    dtype: str
    shape: Shape
    start: int

    @property
    def nbytes(self) -> int:
        """Its size."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class PlainState:
    """What one process saves: `tensors` and `values` are what is behind the inventory's names."""

    inventory: Inventory
    tensors: Mapping[str, PlainTensor]
    values: Mapping[str, object]


def described(state: Mapping[str, object]) -> PlainState:
    """Return what a save of a state takes: it is stored as `dc.save` stores such a dict of tensors.

    A dict that holds a tensor is a container, everything else is a value. Raises TypeError for one
    that is no plain data. No two of its names, keys joined by dots, may be equal.
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
