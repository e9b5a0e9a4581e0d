"""What a run goes on from: the newest that is whole, what is asked for, or what `init` gives."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_ckpt as dc
from dist_ckpt.checkpointer import resume
from dist_ckpt.core.commit.records import incarnations
from dist_ckpt.core.commit.records.incarnations import read_history
from dist_ckpt.core.loading import load as loading
from dist_ckpt.core.loading.load import load_together
from dist_ckpt.core.storage import WritableFile, open_storage
from dist_ckpt.core.storage.local.local_storage import LocalStorage
from dist_ckpt.errors import CorruptError, IncompatibleError, NotFoundError, StorageError
from run_training import damage, fresh, steps_at, steps_in, train

pytestmark = pytest.mark.usefixtures("alone")


def checkpointer(root: str | Path, **options: Any) -> dc.Checkpointer:
    given = {"save": dc.every(steps=1), "background": False, **options}
    return dc.Checkpointer(root, **given)


def run(root: Path, until: int, state: dict[str, Any] | None = None, **options: Any) -> list[int]:
    """Train to a step; return the steps that were done."""
    state, done = fresh() if state is None else state, []
    with checkpointer(root, **options) as ck:
        for step in ck.steps(state, until=until):
            train(state, step)
            done.append(step)
    return done


def restored(root: Path, at: str | int | None = None, **options: Any) -> int | None:
    """Return the step that a start goes on from; all of the state is of it, or untouched."""
    state = fresh()
    with checkpointer(root, **options) as ck:
        step = ck.restore(state, at)
    assert steps_in(state) == {-1 if step is None else step}
    return step


def why(root: Path) -> str:
    """Return what the record of the newest start says."""
    history = read_history(*open_storage(root))
    return history.incarnations[history.newest].why


# --- which --------------------------------------------------------------------------------------


def test_a_run_goes_on_from_the_newest_and_every_start_is_recorded(tmp_path: Path) -> None:
    assert run(tmp_path / "run", 3) == [1, 2, 3]
    assert why(tmp_path / "run") == "no checkpoint to resume from"
    assert run(tmp_path / "run", 5) == [4, 5]
    assert why(tmp_path / "run") == "the newest"
    history = read_history(*open_storage(tmp_path / "run"))
    assert history.incarnations[1].restored is None
    assert history.incarnations[2].restored is not None
    assert history.incarnations[2].restored[0] == 3
    assert steps_at(tmp_path / "run") == [1, 2, 3, 4, 5]


def test_a_resume_says_on_stderr_from_which_step_whatever_the_logging(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="dist_ckpt")
    run(tmp_path, 3)
    assert capsys.readouterr().err == ""
    damage(tmp_path, 3)
    restored(tmp_path)
    begin = f"dist_ckpt: {tmp_path} resumes from step 2: the newest undamaged: step 3 is damaged: "
    assert capsys.readouterr().err.startswith(begin)


@pytest.mark.parametrize("level", [logging.WARNING, logging.INFO, None])
def test_a_resume_says_it_once_where_the_log_goes_to_stderr_too(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    level: int | None,
) -> None:
    handler = logging.StreamHandler()  # to stderr
    logger = logging.getLogger("dist_ckpt")
    monkeypatch.setattr(logger, "handlers", [] if level is None else [handler])
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logging, "lastResort", handler)
    handler.setLevel(level or logging.WARNING)
    run(tmp_path, 3)
    for newest in (3, 2):
        capsys.readouterr()
        restored(tmp_path)
        err = capsys.readouterr().err
        assert err.count(f" resumes from step {newest}: the newest") == 1
        assert err.count("step 3 is damaged: ") == (newest == 2)
        assert "is skipped" not in err
        damage(tmp_path, 3)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_resume_on_a_full_disk_says_what_to_remove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    run(tmp_path, 3)
    create = LocalStorage.create
    full: list[OSError] = [OSError(code, os.strerror(code))]

    def create_unless_full(storage: LocalStorage, path: str, nbytes: int) -> WritableFile:
        if full:
            raise StorageError(f"{path}: {os.strerror(code)}") from full[0]
        return create(storage, path, nbytes)

    monkeypatch.setattr(LocalStorage, "create", create_unless_full)
    command = f"`dist-ckpt prune {tmp_path} --keep 'last(2)'` removes step-00000001, and"
    with pytest.raises(StorageError, match=re.escape(command)) as error:
        restored(tmp_path, keep=dc.keep.last(2))
    assert os.strerror(code) in str(error.value)
    full.clear()
    assert restored(tmp_path) == 3


# --- a state that no save can take ---------------------------------------------------------------

UNSAVABLE: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "an optimizer without its module": (
        lambda: {"optim": torch.optim.SGD(torch.nn.Linear(2, 2).parameters())},
        "optim: parameter 0 of group 0, .* is in no module of the state",
    ),
    "an object": (lambda: {"extra": {"lock": threading.Lock()}}, r"extra\['lock'\]"),
    "the state of an object": (lambda: {"loop": Loop({"best": object()})}, r"loop\['best'\]"),
}


class Loop:
    """An object whose `state_dict` returns what it is given."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        if isinstance(self.state, Exception):
            raise self.state
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize("name", UNSAVABLE)
def test_what_no_save_can_take_is_an_error_when_a_fresh_run_begins(
    name: str, tmp_path: Path
) -> None:
    make, text = UNSAVABLE[name]
    with checkpointer(tmp_path) as ck, pytest.raises((TypeError, ValueError), match=text):
        ck.restore({**fresh(), **make()})
    assert not (tmp_path / ".incarnations").exists()


