"""Ranks take their turns at the same boundary, and nobody waits for who cannot answer."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from dist_ckpt.checkpointer.barrier_rounds import (
    BarrierMember,
    BarrierProposal,
    BarrierRounds,
    Boundary,
    PollPolicy,
)
from dist_ckpt.core.comm.exchange.channel import SingleProcessChannel
from dist_ckpt.core.comm.exchange.store_channel import StoreNotes
from dist_ckpt.core.comm.rank_messages import NoAnswerError
from dist_ckpt.errors import RankError
from dist_ckpt.testing.thread_channel import ThreadChannel, ThreadCollective, ThreadStore
from exchanges import exchange
from ranks import run_ranks, try_ranks

FAST = PollPolicy(poll_s=0.01, answer_s=20.0, ahead=0)


def test_a_rank_that_died_is_waited_for_less_long_than_launchers_give() -> None:
    # torchrun sends SIGTERM to the ranks that live, which is a request to save, and SIGKILL 30 s
    # later. Between these an exception has to come, and to be told.
    assert PollPolicy.of(2).answer_s <= 20


class TensorRequest:
    """What a rank asks for: `ask` until it was served."""

    def __init__(self, *asks: BarrierProposal) -> None:
        self.asks = list(asks)

    def __call__(self) -> BarrierProposal | None:
        return self.asks[0] if self.asks else None

    def take(self, turn: Boundary | None) -> int | None:
        """Take a turn as served if it is this rank's own; return its boundary."""
        if turn is None:
            return None
        if turn.proposal in self.asks:
            self.asks.remove(turn.proposal)
        return turn.number


@contextmanager
def rounds_of(
    channel: ThreadChannel,
    wanted: Callable[[], BarrierProposal | None],
    pacing: PollPolicy = FAST,
    alone: Callable[[str], None] | None = None,
) -> Iterator[BarrierRounds]:
    channel.enter("opening")
    try:
        exchange(channel, "open", lambda: b"", lambda told: b"")
    finally:
        channel.leave()
    member = BarrierMember("start", channel.rank, channel.world_size)
    rounds = BarrierRounds(
        channel.notes, member, wanted, alone or channel.fail_without_others, pacing
    )
    try:
        yield rounds
    finally:
        rounds.close()


def train(
    rounds: BarrierRounds, wanted: TensorRequest, num_steps: int, step: Callable[[int], None]
) -> list[tuple[int, str]]:
    """Return the turns of a training: boundary, and what for."""
    turns = []
    for number in range(1, num_steps + 1):
        step(number)
        turn = rounds.arrive(f"step {number}")
        if (boundary := wanted.take(turn)) is not None:
            assert turn is not None
            assert turn.proposal is not None
            turns.append((boundary, turn.proposal.why))
            rounds.leave()
    return turns


@pytest.mark.parametrize("ahead", [0, 3, None])
@pytest.mark.parametrize("asking", [0, 2])
def test_all_take_the_turn_that_one_asks_for_at_the_same_boundary(asking, ahead):
    meeting = threading.Barrier(3)
    pacing = PollPolicy(poll_s=0.01, ahead=ahead)

    def run(rank: int, channel: ThreadChannel, _: ThreadCollective) -> list[tuple[int, str]]:
        wanted = TensorRequest(*[BarrierProposal(rank, "TERM", stops=True)] * (rank == asking))
        with rounds_of(channel, wanted, pacing) as rounds:

            def step(_: int) -> None:
                time.sleep(0.002)
                meeting.wait(20)

            return train(rounds, wanted, 200, step)

    turns = run_ranks(run, world_size=3, harness="threads")
    assert turns[0]
    assert turns[0] == turns[1] == turns[2]
    assert [why for _, why in turns[0] or ()] == ["TERM"]


