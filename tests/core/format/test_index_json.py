import json
import time
from dataclasses import replace
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt.core.format import filenames, strict_json
from dist_ckpt.core.format.checksums import document_digest
from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.geometry import Cut, Flat, Grid, Layout, Region, Regions
from dist_ckpt.core.format.index import index_json
from dist_ckpt.core.format.index.index import (
    Abandoned,
    AttachedFileRecord,
    Catalog,
    Component,
    Fusion,
    Index,
    ObjectsFileRecord,
    ShardFileRecord,
    TensorRecord,
)
from dist_ckpt.core.format.index.index_json import EncodedCatalog, decode, encode, read_back
from dist_ckpt.errors import CorruptError, IncompatibleError

ATTEMPT = "a1-0123456789abcdef"
ABANDONED = Abandoned(ATTEMPT, "host 7", "rank 3 died: “killed”")

NAMES = st.text(max_size=6)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(width=32)
    | NAMES,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(NAMES, below, max_size=3),
    max_leaves=8,
).filter(lambda doc: "nan" not in repr(doc) and "inf" not in repr(doc))
KEYS = st.recursive(
    st.integers(0, 99) | NAMES, lambda below: st.lists(below, max_size=3).map(tuple), max_leaves=4
)


def index_of(catalog, **fields):
    """Return an index whose files are those that the catalog needs."""
    stored: dict[tuple[int, int], int] = {}
    for tensor in catalog.tensors.values():
        layout = catalog.layouts[tensor.layout]
        for cell in range(layout.cut.num_cells):
            place = (tensor.component, layout.holder(cell, tensor.rotation))
            nbytes = layout.cell(cell).numel * DTYPES[tensor.dtype].itemsize
            stored[place] = stored.get(place, 0) + nbytes
    names = {filenames.objects_file(r) for keys in catalog.per_rank.values() for _, r in keys}
    names |= {
        filenames.objects_file(r) if r else filenames.OBJECTS for r in catalog.values.values()
    }
    digest = document_digest(b"")
    facts = {
        "attempt": ATTEMPT,
        "step": 7,
        "catalog": catalog,
        "files": tuple(
            ShardFileRecord(component, rank, 4096 + nbytes, 4096, digest)
            for (component, rank), nbytes in sorted(stored.items())
        ),
        "objects": tuple(
            ObjectsFileRecord(name, 99, digest) for name in sorted(names | {filenames.OBJECTS})
        ),
        "metadata": {},
        "saved_by": {},
        "saved_at": 1.5,
    }
    return Index(**{**facts, **fields})


