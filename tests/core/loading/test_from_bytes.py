"""The bytes of a state: what `to_bytes` makes, and that any others are refused."""

from __future__ import annotations

import array
import json
import mmap
import time
import tracemalloc
from base64 import b64decode
from collections import OrderedDict, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("numpy")
import numpy as np
import torch

import dist_ckpt as dc
from bytes_fuzz import BytesCorpus, run_bytes, run_shrew
from dist_ckpt.core.format import state_bytes
from dist_ckpt.core.format.checksums import document_digest
from dist_ckpt.core.format.objects import objects_file
from dist_ckpt.core.format.objects.plain_types import ArrayValue, Device, DTypeValue, NumpyScalar
from dist_ckpt.errors import CheckpointError, CorruptError, IncompatibleError
from document_fuzz import flat, state, with_digest
from subclass_tensors import Quantized

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden" / "state-as-bytes-1.safetensors"


def small() -> dict[str, Any]:
    return {"model": {"w": torch.arange(6.0).view(2, 3)}, "step": 7}


def test_a_state_with_something_of_everything_comes_back() -> None:
    data = dc.to_bytes(state())
    assert type(data) is bytes
    plain = dc.from_bytes(data)
    optimizer = plain.pop("optim")
    assert flat(plain) == {name: flat(one) for name, one in state().items() if name != "optim"}
    assert optimizer["param_groups"][0]["params"][0] == "model.0.weight"
    assert {*optimizer["state"]["model.0.weight"]} == {"step", "exp_avg", "exp_avg_sq"}
    assert isinstance(plain["numpy"]["a"], np.ndarray)
    live = state()
    for parameter in live["model"].parameters():
        parameter.data.zero_()
    live["optim"].state.clear()
    live["plain"] = None
    addresses = [p.data_ptr() for p in live["model"].parameters()]
    report = dc.load_bytes(live, data)
    assert flat(live) == flat(state())
    assert [p.data_ptr() for p in live["model"].parameters()] == addresses
    assert "model.0.weight" in report.restored
    assert not report.missing


def test_what_holds_tensors_comes_back_of_its_class_and_in_its_order() -> None:
    one = torch.ones(1)
    plain: dict[str, Any] = {
        "z": OrderedDict(b=one, a=[one + 1, (one + 2, "x")]),
        "d": defaultdict[int, Any](list, {3: one + 3}),
        "none": {},
        "big": 1 << 100,
        "nan": float("nan"),
        "a": one + 5,
    }
    back = dc.from_bytes(dc.to_bytes(plain))
    assert [*back] == [*plain]
    assert [type(value) for value in back.values()] == [type(value) for value in plain.values()]
    assert back["z"]["a"][1][1] == "x"
    assert back["d"].default_factory is list
    assert dc.to_bytes(back) == dc.to_bytes(plain)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(2.5),
        torch.empty(0, 3),
        torch.ones(3, 2).t(),
        torch.tensor([1 + 2j, 3j], dtype=torch.complex128).conj(),
        torch.tensor([0.5, 1.5]).to(torch.float8_e4m3fnuz),
        torch.tensor([(1 << 53) + 1]),
        torch.nn.Parameter(torch.ones(2)),
        torch.arange(3 << 20, dtype=torch.int32),  # of several blocks
    ],
)
def test_tensors_come_back_bit_for_bit(tensor: torch.Tensor) -> None:
    for value in (tensor, {"a": tensor}):
        back = dc.from_bytes(dc.to_bytes({"x": value}))["x"]
        back = back["a"] if isinstance(back, dict) else back
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
        assert back.resolve_conj().tolist() == tensor.resolve_conj().tolist()


def test_tied_tensors_are_there_once_and_stay_tied() -> None:
    shared = torch.ones(1000)
    data = dc.to_bytes({"a": shared, "b": [shared]})
    assert len(data) < 2 * 4096 + 4000
    back = dc.from_bytes(data)
    assert back["a"].data_ptr() == back["b"][0].data_ptr()


def test_a_compound_tensor_is_filled_in_place() -> None:
    def make(value: float) -> Any:
        return Quantized.of(torch.full((4, 4), value))

    live = make(1.0)
    dc.load_bytes({"w": live}, dc.to_bytes({"w": make(3.0)}))
    assert torch.equal(live.dequantize(), make(3.0).dequantize())


