"""Background saves of real ranks: what they commit, what they say of failures, what they leave."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_ckpt as dc
from dist_ckpt.async_save.snapshots.job_folder import SHARED_MEMORY, JobFolder
from dist_ckpt.async_save.trainer import background_save, writer_handle
from long_mode import IS_LONG
from ranks import run_ranks, suspend_and_resume
from tests.core.saving.test_rank_save import NBYTES, beside_the_sample

pytestmark = pytest.mark.multi_process

ROWS = 1000
CALM = {
    "DIST_CKPT_HEARTBEAT_TIMEOUT_S": "15",
    "DIST_CKPT_JOIN_TIMEOUT_S": "30",
    "DIST_CKPT_VISIBILITY_TIMEOUT_S": "5",
}
FRAIL = {**CALM, "DIST_CKPT_HEARTBEAT_TIMEOUT_S": "4"}
RESULT_S = 60.0


@pytest.fixture
def job() -> Iterator[str]:
    """A job of its own; whatever is left of it is removed."""
    name = f"test-{uuid.uuid4().hex}"
    yield name
    folder = JobFolder(name)
    for one in folder.rank_folders():
        one.remove()
    folder.remove_if_empty()


def left_of(job: str) -> list[str]:
    return [str(path) for path in Path(SHARED_MEMORY).glob(f"dist_ckpt-*/{job}")]


def state_of(rank: int, world_size: int, step: int, num_rows: int = ROWS) -> dict[str, Any]:
    """Return a state of which every number says the step."""
    rows = torch.full((num_rows, 8), float(step))
    whole, first = world_size * num_rows, rank * num_rows
    small = {str(n): torch.full((n + 1,), step) for n in range(20)}
    return {
        "model": {"rows": dc.LocalShard(rows, (whole, 8), (first, 0)), **small},
        "progress": {"step": step},
        "mine": dc.PerRank(step + rank),
    }


def assign(state: dict[str, Any], step: int) -> None:
    """Do what an optimizer does: change the numbers where they lie."""
    model = state["model"]
    for name, value in model.items():
        (value.tensor if name == "rows" else value).fill_(step)
    state["progress"]["step"] = step


def steps_in(state: dict[str, Any]) -> set[float]:
    """Return all numbers that a state holds: one, if nothing is mixed."""
    tensors = [value.tensor if name == "rows" else value for name, value in state["model"].items()]
    found = {float(one) for tensor in tensors for one in tensor.aminmax()}
    return found | {float(state["progress"]["step"])}


def folder_of(root: str, step: int) -> str:
    return f"{root}/step-{step:08}"


# --- what is saved -----------------------------------------------------------------------------


def save_and_change(rank: int, root: str, job: str, world_size: int, rounds: int) -> list[Any]:
    state = state_of(rank, world_size, 0)
    with dc.AsyncSaver(job=job) as saver:
        saver.prepare(state)
        for step in range(1, rounds + 1):
            assign(state, step)
            handle = saver.save(state, folder_of(root, step), step=step)
            handle.wait_staged(0)
            assign(state, -step)  # at once: none of it may be saved
        report = handle.result(RESULT_S)
    assert report is not None
    assert (report.step, report.world_size, report.path) == (rounds, world_size, handle.path)
    # Of one layout with those before: docs/architecture.md says so too.
    assert (report.exchanges.num, report.collectives.num) == (4, 0)
    found = []
    for step in range(1, rounds + 1):
        loaded = state_of(rank, world_size, -1)
        dc.load(loaded, folder_of(root, step))
        found.append((steps_in(loaded), loaded["mine"].value))
    return found


@pytest.mark.parametrize("world_size", [1, 3])
def test_what_was_staged_is_saved_and_no_later_value(
    world_size: int, tmp_path: Path, job: str
) -> None:
    found = run_ranks(
        save_and_change, str(tmp_path), job, world_size, 6, world_size=world_size, environ=CALM
    )
    for rank, steps in enumerate(found):
        assert steps == [({float(step)}, rank) for step in range(1, 7)]
    for step in range(1, 7):
        assert dc.verify(folder_of(str(tmp_path), step), level="full").ok
    assert left_of(job) == []


def save_growing(rank: int, root: str, job: str) -> list[bool]:
    sound = []
    with dc.AsyncSaver(job=job) as saver:
        for step, size in enumerate((10, 1_000_000, 3, 2_000_000), start=1):
            # Another layout each time, and arenas that must grow under a writer that has them open.
            state = {"w": torch.full((size,), float(step)), f"only in {step}": torch.ones(step)}
            saver.save(state, folder_of(root, step), step=step)
    for step, size in enumerate((10, 1_000_000, 3, 2_000_000), start=1):
        loaded = {"w": torch.zeros(size), f"only in {step}": torch.zeros(step)}
        dc.load(loaded, folder_of(root, step))
        sound.append(bool((loaded["w"] == step).all() and loaded[f"only in {step}"].all()))
    return sound


def test_a_state_may_grow_and_be_another_from_save_to_save(tmp_path: Path, job: str) -> None:
    assert (
        run_ranks(save_growing, str(tmp_path), job, world_size=2, environ=CALM) == [[True] * 4] * 2
    )


FUSED = torch.arange(60.0).reshape(5, 12)


def pieces_of(rank: int, world_size: int) -> tuple[torch.Tensor, dc.ShardingConfig]:
    """Return the columns that a rank has of two fused matrices, and the rule."""
    rule = {"tp": 1, "pieces": [8, 4]}
    columns = torch.cat([part.chunk(world_size, 1)[rank] for part in FUSED.split([8, 4], 1)], 1)
    return columns, dc.ShardingConfig({"tp": world_size}, {"*": rule})


def save_fused(rank: int, root: str, job: str, world_size: int) -> None:
    columns, config = pieces_of(rank, world_size)
    state = {"model": {"w": columns.clone()}}
    with dc.AsyncSaver(job=job) as saver:
        for step in (1, 2):
            state["model"]["w"].copy_(columns * step)
            handle = saver.save(state, folder_of(root, step), step=step, sharding=config)
            handle.wait_staged(0)
            state["model"]["w"].fill_(-1)


def load_fused(rank: int, root: str, world_size: int) -> list[bool]:
    columns, config = pieces_of(rank, world_size)
    found = []
    for step in (1, 2):
        state = {"model": {"w": torch.zeros_like(columns)}}
        dc.load(state, folder_of(root, step), sharding=config)
        found.append(torch.equal(state["model"]["w"], columns * step))
    return found


def test_fused_weights_are_staged_piece_by_piece(tmp_path: Path, job: str) -> None:
    run_ranks(save_fused, str(tmp_path), job, 2, world_size=2, environ=CALM)
    with dc.open(folder_of(str(tmp_path), 2)) as checkpoint:
        assert torch.equal(checkpoint["model.w"][...].torch(), FUSED * 2)
    for world_size in (1, 4):
        found = run_ranks(load_fused, str(tmp_path), world_size, world_size=world_size)
        assert found == [[True, True]] * world_size


# --- failures ----------------------------------------------------------------------------------


def error_of(call: Callable[[], object]) -> tuple[str, str]:
    """Return the class and message of the error that a call must raise."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - what it is, is what is asked
        return type(error).__name__, str(error)
    raise AssertionError("no error")


