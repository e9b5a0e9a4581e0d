"""The options of `dc.load`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from dist_ckpt.core.format.index.model_description import check_description
from dist_ckpt.core.loading.load_messages import ReadOnce
from dist_ckpt.core.planning.selection import Cast, Selection, cast_of, selection_of
from dist_ckpt.core.planning.sharding_config import ShardingConfig
from dist_ckpt.core.state.binding.sources.rename import rename_of


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """The options of `load`, checked by `check` once a rank's error can reach the others.

    `notes`: what was read in full and is right is put down in its run's records. Not of users.
    """

    sharding: ShardingConfig | None = None
    strict: bool = True
    verify: bool = True
    check_first: bool = False
    include: str | Sequence[str] | None = None
    exclude: str | Sequence[str] | None = None
    rename: Mapping[str, str | None] | None = None
    include_frozen: bool = True
    config: Mapping[str, object] | None = None
    kind: str | None = None
    read_once: ReadOnce = "host"
    notes: bool = True
    cast: Cast = None

    def check(self) -> None:
        """Raise TypeError or ValueError for options that make no sense."""
        if self.sharding is not None and not isinstance(self.sharding, ShardingConfig):
            raise TypeError(f"sharding is a {type(self.sharding).__name__}: give a ShardingConfig")
        for name in ("strict", "verify", "check_first"):
            if type(value := getattr(self, name)) is not bool:
                raise TypeError(f"{name}={value!r}: give True or False")
        if self.read_once not in get_args(ReadOnce):
            raise ValueError(f'read_once={self.read_once!r}: give "host", "job" or "off"')
        self.selection()
        rename_of(self.rename)
        cast_of(self.cast)
        check_description(None, self.config, self.kind)

    def selection(self) -> Selection:
        """Return which names are loaded. Raises TypeError or ValueError."""
        return selection_of(self.include, self.exclude, self.include_frozen)
