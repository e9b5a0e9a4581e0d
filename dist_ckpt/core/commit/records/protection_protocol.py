"""Pin, tag or lease a checkpoint. Remove a checkpoint only if it has no such protection.

- To remove: write a deletion intent, and look for protections. If there is none, rename the
  checkpoint; otherwise withdraw the intent.
- To protect: write the pin, tag or lease. Look for deletion intents, then for the checkpoint. If
  there is an intent, or no checkpoint, withdraw the protection and raise an error.

So of two processes at least one sees the other, even if one of them dies. A removal deletes its
intent last, because a protector looks for intents first.

`protections.py` defines the annotations. `docs/decisions/0016-leases-against-prune.md` has the
reasons.
"""

from __future__ import annotations

import errno
import posixpath
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any

from dist_ckpt.core.commit.attempts import has_folder, list_entries, new_id
from dist_ckpt.core.commit.records.protections import (
    DELETION_INTENT,
    DELETION_INTENT_S,
    LEASE,
    PIN,
    SAVED,
    TAG,
    CheckpointKey,
    deletion_intents_of,
    newest_tagged,
    protections_of,
)
from dist_ckpt.core.commit.records.record_store import (
    StoredAnnotation,
    annotations_folder,
    new_annotation,
    old_folders_in,
    put_annotation,
    read_annotations,
    read_annotations_of,
)
from dist_ckpt.core.format.filenames import (
    ANNOTATIONS,
    AnnotationName,
    Attempt,
    is_temporary_record,
    parse_annotation_name,
)
from dist_ckpt.core.format.strict_json import Scalar, is_text
from dist_ckpt.core.storage import Storage, entry_path
from dist_ckpt.core.storage.storage_wrappers import UnansweredError
from dist_ckpt.errors import CheckpointError, ExistsError, NotFoundError, StorageError

# Errors after which the call may still take effect on the server of a network mount.
_NO_ANSWER = {errno.EIO, errno.ETIMEDOUT, errno.ESTALE, errno.ECONNRESET, errno.ENOTCONN}


@dataclass(frozen=True, slots=True)
class CheckpointRef:
    """A committed attempt in a root, to which annotations refer. `path` is its checkpoint."""

    storage: Storage
    root: str
    path: str
    key: CheckpointKey

    def put(self, kind: str, values: Mapping[str, Scalar], *, above: int = 0) -> AnnotationName:
        """Write an annotation of this attempt, durable on return."""
        annotation = new_annotation(*self.key, kind, values)
        return put_annotation(self.storage, self.root, annotation, above=above)

    def annotations(self) -> tuple[StoredAnnotation, ...]:
        """Return the annotations of this attempt."""
        return read_annotations_of(self.storage, self.root, *self.key)

    def withdraw(self, name: AnnotationName) -> None:
        """Remove an annotation that was written just now. Never raises."""
        file = f"{annotations_folder(self.root, *self.key)}/{name}"
        with suppress(CheckpointError, FileNotFoundError, NotADirectoryError):
            self.storage.remove(file)

    def exists(self) -> bool:
        """Return True if the attempt is not removed."""
        return has_folder(self.storage, self.path, self.key[1])


# --- protect ---------------------------------------------------------------------------------


def pin(ref: CheckpointRef, why: str | None) -> None:
    """Protect a checkpoint until `unpin`. Durable on return. NotFoundError if it is gone.

    None keeps the reason of the pin that it has.
    """
    why = pin_reason(ref) if why is None else why
    _check_text("why", why)
    protect(ref, PIN, {"pinned": True, "why": why})


def pin_reason(ref: CheckpointRef) -> str:
    """Return the reason of a checkpoint's pin; "" without a pin."""
    return protections_of(ref.annotations(), now=0.0).pins.get(ref.key, "")


def unpin(ref: CheckpointRef) -> None:
    """Remove the pin of a checkpoint, if it has one."""
    ref.put(PIN, {"pinned": False, "why": ""})


def tag(ref: CheckpointRef, name: str) -> None:
    """Give a checkpoint a tag, which protects it. If another checkpoint has the tag, move the tag.

    Durable on return. NotFoundError if the checkpoint is gone.
    """
    _check_text("name", name)
    protect(ref, TAG, {name: True}, above=_highest_tag(ref))


def untag(ref: CheckpointRef, name: str) -> None:
    """Remove a tag from the checkpoint that has it."""
    ref.put(TAG, {name: False}, above=_highest_tag(ref))


def _highest_tag(ref: CheckpointRef) -> int:
    names = [annotation.name for annotation in read_annotations(ref.storage, ref.root)]
    return max((name.number for name in names if name.kind == TAG), default=0)


