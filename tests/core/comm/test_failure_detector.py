from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

import pytest

from dist_ckpt.core.comm.exchange import failure_detector
from dist_ckpt.core.comm.exchange.exchange_state import ExchangeState
from dist_ckpt.core.comm.exchange.failure_detector import FailureDetector, ProcessWitness
from dist_ckpt.core.comm.key_value import client_thread
from dist_ckpt.core.comm.key_value.client_thread import JOB_STORE_TEXTS, StoreClientThread
from dist_ckpt.core.comm.rank_messages import HeartbeatSender, RankLocation
from dist_ckpt.core.runtime.processes import ProcessId, find_process, find_state
from dist_ckpt.settings import Settings
from dist_ckpt.testing.thread_channel import ThreadStore

SILENCE_S, LATE_S = 20, 300
HANG_S = 60


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class SaveBarrier:
    """A line to a store in which all keys have one value."""

    def __init__(self) -> None:
        self.beat: bytes | None = None

    def call(self, function: Any, keys: Any) -> list[bytes | None]:
        return [self.beat]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(failure_detector, "time", clock)
    return clock


def watch_of(line: Any, witness: ProcessWitness | None = None) -> FailureDetector:
    config = Settings(heartbeat_timeout_s=SILENCE_S, join_timeout_s=LATE_S)
    return FailureDetector(line, str, config, witness)


def loss_of(watch: FailureDetector) -> str | None:
    watch.read_heartbeats([1])
    return watch.find_loss(1, 0, was_in=False)


def test_a_rank_that_was_never_seen_is_not_silent(clock):
    watch = watch_of(SaveBarrier())
    for clock.now in range(0, 1000, 4):
        assert loss_of(watch) is None
    assert watch.last_heartbeat(1) is None


def test_silence_counts_from_the_last_change_that_was_seen(clock):
    line, heart = SaveBarrier(), HeartbeatSender("a", inside=True)
    watch = watch_of(line)
    for start in (0, 1000):
        line.beat = heart.encode_next()
        for clock.now in range(start, start + SILENCE_S, 4):
            assert loss_of(watch) is None
    clock.now += 4
    assert loss_of(watch) == "is dead or frozen: no heartbeat for 20 s"


def test_a_pause_of_the_observer_is_not_silence_of_the_others(clock):
    line = SaveBarrier()
    watch = watch_of(line)
    line.beat = HeartbeatSender("a", inside=True).encode_next()
    for clock.now in range(0, 4 * 3600, 3600):  # each look counts for a quarter of a silence
        assert loss_of(watch) is None
    clock.now += 3600
    assert loss_of(watch) is not None


def test_a_message_that_is_not_a_heartbeat_is_refused(clock):
    line = SaveBarrier()
    watch = watch_of(line)
    assert not watch.has_invalid_heartbeat(1)
    line.beat = b"nonsense"
    assert loss_of(watch) is None
    assert watch.has_invalid_heartbeat(1)
    assert watch.last_heartbeat(1) is None


# --- what is seen of the process ------------------------------------------------------------------


class Line:
    """A line to a store."""

    def __init__(self) -> None:
        self.store = ThreadStore()

    def call(self, function: Any, *arguments: Any) -> Any:
        return function(self.store, *arguments)

    def send(self, heart: HeartbeatSender, rank: int = 1) -> None:
        client_thread.put(self.store, str(rank), heart.encode_next())


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, int, int], str]:
    """The states of processes, which tests set."""
    states: dict[tuple[int, int, int], str] = {}
    monkeypatch.setattr(failure_detector, "find_state", lambda *process: states[process])
    return states


