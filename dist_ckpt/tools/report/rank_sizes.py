"""Who stores what: the bytes of each rank's files, by component. Pure."""

from __future__ import annotations

from collections import defaultdict

from dist_ckpt.core.format import filenames
from dist_ckpt.core.format.index.index import Index
from dist_ckpt.core.format.strict_json import Json
from dist_ckpt.tools.report.texts import bounded

# A screen has no more columns; then several ranks share one, which shows the most of theirs.
MAX_COLUMNS = 1024
# The components come first, by size; then all others as one.
MAX_COMPONENTS = 24

VALUES = "values and attached files"


def rank_sizes(index: Index) -> dict[str, Json]:
    """Return the bytes of files by component and rank, and how even they are.

    `imbalance` is the most that a rank stores by the mean of all ranks: 1.0 if all store the same;
    None if nothing is stored.
    """
    by_component = _by_component(index)
    world_size = index.catalog.world_size
    totals = [0] * world_size
    for sizes in by_component.values():
        for rank, nbytes in sizes.items():
            totals[rank] += nbytes
    width = -(-world_size // MAX_COLUMNS)
    rows: list[Json] = [
        _row(name, sizes, world_size, width) for name, sizes in _largest(by_component)
    ]
    mean = sum(totals) / world_size
    most = max(range(world_size), key=totals.__getitem__)
    return {
        "components": rows,
        "ranks_per_column": width,
        "totals": [*_columns(dict(enumerate(totals)), world_size, width)],
        "mean_nbytes": mean,
        "most_nbytes": totals[most],
        "most_rank": most,
        "least_nbytes": min(totals),
        "num_idle_ranks": sum(not nbytes for nbytes in totals),
        "imbalance": totals[most] / mean if mean else None,
    }


_Sizes = dict[int, int]


def _by_component(index: Index) -> dict[str, _Sizes]:
    found: dict[str, _Sizes] = defaultdict(lambda: defaultdict(int))
    for file in index.files:
        found[index.catalog.components[file.component].name][file.rank] += file.nbytes
    for record in index.objects:
        found[VALUES][filenames.parse_objects_file(record.name) or 0] += record.nbytes
    for attached in index.attached:
        found[VALUES][0] += attached.nbytes
    return found


def _largest(by_component: dict[str, _Sizes]) -> list[tuple[str, _Sizes]]:
    ordered = sorted(by_component.items(), key=lambda one: (-sum(one[1].values()), one[0]))
    shown, rest = ordered[:MAX_COMPONENTS], ordered[MAX_COMPONENTS:]
    if rest:
        together: _Sizes = defaultdict(int)
        for _, sizes in rest:
            for rank, nbytes in sizes.items():
                together[rank] += nbytes
        shown.append((f"{len(rest)} more", together))
    return shown


def _row(name: str, sizes: _Sizes, world_size: int, width: int) -> dict[str, Json]:
    most = max(sizes, key=lambda rank: (sizes[rank], -rank))
    return {
        "name": bounded(name),
        "nbytes": sum(sizes.values()),
        "num_ranks": len(sizes),
        "most_nbytes": sizes[most],
        "most_rank": most,
        "mean_nbytes": sum(sizes.values()) / world_size,
        "by_column": [*_columns(sizes, world_size, width)],
    }


def _columns(sizes: _Sizes, world_size: int, width: int) -> list[int]:
    """Return of each column's ranks the most that one stores."""
    columns = [0] * -(-world_size // width)
    for rank, nbytes in sizes.items():
        columns[rank // width] = max(columns[rank // width], nbytes)
    return columns
