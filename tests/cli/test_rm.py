"""`dist-ckpt rm`."""

from __future__ import annotations

import dist_ckpt as dc
from commands import damage


def test_rm_without_yes_is_refused(run, checkpoint):
    code, _, err = run("rm", checkpoint)
    assert code == 6
    assert "--yes" in err
    assert dc.open(checkpoint).step == 7


def test_rm_deletes_the_checkpoint_even_a_damaged_one(run, checkpoint):
    damage(checkpoint)
    assert run("rm", checkpoint, "--yes")[0] == 0
    assert not checkpoint.exists()
    assert run("rm", checkpoint, "--yes")[0] == 3


def test_rm_of_a_folder_that_is_no_checkpoint_touches_nothing(run, tmp_path):
    (tmp_path / "file").write_text("keep")
    assert run("rm", tmp_path, "--yes")[0] == 3
    assert (tmp_path / "file").read_text() == "keep"


def test_a_protected_one_is_refused_in_the_same_words_by_a_dry_run(run, checkpoint):
    assert run("pin", checkpoint)[0] == 0
    dry, real = run("rm", checkpoint, "--dry-run"), run("rm", checkpoint, "--yes")
    assert dry == real
    assert dry[0] == 5
    assert "is protected: pinned" in dry[2]
    assert "--force" in dry[2]
    assert run("rm", checkpoint, "--dry-run", "--force")[0] == 0
    assert dc.open(checkpoint).step == 7
