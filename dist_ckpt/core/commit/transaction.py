"""The transaction that makes every new checkpoint: claim an attempt, write, commit or abandon.

It also checks that the disk has room (`check_room`), and makes the report of each save (`report`).
Saves, background saves, averages, imports and rewrites all use `Transaction`. The ranks agree by
exchanges, which raise the error of any rank on all ranks. A single process uses a channel with one
rank.
"""

from __future__ import annotations

import logging
import posixpath
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import NoReturn, Self

from msgspec.structs import asdict

from dist_ckpt.core.comm.exchange.channel import Channel, Exchange
from dist_ckpt.core.comm.rank_messages import NoAnswerError
from dist_ckpt.core.commit import attempts, commit_protocol, removal
from dist_ckpt.core.commit.attempts import list_entries, list_statuses
from dist_ckpt.core.commit.receipts import (
    build_attached_table,
    build_file_tables,
    file_sizes,
    find_unequal_groups,
)
from dist_ckpt.core.commit.records.incarnations import Incarnation
from dist_ckpt.core.commit.unequal_replicas import (
    CopyComparison,
    CopyRequest,
    CopySamples,
    UnequalReplicas,
)
from dist_ckpt.core.format.checksums import document_digest
from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.core.format.index.index import Catalog, Index
from dist_ckpt.core.format.index.index_json import EncodedCatalog
from dist_ckpt.core.format.strict_json import Scalar
from dist_ckpt.core.planning.plan import FileReceipt, Receipt, ReplicaDigests
from dist_ckpt.core.runtime.typed_msgpack import Message
from dist_ckpt.core.storage import Storage
from dist_ckpt.core.storage.storage_wrappers import free_nbytes
from dist_ckpt.errors import CheckpointError, StorageError, UnequalReplicasError
from dist_ckpt.message_text import format_count, format_size
from dist_ckpt.reports import IoCount, Phases, SaveReport, find_slowest
from dist_ckpt.settings import Settings

_log = logging.getLogger("dist_ckpt")


@dataclass(frozen=True, slots=True)
class IndexFields:
    """The fields of an index that do not follow from the plan or the receipts.

    Only the fields of the coordinator are used. `metadata` has the scalars of the user's metadata.
    `saved_at` is the time of the commit by default. `save_id` is the random id of the save.
    """

    step: int | None
    metadata: Mapping[str, Scalar]
    saved_by: Mapping[str, str]
    saved_at: float | None = None
    save_id: str = field(default_factory=partial(secrets.token_hex, 16))

    def build_index(self, attempt: str, catalog: Catalog, receipts: Sequence[Receipt]) -> Index:
        """Return the index of an attempt. StorageError if a receipt does not follow from the plan.

        `receipts` are those of the ranks of the checkpoint, in rank order.
        """
        files, objects = build_file_tables(catalog, receipts)
        return Index(
            attempt=attempt,
            save=self.save_id,
            step=self.step,
            catalog=catalog,
            files=files,
            objects=objects,
            attached=build_attached_table(receipts),
            metadata=self.metadata,
            saved_by=self.saved_by,
            saved_at=time.time() if self.saved_at is None else self.saved_at,
        )


class CommitDecision(Message, frozen=True):
    """A committed attempt, with the totals of all ranks. `slowest_rank` took longest to write."""

    attempt: str
    nbytes: int
    num_files: int
    slowest_rank: int
    slowest_s: float
    num_linked: int = 0
    nbytes_linked: int = 0


class WriteDecision(Message, frozen=True):
    """The answer to the receipts: the replica groups that differ, or the commit decision."""

    differing: tuple[str, ...]
    decision: CommitDecision | None


@dataclass(frozen=True, slots=True)
class RankWriteResult:
    """The files that one rank has written or linked, the digests of its replicas, and its time.

    Without `comparison`, which all ranks have or none, an error does not say how far copies differ.
    """

    files: tuple[FileReceipt, ...]
    replicas: ReplicaDigests
    seconds: float
    linked: IoCount = IoCount()  # noqa: RUF009 - it is frozen
    comparison: CopyComparison | None = None

    @property
    def receipt(self) -> Receipt:
        """The receipt that this rank sends. It has one digest for each replica group."""
        replicas = (
            (group, document_digest("".join(digest for _, digest in members).encode()))
            for group, members in self.replicas
        )
        linked = self.linked.num, self.linked.nbytes
        return Receipt(self.files, tuple(replicas), self.seconds, linked)


