"""`dc.save`: read the state, agree on a plan, claim, write and commit."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite

import torch
from torch.distributed import ProcessGroup

from dist_ckpt import __version__
from dist_ckpt.core.comm.exchange.channel import COORDINATOR
from dist_ckpt.core.comm.process_group import session_of
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.commit.records.incarnations import Incarnation
from dist_ckpt.core.format.checksums import document_digest
from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.core.format.index.index import MAX_STEP
from dist_ckpt.core.format.index.model_description import check_description, described
from dist_ckpt.core.format.objects.plain_codec import check_plain, encode_value
from dist_ckpt.core.format.strict_json import Scalar, is_text
from dist_ckpt.core.planning.plan import FileReceipt, Inventory
from dist_ckpt.core.planning.selection import Selection, patterns, selection_of
from dist_ckpt.core.planning.sharding_config import ShardingConfig
from dist_ckpt.core.runtime.public_names import refuse_old_parameters
from dist_ckpt.core.saving.agreement import (
    CachedPlan,
    SaveAgreement,
    SaveCache,
    SaveRequest,
    agree,
)
from dist_ckpt.core.saving.attachments import Attachments, ReadAttachments, read_attached
from dist_ckpt.core.saving.carry_over import CarryOver, CarrySource, open_source
from dist_ckpt.core.saving.local_save_state import LocalSaveState, StateReader
from dist_ckpt.core.saving.transaction import IndexFields, RankWriteResult, Transaction
from dist_ckpt.core.shard_io.write.link_unchanged import SavedFiles, write_or_link
from dist_ckpt.core.state.tree.containers import State
from dist_ckpt.core.storage import Storage, open_storage
from dist_ckpt.core.storage.forwarding import CountingStorage
from dist_ckpt.reports import IoCount, LoadReport, Phases, SaveReport

# The user's metadata lies in the objects file; its short scalars are mirrored in the index, so
# that listing checkpoints reads one document.
MAX_MIRRORED_CHARS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """The options of `save`, checked by `check` once a rank's error can reach the others.

    `link_unchanged` is one pattern, or several, on the names of tensors. Not of users are the last
    three: the start of a run that saves, at which of its boundaries, and whether time is short just
    now, so that a save in the background must not wait for another.
    """

    step: int | None = None
    sharding: ShardingConfig | None = None
    overwrite: bool = False
    metadata: Mapping[str, object] | None = None
    include: str | Sequence[str] | None = None
    exclude: str | Sequence[str] | None = None
    include_frozen: bool = True
    config: Mapping[str, object] | None = None
    kind: str | None = None
    attach: Attachments | ReadAttachments | None = None
    link_unchanged: str | Sequence[str] = ()
    carry_over: LoadReport | None = None
    run: Incarnation | None = None
    boundary: int | None = None
    is_urgent: Callable[[], bool] = bool

    def check(self) -> None:
        """Raise TypeError or ValueError for options that make no sense."""
        if self.step is not None and type(self.step) is not int:
            raise TypeError(f"step={self.step!r}: give a whole number or None")
        if self.step is not None and not 0 <= self.step <= MAX_STEP:
            raise ValueError(f"step={self.step}: give a number from 0 to 2**63 - 1")
        if self.sharding is not None and not isinstance(self.sharding, ShardingConfig):
            raise TypeError(f"sharding is a {type(self.sharding).__name__}: give a ShardingConfig")
        if type(self.overwrite) is not bool:
            raise TypeError(f"overwrite={self.overwrite!r}: give True or False")
        self.selection()
        if self.metadata is not None:
            if not isinstance(self.metadata, Mapping):
                raise TypeError(f"metadata is a {type(self.metadata).__name__}: give a dict")
            check_plain(dict(self.metadata), "metadata")
        check_description(self.metadata, self.config, self.kind)
        patterns(self.link_unchanged, "link_unchanged")

    def all_metadata(self) -> dict[str, object]:
        """Return the metadata, with the configuration and the kind in it."""
        return described(self.metadata, self.config, self.kind)

    def local_state(self, ranks: Session, state: State | StateReader) -> LocalSaveState:
        """Read this rank's state. ValueError, TypeError for what cannot be saved."""
        link_unchanged = patterns(self.link_unchanged, "link_unchanged")
        return LocalSaveState.take(ranks, state, self.sharding, self.selection(), link_unchanged)

    def selection(self) -> Selection:
        """Return what of the state is saved. Raises TypeError or ValueError."""
        return selection_of(self.include, self.exclude, self.include_frozen)

    def index_fields(self) -> IndexFields:
        """Return the fields of the index that these options give."""
        return IndexFields(
            step=self.step,
            metadata=_mirrored(self.all_metadata()),
            saved_by={"dist_ckpt": __version__, "torch": str(torch.__version__)},
        )

    def request(self, path: str, attached: Mapping[str, bytes]) -> SaveRequest:
        """Return the request of a rank that saves with these options, which are checked."""
        digests = tuple((name, document_digest(data)) for name, data in sorted(attached.items()))
        return SaveRequest(
            step=self.step,
            path=path,
            overwrite=self.overwrite,
            metadata=document_digest(encode_value(self.all_metadata())),
            attached=digests,
            selection=self.chosen(),
            root="" if self.run is None else self.run.root,
            incarnation_number=0 if self.run is None else self.run.number,
            boundary=self.boundary,
        )

    def chosen(self) -> str:
        """Return the options that select names, as text; "" if they have their defaults."""
        linked = patterns(self.link_unchanged, "link_unchanged")
        return f"{self.selection()}{f' link_unchanged={[*linked]}' if linked else ''}"


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
) -> SaveReport:
    """Save a state as the checkpoint at `path`. Collective: every rank of `group` calls this.

    `path` is on storage that all ranks share. On return the checkpoint is complete and durable on
    every rank; if it raises, on all ranks, there is none from this call and older ones are as
    they were. Saving changes nothing in the state and runs no step of an optimizer.

    `sharding` says how plain local tensors are parts of global ones; `overwrite` replaces the
    checkpoint that is there once the new one is durable; `metadata` is plain data to keep with it.
    `include` and `exclude` are globs on the names of the state, as of `dc.load`, each of which must
    match one; `include_frozen=False` leaves parameters out that require no gradient. Load such a
    checkpoint with the same three options.

    `config` is what the model was made from, a dict of plain data, and `kind` a short text that
    says what it is: they are kept as the metadata's `config` and `kind`, for `dc.load` to compare
    and for `dc.build` to make the model from. `attach` are small files to keep with it, by name: a
    `Path`, whose file is read now, bytes, or a dict or list that becomes JSON; 100 files and 64 MiB
    at most. They are rank 0's; another rank gives none, or the same.

    Tensors whose names match `link_unchanged`, globs as well, get files of their own. What does not
    change, such as frozen weights, is written by the first two saves of this group that have it;
    later ones link to those files, where the storage makes hard links, and the older checkpoint is
    there and whole; else they write. A file has at most 8 names, and is read back within 8 saves
    before it gets another.

    `carry_over` is what a `dc.load` of the same group has returned, which has left something out.
    What that has not restored, and is not saved of the state, goes from its checkpoint into this
    one, but for what `exclude` leaves out. So what was loaded and is not in the state any more does
    not come back. Whole files are linked if as many ranks save as then; all else is copied and
    checked. Raises NotFoundError if that checkpoint was replaced or deleted, CorruptError if it is
    damaged.

    Raises ValueError or TypeError for a state that cannot be saved, that ranks disagree on, or for
    a pattern that matches nothing; ExistsError, ConflictError, StorageError, and RankError if a
    rank dies or never calls.
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
    )
    return save_together(session_of(group), state, path, options)


def save_together(
    ranks: Session,
    state: State | StateReader,
    path: str | os.PathLike[str],
    options: SaveOptions,
    storage: Storage | None = None,
) -> SaveReport:
    """Save over a given session. Collective: every rank of the session calls this."""
    with (
        ranks.operation(f"save to {path}"),
        ExitStack() as source_lease,
        Transaction(ranks.channel, ranks.config) as transaction,
    ):
        phases = Phases("save", str(path), quiet=ranks.channel.rank != COORDINATOR)
        with phases.phase("agree"):
            source = None
            if options.carry_over is not None:
                source = open_source(ranks, options.carry_over, options.exclude, storage)
            prepared, attempt, plan = agree(
                ranks,
                partial(_prepare, ranks, state, path, options, storage, source),
                partial(_claim, transaction),
                SaveAgreement[Attempt],
            )
            transaction.join(prepared.storage, prepared.request.path, attempt)
            carried = None if source is None else source.planned(plan.plan)
        cache = ranks.cache(SaveCache)
        writer = _RankWriter(ranks, options, prepared, plan, carried, source_lease)
        with phases.phase("write"):
            catalog = plan.text if carried is None else carried.text
            decision = transaction.commit(catalog, options.index_fields(), writer.write)
        source_lease.close()
        if writer.saved is not None:
            cache.linkable_saves = cache.linkable_saves.plus(writer.saved)
        with phases.phase("clean up"):
            transaction.supersede()
        reads = prepared.storage.reads
        return transaction.report(
            decision,
            phases,
            reads=reads if source is None else reads.plus_all(source.reads),
            writes=prepared.storage.writes,
            collectives=ranks.collectives,
        )


@dataclass(frozen=True, slots=True)
class _PreparedSave:
    """A rank's part of a save, before the ranks agree on it. `attached` are files, by name."""

    request: SaveRequest
    storage: CountingStorage
    local_state: LocalSaveState
    attached: Mapping[str, bytes]
    unmatched: tuple[str, ...]

    @property
    def inventory(self) -> Inventory:
        """See `Preparation.inventory`."""
        return self.local_state.inventory

    def use(self, plan: CachedPlan) -> None:
        """Do nothing: the files follow from the plan when they are written."""


