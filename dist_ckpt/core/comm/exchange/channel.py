"""The control channel: one operation, `exchange`, that spreads any rank's error to all.

An operation of the group (a save, a load) is a sequence of exchanges. In each, every rank puts an
envelope, what its part of the work came to; the coordinator, rank 0, decides and puts one answer,
and all ranks have it or raise the same error.
"""

from __future__ import annotations

import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self, TypeVar

from dist_ckpt.core.comm.collectives.collective import distinct
from dist_ckpt.core.comm.messages import (
    error_of,
    failure_of,
    is_interrupt,
    pack,
    unpack,
)
from dist_ckpt.core.runtime.typed_msgpack import Message
from dist_ckpt.errors import CheckpointError, ranks_text
from dist_ckpt.reports import IoCount

T = TypeVar("T")

COORDINATOR = 0


class Exchange(ABC):
    """One exchange, as one rank sees it: a block in which it does its part.

        with channel.exchange("count") as counting:
            gathered = counting.gather(len(mine))
            if gathered is not None:  # the coordinator
                counting.decide(sum(gathered))
        total = counting.result(int)

    Before `gather` a rank does its part of the work. The rest of the block is the coordinator's. A
    decision is final: a later error stays local. `gather` and `decide` are optional.
    """

    def __init__(self, phase: str) -> None:
        self.phase = phase
        self._own: bytes | None = None
        self._decided: bytes | Exception | None = None
        self._answer = b""

    @property
    @abstractmethod
    def is_coordinator(self) -> bool:
        """Whether this rank decides."""

    def gather(self, own: T) -> Sequence[T] | None:
        """Send this rank's result: a `Message` or plain data, of one class on all ranks.

        Returns the results of all ranks in rank order on the coordinator, and None on all others.
        Those send theirs at the end of the block.
        """
        self._own = pack(own)
        if not self.is_coordinator:
            return None
        return [self._unpack(rank, data, type(own)) for rank, data in enumerate(self._gathered())]

    def decide(self, answer: object) -> None:
        """Answer all ranks. Coordinator only, after all that might fail."""
        self._decided = pack(answer)

    def refuse(self, error: Exception) -> None:
        """Have all ranks raise an error, as if it was raised here. Coordinator only."""
        self._decided = error

    @property
    def nbytes_told(self) -> int:
        """The size of what this rank has told."""
        return len(self._own or b"")

    def result(self, expected: type[T]) -> T:
        """Return what was decided, after the block: a message of this class."""
        return self._unpack(COORDINATOR, self._answer, expected)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end(error)

    @abstractmethod
    def _end(self, error: BaseException | None) -> None:
        """Tell what the block has raised, take the answer, and raise what any rank has raised."""

    @abstractmethod
    def _gathered(self) -> Sequence[bytes]:
        """Return the results of all ranks. Coordinator only."""

    @abstractmethod
    def _unpack(self, rank: int, data: bytes, expected: type[T]) -> T:
        """Decode a message of a rank. RankError if it is none of this class."""


