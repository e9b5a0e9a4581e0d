"""What a report says of one checkpoint, as JSON."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from heapq import nlargest

from dist_ckpt.core.checkpoint import checkpoint
from dist_ckpt.core.checkpoint.checkpoint import Checkpoint, TensorInfo
from dist_ckpt.core.format.index.index import Index
from dist_ckpt.core.format.index.model_description import CONFIG, KIND, as_json
from dist_ckpt.core.format.strict_json import Json
from dist_ckpt.errors import CheckpointError, CorruptError
from dist_ckpt.reports import Progress
from dist_ckpt.runs.listing import RunCheckpoint
from dist_ckpt.tools.report.damage import Check, CheckResult, checked
from dist_ckpt.tools.report.rank_sizes import rank_sizes
from dist_ckpt.tools.report.sizes_tree import sizes_tree
from dist_ckpt.tools.report.texts import bounded, first_of, named_values

# Of the tensors so many are listed.
NUM_LARGEST = 25
# So many components are told apart in a table and a chart of dtypes.
MAX_COMPONENTS = 40


def checkpoint_facts(
    path: str, known: RunCheckpoint | None, check: Check, progress: Progress | None
) -> dict[str, Json]:
    """Return what there is to say of the checkpoint at `path`; `known` is what a run knows of it.

    One that is damaged so far that it cannot be opened has `unreadable`, which says why, and no
    more than the result of the check. NotFoundError if there is none.
    """
    try:
        with checkpoint.open(path) as ck:
            facts = _facts_of(ck)
            has_digests = ck.index.has_digests
    except CorruptError as error:
        return {
            "about": "checkpoint",
            "unreadable": bounded(str(error)),
            **_known(known),
            "verification": checked(path, check, progress).to_json(),
        }
    verification = (
        checked(path, check, progress)
        if has_digests
        else CheckResult(why="it is files of another system, which have no checksums")
    )
    return {
        "about": "checkpoint",
        "unreadable": None,
        **facts,
        **_known(known),
        "verification": verification.to_json(),
    }


def _known(one: RunCheckpoint | None) -> dict[str, Json]:
    """Return what became known of it since: nothing of one that is not in a run."""
    metrics = [] if one is None else sorted(one.metrics.items())
    told = [] if one is None else [*one.protected_by, *["orphaned"] * one.is_orphaned]
    return {
        "metrics": [[bounded(name), as_json(value)] for name, value in metrics],
        "notes": [bounded(text) for text in told],
    }


def _facts_of(ck: Checkpoint) -> dict[str, Json]:
    index = ck.index
    own = {fqn: info for fqn, info in ck.tensors.items() if info.alias_of is None}
    return {
        "step": ck.step,
        "kind": ck.kind,
        "attempt": index.attempt,
        "saved_at": index.saved_at,
        "saved_by": [[bounded(name), bounded(text)] for name, text in index.saved_by.items()],
        "world_size": ck.world_size,
        "mesh": [[bounded(name), size] for name, size in index.catalog.mesh],
        "nbytes": ck.nbytes,
        "tensor_nbytes": sum(info.nbytes for info in own.values()),
        "num_files": index.num_files,
        "num_tensors": len(own),
        "num_tied": len(ck.tensors) - len(own),
        "num_values": len(index.catalog.values),
        **_parameters(ck),
        "tree": sizes_tree(ck.tensors),
        **_by_component(own),
        "largest": [*map(_tensor, _largest(own))],
        "ranks": rank_sizes(index),
        **_given(ck, index),
    }


def _parameters(ck: Checkpoint) -> dict[str, Json]:
    try:
        return {"num_parameters": ck.num_parameters, "num_trainable": ck.num_trainable}
    except CheckpointError:  # the verification reports the damage
        return {"num_parameters": None, "num_trainable": None}


def _largest(own: Mapping[str, TensorInfo]) -> list[tuple[str, TensorInfo]]:
    found = nlargest(NUM_LARGEST, own.items(), key=lambda one: (one[1].nbytes, one[0]))
    return sorted(found, key=lambda one: (-one[1].nbytes, one[0]))


def _tensor(one: tuple[str, TensorInfo]) -> Json:
    fqn, info = one
    return {
        "name": bounded(fqn),
        "dtype": info.dtype,
        "shape": list(info.shape),
        "nbytes": info.nbytes,
        "num_shards": info.num_shards,
    }


def _by_component(own: Mapping[str, TensorInfo]) -> dict[str, Json]:
    found: dict[str, Counter[str]] = defaultdict(Counter)
    nums: Counter[str] = Counter()
    dtypes: Counter[str] = Counter()
    num_of_dtypes: Counter[str] = Counter()
    for info in own.values():
        found[info.component][info.dtype] += info.nbytes
        nums[info.component] += 1
        dtypes[info.dtype] += info.nbytes
        num_of_dtypes[info.dtype] += 1
    ordered = sorted(found, key=lambda name: (-found[name].total(), name))
    return {
        "components": [
            {
                "name": bounded(name),
                "nbytes": found[name].total(),
                "num_tensors": nums[name],
                "dtypes": dict(found[name]),
            }
            for name in ordered[:MAX_COMPONENTS]
        ],
        "num_more_components": max(len(ordered) - MAX_COMPONENTS, 0),
        "dtypes": [
            {"name": name, "nbytes": nbytes, "num_tensors": num_of_dtypes[name]}
            for name, nbytes in dtypes.most_common()
        ],
    }


def _given(ck: Checkpoint, index: Index) -> dict[str, Json]:
    """Return what was given to the save besides tensors: files, configuration, metadata."""
    try:
        config, num_more_config = named_values(ck.config or {})
        config_problem = None
    except CheckpointError as error:
        config, num_more_config, config_problem = [], 0, bounded(str(error))
    own = {name: of for name, of in index.metadata.items() if name not in (CONFIG, KIND)}
    metadata, num_more_metadata = named_values(own)
    per_rank, num_more_per_rank = first_of(
        [bounded(fqn), len(keys)] for fqn, keys in index.catalog.per_rank.items()
    )
    return {
        "attached": [[bounded(name), nbytes] for name, nbytes in ck.attached.items()],
        "config": config,
        "config_problem": config_problem,
        "num_more_config": num_more_config,
        "metadata": metadata,
        "num_more_metadata": num_more_metadata,
        "per_rank": per_rank,
        "num_more_per_rank": num_more_per_rank,
    }
