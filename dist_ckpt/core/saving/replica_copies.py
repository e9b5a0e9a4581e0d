"""The option `replicas`: apply its rules to a rank's state, and compute the means.

`ReplicaDistance` compares copies that differ although no rule names them, for the error.

The mean of an element is defined. The copies are added in float64, from the lowest rank to the
highest. The sum is divided by their number, and torch converts the quotient to the dtype. Copies
that are equal, bit for bit, are stored as they are. The state does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import isfinite, prod

import torch
from msgspec import structs

from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.commit.unequal_replicas import CopySample
from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.geometry import Cell, Region, row_major_strides
from dist_ckpt.core.format.index.index import Key
from dist_ckpt.core.format.index.tensor_ranges import parameter_ranges
from dist_ckpt.core.planning.plan import Inventory, SavePlan, TensorEntry
from dist_ckpt.core.planning.replica_rules import MEAN_DTYPES, ReplicaRule, ReplicaRules
from dist_ckpt.core.planning.tensor_views import (
    Fused,
    MeshPlaced,
    ReplicatedAxis,
    RuleSharded,
    View,
    Whole,
    compute_cells,
)
from dist_ckpt.core.runtime import typed_msgpack
from dist_ckpt.core.runtime.typed_msgpack import Message
from dist_ckpt.core.saving.rank_save import RankSave, StateReader, sample_offsets
from dist_ckpt.core.shard_io.memory.torch_tensor import TensorReader
from dist_ckpt.core.state.inventory_builder import LocalState
from dist_ckpt.core.state.tensors.local_tensors import as_numpy, torch_dtype
from dist_ckpt.core.state.tensors.plain_torch import without_tensors
from dist_ckpt.core.state.tree.containers import find_enclosing_subclass
from dist_ckpt.message_text import format_size, ranks_text

# --- the rules ---------------------------------------------------------------------------------


def apply_replica_rules(
    local: LocalState, rules: ReplicaRules, *, rank: int, world_size: int
) -> LocalState:
    """Return the state with the rule of each name in its inventory.

    Tensors and values with the rule "per_rank" become per-rank values. If each rank has
    another shard of a tensor, there are no copies, and it stays a tensor. Raises ValueError for a
    rule that has no meaning for a name.
    """
    inventory = local.inventory
    aliases = dict(inventory.aliases)
    names = [entry.fqn for entry in inventory.tensors] + [*aliases, *inventory.values]
    found: dict[str, ReplicaRule] = {}
    for name in names:
        if (rule := rules.find(name)) is not None:
            stored = aliases.get(name, name)
            if found.setdefault(stored, rule) != rule:
                raise ValueError(
                    f"replicas has two rules for {stored!r} and {name!r}, which are one tensor: "
                    "give both the same"
                )
    views = inventory.views
    for entry in inventory.tensors:
        if found.get(entry.fqn) == "mean":
            _check_mean(entry, inventory)
    entries = {entry.fqn: entry for entry in inventory.tensors}
    own = [
        name
        for name, rule in found.items()
        if rule == "per_rank"
        and world_size > 1
        and (name not in entries or _is_replica(views[entries[name].view]))
    ]
    chosen = {n: r for n, r in found.items() if r != "per_rank" or n in own}
    problems = rules.pattern_problems([*names, *(fqn for fqn, _ in inventory.per_rank)])
    local = replace(
        local,
        inventory=structs.replace(inventory, replicas=tuple(chosen.items())),
        pattern_problems=(*local.pattern_problems, *problems),
    )
    return _separate_copies(local, own, rank) if own else local


def _check_mean(entry: TensorEntry, inventory: Inventory) -> None:
    if (subclass := find_enclosing_subclass(entry.fqn, inventory.values)) is not None:
        raise ValueError(
            f'{subclass}: replicas gives it "mean", and it is a tensor subclass, whose parts have '
            'no mean: give it "rank0" or "per_rank"'
        )
    if entry.dtype not in MEAN_DTYPES:
        raise ValueError(
            f'{entry.fqn}: replicas gives it "mean", and it is {entry.dtype}. Only real floating '
            'types have a mean: give it "rank0" or "per_rank", in a pattern before this one'
        )


def _is_replica(view: View) -> bool:
    """Return True if other ranks may have a copy of this rank's part."""
    match view:
        case Whole():
            return True
        case MeshPlaced():
            placements = zip(view.placements, view.mesh.shape, strict=True)
            return any(isinstance(p, ReplicatedAxis) and size > 1 for p, size in placements)
        case RuleSharded():
            free = {*range(len(view.mesh.shape))} - _cutting_axes(view)
            return any(view.mesh.shape[axis] > 1 for axis in free)
        case Fused():
            common = [all(isinstance(p, ReplicatedAxis) for p in ps) for ps in _columns(view)]
            return any(c and n > 1 for c, n in zip(common, view.mesh.shape, strict=True))
        case _:
            return False


