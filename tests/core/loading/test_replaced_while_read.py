"""A checkpoint that is overwritten or deleted under its reader is never called damaged."""

from __future__ import annotations

from typing import Any

import pytest

import dist_ckpt as dc
from dist_ckpt.core.checkpoint import verify_checkpoint
from dist_ckpt.core.commit import removal
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import CorruptError, NotFoundError
from dist_ckpt.testing.faulty_storage import FaultyStorage
from dist_ckpt.testing.memory_storage import MemoryStorage

pytest.importorskip("torch")

import torch

from ranks import PATH, load_on_threads, save_on_threads


class _ReplacedMeanwhile(FaultyStorage):
    """Before its n-th call somebody else overwrites the checkpoint, or deletes it."""

    def __init__(self, inner: Storage, number: int, act) -> None:
        super().__init__(inner)
        self._number = number
        self._act = act

    def call(self, what, act):
        if self.calls + 1 == self._number:
            self.calls += 1
            self._act(self.inner)
            return act()
        return super().call(what, act)


def blank() -> dict[str, Any]:
    return {"a": torch.zeros(2), "b": {"w": torch.zeros(3)}, "n": 0}


def states(step: int, ranks: int = 1) -> list[dict[str, object]]:
    return [{"a": torch.full((2,), float(step)), "b": {"w": torch.ones(3)}, "n": step}] * ranks


def overwrite(storage: Storage) -> None:
    save_on_threads(storage, states(2), step=2, overwrite=True)


def delete(storage: Storage) -> None:
    removal.delete(storage, PATH)


def saved() -> MemoryStorage:
    storage = MemoryStorage({"/runs": None})
    save_on_threads(storage, states(1), step=1)
    return storage


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_load_that_meets_an_overwrite_gets_the_old_or_the_new_one_whole(ranks):
    number = 0
    while True:
        number += 1
        storage = _ReplacedMeanwhile(saved(), number, overwrite)
        targets = [blank() for _ in range(ranks)]
        report = load_on_threads(storage, targets)
        for target in targets:
            assert target["a"].tolist() == [float(target["n"])] * 2
            assert target["n"] == report.step
        if storage.calls < number:
            break
    assert number > 8


def test_a_load_that_meets_a_delete_finds_nothing_or_loads_whole():
    number = 0
    while True:
        number += 1
        storage = _ReplacedMeanwhile(saved(), number, delete)
        target = blank()
        try:
            load_on_threads(storage, [target])
            assert target["a"].tolist() == [1.0, 1.0]
        except NotFoundError:
            assert target["a"].tolist() == [0.0, 0.0]
        if storage.calls < number:
            break


def test_a_verify_that_meets_an_overwrite_reports_no_damage(monkeypatch):
    number = 0
    while True:
        number += 1
        storage = _ReplacedMeanwhile(saved(), number, overwrite)
        monkeypatch.setattr(
            verify_checkpoint, "open_storage", lambda path, s=storage, **_: (s, PATH)
        )
        assert verify_checkpoint.verify(PATH).problems == ()
        if storage.calls < number:
            break


def test_a_lazy_read_of_what_was_replaced_says_so(tmp_path):
    path = tmp_path / "ck"
    dc.save(states(1)[0], path)
    with dc.open(path) as ck:
        dc.save(states(2)[0], path, overwrite=True)
        with pytest.raises(NotFoundError, match="replaced or deleted"):
            ck["a"][...]
        with pytest.raises(NotFoundError, match="replaced or deleted"):
            dict(ck.objects)


def test_a_file_that_is_missing_from_a_checkpoint_that_is_there_is_damage(tmp_path):
    dc.save(states(1)[0], tmp_path / "ck")
    (file,) = (tmp_path / "ck").glob("a1-*/b-00000.safetensors")
    file.unlink()
    with pytest.raises(CorruptError, match="missing"):
        dc.load({}, tmp_path / "ck")
