"""A save as a sequence of exchanges: agree, plan where the last plan does not hold, write.

Each exchange spreads any rank's error to all of them. The coordinator, rank 0, claims the
attempt, compares the receipts with the plan and with the folder, and commits.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dist_ckpt import commit, paths, wire
from dist_ckpt.catalog_codec import CatalogText
from dist_ckpt.channel import COORDINATOR, Doc, NoAnswerError
from dist_ckpt.collector import paused_collector
from dist_ckpt.errors import CheckpointError, StorageError, listed, ranks_text
from dist_ckpt.index import Index, Json
from dist_ckpt.paths import Attempt
from dist_ckpt.plan import Inventory, Receipt, SavePlan
from dist_ckpt.receipts import check_receipts, differing_groups, sizes_of
from dist_ckpt.save_planner import plan_save
from dist_ckpt.session import Session
from dist_ckpt.storage import Storage

_log = logging.getLogger("dist_ckpt")


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """What a rank asks for; but for the storage all must ask alike.

    `metadata` is a digest of the user's metadata; `mirrored` and `saved_by` go into the index as
    the coordinator has them.
    """

    storage: Storage
    path: str
    step: int | None
    overwrite: bool
    metadata: str
    mirrored: Mapping[str, Json]
    saved_by: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class CachedPlan:
    """The plan of an earlier save, good for as long as every rank's inventory is what it was.

    `epoch` names the attempt that it was made for; `inventory` is what this rank held then;
    `text` is how the plan's catalog stands in every index.
    """

    epoch: str
    inventory: Inventory
    plan: SavePlan
    text: CatalogText


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was committed, over all ranks; rank `slowest_rank` took longest to write."""

    attempt: str
    nbytes: int
    num_files: int
    slowest_rank: int
    slowest_s: float


