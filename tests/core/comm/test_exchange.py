from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace

import pytest

from dist_ckpt import errors
from dist_ckpt.core.comm.exchange.channel import Channel, SingleProcessChannel
from dist_ckpt.core.comm.exchange.failure_detector import PollInterval
from dist_ckpt.core.comm.key_value.client_thread import (
    PART_NBYTES,
    StoreClientThread,
    get_all,
    get_each,
)
from dist_ckpt.core.comm.rank_messages import NoAnswerError, SecondaryError
from dist_ckpt.errors import CheckpointError, CorruptError, RankError
from dist_ckpt.settings import Settings
from dist_ckpt.testing.thread_channel import ThreadChannel, ThreadCollective, ThreadStore
from exchanges import HANG_S, Doc, exchange
from ranks import Outcome, run_ranks, try_ranks

pytestmark = pytest.mark.waits

# A deadline that passes within a test: of ranks that come, and of ranks that live. No busy machine
# stops a thread for so long.
HASTY = Settings(heartbeat_timeout_s=20.0, join_timeout_s=3.0, join_warning_s=0.1)
FRAIL = Settings(heartbeat_timeout_s=5.0, join_timeout_s=20.0, join_warning_s=20.0)

OUR_ERRORS = [
    errors.NotFoundError,
    errors.ExistsError,
    errors.ConflictError,
    errors.CorruptError,
    errors.IncompatibleError,
    errors.StorageError,
    errors.RankError,
    errors.CheckpointError,
    ValueError,
    TypeError,
]


def ask(
    channel: Channel,
    work: Callable[[], Doc] = lambda: None,
    decide: Callable[[Sequence[Doc]], Doc] = lambda _: None,
    *,
    what: str = "save",
) -> Doc:
    """Do one operation that is one exchange."""
    channel.enter(what)
    try:
        return exchange(channel, "agree", work, decide)
    finally:
        channel.leave()


def raising(error: BaseException) -> Callable[[], Doc]:
    def work() -> Doc:
        raise error

    return work


def errors_of(outcomes: Sequence[Outcome]) -> list[BaseException]:
    """Return what every rank raised; fail if one did not raise."""
    assert all(outcome.error is not None for outcome in outcomes), outcomes
    return [outcome.error for outcome in outcomes if outcome.error is not None]


def on_ranks(world_size: int, work: Callable[[int], Doc]) -> list[BaseException]:
    def run(rank: int, channel: ThreadChannel, _: ThreadCollective) -> object:
        return ask(channel, lambda: work(rank))

    return errors_of(try_ranks(run, world_size=world_size, harness="threads"))


# --- what is decided ---------------------------------------------------------------------------


def test_every_rank_returns_what_was_decided_on_all_payloads_in_rank_order():
    def run(rank: int, channel: ThreadChannel, _: ThreadCollective) -> object:
        return ask(channel, lambda: {"rank": rank}, lambda payloads: [p["rank"] for p in payloads])

    assert run_ranks(run, world_size=4, harness="threads") == [[0, 1, 2, 3]] * 4


def test_only_the_coordinator_decides():
    def run(rank: int, channel: ThreadChannel, _: ThreadCollective) -> bool:
        decided = []
        ask(channel, decide=lambda _: decided.append(rank))
        return bool(decided)

    assert run_ranks(run, world_size=3, harness="threads") == [True, False, False]


def test_an_operation_is_any_number_of_exchanges():
    def run(rank: int, channel: ThreadChannel, _: ThreadCollective) -> object:
        sums = []
        for save in range(3):
            channel.enter("save")
            for phase in ("agree", "write", "agree again"):
                sums.append(exchange(channel, phase, lambda: save * rank, sum))  # noqa: B023
            channel.leave()
        return sums

    assert run_ranks(run, world_size=3, harness="threads") == [[0, 0, 0, 3, 3, 3, 6, 6, 6]] * 3


def test_documents_may_be_larger_than_one_value_of_a_store():
    body = bytes(9 << 20)

    def run(rank: int, channel: ThreadChannel, _: ThreadCollective) -> object:
        return ask(channel, lambda: body if rank == 1 else b"", b"".join) == body

    assert run_ranks(run, world_size=2, harness="threads") == [True, True]


