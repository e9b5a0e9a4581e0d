"""What lies in a run's folder: its checkpoints, each with what became known of it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dist_ckpt.config import Config
from dist_ckpt.core.commit import attempts
from dist_ckpt.core.commit.records.incarnations import IncarnationHistory, read_history
from dist_ckpt.core.commit.records.protections import Where
from dist_ckpt.core.commit.records.record_store import StoredAnnotation, read_annotations
from dist_ckpt.core.format.filenames import NO_CHECKPOINTS, Attempt, parse_attempt
from dist_ckpt.core.format.index.model_description import kind_of
from dist_ckpt.core.format.strict_json import Json
from dist_ckpt.core.runtime.threads import parallel_for
from dist_ckpt.core.storage import Storage, open_storage
from dist_ckpt.errors import CorruptError, IncompatibleError, NotFoundError
from dist_ckpt.runs.annotations import KnownAnnotations, annotations_of

_log = logging.getLogger("dist_ckpt")


@dataclass(frozen=True, slots=True)
class RunCheckpoint:
    """One checkpoint in a folder: what its index says of it, and what became known since.

    `state` is "committed", or why it cannot be opened; then `problem` says more, and what its index
    would say is None. `saved_at` is in seconds since 1970. `metrics` are the newest values, which
    may be nan. `pin` is why it is pinned, None if it is not; `holds` say who holds it now. `guards`
    is all that keeps it from being removed, in words. `is_verified`: somebody has read and checked
    all of it. `is_left_behind`: a later start of its run went on from an earlier step, so nothing
    goes on from it any more. `is_being_replaced`: a save over it is under way, or died.
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
    save: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    pin: str | None = None
    holds: tuple[str, ...] = ()
    guards: tuple[str, ...] = ()
    is_verified: bool = False
    is_left_behind: bool = False
    is_being_replaced: bool = False

    @property
    def is_pinned(self) -> bool:
        """Say whether somebody wants it kept until it is unpinned."""
        return self.pin is not None

    @property
    def kind(self) -> str | None:
        """The `kind` that was given to the save; None if none was, or it is not committed."""
        return kind_of(self.metadata or {})

    @property
    def where(self) -> Where | None:
        """The step and attempt that facts are about; None if not committed, or without a step."""
        attempt = parse_attempt(self.attempt or "")
        return None if self.step is None or attempt is None else (self.step, attempt)


@dataclass(frozen=True, slots=True)
class Listing:
    """A run's checkpoints by step, and the facts about them.

    `problems` are facts that cannot be read. `newest_incarnation` is the number of the run's newest
    start, 0 if none is recorded. `history_problem` says why it is not known what is left behind; ""
    if it is.
    """

    root: str
    checkpoints: tuple[RunCheckpoint, ...]
    facts: tuple[StoredAnnotation, ...]
    problems: tuple[str, ...] = ()
    newest_incarnation: int = 0
    history_problem: str = ""

    @property
    def alive(self) -> tuple[RunCheckpoint, ...]:
        """The committed ones that a run may go on from: with a step, and not left behind."""
        if self.history_problem:
            raise CorruptError(self.history_problem)
        return tuple(one for one in self.checkpoints if one.where and not one.is_left_behind)


def checkpoints(root: str | os.PathLike[str]) -> tuple[RunCheckpoint, ...]:
    """Return the checkpoints in a folder by step; if it is one itself, only that.

    What has no step, or is not committed, comes first, by name; whatever else lies there is left
    out. Whether a hold has expired is asked of this host's clock. One process calls it, and nothing
    is changed. Raises NotFoundError if there is no such folder.
    """
    storage, folder = open_storage(root)
    listing = list_run(storage, folder, now=time.time())
    if listing.history_problem:
        _log.warning("what is left behind is not known: %s", listing.history_problem)
    return listing.checkpoints


def list_run(storage: Storage, folder: str, *, now: float) -> Listing:
    """Read what `checkpoints` returns; `now` is the time by which holds expire."""
    one = _look(storage, folder)
    root = folder if one is None else folder.rpartition("/")[0] or "/"
    found = _all_in(storage, root) if one is None else [one]
    facts = read_annotations(storage, root)
    known = annotations_of(facts, now)
    history, problem = _history(storage, root)
    told = [_with_facts(one, known, history) for one in found]
    by_step = tuple(sorted(told, key=_by_step))
    return Listing(root, by_step, facts, known.problems, history.newest, problem)


def _by_step(one: RunCheckpoint) -> tuple[bool, int, Where, str]:
    return one.step is not None, one.step or 0, one.where or (0, _NO_ATTEMPT), one.name


_NO_ATTEMPT = Attempt(0, "")


def _all_in(storage: Storage, root: str) -> Sequence[RunCheckpoint]:
    try:
        entries = storage.list(root)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFoundError(f"{root} is no folder; choose another path") from error
    names = [one.name for one in entries if one.kind == "folder"]
    paths = [f"{root.rstrip('/')}/{name}" for name in names if name not in NO_CHECKPOINTS]
    threads = Config.from_environment().threads
    found = parallel_for(lambda path: _look(storage, path), paths, threads=threads)
    return [one for one in found if one is not None]


def _look(storage: Storage, path: str) -> RunCheckpoint | None:
    """Return a checkpoint with what its index says, or None if there is not even an attempt."""
    there = attempts.list_attempts(storage, path)
    if not there:
        return None
    name = path.rpartition("/")[2]
    try:
        attempt, index = attempts.find(storage, path)
    except CorruptError as error:
        return RunCheckpoint(name, path, "damaged", problem=str(error))
    except IncompatibleError as error:
        return RunCheckpoint(name, path, "incompatible", problem=str(error))
    except NotFoundError as error:
        statuses = attempts.statuses(storage, path)
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
        save=index.save,
        is_being_replaced=there[-1] > attempt,
    )


def _history(storage: Storage, root: str) -> tuple[IncarnationHistory, str]:
    try:
        return read_history(storage, root), ""
    except (CorruptError, IncompatibleError) as error:
        return IncarnationHistory({}), str(error)


def _with_facts(
    one: RunCheckpoint, known: KnownAnnotations, history: IncarnationHistory
) -> RunCheckpoint:
    where = one.where
    if where is None:
        return one
    return replace(
        one,
        metrics=known.metrics.get(where, {}),
        tags=tuple(known.guards.tags.get(where, ())),
        pin=known.guards.pins.get(where),
        holds=tuple(known.guards.holds.get(where, ())),
        guards=known.guards.of(where),
        is_verified=where in known.verified,
        is_left_behind=history.is_left_behind(*where),
    )
