"""Who saves in the background. A kind is a value that processes get by pickle; it starts a saver.

DCP's stagers that need CUDA (pinned memory, copies that do not block) are left out: all of this is
measured on the CPU, where they are refused or ignored.
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

import dist_ckpt as dc
from benchmarks.contenders import DistCkpt, state_of
from benchmarks.peers import Dcp, dcp_state
from benchmarks.scenario import OURS
from benchmarks.workload import Workload

STEP = 1


class Pending(Protocol):
    """A save under way."""

    def wait_staged(self, timeout_s: float) -> object:
        """Wait until the state may change."""

    def done(self) -> bool:
        """Return whether it is durable, or failed."""

    def result(self, timeout_s: float) -> object:
        """Wait until it is durable, or raise what it failed of."""


class SaverInfo(Protocol):
    """Saves one state again and again; the last save has ended before the next begins."""

    def save(self, workload: Workload, folder: Path) -> Pending: ...
    def close(self) -> object: ...


class Kind(Protocol):
    """One way to save in the background, and to load what was saved."""

    @property
    def name(self) -> str: ...
    @property
    def note(self) -> str: ...

    def reason_against(self) -> str | None:
        """Return why it cannot take part, or None."""

    def start(self, job: str) -> SaverInfo:
        """Start a saver, in the process that trains. `job` names the run that it belongs to."""

    def load(self, workload: Workload, folder: Path) -> None:
        """Fill the tensors that are there, from the disk."""


# --- ours -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ours:
    """AsyncSaver, with everything on that is on by default."""

    name: str = OURS
    note: str = "computes checksums"

    def reason_against(self) -> str | None:
        return None if hasattr(dc, "AsyncSaver") else "there is no AsyncSaver yet"

    def start(self, job: str) -> OurSaver:
        return OurSaver(job)

    def load(self, workload: Workload, folder: Path) -> None:
        DistCkpt().load(workload, folder)


class OurSaver:
    """An AsyncSaver; what it has in memory outlives this process if it is killed."""

    def __init__(self, job: str) -> None:
        self._saver: Any = getattr(dc, "AsyncSaver")(job=job)  # noqa: B009  (it may be missing)

    def save(self, workload: Workload, folder: Path) -> Any:
        return self._saver.save(state_of(workload), folder, step=STEP)

    def restore(self, workload: Workload) -> int | None:
        step: int | None = self._saver.restore(state_of(workload))
        return step

    def close(self) -> None:
        self._saver.close()


# --- DCP --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DcpAsync:
    """torch.distributed.checkpoint.async_save.

    By default it has a new stager each time, and so new memory. One that is kept reuses its memory,
    which is shared with the process that writes, if there is one.
    """

    mode: Literal["thread", "process"]
    keeps_stager: bool = False

    @property
    def name(self) -> str:
        return f"DCP {self.mode}" + (", kept stager" if self.keeps_stager else "")

    @property
    def note(self) -> str:
        if not self.keeps_stager:
            return "default stager"
        return "DefaultStager" + ("(shared memory)" if self.mode == "process" else "")

    def reason_against(self) -> str | None:
        return None

    def start(self, job: str) -> DcpSaver:
        return DcpSaver(self)

    def load(self, workload: Workload, folder: Path) -> None:
        Dcp().load(workload, folder)


class DcpSaver:
    """What a training script keeps to call `async_save`."""

    def __init__(self, kind: DcpAsync) -> None:
        self._type = AsyncCheckpointerType(kind.mode)
        self._stager: DefaultStager | None = None
        if kind.keeps_stager:
            options = StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=kind.mode == "process",
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
            self._stager = DefaultStager(options)
        if kind.mode == "process":
            # It needs a group; without an address it takes this host's name, which may not resolve.
            os.environ["MASTER_ADDR"] = "127.0.0.1"
            here = "tcp://127.0.0.1:0"
            dist.init_process_group("gloo", init_method=here, rank=0, world_size=1)

    def save(self, workload: Workload, folder: Path) -> Pending:
        future = async_save(
            dcp_state(workload),
            storage_writer=FileSystemWriter(folder),
            async_checkpointer_type=self._type,
            async_stager=self._stager,
        )
        assert isinstance(future, Future)
        return _Uploading(future)

    def close(self) -> None:
        """Release the memory. Its process ends with this one: DCP has no call for that."""
        if self._stager is not None:
            self._stager.close()
        if dist.is_initialized():
            dist.destroy_process_group()


class _Uploading:
    """A save by DCP, which has staged when it returns."""

    def __init__(self, future: Future[object]) -> None:
        self._future = future

    def wait_staged(self, timeout_s: float) -> None:
        pass

    def done(self) -> bool:
        return self._future.done()

    def result(self, timeout_s: float) -> object:
        return self._future.result(timeout_s)


DCP_KINDS = (
    DcpAsync("thread"),
    DcpAsync("thread", keeps_stager=True),
    DcpAsync("process"),
    DcpAsync("process", keeps_stager=True),
)
