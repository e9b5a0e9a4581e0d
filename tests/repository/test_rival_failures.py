"""The failures of other checkpoint libraries that started this one, each as a test by its name.

What `torch.distributed.checkpoint` does in the same cases: `scripts/rival_failures.py`.
"""

from __future__ import annotations

from typing import Any

import pytest

from dist_ckpt import FlatShard, LocalShard, PerRank
from dist_ckpt.core.commit.attempts import find_checkpoint
from dist_ckpt.core.format.checksums import BLOCK_NBYTES
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import CorruptError, IncompatibleError, NotFoundError, StorageError
from dist_ckpt.testing.faulty_storage import FaultyStorage
from dist_ckpt.testing.memory_storage import MemoryStorage

pytest.importorskip("torch")

import torch

from ranks import (
    PATH,
    errors_of,
    load_on_threads,
    save_on_threads,
    shared_storage,
    try_save_on_threads,
)


@pytest.fixture
def storage() -> MemoryStorage:
    return MemoryStorage({"/runs": None})


def loaded(storage: Storage) -> dict[Any, Any]:
    state: dict[Any, Any] = {}
    load_on_threads(storage, [state])
    return state


def test_torn_overwrite__the_old_checkpoint_stays_whole_until_the_new_one_is(storage):
    """Both ranks die in the middle of writing over a checkpoint of the same shapes."""
    old = [{"w": LocalShard(torch.full((4,), 1.0), (8,), (4 * rank,))} for rank in (0, 1)]
    new = [{"w": LocalShard(torch.full((4,), 2.0), (8,), (4 * rank,))} for rank in (0, 1)]
    save_on_threads(storage, old)
    calls = FaultyStorage(storage)
    save_on_threads(calls, old, PATH + "-other")
    for number in range(1, calls.calls):
        faulty = FaultyStorage(storage, fail_at_call=number, sticky=True)
        outcomes = try_save_on_threads(shared_storage(faulty), new, overwrite=True)
        if any(outcome.error for outcome in outcomes):
            assert loaded(storage)["w"].tolist() == [1.0] * 8
        else:
            break


def test_flipped_bit__a_load_names_tensor_rows_rank_and_file(storage):
    save_on_threads(storage, [{"w": torch.arange(6.0).reshape(3, 2)}])
    name, tree = flip_last_bit(storage, ".safetensors")
    with pytest.raises(CorruptError, match=r"w rows 0:3.*rank 0") as caught:
        loaded(MemoryStorage(tree))
    assert name.rpartition("/")[2] in str(caught.value)
    assert caught.value.touched in ((), ("w",))


def flip_last_bit(storage: MemoryStorage, ending: str) -> tuple[str, dict[str, bytes | None]]:
    tree = dict(storage.tree())
    (name,) = (name for name in tree if name.endswith(ending))
    content = tree[name]
    assert content is not None
    data = bytearray(content)
    data[-1] ^= 1
    tree[name] = bytes(data)
    return name, tree


class _NoSpaceInThreads(FaultyStorage):
    """Fails every write after the first, wherever a thread makes it."""

    writes = 0

    def call(self, what, act):
        if what.startswith("write"):
            self.writes += 1
            if self.writes > 1:
                raise StorageError(f"{what}: no space left on device")
        return super().call(what, act)


def test_swallowed_write_error__one_failed_write_in_a_thread_fails_the_save_on_all_ranks(storage):
    large = torch.zeros(3 * BLOCK_NBYTES, dtype=torch.uint8)
    states = [{f"w{rank}": large + rank} for rank in (0, 1)]
    faulty = _NoSpaceInThreads(storage)
    outcomes = try_save_on_threads(lambda rank: faulty if rank else storage, states)
    for error in errors_of(outcomes):
        assert isinstance(error, StorageError)
        assert "rank 1" in str(error)
        assert "no space left" in str(error)
    with pytest.raises(NotFoundError):
        find_checkpoint(storage, PATH)


def test_mixed_per_rank_state__unequal_values_are_refused_by_key_and_ranks(storage):
    states = [{"pos": 10 * rank, "rng": torch.full((3,), float(rank))} for rank in (0, 1)]
    for error in errors_of(try_save_on_threads(lambda _: storage, states)):
        assert isinstance(error, ValueError)
        for fact in ("pos", "rng", "rank 0", "rank 1", "dc.PerRank"):
            assert fact in str(error)
    assert storage.tree() == {"/runs": None}


def test_mixed_per_rank_state__a_per_rank_value_comes_back_on_its_own_rank(storage):
    save_on_threads(storage, [{"rng": PerRank({"pos": 10 * rank})} for rank in (0, 1)])
    templates = [{"rng": PerRank({"pos": -1})} for _ in (0, 1)]
    load_on_threads(storage, templates)
    assert [template["rng"].value for template in templates] == [{"pos": 0}, {"pos": 10}]


@pytest.mark.parametrize("dtype", [torch.int32, torch.bfloat16, torch.float64])
def test_silent_cast__another_dtype_is_refused_and_nothing_is_touched(storage, dtype):
    save_on_threads(storage, [{"w": torch.tensor([1.7, 2.9, 1e10])}])
    target = torch.zeros(3, dtype=dtype)
    with pytest.raises(IncompatibleError, match=r"w.*float32"):
        load_on_threads(storage, [{"w": target}])
    assert target.tolist() == [0, 0, 0]


