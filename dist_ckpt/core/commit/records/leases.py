"""Leases: protect a checkpoint while it is used, for some seconds that a thread renews."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from time import monotonic

from dist_ckpt.core.commit import attempts
from dist_ckpt.core.commit.attempts import new_id
from dist_ckpt.core.commit.records.protection_protocol import CheckpointRef, protect
from dist_ckpt.core.commit.records.protections import LEASE
from dist_ckpt.core.commit.records.record_store import can_lease
from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.core.format.index.index import Index
from dist_ckpt.core.runtime.arguments import LEAST_POSITIVE, check_number
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import CheckpointError, NotFoundError, StorageError

_log = logging.getLogger("dist_ckpt")

# A process renews its lease while it lives. An outage of the storage delays the renewal, so a
# lease lasts longer than a usual outage. A dead process leaves its lease, which then expires.
LEASE_S = 1800.0


@dataclass(frozen=True, slots=True)
class Lease:
    """Protection of a checkpoint for `ttl_s` seconds of the storage's clock; it can be renewed."""

    ref: CheckpointRef
    ttl_s: float
    id: str = field(default_factory=new_id)

    def take(self) -> None:
        """Take or renew the lease for `ttl_s` from now. Durable on return.

        NotFoundError if the checkpoint is removed, or another process is about to remove it. Then
        the lease is withdrawn. StorageError if the write took longer than the lease lasts.
        """
        began = monotonic()
        protect(self.ref, LEASE, {self.id: self.ttl_s})
        if monotonic() - began >= self.ttl_s:
            raise StorageError(
                f"{self.ref.path}: the lease lasts {self.ttl_s:g} s, and writing it took "
                f"longer: give a longer ttl_s"
            )

    def release(self) -> None:
        """End the lease. If the storage fails, the lease expires by itself."""
        with suppress(CheckpointError):
            if self.ref.exists():
                self.ref.put(LEASE, {self.id: 0})


@contextmanager
def renewed_lease(ref: CheckpointRef, ttl_s: float = LEASE_S) -> Iterator[None]:
    """Lease a checkpoint inside the `with`. A thread renews the lease; the end releases it.

    If the process dies or stalls, the lease expires `ttl_s` after the last renewal, by the
    storage's clock. NotFoundError if the checkpoint is removed, or another process is
    about to remove it.
    """
    ttl_s = check_number("ttl_s", ttl_s, "a number of seconds above 0", LEAST_POSITIVE)
    lease, ended = Lease(ref, ttl_s), threading.Event()
    lease.take()
    renew = partial(_renew, lease, ended)
    thread = threading.Thread(target=renew, name="dist_ckpt lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        # Wait for a renewal in progress, or it would undo the release. The storage has a deadline.
        thread.join(ttl_s)
        lease.release()


def _renew(lease: Lease, ended: threading.Event) -> None:
    while not ended.wait(lease.ttl_s / 3):
        try:
            lease.take()
        except (NotFoundError, StorageError) as error:
            _log.warning("%s: the lease could not be renewed: %s", lease.ref.path, error)
            # A deletion intent does not end the lease: its owner sees the lease and withdraws.
            with suppress(StorageError):
                if isinstance(error, NotFoundError) and not lease.ref.exists():
                    return


@contextmanager
def leased_source(storage: Storage, path: str) -> Iterator[tuple[Attempt, Index]]:
    """Yield the checkpoint at `path`, which is protected as by `leased` inside the `with`."""
    attempt, index = attempts.find_checkpoint(storage, path)
    with leased(storage, path, attempt, index):
        yield attempt, index


@contextmanager
def leased(storage: Storage, path: str, attempt: Attempt, index: Index) -> Iterator[None]:
    """Protect a checkpoint against removal inside the `with`, if its root has records of a run.

    A root without records has no leases. If the storage cannot write the lease, as on a full disk
    or in the root of another user, a warning is logged. In both cases the checkpoint is not
    protected, and a read raises NotFoundError once it is removed.
    """
    root = path.rpartition("/")[0] or "/"
    with ExitStack() as stack:
        if index.step is not None and can_lease(storage, root):
            ref = CheckpointRef(storage, root, path, (index.step, attempt))
            try:
                stack.enter_context(renewed_lease(ref))
            except StorageError as error:
                _log.warning("%s is not leased, so a prune may remove it now: %s", path, error)
        stack.enter_context(attempts.not_found_if_removed(storage, path, attempt))
        yield
