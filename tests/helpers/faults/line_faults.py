"""An error or an interrupt at every line that one rank runs of `dc.save` and `dc.load`.

Ranks are threads. Lines count where the victim's own thread runs them, in `core/saving/` and
`core/loading/`.
As a script it tries every line, for some minutes:

    PYTHONPATH=.:tests/helpers/ranks python tests/helpers/faults/line_faults.py
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch

import dist_ckpt as dc
from dist_ckpt.core.comm.rank_messages import NoAnswerError
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.commit import removal
from dist_ckpt.core.loading.load import load_together
from dist_ckpt.core.loading.load_options import LoadOptions
from dist_ckpt.core.saving.save import save_together
from dist_ckpt.core.saving.save_options import SaveOptions
from dist_ckpt.errors import CheckpointError, RankError
from dist_ckpt.settings import Settings
from dist_ckpt.testing.memory_storage import MemoryStorage
from ranks import PATH, Outcome, load_on_threads, save_on_threads, try_ranks

RANKS = 3
CONFIG = Settings(
    heartbeat_timeout_s=4.0, join_timeout_s=2.0, join_warning_s=1.0, visibility_timeout_s=2.0
)
FOLDERS = tuple(str(Path(dc.__file__).parent / "core" / name) for name in ("saving", "loading"))

# The phases of a load until which nothing of the state may change.
UNTOUCHED = {"open", "index", "check", "prepare", "check first"}


class InjectedError(Exception):
    """What a faulty line raises; no class of ours, so that others raise RankError."""


# From the commit to the answer that tells of it, on rank 0; the commit itself comes first.
VERDICT = (
    "Transaction._commit_and_answer",
    "Transaction._write",
    "Transaction.write_and_commit",
    "Exchange.decide",
    "Exchange.__exit__",
    "_StoreExchange._end",
    "_StoreExchange._envelope",
    "Coordinator.finish_exchange",
    "Coordinator._answer",
    "Coordinator._put",
    "ExchangeState.put",
)

KINDS: tuple[type[BaseException], ...] = (InjectedError, KeyboardInterrupt)


@dataclass(slots=True)
class Fault:
    """What is raised after so many lines of one rank, -1 for nothing; `seen` are those that ran.

    `is_in_bytecode`: it is after so many bytecodes of `VERDICT` instead, as an interrupt may come.
    """

    victim: int
    at: int = -1
    kind: type[BaseException] = InjectedError
    is_in_bytecode: bool = False
    seen: list[tuple[str, str]] = field(default_factory=list)

    @contextmanager
    def injected(self, rank: int) -> Iterator[None]:
        """Inject it into what this thread does, if it is the victim's."""
        if rank != self.victim:
            yield
            return

        def trace(frame: FrameType, event: str, arg: object) -> Any:
            if self.is_in_bytecode:
                return self._trace_bytecode(frame, event, arg)
            return trace_line if frame.f_code.co_filename.startswith(FOLDERS) else None

        def trace_line(frame: FrameType, event: str, arg: object) -> Any:
            if event != "line":
                return trace_line
            code = frame.f_code
            place = f"{Path(code.co_filename).name}:{frame.f_lineno}"
            self.seen.append((code.co_qualname, place))
            if len(self.seen) - 1 == self.at:
                raise self.kind(place)
            return trace_line

        sys.settrace(trace)
        try:
            yield
        finally:
            sys.settrace(None)

    def _trace_bytecode(self, frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        if code.co_qualname not in VERDICT:
            return None
        frame.f_trace_opcodes = True
        # Whatever comes before is for the lines.
        if event == "opcode" and (self.seen or code.co_qualname == VERDICT[0]):
            self.seen.append((code.co_qualname, f"{frame.f_lineno}, bytecode {frame.f_lasti}"))
            if len(self.seen) - 1 == self.at:
                raise self.kind("in bytecode")
        return self._trace_bytecode


class Case(Protocol):
    """A call that is tried with a fault: `problem` is what is wrong afterwards, "" if nothing."""

    name: str

    def run(self, fault: Fault) -> list[Outcome]: ...
    def problem(self, fault: Fault, errors: Sequence[BaseException | None]) -> str: ...


def part(step: int, rank: int) -> dict[str, Any]:
    mine = torch.full((2, 3), float(10 * step + rank))
    return {
        "model": {"w": dc.LocalShard(mine, (2 * RANKS, 3), (2 * rank, 0)), "b": torch.ones(3)},
        "step": step,
        "own": dc.PerRank(rank),
        "sampler": Sampler(step),
    }


class Sampler:
    """An object that says what it was given."""

    def __init__(self, step: int) -> None:
        self.step = step

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


class OneMoreSave:
    """`dc.save` over an older checkpoint, by a plan that is kept from it or made anew."""

    def __init__(self, *, by_kept_plan: bool) -> None:
        self.name = f"save by a {'kept' if by_kept_plan else 'new'} plan"
        self._by_kept_plan = by_kept_plan
        self._storage = MemoryStorage()

    def run(self, fault: Fault) -> list[Outcome]:
        storage = self._storage = MemoryStorage()
        if not self._by_kept_plan:
            save_on_threads(storage, [part(1, rank) for rank in range(RANKS)], step=1)

        def work(rank: int, channel: Any, bulk: Any) -> Any:
            session = Session(channel, bulk, CONFIG)
            if self._by_kept_plan:
                save_together(session, part(1, rank), PATH, SaveOptions(step=1), storage)
            options = SaveOptions(step=2, overwrite=True)
            with fault.injected(rank):
                return save_together(session, part(2, rank), PATH, options, storage)

        return try_ranks(work, world_size=RANKS, harness="threads", timeout_s=20, config=CONFIG)

    def problem(self, fault: Fault, errors: Sequence[BaseException | None]) -> str:
        others = [error for rank, error in enumerate(errors) if rank != fault.victim]
        step = self._step()
        if others[0] is None:  # the verdict was there: only its own report failed
            return "" if step == 2 else f"step {step} shows, and others were told of success"
        if step != 1 and "in place" not in str(others[0]):
            return f"step {step} shows, and others were told of a failure"
        save_on_threads(
            self._storage, [part(3, rank) for rank in range(RANKS)], step=3, overwrite=True
        )
        removal.remove_all_garbage(self._storage, PATH, grace_s=-1)
        num_left = sum(1 for _ in self._storage.list(PATH, follow=False))
        return "" if (self._step(), num_left) == (3, 1) else f"afterwards {num_left} attempts"

    def _step(self) -> int | None:
        loaded = [part(0, rank) for rank in range(RANKS)]
        load_on_threads(self._storage, loaded)
        found = {state["step"] for state in loaded} | {state["sampler"].step for state in loaded}
        found |= {int(state["model"]["w"].tensor[0, 0]) // 10 for state in loaded}
        (step,) = found
        return int(step)


class Load:
    """`dc.load`, where each rank reads for itself or one for all of a host."""

    def __init__(self, **options: Any) -> None:
        self.name = f"load with {options}"
        self._options = options
        self._storage = MemoryStorage()
        save_on_threads(self._storage, [part(2, rank) for rank in range(RANKS)], step=2)
        self._states: list[dict[str, Any]] = []

    def run(self, fault: Fault) -> list[Outcome]:
        self._states = [part(1, rank) for rank in range(RANKS)]

        def work(rank: int, channel: Any, bulk: Any) -> Any:
            session = Session(channel, bulk, CONFIG)
            options = LoadOptions(**self._options)
            with fault.injected(rank):
                return load_together(session, self._states[rank], PATH, options, self._storage)

        return try_ranks(
            work,
            world_size=RANKS,
            harness="threads",
            timeout_s=20,
            config=CONFIG,
            hosts=["one"] * RANKS,
        )

    def problem(self, fault: Fault, errors: Sequence[BaseException | None]) -> str:
        loaded = [int(state["model"]["w"].tensor[0, 0]) // 10 for state in self._states]
        samplers = [state["sampler"].step for state in self._states]
        if errors[fault.victim] is None or any(error is None for error in errors):
            whole = all(step == 2 for step in (*loaded, *samplers))
            return "" if whole else f"who returned has {loaded} and {samplers}"
        phases = {error.phase for error in errors if isinstance(error, RankError)}
        if phases <= UNTOUCHED and {*loaded, *samplers} != {1}:
            return f"touched before all had passed the check: {loaded} and {samplers}"
        if "objects" not in phases and len(set(samplers)) > 1:
            return f"objects of some ranks only: {samplers}"
        return ""


def alike(fault: Fault, errors: Sequence[BaseException | None]) -> str:
    """Return what is wrong with what the ranks raise; what the victim alone raises may be right."""
    own = errors[fault.victim]
    others = [error for rank, error in enumerate(errors) if rank != fault.victim]
    if own is not None and fault.kind is KeyboardInterrupt and type(own) is not fault.kind:
        return "the interrupt is lost"
    if all(error is None for error in others):
        return ""
    if not all(isinstance(error, RankError) for error in others):
        return "not all others raise a RankError"
    if not all(f"rank {fault.victim} " in str(error) for error in others):
        return "the others do not name the rank"
    is_told = not any(isinstance(error, NoAnswerError) for error in others)
    if is_told and len({*map(str, others)}) > 1:
        return "the others are told different things"
    return "" if own is not None else "the rank itself raises nothing"


CASES: tuple[Callable[[], Case], ...] = (
    lambda: OneMoreSave(by_kept_plan=False),
    lambda: OneMoreSave(by_kept_plan=True),
    lambda: Load(read_once="off"),
    lambda: Load(read_once="host"),
    lambda: Load(read_once="off", check_first=True),
    lambda: Load(read_once="host", check_first=True),
)


def lines_of(case: Case, victim: int) -> list[tuple[str, str]]:
    """Return the functions and lines that the victim runs without a fault."""
    fault = Fault(victim)
    outcomes = case.run(fault)
    assert [outcome.error for outcome in outcomes] == [None] * RANKS
    return fault.seen


def bytecodes_of_verdict(case: Case) -> int:
    """Return how many bytecodes rank 0 runs of `VERDICT`."""
    fault = Fault(0, is_in_bytecode=True)
    assert [outcome.error for outcome in case.run(fault)] == [None] * RANKS
    return len(fault.seen)


def wrong(case: Case, fault: Fault) -> str:
    """Return what is wrong after a fault, or ""."""
    try:
        outcomes = case.run(fault)
    except TimeoutError as error:
        return f"{error} ({fault.seen[-1]})"
    errors = [outcome.error for outcome in outcomes]
    try:
        found = alike(fault, errors) or case.problem(fault, errors)
    except CheckpointError as error:
        found = f"then {error!r}"
    return found and f"{found} ({fault.seen[-1]}, {errors})"


def main(names: Sequence[str]) -> int:
    problems = 0
    for make in CASES:
        if names and not any(name in make().name for name in names):
            continue
        for victim in (0, 1):
            case = make()
            seen = lines_of(case, victim)
            words: Counter[str] = Counter()
            for at in range(len(seen)):
                for kind in KINDS:
                    found = wrong(case, Fault(victim, at, kind))
                    words["wrong" if found else "right"] += 1
                    if found:
                        print(f"{case.name}, {kind.__name__} on rank {victim}: {found}")
            print(f"{case.name}, rank {victim}: {len(seen)} lines, {dict(words)}", flush=True)
            problems += words["wrong"]
    case = OneMoreSave(by_kept_plan=True)
    num = bytecodes_of_verdict(case)
    faults = [Fault(0, at, KeyboardInterrupt, is_in_bytecode=True) for at in range(num)]
    undecided = [problem for fault in faults if (problem := wrong(case, fault))]
    print(f"the verdict: {num} bytecodes, {len(undecided)} wrong", *undecided, sep="\n")
    return 1 if problems or undecided else 0


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    sys.exit(main(sys.argv[1:]))