def save_where_something_is(rank: int, root: str, job: str) -> list[Any]:
    state = state_of(rank, 2, 1)
    told: list[Any] = []
    with dc.AsyncSaver(job=job) as saver:
        saver.save(state, f"{root}/a", step=1).result(RESULT_S)
        taken = saver.save(state, f"{root}/a", step=1)  # there is a checkpoint
        # Of a failure that nobody has asked for, the next save tells, once, on every rank.
        taken.wait_staged(0)
        while not taken.done():
            pass
        told.append(error_of(lambda: saver.save(state, f"{root}/b", step=2)))
        saver.save(state, f"{root}/b", step=2).result(RESULT_S)
        told.append(error_of(lambda: taken.result(0)))
        # Who asked has been told.
        again = saver.save(state, f"{root}/a", step=1)
        told.append(type(again.exception(RESULT_S)).__name__)
        saver.save(state, f"{root}/c", step=3)
    return told


def test_a_failed_save_raises_at_the_next_one_and_the_saver_goes_on(
    tmp_path: Path, job: str
) -> None:
    found = run_ranks(save_where_something_is, str(tmp_path), job, world_size=2, environ=CALM)
    for first, second, third in found:
        assert first[0] == second[0] == third == "ExistsError"
        assert f"{tmp_path}/a: a checkpoint of step 1 is here" in first[1]
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "c"]
    assert left_of(job) == []


