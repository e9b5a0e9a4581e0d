"""The commit protocol: claim an attempt, then commit or abandon it. Decides what survives a crash.

1. `claim` creates the folder of a new attempt, abandons lower open attempts, and writes the claim.
2. The ranks write their files. They sync each file, then the folder (`shard_io/write/`).
3. `check_files` checks that all files of the receipts exist, and `build_file_tables`
   (`receipts.py`) that the receipts follow the plan.
4. `commit` writes the index under a temporary name, syncs it and reads it back. It renames the
   index, which never replaces a file, and syncs the folder. The checkpoint exists after the rename.
5. `remove_superseded` (`removal.py`) removes older attempts.

A crash before the rename leaves an open attempt, which is never read. The next save to the same
path abandons and removes it; so does `gc` after its grace time. A crash after the rename leaves the
new checkpoint, and perhaps older ones.

A storage call that raises an error may still have worked. So `abandon_or_find_outcome` looks at the
storage before an error is reported.
"""

from __future__ import annotations

import posixpath
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal

from dist_ckpt.core.commit.attempts import (
    MAX_TRIES,
    describe_claimant,
    encode_abandoned,
    is_decided,
    is_folder_gone,
    list_attempts,
    list_entries,
    make_folders,
    new_id,
    parse_attempts,
    put_index,
    read_document,
    read_index,
    try_abandon,
    was_provably_removed,
    write_small_file,
)
from dist_ckpt.core.commit.records.incarnations import Incarnation
from dist_ckpt.core.commit.records.protection_protocol import protections_in, refuse_protected
from dist_ckpt.core.commit.records.record_store import check_upgraded
from dist_ckpt.core.commit.removal import read_storage_clock, remove
from dist_ckpt.core.format.filenames import (
    CLAIM,
    INDEX,
    ROOT_ID,
    Attempt,
    is_reserved_name,
    is_temporary,
    parse_trash,
    selections,
    temporary_name,
)
from dist_ckpt.core.format.index import index_json
from dist_ckpt.core.format.index.index import Abandoned, Index
from dist_ckpt.core.format.index.index_json import EncodedCatalog
from dist_ckpt.core.runtime.processes import running_time
from dist_ckpt.core.storage import Entry, Storage, refuse_linked_step
from dist_ckpt.errors import (
    CheckpointError,
    ConflictError,
    CorruptError,
    ExistsError,
    IncompatibleError,
    StorageError,
)

_POLL_S = 0.05

_REPLACE = "replace it (overwrite=True, on the command line --overwrite)"

MayReplace = Callable[[Attempt], bool]

# "in place": it is visible, but may not be durable.
CommitOutcome = Literal["committed", "in place", "abandoned", "unknown"]


@dataclass(frozen=True, slots=True)
class Claim:
    """An attempt that this process has created. No other process may commit it.

    `new_folders` are the folders that were created for it. `incarnation` is that of the run, if
    there is a run: the attempt is not committed after a newer incarnation has begun.
    """

    path: str
    attempt: Attempt
    folder: str
    by: str
    new_folders: tuple[str, ...]
    incarnation: Incarnation | None = None


# --- checks of the path, before the claim ----------------------------------------------------


def attempts_to_replace(storage: Storage, path: str, *, overwrite: bool) -> tuple[Attempt, ...]:
    """Return the attempts at `path` that a new checkpoint would replace; change nothing.

    Raises the errors of `claim` about the contents of the path. Does not check if writes work.
    """
    root = refuse_linked_step(path)
    check_upgraded(storage, root)
    entries = list_if_replaceable(storage, path, lambda _: overwrite)
    if entries is None:
        return ()
    attempts = tuple(parse_attempts(entries))
    # A claim uses the storage's clock, but that needs a write. Here this host's clock must do.
    refuse_protected(path, protections_in(storage, root, attempts, lambda *_: time.time()))
    return attempts


