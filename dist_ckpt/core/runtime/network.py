"""The address of this host for other hosts, and a port that shows that a process lives.

The kernel answers at a TCP port as long as the process that listens lives, also while the process
runs no Python or is stopped. Kubernetes calls such a look a TCP liveness probe.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any
from weakref import WeakSet

from dist_ckpt.core.runtime.threads import DaemonThreads, has_outcome, run_into

# How long the kernel keeps a silent connection from the process that listens. A probe is shorter.
DEFER_S = 60

# How long a look waits for the answers of other hosts.
ANSWER_S = 0.25

# A name of a host is looked up again after this time.
LOOKUP_S = 5.0

# The longest name of a host. To encode a longer one may take minutes.
MAX_NAME = 253

# A socket that is closed with this option sends a reset, and leaves nothing behind.
_RESET = struct.pack("ii", 1, 0)


class LivenessPort:
    """A port at which this process only listens. A forked child closes its copy.

    `towards` is a host that all hosts of the job reach, "" if it is not known. With None, for a job
    on one host, the port is not opened. The kernel keeps connections that send nothing to itself
    (TCP_DEFER_ACCEPT). So probes leave nothing, and any number of them gets an answer. Systems
    without this option do not open the port.
    """

    def __init__(self, towards: str | None) -> None:
        self._listener: socket.socket | None = None
        self._bound_to: object = None
        self._address = ""
        self._host: Future[str] = Future()
        if towards is None or not hasattr(socket, "TCP_DEFER_ACCEPT"):
            return
        with suppress(RuntimeError):  # the system starts no more threads
            # In a thread: the name service may hang.
            DaemonThreads(1).submit(partial(reachable_host, towards), self._host)
        _ports.add(self)

    def renew(self, timeout_s: float = 0.0) -> str:
        """Listen if it does not yet, and close connections of strangers. Return the address, or "".

        The first call may wait for `timeout_s` for the name service. Never raises OSError.
        """
        if self not in _ports or not has_outcome(self._host, timeout_s):
            return ""
        with suppress(OSError), _no_fork:
            self._forget_what_is_closed()
            if self._listener is None:
                self._listener = self._open(self._host.result(timeout=0))
            for _ in range(socket.SOMAXCONN):  # else they would fill the queue
                self._listener.accept()[0].close()
        return self._address if self._listener else ""

    def close(self) -> None:
        """Stop answering. `renew` listens again, at another port."""
        with _no_fork:  # a child that is forked meanwhile would keep it
            self._forget_what_is_closed()
            listener, self._listener = self._listener, None
            if listener is not None:
                listener.close()

    def _forget_what_is_closed(self) -> None:
        """Let go of a descriptor that the program has closed: it may be another file's by now."""
        if self._listener is not None:
            with suppress(OSError):
                if self._listener.getsockname() == self._bound_to:
                    return
            self._listener.detach()
            self._listener = None

    def _open(self, host: str) -> socket.socket:
        # Other hosts have another address for a name that is a loopback address here.
        is_local = host == "localhost" or _is_address(host)
        listener = listen(host if is_local else "", 0)
        listener.settimeout(0)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, DEFER_S)
        self._bound_to = listener.getsockname()
        self._address = f"{host}:{listener.getsockname()[1]}"
        return listener


# A child that is forked while a port is opened would keep it. Reentrant: a finalizer or the handler
# of a signal may fork anywhere.
_no_fork = threading.RLock()
_ports: WeakSet[LivenessPort] = WeakSet()


def _close_copies() -> None:
    _no_fork.release()
    for port in tuple(_ports):
        port.close()


os.register_at_fork(
    before=_no_fork.acquire, after_in_parent=_no_fork.release, after_in_child=_close_copies
)


_Endpoint = tuple[int, int, tuple[Any, ...]]
_lookups = DaemonThreads(4)


