"""`estimate` says what a job will then really write, and how much lies there at once."""

from __future__ import annotations

from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_ckpt as dc
from dist_ckpt.runs import retention_policy as keep
from dist_ckpt.tools.inspect.estimate import estimate, measure_rate


@pytest.fixture
def path(tmp_path: Path) -> Path:
    state = {"model": {"w": torch.ones(64, 5), "b": torch.ones(3)}, "optim": {"m": torch.ones(99)}}
    dc.save(state, tmp_path / "ck", step=1)
    return tmp_path / "ck"


def test_sizes_are_those_of_what_is_written_then(path: Path, tmp_path: Path) -> None:
    found = estimate(path, world_size=4)
    dc.reshard(path, tmp_path / "wide", world_size=4)
    with dc.open(tmp_path / "wide") as wide:
        headers = sum(one.header_nbytes for one in wide.index.files)
        assert found.nbytes == wide.nbytes - headers
        assert found.num_files == wide.index.num_files
        ranks = [0] * 4
        for one in wide.index.files:
            ranks[one.rank] += one.nbytes - one.header_nbytes
    assert found.nbytes_rank == max(ranks)
    assert (found.num_saves, found.num_kept, found.num_at_once) == (1, 1, 1)


@pytest.mark.parametrize(
    ("policy", "kept", "at_once"),
    [
        (None, 20, 20),
        (keep.last(3), 3, 4),
        (keep.last(2) | keep.best(2, min="loss", unmeasured=0), 4, 5),
        (keep.last(1) | keep.best(1, max="accuracy", unmeasured=0), 2, 3),
        (keep.every(steps=500), 4, 5),
    ],
)
def test_what_a_policy_keeps_is_gone_through(
    path: Path, policy: keep.RetentionPolicy | None, kept: int, at_once: int
) -> None:
    found = estimate(path, steps=2000, save_every=100, keep=policy)
    assert (found.num_saves, found.num_kept, found.num_at_once) == (20, kept, at_once)
    assert found.nbytes_peak == at_once * found.nbytes


def test_rules_of_time_need_the_seconds_of_a_step(path: Path) -> None:
    policy = keep.within(days=1)
    with pytest.raises(ValueError, match="--step-s"):
        estimate(path, steps=1000, save_every=100, keep=policy)
    found = estimate(path, steps=1000, save_every=100, keep=policy, step_s=432)
    assert found.num_kept == 3  # a save is half a day


def test_space_and_time(path: Path, tmp_path: Path) -> None:
    found = estimate(path, rate=found_rate(), folder=tmp_path / "not" / "yet")
    assert found.save_s == found.nbytes / found_rate()
    assert found.fits
    assert found.nbytes_free > 0


def found_rate() -> float:
    return 1000.0


@pytest.mark.parametrize(
    "job",
    [
        *({"steps": 10}, {"steps": 10, "save_every": 20}, {"steps": 10**9, "save_every": 1}),
        *({"world_size": 0}, {"rate": 0}, {"rate": -1.0}, {"rate": nan}, {"rate": inf}),
        *({"step_s": 0.0}, {"step_s": nan}, {"rate": "1"}, {"step_s": True}),
        {"keep": "last(3)"},
    ],
)
def test_a_job_that_makes_no_sense_is_refused(path: Path, job: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match="give"):
        estimate(path, **job)


def test_a_write_test_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dist_ckpt.tools.inspect.estimate.TEST_NBYTES", 16 << 20)
    assert measure_rate(tmp_path) > 0
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(dc.StorageError, match="not a folder"):
        measure_rate(tmp_path / "gone")
