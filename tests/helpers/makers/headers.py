"""Headers of shard files, encoded from what decoding them is to return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dist_ckpt.core.format.shard_file import HeaderText, ShardFile, StoredShard, header_text


def shard_file(
    component: str,
    rank: int,
    world_size: int,
    step: int | None,
    block_nbytes: int,
    shards: Sequence[StoredShard],
) -> ShardFile:
    """Return what is known of a file with these shards; its header is as long as it needs."""
    file = ShardFile(component, rank, world_size, step, block_nbytes, 0, shards)  # type: ignore[arg-type]
    return replace(file, header_nbytes=text_of(file).nbytes)


def encode_header(file: ShardFile) -> bytes:
    """Return the first `file.header_nbytes` bytes of a file; its digests must be complete."""
    return text_of(file).fill(file.step, "".join(d for shard in file.shards for d in shard.digests))


def text_of(file: ShardFile) -> HeaderText:
    return header_text(
        file.shards,
        component=file.component,
        rank=file.rank,
        world_size=file.world_size,
        block_nbytes=file.block_nbytes,
    )
