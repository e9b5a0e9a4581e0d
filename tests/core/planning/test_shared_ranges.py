from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt.core.format.geometry import join_ranges
from dist_ckpt.core.planning.load.shared_ranges import (
    SHARED_RANGE_NBYTES,
    BlockRanges,
    RankBlockRequests,
    SharedBlockRange,
    find_partners,
    find_shared_ranges,
    has_shared_blocks,
)
from dist_ckpt.core.runtime.typed_msgpack import decode, encode

MIB = 1 << 20


def find_ranges(numbers: set[int]) -> BlockRanges:
    return tuple(join_ranges(range(number, number + 1) for number in sorted(numbers)))


def starts_of(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:n]) for n in range(len(sizes) + 1)]


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, list[int], dict[int, RankBlockRequests]]:
    """Return a file's number, its blocks and what some ranks want of it."""
    sizes = draw(st.lists(st.integers(1, 6 * MIB), min_size=1, max_size=24))
    numbers = st.sets(st.integers(0, len(sizes) - 1))
    file = draw(st.integers(0, 5))
    requests_by_rank = {}
    for rank in draw(st.sets(st.integers(0, 9), min_size=1, max_size=6)):
        blocks, host = draw(numbers), draw(st.sampled_from("abc"))
        requests_by_rank[rank] = RankBlockRequests.of(
            host, {file: find_ranges(blocks)} if blocks else {file + 1: (range(3),)}
        )
    return file, starts_of(sizes), requests_by_rank


def wanters(requests_by_rank: Mapping[int, RankBlockRequests], file: int, block: int) -> set[int]:
    return {
        rank
        for rank, requests in requests_by_rank.items()
        if any(block in blocks for blocks in requests.block_ranges(file))
    }


@given(cases())
def test_a_block_is_in_one_unit_if_several_ranks_want_it_and_in_none_else(case):
    file, starts, requests_by_rank = case
    ranges = find_shared_ranges(file, starts, requests_by_rank)
    for block in range(len(starts) - 1):
        holding = [one for one in ranges if block in one.blocks]
        ranks = wanters(requests_by_rank, file, block)
        assert len(holding) == (len(ranks) > 1)
        for one in holding:
            told = [rank for host in one.ranks_by_host for rank in host]
            assert sorted(told) == sorted(ranks)
    assert all(a.blocks.stop <= b.blocks.start for a, b in pairwise(ranges))


@given(cases())
def test_ranks_want_the_same_if_a_block_is_wanted_by_two_that_share(case):
    _, _, requests_by_rank = case
    wanted = [
        (requests.host, file, block)
        for requests in requests_by_rank.values()
        for file in requests.gaps_and_lengths
        for blocks in requests.block_ranges(file)
        for block in blocks
    ]
    assert has_shared_blocks(requests_by_rank.values(), between_hosts=False) == (
        len({*wanted}) < len(wanted)
    )
    anywhere = {place[1:] for place in wanted}
    assert has_shared_blocks(requests_by_rank.values(), between_hosts=True) == (
        len(anywhere) < len(wanted)
    )


@given(cases())
def test_each_unit_comes_to_each_host_once_and_from_there_to_its_ranks(case):
    file, starts, requests_by_rank = case
    for one in find_shared_ranges(file, starts, requests_by_rank):
        assert one.fetcher == one.ranks_by_host[0][0]
        assert one.agents == tuple(host[0] for host in one.ranks_by_host[1:])
        names = [{requests_by_rank[rank].host for rank in host} for host in one.ranks_by_host]
        assert all(len(name) == 1 for name in names)
        assert len({name for (name,) in names}) == len(one.ranks_by_host)
        assert all(
            one.ranks_on_host_of(rank) is host for host in one.ranks_by_host for rank in host
        )


@given(cases())
def test_a_shared_range_is_one_block_or_fits_a_slot(case):
    file, starts, requests_by_rank = case
    for one in find_shared_ranges(file, starts, requests_by_rank):
        nbytes = starts[one.blocks.stop] - starts[one.blocks.start]
        assert len(one.blocks) == 1 or nbytes <= SHARED_RANGE_NBYTES


