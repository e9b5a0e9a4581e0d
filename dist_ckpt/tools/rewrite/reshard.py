"""`dc.reshard`: rewrite a whole checkpoint for another layout, in one process, without torch.

The target is planned like a save by as many ranks, and written like one; only the bytes come out
of the source checkpoint instead of memory, a window of them at a time.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypedDict, Unpack

from dist_ckpt import __version__
from dist_ckpt.core.checkpoint.open_checkpoint import OpenCheckpoint
from dist_ckpt.core.comm.exchange.channel import SingleProcessChannel
from dist_ckpt.core.commit.commit_protocol import attached_of, check_receipts
from dist_ckpt.core.format import filenames
from dist_ckpt.core.format.checksums import BLOCK_NBYTES
from dist_ckpt.core.format.index.catalog_json import MAX_WORLD_SIZE
from dist_ckpt.core.format.index.index import Catalog, Index, Key, Node
from dist_ckpt.core.format.objects import objects_file
from dist_ckpt.core.format.objects.objects_file import ObjectsFile
from dist_ckpt.core.planning.plan import FilePlan, FileReceipt, Receipt, SavePlan
from dist_ckpt.core.planning.save.save_planner import items_of_ranks, stored_nbytes
from dist_ckpt.core.planning.selection import SELECT_ALL, Selection, names_above, selection_of
from dist_ckpt.core.planning.sharded_views import plan_stored
from dist_ckpt.core.planning.sharding_config import ShardingConfig
from dist_ckpt.core.saving.carry_plan import carried_names, names_of, whole_or_name, with_carried
from dist_ckpt.core.saving.transaction import Transaction
from dist_ckpt.core.shard_io.read.read_windows import Windows, read_windows
from dist_ckpt.core.shard_io.write.shard_writer import RankFiles, write_all
from dist_ckpt.core.state.tree.containers import is_mapping, join
from dist_ckpt.core.storage import Storage, open_storage
from dist_ckpt.core.storage.forwarding import CountingStorage
from dist_ckpt.errors import listed
from dist_ckpt.openers import OPENER
from dist_ckpt.reports import IoCount, Phases, Progress, SaveReport
from dist_ckpt.tools.rewrite.dry_run import DryRun, dry_run

MIN_MEMORY = 64 << 20
MAX_MEMORY = 1 << 30


def reshard(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    sharding: ShardingConfig | None = None,
    world_size: int | None = None,
    max_memory: int = MAX_MEMORY,
    overwrite: bool = False,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    progress: Progress | None = None,
) -> SaveReport:
    """Write the checkpoint at `source` again at `target`, laid out for other ranks.

    Give `sharding`, or `world_size` to cut every tensor evenly along dimension 0. One process
    does it with about `max_memory` bytes for tensors, and all plain data and per-rank values in
    memory besides, without torch or a GPU. Every byte read is checked. Plain data and per-rank
    values, with the keys they were saved under, are carried over; the keys go round the ranks.

    `include` and `exclude` are globs on the names in the checkpoint, as of `dc.save`: then only a
    part of it is written. `source` may name one of a run, such as "runs/a@latest"; or it is what
    other systems wrote and `dc.load` reads, which has no digests to check.
    On return the target is complete and durable. `overwrite` replaces the checkpoint that is
    there, which may be the source itself, once the new one is durable. Raises ExistsError if
    something is there; otherwise as a load from `source` and a save to `target` would, so
    NotFoundError if the source was replaced or deleted meanwhile.
    """
    config = _config_of(sharding, world_size, max_memory)
    selection = selection_of(include, exclude)
    return rewrite(
        OPENER.find(source),
        target,
        config,
        max_memory=max_memory,
        overwrite=overwrite,
        selection=selection,
        progress=progress,
    )


class ReshardOptions(TypedDict, total=False):
    """What `reshard` takes, but for its progress."""

    sharding: ShardingConfig | None
    world_size: int | None
    max_memory: int
    overwrite: bool
    include: str | Sequence[str] | None
    exclude: str | Sequence[str] | None


def plan_reshard(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    **options: Unpack[ReshardOptions],
) -> DryRun:
    """Return what `reshard` would write. Nothing is changed. Raises what it does before it writes.

    What is damaged in a tensor's data is not looked for.
    """
    max_memory = options.get("max_memory", MAX_MEMORY)
    config = _config_of(options.get("sharding"), options.get("world_size"), max_memory)
    selection = selection_of(options.get("include"), options.get("exclude"))
    overwrite = options.get("overwrite", False)
    opened = OPENER.find(source)
    return plan_rewrite(opened, target, config, overwrite=overwrite, selection=selection)


def _config_of(sharding: object, world_size: object, max_memory: object) -> ShardingConfig:
    if type(max_memory) is not int or max_memory < MIN_MEMORY:
        raise ValueError(f"max_memory={max_memory!r}: give {MIN_MEMORY} bytes or more")
    if (sharding is None) == (world_size is None):
        raise ValueError("give either sharding= or world_size=")
    if sharding is None:
        return even(world_size)
    if not isinstance(sharding, ShardingConfig):
        raise TypeError(f"sharding is a {type(sharding).__name__}: give a ShardingConfig")
    return sharding


def rewrite(
    source: tuple[Storage, str],
    target: str | os.PathLike[str],
    config: ShardingConfig,
    *,
    max_memory: int = MAX_MEMORY,
    overwrite: bool,
    selection: Selection = SELECT_ALL,
    step: int | None = None,
    progress: Progress | None = None,
) -> SaveReport:
    """Reshard what is opened: a storage, and the path of a checkpoint there.

    `step` is what a checkpoint without digests is of, else what its files say.
    """
    with _planned(source, target, config, overwrite, selection, step) as (stored, plan, place):
        run = _Reshard(stored, plan, *place, max_memory, progress)
        return run.run(overwrite=overwrite)


def plan_rewrite(
    source: tuple[Storage, str],
    target: str | os.PathLike[str],
    config: ShardingConfig,
    *,
    overwrite: bool,
    selection: Selection = SELECT_ALL,
) -> DryRun:
    """Return what `rewrite` would write, and change nothing."""
    with _planned(source, target, config, overwrite, selection, None) as (stored, plan, place):
        files = _Reshard(stored, plan, *place, MAX_MEMORY, None).files()
        return dry_run(*place, files, overwrite=overwrite)


@contextmanager
def _planned(
    source: tuple[Storage, str],
    target: str | os.PathLike[str],
    config: ShardingConfig,
    overwrite: object,
    selection: Selection,
    step: int | None,
) -> Iterator[tuple[_ReshardInput, SavePlan, tuple[CountingStorage, str]]]:
    """Yield what is read, what is planned of it, and where it goes: nothing is written yet."""
    if type(overwrite) is not bool:
        raise TypeError(f"overwrite={overwrite!r}: give True or False")
    source_storage, source_path = source
    target_storage, target_path = open_storage(target)
    # By whatever links they lead there.
    real_source, real_target = os.path.realpath(source_path), os.path.realpath(target_path)
    if real_source == real_target and not overwrite:
        raise ValueError(
            f"source and target are both {source_path}: give another target, or overwrite it "
            "(overwrite=True, on the command line --overwrite)"
        )
    if real_target.startswith(f"{real_source}/"):
        raise ValueError(f"the target {target_path} lies in the source: give another target")
    with OpenCheckpoint.at(CountingStorage(source_storage), source_path) as opened:
        stored = _ReshardInput.of(opened, selection, step)
        plan = plan_stored(stored.catalog, config, stored.main.tree, stored.main.numpy)
        yield stored, plan, (CountingStorage(target_storage), target_path)


def even(world_size: object) -> ShardingConfig:
    """Return how so many ranks share every tensor evenly. ValueError for what is no number."""
    if type(world_size) is not int or not 1 <= world_size <= MAX_WORLD_SIZE:
        raise ValueError(
            f"world_size={world_size!r}: give the number of ranks, from 1 to {MAX_WORLD_SIZE}"
        )
    return ShardingConfig.even(world_size)


@dataclass(frozen=True, slots=True)
class _ReshardInput:
    """What is written again of an open checkpoint: all of it, or the part that was selected.

    `main` is the global objects file of that, with the values of all ranks.
    """

    opened: OpenCheckpoint
    index: Index
    catalog: Catalog
    main: ObjectsFile

    @staticmethod
    def of(opened: OpenCheckpoint, selection: Selection, step: int | None) -> _ReshardInput:
        """Return what a selection leaves, as a checkpoint with an id of its own if it is a part."""
        index, catalog, main = opened.index, opened.catalog, opened.merged_objects()
        if not index.has_digests:
            step = index.step if step is None else step
            index = replace(index, save=secrets.token_hex(16), step=step)
        if not selection.is_everything:
            catalog, main = select_part(catalog, main, selection)
            index = replace(index, save=secrets.token_hex(16))
        return _ReshardInput(opened, index, catalog, main)

    def keyed(self, plan: SavePlan) -> dict[int, dict[str, dict[Key, object]]]:
        """Return the per-rank values by the ranks that store them in a plan."""
        keyed: dict[int, dict[str, dict[Key, object]]] = {}
        for fqn, keys in plan.catalog.per_rank.items():
            for key, rank in keys:
                value = self.opened.value_of_rank(fqn, key)
                keyed.setdefault(rank, {}).setdefault(fqn, {})[key] = value
        return keyed

    @property
    def reads(self) -> IoCount:
        """What was read of it."""
        assert isinstance(self.opened.storage, CountingStorage)
        return self.opened.storage.reads

    def attached(self) -> dict[str, bytes]:
        """Return what users have attached, by the names of its files in an attempt."""
        return {one.file_name: self.opened.attached(one.name) for one in self.index.attached}


class _Reshard:
    """One run: claim, write what each rank would, commit."""

    def __init__(
        self,
        stored: _ReshardInput,
        plan: SavePlan,
        storage: CountingStorage,
        path: str,
        max_memory: int,
        progress: Progress | None,
    ) -> None:
        self._stored = stored
        self._plan = plan
        self._keyed = stored.keyed(plan)
        self._storage = storage
        self._path = path
        self._window_nbytes = max_memory // 2 // BLOCK_NBYTES * BLOCK_NBYTES
        self._progress = progress
        self._nbytes = self._nbytes_read = 0
        self._phases = Phases("reshard", path, quiet=False)

    def run(self, *, overwrite: bool) -> SaveReport:
        phases = self._phases
        with Transaction(SingleProcessChannel(), label="reshard") as transaction:
            attempt = transaction.claim(self._storage, self._path, overwrite=overwrite)
            with phases.phase("write"):
                receipts = self._write(transaction.folder)
            with phases.phase("commit"):
                index = self._index(attempt.name, receipts)
                decision = transaction.commit_index(index, seconds=phases.seconds["write"])
            transaction.supersede()
        reads, writes = self._stored.reads, self._storage.writes
        return transaction.report(decision, phases, reads=reads, writes=writes)

    def _write(self, folder: str) -> list[Receipt]:
        self._nbytes = sum(stored_nbytes(self._plan.catalog).values())
        receipts = []
        for rank, files in enumerate(items_of_ranks(self._plan.catalog)):
            start = time.monotonic()
            done = self._write_rank(folder, files, rank)
            receipts.append(Receipt(done, (), time.monotonic() - start))
        return receipts

    def _tell(self, nbytes: int) -> None:
        self._nbytes_read += nbytes
        if self._progress is not None:
            self._progress(self._nbytes_read, self._nbytes)

    def _write_rank(
        self, folder: str, files: tuple[FilePlan, ...], rank: int
    ) -> tuple[FileReceipt, ...]:
        filled = read_windows(self._stored.opened.read, files, self._window_nbytes, self._tell)
        windows = Windows(files, filled)
        content = RankFiles(
            step=self._stored.index.step,
            plans=files,
            sources=windows.sources,
            objects=self._others(rank),
        )
        # One thread: a window is read at a time, and its blocks are written in its order.
        return write_all(self._storage, folder, content, threads=1)

    def files(self) -> dict[str, int]:
        """Return the names and sizes of the files that are written."""
        found: dict[str, int] = {}
        for rank, plans in enumerate(items_of_ranks(self._plan.catalog)):
            found |= {plan.name: plan.nbytes for plan in plans}
            found |= {name: len(data) for name, data in self._others(rank).items()}
        return found

    def _others(self, rank: int) -> dict[str, bytes]:
        """Return what a rank writes besides shards."""
        return {**self._objects(rank), **(self._stored.attached() if rank == 0 else {})}

    def _objects(self, rank: int) -> dict[str, bytes]:
        """Return a rank's objects files: its keys, and all values in the global one, rank 0's."""
        encoded = {}
        if rank == 0:
            encoded[filenames.OBJECTS] = objects_file.encode(self._stored.main)
        if keyed := self._keyed.get(rank):
            encoded[filenames.objects_file(rank)] = objects_file.encode(
                objects_file.ObjectsFile(per_rank=keyed)
            )
        return encoded

    def _index(self, attempt: str, receipts: Sequence[Receipt]) -> Index:
        files, objects_files = check_receipts(self._plan.catalog, receipts)
        return replace(
            self._stored.index,
            attempt=attempt,
            catalog=self._plan.catalog,
            files=files,
            objects=objects_files,
            attached=attached_of(receipts),
            saved_by={**self._stored.index.saved_by, "resharded_by": f"dist_ckpt {__version__}"},
            saved_at=time.time(),
        )


# --- a part of a checkpoint, by names. Pure ---------------------------------------------------


def select_part(
    catalog: Catalog, main: ObjectsFile, selection: Selection
) -> tuple[Catalog, ObjectsFile]:
    """Return what a selection leaves of a catalog, and of the objects file with all its values.

    ValueError for a pattern that matches nothing, if nothing is left, for a tied tensor without the
    one that has its data, and where a list would lose an item.
    """
    names = names_of(catalog)
    if problems := selection.unmatched(names):
        raise ValueError(listed(problems, "; "))
    chosen = {name for name in names if whole_or_name(name, catalog) in selection}
    if not chosen:
        raise ValueError(f"{selection} leaves nothing: give other patterns")
    _check_lists(main.tree, {above for name in chosen for above in names_above(name)})
    # Carried on into a checkpoint that holds nothing.
    nothing = replace(catalog, tensors={}, aliases={}, values={}, per_rank={}, parameters={})
    part = carried_names(catalog, chosen, nothing, ())
    if tied := [f"{name} (of {data})" for name, data in part.tensors.items() if name != data]:
        raise ValueError(
            f"tied tensors would lose their data: {listed(tied)}: leave both in or out"
        )
    values = {fqn: main.values[fqn] for fqn in part.values}
    root = next(node for node in main.tree if not node.fqn)
    left = with_carried(ObjectsFile((Node("", root.kind, ()),)), main, part, values)
    return (
        replace(
            catalog,
            tensors={fqn: catalog.tensors[fqn] for fqn in part.tensors},
            aliases=part.aliases,
            values={fqn: catalog.values[fqn] for fqn in part.values},
            per_rank={fqn: catalog.per_rank[fqn] for fqn in part.per_rank},
            parameters={f: is_on for f, is_on in catalog.parameters.items() if f in part.tensors},
        ),
        replace(left, metadata=main.metadata),
    )


def _check_lists(tree: Iterable[Node], left: Collection[str]) -> None:
    """Raise ValueError for a list of which only some items are among the names that are left."""
    for node in tree:
        lost = [key for key in node.keys if join(node.fqn, key) not in left]
        if not is_mapping(node.kind) and 0 < len(lost) < len(node.keys):
            raise ValueError(
                f"{join(node.fqn, lost[0])}: an item of a {node.kind} cannot be left out, as the "
                f"others would move: leave all of {node.fqn!r} out"
            )