@pytest.fixture
def ports(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """The liveness ports that answer, which tests set."""
    ports: dict[str, bool] = {}

    def find_listening(addresses: list[str]) -> dict[str, bool]:
        return {address: ports[address] for address in addresses if address in ports}

    monkeypatch.setattr(failure_detector, "find_listening", find_listening)
    return ports


HERE, THERE = ProcessId("here", 1, 10), ProcessId("there", 2, 20)


def witness_at(process: ProcessId | None) -> ProcessWitness:
    witness = ProcessWitness(process)
    witness.prefix = "1"
    return witness


def pass_time(clock: Clock, watch: FailureDetector, line: Line, witness: ProcessWitness | None):
    """Let four seconds pass: a look of each side."""
    clock.now += 4
    loss = loss_of(watch)
    if witness is not None:
        witness(line.store)
    return loss


@pytest.mark.parametrize("process", [HERE, THERE])
def test_a_process_that_runs_no_python_is_late_up_to_a_limit(process, clock, states):
    line, heart = Line(), HeartbeatSender("a", process, inside=True)
    watch, other = watch_of(line, witness_at(HERE)), witness_at(process)
    line.send(heart)
    assert loss_of(watch) is None
    states[process.pid, process.started, 0] = "running"
    for _ in range(4, LATE_S, 4):
        assert pass_time(clock, watch, line, other) is None
    assert watch.find_lateness(1) == "is alive, but has not run Python for 296 s"
    assert watch.log_once(1)
    assert not watch.log_once(1)
    states[process.pid, process.started, 0] = "stopped"
    loss = pass_time(clock, watch, line, other) or pass_time(clock, watch, line, other)
    assert "has not run Python for 30" in str(loss)
    line.send(heart)  # it goes on
    assert pass_time(clock, watch, line, other) is None
    assert watch.find_lateness(1) == ""


@pytest.mark.parametrize(
    ("state", "fact"),
    [
        ("ended", ", and its process has ended"),
        ("ending", ", and its process ends: it was killed, or dumps core"),
        ("blocked", ", and its process is in a call of the kernel that does not return"),
        ("cut off", ", and its process lives, but is cut off from the key-value store"),
        ("unknown", ""),
    ],
)
@pytest.mark.parametrize("process", [HERE, THERE])
def test_a_process_that_ends_or_hangs_in_the_kernel_is_dead_after_the_silence(
    process, state, fact, clock, states
):
    line, heart = Line(), HeartbeatSender("a", process, inside=True)
    watch, other = watch_of(line, witness_at(HERE)), witness_at(process)
    line.send(heart)
    assert loss_of(watch) is None
    states[process.pid, process.started, 0] = state
    losses = [pass_time(clock, watch, line, other) for _ in range(5)]
    assert losses == [None] * 4 + [f"is dead or frozen: no heartbeat for 20 s{fact}"]


@pytest.mark.parametrize(
    ("state", "fact"),
    [("ended", "has ended"), ("ending", "process ends"), ("cut off", "lives, but is cut off")],
)
def test_a_process_that_dies_late_is_dead_at_once(state, fact, clock, states):
    line, heart = Line(), HeartbeatSender("a", HERE, inside=True)
    watch = watch_of(line, witness_at(HERE))
    line.send(heart)
    assert loss_of(watch) is None
    states[1, 10, 0] = "running"
    assert [pass_time(clock, watch, line, None) for _ in range(10)] == [None] * 10
    states[1, 10, 0] = state
    assert fact in str(pass_time(clock, watch, line, None))


def test_without_a_witness_silence_is_death(clock, states):
    """A host with one rank, or a host that is gone: an old answer is no sign of life."""
    line, heart = Line(), HeartbeatSender("a", THERE, inside=True)
    old = witness_at(THERE)
    states[2, 20, 0] = "running"
    other = watch_of(line, witness_at(HERE))
    line.send(heart)
    loss_of(other)
    for _ in range(6):
        assert pass_time(clock, other, line, old) is None
    watch = watch_of(line, witness_at(HERE))
    assert loss_of(watch) is None
    assert [pass_time(clock, watch, line, None) for _ in range(4)] == [None] * 4
    assert pass_time(clock, watch, line, None) == "is dead or frozen: no heartbeat for 20 s"


def test_a_host_that_is_lost_after_its_ranks_were_late_is_dead_after_the_silence(clock, states):
    line, heart = Line(), HeartbeatSender("a", THERE, inside=True)
    watch, other = watch_of(line, witness_at(HERE)), witness_at(THERE)
    line.send(heart)
    assert loss_of(watch) is None
    states[2, 20, 0] = "running"
    assert [pass_time(clock, watch, line, other) for _ in range(10)] == [None] * 10
    losses = [pass_time(clock, watch, line, None) for _ in range(6)]
    assert losses[0] is None
    assert losses[-1] == "is dead or frozen: no heartbeat for 20 s"


@pytest.mark.parametrize("process", [HERE, THERE])
def test_a_process_that_is_stopped_is_late_and_not_dead(process, clock, states):
    line, heart = Line(), HeartbeatSender("a", process, inside=True)
    watch, other = watch_of(line, witness_at(HERE)), witness_at(process)
    line.send(heart)
    assert loss_of(watch) is None
    states[process.pid, process.started, 0] = "stopped"
    assert [pass_time(clock, watch, line, other) for _ in range(10)] == [None] * 10
    assert watch.find_lateness(1) == "is stopped, and has not run Python for 40 s"


def test_a_rank_that_is_late_is_logged_once_and_is_no_failure(clock, states, caplog):
    line, heart = Line(), HeartbeatSender("a", HERE, inside=True)
    state = ExchangeState(ThreadStore(), 0, 2, RankLocation("b"), Settings(), JOB_STORE_TEXTS)
    state.client.close()
    state.detector, state.phase, state.call = watch_of(line, witness_at(HERE)), "write", "save"
    line.send(heart)
    states[1, 10, 0] = "running"
    for _ in range(10):
        state.detector.read_heartbeats([1])
        assert state.failed_ranks([1]) == {}
        clock.now += 4
    text = "rank 1 (host a) is alive, but has not run Python for 20 s (seen by rank 0 in phase "
    assert [message.partition("'write'")[0] for message in caplog.messages] == [text]
    assert caplog.messages[0].endswith("; the limit is 300 s")


def test_a_witness_ignores_what_is_no_question(states):
    line, witness = Line(), witness_at(THERE)
    witness(line.store)
    client_thread.put(line.store, "1/ask/there", b"nonsense")
    witness(line.store)
    assert line.store.keys() == ("1/ask/there",)


def test_ranks_that_ask_for_several_processes_of_a_machine_all_get_an_answer(clock, states):
    line, other = Line(), witness_at(THERE)
    watches = [watch_of(line, witness_at(HERE)) for _ in range(2)]
    for rank in (1, 2):
        states[rank, 20, 0] = "running"
        line.send(HeartbeatSender("a", ProcessId("there", rank, 20), inside=True), rank)
    for _ in range(12):
        for watch, rank in zip(watches, (1, 2), strict=True):
            watch.read_heartbeats([rank])
            assert watch.find_loss(rank, 0, was_in=False) is None
        other(line.store)
        clock.now += 4
    assert all(watch.find_lateness(rank) for watch, rank in zip(watches, (1, 2), strict=True))


# --- what the kernel of another host answers ------------------------------------------------------


def watch_a_lone_rank() -> tuple[Line, FailureDetector]:
    """Return a detector that has seen one heartbeat of a rank, which is alone on its machine."""
    line = Line()
    watch = watch_of(line, witness_at(HERE))
    line.send(HeartbeatSender("a", THERE, address="there:1", inside=True))
    assert loss_of(watch) is None
    return line, watch


def test_a_rank_without_a_witness_whose_port_answers_is_late_up_to_the_limit(clock, states, ports):
    line, watch = watch_a_lone_rank()
    ports["there:1"] = True
    losses = [pass_time(clock, watch, line, None) for _ in range(4, LATE_S, 4)]
    assert {*losses} == {None}
    assert watch.find_lateness(1) == "is alive, but has not run Python for 296 s"
    assert "has not run Python for 300 s" in str(pass_time(clock, watch, line, None))


@pytest.mark.parametrize("seconds", [8, 40])
def test_a_rank_whose_port_is_closed_is_dead_after_the_silence(seconds, clock, states, ports):
    line, watch = watch_a_lone_rank()
    ports["there:1"] = True
    assert {pass_time(clock, watch, line, None) for _ in range(0, seconds, 4)} == {None}
    ports["there:1"] = False
    losses = [pass_time(clock, watch, line, None) for _ in range(seconds, max(20, seconds + 4), 4)]
    assert {*losses[:-1]} <= {None}
    assert "its port is closed: it has ended, or is cut off" in str(losses[-1])


def test_a_host_that_is_lost_after_its_port_has_answered_is_dead_after_the_silence(
    clock, states, ports
):
    line, watch = watch_a_lone_rank()
    ports["there:1"] = True
    assert {pass_time(clock, watch, line, None) for _ in range(10)} == {None}
    del ports["there:1"]
    losses = [pass_time(clock, watch, line, None) for _ in range(5)]
    assert losses == [None] * 4 + ["is dead or frozen: no heartbeat for 20 s"]


@pytest.mark.parametrize("state", ["blocked", "ending"])
def test_the_port_of_a_process_that_a_witness_has_seen_to_end_is_no_sign_of_life(
    state, clock, states, ports
):
    (line, watch), other = watch_a_lone_rank(), witness_at(THERE)
    states[2, 20, 0], ports["there:1"] = state, True
    losses = [pass_time(clock, watch, line, other) for _ in range(5)]
    assert losses[:-1] == [None] * 4
    assert "is dead or frozen" in str(losses[-1])


def test_while_a_witness_looks_the_port_is_not_asked(clock, states, ports):
    """A process that is stopped has an open port."""
    (line, watch), other = watch_a_lone_rank(), witness_at(THERE)
    states[2, 20, 0], ports["there:1"] = "stopped", True
    assert [pass_time(clock, watch, line, other) for _ in range(10)] == [None] * 10
    assert watch.find_lateness(1) == "is stopped, and has not run Python for 40 s"


def test_the_port_of_a_process_that_hung_when_it_was_last_seen_is_not_asked(clock, states, ports):
    (line, watch), other = watch_a_lone_rank(), witness_at(THERE)
    states[2, 20, 0], ports["there:1"] = "running", True
    assert [pass_time(clock, watch, line, other) for _ in range(10)] == [None] * 10
    states[2, 20, 0] = "blocked"
    losses = [pass_time(clock, watch, line, other) for _ in range(2)]
    losses += [pass_time(clock, watch, line, None) for _ in range(5)]
    assert "in a call of the kernel that does not return" in str(losses[-1])


def test_more_late_ranks_than_are_looked_at_together_are_all_waited_for(clock, ports):
    line, ranks = Line(), range(1, 500)
    watch = watch_of(line, witness_at(HERE))
    for rank in ranks:
        heart = HeartbeatSender(
            "a", ProcessId(f"host {rank}", 2, 20), address=f"there:{rank}", inside=True
        )
        line.send(heart, rank)
        ports[f"there:{rank}"] = True
    for clock.now in range(0, 2 * SILENCE_S, 4):
        watch.read_heartbeats(ranks)
    assert {watch.find_loss(rank, 0, was_in=False) for rank in ranks} == {None}


def test_a_firewall_that_refuses_is_no_death_while_a_witness_sees_the_process(clock, states, ports):
    (line, watch), other = watch_a_lone_rank(), witness_at(THERE)
    states[2, 20, 0], ports["there:1"] = "running", False
    for seconds in range(4, 80, 4):  # the witness answers once in a while
        answers = other if seconds % 16 == 12 else None
        assert pass_time(clock, watch, line, answers) is None


# --- what a rank shows of itself ------------------------------------------------------------------


class HeldStore(ThreadStore):
    """A store that takes a value when it `may`, or refuses all."""

    def __init__(self) -> None:
        super().__init__()
        self.may, self.is_lost = threading.Event(), False

    def set(self, key: str, value: bytes, /) -> None:
        assert self.may.wait(HANG_S)
        if self.is_lost:
            raise ConnectionError("Broken pipe")
        super().set(key, value)


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_a_rank_shows_that_its_store_does_not_answer_and_that_it_is_lost() -> None:
    store, heart, own = HeldStore(), HeartbeatSender("a", key="1"), find_process(os.getpid())
    assert own is not None
    client = StoreClientThread(store, heart, period_s=0.001, stall_timeout_s=0.2)

    def await_state(expected: str) -> None:
        until = time.monotonic() + HANG_S
        while not heart.thread or find_state(own.pid, own.started, heart.thread) != expected:
            assert time.monotonic() < until
            time.sleep(0.001)

    client.send_heartbeat()
    await_state("cut off")
    store.may.set()
    await_state("running")
    store.is_lost = True
    await_state("cut off")
    client.close()
