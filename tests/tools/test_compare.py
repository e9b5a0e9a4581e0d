"""The runs of a sweep side by side: what is known of each, and what is wrong with it."""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_ckpt as dc
from dist_ckpt.cli import main
from dist_ckpt.core.storage.local.local_storage import LocalStorage
from dist_ckpt.errors import NotFoundError, StorageError

CONFIG = {"lr": 0.1, "model": {"dim": 3}}


def variant(root: Path, kind: str, dim: int, losses: list[float]) -> None:
    """Save steps of a run, each with what was measured of it."""
    model = torch.nn.Linear(dim, 1)
    config = {**CONFIG, "model": {"dim": dim}}
    for step, loss in enumerate(losses, 1):
        dc.save({"model": model}, root / f"step-{step}", step=step, kind=kind, config=config)
        dc.Run(root).metrics(step, {"loss": loss, "acc": 1 - loss})


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs, one that has saved nothing yet, one that is damaged, and one never measured."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    root = tmp_path / "sweep"
    variant(root / "a-ddl", "ddl", 3, [0.5, 0.2, 0.3])
    variant(root / "b-base", "baseline", 7, [0.1])
    (root / "c-empty").mkdir()
    variant(root / "d-hurt", "ddl", 3, [0.4])
    index = next((root / "d-hurt").glob("step-1/a*/index.json"))
    index.write_bytes(b"{}")
    dc.save({"w": torch.ones(2)}, root / "e-bare" / "only")
    (root / "notes.txt").write_text("no run")
    return root


def test_a_tuple_of_a_configuration_is_like_a_list(tmp_path: Path) -> None:
    for name, betas in (("a", [0.9, 0.99]), ("b", (0.9, 0.99))):
        dc.save({}, tmp_path / name / "step-1", step=1, config={"betas": betas, "of": {1: 2}})
    assert dc.compare(tmp_path).differing == {}


def test_runs_are_sorted_by_their_best_and_none_is_hidden(sweep: Path) -> None:
    found = dc.compare(sweep, min="loss")
    assert [run.name for run in found.runs] == ["b-base", "a-ddl", "c-empty", "d-hurt", "e-bare"]
    base, ddl, empty, hurt, bare = found.runs
    assert (ddl.best, ddl.best_step, ddl.step, ddl.num_checkpoints) == (0.2, 2, 3, 3)
    assert ddl.best_path == str(sweep / "a-ddl" / "step-2")
    assert (ddl.kind, ddl.num_parameters, ddl.num_trainable) == ("ddl", 4, 4)
    assert ddl.metrics == {"loss": 0.3, "acc": 0.7}
    assert base.config == {"lr": 0.1, "model": {"dim": 7}}
    assert (empty.problems, empty.step) == (("no checkpoint",), None)
    assert "no checkpoint" in hurt.problems[0]
    assert "step-1 is damaged" in hurt.problems[1]
    assert (bare.step, bare.num_checkpoints, bare.kind, bare.problems) == (None, 1, None, ())
    assert found.differing == {"model.dim": {"a-ddl": "3", "b-base": "7"}}
    assert [run.name for run in dc.compare(sweep, max="loss").runs][:2] == ["a-ddl", "b-base"]
    assert [run.name for run in dc.compare(sweep).runs][:2] == ["a-ddl", "b-base"]


def test_runs_and_checkpoints_may_be_named_one_by_one(sweep: Path, tmp_path: Path) -> None:
    shutil.copytree(sweep / "a-ddl", tmp_path / "other" / "a-ddl")
    runs = [sweep / "a-ddl", tmp_path / "other" / "a-ddl", sweep / "b-base" / "step-1", sweep]
    found = dc.compare(*runs[:3], sweep / "a-ddl")
    assert [run.name for run in found.runs] == sorted([str(runs[0]), str(runs[1]), "step-1"])
    for path in (tmp_path / "gone", sweep / "notes.txt", sweep / "c-empty"):
        with pytest.raises(NotFoundError):
            dc.compare(path)
    with pytest.raises(ValueError, match="give the folders"):
        dc.compare()
    with pytest.raises(ValueError, match="give one of them"):
        dc.compare(sweep, min="a", max="b")


