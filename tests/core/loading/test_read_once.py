"""Read once, by ranks that are threads: what each host fetches, and what failures come to."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import pytest

from dist_ckpt.core.loading.load_options import LoadOptions

pytest.importorskip("torch")

import torch
from hypothesis import given
from hypothesis import strategies as st

import dist_ckpt as dc
from dist_ckpt.core.comm.collectives import host_links
from dist_ckpt.core.comm.rank_messages import SecondaryError
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.loading import load
from dist_ckpt.core.loading.shared_read import run_shared_read, shared_read_group
from dist_ckpt.core.loading.shared_read.run_shared_read import SharedReader
from dist_ckpt.core.planning.load import shared_ranges
from dist_ckpt.core.shard_io.read.block_reader import BlockReader
from dist_ckpt.core.state.binding.bind import Binding
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import CorruptError, RankError, StorageError
from dist_ckpt.testing.faulty_storage import FaultyStorage
from dist_ckpt.testing.memory_storage import MemoryStorage
from dist_ckpt.testing.thread_channel import TEST_CONFIG, ThreadCollective
from long_mode import examples
from ranks import PATH, errors_of, save_on_threads, try_load_on_threads, try_ranks
from sharded_checkpoints import Counting, blocks_of, random_tensors, save_small, values_equal

WHOLE = random_tensors()
STORED_NBYTES = sum(tensor.nbytes for tensor in WHOLE.values())
ONE_HOST = ["a"] * 4
TWO_HOSTS = ["a", "b", "a", "b"]


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a unit be of two blocks, so that small checkpoints have many."""
    for module in (shared_ranges, shared_read_group):
        monkeypatch.setattr(module, "SHARED_RANGE_NBYTES", 128)


@pytest.fixture(scope="module")
def tree() -> dict[str, bytes | None]:
    """Return what four ranks have stored, in blocks of 64 bytes."""
    storage = MemoryStorage({"/runs": None})
    save_small(storage, PATH)
    return storage.tree()


def whole_state() -> dict[str, Any]:
    return {"model": None, "optim": None, "epoch": None}


def column_state(rank: int) -> dict[str, Any]:
    """Ask for two columns of the tensors that were saved by rows."""

    def part() -> dc.LocalShard:
        return dc.LocalShard(torch.zeros(40, 2), (40, 8), (0, 2 * rank))

    return {"model": {"w": part()}, "optim": {"moment": part()}}


def loaded(outcomes: Sequence[Any]) -> list[Any]:
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return [outcome.value for outcome in outcomes]


class Hosts:
    """The same files for all ranks, and what each rank and host fetches of their data."""

    def __init__(self, inner: Storage, hosts: Sequence[str]) -> None:
        self.names = hosts
        self._counting = [Counting(inner) for _ in hosts]

    def __call__(self, rank: int) -> Any:
        return self._counting[rank]

    def fetched(self) -> dict[str, int]:
        found = dict.fromkeys(self.names, 0)
        for host, counting in zip(self.names, self._counting, strict=True):
            shards = {n: c for n, c in counting.nbytes.items() if n.endswith(".safetensors")}
            found[host] += sum(shards.values())
        return found


# --- what is fetched ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "hosts", "times"),
    [
        ("off", ONE_HOST, {"a": 4}),
        ("host", ONE_HOST, {"a": 1}),
        ("host", TWO_HOSTS, {"a": 1, "b": 1}),
        ("host", ["a", "b", "c", "d"], dict.fromkeys("abcd", 1)),
        ("host", ["a", "a", "a", "b"], {"a": 1, "b": 1}),
    ],
)
def test_each_host_fetches_what_is_stored_once(tree, mode, hosts, times):
    at = Hosts(MemoryStorage(tree), hosts)
    states = [whole_state() for _ in range(4)]
    reports = loaded(try_load_on_threads(at, states, hosts=hosts, read_once=mode, strict=False))
    assert all(values_equal(state, WHOLE) for state in states)
    assert at.fetched() == {host: n * STORED_NBYTES for host, n in times.items()}
    assert sum(report.nbytes_read for report in reports) == sum(at.fetched().values())
    for report in reports:
        assert report.nbytes_read + report.nbytes_received == STORED_NBYTES
        assert report.nbytes_placed == STORED_NBYTES


