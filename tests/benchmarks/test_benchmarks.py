"""`python -m benchmarks`, at its smallest, with real ranks and without other libraries."""

from __future__ import annotations

import fcntl
import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.staging

import dist_ckpt as dc
from fork_server import forked_python

if not hasattr(torch.distributed.checkpoint.staging, "DefaultStager"):
    reason = "the savers of this torch that we compare with are of another kind"
    pytest.skip(reason, allow_module_level=True)

from benchmarks import gpu
from benchmarks.background import NO_SAVE, PLAIN_COPY, Trainers, stall, steps
from benchmarks.checkpoints import run_cases
from benchmarks.contenders import DistCkpt
from benchmarks.limits import BUFFER_NBYTES, Limits, RankView, cool, warm
from benchmarks.pool import Pools, RanksError
from benchmarks.savers import DcpAsync, DcpSaver
from benchmarks.scenario import OURS, Absent, Figure, Settings, turns
from benchmarks.trials import Case, Load
from benchmarks.workload import Spec, Workload, make
from torch_can import keep_a_stager

ROOT = Path(__file__).parents[2]

slow = pytest.mark.slow
long = pytest.mark.long
multi_process = pytest.mark.multi_process

SPEC = Spec(3, (64, 64))
CASE = Case("tiny", "save", 1, SPEC, (Load("load", "load", 1, SPEC),))


@dataclass(frozen=True)
class Forger(DistCkpt):
    """Saves well, and brings back one wrong bit."""

    name: str = "forger"

    def load(self, workload: Workload, folder: Path) -> None:
        super().load(workload, folder)
        _, tensor = list(workload.local_tensors())[-1]
        tensor.view(torch.int32)[-1, -1] ^= 1


@dataclass(frozen=True)
class Idler(DistCkpt):
    """Saves well, and loads nothing."""

    name: str = "idler"

    def load(self, workload: Workload, folder: Path) -> None:
        pass


@dataclass(frozen=True)
class Refuser(DistCkpt):
    """Cannot take part."""

    name: str = "refuser"

    def reason_against(self, spec: Spec) -> str | None:
        return "is not installed"

    def save(self, workload: Workload, folder: Path) -> None:
        raise AssertionError("it was called")


@dataclass(frozen=True)
class Sleeper(DistCkpt):
    """Never ends."""

    name: str = "sleeper"

    def save(self, workload: Workload, folder: Path) -> None:
        import time

        time.sleep(1000)


@dataclass(frozen=True)
class Founder(DistCkpt):
    """Leaves a process behind, which holds a lock, and never ends."""

    name: str = "founder"

    def save(self, workload: Workload, folder: Path) -> None:
        folder.mkdir()
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            subprocess.Popen(["sleep", "1000"], pass_fds=[lock.fileno()])
        raise RuntimeError("was founded")


@dataclass(frozen=True)
class Blurter(DcpAsync):
    """Says that it has staged, and copies nothing until it is asked for the result."""

    def start(self, job: str) -> DcpSaver:
        return BlurterSaver(self)


class BlurterSaver(DcpSaver):
    def save(self, workload: Workload, folder: Path) -> Any:
        return LateSave(lambda: super(BlurterSaver, self).save(workload, folder))


class LateSave:
    def __init__(self, begin: Callable[[], Any]) -> None:
        self._begin = begin

    def wait_staged(self, timeout_s: float) -> None:
        pass

    def done(self) -> bool:
        return True

    def result(self, timeout_s: float) -> None:
        self._begin().result(timeout_s)