def _columns(view: Fused) -> Iterator[tuple[object, ...]]:
    return zip(*(placements for _, placements in view.pieces), strict=True)


def _cutting_axes(view: RuleSharded) -> set[int]:
    return {axis for axes in (*view.axes, *(p.axes for p in view.pieces)) for axis in axes}


def _separate_copies(local: LocalState, own: Sequence[str], rank: int) -> LocalState:
    """Turn tensors and values, also under their tied names, into per-rank values."""
    inventory, chosen = local.inventory, {*own}
    stored = {name: name for name in own} | {a: t for a, t in inventory.aliases if t in chosen}
    if lists := [
        names.fqn for names in inventory.name_lists if names.fqn[: -len(".params")] in chosen
    ]:
        raise ValueError(
            f'{lists[0][: -len(".params")]}: replicas gives it "per_rank", and it is a group of an '
            'optimizer: give it "rank0"'
        )
    data: dict[str, tuple[Key, object]] = {}
    for name, fqn in stored.items():
        if fqn in local.values:
            data[name] = rank, local.values[fqn]
        else:
            parts = [part.detach() for part in local.parts[fqn]]
            value: object = parts[0] if len(parts) == 1 else parts
            if fqn in inventory.numpy and len(parts) == 1:
                value = as_numpy(parts[0])
            data[name] = rank, without_tensors(value, name)
    kept = [entry for entry in inventory.tensors if entry.fqn not in chosen]
    trained = {
        entry.fqn: is_trained
        for first, count, is_trained in inventory.parameters
        for entry in inventory.tensors[first : first + count]
    }
    return replace(
        local,
        inventory=structs.replace(
            inventory,
            tensors=tuple(kept),
            aliases=tuple((a, t) for a, t in inventory.aliases if t not in chosen),
            values=tuple(fqn for fqn in inventory.values if fqn not in chosen),
            per_rank=(*inventory.per_rank, *((name, None) for name in stored)),
            numpy=tuple(fqn for fqn in inventory.numpy if fqn not in chosen),
            parameters=parameter_ranges((entry.fqn for entry in kept), trained),
            replicas=(*inventory.replicas, *((a, "per_rank") for a in stored if a not in chosen)),
        ),
        values={fqn: value for fqn, value in local.values.items() if fqn not in chosen},
        per_rank={**local.per_rank, **data},
    )


# --- means -------------------------------------------------------------------------------------

# The copies of all ranks are in the memory of each rank at the same time.
_MAX_NBYTES = 1 << 30

# The bytes of each local part, by its name and its place in the tensor.
_Copies = tuple[tuple[str, bytes], ...]


class _MeanProposal(Message, frozen=True):
    """The bytes of one rank's copies, and the number of its bulk connections."""

    nbytes: int
    connection_generation: int


class _MeanAgreement(Message, frozen=True):
    """The number of the bulk connections to use."""

    connection_generation: int


def average_replicas(session: Session, read: Callable[[], RankSave]) -> StateReader:
    """Return the state with the means of replicas. Collective: every rank calls this.

    `read` reads the state of this rank. All ranks raise the error of any rank.
    """
    with session.channel.exchange("copies") as proposing:
        local = read().local_state
        places = dict(_find_places(local, session.channel.rank))
        copies = tuple(_read_copies(local, places))
        nbytes = sum(len(data) for _, data in copies)
        proposal = _MeanProposal(nbytes, session.collective.generation)
        if (proposals := proposing.gather(proposal)) is not None:
            _check_size(sum(proposal.nbytes for proposal in proposals))
            generation = max(proposal.connection_generation for proposal in proposals)
            proposing.decide(_MeanAgreement(generation))
    session.collective.renew(proposing.result(_MeanAgreement).connection_generation)
    with session.channel.exchange("means"):
        gathered = session.collective.all_gather_distinct(typed_msgpack.encode(copies))
        means = _compute_means(
            [(typed_msgpack.decode(data, _Copies), ranks) for data, ranks in gathered], places
        )
        averaged = _with_means(local, places, means)
    return StateReader(lambda: averaged)