def close_after_a_failure(rank: int, root: str, job: str) -> tuple[str, str]:
    saver = dc.AsyncSaver(job=job)
    saver.save({"w": torch.ones(3)}, f"{root}/a").result(RESULT_S)
    saver.save({"w": torch.ones(3)}, f"{root}/a")
    found = error_of(saver.close)
    saver.close()
    assert error_of(lambda: saver.save({}, f"{root}/b"))[0] == "ValueError"
    return found


def test_closing_raises_what_nobody_was_told_of(tmp_path: Path, job: str) -> None:
    for kind, message in run_ranks(
        close_after_a_failure, str(tmp_path), job, world_size=2, environ=CALM
    ):
        assert kind == "ExistsError"
        assert "a checkpoint is here" in message


def writer_of(job: str, rank: int) -> int:
    owner = JobFolder(job).rank(rank).owner("writer")
    assert owner is not None
    return owner.pid


def await_end(job: str, rank: int) -> None:
    """Wait until a rank's writer is gone."""
    until = time.monotonic() + RESULT_S
    while JobFolder(job).rank(rank).owner("writer") is not None:
        assert time.monotonic() < until, "the writer does not end"
        time.sleep(0.01)


def lose_a_writer(rank: int, root: str, job: str) -> list[Any]:
    state = state_of(rank, 2, 1)
    told: list[Any] = []
    with dc.AsyncSaver(job=job) as saver:
        saver.save(state, f"{root}/a", step=1).result(RESULT_S)
        if rank == 1:  # while it has nothing to do
            os.kill(writer_of(job, 1), signal.SIGKILL)
            await_end(job, 1)
        saver.save(state, f"{root}/b", step=2).result(RESULT_S)
        told.append(saver.num_restarts)
        if rank == 1:
            os.kill(writer_of(job, 1), signal.SIGSTOP)
        handle = saver.save(state, f"{root}/c", step=3)
        if rank == 1:  # while it has
            os.kill(writer_of(job, 1), signal.SIGKILL)
        told.append(error_of(lambda: handle.result(RESULT_S)))
        saver.save(state, f"{root}/c", step=4).result(RESULT_S)
        told.append(saver.num_restarts)
    return told


def test_a_dead_writer_is_named_and_replaced(tmp_path: Path, job: str) -> None:
    found = run_ranks(lose_a_writer, str(tmp_path), job, world_size=2, environ=FRAIL)
    assert [told[0] for told in found] == [0, 1]
    assert [told[2] for told in found] == [0, 2]
    for told in found:
        assert told[1][0] == "RankError"
        assert "rank 1" in told[1][1]
    for name in "abc":
        assert dc.verify(f"{tmp_path}/{name}", level="full").ok
    assert left_of(job) == []


def freeze_a_writer(rank: int, root: str, job: str) -> list[Any]:
    writer_handle.PING_INTERVAL_S, writer_handle.ANSWER_TIMEOUT_S = 0.5, 1.0
    with dc.AsyncSaver(job=job) as saver:
        os.kill(writer_of(job, rank), signal.SIGSTOP)
        handle = saver.save(state_of(rank, 1, 1), f"{root}/a", step=1)
        told: list[Any] = [error_of(handle.result)]
        saver.save(state_of(rank, 1, 2), f"{root}/a", step=2).result(RESULT_S)
        return [*told, saver.num_restarts]


def test_a_writer_that_is_frozen_is_ended_and_replaced(tmp_path: Path, job: str) -> None:
    ((error, num_restarts),) = run_ranks(
        freeze_a_writer, str(tmp_path), job, world_size=1, environ=CALM
    )
    assert error[0] == "RankError"
    assert "signal 9" in error[1]
    assert num_restarts == 1
    assert dc.open(f"{tmp_path}/a").step == 2


def freeze_while_staging(rank: int, root: str, job: str, folder: str) -> tuple[str, str, bool]:
    state = state_of(rank, 2, 1)
    pid = Path(folder, "pid")
    if rank == 1:
        module: Any = background_save
        stage = module.stage

        def freeze(*args: Any) -> None:
            pid.with_suffix(".new").write_text(str(os.getpid()))
            pid.with_suffix(".new").rename(pid)
            os.kill(os.getpid(), signal.SIGSTOP)
            stage(*args)

        module.stage = freeze
    with dc.AsyncSaver(job=job) as saver:
        handle = saver.save(state, f"{root}/a", step=1)
        kind, message = error_of(lambda: handle.result(RESULT_S))
        if rank == 0:
            os.kill(int(pid.read_text()), signal.SIGCONT)
        else:
            module.stage = stage
        report = saver.save(state, f"{root}/a", step=2).result(RESULT_S)
    return kind, message, report is not None


