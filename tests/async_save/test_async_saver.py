"""What an AsyncSaver is made with, and by whom it is used, is checked before anything is begun."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dist_ckpt as dc
from dist_ckpt.async_save.snapshots import job_folder


@pytest.fixture(autouse=True)
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder in the place of shared memory: nothing is in it after the test."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(job_folder, "SHARED_MEMORY", str(tmp_path))
    yield tmp_path
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("arguments", "kind", "match"),
    [
        ({"job": 5}, TypeError, "job=5: .* Pass a str"),
        ({"job": ""}, ValueError, "job='': .* Pass a str"),
        ({"job": "a/b"}, ValueError, "job='a/b': .* Pass a str"),
        ({"root": 5}, TypeError, "root=5: .* pass a str or a pathlib.Path"),
        ({"root": ""}, ValueError, "root='': .* pass the path of a folder"),
        ({"root": "s3://a", "job": "a"}, ValueError, "root='s3://a': .* only file systems"),
        ({"when_busy": "now"}, ValueError, "when_busy='now': give \"wait\""),
        ({"when_busy": None}, ValueError, 'when_busy=None: give "wait"'),
        (
            {"drain_timeout_s": "60"},
            TypeError,
            "drain_timeout_s='60': give a finite number of seconds",
        ),
        (
            {"drain_timeout_s": None},
            TypeError,
            "drain_timeout_s=None: give a finite number of seconds",
        ),
        (
            {"drain_timeout_s": True},
            TypeError,
            "drain_timeout_s=True: give a finite number of seconds",
        ),
        (
            {"drain_timeout_s": -1},
            ValueError,
            "drain_timeout_s=-1: give a finite number of seconds",
        ),
        (
            {"drain_timeout_s": float("nan")},
            ValueError,
            "drain_timeout_s=nan: give a finite number",
        ),
        (
            {"drain_timeout_s": float("inf")},
            ValueError,
            "drain_timeout_s=inf: give a finite number",
        ),
        ({"max_bytes_per_s": "1e9"}, TypeError, "max_bytes_per_s='1e9': give a number, 16384"),
        ({"max_bytes_per_s": 0}, ValueError, "max_bytes_per_s=0: give a number, 16384"),
        ({"max_bytes_per_s": float("nan")}, ValueError, "max_bytes_per_s=nan: give a number"),
        ({"group": "world"}, ValueError, "group= is given, but torch.distributed is not"),
    ],
)
def test_an_argument_that_makes_no_sense_is_named_with_what_to_give(
    arguments: dict[str, Any], kind: type[Exception], match: str
) -> None:
    with pytest.raises(kind, match=match):
        dc.AsyncSaver(**arguments)


class Interrupting:
    """What stands in for a job: it calls the saver while that closes it."""

    def __init__(self) -> None:
        self.saver: dc.AsyncSaver
        self.told: list[str] = []

    def close(self, *, keep: bool) -> None:
        for call in (lambda: self.saver.restore({}), lambda: self.saver.save({}, "/nowhere")):
            with pytest.raises(ValueError, match="is in a call already") as told:
                call()
            self.told.append(str(told.value))
        self.saver.close()  # again: that is no error


def test_nothing_is_begun_while_a_saver_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Interrupting()
    monkeypatch.setattr("dist_ckpt.async_save.async_saver.Job", lambda hello, drain_timeout_s: job)
    job.saver = dc.AsyncSaver(job="a")
    job.saver.close()
    assert len(job.told) == 2
    with pytest.raises(ValueError, match="is closed: make another one"):
        job.saver.save({}, "/nowhere")
