"""Mutated documents of real checkpoints, and what may come of reading them.

Half of the mutants keep the digests that gave them away: they load as what was saved, or raise one
of our errors. The others get new digests: nobody can tell what was saved, but what reads them
raises nothing but our errors, in bounded time and memory, and `verify` tells of what nobody can
load.
"""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import msgpack
import numpy as np
import torch

import dist_ckpt as dc
from dist_ckpt.async_save.snapshots.arena_layout import Seal, Snapshot, SnapshotMetadata
from dist_ckpt.core.format.checksums import document_digest
from dist_ckpt.core.planning.plan import Inventory
from dist_ckpt.core.runtime import typed_msgpack
from dist_ckpt.core.state.inventory_builder import build_inventory
from dist_ckpt.errors import CheckpointError, CorruptError

# One execution; a mutant has at most some 100 KB.
LIMIT_S = 60

_END = b',"digest":"'
_BYTES = (
    *(b"\x80" * 2000, b"\x90" * 2000, b"\x91" * 700, b"\xd4\x03" * 500, b"\xdd\x7f\xff\xff\xff"),
    *(
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x12",
        b"\xd6\xff1234",
    ),
    *(b"{}," * 2000, b"[" * 2000, b'{"a":' * 300, b"1e999", b"NaN", b"18446744073709551616"),
    *(b"-1", b'"\\ud800"', b"null", b"\0", b"\xff\xfe", b'"a":1,"a":2', b"9" * 5000, b" " * 5000),
)
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 1 << 31, (1 << 63) - 1, (1 << 64) - 1, -(1 << 63), 0.5, 1e308),
    *(
        "",
        "a",
        "../../x",
        "\0",
        "model.w",
        "a" * 5000,
        [],
        {},
        [[]],
        {"": {}},
        [0] * 300,
        [{}] * 3000,
    ),
    *({str(n): n for n in range(300)}, [None, [None, [None]]]),
)


