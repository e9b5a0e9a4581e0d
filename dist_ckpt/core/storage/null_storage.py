"""A storage that drops all data, to compute headers and digests only."""

# ruff: noqa: D102  # the protocols document the methods

from __future__ import annotations

from dist_ckpt.core.format.checksums import Buffer
from dist_ckpt.core.storage import WritableFile


class NullStorage:
    """Accepts every file and drops it."""

    def create(self, path: str, nbytes: int) -> WritableFile:
        return _NoFile(nbytes)

    def sync(self, folder: str) -> None: ...


class _NoFile:
    alignment = 1

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def write_at(self, offset: int, data: Buffer) -> None: ...

    def finish(self) -> int:
        return self._nbytes

    def discard(self) -> None: ...
