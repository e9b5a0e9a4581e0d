"""The other libraries. Each is called as its documentation says, with its fastest safe options.

Nothing here is imported before it is used: a library that is missing, or that does not work with
this torch, costs its own rows and nothing else.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from benchmarks.contenders import Contender
from benchmarks.workload import Spec, Workload
from dist_ckpt.interop.dcp.adapter import StorageReader, StorageWriter

INSTALL = "not installed: pip install -c constraints.txt -e '.[bench]'"
SYNCED_AFTER = "its files are synced after it"
ONE_PROCESS = "knows no sharded tensors"
IS_COPIED = "loads others, which are copied"


@dataclass(frozen=True, slots=True)
class Dcp:
    """torch.distributed.checkpoint."""

    threads: int = 1
    load_note: str = ""
    syncs: bool = True

    @property
    def name(self) -> str:
        return "DCP" if self.threads == 1 else f"DCP-{self.threads}-threads"

    @property
    def save_note(self) -> str:
        return f"thread_count={self.threads}"

    def reason_against(self, spec: Spec) -> str | None:
        return None

    def save(self, workload: Workload, folder: Path) -> None:
        dcp.save(dcp_state(workload), storage_writer=self.writer(folder))

    def writer(self, folder: Path) -> dcp.StorageWriter:
        return dcp.FileSystemWriter(folder, thread_count=self.threads)

    def reader(self, folder: Path) -> dcp.StorageReader:
        return dcp.FileSystemReader(folder)

    def load(self, workload: Workload, folder: Path) -> None:
        state = dcp_state(workload)
        dcp.load(state, storage_reader=self.reader(folder))
        if workload.model is not None and workload.optimizer is not None:
            set_state_dict(
                workload.model,
                workload.optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optim"],
            )


@dataclass(frozen=True, slots=True)
class DcpOnOurs(Dcp):
    """torch.distributed.checkpoint over this library's format: its planners, our files."""

    load_note: str = "verifies checksums"

    @property
    def name(self) -> str:
        return "DCP-on-dist_ckpt"

    @property
    def save_note(self) -> str:
        return "computes checksums"

    def writer(self, folder: Path) -> dcp.StorageWriter:
        return StorageWriter(folder)

    def reader(self, folder: Path) -> dcp.StorageReader:
        return StorageReader(folder)


@dataclass(frozen=True, slots=True)
class TorchCheckpointing:
    """torch_checkpointing, synchronous. Its direct I/O fails on ext4 for unaligned sizes: off."""

    name: str = "torch_checkpointing"
    save_note: str = f"direct I/O off; {SYNCED_AFTER}"
    load_note: str = ""
    syncs: bool = False

    def reason_against(self, spec: Spec) -> str | None:
        if spec.placement is not None and not torch.cuda.is_available():
            return "gathers the metadata of ranks in CUDA tensors: no ranks without a GPU"
        return None if importlib.util.find_spec(self.name) else INSTALL

    def save(self, workload: Workload, folder: Path) -> None:
        manager = self._manager()
        manager.save(str(folder), _item_states(workload))
        manager.close()

    def load(self, workload: Workload, folder: Path) -> None:
        manager = self._manager()
        loaded = manager.load(str(folder), into=_item_states(workload), strict=True)
        if workload.optimizer is not None:
            workload.optimizer.load_state_dict(loaded["optim"])
        manager.close()

    def _manager(self) -> Any:
        import torch_checkpointing as tc
        from torch_checkpointing.config import SyncCheckpointSaverConfig
        from torch_checkpointing.default_resharder import DefaultResharder
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        resharder = DefaultResharder() if dist.is_initialized() else None
        config = tc.CheckpointManager.Config(
            default=tc.ItemSpec(resharder=resharder),
            save=SyncCheckpointSaverConfig(),
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
        )
        return tc.CheckpointManager(config)


