"""Heartbeats: what a rank tells about itself, and what an observer makes of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from dist_ckpt.format import typed_msgpack
from dist_ckpt.format.typed_msgpack import Message

_Count = Annotated[int, Meta(ge=0)]


class Beat(Message, frozen=True):
    """One heartbeat: `count` grows with each; `number` is the last operation that was entered.

    `inside`: the rank has not left it yet. `told`: the exchange of it, counted from 1, of whose
    failure the rank was told last; 0 if it was told of none. `gone`: it has closed its channel.
    """

    count: _Count
    number: _Count
    inside: bool
    told: _Count
    gone: bool
    host: str

    def encode(self) -> bytes:
        """Return the beat as bytes."""
        return typed_msgpack.encode(self)

    @staticmethod
    def decode(data: bytes) -> Beat:
        """Return the beat that `encode` made these bytes of. ValueError for any others."""
        return typed_msgpack.decode(data, Beat)


@dataclass(slots=True)
class Heart:
    """What this rank's next heartbeat will say; its channel sets it, its thread beats it.

    `key` is where beats are stored; while it is "" the heart does not beat.
    """

    host: str
    key: str = ""
    number: int = 0
    inside: bool = False
    told: int = 0
    gone: bool = False
    _count: int = 0

    def beat(self) -> bytes:
        """Return the next heartbeat."""
        self._count += 1
        number, inside, told = self.number, self.inside, self.told
        return Beat(self._count, number, inside, told, self.gone, self.host).encode()


@dataclass(slots=True)
class _Pulse:
    data: bytes
    beat: Beat | None
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
            self._pulses[rank] = _Pulse(data, _beat_in(data), now)
            return
        pulse.silent_s += min(now - pulse.seen_at, self.step_s)
        pulse.seen_at = now

    def beat(self, rank: int) -> Beat | None:
        """Return the last heartbeat seen of a rank; None as well if it is none of ours."""
        pulse = self._pulses.get(rank)
        return pulse.beat if pulse else None

    def is_strange(self, rank: int) -> bool:
        """Say whether what is there for a rank is no heartbeat of ours."""
        pulse = self._pulses.get(rank)
        return pulse is not None and pulse.beat is None

    def silent_s(self, rank: int) -> float:
        """Return for how long a rank's heartbeat has not changed."""
        pulse = self._pulses.get(rank)
        return pulse.silent_s if pulse else 0.0


def _beat_in(data: bytes) -> Beat | None:
    try:
        return Beat.decode(data)
    except ValueError:
        return None
