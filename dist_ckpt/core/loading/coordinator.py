"""The coordinator of a load: resolve the checkpoints, decide if they fit, add up the reads."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from functools import reduce
from operator import and_

from dist_ckpt.core.checkpoint.open_checkpoint import OpenCheckpoint
from dist_ckpt.core.checkpoint.opener import Opener
from dist_ckpt.core.comm.exchange.channel import check_equal_on_all_ranks, fits_exchange
from dist_ckpt.core.commit import attempts
from dist_ckpt.core.format.index import index_json
from dist_ckpt.core.format.index.index import Key
from dist_ckpt.core.loading.load_messages import (
    CheckFindings,
    JobTotals,
    LoadDecision,
    LoadRequest,
    OpenedMessage,
    RankTotals,
    ResolvedSources,
)
from dist_ckpt.core.loading.shared_read.group import find_shared_requests
from dist_ckpt.core.planning.selection import find_unmatched_on_all
from dist_ckpt.core.state.binding.bind import unexpected_problem
from dist_ckpt.core.state.tensors.plain_torch import make
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import CheckpointError, IncompatibleError, StorageError, listed, ranks_text
from dist_ckpt.reports import find_slowest

_log = logging.getLogger("dist_ckpt")

# The fields of requests that must be equal on all ranks.
_COMPARED = ("path", "sources", "strict", "check_first", "read_once")


def resolve_checkpoints(
    storages: Sequence[Storage], requests: Sequence[LoadRequest], opener: Opener, leases: ExitStack
) -> tuple[OpenedMessage, tuple[OpenCheckpoint, ...], tuple[bytes, ...]]:
    """Resolve the checkpoints, each on its storage. Coordinator only.

    Returns the answer, the checkpoints, and their encoded indexes if there are other ranks.
    `leases` gets a lease on each checkpoint that a selector names. If several checkpoints are
    missing, the error names all of them.
    """
    check_equal_on_all_ranks("load", requests, _COMPARED)
    checkpoints: list[OpenCheckpoint] = []
    errors: list[CheckpointError | ValueError] = []
    for storage, source in zip(storages, requests[0].paths, strict=True):
        try:
            path = opener.resolve(storage, source, leases)
            checkpoints.append(OpenCheckpoint.at(storage, path, make=make))
        except (CheckpointError, ValueError) as error:
            errors.append(error)
    if len(errors) > 1:
        raise type(errors[0])("; ".join(map(str, errors))) from errors[0]
    if errors:
        raise errors[0]
    encoded: tuple[bytes, ...] = ()
    if len(requests) > 1:
        encoded = tuple(index_json.encode(checkpoint.index) for checkpoint in checkpoints)
    is_short = fits_exchange(sum(map(len, encoded)), len(requests))
    mode = requests[0].read_once
    num_hosts = len({request.host for request in requests}) if mode == "host" else 1
    can_share = mode != "off" and num_hosts < len(requests)
    opened = OpenedMessage(
        attempts=tuple((checkpoint.path, checkpoint.attempt) for checkpoint in checkpoints),
        indexes=encoded if is_short else None,
        keys=_merge_keys(requests),
        connection_epoch=max(request.connection_epoch for request in requests),
        shared_read_id=os.urandom(16).hex() if can_share else "",
    )
    return opened, tuple(checkpoints), encoded


def decide_load(
    request: LoadRequest, sources: ResolvedSources, findings: Sequence[CheckFindings]
) -> LoadDecision:
    """Return the decision after a check. IncompatibleError lists all problems of all ranks."""
    checkpoints = sources.checkpoints
    if gone := [rank for rank, result in enumerate(findings) if result.is_gone]:
        if all(attempts.has_folder(c.storage, c.path, c.attempt) for c in checkpoints):
            folders = " or ".join(checkpoint.folder for checkpoint in checkpoints)
            raise StorageError(
                f"{folders} is not visible on {ranks_text(gone)}, but it is on rank 0: "
                "the path is not on storage that all ranks share. Pass a path that is"
            )
        return LoadDecision(is_gone=True)
    bitmaps = (int.from_bytes(result.unclaimed, "big") for result in findings)
    unexpected = sources.decode_bitmap(reduce(and_, bitmaps))
    _check_fits(request, sources, findings, unexpected)
    ranks_share_blocks, encoded_requests = find_shared_requests(
        [result.encoded_requests for result in findings], between_hosts=request.read_once == "job"
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
    request: LoadRequest,
    sources: ResolvedSources,
    findings: Sequence[CheckFindings],
    unexpected: Sequence[tuple[OpenCheckpoint, Sequence[str]]],
) -> None:
    """Raise IncompatibleError if a rank has a problem.

    With `strict`, unexpected names and patterns that match nothing are problems too.
    """
    problems = _merge_problems([result.problems for result in findings])
    unmatched = find_unmatched_on_all(result.unmatched for result in findings)
    if request.strict:
        label = "the checkpoint" if len(unexpected) == 1 else None
        problems += [
            unexpected_problem(names, label or checkpoint.path)
            for checkpoint, names in unexpected
            if names
        ]
        problems += unmatched
    elif unmatched:
        _log.warning("%s: %s", " and ".join(request.paths), listed(unmatched, "; "))
    if problems:
        lines = listed(["", *problems], "\n  - ")
        paths = " and ".join(checkpoint.path for checkpoint in sources.checkpoints)
        do = "does" if len(sources.checkpoints) == 1 else "do"
        raise IncompatibleError(f"{paths} {do} not fit the state; nothing was changed:{lines}")


def sum_totals(totals: Sequence[RankTotals]) -> JobTotals:
    """Return the totals of all ranks."""
    slowest, slowest_s = find_slowest([rank_totals.seconds for rank_totals in totals])
    nbytes_read = sum(rank_totals.nbytes_read for rank_totals in totals)
    nbytes_placed = sum(rank_totals.nbytes_placed for rank_totals in totals)
    return JobTotals(nbytes_read, nbytes_placed, slowest, slowest_s)


def _merge_keys(requests: Sequence[LoadRequest]) -> dict[str, tuple[Key, ...]]:
    merged: dict[str, dict[Key, None]] = {}
    for request in requests:
        for fqn, key in request.keys:
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
