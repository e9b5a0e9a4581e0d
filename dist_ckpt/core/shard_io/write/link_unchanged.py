"""Write a rank's files, but link those of an earlier save that hold the same.

What is written of a tensor that does not change is the same bytes, save after save: one header,
with one digest. So a file is linked if digesting the live tensors makes the header that an earlier
save of this process has committed, and the file still says so.

Two saves in a row never share a file, for a link is made to the save before the last one, as long
as that is there. And a file has at most `MAX_SHARED` names: then it is written anew. So a sector
that goes bad takes at most some of the checkpoints, and the digests say which.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Literal

from dist_ckpt.core.format.checksums import block_digest, document_digest
from dist_ckpt.core.format.shard_file import decode_header
from dist_ckpt.core.planning.plan import FileReceipt
from dist_ckpt.core.runtime.buffers import BufferPool
from dist_ckpt.core.runtime.threads import parallel_for
from dist_ckpt.core.shard_io.read.block_reads import BlockRead, every_block, reads_of
from dist_ckpt.core.shard_io.read.open_files import digest_problem
from dist_ckpt.core.shard_io.write.shard_writer import RankFiles, gone, write_all, write_shard_files
from dist_ckpt.core.storage import ReadableFile, Storage
from dist_ckpt.core.storage.linking import linked
from dist_ckpt.core.storage.local.direct_io import drop_cached_file
from dist_ckpt.core.storage.null_storage import NullStorage
from dist_ckpt.errors import CheckpointError, ConflictError, CorruptError
from dist_ckpt.reports import IoCount

_log = logging.getLogger("dist_ckpt")

# So many checkpoints, backups too, share a file at most.
MAX_SHARED = 8

# Of so many saves it is known what they have: a state that is saved in turns with seven others is
# linked as one that is saved alone.
_REMEMBERED = 16

# What is linked to was read back from the disk, whole, within so many saves.
READ_BACK_EVERY = 8


@dataclass(frozen=True, slots=True)
class SavedFiles:
    """What a rank has in the folder of a save, by name; `checked`: which save read a file back."""

    folder: str
    files: Mapping[str, FileReceipt]
    checked: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SavedPart:
    """What a rank has written, and linked: `linked` counts files and their bytes."""

    receipts: tuple[FileReceipt, ...]
    linked: IoCount
    saved: SavedFiles


@dataclass(frozen=True, slots=True)
class LinkableSaves:
    """The last committed saves of a process, the older first; `number` counts all there were."""

    saves: tuple[SavedFiles, ...] = ()
    number: int = 0

    def names(self) -> set[str]:
        """Return what two of them have, so that it may be linked."""
        seen = Counter(name for saved in self.saves for name in saved.files)
        return {name for name, count in seen.items() if count > 1}

    def with_file(self, wanted: FileReceipt) -> tuple[SavedFiles, ...]:
        """Return the last two that have such a file: the bytes are the same, whatever the plan."""
        return tuple(one for one in self.saves if one.files.get(wanted[0]) == wanted)[-2:]

    def plus(self, saved: SavedFiles) -> LinkableSaves:
        """Return them with one more that is committed."""
        saves = (*self.saves, saved)[-_REMEMBERED:] if saved.files else self.saves
        return LinkableSaves(saves, self.number + 1)


def write_or_link(
    storage: Storage,
    folder: str,
    files: RankFiles,
    earlier: LinkableSaves,
    *,
    threads: int,
    slots: BufferPool | None = None,
) -> SavedPart:
    """Write a rank's files as `write_all` does, but link those that an earlier save has.

    Whatever forbids a link, the file is written. Raises what `write_all` does.
    """
    known = earlier.names()
    tried = [n for n, one in enumerate(files.plans) if one.is_reused and one.name in known]
    wanted: tuple[FileReceipt, ...] = ()
    if tried:
        digested = _only(files, tried)
        wanted = write_shard_files(
            NullStorage(), "", digested, threads=threads, slots=slots or BufferPool()
        )
    # One after another: each is read back by all threads.
    found = {one[0]: _link(storage, folder, one, earlier, threads) for one in wanted}
    checked = {name: number for name, number in found.items() if number is not None}
    rest = [n for n, one in enumerate(files.plans) if one.name not in checked]
    written = write_all(
        storage,
        folder,
        replace(_only(files, rest), objects=files.objects),
        threads=threads,
        slots=slots,
    )
    if checked and not written:
        try:
            storage.sync(folder)
        except FileNotFoundError as error:
            raise gone(folder) from error
    carried = tuple(one for one in wanted if one[0] in checked)
    receipts = (*carried, *written)
    names = {one.name for one in files.plans if one.is_reused}
    saved = SavedFiles(folder, {one[0]: one for one in receipts if one[0] in names}, checked)
    return SavedPart(receipts, IoCount(len(carried), sum(one[1] for one in carried)), saved)


def _only(files: RankFiles, numbers: Sequence[int]) -> RankFiles:
    return replace(
        files,
        plans=tuple(files.plans[n] for n in numbers),
        sources=tuple(files.sources[n] for n in numbers),
        objects={},
    )


def _link(
    storage: Storage,
    folder: str,
    wanted: FileReceipt,
    earlier: LinkableSaves,
    threads: int,
) -> int | None:
    """Link a file of an earlier save; return which save has read it back. None: write it."""
    name, candidates = wanted[0], earlier.with_file(wanted)
    for saved in candidates if len(candidates) > 1 else ():  # the first two have their own
        checked = _checked(storage, saved, wanted, earlier.number, threads)
        if checked == "gone":  # pruned: then the newer one, or with keep.last(1) all is written
            continue
        if checked is None:
            return None
        try:
            is_linked = linked(storage, f"{saved.folder}/{name}", f"{folder}/{name}")
            return checked if is_linked else None
        except FileExistsError as error:
            raise ConflictError(
                f"{folder}/{name} exists already: is this rank running twice? Stop the other, then "
                f"save again"
            ) from error
    return None


def _checked(
    storage: Storage, saved: SavedFiles, wanted: FileReceipt, number: int, threads: int
) -> int | Literal["gone"] | None:
    """Return which save has last read a file back, this one if need be; None if it is no good."""
    name, nbytes, header_nbytes, digest = wanted
    path = f"{saved.folder}/{name}"
    try:
        file = storage.open(path)
    except FileNotFoundError:
        return "gone"
    except CheckpointError as error:
        _refused(path, error)
        return None
    with closing(file):
        if file.num_links >= MAX_SHARED:
            return None
        try:
            header = _read(file, path, 0, header_nbytes)
            if file.nbytes != nbytes or document_digest(header) != digest:
                raise CorruptError(f"{path} is not what was written")
            checked = saved.checked.get(name)
            if checked is None or number - checked >= READ_BACK_EVERY:
                drop_cached_file(path)
                _read_back(file, path, bytes(header), nbytes, threads)
                checked = number
        except CheckpointError as error:
            _refused(path, error)
            return None
    return checked


def _refused(path: str, error: CheckpointError) -> None:
    _log.warning("%s is not linked on, but written anew: %s", path, error)


def _read(file: ReadableFile, path: str, start: int, nbytes: int) -> memoryview:
    data = memoryview(bytearray(nbytes))
    if file.read_into(start, data) != nbytes:
        raise CorruptError(f"{path} ends before byte {start + nbytes}")
    return data


def _read_back(file: ReadableFile, path: str, header: bytes, nbytes: int, threads: int) -> None:
    """Read all blocks of a file. CorruptError if one is not what its digest says."""
    said = decode_header(header, nbytes=nbytes, label=path)

    def check(one: BlockRead) -> None:
        data = _read(file, path, said.header_nbytes + one.span.start, one.span.nbytes)
        for need in one.needs:
            block = data[need.start - one.span.start : need.stop - one.span.start]
            if (problem := digest_problem(need, block_digest(block))) is not None:
                raise CorruptError(f"{path}: {need.shard.fqn} is {problem}")

    parallel_for(check, reads_of(every_block(said.shards, said.block_nbytes)), threads=threads)
