"""How one rank of a load reads what it has checked, alone or with others."""

from __future__ import annotations

from collections.abc import Collection

from dist_ckpt.comm.session import Session
from dist_ckpt.errors import CorruptError
from dist_ckpt.loading.check import Checked, Destinations
from dist_ckpt.loading.read_once import read_shared, verify_shared
from dist_ckpt.loading.read_once_agreement import Agreement
from dist_ckpt.shard_io.block_reader import Nowhere, Reading, ReadTotals, read, reading_of


class RankReading:
    """One rank's reading; `shared` is None if it reads alone.

    `filled` are the tensors of the index that may hold something of what is read.
    """

    def __init__(
        self, ranks: Session, checked: Checked, targets: Destinations, shared: Agreement | None
    ) -> None:
        self.filled: Collection[str] = ()
        self._ranks = ranks
        self._checked = checked
        self._targets = targets
        self._shared = shared

    def verify(self) -> None:
        """Check every block that will be read, without touching anything."""
        nowhere, checked = Nowhere(), self._checked
        targets = {
            (wanted.fqn, part): nowhere
            for wanted in checked.binding.wanted
            for part in range(len(wanted.cells))
        }
        if self._shared is None:
            self._read_alone(targets, verify=True)
            return
        reading = self._shared_reading(targets, verify=True)
        verify_shared(self._ranks, self._shared, checked.files, checked.plan, reading)

    def read(self, *, verify: bool) -> ReadTotals:
        """Fill the targets. Raises CorruptError, whose `touched` are names of the state."""
        binding = self._checked.binding
        try:
            if self._shared is None:
                totals = self._read_alone(self._targets, verify=verify)
            else:
                totals = self._read_shared(self._shared, verify=verify)
        except CorruptError as error:
            error.touched = self._checked.names_of(error.touched)
            raise
        self.filled = {wanted.fqn for wanted in binding.wanted if wanted.cells}
        binding.settle()
        return totals

    def _read_alone(self, targets: Destinations, *, verify: bool) -> ReadTotals:
        ranks, checked = self._ranks, self._checked
        return read(
            checked.files,
            checked.plan,
            targets,
            verify=verify,
            threads=ranks.config.threads,
            slots=ranks.slots,
        )

    def _read_shared(self, shared: Agreement, *, verify: bool) -> ReadTotals:
        checked, reading = self._checked, self._shared_reading(self._targets, verify=verify)
        try:
            return read_shared(self._ranks, shared, checked.files, checked.plan, reading)
        except BaseException:
            shared.give_up()
            # If the error is another rank's, who learns it does not know what is filled here.
            self.filled = reading.touched
            raise

    def _shared_reading(self, targets: Destinations, *, verify: bool) -> Reading:
        checked, slots = self._checked, self._ranks.slots
        return reading_of(checked.files, checked.plan, targets, verify=verify, slots=slots)
