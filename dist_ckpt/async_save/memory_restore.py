"""Restore the newest save in the memory of the hosts, after the trainers have died."""

from __future__ import annotations

import logging
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from dist_ckpt import __version__, errors
from dist_ckpt.async_save.snapshots.arena_layout import SnapshotMetadata
from dist_ckpt.async_save.snapshots.job_folder import JobFolder, RankFolder
from dist_ckpt.async_save.snapshots.recovered_snapshots import (
    RecoveredSave,
    SaveIdentity,
    open_saves,
)
from dist_ckpt.async_save.snapshots.snapshot_files import (
    find_checkpoint_files,
    make_uncommitted_files,
)
from dist_ckpt.async_save.trainer.start_handshake import SaverInfo
from dist_ckpt.async_save.writer.staged_save import index_fields
from dist_ckpt.core.checkpoint.opener import NOTHING_IN_MEMORY, MemoryFiles
from dist_ckpt.core.comm.exchange.channel import check_equal_on_all_ranks
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.commit import attempts
from dist_ckpt.core.commit.receipts import find_unequal_groups
from dist_ckpt.core.commit.records.incarnations import IncarnationHistory, read_history
from dist_ckpt.core.commit.transaction import RankWriteResult
from dist_ckpt.core.format import filenames
from dist_ckpt.core.format.index import index_json
from dist_ckpt.core.format.index.index import MAX_STEP
from dist_ckpt.core.loading.load import load_together
from dist_ckpt.core.loading.load_options import LoadOptions
from dist_ckpt.core.runtime import typed_msgpack
from dist_ckpt.core.runtime.threads import parallel_for
from dist_ckpt.core.runtime.typed_msgpack import Message
from dist_ckpt.core.saving.agreement import build_plan
from dist_ckpt.core.state.tree.containers import MutableState
from dist_ckpt.core.storage import Storage, open_storage
from dist_ckpt.reports import LoadReport

_log = logging.getLogger("dist_ckpt")


def restore_together(
    session: Session,
    folder: JobFolder,
    state: MutableState,
    options: LoadOptions,
    *,
    saver: SaverInfo,
) -> tuple[str, LoadReport] | None:
    """Fill a state from the newest usable save of a job in memory. Collective: every rank calls it.

    `saver` has the options that are equal on all ranks. Each rank has its trainer's lock in
    `folder`, and no orphan writer lives. Return the snapshot's id and the report. None, with an
    unchanged state, if no save is usable. A save is usable in two cases:

    - The save was committed, and is still the checkpoint at its path. Files that are not in memory
      are read from the storage.
    - The save was never committed, the memory of each host has the host's whole part, and the save
      may be written to its path: no checkpoint is there, or the save has `overwrite`.

    Two kinds of saves are not usable. One is a save with a later committed step in the same folder:
    this host may have left the run, and another host has continued it. For example, the memory has
    step 500, and the folder has step 800. The other kind is an orphaned save. Rank 0 reads the
    history of the run from the folder of the checkpoint. Orphaned checkpoints do not count as
    later committed steps.

    The number of ranks may differ from that of the save. Raises the errors of `dc.load` on all
    ranks. StorageError if the storage cannot be read.
    """
    unusable: set[str] = set()
    with ExitStack() as stack:
        restore = _MemoryRestore(session, folder, stack, saver)
        while (chosen := restore.choose(unusable)) is not None:
            save, source = chosen
            try:
                report = load_together(session, state, save.path, options, memory=source)
                return save.id, report
            except (errors.CorruptError, errors.NotFoundError) as error:
                # All ranks get the same error, so that all continue in the same way.
                if not source.is_only_copy and isinstance(error, errors.CorruptError):
                    raise  # the load has tried the storage too: it is damaged there
                _log.warning("%s is not restored from memory: %s", save.path, error)
                unusable.add(save.id)
    return None


class _SaveOnHost(Message, frozen=True):
    """One host's part of a save: see `RecoveredSave`."""

    save: SaveIdentity
    attempt: str | None
    was_committed: bool
    sealed: frozenset[int]


class _HostReport(Message, frozen=True):
    """The saves on one rank's host, and the problems of arenas."""

    saves: tuple[_SaveOnHost, ...]
    problems: tuple[str, ...]


class _RestoreChoice(Message, frozen=True):
    """The save to restore; `id` is "" if there is none.

    `attempt` is the attempt of its rebuilt index, or "" if the save is committed.
    """

    id: str
    path: str
    attempt: str


