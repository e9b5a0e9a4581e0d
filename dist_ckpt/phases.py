"""The stopwatch of a save or load: seconds by phase, one log line for each, and one for all."""

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

    def done(self, report: object) -> None:
        """Log what the operation came to."""
        if not self._quiet:
            _log.info("%s: %s", self._what, report)