def list_if_replaceable(
    storage: Storage, path: str, may_replace: MayReplace
) -> Sequence[Entry] | None:
    """Return the entries of `path`, which a new checkpoint may replace; None without the folder.

    ExistsError if another program wrote them, or if `may_replace` refuses a checkpoint there.
    """
    try:
        entries = storage.list(path)
    except FileNotFoundError:
        check_new_name(storage, path)
        return None
    except NotADirectoryError:
        raise ExistsError(f"{path} is a file, or below one: choose another path") from None
    # A folder of dist_ckpt has attempts, trash, or the id of a root.
    has_ours = any(parse_trash(entry.name) or entry.name == ROOT_ID for entry in entries)
    if entries and not has_ours and not any(parse_attempts(entries)):
        names = ", ".join(entry.name for entry in entries[:5])
        raise ExistsError(
            f"{path} has files that dist_ckpt did not write ({names}): choose another path"
        )
    for attempt in parse_attempts(entries):
        if not may_replace(attempt):
            check_not_taken(storage, path, attempt)
    return entries


def check_new_name(storage: Storage, path: str) -> None:
    """Raise ValueError if a new checkpoint at `path` would be mistaken for something else."""
    if is_reserved_name(name := posixpath.basename(path)):
        raise ValueError(f"{path}: {name} is never a checkpoint's name here: choose another")
    for folder, selector in selections(path):
        if list_entries(storage, folder):
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


# --- claim -----------------------------------------------------------------------------------


def claim(
    storage: Storage,
    path: str,
    *,
    overwrite: bool,
    by: str,
    incarnation: Incarnation | None = None,
    force: bool = False,
) -> Claim:
    """Begin an attempt at `path`. Coordinator only.

    On return the attempt's folder is durable, and lower open attempts are abandoned. The
    claim has proved that a rename here never replaces a file. After an error, the claim is undone
    as far as the storage allows.

    Raises ExistsError if the path is a linked step, or has files of another program. Also raises
    ExistsError for a checkpoint there without `overwrite`, or a protected checkpoint without
    `force`. Raises ConflictError if a higher attempt exists, IncompatibleError if the root needs an
    upgrade.

    `incarnation` is the incarnation of the run that saves. The run saves only steps above the one
    that it restored. So checkpoints of older incarnations at `path` are orphaned, and the run
    replaces them without `overwrite`. ConflictError if a newer incarnation exists, StorageError if
    this one has used all its attempts.
    """
    new_folders: list[str] = []
    attempt: Attempt | None = None
    may_replace = partial(_may_replace, overwrite=overwrite, incarnation=incarnation)
    try:
        if incarnation is not None:
            incarnation.check(storage)
        root = refuse_linked_step(path)
        check_upgraded(storage, root)
        for _ in range(MAX_TRIES):
            entries = _list_or_create(storage, path, new_folders, may_replace=may_replace)
            # A run does not check here: `remove_superseded` leaves protected attempts in place.
            attempts = list(parse_attempts(entries))
            if attempts and incarnation is None and not force:
                protections = protections_in(storage, root, attempts, read_storage_clock)
                refuse_protected(path, protections)
            attempt = _next_attempt(entries, path, incarnation)
            try:
                storage.make_folder(f"{path}/{attempt}")
                break
            except FileNotFoundError:  # a delete removed the folder
                continue
        else:
            raise _vanishing_folder_error(path)
        _abandon_lower_rivals(storage, path, attempt, may_replace=may_replace, by=by)
        _store_claim(storage, path, attempt, by)
        for folder in (path, *map(posixpath.dirname, new_folders)):
            storage.sync(folder)
    except OSError as error:
        failure = _lost_claim_error(storage, f"{path}/{attempt}", error)
        _undo_claim(storage, path, attempt, new_folders)
        raise failure from error
    except BaseException:
        _undo_claim(storage, path, attempt, new_folders)
        raise
    return Claim(path, attempt, f"{path}/{attempt}", by, tuple(new_folders), incarnation)


def _vanishing_folder_error(path: str) -> StorageError:
    return StorageError(
        f"{path} does not exist after {MAX_TRIES} attempts to create it. If its file system cannot "
        f"have new folders, as /proc, choose another path. Otherwise find the process that removes "
        f"{path} again and again"
    )


