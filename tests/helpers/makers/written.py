"""Small checkpoints for tests, written by the real writer, without planners, torch or numpy.

A `Saved` tensor is its dtype, shape, layout and all its bytes in row-major order; what a cell
or a slice of it holds is found row by row, in plain Python, as the tests' own truth.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from dist_ckpt.core.commit.commit_protocol import claim, commit
from dist_ckpt.core.format.checksums import BLOCK_NBYTES
from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.geometry import (
    Cell,
    ElementRange,
    Grid,
    Layout,
    Region,
    RegionPiece,
    Shape,
    pieces,
    row_major_strides,
)
from dist_ckpt.core.format.index.index import (
    Catalog,
    Component,
    Index,
    ObjectsFileRecord,
    ShardFileRecord,
    TensorRecord,
)
from dist_ckpt.core.format.objects.objects_file import ObjectsFile, encode
from dist_ckpt.core.format.shard_file import arrange_shards, header_text
from dist_ckpt.core.planning.plan import (
    CellOverlap,
    FilePlan,
    FileReceipt,
    LoadPlan,
    ReadItem,
    TensorRequest,
)
from dist_ckpt.core.planning.save.save_planner import plan_batches
from dist_ckpt.core.shard_io.write.shard_writer import RankFiles, write_rank_files
from dist_ckpt.core.storage import Storage
from dist_ckpt.core.storage.local.local_storage import LocalStorage

ATTEMPT = "a1-0123456789abcdef"


@dataclass(frozen=True)
class Saved:
    """One tensor of a checkpoint."""

    dtype: str
    shape: Shape
    layout: Layout
    data: bytes
    rotation: int = 0

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    def of(self, cell: Cell) -> bytes:
        """Return the bytes of a cell, row by row."""
        size, data = self.itemsize, self.data
        return b"".join(data[row.start * size : row.stop * size] for row in _rows(cell, self.shape))


def numbers_of(cell: Cell, shape: Shape) -> Iterator[int]:
    """Yield the row-major numbers of a cell's elements, in the cell's own order."""
    return itertools.chain.from_iterable(_rows(cell, shape))


def _rows(cell: Cell, shape: Shape) -> Iterator[range]:
    """Yield them a row of the last dimension at a time, in which they follow one another."""
    if isinstance(cell, ElementRange):
        yield range(cell.start, cell.stop)
        return
    *outer, width = cell.shape or (1,)
    strides = row_major_strides(shape)
    ranges = (range(a, a + n) for a, n in zip(cell.offset, outer, strict=False))
    for index in itertools.product(*ranges):
        start = sum(i * s for i, s in zip((*index, *cell.offset[-1:]), strides, strict=True))
        yield range(start, start + width)


def random_tensor(
    shape: Shape, layout: Layout, *, dtype: str = "float32", seed: int = 0, rotation: int = 0
) -> Saved:
    data = random.Random(seed).randbytes(prod(shape) * DTYPES[dtype].itemsize)
    return Saved(dtype, shape, layout, data, rotation)


def one_cell(shape: Shape, *ranks: int) -> Layout:
    return Layout(Grid(tuple((0, n) for n in shape)), (ranks or (0,),))


def rows(shape: Shape, *cuts: int, ranks: Iterable[int] | None = None) -> Layout:
    """Cut along dimension 0; cell i is rank i's, or that of `ranks[i]`."""
    grid = Grid(((0, *cuts, shape[0]), *((0, n) for n in shape[1:])))
    holders = tuple((rank,) for rank in (ranks or range(grid.num_cells)))
    return Layout(grid, holders)


class BytesReader:
    """The bytes of a cell, lent as they are or copied into the scratch (`CellReader`)."""

    def __init__(self, saved: Saved, cell: Cell, *, copies: bool = False) -> None:
        self._copies = copies
        self._data = memoryview(saved.of(cell))

    @property
    def nbytes(self) -> int:
        return len(self._data)

    def address(self) -> None:
        return None

    def read(self, start: int, stop: int, scratch: memoryview) -> memoryview:
        if not self._copies:
            return self._data[start:stop]
        scratch[: stop - start] = self._data[start:stop]
        return scratch[: stop - start]