@pytest.mark.parametrize("hosts", [ONE_HOST, TWO_HOSTS, ["a", "b", "c", "d"], ["a", "b", "b", "c"]])
def test_in_a_job_all_that_is_stored_is_fetched_once(tree, hosts):
    at = Hosts(MemoryStorage(tree), hosts)
    states = [whole_state() for _ in range(4)]
    reports = loaded(try_load_on_threads(at, states, hosts=hosts, read_once="job", strict=False))
    assert all(values_equal(state, WHOLE) for state in states)
    assert sum(at.fetched().values()) == STORED_NBYTES
    assert {report.job_nbytes_read for report in reports} == {STORED_NBYTES}
    for report in reports:
        assert report.nbytes_read + report.nbytes_received == STORED_NBYTES


@pytest.mark.parametrize(("mode", "times"), [("host", {"a": 1, "b": 1}), ("job", None)])
def test_rows_that_become_columns_are_fetched_once(tree, mode, times):
    at = Hosts(MemoryStorage(tree), TWO_HOSTS)
    states = [column_state(rank) for rank in range(4)]
    loaded(try_load_on_threads(at, states, hosts=TWO_HOSTS, read_once=mode, strict=False))
    for rank, state in enumerate(states):
        columns = slice(2 * rank, 2 * rank + 2)
        assert torch.equal(state["model"]["w"].tensor, WHOLE["model.w"][:, columns])
        assert torch.equal(state["optim"]["moment"].tensor, WHOLE["optim.moment"][:, columns])
    stored = 2 * WHOLE["model.w"].nbytes
    if times:
        assert at.fetched() == {host: n * stored for host, n in times.items()}
    else:
        assert sum(at.fetched().values()) == stored


def test_the_ranks_of_a_host_fetch_about_the_same(tree):
    at = Hosts(MemoryStorage(tree), ["0", "1", "2", "3"])
    states = [whole_state() for _ in range(4)]
    reports = loaded(
        try_load_on_threads(at, states, hosts=ONE_HOST, read_once="host", strict=False)
    )
    nbytes = [report.nbytes_read for report in reports]
    assert max(nbytes) - min(nbytes) <= STORED_NBYTES / 4


@pytest.mark.parametrize("mode", ["host", "job"])
def test_ranks_that_want_different_things_or_nothing_get_what_they_want(tree, mode):
    states: list[dict[str, Any]] = [
        {"model": {"w": None}},
        {"epoch": {"number": 0, "name": ""}},
        {"model": {"w": None, "bias": None}},
        {"optim": {"moment": dc.LocalShard(torch.zeros(3, 8), (40, 8), (9, 0))}},
    ]
    at = Hosts(MemoryStorage(tree), TWO_HOSTS)
    options: dict[str, Any] = {"read_once": mode, "strict": False, "exclude": "*.flat"}
    loaded(try_load_on_threads(at, states, hosts=TWO_HOSTS, **options))
    for rank in (0, 2):
        assert torch.equal(states[rank]["model"]["w"], WHOLE["model.w"])
    assert torch.equal(states[2]["model"]["bias"], WHOLE["model.bias"])
    assert torch.equal(states[3]["optim"]["moment"].tensor, WHOLE["optim.moment"][9:12])
    # Of the moment three rows and what else is in their blocks, of which each has two rows.
    expected = WHOLE["model.w"].nbytes + WHOLE["model.bias"].nbytes + 4 * 32
    assert sum(at.fetched().values()) == expected


MANY = {f"t{n:03}": torch.tensor([n, -n, 0.5]) for n in range(100)}


