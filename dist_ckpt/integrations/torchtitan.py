"""A checkpoint manager for torchtitan, to name in a trainer's configuration.

config.checkpoint = RunCheckpointer.Config(enable=True, interval=500, keep_latest_k=3)
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import tyro
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.tools import filesystem

from dist_ckpt.checkpointer import save_policy
from dist_ckpt.checkpointer.checkpointer import Checkpointer
from dist_ckpt.checkpointer.run_session import TrainingStopped
from dist_ckpt.core.loading.load_options import Source
from dist_ckpt.core.state.wrappers import RNG, PerRank
from dist_ckpt.errors import IncompatibleError
from dist_ckpt.integrations.adapter_state import check_extra_state
from dist_ckpt.runs import retention_policy as keep

# The keys of a trainer's own states that have another form here.
_OWN = {"model", "optim", "lr_scheduler", "dataloader", "rng"}


class RunCheckpointer(BaseCheckpointManager):  # type: ignore[misc]  # it has no types
    """Saves a torchtitan trainer's run as `dc.Checkpointer` does, and resumes it.

    A checkpoint has the model's parts, the optimizers, the schedulers, the trainer's own state, the
    data loader's position of each data-parallel rank, and the random generators. Every checkpoint
    is complete, also the last. The run is `dump_folder/folder`. These options are torchtitan's:
    `interval`, `keep_latest_k`, `load_step`, `load_only`, `initial_load_path`,
    `exclude_from_loading` (in an initial load) and `enable_first_step_checkpoint`. After SIGTERM
    all ranks save a step, and exit with code 75. Nothing is unpickled: loaders are not saved in
    their pickled form.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]  # it has no types
        """torchtitan's options. Those for other files than checkpoints are refused."""

        last_save_model_only: bool = False
        """Refused: the last checkpoint is complete, so that the run can resume."""

        options: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
        """More options of dc.Checkpointer, such as save, keep and on_commit; they override."""

        def __post_init__(self) -> None:
            """Raise ValueError for unsupported options, with the alternative."""
            # In a dataclass with slots, super() would name another class.
            BaseCheckpointManager.Config.__post_init__(self)
            for name, instead in _REFUSED.items():
                if getattr(self, name):
                    raise ValueError(f"RunCheckpointer does not take checkpoint.{name}: {instead}")
            if self.export_dtype != "float32":
                raise ValueError(
                    "RunCheckpointer does not take checkpoint.export_dtype: every checkpoint has "
                    "the dtypes of the run; dist-ckpt export --dtype converts one"
                )
            if self.exclude_from_loading and not self.initial_load_path:
                raise ValueError(
                    "checkpoint.exclude_from_loading needs initial_load_path: a run would lose the "
                    "excluded state at each restart. Begin another run with initial_load_path"
                )

    def __init__(  # noqa: PLR0913 - torchtitan's signature
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[Any],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any = None,
        base_folder: str = "",
    ) -> None:
        del sd_adapter  # for Hugging Face files, which dist-ckpt export writes
        self.enable = config.enable
        if not self.enable:
            return
        self.save_future = None  # the Checkpointer handles background saves
        self.stopped: TrainingStopped | None = None
        self._loader = dataloader
        self._first = config.enable_first_step_checkpoint
        self._interval = config.interval
        self._components = {
            **check_extra_state(states, _OWN),
            "model": [*model_parts],
            "optim": _one_or_more([*optimizers]),
            "lr_scheduler": lr_schedulers,
        }
        self._has_initial = config.initial_load_path is not None
        root = filesystem.join(base_folder, config.folder)
        if filesystem.is_remote(root):
            raise ValueError(f"checkpoint.folder is {root}: give a folder on shared storage")
        _refuse_dcp(root)
        self._checkpointer = Checkpointer(root, **(_options(config) | config.options))

    def _load(self, step: int = -1) -> bool:
        template = self._state(None)
        restored = self._checkpointer.restore(template, None if step == -1 else f"@{step}")
        loader, loader_state = self._loader, template["dataloader"].value
        if loader_state is not None:
            _set_loader_state(loader, loader_state)
        return restored is not None or self._has_initial

    def _save(self, curr_step: int, last_step: bool = False) -> bool:  # noqa: FBT001, FBT002 - its signature
        ck = self._checkpointer
        ck.step(curr_step, lambda: self._state(_loader_state(self._loader)))
        is_forced = last_step or (self._first and curr_step == 1)
        if is_forced:
            ck.save(curr_step)
        if ck.should_stop:
            self.stopped = ck.stopped
            assert self.stopped is not None, "it has the reason"
            ck.close()
            # torchtitan has no other way to end an incomplete run.
            raise SystemExit(self.stopped.exit_code)
        return is_forced or curr_step % self._interval == 0

    def _maybe_wait_for_staging(self) -> None:
        """Do nothing: a save has copied or protected its data when it returns."""

    def _wait_for_saving(self) -> None:
        """Do nothing: `save_future` is never set."""

    def _close(self) -> None:
        error = sys.exc_info()[1]  # after a failure, torchtitan closes in an `except`
        if (ck := getattr(self, "_checkpointer", None)) is not None:
            ck.__exit__(type(error) if error else None, error, None)

    def _state(self, loader_state: object) -> dict[str, Any]:
        key = None
        if (rank := getattr(self._loader, "dp_rank", None)) is not None:
            key = ("dp", rank)
        return {
            **self._components,
            "dataloader": PerRank(loader_state, key=key),
            "rng": RNG(on_reshard="drop"),
        }


