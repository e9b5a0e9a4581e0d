"""System calls that fail on cue: what `LocalStorage` asks of the kernel, the n-th call of it.

A fault comes before the call, or after the call took effect (as when a server's reply is lost), and
once or from then on. Only the storage's own modules are touched, so whoever looks with the real
`os` sees what is there.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

from dist_ckpt.core.storage.local import direct_io, local_storage

CALLS = (
    *("open", "close", "fsync", "pwrite", "preadv", "ftruncate", "fstat", "lstat", "scandir"),
    *("mkdir", "rmdir", "unlink", "rename", "link", "readlink"),
)
Lasting = Literal["once", "alike", "all"]
_ID = re.compile(r"[0-9a-f]{16}|[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Fault:
    """The error of call `number`, from 1, and of later ones if it is `lasting`.

    "alike": of those of the same name, such as all later syncs. `done`: the call takes effect
    first.
    """

    number: int
    code: int
    lasting: Lasting = "once"
    done: bool = False

    def is_of(self, names: Sequence[str]) -> bool:
        """Say whether it is the fault of the last of these calls."""
        number = len(names)
        if number <= self.number or self.lasting == "once":
            return number == self.number
        return self.lasting == "all" or names[-1] == names[self.number - 1]

    def __str__(self) -> str:
        name = errno.errorcode[self.code]
        return f"{name} {'after' if self.done else 'at'} call {self.number} ({self.lasting})"


class SystemCalls:
    """Counts calls, fails what `fault` says; `made` names each, as "fsync a*"."""

    def __init__(self, fault: Fault | None = None) -> None:
        self.made: list[str] = []
        self._names: list[str] = []
        self._fault = fault
        self._paths: dict[int, str] = {}
        self._lock = threading.Lock()

    def make(self, name: str, what: object, act: Callable[[], Any]) -> Any:
        """Do a call, or fail it by raising OSError."""
        with self._lock:
            self.made.append(f"{name} {self._named(what)}")
            self._names.append(name)
            fault = self._fault
            fails = fault is not None and fault.is_of(self._names)
        if fault is None or not fails:
            result = act()
            if name == "open":
                self._paths[result] = str(what)
            return result
        if fault.done or name == "close":  # the kernel closes it, whatever it says
            result = act()
            if name == "open":
                os.close(result)
            elif name == "scandir":
                result.close()
        raise OSError(fault.code, os.strerror(fault.code))

    def _named(self, what: object) -> str:
        path = os.fsdecode(what) if isinstance(what, str | bytes) else ""
        if isinstance(what, int):
            path = self._paths.get(what, "")
        return _ID.sub("*", path.rpartition("/")[2])


class _FaultyOs:
    """The module `os`, but for the calls that are counted."""

    def __init__(self, calls: SystemCalls) -> None:
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in CALLS:
            return real

        def call(*arguments: Any, **options: Any) -> Any:
            result = self._calls.make(name, arguments[0], lambda: real(*arguments, **options))
            return _Listing(self._calls, result) if name == "scandir" else result

        return call


class _Listing:
    """What `os.scandir` returns; to look at an entry is a call as well."""

    def __init__(self, calls: SystemCalls, real: Any) -> None:
        self._calls = calls
        self._real = real

    def __enter__(self) -> Iterator[_Entry]:
        return (_Entry(self._calls, entry) for entry in self._real)

    def __exit__(self, *_: object) -> None:
        self._real.close()


class _Entry:
    def __init__(self, calls: SystemCalls, real: os.DirEntry[str]) -> None:
        self.name = real.name
        self._calls = calls
        self._real = real

    def stat(self, *, follow_symlinks: bool) -> Any:
        return self._calls.make(
            "stat", self.name, lambda: self._real.stat(follow_symlinks=follow_symlinks)
        )


@contextmanager
def system_calls(fault: Fault | None, *, exclusive: bool = True) -> Iterator[SystemCalls]:
    """Plant a fault. Without `exclusive` there is no call that renames exclusively (NFS)."""
    calls = SystemCalls(fault)
    real_call = direct_io.system_call

    def system_call(name: str) -> Callable[..., int] | None:
        real = real_call(name)
        if real is None:
            return None
        if name == "renameat2" and not exclusive:
            return _unsupported
        return lambda *arguments: _called(calls, name, real, arguments)

    with ExitStack() as stack:
        for module in (local_storage, direct_io):
            stack.enter_context(patch.object(module, "os", _FaultyOs(calls)))
            stack.enter_context(patch.object(module, "system_call", system_call))
        yield calls


def _unsupported(*_: object) -> int:
    ctypes.set_errno(errno.EINVAL)
    return -1


def _called(
    calls: SystemCalls, name: str, real: Callable[..., int], arguments: Sequence[Any]
) -> int:
    def act() -> None:
        if real(*arguments):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    what = arguments[3] if name == "renameat2" else arguments[0]
    try:
        calls.make(name, what, act)
    except OSError as error:
        ctypes.set_errno(error.errno or 0)
        return -1
    return 0
