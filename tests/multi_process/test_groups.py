"""Saves and loads by a part of the world, while the other ranks do something else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dist_ckpt as dc
from ranks import run_ranks

pytestmark = pytest.mark.multi_process

WORLD_SIZE = 4
MEMBERS = (3, 1)  # new_group sorts them


def full(name: str) -> torch.Tensor:
    return torch.arange(30.0).view(10, 3) + len(name)


def in_world(_rank: int) -> float:
    """Do a collective of the user's, over the world and over a new group."""
    number = torch.ones(1)
    dist.all_reduce(number)
    group = dist.new_group([0, 3])
    if dist.get_rank() in (0, 3):
        dist.all_reduce(number, group=group)
    return number.item()


def save_apart(rank: int, root: str) -> Any:
    """Ranks 1 and 3 save, ranks 0 and 2 compute; then each half saves for itself, then all."""
    group = dist.new_group(list(MEMBERS))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    half = mesh["b"]  # ranks 0 and 1, ranks 2 and 3
    shard = distribute_tensor(full("part"), half, [Shard(0)], src_data_rank=None)
    reports = []
    if rank in MEMBERS:
        state = {"mine": dc.PerRank(rank), "w": full("part")}
        report = dc.save(state, f"{root}/part", group=group)
        with pytest.raises(ValueError, match="group"):  # the mesh has others
            dc.save({"w": shard}, f"{root}/refused", group=group)
        again: dict[str, Any] = {"mine": dc.PerRank(-1), "w": torch.zeros(10, 3)}
        dc.load(again, f"{root}/part", group=group)
        assert again["mine"].value == rank
        assert torch.equal(again["w"], full("part"))
        reports.append(report.num_files)
    else:
        with pytest.raises(ValueError, match="not in this group"):
            dc.save({"w": shard}, f"{root}/refused", group=group)
    sums = [in_world(rank)]
    dc.save({"w": shard}, f"{root}/half {rank // 2}", group=half.get_group())
    blank = distribute_tensor(torch.zeros(10, 3), half, [Shard(1)], src_data_rank=None)
    dist.barrier()
    # Halves read each other's.
    dc.load({"w": blank}, f"{root}/half {1 - rank // 2}", group=half.get_group())
    assert torch.equal(blank.full_tensor(), full("part"))
    whole = distribute_tensor(full("all"), mesh, [Shard(0), Shard(1)], src_data_rank=None)
    dc.save({"w": whole}, f"{root}/all")
    sums.append(in_world(rank))
    return reports, sums


def test_parts_of_the_world_save_while_others_do_something_else(tmp_path: Path):
    found = run_ranks(save_apart, str(tmp_path), world_size=WORLD_SIZE)
    assert [sums for _, sums in found] == [[8.0] * 2, [4.0] * 2, [4.0] * 2, [8.0] * 2]
    assert not (tmp_path / "refused").exists()
    with dc.open(tmp_path / "part") as checkpoint:
        assert checkpoint.world_size == 2
        mine: Mapping[Any, Any] = checkpoint.per_rank["mine"]
        assert sorted(mine.values()) == [1, 3]
    for name in ("half 0", "half 1", "all"):
        assert dc.verify(tmp_path / name).ok
        with dc.open(tmp_path / name) as checkpoint:
            assert checkpoint.world_size == (4 if name == "all" else 2)
            expected = full("all" if name == "all" else "part").numpy().tobytes()
            assert bytes(checkpoint["w"][...].data) == expected


class Meets:
    """An object of the user's whose state takes all ranks to make, and to set."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.met: list[list[str]] = []

    def _meet(self) -> None:
        names: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(names, self.name)
        assert set(names) == {self.name}, names

    def state_dict(self) -> dict[str, str]:
        self._meet()
        return {"name": self.name}

    def load_state_dict(self, state: dict[str, str]) -> None:
        self._meet()
        self.met.append([state["name"]])


class MeetsInModule(torch.nn.Linear):
    """A module whose extra state does."""

    def __init__(self, name: str) -> None:
        super().__init__(2, 2)
        torch.nn.init.ones_(self.weight)
        torch.nn.init.ones_(self.bias)
        self.meets = Meets(name)

    def get_extra_state(self) -> dict[str, str]:
        return self.meets.state_dict()

    def set_extra_state(self, state: dict[str, str]) -> None:
        self.meets.load_state_dict(state)


def save_and_load_in_another_order(rank: int, path: str) -> None:
    names = ["a", "b", "c", "inner"]
    made: dict[str, Any] = {name: Meets(name) for name in names[:3]}
    made["m"], made["k"] = MeetsInModule("m"), MeetsInModule("k")
    made["p"], made["q"] = dc.PerRank(Meets("p")), dc.PerRank(Meets("q"))
    made["nested"] = {"z": Meets("z"), "y": [Meets("y0"), {"x": Meets("x")}], 7: Meets("seven")}
    keys = sorted(made, reverse=bool(rank % 2))
    state = {key: made[key] for key in keys}
    if rank % 2:
        state["nested"] = dict(reversed(made["nested"].items()))
    dc.save(state, path)
    dc.load(state, path)
    assert made["a"].met == [["a"]]
    assert made["k"].meets.met == [["k"]]
    assert made["q"].value.met == [["q"]]
    assert list(state) == keys


def test_users_code_runs_in_one_order_on_all_ranks_whatever_that_of_their_keys(
    tmp_path: Path,
) -> None:
    run_ranks(save_and_load_in_another_order, str(tmp_path / "ck"), world_size=2)
