"""`dc.from_bytes` and `dc.load_bytes`: a state out of what `dc.to_bytes` has returned.

The bytes are taken apart into the files of a small checkpoint, and those are loaded as any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from mmap import mmap
from typing import Any

from dist_ckpt.comm.process_group import session_alone
from dist_ckpt.errors import IncompatibleError, StorageError, listed
from dist_ckpt.format import filenames
from dist_ckpt.format.checksums import Buffer
from dist_ckpt.format.strict_json import corrupt
from dist_ckpt.loading.load import load_together
from dist_ckpt.loading.options import LoadOptions
from dist_ckpt.planning.selection import Cast
from dist_ckpt.reports import LoadReport
from dist_ckpt.shard_io import state_bytes
from dist_ckpt.state.containers import MutableState
from dist_ckpt.storage.protocol import Entry, ReadableFile, WritableFile

# Where the files seem to lie.
_PATH = "/bytes"
_FOLDER = f"{_PATH}/{state_bytes.ATTEMPT}"
_SHARDS = f"{_FOLDER}/{filenames.shard_file(state_bytes.STEM, 0)}"


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
        return load_together(session_alone(), state, _PATH, options, _files_in(view))


def _files_in(view: memoryview) -> _FilesInBytes:
    documents, start = state_bytes.decode(view)
    objects = {f"{_FOLDER}/{name}": (data, b"") for name, data in documents.objects.items()}
    files: dict[str, tuple[bytes, Buffer]] = {
        **objects,
        f"{_FOLDER}/{filenames.INDEX}": (documents.index, b""),
    }
    if documents.header:
        files[_SHARDS] = documents.header, view[start:]
    elif start < len(view):
        raise corrupt(state_bytes.WHAT, "data, but no tensors")
    return _FilesInBytes(files)


class _FilesInBytes:
    """The files of one checkpoint, in memory, as a `Storage` that nothing is written to.

    Each is some bytes and, behind them, others.
    """

    def __init__(self, files: Mapping[str, tuple[bytes, Buffer]]) -> None:
        self._files = files

    def list(self, folder: str, *, follow: bool = True) -> Sequence[Entry]:
        """See `Storage.list`."""
        del follow
        if folder == _PATH:
            return [Entry(state_bytes.ATTEMPT, "folder", 0, 0.0)]
        if folder != _FOLDER:
            raise FileNotFoundError(folder)
        files = {path: self.open(path).nbytes for path in sorted(self._files)}
        return [Entry(path.rpartition("/")[2], "file", files[path], 0.0) for path in files]

    def open(self, path: str) -> ReadableFile:
        """See `Storage.open`."""
        if path not in self._files:
            raise FileNotFoundError(path)
        return _FileInBytes(*self._files[path])

    def make_folder(self, folder: str) -> None:
        """Refuse."""
        raise _read_only(folder)

    def create(self, path: str, nbytes: int) -> WritableFile:
        """Refuse."""
        raise _read_only(path)

    def link(self, old: str, new: str) -> None:
        """Refuse."""
        raise _read_only(old)

    def rename(self, old: str, new: str) -> None:
        """Refuse."""
        raise _read_only(old)

    def remove(self, path: str) -> None:
        """Refuse."""
        raise _read_only(path)

    def sync(self, folder: str) -> None:
        """Refuse."""
        raise _read_only(folder)


def _read_only(path: str) -> StorageError:
    return StorageError(f"{path}: the bytes of a state are only read: save to a folder")


class _FileInBytes:
    """A file that is open; what is read of it is copied."""

    def __init__(self, first: bytes, rest: Buffer) -> None:
        self._first = first
        self._rest = memoryview(rest)

    @property
    def nbytes(self) -> int:
        return len(self._first) + len(self._rest)

    @property
    def num_links(self) -> int:
        return 1

    def read_into(self, offset: int, target: memoryview) -> int:
        done = 0
        for part in (memoryview(self._first), self._rest):
            start = min(max(offset + done, 0), len(part))
            count = min(len(target) - done, len(part) - start)
            target[done : done + count] = part[start : start + count]
            done += count
            offset -= len(part)
        return done

    def close(self) -> None:
        self._rest.release()