@pytest.mark.parametrize("stops", [False, True])
def test_after_many_fast_boundaries_the_turn_is_not_far_ahead(stops):
    """As after an evaluation that polls with every batch: the steps that follow are slow."""
    meeting = threading.Barrier(2)
    pacing = PollPolicy(poll_s=0.1)

    def run(rank: int, channel: ThreadChannel, _: ThreadCollective) -> int:
        wanted = TensorRequest()
        with rounds_of(channel, wanted, pacing) as rounds:
            for number in range(1500):
                time.sleep(0.0002 if number > 10 else 0.05)
                assert rounds.arrive(f"poll {number}") is None
            wanted.asks = [BarrierProposal(rank, "TERM", stops=stops)] * (rank == 0)
            for number in range(100):
                time.sleep(0.02)
                meeting.wait(20)
                if rounds.arrive(f"step {number}") is not None:
                    rounds.leave()
                    return number
        return 100

    first, second = run_ranks(run, world_size=2, harness="threads")
    assert first == second
    assert first is not None
    assert first < 30


def test_what_is_asked_for_is_not_asked_again_while_it_is_done():
    meeting = threading.Barrier(2)

    def run(rank: int, channel: ThreadChannel, _: ThreadCollective) -> int:
        wanted = TensorRequest(*[BarrierProposal(0, "a request")] * (rank == 0))
        num_turns = 0
        with rounds_of(channel, wanted) as rounds:
            for number in range(120):
                meeting.wait(20)
                if (turn := rounds.arrive(f"step {number}")) is not None:
                    num_turns += 1
                    time.sleep(0.2)  # the save, while the thread looks again and again
                    wanted.take(turn)
                    rounds.leave()
                time.sleep(0.005)
        return num_turns

    assert run_ranks(run, world_size=2, harness="threads") == [1, 1]


def test_what_several_ask_for_at_once_is_done_one_after_the_other():
    meeting = threading.Barrier(3)

    def run(rank: int, channel: ThreadChannel, _: ThreadCollective) -> list[tuple[int, str]]:
        wanted = TensorRequest(
            BarrierProposal(rank, f"of {rank}"), BarrierProposal(rank, f"again {rank}")
        )
        with rounds_of(channel, wanted) as rounds:

            def step(_: int) -> None:
                time.sleep(0.002)
                meeting.wait(20)

            turns = train(rounds, wanted, 400, step)
        assert wanted.asks == []
        return turns

    turns = run_ranks(run, world_size=3, harness="threads")
    assert turns[0] == turns[1] == turns[2]
    assert sorted(why for _, why in turns[0] or ()) == sorted(
        f"{what} {rank}" for what in ("of", "again") for rank in range(3)
    )


def test_a_rank_that_is_far_behind_takes_the_turn_when_it_comes_there():
    def run(rank: int, channel: ThreadChannel, _: ThreadCollective) -> list[tuple[int, str]]:
        wanted = TensorRequest(*[BarrierProposal(1, "USR1")] * (rank == 1))
        with rounds_of(channel, wanted) as rounds:
            turns = train(rounds, wanted, 300, lambda _: time.sleep(0.004 if rank else 0.0005))
            deadline = time.monotonic() + 20
            while len(turns) == 0 and time.monotonic() < deadline:
                turns = train(rounds, wanted, 1, lambda _: time.sleep(0.001))
            return turns

    turns = run_ranks(run, world_size=2, harness="threads")
    assert turns[0] == turns[1] != []


def test_turns_that_are_due_by_the_step_need_no_note():
    store = ThreadStore()

    def run(rank: int, channel: ThreadChannel, _: ThreadCollective) -> list[Boundary | None]:
        with rounds_of(channel, TensorRequest(), PollPolicy(poll_s=30.0)) as rounds:
            turns = []
            for number in range(1, 10):
                turns.append(rounds.arrive("save", is_due=number % 4 == 0))
                rounds.leave()
            return turns

    turns = run_ranks(run, world_size=2, harness="threads")
    for of_rank in turns:
        assert [(turn.number, turn.proposal) for turn in of_rank or () if turn] == [
            (4, None),
            (8, None),
        ]
    assert store.keys() == ()


