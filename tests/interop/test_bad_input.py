"""Bad input at every door of an import: refused by name, with what to do, and nothing is left."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

import dist_ckpt as dc
from dist_ckpt.errors import CheckpointError, CorruptError, IncompatibleError, NotFoundError
from dist_ckpt.interop import imports, shrew

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

GOLDEN = Path(__file__).parents[1] / "golden" / "foreign"


class Calls:
    """What is pickled as a call."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


# --- a value in a pickle, at each door --------------------------------------------------------


def at_torch(value: object, folder: Path) -> Path:
    torch.save({"w": torch.ones(2), "x": value}, folder / "a.pt")
    return folder / "a.pt"


def at_dcp(value: object, folder: Path) -> Path:
    dcp.save({"w": torch.ones(2), "x": value}, checkpoint_id=folder / "dcp")
    return folder / "dcp"


def at_lightning(value: object, folder: Path) -> Path:
    state = {"pytorch-lightning_version": "2.6", "state_dict": {"w": torch.ones(2)}, "x": value}
    torch.save(state, folder / "a.ckpt")
    return folder / "a.ckpt"


def at_accelerate(value: object, folder: Path) -> Path:
    torch.save({"x": value}, folder / "custom_checkpoint_0.pkl")
    return folder


def at_deepspeed(value: object, folder: Path) -> Path:
    state = {"module": {"w": torch.ones(2)}, "x": value}
    torch.save(state, folder / "mp_rank_00_model_states.pt")
    return folder


def at_megatron(value: object, folder: Path) -> Path:
    shutil.copytree(GOLDEN / "megatron" / "made", folder, dirs_exist_ok=True)
    torch.save({"iteration": 1, "x": value}, folder / "common.pt")
    return folder


DOORS: dict[str, tuple[Callable[[object, Path], Path], Callable[..., Any]]] = {
    "torch": (at_torch, imports.from_torch),
    "dcp": (at_dcp, imports.from_dcp),
    "lightning": (at_lightning, imports.from_lightning),
    "accelerate": (at_accelerate, imports.from_accelerate),
    "deepspeed": (at_deepspeed, imports.from_deepspeed),
    "megatron": (at_megatron, imports.from_megatron),
}


def objects(*values: object) -> np.ndarray:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def values_of(marker: Path) -> dict[str, object]:
    """Return what cannot be imported: most of it would make the file `marker`."""
    command = f"touch {marker}"
    python = f"__import__('os').system({command!r})"
    by_torch = torch._tensor._rebuild_from_type_v2
    return {
        "a command": Calls(os.system, (command,)),
        "an expression": Calls(eval, (python,)),
        "a storage of pickles": Calls(torch.storage._load_from_bytes, (b"abc",)),
        "a tensor by a command": Calls(by_torch, (os.system, torch.Tensor, (command,), {})),
        "a key that is a tuple": {"x": {(1, 2): 3}},
        "a key that is a fraction": {0.5: 1},
        "an array of commands": objects(Calls(os.system, (command,)), 1),
        "an array of objects": objects({}, 1),
        "an array of text": np.array(["a", "b"]),
        "an array of times": np.array(["2026-01-01"], dtype="datetime64[s]"),
        "an array in columns": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "a big-endian array": np.arange(3, dtype=">i4"),
        "an array of records": np.zeros(2, dtype=[("a", "i4")]),
    }


# Of keys DCP makes text, before it saves them.
CASES = [
    (door, name)
    for door in DOORS
    for name in values_of(Path("x"))
    if door != "dcp" or not name.startswith("a key")
]


