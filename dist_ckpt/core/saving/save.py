"""`dc.save`: inventory, agree and claim, write, receipts and verdict."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from math import isfinite

import torch
from msgspec.structs import asdict
from torch.distributed import ProcessGroup

from dist_ckpt import __version__
from dist_ckpt.core.comm.exchange.channel import COORDINATOR
from dist_ckpt.core.comm.process_group import session_of
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.commit.records.incarnations import Incarnation
from dist_ckpt.core.format.checksums import document_digest
from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.core.format.index.catalog_json import EncodedCatalog
from dist_ckpt.core.format.index.index import MAX_STEP
from dist_ckpt.core.format.index.model_description import check_description, described
from dist_ckpt.core.format.objects.plain_codec import check_plain, encode_value
from dist_ckpt.core.format.strict_json import Scalar, is_text
from dist_ckpt.core.planning.plan import FileReceipt
from dist_ckpt.core.planning.selection import Selection, patterns, selection_of
from dist_ckpt.core.planning.sharding_config import ShardingConfig
from dist_ckpt.core.runtime.renamed import refuse_old_parameters
from dist_ckpt.core.saving.agreement import (
    CachedPlan,
    SaveAgreement,
    cached_plan,
    check_proposals,
    plan_together,
)
from dist_ckpt.core.saving.attachments import Attachments, ReadAttachments, read_attached
from dist_ckpt.core.saving.carry.carry import CarryOver, CarrySource, open_source
from dist_ckpt.core.saving.local_save_state import LocalSaveState, StateReader
from dist_ckpt.core.saving.save_transaction import RankWriteResult, SaveRequest, SaveTransaction
from dist_ckpt.core.shard_io.write.link_unchanged import LinkableSaves, SavedFiles, write_or_link
from dist_ckpt.core.state.tree.containers import State
from dist_ckpt.core.storage import Storage, open_storage
from dist_ckpt.core.storage.wrappers.counting import CountingStorage
from dist_ckpt.reports import IoCount, LoadReport, Phases, SaveReport

# The user's metadata lies in the objects file; its short scalars are mirrored in the index, so
# that listing checkpoints reads one document.
MAX_MIRRORED_CHARS = 1024


@dataclass(frozen=True, slots=True)
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

    def held(self, ranks: Session, state: State | StateReader) -> LocalSaveState:
        """See what this rank holds of a state. ValueError, TypeError for what cannot be saved."""
        reused = patterns(self.link_unchanged, "link_unchanged")
        return LocalSaveState.take(ranks, state, self.sharding, self.selection(), reused)

    def selection(self) -> Selection:
        """Return what of the state is saved. Raises TypeError or ValueError."""
        return selection_of(self.include, self.exclude, self.include_frozen)

    def chosen(self) -> str:
        """Say what is saved, and what of it is reused; "" if all is saved and nothing reused."""
        reused = patterns(self.link_unchanged, "link_unchanged")
        return f"{self.selection()}{f' link_unchanged={[*reused]}' if reused else ''}"


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
        *(step, sharding, overwrite, metadata, include, exclude, include_frozen),
        *(config, kind, attach, link_unchanged, carry_over),
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
    channel = ranks.channel
    with ranks.operation(f"save to {path}"), ExitStack() as held:
        phases = Phases("save", str(path), quiet=channel.rank != COORDINATOR)
        with phases.phase("agree"):
            source = None
            if options.carry_over is not None:
                source = open_source(ranks, options.carry_over, options.exclude, storage)
            claimed = _agree_and_claim(ranks, state, path, options, storage, source)
        run = claimed.run
        found = IoCount() if source is None else source.reads
        with phases.phase("write"):
            verdict = run.write_and_commit(
                claimed.text, claimed.attempt, lambda: _write(ranks, claimed, options, held)
            )
        held.close()
        for saved in claimed.parts:
            ranks.keep(claimed.earlier.plus(saved))
        with phases.phase("clean up"):
            run.clean_up()
        report = SaveReport(
            path=claimed.request.path,
            step=options.step,
            world_size=channel.world_size,
            num_tensors=len(claimed.text.catalog.tensors),
            seconds=phases.seconds,
            exchanges=ranks.exchanges,
            collectives=ranks.collectives,
            nbytes_receipt=run.nbytes_receipt,
            storage_reads=claimed.storage.reads.plus_all(found),
            storage_writes=claimed.storage.writes,
            **asdict(verdict),
        )
        phases.done(report)
        return report


@dataclass(frozen=True, slots=True)
class _ClaimedSave:
    """What all ranks save, and this one holds; the attempt is claimed.

    `earlier` are the saves before, and `parts` what this rank has written for later ones;
    `carrying` is what is carried on of a checkpoint that was loaded.
    """

    storage: CountingStorage
    request: SaveRequest
    held: LocalSaveState
    attached: Mapping[str, bytes]
    planned: CachedPlan
    attempt: Attempt
    run: SaveTransaction
    earlier: LinkableSaves
    carrying: CarryOver | None
    parts: list[SavedFiles] = field(default_factory=list)

    @property
    def text(self) -> EncodedCatalog:
        """The catalog of all that is stored."""
        return self.planned.text if self.carrying is None else self.carrying.text


def _agree_and_claim(
    ranks: Session,
    state: State | StateReader,
    where: str | os.PathLike[str],
    options: SaveOptions,
    storage: Storage | None,
    source: CarrySource | None,
) -> _ClaimedSave:
    """Agree on what is saved, and claim an attempt: until then nothing on disk has changed.

    One exchange does it where every rank holds what it held when the last plan was made.
    """
    run: SaveTransaction | None = None
    try:
        with ranks.channel.exchange("agree") as agreeing:
            options.check()
            own, path = open_storage(where)
            counting = CountingStorage(storage or own)
            attached = read_attached(options.attach)
            request = request_of(counting, path, options, attached)
            run = SaveTransaction(ranks.channel, ranks.config, request)
            held = options.held(ranks, state)
            last = cached_plan(ranks, held.inventory)
            unmatched = held.unmatched if source is None else source.unmatched(held.unmatched)
            offers = agreeing.gather(
                request.proposal(last, ranks.collectives_group.epoch, unmatched)
            )
            if offers is not None:
                claimed = run.claim() if check_proposals(offers) else None
                agreeing.decide(SaveAgreement(claimed, max(offer.bulk for offer in offers)))
        agreed = agreeing.result(SaveAgreement[Attempt])
        attempt = agreed.name
        if attempt is not None and last is not None:
            planned = last
        else:
            ranks.collectives_group.renew(agreed.bulk)
            with ranks.channel.exchange("plan") as planning:
                planned = plan_together(ranks, held.inventory)
                planning.gather(None)
                if planning.is_coordinator:
                    planning.decide(run.claim())
            attempt = planning.result(Attempt)
            ranks.keep(replace(planned, save_name=attempt.name))
        carrying = None if source is None else source.planned(planned.plan)
    except BaseException as error:
        if run is not None:
            run.recover_claim(error)
        raise
    earlier = ranks.kept(LinkableSaves) or LinkableSaves()
    return _ClaimedSave(counting, request, held, attached, planned, attempt, run, earlier, carrying)


def _write(
    ranks: Session, claimed: _ClaimedSave, options: SaveOptions, source: ExitStack
) -> RankWriteResult:
    """Write this rank's files; the coordinator holds the `source` of what is carried."""
    start = time.monotonic()
    held, plan, carrying = claimed.held, claimed.planned.plan, claimed.carrying
    folder = f"{claimed.request.path}/{claimed.attempt.name}"
    carried: tuple[FileReceipt, ...] = ()
    linked = IoCount()
    held.local.synchronize()
    files = held.files(plan, options.step, options.all_metadata(), claimed.attached)
    if carrying is not None:
        if ranks.channel.rank == COORDINATOR:
            carrying.source.hold(claimed.storage, source)
        with carrying.reading(claimed.storage):
            objects = carrying.objects(claimed.storage, files.objects, ranks.channel.rank)
            carried, linked = carrying.write(ranks, claimed.storage, folder, options.step)
        files = replace(files, objects=objects)
    part = write_or_link(
        claimed.storage,
        folder,
        files,
        claimed.earlier,
        threads=ranks.config.threads,
        slots=ranks.slots,
    )
    claimed.parts.append(part.saved)
    return RankWriteResult(
        (*carried, *part.receipts),
        held.replica_digests(plan),
        time.monotonic() - start,
        linked.plus_all(part.linked),
    )


def request_of(
    storage: Storage, path: str, options: SaveOptions, attached: Mapping[str, bytes]
) -> SaveRequest:
    """Return what a save with these options, which make sense, asks for."""
    metadata = options.all_metadata()
    return SaveRequest(
        storage=storage,
        path=path,
        step=options.step,
        overwrite=options.overwrite,
        metadata=document_digest(encode_value(metadata)),
        mirrored=_mirrored(metadata),
        saved_by={"dist_ckpt": __version__, "torch": str(torch.__version__)},
        run=options.run,
        boundary=options.boundary,
        chosen=options.chosen(),
        attached=tuple((name, document_digest(data)) for name, data in sorted(attached.items())),
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
