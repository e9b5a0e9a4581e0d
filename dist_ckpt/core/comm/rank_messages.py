"""Messages between ranks: their encoding, errors, envelopes and answers, heartbeats.

A message is a `Message`, decoded strictly, field by field, or plain data of a built-in type. Data
cannot name a class, except the class of an error, in a fixed table.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, TypeVar

from msgspec import Meta
from msgspec.structs import replace

from dist_ckpt import errors
from dist_ckpt.core.format.objects.plain_types import cost_of
from dist_ckpt.core.format.strict_json import max_memory, memory_problem
from dist_ckpt.core.runtime import typed_msgpack
from dist_ckpt.core.runtime.processes import ProcessId, ProcessState
from dist_ckpt.core.runtime.typed_msgpack import Message
from dist_ckpt.errors import CheckpointError, CorruptError, RankError
from dist_ckpt.message_text import ranks_text

T = TypeVar("T")

MAX_MESSAGE_CHARS = 1 << 16
# Larger data goes over the bulk connections. The limit bounds the memory that a store can cost.
MAX_DOCUMENT_NBYTES = 32 << 20


class NoAnswerError(RankError):
    """The decision is unknown to this rank: the coordinator or the store stopped answering."""


class SecondaryError(RankError):
    """An error that another rank's error or death has caused; it is reported after all others."""


class Failure(Message, frozen=True):
    """An error in a message. `is_secondary`: the error of another rank has caused it."""

    kind: str
    message: str
    rank: int | None
    phase: str | None
    touched: tuple[str, ...] = ()
    path: str | None = None
    is_secondary: bool = False

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ValueError("an error of a class that this version of dist_ckpt does not have")


_KINDS: Mapping[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        CheckpointError,
        errors.NotFoundError,
        errors.ExistsError,
        errors.ConflictError,
        CorruptError,
        errors.IncompatibleError,
        errors.StorageError,
        RankError,
        errors.UnequalReplicasError,
        ValueError,
        TypeError,
    )
}

_LOCATED = re.compile(r"rank \d+ \(host [^)]*\): ")


def describe_error(
    error: BaseException, phase: str, rank: int | None = None, host: str = ""
) -> Failure:
    """Return the failure for an error. With a `rank`, its message begins with rank and host."""
    kind = next(
        (cls.__name__ for cls in type(error).__mro__ if _KINDS.get(cls.__name__) is cls), None
    )
    message = (str(error) if kind else f"{type(error).__name__}: {error}")[:MAX_MESSAGE_CHARS]
    own_rank, own_phase = None, None
    if isinstance(error, CheckpointError):
        own_rank, own_phase = error.rank, error.phase
    if rank is not None and not _LOCATED.match(message):
        message = f"rank {rank} (host {host}): {message}"
    return Failure(
        kind=kind or "RankError",
        message=message,
        rank=rank if own_rank is None else own_rank,
        phase=own_phase or phase,
        touched=error.touched if isinstance(error, CheckpointError) else (),
        path=error.path if isinstance(error, CorruptError) else None,
        is_secondary=isinstance(error, SecondaryError),
    )


def combine_failures(failures: Mapping[int, Failure]) -> Failure:
    """Return the lowest rank's failure, secondary ones last; its message lists the other ranks."""
    first, *later = sorted(failures, key=lambda rank: (failures[rank].is_secondary, rank))
    failure = failures[first]
    if later:
        message = f"{failure.message} (also failed: {ranks_text(later)})"
        failure = add_touched(replace(failure, message=message), [failures[rank] for rank in later])
    return failure


def add_touched(failure: Failure, further: Iterable[Failure]) -> Failure:
    """Add the names that further failures have touched to a failure."""
    touched = {name: None for each in (failure, *further) for name in each.touched}
    return replace(failure, touched=tuple(touched))


def build_error(failure: Failure) -> Exception:
    """Return the exception that a failure describes."""
    kind = _KINDS[failure.kind]
    if not issubclass(kind, CheckpointError):
        return kind(failure.message)
    error = kind(failure.message, rank=failure.rank, phase=failure.phase, touched=failure.touched)
    if isinstance(error, CorruptError):
        error.path = failure.path
    return error


def is_interrupt(error: BaseException | None) -> bool:
    """Return True if this is a request to stop: KeyboardInterrupt or SystemExit."""
    return error is not None and not isinstance(error, Exception)


def pack(message: object) -> bytes:
    """Encode a message. TypeError if it is not a message, CheckpointError if it is too long."""
    data = typed_msgpack.encode(message)
    if len(data) > MAX_DOCUMENT_NBYTES:
        raise CheckpointError(
            f"the message of one rank to the others has {len(data)} bytes, the limit is "
            f"{MAX_DOCUMENT_NBYTES}: use fewer tensors or shorter names"
        )
    return data


