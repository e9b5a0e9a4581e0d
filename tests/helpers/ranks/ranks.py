"""Ranks for tests: `run_ranks` runs a function on each rank, in threads or in processes.

Threads: `harness="threads"`, for ranks that agree, fail or answer late. The function is called with
its rank, a `ThreadChannel` and a `ThreadCollective`. `save_on_threads` and `load_on_threads` are
whole saves and loads by such ranks, over any storage.

Processes, the default: for a death, a signal, gloo, shared memory, another GIL. They form a gloo
group. They are forked not from the test process, which has threads by then (autograd, OpenMP,
heartbeats), but from a parent of their own, a child of the fork server: it has imported torch and
the test modules, and never makes a thread. A run takes tens of milliseconds. Functions go by name,
so they must be at the top of a module; arguments and results are plain literals.
"""

from __future__ import annotations

import ast
import atexit
import functools
import gc
import importlib
import os
import random
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, Literal

from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.loading.load import load_together
from dist_ckpt.core.loading.load_options import LoadOptions
from dist_ckpt.core.saving.save import save_together
from dist_ckpt.core.saving.save_options import SaveOptions
from dist_ckpt.core.storage import Storage
from dist_ckpt.default_opener import OPENER
from dist_ckpt.reports import LoadReport, SaveReport
from dist_ckpt.testing import thread_channel
from dist_ckpt.testing.thread_channel import TEST_CONFIG, ThreadChannel, ThreadCollective
from exchanges import HANG_S
from fork_server import forked_python

MAX_OUTPUT_CHARS = 20_000

# How long gloo waits for a lost rank in the user's own collectives.
GROUP_TIMEOUT_S = 30


@dataclass(frozen=True, slots=True)
class Outcome:
    """The value that a rank returned, or its error, or the signal that ended its process.

    A process that was still running at the deadline has none of them. `output` is what it printed.
    """

    value: Any = None
    error: BaseException | None = None
    signal: int | None = None
    ended: bool = True
    output: str = ""


class RemoteError(Exception):
    """The error of a rank that is a process: the name of its class, its message and traceback."""

    def __init__(self, kind: str, message: str, traceback: str) -> None:
        super().__init__(message)
        self.kind, self.traceback = kind, traceback


@dataclass(frozen=True, slots=True)
class Options:
    """How ranks that are processes are started.

    `store`: where they meet: in a file, or at a TCPStore that rank 0 serves, or at one that a
    process besides the ranks serves, as torchrun does. None: no process group is made.
    `launched`: they see RANK and WORLD_SIZE in the environment, as under torchrun.
    """

    timeout_s: float = 200.0
    store: Literal["file", "rank 0", "launcher"] | None = "file"
    launched: bool = False
    environ: Mapping[str, str] | None = None


def run_ranks(
    function: Callable[..., Any],
    *args: Any,
    world_size: int,
    harness: Literal["processes", "threads"] = "processes",
    **options: Any,
) -> list[Any]:
    """Run `function(rank, *args)` on every rank and return the values.

    `options` are those of `try_ranks`. Threads: raises the error of the lowest rank that has one.
    Processes: fails with the errors of all ranks.
    """
    if harness == "processes":
        options = {"options": Options(**options)}
    outcomes = try_ranks(function, *args, world_size=world_size, harness=harness, **options)
    if harness == "threads":
        raise_first(outcomes)
    failed = [
        f"--- rank {rank}: {_describe(outcome)}\n{outcome.output}"
        for rank, outcome in enumerate(outcomes)
        if outcome.error or outcome.signal or not outcome.ended
    ]
    if failed:
        raise AssertionError(f"{len(failed)} of {world_size} ranks failed\n" + "\n".join(failed))
    return [outcome.value for outcome in outcomes]