class SaveRun:
    """One save in progress, as one rank sees it: first `agree`, then `settle`.

    `nbytes_receipt` is the size of the receipt that it has sent; the coordinator sends none.
    """

    def __init__(self, ranks: Session) -> None:
        self.nbytes_receipt = 0
        self._ranks = ranks
        self._claim: commit.Claim | None = None
        self._interrupt: BaseException | None = None
        self._request: SaveRequest
        self._inventory: Inventory

    def agree(
        self, request: Callable[[], SaveRequest], inventory: Callable[[], Inventory]
    ) -> tuple[SavePlan, Attempt]:
        """Agree on what is saved, and claim an attempt. Collective: every rank calls this.

        One exchange does it where every rank's inventory is what it was when the cached plan was
        made. Until all have agreed nothing on disk has changed. Raises, on all ranks, what any
        of them raised.
        """
        ranks = self._ranks
        cached = ranks.plan_cache

        def describe() -> Doc:
            self._request = asked = request()
            self._inventory = inventory()
            hit = cached is not None and cached.inventory == self._inventory
            return {
                "path": asked.path,
                "step": asked.step,
                "overwrite": asked.overwrite,
                "metadata": asked.metadata,
                "epoch": cached.epoch if cached is not None and hit else "",
                "bulk": ranks.bulk_epoch,
            }

        def compare(payloads: Sequence[Doc]) -> Doc:
            check_alike("save", payloads, ("path", "step", "overwrite", "metadata"))
            epochs = {payload["epoch"] for payload in payloads}
            bulk = max(payload["bulk"] for payload in payloads)
            hit = len(epochs) == 1 and "" not in epochs
            return {"bulk": bulk, "attempt": self._make_claim() if hit else ""}

        try:
            answer = ranks.channel.exchange("agree", describe, compare)
            if answer["attempt"] and cached is not None:
                return cached.plan, _attempt(answer["attempt"])
            ranks.bulk_epoch = answer["bulk"]
            return self._plan()
        except BaseException as error:
            if self._claim is not None:  # claimed, but the ranks could not be told
                self._recover(self._claim.attempt, error)
            raise

    def _plan(self) -> tuple[SavePlan, Attempt]:
        """Gather the inventories and plan, the same on every rank; then claim."""
        ranks = self._ranks
        plan: SavePlan | None = None

        def gather_and_plan() -> Doc:
            nonlocal plan
            body = wire.pack(self._inventory)
            bodies = ranks.bulk().all_gather_distinct(body)
            # Thousands of new objects: to look for garbage among them takes a third of the time.
            with paused_collector():
                inventories = [(wire.unpack(body, Inventory), who) for body, who in bodies]
                plan = plan_save(inventories, ranks.channel.world_size)
            return None

        answer = ranks.channel.exchange("plan", gather_and_plan, lambda _: self._make_claim())
        assert plan is not None
        ranks.plan_cache = CachedPlan(answer, self._inventory, plan, CatalogText(plan.catalog))
        return plan, _attempt(answer)

    def _make_claim(self) -> str:
        self._claim = commit.claim(
            self._storage, self._path, overwrite=self._request.overwrite, by=self._by
        )
        return self._claim.attempt.name

    @property
    def _storage(self) -> Storage:
        return self._request.storage

    @property
    def _path(self) -> str:
        return self._request.path

    @property
    def _by(self) -> str:
        return f"rank {self._ranks.channel.rank} on {self._ranks.channel.host}"

    def settle(
        self,
        plan: SavePlan,
        attempt: Attempt,
        write: Callable[[], Receipt],
        replica_digests: Callable[[str], Mapping[str, str]],
    ) -> Verdict:
        """Write this rank's part and settle whether the save is committed. Collective.

        On return the checkpoint is durable. Whatever is raised instead, no checkpoint was made;
        a StorageError that says so is the exception: it is there, but may not outlive a power
        cut. `replica_digests` tells the digests of one replica group's members, by name.
        """
        ranks = self._ranks
        try:
            answer = ranks.channel.exchange(
                "write",
                lambda: {"receipt": self._write(attempt, write)},
                lambda payloads: self._decide(plan, payloads),
            )
            if differing := answer["differing"]:
                ranks.channel.exchange(
                    "replicas",
                    lambda: {group: dict(replica_digests(group)) for group in differing},
                    _name_unequal_replicas,
                )
            if self._interrupt is not None:
                raise self._interrupt
            return Verdict(**answer["verdict"])
        except BaseException as error:
            verdict = self._recover(attempt, error)
            if verdict is None:
                raise
            return verdict

    def _write(self, attempt: Attempt, write: Callable[[], Receipt]) -> bytes:
        if self._claim is None:
            commit.await_claim(self._storage, self._path, attempt, self._ranks.config.appear_s)
        receipt = wire.pack(write())
        if self._ranks.channel.rank != COORDINATOR:
            self.nbytes_receipt = len(receipt)
        return receipt

    def _decide(self, plan: SavePlan, payloads: Sequence[Doc]) -> Doc:
        """Check the receipts and commit, or name the replica groups that differ."""
        assert self._claim is not None
        receipts = [wire.unpack(payload["receipt"], Receipt) for payload in payloads]
        if differing := differing_groups(receipts):
            return {"differing": differing, "verdict": {}}
        files, objects = check_receipts(plan.catalog, receipts)
        sizes = sizes_of(receipts)
        appear_s = self._ranks.config.appear_s
        commit.check_files(self._storage, self._claim.folder, sizes, timeout_s=appear_s)
        index = Index(
            attempt=self._claim.attempt.name,
            step=self._request.step,
            catalog=plan.catalog,
            files=files,
            objects=objects,
            metadata=self._request.mirrored,
            saved_by=self._request.saved_by,
            saved_at=time.time(),
        )
        self._commit(self._claim, index)
        slowest = max(range(len(receipts)), key=lambda rank: receipts[rank].seconds)
        verdict = {
            "attempt": self._claim.attempt.name,
            "nbytes": sum(sizes.values()),
            "num_files": len(sizes),
            "slowest_rank": slowest,
            "slowest_s": receipts[slowest].seconds,
        }
        return {"differing": [], "verdict": verdict}

    def _commit(self, claim: commit.Claim, index: Index) -> None:
        try:
            commit.commit(self._storage, claim, index, self._ranks.plan_cache.text)
        except StorageError as error:
            reason = f"the commit failed: {error}"[:500]
            if commit.abandon(self._storage, self._path, claim.attempt, by=self._by, reason=reason):
                raise
            # A sync that failed cannot be made good by another one (fsync forgets its errors).
            raise StorageError(
                f"{error}. The checkpoint is in place, but it is unknown whether it outlives a "
                "power cut: see what is wrong with the storage, then save once more"
            ) from error
        except (KeyboardInterrupt, SystemExit) as interrupt:
            reason = f"it was interrupted: {type(interrupt).__name__}"
            if commit.abandon(self._storage, self._path, claim.attempt, by=self._by, reason=reason):
                raise
            # The others must be told what is true: it is raised when they have been.
            self._interrupt = interrupt

    def _recover(self, attempt: Attempt, error: BaseException) -> Verdict | None:
        """Make "not committed" true after a failure, or find that it was committed after all.

        Only the coordinator, and a rank that got no answer, touch the attempt: all others were
        told a verdict. Returns None if the error stands.
        """
        no_answer = isinstance(error, NoAnswerError)
        if self._claim is None and not no_answer:
            return None
        try:
            reason = f"{type(error).__name__}: {error}"[:500]
            if commit.abandon(self._storage, self._path, attempt, by=self._by, reason=reason):
                if self._claim is not None:
                    commit.give_up(self._storage, self._claim)
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

    def _read_verdict(self, attempt: Attempt) -> Verdict | None:
        """Return what the index says if this attempt is the checkpoint now.

        It is durable: `abandon` has made it so before it told that it is committed.
        """
        found, index = commit.find(self._storage, self._path)
        if found != attempt:
            return None
        nbytes = sum(f.nbytes for f in index.files) + sum(f.nbytes for f in index.objects)
        num_files = len(index.files) + len(index.objects)
        return Verdict(attempt.name, nbytes, num_files, self._ranks.channel.rank, 0.0)

    def clean_up(self) -> None:
        """Remove what the committed attempt superseded. Never raises: the save has succeeded."""
        if self._claim is None:
            return
        try:
            commit.supersede(self._storage, self._path, self._claim.attempt)
        except (CheckpointError, OSError) as error:
            _log.warning("%s: an older attempt could not be removed yet: %s", self._path, error)


