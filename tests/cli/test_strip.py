"""`dist-ckpt strip`."""

from __future__ import annotations

import torch

import dist_ckpt as dc


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
    assert (code, "1 tensor, " in out, "1 file linked" in out) == (0, True, True)
    assert run("verify", f"{root}@1")[0] == 0
    assert [info.component for info in dc.open(f"{root}@1").tensors.values()] == ["model"]
