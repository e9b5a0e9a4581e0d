"""The tensors of a checkpoint one window after another, for who looks at every value."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from math import prod

from dist_ckpt.core.commit import attempts
from dist_ckpt.core.format.checksums import BLOCK_NBYTES
from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.index.index import Catalog, Index
from dist_ckpt.core.planning.plan import FilePlan, TensorRequest
from dist_ckpt.core.planning.save.save_planner import items_of_ranks
from dist_ckpt.core.planning.selection import Selection
from dist_ckpt.core.shard_io.read.read_windows import StoredTensors, Window, windows_of
from dist_ckpt.core.storage import Storage
from dist_ckpt.interop.registry import open_source
from dist_ckpt.runs.selectors import resolve

# So many bytes of a checkpoint are in memory at a time: a multiple of a block.
WINDOW_NBYTES = 16 * BLOCK_NBYTES


@dataclass(frozen=True, slots=True)
class TensorStream:
    """A checkpoint whose tensors are read in windows."""

    storage: Storage
    path: str
    index: Index
    tensors: StoredTensors

    @property
    def catalog(self) -> Catalog:
        """What it holds."""
        return self.index.catalog


@contextmanager
def open_tensor_stream(path: str | os.PathLike[str]) -> Iterator[TensorStream]:
    """Open what `dc.open` takes. What is deleted meanwhile becomes NotFoundError."""
    storage, where = open_source(resolve(path), direct_reads=True)
    attempt, index = attempts.find(storage, where)
    with attempts.not_found_if_removed(storage, where, attempt):
        tensors = StoredTensors(storage, f"{where}/{attempt.name}", index)
        with closing(tensors):
            yield TensorStream(storage, where, index, tensors)


def chosen_names(catalog: Catalog, selection: Selection) -> dict[str, str]:
    """Return the selected names, tied ones too, each with that of the tensor that is stored.

    ValueError for a pattern that matches no name.
    """
    every = {**{fqn: fqn for fqn in catalog.tensors}, **catalog.aliases}
    if problems := selection.unmatched(every):
        raise ValueError("; ".join(problems))
    return {name: fqn for name, fqn in every.items() if name in selection}


def nbytes_of(catalog: Catalog, names: set[str]) -> int:
    """Return how many bytes of data some stored tensors have."""
    records = (catalog.tensors[name] for name in names)
    return sum(prod(one.shape) * DTYPES[one.dtype].itemsize for one in records)


def stored_windows(catalog: Catalog, names: set[str]) -> Iterator[Window]:
    """Yield windows over the stored shards of some tensors: each block is in one of them."""
    for files in items_of_ranks(catalog):
        chosen = [_only(file, names) for file in files]
        yield from windows_of([file for file in chosen if file.items], WINDOW_NBYTES)


def _only(file: FilePlan, names: set[str]) -> FilePlan:
    return replace(file, items=tuple(item for item in file.items if item.fqn in names))


def parts_of(
    wanted: Sequence[TensorRequest], memory: memoryview
) -> Iterator[tuple[TensorRequest, memoryview]]:
    """Yield what was fetched into memory, each with its bytes there."""
    start = 0
    for want in wanted:
        numel = sum(cell.numel for cell in want.cells)
        stop = start + numel * DTYPES[want.dtype].itemsize
        yield want, memory[start:stop]
        start = stop
