import pytest

from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.geometry import Region
from dist_ckpt.core.format.strict_json import (
    check_version,
    decode_dtype,
    decode_region,
    decode_shape,
    integers,
)
from dist_ckpt.errors import CorruptError, IncompatibleError

FLOAT = DTYPES["float32"]


@pytest.mark.parametrize("value", [None, 1, "1", {}, [-1], [0, -1], [True], [1.0], ["1"], [[1]]])
def test_sizes_and_cuts_are_integers_from_0_on(value):
    with pytest.raises(CorruptError, match=r"^doc.*is not a"):
        integers(value, "doc")
    with pytest.raises(CorruptError, match=r"^doc.*is not a"):
        decode_shape(value, FLOAT, "doc")
    with pytest.raises(CorruptError, match=r"^doc.*is not a"):
        decode_region([[0], value], "doc")


def test_what_is_given_rightly_is_taken():
    assert integers([], "doc") == ()
    assert decode_shape([0, 3], FLOAT, "doc") == (0, 3)
    assert decode_region([[1, 2], [3, 4]], "doc") == Region((1, 2), (3, 4))
    assert decode_dtype("float32", "doc") is FLOAT
    check_version({"format": {"version": 1, "requires": []}, "more": 1}, "doc")


def test_an_unknown_dtype_is_a_newer_versions_and_a_number_is_none():
    with pytest.raises(IncompatibleError, match="dtype 'float3' is unknown; upgrade dist_ckpt"):
        decode_dtype("float3", "doc")
    with pytest.raises(CorruptError, match="is not a string"):
        decode_dtype(3, "doc")


@pytest.mark.parametrize("doc", [None, [], {}, {"format": 1}, {"format": {"requires": []}}])
def test_a_document_without_a_version_is_none_of_ours(doc):
    with pytest.raises(CorruptError, match="no format version"):
        check_version(doc, "doc")


def test_a_newer_version_may_say_anything_else():
    with pytest.raises(
        IncompatibleError, match="format version 7, this dist_ckpt reads 1; upgrade"
    ):
        check_version({"format": {"version": 7, "needs": "more"}}, "doc")
    with pytest.raises(IncompatibleError, match=r"requires .'zip'.*; upgrade"):
        check_version({"format": {"version": 1, "requires": ["zip"]}}, "doc")
