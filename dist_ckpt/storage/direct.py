"""Direct I/O: bytes go between memory and the disk, past the page cache.

The page cache costs a copy of every byte and work for every page of it. Direct I/O asks for
alignment instead, so a part of a write may go directly and the rest through the page cache. What
is read comes directly only where the page cache does not hold it.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import struct
import sys
import threading
from dataclasses import dataclass
from mmap import PAGESIZE
from typing import Literal

from dist_ckpt.host_memory import Slots, address_of, copy
from dist_ckpt.region import Span
from dist_ckpt.storage.descriptor import Descriptor
from dist_ckpt.storage.page_cache import holds_all

_log = logging.getLogger("dist_ckpt")

# Smaller files gain less than the second descriptor costs.
MIN_NBYTES = 4 << 20

# Smaller reads gain nothing: the disk wants large ones, which reading ahead may make of them.
MIN_READ_NBYTES = 512 << 10

# Where whole blocks are larger than this, too much of a write would not be one.
_MAX_BLOCK_NBYTES = 64 << 10

# One call moves less than 2 GiB.
_MAX_CALL_NBYTES = 1 << 30

# EFAULT: a device's own memory, mapped by its driver, cannot be read by another device.
_REFUSALS = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EFAULT)

# Linux before 6.1 does not tell how direct I/O is aligned: of these file systems it is known.
_KNOWN_TYPES = {0xEF53: "ext4", 0x58465342: "xfs"}
_KNOWN_ALIGNMENT = 4096


@dataclass(frozen=True, slots=True)
class Alignment:
    """Memory begins at a multiple of `memory`; whole blocks of `block` bytes are moved."""

    memory: int
    block: int

    def inner(self, address: int, offset: int, nbytes: int) -> Span:
        """Return the part of a write from this memory to this place that can go directly."""
        start = -offset % self.block
        stop = (offset + nbytes) // self.block * self.block - offset
        if (address - offset) % self.memory or start >= stop:
            return Span(0, 0)
        return Span(start, stop)


class DirectIO:
    """Opens files for direct I/O, until a file system refuses: then says so, once.

    `slots` is the memory that reads go to.
    """

    def __init__(self, doing: Literal["reading", "writing"]) -> None:
        self.slots = Slots()
        self._doing = doing
        self._lock = threading.Lock()
        self._refused = False

    def writes_of(self, path: str, fd: int, nbytes: int) -> DirectFile | None:
        """Return the file of `fd`, which will have `nbytes`, to be written; None if no gain."""
        alignment = alignment_of(fd) if nbytes >= MIN_NBYTES and not self._refused else None
        return self.open(path, fd, alignment) if alignment else None

    def reads_of(self, path: str, fd: int, nbytes: int) -> DirectReads | None:
        """Return the file of `fd`, which has `nbytes`, to be read; None if no gain."""
        alignment = alignment_of(fd) if nbytes >= MIN_NBYTES and not self._refused else None
        return DirectReads(self, path, alignment) if alignment else None

    def open(self, path: str, fd: int, alignment: Alignment) -> DirectFile | None:
        """Open the file of `fd` once more; None if that is refused, or its name is another's."""
        if self._refused:
            return None
        access = os.O_RDONLY if self._doing == "reading" else os.O_WRONLY
        # Nobody waits for the other end of a pipe that has taken the name.
        flags = access | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_DIRECT
        try:
            direct = os.open(path, flags)
        except FileNotFoundError:
            return None  # the name has gone since, which says nothing of the file system
        except OSError as error:
            self.refuse(path, error)
            return None
        if not os.path.samestat(os.fstat(fd), os.fstat(direct)):
            os.close(direct)
            return None
        return DirectFile(self, path, direct, alignment)

    def refuse(self, path: str, error: OSError) -> None:
        """Open no more files for direct I/O."""
        with self._lock:
            known, self._refused = self._refused, True
        if not known:
            _log.warning(
                "%s takes no direct I/O (%s): %s through the page cache",
                path,
                error.strerror,
                self._doing,
            )


