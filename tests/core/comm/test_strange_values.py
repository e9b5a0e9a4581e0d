"""What a store holds need not be what a rank of ours has stored there: it is refused by name.

There are more of the random cases with --long.
"""

from __future__ import annotations

import random
import threading
import time
import tracemalloc
from collections.abc import Callable
from contextlib import closing, suppress

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_ckpt.core.comm.key_value import client_thread
from dist_ckpt.core.comm.key_value.client_thread import MAX_PARTS, NO_VALUE, PART_NBYTES
from dist_ckpt.core.comm.rank_messages import (
    MAX_DOCUMENT_NBYTES,
    Answer,
    Envelope,
    Failure,
    Heartbeat,
    NoAnswerError,
    build_error,
    pack,
    unpack,
)
from dist_ckpt.core.format import strict_json
from dist_ckpt.core.runtime.typed_msgpack import encode
from dist_ckpt.errors import CheckpointError, RankError
from dist_ckpt.settings import Settings
from dist_ckpt.testing.thread_channel import ThreadChannel, ThreadCollective, ThreadStore
from exchanges import HANG_S, Doc, exchange
from long_mode import IS_LONG, MANY_EXAMPLES
from ranks import try_ranks

pytestmark = pytest.mark.waits

NUM_CASES = MANY_EXAMPLES if IS_LONG else 300
FRAIL = Settings(heartbeat_timeout_s=5.0, join_timeout_s=20.0, join_warning_s=20.0)


FAILURE = Failure("CorruptError", "rank 1 (host b): bad", 1, "read", ("a", "b"), is_secondary=True)
ENVELOPE = Envelope("save to /ck", "write", "0123456789abcdef", b"nonc", pack({"a": [1]}), FAILURE)
MESSAGES: list[tuple[type, bytes]] = [
    (Heartbeat, encode(Heartbeat(3, 2, True, 1, False, "host"))),
    (Envelope, encode(ENVELOPE)),
    (Answer, encode(Answer("save", "", b"noncnonc", pack(None), FAILURE))),
    (Answer, encode(Answer("save", "0123456789abcdef", b"", pack([1, "a"]), None))),
    (object, pack({"a": [1, 2.5, None, True, "text", b"bytes", {"b": []}]})),
]

STRANGE = [
    b"",
    b"\xc1",
    b"\x01",
    b"\x97",
    b"\x91" * 5000,
    b"\xdd\xff\xff\xff\xff",
    b"\xc7\x00\xff",
    b"\xd6\xff\0\0\0\0",
    b"GET / HTTP/1.1\r\n\r\n",
    msgpack.packb([1, 2, 3, 4, 5, 6]),
    msgpack.packb([None] * 6),
    msgpack.packb([1, 1, True, 0, False, b"host"]),
    msgpack.packb([True, 1, True, 0, False, "host"]),
    msgpack.packb([-1, 1, True, 0, False, "host"]),
    msgpack.packb(["save", "agree", "../../x", b"nonc", b"", None, False]),
    msgpack.packb(["save", "agree", "", b"nonces", b"", None, False]),
    msgpack.packb(["save", "agree", "", b"nonc", b"", [1], False]),
    msgpack.packb(["save", "agree", "", b"nonc", b"", None, 1]),
    msgpack.packb(["save", "", b"nonc", b"", ["OSError", "m", 1, "p", [], False]]),
    msgpack.packb(["save", "", b"nonc", b"", ["RankError", "m", True, "p", [], False]]),
    msgpack.packb(["save", "", b"nonc", b"", ["RankError", "m", 1, "p", [1], False]]),
    msgpack.packb(["save", "", b"nonc", b"", {"kind": "RankError"}]),
]


def use(message: object) -> None:
    """Do with a message what who reads it does."""
    if isinstance(message, Envelope | Answer):
        if message.failure is not None:
            build_error(message.failure)
        with suppress(ValueError):
            unpack(message.body, object)
        encode(message)


@pytest.mark.parametrize("kind", [Heartbeat, Envelope, Answer])
@pytest.mark.parametrize("data", STRANGE, ids=range(len(STRANGE)))
def test_what_is_no_message_is_a_value_error_that_says_so(kind: type, data: bytes):
    with pytest.raises(ValueError, match="bytes are not"):
        unpack(data, kind)


