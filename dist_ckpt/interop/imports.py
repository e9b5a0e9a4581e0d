"""Checkpoints out of what other systems wrote: DCP folders, torch.save files, Hugging Face's.

    imports.from_dcp("old/step-100", "runs/a/step-00000100", step=100, world_size=8)
    imports.from_torch("old.pt", "runs/b/step-00000100", step=100)
    imports.from_hf("old-model", "model")

One process does it, without torch, and memory is bounded whatever the size. Nothing in a file is
executed: pickles are read by an interpreter of ours, which makes plain data and nothing else.
"""

from __future__ import annotations

import os

from dist_ckpt.foreign.find import open_dcp_folder, open_safetensors, open_torch_file
from dist_ckpt.format.index import MAX_STEP
from dist_ckpt.offline.reshard import even, rewrite
from dist_ckpt.reports import Progress, SaveReport

__all__ = ["from_dcp", "from_hf", "from_torch"]

ForeignPath = str | os.PathLike[str]

# Of tensors on their way; more is not faster.
_MAX_MEMORY = 256 << 20


def from_dcp(
    source: ForeignPath,
    target: ForeignPath,
    *,
    world_size: int = 1,
    step: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> SaveReport:
    """Make the checkpoint at `target` of a folder that `torch.distributed.checkpoint` has written.

    Names are those that `dc.save` would give the state: nested as it was, before DCP made it flat.
    Tensors are cut evenly for `world_size` ranks, and `step` is what the checkpoint is of, as in a
    run: such files do not say. On return the checkpoint is complete and durable;
    `overwrite` replaces the one that is there once it is. Raises NotFoundError without `.metadata`
    or a file that it names, CorruptError for what is damaged, IncompatibleError, by name, for what
    is no plain data, and what `dc.reshard` raises.
    """
    _check(step)
    return rewrite(
        open_dcp_folder(source),
        target,
        even(world_size),
        max_memory=_MAX_MEMORY,
        step=step,
        overwrite=overwrite,
        progress=progress,
    )


def from_torch(
    source: ForeignPath,
    target: ForeignPath,
    *,
    world_size: int = 1,
    step: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> SaveReport:
    """Make the checkpoint at `target` of a file that `torch.save` has written, as `from_dcp` does.

    The file holds a dict, nested as you like, of tensors and plain data. One of tensors alone, as
    of a model's `state_dict()`, becomes `{"model": ...}`. Tensors that were tied still are.
    """
    _check(step)
    return rewrite(
        open_torch_file(source),
        target,
        even(world_size),
        max_memory=_MAX_MEMORY,
        step=step,
        overwrite=overwrite,
        progress=progress,
    )


def from_hf(
    source: ForeignPath,
    target: ForeignPath,
    *,
    world_size: int = 1,
    step: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> SaveReport:
    """Make the checkpoint at `target` of safetensors files, as `from_dcp` does.

    They are one file, or a folder as Hugging Face writes it, and become `{"model": ...}`.
    """
    _check(step)
    return rewrite(
        open_safetensors(source),
        target,
        even(world_size),
        max_memory=_MAX_MEMORY,
        step=step,
        overwrite=overwrite,
        progress=progress,
    )


def _check(step: object) -> None:
    if step is not None and (type(step) is not int or not 0 <= step <= MAX_STEP):
        raise ValueError(f"step={step!r}: give None or an integer from 0 to {MAX_STEP}")
