"""The control channel: one operation, `exchange`, that spreads any rank's error to all.

An operation of the group (a save, a load) is a sequence of exchanges. In each, every rank puts an
envelope, what its part of the work returned or raised; the coordinator, rank 0, decides and puts
one answer, and all ranks return it or raise the same error.
"""

from __future__ import annotations

import os
import re
import socket
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, Protocol

import msgpack

from dist_ckpt import errors
from dist_ckpt.errors import CheckpointError, CorruptError, RankError, ranks_text
from dist_ckpt.format.plain_types import cost_of
from dist_ckpt.format.strict_json import max_memory, memory_problem
from dist_ckpt.reports import Tally

# A plain tree: None, bool, int of 64 bits, float, str, bytes, list, dict[str, Doc]. `Any`, since
# who takes a document apart is who made it, in another process of the same job.
Doc = Any

COORDINATOR = 0
MAX_MESSAGE_CHARS = 1 << 16
# What is more goes over the bulk connections; this bounds what a store can make a rank take.
MAX_DOCUMENT_NBYTES = 32 << 20


class NoAnswerError(RankError):
    """This rank does not know what was decided: the coordinator, or the store, went silent."""


class FalloutError(RankError):
    """An error that another rank's error or death has brought about, such as a broken connection.

    Of several errors, one that is no fallout is told first.
    """


class Channel(Protocol):
    """A group's control channel. One thread of a rank uses it at a time."""

    @property
    def rank(self) -> int:
        """This rank, counted within the group."""

    @property
    def world_size(self) -> int:
        """The number of ranks of the group."""

    @property
    def host(self) -> str:
        """The name of this rank's host."""

    @property
    def exchanges(self) -> Tally:
        """The exchanges so far, and the bytes that this rank has put into them.

        They are its envelopes; the coordinator's are its answers. Heartbeats do not count.
        """

    def enter(self, what: str) -> None:
        """Begin the group's next operation; `what` says which one ("save to /ck/step-5").

        `what` is the same on all ranks: by it a rank that comes late tells the call that the
        others gave up from a newer one. Every `enter` is followed by `leave`.
        """

    def exchange(
        self, phase: str, work: Callable[[], Doc], decide: Callable[[Sequence[Doc]], Doc]
    ) -> Doc:
        """Do one rank's part of a phase and return what was decided. Collective.

        Every rank runs `work`; the coordinator then runs `decide` on all results, in rank order.
        Whatever any of them raises, all ranks raise: our errors, ValueError and TypeError as the
        same class, with rank and host in the message; others as RankError; on the rank where it
        happened, from the original. An interrupt (KeyboardInterrupt, SystemExit) is raised as it
        is where it happened. An error is told when the coordinator has seen it and ended its own
        work (in an operation's first exchange, when all have); who still works finds the answer
        afterwards, whatever its own work came to. The coordinator raises it when the others that
        live know of it, or after a while. Raises RankError if a rank dies, has left the operation,
        never enters it, or is in another one or another phase of it; NoAnswerError if this rank
        cannot know the decision.
        """

    def watch(self, ranks: Sequence[int]) -> None:
        """Raise FalloutError if nothing more will come from one of these ranks in the operation.

        For who waits for them otherwise than in an exchange, within its work: call it about once
        a second. The rank is dead, frozen or has left, or its own work has failed; one that is
        only slow is not lost.
        """

    def leave(self) -> None:
        """End the operation, also after an error: who still waits for this rank is told."""

    def close(self) -> None:
        """Stop the heartbeat. The channel is of no use afterwards."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An error on its way between ranks; `kind` is the name of the class to raise.

    `fallout`: it is only the consequence of another one.
    """

    kind: str
    message: str
    rank: int | None
    phase: str | None
    touched: tuple[str, ...] = ()
    fallout: bool = False


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
        ValueError,
        TypeError,
    )
}

_LOCATED = re.compile(r"rank \d+ \(host [^)]*\): ")


def failure_of(error: BaseException, *, rank: int, host: str, phase: str) -> Failure:
    """Describe an error that work raised on a rank, with rank and host in its message."""
    failure = decision_failure_of(error, phase=phase)
    if not _LOCATED.match(failure.message):
        failure = replace(failure, message=f"rank {rank} (host {host}): {failure.message}")
    return failure if failure.rank is not None else replace(failure, rank=rank)


