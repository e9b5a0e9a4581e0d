"""List a run's folder: its checkpoints, each with its annotations.

Metrics and save times are in `metrics.py`. Pins, tags and leases, which protect a checkpoint, are
in `commit/records/protections.py`; the results of checks in `commit/records/recorded_checks.py`.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dist_ckpt.core.commit import attempts
from dist_ckpt.core.commit.records.incarnations import IncarnationHistory, read_history
from dist_ckpt.core.commit.records.protections import CheckpointKey, protections_of
from dist_ckpt.core.commit.records.record_store import (
    StoredAnnotation,
    find_old_folders,
    old_folders_in,
    read_annotations,
    warn_of_old,
)
from dist_ckpt.core.commit.records.recorded_checks import newest_checks
from dist_ckpt.core.format.filenames import RESERVED_NAMES, Attempt, parse_attempt
from dist_ckpt.core.format.index.model_description import kind_of
from dist_ckpt.core.format.strict_json import Json
from dist_ckpt.core.runtime.public_names import refuse_old_attributes
from dist_ckpt.core.runtime.threads import parallel_for
from dist_ckpt.core.storage import (
    Entry,
    Storage,
    describe_link,
    is_linked_step,
    linked_step_problem,
    open_storage,
    real_path,
)
from dist_ckpt.core.storage.storage_wrappers import UnansweredError
from dist_ckpt.errors import (
    CheckpointError,
    CorruptError,
    IncompatibleError,
    NotFoundError,
    StorageError,
)
from dist_ckpt.runs.metrics import metrics_by_checkpoint
from dist_ckpt.settings import Settings

_log = logging.getLogger("dist_ckpt")


@dataclass(frozen=True, slots=True)
class RunCheckpoint:
    """One checkpoint in a folder: facts from its index, and annotations that were added since.

    `state` is "committed", or why it cannot be opened; then `problem` says more, and the fields of
    the index are None. "unreadable": the storage cannot read it, so it may be whole. `saved_at` is
    in seconds since 1970. `save_id` is the id of the save; copies have the same. `metrics` are the
    newest values, which may be nan. `pin` is the reason of its pin; None if it has no pin. `leases`
    are the owners of its leases. `protected_by` lists its protections as texts. `is_verified`: all
    of it was read and checked. `damage` is what a later check or load found damaged, or None: no
    run resumes from it, and no rule of `keep` counts it. `is_orphaned`: a later incarnation of its
    run resumed from an earlier step, so nothing resumes from it any more. `is_being_replaced`: a
    save over it is in progress, or died. `link` is the target of the link that the run has in place
    of its folder; a link that is not read counts as damaged.
    """

    name: str
    path: str
    state: attempts.AttemptState
    step: int | None = None
    nbytes: int | None = None
    world_size: int | None = None
    num_tensors: int | None = None
    saved_at: float | None = None
    metadata: Mapping[str, Json] | None = None
    problem: str | None = None
    attempt: str | None = None
    save_id: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    pin: str | None = None
    leases: tuple[str, ...] = ()
    protected_by: tuple[str, ...] = ()
    is_verified: bool = False
    damage: str | None = None
    is_orphaned: bool = False
    is_being_replaced: bool = False
    link: str | None = None
    if not TYPE_CHECKING:
        __getattr__ = refuse_old_attributes(
            "RunCheckpoint",
            {
                "holds": "leases",
                "guards": "protected_by",
                "is_left_behind": "is_orphaned",
                "save": "save_id",
            },
        )

    @property
    def is_pinned(self) -> bool:
        """Return True if it stays until it is unpinned."""
        return self.pin is not None

    @property
    def kind(self) -> str | None:
        """The `kind` that was given to the save; None if none was, or it is not committed."""
        return kind_of(self.metadata or {})

    @property
    def where(self) -> CheckpointKey | None:
        """The step and attempt of its annotations; None if not committed, or without a step."""
        attempt = parse_attempt(self.attempt or "")
        return None if self.step is None or attempt is None else (self.step, attempt)


@dataclass(frozen=True, slots=True)
class Listing:
    """A run's checkpoints by step, and their annotations.

    `problems` has the errors of annotations that cannot be read. `newest_incarnation` is a number,
    0 if none is recorded. `history_problem` is "", or the error if the history cannot be read: then
    the orphaned checkpoints are unknown. `old_folders` are folders of dist_ckpt 0.1.0 in the root:
    nothing may be written or removed there.
    """

    root: str
    checkpoints: tuple[RunCheckpoint, ...]
    annotations: tuple[StoredAnnotation, ...]
    problems: tuple[str, ...] = ()
    newest_incarnation: int = 0
    history_problem: str = ""
    old_folders: tuple[str, ...] = ()

    @property
    def not_orphaned(self) -> tuple[RunCheckpoint, ...]:
        """The committed checkpoints of the run itself: with a step, and not orphaned."""
        if self.history_problem:
            raise CorruptError(self.history_problem)
        return tuple(info for info in self.checkpoints if info.where and not info.is_orphaned)

    @property
    def usable(self) -> tuple[RunCheckpoint, ...]:
        """Those of `not_orphaned` without recorded damage: a run resumes from the last one."""
        return tuple(info for info in self.not_orphaned if info.damage is None)


def checkpoints(root: str | os.PathLike[str]) -> tuple[RunCheckpoint, ...]:
    """Return the checkpoints in a folder by step. The path of a checkpoint lists only that one.

    Those without a step, or not committed, come first, by name. Other files are ignored. This
    host's clock says which leases have expired. One process calls it, and nothing is changed.
    Raises NotFoundError if the folder does not exist.
    """
    storage, folder = open_storage(root)
    listing = list_run(storage, folder, now=time.time(), with_unreadable=True)
    if listing.history_problem:
        _log.warning("the orphaned checkpoints are unknown: %s", listing.history_problem)
    return listing.checkpoints


def list_run(
    storage: Storage, folder: str, *, now: float, with_unreadable: bool = False
) -> Listing:
    """Return the checkpoints and records of a folder; leases expire by the time `now`.

    If the storage cannot read one of several checkpoints, raise StorageError, because it may be the
    newest. Or list it as "unreadable", `with_unreadable`.
    """
    single = _read_checkpoint(storage, folder)
    root = folder if single is None else folder.rpartition("/")[0] or "/"
    if single is None:
        entries = list_folder(storage, root)
        infos, old = _read_all(storage, root, entries), old_folders_in(entries)
    else:
        infos, old = [single], find_old_folders(storage, root)
    for info in infos:
        if info.state == "unreadable" and (single is not None or not with_unreadable):
            raise StorageError(info.problem or "")
    warn_of_old(root, old)
    annotations = read_annotations(storage, root, with_old=bool(old))
    history, history_problem = IncarnationHistory({}), ""
    try:
        history = read_history(storage, root, with_old=bool(old))
    except (CorruptError, IncompatibleError) as error:
        history_problem = str(error)
    metrics, protections = metrics_by_checkpoint(annotations), protections_of(annotations, now)
    checks, num_folders = newest_checks(annotations), Counter(info.where for info in infos)

    def annotated(info: RunCheckpoint) -> RunCheckpoint:
        if (key := info.where) is None:
            return info
        # A result does not say which folder it is about, if another has a plain copy of its files.
        check = checks.get(key) if num_folders[key] == 1 else None
        damage = (check and check.damage) or None
        return replace(
            info,
            metrics=metrics.get(key, {}),
            tags=tuple(protections.tags.get(key, ())),
            pin=protections.pins.get(key),
            leases=tuple(protections.leases.get(key, ())),
            protected_by=protections.of(key),
            is_verified=check is not None and damage is None,
            damage=damage,
            is_orphaned=history.is_orphaned(*key),
        )

    infos = sorted(map(annotated, infos), key=lambda info: (info.where or _BEFORE_STEPS, info.name))
    problems = tuple(annotation.problem for annotation in annotations if annotation.problem)
    return Listing(root, tuple(infos), annotations, problems, history.newest, history_problem, old)


_BEFORE_STEPS = -1, Attempt(0, "")


def list_folder(storage: Storage, root: str) -> Sequence[Entry]:
    """Return the entries of a folder. NotFoundError if it does not exist."""
    try:
        return storage.list(root)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise attempts.no_folder_error(root, error) from error


def is_run_folder(storage: Storage, folder: str) -> bool:
    """Return True if checkpoints are in a folder that is not one itself. False after an error."""
    with suppress(CheckpointError, OSError):
        entries = storage.list(folder)
        if any(attempts.parse_attempts(entries)):  # one checkpoint
            return False
        below = [entry.name for entry in entries if entry.kind == "folder"]
        return any(attempts.list_attempts(storage, f"{folder}/{name}") for name in below)
    return False


def _read_all(storage: Storage, root: str, entries: Sequence[Entry]) -> Sequence[RunCheckpoint]:
    found = {
        f"{root.rstrip('/')}/{e.name}": e.kind for e in entries if e.name not in RESERVED_NAMES
    }
    paths = [
        path
        for path, kind in found.items()
        if kind == "folder" or (kind == "other" and is_linked_step(path))
    ]
    threads = Settings.from_environment().threads
    infos = parallel_for(lambda path: _read_checkpoint(storage, path), paths, threads=threads)
    return [info for info in infos if info is not None]


def _read_checkpoint(storage: Storage, path: str) -> RunCheckpoint | None:
    return (_read_linked_step if is_linked_step(path) else _read_folder)(storage, path)


def _read_linked_step(storage: Storage, path: str) -> RunCheckpoint:
    problem = linked_step_problem(storage, path)
    info = None if problem else _read_folder(storage, path)
    if info is None or info.state in ("open", "abandoned"):
        problem = problem or f"{describe_link(path)}, which has no committed checkpoint"
        info = RunCheckpoint(path.rpartition("/")[2], path, "damaged", problem=problem)
    return replace(info, link=real_path(path))


def _read_folder(storage: Storage, path: str) -> RunCheckpoint | None:
    """Return a checkpoint with the fields of its index; None if the folder has no attempt."""
    try:
        return _read_attempts(storage, path)
    except UnansweredError:  # the others would not be answered either
        raise
    except StorageError as error:
        return RunCheckpoint(path.rpartition("/")[2], path, "unreadable", problem=str(error))


def _read_attempts(storage: Storage, path: str) -> RunCheckpoint | None:
    numbered = attempts.list_attempts(storage, path)
    if not numbered:
        return None
    name = path.rpartition("/")[2]
    try:
        attempt, index = attempts.find_checkpoint(storage, path)
    except CorruptError as error:
        return RunCheckpoint(name, path, "damaged", problem=str(error))
    except IncompatibleError as error:
        return RunCheckpoint(name, path, "incompatible", problem=str(error))
    except NotFoundError as error:
        statuses = attempts.list_statuses(storage, path)
        if not statuses:
            return None
        return RunCheckpoint(name, path, statuses[-1].state, problem=str(error))
    return RunCheckpoint(
        name=name,
        path=path,
        state="committed",
        step=index.step,
        nbytes=index.nbytes,
        world_size=index.catalog.world_size,
        num_tensors=len(index.catalog.tensors),
        saved_at=index.saved_at,
        metadata=index.metadata,
        attempt=attempt.name,
        save_id=index.save,
        is_being_replaced=numbered[-1] > attempt,
    )
