"""The commit order: claim, commit, give up. What survives a crash is decided here.

1. `claim`: a new attempt's folder, durable; then lower open attempts are abandoned.
2. The ranks write their files into it, each made durable, then the folder (`shard_io`).
3. `check_files`: all are there, and as long as was meant.
4. `commit`: the index under a temporary name, durable and read back; renamed, which never replaces;
   the folder synced. From the rename on the checkpoint exists, and once it is durable it stays.
5. What it supersedes is removed (`removal.py`).

A crash before the rename leaves an open attempt, which nobody reads and a later save or a collector
abandons; one after it leaves the checkpoint, and perhaps older ones. `attempts.py` reads and puts
the one file that decides.
"""

from __future__ import annotations

import posixpath
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from dist_ckpt.core.commit.attempts import (
    ROUNDS,
    abandon,
    attempts_in,
    claimed_by,
    encode_abandoned,
    has_index,
    is_gone,
    list_attempts,
    new_id,
    put_index,
    read_document,
    read_index,
    store,
    was_removed,
)
from dist_ckpt.core.commit.new_folders import make_folders
from dist_ckpt.core.commit.outcome import check_abandoned
from dist_ckpt.core.commit.preflight import (
    Says,
    check_new_name,
    check_not_taken,
    check_target_path,
    is_below_file,
)
from dist_ckpt.core.commit.records.incarnations import Incarnation
from dist_ckpt.core.commit.records.leases import check_unprotected
from dist_ckpt.core.commit.records.old_records import check_upgraded
from dist_ckpt.core.commit.removal import now_at, remove
from dist_ckpt.core.format.filenames import (
    CLAIM,
    INDEX,
    Attempt,
    is_temporary,
    parse_trash,
    temporary_claim,
    temporary_index,
)
from dist_ckpt.core.format.index import index_json
from dist_ckpt.core.format.index.catalog_json import EncodedCatalog
from dist_ckpt.core.format.index.index import Abandoned, Index
from dist_ckpt.core.storage import Entry, Storage, real_path
from dist_ckpt.errors import (
    CheckpointError,
    ConflictError,
    CorruptError,
    IncompatibleError,
    StorageError,
)

_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Claim:
    """An attempt that this process made and alone may commit; `made` are the folders it made.

    `run` is the start that it is of, if any: once there is a newer one it is not committed.
    """

    path: str
    attempt: Attempt
    folder: str
    by: str
    made: tuple[str, ...]
    run: Incarnation | None = None


# --- claim -----------------------------------------------------------------------------------


def claim(
    storage: Storage,
    path: str,
    *,
    overwrite: bool,
    by: str,
    run: Incarnation | None = None,
    force: bool = False,
) -> Claim:
    """Begin an attempt at `path`. Coordinator only.

    On return the attempt's folder is durable, lower open attempts are abandoned, and an index
    can be put exclusively on this storage. Raises ExistsError if a checkpoint is there (unless
    `overwrite`, and it is not pinned, tagged or leased, or `force`), or what is not ours;
    ConflictError if a higher attempt is; IncompatibleError if the root is to be upgraded. Whatever
    it raises, nothing is left behind.

    `run` is the start of a run that saves: its caller saves only above the step that it restored,
    so that what older incarnations have there is orphaned, and is replaced without `overwrite`.
    ConflictError if a newer incarnation is there, StorageError if this one has no attempts left.
    """
    made: list[str] = []
    attempt: Attempt | None = None
    may_replace = partial(_may_replace, overwrite=overwrite, run=run)
    try:
        if run is not None:
            run.check(storage)
        check_upgraded(storage, posixpath.dirname(real_path(path)))
        for _ in range(ROUNDS):
            entries = _survey(storage, path, made, may_replace=may_replace)
            if run is None and not force:  # what a run replaces stays while it is protected
                check_unprotected(storage, path, list(attempts_in(entries)), now_at)
            attempt = _next_attempt(entries, path, run)
            try:
                storage.make_folder(f"{path}/{attempt}")
                break
            except FileNotFoundError:  # a delete took the folder that was there
                continue
        else:
            raise StorageError(
                f"{path} is not there after it was made {ROUNDS} times. Either its file system "
                f"takes no folders (as /proc): choose another path. Or somebody removes it again "
                f"and again: look who does it"
            )
        _fence(storage, path, attempt, may_replace=may_replace, by=by)
        _store_claim(storage, path, attempt, by)
        for folder in (path, *map(posixpath.dirname, made)):
            storage.sync(folder)
    except OSError as error:
        somebody_did = is_gone(storage, f"{path}/{attempt}")
        _take_back(storage, path, attempt, made)
        if somebody_did:
            raise ConflictError(
                f"{path}/{attempt} was removed by somebody else while it was claimed: "
                f"see that only one job saves here, then save again"
            ) from error
        raise StorageError(
            f"{path}/{attempt} does not hold what was just put into it ({error}): check the "
            f"storage, then save again"
        ) from error
    except BaseException:
        _take_back(storage, path, attempt, made)
        raise
    return Claim(path, attempt, f"{path}/{attempt}", by, tuple(made), run)


