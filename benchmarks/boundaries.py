"""What a boundary of a run costs: when nothing is due, and when one rank asks for a save.

Ranks are processes forked from this one, with steps that only sleep and a connection each to one
TCPStore: what they wait for is real, but they share the processors of one machine.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from statistics import median, quantiles

import torch
from torch.distributed import PrefixStore, TCPStore

import dist_ckpt as dc
from benchmarks.scenario import OURS, Figure, Measure, Scenario, Settings
from dist_ckpt.checkpointer.barrier_rounds import (
    BarrierMember,
    BarrierProposal,
    BarrierRounds,
    PollPolicy,
)
from dist_ckpt.core.comm.exchange.store_channel import StoreNotes
from dist_ckpt.core.comm.key_value.client_thread import StoreClientThread
from dist_ckpt.core.comm.rank_messages import HeartbeatSender

STEP_S = 0.01
SLOW_S = 0.1
DEADLINE_S = 300.0


def scenarios() -> list[Scenario]:
    """Return what this module measures."""
    return [Scenario("boundaries", "a boundary: nothing due, and a request to save", _measure)]


def _measure(settings: Settings) -> Iterator[Measure]:
    if settings.measures("idle"):
        yield Measure(
            "boundaries", "idle", "a boundary at which nothing is due", tuple(_idle(settings))
        )
    if settings.measures("request"):
        yield Measure(
            "boundaries", "request", "a request to save, of one rank", tuple(_requests(settings))
        )


def _idle(settings: Settings) -> Iterator[Figure]:
    """Yield what `step` takes when nothing is due, beside a lock that is taken and left."""
    state = {"w": torch.zeros(3)}
    count = 20_000 if settings.quick else 200_000
    lock = threading.Lock()
    policies = dc.every(steps=10 * count * settings.rounds) | dc.every(minutes=600)
    with dc.Checkpointer(settings.folder / "run", save=policies, background=False) as ck:
        ck.restore(state)
        ours, raw, number = [], [], 0
        for _ in range(settings.rounds + 1):
            began = time.perf_counter()
            for _ in range(count):
                with lock:
                    pass
            raw.append((time.perf_counter() - began) / count)
            began = time.perf_counter()
            for _ in range(count):
                number += 1
                ck.step(number)
            ours.append((time.perf_counter() - began) / count)
    for name, seconds, what in ((OURS, ours, "step(n)"), ("a lock", raw, "taken and left")):
        facts = {"us each": 1e6 * median(seconds[1:])}
        yield Figure(name, tuple(seconds[1:]), facts, note=what)


def _requests(settings: Settings) -> Iterator[Figure]:
    """Yield how long one request holds the training of some rank, at most, and until it is met."""
    count = 3 if settings.quick else 40
    for world_size, slow_s in ((2, 0.0), (16, 0.0), (64, 0.0), (16, SLOW_S)):
        held, met = _hold(world_size, slow_s, count)
        facts = {
            "ms held p50": 1e3 * _percentile(held, 50),
            "ms held p99": 1e3 * _percentile(held, 99),
            "ms until p50": 1e3 * _percentile(met, 50),
            "ms until p99": 1e3 * _percentile(met, 99),
        }
        slow = f", a store that takes {SLOW_S:g} s" if slow_s else ""
        yield Figure(f"{world_size} ranks{slow}", tuple(held), facts)


def _percentile(values: list[float], percent: int) -> float:
    return quantiles(values, n=100, method="inclusive")[percent - 1]


class _SlowStore:
    """A store each call of which takes so much longer."""

    def __init__(self, store: PrefixStore, seconds: float) -> None:
        self._store = store
        self._seconds = seconds

    def __getattr__(self, name: str) -> Callable[..., object]:
        call: Callable[..., object] = getattr(self._store, name)

        def slow(*args: object) -> object:
            time.sleep(self._seconds)
            return call(*args)

        return slow


def _hold(world_size: int, slow_s: float, count: int) -> tuple[list[float], list[float]]:
    """Return for each request the longest time that a rank stood still, and when it was met."""
    context = multiprocessing.get_context("fork")
    links = []
    for rank in range(world_size):
        own, others = context.Pipe()
        job = _Job(rank, world_size, slow_s, count)
        context.Process(target=job.run, args=(others,), daemon=True).start()
        links.append(own)
    # Only now: its threads would not live in a fork.
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    _answers(links, server.port)
    told = _answers(links, "begin")  # all at once: who is behind would be waited for
    held = [max(own) for own in zip(*(held for held, _ in told), strict=True)]
    for link in links:
        link.send(None)
    return held, told[-1][1]


def _answers(links: Sequence[Connection], what: object) -> list[tuple[list[float], list[float]]]:
    """Send something to all ranks; return what each answers."""
    for link in links:
        link.send(what)
    for rank, link in enumerate(links):
        if not link.poll(DEADLINE_S):
            raise TimeoutError(f"rank {rank} has not answered in {DEADLINE_S:g} s")
    return [link.recv() for link in links]


@dataclass(frozen=True)
class _Job:
    """One rank: the last one asks."""

    rank: int
    world_size: int
    slow_s: float
    count: int

    def run(self, link: Connection) -> None:
        """Train until all requests are met; send how long each held this rank, and took."""
        client = TCPStore("127.0.0.1", link.recv(), timeout=timedelta(seconds=60))
        store = PrefixStore("boundaries", client)
        line = StoreClientThread(
            _SlowStore(store, self.slow_s) if self.slow_s else store,  # type: ignore[arg-type]
            HeartbeatSender("here"),
            period_s=600.0,
            stall_timeout_s=60.0,
        )
        store.check(["connected"])
        link.send(None)
        link.recv()
        is_asker = self.rank == self.world_size - 1
        ask_at, wanted = [time.perf_counter() + 1.0], BarrierProposal(self.rank, "USR1")

        def wants() -> BarrierProposal | None:
            return wanted if is_asker and time.perf_counter() >= ask_at[0] else None

        member, pacing = (
            BarrierMember("start", self.rank, self.world_size),
            PollPolicy.of(self.world_size),
        )
        rounds = BarrierRounds(StoreNotes(line), member, wants, lambda _: None, pacing)
        held: list[float] = []
        met: list[float] = []
        longest = 0.0
        while len(held) < self.count:
            time.sleep(STEP_S)
            began = time.perf_counter()
            boundary = rounds.arrive("step")
            longest = max(longest, time.perf_counter() - began)
            if boundary is not None:
                met.append(time.perf_counter() - ask_at[0])
                ask_at[0] = time.perf_counter() + 0.5 + 0.1 * (len(met) % 5)
                rounds.leave()
                held.append(longest)
                longest = 0.0
        link.send((held, met))
        link.recv()  # until all have ended: who closes ends the rounds of all
