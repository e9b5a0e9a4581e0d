"""Heartbeats: what a rank sends; `failure_detector.py` is what an observer makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from dist_ckpt.core.runtime.typed_msgpack import Message, encode

_Count = Annotated[int, Meta(ge=0)]


class Heartbeat(Message, frozen=True):
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


@dataclass(slots=True)
class HeartbeatSender:
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
        return encode(Heartbeat(self._count, number, inside, told, self.gone, self.host))