def state() -> dict[str, Any]:
    """Return a state with something of everything."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    return {
        "model": model,
        "optim": optimizer,
        "numpy": {"a": np.arange(6.0), "n": {"b": torch.arange(3, dtype=torch.bfloat16)}},
        "plain": [1, {"a": (2.5, {"s"}, 1 << 70)}, torch.float16, np.float32(1), range(3)],
        "rng": dc.PerRank({"seed": b"abc", "t": torch.ones(2)}),
        "lr": 0.1,
    }


def flat(value: Any) -> Any:
    """Return what is in a state, as what can be compared."""
    if hasattr(value, "state_dict"):
        value = value.state_dict()
    if isinstance(value, dc.PerRank):
        value = value.value
    if isinstance(value, torch.Tensor | np.ndarray):
        return ("tensor", str(value.dtype), value.tolist())
    if isinstance(value, Mapping):
        return {key: flat(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return (type(value), [flat(item) for item in value])
    return value


@dataclass
class Corpus:
    """A committed checkpoint in a folder of its own: the files of its attempt, as they were."""

    root: Path
    files: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        dc.save(state(), self.root, step=3, metadata={"run": "a", "tags": {"b"}})
        self.files = {file.name: file.read_bytes() for file in self.folder.iterdir()}
        self.saved = flat(state())
        local = build_inventory(state(), sharding=None, rank=0, world_size=1, group_ranks=(0,))
        inventory = typed_msgpack.encode(local.inventory)
        self.details = typed_msgpack.encode(
            SnapshotMetadata(False, {"run": "a"}, {"by": "me"}, 1.5, ((inventory, (0, 1, 3)),), ())
        )
        self.inventory = inventory

    @property
    def folder(self) -> Path:
        """The folder of the attempt."""
        (folder,) = self.root.glob("a1-*")
        return folder


# --- mutants ---------------------------------------------------------------------------------


def mutate_bytes(data: bytes, rand: random.Random) -> bytes:
    """Change some bytes: flip, overwrite, cut, repeat, move, insert."""
    out = bytearray(data)
    for _ in range(rand.choice((1, 1, 1, 2, 5))):
        at, other = sorted(rand.randrange(len(out) + 1) for _ in range(2))
        kind = rand.randrange(7)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << rand.randrange(8)
        elif kind == 1 and at < len(out):
            out[at] = rand.randrange(256)
        elif kind == 2:
            del out[at : min(other, at + rand.choice((1, 4, 50, 10_000)))]
        elif kind == 3:
            out[at:at] = out[at : at + rand.choice((1, 8, 200))] * rand.choice((1, 2, 50))
        elif kind == 4:
            out[other:other] = out[at : at + 100]
        elif kind == 5:
            out[at:at] = rand.choice(_BYTES)
        else:
            end = at + rand.choice((1, 2, 8))
            out[at:end] = rand.randbytes(end - at)
    return bytes(out)


def mutate_tree(doc: Any, rand: random.Random) -> Any:
    """Change one value, key or item somewhere in a document."""
    if isinstance(doc, msgpack.ExtType):
        if rand.random() < 0.3:
            return msgpack.ExtType(rand.randrange(128), doc.data)
        return msgpack.ExtType(doc.code, mutated(doc.data, rand, tree=_msgpack_tree))
    if not isinstance(doc, dict | list) or not doc or rand.random() < 0.2:
        return rand.choice(_VALUES)
    keys = list(doc) if isinstance(doc, dict) else list(range(len(doc)))
    key, kind = rand.choice(keys), rand.randrange(8)
    out = dict(doc) if isinstance(doc, dict) else list(doc)
    if kind == 0:
        del out[key]
    elif kind == 1:
        out[key] = out[rand.choice(keys)]
    elif kind == 2 and isinstance(out, list):
        out.insert(key, rand.choice(_VALUES))
    elif kind == 2 and isinstance(out, dict):
        out[rand.choice(("x-a", "a", "", key))] = rand.choice(_VALUES)
    else:
        out[key] = mutate_tree(out[key], rand)
    return out


def _msgpack_tree(data: bytes, rand: random.Random) -> bytes:
    changed: bytes = msgpack.packb(
        mutate_tree(msgpack.unpackb(data, strict_map_key=False), rand), use_bin_type=True
    )
    return changed


def _json_tree(data: bytes, rand: random.Random) -> bytes:
    doc = mutate_tree(json.loads(data), rand)
    separators = rand.choice(((",", ":"), (",", ":"), (", ", ": ")))
    return json.dumps(doc, ensure_ascii=rand.random() < 0.5, separators=separators).encode(
        errors="replace"
    )


def _header_tree(data: bytes, rand: random.Random) -> bytes:
    """Change a header, or what is in the string in it that is our own part."""
    doc = json.loads(data)
    if rand.random() < 0.6:
        ours = _json_tree(doc["__metadata__"]["dist_ckpt"].encode(), rand)
        doc["__metadata__"]["dist_ckpt"] = ours.decode(errors="replace")
        return json.dumps(doc, separators=(",", ":")).encode(errors="replace")
    return _json_tree(data, rand)


def mutated(
    data: bytes, rand: random.Random, *, tree: Callable[[bytes, random.Random], bytes]
) -> bytes:
    """Change a document: by its structure, if it has one, or by its bytes."""
    if rand.random() < 0.6:
        try:
            return tree(data, rand)
        except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException):
            pass
    return mutate_bytes(data, rand)


def with_digest(index: bytes) -> bytes:
    """Return an index's bytes with the digest that they have now."""
    body = index.rpartition(_END)[0] or index
    return body + b'%s%s"}\n' % (_END, document_digest(body).encode())


class WithFiles(Protocol):
    """What has the files of a checkpoint."""

    files: dict[str, bytes]


