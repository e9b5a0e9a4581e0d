"""torchdata's `StatefulDataLoader`, saved on some ranks and loaded on others."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import dist_ckpt as dc
from dist_ckpt.testing.memory_storage import MemoryStorage
from ranks import load_on_threads, save_on_threads

pytest.importorskip("torchdata.stateful_dataloader")
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

StatefulDataLoader: Any = importlib.import_module(
    "torchdata.stateful_dataloader"
).StatefulDataLoader
torchdata_samplers: Any = importlib.import_module("torchdata.stateful_dataloader.sampler")

LENGTH = 23


class Job:
    """The ranks of a job, in one process: each with its loader and the position of that."""

    def __init__(
        self, ranks: int, length: int = LENGTH, seed: int = 0, batch_size: int = 2, **options: Any
    ) -> None:
        data = [*range(length)]
        self.samplers = [
            dc.ElasticSampler(data, ranks, rank, seed=seed, shuffle=options.pop("shuffle", True))
            for rank in range(ranks)
        ]
        self.loaders = [
            StatefulDataLoader(data, batch_size=batch_size, sampler=sampler, **options)
            for sampler in self.samplers
        ]
        self.positions = [dc.DataPosition(loader) for loader in self.loaders]

    def state(self) -> dict[str, object]:
        """Return the position, which is the same on all ranks."""
        states = [position.state_dict() for position in self.positions]
        assert all(state == states[0] for state in states)
        return states[0]

    def load(self, state: dict[str, Any]) -> Job:
        for position in self.positions:
            position.load_state_dict(state)
        return self

    def epoch(self, steps: int | None = None) -> list[list[int]]:
        """Take batches on all ranks in step, to the end of the epoch or some; return each's."""
        self.passes = [iter(loader) for loader in self.loaders]
        taken: list[list[int]] = []
        while steps is None or len(taken) < steps * len(self.passes):
            batches = [next(one, None) for one in self.passes]
            assert len({batch is None for batch in batches}) == 1, "a rank has no more: it hangs"
            if batches[0] is None:
                break
            taken += [cast(torch.Tensor, batch).tolist() for batch in batches]
        return taken


def flat(batches: Iterable[list[int]]) -> list[int]:
    return [sample for batch in batches for sample in batch]


@given(
    length=st.integers(1, 60),
    jobs=st.lists(
        st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=4
    ),
    drop_last=st.booleans(),
)
def test_each_sample_is_seen_once_by_whatever_ranks(
    length: int, jobs: list[tuple[int, int, int]], drop_last: bool
) -> None:
    seen: list[int] = []
    rest: list[int] = []
    job = Job(1, length)
    for ranks, batch_size, steps in jobs:
        state = job.state()
        job = Job(ranks, length, batch_size=batch_size, drop_last=drop_last).load(state)
        batches = job.epoch(steps)
        seen += flat(batches)
        if len(batches) < steps * ranks:
            break  # told that the epoch is over
        if job.state()["consumed"] == length:
            assert Job(3, length).load(job.state()).epoch() == []
            assert [next(one, None) for one in job.passes] == [None] * ranks
            break
        assert job.state()["consumed"] == len(seen) == len({*seen})
    else:
        job = Job(ranks, length, batch_size=batch_size, drop_last=drop_last).load(job.state())
        rest = flat(job.epoch())
    lost = length - len({*seen, *rest})
    doubled = len(seen) + len(rest) - len({*seen, *rest})
    assert lost < ranks * batch_size if drop_last else lost == 0
    assert doubled < ranks  # what evens out the last row
    assert len(flat(job.epoch())) > length - ranks * batch_size  # the next pass is whole