def _may_replace(attempt: Attempt, *, overwrite: bool, run: Incarnation | None) -> bool:
    return overwrite or (run is not None and attempt.number < run.first)


def _survey(storage: Storage, path: str, made: list[str], *, may_replace: Says) -> Sequence[Entry]:
    """Return what is at `path`, made if need be; raise ExistsError if it is not to be touched."""
    try:
        entries = storage.list(path)
    except FileNotFoundError:
        check_new_name(storage, path)
        make_folders(storage, path, made)
        return []
    except NotADirectoryError:
        raise is_below_file(path) from None
    check_target_path(storage, path, entries, may_replace)
    return entries


def _next_attempt(entries: Sequence[Entry], path: str, run: Incarnation | None) -> Attempt:
    seen = [attempt.number for attempt in attempts_in(entries)]
    seen += [old.number for entry in entries if (old := parse_trash(entry.name)) is not None]
    highest = max(seen, default=0)
    return Attempt(highest + 1 if run is None else run.next_attempt(highest, path), new_id())


def _fence(storage: Storage, path: str, attempt: Attempt, *, may_replace: Says, by: str) -> None:
    """Look again, now that others see the attempt: give way to higher ones, fence lower ones.

    Of savers that claim at the same time only the highest goes on: each has made its folder
    before it looks, so the later one to look sees the other.
    """
    others = [other for other in list_attempts(storage, path) if other != attempt]
    for other in others:
        if other > attempt:
            raise ConflictError(
                f"{path}: {other} was claimed {claimed_by(storage, path, other)} at the same "
                f"time: see that only one job saves here, then save again"
            )
    reason = f"{attempt} was claimed by {by}"
    for other in others:
        if not has_index(storage, path, other) and abandon(
            storage, path, other, by=by, reason=reason
        ):
            # Now, not after the decision: what a dead save left may be the space that we need.
            with suppress(StorageError):
                remove(storage, path, other)
        elif not may_replace(other):
            check_not_taken(storage, path, other)


def _store_claim(storage: Storage, path: str, attempt: Attempt, by: str) -> None:
    """Put `claim.json`, by the rename that the commit will need; check that it is exclusive.

    Its content is an index that says "abandoned": on a full disk `abandon` can put it as it is.
    """
    folder = f"{path}/{attempt}"
    first, second = (f"{folder}/{temporary_claim(new_id())}" for _ in range(2))
    reason = "given up, with no space left to say more"
    store(storage, first, encode_abandoned(attempt, by=by, reason=reason))
    storage.rename(first, f"{folder}/{CLAIM}")
    storage.create(second, 0).discard()
    try:
        storage.rename(second, f"{folder}/{CLAIM}")
    except FileExistsError:
        storage.remove(second)
        return
    raise StorageError(
        f"{folder}: a rename here replaces what has the name, so that no commit is safe: "
        f"choose another file system"
    )


def _take_back(storage: Storage, path: str, attempt: Attempt | None, made: Sequence[str]) -> None:
    """Undo a claim as far as the storage lets us; the error that led here is what counts."""
    if attempt is not None:
        # Not abandoned before: nobody else knows of it, and nobody but us would commit it.
        with suppress(CheckpointError, OSError):
            remove(storage, path, attempt)
    for folder in reversed(made):
        with suppress(CheckpointError, OSError):
            storage.remove(folder)


def await_claim(storage: Storage, path: str, attempt: Attempt, timeout_s: float) -> None:
    """Wait until this rank sees the coordinator's claim. Every rank but the coordinator.

    A rank never makes the folder itself: on storage that is not shared that would succeed, and
    the checkpoint would be in pieces on several hosts. Raises StorageError after `timeout_s`.
    """
    folder = f"{path}/{attempt}"
    deadline = time.monotonic() + timeout_s
    while True:
        with suppress(FileNotFoundError, NotADirectoryError):
            names = {entry.name for entry in storage.list(folder)}
            if INDEX in names:
                raise _conflict(storage, path, attempt, read_index(storage, path, attempt))
            if CLAIM in names:
                return
        if was_removed(storage, path, attempt):
            raise _conflict(storage, path, attempt, None)
        if time.monotonic() >= deadline:
            raise StorageError(
                f"{folder} is not seen here {timeout_s:g} seconds after the coordinator made it: "
                f"the path is not on storage that all ranks share. Pass a path that is"
            )
        time.sleep(min(_POLL_S, timeout_s))


# --- commit ----------------------------------------------------------------------------------


