"""The options of `dc.load`, and its sources."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from dist_ckpt.core.format.index.model_description import check_description
from dist_ckpt.core.planning.name_selection import (
    Cast,
    Resize,
    Selection,
    parse_cast,
    parse_resize,
    parse_selection,
)
from dist_ckpt.core.planning.sharding_config import ShardingConfig
from dist_ckpt.core.runtime.arguments import check_flag
from dist_ckpt.core.state.binding.sources.rename import RenameRules, parse_rename
from dist_ckpt.core.storage import open_storage

# Blocks that several ranks need are read once on each host, once in the job, or by all.
ReadOnce = Literal["host", "job", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """The options of `load`. Call `check` inside an exchange: its errors reach all ranks.

    `record_check` is internal: a load records damage, and that a whole checkpoint was read.
    """

    sharding: ShardingConfig | None = None
    strict: bool = True
    verify: bool = True
    check_first: bool = False
    include: str | Sequence[str] | None = None
    exclude: str | Sequence[str] | None = None
    rename: RenameRules | None = None
    include_frozen: bool = True
    config: Mapping[str, object] | None = None
    kind: str | None = None
    read_once: ReadOnce = "host"
    record_check: bool = True
    cast: Cast = None
    dequantize: bool = False
    resize: Resize | None = None

    def check(self) -> None:
        """Raise TypeError or ValueError for options that are not valid."""
        if self.sharding is not None and not isinstance(self.sharding, ShardingConfig):
            raise TypeError(f"sharding is a {type(self.sharding).__name__}: give a ShardingConfig")
        for name in ("strict", "verify", "check_first", "dequantize"):
            check_flag(name, getattr(self, name))
        if self.read_once not in get_args(ReadOnce):
            raise ValueError(f'read_once={self.read_once!r}: give "host", "job" or "off"')
        self.selection()
        parse_rename(self.rename)
        parse_cast(self.cast)
        parse_resize(self.resize)
        check_description(None, self.config, self.kind)

    def selection(self) -> Selection:
        """Return the selection of the names to load. Raises TypeError or ValueError."""
        return parse_selection(self.include, self.exclude, self.include_frozen)


# --- sources ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint to load from, and the names to take from it. A plain value, without torch.

    `path` is a folder or a selector, such as `base@min:val/loss`. `include` and `exclude` are
    patterns on the names in the state, and `rename` maps saved names to names there, as in
    `dc.load`. Names that they leave out are not taken from this source. The load raises TypeError
    or ValueError if they are not valid, and IncompatibleError for a pattern or a rule that matches
    nothing.
    """

    path: str | os.PathLike[str]
    include: str | Sequence[str] | None = None
    exclude: str | Sequence[str] | None = None
    rename: RenameRules | None = None


# One source, and all sources of a load.
AnySource = str | os.PathLike[str] | Source
Sources = AnySource | Sequence[AnySource] | Mapping[str, AnySource | Sequence[AnySource]]


@dataclass(frozen=True, slots=True)
class SourceUse:
    """A source, and the part of the state that it fills: the names at and below `key`.

    With `key` "" it fills the whole state. `number` is the number of its path in the load.
    """

    number: int
    key: str
    source: Source


def parse_sources(sources: object) -> tuple[tuple[str, ...], tuple[SourceUse, ...]]:
    """Return the distinct paths, and the sources of each key in the order of preference.

    No file is opened. Raises TypeError or ValueError for sources that are not valid.
    """
    numbers: dict[str, int] = {}
    source_uses: list[SourceUse] = []
    for key, value in _items_by_key(sources):
        items = value if isinstance(value, list | tuple) else [value]
        if not items:
            at_key = f" for {key!r}" if key else ""
            raise ValueError(f"the list of sources{at_key} is empty: give at least one")
        for item in items:
            source = item if isinstance(item, Source) else Source(item)  # type: ignore[arg-type]
            path = open_storage(source.path)[1]
            number = numbers.setdefault(path, len(numbers))
            use = SourceUse(number, key, replace(source, path=path))
            if use in source_uses:
                raise ValueError(
                    f"{path} is given twice{f' for {key!r}' if key else ''}, and the second would "
                    "fill nothing: remove one"
                )
            source_uses.append(use)
    return tuple(numbers), tuple(source_uses)


def sources_text(sources: object) -> str:
    """Return the paths of the sources for messages and logs. Never raises for invalid sources."""
    values = sources.values() if isinstance(sources, Mapping) else [sources]
    lists = (value if isinstance(value, list | tuple) else [value] for value in values)
    # Look at one level only: an invalid value may be nested deeply.
    paths = (item.path if isinstance(item, Source) else item for items in lists for item in items)
    return ", ".join(dict.fromkeys(map(str, paths)))


def _items_by_key(sources: object) -> Iterable[tuple[str, object]]:
    if not isinstance(sources, Mapping):
        return [("", sources)]
    if not sources:
        raise ValueError("the sources are an empty mapping: give each key of the state its source")
    for key in sources:
        if not isinstance(key, str):
            raise TypeError(f"the sources have the key {key!r}: give names of the state as strings")
        if not key or not all(key.split(".")):
            raise ValueError(
                f'the sources have the key {key!r}: give a name of the state, such as "model" or '
                '"model.encoder"'
            )
    return sources.items()
