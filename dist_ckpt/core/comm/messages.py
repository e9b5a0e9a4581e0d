"""What ranks tell each other: typed messages as msgpack, and errors on their way between ranks.

A message is a `Message`, which is decoded strictly, field by field; or plain data of a built-in
type. Nothing is looked up by a name out of a message but the class of an error, in a table.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, TypeVar

from msgspec import Meta
from msgspec.structs import replace

from dist_ckpt import errors
from dist_ckpt.core.format.objects.plain_types import cost_of
from dist_ckpt.core.format.strict_json import max_memory, memory_problem
from dist_ckpt.core.runtime import typed_msgpack
from dist_ckpt.core.runtime.typed_msgpack import Message
from dist_ckpt.errors import CheckpointError, CorruptError, RankError, ranks_text

T = TypeVar("T")

MAX_MESSAGE_CHARS = 1 << 16
# What is more goes over the bulk connections; this bounds what a store can make a rank take.
MAX_DOCUMENT_NBYTES = 32 << 20


class NoAnswerError(RankError):
    """This rank does not know what was decided: the coordinator, or the store, went silent."""


class SecondaryError(RankError):
    """An error that another rank's error or death has brought about, such as a broken connection.

    Of several errors, one that is no fallout is told first.
    """


class Failure(Message, frozen=True):
    """An error on its way between ranks; `kind` is the name of the class to raise.

    `fallout`: it is only the consequence of another one.
    """

    kind: str
    message: str
    rank: int | None
    phase: str | None
    touched: tuple[str, ...] = ()
    fallout: bool = False

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ValueError("an error of a class that this version of dist_ckpt does not know")


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


def failure_of(
    error: BaseException, phase: str, rank: int | None = None, host: str = ""
) -> Failure:
    """Describe an error that work raised on a rank, with rank and host in its message.

    What a decision raised is about all ranks: without a rank it names no place.
    """
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
        touched=error.touched if isinstance(error, CorruptError) else (),
        fallout=isinstance(error, SecondaryError),
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


def pack(message: object) -> bytes:
    """Encode a message. Raises TypeError if it is none, CheckpointError if it is too long."""
    data = typed_msgpack.encode(message)
    if len(data) > MAX_DOCUMENT_NBYTES:
        raise CheckpointError(
            f"what one rank tells the others comes to {len(data)} bytes, the limit is "
            f"{MAX_DOCUMENT_NBYTES}: have fewer tensors, or shorter names"
        )
    return data


def unpack(data: bytes, expected: type[T]) -> T:
    """Decode what `pack` made. ValueError for anything else, and for what costs far more memory."""
    # Nothing costs 200 times its bytes: a short message, as most are, is not walked through.
    if len(data) * 200 > max_memory(0):
        problem = memory_problem(len(data), cost_of(data, max_memory(len(data))))
        if problem is not None:
            raise ValueError(f"a message of which {problem}")
    return typed_msgpack.decode(data, expected)


NONCE_NBYTES = 4
NO_NONCE = bytes(NONCE_NBYTES)


def new_nonce() -> bytes:
    """Return random bytes by which a rank knows that an answer is to this envelope of its."""
    return (int.from_bytes(os.urandom(NONCE_NBYTES), "big") | 1).to_bytes(NONCE_NBYTES, "big")


_Nonce = Annotated[bytes, Meta(min_length=NONCE_NBYTES, max_length=NONCE_NBYTES)]
# It becomes part of names in the store.
_Token = Annotated[str, Meta(pattern=r"\A([0-9a-f]{16})?\Z")]


# An envelope and an answer are encoded without `pack`: its limit is that of the body.


class Envelope(Message, frozen=True):
    """What one rank's part of a phase came to: a packed message, or a failure.

    `what` and `phase` say where in which call the rank is. `operation` is the token of the
    operation, "" until its first answer has told it. `gave_up`: the rank waits for the answer no
    more.
    """

    what: str
    phase: str
    operation: _Token
    nonce: _Nonce
    body: bytes
    failure: Failure | None
    gave_up: bool = False


class Answer(Message, frozen=True):
    """What was decided: a packed message, or a failure.

    `nonces`, in an operation's first answer, are those of all envelopes that were decided on, in
    rank order; later answers are known by their `operation`, a token that the first one told.
    """

    what: str
    operation: _Token
    nonces: bytes
    body: bytes
    failure: Failure | None

    def __post_init__(self) -> None:
        if len(self.nonces) % NONCE_NBYTES:
            raise ValueError("nonces of another size")

    def is_to(self, rank: int, own: Envelope) -> bool:
        """Say whether this rank's envelope was decided on."""
        if own.operation:
            return own.operation == self.operation
        return self.nonces[rank * NONCE_NBYTES :][:NONCE_NBYTES] == own.nonce
