"""Restore the newest save that is left in memory: of hosts whose trainers have died."""

from __future__ import annotations

import logging
import posixpath
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from dist_ckpt import __version__
from dist_ckpt.async_save.snapshots.arena_layout import UNCLAIMED
from dist_ckpt.async_save.snapshots.job_folder import JobFolder, RankFolder
from dist_ckpt.async_save.snapshots.recovered_snapshots import (
    RecoveredSave,
    RecoveredSaves,
    SaveIdentity,
    committed_in_memory,
    recovered_saves,
    uncommitted_in_memory,
)
from dist_ckpt.async_save.trainer.start_handshake import SaverInfo, check_savers
from dist_ckpt.core.checkpoint.open_checkpoint import MemorySource
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.commit import attempts
from dist_ckpt.core.commit.commit_protocol import attached_of, check_receipts, mismatched_groups
from dist_ckpt.core.commit.records.incarnations import IncarnationHistory, read_history
from dist_ckpt.core.format.filenames import (
    ATTEMPTS_PER_INCARNATION,
    ID_LENGTH,
    Attempt,
    parse_attempt,
)
from dist_ckpt.core.format.index import index_json
from dist_ckpt.core.format.index.index import MAX_STEP, Index
from dist_ckpt.core.loading.load import load_together
from dist_ckpt.core.loading.load_options import LoadOptions
from dist_ckpt.core.runtime.threads import parallel_for
from dist_ckpt.core.runtime.typed_msgpack import Message
from dist_ckpt.core.saving.agreement import plan_of
from dist_ckpt.core.saving.transaction import RankWriteResult
from dist_ckpt.core.state.tree.containers import MutableState
from dist_ckpt.core.storage import Storage, open_storage
from dist_ckpt.errors import (
    CheckpointError,
    CorruptError,
    IncompatibleError,
    NotFoundError,
    StorageError,
)
from dist_ckpt.reports import LoadReport

_log = logging.getLogger("dist_ckpt")


def restore_together(
    ranks: Session,
    folder: JobFolder,
    state: MutableState,
    options: LoadOptions,
    *,
    saver: SaverInfo,
    history: IncarnationHistory | None = None,
) -> tuple[str, LoadReport] | None:
    """Fill a state from the newest save of a job that memory has. Collective: every rank calls it.

    `saver` has the options that are alike on all ranks. Each rank holds its trainer's lock in
    `folder`, its host's, and all of them have settled with the writers that an earlier run has
    left. Returns the snapshot's id and the report; None, having touched nothing, if no save is left
    that can be used:

    - one that was committed, and is still the checkpoint at its path. What the hosts have of it
      is taken from memory, the rest from the storage;
    - one that was never committed, if every host has all of it, and nothing is at its path, or a
      checkpoint that it would have overwritten.

    Neither one beside which a checkpoint of a later step has been committed since: this host may
    have been no part of the run meanwhile. Nor one that is orphaned, by the `history` of the
    run: on rank 0 that is given, or read in the folder that the checkpoint would lie in. What is
    orphaned there does not count as committed.

    What was saved by any number of ranks is restored by any number. Raises what `dc.load` raises,
    on all ranks; StorageError if the storage does not say what is committed.
    """
    passed_over: set[str] = set()
    with ExitStack() as stack:
        restoring = _Restoring(ranks, folder, stack, saver, history)
        while (chosen := restoring.choose(passed_over)) is not None:
            save, kept = chosen
            try:
                report = load_together(ranks, state, save.path, options, kept=kept)
                return save.id, report
            except (CorruptError, NotFoundError) as error:
                # What a load raises it raises on all ranks alike, so that they go on alike.
                if not kept.is_only_copy and isinstance(error, CorruptError):
                    raise  # it is damaged on the storage: the load has tried that as well
                _log.warning("%s is not restored from memory: %s", save.path, error)
                passed_over.add(save.id)
    return None


class _Seen(Message, frozen=True):
    """What one host has of a save: see `RecoveredSave`."""

    save: SaveIdentity
    attempt: str | None
    was_committed: bool
    sealed: frozenset[int]


class _HostSnapshots(Message, frozen=True):
    """What one rank has seen on its host, and what is wrong there."""

    seen: tuple[_Seen, ...]
    problems: tuple[str, ...]


class _RestoreChoice(Message, frozen=True):
    """The save to restore, "" if there is none; the attempt of its index, "" if it is committed."""

    id: str
    path: str
    attempt: str