def _lost_claim_error(storage: Storage, folder: str, error: OSError) -> CheckpointError:
    if is_folder_gone(storage, folder):
        return ConflictError(
            f"{folder} was removed by another process while it was claimed: make sure that only "
            f"one job saves here, then save again"
        )
    return StorageError(
        f"{folder} does not have the files just written to it ({error}): check the storage, then "
        f"save again"
    )


def _may_replace(attempt: Attempt, *, overwrite: bool, incarnation: Incarnation | None) -> bool:
    return overwrite or (incarnation is not None and attempt.number < incarnation.first)


def _list_or_create(
    storage: Storage, path: str, new_folders: list[str], *, may_replace: MayReplace
) -> Sequence[Entry]:
    """Return the entries of `path`; create the folder if it is missing. Raises ExistsError."""
    entries = list_if_replaceable(storage, path, may_replace)
    if entries is None:
        make_folders(storage, path, new_folders)
        return []
    return entries


def _next_attempt(entries: Sequence[Entry], path: str, incarnation: Incarnation | None) -> Attempt:
    numbers = [attempt.number for attempt in parse_attempts(entries)]
    numbers += [old.number for entry in entries if (old := parse_trash(entry.name)) is not None]
    highest = max(numbers, default=0)
    return Attempt(
        highest + 1 if incarnation is None else incarnation.next_attempt(highest, path), new_id()
    )


def _abandon_lower_rivals(
    storage: Storage, path: str, attempt: Attempt, *, may_replace: MayReplace, by: str
) -> None:
    """List the attempts again: give way to a higher one, abandon lower open ones.

    If several jobs claim at the same time, only the highest attempt continues. Each claimant
    creates its folder before it lists the others. So of two claimants, at least the later one finds
    the other.
    """
    rivals = [other for other in list_attempts(storage, path) if other != attempt]
    for other in rivals:
        if other > attempt:
            raise ConflictError(
                f"{path}: {other} was claimed {describe_claimant(storage, path, other)} at the "
                f"same time: make sure that only one job saves here, then save again"
            )
    reason = f"{attempt} was claimed by {by}"
    for other in rivals:
        if not is_decided(storage, path, other) and try_abandon(
            storage, path, other, by=by, reason=reason
        ):
            # Do not wait until the commit: this save may need the space of the unfinished one.
            with suppress(StorageError):
                remove(storage, path, other)
        elif not may_replace(other):
            check_not_taken(storage, path, other)


def _store_claim(storage: Storage, path: str, attempt: Attempt, by: str) -> None:
    """Write `claim.json`. StorageError if a rename here replaces an existing file.

    The commit renames a file to `index.json`, and relies on a rename that never replaces. So this
    function tries to rename a second file to `claim.json`, which must fail.

    The content of `claim.json` is an index that says "abandoned". On a full disk, `try_abandon`
    writes nothing: it renames `claim.json` to `index.json`.
    """
    folder = f"{path}/{attempt}"
    first, second = (f"{folder}/{temporary_name('claim', new_id())}" for _ in range(2))
    reason = "given up, with no space left to say more"
    write_small_file(storage, first, encode_abandoned(attempt, by=by, reason=reason))
    storage.rename(first, f"{folder}/{CLAIM}")
    storage.create(second, 0).discard()
    try:
        storage.rename(second, f"{folder}/{CLAIM}")
    except FileExistsError:
        storage.remove(second)
        return
    raise StorageError(
        f"{folder}: a rename here replaces an existing file, so no commit is safe: choose another "
        f"file system"
    )


def _undo_claim(
    storage: Storage, path: str, attempt: Attempt | None, new_folders: Sequence[str]
) -> None:
    """Undo a claim as far as the storage allows; the caller raises the first error."""
    if attempt is not None:
        # No other process can commit it, so it need not be abandoned first.
        with suppress(CheckpointError, OSError):
            remove(storage, path, attempt)
    _remove_new_folders(storage, new_folders)


def _remove_new_folders(storage: Storage, new_folders: Sequence[str]) -> None:
    for folder in reversed(new_folders):
        with suppress(CheckpointError, OSError):  # in use by another process now
            storage.remove(folder)


