"""What reports say that a save and a load have cost, held against what they did."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import dist_ckpt as dc
from dist_ckpt.core.comm.exchange import channel
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.loading import load
from dist_ckpt.core.loading.load import load_together
from dist_ckpt.core.loading.load_options import LoadOptions
from dist_ckpt.core.saving import save as saver
from dist_ckpt.core.saving.save import save_together
from dist_ckpt.core.saving.save_options import SaveOptions
from dist_ckpt.core.storage.storage_wrappers import CountingStorage
from dist_ckpt.reports import IoCount
from dist_ckpt.testing.memory_storage import MemoryStorage
from dist_ckpt.testing.thread_channel import TEST_CONFIG
from ranks import (
    PATH,
    Outcome,
    load_on_threads,
    run_ranks,
    save_on_threads,
    try_load_on_threads,
    try_save_on_threads,
)
from sharded_checkpoints import Counting, rank_state, save_small

RANKS = 4

ARCHITECTURE = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()


def documented(operation: str) -> tuple[int, int]:
    """Return the numbers of exchanges and collectives that docs/architecture.md says it takes."""
    (row,) = re.findall(
        rf"^\| {re.escape(operation)} \| (\d)\b.*\| (\d)\b.*\|$", ARCHITECTURE, re.M
    )
    return int(row[0]), int(row[1])


FIRST_SAVE = documented("a first save, or a save of another layout")
SAME_LAYOUT_AGAIN = documented("a save of the same layout again")
CARRY = documented("more with `carry_over`")
LOAD = documented("a load")
PREPARE = documented("more if a rank makes tensors, or ranks share reads")
WANTS = documented('more if ranks share between hosts, or their requests are too long for "check"')
CHECK_FIRST = documented("more with `check_first`")
PLACE = documented("more if values or new tensors are placed")
OBJECTS = documented("more if objects or generators are loaded")
INDEX = documented('more if the index is too long for the answer of "open"')


def talks(report: Any) -> tuple[int, int]:
    return report.exchanges.num, report.collectives.num


def many(num_tensors: int, rank: int) -> dict[str, Any]:
    """Return a rank's rows of so many tensors, and a replicated one."""
    rows = {
        f"layer{number}": dc.LocalShard(torch.full((2, 3), rank), (2 * RANKS, 3), (2 * rank, 0))
        for number in range(num_tensors)
    }
    return {"model": {**rows, "bias": torch.ones(5)}, "step": 7}


def on_ranks(function: Callable[[int, Session], Any]) -> Sequence[Any]:
    return run_ranks(
        lambda rank, channel, bulk: function(rank, Session(channel, bulk, TEST_CONFIG)),
        world_size=RANKS,
        harness="threads",
    )


def two_saves(num_tensors: int) -> list[tuple[dc.SaveReport, dc.SaveReport]]:
    """Save the same layout twice over one session; return each rank's reports."""
    storage = MemoryStorage()

    def save(rank: int, session: Session) -> tuple[dc.SaveReport, dc.SaveReport]:
        cold, steady = (
            save_together(session, many(num_tensors, rank), path, SaveOptions(), storage)
            for path in ("/runs/1", "/runs/2")
        )
        return cold, steady

    return list(on_ranks(save))


def test_a_first_save_takes_three_exchanges_and_one_gather():
    assert FIRST_SAVE == (3, 1)
    for cold, _ in two_saves(3):
        assert talks(cold) == FIRST_SAVE


def test_the_same_layout_again_takes_two_exchanges_and_no_collective():
    assert SAME_LAYOUT_AGAIN == (2, 0)
    for _, steady in two_saves(3):
        assert talks(steady) == SAME_LAYOUT_AGAIN
        assert steady.collectives.nbytes == 0


def test_a_save_that_carries_on_takes_two_exchanges_and_two_collectives_more():
    assert CARRY == (2, 2)
    storage = MemoryStorage()
    save_on_threads(storage, [many(3, rank) for rank in range(RANKS)])

    def carry(rank: int, session: Session) -> dc.SaveReport:
        state, options = {"step": 0}, LoadOptions(include="step")
        loaded = load_together(session, state, PATH, options, storage)
        return save_together(session, state, "/runs/2", SaveOptions(carry_over=loaded), storage)

    for report in on_ranks(carry):
        assert talks(report) == together(FIRST_SAVE, CARRY)
        assert (report.num_linked, report.num_tensors) == (RANKS, 4)