def _prepare(
    ranks: Session,
    state: State | StateReader,
    path: str | os.PathLike[str],
    options: SaveOptions,
    storage: Storage | None,
    source: CarrySource | None,
) -> _PreparedSave:
    """Check the options and read the state. What this raises is raised on all ranks."""
    options.check()
    default_storage, storage_path = open_storage(path)
    attached = read_attached(options.attach)
    request = options.request(storage_path, attached)
    local_state = options.local_state(ranks, state)
    unmatched = local_state.unmatched
    if source is not None:
        unmatched = source.unmatched(unmatched)
    counting = CountingStorage(storage or default_storage)
    return _PreparedSave(request, counting, local_state, attached, unmatched)


def _claim(transaction: Transaction, prepared: _PreparedSave) -> Attempt:
    request = prepared.request
    return transaction.claim(
        prepared.storage,
        request.path,
        overwrite=request.overwrite,
        incarnation=request.incarnation,
    )


@dataclass(slots=True)
class _RankWriter:
    """Writes the files of this rank, once. `saved` are those that later saves can link to.

    The coordinator holds a lease of the source of what is carried over, until `source_lease` ends.
    """

    ranks: Session
    options: SaveOptions
    prepared: _PreparedSave
    plan: CachedPlan
    carried: CarryOver | None
    source_lease: ExitStack
    saved: SavedFiles | None = None

    def write(self, folder: str) -> RankWriteResult:
        """Write the files into the folder of the attempt."""
        start = time.monotonic()
        ranks, storage, step = self.ranks, self.prepared.storage, self.options.step
        local_state, carried = self.prepared.local_state, self.carried
        receipts: tuple[FileReceipt, ...] = ()
        linked = IoCount()
        local_state.local.synchronize()
        files = local_state.files(
            self.plan.plan, step, self.options.all_metadata(), self.prepared.attached
        )
        if carried is not None:
            if ranks.channel.rank == COORDINATOR:
                carried.source.hold(storage, self.source_lease)
            with carried.reading(storage):
                objects = carried.objects(storage, files.objects, ranks.channel.rank)
                receipts, linked = carried.write(ranks, storage, folder, step)
            files = replace(files, objects=objects)
        part = write_or_link(
            storage,
            folder,
            files,
            ranks.cache(SaveCache).linkable_saves,
            threads=ranks.config.threads,
            slots=ranks.slots,
        )
        self.saved = part.saved
        return RankWriteResult(
            (*receipts, *part.receipts),
            local_state.replica_digests(self.plan.plan),
            time.monotonic() - start,
            linked.plus_all(part.linked),
        )


def _mirrored(metadata: Mapping[str, object]) -> dict[str, Scalar]:
    """Return the short scalars of the metadata; JSON has no NaN, so those become strings."""
    mirrored: dict[str, Scalar] = {}
    for key, value in metadata.items():
        if type(key) is not str or not is_text(key):
            continue
        if value is None or type(value) is bool or (type(value) is int and abs(value) < 1 << 63):
            mirrored[key] = value
        elif type(value) is float:
            mirrored[key] = value if isfinite(value) else str(value)
        elif type(value) is str and len(value) <= MAX_MIRRORED_CHARS and is_text(value):
            mirrored[key] = value
    return mirrored
