"""The control channel and the bulk collectives between real processes that die, freeze and idle."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace

from dist_ckpt.core.comm import process_group
from dist_ckpt.core.comm.collectives import collective, gloo
from dist_ckpt.core.comm.process_group import session_of
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.runtime.processes import find_process
from dist_ckpt.errors import RankError
from exchanges import exchange
from ranks import Options, Outcome, run_ranks, suspend_and_resume, try_ranks

pytestmark = [pytest.mark.multi_process, pytest.mark.waits]

SILENCE_S = 6
# From the death to the error it takes silence, the age of the last beat and a look. On a busy
# machine it takes longer; what waits for anything else waits longer than this.
NOTICED_S = 150

FRAIL = {"DIST_CKPT_HEARTBEAT_TIMEOUT_S": str(SILENCE_S), "DIST_CKPT_JOIN_TIMEOUT_S": "1000"}
# A rank that is stopped is late, up to this time.
FROZEN = {**FRAIL, "DIST_CKPT_JOIN_TIMEOUT_S": "10"}
HASTY = {
    "DIST_CKPT_HEARTBEAT_TIMEOUT_S": "1000",
    "DIST_CKPT_JOIN_TIMEOUT_S": "2",
    "DIST_CKPT_JOIN_WARNING_S": "0.2",
}

STORES = ["file", "rank 0", "launcher"]


def save(session: Session, rank: int, *, phases: int = 2, what: str = "save") -> int:
    """Do what stands for a save: every rank's number is added up."""
    total = 0
    with session.operation(what):
        for phase in range(phases):
            total = exchange(session.channel, str(phase), lambda: rank, sum)
    return total


def gather(session: Session) -> int:
    """Do what stands for the save of a new layout: a bulk collective. Return the world size."""

    def count_ranks() -> int:
        ((data, ranks),) = session.collective.all_gather_distinct(b"x")
        assert data == b"x"
        return len(ranks)

    with session.operation("save"):
        generation = exchange(session.channel, "agree", lambda: session.collective.generation, max)
        session.collective.renew(generation)
        return int(exchange(session.channel, "plan", count_ranks, max))


def told(session: Session, rank: int) -> tuple[str, int | None, str, float]:
    """Save, and return the error that must come: class, rank, message, seconds."""
    return told_by(lambda: save(session, rank))


def told_by(call: Callable[[], object]) -> tuple[str, int | None, str, float]:
    start = time.monotonic()
    try:
        call()
    except RankError as error:
        return type(error).__name__, error.rank, str(error), time.monotonic() - start
    raise AssertionError("the save should have failed")


def assert_told(outcome: Outcome, rank: int, text: str) -> None:
    assert outcome.error is None, outcome
    _, who, message, seconds = outcome.value
    assert who == rank, message
    assert text in message
    assert seconds < NOTICED_S


# --- all is well -------------------------------------------------------------------------------


def exchange_and_gather(rank: int) -> Any:
    session = session_of()
    assert session is session_of(dist.group.WORLD)
    total = save(session, rank)
    bulk = session.collective

    def gather() -> int:
        payloads = bulk.all_gather_distinct(bytes([rank % 2]) * 100_000)
        assert [(payload[:1], len(payload), who) for payload, who in payloads] == [
            (b"\0", 100_000, (0, 2)),
            (b"\1", 100_000, (1, 3)),
        ]
        assert bulk.all_gather_distinct(b"") == ((b"", (0, 1, 2, 3)),)
        own = str(rank).encode()
        assert bulk.all_gather_distinct(own) == tuple((str(r).encode(), (r,)) for r in range(4))
        assert bulk.broadcast(b"zero" if rank == 0 else None) == b"zero"
        assert bulk.broadcast(b"") == b""
        return rank

    with session.operation("load"):
        assert exchange(session.channel, "open", gather, sum) == total
    return total


@pytest.mark.parametrize("store", STORES)
def test_ranks_exchange_and_gather_over_every_store(store):
    assert run_ranks(exchange_and_gather, world_size=4, store=store) == [6, 6, 6, 6]


