"""A run's checkpoints as an evaluator in another process has them."""

from __future__ import annotations

import math
import shutil
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

import dist_ckpt as dc
from dist_ckpt.core.commit.records import protections
from dist_ckpt.core.commit.records.incarnations import begin_incarnation
from dist_ckpt.core.commit.records.leases import renewed_lease
from dist_ckpt.core.commit.records.protection_protocol import CheckpointRef
from dist_ckpt.core.commit.records.record_store import read_annotations
from dist_ckpt.core.storage.local.local_storage import LocalStorage
from dist_ckpt.errors import ConflictError, NotFoundError
from dist_ckpt.runs.selectors import checkpoint_ref_of
from run_folders import committed


@pytest.fixture
def run(tmp_path: Path) -> dc.Run:
    """Return a run with checkpoints of three steps."""
    for step in (1, 2, 3):
        committed(LocalStorage(), step, root=str(tmp_path / "run"))
    return dc.Run(tmp_path / "run")


def found(run: dc.Run) -> dict[int | None, dc.RunCheckpoint]:
    return {one.step: one for one in run.checkpoints}


def test_a_step_above_another_is_waited_for(run: dc.Run, tmp_path: Path) -> None:
    assert run.wait_for_newer() == 3
    assert run.wait_for_newer(after=2) == 3
    assert run.wait_for_newer(after=3, timeout_s=0.0) is None
    timer = threading.Timer(0.05, committed, (LocalStorage(), 7), {"root": str(tmp_path / "run")})
    timer.start()
    assert run.wait_for_newer(after=3, timeout_s=30.0, poll_s=0.01) == 7
    timer.join()
    assert dc.Run(tmp_path / "later").wait_for_newer(timeout_s=0.0) is None


