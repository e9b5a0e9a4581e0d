"""Folders of torch.distributed.checkpoint, read without it: every value, and no lie of a file."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import random
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

import dist_ckpt as dc
from dist_ckpt.errors import CheckpointError, CorruptError, IncompatibleError, NotFoundError
from dist_ckpt.interop import imports
from dist_ckpt.interop.dcp.adapter import load
from long_mode import sample
from torch_can import write_safetensors_by_dcp

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def state_of() -> dict[str, Any]:
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optim": optimizer.state_dict(),
        "list": [1, {"a": torch.ones(2)}, [torch.zeros(1), "x"]],
        "tuple": (1, torch.arange(3), {"b": torch.ones(1)}),
        "step": 3,
        "plain": {"lr": 0.1, "names": ["a", "b"], "shape": torch.Size([1]), "set": {1}},
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5),
        "half": torch.ones(3, 2, dtype=torch.bfloat16),
        "lasts": torch.arange(48.0)
        .reshape(2, 2, 3, 4)
        .contiguous(memory_format=torch.channels_last),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dcp.save(state_of(), checkpoint_id=tmp_path / "dcp")
    return tmp_path / "dcp"


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what is in a state by DCP's names, however it was nested."""
    if isinstance(value, dict | list | tuple) and type(value) is not torch.Size:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, child in items:
            yield from flat(child, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def equal(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor):
        return bool(type(one) is type(other) and one == other)
    return one.dtype == other.dtype and torch.equal(one, other)


def assert_same(expected: Any, found: Any) -> None:
    ours = dict(flat(found))
    assert ours.keys() == dict(flat(expected)).keys()
    for name, value in flat(expected):
        assert equal(value, ours[name]), name


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_folder_becomes_a_checkpoint(folder: Path, tmp_path: Path, world_size: int) -> None:
    report = imports.from_dcp(folder, tmp_path / "ours", world_size=world_size)
    assert report.num_tensors == 24
    assert dc.verify(tmp_path / "ours").ok
    found: dict[str, Any] = {}
    dc.load(found, tmp_path / "ours")
    assert_same(state_of(), found)
    assert type(found["tuple"]) is tuple
    assert type(found["optim"]["param_groups"]) is list
    assert found["optim"]["param_groups"][0]["betas"] == (0.9, 0.999)
    with dc.open(tmp_path / "ours") as stored:
        assert stored.world_size == world_size


def test_what_dcp_reads_of_it_is_the_same(folder: Path, tmp_path: Path) -> None:
    theirs = state_of()
    for tensor in (value for _, value in flat(theirs) if isinstance(value, torch.Tensor)):
        with torch.no_grad():
            tensor.zero_()
    dcp.load(theirs, checkpoint_id=folder)
    ours: dict[str, Any] = {}
    load(ours, folder)
    assert_same(theirs, ours)


def test_a_folder_fills_a_state_where_it_is(folder: Path) -> None:
    expected = state_of()
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    state: dict[str, Any] = {
        "model": model,
        "step": 0,
        "half": torch.zeros(3, 2, dtype=torch.bfloat16),
    }
    report = load(state, folder, include=["model", "step", "half"])
    assert state["step"] == 3
    assert report.step is None
    assert_same(expected["model"], model.state_dict())
    assert torch.equal(state["half"], expected["half"])
    with pytest.raises(IncompatibleError, match=r"does not have .*optim"):
        load(state, folder)
    live = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    load({"net": live}, folder, include="net", rename={"model.*": "net.*"})
    assert_same(expected["model"], live.state_dict())


def test_an_optimizer_takes_its_state_by_the_names_of_its_parameters(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    def made() -> tuple[Any, Any]:
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        return model, optimizer

    saved, live = made(), made()
    model_state, optim_state = get_state_dict(*saved)
    dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=tmp_path / "dcp")
    load({"model": live[0], "optim": live[1]}, tmp_path / "dcp")
    assert_same(saved[0].state_dict(), live[0].state_dict())
    assert_same(saved[1].state_dict(), live[1].state_dict())


def test_a_folder_is_refused_where_no_pickle_is_read(folder: Path) -> None:
    for call in (dc.open, lambda path: dc.load({}, path)):
        with pytest.raises(IncompatibleError, match=r"interop\.dcp\.load.*import --from dcp"):
            call(folder)


# --- what is damaged, or no checkpoint can hold -----------------------------------------------


def metadata_of(folder: Path) -> Metadata:
    found: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    return found


def put(folder: Path, metadata: object) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def refused(folder: Path, kind: type[Exception], message: str, *wanted: str) -> str:
    state: dict[str, Any] = {"model": {"0.weight": torch.zeros(4, 3)}, **dict.fromkeys(wanted)}
    with pytest.raises(kind, match=message) as error:
        load(state, folder, include=["model.0.weight", *wanted])
    assert not state["model"]["0.weight"].any()
    with pytest.raises(kind, match=message):
        imports.from_dcp(folder, folder.parent / "ours")
    assert not (folder.parent / "ours").exists()
    return str(error.value)


def test_without_metadata_it_is_told_apart(folder: Path) -> None:
    (folder / ".metadata").unlink()
    refused(folder, NotFoundError, r"\.metadata: the file does not exist.*did not end")
    shutil.rmtree(folder)
    refused(folder, NotFoundError, r"\.metadata: the file does not exist")


def test_a_file_that_is_gone_is_named(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()
    refused(folder, NotFoundError, r"__0_0\.distcp: the file does not exist, but")


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.9, 0.999])
def test_a_file_that_is_cut_off_is_named(folder: Path, kept: float) -> None:
    path = folder / "__0_0.distcp"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * kept)])
    refused(folder, CorruptError, r"__0_0\.distcp")


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.999])
def test_metadata_that_is_cut_off_is_named(folder: Path, kept: float) -> None:
    data = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(data[: int(len(data) * kept)])
    refused(folder, CorruptError, r"\.metadata")