@pytest.mark.parametrize(("door", "name"), CASES)
def test_a_value_that_is_no_plain_data_is_named_and_can_be_left_out(
    door: str, name: str, tmp_path: Path
) -> None:
    make, call = DOORS[door]
    marker, folder = tmp_path / "ran", tmp_path / "made"
    folder.mkdir()
    made = make(values_of(marker)[name], folder)
    with pytest.raises(IncompatibleError, match=r"x (names|is|has) .*--exclude \S*x\b") as error:
        call(made, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
    excluded = str(error.value).partition("exclude='")[2].partition("'")[0]
    # What is left of a folder of accelerate then is nothing: that is said.
    if door != "accelerate":
        call(made, tmp_path / "ours", exclude=excluded)
    assert not marker.exists()


# --- files of torch.save ------------------------------------------------------------------------


def test_a_file_without_tensors_is_imported(tmp_path: Path) -> None:
    saved = {"epoch": 3, "names": ["a", {"b": (1, 2)}], 5: None}
    torch.save(saved, tmp_path / "a.pt")
    imports.from_torch(tmp_path / "a.pt", tmp_path / "ours")
    found: dict[Any, Any] = {}
    dc.load(found, tmp_path / "ours")
    assert found == saved
    torch.save({(1, 2): 3}, tmp_path / "b.pt")
    with pytest.raises(IncompatibleError, match=r"b\.pt: the state is a dict with the key a tuple"):
        imports.from_torch(tmp_path / "b.pt", tmp_path / "other")


@pytest.mark.parametrize("door", [name for name in DOORS if name not in ("dcp", "megatron")])
def test_a_name_that_no_checkpoint_has_is_said(door: str, tmp_path: Path) -> None:
    make, call = DOORS[door]
    made = make({"x" * 5000: torch.ones(1)}, tmp_path)
    with pytest.raises(IncompatibleError, match="an empty, too long or invalid name"):
        call(made, tmp_path / "ours")


def test_names_of_dcp_are_bounded_too(tmp_path: Path) -> None:
    dcp.save({"x" * 5000: torch.ones(1)}, checkpoint_id=tmp_path / "dcp")
    with pytest.raises(IncompatibleError, match=r"dcp: xxx.*too long"):
        imports.from_dcp(tmp_path / "dcp", tmp_path / "ours")


def test_a_folder_is_no_file_of_torch_save(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for call in (imports.from_torch, imports.from_lightning):
        with pytest.raises(IncompatibleError, match=r"folder is not a regular file.*import --help"):
            call(tmp_path / "folder", tmp_path / "ours")


@pytest.mark.parametrize("door", DOORS)
def test_what_is_below_a_file_is_not_there(door: str, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "a.pt")
    below = tmp_path / "a.pt" / "below"
    with pytest.raises(NotFoundError, match=r"a\.pt/below"):
        DOORS[door][1](below, tmp_path / "ours")


def test_files_of_dcp_may_be_links(tmp_path: Path) -> None:
    """As what is downloaded from a hub is."""
    made = at_dcp(5, tmp_path)
    for name in (".metadata", "__0_0.distcp"):
        (made / name).rename(tmp_path / f"held{name}")
        (made / name).symlink_to(tmp_path / f"held{name}")
    assert imports.from_dcp(made, tmp_path / "ours").num_tensors == 1
    (made / "__0_0.distcp").unlink()
    (made / "__0_0.distcp").symlink_to("/dev/zero")
    with pytest.raises(CorruptError, match="/dev/zero"):
        imports.from_dcp(made, tmp_path / "other")


def stream(*parts: bytes) -> bytes:
    return b"\x80\x02" + b"".join(parts) + b"."


def archive(folder: Path, data: bytes) -> Path:
    """A file of torch.save with a pickle of somebody's."""
    writer = torch._C.PyTorchFileWriter(str(folder / "a.pt"))
    writer.write_record("data.pkl", data, len(data))
    writer.write_end_of_file()
    return folder / "a.pt"


def test_what_is_left_out_of_a_bomb_of_dicts_is_bounded(tmp_path: Path) -> None:
    """A dict of two of the one before, which each have names of their own."""
    one = b"0}(X\x01\0\0\0ah\0X\x01\0\0\0bh\0uq\0"
    bomb = stream(b"}X\x01\0\0\0x}q\0X\x01\0\0\0kNsq\0" + one * 40 + b"s")
    with pytest.raises(CorruptError, match="far more"):
        imports.from_torch(archive(tmp_path, bomb), tmp_path / "ours", exclude="*.none*")


@pytest.mark.parametrize("what", ["groups", "numbers"])
def test_a_bomb_of_an_optimizer_is_bounded(what: str, tmp_path: Path) -> None:
    """One group many times; or numbers of which all have the hash 0."""
    if what == "groups":
        names = [f"p{number}" for number in range(2000)]
        group = {"param_names": names, "params": [*range(2000)]}
        optimizer: dict[str, Any] = {"state": {}, "param_groups": [group] * 20_000}
    else:
        numbers = [number * ((1 << 61) - 1) for number in range(100, 50_000)]
        names = [f"p{number}" for number in range(len(numbers))]
        optimizer = {"state": {}, "param_groups": [{"param_names": names, "params": numbers}]}
    state = {"pytorch-lightning_version": "2.6", "state_dict": {"w": torch.ones(2)}}
    torch.save({**state, "optimizer_states": [optimizer]}, tmp_path / "a.ckpt")
    start = time.process_time()
    if what == "groups":
        with pytest.raises(CorruptError, match="far more"):
            imports.from_lightning(tmp_path / "a.ckpt", tmp_path / "ours")
    else:
        imports.from_lightning(tmp_path / "a.ckpt", tmp_path / "ours")
    assert time.process_time() - start < 8


def test_a_directory_of_no_size_that_an_archive_has_takes_no_memory(tmp_path: Path) -> None:
    """A file of 16 GiB, of which there is nothing but the end."""
    nbytes = 16 << 30
    with open(tmp_path / "a.pt", "wb") as file:
        file.write(b"PK\x03\x04")
        file.truncate(nbytes)
        file.seek(nbytes)
        file.write(struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 1, 1, nbytes - 8, 4))
        file.write(struct.pack("<4sLQL", b"PK\x06\x07", 0, nbytes, 1))
        file.write(struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 1, 1, 1, 1, 0))
    with pytest.raises(CorruptError, match=f"a directory of {nbytes - 8} bytes"):
        imports.from_torch(tmp_path / "a.pt", tmp_path / "ours")


