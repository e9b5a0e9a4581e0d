"""How one rank of a load reads what it has checked, alone or with others."""

from __future__ import annotations

from collections.abc import Collection

from dist_ckpt.comm.session import Session
from dist_ckpt.errors import CorruptError
from dist_ckpt.loading.check import Checked
from dist_ckpt.loading.read_once import read_shared, verify_shared
from dist_ckpt.loading.read_once_agreement import Agreement
from dist_ckpt.shard_io.block_reader import Nowhere, Reading, ReadTotals, read_into, reading_of
from dist_ckpt.shard_io.reading_work import CellTargets


class RankReading:
    """One rank's reading; `shared` is None if it reads alone.

    `filled` are the tensors of the index that may hold something of what is read.
    """

    def __init__(
        self, ranks: Session, checked: Checked, targets: CellTargets, shared: Agreement | None
    ) -> None:
        self.filled: Collection[str] = ()
        self._ranks = ranks
        self._checked = checked
        self._targets = targets
        self._shared = shared

    def verify(self) -> None:
        """Check every block that will be read, without touching anything."""
        checked, ranks, nowhere = self._checked, self._ranks, Nowhere()
        targets = {
            (wanted.fqn, part): nowhere
            for wanted in checked.binding.wanted
            for part in range(len(wanted.cells))
        }
        reading = self._reading(targets, verify=True)
        if self._shared is None:
            read_into(reading, checked.files, checked.plan, threads=ranks.config.threads)
        else:
            verify_shared(ranks, self._shared, checked.files, checked.plan, reading)

    def read(self, *, verify: bool) -> ReadTotals:
        """Fill the targets. Raises CorruptError, whose `touched` are names of the state."""
        checked, ranks, shared = self._checked, self._ranks, self._shared
        reading = self._reading(self._targets, verify=verify)
        try:
            if shared is None:
                threads = ranks.config.threads
                totals = read_into(reading, checked.files, checked.plan, threads=threads)
            else:
                totals = read_shared(ranks, shared, checked.files, checked.plan, reading)
        except BaseException as error:
            if shared is not None:
                shared.give_up()
            if isinstance(error, CorruptError):
                error.touched = checked.names_of(error.touched)
            raise
        finally:
            # If the error is another rank's, who learns it does not know what is filled here.
            self.filled = reading.touched
        checked.binding.settle()
        return totals

    def _reading(self, targets: CellTargets, *, verify: bool) -> Reading:
        checked, slots = self._checked, self._ranks.slots
        return reading_of(checked.files, checked.plan, targets, verify=verify, slots=slots)
