"""The common position of all ranks in an epoch of a `StatefulDataLoader`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final, Never

from torch.utils.data import DataLoader, IterableDataset

from dist_ckpt.data.elastic_sampler import MAX_EPOCH, ElasticSampler
from dist_ckpt.errors import CheckpointError, IncompatibleError

_BY_HAND = "count in the loop and pass that to ElasticSampler.begin_at after the load"
_SAME_RANKS = "dc.PerRank(loader), which continues only on the same number of ranks"
_PER_RANK = f"give {_SAME_RANKS}, or make it a map-style dataset with a dc.ElasticSampler"

# The stored fields and their classes.
_FIELDS: Final[Mapping[str, type]] = {
    "length": int,
    "shuffle": bool,
    "seed": int,
    "epoch": int,
    "consumed": int,
    "first_samples": list,
}
# The fields that must be equal on load, and the remedy.
_SAME: Final[Mapping[str, str]] = {
    "length": "give the dataset that was saved with",
    "shuffle": "give the sampler that `shuffle`",
    "seed": "give the sampler that `seed`",
}


class DataPosition:
    """The position of torchdata's `StatefulDataLoader` in its epoch, for any number of ranks.

    Add it to the state on every rank, `{"data": dc.DataPosition(loader)}`, and use the loader as
    usual. It stores values that are equal on all ranks: length, seed and epoch of the loader's
    `ElasticSampler`, and the number of samples of the epoch that all ranks together have received.
    It counts samples that the loop has received, not those that workers have fetched.

    After a load, the next pass over the loader begins after these samples, in the same epoch,
    which is `sampler.epoch`. The number of ranks, the batch size and the number of workers may
    differ. No sample is lost or repeated, except in the last row (see `ElasticSampler`) and by the
    loader's own `drop_last`. After the loop over an epoch, the position is the beginning of the
    next one, if `sampler.set_epoch` is called for each.

    A save raises ValueError if ranks have different positions, seeds or lengths. A load raises
    IncompatibleError, before it changes anything, for another length of the dataset, or another
    seed, `shuffle` or order of the sampler. TypeError for a loader whose position is not one
    number: another class, another sampler, a `batch_sampler`, an iterable dataset, a dataset with
    state, `in_order=False`.
    """

    def __init__(self, loader: object) -> None:
        self._loader = _check_loader(loader)
        self._sampler: ElasticSampler = self._loader.sampler

    def state_dict(self) -> dict[str, object]:
        """Return the position: plain data, the same on all ranks."""
        sampler = self._sampler
        epoch, consumed = self._position()
        return {
            "length": sampler.length,
            "shuffle": bool(sampler.shuffle),
            "seed": int(sampler.seed),
            "epoch": int(epoch),
            "consumed": consumed,
            "first_samples": sampler.first_samples(epoch) if consumed else [],
        }

    def check(self, state: object) -> None:
        """Raise IncompatibleError if `load_state_dict` cannot continue from a position."""
        if not isinstance(state, Mapping) or state.keys() != _FIELDS.keys():
            raise IncompatibleError(
                "the saved value is not a position of a dc.DataPosition: load it with the object "
                f"that saved it, or exclude it and {_BY_HAND}"
            )
        for name, cls in _FIELDS.items():
            if type(state[name]) is not cls:
                raise IncompatibleError(
                    f"`{name}` is {state[name]!r}, not {cls.__name__}: load an older checkpoint"
                )
        for name, remedy in _SAME.items():
            if state[name] != (now := getattr(self._sampler, name)):
                raise IncompatibleError(
                    f"saved with {name} {state[name]}, now it is {now}, and the position has no "
                    f"meaning there: {remedy}, or exclude it and restart the epoch"
                )
        epoch, consumed = state["epoch"], state["consumed"]
        if not 0 <= consumed <= state["length"] or abs(epoch) >= MAX_EPOCH:
            raise IncompatibleError(
                f"it is at {consumed} of {state['length']} samples of epoch {epoch}, which is "
                "invalid: load an older checkpoint"
            )
        if consumed:
            self._sampler.check_order(epoch, state["first_samples"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass over the loader begin at a position. Raises the errors of `check`."""
        self.check(state)
        self._loader.load_state_dict({})  # in torchdata: begin where the sampler begins
        self._loader.next_iter_state = None
        self._sampler.begin_at(state["epoch"], state["consumed"])

    def _position(self) -> tuple[int, int]:
        """Return the epoch, and the number of its samples that all ranks have received."""
        loader, sampler = self._loader, self._sampler
        if loader._iterator is None:
            # `loader.state_dict()` would start its workers now, in the current epoch.
            if sampler.last_pass is not None or loader.next_iter_state is not None:
                raise CheckpointError(
                    "the loader or its sampler was moved by other code than the loop over this "
                    "DataPosition's loader. Make it from the loader of the loop, give each loader "
                    "a separate sampler, and load only through the DataPosition"
                )
            return sampler.next_pass
        batches, is_over = _read_progress(loader.state_dict())
        if is_over:
            return sampler.after_last_pass
        if sampler.last_pass is None or not (batches or loader.num_workers):
            return sampler.next_pass  # the next `iter` or `next` begins it
        epoch, start = sampler.last_pass
        return epoch, sampler.reached(start, batches * (loader.batch_size or 1))


