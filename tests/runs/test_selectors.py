"""A checkpoint is found by what it is, and what is not found is told with what there is."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from dist_ckpt.core.commit.attempts import find_checkpoint, list_attempts
from dist_ckpt.core.commit.records.incarnations import begin_incarnation
from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.core.format.strict_json import Scalar
from dist_ckpt.core.storage.local.local_storage import LocalStorage
from dist_ckpt.errors import CorruptError, IncompatibleError, NotFoundError
from dist_ckpt.runs.listing import list_run
from dist_ckpt.runs.selectors import resolve, select
from dist_ckpt.testing.faulty_storage import FaultyStorage
from dist_ckpt.testing.memory_storage import MemoryStorage
from run_folders import ROOT, committed, put

LOSSES: dict[int, Scalar] = {10: 0.5, 20: 0.25, 30: "nan", 40: 0.25, 50: None}


@pytest.fixture
def storage() -> MemoryStorage:
    """Return a run with losses; 60 is orphaned, and the best of all."""
    storage = MemoryStorage({ROOT: None})
    for step, loss in LOSSES.items():
        put(
            storage, committed(storage, step, start=2), "metrics", {"val/loss": loss, "acc@5": step}
        )
    put(storage, committed(storage, 60, start=1), "metrics", {"val/loss": 0, "acc@5": 99})
    put(storage, committed(storage, 10, start=1, name="old"), "tag", {"release": True})
    for _ in range(2):
        begin_incarnation(storage, ROOT, restored=None, why="", by="")
    return storage


def chosen(storage: MemoryStorage, selector: str) -> str:
    return select(list_run(storage, ROOT, now=0.0), selector).name


@pytest.mark.parametrize(
    ("selector", "name"),
    [
        ("latest", "step-50"),
        ("20", "step-20"),
        ("10", "step-10"),
        ("60", "step-60"),
        ("min:val/loss", "step-20"),
        ("max:val/loss", "step-10"),
        ("max:acc@5", "step-50"),
        ("tag:release", "old"),
    ],
)
def test_a_selector_chooses_what_it_says(storage, selector, name):
    assert chosen(storage, selector) == name


@pytest.mark.parametrize(
    ("selector", "error", "told"),
    [
        ("70", NotFoundError, "of step 70; the steps there are: 10, 20, 30, 40, 50, 60"),
        ("min:val/los", NotFoundError, "'val/los'; the metrics there are: acc@5, val/loss"),
        ("tag:best", NotFoundError, "the tag 'best'; the tags there are: release"),
        ("newest", ValueError, "'newest' is not a selector: there are @latest, @<step>"),
        ("min:", ValueError, "not a selector"),
        ("-3", ValueError, "not a selector"),
    ],
)
def test_what_is_not_found_is_told_with_what_there_is(storage, selector, error, told):
    with pytest.raises(error) as caught:
        chosen(storage, selector)
    assert told in str(caught.value)


@pytest.mark.parametrize("selector", ["latest", "5", "min:loss", "tag:best"])
def test_a_run_without_a_save_says_how_to_wait_for_it(selector: str) -> None:
    storage = MemoryStorage({ROOT: None})
    how = (
        r"/runs: no checkpoint is saved yet. Wait for its first save with dc.Run\('/runs'\).lease_"
    )
    with pytest.raises(NotFoundError, match=rf"{how}newer\(\); or check the path, as no run is h"):
        chosen(storage, selector)
    begin_incarnation(storage, ROOT, restored=None, why="", by="")
    with pytest.raises(NotFoundError, match=rf"{how}newer\(\)$"):
        chosen(storage, selector)
    with pytest.raises(NotFoundError, match=r"here: its run has saved nothing yet\. Wait for it"):
        find_checkpoint(storage, ROOT)
    storage.make_folder(f"{ROOT}/step-8")
    storage.make_folder(f"{ROOT}/step-8/{Attempt(1, '0123456789abcdef')}")
    with pytest.raises(NotFoundError, match=rf"{how}newer\(\): step-8 is open$"):
        chosen(storage, selector)


def test_a_run_without_a_usable_step_has_no_latest() -> None:
    storage = MemoryStorage({ROOT: None})
    committed(storage, None, name="final")
    with pytest.raises(NotFoundError, match="final is without a step"):
        chosen(storage, "latest")
    for number in range(30):
        committed(storage, None, name=f"trial-{number}")
    said = r"final is without a step, trial-0 is without a step \(and 29 more like it\)"
    with pytest.raises(NotFoundError, match=said):
        chosen(storage, "latest")


def test_a_damaged_one_is_no_candidate_and_that_is_logged(storage, caplog) -> None:
    file = f"{ROOT}/step-50/{committed(storage, 50, start=2)[1]}/index.json"
    storage.remove(file)
    storage.create(file, 2).write_at(0, b"{}")
    with caplog.at_level(logging.WARNING, "dist_ckpt"):
        assert chosen(storage, "latest") == "step-40"
    assert "step-50 is damaged and is ignored" in caplog.text


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"{}", CorruptError),
        (b'{"format":{"version":2},"digest":"00"}', IncompatibleError),
        (None, NotFoundError),
    ],
)
def test_a_step_that_cannot_be_read_says_why_and_names_the_newest_good_one(
    storage: MemoryStorage, content: bytes | None, error: type[Exception]
) -> None:
    path = f"{ROOT}/step-50"
    for attempt in list_attempts(storage, path):
        storage.remove(f"{path}/{attempt}/index.json")
        if content is not None:
            storage.create(f"{path}/{attempt}/index.json", len(content)).write_at(0, content)
    said = rf"{path} is \w+: .*\. The newest good checkpoint is {ROOT}/step-40"
    with pytest.raises(error, match=said):
        chosen(storage, "50")
    if content is not None:
        for selector in ("70", "tag:best", "min:loss"):
            with pytest.raises(NotFoundError, match="; not readable: step-50 is"):
                chosen(storage, selector)


def test_without_a_history_only_steps_and_tags_are_found(storage: MemoryStorage) -> None:
    storage.create(f"{ROOT}/.incarnations/9.json", 2).write_at(0, b"{}")
    for selector in ("latest", "min:val/loss"):
        with pytest.raises(CorruptError, match=r"9\.json"):
            chosen(storage, selector)
    assert chosen(storage, "20") == "step-20"
    assert chosen(storage, "tag:release") == "old"


def test_a_path_with_a_selector_becomes_that_of_a_checkpoint(tmp_path: Path) -> None:
    root = tmp_path / "user@host" / "run"
    for step in (1, 2):
        committed(LocalStorage(), step, root=str(root))
    assert resolve(f"{root}@latest") == f"{root}/step-2"
    assert resolve(root.with_name("run@1")) == f"{root}/step-1"
    with pytest.raises(ValueError, match="'newest' is not a selector"):
        resolve(f"{root}@newest")
    with pytest.raises(NotFoundError, match="gone does not exist"):
        resolve(f"{tmp_path}/gone@latest")


def test_a_path_that_exists_has_no_selector(tmp_path: Path) -> None:
    committed(LocalStorage(), 1, root=str(tmp_path / "run"))
    committed(LocalStorage(), 2, root=str(tmp_path), name="run@latest")
    (tmp_path / "run@1").write_text("a file")
    for name in ("run@latest", "run@1"):
        assert resolve(tmp_path / name) == tmp_path / name
    assert resolve(f"{tmp_path}/gone@home") == f"{tmp_path}/gone@home"


def test_a_path_without_a_selector_costs_no_call(monkeypatch) -> None:
    storage = FaultyStorage(MemoryStorage())
    monkeypatch.setattr("dist_ckpt.runs.selectors.open_storage", lambda path: (storage, path))
    assert resolve("/runs/a") == "/runs/a"
    assert storage.calls == 0
    resolve("/runs/a@b")
    assert storage.calls > 0
