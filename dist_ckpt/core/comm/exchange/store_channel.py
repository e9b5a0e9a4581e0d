"""A group's control channel over a key-value store: the coordinator and the participants."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from msgspec.structs import replace

from dist_ckpt.core.comm.exchange.channel import COORDINATOR, Exchange, SharedNotes
from dist_ckpt.core.comm.exchange.exchange_state import STALE, ExchangeState
from dist_ckpt.core.comm.exchange.failure_detector import PollInterval
from dist_ckpt.core.comm.key_value import client_thread
from dist_ckpt.core.comm.rank_messages import (
    NO_NONCE,
    Answer,
    Envelope,
    Failure,
    NoAnswerError,
    RankLocation,
    SecondaryError,
    add_touched,
    build_error,
    combine_failures,
    describe_error,
    is_interrupt,
    new_nonce,
    pack,
    unpack,
)
from dist_ckpt.core.runtime.typed_msgpack import encode
from dist_ckpt.errors import CheckpointError, RankError
from dist_ckpt.reports import IoCount
from dist_ckpt.settings import Settings

T = TypeVar("T")

# How long the coordinator's process delays its end for the other ranks.
LINGER_S = 2.0

# Answers to operations that some rank missed are kept for it, up to this number.
MAX_KEPT_ANSWERS = 64


class FailedError(Exception):
    """The failure of some rank: it ends the coordinator's block, and becomes the answer."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Coordinator:
    """Rank 0's side: wait for all envelopes, decide, write one answer."""

    def __init__(self, state: ExchangeState) -> None:
        self._state = state
        self._answers: list[str] = []
        self._nonces = b""

    def gather(self, own: Envelope) -> list[bytes]:
        """Return the results of all ranks. FailedError if some rank has failed, or is lost."""
        envelopes, failures = self._collect(own)
        if failures:
            raise FailedError(combine_failures(failures))
        return [envelopes[rank].body for rank in range(self._state.world_size)]

    def finish_exchange(
        self,
        own: Envelope,
        error: BaseException | None,
        decided: bytes | Exception | None,
        *,
        is_gathered: bool,
    ) -> Answer:
        """Store the answer and return it, also if an interrupt arrives meanwhile.

        The answer is the decision, or the error of the block. Envelopes that are not gathered yet
        are gathered first: their failures become part of the answer.
        """
        if is_gathered and isinstance(error, NoAnswerError):
            raise error  # no rank can be reached
        try:
            if not is_gathered:
                error = None  # it is in this rank's envelope
                self.gather(own)
            answer = self._put(self._build_answer(error if decided is None else decided))
        except NoAnswerError:
            raise
        except BaseException as raised:
            # A decision is final, whatever interrupts sending it.
            answer = self._put(
                self._build_answer((error or raised) if decided is None else decided)
            )
            if is_interrupt(raised):
                raise
        return answer

    def ensure_failure_is_known(self) -> None:
        """Wait until the live ranks have the failure: the store may end with this process.

        At most for half the heartbeat timeout: other ranks may be at long work.
        """
        self._state.linger(self._state.settings.heartbeat_timeout_s / 2)

    def clean_up(self) -> None:
        """Do nothing: other ranks may still read the answers of the operation that ends."""

    def _build_answer(self, result: bytes | BaseException | None) -> Answer:
        state, failure = self._state, None
        if isinstance(result, FailedError):
            failure = result.failure
        elif isinstance(result, CheckpointError | ValueError | TypeError):
            failure = describe_error(result, state.phase)
        elif isinstance(result, BaseException):
            failure = describe_error(result, state.phase, state.rank, state.host)
        body = b"" if isinstance(result, BaseException) else result or pack(None)
        return Answer(state.call, state.token, self._nonces, body, failure)

    def _put(self, answer: Answer) -> Answer:
        key = self._state.key("answer")
        self._state.put(key, encode(answer))
        self._answers.append(key)
        return answer

    def _collect(self, own: Envelope) -> tuple[dict[int, Envelope], dict[int, Failure]]:
        """Return the envelopes and failures by rank; all envelopes if no rank has failed."""
        state = self._state
        self._nonces = b""
        envelopes, failures = self._wait_for_envelopes(own)
        if not own.operation:
            while (late_answer := self._answer_to_abandoned_call(envelopes)) is not None:
                self._put(late_answer)
                state.enter_operation(state.operation_number + 1)
                envelopes, failures = self._wait_for_envelopes(own)
            state.token = os.urandom(8).hex()
            self._nonces = b"".join(
                envelopes[rank].nonce if rank in envelopes else NO_NONCE
                for rank in range(state.world_size)
            )
            num_retained = 0 if len(envelopes) == state.world_size else MAX_KEPT_ANSWERS
            num_spent = max(0, len(self._answers) - num_retained)
            spent, self._answers = self._answers[:num_spent], self._answers[num_spent:]
            state.client.post(client_thread.delete, spent)
        for rank, envelope in envelopes.items():
            if envelope.failure is not None:
                failures[rank] = envelope.failure
            elif envelope.operation != own.operation:
                failures[rank] = Failure("ConflictError", STALE, rank, state.phase)
        # Mismatched calls come first: other failures may follow from them.
        calls = {
            rank: (envelope.call, envelope.phase)
            for rank, envelope in envelopes.items()
            if envelope.operation == own.operation
        }
        return envelopes, state.mismatched_calls(calls) or failures

    def _wait_for_envelopes(self, own: Envelope) -> tuple[dict[int, Envelope], dict[int, Failure]]:
        """Wait until all envelopes have arrived, one has an error, or a rank is lost."""
        state = self._state
        envelopes = {COORDINATOR: own}
        failures: dict[int, Failure] = {}
        poll = PollInterval(state.world_size, state.settings)
        while len(envelopes) < state.world_size and not failures:
            missing = [rank for rank in range(state.world_size) if rank not in envelopes]
            keys = [state.key(rank) for rank in missing]
            if (values := state.client.call(client_thread.get_all, keys)) is not None:
                arrivals = zip(missing, values, strict=True)
                envelopes.update(
                    (rank, self._decode_envelope(own, rank, data)) for rank, data in arrivals
                )
                break
            if _has_final_failure(envelopes) or poll.is_look_due():
                # Heartbeats first: if one says that a rank has left, its envelope is complete.
                state.detector.read_heartbeats(missing)
                looked = state.client.call(client_thread.get_each, keys)
                for rank, data in zip(missing, looked, strict=True):
                    if data is not None:
                        envelopes[rank] = self._decode_envelope(own, rank, data)
                if _has_final_failure(envelopes):
                    break
                missing = [rank for rank in missing if rank not in envelopes]
                failures = (
                    state.failed_ranks(missing)
                    or _mismatch(state, envelopes, poll)
                    or state.missing_ranks(missing, poll)
                )
            poll.pause()
        return envelopes, failures

    def _decode_envelope(self, own: Envelope, rank: int, data: bytes) -> Envelope:
        try:
            return self._state.unpack(rank, data, Envelope)
        except RankError as error:
            return replace(own, nonce=NO_NONCE, body=b"", failure=describe_error(error, own.phase))

    def _answer_to_abandoned_call(self, envelopes: Mapping[int, Envelope]) -> Answer | None:
        """Return the answer to an earlier call, which other ranks gave up without this rank.

        These ranks have counted one operation more than this rank. None if there is no such call,
        or if it is this rank's current call, which it has entered late.
        """
        state = self._state
        given_up = [rank for rank, envelope in envelopes.items() if envelope.gave_up]
        if not given_up:
            return None
        earlier = envelopes[given_up[0]]
        if (
            earlier.call == state.call
            and state.detector.find_newer_operation(given_up, state.operation_number) is None
        ):
            return None
        return Answer(earlier.call, "", b"", b"", earlier.failure)


