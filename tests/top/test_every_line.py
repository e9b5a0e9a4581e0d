"""Whatever line of a save or load fails on one of three ranks: all ranks tell it, nothing is torn.

Here it is one line of a twelfth of the functions on rank 0, and of another on rank 1, and of a
quarter with `--long`; `tests/helpers/faults/line_faults.py` tries all lines if it is run by hand.
"""

from __future__ import annotations

import pytest

from line_faults import CASES, KINDS, Fault, OneMoreSave, bytecodes_of_verdict, lines_of, wrong
from long_mode import IS_LONG, sampled_params

pytestmark = pytest.mark.waits

EACH = 4 if IS_LONG else 12


@pytest.mark.parametrize("make", sampled_params(CASES, 3))
def test_a_line_of_a_function_may_fail_on_one_rank(make):
    case, problems = make(), []
    for victim in (0, 1):
        seen: list[str] = []
        for at, (function, _) in enumerate(lines_of(case, victim)):
            if at > 0 and function not in seen:  # at 0 no operation has begun
                seen.append(function)
                if len(seen) % EACH == victim:
                    problems.append(wrong(case, Fault(victim, at, KINDS[len(seen) // EACH % 2])))
        assert len(seen) > 15
    assert [problem for problem in problems if problem] == []


def test_an_interrupt_between_the_commit_and_its_answer_is_told_as_what_is_there():
    case = OneMoreSave(by_kept_plan=True)
    num = bytecodes_of_verdict(case)
    assert num > 200
    faults = [
        Fault(0, at, KeyboardInterrupt, is_in_bytecode=True)
        for at in range(0, num, 11 if IS_LONG else 41)
    ]
    assert [problem for fault in faults if (problem := wrong(case, fault))] == []
