"""Links between the ranks of one host: short messages, and memory that other ranks can read.

A link is a Unix socket, over which each side passes its anonymous memory (`memfd_create`). A link
proves that two ranks are on one machine, whatever the names of their hosts; its end means that the
other rank is gone. The links of one load share a secret name, the meeting: a process without it is
rejected, and its memory is not mapped. Nothing is in a file system, so nothing remains, and a small
/dev/shm in a container does not matter. Memory may serve many meetings, one after another.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import selectors
import socket
import struct
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress

from dist_ckpt.core.comm.rank_messages import SecondaryError
from dist_ckpt.core.runtime.host_memory import create_anonymous
from dist_ckpt.core.runtime.processes import MAX_CLOCK_GAP_S, running_time

MAX_MESSAGE_NBYTES = 64

# A rank, and the name of the meeting.
_HELLO = struct.Struct("<q32s")
_CREDENTIALS = struct.Struct("3i")


class SharedScratch:
    """Memory that other ranks can map. It has no name, and is freed with its last user.

    All of it is allocated immediately: a page that is missing later is a SIGBUS. OSError if this
    system has no such memory, or too little.
    """

    def __init__(self, nbytes: int) -> None:
        self.fd = create_anonymous(nbytes)
        close = weakref.finalize(self, os.close, self.fd)
        try:
            self.view = _map_memory(self.fd)
        except BaseException:
            close()
            raise


class HostLinks:
    """One rank's links to others on its host. Threads may send; one thread makes all other calls.

    It listens immediately. When all ranks have created theirs, each calls `offer` and `connect`;
    when all have done that, `accept`. OSError if the system has no such socket.
    """

    def __init__(self, meeting: str, rank: int, *, timeout_s: float) -> None:
        self._meeting = meeting
        self.rank = rank
        self._timeout_s = timeout_s
        self._sockets: dict[int, socket.socket] = {}
        self._memories: dict[int, memoryview] = {}
        self._waker, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ, rank)
        self._offered: SharedScratch | None = None
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._server.bind(self._address(rank))
            self._server.listen(socket.SOMAXCONN)
        except BaseException:
            self.close()
            raise

    def offer(self, memory: SharedScratch) -> None:
        """Pass this memory to every rank that is linked from now on."""
        self._offered = memory

    def connect(self, ranks: Iterable[int]) -> list[int]:
        """Begin links to the lower ones of these ranks; return the ranks that are out of reach."""
        return [rank for rank in ranks if rank < self.rank and not self._connect(rank)]

    def accept(self, ranks: Iterable[int]) -> None:
        """Accept the links of the higher ones of these ranks, which have all connected."""
        missing = {rank for rank in ranks if rank > self.rank}
        until = running_time() + self._timeout_s
        while missing:
            # A series of strangers must not extend the deadline either.
            if (left_s := until - running_time()) <= 0:
                raise SecondaryError(
                    f"no connection from rank {min(missing)} within {self._timeout_s:g} s"
                )
            try:
                self._server.settimeout(min(left_s, MAX_CLOCK_GAP_S / 2))
                link, _ = self._server.accept()
            except TimeoutError:
                continue
            rank = self._receive_hello(link)
            if rank not in missing:
                link.close()
                continue
            try:
                self._send_hello(link)
            except ConnectionError:
                link.close()
                raise SecondaryError(
                    "a rank of this host has failed or died before any data was shared: read "
                    "the logs of the host's other ranks"
                ) from None
            missing.discard(rank)
            self._add(rank, link)

    def memory_of(self, rank: int) -> memoryview:
        """Return the memory of this rank, or of one from which a message has arrived."""
        return self._own_memory.view if rank == self.rank else self._memories[rank]

    @property
    def _own_memory(self) -> SharedScratch:
        assert self._offered is not None, "call `offer` before any link"
        return self._offered

    def send(self, rank: int, message: bytes) -> None:
        """Send a message. It is lost if the rank is gone."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self._sockets[rank].send(message)

    def receive(self, timeout_s: float) -> Iterator[tuple[int, bytes | None]]:
        """Yield messages, and None for a rank that is gone; end early when woken."""
        for key, _ in self._selector.select(timeout_s):
            rank: int = key.data
            if rank == self.rank:
                self._woken.recv(MAX_MESSAGE_NBYTES)
                continue
            link = self._sockets[rank]
            try:
                data, fds, _, _ = socket.recv_fds(link, MAX_MESSAGE_NBYTES, 1)
            except OSError:
                data, fds = b"", []
            if len(data) == _HELLO.size:
                self._take_memory(rank, fds)
            elif data:
                yield rank, data
            else:
                self._selector.unregister(link)
                yield rank, None

    def wake(self) -> None:
        """Make `receive` return. Any thread may call this, also after `close`."""
        with suppress(OSError):
            self._waker.send(b"!")

    def close(self) -> None:
        """Close all links. Never raises. Mapped memory stays valid for its users."""
        self._selector.close()
        for link in self._sockets.values():
            # A forked child may share the link: closing it here would not end it.
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        for endpoint in (self._server, self._waker, self._woken, *self._sockets.values()):
            endpoint.close()
        self._memories.clear()

    def _address(self, rank: int) -> str:
        # Any process can list the names of sockets, so the meeting's name is hashed.
        name = hashlib.blake2b(self._meeting.encode(), digest_size=16).hexdigest()
        return f"\0dist_ckpt/{name}/{rank}"

    def _connect(self, rank: int) -> bool:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link.settimeout(self._timeout_s)
        try:
            link.connect(self._address(rank))
            if not _is_own_user(link):
                raise PermissionError
            self._send_hello(link)
        except OSError:
            link.close()
            return False
        self._add(rank, link)
        return True

    def _add(self, rank: int, link: socket.socket) -> None:
        self._sockets[rank] = link
        self._selector.register(link, selectors.EVENT_READ, rank)

    def _send_hello(self, link: socket.socket) -> None:
        hello = _HELLO.pack(self.rank, self._meeting.encode())
        socket.send_fds(link, [hello], [self._own_memory.fd])

    def _receive_hello(self, link: socket.socket) -> int | None:
        """Map the memory of the rank that has connected; return None if it is a stranger."""
        link.settimeout(0)  # a rank sends its hello when it connects
        try:
            data, fds, _, _ = socket.recv_fds(link, MAX_MESSAGE_NBYTES, 1)
        except OSError:
            return None
        link.settimeout(self._timeout_s)
        rank: int = _HELLO.unpack(data)[0] if len(data) == _HELLO.size else -1
        if data != _HELLO.pack(rank, self._meeting.encode()) or not _is_own_user(link):
            for fd in fds:
                os.close(fd)
            return None
        self._take_memory(rank, fds)
        return rank

    def _take_memory(self, rank: int, fds: list[int]) -> None:
        if not fds:  # the system drops descriptors beyond this process's limit
            raise OSError(
                errno.EMFILE,
                "too many open files to take another rank's memory: raise the limit (ulimit -n)",
            )
        (fd,) = fds
        try:
            self._memories[rank] = _map_memory(fd)
        finally:
            os.close(fd)


def _map_memory(fd: int) -> memoryview:
    # Writable, also for readers: from read-only memory Python copies under its lock.
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    return memoryview(mmap.mmap(fd, 0, flags=flags))


def _is_own_user(link: socket.socket) -> bool:
    data = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(data)[1]
    return uid == os.geteuid()
