"""Heartbeats: the messages of a rank that `failure_detector.py` watches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from dist_ckpt.core.runtime.typed_msgpack import Message, encode

_Count = Annotated[int, Meta(ge=0)]


class Heartbeat(Message, frozen=True):
    """One heartbeat: `count` grows with each; `number` is the last operation that was entered.

    `inside`: the rank has not left it yet. `failed_turn`: the exchange in it, counted from 1, whose
    failure the rank received last; 0 if none. `gone`: the rank has closed its channel.
    """

    count: _Count
    number: _Count
    inside: bool
    failed_turn: _Count
    gone: bool
    host: str


@dataclass(slots=True)
class HeartbeatSender:
    """The content of this rank's next heartbeat; the channel sets it, its thread sends it.

    `key` is where heartbeats are stored; none is sent while it is "".
    """

    host: str
    key: str = ""
    number: int = 0
    inside: bool = False
    failed_turn: int = 0
    gone: bool = False
    _count: int = 0

    def beat(self) -> bytes:
        """Return the next heartbeat."""
        self._count += 1
        number, inside, failed_turn = self.number, self.inside, self.failed_turn
        return encode(Heartbeat(self._count, number, inside, failed_turn, self.gone, self.host))