@pytest.fixture(scope="module")
def many() -> dict[str, bytes | None]:
    """Return a hundred tensors, each smaller than a block."""
    storage = MemoryStorage({"/runs": None})
    save_on_threads(storage, [{"model": MANY}])
    return storage.tree()


@pytest.mark.parametrize("mode", ["host", "job"])
def test_many_small_tensors_in_a_row_are_shared_too(many, mode):
    names = [list(MANY), list(MANY)[:70], list(MANY)[30:90], [*list(MANY)[:25], "t060", "t099"]]
    states = [{"model": {name: torch.zeros(3) for name in ours}} for ours in names]
    states[1]["model"]["t095"] = dc.LocalShard(torch.zeros(1), (3,), (2,))  # type: ignore[assignment]
    at = Hosts(MemoryStorage(many), TWO_HOSTS)
    loaded(try_load_on_threads(at, states, hosts=TWO_HOSTS, read_once=mode, strict=False))
    assert torch.equal(states[1]["model"].pop("t095").tensor, MANY["t095"][2:])  # type: ignore[attr-defined]
    for state in states:
        assert all(torch.equal(found, MANY[name]) for name, found in state["model"].items())
    # Of host b rank 1 wants the first 70 and one more, rank 3 besides only the last.
    times = {"host": 100 + 72, "job": 100}[mode]
    assert sum(at.fetched().values()) == times * 12


@pytest.mark.parametrize("mode", ["host", "job"])
def test_damage_of_one_of_many_small_tensors_is_named_on_all_ranks(many, mode):
    storage = damaged(many, "model", -30)
    states = [whole_state() for _ in range(4)]
    outcomes = try_load_on_threads(
        lambda _: storage, states, hosts=TWO_HOSTS, read_once=mode, strict=False
    )
    for error in errors_of(outcomes):
        assert isinstance(error, CorruptError)
        assert "model.t097 rows 0:3: damaged" in str(error)


def test_with_check_first_all_is_fetched_twice(tree):
    at = Hosts(MemoryStorage(tree), ONE_HOST)
    states = [whole_state() for _ in range(4)]
    options: dict[str, Any] = {"read_once": "host", "strict": False, "check_first": True}
    loaded(try_load_on_threads(at, states, hosts=ONE_HOST, **options))
    assert all(values_equal(state, WHOLE) for state in states)
    assert at.fetched() == {"a": 2 * STORED_NBYTES}


def test_files_that_are_not_kept_open_are_shared_too(tree, monkeypatch):
    monkeypatch.setattr("dist_ckpt.core.shard_io.read.open_files.MAX_OPEN", 1)
    at = Hosts(MemoryStorage(tree), ONE_HOST)
    states = [whole_state() for _ in range(4)]
    loaded(try_load_on_threads(at, states, hosts=ONE_HOST, read_once="host", strict=False))
    assert all(values_equal(state, WHOLE) for state in states)
    assert at.fetched() == {"a": STORED_NBYTES}


def test_ranks_that_share_nothing_meet_no_more_often_than_without_sharing(tree):
    outcomes = [
        try_load_on_threads(
            lambda _: MemoryStorage(tree),
            [whole_state() for _ in range(4)],
            hosts=hosts,
            read_once=mode,
            strict=False,
        )
        for hosts, mode in ((ONE_HOST, "off"), (["a", "b", "c", "d"], "host"))
    ]
    off, apart = (loaded(outcome)[1] for outcome in outcomes)
    assert (off.exchanges.num, off.collectives) == (apart.exchanges.num, apart.collectives)


def test_a_rank_that_shares_nothing_takes_no_memory_for_it(tree, monkeypatch, caplog):
    memories = recorded_memories(monkeypatch, lacking="b")
    at = Hosts(MemoryStorage(tree), ["a", "a", "b"])
    states = [whole_state() for _ in range(3)]
    with caplog.at_level(logging.WARNING):
        loaded(try_load_on_threads(at, states, hosts=at.names, strict=False))
    assert at.fetched() == {"a": STORED_NBYTES, "b": STORED_NBYTES}
    assert len(memories) == 2
    assert not [record for record in caplog.records if "share memory" in record.getMessage()]


