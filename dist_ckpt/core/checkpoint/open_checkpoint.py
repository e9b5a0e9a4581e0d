"""A committed checkpoint that is open for reading: its objects, tensors and files. No torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from math import prod
from threading import Lock
from typing import Literal, Protocol, Self

from dist_ckpt.core.checkpoint.opener import NATIVE, Opener, UserPath
from dist_ckpt.core.checkpoint.verify_checkpoint import record_damage
from dist_ckpt.core.commit import attempts
from dist_ckpt.core.commit.records.recorded_checks import (
    find_recorded_damage,
    name_newest_good,
    naming_newest_good,
)
from dist_ckpt.core.format import filenames
from dist_ckpt.core.format.checksums import BLOCK_NBYTES
from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.core.format.geometry import Cell, Region
from dist_ckpt.core.format.index.index import Catalog, FileRecord, Index, Key, ObjectsFileRecord
from dist_ckpt.core.format.objects import objects_file
from dist_ckpt.core.format.objects.objects_file import ObjectsFile
from dist_ckpt.core.format.objects.plain_types import Placeholder
from dist_ckpt.core.planning.load.load_planner import plan_load
from dist_ckpt.core.planning.name_selection import Selection
from dist_ckpt.core.planning.plan import TensorRequest
from dist_ckpt.core.planning.save.save_planner import plan_all_files
from dist_ckpt.core.runtime.host_memory import BufferPool
from dist_ckpt.core.shard_io.memory.cell_memory import Target
from dist_ckpt.core.shard_io.memory.host_array import ArrayTarget
from dist_ckpt.core.shard_io.read.block_reader import BlockReader
from dist_ckpt.core.shard_io.read.open_files import (
    OpenFile,
    open_files,
    read_attached_file,
    read_objects,
)
from dist_ckpt.core.shard_io.read.read_windows import cut_into_windows, read_ahead
from dist_ckpt.core.shard_io.write.copy_files import link_or_copy_files
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import CorruptError
from dist_ckpt.reports import CopyProgress, IoCount, Progress
from dist_ckpt.settings import Settings

# The size of a window: a multiple of a block.
WINDOW_NBYTES = 16 * BLOCK_NBYTES


@dataclass(frozen=True, slots=True)
class TensorWindow:
    """Parts of tensors, with their bytes in this order in `data`. Valid until the next window."""

    parts: tuple[tuple[TensorRequest, memoryview], ...]
    data: memoryview

    @staticmethod
    def of(wanted: Sequence[TensorRequest], memory: memoryview) -> TensorWindow:
        """Return the window of parts that were read into memory in this order."""
        parts = tuple(iterate_parts(wanted, memory))
        return TensorWindow(parts, memory[: sum(data.nbytes for _, data in parts)])

    @property
    def nbytes(self) -> int:
        """The bytes of all parts."""
        return self.data.nbytes


class RequestTranslation(Protocol):
    """Turns requests under the names of a catalog into requests of stored tensors."""

    @property
    def index(self) -> Index:
        """The index of the stored tensors."""

    def translate(
        self, wanted: Sequence[TensorRequest], targets: Mapping[tuple[str, int], Target] | None
    ) -> tuple[list[TensorRequest], Mapping[tuple[str, int], Target] | None]:
        """Return the requests, and the memory of each of their cells."""


@dataclass(eq=False, repr=False)
class OpenCheckpoint:
    """A committed checkpoint that is open for reading. No torch.

    Threads may share it; their reads of tensors take turns. A read raises NotFoundError if the
    checkpoint was removed meanwhile, and CorruptError for any other damage.

    `make` turns a placeholder in an objects file into an object. `buffers` are scratch memory.
    After a read, up to `max_open_files` files stay open; with None, the files of the last read.
    `threads` is the number of parallel reads; the default comes from the environment. Damage that a
    read finds is recorded in the run, unless `records_damage` is False. With a `translation`, the
    catalog has other names than the files (`renamed_checkpoint.py`).
    """

    storage: Storage
    path: str
    attempt: Attempt
    index: Index
    _: KW_ONLY
    make: Callable[[Placeholder], object] = lambda value: value
    buffers: BufferPool = field(default_factory=BufferPool)
    max_open_files: int | None = None
    threads: int | None = None
    records_damage: bool = True
    translation: RequestTranslation | None = None
    _files: OrderedDict[int, OpenFile] | None = field(default_factory=OrderedDict, init=False)
    _objects: dict[str, ObjectsFile] = field(default_factory=dict, init=False)
    _turn: Lock = field(default_factory=Lock, init=False)

    @classmethod
    def open(
        cls,
        path: UserPath,
        *,
        opener: Opener = NATIVE,
        direct_reads: bool = False,
        make: Callable[[Placeholder], object] = lambda value: value,
    ) -> Self:
        """Open the checkpoint at `path`. Only its index is read.

        Raises NotFoundError if there is none, CorruptError if its index is damaged,
        IncompatibleError if a newer dist_ckpt wrote it.
        """
        return cls.at(*opener.find(path, direct_reads=direct_reads), make=make)

    @classmethod
    def at(
        cls,
        storage: Storage,
        path: str,
        *,
        make: Callable[[Placeholder], object] = lambda value: value,
    ) -> Self:
        """Open the checkpoint at a storage's path, as `open` does."""
        with naming_newest_good(storage, path):
            found = attempts.find_checkpoint(storage, path)
        return cls(storage, path, *found, make=make)

    @property
    def folder(self) -> str:
        """The folder of its attempt."""
        return f"{self.path}/{self.attempt.name}"

    @property
    def _num_threads(self) -> int:
        return self.threads or Settings.from_environment().threads

    @property
    def catalog(self) -> Catalog:
        """The catalog of its index."""
        return self.index.catalog

    @property
    def names(self) -> tuple[str, ...]:
        """All saved names."""
        return self.catalog.names

    @contextmanager
    def handle_damage(self) -> Iterator[None]:
        """Record damage that is found in this block. NotFoundError if the checkpoint was removed.

        The error names the newest good checkpoint. Without `records_damage`, neither is done.
        """
        with attempts.not_found_if_removed(self.storage, self.path, self.attempt):
            try:
                yield
            except CorruptError as error:
                if self.records_damage:
                    record_damage(self.storage, error)
                    name_newest_good(error, self.storage, self.path)
                raise

    # --- values ---

    @cached_property
    def _objects_records(self) -> Mapping[str, ObjectsFileRecord]:
        return {record.name: record for record in self.index.objects}

    def has_objects(self, rank: int | None = None) -> bool:
        """Return True if the index lists the objects file of a rank, or the global one."""
        return _objects_name(rank) in self._objects_records

    def objects(self, rank: int | None = None) -> ObjectsFile:
        """Return the objects file of a rank, or the global one. Later calls do not read it again.

        CorruptError if it is damaged, or not in the index.
        """
        return self._objects_file(_objects_name(rank))

    def _objects_file(self, name: str) -> ObjectsFile:
        if name not in self._objects:
            if (record := self._objects_records.get(name)) is None:
                raise CorruptError(
                    f"{self.folder}: the index lists no {name}; load an older checkpoint"
                )
            with self.handle_damage():
                self._objects[name] = read_objects(
                    self.storage, self.folder, record, make=self.make
                )
        return self._objects[name]

    def add_objects(self, files: Mapping[str, ObjectsFile]) -> None:
        """Use these objects files instead of reading them, by their names."""
        self._objects.update(files)

    def all_objects(self) -> dict[str, ObjectsFile]:
        """Return all objects files by their names."""
        return {name: self._objects_file(name) for name in self._objects_records}

    def merged_objects(self) -> ObjectsFile:
        """Return the global objects file, plus the values of all other ones but no per-rank values.

        CorruptError if a file lacks a value.
        """
        files, contents = self.all_objects(), objects_file.list_contents(self.catalog)
        for name, file in files.items():
            for value in objects_file.find_missing(file, name, self.catalog, contents):
                raise CorruptError(f"{self.folder}/{name} lacks {value}; use another checkpoint")
        values = {fqn: value for file in files.values() for fqn, value in file.values.items()}
        return replace(self.objects(), values=values, per_rank={})

    def value(self, fqn: str) -> object:
        """Return a value that is not per rank. CorruptError if its file lacks it."""
        rank = self.catalog.values[fqn] or None
        values = self.objects(rank).values if self.has_objects(rank) else {}
        if fqn not in values:
            raise self._missing_value_error(rank, fqn)
        return values[fqn]

    def value_of_rank(self, fqn: str, key: Key) -> object:
        """Return the value of a name and a key. CorruptError if its file lacks it."""
        rank = self._rank_by_key[fqn][key]
        values = self.objects(rank).per_rank.get(fqn, {}) if self.has_objects(rank) else {}
        if key not in values:
            raise self._missing_value_error(rank, f"{fqn} of {key!r}")
        return values[key]

    @cached_property
    def _rank_by_key(self) -> dict[str, dict[Key, int]]:
        # Cached: there may be as many keys as ranks.
        return {fqn: dict(keys) for fqn, keys in self.catalog.per_rank.items()}

    def _missing_value_error(self, rank: int | None, value: str) -> CorruptError:
        return CorruptError(
            f"{self.folder}/{_objects_name(rank)} lacks {value}, which the index says it holds; "
            f"load an older checkpoint"
        )

    def read_attached(self, name: str) -> bytes:
        """Read and check an attached file. KeyError if there is none of this name."""
        record = {record.name: record for record in self.index.attached}[name]
        with self.handle_damage():
            return read_attached_file(self.storage, self.folder, record)

    # --- tensors ---

    def select(self, selection: Selection) -> dict[str, str]:
        """Return the selected names, also of tied tensors, each with the name of its stored tensor.

        ValueError for a pattern that matches no name.
        """
        stored = {**{fqn: fqn for fqn in self.catalog.tensors}, **self.catalog.aliases}
        if problems := selection.pattern_problems(stored):
            raise ValueError("; ".join(problems))
        return {name: fqn for name, fqn in stored.items() if name in selection}

    def tensor_nbytes(self, names: Collection[str]) -> int:
        """Return the size of the data of stored tensors."""
        records = (self.catalog.tensors[name] for name in names)
        return sum(prod(record.shape) * DTYPES[record.dtype].itemsize for record in records)

    def read(self, wanted: Sequence[TensorRequest], memory: memoryview) -> None:
        """Read the wanted cells one after another into memory, and check each block."""
        targets: dict[tuple[str, int], Target] = {}
        start = 0
        for want in wanted:
            itemsize = DTYPES[want.dtype].itemsize
            for part, cell in enumerate(want.cells):
                stop = start + cell.numel * itemsize
                targets[want.fqn, part] = ArrayTarget(memory[start:stop], itemsize)
                start = stop
        with self._turn, self.handle_damage():
            self._read(wanted, targets)

    def check(self, wanted: Sequence[TensorRequest]) -> None:
        """Check all blocks of the wanted cells."""
        with self._turn, self.handle_damage():
            self._read(wanted, None)

    def _read(
        self, wanted: Sequence[TensorRequest], targets: Mapping[tuple[str, int], Target] | None
    ) -> None:
        if (files := self._files) is None:
            raise ValueError(f"{self.path} was closed; open it again")
        index = self.index
        if self.translation is not None:
            index = self.translation.index
            wanted, targets = self.translation.translate(wanted, targets)
        plan = plan_load(index, wanted)
        opened = open_files(
            self.storage, self.folder, index, plan, threads=self._num_threads, opened=files
        )
        for number in plan:
            files[number] = opened.files[number]
            files.move_to_end(number)
        most = len(plan) if self.max_open_files is None else self.max_open_files
        try:
            BlockReader(opened, targets, verify=True, buffers=self.buffers).read_all(
                self._num_threads
            )
        finally:
            while len(files) > most:
                files.popitem(last=False)[1].close()

    def block_digests(
        self, names: Collection[str]
    ) -> dict[str, dict[tuple[Cell, int], tuple[str, ...]]]:
        """Return the stored digests of each tensor, by cell and by the bytes that a digest covers.

        Reads the headers of files only, and checks them.
        """
        records = {fqn: self.catalog.tensors[fqn] for fqn in names}
        wanted = [
            TensorRequest(fqn, record.dtype, record.shape, (Region.whole(record.shape),))
            for fqn, record in records.items()
        ]
        plan = plan_load(self.index, wanted)
        with self.handle_damage():
            files = open_files(
                self.storage, self.folder, self.index, plan, threads=self._num_threads, max_open=0
            )
        digests: dict[str, dict[tuple[Cell, int], tuple[str, ...]]] = {fqn: {} for fqn in names}
        for file, items in files:
            for item in items:
                shard = file.shards[file.shard_number(item)]
                covered = min(file.header.block_nbytes, shard.span.nbytes)
                digests[item.tensor][shard.cell, covered] = shard.digests
        return digests

    def stream(
        self,
        names: Collection[str],
        *,
        window_nbytes: int = WINDOW_NBYTES,
        order: Literal["files", "names"] = "files",
    ) -> Generator[TensorWindow, None, None]:
        """Yield the data of stored tensors in windows. CorruptError for damaged blocks.

        With `order="files"`, each block is read once, and one window is in memory. With
        `order="names"`, each part is a box with its elements in row-major order; a tensor without
        elements has no part. The next window is read while you use one, and three are in memory.
        Close the generator if you stop early.
        """
        nbytes = max(min(self.tensor_nbytes(names), window_nbytes), 1)
        if order == "files":
            memory = memoryview(bytearray(nbytes))
            for wanted in self._windows_of_files(names, window_nbytes):
                self.read(wanted, memory)
                yield TensorWindow.of(wanted, memory)
            return
        windows = _windows_of_boxes(self.catalog, names, window_nbytes)
        with closing(read_ahead(self._read_boxes, windows, BufferPool(nbytes))) as ready:
            for wanted, memory, buffer in ready:
                with buffer:
                    yield TensorWindow.of(wanted, memory)

    def _read_boxes(self, wanted: Sequence[TensorRequest], memory: memoryview) -> None:
        # The boxes of a tensor are read by one request.
        requests: dict[str, TensorRequest] = {}
        for box in wanted:
            request = requests.get(box.fqn)
            cells = box.cells if request is None else (*request.cells, *box.cells)
            requests[box.fqn] = box._replace(cells=cells)
        self.read([*requests.values()], memory)

    def _windows_of_files(
        self, names: Collection[str], window_nbytes: int
    ) -> Iterator[tuple[TensorRequest, ...]]:
        for files in plan_all_files(self.catalog):
            chosen = (
                replace(file, items=tuple(item for item in file.items if item.fqn in names))
                for file in files
            )
            plans = [file for file in chosen if file.items]
            yield from (window.wanted for window in cut_into_windows(plans, window_nbytes))

    def link_or_copy(
        self,
        target: str,
        files: Mapping[str, FileRecord] | None = None,
        *,
        links: bool = True,
        most_names: int | None = None,
        check_room: Callable[[int], None] = lambda nbytes: None,
        progress: Progress | None = None,
    ) -> IoCount:
        """Link or copy `files`, by default all, into the folder `target`. See `link_or_copy_files`.

        `files` has records of the index by their new names. Returns the count of linked files.
        Nothing is linked if the checkpoint is recorded as damaged: a copy checks every byte.
        """
        files = self.index.all_files if files is None else files
        links = links and not find_recorded_damage(self.storage, self.folder, self.index.step)
        with self.handle_damage():
            return link_or_copy_files(
                self.storage,
                self.index,
                self.folder,
                target,
                files,
                threads=self._num_threads,
                most_names=most_names,
                links=links,
                check_room=check_room,
                report=CopyProgress(sum(record.nbytes for record in files.values()), progress),
            )

    @property
    def has_open_files(self) -> bool:
        """True if any file is open."""
        return bool(self._files)

    def close(self) -> None:
        """Wait until no thread reads, and close the files. A later read fails. Never raises."""
        with self._turn:
            self.close_unshared()

    def close_unshared(self) -> None:
        """Close the files without the lock of readers, which is locked forever after some forks."""
        for file in (self._files or {}).values():
            file.close()
        self._files = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _objects_name(rank: int | None) -> str:
    return filenames.OBJECTS if rank is None else filenames.objects_file(rank)


