"""docs/format.md says what the code does, and its reader reads what the code writes."""

import json
import re
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from typing import Any

import pytest

from dist_ckpt.core.format import checksums, filenames, strict_json
from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.geometry import ElementRange, Flat, Grid, Layout, Region, Regions
from dist_ckpt.core.format.index.index import (
    Abandoned,
    AttachedFileRecord,
    Catalog,
    Component,
    Fusion,
    Index,
    Node,
    ObjectsFileRecord,
    ShardFileRecord,
    TensorRecord,
)
from dist_ckpt.core.format.index.index_json import decode, encode
from dist_ckpt.core.format.objects import objects_file
from dist_ckpt.core.format.objects.objects_file import ObjectsFile
from dist_ckpt.core.format.objects.plain_types import (
    ArrayValue,
    Device,
    DTypeValue,
    Ext,
    NumpyScalar,
    Size,
)
from dist_ckpt.core.format.shard_file import arrange_shards, decode_header
from dist_ckpt.errors import CorruptError
from headers import encode_header, shard_file

GOLDEN = Path(__file__).parents[2] / "golden"
TEXT = (Path(__file__).parents[3] / "docs" / "format.md").read_text()

# Rows 0 and 1 on rank 0, and so on; a flat cut; a pinwheel; a scalar; something empty.
LAYOUTS = (
    Layout(Grid(((0, 2, 3), (0, 1, 5))), ((0,), (1,), (0, 1), (0, 1))),
    Layout(Flat((0, 7, 15)), ((1,), (0,))),
    Layout(
        Regions(
            (
                Region((0, 0), (2, 1)),
                Region((0, 1), (1, 2)),
                Region((1, 1), (1, 1)),
                Region((1, 2), (2, 1)),
                Region((2, 0), (1, 2)),
            )
        ),
        ((0,), (1,), (0,), (1,), (0,)),
    ),
    Layout(Grid(()), ((0, 1),)),
    Layout(Grid(((0, 0), (0, 4))), ((1,),)),
)
TENSORS = {
    "w": TensorRecord("float32", (3, 5), 0, 1, 0),
    "w[0:1]": TensorRecord("complex128", (3, 5), 1, 0, 0),
    "pinwheel": TensorRecord("bfloat16", (3, 3), 2, 0, 0),
    "step": TensorRecord("int64", (), 3, 0, 1),
    "empty": TensorRecord("bool", (0, 4), 4, 0, 1),
}
CATALOG = Catalog(
    world_size=2,
    mesh=(),
    components=(Component("model", "model"), Component("Ö", "c01")),
    layouts=LAYOUTS,
    tensors=TENSORS,
    aliases={"tied": "w"},
    values={"lr": 0, "mine": 1, "every": 1},
    per_rank={"rng": (((("dp", 0)), 0),)},
    parameters={"w": True, "w[0:1]": True, "pinwheel": False, "empty": False},
)
BLOCK_NBYTES = 24
GLOBAL = ObjectsFile(
    (Node("", "dict", ("w", "step")),),
    {"lr": [0.5, (1, {2}), -(1 << 70), 1j, "\ud800"]},
    metadata={"run": "a"},
)
RANK_0 = ObjectsFile(per_rank={"rng": {("dp", 0): b"abc"}})
EVERY_TYPE: list[Any] = [
    *(None, True, -1, 1 << 64, 0.1, "ö", "\udc80", b"\0", (), [()], {1: {"a": ()}}, 1 - 0j),
    *(
        {1, "a", (2,)},
        frozenset({b"a"}),
        OrderedDict(a=1),
        Counter("aab"),
        defaultdict[Any, Any](list, a=1),
    ),
    *(Size((2, 3)), DTypeValue("bfloat16"), Device("cuda:1")),
    *(NumpyScalar("<f4", b"abcd"), ArrayValue("int16", (2,), b"abcd", "numpy")),
    *(datetime(2024, 2, 29, 12, tzinfo=UTC), datetime(2024, 1, 1, fold=1)),
    *(deque([1, "a"], maxlen=3), deque([()]), range(7, -1, -2)),
    *(date(2024, 2, 29), timedelta(-1, 2, 3), PurePosixPath("/a/b"), PureWindowsPath("C:/a")),
]
RANK_1 = ObjectsFile(values={"mine": frozenset({Size((1, 2))}), "every": EVERY_TYPE})