@dataclass(frozen=True, slots=True)
class _SaveOnAllHosts:
    """One save on all hosts. `sealed` has, for each rank, the ranks that are sealed on its host.

    `attempts` has the claimed attempt, if a writer received one.
    """

    save: SaveIdentity
    attempts: frozenset[str]
    was_committed: bool
    sealed: tuple[frozenset[int], ...]

    def attempt_above(self, number: int) -> filenames.Attempt:
        """Return the claimed attempt; else one above `number`, of its incarnation if possible."""
        for claimed in map(filenames.parse_attempt, self.attempts):
            if claimed is not None:
                return claimed
        first = filenames.ATTEMPTS_PER_INCARNATION * self.save.incarnation
        return filenames.Attempt(max(first, number + 1), self.save.id[: filenames.ID_LENGTH])


@dataclass
class _MemoryRestore:
    """One rank's side of a restore. Its arenas are open until `stack` closes them."""

    session: Session
    folder: JobFolder
    stack: ExitStack
    saver: SaverInfo
    _saves: Mapping[str, RecoveredSave] | None = None
    _index: bytes | None = None

    def choose(self, unusable: set[str]) -> tuple[_RestoreChoice, MemoryFiles] | None:
        """Agree on the newest usable save. Collective."""
        channel = self.session.channel
        with self.session.operation(f"restore of job {self.folder.job}"):
            # After this exchange no rank has an orphan writer, so no snapshot changes any more.
            with channel.exchange("settled") as settling:
                savers = settling.gather(self.saver)
                if savers is not None:
                    check_equal_on_all_ranks("AsyncSaver.restore", savers)
            with channel.exchange("snapshots") as choosing:
                saves, report = self._read_host()
                reports = choosing.gather(report)
                if reports is not None:
                    choosing.decide(self._decide(reports, unusable))
        choice = choosing.result(_RestoreChoice)
        if not choice.id:
            return None
        save = saves.get(choice.id)
        if choice.attempt:
            assert save is not None, "each host has it"
            return choice, make_uncommitted_files(save, choice.attempt, self._index)
        if save is None:
            return choice, NOTHING_IN_MEMORY
        return choice, MemoryFiles(
            lambda path, index, stack: find_checkpoint_files(save, path, index)
        )

    def _decide(self, reports: Sequence[_HostReport], unusable: set[str]) -> _RestoreChoice:
        """Choose the newest usable save. Coordinator only."""
        for problem in sorted({problem for report in reports for problem in report.problems}):
            _log.warning("not restored from memory: %s", problem)
        for candidate in _merge_hosts([report.saves for report in reports]):
            save = candidate.save
            if save.id in unusable:
                continue
            try:
                attempt = self._check_usable(candidate)
            except _UnusableError as error:
                _log.warning("%s is not restored from memory: %s", save.name, error)
                continue
            return _RestoreChoice(save.id, save.path, attempt or "")
        return _RestoreChoice("", "", "")

    def _read_host(self) -> tuple[Mapping[str, RecoveredSave], _HostReport]:
        problems: Sequence[str] = ()
        if self._saves is None:
            self._saves, problems = self.stack.enter_context(open_saves(self._find_folders()))
        saves = tuple(
            _SaveOnHost(save.identity, save.attempt, save.was_committed, frozenset(save.sealed))
            for save in self._saves.values()
        )
        return self._saves, _HostReport(saves, tuple(problems))

    def _find_folders(self) -> Iterator[RankFolder]:
        """Yield the folders of this run's ranks, and those without a living trainer."""
        for folder in self.folder.rank_folders():
            # This run has the trainer's locks of its ranks.
            if folder.rank < self.session.channel.world_size or folder.owner("trainer") is None:
                yield folder
            else:
                _log.warning("%s is not read, as its trainer is alive", folder.path)

    def _check_usable(self, candidate: _SaveOnAllHosts) -> str | None:
        """Return the attempt of the rebuilt index, or None if the save is committed.

        _UnusableError with the reason. StorageError if the storage cannot be read: the save may be
        the newest, so it must not be skipped.
        """
        save = candidate.save
        if not any(candidate.sealed):
            raise _UnusableError("no rank's part of it is complete")
        if len(candidate.attempts) > 1:
            raise _UnusableError(f"its parts are of several attempts: {sorted(candidate.attempts)}")
        storage, _ = open_storage(save.path)
        history = read_history(storage, posixpath.dirname(save.path))
        if _is_orphaned(history, save.step, candidate.attempt_above(0)):
            raise _UnusableError(f"it is orphaned by incarnation {history.newest} of the run")
        if newer := _find_newer(storage, save, history, self.session.settings.threads):
            raise _UnusableError(f"{newer} was committed since")
        attempt = _choose_attempt(storage, candidate, history)
        if attempt is not None:
            self._index = self._rebuild_index(candidate, attempt)
        return attempt

    def _rebuild_index(self, candidate: _SaveOnAllHosts, attempt: str) -> bytes:
        if any(len(ranks) != candidate.save.world_size for ranks in candidate.sealed):
            raise _UnusableError("it was not committed, and not every host has all of it")
        assert self._saves is not None
        try:
            return rebuild_index(self._saves[candidate.save.id], attempt)
        except (errors.CheckpointError, ValueError) as error:
            raise _UnusableError(str(error)) from error


