"""Signals that ask a run to save: a handler only sets a flag, and others' handlers go on."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from msgspec.structs import replace

import dist_ckpt as dc
from dist_ckpt.checkpointer import rank_requests
from dist_ckpt.checkpointer.barrier_rounds import BarrierProposal
from dist_ckpt.checkpointer.rank_requests import RankRequests
from dist_ckpt.checkpointer.signals import Signals


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Put back what was there."""
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_a_signal_sets_a_flag_until_it_is_taken_as_done() -> None:
    """Lightning #21406: who saves inside the handler dies of it."""
    signals = Signals(("USR1", "USR2"))
    assert signals.received is None
    send(signal.SIGUSR2)
    send(signal.SIGUSR1)
    assert signals.received == "SIGUSR2"  # the first
    signals.received = None
    assert signals.received is None
    signals.close()


def test_a_handler_that_was_there_is_called_as_well_and_put_back() -> None:
    seen: list[int] = []

    def own(number: int, _: object) -> None:
        seen.append(number)

    signal.signal(signal.SIGUSR1, own)
    signals = Signals(("USR1",))
    send(signal.SIGUSR1)
    assert (signals.received, seen) == ("SIGUSR1", [signal.SIGUSR1])
    signals.close()
    assert signal.getsignal(signal.SIGUSR1) is own


def test_a_handler_that_was_set_since_stays() -> None:
    signals = Signals(("USR1",))
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signals.close()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN


def test_what_was_ignored_is_ignored_again() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signals = Signals(("USR1",))
    send(signal.SIGUSR1)
    assert signals.received == "SIGUSR1"
    signals.close()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN


def test_ctrl_c_that_is_a_request_raises_nothing() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    signals = Signals(("INT",))
    try:
        send(signal.SIGINT)
        assert signals.received == "SIGINT"
    finally:
        signals.close()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, before)


def ended_by(number: int) -> int:
    """Return the signal that ends a process which let go of its handlers in another thread."""
    if (pid := os.fork()) == 0:
        with suppress(BaseException):
            signal.signal(number, signal.SIG_DFL)
            signals = Signals((signal.Signals(number).name.removeprefix("SIG"),))
            other = threading.Thread(target=signals.drop)
            other.start()
            other.join()
            send(number)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_what_was_let_go_of_in_another_thread_swallows_nothing() -> None:
    """A handler can be put back in the main thread only."""
    assert ended_by(signal.SIGTERM) == -signal.SIGTERM


def test_a_forked_child_has_what_was_there_before() -> None:
    """EgoVerse #621: workers of data loaders inherited the handlers, and ignored their end."""
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    signals = Signals(("USR1",))
    if (pid := os.fork()) == 0:
        with suppress(BaseException):
            send(signal.SIGUSR1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGUSR1
    assert signals.received is None
    signals.close()


def test_a_signal_at_once_after_a_fork_ends_the_child() -> None:
    """Else `start()`, `terminate()` and `join()` of a worker hang."""
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    signals = Signals(("USR1",))
    ends = []
    for _ in range(20):
        if (pid := os.fork()) == 0:
            with suppress(BaseException):
                time.sleep(1)
            os._exit(0)
        os.kill(pid, signal.SIGUSR1)
        ends.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    assert ends == [-signal.SIGUSR1] * 20
    send(signal.SIGUSR1)  # here it still comes
    assert signals.received == "SIGUSR1"
    signals.close()


def test_outside_of_the_main_thread_there_are_none() -> None:
    told: list[str] = []

    def make() -> None:
        Signals(()).close()
        try:
            Signals(("USR1",))
        except ValueError as error:
            told.append(str(error))

    other = threading.Thread(target=make)
    other.start()
    other.join()
    assert "needs the main thread" in told[0]
    assert "leave on_signal() out" in told[0]


@pytest.mark.parametrize("name", ["KILL", "STOP", "SIGKILL"])
def test_a_signal_that_cannot_be_caught_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="this signal cannot be a request to save; use TERM"):
        dc.on_signal(name)


# --- what is asked for ----------------------------------------------------------------------------


class Clock:
    """Stands in for `time`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        """Return the time that the test says."""
        return self.now


def test_minutes_are_counted_on_rank_0_from_the_last_save(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, signals = Clock(), Signals(())
    monkeypatch.setattr(rank_requests, "time", clock)
    first, other = (
        RankRequests(rank, dc.every(minutes=10), signals, saved_at=clock.now) for rank in (0, 1)
    )
    clock.now += 599
    assert first() is None
    clock.now += 1
    assert first() == BarrierProposal(0, "the time")
    assert other() is None
    first.finish(None)  # a save by steps counts as well
    assert first() is None
    clock.now += 600
    assert first() is not None


def test_a_signal_is_asked_for_until_the_run_has_stopped() -> None:
    signals = Signals(("USR1",))
    wants = RankRequests(1, dc.on_signal("USR1"), signals)
    send(signal.SIGUSR1)
    ask = wants()
    assert ask is not None
    assert replace(ask, waited_s=0.0) == BarrierProposal(1, "SIGUSR1 on rank 1", stops=True)
    wants.finish(None)
    wants.finish(BarrierProposal(0, "the time"))
    later = wants()
    assert later is not None
    assert later.waited_s > ask.waited_s >= 0  # the time to stop is counted from the signal on
    assert replace(later, waited_s=ask.waited_s) == ask
    wants.finish(ask)
    assert wants() is None
    signals.close()
