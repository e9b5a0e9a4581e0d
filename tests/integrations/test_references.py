"""Trackers are told of checkpoints by reference; what is wrong with them is not the run's."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import pytest

import dist_ckpt as dc
from dist_ckpt.integrations import references
from dist_ckpt.integrations.references import Reference, TrackerThread, reference_of

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]


class Told:
    """A tracker that notes what it is told; raises, or hangs, if it is asked to."""

    name = "the tracker"

    def __init__(self, *, fails: int = 0, hangs: threading.Event | None = None) -> None:
        self.steps: list[int | None] = []
        self.fails, self.hangs = fails, hangs

    def put(self, reference: Reference) -> None:
        if self.hangs is not None:
            self.hangs.wait()
        if self.fails:
            self.fails -= 1
            raise ConnectionError("no route to the tracker")
        self.steps.append(reference.step)


# A tracker that hangs does so for ever: this is met only by who waits for it.
HANG_S = 60.0


def train(root: Path, log: TrackerThread, until: int = 4, *, background: bool = False) -> float:
    """Train some steps, each saved; return how long that took, with its close."""
    state = {"model": torch.nn.Linear(2, 2)}
    begun = time.monotonic()
    with dc.Checkpointer(root, save=dc.every(steps=1), on_commit=log, background=background) as ck:
        for _ in ck.steps(state, until=until):
            pass
    return time.monotonic() - begun


def test_a_reference_names_the_attempt_and_the_digest_of_its_index(tmp_path: Path) -> None:
    path = tmp_path / "a run" / "step-00000003"
    dc.save({"x": torch.arange(4)}, path, step=3)
    with dc.open(path) as found:
        reference = reference_of(found)
    index = Path(unquote(urlparse(reference.index).path))
    assert index.parent.parent == path
    assert reference.digest == f"sha256:{hashlib.sha256(index.read_bytes()).hexdigest()}"
    assert (reference.step, reference.world_size, reference.path) == (3, 1, str(path))
    dc.save({"x": torch.arange(4)}, path, step=3, overwrite=True)
    with dc.open(path) as found:
        assert reference_of(found) != reference


def test_a_tracker_that_raises_is_named_once_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = Told(fails=2)
    with caplog.at_level(logging.WARNING, "dist_ckpt"), TrackerThread(told) as log:
        train(tmp_path / "run", log)
    assert told.steps == [3, 4]
    (message,) = [one.getMessage() for one in caplog.records]
    assert "step 1 was not sent to the tracker" in message
    assert "no route to the tracker" in message
    assert dc.Run(tmp_path / "run").find("@latest").step == 4


def test_a_tracker_that_hangs_delays_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate = threading.Event()
    told = Told(hangs=gate)
    log = TrackerThread(told)
    try:
        assert train(tmp_path / "run", log) < HANG_S
        begun = time.monotonic()
        with caplog.at_level(logging.WARNING, "dist_ckpt"):
            log.close(0.2)
        assert time.monotonic() - begun < HANG_S
        assert "step 1, 2, 3, 4 was not sent to the tracker within 0.2 s" in caplog.text
        assert dc.Run(tmp_path / "run").find("@latest").step == 4
    finally:
        gate.set()


def test_of_too_many_that_wait_the_oldest_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(references, "MAX_WAITING", 2)
    gate = threading.Event()
    told = Told(hangs=gate)
    with TrackerThread(told) as log, caplog.at_level(logging.WARNING, "dist_ckpt"):
        train(tmp_path / "run", log)
        gate.set()
    assert told.steps[-2:] == [3, 4]
    assert "step 2 is not sent to the tracker" in caplog.text


def test_a_closed_log_says_so(tmp_path: Path) -> None:
    dc.save({"x": 1}, tmp_path / "a", step=1)
    log = TrackerThread(Told())
    log.close()
    with dc.open(tmp_path / "a") as found, pytest.raises(ValueError, match="close it after"):
        log(found)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_mlflow_has_each_checkpoint_and_the_newest_in_its_tags(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    from dist_ckpt.integrations.mlflow import log_to_mlflow

    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/tracked.db")
    experiment = client.create_experiment("e", artifact_location=(tmp_path / "kept").as_uri())
    run_id = client.create_run(experiment).info.run_id
    with log_to_mlflow(run_id, client=client) as log:
        train(tmp_path / "run", log)
    tags = client.get_run(run_id).data.tags
    assert tags["checkpoint.step"] == "4"
    there = client.list_artifacts(run_id, "checkpoints")
    assert [one.path for one in there] == [f"checkpoints/step-{n:08}.json" for n in range(1, 5)]
    (file,) = (tmp_path / "kept").rglob("step-00000002.json")
    record = json.loads(file.read_text())
    loaded: dict[str, Any] = {"model": torch.nn.Linear(2, 2)}
    assert dc.load(loaded, record["path"], strict=False)
    assert not [*(tmp_path / "kept").rglob("*.safetensors")]


@pytest.mark.slow
def test_the_page_leads_from_zero_to_a_resumed_run(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    page = (ROOT / "docs" / "trackers.md").read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```$", page, flags=re.M | re.S)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    for until in (12, 20):
        done = subprocess.run(
            [sys.executable, "-c", program.replace("until=12", f"until={until}")],
            env=environ,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-6000:]
        (record,) = tmp_path.rglob(f"checkpoints/step-{until:08}.json")
        assert dc.verify(json.loads(record.read_text())["path"]).ok


@pytest.mark.slow
def test_an_mlflow_that_is_away_fails_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mlflow = pytest.importorskip("mlflow")
    from dist_ckpt.integrations.mlflow import log_to_mlflow

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    client = mlflow.MlflowClient("http://127.0.0.1:9")
    with (
        caplog.at_level(logging.WARNING, "dist_ckpt"),
        log_to_mlflow("0" * 32, client=client) as log,
    ):
        train(tmp_path / "run", log)
    assert "step 1 was not sent to MLflow" in caplog.text
    assert dc.Run(tmp_path / "run").find("@latest").step == 4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wandb_has_a_reference_to_each_index_and_no_weights(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    from dist_ckpt.integrations.wandb import log_to_wandb

    run = wandb.init(mode="offline", project="p", dir=tmp_path, settings={"silent": True})
    with log_to_wandb(run) as log:
        train(tmp_path / "run", log, until=2)
    run.finish()
    (record,) = (tmp_path / "wandb").rglob("*.wandb")
    written = record.read_bytes()
    for step in (1, 2):
        with dc.open(tmp_path / "run" / f"step-{step:08}") as found:
            reference = reference_of(found)
        assert reference.digest.encode() in written
        assert f"step-{step}".encode() in written
    assert not [*(tmp_path / "wandb").rglob("*.safetensors")]
