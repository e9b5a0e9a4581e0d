"""The errors of dist_ckpt: one class for each thing that the caller can do next.

Wrong arguments raise `ValueError` and `TypeError`. All errors about checkpoints are subclasses of
`CheckpointError`: the message gives the facts, and ends with the remedy.
"""

from __future__ import annotations


class CheckpointError(Exception):
    """Base of all errors about checkpoints.

    `rank` is the rank of the group on which the error happened, `phase` the phase of the save or
    load. Both are None with a single process, or outside of a phase. `touched` names the live
    tensors that may contain partial data; it is empty if none do.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        phase: str | None = None,
        touched: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.phase = phase
        self.touched = touched


class NotFoundError(CheckpointError):
    """The path has no committed checkpoint: choose another path or step."""


class ExistsError(CheckpointError):
    """The path is in use: choose another path, or overwrite."""


class ConflictError(CheckpointError):
    """Another process claimed or abandoned this attempt: find out which, then save again."""


class CorruptError(CheckpointError):
    """Stored data is damaged: fall back to an older checkpoint.

    `path` is the damaged file, or None if it is unknown.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        phase: str | None = None,
        touched: tuple[str, ...] = (),
        path: str | None = None,
    ) -> None:
        super().__init__(message, rank=rank, phase=phase, touched=touched)
        self.path = path


class IncompatibleError(CheckpointError):
    """The checkpoint and the state do not fit: change the state, or upgrade dist_ckpt."""


class StorageError(CheckpointError):
    """The storage failed: repair it, or try again later. Older checkpoints are unchanged."""


class RankError(CheckpointError):
    """Another rank failed, died, never arrived or made another call; `rank` is its number."""


class UnequalReplicasError(ValueError):
    """Ranks hold different values under one name: make the values equal, then save again."""
