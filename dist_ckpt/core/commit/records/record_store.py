"""Write and read annotations of checkpoints: durable files in the root that never change.

A committed attempt never changes. So facts that are added later are stored in the root, as

    <root>/.annotations/<step>/<attempt>/<kind>-<number>-<id>.json    metrics, tags, pins, ...

Each file is written under a temporary name and renamed, which never replaces a file. So a file is
complete or absent. The records of `incarnations.py` are written in the same way.

dist_ckpt reads the records of 0.1.0, and writes nothing next to them:

    <root>/.facts     now `.annotations`
    <root>/.starts    now `.incarnations`, with other names of fields

A job of 0.1.0 does not see the new folders, and would remove a checkpoint with a pin there. So all
writes and removals are refused until `dist-ckpt upgrade` has converted both folders.
"""

from __future__ import annotations

import logging
import os
import posixpath
import shlex
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from operator import attrgetter
from pathlib import PurePosixPath

from dist_ckpt.core.commit import attempts
from dist_ckpt.core.format.filenames import (
    ANNOTATIONS,
    INCARNATIONS,
    MAX_ANNOTATION,
    OLD_ANNOTATIONS,
    OLD_INCARNATIONS,
    AnnotationName,
    Attempt,
    is_temporary_record,
    parse_annotation_name,
    parse_step,
    temporary_name,
)
from dist_ckpt.core.format.run_records import (
    MAX_NBYTES_OF_RECORD,
    Annotation,
    R,
    decode_record,
    encode_record,
)
from dist_ckpt.core.format.strict_json import Scalar
from dist_ckpt.core.storage import Entry, Storage
from dist_ckpt.errors import (
    CheckpointError,
    CorruptError,
    IncompatibleError,
    NotFoundError,
    StorageError,
)

_log = logging.getLogger("dist_ckpt")

OLD_FOLDERS = (OLD_ANNOTATIONS, OLD_INCARNATIONS)


@dataclass(frozen=True, slots=True)
class StoredAnnotation:
    """An annotation and its file, which was created at `modified_at` by the storage's clock.

    `by` names the writer. If the file cannot be read, `problem` says why, and `values` is empty.
    `is_old` annotations are in the folder of dist_ckpt 0.1.0. While that folder exists, nothing is
    written into the new folder. So if both folders exist, jobs of 0.1.0 wrote last.
    """

    step: int
    attempt: Attempt
    name: AnnotationName
    modified_at: float
    values: Mapping[str, Scalar]
    problem: str = ""
    by: str = ""
    is_old: bool = False


def put_annotation(
    storage: Storage, root: str, annotation: Annotation, *, above: int = 0
) -> AnnotationName:
    """Add an annotation to a checkpoint; it is durable on return.

    Its number is higher than `above`, and than all numbers of its kind there. Missing folders are
    created, but not the root. StorageError if the annotation may not exist. Raises the errors of
    `make_record_folders`.
    """
    data = encode_record(annotation)
    folder = annotations_folder(root, annotation.step, annotation.attempt)
    for _ in range(attempts.MAX_TRIES):
        make_record_folders(storage, root, folder)
        entries = attempts.list_entries(storage, folder)
        names = (parse_annotation_name(entry.name) for entry in entries)
        numbers = [name.number for name in names if name and name.kind == annotation.kind]
        number = 1 + max([above, *numbers])
        if number > MAX_ANNOTATION:
            raise StorageError(
                f"{folder}: no number is left above {number - 1}: find out which program wrote that"
            )
        name = AnnotationName(annotation.kind, number, attempts.new_id())
        # A pruner of annotations of removed checkpoints may have removed the folder.
        with suppress(FileNotFoundError):
            put_record(storage, folder, str(name), data)
            return name
    raise StorageError(f"{folder} is removed again and again: find out what removes it")


def read_annotations(
    storage: Storage, root: str, *, with_old: bool = False
) -> tuple[StoredAnnotation, ...]:
    """Return all annotations of a root, by step, attempt and name; () without the folder.

    `with_old` includes annotations of dist_ckpt 0.1.0. A writer does not need them, because it is
    refused if there are any.
    """
    return _sorted(
        _read_attempt(storage, above, step, attempt)
        for above in _folders(root, with_old=with_old)
        for entry in attempts.list_entries(storage, above)
        if (step := parse_step(entry.name)) is not None
        for attempt in attempts.parse_attempts(
            attempts.list_entries(storage, f"{above}/{entry.name}")
        )
    )


