"""Real jobs of torchrun that are preempted at any time: each ends saved, or as if it never was.

By hand, for as long as it takes: `python tests/helpers/faults/preemptions.py --count 500`. The jobs
go on from each other in one root, on two ranks or four. What a job may do is in `violations_of`;
each violation is printed with the job's log.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dist_ckpt as dc
from preempted_job import started_at

ROOT = Path(__file__).parents[3]
JOB = Path(__file__).with_name("preempted_job.py")

# torchrun kills 30 s after it was told to end; a job that has not ended by then hangs.
GRACE_S, HANG_S = 30.0, 90.0

# A request from outside is taken back after so long; then the launcher is told to end.
ANSWER_S = 15

# A part of a job, the event that tells of it, and how long it takes at most: in that time it is
# preempted.
PHASES = {
    "at start": ("begun", 4.0),
    "in training": ("train", 1.5),
    "in evaluation": ("evaluate", 0.3),
    "in a save": ("save", 0.15),
}

Event = dict[str, Any]


@dataclass(frozen=True)
class Preemption:
    """How and when a job is preempted."""

    how: str
    phase: str
    num_ranks: int
    rank: int
    after_s: float

    def __str__(self) -> str:
        """Return it as it is printed."""
        return f"{self.how} {self.phase}, {self.num_ranks} ranks, rank {self.rank}"


@dataclass
class Job:
    """A job that torchrun runs, in a folder of its own."""

    root: Path
    folder: Path
    plan: Preemption
    # What runs torchrun; it runs its ranks with the same.
    python: str = sys.executable
    # Ranks that are preempted at their start wait for that, so that none is past it.
    waits_at_start: bool = False
    sent_at: float = 0.0
    ended_at: float = 0.0
    code: int | None = None
    answer: tuple[int, str] | None = None

    def run(self) -> None:
        """Start the job, preempt it, and wait until it has ended."""
        self.folder.mkdir()
        command = ["-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={self.plan.num_ranks}", str(JOB)]
        with (self.folder / "log").open("w") as log:
            launcher = subprocess.Popen(
                [self.python, *command, str(self.root), str(self.folder)],
                stdout=log,
                stderr=log,
                env={**os.environ, **self._environ(), "PYTHONPATH": str(ROOT)},
                start_new_session=True,
            )
            try:
                self._await_phase(launcher)
                time.sleep(self.plan.after_s)
                self.sent_at = time.time()
                HOW[self.plan.how](self, launcher)
                if self.answer is not None and self.answer[0]:
                    self.sent_at = time.time()
                    launcher.send_signal(signal.SIGTERM)
                self.code = launcher.wait(HANG_S)
            except subprocess.TimeoutExpired:
                pass
            finally:
                self.ended_at = time.time()
                if launcher.poll() is None:
                    self._end(launcher)

    def events(self, rank: int) -> list[Event]:
        """Return what a rank has told so far."""
        place = self.folder / f"rank-{rank}.jsonl"
        lines = place.read_text().splitlines(keepends=True) if place.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def of(self, rank: int, what: str) -> Event | None:
        """Return the first of a rank's events of a kind."""
        return next((one for one in self.events(rank) if one["what"] == what), None)

    def of_all(self, what: str) -> list[Event | None]:
        """Return each rank's first event of a kind."""
        return [self.of(rank, what) for rank in range(self.plan.num_ranks)]

    def kill(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a rank that has begun and has not ended yet."""
        begun = self.of(rank, "begun")
        if begun is not None and started_at(begun["pid"]) == begun["started_at"]:
            os.kill(begun["pid"], number)

    def log(self) -> str:
        """Return all that the job has said."""
        parts = [(self.folder / "log").read_text()[-20_000:], f"answer: {self.answer}"]
        for rank in range(self.plan.num_ranks):
            last = [json.dumps(one) for one in self.events(rank)[-6:]]
            parts.append(f"rank {rank}: " + "\n        ".join(last))
        return "\n".join(parts)

    def _environ(self) -> dict[str, str]:
        is_held = self.waits_at_start and self.plan.phase == "at start"
        return {"OMP_NUM_THREADS": "1", **({"JOB_WAITS_AT_START": "1"} if is_held else {})}

    def _await_phase(self, launcher: subprocess.Popen[bytes]) -> None:
        """Wait until the rank is where it is to be preempted, and every rank has begun."""
        what, _ = PHASES[self.plan.phase]
        until = time.monotonic() + HANG_S
        while not (all(self.of_all("begun")) and self.of(self.plan.rank, what)):
            if launcher.poll() is not None:
                raise AssertionError(f"the job ended by itself:\n{self.log()}")
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("the job did not begin", HANG_S)
            time.sleep(0.02)

    def _end(self, launcher: subprocess.Popen[bytes]) -> None:
        for rank in range(self.plan.num_ranks):
            self.kill(rank, signal.SIGKILL)
        launcher.kill()
        launcher.wait()


def to_launcher(job: Job, launcher: subprocess.Popen[bytes]) -> None:
    """End the launcher, as a scheduler does."""
    launcher.send_signal(signal.SIGTERM)


def to_rank(number: signal.Signals) -> Callable[[Job, subprocess.Popen[bytes]], None]:
    """Return what sends a signal to one rank."""

    def send(job: Job, launcher: subprocess.Popen[bytes]) -> None:
        job.kill(job.plan.rank, number)

    return send


def request(job: Job, launcher: subprocess.Popen[bytes]) -> None:
    """Ask the run to save and to end, and wait until it has answered."""
    options = ["--stop", "--wait", f"--timeout={ANSWER_S}"]
    done = subprocess.run(
        [sys.executable, "-m", "dist_ckpt", "request-save", str(job.root), *options],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    job.answer = done.returncode, done.stdout


HOW: dict[str, Callable[[Job, subprocess.Popen[bytes]], None]] = {
    "SIGTERM to the launcher": to_launcher,
    "SIGTERM to a rank": to_rank(signal.SIGTERM),
    "SIGUSR1 to a rank": to_rank(signal.SIGUSR1),
    "request-save": request,
}


def newest_in(root: Path) -> int:
    """Return the newest step that is committed, 0 if none is."""
    if not root.is_dir():
        return 0
    found = [one for one in dc.checkpoints(root) if one.state == "committed"]
    return max((one.step for one in found if one.step and not one.is_orphaned), default=0)


def violations_of(job: Job, expected: set[int]) -> Iterator[str]:
    """Say what a job did that it may not; `expected` is from where it may have gone on."""
    took_s = job.ended_at - job.sent_at
    if job.code is None:
        yield f"it hung for {took_s:.0f} s"
    elif took_s > GRACE_S:
        yield f"it took {took_s:.1f} s to end"
    restored = [one for one in job.of_all("restored") if one is not None]
    if any(one["step"] not in expected for one in restored):
        yield f"it went on from {[one['step'] for one in restored]} instead of {expected}"
    if not all(one["is_right"] for one in restored):
        yield "it restored other values than were saved"
    stopped = [one for one in job.of_all("stopped") if one is not None]
    steps = {one["step"] for one in stopped}
    if stopped:
        if len(steps) > 1 or len(stopped) < job.plan.num_ranks:
            yield f"only {len(stopped)} ranks stopped, at {steps}"
        if not all(one["is_right"] for one in stopped):
            yield "it stopped with other values than those of its step"
        durable = newest_in(job.root)
        if any(one["is_durable"] for one in stopped) and durable != max(steps):
            yield f"it says that {steps} is durable, and {durable} is the newest on disk"
    elif may_be_saved(job):
        yield "it was ended without a save although every rank had its handlers"
    yield from wrong_answers_of(job)


def wrong_answers_of(job: Job) -> Iterator[str]:
    """Say what is wrong with the answer to a request."""
    if job.answer is None:
        return
    code, text = job.answer
    told = re.search(r"^saved: step (\d+),", text, flags=re.M)
    steps = {one["step"] for one in job.of_all("stopped") if one is not None}
    if code and job.plan.phase != "at start":
        yield f"the request came to nothing, code {code}"
    if not code and (told is None or {int(told[1])} != steps):
        yield f"the answer is {text!r}, and the ranks stopped at {steps}"


def may_be_saved(job: Job) -> bool:
    """Say whether every rank was ready for a signal when it was preempted."""
    return all(one is not None and one["at"] < job.sent_at for one in job.of_all("opened"))


def steps_after(job: Job) -> set[int]:
    """Return the steps from which the next job may go on."""
    stopped = [one for one in job.of_all("stopped") if one is not None]
    if len(stopped) == job.plan.num_ranks:
        return {one["step"] for one in stopped}
    # A save that was under way may be whole in memory, or be committed by the writers later.
    saves = [one["step"] for one in job.events(0) if one["what"] == "save"]
    newest = newest_in(job.root)
    return {newest, *(step for step in saves if step > newest)}


def plans(seed: int, hows: Iterable[str] = tuple(HOW)) -> Iterator[Preemption]:
    """Yield preemptions: every way in every phase, in a random order, again and again."""
    chance = random.Random(seed)
    while True:
        pairs = [(how, phase) for how in hows for phase in PHASES]
        chance.shuffle(pairs)
        for how, phase in pairs:
            num_ranks = chance.choice((2, 4))
            after_s = chance.uniform(0.0, PHASES[phase][1])
            yield Preemption(how, phase, num_ranks, chance.randrange(num_ranks), after_s)


def preempt(
    folder: Path, some: Iterable[Preemption], **options: Any
) -> Iterator[tuple[Job, list[str]]]:
    """Run a job for each preemption, one after the other; yield it with its violations.

    `options` are those of `Job`.
    """
    root, expected = folder / "run", {0}
    for number, plan in enumerate(some):
        job = Job(root, folder / f"job-{number:04d}", plan, **options)
        job.run()
        wrong = list(violations_of(job, expected))
        yield job, wrong
        # What was wrong is told once; the next job begins from what there is.
        expected = steps_after(job)


def main() -> int:
    """Preempt as many jobs as asked for; return how many violations there were, 1 at most."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="preemptions-"))
    folder.mkdir(exist_ok=True)
    print(f"in {folder}")
    outcomes: Counter[str] = Counter()
    some = plans(args.seed)
    for job, wrong in preempt(folder, (next(some) for _ in range(args.count))):
        ends = [one for one in job.of_all("stopped") if one is not None]
        how = "ended by the signal"
        if ends:
            how = f"stopped at {ends[0]['step']}, {'' if ends[0]['is_durable'] else 'not '}durable"
        took_s = job.ended_at - job.sent_at
        print(f"{job.folder.name}: {job.plan}: {how}, in {took_s:.1f} s, code {job.code}")
        outcomes[f"{job.plan.phase}: {how.split(' at ')[0]}"] += 1
        outcomes["violations"] += len(wrong)
        for one in wrong:
            print(f"VIOLATION: {one}")
        if wrong:
            print(job.log())
        sys.stdout.flush()
    print(*sorted(outcomes.items()), sep="\n")
    return int(outcomes["violations"] > 0)


if __name__ == "__main__":
    sys.exit(main())
