"""Checkpoints as files for `torch.load`: the state as it was saved; a failure leaves nothing."""

from __future__ import annotations

import datetime
import errno
import logging
import re
import struct
import zipfile
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

import dist_ckpt as dc
from dist_ckpt.core.format import dtypes
from dist_ckpt.core.storage.local import local_storage
from dist_ckpt.errors import CorruptError, ExistsError, IncompatibleError, StorageError
from dist_ckpt.interop import imports
from dist_ckpt.interop.torch_save import export as torch_export
from dist_ckpt.interop.torch_save.export import export_file, plan_export_file
from ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

# What users do; everything else here unpickles nothing.
load, save = torch.load, torch.save

# Torch saves no others.
DTYPES = [name for name in dtypes.DTYPES if not re.fullmatch(r"u?int[1-7]|bits.*", name)]


def net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    ends = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    ends[1].weight = ends[0].weight
    return torch.nn.Sequential(ends[0], torch.nn.BatchNorm1d(4), ends[1])


def trained() -> tuple[torch.nn.Sequential, torch.optim.Optimizer]:
    model = net()
    groups: Any = [{"params": model[:2].parameters()}, {"params": [model[2].bias], "lr": 0.5}]
    optimizer = torch.optim.AdamW(groups)
    model(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def of_dtype(name: str) -> torch.Tensor:
    return (torch.arange(48, dtype=torch.uint8) % 2).view(getattr(torch, name)).reshape(-1, 3)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def assert_same(one: Any, other: Any, name: str = "") -> None:
    assert type(one) is type(other), name
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), name
        assert bits(one) == bits(other), name
    elif isinstance(one, dict):
        assert [*one] == [*other], name
        for key, value in one.items():
            assert_same(value, other[key], f"{name}.{key}")
    elif isinstance(one, list | tuple) and not isinstance(one, torch.Size):
        assert len(one) == len(other), name
        for number, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{name}.{number}")
    else:
        assert one == other, name


@pytest.fixture
def state() -> dict[Any, Any]:
    model, optimizer = trained()
    return {
        "model": model.state_dict(),
        "optim": optimizer.state_dict(),
        "dtypes": {name: of_dtype(name) for name in DTYPES if hasattr(torch, name)},
        "shapes": [torch.empty(0, 3), torch.tensor(2.5), {"deep": (torch.ones(2, 1, 2), 7)}],
        "values": {"none": None, "text": "\N{SNOWMAN}", "raw": b"\x00\xff", "set": {1, 2}},
        "types": [torch.float8_e5m2, torch.device("cpu"), torch.Size([1, 2]), 2 + 1j, -(2**63)],
        "ordered": OrderedDict(b=torch.zeros(1), a=1),
        7: {"epoch": 3},
    }


@pytest.mark.parametrize("window_nbytes", [64, 16 << 20])
def test_what_torch_saved_comes_back_to_the_last_bit(
    state: dict[Any, Any], window_nbytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_export, "WINDOW_NBYTES", window_nbytes)
    save(state, tmp_path / "a.pt")
    imports.from_torch(tmp_path / "a.pt", tmp_path / "ck")
    done: list[tuple[int, int]] = []
    nbytes = export_file(tmp_path / "ck", tmp_path / "b.pt", progress=lambda *now: done.append(now))
    assert nbytes == (tmp_path / "b.pt").stat().st_size
    assert done[-1][0] == done[-1][1]
    for mmap in (False, True):
        found = load(tmp_path / "b.pt", weights_only=True, mmap=mmap)
        assert_same(state, found)
        pair = found["model"]["0.weight"], found["model"]["2.weight"]
        assert pair[0].data_ptr() == pair[1].data_ptr()
    live, optimizer = trained()
    live.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optim"])


def test_the_archive_is_whole_and_aligned_as_torch_has_it(tmp_path: Path) -> None:
    dc.save({"a": torch.ones(3), "b": torch.ones(1, dtype=torch.uint8)}, tmp_path / "ck")
    export_file(tmp_path / "ck", tmp_path / "b.pt")
    data = (tmp_path / "b.pt").read_bytes()
    with zipfile.ZipFile(tmp_path / "b.pt") as archive:
        assert archive.testzip() is None
        for one in archive.infolist():
            assert one.compress_type == zipfile.ZIP_STORED
            lengths = struct.unpack_from("<2H", data, one.header_offset + 26)
            start = one.header_offset + 30 + sum(lengths)
            assert start % 64 == 0
            assert data[start : start + one.file_size] == archive.read(one)


