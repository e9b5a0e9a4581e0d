from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from dist_ckpt.core.comm.collectives.collective import SingleProcessCollective
from dist_ckpt.core.comm.exchange.channel import SingleProcessChannel
from dist_ckpt.core.comm.process_group import session_of
from dist_ckpt.core.comm.session import Session
from dist_ckpt.testing.thread_channel import ThreadChannel, ThreadCollective, ThreadStore
from exchanges import exchange
from ranks import run_ranks, try_ranks


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def test_without_a_process_group_a_process_is_alone():
    session = session_of()
    assert isinstance(session.channel, SingleProcessChannel)
    assert session.group_ranks == (0,)
    with session.operation("save"):
        assert exchange(session.channel, "agree", lambda: 3, sum) == 3
        assert session.collective.broadcast(b"data") == b"data"


def test_common_memory_is_kept_for_who_needs_no_more_than_it_has():
    session = Session(SingleProcessChannel(), SingleProcessCollective())
    with session.shared_scratch(4096) as first:
        pass
    with session.shared_scratch(100) as again:
        assert again is first
    with session.shared_scratch(4097) as larger:
        assert larger.view.nbytes >= 4097
    with session.shared_scratch(1) as again:
        assert again is larger


def test_common_memory_is_not_used_again_after_an_error():
    session = Session(SingleProcessChannel(), SingleProcessCollective())
    with pytest.raises(OSError, match="hangs"), session.shared_scratch(4096) as first:
        raise OSError("a call hangs that may write into it")
    with session.shared_scratch(4096) as second:
        assert second is not first


def test_without_a_process_group_a_thread_keeps_its_session_and_shares_it_with_no_other():
    with ThreadPoolExecutor(1) as other:
        assert session_of() is session_of()
        assert other.submit(session_of).result(timeout=10) is not session_of()


def test_a_session_is_not_kept_when_the_environment_asks_for_other_options(monkeypatch):
    before = session_of()
    monkeypatch.setenv("DIST_CKPT_THREADS", "3")
    assert session_of().settings.threads == 3
    assert session_of() is not before


def test_several_launched_ranks_without_a_process_group_are_told_the_line_to_add(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"WORLD_SIZE is 4.*init_process_group\(\)"):
        session_of()


@pytest.mark.parametrize("text", ["1", "", "many"])
def test_a_launcher_of_one_rank_needs_no_process_group(monkeypatch, text):
    monkeypatch.setenv("WORLD_SIZE", text)
    assert session_of().channel.world_size == 1


def test_a_group_without_an_initialised_torch_distributed_is_told_the_line_to_add():
    with pytest.raises(ValueError, match=r"init_process_group\(\)"):
        session_of(object())  # type: ignore[arg-type]


def test_options_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("DIST_CKPT_JOIN_TIMEOUT_S", "7")
    assert session_of().settings.join_timeout_s == 7


def test_the_name_of_the_host_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("DIST_CKPT_HOST", "7")
    assert session_of().settings.host == "7"


def test_an_operation_is_left_also_after_an_error():
    def run(rank: int, channel: ThreadChannel, collective: ThreadCollective) -> object:
        session = Session(channel, collective)
        with pytest.raises(ZeroDivisionError), session.operation("save"):
            raise ZeroDivisionError
        with session.operation("save"):
            return exchange(channel, "agree", lambda: rank, sum)

    assert run_ranks(run, world_size=2, harness="threads") == [1, 1]


def test_an_operation_is_left_also_if_an_interrupt_meets_its_end(monkeypatch):
    channel = ThreadChannel(ThreadStore(), 0, 1)
    session = Session(channel, SingleProcessCollective())

    def interrupted() -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(channel, "leave", interrupted)
    with pytest.raises(KeyboardInterrupt), session.operation("save to a"):
        pass
    with session.operation("save to b"):
        pass
    channel.close()


def test_the_bulk_connections_have_the_number_that_they_are_renewed_with():
    def run(rank: int, channel: ThreadChannel, collective: ThreadCollective) -> object:
        session = Session(channel, collective)
        assert session.collective.generation == 0
        session.collective.renew(3)
        return collective.generation

    outcomes = try_ranks(run, world_size=2, harness="threads")
    assert [outcome.value for outcome in outcomes] == [3, 3]


def test_a_closed_session_keeps_no_scratch_memory():
    session = Session(SingleProcessChannel(), SingleProcessCollective())
    with session.scratch_buffers.borrow() as before:
        pass
    session.close()
    with session.scratch_buffers.borrow() as after:
        assert after is not before
