"""Read the files that a user attaches to a checkpoint, once, before the claim."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Collection, Mapping
from math import isfinite

from dist_ckpt.core.format import strict_json
from dist_ckpt.core.format.filenames import is_attached_name
from dist_ckpt.core.format.index.index import MAX_ATTACHED, MAX_ATTACHED_NBYTES
from dist_ckpt.core.format.strict_json import MAX_DEPTH, MAX_INTEGER, MIN_INTEGER, Json, Scalar
from dist_ckpt.errors import StorageError

# The value of each name is a path of a file, bytes, or a dict or list, which becomes JSON.
Attachments = Mapping[str, object]

# A function that returns the attachments when the save begins. All ranks raise its error.
ReadAttachments = Callable[[], Attachments | None]

_NAME = 'up to 100 letters, digits, ".", "_" and "-", and do not begin with "." or "-"'


def read_attached(attach: Attachments | ReadAttachments | None) -> dict[str, bytes]:
    """Return the bytes of the attached files, by name.

    TypeError or ValueError for an invalid name or value, for a file that is missing or changes
    during the read, and for too much data. StorageError if a file cannot be read.
    """
    if callable(attach) and not isinstance(attach, Mapping):
        attach = attach()
    if attach is None:
        return {}
    if not isinstance(attach, Mapping):
        raise TypeError(f"attach is a {type(attach).__name__}: give a dict of names")
    _check_names(attach)
    nbytes_left, contents = MAX_ATTACHED_NBYTES, {}
    for name, value in attach.items():
        contents[name] = data = _read_value(value, f"attach[{name!r}]", nbytes_left)
        nbytes_left -= len(data)
        if nbytes_left < 0:
            raise _too_much_error(f"attach[{name!r}]")
    return contents


def _check_names(names: Collection[object]) -> None:
    if len(names) > MAX_ATTACHED:
        raise ValueError(
            f"attach has {len(names)} files, the limit is {MAX_ATTACHED}: put several into one"
        )
    folded: dict[str, str] = {}
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"attach: {name!r} is not a name: give a text")
        if not is_attached_name(name):
            raise ValueError(f"attach: {name[:200]!r} is not a name: give {_NAME}")
        if (other := folded.setdefault(name.lower(), name)) != name:
            raise ValueError(
                f"attach: {other!r} and {name!r} are one name on some file systems: rename one"
            )


def _read_value(value: object, label: str, most: int) -> bytes:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, os.PathLike):
        return _read_file(os.fspath(value), label, most)
    if isinstance(value, Mapping | list):
        # Nothing is lost or changed, except that tuples become arrays.
        text = json.dumps(_to_json(value, label, 0), ensure_ascii=False, indent=2)
        return f"{text}\n".encode()
    hint = "a Path for a file, .encode() for a text" if isinstance(value, str) else "a Path"
    raise TypeError(f"{label} is a {type(value).__name__}: give {hint}, bytes, a dict or a list")


def _too_much_error(label: str) -> ValueError:
    return ValueError(
        f"{label}: the attachments have more than {MAX_ATTACHED_NBYTES} bytes together: attach "
        f"less, or save the data as tensors of the state"
    )


def _read_file(path: str, label: str, most: int) -> bytes:
    """Read a whole file. ValueError if it is missing, or changes during the read."""
    try:
        # Without O_NONBLOCK, opening a pipe waits for its writer.
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        raise ValueError(f"{label}: {path} does not exist: write it before the save") from None
    except OSError as error:
        raise StorageError(f"{label}: {path} cannot be read: {error.strerror}") from error
    except ValueError:  # a zero byte
        raise ValueError(f"{label}: {path!r} is not a path: give that of a file") from None
    try:
        before = os.fstat(file)
        if not stat.S_ISREG(before.st_mode):
            raise ValueError(f"{label}: {path} is not a file: give one, or its bytes")
        if before.st_size > most:
            raise _too_much_error(label)
        data = _read_up_to(file, before.st_size)
        # Look at the path again, not at the open file: another file may have replaced it.
        if len(data) != before.st_size or _file_version(os.stat(path)) != _file_version(before):
            raise _changed_error(path, label)
    except FileNotFoundError:
        raise _changed_error(path, label) from None
    except OSError as error:
        raise StorageError(f"{label}: {path} cannot be read: {error.strerror}") from error
    finally:
        os.close(file)
    return data


def _read_up_to(file: int, nbytes: int) -> bytes:
    """Read `nbytes` bytes, and one more if the file is longer."""
    parts = []
    while nbytes >= 0 and (part := os.read(file, nbytes + 1)):
        parts.append(part)
        nbytes -= len(part)
    return b"".join(parts)


def _file_version(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _changed_error(path: str, label: str) -> ValueError:
    return ValueError(
        f"{label}: {path} was changed while it was read: attach it when it is written, or give its "
        f"bytes"
    )


def _to_json(value: object, label: str, depth: int) -> Json:
    if depth >= MAX_DEPTH:
        raise ValueError(f"{label} is more than {MAX_DEPTH} levels deep: flatten it")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or not strict_json.is_text(key):
                raise TypeError(f"{label} has the key {key!r}: keys in JSON are valid text")
        return {k: _to_json(inner, f"{label}[{k!r}]", depth + 1) for k, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(inner, f"{label}[{i}]", depth + 1) for i, inner in enumerate(value)]
    return _check_scalar(value, label)


def _check_scalar(value: object, label: str) -> Scalar:
    if value is None or type(value) is bool:
        return value
    if type(value) is int and MIN_INTEGER <= value <= MAX_INTEGER:
        return value
    if type(value) is float and isfinite(value):
        return value
    if type(value) is str and strict_json.is_text(value):
        return value
    if isinstance(value, int | float | str):
        raise ValueError(f"{label} is {value!r:.100}, which JSON does not have: convert it first")
    raise TypeError(f"{label} is a {type(value).__name__}, which JSON does not have: convert it")
