"""What this rank asks all others for: a save that no step policy calls for, or an end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from dist_ckpt.checkpointer.coordination.barrier_rounds import BarrierProposal
from dist_ckpt.checkpointer.coordination.external_requests import ExternalRequests
from dist_ckpt.checkpointer.coordination.signals import Signals
from dist_ckpt.checkpointer.maintenance import MaintenanceThread
from dist_ckpt.checkpointer.save_policy import SavePolicy
from dist_ckpt.core.comm.exchange.channel import COORDINATOR


@dataclass
class RankRequests:
    """One rank's requests: signals on any rank; on rank 0 also what only that knows.

    That is its clock, saves that have failed, and what other processes ask for.
    Called in the thread of the rounds; waits for nothing.
    """

    rank: int
    save: SavePolicy
    signals: Signals
    keeper: MaintenanceThread | None = None
    outside: ExternalRequests | None = None
    saved_at: float = field(default_factory=time.monotonic)

    def __call__(self) -> BarrierProposal | None:
        """Return what is asked for now."""
        if self.signals.got is not None:
            why = f"{self.signals.got} on rank {self.rank}"
            waited_s = time.monotonic() - self.signals.got_at
            return BarrierProposal(self.rank, why, stops=True, waited_s=waited_s)
        if self.keeper is not None and (ask := self.keeper.wants()) is not None:
            return ask
        if self.outside is not None and (ask := self.outside.wants()) is not None:
            return ask
        is_time = self.save.is_time(time.monotonic() - self.saved_at)
        return (
            BarrierProposal(self.rank, "the time") if self.rank == COORDINATOR and is_time else None
        )

    def taken(self, step: int, *, is_last: bool) -> None:
        """Take it as said that this step is saved, or begun to be; `is_last`: the run ends then."""
        if self.outside is not None:
            self.outside.taken(step, is_last=is_last)

    def served(self, ask: BarrierProposal | None) -> None:
        """Take what was asked for as done, and count the time from now."""
        self.saved_at = time.monotonic()
        if ask is None:
            return
        if ask.stops:
            self.signals.forget()
        if self.keeper is not None:
            self.keeper.served(ask)
