"""Ranks that read for `dcp.load`: what several want is read once, and failures are everybody's."""

from __future__ import annotations

import os
import re
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import dist_ckpt as dc
from dist_ckpt.core.storage.local import local_storage as local
from dist_ckpt.core.storage.local.local_storage import LocalStorage
from dist_ckpt.interop.dcp.adapter import DcpLoadReport, StorageReader, StorageWriter
from ranks import Options, run_ranks, try_ranks
from torch_can import save_by_dcp_without_collectives

pytestmark = [pytest.mark.multi_process, pytest.mark.sampled(3)]

RANKS = 4
SHAPE = (1024, 768)
STORED_NBYTES = 4 * SHAPE[0] * SHAPE[1]
# The first in a load waits so long for the others; what hangs would wait longer than the second.
ARRIVE_S = 15
FRAIL = {"DIST_CKPT_JOIN_TIMEOUT_S": str(ARRIVE_S), "DIST_CKPT_HEARTBEAT_TIMEOUT_S": "6"}
NOTICED_S = 100


def whole() -> torch.Tensor:
    return torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).view(SHAPE)


def part(how: str, *, filled: bool = False) -> DTensor:
    """Return a rank's rows or columns, or all of it, of what is saved or else of zeros."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placement = {"rows": Shard(0), "columns": Shard(1), "all": Replicate()}[how]
    every = whole() if filled else torch.full(SHAPE, -1.0)
    local = every
    if isinstance(placement, Shard):
        local = every.chunk(mesh.size(), placement.dim)[mesh.get_local_rank()]
    return DTensor.from_local(local.clone().contiguous(), mesh, [placement], run_check=False)


def save(rank: int, path: str) -> None:
    state = {"w": part("rows", filled=True), "n": 7}
    dcp.save(state, storage_writer=StorageWriter(path))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    found = str(tmp_path_factory.mktemp("dcp-reads") / "ck")
    run_ranks(save, found, world_size=RANKS)
    return found


def load(path: str, how: str, **options: Any) -> tuple[dict[str, Any], DcpLoadReport]:
    state = {"w": part(how), "n": 0}
    reader = StorageReader(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=reader, **options)
    assert reader.report is not None
    return state, reader.report


def check(state: dict[str, Any], how: str) -> None:
    assert torch.equal(state["w"].to_local(), part(how, filled=True).to_local())
    assert state["n"] == 7


# --- what is read ------------------------------------------------------------------------------


def load_counted(rank: int, path: str, how: str) -> list[int]:
    """Load, and return what this rank has read, as told and as seen at the storage."""
    seen = [0]
    original = LocalStorage.open

    def opened(storage: LocalStorage, path: str) -> Any:
        file = original(storage, path)
        return _Counted(file, seen) if path.endswith(".safetensors") else file

    LocalStorage.open = opened  # type: ignore[assignment, method-assign]
    state, report = load(path, how)
    check(state, how)
    assert set(report.seconds) == {"open", "check", "read", "place"}
    return [report.nbytes_read, report.nbytes_received, seen[0]]


class _Counted:
    def __init__(self, file: Any, seen: list[int]) -> None:
        self._file = file
        self._seen = seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def read_into(self, offset: int, target: memoryview) -> int:
        count: int = self._file.read_into(offset, target)
        self._seen[0] += count if offset else 0
        return count


@pytest.mark.parametrize("how", ["rows", "columns", "all"])
def test_what_several_ranks_want_is_read_once(path: str, how: str) -> None:
    counts = run_ranks(load_counted, path, how, world_size=RANKS)
    assert all(told == seen for told, _, seen in counts)
    assert sum(read for read, _, _ in counts) == STORED_NBYTES
    wanted = STORED_NBYTES // RANKS if how == "rows" else STORED_NBYTES
    assert [read + received for read, received, _ in counts] == [wanted] * RANKS


def load_alone(rank: int, path: str) -> list[int]:
    group = dist.new_group([0, 2])
    state, report = load(path, "all", no_dist=True)
    check(state, "all")
    found = [report.nbytes_read, report.nbytes_received]
    if rank in (0, 2):
        # DCP does not say to a reader which group that is: they read by themselves.
        other = {"w": torch.zeros(SHAPE)}
        reader = StorageReader(path)
        dcp.load(other, storage_reader=reader, process_group=group)
        assert torch.equal(other["w"], whole())
        assert reader.report is not None
        found.append(reader.report.nbytes_received)
        reader = StorageReader(path, process_group=group)
        dcp.load(other, storage_reader=reader, process_group=group)
        assert torch.equal(other["w"], whole())
        assert reader.report is not None
        found.append(reader.report.nbytes_read + reader.report.nbytes_received)
        assert reader.report.nbytes_received
    return found


def test_who_loads_alone_or_in_a_group_of_its_own_waits_for_nobody_else(path: str) -> None:
    alone = [STORED_NBYTES, 0]
    shared = [*alone, 0, STORED_NBYTES]
    assert run_ranks(load_alone, path, world_size=3) == [shared, alone, shared]


# --- failures ----------------------------------------------------------------------------------


def message_of(call: Callable[[], object]) -> tuple[str, float]:
    start = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call()
        except dcp.api.CheckpointException as error:
            return str(error), time.monotonic() - start
    return "no error", 0.0


def load_damaged(rank: int, path: str, sound: str) -> tuple[str, float]:
    failed = message_of(lambda: load(path, "columns"))
    check(load(sound, "columns")[0], "columns")
    return failed


def test_damage_that_one_rank_meets_is_told_to_all(tmp_path: Path, path: str) -> None:
    run_ranks(save, f"{tmp_path}/ck", world_size=RANKS)
    file = sorted(tmp_path.glob("ck/a*/*-00002.safetensors"))[0]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    for message, _ in run_ranks(load_damaged, f"{tmp_path}/ck", path, world_size=RANKS):
        assert "w rows 512:768" in message
        assert message.count("CorruptError") >= RANKS  # each rank's own error says so


class Failing(DefaultLoadPlanner):
    """A planner of a user's that fails at some point on one rank."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where

    def finish_plan(self, new_plan: Any) -> Any:
        self._fail_in("finish_plan")
        return super().finish_plan(new_plan)

    def resolve_tensor(self, read_item: Any) -> Any:
        self._fail_in("resolve_tensor")
        return super().resolve_tensor(read_item)

    def _fail_in(self, where: str) -> None:
        if where == self._where and dist.get_rank() == 1:
            raise KeyError(f"lost in {where}")


