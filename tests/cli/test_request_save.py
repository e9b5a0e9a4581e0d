"""`dist-ckpt request-save`, where no job can answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dist_ckpt as dc
from dist_ckpt.cli.commands import request_save as request_save_module
from dist_ckpt.core.commit.records.incarnations import LivenessFile, begin_incarnation
from dist_ckpt.core.format.run_records import AnswerRecord
from dist_ckpt.core.storage.local.local_storage import LocalStorage
from dist_ckpt.runs import save_requests

Result = tuple[int, str, str]


def start(root: Path) -> None:
    """Begin to write into a root, and go on from the newest."""
    there = dc.checkpoints(root) if root.exists() else ()
    restored = there[-1].where if there else None
    begin_incarnation(LocalStorage(), str(root), restored=restored, why="a test", by="job 7")


def test_a_request_needs_a_run(run: Callable[..., Result], root: Path, tmp_path: Path) -> None:
    for where in (tmp_path, tmp_path / "nowhere", root / "s1"):
        code, _, err = run("request-save", where)
        assert code == 3
        assert run("request-save", where, "--dry-run")[::2] == (3, err)
        assert "no job is writing here" in err
    assert not (tmp_path / "nowhere").exists()
    code, _, err = run("request-save", root, "--timeout", "3")
    assert code == 2
    assert "--timeout needs --wait" in err
    assert run("request-save", root, "--wait", "--timeout", "-1")[0] == 2
    assert not (root / ".requests").exists()


def test_a_request_that_nobody_answers_is_taken_back(
    run: Callable[..., Result], root: Path
) -> None:
    start(root)
    code, out, err = run("request-save", root, "--stop", "--wait", "--dry-run")
    assert (code, out) == (0, f"would ask incarnation 1 of the run in {root} to save and to end\n")
    assert not (root / ".requests").exists()
    code, out, err = run("request-save", root, "--wait", "--timeout", "0.1")
    assert code == 6
    assert out == f"asked incarnation 1 of the run in {root} to save\n"
    first, second = err.splitlines()
    assert first == "no heartbeat: it has ended, or has only just begun"
    assert "there was no answer in 0.1 s, and the request is withdrawn: the job has e" in second
    assert [*(root / ".requests").iterdir()] == []
    assert run("request-save", root, "--stop")[:2] == (
        0,
        f"asked incarnation 1 of the run in {root} to save and to end\n",
    )
    assert len([*(root / ".requests").iterdir()]) == 1


@pytest.mark.parametrize(
    ("sign_s", "shows", "told"),
    [
        (60.0, "nothing", "check that the job is alive, and reaches a step"),
        (0.01, "nothing", "last seen at 2"),
        (0.01, "a sign", "alive, but reached no step and no poll"),
        (0.01, "its end", "the job has ended"),
    ],
)
def test_who_asks_is_told_whether_the_job_lives(
    run: Callable[..., Result],
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    sign_s: float,
    shows: str,
    told: str,
) -> None:
    start(root)
    monkeypatch.setattr(request_save_module, "LIVENESS_INTERVAL_S", sign_s)
    sign = LivenessFile(LocalStorage(), str(root), 1)
    sign.renew()
    act = {"nothing": lambda: None, "a sign": sign.renew, "its end": sign.end}[shows]
    real, acted = save_requests.read_answer, list[None]()

    def read_answer(*args: Any) -> AnswerRecord | None:
        if not acted:  # the command waits
            acted.append(act())
        return real(*args)

    monkeypatch.setattr(save_requests, "read_answer", read_answer)
    code, _, err = run("request-save", root, "--wait", "--timeout", "0.1")
    assert acted
    assert code == 6
    assert err.count("\n") == 1
    assert told in err


def test_no_command_takes_requests_for_a_checkpoint(run: Callable[..., Result], root: Path) -> None:
    start(root)
    assert run("request-save", root)[0] == 0
    assert ".requests" not in run("ls", root)[1]
    assert run("gc", root, "--grace", "0")[:2] == (0, "0 removed\n")
    assert run("prune", root, "--keep", "last(1)", "--yes")[0] == 0
    assert run("verify", root)[0] == 0
    assert len([*(root / ".requests").iterdir()]) == 1
