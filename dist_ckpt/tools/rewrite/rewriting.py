"""A checkpoint that one process makes of another: a new attempt, by the usual claim and commit."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock

from dist_ckpt.core.commit import attempts, commit_protocol, removal
from dist_ckpt.core.commit.preflight import attempts_to_replace
from dist_ckpt.core.format.index.index import Index
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import CheckpointError
from dist_ckpt.reports import IoCount, Progress, SaveReport

_log = logging.getLogger("dist_ckpt")


@dataclass(frozen=True, slots=True)
class DryRun:
    """What a call would write at `path`, had it been made: nothing has changed.

    `files` are the names and sizes in bytes of what it would write or link, but for the index;
    `replaces` is what is there, and would go.
    """

    path: str
    files: Mapping[str, int]
    replaces: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """The bytes of all files."""
        return sum(self.files.values())


def dry_run(storage: Storage, path: str, files: Mapping[str, int], *, overwrite: bool) -> DryRun:
    """Return what a new checkpoint of these files would be. Raises what `begin_rewrite` does."""
    there = attempts_to_replace(storage, path, overwrite=overwrite)
    return DryRun(path, files, tuple(f"{path}/{attempt}" for attempt in there))


@contextmanager
def begin_rewrite(
    storage: Storage, path: str, what: str, *, overwrite: bool, force: bool = False
) -> Iterator[commit_protocol.Claim]:
    """Claim an attempt at `path`, which the block writes and commits; `what` says who does.

    What it replaces is removed at the end. After an error the attempt is given up, unless it was
    committed all the same, as the error then says. Raises what `order.claim` does.
    """
    by = f"{what} on {socket.gethostname()}"
    claim = commit_protocol.claim(storage, path, overwrite=overwrite, by=by, force=force)
    try:
        yield claim
    except BaseException as error:
        _withdraw(storage, claim, error)
        raise
    removal.supersede(storage, path, claim.attempt)


def _withdraw(storage: Storage, claim: commit_protocol.Claim, error: BaseException) -> None:
    reason = f"{type(error).__name__}: {error}"[:500]
    try:
        if attempts.abandon(storage, claim.path, claim.attempt, by=claim.by, reason=reason):
            commit_protocol.discard_attempt(storage, claim)
    except (CheckpointError, OSError) as failure:
        _log.warning("%s could not be cleaned up: %s", claim.folder, failure)


def report_of(
    path: str,
    index: Index,
    seconds: Mapping[str, float],
    reads: IoCount,
    writes: IoCount,
    linked: IoCount = IoCount(),  # noqa: B008 - it is frozen
) -> SaveReport:
    """Return what one process reports of a checkpoint that it has committed."""
    return SaveReport(
        path=path,
        step=index.step,
        attempt=index.attempt,
        world_size=1,  # one process writes for all ranks, one after another
        nbytes=index.nbytes,
        num_tensors=len(index.catalog.tensors),
        num_files=index.num_files,
        seconds=seconds,
        slowest_rank=0,
        slowest_s=seconds["write"],
        exchanges=IoCount(),
        collectives=IoCount(),
        nbytes_receipt=0,
        storage_reads=reads,
        storage_writes=writes,
        num_linked=linked.num,
        nbytes_linked=linked.nbytes,
    )


class CopyProgress:
    """Tells how far a copy of so many bytes is, from whatever thread; of links it is not told."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._progress = total, progress
        self._done, self._turn = 0, Lock()

    def __call__(self, nbytes: int) -> None:
        """Count what was copied."""
        with self._turn:
            self._done = min(self._done + nbytes, self._total)
            if self._progress is not None:
                self._progress(self._done, self._total)