def test_without_an_answer_nobody_waits_for_longer_than_answer_s_and_who_asks_asks_again():
    pacing = PollPolicy(poll_s=0.01, answer_s=0.3, ahead=0)
    begins = threading.Event()

    def run(rank: int, channel: ThreadChannel, _: ThreadCollective) -> object:
        wanted = TensorRequest(*[BarrierProposal(0, "TERM")] * (rank == 0))
        if rank == 1:  # its thread does not run yet
            channel.enter("opening")
            exchange(channel, "open", lambda: b"", lambda told: b"")
            channel.leave()
            begins.wait(20)
            with rounds_of_member(channel, wanted, pacing) as rounds:
                return until_a_turn(rounds, wanted)
        with rounds_of(channel, wanted, pacing) as rounds:
            waits = []
            for __ in range(100):
                time.sleep(0.02)
                began = time.monotonic()
                assert rounds.arrive("step") is None
                waits.append(time.monotonic() - began)
            assert 0.1 < max(waits) < 5
            assert sum(wait > 0.1 for wait in waits) >= 1
            begins.set()
            # The other begins at its first boundary, this one is at its hundredth.
            return until_a_turn(rounds, wanted)

    turns = try_ranks(run, world_size=2, harness="threads")
    assert [one.error for one in turns] == [None, None]
    assert turns[0].value == turns[1].value


@contextmanager
def rounds_of_member(
    channel: ThreadChannel, wanted: Callable[[], BarrierProposal | None], pacing: PollPolicy
) -> Iterator[BarrierRounds]:
    member = BarrierMember("start", channel.rank, channel.world_size)
    rounds = BarrierRounds(channel.notes, member, wanted, channel.fail_without_others, pacing)
    try:
        yield rounds
    finally:
        rounds.close()


def until_a_turn(rounds: BarrierRounds, wanted: TensorRequest) -> int:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        if turn := rounds.arrive("step"):
            wanted.take(turn)
            return turn.number
        time.sleep(0.001)
    raise AssertionError("no turn came")


def test_who_saves_alone_is_told_at_once_and_by_whom():
    def run(rank: int, channel: ThreadChannel, _: ThreadCollective) -> None:
        with rounds_of(channel, TensorRequest()) as rounds:
            if rank == 1:
                for __ in range(3):
                    rounds.arrive("step")
                    time.sleep(0.001)
                assert rounds.arrive("save step 4", is_due=True) is not None
                channel.enter("save of step 4")
                try:
                    exchange(channel, "agree", lambda: b"", lambda told: b"")
                finally:
                    channel.leave()
            else:
                until = time.monotonic() + 3
                while time.monotonic() < until:
                    rounds.arrive("step")
                    time.sleep(0.001)

    began = time.monotonic()
    outcomes = try_ranks(run, world_size=3, harness="threads")
    assert isinstance(outcomes[1].error, RankError)
    told = str(outcomes[1].error)
    assert "rank 1 is at its boundary 4 to save step 4" in told
    assert "has passed that without a save" in told
    assert (outcomes[0].error, outcomes[2].error) == (None, None)
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("asking", [0, 1])
def test_a_rank_that_must_stop_does_not_wait_for_a_late_one(asking: int) -> None:
    """Rank 1 evaluates: it lives, and comes to no boundary before the others must have ended."""
    done = threading.Barrier(2)
    pacing = PollPolicy(poll_s=0.01, ahead=0, stop_s=0.2)

    def run(rank: int, channel: ThreadChannel, _: ThreadCollective) -> str:
        wanted = TensorRequest()
        with rounds_of(channel, wanted, pacing) as rounds:
            if rank == 1:
                wanted.asks = [BarrierProposal(1, "TERM", stops=True)] * (asking == 1)
                done.wait(50)
                return ""
            assert rounds.arrive("save", 1, is_due=True) is not None
            channel.enter("save")
            signal = BarrierProposal(0, "TERM", stops=True, waited_s=1.0)
            wanted.asks = [signal] * (asking == 0)
            try:
                with pytest.raises(RankError) as raised:
                    exchange(channel, "agree", lambda: b"", lambda told: b"")
            finally:
                channel.leave()
                done.wait(50)
            return str(raised.value)

    message, _ = run_ranks(run, world_size=2, harness="threads")
    assert message is not None
    assert message.startswith("rank 1 (host thread-1) did not call save: the run must stop now")