def await_claim(storage: Storage, path: str, attempt: Attempt, timeout_s: float) -> None:
    """Wait until the coordinator's claim is visible. Every rank except the coordinator calls this.

    A rank never creates the folder itself. Otherwise, on storage that is not shared, each host
    would get a part of the checkpoint. Raises StorageError after `timeout_s`, ConflictError if the
    attempt is abandoned or removed.
    """
    folder = f"{path}/{attempt}"
    deadline = running_time() + timeout_s
    while True:
        with suppress(FileNotFoundError, NotADirectoryError):
            names = {entry.name for entry in storage.list(folder)}
            if INDEX in names:
                raise _conflict(storage, path, attempt, read_index(storage, path, attempt))
            if CLAIM in names:
                return
        if was_provably_removed(storage, path, attempt):
            raise _conflict(storage, path, attempt, None)
        if running_time() >= deadline:
            raise StorageError(
                f"{folder} is not visible here {timeout_s:g} seconds after the coordinator made "
                f"it: the path is not on storage that all ranks share. Pass a path that is"
            )
        time.sleep(min(_POLL_S, timeout_s))


# --- commit ----------------------------------------------------------------------------------


def check_files(
    storage: Storage, folder: str, expected: Mapping[str, int], *, timeout_s: float = 0.0
) -> None:
    """Check that an attempt's folder has exactly the files of the receipts. Coordinator only.

    `expected` has the size of each file by name. NFS caches listings, so a file of another host may
    appear late: wait up to `timeout_s`. Raises StorageError, which names missing, unexpected and
    wrong files. Raises ConflictError if the folder is gone.
    """
    deadline = running_time() + timeout_s
    while problems := _find_file_problems(storage, folder, expected):
        if running_time() >= deadline:
            more = f" and {len(problems) - 5} more" * (len(problems) > 5)
            raise StorageError(
                f"{folder} differs from the files that the ranks wrote: "
                f"{'; '.join(problems[:5])}{more}. Make sure that all ranks share the storage and "
                f"that no other program writes there"
            )
        time.sleep(min(_POLL_S, timeout_s))


def _find_file_problems(storage: Storage, folder: str, expected: Mapping[str, int]) -> list[str]:
    try:
        entries = storage.list(folder)
    except FileNotFoundError:
        raise ConflictError(
            f"{folder} was removed while it was written: find out by which program, then save again"
        ) from None
    # A rank may abandon the attempt now, by an index. The rename of the commit detects that.
    of_protocol = {entry.name for entry in entries if is_temporary(entry.name)} | {CLAIM, INDEX}
    entry_of = {entry.name: entry for entry in entries if entry.name not in of_protocol}
    problems = [f"{name} is missing" for name in sorted(expected.keys() - entry_of.keys())]
    problems += [f"{name} is unexpected" for name in sorted(entry_of.keys() - expected.keys())]
    for name in sorted(entry_of.keys() & expected.keys()):
        entry = entry_of[name]
        if entry.kind != "file":
            problems.append(f"{name} is not a regular file")
        elif entry.nbytes != expected[name]:
            problems.append(f"{name} has {entry.nbytes} bytes, not {expected[name]}")
    return problems


