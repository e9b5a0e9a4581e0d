import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import deserialize

from dist_ckpt.core.format.checksums import num_blocks
from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.geometry import ByteRange, Cell, ElementRange, Flat, Grid, Region, Shape
from dist_ckpt.core.format.shard_file import arrange_shards, decode_header, safetensors_entry
from dist_ckpt.errors import CheckpointError, CorruptError, IncompatibleError
from headers import encode_header, shard_file

CELLS: list[tuple[str, str, Shape, Cell]] = [
    ("w", "float32", (4, 6), Region((0, 0), (2, 6))),
    ("w", "float32", (4, 6), Region((2, 0), (2, 6))),
    ("c", "complex128", (3,), Region((0,), (3,))),
    ("flat", "bfloat16", (10,), ElementRange(2, 5)),
    ("step", "int64", (), Region((), ())),
    ("empty", "int8", (0, 4), Region((0, 0), (0, 4))),
    ("odd", "bool", (3,), Region((0,), (3,))),
]


def file_of(cells, *, step=None, block_nbytes=16):
    shards = tuple(
        replace(
            shard,
            digests=tuple(
                f"{number:08x}{block:08x}"
                for block in range(num_blocks(shard.span.nbytes, block_nbytes))
            ),
        )
        for number, shard in enumerate(arrange_shards(cells))
    )
    return shard_file("model", 1, 2, step, block_nbytes, shards)


