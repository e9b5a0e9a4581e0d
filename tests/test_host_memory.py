"""Scratch memory is our own and on a page, and every copy is complete."""

from __future__ import annotations

import subprocess
import sys
from mmap import PAGESIZE

import pytest

from dist_ckpt import host_memory
from dist_ckpt.host_memory import address_of, copy, scratch


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


def test_scratch_begins_on_a_page_and_holds_zeros() -> None:
    memory = scratch(5 << 20)
    assert len(memory) == 5 << 20
    assert address_of(memory) % PAGESIZE == 0
    assert not any(memory[:: 1 << 12])


FORK = """
import os
from dist_ckpt.host_memory import scratch
memory = scratch(4096)
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
