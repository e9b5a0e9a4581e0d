"""Write a new file or folder for the user: complete and durable under its name, or absent.

`StreamedFile` is written from beginning to end, as archives are. `WritePlan` is a write that is
checked, but not begun: `--dry-run` prints it.
"""

from __future__ import annotations

import io
import logging
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from dist_ckpt.core.commit.commit_protocol import attempts_to_replace, check_new_name
from dist_ckpt.core.format.filenames import is_reserved_name
from dist_ckpt.core.runtime.arguments import check_flag
from dist_ckpt.core.runtime.host_memory import allocate_scratch, copy
from dist_ckpt.core.runtime.threads import SerialExecutor
from dist_ckpt.core.storage import Entry, Storage, WritableFile
from dist_ckpt.core.storage.local.local_storage import (
    LocalStorage,
    describe_os_error,
    exchange_names,
    rename_exclusively,
)
from dist_ckpt.errors import CheckpointError, ExistsError, NotFoundError, StorageError
from dist_ckpt.reports import Progress

_log = logging.getLogger("dist_ckpt")

Result = TypeVar("Result")


@contextmanager
def new_file(
    path: str | os.PathLike[str], *, overwrite: bool, nbytes: int = 0
) -> Iterator[StreamedFile]:
    """Write a file. After the `with` it is complete and durable under its name.

    Until then it has a temporary name in the same folder, and an error removes it. With `overwrite`
    it replaces an existing file, and gets its permissions. Otherwise ExistsError if the path
    exists. Other errors are StorageError. Space is reserved for `nbytes`, the minimum size.
    """
    file_path = check_new_file(path, overwrite=overwrite)
    temporary = temporary_beside(file_path)
    try:
        with StreamedFile(LocalStorage(), temporary, nbytes) as file:
            yield file
            file.finish()
        if overwrite:
            with suppress(FileNotFoundError):  # no more users may read it than before
                os.chmod(temporary, stat.S_IMODE(os.stat(file_path).st_mode))
            os.replace(temporary, file_path)
        else:
            rename_exclusively(temporary, file_path)
        sync_folder(os.path.dirname(file_path))
    except FileExistsError:
        raise _exists(file_path) from None
    except StorageError as error:  # name the user's path, not the removed temporary file
        raise StorageError(str(error).replace(temporary, file_path)) from error
    except OSError as error:
        raise StorageError(f"{file_path} cannot be written: {describe_os_error(error)}") from error
    finally:
        with suppress(OSError):
            os.unlink(temporary)


def check_new_file(path: str | os.PathLike[str], *, overwrite: bool) -> str:
    """Return the absolute path of a new file. ExistsError, or NotFoundError without its folder."""
    check_flag("overwrite", overwrite)
    file_path = os.path.abspath(checked_file_path(path))
    check_parent(file_path)
    if not os.path.lexists(file_path):
        return file_path
    if not overwrite:
        raise _exists(file_path)
    if not stat.S_ISREG(os.lstat(file_path).st_mode):
        raise ExistsError(
            f"{file_path} is not a regular file and is not replaced: use another path"
        )
    return file_path


def check_parent(file_path: str) -> None:
    """Raise NotFoundError without a folder for a new file, ValueError for a reserved name."""
    if not os.path.isdir(parent := os.path.dirname(file_path)):
        raise NotFoundError(f"{parent}: the folder does not exist; make it first")
    is_of_run = "@" in file_path or is_reserved_name(os.path.basename(file_path))
    if is_of_run and not os.path.lexists(file_path):
        check_new_name(LocalStorage(), file_path)


def check_outside(source: str, target: str) -> None:
    """Raise ValueError if the target is the source, or inside it. Pass paths without links."""
    if target == source or target.startswith(f"{source}/"):
        raise ValueError(
            f"the target {target} is the source, or inside the source {source}: give another target"
        )


def checked_file_path(path: object) -> str:
    """Return the path of a file as text. TypeError or ValueError for any other value."""
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise TypeError(f"the file is a {type(path).__name__}: pass a str or a pathlib.Path")
    if not text or "\0" in text:
        raise ValueError(f"the file is {text!r}: pass the path of a file")
    return text