def test_bulk_collectives_work_if_gloo_connects_at_the_first_message():
    environ = {"TORCH_GLOO_LAZY_INIT": "1"}
    values = run_ranks(exchange_and_gather, world_size=4, store="launcher", environ=environ)
    assert values == [6, 6, 6, 6]


def use_own_groups(rank: int) -> Any:
    """User's groups are made before, between and after ours; not every rank is in each."""
    first = dist.new_group([0, 1])
    odd = dist.new_group([1, 3])
    session = session_of()
    save(session, rank)
    assert gather(session) == 4
    if rank in (1, 3):
        part = session_of(odd)
        assert part.group_ranks == (1, 3)
        assert part.channel.rank == (1, 3).index(rank)
        assert save(part, rank) == 4
        assert gather(part) == 2
    else:
        with pytest.raises(ValueError, match=f"rank {rank} is not in this group"):
            session_of(odd)
    later = dist.new_group([0, 1, 2, 3])
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=later)
    if rank < 2:
        dist.all_reduce(total, group=first)
    dist.barrier()
    return total.item(), save(session, rank)


def test_the_users_own_groups_work_beside_ours_and_a_session_may_be_of_a_part():
    values = run_ranks(use_own_groups, world_size=4)
    assert values == [(12.0, 6), (12.0, 6), (6.0, 6), (6.0, 6)]


def lose_the_training_group(rank: int, folder: str) -> Any:
    """A rank that is late for one collective of a gloo group breaks that group for ever."""
    store = dist.FileStore(f"{folder}/store", 3)
    timeout = timedelta(seconds=0.5)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timeout)
    time.sleep(1.2 if rank == 1 else 0)
    with contextlib.suppress(RuntimeError):
        dist.all_reduce(torch.zeros(1))
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.zeros(1))
    session = session_of()
    assert gather(session) == 3
    return save(session, rank)


def test_nothing_of_ours_goes_over_the_training_group(tmp_path):
    assert run_ranks(lose_the_training_group, str(tmp_path), world_size=3, store=None) == [3, 3, 3]


def fork_a_child(rank: int) -> Any:
    session = session_of()
    save(session, rank)
    child = os.fork()
    if child == 0:
        try:
            save(session, rank)
        except RankError as error:
            os._exit(42 if "forked" in str(error) else 1)
        os._exit(2)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), save(session, rank)


def test_a_forked_child_cannot_speak_for_its_parent():
    assert run_ranks(fork_a_child, world_size=2) == [(42, 1)] * 2


def give_something_else(rank: int) -> str:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    with pytest.raises(TypeError, match=r"mesh.get_group\(\)") as caught:
        session_of(mesh)  # type: ignore[arg-type]
    return str(caught.value)


def test_what_is_no_group_is_refused_with_the_remedy():
    assert "DeviceMesh" in run_ranks(give_something_else, world_size=2)[0]


def start_again(rank: int, folder: str) -> Any:
    """Groups come and go over one store, as in a process that initialises torch twice."""
    dist.destroy_process_group()
    sums = []
    for start in range(3):
        store = dist.PrefixStore(f"user/{start}", dist.FileStore(f"{folder}/user", 2))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        session = session_of()
        sums.append([save(session, rank + start) for _ in range(start + 1)])
        dist.barrier()
        dist.destroy_process_group()
        del session
        gc.collect()
        assert len(process_group._sessions) == 0
        for thread in threading.enumerate():  # told to end, and not waited for
            if "dist_ckpt" in thread.name:
                thread.join(10)
                assert not thread.is_alive()
    return sums


def test_a_session_ends_with_its_group_and_the_next_begins_anew(tmp_path):
    expected = [[1], [3, 3], [5, 5, 5]]
    assert run_ranks(start_again, str(tmp_path), world_size=2, store="file") == [expected] * 2