def whole(fqn):
    """Return a tensor's bytes, all different from its neighbours'."""
    record = TENSORS[fqn]
    nbytes = Region.whole(record.shape).numel * DTYPES[record.dtype].itemsize
    return bytes((i * 7 + len(fqn)) % 256 for i in range(nbytes))


def part(fqn, cell):
    record = TENSORS[fqn]
    size = DTYPES[record.dtype].itemsize
    if isinstance(cell, ElementRange):
        return whole(fqn)[cell.start * size : cell.stop * size]
    numbers = [0]
    for n, (first, count) in zip(
        record.shape, zip(cell.offset, cell.shape, strict=True), strict=True
    ):
        numbers = [number * n + first + i for number in numbers for i in range(count)]
    return b"".join(whole(fqn)[number * size : (number + 1) * size] for number in numbers)


def write_shards(folder, component, rank):
    cells = []
    for fqn, record in TENSORS.items():
        layout = LAYOUTS[record.layout]
        cells += [
            (fqn, record.dtype, record.shape, layout.cell(number))
            for number in range(layout.cut.num_cells)
            if record.component == component and layout.holder(number, record.rotation) == rank
        ]
    if not cells:
        return []
    shards = arrange_shards(cells)
    data = [part(shard.fqn, shard.cell) for shard in shards]
    shards = tuple(
        replace(
            shard,
            digests=tuple(
                checksums.block_digest(bytes_[span.start : span.stop])
                for span in checksums.blocks(len(bytes_), BLOCK_NBYTES)
            ),
        )
        for shard, bytes_ in zip(shards, data, strict=True)
    )
    file = shard_file(CATALOG.components[component].name, rank, 2, 9, BLOCK_NBYTES, shards)
    header = encode_header(file)
    name = filenames.shard_file(CATALOG.components[component].stem, rank)
    (folder / name).write_bytes(header + b"".join(data))
    return [
        ShardFileRecord(
            component, rank, file.nbytes, len(header), checksums.document_digest(header)
        )
    ]


def write_checkpoint(path):
    """Write a checkpoint as attempt 2, between an older one, an abandoned one and an open one."""
    folder = path / "a2-0123456789abcdef"
    for name in (folder.name, "a1-" + "f" * 16, "a10-" + "0" * 16, "a11-" + "0" * 16, "other"):
        (path / name).mkdir()
    files = [f for n in range(2) for rank in range(2) for f in write_shards(folder, n, rank)]
    records = []
    for name, file in [
        (filenames.OBJECTS, GLOBAL),
        (filenames.objects_file(0), RANK_0),
        (filenames.objects_file(1), RANK_1),
    ]:
        data = objects_file.encode(file)
        (folder / name).write_bytes(data)
        records.append(ObjectsFileRecord(name, len(data), checksums.document_digest(data)))
    index = Index(folder.name, 9, CATALOG, tuple(files), tuple(records), {}, {}, 1.5, "0f" * 16)
    (folder / filenames.INDEX).write_bytes(encode(index))
    older = replace(index, attempt="a1-" + "f" * 16, step=8)
    (path / older.attempt / filenames.INDEX).write_bytes(encode(older))
    abandoned = Abandoned("a10-" + "0" * 16, "me", "no space")
    (path / abandoned.attempt / filenames.INDEX).write_bytes(encode(abandoned))
    return folder


@pytest.fixture(scope="module")
def reader():
    (code,) = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    namespace: dict[str, Any] = {}
    exec(compile(code, "docs/format.md", "exec"), namespace)
    return SimpleNamespace(**namespace)


