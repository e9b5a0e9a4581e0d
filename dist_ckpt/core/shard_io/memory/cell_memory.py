"""The protocols `CellReader`, `Target` and `DeviceBuffers`: the memory on both ends of shard I/O.

`torch_tensor.py` and `host_array.py` implement them. More readers: another checkpoint in
`shard_io/read/read_windows.py`, an arena in `async_save/writer/staged_save.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from dist_ckpt.core.format.geometry import Cell, Region, RegionPiece, Shape
from dist_ckpt.core.planning.tensor_operations import DerivedTensor, SourceBox


class CellReader(Protocol):
    """The elements of one local cell, in row-major order. Thread-safe."""

    @property
    def nbytes(self) -> int:
        """The size in bytes."""

    def address(self) -> int | None:
        """Return the address of the bytes if they are row-major in host memory, else None.

        The address is valid while the reader exists and the tensor is not resized.
        """

    def read(self, start: int, stop: int, scratch: memoryview) -> memoryview:
        """Return the bytes `start` to `stop`: a view of live memory, or a copy in `scratch`.

        `scratch` has at least `stop - start` bytes. The bounds are multiples of the item size.
        """


class Target(Protocol):
    """The memory of one requested cell. Threads may fill different elements together."""

    def memory(self) -> memoryview | None:
        """Return the writable bytes of the cell if they are row-major in host memory, else None."""

    def place(self, piece: RegionPiece, box: Region, data: memoryview, strides: Shape) -> None:
        """Copy the elements of `box` from `data`. The box is in global coordinates, in `piece`.

        `data` begins with the first element of the box. `strides` are in elements. The data has the
        dtype of the cell.
        """


# The bytes that are read into one buffer together. Measured on an H200, from the page cache with 4
# threads: 1 MiB 5 GB/s, 16 MiB 18, 64 MiB 17; with 12 threads 4, 36 and 25.
UNIT_NBYTES = 16 << 20


class DeviceBuffers(Protocol):
    """Host memory from which devices copy while the host continues. Thread-safe.

    `pinned_buffers.py` implements it.
    """

    def borrow(self) -> AbstractContextManager[memoryview]:
        """Lend a buffer of at least `UNIT_NBYTES`, and of a block."""

    def copy(self, target: Target, start: int, data: memoryview) -> bool:
        """Queue a copy of bytes of a lent buffer to the bytes of a target from `start` on.

        Return False, without a copy, if the bytes of the target do not follow each other in the
        memory of a device.
        """


class BoxTarget:
    """A `Target` for a box of a saved tensor that is a piece of another tensor's cell.

    `cell` is the memory of that cell, and `part` is its part that has the box.
    """

    __slots__ = ("_cell", "_part", "_piece")

    def __init__(self, piece: SourceBox, part: RegionPiece, cell: Target) -> None:
        self._piece, self._part, self._cell = piece, part, cell

    def memory(self) -> memoryview | None:
        """Return None: the order of the elements may differ."""
        return None

    def place(self, piece: RegionPiece, box: Region, data: memoryview, strides: Shape) -> None:
        """Copy the elements of a box of the saved tensor into the cell."""
        del piece
        placed, steps = self._piece.to_result(box, strides)
        self._cell.place(self._part, placed, data, steps)


# The memory of each requested cell, by tensor and cell number.
Targets = Mapping[tuple[str, int], Target]


def find_sources(
    wanted: Iterable[tuple[str, Sequence[Cell]]],
    derived: Mapping[str, DerivedTensor],
    targets: Targets | None = None,
) -> tuple[Mapping[str, Sequence[Cell]], Targets]:
    """Return the cells of stored tensors that fill the wanted cells, and their memory.

    `derived` are the tensors that operations make of stored ones. Without `targets` there is none.
    """
    cells: dict[str, list[Cell]] = {}
    memory: dict[tuple[str, int], Target] = {}

    def add(source: str, box: Cell, target: Target | None) -> None:
        boxes = cells.setdefault(source, [])
        if target is not None:
            memory[source, len(boxes)] = target
        boxes.append(box)

    for fqn, whole in wanted:
        made = derived.get(fqn)
        for number, cell in enumerate(whole):
            target = None if targets is None else targets[fqn, number]
            if made is None:
                add(fqn, cell, target)
                continue
            for piece, part, box in made.requests(cell):
                add(piece.source, box, None if target is None else BoxTarget(piece, part, target))
    return cells, memory