def check_files(
    storage: Storage, folder: str, expected: Mapping[str, int], *, timeout_s: float = 0.0
) -> None:
    """Check that an attempt's folder holds exactly the files that receipts name. Coordinator only.

    `expected` maps names to sizes. Files of other hosts may take `timeout_s` to appear (NFS
    keeps listings for a while). Raises StorageError naming what is missing, odd or of a wrong
    size; ConflictError if the folder is gone.
    """
    deadline = time.monotonic() + timeout_s
    while problems := _compare(storage, folder, expected):
        if time.monotonic() >= deadline:
            more = f" and {len(problems) - 5} more" * (len(problems) > 5)
            raise StorageError(
                f"{folder} does not hold what the ranks wrote: {'; '.join(problems[:5])}{more}. "
                f"See that all ranks share the storage and that nobody else writes there"
            )
        time.sleep(min(_POLL_S, timeout_s))


def _compare(storage: Storage, folder: str, expected: Mapping[str, int]) -> list[str]:
    try:
        entries = storage.list(folder)
    except FileNotFoundError:
        raise ConflictError(
            f"{folder} was removed while it was written: look who did, then save again"
        ) from None
    # A rank that gives up may be putting an index: the commit finds out.
    there = {e.name: e for e in entries if not (e.name in (CLAIM, INDEX) or is_temporary(e.name))}
    problems = [f"{name} is missing" for name in sorted(expected.keys() - there.keys())]
    problems += [f"{name} is unexpected" for name in sorted(there.keys() - expected.keys())]
    for name in sorted(there.keys() & expected.keys()):
        entry = there[name]
        if entry.kind != "file":
            problems.append(f"{name} is no regular file")
        elif entry.nbytes != expected[name]:
            problems.append(f"{name} has {entry.nbytes} bytes, not {expected[name]}")
    return problems


def commit(
    storage: Storage, claim: Claim, index: Index, text: EncodedCatalog | None = None
) -> None:
    """Make the checkpoint exist. Coordinator only, after `check_files`, once.

    `text` is that of the index's catalog, if a save of the same plan has left it. On return the
    index is durable and readers on any host see it. Raises ConflictError if the attempt was
    abandoned, or a newer incarnation has taken over, naming who; StorageError, which says so
    if the checkpoint is there all the same, or if that is unknown. Whatever else is raised, nothing
    is committed.
    """
    temporary = f"{claim.folder}/{temporary_index(new_id())}"
    try:
        text = text or EncodedCatalog(index.catalog)
        data = index_json.encode(index, text)
        store(storage, temporary, data)
        _check_readable(data, text, temporary)
        if read_document(storage, temporary) != data:
            raise StorageError(f"{temporary} reads back as something else: check the storage")
        if claim.run is not None:
            claim.run.check(storage)  # last: `secure` abandons only what is open before
    except FileNotFoundError:
        raise _conflict(storage, claim.path, claim.attempt, None) from None
    try:
        there = put_index(storage, claim.path, claim.attempt, temporary)
    except (CheckpointError, FileNotFoundError) as error:
        check_abandoned(storage, claim.path, claim.attempt, error, by=claim.by)
        if isinstance(error, CheckpointError):
            raise
        raise _conflict(storage, claim.path, claim.attempt, None) from None
    if isinstance(there, Abandoned):
        raise _conflict(storage, claim.path, claim.attempt, there)


def _check_readable(data: bytes, text: EncodedCatalog, file: str) -> None:
    """Never commit what we would refuse to load. What is wrong here was planned so by us."""
    try:
        index_json.read_back(data, text, label=file)
    except (CorruptError, IncompatibleError) as error:
        raise CheckpointError(
            f"the index of this save could not be read again, so nothing is committed: this is a "
            f"bug of dist_ckpt, report it ({error.args[0].partition(';')[0]}). "
            f"Older checkpoints are as they were; save again with another state"
        ) from error


def _conflict(
    storage: Storage, path: str, attempt: Attempt, document: Index | Abandoned | None
) -> ConflictError:
    """Return the error of an attempt that somebody else gave up, or removed: say who."""
    if isinstance(document, Abandoned):
        told = f"abandoned by {document.by}: {document.reason}"
    else:
        later = [other for other in list_attempts(storage, path) if other > attempt]
        told = "removed by a collector or a delete"
        if later:
            told = f"removed, and {later[-1]} claimed {claimed_by(storage, path, later[-1])}"
    return ConflictError(
        f"{path}/{attempt} was {told}. Nothing of it is committed: see that only one job saves "
        f"here, then save again"
    )


def discard_attempt(storage: Storage, claim: Claim) -> None:
    """Remove an attempt that will not be committed, and the folders made for it.

    Coordinator only, after `abandon`; or without it if `commit` was not called: then nobody
    could commit it any more.
    """
    remove(storage, claim.path, claim.attempt)
    for folder in reversed(claim.made):
        with suppress(StorageError, FileNotFoundError):  # somebody else uses it by now
            storage.remove(folder)
