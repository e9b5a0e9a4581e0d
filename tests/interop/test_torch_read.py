"""Files of torch.save, read as a checkpoint: every value as torch.load has it, and no lie."""

from __future__ import annotations

import datetime
import random
import re
import struct
import warnings
import zipfile
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dist_ckpt as dc
from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.planning.name_selection import SELECT_ALL
from dist_ckpt.errors import CheckpointError, CorruptError, IncompatibleError, NotFoundError
from dist_ckpt.interop import imports
from dist_ckpt.interop.readers.nested_state import ImportFilter
from dist_ckpt.interop.readers.virtual_checkpoint import shift_crc32
from long_mode import sample


def same(expected: Any, found: Any, name: str = "state") -> None:
    """Assert that two states are the same, of all types and bit for bit."""
    if isinstance(expected, torch.Tensor):
        one, other = expected.detach().contiguous(), found.contiguous()
        assert (one.dtype, one.shape) == (other.dtype, other.shape), name
        assert torch.equal(
            one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
        ), name
    elif isinstance(expected, np.ndarray):
        assert type(found) is np.ndarray, name
        assert expected.dtype == found.dtype, name
        np.testing.assert_array_equal(expected, found)
    elif isinstance(expected, dict):
        assert type(expected) is type(found), name
        assert list(expected) == list(found), name
        for key, value in expected.items():
            same(value, found[key], f"{name}.{key}")
    elif isinstance(expected, list | tuple) and type(expected) is not torch.Size:
        assert type(expected) is type(found), name
        assert len(expected) == len(found), name
        for number, (one, other) in enumerate(zip(expected, found, strict=True)):
            same(one, other, f"{name}.{number}")
    else:
        assert type(expected) is type(found), name
        assert expected == found, name
        assert getattr(expected, "dtype", None) == getattr(found, "dtype", None), name


def imported(tmp_path: Path, state: Any, **options: Any) -> dict[Any, Any]:
    torch.save(state, tmp_path / "a.pt")
    imports.from_torch(tmp_path / "a.pt", tmp_path / "ours", **options)
    assert dc.verify(tmp_path / "ours").ok
    found: dict[Any, Any] = {}
    dc.load(found, tmp_path / "ours")
    return found


def trained() -> tuple[Any, Any, Any]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3),
        torch.nn.BatchNorm2d(4),
        torch.nn.Flatten(),
        torch.nn.Linear(16, 2),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for _ in range(2):
        model(torch.randn(5, 3, 4, 4)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    return model, optimizer, scheduler


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_training_goes_on_from_its_file(tmp_path: Path, world_size: int) -> None:
    model, optimizer, scheduler = trained()
    state = {
        "model": model.state_dict(),
        "optim": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "step": 2,
    }
    found = imported(tmp_path, state, world_size=world_size)
    loaded = torch.load(tmp_path / "a.pt", weights_only=False)
    same(loaded, found)
    live, own_optimizer, _ = trained()
    report = dc.load({"model": live}, tmp_path / "ours", include="model")
    assert len(report.restored) == len(model.state_dict())
    own_optimizer.load_state_dict(found["optim"])
    same(live.state_dict(), model.state_dict())
    same(own_optimizer.state_dict(), optimizer.state_dict())


def test_a_bare_state_dict_fills_a_model(tmp_path: Path) -> None:
    saved, live = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)
    torch.save(saved.state_dict(), tmp_path / "a.pt")
    report = imports.from_torch(tmp_path / "a.pt", tmp_path / "ours")
    assert report.num_tensors == 2
    dc.load({"model": live}, tmp_path / "ours")
    same(live.state_dict(), saved.state_dict())


