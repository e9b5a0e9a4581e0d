"""Samples of replicas."""

from __future__ import annotations

import pytest
import torch

from dist_ckpt.core.saving.local_save_state import digest_sample
from dist_ckpt.core.shard_io.memory.torch_tensor import TensorSource

MIB = 1 << 20


def digest(data, name="model.w"):
    return digest_sample(TensorSource(tensor_of(data)), name)


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
    class Counted(TensorSource):
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
