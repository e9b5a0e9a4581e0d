"""A Python that has imported torch already: `forked_python()`, in the place of `sys.executable`.

A fresh Python that imports torch and a save takes two seconds of a core. `forked_python()` returns
a program with the arguments of Python (`-c`, `-m`, a script) that starts in a twentieth: a server
that has imported torch, and never makes a thread, forks a child for each start. The child has the
arguments, environment, folder and open files of who started it, and a process group of its own, or
a session if that has one. The program ends as the child ends, hands on signals, and the child's
group dies with it.

What a child starts with `sys.executable` is forked as well: ranks of torchrun, background writers.
Their process is the one that a lock file names, not the one that `Popen` started.

What must be a Python of its own keeps `sys.executable`: what is about imports, start-up, the end of
the interpreter, the command line in `/proc`, namespaces or limits. What a fork cannot be starts a
Python of its own by itself: other options than `-P`, `-W` and `-u`, `PYTHONHASHSEED`, another user,
a process of `multiprocessing`.

Servers end with the test process; each set of preloaded modules has one.
"""

from __future__ import annotations

import ast
import atexit
import fcntl
import functools
import gc
import importlib
import io
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parents[3]
# As many as Linux hands over at once.
MAX_FILES = 253
# What saves, loads and commands import, and torch for the first optimizer or DTensor.
TORCH = (
    "torch._dynamo",
    "torch.distributed.tensor",
    "dist_ckpt.checkpointer.checkpointer",
    "dist_ckpt.core.saving.save",
    "dist_ckpt.core.loading.load",
    "dist_ckpt.async_save.writer.background_writer",
    # By this word in `/proc/PID/cmdline` a background writer is known, also a forked one.
    "dist_ckpt.async_save.writer",
    *(
        f"dist_ckpt.cli.commands.{path.stem}"
        for path in sorted((ROOT / "dist_ckpt" / "cli" / "commands").glob("[!_]*.py"))
    ),
)

# The program: as little of Python as can be, for it is started in the place of Python.
_PROGRAM = """#!{python} -IS
import _signal, _socket, posix, sys
def be_python():
    posix.execv({python!r}, [{python!r}, *sys.argv[1:]])
given = iter(sys.argv[1:])
for word in given:
    if word == "-W":
        next(given)
    elif word in ("-c", "-m") or not word.startswith("-"):
        break
    elif word not in ("-P", "-u"):
        be_python()
else:  # without a program
    be_python()
if "--multiprocessing-fork" in sys.argv or posix.getuid() != {user}:
    be_python()
if b"PYTHONHASHSEED" in posix.environ:
    be_python()
words = [one.encode("utf-8", "surrogateescape") for one in sys.argv[1:]]
files = [0, 1, 2]
for number in map(int, posix.listdir("/proc/self/fd")):
    try:
        posix.fstat(number)
    except OSError:  # what was open to list them
        continue
    if number > 2:
        files.append(number)
leads = posix.getsid(0) == posix.getpid()
data = repr((words, posix.getcwdb(), posix.environ, files, leads)).encode()
data = len(data).to_bytes(8, "big") + data
server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
server.connect({address!r})
rights = b"".join(one.to_bytes(4, sys.byteorder) for one in files)
try:
    sent = server.sendmsg([data], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])
except OSError:  # a stream is closed
    be_python()
server.sendall(data[sent:])
for number in files[3:]:
    posix.close(number)
child = int.from_bytes(server.recv(8), "big")
if not child:
    sys.exit("the fork server has ended")
for name in ("HUP", "INT", "QUIT", "TERM", "USR1", "USR2"):
    number = getattr(_signal, "SIG" + name)
    if _signal.getsignal(number) is not _signal.SIG_IGN:
        _signal.signal(number, lambda number, _: posix.kill(child, number))
status = server.recv(8)
if not status:
    sys.exit("the fork server has ended")
status = int.from_bytes(status, "big")
if posix.WIFSIGNALED(status):
    _signal.signal(posix.WTERMSIG(status), _signal.SIG_DFL) if posix.WTERMSIG(status) != 9 else None
    posix.kill(posix.getpid(), posix.WTERMSIG(status))
posix._exit(posix.WEXITSTATUS(status))
"""


