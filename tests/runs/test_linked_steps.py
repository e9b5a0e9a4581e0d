"""A step of a run that was moved elsewhere, with a link in its place: read, and never changed."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_ckpt as dc
from commands import open_attempt, run
from dist_ckpt.core.commit.records.incarnations import begin_incarnation
from dist_ckpt.core.commit.records.record_store import read_annotations
from dist_ckpt.core.commit.removal import (
    list_all_garbage,
    remove,
    remove_all_garbage,
    remove_garbage,
)
from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.core.storage import open_storage
from dist_ckpt.core.storage.local.local_storage import LocalStorage
from dist_ckpt.errors import CheckpointError, CorruptError, ExistsError
from dist_ckpt.runs import prune
from dist_ckpt.tools.report.write_report import report_facts
from run_training import damage, fresh, steps_in, train

__all__ = ["run"]

STEPS = (10, 20, 30)
NEWEST = "step-00000030"


def tree(*folders: Path) -> dict[str, tuple[int, bytes | str]]:
    """Return all names in folders, with the number of their names and their content."""
    found = sorted(path for folder in folders for path in (folder, *folder.rglob("*")))
    return {
        str(path): (path.lstat().st_nlink, _content(path))
        for path in found
        if ".annotations" not in path.parts
    }


def _content(path: Path) -> bytes | str:
    if path.is_symlink():
        return str(path.readlink())
    return "folder" if path.is_dir() else path.read_bytes()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a run of three steps; the newest was moved elsewhere, with a link in its place."""
    root = tmp_path / "run"
    for step in STEPS:
        dc.save(state(step), root / f"step-{step:08}", step=step)
        dc.Run(root).metrics(step, {"loss": 1.0 - step / 100})
    (tmp_path / "bulk" / "a").mkdir(parents=True)
    move(root)
    return root


def state(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((4, 3), float(step))}, "optim": {"m": torch.ones(3)}}


def move(root: Path, name: str = NEWEST) -> Path:
    """Move a step away, and leave a link; return its new path."""
    target = root.parent / "bulk" / "a" / name
    (root / name).rename(target)
    (root / name).symlink_to(target)
    return target


def relink(root: Path, target: Path | str) -> None:
    (root / NEWEST).unlink()
    (root / NEWEST).symlink_to(target)


# --- what is read --------------------------------------------------------------------------------


def link_of_a_link(root: Path) -> None:
    (root.parent / "other").symlink_to((root / NEWEST).readlink())
    relink(root, "../other")


GOOD: dict[str, Callable[[Path], object]] = {
    "absolute": lambda _: None,
    "relative": lambda root: relink(root, f"../bulk/a/{NEWEST}"),
    "to a link": link_of_a_link,
    "another name": lambda root: relink(
        root, (root / NEWEST).readlink().rename(root.parent / "bulk" / "b")
    ),
}


@pytest.mark.parametrize("how", GOOD)
def test_a_linked_step_is_read_and_listed_and_counted(root: Path, run: Any, how: str) -> None:
    GOOD[how](root)
    before = tree(root.parent / "bulk")
    infos = dc.checkpoints(root)
    assert [(info.name, info.step) for info in infos][-1] == (NEWEST, 30)
    real = str((root / NEWEST).resolve())
    assert [info.link for info in infos] == [None, None, real]
    assert dc.Run(root).find("@latest").step == dc.Run(root).find("@min:loss").step == 30
    for path in (f"{root}@latest", f"{root}@30", root / NEWEST):
        loaded: dict[str, Any] = {}
        dc.load(loaded, path)
        assert torch.equal(loaded["model"]["w"], torch.full((4, 3), 30.0))
        with dc.open(path) as checkpoint:
            assert checkpoint.step == 30
        assert dc.verify(path).ok
    code, out, _ = run("ls", root)
    assert code == 0
    assert f"link to {real}" in out
    for arguments in (("show", f"{root}@latest"), ("verify", root), ("verify", root / NEWEST)):
        assert run(*arguments)[0] == 0
    facts = report_facts(root)
    assert [row["result"] for row in facts["checkpoints"]] == ["ok"] * 3
    assert tree(root.parent / "bulk") == before


def a_file(root: Path) -> None:
    (root.parent / "file").write_text("x")
    relink(root, "../file")


def another_user(root: Path) -> None:
    os.chown((root / NEWEST).resolve(), 54321, -1)


