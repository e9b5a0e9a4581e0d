"""A summary of one checkpoint, for `dist-ckpt show` and for reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from dist_ckpt.core.checkpoint.checkpoint import Checkpoint
from dist_ckpt.core.format.strict_json import Json
from dist_ckpt.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """The contents of a checkpoint in numbers. Tied names count once, except in `num_aliases`.

    `mesh` lists axes; their names may be empty. `num_parameters` and `num_trainable` are None if
    they are not known or cannot be read. `config_problem` says why `config` cannot be read.
    """

    path: str
    step: int | None
    kind: str | None
    attempt: str
    saved_at: float
    saved_by: Mapping[str, str]
    world_size: int
    mesh: tuple[tuple[str, int], ...]
    nbytes: int
    num_files: int
    num_tensors: int
    num_aliases: int
    num_values: int
    num_parameters: int | None
    num_trainable: int | None
    nbytes_by_component: Mapping[str, int]
    nbytes_by_dtype: Mapping[str, int]
    per_rank: Mapping[str, int]
    attached: Mapping[str, int]
    metadata: Mapping[str, Json]
    config: Mapping[str, object] | None
    config_problem: str | None


def summarize(ck: Checkpoint) -> CheckpointSummary:
    """Return the summary of an open checkpoint."""
    index, catalog = ck.index, ck.index.catalog
    tensors = [info for info in ck.tensors.values() if info.alias_of is None]
    components: Counter[str] = Counter()
    dtypes: Counter[str] = Counter()
    for info in tensors:
        components[info.component] += info.nbytes
        dtypes[info.dtype] += info.nbytes
    num_parameters, num_trainable = _parameter_counts(ck)
    config, config_problem = _config(ck)
    return CheckpointSummary(
        path=ck.path,
        step=ck.step,
        kind=ck.kind,
        attempt=index.attempt,
        saved_at=index.saved_at,
        saved_by=dict(index.saved_by),
        world_size=ck.world_size,
        mesh=tuple(catalog.mesh),
        nbytes=ck.nbytes,
        num_files=index.num_files,
        num_tensors=len(tensors),
        num_aliases=len(ck.tensors) - len(tensors),
        num_values=len(catalog.values),
        num_parameters=num_parameters,
        num_trainable=num_trainable,
        nbytes_by_component=dict(components),
        nbytes_by_dtype=dict(dtypes),
        per_rank={fqn: len(keys) for fqn, keys in catalog.per_rank.items()},
        attached=dict(ck.attached),
        metadata=dict(index.metadata),
        config=config,
        config_problem=config_problem,
    )


def _parameter_counts(ck: Checkpoint) -> tuple[int | None, int | None]:
    try:
        return ck.num_parameters, ck.num_trainable
    except CheckpointError:
        return None, None


def _config(ck: Checkpoint) -> tuple[Mapping[str, object] | None, str | None]:
    try:
        return ck.config, None
    except CheckpointError as error:
        return None, str(error)
