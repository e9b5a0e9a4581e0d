"""A checkpoint that one process makes of another: a new attempt, by the usual claim and commit."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from dist_ckpt.commit import attempts, order, removal
from dist_ckpt.errors import CheckpointError
from dist_ckpt.format.index import Index
from dist_ckpt.reports import SaveReport, Tally
from dist_ckpt.storage import Storage

_log = logging.getLogger("dist_ckpt")


@contextmanager
def new_attempt(
    storage: Storage, path: str, what: str, *, overwrite: bool, force: bool = False
) -> Iterator[order.Claim]:
    """Claim an attempt at `path`, which the block writes and commits; `what` says who does.

    What it replaces is removed at the end. After an error the attempt is given up, unless it was
    committed all the same, as the error then says. Raises what `order.claim` does.
    """
    by = f"{what} on {socket.gethostname()}"
    claim = order.claim(storage, path, overwrite=overwrite, by=by, force=force)
    try:
        yield claim
    except BaseException as error:
        _withdraw(storage, claim, error)
        raise
    removal.supersede(storage, path, claim.attempt)


def _withdraw(storage: Storage, claim: order.Claim, error: BaseException) -> None:
    reason = f"{type(error).__name__}: {error}"[:500]
    try:
        if attempts.abandon(storage, claim.path, claim.attempt, by=claim.by, reason=reason):
            order.give_up(storage, claim)
    except (CheckpointError, OSError) as failure:
        _log.warning("%s could not be cleaned up: %s", claim.folder, failure)


def report_of(
    path: str,
    index: Index,
    seconds: Mapping[str, float],
    reads: Tally,
    writes: Tally,
    linked: Tally = Tally(),  # noqa: B008 - it is frozen
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
        exchanges=Tally(),
        collectives=Tally(),
        nbytes_receipt=0,
        storage_reads=reads,
        storage_writes=writes,
        num_linked=linked.num,
        nbytes_linked=linked.nbytes,
    )
