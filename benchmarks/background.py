"""Saves in the background: what they stall, what they cost training, what a restart gains.

Each contender has a training process of its own for all rounds: what one leaves running, or leaves
in memory, is not in the way of another's figures. Between its turns it has nothing under way.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from benchmarks.checkpoints import large_tensors
from benchmarks.pool import Pools, RanksError
from benchmarks.rank import Operations
from benchmarks.savers import DCP_KINDS, Kind, Ours
from benchmarks.scenario import (
    OURS,
    Absent,
    DifferentError,
    Figure,
    Measure,
    Row,
    Scenario,
    Settings,
    in_one_line,
    turns,
)
from benchmarks.trainer import COPIES, Copier, Stall, Steps, Trainer
from benchmarks.workload import Spec

T = TypeVar("T")

PLAIN_COPY = "plain copy"
NO_SAVE = "no save"
COLD_LOAD = "cold load"

# The fastest save of DCP is under way for about so many steps: there is nearly always one.
SAVE_EVERY = 2
NUM_STEPS = 30


def scenarios() -> list[Scenario]:
    """Return the one scenario."""
    what = "background saves: stall, steps of a training, restore from memory"
    return [Scenario("background", what, _background)]


def _background(settings: Settings) -> Iterator[Measure]:
    theirs = DCP_KINDS if settings.takes("DCP") else ()
    for name, measure in (("stall", stall), ("steps", steps), ("restore", restore)):
        if settings.measures(name):
            with Trainers(settings) as trainers:
                yield measure(settings, trainers, (Ours(), *theirs))


class Trainers:
    """A process for each contender. One that fails is ended, and has no figure."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._pools: dict[str, Pools] = {}
        self._num_folders = 0
        self.reasons: dict[str, str] = {}

    def __enter__(self) -> Trainers:
        return self

    def __exit__(self, *_: object) -> None:
        for name, pools in self._pools.items():
            if name not in self.reasons:
                with contextlib.suppress(RanksError):
                    self.call(name, "close")
            pools.end(1)

    def add(self, name: str, kind: Kind | None, operations: Operations = Trainer) -> None:
        """Have a process for a contender, who saves in this way; it is started by its first call.

        A contender that cannot take part gets no process.
        """
        if kind is not None and (reason := kind.reason_against()):
            self.reasons[name] = reason
            return
        self._pools[name] = Pools(
            self._settings.folder,
            () if kind is None else (kind,),
            deadline_s=self._settings.deadline_s,
            operations=operations,
        )

    def call(self, name: str, method: str, *args: object) -> Any:
        """Call an operation of a contender's process."""
        (answer,) = self._pools[name].call(1, method, *args)
        return answer

    def start(self, name: str, spec: Spec) -> float:
        """Have a contender hold a state and start its saver; return what the latter took."""
        self.call(name, "hold", spec)
        seconds: float = self.call(name, "start", f"bench-{os.getpid()}")
        return seconds

    def check(self, name: str, spec: Spec) -> None:
        """Have a contender show that it brings back what it staged."""
        if difference := self.call(name, "check", spec, self.folder()):
            raise DifferentError(f"came back different: {difference}")

    def kill(self, name: str) -> None:
        """End a contender's process as a crash would; the next call starts another."""
        self._pools[name].end(1)

    def folder(self) -> Path:
        """Return a path that nobody has had before."""
        self._num_folders += 1
        return self._settings.folder / f"checkpoint-{self._num_folders}"

    def take_turns(self, take: Callable[[str, int], T]) -> dict[str, list[T]]:
        """Let `take(contender, round)` be called in turns; return what the measured rounds gave."""
        results: dict[str, list[T]] = {}
        for number, name in turns(list(self._pools), self._settings.rounds):
            if name in self.reasons:
                continue
            try:
                result = take(name, number)
            except (RanksError, DifferentError) as error:
                self.reasons[name] = in_one_line(str(error))
            else:
                if number > 0:
                    results.setdefault(name, []).append(result)
            for path in self._settings.folder.glob("checkpoint-*"):
                shutil.rmtree(path)
        return {name: taken for name, taken in results.items() if name not in self.reasons}

    def rows(self, names: Sequence[str], row: Callable[[str], Row]) -> tuple[Row, ...]:
        """Return a row for each contender; for one that failed, why."""
        return tuple(
            Absent(name, self.reasons[name]) if name in self.reasons else row(name)
            for name in names
        )


