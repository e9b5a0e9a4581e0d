"""Lightning's `Trainer`: checkpoints through a callback, and a resume that knows the data.

callback = LightningCheckpoint("runs/a", save=dc.every(steps=500), keep=dc.keep.last(3))
Trainer(max_epochs=3, callbacks=[callback]).fit(module, loader)

The callback depends on some private names of Lightning, which may move in any release. It checks
them before a fit begins. Values of `self.log` become the metrics of a step.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor

from dist_ckpt.checkpointer.checkpointer import DEFAULT_SAVE, Checkpointer
from dist_ckpt.checkpointer.run_session import TrainingStopped
from dist_ckpt.core.state.wrappers import RNG, Named, PerRank
from dist_ckpt.errors import IncompatibleError
from dist_ckpt.integrations.adapter_state import (
    broadcast_module_buffers,
    check_on_reshard,
    extra_state_of,
)
from dist_ckpt.integrations.lightning.fit_position import FitPosition

# Where it is, seen from the Trainer; and for what.
NEEDED = (
    ("_results", "which loop logs"),
    ("_logger_connector.metrics", "what it has logged"),
    ("_signal_connector._original_handlers", "handlers that come back when the fit ends"),
    ("_checkpoint_connector.dump_checkpoint", "all that Lightning saves but tensors"),
    ("_checkpoint_connector._loaded_checkpoint", "... and that it restores"),
    ("_checkpoint_connector.restore_model", "hooks that look at it"),
    ("_checkpoint_connector.restore_datamodule", "the data module's state"),
    ("_checkpoint_connector.restore_callbacks", "the callbacks' states"),
    ("fit_loop._restarting", "that a fit goes on between epochs"),
    ("fit_loop._combined_loader", "loaders that know where they are"),
    ("fit_loop._load_combined_loader_states", "the first order of the data is drawn next"),
    ("fit_loop.on_advance_end", "an epoch is done"),
    ("fit_loop.epoch_loop.on_run_start", "an epoch's order is drawn"),
    ("fit_loop.epoch_loop.on_advance_end", "a batch is done"),
    ("fit_loop.epoch_loop.batch_progress", "how many were had"),
    ("fit_loop.epoch_loop._skip_next_val", "a batch that had its end before the resume"),
    ("fit_loop.epoch_loop._num_ready_batches_reached", "whether it was the last of its epoch"),
)

NEEDED_OF_LOADER = (("_iterator", "whether an epoch's order was drawn"),)


def check_names(trainer: Any) -> None:
    """Raise IncompatibleError if this Lightning lacks a name that the callback depends on."""
    loader = sys.modules[type(trainer.fit_loop).__module__].CombinedLoader([])
    needed = [(trainer, name) for name, _ in NEEDED]
    needed += [(loader, name) for name, _ in NEEDED_OF_LOADER]
    for owner, name in needed:
        try:
            attrgetter(name)(owner)
        except AttributeError:
            raise IncompatibleError(
                f"{_version_of(trainer)} has no {type(owner).__name__}.{name}: use 2.6, which this "
                f"was tried with, or dc.Checkpointer in a loop of your own"
            ) from None


def package_of(trainer: Any) -> str:
    """Return the package that a Trainer is of, whatever class was derived: it has two names."""
    return type(trainer).__mro__[-2].__module__.partition(".")[0]


def _version_of(trainer: Any) -> str:
    package = package_of(trainer)
    return f"{package} {getattr(sys.modules[package], '__version__', 'of no known version')}"


def logged(trainer: Any) -> dict[str, float]:
    """Return what the loop that runs has logged, as numbers; nothing of other loops, or before."""
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

# The program's own, and no part of what trains.
_HYPERPARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters", "hparams_")


def _base() -> Any:
    """Return the class of Lightning's checkpoint callbacks, by the name that the program uses."""
    modules = [sys.modules[name] for name in _NAMES if name in sys.modules] or [_installed()]
    return type("Base", tuple(module.callbacks.Checkpoint for module in modules), {})


def _installed() -> Any:
    try:
        import lightning.pytorch as library  # noqa: PLC0415  (one of two names of one library)
    except ModuleNotFoundError:
        import pytorch_lightning as library  # noqa: PLC0415  (the other of the two names)
    return library


