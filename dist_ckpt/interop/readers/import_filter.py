"""What is of interest in the files of another system, which may hold what no checkpoint can."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from dist_ckpt.core.planning.selection import SELECT_ALL, Selection


class ImportFilter(NamedTuple):
    """What of the files is looked into: all names that `looked_into` does not leave out.

    A value that a checkpoint cannot hold is refused only if its name is one that `needs` is true
    for: nobody reads the others.
    """

    looked_into: Selection = SELECT_ALL
    needs: Callable[[str], bool] = lambda _: True


ALL = ImportFilter()
