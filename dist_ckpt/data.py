"""The position of a job in its data: one order and one position for any number of ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sized
from copy import deepcopy
from operator import index
from typing import Any, Final, Never

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from dist_ckpt.errors import CheckpointError, IncompatibleError
from dist_ckpt.settings import launched_world_size

# The number of samples that identify an order, as another version of torch may shuffle differently.
_NUM_COMPARED = 8
# Indices become Python integers in chunks: a rank may have hundreds of millions.
_CHUNK_LENGTH = 4096
# The sum of seed and epoch must fit torch's generators.
MAX_EPOCH = 1 << 62

_BY_HAND = "count in the loop and pass that to ElasticSampler.begin_at after the load"
_SAME_RANKS = "dc.PerRank(loader), which continues only on the same number of ranks"
_PER_RANK = f"give {_SAME_RANKS}, or make it a map-style dataset with a dc.ElasticSampler"

# The attribute of Lightning Fabric's loader with the epoch that its next pass sets.
_FABRIC_EPOCH = "_num_iter_calls"

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


class ElasticSampler(DistributedSampler[int]):
    """A sampler with the order of torch's `DistributedSampler` that can begin anywhere in an epoch.

    An epoch is one order of all samples, by `seed + epoch` if `shuffle`. After the first `consumed`
    samples, rank r of `num_replicas` gets every `num_replicas`-th sample, from the r-th on. All
    ranks get the same number. So the last row is filled with up to `num_replicas - 1` samples from
    the beginning of the epoch, or dropped with `drop_last`. The consumed samples are always the
    beginning of the order, so any number of ranks can continue behind them.

    `dataset` is anything with a length. The defaults of `num_replicas` and `rank` are those of the
    process group, or 1 and 0. `len()` is a rank's share of a complete epoch. As with
    `DistributedSampler`, call `set_epoch` before each epoch, here in
    `for epoch in range(sampler.epoch, epochs)`. Raises ValueError for a `rank` that is not below
    `num_replicas`, and if a launcher started several ranks but there is no process group.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,  # noqa: FBT001, FBT002  (as in DistributedSampler)
        seed: int = 0,
        drop_last: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        has_group = dist.is_available() and dist.is_initialized()
        if num_replicas is None:
            if not has_group and (launched := launched_world_size()) > 1:
                raise ValueError(
                    f"WORLD_SIZE is {launched}, but the process group does not exist: add "
                    "`torch.distributed.init_process_group()` before this line, or give "
                    "`num_replicas` and `rank`"
                )
            num_replicas = dist.get_world_size() if has_group else 1
        if rank is None:
            rank = dist.get_rank() if has_group else 0
        if not isinstance(dataset, Sized):
            raise TypeError(f"`dataset` is a {type(dataset).__name__}: give one with a length")
        num_replicas, rank = _check_whole("num_replicas", num_replicas), _check_whole("rank", rank)
        seed = _check_whole("seed", seed)
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)  # type: ignore[arg-type]
        self.length = len(dataset)
        self.begin_at(0, 0)
        self._is_moved = self._has_set_epoch = False
        self._first: tuple[int, list[int]] = (-1, [])

    @property
    def next_pass(self) -> tuple[int, int]:
        """The epoch of the next pass, and the number of its samples that are skipped."""
        return self.epoch, self._start

    @property
    def after_last_pass(self) -> tuple[int, int]:
        """`next_pass` after the end of the last pass.

        It is the next epoch if the loop uses `set_epoch`, and has not called it for that epoch yet.
        """
        is_next_set = self.last_pass is None or self.epoch != self.last_pass[0]
        if is_next_set or not self._has_set_epoch:
            return self.next_pass
        return self.epoch + 1, 0

    def begin_at(self, epoch: int, consumed: int) -> None:
        """Let the next pass begin in `epoch` after its first `consumed` samples, of all ranks.

        Later passes are complete. It is for a loop that counts by itself: after each batch
        `consumed += batch_size * num_replicas`. `DataPosition` counts for a `StatefulDataLoader`.
        Raises ValueError unless 0 <= `consumed` <= the number of samples.
        """
        epoch, consumed = _check_whole("epoch", epoch), _check_whole("consumed", consumed)
        if not 0 <= consumed <= self.length:
            raise ValueError(
                f"`consumed` is {consumed} of {self.length} samples: give the number of samples of "
                "the epoch that all ranks together have received"
            )
        self.epoch, self._start, self._is_moved = epoch, consumed, True
        self.last_pass: tuple[int, int] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass.

        After a load, ValueError in the middle of another epoch, as the rest of it would be lost.
        Also ValueError if a framework sets another epoch, which it counts from 0 in each process.
        """
        epoch = _check_whole("epoch", epoch)
        if epoch != self.epoch and self._is_moved:
            framework = _calling_framework()
            if framework or 0 < self._start < self.length:
                raise self._epoch_error(epoch, framework)
        self._has_set_epoch = True
        if epoch != self.epoch:
            self.epoch, self._start = epoch, 0

    def _epoch_error(self, epoch: int, framework: str) -> ValueError:
        caller, remedy = (
            "",
            (
                f"Loop over range(sampler.epoch, epochs), or skip the rest of that epoch with "
                f"sampler.begin_at({epoch}, 0)"
            ),
        )
        if framework:
            caller = f", called by {framework},"
            remedy = (
                "The framework counts the epochs of this process only. With Lightning Fabric, make "
                "the position from its loader, dc.DataPosition(fabric.setup_dataloaders(loader)). "
                "With others, loop over your own loader"
            )
        return ValueError(
            f"set_epoch({epoch}){caller} after a load that left epoch {self.epoch} at sample "
            f"{self._start} of {self.length}. {remedy}"
        )

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's remaining samples of the epoch."""
        # A generator: a loader may make an iterator that it never uses.
        self._is_moved = False
        if len(self.dataset) != self.length:  # type: ignore[arg-type]  # it is sized
            raise ValueError(
                f"the dataset had {self.length} samples when its sampler was made and has "
                f"{len(self.dataset)} now: make a new sampler and loader"  # type: ignore[arg-type]
            )
        self.last_pass = epoch, start = self.epoch, self._start
        self._start = 0
        rows, ranks = self._samples_per_rank(start), self.num_replicas
        if not rows:
            return
        positions = torch.arange(start + self.rank, start + rows * ranks, ranks) % self.length
        order = self._order(epoch)
        self._first = epoch, order[:_NUM_COMPARED].tolist()
        for chunk in order[positions].split(_CHUNK_LENGTH):
            yield from chunk.tolist()

    def reached(self, start: int, taken: int) -> int:
        """Return the consumed samples of an epoch if each rank took `taken` from `start` on."""
        taken = min(taken, self._samples_per_rank(start))
        return min(start + taken * self.num_replicas, self.length)

    def first_samples(self, epoch: int) -> list[int]:
        """Return the first few samples of an epoch, which identify its order."""
        if self._first[0] != epoch or not self._first[1]:
            self._first = epoch, self._order(epoch)[:_NUM_COMPARED].tolist()
        return self._first[1]

    def check_order(self, epoch: int, first: object) -> None:
        """Raise IncompatibleError unless the order of an epoch begins with these samples."""
        if first != self.first_samples(epoch):
            raise IncompatibleError(
                f"the samples of epoch {epoch} were in another order: this torch "
                f"({torch.__version__}) shuffles differently. Load with the torch that saved, or "
                "exclude the position and restart the epoch"
            )

    def _samples_per_rank(self, start: int) -> int:
        """Return the number of samples of each rank from `start` on."""
        remaining, ranks = self.length - start, self.num_replicas
        return remaining // ranks if self.drop_last else -(-remaining // ranks)

    def _order(self, epoch: int) -> torch.Tensor:
        """Return all samples in the order of an epoch: that of `DistributedSampler`."""
        if not self.shuffle:
            return torch.arange(self.length)
        generator = torch.Generator()
        generator.manual_seed(self.seed + epoch)
        return torch.randperm(self.length, generator=generator)