def test_it_counts_what_the_loop_has_got(tmp_path: Path) -> None:
    """Workers fetch ahead, and live on from pass to pass; snapshots of theirs are rare here."""
    options = {"num_workers": 2, "snapshot_every_n_steps": 3, "persistent_workers": True}
    job = Job(1, 23, **options)
    whole = Job(1, 23).epoch()
    assert job.epoch() == whole
    steps = iter(job.loaders[0])
    for done, batch in enumerate(whole[:5]):
        assert job.state()["consumed"] == 2 * done
        assert next(steps).tolist() == batch
    dc.save({"data": job.positions[0]}, tmp_path / "step")
    other = Job(1, 23, **options)
    dc.load({"data": other.positions[0]}, tmp_path / "step")
    assert other.state() == job.state()  # saved again before a batch was taken
    batches = iter(other.loaders[0])
    assert other.state() == job.state()  # and before one was got of those that workers fetch
    assert [batch.tolist() for batch in batches] == whole[5:]
    assert [batch.tolist() for batch in steps] == whole[5:]
    assert other.state()["consumed"] == 0  # it was told that there are no more


def test_an_epoch_ends_as_it_would_have_ended() -> None:
    """All of it got, but the loop not yet told: an empty rest. Told: the next pass is whole."""
    whole = Job(2).epoch()
    job = Job(2)
    job.epoch(6)
    state = job.state()
    assert state["consumed"] == LENGTH
    other = Job(3).load(state)
    assert other.epoch() == []
    assert sorted({*flat(other.epoch())}) == [*range(LENGTH)]
    assert [next(one, None) for one in job.passes] == [None, None]
    assert job.state()["consumed"] == 0
    assert Job(2).load(job.state()).epoch() == whole


def test_the_epoch_comes_back() -> None:
    job = Job(2)
    for epoch in range(3):
        for sampler in job.samplers:
            sampler.set_epoch(epoch)
        begun = job.epoch(3 if epoch == 2 else None)
    other = Job(3).load(job.state())
    assert other.samplers[0].epoch == 2
    for sampler in other.samplers:
        sampler.set_epoch(2)
    assert len({*flat(begun), *flat(other.epoch())}) == LENGTH
    # What the sampler is told in the midst of an epoch is for the next pass.
    other.epoch(1)
    for sampler in other.samplers:
        sampler.set_epoch(7)
    assert other.state()["epoch"] == 2


class FabricLoader:
    """A loader in the shape of Lightning Fabric's: it sets the epoch from its count of passes."""

    sampler: dc.ElasticSampler

    def __init__(self, loader: Any) -> None:
        self.__dict__.update(loader.__dict__)
        self._dataloader, self._num_iter_calls = loader, 0

    def __iter__(self) -> Iterator[Any]:
        self.sampler.set_epoch(self._num_iter_calls)
        self._num_iter_calls += 1
        yield from iter(self._dataloader)


@pytest.mark.parametrize("steps", range(1, 37))
def test_a_loader_of_fabric_continues_in_the_epoch_of_the_load(steps: int) -> None:
    """It is killed after each step of three epochs."""

    def job() -> tuple[FabricLoader, dc.DataPosition]:
        loader = FabricLoader(Job(1).loaders[0])
        return loader, dc.DataPosition(loader)

    loader, _ = job()
    straight = [batch.tolist() for _ in range(3) for batch in loader]
    assert straight[:12] != straight[12:24], "the epochs have different orders"
    loader, position = job()
    seen = []
    for _ in range(position._sampler.epoch, 3):
        for batch in loader:
            seen.append(batch.tolist())
            state = position.state_dict()
            if len(seen) == steps:
                break
        else:
            continue
        break
    loader, position = job()
    position.load_state_dict(state)
    rest = [batch.tolist() for _ in range(position._sampler.epoch, 3) for batch in loader]
    assert seen + rest == straight


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1, "persistent_workers": True}])
def test_of_a_loop_that_has_ended_the_next_epoch_is_saved(workers: dict[str, Any]) -> None:
    """A save between two epochs, where most are: the one that is over is not had again."""
    job, had = Job(1, **workers), []
    while (epoch := job.samplers[0].epoch) < 3:
        job.samplers[0].set_epoch(epoch)
        had.append(job.epoch())
        state = job.state()
        assert (state["epoch"], state["consumed"]) == (epoch + 1, 0)
        job = Job(1, **workers).load(state)
    straight = Job(1)
    for epoch in range(3):
        straight.samplers[0].set_epoch(epoch)
        assert had[epoch] == straight.epoch()
    straight.samplers[0].set_epoch(7)  # said before the save: it is that one
    assert (straight.state()["epoch"], straight.state()["consumed"]) == (7, 0)


