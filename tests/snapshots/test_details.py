"""What a snapshot says of its save, as bytes and back."""

from __future__ import annotations

import msgpack
import pytest

from dist_ckpt.snapshots.details import Details, decode_details, encode_details

DETAILS = Details(True, {"run": "a"}, {"by": "me"}, 1.5, ((b"x", (0, 1, 3)), (b"y", (2,))), ())


def test_details_come_back() -> None:
    assert decode_details(encode_details(DETAILS)) == DETAILS


@pytest.mark.parametrize(
    "bodies",
    [
        [1],
        [[b"x"]],
        [[1 << 40, [[0, 1]]]],
        [["x", [[0, 1]]]],
        [[b"x", 1]],
        [[b"x", [1]]],
        [[b"x", [[0]]]],
        [[b"x", [["a", "b"]]]],
        [[b"x", [[0, 1 << 60]]]],
        [[b"x", [[0, 900_000], [0, 900_000]]]],
        [[b"x", [[-1, 2]]]],
    ],
    ids=str,
)
def test_what_are_no_details_is_said_at_once_and_makes_no_memory(bodies: object) -> None:
    data = msgpack.packb((True, {}, {}, 1.5, bodies, ()))
    with pytest.raises(ValueError, match="no details of a snapshot"):
        decode_details(data)