@given(cases())
def test_every_rank_derives_the_same_ranges_whatever_else_it_knows(case):
    file, starts, requests_by_rank = case
    found = find_shared_ranges(file, starts, requests_by_rank)
    only_this_file = {
        rank: requests
        for rank, requests in reversed(requests_by_rank.items())
        if file in requests.gaps_and_lengths
    }
    assert find_shared_ranges(file, starts, only_this_file) == found


@given(st.dictionaries(st.integers(0, 9), st.sets(st.integers(0, 40), min_size=1)))
def test_what_a_rank_wants_comes_back_from_its_message(blocks):
    ranges = {file: find_ranges(numbers) for file, numbers in blocks.items()}
    told = decode(encode(RankBlockRequests.of("host", ranges)), RankBlockRequests)
    assert told.host == "host"
    assert {file: told.block_ranges(file) for file in told.gaps_and_lengths} == ranges
    assert told.block_ranges(10) == ()


def fetched(ranges: Sequence[SharedBlockRange], starts: Sequence[int]) -> dict[int, int]:
    nbytes: dict[int, int] = {}
    for one in ranges:
        size = starts[one.blocks.stop] - starts[one.blocks.start]
        nbytes[one.fetcher] = nbytes.get(one.fetcher, 0) + size
    return nbytes


@given(
    sizes=st.lists(st.integers(1, 6 * MIB), min_size=1, max_size=60),
    world_size=st.integers(2, 6),
    file=st.integers(0, 9),
)
def test_what_all_want_is_fetched_in_equal_parts_but_for_one_range(sizes, world_size, file):
    starts = starts_of(sizes)
    all_of_it = {
        rank: RankBlockRequests.of("a", {file: (range(len(sizes)),)}) for rank in range(world_size)
    }
    nbytes = fetched(find_shared_ranges(file, starts, all_of_it), starts)
    parts = [nbytes.get(rank, 0) for rank in range(world_size)]
    assert sum(parts) == starts[-1]
    assert max(parts) - min(parts) <= max(SHARED_RANGE_NBYTES, *sizes)


def test_a_rank_with_much_to_read_alone_fetches_less_for_others():
    starts = starts_of([4 * MIB] * 9)
    requests_by_rank = {
        0: RankBlockRequests.of("a", {0: (range(9),)}),
        1: RankBlockRequests.of("a", {0: (range(6, 9),)}),
    }
    ranges = find_shared_ranges(0, starts, requests_by_rank)
    assert [one.fetcher for one in ranges] == [1, 1, 1]


def test_small_files_are_fetched_by_different_ranks():
    all_of_it = RankBlockRequests.of("a", {file: (range(1),) for file in range(8)})
    requests_by_rank = dict.fromkeys(range(4), all_of_it)
    ranges = [
        one for file in range(8) for one in find_shared_ranges(file, [0, 10], requests_by_rank)
    ]
    assert sorted(one.fetcher for one in ranges) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_between_hosts_each_rank_of_a_host_brings_its_part():
    starts = starts_of([4 * MIB] * 12)
    requests_by_rank = {
        rank: RankBlockRequests.of("ab"[rank // 2], {0: (range(12),)}) for rank in range(4)
    }
    ranges = find_shared_ranges(0, starts, requests_by_rank)
    brought = [host[0] for one in ranges for host in one.ranks_by_host]
    assert {rank: brought.count(rank) for rank in range(4)} == dict.fromkeys(range(4), 6)
    assert fetched(ranges, starts) == dict.fromkeys(range(4), 12 * MIB)


def test_partners_are_the_ranks_of_the_same_host_only():
    one = SharedBlockRange(0, range(3), ((2, 0), (1, 3, 5)))
    assert find_partners(0, [one]) == [2]
    assert find_partners(3, [one]) == [1, 5]


def test_the_message_of_a_rank_that_wants_all_of_a_large_file_is_short():
    assert len(encode(RankBlockRequests.of("host", {7: (range(1_000_000),)}))) < 30


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        ([], []),
        ([range(1, 2), range(2, 4)], [range(1, 4)]),
        ([range(1), range(2, 3)], [range(1), range(2, 3)]),
    ],
)
def test_ranges_that_adjoin_are_joined(ranges, expected):
    assert list(join_ranges(ranges)) == expected
