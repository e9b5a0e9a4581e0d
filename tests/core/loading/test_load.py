"""What `dc.load` promises one process: what it fills, what it reports, what it leaves alone."""

from __future__ import annotations

import gc
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("numpy")

import numpy as np
import torch

import dist_ckpt as dc
from dist_ckpt.core.comm.process_group import session_of
from dist_ckpt.core.loading.load import load_together
from dist_ckpt.core.loading.load_options import LoadOptions
from dist_ckpt.core.saving.save import save_together
from dist_ckpt.core.saving.save_options import SaveOptions
from dist_ckpt.core.storage import ReadableFile
from dist_ckpt.testing.memory_storage import MemoryStorage


class Net(torch.nn.Module):
    """Tied weights, a buffer and extra state."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 4, device=device)
        self.norm = torch.nn.BatchNorm1d(4, device=device)
        self.head = torch.nn.Linear(4, 5, bias=False, device=device)
        self.head.weight = self.embed.weight
        self.extra: object = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(x)))  # type: ignore[no-any-return]

    def get_extra_state(self) -> object:
        return {"extra": self.extra}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state["extra"]


def trained(seed: int = 1) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    model.extra = ("tokens", seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * seed)
    for _ in range(2):
        step(model, optimizer)
    return model, optimizer


def step(model: Net, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = model(torch.arange(5)).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def equal(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a checkpoint of a trained model, its optimizer and some values."""
    model, optimizer = trained()
    state = {"model": model, "optim": optimizer, "lr": 0.5, "seen": {"n": 3, "who": ("a", {1})}}
    dc.save(state, tmp_path / "ck", step=4)
    return tmp_path / "ck"


def flip_last(path: Path, name: str) -> None:
    (file,) = path.glob(f"*/{name}")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


# --- modules and optimizers ------------------------------------------------------------------


def test_a_module_and_its_optimizer_go_on_as_if_nothing_had_been(path: Path) -> None:
    model, optimizer = trained()
    other, its_optimizer = trained(seed=2)
    embed = other.embed.weight
    state = {"model": other, "optim": its_optimizer, "lr": 0.0, "seen": None}
    report = dc.load(state, path)
    assert other.embed.weight is embed is other.head.weight
    assert equal(other, model)
    assert other.extra == ("tokens", 1)
    assert (state["lr"], state["seen"]) == (0.5, {"n": 3, "who": ("a", {1})})
    assert [step(other, its_optimizer) for _ in range(3)] == [
        step(model, optimizer) for _ in range(3)
    ]
    assert equal(other, model)
    assert report.missing == report.unexpected == report.dropped == report.resharded == ()


def test_the_report_says_what_was_restored(path: Path) -> None:
    model, optimizer = trained(seed=2)
    report = dc.load({"model": model, "optim": optimizer, "lr": 0, "seen": None}, path)
    assert (report.path, report.step) == (str(path), 4)
    assert (path / report.attempt).is_dir()
    assert {"model.embed.weight", "model.head.weight", "lr", "seen"} <= set(report.restored)
    assert "optim.state.model.embed.weight.exp_avg" in report.restored
    assert set(report.seconds) == {"open", "check", "read", "place"}
    with dc.open(path) as ck:
        sizes = [info.nbytes for info in ck.tensors.values() if info.alias_of is None]
    assert report.nbytes_read == report.nbytes_placed == sum(sizes)


def test_a_meta_module_gets_memory_and_stays_tied(path: Path) -> None:
    model = Net(device="meta")
    dc.load({"model": model}, path, include="model")
    assert equal(model, trained()[0])
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert model.head.weight is model.embed.weight
    assert isinstance(model.embed.weight, torch.nn.Parameter)


def test_a_fresh_optimizer_gets_the_state_that_was_saved(path: Path) -> None:
    model, optimizer = trained()
    other = Net()
    fresh = torch.optim.AdamW(other.parameters(), lr=1.0)
    dc.load({"model": other, "optim": fresh}, path, include=["model", "optim"])
    assert fresh.param_groups[0]["lr"] == 0.01
    assert step(other, fresh) == step(model, optimizer)
    assert equal(other, model)