def test_a_trainer_that_is_frozen_while_it_stages_is_named_by_all_and_saves_again(
    tmp_path: Path, job: str
) -> None:
    (tmp_path / "root").mkdir()
    found = run_ranks(
        freeze_while_staging,
        str(tmp_path / "root"),
        job,
        str(tmp_path),
        world_size=2,
        environ={**CALM, "DIST_CKPT_JOIN_TIMEOUT_S": "3"},
    )
    for kind, message, is_saved in found:
        assert kind == "RankError"
        assert "the trainer of rank 1 (process " in message
        assert " is stopped) has staged nothing more of " in message
        assert is_saved
    assert dc.open(f"{tmp_path}/root/a").step == 2


def save_unequal_replicas(rank: int, root: str, job: str) -> list[str]:
    w = torch.zeros(NBYTES, dtype=torch.uint8)
    w[beside_the_sample()] = rank
    with dc.AsyncSaver(root, job=job) as saver:
        errors = [
            saver.save({"w": w}, folder_of(root, step), step=step).exception() for step in (1, 2)
        ]
    return [type(error).__name__ for error in errors]


def test_replicas_that_a_background_save_refused_are_compared_in_full_again(
    tmp_path: Path, job: str
) -> None:
    found = run_ranks(save_unequal_replicas, str(tmp_path), job, world_size=2, environ=CALM)
    assert found == [["UnequalReplicasError"] * 2] * 2


def save_a_state_that_cannot_be_saved(rank: int, root: str, job: str) -> list[Any]:
    with dc.AsyncSaver(job=job) as saver:
        odd: Any = {"w": torch.ones(3), "x": object() if rank == 1 else 1}
        told = [error_of(lambda: saver.save(odd, f"{root}/a"))]
        told.append(error_of(lambda: saver.save({"w": torch.ones(3)}, f"{root}/{rank}")))
        unequal = saver.save({"w": torch.full((3,), rank)}, f"{root}/b")
        told.append(error_of(lambda: unequal.result(RESULT_S)))
        saver.save({"w": torch.ones(3)}, f"{root}/c").result(RESULT_S)
    return told


def test_a_state_that_cannot_be_saved_is_refused_at_once_on_all_ranks(
    tmp_path: Path, job: str
) -> None:
    for odd, elsewhere, unequal in run_ranks(
        save_a_state_that_cannot_be_saved, str(tmp_path), job, world_size=2, environ=CALM
    ):
        assert (odd[0], elsewhere[0], unequal[0]) == (
            "TypeError",
            "ValueError",
            "UnequalReplicasError",
        )
        assert "x" in odd[1]
        assert "different path" in elsewhere[1]
        assert "w[" in unequal[1]
    assert os.listdir(tmp_path) == ["c"]


# --- a job that is suspended ---------------------------------------------------------------------

SUSPENDED_S = 4.0
SUSPENDED = {**CALM, "DIST_CKPT_HEARTBEAT_TIMEOUT_S": "2"}


def save_until_resumed(rank: int, root: str, job: str, folder: str) -> tuple[int, int]:
    """Save in the background, so slowly that it is suspended meanwhile, and in the foreground."""
    state, resumed, num = state_of(rank, 2, 1, 1500), Path(folder, "resumed"), 0
    with dc.AsyncSaver(job=job, max_bytes_per_s=16_384) as saver:
        handle = saver.save(state, f"{root}/a", step=1)
        for pid in (os.getpid(), writer_of(job, rank)):
            Path(folder, f"{pid}.pid").touch()
        is_resumed = False
        while not is_resumed:
            num += 1
            dc.save(state, f"{root}/b", step=num, overwrite=True)
            flag = torch.tensor(resumed.exists())
            torch.distributed.broadcast(flag, 0)
            is_resumed = bool(flag)
        report = handle.result(RESULT_S)
    assert report is not None
    return report.step or 0, num