@pytest.mark.parametrize("checked", [True, False])
def test_a_pickle_that_is_not_what_was_written_is_told(tmp_path: Path, *, checked: bool) -> None:
    """Torch does not look at the checksums; it may also write none."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(checked)
    try:
        torch.save({"w": torch.ones(2), "epoch": 77}, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    data = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "a.pt").write_bytes(data.replace(b"KM", b"KN"))
    assert data != (tmp_path / "a.pt").read_bytes()
    if checked:
        with pytest.raises(CorruptError, match=r"a\.pt: its record data\.pkl has another checksum"):
            imports.from_torch(tmp_path / "a.pt", tmp_path / "ours")
    else:
        imports.from_torch(tmp_path / "a.pt", tmp_path / "ours")


def test_elements_far_apart_are_read_without_what_is_between(tmp_path: Path) -> None:
    held = torch.zeros(2, 30 << 20)  # 240 MB
    apart = held[:, :: 10 << 20]
    apart += torch.arange(6.0).view(2, 3)
    torch.save({"w": apart, "t": apart.t()}, tmp_path / "a.pt")
    tracemalloc.start()
    try:
        imports.from_torch(tmp_path / "a.pt", tmp_path / "ours")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20
    with dc.open(tmp_path / "ours") as found:
        assert found["model.w"][...].torch().tolist() == [[0, 1, 2], [3, 4, 5]]
        assert found["model.t"][...].torch().tolist() == [[0, 3], [1, 4], [2, 5]]


# --- folders of frameworks ----------------------------------------------------------------------


def test_a_short_file_of_deepspeed_tells_not_of_many_parameters(tmp_path: Path) -> None:
    """One group of names, a thousand times."""
    shutil.copytree(GOLDEN / "deepspeed-zero3" / "made", tmp_path / "made")
    path = tmp_path / "made" / "global_step3" / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    state = torch.load(path, weights_only=False)
    state["param_shapes"] *= 1000
    torch.save(state, path)
    with pytest.raises(CorruptError, match="two parameters are"):
        imports.from_deepspeed(tmp_path / "made", tmp_path / "ours")


# --- safetensors --------------------------------------------------------------------------------


def entry(start: int, stop: int, **changes: object) -> dict[str, object]:
    return {"dtype": "U8", "shape": [stop - start], "data_offsets": [start, stop], **changes}


OVERLAPPING = {
    "the same": ({"a": entry(0, 8), "b": entry(0, 8)}, r"'a' and 'b' have common bytes"),
    "a part": ({"a": entry(4, 8), "b": entry(0, 5)}, r"'b' and 'a' have"),
    "one in another": ({"a": entry(0, 16), "b": entry(2, 3), "c": entry(9, 10)}, r"'a' and 'b'"),
    "a long name": ({"x" * 4091: entry(0, 8)}, "not a tensor of a safetensors file"),
}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_a_header_that_makes_much_of_little_is_refused(name: str, tmp_path: Path) -> None:
    doc, message = OVERLAPPING[name]
    header = json.dumps(doc).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    for call in (imports.from_hf, lambda source, _: dc.load({}, source)):
        with pytest.raises(CorruptError, match=message):
            call(path, tmp_path / "ours")


def test_neighbours_and_empty_tensors_have_nothing_in_common(tmp_path: Path) -> None:
    doc = {"a": entry(0, 8), "b": entry(8, 16), "c": entry(8, 8), "d": entry(0, 0)}
    header = json.dumps(doc).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    assert imports.from_hf(tmp_path / "a.safetensors", tmp_path / "ours").num_tensors == 4


UNCOVERED = {
    "bytes at the end": ({"a": entry(0, 15)}, r"1 bytes after its last tensor, 'a'"),
    "no tensor at all": ({}, r"16 bytes after its last tensor, the header"),
    "a hole": ({"a": entry(0, 4), "b": entry(8, 16)}, r"4 bytes between 'a' and 'b'"),
    "a hole at the start": ({"a": entry(2, 16)}, r"2 bytes between the header and 'a'"),
    "an empty one within": (
        {"a": entry(0, 16), "b": entry(4, 4)},
        r"'a' and 'b' have common bytes",
    ),
}


@pytest.mark.parametrize("name", UNCOVERED)
def test_bytes_of_no_tensor_are_refused_as_by_the_library(name: str, tmp_path: Path) -> None:
    doc, message = UNCOVERED[name]
    header = json.dumps(doc).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    with pytest.raises(SafetensorError), safe_open(path, "pt"):
        pass
    for call in (imports.from_hf, lambda source, _: dc.load({}, source)):
        with pytest.raises(CorruptError, match=message):
            call(path, tmp_path / "ours")


def test_a_second_copy_at_the_end_is_refused(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors")
    data = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "a.safetensors").write_bytes(data * 2)
    with pytest.raises(CorruptError, match=f"{len(data)} bytes after its last tensor, 'w'"):
        dc.load({}, tmp_path / "a.safetensors")


# --- pointers of Git LFS ------------------------------------------------------------------------

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 7\n"


@pytest.mark.parametrize("name", ["a.pt", "a.ckpt", "a.safetensors", "a.shrew"])
@pytest.mark.parametrize("is_link", [False, True])
def test_a_pointer_in_place_of_a_file_is_named(name: str, tmp_path: Path, *, is_link: bool) -> None:
    path = tmp_path / name
    stored = tmp_path / "blob" if is_link else path
    stored.write_text(POINTER)
    if is_link:
        path.symlink_to(stored)
    target = tmp_path / "ours"
    calls: list[Callable[[Path], Any]] = [
        lambda source: dc.load({}, source),
        dc.open,
        shrew.read,
        lambda source: shrew.import_file(source, target),
        lambda source: imports.from_torch(source, target),
        lambda source: imports.from_lightning(source, target),
        lambda source: imports.from_hf(source, target),
    ]
    for call in calls:
        with pytest.raises(CorruptError, match=f"{name} is a pointer of Git LFS.*`git lfs pull`"):
            call(path)
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "model.safetensors"])
def test_a_pointer_in_a_folder_of_hugging_face_is_named(name: str, tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    if name.endswith("json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / name).write_text(POINTER)
    with pytest.raises(CorruptError, match=f"{name} is a pointer of Git LFS.*`git lfs pull`"):
        dc.load({}, tmp_path)


# --- keys of DCP --------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [imports.from_dcp, imports.from_lightning])
def test_an_empty_key_of_dcp_is_named(call: Callable[..., Any], tmp_path: Path) -> None:
    dcp.save({"": torch.ones(2)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    path = tmp_path / "dcp" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.planner_data = {"": ()}
    path.write_bytes(pickle.dumps(metadata))
    torch.save({"pytorch-lightning_version": "2.6"}, tmp_path / "dcp" / "meta.pt")
    with pytest.raises(IncompatibleError, match="dcp: '' is an empty, too long or invalid name"):
        call(tmp_path / "dcp", tmp_path / "ours")


FILES = ["../out.safetensors", "../../etc/passwd", "/etc/passwd", "a\0b", "..", ".", "", "x/../m"]


@pytest.mark.parametrize("file", FILES)
def test_an_index_names_files_beside_it_only(file: str, tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "out.safetensors")
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": file}}))
    with pytest.raises(CorruptError, match=r"index\.json names the file .* not in the same folder"):
        imports.from_hf(folder, tmp_path / "ours")


def test_an_index_of_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(CorruptError, match=r"index\.json names no tensor"):
        imports.from_hf(tmp_path, tmp_path / "ours")


# --- many ---------------------------------------------------------------------------------------


def test_memory_is_bounded_by_what_a_file_names(tmp_path: Path) -> None:
    """A thousand shapes of 2**40 elements in a file of some hundred kB take nothing."""
    expanded = torch.ones(1).expand(1 << 40)
    torch.save({f"w{n}": expanded for n in range(1000)}, tmp_path / "a.pt")
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="w0 is an expanded tensor"):
            imports.from_torch(tmp_path / "a.pt", tmp_path / "ours")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20
