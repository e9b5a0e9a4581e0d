"""What a trainer and its background writer say to each other, over a socket of their own.

A message is its length and a msgpack array: the kind of message, and its fields. The end of the
stream means that the other process is gone, however it ended.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import Any

import msgpack

from dist_ckpt.errors import CheckpointError

# A writer that is told to stop abandons its save, and seals what is staged, which it digests for
# that at a low priority. One that has not ended by then ends itself.
WRITER_END_S = 60.0


_LENGTH = struct.Struct(">I")
MAX_MESSAGE_NBYTES = 1 << 20
_MAX_READ_NBYTES = 1 << 16

# Who does not take messages for so long, with the system's buffers full, is as good as gone.
SEND_S = 60


# --- from the trainer --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message: whose writer this is. `config` are the fields of a `Config`.

    Answered by `Ready` or `Refused`.
    """

    job: str
    rank: int
    world_size: int
    config: Mapping[str, float | str]
    max_bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class Serve:
    """Serve a store to the writers; answered by `Serving` or `Refused`.

    `towards` is a host from which it must be reached, "" if all ranks are on this one. The one
    before is served for as long as a save needs it that was to be written already.
    """

    token: bytes
    towards: str


@dataclass(frozen=True, slots=True)
class Write:
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


@dataclass(frozen=True, slots=True)
class Abort:
    """Fail a save that was to be written, if it is not complete: the trainer could not stage it."""

    snapshot: str
    reason: str


@dataclass(frozen=True, slots=True)
class Pause:
    """Do not begin a save, if it has not begun; answered by `Paused`."""

    snapshot: str


@dataclass(frozen=True, slots=True)
class Go:
    """Go on with a save that is paused, or drop it: it is not even begun, and nobody answers."""

    snapshot: str
    drop: bool


@dataclass(frozen=True, slots=True)
class Ping:
    """Answer with `Pong`, whatever is under way."""


@dataclass(frozen=True, slots=True)
class Close:
    """End when everything that was to be written is settled."""


# --- from the writer ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pong:
    """The writer is not frozen."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The writer has started."""

    pid: int


