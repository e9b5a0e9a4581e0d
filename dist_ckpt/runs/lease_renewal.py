"""Keep the lease of a checkpoint while it is used: a thread renews it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from dist_ckpt.core.commit import attempts
from dist_ckpt.core.commit.records.leases import CheckpointRef, Lease, checked_ttl
from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.core.format.index.index import Index
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import NotFoundError, StorageError
from dist_ckpt.runs.annotations import can_lease
from dist_ckpt.runs.listing import RunCheckpoint
from dist_ckpt.runs.selectors import resolve_at

_log = logging.getLogger("dist_ckpt")

# Longer than a storage is unavailable, and short enough for the leases of dead processes.
TTL_S = 1800.0

# How often the selected checkpoint may be removed before it is leased.
_ROUNDS = 16


@contextmanager
def renewed_lease(subject: CheckpointRef, ttl_s: float = TTL_S) -> Iterator[None]:
    """Lease a checkpoint inside the `with`, however long that takes; released at its end.

    The lease lasts for `ttl_s` after the last renewal, by the storage's clock: that of a process
    that dies, or stalls for longer, expires. NotFoundError if the checkpoint is removed, or about
    to be.
    """
    lease = Lease(subject, checked_ttl(ttl_s))
    lease.take()
    ended = threading.Event()
    thread = threading.Thread(
        target=_renew, args=(lease, ended), name="dist_ckpt lease", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        # A renewal in progress would come after the release. It has the storage's deadline.
        thread.join(ttl_s)
        lease.release()


def _renew(lease: Lease, ended: threading.Event) -> None:
    while not ended.wait(lease.ttl_s / 3):
        try:
            lease.take()
        except (NotFoundError, StorageError) as error:
            _log.warning("%s: the lease could not be renewed: %s", lease.subject.path, error)
            # A deletion intent does not end the lease: its owner sees the lease and withdraws.
            if isinstance(error, NotFoundError) and _is_gone(lease.subject):
                return


def _is_gone(subject: CheckpointRef) -> bool:
    try:
        return not subject.is_there()
    except StorageError:
        return False


def lease_selected(
    storage: Storage, choose: Callable[[], RunCheckpoint], ttl_s: float, stack: ExitStack
) -> RunCheckpoint:
    """Select a checkpoint, and lease it until the stack ends; select again if it is removed.

    Raises what `choose` does, ValueError for one without a step, NotFoundError if the selected
    checkpoint is removed again and again.
    """
    for num_left in reversed(range(_ROUNDS)):
        info = choose()
        try:
            stack.enter_context(renewed_lease(checkpoint_ref_of(storage, info), ttl_s))
            return info
        except NotFoundError:
            if not num_left:
                raise
    raise AssertionError


def resolve_with_lease(storage: Storage, path: str, stack: ExitStack) -> str:
    """Return what `resolve` does, leased until the stack ends if the root has records of a run.

    A root that cannot be written gets no lease. Without a selector there is no lease, and no call
    to the storage.
    """
    if (first := resolve_at(storage, path)) is None:
        return path
    root = first.path.rpartition("/")[0]
    if first.where is None or not can_lease(storage, root):
        return first.path
    try:
        return lease_selected(
            storage, lambda: resolve_at(storage, path) or first, TTL_S, stack
        ).path
    except StorageError as error:
        _log.debug("%s is not leased: %s", first.path, error)
        return first.path


@contextmanager
def leased_source(storage: Storage, path: str) -> Iterator[tuple[Attempt, Index]]:
    """Yield the checkpoint at `path`, protected against removal inside the `with`.

    It is leased if the root has records of a run that can be added to. Otherwise a removal inside
    the `with` becomes NotFoundError.
    """
    attempt, index = attempts.find(storage, path)
    root = path.rpartition("/")[0] or "/"
    with ExitStack() as stack:
        if index.step is not None and can_lease(storage, root):
            subject = CheckpointRef(storage, root, path, (index.step, attempt))
            stack.enter_context(renewed_lease(subject))
        stack.enter_context(attempts.not_found_if_removed(storage, path, attempt))
        yield attempt, index


def checkpoint_ref_of(storage: Storage, info: RunCheckpoint) -> CheckpointRef:
    """Return the reference by which annotations are written. ValueError without a step."""
    if info.where is None:
        raise ValueError(
            f"{info.path} is {info.state} and of step {info.step}: only committed checkpoints with "
            f"a step have annotations"
        )
    return CheckpointRef(storage, info.path.rpartition("/")[0] or "/", info.path, info.where)
