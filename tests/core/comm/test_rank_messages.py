from __future__ import annotations

from dist_ckpt.core.comm.rank_messages import Heartbeat, HeartbeatSender, unpack


def test_a_beat_tells_what_the_heart_was_told():
    heart = HeartbeatSender("a", number=7, inside=True, failed_turn=3)
    assert unpack(heart.encode_next(), Heartbeat) == Heartbeat(1, 7, True, 3, False, "a")
    heart.gone = True
    assert unpack(heart.encode_next(), Heartbeat) == Heartbeat(2, 7, True, 3, True, "a")


def test_no_two_beats_are_equal():
    heart = HeartbeatSender("a")
    assert len({heart.encode_next() for _ in range(1000)}) == 1000
