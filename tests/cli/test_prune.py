"""`dist-ckpt prune`."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch

import dist_ckpt as dc
from commands import steps
from dist_ckpt.cli import output


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
    assert "kept  s4  last(1); the newest; the newest that passes a quick check" in out
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
        ("latest(3)", 2, "'latest' is not a rule; there are best, every, last, within"),
        ("last(3) &", 2, "is not a policy"),
        ("", 2, "is not a policy"),
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


def test_what_was_not_shown_is_not_pruned(run, root, monkeypatch):
    """A job may save while somebody thinks about the question."""

    def confirm(*_: object, about, **__: object) -> None:
        assert "removed  s4" not in "".join(about)
        dc.save({"model": {"w": torch.ones(2)}}, root / "s5", step=5)

    monkeypatch.setattr(output, "confirm", confirm)
    code, out, _ = run("prune", root, "--keep", "last(1)", "--explain")
    assert code == 0
    assert "kept  s4  its removal was not requested" in out
    assert steps(root) == [4, 5]


def test_the_same_checkpoint_elsewhere_was_not_shown(run, root, monkeypatch):
    """Somebody saves what is to go, by another name, before the answer."""

    def confirm(*_: object, **__: object) -> None:
        shutil.copytree(root / "s1", root / "precious")
        os.rename(root / "s2", root / "mine")

    monkeypatch.setattr(output, "confirm", confirm)
    code, out, _ = run("prune", root, "--keep", "last(1)", "--explain")
    assert code == 0
    assert "kept  precious  its removal was not requested" in out
    assert "kept  mine  its removal was not requested" in out
    assert [one.name for one in dc.checkpoints(root)] == ["precious", "mine", "s4"]


@pytest.mark.parametrize("among", [["s1"], "s1", [None], [("s1", ())]])
def test_prune_takes_checkpoints_of_a_dry_run_alone(root, among):
    with pytest.raises(TypeError, match="give checkpoints that a dry run returned"):
        dc.Run(root).prune(dc.keep.last(1), among=among)
    assert steps(root) == [1, 2, 3, 4]


def test_damaged_ones_stay_unless_they_are_named(run, root):
    for file in root.glob("s[34]/a*/objects.msgpack"):
        file.write_bytes(file.read_bytes()[:-1])
    assert run("verify", root)[0] == output.PROBLEM_FOUND
    code, out, _ = run("prune", root, "--keep", "last(1)", "--yes", "--explain")
    assert (code, steps(root)) == (0, [2, 3, 4])
    assert "kept  s4  it is damaged, but its good parts may repair another one: remove" in out
    assert run("prune", root, "--keep", "last(1)", "--damaged", "--yes")[0] == 0
    assert steps(root) == [2]
