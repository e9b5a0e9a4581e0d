"""The messages between the ranks of a load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

from dist_ckpt.core.checkpoint.open_checkpoint import OpenCheckpoint
from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.core.format.index import index_json
from dist_ckpt.core.format.index.index import Index, Key
from dist_ckpt.core.loading.load_options import ReadOnce
from dist_ckpt.core.runtime.typed_msgpack import Message
from dist_ckpt.core.state.tensors.plain_torch import make
from dist_ckpt.core.storage import Storage


class LoadRequest(Message, frozen=True):
    """The request of one rank. The fields up to `read_once` must be equal on all ranks.

    `path` has all paths if there are several. `sources` has the key and the path of each source, in
    order. `keys` has the names and keys of `PerRank` values in this rank's template.
    `connection_epoch` numbers the bulk connections.
    """

    path: str | tuple[str, ...]
    sources: tuple[tuple[str, str], ...]
    strict: bool
    check_first: bool
    read_once: ReadOnce
    host: str
    keys: tuple[tuple[str, Key], ...]
    connection_epoch: int

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of all sources."""
        return (self.path,) if isinstance(self.path, str) else self.path


class OpenedMessage(Message, frozen=True):
    """The checkpoints that all ranks load: the path and the attempt of each.

    `indexes` has their encoded indexes, or is None if a broadcast sends them. `keys` has, by name,
    the keys of `PerRank` values on all ranks. `shared_read_id` identifies the shared read of this
    load; it is "" if the ranks can share nothing.
    """

    attempts: tuple[tuple[str, Attempt], ...]
    indexes: tuple[bytes, ...] | None
    keys: dict[str, tuple[Key, ...]]
    connection_epoch: int
    shared_read_id: str


@dataclass(frozen=True, slots=True)
class ResolvedSources:
    """A decoded `OpenedMessage`."""

    checkpoints: tuple[OpenCheckpoint, ...]
    keys: Mapping[str, Sequence[Key]]
    shared_read_id: str

    @property
    def names(self) -> tuple[str, ...]:
        """All saved names, one checkpoint after another."""
        return tuple(name for checkpoint in self.checkpoints for name in checkpoint.names)

    def decode_bitmap(self, bits: int) -> list[tuple[OpenCheckpoint, list[str]]]:
        """Return the names of each checkpoint whose bits are set in a bitmap over `names`."""
        digits = map(int, f"{bits:0{len(self.names)}b}")
        # Each `compress` consumes as many digits as its checkpoint has names.
        return [(source, [*compress(source.names, digits)]) for source in self.checkpoints]


class CheckFindings(Message, frozen=True):
    """The result of one rank's check.

    `unclaimed` is a bitmap of the saved names that this rank does not request (`encode_bitmap`).
    `unmatched` has the problems of patterns that match no name on this rank. `makes_memory`,
    `assigns_values` and `loads_objects` are True for the steps in which this rank has work.
    `encoded_requests` has its block requests: b"" if the ranks can share nothing, None if they are
    too long for this exchange. `from_memory` is True if the rank reads files from memory, `is_gone`
    if the checkpoint was removed.
    """

    problems: tuple[str, ...] = ()
    unmatched: tuple[str, ...] = ()
    unclaimed: bytes = b""
    makes_memory: bool = False
    assigns_values: bool = False
    loads_objects: bool = False
    encoded_requests: bytes | None = b""
    from_memory: bool = False
    is_gone: bool = False


class LoadDecision(Message, frozen=True):
    """The decision of the coordinator after a check in which no rank has a problem.

    `unexpected` are the saved names that no rank requests. `makes_memory`, `assigns_values`,
    `loads_objects` and `from_memory` are True if they are True on any rank. A step without work is
    left out. `ranks_share_blocks` is True if ranks may need the same blocks. Then
    `encoded_requests` has the requests of all ranks; if it is empty, a collective gathers them. If
    `is_gone`, the checkpoint was replaced, and the other fields have no meaning.
    """

    unexpected: tuple[str, ...] = ()
    makes_memory: bool = False
    assigns_values: bool = False
    loads_objects: bool = False
    ranks_share_blocks: bool = False
    encoded_requests: tuple[bytes, ...] = ()
    from_memory: bool = False
    is_gone: bool = False


class RankTotals(Message, frozen=True):
    """The bytes and the time of the reads on one rank. Other ranks sent `nbytes_received`."""

    nbytes_read: int
    nbytes_received: int
    nbytes_placed: int
    seconds: float


class JobTotals(Message, frozen=True):
    """The bytes and the time of the reads on all ranks, as in `LoadReport`."""

    job_nbytes_read: int
    job_nbytes_placed: int
    slowest_rank: int
    slowest_s: float


def open_sources(
    opened: OpenedMessage,
    checkpoints: tuple[OpenCheckpoint, ...],
    encoded: Sequence[bytes],
    storages: Sequence[Storage],
) -> ResolvedSources:
    """Return the sources: the coordinator has `checkpoints`, other ranks decode the indexes."""
    if not checkpoints:
        parts = zip(storages, opened.attempts, encoded, strict=True)
        checkpoints = tuple(
            OpenCheckpoint(storage, path, attempt, _decode_index(index), make=make)
            for storage, (path, attempt), index in parts
        )
    for checkpoint in checkpoints:
        checkpoint.records_damage = False  # the coordinator does it, for all ranks
    return ResolvedSources(checkpoints, opened.keys, opened.shared_read_id)


def _decode_index(encoded: bytes) -> Index:
    index = index_json.decode(encoded)
    assert isinstance(index, Index)
    return index


def encode_bitmap(selected: Sequence[str], names: Sequence[str]) -> bytes:
    """Return a bitmap over `names`, with a 1 for each selected name.

    The messages of all ranks together stay small. Lists of names would not.
    """
    chosen = set(selected)
    bits = "".join("1" if name in chosen else "0" for name in names)
    return int(f"0{bits}", 2).to_bytes((len(names) + 7) // 8, "big")
