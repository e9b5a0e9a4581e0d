"""The plain values of a checkpoint: of rank 0's objects file, and of others' as they are needed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cache

from dist_ckpt.errors import CorruptError
from dist_ckpt.format.index import Catalog, Key
from dist_ckpt.format.objects_file import ObjectsFile


class SavedValues:
    """Plain values by the catalog's names; `main` are those of the global objects file.

    `read(rank)` returns what a rank alone has stored; it is asked once for each rank.
    """

    def __init__(
        self,
        catalog: Catalog,
        main: Mapping[str, object],
        read: Callable[[int], ObjectsFile],
    ) -> None:
        self.main = main
        self._catalog = catalog
        self._read = cache(read)

    def value(self, fqn: str) -> object:
        """Return a value. Raises CorruptError if no file has it, and what `read` raises."""
        if fqn in self.main:
            return self.main[fqn]
        values = self._read(self._catalog.values[fqn]).values
        if fqn not in values:
            raise CorruptError(f"{fqn}: no objects file has it: load an older checkpoint")
        return values[fqn]

    def per_rank(self, fqn: str, keys: Collection[Key]) -> dict[Key, object]:
        """Return what a per-rank value is for some of its keys; raises what `value` raises."""
        found: dict[Key, object] = {}
        for key, rank in self._catalog.per_rank[fqn]:
            if key in keys:
                values = self._read(rank).per_rank.get(fqn, {})
                if key not in values:
                    raise CorruptError(
                        f"{fqn}: no objects file has it for {key!r}: load an older checkpoint"
                    )
                found[key] = values[key]
        return found
