"""What is saved: agreed by all ranks, and planned anew only where the last plan does not hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dist_ckpt.comm.collective import Bodies
from dist_ckpt.comm.exchange import Doc, check_alike
from dist_ckpt.comm.session import Session
from dist_ckpt.format.catalog_json import CatalogText
from dist_ckpt.planning import plan_msgpack
from dist_ckpt.planning.plan import Inventory, SavePlan
from dist_ckpt.planning.save_planner import plan_save
from dist_ckpt.runtime.gc_pause import paused_collector

# What all ranks must ask alike.
_ALIKE = ("path", "step", "overwrite", "metadata")


@dataclass(frozen=True, slots=True)
class CachedPlan:
    """The plan of an earlier save, good for as long as every rank's inventory is what it was.

    `epoch` names the save that it was made for; `inventory` is what this rank held then, `bodies`
    what all held, packed; `text` is how the plan's catalog stands in every index.
    """

    epoch: str
    inventory: Inventory
    bodies: Bodies
    plan: SavePlan
    text: CatalogText


class PlanAgreement:
    """The first exchanges of a save, as one rank sees them.

    `begin` is called on the coordinator once all agree, and names the save: no other save that
    this group makes has that name. `prepare` is called on every rank with the plan and what it was
    made of, before that, so that whatever it raises is raised on all ranks; maybe twice.
    """

    def __init__(
        self,
        ranks: Session,
        begin: Callable[[], str],
        prepare: Callable[[SavePlan, Bodies], None] = lambda plan, bodies: None,
    ) -> None:
        self._ranks = ranks
        self._begin = begin
        self._prepare = prepare
        self._inventory: Inventory

    def agree(
        self, ask: Callable[[], Doc], inventory: Callable[[], Inventory]
    ) -> tuple[CachedPlan, str]:
        """Return the plan and the name of the save. Collective: every rank calls this.

        `ask` says what this rank asks for. One exchange does it where every rank's inventory is
        what it was when the cached plan was made. Raises, on all ranks, what any of them raised.
        """
        ranks = self._ranks
        cached: CachedPlan | None = ranks.plan_cache

        def describe() -> Doc:
            asked = ask()
            self._inventory = inventory()
            epoch = ""
            if cached is not None and cached.inventory == self._inventory:
                epoch = cached.epoch
                self._prepare(cached.plan, cached.bodies)
            return {**asked, "epoch": epoch, "bulk": ranks.bulk_epoch}

        def compare(payloads: Sequence[Doc]) -> Doc:
            check_alike("save", payloads, _ALIKE)
            epochs = {payload["epoch"] for payload in payloads}
            bulk = max(payload["bulk"] for payload in payloads)
            hit = len(epochs) == 1 and "" not in epochs
            return {"bulk": bulk, "name": self._begin() if hit else ""}

        answer = ranks.channel.exchange("agree", describe, compare)
        if answer["name"] and cached is not None:
            return cached, answer["name"]
        ranks.bulk_epoch = answer["bulk"]
        return self._plan()

    def _plan(self) -> tuple[CachedPlan, str]:
        """Gather the inventories and plan, the same on every rank."""
        ranks = self._ranks
        bodies: Bodies = ()
        plan: SavePlan | None = None

        def gather_and_plan() -> Doc:
            nonlocal bodies, plan
            bodies = ranks.bulk().all_gather_distinct(plan_msgpack.pack(self._inventory))
            plan = plan_of(bodies, ranks.channel.world_size)
            self._prepare(plan, bodies)
            return None

        name = ranks.channel.exchange("plan", gather_and_plan, lambda _: self._begin())
        assert plan is not None
        ranks.plan_cache = cached = CachedPlan(
            name, self._inventory, bodies, plan, CatalogText(plan.catalog)
        )
        return cached, name


def plan_of(bodies: Bodies, world_size: int) -> SavePlan:
    """Plan a save, given the ranks' inventories, packed."""
    # Thousands of new objects: to look for garbage among them takes a third of the time.
    with paused_collector():
        inventories = [(plan_msgpack.unpack(body, Inventory), who) for body, who in bodies]
        return plan_save(inventories, world_size)
