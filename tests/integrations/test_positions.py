"""What the adapters know of the place in the data; no framework is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import dist_ckpt as dc
from dist_ckpt.integrations.fit_position import FitPosition
from dist_ckpt.integrations.loader_order import order_of, set_order


@pytest.mark.parametrize("has_generator", [False, True])
def test_an_order_is_drawn_again(has_generator: bool) -> None:
    generator = torch.Generator().manual_seed(3) if has_generator else None
    loader: Any = DataLoader(range(32), shuffle=True, generator=generator)  # type: ignore[arg-type]
    list(loader)
    order = order_of(loader)
    drawn = [int(one) for one in loader]
    assert [int(one) for one in loader] != drawn
    set_order(loader, order)
    assert [int(one) for one in loader] == drawn


def test_a_seed_that_the_sampler_drew_is_part_of_the_order() -> None:
    loader: Any = DataLoader(range(4), shuffle=True)  # type: ignore[arg-type]
    loader.sampler.initial_seed = 7
    order = order_of(loader)
    loader.sampler.initial_seed = 8
    set_order(loader, order)
    assert loader.sampler.initial_seed == 7


def test_a_fit_on_other_ranks_is_refused_in_the_midst_of_an_epoch() -> None:
    counts = {"ready": 2, "started": 2, "processed": 1, "completed": 1}
    whole = {"world_size": 2, "batches": 3, "num_batches": 6}
    loops = {"epoch_progress": {"total": dict(counts), "current": dict(counts)}}
    position = FitPosition(SimpleNamespace(world_size=3), lambda *, is_over: None)
    with pytest.raises(dc.IncompatibleError, match=r"after batch 3 .* 2 ranks, and now 3 train"):
        position.go_on_from(whole, None, loops, anew=False)
    assert loops["epoch_progress"]["total"] == counts
    position.go_on_from(whole, None, loops, anew=True)
    assert set(loops["epoch_progress"]["total"].values()) == {1}
