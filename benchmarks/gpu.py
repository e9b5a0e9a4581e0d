"""Saves from a CUDA device and loads back to it, beside raw copies between it and pinned memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from packaging.version import Version
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save

from benchmarks import limits
from benchmarks.background import Trainers
from benchmarks.checkpoints import large_tensors
from benchmarks.contenders import DistCkpt
from benchmarks.rank import StorageLocation
from benchmarks.savers import Kind, Ours, Pending
from benchmarks.scenario import OURS, Absent, Figure, Measure, Row, Scenario, Settings
from benchmarks.trainer import Stall, Trainer
from benchmarks.workload import Spec, Workload, make

PINNED, PAGEABLE = "pinned copy", "pageable copy"
ALONE = "no save"
RESTORE, WARM_LOAD = f"{OURS} restore", f"{OURS} load"

# Of bfloat16, a side; one product takes about 0.2 ms on a fast device.
SIDE, NUM_PRODUCTS = 4096, 400

# That of earlier versions forgets how to copy once it has staged: KeyError: <class 'type'>.
STAGES_AGAIN = Version(torch.__version__) >= Version("2.13")

TITLES = {
    "stage": "a device's memory into host memory, for a save in the background",
    "beside": f"{NUM_PRODUCTS} products on the device, begun right after a save",
    "load": "host memory into a device's memory",
}


def scenarios() -> list[Scenario]:
    """Return the one scenario."""
    what = "from and to a CUDA device: GB/s of staging, stall, what computing loses, loads"
    return [Scenario("gpu", what, _gpu)]


def _gpu(settings: Settings) -> Iterator[Measure]:
    kinds: tuple[Kind, ...] = (Ours(), *((DcpPinned(),) if settings.takes("DCP") else ()))
    measures: Mapping[str, Callable[..., Measure]] = {
        "stage": _stage,
        "beside": _beside,
        "load": _load,
    }
    for name, measure in measures.items():
        if not settings.measures(name):
            continue
        if not torch.cuda.is_available():
            yield Measure("gpu", name, TITLES[name], (Absent(PINNED, "no CUDA device here"),))
            continue
        with Trainers(settings) as trainers:
            yield measure(settings, trainers, {kind.name: kind for kind in kinds})


# --- what is measured -------------------------------------------------------------------------


def _stage(settings: Settings, trainers: Trainers, kinds: Mapping[str, Kind]) -> Measure:
    spec = large_tensors(settings.nbytes)
    raw = (PINNED, PAGEABLE)
    for name in (*raw, *kinds):
        trainers.add(name, kinds.get(name), DeviceTrainer)
    first: dict[str, Stall] = {}

    def take(name: str, number: int) -> Stall:
        if name in raw:
            if number == 0:
                trainers.call(name, "hold", spec)
            seconds: float = trainers.call(name, "copy", name == PINNED, False)  # noqa: FBT003
            return Stall(seconds, seconds, seconds)
        if number == 0:
            trainers.start(name, spec)
            first[name] = trainers.call(name, "save", trainers.folder())
            trainers.check(name, spec)
        stall: Stall = trainers.call(name, "save", trainers.folder())
        return stall

    taken = trainers.take_turns(take)

    def row(name: str) -> Row:
        seconds = tuple(stall.staged_s for stall in taken[name])
        if name in raw:
            return Figure(name, seconds)
        facts = {
            "call ms": median(stall.called_s for stall in taken[name]) * 1e3,
            "first ms": first[name].staged_s * 1e3,
            "first call ms": first[name].called_s * 1e3,
            "durable ms": median(stall.ended_s for stall in taken[name]) * 1e3,
        }
        return Figure(name, seconds, facts, kinds[name].note)

    return Measure(
        scenario="gpu",
        name="stage",
        title=f"{TITLES['stage']}: {spec.count} large tensors",
        rows=trainers.rows([*raw, *kinds], row),
        nbytes=_nbytes_of(spec),
        limits=(PINNED,),
        note="seconds: until all is copied. 'call ms': until save returns, which is all that the "
        "host waits for; the optimizer's step waits for the rest on the device. 'first': of a "
        "process, whose memory is made and pinned then.",
    )


def _beside(settings: Settings, trainers: Trainers, kinds: Mapping[str, Kind]) -> Measure:
    spec = large_tensors(settings.nbytes)
    for name in (ALONE, *kinds):
        trainers.add(name, kinds.get(name), DeviceTrainer)

    def take(name: str, number: int) -> float:
        if number == 0:
            trainers.call(name, "hold", spec)
            if name != ALONE:
                trainers.start(name, spec)
                trainers.call(name, "save", trainers.folder())
        seconds: float = trainers.call(
            name, "compute", trainers.folder() if name in kinds else None
        )
        return seconds

    taken = trainers.take_turns(take)
    return Measure(
        scenario="gpu",
        name="beside",
        title=TITLES["beside"],
        rows=trainers.rows([ALONE, *kinds], lambda name: Figure(name, tuple(taken[name]))),
        limits=(ALONE,),
        note="seconds: on the device's clock, from before the save until the last product is done.",
    )


def _load(settings: Settings, trainers: Trainers, kinds: Mapping[str, Kind]) -> Measure:
    spec = large_tensors(settings.nbytes)
    names = (PINNED, RESTORE, WARM_LOAD)
    for name in names:
        trainers.add(name, kinds[OURS] if name == RESTORE else None, DeviceTrainer)

    def take(name: str, number: int) -> float:
        if number == 0:
            if name == RESTORE:
                trainers.start(name, spec)
            else:
                trainers.call(name, "hold", spec)
        if name == PINNED:
            seconds: float = trainers.call(name, "copy", True, True)  # noqa: FBT003
        elif name == RESTORE:
            # Each round: what is restored is a checkpoint that is there.
            trainers.call(name, "save", trainers.folder())
            seconds = trainers.call(name, "restore", spec)
        else:
            seconds = trainers.call(name, "load_warm", spec, trainers.folder())
        return seconds

    taken = trainers.take_turns(take)
    notes = {RESTORE: "from the arenas, verifies checksums", WARM_LOAD: "from the page cache"}
    return Measure(
        scenario="gpu",
        name="load",
        title=f"{TITLES['load']}: {spec.count} large tensors",
        rows=trainers.rows(
            names, lambda name: Figure(name, tuple(taken[name]), note=notes.get(name, ""))
        ),
        nbytes=_nbytes_of(spec),
        limits=(PINNED,),
    )


def _nbytes_of(spec: Spec) -> int:
    return spec.count * spec.shape[0] * spec.shape[1] * 4


# --- the training process ---------------------------------------------------------------------


class Layers(nn.Module):
    """A model that only holds parameters."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.layers = nn.ParameterList(tensors.values())


