"""The server of a small key-value store over TCP: one thread for all connections.

No peer can stop it or make it grow beyond its limits. It never waits for one connection, stops
reading from a peer that does not read its answer, and closes the connection at an invalid message.
"""

from __future__ import annotations

import hmac
import selectors
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeGuard

from dist_ckpt.core.comm.key_value.key_client import (
    GREETING,
    LENGTH,
    MAX_KEY_CHARS,
    MAX_MESSAGE_NBYTES,
    MAX_READ_NBYTES,
    MAX_VALUE_NBYTES,
    TOKEN_NBYTES,
    body_nbytes,
    check_received,
    frame,
    pack,
    unpack,
)
from dist_ckpt.core.runtime.network import listen

# The cost of a key in addition to its length and the length of its value.
KEY_NBYTES = 256

# The pause before the next `accept` if the system has no free file descriptor.
PAUSE_S = 0.2

# A host that vanishes sends nothing; after this silence the system probes it.
KEEPALIVE_S = 60

CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a server. `nbytes` counts all keys and values together.

    `num_strangers` limits the connections that have not sent the token yet. Each has `greeting_s`
    to do so. One more closes the oldest: valid peers send the token immediately, and slow peers
    must not block them.
    """

    num_keys: int = 1 << 20
    nbytes: int = 1 << 30
    num_connections: int = 1 << 14
    num_strangers: int = 128
    greeting_s: float = 10.0


DEFAULT_LIMITS = Limits()


class KeyServer:
    """Serves keys from its construction until `close`.

    It listens at `host`, or on all interfaces, over IPv6 and IPv4. With port 0 the system chooses
    the port. Clients need the token. OSError if the address cannot be used.
    """

    def __init__(
        self, token: bytes, *, host: str = "", port: int = 0, limits: Limits = DEFAULT_LIMITS
    ) -> None:
        if len(token) != TOKEN_NBYTES:
            raise ValueError(f"the token has {len(token)} bytes: use {TOKEN_NBYTES} random ones")
        listener = listen(host, port)
        self._waker, woken = socket.socketpair()
        # For this host; other hosts use the port at `network.reachable_host`.
        self.address: tuple[str, int] = listener.getsockname()[:2]
        run = _Service(GREETING + token, listener, woken, limits).run
        self._thread = threading.Thread(target=run, name="dist_ckpt key server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close all connections: calls under way fail immediately. May be called again."""
        self._waker.close()
        self._thread.join(CLOSE_S)


class LimitError(Exception):
    """A request would break a limit; nothing has changed."""


