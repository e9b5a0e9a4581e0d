"""The contents of the report of one checkpoint, as JSON.

They include the tensors as a tree of sizes, grouped so that a page can show it, and the bytes of
each rank's files by component.

Names in a checkpoint are untrusted text of any length, so all texts are bounded and escaped.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush, nlargest
from typing import Literal

from dist_ckpt.core.checkpoint import checkpoint
from dist_ckpt.core.checkpoint.checkpoint import Checkpoint, TensorInfo
from dist_ckpt.core.checkpoint.verify import Level, Problem, VerifyReport, verify
from dist_ckpt.core.format import filenames
from dist_ckpt.core.format.index.index import Index
from dist_ckpt.core.format.index.model_description import CONFIG, KIND, as_json, leaves_of
from dist_ckpt.core.format.strict_json import Json
from dist_ckpt.errors import CheckpointError, CorruptError
from dist_ckpt.openers import OPENER
from dist_ckpt.reports import Progress
from dist_ckpt.runs.listing import RunCheckpoint
from dist_ckpt.tools.inspect.summary import CheckpointSummary, summarize

# The middle of a longer text is left out, so a page stays small.
MAX_CHARS = 300
# The most rows of a list, such as a configuration.
MAX_ROWS = 300


def bounded(text: str) -> str:
    """Return a text of bounded length on one line, without control characters."""
    if len(text) > MAX_CHARS:
        half = MAX_CHARS // 2
        text = f"{text[:half]} ... {len(text) - 2 * half} characters ... {text[-half:]}"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def named_values(values: Mapping[str, object]) -> tuple[list[Json], int]:
    """Return the values in nested mappings as pairs of texts, and the number of further ones."""
    pairs: list[Json] = [
        [bounded(name), bounded(value)] for name, value in leaves_of(values) if name
    ]
    return pairs[:MAX_ROWS], max(len(pairs) - MAX_ROWS, 0)


def first_of(rows: Iterable[Json]) -> tuple[list[Json], int]:
    """Return the first rows, and the number of further ones."""
    rows = list(rows)
    return rows[:MAX_ROWS], max(len(rows) - MAX_ROWS, 0)


def utc(at: float) -> str:
    """Return a time in UTC, to the second."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


