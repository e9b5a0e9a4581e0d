"""Host memory as memoryviews: where it lies, scratch of our own, and copies that let others run."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# To find the addresses of a smaller copy takes as long as the copy itself.
_MIN_MOVE_NBYTES = 256 << 10

# Room for a read of 8 MiB, or a block, wherever it has to begin; a multiple of a huge page.
BUFFER_NBYTES = 10 << 20

# Memory that was never used is slow at first touch, so slots are kept, up to this.
MAX_KEPT_NBYTES = 128 << 20


# Not `ctypes.memmove`, which lets go of the lock: to get it back takes longer than a small copy.
_memmove = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)


def address_of(view: memoryview) -> int:
    """Return where writable memory begins; it must not be empty."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes of equal number; large copies without the interpreter's lock."""
    if source.readonly or len(source) < _MIN_MOVE_NBYTES:
        target[:] = source
        return
    assert len(target) == len(source), f"{len(source)} bytes into {len(target)}"
    ctypes.memmove(address_of(target), address_of(source), len(source))


def move(target: int, source: int, nbytes: int) -> None:
    """Copy bytes between addresses, with the interpreter's lock held: for what is small."""
    _memmove(target, source, nbytes)


def scratch(nbytes: int) -> memoryview:
    """Return new memory that begins on a page; it costs nothing before it is used.

    In huge pages where the system has them: to zero it and to write it directly takes a third of
    the time. Private: what a forked process writes into it is its own.
    """
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


class BufferPool:
    """Scratch buffers of one size, made when first needed and kept for who needs one next.

    There are as many as threads that use one at once. Threads may share it.
    """

    def __init__(self, nbytes: int = BUFFER_NBYTES) -> None:
        self._nbytes = nbytes
        self._most = max(1, MAX_KEPT_NBYTES // nbytes)
        self._free: list[memoryview] = []

    def fitting(self, nbytes: int) -> BufferPool:
        """Return slots of at least this size: these, or new ones."""
        return self if nbytes <= self._nbytes else BufferPool(nbytes)

    @contextmanager
    def one(self) -> Iterator[memoryview]:
        """Lend a buffer that begins on a page; what it holds is whatever was there before."""
        try:
            slot = self._free.pop()
        except IndexError:
            slot = scratch(self._nbytes)
        yield slot
        # Not after an error: a call that hangs may still be at it.
        if len(self._free) < self._most:
            self._free.append(slot)

    def clear(self) -> None:
        """Free the memory that nobody uses."""
        self._free.clear()
