"""Print what torch.distributed.checkpoint (DCP) and dist_ckpt do in the same ten accidents.

    .venv/bin/python scripts/rival_failures.py

Both run for real, on the CPU; nothing in the table is written down beforehand.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import sys
import tempfile
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dist_ckpt as dc

State = dict[str, Any]
RANKS_LIMIT_S = 60
MAX_CHARS = 400


# --- the accidents: each function tells in a few words what happened ----------------------------


def dcp_torn_overwrite(folder: Path) -> str:
    def ranks(rank: int) -> None:
        dcp.save({"w": sharded(1.0)}, checkpoint_id=folder)
        writer = dcp.FileSystemWriter(folder)
        if rank == 1:
            writer.write_data = lambda *_: os._exit(9)  # type: ignore[method-assign]
        dcp.save({"w": sharded(2.0)}, storage_writer=writer)

    run_ranks(folder, ranks)
    state = {"w": torch.zeros(8)}
    dcp.load(state, checkpoint_id=folder)
    return f"loads {values(state['w'])}"


def our_torn_overwrite(folder: Path) -> str:
    def ranks(rank: int) -> None:
        dc.save({"w": sharded(1.0)}, folder)
        if rank == 1:
            os.fsync = lambda fd: os._exit(9)
        dc.save({"w": sharded(2.0)}, folder, overwrite=True)

    run_ranks(folder, ranks)
    state = {"w": torch.zeros(8)}
    dc.load(state, folder)
    return f"loads {values(state['w'])}"


def dcp_flipped_bit(folder: Path) -> str:
    dcp.save({"w": torch.ones(1000)}, checkpoint_id=folder)
    flip_a_bit(folder)
    state = {"w": torch.zeros(1000)}
    dcp.load(state, checkpoint_id=folder)
    return f"loads; {int((state['w'] != 1).sum())} of 1000 elements is wrong"


def our_flipped_bit(folder: Path) -> str:
    dc.save({"w": torch.ones(1000)}, folder)
    flip_a_bit(folder)
    return error_of(lambda: dc.load({"w": torch.zeros(1000)}, folder))


def dcp_swallowed_write_error(folder: Path) -> str:
    state = {"a": torch.ones(1000), "b": torch.ones(1000)}
    with full_disk(lambda: threading.current_thread() is not threading.main_thread()):
        outcome = error_of(
            lambda: dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, thread_count=2))
        )
    loaded = error_of(lambda: dcp.load(dict(state), checkpoint_id=folder))
    return f"save: {outcome}; load: {loaded}"


def our_swallowed_write_error(folder: Path) -> str:
    with full_disk(lambda: True):
        return "save: " + error_of(lambda: dc.save({"a": torch.ones(1000)}, folder))


def dcp_mixed_per_rank_state(folder: Path) -> str:
    def ranks(rank: int) -> str:
        mine = torch.tensor(float(rank))
        dcp.save({"rng": mine, "pos": mine.clone()}, checkpoint_id=folder)
        state = {"rng": torch.tensor(-1.0), "pos": torch.tensor(-1.0)}
        dcp.load(state, checkpoint_id=folder)
        return f"rank {rank} gets rng of {state['rng']:.0f}, pos of {state['pos']:.0f}"

    return "; ".join(run_ranks(folder, ranks))


def our_mixed_per_rank_state(folder: Path) -> str:
    def ranks(rank: int) -> str:
        mine = torch.tensor(float(rank))
        return error_of(lambda: dc.save({"rng": mine, "pos": mine.clone()}, folder))

    def per_rank(rank: int) -> str:
        dc.save({"rng": dc.PerRank(rank)}, folder / "per_rank")
        state = {"rng": dc.PerRank(None)}
        dc.load(state, folder / "per_rank")
        return f"rank {rank} gets rng of {state['rng'].value}"

    refused = textwrap.shorten(run_ranks(folder, ranks)[0], MAX_CHARS // 2)
    return f"save: {refused}; with dc.PerRank: {'; '.join(run_ranks(folder, per_rank))}"


def dcp_silent_cast(folder: Path) -> str:
    dcp.save({"w": torch.tensor([1.7, 2.9, 1e10])}, checkpoint_id=folder)
    state = {"w": torch.zeros(3, dtype=torch.int32)}
    dcp.load(state, checkpoint_id=folder)
    return f"[1.7, 2.9, 1e10] loads as {values(state['w'])}"


def our_silent_cast(folder: Path) -> str:
    dc.save({"w": torch.tensor([1.7, 2.9, 1e10])}, folder)
    return error_of(lambda: dc.load({"w": torch.zeros(3, dtype=torch.int32)}, folder))


def dcp_lost_structure(folder: Path) -> str:
    dcp.save({"d": {0: {"step": 5}}}, checkpoint_id=folder)
    state: State = {"d": {0: {"step": -1}}}
    dcp.load(state, checkpoint_id=folder)
    return f"{{0: {{'step': 5}}}} loads as {state['d']}"


def our_lost_structure(folder: Path) -> str:
    dc.save({"d": {0: {"step": 5}}}, folder)
    state: State = {"d": {0: {"step": -1}}}
    dc.load(state, folder)
    return f"{{0: {{'step': 5}}}} loads as {state['d']}"


def dcp_no_coverage_check(folder: Path) -> str:
    def ranks(_: int) -> None:
        dcp.save({"w": sharded(1.0)}, checkpoint_id=folder, use_collectives=False)

    run_ranks(folder, ranks)
    if not (folder / "__0.metadata").exists():
        return "torch 2.7 cannot: all ranks write one metadata file"
    state = {"w": torch.full((8,), -7.0)}
    reader = dcp.FileSystemReader(folder)
    one = {"checkpoint_id": folder, "storage_reader": reader, "no_dist": True}
    # What torch calls rank-local checkpoints; each rank's metadata lists only its own part.
    (folder / ".metadata").write_bytes((folder / "__0.metadata").read_bytes())
    dcp.load(state, **one)
    return f"half of it saved: loads {values(state['w'])}"


def our_no_coverage_check(folder: Path) -> str:
    half = dc.LocalShard(torch.ones(4), global_shape=(8,), offset=(0,))
    return "half of it: save: " + error_of(lambda: dc.save({"w": half}, folder))


def dcp_half_applied_load(folder: Path) -> str:
    state: State = {"a": {"w": torch.ones(1000)}, "b": {"w": torch.ones(1000)}}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, thread_count=2))
    return half_applied(folder, "*_1.distcp", lambda into: dcp.load(into, checkpoint_id=folder))


def our_half_applied_load(folder: Path) -> str:
    state: State = {"a": {"w": torch.ones(1000)}, "b": {"w": torch.ones(1000)}}
    dc.save(state, folder)
    return half_applied(folder, "b-*.safetensors", lambda into: dc.load(into, folder))


def dcp_reused_buffers(folder: Path) -> str:
    first, second = folder / "1", folder / "2"
    may_write = threading.Event()

    class SlowWriter(dcp.FileSystemWriter):
        def write_data(self, *args: Any, **kwargs: Any) -> Any:
            may_write.wait(RANKS_LIMIT_S)
            return super().write_data(*args, **kwargs)

    def ranks(_: int) -> None:
        state = {"w": torch.tensor(1.0)}
        writer = SlowWriter(first, cache_staged_state_dict=True)
        handle = dcp.async_save(state, storage_writer=writer)
        state["w"].fill_(2.0)
        writer.stage(state)  # the next save's staging
        may_write.set()
        assert isinstance(handle, Future)
        handle.result(timeout=RANKS_LIMIT_S)

    run_ranks(second, ranks, count=1)
    loaded = {"w": torch.tensor(0.0)}
    dcp.load(loaded, checkpoint_id=first)
    return f"the checkpoint of step 1 holds the {loaded['w']:.0f}.0 of step 2"


def our_reused_buffers(folder: Path) -> str:
    state = {"w": torch.tensor(1.0)}
    with dc.AsyncSaver() as saver:
        saver.save(state, folder / "1")
        state["w"].fill_(2.0)
        saver.save(state, folder / "2")  # while the first one may still be written
    loaded = {"w": torch.tensor(0.0)}
    dc.load(loaded, folder / "1")
    return f"the checkpoint of step 1 holds {loaded['w']:.1f}"


def dcp_stale_plan(folder: Path) -> str:
    for name, tensor in stale_plan_steps():
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        dcp.save({"w": tensor}, checkpoint_id=folder / name, planner=planner)
    found = dcp.FileSystemReader(folder / "2").read_metadata().state_dict_metadata["w"]
    assert isinstance(found, TensorStorageMetadata)
    whole = folder / "whole.pt"
    dcp_to_torch_save(folder / "2", whole)
    loaded = torch.load(whole)  # noqa: TID251  (torch's own file)
    return (
        f"1e10 in float64 is listed as {found.properties.dtype}, converts to {values(loaded['w'])}"
    )


def our_stale_plan(folder: Path) -> str:
    for name, tensor in stale_plan_steps():
        dc.save({"w": tensor}, folder / name)
    state: State = {}
    dc.load(state, folder / "2")
    return f"1e10 in float64 loads as {values(state['w'])}, {state['w'].dtype}"


# --- what the accidents are made of -------------------------------------------------------------


def sharded(value: float) -> torch.Tensor:
    """Return eight elements over all ranks. Every rank calls this."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(torch.full((8,), value), mesh, [Shard(0)])


