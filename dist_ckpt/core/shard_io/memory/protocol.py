"""The protocols `CellSource` and `Target`: where a shard's bytes come from and go to.

`torch_tensor.py` keeps both for torch, and `host_array.py` has a target in plain host memory;
`shard_io/read/read_windows.py` and `async_save/writer/staged_save.py` have sources, for bytes of
another checkpoint and of an arena. Who writes and reads shards knows nothing else about memory.
"""

from __future__ import annotations

from typing import Protocol

from dist_ckpt.core.format.geometry import Region, RegionPiece, Shape


class CellSource(Protocol):
    """The elements of one held cell, in row-major order. Threads may read it at once."""

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""

    def address(self) -> int | None:
        """Return where its bytes lie, if they are row-major in host memory; None if they are not.

        They stay there while the source lives and nobody resizes the tensor.
        """

    def read(self, start: int, stop: int, scratch: memoryview) -> memoryview:
        """Return the bytes `start` to `stop`: a view of live memory, or `scratch`, filled.

        `scratch` holds at least `stop - start` bytes. The bounds are multiples of the item size.
        """


class Target(Protocol):
    """The memory of one wanted cell. Threads may fill different elements at once."""

    def memory(self) -> memoryview | None:
        """Return the cell's bytes, writable, if they are row-major in host memory, else None."""

    def place(self, piece: RegionPiece, box: Region, data: memoryview, strides: Shape) -> None:
        """Copy the elements of `box` (global coordinates, inside `piece`) out of `data`.

        `data` begins with the box's first element; `strides` are its strides in elements. The
        dtype is the cell's: bytes are copied, never cast.
        """
