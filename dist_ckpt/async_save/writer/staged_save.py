"""One save as its writer finds it in an arena: what it is, what is written of it, its seal."""

from __future__ import annotations

from collections.abc import Callable

from dist_ckpt.async_save.snapshots.arena import FollowedArena
from dist_ckpt.async_save.snapshots.arena_layout import Seal
from dist_ckpt.async_save.snapshots.snapshot_metadata import SnapshotMetadata
from dist_ckpt.async_save.writer.staged_files import Staging, files_of
from dist_ckpt.core.comm.collectives.collective import Bodies
from dist_ckpt.core.format.index.catalog_json import EncodedCatalog
from dist_ckpt.core.planning.plan import FileReceipt, SavePlan
from dist_ckpt.core.planning.save.save_planner import items_of
from dist_ckpt.core.runtime import typed_msgpack
from dist_ckpt.core.runtime.buffers import BufferPool
from dist_ckpt.core.shard_io.write.link_unchanged import LinkableSaves, SavedPart, write_or_link
from dist_ckpt.core.shard_io.write.shard_writer import WritableStorage, write_all
from dist_ckpt.core.storage import Storage
from dist_ckpt.core.storage.null_storage import NullStorage
from dist_ckpt.errors import CorruptError


class StagedSave:
    """A rank's part of one save. One thread writes it, and another one may seal it meanwhile.

    Whatever is in the arena is the same then, whoever comes first: both put the same bytes there.
    """

    def __init__(
        self,
        followed: FollowedArena,
        check: Callable[[], None],
        plan: Callable[[Bodies], tuple[SavePlan, EncodedCatalog]],
    ) -> None:
        """Read what the arena says of it, by the `plan` of all ranks' inventories.

        `check` raises if it is not complete and never will be. CorruptError if the arena makes no
        sense.
        """
        self.snapshot = snapshot = followed.snapshot
        try:
            self.details = typed_msgpack.decode(snapshot.details, SnapshotMetadata)
        except ValueError as error:
            raise CorruptError(f"snapshot {snapshot.id} of {snapshot.path}: {error}") from error
        self.plan, self.text = plan(self.details.bodies)
        self.staging = Staging(followed, check)
        plans = items_of(self.plan, snapshot.rank)
        self._files = files_of(followed, self.staging, plans)
        self.followed = followed
        self._is_sealed = False

    def write(
        self,
        storage: WritableStorage,
        folder: str,
        attempt: str,
        *,
        threads: int,
        slots: BufferPool,
    ) -> tuple[FileReceipt, ...]:
        """Write its files as they are staged, as `write_all` does; seal it as this attempt.

        So whoever is told that it is written finds the seal.
        """
        written = write_all(storage, folder, self._files, threads=threads, slots=slots)
        self._seal_as(attempt, written)
        return written

    def write_or_link(
        self,
        storage: Storage,
        folder: str,
        attempt: str,
        earlier: LinkableSaves,
        *,
        threads: int,
        slots: BufferPool,
    ) -> SavedPart:
        """Do so, but link what an earlier save has, as `write_or_link` does."""
        part = write_or_link(storage, folder, self._files, earlier, threads=threads, slots=slots)
        self._seal_as(attempt, part.receipts)
        return part

    def _seal_as(self, attempt: str, written: tuple[FileReceipt, ...]) -> None:
        self.staging.await_complete()
        self.followed.seal(Seal(attempt, written))
        self._is_sealed = True

    def seal(self, attempt: str, *, threads: int, slots: BufferPool) -> None:
        """Seal it once it is complete, though it was not written.

        Only its bytes are digested: what is in memory is as good as before, and who restores it
        asks whether anything else was committed. Raises if it is not complete and never will be.
        """
        if not self._is_sealed:
            self.staging.await_complete()
            self.write(NullStorage(), "", attempt, threads=threads, slots=slots)
