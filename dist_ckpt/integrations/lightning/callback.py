"""Save and resume Lightning's `Trainer` through a callback, with the position in the data.

callback = LightningCheckpoint("runs/a", save=dc.every(steps=500), keep=dc.keep.last(3))
Trainer(max_epochs=3, callbacks=[callback]).fit(module, loader)

The callback depends on private names of Lightning, which may change in any release. It checks them
before a fit begins.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor

from dist_ckpt.checkpointer.checkpointer import Checkpointer
from dist_ckpt.checkpointer.run_session import TrainingStopped
from dist_ckpt.checkpointer.save_policy import DEFAULT_SAVE
from dist_ckpt.core.state.wrappers import RNG, Named, PerRank
from dist_ckpt.errors import IncompatibleError
from dist_ckpt.integrations.adapter_state import (
    broadcast_module_buffers,
    check_extra_state,
    check_on_reshard,
)
from dist_ckpt.integrations.lightning.fit_position import FitPosition

# The private attributes of a Trainer that are used, and their purpose.
NEEDED = (
    ("_results", "the loop that logs"),
    ("_logger_connector.metrics", "its logged values"),
    ("_signal_connector._original_handlers", "handlers that return when the fit ends"),
    ("_checkpoint_connector.dump_checkpoint", "all that Lightning saves except tensors"),
    ("_checkpoint_connector._loaded_checkpoint", "... and that it restores"),
    ("_checkpoint_connector.restore_model", "the load hooks"),
    ("_checkpoint_connector.restore_datamodule", "the data module's state"),
    ("_checkpoint_connector.restore_callbacks", "the callbacks' states"),
    ("fit_loop._restarting", "a resume between epochs"),
    ("fit_loop._combined_loader", "the loaders"),
    ("fit_loop._load_combined_loader_states", "called before the first order is drawn"),
    ("fit_loop.on_advance_end", "called after an epoch"),
    ("fit_loop.epoch_loop.on_run_start", "draws an epoch's order"),
    ("fit_loop.epoch_loop.on_advance_end", "called after a batch"),
    ("fit_loop.epoch_loop.batch_progress", "the number of batches"),
    ("fit_loop.epoch_loop._skip_next_val", "a batch that ended before the resume"),
    ("fit_loop.epoch_loop._num_ready_batches_reached", "the last batch of an epoch"),
)

NEEDED_OF_LOADER = (("_iterator", "changes when an epoch's order is drawn"),)


def check_names(trainer: Any) -> None:
    """Raise IncompatibleError if this Lightning lacks a name that the callback depends on."""
    loader = sys.modules[type(trainer.fit_loop).__module__].CombinedLoader([])
    needed = [(trainer, name) for name, _ in NEEDED]
    needed += [(loader, name) for name, _ in NEEDED_OF_LOADER]
    for owner, name in needed:
        try:
            attrgetter(name)(owner)
        except AttributeError:
            package = find_package(trainer)
            version = getattr(sys.modules[package], "__version__", "of unknown version")
            raise IncompatibleError(
                f"{package} {version} has no {type(owner).__name__}.{name}: use 2.6, the tested "
                f"version, or dc.Checkpointer in your own loop"
            ) from None


def find_package(trainer: Any) -> str:
    """Return the package of a Trainer or subclass: Lightning has two names."""
    return type(trainer).__mro__[-2].__module__.partition(".")[0]


def logged(trainer: Any) -> dict[str, float]:
    """Return the numbers that the running loop has logged."""
    values = trainer._logger_connector.metrics["callback"] if trainer._results is not None else {}
    metrics = {name: _number(value) for name, value in values.items()}
    return {name: value for name, value in metrics.items() if value is not None}


def _number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            return None
        value = value.item()
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return None


_log = logging.getLogger("dist_ckpt")

_NAMES = ("lightning.pytorch", "pytorch_lightning")

_OWN = {"model", "optim", "trainer", "position", "data", "rng"}

# The prefixes of the program's arguments, which are not saved.
_HYPERPARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters", "hparams_")


def _build_base_class() -> Any:
    """Return Lightning's base class of checkpoint callbacks, in the package that is imported."""
    modules = [sys.modules[name] for name in _NAMES if name in sys.modules]
    if not modules:
        try:
            import lightning.pytorch as library  # noqa: PLC0415  (one of two names of one library)
        except ModuleNotFoundError:
            import pytorch_lightning as library  # noqa: PLC0415  (the other of the two names)
        modules = [library]
    return type("Base", tuple(module.callbacks.Checkpoint for module in modules), {})


