"""Who stores what, of few ranks and of many."""

from __future__ import annotations

from typing import Any

import pytest

from dist_ckpt.core.format.index.index import Catalog, Component, Index, ShardFileRecord
from dist_ckpt.tools.report.report_sizes import MAX_COLUMNS, MAX_RANK_ROWS, rank_sizes


def an_index(world_size: int, sizes: dict[tuple[int, int], int], num_components: int) -> Index:
    components = tuple(Component(f"c{i}", f"c{i}") for i in range(num_components))
    files = tuple(
        ShardFileRecord(component, rank, nbytes, 8, "")
        for (component, rank), nbytes in sizes.items()
    )
    catalog = Catalog(world_size, (), components, (), {}, {}, {}, {})
    return Index("a1-0123456789abcdef", 1, catalog, files, (), {}, {}, 0.0)


def test_the_imbalance_is_the_most_by_the_mean() -> None:
    found: Any = rank_sizes(an_index(4, {(0, 0): 100, (0, 1): 300, (1, 1): 100}, 2))
    assert found["totals"] == [100, 400, 0, 0]
    assert (found["imbalance"], found["most_rank"], found["num_idle_ranks"]) == (3.2, 1, 2)
    assert [(one["name"], one["by_column"]) for one in found["components"]] == [
        ("c0", [100, 300, 0, 0]),
        ("c1", [0, 100, 0, 0]),
    ]
    assert [one["most_rank"] for one in found["components"]] == [1, 1]
    assert (found["most_nbytes"], found["least_nbytes"]) == (400, 0)


@pytest.mark.parametrize("world_size", [MAX_COLUMNS, MAX_COLUMNS + 1, 100_000])
def test_of_many_ranks_a_column_shows_the_most_of_its_own(world_size: int) -> None:
    sizes = {(0, rank): 10 for rank in range(world_size)} | {(0, world_size - 1): 50}
    found: Any = rank_sizes(an_index(world_size, sizes, 1))
    width = found["ranks_per_column"]
    assert len(found["totals"]) == -(-world_size // width) <= MAX_COLUMNS
    assert (found["totals"][0], found["totals"][-1]) == (10, 50)
    assert found["most_rank"] == world_size - 1


def test_many_components_share_a_row() -> None:
    sizes = {(number, 0): 1000 - number for number in range(100)}
    rows: Any = rank_sizes(an_index(1, sizes, 100))["components"]
    assert len(rows) == MAX_RANK_ROWS + 1
    assert rows[-1]["name"] == f"{100 - MAX_RANK_ROWS} more"
    assert sum(row["nbytes"] for row in rows) == sum(sizes.values())


def test_nothing_stored_has_no_imbalance() -> None:
    assert rank_sizes(an_index(2, {}, 0))["imbalance"] is None
