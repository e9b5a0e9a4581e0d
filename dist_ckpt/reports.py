"""What a save and a load tell their caller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What a save did. `nbytes` and `num_files` are over all ranks; `seconds` are this rank's."""

    path: str
    step: int | None
    attempt: str
    nbytes: int
    num_tensors: int
    num_files: int
    seconds: Mapping[str, float]
    slowest_rank: int
    slowest_s: float


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did, on this rank.

    `restored` are the names that were filled, `resharded` those of them whose parts here are cut
    otherwise than the stored ones, `missing` those that the checkpoint lacks, `unexpected` saved
    names that no rank asked for, `dropped` what `on_reshard` or a `rename` to None left out, and
    the optimizer's state of parameters that had none when they were saved: it is removed.
    `nbytes_read` counts shard data read here; `seconds` are by phase.
    """

    path: str
    step: int | None
    attempt: str
    restored: tuple[str, ...]
    resharded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    dropped: tuple[str, ...]
    nbytes_read: int
    nbytes_placed: int
    seconds: Mapping[str, float]
