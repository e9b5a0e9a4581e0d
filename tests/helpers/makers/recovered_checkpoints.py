"""Checkpoints of ranks that are threads, and snapshots of them as a dead job leaves them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

import dist_ckpt as dc
from dist_ckpt.async_save.memory_restore import restore_together
from dist_ckpt.async_save.snapshots.arena import Arena, ArenaPool, ArenaReader
from dist_ckpt.async_save.snapshots.arena_layout import (
    UNCLAIMED,
    Image,
    Seal,
    Snapshot,
    SnapshotMetadata,
    arena_nbytes,
)
from dist_ckpt.async_save.snapshots.job_folder import JobFolder
from dist_ckpt.async_save.snapshots.snapshot_files import file_receipts
from dist_ckpt.async_save.trainer.start_handshake import SaverInfo
from dist_ckpt.core.comm.collectives.collective import DistinctPayloads
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.commit.attempts import find_checkpoint
from dist_ckpt.core.format.filenames import (
    parse_attached_file,
    parse_objects_file,
    parse_shard_file,
)
from dist_ckpt.core.loading.load_options import LoadOptions
from dist_ckpt.core.planning.plan import FileReceipt
from dist_ckpt.core.runtime import typed_msgpack
from dist_ckpt.core.saving.agreement import SaveCache
from dist_ckpt.core.saving.save import save_together
from dist_ckpt.core.saving.save_options import SaveOptions
from dist_ckpt.core.storage import open_storage
from dist_ckpt.reports import LoadReport
from dist_ckpt.testing.thread_channel import TEST_CONFIG
from ranks import Outcome, run_ranks, try_ranks

ROWS = 24


def whole(step: int) -> torch.Tensor:
    """Return the tensor that was saved in a step."""
    return torch.arange(ROWS * 512, dtype=torch.float32).view(ROWS, 512) + 1e6 * step


def state_of(rank: int, world_size: int, step: int) -> dict[str, Any]:
    """Return a rank's state: rows of a tensor, a tensor that all have, a value."""
    rows = ROWS // world_size
    part = whole(step)[rank * rows : (rank + 1) * rows].clone()
    return {
        "model": {
            "w": dc.LocalShard(part, (ROWS, 512), (rank * rows, 0)),
            "bias": torch.full((8,), float(step)),
        },
        "epoch": {"number": step},
    }


def empty_state_of(rank: int, world_size: int) -> dict[str, Any]:
    """Return a state to load into."""
    return state_of(rank, world_size, 0)


def step_in(states: Sequence[Mapping[str, Any]]) -> int:
    """Return the step that the ranks' states are of, every byte of them."""
    (step,) = {state["epoch"]["number"] for state in states}
    parts = torch.cat([state["model"]["w"].tensor for state in states])
    assert torch.equal(parts, whole(step))
    assert all(torch.equal(state["model"]["bias"], torch.full((8,), step)) for state in states)
    return int(step)


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was committed, and what a background save of it would have known."""

    path: str
    step: int
    world_size: int
    attempt: str
    inventories: DistinctPayloads
    files: Mapping[str, bytes]
    receipts: Mapping[str, FileReceipt]

    def files_of(self, rank: int) -> list[str]:
        """Return the names of a rank's files."""
        return sorted(
            name
            for name in self.files
            if rank == ((shard := parse_shard_file(name)) and shard[1])
            or rank == parse_objects_file(name)
            or (rank == 0 and parse_attached_file(name) is not None)
        )


def save(path: Path, world_size: int, step: int, **options: Any) -> Saved:
    """Save by ranks that are threads."""

    def run(rank: int, channel: Any, bulk: Any) -> DistinctPayloads:
        session = Session(channel, bulk, TEST_CONFIG)
        state = state_of(rank, world_size, step)
        save_together(session, state, path, SaveOptions(step=step, **options))
        cached = session.cache(SaveCache).plan
        assert cached is not None
        return cached.inventories

    inventories = run_ranks(run, world_size=world_size, harness="threads")[0]
    assert inventories is not None
    attempt, index = find_checkpoint(*open_storage(path))
    receipts = {record[0]: record for record in file_receipts(index)}
    files = {name: (path / attempt.name / name).read_bytes() for name in receipts}
    return Saved(str(path), step, world_size, attempt.name, inventories, files, receipts)