def test_all_that_plain_data_may_be_comes_as_it_was(tmp_path: Path) -> None:
    state = {
        "w": torch.ones(2),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "buffer": torch.nn.Buffer(torch.ones(1)),
        "kinds": (torch.Size([1, 2]), torch.bfloat16, torch.device("cuda", 1), Path("/a"), 1j),
        "numpy": [np.float64(3.5), np.int64(-1), np.bool_(True), np.float16(1)],
        "times": [
            *(np.datetime64("2026-01-02T03:04:05", unit) for unit in ("s", "D", "ns", "Y")),
            *(np.arange(1).astype(f"m8{unit}")[0] for unit in ("[ms]", "[25s]", "")),
        ],
        "texts": [np.str_("a\0b"), np.bytes_(b"\0c")],
        "arrays": {"a": np.arange(6.0).reshape(2, 3), "b": np.zeros((0, 2), np.uint8)},
        "generators": (np.random.get_state(), random.getstate(), torch.get_rng_state()),
        "sets": [{1, 2}, frozenset(["a"]), Counter("aab"), defaultdict(list, {"a": [1]})],
        "nested": [{"deep": ({"t": torch.zeros(2, 0)}, 5)}, None],
        "order": OrderedDict(b=torch.ones(1), a=2),
        "when": [datetime.datetime(2026, 1, 2, 3), datetime.date(2026, 1, 2)],
        "bytes": [b"", b"\xff\0", 10**30],
        7: torch.ones(3),
    }
    found = imported(tmp_path, state)
    same(state, found)


# torch saves no others.
SAVED = [name for name in DTYPES if not re.fullmatch(r"u?int[1-7]|bits.*", name)]


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", SAVED)
def test_every_dtype_comes_as_it_was(tmp_path: Path, name: str) -> None:
    if (dtype := getattr(torch, name, None)) is None:
        pytest.skip(f"this torch has no {name}")
    raw = torch.arange(48, dtype=torch.uint8) % 2
    tensor = raw.view(dtype).reshape(-1, 3)
    found = imported(tmp_path, {"w": tensor, "whole": tensor[0, 0].clone()})
    same({"w": tensor}, {"w": found["model"]["w"]})


def views() -> dict[str, torch.Tensor]:
    base = torch.arange(120.0)
    return {
        "transposed": base.reshape(10, 12).t(),
        "channels last": base.reshape(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "a part": base.reshape(10, 12)[2:5],
        "columns": base.reshape(10, 12)[:, 3:7],
        "steps": base[5::7],
        "turned": base.reshape(2, 3, 4, 5).permute(3, 1, 0, 2)[1:, :, 1:],
        "complex": torch.arange(12.0).to(torch.complex128).reshape(3, 4).t(),
        "bytes": torch.arange(12, dtype=torch.uint8).reshape(3, 4).t(),
        "halves": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4).t()[1:],
        "one": base[3],
        "of size 1": base[:6].reshape(3, 2)[:, :1],
        "empty": base[:0],
        "empty columns": base.reshape(10, 12)[:, 5:5],
    }


@pytest.mark.parametrize("world_size", [1, 2])
def test_views_come_as_the_tensors_that_they_are(tmp_path: Path, world_size: int) -> None:
    state = {"model": views(), "step": 1}
    same(state, imported(tmp_path, state, world_size=world_size))


def test_tied_tensors_are_stored_once_and_still_tied(tmp_path: Path) -> None:
    weight = torch.ones(5, 3)
    state = {"a": {"w": weight, "part": weight[1:]}, "b": [weight, weight.clone()], "n": 1}
    found = imported(tmp_path, state)
    same(state, found)
    assert found["b"][0] is found["a"]["w"]
    assert found["b"][1] is not found["a"]["w"]
    with dc.open(tmp_path / "ours") as stored:
        assert stored.index.catalog.aliases == {"b.0": "a.w"}


def test_what_an_ordered_dict_has_besides_is_left(tmp_path: Path) -> None:
    saved = torch.nn.Linear(2, 2).state_dict()
    assert saved._metadata  # type: ignore[attr-defined]
    same({"m": saved, "n": 1}, imported(tmp_path, {"m": saved, "n": 1}))


# --- what is refused ---------------------------------------------------------------------------