def check_alike(operation: str, payloads: Sequence[Doc], names: Sequence[str]) -> None:
    """Raise ValueError if ranks ask for different things, naming who asks for what."""
    for name in names:
        asked = defaultdict(list)
        for rank, payload in enumerate(payloads):
            asked[payload[name]].append(rank)
        if len(asked) > 1:
            told = "; ".join(f"{ranks_text(who)}: {what!r}" for what, who in asked.items())
            raise ValueError(
                f"the ranks call {operation} with different {name}: {told}. "
                f"Every rank must pass the same {name}."
            )


def _attempt(name: str) -> Attempt:
    attempt = paths.parse_attempt(name)
    assert attempt is not None
    return attempt


def _name_unequal_replicas(payloads: Sequence[Doc]) -> Doc:
    """Raise the ValueError that names what differs between which ranks."""
    holders: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, groups in enumerate(payloads):
        for members in groups.values():
            for name, digest in members.items():
                holders[name][digest].append(rank)
    unequal = [
        f"{name} ({' differs from '.join(ranks_text(who) for who in found.values())})"
        for name, found in holders.items()
        if len(found) > 1
    ]
    raise ValueError(
        f"ranks hold different values under the same name: {listed(unequal, '; ')}. What is stored "
        "once must be equal everywhere: broadcast it first, or wrap what belongs to one rank in "
        "dc.PerRank."
    )