def keep(
    folder: JobFolder,
    saved: Saved,
    *,
    arena: int = 0,
    ranks: Sequence[int] | None = None,
    seal: Sequence[int] | None = None,
    unclaimed: Sequence[int] = (),
    was_committed: bool = False,
    edit: Callable[[SnapshotMetadata, int], SnapshotMetadata] = lambda details, _: details,
) -> None:
    """Leave a save in an arena of its ranks, all of them sealed, as if their processes had died.

    The writers of those that are `unclaimed` were told of no attempt.
    """
    for rank in range(saved.world_size) if ranks is None else ranks:
        arenas = ArenaPool(folder.rank(rank))
        what = snapshot_of(saved, rank, edit)
        memory = arenas.open_fitting(arena, arena_nbytes(what))
        stage(memory, saved, what)
        if seal is None or rank in seal:
            follower = ArenaReader(memory.path, folder.job)
            receipts = tuple(saved.receipts[image.name] for image in what.images)
            followed = follower.follow(what.id)
            followed.seal(Seal(UNCLAIMED if rank in unclaimed else saved.attempt, receipts))
            if was_committed:
                followed.mark_committed()
            follower.close()
        arenas.close()


def snapshot_of(
    saved: Saved,
    rank: int,
    edit: Callable[[SnapshotMetadata, int], SnapshotMetadata] = lambda details, _: details,
) -> Snapshot:
    """Return what a rank's snapshot of a save says."""
    details = SnapshotMetadata(
        overwrite=False,
        mirrored={},
        saved_by={"dist_ckpt": dc.__version__, "torch": str(torch.__version__)},
        began_at=1e9 + saved.step,
        inventories=saved.inventories,
        replicas=(),
    )
    return Snapshot(
        id=f"{saved.step:032x}",
        path=saved.path,
        step=saved.step,
        rank=rank,
        world_size=saved.world_size,
        images=tuple(Image(name, len(saved.files[name])) for name in saved.files_of(rank)),
        details=typed_msgpack.encode(edit(details, rank)),
    )


def stage(memory: Arena, saved: Saved, what: Snapshot) -> None:
    """Stage the files of a rank."""
    for image, data in zip(what.images, memory.begin(what), strict=True):
        data[:] = saved.files[image.name]
    memory.complete()


def edit_arena(folder: JobFolder, rank: int, arena: int, old: bytes, new: bytes) -> None:
    """Change bytes in an arena that lie there just once."""
    path = Path(folder.rank(rank).arena_path(arena))
    data = path.read_bytes()
    assert data.count(old) == 1, f"{data.count(old)} times"
    with path.open("r+b") as file:
        file.seek(data.index(old))
        file.write(new)


def try_restore(
    folders: JobFolder | Sequence[JobFolder], world_size: int, **options: Any
) -> tuple[list[Outcome], list[dict[str, Any]]]:
    """Restore by ranks that are threads; return what each rank's call came to, and the states.

    The ranks have one host with one folder, or hosts of their own with theirs.
    """
    states = [empty_state_of(rank, world_size) for rank in range(world_size)]

    def run(rank: int, channel: Any, bulk: Any) -> LoadReport | None:
        session = Session(channel, bulk, TEST_CONFIG)
        folder = folders if isinstance(folders, JobFolder) else folders[rank]
        saver = SaverInfo("job", None, "wait")
        found = restore_together(session, folder, states[rank], LoadOptions(**options), saver=saver)
        return None if found is None else found[1]

    hosts = ["host"] * world_size if isinstance(folders, JobFolder) else None
    return try_ranks(run, world_size=world_size, harness="threads", hosts=hosts), states


def restore(
    folders: JobFolder | Sequence[JobFolder], world_size: int, **options: Any
) -> tuple[list[LoadReport] | None, list[dict[str, Any]]]:
    """Restore as above; raise the first error. None if all found nothing."""
    outcomes, states = try_restore(folders, world_size, **options)
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    reports = [outcome.value for outcome in outcomes if outcome.value is not None]
    assert len(reports) in (0, world_size)
    return reports or None, states


def with_digests(details: SnapshotMetadata, *members: tuple[str, str]) -> SnapshotMetadata:
    """Return details of a rank that has a replica group with these members."""
    return replace(details, replicas=(("group", members),))
