"""Messages between a trainer and its writer arrive as they were, or the link is given up."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import get_args

import msgpack
import msgspec
import pytest

from dist_ckpt.async_save.writer.writer_messages import (
    MAX_MESSAGE_NBYTES,
    Abort,
    Close,
    Done,
    Go,
    Hello,
    Link,
    LinkClosedError,
    Pause,
    Paused,
    Ping,
    Pong,
    ProtocolError,
    Ready,
    Refused,
    Serve,
    Serving,
    Write,
    WriterMessage,
)
from dist_ckpt.core.comm.rank_messages import Failure
from dist_ckpt.settings import Settings
from fake_writers import A_REPORT

FAILURE = Failure("RankError", "x", 1, "write", ("a",))
MESSAGES: list[WriterMessage] = [
    Hello("job", 1, 4, Settings(heartbeat_timeout_s=7.5, host="a"), None),
    Hello("job", 1, 4, Settings(), 1e6),
    Serve(b"t" * 32, "node0"),
    Write("0" * 32, "/ck", "/dev/shm/a", 1, "127.0.0.1", 1234, b"t"),
    Abort("0" * 32, "no memory"),
    Pause("0" * 32),
    Go("0" * 32, drop=True),
    Ping(),
    Close(),
    Ready(17),
    Refused(FAILURE),
    Serving("127.0.0.1", 1234),
    Paused("0" * 32, is_paused=False),
    Pong(),
    Done("0" * 32, A_REPORT, None),
    Done("0" * 32, None, FAILURE),
]


@pytest.fixture
def ends() -> Iterator[tuple[Link, socket.socket]]:
    ours, theirs = socket.socketpair()
    link = Link(ours)
    yield link, theirs
    link.close()
    theirs.close()


def framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


@pytest.mark.parametrize("message", MESSAGES, ids=lambda one: type(one).__name__)
def test_a_message_arrives_as_it_was(ends, message):
    link, theirs = ends
    other = Link(theirs)
    other.send(message)
    assert link.receive(10) == message


def test_every_kind_of_message_has_an_example():
    assert {type(message) for message in MESSAGES} == set(get_args(WriterMessage))


def test_messages_come_apart_again_wherever_they_are_cut(ends):
    link, theirs = ends
    data = bytearray()
    for message in MESSAGES:
        data += framed(msgspec.msgpack.encode(message))
    received = []
    for start in range(len(data)):
        theirs.sendall(data[start : start + 1])
        if (message := link.receive(0)) is not None:
            received.append(message)
    assert received == MESSAGES


def test_nothing_in_time_is_none_and_the_end_is_an_error(ends):
    link, theirs = ends
    assert link.receive(0) is None
    theirs.sendall(struct.pack(">I", 7)[:3])
    assert link.receive(0) is None
    theirs.close()
    with pytest.raises(LinkClosedError, match="is gone"):
        link.receive(10)
    with pytest.raises(LinkClosedError, match="is gone"):
        link.send(Close())


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">I", MAX_MESSAGE_NBYTES + 1),
        framed(b""),
        framed(b"\xc1"),
        framed(msgpack.packb(7)),
        framed(msgpack.packb([])),
        framed(msgpack.packb([99])),
        framed(msgpack.packb([-1])),
        framed(msgpack.packb([True])),
        framed(msgpack.packb([[0]])),
        framed(msgpack.packb(["Pause"])),
        framed(msgpack.packb(["Pause", 7])),
        framed(msgpack.packb(["Pause", "a", "b"])),
        framed(msgpack.packb(["Go", "a", 1])),
        framed(msgpack.packb(["Ready", True])),
        framed(msgpack.packb(["Hello", "job", 0, 1, [], None])),
        framed(msgpack.packb(["Hello", "job", 0, 1, {"heartbeat_timeout_s": -1.0}, None])),
        framed(msgpack.packb(["Pause", "a"]) + b"more"),
        framed(b"\x92" + msgpack.packb("Pause") + b"\xa1\xff"),
    ],
)
def test_nonsense_ends_the_link(ends, data):
    link, theirs = ends
    theirs.sendall(data)
    with pytest.raises(ProtocolError, match="invalid"):
        link.receive(10)


def test_who_takes_nothing_is_given_up(ends):
    link, theirs = ends
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    short = struct.pack("ll", 0, 10_000)
    link._end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, short)
    with suppress(BlockingIOError):
        while True:
            link._end.send(b"x" * 1000, socket.MSG_DONTWAIT)
    with pytest.raises(LinkClosedError):
        link.send(Abort("0" * 32, "x" * 100_000))
    with pytest.raises(LinkClosedError):  # what comes next would follow half a message
        link.send(Close())


def test_a_thread_that_waits_does_not_keep_others_from_sending(ends):
    link, theirs = ends
    other = Link(theirs)
    heard: list[WriterMessage | None] = []
    thread = threading.Thread(target=lambda: heard.append(link.receive(60)))
    thread.start()
    link.send(Ready(1))
    assert other.receive(10) == Ready(1)
    other.send(Close())
    thread.join(60)
    assert heard == [Close()]


def test_a_forked_child_does_not_keep_the_link_open(ends):
    link, theirs = ends
    wait, go = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go)
        os.close(theirs.fileno())
        os.read(wait, 1)
        os._exit(0)
    try:
        link.close()
        theirs.settimeout(60)
        assert theirs.recv(1) == b""
    finally:
        os.close(go)
        os.waitpid(child, 0)
        os.close(wait)
