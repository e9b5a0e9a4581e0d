"""The position of a `StatefulDataLoader` in its epoch, as all ranks together have it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final, Never

from torch.utils.data import DataLoader, IterableDataset

from dist_ckpt.data.elastic_sampler import MAX_EPOCH, ElasticSampler
from dist_ckpt.errors import CheckpointError, IncompatibleError

_BY_HAND = "count in the loop and give that to ElasticSampler.begin_at after the load"
_ONE_BY_ONE = (
    "give dc.PerRank(loader), which goes on with the same number of ranks only, or make it a "
    "map-style dataset with a dc.ElasticSampler"
)

# What is stored, and of which class each is.
_FIELDS: Final[Mapping[str, type]] = {
    "length": int,
    "shuffle": bool,
    "seed": int,
    "epoch": int,
    "consumed": int,
    "first_samples": list,
}
# What has to be the same for a position to have a meaning, and what to do if it is not.
_SAME: Final[Mapping[str, str]] = {
    "length": "give the dataset that was saved with",
    "shuffle": "give the sampler that `shuffle`",
    "seed": "give the sampler that `seed`",
}


class DataPosition:
    """Where torchdata's `StatefulDataLoader` stands in its epoch, for any number of ranks.

    Put it into the state on every rank, `{"data": dc.DataPosition(loader)}`, and loop over the
    loader as ever. Stored is what is the same on all ranks: length, seed and epoch of the loader's
    `ElasticSampler`, and how many samples all ranks together have got of the epoch. That is counted
    in what the loop has got, not in what workers have fetched. A load on any number of ranks, with
    any batch size and number of workers, lets the next pass over the loader begin behind these
    samples, in the same epoch: no sample is lost or doubled, but for what evens out the last row
    (see `ElasticSampler`) and what the loader's own `drop_last` leaves out at the end.
    `sampler.epoch` is that epoch then. Once the loop over an epoch has ended, the position is the
    beginning of the next one, if `sampler.set_epoch` is called for each.

    A save raises ValueError if ranks stand at different positions, or differ in seed or length. A
    load raises IncompatibleError, before it changes anything, if the dataset has another length, or
    the sampler another seed, `shuffle` or order. TypeError for a loader whose position is not one
    number: another class, another sampler, a `batch_sampler`, an iterable dataset, a dataset with
    state of its own, `in_order=False`.
    """

    def __init__(self, loader: object) -> None:
        self._loader = _known(loader)
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
        """Raise IncompatibleError if `load_state_dict` could not go on from a position."""
        if not isinstance(state, Mapping) or state.keys() != _FIELDS.keys():
            raise IncompatibleError(
                "saved was no position of a dc.DataPosition: load it with what it was saved with, "
                f"or exclude it and {_BY_HAND}"
            )
        for name, cls in _FIELDS.items():
            if type(state[name]) is not cls:
                raise IncompatibleError(
                    f"`{name}` is {state[name]!r}, no {cls.__name__}: load an older checkpoint"
                )
        for name, remedy in _SAME.items():
            if state[name] != (now := getattr(self._sampler, name)):
                raise IncompatibleError(
                    f"saved with {name} {state[name]}, now it is {now}, and the position has no "
                    f"meaning there: {remedy}, or exclude it and begin the epoch anew"
                )
        epoch, consumed = state["epoch"], state["consumed"]
        if not 0 <= consumed <= state["length"] or abs(epoch) >= MAX_EPOCH:
            raise IncompatibleError(
                f"it is at {consumed} of {state['length']} samples of epoch {epoch}, which cannot "
                "be: load an older checkpoint"
            )
        if consumed:
            self._sampler.check_order(epoch, state["first_samples"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass over the loader begin at a position. Raises what `check` raises."""
        self.check(state)
        self._loader.load_state_dict({})  # torchdata's word for: as the sampler begins
        self._loader.next_iter_state = None
        self._sampler.begin_at(state["epoch"], state["consumed"])

    def _position(self) -> tuple[int, int]:
        """Return the epoch, and how many of its samples the loops of all ranks have got."""
        loader, sampler = self._loader, self._sampler
        if loader._iterator is None:
            # To ask the loader for its state now would start its workers, on the epoch of now.
            if sampler.last_pass is not None or loader.next_iter_state is not None:
                raise CheckpointError(
                    "the loader or its sampler was moved by something else than the loop over this "
                    "DataPosition's loader: make it of the loader that the loop reads, give each "
                    "loader its own sampler, and load through the DataPosition alone"
                )
            return sampler.next_pass
        batches, is_over = _progress(loader.state_dict())
        if is_over:
            return sampler.after_last_pass
        if sampler.last_pass is None or not (batches or loader.num_workers):
            return sampler.next_pass  # the next `iter` or `next` begins it
        epoch, start = sampler.last_pass
        return epoch, sampler.reached(start, batches * (loader.batch_size or 1))