@pytest.mark.parametrize("value", [1j, 1 << 70, object()])
def test_a_payload_that_is_no_document_is_a_type_error_on_all_ranks(value):
    for error in on_ranks(2, lambda rank: value if rank == 1 else None):
        assert type(error) is TypeError
        assert "rank 1" in str(error)


def test_a_decision_that_is_no_document_is_a_type_error_on_all_ranks():
    def run(rank: int, channel: ThreadChannel, _: ThreadCollective) -> object:
        return ask(channel, decide=lambda _: object())

    assert [
        type(error) for error in errors_of(try_ranks(run, world_size=2, harness="threads"))
    ] == [TypeError] * 2


# --- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", OUR_ERRORS)
def test_an_error_of_one_rank_is_raised_as_the_same_class_by_all_with_rank_and_host(kind):
    original = kind("the disk is full")
    raised = on_ranks(3, lambda rank: raising(original)() if rank == 1 else None)
    for rank, error in enumerate(raised):
        assert type(error) is kind
        assert str(error) == "rank 1 (host thread-1): the disk is full"
        assert (error.__cause__ is original) == (rank == 1)
        if isinstance(error, CheckpointError):
            assert (error.rank, error.phase) == (1, "agree")


def test_any_other_error_becomes_a_rank_error_that_names_its_class():
    for error in on_ranks(2, lambda rank: raising(KeyError("lr"))() if rank == 1 else None):
        assert type(error) is RankError
        assert str(error) == "rank 1 (host thread-1): KeyError: 'lr'"


def test_a_subclass_travels_as_the_class_that_the_others_know():
    class DiskFullError(errors.StorageError):
        pass

    for error in on_ranks(2, lambda rank: raising(DiskFullError("full"))() if rank else None):
        assert type(error) is errors.StorageError


def test_of_several_errors_the_lowest_ranks_is_raised_and_the_others_are_named():
    failures = {1: ValueError("first"), 2: TypeError("second"), 3: ValueError("third")}
    for error in on_ranks(4, lambda rank: raising(failures[rank])() if rank else None):
        assert type(error) is ValueError
        assert str(error) == "rank 1 (host thread-1): first (also failed: ranks 2-3)"


def test_where_an_error_happened_is_told_once_however_far_it_travels():
    def run(rank: int, channel: ThreadChannel, _: ThreadCollective) -> None:
        channel.enter("save")
        try:
            exchange(channel, "write", raising(ValueError("bad")) if rank == 1 else int, len)
        except ValueError as error:
            exchange(channel, "give up", raising(error), len)
        finally:
            channel.leave()

    for error in errors_of(try_ranks(run, world_size=3, harness="threads")):
        assert str(error).startswith("rank 1 (host thread-1): bad")
        assert str(error).count("host") == 1


def test_a_corrupt_error_tells_the_tensors_touched_on_any_rank():
    def work(rank: int) -> Doc:
        touched = ("both", f"only on {rank}")
        raise CorruptError("block 3 is damaged", touched=touched)

    for error in on_ranks(2, work):
        assert isinstance(error, CorruptError)
        assert error.touched == ("both", "only on 0", "only on 1")


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_raised_as_it_is_where_it_happened_and_told_to_the_others(interrupt):
    raised = on_ranks(3, lambda rank: raising(interrupt())() if rank == 1 else None)
    assert [type(error) for error in raised] == [RankError, interrupt, RankError]
    assert interrupt.__name__ in str(raised[0])


@pytest.mark.parametrize("kind", [ValueError, errors.ExistsError])
def test_an_error_in_deciding_is_raised_by_all_and_blames_no_rank(kind):
    def decide(_: Sequence[Doc]) -> Doc:
        raise kind("the paths differ")

    def run(rank: int, channel: ThreadChannel, _: ThreadCollective) -> object:
        return ask(channel, decide=decide)

    for error in errors_of(try_ranks(run, world_size=3, harness="threads")):
        assert type(error) is kind
        assert str(error) == "the paths differ"


