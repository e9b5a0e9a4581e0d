from __future__ import annotations

import ipaddress
import socket
from typing import Any

import pytest

from dist_ckpt.core.comm.key_value import key_server
from dist_ckpt.core.comm.key_value.key_server import reachable_host


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
    monkeypatch.setattr(key_server, "_ANYWHERE", ("127.0.0.1",))
    assert reachable_host() == socket.gethostname()