def test_what_is_not_saved_or_may_be_ready_later_begins_a_run(tmp_path: Path) -> None:
    lazy = torch.nn.LazyLinear(2)
    state = {
        **fresh(),
        "model": lazy,
        "optim": torch.optim.SGD(lazy.parameters()),
        "extra": {"lock": threading.Lock()},
        "loop": Loop(RuntimeError("no epoch has begun")),
    }
    with checkpointer(tmp_path / "a", exclude="extra*", save=dc.at(9)) as ck:
        assert ck.restore(state) is None
    with checkpointer(tmp_path / "b", read_only=True) as ck:
        assert ck.restore({"lock": threading.Lock()}) is None


def poll_for_ever(ck: dc.Checkpointer) -> None:
    until = time.monotonic() + 30
    while time.monotonic() < until:
        ck.poll()
        time.sleep(0.01)


def look_after_a_step(root: Path, state: dict[str, Any], spoil: Callable[[], object]) -> None:
    with checkpointer(root, save=dc.at(1000)) as ck:
        ck.restore(state)
        spoil()
        ck.step(1)
        poll_for_ever(ck)


def test_a_state_is_looked_at_after_the_first_step_and_not_only_by_its_first_save(
    tmp_path: Path,
) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    state = {"model": model, "optim": optimizer}

    def spoil() -> None:
        optimizer.state[model.weight]["hook"] = threading.Lock()

    with pytest.raises(TypeError, match=r"rank 0: the state of step 1 cannot be saved: optim\."):
        look_after_a_step(tmp_path, state, spoil)


def test_a_state_is_looked_at_once_and_errors_of_its_objects_end_no_run(tmp_path: Path) -> None:
    loop = Loop({"epoch": 0})
    with checkpointer(tmp_path, save=dc.at(1000)) as ck:
        ck.restore({**fresh(), "loop": loop})
        loop.state = RuntimeError("the epoch has ended")
        ck.step(1)
        loop.state = {"epoch": object()}  # looked at by a save only
        for step in range(2, 5):
            ck.step(step)
        assert ck._run is not None
        assert ck._run.requests.refusal is None


def test_the_step_that_is_asked_for_leaves_behind_what_is_above_and_a_replay_replaces_it(
    tmp_path: Path,
) -> None:
    """NeMo-RL #415: old checkpoints were gone on from unasked, or written over."""
    run(tmp_path, 6)
    state = fresh()
    with checkpointer(tmp_path, save=dc.at(4)) as ck:
        assert ck.restore(state, at="@3") == 3
        assert steps_in(state) == {3.0}
        assert steps_at(tmp_path) == [1, 2, 3]
        before = {one.path: one.attempt for one in dc.checkpoints(tmp_path)}
        for step in ck.steps(state, until=5):
            train(state, step)
    assert steps_at(tmp_path) == [1, 2, 3, 4]
    after = {one.path: one.attempt for one in dc.checkpoints(tmp_path)}
    replaced = [path for path in before if before[path] != after[path]]
    assert [Path(path).name for path in replaced] == ["step-00000004"]
    assert restored(tmp_path) == 4  # not 6
    assert why(tmp_path) == "the newest"
    assert restored(tmp_path, at=2) == 2
    assert "2 was requested" in why(tmp_path)


