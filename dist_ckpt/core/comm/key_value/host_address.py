"""Where the other hosts of a job reach this one."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress

# Addresses that stand for none: the way to them begins at this host's usual interface.
_ANYWHERE = ("192.0.2.1", "2001:db8::1")


def reachable_host(towards: str = "") -> str:
    """Return an address or a name by which the job's other hosts reach this one.

    `towards` is a host that all of them reach: MASTER_ADDR, as torchrun sets it. The answer is the
    address of the interface from which packets to it leave; none is sent. A name that here is a
    loopback (Debian's /etc/hosts has 127.0.1.1 for a host's own name) is returned itself: to other
    hosts it means this one's address, or the job has no others. Without `towards`, or if it is
    unknown here, the interface is that of the usual route.
    """
    address = _address_towards(towards) if towards else None
    if address is not None:
        return towards if ipaddress.ip_address(address).is_loopback else address
    for anywhere in _ANYWHERE:
        address = _address_towards(anywhere)
        if address is not None and not ipaddress.ip_address(address).is_loopback:
            return address
    return socket.gethostname()


def _address_towards(host: str) -> str | None:
    """Return this host's address on the way to another; None if there is no way."""
    with suppress(OSError, UnicodeError):  # UnicodeError: no name at all
        for family, kind, protocol, _, place in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind, protocol) as probe, suppress(OSError):
                # Of a datagram socket this only looks up the route.
                probe.connect(place)
                address: str = probe.getsockname()[0]
                # Behind "%" is an interface's name, which means nothing elsewhere.
                if "%" not in address:
                    return address
    return None
