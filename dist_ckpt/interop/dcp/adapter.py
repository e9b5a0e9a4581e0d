"""`torch.distributed.checkpoint` over our format: a storage writer and a reader for its planners.

    import torch.distributed.checkpoint as dcp
    from dist_ckpt.interop.dcp.adapter import StorageReader, StorageWriter

    dcp.save(state_dict, storage_writer=StorageWriter("runs/a/step-100", step=100))
    dcp.load(state_dict, storage_reader=StorageReader("runs/a@latest"))

What they write is a checkpoint like any other, which `dc.load` and the command line read, and they
read what `dc.save` has written, as far as its names are those of the state dict.

    load(state, "old/step-100")     # a folder that dcp.save has written, as dc.load reads ours
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
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dist_ckpt.config import launched_world_size
from dist_ckpt.core.checkpoint.open_checkpoint import OpenCheckpoint
from dist_ckpt.core.comm.exchange.channel import COORDINATOR
from dist_ckpt.core.comm.process_group import session_of, single_process_session
from dist_ckpt.core.loading.load import load_together
from dist_ckpt.core.loading.load_options import LoadOptions, ReadOnce
from dist_ckpt.core.loading.shared_read import CollectiveReader
from dist_ckpt.core.planning.selection import Cast, Selection, names_above, selection_of
from dist_ckpt.core.planning.sharding_config import ShardingConfig
from dist_ckpt.core.runtime.public_names import refuse_old_parameters
from dist_ckpt.core.saving.local_save_state import StateReader
from dist_ckpt.core.saving.save import SaveOptions, save_together
from dist_ckpt.core.state.binding.sources.rename import Rename, rename_of
from dist_ckpt.core.state.tensors.plain_torch import make
from dist_ckpt.core.state.tree.containers import MutableState
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import ConflictError, RankError
from dist_ckpt.interop.dcp.flat_state_dict import DcpKeys, PlannedReads, local_state_of
from dist_ckpt.interop.imports import open_pickled
from dist_ckpt.interop.readers.nested_state import ImportFilter
from dist_ckpt.openers import OPENER
from dist_ckpt.reports import LoadReport, Phases, SaveReport, size

_log = logging.getLogger("dist_ckpt")

DcpPath = str | os.PathLike[str]


@refuse_old_parameters(frozen="include_frozen")
def load(
    state: MutableState,
    path: DcpPath,
    *,
    sharding: ShardingConfig | None = None,
    group: dist.ProcessGroup | None = None,
    strict: bool = True,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    rename: Mapping[str, str | None] | None = None,
    include_frozen: bool = True,
    read_once: ReadOnce = "host",
    cast: Cast = None,
) -> LoadReport:
    """Fill a state from a folder that `torch.distributed.checkpoint` wrote, as `dc.load` does.

    Collective: every rank of `group` calls this; any layout loads into any other. Modules and
    optimizers are found by the names that `get_state_dict` gives them. The pickles in the folder
    are read by an interpreter of ours: nothing is executed. DCP keeps no checksums: only sizes,
    names, shapes, dtypes and coverage are checked, before anything is touched. The options and
    errors are those of `dc.load`, and IncompatibleError for what is no plain data and may be read
    for this state.
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
        notes=False,
    )
    needed = ImportFilter(needs=RequiredValues(state, path, options))

    def open_folder(path: DcpPath, *, direct_reads: bool = False) -> tuple[Storage, str]:
        del direct_reads
        return open_pickled("dcp", path, needed)

    opener = replace(OPENER, name="DCP", open=open_folder)
    return load_together(session_of(group), state, path, options, opener=opener)


