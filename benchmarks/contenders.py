"""Whoever saves and loads, ours first. A contender is a value that workers get by pickle."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import dist_ckpt as dc
from benchmarks.scenario import OURS
from benchmarks.workload import Spec, Workload


class Contender(Protocol):
    """One way to save and load a state.

    The notes are what a reader must know about its figures. `syncs`: what it has saved is durable
    when `save` returns; for one that does not, the files are synced after it, in its time.
    """

    @property
    def name(self) -> str: ...
    @property
    def save_note(self) -> str: ...
    @property
    def load_note(self) -> str: ...
    @property
    def syncs(self) -> bool: ...

    def reason_against(self, spec: Spec) -> str | None:
        """Return why it cannot take part with such a state, or None. Cheap; asked beforehand."""

    def save(self, workload: Workload, folder: Path) -> None:
        """Save into a folder that does not exist yet. Every rank calls this."""

    def load(self, workload: Workload, folder: Path) -> None:
        """Fill the tensors that are there. Every rank calls this."""


@dataclass(frozen=True, slots=True)
class DistCkpt:
    """This library, with everything on that is on by default: checksums and syncs."""

    name: str = OURS
    save_note: str = "computes checksums"
    load_note: str = "verifies checksums"
    syncs: bool = True

    def reason_against(self, spec: Spec) -> str | None:
        return None

    def save(self, workload: Workload, folder: Path) -> None:
        dc.save(state_of(workload), folder)

    def load(self, workload: Workload, folder: Path) -> None:
        dc.load(state_of(workload), folder)


def state_of(workload: Workload) -> dict[str | int, object]:
    """Return a state as it is handed to this library."""
    if workload.model is None:
        return {"model": workload.tensors}
    return {"model": workload.model, "optim": workload.optimizer}