def test_any_safetensors_library_reads_the_tensors() -> None:
    library = pytest.importorskip("safetensors.torch")
    model = torch.nn.Linear(3, 2)
    read = library.load(dc.to_bytes({"model": model, "lr": 0.1}))
    assert {*read} == {"model.weight", "model.bias"}
    assert torch.equal(read["model.weight"], model.weight)
    assert library.load(dc.to_bytes({"lr": 0.1})) == {}


def test_the_same_state_makes_the_same_bytes() -> None:
    assert dc.to_bytes(state()) == dc.to_bytes(state())
    live = state()
    dc.load_bytes(live, dc.to_bytes(state()))
    assert dc.to_bytes(live) == dc.to_bytes(state())


def test_the_golden_bytes_are_read_for_ever() -> None:
    assert flat(dc.from_bytes(GOLDEN.read_bytes())) == flat(
        {"model": {"w": torch.arange(6.0).view(2, 3)}, "step": 7, "own": dc.PerRank({"a": (1,)})}
    )


def test_the_bytes_are_as_the_page_of_the_format_says() -> None:
    data = dc.to_bytes({**small(), "own": dc.PerRank(1), "é": "ü"})
    end = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:end])
    fields = entries["__metadata__"]
    assert [*fields][:4] == [
        *("dist_ckpt_index", "dist_ckpt_objects", "dist_ckpt_per_rank"),
        "format",
    ]
    text = fields.pop("dist_ckpt_index")
    body, digest = text.encode()[:-46], text[-35:-3]
    assert document_digest(body) == digest
    index = json.loads(text)
    for name, _, digest in index["objects"]:
        field = "dist_ckpt_per_rank" if "-" in name else "dist_ckpt_objects"
        assert document_digest(b64decode(fields.pop(field))) == digest
    (_, _, nbytes, header_nbytes, digest) = index["files"][0]
    header = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    header = (header_nbytes - 8).to_bytes(8, "little") + header.ljust(header_nbytes - 8)
    assert document_digest(header) == digest
    assert nbytes == header_nbytes + len(data) - end
    assert index["components"] == [["state", "state"]]