_Base: Any = _base()


class LightningCheckpoint(_Base):  # type: ignore[misc]  # of which library it is shows at run time
    """Saves a `Trainer`'s fit as `dc.Checkpointer` does, and resumes it, batch by batch.

    The options are those of `dc.Checkpointer`; `state` holds more that is to be saved. A checkpoint
    has all that Lightning's own has: the module, the optimizers, the schedulers, progress of the
    loops, states of callbacks, data module and precision plugin, and what hooks of theirs add; and
    the random generators and the place in the data. Where ranks differ in the rest, that of rank 0
    is saved, as Lightning does. A step is `trainer.global_step`. What is logged by `self.log`
    becomes metrics of the step. No `ckpt_path` is needed: `fit` goes on from the newest checkpoint.

    A fit in the midst of an epoch needs as many ranks and batches as before. On others it is
    refused, unless `on_reshard="drop"` says that the epoch begins anew.

    After `fit`, `stopped` says whether the run was told to stop, and how to exit.
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
        self._more = extra_state_of(state, _OWN)
        self.stopped: TrainingStopped | None = None
        self._root = root
        self._on_reshard = on_reshard
        self._options = dict(options)  # a copy: LightningCLI would look into what they are given to
        self._checkpointer: Checkpointer | None = None
        self._trainer: Any = None
        self._position: FitPosition | None = None
        self._signals: dict[int, tuple[Any, Any]] = {}
        self._measured: dict[str, float] = {}
        self._resumed = self._step = self._saved = -1

    # --- what the Trainer calls ------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Have the state filled before other callbacks begin, as they read theirs then."""
        del pl_module
        if stage != "fit":
            return
        _check(trainer, self)
        # Not in place: the Trainer is going through this list.
        trainer.callbacks = [
            _First(self),
            *(callback for callback in trainer.callbacks if not _is_first(callback)),
        ]

    def begin(self, trainer: Any) -> None:
        """Fill the module and the optimizers, and hand Lightning the rest. Every rank calls it."""
        self._trainer, self.stopped = trainer, None
        before = {number: signal.getsignal(number) for number in self._numbers()}
        root = None if trainer.fast_dev_run else self._root
        self._checkpointer = ck = Checkpointer(root, **self._options)
        self._signals = {number: (was, signal.getsignal(number)) for number, was in before.items()}
        template = self._template()
        step = ck.restore(template)
        self._resumed = self._step = -1 if step is None else step
        self._position = position = FitPosition(trainer, self._boundary)
        if step is not None:
            if not trainer.strategy.restore_checkpoint_after_setup:
                self._refuse_path()
            if not isinstance(template["trainer"], dict) or "loops" not in template["trainer"]:
                raise IncompatibleError(
                    f"step {step} of {self._root} was not saved by this callback: give it another "
                    f"root, and that checkpoint as init= with init_strict=False"
                )
            loaded = template["trainer"]
            loops = loaded["loops"]["fit_loop"]
            data = template["data"].value
            position.go_on_from(template["position"], data, loops, anew=self._on_reshard == "drop")
            self._hand_over(loaded)
            self._stay_ended(loaded.get("ended_by", []))
        position.watch()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse another checkpoint beside ours; have signals come to the checkpointer alone."""
        del pl_module
        self._refuse_path()
        # Lightning's own handler for SIGTERM broadcasts in it and raises before anything is saved.
        for number, (before, ours) in self._signals.items():
            signal.signal(number, ours)
            trainer._signal_connector._original_handlers[signal.Signals(number)] = before

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Note what was measured."""
        del pl_module
        if self._checkpointer is not None and not trainer.sanity_checking:
            self._measured |= logged(trainer)

    # Called behind the module's own, as for all callbacks that monitor metrics.
    on_train_epoch_end = on_validation_end

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Save the last step if `save` has `at_end`, and wait until it is durable."""
        del trainer, pl_module
        self.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the run without waiting for anyone; what is in memory is kept."""
        del trainer, pl_module
        self._let_go()
        if self._checkpointer is not None:
            self._checkpointer.__exit__(type(exception), exception, exception.__traceback__)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """End the run of a fit that had nothing to do."""
        del trainer, pl_module
        if stage == "fit":
            self._let_go()
            self.close()

    def close(self) -> None:
        """End the run as the end of training does; for who catches what `fit` raises."""
        if self._checkpointer is not None:
            self._checkpointer.close()

    # --- boundaries ------------------------------------------------------------------------------

    def _boundary(self, *, is_over: bool) -> None:
        """Be done with a batch, or an epoch: all that belongs to its step has been done."""
        ck, trainer, step = self._checkpointer, self._trainer, self._trainer.global_step
        if ck is None or self not in trainer.callbacks:  # those of a tuner's trial are others
            return
        if step > max(self._step, 0):
            self._step = step
            ck.step(step, self._state)
            if step == self._saved:
                self._measured = {**logged(trainer), **self._measured}
        if self._measured and step > 0:
            ck.metrics(step, self._measured)
        self._measured = {}
        if ck.should_stop:
            self.stopped = ck.stopped
            _stop(trainer)
        if is_over or self.stopped is not None:
            # What the Trainer does from here on counts the epoch as a whole one.
            ck.close()
            self._checkpointer = None

    def _stay_ended(self, ended_by: list[str]) -> None:
        """End a fit that EarlyStopping had ended, as it would have gone no further."""
        trainer = self._trainer
        if ended_by and any(
            callback.state_key in ended_by for callback in trainer.early_stopping_callbacks
        ):
            trainer.should_stop = True
            _log.warning(
                "%s was ended by EarlyStopping at step %d, and stays so: to train on, leave that "
                "callback out, or begin another run with "
                "LightningCheckpoint(ANOTHER_ROOT, init=%r)",
                *(self._root, self._resumed, f"{os.fspath(self._root)}@latest"),
            )

    def _refuse_path(self) -> None:
        if self._resumed >= 0 and self._trainer.ckpt_path:
            raise ValueError(
                f"{self._root} goes on from step {self._resumed}, and fit(ckpt_path="
                f"{str(self._trainer.ckpt_path)!r}) would set it back: leave ckpt_path out"
            )

    def _let_go(self) -> None:
        if self._position is not None:
            self._position.let_go()
        trainer = self._trainer
        if trainer is not None:
            trainer.callbacks = [
                callback for callback in trainer.callbacks if not _is_first(callback)
            ]

    def _numbers(self) -> list[int]:
        names = self._options.get("save", DEFAULT_SAVE).signals
        return [signal.Signals[f"SIG{name}"] for name in sorted(names)]

    # --- state -----------------------------------------------------------------------------------

    def _template(self) -> dict[str, Any]:
        """Return what is filled: the rest is open, as Lightning takes it in its own order."""
        module = self._trainer.lightning_module
        return {
            "model": module,
            "optim": _optimizers(self._trainer, None),
            "trainer": None,
            "position": None,
            "data": PerRank(None, on_reshard="drop"),
            "rng": RNG(on_reshard="drop"),
            **self._more,
        }

    def _state(self) -> dict[str, Any]:
        """Return what is saved: read anew for each save. Every rank calls it."""
        trainer = self._trainer
        self._saved = trainer.global_step
        broadcast_module_buffers(trainer.strategy.model)
        rest, weights = _dumped(trainer)
        assert self._position is not None, "training has begun"
        loops = rest["loops"]["fit_loop"]
        position, data = self._position.capture(loops)
        state: dict[str, Any] = {
            "model": trainer.lightning_module if weights is None else weights,
            "optim": _optimizers(trainer, weights),
            "position": position,
            "data": PerRank(data, on_reshard="drop"),
            "rng": RNG(on_reshard="drop"),
            **self._more,
        }
        if trainer.is_global_zero:
            state["trainer"] = {**rest, "ended_by": _ended_by(trainer)}
        return state

    def _hand_over(self, loaded: dict[str, Any]) -> None:
        """Have Lightning restore all but the tensors, as it does with a checkpoint of its own."""
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
            return  # it does the rest by itself, from here on
        if has_hooks:
            connector.restore_model()
        connector.restore_datamodule()
        connector.restore_callbacks()


