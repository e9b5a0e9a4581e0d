"""Start or resume a run: select the restore point, load it, record the incarnation.

The restore point is the newest committed checkpoint that is not orphaned, or a newer save in
memory. A checkpoint is skipped only if it is still damaged in a second read, past the page cache. A
temporary error of the storage must not roll a run back. The incarnation is recorded after its state
is loaded, before its first save. The saved configuration is compared with that of the run.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase

from dist_ckpt.async_save.async_saver import AsyncSaver
from dist_ckpt.checkpointer.checkpointer_options import RunOptions
from dist_ckpt.core.checkpoint.checkpoint import open as open_checkpoint
from dist_ckpt.core.comm.exchange.channel import COORDINATOR, Exchange
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.commit.attempts import list_attempts
from dist_ckpt.core.commit.records.incarnations import (
    Incarnation,
    begin_incarnation,
    describe_liveness,
    newest_incarnation,
    secure_incarnation,
)
from dist_ckpt.core.commit.records.leases import renewed_lease
from dist_ckpt.core.commit.records.protection_protocol import CheckpointRef, is_for_want_of_room
from dist_ckpt.core.commit.records.protections import CheckpointKey
from dist_ckpt.core.commit.records.record_store import refuse_old
from dist_ckpt.core.commit.records.recorded_checks import name_newest_good
from dist_ckpt.core.format.filenames import Attempt, parse_step_folder
from dist_ckpt.core.format.index.model_description import find_differences
from dist_ckpt.core.loading.load import load_together
from dist_ckpt.core.loading.load_options import LoadOptions
from dist_ckpt.core.runtime.typed_msgpack import Message
from dist_ckpt.core.state.binding.template import read_template
from dist_ckpt.core.state.tree.containers import MutableState
from dist_ckpt.core.state.tree.state_tree import without_frozen
from dist_ckpt.core.storage import open_storage
from dist_ckpt.core.storage.local.direct_io import drop_cached
from dist_ckpt.default_opener import OPENER
from dist_ckpt.errors import (
    CheckpointError,
    CorruptError,
    IncompatibleError,
    NotFoundError,
    StorageError,
)
from dist_ckpt.message_text import listed, merge_similar
from dist_ckpt.runs.listing import Listing, RunCheckpoint, list_run
from dist_ckpt.runs.prune import plan_prune
from dist_ckpt.runs.retention_policy import RetentionPolicy, last
from dist_ckpt.runs.selectors import describe_exclusion, select

_log = logging.getLogger("dist_ckpt")

FOLDER = "step-{:08d}"


@dataclass(frozen=True, slots=True)
class Resumed:
    """The result of a resume: the step, or None for a fresh run.

    `incarnation` is 0 for a run that only reads. `description` is a text about the step and its
    path. `in_memory_only`: the step is not committed yet.
    """

    step: int | None
    incarnation: int
    description: str = ""
    in_memory_only: bool = False


class _RestorePoint(Message, frozen=True):
    """A possible restore point of the run."""

    step: int
    path: str
    attempt: str

    @property
    def key(self) -> CheckpointKey:
        """The key of its annotations."""
        return self.step, Attempt.from_name(self.attempt)


class _RunListing(Message, frozen=True):
    """Rank 0's view of the root: possible restore points, the newest first, and damaged ones."""

    candidates: tuple[_RestorePoint, ...]
    skipped: tuple[str, ...]