def exchange_thousands(rank: int) -> tuple[int, int]:
    session = session_of()
    store = dist.distributed_c10d._get_default_store()
    for _ in range(100):
        save(session, rank, phases=5)
    dist.barrier()
    before = store.num_keys()
    dist.barrier()
    for _ in range(300):
        save(session, rank, phases=5)
    dist.barrier()
    return before, store.num_keys()


def test_thousands_of_exchanges_do_not_grow_the_store():
    for before, after in run_ranks(exchange_thousands, world_size=2, store="launcher"):
        assert after <= before + 20


# --- ranks that die, freeze, or never come -----------------------------------------------------


def die_while_others_save(rank: int, victim: int, how: int) -> Any:
    session = session_of()
    save(session, rank)
    dist.barrier()
    if rank == victim:
        os.kill(os.getpid(), how)
    return told(session, rank)


@pytest.mark.parametrize("store", STORES)
def test_a_rank_killed_before_a_save_is_named_by_all_others(store):
    options = Options(store=store, environ=FRAIL)
    outcomes = try_ranks(
        die_while_others_save, 2, signal.SIGKILL.value, world_size=4, options=options
    )
    assert outcomes[2].signal == signal.SIGKILL
    for rank in (0, 1, 3):
        assert_told(outcomes[rank], 2, "rank 2 (host")
        assert outcomes[rank].value[0] == "RankError"


@pytest.mark.parametrize("store", ["file", "launcher"])
def test_a_killed_coordinator_is_named_by_all_others(store):
    options = Options(store=store, environ=FRAIL)
    outcomes = try_ranks(
        die_while_others_save, 0, signal.SIGKILL.value, world_size=3, options=options
    )
    for rank in (1, 2):
        assert_told(outcomes[rank], 0, "is dead or frozen: no heartbeat")
        assert outcomes[rank].value[0] == "NoAnswerError"


def test_a_killed_coordinator_that_served_the_store_is_noticed_at_once():
    options = Options(store="rank 0", environ=FRAIL)
    outcomes = try_ranks(
        die_while_others_save, 0, signal.SIGKILL.value, world_size=3, options=options
    )
    for rank in (1, 2):
        name, _, message, seconds = outcomes[rank].value
        assert name == "NoAnswerError"
        assert "key-value store is gone" in message
        assert "rank 0" in message
        assert seconds < NOTICED_S


def die_in_the_middle(rank: int, victim: int) -> Any:
    session = session_of()
    save(session, rank)
    dist.barrier()

    def write() -> int:
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        return rank

    start = time.monotonic()
    try:
        with session.operation("save"):
            exchange(session.channel, "agree", lambda: rank, sum)
            exchange(session.channel, "write", write, sum)
    except RankError as error:
        return type(error).__name__, error.rank, str(error), time.monotonic() - start
    return None


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_while_it_writes_is_named_with_the_phase(victim):
    options = Options(store="launcher", environ=FRAIL)
    outcomes = try_ranks(die_in_the_middle, victim, world_size=3, options=options)
    for rank in {0, 1, 2} - {victim}:
        assert_told(outcomes[rank], victim, "in phase 'write' of save")


def freeze_one(rank: int, victim: int) -> Any:
    """The victim is frozen when the others save, and thawed when they have given it up."""
    session = session_of()
    save(session, rank)
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(3)]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    if rank == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
        # Thawed. The others have raised by now, and train on; this rank saves at last.
        first = told(session, rank)
    else:
        first = told(session, rank)
        if rank == (victim + 1) % 3:
            time.sleep(0.2)
            os.kill(int(pids[victim].item()), signal.SIGCONT)
    dist.barrier()
    return first, save(session, rank)


def test_a_frozen_rank_is_named_and_gets_the_same_error_when_it_thaws():
    for rank, (first, total) in enumerate(run_ranks(freeze_one, 1, world_size=3, environ=FROZEN)):
        name, who, message, seconds = first
        assert (name, who) == ("RankError", 1)
        assert "rank 1 (host" in message
        assert "is stopped, and has not run Python for " in message
        assert seconds < NOTICED_S, rank
        assert total == 3


