"""Read once, by real ranks on simulated hosts: what each host fetches, and ranks that are lost."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dist_ckpt as dc
from dist_ckpt.core.comm.collectives.host_links import HostLinks
from dist_ckpt.core.storage.local.local_storage import LocalStorage
from ranks import Options, run_ranks, try_ranks

pytestmark = [pytest.mark.multi_process, pytest.mark.sampled(2)]

RANKS = 4
SILENCE_S = 6
# From the death to the error it takes silence, the age of the last beat and a look. On a busy
# machine it takes longer; what waits for anything else waits longer than this.
NOTICED_S = 150
FRAIL = {"DIST_CKPT_HEARTBEAT_TIMEOUT_S": str(SILENCE_S), "DIST_CKPT_JOIN_TIMEOUT_S": "1000"}

SHAPE = (1024, 2048)
NAMES = tuple(f"w{n}" for n in range(5))
STORED_NBYTES = len(NAMES) * 4 * SHAPE[0] * SHAPE[1]


def whole(name: str) -> torch.Tensor:
    """Return a tensor as it is saved: no two elements near each other are equal."""
    numel = SHAPE[0] * SHAPE[1]
    return torch.arange(numel, dtype=torch.float32).view(SHAPE) + NAMES.index(name)


def by_rows(rank: int, path: str) -> None:
    """Save tensors that four ranks hold by rows."""
    mesh = init_device_mesh("cpu", (RANKS,))
    state = {name: distribute_tensor(whole(name), mesh, [Shard(0)]) for name in NAMES}
    dc.save({"model": state}, path)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a checkpoint that four ranks have written, each its rows."""
    found = str(tmp_path_factory.mktemp("read-once") / "ck")
    run_ranks(by_rows, found, world_size=RANKS)
    return found


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """Count what this rank reads of the data of shard files, below all that the library does."""
    found = [0]
    original = LocalStorage.open

    def opened(storage: LocalStorage, path: str) -> Any:
        file = original(storage, path)
        return _Counted(file, found) if path.endswith(".safetensors") else file

    LocalStorage.open = opened  # type: ignore[assignment, method-assign]
    try:
        yield found
    finally:
        LocalStorage.open = original  # type: ignore[method-assign]


class _Counted:
    def __init__(self, file: Any, found: list[int]) -> None:
        self._file = file
        self._found = found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def read_into(self, offset: int, target: memoryview) -> int:
        count: int = self._file.read_into(offset, target)
        if offset:
            self._found[0] += count
        return count


def load_on(rank: int, path: str, hosts: list[str], mode: str, kind: str) -> tuple[int, int]:
    """Load replicated or by columns, and see that every bit is right; return what was read."""
    os.environ["DIST_CKPT_HOST"] = hosts[rank]
    mesh = init_device_mesh("cpu", (RANKS,))
    empty = torch.zeros(SHAPE)
    state: dict[str, Any] = {
        name: empty.clone() if kind == "replicated" else distribute_tensor(empty, mesh, [Shard(1)])
        for name in NAMES
    }
    with counted() as nbytes:
        report = dc.load({"model": state}, path, read_once=mode)  # type: ignore[arg-type]
    assert report.nbytes_read == nbytes[0]
    for name in NAMES:
        expected = whole(name)
        found = state[name]
        if kind != "replicated":
            expected, found = expected.chunk(RANKS, dim=1)[rank], found.to_local()
        assert torch.equal(found, expected)
    return nbytes[0], report.nbytes_received


@pytest.mark.parametrize("kind", ["replicated", "columns"])
@pytest.mark.parametrize(
    ("mode", "hosts", "times"),
    [
        pytest.param("host", ["a"] * 4, {"a": 1}, marks=pytest.mark.long),
        ("host", ["a", "a", "b", "b"], {"a": 1, "b": 1}),
        ("job", ["a", "b", "a", "b"], None),
        pytest.param("job", ["a", "b", "c", "d"], None, marks=pytest.mark.long),
        ("off", ["a"] * 4, {"a": 4}),
    ],
)
def test_what_is_stored_comes_from_storage_once(path, kind, mode, hosts, times):
    counts = run_ranks(load_on, path, hosts, mode, kind, world_size=RANKS)
    fetched: dict[str, int] = {}
    for host, (nbytes, received) in zip(hosts, counts, strict=True):
        fetched[host] = fetched.get(host, 0) + nbytes
        assert nbytes + received == STORED_NBYTES
    if times is None:
        assert sum(fetched.values()) == STORED_NBYTES
    else:
        assert fetched == {host: n * STORED_NBYTES for host, n in times.items()}


