"""Plan a load: the index and the cells that a rank requests -> reads. All resharding is here.

Stored and requested cells are cut into boxes. Each overlap of two boxes is one item. A bisection of
the cuts of a layout, or a tree of its boxes, finds the boxes that may overlap. Tensors with the
same layout and the same requested cells share the result.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from operator import mul

from dist_ckpt.core.format.geometry import (
    BoxTree,
    Cell,
    Cut,
    Flat,
    Grid,
    Region,
    RegionPiece,
    Regions,
    Shape,
    check_cell,
    pieces,
    row_major_strides,
)
from dist_ckpt.core.format.index.index import Catalog, Index
from dist_ckpt.core.planning.plan import CellOverlap, LoadPlan, ReadItem, TensorRequest
from dist_ckpt.errors import CorruptError

# Returns the numbers, ascending, of the cells of a layout that a box may overlap.
_Candidates = Callable[[Region], Iterable[int]]


def find_request_problems(catalog: Catalog, wanted: Iterable[TensorRequest]) -> tuple[str, ...]:
    """Return all reasons why tensors cannot be loaded: wrong names, shapes, dtypes, cells."""
    problems = []
    checked: set[tuple[tuple[Cell, ...], Shape]] = set()
    for request in wanted:
        record = catalog.tensors.get(catalog.aliases.get(request.fqn, request.fqn))
        if record is None:
            problems.append(f"{request.fqn}: the checkpoint has no tensor of this name")
            continue
        if request.dtype != record.dtype:
            problems.append(
                f"{request.fqn}: saved as {record.dtype}, requested as {request.dtype}; "
                "nothing is cast: make the tensor with the saved dtype and cast it after the load"
            )
        if request.shape != record.shape:
            problems.append(
                f"{request.fqn}: saved with shape {list(record.shape)}, "
                f"requested with {list(request.shape)}"
            )
            continue
        if (request.cells, record.shape) in checked:
            continue
        wrong = []
        for cell in request.cells:
            try:
                check_cell(cell, record.shape)
            except ValueError as error:
                wrong.append(f"{request.fqn}: requested {error}")
        problems += wrong
        if not wrong:
            checked.add((request.cells, record.shape))
    return tuple(problems)


def plan_load(index: Index, wanted: Iterable[TensorRequest]) -> LoadPlan:
    """Return the reads that fill the requested cells, file by file, and no other reads.

    `find_request_problems` must have found none. Raises CorruptError if the index lacks a file.
    """
    catalog = index.catalog
    files = {(file.component, file.rank): number for number, file in enumerate(index.files)}
    candidates: dict[tuple[int, Shape], _Candidates] = {}
    overlaps: dict[tuple[int, Shape, tuple[Cell, ...]], tuple[tuple[int, CellOverlap], ...]] = {}
    items: dict[int, list[ReadItem]] = {}
    for request in wanted:
        tensor = catalog.aliases.get(request.fqn, request.fqn)
        record = catalog.tensors[tensor]
        layout = catalog.layouts[record.layout]
        key = record.layout, record.shape, request.cells
        cell_overlaps = overlaps.get(key)
        if cell_overlaps is None:
            if key[:2] not in candidates:
                candidates[key[:2]] = _build_candidates(layout.cut, record.shape)
            computed = _find_overlaps(layout.cut, record.shape, request.cells, candidates[key[:2]])
            cell_overlaps = overlaps[key] = tuple(computed)
        for number, overlap in cell_overlaps:
            holder = layout.holder(number, record.rotation)
            file = files.get((record.component, holder))
            if file is None:
                component = catalog.components[record.component].name
                raise CorruptError(
                    f"{tensor}[{overlap.stored}]: the index of {index.attempt} has no file of rank "
                    f"{holder} for component {component!r}; load an older checkpoint"
                )
            items.setdefault(file, []).append(ReadItem(request.fqn, tensor, record.dtype, overlap))
    return {file: tuple(items[file]) for file in sorted(items)}


def _find_overlaps(
    cut: Cut, shape: Shape, cells: Sequence[Cell], candidates: _Candidates
) -> Iterator[tuple[int, CellOverlap]]:
    stored_pieces: dict[int, tuple[RegionPiece, ...]] = {}
    for requested_number, cell in enumerate(cells):
        for piece in pieces(cell, shape):
            if piece.region.numel == 0:
                continue
            for number in candidates(piece.region):
                if number not in stored_pieces:
                    stored_pieces[number] = tuple(pieces(cut.cell(number), shape))
                stored = cut.cell(number)
                for stored_piece in stored_pieces[number]:
                    common: Region | None = stored_piece.region
                    # Most cells are requested whole. The same object makes later checks fast.
                    if stored_piece.region != piece.region:
                        common = stored_piece.region.intersect(piece.region)
                    if common is not None:
                        yield (
                            number,
                            CellOverlap.of(
                                stored, stored_piece, requested_number, cell, piece, common
                            ),
                        )


def _build_candidates(cut: Cut, shape: Shape) -> _Candidates:
    match cut:
        case Grid(cuts):
            return partial(_find_in_grid, cuts, row_major_strides(tuple(len(c) - 1 for c in cuts)))
        case Flat(cuts):
            return partial(_find_in_flat, cuts, row_major_strides(shape))
        case Regions(regions):
            return BoxTree(regions).find_overlapping


def _find_in_grid(cuts: Sequence[Sequence[int]], strides: Shape, box: Region) -> Iterator[int]:
    ranges = [
        range(bisect_right(cut, start) - 1, bisect_left(cut, stop))
        for cut, start, stop in zip(cuts, box.offset, box.stop, strict=True)
    ]
    for position in product(*ranges):
        yield sum(map(mul, position, strides))


def _find_in_flat(cuts: Sequence[int], strides: Shape, box: Region) -> Iterable[int]:
    first = sum(map(mul, box.offset, strides))
    last = first + sum((n - 1) * stride for n, stride in zip(box.shape, strides, strict=True))
    return range(bisect_right(cuts, first) - 1, bisect_right(cuts, last))
