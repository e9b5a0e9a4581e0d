"""Hold a checkpoint, pin it, tag it; and remove one that nobody keeps so.

Who removes: puts a mark, looks for what keeps the checkpoint, then renames it, or takes the mark
back. Who keeps: puts the pin, tag or hold, looks for marks, and then for the checkpoint; if there
is a mark, or no checkpoint, takes it back and says so. So of the two at least one sees the other,
whoever dies where. Marks go last of all, for who keeps looks for them first.

`protections.py` says what the facts mean, `docs/decisions/0016-holds-against-prune.md` why it is
so.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite
from time import monotonic

from dist_ckpt.core.commit.attempts import entries_at, is_there, new_id
from dist_ckpt.core.commit.records.protections import (
    DELETION_INTENT_S,
    HOLD,
    MARK,
    PIN,
    TAG,
    Where,
    deletion_intents_of,
    newest_tagged,
    protections_of,
)
from dist_ckpt.core.commit.records.record_store import (
    StoredAnnotation,
    annotations_folder,
    new_annotation,
    put_annotation,
    read_annotations,
    read_annotations_of,
)
from dist_ckpt.core.format.filenames import (
    FACTS,
    AnnotationName,
    Attempt,
    is_temporary_record,
    parse_annotation_name,
)
from dist_ckpt.core.format.strict_json import Scalar
from dist_ckpt.core.storage import Storage, real_path
from dist_ckpt.errors import CheckpointError, ExistsError, NotFoundError, StorageError


@dataclass(frozen=True, slots=True)
class CheckpointRef:
    """A committed attempt in a root: what facts are about. `path` is its checkpoint's."""

    storage: Storage
    root: str
    path: str
    where: Where

    def put(self, kind: str, values: Mapping[str, Scalar], *, above: int = 0) -> AnnotationName:
        """Put a fact about it; durable on return."""
        fact = new_annotation(*self.where, kind, values)
        return put_annotation(self.storage, self.root, fact, above=above)

    def facts(self) -> tuple[StoredAnnotation, ...]:
        """Return the facts about it."""
        return read_annotations_of(self.storage, self.root, *self.where)

    def take_back(self, name: AnnotationName) -> None:
        """Remove a fact that was put just now and means nothing any more; never raises."""
        file = f"{annotations_folder(self.root, *self.where)}/{name}"
        with suppress(CheckpointError, FileNotFoundError, NotADirectoryError):
            self.storage.remove(file)

    def is_there(self) -> bool:
        """Say whether it is not removed yet."""
        return is_there(self.storage, self.path, self.where[1])


# --- keeping ---------------------------------------------------------------------------------


def pin(subject: CheckpointRef, why: str) -> None:
    """Keep a checkpoint until it is unpinned; durable on return. NotFoundError if it is gone."""
    _keep(subject, PIN, {"pinned": True, "why": why})


def unpin(subject: CheckpointRef) -> None:
    """Take the pin from a checkpoint, if it has one."""
    subject.put(PIN, {"pinned": False, "why": ""})


def tag(subject: CheckpointRef, name: str) -> None:
    """Give a checkpoint a tag, which another may have had before; it is kept as long as it has it.

    Durable on return. NotFoundError if the checkpoint is gone.
    """
    _keep(subject, TAG, {name: True}, above=_highest_tag(subject))


def untag(subject: CheckpointRef, name: str) -> None:
    """Take a tag from a checkpoint, which is the one that has it."""
    subject.put(TAG, {name: False}, above=_highest_tag(subject))


def _highest_tag(subject: CheckpointRef) -> int:
    facts = read_annotations(subject.storage, subject.root)
    return max((fact.name.number for fact in facts if fact.name.kind == TAG), default=0)


@dataclass(frozen=True, slots=True)
class Lease:
    """A checkpoint that is kept for `ttl_s` seconds, by the storage's clock, and then again."""

    subject: CheckpointRef
    ttl_s: float
    id: str = field(default_factory=new_id)

    def take(self) -> None:
        """Hold it from now on for `ttl_s`; durable on return, and may be called again to hold on.

        NotFoundError if it is gone, or about to be: then it is not held. StorageError if that took
        longer than the hold would last.
        """
        began = monotonic()
        _keep(self.subject, HOLD, {self.id: self.ttl_s})
        if monotonic() - began >= self.ttl_s:
            raise StorageError(
                f"{self.subject.path}: to hold it took longer than the {self.ttl_s:g} s for which "
                f"it is held: hold it for longer"
            )

    def release(self) -> None:
        """Hold it no more. If that cannot be put down, the hold ends by itself."""
        with suppress(CheckpointError):
            if self.subject.is_there():
                self.subject.put(HOLD, {self.id: 0})


def checked_ttl(ttl_s: float) -> float:
    """Return for how long to hold something. ValueError or TypeError if that makes no sense."""
    if not isinstance(ttl_s, int | float) or isinstance(ttl_s, bool):
        raise TypeError(f"ttl_s={ttl_s!r}: give a number of seconds")
    if not (isfinite(ttl_s) and ttl_s > 0):
        raise ValueError(f"ttl_s={ttl_s}: give a number of seconds above 0")
    return float(ttl_s)


def _keep(
    subject: CheckpointRef, kind: str, values: Mapping[str, Scalar], *, above: int = 0
) -> None:
    name = subject.put(kind, values, above=above)
    try:
        _check_kept(subject, name)
    except BaseException:
        subject.take_back(name)
        raise


