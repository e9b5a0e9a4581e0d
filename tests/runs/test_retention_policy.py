"""What is kept, against what the rules say in plain words, and while a run goes on."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.runs import retention_policy as keep
from dist_ckpt.runs.retention_policy import Candidate, RetentionPolicy, best, every, last, within

HOUR = 3600.0


def test_users_see_only_policies_in_dc_keep():
    own = (
        value for value in vars(keep).values() if getattr(value, "__module__", "") == keep.__name__
    )
    public = {value.__name__ for value in own if not value.__name__.startswith("_")}
    policies = {"Candidate", "RetentionPolicy", "best", "every", "last", "parse", "within"}
    assert public == policies


def seen(step: int, at: float | None = None, **metrics: float) -> Candidate:
    return Candidate(step, Attempt(1, f"{step:016x}"), step * HOUR if at is None else at, metrics)


def steps_kept(policy: RetentionPolicy, there: Sequence[Candidate]) -> list[int]:
    told = zip(there, policy.reasons(there), strict=True)
    return sorted(one.step for one, reasons in told if reasons)


step_lists = st.lists(st.integers(0, 300), unique=True, min_size=1, max_size=25)


@given(step_lists, st.integers(1, 30))
def test_last_keeps_the_highest_steps(steps, n):
    assert steps_kept(last(n), list(map(seen, steps))) == sorted(steps)[-n:]


@given(
    st.dictionaries(
        st.integers(0, 100),
        st.none() | st.sampled_from([1.0, 2.0, 3.0, float("nan"), float("inf"), -float("inf")]),
        min_size=1,
    ),
    st.integers(1, 4),
    st.integers(0, 3),
    st.sampled_from(["min", "max"]),
)
def test_best_keeps_the_best_and_those_that_wait(values, n, unmeasured, which):
    there = [seen(step) if v is None else seen(step, m=v) for step, v in values.items()]
    sign = 1 if which == "min" else -1
    ranked = sorted(
        (sign * v, step) for step, v in values.items() if v is not None and not isnan(v)
    )
    waiting = sorted(step for step, v in values.items() if v is None)
    wanted = {step for _, step in ranked[:n]} | set(waiting[max(0, len(waiting) - unmeasured) :])
    policy = best(n, **{which: "m"}, unmeasured=unmeasured)
    assert steps_kept(policy, there) == sorted(wanted)


@given(step_lists, st.integers(1, 40))
def test_every_keeps_the_nearest_to_each_multiple(steps, interval):
    wanted = set()
    for multiple in range(interval, max(steps) + 2 * interval + 1, interval):
        wanted.add(min(sorted(steps), key=lambda step: abs(step - multiple)))
    assert steps_kept(every(steps=interval), list(map(seen, steps))) == sorted(wanted)
    assert steps_kept(every(hours=interval), list(map(seen, steps))) == sorted(wanted)


@given(step_lists, st.floats(0.1, 20))
def test_within_counts_from_the_newest(steps, days):
    since = max(steps) - 24 * days
    wanted = [step for step in sorted(steps) if step * HOUR >= since * HOUR]
    assert steps_kept(within(days=days), list(map(seen, steps))) == wanted


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=30),
    st.sampled_from([last(2), every(steps=50), every(hours=70), within(days=3), best(2, min="m")]),
    st.randoms(use_true_random=False),
)
def test_pruning_after_each_save_keeps_what_pruning_once_at_the_end_would(gaps, policy, random):
    step, everything = 0, []
    for gap in gaps:
        step += gap
        everything.append(seen(step, m=random.random()))
    there: list[Candidate] = []
    for one in everything:
        there.append(one)
        told = policy.reasons(there)
        there = [kept for kept, reasons in zip(there, told, strict=True) if reasons]
    assert [one.step for one in there] == steps_kept(policy, everything)


def test_a_step_that_was_not_yet_measured_waits_and_then_counts():
    there = [seen(1, m=1.0), seen(2, m=0.5), seen(3), seen(4), seen(5)]
    assert steps_kept(best(1, min="m"), there) == [2, 4, 5]
    there[3] = seen(4, m=0.1)
    assert steps_kept(best(1, min="m"), there) == [3, 4, 5]
    assert steps_kept(best(1, min="m", unmeasured=0), there) == [4]


def test_each_is_told_with_all_rules_that_keep_it_in_the_order_given():
    policy = last(1) | every(steps=10) | last(1)
    assert policy.reasons([seen(20), seen(11), seen(5)]) == [
        ("last(1)", "every(steps=10)"),
        ("every(steps=10)",),
        (),
    ]
    assert policy.reasons([]) == []


def test_times_that_jump_end_soon_and_lose_nothing_but_what_the_rule_says():
    there = [seen(1, 0.0), seen(2, 1e18), seen(3, 1e9), seen(4, -1e9)]
    assert steps_kept(every(hours=1e-6), there) == [1, 2, 3]
    assert 4 in steps_kept(within(days=1), there)


rules = st.one_of(
    st.integers(1, 99).map(last),
    st.integers(1, 99).map(lambda n: every(steps=n)),
    st.floats(0.1, 1e6).map(lambda h: every(hours=h)),
    st.floats(0.1, 1e6).map(lambda d: within(days=d)),
    st.tuples(st.integers(1, 9), st.text(min_size=1), st.integers(0, 5)).map(
        lambda one: best(one[0], max=one[1], unmeasured=one[2])
    ),
)


@given(st.lists(rules, min_size=1, max_size=5))
def test_a_policy_is_what_its_text_says(some):
    joined = RetentionPolicy({})
    for rule in some:
        joined |= rule
    assert keep.parse(str(joined)) == joined
    assert str(keep.parse(str(joined))) == str(joined)
    assert len({joined, keep.parse(str(joined))}) == 1


def test_a_text_is_as_one_would_write_it():
    policy = keep.parse(
        "last(3)|best(2,min='val/loss')|best(1, max='a', unmeasured=0)|within(days=7)"
    )
    assert str(policy) == (
        "last(3) | best(2, min='val/loss') | best(1, max='a', unmeasured=0) | within(days=7)"
    )
    assert policy != last(3)
    assert last(3) != "last(3)"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: last(0), "n=0: give a number from 1"),
        (lambda: last(True), "n=True: give a whole number"),
        (lambda: best(1), 'give min= or max=, such as min="val/loss"'),
        (lambda: best(1, min="a", max="b"), "give min= or max="),
        (lambda: best(1, min=""), "'' is not the name of a metric"),
        (lambda: best(1, min=cast("str", 3)), "3 is not the name of a metric"),
        (lambda: best(1, min="a", unmeasured=-1), "unmeasured=-1: give a number from 0"),
        (every, "give steps= or hours="),
        (lambda: every(steps=1, hours=1), "give steps= or hours="),
        (lambda: every(hours=0), "hours=0: give a number above 0"),
        (lambda: every(hours=cast("float", "1")), "hours='1': give a number"),
        (lambda: within(days=float("inf")), "days=inf"),
        (lambda: last(1 << 63), "n=9223372036854775808: give a number up to"),
        (lambda: every(steps=10**400), "steps=1.*: give a number up to"),
        (lambda: every(hours=10**400), "hours=1000.*: give a number above 0, from 1e-06 to 1e"),
        (lambda: every(hours=1e-320), "hours=1e-320: give a number above 0, from 1e-06 to 1e"),
        (lambda: within(days=10**400), "days=1000.*: give a number above 0"),
        (lambda: last(1) | "x", "unsupported operand"),
        (
            lambda: keep.parse("at_end"),
            "'at_end' is not a rule; there are best, every, last, within",
        ),
        (lambda: keep.parse("last()"), r"last\(\): .*missing"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_remedy(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()