def try_ranks(
    function: Callable[..., Any],
    *args: Any,
    world_size: int,
    harness: Literal["processes", "threads"] = "processes",
    options: Options = Options(),
    **thread_options: Any,
) -> list[Outcome]:
    """Run `function(rank, *args)` on every rank; return the outcome of each.

    Processes: see `Options`; ranks that have not ended at the deadline are killed.
    `thread_options` are those of `dist_ckpt.testing.thread_channel.try_ranks`.
    """
    if harness == "threads":
        outcomes = thread_channel.try_ranks(
            world_size, lambda *first: function(*first, *args), **thread_options
        )
        return [Outcome(outcome.value, outcome.error) for outcome in outcomes]
    assert not thread_options, thread_options
    return _try_processes(function, args, world_size, options)


def suspend_and_resume(folder: Path, num_processes: int, stopped_s: float) -> None:
    """Stop the processes that show a file PID.pid for a time, and continue them in any order.

    At last the folder has a file "resumed".
    """
    until = time.monotonic() + HANG_S
    while len(pids := [int(file.stem) for file in folder.glob("*.pid")]) < num_processes:
        assert time.monotonic() < until
        time.sleep(0.01)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(stopped_s)
    random.shuffle(pids)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    (folder / "resumed").touch()


def raise_first(outcomes: Sequence[Outcome]) -> None:
    """Raise the error of the lowest rank that has one."""
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error


def errors_of(outcomes: Sequence[Outcome]) -> list[BaseException]:
    """Return the error of each rank; every rank must have one."""
    assert all(outcome.error is not None for outcome in outcomes), outcomes
    return [outcome.error for outcome in outcomes if outcome.error is not None]


# --- saves and loads by ranks that are threads -------------------------------------------------

PATH = "/runs/ck"

StorageOf = Callable[[int], Storage]


def try_save_on_threads(
    storage_of: StorageOf, states: Sequence[Any], path: str = PATH, each: Any = (), **options: Any
) -> list[Outcome]:
    """Save `states[rank]` on each rank; return the outcome of each.

    `each` are the options of each rank alone, a mapping a rank.
    """

    def save(rank: int, channel: ThreadChannel, bulk: ThreadCollective) -> SaveReport:
        own = SaveOptions(**options, **(each[rank] if each else {}))
        session = Session(channel, bulk, TEST_CONFIG)
        return save_together(session, states[rank], path, own, storage_of(rank))

    return try_ranks(save, world_size=len(states), harness="threads")


def try_load_on_threads(
    storage_of: StorageOf,
    states: Sequence[Any],
    path: str = PATH,
    hosts: Sequence[str] | None = None,
    **options: Any,
) -> list[Outcome]:
    """Load into `states[rank]` on each rank; return the outcome of each."""

    def load(rank: int, channel: ThreadChannel, bulk: ThreadCollective) -> LoadReport:
        session, own = Session(channel, bulk, TEST_CONFIG), LoadOptions(**options)
        return load_together(session, states[rank], path, own, storage_of(rank), opener=OPENER)

    return try_ranks(load, world_size=len(states), harness="threads", hosts=hosts)


def shared_storage(storage: Storage) -> StorageOf:
    """Return a function that returns the same storage for every rank."""
    return lambda _: storage


def save_on_threads(
    storage: Storage, states: Sequence[Any], path: str = PATH, **options: Any
) -> SaveReport:
    """Save on all ranks; raise the first error."""
    report: SaveReport = _first(
        try_save_on_threads(shared_storage(storage), states, path, **options)
    )
    return report


def load_on_threads(
    storage: Storage, states: Sequence[Any], path: str = PATH, **options: Any
) -> LoadReport:
    """Load on all ranks; raise the first error."""
    report: LoadReport = _first(
        try_load_on_threads(shared_storage(storage), states, path, **options)
    )
    return report


def _first(outcomes: Sequence[Outcome]) -> Any:
    raise_first(outcomes)
    return outcomes[0].value


# --- processes: the test process's side --------------------------------------------------------


