"""Planning for simulated ranks: what a coordinator does, what each rank derives, how it all grows.

The inventories are those of a large transformer with AdamW, three sharded tensors a parameter, one
small replicated tensor (`step`) besides, and a random generator a rank. The coordinator is the
real one, over a channel and a storage in memory: what is timed is all that it does but for the
waiting. Each row is measured in a process of its own, whose peak of memory is the row's. Seconds
are of CPU time, of one thread, so that they do not depend on what else the machine does.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from math import log2
from pathlib import Path
from statistics import median
from typing import TypeVar

from benchmarks import planning_dcp
from benchmarks import simulated_ranks as simulated
from benchmarks.planning_growth import AXES, growth
from benchmarks.scenario import OURS, Figure, Measure, Row, Scenario, Settings
from dist_ckpt.core.format.index import index_json
from dist_ckpt.core.format.index.index import Index
from dist_ckpt.core.planning.load.load_planner import find_request_problems, plan_load
from dist_ckpt.core.planning.plan import Inventory, TensorRequest
from dist_ckpt.core.planning.save.save_planner import (
    find_local_cells,
    find_replica_groups,
    plan_rank_files,
)
from dist_ckpt.core.planning.tensor_views import compute_cells
from dist_ckpt.core.runtime import typed_msgpack

T = TypeVar("T")

NUM_PARAMETERS = 1000
DCP_RANKS = (64, 128)

JOBS: Mapping[str, Callable[[int, int], simulated.Job]] = {
    "FSDP2": simulated.fsdp,
    "HSDP": simulated.hsdp,
    "FSDP2 x TP": simulated.fsdp_tp,
    "PP x FSDP2 x TP": simulated.pipeline,
}


def scenarios() -> list[Scenario]:
    """Return the one scenario."""
    return [Scenario("planning", "simulated ranks: coordinator, ranks, loads, growth", _planning)]


def _planning(settings: Settings) -> Iterator[Measure]:
    measures = {"save": _save, "curves": _curves, "steady": _steady, "load": _load, "growth": _grow}
    for name, measure in measures.items():
        if settings.measures(name):
            yield measure(settings)


def _alone(settings: Settings, function: Callable[..., T], *args: object) -> T:
    """Return what a function returns in a process of its own."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(function, *args).result(settings.deadline_s)
        except TimeoutError:
            for child in multiprocessing.active_children():
                child.kill()
            raise


def _peak_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


# --- saves -----------------------------------------------------------------------------------


