"""What this rank asks all others for: a save that no step policy calls for, or an end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from dist_ckpt.checkpointer.keeper import Keeper
from dist_ckpt.checkpointer.rounds import COORDINATOR, Ask
from dist_ckpt.checkpointer.signals import Signals
from dist_ckpt.checkpointer.when import When


@dataclass
class SaveRequests:
    """One rank's requests: signals on any rank, on rank 0 its clock and saves that have failed.

    Called in the thread of the rounds; waits for nothing.
    """

    rank: int
    save: When
    signals: Signals
    keeper: Keeper | None = None
    saved_at: float = field(default_factory=time.monotonic)

    def __call__(self) -> Ask | None:
        """Return what is asked for now."""
        if self.signals.got is not None:
            return Ask(self.rank, f"{self.signals.got} on rank {self.rank}", stops=True)
        if self.keeper is not None and (ask := self.keeper.wants()) is not None:
            return ask
        is_time = self.save.is_time(time.monotonic() - self.saved_at)
        return Ask(self.rank, "the time") if self.rank == COORDINATOR and is_time else None

    def served(self, ask: Ask | None) -> None:
        """Take what was asked for as done, and count the time from now."""
        self.saved_at = time.monotonic()
        if ask is None:
            return
        if ask.stops:
            self.signals.forget()
        if self.keeper is not None:
            self.keeper.served(ask)
