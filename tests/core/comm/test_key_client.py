from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tests.core.comm.test_exchange as test_channel
from dist_ckpt.core.comm.key_value import client_thread, key_client
from dist_ckpt.core.comm.key_value.key_client import (
    GREETING,
    LENGTH,
    MAX_KEY_CHARS,
    MAX_MESSAGE_NBYTES,
    MAX_VALUE_NBYTES,
    KeyClient,
    frame,
    pack,
    unpack,
)
from dist_ckpt.core.comm.key_value.key_server import (
    DEFAULT_LIMITS,
    KeyServer,
    KeyTable,
    LimitError,
    Limits,
    execute,
)
from dist_ckpt.core.comm.rank_messages import NoAnswerError
from dist_ckpt.testing import thread_channel
from dist_ckpt.testing.thread_channel import ThreadStore
from exchanges import exchange
from ranks import free_port

ROOT = Path(__file__).parents[3]
TOKEN = bytes(range(32))

# No call takes so long.
LONG_S = 30.0


@contextmanager
def serving(
    limits: Limits | None = None, *, host: str = "127.0.0.1", port: int = 0
) -> Iterator[KeyServer]:
    with closing(KeyServer(TOKEN, host=host, port=port, limits=limits or Limits())) as server:
        yield server


def client_of(
    server: KeyServer, *, host: str = "", token: bytes = TOKEN, timeout_s: float = LONG_S
) -> closing[KeyClient]:
    address = (host or server.address[0], server.address[1])
    return closing(KeyClient(address, token, connect_s=LONG_S, timeout_s=timeout_s))


@contextmanager
def peer_of(server: KeyServer) -> Iterator[socket.socket]:
    """Yield a connection by whose end anything may be sent."""
    with socket.create_connection(server.address, timeout=LONG_S) as peer:
        yield peer


@contextmanager
def known_peer_of(server: KeyServer) -> Iterator[socket.socket]:
    """Yield one that has presented the token."""
    with peer_of(server) as peer:
        peer.sendall(frame(GREETING + TOKEN))
        assert receive(peer) == ["done", True]
        yield peer


def receive(peer: socket.socket) -> object:
    (nbytes,) = LENGTH.unpack(receive_exactly(peer, LENGTH.size))
    assert nbytes <= MAX_MESSAGE_NBYTES
    return unpack(receive_exactly(peer, nbytes))


