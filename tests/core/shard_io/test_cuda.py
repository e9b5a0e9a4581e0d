"""What devices copy beside the training is what it was when `save` was called."""

from __future__ import annotations

import ctypes
import gc
import logging
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from mmap import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch

import dist_ckpt as dc
from dist_ckpt.async_save.snapshots.job_folder import JobFolder
from dist_ckpt.core.runtime.host_memory import address_of
from dist_ckpt.core.saving.rank_save import RankSave
from dist_ckpt.core.shard_io.memory import cuda, device_staging
from dist_ckpt.core.shard_io.memory.cuda import Fence, PinnedArenas
from dist_ckpt.core.shard_io.memory.torch_tensor import TensorReader
from fork_server import forked_python


@pytest.fixture(scope="module")
def saver() -> Iterator[dc.AsyncSaver]:
    job = f"test-{uuid.uuid4().hex}"
    with patch.object(sys, "executable", forked_python()):
        saver = dc.AsyncSaver(job=job)
    yield saver
    saver.close()
    folder = JobFolder(job)
    for one in folder.rank_folders():
        one.remove()
    folder.remove_if_empty()


class Device:
    """What stands for a device: it does what is sent to it in that order, in a thread.

    What the training's streams are not held for it does only while it `may`. As the host is the
    device here, what holds a stream holds the host. It has all tensors but those in `not_here`,
    and room for buffers of `free` bytes; `num_refused` more are out of memory all the same.
    It ends with `close`, and is not waited for longer than `DEADLINE_S`.
    """

    DEADLINE_S = 30.0

    def __init__(self) -> None:
        self.may = threading.Event()
        self.not_here: set[torch.dtype] = set()
        self.free, self.num_refused = 1 << 40, 0
        self.num_calls = 0
        self._asked: list[tuple[Callable[[], object], threading.Event | None]] = []
        self._num_done = 0
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(self.DEADLINE_S)
        assert not self._thread.is_alive()

    # --- as SideStreams, and as what it gives ------------------------------------------------

    @contextmanager
    def copies(self, _: object) -> Iterator[Device]:
        yield self

    def can_copy(self, source: Any) -> bool:
        return source._tensor.dtype not in self.not_here

    def room(self) -> dict[torch.device, int]:
        return {torch.device("cpu"): self.free}

    def allocate(self, device: torch.device, nbytes: int) -> torch.Tensor:
        if self.num_refused:
            self.num_refused -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.full((nbytes,), 255, dtype=torch.uint8, device=device)

    def queue(self, call: partial[object]) -> None:
        self.num_calls += 1
        source = getattr(call.func, "__self__", None)
        if isinstance(source, TensorReader) and (address := source.address()) is not None:
            # Like a device, keep nothing but where it lies.
            start, stop, memory = call.args
            self._ask(partial(ctypes.memmove, address_of(memory), address + start, stop - start))
            return
        self._ask(call)

    def hold_training(self) -> None:
        with self._changed:
            self._asked = [(act, None) for act, _ in self._asked]
            self._changed.notify_all()
        self.mark().wait()

    def mark(self) -> Any:
        with self._changed:
            number = len(self._asked)
        return SimpleNamespace(
            wait=lambda: self._wait_for(number), hold=lambda: self._wait_for(number)
        )

    def _ask(self, act: Callable[[], object]) -> None:
        with self._changed:
            self._asked.append((act, self.may))
            self._changed.notify_all()

    def _wait_for(self, number: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._num_done >= number, self.DEADLINE_S)

    def _is_next(self) -> bool:
        if self._is_closed or len(self._asked) == self._num_done:
            return self._is_closed
        may = self._asked[self._num_done][1]
        return may is None or may.is_set()

    def _work(self) -> None:
        while True:
            with self._changed:
                # Whoever sets `may` notifies nobody.
                while not self._changed.wait_for(self._is_next, 0.01):
                    pass
                if self._is_closed:
                    return
                act = self._asked[self._num_done][0]
            act()
            del act
            with self._changed:
                self._asked[self._num_done] = (int, None)
                self._num_done += 1
                self._changed.notify_all()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, saver: dc.AsyncSaver) -> Iterator[Device]:
    """Have states copied beside the training, as on CUDA devices."""
    device = Device()
    # So that small tensors are late, in several packs.
    monkeypatch.setattr(device_staging, "_SMALL_NBYTES", 1 << 10)
    monkeypatch.setattr(device_staging, "_ROWS", 16)
    monkeypatch.setattr(device_staging, "_ROW_WORDS", 100)
    monkeypatch.setattr(device_staging, "_PACK_NBYTES", 8 * 16 * 100)
    monkeypatch.setattr(RankSave, "cuda_devices", (torch.device("cpu"),))
    assert saver._job is not None
    saver._job.copies_first = False
    monkeypatch.setattr(saver._job, "streams", device)
    monkeypatch.setattr(saver._job.pinned, "pin", lambda *_: None)
    yield device
    device.may.set()
    saver._job.fence.wait_until_staged()
    device.close()