def _save(settings: Settings) -> Measure:
    world_size, count = (64, 50) if settings.quick else (1024, NUM_PARAMETERS)
    sizes = [size // 16 for size in DCP_RANKS] if settings.quick else DCP_RANKS
    rows = [_alone(settings, _ours, world_size, count, settings.rounds)]
    if settings.takes("DCP"):
        theirs = [_alone(settings, _dcp, f"DCP, {size} ranks", size, count) for size in sizes]
        rows += [*theirs, *_extrapolated(theirs, sizes, world_size)]
    return Measure(
        scenario="planning",
        name="save",
        title=f"a first save at {world_size:,} ranks x {3 * count:,} FSDP2 tensors: all that the "
        "coordinator does between gathering and the written index",
        rows=tuple(rows),
        note="DCP: unpickle the plans, create_global_plan, unpickle the results, build and pickle "
        "the metadata; without pickling and scattering the plans. It is extrapolated in two ways: "
        "as if its cost per rank stayed what it is at the largest size measured, and by the power "
        "law through both sizes.",
    )


def _ours(world_size: int, count: int, rounds: int) -> Row:
    row = _coordinator(OURS, "FSDP2", world_size, count, rounds)
    assert isinstance(row, Figure)
    facts = {name: row.facts[name] for name in ("peak MiB", "index kB")}
    note = ", ".join(f"{step} {row.facts[f'{step} ms']:.0f} ms" for step in ("plan", "write"))
    return Figure(row.contender, row.seconds, facts, note)


def _dcp(name: str, world_size: int, count: int) -> Row:
    def coordinate(world_size: int) -> dict[str, float]:
        inventory = typed_msgpack.decode(
            simulated.fsdp(world_size, count).inventories[0][0], Inventory
        )
        return planning_dcp.coordinate(inventory, world_size)

    coordinate(2)
    steps = coordinate(world_size)
    note = ", ".join(f"{step} {seconds:.2f} s" for step, seconds in steps.items())
    return Figure(name, (sum(steps.values()),), {"peak MiB": _peak_mib()}, note)


def _extrapolated(rows: Sequence[Row], sizes: Sequence[int], world_size: int) -> Iterator[Row]:
    seconds = [row.median_s for row in rows if isinstance(row, Figure)]
    name, note = f"DCP, {world_size:,} ranks", "extrapolated, not measured"
    linear = seconds[-1] * world_size / sizes[-1]
    yield Figure(f"{name} (if linear)", (linear,), note=note)
    power = log2(seconds[-1] / seconds[0]) / log2(sizes[-1] / sizes[0])
    fitted = seconds[-1] * (world_size / sizes[-1]) ** power
    yield Figure(f"{name} (by ranks^{power:.2f})", (fitted,), note=note)


def _curves(settings: Settings) -> Measure:
    sizes, count = ((64,), 50) if settings.quick else ((1024, 2048, 4096, 8192, 16384), 1000)
    rounds = min(settings.rounds, 3)
    rows = [
        _alone(settings, _coordinator, f"{job}, {n:,} ranks", job, n, count, rounds)
        for job in JOBS
        for n in sizes
    ]
    return Measure(
        scenario="planning",
        name="curves",
        title=f"a first save of {3 * count:,} sharded tensors, by layout and ranks",
        rows=tuple(rows),
        note="seconds: all that the coordinator does, 'plan' and 'write' (receipts, commit) are "
        "its larger exchanges. 'items', 'held', 'groups': what one rank in the middle derives for "
        "itself of the plan. 'open': decode the index.",
    )


def _coordinator(name: str, kind: str, world_size: int, count: int, rounds: int) -> Row:
    job = JOBS[kind](world_size, count)
    seconds: list[Mapping[str, float]] = []
    for _ in range(rounds + 1):
        save = simulated.SimulatedSave(job)
        plan = save.run()
        seconds.append(save.channel.seconds)
    peak = _peak_mib()
    measured = seconds[1:]
    rank = world_size // 2
    inventory = next(
        typed_msgpack.decode(body, Inventory) for body, who in job.inventories if rank in who
    )
    data = save.index()
    facts = {
        "plan ms": median(one["plan"] for one in measured) * 1e3,
        "write ms": median(one["write"] for one in measured) * 1e3,
        "peak MiB": peak,
        "index kB": len(data) / 1e3,
        "open ms": _ms(lambda: index_json.decode(data)),
        "items ms": _ms(lambda: plan_rank_files(plan, rank)),
        "held ms": _ms(lambda: find_local_cells(inventory, rank, plan)),
        "groups ms": _ms(lambda: find_replica_groups(plan, rank)),
    }
    return Figure(name, tuple(sum(one.values()) for one in measured), facts)


def _ms(work: Callable[[], object]) -> float:
    times = []
    for _ in range(3):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return median(times) * 1e3


def _steady(settings: Settings) -> Measure:
    sizes, count = ((64, 128), 50) if settings.quick else ((1024, 4096, 16384), NUM_PARAMETERS)
    rounds = min(settings.rounds, 3)
    rows = [_alone(settings, _same_again, f"FSDP2, {n:,} ranks", n, count, rounds) for n in sizes]
    return Measure(
        scenario="planning",
        name="steady",
        title="a save with the same layout again",
        rows=tuple(rows),
        note="seconds: the coordinator, receipts and commit included. 'agree B', 'receipt B': the "
        "largest envelope that any rank sends in these exchanges.",
    )


def _same_again(name: str, world_size: int, count: int, rounds: int) -> Row:
    save = simulated.SimulatedSave(simulated.fsdp(world_size, count))
    save.run()
    seconds = []
    for _ in range(rounds):
        save.run()
        seconds.append(sum(save.channel.seconds.values()))
    facts = {
        "exchanges": save.session.exchanges.num,
        "collectives": save.session.collective_calls.num,
        "agree B": save.channel.nbytes["agree"],
        "receipt B": save.channel.nbytes["write"],
        "write ms": save.channel.seconds["write"] * 1e3,
    }
    return Figure(name, tuple(seconds), facts)


# --- loads -----------------------------------------------------------------------------------


def _load(settings: Settings) -> Measure:
    stored, wanting, count = (64, 16, 50) if settings.quick else (4096, 1024, NUM_PARAMETERS)
    rounds = settings.rounds
    rows = [
        _alone(settings, _plan_load, name, kind, (stored, wanting, count), rounds)
        for name, kind in (
            (OURS, "FSDP2"),
            ("from HSDP", "HSDP"),
            ("from FSDP2 x TP", "FSDP2 x TP"),
        )
    ]
    return Measure(
        scenario="planning",
        name="load",
        title=f"plan the load of one FSDP2 rank of {wanting:,} from {stored:,} ranks, "
        f"{3 * count:,} FSDP2 tensors",
        rows=tuple(rows),
        note="'open': decode the index, which comes before.",
    )


def _plan_load(name: str, kind: str, sizes: tuple[int, int, int], rounds: int) -> Row:
    stored, wanting, count = sizes
    save = simulated.SimulatedSave(JOBS[kind](stored, count))
    save.run()
    data = save.index()
    index = index_json.decode(data)
    assert isinstance(index, Index)
    inventory = typed_msgpack.decode(simulated.fsdp(wanting, count).inventories[0][0], Inventory)
    rank = wanting // 2
    seconds = []
    for _ in range(rounds):
        start = time.process_time()
        wanted = [
            TensorRequest(
                e.fqn, e.dtype, e.shape, compute_cells(inventory.views[e.view], rank, e.shape)
            )
            for e in inventory.tensors
        ]
        assert not find_request_problems(index.catalog, wanted)
        plan = plan_load(index, wanted)
        seconds.append(time.process_time() - start)
    facts = {
        "open ms": _ms(lambda: index_json.decode(data)),
        "files": len(index.files),
        "files opened": len(plan),
        "items": sum(map(len, plan.values())),
    }
    return Figure(name, tuple(seconds), facts)


# --- growth ----------------------------------------------------------------------------------


def _grow(settings: Settings) -> Measure:
    return Measure(
        scenario="planning",
        name="growth",
        title="what doubling costs: n to the power of the exponent",
        rows=_alone(settings, _doublings, settings.quick),
        note="seconds: at 4 n; the exponent is that from n to 4 n.",
    )


def _doublings(quick: bool) -> tuple[Row, ...]:  # noqa: FBT001  (called by position)
    return tuple(growth(name, quick=quick) for name in AXES)
