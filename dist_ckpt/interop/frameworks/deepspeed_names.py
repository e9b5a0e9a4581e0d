"""Which files of a folder of DeepSpeed's hold what of which rank."""

from __future__ import annotations

import re

from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import CorruptError, IncompatibleError, NotFoundError
from dist_ckpt.interop.torch_save.read import is_file, whole_file

LATEST = "latest"

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_PARTITION = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")

_UNIVERSAL = (
    "convert it with DeepSpeed (zero_to_fp32.py for the weights, ds_to_universal.py), or save it "
    "with data parallelism alone"
)


def is_folder(storage: Storage, path: str) -> bool:
    """Say whether a path is a folder of `save_checkpoint`, or has some, one of them the latest."""
    try:
        return any(
            _MODEL.fullmatch(entry.name) or _PARTITION.fullmatch(entry.name)
            for entry in storage.list(latest(storage, path))
        )
    except (OSError, NotFoundError, CorruptError):
        return False


def latest(storage: Storage, path: str) -> str:
    """Return the folder of the newest save if a path is that of a run, else the path."""
    if not is_file(storage, f"{path}/{LATEST}"):
        return path
    name = whole_file(storage, f"{path}/{LATEST}", 4096).decode("utf-8", "replace").strip()
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise CorruptError(f"{path}/{LATEST} names no folder beside it; give the folder itself")
    return f"{path}/{name}"


def files_of(storage: Storage, folder: str) -> tuple[list[str], list[str]]:
    """Return the files of the model and those of the partitions, by rank."""
    try:
        names = [entry.name for entry in storage.list(folder)]
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError(f"{folder}: there is no such folder; check the path") from None
    if other := next((n for n in names if re.match(r"layer_\d+|.*expert_\d+", n)), None):
        raise IncompatibleError(
            f"{folder}/{other} is of pipeline stages or experts, which are not read: {_UNIVERSAL}"
        )
    found: list[list[str]] = []
    for pattern in (_MODEL, _PARTITION):
        of_ranks: dict[int, str] = {}
        for match in filter(None, map(pattern.fullmatch, names)):
            if int(match[2]):
                raise IncompatibleError(
                    f"{folder}/{match[0]} is of tensor parallelism, which is not read: {_UNIVERSAL}"
                )
            of_ranks[int(match[1] or 0)] = match[0]
        if lacking := sorted({*range(len(of_ranks))} - of_ranks.keys()):
            raise NotFoundError(f"{folder} lacks the file of rank {lacking[0]}: copy it there")
        found.append([of_ranks[rank] for rank in sorted(of_ranks)])
    if not found[0]:
        raise NotFoundError(
            f"{folder} has no file such as mp_rank_00_model_states.pt, so it is no checkpoint of "
            f"DeepSpeed; check the path"
        )
    return found[0], found[1]
