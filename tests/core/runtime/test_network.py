from __future__ import annotations

import errno
import ipaddress
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from typing import Any

import pytest

from dist_ckpt.core.runtime import network
from dist_ckpt.core.runtime.network import LivenessPort, find_listening, reachable_host
from dist_ckpt.core.runtime.threads import run_into


def meaning(monkeypatch: pytest.MonkeyPatch, name: str, address: str) -> None:
    """Have a host name stand for an address."""
    look_up = socket.getaddrinfo

    def found(host: str, *args: Any, **kwargs: Any) -> object:
        return look_up(address if host == name else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", found)


@pytest.mark.parametrize("here", ["localhost", "127.0.0.1"])
def test_a_job_of_one_host_meets_at_its_loopback(here):
    assert reachable_host(here) == here


def test_a_name_that_is_a_loopback_only_here_is_what_the_others_know(monkeypatch):
    meaning(monkeypatch, "trainer-0", "127.0.1.1")
    assert reachable_host("trainer-0") == "trainer-0"


def test_the_address_is_that_of_the_interface_towards_the_others(monkeypatch):
    class Routed(socket.socket):
        def connect(self, place: Any) -> None:
            assert place[0] == "10.1.2.3"
            super().connect(("127.0.0.1", 9))

        def getsockname(self) -> tuple[str, int]:
            return "10.1.2.77", super().getsockname()[1]

    meaning(monkeypatch, "trainer-0", "10.1.2.3")
    monkeypatch.setattr(socket, "socket", Routed)
    assert reachable_host("trainer-0") == "10.1.2.77"


@pytest.mark.parametrize("unknown", ["", "no.such.host.invalid", "a" * 300])
def test_without_a_host_to_look_to_it_is_on_the_usual_route_or_by_name(unknown):
    host = reachable_host(unknown)
    assert host == socket.gethostname() or not ipaddress.ip_address(host).is_loopback
    assert reachable_host() == host


def test_a_host_without_a_network_is_known_by_name(monkeypatch):
    monkeypatch.setattr(network, "_ANYWHERE", ("127.0.0.1",))
    assert reachable_host() == socket.gethostname()


# --- the port that shows that a process lives -----------------------------------------------------

HANG_S = 60

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="it needs TCP_DEFER_ACCEPT")


@pytest.fixture
def port() -> Any:
    with closing(LivenessPort("127.0.0.1")) as port:
        assert port.renew(HANG_S)
        yield port


def num_connections(address: str) -> int:
    """The connections that the kernel keeps at a port of this host, those on their way included."""
    end = f":{int(address.rpartition(':')[2]):04X}"
    with open("/proc/net/tcp", encoding="ascii") as file:
        lines = [line.split() for line in file]
    # A listener has the state 0A.
    return sum(fields[1].endswith(end) and fields[3] != "0A" for fields in lines[1:])


@LINUX
def test_a_port_answers_until_it_is_closed_and_again_when_it_is_renewed(port):
    address = port.renew()
    assert find_listening([address]) == {address: True}
    assert port.renew() == address
    port.close()
    assert find_listening([address], HANG_S) == {address: False}
    again = port.renew()
    assert find_listening([again, address], HANG_S)[again]


@LINUX
def test_a_port_answers_more_looks_than_its_queue_takes_and_keeps_none(port):
    address = port.renew()
    for _ in range(socket.SOMAXCONN + 50):
        assert find_listening([address], HANG_S) == {address: True}
    assert num_connections(address) == 0


@LINUX
def test_strangers_that_send_data_are_dropped(port):
    address = port.renew()
    host, _, number = address.rpartition(":")
    with socket.create_connection((host, int(number)), timeout=HANG_S) as stranger:
        stranger.sendall(b"hello")
        left = threading.Event()
        while not left.is_set():
            port.renew()
            stranger.settimeout(0.05)
            try:
                assert not stranger.recv(1)
                left.set()
            except TimeoutError:
                continue
            except ConnectionResetError:
                left.set()


@LINUX
def test_a_child_that_is_forked_does_not_keep_the_port(port):
    address = port.renew()
    ready, end = os.pipe(), os.pipe()
    if (child := os.fork()) == 0:
        os.close(end[1])
        os.write(ready[1], b"x")
        os.read(end[0], 1)
        os._exit(0)
    try:
        assert os.read(ready[0], 1) == b"x"
        assert find_listening([address], HANG_S) == {address: True}
        port.close()
        assert find_listening([address], HANG_S) == {address: False}
    finally:
        for fd in (*ready, *end):
            os.close(fd)
        os.waitpid(child, 0)


