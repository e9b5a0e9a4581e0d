"""The layout of an arena: a header, two documents about the snapshot, and the images of its files.

    0       header     identity; words: sequence, ready, committed; a record of each document
    4096    document   the `Snapshot`, from the trainer that stages it
    ...     seal       the `Seal`, from the writer that digested it
    ...     images     the complete files, in order, each at a multiple of 4096

A document is msgpack. Its record has the sequence of its snapshot, its size, its digest, and a
checksum of these: a document with a matching record is valid. This module is pure.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from dist_ckpt.core.comm.collectives.collective import DistinctPayloads
from dist_ckpt.core.commit.records.incarnations import Incarnation
from dist_ckpt.core.format.checksums import Buffer, block_digest, document_digest
from dist_ckpt.core.format.geometry import ByteRange
from dist_ckpt.core.format.strict_json import Scalar
from dist_ckpt.core.planning.plan import FileReceipt, ReplicaDigests
from dist_ckpt.core.runtime import typed_msgpack
from dist_ckpt.core.runtime.typed_msgpack import Message
from dist_ckpt.errors import CorruptError, IncompatibleError

# Increase it with any change of this module: an arena of another version is never read.
VERSION = 3

PAGE_NBYTES = 4096
HEADER_NBYTES = PAGE_NBYTES

# The offsets of the words, in words, and of the records, in bytes.
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

# The msgpack size of a file in a seal (name, two sizes, digest), or of the attempt.
_SEALED_FILE_NBYTES = 192
_MAX_NAME_NBYTES = 96

_ID = re.compile(r"[0-9a-f]{32}")

T = TypeVar("T")


class Image(Message, frozen=True):
    """One complete file of a snapshot. Its header is included, but not staged."""

    name: str
    nbytes: int


class Snapshot(Message, frozen=True):
    """The files of one rank for one save. `id` is the id of the save, equal on all its ranks.

    `details` is an encoded `SnapshotMetadata`.
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
            or any("/" in name for name in names)
            or not all(0 < len(n.encode(errors="replace")) <= _MAX_NAME_NBYTES for n in names)
            or any(image.nbytes < 0 for image in self.images)
        ):
            raise ValueError(f"invalid snapshot: {self}")


class SnapshotMetadata(Message, frozen=True):
    """The metadata of a save. All but `replicas` is equal on all ranks.

    `mirrored` and `saved_by` are for the index. `began_at` is the coordinator's wall clock, but
    later than the save before: it orders the snapshots of a job. `inventories` are the
    encoded ones of all ranks, from which the plan is computed. `incarnation` is that of the run, if
    any: the number of an attempt has it too, but a snapshot may have no attempt yet.
    """

    overwrite: bool
    mirrored: Mapping[str, Scalar]
    saved_by: Mapping[str, str]
    began_at: float
    inventories: DistinctPayloads
    replicas: ReplicaDigests
    incarnation: Incarnation | None = None


class Seal(Message, frozen=True):
    """The result of the writer: the attempt, and its files.

    The attempt is `UNCLAIMED` if none was claimed, or the writer did not receive it.
    """

    attempt: str
    files: tuple[FileReceipt, ...]


class Record(NamedTuple):
    """The record of a document. `sequence` is that of the complete snapshot."""

    sequence: int
    nbytes: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class SnapshotSpans:
    """The layout of a snapshot in an arena of at least `nbytes`."""

    document: ByteRange
    seal: ByteRange
    images: tuple[ByteRange, ...]
    nbytes: int


def compute_spans(snapshot: Snapshot, document_nbytes: int) -> SnapshotSpans:
    """Compute the layout of a snapshot from the sizes of its parts."""
    document = ByteRange(HEADER_NBYTES, HEADER_NBYTES + document_nbytes)
    start = _round_up_to_page(document.stop)
    seal = ByteRange(start, start + _SEALED_FILE_NBYTES * (len(snapshot.images) + 1))
    start = _round_up_to_page(seal.stop)
    images = []
    for image in snapshot.images:
        images.append(ByteRange(start, start + image.nbytes))
        start = _round_up_to_page(start + image.nbytes)
    return SnapshotSpans(document, seal, tuple(images), start)


