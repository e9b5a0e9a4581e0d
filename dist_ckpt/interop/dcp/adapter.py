"""Use `torch.distributed.checkpoint` with this format: a storage writer and a storage reader.

    import torch.distributed.checkpoint as dcp
    from dist_ckpt.interop.dcp import StorageReader, StorageWriter

    dcp.save(state_dict, storage_writer=StorageWriter("runs/a/step-100", step=100))
    dcp.load(state_dict, storage_reader=StorageReader("runs/a@latest"))

The writer makes ordinary checkpoints of dist_ckpt. The reader also reads checkpoints of `dc.save`
whose names are those of the state dict. `load` reads a folder of `dcp.save` as `dc.load` would:

    load(state, "old/step-100")
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, Metadata, SavePlan, SavePlanner
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dist_ckpt.core.checkpoint.open_checkpoint import OpenCheckpoint
from dist_ckpt.core.comm.exchange.channel import COORDINATOR
from dist_ckpt.core.comm.process_group import session_of, single_process_session
from dist_ckpt.core.loading.load import load_together
from dist_ckpt.core.loading.load_options import LoadOptions, ReadOnce
from dist_ckpt.core.planning.name_selection import (
    SELECT_ALL,
    Cast,
    Resize,
    Selection,
    names_above,
    parse_selection,
)
from dist_ckpt.core.planning.sharding_config import ShardingConfig
from dist_ckpt.core.runtime.public_names import refuse_old_parameters
from dist_ckpt.core.saving.rank_save import StateReader
from dist_ckpt.core.saving.save import save_together
from dist_ckpt.core.saving.save_options import SaveOptions
from dist_ckpt.core.state.binding.sources.rename import Rename, RenameRules, parse_rename
from dist_ckpt.core.state.tensors.plain_torch import make_torch_value
from dist_ckpt.core.state.tree.containers import MutableState
from dist_ckpt.core.storage import Storage
from dist_ckpt.default_opener import OPENER
from dist_ckpt.errors import ConflictError, RankError
from dist_ckpt.interop.dcp.flat_state_dict import (
    DcpKeys,
    PlannedReads,
    read_local_state,
    set_under_live_keys,
)
from dist_ckpt.interop.imports import StrPath, open_pickled
from dist_ckpt.interop.readers.nested_state import ImportFilter
from dist_ckpt.message_text import format_size
from dist_ckpt.reports import LoadReport, Phases, SaveReport
from dist_ckpt.settings import launched_world_size

_log = logging.getLogger("dist_ckpt")


@refuse_old_parameters(frozen="include_frozen")
def load(
    state: MutableState,
    path: StrPath,
    *,
    sharding: ShardingConfig | None = None,
    group: dist.ProcessGroup | None = None,
    strict: bool = True,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    rename: RenameRules | None = None,
    include_frozen: bool = True,
    read_once: ReadOnce = "host",
    cast: Cast = None,
    dequantize: bool = False,
    resize: Resize | None = None,
) -> LoadReport:
    """Fill a state from a folder that `torch.distributed.checkpoint` wrote, as `dc.load` does.

    Collective: every rank of `group` calls this. Any layout loads into any other. Modules and
    optimizers have the names of `get_state_dict`. Pickles are read without unpickling: nothing is
    executed. Only sizes, names, shapes, dtypes and coverage are checked, before the state changes:
    a rank reads parts of what DCP's checksums cover. `imports.from_dcp` checks these. The options
    and errors are those of `dc.load`. IncompatibleError also if the state needs a value that is not
    plain data.
    """
    options = LoadOptions(
        sharding=sharding,
        strict=strict,
        include=include,
        exclude=exclude,
        rename=rename,
        include_frozen=include_frozen,
        read_once=read_once,
        cast=cast,
        dequantize=dequantize,
        resize=resize,
        record_check=False,
    )
    needed = ImportFilter(SELECT_ALL, RequiredValues(state, path, options))

    def open_folder(path: StrPath, *, direct_reads: bool = False) -> tuple[Storage, str]:
        del direct_reads
        return open_pickled("dcp", path, needed, checks_records=False)[0]

    opener = replace(OPENER, name="DCP", open=open_folder)
    return load_together(session_of(group), state, path, options, opener=opener)


@dataclass(frozen=True, slots=True)
class DcpLoadReport:
    """The result of a `dcp.load` with a `StorageReader` on this rank, without DCP's planning.

    `nbytes_read` bytes of tensors came from storage, `nbytes_received` from other ranks of this
    host. `seconds` has the phases. "open" resolves the path, and "check" opens the files and
    agrees. "read" reads, verifies and fills. "place" converts tensors, and passes values to the
    planner. `converted_keys` are the names of values that replaced those of the state under keys
    that are not text, such as integers. DCP itself would add them under text keys.
    """

    path: str
    attempt: str
    nbytes_read: int
    nbytes_received: int
    seconds: Mapping[str, float]
    converted_keys: tuple[str, ...] = ()

    @property
    def total_s(self) -> float:
        """The seconds of all phases."""
        return sum(self.seconds.values())

    def __str__(self) -> str:
        """Return one line for people and logs."""
        return (
            f"loaded {self.path} for DCP: {format_size(self.nbytes_read)} read and "
            f"{format_size(self.nbytes_received)} received here in {self.total_s:.3g} s"
        )


class StorageWriter(dcp.StorageWriter):
    """Writes the plan of a DCP planner as a checkpoint at `path`.

    Use it with `dcp.save`, and with `dcp.async_save` in a thread or a process. DCP plans, gathers
    and stages. The rest is `dc.save`: before `write_data` returns, all files are durable and
    checked, and one rename has committed the checkpoint. If `dcp.save` raises, the previous
    checkpoint is unchanged. `report` is the report of the last save.

    `step` and `metadata` are those of `dc.save`. `overwrite` replaces an existing checkpoint once
    the new one is durable; it is True by default, as in DCP. Pass the same `process_group` as to
    `dcp.save`. `checkpoint_id` of `dcp.save` overrides `path`.

    Values other than tensors must be plain data: others, which DCP would pickle, raise an error.
    """

    def __init__(
        self,
        path: StrPath | None = None,
        *,
        step: int | None = None,
        overwrite: bool = True,
        metadata: Mapping[str, object] | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.checkpoint_id = path
        self.report: SaveReport | None = None
        self._options = SaveOptions(step=step, overwrite=overwrite, metadata=metadata)
        self._group = process_group
        self._plans_together = self._is_alone = self._has_lost_group = False

    def reset(self, checkpoint_id: StrPath | None = None) -> None:
        """Begin another save, at `checkpoint_id` if it is not None."""
        if checkpoint_id is not None:
            self.checkpoint_id = checkpoint_id
        self.report = None
        self._is_alone = False

    # DCP passes `use_collectives` only to writers that have a parameter `is_coordinator`.
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001
        """Store if ranks plan together. ValueError without a path, TypeError for a lost group."""
        del is_coordinator, args
        if self._has_lost_group:
            raise TypeError(
                "a StorageWriter with a process_group cannot be sent to another process: save in "
                "a thread (AsyncCheckpointerType.THREAD), or with all ranks and no process_group"
            )
        self._plans_together = bool(kwargs.get("use_collectives", True))
        _check_path(self.checkpoint_id, "StorageWriter")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged: DCP reuses plans in later saves, also with other writers."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Check on the coordinator that the planning ranks are those of the group."""
        if not self._plans_together:
            return plans
        size = dist.get_world_size(self._group) if dist.is_initialized() else 1
        self._is_alone = len(plans) == 1 < size
        if not self._is_alone and len(plans) != size:
            raise ValueError(
                f"{len(plans)} ranks call dcp.save, but the group of the StorageWriter has {size}: "
                f"pass the same process_group= to both"
            )
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Save and commit, together with the other ranks. Raises the errors of `dc.save`."""
        session = single_process_session() if self._is_alone else session_of(self._group)
        results: list[WriteResult] = []

        def read() -> Any:
            local, sizes = read_local_state(plan, planner, session)
            results.extend(WriteResult(index, nbytes, None) for index, nbytes in sizes)
            return local

        path = _check_path(self.checkpoint_id, "StorageWriter")
        with _log_lost_rank():
            self.report = save_together(session, StateReader(read), path, self._options)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing: `write_data` has committed the checkpoint, which needs no DCP metadata."""

    def storage_meta(self) -> StorageMeta | None:
        """Return the path in DCP's form."""
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: StrPath) -> bool:
        """Return True if this can be a path."""
        return isinstance(checkpoint_id, str | os.PathLike)

    def __getstate__(self) -> dict[str, object]:
        """Return the attributes for DCP's save process, which makes its own group of all ranks."""
        # Not raised here but in that process: torch 2.7 loses an error here, and DCP waits forever.
        return {**self.__dict__, "_group": None, "_has_lost_group": self._group is not None}


