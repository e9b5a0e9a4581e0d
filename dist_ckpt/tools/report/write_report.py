"""Make a report of a checkpoint or a run: its facts, and the page with them in a file."""

from __future__ import annotations

import os
import time
from typing import Any

from dist_ckpt import __version__
from dist_ckpt.core.commit.new_files import check_new_file, new_file
from dist_ckpt.core.format.strict_json import Json
from dist_ckpt.core.storage import open_storage
from dist_ckpt.errors import NotFoundError
from dist_ckpt.runs.listing import RunCheckpoint, checkpoints
from dist_ckpt.runs.selectors import resolve
from dist_ckpt.tools.report.checkpoint_facts import checkpoint_facts
from dist_ckpt.tools.report.damage import CHECKS, Check
from dist_ckpt.tools.report.page import START, libraries, page_of
from dist_ckpt.tools.report.run_facts import ProgressOf, run_facts

__all__ = ["report_facts", "write_report"]


def report_facts(
    path: str | os.PathLike[str],
    *,
    check: Check = "quick",
    progress_of: ProgressOf = lambda _: None,
) -> dict[str, Any]:
    """Return what there is to say of the checkpoint at `path`, or of the run in that folder.

    It is JSON, `about` a "checkpoint" or a "run"; its size is bounded, however much is saved there.
    `check` says how damage is looked for: "none", "quick" or "full", as `dist_ckpt.verify` does.
    A damaged checkpoint is told of, and no error. Raises NotFoundError if nothing is there. One
    process calls it, without torch; nothing is changed, but that a full check of a run's checkpoint
    that finds nothing wrong is put down in the run.
    """
    if check not in CHECKS:
        raise ValueError(f'check={check!r}: give "none", "quick" or "full"')
    place = os.fspath(resolve(path))
    facts = _facts(place, check, progress_of)
    return {"path": place, "made_at": time.time(), "made_by": __version__, **facts}


def _facts(place: str, check: Check, progress_of: ProgressOf) -> dict[str, Json]:
    found = _listed(place)
    if found is None:
        return checkpoint_facts(place, None, check, progress_of("verify"))
    if len(found) == 1 and found[0].path == open_storage(place)[1]:
        return checkpoint_facts(place, found[0], check, progress_of("verify"))
    return run_facts(place, check, progress_of)


def _listed(place: str) -> tuple[RunCheckpoint, ...] | None:
    """Return the checkpoints at a place; None if there are files of another system instead."""
    try:
        found = checkpoints(place)
    except NotFoundError:
        if os.path.isfile(place):
            return None
        raise
    return found or (None if _is_foreign(place) else ())


def _is_foreign(place: str) -> bool:
    names = os.listdir(place)
    return any(name.endswith(".safetensors") for name in names) or ".metadata" in names


def write_report(
    path: str | os.PathLike[str],
    file: str | os.PathLike[str],
    *,
    check: Check = "quick",
    overwrite: bool = False,
    progress_of: ProgressOf = lambda _: None,
) -> dict[str, Any]:
    """Write the page about what `path` holds into `file`; return the facts that it is made of.

    See `report_facts`. The page is one file of some 5 MB that loads nothing from anywhere. On
    return it is durable; until it is whole, what was there stays. A file that is no report of ours
    is replaced only with `overwrite`: ExistsError; a folder or a link never is: ValueError.
    ModuleNotFoundError, with what to install, without the extra `report`.
    """
    # Before what may take hours.
    replaces = check_target(file, overwrite=overwrite)
    libraries()
    facts = report_facts(path, check=check, progress_of=progress_of)
    page = page_of(facts)
    with new_file(file, overwrite=replaces) as target:
        target.write(page)
    return facts


def check_target(file: str | os.PathLike[str], *, overwrite: bool) -> bool:
    """Say whether a page replaces what is at `file`. ValueError for a folder or a link.

    ExistsError for another file without `overwrite`, NotFoundError without a folder for it.
    """
    text = os.fspath(file)
    if os.path.islink(text) or (os.path.exists(text) and not os.path.isfile(text)):
        kind = "link" if os.path.islink(text) else "folder" if os.path.isdir(text) else "device"
        raise ValueError(f"{text} is a {kind}: give the name of a file, such as report.html")
    replaces = overwrite or _is_ours(text)
    check_new_file(text, overwrite=replaces)
    return replaces


def _is_ours(file: str) -> bool:
    try:
        with open(file, "rb") as there:
            return there.read(len(START)) == START
    except FileNotFoundError:
        return False
