"""What lies in an arena: a header, two documents about the snapshot, and its files' images.

    0       header     identity; words: sequence, ready, committed; a record of each document
    4096    document   the `Snapshot`, by the trainer that stages it
    ...     seal       the `Seal`, by the writer that has digested it
    ...     images     the whole files, in order, each on a multiple of 4096

A document is msgpack. Its record holds the sequence that it is of, its size and its digest, and a
checksum of all that: who finds them right may believe the document. Nothing here touches memory.

What a snapshot says of the save that it is a part of, for its writer and for a restore.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from dist_ckpt.core.comm.collectives.collective import Bodies
from dist_ckpt.core.commit.records.incarnations import Incarnation
from dist_ckpt.core.format.checksums import Buffer, block_digest, document_digest
from dist_ckpt.core.format.geometry import ByteRange
from dist_ckpt.core.format.strict_json import Scalar
from dist_ckpt.core.planning.plan import ReplicaDigests
from dist_ckpt.core.runtime import typed_msgpack
from dist_ckpt.core.runtime.typed_msgpack import Message
from dist_ckpt.errors import CorruptError, IncompatibleError

# Changes with any change of this module: an arena of another version is never read.
VERSION = 3

PAGE_NBYTES = 4096
HEADER_NBYTES = PAGE_NBYTES

# The places of the words, counted in words, and of the records.
SEQUENCE_WORD = 8
READY_WORD = 9
COMMITTED_WORD = 10
DOCUMENT_RECORD = 128
SEAL_RECORD = 192

MAX_IMAGES = 1024
MAX_DOCUMENT_NBYTES = 256 << 20

UNCLAIMED = ""

_MAGIC = b"dist_ckpt arena\0"
_IDENTITY = struct.Struct("<16sI4x16s")
_RECORD = struct.Struct("<QQ16s")
_CHECK_NBYTES = 8
RECORD_NBYTES = _RECORD.size + _CHECK_NBYTES

# In a seal: a file's name, two sizes and a digest, and the attempt, with msgpack's own bytes.
_SEALED_FILE_NBYTES = 192
_MAX_NAME_NBYTES = 96

_ID = re.compile(r"[0-9a-f]{32}")


class Image(Message, frozen=True):
    """One file of a snapshot, whole, with the room of its header."""

    name: str
    nbytes: int


class Snapshot(Message, frozen=True):
    """What one rank stages for one save. `id` is the save's, the same on all of its ranks.

    `details` is for those who write and restore it; nothing here looks into it.
    """

    id: str
    path: str
    step: int | None
    rank: int
    world_size: int
    images: tuple[Image, ...]
    details: bytes = b""

    def __post_init__(self) -> None:
        names = {image.name for image in self.images}
        if (
            not _ID.fullmatch(self.id)
            or not self.path
            or not 0 <= self.rank < self.world_size
            or (self.step is not None and self.step < 0)
            or len(names) != len(self.images)
            or len(names) > MAX_IMAGES
            or not all(_is_name(name) for name in names)
            or any(image.nbytes < 0 for image in self.images)
        ):
            raise ValueError(f"no snapshot: {self}")


class Seal(Message, frozen=True):
    """What the writer made of a snapshot: its attempt, and what `plan.Receipt.files` says.

    The attempt is `UNCLAIMED` if the save came to none, or the writer was not told which.
    """

    attempt: str
    files: tuple[tuple[str, int, int, str], ...]


class Record(NamedTuple):
    """Which document lies in an arena. `sequence` is that of the complete snapshot."""

    sequence: int
    nbytes: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class SnapshotSpans:
    """Where everything of a snapshot lies in its arena, which has `nbytes` at least."""

    document: ByteRange
    seal: ByteRange
    images: tuple[ByteRange, ...]
    nbytes: int


def place(snapshot: Snapshot, document_nbytes: int) -> SnapshotSpans:
    """Say where a snapshot's parts lie: it follows from their sizes."""
    document = ByteRange(HEADER_NBYTES, HEADER_NBYTES + document_nbytes)
    start = _on_page(document.stop)
    seal = ByteRange(start, start + _SEALED_FILE_NBYTES * (len(snapshot.images) + 1))
    start = _on_page(seal.stop)
    images = []
    for image in snapshot.images:
        images.append(ByteRange(start, start + image.nbytes))
        start = _on_page(start + image.nbytes)
    return SnapshotSpans(document, seal, tuple(images), start)