# --- open templates --------------------------------------------------------------------------


def everything() -> dict[Any, Any]:
    return {
        "model": OrderedDict(w=torch.arange(6.0).reshape(2, 3), layers=[torch.ones(1), (1, "x")]),
        7: {"t": torch.zeros(2, dtype=torch.int64), "n": None},
        "array": np.arange(4, dtype=np.uint8),
        "plain": defaultdict(list, a=[1]),
        "empty": {},
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor | np.ndarray):
        is_equal: Any = a == b
        return type(a) is type(b) and a.dtype == b.dtype and bool(is_equal.all())
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def test_an_empty_state_takes_everything_with_its_structure(tmp_path: Path) -> None:
    dc.save(everything(), tmp_path / "ck")
    state: dict[Any, Any] = {}
    report = dc.load(state, tmp_path / "ck")
    assert same(state, everything())
    assert report.resharded == report.unexpected == report.missing == ()


@pytest.mark.parametrize("opened", [None, {}])
@pytest.mark.parametrize("where", [("model",), ("model", "w"), ("model", "layers"), (7,), (7, "t")])
def test_none_or_an_empty_mapping_takes_what_was_saved_there(
    tmp_path: Path, where: tuple[Any, ...], opened: Any
) -> None:
    dc.save(everything(), tmp_path / "ck")
    state = everything()
    inner: Any = state
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = opened if opened is None else dict(opened)
    dc.load(state, tmp_path / "ck")
    assert same(state, everything())


# --- strict ----------------------------------------------------------------------------------


def test_missing_and_unexpected_names_are_listed_at_once_or_reported(path: Path) -> None:
    kept = torch.full((2,), 7.0)
    state: dict[str, Any] = {"new": {"t": kept, "n": 3}, "lr": 0}
    with pytest.raises(dc.IncompatibleError) as caught:
        dc.load(state, path)
    for name in ("new.t", "model.embed.weight", "seen"):
        assert name in str(caught.value)
    assert state["lr"] == 0
    report = dc.load(state, path, strict=False)
    assert set(report.missing) >= {"new.t"}
    assert {"model.embed.weight", "seen"} <= set(report.unexpected)
    assert report.restored == ("lr",)
    assert state == {"new": {"t": kept, "n": 3}, "lr": 0.5}
    assert kept.tolist() == [7, 7]
    assert report.nbytes_read == 0


def test_shape_and_dtype_are_errors_without_strict_as_well(tmp_path: Path) -> None:
    dc.save({"w": torch.ones(2)}, tmp_path / "ck")
    for wrong in (torch.zeros(3), torch.zeros(2, dtype=torch.float64)):
        with pytest.raises(dc.IncompatibleError, match="w: saved"):
            dc.load({"w": wrong}, tmp_path / "ck", strict=False)
        assert not wrong.any()


# --- include, exclude, rename ----------------------------------------------------------------


def test_include_and_exclude_leave_the_rest_alone(path: Path) -> None:
    other, optimizer = trained(seed=2)
    running = other.norm.running_mean
    assert running is not None
    before = running.clone()
    state = {"model": other, "optim": optimizer, "lr": 9}
    report = dc.load(state, path, include="model", exclude=["*.running_*", "*_extra_state"])
    assert state["lr"] == 9
    assert other.extra == ("tokens", 2)
    assert torch.equal(running, before)
    assert torch.equal(other.embed.weight, trained()[0].embed.weight)
    assert optimizer.param_groups[0]["lr"] == 0.02
    assert all(name.startswith("model.") for name in report.restored)
    assert not any("running_" in name for name in report.restored)


