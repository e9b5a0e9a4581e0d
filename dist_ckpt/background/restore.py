"""Restore the newest save that is left in memory: of hosts whose trainers have died."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import KW_ONLY, dataclass

from dist_ckpt import __version__, commit
from dist_ckpt.background.readiness import ALIKE
from dist_ckpt.comm.exchange import Doc, check_alike
from dist_ckpt.comm.session import Session
from dist_ckpt.commit.receipts import check_receipts, differing_groups
from dist_ckpt.errors import (
    CheckpointError,
    CorruptError,
    IncompatibleError,
    NotFoundError,
    StorageError,
)
from dist_ckpt.format import index_json
from dist_ckpt.format.filenames import ID_LENGTH, Attempt, parse_attempt
from dist_ckpt.format.index import Index
from dist_ckpt.loading.load import load_together
from dist_ckpt.loading.options import LoadOptions
from dist_ckpt.planning.plan import Receipt
from dist_ckpt.reports import LoadReport
from dist_ckpt.runtime.threads import each
from dist_ckpt.saving.agreement import plan_of
from dist_ckpt.saving.replica_samples import members_digest
from dist_ckpt.snapshots.arena_layout import UNCLAIMED
from dist_ckpt.snapshots.job_folder import JobFolder, RankFolder
from dist_ckpt.snapshots.kept import KeptSave, KeptSaves, kept_saves
from dist_ckpt.snapshots.kept_files import KeptCommitted, KeptFiles, KeptUncommitted
from dist_ckpt.state.containers import MutableState
from dist_ckpt.storage import Storage, open_storage

_log = logging.getLogger("dist_ckpt")


def restore_together(
    ranks: Session,
    folder: JobFolder,
    state: MutableState,
    options: LoadOptions,
    storage: Storage | None = None,
    *,
    saver: Doc,
) -> tuple[str, LoadReport] | None:
    """Fill a state from the newest save of a job that memory has. Collective: every rank calls it.

    `saver` has the options of the saver that are alike on all ranks (`readiness.ALIKE`).
    Each rank holds its trainer's lock in `folder`, its host's, and all of them have settled with
    the writers that an earlier run has left. Returns the snapshot's id and the report; None, having
    touched nothing, if no save is left that can be used:

    - one that was committed, and is still the checkpoint at its path. What the hosts have of it
      is taken from memory, the rest from the storage;
    - one that was never committed, if every host has all of it, and nothing is at its path, or a
      checkpoint that it would have overwritten.

    Neither one beside which a checkpoint of a later step has been committed since: this host may
    have been no part of the run meanwhile.

    What was saved by any number of ranks is restored by any number. Raises what `dc.load` raises,
    on all ranks; StorageError if the storage does not say what is committed.
    """
    passed_over: set[str] = set()
    with ExitStack() as stack:
        restoring = _Restoring(ranks, folder, storage, stack, saver)
        while (chosen := restoring.choose(passed_over)) is not None:
            try:
                report = load_together(ranks, state, chosen.path, options, storage, chosen.kept)
                return chosen.id, report
            except (CorruptError, NotFoundError) as error:
                # What a load raises it raises on all ranks alike, so that they go on alike.
                if not chosen.kept.is_only_copy and isinstance(error, CorruptError):
                    raise  # it is damaged on the storage: the load has tried that as well
                _log.warning("%s is not restored from memory: %s", chosen.path, error)
                passed_over.add(chosen.id)
    return None


# What the ranks tell alike of a save, in the order in which `_Told` takes it.
_ALIKE = ("id", "path", "step", "world_size", "began_at", "overwrite")


@dataclass(frozen=True, slots=True)
class _Told:
    """What the ranks say about one save; `sealed` are for each the ranks that its host has.

    `attempts` are those that it was claimed as, by what the writers have sealed: one or none.
    """

    id: str
    path: str
    step: int | None
    world_size: int
    began_at: float
    overwrite: bool
    _: KW_ONLY
    attempts: frozenset[str]
    was_committed: bool
    sealed: tuple[frozenset[int], ...]

    @property
    def name(self) -> str:
        return self.path if self.step is None else f"step {self.step} ({self.path})"

    @property
    def is_everywhere(self) -> bool:
        """Whether every host has all of it."""
        return all(len(there) == self.world_size for there in self.sealed)


@dataclass(frozen=True, slots=True)
class _Chosen:
    id: str
    path: str
    kept: KeptFiles


class _Restoring:
    """One rank's side; its arenas are open until `stack` closes them."""

    def __init__(
        self,
        ranks: Session,
        folder: JobFolder,
        storage: Storage | None,
        stack: ExitStack,
        saver: Doc,
    ) -> None:
        self._ranks = ranks
        self._saver = saver
        self._folder = folder
        self._storage = storage
        self._stack = stack
        self._kept: KeptSaves | None = None
        self._index: bytes | None = None

    def choose(self, passed_over: set[str]) -> _Chosen | None:
        """Agree on the newest save that can be used, but for some. Collective."""

        def decide(payloads: Sequence[Doc]) -> Doc:
            for problem in sorted({one for payload in payloads for one in payload["problems"]}):
                _log.warning("not restored from memory: %s", problem)
            for told in _merged([payload["saves"] for payload in payloads]):
                if told.id in passed_over:
                    continue
                try:
                    attempt = self._attempt_of(told)
                except _UnusableError as error:
                    _log.warning("%s is not restored from memory: %s", told.name, error)
                    continue
                return {"id": told.id, "path": told.path, "attempt": attempt}
            return None

        with self._ranks.operation(f"restore of job {self._folder.job}"):
            # When all are here all have settled with their writers: nothing is sealed any more.
            self._ranks.channel.exchange("settled", lambda: self._saver, _compare)
            answer = self._ranks.channel.exchange("snapshots", self._look, decide)
        if answer is None:
            return None
        assert self._kept is not None
        save = self._kept.saves.get(answer["id"])
        if answer["attempt"] is None:
            return _Chosen(answer["id"], answer["path"], KeptCommitted(save))
        assert save is not None, "every host has it"
        kept = KeptUncommitted(save, answer["attempt"], self._index)
        return _Chosen(answer["id"], answer["path"], kept)

    def _look(self) -> Doc:
        """Tell which saves this host has."""
        problems: tuple[str, ...] = ()
        if self._kept is None:
            self._kept = self._stack.enter_context(kept_saves(self._folders()))
            problems = self._kept.problems
        saves = [
            {
                **{name: getattr(save, name) for name in _ALIKE},
                "attempt": save.attempt,
                "was_committed": save.was_committed,
                "sealed": sorted(save.sealed),
            }
            for save in self._kept.saves.values()
        ]
        return {"saves": saves, "problems": list(problems)}

    def _folders(self) -> Iterator[RankFolder]:
        """Yield the folders of this run's ranks, and of those whose trainer is gone."""
        for one in self._folder.present():
            # The trainer's lock of a rank of this run is held by this run.
            if one.rank < self._ranks.channel.world_size or one.owner("trainer") is None:
                yield one
            else:
                _log.warning("%s is not looked at: its trainer lives", one.path)

    def _attempt_of(self, told: _Told) -> str | None:
        """Return None if a save was committed; else the attempt that its index, made here, is of.

        _UnusableError says why it cannot be used, StorageError if the storage cannot tell what is
        committed: to pass over what may be the newest is no answer.
        """
        if not any(told.sealed):
            raise _UnusableError("no rank's part of it is whole")
        if len(told.attempts) > 1:
            raise _UnusableError(f"its parts are of several attempts: {sorted(told.attempts)}")
        storage = self._storage or open_storage(told.path)[0]
        if (newer := _newer_beside(storage, told, self._ranks.config.threads)) is not None:
            raise _UnusableError(f"{newer} was committed since")
        above = 1
        try:
            found, index = commit.find(storage, told.path)
        except NotFoundError:
            if told.was_committed:
                raise _UnusableError("it was committed, and is deleted by now") from None
        except (CorruptError, IncompatibleError) as error:
            raise _UnusableError(str(error)) from error
        else:
            if found.name in told.attempts:
                return None
            if index.saved_at >= told.began_at or not _would_replace(told, found):
                raise _UnusableError(f"{found} is the checkpoint there")
            above = found.number + 1
        (attempt,) = told.attempts or {Attempt(above, told.id[:ID_LENGTH]).name}
        self._index = self._rebuilt(told, attempt)
        return attempt

    def _rebuilt(self, told: _Told, attempt: str) -> bytes:
        if not told.is_everywhere:
            raise _UnusableError("it was not committed, and not every host has all of it")
        assert self._kept is not None
        try:
            return rebuilt_index(self._kept.saves[told.id], attempt)
        except (CheckpointError, ValueError) as error:
            raise _UnusableError(str(error)) from error


