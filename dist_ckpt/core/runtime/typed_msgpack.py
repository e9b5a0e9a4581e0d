"""Values of fixed classes as msgpack, decoded strictly: the messages of ranks and processes.

No name in the data is looked up. Fields may change between versions: the processes of a job run one
version, and a snapshot's reader compares versions first.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

from msgspec import Struct, msgpack

T = TypeVar("T")

# Two threads that create one class's decoder together crash the process (msgspec 0.22). The lock is
# reentrant: an interrupt while it is held may decode too.
_lock = threading.RLock()
_decoders: dict[object, msgpack.Decoder[Any]] = {}


class Message(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A message, encoded as an array of its fields' values, which have the declared types."""


def encode(message: object) -> bytes:
    """Return a `Message`, or plain data, as bytes. Raises TypeError for anything else."""
    try:
        return msgpack.encode(message)
    except (ValueError, OverflowError, RecursionError) as error:
        raise TypeError(f"not a plain message: {error}") from error


def decode(data: bytes | bytearray | memoryview, expected: type[T]) -> T:
    """Decode bytes from `encode` as a value of the expected class, or raise ValueError."""
    if (decoder := _decoders.get(expected)) is None:
        with _lock:
            decoder = _decoders[expected] = msgpack.Decoder(expected)
    try:
        value: T = decoder.decode(data)
        return value
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{len(data)} bytes are not a message: {error}") from error
