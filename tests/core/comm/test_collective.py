from __future__ import annotations

import pytest

from dist_ckpt.core.comm.collectives.collective import (
    SingleProcessCollective,
    payload_name,
    payload_nbytes,
    ranks_by_value,
)
from dist_ckpt.core.comm.rank_messages import SecondaryError
from dist_ckpt.errors import RankError
from dist_ckpt.settings import Settings
from dist_ckpt.testing.thread_channel import ThreadChannel, ThreadCollective
from exchanges import exchange
from ranks import run_ranks, try_ranks


def test_a_name_tells_the_size_and_differs_with_every_byte():
    assert payload_nbytes(payload_name(bytes(1000))) == 1000
    assert len({payload_name(payload) for payload in (b"", b"a", b"b", b"aa")}) == 4


def test_distinct_names_are_ordered_by_their_lowest_ranks():
    assert list(ranks_by_value([b"x", b"a", b"x", b"b", b"a"]).items()) == [
        (b"x", (0, 2)),
        (b"a", (1, 4)),
        (b"b", (3,)),
    ]


def test_alone_what_is_given_comes_back():
    alone = SingleProcessCollective()
    assert alone.all_gather_distinct(b"payload") == ((b"payload", (0,)),)
    assert alone.broadcast(b"data") == b"data"


def test_thread_ranks_get_the_distinct_bodies_and_rank_0s_data():
    def run(rank: int, _: ThreadChannel, collective: ThreadCollective) -> object:
        payloads = collective.all_gather_distinct(b"even" if rank % 2 == 0 else b"odd")
        return payloads, collective.broadcast(b"zero" if rank == 0 else None)

    expected = (((b"even", (0, 2)), (b"odd", (1, 3))), b"zero")
    assert run_ranks(run, world_size=4, harness="threads") == [expected] * 4


def test_thread_ranks_send_bytes_to_each_other_by_tag():
    def run(rank: int, _: ThreadChannel, collective: ThreadCollective) -> object:
        if rank == 2:
            return None
        sent = [
            collective.send(1 - rank, memoryview(bytes([rank, tag] * 3)), tag) for tag in (0, 1)
        ]
        found = [memoryview(bytearray(6)) for _ in range(2)]
        for tag in (1, 0):
            collective.receive(1 - rank, found[tag], tag).wait()
        for transfer in sent:
            transfer.wait()
        return [bytes(one) for one in found]

    expected = [bytes([1, 0] * 3), bytes([1, 1] * 3)], [bytes([0, 0] * 3), bytes([0, 1] * 3)]
    assert run_ranks(run, world_size=3, harness="threads") == [*expected, None]


def test_a_thread_rank_that_breaks_off_lets_all_transfers_fail():
    def run(rank: int, _: ThreadChannel, collective: ThreadCollective) -> object:
        if rank == 2:
            collective.break_off()
            return collective.generation
        data = memoryview(bytearray(1))
        transfer = collective.receive(2, data, 0) if rank else collective.send(1, data, 9)
        with pytest.raises(SecondaryError):
            transfer.wait()
        return collective.generation

    assert run_ranks(run, world_size=3, harness="threads") == [0, 0, 1]


def test_after_a_failure_thread_ranks_meet_again_once_they_agree_on_an_epoch():
    def run(rank: int, channel: ThreadChannel, collective: ThreadCollective) -> object:
        if rank != 2:
            with pytest.raises(RankError, match="did not all meet"):
                collective.broadcast(b"first" if rank == 0 else None)
        channel.enter("again")
        collective.renew(exchange(channel, "agree", lambda: collective.generation, max))
        data = collective.broadcast(b"second" if rank == 0 else None)
        channel.leave()
        return collective.generation, data

    outcomes = try_ranks(
        run,
        world_size=3,
        harness="threads",
        config=Settings(heartbeat_timeout_s=1.5, join_timeout_s=30),
    )
    assert [outcome.value for outcome in outcomes] == [(1, b"second")] * 3
