"""What data loaders draw their order from, beside the global generators: noted, and put back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from dist_ckpt.errors import IncompatibleError

_INNER = ("batch_sampler", "sampler")


def sources_of(loaders: Iterable[Any]) -> dict[str, Any]:
    """Return what the next `iter` of loaders draws their order from, as plain data."""
    loaders = list(loaders)
    return {
        "generators": [bytes(item.get_state().tolist()) for item in _generators(loaders)],
        "seeds": [item.initial_seed for item in _seeded(loaders)],
    }


def set_sources(loaders: Iterable[Any], sources: dict[str, Any]) -> None:
    """Let the next `iter` of loaders draw the order that `sources_of` was taken of.

    Raises IncompatibleError if they draw from others now.
    """
    loaders = list(loaders)
    samplers, generators = _seeded(loaders), _generators(loaders)
    before, now = (
        f"{len(some)} samplers with a seed and {len(others)} generators"
        for some, others in ((sources["seeds"], sources["generators"]), (samplers, generators))
    )
    if before != now:
        raise IncompatibleError(
            f"the loaders drew their order from {before}, and now from {now}: it would be another "
            f"order. Make the loaders as they were when this was saved"
        )
    for sampler, seed in zip(samplers, sources["seeds"], strict=True):
        sampler.initial_seed = seed
    for generator, state in zip(generators, sources["generators"], strict=True):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _samplers(loader: Any) -> Iterator[Any]:
    """Yield the samplers of a loader, those inside of others behind them."""
    samplers = [getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)]
    for _ in range(4):  # accelerate puts one around one
        yield from (sampler for sampler in samplers if sampler is not None)
        inner = [getattr(sampler, name, None) for sampler in samplers for name in _INNER]
        samplers = [sampler for sampler in inner if sampler is not None]


def _generators(loaders: list[Any]) -> list[torch.Generator]:
    """Return what loaders draw from beside the global ones; of a seed, nothing is drawn."""
    seeded = {id(getattr(item, "generator", None)) for item in _seeded(loaders)}
    candidates: list[Any] = []
    for loader in loaders:
        own = [getattr(loader, name, None) for name in ("synchronized_generator", "generator")]
        candidates += [*own, *(getattr(item, "generator", None) for item in _samplers(loader))]
    generators = {id(item): item for item in candidates if isinstance(item, torch.Generator)}
    return [item for number, item in generators.items() if number not in seeded]


def _seeded(loaders: list[Any]) -> list[Any]:
    """Return accelerate's samplers, whose order follows from their seed and the epoch."""
    samplers = (sampler for loader in loaders for sampler in _samplers(loader))
    seeded = {id(sampler): sampler for sampler in samplers if hasattr(sampler, "initial_seed")}
    return [sampler for sampler in seeded.values() if type(sampler.initial_seed) is int]
