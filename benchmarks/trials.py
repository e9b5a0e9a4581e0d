"""Contenders take turns to save a state and to load it again; what they took becomes measures."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.contenders import Contender
from benchmarks.pool import Pools, RanksError
from benchmarks.rank import Sample
from benchmarks.scenario import (
    Absent,
    DifferentError,
    Figure,
    Measure,
    Row,
    Settings,
    in_one_line,
    turns,
)
from benchmarks.workload import Spec

RAW = "raw"
RAW_WRITE = "raw write, fsync"
RAW_READ = "raw preadv"
RAW_DIRECT = "raw direct read"
MEMCPY = "memcpy"


@dataclass(frozen=True, slots=True)
class Load:
    """One way to load what a case has saved."""

    action: str
    title: str
    num_ranks: int
    spec: Spec
    cold: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """A state to save, and the ways to load it. The first load is also the check of the save."""

    scenario: str
    title: str
    num_ranks: int
    spec: Spec
    loads: tuple[Load, ...]
    save_action: str = "save"

    def actions(self) -> list[str]:
        """Return the names of all that is measured here."""
        return [self.save_action, *(load.action for load in self.loads)]


@dataclass(slots=True)
class _Results:
    """What was found so far: by action and row, the samples, or why there are none."""

    samples: dict[tuple[str, str], list[Sample]] = field(default_factory=dict)
    reasons: dict[tuple[str, str], str] = field(default_factory=dict)

    def add(self, action: str, row: str, sample: Sample, *, measured: bool) -> None:
        if measured:
            self.samples.setdefault((action, row), []).append(sample)

    def drop(self, actions: Sequence[str], row: str, reason: str) -> None:
        for action in actions:
            self.reasons.setdefault((action, row), reason)


def run_case(
    case: Case, settings: Settings, pools: Pools, contenders: Sequence[Contender]
) -> Iterator[Measure]:
    """Run a case and yield a measure for the save and for each load that is asked for."""
    trial = _Trial(case, settings, pools, contenders)
    nbytes = trial.run()
    for action, title, limits in trial.measures():
        yield Measure(
            scenario=case.scenario,
            name=action,
            title=title,
            rows=tuple(trial.rows(action, limits)),
            nbytes=nbytes,
            limits=limits,
        )


class _Trial:
    """One case while it runs."""

    def __init__(
        self, case: Case, settings: Settings, pools: Pools, contenders: Sequence[Contender]
    ) -> None:
        self._case = case
        self._settings = settings
        self._pools = pools
        self._contenders = {contender.name: contender for contender in contenders}
        self._results = _Results()
        self._folder = settings.folder / "checkpoint"
        wanted = [load for load in case.loads if settings.measures(load.action)]
        self._loads = wanted or list(case.loads[:1])
        self._nbytes = 0

    def run(self) -> int:
        """Let everybody take turns; return the number of bytes of the state."""
        case = self._case
        self._nbytes = self._pools.call(case.num_ranks, "hold", case.spec)[0]
        names = [RAW]
        for name, contender in self._contenders.items():
            if reason := contender.reason_against(case.spec):
                self._results.drop(case.actions(), name, reason)
                continue
            names.append(name)
            for load in self._loads:
                if reason := contender.reason_against(load.spec):
                    self._results.drop([load.action], name, reason)
        for number, name in turns(names, self._settings.rounds):
            self._clear()
            if name == RAW:
                self._try_raw_turn(measured=number > 0)
            elif (self._case.save_action, name) not in self._results.reasons:
                self._take_turn(name, measured=number > 0)
        self._clear()
        self._pools.forget()
        return self._nbytes

    def _take_turn(self, name: str, *, measured: bool) -> None:
        """Save and load; what fails has no figure, and is not tried again."""
        case, results = self._case, self._results
        try:
            sample = self._call(case.num_ranks, "save", name, case.spec)
        except RanksError as error:
            results.drop(case.actions(), name, str(error))
            return
        results.add(case.save_action, name, sample, measured=measured)
        for number, load in enumerate(self._loads):
            if (load.action, name) in results.reasons:
                continue
            try:
                sample = self._call(load.num_ranks, "load", name, load.spec, cold=load.cold)
                if sample.difference is not None:
                    raise DifferentError(f"came back different: {sample.difference}")
            except (RanksError, DifferentError) as error:
                results.drop([load.action], name, str(error))
                if number == 0:
                    # Nothing shows that what it saved is any good.
                    results.drop(case.actions(), name, str(error))
                    return
            else:
                results.add(load.action, name, sample, measured=measured)

    def _try_raw_turn(self, *, measured: bool) -> None:
        """Do raw I/O; a file system that refuses it leaves a table without its limits."""
        rows = [(self._case.save_action, RAW_WRITE)]
        rows += [(load.action, row) for load in self._loads for row in _read_limits(load)]
        if rows[0] in self._results.reasons:
            return
        try:
            self._take_raw_turn(measured=measured)
        except (RanksError, DifferentError) as error:
            for action, row in rows:
                self._results.drop([action], row, str(error))

    def _take_raw_turn(self, *, measured: bool) -> None:
        case = self._case
        sample = self._call(case.num_ranks, "limit", "write", case.spec, cold=False)
        self._results.add(self._case.save_action, RAW_WRITE, sample, measured=measured)
        for load in self._loads:
            for row, name in _read_limits(load).items():
                sample = self._call(load.num_ranks, "limit", name, load.spec, cold=load.cold)
                if sample.difference is not None:
                    raise DifferentError(f"{row}: came back different: {sample.difference}")
                self._results.add(load.action, row, sample, measured=measured)

    def _call(self, num_ranks: int, method: str, name: str, spec: Spec, **options: bool) -> Sample:
        """Let all ranks do it; return the slowest one's time and what all together fetched."""
        path = self._folder
        samples: list[Sample] = self._pools.call(num_ranks, method, name, spec, path, **options)
        different = [sample.difference for sample in samples if sample.difference is not None]
        return Sample(
            seconds=max(sample.seconds for sample in samples),
            fetched_nbytes=sum(sample.fetched_nbytes for sample in samples),
            extra_nbytes=max(sample.extra_nbytes for sample in samples),
            difference=different[0] if different else None,
        )

    def _clear(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    # --- what came of it -------------------------------------------------------------------

    def measures(self) -> Iterator[tuple[str, str, tuple[str, ...]]]:
        """Yield action, title and limits of each measure that was asked for."""
        action = self._case.save_action
        if self._settings.measures(action):
            yield action, self._case.title, (RAW_WRITE,)
        for load in self._loads:
            if self._settings.measures(load.action):
                yield load.action, load.title, tuple(_read_limits(load))

    def rows(self, action: str, limits: tuple[str, ...]) -> Iterator[Row]:
        """Yield a row for each limit and each contender."""
        cold = {load.action for load in self._loads if load.cold}
        for name in (*limits, *self._contenders):
            if reason := self._results.reasons.get((action, name)):
                yield Absent(name, in_one_line(reason))
                continue
            samples = self._results.samples[action, name]
            contender = self._contenders.get(name)
            yield Figure(
                contender=name,
                seconds=tuple(sample.seconds for sample in samples),
                facts=self._facts(samples, cold=action in cold, limit=contender is None),
                note=self._note(action, contender),
            )

    def _note(self, action: str, contender: Contender | None) -> str:
        if contender is None:
            return ""
        is_save = action == self._case.save_action
        return contender.save_note if is_save else contender.load_note

    def _facts(self, samples: Sequence[Sample], *, cold: bool, limit: bool) -> Mapping[str, float]:
        facts = {}
        if cold:
            fetched = sorted(sample.fetched_nbytes for sample in samples)
            facts["fetched x"] = fetched[len(fetched) // 2] / self._nbytes
        if not limit:
            facts["extra MiB"] = max(sample.extra_nbytes for sample in samples) / 2**20
        return facts


def _read_limits(load: Load) -> dict[str, str]:
    """Return the rows of raw I/O for a load, and what `Rank.limit` calls each."""
    if load.cold and load.spec.placement == "replicated":
        # Past the page cache each rank would fetch everything for itself.
        return {RAW_READ: "read"}
    if load.cold:
        return {RAW_READ: "read", RAW_DIRECT: "direct read"}
    return {RAW_READ: "read", MEMCPY: "copy"}
