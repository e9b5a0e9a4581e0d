"""The bytes of a state (`dc.to_bytes`): the files of a small checkpoint in one safetensors file.

The file is the shard file, with more fields in the `__metadata__` of its header: the index and the
objects files. See `docs/format.md`.
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

# The name of the attempt. It has no folder.
ATTEMPT = "a1-0000000000000000"

# The component of all tensors, and the stem of its file.
COMPONENT = "state"

LABEL = "the bytes of a state"

_START = '{"__metadata__":{'
_INDEX, _OBJECTS, _PER_RANK = "dist_ckpt_index", "dist_ckpt_objects", "dist_ckpt_per_rank"
# The rest of the header of a state without tensors, which has no shard file.
_NO_SHARDS = '"format":"pt"}}'

# The start of each index. Each of these fields is in an index once.
_INDEX_START = (
    '{"format":{"version":1,"requires":[]},"state":"committed",'
    f'"attempt":"{ATTEMPT}","step":null,"world_size":1,'
)

_OBJECTS_FILES = {_OBJECTS: filenames.OBJECTS, _PER_RANK: filenames.objects_file(0)}
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class EncodedDocuments:
    """The encoded documents of a checkpoint. `header` is that of the shard file, or b""."""

    index: bytes
    objects: dict[str, bytes]
    header: bytes


def encode_documents(documents: EncodedDocuments) -> bytes:
    """Return all bytes before the data. ValueError if the header is too long for safetensors."""
    index = json.dumps(documents.index.decode("utf-8"), ensure_ascii=False)
    fields = [f'"{_INDEX}":{index}']
    for key, name in _OBJECTS_FILES.items():
        encoded = b64encode(documents.objects.get(name, b"")).decode("ascii")
        fields.append(f'"{key}":"{encoded}"')
    rest = documents.header[8:].rstrip(b" ").decode("utf-8").removeprefix(_START) or _NO_SHARDS
    text = ",".join([_START + fields[0], *fields[1:], rest]).encode("utf-8")
    text_nbytes = -(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT - 8
    if text_nbytes > MAX_HEADER_NBYTES:
        raise ValueError(
            f"names, plain data and per-rank values need a header of {text_nbytes} bytes, more "
            f"than the {MAX_HEADER_NBYTES} that safetensors reads: store large data as tensors, or "
            "use dist_ckpt.save"
        )
    return text_nbytes.to_bytes(8, "little") + text.ljust(text_nbytes)


def decode_documents(data: memoryview) -> tuple[EncodedDocuments, int]:
    """Return the documents in the bytes of a state, and the offset of the tensors' data.

    CorruptError unless `encode_documents` wrote them, IncompatibleError for other formats or newer
    versions. The index is valid on return. Objects and header are not compared with it.
    """
    start = 8 + int.from_bytes(data[:8], "little")
    if len(data) < 8 or start > min(len(data), 8 + MAX_HEADER_NBYTES):
        raise corrupt_error(LABEL, f"{len(data)} bytes are too few for a header")
    raw = bytes(data[:start])
    try:
        documents = _decode_text(raw[8:].decode("utf-8").rstrip(" "))
    except (ValueError, Error, RecursionError) as error:
        raise corrupt_error(LABEL, f"its header is not as dist_ckpt writes it: {error}") from None
    # These documents have only one encoding, so the header contains nothing that is not checked.
    if encode_documents(documents) != raw:
        raise corrupt_error(LABEL, "its header is not as dist_ckpt writes it")
    return documents, start


def _decode_text(text: str) -> EncodedDocuments:
    start = f'{_START}"{_INDEX}":"'
    if not text.startswith(start):
        raise IncompatibleError(
            f"{LABEL}: not made by dist_ckpt.to_bytes; open a safetensors file with safetensors, "
            "and a checkpoint's folder with dist_ckpt.open"
        )
    index_text, at = _DECODER.raw_decode(text, len(start) - 1)
    objects = {}
    for key, name in _OBJECTS_FILES.items():
        before = f',"{key}":"'
        stop = text.find('"', at + len(before))
        if not text.startswith(before, at) or stop < 0:
            raise ValueError(f"no {key}")
        if encoded := a2b_base64(text[at + len(before) : stop], strict_mode=True):
            objects[name] = encoded
        at = stop + 1
    index = index_text.encode("utf-8")
    # A few bytes can list a million ranks: check the start before the index is decoded.
    if not index_text.startswith(_INDEX_START):
        check_version(strict_json.parse(index, f"{LABEL}, index"), f"{LABEL}, index")
        raise ValueError("its index is not that of one rank")
    decoded = index_json.decode(index, label=f"{LABEL}, index")
    assert isinstance(decoded, Index), "its state is committed"
    rest = text[at:].removeprefix(",")
    if not decoded.files:
        if rest != _NO_SHARDS:
            raise ValueError("it has shards that the index does not list")
        return EncodedDocuments(index, objects, b"")
    # If the index has a wrong size, the header's digest detects it.
    text_nbytes = decoded.files[0].header_nbytes - 8
    inner = f"{_START}{rest}".encode()
    if not len(inner) <= text_nbytes <= len(inner) + 2 * ALIGNMENT:
        raise ValueError(f"the header has {len(inner)} bytes, the index says {text_nbytes}")
    return EncodedDocuments(
        index, objects, text_nbytes.to_bytes(8, "little") + inner.ljust(text_nbytes)
    )
