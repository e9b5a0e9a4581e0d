"""Values of any size in a key-value store; values that are not from dist_ckpt do no harm."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

from dist_ckpt.core.comm.messages import MAX_DOCUMENT_NBYTES

# A TCPStore takes values of 8 MiB at most; larger ones are stored in parts.
PART_NBYTES = 4 << 20

# A document is a little less than its message.
MAX_PARTS = MAX_DOCUMENT_NBYTES // PART_NBYTES + 1

# The result for a value that `put` did not store: no valid message is empty.
NO_VALUE = b""

_COUNTER = re.compile(rb"[0-9]{1,18}")

# The first byte of a value. The whole value follows it, or the number of parts, each of which has a
# key. A withdrawn value keeps that number, for `delete`.
_WHOLE = b"w"
_PARTS = b"p"
_WITHDRAWN = b"x"


class Store(Protocol):
    """The methods of a key-value store used here; every store of torch.distributed has them."""

    def set(self, key: str, value: bytes, /) -> None:
        """Store a value."""

    def get(self, key: str, /) -> bytes:
        """Return the value of an existing key; wait or raise KeyError if it is just deleted."""

    def check(self, keys: list[str], /) -> bool:
        """Return True if all of these keys exist."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter, which begins at 0, and return its new value."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set a key if it has the expected value, "" for none; return its value now.

        Without a value torch's stores return `expected`, if that is not "".
        """

    def delete_key(self, key: str, /) -> bool:
        """Delete a key; return False if it did not exist."""


def put(store: Store, key: str, data: bytes) -> None:
    """Store a value of any size; readers see all of it or nothing."""
    if len(data) < PART_NBYTES:
        store.set(key, _WHOLE + data)
        return
    starts = range(0, len(data), PART_NBYTES)
    for number, start in enumerate(starts):
        store.set(f"{key}/{number}", data[start : start + PART_NBYTES])
    store.set(key, _PARTS + str(len(starts)).encode())


def put_once(store: Store, key: str, text: str) -> bytes:
    """Store a short text unless the key has one; return the value now, as `get_all` does.

    If several ranks call it at once, all return the text of the same one.
    """
    value = store.compare_set(key, "", _WHOLE.decode() + text)
    return value[1:] if value[:1] == _WHOLE else NO_VALUE


def get_all(store: Store, keys: Sequence[str]) -> list[bytes] | None:
    """Return the values that `put` stored, `NO_VALUE` for other data; None if one is missing."""
    if not store.check(list(keys)):
        return None
    try:
        values = _read_values(store, keys)
        if any(data[:1] == _WITHDRAWN for data in values):
            return None
        wholes = [_join_parts(store, *stored) for stored in zip(keys, values, strict=True)]
    except KeyError:  # deleted since then
        return None
    return None if None in wholes else [data for data in wholes if data is not None]


def _read_values(store: Store, keys: Sequence[str]) -> list[bytes]:
    # One round trip if the store can do it, instead of one for each rank.
    if hasattr(store, "multi_get"):
        values: list[bytes] = store.multi_get(list(keys))
        return values
    return [store.get(key) for key in keys]


def _join_parts(store: Store, key: str, data: bytes) -> bytes | None:
    """Return the value that begins with these bytes; None if it is just being deleted."""
    if data[:1] == _WHOLE:
        return data[1 : PART_NBYTES + 1]
    parts = _part_keys(key, data)
    if data[:1] != _PARTS or not parts:
        return NO_VALUE
    # `get` of a missing key would wait, with the store's deadline. Parts are stored before the
    # value, and deleted after it.
    if not store.check(parts):
        return NO_VALUE if store.check([key]) else None
    return b"".join(part[:PART_NBYTES] for part in _read_values(store, parts))


def get_each(store: Store, keys: Sequence[str]) -> list[bytes | None]:
    """Return the values that `put` stored, None for each missing one."""
    if (values := get_all(store, keys)) is not None:
        return [*values]
    if len(keys) == 1:
        return [None]
    return [value for key in keys for value in get_each(store, [key])]


def increment(store: Store, key: str) -> int:
    """Add 1 to a counter, and return it. ValueError if its value is not a counter."""
    # If the value is not a number, some of torch's stores raise, and others cut the connection.
    # Beyond 64 bits they continue with a negative number.
    value = read_counter(store, key)
    if value and not _COUNTER.fullmatch(value):
        raise ValueError(f"{len(value)} bytes that are not a counter")
    return store.add(key, 1)


def read_counter(store: Store, key: str) -> bytes:
    """Return the value of a counter, b"" if it does not exist."""
    return store.get(key) if store.check([key]) else b""


def withdraw(store: Store, keys: Sequence[str]) -> None:
    """Hide values from readers. With `delete` a read that has begun would wait in the store."""
    for key in keys:
        if store.check([key]):
            num_parts = len(_part_keys(key, store.get(key)))
            store.set(key, _WITHDRAWN + str(num_parts).encode())


def delete(store: Store, keys: Sequence[str]) -> None:
    """Delete the values that `put` stored under these keys, if any."""
    for key in keys:
        if not store.check([key]):
            continue
        parts = _part_keys(key, store.get(key))
        store.delete_key(key)
        for part in parts:
            store.delete_key(part)


def _part_keys(key: str, data: bytes) -> list[str]:
    digits = data[1:]
    if data[:1] not in (_PARTS, _WITHDRAWN) or len(digits) > 4 or not digits.isdigit():
        return []
    num_parts = int(digits)
    return [f"{key}/{number}" for number in range(num_parts if num_parts <= MAX_PARTS else 0)]
