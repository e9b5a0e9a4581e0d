"""All that can happen to ranks that agree by `SaveBarrier`: every interleaving of small worlds.

A rank is a training thread and a thread beside it. The training enters its own collective before
each boundary (as in a step's all-reduce), comes to the boundary, and passes, waits or saves; a save
ends when all ranks are in it. The thread beside does one thing with the store at a time, after any
delay. What each decides is `SaveBarrier`'s; what they do in which order is here, as in
`checkpointer/barrier_rounds.py`.

Time is not modelled: what may happen after a while may happen at once. `FAULTS` are changes of the
protocol that must be found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from dist_ckpt.checkpointer.barrier_rounds import SaveBarrier

FAULTS = (
    "answer before barrier",  # the boundary is told, and the barrier drawn later
    "lowest",  # rank 0 takes the lowest answer
    "overwritten",  # a later decision replaces the first
    "leave by itself",  # who waits at the barrier goes on without a decision
    "void only while answers lack",  # nobody ends a round that rank 0 does not decide
    "no void",  # nobody ends a round that is not answered
)


@dataclass(frozen=True)
class World:
    """What is explored: ranks, boundaries, and what may happen to them.

    `ahead` bounds how far one rank's training is ahead of another's: 1 is a collective in each
    step, None none at all. `lookahead` is each rank's; `asks` is how often each wants a save, which
    it may begin to want at any moment. `deaths` is how many ranks may die; the thread beside a rank
    in `blocked` cannot run while its training is in its collective.
    """

    ranks: int = 2
    boundaries: int = 3
    ahead: int | None = 1
    lookahead: tuple[int, ...] = (0, 0, 0)
    asks: tuple[int, ...] = (1, 0, 0)
    deaths: int = 0
    blocked: frozenset[int] = frozenset()
    fault: str = ""
    most_rounds: int = 2


_Round = tuple[tuple[int | None, ...], int | None] | None


class Rank(NamedTuple):
    """One rank: `training` is between, in a collective, at a boundary, saving, done, dead, failed.

    `beside` is what the thread has done in this round: nothing yet, drawn the barrier, or answered.
    `saved` is where it has saved last, `wants` how often it is still to ask.
    """

    training: str = "between"
    beside: str = "looks"
    barrier: tuple[int, int, int | None, bool] = (0, 1, None, False)
    saved: int = 0
    wants: int = 0


class State(NamedTuple):
    """The ranks, and by round the answers and the decision (0: void); None once all know it."""

    ranks: tuple[Rank, ...]
    rounds: tuple[_Round, ...] = ()


@dataclass
class ResolvedSources:
    """What was explored: how many states, how runs end, and what went wrong, with a way there."""

    states: int
    ends: int
    served: int
    wrong: Mapping[str, tuple[str, ...]]


_CLOSED = -1
_ENDED = ("done", "dead", "failed")


def explore(world: World) -> ResolvedSources:
    """Go through all states of a world; of one with a fault, until something goes wrong."""
    start = State(tuple(Rank(wants=world.asks[rank]) for rank in range(world.ranks)))
    before: dict[State, tuple[State, str] | None] = {start: None}
    todo = deque([start])
    wrong: dict[str, tuple[str, ...]] = {}
    ends = served = 0
    while todo and not (world.fault and wrong):
        state = todo.popleft()
        try:
            following = [*_following(state, world)]
        except AssertionError as error:
            wrong[f"refused: {error}"] = _way(state, before)
            continue
        is_end = all(rank.training in _ENDED for rank in state.ranks)
        problem = _split(state) or ("" if is_end else _stuck(state, following))
        if problem and problem not in wrong:
            wrong[problem] = _way(state, before)
        if is_end and not any(_goes_on(what) for what, _ in following):
            ends += 1
            served += any(rank.saved for rank in state.ranks)
        for what, after in following:
            if after not in before:
                before[after] = (state, what)
                todo.append(after)
    return ResolvedSources(len(before), ends, served, wrong)


def _goes_on(what: str) -> bool:
    return "dies" not in what


def _way(state: State, before: Mapping[State, tuple[State, str] | None]) -> tuple[str, ...]:
    way: list[str] = []
    while (came := before[state]) is not None:
        state, what = came
        way.append(what)
    return tuple(reversed(way))


def _split(state: State) -> str:
    """Say whether a rank saves at a boundary that another has passed without a save."""
    for rank in state.ranks:
        if rank.training == "saving":
            at = rank.barrier[0]
            for other in state.ranks:
                has_passed = other.barrier[0] >= at and other.training != "saving"
                if has_passed and at != other.saved and other.training not in ("dead", "failed"):
                    return "split: a rank saves where another has passed"
                if other.training == "saving" and other.barrier[0] != at:
                    return "split: two ranks save at different boundaries"
    return ""


def _stuck(state: State, following: list[tuple[str, State]]) -> str:
    """Say whether nothing goes on, and not for a collective that waits for a rank that is lost."""
    if any(_goes_on(what) for what, _ in following):
        return ""
    waiting = {rank.training for rank in state.ranks if rank.training not in _ENDED}
    is_lost = any(rank.training in ("dead", "failed") for rank in state.ranks)
    if is_lost and waiting == {"in a collective"}:
        return ""
    return f"stuck: {', '.join(sorted(waiting))}"


def _following(state: State, world: World) -> Iterator[tuple[str, State]]:
    for number, rank in enumerate(state.ranks):
        for what, after, rounds in (
            *_trains(state, number, rank, world),
            *_beside(state, number, rank, world),
        ):
            ranks = (*state.ranks[:number], after, *state.ranks[number + 1 :])
            yield f"{number} {what}", State(ranks, _forgotten(ranks, rounds))
        lost = sum(one.training == "dead" for one in state.ranks)
        if lost < world.deaths and rank.training not in _ENDED:
            dead = rank._replace(training="dead")
            ranks = (*state.ranks[:number], dead, *state.ranks[number + 1 :])
            yield f"{number} dies", State(ranks, state.rounds)
    if all(rank.training == "saving" for rank in state.ranks) and not _split(state):
        saved = tuple(one._replace(training="between", saved=one.barrier[0]) for one in state.ranks)
        yield "all have saved", State(saved, state.rounds)


def _forgotten(ranks: tuple[Rank, ...], rounds: tuple[_Round, ...]) -> tuple[_Round, ...]:
    """Leave out what nobody reads any more: it would only make more states."""
    over = min((one.barrier[1] for one in ranks if one.training != "dead"), default=1) - 1
    return tuple(None if place < over else one for place, one in enumerate(rounds))


_Steps = Iterator[tuple[str, Rank, tuple[_Round, ...]]]


def _trains(state: State, number: int, rank: Rank, world: World) -> _Steps:
    """Yield what a rank's training may do next."""
    barrier = SaveBarrier(*rank.barrier)
    match rank.training:
        case "between" if barrier.passed == world.boundaries:
            yield "ends", rank._replace(training="done"), state.rounds
        case "between":
            yield "enters its collective", rank._replace(training="in a collective"), state.rounds
        case "in a collective":
            if _is_met(state, barrier.passed + 1, world):
                at = f"comes to boundary {barrier.passed + 1}"
                yield at, rank._replace(training="at a boundary"), state.rounds
        case "at a boundary":
            arrival = barrier.arrive()
            if arrival == "wait":
                if world.fault == "leave by itself":
                    barrier.learn(None)
                    yield "leaves its barrier", _with(rank, barrier, beside="looks"), state.rounds
                return
            training = "between" if arrival == "pass" else "saving"
            beside = rank.beside if arrival == "pass" else "looks"
            yield arrival, _with(rank, barrier, training=training, beside=beside), state.rounds
        case "saving":
            if any(one.training in ("dead", "failed") for one in state.ranks):
                yield "fails: another is lost", rank._replace(training="failed"), state.rounds


