"""Calls in forked children, such as a data loader's workers."""

from __future__ import annotations

import os
from collections.abc import Callable
from weakref import WeakMethod


def run_after_fork(method: Callable[[], None]) -> None:
    """Call a method in every forked child while its object is alive, without a reference to it."""
    weak = WeakMethod(method)

    def call() -> None:
        if (alive := weak()) is not None:
            alive()

    os.register_at_fork(after_in_child=call)
