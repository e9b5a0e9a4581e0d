"""Heartbeats: what a rank tells about itself, and what an observer makes of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import msgpack


@dataclass(frozen=True, slots=True)
class Beat:
    """One heartbeat: `count` grows with each; `number` is the last operation that was entered.

    `inside`: the rank has not left it yet. `gone`: it has closed its channel.
    """

    count: int
    number: int
    inside: bool
    gone: bool
    host: str

    def encode(self) -> bytes:
        """Return the beat as bytes."""
        data: bytes = msgpack.packb([self.count, self.number, self.inside, self.gone, self.host])
        return data

    @staticmethod
    def decode(data: bytes) -> Beat:
        """Return the beat that `encode` made these bytes of."""
        return Beat(*msgpack.unpackb(data))


@dataclass(slots=True)
class Heart:
    """What this rank's next heartbeat will say; its channel sets it, its thread beats it.

    `key` is where beats are stored; while it is "" the heart does not beat.
    """

    host: str
    key: str = ""
    number: int = 0
    inside: bool = False
    gone: bool = False
    _count: int = 0

    def beat(self) -> bytes:
        """Return the next heartbeat."""
        self._count += 1
        return Beat(self._count, self.number, self.inside, self.gone, self.host).encode()


@dataclass(slots=True)
class _Pulse:
    data: bytes
    beat: Beat
    seen_at: float
    silent_s: float = 0.0


@dataclass(slots=True)
class Pulses:
    """What an observer has seen of other ranks' heartbeats, by its own clock.

    Silence counts only while the observer looks, at most `step_s` for each look: a rank is not
    dead because the observer itself, or the whole machine, was stopped for a while.
    """

    step_s: float
    _pulses: dict[int, _Pulse] = field(default_factory=dict)

    def see(self, rank: int, data: bytes | None) -> None:
        """Take note of what a rank's heartbeat is now; None: it has not been seen yet."""
        if data is None:
            return
        now = time.monotonic()
        pulse = self._pulses.get(rank)
        if pulse is None or pulse.data != data:
            self._pulses[rank] = _Pulse(data, Beat.decode(data), now)
            return
        pulse.silent_s += min(now - pulse.seen_at, self.step_s)
        pulse.seen_at = now

    def beat(self, rank: int) -> Beat | None:
        """Return the last heartbeat seen of a rank."""
        pulse = self._pulses.get(rank)
        return pulse.beat if pulse else None

    def silent_s(self, rank: int) -> float:
        """Return for how long a rank's heartbeat has not changed."""
        pulse = self._pulses.get(rank)
        return pulse.silent_s if pulse else 0.0