def receive_exactly(peer: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        got = peer.recv(nbytes - len(data))
        if not got:
            raise ConnectionResetError
        data += got
    return data


def is_closed(peer: socket.socket) -> bool:
    """Say whether the other side closes the connection, and says nothing before."""
    try:
        return peer.recv(1) == b""
    except ConnectionError:
        return True


def assert_serves(server: KeyServer) -> None:
    with client_of(server) as client:
        client.set("fine", b"yes")
        assert client.get("fine") == b"yes"


# --- a store -------------------------------------------------------------------------------------


@pytest.fixture(params=["threads", "tcp"])
def store(request: pytest.FixtureRequest) -> Iterator[client_thread.Store]:
    if request.param == "threads":
        yield ThreadStore()
        return
    with serving() as server, client_of(server) as client:
        yield client


def test_a_value_is_what_was_set_last(store):
    store.set("a", b"")
    assert store.get("a") == b""
    store.set("a", bytes(range(256)))
    assert store.get("a") == bytes(range(256))


def test_keys_are_there_when_all_of_them_are(store):
    store.set("a", b"1")
    store.set("ü/2", b"2")
    assert store.check(["a", "ü/2"])
    assert not store.check(["a", "b"])
    assert store.check([])


def test_a_counter_begins_at_0_and_is_a_value_like_others(store):
    assert store.add("n", 5) == 5
    assert store.add("n", -7) == -2
    assert store.get("n") == b"-2"


def test_of_those_who_set_a_key_that_has_no_value_the_first_does_and_all_learn_which(store):
    assert store.compare_set("ü", "", "first") == b"first"
    assert store.compare_set("ü", "", "second") == b"first"
    assert store.compare_set("ü", "first", "third ü") == "third ü".encode()
    assert store.compare_set("ü", "first", "fourth") == store.get("ü") == "third ü".encode()
    assert store.compare_set("lacking", "first", "second") == b"first"
    assert not store.check(["lacking"])
    assert client_thread.put_once(store, "note", "a") == b"a"
    assert client_thread.put_once(store, "note", "b") == b"a"
    assert client_thread.get_all(store, ["note"]) == [b"a"]
    store.set("strange", b"")
    assert client_thread.put_once(store, "strange", "a") == b"a"
    store.set("strange", b"\0a")
    assert client_thread.put_once(store, "strange", "a") == client_thread.NO_VALUE


def test_a_deleted_key_is_gone(store):
    store.set("a", b"1")
    assert store.delete_key("a")
    assert not store.delete_key("a")
    assert not store.check(["a"])


def test_a_key_that_is_not_there_is_a_key_error_and_the_store_goes_on(store):
    with pytest.raises(KeyError, match="lacking"):
        store.get("lacking")
    store.set("lacking", b"")
    assert store.get("lacking") == b""


def test_documents_of_any_size_are_put_and_got(store):
    for size in (0, 1, client_thread.PART_NBYTES - 1, client_thread.PART_NBYTES, 11 << 20):
        data = os.urandom(size)
        client_thread.put(store, "key", data)
        assert client_thread.get_all(store, ["key"]) == [data]


def test_what_is_deleted_while_it_is_read_is_not_there(store):
    class Deleting:
        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def check(self, keys: list[str]) -> bool:
            if keys != ["a"]:
                client_thread.delete(store, ["a"])
            return bool(store.check(keys))

    client_thread.put(store, "a", bytes(9 << 20))
    assert client_thread.get_each(Deleting(), ["a"]) == [None]


def test_all_clients_see_the_same_keys():
    with serving() as server, client_of(server) as one, client_of(server) as other:
        one.set("a", b"1")
        assert other.get("a") == b"1"
        assert [one.add("n", 1), other.add("n", 1)] == [1, 2]


def test_many_values_are_got_at_once_though_they_fit_into_no_message():
    values = {f"{number}": bytes([number]) * (3 << 20) for number in range(5)}
    with serving() as server, client_of(server) as client:
        for key, value in values.items():
            client.set(key, value)
        assert client.multi_get([*values, "0"]) == [*values.values(), values["0"]]
        assert client.multi_get([]) == []
        with pytest.raises(KeyError, match="lacking"):
            client.multi_get([*values, "lacking", "0"])


def test_the_largest_value_goes_there_and_back():
    with serving() as server, client_of(server) as client:
        client.set("k" * MAX_KEY_CHARS, bytes(MAX_VALUE_NBYTES))
        assert client.get("k" * MAX_KEY_CHARS) == bytes(MAX_VALUE_NBYTES)


# --- a channel -----------------------------------------------------------------------------------


class StoreOfThreads:
    """A key server, to which each thread has a client of its own."""

    def __init__(self) -> None:
        self._own = threading.local()
        self._closing = ExitStack()
        self._server = self._closing.enter_context(serving())

    def __getattr__(self, name: str) -> object:
        if not hasattr(self._own, "client"):
            self._own.client = self._closing.enter_context(client_of(self._server))
        return getattr(self._own.client, name)

    def close(self) -> None:
        self._closing.close()


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have ranks that are threads meet at key servers."""
    with ExitStack() as stack:

        def new_store() -> StoreOfThreads:
            return stack.enter_context(closing(StoreOfThreads()))

        monkeypatch.setattr(thread_channel, "ThreadStore", new_store)
        monkeypatch.setattr(test_channel, "ThreadStore", new_store)
        yield


PROMISES = [
    test_channel.test_every_rank_returns_what_was_decided_on_all_payloads_in_rank_order,
    test_channel.test_an_operation_is_any_number_of_exchanges,
    test_channel.test_documents_may_be_larger_than_one_value_of_a_store,
    test_channel.test_of_several_errors_the_lowest_ranks_is_raised_and_the_others_are_named,
    test_channel.test_a_corrupt_error_tells_the_tensors_touched_on_any_rank,
    test_channel.test_what_a_rank_has_touched_is_told_there_though_the_answer_came_before,
    test_channel.test_after_an_error_the_ranks_go_on_with_the_next_operation,
    test_channel.test_a_rank_that_never_enters_is_named_by_all_others_with_what_to_look_for,
    test_channel.test_a_rank_that_comes_late_gets_the_error_of_the_others,
    test_channel.test_a_rank_that_leaves_between_two_exchanges_is_named_at_once,
    test_channel.test_a_coordinator_that_leaves_leaves_no_answer,
    test_channel.test_a_rank_whose_process_has_ended_is_named_at_once,
    test_channel.test_a_lost_store_is_told_with_what_to_look_for,
    test_channel.test_what_an_earlier_start_left_in_the_store_is_not_seen,
    test_channel.test_an_answer_to_somebody_else_is_never_taken_for_success,
]


@pytest.mark.usefixtures("over_tcp")
@pytest.mark.parametrize("keeps", PROMISES, ids=lambda test: test.__name__.removeprefix("test_"))
def test_a_channel_over_it_keeps_its_promise(keeps):
    keeps()


def test_thousands_of_exchanges_do_not_grow_it():
    with serving(Limits(num_keys=50, nbytes=50_000)) as server:

        def run(rank: int) -> None:
            with (
                client_of(server) as client,
                closing(thread_channel.ThreadChannel(client, rank, 3)) as channel,
            ):
                for _ in range(300):
                    test_channel.ask(channel, lambda: bytes(100), len)

        in_threads([partial(run, rank) for rank in range(3)])


def in_threads(calls: list[Callable[[], None]]) -> None:
    """Run calls at once; raise what one of them raised."""
    errors: list[BaseException] = []

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - a thread's outer edge
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive()
    for error in errors:
        raise error


def test_a_rank_whose_key_server_goes_is_told_at_once():
    with serving() as server, client_of(server) as client:
        channel = thread_channel.ThreadChannel(client, 1, 2)
        channel.enter("save")
        threading.Timer(0.1, server.close).start()
        with pytest.raises(NoAnswerError, match="the key server at"):
            exchange(channel, "agree", int, len)
        channel.leave()
        channel.close()


# --- strangers -----------------------------------------------------------------------------------


def test_a_wrong_token_is_not_let_in():
    with serving() as server:
        with (
            pytest.raises(ConnectionError, match="another job"),
            client_of(server, token=b"?" * 32),
        ):
            pass
        assert_serves(server)


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: trainer-0\r\n\r\n",
        bytes(4096),
        b"\xff" * 4096,
        frame(pack(["check", ["a"]])),
        frame(GREETING + TOKEN[:-1]),
        frame(GREETING + TOKEN + b"\0"),
        frame(GREETING + TOKEN[:-1] + b"?"),
        frame(bytes(16) + TOKEN),
    ],
)
def test_whoever_says_anything_else_first_is_shown_out_at_once(said):
    with serving() as server, peer_of(server) as peer:
        peer.sendall(said)
        assert is_closed(peer)
        assert_serves(server)


@pytest.mark.parametrize("num_said", [0, 1, 51])
def test_whoever_does_not_end_the_greeting_is_shown_out_and_keeps_nobody_from_being_served(
    num_said,
):
    with serving(Limits(greeting_s=0.3)) as server, peer_of(server) as peer:
        peer.sendall(frame(GREETING + TOKEN)[:num_said])
        assert_serves(server)
        assert is_closed(peer)


def test_a_client_that_has_greeted_may_be_silent_for_longer():
    with serving(Limits(greeting_s=0.1)) as server, known_peer_of(server) as peer:
        with peer_of(server) as stranger:
            assert is_closed(stranger)
        peer.sendall(frame(pack(["check", []])))
        assert receive(peer) == ["done", True]


def test_one_stranger_too_many_ends_the_oldest_and_nobody_who_is_known():
    limits = Limits(num_strangers=2, greeting_s=LONG_S)
    with serving(limits) as server, known_peer_of(server) as known, ExitStack() as stack:
        strangers = [stack.enter_context(peer_of(server)) for _ in range(4)]
        assert is_closed(strangers[0])
        assert is_closed(strangers[1])
        strangers[2].sendall(frame(GREETING + TOKEN))
        assert receive(strangers[2]) == ["done", True]
        known.sendall(frame(pack(["check", []])))
        assert receive(known) == ["done", True]
        assert_serves(server)


@pytest.mark.parametrize("said", [b"", frame(GREETING + TOKEN)[:1]], ids=["silent", "dripping"])
def test_hundreds_of_strangers_who_stay_keep_nobody_out(said: bytes):
    with serving(Limits(greeting_s=LONG_S)) as server, ExitStack() as stack:
        with client_of(server) as client:
            for _ in range(3 * DEFAULT_LIMITS.num_strangers):
                peer = stack.enter_context(peer_of(server))
                peer.sendall(said)
                client.add("served", 1)
        start = time.monotonic()
        assert_serves(server)
        assert time.monotonic() - start < LONG_S


def test_a_client_that_is_shown_out_before_it_was_heard_tries_again():
    with serving() as server, socket.create_server(("127.0.0.1", 0)) as crowded:
        address = crowded.getsockname()

        def end_one_and_serve() -> None:
            crowded.accept()[0].close()
            link = crowded.accept()[0]
            with socket.create_connection(server.address) as onwards, link:
                onwards.sendall(link.recv(1024))
                link.sendall(onwards.recv(1024))

        helper = threading.Thread(target=end_one_and_serve)
        helper.start()
        KeyClient(address, TOKEN, connect_s=LONG_S, timeout_s=LONG_S).close()
        helper.join()


def test_a_system_without_free_file_numbers_delays_a_connection_and_nothing_else():
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with serving() as server, client_of(server) as client, socket.socket() as peer:
        peer.settimeout(LONG_S)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, most[1]))
        try:
            peer.connect(server.address)
            peer.sendall(frame(GREETING + TOKEN))
            for _ in range(10):
                client.set("a", b"1")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, most)
        assert receive(peer) == ["done", True]


# --- peers that know the token, and break ---------------------------------------------------------


NONSENSE = [
    b"\xc1",
    b"\x93\xa3set",
    pack(["check", ["a"]]) + b"\0",
    b"\x81\xa1a\x01",
    b"\xd6\xff\0\0\0\0",
    b"\xc7\x00\x05",
    b"\x91" * 5000,
    b"\xdd\xff\xff\xff\xff",
    pack(["check", ["a"] * (key_client.MAX_KEYS_PER_MESSAGE + 1)]),
    pack(["set", "k" * (4 * MAX_KEY_CHARS + 1), b""]),
    pack(["set", "k", bytes(MAX_VALUE_NBYTES + 1)]),
    b"\x93\xa3set\xa1\xff\xc4\x00",
    pack([]),
    b"\x05",
    b"\xc0",
    pack(["drop", "a"]),
    pack(["set", "a"]),
    pack(["set", "a", "text"]),
    pack(["set", b"a", b"value"]),
    pack(["set", "a", b"value", b"more"]),
    pack(["add", "a", True]),
    pack(["add", "a", 1.0]),
    pack(["check", "a"]),
    pack(["check", ["a", 1]]),
    pack(["get", ["a", b"b"]]),
    pack(["get", [["a"]]]),
    pack(["delete", None]),
]


@pytest.mark.parametrize("body", NONSENSE, ids=range(len(NONSENSE)))
def test_whoever_sends_nonsense_is_cut_off_and_the_others_are_served(body):
    with serving() as server, known_peer_of(server) as peer:
        peer.sendall(frame(body))
        assert is_closed(peer)
        assert_serves(server)


@pytest.mark.parametrize("length", [0, MAX_MESSAGE_NBYTES + 1, (1 << 32) - 1])
def test_whoever_announces_a_message_of_no_possible_size_is_cut_off(length):
    with serving() as server, known_peer_of(server) as peer:
        peer.sendall(length.to_bytes(4, "big"))
        assert is_closed(peer)
        assert_serves(server)


PLAIN: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.sampled_from(["set", "get", "check", "add", "delete", "a", b"1"]),
    lambda inner: st.lists(inner, max_size=4),
)


@given(st.binary(max_size=40) | PLAIN.map(pack) | st.lists(PLAIN, max_size=4).map(pack))
def test_any_bytes_are_answered_or_a_value_error(body):
    with suppress(ValueError):
        reply: Any = unpack(execute(KeyTable(Limits()), body))
        assert reply[0] in ("done", "refused")


def test_a_client_that_dies_within_a_message_leaves_nothing():
    with serving() as server:
        with known_peer_of(server) as peer:
            peer.sendall(frame(pack(["set", "half", bytes(1 << 20)]))[: 1 << 19])
        with client_of(server) as client:
            assert not client.check(["half"])


def test_bytes_that_come_one_by_one_are_a_message_all_the_same():
    with serving() as server, peer_of(server) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for said in (GREETING + TOKEN, pack(["set", "a", b"1"]), pack(["check", ["a"]])):
            for byte in frame(said):
                peer.sendall(bytes([byte]))
            assert receive(peer) == ["done", True]


def test_of_whoever_takes_no_answers_no_more_is_read_and_the_others_are_served():
    request = frame(pack(["get", ["large"] + ["a"] * 30_000]))
    with serving() as server, client_of(server) as client, known_peer_of(server) as peer:
        client.set("large", bytes(MAX_VALUE_NBYTES))
        peer.setblocking(False)
        num_sent, is_stuck = 0, False
        while num_sent < 2000 * len(request) and not is_stuck:
            try:
                num_sent += peer.send(request[num_sent % len(request) :])
            except BlockingIOError:
                client.check(["large"])  # the server has had a turn
                try:
                    num_sent += peer.send(request[num_sent % len(request) :])
                except BlockingIOError:
                    is_stuck = True
        assert is_stuck
        peer.settimeout(LONG_S)
        for _ in range(num_sent // len(request)):
            assert receive(peer) == ["done", [bytes(MAX_VALUE_NBYTES)]]


def test_a_thousand_connections_leave_no_file_open():
    with serving() as server, client_of(server) as client:
        client.check([])
        before = len(os.listdir("/proc/self/fd"))
        for number in range(1000):
            with peer_of(server) as peer:
                if number % 3:
                    peer.sendall(frame(GREETING + (TOKEN if number % 3 == 1 else bytes(32))))
        with client_of(server):
            pass  # who comes last is accepted last
        until = time.monotonic() + LONG_S
        while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < until:
            client.check([])
        assert len(os.listdir("/proc/self/fd")) <= before


# --- limits --------------------------------------------------------------------------------------


def test_beyond_its_limits_a_server_refuses_and_goes_on():
    with serving(Limits(num_keys=2, nbytes=2000)) as server, client_of(server) as client:
        client.set("a", bytes(1000))
        with pytest.raises(RuntimeError, match="it would hold 2514 bytes, the limit is 2000"):
            client.set("b", bytes(1000))
        client.set("b", b"")
        with pytest.raises(RuntimeError, match="it holds 2 keys, which is the limit"):
            client.add("c", 1)
        assert client.check(["a", "b"])
        assert not client.check(["c"])


def test_a_table_has_room_again_when_something_is_deleted_or_made_smaller():
    table = KeyTable(Limits(nbytes=2000))
    for _ in range(10):
        table.set("a", bytes(1000))
        table.set("a", bytes(10))
        table.set("b", bytes(1000))
        with pytest.raises(LimitError):
            table.set("a", bytes(1000))
        assert table.get(["a"]) == [bytes(10)]
        table.delete("b")
        table.delete("b")


def test_what_is_no_counter_is_not_added_to():
    with serving() as server, client_of(server) as client:
        client.set("a", b"one")
        with pytest.raises(RuntimeError, match="is not a counter"):
            client.add("a", 1)
        client.add("n", (1 << 63) - 1)
        with pytest.raises(RuntimeError, match="beyond 64 bits"):
            client.add("n", 1)
        assert client.get("n") == str((1 << 63) - 1).encode()


def test_a_key_that_is_too_long_is_refused():
    with (
        serving() as server,
        client_of(server) as client,
        pytest.raises(RuntimeError, match="a key of 1025 characters"),
    ):
        client.set("k" * (MAX_KEY_CHARS + 1), b"")


def test_a_message_that_is_too_long_is_not_sent():
    with serving() as server, client_of(server) as client:
        with pytest.raises(RuntimeError, match="the limit is"):
            client.set("a", bytes(MAX_MESSAGE_NBYTES))
        client.set("a", b"1")


def test_a_connection_too_many_is_refused_until_another_one_ends():
    with serving(Limits(num_connections=2)) as server, client_of(server):
        with (
            client_of(server),
            pytest.raises(RuntimeError, match="it has 2 connections"),
            client_of(server),
        ):
            pass
        until = time.monotonic() + LONG_S
        while time.monotonic() < until:
            with suppress(RuntimeError), client_of(server) as client:
                return client.set("a", b"1")
        raise AssertionError("the one that ended still counts")


@pytest.mark.parametrize("length", [0, 16, 31, 33])
def test_a_token_has_32_bytes(length):
    with pytest.raises(ValueError, match="32 random"):
        KeyServer(bytes(length))


# --- the client's side ---------------------------------------------------------------------------


@contextmanager
def fake_server(*answers: bytes | None) -> Iterator[tuple[str, int]]:
    """Serve one client: to each message the next bytes; None: close the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as stack:

        def serve() -> None:
            peer, _ = listener.accept()
            stack.enter_context(peer)
            with suppress(OSError):
                for said in answers:
                    receive_any(peer)
                    if said is None:
                        peer.close()
                        return
                    peer.sendall(said)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()
        thread.join(LONG_S)
        assert not thread.is_alive()


def receive_any(peer: socket.socket) -> None:
    (nbytes,) = LENGTH.unpack(receive_exactly(peer, LENGTH.size))
    receive_exactly(peer, nbytes)


WELCOME = frame(pack(["done", True]))


def test_a_server_that_closes_fails_the_calls_after_it():
    with serving() as server, client_of(server) as client:
        client.set("a", b"1")
        server.close()
        server.close()
        for _ in range(2):
            with pytest.raises(OSError, match="the key server at"):
                client.get("a")


def test_a_server_that_closes_fails_the_call_that_waits_for_it():
    with (
        fake_server(WELCOME, None) as address,
        closing(KeyClient(address, TOKEN, connect_s=LONG_S, timeout_s=LONG_S)) as client,
        pytest.raises(ConnectionError, match="is gone"),
    ):
        client.check(["a"])


SERVER = """
import sys
from dist_ckpt.core.comm.key_value.key_server import KeyServer
server = KeyServer(bytes(range(32)), host="127.0.0.1")
print(server.address[1], flush=True)
sys.stdin.read()
"""


@pytest.mark.multi_process
@pytest.mark.parametrize(
    ("blow", "error"), [(signal.SIGKILL, ConnectionError), (signal.SIGSTOP, TimeoutError)]
)
def test_a_server_whose_process_is_killed_or_frozen_is_told(blow, error):
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    ) as process:
        try:
            assert process.stdout is not None
            address = ("127.0.0.1", int(process.stdout.readline()))
            with closing(KeyClient(address, TOKEN, connect_s=LONG_S, timeout_s=1.0)) as client:
                client.set("a", b"1")
                process.send_signal(blow)
                with pytest.raises(error):
                    ask_on(client)
        finally:
            process.kill()


