"""What `dc.save` promises one process: its report, its files, and that it changes nothing."""

from __future__ import annotations

import datetime
import os
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import safetensors
from safetensors.torch import load_file

pytest.importorskip("torch")
pytest.importorskip("numpy")

import numpy as np
import torch

import dist_ckpt as dc
from dist_ckpt.core.comm.process_group import session_of
from dist_ckpt.core.format.filenames import parse_attempt
from dist_ckpt.core.saving.save import save_together
from dist_ckpt.core.saving.save_options import SaveOptions
from dist_ckpt.core.storage.local.local_storage import LocalStorage
from dist_ckpt.core.storage.storage_wrappers import ForwardingStorage
from ranks import save_on_threads
from sharded_checkpoints import RANKS, random_tensors, rank_state

T = TypeVar("T")


def data_files(path: Path) -> dict[str, bytes]:
    """Return the content of the shard and objects files of the one attempt at a path."""
    (attempt,) = path.iterdir()
    return {file.name: file.read_bytes() for file in attempt.iterdir() if file.suffix != ".json"}


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def test_the_report_says_what_was_saved(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(3, 2), "b": torch.ones(2)}, "x": torch.ones(1), "lr": 0.5}
    report = dc.save(state, tmp_path / "ck", step=12)
    files = data_files(tmp_path / "ck")
    assert sorted(files) == [
        "model-00000.safetensors",
        "objects.msgpack",
        "state-00000.safetensors",
    ]
    assert report.path == str(tmp_path / "ck")
    assert (report.step, report.num_tensors, report.num_files) == (12, 3, 3)
    assert report.nbytes == sum(map(len, files.values()))
    assert [parse_attempt(report.attempt)] == [
        parse_attempt(p.name) for p in (tmp_path / "ck").iterdir()
    ]
    assert set(report.seconds) == {"agree", "write", "clean up"}
    assert all(seconds >= 0 for seconds in report.seconds.values())
    assert (report.slowest_rank, report.slowest_s >= 0) == (0, True)


def test_a_small_save_calls_the_storage_seldom(tmp_path: Path) -> None:
    """On a network mount each call is a round trip. More calls need a reason: then raise these."""
    calls: list[str] = []

    class Listed(ForwardingStorage):
        def make_call(self, label: str, act: Callable[[], T], **options: Any) -> T:
            calls.append(label)
            return act()

        def close(self, act: Callable[[], None]) -> None:
            calls.append("close")
            super().close(act)

    state, path = {"w": torch.ones(3)}, f"{tmp_path}/ck"
    session, storage = session_of(None), Listed(LocalStorage())
    save_together(session, state, path, SaveOptions(), storage)
    first = len(calls)
    save_together(session, state, path, SaveOptions(overwrite=True), storage)
    assert first <= 34, calls[:first]
    assert len(calls) - first <= 46, calls[first:]


def test_metadata_comes_back_with_its_types(tmp_path: Path) -> None:
    metadata: dict[Any, object] = {
        "note": "first",
        "loss": float("inf"),
        "when": datetime.datetime(2024, 1, 2, 3, tzinfo=datetime.UTC),
        "shape": (1, [2, {3}]),
        7: b"seven",
        "big": 10**30,
        "long": "x" * 5000,
    }
    dc.save({"a": 1}, tmp_path / "ck", metadata=metadata)
    with dc.open(tmp_path / "ck") as ck:
        assert ck.metadata == metadata
        assert list(ck.metadata) == list(metadata)
        assert ck.step is None
    dc.save({"a": 1}, tmp_path / "none")
    with dc.open(tmp_path / "none") as ck:
        assert ck.metadata == {}


def test_overwrite_replaces_the_checkpoint_and_leaves_nothing_of_it(tmp_path: Path) -> None:
    path = tmp_path / "ck"
    first = dc.save({"a": torch.zeros(2)}, path, step=1)
    second = dc.save({"a": torch.ones(3)}, path, step=2, overwrite=True)
    assert [entry.name for entry in path.iterdir()] == [second.attempt]
    assert (first.attempt[:3], second.attempt[:3]) == ("a1-", "a2-")
    state: dict[str, Any] = {}
    assert dc.load(state, path).step == 2
    assert torch.equal(state["a"], torch.ones(3))