_Base: Any = _build_base_class()


class LightningCheckpoint(_Base):  # type: ignore[misc]  # of which library it is shows at run time
    """Saves a `Trainer`'s fit as `dc.Checkpointer` does, and resumes it, batch by batch.

    The options are those of `dc.Checkpointer`; `state` is extra state to save. A checkpoint has the
    contents of Lightning's own: the module, the optimizers, the schedulers, the progress of loops,
    the states of callbacks, data module and precision plugin, and additions of their hooks. It also
    has the random generators and the position in the data. As in Lightning, state that is not per
    rank is that of rank 0. A step is `trainer.global_step`. Values of `self.log` become metrics of
    the step. `fit` resumes from the newest checkpoint, without `ckpt_path`.

    Within an epoch, a fit resumes only with the same number of ranks and batches. Otherwise it is
    refused, unless `on_reshard="drop"` restarts the epoch.

    After `fit`, `stopped` is the reason for an early stop, with the exit code, or None.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        state: Mapping[str, Any] | None = None,
        on_reshard: Literal["error", "drop"] = "error",
        **options: Any,
    ) -> None:
        check_on_reshard(on_reshard)
        self._extra_state = check_extra_state(state, _OWN)
        self.stopped: TrainingStopped | None = None
        self._root = root
        self._on_reshard = on_reshard
        self._options = dict(options)  # a copy, so that LightningCLI does not inspect its use
        self._checkpointer: Checkpointer | None = None
        self._trainer: Any = None
        self._position: FitPosition | None = None
        self._signals: dict[int, tuple[Any, Any]] = {}
        self._metrics: dict[str, float] = {}
        self._resumed = self._step = self._saved = -1

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Add a callback that fills the state before all others begin, as they read it then."""
        if stage != "fit":
            return
        _check_setup(trainer, self)
        # A new list: the Trainer is iterating over this one.
        trainer.callbacks = [_RestoreCallback(self), *_without_restore_callback(trainer.callbacks)]

    def begin(self, trainer: Any) -> None:
        """Fill the module and the optimizers; pass the rest to Lightning. Every rank calls it."""
        self._trainer, self.stopped = trainer, None
        names = self._options.get("save", DEFAULT_SAVE).signals
        numbers = [signal.Signals[f"SIG{name}"] for name in sorted(names)]
        before = {number: signal.getsignal(number) for number in numbers}
        root = None if trainer.fast_dev_run else self._root
        self._checkpointer = ck = Checkpointer(root, **self._options)
        self._signals = {
            number: (old, ours)
            for number, old in before.items()
            if (ours := signal.getsignal(number)) != old  # the same outside the main thread
        }
        template = self._template()
        step = ck.restore(template)
        self._resumed = self._step = -1 if step is None else step
        self._position = position = FitPosition(trainer, self._boundary)
        if step is not None:
            if not trainer.strategy.restore_checkpoint_after_setup:
                self._refuse_path()
            loaded = template["trainer"]
            if not isinstance(loaded, dict) or "loops" not in loaded:
                raise IncompatibleError(
                    f"step {step} of {self._root} was not saved by this callback: give it another "
                    f"root, and this checkpoint as init= with init_strict=False"
                )
            loops = loaded["loops"]["fit_loop"]
            data = template["data"].value
            can_restart = self._on_reshard == "drop"
            position.resume_from(template["position"], data, loops, can_restart=can_restart)
            self._restore_rest(loaded)
            self._stay_ended(loaded.get("ended_by", []))
        position.patch()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse a second checkpoint to resume from; handle signals by the checkpointer only."""
        self._refuse_path()
        # Lightning's own handler for SIGTERM broadcasts, and raises before anything is saved.
        for number, (before, ours) in self._signals.items():
            signal.signal(number, ours)
            trainer._signal_connector._original_handlers[signal.Signals(number)] = before

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Collect the logged metrics."""
        if self._checkpointer is not None and not trainer.sanity_checking:
            self._metrics |= logged(trainer)

    # Called after the module's own hook, as for all callbacks that monitor metrics.
    on_train_epoch_end = on_validation_end

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Save the last step if `save` has `at_end`, and wait until it is durable."""
        self.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the run without waiting for other ranks; snapshots stay in memory."""
        self._unpatch()
        if self._checkpointer is not None:
            self._checkpointer.__exit__(type(exception), exception, exception.__traceback__)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """End the run of a fit that had nothing to do."""
        if stage == "fit":
            self._unpatch()
            self.close()

    def close(self) -> None:
        """End the run as `on_train_end` does. Call it if you catch an error of `fit`."""
        if self._checkpointer is not None:
            self._checkpointer.close()

    def _boundary(self, *, is_over: bool) -> None:
        """Save after a batch or an epoch, when all of its step is done."""
        ck, trainer, step = self._checkpointer, self._trainer, self._trainer.global_step
        if ck is None or self not in trainer.callbacks:  # a tuner's trial has other callbacks
            return
        if step > max(self._step, 0):
            self._step = step
            ck.step(step, self._state)
            if step == self._saved:
                self._metrics = {**logged(trainer), **self._metrics}
        if self._metrics and step > 0:
            ck.metrics(step, self._metrics)
        self._metrics = {}
        if ck.should_stop:
            self.stopped = ck.stopped
            _stop(trainer)
        if is_over or self.stopped is not None:
            # From here on, the Trainer counts the epoch as complete.
            ck.close()
            self._checkpointer = None

    def _stay_ended(self, ended_by: list[str]) -> None:
        """End a resumed fit that EarlyStopping had ended."""
        trainer = self._trainer
        if ended_by and any(
            callback.state_key in ended_by for callback in trainer.early_stopping_callbacks
        ):
            trainer.should_stop = True
            _log.warning(
                "%s was ended by EarlyStopping at step %d, and stays ended: to continue, leave "
                "that callback out, or begin another run with "
                "LightningCheckpoint(ANOTHER_ROOT, init=%r)",
                *(self._root, self._resumed, f"{os.fspath(self._root)}@latest"),
            )

    def _refuse_path(self) -> None:
        if self._resumed >= 0 and self._trainer.ckpt_path:
            raise ValueError(
                f"{self._root} resumes from step {self._resumed}, but fit(ckpt_path="
                f"{str(self._trainer.ckpt_path)!r}) would replace its state: leave ckpt_path out"
            )

    def _unpatch(self) -> None:
        if self._position is not None:
            self._position.unpatch()
        if (trainer := self._trainer) is not None:
            trainer.callbacks = _without_restore_callback(trainer.callbacks)

    def _template(self) -> dict[str, Any]:
        """Return the state to fill; Lightning restores the rest in its own order."""
        module = self._trainer.lightning_module
        return {
            "model": module,
            "optim": _optimizers(self._trainer, None),
            "trainer": None,
            "position": None,
            "data": PerRank(None, on_reshard="drop"),
            "rng": RNG(on_reshard="drop"),
            **self._extra_state,
        }

    def _state(self) -> dict[str, Any]:
        """Return the state to save, read again for each save. Every rank calls it."""
        trainer = self._trainer
        self._saved = trainer.global_step
        broadcast_module_buffers(trainer.strategy.model)
        rest, weights = _dump_checkpoint(trainer)
        assert self._position is not None, "training has begun"
        loops = rest["loops"]["fit_loop"]
        position, data = self._position.capture(loops)
        state: dict[str, Any] = {
            "model": trainer.lightning_module if weights is None else weights,
            "optim": _optimizers(trainer, weights),
            "position": position,
            "data": PerRank(data, on_reshard="drop"),
            "rng": RNG(on_reshard="drop"),
            **self._extra_state,
        }
        if trainer.is_global_zero:
            stops = trainer.early_stopping_callbacks if trainer.should_stop else []
            ended_by = [
                stop.state_key
                for stop in stops
                if stop.stopped_epoch or stop.stopping_reason_message
            ]
            state["trainer"] = {**rest, "ended_by": ended_by}
        return state

    def _restore_rest(self, loaded: dict[str, Any]) -> None:
        """Let Lightning restore all except the tensors, as from its own checkpoint."""
        trainer = self._trainer
        has_hooks, connector = _has_hooks(trainer), trainer._checkpoint_connector
        weights = _weights(trainer) if has_hooks else {}
        copies = {name: value.clone() for name, value in weights.items() if torch.is_tensor(value)}
        connector._loaded_checkpoint = {
            **loaded,
            "optimizer_states": [],
            "state_dict": {**weights, **copies},
        }
        if trainer.strategy.restore_checkpoint_after_setup:
            return  # Lightning restores the rest later
        if has_hooks:
            connector.restore_model()
        connector.restore_datamodule()
        connector.restore_callbacks()


