"""The blocks that each rank needs, and the exchange of these requests."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress

from dist_ckpt.core.comm.collectives.host_links import HostLinks
from dist_ckpt.core.comm.exchange.channel import fits_exchange
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.format.geometry import join_ranges
from dist_ckpt.core.planning.load.read_sharing import (
    BlockRanges,
    RankBlockRequests,
    has_shared_blocks,
)
from dist_ckpt.core.runtime.typed_msgpack import decode, encode
from dist_ckpt.core.shard_io.read.block_reads import find_shard_blocks, group_by_shard
from dist_ckpt.core.shard_io.read.open_files import OpenFiles


def prepare_shared_read(
    session: Session, shared_read_id: str, files: OpenFiles, stack: ExitStack
) -> tuple[HostLinks | None, bytes]:
    """Open this rank's links on its host, and return its encoded block requests.

    `shared_read_id` is a name that only this load has, or "" if the ranks share nothing. The links
    are None if they cannot be opened. `stack` closes them after the load.
    """
    if not shared_read_id:
        return None, b""
    links = None
    with suppress(OSError):
        links = HostLinks(
            shared_read_id, session.channel.rank, timeout_s=session.config.heartbeat_timeout_s
        )
        stack.callback(links.close)
    return links, encode(RankBlockRequests.of(session.channel.host, find_block_ranges(files)))


def find_block_ranges(files: OpenFiles) -> dict[int, BlockRanges]:
    """Return the ranges of blocks that a load needs, by the number of the file in the index."""
    ranges_by_file = {}
    for number, items in files.plan.items():
        file = files.files[number]
        block_nbytes = file.header.block_nbytes
        blocks: list[int] = []
        for shard, wanted in group_by_shard(file, items):
            start, stop = file.shards.starts[shard : shard + 2]
            first = bisect_left(file.block_starts, start)
            if stop - start <= block_nbytes:
                blocks.append(first)
                continue
            needed = find_shard_blocks(file.shards[shard], wanted, block_nbytes, lambda _: False)
            blocks += (first + block.number for block in needed)
        ranges_by_file[number] = tuple(join_ranges(range(block, block + 1) for block in blocks))
    return ranges_by_file


def find_shared_requests(
    encoded_requests: Sequence[bytes | None], *, between_hosts: bool
) -> tuple[bool, Sequence[bytes]]:
    """Return True if ranks need the same blocks, and all requests if an exchange can send them.

    A request is None if it was too long for the exchange. Then the result is also True.
    """
    received = [encoded for encoded in encoded_requests if encoded is not None]
    if len(received) < len(encoded_requests):
        return True, ()
    if not all(received) or not has_shared_blocks(
        (decode(encoded, RankBlockRequests) for encoded in received), between_hosts=between_hosts
    ):
        return False, ()
    # Between hosts a collective always gathers the requests: it also connects the hosts.
    is_sent = fits_exchange(sum(map(len, received)), len(received)) and not between_hosts
    return True, received if is_sent else ()


def gather_requests(
    session: Session, encoded_requests: Sequence[bytes], own: bytes
) -> Mapping[int, RankBlockRequests]:
    """Return the requests of all ranks. Collective: every rank calls this.

    Decode `encoded_requests`. If they are empty, gather the `own` requests of each rank first. If a
    rank fails before this call, the other ranks wait until gloo's deadline.
    """
    if encoded_requests:
        return {
            rank: decode(encoded, RankBlockRequests)
            for rank, encoded in enumerate(encoded_requests)
        }
    bodies = session.collective.all_gather_distinct(own)
    return {rank: decode(body, RankBlockRequests) for body, holders in bodies for rank in holders}