def ask_on(client: KeyClient) -> None:
    for _ in range(10_000):  # a signal takes its time
        client.get("a")


@pytest.mark.parametrize("said", [b"", WELCOME[:2], WELCOME[:-1]])
def test_a_server_that_says_nothing_more_is_left_after_the_deadline_and_for_good(said):
    with (
        fake_server(WELCOME, said, WELCOME) as address,
        closing(KeyClient(address, TOKEN, connect_s=LONG_S, timeout_s=0.2)) as client,
    ):
        with pytest.raises(TimeoutError, match="did not answer in time"):
            client.check(["a"])
        with pytest.raises(ConnectionError, match="was closed after an earlier error"):
            client.check(["a"])


def test_a_server_that_does_not_greet_is_left_after_the_deadline():
    with fake_server(b"") as address, pytest.raises(TimeoutError, match="did not answer in time"):
        KeyClient(address, TOKEN, connect_s=0.2, timeout_s=LONG_S)


def test_a_server_that_takes_nothing_is_left_after_the_deadline():
    with (
        fake_server(WELCOME) as address,
        closing(KeyClient(address, TOKEN, connect_s=LONG_S, timeout_s=0.2)) as client,
        pytest.raises(TimeoutError),
    ):
        client.set("a", bytes(MAX_VALUE_NBYTES))