def test_once_a_rank_takes_no_part_any_more_requests_come_to_nothing():
    ended = threading.Event()

    def run(rank: int, channel: ThreadChannel, _: ThreadCollective) -> int:
        wanted = TensorRequest()
        with rounds_of(channel, wanted) as rounds:
            if rank == 1:
                rounds.close()
                ended.set()
                return 0
            ended.wait(20)
            wanted.asks.append(BarrierProposal(rank, "TERM"))
            began = time.monotonic()
            while time.monotonic() < began + 2:
                assert rounds.arrive("step") is None
                time.sleep(0.001)
            return rounds._barrier.round

    outcomes = try_ranks(run, world_size=3, harness="threads")
    assert [one.error for one in outcomes] == [None] * 3
    # One round, and no other: nobody asks for what cannot be.
    assert [outcomes[rank].value for rank in (0, 2)] == [2, 2]


def test_who_is_to_stop_after_another_has_left_is_ended_by_an_error():
    """Else the signal would be swallowed: nobody can save any more."""
    ended = threading.Event()

    def run(rank: int, channel: ThreadChannel, _: ThreadCollective) -> None:
        wanted = TensorRequest()
        with rounds_of(channel, wanted) as rounds:
            if rank == 1:
                rounds.close()
                ended.set()
                return
            ended.wait(20)
            wanted.asks.append(BarrierProposal(rank, "TERM", stops=True))
            until = time.monotonic() + 20
            while time.monotonic() < until:
                assert rounds.arrive("step") is None
                time.sleep(0.001)

    outcomes = try_ranks(run, world_size=2, harness="threads")
    assert isinstance(outcomes[0].error, RankError)
    assert "the run cannot save and stop, as TERM requests: rank 1" in str(outcomes[0].error)
    assert outcomes[1].error is None


