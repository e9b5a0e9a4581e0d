"""Folders that real ranks saved with DCP: read by other numbers of ranks, and what damage does."""

from __future__ import annotations

import pickle  # noqa: TID251 - it is what DCP writes
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import dist_ckpt as dc
from dist_ckpt.interop import imports
from dist_ckpt.interop.dcp.adapter import load
from long_mode import sampled_params
from ranks import run_ranks

pytestmark = [pytest.mark.multi_process, pytest.mark.sampled(3)]

WHOLE = torch.arange(63.0).view(9, 7)


def trained(seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model: Any = torch.nn.Sequential(
        torch.nn.Linear(5, 9), torch.nn.LayerNorm(9), torch.nn.Linear(9, 3)
    )
    for layer in (*model, model):
        fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 * (seed + 1))
    for number in range(3):
        model(torch.full((2, 5), number + seed + 1.0)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def cut(mesh: Any, *placements: Any) -> Any:
    return distribute_tensor(WHOLE.clone(), mesh, placements, src_data_rank=None)


def whole(value: Any) -> Any:
    """Return a state with its DTensors whole, and all tensors as lists."""
    if isinstance(value, DTensor):
        return value.full_tensor().tolist()
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: whole(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [whole(child) for child in value]
    return value


def save(rank: int, path: str) -> Any:
    warnings.simplefilter("ignore")
    model, optimizer = trained(0)
    model_state, optim_state = get_state_dict(model, optimizer)
    mesh = init_device_mesh("cpu", (2, 2))
    grids = {
        "both": cut(mesh, Shard(0), Shard(1)),
        "rows": cut(mesh, Replicate(), Shard(0)),
        "all": cut(mesh, Replicate(), Replicate()),
    }
    state = {"model": model_state, "optim": optim_state, "grids": grids, "step": 7}
    dcp.save(state, checkpoint_id=path)
    return whole({"model": model_state, "optim": optim_state})


def read(rank: int, path: str, target: str) -> Any:
    warnings.simplefilter("ignore")
    model, optimizer = trained(3)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {
        "model": model,
        "optim": optimizer,
        "grids": {"both": cut(mesh, Shard(1)), "rows": cut(mesh, Shard(0)), "all": WHOLE * 0},
        "step": 0,
    }
    if target:
        dc.load(state, target)
    else:
        load(state, path)
    assert state["step"] == 7
    for value in state["grids"].values():
        tensor = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(tensor, WHOLE)
    model_state, optim_state = get_state_dict(model, optimizer)
    return whole({"model": model_state, "optim": optim_state})


@pytest.mark.parametrize("world_size", sampled_params([3, 2, 1], 3))
def test_fsdp_of_four_ranks_goes_on_elsewhere(tmp_path: Path, world_size: int) -> None:
    expected = run_ranks(save, f"{tmp_path}/dcp", world_size=4)[0]
    found = run_ranks(read, f"{tmp_path}/dcp", "", world_size=world_size)
    assert found == [expected] * world_size
    imports.from_dcp(tmp_path / "dcp", tmp_path / "ours", world_size=world_size)
    assert dc.verify(tmp_path / "ours").ok
    assert run_ranks(read, "", f"{tmp_path}/ours", world_size=world_size) == [expected] * world_size


def read_on_rank_1_without_files(rank: int, path: str) -> str:
    live = torch.zeros(9, 7)
    try:
        load({"w": live}, path if rank == 0 else f"{path}-elsewhere")
    except (dc.CheckpointError, ValueError) as error:
        assert not live.any()
        return f"{error}"
    return "no error"


def test_ranks_that_find_different_things_all_fail(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": WHOLE}, checkpoint_id=tmp_path / "dcp")
    messages = run_ranks(read_on_rank_1_without_files, f"{tmp_path}/dcp", world_size=2)
    assert len(set(messages)) == 1
    assert "elsewhere" in messages[0]


def read_what_is_damaged(rank: int, path: str) -> str:
    live = torch.zeros(9, 7)
    try:
        load({"w": live}, path)
    except dc.CheckpointError as error:
        assert not live.any()
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_all_ranks_are_told_of_what_is_damaged(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": WHOLE}, checkpoint_id=tmp_path / "dcp")
    metadata = pickle.loads((tmp_path / "dcp" / ".metadata").read_bytes())
    metadata.state_dict_metadata["w"].chunks.clear()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(metadata))
    messages = run_ranks(read_what_is_damaged, f"{tmp_path}/dcp", world_size=2)
    assert messages[0] == messages[1]
    assert messages[0].startswith("CorruptError")
    assert "w has no part" in messages[0]
