"""Deadlines, threads and limits. They come from environment variables only, not from arguments."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import isfinite
from typing import TypeVar

_T = TypeVar("_T")

# A storage call that takes longer counts as hanging. This is far longer than a full disk needs for
# a few MiB, or a network file system for a failover.
STALL_TIMEOUT_S = 600.0

# Each thread has a scratch buffer of 10 MiB, and one of 2 MiB for direct reads. A save has five
# more buffers (`shard_io/write/shard_writer.py`). So a save or a load uses at most 256 MiB. A load
# into CUDA devices has pinned buffers too (`shard_io/memory/pinned_buffers.py`).
MAX_THREADS = 20

# The timeout of the training's collectives, if that of the process group cannot be read.
UNKNOWN_GROUP_TIMEOUT_S = 1800.0

# A sync waits for all data that the system has not written yet. Slower storage counts as hanging.
SLOWEST_NBYTES_PER_S = 10 << 20


def stall_timeout_s(nbytes: int, *, stall_s: float = STALL_TIMEOUT_S) -> float:
    """Return how long to wait for storage that may have this many bytes to move."""
    return stall_s + nbytes / SLOWEST_NBYTES_PER_S


# Old names, which 0.2.0 has changed. They raise an error: to ignore them would use the defaults.
_NEW_NAMES: Mapping[str, str] = {
    "silence_s": "heartbeat_timeout_s",
    "arrive_s": "join_timeout_s",
    "warn_s": "join_warning_s",
    "appear_s": "visibility_timeout_s",
}


def _refuse_old_names(settings: type[_T]) -> type[_T]:
    """Decorate a dataclass: its constructor raises TypeError for old names of its fields."""
    init = settings.__init__

    @functools.wraps(init)
    def checked(self: _T, *args: object, **kwargs: object) -> None:
        for old, new in _NEW_NAMES.items():
            if old in kwargs:
                raise TypeError(f"{old}= is called {new}= since dist_ckpt 0.2.0: write {new}=")
        init(self, *args, **kwargs)

    settings.__init__ = checked  # type: ignore[assignment, method-assign]
    return settings


@_refuse_old_names
@dataclass(frozen=True, slots=True)
class Settings:
    """Deadlines and sizes. Raises ValueError for an invalid value.

    - `heartbeat_timeout_s`: a rank without a sign of life for this long counts as dead.
    - `join_timeout_s`: how long the first rank in a save or load waits for a rank that was never
      seen. For a live rank the limit is `group_timeout_s`, if that is longer.
    - `join_warning_s`: after this time a warning in the log names the missing ranks.
    - `visibility_timeout_s`: how long a rank waits until it sees rank 0's claim on shared storage.
    - `threads`: how many reads or writes a rank runs at the same time.
    - `host`: the name of this rank's host. "" means the system's name.
    - `group_timeout_s`: the timeout of the process group.
    """

    heartbeat_timeout_s: float = 20.0
    join_timeout_s: float = 300.0
    join_warning_s: float = 30.0
    visibility_timeout_s: float = 60.0
    threads: int = 4
    host: str = ""
    group_timeout_s: float | None = None

    @property
    def late_timeout_s(self) -> float:
        """How long to wait for a rank that is alive and late."""
        return max(self.join_timeout_s, self.group_timeout_s or 0.0)

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None or isinstance(value, str):
                continue
            if not isfinite(value) or value <= 0:
                raise ValueError(f"{_variable(field.name)}={value}: it must be a positive number")
        if self.threads > MAX_THREADS:
            raise ValueError(
                f"{_variable('threads')}={self.threads}: it must be at most {MAX_THREADS}"
            )

    @staticmethod
    def from_environment(
        environ: Mapping[str, str] = os.environ, *, group_timeout_s: float = UNKNOWN_GROUP_TIMEOUT_S
    ) -> Settings:
        """Return the defaults, changed by DIST_CKPT_HEARTBEAT_TIMEOUT_S and so on.

        DIST_CKPT_JOIN_TIMEOUT_S also replaces the timeout of the process group.

        Raises ValueError for a value that is not a number, and for a variable with an old name.
        """
        for old, new in _NEW_NAMES.items():
            if _variable(old) in environ:
                raise ValueError(
                    f"{_variable(old)} is called {_variable(new)} since dist_ckpt 0.2.0: set "
                    f"{_variable(new)}, and unset {_variable(old)}"
                )
        options = {}
        for field in fields(_DEFAULTS):
            text = environ.get(_variable(field.name))
            if text is None or field.name == "group_timeout_s":
                continue
            try:
                options[field.name] = type(getattr(_DEFAULTS, field.name))(text)
            except ValueError:
                raise ValueError(f"{_variable(field.name)}={text!r} is not a number") from None
        is_explicit = "join_timeout_s" in options
        return Settings(**options, group_timeout_s=None if is_explicit else group_timeout_s)


_DEFAULTS = Settings()


def _variable(name: str) -> str:
    return f"DIST_CKPT_{name.upper()}"


def launched_on_one_host(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if a launcher such as torchrun says that all ranks are on this host."""
    return environ.get("LOCAL_WORLD_SIZE", "") == environ.get("WORLD_SIZE")


def launched_world_size(environ: Mapping[str, str] = os.environ) -> int:
    """Return the world size that a launcher such as torchrun has set in the environment, else 1."""
    text = environ.get("WORLD_SIZE", "1")
    return int(text) if text.isdecimal() else 1