@pytest.mark.waits
def test_a_whole_job_that_is_suspended_and_resumed_goes_on(tmp_path: Path, job: str) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "told").mkdir()
    suspender = threading.Thread(
        target=suspend_and_resume, args=(tmp_path / "told", 4, SUSPENDED_S)
    )
    suspender.start()
    args = (str(tmp_path / "root"), job, str(tmp_path / "told"))
    found = run_ranks(save_until_resumed, *args, world_size=2, store="rank 0", environ=SUSPENDED)
    suspender.join()
    assert found[0] == found[1]
    assert found[0][0] == 1
    for name in "ab":
        assert dc.verify(f"{tmp_path}/root/{name}", level="full").ok


# --- busy --------------------------------------------------------------------------------------


def skip(rank: int, root: str, job: str) -> tuple[list[bool], int]:
    state = state_of(rank, 2, 0)
    with dc.AsyncSaver(job=job, when_busy="skip") as saver:
        saver.save(state, f"{root}/0", step=0).result(RESULT_S)
        torch.distributed.barrier()  # a writer asks another's store how that save has ended
        os.kill(writer_of(job, rank), signal.SIGSTOP)
        torch.distributed.barrier()
        handles = [saver.save(state, f"{root}/{step}", step=step) for step in (1, 2, 3)]
        os.kill(writer_of(job, rank), signal.SIGCONT)
        reports = [handle.result(RESULT_S) for handle in handles]
        assert [report is None for report in reports] == [handle.skipped for handle in handles]
        return [handle.skipped for handle in handles], saver.num_skipped


def test_a_save_is_skipped_while_both_arenas_are_busy(tmp_path: Path, job: str) -> None:
    found = run_ranks(skip, str(tmp_path), job, world_size=2, environ=CALM)
    assert found == [([False, False, True], 1)] * 2
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "2"]


def wait(rank: int, root: str, job: str) -> float:
    state = state_of(rank, 2, 0)
    with dc.AsyncSaver(job=job, max_bytes_per_s=200_000) as saver:
        handles = []
        for step in range(5):
            assign(state, step)
            handles.append(saver.save(state, f"{root}/{step}", step=step))
            assert sum(not handle.done() for handle in handles) <= 2
    loaded = state_of(rank, 2, -1)
    dc.load(loaded, f"{root}/4")
    return steps_in(loaded).pop()


def test_a_save_waits_while_both_arenas_are_busy(tmp_path: Path, job: str) -> None:
    assert run_ranks(wait, str(tmp_path), job, world_size=2, environ=CALM) == [4.0, 4.0]
    assert sorted(os.listdir(tmp_path)) == [*"01234"]


def supersede(rank: int, root: str, job: str) -> tuple[list[bool], int]:
    state = state_of(rank, 2, 0)
    # The first takes long, so that the others queue behind it.
    with dc.AsyncSaver(job=job, when_busy="supersede", max_bytes_per_s=20_000) as saver:
        handles = []
        for step in range(4):
            assign(state, step)
            handles.append(saver.save(state, f"{root}/{step}", step=step))
        # What cannot be saved supersedes nothing.
        odd = {**state, "x": object() if rank == 1 else 1}
        assert error_of(lambda: saver.save(odd, f"{root}/odd"))[0] == "TypeError"
        reports = [handle.result(RESULT_S) for handle in handles]
        assert [report is None for report in reports] == [one.superseded for one in handles]
        return [handle.superseded for handle in handles], saver.num_superseded


def test_a_save_supersedes_the_one_that_is_queued(tmp_path: Path, job: str) -> None:
    found = run_ranks(supersede, str(tmp_path), job, world_size=2, environ=CALM)
    assert found == [([False, True, True, False], 2)] * 2
    assert sorted(os.listdir(tmp_path)) == ["0", "3"]
    assert dc.verify(f"{tmp_path}/3", level="full").ok


# --- misuse ------------------------------------------------------------------------------------