class Own:
    """A class of the user's."""


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a class": (lambda: {"x": Own()}, r"names .*\.Own, which is not run here"),
    "sparse": (lambda: {"x": torch.eye(2).to_sparse()}, "_rebuild_sparse_tensor"),
    "meta": (lambda: {"x": torch.empty(2, device="meta")}, "_rebuild_meta_tensor_no_storage"),
    "conjugate": (lambda: {"x": torch.ones(2, dtype=torch.cfloat).conj()}, "resolve_conj"),
    "negative": (lambda: {"x": torch.ones(2, dtype=torch.cfloat).conj().imag}, "resolve_neg"),
    "expanded": (lambda: {"x": torch.ones(1).expand(1 << 40)}, r"model\.x is an expanded"),
    "a whole module": (lambda: torch.nn.Linear(2, 2), "Linear"),
    "a tensor": (lambda: torch.ones(2), "contains a TensorView, not a nonempty dict"),
    "a list": (lambda: [torch.ones(2)], "contains a list, not a nonempty dict"),
    "nothing": (dict, "not a nonempty dict"),
    "a device as a name": (lambda: {torch.device("cpu"): torch.ones(1)}, "the key a Device"),
    "a name of two": (lambda: {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}, r"a\.b is the"),
    "two dicts of a name": (
        lambda: {"a": {"b": {"c": torch.ones(1)}}, "a.b": {"d": torch.zeros(1)}},
        r"a\.b is the name of two things",
    ),
    "a dict and a value": (lambda: {"a": {"b": {"c": torch.ones(1)}}, "a.b": 5}, r"a\.b is the"),
    "no name": (lambda: {"": torch.ones(1), "n": 1}, "an empty, too long"),
    "a long name": (lambda: {"n" * 10000: torch.ones(1), "n": 1}, "an empty, too long"),
    "a long double": (lambda: {"x": np.longdouble(1)}, "x is a numpy scalar of dtype <f16"),
    "long doubles": (lambda: {"x": np.zeros(2, np.longdouble)}, "x is a numpy array of dtype <f16"),
    "times": (lambda: {"x": np.zeros(2, "M8[s]")}, r"x is a numpy array of dtype <M8\[s\]"),
    "columns": (lambda: {"x": np.eye(2, 3).T}, "x is a numpy array of dtype <f8 in column order"),
    "bytes with a NUL": (lambda: {"x": np.bytes_(b"a\0")}, r"x is .* \|S2 with NULs at its end"),
    "text with a NUL": (lambda: {"x": np.str_("ab\0")}, "x is .* <U3 with NULs at its end"),
    "a struct": (lambda: {"x": np.zeros(1, "i4,f4")[0]}, r"x is a numpy scalar of dtype >V8"),
    "a flag as a name": (lambda: {True: torch.ones(1), "n": 1}, "keys of bool"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_checkpoint_holds_is_refused_by_name(tmp_path: Path, name: str) -> None:
    make, message = REFUSED[name]
    torch.save(make(), tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=message) as error:
        imports.from_torch(tmp_path / "a.pt", tmp_path / "ours")
    assert "a.pt" in str(error.value)
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("name", ["a class", "sparse", "meta"])
def test_what_is_not_included_may_be_anything(tmp_path: Path, name: str) -> None:
    strange = REFUSED[name][0]()["x"]
    model, deep = {"w": torch.ones(2)}, {"n": 1, "v": torch.ones(1), "x": strange}
    state = {
        "model": model,
        "deep": deep,
        "plain": {"n": 2, "x": strange, "list": [{"x": strange}]},
        "x": strange,
    }
    torch.save({**state, "rows": [torch.zeros(1), {"x": strange}]}, tmp_path / "a.pt")

    def found(number: int, **options: Any) -> set[str]:
        imports.from_torch(tmp_path / "a.pt", tmp_path / f"{number}", **options)
        with dc.open(tmp_path / f"{number}") as stored:
            return {*stored.tensors, *stored.objects}

    assert found(1, include="model") == {"model.w"}
    assert found(2, include=["*.w", "deep.n"]) == {"model.w", "deep.n"}
    assert found(3, include=["model", "deep.v"]) == {"model.w", "deep.v"}
    assert found(4, include="deep", exclude="deep.x") == {"deep.n", "deep.v"}
    assert found(5, include="plain", exclude=["plain.x", "plain.list"]) == {"plain"}
    with pytest.raises(IncompatibleError, match=r"deep\.x names .* \(exclude='deep\.x'"):
        found(6, include=["model", "deep"])
    with pytest.raises(IncompatibleError, match=r"rows names .* \(exclude='rows'"):
        found(6, include="rows")
    with pytest.raises(IncompatibleError, match=r"plain\.x names "):
        found(6, include="plain")
    with pytest.raises(IncompatibleError, match=r"plain\.list names .* \(exclude='plain\.list'"):
        found(6, include="plain", exclude="plain.x")
    with pytest.raises(ValueError, match=r"'deep\.y' matches no name"):
        found(6, include=["model", "deep.y"])
    assert not (tmp_path / "6").exists()


class OfDevice:
    """Pickled as torch does with a tensor of a device without storages, such as XLA."""

    def __init__(self, tensor: torch.Tensor, device: str = "cpu", **changes: Any) -> None:
        values = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
        self.args = (changes.get("array", values.numpy()), tensor.dtype, device, False)
        self.name = changes.get("name", "_rebuild_device_tensor_from_numpy")

    def __reduce__(self) -> Any:
        return getattr(torch._utils, self.name), self.args


@pytest.mark.parametrize("world_size", [1, 3])
def test_tensors_of_xla_come_as_torch_loads_them(tmp_path: Path, world_size: int) -> None:
    torch.manual_seed(5)
    tensors = {
        "f32": torch.randn(5, 7),
        "bf16": torch.randn(300, 100).bfloat16(),
        "special": torch.tensor([float("nan"), float("inf"), -0.0, 1e-40]).bfloat16(),
        "i64": torch.arange(6).reshape(2, 3),
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
        "one": torch.ones(1, 1, dtype=torch.bfloat16),
        "empty": torch.empty(2, 0, dtype=torch.bfloat16),
        "bool": torch.tensor([True, False]),
    }
    tied = OfDevice(tensors["f32"])
    rows: Any = {name: OfDevice(value) for name, value in tensors.items()}
    found = imported(
        tmp_path,
        {"m": {**rows, "tied": tied, "other": tied, "cpu": torch.ones(2)}, "n": 1},
        world_size=world_size,
    )
    loaded = torch.load(tmp_path / "a.pt", weights_only=False)
    same(loaded, found)
    assert found["m"]["bf16"].dtype == torch.bfloat16
    assert found["m"]["tied"] is found["m"]["other"]
    assert found["m"]["tied"] is not found["m"]["f32"]
    for device, name in (
        ("xla:0", "_rebuild_device_tensor_from_numpy"),
        ("xla:1", "_rebuild_xla_tensor"),
    ):
        torch.save({k: OfDevice(v, device, name=name) for k, v in tensors.items()}, tmp_path / "x")
        target = tmp_path / f"of {device}"
        imports.from_torch(tmp_path / "x", target)
        state: dict[Any, Any] = {}
        dc.load(state, target)
        same(state["model"], tensors)


def test_what_numpy_cannot_give_a_device_back_is_refused(tmp_path: Path) -> None:
    half = torch.ones(2, dtype=torch.float16)
    for array, message in (
        (np.ones(2, np.float32), "x is a tensor of float16, saved by 'cpu' as float32: save it fr"),
        (np.asfortranarray(np.ones((2, 3), np.float16)), "array of dtype <f2 in column order"),
    ):
        torch.save({"x": OfDevice(half, array=array)}, tmp_path / "a.pt")
        with pytest.raises(IncompatibleError, match=message):
            imports.from_torch(tmp_path / "a.pt", tmp_path / "ours")
    inexact = OfDevice(torch.ones(2).bfloat16(), array=np.full(2, 1.1, np.float32))
    torch.save({"x": inexact}, tmp_path / "a.pt")
    with pytest.raises(IncompatibleError, match="x is a tensor of bfloat16, saved by"):
        imports.from_torch(tmp_path / "a.pt", tmp_path / "ours")


def flip(path: Path, data: bytes) -> None:
    """Flip a bit in the middle of some bytes of a file."""
    content = bytearray(path.read_bytes())
    content[content.index(data) + len(data) // 2] ^= 4
    path.write_bytes(content)


BASE = torch.arange(30_000.0)
SHARING: dict[str, Callable[[torch.Tensor], dict[str, torch.Tensor]]] = {
    "one tensor": lambda base: {"w": base.reshape(300, 100)},
    "a part": lambda base: {"w": base[:10]},
    "columns": lambda base: {"w": base.reshape(300, 100).t()},
    "two parts": lambda base: {"v": base[:10], "w": base[10:]},
    "tied": lambda base: {"v": base, "w": base},
}


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("name", SHARING)
def test_a_flipped_bit_is_named_with_its_record(name: str, world_size: int, tmp_path: Path) -> None:
    state = {"a": torch.ones(7), "model": SHARING[name](BASE), "z": torch.ones(5)}
    imported(tmp_path, state)  # without damage
    flip(tmp_path / "a.pt", BASE.numpy().tobytes())
    with pytest.raises(
        CorruptError, match=r"a\.pt: its record data/1 has the CRC-32 .*the file again$"
    ):
        imports.from_torch(tmp_path / "a.pt", tmp_path / "new", world_size=world_size)
    with pytest.raises(NotFoundError):
        dc.open(tmp_path / "new")
    imports.from_torch(tmp_path / "a.pt", tmp_path / "rest", exclude="model")


@pytest.mark.parametrize("order", [[0, 1], [1, 0], [0, 0, 1], [1, 0, 1]])
def test_a_record_is_checked_in_whatever_order_it_is_read(order: list[int], tmp_path: Path) -> None:
    """Also if a part is read twice, as by a retry."""
    torch.save({"w": BASE}, tmp_path / "a.pt")

    def read_parts() -> None:
        everything = ImportFilter(SELECT_ALL, lambda _: True)
        (storage, path), _ = imports.open_pickled(
            "torch", tmp_path / "a.pt", everything, checks_records=True
        )
        (folder,) = storage.list(path)
        name = max(storage.list(f"{path}/{folder.name}"), key=lambda entry: entry.nbytes).name
        with closing(storage.open(f"{path}/{folder.name}/{name}")) as file:
            data = memoryview(bytearray(BASE.nbytes))
            half, start = BASE.nbytes // 2, file.nbytes - BASE.nbytes
            for number in order:
                at = number * half
                assert file.read_into(start + at, data[at : at + half]) == half
        assert data == BASE.numpy().tobytes()

    read_parts()
    flip(tmp_path / "a.pt", BASE.numpy().tobytes())
    with pytest.raises(CorruptError, match="record data/0 has the CRC-32"):
        read_parts()


def test_a_flipped_bit_in_the_pickle_is_named(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3), "text": "abcdefgh"}, tmp_path / "a.pt")
    flip(tmp_path / "a.pt", b"abcdefgh")
    with pytest.raises(CorruptError, match=r"its record data\.pkl has another checksum"):
        imports.from_torch(tmp_path / "a.pt", tmp_path / "ours")


