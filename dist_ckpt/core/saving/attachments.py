"""What users attach to a checkpoint, as bytes: read once, whole, before anything is claimed."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Mapping
from math import isfinite

from dist_ckpt.core.format import strict_json
from dist_ckpt.core.format.filenames import is_attached_name
from dist_ckpt.core.format.index.index import MAX_ATTACHED, MAX_ATTACHED_NBYTES
from dist_ckpt.core.format.strict_json import MAX_DEPTH, MAX_INTEGER, MIN_INTEGER, Json, Scalar
from dist_ckpt.errors import StorageError

# By name: a path, whose file is read; bytes; or a dict or list, which becomes JSON.
Attachments = Mapping[str, object]

# Or what is asked for it when a save begins: the ranks hear of what that raises.
ReadAttachments = Callable[[], Attachments | None]

_NAME = 'up to 100 letters, digits, ".", "_" and "-", and the first no "." or "-"'


def read_attached(given: Attachments | ReadAttachments | None) -> dict[str, bytes]:
    """Return the bytes of what is attached, by name.

    Raises TypeError or ValueError, naming which, for what is no name or cannot be attached, for
    a file that is missing or changes meanwhile, and for too much; StorageError if it is not read.
    """
    if given is not None and not isinstance(given, Mapping):
        given = given() if callable(given) else given
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f"attach is a {type(given).__name__}: give a dict of names")
    _check_names(given)
    num_left, contents = MAX_ATTACHED_NBYTES, {}
    for name, value in given.items():
        contents[name] = data = _bytes_of(value, f"attach[{name!r}]", num_left)
        num_left -= len(data)
        if num_left < 0:
            raise _too_much(f"attach[{name!r}]")
    return contents


def _check_names(given: Attachments) -> None:
    if len(given) > MAX_ATTACHED:
        raise ValueError(
            f"attach has {len(given)} files, the limit is {MAX_ATTACHED}: put several into one"
        )
    folded: dict[str, str] = {}
    for name in given:
        if not isinstance(name, str):
            raise TypeError(f"attach: {name!r} is no name: give a text")
        if not is_attached_name(name):
            raise ValueError(f"attach: {name[:200]!r} is no name: give {_NAME}")
        if (other := folded.setdefault(name.lower(), name)) != name:
            raise ValueError(
                f"attach: {other!r} and {name!r} are one name on some file systems: rename one"
            )


def _bytes_of(value: object, label: str, most: int) -> bytes:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, os.PathLike):
        return _read(os.fspath(value), label, most)
    if isinstance(value, Mapping | list):
        return _encoded(value, label)
    hint = "a Path for a file, .encode() for a text" if isinstance(value, str) else "a Path"
    raise TypeError(f"{label} is a {type(value).__name__}: give {hint}, bytes, a dict or a list")


def _too_much(label: str) -> ValueError:
    return ValueError(
        f"{label}: what is attached comes to more than {MAX_ATTACHED_NBYTES} bytes: attach less, "
        f"or save it as tensors of the state"
    )


# --- files -----------------------------------------------------------------------------------


def _read(path: str, label: str, most: int) -> bytes:
    """Read a file at once. ValueError if it is not there, or is not the same afterwards."""
    try:
        # Who opens a pipe would wait for who writes into it.
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        raise ValueError(f"{label}: there is no file {path}: write it before the save") from None
    except OSError as error:
        raise StorageError(f"{label}: {path} cannot be read: {error.strerror}") from error
    except ValueError:  # a zero byte
        raise ValueError(f"{label}: {path!r} is no path: give that of a file") from None
    try:
        before = os.fstat(file)
        if not stat.S_ISREG(before.st_mode):
            raise ValueError(f"{label}: {path} is no file: give one, or its bytes")
        if before.st_size > most:
            raise _too_much(label)
        data = _all_of(file, before.st_size)
        # By its path: another may have been put into its place.
        if len(data) != before.st_size or _state(os.stat(path)) != _state(before):
            raise _changed(path, label)
    except FileNotFoundError:
        raise _changed(path, label) from None
    except OSError as error:
        raise StorageError(f"{label}: {path} cannot be read: {error.strerror}") from error
    finally:
        os.close(file)
    return data


def _all_of(file: int, nbytes: int) -> bytes:
    """Read so many bytes, and one more if there is one."""
    parts = []
    while nbytes >= 0 and (part := os.read(file, nbytes + 1)):
        parts.append(part)
        nbytes -= len(part)
    return b"".join(parts)


def _state(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _changed(path: str, label: str) -> ValueError:
    return ValueError(
        f"{label}: {path} was changed while it was read: attach it when it is written, or give its "
        f"bytes"
    )


# --- JSON ------------------------------------------------------------------------------------


def _encoded(value: object, label: str) -> bytes:
    """Return JSON in which nothing is lost or changed, but that tuples are arrays."""
    text = json.dumps(_json_of(value, label, 0), ensure_ascii=False, indent=2)
    return f"{text}\n".encode()


def _json_of(value: object, label: str, depth: int) -> Json:
    if depth >= MAX_DEPTH:
        raise ValueError(f"{label} is more than {MAX_DEPTH} levels deep: flatten it")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or not strict_json.is_text(key):
                raise TypeError(f"{label} has the key {key!r}: keys in JSON are valid text")
        return {k: _json_of(inner, f"{label}[{k!r}]", depth + 1) for k, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_json_of(inner, f"{label}[{i}]", depth + 1) for i, inner in enumerate(value)]
    return _scalar_of(value, label)


def _scalar_of(value: object, label: str) -> Scalar:
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
