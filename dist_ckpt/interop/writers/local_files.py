"""Single files of other systems on this host, read in place."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable

from dist_ckpt.core.commit.new_files import checked_file_path
from dist_ckpt.errors import CorruptError, NotFoundError, StorageError
from dist_ckpt.interop.writers.plain_states import FileTensor


class LocalFile:
    """A regular file, open for reading; close it when done. Threads may share it.

    Raises NotFoundError if it does not exist, ValueError if it is not a regular file, StorageError
    if it cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = checked_file_path(path)
        try:
            # O_NONBLOCK: a pipe without a writer would block here.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise NotFoundError(f"{self.path}: the file does not exist; check the path") from None
        except OSError as error:
            raise StorageError(f"{self.path} cannot be opened: {error.strerror}") from error
        status = os.fstat(self._descriptor)
        self.nbytes = status.st_size
        self.version = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise ValueError(f"{self.path} is not a regular file: give the path of a file")

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes. CorruptError if the file was truncated since it was opened."""
        data = bytearray(nbytes)
        self.read_into(offset, memoryview(data))
        return bytes(data)

    def read_into(self, offset: int, memory: memoryview) -> None:
        """Fill memory. CorruptError if the file was truncated since it was opened."""
        done = 0
        while done < memory.nbytes:
            try:
                count = os.preadv(self._descriptor, [memory[done:]], offset + done)
            except OSError as error:
                raise StorageError(f"{self.path} cannot be read: {error.strerror}") from error
            if not count:
                raise CorruptError(
                    f"{self.path}, byte {offset + done}: the file ends here, and had "
                    f"{self.nbytes} bytes when it was opened: write no file that is being read"
                )
            done += count

    def check_unchanged(self, version: tuple[int, ...]) -> None:
        """Raise CorruptError if the file had another version when it was checked."""
        if self.version != version:
            raise CorruptError(
                f"{self.path} was changed after it was checked: write no file that is being read"
            )

    def close(self) -> None:
        """Close it."""
        os.close(self._descriptor)


class FileSource:
    """The bytes of a tensor in a file (`Source`); `tell` gets the count of each read."""

    __slots__ = ("_file", "_tell", "_tensor")

    def __init__(
        self, file: LocalFile, tensor: FileTensor, tell: Callable[[int], None] = lambda nbytes: None
    ) -> None:
        self._file = file
        self._tensor = tensor
        self._tell = tell

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self._tensor.nbytes

    def address(self) -> int | None:
        """Return None: it is not in memory."""
        return None

    def read(self, start: int, stop: int, scratch: memoryview) -> memoryview:
        """Return the bytes `start` to `stop`, in `scratch`."""
        filled = scratch[: stop - start]
        self._file.read_into(self._tensor.start + start, filled)
        self._tell(filled.nbytes)
        return filled