def misuse(rank: int, root: str, job: str) -> list[str]:
    told = []
    saver = dc.AsyncSaver(job=job, max_bytes_per_s=20_000)
    handle = saver.save({"w": torch.ones(10_000)}, f"{root}/a")
    told.append(error_of(lambda: handle.result(0.01))[0])
    told.append(error_of(lambda: dc.AsyncSaver(job=job))[0])
    read_end, write_end = os.pipe()
    if (child := os.fork()) == 0:
        kind, _ = error_of(lambda: saver.save({"w": torch.ones(3)}, f"{root}/b"))
        os.write(write_end, kind.encode())
        os._exit(0)
    os.waitpid(child, 0)
    told.append(os.read(read_end, 100).decode())
    assert handle.result(RESULT_S) is not None
    saver.close()
    told.append(error_of(lambda: saver.save({"w": torch.ones(3)}, f"{root}/b"))[0])
    told.append(error_of(lambda: dc.AsyncSaver().restore({}))[0])
    return told


def test_a_saver_is_used_by_one_process_until_it_is_closed(tmp_path: Path, job: str) -> None:
    (told,) = run_ranks(misuse, str(tmp_path), job, world_size=1, environ=CALM)
    assert told == ["TimeoutError", "ConflictError", "ValueError", "ValueError", "ValueError"]
    assert os.listdir(tmp_path) == ["a"]


def disagree(rank: int, root: str, job: str) -> list[Any]:
    """Make savers that ranks ask for differently, or that one of them cannot have; then a good one.

    Return for each what it raises, whether anything of its job is there then, and what was warned.
    """
    told: list[Any] = []

    def make(**options: Any) -> None:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            error = error_of(lambda: dc.AsyncSaver(**options))
            gc.collect()
        told.append((error, os.path.exists(left), [str(one.message) for one in said]))
        torch.distributed.barrier()

    left = f"{SHARED_MEMORY}/dist_ckpt-{os.geteuid()}/{job}-{rank}"
    make(job=f"{job}-{rank}")
    make(**({"root": f"{root}/{rank}"} if rank else {"job": f"{job}-{rank}"}))
    make(job=f"{job}-{rank}", drain_timeout_s=60 if rank else -1)
    lock = JobFolder(job).rank(rank).lock("trainer") if rank else None
    make(job=job)
    if lock is not None:
        lock.release()
    torch.distributed.barrier()
    with dc.AsyncSaver(job=job) as saver:
        saver.save(state_of(rank, 2, 1), f"{root}/a", step=1).result(RESULT_S)
    return told


def test_ranks_that_make_different_savers_are_all_told_and_none_is_made(
    tmp_path: Path, job: str
) -> None:
    for told in run_ranks(disagree, str(tmp_path), job, world_size=2, environ=CALM):
        different, mixed, mistaken, taken = told
        for (kind, message), is_there, _ in (different, mixed):
            assert kind == "ValueError"
            assert f"call AsyncSaver with different job: rank 0: '{job}-0'; rank 1: " in message
            assert not is_there
        assert mistaken[0][0] == "ValueError"
        assert mistaken[0][1].startswith("rank 0 (host ")
        assert "drain_timeout_s=-1" in mistaken[0][1]
        assert taken[0][0] == "ConflictError"
        assert "is open in this process" in taken[0][1]
        assert "rank 1" in taken[0][1]
        assert taken[2] == []  # rank 0 has closed what it had
    assert dc.verify(tmp_path / "a").ok
    assert left_of(job) == []


def drop(rank: int, root: str, job: str) -> list[Any]:
    """Lose a saver to an error, which keeps it in a cycle; then make another."""
    state = state_of(rank, 2, 1)
    handles = []

    def save_and_fail() -> None:
        saver = dc.AsyncSaver(job=job, max_bytes_per_s=100_000)
        handles.append(saver.save(state, f"{root}/a", step=1))
        error = RuntimeError("a mistake of the user's")
        raise error

    told = [error_of(save_and_fail)[0], handles[0].done()]
    with dc.AsyncSaver(job=job) as saver:
        report = handles[0].result(RESULT_S)
        told.append(report and report.step)
        told.append(saver.restore(state_of(rank, 2, -1)))
        saver.save(state, f"{root}/b", step=2)
    return told


def test_a_saver_that_is_dropped_with_a_save_under_way_makes_room_for_the_next(
    tmp_path: Path, job: str
) -> None:
    found = run_ranks(drop, str(tmp_path), job, world_size=2, environ=CALM)
    assert found == [["RuntimeError", False, 1, 1]] * 2
    assert all(dc.verify(tmp_path / name).ok for name in "ab")
    assert left_of(job) == []


