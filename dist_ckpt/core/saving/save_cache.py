"""What a session remembers of its saves, so that the next one with the same layout is fast."""

from __future__ import annotations

from dataclasses import dataclass, field

from dist_ckpt.core.comm.collectives.collective import Bodies
from dist_ckpt.core.format.index.catalog_json import EncodedCatalog
from dist_ckpt.core.planning.plan import (
    FilePlan,
    Inventory,
    ReplicaGroup,
    SavePlan,
    TensorEntry,
)
from dist_ckpt.core.planning.save.save_planner import (
    HeldCells,
    Origin,
    held_cells,
    items_of,
    numbered,
    origin_of,
    replica_groups_of,
)
from dist_ckpt.core.planning.selection import Selection
from dist_ckpt.core.shard_io.write.link_unchanged import LinkableSaves


@dataclass(frozen=True, slots=True)
class CachedPlan:
    """A plan, and what it was made of: this rank's inventory, and `bodies`, those of all ranks.

    `text` is how the plan's catalog stands in every index. `save_name` names the save that the plan
    was made for; it is "" until that save has a name. The plan is valid while every rank's
    inventory stays the same.
    """

    inventory: Inventory
    bodies: Bodies
    plan: SavePlan
    text: EncodedCatalog
    save_name: str = ""


@dataclass(frozen=True, slots=True)
class RankPlan:
    """A plan for one rank: its files, its replica groups, and the cells that it holds.

    `origins` has, for each item of each file, the cell that it is taken from. `cells` numbers
    them.
    """

    plan: SavePlan
    files: tuple[FilePlan, ...]
    groups: tuple[ReplicaGroup, ...]
    origins: tuple[tuple[Origin, ...], ...]
    cells: HeldCells

    @staticmethod
    def of(plan: SavePlan, inventory: Inventory, rank: int) -> RankPlan:
        """Return the part of one rank."""
        files = items_of(plan, rank)
        cells = numbered(held_cells(inventory, rank, plan))
        origins = tuple(
            tuple(origin_of(cells, item.fqn, item.cell) for item in file.items) for file in files
        )
        return RankPlan(plan, files, replica_groups_of(plan, rank), origins, cells)


@dataclass(frozen=True, slots=True)
class LinkPatterns:
    """The tensors that the patterns of `link_unchanged` match, under the names of their data."""

    patterns: tuple[str, ...]
    tensors: tuple[TensorEntry, ...]
    aliases: tuple[tuple[str, str], ...]
    names: tuple[str, ...]
    unmatched: tuple[str, ...]

    @staticmethod
    def of(patterns: tuple[str, ...], inventory: Inventory) -> LinkPatterns:
        """Match the names of an inventory."""
        names = {entry.fqn: entry.fqn for entry in inventory.tensors} | dict(inventory.aliases)
        matches = {
            pattern: {to for fqn, to in names.items() if fqn in Selection((pattern,))}
            for pattern in patterns
        }
        unmatched = tuple(
            f"link_unchanged: {pattern!r} matches no tensor: mend or remove it"
            for pattern in patterns
            if not matches[pattern]
        )
        matched = tuple(sorted(set().union(*matches.values())))
        return LinkPatterns(patterns, inventory.tensors, inventory.aliases, matched, unmatched)

    def is_for(self, patterns: tuple[str, ...], inventory: Inventory) -> bool:
        """Return True if they were matched with the names of this inventory."""
        same = (patterns, inventory.tensors, inventory.aliases)
        return (self.patterns, self.tensors, self.aliases) == same


@dataclass(slots=True)
class SaveCache:
    """The cache of one session. A plan may be out of date; its users compare inventories.

    `link_patterns` are cached because to match thousands of names takes long.
    """

    plan: CachedPlan | None = None
    rank_plan: RankPlan | None = None
    link_patterns: LinkPatterns | None = None
    linkable_saves: LinkableSaves = field(default_factory=LinkableSaves)