@st.composite
def layouts(draw, shape, world_size):
    numel = prod(shape)
    halves = tuple((0, n // 2, n) if n > 1 else (0, n) for n in shape)
    cuts: list[Cut] = [Grid(halves), Grid(tuple((0, n) for n in shape))]
    cuts.append(Flat((0, numel // 3, numel) if numel > 2 else (0, numel)))
    grid = Grid(halves)
    if numel:
        cuts.append(Regions(tuple(grid.cell(n) for n in range(grid.num_cells))))
    cut = draw(st.sampled_from(cuts))
    ranks = st.sets(st.integers(0, world_size - 1), min_size=1).map(sorted).map(tuple)
    return Layout(cut, tuple(draw(ranks) for _ in range(cut.num_cells)))


@st.composite
def catalogs(draw):
    world_size = draw(st.integers(1, 4))
    ranks = st.integers(0, world_size - 1)
    fqns = draw(st.lists(NAMES, unique=True, max_size=12))
    parts = draw(st.integers(0, 3))
    tables, tensors, components = [], {}, draw(st.integers(1, 3))
    for fqn in fqns[::4]:
        shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
        layout = draw(layouts(shape, world_size))
        if layout not in tables:
            tables.append(layout)
        tensors[fqn] = TensorRecord(
            draw(st.sampled_from(list(DTYPES))),
            shape,
            tables.index(layout),
            draw(st.integers(0, 5)),
            draw(st.integers(0, components - 1)),
        )
    per_rank = {
        fqn: tuple((key, draw(ranks)) for key in draw(st.lists(KEYS, min_size=1, unique=True)))
        for fqn in fqns[3::4]
    }
    return Catalog(
        world_size,
        tuple((f"axis{n}", draw(st.integers(1, world_size))) for n in range(parts)),
        tuple(Component(f"Part {n}", f"c{n:02d}") for n in range(components)),
        tuple(tables),
        tensors,
        {fqn: draw(st.sampled_from(list(tensors))) for fqn in fqns[1::4] if tensors},
        {fqn: draw(ranks) for fqn in fqns[2::4]},
        per_rank,
        {fqn: draw(st.booleans()) for fqn in tensors if draw(st.booleans())},
    )


@pytest.mark.slow
@given(
    catalogs(),
    st.none() | st.integers(0, (1 << 63) - 1),
    st.dictionaries(NAMES, JSON, max_size=3),
    st.dictionaries(NAMES, NAMES, max_size=3),
    st.floats(0, 1e12),
)
def test_an_index_decodes_to_what_was_encoded(catalog, step, metadata, saved_by, saved_at):
    index = index_of(catalog, step=step, metadata=metadata, saved_by=saved_by, saved_at=saved_at)
    data = encode(index)
    assert data.endswith(b'"}\n')
    assert data.count(b"\n") == 1
    decoded = decode(data)
    assert decoded == index
    assert isinstance(decoded, Index)
    assert encode(decoded) == data
    assert list(decoded.catalog.tensors) == list(catalog.tensors)


@given(st.text(), st.text())
def test_an_abandoned_attempt_says_by_whom_and_why(by, reason):
    abandoned = Abandoned(ATTEMPT, by, reason)
    assert decode(encode(abandoned)) == abandoned


def test_cells_of_one_rank_each_are_a_line_however_many_ranks_there_are():
    world_size = 16_384
    layout = Layout(
        Flat(tuple(range(world_size + 1))), tuple((rank,) for rank in range(world_size))
    )
    tensor = TensorRecord("int8", (world_size,), 0, 0, 0)
    catalog = Catalog(
        world_size, (), (Component("m", "m"),), (layout, layout), {"w": tensor}, {}, {}, {}
    )
    index = index_of(catalog)
    data = encode(index)
    assert b'"holders":[{"each":[0,16384]}]' in data
    assert decode(data) == index


def test_a_common_table_of_holders_is_stored_once():
    grids = [Grid(((0, 2, 4), (0, n))) for n in range(1, 9)]
    tables = tuple(Layout(grid, ((0, 1), (2, 3))) for grid in grids)
    catalog = Catalog(4, (), (), tables, {}, {}, {}, {})
    data = encode(index_of(catalog))
    assert b'"holders":[[[0,1],[2,3]]]' in data
    decoded = decode(data)
    assert isinstance(decoded, Index)
    assert decoded.catalog.layouts == tables


# --- a catalog whose text is kept ------------------------------------------------------------


@pytest.mark.slow
@given(catalogs(), st.dictionaries(NAMES, JSON, max_size=3), st.dictionaries(NAMES, NAMES))
def test_a_kept_text_changes_no_byte_of_an_index_and_nothing_of_what_it_says(
    catalog, metadata, saved_by
):
    text = EncodedCatalog(catalog)
    first, second = index_of(catalog), index_of(catalog, metadata=metadata, saved_by=saved_by)
    read_back(encode(first, text), text, label="first")
    assert text.was_read
    data = encode(second, text)
    assert data == encode(second)
    read_back(data, text, label="second")
    decoded = decode(data, cached=text)
    assert decoded == second
    assert isinstance(decoded, Index)
    assert decoded.catalog is catalog


@pytest.mark.parametrize(
    "fields",
    [{"step": -1}, {"attempt": "a1"}, {"files": ()}, {"objects": ()}, {"saved_by": {"host": 7}}],
)
def test_what_stands_around_a_known_catalog_is_read_as_strictly_as_ever(small, fields):
    text = EncodedCatalog(small.catalog)
    read_back(encode(small, text), text, label="first")
    wrong = replace(small, **fields)
    with pytest.raises(CorruptError):
        read_back(encode(wrong, text), text, label="second")


def test_a_text_that_says_another_catalog_is_parsed_every_time(small):
    index = replace(small, catalog=replace(small.catalog, world_size=3))
    text = EncodedCatalog(index.catalog)
    text.fields = EncodedCatalog(small.catalog).fields
    read_back(encode(index, text), text, label="first")
    assert not text.was_read


def test_no_index_is_written_with_the_text_of_another_catalog(small):
    text = EncodedCatalog(replace(small.catalog, world_size=3))
    with pytest.raises(AssertionError, match="another catalog"):
        encode(small, text)


@pytest.mark.parametrize(
    "where", ["inside another field", "beside a field of its own", "after nothing", "nowhere"]
)
def test_the_text_of_a_known_catalog_counts_only_as_fields_of_the_document(small, where):
    text = EncodedCatalog(small.catalog)
    read_back(encode(small, text), text, label="first")
    body = encode(small).partition(b',"digest":"')[0].decode()
    fields = f",{text.fields.decode()},"
    before, after = body.split(fields)
    wrong = {
        "inside another field": f'{before},"x-0":{{"a":0{fields}"b":0}},{after}',
        "beside a field of its own": f'{before},"world_size":2{fields}{after}',
        "after nothing": f"{{{fields}{before[1:]},{after}",
        "nowhere": f"{before},{after}",
    }[where].encode()
    data = wrong + b',"digest":"%s"}\n' % document_digest(wrong).encode()
    with pytest.raises(CorruptError) as unknown:
        decode(data)
    with pytest.raises(CorruptError) as caught:
        decode(data, cached=text)
    assert str(caught.value) == str(unknown.value)


# --- damage ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small():
    """An index with a little of everything."""
    tables = (
        Layout(Grid(((0, 2, 4), (0, 3))), ((0,), (1,))),
        Layout(Flat((0, 5, 12)), ((0, 1), (0, 1))),
        Layout(Regions((Region((0,), (1,)), Region((1,), (2,)))), ((0,), (1,))),
    )
    tensors = {
        "w": TensorRecord("float32", (4, 3), 0, 0, 0),
        "m.w": TensorRecord("bfloat16", (4, 3), 1, 1, 1),
        "b": TensorRecord("int8", (3,), 2, 0, 1),
    }
    catalog = Catalog(
        world_size=2,
        mesh=(("dp", 2),),
        components=(Component("model", "model"), Component("my optim", "c01")),
        layouts=tables,
        tensors=tensors,
        aliases={"tied": "w"},
        values={"lr": 0, "mine": 1},
        per_rank={"rng": ((("dp", 0), 0), (("dp", 1), 1))},
        parameters={"w": True, "b": False},
        fused={"w": Fusion(0, (1, 3)), "m.w": Fusion(0, (1, 3)), "b": Fusion(0, (1, 1, 1))},
    )
    attached = (AttachedFileRecord("a.json", 7, document_digest(b"")),)
    facts = {"metadata": {"loss": 0.5}, "saved_by": {"host": "n1"}, "attached": attached}
    return index_of(catalog, **facts)


@pytest.mark.parametrize("kind", ["committed", "abandoned"])
def test_every_prefix_is_damaged(small, kind):
    data = encode(small if kind == "committed" else ABANDONED)
    for length in range(len(data)):
        with pytest.raises(CorruptError):
            decode(data[:length])


@pytest.mark.parametrize("kind", ["committed", "abandoned"])
def test_every_flipped_byte_is_damage(small, kind):
    data = encode(small if kind == "committed" else ABANDONED)
    for place in range(len(data)):
        for mask in (0x01, 0x04, 0x20, 0x80, 0xFF):
            flipped = bytearray(data)
            flipped[place] ^= mask
            with pytest.raises(CorruptError):
                decode(bytes(flipped))


@pytest.mark.parametrize("extra", [b"\n", b" ", b"x", b"{}", b"\0"])
def test_anything_after_the_end_is_damage(small, extra):
    with pytest.raises(CorruptError):
        decode(encode(small) + extra)


@pytest.mark.parametrize(
    "data",
    [b"", b" ", b"\n", b"null", b"[]", b'"a"', b"1", b"{}", bytes(100), b"\xff" * 100, b"\x80\2."],
)
def test_what_is_no_index_is_damaged(data):
    with pytest.raises(CorruptError, match=r"^/ck/a1/index.json: .*; restore it"):
        decode(data, label="/ck/a1/index.json")


def test_an_index_that_is_too_large_is_not_parsed(small, monkeypatch):
    data = encode(small)
    monkeypatch.setattr("dist_ckpt.core.format.index.index_json.MAX_NBYTES_OF_INDEX", 100)
    with pytest.raises(CorruptError, match=r"bytes, not 1 to 100"):
        decode(data)
    with pytest.raises(ValueError, match=r"cannot be written: \d+ bytes, the limit is 100"):
        encode(small)


def test_an_index_that_asks_for_too_many_lookups_is_damaged(small, monkeypatch):
    data = encode(small)
    monkeypatch.setattr("dist_ckpt.core.format.index.index_json._MAX_LOOKUPS", 3)
    with pytest.raises(CorruptError, match="more than 3 cells to look up"):
        decode(data)


@pytest.mark.slow
def test_the_index_of_a_very_large_job_is_far_below_the_limits(small):
    world_size, names = 16_384, [f"model.layers.{n}.feed_forward.w1.weight" for n in range(3_000)]
    cells = tuple((rank,) for rank in range(world_size))
    layouts = [Layout(Flat(tuple(range(0, world_size * n + 1, n))), cells) for n in range(1, 21)]
    names += [f"optim.state.{name}.{kind}" for name in names for kind in ("exp_avg", "exp_avg_sq")]
    tensors = {
        name: TensorRecord("float32", (world_size * (n % 20 + 1),), n % 20, 0, n % 2)
        for n, name in enumerate(names)
    }
    keys = tuple((("dp", rank), rank) for rank in range(world_size))
    catalog = replace(
        small.catalog,
        world_size=world_size,
        layouts=tuple(layouts),
        tensors=tensors,
        aliases={},
        values={},
        per_rank={f"value.{n}": keys for n in range(4)},
    )
    files = tuple(
        ShardFileRecord(component, rank, 1 << 30, 1 << 20, DIGEST)
        for component in range(2)
        for rank in range(world_size)
    )
    objects = tuple(
        ObjectsFileRecord(filenames.objects_file(rank), 1 << 20, DIGEST)
        for rank in range(world_size)
    )
    data = encode(replace(small, catalog=catalog, files=files, objects=objects))
    assert len(data) * 8 < index_json.MAX_NBYTES_OF_INDEX
    assert sum(map(data.count, (b",", b"[", b"{"))) * 8 < strict_json.MAX_VALUES


def signed(doc):
    """Return a document as somebody who knows the format would write it."""
    doc = {key: value for key, value in doc.items() if key != "digest"}
    body = json.dumps(doc).encode()[:-1]
    return body + f',"digest":"{document_digest(body)}"}}\n'.encode()


def changed(index, change):
    doc = json.loads(encode(index))
    change(doc)
    return signed(doc)


def put(*place_and_value):
    """Return a change that puts a value at a place in the document."""
    *place, last, value = place_and_value

    def change(doc):
        for key in place:
            doc = doc[key]
        doc[last] = value

    return change


def drop(*keys):
    *place, last = keys

    def change(doc):
        for key in place:
            doc = doc[key]
        del doc[last]

    return change


def add(*place_and_value):
    *place, value = place_and_value

    def change(doc):
        for key in place:
            doc = doc[key]
        doc.append(value)

    return change


DIGEST = "0" * 32

CORRUPTIONS = {
    # the document
    "no format": drop("format"),
    "no version": drop("format", "version"),
    "version 0": put("format", "version", 0),
    "version -1": put("format", "version", -1),
    "version as text": put("format", "version", "1"),
    "version 1.0": put("format", "version", 1.0),
    "version true": put("format", "version", True),
    "no requires": drop("format", "requires"),
    "requires nothing": put("format", "requires", None),
    "an unknown state": put("state", "open"),
    "no state": drop("state"),
    "a missing field": drop("files"),
    "an unknown field": put("more", 1),
    "another attempt": put("attempt", "a01-0123456789abcdef"),
    "an attempt that is a path": put("attempt", "../a1-0123456789abcdef"),
    "a step of a bool": put("step", True),
    "a negative step": put("step", -1),
    "a step of 2**63": put("step", 1 << 63),
    "a step of a float": put("step", 7.0),
    "saved at no time": put("saved_at", "now"),
    "saved at a bool": put("saved_at", True),
    "saved by a number": put("saved_by", "host", 1),
    "metadata of a list": put("metadata", []),
    # the world
    "an empty world": put("world_size", 0),
    "a negative world": put("world_size", -2),
    "a world of floats": put("world_size", 2.0),
    "a world of a bool": put("world_size", True),
    "a world too large": put("world_size", 1 << 40),
    "a mesh axis of nothing": put("mesh", 0, 1, 0),
    "a mesh axis larger than any world": put("mesh", 0, 1, 1_000_001),
    "a mesh axis without a size": put("mesh", 0, ["dp"]),
    # components and files
    "a stem that is a path": put("components", 0, 1, "../x"),
    "a stem with a slash": put("components", 0, 1, "a/b"),
    "an empty stem": put("components", 0, 1, ""),
    "two components of one stem": put("components", 0, 1, "c01"),
    "no id of a save": put("save", "0F" * 16),
    "an id of a save that is no text": put("save", None),
    "a component without a stem": put("components", 0, ["model"]),
    "a file of no component": put("files", 0, 0, 2),
    "a file of a negative component": put("files", 0, 0, -1),
    "a file of no rank": put("files", 0, 1, 2),
    "a file listed twice": lambda doc: doc["files"].append(doc["files"][0]),
    "a file that is missing": drop("files", 0),
    "a file that nobody needs": lambda doc: (
        doc["components"].append(["more", "more"]),
        doc["files"].append([2, 0, 4096, 4096, DIGEST]),
    ),
    "a file that is too large": put("files", 0, 2, 1 << 40),
    "a file that is too small": put("files", 0, 2, 4096),
    "a negative size": put("files", 0, 2, -1),
    "a size that overflows": put("files", 0, 2, 1 << 63),
    "a header larger than its file": put("files", 0, 3, 1 << 20),
    "a digest that is short": put("files", 0, 4, DIGEST[1:]),
    "a digest in upper case": put("files", 0, 4, DIGEST[1:] + "A"),
    "a digest that is no text": put("files", 0, 4, 0),
    "a file that is no row": put("files", 0, {}),
    "an objects file that is a path": put("objects", 0, 0, "../objects.msgpack"),
    "an objects file of more than 1 GiB": put("objects", 0, 1, (1 << 30) + 1),
    "an objects file of no rank": add("objects", ["objects-00009.msgpack", 9, DIGEST]),
    "an objects file that is missing": drop("objects", 0),
    "the global objects file that is missing": drop("objects", 2),
    "an objects file listed twice": lambda doc: doc["objects"].append(doc["objects"][0]),
    # what is attached
    "an attached file that is a path": put("attached", 0, 0, "../a"),
    "an attached file of another's name": put("attached", 0, 0, "a/index.json"),
    "an attached file that is no row": put("attached", 0, ["a.json", 1]),
    "an attached file that is too large": put("attached", 0, 1, (64 << 20) + 1),
    "attached files that are too large together": add("attached", ["c", 64 << 20, DIGEST]),
    "an attached file listed twice": add("attached", ["a.json", 9, DIGEST]),
    "attached files of one name but for the case": add("attached", ["A.json", 9, DIGEST]),
    "too many attached files": lambda doc: doc["attached"].extend(
        [f"f{n}", 0, DIGEST] for n in range(100)
    ),
    "attached files that are no list": put("attached", {}),
    # layouts
    "holders of no rank": put("holders", 0, [[0], [2]]),
    "holders that do not ascend": put("holders", 1, [[1, 0], [0, 1]]),
    "holders twice": put("holders", 1, [[0, 0], [0, 1]]),
    "a cell without holders": put("holders", 1, [[], [0, 1]]),
    "holders of a bool": put("holders", 1, [[False], [0, 1]]),
    "too few holders": put("holders", 1, [[0, 1]]),
    "each of too many": put("holders", 0, {"each": [0, 3]}),
    "each of a negative": put("holders", 0, {"each": [-1, 2]}),
    "each of none": put("holders", 0, {"each": [0, 0]}),
    "each and more": put("holders", 0, {"each": [0, 2], "more": 1}),
    "a layout of no holders": put("layouts", 0, "holders", 9),
    "a layout of no kind": put("layouts", 0, {"holders": 0}),
    "a layout of two kinds": put("layouts", 0, "flat", [0, 12]),
    "a layout of an unknown kind": put("layouts", 0, {"ring": [], "holders": 0}),
    "a grid that does not begin with 0": put("layouts", 0, "grid", 0, [1, 2, 4]),
    "a grid that does not ascend": put("layouts", 0, "grid", 0, [0, 5, 4]),
    "a grid of another size": put("layouts", 0, "grid", 1, [0, 4]),
    "a grid without cuts": put("layouts", 0, "grid", 1, []),
    "a grid of other dimensions": put("layouts", 0, "grid", [[0, 2, 4]]),
    "a grid of floats": put("layouts", 0, "grid", 0, [0, 2.0, 4]),
    "a flat layout of another size": put("layouts", 1, "flat", [0, 5, 13]),
    "a flat layout that ends early": put("layouts", 1, "flat", [0, 5]),
    "a flat layout of nothing": put("layouts", 1, "flat", []),
    "regions that overlap": put("layouts", 2, "regions", 0, [[0], [2]]),
    "regions with a hole": put("layouts", 2, "regions", 1, [[2], [1]]),
    "regions outside": put("layouts", 2, "regions", 1, [[1], [3]]),
    "a negative region": put("layouts", 2, "regions", 0, [[-1], [2]]),
    "a region of other dimensions": put("layouts", 2, "regions", 0, [[0, 0], [1, 1]]),
    "a region without a shape": put("layouts", 2, "regions", 0, [[0]]),
    # tensors
    "a shape with a bool": put("tensors", "w", 1, [4, True]),
    "a shape with a float": put("tensors", "w", 1, [4.0, 3]),
    "a shape with text": put("tensors", "w", 1, ["4", 3]),
    "a shape with null": put("tensors", "w", 1, [4, None]),
    "a negative shape": put("tensors", "w", 1, [-4, -3]),
    "a shape that overflows": put("tensors", "w", 1, [1 << 62, 3]),
    "an empty shape that overflows": put("tensors", "w", 1, [1 << 63, 0]),
    "65 dimensions": put("tensors", "w", 1, [1] * 65),
    "a shape that is no list": put("tensors", "w", 1, 12),
    "a tensor of no layout": put("tensors", "w", 2, 3),
    "a tensor of a negative layout": put("tensors", "w", 2, -1),
    "a negative rotation": put("tensors", "w", 3, -1),
    "a tensor of no component": put("tensors", "w", 4, 2),
    "a component of a bool": put("tensors", "w", 4, False),
    "a tensor of another rank's file": put("tensors", "m.w", 4, 0),
    "a dtype that is no text": put("tensors", "w", 0, 4),
    "another dtype of another size": put("tensors", "w", 0, "float64"),
    "a row that is too short": put("tensors", "w", ["float32", [4, 3], 0, 0]),
    "a row that is text": put("tensors", "w", "float"),
    "a row that is an object": put("tensors", "w", {"dtype": "float32"}),
    "a name that is too long": put("values", "x" * 4097, 0),
    "a tensor that is a value too": put("values", "w", 0),
    "a tensor that is per rank too": put("per_rank", "w", [[0, 0]]),
    "an alias that is a tensor too": put("aliases", "b", "w"),
    "an alias of nothing": put("aliases", "tied", "nothing"),
    "an alias of an alias": put("aliases", "also", "tied"),
    "an alias of a number": put("aliases", "tied", 1),
    # values
    "a value of no rank": put("values", "lr", 2),
    "a value of a bool": put("values", "lr", False),
    "a value whose file is missing": put("values", "lr", 0.0),
    "a per-rank value without keys": put("per_rank", "rng", []),
    "a key twice": put("per_rank", "rng", 1, 0, ["dp", 0]),
    "a key that is a float": put("per_rank", "rng", 1, 0, 1.0),
    "a key that is a bool": put("per_rank", "rng", 1, 0, True),
    "a key that is too deep": put("per_rank", "rng", 1, 0, [[[[[[[[[1]]]]]]]]]),
    "a per-rank value of no rank": put("per_rank", "rng", 1, 1, 2),
    "a per-rank value that is a path": put("per_rank", "rng", "../x"),
    # parameters
    "parameters that are no list": put("parameters", {}),
    "a parameter that is no tensor": put("parameters", [[3, 1, True]]),
    "more parameters than tensors": put("parameters", [[0, 4, True]]),
    "a run of no parameter": put("parameters", 0, 1, 0),
    "a parameter twice": put("parameters", 1, 0, 0),
    "parameters that descend": put("parameters", [[1, 1, True], [0, 1, True]]),
    "a parameter that is trained by a number": put("parameters", 0, 2, 1),
    # fused tensors
    "fused tensors that are no list": put("fused", {}),
    "more fused tensors than tensors": put("fused", [[0, 4, 0, [1, 3]]]),
    "a fused tensor twice": put("fused", 1, 0, 1),
    "a fused tensor of no pieces": put("fused", 0, 3, []),
    "a piece of nothing": put("fused", 0, 3, [4, 0]),
    "a negative piece": put("fused", 0, 3, [5, -1]),
    "a piece that is a float": put("fused", 0, 3, [1.0, 3]),
    "pieces of another size": put("fused", 0, 3, [1, 4]),
    "pieces of another dimension": put("fused", 0, 2, 1),
    "pieces of a dimension that is not there": put("fused", 0, 2, 2),
    "pieces of a negative dimension": put("fused", 0, 2, -1),
}


@pytest.mark.parametrize("change", CORRUPTIONS.values(), ids=CORRUPTIONS)
def test_an_index_that_makes_no_sense_is_damaged(small, change):
    data = changed(small, change)
    with pytest.raises(CorruptError, match=r"^index.json.*; restore it"):
        decode(data)


def test_an_abandoned_attempt_with_a_field_of_an_index_is_damaged():
    doc = json.loads(encode(Abandoned(ATTEMPT, "rank 1", "it failed")))
    with pytest.raises(CorruptError, match="unknown field 'tensors'"):
        decode(signed({**doc, "tensors": {}}))


def test_changing_nothing_changes_nothing(small):
    assert decode(changed(small, lambda doc: None)) == small
    assert decode(signed(json.loads(encode(ABANDONED)))) == ABANDONED


def test_extensions_under_x_are_taken_and_left_out(small):
    assert decode(changed(small, put("x-run", {"id": [1]}))) == small
    assert decode(changed(small, put("format", "x-by", "me"))) == small


@pytest.mark.parametrize(
    "change",
    [
        put("format", {"version": 2}),
        lambda doc: (doc.clear(), doc.update(format={"version": 3}, other=1)),
        put("format", "requires", ["compression"]),
        put("tensors", "w", 0, "float3"),
    ],
)
def test_an_index_of_a_newer_version_asks_for_an_upgrade(small, change):
    with pytest.raises(IncompatibleError, match="upgrade dist_ckpt"):
        decode(changed(small, change))


def test_a_newer_version_may_end_differently():
    with pytest.raises(IncompatibleError, match="format version 2"):
        decode(b'{"format":{"version":2},"digest":{"sha256":"00"}}')


def test_a_damaged_index_is_not_mistaken_for_a_newer_one(small):
    data = encode(small).replace(b'"version":1', b'"version":9')
    with pytest.raises(CorruptError, match="digest is wrong"):
        decode(data)


def test_an_index_without_its_digest_is_damaged(small):
    doc = json.loads(encode(small))
    with pytest.raises(CorruptError, match="does not end with its digest"):
        decode(json.dumps(doc).encode())


def test_a_short_line_cannot_ask_for_many_holders(small):
    def change(doc):
        doc["world_size"] = 1_000_000
        doc["holders"] += [{"each": [n, 1_000_000 - n]} for n in range(100)]

    with pytest.raises(CorruptError, match="more than 16777216 cells"):
        decode(changed(small, change))


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {"loss": float("nan")}},
        {"metadata": {"loss": float("inf")}},
        {"saved_by": {"host": "\ud800"}},
        {"saved_at": float("inf")},
    ],
)
def test_what_json_cannot_hold_is_not_written(small, fields):
    with pytest.raises(ValueError, match="the index cannot be written"):
        encode(replace(small, **fields))


def test_ten_thousand_tensors_are_read_in_a_moment(small):
    layout = Layout(Grid(((0, 512, 1024), (0, 4096))), ((0, 1), (0, 1)))
    tensors = {
        f"optim.state.layers.{n}.attention.wq.weight.exp_avg": TensorRecord(
            "float32", (1024, 4096), 0, n % 2, 0
        )
        for n in range(10_000)
    }
    catalog = replace(small.catalog, layouts=(layout,), tensors=tensors, aliases={})
    data = encode(index_of(catalog))
    start = time.perf_counter()
    decoded = decode(data)
    assert isinstance(decoded, Index)
    assert len(decoded.catalog.tensors) == 10_000
    # About 25 ms; the margin is for a busy machine, and for nothing quadratic.
    assert time.perf_counter() - start < 1.0
