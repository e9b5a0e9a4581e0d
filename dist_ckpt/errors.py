"""The errors of dist_ckpt, grouped by what the caller does next.

Wrong arguments are `ValueError` and `TypeError`; everything the world can do to a
checkpoint is a `CheckpointError`. A message carries the facts and ends with the next step.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

# So many problems or names are spelled out in one message; the others are counted.
MAX_LISTED = 20


class CheckpointError(Exception):
    """Base of all errors about checkpoints.

    `rank` is the rank of the group on which it happened, `phase` the phase of the save or
    load; both are None where there was only one process or no phase.
    """

    def __init__(self, message: str, *, rank: int | None = None, phase: str | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.phase = phase


class NotFoundError(CheckpointError):
    """There is no committed checkpoint here: choose another path or step."""


class ExistsError(CheckpointError):
    """Something is at the path already: choose another path, or overwrite."""


class ConflictError(CheckpointError):
    """Someone else claimed or abandoned this attempt: look who, then save again."""


class CorruptError(CheckpointError):
    """What is stored is damaged: fall back to an older checkpoint.

    `touched` names the live tensors that may hold partial data; empty means none.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        phase: str | None = None,
        touched: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message, rank=rank, phase=phase)
        self.touched = touched


class IncompatibleError(CheckpointError):
    """The checkpoint and the state do not fit: change the state, or upgrade dist_ckpt."""


class StorageError(CheckpointError):
    """The storage failed: mend it, or try again later. Older checkpoints are as they were."""


class RankError(CheckpointError):
    """Another rank failed, died, never came or made another call; `rank` says which."""


# --- messages --------------------------------------------------------------------------------


def listed(texts: Sequence[str], separator: str = ", ") -> str:
    """Join texts for a message: the first few of many."""
    more = len(texts) - MAX_LISTED
    return separator.join([*texts[:MAX_LISTED], *([f"and {more} more"] if more > 0 else [])])


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks as people write them: "rank 3", "ranks 0-3, 7"; of many runs the first."""
    ordered = sorted(set(ranks))
    runs: list[tuple[int, int]] = []
    for rank in ordered:
        first = runs.pop()[0] if runs and runs[-1][1] == rank - 1 else rank
        runs.append((first, rank))
    text = listed([f"{a}" if a == b else f"{a}-{b}" for a, b in runs])
    return f"rank{'s' * (len(ordered) > 1)} {text}"


# What `Optimizer.state_dict` calls a parameter: by its number, in each rank's own order.
_BY_NUMBER = re.compile(r"(^|\.)state\.\d+\b")


def remedy_of_parts(names: Iterable[str], remedy: str) -> str:
    """Return what to do with names that are not the same on all ranks: `remedy` for most.

    Where an optimizer keeps parts of parameters, its state dict says neither of which nor where.
    """
    if any(_BY_NUMBER.search(name) for name in names):
        return (
            "if that is an optimizer's state_dict(), put the optimizer itself into the state, "
            "beside its module: under FSDP1 or ZeRO the dict has this rank's parts"
        )
    return remedy