def _exists(file_path: str) -> ExistsError:
    return ExistsError(
        f"{file_path}: something is there already: choose another path, or replace it "
        "(overwrite=True, on the command line --overwrite)"
    )


def temporary_beside(path: str) -> str:
    """Return a temporary name next to a path. Warn of temporary files of killed processes."""
    folder, name = os.path.split(path)
    # Cut the name, so that the temporary name is not too long for the file system.
    short = os.fsdecode(os.fsencode(name)[:100])
    of_path = re.compile(rf"\.{re.escape(short)}\.[0-9a-f]{{16}}\.tmp")
    with suppress(OSError):  # the folder may be writable but not readable
        for old_name in filter(of_path.fullmatch, os.listdir(folder)):
            _log.warning(
                "%s is from a killed process, or is being written: remove it if no process "
                "writes to it",
                os.path.join(folder, old_name),
            )
    return os.path.join(folder, f".{short}.{secrets.token_hex(8)}.tmp")


def sync_folder(folder: str) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# The size of each of two buffers: one is filled while the other is written. Direct I/O needs a
# multiple of its block.
_BUFFER_NBYTES = 8 << 20


class StreamedFile(io.RawIOBase):
    """A file for `zipfile` and `torch.save`, written directly by a thread. Use it in one thread."""

    def __init__(self, storage: Storage, path: str, nbytes: int) -> None:
        """Create the file, with `nbytes` of space; it must get at least that size."""
        super().__init__()
        self._path = path
        self._file: WritableFile = storage.create(path, nbytes)
        self._buffers = (allocate_scratch(_BUFFER_NBYTES), allocate_scratch(_BUFFER_NBYTES))
        self._executor = SerialExecutor()
        self._used = 0  # bytes in the first buffer
        self.nbytes = 0  # bytes in all writes
        self.failure: BaseException | None = None  # the error of a write, which torch hides

    def writable(self) -> bool:
        """Return True. The file cannot be read, and cannot seek."""
        return True

    def tell(self) -> int:
        """Return the offset of the next byte."""
        return self.nbytes

    def write(self, data: Any) -> int:
        """Append bytes. Raises the error of an earlier write."""
        try:
            view = memoryview(data).cast("B")
            done = 0
            while done < len(view):
                part = view[done : done + _BUFFER_NBYTES - self._used]
                copy(self._buffers[0][self._used : self._used + len(part)], part)
                self._used += len(part)
                self.nbytes += len(part)
                done += len(part)
                if self._used == _BUFFER_NBYTES:
                    self._write_buffer()
        except BaseException as error:
            self.failure = error
            raise
        return done

    def finish(self) -> None:
        """Make the file durable. StorageError if that is not certain, or if the size is wrong."""
        self._write_buffer()
        self._executor.wait()
        if self._file.finish() != self.nbytes:
            raise StorageError(f"{self._path} has another size than was written: try again")

    def close(self) -> None:
        """Release the file, finished or not."""
        if not self.closed:
            self._executor.close()
            self._file.discard()
        super().close()

    def _write_buffer(self) -> None:
        start, filled = self.nbytes - self._used, self._buffers[0][: self._used]
        self._executor.start(partial(self._file.write_at, start, filled))
        self._buffers, self._used = self._buffers[::-1], 0


def check_no_folder(storage: Storage, path: str) -> tuple[str, ...]:
    """Return (), for `new_folder`. ExistsError unless a path is free, or an empty folder."""
    if list_target(storage, path):
        raise ExistsError(f"{path}: something is there already: choose another path, or remove it")
    return ()


