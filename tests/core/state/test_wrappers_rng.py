"""The random generators as plain data."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from dist_ckpt.core.state.wrappers import RNG
from dist_ckpt.errors import IncompatibleError


def draw():
    return (
        random.random(),
        random.gauss(0, 1),
        np.random.normal(),
        np.random.randint(1 << 30),
        torch.rand(3).tolist(),
    )


@pytest.fixture(autouse=True)
def _leave_the_generators_as_they_were():
    state = RNG().capture()
    yield
    RNG().restore(state)


def is_plain(value):
    if isinstance(value, dict | tuple):
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        return type(value) in (dict, tuple) and all(map(is_plain, parts))
    return type(value) in (int, float, str, bytes, type(None))


def test_what_was_captured_is_drawn_again():
    draw()
    state = RNG().capture()
    assert is_plain(state)
    first = draw()
    draw()
    RNG().restore(state)
    assert draw() == first


def test_capturing_draws_nothing():
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    expected = draw()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    RNG().capture()
    assert draw() == expected


@pytest.mark.parametrize(
    ("part", "state"),
    [
        ("python", (3, (1, 2), None)),
        ("python", "text"),
        ("numpy", (b"short", 0, 0, 0.0)),
        ("numpy", None),
        ("torch", b"short"),
        ("torch", 5),
        ("accelerator", ("unknown", b"")),
        ("accelerator", None),
        ("other", b""),
    ],
)
def test_a_state_that_cannot_be_set_changes_no_generator(part, state):
    good = RNG().capture()
    first = draw()
    RNG().restore(good)
    damaged = {**good, part: state}
    for use in (RNG().check, RNG().restore):
        with pytest.raises(IncompatibleError, match="exclude"):
            use(damaged)
    assert draw() == first


def test_a_numpy_generator_that_is_not_known_is_refused():
    numpy_random: Any = np.random
    legacy = numpy_random.get_bit_generator()
    numpy_random.set_bit_generator(np.random.PCG64(3))
    try:
        with pytest.raises(TypeError, match=r"PCG64.*PerRank"):
            RNG().capture()
    finally:
        numpy_random.set_bit_generator(legacy)