# --- failures ----------------------------------------------------------------------------------


def told(path: str, mode: str) -> tuple[str, int | None, str, float]:
    """Load what must fail, and return the error, and the seconds that it took."""
    state = {"model": {name: torch.zeros(SHAPE) for name in NAMES}}
    start = time.monotonic()
    try:
        dc.load(state, path, read_once=mode)  # type: ignore[arg-type]
    except dc.CheckpointError as error:
        return type(error).__name__, error.rank, str(error), time.monotonic() - start
    raise AssertionError("it should have failed")


def load_damaged(rank: int, path: str, damaged: str, mode: str) -> Any:
    """Load what is damaged; then a sound checkpoint, over the same connections or new ones."""
    os.environ["DIST_CKPT_HOST"] = "ab"[rank % 2]
    came_to = told(damaged, mode)
    state = {"model": {name: torch.zeros(SHAPE) for name in NAMES}}
    dc.load(state, path, read_once=mode)  # type: ignore[arg-type]
    assert all(torch.equal(state["model"][name], whole(name)) for name in NAMES)
    return came_to


@pytest.mark.parametrize("mode", ["host", "job"])
def test_a_damaged_block_is_named_on_all_ranks_and_the_next_load_is_whole(path, tmp_path, mode):
    shutil.copytree(path, damaged := tmp_path / "damaged")
    (file,) = damaged.glob("*/model-00002.safetensors")
    with file.open("r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        last = opened.read(1)
        opened.seek(-1, os.SEEK_END)
        opened.write(bytes([last[0] ^ 1]))
    for kind, _, message, seconds in run_ranks(
        load_damaged, path, str(damaged), mode, world_size=RANKS
    ):
        assert kind == "CorruptError"
        assert "model.w4 rows 512:768: damaged" in message
        assert "of rank 2" in message
        assert seconds < NOTICED_S


def lose_one(rank: int, path: str, mode: str, hosts: list[str], how: int) -> Any:
    """Rank 1 is lost when it is about to hand on its first unit, and killed in the end."""
    os.environ["DIST_CKPT_HOST"] = hosts[rank]
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(RANKS)]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    if rank != 1:
        came_to = told(path, mode)
        dist.barrier(dist.new_group([0, 2, 3], use_local_synchronization=True))
        if rank == 0 and how == signal.SIGSTOP:
            os.kill(int(pids[1].item()), signal.SIGKILL)
        return came_to

    def lose(*_: Any) -> None:
        os.kill(os.getpid(), how)
        time.sleep(60)

    HostLinks.send = lose  # type: ignore[assignment, method-assign]
    return told(path, mode)


LOST = [("host", ["a"] * 4), ("host", ["a", "a", "b", "b"]), ("job", ["a", "a", "b", "b"])]


@pytest.mark.waits
@pytest.mark.parametrize(("mode", "hosts"), LOST)
def test_a_rank_that_dies_while_it_hands_on_is_named(path, mode, hosts):
    options = Options(environ=FRAIL)
    outcomes = try_ranks(
        lose_one, path, mode, hosts, int(signal.SIGKILL), world_size=RANKS, options=options
    )
    assert_named(outcomes)


@pytest.mark.waits
@pytest.mark.slow
@pytest.mark.parametrize(("mode", "hosts"), LOST)
def test_a_rank_that_freezes_while_it_hands_on_is_named(path, mode, hosts):
    # A rank that is stopped is late, up to this time.
    options = Options(environ={**FRAIL, "DIST_CKPT_JOIN_TIMEOUT_S": "10"})
    outcomes = try_ranks(
        lose_one, path, mode, hosts, int(signal.SIGSTOP), world_size=RANKS, options=options
    )
    assert_named(outcomes)


def assert_named(outcomes: list[Any]) -> None:
    assert outcomes[1].signal == signal.SIGKILL
    for rank in (0, 2, 3):
        assert outcomes[rank].error is None, outcomes[rank]
        kind, who, message, seconds = outcomes[rank].value
        assert (kind, who) == ("RankError", 1)
        assert "rank 1 (host" in message
        assert seconds < NOTICED_S