@LINUX
def test_a_program_that_is_started_does_not_keep_the_port(port):
    address = port.renew()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False) as child:
        port.close()
        assert find_listening([address], HANG_S) == {address: False}
        child.communicate()


@LINUX
def test_a_fork_while_a_port_opens_waits_for_it(monkeypatch):
    """Else the child would keep a socket that no object of it names yet."""
    opening, may = threading.Event(), threading.Event()
    listen = network.listen

    def slow(*args: Any) -> socket.socket:
        listener = listen(*args)
        opening.set()
        assert may.wait(HANG_S)
        return listener

    monkeypatch.setattr(network, "listen", slow)
    with closing(LivenessPort("127.0.0.1")) as port:
        thread = threading.Thread(target=port.renew, args=(HANG_S,))
        thread.start()
        assert opening.wait(HANG_S)
        assert not network._no_fork.acquire(blocking=False)
        may.set()
        thread.join()
        assert network._no_fork.acquire(blocking=False)
        network._no_fork.release()


@LINUX
def test_a_fork_while_a_port_closes_waits_for_it(port):
    held = []

    class Listener(socket.socket):
        def close(self) -> None:
            held.append(not run_in_a_thread(lambda: network._no_fork.acquire(blocking=False)))
            super().close()

    port._listener = Listener(fileno=port._listener.detach())
    port.close()
    assert held == [True]


def run_in_a_thread(call: Callable[[], Any]) -> Any:
    found: Future[Any] = Future()
    threading.Thread(target=run_into, args=(found, call)).start()
    return found.result(HANG_S)


@LINUX
def test_a_program_that_closes_all_files_gets_another_port_and_keeps_its_own(port):
    """As a daemon does: the number of the port's descriptor is another file's then."""
    address = port.renew()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(HANG_S)
        os.dup2(server.fileno(), port._listener.fileno(), inheritable=False)
        with socket.create_connection(server.getsockname(), timeout=HANG_S) as client:
            client.sendall(b"x")
            again = port.renew()
            assert again != address
            assert find_listening([again], HANG_S) == {again: True}
            with server.accept()[0] as accepted:
                assert accepted.recv(1) == b"x"
        copy = port._listener.fileno()
        os.dup2(server.fileno(), copy, inheritable=False)
        port.close()
        os.close(copy)  # it was still open


@pytest.mark.parametrize(
    "address",
    ["", "nowhere", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:" + "9" * 30, "no.host.invalid:1"],
)
def test_an_address_that_is_none_has_no_answer(address):
    assert find_listening([address]) == {}


@LINUX
def test_a_host_that_does_not_answer_delays_no_other(port):
    address = port.renew()
    nobody = "192.0.2.1:9"  # an address for documentation
    assert find_listening([nobody, address])[address]


@LINUX
def test_a_name_service_that_hangs_delays_no_look(port, monkeypatch):
    address, may = port.renew(), threading.Event()
    look_up = socket.getaddrinfo

    def slow(host: str, *args: Any, **kwargs: Any) -> object:
        if host == "slow":
            assert may.wait(HANG_S)
        return look_up("127.0.0.1" if host == "slow" else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    named = address.replace("127.0.0.1", "slow")
    assert find_listening([named, address]) == {address: True}
    may.set()
    while named not in find_listening([named], HANG_S):
        pass


def test_no_name_that_is_too_long_is_looked_up(monkeypatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert find_listening(["\u00e9" * 10_000 + ":1"], HANG_S) == {}


@LINUX
def test_a_connection_that_is_reset_during_a_look_is_no_error(port, monkeypatch):
    def reset(_: object) -> bool:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    monkeypatch.setattr(network, "_is_self_connected", reset)
    assert find_listening([port.renew()], HANG_S) == {}


def test_a_job_of_one_host_has_no_port():
    assert LivenessPort(None).renew(HANG_S) == ""


def test_a_name_service_that_hangs_delays_no_heartbeat(monkeypatch):
    may = threading.Event()
    monkeypatch.setattr(network, "reachable_host", lambda _: may.wait(HANG_S) and "127.0.0.1")
    with closing(LivenessPort("slow")) as port:
        assert port.renew() == ""
        may.set()
        assert port.renew(HANG_S).startswith("127.0.0.1:")


def test_a_system_that_starts_no_thread_has_no_port(monkeypatch):
    class NoThreads:
        def __init__(self, _: int) -> None:
            pass

        def submit(self, *_: Any) -> None:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(network, "DaemonThreads", NoThreads)
    with closing(LivenessPort("127.0.0.1")) as port:
        assert port.renew() == ""
