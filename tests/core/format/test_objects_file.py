import enum
import math
import pathlib
import random
import struct
import subprocess
import sys
import tracemalloc
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, time, timedelta, timezone
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dist_ckpt.core.format import strict_json
from dist_ckpt.core.format.index.index import Node
from dist_ckpt.core.format.objects import objects_file
from dist_ckpt.core.format.objects.objects_file import ObjectsFile, decode, encode
from dist_ckpt.core.format.objects.plain_codec import check_plain, decode_value, encode_value
from dist_ckpt.core.format.objects.plain_types import (
    ArrayValue,
    Device,
    DTypeValue,
    NumpyScalar,
    Size,
    cost_of,
)
from dist_ckpt.core.format.strict_json import max_memory
from dist_ckpt.errors import CheckpointError, CorruptError, IncompatibleError
from long_mode import sampled_params


def bits(value):
    return struct.pack(">d", value)


def same(a, b):  # noqa: PLR0911  # one kind a line
    """Say whether two values are of the same types, order and bits all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return bits(a) == bits(b)
    if isinstance(a, complex):
        return bits(a.real) + bits(a.imag) == bits(b.real) + bits(b.imag)
    if isinstance(a, dict):
        if getattr(a, "default_factory", None) is not getattr(b, "default_factory", None):
            return False
        return same(list(a.items()), list(b.items()))
    if isinstance(a, deque) and a.maxlen != b.maxlen:
        return False
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, datetime):
        return (a, a.fold, a.tzname()) == (b, b.fold, b.tzname()) and a.tzinfo == b.tzinfo
    return a == b


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats()
    | st.complex_numbers()
    | st.text(st.characters(), max_size=5)
    | st.binary(max_size=5)
    | st.datetimes(timezones=st.none() | st.timedeltas(
        timedelta(hours=-23), timedelta(hours=23)).map(timezone))
    | st.dates()
    | st.timedeltas()
    | st.sampled_from(["a/b", "/", ".", "\udc80"]).map(pathlib.Path)
    | st.sampled_from(["a/b", "C:x"]).map(pathlib.PureWindowsPath)
    | st.lists(st.integers(0, 9)).map(tuple).map(Size)
    | st.sampled_from(["float32", "bfloat16"]).map(DTypeValue)
    | st.just(Device("cuda:1"))
    | st.just(NumpyScalar("<f4", b"abcd"))
    | st.just(ArrayValue("int16", (2, 1), b"abcd", "numpy"))
)  # fmt: skip
HASHABLE = st.integers() | st.text(max_size=3) | st.tuples(st.booleans(), st.none()) | st.binary()
KEYS = st.text(max_size=3) | st.integers(-(1 << 70), 1 << 70)
PLAIN = st.recursive(
    SCALARS | st.sets(HASHABLE, max_size=3) | st.frozensets(HASHABLE, max_size=3),
    lambda below: (
        st.lists(below, max_size=3)
        | st.lists(below, max_size=3).map(tuple)
        | st.lists(below, max_size=3).map(deque)
        | st.lists(below, max_size=3).map(lambda items: deque(items, 3))
        | st.dictionaries(KEYS, below, max_size=3)
        | st.dictionaries(KEYS, below, max_size=3).map(OrderedDict)
        | st.dictionaries(KEYS, below, max_size=3).map(lambda d: defaultdict(list, d))
        | st.dictionaries(KEYS, st.integers(), max_size=3).map(Counter)
    ),
    max_leaves=8,
)


def test_a_file_names_its_objects_and_may_lack_the_field():
    golden = Path(__file__).parents[2] / "golden" / "objects-1.msgpack"
    file = ObjectsFile(
        (Node("", "dict", ("outer",)), Node("outer", "dict", ("inner",))),
        {"outer.inner": {"value": 5}},
        objects=("outer", "outer.inner"),
    )
    assert encode(file) == golden.read_bytes()
    assert decode(golden.read_bytes()) == file
    without = encode(replace(file, objects=()))
    assert b"objects" not in without
    assert decode(without).objects == ()
    for objects in ("outer", ["outer", 1], None):
        doc = {**decode_value(golden.read_bytes()), "objects": objects}
        with pytest.raises(CorruptError):
            decode(encode_value(doc))


def test_a_file_says_if_its_keys_are_those_of_dcp():
    golden = Path(__file__).parents[2] / "golden" / "objects-of-dcp-1.msgpack"
    tree = Node("", "dict", ("counts",)), Node("counts", "dict", ("3",))
    file = ObjectsFile(tree, {"counts.3": 1}, has_text_keys=True)
    assert encode(file) == golden.read_bytes()
    assert decode(golden.read_bytes()) == file
    without = encode(replace(file, has_text_keys=False))
    assert b"text_keys" not in without
    assert not decode(without).has_text_keys
    with pytest.raises(CorruptError):
        decode(encode_value({**decode_value(golden.read_bytes()), "text_keys": 1}))


def test_a_file_names_state_that_was_not_cut_and_may_lack_the_field():
    golden = Path(__file__).parents[2] / "golden" / "objects-1-uncut.msgpack"
    file = ObjectsFile(
        (Node("", "dict", ("optim",)),),
        {"optim.param_groups.0": {"lr": 0.5}},
        uncut={"optim.state.w.L": "whole", "optim.state.w.R": "joined"},
    )
    assert encode(file) == golden.read_bytes()
    assert decode(golden.read_bytes()) == file
    without = encode(replace(file, uncut={}))
    assert b"uncut" not in without
    assert decode(without).uncut == {}
    for uncut in (["optim.state.w.L"], {"optim.state.w.L": "cut"}, {"a": 1}, {1: "whole"}, None):
        doc = {**decode_value(golden.read_bytes()), "uncut": uncut}
        with pytest.raises(CorruptError):
            decode(encode_value(doc))


@given(PLAIN)
def test_plain_data_comes_back_with_its_types_and_bits(value):
    data = encode_value(value)
    decoded = decode_value(data)
    assert same(decoded, value)
    assert encode_value(decoded) == data


@pytest.mark.parametrize(
    "value",
    [
        *(0, -1, 1 << 63, (1 << 64) - 1, 1 << 64, -(1 << 63), -(1 << 63) - 1, 3**5000, -(3**5000)),
        *(0.0, -0.0, math.inf, -math.inf, 5e-324, complex(-0.0, math.nan)),
        *("", "ö", "\0", "\ud800", "\udc80\U0001f600", b"", b"\xff"),
        *((), [], {}, set(), frozenset(), {"": None}, {0: 1, "0": 2, -1: 3}, {1 << 80: 1}),
        *(range(3), range(5, -(1 << 70), -2), deque(), deque([()], 1), deque(maxlen=0)),
        *(OrderedDict(b=1, a=2), Counter("aab"), defaultdict(None, a=1), {"a": ({"b": [()]},)}),
        *({frozenset({frozenset(), (1, "a")}), 2.5, None},),
        *(datetime(2024, 1, 2, 3, 4, 5, 6), datetime(2024, 1, 1, fold=1), datetime.now(UTC)),
        datetime(1, 1, 1, tzinfo=timezone(timedelta(microseconds=-1), "odd")),
        datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=1), "UTC+02:00")),
        *(datetime.max, datetime.min, date.max, timedelta.min, timedelta.max),
        *(pathlib.Path("a") / "b", pathlib.PurePosixPath("/x"), pathlib.PureWindowsPath("C:/x")),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_the_edges_of_every_type_come_back(value):
    assert same(decode_value(encode_value(value)), value)
    assert same(decode_value(encode_value([value])), [value])


@pytest.mark.parametrize("factory", [bool, int, float, complex, str, bytes, list, tuple, dict, set])
def test_a_defaultdict_keeps_its_factory(factory):
    decoded = decode_value(encode_value(defaultdict(factory, {1: factory()})))
    assert decoded.default_factory is factory
    assert decoded[2] == factory()


@given(st.integers(0, (1 << 52) - 1), st.booleans())
def test_a_nan_keeps_its_payload(payload, negative):
    pattern = negative << 63 | 0x7FF << 52 | payload
    (value,) = struct.unpack(">d", pattern.to_bytes(8, "big"))
    assert bits(decode_value(encode_value(value))) == bits(value)


def test_a_dicts_order_is_kept_and_a_sets_is_not_seen():
    assert list(decode_value(encode_value({"b": 1, "a": 2}))) == ["b", "a"]
    assert encode_value({"b": 1, "a": 2}) != encode_value({"a": 2, "b": 1})
    members = [*range(0, 1 << 20, 1 << 14), "a", "b", (1, 2), None, 2.5]
    first = encode_value(set(members))
    random.Random(0).shuffle(members)
    assert encode_value(set(members)) == first


def test_the_same_data_is_the_same_bytes_in_another_process():
    # Strings hash differently in every process, so their sets have another order.
    code = (
        "from dist_ckpt.core.format.objects.plain_codec import encode_value;"
        "print(encode_value({'s': {str(n) for n in range(50)}}).hex())"
    )
    run = [sys.executable, "-c", code]
    outputs = {
        subprocess.run(run, capture_output=True, check=True, env={"PYTHONHASHSEED": seed}).stdout
        for seed in "123"
    }
    assert len(outputs) == 1


# --- torch and numpy -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "stand_in"),
    [
        (torch.Size([2, 3]), Size((2, 3))),
        (torch.float8_e4m3fn, DTypeValue("float8_e4m3fn")),
        (torch.device("cuda", 3), Device("cuda:3")),
        (torch.device("cpu"), Device("cpu")),
        (np.float64(1.5), NumpyScalar("<f8", np.float64(1.5).tobytes())),
        (np.float16("nan"), NumpyScalar("<f2", np.float16("nan").tobytes())),
        (np.int8(-1), NumpyScalar("|i1", b"\xff")),
        (np.uint64(1), NumpyScalar("<u8", b"\1" + bytes(7))),
        (np.bool_(True), NumpyScalar("|b1", b"\1")),
        (np.complex64(1j), NumpyScalar("<c8", np.complex64(1j).tobytes())),
        (np.str_("hé"), NumpyScalar("<U2", np.str_("hé").tobytes())),
        (np.bytes_(b"hi"), NumpyScalar("|S2", b"hi")),
        (np.datetime64("2024-01-01"), NumpyScalar("<M8[D]", np.datetime64("2024-01-01").tobytes())),
        (np.timedelta64(3, "ms"), NumpyScalar("<m8[ms]", b"\3" + bytes(7))),
        (np.datetime64("2024", "25s"), None),  # type: ignore[call-overload]
    ],
    ids=repr,
)
def test_torch_and_numpy_values_are_stored_like_their_stand_ins(value, stand_in):
    if stand_in is not None:
        assert decode_value(encode_value(value)) == stand_in
        assert encode_value(value) == encode_value(stand_in)
    made = decode_value(encode_value([value, {value}]), make=real)
    assert all(type(item) is type(value) for item in (made[0], *made[1]))
    assert repr(made) == repr([value, {value}])


def real(stand_in):
    match stand_in:
        case Size(shape):
            return torch.Size(shape)
        case DTypeValue(name):
            return getattr(torch, name)
        case Device(name):
            return torch.device(name)
        case NumpyScalar(dtype, data):
            return np.frombuffer(data, dtype)[0]
        case _:
            return stand_in


def test_what_cannot_be_made_is_damage():
    def refuse(stand_in):
        raise ValueError(f"no {stand_in}")

    data = encode(ObjectsFile(values={"a": DTypeValue("float3")}))
    with pytest.raises(CorruptError, match=r"objects.msgpack: no DTypeValue"):
        decode(data, make=refuse)


def test_neither_torch_nor_numpy_is_imported():
    code = (
        "import sys, dist_ckpt.core.format.objects.objects_file;"
        "from dist_ckpt.core.format.objects.plain_codec import decode_value;"
        "from dist_ckpt.core.format.objects.plain_codec import encode_value;"
        "from dist_ckpt.core.format.objects.plain_types import DTypeValue, NumpyScalar;"
        "v = decode_value(encode_value([DTypeValue('int8'), NumpyScalar('<f4', b'1234')]));"
        "assert not {'torch', 'numpy'} & set(sys.modules), v"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- refusals --------------------------------------------------------------------------------

Point = namedtuple("Point", "x")


class Color(enum.IntEnum):
    RED = 1


class Level(enum.StrEnum):
    LOW = "low"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Pair(NamedTuple):
    first: int
    second: int


class Window(deque[int]):
    pass


@dataclass
class Options:
    lr: float = 0.1


class Name(str):
    __slots__ = ()


class Table(dict[Any, Any]):
    pass


class Thing:
    pass


class LocalTensor(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "fact", "remedy"),
    [
        (bytearray(b"a"), "builtins.bytearray", "store bytes(value)"),
        (memoryview(b"a"), "builtins.memoryview", "store bytes(value)"),
        (Color.RED, "Color", "store value.value, and make it again with Color(saved)"),
        (Level.LOW, "Level", "store value.value, and make it again with Level(saved)"),
        (Access.READ | Access.WRITE, "Access", "store value.value, and make it again with Access("),
        (lambda: 1, "builtins.function", "plain data"),
        (Thing(), "Thing", "state_dict"),
        (Thing, "builtins.type", "plain data"),
        (Point(1), "Point", "store value._asdict(), and make it again with Point(**saved)"),
        (Pair(1, 2), "Pair", "store value._asdict(), and make it again with Pair(**saved)"),
        (Name("a"), "Name", "store str(value), and make it again"),
        (Table(), "Table", "store dict(value), and make it again"),
        (Window([1], 2), "Window", "store deque(value), and make it again"),
        (Options(), "Options", "store dataclasses.asdict(value), and make it again with Options("),
        (object(), "builtins.object", "plain data"),
        (iter([]), "list_iterator", "store list(value)"),
        (BytesIO(b"a"), "_io.BytesIO", "store value.getvalue(), and make a stream of the saved"),
        ({}.keys(), "dict_keys", "store set(value)"),
        ({}.values(), "dict_values", "store list(value)"),
        (UserDict(), "UserDict", "store dict(value)"),
        (MappingProxyType({}), "mappingproxy", "store dict(value)"),
        (slice(1), "builtins.slice", "store (value.start, value.stop, value.step)"),
        (time(1), "datetime.time", "store value.isoformat()"),
        (timezone.utc, "datetime.timezone", "plain data"),  # noqa: UP017
        (Ellipsis, "ellipsis", "plain data"),
        (ValueError("a"), "builtins.ValueError", "plain data"),
        (np.zeros(2), "numpy.ndarray", "dicts, lists and tuples"),
        (np.dtype("f4"), "numpy", "plain data"),
        (np.longdouble(1), "dtype float128", ".item()"),
        (np.str_(""), "dtype <U", ".item()"),
        (np.str_("a\0"), "dtype <U2", ".item()"),
        (np.bytes_(b"\0"), "dtype |S1", ".item()"),
        (np.void(b"ab"), "dtype |V2", ".item()"),
        (torch.zeros(2), "torch.Tensor", "dicts, lists and tuples"),
        (nn.Parameter(torch.zeros(2)), "Parameter", "dicts, lists and tuples"),
        (torch.Generator(), "Generator", "plain data"),
        (torch.strided, "torch.layout", "plain data"),
        (defaultdict(lambda: 1), "defaultdict of <function", "or a dict"),
        ({True: 1}, "the key True of class bool", "use str or int keys"),
        ({1.0: 1}, "the key 1.0 of class float", "use str or int keys"),
        ({(1,): 1}, "the key (1,) of class tuple", "use str or int keys"),
        ({None: 1}, "the key None of class NoneType", "use str or int keys"),
        (datetime(2024, 1, 1, tzinfo=ZoneInfo("UTC")), "zone zoneinfo", "astimezone"),
    ],
)
def test_what_would_not_come_back_is_refused_with_its_place_class_and_remedy(value, fact, remedy):
    for wrapped, place in [
        (value, "my.state "),
        ({"a": [0, value]}, "my.state['a'][1] "),
        ((OrderedDict({7: value}),), "my.state[0][7] "),
    ]:
        with pytest.raises(TypeError) as raised:
            check_plain(wrapped, "my.state")
        message = str(raised.value)
        assert message.startswith(place)
        assert fact in message
        assert remedy in message.rsplit(":", 1)[-1]


def test_a_member_of_a_set_is_refused_with_itself():
    with pytest.raises(TypeError, match=r"x\['s'\]\[.*Color.RED.*\] is a .*Color, which"):
        check_plain({"s": {1.5, Color.RED}}, "x")


def nested(depth):
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def test_data_that_is_too_deep_or_contains_itself_is_refused():
    loop: dict[str, Any] = {"a": []}
    loop["a"].append(loop)
    for value in (nested(65), loop, nested(100_000)):
        with pytest.raises(ValueError, match=r"x\[.*nested deeper than 64 levels, or contains it"):
            check_plain(value, "x")
    assert decode_value(encode_value(nested(64))) == nested(64)


def test_the_deepest_value_that_is_taken_can_be_stored_everywhere():
    deep = nested(64)
    key = ("dp", 0)
    file = ObjectsFile((), {"a": deep}, {"b": {key: deep}}, (), {"c": deep})
    assert decode(encode(file)) == file


def test_a_string_of_bytes_too_long_for_msgpack_is_refused(monkeypatch):
    def too_long(*_, **__):
        raise ValueError("bytes is too large")

    monkeypatch.setattr(msgpack, "packb", too_long)
    with pytest.raises(ValueError, match="x is too large for msgpack"):
        check_plain(b"", "x")


# --- files -----------------------------------------------------------------------------------

FILE = ObjectsFile(
    tree=(Node("", "dict", ("model", 3)), Node("model", "list", ())),
    values={"lr": 0.5, "names": ["a", "b"], "betas": (0.9, 0.95)},
    per_rank={"rng": {0: b"x", "a": 1, ("dp", (1, "b")): {"t": ArrayValue("bool", (1,), b"\1")}}},
    numpy=("w",),
    metadata={"run": "first", "tags": {"a"}},
)


def test_a_file_decodes_to_what_was_encoded():
    data = encode(FILE)
    assert decode(data) == FILE
    assert encode(decode(data)) == data
    assert decode(encode(ObjectsFile())) == ObjectsFile()


def test_the_per_rank_values_of_a_file_are_made_too():
    made = decode(encode(FILE), make=lambda stand_in: type(stand_in).__name__)
    assert made.per_rank["rng"]["dp", (1, "b")] == {"t": "ArrayValue"}


def test_every_prefix_of_a_file_is_damaged():
    data = encode(FILE)
    for length in range(len(data)):
        with pytest.raises(CorruptError, match=r"^f: .*; restore it"):
            decode(data[:length], label="f")


def test_no_flipped_byte_raises_anything_but_our_errors():
    # The digest in the index finds them all; here none may do harm.
    data = encode(FILE)
    for place in range(len(data)):
        for mask in (0x01, 0x04, 0x20, 0x80, 0xFF):
            flipped = bytearray(data)
            flipped[place] ^= mask
            try:
                decode(bytes(flipped))
            except CheckpointError:
                continue


@given(st.binary(max_size=60))
def test_no_bytes_raise_anything_but_our_errors(data):
    try:
        decode(data)
    except CheckpointError:
        return


def doc(**fields):
    facts = {"format": {"version": 1, "requires": []}, "tree": [], "values": {}}
    facts |= {"per_rank": {}, "numpy": [], "metadata": {}}
    return msgpack.packb(facts | fields)


def ext(code, payload):
    data = payload if type(payload) is bytes else msgpack.packb(payload)
    return msgpack.ExtType(code, data)


@pytest.mark.parametrize(
    "fields",
    [
        {"more": 1},
        {"tree": {}},
        {"tree": [["", "dict"]]},
        {"tree": [["", "dict", [1.5]]]},
        {"tree": [["", "dict", [True]]]},
        {"tree": [["", 1, []]]},
        {"tree": [["", "dict", []], ["", "dict", []]]},
        {"tree": [["", "dict", ["a"]], *(["a" + ".0" * n, "list", [0, 0]] for n in range(60))]},
        {
            "tree": [
                [".".join("a" * n), "dict", [".".join("a" * m) for m in range(1, 40 - n)]]
                for n in range(30)
            ]
        },
        {"values": []},
        {"values": {1: 2}},
        {"per_rank": {"a": {}}},
        {"per_rank": {"a": [[1]]}},
        {"per_rank": {"a": [[1.5, 1]]}},
        {"per_rank": {"a": [[True, 1]]}},
        {"per_rank": {"a": [[1, 1], [1, 2]]}},
        {"numpy": "w"},
        {"numpy": [1]},
        {"metadata": None},
        {"format": {"version": 0, "requires": []}},
        {"format": {}},
    ],
)
def test_a_file_of_another_form_is_damaged(fields):
    with pytest.raises(CorruptError, match=r"^objects.msgpack"):
        decode(doc(**fields))


@pytest.mark.parametrize(
    "value",
    [
        ext(2, b"\xff"),
        ext(3, {}),
        ext(3, 1),
        ext(4, [[]]),
        ext(4, [1, 1]),
        ext(4, 1),
        ext(5, [{}]),
        ext(6, b"123"),
        ext(7, []),
        ext(8, []),
        ext(9, ["eval", {}]),
        ext(9, ["list"]),
        ext(9, [[], {}]),
        ext(10, [True]),
        ext(10, "ab"),
        ext(11, 1),
        ext(12, ["O", b"12345678"]),
        ext(12, ["<f16", bytes(16)]),
        ext(12, ["<f4", b"123"]),
        ext(12, ["<f4", "1234"]),
        ext(12, ["<M8[s", bytes(8)]),
        ext(12, ["<i8[s]", bytes(8)]),
        ext(12, ["<U0", b""]),
        ext(12, ["<U2", bytes(2)]),
        ext(13, b""),
        ext(14, [2024, 1, 1]),
        ext(14, [2024, 13, 1, 0, 0, 0, 0, 0, None]),
        ext(14, [2024, 1, 1, 0, 0, 0, 0, 2, None]),
        ext(14, [2024, 1, 1, 0, 0, 0, 0, "0", None]),
        ext(14, [1 << 63, 1, 1, 0, 0, 0, 0, 0, None]),
        ext(14, [2024, 1, 1, 0, 0, 0, 0, 0, [2, 0, 0, None]]),
        ext(14, [2024, 1, 1, 0, 0, 0, 0, 0, [0, 0, 0, 1]]),
        ext(15, [0, 0, 0]),
        ext(16, [1 << 40, 0, 0]),
        ext(16, ["1", 0, 0]),
        ext(17, ["Path", "a"]),
        ext(17, ["PosixPath", 1]),
        ext(17, [["PosixPath"], "a"]),
        ext(17, ["PosixPath"]),
        ext(18, ["float32", [2], b"1234", "tensor"]),
        ext(18, ["float3", [1], b"1234", "tensor"]),
        ext(18, ["float32", [-1], b"", "tensor"]),
        ext(18, ["float32", [1 << 62, 0], b"", "tensor"]),
        ext(18, ["float32", [1], "1234", "tensor"]),
        ext(18, ["float32", [1], b"1234", "list"]),
        {"a": {1.5: 2}},
        {"a": {True: 2}},
        {"a": {(1,): 2}},
        {None: 2},
    ],
    ids=str,
)
def test_a_value_of_another_form_is_damaged(value):
    with pytest.raises(CorruptError, match=r"^objects.msgpack: .*; restore it"):
        decode(doc(values={"x": value}))


def alike(count):
    """Return values of each kind that all have one hash, as a file can choose them."""
    return {
        "integers": [n * ((1 << 61) - 1) for n in range(count)],
        "complex": [complex(1 + 1000003 * n, -n) for n in range(2, 2 + count)],
        "tuples": [(n * ((1 << 61) - 1),) for n in range(count)],
    }


@pytest.mark.parametrize("kind", alike(0))
def test_a_set_that_would_take_for_ever_to_make_is_refused(kind):
    few, many = alike(64)[kind], alike(65)[kind]
    assert len(set(map(hash, many))) == 1
    assert same(decode_value(encode_value(set(few))), set(few))
    data = b"".join([b"\xdc\x00\x41", *map(encode_value, many)])
    with pytest.raises(CorruptError, match="more than 64 members or keys of one hash"):
        decode(doc(values={"x": ext(4, data)}))
    with pytest.raises(
        ValueError, match=r"^x\[3\] cannot be stored: more than 64 members .* store a list"
    ):
        encode_value([0, 1, 2, frozenset(many)], "x")


def test_a_dict_that_would_take_for_ever_to_make_is_refused():
    many = alike(65)["integers"]
    data = b"\xde\x00\x41" + b"".join(encode_value(n) + b"\xc0" for n in many)
    with pytest.raises(ValueError, match="more than 64 members or keys of one hash"):
        decode_value(data)
    with pytest.raises(ValueError, match="more than 64 members or keys of one hash"):
        encode_value(dict.fromkeys(many))


def test_an_objects_file_has_a_limit(monkeypatch):
    monkeypatch.setattr(objects_file, "MAX_NBYTES", 1000)
    assert encode(ObjectsFile(values={"x": bytes(800)}))
    with pytest.raises(ValueError, match="the limit is 1000: store large data as tensors"):
        encode(ObjectsFile(per_rank={"x": {0: bytes(1000)}}))


@pytest.mark.parametrize("key", [1 << 64, -(1 << 63) - 1, ("dp", 1 << 70)])
def test_a_per_rank_key_beyond_64_bits_is_damaged(key):
    data = encode_value(key)
    with pytest.raises(CorruptError, match="beyond 64 bits"):
        decode(doc(per_rank={"x": [[msgpack.unpackb(data), 1]]}))


def test_a_key_twice_is_damaged():
    twice = b"\x82" + 2 * (msgpack.packb("a") + msgpack.packb(1))
    with pytest.raises(CorruptError, match="same key twice"):
        decode(doc(values={"x": ext(7, twice)}))


@pytest.mark.parametrize("code", [0, 21, 127])
def test_a_type_of_a_newer_version_asks_for_an_upgrade(code):
    with pytest.raises(IncompatibleError, match=f"^f: a value of type {code}.*upgrade"):
        decode(doc(values={"x": ext(code, b"")}), label="f")


def test_a_newer_version_asks_for_an_upgrade():
    with pytest.raises(IncompatibleError, match="upgrade dist_ckpt"):
        decode(doc(format={"version": 2}))


def test_data_that_is_deep_on_purpose_is_damaged():
    value: Any = []
    for _ in range(100):
        value = ext(3, [value])
    with pytest.raises(CorruptError, match="nested deeper"):
        decode(doc(values={"x": value}))
    for deep in (b"\x91" * 100_000 + b"\xc0", b"\x81\x01" * 100_000 + b"\xc0"):
        with pytest.raises(CorruptError):
            decode(deep)


def test_lists_and_dicts_count_as_depth_when_they_are_read():
    assert decode_value(msgpack.packb(nested(64))) == nested(64)
    for deep in (nested(65), {"a": nested(64)}, nested(500)):
        with pytest.raises(ValueError, match="nested deeper than 64 levels"):
            decode_value(msgpack.packb(deep))
        with pytest.raises(CorruptError, match="nested deeper than 64 levels"):
            decode(doc(values={"x": [[[[[deep]]]]]}))


@pytest.mark.parametrize("place", [lambda t: t, lambda t: [{"a": t}], lambda t: ext(3, [t])])
def test_the_type_of_times_that_msgpack_has_is_as_unknown_as_any_other(place):
    time = msgpack.Timestamp(1)
    with pytest.raises(IncompatibleError, match=r"^f: a value of type -1, .*upgrade"):
        decode(doc(values={"x": place(time)}), label="f")


@pytest.mark.parametrize("shape", [(1,) * 65, (0, 1 << 62)])
def test_an_array_that_would_not_be_read_back_is_refused(shape):
    array = ArrayValue("float32", shape, bytes(4) if 0 not in shape else b"")
    with pytest.raises(ValueError, match=r"^x\['a'\] is an array .*: store it in"):
        check_plain({"a": array}, "x")


@pytest.mark.parametrize("head", [b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"])
def test_a_length_that_the_data_has_not_allocates_nothing(head):
    with pytest.raises(CorruptError):
        decode(head + b"\xff" * 8)


@pytest.mark.parametrize("where", ["the document", "its format"])
@pytest.mark.parametrize("key", [7, -1])
def test_a_field_whose_name_is_no_text_is_unknown(where, key):
    doc: dict[Any, Any] = {"format": {"version": 1, "requires": []}, "tree": [], "values": {}}
    doc |= {"per_rank": {}, "numpy": [], "metadata": {}}
    (doc if where == "the document" else doc["format"])[key] = 1
    with pytest.raises(CorruptError, match=rf"unknown field '{key}'"):
        decode(msgpack.packb(doc))


# --- memory ----------------------------------------------------------------------------------


def many(item: bytes, count: int = 3000) -> bytes:
    return b"\xdd" + count.to_bytes(4, "big") + item * count


def packed(code, payload):
    return msgpack.packb(ext(code, payload))


def in_tuples(depth, value):
    return (in_tuples(depth - 1, value),) if depth else value


SHAPES = {
    "empty dicts": many(b"\x80"),
    "empty lists": many(b"\x90"),
    "nested lists": many(b"\x91" * 20 + b"\x90", 150),
    "nested dicts": many(b"\x81\xa1a" * 20 + b"\x80", 150),
    "dicts of one": many(b"\x81\x00\x00"),
    "dicts of five": many(msgpack.packb(dict.fromkeys("abcde", 0.5)), 600),
    "dicts of twenty": many(msgpack.packb(dict.fromkeys(range(20))), 200),
    "a large dict": msgpack.packb(dict.fromkeys(map(str, range(20_000)), 1000)),
    "a large dict of integers": msgpack.packb({n: n for n in range(300, 22_300)}),
    "short strings": many(b"\xa2ab"),
    "no ASCII": many(b"\xa2\xc4\x80"),
    "long strings": many(b"\xd9\x20" + b"a" * 32),
    "one character beyond all": msgpack.packb("a" * 20_000 + "\U0001f600"),
    "negative": many(b"\xe0"),
    "integers": many(b"\xcd\x10\x00"),
    "booleans": many(b"\xc3"),
    "floats": many(msgpack.packb(0.5)),
    "binaries": many(b"\xc4\x02ab"),
    "no tuples": many(packed(3, [])),
    "tuples": many(packed(3, [0.5, 1000])),
    "sets": many(packed(4, [1, 2])),
    "large sets": many(packed(4, list(range(300, 400))), 50),
    "frozensets": many(packed(5, [1])),
    "ordered dicts": many(packed(7, {1: 2})),
    "counters": many(packed(8, {1: 2})),
    "defaultdicts": many(packed(9, ["None", {}])),
    "sizes": many(packed(10, [1, 2, 3])),
    "scalars": many(packed(12, ["<f4", b"1234"])),
    "times": many(packed(14, [2024, 1, 1, 0, 0, 0, 0, 0, [0, 3600, 0, None]])),
    "paths": many(packed(17, ["PosixPath", "a/b"]), 1000),
    "arrays": many(packed(18, ["uint8", [0], b"", "tensor"])),
    "deques": many(packed(19, [None, []])),
    "ranges": many(packed(20, [0, 1000, 1])),
    "deep tuples": encode_value(in_tuples(40, bytes(5000))),
}


@pytest.mark.parametrize("shape", sampled_params([*SHAPES], 3))
def test_what_a_value_costs_is_known_from_its_bytes(shape):
    data = SHAPES[shape]
    decode_value(data)
    # Python's table of keys, which msgpack adds to, grows by many at once now and then, not twice.
    kept, peak = map(min, *(measured(lambda: decode_value(data))[1:] for _ in range(2)))
    cost = cost_of(data, 1 << 63)
    assert kept <= cost * (1.5 if "large dict" in shape else 1.1) + 4096
    assert peak <= cost * (2.0 if "large dict" in shape else 1.7) + 4096
    # Nor is it so much too high that what people save would be refused.
    assert cost <= kept * 7 + len(data) * 48


def measured(make):
    tracemalloc.start()
    try:
        return make(), *tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()


@pytest.fixture
def _little_is_free(monkeypatch):
    """Have the limits of documents of 100 MB in documents of 30 KB."""
    monkeypatch.setattr(strict_json, "FREE_NBYTES", 1 << 15)


@pytest.mark.usefixtures("_little_is_free")
@pytest.mark.parametrize("shape", ["empty dicts", "empty lists", "nested dicts", "sets", "deques"])
def test_what_costs_far_more_than_its_bytes_is_refused_before_it_is_made(shape):
    data = doc(values={"x": 0}).replace(b"\xa1x\x00", b"\xa1x" + SHAPES[shape])

    def refuse():
        with pytest.raises(CorruptError, match=r"bytes would take more than \d+ bytes of memory"):
            decode(data)

    refuse()
    assert measured(refuse)[2] < 16 * len(data) + (1 << 15)


def test_lists_that_claim_to_be_long_are_refused_before_they_are_made():
    data = (b"\xdd" + (1 << 20).to_bytes(4, "big")) * 100 + bytes(1 << 20)
    with pytest.raises(ValueError, match=r"bytes would take more than \d+ bytes of memory"):
        decode_value(data)


@pytest.mark.usefixtures("_little_is_free")
def test_what_a_load_would_refuse_for_its_memory_is_not_saved():
    few = ObjectsFile(values={"step": 1, "history": [{}] * 300})
    assert decode(encode(few)) == few
    for file, name in [
        (ObjectsFile(values={"step": 1, "history": [{}] * 3000}), "history"),
        (ObjectsFile(values={"step": 1}, per_rank={"seen": {0: [[]] * 3000}}), "seen"),
        (ObjectsFile(metadata={"a": [[]] * 3000}), "the metadata"),
    ]:
        with pytest.raises(ValueError, match=f"memory, .*small values of {name} as tensors, or as"):
            encode(file)


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (lambda n: list(range(n)), 10_000_000),
        (lambda n: [i / 7 for i in range(n)], 10_000_000),
        (lambda n: {f"token-{i}": i for i in range(n)}, 3_000_000),
        (lambda n: {i: i for i in range(n)}, 1_000_000),
        (lambda n: [{"loss": i / 7, "step": i, "lr": 0.1} for i in range(n)], 1_000_000),
        (lambda n: [(i, i / 7) for i in range(n)], 1_000_000),
        (lambda n: [[i, i + 1] for i in range(n)], 1_000_000),
        (lambda n: set(range(n)), 1_000_000),
        (lambda n: [f"{i % 100:02}" for i in range(n)], 2_000_000),
        (lambda n: "text" * n, 10_000_000),
        (lambda n: bytes(4 * n), 10_000_000),
    ],
    ids=[
        *("integers", "floats", "tokens", "numbers", "history", "pairs", "lists", "set"),
        *("short strings", "text", "bytes"),
    ],
)
def test_so_many_values_as_people_save_are_taken(make, count):
    # By a hundredth of them: their numbers are shorter, which costs more a byte.
    data = encode_value(make(count // 100))
    cost = cost_of(data, 1 << 63)
    assert cost * 100 < max_memory(100 * len(data))
    assert decode_value(data) == make(count // 100)