def values(tensor: torch.Tensor) -> str:
    return "[" + ", ".join(f"{value:g}" for value in tensor.flatten().tolist()) + "]"


def flip_a_bit(folder: Path) -> None:
    """Flip one bit in the largest file, late enough to be inside the tensor."""
    largest = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) * 3 // 4] ^= 1
    largest.write_bytes(data)


def half_applied(folder: Path, missing: str, load: Callable[[State], object]) -> str:
    """Remove a file, load, and tell which tensors the failing load has changed."""
    next(folder.rglob(missing)).unlink()
    state = {name: {"w": torch.zeros(1000)} for name in ("a", "b")}
    error = error_of(lambda: load(state))
    changed = [name for name in ("a", "b") if state[name]["w"].any()]
    return f"{error}; {' and '.join(changed) or 'nothing'} was overwritten"


def stale_plan_steps() -> list[tuple[str, torch.Tensor]]:
    """Return what a run saves that changes a tensor from float16 to float64."""
    return [
        ("1", torch.ones(2, dtype=torch.float16)),
        ("2", torch.full((2,), 1e10, dtype=torch.float64)),
    ]


@contextmanager
def full_disk(is_for_thread: Callable[[], bool]) -> Iterator[None]:
    """Let the disk be full, for anything larger than a few notes."""
    fsync = os.fsync

    def failing(fd: Any) -> None:
        status = os.fstat(fd)
        if is_for_thread() and stat.S_ISREG(status.st_mode) and status.st_size > 4000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(fd)

    os.fsync = failing
    try:
        yield
    finally:
        os.fsync = fsync


