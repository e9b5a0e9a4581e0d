"""One save after another by a background writer: claim, write out of the arena, commit, report.

All that a writer knows of a save lies in the arena. Whatever is wrong with it is raised within an
exchange, so that the writers of all ranks count the same operations and are told the same.

What a background writer has to do: saves in order, which its trainer may pause, drop, abort.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from dist_ckpt.async_save.snapshots.arena import ArenaReader
from dist_ckpt.async_save.snapshots.arena_layout import UNCLAIMED
from dist_ckpt.async_save.snapshots.job_folder import NUM_ARENAS, RankFolder
from dist_ckpt.async_save.writer.messages import Done, Hello, ProtocolError, Write
from dist_ckpt.async_save.writer.staged_save import StagedSave
from dist_ckpt.config import Config
from dist_ckpt.core.comm.collectives.collective import Bodies
from dist_ckpt.core.comm.exchange.channel import COORDINATOR, Channel, SingleProcessChannel
from dist_ckpt.core.comm.exchange.store_channel import StoreChannel
from dist_ckpt.core.comm.key_value.client_thread import StoreErrorTexts
from dist_ckpt.core.comm.key_value.key_client import KeyClient
from dist_ckpt.core.comm.messages import NoAnswerError, failure_of
from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.core.format.index.catalog_json import EncodedCatalog
from dist_ckpt.core.planning.plan import SavePlan
from dist_ckpt.core.runtime.buffers import BufferPool
from dist_ckpt.core.saving.agreement import plan_of
from dist_ckpt.core.saving.transaction import RankWriteResult, Transaction
from dist_ckpt.core.shard_io.write.link_unchanged import LinkableSaves, SavedFiles
from dist_ckpt.core.storage import open_storage
from dist_ckpt.core.storage.forwarding import CountingStorage, RateLimit, RateLimitedStorage
from dist_ckpt.errors import CheckpointError, ConflictError, CorruptError, RankError
from dist_ckpt.reports import Phases, SaveReport

_log = logging.getLogger("dist_ckpt")

# How many silences to wait for a writer that was never seen, as long as the trainer lives.
_PATIENCE = 3

WRITER_STORE_TEXTS = StoreErrorTexts(
    gone="the store that the background writer of rank 0 serves is gone or cut off ({}). Look "
    "into that writer's log, then save again",
    lost="This is about background writers: look into that one's log, then save again. Training "
    "can go on.",
    absent="Its trainer may have ended, or be late: look into that rank's log, then save again.",
    mixed="Their trainers are out of step: look into the logs of these ranks, then save again.",
    strange="Let all ranks have the same version of dist_ckpt, then save again.",
)


class WriterRendezvous:
    """The channel to the other writers, for as long as saves name one and the same store."""

    def __init__(self, hello: Hello) -> None:
        self._hello = hello
        self._store: tuple[str, int, bytes] | None = None
        self._client: KeyClient | None = None
        self._channel: Channel | None = None
        self._patience = _PATIENCE

    def hurry(self) -> None:
        """Wait less long for others that may never come: the trainer is gone. Any thread's."""
        self._patience = 1
        self._set_patience()

    def _set_patience(self) -> None:
        # All trainers tell their writers at once: one that was never seen was not told, or is dead.
        if isinstance(channel := self._channel, StoreChannel):
            channel.hurry(self._patience * self._hello.config.heartbeat_timeout_s)

    def linger(self) -> None:
        """Keep the store that this writer may serve until the others know how the last save ended.

        They may still be writing, and nobody is kept waiting: the trainer is gone.
        """
        if isinstance(channel := self._channel, StoreChannel):
            channel.linger(self._hello.config.join_timeout_s)

    @property
    def token(self) -> bytes | None:
        """The token of the store in which they meet now."""
        return None if self._store is None else self._store[2]

    def channel(self, write: Write) -> Channel:
        """Return the channel of a save. NoAnswerError if its store cannot be reached."""
        store = (write.host, write.port, write.token)
        if self._channel is None or self._store != store:
            self.close()
            self._channel = self._connected(write)
            self._store = store
            self._set_patience()
        return self._channel

    def close(self) -> None:
        """Leave: the others know at once."""
        if self._channel is not None:
            self._channel.close()
        if self._client is not None:
            self._client.close()
        self._channel = self._client = self._store = None

    def _connected(self, write: Write) -> Channel:
        hello = self._hello
        if hello.world_size == 1:
            return SingleProcessChannel()
        config = hello.config
        address = write.host, write.port
        try:
            self._client = KeyClient(
                address,
                write.token,
                connect_s=config.heartbeat_timeout_s,
                timeout_s=config.heartbeat_timeout_s,
            )
        except OSError as error:
            raise NoAnswerError(WRITER_STORE_TEXTS.gone.format(error)) from error
        return StoreChannel(
            self._client,
            hello.rank,
            hello.world_size,
            host=host_of(config),
            config=config,
            texts=WRITER_STORE_TEXTS,
        )