def _check_size(nbytes: int) -> None:
    if nbytes > _MAX_NBYTES:
        raise ValueError(
            f'the copies with the rule "mean" have {format_size(nbytes)}, on all ranks together. '
            f"Every rank needs memory for them, at most {format_size(_MAX_NBYTES)}: give the rule "
            'to fewer tensors in replicas=, or use "rank0"'
        )


def _find_places(local: LocalState, rank: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each tensor with the rule "mean", and the place of each of its local parts."""
    inventory = local.inventory
    chosen = {fqn for fqn, rule in inventory.replicas if rule == "mean"}
    for entry in inventory.tensors if chosen else ():
        if entry.fqn in chosen:
            view = inventory.views[entry.view]
            if isinstance(view, RuleSharded):
                own = _coordinates(view, rank)
                places = [f"{own} {number}" for number in range(len(local.parts[entry.fqn]))]
            else:
                places = [str(cell) for cell in compute_cells(view, rank, entry.shape)]
            yield entry.fqn, tuple(f"{entry.fqn} {entry.dtype} {place}" for place in places)


def _coordinates(view: RuleSharded, rank: int) -> tuple[int, ...]:
    """Return the coordinates of a rank on the mesh axes that cut the tensor."""
    every = product(*map(range, view.mesh.shape))
    own = dict(zip(view.mesh.ranks, every, strict=True))[rank]
    return tuple(own[axis] for axis in sorted(_cutting_axes(view)))


def _read_copies(
    local: LocalState, places: Mapping[str, tuple[str, ...]]
) -> Iterator[tuple[str, bytes]]:
    local.synchronize()
    for fqn, of_parts in places.items():
        for place, part in zip(of_parts, local.parts[fqn], strict=True):
            reader = TensorReader(part)
            scratch = memoryview(bytearray(reader.nbytes))
            yield place, bytes(reader.read(0, reader.nbytes, scratch))


def _compute_means(
    gathered: Iterable[tuple[_Copies, tuple[int, ...]]], places: Mapping[str, tuple[str, ...]]
) -> dict[str, bytes]:
    """Return the mean for each place of this rank whose copies differ."""
    dtypes = {
        place: place[len(fqn) + 1 :].partition(" ")[0]
        for fqn, of_parts in places.items()
        for place in of_parts
    }
    copies: dict[str, list[tuple[int, bytes]]] = {place: [] for place in dtypes}
    for sent, ranks in gathered:
        for place, data in sent:
            if place in copies:
                copies[place] += ((rank, data) for rank in ranks)
    return {
        place: mean_of([data for _, data in sorted(of)], torch_dtype(dtypes[place]))
        for place, of in copies.items()
        if len({data for _, data in of}) > 1 and len({len(data) for _, data in of}) == 1
    }


def mean_of(copies: Iterable[bytes], dtype: torch.dtype) -> bytes:
    """Return the mean of copies with different values, which are in the order of their ranks."""
    tensors = [torch.frombuffer(bytearray(data), dtype=dtype).double() for data in copies]
    total = tensors[0]
    for tensor in tensors[1:]:
        total += tensor
    reader = TensorReader((total / len(tensors)).to(dtype))
    return bytes(reader.read(0, reader.nbytes, memoryview(bytearray())))


def _with_means(
    local: LocalState, places: Mapping[str, tuple[str, ...]], means: Mapping[str, bytes]
) -> LocalState:
    parts = dict(local.parts)
    for fqn, of_parts in places.items():
        parts[fqn] = tuple(
            torch.frombuffer(bytearray(means[place]), dtype=part.dtype).view(part.shape)
            if place in means
            else part
            for place, part in zip(of_parts, local.parts[fqn], strict=True)
        )
    return replace(local, parts=parts)


# --- how far apart copies are ------------------------------------------------------------------

_MAX_TEXT_CHARS = 40
# Their values, as float64, are compared.
_COMPARED = MEAN_DTYPES | {
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool")
}


@dataclass(frozen=True, slots=True)
class ReplicaDistance:
    """Reads samples of the copies of one save, and compares those of all ranks."""

    rank_save: RankSave
    plan: SavePlan

    def read(self, names: Sequence[str], nbytes: int) -> tuple[CopySample, ...]:
        """Return samples of this rank's copies, each of at most `nbytes`."""
        cells = self.rank_save.replica_cells(self.plan)
        return tuple(
            self._sample_cell(name, *cells[name], nbytes)
            if name in cells
            else CopySample(name, "", (), (), (), 0, b"", self._value_text(name))
            for name in names
        )

    def _sample_cell(self, name: str, fqn: str, cell: Cell, nbytes: int) -> CopySample:
        reader = self.rank_save.replica_reader(self.plan, fqn, cell)
        offsets = tuple(sample_offsets(reader.nbytes, name))
        block = min(offsets[1:2] or (reader.nbytes,))
        block = min(block, 64 << 10, nbytes // max(len(offsets), 1) // 16 * 16)
        scratch = memoryview(bytearray(block))
        data = b"".join(
            bytes(reader.read(start, min(start + block, reader.nbytes), scratch))
            for start in offsets
        )
        region = cell if isinstance(cell, Region) else Region((cell.start,), (cell.numel,))
        dtype = self.plan.catalog.tensors[fqn].dtype
        return CopySample(name, dtype, region.offset, region.shape, offsets, block, data)

    def _value_text(self, name: str) -> str:
        """Return the text of a short plain value, or ""."""
        value = self.rank_save.local_state.values.get(name)
        is_plain = value is None or type(value) in (bool, int, float, str)
        return text if is_plain and len(text := repr(value)) <= _MAX_TEXT_CHARS else ""

    def describe(self, samples: Mapping[int, CopySample]) -> str:
        """Return how far apart the copies of one name are, by rank; "" if it is unknown."""
        first = next(iter(samples.values()))
        if not first.dtype:
            texts = [f"{sample.text} on {ranks_text([r])}" for r, sample in samples.items()]
            return ", ".join(texts) if all(sample.text for sample in samples.values()) else ""
        if first.dtype not in _COMPARED:
            return ""
        copies = [_as_float64(sample) for sample in samples.values()]
        return _distance_text(torch.stack(copies), [*samples], first)


def _as_float64(sample: CopySample) -> torch.Tensor:
    return torch.frombuffer(bytearray(sample.data), dtype=torch_dtype(sample.dtype)).double()


def _distance_text(copies: torch.Tensor, ranks: Sequence[int], sample: CopySample) -> str:
    """Return the two copies that are farthest apart, and at which element."""
    ordered = copies.where(~copies.isnan(), torch.inf)  # nan is far from every number
    (highest, a), (lowest, b) = ordered.max(0), ordered.min(0)
    spread = (highest - lowest).nan_to_num(nan=0, posinf=torch.inf)
    element = int(spread.argmax())
    num_compared, numel = copies.shape[1], prod(sample.shape)
    compared = f"{num_compared} of {numel} elements" if num_compared < numel else "all elements"
    if not spread[element]:
        return f"equal as numbers in {compared}, on {ranks_text(ranks)}"
    first, second = sorted((int(a[element]), int(b[element])))
    values = float(copies[first, element]), float(copies[second, element])
    return (
        f"of {compared} on {ranks_text(ranks)}, farthest apart: {values[0]:.9g} on rank "
        f"{ranks[first]} and {values[1]:.9g} on rank {ranks[second]}"
        f"{_place_text(sample, element)}{_difference_text(*values)}"
    )


def _difference_text(a: float, b: float) -> str:
    if not (isfinite(a) and isfinite(b)):
        return ""
    return f", a difference of {abs(a - b):.3g} ({abs(a - b) / max(abs(a), abs(b)):.2g} relative)"


def _place_text(sample: CopySample, element: int) -> str:
    """Return the place of a sampled element in its tensor."""
    itemsize = DTYPES[sample.dtype].itemsize
    block, inside = divmod(element, max(sample.block_nbytes // itemsize, 1))
    position = sample.block_offsets[block] // itemsize + inside
    if not sample.shape:
        return ""
    strides = row_major_strides(sample.shape)
    index = [
        offset + position // stride % size
        for offset, stride, size in zip(sample.offset, strides, sample.shape, strict=True)
    ]
    return f" at {index}"
