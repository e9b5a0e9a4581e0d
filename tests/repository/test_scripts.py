"""The scripts that show what the library does, run as a user runs them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from docs_blocks import make_checkout
from fork_server import forked_python

ROOT = Path(__file__).parents[2]
OURS = Path(sys.prefix).resolve() == (ROOT / ".venv").resolve()

# A model of which a save still takes so long that it can be stopped in the middle.
SMALLER = ("--dim", "256", "--heads", "4", "--layers", "1")

pytestmark = [pytest.mark.slow]


def run(*command: str | Path, limit_s: float, folder: Path = ROOT) -> str:
    """Run a program of the project; end it and all that it has started at the limit."""
    with subprocess.Popen(
        [str(word) for word in command],
        cwd=folder,
        env={"DIST_CKPT_HEARTBEAT_TIMEOUT_S": "20", **os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            raise
    assert process.returncode == 0, output
    return output


@pytest.fixture(scope="module")
def rivals() -> dict[int, tuple[str, str]]:
    """What DCP and dist_ckpt make of each accident, by its number."""
    text = run(forked_python(), ROOT / "scripts" / "rival_failures.py", limit_s=200)
    found = {}
    for number, part in enumerate(text.split("\n   DCP ")[1:], start=1):
        theirs, ours = part.split("\n   dist_ckpt ")
        ours = ours.split(f"\n{number + 1}. ")[0]
        found[number] = (" ".join(theirs.split()), " ".join(ours.split()))
    print(text)
    return found


# Ours is what we promise. What DCP does is shown, not asserted: it may get better.
@pytest.mark.multi_process
@pytest.mark.parametrize(
    ("number", "ours"),
    [
        (1, "loads [1, 1, 1, 1, 1, 1, 1, 1]"),
        (2, "CorruptError: w rows 0:1000: damaged"),
        (3, "save: StorageError: "),
        (4, "save: UnequalReplicasError: ranks hold different values"),
        (4, "with dc.PerRank: rank 0 gets rng of 0; rank 1 gets rng of 1"),
        (5, "IncompatibleError: "),
        (6, "{0: {'step': 5}} loads as {0: {'step': 5}}"),
        (7, "half of it: save: ValueError: "),
        (8, "nothing was overwritten"),
        (9, "the checkpoint of step 1 holds 1.0"),
        (10, "1e10 in float64 loads as [1e+10, 1e+10], torch.float64"),
    ],
)
@pytest.mark.multi_process
def test_dist_ckpt_stands_an_accident(
    number: int, ours: str, rivals: dict[int, tuple[str, str]]
) -> None:
    assert ours in rivals[number][1]


@pytest.mark.multi_process
def test_every_accident_is_shown_with_both(rivals: dict[int, tuple[str, str]]) -> None:
    assert sorted(rivals) == list(range(1, 11))
    assert "NOT SHOWN" not in str(rivals)


@pytest.mark.skipif(not OURS, reason="the quick start would install: run it from .venv")
@pytest.mark.waits
@pytest.mark.sampled(3)
@pytest.mark.timeout(880)  # of two trainings, on processors that the other tests use as well
def test_the_quick_start_succeeds(tmp_path: Path) -> None:
    checkout = make_checkout(tmp_path, forked_python())
    script = checkout / "scripts" / "quickstart.sh"
    text = run(script, checkout / "run", *SMALLER, folder=checkout, limit_s=860)
    assert "tensors (weights and AdamW's moments) of step " in text
    assert " have the SHA-256 that they had on 4 ranks." in text
    assert "Done in" in text
