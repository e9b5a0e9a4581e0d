"""Open files of another system as a checkpoint when the caller names the system."""

from __future__ import annotations

import os

from dist_ckpt.core.storage import Storage, open_storage
from dist_ckpt.errors import IncompatibleError, NotFoundError
from dist_ckpt.interop.readers.nested_state import ALL, ImportFilter
from dist_ckpt.interop.readers.virtual_checkpoint import checkpoint_of
from dist_ckpt.interop.registry import FORMATS, HF_FILE, HF_INDEX, foreign_at, reader_module


def open_pickled(
    kind: str, path: str | os.PathLike[str], interest: ImportFilter = ALL
) -> tuple[Storage, str]:
    """Return a storage that presents the files of a format as a checkpoint, and its path."""
    storage, text = open_storage(path)
    foreign_format = FORMATS[kind]
    state = reader_module(foreign_format.reader).read(storage, text, interest)
    return checkpoint_of(storage, text, state, foreign_format.name), text


def open_safetensors(path: str | os.PathLike[str]) -> tuple[Storage, str]:
    """Return a storage that presents safetensors files as a checkpoint, and its path."""
    storage, text = open_storage(path)
    if (files := foreign_at(storage, text)) is None:
        if not os.path.exists(text):
            raise NotFoundError(f"{text}: there is no such file or folder; check the path")
        raise IncompatibleError(
            f"{text} is no safetensors file, and no folder of them with "
            f"{HF_INDEX} or {HF_FILE}; check the path"
        )
    return files, text
