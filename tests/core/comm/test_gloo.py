"""What one rank makes of its gloo connections; between real ranks see test_channel_real.py."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch.distributed")

from torch.distributed import HashStore

from dist_ckpt.core.comm.collectives.gloo import GlooCollective
from dist_ckpt.core.comm.rank_messages import SecondaryError


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (RuntimeError("reset"), SecondaryError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (MemoryError(), MemoryError),
    ],
)
def test_connections_that_were_left_in_mid_collective_are_made_anew(error, raised, monkeypatch):
    collective = GlooCollective(HashStore, 0, 1, timeout_s=10)

    def interrupt(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(collective, "_send", interrupt)
        with pytest.raises(raised):
            collective.broadcast(b"data")
    assert collective.generation == 1
    assert collective.broadcast(b"data") == b"data"
    assert collective.generation == 1