def test_a_checkpoint_in_a_folder_of_runs_hides_none_of_them(sweep: Path) -> None:
    before = [run.name for run in dc.compare(sweep).runs]
    dc.save({"w": torch.ones(2)}, sweep / "mean", step=3)
    dc.Run(sweep).pin(3, "the paper")
    assert [run.name for run in dc.compare(sweep).runs] == [*before, "mean"]
    # A run with a backup, or with a folder of other checkpoints in it, is one run.
    shutil.copytree(sweep / "b-base", sweep / "a-ddl" / "backup")
    assert [run.name for run in dc.compare(sweep / "a-ddl").runs] == ["a-ddl"]
    with dc.Checkpointer(sweep / "f-own", save=dc.every(steps=1), background=False) as ck:
        assert len([*ck.steps({"w": torch.ones(2)}, until=1)]) == 1
    shutil.copytree(sweep / "b-base", sweep / "f-own" / "evaluated")
    assert [run.name for run in dc.compare(sweep / "f-own").runs] == ["f-own"]


@pytest.mark.parametrize("metric", [5, "", ["loss"]])
def test_what_is_no_name_of_a_metric_is_refused(sweep: Path, metric: Any) -> None:
    with pytest.raises(TypeError, match="is not the name of a metric: give a text"):
        dc.compare(sweep, max=metric)


def test_what_is_damaged_of_the_newest_is_said_and_all_else_is_there(sweep: Path) -> None:
    next((sweep / "a-ddl").glob("step-3/a*/objects.msgpack")).write_bytes(b"")
    run = dc.compare(sweep / "a-ddl", min="loss").runs[0]
    assert (run.kind, run.best, run.config) == ("ddl", 0.2, None)
    assert "objects.msgpack" in run.problems[0]


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Return what runs a command and returns its exit code and output."""

    def run(*arguments: object) -> tuple[int, str]:
        with pytest.raises(SystemExit) as done:
            main([str(one) for one in arguments])
        return int(done.value.code or 0), capsys.readouterr().out

    return run


def test_a_run_that_may_not_be_read_says_so_beside_the_others(
    sweep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LocalStorage.list

    def list_it(storage: LocalStorage, folder: str, *, follow: bool = True) -> Any:
        if folder.endswith("c-empty"):
            raise StorageError(f"{folder}: Permission denied")
        return real(storage, folder, follow=follow)

    monkeypatch.setattr(LocalStorage, "list", list_it)
    found = {run.name: run for run in dc.compare(sweep).runs}
    assert "Permission denied" in found["c-empty"].problems[0]
    assert found["a-ddl"].step == 3


def test_the_command_prints_a_table_json_and_csv(
    sweep: Path, told: Callable[..., tuple[int, str]]
) -> None:
    code, out = told("compare", sweep, "--min", "loss")
    lines = out.splitlines()
    assert code == 0
    assert lines[0].split()[:3] == ["RUN", "KIND", "PARAMETERS"]
    assert lines[1].split()[:7] == ["b-base", "baseline", "8", "1", "1", "0.1", "1"]
    assert lines[-1] == "config.model.dim differs: a-ddl: 3, b-base: 7"
    code, out = told("compare", sweep, "--min", "los")
    assert (code, out.splitlines()[-2]) == (
        *(0, "no run has a value of 'los'; the metrics there are: acc, loss"),
    )
    _, out = told("compare", sweep, "--max", "acc", "--json")
    document = json.loads(out)
    assert document["schema"] == "dist-ckpt.compare/2"
    assert document["runs"][0]["best"] == 0.9
    assert document["differing"] == {"model.dim": {"a-ddl": "3", "b-base": "7"}}
    _, out = told("compare", sweep, "--min", "loss", "--csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [row["name"] for row in rows] == ["b-base", "a-ddl", "c-empty", "d-hurt", "e-bare"]
    assert (rows[1]["best"], rows[1]["metrics.acc"], rows[1]["config.model.dim"]) == (
        *("0.2", "0.7", "3"),
    )
    assert rows[2]["problems"] == "no checkpoint"
    dc.Run(sweep / "b-base").metrics(1, {"loss": -math.inf, "acc": math.nan})
    dc.save({"w": torch.ones(2)}, sweep / "e-bare/only", config={"at": {"x"}}, overwrite=True)
    _, out = told("compare", sweep, "--min", "loss", "--json")
    first, *_, last = json.loads(out, parse_constant=pytest.fail)["runs"]
    assert (first["best"], first["metrics"]["acc"]) == ("-inf", "nan")
    assert last["config"] == {"at": ["x"]}
    assert told("compare", sweep, "--json", "--csv")[0] == 2
    assert told("compare", sweep / "gone")[0] == 3
