"""What several tests do with memory that bytes come from."""

from __future__ import annotations

from dist_ckpt.core.shard_io.memory.cell_memory import CellReader


def read_all(source: CellReader, block_nbytes: int) -> bytes:
    """Return all bytes of a source, read a block at a time."""
    scratch = memoryview(bytearray(block_nbytes))
    return b"".join(
        bytes(source.read(start, min(start + block_nbytes, source.nbytes), scratch))
        for start in range(0, source.nbytes, block_nbytes)
    )
