"""The plain values that a load has read, and what is asked for of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dist_ckpt.errors import CorruptError
from dist_ckpt.format.index import Key
from dist_ckpt.format.objects_file import ObjectsFile


@dataclass(frozen=True, slots=True, eq=False)
class Contents:
    """The plain values of a checkpoint that were read, by the catalog's names."""

    values: Mapping[str, object]
    per_rank: Mapping[str, Mapping[Key, object]]

    @staticmethod
    def of(files: Sequence[ObjectsFile]) -> Contents:
        """Put the objects files that were read together."""
        values: dict[str, object] = {}
        per_rank: dict[str, dict[Key, object]] = {}
        for file in files:
            values.update(file.values)
            for name, keyed in file.per_rank.items():
                per_rank.setdefault(name, {}).update(keyed)
        return Contents(values, per_rank)

    def check(self, needed: Sequence[tuple[str, Key | None]]) -> None:
        """Raise CorruptError unless these values (and keys of per-rank values) are there."""
        for fqn, key in needed:
            if key is None and fqn not in self.values:
                raise CorruptError(f"{fqn}: no objects file has it: load an older checkpoint")
            if key is not None and key not in self.per_rank.get(fqn, {}):
                raise CorruptError(
                    f"{fqn}: no objects file has it for {key!r}: load an older checkpoint"
                )


# Returns what was asked for, once it has been read.
Deferred = Callable[[Contents], object]