def _is_met(state: State, boundary: int, world: World) -> bool:
    """Say whether the others have come so far that a rank may go on to a boundary."""
    if world.ahead is None:
        return True
    for other in state.ranks:
        passed = other.barrier[0] - (other.training == "saving")
        entered = passed + (other.training in ("in a collective", "at a boundary", "saving"))
        if other.training != "done" and entered + world.ahead - 1 < boundary:
            return False
    return True


def _with(rank: Rank, barrier: SaveBarrier, **changes: object) -> Rank:
    fields = (barrier.passed, barrier.round, barrier.at, barrier.is_go)
    return rank._replace(barrier=fields, **changes)  # type: ignore[arg-type]


def _beside(state: State, number: int, rank: Rank, world: World) -> _Steps:
    """Yield what the thread beside a rank may do next."""
    if rank.training in ("dead", "failed"):
        return
    if number in world.blocked and rank.training == "in a collective":
        return
    barrier, rounds = SaveBarrier(*rank.barrier), state.rounds
    place = barrier.round - 1
    if barrier.is_go:
        return
    if place < len(rounds):
        yield from _in_round(state, number, rank, world)
    elif rank.wants and rank.training != "done" and place < world.most_rounds:
        answers: tuple[int | None, ...] = (None,) * world.ranks
        yield "asks", rank, (*rounds, (answers, None))