class _First(_Base):  # type: ignore[misc]  # of which library it is shows at run time
    """Stands before all other callbacks, where the callback itself stands behind them."""

    def __init__(self, owner: LightningCheckpoint) -> None:
        self.owner = owner

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Fill the state: module and optimizers are set up, and nothing has begun."""
        del pl_module
        self.owner.begin(trainer)


def _is_first(callback: object) -> bool:
    return isinstance(callback, _First)


def _stop(trainer: Any) -> None:
    """End the fit at once: `min_epochs` is not for a machine that is taken away."""
    trainer.fit_loop.min_epochs = None
    trainer.fit_loop.epoch_loop.min_steps = None
    trainer.should_stop = True


def _ended_by(trainer: Any) -> list[str]:
    """Return the EarlyStopping callbacks that have told the Trainer to stop, by their keys."""
    stops = trainer.early_stopping_callbacks if trainer.should_stop else []
    return [stop.state_key for stop in stops if stop.stopped_epoch or stop.stopping_reason_message]


def _check(trainer: Any, callback: LightningCheckpoint) -> None:
    """Raise for what would not be saved, or not as it should."""
    libraries = {cls.__module__.partition(".")[0] for cls in type(callback).__mro__}
    if (own := package_of(trainer)) not in libraries:
        raise TypeError(
            f"this Trainer is {own}'s, and the callback of another package: import {own} before "
            f"dist_ckpt.integrations.lightning.callback"
        )
    if "DeepSpeed" in type(trainer.strategy).__name__:
        raise ValueError(
            "LightningCheckpoint does not save DeepSpeed engines: use Lightning's ModelCheckpoint"
        )
    if sum(isinstance(entry, LightningCheckpoint) for entry in trainer.callbacks) > 1:
        raise ValueError("two FitCheckpoints in one Trainer: give it one, with one root")
    check_names(trainer)


def _has_hooks(trainer: Any) -> bool:
    """Say whether a callback or the module changes checkpoints, and so wants to see the weights."""
    names = ("on_save_checkpoint", "on_load_checkpoint")
    base = ("Callback", "CheckpointHooks")
    return any(
        getattr(type(owner), name).__qualname__.partition(".")[0] not in base
        for owner in (trainer.lightning_module, *trainer.callbacks)
        for name in names
    )


def _weights(trainer: Any) -> dict[str, Any]:
    """Return the module's state dict, nothing copied; of FSDP1 it would be gathered: none."""
    module = trainer.lightning_module
    if type(trainer.strategy).__name__ == "FSDPStrategy":
        return {}
    return dict(module.state_dict())


