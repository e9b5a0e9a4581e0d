"""The session of a process group: created once, and kept as long as the group lives."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping
from typing import cast
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import PrefixStore, Store

from dist_ckpt.core.comm.collectives.collective import SingleProcessCollective
from dist_ckpt.core.comm.collectives.gloo import GlooCollective
from dist_ckpt.core.comm.exchange.channel import SingleProcessChannel
from dist_ckpt.core.comm.exchange.store_channel import StoreChannel
from dist_ckpt.core.comm.key_value import client_thread
from dist_ckpt.core.comm.rank_messages import NoAnswerError, RankLocation
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.runtime import torch_private
from dist_ckpt.core.runtime.processes import find_process
from dist_ckpt.core.runtime.threads import DaemonThreads, has_outcome
from dist_ckpt.settings import UNKNOWN_GROUP_TIMEOUT_S, Settings, launched_world_size

# Connections and a cached plan are costly, so they are kept; they must not outlive the group.
_sessions: WeakKeyDictionary[ProcessGroup, Session] = WeakKeyDictionary()

# Without torch.distributed no group exists. Then each thread has a session, which ends with the
# thread. A forked process gets a copy.
_of_thread = threading.local()


def session_of(group: ProcessGroup | None = None) -> Session:
    """Return the session of a process group, or of the whole job. Every rank of it calls this.

    Without torch.distributed it is a session of this process, kept for this thread. ValueError if
    this rank is not in the group, or if a launcher has started several ranks without a process
    group. NoAnswerError if the job's store is gone.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return _session_of_thread(group, os.environ)
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, ProcessGroup):
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(
                f"rank {dist.get_rank()} is not in this group: call this on the group's ranks only"
            )
        raise TypeError(
            f"group is a {type(group).__name__}: give a torch.distributed.ProcessGroup (of a "
            "DeviceMesh: mesh.get_group())"
        )
    if group not in _sessions:
        timeout_s = torch_private.group_timeout_s(group) or UNKNOWN_GROUP_TIMEOUT_S
        settings = Settings.from_environment(group_timeout_s=timeout_s)
        _sessions[group] = _create_session(group, settings)
    return _sessions[group]


def _session_of_thread(group: object, environ: Mapping[str, str]) -> Session:
    world_size = launched_world_size(environ)
    if world_size > 1:
        raise ValueError(
            f"WORLD_SIZE is {world_size}, but no process group exists: add "
            "`torch.distributed.init_process_group()` before this line, so that the ranks can "
            "agree on one checkpoint"
        )
    if group is not None:
        raise ValueError(
            "group= is given, but torch.distributed is not initialised: add "
            "`torch.distributed.init_process_group()` before this line, or leave out group="
        )
    settings = Settings.from_environment()
    session: Session | None = getattr(_of_thread, "session", None)
    if session is None or session.settings != settings:
        session = _of_thread.session = Session(
            SingleProcessChannel(), SingleProcessCollective(), settings
        )
    return session


def _create_session(group: ProcessGroup, settings: Settings) -> Session:
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    ranks = tuple(dist.get_process_group_ranks(group))
    if world_size == 1:
        return Session(SingleProcessChannel(), SingleProcessCollective(), settings, ranks)
    name = group.group_name

    def open_store(part: str) -> Store:
        return PrefixStore(
            f"dist_ckpt/{name}/{part}", _connect_to_store(settings.heartbeat_timeout_s)
        )

    # Torch's stores take bytes as values; its stubs leave them out.
    control = cast(client_thread.Store, open_store("control"))
    channel = StoreChannel(
        control,
        rank,
        world_size,
        location=RankLocation(settings.host or socket.gethostname(), find_process(os.getpid())),
        settings=settings,
    )
    collective = GlooCollective(open_store, channel, settings)
    return Session(channel, collective, settings, ranks)


def _connect_to_store(timeout_s: float) -> Store:
    """Return a connection of our own to the job's store. NoAnswerError if it is gone.

    A thread that waits in a TCPStore blocks all others on the same connection. A reference to the
    store itself would let its server outlive `destroy_process_group`.
    """
    store = torch_private.default_store()
    if not hasattr(store, "clone"):  # before torch 2.8: share the job's connection
        return store
    try:
        # The thread gives the call a deadline. Torch has only the group's, which does not apply if
        # the store's process is frozen.
        answer = DaemonThreads(1).submit(store.clone)
        if has_outcome(answer, timeout_s):
            own: Store = answer.result(timeout=0)
            return own
        fact = f"no answer for {timeout_s:g} s"
    except (RuntimeError, OSError) as error:
        fact = client_thread.summarize_error(error)
    raise NoAnswerError(client_thread.JOB_STORE_TEXTS.gone.format(fact))


def single_process_session() -> Session:
    """Return a session of this rank alone, without the other ranks of its job."""
    settings = Settings.from_environment()
    return Session(
        SingleProcessChannel(), SingleProcessCollective(), settings, job_ranks_own_first()
    )


def job_ranks_own_first() -> tuple[int, ...]:
    """Return the ranks of the job, this one first, as if it were rank 0 of a group."""
    if not (dist.is_available() and dist.is_initialized()):
        return (0,)
    own = dist.get_rank()
    return (own, *(rank for rank in range(dist.get_world_size()) if rank != own))