def test_an_interrupt_of_the_coordinator_while_it_decides_is_told_to_the_others():
    def decide(_: Sequence[Doc]) -> Doc:
        raise KeyboardInterrupt

    def run(rank: int, channel: ThreadChannel, _: ThreadCollective) -> object:
        return ask(channel, decide=decide)

    raised = errors_of(try_ranks(run, world_size=2, harness="threads"))
    assert [type(error) for error in raised] == [KeyboardInterrupt, RankError]


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_is_told_while_others_still_work_and_they_are_told_it_when_they_are_done(failing):
    told = threading.Event()

    def run(rank: int, channel: ThreadChannel, _: ThreadCollective) -> object:
        def write() -> Doc:
            if rank == failing:
                raise errors.StorageError("the disk is full")
            if rank == 2:
                assert told.wait(HANG_S), "the error was not reported before this rank was done"
                raise errors.ConflictError("the folder is gone")

        channel.enter("save")
        try:
            exchange(channel, "agree", int, len)
            with pytest.raises(CheckpointError) as caught:
                exchange(channel, "write", write, len)
        finally:
            channel.leave()
        if rank == 0:
            told.set()
        return type(caught.value), str(caught.value), ask(channel, lambda: rank, sum)

    message = f"rank {failing} (host thread-{failing}): the disk is full"
    assert (
        run_ranks(run, world_size=3, harness="threads") == [(errors.StorageError, message, 3)] * 3
    )


def test_what_a_rank_has_touched_is_told_there_though_the_answer_came_before():
    told = threading.Event()

    def run(rank: int, channel: ThreadChannel, _: ThreadCollective) -> object:
        def read() -> Doc:
            assert rank == 0 or told.wait(HANG_S)
            raise CorruptError("block 3 is damaged", touched=("both", f"only on {rank}"))

        channel.enter("load")
        try:
            exchange(channel, "open", int, len)
            with pytest.raises(CorruptError) as caught:
                exchange(channel, "read", read, len)
        finally:
            channel.leave()
        told.set()
        return caught.value.rank, caught.value.touched

    assert run_ranks(run, world_size=2, harness="threads") == [
        (0, ("both", "only on 0")),
        (0, ("both", "only on 0", "only on 1")),
    ]


def test_a_fallout_waits_for_the_error_that_has_brought_it_about():
    def run(rank: int, channel: ThreadChannel, _: ThreadCollective) -> object:
        def gather() -> Doc:
            if rank == 1:
                time.sleep(0.3)  # the coordinator looks several times
                raise ValueError("the cause")
            raise SecondaryError("the connections failed")

        channel.enter("save")
        try:
            exchange(channel, "agree", int, len)
            return exchange(channel, "plan", gather, len)
        finally:
            channel.leave()

    for error in errors_of(try_ranks(run, world_size=3, harness="threads")):
        assert type(error) is ValueError
        assert str(error).startswith("rank 1 (host thread-1): the cause (also failed: ranks 0")


def test_an_error_in_the_first_exchange_waits_for_all_so_that_each_knows_which_call_it_is_about():
    def run(rank: int, channel: ThreadChannel, _: ThreadCollective) -> object:
        def describe() -> Doc:
            if rank == 0:
                raise ValueError("bad")
            time.sleep(0.3)  # the coordinator has time to fail, and to call again

        with pytest.raises(ValueError, match="rank 0"):
            ask(channel, describe, what="save to a")
        return ask(channel, lambda: rank, sum, what="save to b")

    assert run_ranks(run, world_size=2, harness="threads") == [1, 1]


def test_after_an_error_the_ranks_go_on_with_the_next_operation():
    def run(rank: int, channel: ThreadChannel, _: ThreadCollective) -> object:
        with pytest.raises(ValueError, match="rank 1"):
            ask(channel, raising(ValueError("bad")) if rank == 1 else int)
        return ask(channel, lambda: rank, sum)

    assert run_ranks(run, world_size=3, harness="threads") == [3, 3, 3]


# --- ranks that are late, absent, gone, dead ---------------------------------------------------


def test_a_rank_that_never_enters_is_named_by_all_others_with_what_to_look_for():
    def run(rank: int, channel: ThreadChannel, _: ThreadCollective) -> object:
        return None if rank == 2 else ask(channel, what="save to /ck")

    outcomes = try_ranks(run, world_size=4, harness="threads", config=HASTY)
    for error in errors_of([outcomes[0], outcomes[1], outcomes[3]]):
        assert type(error) is RankError
        assert error.rank == 2
        assert "rank 2 did not call save to /ck" in str(error)
        assert "if rank == 0:" in str(error)


