"""How much of replicas is compared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.saving import rank_save, save_options
from dist_ckpt.core.saving.rank_save import digest_sample, digest_whole
from dist_ckpt.core.saving.save import save_together
from dist_ckpt.core.saving.save_options import SaveOptions
from dist_ckpt.core.shard_io.memory.torch_tensor import TensorReader
from dist_ckpt.errors import UnequalReplicasError
from dist_ckpt.testing.memory_storage import MemoryStorage
from dist_ckpt.testing.thread_channel import TEST_CONFIG
from ranks import errors_of, run_ranks, try_save_on_threads

MIB = 1 << 20


def digest(data, name="model.w"):
    return digest_sample(TensorReader(tensor_of(data)), name)


def tensor_of(data):
    return torch.frombuffer(bytearray(data), dtype=torch.int64) if data else torch.empty(0)


@pytest.mark.parametrize("nbytes", [8, 65536, 65544, MIB - 8, MIB])
def test_every_byte_counts_up_to_one_mebibyte(nbytes):
    data = bytearray(nbytes)
    before = digest(data)
    for place in (0, nbytes // 2, nbytes - 1):
        data[place] ^= 1
        assert digest(data) != before
        data[place] ^= 1
    assert digest(data) == before


def test_one_mebibyte_is_read_of_a_large_tensor_spread_over_all_of_it():
    class Counted(TensorReader):
        spans: tuple[tuple[int, int], ...] = ()

        def read(self, start, stop, scratch):
            self.spans = (*self.spans, (start, stop))
            return super().read(start, stop, scratch)

    tensor = tensor_of(bytes(16 * MIB + 40))
    source = Counted(tensor)
    digest_sample(source, "model.w")
    assert sum(stop - start for start, stop in source.spans) == MIB
    assert [start // MIB for start, _ in source.spans] == list(range(16))
    assert all(start % 16 == 0 for start, _ in source.spans)
    other = Counted(tensor)
    digest_sample(other, "model.v")
    assert other.spans != source.spans


def test_a_tensor_that_differs_throughout_has_another_digest():
    assert digest(bytes(2 * MIB)) == digest(bytes(2 * MIB))
    assert digest(bytes(2 * MIB)) != digest(b"\1" * (2 * MIB))
    assert digest(bytes(2 * MIB)) != digest(bytes(2 * MIB + 8))
    assert digest(b"") != digest(bytes(8))


# --- what is compared in full --------------------------------------------------------------------

NBYTES = 16 * MIB


def beside_the_sample():
    """Return the number of a byte that is in no sample of a tensor `w`, also if it is split."""
    half, block = NBYTES // 2, 65536
    cells = [(0, NBYTES, "w[0]"), (0, half, "w[0]"), (half, half, "w[1]")]
    first = {
        (start + offset) // block
        for start, nbytes, name in cells
        for offset in rank_save.sample_offsets(nbytes, name)
    }
    return block * min(set(range(1, NBYTES // block)) - first - {number + 1 for number in first})


@pytest.mark.parametrize("nbytes", [8, MIB, 2 * MIB + 8])
def test_every_byte_counts_in_a_whole_digest(nbytes):
    data = bytearray(nbytes)
    before = digest_whole(TensorReader(tensor_of(data)))
    for place in (0, nbytes // 2, nbytes - 1):
        data[place] ^= 1
        assert digest_whole(TensorReader(tensor_of(data))) != before
        data[place] ^= 1


def saves(differs, **options):
    """Save once for each item of `differs`: whether one byte of rank 1 differs, beside the sample.

    Return what became of each on rank 0.
    """
    storage, place = MemoryStorage(), beside_the_sample()

    def run(rank, channel, bulk):
        session = Session(channel, bulk, TEST_CONFIG)
        found: list[int | str] = []
        for number, is_other in enumerate(differs):
            w = torch.zeros(NBYTES, dtype=torch.uint8)
            w[place] = rank if is_other else 7
            how = SaveOptions(step=number, **options)
            try:
                report = save_together(session, {"w": w}, f"/runs/{number}", how, storage)
                found.append(report.num_sampled)
            except UnequalReplicasError:
                found.append("differs")
        return found

    found = run_ranks(run, world_size=2, harness="threads")
    assert found[0] == found[1]
    return found[0]


def test_the_first_save_compares_in_full_and_later_ones_a_sample():
    found = saves([False, True, False])
    assert found[0] == 0
    assert found[1] == found[2] > 0


def test_what_the_first_save_refused_is_compared_in_full_again():
    assert saves([True, True, False, True])[:3] == ["differs", "differs", 0]


def test_all_is_compared_in_each_save_where_that_is_asked_for():
    assert saves([False, True, True], check_replicas="all") == [0, "differs", "differs"]


def test_the_first_save_compares_no_more_than_its_limit_in_full(monkeypatch):
    monkeypatch.setattr(save_options, "FIRST_NBYTES", MIB)
    (num_sampled,) = saves([True])
    assert num_sampled > 0


def test_a_report_names_how_many_replicas_were_sampled():
    storage = MemoryStorage()
    outcomes = try_save_on_threads(lambda _: storage, [{"w": torch.zeros(3)}] * 2, "/a")
    assert "sampled" not in str(outcomes[0].value)
    assert "; 2 replicas sampled)" in str(replace(outcomes[0].value, num_sampled=2))


def test_ranks_compare_alike_or_not_at_all():
    states = [{"w": torch.zeros(3)}] * 2
    each = [{"check_replicas": "all"}, {}]
    outcomes = try_save_on_threads(lambda _: MemoryStorage(), states, "/a", each)
    assert {type(error) for error in errors_of(outcomes)} == {ValueError}
    assert "check_replicas" in str(errors_of(outcomes)[0])
    wrong: Any = True
    with pytest.raises(ValueError, match='check_replicas=True: give "sample" or "all"'):
        SaveOptions(check_replicas=wrong).check()