class Transaction:
    """One new checkpoint, which is committed completely or not at all.

        with Transaction(channel, settings) as transaction:
            with channel.exchange("claim") as claiming:
                claiming.gather(None)
                if claiming.is_coordinator:
                    claiming.decide(transaction.claim(storage, path, overwrite=False))
            transaction.set_attempt(storage, path, claiming.result(Attempt))
            decision = transaction.write_and_commit(encoded_catalog, fields, write)
            transaction.remove_superseded()

    If the block ends without a commit, the coordinator abandons the attempt. The error of the block
    is raised unchanged. `label` names the writer in the claim, such as a tool; by default the rank.
    """

    # Set by `claim` or `set_attempt`.
    storage: Storage
    attempt: Attempt

    def __init__(
        self, channel: Channel, settings: Settings | None = None, *, label: str = ""
    ) -> None:
        self.nbytes_receipt = 0  # of the receipt that this rank has sent
        self._channel = channel
        self._exchanges_before = channel.exchanges
        self._settings = settings or Settings()
        self._by = f"{label or f'rank {channel.rank}'} on {channel.host}"
        self._claim: commit_protocol.Claim | None = None
        self._path = ""
        self._has_ended = False
        self._step: int | None = None
        self._num_tensors = 0
        self._replicas: Mapping[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._claim is None or self._has_ended:
            return
        try:
            self._try_abandon(self._claim.attempt, error or RuntimeError("it was not committed"))
        except (CheckpointError, OSError) as failure:
            _log.warning("%s could not be cleaned up: %s", self._claim.folder, failure)

    @property
    def folder(self) -> str:
        """The folder of the attempt."""
        return f"{self._path}/{self.attempt}"

    def claim(
        self,
        storage: Storage,
        path: str,
        *,
        overwrite: bool,
        nbytes: int = 0,
        incarnation: Incarnation | None = None,
        force: bool = False,
    ) -> Attempt:
        """Claim an attempt at `path`. Coordinator only, inside an exchange with other ranks.

        The claim creates the first file. So add a new check before the claim. Only `check_room`
        comes after it, because the claim removes unfinished saves at `path`. Raises the errors
        of `commit_protocol.claim`, and StorageError if `nbytes` do not fit.
        """
        self.storage, self._path = storage, path
        try:
            self._claim = commit_protocol.claim(
                storage,
                path,
                overwrite=overwrite,
                by=self._by,
                incarnation=incarnation,
                force=force,
            )
        except StorageError:  # a claim needs some room too
            self.check_room(nbytes)
            raise
        self.attempt = self._claim.attempt
        self.check_room(nbytes)
        return self.attempt

    def check_room(self, nbytes: int) -> None:
        """Raise StorageError if `nbytes` of new files do not fit, with what could be freed."""
        path = self._path
        free = free_nbytes(self.storage, path) if nbytes else None
        if free is None or free >= nbytes:
            return
        raise StorageError(
            f"{path}: No space left on device (ENOSPC): this save needs {format_size(nbytes)}, "
            f"{format_size(free)} are free, and {format_size(nbytes - free)} are missing. "
            f"{_describe_neighbours(self.storage, path)}. A save needs room for one checkpoint "
            f"more than you keep: free space, or save somewhere else"
        )

    def set_attempt(self, storage: Storage, path: str, attempt: Attempt) -> None:
        """Set the attempt that the coordinator has claimed. Every rank calls this."""
        self.storage, self._path, self.attempt = storage, path, attempt

    def write_and_commit(
        self,
        encoded_catalog: EncodedCatalog,
        fields: IndexFields,
        write: Callable[[str], RankWriteResult],
        *,
        to_plan_ranks: Callable[[Sequence[Receipt]], Sequence[Receipt]] = list,
    ) -> CommitDecision:
        """Write this rank's part, commit, and return the decision. Collective.

        `write` gets the folder of the attempt. `to_plan_ranks` turns the receipts of the writers
        into one receipt for each rank of the plan. By default each rank writes its own part.

        On return the checkpoint is durable. After an error no new checkpoint exists, except after
        two kinds of StorageError. "in place": it exists, but may not survive a power cut.
        "unknown": it may exist.

        A rank without an answer tries to abandon the attempt. If the commit was faster, the rank
        returns the decision. If an interrupt stops the commit, rank 0 first sends the outcome to
        the other ranks, then raises the interrupt.
        """
        self._step, self._num_tensors = fields.step, len(encoded_catalog.catalog.tensors)
        self._replicas = encoded_catalog.catalog.replicas
        try:
            decision = self._write(encoded_catalog, fields, write, to_plan_ranks)
        except NoAnswerError as error:
            committed = self._resolve_missing_answer(error)
            if committed is None:
                raise
            decision = committed
        self._has_ended = True
        return decision

    def _write(
        self,
        encoded_catalog: EncodedCatalog,
        fields: IndexFields,
        write: Callable[[str], RankWriteResult],
        to_plan_ranks: Callable[[Sequence[Receipt]], Sequence[Receipt]],
    ) -> CommitDecision:
        with self._channel.exchange("write") as writing:
            if self._claim is None:
                timeout_s = self._settings.visibility_timeout_s
                commit_protocol.await_claim(self.storage, self._path, self.attempt, timeout_s)
            result = write(self.folder)
            receipts = writing.gather(result.receipt)
            if receipts is None:
                self.nbytes_receipt = writing.nbytes_sent
            elif differing := find_unequal_groups(receipts):
                writing.decide(WriteDecision(tuple(differing), None))
            else:
                self._commit_and_answer(writing, encoded_catalog, fields, receipts, to_plan_ranks)
        answer = writing.result(WriteDecision)
        if answer.decision is not None:
            return answer.decision
        return self._compare_replicas(result, answer.differing)

    def _compare_replicas(self, result: RankWriteResult, differing: Collection[str]) -> NoReturn:
        """Raise UnequalReplicasError with what differs, and how far apart. Collective."""
        channel, comparison = self._channel, result.comparison
        with channel.exchange("replicas") as comparing:
            digests = {name: dict(members) for name, members in result.replicas}
            gathered = comparing.gather({n: digests[n] for n in differing if n in digests})
            unequal = UnequalReplicas.of(gathered or ())
            if comparing.is_coordinator and comparison is None:
                raise UnequalReplicasError(unequal.error_text(None))
            if comparing.is_coordinator:
                comparing.decide(unequal.request())
        request = comparing.result(CopyRequest)
        assert comparison is not None
        with channel.exchange("distances") as measuring:
            own = comparison.read(request.names_of(channel.rank), request.nbytes)
            samples = measuring.gather(CopySamples(own))
            if samples is not None:
                distances = unequal.describe([rank.samples for rank in samples], comparison)
                raise UnequalReplicasError(unequal.error_text(distances))
        raise AssertionError("the exchange raises the replicas that differ")

    def _commit_and_answer(
        self,
        writing: Exchange,
        encoded_catalog: EncodedCatalog,
        fields: IndexFields,
        receipts: Sequence[Receipt],
        to_plan_ranks: Callable[[Sequence[Receipt]], Sequence[Receipt]],
    ) -> None:
        """Check the receipts and the files, commit, and answer. Coordinator only."""
        assert self._claim is not None
        storage = self.storage
        commit_protocol.check_files(
            storage,
            self.folder,
            file_sizes(receipts),
            timeout_s=self._settings.visibility_timeout_s,
        )
        plan_receipts = to_plan_ranks(receipts)
        index = fields.build_index(self.attempt.name, encoded_catalog.catalog, plan_receipts)
        slowest_rank, slowest_s = find_slowest([receipt.seconds for receipt in receipts])
        linked = reduce(IoCount.plus_all, (IoCount(*receipt.linked) for receipt in receipts))
        decision = _build_decision(index, slowest_rank, slowest_s, linked)
        try:
            commit_protocol.commit(storage, self._claim, index, encoded_catalog)
            writing.decide(WriteDecision((), decision))
        except CheckpointError:
            raise
        except BaseException as error:  # an interrupt, mostly
            self._answer_interrupted(writing, decision, error)
            raise

    def _answer_interrupted(
        self, writing: Exchange, decision: CommitDecision, error: BaseException
    ) -> None:
        """Send the outcome of an interrupted commit to the other ranks."""
        path, reason = self._path, f"the commit was interrupted: {type(error).__name__}"
        state = commit_protocol.abandon_or_find_outcome(
            self.storage, path, self.attempt, by=self._by, reason=reason
        )
        if state == "committed":
            writing.decide(WriteDecision((), decision))
        elif state != "abandoned":
            unknown = commit_protocol.unknown_outcome_error(state, path, reason)
            writing.refuse(unknown)
            # The interrupt may end this process before anything shows the outcome.
            _log.warning("%s: %s", type(error).__name__, unknown)

    def commit_index(
        self,
        index: Index,
        *,
        seconds: float = 0.0,
        linked: IoCount | None = None,
        before: Callable[[], None] | None = None,
    ) -> CommitDecision:
        """Commit an index whose files this single process has written or linked, in `seconds`.

        `before` is called between the check of the files and the commit.
        """
        assert self._claim is not None
        storage = self.storage
        sizes = {name: record.nbytes for name, record in index.all_files.items()}
        commit_protocol.check_files(storage, self.folder, sizes)
        if before is not None:
            before()
        commit_protocol.commit(storage, self._claim, index)
        self._step, self._num_tensors = index.step, len(index.catalog.tensors)
        self._has_ended = True
        return _build_decision(index, 0, seconds, linked)

    def _resolve_missing_answer(self, error: NoAnswerError) -> CommitDecision | None:
        """Abandon the attempt after a missing answer. Return the decision if it is committed."""
        self._has_ended = True
        try:
            if self._try_abandon(self.attempt, error):
                return None
            attempt, index = attempts.find_checkpoint(self.storage, self._path)
        except (CheckpointError, OSError) as failure:
            raise StorageError(
                f"{self._path}: the outcome of this save is unknown. This rank got no answer "
                f"({error}), and the storage could not be read ({failure}). Run `dist-ckpt ls`"
            ) from error
        # The checkpoint is durable: `try_abandon` syncs a committed index before it returns False.
        return _build_decision(index, self._channel.rank, 0.0) if attempt == self.attempt else None

    def _try_abandon(self, attempt: Attempt, error: BaseException) -> bool:
        """Abandon the attempt and remove its files. Return False if it is committed."""
        reason = f"{type(error).__name__}: {error}"[:500]
        if not attempts.try_abandon(self.storage, self._path, attempt, by=self._by, reason=reason):
            return False
        if self._claim is not None:
            commit_protocol.remove_claimed(self.storage, self._claim)
        return True

    def remove_superseded(self) -> None:
        """Remove the attempts that the committed one replaces. On other ranks, do nothing."""
        if self._claim is not None:
            removal.remove_superseded(
                self.storage, self._path, self.attempt, self._claim.incarnation
            )

    def report(
        self,
        decision: CommitDecision,
        phases: Phases,
        *,
        reads: IoCount,
        writes: IoCount,
        collectives: IoCount | None = None,
        num_sampled: int = 0,
    ) -> SaveReport:
        """Return and log the report of the committed transaction.

        Every save, copy, rewrite and import calls this once, on every rank: the place for a hook.
        """
        report = SaveReport(
            path=self._path,
            step=self._step,
            world_size=self._channel.world_size,
            num_tensors=self._num_tensors,
            seconds=phases.seconds,
            exchanges=self._channel.exchanges.since(self._exchanges_before),
            collectives=collectives or IoCount(),
            nbytes_receipt=self.nbytes_receipt,
            storage_reads=reads,
            storage_writes=writes,
            num_sampled=num_sampled,
            replicas=self._replicas,
            **asdict(decision),
        )
        phases.done(report)
        return report


def _build_decision(
    index: Index, slowest_rank: int, slowest_s: float, linked: IoCount | None = None
) -> CommitDecision:
    counts = (linked.num, linked.nbytes) if linked else (0, 0)
    slowest = slowest_rank, slowest_s
    return CommitDecision(index.attempt, index.nbytes, index.num_files, *slowest, *counts)


def _describe_neighbours(storage: Storage, path: str) -> str:
    """Return a text about other checkpoints and unfinished saves in the folder of `path`."""
    root, name = posixpath.split(path)
    folders = [entry.name for entry in list_entries(storage, root) if entry.kind == "folder"]
    others = [
        status
        for folder in folders
        if folder != name
        for status in list_statuses(storage, f"{root}/{folder}")
    ]
    committed = [status.nbytes for status in others if status.state == "committed"]
    num_unfinished = sum(status.state in ("open", "abandoned") for status in others)
    return (
        f"{root} has {format_count(len(committed), 'other checkpoint')} of "
        f"{format_size(sum(committed))} (`dist-ckpt prune` removes some), and "
        f"{format_count(num_unfinished, 'unfinished save')} (`dist-ckpt gc` removes dead ones)"
    )
