"""What a user puts around a value of the state."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from dist_ckpt.core.state.wrappers import RNG, FlatShard, LocalShard, Named, PerRank


def test_importing_them_imports_neither_torch_nor_numpy():
    code = (
        "import sys, dist_ckpt.core.state.wrappers as w; w.RNG().restore(w.RNG().capture()); "
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_local_shard_takes_any_sequences_and_anything_with_a_shape():
    shard = LocalShard(np.ones((2, 3)), torch.Size([4, 3]), [2, 0])  # type: ignore[arg-type]
    assert (shard.global_shape, shard.offset) == ((4, 3), (2, 0))
    assert LocalShard(torch.tensor(1.0), (), ()).offset == ()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.ones(2, 3), (4, 3), (3, 0)), ValueError, "reaches beyond"),
        ((torch.ones(2, 3), (4, 3), (2,)), ValueError, "as many numbers"),
        ((torch.ones(2), (4,), (-1,)), ValueError, "cannot be negative"),
        ((torch.ones(2), (4,), (1.0,)), TypeError, "integers"),
        ((torch.ones(2), (4,), 1), TypeError, "`offset` is 1"),
        (([1.0, 2.0], (4,), (0,)), TypeError, "holds a list"),
    ],
)
def test_a_local_shard_that_cannot_be_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        LocalShard(*arguments)


def test_a_flat_shard_that_cannot_be_is_refused():
    shard = FlatShard(torch.ones(5), [2, 3], 1)
    assert shard.global_shape == (2, 3)
    with pytest.raises(ValueError, match="5 elements from 2 on reaches beyond the 6"):
        FlatShard(torch.ones(5), (2, 3), 2)
    with pytest.raises(ValueError, match="negative"):
        FlatShard(torch.ones(5), (2, 3), -1)
    with pytest.raises(TypeError, match="integers"):
        FlatShard(torch.ones(5), (2, 3), True)


def test_a_per_rank_value_keeps_its_key_and_policy_and_changes_its_value():
    kept = PerRank({"position": 3}, key=("dp", 1), on_reshard="drop")
    kept.value = {"position": 4}
    assert (kept.value, kept.key, kept.on_reshard) == ({"position": 4}, ("dp", 1), "drop")
    assert PerRank(1).key is None
    pick: Any = max
    assert PerRank(1, on_reshard=pick).on_reshard is pick
    assert kept == PerRank({"position": 4}, key=("dp", 1), on_reshard="drop")


@pytest.mark.parametrize(
    "key", [True, 1.5, (), ("dp", None), ["dp", 1], b"dp", 1 << 63, ("dp", 1 << 64), -(1 << 63) - 1]
)
@pytest.mark.parametrize("wrapper", [RNG, lambda **options: PerRank(0, **options)])
def test_keys_are_integers_strings_and_tuples(wrapper, key):
    with pytest.raises(TypeError, match="`key` is"):
        wrapper(key=key)


@pytest.mark.parametrize("policy", ["ignore", None, 3])
@pytest.mark.parametrize("wrapper", [RNG, lambda **options: PerRank(0, **options)])
def test_policies_are_error_drop_or_a_function(wrapper, policy):
    with pytest.raises(ValueError, match="`on_reshard` is"):
        wrapper(on_reshard=policy)


def test_a_per_rank_value_holds_no_other_wrapper():
    for inner in (PerRank(1), RNG()):
        with pytest.raises(TypeError, match="put that into the state itself"):
            PerRank(inner)


# --- Named -----------------------------------------------------------------------------------


@pytest.fixture
def parameters():
    return [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]


@pytest.fixture
def optimizer(parameters):
    return torch.optim.SGD([{"params": parameters[:2]}, {"params": parameters[2:]}], lr=0.1)


def test_names_go_by_position_or_by_parameter(optimizer, parameters):
    expected = {id(p): name for p, name in zip(parameters, "abc", strict=True)}
    assert Named(optimizer, ["a", "b", "c"]).by_id() == expected
    a, b, c = parameters
    mapping = {"c": c, "unused": torch.nn.Parameter(torch.ones(1)), "a": a, "b": b, "tied": a}
    assert Named(optimizer, mapping).by_id() == expected


def test_names_that_do_not_fit_the_optimizer_are_refused(optimizer, parameters):
    with pytest.raises(ValueError, match="2 names for 3 parameters"):
        Named(optimizer, ["a", "b"])
    with pytest.raises(ValueError, match="twice"):
        Named(optimizer, ["a", "b", "a"])
    with pytest.raises(ValueError, match="no name for parameter 0 of group 1"):
        Named(optimizer, {"a": parameters[0], "b": parameters[1]})
    with pytest.raises(TypeError, match="not a string"):
        Named(optimizer, ["a", "b", 3])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="`names` is a str"):
        Named(optimizer, "abc")
    with pytest.raises(TypeError, match="takes an optimizer, not a Linear"):
        Named(torch.nn.Linear(1, 1), [])  # type: ignore[arg-type]
