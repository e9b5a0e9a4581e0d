"""Where ranks, batches and positions change, each sample of an epoch is taken exactly once."""

from __future__ import annotations

import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data.distributed import DistributedSampler

import dist_ckpt as dc

RANKS = st.integers(1, 7)


def samplers(length: int, ranks: int, **options: bool) -> list[dc.ElasticSampler]:
    return [dc.ElasticSampler(range(length), ranks, rank, **options) for rank in range(ranks)]


@given(
    length=st.integers(1, 40),
    ranks=RANKS,
    epoch=st.integers(0, 3),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_a_whole_epoch_has_the_order_of_torch(
    length: int, ranks: int, epoch: int, shuffle: bool, drop_last: bool
) -> None:
    for rank in range(ranks):
        options: Any = {"shuffle": shuffle, "drop_last": drop_last, "seed": 5}
        data: Any = range(length)
        other: Any = DistributedSampler(data, ranks, rank, **options)
        sampler = dc.ElasticSampler(data, ranks, rank, **options)
        other.set_epoch(epoch)
        sampler.set_epoch(epoch)
        assert [*sampler] == [*other]
        assert len(sampler) == len(other)


@given(
    length=st.integers(0, 60),
    phases=st.lists(st.tuples(RANKS, st.integers(0, 20)), max_size=4),
    ranks=RANKS,
    drop_last=st.booleans(),
)
def test_no_sample_is_lost_or_doubled_while_ranks_change(
    length: int, phases: list[tuple[int, int]], ranks: int, drop_last: bool
) -> None:
    consumed = 0
    seen: list[int] = []
    for count, asked in phases:  # each rank takes so many samples, and all stop
        group = samplers(length, count, drop_last=drop_last)
        for sampler in group:
            sampler.begin_at(3, consumed)
        rows = min(asked, (length - consumed) // count)
        passes = [iter(sampler) for sampler in group]
        seen += [next(one) for _ in range(rows) for one in passes]
        consumed = group[0].reached(consumed, rows)
        assert consumed == len(seen) == len({*seen})
    order = [*samplers(length, 1)[0]] if length else []
    group = samplers(length, ranks, drop_last=drop_last)
    for sampler in group:
        sampler.begin_at(3, consumed)
    rest = [[*sampler] for sampler in group]
    assert len({len(one) for one in rest}) == 1  # none waits for another that has no more
    ahead = [sample for one in rest for sample in one]
    left = length - consumed
    if drop_last:
        assert len({*seen, *ahead}) == len(seen) + len(ahead) == length - left % ranks
    else:
        extra = Counter(seen + ahead) - Counter(order)
        assert {*seen, *ahead} == {*order}
        assert extra.total() == -left % ranks
    assert len([*group[0]]) == len(group[0])  # the next pass is whole


def test_a_position_belongs_to_its_epoch() -> None:
    sampler = dc.ElasticSampler(range(10), 2, 0)
    sampler.begin_at(3, 4)
    with pytest.raises(ValueError, match=r"left epoch 3 at sample 4 of 10. Loop over range"):
        sampler.set_epoch(0)
    sampler.set_epoch(3)
    assert len([*sampler]) == 3
    sampler.set_epoch(4)
    assert len([*sampler]) == 5
    sampler.begin_at(3, 10)  # an epoch that is over: the loop may count on
    sampler.set_epoch(4)
    assert len([*sampler]) == 5


def set_epoch_by(module: str, sampler: dc.ElasticSampler, epoch: int) -> None:
    """Set an epoch from the code of another module."""
    exec("sampler.set_epoch(epoch)", {"__name__": module, "sampler": sampler, "epoch": epoch})


@pytest.mark.parametrize("module", ["lightning.fabric.utilities.data", "accelerate.data_loader"])
@pytest.mark.parametrize("consumed", [0, 4, 9])
def test_a_framework_that_counts_anew_after_a_load_is_refused_by_name(
    module: str, consumed: int
) -> None:
    sampler = dc.ElasticSampler(range(9), 1, 0)
    set_epoch_by(module, sampler, 0)
    assert len([*sampler]) == 9
    set_epoch_by(module, sampler, 1)  # no load: any epoch
    sampler.begin_at(2, consumed)  # a load
    said = rf"set_epoch\(0\), called by {module}, after a load that left epoch 2 .* counts .* of th"
    with pytest.raises(ValueError, match=said):
        set_epoch_by(module, sampler, 0)
    assert sampler.next_pass == (2, consumed), "unchanged"
    set_epoch_by(module, sampler, 2)
    assert len([*sampler]) == 9 - consumed
    set_epoch_by(module, sampler, 3)


def test_a_loop_may_begin_another_epoch_after_a_load_at_its_beginning() -> None:
    sampler = dc.ElasticSampler(range(9), 1, 0)
    sampler.begin_at(2, 0)
    set_epoch_by("__main__", sampler, 0)
    assert sampler.next_pass == (0, 0)


def test_what_makes_no_sense_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = [*range(10)]
    sampler = dc.ElasticSampler(data)
    for consumed in (-1, 11):
        with pytest.raises(ValueError, match=rf"`consumed` is {consumed} of 10 samples"):
            sampler.begin_at(0, consumed)
    data.append(10)
    with pytest.raises(ValueError, match=r"had 10 samples .* has 11 now"):
        next(iter(sampler))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"WORLD_SIZE is 2, but the process group does not exist"):
        dc.ElasticSampler(data)
    assert len(dc.ElasticSampler(data, num_replicas=2, rank=1)) == 6


@pytest.mark.parametrize(
    "wrong", [{"num_replicas": 1.5}, {"rank": "0"}, {"seed": None}, {"seed": 1 << 62}], ids=str
)
def test_what_is_no_whole_number_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=f"`{next(iter(wrong))}` is "):
        dc.ElasticSampler([1, 2], **{"num_replicas": 1, "rank": 0, **wrong})


