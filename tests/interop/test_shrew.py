"""`.shrew` files: the same bytes back by every way, and hostile ones refused where they lie."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import dist_ckpt as dc
import shrew_writer as w
from dist_ckpt.core.checkpoint.checkpoint import open_at
from dist_ckpt.core.shard_io.memory.host_array import Array
from dist_ckpt.core.storage import ReadableFile
from dist_ckpt.errors import (
    CorruptError,
    ExistsError,
    IncompatibleError,
    NotFoundError,
    StorageError,
)
from dist_ckpt.interop.shrew import files
from dist_ckpt.testing.crash_storage import CrashStorage, states
from dist_ckpt.testing.faulty_storage import FaultyStorage
from dist_ckpt.testing.memory_storage import MemoryStorage
from dist_ckpt.tools.new_files import new_file
from dist_ckpt.tools.rewrite import reshard

pytest.importorskip("torch")
pytest.importorskip("numpy")
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=sorted(w.FILES))
def data(request: pytest.FixtureRequest) -> bytes:
    return w.FILES[request.param]


def test_what_is_read_is_written_as_the_same_bytes(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.shrew").write_bytes(data)
    assert files.write(files.read(data)) == data
    assert files.write(files.read(tmp_path / "a.shrew")) == data
    assert files.write(files.read(memoryview(bytearray(data)))) == data


def test_a_file_that_was_imported_is_exported_as_the_same_bytes(
    data: bytes, tmp_path: Path
) -> None:
    file, back = tmp_path / "a.shrew", tmp_path / "b.shrew"
    file.write_bytes(data)
    files.import_file(file, tmp_path / "ck")
    assert dc.verify(tmp_path / "ck").ok
    assert files.export_file(tmp_path / "ck", back) == len(data)
    assert back.read_bytes() == data
    # However many ranks it is laid out for.
    dc.reshard(tmp_path / "ck", tmp_path / "many", world_size=3)
    files.export_file(tmp_path / "many", back, overwrite=True)
    assert back.read_bytes() == data
    assert sorted(os.listdir(tmp_path)) == ["a.shrew", "b.shrew", "ck", "many"]


def test_what_is_read_is_what_the_file_says() -> None:
    state: dict[str, Any] = files.read(w.FILES["version 2"])
    assert list(state) == ["model", "optim", *("epoch", "global_step", "best_loss"), "loss_history"]
    model = state["model"]
    assert list(model) == [name for name, *_ in w.MODEL]
    assert [bytes(one.data) for one in model.values()] == [data for *_, data in w.MODEL]
    assert model["large"].tolist() == [(1 << 53) + 1, (1 << 63) - 1, -(1 << 63)]
    assert model["brain"].torch().dtype == torch.bfloat16
    assert model["none"].shape == (0, 4)
    assert state["optim"]["type"] == "Adam"
    assert list(state["optim"]["scalars"]) == ["t", "lr", "beta1"]
    assert state["optim"]["buffers"]["v.0"].tolist() == [0.5]
    assert (state["epoch"], state["global_step"]) == ((1 << 64) - 1, 5000)
    assert state["best_loss"] == float("inf")
    assert state["loss_history"][0] == 1.5
    assert list(files.read(w.FILES["version 1"])) == ["model"]


def test_an_imported_file_is_the_checkpoint_that_save_makes_of_it(
    data: bytes, tmp_path: Path
) -> None:
    (tmp_path / "a.shrew").write_bytes(data)
    report = files.import_file(tmp_path / "a.shrew", tmp_path / "imported")
    state: Any = files.read(data)
    step = state.get("global_step")
    step = step if step is not None and step < 1 << 63 else None
    assert report.step == step
    assert report.attempt in os.listdir(tmp_path / "imported")
    dc.save(with_torch(state), tmp_path / "saved", step=step)
    assert files_of(tmp_path / "imported") == files_of(tmp_path / "saved")


def with_torch(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: with_torch(child) for key, child in value.items()}
    return value.torch() if isinstance(value, Array) else value


def files_of(root: Path) -> dict[str, bytes]:
    (attempt,) = root.glob("a1-*")
    named = {file.name: file.read_bytes() for file in attempt.iterdir()}
    return {name: data for name, data in named.items() if not name.endswith(".json")}


def test_a_live_model_is_written_from_torch_and_numpy_alike(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    held = {name: one.detach().numpy() for name, one in model.named_parameters()}
    data = files.write({"model": model.state_dict()})
    assert data == files.write({"model": held})
    dc.save({"model": model}, tmp_path / "ck")
    files.export_file(tmp_path / "ck", tmp_path / "a.shrew")
    assert (tmp_path / "a.shrew").read_bytes() == data
    model.load_state_dict(with_torch(files.read(data)["model"]))


def test_tied_tensors_are_written_under_each_name(tmp_path: Path) -> None:
    shared = torch.arange(3.0)
    dc.save({"model": {"a": shared, "b": shared}}, tmp_path / "ck")
    files.export_file(tmp_path / "ck", tmp_path / "a.shrew")
    model: Any = files.read(tmp_path / "a.shrew")["model"]
    assert [model[name].tolist() for name in ("a", "b")] == [[0.0, 1.0, 2.0]] * 2


def test_version_1_of_a_training_is_its_model_alone(tmp_path: Path) -> None:
    data = w.FILES["version 2"]
    (tmp_path / "a.shrew").write_bytes(data)
    assert files.write(files.read(data), version=1) == w.FILES["version 1"]
    files.import_file(tmp_path / "a.shrew", tmp_path / "ck")
    files.export_file(tmp_path / "ck", tmp_path / "b.shrew", version=1)
    assert (tmp_path / "b.shrew").read_bytes() == w.FILES["version 1"]


def test_sections_come_in_any_order_and_may_be_left_out() -> None:
    model = w.model_section(*w.MODEL)
    assert (
        files.write(files.read(w.version_2(w.METADATA, w.OPTIMIZER, model)))
        == (w.FILES["version 2"])
    )
    nothing = w.metadata_section(0, 0, w.f64(float("inf")), [])
    assert files.write(files.read(w.version_2())) == w.version_2(w.model_section(), nothing)


# --- hostile files -----------------------------------------------------------------------------

ONE = ("a", "f32", (2,), b"12345678")
START = w.version_1(ONE)[:12]
REST = b"\x00" + w.u32(1) + w.u32(2) + w.u64(8) + b"12345678"

HOSTILE: Mapping[str, tuple[bytes, type[Exception], str]] = {
    "nothing": (b"", CorruptError, "byte 0: the magic number needs 4 bytes, but 0 are left"),
    "magic": (b"BADXsomejunk", CorruptError, "byte 0: b'BADX' is not b'SHRW'"),
    "version": (b"SHRW" + w.u32(3), IncompatibleError, "byte 4: version 3: only 1 and 2"),
    "count": (
        b"SHRW" + w.u32(1) + w.u32((1 << 32) - 1) + REST,
        CorruptError,
        "byte 12: the smallest list of 4294967295 tensors needs 73014444015 bytes, but 25",
    ),
    "name length": (
        START + w.u32((1 << 32) - 1) + bytes(40),
        CorruptError,
        "byte 16: the name of tensor 0 needs 4294967295 bytes, but 40 are left",
    ),
    "name": (
        START + w.text(b"ab\xff") + REST,
        CorruptError,
        "byte 18: the name of tensor 0 is not",
    ),
    "long name": (
        START + w.text("a" * 5000) + REST,
        IncompatibleError,
        "byte 12: tensor 0 has a name of 5000 characters",
    ),
    "same name": (w.version_1(ONE, ONE), CorruptError, "byte 42: tensor 1 has the name 'a' again"),
    "dtype": (
        START + w.text("a") + b"\x07" + REST[1:],
        IncompatibleError,
        "byte 17: tensor 'a' has the dtype 7: only 0 to 6",
    ),
    "ndim": (
        START + w.text("a") + b"\0" + w.u32((1 << 32) - 1) + bytes(64),
        CorruptError,
        "byte 22: tensor 'a': a shape of 4294967295 dimensions needs 17179869180 bytes, but 64",
    ),
    "65 dimensions": (
        w.version_1(("a", "u8", (1,) * 65, b"!")),
        IncompatibleError,
        "byte 18: tensor 'a': .*65 dimensions",
    ),
    "product": (
        START + w.text("a") + b"\0" + w.u32(3) + w.u32((1 << 32) - 1) * 3 + bytes(64),
        IncompatibleError,
        "byte 18: tensor 'a': .*no checkpoint can store it",
    ),
    "a size that wraps": (
        START + w.text("a") + b"\0" + w.u32(2) + w.u32(1 << 31) * 2 + w.u64(0) + bytes(64),
        IncompatibleError,
        "byte 18: tensor 'a'",
    ),
    "size": (
        START + w.text("a") + b"\0" + w.u32(1) + w.u32(2) + w.u64(9) + bytes(9),
        CorruptError,
        r"byte 26: tensor 'a' is float32 \[2\], 8 bytes, but has 9",
    ),
    "size of nothing": (
        START + w.text("a") + b"\0" + w.u32(1) + w.u32(0) + w.u64((1 << 64) - 1),
        CorruptError,
        r"byte 26: tensor 'a' is float32 \[0\], 0 bytes, but has 18446744073709551615",
    ),
    "data": (
        START + w.text("a") + b"\0" + w.u32(1) + w.u32(1 << 30) + w.u64(1 << 32) + bytes(9),
        CorruptError,
        "byte 34: the data of tensor 'a' needs 4294967296 bytes, but 9 are left",
    ),
    "more after it": (w.version_1(ONE) + b"x", CorruptError, "byte 42: 1 bytes after the end"),
    "more after the end": (w.version_2() + b"ab", CorruptError, "byte 9: 2 bytes after the end"),
    "no end": (
        w.version_2(w.METADATA)[:-1],
        CorruptError,
        "the number of a section needs 1 bytes, but 0 are left",
    ),
    "section": (w.version_2(b"\x04"), CorruptError, "byte 8: 0x04 is not the number of a section"),
    "section twice": (
        w.version_2(w.model_section(), w.model_section()),
        CorruptError,
        "byte 13: a second model section",
    ),
    "losses": (
        w.version_2(b"\x03" + w.u64(1) * 3 + w.u32((1 << 32) - 1)),
        CorruptError,
        "byte 37: a history of 4294967295 losses needs 34359738360 bytes, but 1 are left",
    ),
    "scalars": (
        w.version_2(b"\x02" + w.text("Adam") + w.u32(1 << 31)),
        CorruptError,
        "2147483648 scalars",
    ),
    "scalar twice": (
        w.version_2(w.optimizer_section("A", [("t", w.f64(1.0))] * 2, [])),
        CorruptError,
        "scalar 1 has the name 't' again",
    ),
    "buffer": (
        w.version_2(w.optimizer_section("A", [], [("m", b"")])[:-8] + w.u64(1 << 61)),
        CorruptError,
        "buffer 'm', of 2305843009213693952 numbers, needs 18446744073709551616 bytes, but 1",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_where_it_lies(name: str, tmp_path: Path) -> None:
    data, error, said = HOSTILE[name]
    with pytest.raises(error, match=f"^the .shrew bytes, .*{said}"):
        files.read(data)
    file = tmp_path / "a.shrew"
    file.write_bytes(data)
    with pytest.raises(error, match=f"{file}, .*{said}"):
        files.import_file(file, tmp_path / "ck")
    assert os.listdir(tmp_path) == ["a.shrew"]


def test_a_file_that_ends_early_is_refused_wherever_it_ends() -> None:
    for data in (w.FILES["version 1"], w.FILES["version 2"]):
        for nbytes in range(len(data)):
            with pytest.raises(CorruptError, match=r"byte \d+: .* left|byte 0: "):
                files.read(data[:nbytes])


def test_time_and_memory_are_bounded_by_the_size_of_the_file() -> None:
    many = w.version_1(*((f"{n}", "u8", (0,), b"") for n in range(2_000)))
    for data in (*(data for data, *_ in HOSTILE.values()), many):
        tracemalloc.start()
        start = time.thread_time()
        try:
            files.read(data)
        except (CorruptError, IncompatibleError):
            pass
        finally:
            seconds, (_, peak) = time.thread_time() - start, tracemalloc.get_traced_memory()
            tracemalloc.stop()
        # A tensor of no elements is some 25 bytes in a file, and objects of 1 KB in Python.
        assert peak <= 100_000 + 80 * len(data)
        assert seconds <= 0.5 + len(data) * 5e-5


# --- what a file cannot hold ---------------------------------------------------------------------

GOOD: Mapping[str, Any] = {
    "model": {"w": torch.ones(2)},
    "optim": {"type": "A", "scalars": {"t": 1.0}, "buffers": {"m": torch.ones(2).double()}},
    "epoch": 1,
    "global_step": 2,
    "best_loss": 0.5,
    "loss_history": [1.0],
}


def changed(path: str, value: object) -> Any:
    state = {
        **GOOD,
        "model": dict(GOOD["model"]),
        "optim": {key: dict(v) if isinstance(v, dict) else v for key, v in GOOD["optim"].items()},
    }
    *above, last = path.split("/")
    held: Any = state
    for name in above:
        held = held[name]
    held[last] = value
    return state


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("model/w", torch.ones(2, dtype=torch.bool), "model.w is bool: convert it to one of"),
        ("model/w", torch.ones(2, dtype=torch.int32), "model.w is int32: convert it"),
        ("model/w", torch.empty((0, 1 << 32)), r"model.w has the shape \[0, 4294967296\]: split"),
        ("model/v", 3, "model.v is a int, not a tensor: leave it out"),
        ("scheduler", {"a": 1}, "'scheduler' is unknown: leave it out, or write version 1"),
        ("optim", torch.ones(2), r"optim is float32 \[2\]: make it a mapping of 'type'"),
        ("optim/type", 3, "optim.type: 3 is not text"),
        ("optim/scalars/t", 1, "optim.scalars.t is 1: make it a float"),
        ("optim/buffers/m", torch.ones(2), r"optim.buffers.m is float32 \[2\]: make it a float64"),
        ("optim/buffers/m", torch.ones(2, 2).double(), "optim.buffers.m is float64"),
        ("epoch", -1, "epoch is -1: make it a whole number"),
        ("global_step", 1 << 64, "global_step is 18446744073709551616: make it"),
        ("epoch", True, "epoch is True"),
        ("best_loss", 1, "best_loss is 1: make it a float"),
        ("loss_history", [1.0, 2], r"loss_history is \[1.0, 2\]: make it a list of floats"),
    ],
)
def test_what_a_file_cannot_hold_is_refused_by_name(
    path: str, value: object, said: str, tmp_path: Path
) -> None:
    state = changed(path, value)
    with pytest.raises(IncompatibleError, match=said):
        files.write(state)
    dc.save(state, tmp_path / "ck")
    with pytest.raises(IncompatibleError, match=said):
        files.export_file(tmp_path / "ck", tmp_path / "a.shrew")
    assert os.listdir(tmp_path) == ["ck"]


def test_a_torch_optimizer_and_missing_fields_are_refused_by_name(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    dc.save({"model": model, "optim": optimizer, "rng": dc.RNG()}, tmp_path / "ck")
    with pytest.raises(IncompatibleError) as refused:
        files.export_file(tmp_path / "ck", tmp_path / "a.shrew")
    assert "optim is a mapping with " in str(refused.value)
    assert "'rng' is unknown" in str(refused.value)
    assert "epoch, global_step, best_loss, loss_history is missing" in str(refused.value)
    files.export_file(tmp_path / "ck", tmp_path / "a.shrew", version=1)
    assert list(files.read(tmp_path / "a.shrew")) == ["model"]
    with pytest.raises(IncompatibleError, match=r"'model' is a Linear: give its state_dict\(\)$"):
        files.write({"model": torch.nn.Linear(1, 1)})
    with pytest.raises(IncompatibleError, match=r"model.a is a dict: .* names such as 'a\.b'$"):
        files.write({"model": {"a": {"b": torch.ones(1)}}})
    with pytest.raises(IncompatibleError, match="'model' is missing"):
        files.write({"weights": {}})
    for version in (0, 3, True, "1"):
        with pytest.raises(ValueError, match="give 1 or 2"):
            files.write(GOOD, version=version)  # type: ignore[arg-type]


# --- files -----------------------------------------------------------------------------------


def test_no_file_and_no_checkpoint_is_replaced_unasked(tmp_path: Path) -> None:
    file, ck, out = tmp_path / "a.shrew", tmp_path / "ck", tmp_path / "b.shrew"
    file.write_bytes(w.FILES["version 2"])
    out.write_bytes(b"mine")
    files.import_file(file, ck)
    with pytest.raises(ExistsError):
        files.import_file(file, ck)
    with pytest.raises(ExistsError, match="--overwrite"):
        files.export_file(ck, out)
    assert out.read_bytes() == b"mine"
    file.write_bytes(w.FILES["version 1"])
    files.import_file(file, ck, overwrite=True)
    files.export_file(ck, out, overwrite=True)
    assert out.read_bytes() == w.FILES["version 1"]


def test_a_file_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "a.shrew"

    def write_beside_another() -> None:
        with new_file(out, overwrite=False) as file:
            file.write(b"ours")
            out.write_bytes(b"mine")

    with pytest.raises(ExistsError):
        write_beside_another()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a.shrew": b"mine"}
    with pytest.raises(ExistsError), new_file(out, overwrite=False):
        pytest.fail("it was there from the start, and is written all the same")


def test_an_export_that_fails_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dc.save({"model": {"a": torch.ones(2), "b": torch.ones(3)}}, tmp_path / "ck")
    out = tmp_path / "a.shrew"
    (file,) = (tmp_path / "ck").glob("a1-*/*.safetensors")
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(CorruptError, match="model"):
        files.export_file(tmp_path / "ck", out)
    damaged[-1] ^= 1
    file.write_bytes(damaged)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for call in ("fsync", "replace"):
        monkeypatch.setattr(os, call, full)
        with pytest.raises(StorageError, match=r"No space left .*\(ENOSPC\): free space"):
            files.export_file(tmp_path / "ck", out, overwrite=True)
        monkeypatch.undo()
        assert os.listdir(tmp_path) == ["ck"]
    with pytest.raises(NotFoundError, match="the folder does not exist"):
        files.export_file(tmp_path / "ck", tmp_path / "none" / "a.shrew")


def test_what_a_killed_export_has_left_is_told_by_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dc.save({"model": {"a": torch.ones(2)}}, tmp_path / "ck")
    for name in (".a.shrew.0123456789abcdef.tmp", ".b.shrew.0123456789abcdef.tmp", ".a.shrew.tmp"):
        (tmp_path / name).touch()
    files.export_file(tmp_path / "ck", tmp_path / "a.shrew")
    (told,) = (one.getMessage() for one in caplog.records)
    assert told.startswith(f"{tmp_path}/.a.shrew.0123456789abcdef.tmp is from a killed process")


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="the file does not exist"):
        files.read(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ValueError, match="is not a regular file"):
            files.import_file(path, tmp_path / "ck")


@pytest.mark.parametrize("given", [None, 5, [b"SHRW"], {"model": {}}])
def test_what_is_no_path_and_no_bytes_is_named(given: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"give the path of a \.shrew file, or its bytes"):
        files.read(given)
    with pytest.raises(TypeError, match=r"the file is a \w+: pass a str or a pathlib.Path"):
        files.import_file(given, tmp_path / "ck")
    with (
        pytest.raises(TypeError, match=r"the file is a \w+: pass"),
        new_file(given, overwrite=False),
    ):
        pass
    for no_path in ("", "a\0b"):
        with pytest.raises(ValueError, match=r"the file is '.*': pass the path of a file"):
            files.import_file(no_path, tmp_path / "ck")
    assert [*tmp_path.iterdir()] == []


def test_what_is_no_state_is_not_written(tmp_path: Path) -> None:
    endless: dict[str, Any] = {}
    endless["a"] = endless
    for state in ("model", [1], None):
        with pytest.raises(TypeError, match=r"the state is a \w+: give a dict"):
            files.write(state)  # type: ignore[arg-type]
    for bad in ({"model": endless}, {"model": {}, 5: 1}):
        with pytest.raises(IncompatibleError, match="cannot store this state"):
            files.write(bad)  # type: ignore[arg-type]


def test_a_file_may_have_the_longest_name_that_there_is(tmp_path: Path) -> None:
    path = tmp_path / ("\N{GRINNING FACE}" * 63)
    with new_file(path, overwrite=False) as file:
        file.write(b"x")
    assert path.read_bytes() == b"x"


def test_a_file_that_shrinks_while_it_is_imported_makes_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.shrew"
    file.write_bytes(w.version_1(("a", "u8", (1 << 20,), bytes(1 << 20))))
    open_unchanged = files.UnchangedFile.open

    def shrinking(storage: files.UnchangedFile, path: str) -> ReadableFile:
        opened = open_unchanged(storage, path)
        os.truncate(file, 1000)
        return opened

    monkeypatch.setattr(files.UnchangedFile, "open", shrinking)
    with pytest.raises(CorruptError, match="byte 1000: the file ends here"):
        files.import_file(file, tmp_path / "ck")
    with pytest.raises(NotFoundError):
        dc.open(tmp_path / "ck")


def test_a_fault_at_any_storage_call_of_an_import_leaves_no_half_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.shrew"
    file.write_bytes(w.FILES["version 2"])
    number, outcome = 0, "failed"
    while outcome != "saved":
        number += 1
        assert number < 300
        inner = MemoryStorage()
        inner.make_folder("/runs")
        storage = FaultyStorage(inner, fail_at_call=number)
        monkeypatch.setattr(reshard, "open_storage", lambda _, s=storage: (s, "/runs/ck"))
        try:
            files.import_file(file, tmp_path / "unused")
            outcome = "saved" if storage.calls < number else "failed"
        except StorageError:
            try:
                with open_at(inner, "/runs/ck") as found:  # it may not outlive a power cut
                    assert found["model.pixels"][...].tolist() == [0, 128, 255]
            except NotFoundError:
                pass
    assert number > 10


def test_an_import_that_crashes_anywhere_is_there_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, disk = tmp_path / "a.shrew", CrashStorage()
    file.write_bytes(w.FILES["version 2"])
    disk.make_folder("/runs")
    disk.sync("/")
    monkeypatch.setattr(reshard, "open_storage", lambda _: (disk, "/runs/ck"))
    files.import_file(file, tmp_path / "unused")
    disk.mark("imported")
    seen = set()
    for point, storage in states(disk.log, limit=4):
        try:
            with open_at(storage, "/runs/ck") as found:
                held = {name: found[name][...].tolist() for name in found}
            assert held["model.pixels"] == [0, 128, 255], point
            seen.add(True)
        except NotFoundError:
            assert "imported" not in point.marks, point
            seen.add(False)
    assert seen == {True, False}


def test_import_and_export_on_the_command_line(
    tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    file, ck, out = tmp_path / "a.shrew", tmp_path / "runs" / "ck", tmp_path / "b.shrew"
    file.write_bytes(w.FILES["version 2"])
    code, told, _ = run("import", "--from", "shrew", file, ck)
    assert (code, told.split(": ")[0]) == (0, str(ck))
    assert "13 tensors" in told
    assert run("export", "--format", "shrew", tmp_path / "runs@5000", out)[0] == 0
    assert out.read_bytes() == file.read_bytes()
    code, _, told = run("export", "--format", "shrew", ck, out)
    assert code == 5
    assert "--overwrite" in told
    assert run("export", "--format", "shrew", ck, out, "--version", 1, "--overwrite")[0] == 0
    assert out.read_bytes() == w.FILES["version 1"]
    assert run("import", "--from", "shrew", file, ck)[0] == 5
    assert run("import", "--from", "shrew", file, ck, "--overwrite")[0] == 0
    assert run("import", "--from", "shrew", tmp_path / "none", ck)[0] == 3
    file.write_bytes(b"SHRW")
    assert run("import", "--from", "shrew", file, ck, "--overwrite")[0] == 1
    assert run("import", file, ck, "--overwrite")[0] == 1
    assert run("import", "--from", "elsewhere", file, ck)[0] == 2
    assert run("export", "--format", "shrew", ck, out, "--version", 3, "--overwrite")[0] == 2


@pytest.mark.multi_process
def test_no_torch_is_needed_to_import_and_export(tmp_path: Path) -> None:
    (tmp_path / "a.shrew").write_bytes(w.FILES["version 2"])
    code = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "from dist_ckpt.interop.shrew import files as shrew\n"
        "shrew.import_file('a.shrew', 'ck'); shrew.export_file('ck', 'b.shrew')\n"
        "assert open('b.shrew', 'rb').read() == shrew.write(shrew.read('a.shrew'))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, timeout=60, check=True
    )
    assert (tmp_path / "b.shrew").read_bytes() == w.FILES["version 2"]


def test_names_are_chosen_by_globs(tmp_path: Path) -> None:
    dc.save({"model": {"w": torch.ones(2), "b": torch.ones(1)}, "note": "x"}, tmp_path / "ck")
    out = tmp_path / "a.shrew"
    files.export_file(tmp_path / "ck", out, include="model", exclude="*.b")
    model: Any = files.read(out)["model"]
    assert [*model] == ["w"]
    with pytest.raises(ValueError, match="'nothing' matches no name"):
        files.plan_export_file(tmp_path / "ck", tmp_path / "b", exclude=["note", "nothing"])
