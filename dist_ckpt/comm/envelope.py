"""What travels over the control channel: a rank's envelope, the coordinator's answer."""

from __future__ import annotations

import os
from dataclasses import astuple, dataclass

from dist_ckpt.comm.exchange import Doc, Failure, pack, unpack

NONCE_NBYTES = 4
NO_NONCE = bytes(NONCE_NBYTES)


def new_nonce() -> bytes:
    """Return random bytes by which a rank knows that an answer is to this envelope of its."""
    return (int.from_bytes(os.urandom(NONCE_NBYTES), "big") | 1).to_bytes(NONCE_NBYTES, "big")


@dataclass(frozen=True, slots=True)
class Envelope:
    """What one rank's part of a phase came to: a packed document, or a failure.

    `operation` is the token of the operation, "" until its first answer has told it. `gave_up`:
    the rank waits for the answer no more.
    """

    what: str
    operation: str
    nonce: bytes
    body: bytes
    failure: Failure | None
    gave_up: bool = False

    def encode(self) -> bytes:
        """Return the envelope as bytes."""
        failure = _encode(self.failure)
        return pack([self.what, self.operation, self.nonce, self.body, failure, self.gave_up])

    @staticmethod
    def decode(data: bytes) -> Envelope:
        """Return the envelope that `encode` made these bytes of."""
        what, operation, nonce, body, failure, gave_up = unpack(data)
        return Envelope(what, operation, nonce, body, _decode(failure), gave_up)


@dataclass(frozen=True, slots=True)
class Answer:
    """What was decided: a packed document, or a failure.

    `nonces`, in an operation's first answer, are those of all envelopes that were decided on, in
    rank order; later answers are known by their `operation`, a token that the first one told.
    """

    what: str
    operation: str
    nonces: bytes
    body: bytes
    failure: Failure | None

    def encode(self) -> bytes:
        """Return the answer as bytes."""
        failure = _encode(self.failure)
        return pack([self.what, self.operation, self.nonces, self.body, failure])

    @staticmethod
    def decode(data: bytes) -> Answer:
        """Return the answer that `encode` made these bytes of."""
        what, operation, nonces, body, failure = unpack(data)
        return Answer(what, operation, nonces, body, _decode(failure))

    def is_to(self, rank: int, own: Envelope) -> bool:
        """Say whether this rank's envelope was decided on."""
        if own.operation:
            return own.operation == self.operation
        return self.nonces[rank * NONCE_NBYTES :][:NONCE_NBYTES] == own.nonce


def _encode(failure: Failure | None) -> Doc:
    if failure is None:
        return None
    return astuple(failure)


def _decode(doc: Doc) -> Failure | None:
    if doc is None:
        return None
    kind, message, rank, phase, touched, fallout = doc
    return Failure(kind, message, rank, phase, tuple(touched), fallout)
