"""Direct I/O: bytes go between memory and the disk, past the page cache.

The page cache costs a copy of every byte and work for every page of it. Direct I/O asks for
alignment instead, so a part of a write may go directly and the rest through the page cache. What
is read comes directly only where the page cache does not hold it.

A file's descriptor that threads share, some of which may be stuck in the kernel with it.

What the system keeps of files in memory, and how it is made to read them again.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from mmap import PAGESIZE

from dist_ckpt.core.format.geometry import ByteRange
from dist_ckpt.core.runtime.buffers import BufferPool, address_of, copy
from dist_ckpt.core.storage.local.exclusive_rename import system_call
from dist_ckpt.errors import StorageError


class Descriptor:
    """An open file's descriptor, or several, which threads share; closed once nobody uses them.

    A call that hangs in the kernel outlives the wait for it: were a descriptor closed under it,
    it could go on with its number when that has become another file's.
    """

    def __init__(self, path: str, *fds: int) -> None:
        self.path = path
        self._fds = [*fds]
        self._lock = threading.Lock()
        self._num_users = 0
        self._released = False

    @contextmanager
    def lend(self) -> Iterator[Sequence[int]]:
        """Lend the descriptors for some calls. Raises StorageError once it was released."""
        with self._lock:
            if self._released:
                raise StorageError(f"{self.path} is closed: it was given up; try again")
            self._num_users += 1
        try:
            yield self._fds
        finally:
            with self._lock:
                self._num_users -= 1
                is_last = self._released and not self._num_users
            if is_last:
                self._close()

    def release(self) -> None:
        """Lend it no more, and have it closed: now, or by the last that uses it."""
        with self._lock:
            is_last = not self._released and not self._num_users
            self._released = True
        if is_last:
            self._close()

    def take(self) -> int:
        """Hand the first over to the caller, who closes it. Nobody else may be using any."""
        with self._lock:
            if self._released:
                raise StorageError(f"{self.path} is closed: it was given up; try again")
            assert not self._num_users, f"{self.path} is finished while it is written"
            self._released = True
        first, *self._fds = self._fds
        self._close()
        return first

    def _close(self) -> None:
        for fd in self._fds:
            with suppress(OSError):
                os.close(fd)


def drop_cached(folder: str) -> None:
    """Have the next reads of the files in a folder come from the disk, where the system can do so.

    A hint: what other processes have mapped stays. Never raises.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_file(follow_symlinks=False):
                drop_cached_file(entry.path)


def drop_cached_file(file: str) -> None:
    """Do so for one file. Never raises."""
    with suppress(OSError):
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


# cachestat(2), of Linux 6.5; the number is the same on all processors but alpha. It only looks:
# a read with RWF_NOWAIT would begin to read ahead, and mincore takes twenty times as long.
_CACHESTAT = 451


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("nbytes", ctypes.c_uint64))


class _CacheStat(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("num_cached", "num_dirty", "num_written", "num_evicted", "num_evicted_lately")
    )


