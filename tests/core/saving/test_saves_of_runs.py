"""A save of a start of a run: alike on all ranks, by its own numbers, not beside a newer start."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.commit import commit_protocol
from dist_ckpt.core.commit.attempts import find_checkpoint, list_attempts
from dist_ckpt.core.commit.records.incarnations import Incarnation, begin_incarnation, read_history
from dist_ckpt.core.saving.save import save_together
from dist_ckpt.core.saving.save_options import SaveOptions
from dist_ckpt.core.storage.local.local_storage import LocalStorage
from dist_ckpt.errors import CheckpointError, ConflictError, ExistsError
from dist_ckpt.reports import SaveReport
from dist_ckpt.testing.thread_channel import TEST_CONFIG
from ranks import Outcome, raise_first, try_ranks

WORLD_SIZE = 2


def started(root: Path) -> Incarnation:
    storage = LocalStorage()
    newest = read_history(storage, str(root)).incarnations.get(1)
    restored = None if newest is None else (0, find_checkpoint(storage, f"{root}/step-0")[0])
    return Incarnation(
        str(root),
        begin_incarnation(storage, str(root), restored=restored, why="", by="a job").number,
    )


def try_save(root: Path, step: int, *options: dict[str, Any]) -> list[Outcome]:
    """Save on all ranks, with options that are the same or each rank's own."""

    def run(rank: int, channel: Any, bulk: Any) -> SaveReport:
        session = Session(channel, bulk, TEST_CONFIG)
        own = options[rank % len(options)] if options else {}
        state = {"model": {"w": torch.full((4,), float(step))}}
        return save_together(session, state, f"{root}/step-{step}", SaveOptions(step=step, **own))

    return try_ranks(run, world_size=WORLD_SIZE, harness="threads")


def save(root: Path, step: int, **options: Any) -> SaveReport:
    outcomes = try_save(root, step, options)
    raise_first(outcomes)
    report: SaveReport = outcomes[0].value
    return report


def test_a_start_saves_by_its_own_numbers_and_replaces_what_is_left_behind(tmp_path: Path) -> None:
    first = started(tmp_path)
    assert save(tmp_path, 0, incarnation=first).attempt.startswith("a1000-")
    assert save(tmp_path, 1, incarnation=first).attempt.startswith("a1000-")
    with pytest.raises(ExistsError):
        save(tmp_path, 1, incarnation=first)
    assert save(tmp_path, 1, incarnation=first, overwrite=True).attempt.startswith("a1001-")
    assert save(tmp_path, 1, incarnation=started(tmp_path)).attempt.startswith("a2000-")
    assert len(list_attempts(LocalStorage(), f"{tmp_path}/step-1")) == 1


def test_a_save_of_a_start_has_no_more_exchanges(tmp_path: Path) -> None:
    plain = save(tmp_path, 1)
    of_run = save(tmp_path, 2, incarnation=started(tmp_path), boundary=7)
    assert of_run.exchanges.num == plain.exchanges.num


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (
            ({"incarnation": Incarnation("/runs", 1)}, {"incarnation": Incarnation("/runs", 2)}),
            "incarnation_number: rank 0: 1; rank 1: 2",
        ),
        (
            ({"incarnation": Incarnation("/a", 1)}, {"incarnation": Incarnation("/b", 1)}),
            "root: rank 0: '/a'; rank 1: '/b'",
        ),
        (({"incarnation": Incarnation("/runs", 1)}, {}), "root: rank 0: '/runs'; rank 1: ''"),
        (({"boundary": 4}, {"boundary": 5}), "boundary: rank 0: 4; rank 1: 5"),
        (({"boundary": 4}, {}), "boundary: rank 0: 4; rank 1: None"),
    ],
)
def test_ranks_that_save_for_different_starts_or_boundaries_are_named(
    tmp_path: Path, options: tuple[dict[str, Any], ...], name: str
) -> None:
    for found in try_save(tmp_path, 1, *options):
        assert isinstance(found.error, ValueError)
        assert f"the ranks call save with different {name}" in str(found.error)
    assert os.listdir(tmp_path) == []


def test_an_older_start_is_refused_on_all_ranks_and_leaves_nothing(tmp_path: Path) -> None:
    older = started(tmp_path)
    save(tmp_path, 0, incarnation=older)
    started(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    for found in try_save(tmp_path, 1, {"incarnation": older}):
        assert isinstance(found.error, ConflictError)
        assert "incarnation 2 of this run, a job, has taken over" in str(found.error)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_start_that_is_replaced_while_it_writes_commits_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = started(tmp_path)
    save(tmp_path, 0, incarnation=older)
    before = sorted(tmp_path.rglob("*.safetensors"))
    check = commit_protocol.check_files

    def begin_meanwhile(*args: Any, **options: Any) -> None:
        started(tmp_path)
        check(*args, **options)

    monkeypatch.setattr(commit_protocol, "check_files", begin_meanwhile)
    for found in try_save(tmp_path, 1, {"incarnation": older}):
        assert isinstance(found.error, ConflictError)
        assert "incarnation 2 of this run, a job, has taken over" in str(found.error)
    assert sorted(tmp_path.rglob("*.safetensors")) == before
    with pytest.raises(CheckpointError, match="no checkpoint is here"):
        find_checkpoint(LocalStorage(), f"{tmp_path}/step-1")


def test_a_start_that_is_replaced_after_its_commit_removes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    older = started(tmp_path)
    save(tmp_path, 0, incarnation=older)
    save(tmp_path, 1, incarnation=older)
    commit = commit_protocol.commit

    def commit_and_begin(*args: Any) -> None:
        commit(*args)
        started(tmp_path)

    monkeypatch.setattr(commit_protocol, "commit", commit_and_begin)
    assert save(tmp_path, 1, incarnation=older, overwrite=True).attempt.startswith("a1001-")
    assert len(list_attempts(LocalStorage(), f"{tmp_path}/step-1")) == 2
    assert "incarnation 2 of this run, a job, has taken over" in caplog.text
