"""Hold a checkpoint for as long as somebody uses it: a thread renews the hold meanwhile."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dist_ckpt.commit.holds import Hold, Subject, checked_ttl
from dist_ckpt.errors import CheckpointError, NotFoundError, StorageError
from dist_ckpt.runs.listing import RunCheckpoint
from dist_ckpt.storage import Storage

_log = logging.getLogger("dist_ckpt")

# Long enough for a storage that is away for a while, short enough for what a dead process held.
TTL_S = 1800.0

# How often what was chosen may be removed before it is held.
_ROUNDS = 16


@contextmanager
def holding(subject: Subject, ttl_s: float = TTL_S) -> Iterator[None]:
    """Hold a checkpoint inside the `with`, however long that takes; released at its end.

    It is held when this begins, and by the storage's clock for `ttl_s` after the last renewal: a
    process that dies, or stands still for longer, holds it no more. NotFoundError if it is gone, or
    about to be.
    """
    hold = Hold(subject, checked_ttl(ttl_s))
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


def _renew(hold: Hold, ended: threading.Event) -> None:
    while not ended.wait(hold.ttl_s / 3):
        try:
            hold.take()
        except (NotFoundError, StorageError) as error:
            _log.warning("%s: the hold could not be renewed: %s", hold.subject.path, error)
            if isinstance(error, NotFoundError):
                return


def hold_chosen(
    storage: Storage,
    choose: Callable[[], RunCheckpoint],
    hold: Callable[[Subject], CheckpointError | None],
) -> RunCheckpoint:
    """Choose a checkpoint and hold it, again if it is removed in between; return it.

    `hold` returns the error if it is gone. ValueError if what is chosen has no step: no facts are
    kept about that.
    """
    error: CheckpointError | None = None
    for _ in range(_ROUNDS):
        one = choose()
        if (error := hold(subject_of(storage, one))) is None:
            return one
    assert error is not None
    raise error


def subject_of(storage: Storage, one: RunCheckpoint) -> Subject:
    """Return a checkpoint of a run as facts are about it. ValueError if it has no step."""
    if one.where is None:
        raise ValueError(
            f"{one.path} is {one.state} and of step {one.step}: facts are kept about what is "
            f"committed with a step"
        )
    return Subject(storage, one.path.rpartition("/")[0] or "/", one.path, one.where)