def load_and_fail(rank: int, path: str, where: str) -> tuple[str, float]:
    failed = message_of(lambda: load(path, "columns", planner=Failing(where)))
    check(load(path, "columns")[0], "columns")
    return failed


@pytest.mark.parametrize("where", ["resolve_tensor", "finish_plan"])
def test_a_planner_that_fails_on_one_rank_is_no_hang(path: str, where: str) -> None:
    for message, seconds in run_ranks(load_and_fail, path, where, world_size=2, environ=FRAIL):
        assert f"lost in {where}" in message
        assert seconds < NOTICED_S


def load_without_one(rank: int, path: str) -> tuple[str, float]:
    """Load; one rank dies in the middle of what it reads for all."""

    read_into = local._LocalReadableFile.read_into

    def killed(file: Any, offset: int, target: memoryview) -> int:
        if offset:  # behind all headers
            os.kill(os.getpid(), signal.SIGKILL)
        return read_into(file, offset, target)

    if rank == 1:
        local._LocalReadableFile.read_into = killed  # type: ignore[assignment, method-assign]
    start = time.monotonic()
    try:
        load(path, "columns")
    except Exception as error:  # noqa: BLE001 - of torch's collectives, whatever it is
        return str(error), time.monotonic() - start
    return "no error", 0.0


def test_a_rank_that_dies_while_it_reads_is_named_to_the_others(path: str) -> None:
    options = Options(timeout_s=200, environ=FRAIL)
    outcomes = try_ranks(load_without_one, path, world_size=RANKS, options=options)
    assert outcomes.pop(1).signal == signal.SIGKILL
    for one in outcomes:
        assert one.ended
        message, seconds = one.value
        assert message != "no error"
        assert seconds < NOTICED_S
        # DCP cannot gather the errors any more: what it raises names nobody.
        assert re.search(r"rank 1\b.*(lost|gone|dead|silent|ended)", one.output), one.output


# --- values per rank ---------------------------------------------------------------------------


def save_per_rank(rank: int, path: str) -> None:
    dc.save({"x": torch.ones(2), "mine": dc.PerRank(rank * 10)}, path)


def load_per_rank(rank: int, path: str, *, told: bool) -> object:
    group = dist.new_group([1, 2])
    if rank == 0:
        return None
    state: dict[str, Any] = {"x": torch.zeros(2), "mine": -1}
    reader = StorageReader(path, process_group=group if told else None)
    failed, _ = message_of(lambda: dcp.load(state, storage_reader=reader, process_group=group))
    return state["mine"] if failed == "no error" else failed


def test_values_per_rank_are_those_of_the_rank_in_the_group(tmp_path: Path) -> None:
    run_ranks(save_per_rank, f"{tmp_path}/a", world_size=2)
    assert run_ranks(load_told, f"{tmp_path}/a", world_size=3) == [None, 0, 10]
    # DCP of torch 2.7 tells of what a rank lacks before it asks the reader whether all are there.
    old = "Missing key in checkpoint state_dict: mine"
    told = "pass the same process_group= to both" if save_by_dcp_without_collectives() else old
    for message in run_ranks(load_untold, f"{tmp_path}/a", world_size=3)[1:]:
        assert told in str(message)


def load_told(rank: int, path: str) -> object:
    return load_per_rank(rank, path, told=True)


def load_untold(rank: int, path: str) -> object:
    return load_per_rank(rank, path, told=False)


def load_of_another_group(rank: int, path: str) -> str:
    group = dist.new_group([0, 1])
    reader = StorageReader(path, process_group=group)
    return message_of(lambda: dcp.load({"n": 0}, storage_reader=reader))[0]


def test_a_group_must_be_the_readers_own(path: str) -> None:
    for message in run_ranks(load_of_all, path, world_size=2):
        assert message == "no error"
    assert any(
        "pass the same process_group= to both" in m
        for m in run_ranks(load_of_another_group, path, world_size=3)
    )


def load_of_all(rank: int, path: str) -> str:
    group = dist.new_group([0, 1])
    reader = StorageReader(path, process_group=group)
    return message_of(lambda: dcp.load({"n": 0}, storage_reader=reader))[0]
