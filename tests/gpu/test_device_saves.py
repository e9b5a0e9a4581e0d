"""Background saves from a device: copied beside the training, and never a later value."""

from __future__ import annotations

import logging
import mmap
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_ckpt as dc
from dist_ckpt.async_save.snapshots.job_folder import JobFolder
from dist_ckpt.core.shard_io.memory import cuda, device_staging

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


@pytest.fixture(autouse=True)
def _room_on_disk(tmp_path: Path) -> Iterator[None]:
    """Remove what a test saved: all of it together is 40 GB."""
    yield
    shutil.rmtree(tmp_path)


@pytest.fixture
def job() -> Iterator[str]:
    name = f"test-{uuid.uuid4().hex}"
    yield name
    folder = JobFolder(name)
    for one in folder.rank_folders():
        one.remove()
    folder.remove_if_empty()


@pytest.fixture
def saver(job: str) -> Iterator[dc.AsyncSaver]:
    with dc.AsyncSaver(job=job) as saver:
        yield saver


def loaded(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = {}
    dc.load(state, path)
    return state


def are(tensor: torch.Tensor, value: float) -> bool:
    """Say whether all values are this one."""
    return bool((tensor == value).all())


def busy(product: torch.Tensor, seconds: float) -> None:
    """Keep the current stream busy for about so long, whatever the device."""
    torch.cuda.synchronize()
    start = time.monotonic()
    product @ product
    torch.cuda.synchronize()
    for _ in range(max(1, int(seconds / max(time.monotonic() - start, 1e-4)))):
        product @ product


NUM_SAVES = 6


@pytest.fixture(params=["room", "no room"])
def has_room(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Have saves with room for a copy on the device, and without."""
    has_room: bool = request.param == "room"
    if not has_room:
        monkeypatch.setattr(cuda.BufferMemory, "room", lambda _: 0)
    return has_room


class Large(torch.nn.Module):
    """Much that `optimizer` trains, and statistics that a forward changes."""

    seen: torch.Tensor

    def __init__(self, nbytes: int = 128 << 20) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(nbytes // 4, device="cuda"))
        self.weight.grad = -torch.ones_like(self.weight)
        self.register_buffer("seen", torch.zeros(1000, device="cuda"))

    def saved(self) -> dict[str, Any]:
        """Return a state in which it is copied beside the training: with its optimizer."""
        return {"model": self, "optim": torch.optim.SGD([self.weight], lr=1.0)}


# --- what is saved is what it was -------------------------------------------------------------


def test_what_a_training_on_the_device_saves_is_what_it_was(
    tmp_path: Path, saver: dc.AsyncSaver
) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(8))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state: dict[str, Any] = {"model": model, "optim": optimizer, "step": 0}
    expected = {}
    for step in range(1, 9):
        model(torch.randn(64, 2048, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        state["step"] = step
        saver.save(state, tmp_path / str(step), step=step)
        # On the current stream, as the next step: what it was before that.
        expected[step] = [p.detach().clone() for p in model.parameters()]
    saver.close()
    for step, weights in expected.items():
        found = loaded(tmp_path / str(step))
        assert found["step"] == step
        for (name, _), weight in zip(model.named_parameters(), weights, strict=True):
            assert torch.equal(found["model"][name], weight.cpu())
            assert found["optim"]["state"][f"model.{name}"]["step"] == step


KINDS = ("plain", "foreach", "fused", "in another stream", "another is saved", "none is saved")


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_right_after_a_save_never_gets_into_it(
    tmp_path: Path, saver: dc.AsyncSaver, kind: str, has_room: bool
) -> None:
    model = Large()
    options = {"foreach": kind == "foreach", "fused": kind == "fused"}
    optimizer = torch.optim.SGD([model.weight], lr=1.0, **options)
    state = {"model": model, "optim": optimizer}
    if kind == "another is saved":
        state = model.saved()
    elif kind == "none is saved":
        del state["optim"]
    stream = torch.cuda.Stream() if kind == "in another stream" else torch.cuda.current_stream()
    product = torch.ones(4096, 4096, device="cuda")
    for step in range(NUM_SAVES):
        busy(product, 0.02)
        saver.save(state, tmp_path / str(step), step=step)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            optimizer.step()
        torch.cuda.current_stream().wait_stream(stream)
    saver.close()
    for step in range(NUM_SAVES):
        assert are(loaded(tmp_path / str(step))["model"]["weight"], step)


@pytest.mark.usefixtures("has_room")
def test_what_others_than_optimizers_change_needs_no_fence(
    tmp_path: Path, saver: dc.AsyncSaver
) -> None:
    model, loose = Large(), torch.zeros(32 << 20, device="cuda")
    average = torch.optim.swa_utils.AveragedModel(model)  # its parameters require gradients, too
    state = model.saved()
    state |= {
        "average": average,
        "loose": loose,
        "dict": {"rows": torch.zeros(3000, 700).cuda().t()},
    }
    for step in range(NUM_SAVES):
        saver.save(state, tmp_path / str(step), step=step)
        with torch.no_grad():
            assert isinstance(average.module, Large)
            average.module.weight.add_(1)
        model.seen += 1
        loose += 1
        state["dict"]["rows"] += 1
    saver.close()
    for step in range(NUM_SAVES):
        found = loaded(tmp_path / str(step))
        assert are(found["average"]["module.weight"], step)
        assert are(found["model"]["seen"], step)
        assert are(found["loose"], step)
        assert are(found["dict"]["rows"], step)


def replayed(weight: torch.Tensor) -> Callable[[], object]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        weight.add_(1)
    return graph.replay


def in_another_stream(weight: torch.Tensor) -> Callable[[], object]:
    stream = torch.cuda.Stream()

    def change() -> None:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.no_grad():
            weight.add_(1)
        torch.cuda.current_stream().wait_stream(stream)

    return change


CHANGES: dict[str, Callable[[torch.Tensor], Callable[[], object]]] = {
    "a graph": replayed,
    "data": lambda weight: partial(weight.data.add_, 1),
    "another stream": in_another_stream,
}


@pytest.mark.parametrize("kind", CHANGES)
def test_what_changes_unseen_never_gets_into_a_checkpoint(
    tmp_path: Path, saver: dc.AsyncSaver, kind: str, has_room: bool
) -> None:
    model = Large(512 << 20)
    state = model.saved()
    saver.save(state, tmp_path / "first").result(60)
    change = CHANGES[kind](model.weight)
    failed = []
    for step in range(3):
        value = model.weight[0].item()
        handle = saver.save(state, tmp_path / str(step), step=step)
        change()
        if (failure := handle.exception(60)) is None:
            assert are(loaded(tmp_path / str(step))["model"]["weight"], value)
        else:
            assert "model.weight. Call fence()" in str(failure)
            failed.append(step)
    # The host may be so slow that even a late copy is complete before the change.
    assert failed in ([] if has_room else [0], [])


def test_an_optimizer_step_in_a_graph_never_gets_into_a_checkpoint(
    tmp_path: Path, saver: dc.AsyncSaver, has_room: bool
) -> None:
    model = Large(128 << 20)
    optimizer = torch.optim.Adam([model.weight], lr=1.0, capturable=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    state = {"model": model, "optim": optimizer}
    for step in range(3):
        expected = model.weight[0].item(), optimizer.state[model.weight]["step"].item()
        handle = saver.save(state, tmp_path / str(step), step=step)
        graph.replay()
        handle.result(60)
        found = loaded(tmp_path / str(step))
        assert are(found["model"]["weight"], expected[0])
        assert found["optim"]["state"]["model.weight"]["step"] == expected[1]


def test_a_fingerprint_on_the_device_is_that_of_the_host() -> None:
    torch.manual_seed(0)
    packs = [[torch.randint(0, 256, (size,), dtype=torch.uint8)] for size in (64 << 20, 12345)]
    scratch = torch.empty(device_staging._PACK_NBYTES, dtype=torch.uint8)
    there = [[piece.cuda() for piece in pack] for pack in packs]
    found = device_staging.fingerprint(there, scratch.cuda()).cpu()
    assert torch.equal(found, device_staging.fingerprint(packs, scratch))


def test_weights_may_be_changed_by_hand_after_the_fence(
    tmp_path: Path, saver: dc.AsyncSaver
) -> None:
    model = Large()
    state = model.saved()
    for step in range(NUM_SAVES):
        saver.save(state, tmp_path / str(step), step=step)
        saver.fence()
        with torch.no_grad():
            model.weight.add_(1)
    saver.close()
    for step in range(NUM_SAVES):
        assert are(loaded(tmp_path / str(step))["model"]["weight"], step)


def test_a_state_that_is_dropped_while_it_is_copied_is_still_what_it_was(
    tmp_path: Path, saver: dc.AsyncSaver
) -> None:
    for step in range(NUM_SAVES):
        model = Large()
        model.weight.data.fill_(step)
        saver.save(model.saved(), tmp_path / str(step), step=step)
        del model
        torch.full((128 << 20,), 99.0, device="cuda")  # takes the memory, if torch gives it away
    saver.close()
    for step in range(NUM_SAVES):
        assert are(loaded(tmp_path / str(step))["model"]["weight"], step)


@pytest.mark.usefixtures("has_room")
def test_tensors_of_all_kinds_on_host_and_device_come_back(
    tmp_path: Path, saver: dc.AsyncSaver
) -> None:
    torch.manual_seed(0)
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.int8, torch.int64)
    state: dict[str, Any] = {
        f"{number}": torch.randn(1 + number * 37 % 5000, device="cuda").mul(9).to(dtype)
        for number, dtype in enumerate(dtypes * 60)
    }
    state |= {f"host {number}": torch.randn(number + 1) for number in range(100)}
    state["complex"] = torch.randn(500, 300, dtype=torch.complex128, device="cuda")
    state["conj"] = torch.randn(5000, dtype=torch.complex64, device="cuda").conj()
    state["rows"] = torch.randn(3000, 700, device="cuda").t()
    state["strided"] = torch.randn(3000, 700, device="cuda")[::3, 5:600:7]
    state["one"] = torch.tensor(3.0, device="cuda")
    state["empty"] = torch.empty(0, 3, device="cuda")
    state["large"] = torch.randn(40 << 20, device="cuda")
    state["large host"] = torch.randn(9 << 20)
    saver.save(state, tmp_path / "a").result(60)
    found = loaded(tmp_path / "a")
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor.cpu()), name


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device here")
def test_a_state_on_two_devices_is_copied_from_both(tmp_path: Path, saver: dc.AsyncSaver) -> None:
    state = {str(device): torch.zeros(9 << 20, device=device) for device in ("cuda:0", "cuda:1")}
    for step in range(NUM_SAVES):
        saver.save(state, tmp_path / str(step), step=step)
        for tensor in state.values():
            tensor.add_(1)
    saver.close()
    for step in range(NUM_SAVES):
        found = loaded(tmp_path / str(step))
        assert all(are(tensor, step) for tensor in found.values())


# --- beside the training ----------------------------------------------------------------------


def test_save_returns_before_the_copy_is_done_and_training_does_not_wait_for_it(
    tmp_path: Path, saver: dc.AsyncSaver
) -> None:
    model = Large(1 << 30)
    product = torch.ones(4096, 4096, device="cuda")
    state = model.saved()
    saver.save(state, tmp_path / "first").result(60)
    saver.save(state, tmp_path / "second").result(60)  # both arenas are pinned
    busy(product, 0.3)
    handle = saver.save(state, tmp_path / "third")
    with pytest.raises(TimeoutError):  # the device has not come so far, and the host went on
        handle.wait_staged(0)
    handle.result(60)

    torch.cuda.synchronize()
    saver._job.fence.wait_until_staged()  # type: ignore[union-attr]
    handle = saver.save(state, tmp_path / "fourth")
    model.seen += 1  # as a forward would
    trained = torch.cuda.Event()
    trained.record()
    trained.synchronize()  # at once, and the copy takes 15 ms on the fastest bus
    with pytest.raises(TimeoutError):
        handle.wait_staged(0)
    handle.result(60)


def test_a_tensor_is_copied_by_few_calls(
    tmp_path: Path, saver: dc.AsyncSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def queue(_: cuda.SideStreamCopies, call: Callable[[], object]) -> None:
        calls.append(call)
        call()

    monkeypatch.setattr(cuda.SideStreamCopies, "queue", queue)
    model = Large(256 << 20)
    with torch.no_grad():
        torch.arange(64 << 20, out=model.weight)
    saver.save(model.saved(), tmp_path / "a").result(60)
    assert len(calls) < 10  # each takes the host 0.01 ms
    assert torch.equal(loaded(tmp_path / "a")["model"]["weight"], model.weight.cpu())


def test_many_saves_take_no_more_of_the_device_than_one(
    tmp_path: Path, saver: dc.AsyncSaver
) -> None:
    before = torch.cuda.memory_allocated()
    state = Large(1 << 20).saved()
    for step in range(40):
        saver.save(state, tmp_path / str(step), step=step).result(60)
    del state
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
    assert len(saver._job.streams._streams) == 1  # type: ignore[union-attr]


def test_a_save_while_a_graph_is_captured_is_refused_and_a_replay_can_be_fenced(
    tmp_path: Path, saver: dc.AsyncSaver
) -> None:
    model = Large()
    state = model.saved()
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        with torch.no_grad():
            model.weight.add_(1)
        with pytest.raises(ValueError, match="a CUDA graph is being captured"):
            saver.save(state, tmp_path / "a")
        saver.fence()
    for step in range(NUM_SAVES):
        saver.save(state, tmp_path / str(step), step=step)
        saver.fence()
        graph.replay()
    saver.close()
    for step in range(NUM_SAVES):
        assert are(loaded(tmp_path / str(step))["model"]["weight"], step)


# --- pinned memory ----------------------------------------------------------------------------


def test_the_arenas_are_pinned_and_anew_when_they_have_grown_and_no_more_after_close(
    tmp_path: Path, job: str
) -> None:
    views = []
    with dc.AsyncSaver(job=job) as saver:
        for step, nbytes in enumerate((1 << 20, 1 << 20, 64 << 20, 64 << 20)):
            saver.save(Large(nbytes).saved(), tmp_path / str(step)).result(60)
            pinned = saver._job.pinned._pinned  # type: ignore[union-attr]
            assert all(memory.error == 0 for memory in pinned.values())
            views = [memory.view for memory in pinned.values()]
            assert all(torch.frombuffer(view, dtype=torch.uint8).is_pinned() for view in views)
    assert len(views) == 2
    assert not any(torch.frombuffer(view, dtype=torch.uint8).is_pinned() for view in views)
    torch.ones(3, device="cuda").sum().item()


def test_memory_that_cannot_be_pinned_is_used_as_it_is_and_leaves_no_error_behind(
    tmp_path: Path,
    saver: dc.AsyncSaver,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # An address that is nobody's: CUDA itself refuses it.
    monkeypatch.setattr(cuda, "address_of", lambda _: 4096)
    model = Large()
    state = model.saved()
    with caplog.at_level(logging.WARNING, "dist_ckpt"):
        for step in range(4):
            saver.save(state, tmp_path / str(step), step=step)
            state["optim"].step()  # launches a kernel in this thread
    assert [record.getMessage() for record in caplog.records if "pinned" in record.msg]
    assert sum("pinned" in record.msg for record in caplog.records) == 1
    saver.close()
    for step in range(4):
        assert are(loaded(tmp_path / str(step))["model"]["weight"], step)


def test_memory_without_a_name_is_pinned_as_well() -> None:
    fd = os.memfd_create("test")
    os.ftruncate(fd, 1 << 20)
    view = memoryview(mmap.mmap(fd, 0))
    pinned = cuda.PinnedMemory(view, torch.device("cuda", 0))
    assert pinned.error == 0
    pinned.close()
    os.close(fd)


# --- and back ---------------------------------------------------------------------------------


def test_a_state_is_restored_to_the_device_from_memory(tmp_path: Path, job: str) -> None:
    def training() -> dict[str, Any]:
        model = torch.nn.Sequential(torch.nn.Linear(2048, 2048), torch.nn.BatchNorm1d(2048)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model(torch.randn(64, 2048, device="cuda")).square().mean().backward()
        optimizer.step()
        return {"model": model, "optim": optimizer}

    torch.manual_seed(1)
    saved, other = training(), training()
    with dc.AsyncSaver(job=job) as saver:
        saver.save(saved, tmp_path / "a", step=7).result(60)
        saver.close(keep=True)
    for file in tmp_path.rglob("*.safetensors"):
        file.unlink()  # what comes back does not come from there
    with dc.AsyncSaver(job=job) as saver:
        assert saver.restore(other) == 7
    for name, tensor in saved["model"].state_dict().items():
        assert other["model"].state_dict()[name].is_cuda
        assert torch.equal(other["model"].state_dict()[name], tensor)
    for mine, theirs in zip(
        saved["optim"].state.values(), other["optim"].state.values(), strict=True
    ):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
