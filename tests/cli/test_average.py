"""`dist-ckpt average`, run as a user runs it."""

from __future__ import annotations

import pytest

import dist_ckpt as dc

pytest.importorskip("torch")

import torch


@pytest.fixture
def root(tmp_path):
    for step in (1, 2, 6):
        made = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.constant_(made.weight, step)
        path = tmp_path / "run" / f"step-{step:08d}"
        dc.save({"model": made}, path, step=step)
        dc.Run(tmp_path / "run").metrics(step, {"loss": -step})
    return tmp_path / "run"


def mean_at(path):
    with dc.open(path) as mean:
        return mean["model.weight"][...].torch().tolist()


def test_average_writes_the_mean_and_tells_of_what(run, root, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")  # of a launcher that means others
    first, second = root / "step-00000001", root / "step-00000002"
    code, out, err = run("average", first, second, "--to", tmp_path / "a")
    assert (code, err) == (0, "")
    *told, last = out.splitlines()
    assert [line.split("/")[0] for line in told] == [
        "weight 1: step-00000001",
        "weight 1: step-00000002",
    ]
    assert last.startswith(f"{tmp_path / 'a'}: 1 tensor, ")
    assert mean_at(tmp_path / "a") == [[1.5, 1.5]]
    best = ("average", root, "--best", "2", "--min", "loss", "--to", tmp_path / "b")
    assert run(*best)[0] == 0
    assert mean_at(tmp_path / "b") == [[4.0, 4.0]]
    assert run(*best)[0] == 5  # it is there
    weighted = ("--weight", "1", "--weight", "3", "--include", "model.*")
    assert run("average", first, second, "--to", tmp_path / "b", "--overwrite", *weighted)[0] == 0
    assert mean_at(tmp_path / "b") == [[1.75, 1.75]]


def test_average_tells_what_is_wrong_by_its_exit_code(run, root, tmp_path):
    to = ("--to", tmp_path / "a")
    for code, *arguments in (
        (2, root),
        (2, root, root, "--last", "2"),
        (2, root, "--last", "1"),
        (2, root, "--last", "2", "--include", "x"),
        (3, root, "--best", "2", "--max", "f1"),
        (3, root / "gone", root / "step-00000001"),
    ):
        found, _, err = run("average", *arguments, *to)
        assert (found, "Traceback" in err) == (code, False), (arguments, err)
    assert not (tmp_path / "a").exists()


def test_average_of_one_checkpoint_says_what_to_give(run, root, tmp_path):
    for one in (root, f"{root}@latest"):
        found, _, err = run("average", one, "--to", tmp_path / "a")
        assert found == 2
        assert "give two or more, or --last or --best of a run's folder" in err
