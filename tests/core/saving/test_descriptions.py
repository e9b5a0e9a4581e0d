"""What a checkpoint is of, its config and kind: saved, shown, and compared by a load."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_ckpt as dc
from dist_ckpt.async_save.snapshots import job_folder
from dist_ckpt.cli import main
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.format.index.model_description import as_json, find_differences
from dist_ckpt.core.format.objects.plain_codec import decode_value, encode_value
from dist_ckpt.core.saving.save import save_together
from dist_ckpt.core.saving.save_options import SaveOptions
from dist_ckpt.errors import IncompatibleError
from dist_ckpt.testing.memory_storage import MemoryStorage
from dist_ckpt.testing.thread_channel import TEST_CONFIG
from ranks import errors_of, try_ranks
from subclass_tensors import Pair, Quantized

CONFIG: dict[str, Any] = {"model": {"dim": 64, "heads": (2, 4)}, "dtype": torch.float32, "lr": 0.1}


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without others, and a folder in the place of shared memory."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(job_folder, "SHARED_MEMORY", str(tmp_path))


def saved(path: Path, **options: Any) -> Path:
    dc.save({"w": torch.ones(2)}, path, **options)
    return path


def test_config_and_kind_come_back_and_are_metadata(tmp_path: Path) -> None:
    path = saved(tmp_path / "ck", config=CONFIG, kind="ddl", metadata={"note": "x"})
    with dc.open(path) as ck:
        assert (ck.config is not None, ck.kind) == (True, "ddl")
        assert ck.metadata == {"note": "x", "config": ck.config, "kind": "ddl"}
    (one,) = dc.checkpoints(path)
    assert one.kind == "ddl"
    with dc.open(saved(tmp_path / "none")) as ck:
        assert (ck.config, ck.kind) == (None, None)
    with dc.open(saved(tmp_path / "by-hand", metadata={"config": {"a": 1}})) as ck:
        assert ck.config == {"a": 1}


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"config": [1]}, TypeError, "config is a list: give a dict"),
        ({"config": {"a": object()}}, TypeError, re.escape("config['a'] is a builtins.object")),
        ({"config": {"a": torch.ones(1)}}, TypeError, r"in a config or metadata .*value\.tolist"),
        ({"kind": 3}, TypeError, "kind=3: give a text"),
        ({"kind": ""}, ValueError, "kind='': give a text of 1 to 200"),
        ({"kind": "x" * 201}, ValueError, "give a text of 1 to 200"),
        ({"kind": "\ud800"}, ValueError, "give a text"),
        (
            {"config": {}, "metadata": {"config": {}}},
            ValueError,
            r"config= and metadata\['config'\] are both",
        ),
        (
            {"kind": "a", "metadata": {"kind": "a"}},
            ValueError,
            r"kind= and metadata\['kind'\] are both",
        ),
        ({"metadata": {"kind": 3}}, TypeError, "kind=3"),
    ],
)
def test_what_is_no_description_is_refused_and_nothing_is_claimed(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        saved(tmp_path / "ck", **options)
    assert not (tmp_path / "ck").exists()


def test_ranks_with_other_configs_make_no_checkpoint() -> None:
    storage, state = MemoryStorage(), {"w": torch.ones(2)}

    def save(rank: int, channel: Any, bulk: Any) -> object:
        options = SaveOptions(kind="a", config={"b": rank // 2})
        return save_together(Session(channel, bulk, TEST_CONFIG), state, "/ck", options, storage)

    for error in errors_of(try_ranks(save, world_size=3, harness="threads")):
        assert "different metadata=, config= or kind=" in str(error)
        assert "ranks 0-1 differs from rank 2" in str(error)
    assert storage.list("/") == []


def test_a_load_tells_each_difference_and_touches_nothing(tmp_path: Path) -> None:
    path = saved(tmp_path / "ck", config=CONFIG, kind="ddl")
    state = {"w": torch.zeros(2)}
    other = {"model": {"dim": 128, "heads": [2, 4]}, "dtype": torch.float32, "seed": 1}
    with pytest.raises(IncompatibleError) as caught:
        dc.load(state, path, config=other, kind="baseline")
    told = str(caught.value)
    for line in (
        "kind: 'ddl' there, 'baseline' here",
        "config.lr: 0.1 there, nothing here",
        "config.model.dim: 64 there, 128 here",
        "config.seed: nothing there, 1 here",
    ):
        assert line in told
    assert "heads" not in told, "a tuple and a list of the same are no difference"
    assert "dtype" not in told
    assert state["w"].sum() == 0
    dc.load(state, path, config=CONFIG, kind="ddl")
    assert state["w"].sum() == 2


def test_the_order_of_a_mapping_or_a_set_is_no_difference(tmp_path: Path) -> None:
    names = {f"name{number}" for number in range(50)}
    path = saved(tmp_path / "ck", config={"layers": [{"dim": 2, "act": "gelu"}], "names": names})
    other = {"layers": ({"act": "gelu", "dim": 2},), "names": {*sorted(names)}}
    dc.load({"w": torch.zeros(2)}, path, config=other)
    assert as_json(names) == sorted(names)
    assert not find_differences({"a": [{0, 8}]}, {"a": [{8, 0}]}), "they are told in another order"


def test_a_config_that_was_read_without_torch_is_compared_with_a_live_one() -> None:
    read = decode_value(encode_value(CONFIG))
    assert read["dtype"] is not CONFIG["dtype"]
    assert not find_differences(read, CONFIG)
    assert [*find_differences(read, {**CONFIG, "dtype": torch.float16})] == ["dtype"]


def test_an_empty_config_is_one(tmp_path: Path) -> None:
    with pytest.raises(IncompatibleError, match=r"config\.a: 1 there, nothing here"):
        dc.load({}, saved(tmp_path / "ck", config={"a": 1}), config={})


def test_names_with_dots_hide_no_difference(tmp_path: Path) -> None:
    path = saved(tmp_path / "ck", config={"a.b": 1, "a": {"b": 2}, "": {"c": 3}})
    for other in ({"a.b": 9, "a": {"b": 2}, "": {"c": 3}}, {"a.b": 1, "a": {"b": 2}, "c": 3}):
        with pytest.raises(IncompatibleError, match=r"config\.('a\.b': 1 there, 9 here|''\.c)"):
            dc.load({}, path, config=other)


def test_what_was_saved_without_a_description_cannot_be_compared(tmp_path: Path) -> None:
    path, state = saved(tmp_path / "ck"), {"w": torch.zeros(2)}
    with pytest.raises(IncompatibleError, match="the checkpoint was saved without config="):
        dc.load(state, path, config={})
    with pytest.raises(IncompatibleError, match="the checkpoint was saved without kind="):
        dc.load(state, path, kind="ddl")
    with pytest.raises(TypeError, match="kind=5"):
        dc.load(state, path, kind=5)  # type: ignore[arg-type]
    assert state["w"].sum() == 0


def test_a_background_save_has_them_also_when_it_is_restored(tmp_path: Path) -> None:
    state = {"w": torch.ones(2)}
    with dc.AsyncSaver(tmp_path / "run") as saver:
        saver.save(state, tmp_path / "run" / "ck", step=1, config={"a": 1}, kind="ddl").result(60)
        with dc.open(tmp_path / "run" / "ck") as ck:
            assert (ck.config, ck.kind) == ({"a": 1}, "ddl")
        with pytest.raises(IncompatibleError, match=r"config\.a: 1 there, 2 here"):
            saver.restore(state, config={"a": 2}, kind="ddl")
        assert saver.restore(state, config={"a": 1}, kind="ddl") == 1


def test_a_run_of_another_kind_does_not_go_on(tmp_path: Path) -> None:
    def start(**options: Any) -> int | None:
        with dc.Checkpointer(
            tmp_path / "run", save=dc.every(steps=1), background=False, **options
        ) as ck:
            state = {"w": torch.ones(2)}
            step = ck.restore(state)
            ck.step((step or 0) + 1, state)
        return step

    assert start(kind="ddl", config={"a": 1}) is None
    with pytest.raises(IncompatibleError, match="has the kind 'ddl', and this run has 'other'"):
        start(kind="other")
    assert start(kind="ddl") == 1
    assert [one.kind for one in dc.checkpoints(tmp_path / "run")] == ["ddl", "ddl"]
    with pytest.raises(TypeError, match="kind=7"):
        start(kind=7)


def test_parameters_are_counted_by_us(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    model.append(torch.nn.Linear(4, 3, bias=False))
    model[0].requires_grad_(False)
    model.append(model[2])
    dc.save({"model": model, "optim": torch.optim.AdamW(model.parameters())}, tmp_path / "ck")
    dc.save({"model": model.state_dict()}, tmp_path / "plain")
    with dc.open(tmp_path / "ck") as ck, dc.open(tmp_path / "plain") as plain:
        assert (ck.num_parameters, ck.num_trainable) == (16 + 8 + 12, 8 + 12)
        assert ck.num_parameters == sum(p.numel() for p in model.parameters())
        assert (plain.num_parameters, plain.num_trainable) == (None, None)


def test_a_parameter_that_is_made_of_others_counts_as_its_whole(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 6)
    weight = Pair(Quantized.of(torch.ones(6, 2)), Quantized.of(torch.ones(6, 2)))
    model.weight = torch.nn.Parameter(weight, requires_grad=False)
    dc.save({"model": model}, tmp_path / "ck")
    with dc.open(tmp_path / "ck") as ck:
        assert "model.weight.__class__" in ck.objects
        assert (ck.num_parameters, ck.num_trainable) == (12 + 6, 6)


def test_show_tells_kind_and_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(tmp_path / "ck", config=CONFIG, kind="ddl")

    def shown(*arguments: str) -> str:
        with pytest.raises(SystemExit):
            main(["show", str(path), *arguments])
        return capsys.readouterr().out

    told = shown()
    assert "kind        ddl" in told
    assert "config      model.dim = 64" in told
    document = json.loads(shown("--json"))
    assert document["kind"] == "ddl"
    assert document["config"]["model"] == {"dim": 64, "heads": [2, 4]}
    (attempt,) = path.iterdir()
    (attempt / "objects.msgpack").write_bytes(b"")
    assert "config      cannot be read" in shown(), "all else is shown"
