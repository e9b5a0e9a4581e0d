"""DCP over our format in real ranks: cut otherwise, saved beside training, failing together."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dist_ckpt as dc
from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.interop.dcp.adapter import StorageReader, StorageWriter
from ranks import run_ranks
from torch_can import save_by_dcp_without_collectives

pytestmark = [pytest.mark.multi_process, pytest.mark.sampled(3)]

WHOLE = torch.arange(48.0).view(8, 6)


def cut(mesh: Any, *placements: Any) -> Any:
    # A copy: in older versions of torch rank 0's part would be the memory of the whole.
    return distribute_tensor(WHOLE.clone(), mesh, placements, src_data_rank=None)


def save_with_dcp(rank: int, path: str) -> list[Any]:
    mesh = init_device_mesh("cpu", (2, 2))
    state = {
        "w": cut(mesh, Shard(0), Shard(1)),
        "rows": cut(mesh, Replicate(), Shard(0)),
        "local": torch.full((3,), 2.0),
        "list": [torch.ones(2), torch.zeros(2), {"n": 1}],
        "step": 5,
        "empty": torch.zeros(0, 2),
    }
    writer = StorageWriter(path, step=5)
    dcp.save(state, storage_writer=writer)
    assert writer.report is not None
    return [writer.report.num_tensors, writer.report.world_size]


def load_with_both(rank: int, path: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {
        "w": cut(mesh, Shard(1)),
        "rows": cut(mesh, Shard(0)),
        "local": torch.zeros(3),
        "list": [torch.zeros(2), torch.ones(2), {"n": 0}],
        "step": 0,
        "empty": torch.zeros(0, 2),
    }
    dcp.load(wiped(state), storage_reader=StorageReader(path))
    check(state)
    wiped(state)
    report = dc.load(state, path)
    assert not report.unexpected
    check(state)


def wiped(state: dict[str, Any]) -> dict[str, Any]:
    for name in ("w", "rows"):
        state[name].to_local().fill_(-1)
    state["local"].fill_(-1)
    return state


def check(state: dict[str, Any]) -> None:
    for name in ("w", "rows"):
        assert torch.equal(state[name].full_tensor(), WHOLE)
    assert torch.equal(state["local"], torch.full((3,), 2.0))
    assert torch.equal(state["list"][0], torch.ones(2))
    assert (state["list"][2], state["step"]) == ({"n": 1}, 5)


def test_what_four_ranks_save_through_dcp_three_load_either_way(tmp_path: Path) -> None:
    assert run_ranks(save_with_dcp, f"{tmp_path}/a", world_size=4) == [[6, 4]] * 4
    assert dc.verify(tmp_path / "a").ok
    with dc.open(tmp_path / "a") as found:
        assert isinstance(found.objects, dict)
        assert found.tensors["w"].num_shards == 4
    run_ranks(load_with_both, f"{tmp_path}/a", world_size=3)


def trained(seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model: Any = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 3))
    for layer in model:
        fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    return model, optimizer


def values_of(model: Any, optimizer: Any) -> dict[str, Any]:
    found = {name: value.full_tensor() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        found[f"{name}.avg"] = optimizer.state[parameter]["exp_avg"].full_tensor()
    return {name: value.tolist() for name, value in found.items()}


def train_and_save(rank: int, path: str, way: str) -> dict[str, Any]:
    model, optimizer = trained(1)
    if way == "dist_ckpt":
        dc.save({"model": model, "optim": optimizer}, path)
    else:
        model_state, optim_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optim": optim_state}
        dcp.save(state, storage_writer=StorageWriter(path))
    return values_of(model, optimizer)


def load_trained(rank: int, path: str, way: str) -> dict[str, Any]:
    model, optimizer = trained(2)
    if way == "dist_ckpt":
        dc.load({"model": model, "optim": optimizer}, path)
        return values_of(model, optimizer)
    model_state, optim_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optim": optim_state}, storage_reader=StorageReader(path))
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optim_state)
    return values_of(model, optimizer)


@pytest.mark.parametrize(("saved", "loaded"), [("dcp", "dist_ckpt"), ("dist_ckpt", "dcp")])
def test_fsdp2_goes_from_one_to_the_other_and_to_other_ranks(
    tmp_path: Path, saved: str, loaded: str
) -> None:
    expected = run_ranks(train_and_save, f"{tmp_path}/a", saved, world_size=4)[0]
    assert run_ranks(load_trained, f"{tmp_path}/a", loaded, world_size=2) == [expected] * 2


def message_of(call: Callable[[], object]) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call()
        except dcp.api.CheckpointException as error:
            return str(error)
    return "no error"


def save_what_one_cannot(rank: int, path: str) -> str:
    state: dict[str, Any] = {"ok": torch.ones(2), f"rank {rank}": len if rank == 1 else 1}
    return message_of(lambda: dcp.save(state, storage_writer=StorageWriter(path)))


def test_all_are_told_what_one_rank_cannot_save(tmp_path: Path) -> None:
    for message in run_ranks(save_what_one_cannot, f"{tmp_path}/a", world_size=2):
        assert "rank 1 is a builtins.builtin_function_or_method" in message
    assert not (tmp_path / "a").exists()


def save_in_another_group(rank: int, path: str) -> str:
    group = dist.new_group([0, 1])
    if rank == 2:
        return "not in it"
    state = {"x": torch.ones(2)}
    wrong = message_of(
        lambda: dcp.save(state, storage_writer=StorageWriter(f"{path}/a"), process_group=group)
    )
    writer = StorageWriter(f"{path}/b", process_group=group)
    dcp.save(state, storage_writer=writer, process_group=group)
    return wrong


def test_a_group_must_be_the_writers_own(tmp_path: Path) -> None:
    for message in run_ranks(save_in_another_group, f"{tmp_path}", world_size=3)[:2]:
        assert "pass the same process_group= to both" in message
    assert not (tmp_path / "a").exists()
    with dc.open(tmp_path / "b") as found:
        assert found.world_size == 2


def save_each_its_own(rank: int, path: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"x": rank}, storage_writer=StorageWriter(f"{path}/alone-{rank}"), no_dist=True)
        loaded = {"x": -1}
        reader = StorageReader(f"{path}/alone-{rank}")
        dcp.load(loaded, storage_reader=reader, no_dist=True)
    assert loaded == {"x": rank}


def test_ranks_may_save_each_its_own(tmp_path: Path) -> None:
    run_ranks(save_each_its_own, f"{tmp_path}", world_size=2)


def save_without_collectives(rank: int, path: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    state = {"w": cut(mesh, Shard(0)), "same": torch.ones(3), "n": 1}
    dcp.save(state, storage_writer=StorageWriter(path), use_collectives=False)
    loaded = {"w": cut(mesh, Shard(1)), "same": torch.zeros(3), "n": 0}
    loaded["w"].to_local().zero_()
    dcp.load(loaded, storage_reader=StorageReader(path))
    assert torch.equal(loaded["w"].full_tensor(), WHOLE)
    assert torch.equal(loaded["same"], torch.ones(3))
    assert loaded["n"] == 1


@pytest.mark.skipif(not save_by_dcp_without_collectives(), reason="ranks of this DCP cannot")
def test_ranks_that_do_not_plan_together_save_together_all_the_same(tmp_path: Path) -> None:
    run_ranks(save_without_collectives, f"{tmp_path}/a", world_size=2)


def save_in_a_thread(rank: int, path: str) -> None:
    state = {"w": cut(init_device_mesh("cpu", (2,)), Shard(0)), "n": rank * 0}
    for number in range(2):
        saving: Any = dcp.async_save(state, storage_writer=StorageWriter(f"{path}/{number}"))
        state["n"] += 1
        saving.result()


def test_threads_of_ranks_save_together(tmp_path: Path) -> None:
    run_ranks(save_in_a_thread, f"{tmp_path}", world_size=2)
    for number in range(2):
        assert dc.verify(tmp_path / f"{number}").ok


def save_in_a_process(rank: int, path: str) -> str:
    state = {"w": cut(init_device_mesh("cpu", (2,)), Shard(0)), "n": 1}
    saving: Any = dcp.async_save(
        state,
        storage_writer=StorageWriter(path),
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    )
    saving.result()
    group = dist.new_group([0, 1])
    refused: Any = dcp.async_save(
        state,
        storage_writer=StorageWriter(f"{path}-2", process_group=group),
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    )
    try:
        refused.result()
    except BaseException as error:  # noqa: BLE001 - that of DCP is no Exception
        return str(error)
    return "no error"


@pytest.mark.slow
@pytest.mark.long
def test_a_process_of_dcp_saves_and_cannot_have_a_group(tmp_path: Path) -> None:
    for message in run_ranks(
        save_in_a_process, f"{tmp_path}/a", world_size=2, store="rank 0", launched=True
    ):
        assert "cannot be sent to another process" in message
    assert dc.verify(tmp_path / "a").ok


def load_while_it_is_replaced(rank: int, path: str) -> str:
    reader = StorageReader(path)
    if rank == 1:  # found before it was replaced
        reader.read_metadata()
        found = reader._opened
        reader.read_metadata = lambda *_, **__: stale(reader, found)  # type: ignore[method-assign]
    return message_of(lambda: dcp.load({"x": torch.zeros(2)}, storage_reader=reader))


def stale(reader: Any, found: Any) -> Any:
    opened, keys = reader._opened = found
    opened.attempt = Attempt(0, "f" * 16)
    return keys.metadata(None)


def test_ranks_that_find_different_checkpoints_load_none(tmp_path: Path) -> None:
    dc.save({"x": torch.ones(2)}, tmp_path / "a")
    for message in run_ranks(load_while_it_is_replaced, f"{tmp_path}/a", world_size=2):
        assert "opened different checkpoints" in message
