"""`dist-ckpt tree`."""

from __future__ import annotations

import json

import torch

import dist_ckpt as dc


def test_tree_shows_names_shapes_and_sizes(run, checkpoint):
    code, out, _ = run("tree", checkpoint)
    assert code == 0
    assert "float32 [3, 4]" in out
    _, out, _ = run("tree", checkpoint, "--depth", 1)
    assert "float32" not in out
    assert "model" in out


def test_tree_as_json(run, checkpoint):
    _, out, _ = run("tree", checkpoint, "--json")
    document = json.loads(out)
    assert document["schema"] == "dist-ckpt.tree/2"
    assert {"name": "model.b", "nbytes": 16, "tensor": "float32 [4]"} in document["nodes"]


def test_a_terminal_cannot_be_steered_by_a_name(run, tmp_path):
    dc.save({"evil\x1b[2J": torch.ones(1)}, tmp_path / "ck")
    _, out, _ = run("tree", tmp_path / "ck")
    assert "\x1b" not in out
    assert "evil\\x1b[2J" in out
