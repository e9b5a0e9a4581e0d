"""A new file that is written from its beginning to its end, as archives are."""

from __future__ import annotations

import io
from functools import partial
from typing import Any

from dist_ckpt.core.runtime.buffers import copy, scratch
from dist_ckpt.core.runtime.threads import SerialExecutor
from dist_ckpt.core.storage.protocol import Storage, WritableFile
from dist_ckpt.errors import StorageError

# A multiple of what direct I/O wants. There are two: one is filled while one is written.
_SLOT_NBYTES = 8 << 20


class StreamedFile(io.RawIOBase):
    """A file for what writes bytes one after another, such as `zipfile` and `torch.save`.

    They are gathered in memory that is aligned, and a thread writes them past the page cache: as
    they come they could not go there. `finish` makes them durable. For one thread; close it.
    """

    def __init__(self, storage: Storage, path: str, nbytes: int) -> None:
        """Create it, with room for `nbytes`, which it will have at least."""
        super().__init__()
        self._path = path
        self._file: WritableFile = storage.create(path, nbytes)
        self._slots = (scratch(_SLOT_NBYTES), scratch(_SLOT_NBYTES))
        self._behind = SerialExecutor()
        self._used = 0  # of the first slot
        self.nbytes = 0  # of all that was given
        self.failure: BaseException | None = None  # of a write: torch does not pass it on

    def writable(self) -> bool:
        """Return True; it can neither be read nor go back."""
        return True

    def tell(self) -> int:
        """Return where the next byte goes."""
        return self.nbytes

    def write(self, data: Any) -> int:
        """Append some bytes. Raises what writing those before has raised."""
        try:
            view = memoryview(data).cast("B")
            done = 0
            while done < len(view):
                part = view[done : done + _SLOT_NBYTES - self._used]
                copy(self._slots[0][self._used : self._used + len(part)], part)
                self._used += len(part)
                self.nbytes += len(part)
                done += len(part)
                if self._used == _SLOT_NBYTES:
                    self._write_slot()
        except BaseException as error:
            self.failure = error
            raise
        return done

    def finish(self) -> None:
        """Make it durable. StorageError if that is not certain, or it has another size."""
        self._write_slot()
        self._behind.wait()
        if self._file.finish() != self.nbytes:
            raise StorageError(f"{self._path} has another size than was written: try again")

    def close(self) -> None:
        """Let go of the file, finished or not."""
        if not self.closed:
            self._behind.close()
            self._file.discard()
        super().close()

    def _write_slot(self) -> None:
        start, filled = self.nbytes - self._used, self._slots[0][: self._used]
        self._behind.make(partial(self._file.write_at, start, filled))
        self._slots, self._used = self._slots[::-1], 0
