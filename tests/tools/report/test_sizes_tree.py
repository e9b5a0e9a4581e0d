"""Names as a tree of boxes, few enough for a page."""

from __future__ import annotations

from typing import Any

import pytest

from dist_ckpt.core.checkpoint.checkpoint import TensorInfo
from dist_ckpt.tools.report import report_sizes as trees
from dist_ckpt.tools.report.report_sizes import (
    MAX_CHARS,
    MAX_CHILDREN,
    MAX_DEPTH,
    MAX_NODES,
    clip,
    sizes_tree,
)


def a_tensor(nbytes: int, *, dtype: str = "float32", alias_of: str | None = None) -> TensorInfo:
    return TensorInfo(dtype, (nbytes // 4,), nbytes, "model", 1, alias_of)


def boxes(**sizes: int) -> list[Any]:
    return sizes_tree({name.replace("__", "."): a_tensor(n) for name, n in sizes.items()})


def below(rows: list[Any], number: int) -> list[Any]:
    return [row for row in rows if row["parent"] == number]


def test_a_box_holds_what_its_parts_hold_the_largest_first() -> None:
    rows = boxes(m__a__x=40, m__a__y=80, m__b=400, n=4)
    assert [(row["name"], row["nbytes"], row["num_tensors"]) for row in rows] == [
        ("", 524, 4),
        ("m", 520, 3),
        ("n", 4, 1),
        ("b", 400, 1),
        ("a", 120, 2),
        ("y", 80, 1),
        ("x", 40, 1),
    ]
    assert [row["parent"] for row in rows] == [None, 0, 0, 1, 1, 4, 4]


def test_what_has_one_thing_in_it_shares_its_box() -> None:
    rows = boxes(m__layers__0__w=8, m__layers__0__b=4)
    assert [row["name"] for row in rows] == ["", "m.layers.0", "w", "b"]


def test_a_tensor_and_what_lies_below_its_name_are_both_there() -> None:
    rows = boxes(m=8, m__w=4)
    assert [(row["name"], row["nbytes"]) for row in rows] == [("", 12), ("m", 12), ("w", 4)]


def test_tied_names_count_once() -> None:
    tied = a_tensor(8, alias_of="a")
    assert sizes_tree({"a": a_tensor(8), "b": tied})[0]["nbytes"] == 8  # type: ignore[call-overload, index]


def test_the_smallest_of_many_share_a_box_and_nothing_is_lost() -> None:
    rows: Any = sizes_tree({f"m.{i}": a_tensor(4 * i) for i in range(1, 1001)})
    (rest,) = [row for row in rows if row["is_rest"]]
    assert len(rows) == MAX_CHILDREN + 3
    assert rest["name"] == f"{1000 - MAX_CHILDREN} smaller"
    assert rest["num_tensors"] == 1000 - MAX_CHILDREN
    assert sum(row["nbytes"] for row in below(rows, 1)) == rows[0]["nbytes"]


@pytest.mark.sampled(2)
def test_a_hundred_thousand_tensors_make_no_more_boxes_than_a_page_shows() -> None:
    tensors = {f"m.{i % 50}.{i % 1000}.{i}": a_tensor(4 + i) for i in range(100_000)}
    rows: Any = sizes_tree(tensors)
    assert len(rows) <= MAX_NODES + MAX_CHILDREN + 1
    assert rows[0]["num_tensors"] == 100_000


def test_deep_and_long_names_are_bounded() -> None:
    rows: Any = sizes_tree({".".join("ab" * 900): a_tensor(4), ".".join("ac" * 900): a_tensor(4)})
    assert max(len(row["name"]) for row in rows) < 400
    assert len(rows) <= 2 * MAX_DEPTH


def test_a_long_text_loses_its_middle_and_no_digest() -> None:
    digest = "6941aabdc975340ed822b4b86be53220"
    for length in range(2, 400):
        text = f"{'file ' * (length // 5)}{digest} {'the index says ' * 20}"
        short = clip(text)
        assert digest in short or "6941" not in short
        assert len(short) <= len(text)
        assert len(short) < MAX_CHARS + 45
    assert clip("x" * (MAX_CHARS + 2)) == "x" * (MAX_CHARS + 2)
    assert clip("x" * 1000) == f"{'x' * 150} ... 700 characters ... {'x' * 150}"


def test_no_box_is_deeper_than_a_page_shows() -> None:
    # A tensor at each level, so that no boxes are joined.
    rows: Any = sizes_tree({".".join("a" * depth): a_tensor(4) for depth in range(1, 60)})
    depths: list[int] = []
    for row in rows:
        depths.append(0 if row["parent"] is None else depths[row["parent"]] + 1)
    assert max(depths) == MAX_DEPTH + 1
    assert rows[-1]["num_tensors"] == 1


def test_what_is_large_is_opened_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "MAX_NODES", 4)
    rows = boxes(few__a=4, few__b=4, many__a=40, many__b=40)
    assert [row["name"] for row in rows if row["parent"] is not None] == ["many", "few", "a", "b"]
    assert below(rows, 2) == []


def test_an_empty_checkpoint_is_one_box_of_nothing() -> None:
    row: Any = boxes()[0]
    assert (row["nbytes"], row["dtype"]) == (0, "")


@pytest.mark.parametrize("most", [1, 5])
def test_what_is_not_opened_stands_for_all_below_it(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trees, "MAX_NODES", most)
    rows = boxes(**{f"m__{i}__{j}": 4 for i in range(4) for j in range(4)})
    assert len(rows) <= most + 4
    leaves = [row for i, row in enumerate(rows) if not below(rows, i)]
    assert sum(row["num_tensors"] for row in leaves) == 16
