"""Mutants of the bytes of a state and of `.shrew` files, and what may come of reading them.

They are read, or one of our errors is raised, in bounded time and memory. What keeps the digests
that give it away is what was saved, or refused. What is read of a `.shrew` file is written as the
same bytes, but that a version 2 has its parts in one order then.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

import dist_ckpt as dc
import shrew_writer
from dist_ckpt.core.format import state_bytes
from dist_ckpt.errors import CheckpointError
from dist_ckpt.interop.shrew import files as shrew
from document_fuzz import FindingError, deadline, flat, mutant, mutate_bytes

# One execution; a mutant has at most some 100 KB.
LIMIT_S = 30

_NUMBERS = [
    number.to_bytes(nbytes, "little")
    for nbytes in (1, 4, 8)
    for number in (0, 1, 2, 255, 1 << 31, (1 << 32) - 1, 1 << 60, (1 << 61) + 1, (1 << 64) - 1)
    if number < 1 << (8 * nbytes)
]


def state() -> dict[str, Any]:
    """Return a small state with something of everything."""
    shared = torch.arange(3.0)
    return {
        "model": {"w": torch.ones(2, 3), "b": shared, "tied": shared},
        "numpy": torch.arange(4).numpy(),
        "plain": [1, {"a": (2.5, {"s"}, 1 << 70)}, torch.float16],
        "rng": dc.PerRank({"seed": b"abc", "t": torch.ones(2)}),
        "lr": 0.1,
    }


class BytesCorpus:
    """The bytes of a state, and the files that they consist of."""

    def __init__(self) -> None:
        self.data = dc.to_bytes(state())
        self.saved = flat(dc.from_bytes(self.data))
        documents, start = state_bytes.decode_documents(memoryview(self.data))
        self.files = {
            "index.json": documents.index,
            **documents.objects,
            "state-00000.safetensors": documents.header + self.data[start:],
        }

    def mended(self, rand: random.Random) -> bytes:
        """Return a mutant in which one document differs, and those above it have its digest."""
        _, _, changed = mutant(self, rand)
        files = {**self.files, **changed}
        shards = files.pop("state-00000.safetensors")
        header = min(8 + int.from_bytes(shards[:8], "little"), len(shards))
        try:
            documents = state_bytes.EncodedDocuments(
                files.pop("index.json"), files, shards[:header]
            )
            return state_bytes.encode_documents(documents) + shards[header:]
        except UnicodeDecodeError:
            return mutate_bytes(self.data, rand)


def run_bytes(corpus: BytesCorpus, seed: str) -> str:
    """Read one mutant of a state's bytes; return what became of it, in a word."""
    rand = random.Random(seed)
    is_mended = rand.random() < 0.3
    data = corpus.mended(rand) if is_mended else mutate_bytes(corpus.data, rand)

    def read() -> str:
        try:
            found = flat(dc.from_bytes(data))
        except CheckpointError as error:
            return type(error).__name__
        if found == corpus.saved:
            return "the same"
        if not is_mended:
            raise FindingError("it loaded, but not what was saved")
        return "another"

    return _guarded(read, f"bytes, seed {seed}")


def run_shrew(seed: str) -> str:
    """Read one mutant of a `.shrew` file; return what became of it, in a word."""
    rand = random.Random(seed)
    data = shrew_writer.FILES[rand.choice([*shrew_writer.FILES])]
    if rand.random() < 0.5:
        data = mutate_bytes(data, rand)
    else:
        at, number = rand.randrange(len(data)), rand.choice(_NUMBERS)
        data = data[:at] + number + data[at + len(number) :]

    def read() -> str:
        try:
            held = shrew.read(data)
        except CheckpointError as error:
            return type(error).__name__
        written = shrew.write(held)
        is_first = data[4:8] == bytes((1, 0, 0, 0))
        if written == data:
            return "the same bytes"
        if is_first or shrew.write(shrew.read(written)) != written:
            raise FindingError("it was read, and other bytes were written")
        return "in another order"

    return _guarded(read, f"shrew, seed {seed}")


def _guarded(read: Callable[[], str], what: str) -> str:
    try:
        with deadline(LIMIT_S):
            return read()
    except FindingError as error:
        raise FindingError(f"{what}: {error}") from error
    except Exception as error:
        raise FindingError(f"{what}: {error!r}") from error