def commit(
    storage: Storage, claim: Claim, index: Index, encoded_catalog: EncodedCatalog | None = None
) -> None:
    """Make the checkpoint exist. Coordinator only, after `check_files`, once.

    `encoded_catalog` is the catalog of the index, if an earlier save has encoded it. On return the
    index is durable, and all hosts can read the checkpoint.

    Raises ConflictError if the attempt was abandoned, or a newer incarnation has begun. Raises
    StorageError if the storage fails; the message says if the checkpoint exists, or may exist.
    After all other errors nothing is committed.
    """
    temporary = f"{claim.folder}/{temporary_name('index', new_id())}"
    try:
        encoded_catalog = encoded_catalog or EncodedCatalog(index.catalog)
        data = index_json.encode(index, encoded_catalog)
        write_small_file(storage, temporary, data)
        _check_readable(data, encoded_catalog, temporary)
        if read_document(storage, temporary) != data:
            raise StorageError(f"{temporary} reads back with other content: check the storage")
        if claim.incarnation is not None:
            # Check as late as possible: a newer incarnation abandons the open attempts that it
            # finds when it begins (`secure_incarnation`). It may have begun during this save.
            claim.incarnation.check(storage)
    except FileNotFoundError:
        raise _conflict(storage, claim.path, claim.attempt, None) from None
    try:
        document = put_index(storage, claim.path, claim.attempt, temporary)
    except (CheckpointError, FileNotFoundError) as error:
        reason = f"the commit failed: {error}"[:500]
        result = abandon_or_find_outcome(
            storage, claim.path, claim.attempt, by=claim.by, reason=reason
        )
        if result != "abandoned":
            raise unknown_outcome_error(result, claim.path, str(error)) from error
        if isinstance(error, CheckpointError):
            raise
        raise _conflict(storage, claim.path, claim.attempt, None) from None
    if isinstance(document, Abandoned):
        raise _conflict(storage, claim.path, claim.attempt, document)


def _check_readable(data: bytes, encoded_catalog: EncodedCatalog, file: str) -> None:
    """Raise CheckpointError for an index that cannot be loaded. That would be a bug of the plan."""
    try:
        index_json.read_back(data, encoded_catalog, label=file)
    except (CorruptError, IncompatibleError) as error:
        raise CheckpointError(
            f"the index of this save could not be read again, so nothing is committed: this is a "
            f"bug of dist_ckpt, report it ({error.args[0].partition(';')[0]}). "
            f"Older checkpoints are unchanged; save again with another state"
        ) from error


def _conflict(
    storage: Storage, path: str, attempt: Attempt, document: Index | Abandoned | None
) -> ConflictError:
    """Return the error for an attempt that another process has abandoned or removed."""
    if isinstance(document, Abandoned):
        cause = f"abandoned by {document.by}: {document.reason}"
    else:
        later = [other for other in list_attempts(storage, path) if other > attempt]
        cause = "removed by `gc` or a delete"
        if later:
            cause = (
                f"removed, and {later[-1]} claimed {describe_claimant(storage, path, later[-1])}"
            )
    return ConflictError(
        f"{path}/{attempt} was {cause}. Nothing of it is committed: make sure that only one job "
        f"saves here, then save again"
    )


def remove_claimed(storage: Storage, claim: Claim) -> None:
    """Remove an attempt that will not be committed, and the folders created for it.

    Coordinator only, after `try_abandon`, or if `commit` was not called.
    """
    remove(storage, claim.path, claim.attempt)
    _remove_new_folders(storage, claim.new_folders)


# --- the outcome after an error --------------------------------------------------------------


def abandon_or_find_outcome(
    storage: Storage, path: str, attempt: Attempt, *, by: str, reason: str
) -> CommitOutcome:
    """Abandon an attempt that may be committed already. Return its outcome.

    Never raises an error of the storage: if the storage refuses writes, the index may still be
    readable.
    """
    with suppress(CheckpointError, OSError):
        is_abandoned = try_abandon(storage, path, attempt, by=by, reason=reason)
        return "abandoned" if is_abandoned else "committed"
    with suppress(CheckpointError, OSError):
        document = read_index(storage, path, attempt)
        if document is not None:  # without an index, a server may still execute a late rename
            return "in place" if isinstance(document, Index) else "abandoned"
    return "unknown"


def unknown_outcome_error(result: CommitOutcome, path: str, reason: str) -> StorageError:
    """Return the error of a commit that failed for `reason` and could not be abandoned."""
    if result == "unknown":
        return StorageError(
            f"{reason}. Now it is unknown whether it is committed at {path}: check the storage, "
            f"list the path with `dist-ckpt ls`, then repeat the call with overwrite=True"
        )
    # A second fsync proves nothing: fsync reports an error only once.
    return StorageError(
        f"{reason}. The checkpoint is in place at {path}, but it is unknown whether it survives a "
        f"power cut: check the storage, then repeat the call with overwrite=True"
    )
