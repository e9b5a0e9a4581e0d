"""Choose the holder that stores each replica, so that all ranks write about as many bytes.

Replica number `(c + rotation) mod replicas` stores cell c of a tensor, so a tensor needs only one
small number. `Layout.holder` has this rule of the format. Large replicas are cut into one part for
each holder: then all ranks write, even if there are few large tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import pairwise, product
from math import prod

from dist_ckpt.core.format.geometry import (
    Cell,
    Cut,
    ElementRange,
    Flat,
    Grid,
    Layout,
    Region,
    Regions,
)
from dist_ckpt.core.planning.save.inventories import build_layout

# A larger replica is split among its holders, into parts of at least `MIN_PART_NBYTES`.
SPLIT_NBYTES = 64 << 20
MIN_PART_NBYTES = 16 << 20

# Loads count as even if they differ by at most 1/1024 of the largest load.
_EVEN_FRACTION = 1024

# A part has at least this many rows of the cut dimension, so parts differ by at most 1/16.
_EVEN_ROWS = 16


@dataclass(frozen=True, slots=True)
class TensorOwnership:
    """One tensor to store: its size, and the layout in which the ranks hold it."""

    fqn: str
    itemsize: int
    layout: Layout


@dataclass(frozen=True, slots=True)
class _LayoutMeasure:
    """The number of elements of a layout, and of its largest cell with several holders."""

    numel: int
    num_replicas: int
    largest_replica: int
    holders_number: int  # equal for layouts with equal holders


def balance(tensors: Sequence[TensorOwnership], world_size: int) -> dict[str, tuple[Layout, int]]:
    """Return the layout in which each tensor is stored, and its rotation. Equal on every rank.

    Tensors with the same `Layout` object share its work. Data with one holder is assigned first,
    then the largest replicas.
    """
    measures = _measure_layouts(tensors)
    split = _split_large(tensors, measures)
    stored: list[tuple[TensorOwnership, int]] = []
    by_group: dict[int, list[TensorOwnership]] = {}
    single_cell: list[TensorOwnership] = []
    for tensor in tensors:
        measure = measures[id(tensor.layout)]
        if tensor.fqn in split:
            stored.append((TensorOwnership(tensor.fqn, tensor.itemsize, split[tensor.fqn]), 0))
        elif measure.num_replicas == 1:
            stored.append((tensor, 0))
        elif len(tensor.layout.holders) == 1:
            single_cell.append(tensor)
        else:
            by_group.setdefault(measure.holders_number, []).append(tensor)
    loads = [0] * world_size
    _add_loads(loads, stored)
    for group in by_group.values():
        # Rotation r stores cell c on its replica (c + r) mod n. For example, with n = 2 replicas,
        # rotation 0 stores cell 0 on its first rank, and rotation 1 on its second rank. If all
        # rotations get equal bytes, all ranks of the group write equal bytes.
        sizes = {t.fqn: t.itemsize * measures[id(t.layout)].numel for t in group}
        rotations = assign_evenly(sizes, measures[id(group[0].layout)].num_replicas)
        rotated = [(tensor, rotations[tensor.fqn]) for tensor in group]
        _add_loads(loads, rotated)
        stored += rotated
    stored += _assign_to_least_loaded(single_cell, loads, measures)
    return {tensor.fqn: (tensor.layout, rotation) for tensor, rotation in stored}


def _measure_layouts(tensors: Iterable[TensorOwnership]) -> dict[int, _LayoutMeasure]:
    measures: dict[int, _LayoutMeasure] = {}
    groups: dict[tuple[tuple[int, ...], ...], int] = {}
    for layout in (tensor.layout for tensor in tensors):
        if id(layout) not in measures:
            numels = cell_numels(layout.cut)
            replicated = (
                n for n, ranks in zip(numels, layout.holders, strict=True) if len(ranks) > 1
            )
            largest, replicas = max(replicated, default=0), max(map(len, layout.holders))
            number = groups.setdefault(layout.holders, len(groups))
            measures[id(layout)] = _LayoutMeasure(sum(numels), replicas, largest, number)
    return measures


def cell_numels(cut: Cut) -> list[int]:
    """Return the number of elements of each cell."""
    match cut:
        case Grid():
            sizes = [[b - a for a, b in pairwise(cuts)] for cuts in cut.cuts]
            return list(map(prod, product(*sizes)))
        case Flat():
            return [b - a for a, b in pairwise(cut.cuts)]
        case Regions():
            return [region.numel for region in cut.regions]


def _add_loads(loads: list[int], stored: Iterable[tuple[TensorOwnership, int]]) -> None:
    layouts: dict[tuple[int, int], Layout] = {}
    itemsizes: dict[tuple[int, int], int] = {}
    for tensor, rotation in stored:
        key = id(tensor.layout), rotation
        layouts[key] = tensor.layout
        itemsizes[key] = itemsizes.get(key, 0) + tensor.itemsize
    for key, layout in layouts.items():
        for number, numel in enumerate(cell_numels(layout.cut)):
            loads[layout.holder(number, key[1])] += numel * itemsizes[key]


def assign_evenly(nbytes: Mapping[str, int], count: int) -> dict[str, int]:
    """Assign one of `count` numbers to each name, so that each number gets about equal bytes."""
    heap = [(0, number) for number in range(count)]
    assigned = {}
    for name in sorted(nbytes, key=lambda name: (-nbytes[name], name)):
        load, number = heap[0]
        heapreplace(heap, (load + nbytes[name], number))
        assigned[name] = number
    return assigned


def _assign_to_least_loaded(
    tensors: Iterable[TensorOwnership], loads: list[int], measures: Mapping[int, _LayoutMeasure]
) -> list[tuple[TensorOwnership, int]]:
    """Assign each tensor, the largest first, to the holder with the least to store.

    The next tensors go to the same holder while it stores hardly more than the busiest rank. So a
    load of thousands of small tensors opens few files.
    """
    most = max(loads)
    heaps: dict[int, list[tuple[int, int]]] = {}
    filling: dict[int, tuple[int, int]] = {}  # the number of a holder, and the limit of its load
    assigned = []
    sized = [(t.itemsize * measures[id(t.layout)].numel, t) for t in tensors]
    for nbytes, tensor in sorted(sized, key=lambda pair: (-pair[0], pair[1].fqn)):
        holders = tensor.layout.holders[0]
        group = measures[id(tensor.layout)].holders_number
        index, limit = filling.get(group, (0, -1))
        if loads[holders[index]] + nbytes > limit:
            if group not in heaps:
                heaps[group] = [(loads[rank], index) for index, rank in enumerate(holders)]
                heapify(heaps[group])
            heap = heaps[group]
            # The load of a rank may have grown since it was pushed. It never shrinks.
            while heap[0][0] != loads[holders[heap[0][1]]]:
                index = heap[0][1]
                heapreplace(heap, (loads[holders[index]], index))
            index = heap[0][1]
            filling[group] = index, max(most, loads[holders[index]] + most // _EVEN_FRACTION)
        loads[holders[index]] += nbytes
        most = max(most, loads[holders[index]])
        assigned.append((tensor, index))
    return assigned


# --- splitting -------------------------------------------------------------------------------


def _split_large(
    tensors: Iterable[TensorOwnership], measures: Mapping[int, _LayoutMeasure]
) -> dict[str, Layout]:
    """Return the finer layout of each tensor that is split. Each of its cells has one holder."""
    layouts: dict[tuple[int, int, int], Layout] = {}
    shifts: dict[int, int] = {}
    split = {}
    for tensor in tensors:
        measure = measures[id(tensor.layout)]
        nbytes = measure.largest_replica * tensor.itemsize
        num_parts = min(measure.num_replicas, -(-nbytes // MIN_PART_NBYTES))
        if nbytes <= SPLIT_NBYTES or num_parts == 1:
            continue
        # With more holders than parts, the next tensor continues with the next holder.
        shift = shifts.get(measure.holders_number, 0)
        shifts[measure.holders_number] = (shift + num_parts) % measure.num_replicas
        key = id(tensor.layout), num_parts, shift
        if key not in layouts:
            layouts[key] = _split_layout(tensor.layout, num_parts, shift)
        split[tensor.fqn] = layouts[key]
    return split


def _split_layout(layout: Layout, num_parts: int, shift: int) -> Layout:
    """Cut each cell into parts, and assign the parts to the holders of the cell in turn."""
    cells: list[Cell] = [layout.cell(number) for number in range(layout.cut.num_cells)]
    boxes = [cell for cell in cells if isinstance(cell, Region)]
    sizes = [min(lengths) for lengths in zip(*(box.shape for box in boxes), strict=True)]
    # The first dimension that gives nearly even parts, else the largest dimension.
    even = (dim for dim, size in enumerate(sizes) if size >= num_parts * _EVEN_ROWS)
    dim = next(even, max(range(len(sizes)), key=sizes.__getitem__, default=0))
    holders: dict[Cell, tuple[int, ...]] = {}
    for cell, ranks in zip(cells, layout.holders, strict=True):
        for n, part in enumerate(_cut_cell(cell, num_parts, dim)):
            holders[part] = (ranks[(n + shift) % len(ranks)],)
    return build_layout(holders)


def _cut_cell(cell: Cell, num_parts: int, dim: int) -> Iterator[Cell]:
    """Cut a cell along a dimension into parts, none empty, that differ by at most one row."""
    size = cell.numel if isinstance(cell, ElementRange) else cell.shape[dim]
    cuts = sorted({size * n // num_parts for n in range(num_parts + 1)})
    for start, stop in pairwise(cuts):
        if isinstance(cell, ElementRange):
            yield ElementRange(cell.start + start, cell.start + stop)
        else:
            offset, shape = list(cell.offset), list(cell.shape)
            offset[dim] += start
            shape[dim] = stop - start
            yield Region(tuple(offset), tuple(shape))
