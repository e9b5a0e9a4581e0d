"""The control channel: one operation, `exchange`, that spreads any rank's error to all.

An operation of the group (a save, a load) is a sequence of exchanges. In each, every rank sends an
envelope with the result of its work. The coordinator, rank 0, decides and sends one answer. All
ranks get it, or raise the same error.

`SingleProcessChannel` is for a process without other ranks.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, Self, TypeVar

from dist_ckpt.core.comm.collectives.collective import ranks_by_value
from dist_ckpt.core.comm.rank_messages import (
    build_error,
    describe_error,
    is_interrupt,
    pack,
    unpack,
)
from dist_ckpt.core.runtime.typed_msgpack import Message
from dist_ckpt.errors import CheckpointError
from dist_ckpt.message_text import ranks_text
from dist_ckpt.reports import IoCount

T = TypeVar("T")

COORDINATOR = 0

# An exchange carries at most this much from all ranks together, or to all of them. More data goes
# by a bulk collective, whose cost does not grow with the ranks.
MAX_EXCHANGE_NBYTES = 4 << 20


class Exchange(ABC):
    """One exchange from the view of one rank: a block in which the rank does its part.

        with channel.exchange("count") as counting:
            gathered = counting.gather(len(mine))
            if gathered is not None:  # the coordinator
                counting.decide(sum(gathered))
        total = counting.result(int)

    A rank does its part of the work before `gather`; the rest of the block is for the coordinator.
    After `decide`, an error of rank 0 is not sent. `gather` and `decide` are optional.
    """

    is_coordinator: bool

    def __init__(self, phase: str) -> None:
        self.phase = phase
        self._own: bytes | None = None
        self._decided: bytes | Exception | None = None
        self._answer = b""

    def gather(self, own: T) -> Sequence[T] | None:
        """Send this rank's result: a `Message` or plain data, of one class on all ranks.

        Return the results of all ranks in rank order on the coordinator. Return None on the others,
        which send their results at the end of the block.
        """
        self._own = pack(own)
        if not self.is_coordinator:
            return None
        return [self._unpack(rank, data, type(own)) for rank, data in enumerate(self._gathered())]

    def decide(self, answer: object) -> None:
        """Answer all ranks. Coordinator only, after everything that might fail."""
        self._decided = pack(answer)

    def refuse(self, error: Exception) -> None:
        """Raise an error on all ranks, as if it was raised here. Coordinator only."""
        self._decided = error

    @property
    def nbytes_sent(self) -> int:
        """Return the size of this rank's message."""
        return len(self._own or b"")

    def result(self, expected: type[T]) -> T:
        """Return the decision, after the block: a message of this class."""
        return self._unpack(COORDINATOR, self._answer, expected)

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Send the error of the block, wait for the answer, and raise the error of any rank."""

    @abstractmethod
    def _gathered(self) -> Sequence[bytes]:
        """Return the results of all ranks. Coordinator only."""

    @abstractmethod
    def _unpack(self, rank: int, data: bytes, expected: type[T]) -> T:
        """Decode a message of a rank. RankError if it is not of this class."""


class SharedNotes(Protocol):
    """Short texts that ranks exchange outside operations, each under a key.

    No call waits for another rank. Threads may share it. NoAnswerError if the store does not
    answer.
    """

    def put(self, key: str, text: str) -> None:
        """Write a note."""

    def put_once(self, key: str, text: str) -> str:
        """Write a note unless the key has one; return the note, which never changes."""

    def read(self, keys: Sequence[str]) -> list[str] | None:
        """Return the notes under these keys, or None if one is missing."""

    def remove(self, keys: Sequence[str]) -> None:
        """Remove notes that are not read any more. Waits for nothing."""


class Channel(Protocol):
    """A group's control channel. One thread of a rank uses it at a time.

    `rank` and `world_size` count within the group; `host` is the name of this rank's host. `notes`
    cannot be used before the first operation.
    """

    rank: int
    world_size: int
    host: str
    notes: SharedNotes

    @property
    def exchanges(self) -> IoCount:
        """The exchanges so far, and this rank's bytes in them, without heartbeats."""

    def enter(self, call: str) -> None:
        """Begin the group's next operation; `call` describes it ("save to /ck/step-5").

        `call` must be equal on all ranks. With it a late rank detects that the other ranks have
        given up its call. Call `leave` after each `enter`, also after an error.
        """

    def exchange(self, phase: str) -> Exchange:
        """Return the operation's next exchange, a block that is entered immediately. Collective.

        An error in the block of any rank is raised by all ranks at its end. Errors of dist_ckpt,
        ValueError and TypeError keep their class, with rank and host in the message; others become
        RankError. On the rank where it happened, its cause is the original error. An interrupt
        (KeyboardInterrupt, SystemExit) is raised unchanged where it happened.

        The coordinator sends an error to all ranks:

        | Exchange | It waits until | A slow rank raises the error |
        | --- | --- | --- |
        | first of an operation | all ranks have ended their blocks | with all others |
        | later | its own block has ended | at the end of its block, even if its block succeeded |

        The coordinator raises the error when the other live ranks have received the error, or after
        half of `heartbeat_timeout_s`.

        Raises RankError if a rank dies, never enters the operation, or has left it. Raises
        RankError also if a rank is in another operation, or in another phase of this operation.
        Raises NoAnswerError if this rank cannot get the decision.
        """

    def watch(self, ranks: Sequence[int]) -> None:
        """Raise SecondaryError if a rank is dead, frozen, gone or failed, but not if it is slow.

        Call it about once a second in work that waits for other ranks outside an exchange.
        """

    def fail_without_others(self, why: str) -> None:
        """End this rank's wait for ranks that have not entered the operation, with an error.

        Another thread calls this when these ranks will never enter; `why` is the reason.
        """

    def leave(self) -> None:
        """End the operation, also after an error: ranks that wait for this one are notified."""

    def close(self) -> None:
        """Stop the heartbeat. The channel cannot be used afterwards."""