@pytest.mark.parametrize(
    "body",
    [
        b"\xc1",
        pack([]),
        pack(["done"]),
        pack(["done", None]),
        pack(["done", 1]),
        pack(["done", True, True]),
        pack(["refused", 5]),
        pack(["refused", True]),
        b"\x81\xa1a\x01",
    ],
)
def test_an_answer_that_is_none_ends_the_connection(body):
    with (
        fake_server(WELCOME, frame(body), WELCOME) as address,
        closing(KeyClient(address, TOKEN, connect_s=LONG_S, timeout_s=LONG_S)) as client,
    ):
        with pytest.raises(ConnectionError, match="is not a key server of dist_ckpt"):
            client.check(["a"])
        with pytest.raises(ConnectionError, match="was closed after an earlier error"):
            client.check(["a"])


@pytest.mark.parametrize("values", [[], ["text"], [1], [b"1", True], [b"1", b"2", b"3"]])
def test_values_that_are_none_end_the_connection(values):
    with (
        fake_server(WELCOME, frame(pack(["done", values]))) as address,
        closing(KeyClient(address, TOKEN, connect_s=LONG_S, timeout_s=LONG_S)) as client,
        pytest.raises(ConnectionError, match="no values"),
    ):
        client.multi_get(["a", "b"])


