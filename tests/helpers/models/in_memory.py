"""Saves and loads states through the planners alone: no storage, no files, no processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.geometry import Region, pieces, row_major_strides
from dist_ckpt.core.format.objects import objects_file
from dist_ckpt.core.planning.name_selection import parse_selection
from dist_ckpt.core.planning.plan import SavePlan
from dist_ckpt.core.planning.save.save_planner import find_local_cells, plan_save
from dist_ckpt.core.state.binding.bind import (
    Binding,
    bind,
    build_saved_tree,
    read_template,
    unexpected_problem,
)
from dist_ckpt.core.state.inventory_builder import LocalState, build_inventory
from dist_ckpt.core.state.tensors.plain_torch import make_torch_value
from dist_ckpt.errors import IncompatibleError


class Stateful:
    """An object of one state. It counts the calls of `state_dict`, and keeps what it has loaded."""

    def __init__(self, state: Any) -> None:
        self.state = state
        self.loaded: Any = None
        self.calls = 0

    def state_dict(self) -> Any:
        self.calls += 1
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = self.loaded = state


class InMemory:
    """A checkpoint whose bytes are copies of what each rank held."""

    def __init__(self, plan: SavePlan, locals_: Sequence[LocalState]) -> None:
        self.plan = plan
        self.catalog = plan.catalog
        self.bytes = {}
        values: dict[str, Any] = {}
        per_rank: dict[str, dict[Any, Any]] = {}
        for rank, local in enumerate(locals_):
            held = find_local_cells(local.inventory, rank, plan)
            for fqn, parts in local.parts.items():
                if fqn in held:
                    assert len(held[fqn]) == len(parts)
                    for number, cell in enumerate(held[fqn]):
                        source = local.reader(fqn, number)
                        data = source.read(0, source.nbytes, memoryview(bytearray(source.nbytes)))
                        self.bytes[fqn, cell] = bytes(data)
            for fqn, value in local.values.items():
                values.setdefault(fqn, value)
            for fqn, (key, value) in local.per_rank.items():
                per_rank.setdefault(fqn, {}).setdefault(key, value)
        self.values = values
        names = {names.fqn: list(names.names) for names in plan.name_lists}
        # As on disk: what rank 0 lacks is in the file of the rank that stores it.
        ranks = plan.catalog.values
        main = {fqn: value for fqn, value in values.items() if not ranks[fqn]}
        self._main = objects_file.encode(
            objects_file.ObjectsFile(
                plan.tree,
                {**main, **names},
                {},
                plan.numpy,
                objects=plan.objects,
                uncut=dict(plan.uncut),
            )
        )
        self._others = {
            rank: objects_file.encode(
                objects_file.ObjectsFile(
                    values={fqn: value for fqn, value in values.items() if ranks[fqn] == rank},
                    per_rank={
                        fqn: {
                            key: value
                            for key, value in keyed.items()
                            if (key, rank) in plan.catalog.per_rank[fqn]
                        }
                        for fqn, keyed in per_rank.items()
                    },
                )
            )
            for rank in range(len(locals_))
        }
        self.read: list[int] = []

    def bind(self, state: Any, rank: int = 0, world_size: int = 1, **options: Any) -> Binding:
        template = read_template(
            state,
            sharding=options.get("sharding"),
            rank=rank,
            world_size=world_size,
            group_ranks=range(world_size),
        )
        return bind(
            template,
            build_saved_tree(
                self.catalog, self._decoded(self._main), self._of_rank, rename=options.get("rename")
            ),
            strict=options.get("strict", True),
            selection=parse_selection(options.get("include"), options.get("exclude")),
            keys=options.get("keys", {name: (key,) for name, key in template.keys.items()}),
        )

    def change(self, fqn: str, value: object) -> None:
        """Replace a value that was saved, as somebody could who writes the files."""
        main = self._decoded(self._main)
        changed = replace(main, values={**main.values, fqn: value})
        self._main = objects_file.encode(changed)

    def forget_objects(self) -> None:
        """Leave the objects file without the names of objects, as older ones are."""
        self._main = objects_file.encode(replace(self._decoded(self._main), objects=()))

    def flatten_keys(self) -> None:
        """Mark all keys as texts that DCP has made of them."""
        self._main = objects_file.encode(replace(self._decoded(self._main), has_text_keys=True))

    def lose_values(self) -> None:
        """Leave the objects files without what the catalog says is in them."""
        main = self._decoded(self._main)
        self._main = objects_file.encode(replace(main, values={}))
        self._others = dict.fromkeys(self._others, objects_file.encode(objects_file.ObjectsFile()))

    def finish(self, binding: Binding) -> None:
        targets = binding.allocate()
        for wanted in binding.wanted:
            for number, cell in enumerate(wanted.cells):
                self._copy(wanted.fqn, wanted.shape, cell, targets[wanted.fqn, number])
        binding.finish_tensors()
        binding.assign_values()
        binding.load_objects()

    def _of_rank(self, rank: int) -> objects_file.ObjectsFile:
        self.read.append(rank)
        return self._decoded(self._others[rank])

    def _decoded(self, data: bytes) -> objects_file.ObjectsFile:
        return objects_file.decode(data, make=make_torch_value)

    def _copy(self, fqn: str, shape: Any, cell: Any, target: Any) -> None:
        for (stored_fqn, stored), data in self.bytes.items():
            if stored_fqn != fqn:
                continue
            for source in pieces(stored, shape):
                for piece in pieces(cell, shape):
                    common = source.region.intersect(piece.region)
                    if common is not None:
                        itemsize = DTYPES[self.catalog.tensors[fqn].dtype].itemsize
                        _place(data, itemsize, source, piece, common, target)


def _place(
    data: bytes, itemsize: int, source: Any, piece: Any, common: Region, target: Any
) -> None:
    strides = row_major_strides(source.region.shape)
    at = common.relative_to(source.region.offset).offset
    start = source.start + sum(o * s for o, s in zip(at, strides, strict=True))
    target.place(piece, common, memoryview(data)[start * itemsize :], strides)


def save(*states: Mapping[Any, Any], sharding: Any = None) -> InMemory:
    """Save the states of as many ranks."""
    world_size = len(states)
    taken = [
        build_inventory(
            state,
            sharding=sharding,
            rank=rank,
            world_size=world_size,
            group_ranks=range(world_size),
        )
        for rank, state in enumerate(states)
    ]
    plan = plan_save([(local.inventory, (r,)) for r, local in enumerate(taken)], world_size)
    return InMemory(plan, taken)


def load(checkpoint: InMemory, state: Any, **options: Any) -> Binding:
    """Load into a state of one rank; problems are raised as a load raises them."""
    binding = checkpoint.bind(state, **options)
    problems = list(binding.problems)
    if binding.unrequested and options.get("strict", True):
        problems.append(unexpected_problem(binding.unrequested))
    if problems:
        raise IncompatibleError("\n".join(problems))
    checkpoint.finish(binding)
    return binding
