"""The names of tensors as a tree of sizes, grouped so far that a page can show it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush

from dist_ckpt.core.checkpoint.checkpoint import TensorInfo
from dist_ckpt.core.format.strict_json import Json
from dist_ckpt.tools.report.texts import bounded

# A page with so many boxes is drawn in a moment; of one place so many are told apart.
MAX_NODES = 1000
MAX_CHILDREN = 80
# Deeper names are shown by their first parts and the rest in one.
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
    """Return the boxes of a treemap, the root first; each has the number of its parent in the list.

    What is large is opened first, until there are `MAX_NODES`: a box that is not opened further
    stands for all below it. Of many in one place the smallest share a box, whose `is_rest` is true.
    `dtype` and `component` are those of most of its bytes. Tied names are left out.
    """
    root = _tree(tensors)
    rows: list[Json] = [_row(root, None, is_rest=False)]
    # By size, then in the order in which they came.
    closed = [(-root.nbytes, 0, root)]
    while closed and len(rows) < MAX_NODES:
        _, parent, node = heappop(closed)
        for child, is_rest in _shown(node):
            rows.append(_row(child, parent, is_rest=is_rest))
            if child.children:
                heappush(closed, (-child.nbytes, len(rows) - 1, child))
    return rows


def _tree(tensors: Mapping[str, TensorInfo]) -> _SizeNode:
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


def _shown(node: _SizeNode) -> Iterator[tuple[_SizeNode, bool]]:
    """Yield what is in a box, the largest first; what has one thing in it together with that."""
    children = sorted(node.children.values(), key=lambda one: (-one.nbytes, one.name))
    # A box for the rest is worth it for two at least.
    most = MAX_CHILDREN if len(children) > MAX_CHILDREN + 1 else len(children)
    for child in children[:most]:
        yield _joined(child), False
    if rest := children[most:]:
        yield _together(rest), True


def _joined(node: _SizeNode) -> _SizeNode:
    names = [node.name]
    while len(node.children) == 1:
        (inner,) = node.children.values()
        if inner.num_tensors != node.num_tensors:  # it has a tensor of its own name as well
            break
        node = inner
        names.append(node.name)
    return _SizeNode(
        ".".join(names), node.nbytes, node.num_tensors, node.dtypes, node.components, node.children
    )


def _together(nodes: list[_SizeNode]) -> _SizeNode:
    whole = _SizeNode(f"{len(nodes)} smaller")
    for node in nodes:
        whole.nbytes += node.nbytes
        whole.num_tensors += node.num_tensors
        whole.dtypes += node.dtypes
        whole.components += node.components
    return whole


def _row(node: _SizeNode, parent: int | None, *, is_rest: bool) -> Json:
    return {
        "name": bounded(node.name),
        "parent": parent,
        "nbytes": node.nbytes,
        "num_tensors": node.num_tensors,
        "dtype": _most(node.dtypes),
        "component": _most(node.components),
        "is_rest": is_rest,
    }


def _most(counts: Counter[str]) -> str:
    return bounded(max(counts, key=lambda name: (counts[name], name), default=""))
