"""What a snapshot says of its save, as bytes and back."""

from __future__ import annotations

import msgpack
import pytest

from dist_ckpt.async_save.snapshots.arena_layout import SnapshotMetadata
from dist_ckpt.core.runtime import typed_msgpack

DETAILS = SnapshotMetadata(
    True, {"run": "a"}, {"by": "me"}, 1.5, ((b"x", (0, 1, 3)), (b"y", (2,))), ()
)


def test_details_come_back() -> None:
    assert typed_msgpack.decode(typed_msgpack.encode(DETAILS), SnapshotMetadata) == DETAILS


@pytest.mark.parametrize(
    "bodies",
    [[1], [[b"x"]], [["x", [0]]], [[1 << 40, [0]]], [[b"x", 1]], [[b"x", ["a"]]], [[b"x", [[0]]]]],
    ids=str,
)
def test_what_are_no_details_is_said(bodies: object) -> None:
    data = msgpack.packb((True, {}, {}, 1.5, bodies, ()))
    with pytest.raises(ValueError, match="bytes are not a message"):
        typed_msgpack.decode(data, SnapshotMetadata)
