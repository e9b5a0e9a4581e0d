"""When a run saves: policies as values, as text, and against what they say."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt.checkpointer import save_policy
from dist_ckpt.checkpointer.save_policy import SavePolicy, at, at_end, every, on_signal

counts = st.integers(1, 10_000)
policies = st.one_of(
    counts.map(lambda n: every(steps=n)),
    st.floats(0.01, 1e6).map(lambda m: every(minutes=m)),
    st.lists(st.integers(1, 10_000), min_size=1).map(lambda steps: at(*steps)),
    st.just(at_end),
    st.just(on_signal("TERM", "SIGUSR1")),
)


@given(st.lists(policies, min_size=1, max_size=6))
def test_a_policy_is_what_its_text_says(rules):
    joined = SavePolicy()
    for rule in rules:
        joined |= rule
    again = eval(str(joined), vars(save_policy))
    assert (again.steps, again.at, again.at_end, again.signals) == (
        *(joined.steps, joined.at),
        *(joined.at_end, joined.signals),
    )
    assert sorted(again.seconds) == pytest.approx(sorted(joined.seconds))
    assert hash(joined | joined) == hash(joined)


@given(counts, st.lists(counts, min_size=1))
def test_an_interval_is_due_once_for_each_multiple_that_is_reached_or_passed(interval, steps):
    last = 0
    for step in sorted(steps):
        multiples = [k for k in range(last + 1, step + 1) if k % interval == 0]
        due = every(steps=interval).is_due(step, last)
        assert due == bool(multiples)
        if due:
            last = step


def test_single_steps_are_due_when_they_are_reached_or_passed():
    policy = at(10, 20)
    assert [policy.is_due(step, 0) for step in (9, 10, 15)] == [False, True, True]
    assert not policy.is_due(19, 10)
    assert policy.is_due(25, 10)
    assert not policy.is_due(30, 25)


def test_time_is_rank_0s_and_joined_policies_say_yes_if_any_does():
    policy = every(minutes=0.5) | every(minutes=2) | every(steps=100)
    assert [policy.is_time(s) for s in (29, 30, 500)] == [False, True, True]
    assert not every(steps=1).is_time(1e9)
    assert policy.is_due(100, 0)


def test_a_text_is_short_and_the_same_for_equal_policies():
    policy = on_signal("usr1", "SIGTERM") | at_end | at(7, 3) | every(steps=5) | every(minutes=2)
    assert str(policy) == (
        "every(steps=5) | every(minutes=2.0) | at(3, 7) | at_end | on_signal('TERM', 'USR1')"
    )
    assert eval(str(policy), vars(save_policy)) == policy == policy | at_end


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (every, "give steps= or minutes="),
        (lambda: every(steps=1, minutes=1), r"every\(\.\.\.\) \| every\(\.\.\.\)"),
        (lambda: every(steps=0), "steps=0: give a number from 1"),
        (lambda: every(steps=True), "steps=True: give a whole number"),
        (lambda: every(steps=cast("int", 1.5)), "steps=1.5: give a whole number"),
        (lambda: every(minutes=0), "minutes=0: give a number above 0"),
        (lambda: every(minutes=float("nan")), "minutes=nan"),
        (lambda: every(minutes=10**400), "minutes=1000.*: give a number above 0, up to"),
        (lambda: every(minutes=cast("float", "5")), "minutes='5': give a number"),
        (at, "give the steps"),
        (lambda: at(5, 0), "at=0: give a number from 1"),  # steps count from 1: it never fires
        (on_signal, "give the signals"),
        (lambda: on_signal("KILL"), "KILL: this signal cannot be a request"),
        (lambda: on_signal("SIGSTOP"), "SIGSTOP: this signal"),
        (lambda: on_signal("NOPE"), "'NOPE' is not a signal of this system"),
        (lambda: on_signal(cast("str", 15)), '15 is not the name of a signal: give it as "TERM"'),
        (lambda: at_end | 3, "unsupported operand"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_remedy(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()
