"""What decides the order of a data loader's epoch, noted before it is drawn and put back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from dist_ckpt.state.wrappers import RNG

_INNER = ("batch_sampler", "sampler")


def order_of(loader: Any) -> dict[str, Any]:
    """Return what the next `iter` of a loader draws its order from, as plain data."""
    return {
        "rng": RNG().capture(),
        "generators": [bytes(one.get_state().tolist()) for one in _generators(loader)],
        "seeds": [one.initial_seed for one in _seeded(loader)],
    }


def set_order(loader: Any, order: dict[str, Any]) -> None:
    """Let the next `iter` of a loader draw the order that `order_of` was taken of."""
    for sampler, seed in zip(_seeded(loader), order["seeds"], strict=True):
        sampler.initial_seed = seed
    for generator, state in zip(_generators(loader), order["generators"], strict=True):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    RNG().restore(order["rng"])


def _samplers(loader: Any) -> Iterator[Any]:
    """Yield the samplers of a loader, those inside of others behind them."""
    found = [getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)]
    for _ in range(4):  # accelerate puts one around one
        yield from (one for one in found if one is not None)
        inner = [getattr(one, name, None) for one in found for name in _INNER]
        found = [one for one in inner if one is not None]


def _generators(loader: Any) -> list[torch.Generator]:
    """Return what a loader draws from beside the global ones; of a seed, nothing is drawn."""
    own = [getattr(loader, "synchronized_generator", None), getattr(loader, "generator", None)]
    found = [*own, *(getattr(one, "generator", None) for one in _samplers(loader))]
    seeded = {id(getattr(one, "generator", None)) for one in _seeded(loader)}
    generators = {id(one): one for one in found if isinstance(one, torch.Generator)}
    return [one for number, one in generators.items() if number not in seeded]


def _seeded(loader: Any) -> list[Any]:
    """Return accelerate's samplers, whose order follows from their seed and the epoch."""
    found = {id(one): one for one in _samplers(loader) if hasattr(one, "initial_seed")}
    return [one for one in found.values() if type(one.initial_seed) is int]