@dataclass(frozen=True, slots=True)
class _HostReport:
    """What the ranks say about one save; `sealed` are for each the ranks that its host has.

    `attempts` are those that it was claimed as, by what the writers have sealed: one or none.
    """

    save: SaveIdentity
    attempts: frozenset[str]
    was_committed: bool
    sealed: tuple[frozenset[int], ...]

    @property
    def is_everywhere(self) -> bool:
        """Whether every host has all of it."""
        return all(len(there) == self.save.world_size for there in self.sealed)

    def attempt_above(self, number: int) -> Attempt:
        """Return the attempt that it was claimed as; else one that it could have been, above that.

        It is of the start of a run that has saved it, as long as such attempts are above.
        """
        for claimed in map(parse_attempt, self.attempts):
            if claimed is not None:
                return claimed
        first = ATTEMPTS_PER_INCARNATION * self.save.incarnation
        return Attempt(max(first, number + 1), self.save.id[:ID_LENGTH])


class _Restoring:
    """One rank's side; its arenas are open until `stack` closes them."""

    def __init__(
        self,
        ranks: Session,
        folder: JobFolder,
        stack: ExitStack,
        saver: SaverInfo,
        history: IncarnationHistory | None,
    ) -> None:
        self._ranks = ranks
        self._saver = saver
        self._folder = folder
        self._stack = stack
        self._given = history
        self._kept: RecoveredSaves | None = None
        self._index: bytes | None = None

    def choose(self, passed_over: set[str]) -> tuple[_RestoreChoice, MemorySource] | None:
        """Agree on the newest save that can be used, but for some. Collective."""
        channel = self._ranks.channel
        with self._ranks.operation(f"restore of job {self._folder.job}"):
            # When all are here all have settled with their writers: nothing is sealed any more.
            with channel.exchange("settled") as settling:
                savers = settling.gather(self._saver)
                if savers is not None:
                    check_savers("AsyncSaver.restore", savers)
            with channel.exchange("snapshots") as choosing:
                kept, look = self._look()
                looks = choosing.gather(look)
                if looks is not None:
                    choosing.decide(self._choice(looks, passed_over))
        choice = choosing.result(_RestoreChoice)
        if not choice.id:
            return None
        save = kept.saves.get(choice.id)
        if choice.attempt:
            assert save is not None, "every host has it"
            return choice, uncommitted_in_memory(save, choice.attempt, self._index)
        return choice, committed_in_memory(save)

    def _choice(self, looks: Sequence[_HostSnapshots], passed_over: set[str]) -> _RestoreChoice:
        """Choose the newest save that can be used. Coordinator only."""
        for problem in sorted({problem for look in looks for problem in look.problems}):
            _log.warning("not restored from memory: %s", problem)
        for told in _merged([look.seen for look in looks]):
            if told.save.id in passed_over:
                continue
            try:
                attempt = self._attempt_of(told)
            except _UnusableError as error:
                _log.warning("%s is not restored from memory: %s", told.save.name, error)
                continue
            return _RestoreChoice(told.save.id, told.save.path, attempt or "")
        return _RestoreChoice("", "", "")

    def _look(self) -> tuple[RecoveredSaves, _HostSnapshots]:
        """See which saves this host has."""
        problems: tuple[str, ...] = ()
        if self._kept is None:
            self._kept = self._stack.enter_context(recovered_saves(self._folders()))
            problems = self._kept.problems
        seen = tuple(
            _Seen(save.identity, save.attempt, save.was_committed, frozenset(save.sealed))
            for save in self._kept.saves.values()
        )
        return self._kept, _HostSnapshots(seen, problems)

    def _folders(self) -> Iterator[RankFolder]:
        """Yield the folders of this run's ranks, and of those whose trainer is gone."""
        for one in self._folder.present():
            # The trainer's lock of a rank of this run is held by this run.
            if one.rank < self._ranks.channel.world_size or one.owner("trainer") is None:
                yield one
            else:
                _log.warning("%s is not looked at: its trainer lives", one.path)

    def _attempt_of(self, told: _HostReport) -> str | None:
        """Return None if a save was committed; else the attempt that its index, made here, is of.

        _UnusableError says why it cannot be used, StorageError if the storage cannot tell what is
        committed: to pass over what may be the newest is no answer.
        """
        if not any(told.sealed):
            raise _UnusableError("no rank's part of it is whole")
        if len(told.attempts) > 1:
            raise _UnusableError(f"its parts are of several attempts: {sorted(told.attempts)}")
        storage, _ = open_storage(told.save.path)
        history = self._given
        if history is None:
            history = read_history(storage, posixpath.dirname(told.save.path))
        if _is_orphaned(history, told.save.step, told.attempt_above(0)):
            newest = history.newest
            raise _UnusableError(
                f"incarnation {newest} of the run does not go back to it: orphaned"
            )
        if (newer := _newer_beside(storage, told, history, self._ranks.config.threads)) is not None:
            raise _UnusableError(f"{newer} was committed since")
        if (attempt := _uncommitted_attempt(storage, told, history)) is None:
            return None
        self._index = self._rebuilt(told, attempt)
        return attempt

    def _rebuilt(self, told: _HostReport, attempt: str) -> bytes:
        if not told.is_everywhere:
            raise _UnusableError("it was not committed, and not every host has all of it")
        assert self._kept is not None
        try:
            return rebuilt_index(self._kept.saves[told.save.id], attempt)
        except (CheckpointError, ValueError) as error:
            raise _UnusableError(str(error)) from error


