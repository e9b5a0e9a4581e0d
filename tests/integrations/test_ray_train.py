"""Ray Train with our checkpoints by reference: a worker that dies costs steps, and no weights."""

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

pytest.importorskip("ray.train.v2.api.report_config")

# Ray starts a group of workers anew, which takes a minute on a machine with much to do.
pytestmark = [pytest.mark.multi_process, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "helpers" / "frameworks" / "trained_by_ray.py"


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    return started(str(PROGRAM), str(folder), *options)


def started(*command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program that starts Ray by itself."""
    path = f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'helpers' / 'frameworks'}"
    environ = {**os.environ, "PYTHONPATH": path, "RAY_TRAIN_V2_ENABLED": "1"}
    environ |= {"CUDA_VISIBLE_DEVICES": "", "RAY_USAGE_STATS_ENABLED": "0"}
    environ.pop("WORLD_SIZE", None)
    return subprocess.run(
        [sys.executable, *command],
        env=environ,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def train(folder: Path, *options: str) -> dict[str, Any]:
    done = run(folder, *options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_worker_that_is_killed_costs_no_weights(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole")
    cut = train(tmp_path / "cut", "--die", "8")
    assert whole["started_at"] == 1
    assert cut["started_at"] == 7  # the last save was of step 6
    assert cut["begun_from"]
    assert (cut["weights"], cut["loss"]) == (whole["weights"], whole["loss"])
    assert cut["step"] == 12
    # Where it was committed, and nowhere else.
    assert cut["path"] == str(tmp_path / "cut" / "run" / "checkpoints" / "step-00000012")
    files = list((tmp_path / "cut").rglob("model-*.safetensors"))
    assert len({file.parent.parent for file in files}) == 2  # of keep.last
    assert dc.verify(cut["path"]).ok


def test_that_ray_would_delete_checkpoints_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path / "run", "--num-to-keep", "2")
    assert done.returncode != 0
    assert "keep=dc.keep.last(2)" in done.stderr + done.stdout


def test_the_page_leads_from_zero_to_a_resumed_run(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "ray.md").read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```$", page, flags=re.M | re.S)
    for until in (12, 20):
        (tmp_path / "program.py").write_text(program.replace('"until": 12', f'"until": {until}'))
        done = started("program.py", cwd=tmp_path)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        newest = done.stdout.splitlines()[-1]
        assert newest.endswith(f"step-{until:08}")
        assert dc.verify(newest).ok
