"""Copy tensors from devices into pinned host memory: nothing that changes later gets into it.

A tensor is copied in one of three ways:

- gathered: into one buffer on its device, before the next work of training, and from there to the
  host. So copies of many small tensors are a few large ones, and nothing can change them.
- held: to the host, while the streams of training wait.
- late: to the host, in parallel to training. A fingerprint that the device takes first, in the
  order of its work, is compared with the staged bytes.

Late are only tensors that optimizers change, and only where the device has no room for a buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import NamedTuple, Protocol

import torch

from dist_ckpt.core.shard_io.memory.torch_tensor import TensorReader, bytes_of, gather
from dist_ckpt.errors import CheckpointError
from dist_ckpt.message_text import listed

# Host memory is pinned in pieces of this size, as a training step waits for each piece: 256 MiB
# take 9 ms on an H200. CUDA refuses a copy into two pieces (`invalid argument`).
PIN_NBYTES = 128 << 20

# Smaller tensors are never late: their bytes are few, and each late copy is a call.
_SMALL_NBYTES = 1 << 20

# Late tensors are fingerprinted together: as many words, in rows and columns.
_ROW_WORDS = 4096
_ROWS = 2048
_PACK_NBYTES = 8 * _ROW_WORDS * _ROWS

# Each run in a buffer begins at a multiple of the largest item size.
_ITEM_NBYTES = 16


class Mark(Protocol):
    """A point in the work of the devices."""

    def wait(self) -> None:
        """Wait for it. Raises the errors of the devices."""

    def hold(self) -> None:
        """Make the current streams wait for it."""


class DeviceCopies(Protocol):
    """The streams for copies. All calls but `hold_training` begin after the work of training."""

    def room(self) -> Mapping[torch.device, int]:
        """Return how many bytes a buffer on each device may have."""

    def allocate(self, device: torch.device, nbytes: int) -> torch.Tensor:
        """Return a buffer of bytes. torch.OutOfMemoryError without enough memory."""

    def queue(self, call: Callable[[], object]) -> None:
        """Make a call of torch that queues work on these streams."""

    def hold_training(self) -> None:
        """Make the work of training that is queued from now on wait for the queued copies."""

    def mark(self) -> Mark:
        """Return the point at which all copies that are queued now are complete."""


class PlacedTensor(NamedTuple):
    """A tensor, and the position of its bytes in host memory."""

    fqn: str
    reader: TensorReader
    start: int
    nbytes: int

    @property
    def stop(self) -> int:
        """The position after its bytes."""
        return self.start + self.nbytes


class CopyPlan(NamedTuple):
    """How each tensor is copied."""

    gathered: Sequence[PlacedTensor]
    held: Sequence[PlacedTensor] = ()
    late: Sequence[PlacedTensor] = ()


def plan_copies(
    tensors: Sequence[PlacedTensor],
    room: Mapping[torch.device, int],
    find_late: Callable[[], Container[str]],
) -> CopyPlan:
    """Gather all tensors for which there is room: first those that may not be late."""
    needed: dict[torch.device, int] = {}
    for tensor in tensors:
        device = tensor.reader.device
        needed[device] = needed.get(device, 0) + tensor.nbytes + _ITEM_NBYTES
    if all(nbytes <= room.get(device, 0) for device, nbytes in needed.items()):
        return CopyPlan(tensors)
    late = find_late()
    may_be_late = [_is_large(tensor) and tensor.fqn in late for tensor in tensors]
    ways: list[str] = [""] * len(tensors)
    left = dict.fromkeys(needed, 0) | dict(room)
    for number in sorted(range(len(tensors)), key=may_be_late.__getitem__):
        device, nbytes = tensors[number].reader.device, tensors[number].nbytes + _ITEM_NBYTES
        if nbytes <= left[device]:
            left[device] -= nbytes
            ways[number] = "gathered"
        else:
            ways[number] = "late" if may_be_late[number] else "held"
    return CopyPlan(
        *(
            [tensor for tensor, each in zip(tensors, ways, strict=True) if each == way]
            for way in CopyPlan._fields
        )
    )


def _is_large(tensor: PlacedTensor) -> bool:
    return tensor.nbytes >= _SMALL_NBYTES and tensor.reader.flat() is not None


class _BufferRun(NamedTuple):
    """Bytes of a buffer, and the position of their copy in host memory."""

    memory: torch.Tensor
    start: int


class DeviceStaging:
    """The copies of one save from its devices into `memory`, which is pinned in pieces.

    The constructor queues all copies. On return only late tensors may not change, before
    `late_end`. The tensors and the buffers exist as long as this object.
    """

    def __init__(
        self,
        tensors: Sequence[PlacedTensor],
        memory: memoryview,
        copies: DeviceCopies,
        find_late: Callable[[], Container[str]],
    ) -> None:
        self._memory, self._copies = memory, copies
        self._plan = plan_copies(tensors, copies.room(), find_late)
        try:
            self._runs = self._gather(self._plan.gathered)
        except torch.OutOfMemoryError:
            self._runs, self._plan = [], plan_copies(tensors, {}, find_late)
        late = self._plan.late
        self._proof = self._take_proof(late)
        if self._proof is None:
            late = ()
        for tensor in (*self._plan.held, *(() if late else self._plan.late)):
            self._send(tensor)
        copies.hold_training()
        for tensor in late:
            self._send(tensor)
        # The point at which all late tensors are copied, or None.
        self.late_end = copies.mark() if late else None
        self._marks = [mark for run in self._runs for mark in self._send_run(run)]
        self._end = copies.mark()

    def follow(self) -> Iterator[int]:
        """Wait until all is copied. Yield the positions before which all is copied.

        CheckpointError if a late tensor has changed before it was copied.
        """
        if self._proof is not None and self.late_end is not None:
            self.late_end.wait()
            self._proof.check(self._memory)
        for stop, mark in self._marks:
            mark.wait()
            yield stop
        self._end.wait()

    def _gather(self, tensors: Sequence[PlacedTensor]) -> list[_BufferRun]:
        """Copy into a buffer on each device. Return the runs of all, in the order of the host."""
        runs = []
        for device, placed in _by_device(tensors).items():
            spans = _find_runs(placed)
            sizes = [_round_up(run[-1].stop - run[0].start) for run in spans]
            buffer = self._copies.allocate(device, sum(sizes))
            for run, memory in zip(spans, buffer.split(sizes), strict=True):
                used = memory[: run[-1].stop - run[0].start]
                self._copies.queue(partial(gather, [tensor.reader for tensor in run], used))
                runs.append(_BufferRun(used, run[0].start))
        return sorted(runs, key=attrgetter("start"))

    def _take_proof(self, late: Sequence[PlacedTensor]) -> LateProof | None:
        try:
            return LateProof(late, self._copies) if late else None
        except torch.OutOfMemoryError:
            return None

    def _send(self, tensor: PlacedTensor) -> None:
        for start, stop in _cut(tensor.start, tensor.stop):
            span = start - tensor.start, stop - tensor.start
            self._copies.queue(partial(tensor.reader.send, *span, self._memory[start:stop]))

    def _send_run(self, run: _BufferRun) -> Iterator[tuple[int, Mark]]:
        for start, stop in _cut(run.start, run.start + run.memory.numel()):
            source = run.memory[start - run.start : stop - run.start]
            target = bytes_of(self._memory[start:stop])
            self._copies.queue(partial(target.copy_, source, non_blocking=True))
            yield stop, self._copies.mark()


def _by_device(tensors: Iterable[PlacedTensor]) -> dict[torch.device, list[PlacedTensor]]:
    by_device: dict[torch.device, list[PlacedTensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.reader.device, []).append(tensor)
    return by_device


def _find_runs(tensors: Iterable[PlacedTensor]) -> list[list[PlacedTensor]]:
    """Return the tensors whose bytes follow each other in host memory, together."""
    runs: list[list[PlacedTensor]] = []
    stop = -1
    for tensor in tensors:
        if tensor.start != stop:
            runs.append([])
        runs[-1].append(tensor)
        stop = tensor.stop
    return runs


def _round_up(nbytes: int) -> int:
    return -(-nbytes // _ITEM_NBYTES) * _ITEM_NBYTES


def _cut(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Cut a range of the memory where its pinned pieces end."""
    while start < stop:
        end = min(stop, start // PIN_NBYTES * PIN_NBYTES + PIN_NBYTES)
        yield start, end
        start = end


# --- late tensors: the proof that they have not changed -----------------------------------------


class LateProof:
    """Fingerprints of late tensors, which the devices take before training continues.

    A pack is a sequence of pieces of tensors, with `_PACK_NBYTES` together. The pieces are tensors
    of bytes, on a device or in host memory.
    """

    def __init__(self, late: Sequence[PlacedTensor], copies: DeviceCopies) -> None:
        self._packs = {device: _pack(placed) for device, placed in _by_device(late).items()}
        self._taken = {
            device: torch.empty(len(packs), 2, dtype=torch.int64, pin_memory=device.type == "cuda")
            for device, packs in self._packs.items()
        }
        for device in self._packs:
            scratch = copies.allocate(device, _PACK_NBYTES)
            copies.queue(partial(self._take, device, scratch))

    def check(self, memory: memoryview) -> None:
        """Compare with the copies in host memory. CheckpointError if they differ."""
        names: dict[str, None] = {}
        for device, packs in self._packs.items():
            sources = [[bytes_of(memory[p.start : p.stop]) for p in pack] for pack in packs]
            scratch = torch.empty(_PACK_NBYTES, dtype=torch.uint8)
            differs = (fingerprint(sources, scratch) != self._taken[device]).any(1).tolist()
            for pack, is_changed in zip(packs, differs, strict=True):
                if is_changed:
                    names.update((piece.tensor.fqn, None) for piece in pack)
        if names:
            raise CheckpointError(
                f"a tensor changed while it was copied in parallel to training, one of "
                f"{listed([*names])}. Call fence() before code other than an optimizer changes "
                f"tensors, such as a replayed CUDA graph. The next save copies before it returns"
            )

    def _take(self, device: torch.device, scratch: torch.Tensor) -> None:
        sources = [[piece.source() for piece in pack] for pack in self._packs[device]]
        self._taken[device].copy_(fingerprint(sources, scratch), non_blocking=True)


class _PackPiece(NamedTuple):
    """A part of a late tensor, and its position in host memory."""

    tensor: PlacedTensor
    start: int
    stop: int

    def source(self) -> torch.Tensor:
        flat = self.tensor.reader.flat()
        assert flat is not None, "late tensors are contiguous"
        first = self.tensor.start
        return flat.view(torch.uint8)[self.start - first : self.stop - first]


def _pack(late: Iterable[PlacedTensor]) -> list[list[_PackPiece]]:
    packs: list[list[_PackPiece]] = [[]]
    room = _PACK_NBYTES
    for tensor in late:
        start = tensor.start
        while start < tensor.stop:
            if room == 0:
                packs.append([])
                room = _PACK_NBYTES
            piece = _PackPiece(tensor, start, min(tensor.stop, start + room))
            packs[-1].append(piece)
            room -= piece.stop - start
            start = piece.stop
    return packs


def fingerprint(packs: Sequence[Sequence[torch.Tensor]], scratch: torch.Tensor) -> torch.Tensor:
    """Return the wrapping sums of w and of i * w, for the 64-bit words w of each pack.

    Swapped words have another second sum. The sums are taken of rows and columns, so that a pack
    takes three calls, and no memory but `scratch`.
    """
    device, words = scratch.device, scratch.view(torch.int64).view(_ROWS, _ROW_WORDS)
    columns = torch.empty(len(packs), _ROW_WORDS, dtype=torch.int64, device=device)
    rows = torch.empty(len(packs), _ROWS, dtype=torch.int64, device=device)
    for number, pieces in enumerate(packs):
        nbytes = sum(piece.numel() for piece in pieces)
        torch.cat([*pieces], out=scratch[:nbytes])
        scratch[nbytes:].zero_()
        torch.sum(words, 0, out=columns[number])
        torch.sum(words, 1, out=rows[number])
    by_row = torch.arange(_ROWS, device=device) * _ROW_WORDS
    by_column = torch.arange(_ROW_WORDS, device=device)
    moments = (rows * by_row).sum(1) + (columns * by_column).sum(1)
    return torch.stack((rows.sum(1), moments), 1)
