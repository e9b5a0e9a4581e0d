"""How the cost of each step of planning grows when one thing is doubled, and doubled again."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from math import log2
from random import Random

from benchmarks import simulated_ranks as simulated
from benchmarks.scenario import Figure, Row
from dist_ckpt.core.comm.collectives.collective import ranks_by_value
from dist_ckpt.core.commit.receipts import build_file_tables, file_sizes, find_unequal_groups
from dist_ckpt.core.format.geometry import (
    Cell,
    Cut,
    ElementRange,
    Flat,
    Layout,
    Region,
    Regions,
    Shape,
)
from dist_ckpt.core.format.index import index_json
from dist_ckpt.core.format.index.index import (
    Catalog,
    Component,
    Index,
    Key,
    Node,
    ShardFileRecord,
    TensorRecord,
)
from dist_ckpt.core.planning.load.load_planner import plan_load
from dist_ckpt.core.planning.plan import (
    FileReceipt,
    Inventory,
    NameList,
    Receipt,
    TensorEntry,
    TensorRequest,
)
from dist_ckpt.core.planning.save.inventories import RankView, merge_views
from dist_ckpt.core.planning.save.save_planner import (
    find_replica_groups,
    plan_all_files,
    plan_rank_files,
    plan_save,
)
from dist_ckpt.core.planning.tensor_views import Parts, View, Whole
from dist_ckpt.core.runtime import typed_msgpack

Work = Callable[[], object]

_DIGEST = "0" * 32


def growth(name: str, *, quick: bool) -> Row:
    """Measure one axis at n, 2 n and 4 n."""
    prepare, size = AXES[name]
    sizes = [max(8, size // 16 if quick else size) * factor for factor in (1, 2, 4)]
    works = [prepare(size) for size in sizes]
    # In turns, so that what disturbs the machine meanwhile meets all three.
    rounds = [[_seconds(work) for work in works] for _ in range(1 if quick else 5)]
    seconds = [min(column) for column in zip(*rounds, strict=True)]
    facts = {"n": float(sizes[0]), "ms at n": seconds[0] * 1e3, "ms at 2n": seconds[1] * 1e3}
    facts["x exponent"] = log2(seconds[2] / seconds[0]) / 2
    return Figure(name, (seconds[2],), facts)


def _seconds(work: Work) -> float:
    # Torch's objects are not looked through again and again in the middle of ours.
    gc.collect()
    gc.freeze()
    start = time.process_time()
    work()
    return time.process_time() - start


# --- what is planned -------------------------------------------------------------------------


def _plan(job: simulated.Job) -> Work:
    inventories = [
        (typed_msgpack.decode(data, Inventory), ranks) for data, ranks in job.inventories
    ]
    return lambda: plan_save(inventories, job.world_size)


def _items(job: simulated.Job) -> Work:
    plan = plan_save(
        [(typed_msgpack.decode(b, Inventory), who) for b, who in job.inventories], job.world_size
    )
    return lambda: plan_rank_files(plan, job.world_size // 2)


def _all_items(job: simulated.Job) -> Work:
    plan = plan_save(
        [(typed_msgpack.decode(b, Inventory), who) for b, who in job.inventories], job.world_size
    )
    return lambda: sum(1 for _ in plan_all_files(plan.catalog))


def _groups(job: simulated.Job) -> Work:
    plan = plan_save(
        [(typed_msgpack.decode(b, Inventory), who) for b, who in job.inventories], job.world_size
    )
    return lambda: find_replica_groups(plan, job.world_size // 2)


def _open(job: simulated.Job) -> Work:
    save = simulated.SimulatedSave(job)
    save.run()
    data = save.index()
    return lambda: index_json.decode(data)


def _says(
    entries: Sequence[TensorEntry] = (), view: View | None = None, **more: object
) -> Inventory:
    fields: dict[str, object] = {
        "mesh": (),
        "components": ("model",),
        "views": (view or Whole(),),
        "tensors": tuple(entries),
        "aliases": (),
        "values": (),
        "per_rank": (),
        "tree": (Node("", "dict", ("model",)),),
        "name_lists": (),
        "numpy": (),
    }
    return Inventory(**{**fields, **more})  # type: ignore[arg-type]


def _entry(name: object, shape: Shape = (4,)) -> TensorEntry:
    return TensorEntry(f"model.{name}", "float32", shape, 0, 0)


def _stages(count: int) -> simulated.Job:
    """Every rank has tensors, values, containers and names of its own."""

    def inventory_of(rank: int) -> Inventory:
        names = tuple(f"{rank}.{n}" for n in range(4))
        return _says(
            [_entry(name) for name in names],
            values=("step", f"value{rank}"),
            name_lists=(NameList("optim.params", names),),
            tree=(Node("", "dict", ("model",)), Node("model", "dict", names)),
        )

    return simulated.each(count, inventory_of)


def _ring(count: int) -> simulated.Job:
    """As many replica groups as ranks: each tensor is on two ranks, each rank has two tensors."""
    return simulated.each(
        count, lambda rank: _says([_entry(n) for n in sorted({rank, (rank + 1) % count})])
    )


def _shapes(count: int, world_size: int) -> simulated.Job:
    return simulated.alike(world_size, _says([_entry(n, (1000 + n,)) for n in range(count)]))


def _large(count: int, world_size: int) -> simulated.Job:
    shape = (1 << 20, 100)
    return simulated.alike(world_size, _says([_entry(n, shape) for n in range(count)]))


def _tied(count: int) -> simulated.Job:
    """Have one rank tie what the other has apart."""
    own = [_entry(n) for n in range(count)]
    aliases = tuple((f"model.tied{n}", f"model.{n}") for n in range(count))
    both = [*own, *(_entry(f"tied{n}") for n in range(count))]
    return simulated.each(2, lambda rank: _says(both) if rank else _says(own, aliases=aliases))


def _keyed(count: int, world_size: int, key: Key | None = None) -> simulated.Job:
    values = tuple((f"value{n}", key) for n in range(count))
    return simulated.alike(world_size, _says(per_rank=values))


# --- irregular tensors -----------------------------------------------------------------------


def bands(count: int, seed: int) -> tuple[Shape, list[Region]]:
    """Return a square in bands of random heights, each cut at random columns."""
    random = Random(seed)
    size, side = 10 * count, int(count**0.5)

    def cuts() -> list[int]:
        return [0, *sorted(random.sample(range(1, size), side - 1)), size]

    regions = []
    for top, bottom in pairwise(cuts()):
        regions += [Region((top, a), (bottom - top, b - a)) for a, b in pairwise(cuts())]
    return (size, size), regions


def _held(count: int, num_ranks: int | None = None) -> Work:
    shape, regions = bands(count, 0)
    ranks = num_ranks or len(regions)
    shares = [RankView((rank,), Parts(tuple(regions[rank::ranks])), shape) for rank in range(ranks)]
    return lambda: merge_views(shares)


def _hole(count: int) -> Work:
    regions = [Region((0, 2 * n), (100, 2)) for n in range(count) if n != count // 2]
    shape = (100, 2 * count)
    shares = [RankView((rank,), Parts((region,)), shape) for rank, region in enumerate(regions)]

    def refuse() -> None:
        with suppress(ValueError):
            merge_views(shares)

    return refuse


def _load(cut: Cut, shape: Shape, cells: Sequence[Cell]) -> Work:
    layout = Layout(cut, tuple((0,) for _ in range(cut.num_cells)))
    tensors = {"w": TensorRecord("float32", shape, 0, 0, 0)}
    catalog = Catalog(1, (), (Component("model", "model"),), (layout,), tensors, {}, {}, {})
    files = (ShardFileRecord(0, 0, 1, 0, _DIGEST),)
    index = Index("a1-0123456789abcdef", None, catalog, files, (), {}, {}, 0.0)
    wanted = [TensorRequest("w", "float32", shape, tuple(cells))]
    return lambda: plan_load(index, wanted)


def _load_bands(count: int) -> Work:
    shape, regions = bands(count, 0)
    return _load(Regions(tuple(regions)), shape, bands(count, 1)[1])


def _load_whole(count: int) -> Work:
    shape, regions = bands(count, 0)
    return _load(Regions(tuple(regions)), shape, [Region.whole(shape)])


def _load_flat(count: int) -> Work:
    cuts = tuple(range(0, 1000 * count + 1, 1000))
    wanted = [ElementRange(777 * n, 777 * (n + 1)) for n in range(count)]
    return _load(Flat(cuts), (20 * count, 50), wanted)


# --- receipts --------------------------------------------------------------------------------


def _receipts(num_ranks: int, num_files: int, num_groups: int) -> Work:
    catalog = Catalog(num_ranks, (), (), (), {}, {}, {}, {})
    groups = tuple((f"{group:032x}", _DIGEST) for group in range(num_groups))
    receipts = [
        Receipt(
            tuple(FileReceipt(f"{rank}.{n}.msgpack", 10, 0, _DIGEST) for n in range(num_files)),
            groups,
            1.0,
        )
        for rank in range(num_ranks)
    ]
    return lambda: (
        build_file_tables(catalog, receipts),
        find_unequal_groups(receipts),
        file_sizes(receipts),
    )


# What grows, from which n.
AXES: Mapping[str, tuple[Callable[[int], Work], int]] = {
    "tell payloads apart: ranks": (lambda n: lambda: ranks_by_value([b"x" * 24] * n), 8192),
    "plan FSDP2: ranks": (lambda n: _plan(simulated.fsdp(n, 300)), 2048),
    "plan FSDP2: tensors": (lambda n: _plan(simulated.fsdp(256, n)), 500),
    "plan HSDP: ranks": (lambda n: _plan(simulated.hsdp(n, 300)), 4096),
    "plan FSDP2 x TP: ranks": (lambda n: _plan(simulated.fsdp_tp(n, 300)), 4096),
    "plan ZeRO: ranks": (lambda n: _plan(simulated.zero(n, 300)), 2048),
    "plan replicas: ranks": (lambda n: _plan(simulated.replicated(n, 300)), 2048),
    "plan replicas: shapes": (lambda n: _plan(_shapes(n, 1024)), 256),
    "plan large replicas: tensors": (lambda n: _plan(_large(n, 64)), 250),
    "plan large replicas: ranks": (lambda n: _plan(_large(100, n)), 1024),
    "plan LocalShards: ranks": (lambda n: _plan(simulated.parts(n, 10, flat=False)), 256),
    "plan LocalShards: tensors": (lambda n: _plan(simulated.parts(64, n, flat=False)), 50),
    "plan FlatShards: ranks": (lambda n: _plan(simulated.parts(n, 10, flat=True)), 256),
    "plan stages, each with names: ranks": (lambda n: _plan(_stages(n)), 256),
    "plan replica groups: ranks": (lambda n: _plan(_ring(n)), 256),
    "plan values per rank: values": (lambda n: _plan(_keyed(n, 64)), 256),
    "plan values per rank: ranks": (lambda n: _plan(_keyed(10, n)), 2048),
    "plan ties that differ: tensors": (lambda n: _plan(_tied(n)), 500),
    "one irregular tensor: cells": (_held, 1024),
    "one irregular tensor on one rank: cells": (lambda n: _held(n, 1), 1024),
    "refuse a tensor with a hole: cells": (_hole, 512),
    "items of one rank: ranks": (lambda n: _items(simulated.fsdp(n, 300)), 4096),
    "items of one rank: tensors": (lambda n: _items(simulated.fsdp(64, n)), 500),
    "items of all ranks: ranks": (lambda n: _all_items(simulated.fsdp(n, 20)), 128),
    "items of all ranks: tensors": (lambda n: _all_items(simulated.hsdp(64, n)), 50),
    "groups of one rank: ranks": (lambda n: _groups(_ring(n)), 512),
    "receipts: ranks": (lambda n: _receipts(n, 2, 2), 4096),
    "receipts: files a rank": (lambda n: _receipts(64, n, 2), 100),
    "receipts: groups a rank": (lambda n: _receipts(64, 2, n), 500),
    "open an index: ranks": (lambda n: _open(simulated.fsdp(n, 100)), 2048),
    "open an index: tensors": (lambda n: _open(simulated.fsdp(64, n)), 500),
    "open an index of replicas: ranks": (lambda n: _open(simulated.replicated(n, 100)), 2048),
    "load irregular from irregular: cells": (_load_bands, 1024),
    "load all of an irregular tensor: cells": (_load_whole, 1024),
    "load flat from flat: cells": (_load_flat, 1000),
}