def test_the_reader_of_the_specification_reads_what_the_code_writes(reader, tmp_path):
    folder, index = reader.open_checkpoint(write_checkpoint(tmp_path).parent)
    assert (folder.name, index["step"]) == ("a2-0123456789abcdef", 9)
    for fqn in TENSORS:
        assert reader.read_tensor(folder, index, fqn) == whole(fqn)
    assert reader.read_tensor(folder, index, "tied") == whole("w")
    main = reader.read_objects(folder, index)
    assert main["values"] == GLOBAL.values
    assert main["tree"] == [["", "dict", ["w", "step"]]]
    assert main["metadata"] == GLOBAL.metadata
    rank_0 = reader.read_objects(folder, index, "objects-00000.msgpack")
    assert rank_0["per_rank"] == {"rng": [[("dp", 0), b"abc"]]}
    rank_1 = reader.read_objects(folder, index, "objects-00001.msgpack")
    assert rank_1["values"]["mine"] == {(1, 2)}
    assert len(rank_1["values"]["every"]) == len(EVERY_TYPE)


@pytest.mark.parametrize("name", ["index.json", "model-00001.safetensors", "objects.msgpack"])
def test_the_reader_of_the_specification_notices_damage(reader, tmp_path, name):
    file = write_checkpoint(tmp_path) / name
    data = bytearray(file.read_bytes())
    for place in (100, len(data) - 60):
        flipped = data.copy()
        flipped[place] ^= 1
        file.write_bytes(flipped)
        with pytest.raises(ValueError, match="damaged"):
            read_all(reader, tmp_path)


def read_all(reader, path):
    folder, index = reader.open_checkpoint(path)
    reader.read_objects(folder, index)
    for fqn in index["tensors"]:
        reader.read_tensor(folder, index, fqn)


def test_a_path_without_a_checkpoint_is_said_to_be_one(reader, tmp_path):
    with pytest.raises(FileNotFoundError):
        reader.open_checkpoint(tmp_path)


def test_the_encoders_write_version_1_to_the_byte(tmp_path):
    # Whoever has to change these files has changed the format.
    write_checkpoint(tmp_path)
    assert contents(tmp_path) == contents(GOLDEN / "version-1")


@pytest.mark.parametrize(
    ("written", "save"), [("version-1", "0f" * 16), ("version-1-without-save", None)]
)
def test_the_golden_files_decode_for_ever(written, save):
    folder = GOLDEN / written / "a2-0123456789abcdef"
    index = decode((folder / filenames.INDEX).read_bytes())
    assert isinstance(index, Index)
    assert index.save == save
    parameters = {} if save is None else CATALOG.parameters
    assert index.catalog == replace(CATALOG, parameters=parameters)
    for record in index.files:
        name = filenames.shard_file(CATALOG.components[record.component].stem, record.rank)
        data = (folder / name).read_bytes()
        header = decode_header(data[: record.header_nbytes], nbytes=record.nbytes)
        for shard in header.shards:
            start = record.header_nbytes + shard.span.start
            assert data[start : start + shard.span.nbytes] == part(shard.fqn, shard.cell)
    assert objects_file.decode((folder / "objects.msgpack").read_bytes()) == GLOBAL
    assert objects_file.decode((folder / "objects-00000.msgpack").read_bytes()) == RANK_0
    assert objects_file.decode((folder / "objects-00001.msgpack").read_bytes()) == RANK_1
    assert {item.value for item in Ext} == set(range(1, 21)), "a new type needs a golden value"


def test_the_golden_index_of_fused_tensors_is_decoded_and_encoded_for_ever():
    plain = decode((GOLDEN / "version-1/a2-0123456789abcdef/index.json").read_bytes())
    data = (GOLDEN / "version-1-fused" / "index.json").read_bytes()
    assert isinstance(plain, Index)
    assert not plain.catalog.fused
    fused = {"w": Fusion(1, (2, 3)), "w[0:1]": Fusion(1, (2, 3)), "pinwheel": Fusion(0, (1, 1, 1))}
    index = replace(plain, catalog=replace(plain.catalog, fused=fused))
    assert decode(data) == index
    assert encode(index) == data