class Resume:
    """One rank's part of one resume. `root` is the root as the storage names it."""

    def __init__(
        self, session: Session, saver: AsyncSaver | None, root: str, options: RunOptions
    ) -> None:
        self.session, self.saver, self.root, self.options = session, saver, root, options
        self.storage, _ = open_storage(root)
        # On rank 0: the newest incarnation in the root, the lease of the restore point, the run.
        self._after, self._leases = 0, ExitStack()
        self._listing: Listing | None = None

    def restore(self, state: MutableState, at: str | None) -> Resumed:
        """Fill the state and record the incarnation. Collective."""
        listing = self._list(at)
        restored, why = self._restore_from_memory(state) if at is None else (None, "")
        newest = listing.candidates[0].step if listing.candidates else -1
        try:
            if restored is None or newest > restored.step:
                restored, why = self._restore_from_storage(state, listing, at)
            if restored is None:
                why = self._begin_fresh_run(state, listing)
            number = 0
            if not self.options.read_only:
                number = self._record_incarnation(state, restored, why, at)
        finally:
            self._leases.close()
        if self.session.channel.rank == COORDINATOR:
            begin = "begins anew" if restored is None else f"resumes from step {restored.step}"
            skips = bool(listing.skipped) or restored in listing.candidates[1:]
            level = logging.WARNING if skips else logging.INFO
            _log.log(level, "%s: incarnation %d %s: %s", self.root, number, begin, why)
            if restored is not None and not _logs_to_stderr(level):
                sys.stderr.write(f"dist_ckpt: {self.root} {begin}: {why}\n")
            if self._listing is not None:
                _report_newer(self._listing, -1 if restored is None else restored.step, at)
        if restored is None:
            return Resumed(None, number)
        is_durable = restored in listing.candidates
        place = f"at {restored.path}" if is_durable else "from memory"
        description = f"step {restored.step}, {place}"
        return Resumed(restored.step, number, description, in_memory_only=not is_durable)

    def _list(self, at: str | None) -> _RunListing:
        with self._exchange("run") as listing:
            gathered = listing.gather(at or "")
            if gathered is not None:
                if len(set(gathered)) > 1:
                    raise ValueError(f"restore(at=...) differs between ranks: {gathered}")
                listing.decide(self._read_root(at))
        return listing.result(_RunListing)

    @contextmanager
    def _exchange(self, phase: str) -> Iterator[Exchange]:
        """Make one exchange as a separate operation. Collective."""
        operation, channel = f"restore of the run in {self.root}", self.session.channel
        with self.session.operation(operation), channel.exchange(phase) as exchange:
            try:
                yield exchange
            except StorageError as error:
                if self._listing is None or not is_for_want_of_room(error):
                    raise
                removable = _removable_text(self._listing, self.options.keep or last(1))
                raise StorageError(f"{error}. {removable}") from error

    def _read_root(self, at: str | None) -> _RunListing:
        """List the restore points in the root. Rank 0 only."""
        newest = newest_incarnation(self.storage, self.root)
        self._after = 0 if newest is None else newest.number
        try:
            listing = list_run(self.storage, self.root, now=time.time())
        except NotFoundError:
            if at is not None:
                raise
            return _RunListing((), ())
        if not self.options.read_only:
            refuse_old(listing.root, listing.old_folders)
        if any(checkpoint.state == "damaged" for checkpoint in listing.checkpoints):
            for checkpoint in listing.checkpoints:
                if checkpoint.link is not None:
                    continue
                for attempt in list_attempts(self.storage, checkpoint.path)[-1:]:
                    drop_cached(f"{checkpoint.path}/{attempt}")
            listing = list_run(self.storage, self.root, now=time.time())
        if listing.root != self.root:
            raise ValueError(
                f"{self.root} is a checkpoint: give the folder that it is in, {listing.root}"
            )
        usable = listing.usable if at is None else (select(listing, at),)
        skipped = self._find_damaged(listing, usable) if at is None else ()
        # A damaged one may have been repaired since: it is the last resort.
        damaged = [info for info in listing.not_orphaned if info.damage is not None]
        candidates = tuple(
            _RestorePoint(checkpoint.step, checkpoint.path, checkpoint.attempt)
            for checkpoint in (*reversed(usable), *(reversed(damaged) if at is None else ()))
            if checkpoint.step is not None and checkpoint.attempt is not None
        )
        self._listing = listing
        if candidates:
            self._check_config(candidates[0])
        return _RunListing(candidates, skipped)

    def _find_damaged(self, listing: Listing, usable: Sequence[RunCheckpoint]) -> tuple[str, ...]:
        """Return damaged checkpoints above the newest. IncompatibleError for a newer version."""
        newest = usable[-1].step or 0 if usable else -1
        later = [entry for entry in listing.checkpoints if _step_of_folder(entry) > newest]
        for entry in later:
            if entry.state == "incompatible":
                raise IncompatibleError(
                    f"{entry.path}: {entry.problem}. This checkpoint may be the newest, so the "
                    f"run does not resume from an older one"
                )
        damaged = [
            entry
            for entry in later
            # Without another one, those that are recorded as damaged are tried.
            if entry.state == "damaged" or (usable and entry.damage and not entry.is_orphaned)
        ]
        return tuple(
            f"{entry.name} is damaged: {entry.damage or entry.problem}" for entry in damaged
        )

    def _check_config(self, newest: _RestorePoint) -> None:
        config, kind = self.options.config, self.options.kind
        if config is None and kind is None:
            return
        with open_checkpoint(newest.path) as checkpoint:
            saved_config, saved_kind = checkpoint.config, checkpoint.kind
        if saved_kind not in (kind, None) and kind is not None:
            raise IncompatibleError(
                f"{newest.path} has the kind {saved_kind!r}, and this run has {kind!r}: give the "
                f"kind of the checkpoint, or another root"
            )
        if saved_config is None or config is None:
            return
        changed = {
            name: f"{name}: {then} there, {now} here"
            for name, (then, now) in find_differences(saved_config, config).items()
        }
        must_match = self.options.config_must_match
        refused = [
            text for name, text in changed.items() if any(fnmatchcase(name, p) for p in must_match)
        ]
        if refused:
            raise IncompatibleError(
                f"{newest.path} was saved with another configuration, and config_must_match= "
                f"forbids that: {listed(refused, '; ')}. Use the saved configuration, or another "
                f"root"
            )
        if changed:
            text = listed(list(changed.values()), "; ")
            _log.warning("%s was saved with another configuration: %s", newest.path, text)

    def _restore_from_memory(self, state: MutableState) -> tuple[_RestorePoint | None, str]:
        if self.saver is None:
            return None, ""
        try:
            step = self.saver.restore_with(state, self.options.load_options())
        except CorruptError as error:  # in files that are not in memory
            _log.warning("the newest save in memory is damaged in the storage: %s", error)
            return None, ""
        report = self.saver.restored
        if step is None or report is None:
            return None, ""
        return _RestorePoint(step, report.path, report.attempt), "the newest, from memory"

    def _restore_from_storage(
        self, state: MutableState, listing: _RunListing, at: str | None
    ) -> tuple[_RestorePoint | None, str]:
        skipped = [*listing.skipped]
        for point in listing.candidates:
            try:
                self._load(state, point)
            except CorruptError as error:
                drop_cached(f"{point.path}/{point.attempt}")
                if self.session.channel.rank == COORDINATOR:
                    _log.warning("%s seems damaged, and is read again: %s", point.path, error)
                try:
                    self._load(state, point)
                except CorruptError as again:
                    if at is not None:
                        if self.session.channel.rank == COORDINATOR:
                            name_newest_good(again, self.storage, point.path)
                        raise
                    skipped.append(f"step {point.step} is damaged: {again}")
                    continue
            why = f"{at} was requested" if at is not None else "the newest"
            return point, f"the newest undamaged: {_skipped_text(skipped)}" if skipped else why
        if listing.candidates:
            raise CorruptError(
                f"{self.root}: all checkpoints are damaged: {_skipped_text(skipped)}. The state is "
                f"partly filled: do not train on it"
            )
        return None, ""

    def _load(self, state: MutableState, point: _RestorePoint) -> None:
        """Load a checkpoint. It is leased until the incarnation is recorded."""
        if not self.options.read_only:
            with self._exchange("lease"):
                if self.session.channel.rank == COORDINATOR:
                    self._leases.close()
                    ref = CheckpointRef(self.storage, self.root, point.path, point.key)
                    self._leases.enter_context(renewed_lease(ref))
        options = self.options.load_options(record_check=not self.options.read_only)
        try:
            load_together(
                self.session, state, point.path, options, memory=OPENER.memory, opener=OPENER
            )
        except IncompatibleError as error:
            raise IncompatibleError(
                f"{error}\nA run resumes only with a state like the saved one. If only padding "
                f"differs, use Checkpointer(resize=). To begin another run with this state: "
                f"Checkpointer(ANOTHER_ROOT, init={point.path!r}, init_strict=False)",
                rank=error.rank,
                phase=error.phase,
            ) from error

    def _begin_fresh_run(self, state: MutableState, listing: _RunListing) -> str:
        """Fill the state from `init`, if any. Raise if a fresh run is not allowed."""
        init = self.options.init
        if self.options.must_exist or listing.skipped:
            reason = _skipped_text(listing.skipped) or "none is committed"
            kind = CorruptError if listing.skipped else NotFoundError
            raise kind(
                f"{self.root}: no checkpoint to resume from: {reason}. So no fresh run begins "
                f"there: choose another root, or move damaged checkpoints away"
            )
        if init is None:
            return "no checkpoint to resume from"
        options = LoadOptions(
            sharding=self.options.sharding,
            strict=self.options.init_strict,
            resize=self.options.resize,
            record_check=not self.options.read_only,
        )
        report = load_together(
            self.session, state, init, options, memory=OPENER.memory, opener=OPENER
        )
        paths = " and ".join(source.path for source in report.sources)
        return f"no checkpoint to resume from; it begins with {paths}"

    def _record_incarnation(
        self, state: MutableState, restored: _RestorePoint | None, why: str, at: str | None
    ) -> int:
        with self._exchange("incarnation") as recording:
            if restored is None:  # otherwise the load has read the state
                self._check_savable(state)
            recording.gather(None)
            if recording.is_coordinator:
                recording.decide(self._write_incarnation(restored, why, at))
        return recording.result(int)

    def _check_savable(self, state: MutableState) -> None:
        """Raise TypeError or ValueError for a state that cannot be saved.

        Lazy modules, and objects that are not ready yet, are read after the first step.
        """
        channel, selection = self.session.channel, self.options.load_options().selection()
        with suppress(CheckpointError, RuntimeError):
            template = read_template(
                state,
                sharding=self.options.sharding,
                rank=channel.rank,
                world_size=channel.world_size,
                group_ranks=self.session.group_ranks,
            )
            template.check_plain(without_frozen(selection, template.root))

    def _write_incarnation(self, restored: _RestorePoint | None, why: str, at: str | None) -> int:
        """Record the incarnation, and return its number. Rank 0 only."""
        by = f"process {os.getpid()} on {self.session.channel.host}"
        if alive := describe_liveness(self.storage, self.root, self._after):
            _log.info(
                "%s: incarnation %d has not reported its end%s. If it still runs, it saves no more",
                self.root,
                self._after,
                alive,
            )
        key = None if restored is None else restored.key
        record = begin_incarnation(
            self.storage, self.root, restored=key, why=why[:1000], by=by, after=self._after
        )
        if at is not None and restored is not None:
            incarnation = Incarnation(self.root, record.number)
            secure_incarnation(self.storage, restored.path, restored.key[1], incarnation, by=by)
        return record.number


