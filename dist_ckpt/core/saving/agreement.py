"""Agree on the plan of a save and claim it. Make a new plan only if the cached one is not valid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

from dist_ckpt.core.comm.collectives.collective import DistinctPayloads, ranks_by_value
from dist_ckpt.core.comm.exchange.channel import check_equal_on_all_ranks
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.commit.records.incarnations import Incarnation
from dist_ckpt.core.format.index.index_json import EncodedCatalog
from dist_ckpt.core.planning.name_selection import find_common_problems
from dist_ckpt.core.planning.plan import Inventory, SavePlan
from dist_ckpt.core.planning.save import save_planner
from dist_ckpt.core.runtime import typed_msgpack
from dist_ckpt.core.runtime.processes import paused_collector
from dist_ckpt.core.runtime.typed_msgpack import Message
from dist_ckpt.core.shard_io.write.write_or_link import LinkableSaves
from dist_ckpt.message_text import listed, ranks_text


@dataclass(frozen=True, slots=True)
class AgreedPlan:
    """A plan and its input: this rank's inventory, and the encoded `inventories` of all ranks.

    The plan is valid until the inventory of a rank changes. `encoded_catalog` is the catalog as in
    an index. `nbytes_to_write` counts all ranks, without files that may be linked.
    `plan_id` identifies the plan on all ranks: the text of the attempt (or of the snapshot's id)
    that the first save with this plan claimed. It is "" before that save, unless the plan was made
    for it in advance. `is_new` until a save has used the plan.
    """

    inventory: Inventory
    inventories: DistinctPayloads
    save_plan: SavePlan
    encoded_catalog: EncodedCatalog
    nbytes_to_write: int
    plan_id: str = ""
    is_new: bool = True


@dataclass(slots=True)
class SaveCache:
    """The cache of one session. A cached plan may be invalid: compare the inventories."""

    plan: AgreedPlan | None = None
    linkable_saves: LinkableSaves = field(default_factory=LinkableSaves)


ClaimedT = TypeVar("ClaimedT")
PreparationT = TypeVar("PreparationT", bound="Preparation")


class SaveArguments(Message, frozen=True):
    """The arguments of one rank; they must be the same on all ranks.

    `metadata` is the digest of the user's metadata. `attached` has the digests of the attached
    files by name. Rank 0 lists all of them; another rank lists the same, or none. `selection` is a
    text of the options that select names. `root`, `incarnation_number` and `boundary` belong to the
    run that saves; without a run they are "", 0 and None.
    """

    step: int | None  # first, because an error about different arguments shows it first
    path: str
    overwrite: bool
    metadata: str
    attached: tuple[tuple[str, str], ...]
    selection: str
    root: str
    incarnation_number: int
    boundary: int | None
    check_replicas: str = "sample"

    @property
    def incarnation(self) -> Incarnation | None:
        """The incarnation of the run that saves, if there is a run."""
        return Incarnation(self.root, self.incarnation_number) if self.root else None


class SaveProposal(Message, frozen=True):
    """The arguments of a rank, and its cache.

    `cached_plan_id` is the `plan_id` of the cached plan if that plan is valid on this rank, else
    "". `connection_generation` is the `Collective.generation` of this rank. `pattern_problems` has
    a text for each pattern that matches nothing on this rank.
    """

    arguments: SaveArguments
    cached_plan_id: str
    connection_generation: int
    pattern_problems: tuple[str, ...]


_BY_DIGEST = ("metadata", "attached")
_COMPARED = tuple(name for name in SaveArguments.__struct_fields__ if name not in _BY_DIGEST)


class SaveAgreement(Message, Generic[ClaimedT], frozen=True):
    """The answer to the proposals.

    `claimed` is the claimed attempt, or in a background save the id of the snapshot. No other save
    of this group has the same. If it is None, the ranks make a new plan. `connection_generation` is
    the highest of all ranks; `Collective.renew` gets it.
    """

    claimed: ClaimedT | None
    connection_generation: int


class Preparation(Protocol):
    """The prepared part of one rank in a save, before the ranks agree.

    `pattern_problems` has a text for each pattern that matches nothing on this rank.
    """

    arguments: SaveArguments
    inventory: Inventory
    pattern_problems: tuple[str, ...]

    def accept_plan(self, plan: AgreedPlan) -> None:
        """Check the plan, or prepare for it. All ranks raise the error of any rank."""


def agree(
    session: Session,
    prepare: Callable[[], PreparationT],
    claim: Callable[[PreparationT, AgreedPlan], ClaimedT],
    agreement_type: type[SaveAgreement[ClaimedT]],
) -> tuple[PreparationT, ClaimedT, AgreedPlan]:
    """Agree on a save. Return this rank's preparation, what was claimed, and the plan. Collective.

    If the cached plan is valid on all ranks, this takes one exchange; otherwise two. The
    coordinator calls `claim` after all checks: it claims an attempt, or the id of a snapshot. All
    ranks raise the error of any rank.
    """
    with session.channel.exchange("agree") as agreeing:
        prepared = prepare()
        cached = session.cache(SaveCache).plan
        if cached is not None and cached.inventory == prepared.inventory:
            prepared.accept_plan(cached)
        else:
            cached = None
        plan_id = f"{cached.plan_id}{' new' * cached.is_new}" if cached and cached.plan_id else ""
        generation = session.collective.generation
        proposal = SaveProposal(prepared.arguments, plan_id, generation, prepared.pattern_problems)
        if (proposals := agreeing.gather(proposal)) is not None:
            claimed = claim(prepared, cached) if check_proposals(proposals) and cached else None
            generation = max(proposal.connection_generation for proposal in proposals)
            agreeing.decide(SaveAgreement(claimed, generation))
    agreement = agreeing.result(agreement_type)
    if agreement.claimed is not None and cached is not None:
        session.cache(SaveCache).plan = replace(cached, is_new=False)
        return prepared, agreement.claimed, cached
    session.collective.renew(agreement.connection_generation)
    with session.channel.exchange("plan") as planning:
        plan = plan_together(session, prepared.inventory)
        prepared.accept_plan(plan)
        planning.gather(None)
        if planning.is_coordinator:
            planning.decide(SaveAgreement(claim(prepared, plan), agreement.connection_generation))
    claimed = planning.result(agreement_type).claimed
    assert claimed is not None
    session.cache(SaveCache).plan = replace(plan, plan_id=str(claimed), is_new=False)
    return prepared, claimed, plan


def check_proposals(proposals: Sequence[SaveProposal]) -> bool:
    """Return True if the cached plan is valid on all ranks.

    ValueError if the arguments differ, or a pattern matches nothing on any rank.
    """
    arguments_by_rank = [proposal.arguments for proposal in proposals]
    check_equal_on_all_ranks("save", arguments_by_rank, _COMPARED)
    if len(by_digest := ranks_by_value(args.metadata for args in arguments_by_rank)) > 1:
        groups = " differs from ".join(ranks_text(ranks) for ranks in by_digest.values())
        raise ValueError(
            f"the ranks call save with different metadata=, config= or kind=: the metadata of "
            f"{groups}. Every rank must pass the same."
        )
    _check_attached(arguments_by_rank)
    if problems := find_common_problems(proposal.pattern_problems for proposal in proposals):
        raise ValueError(f"{arguments_by_rank[0].path}: {listed(problems, '; ')}")
    plan_ids = {proposal.cached_plan_id for proposal in proposals}
    return len(plan_ids) == 1 and "" not in plan_ids


def _check_attached(arguments_by_rank: Sequence[SaveArguments]) -> None:
    """Raise ValueError if a rank attaches different files than rank 0, unless it attaches none."""
    first = dict(arguments_by_rank[0].attached)
    for rank, arguments in enumerate(arguments_by_rank):
        attached = dict(arguments.attached)
        names = attached.keys() | first.keys()
        differing = sorted(name for name in names if attached.get(name) != first.get(name))
        if attached and differing:
            raise ValueError(
                f"rank {rank} attaches a different {differing[0]!r} than rank 0: give attach= only "
                f"on rank 0, or the same on every rank"
            )


def plan_together(session: Session, inventory: Inventory) -> AgreedPlan:
    """Gather the inventories, and make the same plan on every rank. Collective."""
    inventories = session.collective.all_gather_distinct(typed_msgpack.encode(inventory))
    plan = build_plan(inventories, session.channel.world_size)
    nbytes = save_planner.nbytes_to_write(plan)
    return AgreedPlan(inventory, inventories, plan, EncodedCatalog(plan.catalog), nbytes)


def build_plan(encoded: DistinctPayloads, world_size: int) -> SavePlan:
    """Plan a save from the encoded inventories of all ranks."""
    # Without the pause, garbage collection of thousands of new objects takes a third of the time.
    with paused_collector():
        inventories = [(typed_msgpack.decode(data, Inventory), ranks) for data, ranks in encoded]
        save_planner.check_num_tensors(inventories, world_size)
        return save_planner.plan_save(inventories, world_size)
