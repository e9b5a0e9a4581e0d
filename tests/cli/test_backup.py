"""`dist-ckpt backup`."""

from __future__ import annotations

from commands import steps


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