def test_a_warning_names_the_absent_once_before_the_time_is_up(caplog):
    def run(rank: int, channel: ThreadChannel, _: ThreadCollective) -> object:
        return ask(channel) if rank == 0 else None

    with caplog.at_level(logging.WARNING, "dist_ckpt"):
        try_ranks(run, world_size=3, harness="threads", config=HASTY)
    assert [record.getMessage()[:30] for record in caplog.records] == [
        "ranks 1-2 did not call save: r"
    ]


class Warned(logging.Handler):
    """Sets an event when this many warnings have been logged."""

    def __init__(self, num: int) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        self.all = threading.Event()
        self._num = num

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        if len(self.messages) == self._num:
            self.all.set()

    def __enter__(self) -> Warned:
        logging.getLogger("dist_ckpt").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("dist_ckpt").removeHandler(self)


# The warning comes when the time for a rank that was never seen is over: no busy machine keeps a
# thread from its first call for so long.
PATIENT = Settings(
    heartbeat_timeout_s=20.0, join_timeout_s=3.0, join_warning_s=3.1, group_timeout_s=HANG_S
)


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_is_alive_is_waited_for_as_long_as_the_training_would(late):
    with Warned(1 if late else 2) as warned:  # of 0 by each of the others

        def run(rank: int, channel: ThreadChannel, _: ThreadCollective) -> object:
            ask(channel)  # all are seen
            if rank == late:
                assert warned.all.wait(HANG_S)
            return ask(channel, lambda: rank, sum, what="save to /ck")

        assert run_ranks(run, world_size=3, harness="threads", config=PATIENT) == [3, 3, 3]
    for message in warned.messages:
        assert message.startswith(f"rank {late} (host thread-{late}) did not call save to /ck: ")
        assert "if rank == 0:" in message
        assert message.endswith(f"This rank waits up to {HANG_S:g} s")


def test_a_rank_that_is_alive_and_never_comes_is_named_at_the_timeout_of_the_group():
    config = replace(PATIENT, group_timeout_s=4.0)
    done = threading.Barrier(2)

    def run(rank: int, channel: ThreadChannel, _: ThreadCollective) -> object:
        ask(channel)
        if rank == 1:
            return done.wait(HANG_S)
        with Warned(1) as warned, pytest.raises(RankError, match="did not call save") as raised:
            ask(channel)
        done.wait(HANG_S)
        return warned.all.is_set(), raised.value.rank

    assert run_ranks(run, world_size=2, harness="threads", config=config)[0] == (True, 1)


@pytest.mark.parametrize("late", [0, 2])
def test_ranks_in_different_calls_do_not_wait_for_a_late_one(late):
    done = threading.Barrier(3)

    def run(rank: int, channel: ThreadChannel, _: ThreadCollective) -> None:
        ask(channel)
        if rank != late:
            with pytest.raises(RankError, match="are in different calls: rank") as raised:
                ask(channel, what=f"save to /{rank}")  # one phase, and another path
            assert "nothing yet" in str(raised.value)
        done.wait(HANG_S)

    run_ranks(run, world_size=3, harness="threads", config=PATIENT)


def test_a_rank_that_compares_after_another_has_given_up_gets_its_error(monkeypatch):
    first, done, own = threading.Event(), threading.Barrier(3), threading.local()
    is_due = PollInterval.is_compare_due
    monkeypatch.setattr(
        PollInterval,
        "is_compare_due",
        lambda poll: (own.rank == 1 or first.is_set()) and is_due(poll),
    )

    def run(rank: int, channel: ThreadChannel, _: ThreadCollective) -> None:
        own.rank = rank
        ask(channel)
        if rank:
            with pytest.raises(RankError, match="are in different calls: rank"):
                ask(channel, what=f"save to /{rank}")
            first.set()
        done.wait(HANG_S)

    run_ranks(run, world_size=3, harness="threads", config=PATIENT)


def test_a_rank_that_comes_late_gets_the_error_of_the_others():
    given_up = threading.Barrier(3)

    def run(rank: int, channel: ThreadChannel, _: ThreadCollective) -> object:
        if rank == 2:
            given_up.wait(HANG_S)
        try:
            return ask(channel)
        finally:
            if rank != 2:
                given_up.wait(HANG_S)

    raised = errors_of(try_ranks(run, world_size=3, harness="threads", config=HASTY))
    assert [type(error) for error in raised] == [RankError] * 3
    assert len({str(error) for error in raised}) == 1