class KeyTable:
    """Keys and their values. Raises LimitError beyond the limits."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._values: dict[str, bytes] = {}
        self._nbytes = 0

    def set(self, key: str, value: bytes) -> bool:
        """Store a value."""
        if len(key) > MAX_KEY_CHARS:
            raise LimitError(f"a key of {len(key)} characters, the limit is {MAX_KEY_CHARS}")
        nbytes = self._nbytes - self._cost(key) + KEY_NBYTES + len(key) + len(value)
        if nbytes > self._limits.nbytes:
            raise LimitError(f"it would hold {nbytes} bytes, the limit is {self._limits.nbytes}")
        if key not in self._values and len(self._values) >= self._limits.num_keys:
            raise LimitError(f"it holds {len(self._values)} keys, which is the limit")
        self._nbytes = nbytes
        self._values[key] = value
        return True

    def get(self, keys: list[str]) -> list[bytes | None]:
        """Return the values of the first of these keys, as many as fit into a message."""
        values: list[bytes | None] = []
        room = MAX_VALUE_NBYTES
        for key in keys:
            value = self._values.get(key)
            room -= 8 + len(value or b"")
            if values and room < 0:
                break
            values.append(value)
        return values

    def check(self, keys: list[str]) -> bool:
        """Return True if all of these keys have a value."""
        return all(key in self._values for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, and return its new value."""
        try:
            value = int(self._values.get(key, b"0")) + amount
        except ValueError:
            raise LimitError("the value is not a counter") from None
        if abs(value) >= 1 << 63:
            raise LimitError("the counter would be beyond 64 bits")
        self.set(key, str(value).encode())
        return value

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a key if it has the expected value, "" for none; return its value now."""
        value = self._values.get(key)
        if (value or b"") == expected.encode():
            self.set(key, desired.encode())
        elif value is None:
            return expected.encode()
        return self._values[key]

    def delete(self, key: str) -> bool:
        """Delete a key; return False if it did not exist."""
        self._nbytes -= self._cost(key)
        return self._values.pop(key, None) is not None

    def _cost(self, key: str) -> int:
        value = self._values.get(key)
        return 0 if value is None else KEY_NBYTES + len(key) + len(value)


def execute(table: KeyTable, body: bytes) -> bytes:
    """Execute a request and return the answer. ValueError if the request is not valid."""
    result: object
    try:
        match unpack(body):
            case ["set", str(key), bytes(value)]:
                result = table.set(key, value)
            case ["get", [*keys]] if _are_keys(keys):
                result = table.get(keys)
            case ["check", [*keys]] if _are_keys(keys):
                result = table.check(keys)
            case ["add", str(key), int(amount)] if type(amount) is int:
                result = table.add(key, amount)
            case ["compare_set", str(key), str(expected), str(desired)]:
                result = table.compare_set(key, expected, desired)
            case ["delete", str(key)]:
                result = table.delete(key)
            case _:
                raise ValueError("the message is not a valid request")
    except LimitError as refusal:
        return pack(["refused", str(refusal)])
    return pack(["done", result])


def _are_keys(keys: list[object]) -> TypeGuard[list[str]]:
    return all(type(key) is str for key in keys)


class _Service:
    """The work of the server's thread; it ends when the waker's other end is closed."""

    def __init__(
        self, greeted: bytes, listener: socket.socket, woken: socket.socket, limits: Limits
    ) -> None:
        self._greeting = greeted
        self._listener = listener
        self._woken = woken
        self._limits = limits
        self._table = KeyTable(limits)
        self._links: set[socket.socket] = set()
        # In the order of their arrival, with the deadline of each.
        self._strangers: dict[socket.socket, float] = {}
        self._accept_at: float | None = None  # when it may accept again
        self._is_open = True
        listener.settimeout(0)
        self._selector = selectors.DefaultSelector()
        self._selector.register(woken, selectors.EVENT_READ, self._end)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def run(self) -> None:
        """Serve until the end."""
        try:
            while self._is_open:
                due = [*self._strangers.values()][:1]
                due += [] if self._accept_at is None else [self._accept_at]
                wait_s = max(0.0, min(due) - time.monotonic()) if due else None
                for key, _ in self._selector.select(wait_s):
                    act: Callable[[], None] = key.data
                    act()
                self._drop_strangers()
        finally:
            for link in tuple(self._links):
                self._drop(link)
            self._selector.close()
            self._listener.close()
            self._woken.close()

    def _end(self) -> None:
        self._is_open = False

    def _drop_strangers(self) -> None:
        now = time.monotonic()
        while self._strangers:
            oldest, until = next(iter(self._strangers.items()))
            if until > now and len(self._strangers) <= self._limits.num_strangers:
                break
            self._drop(oldest)
        if self._accept_at is not None and self._accept_at <= now:
            self._accept_at = None
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        try:
            link, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:
            self._accept_at = time.monotonic() + PAUSE_S
            self._selector.unregister(self._listener)
            return
        advance = partial(self._advance, link, self._talk(link))
        try:
            link.settimeout(0)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if hasattr(socket, "TCP_KEEPIDLE"):
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
            self._selector.register(link, selectors.EVENT_READ, advance)
        except OSError:
            link.close()
            return
        self._links.add(link)
        self._strangers[link] = time.monotonic() + self._limits.greeting_s
        # Most valid peers have sent the token by now, and so are not counted as strangers.
        advance()

    def _advance(self, link: socket.socket, talk: Iterator[int]) -> None:
        """Serve a peer as far as it is ready. Its errors end only its own connection."""
        try:
            events = next(talk)
            key = self._selector.get_key(link)
            if key.events != events:
                self._selector.modify(link, events, key.data)
        except (OSError, ValueError, MemoryError, StopIteration):
            self._drop(link)

    def _talk(self, link: socket.socket) -> Iterator[int]:
        """Serve one peer from its greeting on; yield the events that it must wait for."""
        greeted = yield from _receive_message(link, len(self._greeting))
        if not hmac.compare_digest(greeted, self._greeting):
            return
        del self._strangers[link]
        most = self._limits.num_connections
        if len(self._links) - len(self._strangers) > most:
            link.send(frame(pack(["refused", f"it has {most} connections, the limit"])))
            return
        yield from _send(link, pack(["done", True]))
        while True:
            yield selectors.EVENT_READ  # even if it has sent more already: other peers come first
            # Nested: no message of a peer stays in memory while it is silent.
            yield from _send(
                link, execute(self._table, (yield from _receive_message(link, MAX_MESSAGE_NBYTES)))
            )

    def _drop(self, link: socket.socket) -> None:
        self._links.discard(link)
        self._strangers.pop(link, None)
        self._selector.unregister(link)
        # A forked child may share the link: closing it here would not end it.
        with suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)
        link.close()


def _receive_message(link: socket.socket, limit: int) -> Generator[int, None, bytes]:
    nbytes = body_nbytes((yield from _receive_exactly(link, LENGTH.size)), limit)
    return (yield from _receive_exactly(link, nbytes))


def _receive_exactly(link: socket.socket, nbytes: int) -> Generator[int, None, bytes]:
    data = bytearray()
    while len(data) < nbytes:
        try:
            data += check_received(link.recv(min(nbytes - len(data), MAX_READ_NBYTES)))
        except BlockingIOError:
            yield selectors.EVENT_READ
    return bytes(data)


def _send(link: socket.socket, body: bytes) -> Iterator[int]:
    """Send a message as fast as the peer reads it; until then nothing more is read from it."""
    remaining = memoryview(frame(body))
    while remaining:
        try:
            remaining = remaining[link.send(remaining) :]
        except BlockingIOError:
            yield selectors.EVENT_WRITE