def _check_text(name: str, text: str) -> None:
    if not is_text(text):
        raise ValueError(f"{name}={text!r} is not valid UTF-8: give another text")


def protect(ref: CheckpointRef, kind: str, values: Mapping[str, Scalar], *, above: int = 0) -> None:
    """Write a pin, tag or lease. Withdraw it after an error.

    NotFoundError if the checkpoint is removed, or another process is about to remove it.
    """
    name = ref.put(kind, values, above=above)
    try:
        _check_protected(ref, name)
    except BaseException:
        ref.withdraw(name)
        raise


def _check_protected(ref: CheckpointRef, name: AnnotationName) -> None:
    """Raise NotFoundError for a deletion intent or a removed checkpoint. Look in that order."""
    annotations = ref.annotations()
    written = [annotation for annotation in annotations if annotation.name == name]
    now = written[0].modified_at if written else 0.0
    for owner in deletion_intents_of(annotations, now):
        raise NotFoundError(f"{ref.path} is about to be removed by {owner}: choose another")
    if not written or not ref.exists():
        raise NotFoundError(f"{ref.path}: {ref.key[1]} was removed: choose another")


def protections_at(
    storage: Storage,
    path: str,
    candidates: Collection[Attempt],
    clock: Callable[[Storage, str], float],
) -> dict[Attempt, tuple[str, ...]]:
    """Return the protections of attempts at a path, as texts. Unprotected attempts are left out.

    See `protections_in`.
    """
    if not candidates:
        return {}
    return protections_in(storage, posixpath.dirname(entry_path(path)), candidates, clock)


def protections_in(
    storage: Storage,
    root: str,
    candidates: Collection[Attempt],
    clock: Callable[[Storage, str], float],
) -> dict[Attempt, tuple[str, ...]]:
    """Return the protections of attempts in a root, as `protections_at` does.

    `clock` returns the storage's time at a folder. A root without annotations costs one listing.
    """
    entries = list_entries(storage, root)
    old = old_folders_in(entries)
    if not old and all(entry.name != ANNOTATIONS for entry in entries):
        return {}
    annotations = read_annotations(storage, root, with_old=bool(old))
    subjects = {
        (annotation.step, annotation.attempt)
        for annotation in annotations
        if annotation.attempt in candidates and annotation.name.kind in (PIN, TAG, LEASE)
    }
    if not subjects:
        return {}
    protections = protections_of(annotations, clock(storage, root))
    return {key[1]: texts for key in subjects if (texts := protections.of(key))}


def refuse_protected(path: str, protections: Mapping[Attempt, tuple[str, ...]]) -> None:
    """Raise ExistsError if an attempt that a save would replace is pinned, tagged or leased."""
    for attempt, texts in sorted(protections.items()):
        raise ExistsError(
            f"{path}: the checkpoint there ({attempt}) is protected: {'; '.join(texts)}. Remove "
            f"the protection first, or choose another path"
        )


# --- remove ----------------------------------------------------------------------------------


def remove_if_unprotected(
    ref: CheckpointRef,
    remove: Callable[[], None],
    *,
    other_annotations: Iterable[StoredAnnotation] = (),
    force: bool = False,
    check: Callable[[], None] = lambda: None,
) -> tuple[str, ...]:
    """Remove a checkpoint, unless it is protected: then return its protections as texts.

    `other_annotations` are annotations of other checkpoints: they show if a tag has moved. `check`
    is called right before `remove`, and raises an error if the removal is forbidden.

    `remove` begins with the rename. If `remove` raises, the deletion intent is withdrawn only if it
    is certain that nothing was removed, and no call can take effect later. Otherwise the intent
    stays: no process can protect the checkpoint now, and a later prune can complete the removal.
    """
    began = monotonic()
    intent = _put_intent(ref)
    try:
        protections = () if force else _find_protections(ref, other_annotations, intent)
        if not protections:
            check()
        if not protections and monotonic() - began > DELETION_INTENT_S / 2:
            protections = ("its removal took so long that another process may have a lease by now",)
    except BaseException:
        ref.withdraw(intent)
        raise
    if protections:
        ref.withdraw(intent)
        return protections
    try:
        remove()
    except BaseException as error:
        if (call := _find_unanswered_call(error)) is not None:
            keep = partial(_keep_until_answered, ref, intent, call)
            threading.Thread(target=keep, name="dist_ckpt removal", daemon=True).start()
        elif _is_answered(error):
            _withdraw_if_there(ref, intent)
        raise
    return ()