@pytest.mark.parametrize("what", ["the same path", "another path"])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_a_call_by_rank_0_alone_does_not_spoil_the_next_call_by_all(what, order):
    alone, turns = threading.Event(), [threading.Event() for _ in range(4)]

    def run(rank: int, channel: ThreadChannel, _: ThreadCollective) -> object:
        if rank == 0:
            with pytest.raises(RankError, match="ranks 1-2 did not call save"):
                ask(channel, what="save to the same path")
            alone.set()
        alone.wait(HANG_S)
        place = order.index(rank)
        if place:
            turns[place].wait(HANG_S)
        threading.Timer(0.01, turns[place + 1].set).start()
        return ask(channel, lambda: rank, sum, what=f"save to {what}")

    assert run_ranks(run, world_size=3, harness="threads", config=HASTY) == [3, 3, 3]


@pytest.mark.slow
@pytest.mark.parametrize("early", [(0,), (1, 2)])
def test_after_a_call_by_some_alone_they_may_come_late_to_the_next_call(early):
    """Later than the others look for them: these know the call that they missed by its path."""
    alone = threading.Barrier(3)

    def run(rank: int, channel: ThreadChannel, _: ThreadCollective) -> object:
        if rank in early:
            with pytest.raises(RankError, match="did not call save to a"):
                ask(channel, what="save to a")
        alone.wait(HANG_S)
        time.sleep(2.5 if rank in early else 0)
        return ask(channel, lambda: rank, sum, what="save to b")

    config = Settings(heartbeat_timeout_s=5.0, join_timeout_s=8.0, join_warning_s=4.0)
    assert run_ranks(run, world_size=3, harness="threads", config=config) == [3, 3, 3]


@pytest.mark.parametrize("what", ["the same path", "another path"])
@pytest.mark.parametrize("first", [0, 1])
def test_a_call_by_all_but_rank_0_does_not_spoil_the_next_call_by_all(what, first):
    alone, entered = threading.Barrier(3), threading.Event()

    def run(rank: int, channel: ThreadChannel, _: ThreadCollective) -> object:
        if rank != 0:
            with pytest.raises(NoAnswerError, match="rank 0 did not call save"):
                ask(channel, what="save to the same path")
        alone.wait(HANG_S)
        if (rank == 0) == (first == 0):
            threading.Timer(0.01, entered.set).start()
        else:
            entered.wait(HANG_S)
        return ask(channel, lambda: rank, sum, what=f"save to {what}")

    assert run_ranks(run, world_size=3, harness="threads", config=HASTY) == [3, 3, 3]


def test_rank_0_that_comes_too_late_is_told_who_has_given_its_call_up():
    alone = threading.Barrier(2)

    def run(rank: int, channel: ThreadChannel, _: ThreadCollective) -> str:
        if rank == 0:
            alone.wait(HANG_S)
        with pytest.raises(RankError) as raised:
            ask(channel, what="save to /ck")
        if rank == 1:
            alone.wait(HANG_S)
        return str(raised.value)

    told, given_up = run_ranks(run, world_size=2, harness="threads", config=HASTY)
    assert told == given_up
    assert str(told).startswith("rank 0 did not call save to /ck: rank 1 (host ")


def test_ranks_in_different_calls_are_named_beside_one_that_never_came():
    def run(rank: int, channel: ThreadChannel, _: ThreadCollective) -> object:
        if rank == 2:
            return None
        what, phase = ("save to /a", "agree") if rank == 0 else ("load of /b", "open")
        channel.enter(what)
        try:
            return exchange(channel, phase, int, len)
        finally:
            channel.leave()

    raised = errors_of(try_ranks(run, world_size=3, harness="threads", config=HASTY)[:2])
    assert str(raised[0]) == str(raised[1])
    assert str(raised[0]).startswith(
        "the ranks of the group are in different calls: rank 0 (host thread-0): save to /a, phase "
        "'agree'; rank 1 (host thread-1): load of /b, phase 'open'; rank 2: nothing yet. All ranks "
    )
    assert isinstance(raised[0], RankError)
    assert raised[0].rank == 1


