from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt.core.format.geometry import joined
from dist_ckpt.core.planning.load.read_sharing import (
    SHARED_RANGE_NBYTES,
    BlockRequests,
    BlockRuns,
    SharedBlockRange,
    have_equal_requests,
    receivers_of,
    shared_block_ranges,
)
from dist_ckpt.core.runtime.typed_msgpack import decode, encode

MIB = 1 << 20


def runs_of(numbers: set[int]) -> BlockRuns:
    return tuple(joined(range(number, number + 1) for number in sorted(numbers)))


def starts_of(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:n]) for n in range(len(sizes) + 1)]


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, list[int], dict[int, BlockRequests]]:
    """Return a file's number, its blocks and what some ranks want of it."""
    sizes = draw(st.lists(st.integers(1, 6 * MIB), min_size=1, max_size=24))
    numbers = st.sets(st.integers(0, len(sizes) - 1))
    file = draw(st.integers(0, 5))
    wants = {}
    for rank in draw(st.sets(st.integers(0, 9), min_size=1, max_size=6)):
        blocks, host = draw(numbers), draw(st.sampled_from("abc"))
        wants[rank] = BlockRequests.of(
            host, {file: runs_of(blocks)} if blocks else {file + 1: (range(3),)}
        )
    return file, starts_of(sizes), wants


def wanters(wants: Mapping[int, BlockRequests], file: int, block: int) -> set[int]:
    return {rank for rank, want in wants.items() if any(block in run for run in want.runs(file))}


@given(cases())
def test_a_block_is_in_one_unit_if_several_ranks_want_it_and_in_none_else(case):
    file, starts, wants = case
    units = shared_block_ranges(file, starts, wants)
    for block in range(len(starts) - 1):
        holding = [unit for unit in units if block in unit.blocks]
        ranks = wanters(wants, file, block)
        assert len(holding) == (len(ranks) > 1)
        for unit in holding:
            told = [rank for host in unit.hosts for rank in host]
            assert sorted(told) == sorted(ranks)
    assert all(a.blocks.stop <= b.blocks.start for a, b in pairwise(units))


@given(cases())
def test_ranks_want_the_same_if_a_block_is_wanted_by_two_that_share(case):
    _, _, wants = case
    wanted = [
        (want.host, file, block)
        for want in wants.values()
        for file in want.steps
        for run in want.runs(file)
        for block in run
    ]
    assert have_equal_requests(wants.values(), between_hosts=False) == (
        len({*wanted}) < len(wanted)
    )
    anywhere = {place[1:] for place in wanted}
    assert have_equal_requests(wants.values(), between_hosts=True) == (len(anywhere) < len(wanted))


@given(cases())
def test_each_unit_comes_to_each_host_once_and_from_there_to_its_ranks(case):
    file, starts, wants = case
    for unit in shared_block_ranges(file, starts, wants):
        assert unit.fetcher == unit.hosts[0][0]
        assert unit.agents == tuple(host[0] for host in unit.hosts[1:])
        names = [{wants[rank].host for rank in host} for host in unit.hosts]
        assert all(len(name) == 1 for name in names)
        assert len({name for (name,) in names}) == len(unit.hosts)
        assert all(unit.host_of(rank) is host for host in unit.hosts for rank in host)


@given(cases())
def test_a_unit_is_one_block_or_fits_a_slot(case):
    file, starts, wants = case
    for unit in shared_block_ranges(file, starts, wants):
        nbytes = starts[unit.blocks.stop] - starts[unit.blocks.start]
        assert len(unit.blocks) == 1 or nbytes <= SHARED_RANGE_NBYTES


@given(cases())
def test_every_rank_derives_the_same_units_whatever_else_it_knows(case):
    file, starts, wants = case
    found = shared_block_ranges(file, starts, wants)
    only_this_file = {rank: want for rank, want in reversed(wants.items()) if file in want.steps}
    assert shared_block_ranges(file, starts, only_this_file) == found


@given(st.dictionaries(st.integers(0, 9), st.sets(st.integers(0, 40), min_size=1)))
def test_what_a_rank_wants_comes_back_from_its_message(blocks):
    runs = {file: runs_of(numbers) for file, numbers in blocks.items()}
    told = decode(encode(BlockRequests.of("host", runs)), BlockRequests)
    assert told.host == "host"
    assert {file: told.runs(file) for file in told.steps} == runs
    assert told.runs(10) == ()


def fetched(units: Sequence[SharedBlockRange], starts: Sequence[int]) -> dict[int, int]:
    nbytes: dict[int, int] = {}
    for unit in units:
        size = starts[unit.blocks.stop] - starts[unit.blocks.start]
        nbytes[unit.fetcher] = nbytes.get(unit.fetcher, 0) + size
    return nbytes


@given(
    sizes=st.lists(st.integers(1, 6 * MIB), min_size=1, max_size=60),
    world_size=st.integers(2, 6),
    file=st.integers(0, 9),
)
def test_what_all_want_is_fetched_in_equal_parts_but_for_one_unit(sizes, world_size, file):
    starts = starts_of(sizes)
    all_of_it = {
        rank: BlockRequests.of("a", {file: (range(len(sizes)),)}) for rank in range(world_size)
    }
    nbytes = fetched(shared_block_ranges(file, starts, all_of_it), starts)
    parts = [nbytes.get(rank, 0) for rank in range(world_size)]
    assert sum(parts) == starts[-1]
    assert max(parts) - min(parts) <= max(SHARED_RANGE_NBYTES, *sizes)


def test_a_rank_with_much_to_read_alone_fetches_less_for_others():
    starts = starts_of([4 * MIB] * 9)
    wants = {
        0: BlockRequests.of("a", {0: (range(9),)}),
        1: BlockRequests.of("a", {0: (range(6, 9),)}),
    }
    units = shared_block_ranges(0, starts, wants)
    assert [unit.fetcher for unit in units] == [1, 1, 1]


def test_small_files_are_fetched_by_different_ranks():
    all_of_it = BlockRequests.of("a", {file: (range(1),) for file in range(8)})
    wants = dict.fromkeys(range(4), all_of_it)
    units = [unit for file in range(8) for unit in shared_block_ranges(file, [0, 10], wants)]
    assert sorted(unit.fetcher for unit in units) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_between_hosts_each_rank_of_a_host_brings_its_part():
    starts = starts_of([4 * MIB] * 12)
    wants = {rank: BlockRequests.of("ab"[rank // 2], {0: (range(12),)}) for rank in range(4)}
    units = shared_block_ranges(0, starts, wants)
    brought = [host[0] for unit in units for host in unit.hosts]
    assert {rank: brought.count(rank) for rank in range(4)} == dict.fromkeys(range(4), 6)
    assert fetched(units, starts) == dict.fromkeys(range(4), 12 * MIB)


def test_partners_are_the_ranks_of_the_same_host_only():
    unit = SharedBlockRange(0, range(3), ((2, 0), (1, 3, 5)))
    assert receivers_of(0, [unit]) == [2]
    assert receivers_of(3, [unit]) == [1, 5]


def test_the_message_of_a_rank_that_wants_all_of_a_large_file_is_short():
    assert len(encode(BlockRequests.of("host", {7: (range(1_000_000),)}))) < 30


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([], []),
        ([range(1, 2), range(2, 4)], [range(1, 4)]),
        ([range(1), range(2, 3)], [range(1), range(2, 3)]),
    ],
)
def test_runs_that_adjoin_are_joined(runs, expected):
    assert list(joined(runs)) == expected
