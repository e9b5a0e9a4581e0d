"""The folders that accelerate names by number, and how many of them stay."""

from __future__ import annotations

import os
import re
from typing import Any

from dist_ckpt.runs.removing import delete


def count_save(project: Any) -> None:
    """Count a save, as accelerate does: the next folder's number."""
    project.__dict__["iteration"] += 1


def make_room(accelerator: Any, folder: str) -> None:
    """Delete the oldest checkpoints above the project's limit, now that there is a newer one."""
    limit = accelerator.project_configuration.total_limit
    if limit is not None and accelerator.is_main_process:
        for path in numbered(folder)[:-limit]:
            delete(path)


def numbered(folder: str) -> list[str]:
    """Return the checkpoints that accelerate has named, oldest first."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    found = [name for name in names if re.fullmatch(r"checkpoint_\d+", name)]
    return [os.path.join(folder, one) for one in sorted(found, key=lambda one: int(one[11:]))]
