"""Checksums. They detect damage; they are not signatures."""

from __future__ import annotations

from collections.abc import Iterator

import xxhash

from dist_ckpt.core.format.geometry import ByteRange

# A digest covers one block, the smallest checked read. At 4 MiB, xxh3 runs at memory speed and
# without the GIL.
BLOCK_NBYTES = 4 << 20

BLOCK_DIGEST_CHARS = 16

Buffer = bytes | bytearray | memoryview


def block_digest(data: Buffer) -> str:
    """Return the xxh3-64 of a block as 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(data)


def streamed_digest() -> xxhash.xxh3_64:
    """Return a digest to `update` with the parts of a block, with the result of `block_digest`."""
    return xxhash.xxh3_64()


def document_digest(data: Buffer) -> str:
    """Return the xxh3-128 of a document (index, header, objects) as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data)


def num_blocks(nbytes: int, block_nbytes: int = BLOCK_NBYTES) -> int:
    """Return the number of blocks of a shard; 0 if it is empty."""
    return -(-nbytes // block_nbytes)


def blocks(nbytes: int, block_nbytes: int = BLOCK_NBYTES) -> Iterator[ByteRange]:
    """Yield the byte ranges of a shard's blocks; the last may be short."""
    for start in range(0, nbytes, block_nbytes):
        yield ByteRange(start, min(start + block_nbytes, nbytes))
