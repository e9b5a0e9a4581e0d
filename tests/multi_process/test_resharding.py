"""What any layout of a training state saved, any other loads, to the last bit."""

from __future__ import annotations

import pytest
import torch

import dist_ckpt as dc
from long_mode import sampled_params
from ranks import run_ranks
from training import BLANK, CUTS, MOMENTS, SAVED, difference, make, plain_data, sharding_of, whole

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
        run_ranks(save_as, cut, paths[cut], world_size=world_size)
    return paths


@pytest.mark.parametrize("cut", sampled_params([*CUTS], 4))
def test_what_any_layout_saved_loads_to_the_last_bit_into(cut, saved):
    for found in run_ranks(load_each, cut, saved, world_size=CUTS[cut]):
        assert found == {source: [] for source in CUTS}


@pytest.mark.parametrize("cut", CUTS)
def test_the_whole_tensors_are_read_to_the_last_bit_without_ranks_from(cut, saved):
    with dc.open(saved[cut]) as checkpoint:
        for name, tensor in whole(SAVED, "weight").state_dict().items():
            assert bytes(checkpoint[f"model.{name}"][...].data) == as_bytes(tensor)
        for quantity in MOMENTS:
            for name, tensor in whole(SAVED, quantity).named_parameters():
                stored = checkpoint[f"optim.state.model.{name}.{quantity}"]
                assert (stored.dtype, stored.shape) == ("float32", tuple(tensor.shape))
                assert bytes(stored[...].data) == as_bytes(tensor)
        assert checkpoint.objects["data"] == plain_data(SAVED)
    assert dc.verify(saved[cut]).ok


def as_bytes(tensor: torch.Tensor) -> bytes:
    data: bytes = tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
    return data