def arena_nbytes(snapshot: Snapshot) -> int:
    """Return the size of an arena into which a snapshot fits."""
    return place(snapshot, len(typed_msgpack.encode(snapshot))).nbytes


# --- header ----------------------------------------------------------------------------------


def record_of(sequence: int, document: bytes) -> Record:
    """Return the record of a document."""
    return Record(sequence, len(document), bytes.fromhex(document_digest(document)))


def encode_record(record: Record) -> bytes:
    """Return the bytes of a record, with their checksum."""
    return _with_check(_RECORD.pack(*record))


def decode_record(header: Buffer, offset: int) -> Record | None:
    """Return the record at a place of the header, or None: none is there, or half of one."""
    body = _checked(bytes(header[offset : offset + RECORD_NBYTES]))
    return None if body is None else Record(*_RECORD.unpack(body))


def document_span(record: Record, what: str) -> ByteRange:
    """Return where a snapshot's document lies. CorruptError if nobody makes one of that size."""
    if record.nbytes > MAX_DOCUMENT_NBYTES:
        raise CorruptError(f"{what}: a document of {record.nbytes} bytes")
    return ByteRange(HEADER_NBYTES, HEADER_NBYTES + record.nbytes)


def open_document(
    data: Buffer, record: Record, nbytes: int, what: str
) -> tuple[Snapshot, SnapshotSpans]:
    """Return the snapshot in an arena of `nbytes`, and where its parts are: all are in it.

    CorruptError if the document is not the one that the record tells of.
    """
    check_document(data, record, what)
    try:
        snapshot = typed_msgpack.decode(data, Snapshot)
    except ValueError as error:
        raise CorruptError(f"{what}: {error}") from error
    placement = place(snapshot, record.nbytes)
    if placement.nbytes > nbytes:
        raise CorruptError(f"{what}: a snapshot of {placement.nbytes} bytes in {nbytes}")
    return snapshot, placement


def check_document(data: Buffer, record: Record, what: str) -> None:
    """Check that a document is the one that a record tells of. CorruptError if not."""
    if len(data) != record.nbytes or bytes.fromhex(document_digest(data)) != record.digest:
        raise CorruptError(f"{what}: a document is half written, or damaged")


def encode_identity(job: str) -> bytes:
    """Return the first bytes of every arena of a job."""
    return _with_check(_IDENTITY.pack(_MAGIC, VERSION, _digest_of(job)))


def check_identity(header: Buffer, job: str, what: str) -> None:
    """Check whose arena this is.

    CorruptError if it is none, or another job's, IncompatibleError if it is one of another version.
    """
    body = bytes(header[: _IDENTITY.size])
    if len(header) < HEADER_NBYTES or not body.startswith(_MAGIC):
        raise CorruptError(f"{what} is no arena: it is left as it is")
    _, version, owner = _IDENTITY.unpack(body)
    if version != VERSION:
        raise IncompatibleError(
            f"{what} is of arena version {version}, and this dist_ckpt knows {VERSION}: it is not "
            f"read"
        )
    if _checked(bytes(header[: _IDENTITY.size + _CHECK_NBYTES])) is None:
        raise CorruptError(f"{what}: the header is damaged")
    if owner != _digest_of(job):
        raise CorruptError(f"{what} is of another job than {job!r}: it is not read")


def _digest_of(job: str) -> bytes:
    return bytes.fromhex(document_digest(job.encode()))


def _with_check(body: bytes) -> bytes:
    return body + bytes.fromhex(block_digest(body))


def _checked(data: bytes) -> bytes | None:
    body = data[:-_CHECK_NBYTES]
    return body if _with_check(body) == data else None


def _is_name(name: str) -> bool:
    return 0 < len(name.encode(errors="replace")) <= _MAX_NAME_NBYTES and "/" not in name


def _on_page(offset: int) -> int:
    return -(-offset // PAGE_NBYTES) * PAGE_NBYTES


class SnapshotMetadata(Message, frozen=True):
    """What is the same on all ranks of a save, but for `replicas`.

    `mirrored` and `saved_by` go into the index. `began_at` is the coordinator's wall clock, or
    a little later than the save before: of two snapshots of a job the later is the newer. `bodies`
    are the inventories of all ranks, packed: the plan follows from them. `run` is the start of a
    run that saves, if one does: an attempt's number tells it, but a snapshot may be of none yet.
    """

    overwrite: bool
    mirrored: Mapping[str, Scalar]
    saved_by: Mapping[str, str]
    began_at: float
    bodies: Bodies
    replicas: ReplicaDigests
    run: Incarnation | None = None
