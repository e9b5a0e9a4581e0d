"""DCP over our format: what its planners save and load, and what is refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItemType
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import dist_ckpt as dc
from dist_ckpt.interop.dcp.adapter import StorageReader, StorageWriter

pytestmark = [
    # It says so on each call that there is one process.
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


@pytest.fixture(autouse=True)
def _no_plans_of_other_tests() -> Iterator[None]:
    yield
    for name in vars(SavePlanner):
        if name.startswith("_cached") and isinstance(getattr(SavePlanner, name), dict):
            getattr(SavePlanner, name).clear()


def trained(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5 / (1 + seed))
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    return model, optimizer


def state_dict(model: Any, optimizer: Any, **more: Any) -> dict[str, Any]:
    model_state, optim_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optim": optim_state, **more}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


VALUES = {
    "step": 3,
    "note": {"names": ["a", "b"], "none": None, "size": torch.Size([2])},
    "list": [torch.arange(3), torch.zeros(2, dtype=torch.bfloat16)],
    "mixed": [{"x": 1, "w": torch.ones(1)}, {"x": 2, "w": torch.ones(2)}],
    "rows": [{"x": 1}, {"x": [1, 2]}],
    "scalar": torch.tensor(7),
    "empty": torch.zeros(0, 3),
    "betas": (0.5, 0.25),
}


def emptied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, 1 if value.dtype != torch.bool else 0)
    if isinstance(value, dict):
        return {key: emptied(one) for key, one in value.items()}
    if isinstance(value, list) and any(isinstance(one, dict | torch.Tensor) for one in value):
        return [emptied(one) for one in value]
    return "nothing"


# --- what is saved through DCP -----------------------------------------------------------------


def test_what_dcp_saves_it_loads_and_so_do_we(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    saved = state_dict(model, optimizer, **VALUES)
    writer = StorageWriter(tmp_path / "a", step=3, metadata={"by": "dcp"})
    dcp.save(saved, storage_writer=writer)
    assert writer.report is not None
    assert writer.report.step == 3
    assert dc.verify(tmp_path / "a").ok
    with dc.open(tmp_path / "a") as found:
        assert found.step == 3
        assert found.metadata == {"by": "dcp"}
        assert found.objects["note.names"] == ["a", "b"]

    loaded = emptied(saved)
    dcp.load(loaded, storage_reader=StorageReader(tmp_path / "a"))
    assert same(loaded, saved)

    other, other_optimizer = trained(2)
    state = {
        "model": other,
        "optim": other_optimizer,
        **{key: emptied(VALUES[key]) for key in VALUES},
    }
    report = dc.load(state, tmp_path / "a")
    assert not report.missing
    assert not report.unexpected
    assert same(state_dict(other, other_optimizer), state_dict(model, optimizer))
    assert same({key: state[key] for key in VALUES}, VALUES)


def test_what_we_save_is_loaded_through_dcp(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    dc.save({"model": model, "optim": optimizer, "rng": dc.RNG(), **VALUES}, tmp_path / "a")
    other, other_optimizer = trained(2)
    loaded = state_dict(other, other_optimizer, **emptied(VALUES))
    dcp.load(loaded, storage_reader=StorageReader(tmp_path / "a"))
    assert same({key: loaded[key] for key in VALUES}, VALUES)
    set_state_dict(
        other, other_optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"]
    )
    assert same(state_dict(other, other_optimizer), state_dict(model, optimizer))


def rebuilt(path: Path) -> dict[str, Any]:
    """Return all of a checkpoint, as DCP makes a file of torch.save of one."""
    state: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner()
    _load_state_dict(state, storage_reader=StorageReader(path), planner=planner, no_dist=True)
    return state


def test_an_optimizer_of_two_models_keeps_the_names_that_the_state_gives_them(
    tmp_path: Path,
) -> None:
    models = {"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 1)}
    optimizer = torch.optim.SGD([p for m in models.values() for p in m.parameters()], momentum=0.9)
    models["b"](models["a"](torch.ones(2))).sum().backward()
    optimizer.step()
    dc.save({**models, "optim": optimizer}, tmp_path / "a")
    read = rebuilt(tmp_path / "a")
    assert read["optim"]["param_groups"][0]["params"] == [
        "a.weight",
        "a.bias",
        "b.weight",
        "b.bias",
    ]
    assert set(read["optim"]["state"]) == {"a.weight", "a.bias", "b.weight", "b.bias"}


def test_all_of_a_checkpoint_is_rebuilt_without_a_state(tmp_path: Path) -> None:
    dcp.save(VALUES, storage_writer=StorageWriter(tmp_path / "a"))
    read = rebuilt(tmp_path / "a")
    assert same(read, VALUES)


def test_the_last_of_a_run_is_found_by_its_selector(tmp_path: Path) -> None:
    for step in (1, 2):
        path = tmp_path / f"step-{step:08}"
        dcp.save({"x": torch.tensor(step)}, storage_writer=StorageWriter(path, step=step))
    loaded = {"x": torch.tensor(0)}
    dcp.load(loaded, storage_reader=StorageReader(f"{tmp_path}@latest"))
    assert loaded["x"] == 2


def test_a_checkpoint_id_comes_before_the_path_and_one_writer_serves_many(tmp_path: Path) -> None:
    writer, reader = StorageWriter(), StorageReader()
    for name in ("a", "b"):
        dcp.save({"x": name}, checkpoint_id=tmp_path / name, storage_writer=writer)
    for name in ("a", "b"):
        loaded = {"x": ""}
        dcp.load(loaded, checkpoint_id=tmp_path / name, storage_reader=reader)
        assert loaded == {"x": name}


def test_a_save_over_another_replaces_it_unless_it_may_not(tmp_path: Path) -> None:
    for number in (1, 2):
        dcp.save({"x": number}, storage_writer=StorageWriter(tmp_path / "a"))
    with pytest.raises(dcp.api.CheckpointException, match="overwrite"):
        dcp.save({"x": 3}, storage_writer=StorageWriter(tmp_path / "a", overwrite=False))
    loaded = {"x": 0}
    dcp.load(loaded, storage_reader=StorageReader(tmp_path / "a"))
    assert loaded == {"x": 2}


def test_cached_plans_serve_other_writers(tmp_path: Path) -> None:
    for number in range(3):
        state = {"w": torch.full((3,), float(number)), "n": number}
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, storage_writer=StorageWriter(tmp_path / f"{number}"), planner=planner)
    for number in range(3):
        loaded = {"w": torch.zeros(3), "n": -1}
        dcp.load(loaded, storage_reader=StorageReader(tmp_path / f"{number}"))
        assert same(loaded, {"w": torch.full((3,), float(number)), "n": number})


def test_a_thread_saves_what_was_staged(tmp_path: Path) -> None:
    state: dict[str, Any] = {"w": torch.ones(4), "n": 1}
    saving: Any = dcp.async_save(state, storage_writer=StorageWriter(tmp_path / "a"))
    state["w"].zero_()
    saving.result()
    loaded = {"w": torch.zeros(4), "n": 0}
    dcp.load(loaded, storage_reader=StorageReader(tmp_path / "a"))
    assert same(loaded, {"w": torch.ones(4), "n": 1})


class Halving(DefaultSavePlanner):
    """A planner of a user's, which stores tensors in half precision, and a flat state."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    def transform_object(self, write_item: Any, object: Any) -> Any:  # noqa: A002
        found = super().transform_object(write_item, object)
        return found if write_item.type == WriteItemType.BYTE_IO else found.to(torch.bfloat16)