def _try_processes(
    function: Callable[..., Any], args: tuple[Any, ...], world_size: int, options: Options
) -> list[Outcome]:
    module = sys.modules[function.__module__]
    if getattr(module, function.__qualname__, None) is not function:
        raise TypeError(f"{function.__qualname__} must stand at the top of its module")
    request = {
        "path": sys.path,
        "module": function.__module__,
        "name": function.__qualname__,
        "world_size": world_size,
        "args": args,
        "timeout_s": options.timeout_s,
        "store": options.store,
        "launched": options.launched,
        "environ": dict(options.environ or {}),
    }
    text = repr(request)
    if ast.literal_eval(text) != request:
        raise TypeError(f"arguments must be plain literals, not {args!r}")
    for _ in range(3):
        outcomes = _ask(text, options.timeout_s + 30)
        # torch's own group, before anything of ours: a stranger that met its port ends it.
        if not any("connectFullMesh failed" in str(outcome.error) for outcome in outcomes):
            break
    return outcomes


def _ask(text: str, timeout_s: float) -> list[Outcome]:
    answer = _parent().ask(text, timeout_s)
    if isinstance(answer, str):
        raise RuntimeError(answer)
    return [_outcome(**fields) for fields in answer]


def _outcome(error: tuple[str, str, str] | None = None, **fields: Any) -> Outcome:
    return Outcome(error=None if error is None else RemoteError(*error), **fields)


def _describe(outcome: Outcome) -> str:
    if not outcome.ended:
        return "had not ended at the deadline"
    if outcome.signal:
        return f"killed by {signal.Signals(outcome.signal).name}"
    assert isinstance(outcome.error, RemoteError)
    return f"{outcome.error.kind}: {outcome.error}\n{outcome.error.traceback}"


