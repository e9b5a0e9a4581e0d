"""Files that are attached to a checkpoint: committed with it, checked, readable alone."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_ckpt as dc
from dist_ckpt.async_save.snapshots import job_folder
from dist_ckpt.core.checkpoint.checkpoint import open_at
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.commit.attempts import find_checkpoint
from dist_ckpt.core.saving import attachments
from dist_ckpt.core.saving.attachments import read_attached
from dist_ckpt.core.saving.save import save_together
from dist_ckpt.core.saving.save_options import SaveOptions
from dist_ckpt.errors import CorruptError, IncompatibleError, NotFoundError
from dist_ckpt.testing.crash_storage import CrashStorage, states
from dist_ckpt.testing.faulty_storage import FaultyStorage
from dist_ckpt.testing.memory_storage import MemoryStorage
from dist_ckpt.testing.thread_channel import TEST_CONFIG
from ranks import PATH, errors_of, shared_storage, try_ranks, try_save_on_threads

REPORT: dict[str, Any] = {"best": {"step": 7, "loss": 0.1}, "history": [1, 2.5], "note": "\u00f6"}
STATE = {"w": torch.ones(2)}


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without others, and a folder in the place of shared memory."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(job_folder, "SHARED_MEMORY", str(tmp_path))


def file_of(path: Path, name: str) -> Path:
    (attempt,) = (one for one in path.iterdir() if one.name.startswith("a"))
    return attempt / f"attached.{name}"


def test_what_is_attached_comes_back_alone_and_is_counted(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_bytes(b"one\n")
    given = {"report.json": REPORT, "raw": b"\0\1", "log.txt": tmp_path / "log.txt", "list": [1]}
    report = dc.save(STATE, tmp_path / "ck", attach=given)
    assert report.num_files == 2 + 4
    with dc.open(tmp_path / "ck") as ck:
        assert list(ck.attached) == ["list", "log.txt", "raw", "report.json"]
        assert ck.attached["raw"] == 2
        assert ck.nbytes == report.nbytes == dc.checkpoints(tmp_path / "ck")[0].nbytes
        assert ck.read_attached("raw") == b"\0\1"
        assert ck.read_attached("log.txt") == b"one\n"
        assert ck.report("report.json") == json.loads(ck.read_attached("report.json")) == REPORT
        with pytest.raises(KeyError, match=r"no attached 'gone'; there are list, log\.txt"):
            ck.read_attached("gone")
        with pytest.raises(ValueError, match="'raw' is not strict JSON"):
            ck.report("raw")
    assert file_of(tmp_path / "ck", "report.json").is_file()
    assert dc.verify(tmp_path / "ck").num_files == 6
    dc.load({"w": torch.zeros(2)}, tmp_path / "ck")


def test_a_report_of_another_model_is_refused_with_what_differs(tmp_path: Path) -> None:
    config = {"dim": 64, "where": Path("/data"), "heads": (1, 2)}
    good = {"kind": "ddl", "config": {"dim": 64, "where": "/data", "heads": [1, 2]}}
    bad = {"kind": "baseline", "config": {"dim": 65, "where": "/data", "heads": [1, 2]}}
    given = {"good": good, "bad": bad, "other": {"config": 5}}
    dc.save(STATE, tmp_path / "ck", config=config, kind="ddl", attach=given)
    dc.save(STATE, tmp_path / "bare", attach=given)
    with dc.open(tmp_path / "ck") as ck, dc.open(tmp_path / "bare") as bare:
        assert ck.report("good") == good
        with pytest.raises(IncompatibleError) as caught:
            ck.report("bad")
        assert "kind: 'ddl' in the checkpoint, 'baseline' in the report" in str(caught.value)
        assert "config.dim: 64 in the checkpoint, 65 in the report" in str(caught.value)
        with pytest.raises(IncompatibleError, match="config: nothing in the checkpoint, 5 in"):
            ck.report("other")
        assert bare.report("bad") == bad, "it has nothing to compare with"


def test_a_report_whose_count_of_parameters_is_not_ours_is_refused(tmp_path: Path) -> None:
    given = {"good": {"num_params": 8, "num_parameters": 8}, "bad": {"num_params": 9}}
    dc.save({"model": torch.nn.Linear(3, 2)}, tmp_path / "ck", attach=given)
    with dc.open(tmp_path / "ck") as ck:
        assert ck.report("good") == given["good"]
        with pytest.raises(IncompatibleError, match="num_params: 8 in the checkpoint, 9 in the"):
            ck.report("bad")


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ([1], TypeError, "attach is a list: give a dict of names"),
        ({"a/b": b""}, ValueError, "'a/b' is not a name: give up to 100 letters"),
        ({"..": b""}, ValueError, "'..' is not a name"),
        ({"": b""}, ValueError, "'' is not a name"),
        ({"a\n": b""}, ValueError, "is not a name"),
        ({"x" * 101: b""}, ValueError, "is not a name"),
        ({5: b""}, TypeError, "5 is not a name"),
        ({"A": b"", "a": b""}, ValueError, "'A' and 'a' are one name on some file systems"),
        ({"a": "text"}, TypeError, r"attach\['a'\] is a str: give a Path for a file, .encode\(\)"),
        ({"a": 5}, TypeError, r"attach\['a'\] is a int: give a Path"),
        ({"a": Path("/gone/away")}, ValueError, "/gone/away does not exist"),
        ({"a": Path("/dev/null")}, ValueError, "/dev/null is not a file"),
        ({"a": Path("/")}, ValueError, "/ is not a file"),
        ({"a": Path("a\0b")}, ValueError, r"attach\['a'\]: 'a\\x00b' is not a path"),
        ({"a": {"b": [float("nan")]}}, ValueError, r"attach\['a'\]\['b'\]\[0\] is nan, which JSON"),
        ({"a": {"b": 1 << 64}}, ValueError, "which JSON does not have"),
        ({"a": {1: 2}}, TypeError, "has the key 1: keys in JSON are valid text"),
        ({"a": {"b": {1, 2}}}, TypeError, r"\['b'\] is a set, which JSON does not have"),
        ({"a": ["\ud800"]}, ValueError, "which JSON does not have"),
        ({"a": b"x" * (64 << 20), "b": b"y"}, ValueError, r"attach\['b'\]: .* more than 67108864"),
        ({f"f{n}": b"" for n in range(101)}, ValueError, "101 files, the limit is 100"),
    ],
)
def test_what_cannot_be_attached_is_named_and_nothing_is_claimed(
    tmp_path: Path, given: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        dc.save(STATE, tmp_path / "ck", attach=given)
    assert not (tmp_path / "ck").exists()


def test_data_that_contains_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(ValueError, match="more than 64 levels deep"):
        read_attached({"a": endless})


def test_a_pipe_is_not_waited_for_and_a_large_file_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe is not a file"):
        read_attached({"a": tmp_path / "pipe"})
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 40)
    monkeypatch.setattr(attachments, "_read_up_to", lambda file, nbytes: pytest.fail("it is read"))
    with pytest.raises(ValueError, match=r"attach\['a'\]: .* more than 67108864 bytes"):
        read_attached({"a": tmp_path / "large"})


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def rewrite(path: Path) -> None:
    path.write_bytes(b"ABCD")


def rewrite_unseen(path: Path) -> None:
    path.write_bytes(b"ABCD")
    os.utime(path, (1, 1))


def replace_it(path: Path) -> None:
    path.with_suffix(".new").write_bytes(b"abcd")
    os.replace(path.with_suffix(".new"), path)


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("change", [grow, rewrite, rewrite_unseen, replace_it, remove])
def test_a_file_that_changes_while_it_is_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"abcd")
    os.utime(path, (1, 1))
    read = attachments._read_up_to

    def read_slowly(file: int, nbytes: int) -> bytes:
        data = read(file, nbytes)
        change(path)
        return data

    assert read_attached({"log": path}) == {"log": b"abcd"}
    monkeypatch.setattr(attachments, "_read_up_to", read_slowly)
    with pytest.raises(ValueError, match="was changed while it was read"):
        dc.save(STATE, tmp_path / "ck", attach={"log": path})
    assert not (tmp_path / "ck").exists()


def save_as_ranks(storage: Any, given: list[Any]) -> list[Any]:
    def save(rank: int, channel: Any, bulk: Any) -> object:
        session, options = Session(channel, bulk, TEST_CONFIG), SaveOptions(attach=given[rank])
        return save_together(session, STATE, PATH, options, storage)

    return try_ranks(save, world_size=len(given), harness="threads")


def test_it_is_rank_0_that_attaches_and_others_give_nothing_or_the_same() -> None:
    for given in ([{"a": b"1"}, None, {}], [{"a": b"1"}] * 3):
        storage = MemoryStorage()
        assert [one.error for one in save_as_ranks(storage, given)] == [None] * 3
        assert open_at(storage, PATH).read_attached("a") == b"1"
    for given in ([None, {"a": b"1"}], [{"a": b"1"}, {"a": b"2"}], [{"b": b""}, {"a": b"1"}]):
        storage = MemoryStorage()
        for error in errors_of(save_as_ranks(storage, given)):
            assert (
                "rank 1 attaches a different 'a' than rank 0: give attach= only on rank 0"
                in str(error)
            )
        assert storage.list("/") == []


def test_what_one_rank_cannot_attach_is_every_ranks_error() -> None:
    storage = MemoryStorage()
    for error in errors_of(save_as_ranks(storage, [None, {"a": 5}])):
        assert "attach['a'] is a int" in str(error)
    assert storage.list("/") == []


@pytest.mark.parametrize("how", ["changed", "cut", "gone", "extra"])
def test_damage_is_found_by_who_reads_and_who_verifies(tmp_path: Path, how: str) -> None:
    dc.save(STATE, tmp_path / "ck", attach={"a.json": REPORT})
    file = file_of(tmp_path / "ck", "a.json")
    data = file.read_bytes()
    if how == "extra":
        file.with_name("attached.more").write_bytes(b"")
    elif how == "gone":
        file.unlink()
    else:
        file.write_bytes(data[:-1] + (b"" if how == "cut" else b"x"))
    for level in ("quick", "full"):
        (problem,) = dc.verify(tmp_path / "ck", level=level).problems
        assert problem.file == ("attached.more" if how == "extra" else "attached.a.json")
    with dc.open(tmp_path / "ck") as ck:
        if how == "extra":
            assert ck.report("a.json") == REPORT
            return
        with pytest.raises(CorruptError, match=re.escape("attached.a.json")):
            ck.report("a.json")


def test_reshard_carries_it_and_overwrite_and_delete_leave_nothing(tmp_path: Path) -> None:
    dc.save(STATE, tmp_path / "ck", attach={"a.json": REPORT})
    report = dc.reshard(tmp_path / "ck", tmp_path / "for-2", world_size=2)
    with dc.open(tmp_path / "for-2") as ck:
        assert ck.report("a.json") == REPORT
        assert ck.nbytes == report.nbytes
    assert dc.verify(tmp_path / "for-2").ok
    dc.reshard(tmp_path / "for-2", tmp_path / "for-2", world_size=1, overwrite=True)
    with dc.open(tmp_path / "for-2") as ck:
        assert ck.report("a.json") == REPORT
    file_of(tmp_path / "ck", "a.json").write_bytes(b"damaged")
    with pytest.raises(CorruptError, match=r"attached\.a\.json"):
        dc.reshard(tmp_path / "ck", tmp_path / "for-3", world_size=3)
    with pytest.raises(NotFoundError):
        dc.open(tmp_path / "for-3")
    dc.save(STATE, tmp_path / "ck", overwrite=True)
    with dc.open(tmp_path / "ck") as ck:
        assert ck.attached == {}
    dc.delete(tmp_path / "ck")
    assert not (tmp_path / "ck").exists()


def test_a_backup_and_what_is_left_of_a_strip_have_it(tmp_path: Path) -> None:
    path = tmp_path / "run" / "step-1"
    dc.save({"m": STATE, "o": STATE}, path, step=1, attach={"a.json": REPORT})
    kept = dc.backup(path)
    dc.strip(path, "o")
    for where in (kept, path):
        assert dc.verify(where).ok
        with dc.open(where) as ck:
            assert ck.report("a.json") == REPORT


def test_a_background_save_attaches_what_was_there_at_the_call(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"then")
    report = dict(REPORT)
    with dc.AsyncSaver(tmp_path / "run") as saver:
        given = {"log": path, "report": report}
        handle = saver.save(STATE, tmp_path / "run" / "ck", step=1, attach=given)
        path.write_bytes(b"now, and more")
        report.clear()
        handle.result(60)
        with dc.open(tmp_path / "run" / "ck") as ck:
            assert ck.read_attached("log") == b"then"
            assert ck.report("report") == REPORT
            nbytes = ck.nbytes
        done = handle.result(60)
        assert done is not None
        assert done.nbytes == nbytes
        assert dc.verify(tmp_path / "run" / "ck").ok
        assert saver.restore({"w": torch.zeros(2)}) == 1


def whole(storage: Any) -> bool:
    """Say whether a checkpoint shows, and then what is attached is whole."""
    try:
        find_checkpoint(storage, PATH)
    except NotFoundError:
        return False
    checkpoint = open_at(storage, PATH)
    assert checkpoint.report("a.json") == REPORT
    return True


def test_after_a_crash_anywhere_a_checkpoint_that_shows_has_what_is_attached() -> None:
    disk = CrashStorage()
    disk.make_folder("/runs")
    disk.sync("/")
    (done,) = try_save_on_threads(lambda _: disk.client("0"), [STATE], attach={"a.json": REPORT})
    assert done.error is None
    shows = [whole(storage) for _, storage in states(disk.log, own_syncs=False, limit=60)]
    assert any(shows)
    assert not all(shows)


def test_a_fault_at_any_storage_call_makes_none_or_a_whole_one() -> None:
    number, calls = 0, 1
    while number < calls:
        number += 1
        storage = MemoryStorage({"/runs": None})
        faulty = FaultyStorage(storage, fail_at_call=number)
        everywhere = shared_storage(faulty)
        (done,) = try_save_on_threads(everywhere, [STATE], attach={"a.json": REPORT})
        calls = faulty.calls
        assert whole(storage) or done.error is not None


def test_every_save_of_a_run_asks_for_what_is_attached(tmp_path: Path) -> None:
    asked: list[int] = []

    def report_of(step: int) -> dict[str, object] | None:
        asked.append(step)
        return None if step == 2 else {"report.json": {"step": step}}

    root = tmp_path / "run"
    save = dc.every(steps=1) | dc.at_end
    with dc.Checkpointer(root, save=save, background=False, attach=report_of) as ck:
        for _ in ck.steps({"w": torch.ones(2)}, until=3):
            pass
    assert asked == [1, 2, 3]
    with dc.open(root / "step-00000002") as second, dc.open(root / "step-00000003") as third:
        assert second.attached == {}
        assert third.report("report.json") == {"step": 3}
    with pytest.raises(TypeError, match="attach=5: give a function of the step"):
        dc.Checkpointer(root, attach=5)  # type: ignore[arg-type]