@long
@multi_process
def test_a_quick_run_measures_ours_and_writes_what_it_measured(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    words = ["--quick", "--only", "small", "--contenders", "--dir", str(tmp_path)]
    words += ["--history", str(tmp_path / "history.jsonl")]  # and it adds nothing to it
    command = [forked_python(), "-m", "benchmarks", *words, "--json", str(out)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(out.read_text())
    assert document["schema"] == "dist-ckpt-bench/1"
    assert [measure["name"] for measure in document["measures"]] == ["save", "load", "load-cold"]
    for measure in document["measures"]:
        rows = {row["contender"]: row for row in measure["rows"]}
        assert {OURS, *measure["limits"]} == rows.keys()
        assert all(row["median_s"] > 0 for row in rows.values())
        assert f"small: {measure['title']}" in done.stdout
    assert list(tmp_path.iterdir()) == [out]


@long
@multi_process
def test_a_quick_run_measures_background_saves(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    words = ["--quick", "--only", "background", "--contenders", f"--dir={tmp_path}"]
    command = [forked_python(), "-m", "benchmarks", *words, "--json", str(out)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    there_is_one = hasattr(dc, "AsyncSaver")
    assert done.returncode == int(not there_is_one), done.stdout + done.stderr
    measures = {measure["name"]: measure for measure in json.loads(out.read_text())["measures"]}
    assert list(measures) == ["stall", "steps", "restore"]
    for name, reference in [
        ("stall", "plain copy"),
        ("steps", "no save"),
        ("restore", "cold load"),
    ]:
        rows = {row["contender"]: row for row in measures[name]["rows"]}
        assert rows.keys() == {OURS, reference}
        assert rows[reference]["median_s"] > 0
        if there_is_one:
            assert rows[OURS]["median_s"] > 0
        else:
            assert rows[OURS]["reason"] == "there is no AsyncSaver yet"
    assert list(tmp_path.iterdir()) == [out]


def test_without_a_device_each_of_its_measures_says_so(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    (scenario,) = gpu.scenarios()
    measures = list(scenario.run(Settings(tmp_path, actions=("stage", "load"))))
    assert [measure.name for measure in measures] == ["stage", "load"]
    for measure in measures:
        (row,) = measure.rows
        assert isinstance(row, Absent)
        assert row.reason == "no CUDA device here"


@long
@multi_process
def test_who_has_not_staged_when_it_says_so_has_no_figure(tmp_path: Path) -> None:
    kinds = [DcpAsync("process", keeps_stager=keep_a_stager()), Blurter("thread")]
    kept, blurted = (kind.name for kind in kinds)
    settings = Settings(tmp_path, rounds=1, nbytes=1 << 20, quick=True)
    for measure, reference in [(stall, PLAIN_COPY), (steps, NO_SAVE)]:
        with Trainers(settings) as trainers:
            table = measure(settings, trainers, kinds)
        for name in (kept, reference):
            figure = table.figure(name)
            assert figure is not None
            assert min(figure.seconds) > 0
        (absent,) = (row for row in table.rows if row.contender == blurted)
        assert isinstance(absent, Absent)
        assert absent.reason.startswith("came back different: ")


@long
@multi_process
def test_data_that_came_back_different_has_no_figure(tmp_path: Path) -> None:
    settings = Settings(tmp_path, rounds=1)
    contenders = [DistCkpt(), Forger(), Idler(), Refuser()]
    measures = {measure.name: measure for measure in run_cases([CASE], settings, contenders)}
    assert measures.keys() == {"save", "load"}
    for measure in measures.values():
        rows = {row.contender: row for row in measure.rows}
        assert isinstance(rows[OURS], Figure)
        for name, reason in [
            ("forger", "came back different: layer.00002.weight has other values"),
            ("idler", "came back different: layer.00000.weight has other values"),
            ("refuser", "is not installed"),
        ]:
            assert rows[name] == Absent(name, reason)


@multi_process
@slow
@pytest.mark.long
def test_a_contender_that_never_ends_is_ended_at_the_deadline(tmp_path: Path) -> None:
    with Pools(tmp_path, [DistCkpt(), Sleeper()], deadline_s=20) as pools:
        pools.call(1, "hold", SPEC)
        pools.deadline_s = 0.5
        with pytest.raises(RanksError, match="save on 1 ranks: no answer in time from rank 0"):
            pools.call(1, "save", "sleeper", SPEC, tmp_path / "a")
        pools.deadline_s = 20
        (sample,) = pools.call(1, "save", OURS, SPEC, tmp_path / "b")
        assert sample.seconds > 0


@multi_process
@slow
@pytest.mark.sampled(5)
def test_what_a_contender_started_is_ended_with_it(tmp_path: Path) -> None:
    with Pools(tmp_path, [Founder()], deadline_s=60) as pools:
        pools.call(1, "hold", SPEC)
        with pytest.raises(RanksError, match="was founded"):
            pools.call(1, "save", "founder", SPEC, tmp_path / "a")
    with (tmp_path / "a" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # waits for the process, until the test's deadline


def test_a_round_is_begun_by_another_contender_each_time() -> None:
    order = list(turns(["a", "b", "c"], 3))
    assert [name for _, name in order[::3]] == ["a", "b", "c", "a"]
    for number in range(4):
        assert {name for at, name in order if at == number} == {"a", "b", "c"}


def test_a_wiped_state_differs_from_what_it_was_in_every_tensor() -> None:
    for spec in (SPEC, Spec(2, width=64)):
        state, other = make(spec), make(spec)
        assert state.difference(other) is None
        other.wipe()
        for (name, left), (_, right) in zip(
            state.local_tensors(), other.local_tensors(), strict=True
        ):
            assert not torch.equal(left, right), name


def test_raw_reads_bring_back_every_byte_of_all_ranks(tmp_path: Path) -> None:
    nbytes = BUFFER_NBYTES + 5000
    folder = tmp_path / "raw"
    limits = Limits()
    for rank in range(2):
        limits.write(RankView(rank, 2, nbytes), folder)()
    for everything in (False, True):
        for set_cache in (warm, cool):
            set_cache(folder)
            limits.read(RankView(1, 2, nbytes, everything), folder, direct=False, threads=2)()
            assert limits.difference() is None
    path = folder / "raw-1"
    data = bytearray(path.read_bytes())
    data[4321] ^= 1
    path.write_bytes(data)
    limits.read(RankView(1, 2, nbytes, everything=True), folder, direct=False, threads=2)()
    assert limits.difference() is not None
