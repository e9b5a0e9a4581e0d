"""The messages between a trainer and its background writer, over a socket pair.

A message is its length and a msgpack array: the name of its class, and its fields. The end of the
stream means that the other process has ended.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import weakref
from contextlib import suppress

from msgspec import Struct, msgpack

from dist_ckpt.core.comm.rank_messages import Failure
from dist_ckpt.core.runtime.processes import MAX_CLOCK_GAP_S, ProcessId, running_time
from dist_ckpt.core.runtime.threads import run_after_fork
from dist_ckpt.errors import CheckpointError
from dist_ckpt.reports import SaveReport
from dist_ckpt.settings import Settings

# After SIGTERM a writer abandons its save, and seals staged snapshots: it digests them at a low
# priority. After this time it ends in any case.
WRITER_END_S = 60.0

_LENGTH = struct.Struct(">I")
MAX_MESSAGE_NBYTES = 1 << 20
_MAX_READ_NBYTES = 1 << 16

# A process that receives nothing for this time, while the buffers are full, counts as dead.
SEND_TIMEOUT_S = 60


class _TaggedMessage(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    pass


# --- from the trainer --------------------------------------------------------------------------


class Hello(_TaggedMessage, frozen=True):
    """The first message: the rank of this writer, and its `trainer`, None if it has no identity.

    Answered by `Ready` or `Refused`.
    """

    job: str
    rank: int
    world_size: int
    settings: Settings
    max_bytes_per_s: float | None
    trainer: ProcessId | None = None

    def check(self) -> None:
        """Raise ValueError for an invalid rank. Not in the decoder: the trainer gets the reason."""
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} of {self.world_size}")


class Serve(_TaggedMessage, frozen=True):
    """Serve a store to the writers. Answered by `Serving` or `Refused`.

    `peer_host` is a host that must reach the store, or "" if all ranks are on this host. The
    previous store is served until no earlier `Write` needs it.
    """

    token: bytes
    peer_host: str


class Write(_TaggedMessage, frozen=True):
    """Write the snapshot in an arena, and commit it with the other writers. Answered by `Done`.

    `path` is the path of the checkpoint, and `number` the number of the arena. If there are several
    writers, they meet in the store at `host` and `port`.
    """

    snapshot: str
    path: str
    arena_path: str
    number: int
    host: str
    port: int
    token: bytes


class Abort(_TaggedMessage, frozen=True):
    """Fail a save that the trainer could not stage, unless it is complete."""

    snapshot: str
    reason: str


class Pause(_TaggedMessage, frozen=True):
    """Pause a save that has not begun. Answered by `Paused`."""

    snapshot: str


class Go(_TaggedMessage, frozen=True):
    """Continue a paused save, or drop it. No answer."""

    snapshot: str
    drop: bool


class Ping(_TaggedMessage, frozen=True):
    """Answer with `Pong`, even during a save."""


class Close(_TaggedMessage, frozen=True):
    """End when all saves are settled."""


# --- from the writer ---------------------------------------------------------------------------


class Pong(_TaggedMessage, frozen=True):
    """The writer is not frozen."""


class Ready(_TaggedMessage, frozen=True):
    """The writer has started."""

    pid: int


class Refused(_TaggedMessage, frozen=True):
    """A request of the trainer has failed."""

    failure: Failure


class Serving(_TaggedMessage, frozen=True):
    """The address of the store that the writer serves."""

    host: str
    port: int


class Paused(_TaggedMessage, frozen=True):
    """The answer to `Pause`. If not `is_paused`, the save has begun or is settled."""

    snapshot: str
    is_paused: bool


class Done(_TaggedMessage, frozen=True):
    """A save is settled, with a `report` of the writer's part or a `failure`."""

    snapshot: str
    report: SaveReport | None
    failure: Failure | None


_FromTrainer = Hello | Serve | Write | Abort | Pause | Go | Ping | Close
WriterMessage = _FromTrainer | Ready | Refused | Serving | Paused | Pong | Done
# The store where writers meet: host, port, token.
StoreAddress = tuple[str, int, bytes]

_DECODER: msgpack.Decoder[WriterMessage] = msgpack.Decoder(WriterMessage)


class LinkClosedError(CheckpointError):
    """The process at the other end has ended."""


class ProtocolError(LinkClosedError):
    """The process at the other end sent an invalid message."""


class Link:
    """One end of the connection. Threads may send; one thread receives."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        # Reentrant: the end of an AsyncSaver may interrupt a send, and sends too.
        self._lock = threading.RLock()
        self._data = bytearray()
        # Not `settimeout`: that would make the socket non-blocking.
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_TIMEOUT_S, 0))
        weakref.finalize(self, end.close).atexit = False
        # Otherwise a data loader would keep the link of a dead trainer open.
        run_after_fork(self.close)

    def send(self, message: WriterMessage) -> None:
        """Send a message. LinkClosedError if the other process has ended."""
        body = msgpack.encode(message)
        assert len(body) <= MAX_MESSAGE_NBYTES, f"a message of {len(body)} bytes"
        with self._lock:
            try:
                self._end.sendall(_LENGTH.pack(len(body)) + body)
            except OSError as error:
                # Half a message may have been sent, so no other can follow.
                with suppress(OSError):
                    self._end.shutdown(socket.SHUT_RDWR)
                raise LinkClosedError(f"the other process is gone: {error.strerror}") from error

    def receive(self, timeout_s: float | None) -> WriterMessage | None:
        """Return the next message, or None after `timeout_s`. LinkClosedError at the end."""
        until = None if timeout_s is None else running_time() + timeout_s
        while (message := self._decode_next()) is None:
            left_s = None if until is None else max(0.0, until - running_time())
            # Not a timeout of the socket: that would also apply to sends of other threads.
            if not self.wait(None if left_s is None else min(left_s, MAX_CLOCK_GAP_S / 2)):
                if not left_s:
                    return None
                continue
            try:
                data = self._end.recv(_MAX_READ_NBYTES)
            except OSError as error:
                raise LinkClosedError(f"the other process is gone: {error}") from error
            if not data:
                raise LinkClosedError("the other process is gone")
            self._data += data
        return message

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until there is something to receive. False after `timeout_s`. Thread-safe."""
        poll = select.poll()  # a new one: two threads cannot share it
        try:
            poll.register(self._end, select.POLLIN)
            return bool(poll.poll(None if timeout_s is None else 1e3 * timeout_s))
        except (OSError, ValueError):  # closed meanwhile: `receive` raises that
            return True

    def close(self) -> None:
        """Close this end. The other process sees the end of the stream."""
        self._end.close()

    def _decode_next(self) -> WriterMessage | None:
        if len(self._data) < _LENGTH.size:
            return None
        (nbytes,) = _LENGTH.unpack_from(self._data)
        if nbytes > MAX_MESSAGE_NBYTES:
            raise ProtocolError(f"the other process sent a message of {nbytes} bytes: invalid")
        stop = _LENGTH.size + nbytes
        if len(self._data) < stop:
            return None
        body = bytes(self._data[_LENGTH.size : stop])
        del self._data[:stop]
        try:
            return _DECODER.decode(body)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"the other process sent an invalid message: {error}") from error
