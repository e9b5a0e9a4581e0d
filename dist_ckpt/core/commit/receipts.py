"""Compare the receipts of all ranks with the plan, and build the index's tables of files. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from dist_ckpt.core.format import filenames
from dist_ckpt.core.format.index.index import (
    AttachedFileRecord,
    Catalog,
    ObjectsFileRecord,
    ShardFileRecord,
)
from dist_ckpt.core.planning.plan import Receipt
from dist_ckpt.core.planning.save.save_planner import stored_nbytes
from dist_ckpt.errors import StorageError


def build_file_tables(
    catalog: Catalog, receipts: Sequence[Receipt]
) -> tuple[tuple[ShardFileRecord, ...], tuple[ObjectsFileRecord, ...]]:
    """Return the index's tables of shard files and objects files. Receipts are in rank order.

    Raises StorageError if a rank wrote other files than planned, or other sizes.
    """
    numbers = {component.stem: n for n, component in enumerate(catalog.components)}
    files: list[ShardFileRecord] = []
    objects: list[ObjectsFileRecord] = []
    for rank, receipt in enumerate(receipts):
        for name, nbytes, header_nbytes, digest in receipt.files:
            if not rank and filenames.parse_attached_file(name) is not None:
                continue  # it is in `build_attached_table`
            parsed = filenames.parse_shard_file(name)
            if parsed is None:
                objects.append(ObjectsFileRecord(name, nbytes, digest))
                continue
            stem, writer = parsed
            if writer != rank or stem not in numbers:
                raise StorageError(f"rank {rank} reports {name}, which is not its file; save again")
            files.append(ShardFileRecord(numbers[stem], rank, nbytes, header_nbytes, digest))
    written = {(file.component, file.rank): file.nbytes - file.header_nbytes for file in files}
    planned = stored_nbytes(catalog)
    for file in sorted(written.keys() | planned.keys()):
        if written.get(file) != planned.get(file):
            name = filenames.shard_file(catalog.components[file[0]].stem, file[1])
            raise StorageError(
                f"rank {file[1]} wrote {written.get(file)} bytes of shards into {name}, "
                f"the plan says {planned.get(file)}; save again"
            )
    files.sort(key=lambda file: (file.component, file.rank))
    objects.sort(key=lambda file: file.name)
    return tuple(files), tuple(objects)


def build_attached_table(receipts: Sequence[Receipt]) -> tuple[AttachedFileRecord, ...]:
    """Return the index's table of attached files. Rank 0 writes them."""
    parsed = ((filenames.parse_attached_file(file.name), file) for file in receipts[0].files)
    return tuple(
        AttachedFileRecord(name, file.nbytes, file.digest) for name, file in parsed if name
    )


def file_sizes(receipts: Sequence[Receipt]) -> dict[str, int]:
    """Return the size in bytes of every written file, by name."""
    return {file.name: file.nbytes for receipt in receipts for file in receipt.files}


def find_unequal_groups(receipts: Sequence[Receipt]) -> list[str]:
    """Return the ids of replica groups whose ranks report different digests."""
    digests: dict[str, set[str]] = defaultdict(set)
    for receipt in receipts:
        for group, digest in receipt.replicas:
            digests[group].add(digest)
    return sorted(group for group, distinct in digests.items() if len(distinct) > 1)