def test_a_pass_that_has_not_begun_is_the_next_one() -> None:
    job = Job(1)
    job.epoch(2)  # given up
    job.samplers[0].set_epoch(1)
    batches = iter(job.loaders[0])
    state = job.state()
    assert (state["epoch"], state["consumed"]) == (1, 0)
    assert Job(1).load(state).epoch() == [batch.tolist() for batch in batches]


def test_a_load_takes_the_place_of_what_the_loader_was_about_to_do() -> None:
    whole = Job(1).epoch()
    ahead, job = Job(1), Job(1)
    ahead.epoch(5)
    job.epoch(2)
    for asked in (False, True):
        other = Job(1)
        other.loaders[0].load_state_dict(ahead.loaders[0].state_dict())
        if asked:
            other.loaders[0].state_dict()  # makes the iterator of the next pass
        assert other.load(job.state()).epoch() == whole[2:]


def test_a_save_moves_nothing() -> None:
    """Asked for its own state, a loader that waits would start an iterator, and draw."""
    job = Job(1)
    drawn = torch.get_rng_state()
    assert job.state()["consumed"] == 0
    assert job.loaders[0]._iterator is None
    assert torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 24}, r"data: saved with length 23, now it is 24"),
        ({"seed": 1}, r"data: saved with seed 0, now it is 1"),
        ({"shuffle": False}, r"data: saved with shuffle True, now it is False"),
    ],
)
def test_another_order_is_refused_before_anything_is_loaded(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    job = Job(1)
    job.epoch(2)
    dc.save({"data": job.positions[0], "w": torch.ones(2)}, tmp_path / "step")
    weights = torch.zeros(2)
    other = Job(1, **options)
    with pytest.raises(dc.IncompatibleError, match=message):
        dc.load({"data": other.positions[0], "w": weights}, tmp_path / "step")
    assert not weights.any()
    assert other.state()["consumed"] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"first_samples": [0] * 8}, r"another order: this torch .* shuffles differently"),
        ({"consumed": 24}, r"at 24 of 23 samples"),
        ({"consumed": -1}, r"at -1 of 23 samples"),
        ({"consumed": 0, "epoch": 1 << 64}, r"of epoch 1844"),
        ({"seed": False}, r"`seed` is False, not int"),
        ({"more": 1}, r"not a position of a dc.DataPosition"),
    ],
)
def test_a_position_that_lies_is_refused(changes: dict[str, object], message: str) -> None:
    job = Job(1)
    job.epoch(2)
    with pytest.raises(dc.IncompatibleError, match=message):
        Job(1).load({**job.state(), **changes})


def test_what_a_loader_of_its_own_state_saved_is_refused(tmp_path: Path) -> None:
    job = Job(1)
    dc.save({"data": dc.PerRank(job.loaders[0])}, tmp_path / "per rank")
    with pytest.raises(dc.IncompatibleError, match=r"saved as a per-rank value, .* dc.PerRank"):
        dc.load({"data": Job(1).positions[0]}, tmp_path / "per rank")
    dc.save({"data": job.positions[0]}, tmp_path / "shared")
    with pytest.raises(dc.IncompatibleError, match=r"a value without tensors, .* a PerRank"):
        dc.load({"data": dc.PerRank(job.loaders[0])}, tmp_path / "shared")
    dc.save({"data": {"consumed": 3}}, tmp_path / "plain")
    with pytest.raises(dc.IncompatibleError, match=r"data: the saved value is not a position"):
        dc.load({"data": Job(1).positions[0]}, tmp_path / "plain")


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class Remembering(list[int]):
    def state_dict(self) -> dict[str, int]:
        return {}


class Infinite(dc.ElasticSampler):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield 0


