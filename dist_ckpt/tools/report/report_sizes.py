"""Compute the sizes of tensors and ranks for the report of a checkpoint, as JSON. Pure.

Names in a checkpoint are untrusted text of any length, so all texts are bounded and escaped.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush, nlargest

from dist_ckpt.core.checkpoint.checkpoint import TensorInfo
from dist_ckpt.core.format import filenames
from dist_ckpt.core.format.index.index import Index
from dist_ckpt.core.format.strict_json import Json

# A text that is longer by more than the note about it loses its middle: the page stays small.
MAX_CHARS = 300
_NOTE_CHARS = 40


def clip(text: str) -> str:
    """Shorten a text to about `MAX_CHARS`, and escape control characters and line ends.

    Words stay whole, such as digests, unless they are as long as a half of the text.
    """
    if len(text) > MAX_CHARS + _NOTE_CHARS:
        half = MAX_CHARS // 2
        start, end = text[:half], text[-half:]
        start, end = start.rpartition(" ")[0] or start, end.partition(" ")[2] or end
        text = f"{start} ... {len(text) - len(start) - len(end)} characters ... {end}"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


# A report lists this many of the largest tensors.
NUM_LARGEST = 25
# The table of components and its chart have at most this many rows.
MAX_COMPONENTS = 40

# A browser draws this many boxes at the same time.
MAX_NODES = 1000
# A box has at most this many inner boxes. If there are more, the smallest share one box.
MAX_CHILDREN = 80
# Levels of a name that are deeper than this share one box.
MAX_DEPTH = 24


@dataclass(slots=True)
class _SizeNode:
    name: str
    nbytes: int = 0
    num_tensors: int = 0
    dtypes: Counter[str] = field(default_factory=Counter)
    components: Counter[str] = field(default_factory=Counter)
    children: dict[str, _SizeNode] = field(default_factory=dict)

    def add(self, info: TensorInfo) -> None:
        self.nbytes += info.nbytes
        self.num_tensors += 1
        self.dtypes[info.dtype] += info.nbytes
        self.components[info.component] += info.nbytes


def sizes_tree(tensors: Mapping[str, TensorInfo]) -> list[Json]:
    """Return the boxes of a treemap, the root first. Each has the index of its parent.

    Large boxes are opened first, until there are `MAX_NODES`. A box that is not opened has the size
    of everything in it. If a box has too many inner boxes, the smallest share one, with `is_rest`.
    `dtype` and `component` of a box are those of most of its bytes. Tied names are left out.
    """
    root = _build_tree(tensors)
    rows: list[Json] = [_box_row(root, None, is_rest=False)]
    # The largest box first, then the order of insertion.
    closed = [(-root.nbytes, 0, root)]
    while closed and len(rows) < MAX_NODES:
        _, parent, node = heappop(closed)
        for child, is_rest in _visible_children(node):
            rows.append(_box_row(child, parent, is_rest=is_rest))
            if child.children:
                heappush(closed, (-child.nbytes, len(rows) - 1, child))
    return rows


def _build_tree(tensors: Mapping[str, TensorInfo]) -> _SizeNode:
    root = _SizeNode("")
    for fqn, info in tensors.items():
        if info.alias_of is not None:
            continue
        node = root
        node.add(info)
        for part in fqn.split(".", MAX_DEPTH):
            node = node.children.setdefault(part, _SizeNode(part))
            node.add(info)
    return root


def _visible_children(node: _SizeNode) -> Iterator[tuple[_SizeNode, bool]]:
    """Yield the inner boxes, the largest first. A box with a single inner box is merged with it."""
    children = sorted(node.children.values(), key=lambda child: (-child.nbytes, child.name))
    # A box for the smallest boxes replaces at least two.
    most = MAX_CHILDREN if len(children) > MAX_CHILDREN + 1 else len(children)
    for child in children[:most]:
        yield _join_single_children(child), False
    if rest := children[most:]:
        whole = _SizeNode(f"{len(rest)} smaller")
        for child in rest:
            whole.nbytes += child.nbytes
            whole.num_tensors += child.num_tensors
            whole.dtypes += child.dtypes
            whole.components += child.components
        yield whole, True


def _join_single_children(node: _SizeNode) -> _SizeNode:
    names = [node.name]
    while len(node.children) == 1:
        (inner,) = node.children.values()
        if inner.num_tensors != node.num_tensors:  # the box is also a tensor
            break
        node = inner
        names.append(node.name)
    return replace(node, name=".".join(names))


def _box_row(node: _SizeNode, parent: int | None, *, is_rest: bool) -> Json:
    return {
        "name": clip(node.name),
        "parent": parent,
        "nbytes": node.nbytes,
        "num_tensors": node.num_tensors,
        "dtype": _largest(node.dtypes),
        "component": _largest(node.components),
        "is_rest": is_rest,
    }


def _largest(counts: Counter[str]) -> str:
    return clip(max(counts, key=lambda name: (counts[name], name), default=""))


def component_sizes(tensors: Mapping[str, TensorInfo]) -> dict[str, Json]:
    """Return the bytes of tensors by component and by dtype, and the largest tensors."""
    by_component: dict[str, _SizeNode] = {}
    by_dtype: dict[str, _SizeNode] = {}
    for info in tensors.values():
        by_component.setdefault(info.component, _SizeNode(info.component)).add(info)
        by_dtype.setdefault(info.dtype, _SizeNode(info.dtype)).add(info)
    components = sorted(by_component.values(), key=lambda node: (-node.nbytes, node.name))
    largest = nlargest(NUM_LARGEST, tensors.items(), key=lambda item: (item[1].nbytes, item[0]))
    return {
        "components": [
            {
                "name": clip(node.name),
                "nbytes": node.nbytes,
                "num_tensors": node.num_tensors,
                "dtypes": dict(node.dtypes),
            }
            for node in components[:MAX_COMPONENTS]
        ],
        "num_more_components": max(len(components) - MAX_COMPONENTS, 0),
        "dtypes": [
            {"name": node.name, "nbytes": node.nbytes, "num_tensors": node.num_tensors}
            for node in sorted(by_dtype.values(), key=lambda node: -node.nbytes)
        ],
        "largest": [
            {
                "name": clip(fqn),
                "dtype": info.dtype,
                "shape": list(info.shape),
                "nbytes": info.nbytes,
                "num_shards": info.num_shards,
            }
            for fqn, info in sorted(largest, key=lambda item: (-item[1].nbytes, item[0]))
        ],
    }


# A screen has at most this many columns. With more ranks, a column shows the largest of several.
MAX_COLUMNS = 1024
# The largest components have a row each. The others share a row.
MAX_RANK_ROWS = 24

VALUES = "values and attached files"


def rank_sizes(index: Index) -> dict[str, Json]:
    """Return the bytes of files by component and rank, and their balance.

    `imbalance` is the most bytes of a rank, divided by the mean of all ranks: 1.0 is even. It is
    None if nothing is stored.
    """
    by_component = _bytes_by_rank(index)
    ordered = sorted(by_component.items(), key=lambda item: (-item[1].total(), item[0]))
    shown, rest = ordered[:MAX_RANK_ROWS], ordered[MAX_RANK_ROWS:]
    if rest:
        shown.append((f"{len(rest)} more", _add_tables(sizes for _, sizes in rest)))
    world_size = index.catalog.world_size
    width = -(-world_size // MAX_COLUMNS)
    totals = _add_tables(by_component.values())
    mean = totals.total() / world_size
    most = max(range(world_size), key=totals.__getitem__)
    return {
        "components": [_rank_row(name, sizes, world_size, width) for name, sizes in shown],
        "ranks_per_column": width,
        "totals": _max_by_column(totals, world_size, width),
        "mean_nbytes": mean,
        "most_nbytes": totals[most],
        "most_rank": most,
        "least_nbytes": min(totals[rank] for rank in range(world_size)),
        "num_idle_ranks": sum(not totals[rank] for rank in range(world_size)),
        "imbalance": totals[most] / mean if mean else None,
    }


def _bytes_by_rank(index: Index) -> dict[str, Counter[int]]:
    sizes: dict[str, Counter[int]] = defaultdict(Counter)
    for file in index.files:
        sizes[index.catalog.components[file.component].name][file.rank] += file.nbytes
    for record in index.objects:
        sizes[VALUES][filenames.parse_objects_file(record.name) or 0] += record.nbytes
    for attached in index.attached:
        sizes[VALUES][0] += attached.nbytes
    return sizes


def _add_tables(tables: Iterable[Counter[int]]) -> Counter[int]:
    total: Counter[int] = Counter()
    for sizes in tables:
        total.update(sizes)
    return total


def _rank_row(name: str, sizes: Counter[int], world_size: int, width: int) -> Json:
    most = max(sizes, key=lambda rank: (sizes[rank], -rank))
    return {
        "name": clip(name),
        "nbytes": sizes.total(),
        "num_ranks": len(sizes),
        "most_nbytes": sizes[most],
        "most_rank": most,
        "mean_nbytes": sizes.total() / world_size,
        "by_column": _max_by_column(sizes, world_size, width),
    }


def _max_by_column(sizes: Mapping[int, int], world_size: int, width: int) -> list[Json]:
    """Return the most bytes of a rank in each column."""
    columns = [0] * -(-world_size // width)
    for rank, nbytes in sizes.items():
        columns[rank // width] = max(columns[rank // width], nbytes)
    return [*columns]