def decision_failure_of(error: BaseException, *, phase: str) -> Failure:
    """Describe an error that a decision raised: it is about all ranks, so it names no place."""
    kind = next(
        (cls.__name__ for cls in type(error).__mro__ if _KINDS.get(cls.__name__) is cls), None
    )
    message = str(error) if kind else f"{type(error).__name__}: {error}"
    rank, own_phase = (
        (error.rank, error.phase) if isinstance(error, CheckpointError) else (None, None)
    )
    return Failure(
        kind=kind or "RankError",
        message=message[:MAX_MESSAGE_CHARS],
        rank=rank,
        phase=own_phase or phase,
        touched=error.touched if isinstance(error, CorruptError) else (),
        fallout=isinstance(error, FalloutError),
    )


def first_failure(failures: Mapping[int, Failure]) -> Failure:
    """Return the failure of the lowest rank, which tells who else failed."""
    first, *others = sorted(failures, key=lambda rank: (failures[rank].fallout, rank))
    failure = failures[first]
    if others:
        message = f"{failure.message} (also failed: {ranks_text(others)})"
        failure = with_touched(
            replace(failure, message=message), [failures[rank] for rank in others]
        )
    return failure


def with_touched(failure: Failure, others: Iterable[Failure]) -> Failure:
    """Add to a failure what the others say is touched."""
    touched = {name: None for one in (failure, *others) for name in one.touched}
    return replace(failure, touched=tuple(touched))


def error_of(failure: Failure) -> Exception:
    """Make the exception that a failure describes."""
    kind = _KINDS[failure.kind]
    if not issubclass(kind, CheckpointError):
        return kind(failure.message)
    if issubclass(kind, CorruptError):
        return kind(
            failure.message, rank=failure.rank, phase=failure.phase, touched=failure.touched
        )
    return kind(failure.message, rank=failure.rank, phase=failure.phase)


def is_interrupt(error: BaseException | None) -> bool:
    """Say whether this is no error but the wish to stop: KeyboardInterrupt, SystemExit."""
    return error is not None and not isinstance(error, Exception)


def pack(doc: Doc) -> bytes:
    """Encode a document. Raises TypeError if it is none, CheckpointError if it is too long."""
    try:
        data: bytes = msgpack.packb(doc)
    except (ValueError, OverflowError) as error:
        raise TypeError(f"not a plain document: {error}") from error
    if len(data) > MAX_DOCUMENT_NBYTES:
        raise CheckpointError(
            f"what one rank tells the others comes to {len(data)} bytes, the limit is "
            f"{MAX_DOCUMENT_NBYTES}: have fewer tensors, or shorter names"
        )
    return data


def unpack(data: bytes) -> Doc:
    """Decode what `pack` made. ValueError for anything else, and for what costs far more memory."""
    # Nothing costs 200 times its bytes: a short document, as most are, is not walked through.
    if len(data) * 200 > max_memory(0):
        problem = memory_problem(len(data), cost_of(data, max_memory(len(data))))
        if problem is not None:
            raise ValueError(f"a document of which {problem}")
    try:
        return msgpack.unpackb(data, max_ext_len=0)
    except ValueError as error:  # all of msgpack's are; some say nothing
        raise ValueError(f"{len(data)} bytes that are no document") from error