def no_checksums(state: object, path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state, path)
    finally:
        torch.serialization.set_crc32_options(True)


def no_data(state: object, path: Path) -> None:
    with torch.serialization.skip_data():
        torch.save(state, path)


@pytest.mark.parametrize("save", [no_checksums, no_data])
def test_tensors_without_a_checksum_are_counted(
    save: Callable[[object, Path], None], tmp_path: Path
) -> None:
    state = {"v": BASE, "w": BASE.reshape(300, 100).t(), "empty": torch.ones(0), "x": torch.ones(3)}
    save({"a": state, "b": torch.ones(2)}, tmp_path / "a.pt")
    report = imports.from_torch(tmp_path / "a.pt", tmp_path / "ours", include="a")
    assert (report.num_tensors, report.num_unchecked) == (4, 3)
    torch.save({"a": state}, tmp_path / "a.pt")
    assert imports.from_torch(tmp_path / "a.pt", tmp_path / "checked").num_unchecked == 0


@pytest.mark.parametrize("cuts", [[], [0], [1, 500, 999], [1000], [7, 7, 8]])
def test_checksums_of_parts_give_that_of_the_whole(cuts: list[int]) -> None:
    data = random.Random(1).randbytes(1000)
    bounds = [0, *cuts, len(data)]
    crc32 = 0
    for start, end in reversed([*pairwise(bounds)]):
        crc32 ^= shift_crc32(zlib.crc32(data[start:end]), len(data) - end)
    assert crc32 == zlib.crc32(data)