def arena_nbytes(snapshot: Snapshot) -> int:
    """Return the size of an arena for a snapshot."""
    return compute_spans(snapshot, len(typed_msgpack.encode(snapshot))).nbytes


def make_record(sequence: int, document: bytes) -> Record:
    """Return the record of a document."""
    return Record(sequence, len(document), bytes.fromhex(document_digest(document)))


def encode_record(record: Record) -> bytes:
    """Return the bytes of a record, with a checksum."""
    return _with_check(_RECORD.pack(*record))


def decode_record(header: Buffer, offset: int) -> Record | None:
    """Return the record at an offset of the header. None if it is absent or half written."""
    body = _without_check(bytes(header[offset : offset + RECORD_NBYTES]))
    return None if body is None else Record(*_RECORD.unpack(body))


def document_span(record: Record, path: str) -> ByteRange:
    """Return the position of a snapshot's document. CorruptError if it is too large."""
    if record.nbytes > MAX_DOCUMENT_NBYTES:
        raise CorruptError(f"{path}: a document of {record.nbytes} bytes")
    return ByteRange(HEADER_NBYTES, HEADER_NBYTES + record.nbytes)


def decode_snapshot(
    data: Buffer, record: Record, nbytes: int, path: str
) -> tuple[Snapshot, SnapshotSpans]:
    """Return the snapshot in an arena of `nbytes`, and its layout. CorruptError if invalid."""
    snapshot = decode_document(data, record, Snapshot, path)
    spans = compute_spans(snapshot, record.nbytes)
    if spans.nbytes > nbytes:
        raise CorruptError(f"{path}: a snapshot of {spans.nbytes} bytes in {nbytes}")
    return snapshot, spans


def decode_document(data: Buffer, record: Record, expected: type[T], path: str) -> T:
    """Return the content of a document. CorruptError if it is invalid or not that of its record."""
    if len(data) != record.nbytes or bytes.fromhex(document_digest(data)) != record.digest:
        raise CorruptError(f"{path}: a document is half written, or damaged")
    try:
        return typed_msgpack.decode(data, expected)
    except ValueError as error:
        raise CorruptError(f"{path}: {error}") from error


def encode_identity(job: str) -> bytes:
    """Return the first bytes of each arena of a job."""
    return _with_check(_IDENTITY.pack(_MAGIC, VERSION, _job_digest(job)))


def check_identity(header: Buffer, job: str, path: str) -> None:
    """Raise CorruptError unless an arena is of this job, IncompatibleError for another version."""
    body = bytes(header[: _IDENTITY.size])
    if len(header) < HEADER_NBYTES or not body.startswith(_MAGIC):
        raise CorruptError(f"{path} is not an arena: it is left unchanged")
    _, version, owner = _IDENTITY.unpack(body)
    if version != VERSION:
        raise IncompatibleError(
            f"{path} has arena version {version}, and this dist_ckpt reads {VERSION}: it is not "
            f"read"
        )
    if _without_check(bytes(header[: _IDENTITY.size + _CHECK_NBYTES])) is None:
        raise CorruptError(f"{path}: the header is damaged")
    if owner != _job_digest(job):
        raise CorruptError(f"{path} belongs to another job than {job!r}: it is not read")


def _job_digest(job: str) -> bytes:
    return bytes.fromhex(document_digest(job.encode()))


def _with_check(body: bytes) -> bytes:
    return body + bytes.fromhex(block_digest(body))


def _without_check(data: bytes) -> bytes | None:
    body = data[:-_CHECK_NBYTES]
    return body if _with_check(body) == data else None


def _round_up_to_page(offset: int) -> int:
    return -(-offset // PAGE_NBYTES) * PAGE_NBYTES
