"""Python's collector of cyclic garbage, out of the way for a while."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """Make many values without a search for garbage among them: none of them is any.

    The collector runs each time that a quarter more objects live than before, and looks at all of
    the process: with a few thousand tensors it took half of the time of a load. What is made inside
    goes by its reference counts. Afterwards the collector is as it was; threads may overlap.
    It is the whole process's, so never around calls that wait for storage.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
