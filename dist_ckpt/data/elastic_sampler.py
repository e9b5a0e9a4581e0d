"""A sampler whose position is one number, with the same meaning on any number of ranks."""

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

# The number of samples that identify an order, as another version of torch may shuffle differently.
_COMPARED = 8
# Indices become Python integers in chunks: a rank may have hundreds of millions.
_CHUNK = 4096
# The sum of seed and epoch must fit torch's generators.
MAX_EPOCH = 1 << 62


class ElasticSampler(_Base):
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
        num_replicas = _world_size() if num_replicas is None else num_replicas
        rank = _rank() if rank is None else rank
        if not isinstance(dataset, Sized):
            raise TypeError(f"`dataset` is a {type(dataset).__name__}: give one with a length")
        num_replicas, rank = _whole("num_replicas", num_replicas), _whole("rank", rank)
        seed = _whole("seed", seed)
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)  # type: ignore[arg-type]
        self.length = len(dataset)
        self.begin_at(0, 0)
        self._has_set_epoch = False
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
        epoch, consumed = _whole("epoch", epoch), _whole("consumed", consumed)
        if not 0 <= consumed <= self.length:
            raise ValueError(
                f"`consumed` is {consumed} of {self.length} samples: give the number of samples of "
                "the epoch that all ranks together have received"
            )
        self.epoch, self._start = epoch, consumed
        self.last_pass: tuple[int, int] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass.

        ValueError in the middle of another epoch after a load: the rest of it would be lost.
        """
        epoch = _whole("epoch", epoch)
        if epoch != self.epoch and 0 < self._start < self.length:
            raise ValueError(
                f"set_epoch({epoch}) after a load that left epoch {self.epoch} at sample "
                f"{self._start} of {self.length}. Loop over range(sampler.epoch, epochs), or skip "
                f"the rest of that epoch with sampler.begin_at({epoch}, 0)"
            )
        self._has_set_epoch = True
        if epoch != self.epoch:
            self.epoch, self._start = epoch, 0

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's remaining samples of the epoch."""
        # A generator: a loader may make an iterator that it never uses.
        if len(self.dataset) != self.length:  # type: ignore[arg-type]  # it is sized
            raise ValueError(
                f"the dataset had {self.length} samples when its sampler was made and has "
                f"{len(self.dataset)} now: make a new sampler and loader"  # type: ignore[arg-type]
            )
        self.last_pass = epoch, start = self.epoch, self._start
        self._start = 0
        for chunk in self._share(epoch, start).split(_CHUNK):
            yield from chunk.tolist()

    def reached(self, start: int, taken: int) -> int:
        """Return the consumed samples of an epoch if each rank took `taken` from `start` on."""
        return min(start + min(taken, self._rows(start)) * self.num_replicas, self.length)

    def first_samples(self, epoch: int) -> list[int]:
        """Return the first few samples of an epoch, which identify its order."""
        if self._first[0] != epoch or not self._first[1]:
            self._first = epoch, self._order(epoch)[:_COMPARED].tolist()
        return self._first[1]

    def check_order(self, epoch: int, first: object) -> None:
        """Raise IncompatibleError unless the order of an epoch begins with these samples."""
        if first != self.first_samples(epoch):
            raise IncompatibleError(
                f"the samples of epoch {epoch} were in another order: this torch "
                f"({torch.__version__}) shuffles differently. Load with the torch that saved, or "
                "exclude the position and restart the epoch"
            )

    def _share(self, epoch: int, start: int) -> torch.Tensor:
        """Return this rank's samples of an epoch from `start` on. All ranks have equally many."""
        rows, ranks = self._rows(start), self.num_replicas
        if not rows:
            return torch.empty(0, dtype=torch.int64)
        positions = torch.arange(start + self.rank, start + rows * ranks, ranks) % self.length
        order = self._order(epoch)
        self._first = epoch, order[:_COMPARED].tolist()
        return order[positions]

    def _rows(self, start: int) -> int:
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


def _whole(name: str, value: object) -> int:
    """Return a number as an integer. TypeError or ValueError if it is not one."""
    try:
        number = index(value)  # type: ignore[arg-type]  # it raises TypeError
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
            f"WORLD_SIZE is {launched}, but the process group does not exist: add "
            "`torch.distributed.init_process_group()` before this line, or give `num_replicas` and "
            "`rank`"
        )
    return 1


def _rank() -> int:
    return dist.get_rank() if _has_group() else 0