def recorded_memories(monkeypatch: pytest.MonkeyPatch, lacking: str = "") -> list[int]:
    """Return a list that gets the size of each memory; a host may have no memory for one."""
    sizes: list[int] = []
    original = Session.shared_scratch

    def shared_scratch(session: Session, nbytes: int) -> Any:
        if session.channel.host == lacking:
            raise OSError("no memory")
        sizes.append(nbytes)
        return original(session, nbytes)

    monkeypatch.setattr(Session, "shared_scratch", shared_scratch)
    return sizes


SMALL = MemoryStorage({"/runs": None})
SMALL_PATHS = (f"/runs/small-{n}" for n in count())


@examples(25)
@given(data=st.data())
def test_what_is_shared_is_what_each_rank_would_have_read_itself(data):
    shape = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    names = data.draw(st.sets(st.sampled_from("uvwxyz"), min_size=1))
    whole = {name: torch.randn(shape) for name in sorted(names)}
    path = next(SMALL_PATHS)
    with blocks_of(64):
        save_on_threads(SMALL, [{"model": whole}], path)
    num_ranks = data.draw(st.integers(2, 4))
    hosts = [data.draw(st.sampled_from("ab")) for _ in range(num_ranks)]
    boxes = [{name: data.draw(box(shape)) for name in whole} for _ in range(num_ranks)]
    states = [
        {
            "model": {
                name: dc.LocalShard(torch.zeros(size), shape, offset)
                for name, (offset, size) in parts.items()
            }
        }
        for parts in boxes
    ]
    mode = data.draw(st.sampled_from(["host", "job"]))
    with pytest.MonkeyPatch.context() as patch:
        for module in (shared_ranges, shared_read_group):
            patch.setattr(module, "SHARED_RANGE_NBYTES", 128)
        loaded(
            try_load_on_threads(
                lambda _: SMALL, states, path, hosts=hosts, read_once=mode, strict=False
            )
        )
    for state, parts in zip(states, boxes, strict=True):
        for name, shard in state["model"].items():
            (row, column), (rows, columns) = parts[name]
            expected = whole[name][row : row + rows, column : column + columns]
            tensor: Any = shard.tensor
            assert torch.equal(tensor, expected)


@st.composite
def box(draw: st.DrawFn, shape: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    offset = tuple(draw(st.integers(0, size - 1)) for size in shape)
    size = tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True))
    return offset, size  # type: ignore[return-value]


def test_what_is_handed_on_in_a_second_load_is_not_what_was_in_the_first(tree):
    first, second = MemoryStorage(tree), MemoryStorage({"/runs": None})
    other = WHOLE["model.w"] + 1
    save_on_threads(second, [{"model": {"w": other}}])

    def load_thrice(rank: int, channel: Any, bulk: Any) -> list[Any]:
        session = Session(channel, bulk, TEST_CONFIG)
        states: list[dict[str, Any]] = [{"model": {"w": None}} for _ in range(3)]
        options = LoadOptions(include="model.w")
        for storage, state in zip((first, second, first), states, strict=True):
            load.load_together(session, state, PATH, options, storage)
        return [state["model"]["w"] for state in states]

    for tensors in loaded(try_ranks(load_thrice, world_size=4, harness="threads", hosts=ONE_HOST)):
        for tensor, expected in zip(
            tensors, (WHOLE["model.w"], other, WHOLE["model.w"]), strict=True
        ):
            assert torch.equal(tensor, expected)


# --- failures ----------------------------------------------------------------------------------


def damaged(tree: dict[str, bytes | None], component: str, at: int) -> MemoryStorage:
    """Flip a bit of the data in the file of a component that rank 0 wrote."""
    (path,) = (path for path in tree if path.endswith(f"{component}-00000.safetensors"))
    data = bytearray(tree[path] or b"")
    data[at] ^= 1
    return MemoryStorage({**tree, path: bytes(data)})


