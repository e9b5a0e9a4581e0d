"""A shared read for callers with their own plan, such as DCP. It binds no state."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

from dist_ckpt.core.comm.exchange.channel import fits_exchange
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.loading.shared_read.block_requests import (
    find_shared_requests,
    gather_requests,
    prepare_shared_read,
)
from dist_ckpt.core.loading.shared_read.group import SharedReadGroup, UnreachableRanks
from dist_ckpt.core.loading.shared_read.shared_reader import read_blocks
from dist_ckpt.core.runtime.typed_msgpack import Message
from dist_ckpt.core.shard_io.read.block_reader import BlockReader
from dist_ckpt.core.shard_io.read.block_reads import CellTargets
from dist_ckpt.core.shard_io.read.open_files import OpenFiles
from dist_ckpt.reports import Phases


class _ReadRequests(Message, frozen=True):
    """The encoded requests of one rank, or None if they are too long.

    `connection_epoch` numbers the bulk connections.
    """

    encoded_requests: bytes | None
    connection_epoch: int


class _SharedRequests(Message, frozen=True):
    """True if ranks need the same blocks, and all requests if they are short enough."""

    ranks_share_blocks: bool
    encoded_requests: tuple[bytes, ...]
    connection_epoch: int


@dataclass(frozen=True, slots=True)
class CollectiveReader:
    """Fills the targets of all ranks of a session. `phases` measures this rank.

    `shared_read_id` is a name that only this read has, the same on all ranks, or "" if the ranks
    share nothing.
    """

    session: Session
    phases: Phases
    shared_read_id: str

    def read(
        self,
        open_files: Callable[[], tuple[OpenFiles, CellTargets]],
        while_open: Callable[[], AbstractContextManager[None]],
    ) -> tuple[int, int]:
        """Fill the targets of each rank. Collective: every rank of the session calls this.

        `open_files` returns the files and the targets of their cells, and changes no target.
        `while_open` surrounds all work with files. No target changes before all ranks have opened
        their files. On return all ranks have all their data. Returns the bytes from storage, and
        the bytes from other ranks of the host. If `open_files` or `BlockReader.read_all` fails on a
        rank, all ranks raise its error.
        """
        session = self.session
        with ExitStack() as stack:
            with self.phases.phase("check"):
                files, targets, group = self._link_ranks(open_files, while_open, stack)
            with self.phases.phase("read"), session.channel.exchange("read"), while_open():
                reader = BlockReader(files, targets, verify=True, slots=session.scratch_buffers)
                return read_blocks(session, group, reader)

    def _link_ranks(
        self,
        open_files: Callable[[], tuple[OpenFiles, CellTargets]],
        while_open: Callable[[], AbstractContextManager[None]],
        stack: ExitStack,
    ) -> tuple[OpenFiles, CellTargets, SharedReadGroup | None]:
        """Open the files, exchange the requests, and link the ranks that need the same blocks."""
        session = self.session
        with session.channel.exchange("check") as checking:
            with while_open():
                files, targets = open_files()
            stack.callback(files.close)
            links, own = prepare_shared_read(session, self.shared_read_id, files, stack)
            encoded = own if fits_exchange(len(own), session.channel.world_size) else None
            gathered = checking.gather(_ReadRequests(encoded, session.collective.epoch))
            if gathered is not None:
                ranks_share_blocks, encoded_requests = find_shared_requests(
                    [request.encoded_requests for request in gathered], between_hosts=False
                )
                epoch = max(request.connection_epoch for request in gathered)
                checking.decide(_SharedRequests(ranks_share_blocks, tuple(encoded_requests), epoch))
        shared = checking.result(_SharedRequests)
        session.collective.renew(shared.connection_epoch)
        if not shared.ranks_share_blocks:
            return files, targets, None
        with session.channel.exchange("prepare") as preparing:
            requests_by_rank = gather_requests(session, shared.encoded_requests, own)
            group = SharedReadGroup.link(
                session, files, links, requests_by_rank, between_hosts=False, stack=stack
            )
            group.decide_unreachable(preparing)
        return files, targets, group.without_unreachable(preparing.result(UnreachableRanks))
