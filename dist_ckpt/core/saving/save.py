"""`dc.save`: read the state, agree on a plan, claim, write and commit.

Two more steps of every save are in `core/commit/transaction.py`, also for background saves and
tools: the check of the free space (`check_room`), and the report (`report`), the place for a hook.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from torch.distributed import ProcessGroup

from dist_ckpt.core.checkpoint.verify_checkpoint import record_damage
from dist_ckpt.core.comm.exchange.channel import COORDINATOR
from dist_ckpt.core.comm.process_group import session_of
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.commit.attempts import not_found_if_removed
from dist_ckpt.core.commit.records.recorded_checks import find_recorded_damage
from dist_ckpt.core.commit.transaction import RankWriteResult, Transaction
from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.core.planning.plan import FileReceipt, Inventory
from dist_ckpt.core.planning.replica_rules import ReplicaRule
from dist_ckpt.core.planning.sharding_config import ShardingConfig
from dist_ckpt.core.runtime.public_names import refuse_old_parameters
from dist_ckpt.core.saving.agreement import (
    AgreedPlan,
    SaveAgreement,
    SaveArguments,
    SaveCache,
    agree,
)
from dist_ckpt.core.saving.attachments import Attachments, read_attached
from dist_ckpt.core.saving.carry_over import CarryOver, CarrySource, open_source
from dist_ckpt.core.saving.rank_save import RankSave, StateReader
from dist_ckpt.core.saving.replica_copies import ReplicaDistance
from dist_ckpt.core.saving.save_options import CheckReplicas, SaveOptions
from dist_ckpt.core.shard_io.write.write_or_link import SavedFiles, write_or_link
from dist_ckpt.core.state.tree.containers import State
from dist_ckpt.core.storage import Storage, open_storage
from dist_ckpt.core.storage.storage_wrappers import CountingStorage
from dist_ckpt.errors import UnequalReplicasError
from dist_ckpt.reports import IoCount, LoadReport, Phases, SaveReport


@refuse_old_parameters(frozen="include_frozen", reuse="link_unchanged", carry="carry_over")
def save(
    state: State,
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    sharding: ShardingConfig | None = None,
    group: ProcessGroup | None = None,
    overwrite: bool = False,
    metadata: Mapping[str, object] | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    include_frozen: bool = True,
    config: Mapping[str, object] | None = None,
    kind: str | None = None,
    attach: Attachments | None = None,
    link_unchanged: str | Sequence[str] = (),
    carry_over: LoadReport | None = None,
    check_replicas: CheckReplicas = "sample",
    replicas: Mapping[str, ReplicaRule] | None = None,
) -> SaveReport:
    """Save a state as the checkpoint at `path`. Collective: every rank of `group` calls this.

    `path` is on storage that all ranks share. On return the checkpoint is complete and durable on
    every rank. A save does not change the state, and runs no step of an optimizer.

    An error is raised on all ranks, an interrupt only on the rank that gets it. After an error no
    new checkpoint exists, unless a StorageError says that it exists or may exist. Older checkpoints
    are unchanged.

    `sharding` declares plain local tensors as parts of global ones. With `overwrite`, an existing
    checkpoint is removed after the new one is durable. `metadata` is plain data, stored with the
    checkpoint. `include` and `exclude` are globs on the names of the state; each must match a name.
    `include_frozen=False` leaves out parameters that require no gradient. To load such a
    checkpoint, pass `include`, `exclude` and `include_frozen` again.

    `config` is the configuration of the model, a dict of plain data. `kind` is a short text, such
    as the name of its class. Both are stored in the metadata: `dc.load` compares them, and
    `dc.build` makes the model from them. `attach` is a dict from the names of small files to their
    contents: at most 100 files and 64 MiB. A content is bytes, the `Path` of a file that is read
    now, or a dict or list that becomes JSON. Pass `attach` on rank 0. The other ranks pass the same
    dict, or nothing.

    Each tensor whose name matches a glob in `link_unchanged` gets a separate file. The first two
    saves of this group write all these files. For a tensor that has not changed, such as a frozen
    weight, the third save makes a hard link to the file of an older checkpoint. It writes the file
    again if the storage has no hard links, or both older checkpoints are gone. At most 8
    checkpoints share a file. At least every 8 saves a linked file is read back and checked.

    `carry_over` is the report of a partial `dc.load`, made by this group. The save copies the names
    of the loaded checkpoint that the load did not restore. It does not copy names that the state
    now has, or that `exclude` matches. If the world size is the same, whole files are linked; all
    other data is copied and checked. Raises NotFoundError if the loaded checkpoint was replaced or
    deleted, CorruptError if it is damaged.

    A tensor that several ranks have is stored once. Their copies are compared: in full up to 1 MiB,
    and above that only sampled (16 blocks of 64 KiB). The first save of a layout compares the first
    256 MiB of each group of ranks in full. `check_replicas="all"` compares every byte in each save:
    every rank reads all its copies, however many ranks have them.

    A save fails if copies differ. `replicas` maps patterns of names to rules. "rank0" stores the
    copy of the lowest rank that has it, and "mean" the mean of all copies, for floating types.
    "per_rank" stores each rank's own copy, which loads only on as many ranks. The first pattern
    that matches decides. The report and the checkpoint list the names.

    Raises ValueError or TypeError for a state that cannot be saved, for differences between ranks,
    and for a pattern that matches nothing. Raises ExistsError, ConflictError and StorageError.
    Raises RankError if a rank dies or does not call `save`.
    """
    options = SaveOptions(
        step=step,
        sharding=sharding,
        overwrite=overwrite,
        metadata=metadata,
        include=include,
        exclude=exclude,
        include_frozen=include_frozen,
        config=config,
        kind=kind,
        attach=attach,
        link_unchanged=link_unchanged,
        carry_over=carry_over,
        check_replicas=check_replicas,
        replicas=replicas,
    )
    return save_together(session_of(group), state, path, options)


def save_together(
    session: Session,
    state: State | StateReader,
    path: str | os.PathLike[str],
    options: SaveOptions,
    storage: Storage | None = None,
) -> SaveReport:
    """Save over a given session. Collective: every rank of the session calls this."""
    with (
        session.operation(f"save to {path}"),
        ExitStack() as lease_stack,
        Transaction(session.channel, session.settings) as transaction,
    ):
        phases = Phases("save", str(path), quiet=session.channel.rank != COORDINATOR)
        with phases.phase("agree"):
            state = options.with_means(session, state)
            source = None
            if options.carry_over is not None:
                source = open_source(session, options.carry_over, options.exclude, storage)
            prepared, attempt, plan = agree(
                session,
                partial(_prepare_save, session, state, path, options, storage, source),
                partial(_make_room_and_claim, transaction, options),
                SaveAgreement[Attempt],
            )
            transaction.set_attempt(prepared.storage, prepared.arguments.path, attempt)
            carried = None if source is None else source.plan_names(plan.save_plan)
        cache = session.cache(SaveCache)
        writer = _RankWriter(session, options, prepared, plan, carried, lease_stack)
        with phases.phase("write"):
            encoded_catalog = (plan if carried is None else carried).encoded_catalog
            fields = options.index_fields()
            try:
                decision = transaction.write_and_commit(encoded_catalog, fields, writer.write)
            except UnequalReplicasError:
                cache.plan = None  # with a new plan, the next save compares in full again
                raise
        lease_stack.close()
        if writer.saved is not None:
            cache.linkable_saves = cache.linkable_saves.plus(writer.saved)
        with phases.phase("clean up"):
            transaction.remove_superseded()
        reads = prepared.storage.reads
        return transaction.report(
            decision,
            phases,
            reads=reads if source is None else reads.plus_all(source.reads),
            writes=prepared.storage.writes,
            collectives=session.collective_calls,
            num_sampled=prepared.rank_save.num_sampled,
        )


@dataclass(slots=True)
class _PreparedSave:
    """The part of one rank in a save, before the ranks agree. `attached` are files by name."""

    arguments: SaveArguments
    inventory: Inventory
    pattern_problems: tuple[str, ...]
    storage: CountingStorage
    rank_save: RankSave
    attached: Mapping[str, bytes]

    def accept_plan(self, plan: AgreedPlan) -> None:
        """Do nothing: the rank uses the plan when it writes."""


def _prepare_save(
    session: Session,
    state: State | StateReader,
    path: str | os.PathLike[str],
    options: SaveOptions,
    storage: Storage | None,
    source: CarrySource | None,
) -> _PreparedSave:
    """Check the options and read the state of this rank, inside the exchange "agree"."""
    options.check()
    default_storage, storage_path = open_storage(path)
    attached = read_attached(options.attach)
    arguments = options.arguments(storage_path, attached)
    rank_save = options.read_rank(session, state)
    inventory, pattern_problems = rank_save.inventory, rank_save.pattern_problems
    if source is not None:
        pattern_problems = source.remove_matched(pattern_problems)
    counting = CountingStorage(storage or default_storage)
    return _PreparedSave(arguments, inventory, pattern_problems, counting, rank_save, attached)


def _make_room_and_claim(
    transaction: Transaction, options: SaveOptions, prepared: _PreparedSave, plan: AgreedPlan
) -> Attempt:
    arguments = prepared.arguments
    options.make_room(plan.nbytes_to_write)
    return transaction.claim(
        prepared.storage,
        arguments.path,
        overwrite=arguments.overwrite,
        nbytes=plan.nbytes_to_write,
        incarnation=arguments.incarnation,
    )


@dataclass(slots=True)
class _RankWriter:
    """Writes the files of this rank, once. `saved` has the files to which later saves can link.

    On the coordinator, `lease_stack` gets the lease on the source of `carried`.
    """

    session: Session
    options: SaveOptions
    prepared: _PreparedSave
    plan: AgreedPlan
    carried: CarryOver | None
    lease_stack: ExitStack
    saved: SavedFiles | None = None

    def write(self, folder: str) -> RankWriteResult:
        """Write the files into the folder of the attempt."""
        start = time.monotonic()
        session, storage, step = self.session, self.prepared.storage, self.options.step
        rank_save, carried = self.prepared.rank_save, self.carried
        receipts: tuple[FileReceipt, ...] = ()
        linked = IoCount()
        rank_save.local_state.synchronize()
        metadata, attached = self.options.all_metadata(), self.prepared.attached
        files = rank_save.files(self.plan.save_plan, step, metadata, attached)
        if carried is not None:
            if session.channel.rank == COORDINATOR:
                carried.source.take_lease(storage, self.lease_stack)
            with not_found_if_removed(storage, carried.source.path, carried.source.attempt):
                objects = carried.encode_objects_files(storage, files.objects, session.channel.rank)
                receipts, linked = carried.write(session, storage, folder, step)
            files = replace(files, objects=objects)
        earlier, threads = session.cache(SaveCache).linkable_saves, session.settings.threads
        linkable = replace(earlier, find_damage=partial(find_recorded_damage, storage))
        written = write_or_link(
            storage, folder, files, linkable, threads=threads, buffers=session.scratch_buffers
        )
        self.saved = written.saved
        for error in written.damaged:
            record_damage(storage, error)
        return RankWriteResult(
            (*receipts, *written.receipts),
            self.options.replica_digests(rank_save, self.plan),
            time.monotonic() - start,
            linked.plus_all(written.linked),
            ReplicaDistance(rank_save, self.plan.save_plan),
        )
