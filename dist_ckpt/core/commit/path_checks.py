"""Checks of the path of a new checkpoint, before the claim."""

from __future__ import annotations

import posixpath
import time
from collections.abc import Callable, Sequence

from dist_ckpt.core.commit.attempts import attempts_in, entries_at, read_index
from dist_ckpt.core.commit.records.leases import check_unprotected
from dist_ckpt.core.commit.records.record_store import check_upgraded
from dist_ckpt.core.format.filenames import (
    Attempt,
    is_next_to_attempts,
    is_reserved_name,
    selections,
)
from dist_ckpt.core.format.index.index import Index
from dist_ckpt.core.storage import Entry, Storage, real_path
from dist_ckpt.errors import CorruptError, ExistsError, IncompatibleError

_REPLACE = "replace it (overwrite=True, on the command line --overwrite)"

MayReplace = Callable[[Attempt], bool]


def attempts_to_replace(storage: Storage, path: str, *, overwrite: bool) -> tuple[Attempt, ...]:
    """Return the attempts at `path` that a new checkpoint would replace; change nothing.

    Raises the errors that a claim would raise for the contents of the path. Does not check that the
    path can be written.
    """
    check_upgraded(storage, posixpath.dirname(real_path(path)))
    entries = list_replaceable(storage, path, lambda _: overwrite)
    if entries is None:
        return ()
    attempts = tuple(attempts_in(entries))
    # By this host's clock: reading the storage's clock, as a claim does, needs a write.
    check_unprotected(storage, path, attempts, lambda *_: time.time())
    return attempts


def list_replaceable(
    storage: Storage, path: str, may_replace: MayReplace
) -> Sequence[Entry] | None:
    """Return the entries of `path`, which a new checkpoint may replace; None without the folder.

    Raises ExistsError if they are from another program, or for a checkpoint that `may_replace`
    refuses.
    """
    try:
        entries = storage.list(path)
    except FileNotFoundError:
        check_new_name(storage, path)
        return None
    except NotADirectoryError:
        raise ExistsError(f"{path} is a file, or below one: choose another path") from None
    ours = [*attempts_in(entries), *(entry for entry in entries if is_next_to_attempts(entry.name))]
    if entries and not ours:
        names = ", ".join(entry.name for entry in entries[:5])
        raise ExistsError(
            f"{path} has files that dist_ckpt did not write ({names}): choose another path"
        )
    for attempt in attempts_in(entries):
        if not may_replace(attempt):
            check_not_taken(storage, path, attempt)
    return entries


def check_new_name(storage: Storage, path: str) -> None:
    """Raise ValueError if a new checkpoint at `path` would be mistaken for something else."""
    if is_reserved_name(name := posixpath.basename(path)):
        raise ValueError(f"{path}: {name} is never a checkpoint's name here: choose another")
    for folder, selector in selections(path):
        if entries_at(storage, folder):
            raise ValueError(
                f"{path}: @{selector} selects a checkpoint in {folder}, and cannot name a new one: "
                f"choose another path"
            )


def check_not_taken(storage: Storage, path: str, attempt: Attempt) -> None:
    """Raise ExistsError if an attempt is, or may be, a checkpoint."""
    try:
        document = read_index(storage, path, attempt)
    except (CorruptError, IncompatibleError) as error:
        raise ExistsError(
            f"{path}: a checkpoint is here that cannot be read ({error}). "
            f"Choose another path, or {_REPLACE}"
        ) from error
    if isinstance(document, Index):
        step = "" if document.step is None else f" of step {document.step}"
        raise ExistsError(
            f"{path}: a checkpoint{step} is here ({attempt}): choose another path, or {_REPLACE}"
        )