def test_ranks_that_part_within_an_operation_are_told_so_and_can_go_on():
    def run(rank: int, channel: ThreadChannel, _: ThreadCollective) -> object:
        channel.enter("save")
        try:
            exchange(channel, "agree", int, len)
            with pytest.raises(RankError, match="different calls: ranks 0, 2: save, phase 'plan'"):
                exchange(channel, "write" if rank == 1 else "plan", int, len)
        finally:
            channel.leave()
        return ask(channel, lambda: rank, sum)

    assert run_ranks(run, world_size=3, harness="threads") == [3, 3, 3]


def test_a_rank_that_leaves_between_two_exchanges_is_named_at_once():
    done = threading.Barrier(3)

    def run(rank: int, channel: ThreadChannel, _: ThreadCollective) -> object:
        channel.enter("save")
        try:
            exchange(channel, "agree", int, len)
            if rank == 1:
                return None
            return exchange(channel, "write", int, len)
        finally:
            channel.leave()
            done.wait(HANG_S)

    outcomes = try_ranks(run, world_size=3, harness="threads")
    for error in errors_of([outcomes[0], outcomes[2]]):
        assert type(error) is RankError
        assert error.rank == 1
        assert "rank 1 (host thread-1) is no longer taking part" in str(error)
        assert "phase 'write' of save" in str(error)


def test_a_coordinator_that_leaves_leaves_no_answer():
    done = threading.Barrier(3)

    def run(rank: int, channel: ThreadChannel, _: ThreadCollective) -> object:
        channel.enter("save")
        try:
            exchange(channel, "agree", int, len)
            return None if rank == 0 else exchange(channel, "write", int, len)
        finally:
            channel.leave()
            done.wait(HANG_S)

    for error in errors_of(try_ranks(run, world_size=3, harness="threads")[1:]):
        assert isinstance(error, NoAnswerError)
        assert error.rank == 0
        assert "rank 0 (host thread-0) is no longer taking part" in str(error)


def test_an_unanswered_envelope_is_withdrawn_and_deleted_when_a_later_one_is_answered():
    """A coordinator that has seen it, and goes on after a freeze, must not wait for it."""
    store, left = ThreadStore(), threading.Barrier(2)

    def run(rank: int, _: ThreadChannel, __: ThreadCollective) -> None:
        with closing(ThreadChannel(store, rank, 2)) as channel:
            channel.enter("save")
            exchange(channel, "agree", int, len)
            if rank == 1:
                with pytest.raises(NoAnswerError):
                    exchange(channel, "write", lambda: bytes(PART_NBYTES + 1), len)
            channel.leave()
            while rank == 1 and store.get("1/1/2/1") != b"x2":
                time.sleep(0.001)
            left.wait(HANG_S)
            if rank == 0:
                assert get_each(store, ["1/1/2/1"]) == [None]
                assert get_all(store, ["1/1/2/1", "1/beat/0"]) is None
            assert store.check(["1/1/2/1", "1/1/2/1/0", "1/1/2/1/1"])
            left.wait(HANG_S)
            ask(channel)

    run_ranks(run, world_size=2, harness="threads")
    keys = store.keys()
    assert not [key for key in keys if "write" in key]


def test_a_rank_whose_process_has_ended_is_named_at_once():
    def run(rank: int, channel: ThreadChannel, _: ThreadCollective) -> object:
        ask(channel)
        return None if rank == 1 else ask(channel)

    outcomes = try_ranks(run, world_size=3, harness="threads")
    for error in errors_of([outcomes[0], outcomes[2]]):
        assert "rank 1 (host thread-1) has ended" in str(error)


class FailingStore(ThreadStore):
    """One rank's way to the store; `fail` says how it goes wrong from some moment on."""

    def __init__(self, shared: ThreadStore) -> None:
        super().__init__()
        self._shared = shared
        self.fail: Callable[[str], None] = lambda _: None

    def set(self, key: str, value: bytes, /) -> None:
        self.fail(key)
        self._shared.set(key, value)

    def get(self, key: str, /) -> bytes:
        self.fail(key)
        return self._shared.get(key)

    def check(self, keys: list[str], /) -> bool:
        self.fail("")
        return self._shared.check(keys)

    def add(self, key: str, amount: int, /) -> int:
        return self._shared.add(key, amount)

    def delete_key(self, key: str, /) -> bool:
        self.fail(key)
        return self._shared.delete_key(key)


