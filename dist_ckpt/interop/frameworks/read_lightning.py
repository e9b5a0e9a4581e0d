"""Read checkpoints of Lightning: a file of torch.save, or a DCP folder with a `meta.pt`.

The module is `model`, the first optimizer `optim`, the next `optim_1`. Everything else keeps its
name. The contents are those of `dump_checkpoint` in lightning/pytorch/trainer/connectors, and of
`save_checkpoint` of the FSDP and ModelParallel strategies.
"""

from __future__ import annotations

from contextlib import suppress

from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import CheckpointError, IncompatibleError
from dist_ckpt.interop.dcp import read as dcp_files
from dist_ckpt.interop.readers.nested_state import ImportFilter, NestedState, Path, numbered_name
from dist_ckpt.interop.readers.virtual_checkpoint import ForeignState
from dist_ckpt.interop.registry import LIGHTNING_META, is_file
from dist_ckpt.interop.torch_save.read import open_archive, read_dict

VERSION = "pytorch-lightning_version"


def read(storage: Storage, path: str, import_filter: ImportFilter) -> ForeignState:
    """Return the state in a checkpoint, with its step.

    CorruptError, IncompatibleError for other files, or values that cannot be stored.
    """
    nested = NestedState(path, import_filter)
    is_folder = is_file(storage, f"{path}/{LIGHTNING_META}")
    with open_archive(storage, f"{path}/{LIGHTNING_META}" if is_folder else path) as archive:
        state = read_dict(archive)
        if VERSION not in state:
            raise IncompatibleError(
                f"{archive.label} has no {VERSION!r}, so Lightning has not saved it: import it as "
                f"a file of torch.save (--from torch)"
            )
        if is_folder:
            dcp_files.add_folder(nested, storage, path, _new_path)
        for key, value in state.items():
            if key == "state_dict":
                nested.add(("model",), value, archive)
            elif key == "optimizer_states":
                for number, optimizer in enumerate(value if isinstance(value, list) else [value]):
                    nested.add_optimizer(
                        (numbered_name("optim", number),), optimizer, "model", archive
                    )
            else:
                nested.add((str(key),), value, archive)
    return nested.state(state.get("global_step"))


def detect_format(storage: Storage, path: str) -> str:
    """Return "lightning" for a file of torch.save that Lightning has saved, else "torch"."""
    with suppress(CheckpointError), open_archive(storage, path) as archive:
        if VERSION in read_dict(archive):
            return "lightning"
    return "torch"


def _new_path(path: Path) -> Path:
    top, *rest = path
    number = str(top).removeprefix("optimizer_")
    if number.isdigit() and str(top) == f"optimizer_{number}":
        return (numbered_name("optim", int(number)), *rest)
    return ("model", *rest) if top == "state_dict" else path