def test_anything_like_bytes_is_read_and_let_go(tmp_path: Path) -> None:
    data = dc.to_bytes(small())
    (tmp_path / "a").write_bytes(data)
    with open(tmp_path / "a", "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    many: tuple[Any, ...] = (bytearray(data), memoryview(data), array.array("B", data), mapped)
    for given in many:
        back = dc.from_bytes(given)
        assert flat(back) == flat(small())
    mapped.close()  # nothing looks into it any more
    held = bytearray(data)
    back = dc.from_bytes(held)
    held[:] = bytes(len(held))
    del held[:]
    assert flat(back) == flat(small())
    with pytest.raises(CorruptError):
        dc.from_bytes(held := bytearray(data[:-1]))
    del held[:]


def test_what_is_no_bytes_is_refused() -> None:
    wrong: tuple[Any, ...] = ("text", 3, None, [1], memoryview(dc.to_bytes(small()))[::2])
    for given in wrong:
        with pytest.raises(TypeError, match="give contiguous bytes"):
            dc.from_bytes(given)


def test_nothing_is_touched_by_bytes_that_do_not_fit() -> None:
    live: dict[str, Any] = {"model": {"w": torch.zeros(3, 3)}, "step": 1}
    with pytest.raises(IncompatibleError, match=r"model.w"):
        dc.load_bytes(live, dc.to_bytes(small()))
    assert (live["step"], live["model"]["w"].count_nonzero()) == (1, 0)
    other: dict[str, Any] = {"net": {"w": torch.zeros(2, 3)}}
    with pytest.raises(IncompatibleError, match="step"):
        dc.load_bytes(other, dc.to_bytes(small()), rename={"model.*": "net.*"})
    report = dc.load_bytes(other, dc.to_bytes(small()), rename={"model.*": "net.*"}, exclude="step")
    assert report.restored == ("net.w",)
    assert torch.equal(other["net"]["w"], small()["model"]["w"])


def test_what_is_loaded_is_converted_when_asked_for() -> None:
    data = dc.to_bytes({"w": torch.tensor([1.5, 2.0])})
    half = {"w": torch.zeros(2, dtype=torch.bfloat16)}
    with pytest.raises(IncompatibleError, match="values are converted only with `cast`"):
        dc.load_bytes(half, data)
    assert dc.load_bytes(half, data, cast=True).restored == ("w",)
    assert half["w"].tolist() == [1.5, 2.0]


def test_damaged_data_is_told_by_name() -> None:
    data = bytearray(dc.to_bytes(small()))
    data[-1] ^= 1
    live = {"model": {"w": torch.zeros(2, 3)}, "step": 0}
    with pytest.raises(CorruptError, match=r"model\.w rows 0:2"):
        dc.load_bytes(live, data)
    assert live["step"] == 0


def test_what_is_not_whole_here_or_has_no_data_is_refused_by_name() -> None:
    part, other = (dc.LocalShard(torch.ones(2), (4,), (at,)) for at in (0, 2))
    with pytest.raises(
        ValueError, match=r"^part, deep\.part: this rank has only a part .*full_tensor"
    ):
        dc.to_bytes({"a": torch.ones(1), "part": part, "deep": {"part": other}})
    whole = dc.LocalShard(torch.ones(4), (4,), (0,))
    assert dc.from_bytes(dc.to_bytes({"whole": whole}))["whole"].tolist() == [1.0] * 4
    with pytest.raises(ValueError, match="m: a meta tensor has no data"):
        dc.to_bytes({"m": torch.ones(1, device="meta")})
    with pytest.raises(TypeError, match=r"x is a builtins.object, which cannot be stored"):
        dc.to_bytes({"x": object()})
    with pytest.raises(TypeError, match="give a mapping"):
        dc.to_bytes([1])  # type: ignore[arg-type]


def test_a_value_under_a_key_of_its_own_is_loaded_under_that_key() -> None:
    data = dc.to_bytes({"own": dc.PerRank(5, key=("dp", 3)), "w": torch.ones(1)})
    with pytest.raises(IncompatibleError, match="own: saved under a separate key: use load_bytes"):
        dc.from_bytes(data)
    live = {"own": dc.PerRank(0, key=("dp", 3)), "w": torch.zeros(1)}
    dc.load_bytes(live, data)
    assert live["own"].value == 5  # type: ignore[attr-defined]


# --- damage and hostility ----------------------------------------------------------------------


def test_no_byte_can_change_unnoticed() -> None:
    data = dc.to_bytes({**small(), "own": dc.PerRank(1)})
    for at in [*range(9), *range(9, len(data) - 30, 97), *range(len(data) - 24, len(data))]:
        changed = bytearray(data)
        changed[at] ^= 0x10
        with pytest.raises(CheckpointError):
            dc.from_bytes(changed)
    for nbytes in (0, 7, 8, 9, 100, 4095, 4096, len(data) - 1):
        with pytest.raises(CorruptError):
            dc.from_bytes(data[:nbytes])
    with pytest.raises(CorruptError):
        dc.from_bytes(data + b"x")
    with pytest.raises(CorruptError, match="data, but no tensors"):
        dc.from_bytes(dc.to_bytes({}) + b"x")


def test_a_header_that_says_the_same_in_another_way_is_refused() -> None:
    data = dc.to_bytes(small())
    end = 8 + int.from_bytes(data[:8], "little")
    longer = (end - 8 + 4096).to_bytes(8, "little") + data[8:end] + b" " * 4096 + data[end:]
    at = data.index(b"committed")
    escaped = data[:at] + b"\\u0063" + data[at + 1 : end - 5] + data[end:]
    assert json.loads(escaped[8:end]) == json.loads(longer[8 : end + 4096])
    for changed in (longer, escaped):
        with pytest.raises(CorruptError, match="its header is not as dist_ckpt writes it"):
            dc.from_bytes(changed)


def test_other_safetensors_files_are_named_as_what_they_are(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    dc.save(small(), tmp_path / "ck")
    (shards,) = tmp_path.glob("ck/a1-*/*.safetensors")
    for data in (library.save({"a": torch.ones(2)}), shards.read_bytes()):
        with pytest.raises(IncompatibleError, match=r"not made by dist_ckpt.to_bytes"):
            dc.from_bytes(data)


def packed(corpus: BytesCorpus, index: bytes, objects: bytes | None = None) -> bytes:
    """Return bytes whose index, or objects file, is another; its digest is mended."""
    documents, start = state_bytes.decode_documents(memoryview(corpus.data))
    held = {**documents.objects, **({} if objects is None else {"objects.msgpack": objects})}
    made = state_bytes.EncodedDocuments(with_digest(index), held, documents.header)
    return state_bytes.encode_documents(made) + corpus.data[start:]


LYING: dict[str, dict[str, Any]] = {
    "an array of bfloat16": {
        "per_rank": {"own": {0: {"t": ArrayValue("bfloat16", (2,), bytes(4), "numpy")}}}
    },
    "a tensor that was no array": {"numpy": ("b",)},
    "a unit of time": {"values": {"v": NumpyScalar("<M8[bogus]", bytes(8))}},
    "a dtype": {"values": {"v": DTypeValue("float99")}},
    "a device": {"values": {"v": Device("bogus:3")}},
    "no values": {"values": {}},
}


@pytest.mark.parametrize("name", LYING)
def test_objects_that_nobody_can_have_saved_are_refused(name: str) -> None:
    plain = {"b": torch.zeros(2, dtype=torch.bfloat16), "v": 1, "own": dc.PerRank({"t": 1})}
    documents, start = state_bytes.decode_documents(memoryview(data := dc.to_bytes(plain)))
    index, held = documents.index, dict(documents.objects)
    (field,) = LYING[name]
    file = "objects-00000.msgpack" if field == "per_rank" else "objects.msgpack"
    old = held[file]
    new = held[file] = objects_file.encode(replace(objects_file.decode(old), **LYING[name]))
    before, after = (f'{len(one)},"{document_digest(one)}"'.encode() for one in (old, new))
    made = state_bytes.EncodedDocuments(
        with_digest(index.replace(before, after)), held, documents.header
    )
    with pytest.raises((CorruptError, IncompatibleError)):
        dc.from_bytes(state_bytes.encode_documents(made) + data[start:])


def test_hostile_bytes_take_no_more_time_and_memory_than_their_size_allows() -> None:
    corpus = BytesCorpus()
    index = corpus.files["index.json"]
    hostile = [
        (1 << 62).to_bytes(8, "little") + corpus.data[8:],
        (99_999_992).to_bytes(8, "little") + corpus.data[8:],
        corpus.data[:8] + b"[" * 100_000,
        corpus.data[:8] + b'{"__metadata__":{"dist_ckpt_index":"' + b"\\" * 100_000,
        packed(corpus, index.replace(b'"world_size":1', b'"world_size":1000000')),
        packed(corpus, index.replace(b"[2,3]", b"[1048576,1048576]")),
        packed(corpus, index.replace(b'"holders":[[[0]]]', b'"holders":[{"each":[0,16777216]}]')),
        packed(corpus, index, b"\xdd\x7f\xff\xff\xff" + bytes(100)),
        packed(corpus, index, b"\x91" * 100_000),
    ]
    assert len({*hostile, corpus.data}) == len(hostile) + 1
    assert packed(corpus, index) == corpus.data
    for number, data in enumerate(hostile):
        tracemalloc.start()
        start = time.thread_time()
        try:
            with pytest.raises(CheckpointError):
                dc.from_bytes(data)
        finally:
            seconds, (_, peak) = time.thread_time() - start, tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert peak < 20 * len(data) + (1 << 20), number
        assert seconds < 5, number


def test_the_bytes_are_in_memory_once() -> None:
    live = {"w": torch.ones(2 << 20), "v": torch.ones(1 << 20)}
    dc.to_bytes({"w": torch.ones(1)})
    tracemalloc.start()
    try:
        data = dc.to_bytes(live)
        _, peak = tracemalloc.get_traced_memory()
        assert peak < len(data) + (6 << 20)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        dc.from_bytes(data)  # whose tensors are torch's memory, not Python's
        assert tracemalloc.get_traced_memory()[1] - before < 6 << 20
    finally:
        tracemalloc.stop()


def test_no_mutant_of_the_bytes_does_more_than_fail() -> None:
    corpus = BytesCorpus()
    found = {run_bytes(corpus, f"suite-{number}") for number in range(300)}
    assert {"CorruptError", "the same"} <= found


def test_no_mutant_of_a_shrew_file_does_more_than_fail() -> None:
    found = {run_shrew(f"suite-{number}") for number in range(2000)}
    assert {"CorruptError", "IncompatibleError", "the same bytes"} <= found
