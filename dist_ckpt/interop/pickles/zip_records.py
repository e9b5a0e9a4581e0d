"""Locate the uncompressed records of a zip archive of torch.save.

`zipfile` is not used: it does not return the offset of a record's data, reads a directory of any
size, and accepts two records of one name.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dist_ckpt.errors import CorruptError, IncompatibleError

ReadAt = Callable[[int, int], bytes]

_END = struct.Struct("<4s4H2LH")
_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_BEYOND = 0xFFFFFFFF
_ENCRYPTED = 1

# The size of the first read, at the archive's end: it covers all of a small archive.
_TAIL_NBYTES = 4096

# Some million records: a larger directory is refused, as it would be read whole.
_MAX_DIRECTORY_NBYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class ZipRecord:
    """A record: its data's size, its local header, and its name with that of the archive.

    `is_plain` is True if it is neither compressed nor encrypted. `checksum` is its CRC-32, or 0 if
    torch wrote none.
    """

    nbytes: int
    header_at: int
    full_name: bytes
    is_plain: bool
    checksum: int


class ZipRecords:
    """The records of an archive of `nbytes` bytes, which `read(offset, nbytes)` reads.

    `label` names it in errors: CorruptError for an incomplete archive, IncompatibleError for a
    compressed record.
    """

    def __init__(self, read: ReadAt, nbytes: int, label: str) -> None:
        self._read = read
        self._nbytes = nbytes
        self._label = label
        self.records: dict[str, ZipRecord] = {}
        start, size = self._directory()
        if size > _MAX_DIRECTORY_NBYTES:
            raise self._damaged(f"a directory of {size} bytes")
        data = self._at(start, size)
        at = 0
        while at < size:
            at = self._add(data, at)

    def bytes_of(self, name: str, most: int) -> bytes:
        """Return the data of a record of at most `most` bytes, checked by its checksum."""
        start, nbytes = self.span_of(name)
        if nbytes > most:
            raise CorruptError(
                f"{self._label}: its record {name} has {nbytes} bytes, {most} are the most"
            )
        data = self._at(start, nbytes)
        checksum = self.records[name].checksum
        if checksum and zlib.crc32(data) != checksum:
            raise self._damaged(f"its record {name} has another checksum than was written")
        return data

    def span_of(self, name: str) -> tuple[int, int]:
        """Return the offset of a record's data, and its size."""
        record = self.records.get(name)
        if record is None:
            raise self._damaged(f"it has no record {name}")
        if not record.is_plain:
            raise IncompatibleError(
                f"{self._label}: its record {name!r} is compressed: save it again with torch.save"
            )
        head = self._at(record.header_at, _LOCAL.size + len(record.full_name))
        sign, *_, name_nbytes, extra_nbytes = _LOCAL.unpack_from(head)
        if sign != b"PK\x03\x04" or head[_LOCAL.size :][:name_nbytes] != record.full_name:
            raise self._damaged(f"the header of its record {name} is damaged")
        start = record.header_at + _LOCAL.size + name_nbytes + extra_nbytes
        if start + record.nbytes > self._nbytes:
            raise self._damaged(f"its record {name} ends after the file")
        return start, record.nbytes

    def _directory(self) -> tuple[int, int]:
        """Return the offset of the directory, and its size."""
        tail_at = max(self._nbytes - _TAIL_NBYTES, 0)
        tail = self._at(tail_at, self._nbytes - tail_at)
        at = tail.rfind(b"PK\x05\x06")
        if at < 0 or at + _END.size > len(tail):
            raise self._damaged("not an archive of torch.save, or cut off")
        *_, size, start, _ = _END.unpack_from(tail, at)
        locator_at = at - _LOCATOR.size
        if locator_at >= 0 and tail[locator_at:][:4] == b"PK\x06\x07":
            _, _, end_at, _ = _LOCATOR.unpack_from(tail, locator_at)
            end = self._at(end_at, _END64.size)
            sign, *_, size, start = _END64.unpack(end)
            if sign != b"PK\x06\x06":
                raise self._damaged("the end of its directory is damaged")
        return start, size

    def _add(self, data: bytes, at: int) -> int:
        """Add the record of a directory entry; return the offset of the next entry."""
        if at + _ENTRY.size > len(data):
            raise self._damaged("its directory is cut off")
        entry = _ENTRY.unpack_from(data, at)
        sign, flags, method = entry[0], entry[3], entry[4]
        checksum = entry[7]
        packed, size, name_nbytes, extra_nbytes, comment_nbytes = entry[8:13]
        header_at = entry[16]
        name_at = at + _ENTRY.size
        extra_at = name_at + name_nbytes
        end: int = extra_at + extra_nbytes + comment_nbytes
        if sign != b"PK\x01\x02" or end > len(data):
            raise self._damaged("its directory is damaged")
        full_name = data[name_at:extra_at]
        name = full_name.decode("utf-8", "replace").partition("/")[2]
        long = self._long(data[extra_at : extra_at + extra_nbytes])
        size, packed, header_at = (
            next(long, -1) if value == _BEYOND else value for value in (size, packed, header_at)
        )
        if min(size, packed, header_at) < 0:
            raise self._damaged("its directory is damaged")
        if name in self.records:
            raise self._damaged(f"two records of the name {name!r}")
        is_plain = not method and packed == size and not flags & _ENCRYPTED
        self.records[name] = ZipRecord(size, header_at, full_name, is_plain, checksum)
        return end

    @staticmethod
    def _long(extra: bytes) -> Iterator[int]:
        """Yield the numbers of 64 bits of an entry."""
        at = 0
        while at + 4 <= len(extra):
            kind, nbytes = struct.unpack_from("<2H", extra, at)
            if kind == 1:
                for position in range(at + 4, min(at + 4 + nbytes, len(extra)) - 7, 8):
                    yield struct.unpack_from("<Q", extra, position)[0]
            at += 4 + nbytes

    def _at(self, offset: int, nbytes: int) -> bytes:
        if offset < 0 or nbytes < 0 or offset + nbytes > self._nbytes:
            raise self._damaged("it is cut off")
        data = self._read(offset, nbytes)
        if len(data) < nbytes:
            raise self._damaged("it ended while it was read")
        return data

    def _damaged(self, why: str) -> CorruptError:
        return CorruptError(f"{self._label}: {why}; fetch it again")
