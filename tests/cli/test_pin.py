"""`dist-ckpt pin` and `dist-ckpt tag`."""

from __future__ import annotations

import json

import pytest

import dist_ckpt as dc
from commands import steps


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


def test_a_second_pin_without_a_reason_keeps_the_first_one(run, root):
    assert run("pin", root / "s2", "--why", "the paper")[0] == 0
    assert json.loads(run("pin", root / "s2", "--dry-run", "--json")[1])["why"] == "the paper"
    assert json.loads(run("pin", root / "s2", "--json")[1])["why"] == "the paper"
    dc.Run(root).pin(2)
    assert dc.checkpoints(root)[1].pin == "the paper"
    dc.Run(root).pin(2, "")
    assert dc.checkpoints(root)[1].pin == ""
    run("pin", root / "s2", "--why", "again")
    run("pin", root / "s2", "--remove")
    dc.Run(root).pin(2)
    assert dc.checkpoints(root)[1].pin == ""


def test_what_is_pinned_is_not_saved_over_through_a_link(root, tmp_path):
    dc.Run(root).pin(1, "the paper")
    (tmp_path / "link").symlink_to(root / "s1", target_is_directory=True)
    with pytest.raises(dc.ExistsError, match="the paper"):
        dc.save({"x": 9}, tmp_path / "link", step=1, overwrite=True)


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


def test_what_is_no_checkpoint_is_not_pinned(run, root):
    code, _, err = run("pin", root)
    assert code == 3
    assert "is not a checkpoint: give one, such as run@latest" in err
    assert run("tag", root / "s1", "")[0] == 2