@dataclass(frozen=True, slots=True)
class DcpLoadReport:
    """What a `dcp.load` with a `StorageReader` did on this rank, without DCP's planning.

    `nbytes_read` of the tensors came from storage, `nbytes_received` from other ranks of this host.
    `seconds` are by phase: "open" is to find the checkpoint, "check" to open its files and to
    agree, "read" to read, verify and fill, "place" to convert and to hand over values.
    """

    path: str
    attempt: str
    nbytes_read: int
    nbytes_received: int
    seconds: Mapping[str, float]

    @property
    def total_s(self) -> float:
        """The seconds of all phases."""
        return sum(self.seconds.values())

    def __str__(self) -> str:
        """Return one line for people and logs."""
        return (
            f"loaded {self.path} for DCP: {size(self.nbytes_read)} read and "
            f"{size(self.nbytes_received)} received here in {self.total_s:.3g} s"
        )


class StorageWriter(dcp.StorageWriter):
    """Writes what a planner of DCP's has planned as a checkpoint at `path`.

    It serves `dcp.save`, and `dcp.async_save` in a thread or a process. DCP plans, gathers and
    stages; from there on it is `dc.save`: all files are durable and checked, and the checkpoint is
    committed by one rename, before DCP is told that this rank has written. So if `dcp.save` raises,
    what was there before is still there, and whole. `report` is what the last save came to.

    `step` and `metadata` are those of `dc.save`. `overwrite` replaces the checkpoint that is there
    once the new one is durable; it is on, as in DCP. `process_group` is what `dcp.save` is given,
    None if that is given none. `checkpoint_id` of `dcp.save` comes before `path`.

    Values that are no tensors must be plain data: what DCP would pickle is refused by name.
    """

    def __init__(
        self,
        path: DcpPath | None = None,
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

    def reset(self, checkpoint_id: DcpPath | None = None) -> None:
        """Begin another save, at `checkpoint_id` if that is given."""
        if checkpoint_id is not None:
            self.checkpoint_id = checkpoint_id
        self.report = None
        self._is_alone = False

    # DCP says whether ranks plan together only to who has a parameter of this name.
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001
        """Note how the ranks plan. ValueError without a path, TypeError if a group was lost."""
        del is_coordinator, args
        if self._has_lost_group:
            raise TypeError(
                "a StorageWriter with a process_group cannot go to another process: save in a "
                "thread (AsyncCheckpointerType.THREAD), or with all ranks and no process_group"
            )
        self._plans_together = bool(kwargs.get("use_collectives", True))
        _checked(self.checkpoint_id, "StorageWriter")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is: DCP keeps plans for later saves, of other writers too."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Check that those who planned are those who will save. Of the coordinator."""
        if not self._plans_together:
            return plans
        size = dist.get_world_size(self._group) if dist.is_initialized() else 1
        self._is_alone = len(plans) == 1 < size
        if not self._is_alone and len(plans) != size:
            raise ValueError(
                f"dcp.save is called by {len(plans)} ranks, and the group of the StorageWriter has "
                f"{size}: give both the same process_group="
            )
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Save and commit, together with the other ranks. Raises what `dc.save` does."""
        ranks = single_process_session() if self._is_alone else session_of(self._group)
        results: list[WriteResult] = []

        def read() -> Any:
            local, sizes = local_state_of(plan, planner, ranks)
            results.extend(WriteResult(index, nbytes, None) for index, nbytes in sizes)
            return local

        path = _checked(self.checkpoint_id, "StorageWriter")
        with _lost_ranks_logged():
            self.report = save_together(ranks, StateReader(read), path, self._options)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing: it is committed, with all of DCP's metadata that is not in it anyway."""

    def storage_meta(self) -> StorageMeta | None:
        """Say where it goes."""
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: DcpPath) -> bool:
        """Say whether this may be a path."""
        return isinstance(checkpoint_id, str | os.PathLike)

    def __getstate__(self) -> dict[str, object]:
        """Return what a process of DCP's is given, which makes a group of all ranks by itself."""
        # Raised over there: in torch 2.7 an error here is lost, and DCP waits for ever.
        return {**self.__dict__, "_group": None, "_has_lost_group": self._group is not None}


