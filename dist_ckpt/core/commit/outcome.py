"""The outcome of an attempt, or of a delete, after an error: as it is, or unknown.

A failed call may have taken effect, and an abandon needs the same storage. So an error is reported
only after a look at the storage.
"""

from __future__ import annotations

from typing import Literal

from dist_ckpt.core.commit.attempts import abandon, read_index, statuses, trash_at
from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.core.format.index.index import Index
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import CheckpointError, StorageError

# "in place": it is visible, but may not be durable.
CommitOutcome = Literal["committed", "in place", "abandoned", "unknown"]

# Attempts in these states may have data to read or repair.
DATA_IS_KEPT = ("committed", "damaged", "incompatible")


def resolve_outcome(
    storage: Storage, path: str, attempt: Attempt, *, by: str, reason: str
) -> CommitOutcome:
    """Abandon an attempt that may have been committed, and return what became of it.

    Raises no error of the storage: where it refuses to abandon, it may still allow to read.
    """
    try:
        return "abandoned" if abandon(storage, path, attempt, by=by, reason=reason) else "committed"
    except (CheckpointError, OSError):
        pass
    try:
        document = read_index(storage, path, attempt)
    except (CheckpointError, OSError):
        return "unknown"
    if document is None:  # a server may still execute a call without an answer
        return "unknown"
    return "in place" if isinstance(document, Index) else "abandoned"


def check_abandoned(
    storage: Storage, path: str, attempt: Attempt, error: Exception, *, by: str
) -> None:
    """Abandon an attempt whose commit met `error`; StorageError unless that is certain."""
    reason = f"the commit failed: {error}"[:500]
    result = resolve_outcome(storage, path, attempt, by=by, reason=reason)
    if result != "abandoned":
        raise unknown_outcome_error(result, path, str(error)) from error


def unknown_outcome_error(result: CommitOutcome, path: str, reason: str) -> StorageError:
    """Return the error of a commit that was stopped, for `reason`, and was not abandoned."""
    if result == "unknown":
        return StorageError(
            f"{reason}. Now it is unknown whether it is committed at {path}: check the storage, "
            f"list the path with `dist-ckpt ls`, then repeat the call with overwrite=True"
        )
    # A second fsync does not repair a failed one, as fsync forgets its errors.
    return StorageError(
        f"{reason}. The checkpoint is in place at {path}, but it is unknown whether it survives a "
        f"power cut: check the storage, then repeat the call with overwrite=True"
    )


def partial_delete_error(storage: Storage, path: str, error: BaseException) -> StorageError:
    """Return the error of a delete that `error` stopped."""
    again = ", then delete it again"
    try:
        attempts = statuses(storage, path)
        has_data = any(status.state in DATA_IS_KEPT for status in attempts)
        is_gone = not attempts and not trash_at(storage, path)
    except (CheckpointError, OSError):
        result = (
            "Now it is unknown whether it is deleted: check the storage, list the path with "
            f"`dist-ckpt ls`{again}"
        )
    else:
        if has_data:
            result = f"{path} is not deleted: check the storage{again}"
        elif is_gone:
            result = f"{path} is deleted, but a power cut may bring it back: check the storage"
        else:
            result = (
                f"{path} is deleted, but not all of its space is free, and a power cut may bring "
                f"it back: check the storage{again}"
            )
    return StorageError(f"{error}. {result}")
