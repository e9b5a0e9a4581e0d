"""A state as bytes: one safetensors file with the index and the objects files in its header.

The header of a shard file, and before all else in its `__metadata__` the other documents of a
checkpoint by one rank. `docs/format.md` has it. Taken apart it is the files of that checkpoint.
"""

from __future__ import annotations

import json
from base64 import b64encode
from binascii import Error, a2b_base64
from dataclasses import dataclass

from dist_ckpt.core.format import filenames, strict_json
from dist_ckpt.core.format.index import index_json
from dist_ckpt.core.format.index.index import Index
from dist_ckpt.core.format.shard_file import ALIGNMENT, MAX_HEADER_NBYTES
from dist_ckpt.core.format.strict_json import check_version, corrupt_error
from dist_ckpt.errors import IncompatibleError

# The name of the attempt, of which there is no folder.
ATTEMPT = "a1-0000000000000000"

# Of all tensors, and how its file's name begins.
COMPONENT = STEM = "state"

WHAT = "the bytes of a state"

_START = '{"__metadata__":{'
_INDEX, _OBJECTS, _PER_RANK = "dist_ckpt_index", "dist_ckpt_objects", "dist_ckpt_per_rank"
# The rest of the header of a state without tensors, which has no shard file.
_NO_SHARDS = '"format":"pt"}}'

# How an index begins: each of these fields is in it once.
_INDEX_START = (
    '{"format":{"version":1,"requires":[]},"state":"committed",'
    f'"attempt":"{ATTEMPT}","step":null,"world_size":1,'
)

_OBJECTS_FILES = {
    _OBJECTS: filenames.OBJECTS,
    _PER_RANK: filenames.objects_file(0),
}
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class EncodedDocuments:
    """The documents of a checkpoint by one rank, encoded; `objects` are its objects files by name.

    `header` is that of its shard file, b"" if it has none.
    """

    index: bytes
    objects: dict[str, bytes]
    header: bytes


def encode_header(documents: EncodedDocuments) -> bytes:
    """Return what comes before the tensors' data.

    ValueError if it would be longer than safetensors reads.
    """
    fields = [f'"{_INDEX}":{_text(documents.index.decode("utf-8"))}']
    for field, name in _OBJECTS_FILES.items():
        encoded = b64encode(documents.objects.get(name, b"")).decode("ascii")
        fields.append(f'"{field}":"{encoded}"')
    rest = documents.header[8:].rstrip(b" ").decode("utf-8").removeprefix(_START) or _NO_SHARDS
    text = ",".join([_START + fields[0], *fields[1:], rest]).encode("utf-8")
    room = -(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT - 8
    if room > MAX_HEADER_NBYTES:
        raise ValueError(
            f"names, plain data and per-rank values need a header of {room} bytes, more than the "
            f"{MAX_HEADER_NBYTES} that safetensors reads: store large data as tensors, or use "
            "dist_ckpt.save"
        )
    return room.to_bytes(8, "little") + text.ljust(room)


def decode(data: memoryview) -> tuple[EncodedDocuments, int]:
    """Return the documents in the bytes of a state, and where the tensors' data begins.

    CorruptError if they are not written as `encode_header` has it, or IncompatibleError if they are
    not ours or too new. The index is whole on return and of one rank; what it says of objects and
    header is yet to be checked.
    """
    header = 8 + int.from_bytes(data[:8], "little")
    if len(data) < 8 or header > min(len(data), 8 + MAX_HEADER_NBYTES):
        raise corrupt_error(WHAT, f"{len(data)} bytes, which no header fits into")
    raw = bytes(data[:header])
    try:
        documents = _documents(raw[8:].decode("utf-8").rstrip(" "))
    except (ValueError, Error, RecursionError) as error:
        raise corrupt_error(WHAT, f"its header is not as dist_ckpt writes it: {error}") from None
    # A header says all of it in one way only: so nothing is in it that nobody looks at.
    if encode_header(documents) != raw:
        raise corrupt_error(WHAT, "its header is not as dist_ckpt writes it")
    return documents, header


def _documents(text: str) -> EncodedDocuments:
    start = f'{_START}"{_INDEX}":"'
    if not text.startswith(start):
        raise IncompatibleError(
            f"{WHAT}: not made by dist_ckpt.to_bytes; what is a safetensors file opens with "
            "safetensors, and what a checkpoint's folder holds with dist_ckpt.open"
        )
    index_text, at = _DECODER.raw_decode(text, len(start) - 1)
    objects = {}
    for field, name in _OBJECTS_FILES.items():
        before = f',"{field}":"'
        stop = text.find('"', at + len(before))
        if not text.startswith(before, at) or stop < 0:
            raise ValueError(f"no {field}")
        if encoded := a2b_base64(text[at + len(before) : stop], strict_mode=True):
            objects[name] = encoded
        at = stop + 1
    index = index_text.encode("utf-8")
    # What ranks hold can be said in few bytes for a million of them: so nothing is made of that.
    if not index_text.startswith(_INDEX_START):
        check_version(strict_json.parse(index, f"{WHAT}, index"), f"{WHAT}, index")
        raise ValueError("its index is not that of one rank")
    found = index_json.decode(index, label=f"{WHAT}, index")
    assert isinstance(found, Index), "its state is committed"
    rest = text[at:].removeprefix(",")
    if not found.files:
        if rest != _NO_SHARDS:
            raise ValueError("it has shards that the index knows nothing of")
        return EncodedDocuments(index, objects, b"")
    # What the index is wrong about is found out by the digest there.
    room = found.files[0].header_nbytes - 8
    inner = f"{_START}{rest}".encode()
    if not len(inner) <= room <= len(inner) + 2 * ALIGNMENT:
        raise ValueError(f"{len(inner)} bytes where the index says {room}")
    return EncodedDocuments(index, objects, room.to_bytes(8, "little") + inner.ljust(room))


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
