"""Direct I/O between memory and disk, file descriptors that threads share, and cached pages.

The page cache costs a copy of every byte and work for every page. Direct I/O requires alignment, so
a part of a write may be cached. Reads are direct only if the page cache lacks the data.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from mmap import PAGESIZE

from dist_ckpt.core.format.geometry import ByteRange
from dist_ckpt.core.runtime.host_memory import BufferPool, address_of, copy
from dist_ckpt.errors import StorageError


class Descriptor:
    """The descriptors of an open file, which threads share; closed after the last use.

    A call that hangs in the kernel may continue after its deadline. If its descriptor were closed,
    the call could continue on another file that has got the same number.
    """

    def __init__(self, path: str, *fds: int) -> None:
        self.path = path
        self._fds = [*fds]
        self._lock = threading.Lock()
        self._num_users = 0
        self._released = False

    @contextmanager
    def lend(self) -> Iterator[Sequence[int]]:
        """Lend the descriptors for some calls. Raises StorageError after `release`."""
        with self._lock:
            if self._released:
                raise StorageError(f"{self.path} is closed: an earlier call failed; try again")
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
        """Close the descriptors, after the last use, and refuse new ones."""
        with self._lock:
            is_last = not self._released and not self._num_users
            self._released = True
        if is_last:
            self._close()

    def take(self) -> int:
        """Return the first descriptor for the caller to close. No other use may be active."""
        with self._lock:
            if self._released:
                raise StorageError(f"{self.path} is closed: an earlier call failed; try again")
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
    """Ask the system to drop the cached pages of files in a folder: the next reads use the disk.

    Pages that other processes have mapped stay. Never raises.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_file(follow_symlinks=False):
                drop_cached_file(entry.path)


def drop_cached_file(file: str) -> None:
    """Drop the cached pages of one file. Never raises."""
    with suppress(OSError):
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def renew_times(file: str) -> None:
    """Set the times of a file to now: some systems purge old files. Never raises.

    The system refuses this for a file of another user, which then keeps its times.
    """
    with suppress(OSError):
        os.utime(file, follow_symlinks=False)


# cachestat(2), of Linux 6.5; the number is the same on all processors but alpha. It has no side
# effects: a read with RWF_NOWAIT would start to read ahead, and mincore takes twenty times as long.
_CACHESTAT = 451


@cache
def system_call(name: str) -> Callable[..., int] | None:
    """Return a function of the C library that Python's `os` lacks, or None."""
    function: Callable[..., int] | None = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    return function


def is_cached(fd: int, offset: int, nbytes: int) -> bool:
    """Return True if the page cache has all of these bytes, at least one, or if it is unknown."""
    byte_range, counts = (ctypes.c_uint64 * 2)(offset, nbytes), (ctypes.c_uint64 * 5)()
    syscall = system_call("syscall") if sys.platform == "linux" else None
    if syscall is None or syscall(ctypes.c_long(_CACHESTAT), fd, byte_range, counts, 0):
        return True
    # The first count is of cached pages.
    return counts[0] >= (offset + nbytes - 1) // PAGESIZE - offset // PAGESIZE + 1


_log = logging.getLogger("dist_ckpt")

# Smaller files gain less than the second descriptor costs.
MIN_NBYTES = 4 << 20

# Smaller reads gain nothing: disks need large ones, and reading ahead may produce them.
MIN_READ_NBYTES = 512 << 10

# With larger blocks, too many bytes of a write would be outside of whole blocks.
_MAX_BLOCK_NBYTES = 64 << 10

# One call moves less than 2 GiB.
_MAX_CALL_NBYTES = 1 << 30

# A buffer for reads is one huge page. One read uses at most 1 MiB of it, and a block, so that 1 MiB
# fits at any start within a block. Larger reads gain nothing.
READ_BUFFER_NBYTES = 2 << 20
_MAX_READ_NBYTES = (1 << 20) + _MAX_BLOCK_NBYTES

# EFAULT: a device's own memory, mapped by its driver, cannot be read by another device.
_REFUSALS = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EFAULT)

# Before 6.1, Linux does not report the alignment of direct I/O. Known for these file systems.
_KNOWN_TYPES = {0xEF53: "ext4", 0x58465342: "xfs"}
_KNOWN_ALIGNMENT = 4096


@dataclass(frozen=True, slots=True)
class Alignment:
    """Memory begins at a multiple of `memory`; whole blocks of `block` bytes are moved."""

    memory: int
    block: int

    def inner(self, address: int, offset: int, nbytes: int) -> ByteRange:
        """Return the part of a write, from this address to this offset, that can be direct."""
        start = -offset % self.block
        stop = (offset + nbytes) // self.block * self.block - offset
        if (address - offset) % self.memory or start >= stop:
            return ByteRange(0, 0)
        return ByteRange(start, stop)


