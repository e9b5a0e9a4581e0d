"""DCP by itself and over our format, in turns, and where the time goes.

    .venv/bin/python -m benchmarks.dcp --dir /tmp
    .venv/bin/python -m benchmarks.dcp --only rows-as-columns --rounds 15

In each round both save, or load what they have saved, one directly after the other, and who begins
changes from round to round: so what else the machine does meets both. Loads of one case take turns
too, warm and cold. What was loaded is compared bit for bit. "times as fast" is the median over the
rounds of DCP's seconds by ours, and in brackets its quartiles. Phases are those of the slowest
rank, medians: first what DCP does around its storage writer or reader, plans and waits for other
ranks; then the calls of those, and after each ">" what our reports tell of them.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch.distributed.checkpoint as dcp

from benchmarks.checkpoints import large_tensors
from benchmarks.contenders import Contender
from benchmarks.peers import Dcp, DcpOnOurs, dcp_state
from benchmarks.pool import Pools
from benchmarks.rank import Rank, Sample, StorageLocation
from benchmarks.scenario import turns
from benchmarks.workload import Spec

SIDES = (Dcp(), DcpOnOurs())
NAMES = tuple(side.name for side in SIDES)
PLANNING = "planning and waiting"


@dataclass(frozen=True, slots=True)
class Case:
    """A state that some ranks save, and the ways in which others load it."""

    name: str
    title: str
    saved: tuple[int, Spec]
    loaded: Mapping[str, tuple[int, Spec]]


def cases(nbytes: int) -> list[Case]:
    """Return all cases, of states of about so many bytes."""
    row, column = large_tensors(nbytes, "row"), large_tensors(nbytes, "column")
    copies, whole = large_tensors(nbytes, "replicated"), large_tensors(nbytes)
    small = Spec(5000, (64, 64))
    one, two, four = "on 1 rank", "on 2 ranks", "on 4 ranks"
    return [
        Case("large", "large tensors on 1 rank", (1, whole), {one: (1, whole)}),
        Case("small", "5,000 tensors of 16 KiB on 1 rank", (1, small), {one: (1, small)}),
        Case("rows-2", "rows on 2 ranks", (2, row), {four: (4, row)}),
        Case("rows-4", "rows on 4 ranks", (4, row), {four: (4, row), two: (2, row)}),
        Case("rows-as-columns", "rows on 4 ranks", (4, row), {"columns on 4": (4, column)}),
        Case("replicated", "replicas on 4 ranks", (4, copies), {four: (4, copies)}),
    ]


@dataclass(frozen=True, slots=True)
class Timed:
    """What a call took on one rank, and what its phases did."""

    sample: Sample
    phases: Mapping[str, float]


class DcpRank(Rank):
    """A rank that tells the phases of its calls as well."""

    def __init__(self, place: StorageLocation, contenders: tuple[Any, ...]) -> None:
        self._phases: dict[str, float] = {}
        told = [_HostReport(side, self._phases) for side in contenders]
        super().__init__(place, cast("tuple[Contender, ...]", tuple(told)))

    def timed(self, method: str, *args: Any, **options: Any) -> Timed:
        """Save or load, as the methods of these names."""
        self._phases.clear()
        sample: Sample = getattr(self, method)(*args, **options)
        inside_s = sum(s for name, s in self._phases.items() if not name.startswith("."))
        return Timed(sample, {PLANNING: sample.seconds - inside_s, **self._phases})


@dataclass(frozen=True, slots=True)
class _HostReport:
    """A side whose storage writer and reader are watched."""

    side: Dcp
    phases: dict[str, float]
    syncs: bool = True

    @property
    def name(self) -> str:
        return self.side.name

    def save(self, workload: Any, folder: Path) -> None:
        writer = self._watched(self.side.writer(folder), "write_data", "finish")
        dcp.save(dcp_state(workload), storage_writer=writer)
        self._add_report(writer)

    def load(self, workload: Any, folder: Path) -> None:
        reader = self._watched(self.side.reader(folder), "read_metadata", "read_data")
        dcp.load(dcp_state(workload), storage_reader=reader)
        self._add_report(reader)

    def _watched(self, storage: Any, *methods: str) -> Any:
        for name in methods:
            setattr(storage, name, self._timing(getattr(storage, name), name))
        return storage

    def _timing(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.phases[name] = time.perf_counter() - start

        return timed

    def _add_report(self, storage: Any) -> None:
        report = getattr(storage, "report", None)
        for phase, seconds in report.seconds.items() if report else ():
            self.phases[f".{phase}"] = seconds


@dataclass(frozen=True, slots=True)
class Outcome:
    """The rounds of one call on both sides: the slowest rank's seconds and phases, by side."""

    title: str
    rounds: Mapping[str, list[Timed]]

    def lines(self) -> list[str]:
        """Return what a person reads."""
        seconds = {name: [one.sample.seconds for one in self.rounds[name]] for name in NAMES}
        theirs, ours = (seconds[name] for name in NAMES)
        ratios = [a / b for a, b in zip(theirs, ours, strict=True)]
        low, middle, high = (
            statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        )
        found = (
            f"{self.title}: DCP {statistics.median(theirs):.3f} s, over ours "
            f"{statistics.median(ours):.3f} s, {middle:.2f} times as fast "
            f"({low:.2f} to {high:.2f}, {len(ratios)} rounds)"
        )
        return [found, *(f"    {name}: {self._phases(name)}" for name in NAMES)]

    def _phases(self, name: str) -> str:
        rounds = self.rounds[name]
        phases = dict.fromkeys(phase for one in rounds for phase in one.phases)
        medians = {p: statistics.median(one.phases.get(p, 0.0) for one in rounds) for p in phases}
        return ", ".join(f"{phase.replace('.', '> ')} {s:.3f}" for phase, s in medians.items())


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what each case comes to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    every = {case.name: case for case in cases(1 << 20)}
    parser.add_argument("--dir", default=tempfile.gettempdir())
    parser.add_argument("--mb", type=int, default=512, help="MiB of a state (default: 512)")
    parser.add_argument("--only", nargs="+", choices=every, default=list(every), metavar="CASE")
    parser.add_argument("--rounds", type=int, default=9, help="of loads (default: 9)")
    parser.add_argument("--saves", type=int, default=5, help="rounds of saves (default: 5)")
    parser.add_argument("--deadline-s", type=float, default=300, help="for any one call")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="dcp-") as folder:
        for case in cases(args.mb << 20):
            if case.name in args.only:
                with Pools(
                    Path(folder), SIDES, deadline_s=args.deadline_s, operations=DcpRank
                ) as pools:
                    _run(case, pools, Path(folder) / case.name, args.saves, args.rounds)