def _in_round(state: State, number: int, rank: Rank, world: World) -> _Steps:
    """Yield what it may do in the round that is open."""
    barrier, rounds = SaveBarrier(*rank.barrier), state.rounds
    place = barrier.round - 1
    open_round = rounds[place]
    assert open_round is not None
    answers, decision = open_round

    def put(answer: int | None = None, decided: int | None = decision) -> tuple[_Round, ...]:
        told = answers if answer is None else _with_answer(answers, number, answer)
        return (*rounds[:place], (told, decided), *rounds[place + 1 :])

    is_late = world.fault == "answer before barrier"
    match rank.beside:
        case "looks" if rank.training == "done":
            yield "answers: closed", rank._replace(beside="answered"), put(_CLOSED)
        case "looks" if is_late:
            early = barrier.passed + 1 + world.lookahead[number]
            yield f"answers {early}", rank._replace(beside="drawn"), put(early)
        case "looks":
            barrier.set_ahead(world.lookahead[number])
            yield f"sets barrier {barrier.at}", _with(rank, barrier, beside="drawn"), rounds
        case "drawn" if is_late:
            barrier.at = answers[number]
            yield f"sets barrier {barrier.at} late", _with(rank, barrier, beside="answered"), rounds
        case "drawn":
            yield f"answers {barrier.at}", rank._replace(beside="answered"), put(barrier.at)
    told = [one for one in answers if one is not None]
    if number == 0 and decision is None and len(told) == world.ranks:
        go = min(told) if world.fault == "lowest" else max(told)
        yield "decides", rank, put(decided=0 if _CLOSED in told else go)
    if _may_void(answers, decision, world.fault):
        yield "voids", rank, put(decided=0)
    if decision is not None and (rank.beside == "answered" or decision == 0):
        barrier.learn(decision if decision and rank.training != "done" else None)
        wants = rank.wants - (decision > 0 and rank.wants > 0)
        learnt = _with(rank, barrier, beside="answered" if barrier.is_go else "looks", wants=wants)
        yield f"learns {decision or 'void'}", learnt, rounds


def _may_void(answers: tuple[int | None, ...], decision: int | None, fault: str) -> bool:
    if fault == "no void":
        return False
    if fault == "overwritten":
        return decision != 0
    return decision is None and (fault != "void only while answers lack" or None in answers)


def _with_answer(
    answers: tuple[int | None, ...], number: int, answer: int
) -> tuple[int | None, ...]:
    return (*answers[:number], answer, *answers[number + 1 :])


def with_fault(world: World, fault: str) -> World:
    """Return a world whose protocol has a fault."""
    return replace(world, fault=fault)
