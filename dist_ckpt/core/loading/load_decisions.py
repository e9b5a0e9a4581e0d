"""The messages between the ranks of a load, and the decisions of the coordinator."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce
from itertools import compress
from operator import and_

from dist_ckpt.core.checkpoint.open_checkpoint import OpenCheckpoint
from dist_ckpt.core.checkpoint.opener import Opener
from dist_ckpt.core.comm.exchange.channel import check_equal_on_all_ranks, fits_exchange
from dist_ckpt.core.commit import attempts
from dist_ckpt.core.format.checksums import document_digest
from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.core.format.index import index_json
from dist_ckpt.core.format.index.index import Index, Key
from dist_ckpt.core.loading.load_options import ReadOnce
from dist_ckpt.core.loading.shared_read.shared_read_group import find_shared_requests
from dist_ckpt.core.planning.name_selection import find_common_problems
from dist_ckpt.core.runtime.typed_msgpack import Message
from dist_ckpt.core.state.binding.bind import unexpected_problem
from dist_ckpt.core.state.tensors.plain_torch import make_torch_value
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import CheckpointError, IncompatibleError, StorageError
from dist_ckpt.message_text import listed, merge_similar, ranks_text
from dist_ckpt.reports import find_slowest

_log = logging.getLogger("dist_ckpt")

# The fields of proposals that must be equal on all ranks.
_COMPARED = ("path", "sources", "strict", "check_first", "read_once")


class LoadProposal(Message, frozen=True):
    """The proposal of one rank. The fields up to `read_once` must be equal on all ranks.

    `path` has all paths if there are several. `sources` has the key and the path of each source, in
    order. `keys` has the names and keys of `PerRank` values in this rank's template.
    `connection_generation` is the `Collective.generation` of this rank.
    """

    path: str | tuple[str, ...]
    sources: tuple[tuple[str, str], ...]
    strict: bool
    check_first: bool
    read_once: ReadOnce
    host: str
    keys: tuple[tuple[str, Key], ...]
    connection_generation: int

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
    connection_generation: int
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


class UnrequestedParts(Message, frozen=True):
    """The tensors made by operations of a rename that one rank does not request.

    `bitmap` has a bit for each tensor that the operations make. `names_digest` is the digest of the
    names of all these tensors: only bitmaps over equal names are compared.
    """

    names_digest: str = ""
    bitmap: bytes = b""

    @staticmethod
    def of(unrequested: Sequence[str], names: Sequence[str]) -> UnrequestedParts:
        """Return the parts of one rank."""
        if not names:
            return UnrequestedParts()
        digest = document_digest("\n".join(names).encode())
        return UnrequestedParts(digest, encode_bitmap(unrequested, names))

    @staticmethod
    def common(parts: Sequence[UnrequestedParts], names: Sequence[str]) -> list[str]:
        """Return the names that no rank requests, if all ranks have the same `names`."""
        if not names or len({part.names_digest for part in parts}) > 1:
            return []
        bits = reduce(and_, (int.from_bytes(part.bitmap, "big") for part in parts))
        return [*compress(names, map(int, f"{bits:0{len(names)}b}"))]


class CheckFindings(Message, frozen=True):
    """The result of one rank's check.

    `unrequested` is a bitmap of the saved names that this rank does not request (`encode_bitmap`),
    and `parts` has tensors that operations of a rename make.
    `pattern_problems` has the problems of patterns that match no name on this rank. `makes_memory`,
    `assigns_values` and `loads_objects` are True for the steps in which this rank has work.
    `encoded_requests` has its block requests: b"" if the ranks can share nothing, None if they are
    too long for this exchange. `from_memory` is True if the rank reads files from memory, `is_gone`
    if the checkpoint was removed. `resized` has, for each resized tensor, its name, the rows that
    are loaded, and the rows of the whole tensor of the state.
    """

    problems: tuple[str, ...] = ()
    pattern_problems: tuple[str, ...] = ()
    unrequested: bytes = b""
    parts: UnrequestedParts = UnrequestedParts()
    makes_memory: bool = False
    assigns_values: bool = False
    loads_objects: bool = False
    encoded_requests: bytes | None = b""
    from_memory: bool = False
    is_gone: bool = False
    resized: tuple[tuple[str, int, int], ...] = ()


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


def decode_sources(
    opened: OpenedMessage,
    checkpoints: tuple[OpenCheckpoint, ...],
    encoded: Sequence[bytes],
    storages: Sequence[Storage],
) -> ResolvedSources:
    """Return the sources: the coordinator has `checkpoints`, other ranks decode the indexes."""
    if not checkpoints:
        parts = zip(storages, opened.attempts, encoded, strict=True)
        checkpoints = tuple(
            OpenCheckpoint(storage, path, attempt, _decode_index(index), make=make_torch_value)
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


# --- the decisions ---------------------------------------------------------------------------


def resolve_checkpoints(
    storages: Sequence[Storage], proposals: Sequence[LoadProposal], opener: Opener, stack: ExitStack
) -> tuple[OpenedMessage, tuple[OpenCheckpoint, ...], tuple[bytes, ...]]:
    """Resolve the checkpoints, each on its storage. Coordinator only.

    Returns the answer, the checkpoints, and their encoded indexes if there are other ranks.
    `stack` gets a lease on each checkpoint that a selector names. If several checkpoints are
    missing, the error names all of them.
    """
    check_equal_on_all_ranks("load", proposals, _COMPARED)
    checkpoints: list[OpenCheckpoint] = []
    errors: list[CheckpointError | ValueError] = []
    for storage, source in zip(storages, proposals[0].paths, strict=True):
        try:
            path = opener.resolve(storage, source, stack)
            checkpoints.append(OpenCheckpoint.at(storage, path, make=make_torch_value))
        except (CheckpointError, ValueError) as error:
            errors.append(error)
    if len(errors) > 1:
        raise type(errors[0])("; ".join(map(str, errors))) from errors[0]
    if errors:
        raise errors[0]
    encoded: tuple[bytes, ...] = ()
    if len(proposals) > 1:
        encoded = tuple(index_json.encode(checkpoint.index) for checkpoint in checkpoints)
    is_short = fits_exchange(sum(map(len, encoded)), len(proposals))
    mode = proposals[0].read_once
    num_hosts = len({proposal.host for proposal in proposals}) if mode == "host" else 1
    can_share = mode != "off" and num_hosts < len(proposals)
    opened = OpenedMessage(
        attempts=tuple((checkpoint.path, checkpoint.attempt) for checkpoint in checkpoints),
        indexes=encoded if is_short else None,
        keys=_merge_keys(proposals),
        connection_generation=max(proposal.connection_generation for proposal in proposals),
        shared_read_id=os.urandom(16).hex() if can_share else "",
    )
    return opened, tuple(checkpoints), encoded


def decide_load(
    proposal: LoadProposal,
    sources: ResolvedSources,
    findings: Sequence[CheckFindings],
    part_names: Sequence[str] = (),
) -> LoadDecision:
    """Return the decision after a check. IncompatibleError lists all problems of all ranks.

    `part_names` are the tensors that operations of a rename make.
    """
    checkpoints = sources.checkpoints
    if gone := [rank for rank, result in enumerate(findings) if result.is_gone]:
        if all(attempts.has_folder(c.storage, c.path, c.attempt) for c in checkpoints):
            folders = " or ".join(checkpoint.folder for checkpoint in checkpoints)
            raise StorageError(
                f"{folders} is not visible on {ranks_text(gone)}, but it is on rank 0: "
                "the path is not on storage that all ranks share. Pass a path that is"
            )
        return LoadDecision(is_gone=True)
    bitmaps = (int.from_bytes(result.unrequested, "big") for result in findings)
    unexpected = sources.decode_bitmap(reduce(and_, bitmaps))
    if parts := UnrequestedParts.common([result.parts for result in findings], part_names):
        unexpected.append((checkpoints[0], parts))
    _check_fits(proposal, sources, findings, unexpected)
    ranks_share_blocks, encoded_requests = find_shared_requests(
        [result.encoded_requests for result in findings], between_hosts=proposal.read_once == "job"
    )
    return LoadDecision(
        unexpected=tuple(dict.fromkeys(name for _, names in unexpected for name in names)),
        makes_memory=any(result.makes_memory for result in findings),
        assigns_values=any(result.assigns_values for result in findings),
        loads_objects=any(result.loads_objects for result in findings),
        ranks_share_blocks=ranks_share_blocks,
        encoded_requests=tuple(encoded_requests),
        from_memory=any(result.from_memory for result in findings),
    )


def _check_fits(
    proposal: LoadProposal,
    sources: ResolvedSources,
    findings: Sequence[CheckFindings],
    unexpected: Sequence[tuple[OpenCheckpoint, Sequence[str]]],
) -> None:
    """Raise IncompatibleError if a rank has a problem.

    With `strict`, unexpected names and patterns that match nothing are problems too.
    """
    problems = _merge_problems([result.problems for result in findings])
    problems += _find_resize_problems([result.resized for result in findings])
    pattern_problems = find_common_problems(result.pattern_problems for result in findings)
    if proposal.strict:
        label = "the checkpoint" if len(sources.checkpoints) == 1 else None
        problems += [
            unexpected_problem(names, label or checkpoint.path)
            for checkpoint, names in unexpected
            if names
        ]
        problems += pattern_problems
    elif pattern_problems:
        _log.warning("%s: %s", " and ".join(proposal.paths), listed(pattern_problems, "; "))
    if problems:
        lines = listed(["", *merge_similar(problems)], "\n  - ")
        paths = " and ".join(checkpoint.path for checkpoint in sources.checkpoints)
        do = "does" if len(sources.checkpoints) == 1 else "do"
        raise IncompatibleError(f"{paths} {do} not fit the state; nothing was changed:{lines}")


def _find_resize_problems(
    resized_by_rank: Sequence[Sequence[tuple[str, int, int]]],
) -> Iterator[str]:
    """Yield the resized tensors whose ranks see another whole tensor."""
    sizes: dict[str, dict[tuple[int, int], list[int]]] = {}
    for rank, resized in enumerate(resized_by_rank):
        for name, rows, live in resized:
            sizes.setdefault(name, {}).setdefault((rows, live), []).append(rank)
    for name, ranks_by_size in sizes.items():
        if len(ranks_by_size) > 1:
            texts = (
                f"{rows} of {live} on {ranks_text(ranks)}"
                for (rows, live), ranks in ranks_by_size.items()
            )
            yield (
                f"{name}: resize keeps {', '.join(texts)}: pass the same resize, and cut the "
                "tensor of the state evenly over the ranks"
            )


def sum_totals(totals: Sequence[RankTotals]) -> JobTotals:
    """Return the totals of all ranks."""
    slowest, slowest_s = find_slowest([rank_totals.seconds for rank_totals in totals])
    nbytes_read = sum(rank_totals.nbytes_read for rank_totals in totals)
    nbytes_placed = sum(rank_totals.nbytes_placed for rank_totals in totals)
    return JobTotals(nbytes_read, nbytes_placed, slowest, slowest_s)


def _merge_keys(proposals: Sequence[LoadProposal]) -> dict[str, tuple[Key, ...]]:
    merged: dict[str, dict[Key, None]] = {}
    for proposal in proposals:
        for fqn, key in proposal.keys:
            merged.setdefault(fqn, {})[key] = None
    return {fqn: tuple(keys) for fqn, keys in merged.items()}


def _merge_problems(problems_by_rank: Sequence[Sequence[str]]) -> list[str]:
    """Return each problem once, with its ranks unless all ranks have it."""
    ranks_by_problem: dict[str, list[int]] = {}
    for rank, problems in enumerate(problems_by_rank):
        for problem in problems:
            ranks_by_problem.setdefault(problem, []).append(rank)
    return [
        problem if len(ranks) == len(problems_by_rank) else f"{problem} ({ranks_text(ranks)})"
        for problem, ranks in ranks_by_problem.items()
    ]
