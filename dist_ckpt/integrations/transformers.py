"""Save and resume `transformers.Trainer` through a callback, with the position in the data.

callback = CheckpointCallback("runs/a", save=dc.every(steps=500), keep=dc.keep.last(3))
trainer = Trainer(model, TrainingArguments(..., save_strategy="no"), callbacks=[callback], ...)
trainer.train(resume_from_checkpoint=callback.resume(trainer))
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import transformers
from transformers.trainer_callback import ExportableState

from dist_ckpt.checkpointer.checkpointer import Checkpointer
from dist_ckpt.checkpointer.run_session import TrainingStopped
from dist_ckpt.core.checkpoint.checkpoint import open as open_checkpoint
from dist_ckpt.core.state.wrappers import RNG
from dist_ckpt.default_opener import OPENER
from dist_ckpt.errors import IncompatibleError, NotFoundError
from dist_ckpt.integrations.adapter_state import broadcast_module_buffers, check_extra_state

_log = logging.getLogger("dist_ckpt")

# The file that the Trainer reads in the folder to resume from.
_STATE_FILE = "trainer_state.json"

# The private methods of the Trainer that are replaced; each is checked before training begins.
NEEDED = ("_load_from_checkpoint", "_load_rng_state", "_maybe_log_save_evaluate")

_OWN = {"model", "optim", "scheduler", "trainer", "scaler", "rng"}


class CheckpointCallback(transformers.TrainerCallback):  # type: ignore[misc]  # it has no types
    """Saves a `Trainer`'s run as `dc.Checkpointer` does, and resumes it, batch by batch.

    The options are those of `dc.Checkpointer`; `state` is extra state to save. A checkpoint has the
    model, the optimizer, the scheduler, the Trainer's own state (steps, epochs, logs, callbacks),
    the scaler of mixed precision and the random generators. The results of an evaluation become
    metrics of the step. Turn the Trainer's own saving off: `save_strategy="no"`.

    Call `trainer.train(resume_from_checkpoint=callback.resume(trainer))` on every rank, also for a
    fresh run: `resume` returns None then, and the option `init` fills the model. The Trainer skips
    the trained batches of the epoch. By default saves are not in the background, as a resume needs
    the step before training begins.

    After `train`, `stopped` is the reason for an early stop, with the exit code, or None.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        state: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.stopped: TrainingStopped | None = None
        self._root = root
        self._extra_state = check_extra_state(state, _OWN)
        self._options = {"background": False, **options}
        self._trainer: Any = None
        self._checkpointer: Checkpointer | None = None
        self._is_pending = False
        self._epoch_has_ended = False
        self._step: int | None = None
        self._folder: str | None = None
        self._generators: object = None

    def resume(self, trainer: Any) -> str | None:
        """Return the folder for `train` to resume from; None for a fresh run.

        Every rank calls this before `train`. The state does not change yet. ValueError for a
        Trainer that also saves in another way.
        """
        args = trainer.args
        if getattr(trainer, "is_deepspeed_enabled", False):
            raise ValueError(
                "CheckpointCallback does not save DeepSpeed engines: use the Trainer's own "
                "checkpoints"
            )
        if getattr(args, "enable_jit_checkpoint", False):
            raise ValueError(
                "enable_jit_checkpoint handles SIGTERM: leave it out, and give "
                'save=dc.on_signal("TERM") to the callback'
            )
        if str(getattr(args.save_strategy, "value", args.save_strategy)) != "no":
            _log.warning('the Trainer also saves: give TrainingArguments save_strategy="no"')
        for name in NEEDED:
            if not hasattr(trainer, name):
                raise IncompatibleError(
                    f"transformers {transformers.__version__} has no Trainer.{name}: use the "
                    f"tested version (5.23), or dc.Checkpointer in your own loop"
                )
        self._trainer = trainer
        self._follow(trainer)
        if (newest := _read_newest(self._root)) is None:
            return None
        self._step, before, text = newest
        if before != (now := _batch_counts(args)) and not args.ignore_data_skip:
            raise ValueError(
                f"{self._root} was trained on {_BATCHES.format(**before)}, and now on "
                f"{_BATCHES.format(**now)}. The Trainer counts batches, and would lose or repeat "
                f"some: restart the epoch with TrainingArguments(ignore_data_skip=True), or train "
                f"as before"
            )
        self._folder = tempfile.mkdtemp(prefix="dist_ckpt-resume-")
        with open(os.path.join(self._folder, _STATE_FILE), "w", encoding="utf-8") as file:
            file.write(text)
        self._replace_loads(trainer, self._folder)
        return self._folder

    def _follow(self, trainer: Any) -> None:
        """Save each step after the Trainer has logged and evaluated it.

        The Trainer does that after a step's last callback event. The end of an epoch, which belongs
        to its last step, comes even later.
        """
        conclude = trainer._maybe_log_save_evaluate

        def conclude_and_save(*args: Any, **kwargs: Any) -> None:
            conclude(*args, **kwargs)
            epoch = trainer.state.epoch or 0
            if self._epoch_has_ended or epoch != math.floor(epoch):
                self._boundary(trainer.state, trainer.control)

        trainer._maybe_log_save_evaluate = conclude_and_save

    def _replace_loads(self, trainer: Any, folder: str) -> None:
        """Replace the Trainer's loads of weights and generators from the folder.

        `on_train_begin` fills the weights. The generators are set where the Trainer does that,
        after it has skipped the trained batches.
        """
        load, load_generators = trainer._load_from_checkpoint, trainer._load_rng_state

        def load_weights(checkpoint: str, *args: Any, **kwargs: Any) -> None:
            if checkpoint != folder:
                load(checkpoint, *args, **kwargs)

        def set_generators(checkpoint: str | None) -> None:
            if checkpoint != folder:
                load_generators(checkpoint)
            elif self._generators is not None:
                RNG().restore(self._generators)

        trainer._load_from_checkpoint, trainer._load_rng_state = load_weights, set_generators
        if (run_epoch := getattr(trainer, "_run_epoch", None)) is None:  # of Trainers before 5.23
            return

        def run_what_is_left(*args: Any, **kwargs: Any) -> None:
            # The Trainer checks for a stop after each step, but not before the first.
            if not trainer.control.should_training_stop:
                run_epoch(*args, **kwargs)

        trainer._run_epoch = run_what_is_left

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Fill the model, the optimizer and the rest of the state."""
        if self._trainer is None:
            raise ValueError(
                "callback.resume was not called: begin also a fresh run with "
                "train(resume_from_checkpoint=callback.resume(trainer))"
            )
        if self._step is not None and state.global_step != self._step:
            raise ValueError(
                f"the Trainer continues from step {state.global_step}, but the checkpoint is of "
                f"step {self._step}: give resume_from_checkpoint=callback.resume(trainer)"
            )
        components = {key: kwargs[key] for key in ("model", "optimizer", "lr_scheduler")}
        self._checkpointer = ck = Checkpointer(self._root, **self._options)
        try:
            ck.restore(
                lambda: self._state(components), None if self._step is None else f"@{self._step}"
            )
        except BaseException as error:
            ck.__exit__(type(error), error, error.__traceback__)
            raise
        self._generators = RNG().capture()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            _fill_callbacks(self._trainer.callback_handler.callbacks, state.stateful_callbacks)
            control.should_training_stop = self._has_ended(state)

    def _has_ended(self, state: transformers.TrainerState) -> bool:
        """Return True if the saved run has ended; the Trainer would do one more step."""
        if state.global_step >= state.max_steps:
            return True
        has_stopped_early = any(
            isinstance(callback, transformers.EarlyStoppingCallback)
            and callback.early_stopping_patience_counter >= callback.early_stopping_patience
            for callback in self._trainer.callback_handler.callbacks
        )
        if has_stopped_early:
            _log.warning(
                "%s was ended by EarlyStoppingCallback at step %d, and stays ended: to "
                "continue, give it more patience or leave it out",
                *(self._root, state.global_step),
            )
        return has_stopped_early

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Note that a step is done; `_follow` saves it later."""
        self._is_pending = True

    def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        """Note that the epoch has ended: its last step is saved after that."""
        self._epoch_has_ended = True

    def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
        """Note that an epoch has begun."""
        self._epoch_has_ended = False

    def _boundary(self, state: Any, control: Any) -> None:
        if not self._is_pending:
            return
        assert self._checkpointer is not None, "training has begun"
        self._is_pending = False
        self._checkpointer.step(state.global_step)
        if self._checkpointer.should_stop:
            self.stopped = self._checkpointer.stopped
            control.should_training_stop = True

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the results of an evaluation as metrics of this step."""
        metrics = {
            name: float(value)
            for name, value in (kwargs.get("metrics") or {}).items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        if self._checkpointer is not None and metrics:
            self._checkpointer.metrics(state.global_step, metrics)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the last step if `save` has `at_end`, and wait until it is durable."""
        self._boundary(state, control)
        self.close()

    def close(self) -> None:
        """End the run as `on_train_end` does. Call it if you catch an error of `train`."""
        if self._checkpointer is not None:
            self._checkpointer.close()

    def _state(self, components: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state to save or fill, read again for each save. Every rank calls it."""
        broadcast_module_buffers(self._trainer.model_wrapped)
        state: dict[str, Any] = {
            "model": components["model"],
            "optim": components["optimizer"],
            "scheduler": components["lr_scheduler"],
            # With another number of ranks, the generators start as in a fresh run.
            "rng": RNG(on_reshard="drop"),
            **self._extra_state,
        }
        if self._trainer.args.process_index == 0:  # the logs of other ranks have other times
            state["trainer"] = {
                "state": _encode_trainer_state(self._trainer),
                "batches": _batch_counts(self._trainer.args),
            }
        if (scaler := getattr(self._trainer.accelerator, "scaler", None)) is not None:
            state["scaler"] = scaler
        return state


def _batch_counts(args: transformers.TrainingArguments) -> dict[str, int]:
    """Return the counts that determine the samples of a step."""
    return {
        "ranks": args.world_size,
        "samples": args.train_batch_size,
        "batches": args.gradient_accumulation_steps,
    }


_BATCHES = "{ranks} ranks by {samples} samples a batch and {batches} batches a step"


def _read_newest(root: str | os.PathLike[str]) -> tuple[int, dict[str, int], str] | None:
    """Return the step of a run's newest checkpoint, with the Trainer's batches and state."""
    try:
        checkpoint = open_checkpoint(f"{os.fspath(root)}@latest", opener=OPENER)
    except NotFoundError:
        return None
    with checkpoint:
        trainer = checkpoint.objects.get("trainer")
    saved = trainer if isinstance(trainer, dict) else {}
    # The checkpoint's own number of ranks is not used: `dist-ckpt reshard` changes that.
    text, batches = saved.get("state"), saved.get("batches")
    if checkpoint.step is None or not isinstance(text, str) or not isinstance(batches, dict):
        raise IncompatibleError(
            f"{checkpoint.path} was not saved by this callback: begin another run from it with "
            f"CheckpointCallback(ANOTHER_ROOT, init={checkpoint.path!r}, init_strict=False)"
        )
    return checkpoint.step, batches, text


def _fill_callbacks(callbacks: Sequence[object], saved: Mapping[str, Any]) -> None:
    """Restore the saved attributes of callbacks, which the Trainer does only on request."""
    remaining = {
        name: [*states] if isinstance(states, list) else [states] for name, states in saved.items()
    }
    for callback in callbacks:
        cls = type(callback).__name__
        if isinstance(callback, ExportableState) and (states := remaining.get(cls)):
            for name, value in states.pop(0).get("attributes", {}).items():
                setattr(callback, name, value)


def _encode_trainer_state(trainer: Any) -> str:
    """Return the Trainer's state as it would write it into its own checkpoint."""
    states: dict[str, list[object]] = {}
    for callback in (*trainer.callback_handler.callbacks, trainer.control):
        if isinstance(callback, ExportableState):
            states.setdefault(type(callback).__name__, []).append(callback.state())
    # The Trainer expects a list for several callbacks of a class, and one state for one callback.
    by_class = {name: group if len(group) > 1 else group[0] for name, group in states.items()}
    callbacks = {**trainer.state.stateful_callbacks, **by_class}
    return json.dumps({**asdict(trainer.state), "stateful_callbacks": callbacks}, sort_keys=True)
