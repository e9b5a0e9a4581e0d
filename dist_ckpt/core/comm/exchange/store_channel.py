"""The control channel of a group over a key-value store that all its ranks reach."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import TypeVar

from dist_ckpt.config import Config
from dist_ckpt.core.comm.exchange.channel import COORDINATOR, Exchange, SharedNotes
from dist_ckpt.core.comm.exchange.exchange_state import ExchangeState
from dist_ckpt.core.comm.exchange.roles import Coordinator, FailedError, Participant
from dist_ckpt.core.comm.key_value import client_thread
from dist_ckpt.core.comm.key_value.client_thread import (
    JOB_STORE_TEXTS,
    Store,
    StoreClientThread,
    StoreErrorTexts,
)
from dist_ckpt.core.comm.messages import (
    Answer,
    Envelope,
    Failure,
    NoAnswerError,
    SecondaryError,
    error_of,
    failure_of,
    is_interrupt,
    new_nonce,
    pack,
    unpack,
    with_touched,
)
from dist_ckpt.reports import IoCount

T = TypeVar("T")

# How long the coordinator's process puts off its end for the sake of the others.
LINGER_S = 2.0


class StoreChannel:
    """A `Channel` over a store. Its one thread starts with the first `enter`."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        host: str,
        config: Config,
        wording: StoreErrorTexts = JOB_STORE_TEXTS,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.host = host
        self._num_exchanges = 0
        self._control = control = ExchangeState(store, rank, world_size, host, config, wording)
        self.notes: SharedNotes = StoreNotes(control.line)
        self._role = Coordinator(control) if rank == COORDINATOR else Participant(control)
        # Also at the end of the process: others that wait for this rank then know at once.
        self._finalizer = weakref.finalize(self, _close, control)

    @property
    def token(self) -> str:
        """A name that only the operation which is going on has; "" until its first answer."""
        return self._control.token

    @property
    def exchanges(self) -> IoCount:
        """See `Channel.exchanges`."""
        return IoCount(self._num_exchanges, self._control.nbytes_put)

    def enter(self, what: str) -> None:
        """See `Channel.enter`. Raises ValueError while another operation is going on."""
        control = self._control
        if control.heart.inside:
            raise ValueError(
                f"{what} is called while {control.what} of the same group is going on in this "
                "process: call one after the other"
            )
        control.what, control.token, control.turn = what, "", 0
        control.absent = ""
        try:
            control.begin(control.number + 1)
        except BaseException:  # an interrupt, or the store is gone: the next operation can begin
            with suppress(NoAnswerError):  # it tells less than what came first
                self.leave()
            raise

    def watch(self, ranks: Sequence[int]) -> None:
        """See `Channel.watch`."""
        control = self._control
        control.peers.look(ranks)
        for failure in control.failed_ranks(ranks).values():
            raise SecondaryError(failure.message, rank=failure.rank)
        # The coordinator tells of its own failure in the answer.
        keys = [control.key("answer" if rank == COORDINATOR else rank) for rank in ranks]
        for rank, data in zip(ranks, control.line.call(client_thread.get_each, keys), strict=True):
            if data is not None and _tells_failure(rank, data):
                raise SecondaryError(f"{control.peers.name([rank])} has failed", rank=rank)

    def hurry(self, unseen_s: float) -> None:
        """Wait only so long for ranks that were never seen; another thread may call it.

        Those that were seen may still be at the operation before: for them there is
        `join_timeout_s`.
        """
        self._control.unseen_s = min(unseen_s, self._control.config.join_timeout_s)

    def expect_nobody(self, why: str) -> None:
        """See `Channel.expect_nobody`."""
        self._control.absent = why

    def linger(self, most_s: float) -> None:
        """Put off the end of the coordinator until the others know the last answer.

        At most for so long. `close` does so too, but briefly.
        """
        self._control.linger(most_s)

    def leave(self) -> None:
        """See `Channel.leave`."""
        self._control.heart.inside = False
        self._control.line.beat()
        self._role.clean_up()

    def close(self) -> None:
        """See `Channel.close`."""
        self._finalizer()

    def exchange(self, phase: str) -> Exchange:
        """See `Channel.exchange`."""
        control = self._control
        assert control.heart.inside, "exchange is called between enter and leave"
        self._num_exchanges += 1
        control.phase = phase
        control.turn += 1
        return _StoreExchange(phase, control, self._role)


class _StoreExchange(Exchange):
    def __init__(self, phase: str, control: ExchangeState, role: Coordinator | Participant) -> None:
        super().__init__(phase)
        self._control = control
        self._role = role

    def _gathered(self) -> Sequence[bytes]:
        return self._role.gather(self._envelope(None))

    def _envelope(self, failure: Failure | None) -> Envelope:
        control, body = self._control, b"" if failure else self._own or pack(None)
        return Envelope(control.what, self.phase, control.token, new_nonce(), body, failure)

    def _end(self, error: BaseException | None) -> None:
        control, failure = self._control, None
        if error is not None and not isinstance(error, FailedError):
            failure = failure_of(error, self.phase, control.rank, control.host)
        own, is_gathered = self._envelope(failure), self._own is not None
        try:
            answer = self._role.settle(own, error, self._decided, is_gathered=is_gathered)
        except Exception:
            if is_interrupt(error):
                return
            raise
        self._answer = answer.body
        if answer.failure is None or is_interrupt(error):
            return
        self._role.ensure_failure_is_known()
        # Of what this rank has touched the answer knows nothing if it was given before.
        told = answer.failure if failure is None else with_touched(answer.failure, [failure])
        raise error_of(told) from (None if isinstance(error, FailedError) else error)

    def _unpack(self, rank: int, data: bytes, expected: type[T]) -> T:
        return self._control.unpack(rank, data, expected)


def _tells_failure(rank: int, data: bytes) -> bool:
    kind: type[Answer | Envelope] = Answer if rank == COORDINATOR else Envelope
    try:
        return unpack(data, kind).failure is not None
    except ValueError:  # the coordinator tells what is strange
        return True


def _close(control: ExchangeState) -> None:
    if control.line.is_open and not control.heart.inside:
        control.linger(LINGER_S)
    control.line.close()


class StoreNotes:
    """Notes in a store that all ranks reach, through the thread that this rank talks to it with."""

    def __init__(self, line: StoreClientThread) -> None:
        self._line = line

    def put(self, key: str, text: str) -> None:
        """See `SharedNotes.put`."""
        self._line.call(client_thread.put, _note(key), text.encode())

    def put_once(self, key: str, text: str) -> str:
        """See `SharedNotes.put_once`."""
        return _text(self._line.call(client_thread.put_once, _note(key), text))

    def read(self, keys: Sequence[str]) -> list[str] | None:
        """See `SharedNotes.read`."""
        found = self._line.call(client_thread.get_all, [_note(key) for key in keys])
        return None if found is None else [_text(data) for data in found]

    def remove(self, keys: Sequence[str]) -> None:
        """See `SharedNotes.remove`."""
        self._line.post(client_thread.delete, [_note(key) for key in keys])


def _note(key: str) -> str:
    return f"notes/{key}"


def _text(data: bytes) -> str:
    # What is no text was put by none of ours: who reads it finds that it says nothing of ours.
    return data.decode(errors="replace")
