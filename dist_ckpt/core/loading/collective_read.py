"""Reading what others have planned, by the ranks of a group together: check, prepare, read.

These are the last steps of a load, for callers with a plan of their own: nothing is bound to a
state, and nothing placed. As in a load no byte lands anywhere before every rank has opened its
files, what several ranks of a host want is read once, and an error of one rank is everybody's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace

from dist_ckpt.core.checkpoint.open_checkpoint import OpenCheckpoint
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.loading.load_messages import common_bits, short
from dist_ckpt.core.loading.read_once.read_once import read_shared
from dist_ckpt.core.loading.read_once.read_once_agreement import (
    SharedReadGroup,
    UnreachableRanks,
    gather_requests,
    listen,
    runs_of,
)
from dist_ckpt.core.planning.load.load_planner import plan_load
from dist_ckpt.core.planning.load.read_sharing import BlockRequests
from dist_ckpt.core.planning.plan import ReadItem, TensorRequest
from dist_ckpt.core.runtime import typed_msgpack
from dist_ckpt.core.runtime.gc_pause import paused_collector
from dist_ckpt.core.runtime.typed_msgpack import Message
from dist_ckpt.core.shard_io.read.block_reader import BlockReader
from dist_ckpt.core.shard_io.read.open_files import MAX_OPEN, OpenFile, OpenFiles, open_files
from dist_ckpt.core.shard_io.read.read_work import CellTargets
from dist_ckpt.core.state.binding.sources.saved_tree import SavedTree
from dist_ckpt.core.state.binding.sources.scopes import tagged, untagged
from dist_ckpt.reports import Phases


@dataclass(frozen=True, slots=True)
class OpenedInput:
    """The open files that a rank reads, and where their cells go."""

    files: OpenFiles
    targets: CellTargets


class _ReadRequests(Message, frozen=True):
    """What one rank reads, None if it is too long to be told here; `bulk` numbers connections."""

    wants: bytes | None
    bulk: int


class _InCommon(Message, frozen=True):
    """Whether ranks share what they read, and what each wants, if that is not yet to be told."""

    shares: bool
    wants: tuple[bytes, ...]
    bulk: int


@dataclass(frozen=True, slots=True)
class CollectiveReader:
    """The ranks that read together, and how. `phases` tell what took how long on this rank.

    `meeting` is a name that this reading alone has, the same on all ranks; with "" nothing is
    shared.
    """

    ranks: Session
    phases: Phases
    meeting: str


def read_together(
    together: CollectiveReader,
    open_files: Callable[[], OpenedInput],
    there: Callable[[], AbstractContextManager[None]],
) -> tuple[int, int]:
    """Fill the targets of each rank. Collective: every rank of the session calls this.

    `open_files` touches no target; `there` surrounds all that is done with files. Returns how many
    bytes came from storage, and how many from other ranks of the host; all ranks have all that
    they want then. Raises on all ranks what `open_files` or `BlockReader.run` raises on one.
    """
    ranks, phases = together.ranks, together.phases
    with ExitStack() as stack:
        with phases.phase("check"):
            opened, shared = _meet(ranks, together.meeting, open_files, there, stack)
        with phases.phase("read"), ranks.channel.exchange("read"), there():
            reading = BlockReader(opened.files, opened.targets, verify=True, slots=ranks.slots)
            return run(ranks, shared, reading)


def run(ranks: Session, shared: SharedReadGroup | None, reading: BlockReader) -> tuple[int, int]:
    """Do a reading, of which `shared` is what other ranks want too; see `read_shared`."""
    try:
        if shared is None:
            return reading.run(ranks.config.threads), 0
        return read_shared(shared, reading)
    except BaseException:
        if shared is not None:
            shared.give_up()
        raise


def _meet(
    ranks: Session,
    meeting: str,
    open_files: Callable[[], OpenedInput],
    there: Callable[[], AbstractContextManager[None]],
    stack: ExitStack,
) -> tuple[OpenedInput, SharedReadGroup | None]:
    """Open the files, tell what is wanted of them, and link the ranks that want the same."""
    with ranks.channel.exchange("check") as checking:
        with there():
            opened = open_files()
        stack.callback(opened.files.close)
        links = listen(ranks, meeting, stack) if meeting else None
        of_rank = BlockRequests.of(ranks.channel.host, runs_of(opened.files)) if meeting else None
        own = b"" if of_rank is None else typed_msgpack.encode(of_rank)
        request = _ReadRequests(short(own, ranks.channel.world_size), ranks.collectives_group.epoch)
        gathered = checking.gather(request)
        if gathered is not None:
            shares, wants = common_bits([one.wants for one in gathered], between_hosts=False)
            checking.decide(_InCommon(shares, tuple(wants), max(one.bulk for one in gathered)))
    common = checking.result(_InCommon)
    ranks.collectives_group.renew(common.bulk)
    if not common.shares:
        return opened, None
    with ranks.channel.exchange("prepare") as preparing:
        every = gather_requests(ranks, common.wants, own)
        shared = SharedReadGroup.of(
            ranks, opened.files, links, every, between_hosts=False, stack=stack
        )
        apart = preparing.gather(shared.missed)
        if apart is not None:
            preparing.decide(shared.judge(apart))
    shared = shared.settle(preparing.result(UnreachableRanks))
    return opened, shared if any(shared.units.values()) else None


# --- the files of several checkpoints --------------------------------------------------------


def by_checkpoint(wanted: Iterable[TensorRequest], saved: SavedTree) -> list[list[TensorRequest]]:
    """Return what is wanted of each checkpoint, by the names there."""
    if not saved.origins:
        return [[*wanted]]
    found: list[list[TensorRequest]] = [[] for _ in saved.origins]
    for want in wanted:
        number, fqn = untagged(want.fqn)
        found[number].append(want._replace(fqn=fqn))
    return found


def open_all(
    checkpoints: Sequence[OpenCheckpoint],
    wanted: Sequence[Sequence[TensorRequest]],
    saved: SavedTree,
    *,
    threads: int,
    stack: ExitStack,
) -> OpenFiles:
    """Open what is to be read; `stack` gets what closes it. Raises what `open_files` does.

    The files of several checkpoints are numbered one after another, alike on all ranks, and what
    is read of them has the names that `saved` has.
    """
    opened: list[OpenFiles] = []
    for one, some in zip(checkpoints, wanted, strict=True):
        with paused_collector():
            plan = plan_load(one.index, some)
        most = MAX_OPEN // len(checkpoints)
        files = open_files(
            one.storage, one.folder, one.index, plan, threads=threads, most_open=most
        )
        stack.callback(files.close)
        opened.append(files)
    return _joined(opened, checkpoints) if saved.origins else opened[0]


def _joined(opened: Sequence[OpenFiles], checkpoints: Sequence[OpenCheckpoint]) -> OpenFiles:
    plan: dict[int, tuple[ReadItem, ...]] = {}
    files: dict[int, OpenFile] = {}
    first = 0
    for number, (one, found) in enumerate(zip(opened, checkpoints, strict=True)):
        for file, items in one.plan.items():
            plan[first + file] = tuple(replace(i, fqn=tagged(number, i.fqn)) for i in items)
            files[first + file] = one.files[file]
        first += len(found.index.files)
    return OpenFiles(plan, files)
