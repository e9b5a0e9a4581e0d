"""Samples of replicas: enough bytes to notice that two ranks hold different tensors."""

from __future__ import annotations

from dist_ckpt.core.format.checksums import block_digest, document_digest
from dist_ckpt.core.shard_io.memory.protocol import CellSource

# What is smaller is read whole. Of the rest, 16 blocks of 64 KiB: that is 1 MiB too.
_WHOLE_NBYTES = 1 << 20
_BLOCK_NBYTES = 64 << 10
_BLOCKS = _WHOLE_NBYTES // _BLOCK_NBYTES
# No item is larger, and all sizes divide it.
_ITEM_NBYTES = 16


def digest_sample(source: CellSource, name: str) -> str:
    """Return the digest of a sample: all up to 1 MiB, else 16 blocks of 64 KiB.

    Where the blocks lie follows from the size and `name`, which all holders must call the same.
    """
    scratch = memoryview(bytearray(min(_BLOCK_NBYTES, source.nbytes)))
    digests = [
        block_digest(source.read(start, min(start + _BLOCK_NBYTES, source.nbytes), scratch))
        for start in _starts(source.nbytes, name)
    ]
    return document_digest(f"{source.nbytes} {' '.join(digests)}".encode())


def _starts(nbytes: int, name: str) -> list[int]:
    if nbytes <= _WHOLE_NBYTES:
        return list(range(0, nbytes, _BLOCK_NBYTES))
    # One block in each sixteenth, at a place that differs between tensors.
    part = nbytes // _BLOCKS
    room = part - _BLOCK_NBYTES + 1
    places = [int(block_digest(f"{name} {n}".encode()), 16) % room for n in range(_BLOCKS)]
    return [(n * part + place) // _ITEM_NBYTES * _ITEM_NBYTES for n, place in enumerate(places)]
