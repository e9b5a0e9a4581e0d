"""Save and resume a loop over prepared objects of accelerate, or use `save_state` with this format.

with AcceleratedRun(accelerator, "runs/a", save=dc.every(steps=500)) as run:
    for epoch in run.epochs(3):
        for batch in run.batches(loader):
            ...

The names of prepared objects are private in accelerate; `NEEDED` lists them.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Literal, Self

import accelerate

from dist_ckpt.checkpointer.checkpointer import Checkpointer
from dist_ckpt.checkpointer.run_session import TrainingStopped
from dist_ckpt.core.loading.load import load
from dist_ckpt.core.saving.save import save
from dist_ckpt.core.state.wrappers import RNG, PerRank
from dist_ckpt.errors import CheckpointError, IncompatibleError, NotFoundError
from dist_ckpt.integrations.adapter_state import (
    broadcast_inner_buffers,
    capture_sources,
    check_extra_state,
    check_num_batches,
    check_on_reshard,
    refuse_other_ranks,
    set_sources,
)
from dist_ckpt.runs.prune import delete

_log = logging.getLogger("dist_ckpt")

# The files in folders of accelerate.
_OWN_FILES = re.compile(r"(model|optimizer|pytorch_model).*|random_states_\d+\.pkl")


def delete_oldest(accelerator: Any, folder: str) -> None:
    """Delete the oldest checkpoints above the project's limit, after a newer one is complete.

    Folders that accelerate wrote and pinned checkpoints stay. A failed removal fails no save.
    """
    limit = accelerator.project_configuration.total_limit
    if limit is None or not accelerator.is_main_process:
        return
    ours = [path for path in numbered_checkpoints(folder) if not is_written_by_accelerate(path)]
    for path in ours[: -max(limit, 1)]:
        try:
            delete(path)
        except CheckpointError as error:
            _log.warning("%s stays, above total_limit=%d: %s", path, limit, error)


def is_written_by_accelerate(path: str) -> bool:
    """Return True if accelerate wrote a folder that has no checkpoint of dist_ckpt."""
    names = os.listdir(path) if os.path.isdir(path) else []
    is_ours = any(re.match(r"a\d+-", name) for name in names)
    return not is_ours and any(_OWN_FILES.fullmatch(name) for name in names)


def numbered_checkpoints(folder: str) -> list[str]:
    """Return the folders named `checkpoint_N`, oldest first."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    matching = [name for name in names if re.fullmatch(r"checkpoint_\d+", name)]
    matching.sort(key=lambda name: int(name[11:]))
    return [os.path.join(folder, name) for name in matching]


# Private names, checked before anything is saved, as any release of accelerate may rename them.
NEEDED = (
    *("_models", "_optimizers", "_schedulers", "_custom_objects", "_dataloaders", "scaler"),
    *("_save_model_state_pre_hook", "_load_model_state_pre_hook", "step", "sync_gradients"),
    *("project_configuration", "ddp_handler"),
)


def prepared_objects(accelerator: Any) -> dict[str, Any]:
    """Return the prepared and registered objects by kind: one object, or several by number."""
    objects = {
        "model": _one_or_more(accelerator._models),
        "optim": _one_or_more(accelerator._optimizers),
        "scheduler": _one_or_more(accelerator._schedulers),
        "custom": _one_or_more(accelerator._custom_objects),
        "scaler": accelerator.scaler,
    }
    return {name: value for name, value in objects.items() if value is not None}


def _one_or_more(values: list[Any]) -> Any:
    if len(values) <= 1:
        return values[0] if values else None
    return {str(number): value for number, value in enumerate(values)}


def broadcast_model_buffers(accelerator: Any) -> None:
    """Broadcast the buffers of rank 0, if DDP does so at each forward. Collective with DDP.

    An Accelerator has the models without DDP around them.
    """
    is_ddp = _kind_of(accelerator).startswith("MULTI_")
    if not is_ddp or getattr(accelerator, "parallelism_config", None) is not None:
        return
    if accelerator.ddp_handler is None or accelerator.ddp_handler.broadcast_buffers:
        for model in accelerator._models:
            broadcast_inner_buffers(model)


