"""The collector of garbage is paused for a while, and then as it was."""

from __future__ import annotations

import gc

import pytest

from dist_ckpt.core.runtime.gc_pause import paused_collector


@pytest.mark.parametrize("on", [True, False])
def test_the_collector_is_paused_and_then_as_it_was(on: bool) -> None:
    (gc.enable if on else gc.disable)()
    try:
        with pytest.raises(ValueError, match="paused"), paused_collector():
            raise ValueError("paused" * (not gc.isenabled()))
        assert gc.isenabled() == on
    finally:
        gc.enable()


def test_a_pause_within_a_pause_does_not_end_it() -> None:
    with paused_collector():
        with paused_collector():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
