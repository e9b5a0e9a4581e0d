"""The job in launch/, of which few lines are about checkpoints, and the files that start it."""

from __future__ import annotations

import difflib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import dist_ckpt as dc
from docs_blocks import make_checkout
from fork_server import forked_python
from ranks import free_port

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
TINY = ("--dim", "32", "--layers", "1", "--heads", "2", "--length", "16", "--batch", "4")
SMALL = ("--steps", "3", "--save-every", "2", *TINY)


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
        [forked_python(), str(job), "--root", str(root), *SMALL],
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


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return what looks like a checkout with its .venv, of which the programs are forked."""
    return make_checkout(tmp_path, forked_python())


def environment(*first: Path, **variables: str) -> dict[str, str]:
    """Return this process's environment, with programs of ours found first."""
    path = os.pathsep.join([*map(str, first), os.environ["PATH"]])
    ours = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    return {**os.environ, "PATH": path, **ours, **variables}


def options_in(text: str) -> set[str]:
    """Return the options that a file in launch/ gives to the job."""
    lines = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))
    given = re.findall(r"launch/train_gpt\.py(.*?)(?:&|resources:|lifecycle:|\n\n)", lines, re.S)
    assert given
    return {option for part in given for option in re.findall(r"(?<![\w-])--[a-z-]+", part)}


@pytest.mark.parametrize(
    "name", ["torchrun.sh", "torchrun_nodes.sh", "slurm.sbatch", "kubernetes.yaml"]
)
def test_what_the_launch_files_give_to_the_job_are_its_options(name: str) -> None:
    known = set(re.findall(r'add_argument\("(--[a-z-]+)"', JOB.read_text()))
    given = options_in((LAUNCH / name).read_text())
    assert "--root" in given
    assert given <= known


@pytest.mark.multi_process
@pytest.mark.slow
@pytest.mark.long
def test_the_example_for_torchrun_stops_and_goes_on(checkout: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [checkout / "launch" / "torchrun.sh", tmp_path / "run", *TINY],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    stopped = re.findall(
        r"stopped by SIGTERM on rank \d after step (\d+), which is durable", done.stdout
    )
    step = int(stopped[0])
    starts = re.findall(r": incarnation \d (.*): ", done.stdout)
    assert starts == ["begins anew", f"resumes from step {step}", f"resumes from step {step + 5}"]
    assert newest_in(tmp_path / "run") == step + 10


# What stands for Slurm: it starts the tasks, hands on a signal, and ends with the highest code.
SRUN = """
import os, signal, subprocess, sys
words = sys.argv[1:]
while words[0].startswith("--"):
    words.pop(0)
num = int(os.environ["SLURM_NTASKS"])
tasks = []
signal.signal(signal.SIGUSR1, lambda number, frame: [one.send_signal(number) for one in tasks])
for rank in range(num):
    names = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
    tasks.append(subprocess.Popen(words, env={**os.environ, **names}))
sys.exit(max(one.wait() % 256 for one in tasks))
"""
SCONTROL = """
import sys
if sys.argv[1] == "show":
    print("127.0.0.1")
else:
    print(*sys.argv[1:], file=open("requeued", "a"))
"""


@pytest.fixture
def slurm(checkout: Path, tmp_path: Path) -> dict[str, str]:
    """Make a folder to submit from, and return the environment of a job on one node there."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, program in (("srun", SRUN), ("scontrol", SCONTROL)):
        (programs / name).write_text(f"#!{sys.executable}{program}")
        (programs / name).chmod(0o755)
    return environment(
        programs,
        checkout / ".venv" / "bin",
        SLURM_JOB_ID="42",
        SLURM_JOB_NAME="run",
        SLURM_JOB_NODELIST="here",
        SLURM_NTASKS="2",
        SLURM_SUBMIT_DIR=str(tmp_path),
        MASTER_PORT=str(free_port()),
    )


def newest_in(root: Path) -> int:
    """Return the newest step that is committed, 0 if none is."""
    there = dc.checkpoints(root) if root.is_dir() else ()
    return max((one.step or 0 for one in there if one.state == "committed"), default=0)


@pytest.mark.multi_process
@pytest.mark.slow
def test_a_job_of_slurm_saves_before_its_time_is_over_and_is_queued_again(
    tmp_path: Path, slurm: dict[str, str]
) -> None:
    command = [str(LAUNCH / "slurm.sbatch"), "--tp", "1", *TINY, "--save-every", "5", "--steps"]
    with subprocess.Popen(["bash", *command, "1000000"], cwd=tmp_path, env=slurm) as job:
        until = time.monotonic() + 60
        while not newest_in(tmp_path / "runs" / "run"):
            assert job.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        job.send_signal(signal.SIGUSR1)  # as `--signal=B:USR1@300` does
        assert job.wait(60) == 0
    assert (tmp_path / "requeued").read_text() == "requeue 42\n"
    stopped_at = newest_in(tmp_path / "runs" / "run")
    assert stopped_at > 5
    done = subprocess.run(
        ["bash", *command, str(stopped_at + 2)],
        cwd=tmp_path,
        env=slurm,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"resumes from step {stopped_at}: " in done.stdout
    assert newest_in(tmp_path / "runs" / "run") == stopped_at + 2
    assert (tmp_path / "requeued").read_text() == "requeue 42\n"  # it has come to its end
