"""What does not change is linked, not written; and what is damaged is not linked on."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import dist_ckpt as dc
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.commit import removal
from dist_ckpt.core.format.shard_file import ShardFile, decode_header
from dist_ckpt.core.planning.plan import FileReceipt
from dist_ckpt.core.saving.save import save_together
from dist_ckpt.core.saving.save_options import SaveOptions
from dist_ckpt.core.shard_io.write import copy_files
from dist_ckpt.core.shard_io.write.write_or_link import (
    MAX_SHARED,
    READ_BACK_EVERY,
    LinkableSaves,
    SavedFiles,
)
from dist_ckpt.core.storage import Storage
from dist_ckpt.core.storage.local.local_storage import LocalStorage
from dist_ckpt.errors import CheckpointError, NotFoundError
from dist_ckpt.reports import SaveReport
from dist_ckpt.testing.crash_storage import CrashStorage, states
from dist_ckpt.testing.faulty_storage import FaultyStorage
from dist_ckpt.testing.memory_storage import MemoryStorage
from dist_ckpt.testing.thread_channel import TEST_CONFIG
from linking import ROOT, NoLinks, inodes
from long_mode import IS_LONG, sample
from ranks import load_on_threads, run_ranks

torch = pytest.importorskip("torch")

FROZEN = "r00-00000.safetensors"


def state(step: int, rank: int = 0, ranks: int = 1, base: float = 7.0) -> dict[str, Any]:
    """Return a state of which only the base does not change from step to step."""
    rows = torch.full((4, 3), base + rank)
    return {
        "model": {
            "base": {"w": dc.LocalShard(rows, (4 * ranks, 3), (4 * rank, 0))},
            "lora": torch.full((2,), float(step)),
        },
        "step": step,
    }


def saves(
    storage: Storage | Callable[[int], Storage],
    steps: range,
    *,
    ranks: int = 1,
    base: Callable[[int], float] = lambda _: 7.0,
    before: Callable[[int], object] = lambda _: None,
    path: str = f"{ROOT}/s{{}}",
    **options: Any,
) -> list[SaveReport]:
    """Save steps one after another by the same ranks; return what rank 0 reports."""
    options = {"link_unchanged": "model.base", **options}

    def run(rank: int, channel: Any, bulk: Any) -> list[SaveReport]:
        session = Session(channel, bulk, TEST_CONFIG)
        own = storage(rank) if callable(storage) else storage
        found = []
        for step in steps:
            if rank == 0:
                before(step)
            held = state(step, rank, ranks, base(step))
            how = SaveOptions(step=step, **options)
            found.append(save_together(session, held, path.format(step), how, own))
        return found

    return run_ranks(run, world_size=ranks, harness="threads")[0] or []


def step_at(storage: Storage, path: str, ranks: int = 1, base: float = 7.0) -> int | None:
    """Return the step that is there, whole, or None."""
    loaded: dict[str, Any] = {}
    try:
        load_on_threads(storage, [loaded], path)
    except NotFoundError:
        return None
    step = loaded["step"]
    rows = torch.cat([torch.full((4, 3), base + rank) for rank in range(ranks)])
    assert torch.equal(loaded["model"]["base"]["w"], rows)
    assert torch.equal(loaded["model"]["lora"], torch.full((2,), float(step)))
    return int(step)


def shared(root: Path, steps: range) -> list[int]:
    return [inodes(root / f"s{step}")[FROZEN] for step in steps]


# --- what is linked ----------------------------------------------------------------------------


def test_two_saves_write_what_does_not_change_and_later_ones_link_it_in_turns(
    tmp_path: Path,
) -> None:
    reports = saves(LocalStorage(), range(1, 7), path=f"{tmp_path}/s{{}}")
    assert [one.num_linked for one in reports] == [0, 0, 1, 1, 1, 1]
    files = shared(tmp_path, range(1, 7))
    assert files == [files[0], files[1]] * 3
    assert files[0] != files[1]
    for report, step in zip(reports, range(1, 7), strict=True):
        assert report.nbytes_linked == (
            report.num_linked
            and Path(next((tmp_path / f"s{step}").glob(f"a*/{FROZEN}"))).stat().st_size
        )
        assert step_at(LocalStorage(), f"{tmp_path}/s{step}") == step
        assert dc.verify(tmp_path / f"s{step}").ok
    assert reports[5].storage_writes.nbytes < reports[0].storage_writes.nbytes
    assert "linked" in str(reports[5])
    for step in (1, 2, 3, 4):  # the last two stay whole when what they linked to goes
        dc.delete(tmp_path / f"s{step}")
    assert dc.verify(tmp_path / "s6").ok


def test_a_save_renews_the_times_of_a_file_that_it_links(tmp_path: Path) -> None:
    def make_old(step: int) -> None:
        for file in tmp_path.glob(f"s{step - 2}/*/{FROZEN}"):
            os.utime(file, (1e9, 1e9))

    saves(LocalStorage(), range(4), path=f"{tmp_path}/s{{}}", before=make_old)
    assert shared(tmp_path, range(1, 4, 2)) == shared(tmp_path, range(3, 0, -2))
    (newest,) = tmp_path.glob(f"s3/*/{FROZEN}")
    assert newest.stat().st_mtime > 1e9


def test_states_that_are_saved_in_turns_are_linked_each_to_its_own(tmp_path: Path) -> None:
    others: list[dict[str, Any]] = [{"ema": torch.ones(3)}, {"model": {"base": torch.zeros(4)}}]
    linked: list[list[int]] = []
    for step in range(4):
        linked.append([])
        for number, held in enumerate([state(step), *others]):
            link_unchanged = "model.base" if "model" in held else ()
            report = dc.save(
                held, tmp_path / f"{number}-{step}", step=step, link_unchanged=link_unchanged
            )
            linked[-1].append(report.num_linked)
    assert linked == [[0, 0, 0], [0, 0, 0], [1, 0, 1], [1, 0, 1]]
    assert step_at(LocalStorage(), f"{tmp_path}/0-3") == 3


def test_a_file_is_linked_where_something_else_of_the_state_has_another_plan(
    tmp_path: Path,
) -> None:
    reports = [
        dc.save(
            {**state(step, base=9.0), "seen": torch.zeros(step)},
            tmp_path / f"{step}",
            link_unchanged="model.base",
        )
        for step in range(1, 4)
    ]
    assert [one.num_linked for one in reports] == [0, 0, 1]


def test_what_has_changed_is_written_and_linked_from_then_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = lambda step: 7.0 if step < 4 else 8.0  # noqa: E731
    reports = saves(LocalStorage(), range(1, 8), path=f"{tmp_path}/s{{}}", base=base)
    assert [one.num_linked for one in reports] == [0, 0, 1, 0, 0, 1, 1]
    assert "written again" not in caplog.text  # nothing is damaged
    for step in range(1, 8):
        assert step_at(LocalStorage(), f"{tmp_path}/s{step}", base=base(step)) == step


def test_without_reuse_nothing_is_linked_and_no_component_is_in_parts(tmp_path: Path) -> None:
    reports = saves(LocalStorage(), range(1, 4), path=f"{tmp_path}/s{{}}", link_unchanged=())
    assert [one.num_linked for one in reports] == [0, 0, 0]
    assert [one.stem for one in dc.open(tmp_path / "s3").index.catalog.components] == ["model"]


def test_a_file_has_so_many_names_and_is_then_written_anew(tmp_path: Path) -> None:
    last = 2 * MAX_SHARED + 4
    reports = saves(LocalStorage(), range(1, last + 1), path=f"{tmp_path}/s{{}}")
    files = shared(tmp_path, range(1, last + 1))
    assert max(files.count(one) for one in files) == MAX_SHARED
    written = [n for n, one in enumerate(reports, 1) if not one.num_linked]
    assert written == [1, 2, last - 3, last - 2]


def test_one_bad_sector_leaves_one_of_any_two_checkpoints_that_are_kept(tmp_path: Path) -> None:
    def prune(step: int) -> None:
        if step > 3:
            dc.Run(tmp_path).prune(dc.keep.last(2))

    saves(LocalStorage(), range(1, 24), path=f"{tmp_path}/s{{}}", before=prune)
    files = shared(tmp_path, range(21, 24))
    assert all(one != other for one, other in pairwise(files))
    flip(tmp_path, 23)
    assert not dc.verify(tmp_path / "s23").ok
    assert dc.verify(tmp_path / "s22").ok


def flip(root: Path, step: int, at: int = -1) -> None:
    (file,) = (root / f"s{step}").glob(f"a*/{FROZEN}")
    with file.open("r+b") as opened:
        opened.seek(at, 2 if at < 0 else 0)
        byte = opened.read(1)
        opened.seek(at, 2 if at < 0 else 0)
        opened.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("at", [-1, 100])
def test_what_is_damaged_on_disk_is_not_linked_on(
    tmp_path: Path, at: int, caplog: pytest.LogCaptureFixture
) -> None:
    def before(step: int) -> None:
        if step == 3:
            flip(tmp_path, 1, at)

    reports = saves(LocalStorage(), range(1, 6), path=f"{tmp_path}/s{{}}", before=before)
    assert [one.num_linked for one in reports] == [0, 0, 0, 1, 1]
    assert "is not linked but written again" in caplog.text
    assert [dc.verify(tmp_path / f"s{step}").ok for step in range(1, 6)] == [False] + 4 * [True]


def test_no_file_of_a_checkpoint_that_is_recorded_as_damaged_is_linked(tmp_path: Path) -> None:
    def before(step: int) -> None:
        if step == 5:
            flip(tmp_path, 3)
            assert not dc.verify(tmp_path / "s3").ok

    reports = saves(LocalStorage(), range(1, 8), path=f"{tmp_path}/s{{}}", before=before)
    assert [one.num_linked for one in reports] == [0, 0, 1, 1, 0, 1, 1]
    good = [dc.verify(tmp_path / f"s{step}").ok for step in range(1, 8)]
    assert good == [False, True, False, True, True, True, True]


def test_a_header_is_looked_at_each_time(tmp_path: Path) -> None:
    def before(step: int) -> None:
        if step == 5:
            flip(tmp_path, 3, 100)  # read back, two saves ago

    reports = saves(LocalStorage(), range(1, 6), path=f"{tmp_path}/s{{}}", before=before)
    assert [one.num_linked for one in reports] == [0, 0, 1, 1, 0]
    # What a save has found is recorded, also for the other name of the file.
    assert [info.step for info in dc.checkpoints(tmp_path) if info.damage] == [1, 3]


def test_what_was_read_back_is_read_back_again_after_some_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    now = [0]
    real = decode_header

    def decode(*arguments: Any, **options: Any) -> ShardFile:
        read.append(now[0])
        return real(*arguments, **options)

    monkeypatch.setattr(copy_files, "decode_header", decode)  # of a file that is read back
    last = 3 + READ_BACK_EVERY
    saves(
        LocalStorage(),
        range(1, last + 1),
        path=f"{tmp_path}/s{{}}",
        before=lambda step: now.__setitem__(0, step),
    )
    assert read == [3, 4, last]


@pytest.mark.parametrize("is_told_late", [False, True])
def test_where_nothing_can_be_linked_all_is_written(is_told_late: bool) -> None:
    storage = MemoryStorage({ROOT: None})
    reports = saves(FaultyLinks(storage) if is_told_late else NoLinks(storage), range(1, 5))
    assert [one.num_linked for one in reports] == [0] * 4
    assert [step_at(storage, f"{ROOT}/s{step}") for step in range(1, 5)] == [1, 2, 3, 4]


class FaultyLinks(FaultyStorage):
    """Links, and says that it has not."""

    def call(self, what: str, act: Any) -> Any:
        if what.startswith("link"):
            self._done, self._fail_at = True, self.calls + 1
        return super().call(what, act)


def test_what_is_pruned_between_two_saves_is_written_or_linked_from_the_newer() -> None:
    storage = MemoryStorage({ROOT: None})

    def before(step: int) -> None:
        if step == 4:  # the older one is gone: the newer one is linked to
            removal.delete(storage, f"{ROOT}/s2")
        if step == 5:
            for one in (3, 4):
                removal.delete(storage, f"{ROOT}/s{one}")

    reports = saves(storage, range(1, 6), before=before)
    assert [one.num_linked for one in reports] == [0, 0, 1, 1, 0]
    assert [step_at(storage, f"{ROOT}/s{step}") for step in (1, 5)] == [1, 5]


def test_an_overwrite_at_one_path_links_to_what_it_replaces() -> None:
    storage = MemoryStorage({ROOT: None})
    reports = saves(storage, range(1, 6), path=f"{ROOT}/ck", overwrite=True)
    assert [one.num_linked for one in reports] == [0, 0, 1, 1, 1]
    assert step_at(storage, f"{ROOT}/ck") == 5


def test_a_pattern_that_matches_nothing_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"link_unchanged: 'model\.none' matches no tensor"):
        dc.save(state(1), tmp_path / "ck", link_unchanged=["model.base.*", "model.none"])
    with pytest.raises(TypeError, match="link_unchanged"):
        dc.save(state(1), tmp_path / "ck", link_unchanged=3)  # type: ignore[arg-type]
    assert not (tmp_path / "ck").exists()
    dc.save(state(1), tmp_path / "ck", link_unchanged=["model"])  # all of it: no parts
    assert [one.stem for one in dc.open(tmp_path / "ck").index.catalog.components] == ["model"]


def test_of_a_tied_tensor_the_one_that_has_the_data_is_linked(tmp_path: Path) -> None:
    weight = torch.ones(3)
    tied = {"model": {"a": weight, "b": weight, "c": torch.zeros(3)}}
    dc.save(tied, tmp_path / "ck", link_unchanged="model.b")
    with dc.open(tmp_path / "ck") as checkpoint:
        catalog = checkpoint.index.catalog
    stems = {fqn: catalog.components[one.component].stem for fqn, one in catalog.tensors.items()}
    assert stems == {"model.a": "r00", "model.c": "model"}


def test_what_was_saved_in_parts_is_laid_out_for_other_ranks_in_one(tmp_path: Path) -> None:
    saves(LocalStorage(), range(1, 2), path=f"{tmp_path}/s{{}}")
    dc.reshard(tmp_path / "s1", tmp_path / "two", world_size=2)
    assert dc.verify(tmp_path / "two").ok
    assert step_at(LocalStorage(), f"{tmp_path}/two") == 1
    dc.strip(tmp_path / "s1", "model")
    assert dc.verify(tmp_path / "s1").ok


# --- crashes and faults ------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_after_any_crash_what_was_saved_is_there_and_nothing_else_shows(ranks: int) -> None:
    disk = CrashStorage()
    disk.make_folder(ROOT)
    disk.sync("/")

    def before(step: int) -> None:
        if step > 1:
            disk.mark(f"saved {step - 1}")

    saves(lambda rank: disk.client(f"rank {rank}"), range(1, 4), ranks=ranks, before=before)
    disk.mark("saved 3")
    found = states(disk.log, since="saved 2", own_syncs=ranks > 1, limit=20)
    for point, storage in sample([*found], 3):
        for step in (1, 2):
            assert step_at(storage, f"{ROOT}/s{step}", ranks) == step, point
        there = step_at(storage, f"{ROOT}/s3", ranks)
        assert there == 3 if "saved 3" in point.marks else there in (None, 3), point


@pytest.mark.parametrize("done", [False, True], ids=["not done", "done, but reported as failed"])
def test_an_error_at_any_storage_call_loses_nothing(done: bool) -> None:
    number = num_written = 0
    while True:
        storage = MemoryStorage({ROOT: None})
        faulty = FaultyStorage(storage, done=done)
        number += 1 if IS_LONG else 2

        def before(step: int, faulty: FaultyStorage = faulty, number: int = number) -> None:
            if step == 3:
                faulty._fail_at = faulty.calls + number

        error: BaseException | None = None
        reports: list[SaveReport] = []
        try:
            reports = saves(faulty, range(1, 4), before=before)
        except CheckpointError as caught:
            error = caught
        assert [step_at(storage, f"{ROOT}/s{step}") for step in (1, 2)] == [1, 2], faulty.failed
        there = step_at(storage, f"{ROOT}/s3")
        assert there == 3 if error is None else there in (None, 3), (faulty.failed, error)
        if reports and not reports[2].num_linked:
            num_written += 1
        if not faulty.failed:
            break
    assert num_written >= 2  # where the link fails, or what it was to be made to


def test_saves_that_may_not_be_linked_push_none_out_that_may() -> None:
    earlier = LinkableSaves()
    for number in range(40):
        files = {"f": FileReceipt("f", 1, 1, "d")} if number < 2 else {}
        earlier = earlier.plus(SavedFiles(f"s{number}", files))
    assert (earlier.number, earlier.names()) == (40, {"f"})
    assert [saved.folder for saved in earlier.saves] == ["s0", "s1"]