def _uncommitted_attempt(
    storage: Storage, told: _HostReport, history: IncarnationHistory
) -> str | None:
    """Return None if a save was committed; else the attempt that would be the checkpoint now."""
    try:
        found, index = attempts.find(storage, told.save.path)
    except NotFoundError:
        if told.was_committed:
            raise _UnusableError("it was committed, and is deleted by now") from None
        return told.attempt_above(0).name
    except (CorruptError, IncompatibleError) as error:
        raise _UnusableError(str(error)) from error
    if found.name in told.attempts:
        return None
    own = told.attempt_above(found.number)
    is_above = own.number > found.number and told.save.incarnation in (0, own.incarnation)
    is_older = told.save.overwrite and index.saved_at < told.save.began_at
    if told.was_committed or not is_above:
        raise _UnusableError(f"{found} is the checkpoint there")
    if not is_older and not _is_orphaned(history, index.step, found):
        raise _UnusableError(f"{found} is the checkpoint there")
    return own.name


def _is_orphaned(history: IncarnationHistory, step: int | None, attempt: Attempt) -> bool:
    # Without a step nothing tells whether it lies below one that somebody went back to.
    return history.is_orphaned(MAX_STEP if step is None else step, attempt)


def _newer_beside(
    storage: Storage, told: _HostReport, history: IncarnationHistory, threads: int
) -> str | None:
    """Return a checkpoint in the same folder of a later step, if one was committed since.

    Later in both: a save that began earlier may be committed later, and who has gone back to an
    older step saves lower ones than there are.
    """
    folder, _, own = told.save.path.rpartition("/")
    if told.save.step is None:
        return None
    step, began_at = told.save.step, told.save.began_at

    def is_newer(path: str) -> bool:
        with suppress(NotFoundError, CorruptError, IncompatibleError):
            found, index = attempts.find(storage, path)
            is_later = index.step is not None and index.step > step and index.saved_at > began_at
            return is_later and not _is_orphaned(history, index.step, found)
        return False

    entries = attempts.entries_at(storage, folder)
    names = (entry.name for entry in entries if entry.kind == "folder")
    paths = [f"{folder}/{name}" for name in names if name != own]
    # Several at once: a run may keep many checkpoints, on a storage that takes its time.
    newer = parallel_for(is_newer, paths, threads=threads)
    return next((path for path, is_one in zip(paths, newer, strict=True) if is_one), None)


class _UnusableError(Exception):
    """A save cannot be restored: why."""


def _merged(looks: Sequence[Sequence[_Seen]]) -> list[_HostReport]:
    """Return what the ranks tell about saves, the newest first."""
    told: dict[SaveIdentity, dict[int, _Seen]] = {}
    for rank, seen in enumerate(looks):
        for one in seen:
            told.setdefault(one.save, {})[rank] = one
    found = []
    for save, by_rank in told.items():
        attempts = {one.attempt for one in by_rank.values() if one.attempt is not None}
        there = (by_rank.get(rank) for rank in range(len(looks)))
        sealed = tuple(frozenset() if one is None else one.sealed for one in there)
        was_committed = any(one.was_committed for one in by_rank.values())
        found.append(_HostReport(save, frozenset(attempts - {UNCLAIMED}), was_committed, sealed))
    return sorted(found, key=lambda one: (one.save.began_at, one.save.id), reverse=True)


def rebuilt_index(save: RecoveredSave, attempt: str) -> bytes:
    """Return the index that a save would have, had it been committed. It is complete here.

    StorageError or ValueError if it could not have been committed, or another version planned it.
    """
    details = [save.details(rank) for rank in range(save.identity.world_size)]
    first = details[0]
    if first.saved_by.get("dist_ckpt") != __version__:
        raise ValueError(f"{first.saved_by} has saved it, and this dist_ckpt is {__version__}")
    receipts = []
    for rank, one in enumerate(details):
        seal = save.sealed[rank].seal
        assert seal is not None, "it is sealed"
        receipts.append(RankWriteResult(seal.files, one.replicas, 0.0).receipt)
    if mismatched_groups(receipts):
        raise StorageError("its ranks hold different values under the same name")
    catalog = plan_of(first.bodies, save.identity.world_size).catalog
    files, objects = check_receipts(catalog, receipts)
    return index_json.encode(
        Index(
            attempt=attempt,
            save=save.identity.id,
            step=save.identity.step,
            catalog=catalog,
            files=files,
            objects=objects,
            attached=attached_of(receipts),
            metadata=first.mirrored,
            saved_by=first.saved_by,
            saved_at=first.began_at,
        )
    )
