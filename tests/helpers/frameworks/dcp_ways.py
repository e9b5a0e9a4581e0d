"""The ways to run a scenario of DCP's tests: DCP itself, our adapter below it, and ours."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.format_utils import torch_save_to_dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

import dist_ckpt as dc
from dist_ckpt.interop.dcp import adapter as adapter
from dist_ckpt.interop.dcp.export import export_folder as export_for_dcp
from dist_ckpt.interop.imports import from_torch

State = dict[str, Any]


class Way(Protocol):
    """One way to save and to load, as far as the scenarios need it.

    `folder` returns what was saved at a path as a folder of DCP's. `load_folder` fills a state
    from a folder that `dcp.save` has made, `load_hf` from one of safetensors, `load_file` from a
    file of `torch.save`.
    """

    name: str

    def save(self, state: State, path: str, *, overwrite: bool = True) -> object: ...

    def load(self, state: State, path: str, *, partial: bool = False) -> object: ...

    def async_save(self, state: State, path: str) -> Callable[[], object]: ...

    def save_trained(self, model: Any, optimizer: Any, path: str, **more: Any) -> None: ...

    def load_trained(self, model: Any, optimizer: Any, path: str, **more: Any) -> None: ...

    def folder(self, path: str) -> str: ...

    def load_folder(self, state: State, path: str) -> object: ...

    def load_hf(self, state: State, path: str) -> object: ...

    def load_file(self, state: State, path: str) -> object: ...


class Dcp:
    """DCP alone: what shows that a scenario asks for what DCP does."""

    name = "dcp"

    def writer(self, path: str, **options: Any) -> Any:
        return dcp.FileSystemWriter(path, **options)

    def reader(self, path: str) -> Any:
        return dcp.FileSystemReader(path)

    def save(self, state: State, path: str, *, overwrite: bool = True) -> object:
        return dcp.save(state, storage_writer=self.writer(path, overwrite=overwrite))

    def load(self, state: State, path: str, *, partial: bool = False) -> object:
        planner = DefaultLoadPlanner(allow_partial_load=partial)
        return dcp.load(state, storage_reader=self.reader(path), planner=planner)

    def async_save(self, state: State, path: str) -> Callable[[], object]:
        saving: Any = dcp.async_save(state, storage_writer=self.writer(path))
        return lambda: saving.result(timeout=60)

    def save_trained(self, model: Any, optimizer: Any, path: str, **more: Any) -> None:
        model_state, optim_state = get_state_dict(model, optimizer)
        self.save({"model": model_state, "optim": optim_state, **more}, path)

    def load_trained(self, model: Any, optimizer: Any, path: str, **more: Any) -> None:
        model_state, optim_state = get_state_dict(model, optimizer)
        self.load({"model": model_state, "optim": optim_state, **more}, path)
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optim_state)

    def folder(self, path: str) -> str:
        return path

    def load_folder(self, state: State, path: str) -> object:
        return dcp.load(state, checkpoint_id=path)

    def load_hf(self, state: State, path: str) -> object:
        return dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(path))

    def load_file(self, state: State, path: str) -> object:
        if rank() == 0:
            torch_save_to_dcp(path, f"{path}.dcp")
        meet()
        return self.load(state, f"{path}.dcp")


class _OurFiles:
    """What the adapter and ours have in common: files of others come in, and go out."""

    def folder(self, path: str) -> str:
        if rank() == 0:
            export_for_dcp(path, f"{path}.dcp")
        meet()
        return f"{path}.dcp"

    def load_folder(self, state: State, path: str) -> object:
        return adapter.load(state, path)


class Adapter(_OurFiles, Dcp):
    """DCP with our storage writer and reader."""

    name = "adapter"

    def writer(self, path: str, **options: Any) -> Any:
        return adapter.StorageWriter(path, **options)

    def reader(self, path: str) -> Any:
        return adapter.StorageReader(path)

    def load_hf(self, state: State, path: str) -> object:
        return self.load({"model": state}, path)  # as the names of a model are

    def load_file(self, state: State, path: str) -> object:
        return imported(self, state, path)


class Ours(_OurFiles):
    """`dc.save` and `dc.load`."""

    name = "dist_ckpt"

    def save(self, state: State, path: str, *, overwrite: bool = True) -> object:
        return dc.save(state, path, overwrite=overwrite)

    def load(self, state: State, path: str, *, partial: bool = False) -> object:
        return dc.load(state, path, strict=not partial)

    def async_save(self, state: State, path: str) -> Callable[[], object]:
        saver = dc.AsyncSaver(os.path.dirname(path))
        saving = saver.save(state, path)

        def wait() -> object:
            try:
                return saving.result()
            finally:
                saver.close()

        return wait

    def save_trained(self, model: Any, optimizer: Any, path: str, **more: Any) -> None:
        self.save({"model": model, "optim": optimizer, **more}, path)

    def load_trained(self, model: Any, optimizer: Any, path: str, **more: Any) -> None:
        self.load({"model": model, "optim": optimizer, **more}, path)

    def load_hf(self, state: State, path: str) -> object:
        return self.load({"model": state}, path)  # as the names of a model are

    def load_file(self, state: State, path: str) -> object:
        return imported(self, state, path)


def imported(way: Way, state: State, path: str) -> object:
    """Load a file of `torch.save` by way of an import: `dc.load` reads none."""
    if rank() == 0:
        from_torch(path, f"{path}.ours")
    meet()
    return way.load(state, f"{path}.ours")


WAYS: dict[str, Way] = {way.name: way for way in (Dcp(), Adapter(), Ours())}


def rank() -> int:
    """Return this process's rank, 0 without a group."""
    return dist.get_rank() if dist.is_initialized() else 0


def meet() -> None:
    """Wait for all ranks, if there are others."""
    if dist.is_initialized():
        dist.barrier()


def whole(value: Any) -> Any:
    """Return a state with its DTensors whole and copied."""
    if isinstance(value, DTensor):
        return value.full_tensor().clone()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: whole(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(whole(child) for child in value)
    return value


def same(one: Any, other: Any) -> bool:
    """Say whether two states are equal, bit for bit and of the same types."""
    one, other = whole(one), whole(other)
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and (one.dtype, one.shape) == (other.dtype, other.shape)
            and torch.equal(one, other)
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def error_of(call: Callable[[], object]) -> str:
    """Return the message of the error that a call raises; an error if it raises none."""
    try:
        call()
    except (Exception, dcp.CheckpointException) as error:  # noqa: BLE001 - each has its own
        return str(error)
    raise AssertionError("no error")