def test_messages_are_what_they_were():
    for kind, data in MESSAGES:
        assert encode(unpack(data, kind)) == data


@settings(max_examples=NUM_CASES)
@given(st.data())
def test_a_mutated_message_is_one_or_a_value_error(data: st.DataObject):
    kind, sound = data.draw(st.sampled_from(MESSAGES))
    mutated = bytearray(sound)
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(mutated)))
        stop = data.draw(st.integers(start, min(start + 4, len(mutated))))
        mutated[start:stop] = data.draw(st.binary(max_size=6))
    with suppress(ValueError):
        use(unpack(bytes(mutated), kind))


@settings(max_examples=NUM_CASES)
@given(st.binary(max_size=200), st.integers(0, 2))
def test_any_stored_value_is_read_or_is_nothing(data: bytes, num_parts: int):
    store = ThreadStore()
    store.set("key", data)
    for number in range(num_parts):
        store.set(f"key/{number}", b"part")
    found = client_thread.get_all(store, ["key"])
    if data[:1] == b"w":
        assert found == [data[1:]]
    elif data[:1] == b"x":
        assert found is None
    else:
        assert found in ([NO_VALUE], [b"part"], [b"partpart"])
    client_thread.withdraw(store, ["key"])
    assert client_thread.get_all(store, ["key"]) is None
    client_thread.delete(store, ["key"])
    assert not store.check(["key"])


@pytest.mark.parametrize("head", [b"p1000000000", b"p99999999999999999999", b"p-1", b"p", b"p3"])
def test_parts_that_cannot_be_there_cost_nothing(head: bytes):
    store = ThreadStore()
    store.set("key", head)
    start = time.thread_time()
    assert client_thread.get_all(store, ["key"]) == [NO_VALUE]
    client_thread.withdraw(store, ["key"])
    client_thread.delete(store, ["key"])
    assert store.keys() == ()
    assert time.thread_time() - start < 20  # to count a billion parts takes minutes


def test_a_document_is_as_long_as_the_parts_that_are_read():
    assert MAX_PARTS * PART_NBYTES > MAX_DOCUMENT_NBYTES + (1 << 20)
    with pytest.raises(CheckpointError, match="the limit is"):
        pack(bytes(MAX_DOCUMENT_NBYTES))


# --- a stranger who writes while ranks agree -----------------------------------------------------


class OverwrittenStore(ThreadStore):
    """A store in which somebody has another value under some keys, as soon as there is any."""

    def __init__(self, is_it: Callable[[str], bool], value: bytes) -> None:
        super().__init__()
        self._is_it = is_it
        self._value = value

    def set(self, key: str, value: bytes, /) -> None:
        super().set(key, self._value if self._is_it(key) else value)


def agree_twice(store: ThreadStore) -> list[BaseException | None]:
    """Do an operation of two exchanges on three ranks; return what each has raised."""

    def run(rank: int, _: ThreadChannel, __: ThreadCollective) -> Doc:
        with closing(ThreadChannel(store, rank, 3, FRAIL)) as channel:
            channel.enter("save to /ck")
            try:
                exchange(channel, "agree", lambda: {"rank": rank}, len)
                return exchange(channel, "write", lambda: {"rank": rank}, len)
            finally:
                channel.leave()

    return [outcome.error for outcome in try_ranks(run, world_size=3, harness="threads")]


REMEDY = "Use the same version of dist_ckpt on all ranks"


@pytest.mark.parametrize("turn", [1, 2])
@pytest.mark.parametrize("value", [b"w", b"nonsense", b"w\x97", b"p999999999", b"p2"])
def test_an_envelope_that_is_none_is_told_to_all_with_whose_it_is(turn: int, value: bytes):
    store = OverwrittenStore(lambda key: key == f"1/1/{turn}/2", value)
    for error in agree_twice(store):
        assert isinstance(error, RankError)
        assert error.rank == 2
        assert "in place of a message of rank 2 " in str(error)
        assert REMEDY in str(error)


