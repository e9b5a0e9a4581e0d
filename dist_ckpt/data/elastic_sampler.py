"""A sampler whose position is one number, which means the same on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from operator import index
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.utils.data.distributed import DistributedSampler

from dist_ckpt.config import launched_world_size
from dist_ckpt.errors import IncompatibleError

if TYPE_CHECKING:
    _Base = DistributedSampler[int]
else:
    _Base = DistributedSampler

# So many samples of an order tell it from others, such as another version of torch would make.
_COMPARED = 8
# Indices become Python's integers so many at a time: a rank may have hundreds of millions.
_CHUNK = 4096
# With a seed added to it, torch's generators still take it.
MAX_EPOCH = 1 << 62


class ElasticSampler(_Base):
    """Torch's `DistributedSampler`, in the same order, that can begin anywhere in an epoch.

    An epoch is one order of all samples, by `seed + epoch` if `shuffle`. Of what is left of it
    after the first `consumed` samples, rank r of `num_replicas` takes every `num_replicas`-th from
    the r-th on. All ranks get equally many: to that end the last row is filled up with up to
    `num_replicas - 1` samples from the epoch's beginning, or left out with `drop_last`. So what the
    ranks have taken is always the beginning of the order, and others can go on behind it.

    `dataset` is anything with a length. Without `num_replicas` and `rank` they are those of the
    process group, and 1 and 0 if there is none. `len()` is a rank's share of a whole epoch. As with
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
        num_replicas = _world_size() if num_replicas is None else num_replicas
        rank = _rank() if rank is None else rank
        if not isinstance(dataset, Sized):
            raise TypeError(f"`dataset` is a {type(dataset).__name__}: give one with a length")
        num_replicas, rank = _whole("num_replicas", num_replicas), _whole("rank", rank)
        seed = _whole("seed", seed)
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)  # type: ignore[arg-type]
        self.length = len(dataset)
        self.begin_at(0, 0)
        self._is_told_epochs = False
        self._first: tuple[int, list[int]] = (-1, [])

    @property
    def next_pass(self) -> tuple[int, int]:
        """The epoch of the next pass, and how many of its samples that leaves out."""
        return self.epoch, self._start

    @property
    def after_last_pass(self) -> tuple[int, int]:
        """As `next_pass`, of a loop that is through with the last one.

        The epoch after that one's if somebody says which epoch it is, and has not said so yet.
        """
        is_next_said = self.last_pass is None or self.epoch != self.last_pass[0]
        if is_next_said or not self._is_told_epochs:
            return self.next_pass
        return self.epoch + 1, 0

    def begin_at(self, epoch: int, consumed: int) -> None:
        """Let the next pass begin in `epoch` behind its first `consumed` samples, of all ranks.

        The passes after it are whole. For a loop that counts for itself: after each batch
        `consumed += batch_size * num_replicas`; `DataPosition` counts for a `StatefulDataLoader`.
        Raises ValueError unless 0 <= `consumed` <= the number of samples.
        """
        epoch, consumed = _whole("epoch", epoch), _whole("consumed", consumed)
        if not 0 <= consumed <= self.length:
            raise ValueError(
                f"`consumed` is {consumed} of {self.length} samples: give how many of the epoch "
                "all ranks together have had"
            )
        self.epoch, self._start = epoch, consumed
        self.last_pass: tuple[int, int] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch's order the next pass has.

        Raises ValueError if a load has put the sampler into the middle of another epoch, whose
        rest would be lost.
        """
        epoch = _whole("epoch", epoch)
        if epoch != self.epoch and 0 < self._start < self.length:
            raise ValueError(
                f"set_epoch({epoch}) after a load that left epoch {self.epoch} at sample "
                f"{self._start} of {self.length}: loop over range(sampler.epoch, epochs), or give "
                f"up the rest of that epoch with sampler.begin_at({epoch}, 0)"
            )
        self._is_told_epochs = True
        if epoch != self.epoch:
            self.epoch, self._start = epoch, 0

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's samples of what is left of the epoch."""
        # A generator: a loader may make an iterator that it never uses.
        if len(self.dataset) != self.length:  # type: ignore[arg-type]  # it is sized
            raise ValueError(
                f"the dataset had {self.length} samples when its sampler was made and has "
                f"{len(self.dataset)} now: make sampler and loader anew"  # type: ignore[arg-type]
            )
        self.last_pass = epoch, start = self.epoch, self._start
        self._start = 0
        for chunk in self._share(epoch, start).split(_CHUNK):
            yield from chunk.tolist()

    def reached(self, start: int, taken: int) -> int:
        """Return how much of an epoch is consumed if each rank took so many from `start` on."""
        return min(start + min(taken, self._rows(start)) * self.num_replicas, self.length)

    def first_samples(self, epoch: int) -> list[int]:
        """Return the first few samples of an epoch, by which its order is known."""
        if self._first[0] != epoch or not self._first[1]:
            self._first = epoch, self._order(epoch)[:_COMPARED].tolist()
        return self._first[1]

    def check_order(self, epoch: int, first: object) -> None:
        """Raise IncompatibleError unless the order of an epoch begins with these samples."""
        if first != self.first_samples(epoch):
            raise IncompatibleError(
                f"the samples of epoch {epoch} were in another order: this torch "
                f"({torch.__version__}) shuffles otherwise. Load with the torch that saved, or "
                "exclude the position and begin the epoch anew"
            )

    def _share(self, epoch: int, start: int) -> torch.Tensor:
        """Return this rank's samples of an epoch from `start` on, as many as on every rank."""
        rows, ranks = self._rows(start), self.num_replicas
        if not rows:
            return torch.empty(0, dtype=torch.int64)
        mine = torch.arange(start + self.rank, start + rows * ranks, ranks) % self.length
        order = self._order(epoch)
        self._first = epoch, order[:_COMPARED].tolist()
        return order[mine]

    def _rows(self, start: int) -> int:
        """Return how many samples each rank takes of what is left from `start` on."""
        left, ranks = self.length - start, self.num_replicas
        return left // ranks if self.drop_last else -(-left // ranks)

    def _order(self, epoch: int) -> torch.Tensor:
        """Return all samples in the order of an epoch, which is that of `DistributedSampler`."""
        if not self.shuffle:
            return torch.arange(self.length)
        generator = torch.Generator()
        generator.manual_seed(self.seed + epoch)
        return torch.randperm(self.length, generator=generator)


def _whole(name: str, value: object) -> int:
    """Return a number of the sampler's as an integer. TypeError or ValueError if it is none."""
    try:
        number = index(value)  # type: ignore[arg-type]  # that is what it says then
    except TypeError:
        raise TypeError(f"`{name}` is {value!r}: give a whole number") from None
    if abs(number) >= MAX_EPOCH:
        raise ValueError(f"`{name}` is 2**62 or more: give a smaller number")
    return number


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _world_size() -> int:
    if _has_group():
        return dist.get_world_size()
    if (launched := launched_world_size()) > 1:
        raise ValueError(
            f"WORLD_SIZE is {launched}, but there is no process group: add "
            "`torch.distributed.init_process_group()` before this line, or give `num_replicas` and "
            "`rank`"
        )
    return 1


def _rank() -> int:
    return dist.get_rank() if _has_group() else 0
