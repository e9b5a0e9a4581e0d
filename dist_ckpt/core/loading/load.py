"""`dc.load`: open, check, read, place, load objects.

"Read" writes checked blocks into the tensors of the state, or into new tensors. "Place" assigns
plain values and new tensors to the state.

Nothing of the state changes before the check has passed on all ranks. Then each step begins when
the previous step has succeeded on all ranks. A step without work on any rank is left out.
"""

from __future__ import annotations

import logging
import posixpath
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import reduce
from itertools import chain

from msgspec import structs
from torch.distributed import ProcessGroup

from dist_ckpt.core.checkpoint.open_checkpoint import OpenCheckpoint
from dist_ckpt.core.checkpoint.opener import NATIVE, NOTHING_IN_MEMORY, MemoryFiles, Opener
from dist_ckpt.core.checkpoint.verify_checkpoint import record_damage
from dist_ckpt.core.comm.exchange.channel import COORDINATOR
from dist_ckpt.core.comm.process_group import session_of
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.commit.attempts import MAX_TRIES
from dist_ckpt.core.commit.records.recorded_checks import name_newest_good, record_check
from dist_ckpt.core.loading.check_load import (
    CheckedLoad,
    LoadArguments,
    LoadCall,
    check_load,
    read_arguments,
)
from dist_ckpt.core.loading.load_decisions import (
    CheckFindings,
    JobTotals,
    LoadDecision,
    OpenedMessage,
    RankTotals,
    ResolvedSources,
    decide_load,
    decode_sources,
    resolve_checkpoints,
    sum_totals,
)
from dist_ckpt.core.loading.load_options import LoadOptions, ReadOnce, Sources, sources_text
from dist_ckpt.core.loading.shared_read.run_shared_read import RankReads, SharedReader
from dist_ckpt.core.loading.shared_read.shared_read_group import (
    SharedReadGroup,
    UnreachableRanks,
    gather_requests,
)
from dist_ckpt.core.planning.name_selection import SELECT_ALL, Cast, Resize
from dist_ckpt.core.planning.sharding_config import ShardingConfig
from dist_ckpt.core.runtime import typed_msgpack
from dist_ckpt.core.runtime.public_names import refuse_old_parameters
from dist_ckpt.core.runtime.threads import parallel_for
from dist_ckpt.core.shard_io.read.block_reader import BlockReader
from dist_ckpt.core.shard_io.read.open_files import read_attached_file
from dist_ckpt.core.shard_io.read.read_grouping import CellTargets, count_placed_nbytes
from dist_ckpt.core.state.binding.sources.rename import RenameRules
from dist_ckpt.core.state.tree.containers import MutableState
from dist_ckpt.core.storage import Storage, open_storage
from dist_ckpt.errors import CorruptError, NotFoundError, StorageError
from dist_ckpt.message_text import listed
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
    rename: RenameRules | None = None,
    include_frozen: bool = True,
    check_first: bool = False,
    read_once: ReadOnce = "host",
    cast: Cast = None,
    dequantize: bool = False,
    resize: Resize | None = None,
    config: Mapping[str, object] | None = None,
    kind: str | None = None,
    opener: Opener = NATIVE,
) -> LoadReport:
    """Fill a state from the checkpoint at `path`. Collective: every rank of `group` calls this.

    `path` names a checkpoint, or a selector such as "runs/a@latest" or "runs/a@min:val/loss". Rank
    0 resolves a selector for all ranks, and takes a lease on the checkpoint if its root is the
    folder of a run. A plain path is not leased. `path` may also be a safetensors file, or a Hugging
    Face folder of them. They load as the state of a model, `{"model": model}`. They have no
    digests.

    `path` may also be several sources. A list: a name is taken from the first source that has it. A
    mapping from keys of the state, or dotted names below them, to a source or a list: all other
    names count as missing. A source may be a `dc.Source`, with its own patterns and rename.

    Any layout loads into any other. All ranks agree on names, shapes, dtypes, coverage, file sizes
    and headers before anything is changed. Every block is checked as it is read. If a block is
    damaged, all ranks raise the same CorruptError. Its `touched` names the tensors that may hold
    partial data. No object's `load_state_dict` has run. Tensors of the state that share memory are
    filled if their saved values agree; otherwise IncompatibleError names two of them after the
    read. With `check_first` all blocks are read twice, and checked before anything is changed.

    `read_once`: one rank reads and checks the blocks that several ranks need, and sends them to the
    others. "host" does this on each host, through shared memory. "job" does it for all ranks, over
    the network between hosts; use it if the network is faster than the storage. With "off" each
    rank reads its own blocks through the page cache. "host" and "job" bypass the page cache for
    data that is not in it. `DIST_CKPT_HOST` renames a host.

    With `strict`, missing and unexpected names are errors. Wrong shapes, dtypes and coverage always
    are. `include` and `exclude` are globs on saved names and on names in the state. Each must match
    a name. `rename` maps saved names to names in the state; `*` matches any text, `{name}` text
    without dots. A list of operations that ends with the new name makes a tensor of others, such as
    `[dc.Stack("e"), "experts.w1"]`. Optimizer state moves with its parameter. With
    `include_frozen=False` parameters that require no gradient stay unchanged. An empty mapping or
    None in the state is replaced by the saved values.

    `cast`: True, or patterns of names. These tensors of the state accept conversions between
    floating dtypes, and any other conversion without loss, such as int32 into int64. Values are
    converted block by block. If a finite value becomes infinite, IncompatibleError is raised after
    the read. New tensors have the saved dtype. An 8-bit weight that has a scale, such as
    "weight_scale_inv", is not cast without it. With `dequantize` it is multiplied by its scale, in
    float32, and rounded once to the dtype in the state; a new tensor is float32. Packed weights of
    4 bits are refused by name.

    `resize`: for tensors whose padding differs along one dimension, such as that of a vocabulary.
    `{"*.embed.weight": 50000}` loads the first 50,000 rows. The other rows of the state keep their
    values, and those of the checkpoint are cut. Tied tensors and optimizer state follow. The
    `resized` of the report has each tensor.

    `config` and `kind` are compared with those of the save before anything is changed.
    IncompatibleError lists each difference, also if the save had none.

    A background save may have left this checkpoint in the memory of a host. Then the load reads
    and checks that memory, unless another process still trains on it. `opener` turns paths into
    checkpoints. `dist_ckpt.load` passes one that supports all of the above; `NATIVE` opens only
    the plain paths of checkpoints.
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
        dequantize=dequantize,
        resize=resize,
        config=config,
        kind=kind,
    )
    session = session_of(group)
    with advice_on_damage(session):
        return load_together(session, state, path, options, memory=opener.memory, opener=opener)


@contextmanager
def advice_on_damage(session: Session) -> Iterator[None]:
    """Name the newest good checkpoint of the run in an error of a load. Rank 0 only."""
    try:
        yield
    except CorruptError as error:
        if session.channel.rank == COORDINATOR and error.path is not None:
            checkpoint = posixpath.dirname(posixpath.dirname(error.path))
            name_newest_good(error, open_storage(error.path)[0], checkpoint)
        raise


def load_together(
    session: Session,
    state: MutableState,
    path: Sources,
    options: LoadOptions,
    storage: Storage | None = None,
    memory: MemoryFiles = NOTHING_IN_MEMORY,
    *,
    opener: Opener = NATIVE,
) -> LoadReport:
    """Load as `load` does. Collective: every rank of the session calls this.

    `opener` resolves selectors, and opens the paths unless `storage` is given. Files that `memory`
    has are not read from the storage. If they are damaged, everything is read from the storage.
    """
    call = LoadCall(session, state, path, options, storage, memory, opener)
    try:
        try:
            return _load(call)
        except _DamagedInMemoryError as error:
            reason = error.__cause__
            _log.warning("%s: %s. Everything is now read from storage", sources_text(path), reason)
        return _load(replace(call, memory=NOTHING_IN_MEMORY))
    except CorruptError as error:
        is_recorder = options.record_check and session.channel.rank == COORDINATOR
        if is_recorder and error.path is not None:
            record_damage(storage or open_storage(error.path)[0], error)
        raise


class _DamagedInMemoryError(Exception):
    """Data from the memory of a host is damaged, but the storage has the data too.

    The cause has the details. All ranks raise this error, so all ranks load again from the storage.
    `LoadDecision.from_memory` is True on all ranks if any rank reads from memory.
    """


def _load(call: LoadCall) -> LoadReport:
    session, label = call.session, sources_text(call.path)
    with session.operation(f"load of {label}"), ExitStack() as leases, ExitStack() as stack:
        phases = Phases("load", label, quiet=session.channel.rank != COORDINATOR)
        arguments, checked, decision = _open_and_check(call, phases, leases, stack)
        try:
            totals = _read_and_place(call, checked, decision, phases, stack)
        except CorruptError as error:
            if decision.from_memory and not call.memory.is_only_copy:
                raise _DamagedInMemoryError from error
            raise
        report = _build_report(call, arguments, checked, decision, totals, phases)
        for warning in checked.binding.warnings:
            _log.warning("%s", warning)
        if report.unfilled:
            _log.warning(
                "%s: still on the meta device after the load, because no state dict has them "
                "(persistent=False): compute them, or create the model on a real device",
                listed(report.unfilled),
            )
        if call.options.record_check and session.channel.rank == COORDINATOR:
            is_partial = (
                report.unexpected or report.dropped or report.resized or decision.from_memory
            )
            is_whole = not is_partial and arguments.selection == SELECT_ALL
            # The load has read and checked the whole checkpoint: record that in its run.
            if call.options.verify and is_whole:
                _record_whole(arguments.counting[0], checked.resolved.checkpoints[0])
        phases.done(report)
        return report


def _record_whole(storage: Storage, checkpoint: OpenCheckpoint) -> None:
    """Record that a load has read a whole checkpoint, if its attached files are whole too."""
    try:
        for record in checkpoint.index.attached:  # a load does not need them
            read_attached_file(storage, checkpoint.folder, record)
        record_check(storage, checkpoint.path, checkpoint.index, "load")
    except CorruptError as error:
        record_damage(storage, error)
    except StorageError as error:
        _log.debug("%s is not recorded as checked: %s", checkpoint.path, error)


def _build_report(
    call: LoadCall,
    arguments: LoadArguments,
    checked: CheckedLoad,
    decision: LoadDecision,
    totals: tuple[RankTotals, JobTotals],
    phases: Phases,
) -> LoadReport:
    session, (local, job) = call.session, totals
    binding, (first, *_) = checked.binding, checked.resolved.checkpoints
    return LoadReport(
        path=first.path,
        step=first.index.step,
        attempt=first.index.attempt,
        world_size=session.channel.world_size,
        restored=binding.restored,
        resharded=binding.resharded,
        missing=binding.missing,
        unexpected=decision.unexpected,
        dropped=binding.dropped,
        nbytes_read=local.nbytes_read,
        nbytes_received=local.nbytes_received,
        nbytes_placed=local.nbytes_placed,
        nbytes_from_memory=sum(storage.from_memory.nbytes for storage in arguments.storages),
        seconds=phases.seconds,
        exchanges=session.exchanges,
        collectives=session.collective_calls,
        storage_reads=reduce(IoCount.plus_all, (storage.reads for storage in arguments.counting)),
        sources=checked.loaded_sources(),
        dequantized=binding.dequantized,
        as_saved=call.options.rename is None
        and not binding.dequantized
        and all(use.source.rename is None for use in arguments.source_uses),
        assumed=binding.assumed,
        unfilled=binding.find_unfilled(),
        resized=tuple(tensor.text() for tensor in binding.resized),
        **structs.asdict(job),
    )


def _open_and_check(
    call: LoadCall, phases: Phases, leases: ExitStack, stack: ExitStack
) -> tuple[LoadArguments, CheckedLoad, LoadDecision]:
    """Open and check the checkpoints. Try again if an overwrite replaces one meanwhile."""
    arguments: LoadArguments | None = None
    for number in range(1, MAX_TRIES + 1):
        suffix = "" if number == 1 else f" {number}"  # exchanges have different names
        with phases.phase("open"):
            arguments, sources = _open(call, arguments, suffix, leases)
        with phases.phase("check"):
            with call.session.channel.exchange(f"check{suffix}") as checking:
                checked, findings = _check(call, arguments, sources, stack)
                gathered = checking.gather(findings)
                if gathered is not None:
                    part_names = checked.saved.derived_names if checked is not None else ()
                    decision = decide_load(arguments.proposal, sources, gathered, part_names)
                    checking.decide(decision)
            decision = checking.result(LoadDecision)
        if not decision.is_gone:
            assert checked is not None
            return arguments, checked, decision
    raise StorageError(
        f"{sources_text(call.path)}: it is replaced faster than it is read; try again"
    )


def _open(
    call: LoadCall, arguments: LoadArguments | None, suffix: str, leases: ExitStack
) -> tuple[LoadArguments, ResolvedSources]:
    """Resolve the checkpoints, and send their indexes to all ranks."""
    session = call.session
    checkpoints: tuple[OpenCheckpoint, ...] = ()
    encoded: tuple[bytes, ...] = ()
    with session.channel.exchange(f"open{suffix}") as opening:
        arguments = arguments or read_arguments(call)
        proposals = opening.gather(arguments.proposal)
        if proposals is not None:
            answer, checkpoints, encoded = resolve_checkpoints(
                arguments.storages, proposals, call.opener, leases
            )
            opening.decide(answer)
    opened = opening.result(OpenedMessage)
    session.collective.renew(opened.connection_generation)
    if opened.indexes is not None:
        encoded = opened.indexes
    else:  # too long for the answer
        with session.channel.exchange(f"index{suffix}"):
            payload = typed_msgpack.encode(encoded) if checkpoints else None
            received = session.collective.broadcast(payload)
            encoded = typed_msgpack.decode(received, tuple[bytes, ...])
    arguments = arguments.with_paths([path for path, _ in opened.attempts])
    return arguments, decode_sources(opened, checkpoints, encoded, arguments.storages)


def _check(
    call: LoadCall, arguments: LoadArguments, sources: ResolvedSources, stack: ExitStack
) -> tuple[CheckedLoad | None, CheckFindings]:
    stack.pop_all().close()  # close the files of an attempt that is gone
    try:
        with ExitStack() as guards:
            for checkpoint in sources.checkpoints:
                guards.enter_context(checkpoint.handle_damage())
            return check_load(call, arguments, sources, stack)
    except NotFoundError:
        return None, CheckFindings(is_gone=True)


def _read_and_place(
    call: LoadCall, checked: CheckedLoad, decision: LoadDecision, phases: Phases, stack: ExitStack
) -> tuple[RankTotals, JobTotals]:
    """Read, place and load objects. A step begins when all ranks have done the step before."""
    channel, options, binding = call.session.channel, call.options, checked.binding
    buffers = call.session.scratch_buffers
    with phases.phase("read"):
        targets, group = _prepare_read(call, checked, decision, stack)
        if options.check_first:
            with channel.exchange("check first"):
                reader = BlockReader(checked.files, None, verify=True, buffers=buffers)
                check_blocks_first(call.session, group, reader)
        reader = BlockReader(checked.files, targets, verify=options.verify, buffers=buffers)
        try:
            with channel.exchange("read") as exchange:
                with binding.open_buffers(
                    threads=call.session.settings.threads, block_nbytes=reader.block_nbytes
                ) as reader.device_buffers:
                    totals = _read(call.session, checked, group, reader)
                gathered = exchange.gather(totals)
                if gathered is not None:
                    exchange.decide(sum_totals(gathered))
            job = exchange.result(JobTotals)
        except CorruptError as error:
            # The error has the tensors of the rank that met the damage; add those of this rank.
            touched = checked.state_names(reader.touched)
            error.touched = tuple(sorted({*error.touched, *touched}))
            raise
    with phases.phase("place"):
        if decision.assigns_values:
            with channel.exchange("place"):
                binding.assign_values()
        if decision.loads_objects:
            with channel.exchange("objects"):
                binding.load_objects()
    return totals, job


def _prepare_read(
    call: LoadCall, checked: CheckedLoad, decision: LoadDecision, stack: ExitStack
) -> tuple[CellTargets, SharedReadGroup | None]:
    """Allocate new tensors, and link the ranks that share blocks.

    The group is None if this rank shares nothing.
    """
    targets, group = checked.targets, None
    if decision.makes_memory or decision.ranks_share_blocks:
        with call.session.channel.exchange("prepare") as preparing:
            if decision.ranks_share_blocks:
                group = SharedReadGroup.link(
                    call.session,
                    checked.files,
                    checked.links,
                    gather_requests(
                        call.session, decision.encoded_requests, checked.encoded_requests
                    ),
                    between_hosts=call.options.read_once == "job",
                    stack=stack,
                )
            if targets is None:
                targets = checked.binding.allocate()
            if group is not None:
                group.decide_unreachable(preparing)
    assert targets is not None, "without exchange `prepare` there are no new tensors"
    return targets, group and group.without_unreachable(preparing.result(UnreachableRanks))


def _read(
    session: Session, checked: CheckedLoad, group: SharedReadGroup | None, reader: BlockReader
) -> RankTotals:
    """Fill the targets. Raises CorruptError, whose `touched` has names in the state."""
    start = time.monotonic()
    try:
        nbytes_read, nbytes_received = read_blocks(session, group, reader)
    except CorruptError as error:
        error.touched = checked.state_names(error.touched)
        raise
    checked.binding.finish_tensors()
    nbytes_placed = count_placed_nbytes(checked.files.plan)
    return RankTotals(nbytes_read, nbytes_received, nbytes_placed, time.monotonic() - start)


def check_blocks_first(
    session: Session, group: SharedReadGroup | None, reader: BlockReader
) -> None:
    """Check the blocks that this rank would read. In a group the fetcher checks a shared block."""
    if group is None:
        reader.read_all(session.settings.threads)
        return
    work = RankReads(group, reader.targets)
    fetched = ((planned.file, read) for planned in work.fetched_ranges() for read in planned.reads)
    reads = chain(work.local_reads(), fetched)
    with reader.name_touched():
        parallel_for(lambda args: reader.read(*args), reads, threads=group.session.settings.threads)


def read_blocks(
    session: Session, group: SharedReadGroup | None, reader: BlockReader
) -> tuple[int, int]:
    """Read all blocks of this rank, shared blocks once. Collective: every rank of `group` calls it.

    Returns the bytes from storage, and the bytes from other ranks. Raises the errors of
    `BlockReader.read_all`, and SecondaryError if another rank fails.
    """
    if group is None:
        return reader.read_all(session.settings.threads), 0
    try:
        work = RankReads(group, reader.targets)
        with reader.name_touched():
            SharedReader(group, work, reader).read_all()
        return work.nbytes_moved()
    except BaseException:
        group.give_up()
        raise
