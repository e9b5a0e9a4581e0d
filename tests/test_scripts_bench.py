"""scripts/bench.py, at its smallest, with real ranks and without other libraries."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "scripts"))

from benchmarks.checkpoints import run_cases  # noqa: E402
from benchmarks.contenders import DistCkpt  # noqa: E402
from benchmarks.limits import SLOT_NBYTES, Limits, Share, cool, warm  # noqa: E402
from benchmarks.pool import Pools, RanksError  # noqa: E402
from benchmarks.scenario import OURS, Absent, Figure, Settings, turns  # noqa: E402
from benchmarks.trials import Case, Load  # noqa: E402
from benchmarks.workload import Spec, Workload, make  # noqa: E402

slow = pytest.mark.slow
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


@slow
@multi_process
def test_a_quick_run_measures_ours_and_writes_what_it_measured(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    words = ["--quick", "--only", "small", "--contenders", "--dir", tmp_path, "--json", out]
    command = [sys.executable, ROOT / "scripts" / "bench.py", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
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


@slow
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
def test_a_contender_that_never_ends_is_ended_at_the_deadline(tmp_path: Path) -> None:
    with Pools(tmp_path, [DistCkpt(), Sleeper()], deadline_s=20) as pools:
        pools.call(1, "hold", SPEC)
        pools.deadline_s = 0.5
        with pytest.raises(RanksError, match="save on 1 ranks: no answer in time from rank 0"):
            pools.call(1, "save", "sleeper", SPEC, tmp_path / "a")
        pools.deadline_s = 20
        (sample,) = pools.call(1, "save", OURS, SPEC, tmp_path / "b")
        assert sample.seconds > 0


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
    nbytes = SLOT_NBYTES + 5000
    folder = tmp_path / "raw"
    limits = Limits()
    for rank in range(2):
        limits.write(Share(rank, 2, nbytes), folder)()
    for everything in (False, True):
        for set_cache in (warm, cool):
            set_cache(folder)
            limits.read(Share(1, 2, nbytes, everything), folder, direct=False, threads=2)()
            assert limits.difference() is None
    path = folder / "raw-1"
    data = bytearray(path.read_bytes())
    data[4321] ^= 1
    path.write_bytes(data)
    limits.read(Share(1, 2, nbytes, everything=True), folder, direct=False, threads=2)()
    assert limits.difference() is not None