def test_overwrite_where_nothing_is_saves(tmp_path: Path) -> None:
    assert dc.save({"a": 1}, tmp_path / "ck", overwrite=True).attempt.startswith("a1-")


def test_relative_paths_and_folders_that_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    report = dc.save({"a": 1}, Path("runs/../runs/one/ck"))
    assert report.path == str(tmp_path / "runs" / "one" / "ck")
    dc.save({"a": 2}, "other/")
    for path in ("runs/one/ck", Path("runs") / "one" / "ck", tmp_path / "runs/one/ck"):
        state: dict[str, Any] = {}
        assert dc.load(state, path).path == report.path
        assert state == {"a": 1}
    assert dc.verify("other").ok
    dc.delete("other")
    assert os.listdir(tmp_path) == ["runs"]


def test_the_same_state_is_the_same_bytes(tmp_path: Path) -> None:
    saved = []
    # Sets that are equal, but come in another order.
    for name, numbers in (("one", (0, 8)), ("two", (8, 0))):
        model, optimizer = trained()
        state = {
            "model": model,
            "optim": optimizer,
            "plain": {"numbers": {*numbers}, "when": (1, 2.5)},
            "seen": dc.PerRank({*numbers}),
        }
        dc.save(state, tmp_path / name, step=3, metadata={"k": {*numbers}})
        saved.append(data_files(tmp_path / name))
    assert saved[0] == saved[1]
    assert len(saved[0]) == 4


def test_the_same_state_of_several_ranks_is_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        states = [rank_state(rank) for rank in range(RANKS)]
        save_on_threads(LocalStorage(), states, str(tmp_path / name), step=3)
    assert data_files(tmp_path / "one") == data_files(tmp_path / "two")


def test_each_save_has_an_id_that_a_copy_for_other_ranks_keeps(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_on_threads(LocalStorage(), [{"w": torch.ones(4)}] * 2, str(tmp_path / name))
    dc.reshard(tmp_path / "one", tmp_path / "copy", world_size=3)
    one, two, copy = (dc.open(tmp_path / name).index.save for name in ("one", "two", "copy"))
    assert one is not None
    assert re.fullmatch("[0-9a-f]{32}", one)
    assert one == copy != two


def test_every_shard_file_opens_with_safetensors_and_holds_equal_values(tmp_path: Path) -> None:
    states = [rank_state(rank) for rank in range(RANKS)]
    save_on_threads(LocalStorage(), states, str(tmp_path / "ck"))
    whole = random_tensors()
    seen: dict[str, int] = dict.fromkeys(whole, 0)
    for file in sorted((tmp_path / "ck").glob("*/*.safetensors")):
        with safetensors.safe_open(file, "pt") as opened:
            assert set(opened.metadata()) == {"format", "dist_ckpt", "digests"}
            assert opened.metadata()["format"] == "pt"
        for name, tensor in load_file(file).items():
            fqn, _, where = name.partition("[")
            expected = whole[fqn]
            if where.startswith("flat "):
                start, stop = map(int, where[5:-1].split(":"))
                expected = expected.flatten()[start:stop]
            elif where:
                pairs = [part.split(":") for part in where[:-1].split(",")]
                expected = expected[tuple(slice(int(a), int(b)) for a, b in pairs)]
            assert tensor.dtype == expected.dtype
            assert torch.equal(tensor, expected), name
            seen[fqn] += tensor.numel()
    assert seen == {fqn: tensor.numel() for fqn, tensor in whole.items()}


def test_dtypes_that_safetensors_lacks_are_bytes_there(tmp_path: Path) -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex128)
    dc.save({"z": tensor}, tmp_path / "ck")
    (file,) = (tmp_path / "ck").glob("*/*.safetensors")
    stored = load_file(file)["z"]
    assert (stored.dtype, tuple(stored.shape)) == (torch.uint8, (2, 16))
    assert torch.equal(stored.view(torch.complex128).flatten(), tensor)