# --- the test process's side -------------------------------------------------------------------


@functools.cache
def forked_python(*modules: str) -> str:
    """Return a program in the place of Python that has imported torch, and these modules."""
    folder = Path(tempfile.mkdtemp(prefix="fork-server-"))
    program, address = folder / "python", str(folder / "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        # OpenBLAS would start its threads when numpy is imported.
        own = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        own.pop("PYTHONUNBUFFERED", None)
        server = subprocess.Popen(
            [sys.executable, __file__, str(listener.fileno()), str(program), *TORCH, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            cwd=ROOT,
            env=own,
        )
    text = _PROGRAM.format(python=sys.executable, address=address, user=os.getuid())
    program.write_text(text)
    program.chmod(0o755)
    atexit.register(_end, server, os.getpid())
    return str(program)


def _end(server: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() == owner:
        server.communicate()  # it ends, and its children, when its input does


# --- the server's side -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Request:
    """What a child is to be: the arguments of Python, a folder, an environment, open files.

    `files` are the numbers that these shall have. `leads`: it has a session of its own.
    """

    words: list[str]
    folder: bytes
    environ: dict[bytes, bytes]
    files: list[int]
    leads: bool
    received: list[int]


def _serve(listener: socket.socket) -> _Request:
    """Fork children until there is nobody who would ask; return in each child what it is to be."""
    children: dict[socket.socket, tuple[int, int]] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin, selectors.EVENT_READ)
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is listener:
                    if (request := _fork(listener, selector, children)) is not None:
                        return request
                elif key.fileobj is sys.stdin:
                    for pid, _ in children.values():
                        _kill_group(pid)
                    shutil.rmtree(Path(sys.executable).parent, ignore_errors=True)
                    os._exit(0)
                else:
                    _answer(key, selector, children)


def _fork(
    listener: socket.socket,
    selector: selectors.BaseSelector,
    children: dict[socket.socket, tuple[int, int]],
) -> _Request | None:
    connection, _ = listener.accept()
    request = _receive(connection)
    if request is None:
        connection.close()
        return None
    if (pid := os.fork()) == 0:
        os.setsid() if request.leads else os.setpgid(0, 0)
        for one in (listener, connection, *children):
            one.close()
        for _, process in children.values():
            os.close(process)
        return request
    for file in request.received:
        os.close(file)
    process = os.pidfd_open(pid)
    children[connection] = pid, process
    _send(connection, pid)
    selector.register(process, selectors.EVENT_READ, connection)
    selector.register(connection, selectors.EVENT_READ, connection)
    return None


def _receive(connection: socket.socket) -> _Request | None:
    head, received, _, _ = socket.recv_fds(connection, 8, MAX_FILES)
    if len(head) < 8:
        return None
    nbytes = int.from_bytes(head, "big")
    with connection.makefile("rb") as source:
        data = source.read(nbytes)
    if len(data) < nbytes:  # who asked was killed
        for file in received:
            os.close(file)
        return None
    words, folder, environ, files, leads = ast.literal_eval(data.decode())
    words = [os.fsdecode(word) for word in words]
    return _Request(words, folder, environ, files, leads, received)


def _answer(
    key: selectors.SelectorKey,
    selector: selectors.BaseSelector,
    children: dict[socket.socket, tuple[int, int]],
) -> None:
    """Say how a child has ended; or end it, as who started it is gone."""
    connection = key.data
    if connection not in children:
        return  # both at once
    pid, process = children.pop(connection)
    if key.fileobj is connection:
        _kill_group(pid)
    _, status = os.waitpid(pid, 0)
    selector.unregister(process)
    selector.unregister(connection)
    os.close(process)
    with connection:
        if key.fileobj is not connection:
            _send(connection, status)


def _send(connection: socket.socket, number: int) -> None:
    """Send a number to the process that started a child. If it has ended, the server goes on."""
    with suppress(ConnectionError):
        connection.sendall(number.to_bytes(8, "big"))


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:  # it has not come to make its group
        os.kill(pid, signal.SIGKILL)


# --- a child's side ----------------------------------------------------------------------------


def _become(request: _Request, imported: list[str]) -> Callable[[], object]:
    """Make of this process what a fresh Python would be; return what it runs."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    beyond = max(request.files) + 1
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, beyond) for file in request.received]
    for file in request.received:
        os.close(file)
    for file, number in zip(moved, request.files, strict=True):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request.folder)
    os.environ.clear()
    os.environb.update(request.environ)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    num_options = _set_options(request.words)
    options, words = request.words[:num_options], request.words[num_options:]
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    first = "" if words[0] == "-c" else os.getcwd()
    if words[0] not in ("-c", "-m"):
        first = str(Path(words[0]).resolve().parent)
    sys.path[:] = [*([] if "-P" in options else [first]), *given, *imported]
    if words[0] == "-m":
        sys.argv[:] = words[1:]
        return lambda: runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if words[0] == "-c":
        sys.argv[:] = ["-c", *words[2:]]
        code = compile(words[1], "<string>", "exec")
    else:
        sys.argv[:] = words
        main.__file__ = words[0]
        code = compile(Path(words[0]).read_bytes(), words[0], "exec")
    return lambda: exec(code, main.__dict__)


def _set_options(words: list[str]) -> int:
    """Do what options of Python say; return how many words they are."""
    filters = [one for one in os.environ.get("PYTHONWARNINGS", "").split(",") if one]
    is_unbuffered, num_words = bool(os.environ.get("PYTHONUNBUFFERED")), 0
    while (word := words[num_words]) in ("-P", "-u", "-W"):
        is_unbuffered |= word == "-u"
        if word == "-W":
            num_words += 1
            filters.append(words[num_words])
        num_words += 1
    if is_unbuffered:
        assert isinstance(sys.stdout, io.TextIOWrapper)
        sys.stdout.reconfigure(write_through=True)
    sys.warnoptions[:] = filters
    warnings._processoptions(filters)  # type: ignore[attr-defined]  # as Python does at its start
    return num_words


def _run(program: Callable[[], object]) -> NoReturn:
    """Run what a child is, and end as Python ends: but all that torch is made of is let be.

    To take that apart takes half a second.
    """
    code: object = 0
    try:
        program()
    except SystemExit as error:
        code = error.code
    except BaseException as error:  # noqa: BLE001 - a process's outer edge
        for _ in range(2):  # a traceback begins with the program
            error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    getattr(threading, "_shutdown")()  # noqa: B009 - as Python itself: for threads, then for exits
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except OSError:
        code = 120
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit((code or 0) & 0xFF)


def _prepare(modules: list[str]) -> list[str]:
    """Import what children will use; return the path of a Python that was told none."""
    mine = {str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    path = [one for one in sys.path if one not in mine]
    sys.path[:] = [str(ROOT), *path]
    # What is there stays; to look through it would copy it into each child, and to take torch's
    # libraries apart at a child's exit would cost 45 ms.
    gc.disable()
    for name in modules:
        importlib.import_module(name)
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError(f"importing {modules} starts threads, which no fork would have")
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    gc.freeze()
    gc.enable()
    return path


if __name__ == "__main__":
    # An interrupt at the keyboard is for the test process; when it ends, so do we.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _path = _prepare(sys.argv[3:])
    sys.executable = sys.argv[2]
    _request = _serve(socket.socket(fileno=int(sys.argv[1])))
    _run(_become(_request, _path))