def test_a_program_of_torchscript_is_refused(tmp_path: Path) -> None:
    with warnings.catch_warnings(action="ignore"):  # newer ones of torch warn of this
        torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(2)), tmp_path / "a.pt")
    with pytest.raises(IncompatibleError, match=r"TorchScript.*state_dict"):
        imports.from_torch(tmp_path / "a.pt", tmp_path / "ours")


def test_no_file_and_no_such_file_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="the file does not exist"):
        imports.from_torch(tmp_path / "a.pt", tmp_path / "ours")
    for data in (b"", b"PK", b"hello, world", b"PK\x03\x04" + bytes(100)):
        (tmp_path / "a.pt").write_bytes(data)
        with pytest.raises(CorruptError, match=r"a\.pt"):
            imports.from_torch(tmp_path / "a.pt", tmp_path / "ours")


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.9, 0.999])
def test_a_file_that_is_cut_off_is_named(tmp_path: Path, kept: float) -> None:
    torch.save({"w": torch.ones(10_000)}, tmp_path / "a.pt")
    data = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "a.pt").write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(CorruptError, match=r"a\.pt"):
        imports.from_torch(tmp_path / "a.pt", tmp_path / "ours")


def rezipped(path: Path, change: Callable[[str, bytes], bytes | None], method: int = 0) -> None:
    """Write an archive anew, its records changed, or left out where that is None."""
    with zipfile.ZipFile(path) as old:
        records = [(name, old.read(name)) for name in old.namelist()]
    with zipfile.ZipFile(path, "w", method) as new:
        for name, data in records:
            if (changed := change(name, data)) is not None:
                new.writestr(name, changed)