def _progress(state: Mapping[str, Any]) -> tuple[int, bool]:
    """Return how many batches a loop has got, and whether it was told that there are no more."""
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
    """Raise IncompatibleError for a bare loader of torchdata that another number of ranks saved."""
    library = sys.modules.get("torchdata.stateful_dataloader")
    if library is None or not isinstance(owner, library.StatefulDataLoader):
        return
    if saved_by != world_size:
        raise IncompatibleError(
            f"a {_name(owner)} saved by {saved_by} ranks, now there are {world_size}: its position "
            "is that of one rank of so many, and samples would be lost or doubled: save a "
            "dc.DataPosition, which goes on with any number; here put None there to take what was "
            "saved, or exclude the name and begin the epoch anew"
        )


def _known(loader: Any) -> Any:
    """Return a loader whose position is one number; raise TypeError for others."""
    library = sys.modules.get("torchdata.stateful_dataloader")
    if library is None or type(loader) is not library.StatefulDataLoader:
        _refuse_class(loader)
    if isinstance(loader.dataset, IterableDataset):
        raise TypeError(
            f"DataPosition: {_name(loader.dataset)} is an iterable dataset, which alone knows what "
            f"it has yielded: {_ONE_BY_ONE}"
        )
    if hasattr(loader.dataset, "state_dict"):
        raise TypeError(
            f"DataPosition: {_name(loader.dataset)} has a state_dict: each worker holds a state "
            f"that has no meaning on other ranks: {_ONE_BY_ONE}"
        )
    if type(loader.sampler) is not ElasticSampler:
        what = loader.batch_sampler if _has_own_batches(loader) else loader.sampler
        raise TypeError(
            f"DataPosition: nobody knows which samples a {_name(what)} yields on other ranks: give "
            "the loader `sampler=dc.ElasticSampler(dataset)`, which has the order of torch's "
            "DistributedSampler, and `batch_size`; or give dc.PerRank(loader), which goes on with "
            "the same number of ranks only"
        )
    if loader.num_workers and not loader.in_order:
        raise TypeError(
            "DataPosition: with in_order=False nobody knows which samples the loop has got: remove "
            "it from the loader"
        )
    return loader


def _refuse_class(loader: object) -> Never:
    if isinstance(loader, DataLoader):
        raise TypeError(
            f"DataPosition: a {_name(loader)} may have fetched ahead of the loop and does not say "
            f"how far: use torchdata's StatefulDataLoader itself, or {_BY_HAND}"
        )
    raise TypeError(
        f"DataPosition: a {_name(loader)} is no StatefulDataLoader of torchdata: give one with a "
        "dc.ElasticSampler, or dc.PerRank(...) of this, which goes on with the same number of "
        "ranks only"
    )


def _has_own_batches(loader: Any) -> bool:
    """Say whether a loader's batches are not simply the next samples of its sampler."""
    batches = loader.batch_sampler
    return batches is not None and getattr(batches, "sampler", None) is not loader.sampler


def _name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