def _windows_of_boxes(
    catalog: Catalog, names: Collection[str], window_nbytes: int
) -> Iterator[tuple[TensorRequest, ...]]:
    """Cut tensors into boxes, and yield groups of boxes that fit into a window."""
    window: list[TensorRequest] = []
    free = window_nbytes
    for fqn in names:
        record = catalog.tensors[fqn]
        itemsize = DTYPES[record.dtype].itemsize
        for box in cut_into_boxes(Region.whole(record.shape), window_nbytes // itemsize):
            if not box.numel:
                continue
            if window and box.numel * itemsize > free:
                yield tuple(window)
                window, free = [], window_nbytes
            window.append(TensorRequest(fqn, record.dtype, record.shape, (box,)))
            free -= box.numel * itemsize
    if window:
        yield tuple(window)


def cut_into_boxes(box: Region, most: int) -> Iterator[Region]:
    """Cut a box into boxes of at most `most` elements, in row-major order.

    Cuts along the first dimension with more than one row, and again inside if a row is too large.
    """
    if box.numel <= most:
        yield box
        return
    dim = next(dim for dim, size in enumerate(box.shape) if size > 1)
    rows = max(most // prod(box.shape[dim + 1 :]), 1)
    for start in range(0, box.shape[dim], rows):
        offset, shape = [*box.offset], [*box.shape]
        offset[dim] += start
        shape[dim] = min(rows, box.shape[dim] - start)
        yield from cut_into_boxes(Region(tuple(offset), tuple(shape)), most)


def iterate_parts(
    wanted: Sequence[TensorRequest], memory: memoryview
) -> Iterator[tuple[TensorRequest, memoryview]]:
    """Yield each part of a window with its bytes in memory."""
    start = 0
    for want in wanted:
        numel = sum(cell.numel for cell in want.cells)
        stop = start + numel * DTYPES[want.dtype].itemsize
        yield want, memory[start:stop]
        start = stop