@pytest.mark.parametrize("silent", [0, 1])
def test_a_rank_whose_heartbeat_stops_is_dead_after_its_timeout(silent):
    """As if killed in the middle of its work: nothing more reaches the store."""
    store = ThreadStore()

    def freeze(key: str) -> None:
        if "beat" in key:
            raise ConnectionError

    def run(rank: int, _: ThreadChannel, __: ThreadCollective) -> object:
        mine = FailingStore(store)
        with closing(ThreadChannel(mine, rank, 3, FRAIL)) as channel:
            ask(channel)
            if rank != silent:
                return ask(channel)
            mine.fail = freeze
            return None

    outcomes = try_ranks(run, world_size=3, harness="threads")
    for error in errors_of([outcomes[rank] for rank in range(3) if rank != silent]):
        assert isinstance(error, RankError)
        assert error.rank == silent
        assert f"rank {silent} (host thread-{silent}) is dead or frozen" in str(error)


def test_a_rank_that_works_longer_than_every_deadline_is_only_slow():
    def run(rank: int, channel: ThreadChannel, _: ThreadCollective) -> object:
        def work() -> Doc:
            time.sleep(6 if rank == 1 else 0)
            return rank

        return ask(channel, work, sum)

    config = Settings(heartbeat_timeout_s=5.0, join_timeout_s=5.0, join_warning_s=5.0)
    assert run_ranks(run, world_size=3, harness="threads", config=config) == [3, 3, 3]


# --- the store ---------------------------------------------------------------------------------


def test_a_lost_store_is_told_with_what_to_look_for():
    store = ThreadStore()

    def lose(_: str) -> None:
        raise ConnectionResetError("broken pipe\nand a page of frames")

    def run(rank: int, _: ThreadChannel, __: ThreadCollective) -> object:
        mine = FailingStore(store)
        with closing(ThreadChannel(mine, rank, 2)) as channel:
            ask(channel)
            mine.fail = lose
            return ask(channel)

    for error in errors_of(try_ranks(run, world_size=2, harness="threads")):
        assert isinstance(error, NoAnswerError)
        assert "key-value store is gone or cut off (ConnectionResetError: broken pipe)" in str(
            error
        )
        assert "frames" not in str(error)


def test_a_store_that_does_not_answer_is_lost_after_the_heartbeat_timeout():
    store, thawed, told = ThreadStore(), threading.Event(), threading.Barrier(2)

    def freeze(_: str) -> None:
        thawed.wait(2 * HANG_S)

    def run(rank: int, _: ThreadChannel, __: ThreadCollective) -> object:
        mine = FailingStore(store)
        with closing(ThreadChannel(mine, rank, 2, FRAIL)) as channel:
            ask(channel)
            mine.fail = freeze
            try:
                return ask(channel)
            finally:
                told.wait(HANG_S)
                thawed.set()

    for error in errors_of(try_ranks(run, world_size=2, harness="threads")):
        assert isinstance(error, NoAnswerError)
        assert "no answer for 5 s" in str(error)


def test_what_an_earlier_start_left_in_the_store_is_not_seen():
    store = ThreadStore()
    for start in range(3):

        def run(rank: int, _: ThreadChannel, __: ThreadCollective, start: int = start) -> object:
            with closing(ThreadChannel(store, rank, 2)) as channel:
                return [ask(channel, lambda: start + rank, sum) for _ in range(start + 1)]

        assert (
            run_ranks(run, world_size=2, harness="threads") == [[2 * start + 1] * (start + 1)] * 2
        )


def test_an_answer_to_somebody_else_is_never_taken_for_success():
    store = ThreadStore()

    def run(rank: int, _: ThreadChannel, __: ThreadCollective) -> object:
        with closing(ThreadChannel(store, rank, 2)) as channel:
            return ask(channel, lambda: rank, sum)

    run_ranks(run, world_size=2, harness="threads")
    store.set("2/1/1/answer", store.get("1/1/1/answer"))
    with (
        closing(ThreadChannel(store, 1, 2)) as late,
        pytest.raises(NoAnswerError, match="messages of another job"),
    ):
        ask(late)


def test_thousands_of_exchanges_do_not_grow_the_store():
    store, sizes = ThreadStore(), []

    def run(rank: int, _: ThreadChannel, __: ThreadCollective) -> None:
        channel = ThreadChannel(store, rank, 3)
        for save in range(100):
            channel.enter("save")
            for phase in "abcde":
                exchange(channel, phase, lambda: bytes(100), len)
            channel.leave()
            if rank == 0 and save in (20, 99):
                sizes.append(len(store.keys()))
        channel.close()

    run_ranks(run, world_size=3, harness="threads")
    assert len(sizes) == 2
    assert max(sizes) < 50