def test_a_renamed_module_is_found(path: Path) -> None:
    state = {"net": torch.nn.ModuleDict({"inner": Net()})}
    dc.load(state, path, include="net", rename={"model": "net.inner"})
    inner = state["net"]["inner"]
    assert isinstance(inner, Net)
    assert equal(inner, trained()[0])


# --- damage and verification -----------------------------------------------------------------


def test_check_first_leaves_everything_as_it_was(path: Path) -> None:
    flip_last(path, "optim-*.safetensors")
    other, optimizer = trained(seed=2)
    state = {"model": other, "optim": optimizer, "lr": 9, "seen": None}
    with pytest.raises(dc.CorruptError, match="damaged") as caught:
        dc.load(state, path, check_first=True)
    assert caught.value.touched == ()
    assert equal(other, trained(seed=2)[0])
    assert (state["lr"], state["seen"], optimizer.param_groups[0]["lr"]) == (9, None, 0.02)


def test_check_first_of_a_good_checkpoint_loads_it(path: Path) -> None:
    state: dict[str, Any] = {}
    report = dc.load(state, path, check_first=True)
    assert torch.equal(state["model"]["embed.weight"], trained()[0].embed.weight)
    assert report.nbytes_read == report.nbytes_placed


def test_damage_that_is_met_while_reading_runs_no_object(path: Path) -> None:
    flip_last(path, "optim-*.safetensors")
    other, optimizer = trained(seed=2)
    state = {"model": other, "optim": optimizer, "lr": 9, "seen": None}
    with pytest.raises(dc.CorruptError):
        dc.load(state, path)
    assert (state["lr"], state["seen"], other.extra) == (9, None, ("tokens", 2))


def test_a_damaged_block_is_loaded_where_nobody_verifies(tmp_path: Path) -> None:
    dc.save({"w": torch.zeros(8, dtype=torch.uint8)}, tmp_path / "ck")
    flip_last(tmp_path / "ck", "*.safetensors")
    state = {"w": torch.full((8,), 9, dtype=torch.uint8)}
    with pytest.raises(dc.CorruptError):
        dc.load(state, tmp_path / "ck")
    dc.load(state, tmp_path / "ck", verify=False)
    assert state["w"].tolist() == [0] * 7 + [1]


# --- leaves ----------------------------------------------------------------------------------


def test_arrays_are_filled_in_place(tmp_path: Path) -> None:
    dc.save({"a": np.arange(6.0).reshape(2, 3), "t": torch.ones(2)}, tmp_path / "ck")
    whole = np.zeros((4, 6))
    array = whole[::2, ::2]
    state: dict[str, Any] = {"a": array, "t": np.zeros(2, dtype=np.float32)}
    dc.load(state, tmp_path / "ck")
    assert state["a"] is array
    assert whole[2, 4] == 5
    assert state["t"].tolist() == [1, 1]


def test_tied_tensors_are_filled_once_and_come_back_tied(tmp_path: Path) -> None:
    w = torch.arange(3.0)
    dc.save({"a": w, "b": w}, tmp_path / "ck")
    state: dict[str, Any] = {}
    dc.load(state, tmp_path / "ck")
    assert state["a"] is state["b"]
    apart = {"a": torch.zeros(3), "b": torch.zeros(3)}
    dc.load(apart, tmp_path / "ck")
    assert torch.equal(apart["a"], w)
    assert torch.equal(apart["b"], w)
    same = torch.zeros(3)
    dc.load({"a": same, "b": same}, tmp_path / "ck")
    assert torch.equal(same, w)


def test_per_rank_values_and_generators_come_back(tmp_path: Path) -> None:
    torch.manual_seed(11)
    dc.save({"mine": dc.PerRank([1, 2]), "rng": dc.RNG()}, tmp_path / "ck")
    expected = torch.rand(3)
    torch.manual_seed(12)
    mine = dc.PerRank(None)
    dc.load({"mine": mine, "rng": dc.RNG()}, tmp_path / "ck")
    assert mine.value == [1, 2]
    assert torch.equal(torch.rand(3), expected)


