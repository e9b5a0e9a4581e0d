"""A job that verifies, prunes, resumes and is killed, while its files rot: the good steps stay."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from random import Random

import pytest

import dist_ckpt as dc
from dist_ckpt.runs.listing import RunCheckpoint
from fork_server import forked_python
from long_mode import IS_LONG

pytestmark = [pytest.mark.multi_process, pytest.mark.timeout(1800)]

NUM_KILLS = 200 if IS_LONG else 3

# Trains, verifies and prunes in any order. It kills itself at some call of the storage.
JOB = """
import os, signal, sys
from random import Random
import torch
import dist_ckpt as dc
from dist_ckpt.core.storage.local.local_storage import LocalStorage

root, seed = sys.argv[1], int(sys.argv[2])
random = Random(seed)
calls_left = random.randint(1, 1500)

def counted(call):
    def counting(*args, **options):
        global calls_left
        calls_left -= 1
        if not calls_left:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **options)
    return counting

for name in ("list", "create", "open", "rename", "link", "remove", "sync"):
    setattr(LocalStorage, name, counted(getattr(LocalStorage, name)))

def train():
    state = {"model": {"base": torch.zeros(99), "w": torch.full((50,), -1.0)}, "step": -1}
    options = {"save": dc.every(steps=1), "background": False, "link_unchanged": "model.base"}
    with dc.Checkpointer(root, keep=dc.keep.last(1), **options) as ck:
        first = ck.restore(state) or 0
        assert state["step"] == (first or -1) and bool((state["model"]["w"] == state["step"]).all())
        for step in ck.steps(state, until=first + random.randint(1, 4)):
            state["model"]["w"].fill_(step)
            state["step"] = step

def check():
    there = [info for info in dc.checkpoints(root) if info.state == "committed"]
    if there:
        dc.verify(random.choice(there).path, level=random.choice(["full", "full", "quick"]))

def prune():
    dc.Run(root).prune(dc.keep.last(1), damaged=random.random() < 0.3)

while True:
    try:
        random.choice([train, check, check, prune])()
    except (dc.CorruptError, dc.NotFoundError):
        sys.exit(3)  # nothing is left to resume from, or it was just removed
"""


def rot(root: Path, random: Random) -> None:
    """Flip a byte of some file of a checkpoint, cut it off, or remove it."""
    files = sorted(root.glob("step-*/a*/*"))
    if not files or random.random() < 0.5:
        return
    file = random.choice(files)
    data = bytearray(file.read_bytes())
    way = random.choice(["flip", "cut", "remove"])
    if way == "remove" or not data:
        file.unlink()
    elif way == "cut":
        file.write_bytes(data[: random.randrange(len(data))])
    else:
        data[random.randrange(len(data))] ^= 1
        file.write_bytes(bytes(data))


def checked_in_full(root: Path) -> dict[int, bool]:
    """Return the steps that are recorded as checked in full, and whether they still are whole."""
    infos = [info for info in dc.checkpoints(root) if info.is_verified and not info.is_orphaned]
    return {info.step: is_whole(info) for info in infos if info.step is not None}


def is_whole(info: RunCheckpoint) -> bool:
    report = dc.verify(info.path, record=False)
    return not any(problem.is_damage for problem in report.problems)


def test_a_step_that_was_checked_and_is_whole_stays_or_a_newer_one_is_there(tmp_path: Path) -> None:
    random = Random(1)
    num_unread = num_obliged = 0
    kills = 0
    root = tmp_path / "run0"
    root.mkdir()
    while kills < NUM_KILLS:
        if random.random() < 0.1:
            root = tmp_path / f"run{kills}-{random.randrange(1 << 30)}"
            root.mkdir()
        rot(root, random)
        before = checked_in_full(root)
        seed = random.randrange(1 << 30)
        process = subprocess.run(
            [forked_python(), "-c", JOB, str(root), str(seed)],
            capture_output=True,
            timeout=600,
            check=False,
        )
        assert process.returncode in (-signal.SIGKILL, 3), (seed, process.stderr.decode()[-3000:])
        kills += process.returncode == -signal.SIGKILL
        whole = [step for step, is_good in before.items() if is_good]
        if not whole:
            continue
        newest = max(whole)
        if any(step > newest for step in before):  # rot that nobody has read yet
            num_unread += 1
            continue
        num_obliged += 1
        after = checked_in_full(root)
        assert any(step >= newest and is_good for step, is_good in after.items()), (
            seed,
            root,
            before,
            after,
        )
    print(f"{kills} kills, {num_obliged} with a whole checked step, {num_unread} with unread rot")
    assert num_obliged
