"""A new file that is written from beginning to end, as archives are."""

from __future__ import annotations

import io
from functools import partial
from typing import Any

from dist_ckpt.core.runtime.buffers import allocate_scratch, copy
from dist_ckpt.core.runtime.threads import SerialExecutor
from dist_ckpt.core.storage.protocol import Storage, WritableFile
from dist_ckpt.errors import StorageError

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
