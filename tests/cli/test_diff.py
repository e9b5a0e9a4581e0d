"""`dist-ckpt diff`: what it prints, and its exit code."""

from __future__ import annotations

import json

import pytest
import torch

import dist_ckpt as dc
from dist_ckpt.cli.output import FINE, PROBLEM_FOUND

NOTHING = "nothing differs; step, metadata, attached files and per-rank values are not compared\n"


@pytest.fixture
def pair(tmp_path):
    """Return two checkpoints of 30 tensors; all but the first differ."""
    for name, value in (("a", 1.0), ("b", 2.0)):
        weights = {f"w{number:02}": torch.full((4, 2), value) for number in range(1, 30)}
        dc.save({"w00": torch.ones(2), **weights, "epoch": value}, tmp_path / name)
    return tmp_path / "a", tmp_path / "b"


def test_other_weights_are_found_by_their_digests(run, pair):
    code, out, _ = run("diff", *pair)
    names = ", ".join(f"w{number:02}" for number in range(1, 21))
    assert code == PROBLEM_FOUND
    assert out.splitlines() == [
        "epoch: 1.0 -> 2.0",
        f"the values of 29 of 30 tensors differ: {names}, and 9 more; --values shows by how much",
    ]
    document = json.loads(run("diff", *pair, "--json")[1])
    assert (len(document["digests"]), document["same"], document["values"]) == (29, False, None)
    assert run("diff", pair[0], pair[0]) == (FINE, NOTHING, "")


def test_what_was_not_compared_is_never_called_equal(run, pair, tmp_path):
    dc.reshard(pair[0], tmp_path / "wide", world_size=2)
    code, out, _ = run("diff", pair[0], tmp_path / "wide")
    why = "not compared (cut differently, or without digests)"
    assert (code, out) == (PROBLEM_FOUND, f"30 of 30 tensors {why}: --values compares them\n")
    document = json.loads(run("diff", pair[0], tmp_path / "wide", "--json")[1])
    assert len(document["not_compared"]) == document["num_tensors"] == 30
    assert run("diff", pair[0], tmp_path / "wide", "--values") == (FINE, NOTHING, "")
    assert "Exit code 0 if all else is equal" in run("diff", "--help")[1]