def _compare(savers: Sequence[Doc]) -> Doc:
    check_alike("AsyncSaver.restore", savers, ALIKE)


def _would_replace(told: _Told, found: Attempt) -> bool:
    """Say whether a save would be the checkpoint instead of an older one, had it been committed."""
    claimed = [parse_attempt(attempt) for attempt in told.attempts]
    is_above = all(one is not None and one.number > found.number for one in claimed)
    return told.overwrite and not told.was_committed and is_above


def _newer_beside(storage: Storage, told: _Told, threads: int) -> str | None:
    """Return a checkpoint in the same folder of a later step, if one was committed since.

    Later in both: a save that began earlier may be committed later, and who has gone back to an
    older step saves lower ones than there are.
    """
    folder, _, own = told.path.rpartition("/")
    if told.step is None:
        return None
    try:
        entries = storage.list(folder)
    except (FileNotFoundError, NotADirectoryError):
        return None
    step, began_at = told.step, told.began_at

    def is_newer(path: str) -> bool:
        with suppress(NotFoundError, CorruptError, IncompatibleError):
            _, index = commit.find(storage, path)
            return index.step is not None and index.step > step and index.saved_at > began_at
        return False

    names = (entry.name for entry in entries if entry.kind == "folder")
    paths = [f"{folder}/{name}" for name in names if name != own]
    # Several at once: a run may keep many checkpoints, on a storage that takes its time.
    newer = each(is_newer, paths, threads=threads)
    return next((path for path, is_one in zip(paths, newer, strict=True) if is_one), None)


