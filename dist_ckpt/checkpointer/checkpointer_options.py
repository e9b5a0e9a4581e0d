"""The options of `dc.Checkpointer`. An exchange checks them, so errors reach all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dist_ckpt.async_save.async_saver import open_root
from dist_ckpt.checkpointer.save_policy import SavePolicy
from dist_ckpt.core.checkpoint.checkpoint import Checkpoint
from dist_ckpt.core.loading.load_options import LoadOptions, Sources, parse_sources, sources_text
from dist_ckpt.core.planning.name_selection import parse_patterns
from dist_ckpt.core.planning.replica_rules import ReplicaRule, parse_replicas
from dist_ckpt.core.planning.sharding_config import ShardingConfig
from dist_ckpt.core.runtime.arguments import LEAST_POSITIVE, check_flag, check_number, check_whole
from dist_ckpt.core.runtime.typed_msgpack import Message
from dist_ckpt.core.saving.attachments import Attachments
from dist_ckpt.core.saving.save_options import CheckReplicas, SaveOptions
from dist_ckpt.runs.retention_policy import RetentionPolicy

# A lock accepts no longer timeout. Without this check the error would come when the run must stop.
_MAX_STOP_S = 1e9

OnFailure = Literal["warn", "raise"] | Callable[[Exception], object]


class RunArguments(Message, frozen=True):
    """The options that must be equal on all ranks, as text where possible."""

    root: str
    save: str
    keep: str
    init: str
    kind: str
    must_exist: bool
    read_only: bool
    background: bool
    on_failure: str
    max_failures: int
    free_first: bool
    stop_within_s: float
    link_unchanged: tuple[str, ...]
    check_replicas: str
    replicas: str
    chosen: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options of a run: see `Checkpointer`."""

    root: str | os.PathLike[str]
    save: SavePolicy
    keep: RetentionPolicy | None = None
    init: Sources | None = None
    init_strict: bool = True
    must_exist: bool = False
    read_only: bool = False
    config: Mapping[str, object] | None = None
    kind: str | None = None
    config_must_match: Sequence[str] = ()
    attach: Callable[[int], Attachments | None] | None = None
    sharding: ShardingConfig | None = None
    include: str | Sequence[str] | None = None
    exclude: str | Sequence[str] | None = None
    include_frozen: bool = True
    link_unchanged: str | Sequence[str] = ()
    check_replicas: CheckReplicas = "sample"
    replicas: Mapping[str, ReplicaRule] | None = None
    resize: Mapping[str, int] | None = None
    on_commit: Callable[[Checkpoint], object] | None = None
    on_failure: OnFailure = "warn"
    max_failures: int = 3
    free_first: bool = False
    stop_within_s: float = 25.0
    background: bool = True

    def load_options(self, *, record_check: bool = True) -> LoadOptions:
        """Return the options for checkpoints of the run, which have the saved part of the state."""
        return LoadOptions(
            sharding=self.sharding,
            include=self.include,
            exclude=self.exclude,
            include_frozen=self.include_frozen,
            resize=self.resize,
            record_check=record_check,
        )

    def save_options(self) -> SaveOptions:
        """Return the options of all saves of the run: a save adds its step."""
        return SaveOptions(
            sharding=self.sharding,
            include=self.include,
            exclude=self.exclude,
            include_frozen=self.include_frozen,
            config=self.config,
            kind=self.kind,
            link_unchanged=self.link_unchanged,
            check_replicas=self.check_replicas,
            replicas=self.replicas,
        )

    def check(self) -> None:
        """Raise TypeError or ValueError for invalid options."""
        if not isinstance(self.save, SavePolicy):
            raise TypeError(f"save={self.save!r}: give policies such as dc.every(steps=500)")
        if self.save == SavePolicy():
            raise ValueError("save= never fires: give a policy such as dc.every(minutes=30)")
        if self.keep is not None and not isinstance(self.keep, RetentionPolicy):
            raise TypeError(f"keep={self.keep!r}: give policies such as dc.keep.last(3), or None")
        self._check_flags()
        must_match = self.config_must_match
        if isinstance(must_match, str) or not all(type(pattern) is str for pattern in must_match):
            raise TypeError(
                f'config_must_match={must_match!r}: give patterns, such as ("model.*",)'
            )
        if must_match and self.config is None:
            raise ValueError("config_must_match= selects values of config=: give config= too")
        self._check_hooks()

    def _check_hooks(self) -> None:
        commit, failure = self.on_commit, self.on_failure
        if not (commit is None or callable(commit)):
            raise TypeError(f"on_commit={commit!r}: give a function of a checkpoint, or None")
        if not (failure in ("warn", "raise") or callable(failure)):
            raise TypeError(f'on_failure={failure!r}: give "warn", "raise" or a function')
        check_whole("max_failures", self.max_failures, 0)
        if not (self.attach is None or callable(self.attach)):
            raise TypeError(f"attach={self.attach!r}: give a function of the step, or None")

    def _check_flags(self) -> None:
        self.save_options().check()
        for name in ("must_exist", "read_only", "background", "init_strict", "free_first"):
            check_flag(name, getattr(self, name))
        if self.init is not None:
            try:
                parse_sources(self.init)
            except (TypeError, ValueError) as error:
                raise type(error)(f"init: {error}") from None
        if self.must_exist and self.init is not None:
            raise ValueError(
                "init= is for a fresh run, and must_exist=True refuses one: give one of them"
            )
        if self.read_only and self.keep is not None:
            raise ValueError("keep= prunes, and read_only=True changes nothing: give one of them")
        wanted = f"a number of seconds above 0, up to {_MAX_STOP_S:g}"
        check_number("stop_within_s", self.stop_within_s, wanted, LEAST_POSITIVE, _MAX_STOP_S)

    def run_arguments(self) -> RunArguments:
        """Return the options that must be equal on all ranks."""
        return RunArguments(
            root=open_root(self.root)[1],
            save=str(self.save),
            keep="" if self.keep is None else str(self.keep),
            init="" if self.init is None else sources_text(self.init),
            kind=self.kind or "",
            must_exist=self.must_exist,
            read_only=self.read_only,
            background=self.background,
            on_failure=self.on_failure if isinstance(self.on_failure, str) else "warn",
            max_failures=self.max_failures,
            free_first=self.free_first,
            stop_within_s=float(self.stop_within_s),
            link_unchanged=parse_patterns(self.link_unchanged, "link_unchanged"),
            check_replicas=self.check_replicas,
            replicas=str(parse_replicas(self.replicas)),
            chosen=str(self.load_options().selection()),
        )