def unpack(data: bytes, expected: type[T]) -> T:
    """Decode the result of `pack`. ValueError for anything else, or if it costs too much memory."""
    # No value takes 200 times its bytes in memory, so short messages need no check.
    if len(data) * 200 > max_memory(0):
        problem = memory_problem(len(data), cost_of(data, max_memory(len(data))))
        if problem is not None:
            raise ValueError(f"a message that is too large: {problem}")
    return typed_msgpack.decode(data, expected)


NONCE_NBYTES = 4
NO_NONCE = bytes(NONCE_NBYTES)


def new_nonce() -> bytes:
    """Return random bytes that match an answer to an envelope."""
    return (int.from_bytes(os.urandom(NONCE_NBYTES), "big") | 1).to_bytes(NONCE_NBYTES, "big")


_Nonce = Annotated[bytes, Meta(min_length=NONCE_NBYTES, max_length=NONCE_NBYTES)]
# Part of names in the store.
_Token = Annotated[str, Meta(pattern=r"\A([0-9a-f]{16})?\Z")]


class Envelope(Message, frozen=True):
    """The result of one rank's part of a phase: a packed message, or a failure.

    Envelopes and answers are encoded without `pack`: its limit is for their bodies.
    `call` and `phase` locate the rank. `operation` is the token of the operation, "" until its
    first answer. `gave_up`: the rank no longer waits for the answer.
    """

    call: str
    phase: str
    operation: _Token
    nonce: _Nonce
    body: bytes
    failure: Failure | None
    gave_up: bool = False


class Answer(Message, frozen=True):
    """The decision: a packed message, or a failure.

    In an operation's first answer, `nonces` has the nonce of each envelope that was decided on, in
    rank order. Later answers are matched by the token `operation`.
    """

    call: str
    operation: _Token
    nonces: bytes
    body: bytes
    failure: Failure | None

    def __post_init__(self) -> None:
        if len(self.nonces) % NONCE_NBYTES:
            raise ValueError("the nonces have a wrong size")

    def is_answer_to(self, rank: int, own: Envelope) -> bool:
        """Return True if this rank's envelope was decided on."""
        if own.operation:
            return own.operation == self.operation
        return self.nonces[rank * NONCE_NBYTES :][:NONCE_NBYTES] == own.nonce


_Count = Annotated[int, Meta(ge=0)]


class Heartbeat(Message, frozen=True):
    """One heartbeat. `count` grows with each; `number` is the last operation that was entered.

    `inside`: the rank is still in this operation. `failed_turn`: the last exchange in it, counted
    from 1, whose failure the rank has received, or 0. `gone`: the rank has closed its channel.
    `process` is the process of the rank, None if it has no identity. `thread` is its thread that
    waits for the store to take each heartbeat, 0 if unknown. `address` is that of its liveness
    port, "" if it has none.
    """

    count: _Count
    number: _Count
    inside: bool
    failed_turn: _Count
    gone: bool
    host: str
    process: ProcessId | None = None
    thread: _Count = 0
    address: str = ""


# The pid of a process, its start time, and the `thread` of its heartbeats.
_Process = tuple[_Count, _Count, _Count]


class Question(Message, frozen=True):
    """The processes of a machine to look at.

    `count` grows as long as ranks of other machines ask.
    """

    count: _Count
    processes: tuple[_Process, ...]


class Sighting(Message, frozen=True):
    """The states of processes of one machine, as a rank there has seen them.

    `witness` is the pid of that rank. `count` grows with each look.
    """

    witness: _Count
    count: _Count
    states: tuple[tuple[_Process, ProcessState], ...]


@dataclass(frozen=True, slots=True)
class RankLocation:
    """Where a rank runs: its host, and its process, None if it has no identity."""

    host: str
    process: ProcessId | None = None


@dataclass(slots=True)
class HeartbeatSender:
    """The content of this rank's next heartbeat; the channel sets it, and its threads send it.

    `key` is the key of heartbeats in the store. While it is "", no heartbeat is sent.
    """

    host: str
    process: ProcessId | None = None
    thread: int = 0
    address: str = ""
    key: str = ""
    number: int = 0
    inside: bool = False
    failed_turn: int = 0
    gone: bool = False
    _count: int = 0

    def encode_next(self) -> bytes:
        """Return the next heartbeat."""
        self._count += 1
        number, inside, failed_turn = self.number, self.inside, self.failed_turn
        return typed_msgpack.encode(
            Heartbeat(
                self._count,
                number,
                inside,
                failed_turn,
                self.gone,
                self.host,
                self.process,
                self.thread,
                self.address,
            )
        )