def test_a_position_is_of_whole_numbers() -> None:
    sampler = dc.ElasticSampler([*range(10)], 1, 0)
    for position in (("0", 0), (0, 1.5), (0, float("nan")), (1 << 62, 0)):
        with pytest.raises((TypeError, ValueError), match=r"`(epoch|consumed)` is "):
            sampler.begin_at(*position)
    with pytest.raises(TypeError, match="`epoch` is None: give a whole number"):
        sampler.set_epoch(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`dataset` is a int: give one with a length"):
        dc.ElasticSampler(5)  # type: ignore[arg-type]
    assert (sampler.next_pass, len([*sampler])) == ((0, 0), 10)


class PassLoader:
    """What a `Loader` of torchdata.nodes does: `state_dict` begins a pass that `iter` returns."""

    def __init__(self) -> None:
        self.next: Any = None
        self.current: int | None = None
        self.is_early = False

    def __iter__(self) -> PassLoader:
        if self.current is not None and self.is_early:
            self.is_early = False
            return self
        self.current, self.next = self.next["at"] if self.next else 0, None
        return self

    def __next__(self) -> int:
        assert self.current is not None
        self.current += 1
        return self.current

    def load_state_dict(self, state: Any) -> None:
        self.next = state

    def state_dict(self) -> dict[str, Any]:
        if self.current is None:
            iter(self)
            self.is_early = True
        return {"at": self.current}


def test_a_loader_of_nodes_is_at_its_position_after_a_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = types.ModuleType("torchdata.nodes")
    vars(nodes)["Loader"] = PassLoader
    monkeypatch.setitem(sys.modules, "torchdata.nodes", nodes)
    saved = PassLoader()
    batches = iter(saved)
    assert [next(batches) for _ in range(3)] == [1, 2, 3]
    dc.save({"data": saved}, tmp_path / "a")
    loaded, again, used = PassLoader(), PassLoader(), PassLoader()
    dc.load({"data": loaded}, tmp_path / "a")
    dc.save({"data": loaded}, tmp_path / "b")  # immediately after the load
    dc.load({"data": again}, tmp_path / "b")
    next(iter(used))
    dc.load({"data": used}, tmp_path / "a")
    assert [next(iter(loader)) for loader in (loaded, again, used)] == [4, 4, 4]