class DirectIO:
    """The file systems that support direct I/O, queried once; a refusal is final. Thread-safe."""

    def __init__(self) -> None:
        self.buffers = BufferPool(READ_BUFFER_NBYTES)
        self._lock = threading.Lock()
        self._alignments: dict[int, Alignment | None] = {}  # by device; None: unsupported

    def direct_file(self, path: str, fd: int, nbytes: int) -> DirectFile | None:
        """Return a direct file for `fd`, a file of this size; None if direct I/O gains nothing."""
        if nbytes < MIN_NBYTES:
            return None
        status = os.fstat(fd)
        if status.st_dev not in self._alignments:
            self._alignments.setdefault(status.st_dev, alignment_of(fd))
        alignment = self._alignments[status.st_dev]
        return DirectFile(self, path, status, alignment) if alignment else None

    def supports(self, device: int) -> bool:
        """Return True if the file system of this device supports direct I/O."""
        return self._alignments.get(device) is not None

    def refuse(self, path: str, device: int, error: OSError) -> None:
        """Stop direct I/O on the file system of this file. Raise any other error."""
        if error.errno not in _REFUSALS:
            raise error
        with self._lock:
            alignment, self._alignments[device] = self._alignments.get(device), None
        if alignment is not None:
            text = "%s takes no direct I/O (%s): going through the page cache"
            _log.warning(text, path, error.strerror)


@dataclass(frozen=True, slots=True)
class DirectFile:
    """A file that supports direct I/O, identified by its status.

    It is opened once more for a write, and again for each read. That takes tens of microseconds,
    and saves descriptors in a process with hundreds of open files. Thread-safe.
    """

    origin: DirectIO
    path: str
    status: os.stat_result
    aligned: Alignment

    @property
    def alignment(self) -> int:
        """See `WritableFile.alignment`."""
        return self.aligned.memory if self._is_supported else 1

    @property
    def _is_supported(self) -> bool:
        return self.origin.supports(self.status.st_dev)

    def open(self, access: int) -> int | None:
        """Open the file once more; return None if that fails, or if another file has its name."""
        # O_NONBLOCK: do not wait for the other end if a pipe has the name now.
        flags = access | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_DIRECT
        try:
            fd = os.open(self.path, flags)
        except OSError as error:
            # Otherwise the name is gone or too many files are open: that is not a refusal.
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
        """Write to a descriptor of `open`; return the part of `data` that was written, maybe empty.

        The caller writes the rest, which after a short write may begin within a block. No direct
        write touches that block then. Raises OSError if the disk fails.
        """
        if data.readonly or not data or not self._is_supported:
            return ByteRange(0, 0)
        part = self.aligned.inner(address_of(data), offset, len(data))
        done = part.start
        while done < part.stop:
            chunk = data[done : min(part.stop, done + _MAX_CALL_NBYTES)]
            try:
                count = os.pwrite(direct, chunk, offset + done)
            except OSError as error:
                self._refuse(error)
                break
            done += count
            if count < len(chunk):
                break
        return ByteRange(part.start, done)

    def read(self, fd: int, target: memoryview, offset: int) -> int:
        """Fill `target` from the file of `fd`; return the number of bytes read, maybe 0.

        The caller reads the rest. A partly cached range is read as a whole: reading only the holes
        would make the system read ahead. Raises OSError if the disk fails.
        """
        if len(target) < MIN_READ_NBYTES or not self._is_supported:
            return 0
        if is_cached(fd, offset, len(target)):
            return 0
        if (direct := self.open(os.O_RDONLY)) is None:
            return 0
        try:
            return self._fill(direct, target, offset)
        finally:
            os.close(direct)

    def _fill(self, direct: int, target: memoryview, offset: int) -> int:
        """Read whole blocks into a buffer and copy them: torch's memory is hardly ever aligned."""
        done, block = 0, self.aligned.block
        with self.origin.buffers.borrow() as buffer:
            while done < len(target):
                head = (offset + done) % block
                blocks = -(-(head + len(target) - done) // block)
                chunk = buffer[: min(blocks * block, _MAX_READ_NBYTES)]
                try:
                    count = os.preadv(direct, [chunk], offset + done - head)
                except OSError as error:
                    self._refuse(error)
                    break
                wanted = chunk[head:count][: len(target) - done]
                copy(target[done : done + len(wanted)], wanted)
                done += len(wanted)
                if count < len(chunk):
                    break
        return done


def alignment_of(fd: int) -> Alignment | None:
    """Return the alignment for direct I/O of a file, or None in memory and on network mounts.

    Direct I/O gains nothing there. The calls may use the network: `DirectIO` makes them once.
    """
    if sys.platform != "linux":
        return None
    if (sizes := _reported_alignment(fd)) is None:
        sizes = (_KNOWN_ALIGNMENT,) * 2 if _type_of(fd) in _KNOWN_TYPES else (0, 0)
    memory, offset = sizes
    if not memory or not offset:
        return None
    # A cached page must not share a block with direct data.
    block = max(offset, PAGESIZE, os.fstatvfs(fd).f_frsize)
    if block > _MAX_BLOCK_NBYTES or any(block % size for size in (memory, offset)):
        return None
    return Alignment(memory, block)


def _reported_alignment(fd: int) -> tuple[int, int] | None:
    """Return the alignment of memory and of offsets (STATX_DIOALIGN), or None if it is unknown."""
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