def test_files_of_any_size_and_with_many_tensors_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than 2 GiB, or 65,535 records, need the longer fields of an archive."""
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 100)
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 2)
    state = {"a": torch.arange(1000), "b": torch.arange(3.0), "c": torch.empty(0)}
    dc.save(state, tmp_path / "ck")
    export_file(tmp_path / "ck", tmp_path / "b.pt")
    monkeypatch.undo()
    assert_same(state, load(tmp_path / "b.pt", mmap=True))
    imports.from_torch(tmp_path / "b.pt", tmp_path / "again")
    with dc.open(tmp_path / "again") as again:
        assert again["model.a"][999:].tolist() == [999]


def test_a_component_is_what_it_was_alone(tmp_path: Path) -> None:
    model, optimizer = trained()
    save(model.state_dict(), tmp_path / "a.pt")
    imports.from_torch(tmp_path / "a.pt", tmp_path / "ck")
    export_file(tmp_path / "ck", tmp_path / "b.pt", only="model")
    assert_same({**model.state_dict()}, {**load(tmp_path / "b.pt")})
    dc.save({"net": {"gen": model}, "optim": optimizer}, tmp_path / "ours")
    export_file(tmp_path / "ours", tmp_path / "c.pt", only="net.gen")
    net().load_state_dict(load(tmp_path / "c.pt"))
    for only in ("model", "net.gen.3", "optim.state.n"):
        with pytest.raises(IncompatibleError, match=r"has no .* of net, optim"):
            export_file(tmp_path / "ours", tmp_path / "d.pt", only=only)
    with pytest.raises(ValueError, match="only=''"):
        export_file(tmp_path / "ours", tmp_path / "d.pt", only="")


def test_an_optimizer_goes_by_the_names_of_its_model(tmp_path: Path) -> None:
    model, optimizer = trained()
    dc.save({"model": model, "optim": optimizer}, tmp_path / "ck")
    export_file(tmp_path / "ck", tmp_path / "a.pt")
    found = load(tmp_path / "a.pt", weights_only=True)["optim"]
    expected: Any = get_optimizer_state_dict(model, optimizer)
    assert_same(expected["state"], found["state"])
    names = [group["params"] for group in expected["param_groups"]]
    assert [group["params"] for group in found["param_groups"]] == names
    fresh = trained()
    set_optimizer_state_dict(*fresh, found)
    assert_same(optimizer.state_dict(), fresh[1].state_dict())
    plain = trained()[1]
    plain.load_state_dict(found)
    assert_same(optimizer.state_dict()["state"], plain.state_dict()["state"])


def save_sharded(rank: int, path: str) -> None:
    model = net()
    fully_shard(model)
    dc.save({"model": model, "mine": dc.PerRank(rank), "step": 4}, path)


@pytest.mark.multi_process
def test_what_ranks_have_sharded_is_whole(tmp_path: Path) -> None:
    run_ranks(save_sharded, str(tmp_path / "ck"), world_size=2)
    with pytest.raises(
        IncompatibleError, match=r"mine has a value for each rank: .*exclude='mine'"
    ):
        export_file(tmp_path / "ck", tmp_path / "a.pt")
    assert not (tmp_path / "a.pt").exists()
    export_file(tmp_path / "ck", tmp_path / "c.pt", exclude="mine")
    assert_same({"model": net().state_dict(), "step": 4}, load(tmp_path / "c.pt"))
    export_file(tmp_path / "ck", tmp_path / "a.pt", only="model")
    assert_same({**net().state_dict()}, {**load(tmp_path / "a.pt")})


def test_names_are_chosen_by_globs(tmp_path: Path) -> None:
    model, optimizer = trained()
    state = {"model": model, "optim": optimizer, "note": {"a": 1}, "list": [torch.ones(1), {}]}
    dc.save(state, tmp_path / "ck")
    export_file(tmp_path / "ck", tmp_path / "a.pt", include=["*.bias", "note"], exclude="optim")
    weights = model.state_dict()
    biases = OrderedDict((n, weights[n]) for n in ("0.bias", "1.bias", "2.bias"))
    some = {"model": biases, "note": {"a": 1}}
    assert_same(some, load(tmp_path / "a.pt"))
    for call in (export_file, plan_export_file):
        with pytest.raises(ValueError, match="'nothing' matches no name"):
            call(tmp_path / "ck", tmp_path / "b.pt", exclude=["optim", "nothing"])
        with pytest.raises(ValueError, match="leaves nothing"):
            call(tmp_path / "ck", tmp_path / "b.pt", only="model", include="optim")


def test_values_that_torch_takes_only_unsafely_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    by: dict[str, object] = defaultdict(list, a=torch.ones(1))
    state = {"when": [datetime.date(2026, 1, 2)], "by": by, "nothing": b""}
    dc.save({"fine": {"x": 1}, **state}, tmp_path / "ck")
    with caplog.at_level(logging.WARNING, "dist_ckpt"):
        export_file(tmp_path / "ck", tmp_path / "a.pt")
    assert "torch.load needs weights_only=False for when, by, nothing" in caplog.text
    assert_same({"fine": {"x": 1}, **state}, load(tmp_path / "a.pt", weights_only=False))


def test_a_tensor_made_of_others_is_refused_by_name(tmp_path: Path) -> None:
    nested = {"w": {"__class__": {"class": "x"}, "data": torch.ones(2)}, "v": torch.ones(1)}
    save({"model": nested}, tmp_path / "a.pt")
    imports.from_torch(tmp_path / "a.pt", tmp_path / "ck")
    with pytest.raises(IncompatibleError, match=r"model\.w is a quantized tensor"):
        export_file(tmp_path / "ck", tmp_path / "b.pt")


def test_files_of_others_are_exported_as_well(tmp_path: Path) -> None:
    save_file({"w": torch.arange(3)}, tmp_path / "model.safetensors")
    export_file(tmp_path / "model.safetensors", tmp_path / "a.pt", only="model")
    assert_same({"w": torch.arange(3)}, load(tmp_path / "a.pt"))


def test_what_is_there_is_replaced_only_if_that_is_asked(tmp_path: Path) -> None:
    dc.save({"w": torch.ones(2)}, tmp_path / "ck")
    (tmp_path / "a.pt").write_text("mine")
    for call in (export_file, plan_export_file):
        with pytest.raises(ExistsError, match="--overwrite"):
            call(tmp_path / "ck", tmp_path / "a.pt")
        with pytest.raises(ValueError, match="inside the source"):
            call(tmp_path / "ck", tmp_path / "ck" / "a.pt")
    assert (tmp_path / "a.pt").read_text() == "mine"
    dry = plan_export_file(tmp_path / "ck", tmp_path / "a.pt", overwrite=True)
    assert dry.replaces == (str(tmp_path / "a.pt"),)
    (tmp_path / "a.pt").chmod(0o640)
    nbytes = export_file(tmp_path / "ck", tmp_path / "a.pt", overwrite=True)
    assert (tmp_path / "a.pt").stat().st_mode & 0o777 == 0o640
    assert 8 < dry.list_files()["a.pt"] < nbytes
    assert_same({"w": torch.ones(2)}, load(tmp_path / "a.pt"))


def test_damage_leaves_nothing(tmp_path: Path) -> None:
    dc.save({"w": torch.ones(1000)}, tmp_path / "ck")
    path = next((tmp_path / "ck").glob("a1-*/*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptError):
        export_file(tmp_path / "ck", tmp_path / "a.pt")
    assert [one.name for one in tmp_path.iterdir()] == ["ck"]


def test_a_file_that_finds_no_room_is_named_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dc.save({"w": torch.ones(1 << 18)}, tmp_path / "ck")
    told: list[int] = []

    def allocate(_: int, nbytes: int) -> bool:
        if nbytes > 1 << 19:
            raise OSError(errno.ENOSPC, "full")
        return True

    monkeypatch.setattr(local_storage, "_allocate", allocate)
    with pytest.raises(StorageError, match=rf"{tmp_path}/a\.pt: full .*free space"):
        export_file(tmp_path / "ck", tmp_path / "a.pt", progress=lambda *done: told.extend(done))
    assert told == []
    assert [one.name for one in tmp_path.iterdir()] == ["ck"]
