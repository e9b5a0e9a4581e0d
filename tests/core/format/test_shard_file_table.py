"""The shards of a decoded header: found by tensor and cell, made one by one."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dist_ckpt.core.format.checksums import num_blocks
from dist_ckpt.core.format.geometry import Cell, ElementRange, Region, Shape
from dist_ckpt.core.format.shard_file import (
    DecodedShards,
    ShardFile,
    StoredShard,
    arrange_shards,
    decode_header,
)
from dist_ckpt.errors import CorruptError
from headers import encode_header, shard_file

CELLS: list[tuple[str, str, Shape, Cell]] = [
    ("a", "float32", (4, 4), Region((0, 0), (2, 4))),
    ("a", "float32", (4, 4), Region((2, 0), (2, 4))),
    ("b.ü", "bfloat16", (6,), ElementRange(0, 3)),
    ("c", "uint8", (), Region((), ())),
]
BLOCK_NBYTES = 16


def file_of() -> ShardFile:
    shards: list[StoredShard] = []
    for shard in arrange_shards(CELLS):
        count = num_blocks(shard.span.nbytes, BLOCK_NBYTES)
        digests = tuple(f"{len(shards):015x}{block:x}" for block in range(count))
        shards.append(replace(shard, digests=digests))
    return shard_file("model", 0, 1, 7, BLOCK_NBYTES, shards)


def decoded() -> DecodedShards:
    file = file_of()
    return decode_header(encode_header(file), nbytes=file.nbytes).shards


def test_they_are_what_was_encoded_by_number_from_either_end_and_in_parts() -> None:
    shards, encoded = decoded(), file_of().shards
    assert list(shards) == list(encoded)
    assert shards[-1] == encoded[-1]
    assert shards[1:3] == tuple(encoded[1:3])
    assert shards == encoded
    with pytest.raises(IndexError):
        shards[len(encoded)]


def test_one_is_found_by_its_tensor_and_cell() -> None:
    shards = decoded()
    for shard in file_of().shards:
        number = shards.find_number(shard.fqn, shard.cell)
        assert number is not None
        assert shards[number] == shard
        assert shards.dtype_and_shape(shard.fqn, shard.cell) == (shard.dtype, shard.shape)
    assert shards.find_number("a", Region((0, 0), (4, 4))) is None
    assert shards.find_number("z", Region((), ())) is None
    assert shards.dtype_and_shape("c", ElementRange(0, 1)) is None


def test_json_that_is_written_otherwise_says_the_same() -> None:
    file = file_of()
    header = encode_header(file)
    doc = json.loads(header[8:])
    for text in (json.dumps(doc), json.dumps(dict(reversed(doc.items())), ensure_ascii=False)):
        room = file.header_nbytes - 8
        assert len(text) <= room
        other = header[:8] + text.encode("utf-8").ljust(room)
        assert decode_header(other, nbytes=file.nbytes) == file


def test_entries_that_say_something_else_are_damage_however_they_are_written() -> None:
    file = file_of()
    header = encode_header(file)
    doc = json.loads(header[8:])
    doc["c"]["data_offsets"][0] += 1
    for separators in ((",", ":"), (", ", ": ")):
        text = json.dumps(doc, ensure_ascii=False, separators=separators).encode("utf-8")
        with pytest.raises(CorruptError, match="is not what dist_ckpt says"):
            decode_header(header[:8] + text.ljust(len(header) - 8), nbytes=file.nbytes)