class BytesTarget:
    """The memory of a wanted cell (`Target`); without `lends` it is only placed into."""

    def __init__(self, itemsize: int, cell: Cell, shape: Shape, *, lends: bool = True) -> None:
        self.data = bytearray(b"\xee" * (cell.numel * itemsize))
        self._itemsize = itemsize
        self._lends = lends
        self._place = {n: i for i, n in enumerate(numbers_of(cell, shape))}
        self._shape = shape

    def memory(self) -> memoryview | None:
        return memoryview(self.data) if self._lends else None

    def place(self, piece: RegionPiece, box: Region, data: memoryview, strides: Shape) -> None:
        assert piece.region.covers(box)
        size = self._itemsize
        for index in itertools.product(*(range(n) for n in box.shape)):
            at = sum(i * s for i, s in zip(index, strides, strict=True)) * size
            corner = zip(index, box.offset, row_major_strides(self._shape), strict=True)
            to = self._place[sum((i + o) * s for i, o, s in corner)] * size
            assert at + size <= len(data)
            self.data[to : to + size] = data[at : at + size]


def catalog_of(
    tensors: Mapping[str, Saved], world_size: int, components: tuple[str, ...] = ("model",)
) -> Catalog:
    """Each tensor's component is the one that its name begins with, else the first."""
    layouts = tuple(dict.fromkeys(saved.layout for saved in tensors.values()))
    numbers = {name: number for number, name in enumerate(components)}
    return Catalog(
        world_size=world_size,
        mesh=(),
        components=tuple(Component(name, name) for name in components),
        layouts=layouts,
        tensors={
            fqn: TensorRecord(
                saved.dtype,
                saved.shape,
                layouts.index(saved.layout),
                saved.rotation,
                numbers.get(fqn.partition(".")[0], 0),
            )
            for fqn, saved in tensors.items()
        },
        aliases={},
        values={},
        per_rank={},
    )


def file_plans(catalog: Catalog, rank: int, block_nbytes: int) -> Iterator[FilePlan]:
    for number, component in enumerate(catalog.components):
        cells = [
            (fqn, record.dtype, record.shape, catalog.layouts[record.layout].cell(cell))
            for fqn, record in catalog.tensors.items()
            if record.component == number
            for cell in range(catalog.layouts[record.layout].cut.num_cells)
            if catalog.layouts[record.layout].holder(cell, record.rotation) == rank
        ]
        if not cells:
            continue
        shards = arrange_shards(cells)
        header = header_text(
            shards,
            component=component.name,
            rank=rank,
            world_size=catalog.world_size,
            block_nbytes=block_nbytes,
        )
        name = f"{component.stem}-{rank:05d}.safetensors"
        nbytes = header.nbytes + shards[-1].span.stop
        batches = plan_batches((shard.span.nbytes for shard in shards), block_nbytes)
        yield FilePlan(name, header, nbytes, shards, block_nbytes, batches)


def rank_files(
    tensors: Mapping[str, Saved],
    catalog: Catalog,
    rank: int,
    *,
    block_nbytes: int = BLOCK_NBYTES,
    objects: Mapping[str, bytes] | None = None,
    copies: bool = False,
) -> RankFiles:
    """Return what a rank writes: sources only for the cells that it stores."""
    plans = tuple(file_plans(catalog, rank, block_nbytes))
    sources = tuple(
        [
            BytesReader(tensors[item.fqn], item.cell, copies=copies) for item in plan.items
        ].__getitem__
        for plan in plans
    )
    return RankFiles(7, plans, sources, objects or {})