# --- stall ------------------------------------------------------------------------------------


def stall(settings: Settings, trainers: Trainers, kinds: Sequence[Kind]) -> Measure:
    """Measure for how long a save keeps a training from going on."""
    spec, by_name = large_tensors(settings.nbytes), {kind.name: kind for kind in kinds}
    trainers.add(PLAIN_COPY, None, Copier)
    for name, kind in by_name.items():
        trainers.add(name, kind)
    first: dict[str, Stall] = {}

    def take(name: str, number: int) -> Mapping[str, float] | Stall:
        if name == PLAIN_COPY:
            if number == 0:
                trainers.call(name, "hold", spec)
            return {way: trainers.call(name, "copy", way) for way in COPIES}
        if number == 0:
            trainers.start(name, spec)
            first[name] = trainers.call(name, "save", trainers.folder())
            trainers.check(name, spec)
        again: Stall = trainers.call(name, "save", trainers.folder())
        return again

    taken = trainers.take_turns(take)

    def row(name: str) -> Row:
        if name == PLAIN_COPY:
            return _copy_row([copies for copies in taken[name] if isinstance(copies, Mapping)])
        stalls = [stall for stall in taken[name] if isinstance(stall, Stall)]
        return _stall_row(by_name[name], first[name], stalls)

    return Measure(
        scenario="background",
        name="stall",
        title=f"stall of a save in the background, {spec.count} large tensors",
        rows=trainers.rows([PLAIN_COPY, *by_name], row),
        nbytes=_nbytes_of(spec),
        limits=(PLAIN_COPY,),
        note="seconds: from the call until the state may change. 'first ms': that of the first "
        "save of a process, which is not among the others; 'call ms': until the call returns; "
        "'durable ms': until the checkpoint is on the disk. Each save is waited for before the "
        "next. The first line is the fastest way to copy the same bytes into memory touched "
        "before. Once, the state was overwritten as soon as it was staged, and loaded back.",
    )


def _nbytes_of(spec: Spec) -> int:
    return spec.count * spec.shape[0] * spec.shape[1] * 4


def _copy_row(rounds: Sequence[Mapping[str, float]]) -> Row:
    """Return the fastest way as the reference."""
    medians = {way: median(copies[way] for copies in rounds) for way in COPIES}
    fastest = min(COPIES, key=lambda way: medians[way])
    others = [f"{way} {medians[way]:.3f} s" for way in COPIES if way != fastest]
    seconds = tuple(copies[fastest] for copies in rounds)
    return Figure(PLAIN_COPY, seconds, note=f"{fastest}; {', '.join(others)}")


def _stall_row(kind: Kind, first: Stall, stalls: Sequence[Stall]) -> Row:
    facts = {
        "first ms": first.staged_s * 1e3,
        "call ms": median(stall.called_s for stall in stalls) * 1e3,
        "durable ms": median(stall.ended_s for stall in stalls) * 1e3,
    }
    return Figure(kind.name, tuple(stall.staged_s for stall in stalls), facts, kind.note)


# --- steps ------------------------------------------------------------------------------------


