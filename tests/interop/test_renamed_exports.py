"""`rename` at export: the names and tensors of another model, also with operations."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import dist_ckpt as dc
from dist_ckpt.core.checkpoint.open_checkpoint import OpenCheckpoint
from dist_ckpt.core.checkpoint.renamed_checkpoint import rename_checkpoint
from dist_ckpt.core.state.binding.sources.rename import rules_from_json
from dist_ckpt.core.storage import open_storage
from dist_ckpt.interop.dcp import export as dcp_export
from dist_ckpt.interop.hf import export as hf
from dist_ckpt.interop.torch_save import export as torch_export

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

PAIR = ("model.e.{e}.gate", "model.e.{e}.up")
RULES: dict[Any, Any] = {
    PAIR: [dc.Concatenate(), dc.Transpose(), dc.Stack("e"), "model.gate_up"],
    "model.c_attn": [dc.Split(1), ("model.q", "model.k", "model.v")],
    "model.norm": "model.ln",
}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        experts = [{n: torch.nn.Parameter(torch.randn(3, 4)) for n in ("gate", "up")} for _ in "ab"]
        self.e = torch.nn.ModuleList(torch.nn.ParameterDict(expert) for expert in experts)
        self.c_attn = torch.nn.Parameter(torch.randn(4, 12))
        self.norm = torch.nn.Parameter(torch.randn(4))


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Any, Any, Path]:
    model: Any = Net()
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    dc.save({"model": model, "optim": optimizer, "lr": 0.5}, tmp_path / "ck")
    return model, optimizer, tmp_path / "ck"


def expected(model: Any, pick: Any = lambda p: p.detach()) -> dict[str, torch.Tensor]:
    both = [torch.cat([pick(e["gate"]), pick(e["up"])]).T for e in model.e]
    parts = zip("qkv", pick(model.c_attn).chunk(3, 1), strict=True)
    return {"gate_up": torch.stack(both), **dict(parts), "ln": pick(model.norm)}


def check(actual: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    assert actual.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(actual[name], tensor), name


def test_a_hugging_face_folder_has_the_new_tensors(saved: Any, tmp_path: Path) -> None:
    model, _, path = saved
    hf.export_folder(path, tmp_path / "out", rename=RULES, reflink=True)
    check(load_file(tmp_path / "out" / "model.safetensors"), expected(model))
    hf.export_folder(path, tmp_path / "half", rename=RULES, dtype="bf16", include="model.q")
    (half,) = load_file(tmp_path / "half" / "model.safetensors").values()
    assert torch.equal(half, expected(model)["q"].bfloat16())


def test_no_file_is_cloned_under_new_names(tmp_path: Path) -> None:
    weights = {"a": torch.ones(4), "b": torch.zeros(4)}
    dc.save({"model": weights}, tmp_path / "ck")
    swap = {"model.a": "model.b", "model.b": "model.a"}
    hf.export_folder(tmp_path / "ck", tmp_path / "out", rename=swap, reflink=True)
    check(load_file(tmp_path / "out" / "model.safetensors"), {"a": weights["b"], "b": weights["a"]})


def test_windows_smaller_than_a_tensor_cut_it_right(
    saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _, path = saved
    monkeypatch.setattr(hf, "WINDOW_NBYTES", 20)
    hf.export_folder(path, tmp_path / "out", rename=RULES)
    check(load_file(tmp_path / "out" / "model.safetensors"), expected(model))


def test_a_file_of_torch_has_the_new_tensors_and_their_moments(saved: Any, tmp_path: Path) -> None:
    model, optimizer, path = saved
    torch_export.export_file(path, tmp_path / "m.pt", rename=RULES)
    state = torch.load(tmp_path / "m.pt", weights_only=True)
    check(state["model"], expected(model))
    assert state["lr"] == 0.5
    moments = {name: entries["exp_avg"] for name, entries in state["optim"]["state"].items()}
    check(moments, expected(model, lambda p: optimizer.state[p]["exp_avg"]))
    assert {float(entries["step"]) for entries in state["optim"]["state"].values()} == {1.0}
    assert sorted(state["optim"]["param_groups"][0]["params"]) == sorted(moments)


def test_a_folder_of_dcp_has_the_new_tensors(saved: Any, tmp_path: Path) -> None:
    model, optimizer, path = saved
    dcp_export.export_folder(path, tmp_path / "dcp", rename=RULES)
    empty = {name: torch.zeros_like(tensor) for name, tensor in expected(model).items()}
    moments = {name: {"exp_avg": torch.zeros_like(tensor)} for name, tensor in empty.items()}
    state = {"model": empty, "optim": {"state": moments}}
    dcp.load(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    check(empty, expected(model))
    first = {name: entries["exp_avg"] for name, entries in moments.items()}
    check(first, expected(model, lambda p: optimizer.state[p]["exp_avg"]))


def test_an_export_loads_what_a_load_with_the_rules_loads(saved: Any, tmp_path: Path) -> None:
    model, _, path = saved
    hf.export_folder(path, tmp_path / "out", rename=RULES)
    live = {name: torch.zeros_like(tensor) for name, tensor in expected(model).items()}
    dc.load({"model": live}, tmp_path / "out")
    again = {name: torch.zeros_like(tensor) for name, tensor in live.items()}
    dc.load({"model": again}, path, rename=RULES, include="model")
    check(live, again)


@pytest.mark.parametrize("export", [hf.export_folder, torch_export.export_file])
def test_problems_are_named_before_anything_is_written(
    saved: Any, tmp_path: Path, export: Any
) -> None:
    _, _, path = saved
    for rules, words in [
        ({"model.c_attn": [dc.Split(0, (1, 2)), ("a", "b")]}, r"into sizes \[1, 2\]"),
        ({"model.c_attn": [dc.Transpose(), "model.norm"]}, "'model.norm' has that name too"),
        ({"model.x": "y"}, "'model.x' matches no saved name"),
    ]:
        with pytest.raises(dc.IncompatibleError, match=words):
            export(path, tmp_path / "out", rename=rules)
        assert not (tmp_path / "out").exists()
    with pytest.raises(TypeError, match="is not an operation"):
        export(path, tmp_path / "out", rename={"model.norm": ["stack", "x"]})


def test_values_of_each_rank_keep_their_names_and_are_refused(tmp_path: Path) -> None:
    dc.save({"model": {"w": torch.ones(2, 3)}, "seed": dc.PerRank(3)}, tmp_path / "ck")
    rules = {"model.w": [dc.Transpose(), "model.w"], "seed": "model.seed"}
    with pytest.raises(dc.IncompatibleError, match=r"model\.seed has a value for each rank"):
        torch_export.export_file(tmp_path / "ck", tmp_path / "m.pt", rename=rules)
    opened = rename_checkpoint(
        OpenCheckpoint.at(open_storage(tmp_path / "ck")[0], str(tmp_path / "ck")), rules
    )
    assert opened.value_of_rank("model.seed", 0) == 3
    opened.close()


def test_tied_tensors_stay_tied(tmp_path: Path) -> None:
    weight = torch.randn(2, 3)
    dc.save({"model": {"a": weight, "b": weight, "c": torch.ones(2)}}, tmp_path / "ck")
    torch_export.export_file(tmp_path / "ck", tmp_path / "m.pt", rename={"model.c": "model.d"})
    model = torch.load(tmp_path / "m.pt", weights_only=True)["model"]
    assert model["a"].data_ptr() == model["b"].data_ptr()
    assert [*model] == ["a", "b", "d"]


# --- the command line ---------------------------------------------------------------------------


IN_JSON = {
    " + ".join(PAIR): [{"concatenate": 0}, "transpose", {"stack": "e"}, "model.gate_up"],
    "model.c_attn": [{"split": 1}, ["model.q", "model.k", "model.v"]],
    "model.norm": "model.ln",
}


def test_the_command_line_reads_the_rules_from_a_file(
    saved: Any, tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    model, _, path = saved
    rules, out = tmp_path / "rules.json", tmp_path / "out"
    rules.write_text(json.dumps(IN_JSON))
    code, _, err = run("export", "--format", "hf", "--rename", rules, path, out)
    assert code == 0, err
    check(load_file(out / "model.safetensors"), expected(model))


def test_rules_in_json_are_those_of_python() -> None:
    assert rules_from_json(IN_JSON) == RULES
    more = {
        "a": [{"transpose": [0, 1]}, "b"],
        "c": [{"unstack": "e", "dim": 1}, "d.{e}"],
        "f": [{"split": 0, "sizes": [2, 1]}, ["g", "h"]],
        "i": None,
    }
    assert rules_from_json(more) == {
        "a": [dc.Transpose(0, 1), "b"],
        "c": [dc.Unstack("e", 1), "d.{e}"],
        "f": [dc.Split(0, (2, 1)), ("g", "h")],
        "i": None,
    }


@pytest.mark.parametrize(
    "document",
    [
        [],
        {"a": [{"turn": 1}, "b"]},
        {"a": [{}, "b"]},
        {"a": [{"stack": "e", "size": 1}, "b"]},
        {"a": [{"transpose": [1, 2, 3]}, "b"]},
        {"a": [3, "b"]},
        {"a": 3},
        {"a + b": "c"},
    ],
)
def test_rules_in_json_that_make_no_sense_are_refused(
    document: object, tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    with pytest.raises((TypeError, ValueError), match="rename"):
        rules_from_json(document)
    (tmp_path / "rules.json").write_text(json.dumps(document))
    rules = tmp_path / "rules.json"
    code, _, err = run("export", "--format", "hf", "--rename", rules, tmp_path, tmp_path / "o")
    assert code == 2
    assert "rules.json: rename" in err


@pytest.mark.parametrize("text", ['{"a": "b", "a": "c"}', "[" * 5000])
def test_rules_that_occur_twice_or_are_nested_too_deeply_are_refused(
    text: str, tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    (rules := tmp_path / "rules.json").write_text(text)
    code, _, err = run("export", "--format", "hf", "--rename", rules, tmp_path, tmp_path / "o")
    assert code == 2
    assert "rules.json: " in err
