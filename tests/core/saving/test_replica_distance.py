"""The error for replicas that differ says how far apart they are, and on which ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from dist_ckpt.core.commit.unequal_replicas import UnequalReplicas
from dist_ckpt.core.planning.sharding_config import ShardingConfig
from dist_ckpt.errors import UnequalReplicasError
from dist_ckpt.testing.memory_storage import MemoryStorage
from ranks import errors_of, shared_storage, try_save_on_threads

NAN = math.nan


def text_of(states: Sequence[Any], **options: Any) -> str:
    errors = errors_of(try_save_on_threads(shared_storage(MemoryStorage()), states, **options))
    assert {type(error) for error in errors} == {UnequalReplicasError}
    assert len({str(error) for error in errors}) == 1
    return str(errors[0])


CASES: dict[str, tuple[Callable[[int], Any], int, str]] = {
    "a norm": (
        lambda rank: torch.tensor([[1.0, 2.0], [3.0, 4.0 + rank / 4]]),
        3,
        "of all elements on ranks 0-2, farthest apart: 4 on rank 0 and 4.5 on rank 2 at [1, 1], a ",
    ),
    "not a number": (
        lambda rank: torch.tensor([1.0, NAN, NAN if rank == 1 else 2.0]).bfloat16(),
        2,
        "farthest apart: 2 on rank 0 and nan on rank 1 at [2])",
    ),
    "infinite": (lambda rank: torch.tensor(-math.inf if rank else 0.0), 2, "and -inf on rank 1)"),
    "integers": (lambda rank: torch.tensor([7, 8 - rank]), 2, "8 on rank 0 and 7 on rank 1 at [1]"),
    "flags": (lambda rank: torch.tensor([rank > 0]), 2, "farthest apart: 0 on rank 0 and 1 on "),
    "zeros": (lambda rank: torch.tensor([-0.0 if rank else 0.0]), 2, "equal as numbers in all el"),
    "complex numbers": (
        lambda rank: torch.tensor(complex(rank)),
        2,
        "(rank 0 differs from rank 1)",
    ),
    "short values": (lambda rank: rank / 4, 3, "; 0.0 on rank 0, 0.25 on rank 1, 0.5 on rank 2)"),
    "long values": (lambda rank: [rank] * 9, 2, "x (rank 0 differs from rank 1)"),
    "more ranks than are compared": (
        lambda rank: torch.tensor(float(rank)),
        12,
        "of all elements on ranks 0-7, farthest apart: 0 on rank 0 and 7 on rank 7, a difference",
    ),
    "each of many elements": (
        lambda rank: torch.full((1 << 20,), float(rank)),
        2,
        "of 262144 of 1048576 elements on ranks 0-1, farthest apart: 0 on rank 0 and 1 on rank 1",
    ),
    "one of many elements": (
        lambda rank: torch.zeros(1 << 20).index_fill_(0, torch.tensor([77777]), float(rank)),
        2,
        "equal as numbers in 262144 of 1048576 elements",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_error_says_how_far_apart_copies_are(case: str) -> None:
    make, world_size, words = CASES[case]
    assert words in text_of([{"x": make(rank)} for rank in range(world_size)])


def test_the_element_of_a_sampled_copy_is_the_one_in_the_whole_tensor() -> None:
    sharding = ShardingConfig({"dp": 2, "tp": 2}, {"w": {"tp": 0}, "big": {"tp": 1}})
    small, big = torch.zeros(2, 3), torch.arange(1 << 19, dtype=torch.float64).view(-1, 1)
    states = [{"w": small.clone(), "big": big.clone()} for _ in range(4)]
    states[3]["w"][1, 2] = 5.0
    states[2]["big"][1 << 18 :] -= 1  # the first of these in the sample is named
    text = text_of(states, sharding=sharding)
    assert "w[2:4,0:3] (rank 1 differs from rank 3; of all elements on ranks 1, 3, farthest" in text
    assert "5 on rank 3 at [3, 2], a difference of 5 (1 relative)" in text
    place = text.partition("on rank 2 at [")[2].partition(",")[0]
    value = text.partition("farthest apart: ")[2].partition(" ")[0]
    assert place == value  # each element is its own number
    assert int(place) >= 1 << 18


def test_only_the_first_names_are_compared() -> None:
    states = [{f"x{n}": torch.tensor([rank]) for n in range(9)} for rank in range(2)]
    assert text_of(states).count("farthest apart") == 4


def test_without_the_copies_the_error_names_the_way_to_compare_them() -> None:
    text = UnequalReplicas.of([{"g": {"x[0:2]": "a"}}, {"g": {"x[0:2]": "b"}}]).error_text(None)
    assert "x[0:2] (rank 0 differs from rank 1)." in text
    assert text.endswith(
        "A background save cannot compare them: `dc.save` says how far apart they are"
    )