class StorageReader(dcp.StorageReader):
    """Reads a checkpoint for a planner of DCP's: what it asks for, and no more, each byte checked.

    `path` may name one of a run, such as "runs/a@latest". Of a tensor any box may be asked for,
    whatever the ranks that saved it; another dtype is converted, as DCP does. `checkpoint_id` of
    `dcp.load` comes before `path`. `report` is what the last load came to.

    `process_group` is what `dcp.load` is given, None if that is given none. If it is, the ranks
    read together, as those of `dc.load` do: what several ranks of a host want is read by one of
    them, and all raise what one of them does. Otherwise each rank reads all that it wants. Values
    per rank are those of the same rank of this group, counted within it.

    Raises NotFoundError if there is no checkpoint, CorruptError if it is damaged; DCP puts them
    into a CheckpointException of its own. What is read is checked as it lands: after an error
    tensors of the state may hold some of it, as with DCP's own reader.
    """

    def __init__(
        self, path: DcpPath | None = None, *, process_group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__()
        self.checkpoint_id = path
        self.report: DcpLoadReport | None = None
        self._group = process_group
        self._opened: tuple[OpenCheckpoint, DcpKeys] | None = None
        self._phases = Phases("load", "", quiet=True)

    def reset(self, checkpoint_id: DcpPath | None = None) -> None:
        """Begin another load, of `checkpoint_id` if that is given."""
        if checkpoint_id is not None:
            self.checkpoint_id = checkpoint_id
        self._opened = None
        self.report = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what is in the checkpoint, by DCP's names."""
        del args, kwargs
        path = _checked(self.checkpoint_id, "StorageReader")
        self._phases = Phases("load", os.fspath(path), quiet=_job_rank() != COORDINATOR)
        with self._phases.phase("open"):
            opened = OpenCheckpoint.open(path, opener=OPENER, make=make)
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
        """Check that values per rank are those of the rank that DCP takes this one for."""
        dcp_rank = kwargs.get("rank")
        # Who loads alone (no_dist) is told 0, whatever its rank, as is the first of any group.
        if dcp_rank and dcp_rank != self._rank and self._source[1].per_rank:
            raise ValueError(
                f"dcp.load calls this rank {dcp_rank}, and in the group of the StorageReader it is "
                f"{self._rank}; {self.checkpoint_id} has values per rank: give both the same "
                "process_group="
            )

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Say in the plan what this rank has found, and which rank of the job it is."""
        return replace(plan, storage_data=(self._source[0].attempt.name, _job_rank()))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check that all ranks have found the same, and say in their plans whether they meet.

        ConflictError if it was replaced meanwhile, ValueError for a group that is another one.
        """
        read_by_ranks = [plan.storage_data for plan in plans]
        checkpoints = sorted({str(name) for name, _ in read_by_ranks})
        if len(checkpoints) > 1:
            raise ConflictError(
                f"{self.checkpoint_id}: the ranks have found different checkpoints there, "
                f"{' and '.join(checkpoints)}: one was saved meanwhile; load again"
            )
        is_group = len(plans) > 1 and [rank for _, rank in read_by_ranks] == self._job_ranks()
        if self._group is not None and len(plans) > 1 and not is_group:
            raise ValueError(
                "dcp.load is called by other ranks than those of the group that the StorageReader "
                "has: give both the same process_group="
            )
        meeting = os.urandom(16).hex() if is_group else ""
        return [replace(plan, storage_data=meeting) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what is asked for into the planner's tensors. CorruptError names what is damaged."""
        (opened, keys), meeting = self._source, str(plan.storage_data or "")
        # Other ranks of the job may read by themselves what this one does.
        is_one_of_many = not meeting and _is_in_job()
        ranks = single_process_session() if is_one_of_many else session_of(self._group)
        tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        with _lost_ranks_logged():
            # Where each rank reads all that it wants, the page cache shares it among them.
            storage, _ = OPENER.open(opened.path, direct_reads=not is_one_of_many)
            nbytes_read, nbytes_received = PlannedReads(tensors, planner, keys).fill(
                OpenCheckpoint(storage, opened.path, opened.attempt, opened.index),
                CollectiveReader(ranks, self._phases, meeting),
            )
        with self._phases.phase("place"):
            for item in plan.items:
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, _bytes_of(keys.value(item.storage_index.fqn)))
        self.report = DcpLoadReport(
            os.fspath(_checked(self.checkpoint_id, "StorageReader")),
            opened.attempt.name,
            nbytes_read,
            nbytes_received,
            self._phases.seconds,
        )
        self._phases.done(self.report)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: DcpPath) -> bool:
        """Say whether this may be a path."""
        return isinstance(checkpoint_id, str | os.PathLike)

    @property
    def _source(self) -> tuple[OpenCheckpoint, DcpKeys]:
        if self._opened is None:
            raise ValueError("this StorageReader has read no metadata: dcp.load calls that first")
        return self._opened

    @property
    def _rank(self) -> int:
        return dist.get_rank(self._group) if dist.is_initialized() else 0

    def _job_ranks(self) -> list[int]:
        """Return the ranks of the group, as ranks of the job."""
        if not dist.is_initialized():
            return []
        ranks: list[int] = dist.get_process_group_ranks(self._group or dist.group.WORLD)
        return ranks


