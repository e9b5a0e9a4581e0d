"""What is said after a fault is what is there, or "unknown": at every system call.

`tests/helpers/faults/outcome_faults.py` has the loop, and tries all faults if it is run by hand.
"""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

import dist_ckpt as dc
from faulty_calls import Fault, Lasting, system_calls
from long_mode import sample
from outcome_faults import CASES, Case, delete, gc, leftovers, older, prepared, some_faults, step_at

pytestmark = pytest.mark.waits

# What is called only where no call renames exclusively.
OF_LINKS = ("link", "lstat", "unlink", "rename ")


@pytest.fixture(autouse=True)
def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have one thread, so that the calls come in one order."""
    monkeypatch.setenv("DIST_CKPT_THREADS", "1")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("exclusive", [True, False], ids=["renameat2", "link"])
def test_what_is_said_after_a_fault_is_what_is_there(case: Case, exclusive: bool, tmp_path: Path):
    one = prepared(case, tmp_path, exclusive=exclusive)
    faults = sample([*some_faults(one.calls(), () if exclusive else OF_LINKS)], 9)
    assert [problem for fault in faults if (problem := one.wrong(fault)[1])] == []


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO, errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("lasting", ["once", "alike"])
@pytest.mark.parametrize("case", CASES[1:3], ids=lambda case: case.name)
def test_a_checkpoint_that_was_not_made_durable_is_said_to_be_in_place(
    case: Case, code: int, lasting: Lasting, tmp_path: Path
):
    """The folder's sync fails after the index was renamed."""
    made = prepared(case, tmp_path, exclusive=True).calls()
    sync = next(
        number
        for number, call in enumerate(made, 1)
        if call.startswith("fsync a") and "renameat2 index.json" in made[:number]
    )
    folder = tmp_path / "alone"  # a listing is as long as in the first run
    folder.mkdir()
    case.prepare(folder)
    told = (
        r"is in place at .*/ck, but it is unknown whether it survives a power cut: .*"
        r"repeat the call with overwrite=True"
    )
    with system_calls(Fault(sync, code, lasting)), pytest.raises(dc.StorageError, match=told):
        case.act(folder)
    assert step_at(folder / "ck") == 2
    # An older one stays: it may be needed again.
    assert len(list((folder / "ck").iterdir())) == (2 if case.prepare is older else 1)


def test_a_delete_that_was_stopped_is_finished_by_the_next(tmp_path: Path):
    older(tmp_path)
    stopped = pytest.raises(dc.StorageError, match=r"/ck is deleted, but .* then delete it again")
    made = deletion(tmp_path)
    with system_calls(Fault(made.index("fsync ck") + 1, errno.EIO)), stopped:
        delete(tmp_path)
    assert step_at(tmp_path / "ck") is None
    delete(tmp_path)
    assert not (tmp_path / "ck").exists()
    with pytest.raises(dc.NotFoundError):
        delete(tmp_path)


def deletion(folder: Path, beside: str = "") -> list[str]:
    """Return the calls of a delete of a checkpoint, beside which there may be a file."""
    (folder / "other").mkdir()
    (folder / "other" / "other").mkdir()  # a listing is as long
    older(folder / "other")
    if beside:
        (folder / "other" / "ck" / beside).touch()
    with system_calls(None) as calls:
        delete(folder / "other")
    return calls.made


def test_a_stale_rename_of_a_delete_does_not_pass_for_done(tmp_path: Path):
    older(tmp_path)
    rename = deletion(tmp_path).index("renameat2 .trash-a1-*") + 1
    told = pytest.raises(dc.StorageError, match=r"ESTALE.* is not deleted: .* delete it again")
    with system_calls(Fault(rename, errno.ESTALE)), told:
        delete(tmp_path)
    assert step_at(tmp_path / "ck") == 1


def test_a_delete_that_failed_when_all_was_gone_says_that_it_is_deleted(tmp_path: Path):
    older(tmp_path)
    (tmp_path / "ck" / "notes.txt").touch()  # somebody else's, so it stays
    made = deletion(tmp_path, "notes.txt")
    last = max(n for n, call in enumerate(made, 1) if call.startswith("rmdir .trash"))
    told = pytest.raises(dc.StorageError, match="is deleted, but a power cut may bring it back")
    with system_calls(Fault(last, errno.EIO, done=True)), told as error:
        delete(tmp_path)
    assert "delete it again" not in str(error.value)  # there is nothing to delete
    assert [path.name for path in (tmp_path / "ck").iterdir()] == ["notes.txt"]


def test_a_collector_is_not_stopped_by_an_answer_that_came_twice(tmp_path: Path):
    for folder in (tmp_path / "one", tmp_path / "other"):
        folder.mkdir()
        leftovers(folder)
    with system_calls(None) as calls:
        gc(tmp_path / "one")
    made = calls.made.index("mkdir .trash-a1-*") + 1
    with system_calls(Fault(made, errno.EEXIST, done=True)):
        gc(tmp_path / "other")
    assert step_at(tmp_path / "other" / "ck") == 2
    assert len(list((tmp_path / "other" / "ck").iterdir())) == 1
