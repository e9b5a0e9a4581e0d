"""`dc.from_bytes` and `dc.load_bytes`: a state out of what `dc.to_bytes` has returned.

The bytes are taken apart into the files of a small checkpoint, and those are loaded as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from mmap import mmap
from typing import Any

from dist_ckpt.core.comm.process_group import single_process_session
from dist_ckpt.core.format import filenames
from dist_ckpt.core.format.checksums import Buffer
from dist_ckpt.core.format.strict_json import corrupt_error
from dist_ckpt.core.loading.load import load_together
from dist_ckpt.core.loading.load_options import LoadOptions
from dist_ckpt.core.planning.selection import Cast
from dist_ckpt.core.shard_io.write import state_bytes
from dist_ckpt.core.state.tree.containers import MutableState
from dist_ckpt.core.storage import ReadableFile
from dist_ckpt.core.storage.wrappers.read_only import FileOfBytes, ReadOnlyFiles
from dist_ckpt.errors import IncompatibleError, listed
from dist_ckpt.reports import LoadReport

# Where the files seem to lie.
_PATH = "/bytes"
_FOLDER = f"{_PATH}/{state_bytes.ATTEMPT}"


def from_bytes(data: Buffer | mmap) -> dict[Any, Any]:
    """Return the state in the bytes that `dc.to_bytes` has returned, as plain containers.

    Tensors are new ones in host memory, tied ones still tied, and what was a numpy array is one. Of
    a module it is the state dict, of an optimizer that with parameters by their names, and a
    `PerRank` is one again. `data` is bytes or anything like it, such as an mmap, and may go or
    change afterwards. Nothing in it is executed, and time and memory are bounded by its size: it
    may come from anybody. Every byte is checked: CorruptError for what is damaged,
    IncompatibleError for what is not ours, or newer.
    """
    state: dict[Any, Any] = {}
    report = load_bytes(state, data)
    if report.dropped:
        raise IncompatibleError(
            f"{listed(report.dropped)}: saved under a key of its own: use load_bytes, with a "
            "dist_ckpt.PerRank of that key in its place"
        )
    return state


def load_bytes(  # noqa: PLR0913 - the options of `dc.load`
    state: MutableState,
    data: Buffer | mmap,
    *,
    strict: bool = True,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    rename: Mapping[str, str | None] | None = None,
    cast: Cast = None,
) -> LoadReport:
    """Fill a state from the bytes that `dc.to_bytes` has returned, as `dc.load` does.

    Modules, optimizers and tensors are filled in place, in whatever layout; in a job each rank
    does it for itself, and takes of a DTensor what it holds. The options are those of `dc.load`,
    and so are the errors: until all has been checked but the tensors' data nothing is touched.
    `data` is as for `dc.from_bytes`.
    """
    try:
        view = memoryview(data).cast("B")
    except TypeError:
        raise TypeError(
            f"data is a {type(data).__name__}: give contiguous bytes, as to_bytes returns them"
        ) from None
    options = LoadOptions(
        strict=strict,
        include=include,
        exclude=exclude,
        rename=rename,
        cast=cast,
        read_once="off",
        notes=False,
    )
    with view:
        return load_together(single_process_session(), state, _PATH, options, _files_in(view))


def _files_in(view: memoryview) -> ReadOnlyFiles:
    documents, start = state_bytes.decode(view)
    files: dict[str, Callable[[], ReadableFile]] = {
        name: partial(FileOfBytes, data) for name, data in documents.objects.items()
    }
    files[filenames.INDEX] = partial(FileOfBytes, documents.index)
    if documents.header:
        name = filenames.shard_file(state_bytes.STEM, 0)
        files[name] = partial(FileOfBytes, documents.header, view[start:])
    elif start < len(view):
        raise corrupt_error(state_bytes.LABEL, "data, but no tensors")
    remedy = "the bytes of a state are only read: save to a folder"
    return ReadOnlyFiles(_FOLDER, files, remedy)