def _put_intent(ref: CheckpointRef) -> AnnotationName:
    """Write a deletion intent. On a full disk, first remove the save times of the checkpoint."""
    values = {new_id(): ref.path.rpartition("/")[2]}
    try:
        return ref.put(DELETION_INTENT, values)
    except StorageError as error:
        if not is_for_want_of_room(error):
            raise
        names = [annotation.name for annotation in ref.annotations()]
        for name in names:
            if name.kind == SAVED:
                ref.withdraw(name)
        return ref.put(DELETION_INTENT, values)


def is_for_want_of_room(error: BaseException) -> bool:
    """Return True if a disk or a quota is full."""
    full = (errno.ENOSPC, errno.EDQUOT)
    return any(isinstance(cause, OSError) and cause.errno in full for cause in _causes(error))


def is_forbidden(error: BaseException) -> bool:
    """Return True if the storage refused a call because this user has no permission."""
    return any(isinstance(cause, PermissionError) for cause in _causes(error))


def _find_unanswered_call(error: BaseException) -> Future[Any] | None:
    """Return the storage call that missed its deadline, or was interrupted, if there is one."""
    for cause in _causes(error):
        if isinstance(cause, UnansweredError):
            return cause.call
    return None


def _is_answered(error: BaseException) -> bool:
    """Return True if an error is the storage's answer, after which no call takes effect.

    A network mount that gave up waiting for its server answers with one of `_NO_ANSWER`.
    """
    codes = [cause.errno for cause in _causes(error) if isinstance(cause, OSError)]
    is_of_storage = any(isinstance(cause, StorageError) for cause in _causes(error))
    return not _NO_ANSWER.intersection(codes) if codes else not is_of_storage


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what caused it, in order."""
    while error is not None:
        yield error
        error = error.__cause__


def _keep_until_answered(ref: CheckpointRef, intent: AnnotationName, call: Future[Any]) -> None:
    """Renew a deletion intent until the call has an answer; withdraw it if nothing was removed."""
    while not wait((call,), timeout=DELETION_INTENT_S / 4).done:
        with suppress(CheckpointError):
            newer = _put_intent(ref)
            ref.withdraw(intent)
            intent = newer
    _withdraw_if_there(ref, intent)


def _withdraw_if_there(ref: CheckpointRef, intent: AnnotationName) -> None:
    with suppress(CheckpointError):
        if ref.exists():
            ref.withdraw(intent)


def _find_protections(
    ref: CheckpointRef, other_annotations: Iterable[StoredAnnotation], intent: AnnotationName
) -> tuple[str, ...]:
    annotations = ref.annotations()
    # The intent was written just now, so its time is the current time. If it is missing, another
    # process has removed the checkpoint and its annotations.
    times = [annotation.modified_at for annotation in annotations if annotation.name == intent]
    now = max(times, default=0.0)
    of_others = [other for other in other_annotations if (other.step, other.attempt) != ref.key]
    return protections_of([*of_others, *annotations], now).of(ref.key)


def remove_annotations(
    storage: Storage,
    root: str,
    key: CheckpointKey,
    annotations: Sequence[StoredAnnotation],
    *,
    keep_intents: bool = False,
) -> None:
    """Remove the annotations of a checkpoint that is gone. `annotations` has those of the root.

    Deletion intents are removed last, so that the next prune recognises the remains of a crash.
    With `keep_intents` they stay, and the next prune continues the removal.
    """
    # A tag belongs to the checkpoint with its newest annotation. That one is removed here. So first
    # remove the older annotations of other checkpoints, or one of them would get the tag.
    tags = {name for name, (last, _) in newest_tagged(annotations).items() if last == key}
    for stored in annotations:
        is_outdated = stored.name.kind == TAG and stored.values and tags >= stored.values.keys()
        if is_outdated and (stored.step, stored.attempt) != key:
            above = annotations_folder(root, stored.step, stored.attempt)
            _remove(storage, f"{above}/{stored.name}")
    folder = annotations_folder(root, *key)
    names = [entry.name for entry in list_entries(storage, folder) if entry.kind == "file"]
    ours = [name for name in names if is_temporary_record(name) or parse_annotation_name(name)]
    if keep_intents:
        ours = [name for name in ours if not name.startswith(DELETION_INTENT)]
    for name in sorted(ours, key=lambda name: (name.startswith(DELETION_INTENT), name)):
        _remove(storage, f"{folder}/{name}")
    with suppress(StorageError):  # another process has written something there
        _remove(storage, folder)
        _remove(storage, f"{root}/{ANNOTATIONS}/{key[0]}")


def _remove(storage: Storage, path: str) -> None:
    with suppress(FileNotFoundError, NotADirectoryError):
        storage.remove(path)
