"""Read folders of Megatron's dist checkpointing in the format torch_dist: DCP, and `common.pt`.

Tensors keep the names of their sharded tensors, below `model`, or below `optim` if the name begins
with "optimizer". Layers of equal shape are one tensor, whose first dimension is the layer. Objects
are below `objects`. Values that are the same on all ranks, such as "iteration", keep their names.
The names are in megatron/core/dist_checkpointing.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from math import prod

from dist_ckpt.core.format import strict_json
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import CheckpointError, CorruptError, IncompatibleError, NotFoundError
from dist_ckpt.interop.dcp import read as dcp_files
from dist_ckpt.interop.readers.nested_state import ImportFilter, NestedState, Path, join_path
from dist_ckpt.interop.readers.restricted_pickle import PickledRecord, quote, record_factory
from dist_ckpt.interop.readers.torch_pickles import TORCH_NAMES, TensorView
from dist_ckpt.interop.readers.virtual_checkpoint import ForeignState
from dist_ckpt.interop.registry import (
    MEGATRON_ABOUT,
    MEGATRON_COMMON,
    MEGATRON_LATEST,
    MEGATRON_LATEST_STATE,
    MEGATRON_STEP,
    is_file,
    read_bytes,
)
from dist_ckpt.interop.torch_save.read import open_archive, read_dict
from dist_ckpt.message_text import listed

_log = logging.getLogger("dist_ckpt")

_MAX_TEXT_NBYTES = 1 << 20
_MEGATRON_NAMES = {**TORCH_NAMES, "argparse Namespace": record_factory("Namespace")}

# The name of a buffer of the distributed optimizer, which concatenates parameters.
_OPTIMIZER_BUFFER = re.compile(r"\.(dp_group_idx|gbuf_idx|bucket_idx)_\d+\.|\.per_bucket_")


def read(storage: Storage, path: str, import_filter: ImportFilter) -> ForeignState:
    """Return the state in a folder, with its iteration. For a run's folder, this is the latest.

    CorruptError, IncompatibleError for damaged files, or values that cannot be stored.
    """
    folder = find_latest(storage, path)
    _check_format(storage, folder)
    nested = NestedState(folder, import_filter)
    # `keep_unknown`: the metadata also has the plans of all ranks.
    dcp_files.add_folder(nested, storage, folder, _new_path, keep_unknown=True)
    if buffer := next((name for name in nested.tensors if _OPTIMIZER_BUFFER.search(name)), None):
        raise IncompatibleError(
            f"{folder}: {buffer} is a buffer of the distributed optimizer, whose layout depends on "
            f"the ranks. Save with --dist-ckpt-optim-fully-reshardable, or leave the optimizer out "
            f"(exclude='optim', on the command line --exclude optim)"
        )
    with open_archive(storage, f"{folder}/{MEGATRON_COMMON}", _MEGATRON_NAMES) as archive:
        common = read_dict(archive)
        for key, value in common.items():
            plain = value.fields if isinstance(value, PickledRecord) else value
            nested.add((str(key),), plain, archive)
    return nested.state(common.get("iteration"))


def find_latest(storage: Storage, path: str) -> str:
    """Return the folder of the latest iteration if a path is that of a run, else the path.

    The latest is that of the tracker, as Megatron resumes. A complete newer one is logged. Without
    a tracker, NotFoundError lists the iterations.
    """
    names = _list_step_folders(storage, path)
    complete = [name for name in names if is_file(storage, f"{path}/{name}/{MEGATRON_ABOUT}")]
    folder = _read_tracker(storage, path)
    if folder is None:
        if names and not is_file(storage, f"{path}/{MEGATRON_ABOUT}"):
            raise NotFoundError(
                f"{path} has no {MEGATRON_LATEST} that names the latest iteration: give the folder "
                f"of one, such as {path}/{(complete or names)[-1]}. {_describe(complete)}"
            )
        return path
    if folder != "release" and not MEGATRON_STEP.fullmatch(folder):
        raise NotFoundError(
            f"{path}: its tracker names {quote(folder)}, and not an iteration: give the folder of "
            f"one. {_describe(complete)}"
        )
    if folder not in names and folder != "release":
        raise NotFoundError(
            f"{path}/{folder}: the folder that the tracker names does not exist: give the folder "
            f"of another iteration. {_describe(complete)}"
        )
    newer = [name for name in complete if _step_number(name) > _step_number(folder)]
    if newer and folder != "release":
        _log.warning(
            "%s: %s is imported, which the tracker names, but %s is complete and newer: to import "
            "it, give %s/%s",
            *(path, folder, newer[-1], path, newer[-1]),
        )
    return f"{path}/{folder}"


def _read_tracker(storage: Storage, path: str) -> str | None:
    """Return the name of the folder that a tracker names; None if a folder has no tracker."""
    if is_file(storage, f"{path}/{MEGATRON_LATEST}"):
        text = read_bytes(storage, f"{path}/{MEGATRON_LATEST}", _MAX_TEXT_NBYTES)
        name = text.decode("utf-8", "replace").strip()
        return f"iter_{name:0>7}" if name.isdecimal() and name.isascii() else name
    if not is_file(storage, f"{path}/{MEGATRON_LATEST_STATE}"):
        return None
    with open_archive(storage, f"{path}/{MEGATRON_LATEST_STATE}") as archive:
        step = read_dict(archive).get("step")
        if isinstance(step, TensorView):
            if step.dtype not in ("int32", "int64") or prod(step.shape) != 1:
                raise CorruptError(f"{archive.label}: its step is not an integer; use another file")
            step = int.from_bytes(archive.read_tensor(step, "step"), "little", signed=True)
    return f"iter_{step:07}" if type(step) is int and step >= 0 else str(step)


def _list_step_folders(storage: Storage, path: str) -> list[str]:
    """Return the names of the folders of iterations, in ascending order."""
    try:
        names = [entry.name for entry in storage.list(path)]
    except (FileNotFoundError, NotADirectoryError, CheckpointError):
        return []
    return sorted((name for name in names if MEGATRON_STEP.fullmatch(name)), key=_step_number)


def _step_number(folder: str) -> int:
    return int(folder.removeprefix("iter_")) if folder != "release" else 0


def _describe(complete: Sequence[str]) -> str:
    return f"Complete iterations: {listed(complete[::-1]) if complete else 'none'}"


def _check_format(storage: Storage, folder: str) -> None:
    try:
        text = read_bytes(storage, f"{folder}/{MEGATRON_ABOUT}", _MAX_TEXT_NBYTES)
    except NotFoundError:
        raise NotFoundError(
            f"{folder}/{MEGATRON_ABOUT}: the file does not exist, so {folder} is not a checkpoint "
            f"of Megatron's dist checkpointing; check the path"
        ) from None
    about = strict_json.parse(text, f"{folder}/{MEGATRON_ABOUT}")
    backend = about.get("sharded_backend") if isinstance(about, dict) else None
    if backend != "torch_dist":
        raise IncompatibleError(
            f"{folder} has the format {strict_json.quote(backend)}, but only torch_dist is "
            f"supported: convert it with Megatron (--ckpt-convert-format torch_dist)"
        )


def _new_path(path: Path) -> Path:
    name = join_path(path)
    if re.search(r"/shard_\d+(\.\d+)*_\d+(\.\d+)*$", name):
        return ("objects", name)
    if name.startswith(("optimizer.", "chained_")):
        return ("optim", name.removeprefix("optimizer."))
    return ("model", name)