class _UnusableError(Exception):
    """A save cannot be restored: why."""


def _merged(payloads: Sequence[Sequence[Doc]]) -> list[_Told]:
    """Return what the ranks tell about saves, the newest first."""
    told: dict[tuple[Doc, ...], dict[int, Doc]] = {}
    for rank, saves in enumerate(payloads):
        for save in saves:
            what = tuple(save[name] for name in _ALIKE)
            told.setdefault(what, {})[rank] = save
    found = []
    for what, saves_of in told.items():
        attempts = {save["attempt"] for save in saves_of.values()} - {None, UNCLAIMED}
        there = (saves_of.get(rank, {"sealed": ()}) for rank in range(len(payloads)))
        sealed = tuple(frozenset(save["sealed"]) for save in there)
        was_committed = any(save["was_committed"] for save in saves_of.values())
        found.append(
            _Told(*what, attempts=frozenset(attempts), was_committed=was_committed, sealed=sealed)
        )
    return sorted(found, key=lambda one: (one.began_at, one.id), reverse=True)


def rebuilt_index(save: KeptSave, attempt: str) -> bytes:
    """Return the index that a save would have, had it been committed. It is complete here.

    StorageError or ValueError if it could not have been committed, or another version planned it.
    """
    details = [save.details(rank) for rank in range(save.world_size)]
    first = details[0]
    if first.saved_by.get("dist_ckpt") != __version__:
        raise ValueError(f"{first.saved_by} has saved it, and this dist_ckpt is {__version__}")
    receipts = []
    for rank, one in enumerate(details):
        seal = save.sealed[rank].seal
        assert seal is not None, "it is sealed"
        replicas = tuple((group, members_digest(dict(members))) for group, members in one.replicas)
        receipts.append(Receipt(seal.files, replicas, 0.0))
    if differing_groups(receipts):
        raise StorageError("its ranks hold different values under the same name")
    catalog = plan_of(first.bodies, save.world_size).catalog
    files, objects = check_receipts(catalog, receipts)
    return index_json.encode(
        Index(
            attempt=attempt,
            step=save.step,
            catalog=catalog,
            files=files,
            objects=objects,
            metadata=first.mirrored,
            saved_by=first.saved_by,
            saved_at=first.began_at,
        )
    )
