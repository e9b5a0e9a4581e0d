"""What became of an attempt, or of a delete, that met an error: said as it is, or as unknown.

A call that failed may have taken effect all the same, and who gives an attempt up needs the same
storage. So whoever reports an error looks first.
"""

from __future__ import annotations

from typing import Literal

from dist_ckpt.core.commit.attempts import abandon, read_index, statuses, trash_at
from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.core.format.index.index import Index
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import CheckpointError, StorageError

# "in place": it shows, but nothing has made it durable.
CommitOutcome = Literal["committed", "in place", "abandoned", "unknown"]

# Of these something can be left to read, or to mend.
DATA_IS_KEPT = ("committed", "damaged", "incompatible")


def resolve_outcome(
    storage: Storage, path: str, attempt: Attempt, *, by: str, reason: str
) -> CommitOutcome:
    """Give up an attempt that may have been committed, and return what became of it.

    Raises no error of the storage: where that does not let us abandon it, it may let us look.
    """
    try:
        return "abandoned" if abandon(storage, path, attempt, by=by, reason=reason) else "committed"
    except (CheckpointError, OSError):
        pass
    try:
        there = read_index(storage, path, attempt)
    except (CheckpointError, OSError):
        return "unknown"
    if there is None:  # a server may still do what it has not answered
        return "unknown"
    return "in place" if isinstance(there, Index) else "abandoned"


def check_abandoned(
    storage: Storage, path: str, attempt: Attempt, error: Exception, *, by: str
) -> None:
    """Give up an attempt whose commit met `error`; raise StorageError unless that is certain."""
    reason = f"the commit failed: {error}"[:500]
    result = resolve_outcome(storage, path, attempt, by=by, reason=reason)
    if result != "abandoned":
        raise unknown_outcome_error(result, path, str(error)) from error


def unknown_outcome_error(result: CommitOutcome, path: str, reason: str) -> StorageError:
    """Return the error of a commit that was stopped, as `reason` says, and was not abandoned."""
    if result == "unknown":
        return StorageError(
            f"{reason}. Now it is unknown whether it is committed at {path}: see what is wrong "
            f"with the storage, look with `dist-ckpt ls` what is there, then do it once more with "
            f"overwrite=True"
        )
    # A sync that failed cannot be made good by another one (fsync forgets its errors).
    return StorageError(
        f"{reason}. The checkpoint is in place at {path}, but it is unknown whether it outlives a "
        f"power cut: see what is wrong with the storage, then do it once more with overwrite=True"
    )


def partial_delete_error(storage: Storage, path: str, error: BaseException) -> StorageError:
    """Return the error of a delete that met `error` on its way."""
    again = ", then delete it again"
    try:
        found = statuses(storage, path)
        is_there = any(status.state in DATA_IS_KEPT for status in found)
        is_gone = not found and not trash_at(storage, path)
    except (CheckpointError, OSError):
        told = (
            "Now it is unknown whether it is deleted: see what is wrong with the storage, look "
            f"with `dist-ckpt ls` what is there{again}"
        )
    else:
        wrong = "see what is wrong with the storage"
        if is_there:
            told = f"{path} is not deleted: {wrong}{again}"
        elif is_gone:
            told = f"{path} is deleted, but a power cut may bring it back: {wrong}"
        else:
            told = (
                f"{path} is deleted, but not all of its space is free, and a power cut may bring "
                f"it back: {wrong}{again}"
            )
    return StorageError(f"{error}. {told}")