def test_lost_structure__keys_and_containers_come_back_as_they_were(storage):
    state = {
        0: {"step": 5, 7: torch.ones(1)},
        "empty": {},
        "none": None,
        "pair": (torch.zeros(2), [torch.ones(3), "text"]),
        "betas": (0.9, 0.99),
    }
    save_on_threads(storage, [state])
    back = loaded(storage)
    assert list(back) == list(state)
    assert back[0]["step"] == 5
    assert torch.equal(back[0][7], torch.ones(1))
    assert (back["empty"], back["none"], back["betas"]) == ({}, None, (0.9, 0.99))
    assert type(back["pair"]) is tuple
    assert type(back["pair"][1]) is list
    assert torch.equal(back["pair"][1][0], torch.ones(3))


def test_lost_structure__an_int_key_does_not_load_into_a_str_key(storage):
    save_on_threads(storage, [{"groups": {0: torch.ones(1)}}])
    target = torch.zeros(1)
    with pytest.raises(IncompatibleError, match=r"groups"):
        load_on_threads(storage, [{"groups": {"0": target}}])
    assert target.item() == 0


def test_no_coverage__a_tensor_that_the_ranks_do_not_cover_is_not_saved(storage):
    states = [{"w": LocalShard(torch.ones(2), (8,), (2 * rank,))} for rank in (0, 1)]
    for error in errors_of(try_save_on_threads(lambda _: storage, states)):
        assert isinstance(error, ValueError)
        assert "w" in str(error)
    assert storage.tree() == {"/runs": None}


def test_no_coverage__parts_that_overlap_are_not_saved(storage):
    states = [{"w": FlatShard(torch.ones(5), (8,), 3 * rank)} for rank in (0, 1)]
    for error in errors_of(try_save_on_threads(lambda _: storage, states)):
        assert isinstance(error, ValueError)
        assert "w" in str(error)


def test_half_applied_load__every_problem_is_told_before_anything_is_touched(storage):
    save_on_threads(storage, [{"a": torch.ones(2), "b": torch.ones(3), "n": 1, "extra": 2}])
    state: dict[str, Any] = {
        "a": torch.zeros(2),
        "b": torch.zeros(4),
        "missing": torch.zeros(1),
        "n": 0,
    }
    with pytest.raises(IncompatibleError) as caught:
        load_on_threads(storage, [state])
    for name in ("b", "missing", "extra"):
        assert name in str(caught.value)
    assert state["a"].tolist() == [0, 0]
    assert state["n"] == 0


def test_half_applied_load__a_missing_file_is_found_before_anything_is_touched(storage):
    save_on_threads(storage, [{"a": {"w": torch.ones(2)}, "b": {"w": torch.ones(2)}}])
    (name,) = (name for name in storage.tree() if "/b-00000" in name)
    storage.remove(name)
    state = {"a": {"w": torch.zeros(2)}, "b": {"w": torch.zeros(2)}}
    with pytest.raises(CorruptError, match=r"b-00000\.safetensors.*missing"):
        load_on_threads(storage, [state])
    assert state["a"]["w"].tolist() == [0, 0]


def test_reused_buffers__a_checkpoint_keeps_what_was_saved_when_the_tensor_goes_on(storage):
    weight = torch.ones(4)
    for step in (1, 2):
        save_on_threads(storage, [{"w": weight}], f"{PATH}-{step}")
        weight += 1
    for step in (1, 2):
        state: dict[Any, Any] = {}
        load_on_threads(storage, [state], f"{PATH}-{step}")
        assert state["w"].tolist() == [float(step)] * 4


@pytest.mark.parametrize(
    "changed",
    [torch.ones(4, dtype=torch.float64), torch.ones(2, 2), torch.ones(6)],
    ids=["dtype", "shape", "size"],
)
def test_stale_plan__a_state_that_changed_is_planned_again(tmp_path, changed):
    """The same session saves twice, so that a plan of the first save is there to be reused."""
    storage = MemoryStorage({"/runs": None})
    channel_states = [torch.ones(4), changed]
    run_saves(storage, channel_states)
    for number, value in enumerate(channel_states):
        state: dict[Any, Any] = {}
        load_on_threads(storage, [state], f"{PATH}-{number}")
        assert state["w"].dtype == value.dtype
        assert torch.equal(state["w"], value)


def run_saves(storage: Storage, values: list[torch.Tensor]) -> None:
    from dist_ckpt.core.comm.session import Session
    from dist_ckpt.core.saving.save import save_together
    from dist_ckpt.core.saving.save_options import SaveOptions
    from dist_ckpt.testing.thread_channel import TEST_CONFIG
    from ranks import run_ranks

    def saves(rank, channel, bulk):
        session = Session(channel, bulk, TEST_CONFIG)
        for number, value in enumerate(values):
            state = {"w": value}
            save_together(session, state, f"{PATH}-{number}", SaveOptions(), storage)

    run_ranks(saves, world_size=2, harness="threads")


class _Forgetful(FaultyStorage):
    """Acknowledges every write, and has lost the shard file when its folder is synced."""

    def call(self, what, act):
        if what.startswith("sync") and "/a1-" in what:
            assert isinstance(self.inner, MemoryStorage)
            for name in [name for name in self.inner.tree() if "w1-00001" in name]:
                self.inner.remove(name)
        return super().call(what, act)


def test_swallowed_write_error__a_file_that_storage_lost_is_missed_before_the_commit(storage):
    states = [{f"w{rank}": {"x": torch.ones(2)}} for rank in (0, 1)]
    outcomes = try_save_on_threads(lambda rank: _Forgetful(storage) if rank else storage, states)
    for error in errors_of(outcomes):
        assert isinstance(error, StorageError)
        assert "w1-00001.safetensors is missing" in str(error)
    with pytest.raises(NotFoundError):
        find_checkpoint(storage, PATH)
