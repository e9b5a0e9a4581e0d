"""What is written at once: large blocks alone, small ones with their neighbours."""

from __future__ import annotations

import pytest

from dist_ckpt.core.planning.plan import Batch
from dist_ckpt.core.planning.save import save_planner
from dist_ckpt.core.planning.save.save_planner import plan_batches


def test_small_blocks_that_adjoin_are_written_together_and_large_ones_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(save_planner, "SMALL_NBYTES", 40)
    names = ["a", "b", "empty", "c", "d", "e", "f", "g", "h"]
    sizes = [130, 10, 0, 30, 39, 21, 5, 64, 5]
    found = plan_batches(sizes, 64)
    assert [[(names[part.item], part.start) for part in batch.parts] for batch in found] == [
        [("a", 0)],
        [("a", 64)],
        [("a", 128), ("b", 0), ("c", 0)],
        [("d", 0), ("e", 0)],
        [("f", 0)],
        [("g", 0)],
        [("h", 0)],
    ]
    assert [(batch.first_block, batch.start) for batch in found] == [
        *((0, 0), (1, 64), (2, 128), (5, 170), (7, 230), (8, 235), (9, 299))
    ]


def test_a_file_without_data_is_one_empty_batch() -> None:
    assert plan_batches([0, 0], 64) == plan_batches([], 64) == (Batch(0, 0, ()),)
