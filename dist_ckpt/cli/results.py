"""The documents that `--json` prints, as types. `dist-ckpt schema NAME` prints their JSON Schema.

The tag of a type is the field `schema` of its document: a name and a version. Increment the version
when a field changes its meaning or disappears. An object has exactly these fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from dist_ckpt.core.checkpoint.verify_checkpoint import Level
from dist_ckpt.core.commit.attempts import AttemptState
from dist_ckpt.core.format.run_records import Outcome

# JSON has no nan and no infinities: they are written as text.
Number: TypeAlias = float | Literal["nan", "inf", "-inf"]
Texts: TypeAlias = tuple[str, ...]
Sizes: TypeAlias = Mapping[str, int]

_Type = TypeVar("_Type")
_Object = TypeVar("_Object", bound="JsonObject")


class JsonObject(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """An object in a document."""


class JsonDocument(JsonObject, tag_field="schema", tag="", frozen=True):
    """A whole document."""


def convert(value: object, type_: type[_Type]) -> _Type:
    """Return a document or a part of it. Its fields are attributes or keys of `value`."""
    return msgspec.convert(value, type_, from_attributes=True)


def extend(value: object, type_: type[_Object], **more: object) -> _Object:
    """Return a document or a part of it. Its fields are in `more`, or attributes of `value`."""
    names = (name for name in type_.__struct_fields__ if name not in more)
    return convert({**{name: getattr(value, name) for name in names}, **more}, type_)


class RunRow(JsonObject, frozen=True):
    """A checkpoint of a run. Without an index that can be read, many fields are null."""

    name: str
    state: AttemptState
    step: int | None
    nbytes: int | None
    saved_at: float | None
    metrics: Mapping[str, Number]
    is_orphaned: bool


class AnnotatedRow(RunRow, frozen=True):
    """A checkpoint of a run, with its annotations."""

    world_size: int | None
    num_tensors: int | None
    tags: Texts
    protected_by: Texts
    is_verified: bool
    is_being_replaced: bool


class ListedRow(AnnotatedRow, frozen=True):
    """A checkpoint in a listing."""

    path: str
    metadata: Mapping[str, Any] | None
    problem: str | None
    damage: str | None
    attempt: str | None
    save_id: str | None
    pin: str | None
    leases: Texts


class LsResult(JsonDocument, tag="dist-ckpt.ls/2", frozen=True):
    """The checkpoints in a folder, and the folders of runs in it."""

    path: str
    checkpoints: tuple[ListedRow, ...]
    runs: Texts


class ShownCheckpoint(JsonObject, frozen=True):
    """A summary of a checkpoint. If the configuration cannot be read, `config` is the reason.

    `damage` is what a check or a load has found and recorded in the run, or null.
    """

    path: str
    damage: str | None
    step: int | None
    kind: str | None
    config: Any
    attempt: str
    saved_at: float
    saved_by: Mapping[str, str]
    world_size: int
    mesh: Sizes
    nbytes: int
    num_tensors: int
    num_aliases: int
    num_parameters: int | None
    num_trainable: int | None
    num_values: int
    attached: Sizes
    num_files: int
    nbytes_by_component: Sizes
    nbytes_by_dtype: Sizes
    per_rank: Sizes
    replicas: Mapping[str, str]
    metadata: Mapping[str, Any]


class ShowResult(ShownCheckpoint, tag_field="schema", tag="dist-ckpt.show/2", frozen=True):
    """A summary of one checkpoint."""


class ShowAllResult(JsonDocument, tag="dist-ckpt.show-all/2", frozen=True):
    """Summaries of several checkpoints."""

    checkpoints: tuple[ShownCheckpoint, ...]


class TreeNode(JsonObject, frozen=True):
    """A name in a checkpoint: a tensor with its dtype and shape, or a group of tensors."""

    name: str
    nbytes: int
    tensor: str | None


class TreeResult(JsonDocument, tag="dist-ckpt.tree/2", frozen=True):
    """The names in a checkpoint, up to a depth."""

    path: str
    depth: int
    nodes: tuple[TreeNode, ...]


class LargeTensor(JsonObject, frozen=True):
    """A tensor in a list of the largest tensors."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    num_shards: int


class TensorRow(LargeTensor, frozen=True):
    """A tensor. `alias_of` is the name of the tensor that it is tied to.

    `pieces` are the sizes of the matrices in a fused tensor, along dimension `fused_dim`.
    """

    component: str
    alias_of: str | None
    fused_dim: int | None
    pieces: tuple[int, ...]


class TensorsResult(JsonDocument, tag="dist-ckpt.tensors/2", frozen=True):
    """The tensors in a checkpoint."""

    path: str
    tensors: tuple[TensorRow, ...]