class SlowStore(ThreadStore):
    """A store that takes its time, or is gone."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.is_gone = False

    def check(self, keys: list[str], /) -> bool:
        self._wait()
        return super().check(keys)

    def set(self, key: str, value: bytes, /) -> None:
        self._wait()
        super().set(key, value)

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        self._wait()
        return super().compare_set(key, expected, desired)

    def _wait(self) -> None:
        time.sleep(self.seconds)
        if self.is_gone:
            raise ConnectionError("the store is gone")


def channels(store: ThreadStore, world_size: int) -> list[ThreadChannel]:
    return [ThreadChannel(store, rank, world_size) for rank in range(world_size)]


def in_threads(world_size: int, function: Callable[[int], object]) -> list[object]:
    found: list[object] = [None] * world_size

    def run(rank: int) -> None:
        try:
            found[rank] = function(rank)
        except BaseException as error:  # noqa: BLE001
            found[rank] = error

    threads = [
        threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return found


def test_a_slow_store_only_makes_it_take_longer():
    store = SlowStore(0.1)
    members = channels(store, 2)
    meeting = threading.Barrier(2)

    def run(rank: int) -> object:
        wanted = TensorRequest(*[BarrierProposal(1, "TERM")] * (rank == 1))
        with rounds_of(members[rank], wanted) as rounds:

            def step(_: int) -> None:
                time.sleep(0.01)
                meeting.wait(20)

            return train(rounds, wanted, 300, step)

    first, second = in_threads(2, run)
    assert first == second != []


def test_a_store_that_is_gone_stops_who_waits_at_a_line_and_nobody_else():
    store = SlowStore(0.0)
    members = channels(store, 2)
    are_open = threading.Barrier(2)

    def run(rank: int) -> object:
        wanted = TensorRequest()
        with rounds_of(members[rank], wanted) as rounds:
            are_open.wait(20)
            for _ in range(5):
                rounds.arrive("step")
            if rank == 0:
                wanted.asks.append(BarrierProposal(0, "TERM"))
                until = time.monotonic() + 20
                while rounds._barrier.at is None and time.monotonic() < until:
                    time.sleep(0.001)
                store.is_gone = True
            for _ in range(300):
                rounds.arrive("step")
                time.sleep(0.001)
        return "trained on"

    # Only one of them has seen the ask.
    members[1].notes = StoreNotes(ThreadChannel(SlowStore(0.0), 1, 2)._state.client)
    found = in_threads(2, run)
    assert isinstance(found[0], NoAnswerError)
    assert found[1] == "trained on"


def test_a_note_that_is_none_of_ours_is_told_as_that():
    store = ThreadStore()
    members = channels(store, 2)

    def run(rank: int) -> object:
        with rounds_of(members[rank], TensorRequest()) as rounds:
            if rank == 0:
                members[0].notes.put("start/1/ask", "?")
            for _ in range(2000):
                rounds.arrive("step")
                time.sleep(0.001)
        return None

    for error in in_threads(2, run):
        assert isinstance(error, RankError)
        assert "a round has the proposal '?'" in str(error)


def test_a_process_alone_asks_itself():
    alone = SingleProcessChannel()
    wanted = TensorRequest(BarrierProposal(0, "TERM", stops=True))
    rounds = BarrierRounds(
        alone.notes, BarrierMember("start", 0, 1), wanted, alone.fail_without_others, FAST
    )
    try:
        assert until_a_turn(rounds, wanted) >= 1
    finally:
        rounds.close()
    rounds.close()


def test_notes_of_rounds_that_are_over_are_removed():
    store = ThreadStore()
    members = channels(store, 2)
    meeting = threading.Barrier(2)

    def run(rank: int) -> None:
        wanted = TensorRequest(
            *(BarrierProposal(0, f"{number}") for number in range(6 * (rank == 0)))
        )
        with rounds_of(members[rank], wanted) as rounds:

            def step(_: int) -> None:
                time.sleep(0.002)
                meeting.wait(20)

            assert len(train(rounds, wanted, 300, step)) == 6

    assert in_threads(2, run) == [None, None]
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        rounds = {key.split("/")[2] for key in store.keys() if key.endswith("/ask")}  # noqa: SIM118
        if rounds <= {"5", "6"}:
            return
        time.sleep(0.01)
    raise AssertionError(store.keys())


@pytest.mark.parametrize("seed", range(4))
def test_whatever_the_ranks_do_and_ask_their_turns_are_the_same(seed):
    store = ThreadStore()
    members = channels(store, 3)
    plan = random.Random(seed)
    delays = [plan.choice((0.0, 0.0005, 0.003)) for _ in range(3)]
    asks = {(plan.randrange(3), plan.randrange(100)) for _ in range(5)}
    ahead = [plan.choice((0, 1, 5, None)) for _ in range(3)]
    due = {plan.randrange(300) for _ in range(4)}
    meeting = threading.Barrier(3)

    def run(rank: int) -> object:
        wanted = TensorRequest()
        pacing = PollPolicy(poll_s=0.01, ahead=ahead[rank])
        turns = []
        with rounds_of(members[rank], wanted, pacing) as rounds:
            for number in range(1, 301):
                time.sleep(delays[rank])
                if number % 50 == 0:
                    meeting.wait(30)  # no rank is further ahead
                if (rank, number) in asks:
                    wanted.asks.append(BarrierProposal(rank, f"{rank} at {number}"))
                if turn := rounds.arrive("step", is_due=number in due):
                    turns.append((turn.number, turn.proposal, number))
                    wanted.take(turn)
                    meeting.wait(30)  # a save
                    rounds.leave()
            meeting.wait(30)
        return turns

    first, second, third = in_threads(3, run)
    assert isinstance(first, list)
    assert first == second == third
    assert len(first) >= len(due - {0})
