"""What a save and a load cost between real ranks, as their reports say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dist_ckpt as dc
from ranks import run_ranks

pytestmark = pytest.mark.multi_process

RANKS = 4


def costs(rank: int, root: str, num_tensors: int) -> Any:
    """Save twice and load once; return (exchanges, bytes sent, collectives, bytes given) each."""
    state = {
        "model": {
            **{
                f"layer{number}": dc.LocalShard(torch.ones(2, 3), (2 * RANKS, 3), (2 * rank, 0))
                for number in range(num_tensors)
            },
            "bias": torch.ones(7),
        }
    }
    reports: list[Any] = [dc.save(state, f"{root}/{number}") for number in range(2)]
    receipts = [report.nbytes_receipt for report in reports]
    reports.append(dc.load(state, f"{root}/0"))
    return [
        (
            report.exchanges.num,
            report.exchanges.nbytes - receipt,
            report.collectives.num,
            report.collectives.nbytes,
        )
        for report, receipt in zip(reports, [*receipts, 0], strict=True)
    ]


def test_exchanges_and_their_bytes_do_not_grow_with_the_number_of_tensors(tmp_path: Path):
    few = run_ranks(costs, str(tmp_path / "few"), 3, world_size=RANKS)
    many = run_ranks(costs, str(tmp_path / "lot"), 300, world_size=RANKS)
    for rank, (cold, steady, loaded) in enumerate(many):
        assert cold[0] == 3
        assert cold[2] == 1
        assert cold[3] > 3000  # each rank's cells are its own, so each gives an inventory
        assert steady[0] == 2
        assert 0 < steady[1] < 1000
        assert steady[2:] == (0, 0)
        assert loaded[0] == few[rank][2][0]
        # Small enough for the exchanges: the index, and what each rank of the host wants.
        assert loaded[2:] == (0, 0)