def _dumped(trainer: Any) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return Lightning's checkpoint without tensors of module and optimizers.

    And the weights that are to be saved, if hooks have put others there than the module has.
    """
    strategy = trainer.strategy
    own = _weights(trainer) if _has_hooks(trainer) else {}
    strategy.lightning_module_state_dict = lambda: dict(own)
    strategy.optimizer_state = lambda optimizer: {}
    try:
        dump = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    finally:
        del strategy.lightning_module_state_dict, strategy.optimizer_state
    weights = dump.pop("state_dict")
    del dump["optimizer_states"]
    for name in [name for name in dump if name.startswith(_HYPERPARAMETERS)]:
        del dump[name]
    if (name := next(_sharded(dump, ""), None)) is not None:
        raise ValueError(
            f"{name[1:]} is a DTensor that a callback or a hook has put into the checkpoint: only "
            f"the module's and the optimizers' may be sharded, so leave that callback out"
        )
    changed = {name: value for name, value in weights.items() if own.get(name) is not value}
    return dump, {**own, **changed} if changed else None


def _sharded(value: object, name: str) -> Iterator[str]:
    if isinstance(value, DTensor):
        yield name
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _sharded(item, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _sharded(item, f"{name}.{number}")


def _optimizers(trainer: Any, weights: Mapping[str, Any] | None) -> Any:
    """Return the optimizer, or several by number; named by the module if that is not saved."""
    take: Callable[[Any], Any] = lambda optimizer: optimizer  # noqa: E731 - as it comes
    if weights is not None:
        names = dict(trainer.lightning_module.named_parameters())
        take = lambda optimizer: Named(optimizer, names)  # noqa: E731 - the other way to take it
    taken = [take(optimizer) for optimizer in trainer.optimizers]
    return taken[0] if len(taken) == 1 else {str(n): optimizer for n, optimizer in enumerate(taken)}