def test_what_was_left_behind_can_be_asked_for_again(tmp_path: Path) -> None:
    run(tmp_path, 4)
    assert restored(tmp_path, at="2") == 2
    assert restored(tmp_path, at="@4") == 4
    assert steps_at(tmp_path) == [1, 2, 3, 4]


@pytest.mark.parametrize("at", ["latest", "@min:loss", "", "-1", 1.5, "@tag:x"])
def test_only_a_step_can_be_asked_for(at: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match='give the step to resume from, as "@8000"'):
        restored(tmp_path, at=at)


def test_a_step_that_is_not_there_is_an_error_that_names_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        restored(tmp_path / "nothing", at="@3")
    run(tmp_path, 2)
    with pytest.raises(NotFoundError, match="no checkpoint of step 3; the steps there are: 1, 2"):
        restored(tmp_path, at="@3")
    assert why(tmp_path) == "no checkpoint to resume from"  # no start was recorded


def test_a_second_restore_is_another_start(tmp_path: Path) -> None:
    """As in a notebook."""
    state = fresh()
    with checkpointer(tmp_path) as ck:
        for step in ck.steps(state, until=3):
            train(state, step)
        assert ck.restore(state, at="@1") == 1
        assert steps_in(state) == {1.0}
        for step in ck.steps(state, until=2):
            train(state, step)
    assert steps_at(tmp_path) == [1, 2]


def test_must_exist_refuses_a_fresh_run(tmp_path: Path) -> None:
    for root in (tmp_path / "nothing", tmp_path):
        with pytest.raises(NotFoundError, match="no checkpoint to resume from: none"):
            restored(root, must_exist=True)
    assert list(tmp_path.iterdir()) == []
    run(tmp_path, 1)
    assert restored(tmp_path, must_exist=True) == 1


