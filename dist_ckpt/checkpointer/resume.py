"""Start or resume a run: select the restore point, load it, record the incarnation.

The restore point is the newest committed checkpoint that is not orphaned, from memory if a newer
save is there. Only a damaged one is skipped, after a second read past the page cache has confirmed
the damage: a temporary error of the storage must not roll a run back. An incarnation that writes
is recorded when its state is loaded, before its first save.

A run's configuration: saved with each checkpoint, compared when a run goes on.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from dist_ckpt.async_save.async_saver import AsyncSaver
from dist_ckpt.core.checkpoint.checkpoint import open as open_checkpoint
from dist_ckpt.core.comm.exchange.channel import COORDINATOR, Exchange
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.commit.records.incarnations import (
    Incarnation,
    begin_incarnation,
    describe_liveness,
    newest_incarnation,
    secure_incarnation,
)
from dist_ckpt.core.commit.records.leases import CheckpointRef, renewed_lease
from dist_ckpt.core.commit.records.record_store import refuse_old
from dist_ckpt.core.format.filenames import Attempt, parse_attempt
from dist_ckpt.core.format.index.model_description import differences
from dist_ckpt.core.format.run_records import IncarnationRecord
from dist_ckpt.core.loading.load import load_together
from dist_ckpt.core.loading.load_options import LoadOptions, Sources
from dist_ckpt.core.planning.sharding_config import ShardingConfig
from dist_ckpt.core.runtime.typed_msgpack import Message
from dist_ckpt.core.state.tree.containers import MutableState
from dist_ckpt.core.storage import Storage, open_storage
from dist_ckpt.core.storage.local.direct_io import drop_cached
from dist_ckpt.errors import CorruptError, IncompatibleError, NotFoundError, listed
from dist_ckpt.openers import OPENER
from dist_ckpt.runs.listing import Listing, RunCheckpoint, list_run
from dist_ckpt.runs.selectors import select


def check_config_matches(
    then: object, now: object, config_must_match: Sequence[str], path: str
) -> str:
    """Return what differs from the checkpoint's configuration, in one line; "" if nothing does.

    IncompatibleError if something does that matches a pattern of `config_must_match`.
    """
    found = differences(then, now)
    text = {name: f"{name}: {old} there, {new} here" for name, (old, new) in found.items()}
    refused = [name for name in found if any(fnmatchcase(name, one) for one in config_must_match)]
    if refused:
        raise IncompatibleError(
            f"{path} was saved with another configuration, which must be the same: "
            f"{listed([text[name] for name in refused], '; ')}. Use that configuration, or another "
            f"root"
        )
    return listed(list(text.values()), "; ")


_log = logging.getLogger("dist_ckpt")

FOLDER = "step-{:08d}"
_FOLDER = re.compile(r"step-([0-9]{8,19})")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeOptions:
    """How a run begins; see `Checkpointer`."""

    init: Sources | None = None
    init_strict: bool = True
    must_exist: bool = False
    read_only: bool = False
    config: Mapping[str, object] | None = None
    kind: str | None = None
    config_must_match: Sequence[str] = ()
    sharding: ShardingConfig | None = None
    include: str | Sequence[str] | None = None
    exclude: str | Sequence[str] | None = None
    include_frozen: bool = True

    def load_options(self, *, notes: bool = True) -> LoadOptions:
        """Return how the run's own checkpoints are loaded: what is saved of the state."""
        return LoadOptions(
            sharding=self.sharding,
            include=self.include,
            exclude=self.exclude,
            include_frozen=self.include_frozen,
            notes=notes,
        )


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a run goes on from: the step, None if it begins anew.

    `incarnation` is the number of this one, 0 if it only reads. `where` is a text about the place
    of that step; `in_memory_only`: it is not committed yet.
    """

    step: int | None
    incarnation: int
    why: str
    where: str = ""
    in_memory_only: bool = False


class _RestorePoint(Message, frozen=True):
    """A checkpoint that the run may go on from."""

    step: int
    path: str
    attempt: str


class _RunListing(Message, frozen=True):
    """What rank 0 sees in the root: candidates, the newest first, and what is stepped over."""

    candidates: tuple[_RestorePoint, ...]
    skipped: tuple[str, ...]


@dataclass
class Resume:
    """One rank's part in a resume, for one call. `root` is the folder as the storage names it."""

    ranks: Session
    saver: AsyncSaver | None
    root: str
    options: ResumeOptions
    storage: Storage = field(init=False)
    # Of rank 0: the newest incarnation when the root was read, and the lease of what is restored.
    _after: int = 0
    _leases: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.storage = open_storage(self.root)[0]

    def run(self, state: MutableState, at: str | None) -> Resumed:
        """Fill the state and record the incarnation. Collective."""
        look = self._look(at)
        restored, why = self._from_memory(state) if at is None else (None, "")
        newest = look.candidates[0].step if look.candidates else -1
        try:
            if restored is None or newest > restored.step:
                restored, why = self._from_storage(state, look, at)
            if restored is None:
                why = self._fresh(state, look)
            number = 0 if self.options.read_only else self._record(restored, why, at)
        finally:
            self._leases.close()
        if self.ranks.channel.rank == COORDINATOR:
            begin = "begins anew" if restored is None else f"resumes from step {restored.step}"
            _log.info("%s: incarnation %d %s: %s", self.root, number, begin, why)
        if restored is None:
            return Resumed(None, number, why)
        is_durable = restored in look.candidates
        where = f"step {restored.step}, {f'at {restored.path}' if is_durable else 'from memory'}"
        return Resumed(restored.step, number, why, where, in_memory_only=not is_durable)

    # --- what there is ---------------------------------------------------------------------------

    def _look(self, at: str | None) -> _RunListing:
        with self._exchange("run") as looking:
            asked = looking.gather(at or "")
            if asked is not None:
                if any(one != asked[0] for one in asked):
                    raise ValueError(f"restore(at=...) differs between ranks: {asked}")
                looking.decide(self._seen(at))
        return looking.result(_RunListing)

    @contextmanager
    def _exchange(self, phase: str) -> Iterator[Exchange]:
        """Do one exchange, which is an operation of its own. Collective."""
        what, channel = f"restore of the run in {self.root}", self.ranks.channel
        with self.ranks.operation(what), channel.exchange(phase) as exchange:
            yield exchange

    def _seen(self, at: str | None) -> _RunListing:
        """Look into the root. Rank 0 only."""
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
        if any(one.state == "damaged" for one in listing.checkpoints):
            for one in listing.checkpoints:
                drop_cached(f"{one.path}/{_newest_attempt(self.storage, one.path)}")
            listing = list_run(self.storage, self.root, now=time.time())
        if listing.root != self.root:
            raise ValueError(
                f"{self.root} is a checkpoint: give the folder that it is in, {listing.root}"
            )
        alive = listing.alive if at is None else (select(listing, at),)
        skipped = self._unreadable(listing, alive) if at is None else ()
        found = tuple(
            _RestorePoint(one.step, one.path, one.attempt)
            for one in reversed(alive)
            if one.step is not None and one.attempt is not None
        )
        if found:
            self._check_config(found[0])
        return _RunListing(found, skipped)

    def _unreadable(self, listing: Listing, alive: Sequence[RunCheckpoint]) -> tuple[str, ...]:
        """Return what is damaged above the newest. IncompatibleError for a newer version's."""
        newest = alive[-1].step or 0 if alive else -1
        above = [one for one in listing.checkpoints if _step_named(one.name) > newest]
        for one in above:
            if one.state == "incompatible":
                raise IncompatibleError(
                    f"{one.path}: {one.problem}. It may be the newest, so nothing older is taken"
                )
        damaged = [one for one in above if one.state == "damaged"]
        return tuple(f"{one.name} is damaged: {one.problem}" for one in damaged)

    def _check_config(self, newest: _RestorePoint) -> None:
        config, kind = self.options.config, self.options.kind
        if config is None and kind is None:
            return
        with open_checkpoint(newest.path) as checkpoint:
            then, kind_then = checkpoint.config, checkpoint.kind
        if kind_then not in (kind, None) and kind is not None:
            raise IncompatibleError(
                f"{newest.path} is of the kind {kind_then!r}, and this run of {kind!r}: give the "
                f"kind that it has, or another root"
            )
        if then is None or config is None:
            return
        differs = check_config_matches(then, config, self.options.config_must_match, newest.path)
        if differs:
            _log.warning("%s was saved with another configuration: %s", newest.path, differs)

    # --- what is taken ---------------------------------------------------------------------------

    def _from_memory(self, state: MutableState) -> tuple[_RestorePoint | None, str]:
        if self.saver is None:
            return None, ""
        try:
            step = self.saver.restore_with(state, self.options.load_options())
        except CorruptError as error:  # of a part that is not in memory
            _log.warning("the newest that memory has a part of is damaged: %s", error)
            return None, ""
        report = self.saver.restored
        if step is None or report is None:
            return None, ""
        return _RestorePoint(step, report.path, report.attempt), "the newest, from memory"

    def _from_storage(
        self, state: MutableState, look: _RunListing, at: str | None
    ) -> tuple[_RestorePoint | None, str]:
        over = [*look.skipped]
        for one in look.candidates:
            try:
                self._load(state, one)
            except CorruptError as error:
                drop_cached(f"{one.path}/{one.attempt}")
                _log.warning("%s seems damaged, and is read again: %s", one.path, error)
                try:
                    self._load(state, one)
                except CorruptError as again:
                    if at is not None:
                        raise
                    over.append(f"step {one.step} is damaged: {again}")
                    if self.ranks.channel.rank == COORDINATOR:
                        _log.warning("%s is stepped over: %s", one.path, again)
                    continue
            why = f"{at} was asked for" if at is not None else "the newest"
            return one, f"the newest that is whole: {'; '.join(over)}" if over else why
        if look.candidates:
            raise CorruptError(
                f"{self.root}: no checkpoint is whole: {'; '.join(over)}. What the last one has "
                f"touched of the state is not to be trained on"
            )
        return None, ""

    def _load(self, state: MutableState, one: _RestorePoint) -> None:
        """Load it, leased until the incarnation is recorded: see `begin_incarnation`."""
        if not self.options.read_only:
            with self._exchange("lease"):
                if self.ranks.channel.rank == COORDINATOR:
                    self._leases.close()
                    where = one.step, Attempt.named(one.attempt)
                    subject = CheckpointRef(self.storage, self.root, one.path, where)
                    self._leases.enter_context(renewed_lease(subject))
        options = self.options.load_options(notes=not self.options.read_only)
        try:
            load_together(self.ranks, state, one.path, options, memory=OPENER.memory, opener=OPENER)
        except IncompatibleError as error:
            raise IncompatibleError(
                f"{error}\nA run goes on with the state that it has saved. To begin another with "
                f"this state: Checkpointer(ANOTHER_ROOT, init={one.path!r}, init_strict=False)",
                rank=error.rank,
                phase=error.phase,
            ) from error

    def _fresh(self, state: MutableState, look: _RunListing) -> str:
        """Fill the state with what a fresh run begins with; raise if this is to be no fresh one."""
        init = self.options.init
        if self.options.must_exist or look.skipped:
            told = "; ".join(look.skipped) or "none is committed"
            kind = CorruptError if look.skipped else NotFoundError
            raise kind(
                f"{self.root}: there is no checkpoint to go on from: {told}. Nothing is begun "
                f"anew there: choose another root, or move away what is damaged"
            )
        if init is None:
            return "there was nothing to go on from"
        options = LoadOptions(
            sharding=self.options.sharding,
            strict=self.options.init_strict,
            notes=not self.options.read_only,
        )
        report = load_together(
            self.ranks, state, init, options, memory=OPENER.memory, opener=OPENER
        )
        taken = " and ".join(source.path for source in report.sources)
        return f"there was nothing to go on from; it begins with {taken}"

    def _record(self, restored: _RestorePoint | None, why: str, at: str | None) -> int:
        with self._exchange("incarnation") as recording:
            recording.gather(None)
            if recording.is_coordinator:
                recording.decide(self._begun(restored, why, at).number)
        return recording.result(int)

    def _begun(self, restored: _RestorePoint | None, why: str, at: str | None) -> IncarnationRecord:
        """Record the incarnation. Rank 0 only."""
        by = f"process {os.getpid()} on {self.ranks.channel.host}"
        if alive := describe_liveness(self.storage, self.root, self._after):
            _log.info(
                "%s: incarnation %d has not ended by itself%s. If it still runs, it saves no more",
                self.root,
                self._after,
                alive,
            )
        where = None if restored is None else (restored.step, Attempt.named(restored.attempt))
        record = begin_incarnation(
            self.storage, self.root, restored=where, why=why[:1000], by=by, after=self._after
        )
        if at is not None and restored is not None and where is not None:
            secure_incarnation(
                self.storage, restored.path, where[1], Incarnation(self.root, record.number), by=by
            )
        return record


def _step_named(name: str) -> int:
    """Return the step that a folder's name says; of one that no run names so it is 0."""
    match = _FOLDER.fullmatch(name)
    return int(match[1]) if match else 0


def _newest_attempt(storage: Storage, path: str) -> str:
    names = [e.name for e in storage.list(path) if parse_attempt(e.name) is not None]
    return max(names, key=lambda name: parse_attempt(name) or Attempt(0, ""), default="")
