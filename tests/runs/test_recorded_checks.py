"""What a check found is recorded, and obeyed: by prune, selectors, a resume, and what is listed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_ckpt as dc
from dist_ckpt.core.checkpoint import open_checkpoint
from dist_ckpt.core.checkpoint import verify_checkpoint as verifying
from dist_ckpt.core.commit.records import recorded_checks
from dist_ckpt.core.commit.records.incarnations import begin_incarnation
from dist_ckpt.core.commit.records.record_store import read_annotations
from dist_ckpt.core.commit.records.recorded_checks import CHECK, newest_checks, put_check
from dist_ckpt.core.shard_io.read import open_files
from dist_ckpt.core.storage.local.local_storage import LocalStorage
from dist_ckpt.errors import CorruptError, NotFoundError, StorageError
from dist_ckpt.runs.prune import DAMAGED, NEWEST_UNDAMAGED
from dist_ckpt.runs.watch_changes import changes, observe_run
from dist_ckpt.testing.memory_storage import MemoryStorage
from ranks import load_on_threads, save_on_threads
from run_folders import ROOT, committed

KEEP_ONE = dc.keep.last(1)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run of four steps, each with a tensor and an object, and with records."""
    for step in (1, 2, 3, 4):
        dc.save(fresh(float(step)), tmp_path / f"s{step}", step=step)
    dc.Run(tmp_path).metrics(1, {"loss": 4.0})
    return tmp_path


def fresh(value: float = 0.0) -> dict[str, Any]:
    return {"model": {"w": torch.full((64,), value)}, "lr": value}


def spoil(root: Path, step: int, name: str = "model-00000.safetensors") -> Path:
    """Flip the last byte of a file, or mend it again; return the file."""
    (file,) = Path(root, f"s{step}").glob(f"a*/{name}")
    data = bytearray(file.read_bytes())
    data[-1] ^= 0xFF
    file.write_bytes(bytes(data))
    return file


def damaged(root: Path) -> list[int | None]:
    return [info.step for info in dc.checkpoints(root) if info.damage is not None]


def verified(root: Path) -> list[int | None]:
    return [info.step for info in dc.checkpoints(root) if info.is_verified]


def num_checks(root: Path) -> int:
    annotations = read_annotations(LocalStorage(), str(root))
    return sum(annotation.name.kind == CHECK for annotation in annotations)


def steps(root: Path) -> list[int | None]:
    return [info.step for info in dc.checkpoints(root)]


# --- what is recorded -----------------------------------------------------------------------------


def test_the_newest_result_counts_but_only_a_full_check_withdraws_what_one_has_found() -> None:
    storage = MemoryStorage({ROOT: None})
    key = committed(storage, 1)
    expected = [
        ("load", "", ("load", "")),
        ("full", "", ("full", "")),
        ("load", "block 3", ("load", "block 3")),
        ("load", "", ("load", "")),
        ("full", "block 3", ("full", "block 3")),
        ("load", "", ("full", "block 3")),
        ("quick", "block 4", ("full", "block 3")),
        ("full", "block 5", ("full", "block 5")),
        ("full", "", ("full", "")),
    ]
    for check, damage, counts in expected:
        put_check(storage, ROOT, key, check, damage)
        found = newest_checks(read_annotations(storage, ROOT))[key]
        assert (found.level, found.damage) == counts


def load(root: Path) -> None:
    dc.load(fresh(), root / "s3")


def load_by_name(root: Path) -> None:
    dc.load({"model": {"w": torch.zeros(64)}}, f"{root}@3", strict=False)


def look_at_part(root: Path) -> None:
    with dc.open(root / "s3") as checkpoint:
        checkpoint["model.w"][:3]


def copy(root: Path) -> None:
    dc.copy(root / "s3", root.parent / "copy")


def reshard(root: Path) -> None:
    dc.reshard(root / "s3", root.parent / "resharded", world_size=2)


FINDERS = [load, load_by_name, look_at_part, copy, reshard]