# Frameworks whose loaders call `set_epoch` with the number of their passes in this process.
_FRAMEWORKS = frozenset({"lightning", "lightning_fabric", "pytorch_lightning", "accelerate"})


def _calling_framework() -> str:
    """Return the module that calls `set_epoch` if it is of a framework, else ""."""
    module = str(sys._getframe(2).f_globals.get("__name__", ""))
    return module if module.partition(".")[0] in _FRAMEWORKS else ""


def _check_whole(name: str, value: object) -> int:
    """Return a number as an integer. TypeError or ValueError if it is not one."""
    try:
        number = index(value)  # type: ignore[arg-type]  # it raises TypeError
    except TypeError:
        raise TypeError(f"`{name}` is {value!r}: give a whole number") from None
    if abs(number) >= MAX_EPOCH:
        raise ValueError(f"`{name}` is 2**62 or more: give a smaller number")
    return number


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

    `loader` may be what Lightning Fabric's `setup_dataloaders` returns. Fabric sets the epoch of
    the sampler itself, and a load sets the epoch that Fabric counts.
    """

    def __init__(self, loader: object) -> None:
        inner = getattr(loader, "_dataloader", None) if hasattr(loader, _FABRIC_EPOCH) else None
        self._fabric_loader = None if inner is None else loader
        self._loader = _check_loader(loader if inner is None else inner)
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
        if self._fabric_loader is not None:
            setattr(self._fabric_loader, _FABRIC_EPOCH, state["epoch"])

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


def load_position(owner: Any, state: object) -> None:
    """Call `load_state_dict` such that a `Loader` of torchdata.nodes is at the loaded position.

    Its `state_dict()`, which a load also calls, begins a pass. The next `iter` returns this pass,
    and not one from a position that is loaded meanwhile. A second `iter` begins there. After the
    second load the pass of the training begins there too, and until then `state_dict()` has it.
    """
    library = sys.modules.get("torchdata.nodes")
    if library is not None and isinstance(owner, library.Loader):
        iter(owner)
        owner.load_state_dict(deepcopy(state))
        iter(owner)
    owner.load_state_dict(state)


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
        sampler, batches = loader.sampler, loader.batch_sampler
        if batches is not None and getattr(batches, "sampler", None) is not sampler:
            sampler = batches  # it does not just cut the order of the sampler
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


def _name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