def test_the_same_layout_again_takes_under_1_kb_from_each_rank_besides_its_receipt():
    few, lots = two_saves(3), two_saves(300)
    for rank in range(RANKS):
        small, large = few[rank][1], lots[rank][1]
        assert 0 < large.exchanges.nbytes - large.nbytes_receipt < 1000
        # Nor does a receipt grow with tensors: it has sizes and a digest for each file.
        assert large.nbytes_receipt <= small.nbytes_receipt + 20
        assert (large.nbytes_receipt > 0) == (rank > 0)


def test_ranks_that_hold_the_same_layout_gather_one_inventory():
    storage = MemoryStorage()
    state = {"model": {f"w{number}": torch.ones(2) for number in range(200)}}
    given = [
        report.collectives.nbytes
        for report in on_ranks(
            lambda _, ranks: save_together(ranks, state, "/runs/ck", SaveOptions(), storage)
        )
    ]
    assert given[0] > 1000
    assert len(set(given[1:])) == 1
    assert given[1] < 100


def two_loads(state_of: Callable[[int], Any], **options: Any) -> list[set[tuple[int, int]]]:
    """Save a state, and load it twice over one session; return what each rank's loads took."""
    storage = MemoryStorage()
    save_on_threads(storage, [state_of(rank) for rank in range(RANKS)])

    def load(rank: int, session: Session) -> set[tuple[int, int]]:
        return {
            talks(load_together(session, state_of(rank), PATH, LoadOptions(**options), storage))
            for _ in range(2)
        }

    return list(on_ranks(load))


def together(*parts: tuple[int, int]) -> tuple[int, int]:
    exchanges, collectives = zip(*parts, strict=True)
    return sum(exchanges), sum(collectives)


@pytest.mark.parametrize("num_tensors", [2, 200])
def test_the_exchanges_of_a_load_do_not_depend_on_the_number_of_tensors(num_tensors: int):
    assert LOAD == (3, 0)
    tensors = two_loads(lambda rank: {"model": many(num_tensors, rank)["model"]}, read_once="off")
    assert tensors == [{LOAD}] * RANKS
    with_values = two_loads(lambda rank: many(num_tensors, rank), read_once="off")
    assert with_values == [{together(LOAD, PLACE)}] * RANKS


def test_a_load_from_several_sources_takes_no_exchange_more():
    assert documented("a load from several sources") == LOAD
    storage = MemoryStorage()
    for path in ("/a", "/b", "/c"):
        save_on_threads(storage, [many(50, rank) for rank in range(RANKS)], path)
    states = [{**many(50, rank), "bias": None} for rank in range(RANKS)]
    sources: Any = {"model": ["/a", "/c"], "step": "/b", "bias": dc.Source("/b", include="bias")}
    for outcome in try_load_on_threads(
        lambda _: storage, states, sources, read_once="off", strict=False
    ):
        assert outcome.value is not None, outcome.error
        assert talks(outcome.value) == together(LOAD, PLACE)
        assert [one.path for one in outcome.value.sources] == ["/a", "/c", "/b"]


def test_a_load_has_steps_only_where_a_rank_has_something_to_do_in_them():
    def one_has_an_object(rank: int) -> dict[str, Any]:
        return {"w": torch.ones(9), **({"scheduler": Scheduler()} if rank == 2 else {})}

    assert two_loads(one_has_an_object, read_once="off") == [{together(LOAD, OBJECTS)}] * RANKS
    checked = two_loads(lambda rank: many(2, rank)["model"], read_once="off", check_first=True)
    assert checked == [{together(LOAD, CHECK_FIRST)}] * RANKS


def test_ranks_that_share_meet_once_more(monkeypatch: pytest.MonkeyPatch):
    storage = MemoryStorage()
    save_on_threads(storage, [{"w": torch.ones(9)}])

    def took(hosts: Sequence[str], read_once: str) -> set[tuple[int, int]]:
        outcomes = try_load_on_threads(
            lambda _: storage,
            [{"w": torch.zeros(9)} for _ in hosts],
            hosts=hosts,
            read_once=read_once,
        )
        return {talks(outcome.value) for outcome in outcomes}

    assert took("aaaa", "host") == {together(LOAD, PREPARE)}
    assert took("abcd", "host") == took("aaaa", "off") == {LOAD}
    assert took("aabb", "job") == {together(LOAD, PREPARE, WANTS)}
    assert took("aaaa", "job") == took("aabb", "job")
    monkeypatch.setattr(channel, "MAX_EXCHANGE_NBYTES", 1)
    assert took("aaaa", "host") == {together(LOAD, INDEX, PREPARE, WANTS)}