def test_an_answer_of_no_possible_size_ends_the_connection():
    with (
        fake_server(WELCOME, b"\xff" * 8) as address,
        closing(KeyClient(address, TOKEN, connect_s=LONG_S, timeout_s=LONG_S)) as client,
        pytest.raises(ConnectionError, match="a message of 4294967295 bytes"),
    ):
        client.check(["a"])


def test_an_interrupt_within_a_call_ends_the_connection(monkeypatch):
    """Else its answer would be taken for the next call's."""

    def interrupt(_: KeyClient, __: int, ___: float) -> bytes:
        raise KeyboardInterrupt

    with serving() as server, client_of(server) as client:
        with monkeypatch.context() as patch:
            patch.setattr(KeyClient, "_receive_exactly", interrupt)
            with pytest.raises(KeyboardInterrupt):
                client.check(["a"])
        with pytest.raises(ConnectionError, match="was closed after an earlier error"):
            client.set("a", b"1")


# --- the way to a server -------------------------------------------------------------------------


def test_a_client_waits_for_a_server_that_starts_later(monkeypatch):
    port = free_port()
    with ExitStack() as stack:

        def start(_: float) -> None:
            stack.enter_context(serving(port=port))

        monkeypatch.setattr(
            key_client, "time", SimpleNamespace(monotonic=time.monotonic, sleep=start)
        )
        client = KeyClient(("127.0.0.1", port), TOKEN, connect_s=LONG_S, timeout_s=LONG_S)
        with closing(client):
            assert client.add("n", 1) == 1


