"""The folders that accelerate names by number, and how many of them stay."""

from __future__ import annotations

import logging
import os
import re
from typing import Any

from dist_ckpt.errors import CheckpointError
from dist_ckpt.runs.retention.deletion import delete

_log = logging.getLogger("dist_ckpt")

# What accelerate's own folders have.
_OWN_FILES = re.compile(r"(model|optimizer|pytorch_model).*|random_states_\d+\.pkl")


def count_save(project: Any) -> None:
    """Count a save, as accelerate does: the next folder's number."""
    project.__dict__["iteration"] += 1


def make_room(accelerator: Any, folder: str) -> None:
    """Delete the oldest checkpoints above the project's limit, now that there is a newer one.

    What accelerate has written stays, and what is pinned: no save fails for what is not removed.
    """
    limit = accelerator.project_configuration.total_limit
    if limit is None or not accelerator.is_main_process:
        return
    ours = [path for path in numbered(folder) if not is_accelerates(path)]
    for path in ours[: -max(limit, 1)]:
        try:
            delete(path)
        except CheckpointError as error:
            _log.warning("%s stays, above total_limit=%d: %s", path, limit, error)


def is_accelerates(path: str) -> bool:
    """Say whether accelerate has written a folder, and nothing of ours is in it."""
    names = os.listdir(path) if os.path.isdir(path) else []
    is_ours = any(re.match(r"a\d+-", name) for name in names)
    return not is_ours and any(_OWN_FILES.fullmatch(name) for name in names)


def numbered(folder: str) -> list[str]:
    """Return the checkpoints that accelerate has named, oldest first."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    found = [name for name in names if re.fullmatch(r"checkpoint_\d+", name)]
    return [os.path.join(folder, one) for one in sorted(found, key=lambda one: int(one[11:]))]