@contextmanager
def new_folder(
    storage: Storage,
    path: str,
    check: Callable[[Storage, str], tuple[str, ...]] = check_no_folder,
    *,
    replaces: bool = False,
) -> Iterator[str]:
    """Yield a temporary folder to write into; rename it to `path`, durably, at the end.

    The temporary folder is next to `path`, and is removed after an error. An empty folder at `path`
    is replaced. With `replaces` any folder is, if `check` allows it: it raises an error, or returns
    the old files to link into the new folder. ExistsError if anything else exists at `path`.
    """
    check(storage, path)
    temporary = temporary_beside(path)
    is_renamed = False
    try:
        storage.make_folder(temporary)
        yield temporary
        for file in check(storage, path):
            storage.link(f"{path}/{file}", f"{temporary}/{file}")
        storage.sync(temporary)
        _rename_folder(storage, temporary, path, replaces=replaces)
        is_renamed = True
        storage.sync(os.path.dirname(path))
    except BaseException:
        if not is_renamed:
            _remove_folder(storage, temporary)
        raise
    _remove_folder(storage, temporary)  # after an exchange, this is the old folder


def list_target(storage: Storage, path: str) -> Sequence[Entry]:
    """Return the entries of the folder at `path`, if any. ExistsError for anything but a folder."""
    check_parent(path)
    if os.path.islink(path):  # callers resolve links first
        raise ExistsError(f"{path} is now a link to {os.readlink(path)}: look at it")
    try:
        return storage.list(path)
    except FileNotFoundError:
        return ()
    except NotADirectoryError:
        raise ExistsError(f"{path} is not a folder: choose another path") from None


def write_durable_file(storage: Storage, path: str, data: bytes) -> int:
    """Write a small file, durably; return its size."""
    file = storage.create(path, len(data))
    try:
        file.write_at(0, data)
        return file.finish()
    finally:
        file.discard()


def _rename_folder(storage: Storage, temporary: str, path: str, *, replaces: bool) -> None:
    """Rename the folder to `path`; a nonempty old folder gets the temporary name."""
    try:
        if os.path.lexists(path):
            with suppress(OSError):
                os.rmdir(path)
        if not replaces or not os.path.lexists(path):
            storage.rename(temporary, path)
        elif not exchange_names(temporary, path):
            old = f"{temporary[:-4]}.old.tmp"
            storage.rename(path, old)
            try:
                storage.rename(temporary, path)
            except BaseException:
                storage.rename(old, path)
                raise
            storage.rename(old, temporary)
    except FileExistsError:
        raise ExistsError(f"{path} was created meanwhile by another process: look at it") from None
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {describe_os_error(error)}") from error


def _remove_folder(storage: Storage, folder: str) -> None:
    """Remove a folder of files. A failure is only logged."""
    try:
        for entry in storage.list(folder):
            storage.remove(f"{folder}/{entry.name}")
        storage.remove(folder)
    except FileNotFoundError:
        return
    except (CheckpointError, OSError) as error:
        _log.warning("%s was not removed; you can remove it: %s", folder, error)
    except BaseException:
        _log.warning("%s was not removed (interrupted); you can remove it", folder)
        raise


@dataclass(frozen=True, slots=True)
class WritePlan(Generic[Result]):
    """A write that passed its checks. Nothing is written until `run`. Call `run` once.

    `path` is the target, and `replaces` are the paths that the write removes there. `run` checks
    again that the source exists and the target may be written, then it writes. `list_files` returns
    the names and sizes of the files that are written or linked, without the index. `sources`
    describes the checkpoints that are read, if there are several.
    """

    path: str
    run: Callable[[Progress | None], Result]
    list_files: Callable[[], Mapping[str, int]]
    replaces: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()


def paths_to_replace(storage: Storage, path: str, *, overwrite: bool) -> tuple[str, ...]:
    """Return the attempts that a new checkpoint replaces. Raises the errors of its claim."""
    there = attempts_to_replace(storage, path, overwrite=overwrite)
    return tuple(f"{path}/{attempt}" for attempt in there)


def plan_file_export(
    path: str, run: Callable[[Progress | None], int], nbytes: int
) -> WritePlan[int]:
    """Return the plan of an export to one file. It replaces a file at `path`."""
    replaces = (path,) * os.path.lexists(path)
    return WritePlan(path, run, lambda: {os.path.basename(path): nbytes}, replaces)