WEIGHT = "model.0.weight"


def chunks(metadata: Metadata) -> list[ChunkStorageMetadata]:
    entry = metadata.state_dict_metadata[WEIGHT]
    assert isinstance(entry, TensorStorageMetadata)
    return entry.chunks


def of_weight(metadata: Metadata, **changes: Any) -> None:
    """Change where the weight lies."""
    index = MetadataIndex(WEIGHT, [0, 0])
    metadata.storage_data[index] = replace(metadata.storage_data[index], **changes)


def shrunk(metadata: Metadata) -> None:
    chunks(metadata)[0].sizes = torch.Size([2, 3])


def overlapping(metadata: Metadata) -> None:
    chunks(metadata).append(ChunkStorageMetadata(torch.Size([2, 0]), torch.Size([4, 3])))
    there = metadata.storage_data[MetadataIndex(WEIGHT, [0, 0])]
    metadata.storage_data[MetadataIndex(WEIGHT, [2, 0])] = there


def without_parts(metadata: Metadata) -> None:
    chunks(metadata).clear()


def larger(metadata: Metadata) -> None:
    metadata.state_dict_metadata[WEIGHT].size = torch.Size([5, 3])  # type: ignore[union-attr]


def other_dtype(metadata: Metadata) -> None:
    metadata.state_dict_metadata[WEIGHT].properties.dtype = torch.float16  # type: ignore[union-attr]


def unknown_dtype(metadata: Metadata) -> None:
    metadata.state_dict_metadata[WEIGHT].properties.dtype = torch.qint8  # type: ignore[union-attr]


def nowhere(metadata: Metadata) -> None:
    del metadata.storage_data[MetadataIndex(WEIGHT, [0, 0])]


def of_other_dimensions(metadata: Metadata) -> None:
    chunks(metadata)[0].offsets = torch.Size([0])


def a_value_for_it(metadata: Metadata) -> None:
    there = metadata.storage_data
    weight, step = MetadataIndex(WEIGHT, [0, 0]), MetadataIndex("step")
    there[weight], there[step] = there[step], there[weight]