# A participant compares its call with those of this many ranks: all of them read one store.
MAX_COMPARED = 64


def _mismatch(
    state: ExchangeState, envelopes: Mapping[int, Envelope], poll: PollInterval
) -> dict[int, Failure]:
    """Return a failure if ranks are in different calls, while all wait for a late rank.

    They would only learn it when the late rank comes. Calls that were given up do not count.
    """
    calls = {rank: (env.call, env.phase) for rank, env in envelopes.items() if not env.gave_up}
    if state.token or len(calls) < len(envelopes) or not poll.is_compare_due():
        return {}
    return state.mismatched_calls(calls, has_all=False)


def _has_final_failure(envelopes: Mapping[int, Envelope]) -> bool:
    """Return True if all ranks can get an error now, also while some still work.

    False in an operation's first exchange: a rank matches the first answer by the nonce of its
    envelope, so a rank whose envelope is missing could not. False for a secondary error: its cause
    will still arrive.
    """
    return any(
        envelope.operation and envelope.failure is not None and not envelope.failure.is_secondary
        for envelope in envelopes.values()
    )


class Participant:
    """The side of every other rank: write an envelope, wait for the answer."""

    def __init__(self, state: ExchangeState) -> None:
        self._state = state
        self._envelopes: list[str] = []
        self._is_answered = False

    def finish_exchange(
        self,
        own: Envelope,
        error: BaseException | None,
        decided: bytes | Exception | None,
        *,
        is_gathered: bool,
    ) -> Answer:
        """Return the coordinator's answer in the operation that the group is in."""
        state = self._state
        while True:
            answer = self._request_answer(own)
            number = state.operation_number
            if answer.is_answer_to(state.rank, own):
                state.token = answer.operation
                return answer
            if answer.failure is None or own.operation:
                raise NoAnswerError(STALE, rank=state.rank, phase=state.phase)
            # The others gave up an operation without this rank. Was it this call?
            if answer.call != state.call:
                state.enter_operation(number + 1)
            elif (newer := state.detector.find_newer_operation([COORDINATOR], number)) is not None:
                state.enter_operation(newer)
            else:
                state.skip_missed_operations()
                return answer

    def clean_up(self) -> None:
        """Delete this rank's envelopes; without an answer the coordinator may still read them."""
        act = client_thread.delete if self._is_answered else client_thread.withdraw
        self._state.client.post(act, tuple(self._envelopes))
        if self._is_answered:
            self._envelopes = []

    def ensure_failure_is_known(self) -> None:
        """Notify the coordinator, which waits for this, that this rank has received a failure."""
        self._state.heartbeat.failed_turn = self._state.exchange_number
        self._state.client.send_heartbeat()

    def _request_answer(self, own: Envelope) -> Answer:
        """Write the envelope; wait for the answer, or until it can never come."""
        state = self._state
        envelope_key, answer_key = state.key(state.rank), state.key("answer")
        self._envelopes.append(envelope_key)
        self._is_answered = False
        state.put(envelope_key, encode(own))
        poll = PollInterval(state.world_size, state.settings)
        while True:
            is_look_due = poll.is_look_due()
            if is_look_due:
                state.detector.read_heartbeats([COORDINATOR])
            (data,) = state.client.call(client_thread.get_each, [answer_key])
            if data is not None:
                answer = state.unpack(COORDINATOR, data, Answer)
                self._is_answered = True
                return answer
            if is_look_due:
                for failure in state.failed_ranks([COORDINATOR]).values():
                    state.skip_missed_operations()
                    raise NoAnswerError(failure.message, rank=COORDINATOR, phase=state.phase)
                failures = state.missing_ranks([COORDINATOR], poll) or self._unmet(own, poll)
                for failure in failures.values():
                    # The envelope stays: it shows the coordinator that this call is over.
                    self._envelopes.remove(envelope_key)
                    state.put(envelope_key, encode(replace(own, failure=failure, gave_up=True)))
                    raise NoAnswerError(failure.message, rank=failure.rank, phase=state.phase)
            poll.pause()

    def _unmet(self, own: Envelope, poll: PollInterval) -> dict[int, Failure]:
        """Return a failure if other participants are in another call, or have given this one up.

        The coordinator compares the calls itself when it has entered.
        """
        state, beat = self._state, self._state.detector.last_heartbeat(COORDINATOR)
        if state.token or (beat is not None and beat.number >= state.operation_number):
            return {}
        if not poll.is_compare_due():
            return {}
        ranks = range(1, min(state.world_size, MAX_COMPARED))
        keys = [state.key(rank) for rank in ranks]
        found = zip(ranks, state.client.call(client_thread.get_each, keys), strict=True)
        others = {rank: state.unpack(rank, data, Envelope) for rank, data in found if data}
        for rank, other in others.items():
            if not other.gave_up or other.failure is None:
                continue
            # A rank that has compared the calls names this one too, and may be in another call.
            if other.call == own.call or own.call in other.failure.message:
                return {rank: other.failure}
        calls = {r: (env.call, env.phase) for r, env in others.items() if not env.gave_up}
        return state.mismatched_calls({**calls, state.rank: (own.call, own.phase)}, has_all=False)