@pytest.mark.parametrize("turn", [1, 2])
@pytest.mark.parametrize("value", [b"w", b"w\x95", b"p1"])
def test_an_answer_that_is_none_is_told_by_all_who_read_it(turn: int, value: bytes):
    store = OverwrittenStore(lambda key: key == f"1/1/{turn}/answer", value)
    for error in agree_twice(store)[1:]:
        assert isinstance(error, NoAnswerError)
        assert error.rank == 0
        assert "in place of a message of rank 0 " in str(error)
        assert REMEDY in str(error)


def test_a_document_within_a_message_is_checked_as_well():
    strange = encode(Envelope("save to /ck", "agree", "", b"nonc", b"\xc1", None))
    store = OverwrittenStore(lambda key: key == "1/1/1/1", b"w" + strange)
    for error in agree_twice(store):
        assert isinstance(error, RankError)
        assert "in place of a message of rank 1 " in str(error)


@pytest.mark.parametrize("owner", [0, 1])
def test_a_heartbeat_that_is_none_is_told_where_it_is_needed(owner: int):
    store = OverwrittenStore(lambda key: key == f"1/beat/{owner}", b"w\xc1")
    has_failed = threading.Event()

    def run(rank: int, _: ThreadChannel, __: ThreadCollective) -> Doc:
        with closing(ThreadChannel(store, rank, 2, FRAIL)) as channel:
            channel.enter("save to /ck")
            try:
                if rank == owner:
                    assert has_failed.wait(HANG_S)
                return exchange(channel, "agree", int, len)
            finally:
                has_failed.set()
                channel.leave()

    outcomes = try_ranks(run, world_size=2, harness="threads")
    error = outcomes[1 - owner].error
    assert isinstance(error, RankError)
    assert error.rank == owner
    assert f"rank {owner} has an invalid heartbeat in the store" in str(error)
    assert REMEDY in str(error)


def test_ranks_that_count_another_start_are_named_with_the_remedy():
    store = ThreadStore()
    store.add("starts/1", 1)  # an earlier start, of which rank 0 was dead before it saved
    config = Settings(heartbeat_timeout_s=20.0, join_timeout_s=3.0, join_warning_s=0.1)

    def run(rank: int, _: ThreadChannel, __: ThreadCollective) -> Doc:
        with closing(ThreadChannel(store, rank, 2, config)) as channel:
            channel.enter("save to /ck")
            try:
                return exchange(channel, "agree", int, len)
            finally:
                channel.leave()

    for rank, outcome in enumerate(try_ranks(run, world_size=2, harness="threads")):
        assert isinstance(outcome.error, RankError)
        assert f"rank {rank} cannot exchange with rank {1 - rank}" in str(outcome.error)
        assert "Give every start a store of its own" in str(outcome.error)


@pytest.mark.parametrize("value", [b"garbage", b"-1", b"9223372036854775807"])
def test_a_counter_of_starts_that_is_none_is_refused_by_name(value: bytes):
    store = ThreadStore()
    store.set("starts/0", value)
    with closing(ThreadChannel(store, 0, 2)) as channel:
        with pytest.raises(RankError, match="counter of the starts of rank 0") as told:
            channel.enter("save to /ck")
        assert REMEDY in str(told.value)


class ScribbledStore(ThreadStore):
    """A store in which some values are mutated as they are stored."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)

    def set(self, key: str, value: bytes, /) -> None:
        if "beat" not in key and self._random.random() < 0.2:
            place = self._random.randrange(len(value))
            value = value[:place] + self._random.randbytes(2) + value[place + 1 :]
        super().set(key, value)


@pytest.mark.parametrize("seed", range(min(NUM_CASES // 30, 1000)))
def test_ranks_whose_messages_are_mutated_end_in_errors_of_ours(seed: int):
    for error in agree_twice(ScribbledStore(seed)):
        assert error is None or isinstance(error, CheckpointError | TypeError | ValueError)
        assert error is None or str(error)


def test_a_document_that_would_take_far_more_memory_than_it_has_bytes_is_refused(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(strict_json, "FREE_NBYTES", 4 << 20)
    nbytes = 256 << 10
    data = b"\xdd" + nbytes.to_bytes(4, "big") + b"\x80" * nbytes  # a list of empty maps
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"262149 bytes would take more than \d+ bytes"):
            unpack(data, object)
        assert tracemalloc.get_traced_memory()[1] < nbytes
    finally:
        tracemalloc.stop()
