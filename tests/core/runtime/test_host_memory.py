"""Scratch memory is our own and on a page, lent to one at a time; every copy is complete."""

from __future__ import annotations

import subprocess
import sys
from mmap import PAGESIZE

import pytest

from dist_ckpt.core.runtime import host_memory
from dist_ckpt.core.runtime.host_memory import BufferPool, address_of, allocate_scratch, copy, move
from dist_ckpt.errors import StorageError


@pytest.mark.parametrize("nbytes", [1, 100, 256 << 10, (3 << 20) + 1])
@pytest.mark.parametrize("readonly", [False, True])
def test_a_copy_of_any_size_is_complete_and_touches_nothing_else(
    nbytes: int, readonly: bool
) -> None:
    data = bytes(range(256)) * (nbytes // 256 + 1)
    source = memoryview(data if readonly else bytearray(data))[:nbytes]
    memory = bytearray(nbytes + 2)
    copy(memoryview(memory)[1:-1], source)
    assert memory == b"\0" + data[:nbytes] + b"\0"


def test_a_copy_between_unequal_lengths_is_our_own_mistake() -> None:
    for nbytes in (10, host_memory._MIN_MOVE_NBYTES):
        with pytest.raises((AssertionError, ValueError)):
            copy(memoryview(bytearray(nbytes - 1)), memoryview(bytearray(nbytes)))


def test_a_move_copies_just_its_bytes() -> None:
    source, target = bytearray(b"abcdefgh"), bytearray(8)
    first = address_of(memoryview(source)), address_of(memoryview(target))
    move(first[1] + 2, first[0] + 1, 4)
    assert target == b"\0\0bcde\0\0"


def test_scratch_begins_on_a_page_and_holds_zeros() -> None:
    memory = allocate_scratch(5 << 20)
    assert len(memory) == 5 << 20
    assert address_of(memory) % PAGESIZE == 0
    assert not any(memory[:: 1 << 12])


FORK = """
import os
from dist_ckpt.core.runtime.host_memory import allocate_scratch
memory = allocate_scratch(4096)
memory[:4] = b"mine"
if os.fork() == 0:
    memory[:4] = b"else"
    os._exit(0)
os.wait()
print(bytes(memory[:4]).decode())
"""


def test_what_a_forked_process_writes_into_scratch_is_its_own() -> None:
    run = [sys.executable, "-c", FORK]
    found = subprocess.run(run, capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout == "mine\n"


def test_a_slot_is_lent_to_one_at_a_time_and_used_again() -> None:
    buffers = BufferPool(8)
    with buffers.borrow() as first, buffers.borrow() as second:
        assert first is not second
        assert len(first) == len(second) == 8
    with buffers.borrow() as again:
        assert again is first or again is second


def test_a_slot_in_which_a_call_may_still_be_stuck_is_not_lent_again() -> None:
    buffers = BufferPool(8)
    with pytest.raises(StorageError), buffers.borrow() as stuck:
        raise StorageError("the storage did not answer")
    with buffers.borrow() as other:
        assert other is not stuck


def test_slots_that_are_large_enough_are_used_and_others_are_made() -> None:
    buffers = BufferPool(8)
    assert buffers.fitting(8) is buffers
    with buffers.fitting(9).borrow() as larger:
        assert len(larger) == 9


def test_cleared_slots_are_gone() -> None:
    buffers = BufferPool(8)
    with buffers.borrow() as first:
        pass
    buffers.clear()
    with buffers.borrow() as second:
        assert second is not first


def test_no_more_slots_are_kept_than_their_memory_is_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "MAX_KEPT_NBYTES", 16)
    buffers = BufferPool(8)
    with buffers.borrow() as one, buffers.borrow() as two, buffers.borrow() as three:
        used = [one, two, three]
    with buffers.borrow() as a, buffers.borrow() as b, buffers.borrow() as c:
        assert sum(any(buffer is known for known in used) for buffer in (a, b, c)) == 2