class StorageReader(dcp.StorageReader):
    """Reads the parts of a checkpoint that a DCP planner requests, and checks every byte.

    `path` may be a selector of a run, such as "runs/a@latest". A planner can request any box of a
    tensor, whatever the layout. Other dtypes are converted, as in DCP. `checkpoint_id` of
    `dcp.load` overrides `path`. `report` is the report of the last load.

    Pass the same `process_group` as to `dcp.load`. Then the ranks of the group read together, as in
    `dc.load`. One rank of a host reads what several need, and the error of one is raised on all.
    Without a matching group each rank reads alone. Values per rank are those of the rank
    within this group.

    Raises NotFoundError if no checkpoint exists, CorruptError if it is damaged; DCP wraps them in a
    CheckpointException. Data is checked after it has been read into the targets. So after an error,
    tensors of the state may have changed, as with DCP's own reader.
    """

    def __init__(
        self, path: StrPath | None = None, *, process_group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__()
        self.checkpoint_id = path
        self.report: DcpLoadReport | None = None
        self._group = process_group
        self._opened: tuple[OpenCheckpoint, DcpKeys] | None = None
        self._phases = Phases("load", "", quiet=True)

    def reset(self, checkpoint_id: StrPath | None = None) -> None:
        """Begin another load, of `checkpoint_id` if it is not None."""
        if checkpoint_id is not None:
            self.checkpoint_id = checkpoint_id
        self._opened = None
        self.report = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Open the checkpoint and return its metadata, by DCP's keys."""
        del args, kwargs
        path = _check_path(self.checkpoint_id, "StorageReader")
        self._phases = Phases("load", os.fspath(path), quiet=_job_rank() != COORDINATOR)
        with self._phases.phase("open"):
            opened = OpenCheckpoint.open(path, opener=OPENER, make=make_torch_value)
            keys = DcpKeys(opened, self._rank)
            self._opened = opened, keys
            return keys.metadata(StorageMeta(checkpoint_id=self.checkpoint_id))

    def set_up_storage_reader(
        self,
        metadata: Metadata,
        is_coordinator: bool,  # noqa: FBT001
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Raise ValueError if values per rank exist and DCP has another number for this rank."""
        dcp_rank = kwargs.get("rank")
        # DCP passes 0 for a rank that loads alone (no_dist), and for the first rank of any group.
        if dcp_rank and dcp_rank != self._rank and self._source[1].per_rank:
            raise ValueError(
                f"dcp.load calls this rank {dcp_rank}, but in the group of the StorageReader it is "
                f"{self._rank}. {self.checkpoint_id} has values per rank: pass the same "
                "process_group= to both"
            )

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add the attempt that this rank has opened, and its rank in the job, to the plan."""
        return replace(plan, storage_data=(self._source[0].attempt.name, _job_rank()))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans with a common id if the ranks can read together.

        ConflictError if the ranks have opened different attempts, ValueError if the groups differ.
        """
        opened_by_ranks = [plan.storage_data for plan in plans]
        checkpoints = sorted({str(name) for name, _ in opened_by_ranks})
        if len(checkpoints) > 1:
            raise ConflictError(
                f"{self.checkpoint_id}: the ranks have opened different checkpoints, "
                f"{' and '.join(checkpoints)}, as one was saved meanwhile: load again"
            )
        is_group = False
        if len(plans) > 1 and dist.is_initialized():
            ranks_of_group = dist.get_process_group_ranks(self._group or dist.group.WORLD)
            is_group = [rank for _, rank in opened_by_ranks] == ranks_of_group
        if self._group is not None and len(plans) > 1 and not is_group:
            raise ValueError(
                "the ranks that call dcp.load are not those of the group of the StorageReader: "
                "pass the same process_group= to both"
            )
        shared_read_id = os.urandom(16).hex() if is_group else ""
        return [replace(plan, storage_data=shared_read_id) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the requested items into the planner's tensors. CorruptError if one is damaged."""
        (opened, keys), shared_read_id = self._source, str(plan.storage_data or "")
        # Other ranks of the job may read the same data by themselves.
        is_in_job = dist.is_initialized() or launched_world_size() > 1
        is_one_of_many = is_in_job and not shared_read_id
        session = single_process_session() if is_one_of_many else session_of(self._group)
        tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        with _log_lost_rank():
            # If each rank reads alone, the page cache shares the data between them.
            storage, _ = OPENER.open(opened.path, direct_reads=not is_one_of_many)
            source = OpenCheckpoint(storage, opened.path, opened.attempt, opened.index)
            reads = PlannedReads(tensors, planner, keys, source)
            nbytes_read, nbytes_received = reads.fill(session, self._phases, shared_read_id)
        converted: list[str] = []
        with self._phases.phase("place"):
            for item in plan.items:
                if item.type != LoadItemType.BYTE_IO:
                    continue
                value = keys.values[item.storage_index.fqn]
                if set_under_live_keys(planner, item.dest_index.fqn, value):
                    converted.append(item.dest_index.fqn)
                else:
                    # A planner accepts a value only pickled, here in memory.
                    data = io.BytesIO()
                    torch.save(value, data)  # noqa: TID251
                    data.seek(0)
                    planner.load_bytes(item, data)
        path, attempt = os.fspath(_check_path(self.checkpoint_id, "StorageReader")), opened.attempt
        self.report = DcpLoadReport(
            path, attempt.name, nbytes_read, nbytes_received, self._phases.seconds, tuple(converted)
        )
        self._phases.done(self.report)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: StrPath) -> bool:
        """Return True if this can be a path."""
        return isinstance(checkpoint_id, str | os.PathLike)

    @property
    def _source(self) -> tuple[OpenCheckpoint, DcpKeys]:
        if self._opened is None:
            raise ValueError("read_metadata was not called: pass this StorageReader to dcp.load")
        return self._opened

    @property
    def _rank(self) -> int:
        return dist.get_rank(self._group) if dist.is_initialized() else 0


@contextmanager
def _log_lost_rank() -> Iterator[None]:
    """Log a RankError: DCP then cannot gather the errors of all ranks, and raises only that."""
    try:
        yield
    except RankError as error:
        _log.error("%s", error)
        raise


def _job_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _check_path(path: StrPath | None, cls: str) -> StrPath:
    if path is None:
        raise ValueError(f"the path is missing: pass a path to {cls}, or checkpoint_id= to dcp")
    return path


# --- the values that a load of a folder of DCP needs -------------------------------------------

# The keys of an optimizer's state dict. Both are read to bind it, also if the load excludes them.
_OPTIMIZER_KEYS = frozenset({"state", "param_groups"})


@dataclass(frozen=True)
class RequiredValues:
    """Decides if a load into `state` may read the value that was saved under a name.

    It may not if a rename drops the name, if no top-level key of the state contains it, or if the
    load excludes that key or the value. `path` is the argument of the load. It may be a `Source`,
    whose options are unknown here: then every value may be read.
    """

    state: Mapping[object, object]
    path: object
    options: LoadOptions

    def __call__(self, saved: str) -> bool:
        """Return True if the load may read the value."""
        is_sure = isinstance(self.path, str | os.PathLike)
        is_of_optimizer = not _OPTIMIZER_KEYS.isdisjoint(saved.split("."))
        if not is_sure or (is_of_optimizer and self.options.rename):
            return True
        name = self._rename.apply([saved])[0].get(saved, saved)
        if name is None:
            return False
        above = {*names_above(name)}
        # The load takes all that was saved if the state has no keys.
        tops = above.intersection(map(str, self.state)) if self.state else {min(above, key=len)}
        if self._selection.include is not None:
            tops = {top for top in tops if self._selection.can_reach(top)}
        if not any(top in self._not_excluded for top in tops):
            return False
        return is_of_optimizer or name in self._not_excluded

    @cached_property
    def _rename(self) -> Rename:
        return parse_rename(self.options.rename)

    @cached_property
    def _selection(self) -> Selection:
        return parse_selection(self.options.include, self.options.exclude)

    @cached_property
    def _not_excluded(self) -> Selection:
        return Selection(exclude=self._selection.exclude)