def steps(settings: Settings, trainers: Trainers, kinds: Sequence[Kind]) -> Measure:
    """Measure the steps of a training while saves are written, and without any."""
    spec, by_name = _gpt_of(settings), {kind.name: kind for kind in kinds}
    trainers.add(NO_SAVE, None)
    for name, kind in by_name.items():
        trainers.add(name, kind)
    num_steps = 8 if settings.quick else NUM_STEPS

    def take(name: str, number: int) -> Steps:
        if number == 0 and name == NO_SAVE:
            trainers.call(name, "hold", spec)
        elif number == 0:
            trainers.start(name, spec)
            trainers.check(name, spec)
        arguments = (num_steps, SAVE_EVERY, trainers.folder())
        trained: Steps = trainers.call(name, "train", *arguments)
        return trained

    taken = trainers.take_turns(take)
    return Measure(
        scenario="background",
        name="steps",
        title=f"steps of a training while saves are written: GPT of {spec.count} blocks, "
        f"width {spec.width}, with AdamW",
        rows=trainers.rows(
            [NO_SAVE, *by_name], lambda name: _steps_row(name, by_name.get(name), taken[name])
        ),
        limits=(NO_SAVE,),
        note=f"seconds: of each step, p50 and all. A save is due every {SAVE_EVERY} steps, and put "
        "off while the one before it is under way. 'saves' had ended before the last step did. "
        "'busy': steps in which a save began or was under way; 'busy %': how many they were. The "
        "time that a save stalls is part of its step.",
    )


def _gpt_of(settings: Settings) -> Spec:
    """Return a GPT of half the bytes: with AdamW each parameter is three numbers of four bytes."""
    width = 128 if settings.quick else 768
    return Spec(max(2, round(settings.nbytes / 2 / (144 * width**2))), width=width)


def _steps_row(name: str, kind: Kind | None, rounds: Sequence[Steps]) -> Row:
    seconds = [seconds for steps in rounds for seconds in steps.seconds]
    facts = {"p99 ms": _p99(seconds) * 1e3}
    if kind is None:
        return Figure(name, tuple(seconds), facts)
    at_work = [
        seconds
        for steps in rounds
        for seconds, is_busy in zip(steps.seconds, steps.busy, strict=True)
        if is_busy
    ]
    facts |= {
        "busy p50 ms": median(at_work) * 1e3,
        "busy p99 ms": _p99(at_work) * 1e3,
        "busy %": 100 * len(at_work) / len(seconds),
        "saves": sum(steps.num_saved for steps in rounds),
    }
    return Figure(name, tuple(seconds), facts, kind.note)


def _p99(values: Sequence[float]) -> float:
    """Return the smallest value that at most one in a hundred is above."""
    return sorted(values)[ceil(0.99 * len(values)) - 1]


# --- restore ----------------------------------------------------------------------------------


def restore(settings: Settings, trainers: Trainers, kinds: Sequence[Kind]) -> Measure:
    """Measure what ours restores from memory, and a load of the same from a cold disk."""
    spec = large_tensors(settings.nbytes)
    trainers.add(OURS, next(kind for kind in kinds if kind.name == OURS))
    trainers.add(COLD_LOAD, None)
    started: list[float] = []

    def take(name: str, number: int) -> float:
        folder = trainers.folder()
        if name == COLD_LOAD:
            if number == 0:
                trainers.call(name, "hold", spec)
            trainers.call(name, "save_plainly", folder)
            return float(trainers.call(name, "load_cold", spec, folder))
        trainers.start(name, spec)
        trainers.call(name, "save", folder)
        trainers.kill(name)
        started.append(trainers.start(name, spec))
        seconds: float = trainers.call(name, "restore", spec)
        trainers.call(name, "close")
        return seconds

    taken = trainers.take_turns(take)

    def row(name: str) -> Row:
        if name == COLD_LOAD:
            return Figure(name, tuple(taken[name]), note="dc.load, none of it in the page cache")
        facts = {"start ms": median(started[1:]) * 1e3}
        return Figure(name, tuple(taken[name]), facts, "verifies checksums")

    return Measure(
        scenario="background",
        name="restore",
        title=f"restore {spec.count} large tensors from memory after the trainer was killed",
        rows=trainers.rows([OURS, COLD_LOAD], row),
        nbytes=_nbytes_of(spec),
        note="'start ms': to make the AsyncSaver, which comes before.",
    )
