"""What is saved: agreed by all ranks, and planned anew only where the last plan does not hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from dist_ckpt.core.comm.collectives.collective import Bodies, distinct
from dist_ckpt.core.comm.exchange.channel import check_equal_on_all_ranks
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.format.index.catalog_json import EncodedCatalog
from dist_ckpt.core.planning.plan import Inventory, SavePlan
from dist_ckpt.core.planning.save.save_planner import plan_save
from dist_ckpt.core.planning.selection import unmatched_on_all
from dist_ckpt.core.runtime import typed_msgpack
from dist_ckpt.core.runtime.gc_pause import paused_collector
from dist_ckpt.core.runtime.typed_msgpack import Message
from dist_ckpt.errors import listed, ranks_text

NameT = TypeVar("NameT")


@dataclass(frozen=True, slots=True)
class CachedPlan:
    """A plan, and what it was made of: `inventory` is what this rank holds, `bodies` what all hold.

    `text` is how the plan's catalog stands in every index. `save_name` is that of the save which it
    was made for, "" until that has one. The plan is good for as long as every rank's inventory is
    what it was.
    """

    inventory: Inventory
    bodies: Bodies
    plan: SavePlan
    text: EncodedCatalog
    save_name: str = ""


class SaveProposal(Message, frozen=True):
    """What a rank asks for, all but the last three the same on all.

    `metadata` is a digest of the user's metadata, `attached` those of the files to attach, by name,
    and empty where a rank leaves them to rank 0; `chosen` says what of the state is saved. `root`
    and `start` are of the run that saves, "" and 0 without one, and `boundary` is which of its
    boundaries this is. `last` is the name of the last plan's save if it still is good here, else
    ""; `bulk` numbers the bulk connections. `unmatched` are the problems of patterns that select
    nothing here.
    """

    step: int | None  # first: of a run's steps that differ people know more than of their paths
    path: str
    overwrite: bool
    metadata: str
    attached: tuple[tuple[str, str], ...]
    chosen: str
    root: str
    start: int
    boundary: int | None
    last: str
    bulk: int
    unmatched: tuple[str, ...]


_BY_DIGEST = ("metadata", "attached")
_ALIKE = tuple(name for name in SaveProposal.__struct_fields__[:-3] if name not in _BY_DIGEST)


class SaveAgreement(Message, Generic[NameT], frozen=True):
    """The answer to the proposals: the save's name if the cached plan is valid on all ranks.

    The name is an attempt, or the id of a snapshot. No other save of this group has it. It is None
    if a new plan has to be made. `bulk` numbers the bulk connections.
    """

    name: NameT | None
    bulk: int


def cached_plan(ranks: Session, inventory: Inventory) -> CachedPlan | None:
    """Return the last plan, if this rank holds what it was made for."""
    last = ranks.kept(CachedPlan)
    return last if last is not None and last.inventory == inventory else None


def check_proposals(told: Sequence[SaveProposal]) -> bool:
    """Say whether the last plan is good on all ranks.

    ValueError if these want different things, or a pattern selects nothing on any of them.
    """
    check_equal_on_all_ranks("save", told, _ALIKE)
    _check_metadata(told)
    _check_attached(told)
    if problems := unmatched_on_all(one.unmatched for one in told):
        raise ValueError(f"{told[0].path}: {listed(problems, '; ')}")
    names = {one.last for one in told}
    return len(names) == 1 and "" not in names


def _check_metadata(told: Sequence[SaveProposal]) -> None:
    """Raise ValueError if ranks give other metadata, of which a digest is all that is known."""
    if len(given := distinct(one.metadata for one in told)) > 1:
        who = " differs from ".join(ranks_text(ranks) for ranks in given.values())
        raise ValueError(
            f"the ranks call save with different metadata=, config= or kind=: that of {who}. Every "
            f"rank must pass the same."
        )


def _check_attached(told: Sequence[SaveProposal]) -> None:
    """Raise ValueError if a rank attaches what rank 0 does not; those that attach nothing may."""
    first = dict(told[0].attached)
    for rank, one in enumerate(told):
        own = dict(one.attached)
        differing = sorted(n for n in own.keys() | first.keys() if own.get(n) != first.get(n))
        if own and differing:
            raise ValueError(
                f"rank {rank} attaches another {differing[0]!r} than rank 0: give attach= on rank "
                f"0 alone, or the same on every rank"
            )


def plan_together(ranks: Session, inventory: Inventory) -> CachedPlan:
    """Gather the inventories and plan, the same on every rank. Collective."""
    bodies = ranks.collectives_group.all_gather_distinct(typed_msgpack.encode(inventory))
    plan = plan_of(bodies, ranks.channel.world_size)
    return CachedPlan(inventory, bodies, plan, EncodedCatalog(plan.catalog))


def plan_of(bodies: Bodies, world_size: int) -> SavePlan:
    """Plan a save, given the ranks' inventories, packed."""
    # Thousands of new objects: to look for garbage among them takes a third of the time.
    with paused_collector():
        inventories = [(typed_msgpack.decode(body, Inventory), who) for body, who in bodies]
        return plan_save(inventories, world_size)
