"""The documents of `dist-ckpt report --json`, as types: a checkpoint, a damaged one, a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from dist_ckpt.cli.results import (
    AnnotatedRow,
    JsonDocument,
    JsonObject,
    LargeTensor,
    Number,
    ProblemRow,
    Sizes,
    Texts,
)
from dist_ckpt.core.checkpoint.verify_checkpoint import Level
from dist_ckpt.tools.report.report_content import Check

# JSON objects have no order. Where the order matters, there are pairs.
TextPairs: TypeAlias = tuple[tuple[str, str], ...]
SizePairs: TypeAlias = tuple[tuple[str, int], ...]


class Verification(JsonObject, frozen=True):
    """The check of a checkpoint. `why` is the reason if it was not checked."""

    result: Literal["ok", "damaged", "not checked"]
    level: Level | None
    why: str
    has_failed: bool
    problems: tuple[ProblemRow, ...]
    num_problems: int
    notes: Texts
    nbytes_checked: int


class DtypeSizes(JsonObject, frozen=True):
    """The bytes of the tensors of a dtype."""

    name: str
    nbytes: int
    num_tensors: int


class ComponentSizes(DtypeSizes, frozen=True):
    """The bytes of a component, also by dtype."""

    dtypes: Sizes


class TreemapBox(DtypeSizes, frozen=True):
    """A box of the treemap. `parent` is a position in the list."""

    dtype: str
    component: str
    parent: int | None
    is_rest: bool


class RankRow(JsonObject, frozen=True):
    """The bytes of a component by rank."""

    name: str
    by_column: tuple[int, ...]
    mean_nbytes: float
    nbytes: int
    num_ranks: int
    most_nbytes: int
    most_rank: int


class RankSizes(JsonObject, frozen=True):
    """The bytes of each rank. A column shows `ranks_per_column` ranks."""

    components: tuple[RankRow, ...]
    totals: tuple[int, ...]
    mean_nbytes: float
    imbalance: float | None
    ranks_per_column: int
    most_nbytes: int
    most_rank: int
    least_nbytes: int
    num_idle_ranks: int


class ReportResult(JsonDocument, tag="dist-ckpt.report/2", frozen=True):
    """The fields of all reports."""

    path: str
    made_at: float
    made_by: str


class DamagedReport(ReportResult, frozen=True):
    """A checkpoint that cannot be opened. `unreadable` is the reason."""

    about: Literal["checkpoint"]
    unreadable: str | None
    metrics: tuple[tuple[str, Number], ...]
    notes: Texts
    verification: Verification


class CheckpointReport(DamagedReport, frozen=True):
    """A checkpoint. `unreadable` is null."""

    attempt: str
    kind: str | None
    saved_at: float
    config_problem: str | None
    step: int | None
    num_parameters: int | None
    num_trainable: int | None
    world_size: int
    nbytes: int
    tensor_nbytes: int
    num_files: int
    num_tensors: int
    num_tied: int
    num_values: int
    num_more_components: int
    num_more_config: int
    num_more_metadata: int
    num_more_per_rank: int
    num_more_replicas: int
    saved_by: TextPairs
    config: TextPairs
    metadata: TextPairs
    mesh: SizePairs
    attached: SizePairs
    per_rank: SizePairs
    replicas: TextPairs
    tree: tuple[TreemapBox, ...]
    components: tuple[ComponentSizes, ...]
    dtypes: tuple[DtypeSizes, ...]
    largest: tuple[LargeTensor, ...]
    ranks: RankSizes


class ReportedRow(AnnotatedRow, frozen=True):
    """A checkpoint of a run, with its check and the times of its save."""

    problem: str
    result: Literal["ok", "damaged", "not checked"]
    why: str
    slowest_rank: int | None
    stalled_s: float | None
    slowest_s: float | None
    is_pinned: bool
    is_leased: bool
    has_failed: bool
    num_problems: int
    seconds: Mapping[str, float]


class IncarnationRow(JsonObject, frozen=True):
    """An incarnation of a run."""

    number: int
    at: float
    by: str
    restored_step: int | None
    why: str


class MetricValue(JsonObject, frozen=True):
    """A value of a metric, and its step."""

    value: Number
    step: int


class MetricRow(JsonObject, frozen=True):
    """The values of a metric."""

    name: str
    num_values: int
    newest: MetricValue | None
    lowest: MetricValue | None
    highest: MetricValue | None


class Stall(JsonObject, frozen=True):
    """The save that blocked training longest."""

    step: int
    seconds: float


class SlowRank(JsonObject, frozen=True):
    """A rank that was the slowest of some saves."""

    rank: int
    num_saves: int


class RunReport(ReportResult, frozen=True):
    """A run."""

    about: Literal["run"]
    check: Check
    num_checkpoints: int
    num_left_out: int
    nbytes: int
    num_damaged: int
    num_more_metrics: int
    num_timed: int
    checkpoints: tuple[ReportedRow, ...]
    incarnations: tuple[IncarnationRow, ...]
    metrics: tuple[MetricRow, ...]
    stalled_s: float | None
    longest_stall: Stall | None
    slowest_ranks: tuple[SlowRank, ...]
    history_problem: str
    problems: Texts