class Model(torch.nn.Module):
    """One with a buffer, which a forward changes, and with a parameter that is not trained."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(300, 200))
        self.weight.grad = -torch.ones_like(self.weight)
        self.frozen = torch.nn.Parameter(torch.ones(50), requires_grad=False)
        self.register_buffer("seen", torch.ones(70))


def loaded(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = {}
    dc.load(state, path)
    return state


def test_an_optimizer_waits_before_a_step_for_what_is_copied_whether_it_is_saved_or_not(
    device: Device, saver: dc.AsyncSaver, tmp_path: Path
) -> None:
    device.free, model = 0, Model()
    saved, other = (torch.optim.SGD([model.weight], lr=1.0) for _ in range(2))
    for step in range(4):
        device.may.clear()
        handle = saver.save({"model": model, "optim": saved}, tmp_path / str(step), step=step)
        with pytest.raises(TimeoutError):
            handle.wait_staged(0)
        threading.Timer(0.02, device.may.set).start()
        (saved if step % 2 else other).step()
        assert model.weight.unique().tolist() == [step + 1]
        handle.result(30)
        assert loaded(tmp_path / str(step))["model"]["weight"].unique().tolist() == [step]


@pytest.mark.parametrize("free", [0, 1 << 40])
def test_what_others_than_optimizers_may_change_is_copied_before_anything_else_is_done(
    device: Device, saver: dc.AsyncSaver, tmp_path: Path, free: int
) -> None:
    device.free = free
    model, loose = Model(), torch.ones(2_000)
    group = {"params": [model.weight, model.frozen], "lr": torch.tensor(1.0)}
    optimizer = torch.optim.SGD([group], momentum=0.9)
    optimizer.step()
    state = {"model": model, "optim": optimizer, "loose": loose}
    handle = saver.save(state, tmp_path / "a")
    for tensor in (model.seen, model.frozen, optimizer.param_groups[0]["lr"], loose):
        tensor.fill_(5)
    with pytest.raises(TimeoutError):  # the weight and its momentum are not
        handle.wait_staged(0)
    device.may.set()
    handle.result(30)
    found = loaded(tmp_path / "a")
    assert found["loose"].unique().tolist() == [1]
    assert found["model"]["seen"].unique().tolist() == [1]
    assert found["model"]["frozen"].unique().tolist() == [1]
    assert found["model"]["weight"].unique().tolist() == [1]
    assert found["optim"]["param_groups"][0]["lr"] == 1
    assert found["optim"]["state"]["model.weight"]["momentum_buffer"].unique().tolist() == [-1]


@pytest.mark.parametrize("free", [0, 1 << 40])
def test_an_average_of_the_weights_that_requires_gradients_as_well_is_copied_before(
    device: Device, saver: dc.AsyncSaver, tmp_path: Path, free: int
) -> None:
    device.free = free
    model = Model()
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    average.update_parameters(model)
    assert isinstance(average.module, Model)
    assert average.module.weight.requires_grad
    optimizer = torch.optim.SGD([model.weight], lr=1.0)
    optimizer.step()
    state = {"model": model, "average": average, "optim": optimizer}
    handle = saver.save(state, tmp_path / "a")
    average.update_parameters(model)
    with pytest.raises(TimeoutError):  # what the optimizer steps is not
        handle.wait_staged(0)
    assert average.module.weight.unique().tolist() == [0.5]
    device.may.set()
    handle.result(30)
    found = loaded(tmp_path / "a")
    assert found["average"]["module.weight"].unique().tolist() == [0]
    assert found["average"]["n_averaged"] == 1
    assert found["model"]["weight"].unique().tolist() == [1]


def set_data(weight: torch.nn.Parameter) -> None:
    weight.data = torch.full_like(weight, 5.0)


CHANGES: dict[str, Callable[[torch.nn.Parameter], object]] = {
    "in place": lambda weight: weight.detach().fill_(5),
    "no version": lambda weight: weight.data.fill_(5),
    "the bytes": lambda weight: ctypes.memset(weight.data_ptr(), 7, weight.nbytes),
    "other memory": set_data,
    "set_": lambda weight: weight.data.set_(torch.ones(9).untyped_storage()),
    "smaller": lambda weight: weight.data.resize_(3).fill_(5),
}


@pytest.mark.parametrize("change", CHANGES)
def test_where_there_is_room_nothing_that_changes_after_a_save_gets_into_it(
    device: Device, saver: dc.AsyncSaver, tmp_path: Path, change: str
) -> None:
    model = Model()
    optimizer = torch.optim.SGD([model.weight], lr=1.0, momentum=0.9)
    optimizer.step()
    state = {"model": model, "optim": optimizer}
    handle = saver.save(state, tmp_path / "a")
    CHANGES[change](model.weight)
    optimizer.state[model.weight]["momentum_buffer"].fill_(5)
    with pytest.raises(TimeoutError):
        handle.wait_staged(0)
    device.may.set()
    handle.result(30)
    found = loaded(tmp_path / "a")
    assert found["model"]["weight"].unique().tolist() == [1]
    assert found["optim"]["state"]["model.weight"]["momentum_buffer"].unique().tolist() == [-1]


@pytest.mark.parametrize("free", [0, 300_000])
@pytest.mark.parametrize("change", ["no version", "the bytes"])
def test_a_late_tensor_that_changes_fails_the_save_and_the_next_one_copies_first(
    device: Device, saver: dc.AsyncSaver, tmp_path: Path, change: str, free: int
) -> None:
    device.free = free
    model, name = Model(), "optim.state.model.weight.momentum_buffer" if free else "model.weight"
    optimizer = torch.optim.SGD([model.weight], lr=1.0, momentum=0.9)
    optimizer.step()
    state = {"model": model, "optim": optimizer}
    late = optimizer.state[model.weight]["momentum_buffer"] if free else model.weight
    handle = saver.save(state, tmp_path / "a")
    CHANGES[change](cast(torch.nn.Parameter, late))
    device.may.set()
    with pytest.raises(dc.CheckpointError, match=r"changed while it was copied.*fence\(\)") as e:
        handle.result(30)
    assert name in str(e.value)
    assert not (tmp_path / "a" / "index.json").exists()
    device.may.clear()
    late.data.fill_(3)
    handle = saver.save(state, tmp_path / "b")
    late.data.fill_(4)
    device.may.set()
    handle.result(30)
    found = loaded(tmp_path / "b")
    moved = found["optim"]["state"]["model.weight"]["momentum_buffer"]
    assert (moved if free else found["model"]["weight"]).unique().tolist() == [3]


@pytest.mark.parametrize("num_refused", [1, 2])
def test_without_the_memory_that_a_device_seemed_to_have_a_save_copies_to_the_host_first(
    device: Device, saver: dc.AsyncSaver, tmp_path: Path, num_refused: int
) -> None:
    device.num_refused, model = num_refused, Model()
    optimizer = torch.optim.SGD([model.weight], lr=1.0)
    handle = saver.save({"model": model, "optim": optimizer}, tmp_path / "a")
    if num_refused == 2:  # none for the fingerprint either
        model.weight.data.fill_(5)
    device.may.set()
    handle.result(30)
    assert loaded(tmp_path / "a")["model"]["weight"].unique().tolist() == [0]


def test_what_a_graph_may_replay_is_never_late(
    device: Device, saver: dc.AsyncSaver, tmp_path: Path
) -> None:
    device.free, model = 0, Model()
    optimizer = torch.optim.Adam([model.weight], lr=1.0)
    optimizer.step()
    optimizer.param_groups[0]["capturable"] = True
    before = model.weight.detach().clone()
    handle = saver.save({"model": model, "optim": optimizer}, tmp_path / "a")
    model.weight.data.fill_(5)
    device.may.set()
    handle.result(30)
    assert torch.equal(loaded(tmp_path / "a")["model"]["weight"], before)


def test_thousands_of_tensors_take_few_calls(
    device: Device, saver: dc.AsyncSaver, tmp_path: Path
) -> None:
    device.may.set()
    state = {f"{number}": torch.full((7,), float(number)) for number in range(2000)}
    state |= {f"b{number}": torch.ones(5).bfloat16() for number in range(2000)}
    saver.save(state, tmp_path / "a").result(30)
    assert device.num_calls < 5
    found = loaded(tmp_path / "a")
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_without_its_optimizer_a_model_is_copied_before_anything_else_is_done(
    device: Device, saver: dc.AsyncSaver, tmp_path: Path
) -> None:
    device.free, model = 0, Model()
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))])
    handle = saver.save({"model": model, "optim": dc.Named(other, ["w"])}, tmp_path / "a")
    model.weight.data.fill_(5)
    handle.result(30)
    assert loaded(tmp_path / "a")["model"]["weight"].unique().tolist() == [0]


def test_while_a_graph_is_captured_no_save_begins(
    device: Device, saver: dc.AsyncSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert saver._job is not None
    writer, state = saver._job.writer, {"w": torch.ones(3)}
    before = {save.snapshot for save in writer.saves}
    device.may.set()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(ValueError, match="a CUDA graph is being captured: save after"):
            saver.save(state, tmp_path / "a")
    assert before >= {save.snapshot for save in writer.saves}
    saver.save(state, tmp_path / "a").result(30)


def test_what_the_host_has_is_copied_between_what_a_device_has(
    device: Device, saver: dc.AsyncSaver, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    device.may.set()
    device.not_here = {torch.float64, torch.int16}
    dtypes = (torch.float32, torch.float64, torch.bool, torch.int16, torch.bfloat16)
    state = {
        f"{number}": (torch.randn(1 + number * 37 % 5000) * 9).to(dtypes[number % 5])
        for number in range(200)
    }
    state |= {"large": torch.randn(3_000_000), "rows": torch.randn(900, 700).t()}
    state["here"] = torch.randn(2_000_000, dtype=torch.float64)
    expected = {name: tensor.clone() for name, tensor in state.items()}
    saver.save(state, tmp_path / "a").result(30)
    found = loaded(tmp_path / "a")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_the_fence_and_the_next_save_wait_for_what_is_copied(
    device: Device, saver: dc.AsyncSaver, tmp_path: Path
) -> None:
    device.free = 0
    model = torch.nn.Linear(200, 300, bias=False)  # nothing in it holds the training
    model.weight.data.fill_(0)
    state = {"model": model, "optim": torch.optim.SGD(model.parameters())}
    handles = []
    for step in range(4):
        device.may.clear()
        handles.append(saver.save(state, tmp_path / str(step), step=step))
        threading.Timer(0.2, device.may.set).start()
        if step % 2:
            saver.fence()
            model.weight.data.fill_(step + 1)
        else:
            again = saver.save(state, tmp_path / f"{step} again", step=step)
            handles[-1].wait_staged(0)
            again.wait_staged(30)  # the next round has the device do nothing until its save began
    for step, value in enumerate((0, 0, 2, 2)):
        handles[step].result(30)
        assert loaded(tmp_path / str(step))["model"]["weight"].unique().tolist() == [value]


def test_a_copy_that_fails_on_the_device_fails_the_save(
    device: Device, saver: dc.AsyncSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    device.may.set()
    mark, model = device.mark, Model()
    monkeypatch.setattr(device, "mark", lambda: SimpleNamespace(wait=fail, hold=mark().hold))
    monkeypatch.setattr(device, "hold_training", lambda: None)
    handle = saver.save({"model": model}, tmp_path / "a")
    handle.wait_staged(30)
    with pytest.raises(dc.CheckpointError, match="RuntimeError: an illegal memory access"):
        handle.result(30)
    monkeypatch.setattr(device, "mark", mark)
    saver.save({"model": model}, tmp_path / "a").result(30)


def test_what_is_copied_is_kept_until_then_and_no_longer(
    device: Device, saver: dc.AsyncSaver, tmp_path: Path
) -> None:
    class Memory(bytearray):
        """Bytes that one can watch."""

    memory = Memory(b"\1" * 10_000)
    device.free = 0
    kept, model = weakref.ref(memory), Model()
    model.weight = torch.nn.Parameter(torch.frombuffer(memory, dtype=torch.float32))
    optimizer = torch.optim.SGD([model.weight])
    handle = saver.save({"model": model, "optim": optimizer}, tmp_path / "a")
    del memory, model, optimizer
    gc.collect()
    assert kept() is not None
    device.may.set()
    handle.result(30)
    saver.save({"w": torch.ones(3)}, tmp_path / "b").result(30)
    gc.collect()
    assert kept() is None
    assert bytes(loaded(tmp_path / "a")["model"]["weight"].view(torch.uint8)) == b"\1" * 10_000


def test_the_state_of_an_object_is_asked_for_once(
    device: Device, saver: dc.AsyncSaver, tmp_path: Path
) -> None:
    asked = []

    class Counter:
        def state_dict(self) -> dict[str, Any]:
            asked.append(1)
            return {"count": len(asked)}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    device.may.set()
    saver.save({"w": torch.ones(3), "data": Counter()}, tmp_path / "a").result(30)
    assert asked == [1]


def test_optimizers_are_let_go_of_when_the_saver_is_closed() -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([weight])
    held: list[int] = []
    may = threading.Event()
    fence = Fence()
    fence.run(
        cast(Any, SimpleNamespace(hold=lambda: held.append(1))), cast(Any, lambda: may.wait(30))
    )
    optimizer.step()
    assert held == [1]
    may.set()
    fence.close()
    fence._end = cast(Any, SimpleNamespace(hold=lambda: held.append(2)))
    optimizer.step()
    assert held == [1]


def test_a_fence_whose_thread_cannot_be_started_holds_and_waits_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fence, end = Fence(), SimpleNamespace(hold=lambda: None)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            fence.run(cast(Any, end), lambda: None)
    fence.wait()
    fence.run(cast(Any, end), lambda: None)
    fence.close()


# --- pinned memory ----------------------------------------------------------------------------


class Runtime:
    """What stands for torch.cuda.cudart(): it keeps an error for the thread that met it."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.limit = 1 << 40
        self.errors = threading.local()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        assert flags == 1
        overlaps = any(
            start < address + nbytes and address < start + size
            for start, size in self.registered.items()
        )
        code = 712 if overlaps else 2 if nbytes > self.limit else 0
        if code:
            self.errors.last = code
        else:
            self.registered[address] = nbytes
        return code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        if address not in self.registered:
            self.errors.last = 713
            return 713
        del self.registered[address]
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    @contextmanager
    def on(_: torch.device) -> Iterator[None]:
        yield

    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", on)
    return runtime