def test_saving_changes_nothing_in_the_state(tmp_path: Path) -> None:
    model, optimizer = trained()
    fresh = torch.optim.AdamW(model.parameters())
    torch.manual_seed(5)
    before = {name: (t.data_ptr(), t.clone()) for name, t in model.state_dict().items()}
    generator = torch.get_rng_state()
    dc.save({"model": model, "optim": optimizer, "rng": dc.RNG()}, tmp_path / "ck")
    dc.save({"model": model, "fresh": fresh}, tmp_path / "fresh")
    assert torch.equal(torch.get_rng_state(), generator)
    assert not fresh.state
    for name, tensor in model.state_dict().items():
        assert tensor.data_ptr() == before[name][0]
        assert torch.equal(tensor, before[name][1])
    assert model.training


def test_tied_tensors_are_stored_once(tmp_path: Path) -> None:
    w = torch.arange(6.0).reshape(2, 3)
    state = {"model": {"a": w, "b": w, "view": w[:1], "other": w.clone()}}
    report = dc.save(state, tmp_path / "ck")
    assert report.num_tensors == 3
    with dc.open(tmp_path / "ck") as ck:
        assert {name: info.alias_of for name, info in ck.tensors.items()} == {
            "model.a": None,
            "model.view": None,
            "model.other": None,
            "model.b": "model.a",
        }
    (file,) = (tmp_path / "ck").glob("*/model-*.safetensors")
    assert sorted(load_file(file)) == ["model.a", "model.other", "model.view"]


def test_an_empty_state_is_a_checkpoint(tmp_path: Path) -> None:
    report = dc.save({}, tmp_path / "ck", step=0)
    assert (report.num_tensors, report.num_files, report.step) == (0, 1, 0)
    state: dict[str, Any] = {}
    dc.load(state, tmp_path / "ck")
    assert state == {}
    assert dc.verify(tmp_path / "ck").ok


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(24.0).reshape(4, 6).t(),
        lambda: torch.arange(24.0)[::3],
        lambda: torch.ones(1, 3).expand(4, 3),
        lambda: torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1)[1:, :, ::2],
        lambda: np.arange(12, dtype=np.int16)[::-1],
        lambda: np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        lambda: torch.tensor([float("nan"), -0.0, float("inf")]),
        lambda: torch.tensor(True),
    ],
)
def test_memory_of_any_form_is_saved_as_its_values(tmp_path: Path, make: Any) -> None:
    value = make()
    dc.save(OrderedDict(value=value), tmp_path / "ck")
    state: dict[str, Any] = {}
    dc.load(state, tmp_path / "ck")
    assert type(state["value"]) is type(value)
    assert np.asarray(state["value"]).tobytes() == np.ascontiguousarray(value).tobytes()
    assert tuple(state["value"].shape) == tuple(value.shape)


def test_a_name_that_no_reader_would_take_is_refused(tmp_path: Path) -> None:
    dc.save({"m": {"n" * 4094: torch.ones(1)}}, tmp_path / "longest")
    assert dc.verify(tmp_path / "longest").ok
    for value in (torch.ones(1), 1, dc.PerRank(1)):
        with pytest.raises(ValueError, match="the name has 4097 characters, the limit is 4096"):
            dc.save({"m": {"n" * 4095: value, "w": torch.ones(1)}}, tmp_path / "ck")
    assert not (tmp_path / "ck").exists()


def test_metadata_may_hold_what_is_not_valid_unicode(tmp_path: Path) -> None:
    metadata = {"\udc80": 1, "file": "\udc80", "fine": "ö"}
    dc.save({"w": torch.ones(1)}, tmp_path / "ck", metadata=metadata)
    with dc.open(tmp_path / "ck") as checkpoint:
        assert checkpoint.metadata == metadata
        assert checkpoint.index.metadata == {"fine": "ö"}