class StatsRow(JsonObject, frozen=True):
    """Statistics of a tensor. `min`, `max`, `mean` and `rms` describe its finite values."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    numel: int
    min: Number | None
    max: Number | None
    mean: Number | None
    rms: Number | None
    zeros: int | None
    nan: int | None
    inf: int | None
    alias_of: str | None


class StatsResult(JsonDocument, tag="dist-ckpt.stats/2", frozen=True):
    """Statistics of all tensors. `ok` is false if one has a nan or an infinity."""

    path: str
    ok: bool
    tensors: tuple[StatsRow, ...]


class ShardRow(JsonObject, frozen=True):
    """A shard of a tensor: a box at an offset, or elements from `start` to `stop`."""

    tensor: str
    nbytes: int
    offset: tuple[int, ...] | UnsetType = UNSET
    shape: tuple[int, ...] | UnsetType = UNSET
    start: int | UnsetType = UNSET
    stop: int | UnsetType = UNSET


class FileRow(JsonObject, frozen=True):
    """A shard file, with the selected shards."""

    name: str
    rank: int
    component: str
    nbytes: int
    num_shards: int
    shards: tuple[ShardRow, ...]


class LayoutResult(JsonDocument, tag="dist-ckpt.layout/2", frozen=True):
    """The files and ranks that store a checkpoint."""

    path: str
    nbytes_by_rank: tuple[int, ...]
    imbalance: float
    files: tuple[FileRow, ...]


class Rows(msgspec.Struct, array_like=True, frozen=True):
    """Rows of a tensor, from `start` up to `stop`."""

    start: int
    stop: int


class ProblemRow(JsonObject, frozen=True):
    """A defect, and the file, rank, tensor and rows that it affects.

    With `is_unread` the storage could not read them, so they may be whole.
    """

    file: str
    rank: int | None
    tensor: str | None
    rows: Rows | None
    what: str
    is_unread: bool


class VerifiedCheckpoint(JsonObject, frozen=True):
    """The result of a check."""

    path: str
    level: Level
    ok: bool
    num_files: int
    nbytes_checked: int
    problems: tuple[ProblemRow, ...]
    notes: Texts


class VerifyResult(VerifiedCheckpoint, tag_field="schema", tag="dist-ckpt.verify/2", frozen=True):
    """The check of one checkpoint."""


class SkippedCheckpoint(JsonObject, frozen=True):
    """A checkpoint that was not checked."""

    path: str
    why: str


class VerifyAllResult(JsonDocument, tag="dist-ckpt.verify-all/2", frozen=True):
    """The checks of all checkpoints of a run."""

    path: str
    ok: bool
    checkpoints: tuple[VerifiedCheckpoint, ...]
    not_checked: tuple[SkippedCheckpoint, ...]


class ComparedRun(JsonObject, frozen=True):
    """A run in a comparison. `config` and the counts are those of its newest checkpoint."""

    name: str
    path: str
    num_checkpoints: int
    newest: str | None
    step: int | None
    kind: str | None
    num_parameters: int | None
    num_trainable: int | None
    config: Any
    best: Number | None
    best_step: int | None
    best_path: str | None
    metrics: Mapping[str, Number]
    problems: Texts


class CompareResult(JsonDocument, tag="dist-ckpt.compare/2", frozen=True):
    """Several runs. `differing` has the configuration values that differ, by name and by run."""

    metric: str | None
    runs: tuple[ComparedRun, ...]
    differing: Mapping[str, Mapping[str, str]]


class Pair(JsonObject, frozen=True):
    """The values of both checkpoints."""

    a: str
    b: str


class TensorDifference(JsonObject, frozen=True):
    """A tensor whose values differ. `max_difference` is null where nan or infinities differ."""

    name: str
    num_differing: int
    numel: int
    max_difference: float | None


class DiffResult(JsonDocument, tag="dist-ckpt.diff/2", frozen=True):
    """The differences of two checkpoints."""

    same: bool
    a: str
    b: str
    config: Mapping[str, Pair]
    removed: Texts
    added: Texts
    changed: Mapping[str, Pair]
    objects: Mapping[str, Pair] | None
    num_tensors: int
    values: tuple[TensorDifference, ...] | None
    digests: Texts | None
    not_compared: Texts


class EstimateResult(JsonDocument, tag="dist-ckpt.estimate/2", frozen=True):
    """The space and time that the checkpoints of a job need."""

    path: str
    folder: str
    world_size: int
    nbytes: int
    nbytes_rank: int
    num_files: int
    num_saves: int
    num_kept: int
    num_at_once: int
    nbytes_free: int
    nbytes_peak: int
    rate: float | None
    save_s: float | None
    fits: bool


class PruneRow(JsonObject, frozen=True):
    """A checkpoint, and the reasons why it stays. Without a reason it is removed."""

    name: str
    path: str
    step: int | None
    kept_by: Texts


class PruneResult(JsonDocument, tag="dist-ckpt.prune/2", frozen=True):
    """The checkpoints of a run that stay, and those that are removed."""

    root: str
    dry_run: bool
    checkpoints: tuple[PruneRow, ...]


class PinResult(JsonDocument, tag="dist-ckpt.pin/2", frozen=True):
    """A checkpoint that was pinned or unpinned."""

    path: str
    step: int
    why: str
    removed: bool
    dry_run: bool


class TagResult(JsonDocument, tag="dist-ckpt.tag/2", frozen=True):
    """A checkpoint that got or lost a tag."""

    path: str
    step: int
    name: str
    removed: bool
    dry_run: bool


class UpgradeResult(JsonDocument, tag="dist-ckpt.upgrade/2", frozen=True):
    """The converted records of a root. `alive` describes jobs that may use the root."""

    root: str
    dry_run: bool
    folders: Texts
    num_annotations: int
    num_incarnations: int
    alive: Texts


class GcResult(JsonDocument, tag="dist-ckpt.gc/2", frozen=True):
    """The paths that garbage collection removes."""

    path: str
    dry_run: bool
    removed: Texts


class WrittenCheckpoint(JsonDocument, frozen=True):
    """A checkpoint that was written."""

    path: str
    step: int | None
    attempt: str
    nbytes: int
    num_tensors: int
    num_files: int
    num_linked: int
    nbytes_linked: int
    seconds: Mapping[str, float]


class ReshardResult(WrittenCheckpoint, tag="dist-ckpt.reshard/2", frozen=True):
    """A checkpoint that was written for another layout."""


class CpResult(WrittenCheckpoint, tag="dist-ckpt.cp/2", frozen=True):
    """A checkpoint that was copied."""


class AverageResult(WrittenCheckpoint, tag="dist-ckpt.average/2", frozen=True):
    """An average of checkpoints."""


class ImportResult(WrittenCheckpoint, tag="dist-ckpt.import/2", frozen=True):
    """A checkpoint that was made from files of another system.

    `num_unchecked` tensors had no checksum in these files.
    """

    num_unchecked: int


class PlannedFile(JsonObject, frozen=True):
    """A file that would be written or linked."""

    name: str
    nbytes: int


class DryRunResult(JsonDocument, tag="dist-ckpt.dry-run/2", frozen=True):
    """The effects that a command would have."""

    path: str
    nbytes: int
    files: tuple[PlannedFile, ...]
    replaces: Texts
    reads: Texts


class BackupResult(JsonDocument, tag="dist-ckpt.backup/2", frozen=True):
    """The path of a backup."""

    path: str


class ExportResult(JsonDocument, tag="dist-ckpt.export/2", frozen=True):
    """Files for another system."""

    path: str
    format: str
    nbytes: int


class StripResult(JsonDocument, tag="dist-ckpt.strip/2", frozen=True):
    """The remaining tensors of a checkpoint. `num_linked` is null for a dry run."""

    path: str
    num_tensors: int
    nbytes: int
    num_linked: int | None
    dry_run: bool


class RmResult(JsonDocument, tag="dist-ckpt.rm/2", frozen=True):
    """A checkpoint that is deleted."""

    path: str
    dry_run: bool


class WatchedRow(RunRow, frozen=True):
    """A checkpoint of a run. `nbytes_written` is set while it is being written."""

    nbytes_written: int | None
    kept_by: Texts


class WatchResult(JsonDocument, tag="dist-ckpt.watch/2", frozen=True):
    """A run at one time, and the changes since the last document."""

    root: str
    problem: str
    at: float
    changes: Texts
    incarnation: int | None
    step: int | None
    last_liveness: float | None
    checkpoints: tuple[WatchedRow, ...]


class RequestSaveResult(JsonDocument, tag="dist-ckpt.request-save/2", frozen=True):
    """A request to save, and its answer. `outcome` is null if there is no answer."""

    root: str
    why: str
    incarnation: int
    stops: bool
    wait: bool
    dry_run: bool
    outcome: Outcome | None
    step: int | None
    attempt: str | None
    last_liveness: float | None


def document_tag(document: type[JsonObject]) -> str:
    """Return the field `schema` of a document, such as dist-ckpt.ls/2."""
    return str(document.__struct_config__.tag)


def document_name(document: type[JsonObject]) -> str:
    """Return the name of a document, such as ls."""
    return document_tag(document).removeprefix("dist-ckpt.").partition("/")[0]
