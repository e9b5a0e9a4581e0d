"""Files of others in real ranks: each takes its part of them, whatever they were cut by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dist_ckpt as dc
from ranks import run_ranks

pytestmark = pytest.mark.multi_process


def model() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 3))


def load_and_save(rank: int, source: str, target: str, read_once: Any) -> dict[str, Any]:
    torch.manual_seed(rank)
    live: Any = model()
    for layer in (*live, live):
        fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    report = dc.load({"model": live}, source, read_once=read_once)
    assert len(report.restored) == 4
    dc.save({"model": live}, target)
    return {name: value.full_tensor().tolist() for name, value in live.state_dict().items()}


@pytest.mark.parametrize("read_once", ["host", "off"])
def test_sharded_models_take_their_parts_of_a_folder(tmp_path: Path, read_once: str) -> None:
    torch.manual_seed(7)
    saved = model().state_dict()
    places = {}
    for number, name in enumerate(saved):
        file = f"model-{number}.safetensors"
        save_file({name: saved[name]}, tmp_path / file)
        places[name] = file
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    expected = {name: value.tolist() for name, value in saved.items()}
    found = run_ranks(load_and_save, f"{tmp_path}", f"{tmp_path}/ours", read_once, world_size=3)
    assert found == [expected] * 3
    assert dc.verify(tmp_path / "ours").ok


def load_what_is_damaged(rank: int, source: str) -> str:
    try:
        dc.load({"model": model()}, source)
    except dc.CorruptError as error:
        return str(error)
    return "no error"


def test_all_ranks_are_told_of_a_file_that_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file(model().state_dict(), path)
    path.write_bytes(path.read_bytes()[:-4])
    for message in run_ranks(load_what_is_damaged, f"{path}", world_size=2):
        assert "fetch the file again" in message
