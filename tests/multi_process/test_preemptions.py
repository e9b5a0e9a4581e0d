"""Jobs of torchrun that are preempted: a few of those of which the helper runs hundreds by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from fork_server import forked_python
from preemptions import Preemption, newest_in, preempt

pytestmark = [pytest.mark.multi_process, pytest.mark.slow]

SOME = (
    Preemption("SIGUSR1 to a rank", "in evaluation", num_ranks=2, rank=1, after_s=0.05),
    Preemption("SIGTERM to a rank", "at start", num_ranks=2, rank=0, after_s=0.0),
    Preemption("SIGTERM to the launcher", "in a save", num_ranks=2, rank=0, after_s=0.02),
)


def test_preempted_jobs_go_on_from_where_they_stopped(tmp_path: Path) -> None:
    ends = []
    for job, wrong in preempt(tmp_path, SOME, python=forked_python(), waits_at_start=True):
        assert wrong == [], f"{job.plan}: {wrong}\n{job.log()}"
        ends.append(newest_in(job.root))
    first, second, third = ends
    # The second job had nobody yet who could save.
    assert 0 < first == second < third