def test_the_golden_index_of_modules_with_versions_is_decoded_and_encoded_for_ever():
    plain = decode((GOLDEN / "version-1/a2-0123456789abcdef/index.json").read_bytes())
    data = (GOLDEN / "version-1-modules" / "index.json").read_bytes()
    assert isinstance(plain, Index)
    assert plain.catalog.versions is None
    more: Any = {"version": 1, "spectral_norm": {"weight.version": 1}}
    versions = {"": {"": 1, "bn": 2, "none": None, "norm": more}}
    index = replace(plain, catalog=replace(plain.catalog, versions=versions))
    assert decode(data) == index
    assert encode(index) == data
    for entry in (b'"two"', b"1.5", b"[1]", b"true"):
        text = data.rpartition(b",")[0].replace(b'"bn":2', b'"bn":' + entry)
        with pytest.raises(CorruptError, match="not a version"):
            decode(strict_json.seal(text))


def test_the_golden_index_of_ruled_replicas_is_decoded_and_encoded_for_ever():
    plain = decode((GOLDEN / "version-1/a2-0123456789abcdef/index.json").read_bytes())
    data = (GOLDEN / "version-1-replicas" / "index.json").read_bytes()
    assert isinstance(plain, Index)
    assert not plain.catalog.replicas
    per_rank = dict.fromkeys(plain.catalog.per_rank, "per_rank")
    replicas = {"w": "rank0", "pinwheel": "mean", **per_rank}
    index = replace(plain, catalog=replace(plain.catalog, replicas=replicas))
    assert decode(data) == index
    assert encode(index) == data


@pytest.mark.parametrize("replicas", [{"w": "first"}, {"nothing": "rank0"}, {"w": "per_rank"}])
def test_a_rule_of_replicas_that_no_save_writes_is_damage(replicas):
    plain = decode((GOLDEN / "version-1/a2-0123456789abcdef/index.json").read_bytes())
    assert isinstance(plain, Index)
    wrong = {"no-name": "rank0"} if "nothing" in replicas else replicas
    data = encode(replace(plain, catalog=replace(plain.catalog, replicas={"w": "rank0"})))
    body = data.replace(b'"replicas":{"w":"rank0"}', f'"replicas":{json.dumps(wrong)}'.encode())
    body = body[: body.rindex(b',"digest"')]
    with pytest.raises(CorruptError, match="replicas gives"):
        decode(strict_json.seal(body))


def contents(path):
    return {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file()}


def rows():
    return [
        [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        for line in TEXT.splitlines()
        if line.startswith("| ")
    ]


def test_the_table_of_dtypes_is_that_of_the_code():
    halves = [half for row in rows() if len(row) == 6 for half in (row[:3], row[3:])]
    known = {name: (n, code) for name, n, code in halves if n.isdigit()}
    lists = [row for row in rows() if len(row) == 2 and row[1].isdigit()]
    known |= {name: (n, "") for names, n in lists for name in names.replace("`", "").split(", ")}
    assert known == {d.name: (str(d.itemsize), d.safetensors or "") for d in DTYPES.values()}


def test_the_table_of_extension_types_is_that_of_the_code():
    known = {int(row[0]): row[1] for row in rows() if row[0].isdigit()}
    assert known == {code.value: code.name for code in Ext}


def test_the_fields_of_the_index_are_those_of_the_code():
    attached = (AttachedFileRecord("a", 1, "0f" * 16),)
    catalog = replace(CATALOG, fused={"w": Fusion(1, (2, 3))}, versions={}, replicas={"w": "rank0"})
    index = Index("a1-" + "0" * 16, 1, catalog, (), (), {}, {}, 1.5, "0f" * 16, attached)
    section = TEXT[TEXT.index("## 4.") : TEXT.index("An abandoned attempt's")]
    assert re.findall(r"^\| `(\w+)`", section, re.MULTILINE) == re.findall(
        r'(?:^\{|,)"(\w+)":', strip_nested(encode(index).decode())
    )


def strip_nested(text):
    while (shorter := re.sub(r"(?<!^)[\[{][^\[\]{}]*[\]}]", "0", text)) != text:
        text = shorter
    return text
