"""`dc.load`: open, check; then read, place, load objects.

To read is to bring bytes, verified, into the memory of their tensors, which is the state's own
where it has some. To place is to hang into the state what is no such memory: plain values, and
tensors that the load has made.
Until every rank has passed the check nothing that the caller holds is touched; afterwards each
step begins only when the one before has succeeded everywhere. A step in which no rank has anything
to do is left out: in the check all ranks learn which.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import reduce

from torch.distributed import ProcessGroup

from dist_ckpt.core.checkpoint.open_checkpoint import (
    NATIVE,
    NOTHING_IN_MEMORY,
    MemorySource,
    OpenCheckpoint,
    Opener,
)
from dist_ckpt.core.comm.exchange.channel import COORDINATOR
from dist_ckpt.core.comm.process_group import session_of
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.commit.attempts import ROUNDS
from dist_ckpt.core.commit.records.record_store import note_verified
from dist_ckpt.core.loading.check import (
    LoadArguments,
    LoadCall,
    PreparedLoad,
    check_load,
    read_arguments,
)
from dist_ckpt.core.loading.load_messages import (
    CheckFindings,
    JobTotals,
    LoadDecision,
    OpenedMessage,
    RankTotals,
    ResolvedSources,
    decide_load,
    find,
    found_in,
    total_reports,
)
from dist_ckpt.core.loading.load_options import LoadOptions, ReadOnce, Sources, text_of
from dist_ckpt.core.loading.shared_read import run, verify_shared
from dist_ckpt.core.loading.shared_read_group import (
    SharedReadGroup,
    UnreachableRanks,
    gather_requests,
)
from dist_ckpt.core.planning.selection import SELECT_ALL, Cast
from dist_ckpt.core.planning.sharding_config import ShardingConfig
from dist_ckpt.core.runtime import typed_msgpack
from dist_ckpt.core.runtime.public_names import refuse_old_parameters
from dist_ckpt.core.shard_io.read.block_reader import BlockReader
from dist_ckpt.core.shard_io.read.read_work import CellTargets, nbytes_placed_by
from dist_ckpt.core.state.tree.containers import MutableState
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import CorruptError, NotFoundError, StorageError
from dist_ckpt.reports import IoCount, LoadReport, Phases

_log = logging.getLogger("dist_ckpt")


@refuse_old_parameters(frozen="include_frozen")
def load(
    state: MutableState,
    path: Sources,
    *,
    sharding: ShardingConfig | None = None,
    group: ProcessGroup | None = None,
    strict: bool = True,
    verify: bool = True,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    rename: Mapping[str, str | None] | None = None,
    include_frozen: bool = True,
    check_first: bool = False,
    read_once: ReadOnce = "host",
    cast: Cast = None,
    config: Mapping[str, object] | None = None,
    kind: str | None = None,
    opener: Opener = NATIVE,
) -> LoadReport:
    """Fill a state from the checkpoint at `path`. Collective: every rank of `group` calls this.

    `path` may also be several sources: a list, of which the first that has a name gives it, or a
    mapping from keys of the state, or dotted names below them, each to a source or a list; and a
    source may be a `dc.Source`, with patterns and a rename of its own. What lies at no key of a
    mapping is in no source, and missing. All are checked before the first byte lands.

    `path` may name one of a run, such as "runs/a@latest" or "runs/a@min:val/loss": the ranks load
    what rank 0 finds, and where a run keeps records it is held meanwhile against being pruned.

    `path` may be a safetensors file of another system, or a folder of them as Hugging Face writes
    it: what is in them is the state of a model, `{"model": model}`. Such files have no digests.

    Any layout loads into any other. Names, shapes, dtypes, coverage, file sizes and headers are
    agreed by all ranks before the first byte lands: until then nothing is touched. Every block is
    checked as it is read. If one is damaged, all ranks raise the same CorruptError, whose
    `touched` names the tensors that may hold partial data; no object's `load_state_dict` has run.
    Tensors of the state that share memory get it as long as what was saved agrees where they do;
    else IncompatibleError names two of them once everything is read.
    With `check_first` all blocks are verified before the first byte lands, by reading twice, all
    of it through the page cache.

    What several ranks want is fetched from storage by one of them, checked, and handed on:
    `read_once="host"` does so among the ranks of each host, through shared memory; "job" among
    all, over the network between hosts, where that is faster than the storage; with "off" each
    rank reads all that it wants, through the page cache. With "host" and "job", what the page
    cache does not hold is read past it. `DIST_CKPT_HOST` renames a host.

    `strict` makes names that are missing or unexpected an error; shape, dtype and coverage always
    are one. `include` and `exclude` are globs that cut both sides, and each must match something;
    `rename` maps saved names to names here, with `*` for any text and `{name}` for one without
    dots. With `include_frozen=False` parameters that require no gradient stay as they are. An empty
    mapping or None in the state takes what was saved there.

    Nothing is cast unless `cast` says so: True, or patterns of names. Then tensors of the state
    that have another floating dtype than was saved get the values converted, block by block as
    they are read; so do others where nothing is lost, such as int32 into int64. IncompatibleError,
    once all is read, if a finite value would be infinite. What the load makes has the saved dtype.

    `config` and `kind` are compared with those that the checkpoint was saved with, before anything
    is touched: IncompatibleError tells each difference, also that it was saved without them.

    What background saves have left of this very checkpoint in the memory of a host is taken from
    there, checked like what is read from storage, unless another process still trains on it.
    `opener` turns paths into checkpoints: the default one does all of this.
    """
    options = LoadOptions(
        sharding=sharding,
        strict=strict,
        verify=verify,
        check_first=check_first,
        include=include,
        exclude=exclude,
        rename=rename,
        include_frozen=include_frozen,
        read_once=read_once,
        cast=cast,
        config=config,
        kind=kind,
    )
    ranks = session_of(group)
    return load_together(ranks, state, path, options, kept=opener.memory, opener=opener)


def load_together(
    ranks: Session,
    state: MutableState,
    path: Sources,
    options: LoadOptions,
    storage: Storage | None = None,
    kept: MemorySource = NOTHING_IN_MEMORY,
    *,
    opener: Opener = NATIVE,
) -> LoadReport:
    """Load over a given session. Collective: every rank of the session calls this.

    `opener` opens the paths, those of `storage` excepted, and resolves selectors. What `kept` has
    in memory is not read from the storage; if it proves damaged, all of it is.
    """
    call = LoadCall(ranks, state, path, options, storage, kept, opener)
    try:
        return _load(call)
    except _DamagedInMemoryError as error:
        path_and_why = text_of(path), error.__cause__
        _log.warning("%s: %s. All of it is read from storage now", *path_and_why)
    return _load(replace(call, kept=NOTHING_IN_MEMORY))


class _DamagedInMemoryError(Exception):
    """What was read from memory is damaged, the cause says how; the storage has it too.

    Every rank raises it, and knows from the check whether any reads from memory: so they decide
    alike.
    """


def _load(call: LoadCall) -> LoadReport:
    ranks, where = call.ranks, text_of(call.path)
    with ranks.operation(f"load of {where}"), ExitStack() as held, ExitStack() as stack:
        phases = Phases("load", where, quiet=ranks.channel.rank != COORDINATOR)
        asked, checked, passed = _agree(call, phases, held, stack)
        try:
            totals, job = _fill(call, checked, passed, phases, stack)
        except CorruptError as error:
            if passed.from_memory and not call.kept.is_only_copy:
                raise _DamagedInMemoryError from error
            raise
        binding, (first, *_) = checked.binding, checked.found.checkpoints
        report = LoadReport(
            path=first.path,
            step=first.index.step,
            attempt=first.index.attempt,
            world_size=ranks.channel.world_size,
            restored=binding.restored,
            resharded=binding.resharded,
            missing=binding.missing,
            unexpected=passed.unexpected,
            dropped=binding.dropped,
            nbytes_read=totals.nbytes_read,
            nbytes_received=totals.nbytes_received,
            nbytes_placed=totals.nbytes_placed,
            nbytes_from_memory=sum(one.storage.from_memory.nbytes for one in asked.places),
            job_nbytes_read=job.nbytes_read,
            job_nbytes_placed=job.nbytes_placed,
            seconds=phases.seconds,
            slowest_rank=job.slowest_rank,
            slowest_s=job.slowest_s,
            exchanges=ranks.exchanges,
            collectives=ranks.collectives,
            storage_reads=reduce(IoCount.plus_all, (one.counting.reads for one in asked.places)),
            sources=checked.sources(),
            as_saved=call.options.rename is None
            and all(use.source.rename is None for use in asked.uses),
        )
        is_noted = call.options.notes and ranks.channel.rank == COORDINATOR
        if is_noted and _is_complete(call.options, asked, report, passed):
            where_of = first.index.step or 0, first.attempt
            note_verified(asked.places[0].counting, report.path, where_of, "load")
        phases.done(report)
        return report


def _is_complete(
    options: LoadOptions, asked: LoadArguments, report: LoadReport, passed: LoadDecision
) -> bool:
    """Say whether a load has read and checked all that a checkpoint of a step holds."""
    return (
        report.step is not None
        and options.verify
        and asked.selection == SELECT_ALL
        and not (report.unexpected or report.dropped or passed.from_memory)
    )


def _agree(
    call: LoadCall, phases: Phases, held: ExitStack, stack: ExitStack
) -> tuple[LoadArguments, PreparedLoad, LoadDecision]:
    """Find and check a checkpoint, again if an overwrite replaces it meanwhile."""
    asked: LoadArguments | None = None
    for number in range(1, ROUNDS + 1):
        suffix = "" if number == 1 else f" {number}"  # no two exchanges have one name
        with phases.phase("open"):
            asked, found = _open(call, asked, suffix, held)
        with phases.phase("check"):
            with call.ranks.channel.exchange(f"check{suffix}") as checking:
                checked, findings = _examine(call, asked, found, stack)
                gathered = checking.gather(findings)
                if gathered is not None:
                    checking.decide(decide_load(asked.request, found, gathered))
            passed = checking.result(LoadDecision)
        if not passed.is_gone:
            assert checked is not None
            return asked, checked, passed
    raise StorageError(f"{text_of(call.path)}: it is replaced faster than it is read; try again")


def _open(
    call: LoadCall, asked: LoadArguments | None, suffix: str, held: ExitStack
) -> tuple[LoadArguments, ResolvedSources]:
    """Find the checkpoints, and hand their indexes to all: encoded, but to the coordinator."""
    ranks = call.ranks
    found: tuple[OpenCheckpoint, ...] = ()
    encoded: tuple[bytes, ...] = ()
    with ranks.channel.exchange(f"open{suffix}") as opening:
        asked = asked or read_arguments(call)
        gathered = opening.gather(asked.request)
        if gathered is not None:
            answer, found, encoded = find(asked.storages, gathered, call.opener, held)
            opening.decide(answer)
    opened = opening.result(OpenedMessage)
    ranks.collectives_group.renew(opened.bulk)
    if opened.indexes is not None:
        encoded = opened.indexes
    else:  # they are too long for the answer
        with ranks.channel.exchange(f"index{suffix}"):
            sent = ranks.collectives_group.broadcast(
                typed_msgpack.encode(encoded) if found else None
            )
            encoded = typed_msgpack.decode(sent, tuple[bytes, ...])
    asked = asked.at([path for path, _ in opened.attempts])
    return asked, found_in(opened, found, encoded, asked.storages)


def _examine(
    call: LoadCall, asked: LoadArguments, found: ResolvedSources, stack: ExitStack
) -> tuple[PreparedLoad | None, CheckFindings]:
    stack.pop_all().close()  # what an attempt that is gone now has left open
    try:
        with ExitStack() as there:
            for one in found.checkpoints:
                there.enter_context(one.not_found_if_removed())
            return check_load(call, asked, found, stack)
    except NotFoundError:
        return None, CheckFindings(is_gone=True)


def _fill(
    call: LoadCall, checked: PreparedLoad, passed: LoadDecision, phases: Phases, stack: ExitStack
) -> tuple[RankTotals, JobTotals]:
    """Read, place and load objects, each when the one before has succeeded everywhere."""
    channel, options, binding = call.ranks.channel, call.options, checked.binding
    with phases.phase("read"):
        targets, shared = _prepare(call, checked, passed, stack)
        if options.check_first:
            with channel.exchange("check first"):
                _verify(call.ranks, checked, shared)
        slots = call.ranks.slots
        reading = BlockReader(checked.files, targets, verify=options.verify, slots=slots)
        try:
            with channel.exchange("read") as exchange:
                totals = _read(call.ranks, checked, shared, reading)
                gathered = exchange.gather(totals)
                if gathered is not None:
                    exchange.decide(total_reports(gathered))
            job = exchange.result(JobTotals)
        except CorruptError as error:
            # Who met the damage tells what it has touched; only this rank knows of its own.
            filled = checked.names_of(reading.touched)
            error.touched = tuple(sorted({*error.touched, *filled}))
            raise
    with phases.phase("place"):
        if passed.places:
            with channel.exchange("place"):
                binding.assign_values()
        if passed.loads_objects:
            with channel.exchange("objects"):
                binding.load_objects()
    return totals, job


def _prepare(
    call: LoadCall, checked: PreparedLoad, passed: LoadDecision, stack: ExitStack
) -> tuple[CellTargets, SharedReadGroup | None]:
    """Make the memory that is lacking, and link the ranks that have something to share.

    Returns None for what is shared if this rank reads alone. All have done so before the first
    byte lands anywhere.
    """
    targets, meeting = checked.targets, None
    if passed.makes_memory or passed.shares:
        with call.ranks.channel.exchange("prepare") as preparing:
            if passed.shares:
                meeting = SharedReadGroup.of(
                    call.ranks,
                    checked.files,
                    checked.links,
                    gather_requests(call.ranks, passed.wants, checked.wants),
                    between_hosts=call.options.read_once == "job",
                    stack=stack,
                )
            if targets is None:
                targets = checked.binding.allocate()
            if meeting is not None:
                gathered = preparing.gather(meeting.missed)
                if gathered is not None:
                    preparing.decide(meeting.judge(gathered))
    assert targets is not None, "only `prepare` makes memory"
    if meeting is not None:
        meeting = meeting.settle(preparing.result(UnreachableRanks))
    return targets, meeting if meeting is not None and any(meeting.units.values()) else None


def _verify(ranks: Session, checked: PreparedLoad, shared: SharedReadGroup | None) -> None:
    """Check every block that will be read, without touching anything."""
    reading = BlockReader(checked.files, None, verify=True, slots=ranks.slots)
    if shared is None:
        reading.run(ranks.config.threads)
    else:
        verify_shared(shared, reading)


def _read(
    ranks: Session, checked: PreparedLoad, shared: SharedReadGroup | None, reading: BlockReader
) -> RankTotals:
    """Fill the targets. Raises CorruptError, whose `touched` are names of the state."""
    start = time.monotonic()
    try:
        nbytes_read, nbytes_received = run(ranks, shared, reading)
    except CorruptError as error:
        error.touched = checked.names_of(error.touched)
        raise
    checked.binding.settle()
    nbytes_placed = nbytes_placed_by(checked.files.plan)
    return RankTotals(nbytes_read, nbytes_received, nbytes_placed, time.monotonic() - start)