def _run(case: Case, pools: Pools, folder: Path, saves: int, rounds: int) -> None:
    folder.mkdir()
    num_ranks, spec = case.saved

    def save(name: str) -> Timed:
        shutil.rmtree(folder / name, ignore_errors=True)
        return _slowest(pools.call(num_ranks, "timed", "save", name, spec, folder / name))

    def load(name: str, num_ranks: int, spec: Spec, *, cold: bool) -> Timed:
        path = folder / name
        return _slowest(pools.call(num_ranks, "timed", "load", name, spec, path, cold=cold))

    _show(_in_turns(f"save {case.title}", save, saves))
    for title, (num_ranks, spec) in case.loaded.items():
        for cold in (False, True):
            how = functools.partial(load, num_ranks=num_ranks, spec=spec, cold=cold)
            full = f"load {case.title} {title}, {'cold' if cold else 'warm'}"
            _show(_in_turns(full, how, rounds))
    shutil.rmtree(folder)


def _in_turns(title: str, call: Callable[[str], Timed], rounds: int) -> Outcome:
    found: dict[str, list[Timed]] = {name: [] for name in NAMES}
    for number, name in turns(NAMES, rounds):
        timed = call(name)
        if timed.sample.difference is not None:
            raise SystemExit(f"{title}: {name} came back different: {timed.sample.difference}")
        if number:
            found[name].append(timed)
    return Outcome(title, found)


def _slowest(ranks: list[Timed]) -> Timed:
    """Return the slowest rank's, with a difference that any rank has found."""
    slowest = max(ranks, key=lambda one: one.sample.seconds)
    differences = [one.sample.difference for one in ranks if one.sample.difference is not None]
    if not differences:
        return slowest
    return replace(slowest, sample=replace(slowest.sample, difference=differences[0]))


def _show(outcome: Outcome) -> None:
    print("\n".join(outcome.lines()), flush=True)


if __name__ == "__main__":
    main()