@pytest.mark.parametrize(
    ("mode", "hosts"), [("host", ONE_HOST), ("host", TWO_HOSTS), ("job", TWO_HOSTS)]
)
def test_a_damaged_block_is_named_on_all_ranks(tree, mode, hosts):
    storage = damaged(tree, "optim", -1)
    states = [whole_state() for _ in range(4)]
    outcomes = try_load_on_threads(
        lambda _: storage, states, hosts=hosts, read_once=mode, strict=False
    )
    for error in errors_of(outcomes):
        assert type(error) is CorruptError
        assert "optim.moment rows 12:13: damaged" in str(error)
        assert "of rank 0" in str(error)
        assert "load an older checkpoint" in str(error)


class Flipping:
    """A transfer that brings one wrong bit."""

    def __init__(self, inner, data):
        self.inner = inner
        self.data = data

    def wait(self):
        self.inner.wait()
        self.data[-1] ^= 1


def test_what_arrives_damaged_from_another_host_is_not_taken_for_checked(tree, monkeypatch):
    receive = ThreadCollective.receive

    def flip(collective, rank, data, tag):
        return Flipping(receive(collective, rank, data, tag), data)

    monkeypatch.setattr(ThreadCollective, "receive", flip)
    states = [whole_state() for _ in range(4)]
    storage = MemoryStorage(tree)
    outcomes = try_load_on_threads(
        lambda _: storage, states, hosts=TWO_HOSTS, read_once="job", strict=False
    )
    for error in errors_of(outcomes):
        assert isinstance(error, RankError)
        assert "arrived damaged" in str(error)


@pytest.mark.parametrize("mode", ["host", "job"])
def test_what_a_rank_has_filled_before_the_damage_is_told_as_touched(tree, mode):
    storage = damaged(tree, "optim", -1)
    states = [
        {"optim": {"moment": torch.full((40, 8), torch.nan)}, "model": {"w": torch.zeros(40, 8)}}
        for _ in range(4)
    ]
    outcomes = try_load_on_threads(
        lambda _: storage, states, hosts=TWO_HOSTS, read_once=mode, strict=False
    )
    for error, state in zip(errors_of(outcomes), states, strict=True):
        assert isinstance(error, CorruptError)
        if not state["optim"]["moment"].isnan().all():
            assert "optim.moment" in error.touched
        if state["model"]["w"].any():
            assert "model.w" in error.touched


def test_a_rank_that_gives_up_because_of_another_tells_what_it_has_filled(tree, monkeypatch):
    def fail(reading: SharedReader) -> None:
        rank = reading._group.session.channel.rank
        reading._reader.touched.add(f"model.on {rank}")
        if rank == 2:
            raise CorruptError("damaged", touched=("model.on 2",))
        raise SecondaryError("rank 2 has given up")

    monkeypatch.setattr(SharedReader, "read_all", fail)
    states = [whole_state() for _ in range(4)]
    outcomes = try_load_on_threads(
        lambda _: MemoryStorage(tree), states, hosts=ONE_HOST, strict=False
    )
    for rank, error in enumerate(errors_of(outcomes)):
        assert isinstance(error, CorruptError)
        assert set(error.touched) == {"model.on 2", f"model.on {rank}"}


def test_a_rank_that_reads_alone_and_fails_of_its_storage_tells_what_it_has_filled(
    tree, monkeypatch
):
    def fail(reading: BlockReader, threads: int) -> None:
        reading.touched.add(threading.current_thread().name)
        if threading.current_thread().name == "rank 0":
            raise CorruptError("damaged", touched=("rank 0",))
        raise StorageError("the network is gone")

    monkeypatch.setattr(BlockReader, "read_all", fail)
    states = [whole_state() for _ in range(2)]
    outcomes = try_load_on_threads(
        lambda _: MemoryStorage(tree), states, read_once="off", strict=False
    )
    for rank, error in enumerate(errors_of(outcomes)):
        assert isinstance(error, CorruptError)
        assert set(error.touched) == {"rank 0", f"rank {rank}"}


