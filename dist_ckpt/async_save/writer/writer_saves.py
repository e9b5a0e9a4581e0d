"""The saves of a background writer, and their queue.

A save is claimed, written from the arena, committed and reported. All its metadata is in the arena.
Each error is raised inside an exchange, so that the writers of all ranks get the same errors and
count the same operations. The trainer may pause, drop or abort a save in the queue.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from dist_ckpt.async_save.snapshots.arena import ArenaReader
from dist_ckpt.async_save.snapshots.arena_layout import UNCLAIMED
from dist_ckpt.async_save.snapshots.job_folder import NUM_ARENAS, RankFolder
from dist_ckpt.async_save.writer.staged_save import StagedSave, index_fields
from dist_ckpt.async_save.writer.writer_messages import (
    Done,
    Hello,
    ProtocolError,
    StoreAddress,
    Write,
)
from dist_ckpt.core.comm.collectives.collective import DistinctPayloads
from dist_ckpt.core.comm.exchange.channel import COORDINATOR, Channel, SingleProcessChannel
from dist_ckpt.core.comm.exchange.store_channel import StoreChannel
from dist_ckpt.core.comm.key_value.client_thread import StoreErrorTexts
from dist_ckpt.core.comm.key_value.key_client import KeyClient
from dist_ckpt.core.comm.rank_messages import NoAnswerError, RankLocation, describe_error
from dist_ckpt.core.commit.records.recorded_checks import find_recorded_damage
from dist_ckpt.core.commit.transaction import RankWriteResult, Transaction
from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.core.format.index.index_json import EncodedCatalog
from dist_ckpt.core.planning.plan import SavePlan
from dist_ckpt.core.planning.save.save_planner import nbytes_to_write
from dist_ckpt.core.runtime.host_memory import BufferPool
from dist_ckpt.core.runtime.processes import find_process
from dist_ckpt.core.saving.agreement import build_plan
from dist_ckpt.core.shard_io.write.write_or_link import LinkableSaves, SavedFiles, write_or_link
from dist_ckpt.core.storage import Storage, open_storage
from dist_ckpt.core.storage.storage_wrappers import CountingStorage, RateLimit, RateLimitedStorage
from dist_ckpt.errors import CheckpointError, ConflictError, CorruptError, RankError
from dist_ckpt.reports import Phases, SaveReport
from dist_ckpt.settings import Settings

_log = logging.getLogger("dist_ckpt")

# While the trainer lives: the wait for a writer that was never seen, in heartbeat timeouts.
_PATIENCE = 3

# More than a trainer can have in the queue: it has fewer arenas.
MAX_SAVES = 8

# The interval of a waiting thread's checks without a notification.
_CHECK_INTERVAL_S = 60.0

WRITER_STORE_TEXTS = StoreErrorTexts(
    gone="the store that the background writer of rank 0 serves is gone or cut off ({}). Look "
    "into that writer's log, then save again",
    lost="Training can continue, as this is a background writer: read its log, then save again.",
    absent="Its trainer may have ended, or be late: read that rank's log, then save again.",
    mixed="Their trainers are at different saves: read the logs of these ranks, then save again.",
    strange="Use the same version of dist_ckpt on all ranks, then save again.",
)


class WriterRendezvous:
    """The channel to the other writers. It is kept while the saves name the same store."""

    def __init__(self, hello: Hello) -> None:
        self._hello = hello
        self._store: StoreAddress | None = None
        self._client: KeyClient | None = None
        self._channel: Channel | None = None
        self._patience = _PATIENCE

    def hurry(self) -> None:
        """Wait less for the other writers, as the trainer has ended. Any thread may call it."""
        self._patience = 1
        self._set_patience()

    def _set_patience(self) -> None:
        # All trainers send together: a writer that was never seen got no message, or is dead.
        if isinstance(channel := self._channel, StoreChannel):
            channel.limit_unseen_timeout(self._patience * self._hello.settings.heartbeat_timeout_s)

    def linger(self) -> None:
        """Keep the store of this writer until the others have the outcome of the last save.

        They may still be writing. The trainer has ended, so nothing waits for this process.
        """
        if isinstance(channel := self._channel, StoreChannel):
            channel.linger(self._hello.settings.join_timeout_s)

    @property
    def token(self) -> bytes | None:
        """The token of the current store."""
        return None if self._store is None else self._store[2]

    def open_channel(self, write: Write) -> Channel:
        """Return the channel of a save. NoAnswerError if its store cannot be reached."""
        store = (write.host, write.port, write.token)
        if self._channel is not None and self._store == store:
            return self._channel
        self.close()
        hello, settings = self._hello, self._hello.settings
        if hello.world_size == 1:
            self._channel = SingleProcessChannel()
        else:
            timeout_s = settings.heartbeat_timeout_s
            try:
                self._client = KeyClient(
                    store[:2], write.token, connect_s=timeout_s, timeout_s=timeout_s
                )
            except OSError as error:
                raise NoAnswerError(WRITER_STORE_TEXTS.gone.format(error)) from error
            self._channel = StoreChannel(
                self._client,
                hello.rank,
                hello.world_size,
                location=RankLocation(host_of(settings), find_process(os.getpid())),
                settings=settings,
                texts=WRITER_STORE_TEXTS,
            )
        self._store = store
        self._set_patience()
        return self._channel

    def close(self) -> None:
        """Leave the store. The other writers are notified immediately."""
        if self._channel is not None:
            self._channel.close()
        if self._client is not None:
            self._client.close()
        self._channel = self._client = self._store = None


def host_of(settings: Settings) -> str:
    """Return the host name of a writer in errors. It differs from that of its trainer."""
    return f"{settings.host or socket.gethostname()}, background writer"


@dataclass
class WriterContext:
    """The state that a writer's saves share. `check` raises if no more of a save will be staged."""

    hello: Hello
    rendezvous: WriterRendezvous
    check: Callable[[Write], None]
    rate_limit: RateLimit | None = None
    buffers: BufferPool = field(default_factory=BufferPool)  # reused scratch memory
    earlier: LinkableSaves = field(default_factory=LinkableSaves)
    # One attribute, because one thread may read it while another thread sets it.
    _cached_plan: tuple[DistinctPayloads, tuple[SavePlan, EncodedCatalog]] | None = None

    def plan(self, inventories: DistinctPayloads) -> tuple[SavePlan, EncodedCatalog]:
        """Return the plan of a save. It is cached while the inventories are the same."""
        cached = self._cached_plan
        if cached is None or cached[0] != inventories:
            plan = build_plan(inventories, self.hello.world_size)
            self._cached_plan = cached = inventories, (plan, EncodedCatalog(plan.catalog))
        return cached[1]