class SharedNotes(Protocol):
    """Short texts that ranks leave for each other outside any exchange, each under a key.

    Nobody waits for who reads them; what is put once never changes. Threads may share it.
    NoAnswerError if the store does not answer.
    """

    def put(self, key: str, text: str) -> None:
        """Leave a note."""

    def put_once(self, key: str, text: str) -> str:
        """Leave a note unless there is one; return the one that is there."""

    def read(self, keys: Sequence[str]) -> list[str] | None:
        """Return the notes under these keys, or None if one is not there yet."""

    def remove(self, keys: Sequence[str]) -> None:
        """Remove notes that nobody reads any more. Waits for nothing."""


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
    def exchanges(self) -> IoCount:
        """The exchanges so far, and the bytes that this rank has put into them.

        They are its envelopes; the coordinator's are its answers. Heartbeats do not count.
        """

    @property
    def notes(self) -> SharedNotes:
        """What the ranks tell each other outside operations. Not before the first operation."""

    def enter(self, what: str) -> None:
        """Begin the group's next operation; `what` says which one ("save to /ck/step-5").

        `what` is the same on all ranks: by it a rank that comes late tells the call that the
        others gave up from a newer one. Every `enter` is followed by `leave`.
        """

    def exchange(self, phase: str) -> Exchange:
        """Return the operation's next exchange, a block to be entered at once. Collective.

        Whatever any rank raises in its block, all ranks raise at its end: our errors, ValueError
        and TypeError as the same class, with rank and host in the message; others as RankError; on
        the rank where it happened, from the original. An interrupt (KeyboardInterrupt, SystemExit)
        is raised as it is where it happened. An error is told when the coordinator has seen it and
        ended its own work (in an operation's first exchange, when all have); who still works finds
        the answer afterwards, whatever its own work came to. The coordinator raises it when the
        others that live know of it, or after a while. Raises RankError if a rank dies, has left
        the operation, never enters it, or is in another one or another phase of it; NoAnswerError
        if this rank cannot know the decision.
        """

    def watch(self, ranks: Sequence[int]) -> None:
        """Raise SecondaryError if nothing more will come from one of these ranks in the operation.

        For who waits for them otherwise than in an exchange, within its work: call it about once
        a second. The rank is dead, frozen or has left, or its own work has failed; one that is
        only slow is not lost.
        """

    def expect_nobody(self, why: str) -> None:
        """Have this rank's operation fail if it waits for ranks that have not entered it.

        Another thread calls it, which knows that they will not; `why` says how.
        """

    def leave(self) -> None:
        """End the operation, also after an error: who still waits for this rank is told."""

    def close(self) -> None:
        """Stop the heartbeat. The channel is of no use afterwards."""


class SingleProcessNotes:
    """The notes of a world of one."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._lock = threading.Lock()

    def put(self, key: str, text: str) -> None:
        """See `SharedNotes.put`."""
        with self._lock:
            self._texts[key] = text

    def put_once(self, key: str, text: str) -> str:
        """See `SharedNotes.put_once`."""
        with self._lock:
            return self._texts.setdefault(key, text)

    def read(self, keys: Sequence[str]) -> list[str] | None:
        """See `SharedNotes.read`."""
        with self._lock:
            found = [self._texts.get(key) for key in keys]
        return None if None in found else [text for text in found if text is not None]

    def remove(self, keys: Sequence[str]) -> None:
        """See `SharedNotes.remove`."""
        with self._lock:
            for key in keys:
                self._texts.pop(key, None)


class SingleProcessChannel:
    """The channel of a world of one. Errors are what they are in a group, but name no rank."""

    rank = COORDINATOR
    world_size = 1

    def __init__(self) -> None:
        self.host = socket.gethostname()
        self.exchanges = IoCount()
        self.notes: SharedNotes = SingleProcessNotes()

    def enter(self, what: str) -> None:
        """Do nothing: there is nobody to tell."""

    def exchange(self, phase: str) -> Exchange:
        """See `Channel.exchange`."""
        self.exchanges = self.exchanges.plus(0)
        return SingleProcessExchange(phase)

    def watch(self, ranks: Sequence[int]) -> None:
        """Do nothing: there are no others."""

    def expect_nobody(self, why: str) -> None:
        """Do nothing: there are no others."""

    def leave(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class SingleProcessExchange(Exchange):
    """An exchange with oneself."""

    is_coordinator = True

    def _gathered(self) -> Sequence[bytes]:
        assert self._own is not None
        return [self._own]

    def _unpack(self, rank: int, data: bytes, expected: type[T]) -> T:
        return unpack(data, expected)

    def _end(self, error: BaseException | None) -> None:
        if is_interrupt(error):
            return
        if isinstance(self._decided, Exception):
            raise self._decided from error
        self._answer = self._decided or pack(None)
        is_foreign = not isinstance(error, CheckpointError | ValueError | TypeError)
        if error is not None and is_foreign and self._decided is None:
            raise error_of(failure_of(error, self.phase)) from error


def check_equal_on_all_ranks(operation: str, told: Sequence[Message], names: Sequence[str]) -> None:
    """Raise ValueError if ranks ask for different things, naming who asks for what."""
    for name in names:
        asked = distinct(getattr(one, name) for one in told)
        if len(asked) > 1:
            asks = "; ".join(f"{ranks_text(who)}: {what!r}" for what, who in asked.items())
            raise ValueError(
                f"the ranks call {operation} with different {name}: {asks}. "
                f"Every rank must pass the same {name}."
            )
