"""The commands about a run as a whole, and how every command names a checkpoint of one."""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

import dist_ckpt as dc
from dist_ckpt.cli import output
from dist_ckpt.core.storage.local.local_storage import LocalStorage
from dist_ckpt.errors import ConflictError, StorageError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a run of four steps, the first the best."""
    root = tmp_path / "run"
    for step in (1, 2, 3, 4):
        dc.save({"x": step}, root / f"s{step}", step=step)
        dc.Run(root).metrics(step, {"val/loss": float(step)})
    return root


def steps(root: Path) -> list[int | None]:
    return [one.step for one in dc.checkpoints(root)]


def test_prune_removes_what_the_rules_do_not_keep(run, root):
    code, out, _ = run("prune", root, "--keep", "last(1) | best(1, min='val/loss')", "--yes")
    assert code == 0
    assert "removed  s2" in out
    assert out.splitlines()[-1].startswith("2 removed (")
    assert steps(root) == [1, 4]
    code, out, _ = run("prune", root, "--keep", "last(2)")
    assert (code, out.splitlines()[-1]) == (0, "0 removed (0 B), 2 kept")


def test_a_dry_run_explains_what_keeps_each(run, root):
    run("pin", f"{root}@2", "--why", "the paper")
    code, out, _ = run("prune", root, "--keep", "last(1)", "--dry-run", "--explain")
    assert code == 0
    assert "kept  s2  pinned: the paper" in out
    assert "kept  s4  last(1); the newest; the newest that is whole by a quick check" in out
    assert "would be removed  s1" in out
    assert steps(root) == [1, 2, 3, 4]
    _, out, _ = run("prune", root, "--keep", "last(1)", "--dry-run", "--json")
    document = json.loads(out)
    assert document["schema"] == "dist-ckpt.prune/2"
    assert [one["kept_by"] == [] for one in document["checkpoints"]] == [True, False, True, False]


def test_prune_without_yes_is_refused(run, root):
    code, _, err = run("prune", root, "--keep", "last(1)")
    assert (code, steps(root)) == (6, [1, 2, 3, 4])
    assert "3 checkpoints are not removed: add --yes" in err


@pytest.mark.parametrize(
    ("policy", "code", "told"),
    [
        ("last(0)", 2, "give a number from 1 on"),
        ("latest(3)", 2, "'latest' is no rule; there are best, every, last, within"),
        ("last(3) &", 2, "is no policy"),
        ("", 2, "is no policy"),
        ("best(1, min='loss', unmeasured=0)", 3, "no checkpoint has the metric 'loss'"),
    ],
)
def test_a_policy_that_makes_no_sense_removes_nothing(run, root, policy, code, told):
    found, _, err = run("prune", root, "--keep", policy, "--yes")
    assert (found, steps(root)) == (code, [1, 2, 3, 4])
    assert told in err


def test_prune_of_one_checkpoint_is_refused(run, root):
    code, _, err = run("prune", root / "s4", "--keep", "last(1)", "--yes")
    assert code == 2
    assert "is one checkpoint: give the folder that it is in" in err


def test_of_many_metrics_a_table_has_the_first_few(run, root):
    dc.Run(root).metrics(1, {f"eval/m{number}": number for number in range(12)})
    out = run("ls", root)[1]
    assert "val/loss=1, eval/m0=0, eval/m1=1, eval/m2=2, 9 more" in out
    assert run("ls", root, "--json")[1].count("eval/m") == 12


def test_tags_and_pins_are_put_shown_and_taken_away(run, root):
    assert run("tag", f"{root}@min:val/loss", "release")[0] == 0
    assert run("pin", root / "s2")[0] == 0
    out = run("ls", root)[1]
    assert out.splitlines()[0].split()[-2:] == ["METRICS", "NOTES"]
    assert "val/loss=1  tag 'release'" in out
    assert "val/loss=2  pinned" in out
    assert run("show", f"{root}@tag:release")[1].startswith(f"checkpoint  {root / 's1'}")
    code, _, err = run("rm", f"{root}@tag:release", "--yes")
    assert code == 5
    assert "is protected: tag 'release'" in err
    assert run("tag", root / "s2", "release", "--remove")[0] == 3
    assert run("tag", root / "s1", "release", "--remove")[0] == 0
    assert run("pin", root / "s2", "--remove")[0] == 0
    assert "NOTES" not in run("ls", root)[1]
    assert run("rm", f"{root}@1", "--yes")[0] == 0
    run("pin", root / "s2")
    assert run("rm", root / "s2", "--yes", "--force")[0] == 0
    assert steps(root) == [3, 4]


def test_what_is_pinned_is_not_saved_over_through_a_link(root, tmp_path):
    dc.Run(root).pin(1, "the paper")
    (tmp_path / "link").symlink_to(root / "s1", target_is_directory=True)
    with pytest.raises(dc.ExistsError, match="the paper"):
        dc.save({"x": 9}, tmp_path / "link", step=1, overwrite=True)


def test_a_name_cannot_look_like_a_line_of_ours(run, root):
    dc.Run(root).metrics(1, {"x\nstep-00000009  9  committed": 1.0})
    assert len(run("ls", root)[1].splitlines()) == 5
    assert len(run("watch", root, "--once")[1].splitlines()) == 7


def test_facts_are_no_attempts_of_dead_saves(run, root):
    dc.Run(root).pin(1, "the paper")
    for path in (root / ".annotations", root / ".annotations" / "1"):
        assert run("gc", path, "--grace", "0")[:2] == (0, "0 removed\n")
        assert run("rm", path, "--yes", "--force")[0] == 3
    assert dc.checkpoints(root)[0].is_pinned


def test_a_link_to_a_checkpoint_stands_for_it(run, root, tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).symlink_to(root / "s1", target_is_directory=True)
    assert run("pin", tmp_path / "first")[0] == 0
    assert dc.checkpoints(root)[0].is_pinned
    assert not (tmp_path / ".annotations").exists()
    code, _, err = run("rm", tmp_path / "second", "--yes")
    assert code == 5
    assert "is protected: pinned" in err
    with pytest.raises(ConflictError, match="is protected: pinned"):
        dc.delete(tmp_path / "second")
    assert steps(root) == [1, 2, 3, 4]


def test_nan_is_text_in_json(run, root):
    dc.Run(root).metrics(4, {"val/loss": float("nan")})
    document = json.loads(run("ls", root, "--json")[1], parse_constant=pytest.fail)
    assert document["checkpoints"][-1]["metrics"] == {"val/loss": "nan"}


@pytest.mark.parametrize(
    "words",
    [
        *("show {}", "tree {}", "verify {}", "ls {}", "pin {}", "rm {} --yes", "report {} --json"),
        *("gc {} --dry-run --json", "stats {} --json", "layout {} --json", "estimate --from {}"),
    ],
)
def test_every_command_takes_a_selector(run, root, words):
    code, out, _ = run(*words.format(f"{root}@latest").split())
    assert code == 0
    assert "s4" in out
    code, _, err = run(*words.format(f"{root}@newest").split())
    assert code == 2
    assert "'newest' is no selector: there are @latest" in err
    code, _, err = run(*words.format(f"{root}@99").split())
    assert code == 3
    assert "no checkpoint of step 99" in err


def test_several_are_shown_one_after_the_other(run, root):
    code, out, _ = run("show", f"{root}@1", root / "s4")
    assert code == 0
    blocks = out.split("\n\n")
    assert [one.splitlines()[0].rpartition("/")[2] for one in blocks] == ["s1", "s4"]
    assert run("show", root / "s4", f"{root}@99")[0] == 3


def test_a_dry_run_of_a_pin_or_a_tag_refuses_what_the_real_one_does(run, root):
    run("pin", f"{root}@1", "--why", "paper", "--dry-run")
    assert run("tag", f"{root}@1", "best", "--dry-run")[1] == (
        f"would be: tag 'best' on {root / 's1'}\n"
    )
    assert not dc.checkpoints(root)[0].protected_by
    for words in (("tag", root / "s1", "best", "--remove"), ("pin", root / "none")):
        assert run(*words, "--dry-run") == run(*words)
        assert run(*words)[0] == 3
    assert run("pin", f"{root}@1", "--remove", "--why", "paper")[0] == 2


@pytest.mark.parametrize(
    "words", [("rm", "{}/s1"), ("strip", "{}/s1", "optim"), ("prune", "{}", "--keep", "last(1)")]
)
def test_a_question_is_no_part_of_what_is_printed(run, root, words, monkeypatch):
    for step in (1, 2):
        state = {"model": {"w": torch.ones(1)}, "optim": {"m": torch.ones(1)}}
        dc.save(state, root / f"s{step}", step=step, overwrite=True)
    given = [word.format(root) for word in words]
    for answer, code in (("n", 6), ("y", 0)):
        terminal = io.StringIO(f"{answer}\n")
        monkeypatch.setattr(terminal, "isatty", lambda: True)
        monkeypatch.setattr("sys.stdin", terminal)
        found, out, err = run(*given, "--json")
        assert (found, "[y/N]" in err) == (code, True)
        assert bool(out.strip()) == (answer == "y")  # click may print a space
    assert json.loads(out)["schema"] == f"dist-ckpt.{words[0]}/2"


def test_what_is_no_checkpoint_is_not_pinned(run, root):
    code, _, err = run("pin", root)
    assert code == 3
    assert "is not a checkpoint: give one, such as run@latest" in err
    assert run("tag", root / "s1", "")[0] == 2


def test_what_was_not_shown_is_not_pruned(run, root, monkeypatch):
    """A job may save while somebody thinks about the question."""

    def confirm(*_: object, about, **__: object) -> None:
        assert "removed  s4" not in "".join(about)
        dc.save({"model": {"w": torch.ones(2)}}, root / "s5", step=5)

    monkeypatch.setattr(output, "confirm", confirm)
    code, out, _ = run("prune", root, "--keep", "last(1)", "--explain")
    assert code == 0
    assert "kept  s4  its removal was not asked for" in out
    assert steps(root) == [4, 5]


def test_the_same_checkpoint_elsewhere_was_not_shown(run, root, monkeypatch):
    """Somebody saves what is to go, by another name, before the answer."""

    def confirm(*_: object, **__: object) -> None:
        shutil.copytree(root / "s1", root / "precious")
        os.rename(root / "s2", root / "mine")

    monkeypatch.setattr(output, "confirm", confirm)
    code, out, _ = run("prune", root, "--keep", "last(1)", "--explain")
    assert code == 0
    assert "kept  precious  its removal was not asked for" in out
    assert "kept  mine  its removal was not asked for" in out
    assert [one.name for one in dc.checkpoints(root)] == ["precious", "mine", "s4"]


@pytest.mark.parametrize("among", [["s1"], "s1", [None], [("s1", ())]])
def test_prune_takes_checkpoints_of_a_dry_run_alone(root, among):
    with pytest.raises(TypeError, match="give checkpoints that a dry run returned"):
        dc.Run(root).prune(dc.keep.last(1), among=among)
    assert steps(root) == [1, 2, 3, 4]


def test_runs_are_named_though_one_of_them_cannot_be_looked_into(run, root, monkeypatch):
    (root.parent / "other" / "broken").mkdir(parents=True)
    listed = LocalStorage.list

    def fail(self, folder, **options):
        if folder.endswith("/broken"):
            raise StorageError("the disk")
        return listed(self, folder, **options)

    monkeypatch.setattr(LocalStorage, "list", fail)
    assert f"but in {root}: list one" in run("ls", root.parent)[1]


def test_runs_in_a_folder_of_them_are_named_whatever_lies_beside(run, root, tmp_path):
    dc.save({"x": 1}, tmp_path / "single" / "s1")
    os.mkdir(os.fsencode(tmp_path) + b"/\xff")
    for number in range(60):
        (tmp_path / f"a{number:02}").mkdir()
    told = f"{tmp_path}/run, {tmp_path}/single"
    assert (
        run("ls", tmp_path)[1] == f"no checkpoints in {tmp_path}, but in {told}: list one of them\n"
    )
    document = json.loads(run("ls", tmp_path, "--json")[1])
    assert (document["checkpoints"], document["runs"]) == ([], told.split(", "))
    dc.save({"x": 1}, tmp_path / "beside", step=1)
    out = run("ls", tmp_path)[1]
    assert "beside" in out
    assert f"there are more in {told}: list one of them" in out


def test_a_backup_is_made_listed_checked_and_not_pruned(run, root):
    code, out, _ = run("backup", f"{root}@min:val/loss")
    assert (code, out) == (0, f"{root}/backup/s1\n")
    assert run("prune", root, "--keep", "last(1)", "--yes")[0] == 0
    assert steps(root) == [4]
    _, out, _ = run("ls", root / "backup")
    assert "s1" in out
    assert "val/loss=1" in out
    assert run("verify", f"{root}/backup@latest")[0] == 0
    assert run("backup", f"{root}@1")[0] == 3
    assert run("rm", root / "backup" / "s1", "--yes")[0] == 0
    assert steps(root / "backup") == []


def test_strip_asks_drops_and_says_what_is_left(run, tmp_path):
    root = tmp_path / "stripped"
    dc.save({"model": {"w": torch.ones(3)}, "optim": {"m": torch.ones(3)}}, root / "s1", step=1)
    code, _, err = run("strip", f"{root}@1", "optim")
    assert (code, "is not stripped: add --yes" in err) == (6, True)
    assert run("strip", f"{root}@1", "none", "--yes")[0] == 2
    run("pin", f"{root}@1")
    code, _, err = run("strip", f"{root}@1", "optim", "--yes")
    assert (code, "--force" in err) == (5, True)
    code, out, _ = run("strip", f"{root}@1", "optim", "--yes", "--force")
    assert (code, "1 tensors" in out, "1 files linked" in out) == (0, True, True)
    assert run("verify", f"{root}@1")[0] == 0
    assert [info.component for info in dc.open(f"{root}@1").tensors.values()] == ["model"]