@dataclass(eq=False)
class WriterSave:
    """One rank's side of one save. One thread settles it, and another thread may seal it.

    `_arena` is the arena of the save, or the error of opening the arena.
    """

    _context: WriterContext
    write: Write
    _arena: ArenaReader | CheckpointError
    _staged: StagedSave | None = None
    _attempt: str = UNCLAIMED
    _saved: SavedFiles | None = None

    def settle(self) -> Done:
        """Write the save, and commit it together with the other writers.

        Collective: the writer of every rank calls this. Raises only interrupts. After a failure,
        the staged snapshot is sealed on return: then the trainer may overwrite it.
        """
        path, hello = self.write.path, self._context.hello
        try:
            report = self._commit(self._context.rendezvous.open_channel(self.write))
        except Exception as error:  # noqa: BLE001 - the trainer gets any error
            _log.error("background save to %s failed: %s", path, error, exc_info=error)
            self.seal()
            host = host_of(hello.settings)
            failure = describe_error(error, "background save", hello.rank, host)
            return Done(self.write.snapshot, None, failure)
        _log.info("background save to %s is committed", path)
        return Done(self.write.snapshot, report, None)

    def _commit(self, channel: Channel) -> SaveReport:
        path, is_quiet = self.write.path, self._context.hello.rank != COORDINATOR
        phases = Phases("background save", path, quiet=is_quiet)
        channel.enter(f"background save to {path}")
        try:
            with Transaction(channel, self._context.hello.settings) as transaction:
                with phases.phase("claim"):
                    storage, staged = self._claim(channel, transaction)
                with phases.phase("write"):
                    decision = transaction.write_and_commit(
                        staged.encoded_catalog,
                        index_fields(staged.snapshot, staged.details),
                        partial(self._write, storage, staged),
                    )
                staged.followed.mark_committed()
                if self._saved is not None:
                    self._context.earlier = self._context.earlier.plus(self._saved)
                with phases.phase("clean up"):
                    transaction.remove_superseded()
            return transaction.report(decision, phases, reads=storage.reads, writes=storage.writes)
        finally:
            channel.leave()

    def seal(self) -> None:
        """Seal the snapshot of a save that failed or will not be settled, for the next run.

        Any thread may call it, even while `settle` hangs. It does not use the storage.
        """
        path = self.write.path
        try:
            self._staged = staged = self._staged or self._open_staged()
            threads = self._context.hello.settings.threads
            staged.seal(self._attempt, threads=threads, buffers=self._context.buffers)
        except Exception as error:  # noqa: BLE001 - the trainer gets the first error, not this one
            _log.warning("the snapshot of %s is not sealed: %s", path, error)
        else:
            _log.info("the snapshot of %s is sealed, and stays in memory", path)

    def _claim(
        self, channel: Channel, transaction: Transaction
    ) -> tuple[CountingStorage, StagedSave]:
        """Check that all writers have the same save, and claim an attempt."""
        with channel.exchange("claim") as claiming:
            self._staged = staged = self._open_staged()
            opened, path = open_storage(staged.snapshot.path)
            storage = CountingStorage(opened)
            staged.staging.check()
            snapshots = claiming.gather(staged.snapshot.id)
            if snapshots is not None:
                if len(ranks := {name: rank for rank, name in enumerate(snapshots)}) > 1:
                    raise ConflictError(
                        f"the background writers do not write the same save: {ranks}; save again"
                    )
                details = staged.details
                claiming.decide(
                    transaction.claim(
                        storage,
                        path,
                        overwrite=details.overwrite,
                        nbytes=nbytes_to_write(staged.plan),
                        incarnation=details.incarnation,
                    )
                )
        transaction.set_attempt(storage, path, claiming.result(Attempt))
        self._attempt = transaction.attempt.name
        return storage, staged

    def _open_staged(self) -> StagedSave:
        if isinstance(self._arena, CheckpointError):
            raise self._arena
        followed = self._arena.follow(self.write.snapshot)
        snapshot, context = followed.snapshot, self._context
        save = snapshot.path, snapshot.rank, snapshot.world_size
        if save != (self.write.path, context.hello.rank, context.hello.world_size):
            raise CorruptError(f"snapshot {snapshot.id} is of another save: {save}")
        # Without `self`: a cycle would keep the arena of a settled save alive.
        return StagedSave(followed, partial(context.check, self.write), context.plan, context.hello)

    def _write(self, storage: CountingStorage, staged: StagedSave, folder: str) -> RankWriteResult:
        start = time.monotonic()
        context = self._context
        staged.staging.await_head_start()
        target = RateLimitedStorage(storage, context.rate_limit) if context.rate_limit else storage
        threads, buffers = context.hello.settings.threads, context.buffers
        earlier = replace(context.earlier, find_damage=partial(find_recorded_damage, storage))
        part = write_or_link(
            target, folder, staged.files, earlier, threads=threads, buffers=buffers
        )
        staged.seal_as(self._attempt, part.receipts)
        self._saved = part.saved
        if part.damaged:
            _record_damage(storage, part.damaged)
        seconds = time.monotonic() - start
        return RankWriteResult(part.receipts, staged.details.replicas, seconds, part.linked)


