"""`dist-ckpt reshard`."""

from __future__ import annotations

import pytest

import dist_ckpt as dc


def test_reshard_writes_what_was_stored_for_other_ranks(run, checkpoint, tmp_path):
    code, out, _ = run("reshard", checkpoint, tmp_path / "wide", "--world-size", 3)
    assert code == 0
    assert "2 tensors" in out
    with dc.open(checkpoint) as old, dc.open(tmp_path / "wide") as new:
        assert new.world_size == 3
        assert all(old[fqn][...] == new[fqn][...] for fqn in old.tensors)
        assert new.objects == old.objects
        assert new.per_rank == old.per_rank
        assert new.metadata == old.metadata


def test_reshard_overwrites_if_it_is_told_to(run, checkpoint, tmp_path):
    run("reshard", checkpoint, tmp_path / "wide", "--world-size", 3)
    arguments = ("reshard", checkpoint, tmp_path / "wide", "--world-size", 2)
    code, _, err = run(*arguments)
    assert code == 5
    assert "overwrite=True" in err
    assert run(*arguments, "--overwrite")[0] == 0
    assert dc.verify(tmp_path / "wide").ok
    assert dc.open(tmp_path / "wide").world_size == 2
    assert [entry.name[:3] for entry in (tmp_path / "wide").iterdir()] == ["a2-"]


def test_reshard_takes_a_sharding_from_a_file(run, checkpoint, tmp_path):
    file = tmp_path / "tp.toml"
    file.write_text('[mesh]\ntp = 2\n[rules."w"]\ntp = 1\n')
    code, _, _ = run("reshard", checkpoint, tmp_path / "tp", "--sharding", file)
    assert code == 0
    names = sorted(f.name for f in (tmp_path / "tp").glob("a1-*/*.safetensors"))
    assert names == ["model-00000.safetensors", "model-00001.safetensors"]


@pytest.mark.parametrize(
    "arguments", [(), ("--world-size", "2", "--sharding", "x.toml"), ("--world-size", "0")]
)
def test_reshard_with_an_unclear_target_is_a_usage_error(run, checkpoint, tmp_path, arguments):
    assert run("reshard", checkpoint, tmp_path / "new", *arguments)[0] == 2
    assert not (tmp_path / "new").exists()


def test_reshard_by_a_file_that_is_not_there_names_it(run, checkpoint, tmp_path):
    code, _, err = run("reshard", checkpoint, tmp_path / "new", "--sharding", "missing.toml")
    assert code == 2
    assert "missing.toml cannot be read" in err
    assert not (tmp_path / "new").exists()


def test_reshard_onto_something_is_refused_and_changes_nothing(run, checkpoint, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("keep")
    code, _, err = run("reshard", checkpoint, tmp_path / "mine", "--world-size", 2)
    assert code == 5
    assert "mine" in err
    assert [f.name for f in (tmp_path / "mine").iterdir()] == ["file"]