def host_of(config: Config) -> str:
    """Return what a writer calls its host: errors tell it apart from the trainer of its rank."""
    return f"{config.host or socket.gethostname()}, background writer"


class WriterSaves:
    """What the saves of one writer have in common.

    `check` raises if a save that is not complete never will be; it is called by other threads too.
    `allowance` limits how fast they write.
    """

    def __init__(
        self,
        hello: Hello,
        meetings: WriterRendezvous,
        check: Callable[[Write], None],
        allowance: RateLimit | None = None,
    ) -> None:
        self.hello = hello
        self.meetings = meetings
        self.check = check
        self.allowance = allowance
        self.slots = BufferPool()  # scratch memory that is used again
        self.earlier = LinkableSaves()
        # In one, for who seals may ask while another thread finds out.
        self._planned: tuple[Bodies, tuple[SavePlan, EncodedCatalog]] | None = None

    def plan(self, bodies: Bodies) -> tuple[SavePlan, EncodedCatalog]:
        """Return the plan of a save, which is kept for as long as the inventories are the same."""
        planned = self._planned
        if planned is None or planned[0] != bodies:
            plan = plan_of(bodies, self.hello.world_size)
            self._planned = planned = bodies, (plan, EncodedCatalog(plan.catalog))
        return planned[1]