@pytest.mark.parametrize("mode", ["host", "job"])
def test_with_check_first_damage_is_found_before_anything_is_touched(tree, mode):
    storage = damaged(tree, "optim", -1)
    states = [{"optim": {"moment": torch.full((40, 8), torch.nan)}} for _ in range(4)]
    options: dict[str, Any] = {"read_once": mode, "strict": False, "check_first": True}
    outcomes = try_load_on_threads(lambda _: storage, states, hosts=TWO_HOSTS, **options)
    for error, state in zip(errors_of(outcomes), states, strict=True):
        assert isinstance(error, CorruptError)
        assert error.touched == ()
        assert state["optim"]["moment"].isnan().all()


def test_without_verify_damage_is_handed_on_as_it_is(tree):
    storage = damaged(tree, "optim", -1)
    states = [{"optim": {"moment": torch.zeros(40, 8)}} for _ in range(4)]
    options: dict[str, Any] = {"read_once": "host", "strict": False, "verify": False}
    loaded(try_load_on_threads(lambda _: storage, states, hosts=ONE_HOST, **options))
    for state in states:
        differing = (state["optim"]["moment"] != WHOLE["optim.moment"]).nonzero()
        assert differing.tolist() == [[12, 7]]


@pytest.mark.parametrize(("mode", "hosts"), [("host", ONE_HOST), ("job", TWO_HOSTS)])
@pytest.mark.parametrize("failing", [0, 3])
def test_a_failed_read_is_told_to_all_wherever_it_is(tree, mode, hosts, failing):
    inner = MemoryStorage(tree)
    whole = FaultyStorage(inner)
    outcomes = try_load_on_threads(
        lambda rank: whole if rank == failing else inner,
        [whole_state() for _ in range(4)],
        hosts=hosts,
        read_once=mode,
        strict=False,
    )
    loaded(outcomes)
    num_reads = outcomes[failing].value.storage_reads.num
    for nth in range(whole.calls - num_reads // 2, whole.calls + 1):
        faulty = FaultyStorage(inner, fail_at_call=nth)
        outcomes = try_load_on_threads(
            [faulty if rank == failing else inner for rank in range(4)].__getitem__,
            [whole_state() for _ in range(4)],
            hosts=hosts,
            read_once=mode,
            strict=False,
        )
        for error in errors_of(outcomes):
            assert type(error) is StorageError
            assert f"rank {failing}" in str(error)
            assert "a planted fault" in str(error)


class Unfillable:
    """A target that fails when it is filled."""

    def memory(self) -> None:
        return None

    def place(self, *_: object) -> None:
        raise MemoryError("no room")


@pytest.mark.parametrize(("mode", "hosts"), [("host", ONE_HOST), ("job", TWO_HOSTS)])
def test_an_error_while_placing_is_told_to_all(tree, mode, hosts, monkeypatch):
    original = Binding.allocate
    poor: list[Binding] = []

    def allocated(binding: Binding) -> dict[Any, Any]:
        targets: dict[Any, Any] = dict(original(binding))
        if not poor:
            poor.append(binding)
            targets[max(targets)] = Unfillable()
        return targets

    monkeypatch.setattr(Binding, "allocate", allocated)
    states = [whole_state() for _ in range(4)]
    outcomes = try_load_on_threads(
        lambda _: MemoryStorage(tree), states, hosts=hosts, read_once=mode, strict=False
    )
    for error in errors_of(outcomes):
        assert "MemoryError: no room" in str(error)


class Stuck:
    """A target that hangs when it is filled, until it is let go."""

    def __init__(self) -> None:
        self.is_reached = threading.Event()
        self.is_let_go = threading.Event()

    def memory(self) -> None:
        return None

    def place(self, *_: object) -> None:
        self.is_reached.set()
        self.is_let_go.wait(30)


@pytest.mark.parametrize("hanging", ["both", "own"])
def test_a_copy_that_hangs_is_an_error_on_all_ranks(hanging, monkeypatch):
    stuck = Stuck()
    original = Binding.allocate

    def allocated(binding: Binding) -> dict[Any, Any]:
        targets: dict[Any, Any] = dict(original(binding))
        if ("model.own00", 0) in targets:
            targets[f"model.{hanging}00", 0] = stuck
        return targets

    def wait() -> None:
        # What is shared comes when the first rank already hangs in a row that only it reads.
        assert hanging != "own" or stuck.is_reached.wait(30)

    monkeypatch.setattr(Binding, "allocate", allocated)
    monkeypatch.setattr(run_shared_read, "WORK_STALL_S", 0.5)
    monkeypatch.setattr(run_shared_read, "RANK_CHECK_INTERVAL_S", 0.05)
    storage = MemoryStorage({"/runs": None})
    both, own = ([f"{name}{n:02}" for n in range(20)] for name in ("both", "own"))
    save_on_threads(storage, [{"model": {name: torch.ones(9) for name in (*both, *own)}}])
    later = Before(storage, wait)
    at: list[Any] = [storage, later, later]
    names = [[*both, *own], both, both]
    states = [{"model": {name: torch.zeros(9) for name in ours}} for ours in names]
    try:
        outcomes = try_load_on_threads(at.__getitem__, states, hosts="aaa", strict=False)
    finally:
        stuck.is_let_go.set()
    for error in errors_of(outcomes):
        assert isinstance(error, StorageError)
        assert "rank 0 (host a): the storage or the device did not answer" in str(error)


class Before(Counting):
    """Calls a function before it reads data of a shard file."""

    def __init__(self, inner: Storage, act: Callable[[], None]) -> None:
        super().__init__(inner)
        self._act = act

    def open(self, path: str) -> Any:
        file = super().open(path)
        read_into = file.read_into

        def acting(offset: int, target: memoryview) -> int:
            if offset:
                self._act()
            return read_into(offset, target)

        file.read_into = acting  # type: ignore[method-assign]
        return file


@pytest.mark.waits
def test_a_load_that_takes_longer_than_a_call_may_is_not_taken_to_hang(tree, monkeypatch):
    # A call takes a sixth of what it may, and all of them together more than that.
    monkeypatch.setattr(run_shared_read, "WORK_STALL_S", 6.0)
    monkeypatch.setattr(run_shared_read, "RANK_CHECK_INTERVAL_S", 0.05)
    never = threading.Event()

    def take_long() -> None:
        assert not never.wait(1.0)

    slow = Before(MemoryStorage(tree), take_long)
    states = [whole_state() for _ in range(2)]
    reports = loaded(try_load_on_threads(lambda _: slow, states, hosts="aa", strict=False))
    assert all(values_equal(state, WHOLE) for state in states)
    assert reports[0].seconds["read"] > 6.0


@pytest.mark.parametrize(("mode", "hosts"), [("host", ONE_HOST), ("job", TWO_HOSTS)])
def test_no_step_waits_until_a_rank_looks_after_the_others(mode, hosts, tree, monkeypatch):
    monkeypatch.setattr(run_shared_read, "RANK_CHECK_INTERVAL_S", 20.0)
    states = [whole_state() for _ in range(4)]
    storage = MemoryStorage(tree)
    outcomes = try_load_on_threads(
        lambda _: storage, states, hosts=hosts, read_once=mode, strict=False
    )
    for report in loaded(outcomes):
        assert report.seconds["read"] < 15


def test_a_rank_that_gave_up_before_it_was_waited_for_is_not_waited_for(monkeypatch):
    heard = threading.Event()
    receive = host_links.HostLinks.receive

    def received(links: host_links.HostLinks, timeout_s: float) -> Iterator[Any]:
        for rank, message in receive(links, timeout_s):
            yield rank, message
            if message is None:
                heard.set()

    def wait() -> None:
        assert heard.wait(30)

    def fail() -> None:
        raise StorageError("a planted fault")

    monkeypatch.setattr(host_links.HostLinks, "receive", received)
    storage = MemoryStorage({"/runs": None})
    whole = {"both": torch.ones(9), "own": torch.ones(9)}
    save_on_threads(storage, [{"model": whole}])
    # Rank 0 fetches for both, but not before it has heard that rank 1 has given up.
    at = [Before(storage, wait), Before(storage, fail)]
    names = [["both"], ["both", "own"]]
    states = [{"model": {name: torch.zeros(9) for name in ours}} for ours in names]
    outcomes = try_load_on_threads(at.__getitem__, states, hosts=["a", "a"], strict=False)
    for error in errors_of(outcomes):
        assert "rank 1 (host a)" in str(error)
        assert "a planted fault" in str(error)


def test_ranks_that_read_once_in_different_ways_are_told(tree):
    outcomes = try_ranks(
        lambda rank, channel, bulk: load.load_together(
            Session(channel, bulk, TEST_CONFIG),
            whole_state(),
            PATH,
            LoadOptions(read_once=("host", "job")[rank]),
            MemoryStorage(tree),
        ),
        world_size=2,
        harness="threads",
    )
    for error in errors_of(outcomes):
        assert isinstance(error, ValueError)
        assert "read_once" in str(error)


def test_a_mode_that_does_not_exist_is_refused(tree):
    outcomes = try_load_on_threads(
        lambda _: MemoryStorage(tree), [whole_state()] * 2, read_once="node"
    )
    for error in errors_of(outcomes):
        assert isinstance(error, ValueError)
        assert "read_once='node'" in str(error)


# --- hosts that are not what their names say ---------------------------------------------------


def test_ranks_that_cannot_reach_each_other_fetch_for_themselves(tree, monkeypatch, caplog):
    monkeypatch.setattr(host_links.HostLinks, "_connect", lambda *_: False)
    at = Hosts(MemoryStorage(tree), ONE_HOST)
    states = [whole_state() for _ in range(4)]
    with caplog.at_level(logging.WARNING):
        loaded(try_load_on_threads(at, states, hosts=ONE_HOST, read_once="host", strict=False))
    assert all(values_equal(state, WHOLE) for state in states)
    assert at.fetched() == {"a": 4 * STORED_NBYTES}
    (message,) = {r.getMessage() for r in caplog.records if "share memory" in r.getMessage()}
    assert "ranks 0-3 cannot share memory" in message


def test_hosts_of_one_name_are_several_hosts_in_a_job(tree, monkeypatch):
    monkeypatch.setattr(host_links.HostLinks, "_connect", lambda *_: False)
    at = Hosts(MemoryStorage(tree), ONE_HOST)
    states = [whole_state() for _ in range(4)]
    loaded(try_load_on_threads(at, states, hosts=ONE_HOST, read_once="job", strict=False))
    assert all(values_equal(state, WHOLE) for state in states)
    assert at.fetched() == {"a": STORED_NBYTES}


def test_a_rank_without_links_reads_alone_and_the_others_share(tree, monkeypatch):
    def links(meeting: str, rank: int, **options: Any) -> host_links.HostLinks:
        if rank == 2:
            raise OSError("no such socket")
        return host_links.HostLinks(meeting, rank, **options)

    monkeypatch.setattr(shared_read_group, "HostLinks", links)
    at = Hosts(MemoryStorage(tree), ONE_HOST)
    states = [whole_state() for _ in range(4)]
    loaded(try_load_on_threads(at, states, hosts=ONE_HOST, read_once="host", strict=False))
    assert all(values_equal(state, WHOLE) for state in states)
    assert at.fetched() == {"a": 2 * STORED_NBYTES}
