"""Where a fit of Lightning stands in its epoch: noted at each save, and gone back to.

Lightning counts batches, and does not pass over those that were had. So the generators are noted
where an epoch's order is drawn. A resume sets them to that, has the order drawn again, passes over
the batches, and sets them to what they were at the save.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from dist_ckpt.core.state.wrappers import RNG
from dist_ckpt.errors import IncompatibleError
from dist_ckpt.integrations.adapter_state import set_sources, sources_of


class AtBoundary(Protocol):
    """What is called when a batch, or an epoch, is done; `is_over` if the fit ends in between."""

    def __call__(self, *, is_over: bool) -> None:
        """Look whether to save."""


class FitPosition:
    """The place of a `Trainer`'s fit in its data, and the boundaries between its batches.

    Lightning has no hook where a batch is done with all that belongs to it, validation and
    schedulers that look at that; so four methods of its two loops are taken over until `let_go`.
    """

    def __init__(self, trainer: Any, boundary: AtBoundary) -> None:
        self._trainer = trainer
        self._boundary = boundary
        self._at_save: object = None  # generators to go on with
        self._order: dict[str, Any] | None = None  # what the epoch's order was drawn from
        self._skip: int | None = None
        self._is_stateful = False
        self._num_batches: int | None = None
        self._taken: list[tuple[Any, str]] = []

    # --- save ------------------------------------------------------------------------------------

    def capture(self, fit_loop: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what all ranks have alike, and what is of this rank alone.

        The states of loaders are moved out of the loop's: Lightning would give all ranks rank 0's.
        """
        loop = self._trainer.fit_loop.epoch_loop
        batches = 0 if self._is_between_epochs() else loop.batch_progress.current.ready
        states = fit_loop["state_dict"].pop("combined_loader", None) if batches else None
        fit_loop["state_dict"].pop("combined_loader", None)
        whole = {
            "world_size": self._trainer.world_size,
            "batches": batches,
            "num_batches": _number_of(self._trainer),
        }
        own = {
            "loaders": states if self._loaders_have_states() else None,
            "order": self._order if batches else self._order_now(),
        }
        return whole, own

    def _is_between_epochs(self) -> bool:
        epoch = self._trainer.fit_loop.epoch_progress.current
        return bool(epoch.ready == epoch.completed)

    def _loaders_have_states(self) -> bool:
        """Say whether each loader knows where it is; one of unknown length was read ahead of."""
        is_sized = _number_of(self._trainer) is not None
        return is_sized and all(
            hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
            for loader in self._loaders()
        )

    # --- resume ----------------------------------------------------------------------------------

    def go_on_from(self, whole: Any, own: Any, fit_loop: dict[str, Any], *, anew: bool) -> None:
        """Take what `capture` returned. `anew`: begin the epoch anew if it cannot go on.

        Raises IncompatibleError if other ranks cannot go on with it, before anything has begun.
        """
        self._at_save = RNG().capture()
        batches, num_ranks = whole["batches"], whole["world_size"]
        self._skip = batches
        self._num_batches = whole["num_batches"]
        if num_ranks != self._trainer.world_size:
            if batches:
                self._refuse(f"{num_ranks} ranks", f"{self._trainer.world_size} train", anew=anew)
                self._begin_anew(fit_loop)
            return
        self._order = own["order"]
        if batches and own["loaders"] is not None:
            self._is_stateful = True
            fit_loop["state_dict"]["combined_loader"] = own["loaders"]

    def _refuse(self, before: str, now: str, *, anew: bool) -> None:
        if not anew:
            raise IncompatibleError(
                f"saved after batch {self._skip} of an epoch with {before}, and now {now}: batches "
                f'would be lost or doubled. Begin the epoch anew with on_reshard="drop" of the '
                f"LightningCheckpoint, or train with {before}"
            )

    def _begin_anew(self, fit_loop: dict[str, Any]) -> None:
        """Take the begun epoch back out of what the loops counted; steps stay."""
        self._skip = 0
        for counts in fit_loop["epoch_progress"].values():
            counts.update(dict.fromkeys(("ready", "started", "processed"), counts["completed"]))

    # --- the loops -------------------------------------------------------------------------------

    def watch(self) -> None:
        """Take over what the loops do at the beginning and the end of epochs and batches."""
        fit = self._trainer.fit_loop
        self._take(fit, "_load_combined_loader_states", self._before_first_order)
        self._take(fit, "on_advance_end", self._after_epoch)
        self._take(fit.epoch_loop, "on_run_start", self._before_epoch)
        self._take(fit.epoch_loop, "on_advance_end", self._after_batch)

    def let_go(self) -> None:
        """Give the methods back."""
        while self._taken:
            delattr(*self._taken.pop())

    def _take(self, owner: Any, name: str, instead: Callable[..., None]) -> None:
        own = getattr(owner, name)
        setattr(owner, name, lambda *args: instead(own, *args))
        self._taken.append((owner, name))

    def _before_first_order(self, own: Callable[[], None]) -> None:
        """Set the generators as they were when the order was drawn: that is done next."""
        if self._skip is None:
            self._order = self._order_now()
        elif not self._is_stateful:
            self._set_order()
        if self._skip == 0:
            self._forget_restart()
            RNG().restore(self._at_save)
            self._order, self._skip = self._order_now(), None
        own()

    def _order_now(self) -> dict[str, Any]:
        return {"rng": RNG().capture(), **sources_of(self._loaders())}

    def _set_order(self) -> None:
        if self._order is not None:  # of other ranks nothing is taken
            set_sources(self._loaders(), self._order)
            RNG().restore(self._order["rng"])

    def _loaders(self) -> list[Any]:
        loader = self._trainer.fit_loop._combined_loader
        return [] if loader is None else list(loader.flattened)

    def _forget_restart(self) -> None:
        """Between epochs nothing is left to do; with max_steps Lightning would skip one."""
        fit = self._trainer.fit_loop
        fit.epoch_loop.restarting = False
        fit._restarting = False

    def _before_epoch(self, own: Callable[[Any], None], fetcher: Any) -> None:
        if self._skip:
            self._pass_over(fetcher)
            own(fetcher)
            return
        before, iterator = self._order_now(), fetcher.combined_loader._iterator
        own(fetcher)
        if fetcher.combined_loader._iterator is not iterator:
            self._order = before

    def _pass_over(self, fetcher: Any) -> None:
        """Go to the batch behind the last one that counts."""
        assert self._skip is not None, "an epoch goes on"
        now = _number_of(self._trainer)
        if now != self._num_batches:
            raise IncompatibleError(
                f"saved after batch {self._skip} of an epoch of {self._num_batches} batches on "
                f"each rank, and now it has {now}: batches would be lost or doubled. Give the data "
                f"and the batch size that it was saved with"
            )
        if not self._is_stateful:
            for _ in range(self._skip):
                next(fetcher)
            fetcher.fetched -= self._skip  # Lightning adds them
        _wake_averaging(self._trainer)
        RNG().restore(self._at_save)
        self._skip = None

    def _after_batch(self, own: Callable[[Any], None], fetcher: Any) -> None:
        loop = self._trainer.fit_loop.epoch_loop
        if loop._skip_next_val:  # a resume goes through the end of a batch that had its end
            loop._skip_next_val = False
            return
        own(fetcher)
        if not loop._num_ready_batches_reached():
            self._boundary(is_over=bool(loop.done))

    def _after_epoch(self, own: Callable[[], None]) -> None:
        own()
        self._boundary(is_over=False)


def _wake_averaging(trainer: Any) -> None:
    """Have StochasticWeightAveraging put its scheduler in: it does so as an epoch begins only.

    That sets rates anew, and they are those of the checkpoint already.
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


def _number_of(trainer: Any) -> int | None:
    """Return how many batches an epoch has; None if nobody knows."""
    number: Mapping[str, Any] | float = trainer.num_training_batches
    return int(number) if isinstance(number, int | float) and number != float("inf") else None
