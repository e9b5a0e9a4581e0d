"""`transformers.Trainer` with the callback: killed, stopped and resumed, it trains the same."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dist_ckpt as dc

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = [pytest.mark.multi_process, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "helpers" / "frameworks" / "trained_by_transformers.py"
SIGKILL = -9


def train(root: Path, *options: str, ranks: int = 1, code: int = 0) -> list[dict[str, Any]]:
    """Run the program; return what each rank prints."""
    command = [sys.executable, str(PROGRAM), str(root), *options]
    if ranks > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [sys.executable, *torchrun, *command[1:]]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    environ.pop("WORLD_SIZE", None)
    done = run_it(command, environ)
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-6000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]


def run_it(command: list[str], environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=240, check=False
    )


def test_a_run_that_was_killed_goes_on_with_the_batches_that_are_left(tmp_path: Path) -> None:
    (whole,) = train(tmp_path / "whole")
    train(tmp_path / "cut", "--die", "17", code=SIGKILL)
    (rest,) = train(tmp_path / "cut")
    assert rest["seen"] == whole["seen"][15 * 4 :]  # the last save was of step 15
    assert (rest["step"], rest["epoch"]) == (whole["step"], whole["epoch"]) == (30, 3.0)
    assert rest["weights"] == whole["weights"]
    assert rest["losses"][-15:] == whole["losses"][-15:]
    assert not (tmp_path / "cut" / "step-00000024").exists()
    assert "eval_loss" in dc.Run(tmp_path / "cut").find(30).metrics


def test_what_is_logged_at_a_step_that_is_saved_comes_back(tmp_path: Path) -> None:
    train(tmp_path / "run", "--every", "5", "--die", "7", code=SIGKILL)
    (rest,) = train(tmp_path / "run", "--steps", "9")
    assert rest["logged"] == [*range(1, 10)]


def test_a_run_that_has_come_to_its_end_trains_no_further(tmp_path: Path) -> None:
    (whole,) = train(tmp_path / "run", "--steps", "12")  # in the midst of an epoch
    (again,) = train(tmp_path / "run", "--steps", "12")
    assert (again["seen"], again["step"]) == ([], 12)
    assert again["weights"] == whole["weights"]
    (more,) = train(tmp_path / "run", "--steps", "14")
    assert more["step"] == 14


def test_early_stopping_counts_on_and_its_end_is_an_end(tmp_path: Path) -> None:
    (whole,) = train(tmp_path / "whole", "--early")
    assert 9 <= whole["step"] < 30
    train(tmp_path / "cut", "--early", "--die", str(whole["step"] - 1), code=SIGKILL)
    for _ in range(2):
        (rest,) = train(tmp_path / "cut", "--early")
        assert rest["step"] == whole["step"]
        assert rest["weights"] == whole["weights"]


def test_a_run_that_is_told_to_stop_saves_its_step_and_goes_on_there(tmp_path: Path) -> None:
    (whole,) = train(tmp_path / "whole")
    (first,) = train(tmp_path / "cut", "--stop", "16", code=75)
    assert first["stopped"] == first["step"] < 30
    (rest,) = train(tmp_path / "cut")
    assert [*first["seen"], *rest["seen"]] == whole["seen"]
    assert rest["weights"] == whole["weights"]


def test_ranks_go_on_together(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", ranks=2)
    first = train(tmp_path / "cut", "--stop", "8", ranks=2, code=1)
    rest = train(tmp_path / "cut", ranks=2)
    by_rank = [{one["rank"]: one for one in some} for some in (whole, first, rest)]
    for rank in range(2):
        one, before, after = (some[rank] for some in by_rank)
        assert [*before["seen"], *after["seen"]] == one["seen"]
        assert after["weights"] == one["weights"]


def test_buffers_that_differ_on_ranks_of_ddp_are_saved_as_rank_0_has_them(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", "--norm", ranks=2)
    train(tmp_path / "cut", "--norm", "--die", "8", ranks=2, code=1)
    rest = train(tmp_path / "cut", "--norm", ranks=2)
    assert {one["weights"] for one in rest} <= {one["weights"] for one in whole}


def test_other_ranks_or_batches_would_lose_samples_and_are_refused(tmp_path: Path) -> None:
    train(tmp_path / "run", "--stop", "8", ranks=2, code=1)
    for newest in tmp_path.glob("run/step-*"):  # laid out for others, it was trained as it was
        dc.reshard(newest, newest, world_size=1, overwrite=True)
    (told,) = train(tmp_path / "run")
    assert "was trained on 2 ranks by 2 samples a batch" in told["error"]
    (told,) = train(tmp_path / "run", "--accumulate", "1", ranks=1)
    assert "and now on 1 ranks by 2 samples a batch and 1 batches a step" in told["error"]


def test_what_would_train_from_the_start_in_silence_is_refused(tmp_path: Path) -> None:
    (told,) = train(tmp_path / "run", "--bare")
    assert "train(resume_from_checkpoint=callback.resume(trainer))" in told["error"]
    (told,) = train(tmp_path / "run", "--jit")
    assert "enable_jit_checkpoint" in told["error"]


def test_a_checkpoint_of_others_is_not_taken_for_one_of_the_trainer(tmp_path: Path) -> None:
    dc.save({"x": 1}, tmp_path / "run" / "step-00000003", step=3)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(PROGRAM), str(tmp_path / "run")]
    done = run_it(command, environ)
    assert done.returncode
    assert "was not saved by this callback" in done.stderr


def test_the_page_leads_from_zero_to_a_resumed_run(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "transformers.md").read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```$", page, flags=re.M | re.S)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    for max_steps, step in ((12, 12), (20, 20)):
        (tmp_path / "program.py").write_text(
            program.replace("max_steps=12", f"max_steps={max_steps}")
        )
        command = [sys.executable, "program.py"]
        done = subprocess.run(
            command,
            env=environ,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-6000:]
        with dc.open(f"{tmp_path}/runs/gpt2@latest") as found:
            assert found.step == step
    assert json.loads(found_state(tmp_path / "runs" / "gpt2"))["global_step"] == 20


def found_state(root: Path) -> str:
    with dc.open(f"{root}@latest") as found:
        trainer: Any = found.objects["trainer"]
    return str(trainer["state"])
