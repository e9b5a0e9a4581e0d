"""Pause Python's collector of cyclic garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """Pause the collector while many values are created, none of which is garbage.

    The collector scans the whole process each time the number of objects has grown by a quarter.
    With a few thousand tensors it took half of the time of a load. The pause affects all threads:
    never use it around calls that wait for storage. Threads may overlap.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