def _record_damage(storage: Storage, errors: Sequence[CorruptError]) -> None:
    from dist_ckpt.core.checkpoint.verify_checkpoint import record_damage  # noqa: PLC0415  (few writers find damage)

    for error in errors:
        record_damage(storage, error)


class WriterQueue:
    """The queue of one writer. One thread adds and changes saves, another thread takes them."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._changed = threading.Condition()
        self._saves: deque[WriterSave] = deque()
        # The snapshots that are paused, and the reasons of aborted ones.
        self._paused: set[str] = set()
        self._aborted: dict[str, str] = {}
        self._is_ended = False
        self._is_trainer_gone = False
        self._current: WriterSave | None = None

    def put(self, save: WriterSave) -> None:
        """Add a save."""
        with self._changed:
            if self._is_ended or len(self._saves) >= MAX_SAVES:
                raise ProtocolError(f"the trainer sent more than {MAX_SAVES} saves")
            self._saves.append(save)
            self._changed.notify_all()

    def abort(self, snapshot: str, reason: str) -> None:
        """Make a save fail, unless it is complete."""
        with self._changed:
            if snapshot in _snapshot_ids(self.unsettled):
                self._aborted[snapshot] = reason or "no reason was given"

    def pause(self, snapshot: str) -> bool:
        """Pause a save. Return False if it is not in the queue any more."""
        with self._changed:
            if is_queued := snapshot in _snapshot_ids(self._saves):
                self._paused.add(snapshot)
            return is_queued

    def go(self, snapshot: str, *, drop: bool) -> None:
        """Continue a paused save, or drop it."""
        with self._changed:
            if drop and snapshot in self._paused:
                del self._saves[_snapshot_ids(self._saves).index(snapshot)]
            self._paused.discard(snapshot)
            self._changed.notify_all()

    def end(self, *, is_trainer_gone: bool) -> None:
        """Accept no more saves. Paused saves continue, as no `Go` can come."""
        with self._changed:
            self._is_ended = True
            self._is_trainer_gone = self._is_trainer_gone or is_trainer_gone
            self._paused.clear()
            self._changed.notify_all()

    def take(self) -> WriterSave | None:
        """Wait for the next save that is not paused, and return it. None at the end."""
        with self._changed:
            if self._current is not None:
                self._aborted.pop(self._current.write.snapshot, None)
                self._current = None
            while not self._saves or self._saves[0].write.snapshot in self._paused:
                if self._is_ended and not self._saves:
                    return None
                self._changed.wait(_CHECK_INTERVAL_S)
            self._current = self._saves[0]  # before the removal: `unsettled` must not miss it
            self._saves.popleft()
            return self._current

    @property
    def unsettled(self) -> list[WriterSave]:
        """The current save and the queued ones. No lock: an interrupt may have left it locked."""
        saves = (self._current, *self._saves)
        return list(dict.fromkeys(save for save in saves if save is not None))

    def check(self, write: Write) -> None:
        """Raise an error if no more of a save will be staged."""
        if (reason := self._aborted.get(write.snapshot)) is not None:
            raise CheckpointError(
                f"a snapshot of {write.path} could not be staged: {reason}", rank=self._rank
            )
        if self._is_trainer_gone:
            raise RankError(
                f"the trainer of rank {self._rank} has ended before its snapshot of "
                f"{write.path} was staged: nothing is committed. Look into that rank's log, "
                f"and restart the job",
                rank=self._rank,
            )


def _snapshot_ids(saves: Iterable[WriterSave]) -> list[str]:
    return [save.write.snapshot for save in saves]


class OpenArenas:
    """The arenas of a rank. They outlive the trainer. A replaced one closes with its last save."""

    def __init__(self, folder: RankFolder) -> None:
        self._folder = folder
        self._readers: dict[int, ArenaReader] = {}

    def open(self, write: Write) -> ArenaReader | CheckpointError:
        """Return the arena of a save, or the error of opening it. Publish an anonymous arena."""
        number, path = write.number, write.arena_path
        try:
            if not 0 <= number < NUM_ARENAS:
                raise CorruptError(f"arena {number} of rank {self._folder.rank} does not exist")
            reader = self._readers.get(number)
            if (
                reader is not None
                and reader.path == path
                and os.path.samestat(os.stat(path), os.fstat(reader.fd))
            ):
                return reader
            reader = ArenaReader(path, self._folder.job)
            if path.startswith("/proc/"):
                self._folder.publish("writer", number, reader.fd)
            self._readers[number] = reader
        except FileNotFoundError:
            return ConflictError(f"{path} was removed. Find out what removed it, and save again")
        except OSError as error:
            return CorruptError(f"{path} cannot be opened: {error.strerror}")
        except CheckpointError as error:
            return error
        return reader

    def close(self) -> None:
        """Close all arenas. No thread uses them any more."""
        for reader in self._readers.values():
            reader.close()