class StoreChannel:
    """A `Channel` over a store. Its one thread starts with the first `enter`."""

    def __init__(
        self,
        store: client_thread.Store,
        rank: int,
        world_size: int,
        *,
        location: RankLocation,
        settings: Settings,
        texts: client_thread.StoreErrorTexts = client_thread.JOB_STORE_TEXTS,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.host = location.host
        self._num_exchanges = 0
        self._state = state = ExchangeState(store, rank, world_size, location, settings, texts)
        self.notes: SharedNotes = StoreNotes(state.client)
        self._role = Coordinator(state) if rank == COORDINATOR else Participant(state)
        # Also at the end of the process: ranks that wait for this one are notified immediately.
        self._finalizer = weakref.finalize(self, _close, state)

    @property
    def token(self) -> str:
        """The unique name of the current operation; "" until its first answer."""
        return self._state.token

    @property
    def exchanges(self) -> IoCount:
        """See `Channel.exchanges`."""
        return IoCount(self._num_exchanges, self._state.nbytes_put)

    def enter(self, call: str) -> None:
        """See `Channel.enter`. Raises ValueError during another operation."""
        state = self._state
        if state.heartbeat.inside:
            raise ValueError(
                f"{call} is called while {state.call} of the same group is still running in this "
                "process: call one after the other"
            )
        state.call, state.token, state.exchange_number = call, "", 0
        state.absence_reason = ""
        try:
            state.enter_operation(state.operation_number + 1)
        except BaseException:  # an interrupt, or the store is gone: the next operation can begin
            with suppress(NoAnswerError):  # the first error says more
                self.leave()
            raise

    def watch(self, ranks: Sequence[int]) -> None:
        """See `Channel.watch`."""
        state = self._state
        state.detector.read_heartbeats(ranks)
        for failure in state.failed_ranks(ranks).values():
            raise SecondaryError(failure.message, rank=failure.rank)
        # The failure of the coordinator itself is in its answer.
        keys = [state.key("answer" if rank == COORDINATOR else rank) for rank in ranks]
        for rank, data in zip(ranks, state.client.call(client_thread.get_each, keys), strict=True):
            if data is not None and _has_failure(rank, data):
                raise SecondaryError(
                    f"{state.detector.describe_ranks([rank])} has failed", rank=rank
                )

    def limit_unseen_timeout(self, unseen_timeout_s: float) -> None:
        """Limit the wait for ranks that were never seen. Any thread may call it."""
        self._state.unseen_timeout_s = min(unseen_timeout_s, self._state.settings.join_timeout_s)

    def fail_without_others(self, why: str) -> None:
        """See `Channel.fail_without_others`."""
        self._state.absence_reason = why

    def linger(self, timeout_s: float) -> None:
        """Delay the coordinator's end until the others have the last answer, for this time."""
        self._state.linger(timeout_s)

    def leave(self) -> None:
        """See `Channel.leave`."""
        self._state.heartbeat.inside = False
        self._state.client.send_heartbeat()
        self._role.clean_up()

    def close(self) -> None:
        """See `Channel.close`."""
        self._finalizer()

    def exchange(self, phase: str) -> Exchange:
        """See `Channel.exchange`."""
        state = self._state
        assert state.heartbeat.inside, "exchange is called between enter and leave"
        self._num_exchanges += 1
        state.phase = phase
        state.exchange_number += 1
        return _StoreExchange(phase, state, self._role)


class _StoreExchange(Exchange):
    def __init__(self, phase: str, state: ExchangeState, role: Coordinator | Participant) -> None:
        super().__init__(phase)
        self.is_coordinator = state.rank == COORDINATOR
        self._state = state
        self._role = role

    def _gathered(self) -> Sequence[bytes]:
        assert isinstance(self._role, Coordinator)
        return self._role.gather(self._build_envelope(None))

    def _build_envelope(self, failure: Failure | None) -> Envelope:
        state, body = self._state, b"" if failure else self._own or pack(None)
        return Envelope(state.call, self.phase, state.token, new_nonce(), body, failure)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        state, failure = self._state, None
        if error is not None and not isinstance(error, FailedError):
            failure = describe_error(error, self.phase, state.rank, state.host)
        own, is_gathered = self._build_envelope(failure), self._own is not None
        try:
            answer = self._role.finish_exchange(own, error, self._decided, is_gathered=is_gathered)
        except Exception:
            if is_interrupt(error):
                return
            raise
        self._answer = answer.body
        if answer.failure is None or is_interrupt(error):
            return
        self._role.ensure_failure_is_known()
        # If the answer was sent before this rank failed, it lacks the names that this rank touched.
        raised = answer.failure if failure is None else add_touched(answer.failure, [failure])
        raise build_error(raised) from (None if isinstance(error, FailedError) else error)

    def _unpack(self, rank: int, data: bytes, expected: type[T]) -> T:
        return self._state.unpack(rank, data, expected)


def _has_failure(rank: int, data: bytes) -> bool:
    kind: type[Answer | Envelope] = Answer if rank == COORDINATOR else Envelope
    try:
        return unpack(data, kind).failure is not None
    except ValueError:  # the coordinator reports invalid data
        return True


def _close(state: ExchangeState) -> None:
    if state.client.is_open and not state.heartbeat.inside:
        state.linger(LINGER_S)
    state.client.close()


class StoreNotes:
    """Notes in a store that all ranks reach, through this rank's client thread."""

    def __init__(self, client: client_thread.StoreClientThread) -> None:
        self._client = client

    def put(self, key: str, text: str) -> None:
        """See `SharedNotes.put`."""
        self._client.call(client_thread.put, _note_key(key), text.encode())

    def put_once(self, key: str, text: str) -> str:
        """See `SharedNotes.put_once`."""
        return _decode_note(self._client.call(client_thread.put_once, _note_key(key), text))

    def read(self, keys: Sequence[str]) -> list[str] | None:
        """See `SharedNotes.read`."""
        values = self._client.call(client_thread.get_all, [_note_key(key) for key in keys])
        return None if values is None else [_decode_note(data) for data in values]

    def remove(self, keys: Sequence[str]) -> None:
        """See `SharedNotes.remove`."""
        self._client.post(client_thread.delete, [_note_key(key) for key in keys])


def _note_key(key: str) -> str:
    return f"notes/{key}"


def _decode_note(data: bytes) -> str:
    # Invalid text is not from dist_ckpt, and the reader of the note ignores it.
    return data.decode(errors="replace")
