"""torchtitan's components with our manager: killed, stopped and resumed, they train the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dist_ckpt as dc

pytest.importorskip("torchtitan")

pytestmark = [pytest.mark.multi_process, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "helpers" / "frameworks" / "trained_by_torchtitan.py"


def run(root: Path, *options: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *torchrun, str(PROGRAM), str(root), *options]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    environ.pop("WORLD_SIZE", None)
    return subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=240, check=False
    )


def train(root: Path, *options: str, ranks: int = 1) -> list[dict[str, Any]]:
    """Run the program to its end; return what each rank prints, by rank."""
    done = run(root, *options, ranks=ranks)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
    return sorted(told, key=lambda one: one["rank"])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_was_killed_has_the_losses_of_one_that_was_not(
    tmp_path: Path, ranks: int
) -> None:
    whole = train(tmp_path / "whole", ranks=ranks)
    assert run(tmp_path / "cut", "--die", "8", ranks=ranks).returncode != 0
    rest = train(tmp_path / "cut", ranks=ranks)
    for one, other in zip(whole, rest, strict=True):
        assert other["losses"][0][0] == 7  # the last save was of step 6
        assert other["losses"] == one["losses"][6:]
        for name in ("weights", "tokens", "rates"):
            assert other[name] == one[name]
    steps = [found.step for found in dc.Run(tmp_path / "cut" / "checkpoint").checkpoints]
    assert steps == [9, 12]  # of keep_latest_k


def test_a_run_that_is_told_to_stop_says_75_and_goes_on_at_its_step(tmp_path: Path) -> None:
    (whole,) = train(tmp_path / "whole")
    done = run(tmp_path / "cut", "--stop", "5")
    assert done.returncode != 0, done.stderr[-3000:]
    assert "stopped by SIGTERM on rank 0 after step" in done.stderr, done.stderr[-3000:]
    (rest,) = train(tmp_path / "cut")
    at = rest["losses"][0][0]
    assert 5 < at < 12
    assert rest["losses"] == whole["losses"][at - 1 :]


def test_a_training_that_fails_does_not_save_what_failed(tmp_path: Path) -> None:
    done = run(tmp_path / "run", "--fail", "5")
    assert "the training has failed" in done.stderr
    with dc.open(f"{tmp_path}/run/checkpoint@latest") as found:
        assert found.step == 3


def test_another_number_of_ranks_would_lose_rows_and_is_refused(tmp_path: Path) -> None:
    train(tmp_path / "run", ranks=2)
    done = run(tmp_path / "run", ranks=1)
    assert done.returncode != 0
    assert "dataloader" in done.stderr
    assert "on_reshard" in done.stderr


def test_no_pickle_of_a_loader_is_in_a_checkpoint(tmp_path: Path) -> None:
    train(tmp_path / "run")
    with dc.open(f"{tmp_path}/run/checkpoint@latest") as found:
        (place,) = found.per_rank["dataloader"].values()
    assert isinstance(place, dict)
    assert "dp_rank_0" not in place


def test_other_weights_begin_a_fresh_run(tmp_path: Path) -> None:
    train(tmp_path / "base")
    base = f"{tmp_path}/base/checkpoint/step-00000012"
    (from_base,) = train(tmp_path / "new", "--options", json.dumps({"initial_load_path": base}))
    (fresh,) = train(tmp_path / "fresh")
    assert from_base["losses"][0][0] == 1
    assert from_base["losses"] != fresh["losses"]


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"last_save_model_only": True}, "dist-ckpt export"),
        ({"last_save_model_only": True, "last_save_in_hf": True}, "dist-ckpt export"),
        ({"initial_load_in_hf": True}, "dist-ckpt import"),
        ({"create_seed_checkpoint": True}, "initial_load_path"),
        ({"export_dtype": "bfloat16"}, "dist-ckpt export --dtype"),
        ({"exclude_from_loading": ["dataloader"]}, "initial_load_path"),
    ],
)
def test_what_the_manager_does_not_do_is_refused_by_name(
    options: dict[str, Any], remedy: str
) -> None:
    from dist_ckpt.integrations.torchtitan import RunCheckpointer

    with pytest.raises(ValueError, match=remedy):
        RunCheckpointer.Config(enable=True, **options)


def test_checkpoints_of_its_own_manager_are_not_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint" / "step-10"
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(b"")
    done = run(tmp_path)
    assert "was saved by torchtitan's own manager" in done.stderr