def test_a_frozen_coordinator_is_named_and_all_can_save_again_when_it_thaws():
    values = run_ranks(freeze_one, 0, world_size=3, store="launcher", environ=FROZEN)
    for first, total in values:
        assert total == 3
        assert first[3] < NOTICED_S
    for first, _ in values[1:]:
        assert first[:2] == ("NoAnswerError", 0)
        assert "is stopped, and has not run Python for " in first[2]
    # Whether the others have left, or have given up the call of a rank that never entered.
    texts = ("is no longer taking part", "did not call save")
    assert any(text in values[0][0][2] for text in texts)


def test_a_frozen_coordinator_that_serves_the_store_does_not_hang_the_others():
    values = run_ranks(freeze_one, 0, world_size=3, store="rank 0", environ=FRAIL)
    for first, total in values:
        assert total == 3
        assert first[3] < NOTICED_S
    for first, _ in values[1:]:
        assert first[0] == "NoAnswerError"
        assert "key-value store is gone or cut off (no answer for 6 s)" in first[2]


# --- ranks that live and run no Python ---------------------------------------------------------

# Whoever lives is late at most, so a busy machine does no harm.
QUIET = {"DIST_CKPT_HEARTBEAT_TIMEOUT_S": "2", "DIST_CKPT_JOIN_TIMEOUT_S": "1000"}


# What a rank does in a bulk collective: it shows its address, connects, and sends its part.
WINDOWS = {
    "address": (gloo._Rendezvous, "set"),
    "connect": (gloo._Rendezvous, "get"),
    "gather": (collective, "payload_name"),
}


def in_window(where: str, act: Callable[[], object]) -> None:
    """Act once, at this moment of this rank's next bulk collective."""
    owner, name = WINDOWS[where]
    original = getattr(owner, name)

    def hooked(*args: Any) -> Any:
        setattr(owner, name, original)
        act()
        return original(*args)

    setattr(owner, name, hooked)


class OnWarning(logging.Handler):
    """Acts once, when a warning has a text."""

    def __init__(self, text: str, act: Callable[[], object]) -> None:
        super().__init__(logging.WARNING)
        self.seen = ""
        self._text, self._act = text, act
        logging.getLogger("dist_ckpt").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if self._text in record.getMessage() and not self.seen:
            self.seen = record.getMessage()
            self._act()


# The machine of each rank: which ranks are witnesses for each other.
ONE_HOST, TWO_HOSTS, HOSTS = ["a", "a", "a"], ["a", "b", "b"], ["a", "b", "c"]


def move_to(machine: str) -> None:
    """Let this rank be a process of another machine, whose `/proc` the others cannot read."""
    own = find_process(os.getpid())
    assert own is not None
    module: Any = process_group
    module.find_process = lambda _: replace(own, machine=machine)


def be_late(
    rank: int, fifo: str, how: str, where: str, machines: list[str]
) -> tuple[str, int, int]:
    """Rank 1 holds the interpreter's lock, or is stopped, until rank 0 has logged that."""
    move_to(machines[rank])
    pipe = os.open(fifo, os.O_RDWR)
    session = session_of()
    first = save(session, rank)
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(3)]
    dist.all_gather(pids, torch.tensor([os.getpid()]))

    def release() -> None:
        if how == "stopped":
            os.kill(int(pids[1].item()), signal.SIGCONT)
        else:
            os.write(pipe, b"xx")

    def hold() -> None:
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:  # as a pickle, a compiler or `gc.collect` of a large heap
            ctypes.PyDLL(None).read(pipe, ctypes.create_string_buffer(1), 1)

    def work() -> int:
        if where == "write" and (rank == 1 or (rank == 2 and how == "both locked")):
            hold()
        if where != "write":
            if rank == 1:
                in_window(where, hold)
            session.collective.all_gather_distinct(b"x")
        return rank

    warned = OnWarning("has not run Python for ", release if rank == 0 else lambda: None)
    with session.operation("save"):
        exchange(session.channel, "agree", lambda: rank, sum)
        second = int(exchange(session.channel, where, work, sum))
    return warned.seen, first, second