def test_what_a_planner_makes_of_tensors_is_what_is_saved(tmp_path: Path) -> None:
    state = {"a.b": torch.full((3,), 1.5), "n": 1}
    dcp.save(state, storage_writer=StorageWriter(tmp_path / "a"), planner=Halving())
    with dc.open(tmp_path / "a") as found:
        assert found.tensors["a.b"].dtype == "bfloat16"
    loaded = {"a.b": torch.zeros(3), "n": 0}  # converted, as DCP does
    dcp.load(loaded, storage_reader=StorageReader(tmp_path / "a"))
    assert same(loaded, state)


# --- what is refused ---------------------------------------------------------------------------


class Thing:
    pass


@pytest.mark.parametrize(
    ("state", "names"),
    [
        ({"a": {"thing": Thing()}}, "a.thing"),
        ({"f": len}, "f"),
        ({"q": torch.zeros(2, dtype=torch.bits8 if hasattr(torch, "bits8") else None)}, "q"),
        ({"s": torch.eye(2).to_sparse()}, "s"),
        ({"m": torch.zeros(2, device="meta")}, "m"),
        ({"x" * 5000: 1}, "x" * 100),
        ({"\ud800": 1}, "invalid key"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name_and_nothing_is_left(
    tmp_path: Path, state: dict[str, Any], names: str
) -> None:
    with pytest.raises(dcp.api.CheckpointException, match=re.escape(names)):
        dcp.save({"ok": 1, **state}, storage_writer=StorageWriter(tmp_path / "a"))
    assert not (tmp_path / "a").exists()


def test_without_a_path_nothing_is_saved_or_loaded() -> None:
    with pytest.raises(dcp.api.CheckpointException, match="pass a path to StorageWriter"):
        dcp.save({"x": 1}, storage_writer=StorageWriter())
    with pytest.raises(dcp.api.CheckpointException, match="pass a path to StorageReader"):
        dcp.load({"x": 1}, storage_reader=StorageReader())


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(dcp.api.CheckpointException, match=r"no checkpoint is here"):
        dcp.load({"x": 1}, storage_reader=StorageReader(tmp_path / "a"))
    dcp.save({"x": 1}, storage_writer=StorageWriter(tmp_path / "a"))
    with pytest.raises(dcp.api.CheckpointException, match=r"Missing key.*: y"):
        dcp.load({"y": 1}, storage_reader=StorageReader(tmp_path / "a"))


def test_damage_is_told_by_name_and_not_loaded(tmp_path: Path) -> None:
    dcp.save({"m": {"w": torch.ones(64)}}, storage_writer=StorageWriter(tmp_path / "a"))
    (file,) = (tmp_path / "a").glob("a*/m-00000.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(dcp.api.CheckpointException, match=r"m\.w"):
        dcp.load({"m": {"w": torch.zeros(64)}}, storage_reader=StorageReader(tmp_path / "a"))


def test_safetensors_are_read_below_dcp_and_of_other_folders_is_said_what_loads_them(
    tmp_path: Path,
) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    loaded = {"model": {"w": torch.zeros(3)}}
    dcp.load(loaded, storage_reader=StorageReader(tmp_path / "model.safetensors"))
    assert same(loaded, {"model": {"w": torch.ones(3)}})
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "dcp")
    with pytest.raises(dcp.api.CheckpointException, match=r"dist_ckpt\.interop\.dcp\.load"):
        dcp.load({"w": torch.zeros(3)}, storage_reader=StorageReader(tmp_path / "dcp"))
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00001.safetensors")
    loaded["model"]["w"].zero_()
    dc.load(loaded, tmp_path)
    assert same(loaded, {"model": {"w": torch.ones(3)}})
