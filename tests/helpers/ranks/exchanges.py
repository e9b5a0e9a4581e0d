"""An exchange in one call, for tests of what carries it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dist_ckpt.core.comm.exchange.channel import Channel

# Only a hang waits for so long.
HANG_S = 55.0

# What one rank tells the others: here any plain data.
Doc = Any


def exchange(
    channel: Channel, phase: str, work: Callable[[], Doc], decide: Callable[[Sequence[Doc]], Doc]
) -> Doc:
    """Return what is decided on what the ranks' work returns."""
    with channel.exchange(phase) as one:
        gathered = one.gather([work()])
        if gathered is not None:
            one.decide([decide([own for (own,) in gathered])])
    return one.result(list)[0]