def a_name_of_two(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model"] = metadata.state_dict_metadata["step"]
    metadata.storage_data[MetadataIndex("model")] = metadata.storage_data[MetadataIndex("step")]
    del metadata.state_dict_metadata["step"]


def two_containers(metadata: Metadata) -> None:
    """As of {"plain": {"x": {"lr": 0.1}}, "plain.x": {"set": {1}}}."""
    for old, new in (("plain.lr", ("plain", "x", "lr")), ("plain.set", ("plain.x", "set"))):
        name = ".".join(new)
        metadata.state_dict_metadata[name] = metadata.state_dict_metadata.pop(old)
        there = metadata.storage_data
        there[MetadataIndex(name)] = there.pop(MetadataIndex(old))
        metadata.planner_data[name] = new


LIES: dict[str, tuple[Callable[[Metadata], None], type[CheckpointError], str]] = {
    "another file": (
        lambda m: of_weight(m, relative_path="../x"),
        CorruptError,
        "not in the same folder",
    ),
    "a whole path": (
        lambda m: of_weight(m, relative_path="/etc/passwd"),
        CorruptError,
        "not in the same folder",
    ),
    "beyond the end": (lambda m: of_weight(m, offset=1 << 40), CorruptError, "cut off"),
    "before the start": (lambda m: of_weight(m, offset=-1), CorruptError, "impossible offset"),
    "of another type": (lambda m: of_weight(m, length="x"), CorruptError, "'x' in place of a int"),
    "no archive": (
        lambda m: of_weight(m, offset=m.storage_data[MetadataIndex(WEIGHT, [0, 0])].offset + 5),
        CorruptError,
        "not a file of torch.save",
    ),
    "in another": (lambda m: of_weight(m, offset=5), CorruptError, "overlaps another item"),
    "extensions": (
        lambda m: of_weight(m, transform_descriptors=["stream.zstd"]),
        IncompatibleError,
        "extensions.*zstd",
    ),
    "incomplete": (shrunk, CorruptError, r"metadata says \[2, 3\]"),
    "overlapping": (overlapping, CorruptError, "model.0.weight"),
    "without parts": (without_parts, CorruptError, "model.0.weight"),
    "not covered": (larger, CorruptError, "model.0.weight"),
    "another dtype": (other_dtype, CorruptError, "of float32, but the metadata says .* of float16"),
    "an unknown dtype": (unknown_dtype, IncompatibleError, "torch.qint8"),
    "nowhere": (nowhere, CorruptError, "no location of model.0.weight"),
    "other dimensions": (of_other_dimensions, CorruptError, "in 1 of 2 dimensions"),
    "a value for a tensor": (a_value_for_it, CorruptError, "3 in place of a tensor"),
    "a name of two": (a_name_of_two, IncompatibleError, "model is the name of two things"),
    "two containers of a name": (two_containers, IncompatibleError, r"plain\.x is the name of two"),
}


def test_a_flipped_bit_is_named_by_an_import(tmp_path: Path) -> None:
    value = torch.arange(30_000.0)
    dcp.save({"a": torch.ones(3), "w": value}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    path = tmp_path / "dcp" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[data.index(value.numpy().tobytes()) + 60_000] ^= 4
    path.write_bytes(data)
    with pytest.raises(CorruptError, match=r"__0_0\.distcp, w: its record data/0 has the CRC-32"):
        imports.from_dcp(tmp_path / "dcp", tmp_path / "ours")


@pytest.mark.parametrize("name", LIES)
def test_metadata_that_lies_is_named(folder: Path, name: str) -> None:
    change, kind, message = LIES[name]
    metadata = metadata_of(folder)
    change(metadata)
    put(folder, metadata)
    assert str(folder) in refused(folder, kind, message)


class Calls:
    """What is pickled as a call."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


def test_metadata_that_runs_something_runs_nothing(folder: Path, tmp_path: Path) -> None:
    run = Calls(os.system, (f"touch {tmp_path / 'ran'}",))
    whole = metadata_of(folder)
    hostile: list[Any] = [
        run,
        replace(whole, planner_data=run),
        replace(whole, storage_data={MetadataIndex("a"): run}),
    ]
    if hasattr(whole, "version"):  # not in torch 2.7
        hostile_version: Any = Calls(eval, ("1",))
        hostile.append(replace(whole, version=hostile_version))
    for metadata in hostile:
        put(folder, metadata)
        refused(
            folder, IncompatibleError, r"names (posix\.system|builtins\.eval), which is not run"
        )
    assert not (tmp_path / "ran").exists()


def test_a_value_that_runs_something_runs_nothing(tmp_path: Path) -> None:
    run = Calls(os.system, (f"touch {tmp_path / 'ran'}",))
    dcp.save({"model": {"0.weight": torch.ones(4, 3)}, "x": run}, checkpoint_id=tmp_path / "dcp")
    refused(tmp_path / "dcp", IncompatibleError, r"dcp: x names posix\.system.*--exclude", "x")
    load({"model": {"0.weight": torch.zeros(4, 3)}}, tmp_path / "dcp", include="model")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("metadata", [None, 5, [], {}, {"a": 1}, torch.Size([1])])
def test_metadata_of_something_else_is_refused(folder: Path, metadata: object) -> None:
    put(folder, metadata)
    refused(folder, CorruptError, r"in place of a Metadata; use another")


@pytest.mark.skipif(not write_safetensors_by_dcp(), reason="this DCP writes none")
def test_files_of_safetensors_in_a_folder_of_dcp_are_refused(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    writer = dcp.FileSystemWriter(
        tmp_path / "dcp", serialization_format=SerializationFormat.SAFETENSORS
    )
    dcp.save({"model": {"0.weight": torch.ones(4, 3)}}, storage_writer=writer)
    refused(tmp_path / "dcp", CheckpointError, r"__0_0\.distcp, model\.0\.weight")


def test_what_is_no_plain_data_is_named(tmp_path: Path) -> None:
    state = {"model": {"0.weight": torch.ones(4, 3)}, "own": zipfile.ZipInfo("a")}
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    refused(tmp_path / "dcp", IncompatibleError, r"dcp: own names zipfile\.ZipInfo", "own")


def test_what_is_not_wanted_of_a_folder_may_be_anything(tmp_path: Path) -> None:
    args = argparse.Namespace(lr=1)
    saved = {"w": torch.ones(3), "deep": {"args": args, "n": 7}, "args": args}
    dcp.save(saved, checkpoint_id=tmp_path / "a")
    w = torch.zeros(3)
    load({"w": w, "args": None}, tmp_path / "a", include="w")
    assert w.tolist() == [1, 1, 1]
    state: dict[str, Any] = {"w": torch.zeros(3)}
    report = load(state, tmp_path / "a", strict=False)
    assert {*report.unexpected} == {"args", "deep.args", "deep.n"}
    assert state["w"].tolist() == [1, 1, 1]
    state = {"deep": {"n": 0, "args": None}}
    load(state, tmp_path / "a", include="deep", exclude="deep.args")
    assert state == {"deep": {"n": 7, "args": None}}
    with pytest.raises(IncompatibleError, match=r"does not have .*args, deep.*include"):
        load({"w": w}, tmp_path / "a")

    ways: list[tuple[dict[Any, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"w": w, "args": None}, {"strict": False}),
        ({"w": w, "deep": {"args": None}}, {"include": ["w", "deep"]}),
        ({"v": 5, "w": w}, {"rename": {"args": "v"}}),
    ]
    named = r"args names argparse\.Namespace.*leave it out"
    for state, options in ways:
        with pytest.raises(IncompatibleError, match=named):
            load(state, tmp_path / "a", **options)
    source: Any = dc.Source(tmp_path / "a", rename={"args": "v"})
    with pytest.raises(IncompatibleError, match=named):
        load({"v": 5, "w": w}, source)
    with pytest.raises(ValueError, match="include=\\[\\]"):
        load({"w": w}, tmp_path / "a", include=[])
    with pytest.raises(TypeError, match="state"):
        load(None, tmp_path / "a")  # type: ignore[arg-type]


def test_a_part_of_a_list_is_wanted_with_what_is_beside_it(tmp_path: Path) -> None:
    dcp.save({"rows": [1, argparse.Namespace()], "n": 1}, checkpoint_id=tmp_path / "a")
    for strict in (True, False):
        with pytest.raises(IncompatibleError, match=r"rows names argparse.*exclude='rows'"):
            load({"rows": [0, torch.zeros(1)]}, tmp_path / "a", include="rows.0", strict=strict)
    state: dict[Any, Any] = {}
    load(state, tmp_path / "a", exclude="rows")
    assert state == {"n": 1}


@pytest.mark.parametrize("is_flat", [True, False])
def test_the_groups_of_an_optimizer_are_read_whatever_is_loaded_of_it(
    tmp_path: Path, is_flat: Any
) -> None:
    optim = state_of()["optim"]
    optim["param_groups"][0]["amsgrad"] = argparse.Namespace()
    planner = DefaultSavePlanner(flatten_state_dict=is_flat)
    dcp.save({"optim": optim, "n": 1}, checkpoint_id=tmp_path / "a", planner=planner)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    live = {"model": model, "optim": torch.optim.AdamW(model.parameters(), amsgrad=True), "n": 0}
    ways: tuple[dict[str, Any], ...] = (
        {"include": "optim.state"},
        {"exclude": "optim.param_groups", "strict": False},
    )
    for options in ways:
        with pytest.raises(IncompatibleError, match=r"param_groups.* names.*exclude='optim'"):
            load(live, tmp_path / "a", **options)
    load(live, tmp_path / "a", exclude=["optim", "model"])
    assert live["n"] == 1


def test_bytes_at_random_are_read_or_refused(folder: Path, tmp_path: Path) -> None:
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    refusals = 0
    for number in sample(range(200), 3):
        choose = random.Random(number)
        name = choose.choice([*whole])
        data = bytearray(whole[name])
        for _ in range(choose.randint(1, 4)):
            data[choose.randrange(len(data))] = choose.randrange(256)
        (folder / name).write_bytes(data)
        try:
            imports.from_dcp(folder, tmp_path / f"ours-{number}")
        except CheckpointError:
            refusals += 1
        (folder / name).write_bytes(whole[name])
    assert 0 < refusals < 200


IMPORT = """
import sys
from dist_ckpt.interop import imports

imports.from_dcp(sys.argv[1], sys.argv[2], world_size=2)
assert "torch" not in sys.modules
with open("/proc/self/status") as status:
    print(next(line.split()[1] for line in status if line.startswith("VmHWM")))
"""


def test_it_takes_less_memory_than_the_folder_has_bytes(tmp_path: Path) -> None:
    state = {f"t{number}": torch.full((16 << 20,), float(number)) for number in range(16)}
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    nbytes = sum(path.stat().st_size for path in (tmp_path / "dcp").iterdir())
    command = [sys.executable, "-c", IMPORT, f"{tmp_path}/dcp", f"{tmp_path}/ours"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * 1024 < nbytes * 0.4
    with dc.open(tmp_path / "ours") as found:
        assert found["t15"][-1:].data.tobytes() == torch.full((1,), 15.0).numpy().tobytes()
    del state
    shutil.rmtree(tmp_path / "dcp")
    shutil.rmtree(tmp_path / "ours")


def test_the_pickles_in_it_may_be_in_memory(tmp_path: Path) -> None:
    """What DCP writes is the archive of torch.save, byte for byte."""
    dcp.save({"x": [1, 2]}, checkpoint_id=tmp_path / "dcp")
    data = io.BytesIO((tmp_path / "dcp" / "__0_0.distcp").read_bytes())
    with zipfile.ZipFile(data) as archive:
        assert any(name.endswith("data.pkl") for name in archive.namelist())


@pytest.mark.parametrize(
    "key", [None, True, 1.5, ("a",), b"x", 10**5000], ids=lambda key: type(key).__name__
)
def test_a_path_of_what_is_no_key_is_not_followed(
    folder: Path, tmp_path: Path, key: object
) -> None:
    metadata = metadata_of(folder)
    metadata.planner_data["step"] = (key,)
    name = str(key) if type(key) is not int else "step"
    metadata.state_dict_metadata[name] = metadata.state_dict_metadata.pop("step")
    metadata.storage_data[MetadataIndex(name)] = metadata.storage_data.pop(MetadataIndex("step"))
    metadata.planner_data[name] = (key,)
    put(folder, metadata)
    imports.from_dcp(folder, tmp_path / "ours")
    with dc.open(tmp_path / "ours") as found:
        assert found.objects[name] == 3