def _choose_attempt(
    storage: Storage, candidate: _SaveOnAllHosts, history: IncarnationHistory
) -> str | None:
    """Return the attempt that makes a save the checkpoint at its path. None if it is committed.

    _UnusableError if another checkpoint has the path, or if the save was deleted.
    """
    save = candidate.save
    try:
        committed, index = attempts.find_checkpoint(storage, save.path)
    except errors.NotFoundError:
        if candidate.was_committed:
            raise _UnusableError("it was committed, and has been deleted since") from None
        return candidate.attempt_above(0).name
    except (errors.CorruptError, errors.IncompatibleError) as error:
        raise _UnusableError(str(error)) from error
    if committed.name in candidate.attempts:
        return None
    attempt = candidate.attempt_above(committed.number)
    is_above = attempt.number > committed.number and save.incarnation in (0, attempt.incarnation)
    would_overwrite = save.overwrite and index.saved_at < save.began_at
    may_replace = would_overwrite or _is_orphaned(history, index.step, committed)
    if candidate.was_committed or not is_above or not may_replace:
        raise _UnusableError(f"its path already has the checkpoint {committed}")
    return attempt.name


def _is_orphaned(history: IncarnationHistory, step: int | None, attempt: filenames.Attempt) -> bool:
    # A save without a step may be above the restore point of any later incarnation.
    return history.is_orphaned(MAX_STEP if step is None else step, attempt)


def _find_newer(
    storage: Storage, save: SaveIdentity, history: IncarnationHistory, threads: int
) -> str | None:
    """Return a checkpoint in the same folder with a later step that was saved later, if any.

    Both must be later. A save that began earlier may be committed later, and a run that returned to
    an older step saves lower steps.
    """
    folder = save.path.rpartition("/")[0]
    if save.step is None:
        return None
    step, began_at = save.step, save.began_at

    def is_newer(path: str) -> bool:
        with suppress(errors.NotFoundError, errors.CorruptError, errors.IncompatibleError):
            attempt, index = attempts.find_checkpoint(storage, path)
            is_later = index.step is not None and index.step > step and index.saved_at > began_at
            return is_later and not _is_orphaned(history, index.step, attempt)
        return False

    paths = [p for p in attempts.list_readable_folders(storage, folder) if p != save.path]
    # Several threads: a run may have many checkpoints, on slow storage.
    newer = parallel_for(is_newer, paths, threads=threads)
    return next((path for path, is_later in zip(paths, newer, strict=True) if is_later), None)


class _UnusableError(Exception):
    """A save cannot be restored. The text is the reason."""


def _merge_hosts(host_saves: Sequence[Sequence[_SaveOnHost]]) -> list[_SaveOnAllHosts]:
    """Merge the saves of all ranks' hosts, the newest first."""
    by_save: dict[SaveIdentity, dict[int, _SaveOnHost]] = {}
    for rank, saves in enumerate(host_saves):
        for save in saves:
            by_save.setdefault(save.save, {})[rank] = save
    candidates = [
        _SaveOnAllHosts(
            identity,
            frozenset(save.attempt for save in by_rank.values() if save.attempt),
            any(save.was_committed for save in by_rank.values()),
            tuple(
                by_rank[rank].sealed if rank in by_rank else frozenset()
                for rank in range(len(host_saves))
            ),
        )
        for identity, by_rank in by_save.items()
    ]
    return sorted(candidates, key=lambda item: (item.save.began_at, item.save.id), reverse=True)


def rebuild_index(save: RecoveredSave, attempt: str) -> bytes:
    """Return the index of a complete save, as a commit would have written it.

    StorageError or ValueError if the save could not be committed, or another version of dist_ckpt
    made it.
    """
    sealed = [save.sealed[rank] for rank in range(save.identity.world_size)]
    details = [typed_msgpack.decode(s.snapshot.details, SnapshotMetadata) for s in sealed]
    first = details[0]
    if first.saved_by.get("dist_ckpt") != __version__:
        raise ValueError(f"{first.saved_by} has saved it, and this dist_ckpt is {__version__}")
    receipts = []
    for recovered, rank_details in zip(sealed, details, strict=True):
        assert recovered.seal is not None, "it is sealed"
        result = RankWriteResult(recovered.seal.files, rank_details.replicas, 0.0)
        receipts.append(result.receipt)
    if find_unequal_groups(receipts):
        raise errors.StorageError("its ranks hold different values under the same name")
    catalog = build_plan(first.inventories, save.identity.world_size).catalog
    fields = index_fields(sealed[0].snapshot, first)
    return index_json.encode(fields.build_index(attempt, catalog, receipts))
