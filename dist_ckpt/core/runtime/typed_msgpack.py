"""Values of fixed classes as msgpack, decoded strictly: what ranks, and processes, tell each other.

Nothing is looked up by a name out of the data. The processes of one job run one version, and who
reads what a snapshot has kept compares versions first: so fields may change between versions.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

from msgspec import Struct, msgpack

T = TypeVar("T")

# Two threads that make the decoder of one class at once end the process (msgspec 0.22). An
# interrupt of the thread that makes one may decode as well.
_making = threading.RLock()
_decoders: dict[object, msgpack.Decoder[Any]] = {}


class Message(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A message with the fields of its class: an array, whose values are of the declared types."""


def encode(message: object) -> bytes:
    """Return a `Message`, or plain data, as bytes. Raises TypeError for anything else."""
    try:
        return msgpack.encode(message)
    except (ValueError, OverflowError, RecursionError) as error:
        raise TypeError(f"not a plain message: {error}") from error


def decode(data: bytes | bytearray | memoryview, expected: type[T]) -> T:
    """Return the value of a class that `encode` made bytes of. ValueError if they are none."""
    try:
        value: T = _decoder_of(expected).decode(data)
        return value
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{len(data)} bytes that are no message: {error}") from error


def _decoder_of(expected: type[T]) -> msgpack.Decoder[Any]:
    if (decoder := _decoders.get(expected)) is None:
        with _making:
            decoder = _decoders[expected] = msgpack.Decoder(expected)
    return decoder