class SavesMeanwhile:
    """An object of a state that is saved: it saves as well when it is asked for its own."""

    def __init__(self, saver: dc.AsyncSaver, root: str) -> None:
        self.saver, self.root = saver, root
        self.told: list[tuple[str, str]] = []

    def state_dict(self) -> dict[str, Any]:
        for call in (self.save, lambda: self.saver.restore({}), self.saver.close):
            thread = threading.Thread(target=lambda c=call: self.told.append(error_of(c)))
            thread.start()
            thread.join()
            self.told.append(error_of(call))
        return {"w": torch.ones(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def save(self) -> None:
        self.saver.save({"w": torch.zeros(3)}, f"{self.root}/b")


def save_while_saving(rank: int, root: str, job: str) -> list[tuple[str, str]]:
    with dc.AsyncSaver(job=job) as saver:
        state = SavesMeanwhile(saver, root)
        saver.save({"odd": state}, f"{root}/a").result(RESULT_S)
        saver.save({"w": torch.ones(3)}, f"{root}/c").result(RESULT_S)
    return state.told


def test_a_save_is_refused_while_another_is_staged(tmp_path: Path, job: str) -> None:
    (told,) = run_ranks(save_while_saving, str(tmp_path), job, world_size=1, environ=CALM)
    assert len(told) >= 6
    assert all(kind == "ValueError" and "in a call already" in text for kind, text in told), told
    assert sorted(os.listdir(tmp_path)) == ["a", "c"]


# --- many --------------------------------------------------------------------------------------


def held_by(pid: int, job: str) -> tuple[int, int, int]:
    """Return what a process holds: descriptors, threads, and files of the job in shared memory."""
    folder = Path(f"/proc/{pid}")
    num_files = sum(len(names) for path in left_of(job) for _, _, names in os.walk(path))
    return len(os.listdir(folder / "fd")), len(os.listdir(folder / "task")), num_files


def resident_nbytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def save_often(rank: int, root: str, job: str, rounds: int) -> dict[str, Any]:
    state: dict[str, Any] = {"rows": torch.zeros(2000, 8), "step": 0}
    state["small"] = [torch.zeros(3) for _ in range(5)]
    wrong: list[int] = []
    held, nbytes = [], []

    def check(step: int, handle: dc.SaveHandle) -> None:
        assert handle.result(RESULT_S) is not None
        loaded: dict[str, Any] = {}
        dc.load(loaded, handle.path)
        numbers = {float(loaded["step"])}
        for tensor in (loaded["rows"], *loaded["small"]):
            numbers |= {float(one) for one in tensor.unique()}
        if numbers != {float(step)}:
            wrong.append(step)
        dc.delete(handle.path)

    with dc.AsyncSaver(job=job) as saver:
        before: tuple[int, dc.SaveHandle] | None = None
        for step in range(1, rounds + 1):
            for tensor in (state["rows"], *state["small"]):
                tensor.fill_(step)
            state["step"] = step
            handle = saver.save(state, f"{root}/{step}", step=step)
            for tensor in (state["rows"], *state["small"]):
                tensor.fill_(-step)
            if before is not None:
                check(*before)
            before = step, handle
            if step % 100 == 0:
                # What cycles hold until the collector's turn comes is no leak, but the heap grows.
                gc.collect()
            if step in (rounds // 5, rounds):
                assert handle.result(RESULT_S) is not None
                pids = os.getpid(), writer_of(job, rank)
                held.append([held_by(pid, job) for pid in pids])
                nbytes.append([resident_nbytes(pid) for pid in pids])
        assert before is not None
        check(*before)
    return {"wrong": wrong, "held": held, "nbytes": nbytes}


@pytest.mark.slow
@pytest.mark.sampled(3)
def test_many_saves_hold_what_was_staged_and_leak_nothing(tmp_path: Path, job: str) -> None:
    num = 2000 if IS_LONG else 200
    (found,) = run_ranks(
        save_often, str(tmp_path), job, num, world_size=1, environ=CALM, timeout_s=280
    )
    assert found["wrong"] == []
    for (fds, threads, files), now in zip(*found["held"], strict=True):
        assert (fds, files) == now[::2]
        # Of a load or save that has just ended some threads are about to.
        assert now[1] <= threads + 8
    for then, now in zip(*found["nbytes"], strict=True):
        assert now < then + (8 << 20)
    assert os.listdir(tmp_path) == []
    assert left_of(job) == []
