"""A small key-value store over TCP: its messages, and the client of the ranks.

Writer processes use it, since the job's own store may end before them. A message is its length and
a msgpack array of strings, bytes, numbers and lists of them, within limits. The first message of a
connection is the greeting with the store's token. The token is not encrypted. It keeps out peers
that cannot read the network; torch's TCPStore has no such protection.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TypeVar

import msgpack

from dist_ckpt.core.comm.key_value.client_thread import PART_NBYTES
from dist_ckpt.core.runtime.processes import MAX_CLOCK_GAP_S, running_time

TOKEN_NBYTES = 32
GREETING = b"dist_ckpt keys 1"

# A value is at most as large as a part, with the prefix that `client_thread` adds.
MAX_VALUE_NBYTES = PART_NBYTES + 64
# A message is a value, or the keys of many ranks.
MAX_MESSAGE_NBYTES = PART_NBYTES + (1 << 20)
MAX_KEYS_PER_MESSAGE = 1 << 16
MAX_KEY_CHARS = 1024

# How long a client tries each address of a host name.
CONNECT_TRY_S = 5.0
MAX_PAUSE_S = 0.5

# The number of connections to try: a server with many unknown peers may end a connection before it
# has read the greeting.
GREETINGS = 4
GREETING_PAUSE_S = 0.02

LENGTH = struct.Struct(">I")
MAX_READ_NBYTES = 1 << 20

T = TypeVar("T")


def frame(body: bytes) -> bytes:
    """Return a message with its length before it."""
    return LENGTH.pack(len(body)) + body


def pack(values: Sequence[object]) -> bytes:
    """Return the body of a message."""
    body: bytes = msgpack.packb(values)
    return body


def unpack(body: bytes) -> object:
    """Decode the result of `pack`. ValueError for anything else, or beyond the limits."""
    return msgpack.unpackb(
        body,
        max_str_len=4 * MAX_KEY_CHARS,
        max_bin_len=MAX_VALUE_NBYTES,
        max_array_len=MAX_KEYS_PER_MESSAGE,
        max_map_len=0,
        max_ext_len=0,
    )


def body_nbytes(head: bytes, limit: int) -> int:
    """Return the size of the body that follows. ValueError if it is not possible."""
    nbytes: int = LENGTH.unpack(head)[0]
    if not 0 < nbytes <= limit:
        raise ValueError(f"a message of {nbytes} bytes, the limit is {limit}")
    return nbytes


def check_received(data: bytes) -> bytes:
    """Return received data; ConnectionError if it is the end of a connection."""
    if not data:
        raise ConnectionResetError("the other side has closed the connection")
    return data


class KeyClient:
    """A connection to a `KeyServer`; a `Store` for one thread at a time.

    It tries for `connect_s` to reach the server, which may still be starting; the system limits
    lookups of the host's name. No round trip of a call takes longer than `timeout_s`, and none
    waits for a key. OSError if the server is gone, slow, or not a key server; the client cannot be
    used afterwards. RuntimeError if the server refuses a call, which then changes nothing.
    """

    def __init__(
        self, address: tuple[str, int], token: bytes, *, connect_s: float, timeout_s: float
    ) -> None:
        self._name = "the key server at {}:{}".format(*address)
        self._timeout_s = timeout_s
        until = running_time() + connect_s
        for attempt in range(1, GREETINGS + 1):
            self._socket = self._connect(address, until)
            try:
                self._ask(bool, GREETING + token, until)
                return
            except ConnectionError as error:
                if attempt == GREETINGS:
                    raise ConnectionError(
                        f"{self._name} refuses the token of this process: it belongs to another "
                        f"job, or to another start of this one ({error})"
                    ) from error
            except BaseException:
                self.close()
                raise
            time.sleep(GREETING_PAUSE_S * attempt)

    def set(self, key: str, value: bytes, /) -> None:
        """Store a value."""
        self._call(bool, ["set", key, value])

    def get(self, key: str, /) -> bytes:
        """Return a value; KeyError if the key has none."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """Return the values of some keys; KeyError if one has none."""
        values: list[bytes] = []
        while len(values) < len(keys):
            # An answer has as many values as fit into a message.
            wanted = keys[len(values) :]
            answer = self._call(list, ["get", wanted])
            if not (0 < len(answer) <= len(wanted) and {*map(type, answer)} <= {bytes, type(None)}):
                raise self._invalid_answer("it sent no values")
            if None in answer:
                raise KeyError(wanted[answer.index(None)])
            values += answer
        return values

    def check(self, keys: list[str], /) -> bool:
        """Return True if all of these keys have a value."""
        return self._call(bool, ["check", keys])

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter, which begins at 0, and return its new value."""
        return self._call(int, ["add", key, amount])

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set a key if it has the expected value, "" for none; return its value now."""
        return self._call(bytes, ["compare_set", key, expected, desired])

    def delete_key(self, key: str, /) -> bool:
        """Delete a key; return False if it did not exist."""
        return self._call(bool, ["delete", key])

    def close(self) -> None:
        """Close the connection. May be called again."""
        self._socket.close()

    def _call(self, expected: type[T], request: Sequence[object]) -> T:
        if (nbytes := len(body := pack(request))) > MAX_MESSAGE_NBYTES:
            raise RuntimeError(
                f"a message of {nbytes} bytes to {self._name}, the limit is {MAX_MESSAGE_NBYTES}"
            )
        return self._ask(expected, body, running_time() + self._timeout_s)

    def _ask(self, expected: type[T], body: bytes, until: float) -> T:
        """Send a message and return the value of the answer; RuntimeError if it is refused."""
        if self._socket.fileno() < 0:
            raise ConnectionError(f"{self._name}: the connection was closed after an earlier error")
        try:
            self._send_all(frame(body), until)
            nbytes = body_nbytes(self._receive_exactly(LENGTH.size, until), MAX_MESSAGE_NBYTES)
            answer = unpack(self._receive_exactly(nbytes, until))
        except BaseException as error:
            # The rest of a partial answer would be read as the next one.
            self.close()
            if isinstance(error, TimeoutError):
                raise TimeoutError(f"{self._name} did not answer in time") from None
            if isinstance(error, OSError):
                raise ConnectionError(f"{self._name} is gone: {error}") from error
            if isinstance(error, ValueError):
                raise self._invalid_answer(str(error)) from error
            raise
        match answer:
            case ["refused", str(text)]:
                raise RuntimeError(f"{self._name} refuses: {text}")
            case ["done", value] if type(value) is expected:
                return value
        raise self._invalid_answer("it sent a wrong answer")

    def _invalid_answer(self, problem: str) -> ConnectionError:
        self.close()
        return ConnectionError(f"{self._name} is not a key server of dist_ckpt: {problem}")

    def _receive_exactly(self, nbytes: int, until: float) -> bytes:
        data = bytearray()
        while len(data) < nbytes:
            self._socket.settimeout(min(_remaining_s(until), MAX_CLOCK_GAP_S / 2))
            with suppress(TimeoutError):
                data += check_received(self._socket.recv(min(nbytes - len(data), MAX_READ_NBYTES)))
        return bytes(data)

    def _send_all(self, data: bytes, until: float) -> None:
        rest = memoryview(data)
        while rest:
            self._socket.settimeout(min(_remaining_s(until), MAX_CLOCK_GAP_S / 2))
            with suppress(TimeoutError):
                rest = rest[self._socket.send(rest) :]

    def _connect(self, address: tuple[str, int], until: float) -> socket.socket:
        pause_s = 0.01
        while True:
            try:
                return _open_socket(address, until)
            except OSError as error:
                if running_time() + pause_s >= until:
                    raise ConnectionError(f"{self._name} is out of reach: {error}") from error
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)


def _open_socket(address: tuple[str, int], until: float) -> socket.socket:
    failure = OSError("the host name has no address")
    for family, kind, protocol, _, endpoint in socket.getaddrinfo(
        *address, type=socket.SOCK_STREAM
    ):
        link = socket.socket(family, kind, protocol)
        try:
            link.settimeout(min(_remaining_s(until), CONNECT_TRY_S))
            link.connect(endpoint)
            # Without a listener on this host, a socket can be connected with itself.
            if link.getsockname() == link.getpeername():
                raise ConnectionRefusedError("no process listens at this address")
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            link.close()
            failure = error
        else:
            return link
    raise failure


def _remaining_s(until: float) -> float:
    left_s = until - running_time()
    if left_s <= 0:
        raise TimeoutError("the time is up")
    return left_s
