"""How the reads of a load are divided: how much a thread does at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.planning.plan import LoadPlan, ReadItem
from dist_ckpt.core.shard_io.memory.protocol import Target
from dist_ckpt.core.shard_io.read.block_reads import (
    BlockRead,
    BlockRequest,
    reads_of,
    requested_blocks,
)
from dist_ckpt.core.shard_io.read.open_files import OpenFile, OpenFiles
from dist_ckpt.core.shard_io.read.small_shards import SmallShardRun, divide

# What is done for small shards is all Python, and threads that take turns at it wait as long for
# each other as they work. So one takes so many rows: more gain nothing where all is in the page
# cache, and keep the disk waiting where it is not.
MAX_ROWS = 16

# So much one thread reads in a row. To hand it its next work takes 0.1 ms of Python, which all
# others wait for: with a read of 8 MiB at a time loads from memory took 4 to 16 % longer.
WORK_NBYTES = 32 << 20

# The memory of each wanted cell, by tensor and number of the cell.
CellTargets = Mapping[tuple[str, int], Target]


def nbytes_placed_by(plan: LoadPlan) -> int:
    """Return how many bytes of targets a plan fills."""
    return sum(
        item.match.common.numel * DTYPES[item.dtype].itemsize
        for items in plan.values()
        for item in items
    )


def split_into_work(
    files: OpenFiles, targets: CellTargets | None, threads: int
) -> Iterator[list[tuple[OpenFile, SmallShardRun | BlockRead]]]:
    """Return the reads of some files, those of one thread at a time together: many rows, or reads.

    Towards the end these are fewer and fewer, so that no thread is left with much to do.
    """
    rows: list[tuple[OpenFile, SmallShardRun | BlockRead]] = []
    some: list[tuple[OpenFile, SmallShardRun | BlockRead]] = []
    nbytes, left = 0, nbytes_placed_by(files.plan)
    for file, items in files:
        small, others = divide(file, items)
        for row in small:
            rows.append((file, row))
            if len(rows) == MAX_ROWS:
                yield rows
                rows = []
        for one in reads_of(needs_of(file, others, targets)):
            some.append((file, one))
            nbytes += one.span.nbytes
            if nbytes >= min(WORK_NBYTES, left // (2 * threads)):
                yield some
                left -= nbytes
                some, nbytes = [], 0
    yield from (work for work in (some, rows) if work)


def by_shard(file: OpenFile, items: Iterable[ReadItem]) -> list[tuple[int, list[ReadItem]]]:
    """Return the numbers of the shards of a file that items read, ascending, with those items."""
    found: dict[int, list[ReadItem]] = {}
    for item in items:
        found.setdefault(file.number_of(item), []).append(item)
    return sorted(found.items())


def needs_of(
    file: OpenFile, items: Iterable[ReadItem], targets: CellTargets | None
) -> Iterator[BlockRequest]:
    """Return the blocks of a file that items need, in the file's order."""

    def has_memory(item: ReadItem) -> bool:
        return targets is not None and targets[item.fqn, item.match.part].memory() is not None

    for number, wanted in by_shard(file, items):
        yield from requested_blocks(
            file.shards[number], wanted, file.header.block_nbytes, has_memory
        )