def read_annotations_of(
    storage: Storage, root: str, step: int, attempt: Attempt, *, with_old: bool = False
) -> tuple[StoredAnnotation, ...]:
    """Return the annotations of one attempt, by name; `with_old` as in `read_annotations`."""
    return _sorted(
        _read_attempt(storage, above, step, attempt) for above in _folders(root, with_old=with_old)
    )


def _folders(root: str, *, with_old: bool) -> list[str]:
    # An upgrade moves records from the old folder to the new one. So read the old folder first.
    names = (OLD_ANNOTATIONS, ANNOTATIONS) if with_old else (ANNOTATIONS,)
    return [f"{root}/{name}" for name in names]


def _sorted(several: Iterable[Iterable[StoredAnnotation]]) -> tuple[StoredAnnotation, ...]:
    key = attrgetter("step", "attempt", "is_old", "name")
    return tuple(sorted(chain.from_iterable(several), key=key))


def _read_attempt(
    storage: Storage, above: str, step: int, attempt: Attempt
) -> Iterator[StoredAnnotation]:
    folder = f"{above}/{step}/{attempt}"
    is_old = posixpath.basename(above) == OLD_ANNOTATIONS
    for file in attempts.list_entries(storage, folder):
        name = parse_annotation_name(file.name)
        if name is not None and file.kind == "file":
            with suppress(FileNotFoundError):  # pruned since
                unread = StoredAnnotation(step, attempt, name, file.modified_at, {}, is_old=is_old)
                yield _read_values(storage, f"{folder}/{file.name}", unread)


def new_annotation(
    step: int, attempt: Attempt, kind: str, values: Mapping[str, Scalar]
) -> Annotation:
    """Return a new annotation of this process."""
    return Annotation(step, attempt, kind, values, this_process(), time.time())