def find_listening(addresses: Iterable[str], timeout_s: float = ANSWER_S) -> dict[str, bool]:
    """Look at ports "host:port" together. True: a process listens there; False: none does.

    Ports that do not answer in time are absent, and so are names that are not found in time.
    """
    found: dict[str, bool] = {}
    links: dict[int, tuple[str, socket.socket]] = {}
    poll = select.poll()
    until = time.monotonic() + timeout_s
    try:
        lookups = {address: _look_up(address, until // LOOKUP_S) for address in addresses}
        wait(lookups.values(), timeout_s / 2)
        for address, lookup in lookups.items():
            with suppress(OSError, ValueError, OverflowError):
                link = _begin_connection(*lookup.result(timeout=0))
                links[link.fileno()] = address, link
                poll.register(link, select.POLLOUT)
        while links and (left_s := until - time.monotonic()) > 0:
            for fd, _ in poll.poll(1000 * left_s):
                poll.unregister(fd)
                address, link = links.pop(fd)
                with link, suppress(OSError):  # a proxy may reset the connection at any moment
                    error = link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    if error in (0, errno.ECONNREFUSED):
                        found[address] = not error and not _is_self_connected(link)
    finally:
        for _, link in links.values():
            link.close()
    return found


@lru_cache(maxsize=1024)
def _look_up(address: str, _period: float) -> Future[_Endpoint]:
    """Look for the host of "host:port", in each period once. The name service may hang."""
    found: Future[_Endpoint] = Future()
    if _is_address(address.rpartition(":")[0]):
        run_into(found, partial(_find_endpoint, address))
    else:
        with suppress(RuntimeError):  # the system starts no more threads
            _lookups.submit(partial(_find_endpoint, address), found)
    return found


def _find_endpoint(address: str) -> _Endpoint:
    host, _, port = address.rpartition(":")
    if len(host) > MAX_NAME:
        raise ValueError("too long for the name of a host")
    family, kind, _, _, endpoint = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
    return family, kind, endpoint


def _begin_connection(family: int, kind: int, endpoint: tuple[Any, ...]) -> socket.socket:
    link = socket.socket(family, kind)
    try:
        link.settimeout(0)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        with suppress(BlockingIOError):
            link.connect(endpoint)
    except BaseException:
        link.close()
        raise
    return link


def _is_self_connected(link: socket.socket) -> bool:
    """Return True if a socket is connected with itself, as nothing listened on this host."""
    return bool(link.getsockname() == link.getpeername())


def listen(host: str, port: int) -> socket.socket:
    """Listen at a host, or on all interfaces for "". With port 0 the system chooses the port."""
    if not host and socket.has_dualstack_ipv6():
        with suppress(OSError):  # a system with IPv6 turned off
            return socket.create_server(
                (host, port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=socket.SOMAXCONN
            )
    family = socket.AF_INET
    if host:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family, backlog=socket.SOMAXCONN)


# Addresses without hosts: the route to them begins at this host's usual interface.
_ANYWHERE = ("192.0.2.1", "2001:db8::1")


def reachable_host(towards: str = "") -> str:
    """Return an address or a name by which the job's other hosts reach this one. Sends no packet.

    `towards` is a host that all of them reach: MASTER_ADDR, as torchrun sets it. The result is the
    address of the interface towards it, or of the usual route if it is unknown here.

    If `towards` is a name with a loopback address here, the name itself is returned. For example,
    Debian's /etc/hosts has 127.0.1.1 for the name of the host. Other hosts find this host by it.
    """
    if towards and (address := _address_towards(towards)) is not None:
        return towards if ipaddress.ip_address(address).is_loopback else address
    for address in filter(None, map(_address_towards, _ANYWHERE)):
        if not ipaddress.ip_address(address).is_loopback:
            return address
    return socket.gethostname()


def _address_towards(host: str) -> str | None:
    with suppress(OSError, UnicodeError):  # UnicodeError: not a host name
        for family, kind, protocol, _, endpoint in socket.getaddrinfo(
            host, 9, type=socket.SOCK_DGRAM
        ):
            with socket.socket(family, kind, protocol) as probe, suppress(OSError):
                # With a datagram socket this only looks up the route.
                probe.connect(endpoint)
                address: str = probe.getsockname()[0]
                # After "%" comes an interface's name, which means nothing on other hosts.
                if "%" not in address:
                    return address
    return None


def _is_address(host: str) -> bool:
    with suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    return False