def _report_newer(listing: Listing, step: int, at: str | None) -> None:
    """Name on stderr the steps above the restore point, and those that no save can replace."""
    passed, lines = [], []
    for info in listing.checkpoints:
        if (_step_of_folder(info) if info.step is None else info.step) <= step:
            continue
        # Unless a step is requested, only damage found by the load excludes such a checkpoint.
        is_damaged = at is None and info.where is not None and not info.is_orphaned
        passed.append(f"{info.name} ({'damaged' if is_damaged else describe_exclusion(info)})")
        if info.link is not None:
            lines.append(
                f"{info.path} is a link to {info.link}. This run cannot save that step again, "
                f"unless you remove the link: rm {shlex.quote(info.path)}"
            )
    if passed:
        lines.insert(0, f"{listing.root} passes over newer steps: {listed(passed)}")
    sys.stderr.writelines(f"dist_ckpt: {line}\n" for line in lines)


def _step_of_folder(info: RunCheckpoint) -> int:
    """Return the step in the name of a checkpoint's folder, or 0 for other names."""
    return parse_step_folder(info.name) or 0


def _logs_to_stderr(level: int) -> bool:
    """Return True if the log of dist_ckpt writes messages of this level to stderr."""
    if not _log.isEnabledFor(level):
        return False
    if not _log.hasHandlers():
        return level >= logging.WARNING  # by the last resort of `logging`
    loggers = (_log, logging.getLogger())[: 1 + _log.propagate]
    return any(
        output.level <= level and getattr(output, "stream", None) is sys.stderr
        for logger in loggers
        for output in logger.handlers
    )


def _removable_text(listing: Listing, keep: RetentionPolicy) -> str:
    """Return which checkpoints to remove from a full disk, so that a run can resume."""
    names = [info.name for info, reasons in plan_prune(listing, keep) if not reasons]
    arguments = f"{shlex.quote(listing.root)} --keep {shlex.quote(str(keep))}"
    prune = f"`dist-ckpt prune {arguments}` removes {listed(names)}, and " if names else ""
    return (
        f"A resume writes a small file into {listing.root}. {prune}`dist-ckpt rm` removes one "
        f"checkpoint. Then start the job again"
    )


def _skipped_text(texts: Sequence[str]) -> str:
    return listed(merge_similar(texts), "; ")
