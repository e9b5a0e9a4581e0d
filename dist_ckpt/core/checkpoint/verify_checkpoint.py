"""`dc.verify`: find and report all problems of a checkpoint, without torch. Record damage."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from threading import Lock
from typing import Literal

from dist_ckpt.core.checkpoint.opener import NATIVE, Opener
from dist_ckpt.core.commit.attempts import MAX_TRIES, find_checkpoint, has_folder, read_document
from dist_ckpt.core.commit.records.recorded_checks import iterate_siblings, record_check
from dist_ckpt.core.format import filenames
from dist_ckpt.core.format.checksums import block_digest
from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.filenames import Attempt, parse_attempt
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
from dist_ckpt.core.runtime.host_memory import BufferPool
from dist_ckpt.core.runtime.threads import parallel_for
from dist_ckpt.core.shard_io.read import open_files, read_grouping
from dist_ckpt.core.shard_io.read.open_files import OpenFile
from dist_ckpt.core.shard_io.read.read_grouping import BlockRead
from dist_ckpt.core.storage import Storage, open_storage
from dist_ckpt.core.storage.local.direct_io import drop_cached
from dist_ckpt.errors import CheckpointError, CorruptError, StorageError
from dist_ckpt.reports import Progress
from dist_ckpt.settings import Settings

_log = logging.getLogger("dist_ckpt")

Level = Literal["full", "quick"]


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a file; `rank`, `tensor` and `rows` say what is damaged, if that is known.

    `is_damage`: stored data is lost. False for errors of the storage, and for files without data.
    `cause`: the problem of the file by which this part of a tensor is lost. `is_unread`: the
    storage could not read it, so it may be whole.
    """

    file: str
    rank: int | None
    tensor: str | None
    rows: ByteRange | None
    what: str
    is_damage: bool = True
    cause: str | None = None
    is_unread: bool = False

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

    @property
    def is_unread(self) -> bool:
        """True if there are problems, but only because the storage could not read something."""
        return bool(self.problems) and all(problem.is_unread for problem in self.problems)


def verify(
    path: str | os.PathLike[str],
    *,
    level: Level = "full",
    progress: Progress | None = None,
    record: bool = True,
    opener: Opener = NATIVE,
) -> VerifyReport:
    """Check one checkpoint and report all its problems. One process calls this, without torch.

    "quick" checks the index, the existence and size of all files, the header of each shard file,
    the objects files and the attached files. "full" also checks every byte of every shard. A
    damaged checkpoint is a report, not an error. Raises NotFoundError if there is none, and
    IncompatibleError if a newer dist_ckpt wrote it. `path` may be a selector, such as
    "runs/a@latest". `dist-ckpt verify` of a run's folder checks each checkpoint in it.

    In a run, a full check without problems is recorded. Damage is recorded after a second read,
    also in other checkpoints that link to the damaged file. With `record=False` nothing is.
    """
    if level not in ("full", "quick"):
        raise ValueError(f'level={level!r}: give "full" or "quick"')
    storage, root = open_storage(opener.without_selector(path), direct_reads=True)
    for _ in range(MAX_TRIES):
        try:
            result = _verify_once(storage, root, level, progress or (lambda *_: None))
        except _GoneError:  # an overwrite has replaced it: check the new one
            continue
        report, index = result
        if record and index is not None:
            _record(storage, report, index)
        return report
    raise StorageError(f"{root}: it is replaced faster than it can be read: try again")


class _GoneError(Exception):
    """The attempt was removed during the check, so its problems mean nothing."""


def _verify_once(
    storage: Storage, root: str, level: Level, progress: Progress
) -> tuple[VerifyReport, Index | None]:
    try:
        attempt, index = find_checkpoint(storage, root)
    except CorruptError as error:
        problem = Problem(filenames.INDEX, None, None, None, str(error))
        return VerifyReport(root, None, level, (problem,), (), 0, 0), None
    folder = f"{root}/{attempt.name}"
    verification = _VerifyRun(storage, folder, index, progress)
    problems: Sequence[Problem] = ()
    try:
        verification.run(level)
        if verification.problems:
            problems = _check_again(storage, folder, index, level, verification.problems)
    except FileNotFoundError as error:
        raise _GoneError from error
    if problems and not has_folder(storage, root, attempt):
        raise _GoneError
    report = VerifyReport(
        path=root,
        attempt=attempt.name,
        level=level,
        problems=tuple(sorted(problems, key=_sort_key)),
        notes=tuple(sorted(verification.notes)),
        num_files=index.num_files,
        nbytes_checked=verification.nbytes_checked,
    )
    return report, index


