"""The job in launch/: few of its lines are about checkpoints, and it trains the same without."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
JOB = LAUNCH / "train_gpt.py"
MAX_LINES = 10

# What in the job is about checkpoints, as patterns, and what the loop has there without them.
OF_CHECKPOINTS = {
    r"^import dist_ckpt as dc\n\n": "",
    r"^    state \|= .*\n": "",
    r'^    state\["rng"\] = .*\n': "",
    r"^    save = dc\..*\n": "",
    r"^    with dc\.Checkpointer\(.*\n": "",
    r"ck\.steps\(state, until=args\.steps\)": "range(1, args.steps + 1)",
    r"^    return ck\.stopped\..*\n": "    return 0\n",
}
SMALL = ("--steps", "3", "--save-every", "2", "--dim", "32", "--layers", "1", "--heads", "2")


def without_checkpoints(job: str) -> str:
    """Return the job as it would be without checkpoints, but for the indentation of its loop."""
    for pattern, plain in OF_CHECKPOINTS.items():
        job, count = re.subn(pattern, plain, job, flags=re.M)
        assert count == 1, pattern
    return job


def code_of(job: str) -> list[str]:
    """Return the lines of a program, without what stands before them."""
    return [line.strip() for line in job.splitlines()]


def out_of_with(job: str) -> str:
    """Move the loop, which is no longer in a `with`, back to the left."""
    head, loop, rest = re.split(r"(^ {8}for step in (?:.*\n(?= {9}|\n))*.*\n)", job, flags=re.M)
    return head + re.sub(r"^    ", "", loop, flags=re.M) + rest


def losses_of(job: Path, root: Path) -> list[str]:
    """Train with a job, as one process; return what it says of its steps."""
    done = subprocess.run(
        [sys.executable, str(job), "--root", str(root), *SMALL],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return re.findall(r"^(step +\d+ +loss [0-9.]+) ", done.stdout, flags=re.M)


def test_at_most_ten_lines_of_the_job_are_about_checkpoints() -> None:
    job = JOB.read_text()
    diff = difflib.ndiff(code_of(without_checkpoints(job)), code_of(job))
    lines = [line for line in diff if line[0] in "+-" and line[2:]]
    print(*lines, sep="\n")
    assert len(lines) <= MAX_LINES


def test_no_other_line_of_the_job_needs_the_library() -> None:
    plain = without_checkpoints(JOB.read_text())
    code = plain[plain.index('"""', 3) + 3 :]
    assert not re.search(r"\bdc\b|dist_ckpt|\bck\b", code)


@pytest.mark.multi_process
@pytest.mark.slow
def test_the_job_trains_the_same_without_checkpoints(tmp_path: Path) -> None:
    plain = tmp_path / "plain.py"
    plain.write_text(out_of_with(without_checkpoints(JOB.read_text())))
    losses = losses_of(plain, tmp_path / "none")
    assert len(losses) == 3
    assert losses_of(JOB, tmp_path / "run") == losses
    assert not (tmp_path / "none").exists()
    assert sorted(one.name for one in (tmp_path / "run").glob("step-*")) == [
        "step-00000002",
        "step-00000003",
    ]