@pytest.mark.parametrize("find", FINDERS)
def test_damage_is_recorded_whoever_finds_it(root: Path, find: Callable[[Path], None]) -> None:
    dc.verify(root / "s3")
    file = spoil(root, 3)
    with pytest.raises(CorruptError) as caught:
        find(root)
    assert caught.value.path == str(file)
    (info,) = dc.checkpoints(root / "s3")
    assert info.damage is not None
    assert file.name in info.damage
    assert not info.is_verified
    assert damaged(root) == [3]
    before = num_checks(root)
    with pytest.raises(CorruptError):
        find(root)  # what is known is not recorded again
    assert num_checks(root) == before == 2
    spoil(root, 3)
    dc.verify(root / "s3", level="quick")
    assert damaged(root) == [3]  # that reads too little to know better
    dc.load(fresh(), root / "s3")
    assert (damaged(root), verified(root)) == ([], [3])


def copy_by_links(root: Path) -> None:
    dc.copy(root / "s3", root.parent / "linked", link=True, overwrite=True)


def back_up(root: Path) -> None:
    dc.backup(root / "s3", overwrite=True)


def strip(root: Path) -> None:
    dc.strip(root / "s3", "lr")


def carry_over(root: Path) -> None:
    report = dc.load({"lr": 0.0}, root / "s3", strict=False)
    dc.save({"lr": 0.0}, root.parent / "carried", carry_over=report, overwrite=True)


LINKERS = [copy_by_links, back_up, strip, carry_over]


def test_a_full_check_confirms_the_damage_that_a_load_has_found(root: Path) -> None:
    spoil(root, 3)
    with pytest.raises(CorruptError):
        load(root)
    assert not dc.verify(root / "s3").ok
    spoil(root, 3)
    load(root)
    assert damaged(root) == [3]


def test_a_second_load_records_nothing(root: Path) -> None:
    load(root)
    load(root)
    assert (num_checks(root), verified(root)) == (1, [3])