def test_where_nobody_listens_a_client_gives_up_after_the_deadline():
    with pytest.raises(ConnectionError, match=r"at 127\.0\.0\.1:\d+ is out of reach"):
        KeyClient(("127.0.0.1", free_port()), TOKEN, connect_s=0.2, timeout_s=LONG_S)


def test_a_connection_with_oneself_is_none(monkeypatch):
    """It comes about where nobody listens at a port that the system also gives to clients."""

    class Mirror(socket.socket):
        def connect(self, _: Any) -> None:
            self.bind(("127.0.0.1", 0))
            super().connect(self.getsockname())

    monkeypatch.setattr(socket, "socket", Mirror)
    with pytest.raises(ConnectionError, match="no process listens"):
        KeyClient(("127.0.0.1", free_port()), TOKEN, connect_s=0.2, timeout_s=LONG_S)


def has_ipv6() -> bool:
    with suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


@pytest.mark.skipif(not has_ipv6(), reason="this system has no IPv6")
@pytest.mark.parametrize(
    ("listens", "connects"),
    [("", "::1"), ("", "127.0.0.1"), ("", "localhost"), ("::1", "::1"), ("localhost", "localhost")],
)
def test_it_is_reached_over_ipv6_and_ipv4(listens, connects):
    with serving(host=listens) as server, client_of(server, host=connects) as client:
        assert client.add("n", 1) == 1
        assert server.address[1] > 0


def test_a_system_without_ipv6_has_ipv4(monkeypatch):
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with serving(host="") as server, client_of(server, host="127.0.0.1") as client:
        assert client.add("n", 1) == 1


def test_an_address_that_is_taken_is_an_os_error():
    with serving() as server, pytest.raises(OSError, match="in use"):
        KeyServer(TOKEN, host="127.0.0.1", port=server.address[1])
