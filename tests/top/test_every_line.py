"""Whatever line of a save or load fails on one of three ranks: all ranks tell it, nothing is torn.

Here it is one line of a third of the functions on rank 0, and of another third on rank 1;
`tests/helpers/line_faults.py` tries all lines if it is run by hand.
"""

from __future__ import annotations

import pytest

from line_faults import CASES, KINDS, Fault, lines_of, wrong


@pytest.mark.parametrize("make", CASES)
def test_a_line_of_a_function_may_fail_on_one_rank(make):
    case, problems = make(), []
    for victim in (0, 1):
        seen: list[str] = []
        for at, (function, _) in enumerate(lines_of(case, victim)):
            if at > 0 and function not in seen:  # at 0 no operation has begun
                seen.append(function)
                if len(seen) % 3 == victim:
                    problems.append(wrong(case, Fault(victim, at, KINDS[len(seen) // 3 % 2])))
        assert len(seen) > 20
    assert [problem for problem in problems if problem] == []
