"""A run's folder through any history, against a model of it that fits on a page.

Saves, starts that go back, metrics, pins, tags, holds that expire, checks that find damage, and
prunes of which some are killed: what is listed, chosen and kept is what the model says. In the
long mode 1,000 runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isnan

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from commit_cases import step_at
from dist_ckpt.core.commit.records.incarnations import begin_incarnation
from dist_ckpt.core.commit.records.leases import Lease
from dist_ckpt.core.commit.records.protection_protocol import CheckpointRef, pin, tag, unpin, untag
from dist_ckpt.core.commit.records.protections import CheckpointKey
from dist_ckpt.core.commit.records.record_store import read_annotations
from dist_ckpt.core.commit.records.recorded_checks import put_check
from dist_ckpt.errors import ConflictError, NotFoundError
from dist_ckpt.runs.listing import Listing, list_run
from dist_ckpt.runs.metrics import put_metrics
from dist_ckpt.runs.prune import delete_at, prune
from dist_ckpt.runs.retention_policy import best, last
from dist_ckpt.runs.selectors import select
from dist_ckpt.testing.faulty_storage import FaultyStorage
from dist_ckpt.testing.memory_storage import MemoryStorage
from long_mode import IS_LONG, MANY_EXAMPLES
from run_folders import ROOT, committed

numbers = st.integers(0, 1000)
losses = st.sampled_from([0.0, 0.5, 1.0, float("nan"), float("inf")])
names = st.sampled_from(["release", "best"])


@dataclass
class Kept:
    """One checkpoint as the model has it."""

    name: str
    where: CheckpointKey
    is_alive: bool = True
    loss: float | None = None
    is_pinned: bool = False
    is_verified: bool = False
    damaged_by: str = ""
    is_whole: bool = True
    leased_until: float = 0.0
    leases: list[Lease] = field(default_factory=list)

    @property
    def step(self) -> int:
        return self.where[0]


class _KilledError(Exception):
    """The process is gone."""


class RunMachine(RuleBasedStateMachine):
    """What may happen to a run's folder."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1e9
        self.storage = MemoryStorage({ROOT: None}, clock=lambda: self.now)
        self.there: dict[str, Kept] = {}
        self.tags: dict[str, str] = {}
        self.start = 0
        self.step = 0

    # --- what happens ---

    @rule(by=st.integers(1, 3), is_whole=st.booleans())
    def save(self, by: int, is_whole: bool) -> None:
        self.step += by
        name = f"s{self.start}-{self.step}"
        where = committed(self.storage, self.step, start=self.start, name=name)
        self.there[name] = Kept(name, where, is_whole=is_whole)

    @rule(number=numbers)
    def start_again(self, number: int) -> None:
        restored = self.alive[number % len(self.alive)] if self.alive else None
        where = restored.where if restored else None
        self.start = begin_incarnation(self.storage, ROOT, restored=where, why="", by="").number
        self.step = restored.step if restored else 0
        for one in self.there.values():
            one.is_alive = one.is_alive and one.step <= self.step and restored is not None

    @precondition(lambda self: self.there)
    @rule(number=numbers, loss=losses)
    def measure(self, number: int, loss: float) -> None:
        one = self.pick(number)
        put_metrics(self.storage, ROOT, one.where, {"loss": loss})
        one.loss = loss

    @precondition(lambda self: self.there)
    @rule(number=numbers, level=st.sampled_from(["full", "load"]), is_damaged=st.booleans())
    def check(self, number: int, level: str, is_damaged: bool) -> None:
        one = self.pick(number)
        put_check(self.storage, ROOT, one.where, level, "block 3" if is_damaged else "")
        if level == "load" and one.damaged_by == "full":
            return  # only a full check knows better
        one.is_verified, one.damaged_by = not is_damaged, level if is_damaged else ""

    @precondition(lambda self: self.there)
    @rule(number=numbers)
    def turn_pin(self, number: int) -> None:
        one = self.pick(number)
        (unpin if one.is_pinned else lambda of: pin(of, "why"))(self.subject(one))
        one.is_pinned = not one.is_pinned

    @precondition(lambda self: self.there)
    @rule(number=numbers, name=names)
    def move_tag(self, number: int, name: str) -> None:
        one = self.pick(number)
        tag(self.subject(one), name)
        self.tags[name] = one.name

    @rule(name=names)
    def take_tag(self, name: str) -> None:
        if name in self.tags:
            untag(self.subject(self.there[self.tags.pop(name)]), name)

    @precondition(lambda self: self.there)
    @rule(number=numbers, ttl_s=st.sampled_from([10.0, 100.0]))
    def lease(self, number: int, ttl_s: float) -> None:
        one = self.pick(number)
        lease = Lease(self.subject(one), ttl_s)
        lease.take()
        one.leases.append(lease)
        one.leased_until = max(one.leased_until, self.now + ttl_s)

    @precondition(lambda self: self.there)
    @rule(number=numbers)
    def release(self, number: int) -> None:
        one = self.pick(number)
        for lease in one.leases:
            lease.release()
        one.leases, one.leased_until = [], 0.0

    @rule(seconds=st.sampled_from([1.0, 20.0, 200.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.there)
    @rule(number=numbers, force=st.booleans())
    def delete(self, number: int, force: bool) -> None:
        one = self.pick(number)
        try:
            delete_at(self.storage, f"{ROOT}/{one.name}", force=force)
        except ConflictError:
            assert self.is_protected(one)
            assert not force
        else:
            assert force or not self.is_protected(one)
            self.forget(one)

    @rule(
        n=st.integers(1, 3),
        top=st.integers(1, 2),
        waiting=st.integers(0, 2),
        damaged=st.booleans(),
        dies=st.integers(1, 100),
    )
    def prune(self, n: int, top: int, waiting: int, damaged: bool, dies: int) -> None:
        """Prune, and once more where it was killed."""
        policy = last(n) | best(top, min="loss", unmeasured=waiting)
        whole = {one.name for one in self.there.values() if one.is_whole}
        dying = FaultyStorage(self.storage, fail_at_call=dies, error=_KilledError(), sticky=True)
        for storage in (dying, self.storage):
            try:
                prune(
                    storage, ROOT, policy, is_whole=lambda one: one.name in whole, damaged=damaged
                )
                break
            except _KilledError:
                # The marks of who has died end after an hour, and meanwhile some holds.
                self.now += 3601
        gone = self.there.keys() - {one.name for one in self.listing().checkpoints}
        assert gone == self.there.keys() - self.wanted(n, top, waiting, damaged)
        checked = [one.step for one in self.usable if one.is_verified]
        assert not gone & {one.name for one in self.usable if one.step in checked[-1:]}
        for name in gone:
            self.forget(self.there[name])
        facts = read_annotations(self.storage, ROOT)
        assert {(one.step, one.attempt) for one in facts} <= {o.where for o in self.there.values()}

    # --- what it is ---

    @invariant()
    def what_is_listed_is_there(self) -> None:
        found = {one.name: one for one in self.listing().checkpoints}
        assert found.keys() == self.there.keys()
        for one in self.there.values():
            seen = found[one.name]
            assert step_at(self.storage, f"{ROOT}/{one.name}") == one.step
            assert seen.is_orphaned == (not one.is_alive)
            assert (seen.is_pinned, seen.is_verified) == (one.is_pinned, one.is_verified)
            assert seen.damage == ("block 3" if one.damaged_by else None)
            assert bool(seen.leases) == (one.leased_until > self.now)
            assert set(seen.tags) == {t for t, name in self.tags.items() if name == one.name}
            assert repr(seen.metrics.get("loss")) == repr(one.loss)

    @invariant()
    def what_is_chosen_is_right(self) -> None:
        usable = self.usable
        measured = [one for one in usable if one.loss is not None and not isnan(one.loss)]
        best = min(measured, key=lambda one: (one.loss, one.step), default=None)
        for selector, one in (("latest", usable[-1] if usable else None), ("min:loss", best)):
            try:
                assert select(self.listing(), selector).name == (one and one.name)
            except NotFoundError:
                assert one is None

    # --- the model ---

    @property
    def alive(self) -> list[Kept]:
        return sorted((one for one in self.there.values() if one.is_alive), key=lambda o: o.step)

    @property
    def usable(self) -> list[Kept]:
        return [one for one in self.alive if not one.damaged_by]

    def wanted(self, n: int, top: int, waiting: int, damaged: bool) -> set[str]:
        """Return what a prune leaves."""
        alive = self.usable
        ranked = [one for one in alive if one.loss is not None and not isnan(one.loss)]
        ranked.sort(key=lambda one: (one.loss or 0.0, one.step))
        unknown = [one for one in alive if one.loss is None]
        whole = [one for one in alive if one.is_whole]
        checked = [one for one in alive if one.is_verified]
        rules = [*alive[-n:], *ranked[:top], *unknown[max(0, len(unknown) - waiting) :]]
        protected = [one for one in self.there.values() if self.is_protected(one)]
        # Left behind, but no start's: the rules of the run are not about it.
        others = [o for o in self.there.values() if not o.is_alive and o.where[1].incarnation == 0]
        spoilt = [] if damaged else [one for one in self.there.values() if one.damaged_by]
        last = (alive or self.alive)[-1:]
        kept = [*rules, *protected, *others, *spoilt, *last, *whole[-1:], *checked[-1:]]
        return {one.name for one in kept}

    def is_protected(self, one: Kept) -> bool:
        return one.is_pinned or one.leased_until > self.now or one.name in self.tags.values()

    def pick(self, number: int) -> Kept:
        return sorted(self.there.values(), key=lambda one: one.where)[number % len(self.there)]

    def forget(self, one: Kept) -> None:
        del self.there[one.name]
        self.tags = {tag: name for tag, name in self.tags.items() if name != one.name}

    def subject(self, one: Kept) -> CheckpointRef:
        return CheckpointRef(self.storage, ROOT, f"{ROOT}/{one.name}", one.where)

    def listing(self) -> Listing:
        return list_run(self.storage, ROOT, now=self.now)


TestRunModel = RunMachine.TestCase
TestRunModel.settings = settings(
    max_examples=MANY_EXAMPLES // 10 if IS_LONG else 25, stateful_step_count=30, deadline=None
)


def test_a_tag_that_was_taken_away_does_not_come_back_with_the_end_of_who_had_it_last() -> None:
    run = RunMachine()
    run.save(by=1, is_whole=True)
    run.save(by=1, is_whole=True)
    run.move_tag(number=0, name="release")
    run.move_tag(number=1, name="release")
    run.take_tag(name="release")
    run.delete(number=1, force=True)
    run.what_is_listed_is_there()
