"""Which tensors share memory; what a load does about it is tested in test_bind.py."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt.core.shard_io.memory.torch_tensor import find_aliased_tensors

SIZE = 12

views = st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(sorted)


@given(st.lists(views, max_size=6), st.booleans())
def test_tensors_that_share_a_byte_are_found_and_no_others(ends, is_split):
    memory = torch.zeros(SIZE, dtype=torch.uint8)
    tensors: list[tuple[torch.Tensor, ...]] = [(memory[start:stop],) for start, stop in ends]
    if is_split:
        # Parts of one tensor may share with each other.
        tensors = [(*parts, *parts) for parts in tensors]
    held = [set(range(start, stop)) for start, stop in ends]
    expected = {
        number
        for number, own in enumerate(held)
        if any(own & other for place, other in enumerate(held) if place != number)
    }
    assert find_aliased_tensors(tensors) == expected


def test_many_tensors_apart_share_nothing_but_the_one_inside_another():
    tensors = [(torch.zeros(4),) for _ in range(50)]
    assert find_aliased_tensors(tensors) == frozenset()
    assert find_aliased_tensors([*tensors, (tensors[7][0][1:2],)]) == {7, 50}