def mutant(corpus: WithFiles, rand: random.Random) -> tuple[str, bool, dict[str, bytes]]:
    """Return the name of a file, whether its digests were mended, and the files that differ."""
    name = rand.choice(sorted(corpus.files))
    data, index = corpus.files[name], corpus.files["index.json"]
    mends = rand.random() < 0.7
    if name.endswith(".json"):
        body = mutated(data.rpartition(_END)[0] + b"}", rand, tree=_json_tree)
        changed = with_digest(body.removesuffix(b"}")) if mends else mutate_bytes(data, rand)
        return name, mends, {name: changed}
    old = [f'{len(data)},"{document_digest(data)}"', ""]
    if name.endswith(".safetensors"):
        end = 8 + int.from_bytes(data[:8], "little")
        text = mutated(data[8:end].rstrip(b" "), rand, tree=_header_tree)
        room = -(-(len(text) + 8) // 4096) * 4096
        header = (room - 8).to_bytes(8, "little") + text.ljust(room - 8)
        if rand.random() < 0.1:
            header = mutate_bytes(data[:end], rand)
        changed = header + data[end:]
        old[0] = f'{len(data)},{end},"{document_digest(data[:end])}"'
        new = f'{len(changed)},{len(header)},"{document_digest(header)}"'
    else:
        changed = mutated(data, rand, tree=_msgpack_tree)
        new = f'{len(changed)},"{document_digest(changed)}"'
    if not mends:
        return name, False, {name: changed}
    assert old[0].encode() in index, "the index has sizes and digests in this way"
    return name, True, {name: changed, "index.json": with_digest(
        index.rpartition(_END)[0].replace(old[0].encode(), new.encode())
    )}  # fmt: skip


# --- what may come of it ---------------------------------------------------------------------


class FindingError(Exception):
    """Something came of a mutant that must not."""


@contextmanager
def deadline(seconds: int) -> Iterator[None]:
    """Raise a FindingError in the main thread where it takes longer."""

    def late(number: int, frame: FrameType | None) -> None:
        raise FindingError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run_one(corpus: Corpus, seed: str) -> str:
    """Make one mutant and read it in all ways; return what became of it, in a word."""
    rand = random.Random(seed)
    if rand.random() < 0.1:
        return _decode_messages(corpus, rand)
    name, mends, changed = mutant(corpus, rand)
    folder = corpus.folder
    for file, data in changed.items():
        (folder / file).write_bytes(data)
    try:
        with deadline(LIMIT_S):
            outcome = _read(corpus, is_same=all(corpus.files[n] == d for n, d in changed.items()))
    except FindingError as error:
        raise FindingError(f"seed {seed}, {name}, mended {mends}: {error}") from error
    except Exception as error:
        raise FindingError(f"seed {seed}, {name}, mended {mends}: {error!r}") from error
    finally:
        for file in changed:
            (folder / file).write_bytes(corpus.files[file])
    if outcome == "another" and not mends:
        raise FindingError(f"seed {seed}, {name}: it loaded, but not what was saved")
    return outcome


def _read(corpus: Corpus, *, is_same: bool) -> str:
    try:
        is_good = dc.verify(corpus.root).ok
    except CheckpointError:
        is_good = False
    if is_same and not is_good:
        raise FindingError("nothing was changed, and it is called damaged")
    _look_into(corpus.root, is_good=is_good)
    into = state()
    try:
        dc.load(into, corpus.root)
    except CorruptError as error:
        if is_good:
            raise FindingError(f"verify calls it good, and load says {error}") from error
        return "damaged"
    except CheckpointError as error:
        return type(error).__name__
    return "the same" if flat(into) == corpus.saved else "another"


def _look_into(root: Path, *, is_good: bool) -> None:
    try:
        with dc.open(root) as ck:
            _ = ck.objects, ck.per_rank, ck.metadata, ck.tensors
            for fqn in ck:
                ck[fqn][...]
    except CorruptError as error:
        if is_good:
            raise FindingError(f"verify calls it good, and open says {error}") from error
    except CheckpointError:
        return


def _decode_messages(corpus: Corpus, rand: random.Random) -> str:
    """Decode what a snapshot in memory says of its save: only ValueErrors come of it."""
    decoders: list[tuple[bytes, Callable[[bytes], object]]] = [
        (corpus.details, lambda data: typed_msgpack.decode(data, SnapshotMetadata)),
        (corpus.details, lambda data: typed_msgpack.decode(data, Snapshot)),
        (corpus.details, lambda data: typed_msgpack.decode(data, Seal)),
        (corpus.inventory, lambda data: typed_msgpack.decode(data, Inventory)),
    ]
    for _ in range(20):
        data, decode = rand.choice(decoders)
        changed = mutated(data, rand, tree=_msgpack_tree)
        try:
            with deadline(LIMIT_S):
                decode(changed)
        except ValueError:
            continue
        except Exception as error:
            raise FindingError(f"{decode!r} of {changed[:200]!r}...: {error!r}") from error
    return "messages"