def listing(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def without_facts(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in files.items() if ".annotations" not in name}


@pytest.mark.parametrize("background", [False, True])
def test_read_only_resumes_and_changes_nothing(background: bool, tmp_path: Path) -> None:
    run(tmp_path, 2)
    before, state = listing(tmp_path), fresh()
    save = dc.every(steps=1) | dc.at_end | dc.on_signal("TERM")
    with checkpointer(tmp_path, save=save, read_only=True, background=background) as ck:
        for step in ck.steps(state, until=5):
            train(state, step)
            ck.metrics(step, {"loss": 1.0})
            ck.poll(step)
        ck.save(6)
    assert listing(tmp_path) == before


# --- init ---------------------------------------------------------------------------------------


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Return a finished run."""
    state = fresh()
    with checkpointer(tmp_path / "base") as ck:
        for step in ck.steps(state, until=3):
            train(state, step)
            ck.metrics(step, {"val/loss": abs(2.0 - step)})
    return tmp_path / "base"


@pytest.mark.parametrize(
    ("init", "expected"),
    [
        ("{}/step-00000003", 3),
        ("{}@1", 1),
        ("{}@min:val/loss", 2),
        ("{}@latest", 3),
        (Path("{}/step-00000001"), 1),
    ],
)
def test_a_fresh_run_begins_with_what_init_gives_and_a_resume_wins(
    init: str | Path, expected: int, base: Path, tmp_path: Path
) -> None:
    """titan #3732: a restarted run took what it had begun with instead of what it had saved."""
    source = type(init)(str(init).format(base))
    state = fresh()
    with checkpointer(tmp_path / "run", init=source) as ck:
        assert ck.restore(state) is None
        assert steps_in(state) == {float(expected)}
        assert f"it begins with {base}/step-0000000{expected}" in why(tmp_path / "run")
        train(state, 7)
        ck.step(7)
    before = listing(base)
    shutil.rmtree(base)  # nobody asks for it any more
    assert restored(tmp_path / "run", init=source) == 7
    assert before


def test_init_takes_a_part_and_other_names(base: Path, tmp_path: Path) -> None:
    net = {"small": torch.zeros(3)}
    state = {"net": net, "progress": {"step": -1}}
    init = dc.Source(f"{base}@2", include="net.small", rename={"model": "net"})
    with checkpointer(tmp_path / "run", init=init) as ck:
        assert ck.restore(state) is None
    assert net["small"].tolist() == [2.0] * 3
    assert state["progress"] == {"step": -1}


def test_a_fresh_run_may_begin_with_several_sources_which_are_held(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither is pruned while it is read, nor asked for once the run has checkpoints."""
    seen: list[tuple[int, ...]] = []

    def fill(*arguments: Any) -> Any:
        seen.append(tuple(len(dc.Run(base).find(step).leases) for step in (1, 3)))
        return real(*arguments)

    real = loading._read_and_place
    monkeypatch.setattr(loading, "_read_and_place", fill)
    state = fresh()
    init = {"model": f"{base}@1", "progress": [dc.Source(f"{base}@latest")]}
    with checkpointer(tmp_path / "run", init=init) as ck:
        assert ck.restore(state) is None
        assert seen == [(1, 1)]
        one, three = (f"{base}/step-0000000{step}" for step in (1, 3))
        assert why(tmp_path / "run").endswith(f"it begins with {one} and {three}")
        train(state, 7)
        ck.step(7)
    assert restored(tmp_path / "run", init={"model": tmp_path / "nothing"}) == 7


def test_an_init_that_lacks_something_is_refused_unless_it_may(base: Path, tmp_path: Path) -> None:
    state = {**fresh(), "more": 1}
    ck = checkpointer(tmp_path / "run", init=f"{base}@2")
    with ck, pytest.raises(IncompatibleError, match="lacks more"):
        ck.restore(state)
    with checkpointer(tmp_path / "run", init=f"{base}@2", init_strict=False) as ck:
        assert ck.restore(state) is None
    assert (steps_in(state), state["more"]) == ({2.0}, 1)


def test_a_run_that_lacks_what_its_state_has_now_says_how_to_begin_another(
    base: Path, tmp_path: Path
) -> None:
    state = {**fresh(), "more": 1}
    with checkpointer(base) as ck, pytest.raises(IncompatibleError) as error:
        ck.restore(state)
    (init,) = re.findall(r"init='(.*)', init_strict=False\)", str(error.value))
    with checkpointer(tmp_path / "run", init=init, init_strict=False) as ck:
        assert ck.restore(state) is None
    assert (steps_in(state), state["more"]) == ({3.0}, 1)


def test_an_init_that_is_not_there_begins_nothing(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        restored(tmp_path / "run", init=tmp_path / "nothing")
    assert not (tmp_path / "run").exists()


# --- the configuration --------------------------------------------------------------------------

CONFIG = {"model": {"depth": 3, "wide": [1, 2]}, "lr": 1e-3}


def test_a_configuration_that_must_be_the_same_is_refused_with_what_differs(tmp_path: Path) -> None:
    run(tmp_path, 1, config=CONFIG, config_must_match=("model.*",))
    other = {"model": {"depth": 4, "wide": (1, 2)}, "lr": 1e-4}
    with pytest.raises(
        IncompatibleError, match=r"must_match= forbids that: model.depth: 3 there, 4 here\. Use"
    ):
        restored(tmp_path, config=other, config_must_match=("model.*",))
    with pytest.raises(IncompatibleError, match=r"lr: 0\.001 there, nothing here"):
        restored(tmp_path, config={"model": CONFIG["model"]}, config_must_match=("lr",))
    assert why(tmp_path) == "no checkpoint to resume from"


def test_what_may_differ_in_the_configuration_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, 1, config=CONFIG)
    with dc.open(tmp_path / "step-00000001") as checkpoint:
        assert checkpoint.metadata == {"config": CONFIG}
    caplog.clear()
    assert restored(tmp_path, config=CONFIG, config_must_match=("*",)) == 1
    assert "another configuration" not in caplog.text
    assert restored(tmp_path, config={**CONFIG, "lr": 5}, config_must_match=("model.*",)) == 1
    assert "was saved with another configuration: lr: 0.001 there, 5 here" in caplog.text
    assert restored(tmp_path) == 1  # nothing to compare


# --- what is damaged ----------------------------------------------------------------------------


def flip(root: Path, step: int) -> None:
    damage(root, step)


def flip_objects(root: Path, step: int) -> None:
    damage(root, step, "objects.msgpack")


def flip_index(root: Path, step: int) -> None:
    damage(root, step, "index.json")


def cut_index(root: Path, step: int) -> None:
    (file,) = root.glob(f"step-{step:08}/a*/index.json")
    file.write_bytes(file.read_bytes()[:100])


def cut(root: Path, step: int) -> None:
    (file,) = root.glob(f"step-{step:08}/a*/model-00000.safetensors")
    file.write_bytes(file.read_bytes()[:-100])


def remove(root: Path, step: int) -> None:
    (file,) = root.glob(f"step-{step:08}/a*/model-00000.safetensors")
    file.unlink()


DAMAGES = [flip, flip_objects, flip_index, cut_index, cut, remove]
Damage = Callable[[Path, int], None]


@pytest.mark.parametrize("spoil", DAMAGES)
def test_a_damaged_newest_one_is_stepped_over_and_replaced_on_replay(
    spoil: Damage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, 3)
    spoil(tmp_path, 3)
    state = fresh()
    with checkpointer(tmp_path, keep=dc.keep.last(2)) as ck:
        assert ck.restore(state) == 2
        assert steps_in(state) == {2.0}
        assert "is damaged" in why(tmp_path)
        assert "the newest undamaged" in why(tmp_path)
        assert "step-00000003" in caplog.text
        # It stays until another is there in its place.
        (before,) = (tmp_path / "step-00000003").glob("a*")
        for step in ck.steps(state, until=4):
            assert before.exists() == (step == 3)
            train(state, step)
    assert not before.exists()
    assert steps_at(tmp_path) == [2, 3, 4]  # 2 was read in full
    assert all(dc.verify(one.path, level="full").ok for one in dc.checkpoints(tmp_path))


def test_several_damaged_ones_are_stepped_over_with_each_reason(tmp_path: Path) -> None:
    run(tmp_path, 4)
    flip(tmp_path, 4)
    cut(tmp_path, 3)
    cut_index(tmp_path, 2)
    assert restored(tmp_path) == 1
    assert all(f"step {step} is damaged" in why(tmp_path) for step in (3, 4))


@pytest.mark.parametrize("spoil", DAMAGES)
def test_where_all_are_damaged_nothing_is_begun_anew(spoil: Damage, tmp_path: Path) -> None:
    run(tmp_path, 2)
    for step in (1, 2):
        spoil(tmp_path, step)
    before = listing(tmp_path)
    with pytest.raises(CorruptError, match=r"checkpoints are damaged|no checkpoint to resume"):
        restored(tmp_path, init=tmp_path / "base")
    assert without_facts(listing(tmp_path)) == without_facts(before)


def test_one_that_is_recorded_as_damaged_is_not_tried_while_there_is_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, 3)
    for step in (3, 2):
        damage(tmp_path, step)
        assert not dc.verify(tmp_path / f"step-{step:08}").ok
    damage(tmp_path, 2)  # that mends it, but nobody has looked
    assert restored(tmp_path) == 1
    assert why(tmp_path).startswith("the newest undamaged: step-00000002 is damaged: model.small")
    assert "step-00000003 is damaged" in why(tmp_path)


def test_keep_neither_counts_nor_removes_a_damaged_one_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, 3)
    damage(tmp_path, 2)
    dc.verify(tmp_path / "step-00000002")
    run(tmp_path, 6, keep=dc.keep.last(2))
    assert [info.step for info in dc.checkpoints(tmp_path)] == [2, 3, 5, 6]  # 3 was read in full
    assert caplog.text.count("step-00000002 is damaged, and is not pruned") == 1


def test_where_all_are_recorded_as_damaged_they_are_tried(tmp_path: Path) -> None:
    run(tmp_path, 2)
    for step in (2, 1):
        damage(tmp_path, step)
        dc.verify(tmp_path / f"step-{step:08}")
    with pytest.raises(CorruptError, match="all checkpoints are damaged: step 2 is"):
        restored(tmp_path)
    damage(tmp_path, 1)  # that mends it, but nobody has looked
    assert restored(tmp_path) == 1


def test_many_damaged_ones_are_one_message_with_a_count(tmp_path: Path) -> None:
    run(tmp_path, 5)
    for step in range(1, 6):
        damage(tmp_path, step)
    said = r"all checkpoints are damaged: step 5 is damaged: .* \(and 4 more like it\)\. The state"
    with pytest.raises(CorruptError, match=said) as caught:
        restored(tmp_path)
    assert "newest good" not in str(caught.value)


def test_a_damaged_one_that_is_asked_for_is_an_error(tmp_path: Path) -> None:
    run(tmp_path, 3)
    flip(tmp_path, 2)
    newest = tmp_path / "step-00000003"
    with pytest.raises(CorruptError, match=f"The newest good checkpoint is {newest}"):
        restored(tmp_path, at="@2")
    assert restored(tmp_path) == 3


def test_a_damage_that_a_second_read_does_not_see_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one in the page cache."""
    run(tmp_path, 2)
    dropped: list[str] = []
    file = damage(tmp_path, 2)

    def drop(path: str) -> None:
        dropped.append(path)
        damage(tmp_path, 2)  # that mends it

    monkeypatch.setattr(resume, "drop_cached", drop)
    assert restored(tmp_path) == 2
    assert dropped == [str(file.parent)]
    assert why(tmp_path) == "the newest"


def test_an_error_of_the_storage_stops_a_resume_and_nothing_is_rolled_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, 3)
    before = listing(tmp_path)

    def fail(*_: object, **__: object) -> None:
        raise StorageError(f"{tmp_path}: {errno.errorcode[errno.EIO]}")

    for name in ("load_together", "list_run"):
        with monkeypatch.context() as patch:
            patch.setattr(resume, name, fail)
            with pytest.raises(StorageError, match="EIO"):
                restored(tmp_path)
        assert steps_at(tmp_path) == [1, 2, 3]
    assert without_facts(listing(tmp_path)) == without_facts(before)
    assert restored(tmp_path) == 3


def test_one_of_a_newer_version_stops_a_resume(tmp_path: Path) -> None:
    run(tmp_path, 3)
    (file,) = tmp_path.glob("step-00000003/a*/index.json")
    document = json.loads(file.read_text())
    document["format"]["version"] = 99
    file.write_text(json.dumps(document))
    with pytest.raises(IncompatibleError, match="may be the newest, so the run does not resume"):
        restored(tmp_path)


@pytest.mark.parametrize("is_newer", [False, True])
def test_a_step_of_more_digits_is_above_one_of_fewer(is_newer: bool, tmp_path: Path) -> None:
    """Not by name, in which step-100000000 comes before step-99999999."""
    state = fresh()
    for step in (99_999_999, 100_000_000):
        train(state, step)
        dc.save(state, tmp_path / f"step-{step:08}", step=step)
    (file,) = tmp_path.glob("step-100000000/a*/index.json")
    file.write_text('{"format": {"version": 99, "requires": []}}' if is_newer else "{}")
    if is_newer:
        with pytest.raises(IncompatibleError, match="may be the newest"):
            restored(tmp_path)
    else:
        with checkpointer(tmp_path) as ck:
            assert ck.restore(fresh()) == 99_999_999
        assert "step-100000000 is damaged" in why(tmp_path)


def test_a_damaged_folder_that_no_run_has_named_so_is_none_that_is_stepped_over(
    tmp_path: Path,
) -> None:
    run(tmp_path, 2)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "the-best")
    (file,) = tmp_path.glob("the-best/a*/index.json")
    file.write_text("{}")
    assert restored(tmp_path) == 2
    assert why(tmp_path) == "the newest"