@pytest.fixture
def prune_before_leases(run: dc.Run, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Commit these steps and remove all older ones, one before each lease that is taken."""
    steps = [*range(4, 24)]  # more than the tries of one selection

    def prune_and_lease(subject: CheckpointRef, ttl_s: float) -> AbstractContextManager[None]:
        if steps:
            committed(LocalStorage(), steps.pop(0), root=run.root)
            run.prune(dc.keep.last(1))
        return renewed_lease(subject, ttl_s)

    monkeypatch.setattr("dist_ckpt.runs.selectors.renewed_lease", prune_and_lease)
    return steps


@pytest.mark.usefixtures("prune_before_leases")
def test_a_newer_checkpoint_is_leased_though_older_ones_are_pruned(run: dc.Run) -> None:
    with run.lease_newer(after=2, timeout_s=60, poll_s=0.001) as checkpoint:
        assert checkpoint is not None
        assert checkpoint.step == 23
        assert len(found(run)[23].leases) == 1
        with pytest.raises(ConflictError, match="leased by process"):
            dc.delete(checkpoint.path)
    assert found(run)[23].leases == ()


@pytest.mark.usefixtures("prune_before_leases")
def test_a_step_that_is_waited_for_and_then_leased_may_be_pruned_in_between(run: dc.Run) -> None:
    step = run.wait_for_newer(after=2)
    assert step == 3
    with pytest.raises(NotFoundError, match="of step 3; the steps there are: 4"), run.lease(step):
        pass


def test_nothing_newer_is_leased_before_the_time_is_over(run: dc.Run, tmp_path: Path) -> None:
    for after in (3, 4):
        with run.lease_newer(after=after, timeout_s=0) as checkpoint:
            assert checkpoint is None
    with dc.Run(tmp_path / "later").lease_newer(timeout_s=0) as checkpoint:
        assert checkpoint is None
    with run.lease_newer(timeout_s=math.inf) as checkpoint:
        assert checkpoint is not None
        assert checkpoint.step == 3


def test_a_lease_waits_for_a_run_that_begins_later(tmp_path: Path) -> None:
    root = str(tmp_path / "later")
    timer = threading.Timer(0.05, committed, (LocalStorage(), 7), {"root": root})
    timer.start()
    with dc.Run(root).lease_newer(timeout_s=30, poll_s=0.01) as checkpoint:
        assert checkpoint is not None
        assert checkpoint.step == 7
    timer.join()


def test_a_run_that_is_removed_while_it_is_served_has_nothing_newer(run: dc.Run) -> None:
    with run.lease_newer() as checkpoint:
        assert checkpoint is not None
        shutil.rmtree(run.root)
        with pytest.raises(NotFoundError, match="was replaced or deleted while it was read"):
            checkpoint[next(iter(checkpoint))][...]
    with run.lease_newer(after=3, timeout_s=0) as checkpoint:
        assert checkpoint is None
    assert run.wait_for_newer(after=3, timeout_s=0) is None


def test_an_error_in_the_body_ends_the_lease_and_is_raised(run: dc.Run) -> None:
    with pytest.raises(NotFoundError, match=r"^of the body$"), run.lease_newer():
        raise NotFoundError("of the body")
    assert found(run)[3].leases == ()


def test_what_is_held_cannot_be_removed_until_the_end(run: dc.Run) -> None:
    with run.lease("@latest") as checkpoint:
        assert checkpoint.step == 3
        assert len(found(run)[3].leases) == 1
        with pytest.raises(ConflictError, match="leased by process"):
            dc.delete(checkpoint.path)
    assert found(run)[3].leases == ()
    dc.delete(f"{run.root}@latest")
    assert [one.step for one in run.checkpoints] == [1, 2]


def test_a_hold_is_renewed_as_long_as_it_lasts(run: dc.Run) -> None:
    def num_facts() -> int:
        return len(read_annotations(LocalStorage(), run.root))

    with run.lease(2, ttl_s=0.3):
        waited = threading.Event()
        for _ in range(1000):
            if num_facts() > 2:
                break
            waited.wait(0.01)
        assert num_facts() > 2
    assert found(run)[2].leases == ()


def test_a_hold_outlives_a_prune_that_has_seen_it(
    run: dc.Run, caplog: pytest.LogCaptureFixture
) -> None:
    """A renewal finds the mark of who would remove the checkpoint, and who takes it back."""
    subject, waited = checkpoint_ref_of(LocalStorage(), run.find(2)), threading.Event()

    def wait_until(is_so: Callable[[], bool]) -> None:
        for _ in range(1000):
            if is_so():
                return
            waited.wait(0.01)
        raise AssertionError

    with run.lease(2, ttl_s=0.6):
        mark = subject.put(protections.DELETION_INTENT, {"0" * 16: "step-2"})
        wait_until(lambda: "the lease could not be renewed" in caplog.text)
        subject.withdraw(mark)
        wait_until(lambda: any(fact.name.number > 1 for fact in subject.annotations()))
        assert len(run.find(2).leases) == 1


def test_metrics_pins_and_tags_are_put(run: dc.Run) -> None:
    run.metrics(1, {"val/loss": 0.5})
    run.metrics("@1", {"val/loss": float("inf"), "acc": 1})
    run.pin(1, "the paper")
    run.tag("@max:acc", "best")
    run.tag(2, "best")
    assert found(run)[1].metrics == {"val/loss": float("inf"), "acc": 1.0}
    assert (found(run)[1].pin, found(run)[1].tags, found(run)[2].tags) == (
        "the paper",
        (),
        ("best",),
    )
    run.unpin(1)
    run.untag("best")
    assert (found(run)[1].is_pinned, found(run)[2].tags) == (False, ())
    with pytest.raises(NotFoundError, match="no checkpoint has the tag 'best'"):
        run.untag("best")


def test_facts_go_to_the_root_also_from_a_run_that_was_given_one_of_its_checkpoints(
    run: dc.Run,
) -> None:
    one = dc.Run(run.find(2).path)
    one.metrics(2, {"acc": 1.0})
    one.tag(2, "best")
    assert (found(run)[2].metrics, found(run)[2].tags) == ({"acc": 1.0}, ("best",))
    assert not Path(run.find(2).path, ".annotations").exists()


def test_a_prune_by_a_metric_that_nobody_gave_removes_nothing(run: dc.Run) -> None:
    run.metrics(2, {"val/loss": 1})
    with pytest.raises(
        NotFoundError, match=r"metric 'val/los', so nothing is removed; there are val"
    ):
        run.prune(dc.keep.best(1, min="val/los", unmeasured=0))
    assert len(run.checkpoints) == 3
    with pytest.raises(TypeError, match=r"give a policy such as dc\.keep\.last\(3\)"):
        run.prune("last(3)")  # type: ignore[arg-type]


def test_a_prune_keeps_the_newest_that_is_whole(tmp_path: Path) -> None:
    dc.save({"x": 1}, tmp_path / "a", step=7)
    committed(LocalStorage(), 8, root=str(tmp_path))  # not whole: its header is no header
    committed(LocalStorage(), 1, root=str(tmp_path))
    told = {one.step: told for one, told in dc.Run(tmp_path).prune(dc.keep.last(1))}
    assert told == {
        1: (),
        7: ("the newest that passes a quick check",),
        8: ("last(1)", "the newest"),
    }


@pytest.mark.parametrize("which", ["latest", -1, True, 1.0, None])
def test_what_is_no_step_and_no_selector_is_refused(run: dc.Run, which: object) -> None:
    with pytest.raises(ValueError, match='give a step, or a selector such as "@latest"'):
        run.find(which)  # type: ignore[arg-type]


def test_a_text_that_no_record_can_have_is_refused_by_name(run: dc.Run) -> None:
    with pytest.raises(ValueError, match=r"^why='\\udcff' is not valid UTF-8: give"):
        run.pin(1, "\udcff")
    with pytest.raises(ValueError, match=r"^name='\\udcff' is not valid UTF-8: give"):
        run.tag(1, "\udcff")


@pytest.mark.parametrize(
    "values", [{"": 1.0}, {"loss": "low"}, {"loss": None}, {"loss": b"1"}, {1: 1.0}]
)
def test_what_is_no_metric_is_refused(run: dc.Run, values: dict[str, float]) -> None:
    with pytest.raises(TypeError, match=r"give a (text|number)"):
        run.metrics(1, values)
    assert found(run)[1].metrics == {}


@pytest.mark.parametrize("ttl_s", [0, -1, float("nan"), float("inf")])
def test_a_hold_has_an_end(run: dc.Run, ttl_s: float) -> None:
    with (
        pytest.raises(ValueError, match="give a number of seconds above 0"),
        run.lease(1, ttl_s=ttl_s),
    ):
        pass
    assert protections.protections_of(read_annotations(LocalStorage(), run.root), 0.0).leases == {}


def test_what_has_no_step_has_no_facts(tmp_path: Path) -> None:
    committed(LocalStorage(), None, root=str(tmp_path), name="final")
    with pytest.raises(NotFoundError, match="final is without a step"):
        dc.Run(tmp_path).pin("@latest")


def test_a_run_without_a_folder_has_no_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="none does not exist"):
        _ = dc.Run(tmp_path / "none").checkpoints


def test_the_best_is_known_only_once_something_was_measured(run: dc.Run) -> None:
    assert run.best(min="loss") is None
    assert dc.Run(run.root).best(max="loss") is None
    for step, loss in ((1, 0.5), (2, 0.2), (3, float("nan"))):
        run.metrics(step, {"loss": loss})
    lowest, highest = run.best(min="loss"), run.best(max="loss")
    assert lowest is not None
    assert highest is not None
    assert (lowest.step, highest.step) == (2, 1)
    run.metrics(3, {"loss": 0.2})
    assert run.best(min="loss") == run.find(2), "of two the older"
    run.metrics(3, {"loss": 0.1})
    assert run.best(min="loss") == run.find("@latest"), "the last one is the best"
    for options in ({}, {"min": "a", "max": "b"}):
        with pytest.raises(ValueError, match="give min= or max="):
            run.best(**options)


@pytest.mark.parametrize("how", ["gone", "damaged"])
def test_a_best_that_is_gone_is_an_error_that_names_it(run: dc.Run, how: str) -> None:
    for step, loss in ((1, 0.5), (2, 0.2), (3, 0.3)):
        run.metrics(step, {"loss": loss})
    path = Path(run.find(2).path)
    if how == "gone":
        shutil.rmtree(path)
    else:
        next(path.glob("a*/index.json")).write_bytes(b"{}")
    with pytest.raises(NotFoundError, match=r"best loss is 0\.2, of step 2, whose checkpoint a1-"):
        run.best(min="loss")
    assert run.find("@min:loss").step == 3, "what is left"
    best = run.best(max="loss")
    assert best is not None
    assert best.step == 1


def test_a_best_that_was_replaced_or_left_behind_does_not_count(tmp_path: Path) -> None:
    storage, root = LocalStorage(), str(tmp_path / "run")
    old = committed(storage, 1, root=root)
    run = dc.Run(root)
    run.metrics(1, {"loss": 0.1})
    shutil.rmtree(tmp_path / "run" / "step-1" / old[1].name)
    committed(storage, 1, start=1, root=root)
    assert run.best(min="loss") is None
    run.metrics(1, {"loss": 0.4})
    assert run.best(min="loss") == run.find(1)
    left = committed(storage, 2, start=1, root=root)
    run.metrics(2, {"loss": 0.2})
    begin_incarnation(storage, root, restored=run.find(1).where, why="", by="", after=0)
    assert run.best(min="loss") == run.find(1)
    shutil.rmtree(tmp_path / "run" / "step-2")
    assert run.best(min="loss") == run.find(1), left


def test_keep_best_removes_a_best_that_is_none_any_more(run: dc.Run) -> None:
    for step, loss in ((1, 0.2), (2, 0.1), (3, 0.3)):
        run.metrics(step, {"loss": loss})
        run.prune(dc.keep.best(1, min="loss"))
    assert list(found(run)) == [2, 3]
    assert run.best(min="loss") == run.find(2)


@pytest.mark.parametrize(("old", "new"), [("hold", "lease"), ("wait_newer", "wait_for_newer")])
def test_old_names_of_methods_are_refused_with_the_new_one(tmp_path, old, new):
    with pytest.raises(AttributeError, match=f"Run.{old} is called {new} since dist_ckpt 0.2.0"):
        getattr(dc.Run(tmp_path), old)