@dataclass(frozen=True, slots=True)
class Refused:
    """What was asked for cannot be had; `failure` are the fields of a `Failure`."""

    failure: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Serving:
    """Where the store is that the writer serves."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Paused:
    """Whether a save is paused; else it had begun, or is settled."""

    snapshot: str
    is_paused: bool


@dataclass(frozen=True, slots=True)
class Done:
    """A save is settled.

    `verdict` are the fields of a `Verdict`, or `failure` those of a `Failure`. `seconds` are the
    writer's, by phase; `reads` and `writes` are (calls, bytes) of the storage, `exchanges` of the
    channel, `nbytes_receipt` of them the receipt.
    """

    snapshot: str
    verdict: Mapping[str, Any] | None
    failure: Mapping[str, Any] | None
    seconds: Mapping[str, float]
    reads: tuple[int, int]
    writes: tuple[int, int]
    exchanges: tuple[int, int]
    nbytes_receipt: int


Message = (
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
_KINDS: tuple[type[Message], ...] = (
    Hello,
    Serve,
    Write,
    Abort,
    Pause,
    Go,
    Ping,
    Close,
    Ready,
    Refused,
    Serving,
    Paused,
    Pong,
    Done,
)
_CODES = {kind: code for code, kind in enumerate(_KINDS)}

# What a field's value may be, by the field's annotation: each that a message has stands here.
_TYPES: Mapping[str, tuple[type, ...]] = {
    "str": (str,),
    "bytes": (bytes,),
    "int": (int,),
    "bool": (bool,),
    "float | None": (float, int, type(None)),
    "Mapping[str, float | str]": (dict,),
    "Mapping[str, float]": (dict,),
    "Mapping[str, Any]": (dict,),
    "Mapping[str, Any] | None": (dict, type(None)),
    "tuple[int, int]": (tuple,),
}


class LinkClosedError(CheckpointError):
    """The process at the other end is gone."""


class NonsenseError(LinkClosedError):
    """The process at the other end says what none of ours does."""


class Link:
    """One end of the connection. Threads may send; one thread receives."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        # Whoever sends may be interrupted by the end of an AsyncSaver, which sends as well.
        self._lock = threading.RLock()
        self._data = bytearray()
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)
        # Not a timeout of Python's: that would make the socket one that does not block.
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_S, 0))
        weakref.finalize(self, end.close).atexit = False
        _close_in_children(weakref.ref(self))

    def fileno(self) -> int:
        """Return the descriptor, to wait for messages and other things at once."""
        return self._end.fileno()

    def send(self, message: Message) -> None:
        """Send a message. LinkClosedError if nobody is there to read it."""
        body: bytes = msgpack.packb((_CODES[type(message)], *asdict(message).values()))
        assert len(body) <= MAX_MESSAGE_NBYTES, f"a message of {len(body)} bytes"
        with self._lock:
            try:
                self._end.sendall(_LENGTH.pack(len(body)) + body)
            except OSError as error:
                # Half a message may be on its way: nothing sensible can follow.
                with suppress(OSError):
                    self._end.shutdown(socket.SHUT_RDWR)
                raise LinkClosedError(f"the other process is gone: {error.strerror}") from error

    def receive(self, timeout_s: float | None) -> Message | None:
        """Return the next message, None if there is none in time. LinkClosedError at the end."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while (message := self._taken()) is None:
            left = None if until is None else max(0.0, until - time.monotonic())
            try:
                # Not a timeout of the socket: that would hold for who sends meanwhile as well.
                if not self._poll.poll(None if left is None else 1e3 * left):
                    return None
                data = self._end.recv(_MAX_READ_NBYTES)
            except (OSError, ValueError) as error:  # ValueError: it was closed meanwhile
                raise LinkClosedError(f"the other process is gone: {error}") from error
            if not data:
                raise LinkClosedError("the other process is gone")
            self._data += data
        return message

    def wait(self, timeout_s: float) -> None:
        """Return when there is something to receive, or the time is up. Any thread may wait."""
        poll = select.poll()  # `_poll` is the receiver's: two threads cannot use one at once
        with suppress(OSError, ValueError):  # it was closed meanwhile: `receive` says so
            poll.register(self._end, select.POLLIN)
            poll.poll(1e3 * timeout_s)

    def close(self) -> None:
        """Close this end; the other one sees the end of the stream."""
        self._end.close()

    def _taken(self) -> Message | None:
        if len(self._data) < _LENGTH.size:
            return None
        (nbytes,) = _LENGTH.unpack_from(self._data)
        if nbytes > MAX_MESSAGE_NBYTES:
            raise NonsenseError(f"the other process talks nonsense: a message of {nbytes} bytes")
        stop = _LENGTH.size + nbytes
        if len(self._data) < stop:
            return None
        body = bytes(self._data[_LENGTH.size : stop])
        del self._data[:stop]
        return _decoded(body)


def _close_in_children(link: weakref.ref[Link]) -> None:
    """Have a forked child close its copy: a data loader would keep a dead trainer looking alive."""

    def close() -> None:
        if (copied := link()) is not None:
            copied.close()

    os.register_at_fork(after_in_child=close)


def _decoded(body: bytes) -> Message:
    try:
        code, *values = msgpack.unpackb(body, use_list=False)
        if type(code) is not int or not 0 <= code < len(_KINDS):
            raise ValueError("a message of no kind")
        kind: type[Message] = _KINDS[code]
        named = fields(kind)
        if len(values) != len(named):
            raise ValueError(f"{kind.__name__} of {len(values)} fields")
        for field, value in zip(named, values, strict=True):
            if type(value) not in _TYPES[str(field.type)]:
                raise ValueError(f"{kind.__name__}.{field.name} is a {type(value).__name__}")
        return kind(*values)
    except (ValueError, TypeError) as error:
        raise NonsenseError(f"the other process talks nonsense: {error}") from error
