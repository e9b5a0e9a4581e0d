"""Integer keys, which DCP turns into text: they come back on every way through its names."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.optim.lr_scheduler import MultiStepLR

import dist_ckpt as dc
from dist_ckpt.interop import imports
from dist_ckpt.interop.dcp import StorageReader, StorageWriter, export_folder
from dist_ckpt.interop.dcp import load as load_folder
from in_memory import Stateful

pytestmark = [
    # It says so on each call that there is one process.
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]

Load = Callable[[dict[str, Any]], Any]


def by_adapter(state: dict[str, Any], path: Path) -> Load:
    dcp.save(state, storage_writer=StorageWriter(path))
    return lambda live: dc.load(live, path)


def by_folder(state: dict[str, Any], path: Path) -> Load:
    dcp.save(state, checkpoint_id=path)
    return lambda live: load_folder(live, path)


def by_import(state: dict[str, Any], path: Path) -> Load:
    dcp.save(state, checkpoint_id=path / "dcp")
    imports.from_dcp(path / "dcp", path / "ours")
    return lambda live: dc.load(live, path / "ours")


def by_export(state: dict[str, Any], path: Path) -> Load:
    dc.save(state, path / "ours")
    export_folder(path / "ours", path / "dcp")
    return lambda live: load_folder(live, path / "dcp")


WAYS = [by_adapter, by_folder, by_import, by_export]


def training(milestones: list[int]) -> tuple[torch.optim.Optimizer, MultiStepLR]:
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    return optimizer, MultiStepLR(optimizer, milestones, gamma=0.5)


def rates(optimizer: torch.optim.Optimizer, scheduler: MultiStepLR, steps: int) -> list[float]:
    seen = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        seen.append(optimizer.param_groups[0]["lr"])
    return seen


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("milestones", [[3, 5], [3, 8], [9]])  # as saved, in part, others
def test_the_milestones_of_a_scheduler_come_back(
    way: Callable[[dict[str, Any], Path], Load], milestones: list[int], tmp_path: Path
) -> None:
    optimizer, scheduler = training([3, 5])
    rates(optimizer, scheduler, 2)
    load = way({"scheduler": scheduler.state_dict()}, tmp_path)

    other, fresh = training(milestones)
    other.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]
    report = load({"scheduler": fresh})
    assert type(fresh.milestones) is Counter
    assert fresh.state_dict() == scheduler.state_dict()
    assert rates(other, fresh, 5) == rates(optimizer, scheduler, 5) == [0.5, 0.5, 0.25, 0.25, 0.25]
    assert any("scheduler.milestones" in text for text in report.assumed)


SAVED: dict[str, Any] = {
    "mixed": {3: 1, 5: torch.ones(2), "x": 2},
    "values": {0: 1, -7: 2},
    "deep": {"a": [{1: {2: torch.ones(1)}}]},
    "ordered": OrderedDict({4: torch.ones(1)}),
    "counted": Counter({6: 2}),
    "lists": defaultdict(list, {8: [1, 2]}),
    "text": {"3": 1},
}


def zeros(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, list):
        return [zeros(item) for item in value]
    if isinstance(value, dict):
        new = value.copy()
        new.update({key: zeros(item) for key, item in value.items()})
        return new if not isinstance(value, Counter) else Counter(dict.fromkeys(value, 0))
    return 0


@pytest.mark.parametrize("way", WAYS)
def test_containers_and_objects_get_the_keys_of_the_state(
    way: Callable[[dict[str, Any], Path], Load], tmp_path: Path
) -> None:
    load = way({**SAVED, "object": SAVED}, tmp_path)
    live = {**zeros(SAVED), "object": Stateful(zeros(SAVED))}
    load(live)
    loaded = live.pop("object").state
    for result in (live, loaded):
        assert repr(result) == repr(SAVED)
        assert [*map(type, result.values())] == [*map(type, SAVED.values())]


@pytest.mark.parametrize("way", [by_adapter, by_folder, by_import])
def test_keys_of_other_classes_that_dcp_accepts_come_back(
    way: Callable[[dict[str, Any], Path], Load], tmp_path: Path
) -> None:
    saved: dict[str, Any] = {"x": {None: 1, True: 2, 1.5: 3, (1, 2): 4}}
    load = way({**saved, "object": saved}, tmp_path)
    live = {**zeros(saved), "object": Stateful(zeros(saved))}
    load(live)
    assert live["x"] == saved["x"]
    assert live["object"].state == saved


@pytest.mark.parametrize("way", WAYS)
def test_an_empty_dict_gets_texts_and_the_report_says_so(
    way: Callable[[dict[str, Any], Path], Load], tmp_path: Path
) -> None:
    load = way({"a": {3: 1}, "o": {"n": {5: 2}}, "t": torch.ones(1)}, tmp_path)
    inner = Stateful({"n": {}})
    live: dict[str, Any] = {"a": {}, "o": inner, "t": torch.zeros(1)}
    report = load(live)
    assert live["a"] == {"3": 1}
    assert inner.state == {"n": {"5": 2}}
    (text,) = report.assumed
    assert text.startswith("a, o.n: loaded with text keys such as '3'")


def test_the_reader_sets_values_under_the_keys_of_the_state(tmp_path: Path) -> None:
    dc.save({**SAVED, "scheduler": training([3, 5])[1]}, tmp_path / "ours")
    live = {**zeros(SAVED), "scheduler": training([3, 5])[1].state_dict()}
    live["scheduler"]["milestones"] = Counter({3: 0, 5: 0})
    reader = StorageReader(tmp_path / "ours")
    dcp.load(live, storage_reader=reader)
    scheduler = live.pop("scheduler")
    assert scheduler["milestones"] == Counter({3: 1, 5: 1})
    assert repr(live) == repr(SAVED)
    assert reader.report is not None
    assert {*reader.report.converted_keys} == {
        "mixed.3",
        "values.0",
        "values.-7",
        "counted.6",
        "lists.8",
        "scheduler.milestones.3",
        "scheduler.milestones.5",
    }


def test_the_reader_leaves_values_to_a_planner_with_its_own_way(tmp_path: Path) -> None:
    class Own(dcp.DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: Any) -> None:
            seen.append(read_item.dest_index.fqn)

    seen: list[str] = []
    dc.save({"a": {3: 1}, "t": torch.ones(1)}, tmp_path / "ours")
    live = {"a": {3: 0}, "t": torch.zeros(1)}
    dcp.load(live, storage_reader=StorageReader(tmp_path / "ours"), planner=Own())
    assert seen == ["a.3"]
    dc.save({"n": 5}, tmp_path / "flat")
    flat = {"n": 0}
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.load(flat, storage_reader=StorageReader(tmp_path / "flat"), planner=planner)
    assert flat == {"n": 5}