def this_process() -> str:
    """Return the name of this process for a record, such as "process 12 on host"."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def read_record(storage: Storage, file: str, cls: type[R], *, is_old: bool = False) -> R:
    """Read and decode a record. Raises the errors of `decode_record`, and FileNotFoundError."""
    data = attempts.read_document(storage, file, MAX_NBYTES_OF_RECORD)
    return decode_record(data, cls, file, is_old=is_old)


def annotations_folder(root: str, step: int, attempt: Attempt) -> str:
    """Return the folder of the annotations of an attempt."""
    return f"{root}/{ANNOTATIONS}/{step}/{attempt}"


def _read_values(storage: Storage, file: str, unread: StoredAnnotation) -> StoredAnnotation:
    """Return an annotation with the values in its file, or with its `problem`."""
    try:
        annotation = read_record(storage, file, Annotation)
    except (CorruptError, IncompatibleError) as error:
        return replace(unread, problem=str(error))
    expected = unread.step, unread.attempt, unread.name.kind
    if (annotation.step, annotation.attempt, annotation.kind) != expected:
        content = f"{annotation.kind} of {annotation.attempt}, step {annotation.step}"
        return replace(unread, problem=f"{file}: it has {content}; remove it")
    return replace(unread, values=annotation.values, by=annotation.by)


# --- write -----------------------------------------------------------------------------------


def make_record_folders(storage: Storage, root: str, folder: str) -> None:
    """Make a folder in the root and its missing parents. Their names are durable on return.

    IncompatibleError if the root has old records and needs an upgrade. NotFoundError if the root
    does not exist: it was moved or removed just now.
    """
    check_upgraded(storage, root)
    try:
        make_durable_folders(storage, root, folder, within=root)
    except FileNotFoundError as error:
        raise NotFoundError(f"{root} was moved or removed: find it, then try again") from error


def make_durable_folders(
    storage: Storage, root: str, folder: str, *, within: str | None = None
) -> None:
    """Do the same without these checks. `within` is as in `make_folders`."""
    new_folders: list[str] = []
    attempts.make_folders(storage, folder, new_folders, within=within)
    # Also sync folders that exist: the process that made them may have died before its own sync.
    parents = map(str, PurePosixPath(folder).parents)
    below = {parent for parent in parents if parent.startswith(root)}
    for parent in below | {posixpath.dirname(path) for path in new_folders}:
        with suppress(FileNotFoundError):  # removed meanwhile: the caller detects that
            storage.sync(parent)


def put_record(storage: Storage, folder: str, name: str, data: bytes) -> None:
    """Create a file, durable on return. FileExistsError if another file has the name.

    FileNotFoundError if the folder is gone.
    """
    temporary, file = f"{folder}/{temporary_name('record', attempts.new_id())}", f"{folder}/{name}"
    attempts.write_small_file(storage, temporary, data)
    try:
        storage.rename(temporary, file)
    except (StorageError, FileNotFoundError, FileExistsError):
        # The storage may have renamed it and lost the reply: the file there decides.
        with suppress(CheckpointError, FileNotFoundError, NotADirectoryError):
            storage.remove(temporary)
        content = None
        with suppress(CorruptError, FileNotFoundError):
            content = attempts.read_document(storage, file, MAX_NBYTES_OF_RECORD)
        if content != data:
            raise
    storage.sync(folder)


def list_temporary_records(storage: Storage, root: str) -> list[tuple[str, float]]:
    """Return the path and the time of each temporary annotation in a root. Follow no link."""
    above = f"{root.rstrip('/')}/{ANNOTATIONS}"
    folders = [
        f"{above}/{step.name}/{attempt}"
        for step in _list_real(storage, above)
        if parse_step(step.name) is not None
        for attempt in attempts.parse_attempts(_list_real(storage, f"{above}/{step.name}"))
    ]
    return [
        (f"{folder}/{entry.name}", entry.modified_at)
        for folder in folders
        for entry in _list_real(storage, folder)
        if entry.kind == "file" and is_temporary_record(entry.name)
    ]


def _list_real(storage: Storage, folder: str) -> Sequence[Entry]:
    with suppress(FileNotFoundError, NotADirectoryError):
        return storage.list(folder, follow=False)
    return ()


def can_keep_records(storage: Storage, root: str) -> bool:
    """Return True if a folder has records of a run, new or old."""
    return _has_records(storage, root)[0]


def can_lease(storage: Storage, root: str) -> bool:
    """Return True if a folder has records of a run, and needs no upgrade."""
    has_records, is_old = _has_records(storage, root)
    return has_records and not is_old


def _has_records(storage: Storage, root: str) -> tuple[bool, bool]:
    """Return whether a folder has records, and whether it has old ones. Warn of old ones."""
    entries = attempts.list_entries(storage, root)
    old = old_folders_in(entries)
    warn_of_old(root, old)
    has_new = any(entry.name in (ANNOTATIONS, INCARNATIONS) for entry in entries)
    return has_new or bool(old), bool(old)


# --- records of dist_ckpt 0.1.0 --------------------------------------------------------------


def old_folders_in(entries: Iterable[Entry]) -> tuple[str, ...]:
    """Return the names of the old folders among the entries of a root."""
    names = {entry.name for entry in entries if entry.kind == "folder"}
    return tuple(name for name in OLD_FOLDERS if name in names)


def find_old_folders(
    storage: Storage, root: str, names: Iterable[str] = OLD_FOLDERS
) -> tuple[str, ...]:
    """Return the names of the old folders in a root.

    Lists each old folder: that is cheaper than to list a root with a thousand checkpoints.
    """
    return tuple(name for name in names if _is_folder(storage, f"{root.rstrip('/')}/{name}"))


def _is_folder(storage: Storage, path: str) -> bool:
    try:
        storage.list(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def check_upgraded(storage: Storage, root: str) -> None:
    """Raise IncompatibleError if a root has old records. Call this before anything is written."""
    refuse_old(root, find_old_folders(storage, root))


def refuse_old(root: str, folders: tuple[str, ...]) -> None:
    """Raise IncompatibleError if a root has these old folders; do nothing for ()."""
    if folders:
        raise IncompatibleError(
            f"{root}: {_named(folders)} of dist_ckpt 0.1.0, so nothing is written or removed here. "
            f"End the jobs of 0.1.0 that use this root, then run "
            f"`dist-ckpt upgrade {shlex.quote(root)}`"
        )


@cache
def warn_of_old(root: str, folders: tuple[str, ...]) -> None:
    """Log once for each process that a root needs an upgrade; do nothing for ()."""
    if folders:
        _log.warning(
            "%s: %s of dist_ckpt 0.1.0, which can only be read. Run `dist-ckpt upgrade %s`",
            *(root, _named(folders), root),
        )


def _named(folders: tuple[str, ...]) -> str:
    verb = "is" if len(folders) == 1 else "are"
    return f"{' and '.join(folders)} {verb}"
