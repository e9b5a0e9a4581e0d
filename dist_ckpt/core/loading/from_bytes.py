"""`dc.from_bytes`, `dc.load_bytes`: load the bytes of a state like a checkpoint in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from mmap import mmap
from typing import Any

from dist_ckpt.core.comm.process_group import single_process_session
from dist_ckpt.core.format import filenames
from dist_ckpt.core.format.checksums import Buffer
from dist_ckpt.core.format.state_bytes import ATTEMPT, COMPONENT, LABEL, decode_documents
from dist_ckpt.core.format.strict_json import corrupt_error
from dist_ckpt.core.loading.load import load_together
from dist_ckpt.core.loading.load_options import LoadOptions
from dist_ckpt.core.planning.name_selection import Cast, Resize
from dist_ckpt.core.state.binding.sources.rename import RenameRules
from dist_ckpt.core.state.tree.containers import MutableState
from dist_ckpt.core.storage import ReadableFile
from dist_ckpt.core.storage.overlay_storage import BytesFile, ReadOnlyStorage
from dist_ckpt.errors import IncompatibleError
from dist_ckpt.message_text import names_around_remedy
from dist_ckpt.reports import LoadReport

# The path of the checkpoint in messages.
_PATH = "/bytes"
_FOLDER = f"{_PATH}/{ATTEMPT}"


def from_bytes(data: Buffer | mmap) -> dict[Any, Any]:
    """Return the state of bytes from `dc.to_bytes`, as plain containers.

    Tensors are new, in host memory; tied tensors stay tied, and numpy arrays stay numpy arrays. A
    module becomes its state dict, an optimizer its state dict with parameters by name. A `PerRank`
    stays one. `data` is bytes or a buffer such as an mmap, and may be closed or changed afterwards.
    It may come from an untrusted source: nothing in it is executed, and its size bounds time and
    memory. Every byte is checked: CorruptError for damaged data, IncompatibleError for another
    format or a newer version.
    """
    state: dict[Any, Any] = {}
    report = load_bytes(state, data)
    if report.dropped:
        text, rest = names_around_remedy(report.dropped)
        raise IncompatibleError(
            f"{text}: saved under a separate key: use load_bytes, with a "
            f"dist_ckpt.PerRank of that key in its place{rest}"
        )
    return state


def load_bytes(  # noqa: PLR0913 - the options of `dc.load`
    state: MutableState,
    data: Buffer | mmap,
    *,
    strict: bool = True,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    rename: RenameRules | None = None,
    cast: Cast = None,
    dequantize: bool = False,
    resize: Resize | None = None,
) -> LoadReport:
    """Fill a state from bytes of `dc.to_bytes`, as `dc.load` does.

    Modules, optimizers and tensors are filled in place, in any layout. Not collective: each rank
    calls it alone, and takes its part of a DTensor. Options and errors are those of `dc.load`.
    Everything but the tensor data is checked before the state changes. `data` is as for
    `dc.from_bytes`.
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
        dequantize=dequantize,
        resize=resize,
        read_once="off",
        record_check=False,
    )
    with view:
        return load_together(
            single_process_session(), state, _PATH, options, _checkpoint_files(view)
        )


def _checkpoint_files(view: memoryview) -> ReadOnlyStorage:
    documents, start = decode_documents(view)
    files: dict[str, Callable[[], ReadableFile]] = {
        name: partial(BytesFile, data) for name, data in documents.objects.items()
    }
    files[filenames.INDEX] = partial(BytesFile, documents.index)
    if documents.header:
        name = filenames.shard_file(COMPONENT, 0)
        files[name] = partial(BytesFile, documents.header, view[start:])
    elif start < len(view):
        raise corrupt_error(LABEL, "data, but no tensors")
    remedy = "the bytes of a state are only read: save to a folder"
    return ReadOnlyStorage(_FOLDER, files, remedy)
