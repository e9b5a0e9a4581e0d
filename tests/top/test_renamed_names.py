"""Public names that 0.2.0 has changed are refused, each with its new name in the message."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")

import dist_ckpt as dc
from dist_ckpt.cli import main
from dist_ckpt.interop import dcp
from dist_ckpt.settings import Settings

FUNCTIONS: list[tuple[Callable[..., object], str, str]] = [
    (dc.save, "frozen", "include_frozen"),
    (dc.save, "reuse", "link_unchanged"),
    (dc.save, "carry", "carry_over"),
    (dc.load, "frozen", "include_frozen"),
    (dcp.load, "frozen", "include_frozen"),
    (dc.AsyncSaver, "settle_s", "drain_timeout_s"),
    (dc.AsyncSaver.save, "frozen", "include_frozen"),
    (dc.AsyncSaver.save, "reuse", "link_unchanged"),
    (dc.AsyncSaver.restore, "frozen", "include_frozen"),
    (dc.Checkpointer, "frozen", "include_frozen"),
    (dc.Checkpointer, "reuse", "link_unchanged"),
    (dc.Checkpointer, "same", "config_must_match"),
    (Settings, "silence_s", "heartbeat_timeout_s"),
    (Settings, "arrive_s", "join_timeout_s"),
    (Settings, "warn_s", "join_warning_s"),
    (Settings, "appear_s", "visibility_timeout_s"),
]
VARIABLES = [
    ("DIST_CKPT_SILENCE_S", "DIST_CKPT_HEARTBEAT_TIMEOUT_S"),
    ("DIST_CKPT_ARRIVE_S", "DIST_CKPT_JOIN_TIMEOUT_S"),
    ("DIST_CKPT_WARN_S", "DIST_CKPT_JOIN_WARNING_S"),
    ("DIST_CKPT_APPEAR_S", "DIST_CKPT_VISIBILITY_TIMEOUT_S"),
]
CLASSES = [
    ("dist_ckpt", "FileLayout", "FileContents"),
    ("dist_ckpt", "HeldShard", "ShardPlacement"),
    ("dist_ckpt", "Stopped", "TrainingStopped"),
    ("dist_ckpt", "ValueDifference", "ObjectDifference"),
    ("dist_ckpt.integrations.lightning", "FitCheckpoint", "LightningCheckpoint"),
    ("dist_ckpt.integrations.ray_train", "CommitsForRay", "RayCheckpointReporter"),
    ("dist_ckpt.integrations.references", "ReferenceLog", "TrackerThread"),
    ("dist_ckpt.keep", "Keep", "RetentionPolicy"),
]


@pytest.mark.parametrize(("function", "old", "new"), FUNCTIONS)
def test_an_old_parameter_is_refused(function: Callable[..., object], old: str, new: str) -> None:
    parameters = inspect.signature(function).parameters
    assert new in parameters
    assert old not in parameters
    with pytest.raises(TypeError, match=f"^{old}= is called {new}= since dist_ckpt 0.2.0"):
        function(**{old: 1})


@pytest.mark.parametrize(("old", "new"), VARIABLES)
def test_an_old_variable_is_refused_also_next_to_the_new_one(old: str, new: str) -> None:
    for others in ({}, {new: "61"}):
        with pytest.raises(ValueError, match=f"^{old} is called {new} since .* unset {old}$"):
            Settings.from_environment({old: "61", **others})
    assert Settings.from_environment({new: "61"}) != Settings.from_environment({})


def test_saves_and_the_command_refuse_an_old_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dc.save({"a": 1}, tmp_path / "run" / "1", step=1)
    monkeypatch.setenv("DIST_CKPT_SILENCE_S", "60")
    with pytest.raises(SystemExit) as ended:
        main(["ls", str(tmp_path / "run")])
    assert ended.value.code == 2
    assert "DIST_CKPT_SILENCE_S is called DIST_CKPT_HEART" in capsys.readouterr().err
    for call in (dc.AsyncSaver, lambda: dc.save({"a": 1}, tmp_path / "run" / "2")):
        with pytest.raises(ValueError, match="DIST_CKPT_SILENCE_S is called"):
            call()


def test_an_old_method_is_refused() -> None:
    with dc.AsyncSaver() as saver, pytest.raises(AttributeError, match=r"write AsyncSaver\.detach"):
        saver.leave()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("package", "old", "new"),
    [
        ("dist_ckpt.interop", "dcp_export", "dcp"),
        ("dist_ckpt.interop", "torch_export", "torch_save"),
        ("dist_ckpt", "html_report", "tools.report"),
    ],
)
def test_an_old_module_is_refused(package: str, old: str, new: str) -> None:
    with pytest.raises(ImportError, match=rf"^{package}\.{old} is called {new} since"):
        exec(f"from {package} import {old}", {})
    importlib.import_module(f"{package}.{new}")


@pytest.mark.parametrize(("module", "old", "new"), CLASSES)
def test_an_old_class_is_refused_however_it_is_asked_for(module: str, old: str, new: str) -> None:
    if module.endswith("ray_train"):
        pytest.importorskip("ray")
    found = dc.keep if module == "dist_ckpt.keep" else importlib.import_module(module)
    text = rf"^{module}\.{old} is called {new} since dist_ckpt 0\.2\.0: write {module}\.{new}$"
    with pytest.raises(AttributeError, match=text):
        getattr(found, old)
    assert new in getattr(found, "__all__", vars(found))
    assert not hasattr(found, old)
    with pytest.raises(AttributeError, match="has no attribute 'Other'"):
        found.Other  # noqa: B018
    if found is not dc.keep:  # it is no module that can be imported under this name
        with pytest.raises(ImportError, match=text):
            exec(f"from {module} import {old}", {})
        with pytest.raises(ImportError, match="cannot import name 'Other'"):
            exec(f"from {module} import Other", {})