def test_a_config_makes_one_rank_of_one_the_whole(tmp_path: Path) -> None:
    config = dc.ShardingConfig(mesh={"dp": 1}, rules={"*": {"dp": 0}})
    dc.save({"m": {"w": torch.arange(4.0)}}, tmp_path / "ck", sharding=config)
    state = {"m": {"w": torch.zeros(4)}}
    dc.load(state, tmp_path / "ck", sharding=config)
    assert state["m"]["w"].tolist() == [0, 1, 2, 3]


def test_generators_that_cannot_be_set_leave_the_tensors_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "ck"
    dc.save({"w": torch.ones(2), "rng": dc.PerRank({"python": "text"})}, path)
    state: dict[str, Any] = {"w": torch.zeros(2), "rng": dc.RNG()}
    before = dc.RNG().capture()
    with pytest.raises(dc.IncompatibleError, match="exclude"):
        dc.load(state, path)
    assert torch.equal(state["w"], torch.zeros(2))
    assert dc.RNG().capture() == before


def test_the_default_device_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ck"
    model, optimizer = trained()
    dc.save({"model": model, "optim": optimizer, "n": np.arange(3)}, path)
    again = Net()
    fresh = torch.optim.AdamW(again.parameters())
    taken: dict[str, Any] = {}
    torch.set_default_device("meta")
    try:
        dc.load({"model": again, "optim": fresh, "n": None}, path)
        dc.load(taken, path)
    finally:
        torch.set_default_device(None)
    assert equal(model, again)
    for saved, loaded in zip(optimizer.state.values(), fresh.state.values(), strict=True):
        assert all(torch.equal(value, loaded[name]) for name, value in saved.items())
    assert torch.equal(taken["model"]["norm.weight"], model.norm.weight)


def test_tensors_that_share_memory_are_filled_only_with_what_agrees(tmp_path: Path) -> None:
    path = tmp_path / "ck"
    whole = torch.arange(6.0)
    dc.save({"a": whole[:4], "b": whole[2:]}, path)
    memory = torch.zeros(6)
    dc.load({"a": memory[:4], "b": memory[2:]}, path)
    assert torch.equal(memory, whole)
    with pytest.raises(dc.IncompatibleError, match="a and b share memory"):
        dc.load({"a": memory[:4], "b": memory[1:5]}, path)


# --- the rest of the process -----------------------------------------------------------------


class Watched(MemoryStorage):
    """Notes at each call for bytes whether Python's collector of garbage is on."""

    def __init__(self, tree: Mapping[str, bytes | None]) -> None:
        super().__init__(tree)
        self.on: list[bool] = []

    def open(self, path: str) -> ReadableFile:
        self.on.append(gc.isenabled())
        return WatchedFile(self, super().open(path))


class WatchedFile:
    def __init__(self, storage: Watched, file: ReadableFile) -> None:
        self._storage = storage
        self._file = file
        self.nbytes = file.nbytes
        self.num_links = file.num_links

    def read_into(self, offset: int, target: memoryview) -> int:
        self._storage.on.append(gc.isenabled())
        return self._file.read_into(offset, target)

    def close(self) -> None:
        self._file.close()


class Watching:
    """An object of the user's that notes the same."""

    def __init__(self) -> None:
        self.on: list[bool] = []

    def state_dict(self) -> dict[str, int]:
        self.on.append(gc.isenabled())
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.on.append(gc.isenabled())


def test_the_collector_of_garbage_runs_while_storage_and_the_users_code_are_waited_for() -> None:
    state = {"model": {f"w{i}": torch.zeros(4) for i in range(40)}, "own": Watching()}
    storage = MemoryStorage()
    save_together(session_of(None), state, "/ck", SaveOptions(), storage)
    watched, watching = Watched(storage.tree()), Watching()
    load_together(session_of(None), {**state, "own": watching}, "/ck", LoadOptions(), watched)
    assert len(watched.on) > 4
    assert all(watched.on)
    assert watching.on == [True, True]