@st.composite
def cells_of_files(draw):
    cells = {}
    for fqn in draw(st.lists(st.text(max_size=8), unique=True, max_size=5)):
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        dtype = draw(st.sampled_from(list(DTYPES)))
        cuts = tuple((0, n // 2, n) if n > 1 else (0, n) for n in shape)
        grid = Grid(cuts)
        numel = Region.whole(shape).numel
        flat = Flat((0, numel // 2, numel) if numel > 1 else (0, numel))
        cut = draw(st.sampled_from([grid, flat]))
        for number in draw(st.sets(st.integers(0, cut.num_cells - 1))):
            cells[fqn, number] = (fqn, dtype, shape, cut.cell(number))
    return list(cells.values())


@given(cells_of_files(), st.none() | st.integers(0, (1 << 63) - 1), st.integers(1, 40))
def test_a_header_decodes_to_what_was_encoded_and_safetensors_reads_it(cells, step, block_nbytes):
    file = file_of(cells, step=step, block_nbytes=block_nbytes)
    header = encode_header(file)
    assert len(header) == file.header_nbytes
    assert file.header_nbytes % 4096 == 0
    assert decode_header(header, nbytes=file.nbytes) == file
    data = bytes(i % 251 for i in range(file.nbytes - len(header)))
    theirs = dict(deserialize(header + data))
    assert len(theirs) == len(cells)
    for shard in file.shards:
        tensor = theirs[shard.name]
        assert tensor["shape"] == safetensors_entry(shard.dtype, shard.cell)["shape"]
        assert tensor["dtype"] == (DTYPES[shard.dtype].safetensors or "U8")
        assert bytes(tensor["data"]) == data[shard.span.start : shard.span.stop]


@given(cells_of_files(), st.randoms())
def test_the_same_cells_in_any_order_make_the_same_bytes(cells, random):
    before = encode_header(file_of(cells))
    random.shuffle(cells)
    assert encode_header(file_of(cells)) == before


def test_the_room_of_a_header_depends_neither_on_step_nor_digests():
    long = [(f"layers.{i}.weight", "float32", (8,), Region((0,), (8,))) for i in range(100)]
    for count in range(20, 60):
        first = file_of(long[:count])
        last = replace(first, step=(1 << 63) - 1)
        assert len(encode_header(first)) == len(encode_header(last))


def test_large_items_come_first_so_that_every_shard_is_aligned():
    file = file_of(CELLS)
    assert [shard.fqn for shard in file.shards] == [
        *("c", "step", "w", "w", "flat", "empty", "odd")
    ]
    assert all(s.span.start % DTYPES[s.dtype].itemsize == 0 for s in file.shards)
    assert file.nbytes == file.header_nbytes + 48 + 8 + 96 + 6 + 3


def test_a_whole_tensor_has_its_fqn_as_name_and_a_shard_its_place_too():
    assert [shard.name for shard in arrange_shards(CELLS)] == [
        *("c", "step", "w[0:2,0:6]", "w[2:4,0:6]", "flat[flat 2:5]", "empty", "odd")
    ]


def test_a_name_that_could_be_mistaken_is_replaced_by_a_number():
    whole = Region((0,), (1,))
    fqns = ["a", "a[0:1]", "__metadata__", "t3", "t7", "x" * 1025, "ö" * 513]
    names = {s.fqn: s.name for s in arrange_shards([(fqn, "int8", (1,), whole) for fqn in fqns])}
    assert names == {
        "__metadata__": "t0",
        "a": "a",
        "a[0:1]": "t2",
        "t3": "t3",
        "t7": "t7",
        "x" * 1025: "t5",
        "ö" * 513: "t6",
    }
    shards = arrange_shards([("t1", "int8", (1,), whole), ("z]", "int8", (1,), whole)])
    assert [shard.name for shard in shards] == ["t1", "t3"]


def test_what_safetensors_has_no_dtype_for_is_bytes_with_a_last_dimension():
    (shard,) = arrange_shards([("c", "complex128", (4, 3), Region((0, 0), (2, 3)))])
    assert safetensors_entry(shard.dtype, shard.cell) == {"dtype": "U8", "shape": [2, 3, 16]}
    assert shard.span == ByteRange(0, 96)
    (shard,) = arrange_shards([("c", "complex32", (4, 3), ElementRange(2, 7))])
    assert safetensors_entry(shard.dtype, shard.cell) == {"dtype": "U8", "shape": [5, 4]}


# --- damage ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small():
    return file_of(CELLS[2:5], step=7)


def flips(data):
    for place in range(len(data)):
        for bit in (0, 5, 7):
            yield place, data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]


def test_every_prefix_of_a_header_is_damaged(small):
    header = encode_header(small)
    for length in range(len(header)):
        with pytest.raises(CorruptError):
            decode_header(header[:length], nbytes=small.nbytes)


def test_every_flipped_byte_of_a_header_is_an_error_or_shows_in_what_it_says(small):
    # The digest of the header in the index finds them all; this is what is found without it.
    header = encode_header(small)
    for place, flipped in flips(header):
        try:
            found = decode_header(flipped, nbytes=small.nbytes)
        except CheckpointError:
            continue
        assert found != small, f"byte {place} of the header"


@pytest.mark.parametrize("nbytes", [-1, 1, 100])
def test_a_file_that_is_cut_short_or_longer_is_damaged(small, nbytes):
    with pytest.raises(CorruptError, match=f"{small.nbytes + nbytes} bytes; its header says"):
        decode_header(encode_header(small), nbytes=small.nbytes + nbytes)


def test_a_file_that_ends_before_its_header_does_is_damaged(small):
    with pytest.raises(CorruptError, match=r"header length .* in a file of 100 bytes"):
        decode_header(encode_header(small), nbytes=100)


@pytest.mark.parametrize(
    ("data", "fact"),
    [
        (b"", "0 bytes are not a safetensors file"),
        (b"1234567", "7 bytes are not a safetensors file"),
        (bytes(8), "of 8 bytes, not a multiple"),
        (b"\xff" * 8, "header length 18446744073709551615"),
        ((200_000_000 - 8).to_bytes(8, "little"), "header length 199999992"),
        ((4096).to_bytes(8, "little"), "4104 bytes, not a multiple of 4096"),
        (b"version https://git-lfs.github.com/spec/v1", "Git LFS pointer"),
        (b"PK\3\4" + bytes(20), "not a multiple"),
        (b"\x80\2}q\0." + bytes(20), "header length"),
        (b"GGUF" + bytes(20), "header length"),
    ],
)
def test_what_is_no_safetensors_file_is_damaged(data, fact):
    with pytest.raises(CorruptError, match=r"^f: ") as raised:
        decode_header(data, nbytes=1 << 40, label="f")
    assert fact in str(raised.value)


def changed(file, change):
    """Return a header whose JSON was changed by somebody who knows the format."""
    header = encode_header(file)
    doc = json.loads(header[8:])
    facts = json.loads(doc["__metadata__"]["dist_ckpt"])
    change(doc, facts)
    if "dist_ckpt" in (doc.get("__metadata__") or ()):
        doc["__metadata__"]["dist_ckpt"] = json.dumps(facts)
    body = json.dumps(doc).encode()
    return header[:8] + body.ljust(len(header) - 8)


def entry(**fields):
    return lambda doc, facts: doc["step"].update(fields)


def fact(**fields):
    return lambda doc, facts: facts.update(fields)


def shard(place, value):
    return lambda doc, facts: facts["shards"][1].__setitem__(place, value)


CORRUPTIONS = {
    "another dtype than safetensors": entry(dtype="F64"),
    "another shape than safetensors": entry(shape=[1]),
    "a shape of floats": entry(shape=[1.0]),
    "a hole": entry(data_offsets=[52, 60]),
    "an overlap": entry(data_offsets=[40, 48]),
    "negative offsets": entry(data_offsets=[-8, 0]),
    "offsets of floats": entry(data_offsets=[48.0, 56.0]),
    "an extra field": entry(extra=1),
    "a missing field": lambda doc, facts: doc["step"].pop("dtype"),
    "an entry that is no object": lambda doc, facts: doc.update(step=[]),
    "a tensor more": lambda doc, facts: doc.update(more=doc["step"]),
    "a tensor less": lambda doc, facts: doc.pop("step"),
    "a shard more": lambda doc, facts: facts["shards"].append(facts["shards"][1]),
    "a shard less": lambda doc, facts: facts["shards"].pop(),
    "metadata that is no object": lambda doc, facts: doc.update(__metadata__=[]),
    "metadata null": lambda doc, facts: doc.update(__metadata__=None),
    "no digests": lambda doc, facts: doc["__metadata__"].pop("digests"),
    "too few digests": lambda doc, facts: doc["__metadata__"].update(digests="00"),
    "digests in upper case": lambda doc, facts: doc["__metadata__"].update(
        digests=doc["__metadata__"]["digests"].replace("0", "A")
    ),
    "other metadata": lambda doc, facts: doc["__metadata__"].update(mine="1"),
    "metadata of numbers": lambda doc, facts: doc["__metadata__"].update(digests=1),
    "no component": lambda doc, facts: facts.pop("component"),
    "an unknown fact": fact(host="x"),
    "a rank that is not in the world": fact(rank=2),
    "a negative rank": fact(rank=-1),
    "a rank that is a bool": fact(rank=True),
    "an empty world": fact(world_size=0),
    "a negative step": fact(step=-1),
    "a step of 2**63": fact(step=1 << 63),
    "blocks of nothing": fact(block_nbytes=0),
    "no version": lambda doc, facts: facts.pop("format"),
    "version 0": fact(format={"version": 0, "requires": []}),
    "version true": fact(format={"version": True, "requires": []}),
    "requires no list": fact(format={"version": 1, "requires": {}}),
    "a region outside": shard(4, [[1], [1]]),
    "a region beyond the end": lambda doc, facts: facts["shards"][0].__setitem__(4, [[1], [3]]),
    "elements beyond the end": lambda doc, facts: facts["shards"][2].__setitem__(
        4, {"flat": [8, 11]}
    ),
    "a region of other dimensions": shard(4, [[0, 0], [1, 1]]),
    "a negative region": shard(4, [[-1], [1]]),
    "half a region": shard(4, [[]]),
    "a region of uneven halves": shard(4, [[0], []]),
    "elements outside": shard(4, {"flat": [0, 2]}),
    "elements backwards": shard(4, {"flat": [1, 0]}),
    "elements and more": shard(4, {"flat": [0, 1], "more": 1}),
    "a shape that overflows": shard(3, [1 << 63, 0]),
    "too many dimensions": shard(3, [1] * 65),
    "a name that is no string": shard(0, 1),
    "an fqn that is no string": shard(1, None),
    "a dtype that is no string": shard(2, 1),
    "a shard that is no row": lambda doc, facts: facts["shards"].append({}),
}


@pytest.mark.parametrize("change", CORRUPTIONS.values(), ids=CORRUPTIONS)
def test_a_header_that_contradicts_itself_is_damaged(small, change):
    with pytest.raises(CorruptError, match=r"^f[:,].*; restore it"):
        decode_header(changed(small, change), nbytes=small.nbytes, label="f")


def test_changing_nothing_changes_nothing(small):
    header = changed(small, lambda doc, facts: None)
    assert decode_header(header, nbytes=small.nbytes) == small


def test_extensions_under_x_are_taken(small):
    header = changed(small, lambda doc, facts: facts.update({"x-mine": [1]}))
    assert decode_header(header, nbytes=small.nbytes) == small


@pytest.mark.parametrize(
    "change",
    [
        fact(format={"version": 2, "blocks": "other"}),
        fact(format={"version": 1, "requires": ["compression"]}),
        shard(2, "float3"),
    ],
)
def test_a_header_of_a_newer_version_asks_for_an_upgrade(small, change):
    with pytest.raises(IncompatibleError, match="upgrade dist_ckpt"):
        decode_header(changed(small, change), nbytes=small.nbytes)


@pytest.mark.parametrize(
    "change",
    [
        lambda doc, facts: doc["__metadata__"].pop("dist_ckpt"),
        lambda doc, facts: doc.pop("__metadata__"),
    ],
)
def test_a_file_of_another_tool_is_named_as_such(small, change):
    header = changed(small, change)
    with pytest.raises(IncompatibleError, match="dist_ckpt did not write"):
        decode_header(header, nbytes=small.nbytes)


@pytest.mark.parametrize(
    ("old", "new"), [(b"{", b" {"), (b'"step":{', b'"step":{"dtype":"I64",'), (b"} ", b"}\n")]
)
def test_json_that_libraries_forgive_is_damage(small, old, new):
    header = encode_header(small)
    body = header[8:].rstrip() + b" "
    assert old in body
    header = header[:8] + body.replace(old, new, 1).ljust(len(header) - 8)
    with pytest.raises(CorruptError):
        decode_header(header, nbytes=small.nbytes)


def test_a_header_that_safetensors_would_not_open_is_refused_before_anything_is_written():
    cells = [("x" * 1000, "int8", (100_000 << 20,), Region((0,), (100_000 << 20,)))]
    with pytest.raises(ValueError, match=r"need a header of .* bytes"):
        shard_file("model", 0, 1, None, 16 << 10, arrange_shards(cells))


def test_names_that_look_like_the_places_of_step_and_digests_are_not_mistaken_for_them() -> None:
    odd = '","step":null,"digests":"'
    cells = [(f"{odd}.{n}{odd}", "uint8", (n,), Region((0,), (n,))) for n in range(1, 4)]
    shards = [
        replace(shard, digests=(f"{n:016x}",) * -(-shard.span.nbytes // 2))
        for n, shard in enumerate(arrange_shards(cells))
    ]
    file = shard_file(odd, 0, 1, 5, 2, shards)
    assert decode_header(encode_header(file), nbytes=file.nbytes) == file
