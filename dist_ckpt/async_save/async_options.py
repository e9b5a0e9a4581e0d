"""The options of `dc.AsyncSaver`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from typing import get_args

from dist_ckpt.async_save.snapshots.job_folder import check_job
from dist_ckpt.async_save.snapshots.root_id import job_id, make_root_id
from dist_ckpt.async_save.trainer.start_handshake import SaverInfo, WhenBusy
from dist_ckpt.core.storage import Storage, open_storage

# Slower, a block would take so long that the storage seems to hang.
MIN_BYTES_PER_S = 16 << 10


@dataclass(frozen=True, slots=True)
class SaverOptions:
    """The options of a saver, checked by `check` once a rank's error can reach the others."""

    root: str | os.PathLike[str] | None
    job: str | None
    when_busy: WhenBusy
    drain_timeout_s: float
    max_bytes_per_s: float | None

    def check(self) -> None:
        """Raise TypeError or ValueError for options that make no sense."""
        if self.root is not None:
            self._absolute_root()
        if self.job is not None:
            check_job(self.job)
        if self.when_busy not in get_args(WhenBusy):
            raise ValueError(f'when_busy={self.when_busy!r}: give "wait", "skip" or "supersede"')
        _check_number(
            "drain_timeout_s", self.drain_timeout_s, 0, "a finite number of seconds, 0 or more"
        )
        if self.max_bytes_per_s is not None:
            least = f"a number, {MIN_BYTES_PER_S} at least, or None"
            _check_number("max_bytes_per_s", self.max_bytes_per_s, MIN_BYTES_PER_S, least)

    def asked(self) -> SaverInfo:
        """Return what all ranks must ask for alike."""
        # Not the id of a job that the root makes: a file system has other numbers on other hosts.
        root = None if self.root is None or self.job is not None else self._absolute_root()
        return SaverInfo(self.job, root, self.when_busy)

    def root_id(self) -> str | None:
        """Return the id of the root, which gets one if need be; None if no job is made of it."""
        if self.job is not None or self.root is None:
            return None
        return make_root_id(*self._opened_root())

    def job_name(self, root_id: str | None) -> str | None:
        """Return the job, if it is known before the first save."""
        return self.job if root_id is None else job_id(self._absolute_root(), root_id)

    def _absolute_root(self) -> str:
        return self._opened_root()[1]

    def _opened_root(self) -> tuple[Storage, str]:
        assert self.root is not None
        try:
            return open_storage(self.root)
        except (TypeError, ValueError) as error:
            raise type(error)(f"root={self.root!r}: {error}") from None


def _check_number(name: str, value: object, least: int, wanted: str) -> None:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: give {wanted}")
    if not (isfinite(value) and float(value) >= least):
        raise ValueError(f"{name}={value}: give {wanted}")