CUDA = torch.device("cuda", 0)


def test_an_arena_is_pinned_once_and_anew_where_it_has_grown(runtime: Runtime) -> None:
    arenas = PinnedArenas()
    first, second = (memoryview(mmap(-1, nbytes)) for nbytes in (1 << 16, 1 << 17))
    for _ in range(3):
        arenas.pin(0, first, CUDA)
    assert [*runtime.registered.values()] == [1 << 16]
    arenas.release(0, 1 << 16)
    assert runtime.registered
    arenas.release(0, 1 << 17)
    assert not runtime.registered
    arenas.pin(0, first, CUDA)
    arenas.pin(0, second, CUDA)
    arenas.pin(1, first, CUDA)
    assert sorted(runtime.registered.values()) == [1 << 16, 1 << 17]
    arenas.close()
    arenas.close()
    assert not runtime.registered


def test_what_cannot_be_pinned_is_said_once_and_leaves_no_error_in_this_thread(
    runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    runtime.limit = 1 << 10
    arenas = PinnedArenas()
    views = [memoryview(mmap(-1, 1 << 16)) for _ in range(3)]
    with caplog.at_level(logging.WARNING, "dist_ckpt"):
        for number, view in enumerate(views):
            arenas.pin(number % 2, view, CUDA)
    assert len(caplog.records) == 1
    assert "65536 bytes of shared memory cannot be pinned (CUDA error 2)" in caplog.text
    arenas.close()
    assert not hasattr(runtime.errors, "last")


def test_a_stop_of_the_process_does_not_end_the_wait_for_staging(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after `scontrol suspend` for two hours: the devices finish a moment later."""
    now, stopped_s, is_waiting = time.monotonic, [0.0], threading.Event()
    monkeypatch.setattr(time, "monotonic", lambda: now() + stopped_s[0])
    monkeypatch.setattr(cuda, "POLL_S", 0.001)

    def follow() -> None:
        assert is_waiting.wait(Device.DEADLINE_S)
        stopped_s[0] = 7200.0
        threading.Event().wait(0.1)

    real = threading.Thread.join

    def join(thread: threading.Thread, timeout_s: float | None = None) -> None:
        is_waiting.set()
        real(thread, timeout_s)

    monkeypatch.setattr(threading.Thread, "join", join)
    fence, end = Fence(), cast(Any, SimpleNamespace(hold=lambda: None))
    fence.run(end, follow)
    fence.close()


def test_memory_of_a_device_that_hangs_is_not_waited_for_without_end(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    may = threading.Event()
    arenas = PinnedArenas()
    arenas.pin(0, memoryview(mmap(-1, 1 << 16)), CUDA)
    monkeypatch.setattr(cuda, "COPY_TIMEOUT_S", 0.05)
    monkeypatch.setattr(runtime, "cudaHostUnregister", lambda _: may.wait(30))
    arenas.close()
    monkeypatch.setattr(runtime, "cudaHostRegister", lambda *_: may.wait(30))
    with pytest.raises(dc.CheckpointError, match=r"cuda:0 has not answered for 0\.05 s"):
        arenas.pin(0, memoryview(mmap(-1, 1 << 16)), CUDA)
    may.set()


def test_memory_is_pinned_in_pieces_and_not_at_all_if_one_is_refused(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "PIN_NBYTES", 1 << 16)
    view = memoryview(mmap(-1, 150_000))
    pinned = cuda.PinnedMemory(view, CUDA)
    assert [*runtime.registered.values()] == [1 << 16, 1 << 16, 150_000 - (1 << 17)]
    pinned.close()
    assert not runtime.registered
    register = runtime.cudaHostRegister
    monkeypatch.setattr(
        runtime, "cudaHostRegister", lambda *all_: 2 if runtime.registered else register(*all_)
    )
    assert cuda.PinnedMemory(view, CUDA).error == 2
    assert not runtime.registered


@pytest.mark.parametrize(
    ("free", "reserved", "peak", "cached", "room"),
    [(50, 20, 20, 0, 45), (50, 20, 40, 0, 25), (10, 20, 40, 0, 0), (10, 90, 90, 30, 30)],
)
def test_a_buffer_leaves_to_training_what_it_has_needed_and_a_margin(
    free: int, reserved: int, peak: int, cached: int, room: int
) -> None:
    sizes = {"free": free, "total": 100, "reserved": reserved, "peak": peak, "cached": cached}
    assert cuda.compute_room(**sizes) == room


# --- the devices of a load --------------------------------------------------------------------


def test_devices_of_a_load_are_waited_for_and_their_memory_is_unpinned(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def current_stream(device: torch.device) -> SimpleNamespace:
        event = SimpleNamespace(synchronize=lambda: done.append(f"event of {device}"))
        return SimpleNamespace(record_event=lambda _: event)

    monkeypatch.setattr(cuda, "Event", lambda *, blocking: blocking)
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("device"))
    devices = cuda.CurrentStreams(frozenset((CUDA, torch.device("cuda", 1))))
    pinned = devices.pin(memoryview(mmap(-1, 1 << 16)))
    assert (pinned.error, [*runtime.registered.values()]) == (0, [1 << 16])
    devices.queue(partial(done.append, "call"))
    assert done == ["call"]
    devices.mark().wait()
    assert sorted(done[1:]) == ["event of cuda:0", "event of cuda:1"]
    assert devices.synchronize()
    assert done[3:] == ["device", "device"]
    pinned.close()
    assert not runtime.registered


def test_devices_of_a_load_that_are_lost_or_hang_do_not_answer(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    del runtime
    devices, may = cuda.CurrentStreams(frozenset((CUDA,))), threading.Event()

    def fail() -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    assert not devices.synchronize()
    monkeypatch.setattr(cuda, "COPY_TIMEOUT_S", 0.05)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: may.wait(30))
    assert not devices.synchronize()
    may.set()