def _record(storage: Storage, report: VerifyReport, index: Index) -> None:
    """Record the result of a check in the run. Never raises."""
    level = report.level
    if level == "full" and report.ok:
        record_check(storage, report.path, index, level)
    with suppress(CheckpointError, OSError):
        damaged = _record_problems(storage, report.path, index, level, report.problems)
        _record_linked(storage, report.path, index, damaged, level)


def _check_again(
    storage: Storage, folder: str, index: Index, level: Level, problems: Sequence[Problem]
) -> Sequence[Problem]:
    """Check files with problems again, past the page cache. Return the problems that remain."""
    drop_cached(folder)
    files = frozenset(problem.file for problem in problems)
    second = _VerifyRun(storage, folder, index, lambda *_: None, files)
    second.run(level)
    for problem in problems if not second.problems else ():
        _log.warning("%s. A second read was right: check this host's memory and storage", problem)
    return second.problems


# --- record damage ---------------------------------------------------------------------------


def record_damage(storage: Storage, error: CorruptError) -> None:
    """Read the damaged file of an error again, and record the damage in its run. Never raises.

    Does nothing if the file is not in a committed checkpoint, or if the second read is right.
    """
    folder, _, file = (error.path or "").rpartition("/")
    path, _, name = folder.rpartition("/")
    if parse_attempt(name) is None:
        return
    try:
        attempt, index = find_checkpoint(storage, path)
        if attempt.name == name and file in index.all_files:
            damaged = _check_files(storage, path, index, frozenset({file}), "load")
            _record_linked(storage, path, index, damaged, "load")
    except (CheckpointError, OSError) as other:
        _log.debug("%s: its damage is not recorded: %s", folder, other)


def _check_files(
    storage: Storage, path: str, index: Index, files: frozenset[str], check: str
) -> frozenset[str]:
    """Read some files of a checkpoint completely. Record their damage, and return their names."""
    folder = f"{path}/{index.attempt}"
    drop_cached(folder)
    verification = _VerifyRun(storage, folder, index, lambda *_: None, files)
    verification.run("full")
    if not has_folder(storage, path, Attempt.from_name(index.attempt)):
        return frozenset()
    return _record_problems(storage, path, index, check, verification.problems)


def _record_problems(
    storage: Storage, path: str, index: Index, check: str, problems: Sequence[Problem]
) -> frozenset[str]:
    """Record the problems that are damage. Return the names of the damaged files."""
    damaged = [problem for problem in problems if problem.is_damage]
    if damaged:
        more = f" (and {len(damaged) - 1} more)" if len(damaged) > 1 else ""
        record_check(storage, path, index, check, f"{damaged[0]}{more}")
    return frozenset(problem.file for problem in damaged)


def _record_linked(
    storage: Storage, path: str, index: Index, files: frozenset[str], check: str
) -> None:
    """Check the checkpoints of the run that may have these damaged files under a link."""
    records = index.all_files
    digests = {(records[name].nbytes, records[name].digest) for name in files & records.keys()}
    for other, there in iterate_siblings(storage, path) if files else ():
        same = frozenset(
            name
            for name, record in there.all_files.items()
            if (record.nbytes, record.digest) in digests
        )
        if same:
            with suppress(CheckpointError, OSError):  # it may have been removed just now
                _check_files(storage, other, there, same, check)


def _sort_key(problem: Problem) -> tuple[str, str, ByteRange, str]:
    return problem.file, problem.tensor or "", problem.rows or ByteRange(-1, -1), problem.what


# The shards of a file: tensor and cell -> dtype and shape of the tensor.
_Shards = Mapping[tuple[str, Cell], tuple[str, Shape]]

# The name of a tensor, and its lost rows.
_Lost = tuple[str, ByteRange | None]