class _RestoreCallback(_Base):  # type: ignore[misc]  # of which library it is shows at run time
    """The first of all callbacks, while the `LightningCheckpoint` itself is the last."""

    def __init__(self, owner: LightningCheckpoint) -> None:
        self.owner = owner

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Fill the state: the module and the optimizers are set up, and no training has begun."""
        self.owner.begin(trainer)


def _without_restore_callback(callbacks: list[Any]) -> list[Any]:
    return [callback for callback in callbacks if not isinstance(callback, _RestoreCallback)]


def _stop(trainer: Any) -> None:
    """End the fit immediately, also before `min_epochs`: the machine may go away."""
    trainer.fit_loop.min_epochs = None
    trainer.fit_loop.epoch_loop.min_steps = None
    trainer.should_stop = True


def _check_setup(trainer: Any, callback: LightningCheckpoint) -> None:
    """Raise an error for a setup that cannot be saved correctly."""
    libraries = {cls.__module__.partition(".")[0] for cls in type(callback).__mro__}
    if (package := find_package(trainer)) not in libraries:
        raise TypeError(
            f"this Trainer is of {package}, but the callback of another package: import {package} "
            f"before dist_ckpt.integrations.lightning"
        )
    if "DeepSpeed" in type(trainer.strategy).__name__:
        raise ValueError(
            "LightningCheckpoint does not save DeepSpeed engines: use Lightning's ModelCheckpoint"
        )
    if sum(isinstance(entry, LightningCheckpoint) for entry in trainer.callbacks) > 1:
        raise ValueError("the Trainer has two LightningCheckpoints: give it one")
    check_names(trainer)


def _has_hooks(trainer: Any) -> bool:
    """Return True if the module or a callback has a checkpoint hook, which may read the weights."""
    names = ("on_save_checkpoint", "on_load_checkpoint")
    base = ("Callback", "CheckpointHooks")
    return any(
        getattr(type(owner), name).__qualname__.partition(".")[0] not in base
        for owner in (trainer.lightning_module, *trainer.callbacks)
        for name in names
    )


def _weights(trainer: Any) -> dict[str, Any]:
    """Return the module's state dict without copies; nothing for FSDP1, which would gather it."""
    module = trainer.lightning_module
    if type(trainer.strategy).__name__ == "FSDPStrategy":
        return {}
    return dict(module.state_dict())