def fits_exchange(nbytes: int, world_size: int) -> bool:
    """Return True if an exchange may carry this much data from each rank, or to each rank."""
    return nbytes * world_size <= MAX_EXCHANGE_NBYTES


def check_equal_on_all_ranks(
    operation: str, requests: Sequence[Message], names: Sequence[str] = ()
) -> None:
    """Raise ValueError with the ranks and their values if ranks pass different arguments.

    `names` are the fields to compare, by default all.
    """
    for name in names or requests[0].__struct_fields__:
        values = ranks_by_value(getattr(request, name) for request in requests)
        if len(values) > 1:
            differing = "; ".join(f"{ranks_text(of)}: {value!r}" for value, of in values.items())
            raise ValueError(
                f"the ranks call {operation} with different {name}: {differing}. "
                f"Every rank must pass the same {name}."
            )


class _SingleProcessNotes:
    """The notes of a single process. Threads may share it: each change is one call of a dict."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def put(self, key: str, text: str) -> None:
        self._texts[key] = text

    def put_once(self, key: str, text: str) -> str:
        return self._texts.setdefault(key, text)

    def read(self, keys: Sequence[str]) -> list[str] | None:
        texts = [self._texts.get(key) for key in keys]
        return None if None in texts else [text for text in texts if text is not None]

    def remove(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._texts.pop(key, None)


class SingleProcessChannel:
    """The `Channel` of a single process. Errors are as in a group, but name no rank."""

    rank = COORDINATOR
    world_size = 1

    def __init__(self) -> None:
        self.host = socket.gethostname()
        self.exchanges = IoCount()
        self.notes: SharedNotes = _SingleProcessNotes()

    def enter(self, call: str) -> None:
        """Do nothing: no other rank waits."""

    def exchange(self, phase: str) -> Exchange:
        """See `Channel.exchange`."""
        self.exchanges = self.exchanges.plus(0)
        return SingleProcessExchange(phase)

    def watch(self, ranks: Sequence[int]) -> None:
        """Do nothing."""

    def fail_without_others(self, why: str) -> None:
        """Do nothing."""

    def leave(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class SingleProcessExchange(Exchange):
    """An exchange of a single process with itself."""

    is_coordinator = True

    def _gathered(self) -> Sequence[bytes]:
        assert self._own is not None
        return [self._own]

    def _unpack(self, rank: int, data: bytes, expected: type[T]) -> T:
        return unpack(data, expected)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if is_interrupt(error):
            return
        if isinstance(self._decided, Exception):
            raise self._decided from error
        self._answer = self._decided or pack(None)
        is_foreign = not isinstance(error, CheckpointError | ValueError | TypeError)
        if error is not None and is_foreign and self._decided is None:
            raise build_error(describe_error(error, self.phase)) from error
