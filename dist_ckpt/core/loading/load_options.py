"""The options of `dc.load`, and where a load takes things from."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from dist_ckpt.core.format.index.model_description import check_description
from dist_ckpt.core.planning.selection import Cast, Selection, cast_of, selection_of
from dist_ckpt.core.planning.sharding_config import ShardingConfig
from dist_ckpt.core.state.binding.sources.rename import rename_of
from dist_ckpt.core.storage import open_storage

# Where what several ranks want is fetched from storage once: on each host, or in the whole job.
ReadOnce = Literal["host", "job", "off"]


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


# --- sources ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint to load from, and what to take of it. A plain value, which needs no torch.

    `path` is a folder or a selector, such as `base@min:val/loss`. `include` and `exclude` are
    patterns on the names in the state, `rename` maps saved names to names there, all as in
    `dc.load`; what they leave out is not taken from this source. Whatever is wrong with them is
    said by the load: TypeError or ValueError for what makes no sense, IncompatibleError for a
    pattern or a rule that matches nothing.
    """

    path: str | os.PathLike[str]
    include: str | Sequence[str] | None = None
    exclude: str | Sequence[str] | None = None
    rename: Mapping[str, str | None] | None = None


# What stands for one source, and what a load is given.
AnySource = str | os.PathLike[str] | Source
Sources = AnySource | Sequence[AnySource] | Mapping[str, AnySource | Sequence[AnySource]]


@dataclass(frozen=True, slots=True)
class SourceShare:
    """A source as a load uses it: for what lies at and below `key`, for everything if that is "".

    `place` is the number of its path among all that the load reads.
    """

    place: int
    key: str
    source: Source


def uses_of(given: object) -> tuple[tuple[str, ...], tuple[SourceShare, ...]]:
    """Return the paths, each once, and what is taken of each, the preferred of a key first.

    Touches nothing. Raises TypeError or ValueError for what makes no sense.
    """
    places: dict[str, int] = {}
    uses: list[SourceShare] = []
    for key, some in _by_key(given):
        for one in _in_order(some, key):
            source = one if isinstance(one, Source) else Source(one)  # type: ignore[arg-type]
            path = open_storage(source.path)[1]
            use = SourceShare(places.setdefault(path, len(places)), key, _as_asked(source, path))
            if use in uses:
                raise ValueError(
                    f"{path} is given twice{f' for {key!r}' if key else ''}, and nothing would be "
                    "taken the second time: remove one"
                )
            uses.append(use)
    return tuple(places), tuple(uses)


def text_of(given: object) -> str:
    """Return what a load is given in short, for messages and logs. Never raises for it."""
    those = given.values() if isinstance(given, Mapping) else [given]
    lists = (some if isinstance(some, list | tuple) else [some] for some in those)
    # No deeper, however what is given may be nested.
    paths = (one.path if isinstance(one, Source) else one for some in lists for one in some)
    return ", ".join(dict.fromkeys(map(str, paths)))


def _by_key(given: object) -> Iterable[tuple[str, object]]:
    if not isinstance(given, Mapping):
        return [("", given)]
    if not given:
        raise ValueError("the sources are an empty mapping: give each key of the state its source")
    for key in given:
        if not isinstance(key, str):
            raise TypeError(f"the sources have the key {key!r}: give names of the state as strings")
        if not key or not all(key.split(".")):
            raise ValueError(
                f'the sources have the key {key!r}: give a name of the state, such as "model" or '
                '"model.encoder"'
            )
    return given.items()


def _in_order(some: object, key: str) -> Sequence[object]:
    if not isinstance(some, list | tuple):
        return [some]
    if not some:
        raise ValueError(
            f"the list of sources{f' for {key!r}' if key else ''} is empty: give at least one"
        )
    return some


def _as_asked(source: Source, path: str) -> Source:
    return Source(path, source.include, source.exclude, source.rename)