# The check of a report: none, or a level of `dist_ckpt.verify`.
Check = Literal["none", "quick", "full"]
CHECKS: tuple[Check, ...] = ("none", "quick", "full")


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of a check, or `why` there is none: it was not requested, or it failed."""

    report: VerifyReport | None = None
    why: str = ""
    has_failed: bool = False

    @property
    def result(self) -> str:
        """The result: "ok", "damaged" or "not checked"."""
        if self.report is None:
            return "not checked"
        return "ok" if self.report.ok else "damaged"

    @property
    def problems(self) -> tuple[Problem, ...]:
        """The problems that the check has found."""
        return () if self.report is None else self.report.problems

    def to_json(self) -> dict[str, Json]:
        """Return the JSON for a report, with the first problems."""
        notes = () if self.report is None else self.report.notes
        return {
            "result": self.result,
            "level": None if self.report is None else self.report.level,
            "why": bounded(self.why),
            "has_failed": self.has_failed,
            "problems": first_of(map(_problem, self.problems))[0],
            "num_problems": len(self.problems),
            "notes": first_of(map(bounded, notes))[0],
            "nbytes_checked": 0 if self.report is None else self.report.nbytes_checked,
        }


def check_damage(path: str, check: Check, progress: Progress | None) -> CheckResult:
    """Check a checkpoint for damage, unless `check` is "none"."""
    if check == "none":
        return CheckResult(why="no check was requested")
    level: Level = check
    try:
        return CheckResult(verify(path, level=level, progress=progress, opener=OPENER))
    except CheckpointError as error:
        return CheckResult(why=str(error), has_failed=True)


def _problem(problem: Problem) -> Json:
    rows = problem.rows
    return {
        "file": bounded(problem.file),
        "rank": problem.rank,
        "tensor": None if problem.tensor is None else bounded(problem.tensor),
        "rows": None if rows is None else [rows.start, rows.stop],
        "what": bounded(problem.what),
    }


# A page with this many boxes is drawn in a moment.
MAX_NODES = 1000
# The most boxes in a box; the smallest of more share one.
MAX_CHILDREN = 80
# The parts of a name that are deeper than this share one box.
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
    """Return the boxes of a treemap, the root first; each has the index of its parent.

    Large boxes are opened first, until there are `MAX_NODES`. A box that is not opened contains all
    below it. If a box has too many inner boxes, the smallest share one, with `is_rest`. `dtype` and
    `component` are those of most of its bytes. Tied names are left out.
    """
    root = _tree(tensors)
    rows: list[Json] = [_row(root, None, is_rest=False)]
    # By size, then by the order of insertion.
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
    """Yield the inner boxes, the largest first. A box with one inner box is joined with it."""
    children = sorted(node.children.values(), key=lambda child: (-child.nbytes, child.name))
    # A box for the rest has two inner boxes at least.
    most = MAX_CHILDREN if len(children) > MAX_CHILDREN + 1 else len(children)
    for child in children[:most]:
        yield _joined(child), False
    if rest := children[most:]:
        yield _together(rest), True


def _joined(node: _SizeNode) -> _SizeNode:
    names = [node.name]
    while len(node.children) == 1:
        (inner,) = node.children.values()
        if inner.num_tensors != node.num_tensors:  # the box is also a tensor
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


# A screen has no more columns. If there are more ranks, a column shows the largest of several.
MAX_COLUMNS = 1024
# The most components, by size; the others share a row.
MAX_RANK_ROWS = 24

VALUES = "values and attached files"


def rank_sizes(index: Index) -> dict[str, Json]:
    """Return the bytes of files by component and rank, and how even they are.

    `imbalance` is the most bytes of a rank, divided by the mean of all ranks: 1.0 is even. It is
    None if nothing is stored.
    """
    by_component = _bytes_by_rank(index)
    world_size = index.catalog.world_size
    totals = [0] * world_size
    for sizes in by_component.values():
        for rank, nbytes in sizes.items():
            totals[rank] += nbytes
    width = -(-world_size // MAX_COLUMNS)
    rows: list[Json] = [
        _rank_row(name, sizes, world_size, width) for name, sizes in _largest_rows(by_component)
    ]
    mean = sum(totals) / world_size
    most = max(range(world_size), key=totals.__getitem__)
    return {
        "components": rows,
        "ranks_per_column": width,
        "totals": [*_columns(dict(enumerate(totals)), world_size, width)],
        "mean_nbytes": mean,
        "most_nbytes": totals[most],
        "most_rank": most,
        "least_nbytes": min(totals),
        "num_idle_ranks": sum(not nbytes for nbytes in totals),
        "imbalance": totals[most] / mean if mean else None,
    }


_Sizes = dict[int, int]


def _bytes_by_rank(index: Index) -> dict[str, _Sizes]:
    sizes: dict[str, _Sizes] = defaultdict(lambda: defaultdict(int))
    for file in index.files:
        sizes[index.catalog.components[file.component].name][file.rank] += file.nbytes
    for record in index.objects:
        sizes[VALUES][filenames.parse_objects_file(record.name) or 0] += record.nbytes
    for attached in index.attached:
        sizes[VALUES][0] += attached.nbytes
    return sizes


def _largest_rows(by_component: dict[str, _Sizes]) -> list[tuple[str, _Sizes]]:
    ordered = sorted(by_component.items(), key=lambda item: (-sum(item[1].values()), item[0]))
    shown, rest = ordered[:MAX_RANK_ROWS], ordered[MAX_RANK_ROWS:]
    if rest:
        together: _Sizes = defaultdict(int)
        for _, sizes in rest:
            for rank, nbytes in sizes.items():
                together[rank] += nbytes
        shown.append((f"{len(rest)} more", together))
    return shown


def _rank_row(name: str, sizes: _Sizes, world_size: int, width: int) -> dict[str, Json]:
    most = max(sizes, key=lambda rank: (sizes[rank], -rank))
    return {
        "name": bounded(name),
        "nbytes": sum(sizes.values()),
        "num_ranks": len(sizes),
        "most_nbytes": sizes[most],
        "most_rank": most,
        "mean_nbytes": sum(sizes.values()) / world_size,
        "by_column": [*_columns(sizes, world_size, width)],
    }


def _columns(sizes: _Sizes, world_size: int, width: int) -> list[int]:
    """Return the most bytes of a rank in each column."""
    columns = [0] * -(-world_size // width)
    for rank, nbytes in sizes.items():
        columns[rank // width] = max(columns[rank // width], nbytes)
    return columns


# The number of largest tensors in a report.
NUM_LARGEST = 25
# The most components in a table and a chart of dtypes.
MAX_COMPONENTS = 40


def checkpoint_facts(
    path: str, info: RunCheckpoint | None, check: Check, progress: Progress | None
) -> dict[str, Json]:
    """Return the facts of the checkpoint at `path`, with those of the run in `info`.

    If it is too damaged to be opened, `unreadable` is the reason, and most facts are missing.
    NotFoundError if it does not exist.
    """
    try:
        with checkpoint.open(path, opener=OPENER) as ck:
            facts = _facts_of(ck)
            has_digests = ck.index.has_digests
    except CorruptError as error:
        return {
            "about": "checkpoint",
            "unreadable": bounded(str(error)),
            **_run_facts(info),
            "verification": check_damage(path, check, progress).to_json(),
        }
    verification = (
        check_damage(path, check, progress)
        if has_digests
        else CheckResult(why="files of another system have no checksums")
    )
    return {
        "about": "checkpoint",
        "unreadable": None,
        **facts,
        **_run_facts(info),
        "verification": verification.to_json(),
    }


def _run_facts(info: RunCheckpoint | None) -> dict[str, Json]:
    """Return the facts from annotations; they are empty for a checkpoint outside a run."""
    metrics = [] if info is None else sorted(info.metrics.items())
    notes = [] if info is None else [*info.protected_by, *["orphaned"] * info.is_orphaned]
    return {
        "metrics": [[bounded(name), as_json(value)] for name, value in metrics],
        "notes": [bounded(text) for text in notes],
    }


def _facts_of(ck: Checkpoint) -> dict[str, Json]:
    summary = summarize(ck)
    tensors = {fqn: info for fqn, info in ck.tensors.items() if info.alias_of is None}
    return {
        "step": summary.step,
        "kind": summary.kind,
        "attempt": summary.attempt,
        "saved_at": summary.saved_at,
        "saved_by": [[bounded(name), bounded(text)] for name, text in summary.saved_by.items()],
        "world_size": summary.world_size,
        "mesh": [[bounded(name), size] for name, size in summary.mesh],
        "nbytes": summary.nbytes,
        "tensor_nbytes": sum(summary.nbytes_by_component.values()),
        "num_files": summary.num_files,
        "num_tensors": summary.num_tensors,
        "num_tied": summary.num_aliases,
        "num_values": summary.num_values,
        # None if they cannot be read: the verification reports the damage.
        "num_parameters": summary.num_parameters,
        "num_trainable": summary.num_trainable,
        "tree": sizes_tree(ck.tensors),
        **_by_component(tensors),
        "largest": [*map(_tensor, _largest(tensors))],
        "ranks": rank_sizes(ck.index),
        **_saved_values(summary),
    }


def _largest(tensors: Mapping[str, TensorInfo]) -> list[tuple[str, TensorInfo]]:
    largest = nlargest(NUM_LARGEST, tensors.items(), key=lambda item: (item[1].nbytes, item[0]))
    return sorted(largest, key=lambda item: (-item[1].nbytes, item[0]))


def _tensor(item: tuple[str, TensorInfo]) -> Json:
    fqn, info = item
    return {
        "name": bounded(fqn),
        "dtype": info.dtype,
        "shape": list(info.shape),
        "nbytes": info.nbytes,
        "num_shards": info.num_shards,
    }


def _by_component(tensors: Mapping[str, TensorInfo]) -> dict[str, Json]:
    sizes: dict[str, Counter[str]] = defaultdict(Counter)
    nums: Counter[str] = Counter()
    dtypes: Counter[str] = Counter()
    num_of_dtypes: Counter[str] = Counter()
    for info in tensors.values():
        sizes[info.component][info.dtype] += info.nbytes
        nums[info.component] += 1
        dtypes[info.dtype] += info.nbytes
        num_of_dtypes[info.dtype] += 1
    ordered = sorted(sizes, key=lambda name: (-sizes[name].total(), name))
    return {
        "components": [
            {
                "name": bounded(name),
                "nbytes": sizes[name].total(),
                "num_tensors": nums[name],
                "dtypes": dict(sizes[name]),
            }
            for name in ordered[:MAX_COMPONENTS]
        ],
        "num_more_components": max(len(ordered) - MAX_COMPONENTS, 0),
        "dtypes": [
            {"name": name, "nbytes": nbytes, "num_tensors": num_of_dtypes[name]}
            for name, nbytes in dtypes.most_common()
        ],
    }


def _saved_values(summary: CheckpointSummary) -> dict[str, Json]:
    """Return the attached files, the configuration and the metadata."""
    problem = summary.config_problem
    config, num_more_config = named_values(summary.config or {})
    users = {name: value for name, value in summary.metadata.items() if name not in (CONFIG, KIND)}
    metadata, num_more_metadata = named_values(users)
    per_rank, num_more_per_rank = first_of(
        [bounded(fqn), num] for fqn, num in summary.per_rank.items()
    )
    return {
        "attached": [[bounded(name), nbytes] for name, nbytes in summary.attached.items()],
        "config": config,
        "config_problem": None if problem is None else bounded(problem),
        "num_more_config": num_more_config,
        "metadata": metadata,
        "num_more_metadata": num_more_metadata,
        "per_rank": per_rank,
        "num_more_per_rank": num_more_per_rank,
    }