@dataclass(frozen=True, slots=True)
class TorchSnapshot:
    """torchsnapshot."""

    name: str = "torchsnapshot"
    save_note: str = SYNCED_AFTER
    load_note: str = ""
    syncs: bool = False

    def reason_against(self, spec: Spec) -> str | None:
        if spec.placement in ("row", "column"):
            return "does not know DTensor"
        return None if importlib.util.find_spec(self.name) else INSTALL

    def save(self, workload: Workload, folder: Path) -> None:
        import torchsnapshot

        everywhere = ["**"] if dist.is_initialized() else []
        torchsnapshot.Snapshot.take(str(folder), self._state(workload), replicated=everywhere)

    def load(self, workload: Workload, folder: Path) -> None:
        import torchsnapshot

        torchsnapshot.Snapshot(str(folder)).restore(self._state(workload))

    def _state(self, workload: Workload) -> dict[str, Any]:
        import torchsnapshot

        if workload.model is not None:
            return {"model": workload.model, "optim": workload.optimizer}
        return {"model": torchsnapshot.StateDict(**dict(workload.local_tensors()))}


@dataclass(frozen=True, slots=True)
class TorchSave:
    """torch.save, and torch.load of a mapping; a replicated state is saved by rank 0."""

    name: str = "torch.save"
    save_note: str = SYNCED_AFTER
    load_note: str = IS_COPIED
    syncs: bool = False

    def reason_against(self, spec: Spec) -> str | None:
        return ONE_PROCESS if spec.placement in ("row", "column") else None

    def save(self, workload: Workload, folder: Path) -> None:
        if _is_first():
            folder.mkdir()
            torch.save(_local_states(workload), folder / "state.pt")

    def load(self, workload: Workload, folder: Path) -> None:
        # An optimizer keeps the tensors it is given: mapped ones would not have been read yet.
        mapped = workload.optimizer is None
        loaded = torch.load(folder / "state.pt", mmap=mapped, weights_only=True)
        if workload.model is not None and workload.optimizer is not None:
            workload.model.load_state_dict(loaded["model"])
            workload.optimizer.load_state_dict(loaded["optim"])
            return
        _copy_into(workload, loaded["model"])


@dataclass(frozen=True, slots=True)
class Safetensors:
    """safetensors.torch.save_file, and load_file; a replicated state is saved by rank 0."""

    name: str = "safetensors"
    save_note: str = SYNCED_AFTER
    load_note: str = IS_COPIED
    syncs: bool = False

    def reason_against(self, spec: Spec) -> str | None:
        if spec.width:
            return "holds tensors only; an optimizer has settings"
        if spec.placement in ("row", "column"):
            return ONE_PROCESS
        return None if importlib.util.find_spec(self.name) else INSTALL

    def save(self, workload: Workload, folder: Path) -> None:
        from safetensors.torch import save_file

        if _is_first():
            folder.mkdir()
            save_file(dict(workload.local_tensors()), folder / "state.safetensors")

    def load(self, workload: Workload, folder: Path) -> None:
        from safetensors.torch import load_file

        _copy_into(workload, load_file(folder / "state.safetensors"))


PEERS: tuple[Contender, ...] = (
    Dcp(),
    Dcp(threads=2),
    DcpOnOurs(),
    TorchCheckpointing(),
    TorchSnapshot(),
    TorchSave(),
    Safetensors(),
)


def dcp_state(workload: Workload) -> dict[str, Any]:
    """Return a state as DCP wants it."""
    if workload.model is None or workload.optimizer is None:
        return {"model": workload.tensors}
    model, optimizer = get_state_dict(workload.model, workload.optimizer)
    return {"model": model, "optim": optimizer}


def _item_states(workload: Workload) -> dict[str, Any]:
    if workload.model is None or workload.optimizer is None:
        return {"model": workload.tensors}
    return {"model": workload.model.state_dict(), "optim": workload.optimizer.state_dict()}


def _local_states(workload: Workload) -> dict[str, Any]:
    if workload.model is not None:
        return _item_states(workload)
    return {"model": dict(workload.local_tensors())}


def _copy_into(workload: Workload, loaded: dict[str, torch.Tensor]) -> None:
    for name, tensor in workload.local_tensors():
        tensor.copy_(loaded[name])


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