def test_a_state_that_does_not_fit_stops_a_resume(tmp_path: Path) -> None:
    run(tmp_path, 3)
    state = fresh()
    state["model"]["more"] = torch.zeros(2)
    with checkpointer(tmp_path) as ck, pytest.raises(IncompatibleError, match=r"lacks model\.more"):
        ck.restore(state)


def test_what_a_damaged_one_has_touched_is_wholly_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, 3)
    state, num_loads = fresh(), 0

    def load(*args: Any, **options: Any) -> Any:
        nonlocal num_loads
        num_loads += 1
        report = load_together(*args, **options)
        if num_loads <= 2:
            raise CorruptError("after all of it was placed", touched=tuple(report.restored))
        return report

    monkeypatch.setattr(resume, "load_together", load)
    with checkpointer(tmp_path) as ck:
        assert ck.restore(state) == 2
    assert steps_in(state) == {2.0}


# --- others that use the root -------------------------------------------------------------------


def test_what_is_loaded_is_held_until_the_start_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, 2)
    held: list[tuple[str, ...]] = []

    def begin(*args: Any, **options: Any) -> Any:
        held.extend(one.leases for one in dc.checkpoints(tmp_path))
        return incarnations.begin_incarnation(*args, **options)

    monkeypatch.setattr(resume, "begin_incarnation", begin)
    assert restored(tmp_path) == 2
    assert [len(one) for one in held] == [0, 1]
    assert [one.leases for one in dc.checkpoints(tmp_path)] == [(), ()]