class _Parent:
    """The process that forks ranks, as the test process sees it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [forked_python(), __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        self._owner = os.getpid()
        atexit.register(self.close)

    def ask(self, text: str, timeout_s: float) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        _send(self._process.stdin, text)
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                raise RuntimeError("the parent of the ranks does not answer")
        answer = _receive(self._process.stdout)
        if answer is None:
            raise RuntimeError(f"the parent of the ranks died: {self._process.wait()}")
        return ast.literal_eval(answer)

    def close(self) -> None:
        if os.getpid() == self._owner:
            self._process.kill()
            self._process.communicate()


@functools.cache
def _parent() -> _Parent:
    return _Parent()


def _send(pipe: IO[bytes], text: str) -> None:
    data = text.encode()
    pipe.write(len(data).to_bytes(8, "big") + data)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> str | None:
    size = pipe.read(8)
    if len(size) < 8:
        return None
    return pipe.read(int.from_bytes(size, "big")).decode()


# --- processes: the parent's side --------------------------------------------------------------


def _serve() -> None:
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    # An interrupt at the keyboard is for the test process; when it ends, so do we.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while (text := _receive(requests)) is not None:
        request = ast.literal_eval(text)
        folder = tempfile.mkdtemp(prefix="ranks-")
        try:
            answer = repr(_run(request, Path(folder)))
        except Exception:  # noqa: BLE001 - a process's outer edge
            answer = repr(traceback.format_exc())
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        _send(answers, answer)


def _run(request: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    sys.path[:] = request["path"]
    import torch.distributed as dist

    function = getattr(importlib.import_module(request["module"]), request["name"])
    num_threads = len(os.listdir("/proc/self/task")) if Path("/proc/self/task").exists() else 1
    if num_threads > 1:
        raise RuntimeError(f"importing {request['module']} starts threads; it must not")
    gc.freeze()  # what was imported stays: no rank looks through it
    launcher = 0
    if request["store"] == "launcher":
        launcher = _fork(lambda: _serve_store(dist, folder))
    pids, pipes = [], {}
    for rank in range(request["world_size"]):
        read_end, write_end = os.pipe()
        pid = _fork(lambda: _be_rank(rank, function, request, folder, write_end))  # noqa: B023
        os.close(write_end)
        pids.append(pid)
        pipes[read_end] = rank
    results = _gather(pipes, time.monotonic() + request["timeout_s"])
    outcomes = [_reap(pid, results.get(rank)) for rank, pid in enumerate(pids)]
    if launcher:
        os.kill(launcher, signal.SIGKILL)
        os.waitpid(launcher, 0)
    for rank, outcome in enumerate(outcomes):
        output = folder / f"output-{rank}"
        outcome["output"] = output.read_text(errors="replace")[-MAX_OUTPUT_CHARS:]
    return outcomes


def _fork(run: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            # A group of its own, so that what it starts dies with it.
            os.setpgid(0, 0)
            run()
        finally:
            os._exit(0)
    return pid


def _gather(pipes: dict[int, int], deadline: float) -> dict[int, bytes]:
    """Return what each rank has sent, once all have closed their pipes or the time is up.

    A rank that has neither sent anything nor closed its pipe is not in it.
    """
    results: dict[int, bytes] = {}
    with selectors.DefaultSelector() as selector:
        for pipe in pipes:
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map() and (left_s := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                data = os.read(key.fd, 1 << 20)
                results[pipes[key.fd]] = results.get(pipes[key.fd], b"") + data
                if not data:
                    selector.unregister(key.fd)
    for pipe in pipes:
        os.close(pipe)
    return results


def _reap(pid: int, result: bytes | None) -> dict[str, Any]:
    # A rank that has sent its result, or died, may still be ending; any other is late.
    until = time.monotonic() + (10 if result is not None else 0)
    done, status = os.waitpid(pid, os.WNOHANG)
    while not done and time.monotonic() < until:
        time.sleep(0.001)
        done, status = os.waitpid(pid, os.WNOHANG)
    if not done:
        os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    outcome: dict[str, Any] = ast.literal_eval(result.decode()) if result else {}
    outcome["ended"] = bool(done)
    if done and os.WIFSIGNALED(status):
        outcome["signal"] = os.WTERMSIG(status)
    return outcome


# --- processes: a rank's side ------------------------------------------------------------------


def _be_rank(
    rank: int, function: Callable[..., Any], request: Mapping[str, Any], folder: Path, pipe: int
) -> None:
    import torch

    output = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(output, stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(request["environ"])
    if request["launched"]:
        world_size = str(request["world_size"])
        names = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world_size}
        os.environ.update(names, LOCAL_WORLD_SIZE=world_size)
    torch.set_num_threads(1)
    try:
        if request["store"] is not None:
            _join_group(rank, request["world_size"], request["store"], folder)
        value = function(rank, *request["args"])
        result = {"value": value}
        ast.literal_eval(repr(value))
    except BaseException as error:  # noqa: BLE001 - a process's outer edge
        result = {"error": (type(error).__name__, str(error), traceback.format_exc())}
    with os.fdopen(pipe, "wb") as sink:
        sink.write(repr(result).encode())
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()


def _join_group(rank: int, world_size: int, kind: str, folder: Path) -> None:
    import torch.distributed as dist

    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    if kind == "file":
        store: Any = dist.FileStore(str(folder / "store"), world_size)
    elif kind == "rank 0" and rank == 0:
        store = _store_server(dist, folder)
    else:
        store = dist.TCPStore("127.0.0.1", _await_port(folder), None, False, timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)


def _serve_store(dist: Any, folder: Path) -> None:
    store = _store_server(dist, folder)
    while store is not None:
        time.sleep(3600)


def _store_server(dist: Any, folder: Path) -> Any:
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    store = dist.TCPStore("127.0.0.1", 0, None, True, timeout, wait_for_workers=False)
    (folder / "port.tmp").write_text(str(store.port))
    (folder / "port.tmp").rename(folder / "port")
    return store


def _await_port(folder: Path) -> int:
    deadline = time.monotonic() + GROUP_TIMEOUT_S
    while not (folder / "port").exists():
        if time.monotonic() > deadline:
            raise TimeoutError("no store")
        time.sleep(0.002)
    return int((folder / "port").read_text())


if __name__ == "__main__":
    _serve()


def free_port() -> int:
    """Return a port of this machine that nobody listens on just now.

    Systems choose ports from 32768 on: no socket whose port they choose takes this one.
    """
    while True:
        port = random.randrange(20_000, 32_768)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