def test_a_tensor_that_is_made_is_made_before_anything_is_read_anywhere():
    storage = MemoryStorage()
    save_on_threads(storage, [{"w": torch.ones(9)}])
    states = [{"w": None if rank == 1 else torch.zeros(9)} for rank in range(RANKS)]
    for outcome in try_load_on_threads(lambda _: storage, states, read_once="off"):
        assert outcome.value is not None, outcome.error
        assert talks(outcome.value) == together(LOAD, PREPARE, PLACE)


def test_what_is_too_long_for_an_exchange_comes_by_a_collective(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(channel, "MAX_EXCHANGE_NBYTES", 1)
    long_index = two_loads(lambda rank: {"model": many(2, rank)["model"]}, read_once="off")
    assert long_index == [{together(LOAD, INDEX)}] * RANKS


class Scheduler:
    def state_dict(self) -> dict[str, Any]:
        return {"last": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {"last": 3}


def test_replicas_are_written_once():
    storage = MemoryStorage()
    state = {"model": {f"w{number}": torch.randn(100, 9) for number in range(7)}, "lr": 0.1}
    outcomes = try_save_on_threads(lambda _: storage, [state] * RANKS)
    reports = [outcome.value for outcome in outcomes if outcome.value is not None]
    assert len(reports) == RANKS
    stored = {path: len(data) for path, data in storage.tree().items() if data is not None}
    assert sum(report.storage_writes.nbytes for report in reports) == sum(stored.values())
    data = [size for path, size in stored.items() if not path.endswith(".json")]
    assert all(report.nbytes == sum(data) for report in reports)
    assert all(report.num_files == len(data) for report in reports)


def test_the_bytes_read_are_those_that_the_storage_gave():
    storage = MemoryStorage()
    save_small(storage, PATH)
    countings = [CountingStorage(storage) for _ in range(RANKS)]
    data = [Counting(counting) for counting in countings]
    states = [rank_state(rank) for rank in range(RANKS)]
    outcomes = try_load_on_threads(lambda rank: data[rank], states)
    for rank, outcome in enumerate(outcomes):
        report = outcome.value
        assert report is not None, outcome.error
        assert report.storage_reads == countings[rank].reads
        assert 0 < report.nbytes_read == sum(data[rank].nbytes.values())
        assert report.nbytes_read < report.storage_reads.nbytes
        assert report.job_nbytes_read == sum(sum(one.nbytes.values()) for one in data)
        assert report.job_nbytes_placed == sum(o.value.nbytes_placed for o in outcomes if o.value)


def clock_of_ranks() -> Any:
    """Return a clock that gains `rank` seconds with each look of a thread rank."""
    looks = {f"rank {rank}": count() for rank in range(RANKS)}

    def monotonic() -> float:
        name = threading.current_thread().name
        return float(next(looks[name]) * int(name.removeprefix("rank ")))

    return SimpleNamespace(monotonic=monotonic)


def test_the_slowest_rank_is_told_to_all(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(saver, "time", clock_of_ranks())
    monkeypatch.setattr(load, "time", clock_of_ranks())
    storage = MemoryStorage()
    states = [many(2, rank) for rank in range(RANKS)]
    saved = try_save_on_threads(lambda _: storage, states)
    loaded = try_load_on_threads(lambda _: storage, states)
    outcomes: list[Outcome] = [*saved, *loaded]
    for outcome in outcomes:
        assert outcome.value is not None, outcome.error
        assert (outcome.value.slowest_rank, outcome.value.slowest_s) == (3, 3.0)
        assert outcome.value.world_size == RANKS


def test_one_rank_logs_what_the_operation_came_to(caplog: pytest.LogCaptureFixture):
    storage = MemoryStorage()
    states = [many(2, rank) for rank in range(RANKS)]
    with caplog.at_level(logging.INFO, "dist_ckpt"):
        saved = save_on_threads(storage, states, step=3)
        loaded = load_on_threads(storage, states)
    told = [record.getMessage() for record in caplog.records]
    assert [line for line in told if "step 3:" in line] == [
        f"save {PATH}: {saved}",
        f"load {PATH}: {loaded}",
    ]


def test_one_process_alone_sends_nothing(tmp_path):
    state = {"model": {"w": torch.ones(100)}}
    saved = dc.save(state, tmp_path / "ck")
    loaded = dc.load(state, tmp_path / "ck")
    for report in (saved, loaded):
        assert report.exchanges.num > 0
        assert (report.exchanges.nbytes, report.collectives.nbytes) == (0, 0)
    assert loaded.nbytes_received == 0


def test_a_reshard_tells_what_it_read_and_wrote(tmp_path):
    dc.save({"model": {"w": torch.ones(1000)}}, tmp_path / "a", step=2)
    report = dc.reshard(tmp_path / "a", tmp_path / "b", world_size=3)
    files = [file.stat().st_size for file in (tmp_path / "b").rglob("*") if file.is_file()]
    assert report.storage_writes.nbytes == sum(files)
    assert report.storage_reads.nbytes > 4000
    assert (report.world_size, report.exchanges) == (1, IoCount())
    assert 0 < report.slowest_s == report.seconds["write"]


SAVED = dc.SaveReport(
    path="/runs/ck",
    step=1200,
    attempt="a1-0",
    world_size=8,
    nbytes=12_300_000_000,
    num_tensors=3,
    num_files=9,
    seconds={"agree": 0.4, "write": 3.7},
    slowest_rank=5,
    slowest_s=3.6,
    exchanges=IoCount(2, 700),
    collectives=IoCount(),
    nbytes_receipt=200,
    storage_reads=IoCount(),
    storage_writes=IoCount(10, 2_000_000_000),
)
LOADED = dc.LoadReport(
    path="/runs/ck",
    step=1200,
    attempt="a1-0",
    world_size=8,
    restored=(),
    resharded=(),
    missing=(),
    unexpected=(),
    dropped=(),
    nbytes_read=1_500_000_000,
    nbytes_received=500_000_000,
    nbytes_placed=2_000_000_000,
    nbytes_from_memory=0,
    job_nbytes_read=12_000_000_000,
    job_nbytes_placed=16_000_000_000,
    seconds={"open": 0.5, "read": 3.5},
    slowest_rank=1,
    slowest_s=3.0,
    exchanges=IoCount(7, 900),
    collectives=IoCount(1, 20_000),
    storage_reads=IoCount(400, 1_500_100_000),
)


def test_a_report_reads_as_one_line():
    saved = "saved step 1200: 12.3 GB by 8 ranks in 4.1 s (3 GB/s; write 3.6 s, slowest rank 5)"
    assert str(SAVED) == saved
    loaded = "loaded step 1200: 16 GB on 8 ranks in 4 s (4 GB/s; read 12 GB in 3 s, slowest rank 1)"
    assert str(LOADED) == loaded
    kept = f"{loaded[:-1]}; 1.2 MB here from memory)"
    assert str(replace(LOADED, nbytes_from_memory=1_200_000)) == kept


def test_of_several_sources_the_line_names_all():
    one = dc.LoadedSource("/runs/a", 7, "a1-0", ("w",))
    sources = (one, replace(one, path="/runs/b", step=None))
    assert str(replace(LOADED, sources=sources)).startswith("loaded /runs/a and /runs/b: 16 GB on")


def test_without_a_step_the_line_names_the_path_and_of_one_rank_it_names_none():
    saved = replace(SAVED, step=None, world_size=1, nbytes=41_000, slowest_rank=0)
    assert str(saved) == "saved /runs/ck: 41 kB by 1 rank in 4.1 s (10 kB/s; write 3.6 s)"
    loaded = replace(LOADED, step=None, world_size=1)
    assert str(loaded).endswith("/runs/ck: 16 GB on 1 rank in 4 s (4 GB/s; read 12 GB in 3 s)")


def test_rates_are_the_jobs_bytes_by_the_slowest_ranks_seconds_or_those_of_the_call():
    assert SAVED.write_gb_per_s == pytest.approx(12.3 / 3.6)
    assert SAVED.gb_per_s == pytest.approx(12.3 / 4.1)
    assert LOADED.read_gb_per_s == pytest.approx(12 / 3)
    assert LOADED.gb_per_s == pytest.approx(16 / 4)


def test_what_was_not_measured_has_no_rate():
    assert replace(SAVED, slowest_s=0.0).write_gb_per_s == 0.0
