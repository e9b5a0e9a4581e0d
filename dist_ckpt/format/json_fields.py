"""What index and shard headers have in common: version, dtype, shape, region."""

from __future__ import annotations

from typing import cast

from dist_ckpt.errors import IncompatibleError
from dist_ckpt.format import strict_json
from dist_ckpt.format.dtypes import DTYPES, DType
from dist_ckpt.format.geometry import Region, Shape
from dist_ckpt.format.layout import check_shape
from dist_ckpt.format.strict_json import Json, corrupt

# One version for index, shard files and objects files. Fields are exact, but for names with `x-`: a
# document with one more, or one less, is damaged to who does not know that. So a new field means a
# new version, or one that older readers must not miss a word in `requires`.
VERSION = 1

_INTEGERS = frozenset({int})
_REMEDY = "upgrade dist_ckpt to read it"


def check_version(doc: Json, what: str) -> None:
    """Raise IncompatibleError if a document is of a newer version, CorruptError if of none."""
    format_ = doc.get("format") if type(doc) is dict else None
    if type(format_) is not dict or "version" not in format_:
        raise corrupt(what, "no format version, so it is not of dist_ckpt")
    version = strict_json.integer(
        format_["version"], 1, strict_json.MAX_INTEGER, f"{what}, version"
    )
    if version > VERSION:
        raise IncompatibleError(
            f"{what}: format version {version}, this dist_ckpt reads {VERSION}; {_REMEDY}"
        )
    _, requires = strict_json.fields(format_, ("version", "requires"), f"{what}, format")
    if needs := strict_json.array(requires, f"{what}, requires"):
        raise IncompatibleError(
            f"{what}: it requires {strict_json.shown(needs)}, which this dist_ckpt lacks; {_REMEDY}"
        )


def decode_dtype(code: Json, what: str) -> DType:
    """Return the dtype of a code; one that we do not know is a newer version's."""
    dtype = DTYPES.get(strict_json.string(code, f"{what}, dtype"))
    if dtype is None:
        raise IncompatibleError(f"{what}: dtype {strict_json.shown(code)} is not known; {_REMEDY}")
    return dtype


def decode_shape(value: Json, dtype: DType, what: str) -> Shape:
    """Return the shape of a tensor of this dtype."""
    shape = integers(value, f"{what}, shape")
    try:
        check_shape(shape, dtype.itemsize)
    except ValueError as error:
        raise corrupt(what, str(error)) from None
    return shape


def integers(value: Json, what: str) -> Shape:
    """Return an array of integers that are not negative."""
    numbers = strict_json.array(value, what)
    integers = cast("list[int]", numbers)
    # Not number by number in Python: cuts are as many as ranks.
    if not _INTEGERS.issuperset(map(type, numbers)) or min(integers, default=0) < 0:
        raise corrupt(what, f"{strict_json.shown(value)} is not a list of integers from 0 on")
    return tuple(integers)


def decode_region(value: Json, what: str) -> Region:
    """Return the region of an [offset, shape] pair."""
    offset, shape = strict_json.row(value, 2, what)
    try:
        return Region(integers(offset, what), integers(shape, what))
    except ValueError as error:
        raise corrupt(what, str(error)) from None
