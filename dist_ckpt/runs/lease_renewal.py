"""Hold a checkpoint for as long as somebody uses it: a thread renews the hold meanwhile."""

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
from dist_ckpt.runs.annotations import can_keep_records
from dist_ckpt.runs.listing import RunCheckpoint
from dist_ckpt.runs.selectors import resolve_at

_log = logging.getLogger("dist_ckpt")

# Long enough for a storage that is away for a while, short enough for what a dead process held.
TTL_S = 1800.0

# How often what was chosen may be removed before it is held.
_ROUNDS = 16


@contextmanager
def renewed_lease(subject: CheckpointRef, ttl_s: float = TTL_S) -> Iterator[None]:
    """Hold a checkpoint inside the `with`, however long that takes; released at its end.

    It is held when this begins, and by the storage's clock for `ttl_s` after the last renewal: a
    process that dies, or stands still for longer, holds it no more. NotFoundError if it is gone, or
    about to be.
    """
    hold = Lease(subject, checked_ttl(ttl_s))
    hold.take()
    ended = threading.Event()
    thread = threading.Thread(target=_renew, args=(hold, ended), name="dist_ckpt hold", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        # A renewal that is under way would come after the release. It has the storage's deadline.
        thread.join(ttl_s)
        hold.release()


def _renew(hold: Lease, ended: threading.Event) -> None:
    while not ended.wait(hold.ttl_s / 3):
        try:
            hold.take()
        except (NotFoundError, StorageError) as error:
            _log.warning("%s: the hold could not be renewed: %s", hold.subject.path, error)
            # A mark alone is no reason to end: who put it sees the hold, and takes it back.
            if isinstance(error, NotFoundError) and _is_gone(hold.subject):
                return


def _is_gone(subject: CheckpointRef) -> bool:
    try:
        return not subject.is_there()
    except StorageError:
        return False


def lease_selected(
    storage: Storage, choose: Callable[[], RunCheckpoint], ttl_s: float, stack: ExitStack
) -> RunCheckpoint:
    """Choose a checkpoint, and hold it until the stack ends; another if it is removed in between.

    Raises what `choose` does, ValueError for one without a step, NotFoundError if what is chosen is
    removed again and again.
    """
    for left in reversed(range(_ROUNDS)):
        one = choose()
        try:
            stack.enter_context(renewed_lease(checkpoint_ref_of(storage, one), ttl_s))
            return one
        except NotFoundError:
            if not left:
                raise
    raise AssertionError


def resolve_with_lease(storage: Storage, path: str, stack: ExitStack) -> str:
    """Return what `resolve` does, held until the stack ends: where a run keeps records, if it can.

    Without a selector nothing is held, and nothing asked of the storage.
    """
    if (first := resolve_at(storage, path)) is None:
        return path
    root = first.path.rpartition("/")[0]
    if first.where is None or not can_keep_records(storage, root):
        return first.path
    try:
        return lease_selected(
            storage, lambda: resolve_at(storage, path) or first, TTL_S, stack
        ).path
    except StorageError as error:
        _log.debug("%s is not held: %s", first.path, error)
        return first.path


@contextmanager
def leased_source(storage: Storage, path: str) -> Iterator[tuple[Attempt, Index]]:
    """Yield the checkpoint at `path`, which nobody prunes or deletes meanwhile.

    It is held where a run keeps records. Where none does, what is deleted under the block becomes
    NotFoundError.
    """
    attempt, index = attempts.find(storage, path)
    root = path.rpartition("/")[0] or "/"
    with ExitStack() as stack:
        if index.step is not None and can_keep_records(storage, root):
            subject = CheckpointRef(storage, root, path, (index.step, attempt))
            stack.enter_context(renewed_lease(subject))
        stack.enter_context(attempts.not_found_if_removed(storage, path, attempt))
        yield attempt, index


def checkpoint_ref_of(storage: Storage, one: RunCheckpoint) -> CheckpointRef:
    """Return a checkpoint of a run as facts are about it. ValueError if it has no step."""
    if one.where is None:
        raise ValueError(
            f"{one.path} is {one.state} and of step {one.step}: facts are kept about what is "
            f"committed with a step"
        )
    return CheckpointRef(storage, one.path.rpartition("/")[0] or "/", one.path, one.where)
