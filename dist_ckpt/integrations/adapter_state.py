"""State that several adapters save: extra keys, buffers of DDP, and the order of data loaders.

In a forward, BatchNorm changes buffers by the rank's own data, so the replicas differ. Replicas
that differ cannot be saved. So the buffers are broadcast before a save, as DDP would do later.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Never

import torch
from torch import nn
from torch.distributed import ProcessGroup, broadcast

from dist_ckpt.core.state.wrappers import RNG
from dist_ckpt.errors import IncompatibleError


def check_extra_state(state: Mapping[str, Any] | None, reserved: Collection[str]) -> dict[str, Any]:
    """Return the extra state to save. ValueError if it has a `reserved` key of the adapter."""
    if conflicts := sorted({*(state or {})} & {*reserved}):
        raise ValueError(
            f"the state has the keys {', '.join(conflicts)}, which the adapter uses: rename them"
        )
    return dict(state or {})


def check_on_reshard(on_reshard: str) -> None:
    """Raise ValueError for an unknown value of `on_reshard`."""
    if on_reshard not in ("error", "drop"):
        raise ValueError(f'`on_reshard` is {on_reshard!r}: give "error" or "drop"')


def refuse_other_ranks(adapter: str, batches: int, then: int, now: int) -> Never:
    """Raise IncompatibleError for a save within an epoch by another number of ranks."""
    raise IncompatibleError(
        f"saved after batch {batches} of an epoch by {then} ranks, but {now} train now: batches "
        f'would be lost or repeated. Restart the epoch with {adapter}(..., on_reshard="drop"), or '
        f"train with {then} ranks"
    )


def check_num_batches(done: int, then: int | None, now: int | None) -> None:
    """Raise IncompatibleError if the epochs of a loader have another number of batches now."""
    if now != then:
        raise IncompatibleError(
            f"saved after batch {done} of an epoch of {then} batches on each rank, but now it has "
            f"{now}: batches would be lost or repeated. Use the data and the batch size of the save"
        )


def broadcast_module_buffers(model: object) -> None:
    """Broadcast the buffers of rank 0, if DDP does so at each forward. Collective with DDP."""
    if isinstance(model, nn.parallel.DistributedDataParallel) and model.broadcast_buffers:
        broadcast_inner_buffers(model.module, model.parameters_to_ignore, group=model.process_group)


def broadcast_inner_buffers(
    module: nn.Module, ignored: Collection[str] = (), *, group: ProcessGroup | None = None
) -> None:
    """Broadcast the buffers of a module in DDP from the group's first rank. Collective."""
    for name, buffer in module.named_buffers():
        if name not in ignored:
            broadcast(buffer, group=group, group_src=0)


def capture_sources(loaders: Iterable[Any]) -> dict[str, Any]:
    """Return the generator states and seeds for the next order of loaders, as plain data.

    "rng" are the global generators, which `set_sources` does not set.
    """
    loaders = list(loaders)
    return {
        "rng": RNG().capture(),
        "generators": [bytes(item.get_state().tolist()) for item in _generators(loaders)],
        "seeds": [item.initial_seed for item in _seeded(loaders)],
    }


def set_sources(loaders: Iterable[Any], sources: dict[str, Any]) -> None:
    """Set the sources, so that the next `iter` of loaders draws the saved order.

    Raises IncompatibleError if the loaders have other sources now.
    """
    loaders = list(loaders)
    samplers, generators = _seeded(loaders), _generators(loaders)
    before, now = (
        f"{len(seeds)} samplers with a seed and {len(states)} generators"
        for seeds, states in ((sources["seeds"], sources["generators"]), (samplers, generators))
    )
    if before != now:
        raise IncompatibleError(
            f"the loaders drew their order from {before}, and now from {now}, so the order would "
            f"differ: create the loaders as in the saved run"
        )
    for sampler, seed in zip(samplers, sources["seeds"], strict=True):
        sampler.initial_seed = seed
    for generator, state in zip(generators, sources["generators"], strict=True):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _samplers(loader: Any) -> Iterator[Any]:
    """Yield the samplers of a loader; inner ones follow the samplers around them."""
    samplers = [getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)]
    for _ in range(4):  # accelerate wraps samplers
        yield from (sampler for sampler in samplers if sampler is not None)
        names = ("batch_sampler", "sampler")
        inner = [getattr(sampler, name, None) for sampler in samplers for name in names]
        samplers = [sampler for sampler in inner if sampler is not None]


def _generators(loaders: list[Any]) -> list[torch.Generator]:
    """Return the generators of loaders, other than the global ones and those with a seed."""
    seeded = {id(getattr(item, "generator", None)) for item in _seeded(loaders)}
    candidates: list[Any] = []
    for loader in loaders:
        candidates += [getattr(loader, n, None) for n in ("synchronized_generator", "generator")]
        candidates += [getattr(sampler, "generator", None) for sampler in _samplers(loader)]
    generators = {id(item): item for item in candidates if isinstance(item, torch.Generator)}
    return [item for number, item in generators.items() if number not in seeded]


def _seeded(loaders: list[Any]) -> list[Any]:
    """Return accelerate's samplers, whose order follows from their seed and the epoch."""
    samplers = (sampler for loader in loaders for sampler in _samplers(loader))
    seeded = {id(sampler): sampler for sampler in samplers if hasattr(sampler, "initial_seed")}
    return [sampler for sampler in seeded.values() if type(sampler.initial_seed) is int]
