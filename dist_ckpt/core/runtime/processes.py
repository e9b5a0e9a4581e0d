"""This process, its clock and its collector of garbage; and the state of other processes."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal

from dist_ckpt.core.runtime.typed_msgpack import Message

# The most that the running clock counts between two calls. Every wait reads it more often.
MAX_CLOCK_GAP_S = 0.5

# "blocked": the process is in a call of the kernel that no signal ends. "cut off": a thread of it
# shows that the store does not answer, or has ended. "closed": it listens no more at its liveness
# port, as one that has ended or is cut off.
ProcessState = Literal[
    "running", "cut off", "stopped", "blocked", "ending", "ended", "closed", "unknown"
]

_STATES: dict[str, ProcessState] = {
    "T": "stopped",
    "t": "stopped",
    "D": "blocked",
    "Z": "ended",
    "X": "ended",
}

# Flags of a task that exits, dumps core, or was killed by a signal (PF_EXITING, PF_POSTCOREDUMP,
# PF_DUMPCORE, PF_SIGNALED). A core dump takes minutes, and the process looks alive.
_ENDING_FLAGS = 0x4 | 0x8 | 0x200 | 0x400

# The positions of fields of /proc/PID/stat after the name, which may contain anything.
_STATE, _FLAGS, _STARTED = 0, 6, 19

_SIGKILL_BIT = 1 << 8

# The names of a thread for the system, of 15 characters at most.
_THREAD_NAME, _CUT_OFF_NAME = "dist_ckpt beat", "dist_ckpt lost"


class _RunningClock:
    """The time of the monotonic clock without the stops of this process."""

    def __init__(self) -> None:
        # Reentrant: a finalizer may read the clock while its thread has the lock.
        self._lock = threading.RLock()
        self._total_s = 0.0
        self._last = time.monotonic()
        os.register_at_fork(after_in_child=self._renew_lock)

    def read(self) -> float:
        with self._lock:
            now = time.monotonic()
            self._total_s += min(now - self._last, MAX_CLOCK_GAP_S)
            self._last = now
            return self._total_s

    def _renew_lock(self) -> None:
        self._lock = threading.RLock()


_clock = _RunningClock()


def running_time() -> float:
    """Return the seconds of a clock for deadlines, which a stop of this process does not move.

    A scheduler may suspend a job (SIGSTOP) for an hour: no deadline may pass meanwhile. Between two
    calls in this process it counts `MAX_CLOCK_GAP_S` at most. So a wait must call it more often.
    """
    return _clock.read()


class ProcessId(Message, frozen=True):
    """A process: a later one with the same `pid` has another start time.

    `machine` is the boot of its host and its namespace: there its pid is valid.
    """

    machine: str
    pid: int
    started: int


def find_process(pid: int) -> ProcessId | None:
    """Return the identity of a living process of this machine; None if it cannot be found."""
    with suppress(OSError, ValueError, IndexError):
        if os.readlink("/proc/self") != str(os.getpid()):  # it shows another namespace of pids
            return None
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        namespace = os.stat("/proc/self/ns/pid").st_ino
        return ProcessId(f"{boot}-{namespace}", pid, int(_stat_fields(pid)[_STARTED]))
    return None


def show_cut_off(*, is_cut_off: bool) -> None:
    """Show other processes, by the name of this thread, whether the store answers it."""
    with suppress(OSError), open("/proc/thread-self/comm", "w", encoding="ascii") as file:
        file.write(_CUT_OFF_NAME if is_cut_off else _THREAD_NAME)


def find_state(pid: int, started: int, thread: int = 0) -> ProcessState:
    """Return the state of a process of this machine.

    `thread` is the one that called `show_cut_off` in it, 0 if it is not known.
    """
    try:
        fields = _stat_fields(pid)
        if int(fields[_STARTED]) != started:
            return "ended"
        state = _STATES.get(fields[_STATE], "running")
        if state != "ended" and int(fields[_FLAGS]) & _ENDING_FLAGS:
            return "ending"
        if state == "running" and thread and _is_cut_off(pid, thread):
            return "cut off"
        return "ending" if state == "blocked" and _is_killed(pid) else state
    except (FileNotFoundError, ProcessLookupError):
        return "unknown" if _is_hidden(pid) else "ended"
    except (OSError, ValueError, IndexError):
        return "unknown"


def _stat_fields(pid: int) -> list[str]:
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()


def _is_hidden(pid: int) -> bool:
    """Return True if a process exists that `/proc` hides, as those of other users (hidepid)."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _is_cut_off(pid: int, thread: int) -> bool:
    try:
        with open(f"/proc/{pid}/task/{thread}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip() == _CUT_OFF_NAME
    except (FileNotFoundError, ProcessLookupError):
        return True


def _is_killed(pid: int) -> bool:
    """Return True if SIGKILL is pending: the process ends when its call of the kernel does."""
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
        masks = [line.split()[1] for line in file if line.startswith(("SigPnd:", "ShdPnd:"))]
    return any(int(mask, 16) & _SIGKILL_BIT for mask in masks)


@contextmanager
def paused_collector() -> Iterator[None]:
    """Pause the collector while many values are created, none of which is garbage.

    The collector scans the whole process each time the number of objects has grown by a quarter.
    With a few thousand tensors it took half of the time of a load. The pause affects all threads:
    never use it around calls that wait for storage. Threads may overlap.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