@pytest.mark.parametrize(
    ("how", "where", "machines", "text"),
    [
        ("locked", "write", ONE_HOST, "is alive, but has not run Python for "),
        ("locked", "write", TWO_HOSTS, "is alive, but has not run Python for "),
        ("locked", "write", HOSTS, "is alive, but has not run Python for "),
        ("both locked", "write", TWO_HOSTS, "is alive, but has not run Python for "),
        ("stopped", "write", TWO_HOSTS, "is stopped, and has not run Python for "),
        ("stopped", "write", HOSTS, "is alive, but has not run Python for "),
        ("locked", "address", ONE_HOST, "is alive, but has not run Python for "),
        ("stopped", "connect", ONE_HOST, "is stopped, and has not run Python for "),
        ("locked", "gather", TWO_HOSTS, "is alive, but has not run Python for "),
    ],
)
def test_a_rank_that_lives_and_runs_no_python_is_named_and_waited_for(
    how: str, where: str, machines: list[str], text: str, tmp_path: Path
) -> None:
    """Of another machine, a rank that runs there tells it, and else the kernel there."""
    fifo = str(tmp_path / "fifo")
    os.mkfifo(fifo)
    found = run_ranks(be_late, fifo, how, where, machines, world_size=3, environ=QUIET)
    assert found[0][0].startswith("rank 1 (host ")
    assert text in found[0][0]
    assert [sums for _, *sums in found] == [[3, 3]] * 3


def leave_a_worker(rank: int, fifo: str, machines: list[str]) -> tuple[str, int | None, str, float]:
    """Rank 1 is killed, and a worker of its data loader lives on."""
    move_to(machines[rank])
    session = session_of()
    save(session, rank)
    pipe = os.open(fifo, os.O_RDWR)
    if rank == 1 and os.fork() == 0:
        os.read(pipe, 1)
        os._exit(0)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    first = told(session, rank)
    if rank == 0:
        os.write(pipe, b"x")
    return first


@pytest.mark.parametrize(
    ("machines", "fact"),
    [
        (ONE_HOST, "its process has ended"),
        (HOSTS, "its port is closed: it has ended, or is cut off"),
    ],
)
def test_a_worker_that_outlives_its_rank_does_not_keep_it_alive(
    machines: list[str], fact: str, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "fifo")
    options = Options(environ={**FRAIL, "DIST_CKPT_HEARTBEAT_TIMEOUT_S": "3"})
    outcomes = try_ranks(
        leave_a_worker, str(tmp_path / "fifo"), machines, world_size=3, options=options
    )
    for rank in (0, 2):
        assert_told(outcomes[rank], 1, f"no heartbeat for 3 s, and {fact}")