class _VerifyRun:
    """One check of an attempt; its threads add to `problems`. With `only`, of these files."""

    def __init__(
        self,
        storage: Storage,
        folder: str,
        index: Index,
        progress: Progress,
        only: Collection[str] | None = None,
    ) -> None:
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.nbytes_checked = 0
        self._counting = Lock()
        self._storage = storage
        self._folder = folder
        self._index = index
        self._contents = objects_file.list_contents(index.catalog)
        self._progress = progress
        self._only = only
        self._buffers = BufferPool(max(read_grouping.READ_NBYTES, open_files.MAX_BLOCK_NBYTES))

    def run(self, level: Level) -> None:
        """Check the names of files, then the files, several together."""
        index = self._index
        self._check_listing()
        self._check_claim()
        sizes = [file.nbytes if level == "full" else file.header_nbytes for file in index.files]
        tables = (index.objects, index.attached)
        nbytes = sum(sizes) + sum(record.nbytes for table in tables for record in table)
        threads = Settings.from_environment().threads
        parallel_for(lambda check: check(), self._checks(level, nbytes), threads=threads)
        self._progress(self.nbytes_checked, nbytes)

    def _checks(self, level: Level, nbytes: int) -> Iterator[Callable[[], object]]:
        index, only = self._index, self._only
        shards = [
            (record, expected)
            for record, expected in _expected_contents(index)
            if only is None or index.file_name(record) in only
        ]
        objects = (r for r in index.objects if only is None or r.name in only)
        attached = (r for r in index.attached if only is None or r.file_name in only)
        work: Iterator[Callable[[], object]] = chain(
            (partial(self._check_objects, record) for record in objects),
            (partial(self._check_attached, record) for record in attached),
            self._blocks(shards)
            if level == "full"
            else (partial(self._check_header, *contents) for contents in shards),
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
                self._add_problem(entry.name, None, text, is_damage=False)
            else:
                self.notes.append(text)

    def _check_claim(self) -> None:
        path = f"{self._folder}/{filenames.CLAIM}"
        try:
            index_json.decode(read_document(self._storage, path), label=path)
        except FileNotFoundError:
            self._add_problem(filenames.CLAIM, None, f"{path} is missing", is_damage=False)
        except CheckpointError as error:
            self._add_problem(filenames.CLAIM, None, error, is_damage=False)

    def _check_objects(self, record: ObjectsFileRecord) -> None:
        path = f"{self._folder}/{record.name}"
        rank = filenames.parse_objects_file(record.name)
        try:
            file = open_files.read_objects(self._storage, self._folder, record)
        except CheckpointError as error:
            self._add_problem(record.name, rank, error)
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
            self._add_problem(record.file_name, 0, error)
            return
        self._count(record.nbytes)

    # --- shard files ---

    def _blocks(
        self, shards: Iterable[tuple[ShardFileRecord, _Shards]]
    ) -> Iterator[Callable[[], object]]:
        for record, expected in shards:
            if (checked := self._check_header(record, expected)) is None:
                continue
            file, end = checked
            needed = read_grouping.all_blocks(file.header.shards, file.header.block_nbytes)
            for read in read_grouping.group_into_reads(
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
            self._add_lost(record, error, lost)
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
        with self._buffers.borrow() as buffer:
            data = buffer[: read.span.nbytes]
            try:
                with file.reading() as readable:
                    count = readable.read_into(file.header.header_nbytes + read.span.start, data)
            except CheckpointError as error:
                lost = [
                    (block.shard.fqn, read_grouping.rows_of_block(block)) for block in read.blocks
                ]
                self._add_lost(file.record, error, lost)
                return
            for block in read.blocks:
                start, stop = block.start - read.span.start, block.stop - read.span.start
                problem: str | None = "the file ended while it was read"
                if stop <= count:
                    self._count(stop - start)
                    problem = read_grouping.digest_problem(block, block_digest(data[start:stop]))
                if problem is not None:
                    name, rank = self._index.file_name(file.record), file.record.rank
                    text = str(read_grouping.damage_error(file.path, file.header, block, problem))
                    rows = read_grouping.rows_of_block(block)
                    self._add_problem(name, rank, text, tensor=block.shard.fqn, rows=rows)

    def _add_lost(
        self, record: ShardFileRecord, problem: str | CheckpointError, lost: Iterable[_Lost]
    ) -> None:
        """Add a problem of a file, and one problem for each range of rows that is lost with it."""
        whole = self._add_problem(self._index.file_name(record), record.rank, problem)
        for fqn, rows in lost:
            lack = "not read" if whole.is_unread else "lost"
            text = f"{fqn} {open_files.rows_text(rows)}: {lack}, for {problem}"
            self.problems.append(replace(whole, tensor=fqn, rows=rows, what=text, cause=whole.what))

    def _add_problem(
        self,
        file: str,
        rank: int | None,
        what: str | CheckpointError,
        *,
        tensor: str | None = None,
        rows: ByteRange | None = None,
        is_damage: bool = True,
    ) -> Problem:
        """Add a problem, and return it. An error is damage only if it is a CorruptError."""
        is_damage = is_damage and isinstance(what, str | CorruptError)
        is_unread = isinstance(what, StorageError)
        problem = Problem(file, rank, tensor, rows, str(what), is_damage, is_unread=is_unread)
        self.problems.append(problem)
        return problem


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
