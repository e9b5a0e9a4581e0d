"""What the arenas of one rank hold, whatever saves that belongs to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from dist_ckpt.async_save.snapshots.job_folder import NUM_ARENAS, RankFolder
from dist_ckpt.async_save.snapshots.recovered_snapshots import RecoveredSnapshot, open_first


@contextmanager
def kept_in(folder: RankFolder) -> Iterator[tuple[list[RecoveredSnapshot], list[str]]]:
    """Give the snapshots that a rank's arenas hold, and what is wrong with the other arenas."""
    found: list[RecoveredSnapshot] = []
    problems: list[str] = []
    with ExitStack() as stack:
        for number in range(NUM_ARENAS):
            kept, wrong = open_first(folder, number)
            problems += map(str, wrong)
            if kept is not None:
                stack.callback(kept.close)
                found.append(kept)
        yield found, problems
