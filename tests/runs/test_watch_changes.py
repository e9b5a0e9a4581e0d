"""What changes in a run's folder is told once, in words, and with its reason."""

from __future__ import annotations

from math import nan

import pytest

from dist_ckpt.core.commit import removal
from dist_ckpt.core.commit.attempts import try_abandon
from dist_ckpt.core.commit.commit_protocol import claim
from dist_ckpt.core.commit.records.incarnations import LivenessFile, begin_incarnation
from dist_ckpt.core.commit.records.protections import CheckpointKey
from dist_ckpt.core.commit.records.recorded_checks import put_check
from dist_ckpt.errors import NotFoundError
from dist_ckpt.runs import retention_policy as keep
from dist_ckpt.runs.metrics import put_metrics
from dist_ckpt.runs.retention_policy import RetentionPolicy
from dist_ckpt.runs.watch_changes import RunObservation, changes, kept_by, observe_run
from dist_ckpt.testing.memory_storage import MemoryStorage
from run_folders import ROOT, committed, put


class Watched:
    """A run, and who looks at it now and then."""

    def __init__(self, policy: RetentionPolicy | None = None) -> None:
        self.storage = MemoryStorage({ROOT: None})
        self.policy = policy
        self.before: RunObservation | None = None

    def told(self) -> list[str]:
        """Return what has changed since the last look."""
        look = observe_run(self.storage, ROOT)
        told = [*changes(self.before, look, self.policy)]
        assert [*changes(look, observe_run(self.storage, ROOT), self.policy)] == []
        self.before = look
        return told

    def start(self, restored: CheckpointKey | None = None) -> None:
        begin_incarnation(self.storage, ROOT, restored=restored, why="a test", by="job 7")

    def remove(self, step: int) -> None:
        removal.delete(self.storage, f"{ROOT}/step-{step}")


def test_a_run_is_told_from_its_start() -> None:
    run = Watched()
    assert run.told() == ["no checkpoints yet"]
    run.start()
    assert run.told() == ["incarnation 1, job 7, begins anew: a test"]
    where = committed(run.storage, 5, start=1)
    assert run.told() == ["step 5 is durable: 4.12 kB by 1 rank"]
    committed(run.storage, 6, start=1)
    run.start(where)
    assert run.told() == [
        "incarnation 2, job 7, resumes from step 5: a test",
        "step 6 is durable: 4.12 kB by 1 rank",
        "step 6 is orphaned: the run does not resume from it",
    ]
    sign = LivenessFile(run.storage, ROOT, 2)
    sign.renew()
    assert run.told() == []
    sign.end()
    assert run.told() == ["incarnation 2 has ended"]
    fresh = [*changes(None, observe_run(run.storage, ROOT))]
    assert fresh[1:] == ["2 checkpoints: the newest is of step 5"]


def test_what_is_being_written_is_told_and_what_becomes_of_it() -> None:
    run = Watched()
    run.told()
    claimed = claim(run.storage, f"{ROOT}/step-8", overwrite=False, by="job 7")
    assert run.told() == ["step-8 is being written"]
    assert [*changes(None, observe_run(run.storage, ROOT))][1:] == ["step-8 is being written"]
    look = observe_run(run.storage, ROOT)
    assert look.writing[f"{ROOT}/step-8"].attempt == claimed.attempt
    try_abandon(run.storage, f"{ROOT}/step-8", claimed.attempt, by="job 7", reason="no space")
    (told,) = run.told()
    assert told.startswith("step-8 is abandoned: ")
    committed(run.storage, 8)
    assert run.told() == ["step 8 is durable: 4.12 kB by 1 rank"]
    claim(run.storage, f"{ROOT}/step-8", overwrite=True, by="job 7")
    assert run.told() == ["step-8 is being written"]
    committed(run.storage, 8, start=2)
    assert run.told() == ["step 8 is durable again: 4.12 kB by 1 rank"]


