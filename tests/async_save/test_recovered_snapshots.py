"""What arenas hold is told as saves; what does not fit together is told, and left as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from dist_ckpt.async_save.snapshots.arena import ArenaPool, ArenaReader
from dist_ckpt.async_save.snapshots.arena_layout import (
    UNCLAIMED,
    Image,
    Seal,
    Snapshot,
    SnapshotMetadata,
    arena_nbytes,
)
from dist_ckpt.async_save.snapshots.job_folder import JobFolder
from dist_ckpt.async_save.snapshots.recovered_snapshots import RecoveredSave, open_saves
from dist_ckpt.core.planning.plan import FileReceipt
from dist_ckpt.core.runtime import typed_msgpack

DETAILS = SnapshotMetadata(False, {}, {"dist_ckpt": "1"}, 5.0, (), ())
ATTEMPT = "a1-0123456789abcdef"


@pytest.fixture
def folder(tmp_path: Path) -> JobFolder:
    return JobFolder("job", roots=[str(tmp_path)])


def snapshot(rank: int, number: int = 1, world_size: int = 2) -> Snapshot:
    return Snapshot(
        *(f"{number:032x}", f"/runs/{number}", number, rank, world_size),
        images=(Image(f"model-{rank:05d}.safetensors", 5000),),
        details=typed_msgpack.encode(DETAILS),
    )


def keep(
    folder: JobFolder,
    what: Snapshot,
    *,
    arena: int = 0,
    rank: int | None = None,
    seal: Seal | None = None,
    is_complete: bool = True,
    is_sealed: bool = True,
) -> None:
    arenas = ArenaPool(folder.rank(what.rank if rank is None else rank))
    memory = arenas.open_fitting(arena, arena_nbytes(what))
    memory.begin(what)
    if is_complete:
        memory.complete()
        if is_sealed:
            files = tuple(
                FileReceipt(image.name, image.nbytes, 100, "f" * 32) for image in what.images
            )
            follower = ArenaReader(memory.path, folder.job)
            follower.follow(what.id).seal(seal or Seal(ATTEMPT, files))
            follower.close()
    arenas.close()


def look(folder: JobFolder) -> tuple[Mapping[str, RecoveredSave], Sequence[str]]:
    with open_saves(folder.rank_folders()) as saves_and_problems:
        return saves_and_problems


def test_what_all_ranks_have_sealed_is_complete(folder):
    for rank in range(2):
        keep(folder, snapshot(rank))
    saves, problems = look(folder)
    (save,) = saves.values()
    one = save.identity
    assert (one.id, one.path, one.step) == (f"{1:032x}", "/runs/1", 1)
    assert (one.world_size, one.began_at, save.attempt) == (2, 5.0, ATTEMPT)
    assert sorted(save.sealed) == [0, 1]
    assert save.sealed[1].snapshot.details == typed_msgpack.encode(DETAILS)
    assert problems == []


def test_a_rank_that_has_not_sealed_its_part_lacks(folder):
    keep(folder, snapshot(0))
    keep(folder, snapshot(1), is_sealed=False)
    keep(folder, snapshot(0, 2), arena=1, is_complete=False)
    saves, _ = look(folder)
    assert {save.identity.step: sorted(save.sealed) for save in saves.values()} == {1: [0], 2: []}
    assert saves[f"{2:032x}"].attempt is None


def test_a_snapshot_that_is_of_another_save_on_another_rank_is_left_out(folder):
    keep(folder, snapshot(0))
    keep(folder, replace(snapshot(1), path="/elsewhere"))
    saves, problems = look(folder)
    (save,) = saves.values()
    assert list(save.sealed) == [0]
    assert "is of another save on another rank" in problems[0]


def test_a_snapshot_that_was_sealed_as_another_attempt_is_left_out(folder):
    keep(folder, snapshot(0))
    one = snapshot(1)
    files = (FileReceipt(one.images[0].name, 5000, 100, "f" * 32),)
    keep(folder, one, seal=Seal("a2-0123456789abcdef", files))
    saves, problems = look(folder)
    (save,) = saves.values()
    assert (list(save.sealed), save.attempt) == ([0], ATTEMPT)
    assert "and as another" in problems[0]


def test_a_writer_that_knew_of_no_attempt_has_sealed_the_one_of_the_others(folder):
    for world in range(2):  # whoever is looked at first
        for rank in range(2):
            one = snapshot(rank, world + 1)
            files = (FileReceipt(one.images[0].name, 5000, 100, "f" * 32),)
            attempt = UNCLAIMED if rank == world else ATTEMPT
            keep(folder, one, arena=world, seal=Seal(attempt, files))
    saves, problems = look(folder)
    assert problems == []
    for save in saves.values():
        assert (sorted(save.sealed), save.attempt) == ([0, 1], ATTEMPT)


@pytest.mark.parametrize(("file", "nbytes"), [("other", 5000), ("model-00000.safetensors", 4999)])
def test_a_seal_of_other_files_is_none(folder, file, nbytes):
    keep(folder, snapshot(0), seal=Seal(ATTEMPT, (FileReceipt(file, nbytes, 100, "f" * 32),)))
    saves, problems = look(folder)
    assert saves == {}
    assert "sealed with other files" in problems[0]


def test_a_snapshot_in_the_folder_of_another_rank_is_left_out(folder):
    keep(folder, snapshot(0), rank=1)
    saves, problems = look(folder)
    assert saves == {}
    assert "a snapshot of rank 0 is in the folder of rank 1" in problems[0]


def test_details_that_make_no_sense_are_told(folder):
    keep(folder, replace(snapshot(0), details=b"\xc1"))
    keep(folder, snapshot(1))
    saves, problems = look(folder)
    assert len(problems) == 1
    assert [sorted(save.sealed) for save in saves.values()] == [[1]]