class Link:
    """A connection to a store that forwards bytes until it is cut, and then drops them."""

    def __init__(self, store: dist.TCPStore) -> None:
        self.is_cut = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._store = store
        threading.Thread(target=self._accept, daemon=True).start()
        self.port = self._listener.getsockname()[1]

    def _accept(self) -> None:
        near = self._listener.accept()[0]
        far = socket.create_connection((self._store.host, self._store.port))
        for ends in ((near, far), (far, near)):
            threading.Thread(target=self._forward, args=ends, daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(1 << 16):
            if not self.is_cut:
                target.sendall(data)


def cut_a_link(rank: int, machines: list[str]) -> tuple[str, int | None, str, float] | str:
    """The link of rank 1 to the store drops all bytes, while it works and its process is well."""
    move_to(machines[rank])
    job = dist.distributed_c10d._get_default_store()
    store: Any = job
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    link = Link(store)
    port = link.port if rank == 1 else store.port
    module: Any = process_group
    module._connect_to_store = lambda _: dist.TCPStore(store.host, port, is_master=False)
    session = session_of()
    save(session, rank)
    dist.barrier()

    def work() -> int:
        link.is_cut = True
        if rank == 1:  # the connection of torch itself is well
            job.wait(["0 has the error", "2 has the error"], timedelta(seconds=2 * NOTICED_S))
        return rank

    start = time.monotonic()
    try:
        with session.operation("save"):
            exchange(session.channel, "agree", lambda: rank, sum)
            exchange(session.channel, "write", work, sum)
    except RankError as error:
        job.set(f"{rank} has the error", "")
        return type(error).__name__, error.rank, str(error), time.monotonic() - start
    return ""


@pytest.mark.parametrize(
    ("machines", "text"),
    [
        (ONE_HOST, "its process lives, but is cut off from the key-value store"),
        (HOSTS, "its port is closed: it has ended, or is cut off from the key-value store"),
    ],
)
def test_a_live_rank_whose_link_is_cut_is_named_before_the_limit_of_late_ranks(
    machines: list[str], text: str
) -> None:
    options = Options(store="launcher", environ=FRAIL)
    outcomes = try_ranks(cut_a_link, machines, world_size=3, options=options)
    assert "key-value store is gone or cut off" in outcomes[1].value[2]
    for rank in (0, 2):
        assert_told(outcomes[rank], 1, text)


def save_on_rank_0_only(rank: int) -> Any:
    session = session_of()
    first = told(session, rank) if rank == 0 else None
    dist.barrier()
    return first, [save(session, rank) for _ in range(3)]


def test_a_rank_that_never_calls_is_named_and_the_next_save_works():
    values = run_ranks(save_on_rank_0_only, world_size=3, environ=HASTY)
    name, who, message, seconds = values[0][0]
    assert (name, who) == ("RankError", 1)
    assert "ranks 1-2 did not call save" in message
    assert "if rank == 0:" in message
    assert seconds < NOTICED_S
    assert [sums for _, sums in values] == [[3, 3, 3]] * 3


def raise_on_one(rank: int) -> Any:
    session = session_of()
    messages = []
    for victim in range(3):
        try:
            with session.operation("save"):
                exchange(session.channel, "agree", int, len)
                exchange(session.channel, "write", lambda: 1 // (rank - victim) and 0, len)  # noqa: B023
        except RankError as error:
            messages.append(str(error).replace(session.channel.host, "a"))
    return messages, save(session, rank)


def test_an_error_of_one_rank_is_raised_by_all_and_they_go_on():
    text = "rank {} (host a): ZeroDivisionError: integer division or modulo by zero"
    expected = ([text.format(victim) for victim in range(3)], 3)
    assert run_ranks(raise_on_one, world_size=3) == [expected] * 3


def end_with_a_save(rank: int) -> int:
    """The others read the last answer a moment after rank 0, which takes the store with it."""
    session = session_of()
    with session.operation("save"):
        exchange(session.channel, "agree", int, len)
        return int(exchange(session.channel, "write", lambda: rank, sum))


def test_a_job_may_end_with_a_save():
    for _ in range(5):
        assert run_ranks(end_with_a_save, world_size=4, store="rank 0") == [6, 6, 6, 6]


def end_without_saving(rank: int) -> Any:
    session = session_of()
    save(session, rank)
    return None if rank == 1 else told(session, rank)


def test_a_rank_whose_process_ends_is_named_at_once():
    outcomes = try_ranks(end_without_saving, world_size=3, options=Options(store="launcher"))
    for rank in (0, 2):
        assert_told(outcomes[rank], 1, "has ended")


# --- bulk collectives that fail ----------------------------------------------------------------


def lose_the_bulk_connections(rank: int) -> Any:
    session = session_of()

    def bulk(*, skip: bool) -> bytes:
        with session.operation("load"):
            session.collective.renew(
                exchange(session.channel, "open", lambda: session.collective.generation, max)
            )

            def receive() -> bytes:
                if skip and rank == 1:
                    raise ValueError("bad index")
                return session.collective.broadcast(b"data" if rank == 0 else None)

            return bytes(exchange(session.channel, "index", receive, lambda parts: parts[-1]))

    first = bulk(skip=False)
    try:
        bulk(skip=True)
    except (ValueError, RankError) as error:
        failed = str(error)
    return first, failed, bulk(skip=False), session.collective.generation


def test_bulk_connections_that_fail_are_made_anew():
    environ = {"DIST_CKPT_HEARTBEAT_TIMEOUT_S": "1"}
    for first, failed, second, epoch in run_ranks(
        lose_the_bulk_connections, world_size=3, environ=environ
    ):
        assert first == second == b"data"
        assert "bad index" in failed
        assert epoch <= 1


def die_in_the_bulk(rank: int, where: str) -> Any:
    session = session_of()
    if rank == 1:
        in_window(where, lambda: os.kill(os.getpid(), signal.SIGKILL))
    return told_by(lambda: gather(session))


@pytest.mark.parametrize("where", WINDOWS)
def test_a_rank_killed_in_a_bulk_collective_is_named(where: str) -> None:
    options = Options(store="launcher", environ=QUIET)
    outcomes = try_ranks(die_in_the_bulk, where, world_size=3, options=options)
    for rank in (0, 2):
        assert_told(outcomes[rank], 1, "in phase 'plan' of save")


def freeze_in_the_bulk(rank: int) -> Any:
    """Rank 1 is frozen until the others have given it up."""
    session = session_of()
    assert gather(session) == 3
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(3)]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    if rank == 1:
        in_window("gather", lambda: os.kill(os.getpid(), signal.SIGSTOP))
    first = told_by(lambda: gather(session))
    if rank == 2:
        os.kill(int(pids[1].item()), signal.SIGCONT)
    dist.barrier()
    return first, gather(session)


def test_a_rank_frozen_in_a_bulk_collective_is_named_at_the_limit_of_late_ranks() -> None:
    environ = {**QUIET, "DIST_CKPT_JOIN_TIMEOUT_S": "8"}
    found = run_ranks(freeze_in_the_bulk, world_size=3, environ=environ)
    for (name, who, message, seconds), num_ranks in found:
        assert (name, who) == ("RankError", 1)
        assert "is stopped, and has not run Python for " in message
        assert 7 < seconds < NOTICED_S
        assert num_ranks == 3


BUSY_CONNECT_S = 2.0


def be_suspended(rank: int, where: str, folder: str) -> tuple[int, int]:
    """Rank 1 keeps the others in a bulk collective until the job is suspended and resumed."""
    gloo.CONNECT_S = BUSY_CONNECT_S
    session, resumed = session_of(), Path(folder, "resumed")

    def hold() -> None:
        Path(folder, f"{os.getpid()}.pid").touch()
        while rank == 1 and not resumed.exists():
            time.sleep(0.01)

    in_window(where, hold)
    return gather(session), gather(session)


@pytest.mark.parametrize("where", ["connect", "gather"])
def test_a_job_that_is_suspended_in_a_bulk_collective_goes_on(where: str, tmp_path: Path) -> None:
    """It is suspended for longer than a collective of ranks that run may take."""
    environ = {**QUIET, "DIST_CKPT_HEARTBEAT_TIMEOUT_S": "1"}
    suspend = partial(suspend_and_resume, tmp_path, 3, 1.0 + BUSY_CONNECT_S + 0.5)
    suspender = threading.Thread(target=suspend)
    suspender.start()
    found = run_ranks(be_suspended, where, str(tmp_path), world_size=3, environ=environ)
    suspender.join()
    assert found == [(3, 3)] * 3


def kind_of_channel(rank: int) -> str:
    return type(session_of().channel).__name__


def test_a_process_group_of_one_rank_is_alone():
    assert run_ranks(kind_of_channel, world_size=1, launched=True) == ["SingleProcessChannel"]