def index_of(
    catalog: Catalog, receipts: Iterable[tuple[int, FileReceipt]], attempt: str = ATTEMPT
) -> Index:
    """Return the index of what ranks wrote; `receipts` are (rank, receipt)."""
    files, objects = [], []
    stems = {component.stem: number for number, component in enumerate(catalog.components)}
    for rank, (name, nbytes, header, digest) in receipts:
        if header:
            component = stems[name.rpartition("-")[0]]
            files.append(ShardFileRecord(component, rank, nbytes, header, digest))
        else:
            objects.append(ObjectsFileRecord(name, nbytes, digest))
    files.sort(key=lambda file: (file.component, file.rank))
    objects.sort(key=lambda file: file.name)
    return Index(attempt, 7, catalog, tuple(files), tuple(objects), {}, {}, 1.0)


def write(
    storage: Storage,
    folder: str,
    tensors: Mapping[str, Saved],
    *,
    world_size: int = 1,
    block_nbytes: int = BLOCK_NBYTES,
    components: tuple[str, ...] = ("model",),
) -> Index:
    """Write the shard files of all ranks into a folder that exists; return the index."""
    catalog = catalog_of(tensors, world_size, components)
    return write_catalog(storage, folder, tensors, catalog, block_nbytes=block_nbytes)


def write_catalog(
    storage: Storage,
    folder: str,
    tensors: Mapping[str, Saved],
    catalog: Catalog,
    *,
    block_nbytes: int = BLOCK_NBYTES,
    objects: Mapping[int, Mapping[str, ObjectsFile]] | None = None,
) -> Index:
    """Write the files of all ranks; `objects` are each rank's objects files by name."""
    receipts = []
    for rank in range(catalog.world_size):
        encoded = {name: encode(file) for name, file in (objects or {}).get(rank, {}).items()}
        files = rank_files(tensors, catalog, rank, block_nbytes=block_nbytes, objects=encoded)
        receipts += [
            (rank, receipt) for receipt in write_rank_files(storage, folder, files, threads=2)
        ]
    return index_of(catalog, receipts)


def save(
    path: Path,
    tensors: Mapping[str, Saved],
    *,
    catalog: Catalog | None = None,
    objects: Mapping[int, Mapping[str, ObjectsFile]] | None = None,
    world_size: int = 1,
    block_nbytes: int = BLOCK_NBYTES,
    overwrite: bool = False,
) -> Path:
    """Commit a checkpoint at a path of the file system; return its attempt's folder."""
    storage = LocalStorage()
    catalog = catalog or catalog_of(tensors, world_size)
    claimed = claim(storage, str(path), overwrite=overwrite, by="a test")
    index = write_catalog(
        storage, claimed.folder, tensors, catalog, block_nbytes=block_nbytes, objects=objects
    )
    commit(storage, claimed, replace(index, attempt=claimed.attempt.name))
    return Path(claimed.folder)


def plan_of(index: Index, wanted: Iterable[TensorRequest]) -> LoadPlan:
    """Plan a load by trying every pair of cells: what the real planner must equal."""
    numbers = {(file.component, file.rank): n for n, file in enumerate(index.files)}
    items: dict[int, list[ReadItem]] = {}
    for want in wanted:
        record = index.catalog.tensors[want.fqn]
        layout = index.catalog.layouts[record.layout]
        for part, cell in enumerate(want.cells):
            for number in range(layout.cut.num_cells):
                stored = layout.cell(number)
                file = numbers.get((record.component, layout.holder(number, record.rotation)))
                for source in pieces(stored, record.shape):
                    for target in pieces(cell, record.shape):
                        if (common := source.region.intersect(target.region)) is None:
                            continue
                        assert file is not None
                        item = ReadItem(
                            fqn=want.fqn,
                            tensor=want.fqn,
                            dtype=want.dtype,
                            overlap=CellOverlap.of(stored, source, part, cell, target, common),
                        )
                        items.setdefault(file, []).append(item)
    return {n: tuple(items[n]) for n in sorted(items)}