def _kind_of(accelerator: Any) -> str:
    return str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))


def stateful_loaders(accelerator: Any) -> list[Any]:
    """Return the prepared loaders that have a `state_dict` of their position."""
    return [
        loader
        for loader in accelerator._dataloaders
        if getattr(loader, "use_stateful_dataloader", False)
    ]


def check(accelerator: Any) -> None:
    """Raise an error for a setup that cannot be saved correctly."""
    if (kind := _kind_of(accelerator)) in ("DEEPSPEED", "MEGATRON_LM", "XLA"):
        raise ValueError(f"{kind} is not saved by this: use accelerate's own save_state")
    if missing := [name for name in NEEDED if not hasattr(accelerator, name)]:
        raise IncompatibleError(
            f"accelerate {accelerate.__version__} has no Accelerator.{missing[0]}: use the tested "
            f"version (1.15), or dc.Checkpointer in your own loop"
        )


_OWN = {"model", "optim", "scheduler", "scaler", "custom", "position", "data", "rng"}


class AcceleratedRun:
    """Saves and resumes a training loop over the objects that `Accelerator.prepare` returned.

    Create it after `prepare`, on every rank. Loop over `epochs`, and inside over `batches`. A
    checkpoint has all prepared models, optimizers and schedulers, the scaler, the objects of
    `register_for_checkpointing`, the random generators, and the position in the data. `state` is
    extra state to save. The other options are those of `dc.Checkpointer`. A step is a batch after
    which gradients are synchronized: with accumulation, the last of several. Use `with` to end the
    run.

    Within an epoch, a run resumes only with the same number of ranks and batches. Otherwise it is
    refused, unless `on_reshard="drop"` restarts the epoch.
    """

    def __init__(
        self,
        accelerator: accelerate.Accelerator,
        root: str | os.PathLike[str] | None,
        *,
        state: Mapping[str, Any] | None = None,
        on_reshard: Literal["error", "drop"] = "error",
        **options: Any,
    ) -> None:
        check_on_reshard(on_reshard)
        self._extra_state = check_extra_state(state, _OWN)
        check(accelerator)
        self._accelerator = accelerator
        self._on_reshard = on_reshard
        self._checkpointer = Checkpointer(root, **options)
        self._is_restored = self._is_in_batches = self._has_looped = False
        self._step = self._epoch = self._batches = 0
        self._pending_step: int | None = None  # a step that the checkpointer does not have yet
        self._loader: Any = None
        self._order: dict[str, Any] | None = None  # the sources of the epoch's order
        self._num_batches: int | None = None
        self._resume_generators: object = None  # to set after a resume has skipped batches

    def restore(self) -> int | None:
        """Fill the prepared objects; return the step, None for a fresh run. Every rank calls it.

        `epochs` calls it if you did not.
        """
        template = self._template()
        step = self._checkpointer.restore(template)
        self._is_restored = True
        if step is not None:
            if not isinstance(template["position"], dict):
                raise IncompatibleError(
                    f"step {step} was not saved by an AcceleratedRun: give another root, and this "
                    f"checkpoint as init= with init_strict=False"
                )
            self._step = step
            self._resume_from(template["position"], template["data"].value)
        return step

    def epochs(self, until: int) -> Iterator[int]:
        """Restore, then yield the epochs to train, from 0 on. End early if the run must stop."""
        if not self._is_restored:
            self.restore()
        for epoch in range(self._epoch, until):
            if self.stopped is not None:
                return
            self._epoch, self._has_looped = epoch, False
            yield epoch
            if self.stopped is None:
                self._epoch, self._batches, self._order = epoch + 1, 0, None
                self._report_step()  # if `break` has ended the loop over batches

    def batches(self, loader: Any) -> Iterator[Any]:
        """Yield the batches of this epoch from a prepared loader, without those already trained.

        A batch counts as done when the loop requests the next one or ends by `break`. The iterator
        ends early when the run must stop.
        """
        if not self._is_restored:
            raise ValueError("loop over run.epochs(...), and in that over run.batches(loader)")
        if self._has_looped:
            raise ValueError(
                "this epoch had a loop over run.batches(...) already, and a run has one "
                "position in the data. Loop over other loaders directly, or begin another epoch"
            )
        self._has_looped = self._is_in_batches = True
        try:
            batches = self._begin(loader)
            for number, batch in enumerate(batches, self._batches + 1):
                try:
                    yield batch
                except GeneratorExit:
                    self._count(number)
                    raise
                self._count(number)
                self._report_step()
                if self.stopped is not None:
                    return
        finally:
            self._is_in_batches = False

    def _begin(self, loader: Any) -> Iterator[Any]:
        """Draw the order of the epoch, or the saved order again, and skip the trained batches."""
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(self._epoch)
        count = None
        with suppress(TypeError):  # the dataset has no length
            count = len(loader)
        self._loader = loader
        if self._resume_generators is None:
            if self._order is not None:  # as after the epochs before
                set_sources([loader], self._order)
            self._order, self._num_batches = capture_sources([loader]), count
            return iter(loader)
        check_num_batches(self._batches, self._num_batches, count)
        assert self._order is not None, "saved within an epoch"
        set_sources([loader], self._order)
        RNG().restore(self._order["rng"])
        batches: Iterator[Any] = iter(loader)
        for _ in range(self._batches):
            next(batches, None)
        RNG().restore(self._resume_generators)
        self._resume_generators = None
        return batches

    def _count(self, batches: int) -> None:
        if self._accelerator.sync_gradients:
            self._batches, self._step = batches, self._step + 1
            self._pending_step = self._step

    def _report_step(self) -> None:
        if self._pending_step is not None:
            step, self._pending_step = self._pending_step, None
            self._checkpointer.step(step, self._state)

    @property
    def step(self) -> int:
        """The number of steps done."""
        return self._step

    @property
    def stopped(self) -> TrainingStopped | None:
        """The reason to end the run now, with the exit code that makes a scheduler restart it."""
        return self._checkpointer.stopped

    def metrics(self, values: Mapping[str, float]) -> None:
        """Record metrics: of the current step inside the loop body, else of the last step."""
        self._checkpointer.metrics(self._step + self._is_in_batches, values)

    def close(self) -> None:
        """End the run: save the last step if `save` has `at_end`, and wait until it is durable."""
        self._report_step()
        self._checkpointer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End the run. After an error no rank waits for another; snapshots stay in memory."""
        if error is None:
            self.close()
        else:
            self._checkpointer.__exit__(kind, error, trace)

    def _template(self) -> dict[str, Any]:
        return {
            **prepared_objects(self._accelerator),
            "position": None,
            "data": PerRank(None, on_reshard="drop"),
            "rng": RNG(on_reshard="drop"),
            **self._extra_state,
        }

    def _state(self) -> dict[str, Any]:
        broadcast_model_buffers(self._accelerator)
        position = {
            "epoch": self._epoch,
            "batches": self._batches,
            "num_batches": self._num_batches if self._batches else None,
            "world_size": self._accelerator.num_processes,
            "accumulated": self._accelerator.step,
        }
        order = self._order
        if not self._batches:  # between epochs
            order = None if self._loader is None else capture_sources([self._loader])
        data = PerRank(order, on_reshard="drop")
        return {**self._template(), "position": position, "data": data}

    def _resume_from(self, position: dict[str, Any], order: Any) -> None:
        self._epoch, self._batches = position["epoch"], position["batches"]
        self._num_batches = position["num_batches"]
        self._accelerator.step = position["accumulated"]
        if position["world_size"] == self._accelerator.num_processes:
            self._order = order
            self._resume_generators = RNG().capture() if self._batches else None
        elif not self._batches:
            return
        elif self._on_reshard == "error":
            then, now = position["world_size"], self._accelerator.num_processes
            refuse_other_ranks("AcceleratedRun", self._batches, then, now)
        else:
            self._batches = 0


def attach(accelerator: accelerate.Accelerator) -> None:
    """Make an Accelerator's `save_state` and `load_state` use checkpoints of dist_ckpt.

    Their folders are ordinary checkpoints. Every rank calls both functions. They save and load the
    objects of `AcceleratedRun`, and loaders that have a `state_dict`, which need the same number of
    ranks. The position in the data is up to the program, with `accelerator.skip_first_batches`.
    Names and limits of a `ProjectConfiguration` hold. A save replaces an earlier one in the same
    folder once the new one is complete. Hooks for saving are refused, as they write files of models
    themselves.
    """
    check(accelerator)
    accelerator.save_state = functools.partial(_save_state, accelerator)
    accelerator.load_state = functools.partial(_load_state, accelerator)


def _save_state(
    accelerator: Any, output_dir: str | os.PathLike[str] | None = None, **options: Any
) -> str:
    """Save the prepared and registered objects to a folder; return it. Collective."""
    _check_call(accelerator, options, accelerator._save_model_state_pre_hook, "save")
    project = accelerator.project_configuration
    if project.automatic_checkpoint_naming:
        folder = os.path.join(accelerator.project_dir, "checkpoints")
        output_dir = os.path.join(folder, f"checkpoint_{accelerator.save_iteration}")
    if output_dir is None:
        raise ValueError("save_state needs a folder: save_state(output_dir)")
    broadcast_model_buffers(accelerator)
    path = os.path.expanduser(os.fspath(output_dir))
    state = {**prepared_objects(accelerator), "position": {"accumulated": accelerator.step}}
    save(
        {**state, **_rank_state(accelerator)},
        path,
        overwrite=not project.automatic_checkpoint_naming,
    )
    project.__dict__["iteration"] += 1  # the number of the next folder, as accelerate does
    if project.automatic_checkpoint_naming:
        delete_oldest(accelerator, os.path.dirname(path))
    return path


def _load_state(
    accelerator: Any, input_dir: str | os.PathLike[str] | None = None, **options: Any
) -> None:
    """Load the prepared and registered objects from a folder, by default the newest. Collective."""
    _check_call(accelerator, options, accelerator._load_model_state_pre_hook, "load")
    if input_dir is None:
        if not accelerator.project_configuration.automatic_checkpoint_naming:
            raise ValueError("load_state needs a folder: load_state(input_dir)")
        folder = os.path.join(accelerator.project_dir, "checkpoints")
        if not (checkpoints := numbered_checkpoints(folder)):
            raise NotFoundError(f"{folder} has no checkpoint_N: save_state() makes them")
        input_dir = checkpoints[-1]
    path = os.path.expanduser(os.fspath(input_dir))
    template = {**prepared_objects(accelerator), "position": None, **_rank_state(accelerator)}
    if is_written_by_accelerate(path):
        raise IncompatibleError(
            f"{path} was written by accelerate itself: load it before attach(accelerator)"
        )
    load(template, path)
    for loader, state in zip(stateful_loaders(accelerator), template["data"].value, strict=True):
        loader.load_state_dict(state)
    accelerator.step = template["position"]["accumulated"]


def _rank_state(accelerator: Any) -> dict[str, Any]:
    """Return the state of this rank: positions of loaders, and random generators."""
    states = [loader.state_dict() for loader in stateful_loaders(accelerator)]
    on_reshard: Literal["error", "drop"] = "error" if states else "drop"
    return {"data": PerRank(states, on_reshard=on_reshard), "rng": RNG(on_reshard="drop")}


def _check_call(accelerator: Any, options: dict[str, Any], hooks: Any, verb: str) -> None:
    check(accelerator)
    options.pop("safe_serialization", None)  # tensors are always safetensors here
    if options:
        raise TypeError(f"{verb}_state takes no {sorted(options)[0]} with checkpoints of dist_ckpt")
    if hooks:
        raise ValueError(
            f"a hook of register_{verb}_state_pre_hook writes or reads separate files: remove() "
            f"it, or register its objects by register_for_checkpointing"
        )
