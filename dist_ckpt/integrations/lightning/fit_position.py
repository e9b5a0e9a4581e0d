"""The position of a Lightning fit in its epoch: captured at each save, and restored.

Lightning counts batches, but a resume does not skip the trained ones. So the generators are
captured before an epoch's order is drawn. A resume restores them, lets Lightning draw the order
again, skips the trained batches, and sets the generators of the save.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from dist_ckpt.core.state.wrappers import RNG
from dist_ckpt.integrations.adapter_state import (
    capture_sources,
    check_num_batches,
    refuse_other_ranks,
    set_sources,
)


class AtBoundary(Protocol):
    """A function to call after a batch, or an epoch; `is_over` if the fit ends within the epoch."""

    def __call__(self, *, is_over: bool) -> None:
        """Save if a save is due."""


class FitPosition:
    """The position of a `Trainer`'s fit in its data, and the boundaries between its batches.

    Lightning has no hook after a batch with its validation and the schedulers that depend on it. So
    four methods of its two loops are replaced until `unpatch`.
    """

    def __init__(self, trainer: Any, boundary: AtBoundary) -> None:
        self._trainer = trainer
        self._boundary = boundary
        self._at_save: object = None  # the generators of the save
        self._order: dict[str, Any] | None = None  # the sources of the epoch's order
        self._skip: int | None = None
        self._is_stateful = False
        self._num_batches: int | None = None
        self._patched: list[tuple[Any, str]] = []

    def capture(self, fit_loop: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the common part of all ranks, and the part of this rank.

        Loader states are moved from the loop's state to the rank's part: Lightning would restore
        those of rank 0 on all ranks.
        """
        loops, num_batches = self._trainer.fit_loop, _num_batches(self._trainer)
        epoch = loops.epoch_progress.current
        is_between_epochs = epoch.ready == epoch.completed
        batches = 0 if is_between_epochs else loops.epoch_loop.batch_progress.current.ready
        states = fit_loop["state_dict"].pop("combined_loader", None)
        common = {
            "world_size": self._trainer.world_size,
            "batches": batches,
            "num_batches": num_batches,
        }
        # A loader without a length was read ahead: its state is not exact.
        have_states = num_batches is not None and all(
            hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
            for loader in self._loaders()
        )
        of_rank = {
            "loaders": states if batches and have_states else None,
            "order": self._order if batches else self._current_order(),
        }
        return common, of_rank

    def resume_from(
        self, common: Any, of_rank: Any, fit_loop: dict[str, Any], *, can_restart: bool
    ) -> None:
        """Prepare a resume at a captured position; with other ranks, restart the epoch.

        Raises IncompatibleError before anything has begun if a restart is needed, but not allowed.
        """
        self._at_save = RNG().capture()
        batches, num_ranks = common["batches"], common["world_size"]
        self._skip = batches
        self._num_batches = common["num_batches"]
        if num_ranks != self._trainer.world_size:
            if batches and not can_restart:
                now = self._trainer.world_size
                refuse_other_ranks("LightningCheckpoint", batches, num_ranks, now)
            if batches:
                # Remove the incomplete epoch from the counts; the number of steps stays.
                self._skip = 0
                for counts in fit_loop["epoch_progress"].values():
                    done = counts["completed"]
                    counts.update(dict.fromkeys(("ready", "started", "processed"), done))
            return
        self._order = of_rank["order"]
        if batches and of_rank["loaders"] is not None:
            self._is_stateful = True
            fit_loop["state_dict"]["combined_loader"] = of_rank["loaders"]

    def patch(self) -> None:
        """Replace the loops' methods at the beginning and end of epochs and batches."""
        fit = self._trainer.fit_loop
        self._patch(fit, "_load_combined_loader_states", self._before_first_order)
        self._patch(fit, "on_advance_end", self._after_epoch)
        self._patch(fit.epoch_loop, "on_run_start", self._before_epoch)
        self._patch(fit.epoch_loop, "on_advance_end", self._after_batch)

    def unpatch(self) -> None:
        """Restore the methods."""
        while self._patched:
            delattr(*self._patched.pop())

    def _patch(self, owner: Any, name: str, replacement: Callable[..., None]) -> None:
        original = getattr(owner, name)
        setattr(owner, name, lambda *args: replacement(original, *args))
        self._patched.append((owner, name))

    def _before_first_order(self, original: Callable[[], None]) -> None:
        """Set the generators of the saved order, as the order is drawn next."""
        if self._skip is None:
            self._order = self._current_order()
        # The order is None with another number of ranks.
        elif not self._is_stateful and self._order is not None:
            set_sources(self._loaders(), self._order)
            RNG().restore(self._order["rng"])
        if self._skip == 0:
            # End the restart between epochs; with max_steps, Lightning would skip an epoch.
            fit = self._trainer.fit_loop
            fit.epoch_loop.restarting = fit._restarting = False
            RNG().restore(self._at_save)
            self._order, self._skip = self._current_order(), None
        original()

    def _current_order(self) -> dict[str, Any]:
        return capture_sources(self._loaders())

    def _loaders(self) -> list[Any]:
        loader = self._trainer.fit_loop._combined_loader
        return [] if loader is None else list(loader.flattened)

    def _before_epoch(self, original: Callable[[Any], None], fetcher: Any) -> None:
        if self._skip:
            self._skip_batches(fetcher, self._skip)
            original(fetcher)
            return
        before, iterator = self._current_order(), fetcher.combined_loader._iterator
        original(fetcher)
        if fetcher.combined_loader._iterator is not iterator:
            self._order = before

    def _skip_batches(self, fetcher: Any, count: int) -> None:
        check_num_batches(count, self._num_batches, _num_batches(self._trainer))
        if not self._is_stateful:
            for _ in range(count):
                next(fetcher)
            fetcher.fetched -= count  # Lightning adds them
        _start_averaging(self._trainer)
        RNG().restore(self._at_save)
        self._skip = None

    def _after_batch(self, original: Callable[[Any], None], fetcher: Any) -> None:
        loop = self._trainer.fit_loop.epoch_loop
        if loop._skip_next_val:  # in a resume, Lightning repeats the end of the last batch
            loop._skip_next_val = False
            return
        original(fetcher)
        if not loop._num_ready_batches_reached():
            self._boundary(is_over=bool(loop.done))

    def _after_epoch(self, original: Callable[[], None]) -> None:
        original()
        self._boundary(is_over=False)


def _start_averaging(trainer: Any) -> None:
    """Let StochasticWeightAveraging install its scheduler, as Lightning does at an epoch's begin.

    This also resets the learning rates, so restore those of the checkpoint afterwards.
    """
    for callback in trainer.callbacks:
        if type(callback).__name__ != "StochasticWeightAveraging":
            continue
        if callback.swa_start <= trainer.current_epoch <= callback.swa_end:
            groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
            before = [dict(group) for group in groups]
            callback.on_train_epoch_start(trainer, trainer.lightning_module)
            for group, values in zip(groups, before, strict=True):
                group.update(values)


def _num_batches(trainer: Any) -> int | None:
    """Return the number of batches of an epoch; None if it is unknown."""
    number: Mapping[str, Any] | float = trainer.num_training_batches
    return int(number) if isinstance(number, int | float) and number != float("inf") else None