_SEED = "initialize weights in a fresh run, and give its checkpoint as initial_load_path"
_EXPORT = "dist-ckpt export --format hf --only model writes it from any checkpoint"
_REFUSED = {
    "last_save_model_only": _EXPORT,
    "last_save_in_hf": _EXPORT,
    "initial_load_in_hf": "dist-ckpt import such a folder, and give it as initial_load_path",
    "create_seed_checkpoint": _SEED,
}


def _options(config: Any) -> dict[str, Any]:
    """Return torchtitan's policies as options of `dc.Checkpointer`."""
    options: dict[str, Any] = {
        "save": save_policy.every(steps=config.interval)
        | save_policy.at_end
        | save_policy.on_signal("TERM"),
        "keep": keep.last(config.keep_latest_k) if config.keep_latest_k else None,
        "read_only": config.load_only,
    }
    if config.initial_load_path is None:
        return options
    if config.initial_load_model_only:
        options["init"] = Source(config.initial_load_path, include="model.*")
    else:
        keys = ("optim" if key == "optimizer" else key for key in config.exclude_from_loading)
        excluded = [f"{key}*" for key in keys]
        options["init"] = Source(config.initial_load_path, exclude=excluded or None)
    return options | {"init_strict": False}


def _one_or_more(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values


def _loader_state(loader: Any) -> Any:
    """Return a loader's position as plain data, which torchtitan's `state_dict` would pickle."""
    if isinstance(loader, ParallelAwareDataloader):
        return StatefulDataLoader.state_dict(loader)
    return None if loader is None else loader.state_dict()


def _set_loader_state(loader: Any, state: Any) -> None:
    if isinstance(loader, ParallelAwareDataloader):
        if loader.generator is None:
            # The next `iter` draws a seed for the workers. It must not use the restored generator:
            # the saved run had drawn that seed before the save.
            loader.generator = torch.Generator().manual_seed(torch.initial_seed())
        StatefulDataLoader.load_state_dict(loader, state)
    else:
        loader.load_state_dict(state)


def _refuse_dcp(root: str) -> None:
    """Raise IncompatibleError for a folder with checkpoints of torchtitan's other managers."""
    names = sorted(os.listdir(root)) if os.path.isdir(root) else []
    for name in names:
        path = os.path.join(root, name)
        if re.fullmatch(r"step-\d+", name) and os.path.exists(os.path.join(path, ".metadata")):
            raise IncompatibleError(
                f"{path} was saved by torchtitan's own manager, and cannot be resumed. Convert it "
                f"with dist-ckpt import --from dcp, pass the result as initial_load_path, and "
                f"another name as checkpoint.folder"
            )