class WriterSave:
    """One rank's side of one save. One thread settles it, and another one may seal it.

    `arena` is where it is staged, or why that cannot be opened.
    """

    def __init__(
        self, saves: WriterSaves, write: Write, arena: ArenaReader | CheckpointError
    ) -> None:
        self.write = write
        self._arena = arena
        self._saves = saves
        self._phases = Phases("background save", write.path, quiet=saves.hello.rank != COORDINATOR)
        # What it has come to so far.
        self._staged: StagedSave | None = None
        self._attempt = UNCLAIMED
        self._storage: CountingStorage | None = None
        self._saved: SavedFiles | None = None

    def settle(self) -> Done:
        """Write it and settle with the others whether it is committed.

        Collective: the writer of every rank calls this. Raises only interrupts. Whatever the save
        failed of, what is staged here is sealed on return: then the trainer may stage over it.
        """
        path, hello = self.write.path, self._saves.hello
        try:
            report = self._commit(self._saves.meetings.channel(self.write))
        except Exception as error:  # noqa: BLE001 - whatever it is, the trainer is told
            _log.error("background save to %s failed: %s", path, error, exc_info=error)
            self.seal()
            host = host_of(hello.config)
            failure = failure_of(error, "background save", hello.rank, host)
            return Done(self.write.snapshot, None, failure)
        _log.info("background save to %s is committed", path)
        return Done(self.write.snapshot, report, None)

    def _commit(self, channel: Channel) -> SaveReport:
        phases = self._phases
        channel.enter(f"background save to {self.write.path}")
        try:
            with Transaction(channel, self._saves.hello.config) as transaction:
                with phases.phase("claim"):
                    storage, staged = self._claim(channel, transaction)
                with phases.phase("write"):
                    decision = transaction.commit(
                        staged.text, staged.index_fields(), partial(self._write, storage, staged)
                    )
                staged.followed.mark_committed()
                if self._saved is not None:
                    self._saves.earlier = self._saves.earlier.plus(self._saved)
                with phases.phase("clean up"):
                    transaction.supersede()
            return transaction.report(decision, phases, reads=storage.reads, writes=storage.writes)
        finally:
            channel.leave()

    def seal(self) -> None:
        """Seal what is staged of a save that failed, or will not be settled: a restart can use it.

        Any thread may do that, also while the one that settles hangs. Touches no storage.
        """
        path = self.write.path
        try:
            self._staged = staged = self._staged or self._look()
            threads = self._saves.hello.config.threads
            staged.seal(self._attempt, threads=threads, slots=self._saves.slots)
        except Exception as error:  # noqa: BLE001 - what the trainer is told is the first error
            _log.warning("what was staged for %s is not sealed: %s", path, error)
        else:
            _log.info("what was staged for %s is sealed, and stays in memory", path)

    def _claim(
        self, channel: Channel, transaction: Transaction
    ) -> tuple[CountingStorage, StagedSave]:
        """Agree with the other writers that all write the same, and claim an attempt."""
        with channel.exchange("claim") as claiming:
            self._staged = staged = self._look()
            own, path = open_storage(staged.snapshot.path)
            self._storage = storage = CountingStorage(own)
            staged.staging.check()
            snapshots = claiming.gather(staged.snapshot.id)
            if snapshots is not None:
                _check_same_save(snapshots)
                details = staged.details
                claiming.decide(
                    transaction.claim(
                        storage, path, overwrite=details.overwrite, incarnation=details.run
                    )
                )
        transaction.join(storage, path, claiming.result(Attempt))
        self._attempt = transaction.attempt.name
        return storage, staged

    def _look(self) -> StagedSave:
        """Find out what is to be written. Raises what is wrong with it."""
        if isinstance(self._arena, CheckpointError):
            raise self._arena
        followed = self._arena.follow(self.write.snapshot)
        snapshot, saves = followed.snapshot, self._saves
        said = snapshot.path, snapshot.rank, snapshot.world_size
        if said != (self.write.path, saves.hello.rank, saves.hello.world_size):
            raise CorruptError(f"snapshot {snapshot.id} is of another save: {said}")
        # Without `self`: what is settled lets go of its arena, and no cycle keeps that.
        return StagedSave(followed, partial(saves.check, self.write), saves.plan)

    def _write(self, storage: CountingStorage, staged: StagedSave, folder: str) -> RankWriteResult:
        start = time.monotonic()
        allowance = self._saves.allowance
        staged.staging.give_way()
        part = staged.write_or_link(
            RateLimitedStorage(storage, allowance) if allowance else storage,
            folder,
            self._attempt,
            self._saves.earlier,
            threads=self._saves.hello.config.threads,
            slots=self._saves.slots,
        )
        self._saved = part.saved
        seconds = time.monotonic() - start
        return RankWriteResult(part.receipts, staged.details.replicas, seconds, part.linked)


def _check_same_save(snapshots: Sequence[str]) -> None:
    """Raise ConflictError if the writers have different snapshots before them."""
    found = {snapshot: rank for rank, snapshot in enumerate(snapshots)}
    if len(found) > 1:
        raise ConflictError(
            f"the background writers do not write the same save: {found}; save again"
        )


# More than a trainer has arenas, which it stages into one after the other.
MAX_SAVES = 8

# How long at most nobody looks whether there is still something to wait for.
_STEP_S = 60.0


