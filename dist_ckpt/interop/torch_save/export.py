"""A checkpoint as one file that `torch.load` reads, also with `weights_only=True`.

    torch_export.export_file("runs/a@latest", "model.pt", only="model")
    model.load_state_dict(torch.load("model.pt"))

The other way needs no function: `dist_ckpt.interop.dcp.load` reads such a file where it lies.
"""

from __future__ import annotations

import logging
import os
import struct
import zipfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import IO

from dist_ckpt.core.commit import attempts
from dist_ckpt.core.format import filenames
from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.objects.objects_file import ObjectsFile
from dist_ckpt.core.planning.selection import Selection, selection_of
from dist_ckpt.core.shard_io.read.open_files import read_objects
from dist_ckpt.core.state.binding.sources.saved_tree import saved_tree_of
from dist_ckpt.core.state.tensors.plain_torch import make
from dist_ckpt.core.storage import real_path
from dist_ckpt.errors import listed
from dist_ckpt.interop.hf.export_files import ExportReader
from dist_ckpt.interop.hf.export_plan import ExportContents, ExportedFile
from dist_ckpt.interop.hf.read import SUFFIX
from dist_ckpt.interop.registry import open_source
from dist_ckpt.interop.torch_save.export_state import pickled, torch_state
from dist_ckpt.interop.writers.local_files import check_new_file, check_outside, new_file
from dist_ckpt.reports import CopyProgress, Progress
from dist_ckpt.runs.selectors import resolve
from dist_ckpt.tools.rewrite.dry_run import DryRun

__all__ = ["export_file"]

_log = logging.getLogger("dist_ckpt")

# What torch.save calls the folder in an archive that it writes to no path.
_FOLDER = "archive"

# Torch writes tensors at such offsets, so that they can be mapped into memory.
_ALIGNMENT = 64

# Before a record's name; after it, what zipfile puts there for records of any size; and how what
# fills the place up begins: its two letters, as torch has them, and its size.
_HEADER_NBYTES, _ZIP64_NBYTES, _PADDING = 30, 20, struct.Struct("<2sH")