def _check_kept(subject: CheckpointRef, name: AnnotationName) -> None:
    """Look for marks, then for the checkpoint: in this order, for who removes it does so too."""
    facts = subject.facts()
    own = [fact for fact in facts if fact.name == name]
    for who in deletion_intents_of(facts, own[0].modified_at if own else 0.0):
        raise NotFoundError(f"{subject.path} is about to be removed by {who}: choose another")
    if not own or not subject.is_there():
        raise NotFoundError(f"{subject.path}: {subject.where[1]} was removed: choose another")


def protections_at(
    storage: Storage,
    path: str,
    those: Collection[Attempt],
    clock: Callable[[Storage, str], float],
) -> dict[Attempt, tuple[str, ...]]:
    """Return which of the attempts at a path are pinned, tagged or held, and how, in words.

    `clock` tells the storage's time at a folder. Where a run keeps no facts that costs one listing,
    and none if there are no such attempts.
    """
    if not those:
        return {}
    root = posixpath.dirname(real_path(path))
    if all(entry.name != FACTS for entry in entries_at(storage, root)):
        return {}
    facts = read_annotations(storage, root)
    places = {
        (fact.step, fact.attempt)
        for fact in facts
        if fact.attempt in those and fact.name.kind in (PIN, TAG, HOLD)
    }
    if not places:
        return {}
    guards = protections_of(facts, clock(storage, root))
    return {place[1]: told for place in places if (told := guards.of(place))}


def check_unprotected(
    storage: Storage,
    path: str,
    those: Collection[Attempt],
    clock: Callable[[Storage, str], float],
) -> None:
    """Raise ExistsError if an attempt that a save would replace is pinned, tagged or held."""
    for attempt, told in sorted(protections_at(storage, path, those, clock).items()):
        raise ExistsError(
            f"{path}: the checkpoint that is here ({attempt}) is kept: {'; '.join(told)}. Take "
            f"that away first, or choose another path"
        )


# --- removing --------------------------------------------------------------------------------


def remove_if_unprotected(
    subject: CheckpointRef,
    remove: Callable[[], None],
    *,
    others: Iterable[StoredAnnotation] = (),
    force: bool = False,
    check: Callable[[], None] = lambda: None,
) -> tuple[str, ...]:
    """Remove a checkpoint, unless something keeps it: then return what, and touch nothing.

    `others` are facts about others, by which tags may have moved. `check` raises what forbids the
    removal, right before it. `remove` begins with the rename. What it raises leaves the mark, by
    which `finish` goes on, unless nothing is removed yet.
    """
    began = monotonic()
    mark = subject.put(MARK, {new_id(): subject.path.rpartition("/")[2]})
    try:
        told = () if force else _kept_by(subject, others, mark)
        if not told:
            check()
        if not told and monotonic() - began > DELETION_INTENT_S / 2:
            told = ("its removal stood still for so long that others may hold it by now",)
    except BaseException:
        subject.take_back(mark)
        raise
    if told:
        subject.take_back(mark)
        return told
    try:
        remove()
    except BaseException:
        with suppress(CheckpointError):
            if subject.is_there():
                subject.take_back(mark)
        raise
    return ()


def _kept_by(
    subject: CheckpointRef, others: Iterable[StoredAnnotation], mark: AnnotationName
) -> tuple[str, ...]:
    facts = subject.facts()
    # The mark was put just now: so this is the time. Without it somebody else has removed all.
    now = max((fact.modified_at for fact in facts if fact.name == mark), default=0.0)
    own = [one for one in others if (one.step, one.attempt) != subject.where]
    return protections_of([*own, *facts], now).of(subject.where)


def forget(storage: Storage, root: str, where: Where, facts: Sequence[StoredAnnotation]) -> None:
    """Remove what is known of a checkpoint that is gone; `facts` are those of the root.

    Marks go last, so that what is left after a crash is known to be left.
    """
    for fact in _outdone(where, facts):
        _remove(storage, f"{annotations_folder(root, fact.step, fact.attempt)}/{fact.name}")
    folder = annotations_folder(root, *where)
    names = [entry.name for entry in entries_at(storage, folder) if entry.kind == "file"]
    ours = [
        name
        for name in names
        if is_temporary_record(name) or parse_annotation_name(name) is not None
    ]
    for name in sorted(ours, key=lambda name: (name.startswith(MARK), name)):
        _remove(storage, f"{folder}/{name}")
    with suppress(StorageError):  # somebody has put something there
        _remove(storage, folder)
        _remove(storage, f"{root}/{FACTS}/{where[0]}")


def _outdone(where: Where, facts: Sequence[StoredAnnotation]) -> list[StoredAnnotation]:
    """Return the facts that have put elsewhere a tag that the checkpoint has, or had last.

    Without the newest fact about a tag, which goes with the checkpoint, the one before would count
    again, and another checkpoint have the tag.
    """
    names = {name for name, (place, _) in newest_tagged(facts).items() if place == where}
    return [
        fact
        for fact in facts
        if fact.name.kind == TAG
        and (fact.step, fact.attempt) != where
        and fact.values
        and names >= fact.values.keys()
    ]


def _remove(storage: Storage, path: str) -> None:
    with suppress(FileNotFoundError, NotADirectoryError):
        storage.remove(path)