def test_metrics_and_what_keeps_a_checkpoint_are_told() -> None:
    run = Watched()
    where = committed(run.storage, 5)
    run.told()
    put_metrics(run.storage, ROOT, where, {"loss": 0.25, "bad": nan})
    assert run.told() == ["step 5: bad=nan, loss=0.25"]
    put_metrics(run.storage, ROOT, where, {"loss": 0.5})
    assert run.told() == ["step 5: loss=0.5"]
    put(run.storage, where, "pin", {"pinned": True, "why": "the paper"})
    put_check(run.storage, ROOT, where, "full")
    assert run.told() == ["step 5 was checked in full", "step 5 is kept: pinned: the paper"]
    put(run.storage, where, "pin", {"pinned": False})
    assert run.told() == ["step 5 is not kept any more: pinned: the paper"]


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        (None, "it was pruned or deleted"),
        (keep.last(1), "no rule keeps it"),
        (keep.last(2), "although it was kept by last(2)"),
    ],
)
def test_what_is_gone_is_told_with_the_reason(policy: RetentionPolicy | None, why: str) -> None:
    run = Watched(policy)
    for step in (5, 6):
        committed(run.storage, step)
    run.told()
    run.remove(5)
    assert run.told() == [f"step 5 is gone: {why}"]


def test_who_has_removed_it_is_told_where_that_was_seen() -> None:
    run = Watched(keep.last(1))
    where = committed(run.storage, 5)
    committed(run.storage, 6)
    put(run.storage, where, "mark", {"0" * 16: "step-5"})
    run.told()
    run.remove(5)
    (told,) = run.told()
    assert told.startswith("step 5 is gone: no rule keeps it; removed by process ")


def test_what_was_left_behind_or_of_a_dead_save_is_gone_for_that() -> None:
    run = Watched(keep.last(5))
    run.start()
    where = committed(run.storage, 5, start=1)
    committed(run.storage, 6, start=1)
    run.start(where)
    claimed = claim(run.storage, f"{ROOT}/step-9", overwrite=False, by="job 7")
    run.told()
    try_abandon(run.storage, f"{ROOT}/step-9", claimed.attempt, by="job 7", reason="dead")
    run.told()
    run.remove(6)
    removal.remove_garbage(run.storage, f"{ROOT}/step-9", grace_s=0)
    run.storage.remove(f"{ROOT}/step-9")
    assert run.told() == [
        "step-9 is gone: what was left of a save was removed",
        "step 6 is gone: it was orphaned",
    ]


def test_what_keeps_each_is_told_without_a_policy_as_well() -> None:
    run = Watched()
    for step in (5, 6):
        committed(run.storage, step)
    look = observe_run(run.storage, ROOT)
    assert kept_by(look, None) == {f"{ROOT}/step-5": (), f"{ROOT}/step-6": ("the newest",)}
    told = kept_by(look, keep.last(2))
    assert told[f"{ROOT}/step-5"] == ("last(2)",)


def test_a_start_that_cannot_be_read_is_told_once() -> None:
    run = Watched(keep.last(1))
    run.start()
    committed(run.storage, 5, start=1)
    run.told()
    damaged = {**run.storage.tree(), f"{ROOT}/.incarnations/2.json": b"{}"}
    run.storage = MemoryStorage(damaged)
    (told,) = run.told()
    assert told.startswith("the orphaned checkpoints are unknown: /runs/.incarnations/2.json: ")
    look = observe_run(run.storage, ROOT)
    assert (look.newest, kept_by(look, None)) == (None, {})
    run.remove(5)
    assert run.told() == ["step 5 is gone: it was pruned or deleted"]


def test_what_is_no_run_is_refused() -> None:
    run = Watched()
    committed(run.storage, 5)
    with pytest.raises(ValueError, match="is one checkpoint: give the folder that it is in"):
        observe_run(run.storage, f"{ROOT}/step-5")
    with pytest.raises(NotFoundError):
        observe_run(run.storage, "/nowhere")