def holds_all(fd: int, offset: int, nbytes: int) -> bool:
    """Say whether the page cache holds all of some bytes of a file, one at least.

    True as well where nobody can tell: on other systems, and about files of other users.
    """
    asked, found = _Range(offset, nbytes), _CacheStat()
    syscall = system_call("syscall") if sys.platform == "linux" else None
    number = ctypes.c_long(_CACHESTAT)
    if syscall is None or syscall(number, fd, ctypes.byref(asked), ctypes.byref(found), 0):
        return True
    return bool(found.num_cached >= (offset + nbytes - 1) // PAGESIZE - offset // PAGESIZE + 1)


_log = logging.getLogger("dist_ckpt")

# Smaller files gain less than the second descriptor costs.
MIN_NBYTES = 4 << 20

# Smaller reads gain nothing: the disk wants large ones, which reading ahead may make of them.
MIN_READ_NBYTES = 512 << 10

# Where whole blocks are larger than this, too much of a write would not be one.
_MAX_BLOCK_NBYTES = 64 << 10

# One call moves less than 2 GiB.
_MAX_CALL_NBYTES = 1 << 30

# The memory that reads go to: a huge page, and at most so much of it at once. Larger reads gain
# nothing, and half of 2 MiB, which the reader asks for, fits wherever it begins in a block.
READ_SLOT_NBYTES = 2 << 20
_MAX_READ_NBYTES = (1 << 20) + _MAX_BLOCK_NBYTES

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

    def inner(self, address: int, offset: int, nbytes: int) -> ByteRange:
        """Return the part of a write from this memory to this place that can go directly."""
        start = -offset % self.block
        stop = (offset + nbytes) // self.block * self.block - offset
        if (address - offset) % self.memory or start >= stop:
            return ByteRange(0, 0)
        return ByteRange(start, stop)


class DirectIO:
    """Which file systems take direct I/O, and how aligned. Threads may share it.

    Each is asked once, for all its files, and no more after it has refused: that is said, once.
    """

    def __init__(self) -> None:
        self.slots = BufferPool(READ_SLOT_NBYTES)
        self._lock = threading.Lock()
        self._alignments: dict[int, Alignment | None] = {}  # by device; None: it takes none

    def file_of(self, path: str, fd: int, nbytes: int) -> DirectFile | None:
        """Return the file of `fd`, which has or will have `nbytes`; None if there is no gain."""
        if nbytes < MIN_NBYTES:
            return None
        status = os.fstat(fd)
        if status.st_dev not in self._alignments:
            self._alignments.setdefault(status.st_dev, alignment_of(fd))
        alignment = self._alignments[status.st_dev]
        return DirectFile(self, path, status, alignment) if alignment else None

    def takes(self, device: int) -> bool:
        """Say whether the file system of some file takes direct I/O and has not refused it."""
        return self._alignments.get(device) is not None

    def refuse(self, path: str, device: int, error: OSError) -> None:
        """Do no more direct I/O with the file system of this file; raise any other error."""
        if error.errno not in _REFUSALS:
            raise error
        with self._lock:
            known, self._alignments[device] = self._alignments.get(device), None
        if known is not None:
            text = "%s takes no direct I/O (%s): going through the page cache"
            _log.warning(text, path, error.strerror)


@dataclass(frozen=True, slots=True)
class DirectFile:
    """A file whose bytes can go past the page cache, which it is by its status.

    To be written it is opened once more, for as long as that takes. To be read it is for each read:
    that takes tens of microseconds, and no descriptors of a process that may keep hundreds of files
    open. Threads may share it.
    """

    origin: DirectIO
    path: str
    status: os.stat_result
    aligned: Alignment

    @property
    def alignment(self) -> int:
        """See `WritableFile.alignment`."""
        return self.aligned.memory if self._is_taken else 1

    @property
    def _is_taken(self) -> bool:
        return self.origin.takes(self.status.st_dev)

    def open(self, access: int) -> int | None:
        """Open the file once more; None if that fails, or its name is another's."""
        # Nobody waits for the other end of a pipe that has taken the name.
        flags = access | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_DIRECT
        try:
            fd = os.open(self.path, flags)
        except OSError as error:
            # Else the name has gone, or too many files are open: the file system did not refuse.
            if error.errno in _REFUSALS:
                self._refuse(error)
            return None
        with suppress(OSError):
            if os.path.samestat(self.status, os.fstat(fd)):
                return fd
        os.close(fd)
        return None

    def _refuse(self, error: OSError) -> None:
        self.origin.refuse(self.path, self.status.st_dev, error)

    def write(self, direct: int, data: memoryview, offset: int) -> ByteRange:
        """Write to what was opened; return which part of `data` could go directly, maybe none.

        The caller writes the rest. After a write that fell short that may begin within a block,
        which then no direct write touches any more. Raises OSError if the disk fails.
        """
        if data.readonly or not data or not self._is_taken:
            return ByteRange(0, 0)
        part = self.aligned.inner(address_of(data), offset, len(data))
        done = part.start
        while done < part.stop:
            asked = data[done : min(part.stop, done + _MAX_CALL_NBYTES)]
            try:
                count = os.pwrite(direct, asked, offset + done)
            except OSError as error:
                self._refuse(error)
                break
            done += count
            if count < len(asked):
                break
        return ByteRange(part.start, done)

    def read(self, fd: int, target: memoryview, offset: int) -> int:
        """Fill `target` from the file of `fd`; return how many bytes came, maybe none.

        The caller reads the rest through the page cache. What that holds only a part of comes
        directly as a whole: to read the holes would have the system read ahead. Raises OSError if
        the disk fails.
        """
        if len(target) < MIN_READ_NBYTES or not self._is_taken:
            return 0
        if holds_all(fd, offset, len(target)):
            return 0
        if (direct := self.open(os.O_RDONLY)) is None:
            return 0
        try:
            return self._fill(direct, target, offset)
        finally:
            os.close(direct)

    def _fill(self, direct: int, target: memoryview, offset: int) -> int:
        """Read whole blocks into memory of our own, and copy what is wanted of them.

        torch's memory is hardly ever aligned as disks want it.
        """
        done, block = 0, self.aligned.block
        with self.origin.slots.borrow() as slot:
            while done < len(target):
                head = (offset + done) % block
                blocks = -(-(head + len(target) - done) // block)
                asked = slot[: min(blocks * block, _MAX_READ_NBYTES)]
                try:
                    count = os.preadv(direct, [asked], offset + done - head)
                except OSError as error:
                    self._refuse(error)
                    break
                came = asked[head:count][: len(target) - done]
                copy(target[done : done + len(came)], came)
                done += len(came)
                if count < len(asked):
                    break
        return done


def alignment_of(fd: int) -> Alignment | None:
    """Return what direct I/O of a file asks for; None where there is none, or it is no gain.

    File systems in memory and on the network are among those. Several calls, which the network
    may have to answer: `DirectIO` makes them once.
    """
    if sys.platform != "linux":
        return None
    if (told := _told_alignment(fd)) is None:
        told = (_KNOWN_ALIGNMENT,) * 2 if _type_of(fd) in _KNOWN_TYPES else (0, 0)
    memory, offset = told
    if not memory or not offset:
        return None
    # A page that goes through the page cache must not share a block with what goes directly.
    block = max(offset, PAGESIZE, os.fstatvfs(fd).f_frsize)
    if block > _MAX_BLOCK_NBYTES or any(block % size for size in (memory, offset)):
        return None
    return Alignment(memory, block)


def _told_alignment(fd: int) -> tuple[int, int] | None:
    """Return the alignment of memory and of offsets (STATX_DIOALIGN); None if it is not told."""
    mask, empty_path = 0x2000, 0x1000
    buffer = ctypes.create_string_buffer(256)
    statx = system_call("statx")
    if statx is None or statx(fd, b"", empty_path, mask, buffer):
        return None
    (filled,) = struct.unpack_from("I", buffer)
    memory, offset = struct.unpack_from("II", buffer, 0x98)
    return (memory, offset) if filled & mask else None


def _type_of(fd: int) -> int:
    buffer = ctypes.create_string_buffer(256)
    fstatfs = system_call("fstatfs")
    if fstatfs is None or fstatfs(fd, buffer):
        return 0
    return int(ctypes.c_long.from_buffer(buffer).value)
