"""safetensors files of others, read as a checkpoint: every value, and no lie of a header."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import dist_ckpt as dc
from dist_ckpt.default_opener import OPENER
from dist_ckpt.errors import (
    CheckpointError,
    CorruptError,
    IncompatibleError,
    NotFoundError,
    StorageError,
)

INDEX = "model.safetensors.index.json"


def model(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))


def equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def folder_of(root: Path, tensors: Mapping[str, torch.Tensor], num_files: int = 2) -> Path:
    """Write tensors as Hugging Face does, in several files."""
    folder = root / "hf"
    folder.mkdir()
    places = {}
    for number in range(num_files):
        name = f"model-{number + 1:05}-of-{num_files:05}.safetensors"
        part = dict(list(tensors.items())[number::num_files])
        save_file(part, folder / name, metadata={"format": "pt"})
        places.update(dict.fromkeys(part, name))
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    return folder


# --- what is read ------------------------------------------------------------------------------


def test_a_file_fills_a_model(tmp_path: Path) -> None:
    saved, live = model(), model(1)
    save_file(saved.state_dict(), tmp_path / "a.safetensors")
    report = dc.load({"model": live}, tmp_path / "a.safetensors")
    assert equal(live, saved)
    assert report.step is None
    assert set(report.restored) == {f"model.{name}" for name in saved.state_dict()}


def test_a_folder_of_files_is_one_model_also_behind_links(tmp_path: Path) -> None:
    saved, live = model(), model(1)
    folder = folder_of(tmp_path, saved.state_dict())
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):  # as in a cache of downloads
        file.rename(blobs / f"{number}")
        file.symlink_to(Path("..", "blobs", f"{number}"))
    dc.load({"model": live}, folder)
    assert equal(live, saved)
    with dc.open(folder) as found:
        assert found.metadata == {"total_size": 1}
        assert set(found) == {f"model.{name}" for name in saved.state_dict()}
        rows = found["model.0.weight"][1:3, 2]
    expected = saved.state_dict()["0.weight"][1:3, 2]
    assert torch.equal(torch.tensor(rows.data.cast("f").tolist()), expected)


def test_a_tensor_that_two_files_have_is_that_of_the_file_which_the_index_names(
    tmp_path: Path,
) -> None:
    folder = folder_of(tmp_path, {"a": torch.ones(2), "b": torch.zeros(2)})
    other = folder / "model-00002-of-00002.safetensors"  # of b
    save_file({"a": torch.full((2,), 9.0), "b": torch.zeros(2)}, other)
    live: dict[str, Any] = {}
    dc.load(live, folder)
    assert torch.equal(live["model"]["a"], torch.ones(2))


def test_a_folder_with_one_file_needs_no_index(tmp_path: Path) -> None:
    saved, live = model(), model(1)
    save_file(saved.state_dict(), tmp_path / "model.safetensors")
    dc.load({"model": live}, tmp_path)
    assert equal(live, saved)


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape_comes_as_it_was(tmp_path: Path, dtype: torch.dtype) -> None:
    shapes = [(), (3,), (2, 3), (0,), (2, 0, 3), (1, 1, 1, 1, 1)]
    saved = {
        f"t{number}": (torch.arange(6)[: torch.Size(shape).numel()] % 2).to(dtype).reshape(shape)
        for number, shape in enumerate(shapes)
    }
    save_file(saved, tmp_path / "a.safetensors")
    live: dict[str, Any] = {}
    dc.load(live, tmp_path / "a.safetensors")
    assert live["model"].keys() == saved.keys()
    for name, tensor in saved.items():
        found = live["model"][name]
        assert (found.dtype, found.shape) == (dtype, tensor.shape)
        assert torch.equal(
            found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
        )


def test_a_part_of_it_goes_under_other_names_and_beside_a_checkpoint_of_ours(
    tmp_path: Path,
) -> None:
    saved, live = model(), model(1)
    save_file(saved.state_dict(), tmp_path / "a.safetensors")
    dc.save({"step": 7}, tmp_path / "ours")
    state: dict[str, Any] = {"net": {"first": live[0]}, "step": 0}
    source = dc.Source(
        tmp_path / "a.safetensors", include="net.first", rename={"model.0.*": "net.first.*"}
    )
    dc.load(state, [source, tmp_path / "ours"])
    assert torch.equal(live.state_dict()["0.weight"], saved.state_dict()["0.weight"])
    assert state["step"] == 7


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tied_weights_that_the_files_have_once_fill_both(tmp_path: Path, device: str) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte = torch.nn.Embedding(5, 3)
            self.head = torch.nn.Linear(3, 5, bias=False)
            self.head.weight = self.wte.weight

    saved = Tied()
    with torch.device(device):
        live = Tied()
    save_file({"wte.weight": saved.wte.weight.detach()}, tmp_path / "a.safetensors")
    dc.load({"model": live}, tmp_path / "a.safetensors")
    assert torch.equal(live.head.weight, saved.wte.weight)
    assert live.head.weight is live.wte.weight
    with pytest.raises(IncompatibleError, match=r"lacks .*model\.head\.weight"):
        dc.load({"model": Tied()}, tmp_path / "a.safetensors", exclude="model.wte")


def test_it_is_written_as_a_checkpoint_for_other_ranks(tmp_path: Path) -> None:
    saved, live = model(), model(1)
    folder = folder_of(tmp_path, saved.state_dict())
    report = dc.reshard(folder, tmp_path / "ours", world_size=4)
    assert report.num_tensors == 4
    assert dc.verify(tmp_path / "ours").ok
    dc.load({"model": live}, tmp_path / "ours")
    assert equal(live, saved)
    with dc.open(tmp_path / "ours") as found:
        assert found.world_size == 4
        assert found.metadata == {"total_size": 1}
        assert found.index.save


def test_a_folder_of_ours_may_have_any_name(tmp_path: Path) -> None:
    dc.save({"x": 1}, tmp_path / "a.safetensors")
    state = {"x": 0}
    dc.load(state, tmp_path / "a.safetensors")
    assert state == {"x": 1}


def test_nothing_is_changed_in_what_others_wrote(tmp_path: Path) -> None:
    save_file(model().state_dict(), tmp_path / "a.safetensors")
    storage, path = OPENER.find(tmp_path / "a.safetensors")
    calls: list[Callable[[], object]] = [
        lambda: storage.make_folder(f"{path}/a2"),
        lambda: storage.create(f"{path}/x", 1),
        lambda: storage.link(path, f"{path}2"),
        lambda: storage.rename(path, f"{path}2"),
        lambda: storage.remove(path),
        lambda: storage.sync(path),
    ]
    for call in calls:
        with pytest.raises(StorageError, match="read-only"):
            call()


# --- what is refused ---------------------------------------------------------------------------


def write(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def tensor(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


@pytest.mark.parametrize(
    ("header", "kind", "message"),
    [
        ({"w": tensor(dtype="F4")}, IncompatibleError, "w'.*'F4'.*convert it"),
        ({"w": tensor(dtype=["F32"])}, IncompatibleError, "w'.*dtype"),
        ({"w": tensor(shape=[3])}, CorruptError, "w'.*cannot be the bytes 0:8 of 8"),
        ({"w": tensor(shape=[1 << 62, 4], data_offsets=[0, 0])}, CorruptError, "cannot be"),
        ({"w": tensor(shape=[-2])}, CorruptError, "-2 is not a size"),
        ({"w": tensor(shape="ab")}, CorruptError, "'ab' is not a list"),
        ({"w": tensor(shape=[1] * 65 + [2])}, CorruptError, "not a tensor of a safetensors file"),
        ({"w": tensor(data_offsets=[8, 16])}, CorruptError, "cannot be the bytes 8:16 of 8"),
        ({"w": tensor(data_offsets=[0])}, CorruptError, "not a tensor of"),
        ({"w": tensor(data_offsets=[True, 9])}, CorruptError, "True is not a size"),
        ({"w": 3}, CorruptError, "3 is not a JSON object"),
        ({"": tensor()}, CorruptError, "not a tensor of"),
        ([], CorruptError, "not a JSON object"),
        (b"{ ", CorruptError, "not JSON"),
        (b'{"a":{},"a":{}}', CorruptError, "a.safetensors"),
        (b"[" * 100_000, CorruptError, "nested deeper"),
        (b'{"__metadata__":{"dist_ckpt_index":"x"}}', IncompatibleError, "load_bytes"),
        (b'{"__metadata__":{"dist_ckpt":"x"}}', IncompatibleError, "the checkpoint's folder"),
    ],
)
def test_a_header_that_lies_is_named(
    tmp_path: Path, header: Any, kind: type[Exception], message: str
) -> None:
    path = write(tmp_path / "a.safetensors", header, bytes(8))
    with pytest.raises(kind, match=message) as error:
        dc.load({}, path)
    assert "a.safetensors" in str(error.value)


@pytest.mark.parametrize("data", [b"", b"1234567", bytes(8), b"\xff" * 9])
def test_what_is_no_such_file_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.safetensors").write_bytes(data)
    with pytest.raises(CorruptError, match="not a safetensors file"):
        dc.load({}, tmp_path / "a.safetensors")


def test_a_file_that_is_cut_off_is_named_and_nothing_is_filled(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"w": torch.ones(100)}, path)
    path.write_bytes(path.read_bytes()[:-4])
    live = torch.zeros(100)
    with pytest.raises(CorruptError, match=r"a\.safetensors, 'w'.*fetch the file again"):
        dc.load({"model": {"w": live}}, path)
    assert not live.any()


def test_a_file_that_is_cut_off_while_it_is_read_has_no_older_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"w": torch.ones(100)}, path)
    with dc.open(path) as checkpoint:
        os.truncate(path, path.stat().st_size - 4)
        with pytest.raises(CorruptError, match="while it was read; fetch the file again") as error:
            checkpoint["model.w"][...]
    assert "older checkpoint" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (
            lambda names: names.update(x="gone.safetensors"),
            NotFoundError,
            "gone.safetensors; fetch",
        ),
        (lambda names: names.update(x=next(iter(names.values()))), CorruptError, "lack: x; fetch"),
        (lambda names: names.update(x="../up.safetensors"), CorruptError, "not in the same folder"),
        (lambda names: names.update(x=3), CorruptError, "names the file 3"),
    ],
)
def test_an_index_that_lies_is_named(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], kind: type[Exception], message: str
) -> None:
    folder = folder_of(tmp_path, model().state_dict())
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(kind, match=message):
        dc.load({"model": model(1)}, folder)


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": []}', "{}"])
def test_an_index_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(CorruptError, match=r"index\.json"):
        dc.open(tmp_path)


def test_mutated_headers_are_read_as_they_are_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"w": torch.arange(6.0).view(2, 3), "b": torch.ones(2)}, path)
    good = path.read_bytes()
    header = int.from_bytes(good[:8], "little") + 8
    numbers = random.Random(0)
    for _ in range(300):
        data = bytearray(good)
        for _ in range(numbers.randint(1, 3)):
            data[numbers.randrange(header)] = numbers.randrange(256)
        path.write_bytes(data)
        try:
            dc.load({}, path)
        except (CheckpointError, ValueError):
            continue


def test_what_only_its_own_library_may_read_is_refused_with_the_way(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    with pytest.raises(
        IncompatibleError, match=r"a\.pt is a file of torch\.save.*import --from torch"
    ):
        dc.load({}, tmp_path / "a.pt")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(b"\x80")
    with pytest.raises(IncompatibleError, match=r"interop\.dcp\.load, or .*import --from dcp"):
        dc.open(tmp_path / "dcp")


FOREIGN = ["model.safetensors", "meta.pt", "random_states_0.pkl", "latest", "__0.metadata"]


@pytest.mark.parametrize("name", FOREIGN)
def test_a_checkpoint_of_ours_is_that_whatever_lies_beside_its_attempt(
    tmp_path: Path, name: str
) -> None:
    """As `save_pretrained` into the folder of a checkpoint would have it."""
    dc.save({"model": {"w": torch.zeros(3)}}, tmp_path / "ck")
    save_file({"w": torch.ones(3)}, tmp_path / "ck" / name)
    (tmp_path / "ck" / ".metadata").write_bytes(b"")
    state = {"model": {"w": torch.ones(3)}}
    dc.load(state, tmp_path / "ck")
    assert not state["model"]["w"].any()
    with dc.open(tmp_path / "ck") as found:
        assert found.index.has_digests
