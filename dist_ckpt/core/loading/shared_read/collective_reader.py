"""Read together: for callers with their own plan."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

from dist_ckpt.core.comm.exchange.channel import fits_exchange
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.loading.shared_read.block_requests import (
    gather_requests,
    request_blocks,
    shared_requests,
)
from dist_ckpt.core.loading.shared_read.group import SharedReadGroup, UnreachableRanks
from dist_ckpt.core.loading.shared_read.shared_reader import read_blocks
from dist_ckpt.core.runtime.typed_msgpack import Message
from dist_ckpt.core.shard_io.read.block_reader import BlockReader
from dist_ckpt.core.shard_io.read.block_reads import CellTargets
from dist_ckpt.core.shard_io.read.open_files import OpenFiles
from dist_ckpt.reports import Phases


class _ReadRequests(Message, frozen=True):
    """The encoded requests of one rank, None if they are too long.

    `connection_epoch` numbers the bulk connections.
    """

    encoded_requests: bytes | None
    connection_epoch: int


class _SharedRequests(Message, frozen=True):
    """True if ranks have requests in common, and all requests if they were short enough."""

    ranks_share_blocks: bool
    encoded_requests: tuple[bytes, ...]
    connection_epoch: int


@dataclass(frozen=True, slots=True)
class CollectiveReader:
    """The ranks that read together. `phases` measures this rank.

    `shared_read_id` is a name that only this read has, the same on all ranks; with "" nothing is
    shared.
    """

    session: Session
    phases: Phases
    shared_read_id: str


def read_together(
    together: CollectiveReader,
    open_files: Callable[[], tuple[OpenFiles, CellTargets]],
    while_open: Callable[[], AbstractContextManager[None]],
) -> tuple[int, int]:
    """Fill the targets of each rank. Collective: every rank of the session calls this.

    `open_files` returns the files with the targets of their cells, and changes no target;
    `while_open` surrounds all work with files. Returns how many bytes came from storage, and how
    many from other ranks of the host. On return all ranks have all their data. All ranks raise the
    error of `open_files` or `BlockReader.read_all` on any rank.
    """
    session, phases = together.session, together.phases
    with ExitStack() as stack:
        with phases.phase("check"):
            files, targets, group = _link_ranks(together, open_files, while_open, stack)
        with phases.phase("read"), session.channel.exchange("read"), while_open():
            reader = BlockReader(files, targets, verify=True, slots=session.scratch_buffers)
            return read_blocks(session, group, reader)


def _link_ranks(
    together: CollectiveReader,
    open_files: Callable[[], tuple[OpenFiles, CellTargets]],
    while_open: Callable[[], AbstractContextManager[None]],
    stack: ExitStack,
) -> tuple[OpenFiles, CellTargets, SharedReadGroup | None]:
    """Open the files, exchange the requests, and link the ranks that have some in common."""
    session = together.session
    with session.channel.exchange("check") as checking:
        with while_open():
            files, targets = open_files()
        stack.callback(files.close)
        links, own = request_blocks(session, together.shared_read_id, files, stack)
        encoded = own if fits_exchange(len(own), session.channel.world_size) else None
        requests = checking.gather(_ReadRequests(encoded, session.collective.epoch))
        if requests is not None:
            requests_of_all = [request.encoded_requests for request in requests]
            are_shared, common_requests = shared_requests(requests_of_all, between_hosts=False)
            epoch = max(request.connection_epoch for request in requests)
            checking.decide(_SharedRequests(are_shared, tuple(common_requests), epoch))
    common = checking.result(_SharedRequests)
    session.collective.renew(common.connection_epoch)
    if not common.ranks_share_blocks:
        return files, targets, None
    with session.channel.exchange("prepare") as preparing:
        requests_by_rank = gather_requests(session, common.encoded_requests, own)
        group = SharedReadGroup.of(
            session, files, links, requests_by_rank, between_hosts=False, stack=stack
        )
        group.decide_unreachable(preparing)
    return files, targets, group.without_unreachable(preparing.result(UnreachableRanks))
