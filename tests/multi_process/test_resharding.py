"""What any layout of a training state saved, any other loads, to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from training import BLANK, CUTS, MOMENTS, SAVED, difference, make, sharding_of, whole

import dist_ckpt as dc

pytestmark = pytest.mark.multi_process


def save_as(_rank: int, cut: str, path: str) -> None:
    dc.save(make(cut, SAVED), path, sharding=sharding_of(cut))


def load_each(_rank: int, cut: str, paths: dict[str, str]) -> dict[str, list[str]]:
    found, expected = {}, make(cut, SAVED)
    for source, path in paths.items():
        state = make(cut, BLANK)
        dc.load(state, path, sharding=sharding_of(cut))
        found[source] = difference(state, expected)
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The path of a checkpoint of the same state saved under each cut."""
    root = tmp_path_factory.mktemp("saved")
    paths = {cut: str(root / cut) for cut in CUTS}
    for cut, world_size in CUTS.items():
        run_ranks(world_size, save_as, cut, paths[cut])
    return paths


@pytest.mark.parametrize("cut", CUTS)
def test_what_any_layout_saved_loads_to_the_last_bit_into(cut, saved):
    for found in run_ranks(CUTS[cut], load_each, cut, saved):
        assert found == dict.fromkeys(CUTS, [])