def test_failed_operations_do_not_grow_the_store():
    store = ThreadStore()

    def run(rank: int, _: ThreadChannel, __: ThreadCollective) -> None:
        channel = ThreadChannel(store, rank, 2)
        for _save in range(100):
            with pytest.raises(ValueError, match="bad"):
                ask(channel, raising(ValueError("bad")) if rank else int)
        channel.close()

    run_ranks(run, world_size=2, harness="threads")
    assert len(store.keys()) < 20


# --- the channel as an object ------------------------------------------------------------------


def test_an_operation_within_an_operation_is_refused():
    channel = ThreadChannel(ThreadStore(), 0, 2)
    channel.enter("save to a")
    with pytest.raises(ValueError, match="load of b is called while save to a"):
        channel.enter("load of b")
    channel.leave()
    channel.close()


def test_an_operation_may_follow_one_that_an_interrupt_met_as_it_began(monkeypatch):
    channel = ThreadChannel(ThreadStore(), 0, 1)
    with monkeypatch.context() as patch:
        beats = iter([raising(KeyboardInterrupt())])
        beat = StoreClientThread.send_heartbeat
        patch.setattr(
            StoreClientThread, "send_heartbeat", lambda line: next(beats, lambda: beat(line))()
        )
        with pytest.raises(KeyboardInterrupt):
            channel.enter("save to a")
    channel.enter("save to b")
    channel.leave()
    channel.close()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError])
def test_what_meets_the_start_of_a_thread_is_raised_and_the_next_operation_may_begin(
    monkeypatch, kind
):
    channel = ThreadChannel(ThreadStore(), 0, 1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda _: raising(kind("not now"))())
        with pytest.raises(kind, match="not now"):
            channel.enter("save to a")
    channel.enter("save to b")
    channel.leave()
    channel.close()


def test_an_interrupt_of_a_start_leaves_no_second_thread(monkeypatch):
    before = set(threading.enumerate())
    channel = ThreadChannel(ThreadStore(), 0, 1)
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        channel.enter("save to a")
    channel.enter("save to b")
    channel.leave()
    channel.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive()


def test_a_channel_has_no_thread_before_it_is_used_nor_after_it_is_dropped():
    before = set(threading.enumerate())
    channel = ThreadChannel(ThreadStore(), 0, 2)
    assert set(threading.enumerate()) <= before
    channel.enter("save")
    channel.leave()
    started = set(threading.enumerate()) - before
    assert started
    del channel
    gc.collect()
    for thread in started:
        thread.join(5)
        assert not thread.is_alive()


def test_a_closed_channel_says_so():
    channel = ThreadChannel(ThreadStore(), 0, 2)
    ask_nobody(channel)
    channel.close()
    channel.close()
    with pytest.raises(NoAnswerError, match="the channel is closed"):
        channel.enter("save")


def ask_nobody(channel: ThreadChannel) -> None:
    channel.enter("save")
    channel.leave()


# --- a world of one ----------------------------------------------------------------------------


def test_alone_the_decision_is_returned():
    assert ask(SingleProcessChannel(), lambda: {"a": [1]}, lambda payloads: payloads) == [
        {"a": [1]}
    ]


def test_alone_documents_are_what_they_are_in_a_group():
    assert ask(SingleProcessChannel(), lambda: (1, 2), lambda payloads: payloads[0]) == [1, 2]
    with pytest.raises(TypeError, match="unsupported"):
        ask(SingleProcessChannel(), object)


@pytest.mark.parametrize("kind", [*OUR_ERRORS, KeyboardInterrupt, SystemExit])
def test_alone_an_error_is_raised_as_it_is(kind):
    original = kind("the disk is full")
    with pytest.raises(kind) as caught:
        ask(SingleProcessChannel(), raising(original))
    assert caught.value is original


def test_alone_any_other_error_is_a_rank_error_as_in_a_group():
    original = KeyError("lr")
    with pytest.raises(RankError, match="KeyError: 'lr'") as caught:
        ask(SingleProcessChannel(), raising(original))
    assert caught.value.__cause__ is original