class DeviceTrainer(Trainer):
    """The operations of a trainer whose state is on the device."""

    def __init__(self, place: StorageLocation, kinds: tuple[Kind, ...]) -> None:
        super().__init__(place, kinds)
        self._hosts: dict[bool, list[Tensor]] = {}

    def make(self, spec: Spec, *, seed: int = 0) -> Workload:
        model = Layers(make(spec, seed=seed).tensors).cuda()
        return Workload({}, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))

    def save(self, folder: Path) -> Stall:
        torch.cuda.synchronize()
        return super().save(folder)

    def copy(self, is_pinned: bool, is_load: bool) -> float:  # noqa: FBT001
        """Copy the state to host memory that was touched before, or back; return the seconds."""
        mine = [tensor for _, tensor in self._workload.local_tensors()]
        if is_pinned not in self._hosts:
            self._hosts[is_pinned] = [
                torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=is_pinned)
                for tensor in mine
            ]
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for tensor, host in zip(mine, self._hosts[is_pinned], strict=True):
            target, source = (tensor, host) if is_load else (host, tensor)
            target.copy_(source, non_blocking=True)
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def compute(self, folder: Path | None) -> float:
        """Multiply, and save before; return the seconds on the device, without the save's end."""
        left, right = torch.randn(2, SIDE, SIDE, device="cuda", dtype=torch.bfloat16)
        product = left @ right
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        pending: Pending | None = None
        if folder is not None:
            assert self._saver is not None
            pending = self._saver.save(self._workload, folder)
        for _ in range(NUM_PRODUCTS):
            torch.matmul(left, right, out=product)
        end.record()
        torch.cuda.synchronize()
        if pending is not None:
            pending.result(self._timeout_s)
        return float(start.elapsed_time(end)) / 1e3

    def load_warm(self, spec: Spec, folder: Path) -> float:
        """Save in the foreground, and load it; return the seconds of the latter."""
        DistCkpt().save(self._workload, folder)
        limits.warm(folder)
        # On return it is on the device.
        return self._brought_back(lambda: DistCkpt().load(self._workload, folder), spec)


# --- DCP --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DcpPinned:
    """torch.distributed.checkpoint.async_save with all that its stager offers for CUDA."""

    name: str = "DCP thread, pinned"
    note: str = "DefaultStager(pinned, asynchronous)"

    def reason_against(self) -> str | None:
        return None

    def start(self, job: str) -> DcpPinnedSaver:
        return DcpPinnedSaver()

    def load(self, workload: Workload, folder: Path) -> None:
        load(_state_of(workload), storage_reader=FileSystemReader(folder), no_dist=True)


class DcpPinnedSaver:
    """It keeps its stager, and so its memory, where a stager can stage more than once."""

    def __init__(self) -> None:
        self._stager: DefaultStager | None = None

    def save(self, workload: Workload, folder: Path) -> Pending:
        if self._stager is None or not STAGES_AGAIN:
            self.close()
            self._stager = DefaultStager(StagingOptions(use_shared_memory=False))
        response = async_save(
            _state_of(workload), storage_writer=FileSystemWriter(folder), async_stager=self._stager
        )
        assert isinstance(response, AsyncSaveResponse)
        return _Response(response)

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()


def _state_of(workload: Workload) -> dict[str, object]:
    assert workload.model is not None
    return {"model": workload.model.state_dict()}


class _Response:
    """A save by DCP that stages in a thread."""

    def __init__(self, response: AsyncSaveResponse) -> None:
        self._response = response

    def wait_staged(self, timeout_s: float) -> None:
        self._response.staging_completion.result(timeout_s)

    def done(self) -> bool:
        return self._response.upload_completion.done()

    def result(self, timeout_s: float) -> object:
        return self._response.upload_completion.result(timeout_s)
