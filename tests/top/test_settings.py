"""How long a rank that is alive is waited for."""

from __future__ import annotations

import pytest

from dist_ckpt.settings import UNKNOWN_GROUP_TIMEOUT_S, Settings


@pytest.mark.parametrize(
    ("group_timeout_s", "join_timeout_s", "late_timeout_s"),
    [
        (UNKNOWN_GROUP_TIMEOUT_S, None, 1800),
        (600.0, None, 600),
        (10.0, None, 300),  # a live rank is not waited for less than one that was never seen
        (600.0, 20, 20),  # what a user sets is obeyed
        (600.0, 900, 900),
    ],
)
def test_a_late_rank_is_waited_for_as_long_as_training_or_the_user_says(
    group_timeout_s: float, join_timeout_s: int | None, late_timeout_s: int
) -> None:
    environ = {"DIST_CKPT_JOIN_TIMEOUT_S": str(join_timeout_s)} if join_timeout_s else {}
    settings = Settings.from_environment(environ, group_timeout_s=group_timeout_s)
    assert settings.late_timeout_s == late_timeout_s
    assert settings.join_timeout_s == (join_timeout_s or 300)
