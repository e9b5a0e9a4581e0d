"""`dc.verify`: find and report all problems of a checkpoint, without torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain
from threading import Lock
from typing import Literal

from dist_ckpt.config import Config
from dist_ckpt.core.checkpoint.opener import NATIVE, Opener
from dist_ckpt.core.commit.attempts import MAX_TRIES, find_checkpoint, has_folder, read_document
from dist_ckpt.core.commit.records.record_store import note_verified
from dist_ckpt.core.format import filenames
from dist_ckpt.core.format.checksums import block_digest
from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.geometry import ByteRange, Cell, ElementRange, Shape
from dist_ckpt.core.format.index import index_json
from dist_ckpt.core.format.index.index import (
    AttachedFileRecord,
    Index,
    ObjectsFileRecord,
    ShardFileRecord,
)
from dist_ckpt.core.format.objects import objects_file
from dist_ckpt.core.format.shard_file import ShardFile
from dist_ckpt.core.planning.save.save_planner import stored_cells_by_rank
from dist_ckpt.core.runtime.buffers import BufferPool
from dist_ckpt.core.runtime.threads import parallel_for
from dist_ckpt.core.shard_io.read import block_reads, open_files
from dist_ckpt.core.shard_io.read.block_reads import BlockRead
from dist_ckpt.core.shard_io.read.open_files import OpenFile
from dist_ckpt.core.storage import Storage, open_storage
from dist_ckpt.errors import CheckpointError, CorruptError, StorageError
from dist_ckpt.reports import Progress

Level = Literal["full", "quick"]


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a file; `rank`, `tensor` and `rows` say what is damaged, if that is known."""

    file: str
    rank: int | None
    tensor: str | None
    rows: ByteRange | None
    what: str

    def __str__(self) -> str:
        return self.what


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of `verify`. `notes` lists harmless files of other programs, or of dead processes.

    `attempt` is None if the index is damaged.
    """

    path: str
    attempt: str | None
    level: Level
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    num_files: int
    nbytes_checked: int

    @property
    def ok(self) -> bool:
        """True if there are no problems."""
        return not self.problems


def verify(
    path: str | os.PathLike[str],
    *,
    level: Level = "full",
    progress: Progress | None = None,
    opener: Opener = NATIVE,
) -> VerifyReport:
    """Check one checkpoint and report all its problems. One process calls this, without torch.

    "quick" checks the index, the existence and size of all files, the header of each shard file,
    the objects files and the attached files. "full" also checks every byte of every shard. A
    damaged checkpoint is a report, not an error. Raises NotFoundError if there is none, and
    IncompatibleError if a newer dist_ckpt wrote it. `path` may be a selector, such as
    "runs/a@latest". If the run keeps records, a full check without problems is recorded there.
    `dist-ckpt verify` of a run's folder checks each checkpoint in it.
    """
    if level not in ("full", "quick"):
        raise ValueError(f'level={level!r}: give "full" or "quick"')
    storage, root = open_storage(opener.without_selector(path), direct_reads=True)
    for _ in range(MAX_TRIES):
        try:
            return _verify_once(storage, root, level, progress or (lambda *_: None))
        except _GoneError:  # an overwrite has replaced it: check the new one
            continue
    raise StorageError(f"{root}: it is replaced faster than it can be read: try again")


class _GoneError(Exception):
    """The attempt was removed during the check, so its problems mean nothing."""


def _verify_once(storage: Storage, root: str, level: Level, progress: Progress) -> VerifyReport:
    try:
        attempt, index = find_checkpoint(storage, root)
    except CorruptError as error:
        problem = Problem(filenames.INDEX, None, None, None, str(error))
        return VerifyReport(root, None, level, (problem,), (), 0, 0)
    verification = _VerifyRun(storage, f"{root}/{attempt.name}", index, progress)
    try:
        verification.run(level, threads=Config.from_environment().threads)
    except FileNotFoundError as error:
        raise _GoneError from error
    if level == "full" and not verification.problems and index.step is not None:
        note_verified(storage, root, (index.step, attempt), level)
    if verification.problems and not has_folder(storage, root, attempt):
        raise _GoneError
    return VerifyReport(
        path=root,
        attempt=attempt.name,
        level=level,
        problems=tuple(sorted(verification.problems, key=_sort_key)),
        notes=tuple(sorted(verification.notes)),
        num_files=index.num_files,
        nbytes_checked=verification.nbytes_checked,
    )


def _sort_key(problem: Problem) -> tuple[str, str, ByteRange, str]:
    return problem.file, problem.tensor or "", problem.rows or ByteRange(-1, -1), problem.what


# The shards of a file: tensor and cell -> dtype and shape of the tensor.
_Shards = Mapping[tuple[str, Cell], tuple[str, Shape]]

# The name of a tensor, and its lost rows.
_Lost = tuple[str, ByteRange | None]


class _VerifyRun:
    """One call of `verify`; its threads add to `problems`."""

    def __init__(self, storage: Storage, folder: str, index: Index, progress: Progress) -> None:
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.nbytes_checked = 0
        self._counting = Lock()
        self._storage = storage
        self._folder = folder
        self._index = index
        self._contents = objects_file.list_contents(index.catalog)
        self._progress = progress
        self._slots = BufferPool(max(block_reads.READ_NBYTES, open_files.MAX_BLOCK_NBYTES))

    def run(self, level: Level, *, threads: int) -> None:
        """Check the names of files, then the files, several at once."""
        index = self._index
        self._check_listing()
        self._check_claim()
        sizes = [file.nbytes if level == "full" else file.header_nbytes for file in index.files]
        tables = (index.objects, index.attached)
        nbytes = sum(sizes) + sum(record.nbytes for table in tables for record in table)
        parallel_for(lambda check: check(), self._checks(level, nbytes), threads=threads)
        self._progress(self.nbytes_checked, nbytes)

    def _checks(self, level: Level, nbytes: int) -> Iterator[Callable[[], object]]:
        index = self._index
        headers = (partial(self._check_header, *contents) for contents in _expected_contents(index))
        work: Iterator[Callable[[], object]] = chain(
            (partial(self._check_objects, record) for record in index.objects),
            (partial(self._check_attached, record) for record in index.attached),
            self._blocks() if level == "full" else headers,
        )
        for check in work:
            self._progress(self.nbytes_checked, nbytes)
            yield check

    def _count(self, nbytes: int) -> None:
        with self._counting:
            self.nbytes_checked += nbytes

    # --- names and objects ---

    def _check_listing(self) -> None:
        index, folder = self._index, self._folder
        names = {filenames.INDEX, filenames.CLAIM, *index.all_files}
        if filenames.OBJECTS not in names:
            text = f"{folder}: the index lists no {filenames.OBJECTS}"
            self._add_problem(filenames.INDEX, None, text)
        for entry in self._storage.list(folder):
            if entry.name in names:
                continue
            text = f"{folder}/{entry.name} is not in the index"
            if filenames.is_in_attempt(entry.name) and not filenames.is_temporary(entry.name):
                self._add_problem(entry.name, None, text)
            else:
                self.notes.append(text)

    def _check_claim(self) -> None:
        path = f"{self._folder}/{filenames.CLAIM}"
        try:
            index_json.decode(read_document(self._storage, path), label=path)
        except FileNotFoundError:
            self._add_problem(filenames.CLAIM, None, f"{path} is missing")
        except CheckpointError as error:
            self._add_problem(filenames.CLAIM, None, str(error))

    def _check_objects(self, record: ObjectsFileRecord) -> None:
        path = f"{self._folder}/{record.name}"
        rank = filenames.parse_objects_file(record.name)
        try:
            file = open_files.read_objects(self._storage, self._folder, record)
        except CheckpointError as error:
            self._add_problem(record.name, rank, str(error))
            return
        self._count(record.nbytes)
        catalog, contents = self._index.catalog, self._contents
        for value in objects_file.find_missing(file, record.name, catalog, contents):
            text = f"{path} lacks {value}, which the checkpoint should hold"
            self._add_problem(record.name, rank, text)

    def _check_attached(self, record: AttachedFileRecord) -> None:
        try:
            open_files.read_attached_file(self._storage, self._folder, record)
        except CheckpointError as error:
            self._add_problem(record.file_name, 0, str(error))
            return
        self._count(record.nbytes)

    # --- shard files ---

    def _blocks(self) -> Iterator[Callable[[], object]]:
        for record, expected in _expected_contents(self._index):
            if (checked := self._check_header(record, expected)) is None:
                continue
            file, end = checked
            needed = block_reads.all_blocks(file.header.shards, file.header.block_nbytes)
            for read in block_reads.group_into_reads(
                block for block in needed if block.stop <= end
            ):
                yield partial(self._check_blocks, file, read)

    def _check_header(
        self, record: ShardFileRecord, expected: _Shards
    ) -> tuple[OpenFile, int] | None:
        """Check the size and the header of a shard file. Return None if the header is damaged.

        Otherwise return the file, and the number of bytes after its header.
        """
        path = f"{self._folder}/{self._index.file_name(record)}"
        try:
            with closing(open_files.open_readable(self._storage, path, record)) as readable:
                end = readable.nbytes - record.header_nbytes
                wrong_size = open_files.size_problem(readable, path, record)
                header = open_files.read_header(readable, path, record, self._index)
        except CheckpointError as error:
            lost = [
                (fqn, open_files.rows_of(cell, shape, ElementRange(0, cell.numel)))
                for (fqn, cell), (_, shape) in expected.items()
            ]
            self._add_lost(record, str(error), lost)
            return None
        self._count(record.header_nbytes)
        if wrong_size is not None:
            self._add_lost(record, wrong_size, _find_cut_off(header, end))
        self._compare_shards(record, expected, header)
        return OpenFile(self._storage, path, record, header), end

    def _compare_shards(
        self, record: ShardFileRecord, expected: _Shards, header: ShardFile
    ) -> None:
        actual = {(shard.fqn, shard.cell): (shard.dtype, shard.shape) for shard in header.shards}
        name = self._index.file_name(record)
        for fqn, cell in sorted(expected.keys() | actual.keys(), key=str):
            has, should = actual.get((fqn, cell)), expected.get((fqn, cell))
            if has != should:
                difference = f"it has {_shard_text(has)}, the index says {_shard_text(should)}"
                text = f"{self._folder}/{name} of rank {record.rank}: {fqn}[{cell}]: {difference}"
                self._add_problem(name, record.rank, text, tensor=fqn)

    def _check_blocks(self, file: OpenFile, read: BlockRead) -> None:
        with self._slots.borrow() as slot:
            data = slot[: read.span.nbytes]
            try:
                with file.reading() as readable:
                    count = readable.read_into(file.header.header_nbytes + read.span.start, data)
            except CheckpointError as error:
                lost = [
                    (block.shard.fqn, block_reads.rows_of_block(block)) for block in read.blocks
                ]
                self._add_lost(file.record, str(error), lost)
                return
            for block in read.blocks:
                start, stop = block.start - read.span.start, block.stop - read.span.start
                problem: str | None = "the file ended while it was read"
                if stop <= count:
                    self._count(stop - start)
                    problem = block_reads.digest_problem(block, block_digest(data[start:stop]))
                if problem is not None:
                    name, rank = self._index.file_name(file.record), file.record.rank
                    text = block_reads.damage_text(file.path, file.header, block, problem)
                    rows = block_reads.rows_of_block(block)
                    self._add_problem(name, rank, text, tensor=block.shard.fqn, rows=rows)

    def _add_lost(self, record: ShardFileRecord, problem: str, lost: Iterable[_Lost]) -> None:
        """Add a problem of a file, and one problem for each range of rows that is lost with it."""
        name = self._index.file_name(record)
        self._add_problem(name, record.rank, problem)
        for fqn, rows in lost:
            text = f"{fqn} {open_files.rows_text(rows)}: lost, for {problem}"
            self._add_problem(name, record.rank, text, tensor=fqn, rows=rows)

    def _add_problem(
        self,
        file: str,
        rank: int | None,
        text: str,
        *,
        tensor: str | None = None,
        rows: ByteRange | None = None,
    ) -> None:
        self.problems.append(Problem(file, rank, tensor, rows, text))


def _shard_text(shard: tuple[str, Shape] | None) -> str:
    return "nothing" if shard is None else f"{shard[0]} {list(shard[1])}"


def _find_cut_off(header: ShardFile, end: int) -> Iterator[_Lost]:
    """Yield the rows of tensors that are lost in a short file, which ends at byte `end`."""
    for shard in header.shards:
        if shard.span.stop > end:
            itemsize = DTYPES[shard.dtype].itemsize
            left = max(end - shard.span.start, 0) // header.block_nbytes * header.block_nbytes
            part = ElementRange(left // itemsize, shard.cell.numel)
            yield shard.fqn, open_files.rows_of(shard.cell, shard.shape, part)


def _expected_contents(index: Index) -> Iterator[tuple[ShardFileRecord, _Shards]]:
    """Yield each shard file, and the shards that the catalog expects in it."""
    files = {(file.component, file.rank): file for file in index.files}
    for rank, stored in enumerate(stored_cells_by_rank(index.catalog)):
        for component, cells in stored.items():
            shards = {(fqn, cell): (dtype, shape) for fqn, dtype, shape, cell in cells}
            yield files[component, rank], shards
