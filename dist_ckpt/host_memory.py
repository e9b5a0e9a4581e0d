"""Host memory as memoryviews: where it lies, scratch of our own, and copies that let others run."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress

# To find the addresses of a smaller copy takes as long as the copy itself.
_MIN_MOVE_NBYTES = 256 << 10


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
