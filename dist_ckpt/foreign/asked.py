"""What is asked of the files of another system, which may hold what no checkpoint can."""

from __future__ import annotations

from typing import NamedTuple

from dist_ckpt.planning.selection import EVERYTHING, Selection


class Asked(NamedTuple):
    """What is looked into, by names: all that `of` does not leave out.

    Of that only what is `needed` has to be such as a checkpoint can hold.
    """

    of: Selection = EVERYTHING
    needed: Selection = EVERYTHING


ALL = Asked()