def another_run(root: Path) -> None:
    begin_incarnation(
        LocalStorage(), str(root.parent / "bulk" / "a"), restored=None, why="a test", by="a test"
    )


def open_only(root: Path) -> None:
    open_attempt(root.parent / "open")
    relink(root, root.parent / "open")


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "dangling": (lambda root: relink(root, "../nowhere"), "link to ../nowhere, which does not"),
    "a loop": (
        lambda root: relink(root, NEWEST),
        "which cannot be read: .*lead back to themselves",
    ),
    "a file": (a_file, "link to ../file, which is not a folder"),
    "another user": (another_user, "a folder of user 54321"),
    "another run": (another_run, "of the run in .*/bulk/a, which may remove it: copy it by"),
    "this run": (
        lambda root: relink(root, "step-00000010"),
        "a checkpoint of the run in .*/run, which may remove it",
    ),
    "an open attempt": (open_only, "which has no committed checkpoint"),
    "nothing": (lambda root: relink(root, "../bulk"), "which has no committed checkpoint"),
}


@pytest.mark.parametrize("how", BAD)
def test_a_link_that_is_not_read_is_named_and_stays(
    root: Path, run: Any, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    break_link, problem = BAD[how]
    if how == "another user" and os.geteuid():
        pytest.skip("only root gives a folder to another user")
    break_link(root)
    before = tree(root.parent / "bulk")
    last = dc.checkpoints(root)[0]  # without a step
    assert (last.name, last.state) == (NEWEST, "damaged")
    assert last.problem is not None
    assert _matches(problem, last.problem)
    assert dc.Run(root).find("@latest").step == 20
    assert _matches(problem, caplog.text)
    code, out, _ = run("ls", root)
    assert _matches(problem, out)
    code, out, _ = run("verify", root)
    assert code == 1
    assert _matches(problem, out)
    with pytest.raises(CorruptError, match=f"{NEWEST} is damaged: .* is a link to"):
        dc.Run(root).pin(30)
    assert run("pin", root / NEWEST)[0] == 3
    (row,) = (row for row in report_facts(root)["checkpoints"] if row["name"] == NEWEST)
    assert row["result"] == "damaged"
    assert f"{NEWEST} is a link to" in row["problem"]
    decisions = dc.Run(root).prune(dc.keep.last(1))
    assert {info.name for info, reasons in decisions if not reasons} == {"step-00000010"}
    assert (root / NEWEST).is_symlink()
    assert tree(root.parent / "bulk") == before


def _matches(pattern: str, text: str) -> bool:
    return re.search(pattern, " ".join(text.split())) is not None


# --- what is refused -----------------------------------------------------------------------------

WRITES: dict[str, Callable[[Path], object]] = {
    "save": lambda path: dc.save(state(1), path, step=30, overwrite=True),
    "delete": lambda path: dc.delete(path, force=True),
    "strip": lambda path: dc.strip(path, "optim"),
    "copy": lambda path: dc.copy(path.parent.parent / "ck", path, overwrite=True),
    "reshard": lambda path: dc.reshard(
        path.parent.parent / "ck", path, world_size=1, overwrite=True
    ),
    "reshard it": lambda path: dc.reshard(path, path, world_size=1, overwrite=True),
    "remove": lambda path: remove(LocalStorage(), str(path), Attempt(1, "0" * 16)),
    "gc of one": lambda path: remove_garbage(LocalStorage(), str(path), grace_s=-1),
    "gc": lambda path: remove_all_garbage(LocalStorage(), str(path), grace_s=-1),
    "gc, dry": lambda path: list_all_garbage(LocalStorage(), str(path), grace_s=-1, now=9e9),
}


@pytest.mark.parametrize("through", ["itself", "a link to it", "with /", "a dangling link"])
def test_nothing_is_changed_through_a_linked_step(root: Path, through: str) -> None:
    dc.save(state(1), root.parent / "ck")
    path = root / NEWEST
    if through in ("a link to it", "with /"):
        path = root.parent / "best" / "one"
        path.parent.mkdir()
        path.symlink_to(f"{root / NEWEST}{'/./' if through == 'with /' else ''}")
    if through == "a dangling link":
        relink(root, "../nowhere")
    before = tree(root.parent)
    remedy = rf"{NEWEST} is a link to .*To free this name, remove the link: rm {root / NEWEST}\."
    for name, write in WRITES.items():
        error = CheckpointError if name == "reshard it" and "dangling" in through else ExistsError
        with pytest.raises(error, match=remedy if error is ExistsError else "no such folder"):
            write(path)
        assert tree(root.parent) == before, name


@pytest.mark.parametrize(
    "arguments",
    [("rm", "--yes", "--force"), ("rm", "--dry-run"), ("gc",), ("strip", "optim", "--yes")],
)
def test_commands_refuse_a_linked_step_by_name(root: Path, run: Any, arguments: Any) -> None:
    before = tree(root.parent)
    code, _, err = run(arguments[0], root / NEWEST, *arguments[1:])
    assert code not in (0, 1, 2)
    assert f"{NEWEST} is a link to" in err
    assert tree(root.parent) == before


def test_a_gc_of_the_run_leaves_what_a_linked_step_has(root: Path) -> None:
    open_attempt((root / NEWEST).resolve())
    before = tree(root.parent)
    assert remove_all_garbage(LocalStorage(), str(root), grace_s=-1) == ()
    assert tree(root.parent) == before


@pytest.mark.parametrize("policy", [dc.keep.last(2), dc.keep.best(1, max="loss")])
def test_a_prune_counts_a_linked_step_and_leaves_it(root: Path, policy: Any) -> None:
    move(root, "step-00000020")
    before = tree(root.parent / "bulk")
    decisions = {info.step: reasons for info, reasons in dc.Run(root).prune(policy)}
    assert all("remove the link by hand" in decisions[step][0] for step in (20, 30))
    assert bool(decisions[10]) == ("best" in str(policy))
    assert tree(root.parent / "bulk") == before


# --- annotations ---------------------------------------------------------------------------------


def test_annotations_of_a_linked_step_are_in_its_run(root: Path, run: Any) -> None:
    before = tree(root.parent)
    assert run("pin", root / NEWEST, "--why", "the paper")[0] == 0
    dc.Run(root).tag(30, "release")
    dc.Run(root).metrics(30, {"accuracy": 0.5})
    with dc.Run(root).lease(30) as checkpoint:
        assert checkpoint.step == 30
        assert len(dc.Run(root).find(30).leases) == 1
    info = dc.Run(root).find("@tag:release")
    assert (info.pin, info.metrics) == ("the paper", {"loss": 0.7, "accuracy": 0.5})
    assert not (root.parent / "bulk" / "a" / ".annotations").exists()
    assert tree(root.parent) == before
    dc.Run(root).unpin(30)
    dc.Run(root).untag("release")
    assert dc.Run(root).find(30).protected_by == ()


@pytest.mark.parametrize("how", ["readable", "dangling"])
def test_a_prune_keeps_the_annotations_of_a_linked_step(
    root: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dc.Run(root).pin(30, "the paper")
    target = (root / NEWEST).readlink()
    if how == "dangling":  # not mounted today
        relink(root, "../nowhere")
    monkeypatch.setattr(prune, "GONE_S", -1)
    dc.Run(root).prune(dc.keep.last(3))
    relink(root, target)
    assert dc.Run(root).find(30).pin == "the paper"
    assert {stored.step for stored in read_annotations(*open_storage(root))} == {10, 20, 30}


def test_a_delete_of_a_copy_keeps_the_annotations_of_a_linked_step(root: Path) -> None:
    shutil.copytree(root / NEWEST, root / "copy")
    dc.delete(root / "copy")
    assert dc.Run(root).find(30).metrics == {"loss": 0.7}


def test_an_error_of_damage_names_a_linked_step_as_the_newest_good(root: Path) -> None:
    """It named an older step than needed."""
    damage(root, 20)
    with pytest.raises(CorruptError, match=f"The newest good checkpoint is {root / NEWEST}$"):
        dc.load(state(0), root / "step-00000020")


# --- copies --------------------------------------------------------------------------------------

COPIES: dict[str, Callable[[Path], Any]] = {
    "backup": lambda root: dc.backup(root / NEWEST),
    "copy": lambda root: dc.copy(root / NEWEST, root.parent / "copy", link=True).path,
    "reshard": lambda root: dc.reshard(root / NEWEST, root.parent / "other", world_size=2).path,
}


@pytest.mark.parametrize("how", COPIES)
def test_a_linked_step_is_copied_and_no_file_of_it_is_linked(root: Path, how: str) -> None:
    before = tree(root.parent / "bulk")
    path = COPIES[how](root)
    if how == "backup":
        assert path == f"{root}/backup/{NEWEST}"
    assert dc.verify(path).ok
    with dc.open(path) as checkpoint:
        assert checkpoint.step == 30
    assert tree(root.parent / "bulk") == before


def test_a_copy_of_a_linked_step_to_its_own_folder_is_refused(root: Path) -> None:
    before = tree(root.parent)
    with pytest.raises(ValueError, match="is the source, or inside the source"):
        dc.copy(root / NEWEST, (root / NEWEST).resolve(), overwrite=True)
    with pytest.raises(ValueError, match="is the source, or inside the source"):
        dc.copy(root / NEWEST, (root / NEWEST).resolve() / "copy")
    assert tree(root.parent) == before


def test_a_save_links_no_unchanged_file_of_a_step_that_was_moved(tmp_path: Path) -> None:
    (tmp_path / "bulk" / "a").mkdir(parents=True)
    for step in range(4):
        dc.save({"base": torch.ones(99)}, tmp_path / "run" / f"step-{step}", link_unchanged="base")
        if step < 2:
            move(tmp_path / "run", f"step-{step}")
    names = [path.stat().st_nlink for path in tmp_path.rglob("*.safetensors")]
    assert names == [1] * 4


# --- a run ---------------------------------------------------------------------------------------


def trained(root: Path, until: int, at: str | None = None) -> list[int]:
    """Run to a step; return the steps that were done."""
    state, done = fresh(), []
    with dc.Checkpointer(root, save=dc.every(steps=10), background=False) as ck:
        first = ck.restore(state, at)
        assert steps_in(state) == {-1 if first is None else first}
        for step in ck.steps(state, until=until):
            train(state, step)
            done.append(step)
    return done


@pytest.fixture
def moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the root of a run, whose newest step was moved."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (tmp_path / "bulk" / "a").mkdir(parents=True)
    trained(tmp_path / "run", 30)
    move(tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("at", [None, "@30"])
def test_a_run_resumes_from_a_linked_step(
    moved: Path, at: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    open_attempt((moved / NEWEST).resolve().parent / "x")
    late = next((moved.parent / "bulk" / "a" / "x").iterdir())
    late.rename((moved / NEWEST).resolve() / "a1999-0123456789abcdef")  # of the first incarnation
    before = tree(moved.parent / "bulk")
    assert trained(moved, 40, at=at) == [*range(31, 41)]
    assert "passes over" not in capsys.readouterr().err
    assert [info.step for info in dc.checkpoints(moved)] == [10, 20, 30, 40]
    assert tree(moved.parent / "bulk") == before


def test_a_rewind_warns_of_a_linked_step_and_a_save_of_it_is_refused(
    moved: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(moved.parent / "bulk")
    assert trained(moved, 31, at="@20") == [*range(21, 32)]
    assert f"step 30 is not saved: {moved / NEWEST} is a link to" in caplog.text
    remedy = (
        f"This run cannot save that step again, unless you remove the link: rm {moved / NEWEST}"
    )
    assert remedy in capsys.readouterr().err
    assert tree(moved.parent / "bulk") == before
    (moved / NEWEST).unlink()
    assert trained(moved, 30, at="@20") == [*range(21, 31)]
    assert [info.link for info in dc.checkpoints(moved)][:3] == [None] * 3
    assert tree(moved.parent / "bulk") == before


@pytest.mark.parametrize("newer", ["dangling", "damaged", "rotten", "open", "orphaned"])
def test_a_resume_that_passes_over_anything_newer_says_so(
    moved: Path, capsys: pytest.CaptureFixture[str], newer: str
) -> None:
    if newer == "dangling":
        relink(moved, "../nowhere")
    elif newer == "damaged":
        (index,) = (moved / NEWEST).glob("a*/index.json")
        index.write_text("{}")
    elif newer == "rotten":
        damage(moved, 30)
    elif newer == "open":
        (moved / NEWEST).unlink()
        open_attempt(moved / NEWEST)
    else:
        trained(moved, 20, at="@10")
    capsys.readouterr()
    assert trained(moved, 20) == []
    state = newer if newer in ("open", "orphaned") else "damaged"
    line = f"dist_ckpt: {moved} passes over newer steps: {NEWEST} ({state})"
    assert line in capsys.readouterr().err.splitlines()


def test_no_fresh_run_begins_where_the_only_step_is_away(moved: Path) -> None:
    relink(moved, "../nowhere")
    for name in ("step-00000010", "step-00000020"):
        dc.delete(moved / name)
    with pytest.raises(CheckpointError, match="which does not exist: mount or restore that folder"):
        trained(moved, 40)