class WriterQueue:
    """The saves of one writer. One thread puts them in and changes them, another takes them."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._changed = threading.Condition()
        self._saves: deque[WriterSave] = deque()
        # Snapshots: those that wait, and why some fail.
        self._paused: set[str] = set()
        self._aborted: dict[str, str] = {}
        self._is_ended = False
        self._is_trainer_gone = False
        self._current: WriterSave | None = None

    def put(self, save: WriterSave) -> None:
        """Add a save."""
        with self._changed:
            if self._is_ended or len(self._saves) >= MAX_SAVES:
                raise ProtocolError("more saves than there may be are to be written")
            self._saves.append(save)
            self._changed.notify_all()

    def abort(self, snapshot: str, reason: str) -> None:
        """Have a save fail, unless it is complete."""
        with self._changed:
            if snapshot in _names(self.unsettled):
                self._aborted[snapshot] = reason or "no reason was given"

    def pause(self, snapshot: str) -> bool:
        """Keep a save from being taken; say whether it had not been."""
        with self._changed:
            if is_there := snapshot in _names(self._saves):
                self._paused.add(snapshot)
            return is_there

    def go(self, snapshot: str, *, drop: bool) -> None:
        """Let a save that is paused be taken, or drop it."""
        with self._changed:
            if drop and snapshot in self._paused:
                del self._saves[_names(self._saves).index(snapshot)]
            self._paused.discard(snapshot)
            self._changed.notify_all()

    def end(self, *, is_trainer_gone: bool) -> None:
        """Take nothing more in. A save that is paused can be taken: nobody will say so."""
        with self._changed:
            self._is_ended = True
            self._is_trainer_gone = self._is_trainer_gone or is_trainer_gone
            self._paused.clear()
            self._changed.notify_all()

    def take(self) -> WriterSave | None:
        """Return the next save, once there is one not paused; None when there is no more."""
        with self._changed:
            if self._current is not None:
                self._aborted.pop(self._current.write.snapshot, None)
                self._current = None
            while not self._saves or self._saves[0].write.snapshot in self._paused:
                if self._is_ended and not self._saves:
                    return None
                self._changed.wait(_STEP_S)
            self._current = self._saves[0]  # first: `unsettled` misses none
            self._saves.popleft()
            return self._current

    @property
    def unsettled(self) -> list[WriterSave]:
        """The save taken last, and those to be taken.

        Takes no lock: an interrupt, which may come at any moment, may have left it held.
        """
        saves = (self._current, *self._saves)
        return list(dict.fromkeys(save for save in saves if save is not None))

    def check(self, write: Write) -> None:
        """Raise the error of a save that is not complete and will never be."""
        if (reason := self._aborted.get(write.snapshot)) is not None:
            raise CheckpointError(
                f"a snapshot of {write.path} could not be staged: {reason}",
                rank=self._rank,
            )
        if self._is_trainer_gone:
            raise RankError(
                f"the trainer of rank {self._rank} has ended before its snapshot of "
                f"{write.path} was staged: nothing is committed. Look into that rank's log, "
                f"and restart the job",
                rank=self._rank,
            )


def _names(saves: Iterable[WriterSave]) -> list[str]:
    return [save.write.snapshot for save in saves]


class OpenArenas:
    """The arenas of a rank, opened once, so that they outlive the trainer.

    One that another has replaced is closed as soon as no save needs it.
    """

    def __init__(self, folder: RankFolder) -> None:
        self._folder = folder
        self._known: dict[int, ArenaReader] = {}

    def open(self, write: Write) -> ArenaReader | CheckpointError:
        """Return the arena of a save, or why there is none; others are told where it is."""
        number, place = write.number, write.place
        try:
            if not 0 <= number < NUM_ARENAS:
                raise CorruptError(f"there is no arena {number} of rank {self._folder.rank}")
            known = self._known.get(number)
            if (
                known is not None
                and known.place == place
                and os.path.samestat(os.stat(place), os.fstat(known.fd))
            ):
                return known
            reader = ArenaReader(place, self._folder.job)
            if place.startswith("/proc/"):
                self._folder.tell("writer", number, reader.fd)
            self._known[number] = reader
        except FileNotFoundError:
            return ConflictError(f"{place} is gone: who has removed it? Save again")
        except OSError as error:
            return CorruptError(f"{place} cannot be opened: {error.strerror}")
        except CheckpointError as error:
            return error
        return reader

    def close(self) -> None:
        """Close all. No thread uses them any more."""
        for reader in self._known.values():
            reader.close()