@contextmanager
def _lost_ranks_logged() -> Iterator[None]:
    """Log which rank is lost: DCP then gathers the errors of all, and raises that it cannot."""
    try:
        yield
    except RankError as error:
        _log.error("%s", error)
        raise


def _is_in_job() -> bool:
    return dist.is_initialized() or launched_world_size() > 1


def _job_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _bytes_of(value: object) -> io.BytesIO:
    """Return a value for a planner, which takes values so, and no other way: in memory alone."""
    data = io.BytesIO()
    torch.save(value, data)  # noqa: TID251
    data.seek(0)
    return data


def _checked(path: DcpPath | None, who: str) -> DcpPath:
    if path is None:
        raise ValueError(f"where is not known: give {who} a path, or dcp a checkpoint_id=")
    return path


# --- what a load of a folder of DCP needs ------------------------------------------------------


# An optimizer is bound by what its groups say, also where a load leaves these out.
_OF_OPTIMIZERS = frozenset({"state", "param_groups"})


@dataclass(frozen=True)
class RequiredValues:
    """Says whether a load into `state` may read the value that was saved under a name.

    It does not if a rename drops it, if nothing at the top of the state has its name, or if that,
    or the value itself, is left out. `path` is what the load is given: a `Source` has options of
    its own, of which nothing is known here.
    """

    state: Mapping[object, object]
    path: object
    options: LoadOptions

    def __call__(self, saved: str) -> bool:
        """Say whether it may be; if unsure, yes."""
        is_sure = isinstance(self.path, str | os.PathLike)
        is_of_optimizer = not _OF_OPTIMIZERS.isdisjoint(saved.split("."))
        if not is_sure or (is_of_optimizer and self.options.rename):
            return True
        name = self._rename.of_all([saved])[0].get(saved, saved)
        if name is None or not self._may_choose(frozenset(names_above(name))):
            return False
        return is_of_optimizer or name in self._not_excluded

    def _may_choose(self, above: frozenset[str]) -> bool:
        """Say whether something may be chosen at or below the top of a name, given all above it."""
        tops = above & self._tops if self._tops else {min(above, key=len)}
        if self._selection.include is not None:
            tops = {top for top in tops if self._selection.may_reach(top)}
        return any(top in self._not_excluded for top in tops)

    @cached_property
    def _tops(self) -> frozenset[str]:
        """What the state has at its top; nothing if all that was saved is taken."""
        return frozenset(map(str, self.state))

    @cached_property
    def _rename(self) -> Rename:
        return rename_of(self.options.rename)

    @cached_property
    def _selection(self) -> Selection:
        return selection_of(self.options.include, self.options.exclude)

    @cached_property
    def _not_excluded(self) -> Selection:
        return Selection(exclude=self._selection.exclude)