@pytest.mark.parametrize("find", [load, lambda root: dc.verify(root / "s3")])
def test_a_step_that_is_replaced_during_the_second_read_is_not_damaged(
    root: Path, find: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(root, 3)
    num_left = [1 if find is load else 2]  # the first read of a check is not the load's
    check_claim = verifying._VerifyRun._check_claim

    def replace_first(self: Any) -> None:
        num_left[0] -= 1
        if not num_left[0]:
            dc.save(fresh(5.0), root / "s3", step=3, overwrite=True)
        check_claim(self)

    monkeypatch.setattr(verifying._VerifyRun, "_check_claim", replace_first)
    with suppress(CorruptError, NotFoundError):
        find(root)
    assert num_left[0] <= 0
    annotations = read_annotations(LocalStorage(), str(root))
    assert not [one for one in annotations if one.values.get("damage")]
    assert dc.verify(root / "s3").ok


@pytest.mark.parametrize("link", LINKERS)
def test_no_file_of_a_checkpoint_that_is_recorded_as_damaged_is_linked(
    root: Path, link: Callable[[Path], None]
) -> None:
    spoil(root, 3)
    dc.verify(root / "s3")
    with pytest.raises(CorruptError, match=r"model\.w rows 0:64"):
        link(root)
    assert damaged(root) == [3]
    file = spoil(root, 3)
    num_links = file.stat().st_nlink
    link(root)
    assert not file.exists() or file.stat().st_nlink == num_links


@pytest.mark.parametrize("link", LINKERS)
@pytest.mark.parametrize("name", ["objects.msgpack", "model-00000.safetensors"])
def test_a_short_file_is_not_linked_and_its_damage_is_recorded(
    root: Path, name: str, link: Callable[[Path], None]
) -> None:
    (file,) = (root / "s3").glob(f"a*/{name}")
    os.truncate(file, 20)
    with pytest.raises(CorruptError, match=r"is truncated: 20 of .* good checkpoint is") as caught:
        link(root)
    assert caught.value.path == str(file)
    assert damaged(root) == [3]


def look_at_objects(root: Path) -> None:
    with dc.open(root / "s3") as checkpoint:
        _ = checkpoint.objects


@pytest.mark.parametrize(
    ("name", "find"),
    [
        ("objects.msgpack", load),
        ("objects.msgpack", look_at_objects),
        ("model-00000.safetensors", load),
        ("model-00000.safetensors", look_at_part),
    ],
)
def test_a_folder_in_place_of_a_file_is_recorded(
    root: Path, name: str, find: Callable[[Path], None]
) -> None:
    (file,) = (root / "s3").glob(f"a*/{name}")
    file.unlink()
    file.mkdir()
    with pytest.raises(CorruptError, match="a regular file there"):
        find(root)
    assert damaged(root) == [3]


def test_a_load_does_not_call_damaged_attached_files_whole(tmp_path: Path) -> None:
    attached = tmp_path / "tokens.json"
    attached.write_text("{}")
    root = tmp_path / "run"
    dc.save(fresh(), root / "s3", step=3, attach={"tokens.json": attached})
    dc.Run(root).metrics(3, {"loss": 1.0})
    dc.load(fresh(), root / "s3")
    assert verified(root) == [3]
    file = spoil(root, 3, "attached.tokens.json")
    dc.load(fresh(), root / "s3")
    assert (damaged(root), verified(root)) == ([3], [])
    file.unlink()
    dc.verify(root / "s3", level="quick")
    dc.load(fresh(), root / "s3")
    assert (damaged(root), verified(root)) == ([3], [])


@pytest.mark.parametrize("level", ["quick", "full"])
@pytest.mark.parametrize("name", ["objects.msgpack", "model-00000.safetensors"])
def test_a_check_records_a_missing_file(root: Path, name: str, level: Any) -> None:
    (file,) = (root / "s3").glob(f"a*/{name}")
    file.rename(root / "elsewhere")
    assert not dc.verify(root / "s3", level=level).ok
    assert damaged(root) == [3]
    (root / "elsewhere").rename(file)
    dc.load(fresh(), root / "s3")
    assert damaged(root) == ([3] if level == "full" else [])
    dc.verify(root / "s3")
    assert (damaged(root), verified(root)) == ([], [3])


def test_what_is_only_read_is_reported_and_not_recorded(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spoil(root, 3)
    assert not dc.verify(root / "s3", record=False).ok
    assert damaged(root) == []

    def refuse(*_: Any) -> None:
        raise StorageError("read-only")

    monkeypatch.setattr(recorded_checks, "put_annotation", refuse)
    assert not dc.verify(root / "s3").ok
    with pytest.raises(CorruptError, match=r"model\.w rows 0:64"):
        dc.load(fresh(), root / "s3")
    assert damaged(root) == []
    assert "could not be recorded: read-only" in caplog.text


def test_an_error_of_the_storage_is_no_damage(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise StorageError("it does not answer")

    monkeypatch.setattr(open_files, "open_readable", fail)
    assert not dc.verify(root / "s3").ok
    monkeypatch.undo()
    assert damaged(root) == []


def test_what_a_second_read_does_not_find_is_no_damage(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spoil(root, 3)
    monkeypatch.setattr(verifying, "drop_cached", lambda _: spoil(root, 3))  # that mends it
    assert dc.verify(root / "s3").ok
    assert "A second read was right" in caplog.text
    assert (damaged(root), verified(root)) == ([], [3])
    spoil(root, 3)
    with pytest.raises(CorruptError):
        dc.load(fresh(), root / "s3")
    assert damaged(root) == []


def test_a_file_without_data_is_a_problem_and_no_damage(root: Path) -> None:
    (claim,) = (root / "s3").glob("a*/claim.json")
    claim.unlink()
    (claim.parent / "model-00007.safetensors").touch()
    assert len(dc.verify(root / "s3").problems) == 2
    assert (damaged(root), verified(root)) == ([], [])
    dc.load(fresh(), root / "s3")
    assert verified(root) == [3]


@pytest.mark.parametrize("find", FINDERS)
def test_an_error_of_damage_names_the_newest_good_checkpoint(
    root: Path, find: Callable[[Path], None]
) -> None:
    spoil(root, 4)
    dc.verify(root / "s4")  # it is known to be damaged
    dc.save(fresh(), root / "final")  # without a step
    (root / "logs").mkdir()
    file = spoil(root, 3)
    with pytest.raises(CorruptError) as caught:
        find(root)
    assert str(caught.value).endswith(f"The newest good checkpoint is {root / 's2'}")
    assert str(caught.value).count("newest good") == 1
    (index,) = file.parent.glob("index.json")
    index.write_text("torn")
    with pytest.raises(CorruptError, match=f"not JSON.*The newest good checkpoint is {root}/s2"):
        find(root)


def test_of_an_error_without_a_good_checkpoint_none_is_named(root: Path) -> None:
    dc.save(fresh(), root / "alone" / "s3", step=3)
    spoil(root / "alone", 3)
    with pytest.raises(CorruptError) as caught:
        load(root / "alone")
    assert str(caught.value).endswith("; load an older checkpoint")


def test_no_orphan_is_called_good(root: Path) -> None:
    storage, key = LocalStorage(), dc.checkpoints(root)[0].where
    begin_incarnation(storage, str(root), restored=key, why="", by="", after=0)
    spoil(root, 3)
    with pytest.raises(CorruptError, match=f"The newest good checkpoint is {root}/s1"):
        load(root)


def test_one_rank_records_what_another_has_met() -> None:
    storage = MemoryStorage({ROOT: None})
    for step in (1, 2):
        states = [shard(rank, float(step)) for rank in range(3)]
        save_on_threads(storage, states, f"{ROOT}/s{step}", step=step)
    (name,) = [entry.name for entry in storage.list(f"{ROOT}/s2")]
    path = f"{ROOT}/s2/{name}/model-00002.safetensors"
    data = storage._find_node(path).data
    assert data is not None
    data[-1] ^= 1
    with pytest.raises(CorruptError) as caught:
        load_on_threads(storage, [shard(rank) for rank in range(3)], f"{ROOT}/s2")
    assert caught.value.path == path
    (record,) = read_annotations(storage, ROOT)
    assert (record.step, record.name.kind, record.values["found_by"]) == (2, CHECK, "load")
    assert path in str(record.values["damage"])


def test_a_rank_of_a_load_does_not_record_for_itself(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone: list[CorruptError] = []
    monkeypatch.setattr(open_checkpoint, "record_damage", lambda _, error: alone.append(error))
    spoil(root, 3, "objects.msgpack")
    with pytest.raises(CorruptError):
        dc.load(fresh(), root / "s3")
    assert (alone, damaged(root)) == ([], [3])


def shard(rank: int, value: float = 0.0) -> Mapping[str, Any]:
    rows = torch.full((4, 3), value)
    return {"model": {"w": dc.LocalShard(rows, (12, 3), (4 * rank, 0))}}


def test_a_file_that_several_steps_link_counts_for_each(root: Path) -> None:
    (file,) = (root / "s4").glob("a*/model-00000.safetensors")
    for name in ("linked", "apart"):
        dc.copy(root / "s4", root / name, link=name == "linked")
    (linked,) = (root / "linked").glob("a*/model-00000.safetensors")
    assert os.path.samefile(file, linked)
    spoil(root, 4)
    dc.verify(root / "linked")
    found = {info.name for info in dc.checkpoints(root) if info.damage is not None}
    assert found == {"linked", "s4"}


def test_an_error_at_one_step_does_not_hide_the_damage_of_the_next(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        dc.copy(root / "s4", root / name, link=True)
    spoil(root, 4)
    list_folder = LocalStorage.list
    calls = {"a": StorageError("no answer"), "b": FileNotFoundError("removed")}

    def fail(self: LocalStorage, path: str, **options: Any) -> Any:
        name, _, attempt = path.removeprefix(f"{root}/").partition("/")
        if name in calls and (attempt or name == "a"):
            raise calls[name]
        return list_folder(self, path, **options)

    monkeypatch.setattr(LocalStorage, "list", fail)
    dc.verify(root / "s4")
    monkeypatch.undo()
    found = {info.name for info in dc.checkpoints(root) if info.damage is not None}
    assert found == {"c", "s4"}


def test_a_folder_with_one_checkpoint_and_without_records_gets_none(tmp_path: Path) -> None:
    for step, name in ((1, "alone/s1"), (1, "run/s1"), (2, "run/s2")):
        dc.save(fresh(), tmp_path / name, step=step)
    for folder in ("alone", "run"):
        spoil(tmp_path / folder, 1)
        assert not dc.verify(tmp_path / folder / "s1").ok
    assert not (tmp_path / "alone/.annotations").exists()
    assert damaged(tmp_path / "run") == [1]  # or a prune would count it


# --- what obeys it --------------------------------------------------------------------------------


def test_prune_keeps_what_is_not_known_to_be_damaged(root: Path) -> None:
    for step in (1, 2, 3, 4):
        dc.verify(root / f"s{step}")
    for step in (3, 4):
        spoil(root, step)
        assert not dc.verify(root / f"s{step}").ok
    run = dc.Run(root)
    reasons = {info.step: reasons for info, reasons in run.prune(KEEP_ONE, dry_run=True)}
    assert reasons[3] == reasons[4] == (DAMAGED,)
    assert "the newest that was checked in full" in reasons[2]
    run.prune(KEEP_ONE)
    assert steps(root) == [2, 3, 4]
    run.prune(KEEP_ONE, damaged=True)
    assert steps(root) == [2]
    dc.load(fresh(), f"{root}@latest")


def test_the_last_checkpoint_stays_though_it_is_damaged(root: Path) -> None:
    run = dc.Run(root)
    for step in (1, 2, 3, 4):
        spoil(root, step)
        dc.verify(root / f"s{step}")
    run.pin(2)
    run.prune(KEEP_ONE, damaged=True)
    assert steps(root) == [2, 4]


def test_a_dry_run_records_nothing(root: Path) -> None:
    (file,) = (root / "s4").glob("a*/model-00000.safetensors")
    file.unlink()
    dc.Run(root).prune(KEEP_ONE, dry_run=True)
    assert num_checks(root) == 0


def test_selectors_step_over_it_and_say_so(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = dc.Run(root)
    run.metrics(3, {"loss": 2.0})
    run.metrics(4, {"loss": 1.0})
    run.tag(4, "best")
    spoil(root, 4)
    dc.verify(root / "s4")
    assert run.find("@latest").step == run.find("@min:loss").step == 3
    assert "s4 is damaged and is ignored: model.w rows 0:64" in caplog.text
    assert run.find("@4").step == run.find(4).step == run.find("@tag:best").step == 4
    with pytest.raises(NotFoundError, match="gone or damaged"):
        run.best(min="loss")
    assert run.wait_for_newer(2, timeout_s=0) == 3
    assert run.wait_for_newer(3, timeout_s=0) is None
    for step in (1, 2, 3):
        spoil(root, step)
        dc.verify(root / f"s{step}")
    with pytest.raises(NotFoundError, match="s1 is damaged, s2 is damaged"):
        run.find("@latest")


def test_a_watcher_is_told(root: Path) -> None:
    storage = LocalStorage()
    before = observe_run(storage, str(root))
    spoil(root, 4)
    dc.verify(root / "s4")
    after = observe_run(storage, str(root))
    (text,) = changes(before, after)
    assert text.startswith("step 4 is damaged: model.w rows 0:64")
    assert (before.newest and before.newest.step, after.newest and after.newest.step) == (4, 3)


def test_damage_of_one_of_two_plain_copies_never_removes_the_other(root: Path) -> None:
    shutil.copytree(root / "s4", root / "best")
    spoil(root, 4)
    assert not dc.verify(root / "s4").ok
    assert damaged(root) == []
    dc.Run(root).prune(KEEP_ONE, damaged=True)
    assert dc.verify(root / "best").ok
    assert verified(root) == []
    shutil.rmtree(root / "best")
    assert not dc.verify(root / "s4").ok
    assert damaged(root) == [4]


def test_plain_copies_of_the_newest_checked_step_stay_with_it(root: Path) -> None:
    dc.verify(root / "s3")
    shutil.copytree(root / "s3", root / "a-copy")
    spoil(root, 4)  # nobody has read it yet
    dc.Run(root).prune(KEEP_ONE)
    assert [info.name for info in dc.checkpoints(root)] == ["a-copy", "s3", "s4"]


def test_plain_copies_of_a_damaged_step_do_not_cost_the_undamaged_one(root: Path) -> None:
    spoil(root, 4)
    dc.verify(root / "s4")
    shutil.copytree(root / "s4", root / "z-copy")
    reasons = {info.name: why for info, why in dc.Run(root).prune(KEEP_ONE)}
    assert reasons["s3"] == (NEWEST_UNDAMAGED,)
    assert [info.name for info in dc.checkpoints(root)] == ["s3", "s4", "z-copy"]


def test_a_plain_copy_of_a_damaged_step_is_not_called_good(root: Path) -> None:
    shutil.copytree(root / "s4", root / "z-copy")
    spoil(root, 3)
    with pytest.raises(CorruptError, match=f"The newest good checkpoint is {root}/z-copy"):
        load(root)
    spoil(root, 4)
    dc.verify(root / "s4")  # the result does not say which of the two is damaged
    with pytest.raises(CorruptError, match=f"The newest good checkpoint is {root}/s2"):
        load(root)
