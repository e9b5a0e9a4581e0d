"""What a trainer and its background writer say to each other, over a socket of their own.

A message is its length and a msgpack array: the name of its class, and its fields. The end of the
stream means that the other process is gone, however it ended.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
import weakref
from contextlib import suppress

from msgspec import Struct, msgpack

from dist_ckpt.config import Config
from dist_ckpt.core.comm.messages import Failure
from dist_ckpt.core.runtime.threads import run_after_fork
from dist_ckpt.errors import CheckpointError
from dist_ckpt.reports import SaveReport

# A writer that is told to stop abandons its save, and seals what is staged, which it digests for
# that at a low priority. One that has not ended by then ends itself.
WRITER_END_S = 60.0


_LENGTH = struct.Struct(">I")
MAX_MESSAGE_NBYTES = 1 << 20
_MAX_READ_NBYTES = 1 << 16

# Who does not take messages for so long, with the system's buffers full, is as good as gone.
SEND_S = 60


class _Kind(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    pass


# --- from the trainer --------------------------------------------------------------------------


class Hello(_Kind, frozen=True):
    """The first message: whose writer this is.

    Answered by `Ready` or `Refused`.
    """

    job: str
    rank: int
    world_size: int
    config: Config
    max_bytes_per_s: float | None

    def check(self) -> None:
        """Raise ValueError if this is no rank. Not when it is decoded: the trainer is told why."""
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} of {self.world_size}")


class Serve(_Kind, frozen=True):
    """Serve a store to the writers; answered by `Serving` or `Refused`.

    `towards` is a host from which it must be reached, "" if all ranks are on this one. The one
    before is served for as long as a save needs it that was to be written already.
    """

    token: bytes
    towards: str


class Write(_Kind, frozen=True):
    """Write the snapshot that is staged in an arena, and commit it with the other writers.

    `path` is the snapshot's; `number` is the arena's, of those that the rank has. The writers meet
    in the store at `host` and `port`; one that is alone meets nobody. Answered by `Done`.
    """

    snapshot: str
    path: str
    place: str
    number: int
    host: str
    port: int
    token: bytes


class Abort(_Kind, frozen=True):
    """Fail a save that was to be written, if it is not complete: the trainer could not stage it."""

    snapshot: str
    reason: str


class Pause(_Kind, frozen=True):
    """Do not begin a save, if it has not begun; answered by `Paused`."""

    snapshot: str


class Go(_Kind, frozen=True):
    """Go on with a save that is paused, or drop it: it is not even begun, and nobody answers."""

    snapshot: str
    drop: bool


class Ping(_Kind, frozen=True):
    """Answer with `Pong`, whatever is under way."""


class Close(_Kind, frozen=True):
    """End when everything that was to be written is settled."""


# --- from the writer ---------------------------------------------------------------------------


class Pong(_Kind, frozen=True):
    """The writer is not frozen."""


class Ready(_Kind, frozen=True):
    """The writer has started."""

    pid: int


class Refused(_Kind, frozen=True):
    """What was asked for cannot be had."""

    failure: Failure


class Serving(_Kind, frozen=True):
    """Where the store is that the writer serves."""

    host: str
    port: int


class Paused(_Kind, frozen=True):
    """Whether a save is paused; else it had begun, or is settled."""

    snapshot: str
    is_paused: bool


class Done(_Kind, frozen=True):
    """A save is settled.

    It has a `report` of the writer's part, or a `failure`.
    """

    snapshot: str
    report: SaveReport | None
    failure: Failure | None


WriterMessage = (
    Hello
    | Serve
    | Write
    | Abort
    | Pause
    | Go
    | Ping
    | Close
    | Ready
    | Refused
    | Serving
    | Paused
    | Pong
    | Done
)
_DECODER: msgpack.Decoder[WriterMessage] = msgpack.Decoder(WriterMessage)


class LinkClosedError(CheckpointError):
    """The process at the other end is gone."""


class ProtocolError(LinkClosedError):
    """The process at the other end says what none of ours does."""


class Link:
    """One end of the connection. Threads may send; one thread receives."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        # Whoever sends may be interrupted by the end of an AsyncSaver, which sends as well.
        self._lock = threading.RLock()
        self._data = bytearray()
        # Not a timeout of Python's: that would make the socket one that does not block.
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_S, 0))
        weakref.finalize(self, end.close).atexit = False
        # Else a data loader would keep a dead trainer looking alive.
        run_after_fork(self.close)

    def send(self, message: WriterMessage) -> None:
        """Send a message. LinkClosedError if nobody is there to read it."""
        body = msgpack.encode(message)
        assert len(body) <= MAX_MESSAGE_NBYTES, f"a message of {len(body)} bytes"
        with self._lock:
            try:
                self._end.sendall(_LENGTH.pack(len(body)) + body)
            except OSError as error:
                # Half a message may be on its way: nothing sensible can follow.
                with suppress(OSError):
                    self._end.shutdown(socket.SHUT_RDWR)
                raise LinkClosedError(f"the other process is gone: {error.strerror}") from error

    def receive(self, timeout_s: float | None) -> WriterMessage | None:
        """Return the next message, None if there is none in time. LinkClosedError at the end."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while (message := self._taken()) is None:
            # Not a timeout of the socket: that would hold for who sends meanwhile as well.
            if not self.wait(None if until is None else max(0.0, until - time.monotonic())):
                return None
            try:
                data = self._end.recv(_MAX_READ_NBYTES)
            except OSError as error:
                raise LinkClosedError(f"the other process is gone: {error}") from error
            if not data:
                raise LinkClosedError("the other process is gone")
            self._data += data
        return message

    def wait(self, timeout_s: float | None) -> bool:
        """Say when there is something to receive; False if the time is up. Any thread may wait."""
        poll = select.poll()  # one for each wait: two threads cannot use one at once
        try:
            poll.register(self._end, select.POLLIN)
            return bool(poll.poll(None if timeout_s is None else 1e3 * timeout_s))
        except (OSError, ValueError):  # it was closed meanwhile: `receive` says so
            return True

    def close(self) -> None:
        """Close this end; the other one sees the end of the stream."""
        self._end.close()

    def _taken(self) -> WriterMessage | None:
        if len(self._data) < _LENGTH.size:
            return None
        (nbytes,) = _LENGTH.unpack_from(self._data)
        if nbytes > MAX_MESSAGE_NBYTES:
            raise ProtocolError(f"the other process talks nonsense: a message of {nbytes} bytes")
        stop = _LENGTH.size + nbytes
        if len(self._data) < stop:
            return None
        body = bytes(self._data[_LENGTH.size : stop])
        del self._data[:stop]
        try:
            return _DECODER.decode(body)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"the other process talks nonsense: {error}") from error
