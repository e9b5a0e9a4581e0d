"""The protocols `CellReader` and `Target`: the memory on both ends of shard I/O.

`torch_tensor.py` and `host_array.py` implement them. More readers: another checkpoint in
`shard_io/read/read_windows.py`, an arena in `async_save/writer/staged_save.py`.
"""

from __future__ import annotations

from typing import Protocol

from dist_ckpt.core.format.geometry import Region, RegionPiece, Shape
from dist_ckpt.core.planning.tensor_operations import SourceBox


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