def _read_progress(state: Mapping[str, Any]) -> tuple[int, bool]:
    """Return the number of batches that a loop has received, and True if it has ended."""
    try:
        if (snapshot := state.get("_snapshot")) is None:
            batches = state["_num_yielded"]
        else:
            batches = snapshot["_snapshot_step"] + state["_steps_since_snapshot"]
        return batches, state["_iterator_finished"]
    except KeyError as error:
        raise CheckpointError(
            f"the state of this torchdata's StatefulDataLoader has no {error}: use torchdata 0.11, "
            f"or {_BY_HAND}"
        ) from error


def check_ranks(owner: object, saved_by: int, world_size: int) -> None:
    """Raise IncompatibleError for a loader of torchdata that another number of ranks saved."""
    library = sys.modules.get("torchdata.stateful_dataloader")
    if library is None or not isinstance(owner, library.StatefulDataLoader):
        return
    if saved_by != world_size:
        raise IncompatibleError(
            f"a {_name(owner)} saved by {saved_by} ranks, now there are {world_size}: its position "
            f"is that of one rank of {saved_by}, and samples would be lost or repeated. Save a "
            "dc.DataPosition, which continues on any number. To load this checkpoint, pass None "
            "instead to get the saved value, or exclude the name and restart the epoch"
        )


def _check_loader(loader: Any) -> Any:
    """Return the loader. Raise TypeError unless its position is one number."""
    library = sys.modules.get("torchdata.stateful_dataloader")
    if library is None or type(loader) is not library.StatefulDataLoader:
        _refuse_class(loader)
    if isinstance(loader.dataset, IterableDataset):
        raise TypeError(
            f"DataPosition: {_name(loader.dataset)} is an iterable dataset, whose position is "
            f"unknown outside of it: {_PER_RANK}"
        )
    if hasattr(loader.dataset, "state_dict"):
        raise TypeError(
            f"DataPosition: {_name(loader.dataset)} has a state_dict: each worker has a state that "
            f"has no meaning on other ranks: {_PER_RANK}"
        )
    if type(loader.sampler) is not ElasticSampler:
        sampler = loader.batch_sampler if _has_own_batches(loader) else loader.sampler
        raise TypeError(
            f"DataPosition: the samples of a {_name(sampler)} on other ranks are unknown: give the "
            "loader `sampler=dc.ElasticSampler(dataset)`, which has the order of torch's "
            f"DistributedSampler, and `batch_size`; or give {_SAME_RANKS}"
        )
    if loader.num_workers and not loader.in_order:
        raise TypeError(
            "DataPosition: with in_order=False the samples that the loop has received are unknown: "
            "remove it from the loader"
        )
    return loader


def _refuse_class(loader: object) -> Never:
    if isinstance(loader, DataLoader):
        raise TypeError(
            f"DataPosition: a {_name(loader)} may have fetched ahead of the loop, and does not "
            f"report how far: use torchdata's StatefulDataLoader itself, or {_BY_HAND}"
        )
    raise TypeError(
        f"DataPosition: a {_name(loader)} is not a StatefulDataLoader of torchdata: give one with "
        f"a dc.ElasticSampler, or {_SAME_RANKS}"
    )


def _has_own_batches(loader: Any) -> bool:
    """Return True if a loader's batches are not just the next samples of its sampler."""
    batches = loader.batch_sampler
    return batches is not None and getattr(batches, "sampler", None) is not loader.sampler


def _name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