class DirectFile:
    """A file that is open for direct I/O besides its normal descriptor. Threads may share it."""

    def __init__(self, origin: DirectIO, path: str, fd: int, alignment: Alignment) -> None:
        self._origin = origin
        self._path = path
        self._descriptor = Descriptor(path, fd)
        self._alignment = alignment
        self._refused = False

    @property
    def alignment(self) -> int:
        """See `WritableFile.alignment`."""
        return 1 if self._refused else self._alignment.memory

    def write(self, data: memoryview, offset: int) -> Span:
        """Write what can go directly; return which part of `data` that was, maybe none of it.

        The caller writes the rest. After a write that fell short that may begin within a block,
        which then no direct write touches any more. Raises OSError if the disk fails.
        """
        if self._refused or data.readonly or not data:
            return Span(0, 0)
        part = self._alignment.inner(address_of(data), offset, len(data))
        done = part.start
        with self._descriptor.lend() as fd:
            while done < part.stop:
                asked = data[done : min(part.stop, done + _MAX_CALL_NBYTES)]
                try:
                    count = os.pwrite(fd, asked, offset + done)
                except OSError as error:
                    self._take_refusal(error)
                    break
                done += count
                if count < len(asked):
                    break
        return Span(part.start, done)

    def read(self, target: memoryview, offset: int) -> int:
        """Fill `target` from `offset`; return how many bytes came, maybe none.

        Whole blocks come into memory of our own, and are copied: torch's memory is hardly ever
        aligned as disks want it. The caller reads the rest, if the file has not ended there.
        Raises OSError if the disk fails.
        """
        done = 0
        with self._descriptor.lend() as fd, self._origin.slots.one() as slot:
            while done < len(target) and not self._refused:
                head = (offset + done) % self._alignment.block
                blocks = -(-(head + len(target) - done) // self._alignment.block)
                asked = slot[: blocks * self._alignment.block]
                try:
                    count = os.preadv(fd, [asked], offset + done - head)
                except OSError as error:
                    self._take_refusal(error)
                    break
                came = asked[head:count][: len(target) - done]
                copy(target[done : done + len(came)], came)
                done += len(came)
                if count < len(asked):
                    break
        return done

    def _take_refusal(self, error: OSError) -> None:
        """Do no more direct I/O; raise any other error."""
        if error.errno not in _REFUSALS:
            raise error
        self._refused = True
        self._origin.refuse(self._path, error)

    def release(self) -> None:
        """Close it, once no thread writes any more."""
        self._descriptor.release()


class DirectReads:
    """Reads of one file that the page cache would have to fetch first. Threads may share it.

    It is opened for each read: that takes tens of microseconds, and no descriptors of a process
    that may keep hundreds of files open.
    """

    def __init__(self, origin: DirectIO, path: str, alignment: Alignment) -> None:
        self._origin = origin
        self._path = path
        self._alignment = alignment

    def read(self, fd: int, target: memoryview, offset: int) -> int:
        """Fill `target` from the file of `fd`; return how many bytes came, maybe none.

        The caller reads the rest through the page cache. What that holds only a part of comes
        directly as a whole: to read the holes would have the system read ahead. Raises OSError if
        the disk fails.
        """
        if len(target) < MIN_READ_NBYTES or holds_all(fd, offset, len(target)):
            return 0
        if (file := self._origin.open(self._path, fd, self._alignment)) is None:
            return 0
        try:
            return file.read(target, offset)
        finally:
            file.release()


def alignment_of(fd: int) -> Alignment | None:
    """Return what direct I/O of a file asks for; None where there is none, or it is no gain.

    File systems in memory and on the network are among those.
    """
    if sys.platform != "linux":
        return None
    if (told := _told_alignment(fd)) is None:
        told = (_KNOWN_ALIGNMENT,) * 2 if _type_of(fd) in _KNOWN_TYPES else (0, 0)
    memory, offset = told
    # A page that goes through the page cache must not share a block with what goes directly.
    block = max(offset, PAGESIZE, os.fstatvfs(fd).f_frsize)
    sizes = (memory, offset, block)
    if 0 in sizes or block > _MAX_BLOCK_NBYTES or any(block % size for size in sizes):
        return None
    return Alignment(memory, block)


def _told_alignment(fd: int) -> tuple[int, int] | None:
    """Return the alignment of memory and of offsets (STATX_DIOALIGN); None if it is not told."""
    mask, empty_path = 0x2000, 0x1000
    buffer = ctypes.create_string_buffer(256)
    statx = getattr(ctypes.CDLL(None), "statx", None)
    if statx is None or statx(fd, b"", empty_path, mask, buffer):
        return None
    (filled,) = struct.unpack_from("I", buffer)
    memory, offset = struct.unpack_from("II", buffer, 0x98)
    return (memory, offset) if filled & mask else None


def _type_of(fd: int) -> int:
    buffer = ctypes.create_string_buffer(256)
    if ctypes.CDLL(None).fstatfs(fd, buffer):
        return 0
    return int(ctypes.c_long.from_buffer(buffer).value)
