"""Pickles that nobody should trust: what they name is not run, and what they make is bounded."""

from __future__ import annotations

import collections
import copyreg
import io
import os
import pickle
import pickletools
import random
import struct
import subprocess
import time
import tracemalloc
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_ckpt as dc
from dist_ckpt.errors import CheckpointError, CorruptError, IncompatibleError
from dist_ckpt.interop import imports
from dist_ckpt.interop.readers.restricted_pickle import PickleBudget, read
from dist_ckpt.interop.readers.torch_pickles import TORCH_NAMES, resolve_storage
from long_mode import sampled_params

WHAT = "file.pt"


class Calls:
    """What is pickled as a call."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


def hostile(marker: Path) -> dict[str, Any]:
    command = f"touch {marker}"
    return {
        "os.system": Calls(os.system, (command,)),
        "eval": Calls(eval, (f"__import__('os').system({command!r})",)),
        "exec": Calls(exec, (f"__import__('os').system({command!r})",)),
        "import": Calls(__import__, ("antigravity",)),
        "getattr": Calls(getattr, ("", "join")),
        "popen": Calls(subprocess.Popen, (command,)),
        "open": Calls(open, (f"{marker}", "w")),
        "a chain": Calls(map, (Calls(getattr, ("", "join")), ["a"])),
        "torch.load": Calls(torch.load, (f"{marker}",)),
        "a state": Calls(Calls, (), {"__setstate__": Calls(os.system, (command,))}),
        "nested in a list": [{"a": ({}, Calls(os.system, (command,)))}],
        "as a key": {Calls(os.system, (command,)): 1},
        "a default": collections.OrderedDict(a=Calls(os.system, (command,))),
    }


@pytest.mark.parametrize("name", hostile(Path("x")))
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_a_pickle_calls_is_named_and_not_run(tmp_path: Path, name: str, protocol: int) -> None:
    marker = tmp_path / "ran"
    data = pickle.dumps(hostile(marker)[name], protocol)
    with pytest.raises(IncompatibleError, match=r"file\.pt names .*not run"):
        read(data, TORCH_NAMES, WHAT)
    assert not marker.exists()


@pytest.mark.parametrize("name", hostile(Path("x")))
def test_so_are_those_in_files_of_torch_save(tmp_path: Path, name: str) -> None:
    marker, path = tmp_path / "ran", tmp_path / "evil.pt"
    torch.save({"model": torch.ones(2), "x": hostile(marker)[name]}, path)
    with pytest.raises(
        IncompatibleError, match=r"evil\.pt: x[a-z.]* names [a-zA-Z_.]+, which is not run"
    ):
        imports.from_torch(path, tmp_path / "ours")
    assert not marker.exists()
    assert not (tmp_path / "ours").exists()


def stream(*parts: bytes) -> bytes:
    return b"\x80\x02" + b"".join(parts) + b"."


# What a pickle may call with us, called with what makes no sense, and streams that are no pickles.
SENSELESS = {
    "empty": b"",
    "no end": b"\x80\x02}",
    "nothing at its end": b"\x80\x02.",
    "two values": stream(b"}", b"}"),
    "an open mark": stream(b"(", b"}"),
    "an unknown opcode": stream(b"\xff"),
    "the extension registry": stream(b"\x82\x01"),
    "an instance of old": stream(b"(ios\nsystem\n"),
    "an object of old": stream(b"(No"),
    "a text id": stream(b"Pabc\n"),
    "a persistent id": stream(b"N", b"Q"),
    "a cut text": b"\x80\x02X\xff\xff\xff\x7fab.",
    "a text of 2**63": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 63) + b".",
    "bytes of 2**64": b"\x80\x04\x8e" + b"\xff" * 8 + b".",
    "a number of 2**31": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "no utf-8": stream(b"X\x02\0\0\0\xff\xfe"),
    "items of a number": stream(b"K\x01(N", b"e"),
    "keys of a list": stream(b"](K\x01K\x01u"),
    "an odd key": stream(b"}(K\x01u"),
    "a key that is a list": stream(b"}]Ns"),
    "a key that is a tuple": stream(b"})Ns"),
    "a key that is a fraction": stream(b"}G" + bytes(8) + b"Ns"),
    "a key that is long": stream(b"}\x8a\x09" + b"\x01" * 9 + b"Ns"),
    "a member that is a list": b"\x80\x04\x8f(]\x90.",
    "a lost memo": stream(b"h\x05"),
    "an empty stack": stream(b"a"),
    "a pop too many": stream(b"0"),
    "a call of a number": stream(b"K\x01)R"),
    "a call of text": stream(b"X\x01\0\0\0a)R"),
    "a call of a dtype": stream(b"ctorch\nfloat32\n)R"),
    "a call without a tuple": stream(b"ctorch\nSize\n]R"),
    "a state of a list": stream(b"]}b"),
    "a state of a dtype": stream(b"ctorch\nfloat32\n}b"),
    "a name that is no text": b"\x80\x04K\x01K\x02\x93.",
    "a name without an end": b"\x80\x02cos" + b"x" * 2000,
    "a size of text": stream(b"ctorch\nSize\n(X\x01\0\0\0at\x85R"),
    "a size below 0": stream(b"ctorch\nSize\n(J\xff\xff\xff\xfft\x85R"),
    "a device of a number": stream(b"ctorch\ndevice\nK\x01\x85R"),
    "a tensor of nothing": stream(b"ctorch._utils\n_rebuild_tensor_v2\n(NNNNNNtR"),
    "a tensor of no arguments": stream(b"ctorch._utils\n_rebuild_tensor_v2\n)R"),
    "a type that is called": stream(b"c__builtin__\nint\n)R"),
    "an array of objects": stream(b"cnumpy\ndtype\n(X\x01\0\0\0Otb"),
    "bytes of another encoding": stream(b"c_codecs\nencode\n(X\x01\0\0\0aX\x04\0\0\0zlibtR"),
    "a counter of text": stream(b"ccollections\nCounter\n}X\x01\0\0\0aNs\x85R"),
    "a default of text": stream(b"ccollections\ndefaultdict\nX\x01\0\0\0a\x85R"),
    "a date of nothing": stream(b"cdatetime\ndatetime\n)R"),
    "a date of a text": stream(b"cdatetime\ndatetime\nX\x01\0\0\0a\x85R"),
    "a path of numbers": stream(b"cpathlib\nPosixPath\nK\x01\x85R"),
}


@pytest.mark.parametrize("name", SENSELESS)
def test_a_stream_that_makes_no_sense_is_refused(name: str) -> None:
    with pytest.raises(CorruptError, match=r"file\.pt: not a pickle of plain data"):
        read(SENSELESS[name], TORCH_NAMES, WHAT)


def test_a_name_is_no_attribute_of_another() -> None:
    for name in (b"cos.path\nsystem\n", b"ccollections\nabc.os.system\n", b"ctorch\n__class__\n"):
        with pytest.raises(IncompatibleError, match="not run here"):
            read(stream(name), TORCH_NAMES, WHAT)


def test_the_registry_of_extensions_is_not_asked() -> None:
    copyreg.add_extension(os.system.__module__, "system", 7)
    try:
        data = pickle.dumps(os.system, 2)
        assert any(op.name == "EXT1" for op, *_ in pickletools.genops(data))
        with pytest.raises(CorruptError, match="opcode 0x82"):
            read(data, TORCH_NAMES, WHAT)
    finally:
        copyreg.remove_extension(os.system.__module__, "system", 7)


def bomb_of_memos(depth: int = 60) -> bytes:
    """A list of two of the one before: 2**60 of them, in a few bytes each."""
    return stream(b"]q\0", doubled(depth))


def doubled(depth: int) -> bytes:
    """A list of the last twice, of that twice, and so on: only the last stays on the stack."""
    steps = [b"0](h%ch%ceq%c" % (n - 1, n - 1, n) for n in range(1, depth)]
    return b"".join(steps)


def tensors_of_memos(depth: int = 60) -> bytes:
    """The same, with a tensor at its end: each would have a name."""
    tensor = (
        b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\n"
        b"X\x01\0\0\0" + b"0X\x03\0\0\0cpuK\x01tQK\0K\x01\x85K\x01\x85\x89}tR"
    )
    return stream(b"](" + tensor + b"eq\0", doubled(depth))


def long_text(count: int = 100_000) -> bytes:
    """A text of 1 MB, in a list a hundred thousand times."""
    return stream(
        b"X", struct.pack("<L", 1 << 20), b"a" * (1 << 20), b"q\x000](", b"h\0" * count, b"e"
    )


def repeated_sets(count: int = 20_000) -> bytes:
    """One list of twenty thousand numbers, made a set again and again."""
    numbers = b"".join(b"J" + struct.pack("<i", n) for n in range(count))
    call = b"c__builtin__\nset\nq\x010h\x01h\0\x85R"
    return stream(b"](" + numbers + b"eq\0", b"](", call * 5, (b"h\x01h\0\x85R" * count), b"e")


def self_contained() -> bytes:
    return stream(b"]q\0(h\0h\0e")


def archive_with(tmp_path: Path, data: bytes) -> Path:
    """A file of torch.save with another pickle in it."""
    inner = b"}X\x01\0\0\0x" + data[2:-1] + b"s"
    writer = torch._C.PyTorchFileWriter(str(tmp_path / "bomb.pt"))
    pickled = stream(inner)
    writer.write_record("data.pkl", pickled, len(pickled))
    writer.write_record("data/0", bytes(4), 4)
    writer.write_end_of_file()
    return tmp_path / "bomb.pt"


MIB = 1 << 20
TEXT = b"X" + struct.pack("<L", MIB) + b"a" * MIB
NUMBER = b"\x8b" + struct.pack("<L", MIB) + b"\x01" * MIB
LONGEST = b"X" + struct.pack("<L", 999_999) + b"a" * 999_999  # of a numpy scalar
SCALAR = (
    b"cnumpy._core.multiarray\nscalar\ncnumpy\ndtype\nX\x07\0\0\0S999999\x89\x88\x87R"
    b"(K\x03X\x01\0\0\0|NNNKaKaK\0tbc_codecs\nencode\n" + LONGEST + b"X\x06\0\0\0latin1\x86R\x86R"
)

# What has 1 MB, and is named again by two bytes.
LARGE = {
    "a number": NUMBER,
    "a key": b"}" + TEXT + b"Ns",
    "a member": b"c__builtin__\nset\n]" + TEXT + b"a\x85R",
    "a count": b"ccollections\nCounter\n}" + TEXT + b"K\x01s\x85R",
    "a queue": b"ccollections\ndeque\n]" + TEXT + b"a\x85R",
    "a path": b"cpathlib\nPosixPath\n" + TEXT + b"\x85R",
    "a device": b"ctorch\ndevice\n" + TEXT + b"\x85R",
    "a range": b"c__builtin__\nrange\n" + NUMBER + b"\x85R",
    "a scalar": SCALAR,
}


@pytest.mark.parametrize("name", LARGE)
def test_what_is_large_may_not_be_named_often(tmp_path: Path, name: str) -> None:
    path = archive_with(tmp_path, stream(b"](", LARGE[name], b"q\0", b"h\0" * 1000, b"e"))
    tracemalloc.start()
    try:
        with pytest.raises(CorruptError, match=r"bomb\.pt: x: .*far more"):
            imports.from_torch(path, tmp_path / "ours")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20


def dicts_of_memos(depth: int = 60) -> bytes:
    """A dict that has the one before twice."""
    step = b"0}(X\x01\0\0\0ah%cX\x01\0\0\0bh%cuq%c"
    return stream(b"}q\0", *(step % (n - 1, n - 1, n) for n in range(1, depth)))


@pytest.mark.timeout(60)
def test_what_is_left_out_is_looked_for_within_bounds(tmp_path: Path) -> None:
    path = archive_with(tmp_path, dicts_of_memos())
    with pytest.raises(CorruptError, match="far more"):
        imports.from_torch(path, tmp_path / "ours", exclude="nothing")


def test_a_queue_of_many_is_bounded_too(tmp_path: Path) -> None:
    queue = b"0ccollections\ndeque\nh\x3b\x85R"
    path = archive_with(tmp_path, stream(b"]q\0", doubled(60), queue))
    with pytest.raises(CorruptError, match="far more"):
        imports.from_torch(path, tmp_path / "ours")


def test_a_class_in_a_class_in_a_class_is_refused() -> None:
    name, depth = b"ctorch._tensor\n_rebuild_from_type_v2\n", 3000
    inner = b"(" + (name + b"ctorch\nTensor\n(") * depth + b"t" + b"}t" * depth
    with pytest.raises(CorruptError, match="within another"):
        read(stream(name, inner, b"R"), TORCH_NAMES, WHAT)


@pytest.mark.parametrize(
    "bomb",
    [bomb_of_memos, tensors_of_memos, long_text, repeated_sets, self_contained],
    ids=lambda f: f.__name__,
)
def test_a_bomb_costs_no_more_than_its_size(tmp_path: Path, bomb: Any) -> None:
    path = archive_with(tmp_path, bomb())
    start = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(CorruptError, match=r"bomb\.pt.*(far more|deeper)"):
            imports.from_torch(path, tmp_path / "ours")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert time.process_time() - start < 20
    assert peak < 200 * path.stat().st_size + (64 << 20)
    assert not (tmp_path / "ours").exists()


LONG = 1 << 20


def text(value: bytes) -> bytes:
    return b"X" + struct.pack("<L", len(value)) + value


def twins() -> bytes:
    """Two long texts that are alike, in the memo: to compare them takes a while."""
    return text(b"a" * LONG) + b"q\0" + text(b"a" * LONG) + b"q\1"


# In a few bytes each time, what takes as long as the longest text or tuple of the stream.
SLOW = {
    "keys": stream(twins(), b"}q\2h\0Ns", b"0h\2h\1Ns" * 100_000),
    "members": stream(twins(), b"(", b"(h\0h\1\x910" * 100_000, b"t"),
    "names": stream(text(b"a" * LONG), b"q\0", text(b"b"), b"q\1", b"h\0h\1\x930" * 100_000),
    "parts": stream(
        b"(" + text(b"") + b"q\1" + b"h\1" * 100_000 + b"tq\0",
        b"cpathlib\nPurePosixPath\nq\2",
        b"h\2h\0R0" * 100_000,
    ),
}


@pytest.mark.parametrize(
    ("name", "keep_unknown"), sampled_params([*product(SLOW, [True, False])], 4)
)
def test_no_step_takes_as_long_as_the_stream(name: str, *, keep_unknown: bool) -> None:
    start = time.process_time()
    with pytest.raises(CheckpointError, match=r"file\.pt"):
        read(SLOW[name], TORCH_NAMES, WHAT, keep_unknown=keep_unknown)
    assert time.process_time() - start < 10


def test_calls_within_calls_are_refused_without_a_crash() -> None:
    data = stream(
        b"ctorch._tensor\n_rebuild_from_type_v2\nq\0ctorch\nTensor\nq\x0100h\0",
        b"(h\0h\1" * 100_000,
        b")" + b"Nt" * 100_000 + b"R",
    )
    with pytest.raises(CorruptError, match="a class within another"):
        read(data, TORCH_NAMES, WHAT)


def test_a_memo_of_a_high_number_takes_no_memory() -> None:
    tracemalloc.start()
    try:
        assert read(stream(b"}r\xff\xff\xff\x7f"), TORCH_NAMES, WHAT) == {}
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_what_is_deep_is_refused_without_a_crash(tmp_path: Path) -> None:
    depth = 200_000
    path = archive_with(tmp_path, stream(b"]" * depth + b"a" * (depth - 1)))
    with pytest.raises(CorruptError, match="nested deeper"):
        imports.from_torch(path, tmp_path / "ours")


def test_a_budget_is_spent_once() -> None:
    budget = PickleBudget(1)
    budget.spend(1 << 16)
    with pytest.raises(ValueError, match="far more"):
        budget.spend(65)


VALUES = [
    *({}, [], (), None, True, 1, -1, 255, 65536, -(1 << 31), 1 << 63, 10**40, -(10**40)),
    *(1.5, float("inf"), 1j, "", "text", "\u20ac" * 300, b"", b"\xff\0", b"x" * 300),
    *((1, 2, 3, 4), [1, [2, [3]]], {"a": {1: (2,)}}, {1, 2}, frozenset({"a"}), range(3)),
    collections.OrderedDict(a=1),
    collections.Counter("aab"),
    collections.defaultdict(list, {"a": [1]}),
    collections.deque([1, 2], 5),
    Path("/a/b"),
]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("value", VALUES, ids=lambda v: repr(v)[:20])
def test_plain_data_comes_as_it_was(value: object, protocol: int) -> None:
    found = read(pickle.dumps([value, value], protocol), TORCH_NAMES, WHAT)
    assert found == [value, value]
    assert type(found[0]) is type(value)


def test_bytes_at_random_make_no_other_error() -> None:
    stream_of = pickle.dumps({"a": [1, (2, 3.5), "text", {4}], "b": torch.Size([2])}, 4)
    choose = random.Random(7)
    kept, messages = 0, []
    for _ in range(4000):
        data = bytearray(stream_of)
        for _ in range(choose.randint(1, 4)):
            data[choose.randrange(len(data))] = choose.randrange(256)
        try:
            read(bytes(data), TORCH_NAMES, WHAT, resolve_storage)
            kept += 1
        except CheckpointError as error:
            messages.append(str(error))
    assert kept < 4000
    assert all(WHAT in message for message in messages)


def test_a_file_of_an_old_torch_says_what_to_do(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(IncompatibleError, match=r"old torch.*save it again with torch\.save"):
        imports.from_torch(tmp_path / "a.pt", tmp_path / "ours")


def test_an_archive_in_an_archive_is_only_bytes(tmp_path: Path) -> None:
    inner = io.BytesIO()
    torch.save({"x": Calls(os.system, (f"touch {tmp_path / 'ran'}",))}, inner)
    torch.save({"w": torch.ones(2), "inner": inner.getvalue()}, tmp_path / "a.pt")
    imports.from_torch(tmp_path / "a.pt", tmp_path / "ours")
    with dc.open(tmp_path / "ours") as found:
        assert found.objects["inner"] == inner.getvalue()
    assert not (tmp_path / "ran").exists()