def test_an_archive_that_another_program_has_written_is_read(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(5)}, tmp_path / "a.pt")
    rezipped(tmp_path / "a.pt", lambda _, data: data)
    imports.from_torch(tmp_path / "a.pt", tmp_path / "ours")
    state: dict[str, Any] = {}
    dc.load(state, tmp_path / "ours")
    same({"model": {"w": torch.arange(5)}}, state)


@pytest.mark.parametrize(
    ("change", "method", "message"),
    [
        (lambda _, data: data, zipfile.ZIP_DEFLATED, "is compressed"),
        (lambda name, data: b"big" if name.endswith("byteorder") else data, 0, "big-endian"),
        (
            lambda name, data: data[:-4] if "data/0" in name else data,
            0,
            "needs more than its 16 bytes",
        ),
        (lambda name, data: None if "data/0" in name else data, 0, "no record data/0"),
        (lambda name, data: None if "data.pkl" in name else data, 0, "no record data.pkl"),
        (lambda name, data: data[:-1] if "data.pkl" in name else data, 0, "no end"),
    ],
)
def test_an_archive_that_lies_is_named(
    tmp_path: Path, change: Any, method: int, message: str
) -> None:
    torch.save({"w": torch.ones(5)}, tmp_path / "a.pt")
    rezipped(tmp_path / "a.pt", change, method)
    with pytest.raises(CheckpointError, match=message) as error:
        imports.from_torch(tmp_path / "a.pt", tmp_path / "ours")
    assert "a.pt" in str(error.value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (20, (1 << 20).to_bytes(4, "little") * 2, "ends after the file"),
        (42, bytes(4), "the header of"),
    ],
    ids=["sizes", "place"],
)
def test_a_directory_that_lies_is_named(
    tmp_path: Path, field: int, value: bytes, message: str
) -> None:
    torch.save({"w": torch.ones(5)}, tmp_path / "a.pt")
    data = bytearray((tmp_path / "a.pt").read_bytes())
    entry = data.index(b"a/data/0", data.index(b"PK\x01\x02")) - 46
    data[entry + field : entry + field + len(value)] = value
    (tmp_path / "a.pt").write_bytes(data)
    with pytest.raises(CorruptError, match=message):
        imports.from_torch(tmp_path / "a.pt", tmp_path / "ours")


