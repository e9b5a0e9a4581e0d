"""Text for a page: names in a checkpoint are somebody else's, of any length and any characters."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from dist_ckpt.core.format.index.model_description import leaves_of
from dist_ckpt.core.format.strict_json import Json

# Of longer texts the middle is left out: a page stays small whatever is in a checkpoint.
MAX_CHARS = 300
# So many lines of a configuration, or of anything else that is listed.
MAX_ROWS = 300


def bounded(text: str) -> str:
    """Return a text on one line, without what steers a reader's eye, and not too long."""
    if len(text) > MAX_CHARS:
        half = MAX_CHARS // 2
        text = f"{text[:half]} ... {len(text) - 2 * half} characters ... {text[-half:]}"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def named_values(values: Mapping[str, object]) -> tuple[list[Json], int]:
    """Return the values in nested mappings as pairs of texts, and how many more there are."""
    pairs: list[Json] = [
        [bounded(name), bounded(value)] for name, value in leaves_of(values) if name
    ]
    return pairs[:MAX_ROWS], max(len(pairs) - MAX_ROWS, 0)


def first_of(rows: Iterable[Json]) -> tuple[list[Json], int]:
    """Return the first rows, and how many more there are."""
    every = list(rows)
    return every[:MAX_ROWS], max(len(every) - MAX_ROWS, 0)


def utc(at: float) -> str:
    """Return a time in UTC, to the second."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))