def unknown_loaders() -> Iterator[tuple[object, str]]:
    data = [*range(8)]
    elastic = dc.ElasticSampler(data, 1, 0)
    stateful = torchdata_samplers.StatefulDistributedSampler(cast(Any, data), 1, 0)
    in_twos = torch.utils.data.BatchSampler(elastic, 2, drop_last=False)
    make = StatefulDataLoader
    yield make(Stream()), "Stream is an iterable dataset"
    yield make(Remembering(data), sampler=elastic), "Remembering has a state_dict"
    for name, sampler in {
        "DistributedSampler": DistributedSampler(cast(Any, data), 1, 0),
        "StatefulDistributedSampler": stateful,
        "Infinite": Infinite(data, 1, 0),
    }.items():
        yield make(data, sampler=sampler), rf"{name} on other ranks .*sampler=dc.Elastic"
    yield make(data, shuffle=True), "RandomSampler on other ranks"
    yield make(data), "SequentialSampler on other ranks"
    yield make(data, batch_sampler=in_twos), "BatchSampler on other ranks"
    own = torchdata_samplers.BatchSampler(elastic, 2, drop_last=False)
    yield make(data, batch_sampler=own), "BatchSampler on other ranks"
    late = make(data, sampler=elastic, num_workers=1, in_order=False)
    yield late, "in_order=False"
    yield DataLoader(cast(Any, data), sampler=elastic), "fetched ahead .*begin_at"
    nodes: Any = importlib.import_module("torchdata.nodes")
    yield nodes.Loader(nodes.IterableWrapper(data)), "not a StatefulDataLoader"
    yield data, "a list is not a StatefulDataLoader"


@pytest.mark.filterwarnings("ignore")
def test_what_nobody_knows_is_refused_by_name() -> None:
    for loader, message in unknown_loaders():
        with pytest.raises(TypeError, match=message):
            dc.DataPosition(loader)


def test_without_torchdata_the_class_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torchdata.stateful_dataloader")
    with pytest.raises(TypeError, match=r"use torchdata's StatefulDataLoader itself"):
        dc.DataPosition(DataLoader(cast(Any, [1, 2])))


def test_a_sampler_that_another_reads_is_refused() -> None:
    job = Job(1)
    next(iter(DataLoader(cast(Any, range(LENGTH)), sampler=job.samplers[0])))
    with pytest.raises(dc.CheckpointError, match=r"moved by other code"):
        job.state()
    job = Job(1)
    job.loaders[0].load_state_dict({"_num_yielded": 3})
    with pytest.raises(dc.CheckpointError, match=r"load only through the DataPosition"):
        job.state()


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_loader_by_itself_is_refused_on_another_number_of_ranks(ranks: int) -> None:
    def states(ranks: int) -> list[dict[str, Any]]:
        data = cast(Any, [*range(LENGTH)])
        samplers: list[Any] = [DistributedSampler(data, ranks, rank) for rank in range(ranks)]
        return [{"data": StatefulDataLoader(data, 2, sampler=sampler)} for sampler in samplers]

    storage, saved = MemoryStorage({"/run": None}), states(2)
    for state in saved:
        next(iter(state["data"]))
    save_on_threads(storage, saved, "/run/ck")
    live = states(ranks)
    wanted = rf"data: .* saved by 2 ranks, now there are {ranks}: .* dc.DataPosition"
    with pytest.raises(dc.IncompatibleError, match=wanted):
        load_on_threads(storage, live, "/run/ck")
    assert live[0]["data"].state_dict()["_num_yielded"] == 0
    load_on_threads(storage, live, "/run/ck", exclude="data", strict=False)
    same = states(2)
    load_on_threads(storage, same, "/run/ck")
    assert [len([*state["data"]]) for state in same] == [5, 5]
    taken: list[dict[str, Any]] = [{"data": None} for _ in range(ranks)]
    load_on_threads(storage, taken, "/run/ck")
    assert taken[0]["data"]["_num_yielded"] == 1


def test_another_torchdata_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(1)
    job.epoch(1)
    monkeypatch.setattr(StatefulDataLoader, "state_dict", lambda _: {"position": 1})
    with pytest.raises(dc.CheckpointError, match=r"has no '_num_yielded': use torchdata 0.11"):
        job.state()


def test_a_pass_of_items_without_batches_counts_them() -> None:
    job = Job(1, batch_size=None)  # type: ignore[arg-type]
    taken = iter(job.loaders[0])
    first = [next(taken) for _ in range(5)]
    rest = [*Job(1).load(job.state()).epoch()]
    assert sorted([*first, *flat(rest)]) == [*range(LENGTH)]
