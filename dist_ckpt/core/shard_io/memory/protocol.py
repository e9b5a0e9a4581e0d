"""The protocols `CellSource` and `Target`: the memory on both ends of shard I/O.

`torch_tensor.py` and `host_array.py` implement them. `shard_io/read/read_windows.py` and
`async_save/writer/staged_save.py` have sources for another checkpoint and for an arena.
"""

from __future__ import annotations

from typing import Protocol

from dist_ckpt.core.format.geometry import Region, RegionPiece, Shape


class CellSource(Protocol):
    """The elements of one local cell, in row-major order. Thread-safe."""

    @property
    def nbytes(self) -> int:
        """The size in bytes."""

    def address(self) -> int | None:
        """Return the address of its bytes if they are row-major in host memory, else None.

        It is valid while the source lives and the tensor is not resized.
        """

    def read(self, start: int, stop: int, scratch: memoryview) -> memoryview:
        """Return the bytes `start` to `stop`: a view of live memory, or `scratch`, filled.

        `scratch` has at least `stop - start` bytes. The bounds are multiples of the item size.
        """


class Target(Protocol):
    """The memory of one requested cell. Threads may fill different elements at once."""

    def memory(self) -> memoryview | None:
        """Return the cell's bytes, writable, if they are row-major in host memory, else None."""

    def place(self, piece: RegionPiece, box: Region, data: memoryview, strides: Shape) -> None:
        """Copy the elements of `box` (global coordinates, inside `piece`) from `data`.

        `data` begins with the box's first element; `strides` are in elements. The dtype is the
        cell's: bytes are copied, never cast.
        """