def test_a_bomb_of_zeros_is_not_unpacked(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(5)}, tmp_path / "a.pt")
    zeros = bytes(200 << 20)
    rezipped(tmp_path / "a.pt", lambda n, d: zeros if "data.pkl" in n else d, zipfile.ZIP_DEFLATED)
    with pytest.raises(IncompatibleError, match="compressed"):
        imports.from_torch(tmp_path / "a.pt", tmp_path / "ours")


def test_many_views_of_one_storage_are_refused(tmp_path: Path) -> None:
    base = torch.zeros(1 << 18)
    torch.save({"w": [base[n:] for n in range(64)]}, tmp_path / "a.pt")
    with pytest.raises(CorruptError, match="save clones"):
        imports.from_torch(tmp_path / "a.pt", tmp_path / "ours")


def test_bytes_at_random_are_read_or_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(5), "list": [torch.ones(2), 1], "n": 5}, tmp_path / "a.pt")
    whole = (tmp_path / "a.pt").read_bytes()
    refused = 0
    for number in sample(range(400), 4):
        choose = random.Random(number)
        data = bytearray(whole)
        for _ in range(choose.randint(1, 3)):
            data[choose.randrange(len(data))] = choose.randrange(256)
        (tmp_path / "a.pt").write_bytes(data)
        try:
            imports.from_torch(tmp_path / "a.pt", tmp_path / f"ours-{number}")
        except CheckpointError:
            refused += 1
    assert 0 < refused < 400


def test_a_range_and_a_queue_of_arrays_come_as_they_were(tmp_path: Path) -> None:
    saved = {"far": range(0, 10**30, 7), "last": deque([np.arange(2), [1]], 3), "w": torch.ones(1)}
    found = imported(tmp_path, saved)
    assert found["far"] == saved["far"]
    assert (type(found["last"]), found["last"].maxlen) == (deque, 3)
    np.testing.assert_array_equal(found["last"][0], np.arange(2))
    assert found["last"][1] == [1]


def test_a_directory_beyond_reason_is_not_read(tmp_path: Path) -> None:
    """A file with a hole of a terabyte, which is to be its directory."""
    far = 1 << 40
    end = b"PK\6\6" + struct.pack("<Q2H2L4Q", 44, 0, 0, 0, 0, 1, 1, far - 9, 4)
    end += b"PK\6\7" + struct.pack("<LQL", 0, far, 1) + b"PK\5\6" + bytes(18)
    with (tmp_path / "a.pt").open("wb") as file:
        file.write(b"PK\3\4")
        file.seek(far)
        file.write(end)
    with pytest.raises(CorruptError, match="a directory of 1099511627767 bytes"):
        imports.from_torch(tmp_path / "a.pt", tmp_path / "ours")


def test_names_of_many_dots_can_stand_beside_what_is_left_out(tmp_path: Path) -> None:
    name = "a." * 1500 + "b"
    torch.save({name: torch.ones(2), "c": torch.ones(1)}, tmp_path / "a.pt")
    imports.from_torch(tmp_path / "a.pt", tmp_path / "ours", exclude="model.c")
    with dc.open(tmp_path / "ours") as found:
        assert [*found.tensors] == [f"model.{name}"]
    torch.save({"." * 1_000_000: torch.ones(2), "c": torch.ones(1)}, tmp_path / "b.pt")
    with pytest.raises(IncompatibleError, match="too long"):
        imports.from_torch(tmp_path / "b.pt", tmp_path / "other", exclude="model.c")
