"""What one rank makes of its gloo connections; between real ranks see test_channel_real.py."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch.distributed")

from torch.distributed import HashStore, PrefixStore

from dist_ckpt.core.comm.collectives import gloo
from dist_ckpt.core.comm.collectives.gloo import GlooCollective
from dist_ckpt.core.comm.exchange.failure_detector import PollInterval
from dist_ckpt.core.comm.rank_messages import SecondaryError
from dist_ckpt.errors import RankError
from dist_ckpt.settings import Settings
from dist_ckpt.testing.thread_channel import ThreadChannel, ThreadCollective, ThreadStore
from exchanges import HANG_S, exchange
from ranks import run_ranks


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (RuntimeError("reset"), SecondaryError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (MemoryError(), MemoryError),
    ],
)
def test_connections_that_were_left_in_mid_collective_are_made_anew(error, raised, monkeypatch):
    channel = ThreadChannel(ThreadStore(), 0, 1)
    collective = GlooCollective(lambda _: HashStore(), channel, Settings())
    channel.enter("save")

    def interrupt(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(collective, "_send", interrupt)
        with pytest.raises(raised):
            collective.broadcast(b"data")
    assert collective.generation == 1
    assert collective.broadcast(b"data") == b"data"
    assert collective.generation == 1


def test_connections_that_could_not_be_made_are_made_anew(monkeypatch):
    channel = ThreadChannel(ThreadStore(), 0, 1)
    collective = GlooCollective(lambda _: HashStore(), channel, Settings())
    channel.enter("save")
    with monkeypatch.context() as patch:
        patch.setattr(gloo._Rendezvous, "set", fail)
        with pytest.raises(SecondaryError, match="no address"):
            collective.broadcast(b"data")
    assert collective.generation == 1
    assert collective.broadcast(b"data") == b"data"


def fail(*_: Any) -> None:
    raise RuntimeError("no address")


# How long each rank, by the name of its thread, has waited in its collective.
WAITED_S: dict[str, float] = {}


class PollAtOnce(PollInterval):
    """Looks at the other ranks each time. The time is what the test says."""

    def is_look_due(self) -> bool:
        return True

    @property
    def waited_s(self) -> float:
        return WAITED_S.get(threading.current_thread().name, 0.0)


# With these, ranks that are all there wait for 25 s.
SETTINGS = Settings()
LONG_S, TOO_LONG_S = 30.0, 60.0

Part = Callable[[GlooCollective], bytes]


def broadcast_over_gloo(monkeypatch: pytest.MonkeyPatch, sender: Part, receiver: Part) -> Any:
    """Connect two ranks that are threads, and let each do its part of a broadcast."""
    monkeypatch.setattr(gloo, "PollInterval", PollAtOnce)
    store = HashStore()

    def run(rank: int, channel: ThreadChannel, _: ThreadCollective) -> bytes:
        WAITED_S[f"rank {rank}"] = 0.0
        collective = GlooCollective(lambda name: PrefixStore(name, store), channel, SETTINGS)
        channel.enter("save")
        exchange(channel, "agree", int, len)
        assert exchange(channel, "connect", lambda: collective.broadcast(b"one"), min) == b"one"
        part = receiver if rank else sender
        return bytes(exchange(channel, "plan", lambda: part(collective), lambda parts: parts[1]))

    return run_ranks(run, world_size=2, harness="threads", config=SETTINGS)


def see(collective: GlooCollective, seen: list[str], act: Callable[[str], None]) -> bytes:
    """Receive a broadcast, and act on each new step that rank 0 shows meanwhile."""
    original = collective._read_shown

    def read_shown(rank: int) -> str:
        if (step := original(rank)) not in seen:
            seen.append(step)
            act(step)
        return step

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collective, "_read_shown", read_shown)
        return collective.broadcast(None)


def test_ranks_that_all_wait_for_data_break_off(monkeypatch):
    def send_nothing(collective: GlooCollective) -> bytes:
        WAITED_S["rank 0"] = LONG_S
        try:
            collective._wait_until(lambda: False)
        except RuntimeError as error:
            raise SecondaryError(str(error)) from error
        raise AssertionError

    def receive(collective: GlooCollective) -> bytes:
        WAITED_S["rank 1"] = LONG_S
        return collective.broadcast(None)

    with pytest.raises(RankError, match="data between ranks does not arrive for 25 s"):
        broadcast_over_gloo(monkeypatch, send_nothing, receive)


@pytest.mark.parametrize("is_sent", [True, False])
def test_a_rank_that_comes_late_has_as_long_as_the_others(is_sent, monkeypatch):
    """Rank 0 has done its part, and its data is on its way to rank 1, who has waited long."""
    is_missed, is_shown = threading.Event(), threading.Event()
    steps: list[str] = []

    def send(collective: GlooCollective) -> bytes:
        assert is_missed.wait(HANG_S)
        collective._show(f"{collective._num_steps + 1:09}.")
        assert is_shown.wait(HANG_S)
        return collective.broadcast(b"two") if is_sent else b""

    def act(step: str) -> None:
        if step == steps[0]:
            is_missed.set()
            return
        is_shown.set()

    def look(_: PollInterval) -> bool:
        if is_shown.is_set() and not is_sent:
            WAITED_S["rank 1"] = TOO_LONG_S
        return True

    def receive(collective: GlooCollective) -> bytes:
        WAITED_S["rank 1"] = LONG_S
        return see(collective, steps, act)

    monkeypatch.setattr(PollAtOnce, "is_look_due", look)
    if is_sent:
        assert broadcast_over_gloo(monkeypatch, send, receive) == [b"two"] * 2
    else:
        with pytest.raises(RankError, match="data between ranks does not arrive for 25 s"):
            broadcast_over_gloo(monkeypatch, send, receive)
