"""The stopwatch of a save or load: seconds by phase, and one log line at each phase's end."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

_log = logging.getLogger("dist_ckpt")


class Phases:
    """Measures the phases of one operation; `quiet` ranks measure without logging.

    One operation on one thread: not shared.
    """

    def __init__(self, operation: str, where: str, *, quiet: bool) -> None:
        self.seconds: dict[str, float] = {}
        self._what = f"{operation} {where}"
        self._quiet = quiet

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure one phase; a phase that is entered twice adds up. Logs when it ends well."""
        start = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        if not self._quiet:
            _log.info("%s: %s took %.3f s", self._what, name, seconds)
