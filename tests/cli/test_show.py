"""`dist-ckpt show`."""

from __future__ import annotations

import json

import torch
from safetensors.torch import save_file

import dist_ckpt as dc
from commands import damage, open_attempt


def test_show_tells_what_a_checkpoint_is(run, checkpoint):
    code, out, _ = run("show", checkpoint)
    assert code == 0
    facts = ("step        7", "for 1 rank\n", "0 tied names", "loader: 1 key\n", "loss = 2.5")
    assert [fact for fact in facts if fact not in out] == []


def test_show_tells_no_time_at_which_files_of_others_were_committed(run, tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    code, told, _ = run("show", tmp_path)
    assert (code, "1970" in told, "committed" in told) == (0, False, False)


def test_show_as_json_counts_bytes_by_component_and_dtype(run, checkpoint):
    _, out, _ = run("show", checkpoint, "--json")
    document = json.loads(out)
    assert document["schema"] == "dist-ckpt.show/2"
    assert document["nbytes_by_component"] == {"model": 64}
    assert document["nbytes_by_dtype"] == {"float32": 64}
    assert document["per_rank"] == {"loader": 1}


def test_show_of_an_uncommitted_checkpoint_exits_with_not_found(run, tmp_path):
    open_attempt(tmp_path / "ck")
    code, _, err = run("show", tmp_path / "ck")
    assert code == 3
    assert "ck" in err


def test_show_names_the_values_for_who_chooses_by_globs(run, tmp_path):
    dc.save({"w": torch.ones(1), "epoch": 3, "scheduler": {"n": [1]}}, tmp_path / "ck")
    assert "values      2: epoch, scheduler\n" in run("show", tmp_path / "ck")[1]


def test_show_names_the_damage_that_a_check_has_found(run, checkpoint):
    other = checkpoint.parent / "step-00000008"
    dc.save({"x": 1}, other, step=8)
    damage(checkpoint)
    assert "damaged " not in run("show", checkpoint)[1]
    run("verify", checkpoint)
    assert "\ndamaged     model.w rows" in run("show", checkpoint)[1]
    assert "damaged " not in run("show", other)[1]
    documents = json.loads(run("show", checkpoint, other, "--json")[1])["checkpoints"]
    assert [str(one["damage"])[:13] for one in documents] == ["model.w rows ", "None"]


def test_several_are_shown_one_after_the_other(run, root):
    code, out, _ = run("show", f"{root}@1", root / "s4")
    assert code == 0
    blocks = out.split("\n\n")
    assert [one.splitlines()[0].rpartition("/")[2] for one in blocks] == ["s1", "s4"]
    assert run("show", root / "s4", f"{root}@99")[0] == 3


def test_one_of_anything_is_singular(run, tmp_path):
    dc.save({"w": torch.ones(2)}, tmp_path / "ck")
    for command, told in (
        ("show", "for 1 rank\n"),
        ("layout", "1 shard\n1 rank, "),
        ("tensors", "1 tensor, "),
        ("stats", "1 tensor, 0 with"),
    ):
        assert told in run(command, tmp_path / "ck")[1]
    assert ": 1 tensor, " in run("cp", tmp_path / "ck", tmp_path / "copy")[1]