def error_of(action: Callable[[], object]) -> str:
    try:
        action()
    except BaseException as error:  # noqa: BLE001  (DCP's error is no Exception)
        if isinstance(error, dcp.CheckpointException):
            error = error.failures[0][0]
        return f"{type(error).__name__}: {error}"
    return "success"


def run_ranks(folder: Path, function: Callable[[int], str | None], count: int = 2) -> list[str]:
    """Run `function(rank)` in `count` forked ranks over gloo; return what each of them returned."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    meeting = Path(tempfile.mkdtemp(dir=folder.parent))
    pids = []
    for rank in range(count):
        if (pid := os.fork()) == 0:
            be_a_rank(meeting, function, rank, count)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    answers = (meeting / f"answer-{rank}" for rank in range(count))
    return [path.read_text() if path.exists() else "died" for path in answers]


def be_a_rank(meeting: Path, function: Callable[[int], str | None], rank: int, count: int) -> None:
    """Join the other ranks, run, and end this process without a return."""
    try:
        with open(os.devnull, "w") as null, redirect_stderr(null):
            threading.Timer(RANKS_LIMIT_S, os._exit, (1,)).start()
            store = dist.FileStore(str(meeting / "store"), count)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
            (meeting / f"answer-{rank}").write_text(function(rank) or "")
    finally:
        os._exit(0)


@dataclass(frozen=True)
class Accident:
    """One row of the table."""

    name: str
    with_dcp: Callable[[Path], str]
    with_dist_ckpt: Callable[[Path], str]


ACCIDENTS = (
    Accident("a rank dies while it overwrites", dcp_torn_overwrite, our_torn_overwrite),
    Accident("a bit flips on disk", dcp_flipped_bit, our_flipped_bit),
    Accident("the disk is full", dcp_swallowed_write_error, our_swallowed_write_error),
    Accident("every rank has its own value", dcp_mixed_per_rank_state, our_mixed_per_rank_state),
    Accident("the dtype has changed", dcp_silent_cast, our_silent_cast),
    Accident("keys are ints", dcp_lost_structure, our_lost_structure),
    Accident("half of a tensor is missing", dcp_no_coverage_check, our_no_coverage_check),
    Accident("a file is missing", dcp_half_applied_load, our_half_applied_load),
    Accident("training goes on during a save", dcp_reused_buffers, our_reused_buffers),
    Accident("a dtype changes between saves", dcp_stale_plan, our_stale_plan),
)


def main() -> None:
    warnings.simplefilter("ignore")
    threading.excepthook = lambda _: None  # DCP's helper thread; what came of it is in the table
    logging.disable(logging.WARNING)
    os.environ.setdefault("DIST_CKPT_HEARTBEAT_TIMEOUT_S", "3")
    for number, accident in enumerate(ACCIDENTS, start=1):
        print(f"{number}. {accident.name}")
        for who, run in (("DCP", accident.with_dcp), ("dist_ckpt", accident.with_dist_ckpt)):
            with tempfile.TemporaryDirectory() as folder:
                text = line_of(run, Path(folder) / "checkpoint").replace(f"{folder}/", "")
            line = f"{who:9} {textwrap.shorten(text, MAX_CHARS)}"
            print(textwrap.fill(line, 100, initial_indent="   ", subsequent_indent=" " * 13))
        sys.stdout.flush()


def line_of(run: Callable[[Path], str], folder: Path) -> str:
    try:
        return run(folder)
    except Exception as error:  # noqa: BLE001  (the other accidents are still worth seeing)
        return f"NOT SHOWN: {type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
