"""`dist-ckpt gc`."""

from __future__ import annotations

import dist_ckpt as dc
from commands import open_attempt
from dist_ckpt.cli.commands.gc import exclusive_gc


def test_gc_finishes_a_delete_that_died_half_way(run, tmp_path):
    trash = tmp_path / "run" / "step-1" / ".trash-a1-0123456789abcdef"
    trash.mkdir(parents=True)
    (trash / "objects.msgpack").write_bytes(b"x")
    code, out, _ = run("gc", tmp_path / "run")
    assert code == 0
    assert "1 removed" in out
    assert not trash.parent.exists()


def test_gc_removes_what_a_dead_save_left_and_nothing_else(run, checkpoint):
    dead = checkpoint.parent / "step-00000008"
    open_attempt(dead)
    assert "0 removed" in run("gc", checkpoint.parent)[1]
    code, out, _ = run("gc", checkpoint.parent, "--grace", "0")
    assert code == 0
    assert "1 removed" in out
    assert not list(dead.glob("a1-*"))
    assert dc.open(checkpoint).step == 7


def test_one_collector_of_a_run_at_a_time(run, checkpoint, tmp_path, monkeypatch):
    (tmp_path / "temp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temp"))
    with exclusive_gc(str(checkpoint.parent)):
        code, _, err = run("gc", checkpoint.parent)
        assert code == 5
        assert "another dist-ckpt gc is running" in err
        assert run("gc", tmp_path / "temp")[0] == 0
    assert run("gc", checkpoint.parent)[0] == 0
    assert {path.name for path in checkpoint.parent.iterdir()} == {"step-00000007"}


def test_facts_are_no_attempts_of_dead_saves(run, root):
    dc.Run(root).pin(1, "the paper")
    for path in (root / ".annotations", root / ".annotations" / "1"):
        assert run("gc", path, "--grace", "0")[:2] == (0, "0 removed\n")
        assert run("rm", path, "--yes", "--force")[0] == 3
    assert dc.checkpoints(root)[0].is_pinned
