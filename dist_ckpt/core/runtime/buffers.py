"""Host memory as memoryviews: addresses, scratch buffers, and copies that release the GIL."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# Below this, finding the addresses takes as long as the copy.
_MIN_MOVE_NBYTES = 256 << 10

# Room for a read of 8 MiB, or a block, at any alignment; a multiple of a huge page.
BUFFER_NBYTES = 10 << 20

# The first touch of new memory is slow, so buffers are cached, up to this size in total.
MAX_KEPT_NBYTES = 128 << 20


# Unlike `ctypes.memmove`, this keeps the GIL: getting it back takes longer than a small copy.
_memmove = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)


def address_of(view: memoryview) -> int:
    """Return the address of writable memory, which must not be empty."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes between buffers of equal length; large copies release the GIL."""
    if source.readonly or len(source) < _MIN_MOVE_NBYTES:
        target[:] = source
        return
    assert len(target) == len(source), f"{len(source)} bytes into {len(target)}"
    ctypes.memmove(address_of(target), address_of(source), len(source))


def move(target: int, source: int, nbytes: int) -> None:
    """Copy bytes between addresses without releasing the GIL: for small copies."""
    _memmove(target, source, nbytes)


def allocate_scratch(nbytes: int) -> memoryview:
    """Return new memory that begins on a page. Pages cost nothing before they are used.

    Huge pages take a third of the time to zero and to write directly. A forked child has its own
    copy.
    """
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


class BufferPool:
    """Scratch buffers of one size, as many as are in use at once, cached for reuse. Thread-safe."""

    def __init__(self, nbytes: int = BUFFER_NBYTES) -> None:
        self._nbytes = nbytes
        self._max_free = max(1, MAX_KEPT_NBYTES // nbytes)
        self._free: list[memoryview] = []

    def fitting(self, nbytes: int) -> BufferPool:
        """Return a pool with buffers of at least this size: this one, or a new one."""
        return self if nbytes <= self._nbytes else BufferPool(nbytes)

    @contextmanager
    def borrow(self) -> Iterator[memoryview]:
        """Lend a buffer that begins on a page. Its old content is not cleared."""
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = allocate_scratch(self._nbytes)
        yield buffer
        # Not after an error: a call that hangs may still use the buffer.
        if len(self._free) < self._max_free:
            self._free.append(buffer)

    def clear(self) -> None:
        """Free the buffers that are not in use."""
        self._free.clear()
