"""One attempt, from its claim to its verdict: write, then commit, or make "not committed" true.

Each exchange spreads any rank's error to all of them. The coordinator, rank 0, claims the
attempt, compares the receipts with the plan and with the folder, and commits.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from msgspec.structs import replace

from dist_ckpt.config import Config
from dist_ckpt.core.comm.exchange.channel import Channel, Exchange
from dist_ckpt.core.comm.messages import NoAnswerError
from dist_ckpt.core.commit import attempts, commit_protocol, outcome, removal
from dist_ckpt.core.commit.receipts import attached_of, check_receipts, mismatched_groups, sizes_of
from dist_ckpt.core.commit.records.incarnations import Incarnation
from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.core.format.index.catalog_json import EncodedCatalog
from dist_ckpt.core.format.index.index import Index
from dist_ckpt.core.format.strict_json import Scalar
from dist_ckpt.core.planning.plan import FileReceipt, Receipt, ReplicaDigests
from dist_ckpt.core.runtime.typed_msgpack import Message
from dist_ckpt.core.saving.agreement import CachedPlan, SaveProposal
from dist_ckpt.core.saving.replica_samples import receipt_of
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import CheckpointError, StorageError, listed, ranks_text, remedy_of_parts
from dist_ckpt.reports import IoCount, slowest_of

_log = logging.getLogger("dist_ckpt")


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """What a rank asks for; but for the storage all must ask alike.

    `metadata` is a digest of the user's metadata; `attached` are the files to attach, by name, with
    their digests, empty where a rank leaves them to rank 0; `chosen` says what of the state is
    saved. `mirrored`, `saved_by`, `saved_at` and the save's id, `save`, go into the index as the
    coordinator has them. `saved_at`: None for the time of the commit. `run` is the start of a run
    that saves, if one does, at its `boundary`.
    """

    storage: Storage
    path: str
    step: int | None
    overwrite: bool
    metadata: str
    mirrored: Mapping[str, Scalar]
    saved_by: Mapping[str, str]
    saved_at: float | None = None
    run: Incarnation | None = None
    boundary: int | None = None
    chosen: str = ""
    attached: tuple[tuple[str, str], ...] = ()
    save: str = field(default_factory=partial(secrets.token_hex, 16))

    def proposal(
        self, last: CachedPlan | None, bulk_epoch: int, unmatched: tuple[str, ...] = ()
    ) -> SaveProposal:
        """Return what this rank asks of the others; `last` is the last plan if it is good here."""
        return SaveProposal(
            path=self.path,
            step=self.step,
            overwrite=self.overwrite,
            metadata=self.metadata,
            attached=self.attached,
            chosen=self.chosen,
            root="" if self.run is None else self.run.root,
            start=0 if self.run is None else self.run.number,
            boundary=self.boundary,
            last="" if last is None else last.save_name,
            bulk=bulk_epoch,
            unmatched=unmatched,
        )


class CommitDecision(Message, frozen=True):
    """What was committed, over all ranks; rank `slowest_rank` took longest to write."""

    attempt: str
    nbytes: int
    num_files: int
    slowest_rank: int
    slowest_s: float
    num_linked: int = 0
    nbytes_linked: int = 0


class WriteDecision(Message, frozen=True):
    """What the receipts come to: the replica groups that differ between ranks, or the verdict."""

    differing: tuple[str, ...]
    verdict: CommitDecision | None


@dataclass(frozen=True, slots=True)
class RankWriteResult:
    """What a rank has written, and the digests of its replicas; it took so many seconds."""

    files: tuple[FileReceipt, ...]
    replicas: ReplicaDigests
    seconds: float
    linked: IoCount = IoCount()  # noqa: RUF009 - it is frozen


class SaveTransaction:
    """One attempt in progress, as one rank sees it: rank 0 claims it, all write and commit.

    `nbytes_receipt` is the size of the receipt that it has sent; the coordinator sends none.
    `by_writers` makes of the receipts of those who write one for each rank of the plan: what ranks
    of a save have is that already.
    """

    def __init__(
        self,
        channel: Channel,
        config: Config,
        request: SaveRequest,
        by_writers: Callable[[Sequence[Receipt]], Sequence[Receipt]] = list,
    ) -> None:
        self.nbytes_receipt = 0
        self._channel = channel
        self._config = config
        self._request = request
        self._by_writers = by_writers
        self._storage, self._path = request.storage, request.path
        self._claim: commit_protocol.Claim | None = None

    def claim(self) -> Attempt:
        """Claim an attempt. Coordinator only, within an exchange.

        Until then nothing on disk has changed. If the ranks cannot be told: `recover_claim`.
        """
        request = self._request
        self._claim = commit_protocol.claim(
            self._storage, self._path, overwrite=request.overwrite, by=self._by, run=request.run
        )
        return self._claim.attempt

    @property
    def _by(self) -> str:
        return f"rank {self._channel.rank} on {self._channel.host}"

    def write_and_commit(
        self, text: EncodedCatalog, attempt: Attempt, write: Callable[[], RankWriteResult]
    ) -> CommitDecision:
        """Have this rank's part written, and settle whether the save is committed. Collective.

        On return the checkpoint is durable. Whatever is raised instead, no checkpoint was made;
        a StorageError that says so is the exception: it is there, but may not outlive a power
        cut, or that is unknown. So is an interrupt of the commit, or what else it met that is no
        error of ours: that is raised as it is on the rank where it happened, and what the others
        are told is logged there. `text` is that of the plan's catalog.
        """
        channel = self._channel
        try:
            with channel.exchange("write") as writing:
                if self._claim is None:
                    commit_protocol.await_claim(
                        self._storage, self._path, attempt, self._config.visibility_timeout_s
                    )
                part = write()
                linked = part.linked.num, part.linked.nbytes
                receipt = receipt_of(part.files, part.replicas, part.seconds, linked)
                receipts = writing.gather(receipt)
                if receipts is not None:
                    self._decide(writing, text, receipts)
                else:
                    self.nbytes_receipt = writing.nbytes_told
            written = writing.result(WriteDecision)
            if written.verdict is not None:
                return written.verdict
            with channel.exchange("replicas") as comparing:
                own = {name: dict(members) for name, members in part.replicas}
                digests = {name: own[name] for name in written.differing if name in own}
                gathered = comparing.gather(digests)
                if gathered is not None:
                    raise ValueError(_unequal_replicas(gathered))
            raise AssertionError("the replicas that differ were named")
        except BaseException as error:
            verdict = self.recover(attempt, error)
            if verdict is None:
                raise
            return verdict

    def _decide(self, writing: Exchange, text: EncodedCatalog, receipts: Sequence[Receipt]) -> None:
        """Check the receipts and commit, or name the replica groups that differ."""
        assert self._claim is not None
        if differing := mismatched_groups(receipts):
            writing.decide(WriteDecision(tuple(differing), None))
            return
        files, objects = check_receipts(text.catalog, self._by_writers(receipts))
        sizes = sizes_of(receipts)
        visibility_timeout_s = self._config.visibility_timeout_s
        commit_protocol.check_files(
            self._storage, self._claim.folder, sizes, timeout_s=visibility_timeout_s
        )
        index = Index(
            attempt=self._claim.attempt.name,
            save=self._request.save,
            step=self._request.step,
            catalog=text.catalog,
            files=files,
            objects=objects,
            attached=attached_of(receipts),
            metadata=self._request.mirrored,
            saved_by=self._request.saved_by,
            saved_at=time.time() if self._request.saved_at is None else self._request.saved_at,
        )
        verdict = replace(
            _verdict(index, *slowest_of([receipt.seconds for receipt in receipts])),
            num_linked=sum(receipt.linked[0] for receipt in receipts),
            nbytes_linked=sum(receipt.linked[1] for receipt in receipts),
        )
        try:
            commit_protocol.commit(self._storage, self._claim, index, text)
            writing.decide(WriteDecision((), verdict))
        except CheckpointError:
            raise
        except BaseException as error:  # an interrupt, mostly
            self._answer_interrupted(writing, verdict, error)
            raise

    def _answer_interrupted(
        self, writing: Exchange, verdict: CommitDecision, error: BaseException
    ) -> None:
        """Tell the others what became of a commit that was interrupted, unless it is undone."""
        assert self._claim is not None
        attempt, reason = self._claim.attempt, f"the commit was interrupted: {type(error).__name__}"
        fate = outcome.resolve_outcome(
            self._storage, self._path, attempt, by=self._by, reason=reason
        )
        if fate == "committed":
            writing.decide(WriteDecision((), verdict))
        elif fate != "abandoned":
            unsettled = outcome.unknown_outcome_error(fate, self._path, reason)
            writing.refuse(unsettled)
            # Who exits says nothing of it.
            _log.warning("%s: %s", type(error).__name__, unsettled)

    def recover_claim(self, error: BaseException) -> None:
        """Undo a claim of which the ranks could not be told."""
        if self._claim is not None:
            self.recover(self._claim.attempt, error)

    def recover(self, attempt: Attempt, error: BaseException) -> CommitDecision | None:
        """Make "not committed" true after a failure, or find that it was committed after all.

        Only the coordinator, and a rank that got no answer, touch the attempt: all others were
        told a verdict. Returns None if the error stands.
        """
        no_answer = isinstance(error, NoAnswerError)
        if self._claim is None and not no_answer:
            return None
        try:
            reason = f"{type(error).__name__}: {error}"[:500]
            if attempts.abandon(self._storage, self._path, attempt, by=self._by, reason=reason):
                if self._claim is not None:
                    commit_protocol.discard_attempt(self._storage, self._claim)
                return None
            return self._read_verdict(attempt) if no_answer else None
        except (CheckpointError, OSError) as failure:
            if no_answer:
                raise StorageError(
                    f"{self._path}: this rank was told no verdict ({error}), and the storage does "
                    f"not tell it either ({failure}): look with `dist-ckpt ls` what is there"
                ) from error
            _log.warning("%s of %s could not be cleaned up: %s", attempt, self._path, failure)
            return None

    def _read_verdict(self, attempt: Attempt) -> CommitDecision | None:
        """Return what the index says if this attempt is the checkpoint now.

        It is durable: `abandon` has made it so before it told that it is committed.
        """
        found, index = attempts.find(self._storage, self._path)
        if found != attempt:
            return None
        return _verdict(index, self._channel.rank, 0.0)

    def clean_up(self) -> None:
        """Remove what the committed attempt superseded. Coordinator; others have nothing to do."""
        if self._claim is not None:
            removal.supersede(self._storage, self._path, self._claim.attempt, self._claim.run)


def _verdict(index: Index, slowest_rank: int, slowest_s: float) -> CommitDecision:
    return CommitDecision(index.attempt, index.nbytes, index.num_files, slowest_rank, slowest_s)


def _unequal_replicas(told: Sequence[Mapping[str, Mapping[str, str]]]) -> str:
    """Say what differs between which ranks."""
    holders: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, groups in enumerate(told):
        for members in groups.values():
            for name, digest in members.items():
                holders[name][digest].append(rank)
    unequal = [
        f"{name} ({' differs from '.join(ranks_text(who) for who in found.values())})"
        for name, found in holders.items()
        if len(found) > 1
    ]
    remedy = remedy_of_parts(holders, "wrap what belongs to one rank in dc.PerRank")
    return (
        f"ranks hold different values under the same name: {listed(unequal, '; ')}. What is stored "
        f"once must be equal everywhere: broadcast it first, or {remedy}."
    )
