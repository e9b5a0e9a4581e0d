"""Forked children (a data loader's workers): what they let go of that is their parent's."""

from __future__ import annotations

import os
from collections.abc import Callable
from weakref import WeakMethod


def run_after_fork(method: Callable[[], None]) -> None:
    """Have every forked child call a method, if its object is alive then: this keeps none alive."""
    weak = WeakMethod(method)

    def call() -> None:
        if (alive := weak()) is not None:
            alive()

    os.register_at_fork(after_in_child=call)