def export_file(  # noqa: PLR0913 - a front door
    source: str | os.PathLike[str],
    file: str | os.PathLike[str],
    *,
    only: str | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> int:
    """Write the checkpoint at `source` as a file for `torch.load`; return its size in bytes.

    `source` is what `dc.open` takes, such as "runs/a@latest"; however it was sharded, tensors are
    whole, on the CPU, and those that are tied share a storage. It is the state that was saved:
    containers and values as they were, but for numpy arrays, which are tensors. Parameters of an
    optimizer that `dc.save` has named go by the names that they have in their model, as torch's
    `get_optimizer_state_dict` has it, which the optimizer's `load_state_dict` takes as well. `only`
    is the component, or a container within one, that is written instead of all. `include` and
    `exclude` are globs on names in the checkpoint.

    One process does it, with some tens of MiB however large the tensors are; every block that is
    read is checked. `progress` is called with the bytes done, and those in all.

    On return the file is durable; until then it has another name, and if this raises there is none.
    Of values that `torch.load` takes with `weights_only=False` alone a warning is logged. Raises
    IncompatibleError for what such a file cannot hold, with all names: values of each rank,
    quantized tensors, integers of less than a byte, and lists out of whose midst something is left
    out. ValueError for a name that torch.load would take for another format (.safetensors).
    ExistsError without `overwrite` if something is there; otherwise what `dc.open` and reading
    raise.
    """
    selection = selection_of(include, exclude)
    with _planned(source, file, only, selection, overwrite=overwrite) as plan:
        if plan.not_plain:
            _log.warning(
                "%s: torch.load needs weights_only=False for %s", file, listed(plan.not_plain)
            )
        tell = CopyProgress(plan.data_nbytes, progress)
        with new_file(file, overwrite=overwrite, nbytes=plan.nbytes) as out:
            with zipfile.ZipFile(out, "w") as archive:
                _put(archive, "data.pkl", plan.pickled)
                _put(archive, "byteorder", b"little")
                _put_tensors(archive, plan, tell)
                _put(archive, "version", b"3\n")
            return out.nbytes


def would_export_file(
    source: str | os.PathLike[str],
    file: str | os.PathLike[str],
    *,
    only: str | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    overwrite: bool = False,
) -> DryRun:
    """Return what `export_file` would write. Nothing is changed. Raises what it does before.

    The size is the least: what lies around each tensor in the archive is not counted.
    """
    selection = selection_of(include, exclude)
    with _planned(source, file, only, selection, overwrite=overwrite) as plan:
        nbytes = plan.nbytes
    where = check_new_file(file, overwrite=overwrite)
    return DryRun(where, {os.path.basename(where): nbytes}, (where,) * os.path.lexists(where))


@dataclass(frozen=True, slots=True)
class _ArchivePlan:
    """What is read, and written: `tensors` are the records of data, in their order."""

    reader: ExportReader
    pickled: bytes
    tensors: Sequence[ExportContents]
    not_plain: Sequence[str]

    @property
    def data_nbytes(self) -> int:
        return sum(one.nbytes for one in self.tensors)

    @property
    def nbytes(self) -> int:
        """What the archive has at least: not what lies around each record."""
        return len(self.pickled) + self.data_nbytes


@contextmanager
def _planned(
    source: str | os.PathLike[str],
    file: str | os.PathLike[str],
    only: str | None,
    selection: Selection,
    *,
    overwrite: bool,
) -> Iterator[_ArchivePlan]:
    """Check all that can be before anything is written."""
    if only is not None and (not isinstance(only, str) or not only):
        raise ValueError(f"only={only!r}: give the name of a component, or None for all")
    if os.fspath(file).endswith(SUFFIX):
        raise ValueError(f"torch.load reads files named *{SUFFIX} as such: choose another name")
    storage, path = open_source(resolve(source))
    check_outside(real_path(path), real_path(check_new_file(file, overwrite=overwrite)))
    attempt, index = attempts.find(storage, path)
    folder = f"{path}/{attempt.name}"
    with attempts.not_found_if_removed(storage, path, attempt):
        records = {record.name: record for record in index.objects}

        def read(name: str) -> ObjectsFile:
            if name not in records:
                return ObjectsFile()
            return read_objects(storage, folder, records[name], make=make)

        saved = saved_tree_of(
            index.catalog,
            read(filenames.OBJECTS),
            lambda rank: read(filenames.objects_file(rank)),
        )
        state = torch_state(saved, path, only, selection)
        reader = ExportReader(storage, folder, index, lambda _: None)
        # The widest first: so each is aligned to its own size, and no window ends in an element.
        tensors = sorted(state.tensors, key=lambda one: -DTYPES[one.dtype].itemsize)
        yield _ArchivePlan(reader, pickled(state), tensors, state.not_plain)


# --- the archive -------------------------------------------------------------------------------


def _put(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    with _record(archive, name) as record:
        record.write(data)


def _put_tensors(archive: zipfile.ZipFile, plan: _ArchivePlan, tell: CopyProgress) -> None:
    """Write the data of all tensors, a record each, from windows that are read one by one."""
    placed, start = [], 0
    for tensor in plan.tensors:
        placed.append((tensor, start))
        start += tensor.nbytes
    with closing(_parts(plan.reader, ExportedFile("", b"", tuple(placed)))) as parts:
        for tensor in plan.tensors:
            with _record(archive, tensor.name) as record:
                left = tensor.nbytes
                while left:
                    part = next(parts)
                    record.write(part)
                    tell(part.nbytes)
                    left -= part.nbytes


def _parts(reader: ExportReader, file: ExportedFile) -> Generator[memoryview]:
    """Yield the data of the tensors, in order; no part is of two of them."""
    for window, memory in reader.windows(file):
        start = 0
        for tensor, numel in window.parts:
            stop = start + numel * DTYPES[tensor.dtype].itemsize
            yield memory[start:stop]
            start = stop


@contextmanager
def _record(archive: zipfile.ZipFile, name: str) -> Iterator[IO[bytes]]:
    """Write a record, whose data begins where torch would have it begin."""
    info = zipfile.ZipInfo(f"{_FOLDER}/{name}")
    assert archive.fp is not None
    before = archive.fp.tell() + _HEADER_NBYTES + len(info.filename) + _ZIP64_NBYTES
    room = -(before + _PADDING.size) % _ALIGNMENT
    info.extra = _PADDING.pack(b"FB", room) + bytes(room)
    with archive.open(info, "w", force_zip64=True) as record:
        yield record