class Alone:
    """The channel of a world of one: `exchange` runs work and decision directly.

    Errors are what they are in a group, but name no rank.
    """

    rank = COORDINATOR
    world_size = 1

    def __init__(self) -> None:
        self.host = socket.gethostname()
        self.exchanges = Tally()

    def enter(self, what: str) -> None:
        """Do nothing: there is nobody to tell."""

    def exchange(
        self, phase: str, work: Callable[[], Doc], decide: Callable[[Sequence[Doc]], Doc]
    ) -> Doc:
        """Return the decision on this one rank's work; see `Channel.exchange`."""
        self.exchanges = self.exchanges.plus(0)
        try:
            return unpack(pack(decide([unpack(pack(work()))])))
        except (CheckpointError, ValueError, TypeError):
            raise
        except Exception as error:  # the outer edge of a rank's work
            raise error_of(decision_failure_of(error, phase=phase)) from error

    def watch(self, ranks: Sequence[int]) -> None:
        """Do nothing: there are no others."""

    def leave(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def check_alike(operation: str, payloads: Sequence[Doc], names: Sequence[str]) -> None:
    """Raise ValueError if ranks ask for different things, naming who asks for what."""
    for name in names:
        asked = defaultdict(list)
        for rank, payload in enumerate(payloads):
            asked[payload[name]].append(rank)
        if len(asked) > 1:
            told = "; ".join(f"{ranks_text(who)}: {what!r}" for what, who in asked.items())
            raise ValueError(
                f"the ranks call {operation} with different {name}: {told}. "
                f"Every rank must pass the same {name}."
            )


_TOKEN = re.compile("[0-9a-f]{16}")

NONCE_NBYTES = 4
NO_NONCE = bytes(NONCE_NBYTES)


def new_nonce() -> bytes:
    """Return random bytes by which a rank knows that an answer is to this envelope of its."""
    return (int.from_bytes(os.urandom(NONCE_NBYTES), "big") | 1).to_bytes(NONCE_NBYTES, "big")


@dataclass(frozen=True, slots=True)
class Envelope:
    """What one rank's part of a phase came to: a packed document, or a failure.

    `what` and `phase` say where in which call the rank is. `operation` is the token of the
    operation, "" until its first answer has told it. `gave_up`: the rank waits for the answer no
    more.
    """

    what: str
    phase: str
    operation: str
    nonce: bytes
    body: bytes
    failure: Failure | None
    gave_up: bool = False

    def encode(self) -> bytes:
        """Return the envelope as bytes."""
        failure = None if self.failure is None else astuple(self.failure)
        place = self.what, self.phase, self.operation
        return _message([*place, self.nonce, self.body, failure, self.gave_up])

    @staticmethod
    def decode(data: bytes) -> Envelope:
        """Return the envelope that `encode` made these bytes of. ValueError for any others."""
        fields = unpack(data)
        kinds = _kinds(fields)
        if kinds[:5] == (str, str, str, bytes, bytes) and kinds[6:] == (bool,):
            what, phase, token, nonce, body, failure, gave_up = fields
            if len(nonce) == NONCE_NBYTES and _is_token(token):
                failure = _decode_failure(failure)
                return Envelope(what, phase, token, nonce, body, failure, gave_up)
        raise ValueError(f"{len(data)} bytes that are no envelope")


@dataclass(frozen=True, slots=True)
class Answer:
    """What was decided: a packed document, or a failure.

    `nonces`, in an operation's first answer, are those of all envelopes that were decided on, in
    rank order; later answers are known by their `operation`, a token that the first one told.
    """

    what: str
    operation: str
    nonces: bytes
    body: bytes
    failure: Failure | None

    def encode(self) -> bytes:
        """Return the answer as bytes."""
        failure = None if self.failure is None else astuple(self.failure)
        return _message([self.what, self.operation, self.nonces, self.body, failure])

    @staticmethod
    def decode(data: bytes) -> Answer:
        """Return the answer that `encode` made these bytes of. ValueError for any others."""
        fields = unpack(data)
        kinds = _kinds(fields)
        if kinds[:4] == (str, str, bytes, bytes) and len(kinds) == 5:
            what, token, nonces, body, failure = fields
            if len(nonces) % NONCE_NBYTES == 0 and _is_token(token):
                return Answer(what, token, nonces, body, _decode_failure(failure))
        raise ValueError(f"{len(data)} bytes that are no answer")

    def is_to(self, rank: int, own: Envelope) -> bool:
        """Say whether this rank's envelope was decided on."""
        if own.operation:
            return own.operation == self.operation
        return self.nonces[rank * NONCE_NBYTES :][:NONCE_NBYTES] == own.nonce


def _message(fields: Sequence[Doc]) -> bytes:
    # Not `pack`: its limit is that of the body, and this is a little more.
    data: bytes = msgpack.packb(fields)
    return data


def _kinds(fields: Doc) -> tuple[type, ...]:
    # By `match` it would take ten times as long: a microsecond for each field.
    return tuple(map(type, fields)) if type(fields) is list else ()


def _is_token(text: str) -> bool:
    """Say whether this can be an operation's token; it becomes part of names in the store."""
    return not text or _TOKEN.fullmatch(text) is not None


def _decode_failure(doc: Doc) -> Failure | None:
    match doc:
        case None:
            return None
        case [str(kind), str(message), rank, str() | None as phase, [*names], bool(fallout)]:
            is_rank = rank is None or type(rank) is int
            if is_rank and kind in _KINDS and {*map(type, names)} <= {str}:
                return Failure(kind, message, rank, phase, tuple(names), fallout)
    raise ValueError("an error of a form or class that this version of dist_ckpt does not know")
