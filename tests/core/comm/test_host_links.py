from __future__ import annotations

import errno
import os
import secrets
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from dist_ckpt.core.comm.collectives import host_links
from dist_ckpt.core.comm.collectives.host_links import HostLinks, SharedScratch
from dist_ckpt.core.comm.rank_messages import SecondaryError

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="this system has no memory without a name"
)

NBYTES = 4096


@pytest.fixture
def meeting() -> str:
    return secrets.token_hex(16)


def links_of(meeting: str, rank: int, timeout_s: float = 5) -> HostLinks:
    """Return links that offer new memory."""
    memory = SharedScratch(NBYTES)
    links = HostLinks(meeting, rank, timeout_s=timeout_s)
    links.offer(memory)
    return links


@pytest.fixture
def two(meeting: str) -> Iterator[tuple[HostLinks, HostLinks]]:
    """Return the links of ranks 0 and 3, which are linked."""
    low, high = (links_of(meeting, n) for n in (0, 3))
    assert high.connect([0]) == low.connect([3]) == []
    high.accept([0])
    low.accept([3])
    yield low, high
    low.close()
    high.close()


def heard(links: HostLinks, number: int) -> list[tuple[int, bytes | None]]:
    found: list[tuple[int, bytes | None]] = []
    while len(found) < number:
        found += links.receive(5)
    return found


def test_messages_arrive_whole_and_in_order(two):
    low, high = two
    for text in (b"one", b"two"):
        low.send(3, text)
    high.send(0, b"three")
    assert heard(high, 2) == [(0, b"one"), (0, b"two")]
    assert heard(low, 1) == [(3, b"three")]


def test_who_hears_of_a_rank_sees_its_memory(two):
    low, high = two
    low.memory_of(0)[:5] = b"bytes"
    low.send(3, b"look")
    assert heard(high, 1) == [(0, b"look")]
    assert bytes(high.memory_of(0)[:5]) == b"bytes"
    high.memory_of(3)[-4:] = b"more"
    assert bytes(low.memory_of(3)[-4:]) == b"more"


def test_the_end_of_a_rank_is_told_after_its_last_message(two):
    low, high = two
    low.send(3, b"last")
    low.close()
    assert heard(high, 2) == [(0, b"last"), (0, None)]
    high.send(0, b"too late")


def test_memory_outlives_the_rank_whose_it_was(two):
    low, high = two
    low.memory_of(0)[:5] = b"bytes"
    low.send(3, b"look")
    heard(high, 1)
    taken = high.memory_of(0)
    low.close()
    assert bytes(taken[:5]) == b"bytes"


def test_a_rank_can_be_woken(two):
    low, _ = two
    low.wake()
    assert list(low.receive(60)) == []


def test_after_the_end_nobody_minds_a_call_to_wake(two):
    low, _ = two
    low.close()
    low.wake()


def test_ranks_that_are_not_there_are_out_of_reach(meeting):
    links = links_of(meeting, 5)
    assert links.connect([1, 3, 7]) == [1, 3]
    links.close()


def test_ranks_of_another_meeting_are_out_of_reach(meeting):
    links = [links_of(name, n) for n, name in enumerate("ab")]
    assert links[1].connect([0]) == [0]
    for one in links:
        one.close()


def test_a_rank_that_has_not_connected_is_waited_for_no_longer_than_said(meeting):
    links = links_of(meeting, 0, 0.01)
    with pytest.raises(SecondaryError, match="no connection from rank 2 within"):
        links.accept([2])
    links.close()


def test_a_rank_that_gives_up_before_it_is_accepted_is_a_fallout(meeting):
    low, high = (links_of(meeting, n) for n in (0, 3))
    high.connect([0])
    high.close()
    with pytest.raises(SecondaryError, match="has failed or died"):
        low.accept([3])
    low.close()


def test_the_processes_of_other_users_are_not_let_in(meeting, monkeypatch):
    low = links_of(meeting, 0, 0.01)
    high = links_of(meeting, 3)
    high.connect([0])
    monkeypatch.setattr(host_links, "_is_own_user", lambda _: False)
    with pytest.raises(SecondaryError):
        low.accept([3])
    assert heard(high, 1) == [(0, None)]
    assert high.connect([0]) == [0]
    low.close()
    high.close()


@pytest.mark.parametrize(
    "hello",
    [b"", b"hi", struct.pack("<q32s", 3, b"another meeting")],
    ids=["silent", "short", "of another meeting"],
)
def test_strangers_are_not_let_in_and_what_they_hand_over_is_closed(meeting, hello):
    low, high = (links_of(meeting, n) for n in (0, 3))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        read_end, write_end = os.pipe()
        stranger.connect(low._address(0))
        if hello:
            socket.send_fds(stranger, [hello], [write_end])
        os.close(write_end)
        high.connect([0])
        low.accept([3])
        os.set_blocking(read_end, False)
        assert os.read(read_end, 1) == b""
        os.close(read_end)
        low.send(3, b"x")
        assert heard(high, 1) == [(0, b"x")]
    low.close()
    high.close()


def test_strangers_one_after_the_other_keep_nobody_waiting_for_ever(meeting):
    links, is_over = links_of(meeting, 0, 0.3), threading.Event()

    def crowd() -> None:
        while not is_over.is_set():
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                stranger.settimeout(1)
                with suppress(OSError):
                    stranger.connect(links._address(0))

    strangers = [threading.Thread(target=crowd) for _ in range(3)]
    for one in strangers:
        one.start()
    # What ends a wait that nothing else ends.
    alarm = threading.Timer(100, is_over.set)
    alarm.start()
    with pytest.raises(SecondaryError, match="no connection from rank 2 within"):
        links.accept([2])
    alarm.cancel()
    assert not is_over.is_set(), "the strangers kept it waiting"
    is_over.set()
    for one in strangers:
        one.join()
    links.close()


def test_the_names_of_sockets_do_not_tell_the_meeting(meeting):
    low = links_of(meeting, 0)
    with open("/proc/net/unix") as names:
        text = names.read()
    assert low._address(0)[1:] in text
    assert meeting not in text
    low.close()


def test_links_end_though_a_forked_child_still_has_them(two):
    low, high = two
    child = os.dup(low._sockets[3].fileno())
    low.close()
    assert heard(high, 1) == [(0, None)]
    os.close(child)


def test_memory_that_did_not_come_along_is_an_error(two, monkeypatch):
    low, high = two
    low.send(3, b"x")
    monkeypatch.setattr(socket, "recv_fds", lambda *_: (bytes(host_links._HELLO.size), [], 0, None))
    with pytest.raises(OSError, match="too many open files") as raised:
        list(high.receive(5))
    assert raised.value.errno == errno.EMFILE


def test_a_system_without_such_memory_says_so(meeting, monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(OSError, match="shared memory"):
        links_of(meeting, 0)


def open_files() -> set[tuple[str, str]]:
    """Return the descriptors of this process, and what each is of."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # of the listing itself
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
    return found


def test_without_memory_there_are_no_links_and_nothing_is_left(meeting, monkeypatch):
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    before = open_files()
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match="full"):
            links_of(meeting, 0)
    assert open_files() <= before  # what others have left may be closed meanwhile
    links_of(meeting, 0).close()