def _dump_checkpoint(trainer: Any) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return Lightning's checkpoint without the tensors of the module and the optimizers.

    Also return the weights to save if hooks have changed them, else None.
    """
    strategy = trainer.strategy
    module_weights = _weights(trainer) if _has_hooks(trainer) else {}
    strategy.lightning_module_state_dict = lambda: dict(module_weights)
    strategy.optimizer_state = lambda optimizer: {}
    try:
        dump = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    finally:
        del strategy.lightning_module_state_dict, strategy.optimizer_state
    weights = dump.pop("state_dict")
    del dump["optimizer_states"]
    for name in [name for name in dump if name.startswith(_HYPERPARAMETERS)]:
        del dump[name]
    if (name := next(_find_dtensors(dump, ""), None)) is not None:
        raise ValueError(
            f"{name[1:]} is a DTensor that a callback or a hook added to the checkpoint. Only the "
            f"module and the optimizers may have them: leave that callback out"
        )
    changed = {k: value for k, value in weights.items() if module_weights.get(k) is not value}
    return dump, {**module_weights, **changed} if changed else None


def _find_dtensors(value: object, name: str) -> Iterator[str]:
    if isinstance(value, DTensor):
        yield name
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _find_dtensors(item, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _find_dtensors(item, f"{name}.{number}")


def _optimizers(trainer: Any, weights: Mapping[str, Any] | None) -> Any:
    """Return the optimizer, or several by number; `Named` if the module itself is not saved."""
    optimizers = list(trainer.optimizers)
    if weights is not None:
        names = dict(trainer.lightning_module.named_parameters())
        optimizers = [Named(optimizer, names) for optimizer in optimizers]
    if len(optimizers) == 1:
        return optimizers[0]
    return {str(number): optimizer for number, optimizer in enumerate(optimizers)}
