"""`dc.reshard`: rewrite a checkpoint for another layout, in one process, without torch.

The target is planned and written like a save by the ranks of the new layout. But the bytes come
from the source checkpoint instead of memory, one window at a time.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from dist_ckpt import __version__
from dist_ckpt.core.checkpoint.open_checkpoint import OpenCheckpoint
from dist_ckpt.core.comm.exchange.channel import SingleProcessChannel
from dist_ckpt.core.commit.receipts import build_attached_table, build_file_tables
from dist_ckpt.core.commit.transaction import Transaction
from dist_ckpt.core.format import filenames
from dist_ckpt.core.format.checksums import BLOCK_NBYTES
from dist_ckpt.core.format.index.index import Catalog, Index, Key, Node
from dist_ckpt.core.format.index.index_json import MAX_WORLD_SIZE
from dist_ckpt.core.format.objects import objects_file
from dist_ckpt.core.format.objects.objects_file import ObjectsFile
from dist_ckpt.core.planning.module_versions import versions_of_names
from dist_ckpt.core.planning.name_selection import (
    SELECT_ALL,
    Selection,
    names_above,
    parse_selection,
)
from dist_ckpt.core.planning.plan import Receipt
from dist_ckpt.core.planning.save.save_planner import plan_all_files, stored_nbytes
from dist_ckpt.core.planning.sharding_config import ShardingConfig, find_recut_problem, plan_reshard
from dist_ckpt.core.runtime.arguments import check_flag
from dist_ckpt.core.saving.carry_plan import (
    merge_objects_files,
    select_carried_names,
    whole_or_name,
)
from dist_ckpt.core.shard_io.read.read_windows import WindowReaders, read_windows
from dist_ckpt.core.shard_io.write.shard_writer import RankFiles, write_rank_files
from dist_ckpt.core.state.tree.containers import child_name, is_mapping
from dist_ckpt.core.storage import Storage, open_storage
from dist_ckpt.core.storage.storage_wrappers import CountingStorage
from dist_ckpt.default_opener import OPENER
from dist_ckpt.errors import IncompatibleError
from dist_ckpt.message_text import listed, names_around_remedy
from dist_ckpt.reports import CopyProgress, Phases, Progress, SaveReport
from dist_ckpt.tools.new_files import WritePlan, paths_to_replace

_ValuesByRank = dict[int, dict[str, dict[Key, object]]]

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
    """Rewrite the checkpoint at `source` for other ranks, as a new checkpoint at `target`.

    Give `sharding`, or `world_size` to split every tensor evenly along dimension 0. One process
    calls this, without torch or a GPU. It takes about `max_memory` bytes for tensors, and memory
    for all plain data and per-rank values. Every byte that is read is checked. Plain data and
    per-rank values are copied. The keys of per-rank values are assigned to the new ranks in turn.

    `include` and `exclude` are globs on the names in the checkpoint, as for `dc.save`. They select
    the part that is written. `source` may be a selector, such as "runs/a@latest", or files of
    another system that `dc.load` reads. Those have no digests to check.
    On return the target is complete and durable. `overwrite` replaces the checkpoint at `target`
    once the new one is durable. The target may be the source itself. Raises ExistsError if the
    target exists. Also raises the errors of a load from `source` and a save to `target`, such as
    NotFoundError if the source was replaced or deleted meanwhile.
    """
    config = resolve_sharding(sharding, world_size, max_memory)
    selection = parse_selection(include, exclude)
    plan = plan_rewrite(
        OPENER.find(source),
        target,
        config,
        max_memory=max_memory,
        overwrite=overwrite,
        selection=selection,
    )
    return plan.run(progress)


def resolve_sharding(sharding: object, world_size: object, max_memory: object) -> ShardingConfig:
    """Return the sharding that the options of `reshard` give. ValueError or TypeError if bad."""
    if type(max_memory) is not int or max_memory < MIN_MEMORY:
        raise ValueError(f"max_memory={max_memory!r}: give {MIN_MEMORY} bytes or more")
    if (sharding is None) == (world_size is None):
        raise ValueError("give either sharding= or world_size=")
    if sharding is None:
        return even_sharding(world_size)
    if not isinstance(sharding, ShardingConfig):
        raise TypeError(f"sharding is a {type(sharding).__name__}: give a ShardingConfig")
    return sharding


def plan_rewrite(
    source: tuple[Storage, str],
    target: str | os.PathLike[str],
    config: ShardingConfig,
    *,
    max_memory: int = MAX_MEMORY,
    overwrite: bool,
    selection: Selection = SELECT_ALL,
    step: int | None = None,
) -> WritePlan[SaveReport]:
    """Return the plan to reshard the checkpoint at a path of an open storage.

    Raises the errors that `reshard` raises before it writes. The data of tensors is not read yet.
    `step` is for files of another system. By default the step in these files is used.
    """
    check_flag("overwrite", overwrite)
    source_storage, source_path = source
    storage, path = open_storage(target)
    real_source, real_path = os.path.realpath(source_path), os.path.realpath(path)
    if real_source == real_path and not overwrite:
        raise ValueError(
            f"source and target are both {source_path}: give another target, or overwrite it "
            "(overwrite=True, on the command line --overwrite)"
        )
    if real_path.startswith(f"{real_source}/"):
        raise ValueError(f"the target {path} is inside the source: give another target")
    opened = OpenCheckpoint.at(CountingStorage(source_storage), source_path)
    index, catalog, main = opened.index, opened.catalog, opened.merged_objects()
    # Files of another system, or a part of a checkpoint, get a new save id.
    if not index.has_digests:
        step = index.step if step is None else step
        index = replace(index, save=secrets.token_hex(16), step=step)
    if not selection.is_everything:
        catalog, main = select_part(catalog, main, selection)
        index = replace(index, save=secrets.token_hex(16))
    resharded = plan_reshard(catalog, config, main.tree, main.numpy).catalog
    if problem := find_recut_problem(config, main.uncut, catalog, resharded):
        raise IncompatibleError(f"{source_path}: {problem}")
    catalog = resharded
    write = _Reshard(
        opened,
        index,
        catalog,
        main,
        _values_by_rank(opened, catalog),
        CountingStorage(storage),
        path,
        max_memory // 2 // BLOCK_NBYTES * BLOCK_NBYTES,
    )
    replaces = paths_to_replace(storage, path, overwrite=overwrite)
    return WritePlan(path, partial(write.run, overwrite=overwrite), write.files, replaces)


def _values_by_rank(opened: OpenCheckpoint, catalog: Catalog) -> _ValuesByRank:
    """Read the per-rank values. Return them by the rank that stores them in `catalog`."""
    by_rank: _ValuesByRank = {}
    for fqn, keys in catalog.per_rank.items():
        for key, rank in keys:
            value = opened.value_of_rank(fqn, key)
            by_rank.setdefault(rank, {}).setdefault(fqn, {})[key] = value
    return by_rank


def even_sharding(world_size: object) -> ShardingConfig:
    """Return the config that splits every tensor evenly. ValueError for a bad world size."""
    if type(world_size) is not int or not 1 <= world_size <= MAX_WORLD_SIZE:
        raise ValueError(
            f"world_size={world_size!r}: give the number of ranks, from 1 to {MAX_WORLD_SIZE}"
        )
    return ShardingConfig.even(world_size)


@dataclass(frozen=True, slots=True)
class _Reshard:
    """Writes the files of all ranks of `catalog` into a new attempt, and commits it.

    `index` is the index of the source. `main` is its global objects file, with the values of all
    ranks.
    """

    source: OpenCheckpoint
    index: Index
    catalog: Catalog
    main: ObjectsFile
    values_by_rank: _ValuesByRank
    storage: CountingStorage
    path: str
    window_nbytes: int

    def files(self) -> dict[str, int]:
        """Return the names and sizes of the files to write."""
        sizes: dict[str, int] = {}
        for rank, plans in enumerate(plan_all_files(self.catalog)):
            sizes |= {plan.name: plan.nbytes for plan in plans}
            sizes |= {name: len(data) for name, data in self._encode_documents(rank).items()}
        return sizes

    @property
    def _nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(stored_nbytes(self.catalog).values())

    def run(self, progress: Progress | None, *, overwrite: bool) -> SaveReport:
        """Write the checkpoint and commit it."""
        phases = Phases("reshard", self.path, quiet=False)
        with self.source, Transaction(SingleProcessChannel(), label="reshard") as transaction:
            attempt = transaction.claim(
                self.storage, self.path, overwrite=overwrite, nbytes=self._nbytes
            )
            with phases.phase("write"):
                receipts = self._write(transaction.folder, progress)
            with phases.phase("commit"):
                files, objects_files = build_file_tables(self.catalog, receipts)
                index = replace(
                    self.index,
                    attempt=attempt.name,
                    catalog=self.catalog,
                    files=files,
                    objects=objects_files,
                    attached=build_attached_table(receipts),
                    saved_by={**self.index.saved_by, "resharded_by": f"dist_ckpt {__version__}"},
                    saved_at=time.time(),
                )
                decision = transaction.commit_index(index, seconds=phases.seconds["write"])
            transaction.remove_superseded()
        assert isinstance(self.source.storage, CountingStorage)
        reads, writes = self.source.storage.reads, self.storage.writes
        return transaction.report(decision, phases, reads=reads, writes=writes)

    def _write(self, folder: str, progress: Progress | None) -> list[Receipt]:
        tell = CopyProgress(self._nbytes, progress)
        receipts = []
        for rank, files in enumerate(plan_all_files(self.catalog)):
            start = time.monotonic()
            filled = read_windows(self.source.read, files, self.window_nbytes, tell)
            content = RankFiles(
                step=self.index.step,
                plans=files,
                readers=WindowReaders(files, filled).readers,
                objects=self._encode_documents(rank),
            )
            # One thread, because one window is read at a time, and blocks are written in its order.
            done = write_rank_files(self.storage, folder, content, threads=1)
            receipts.append(Receipt(done, (), time.monotonic() - start))
        return receipts

    def _encode_documents(self, rank: int) -> dict[str, bytes]:
        """Return the contents of a rank's files that are not shard files. Rank 0 has all values."""
        documents = {}
        if rank == 0:
            documents[filenames.OBJECTS] = objects_file.encode(self.main)
        if values := self.values_by_rank.get(rank):
            file = ObjectsFile(per_rank=values)
            documents[filenames.objects_file(rank)] = objects_file.encode(file)
        for record in self.index.attached if rank == 0 else ():
            documents[record.file_name] = self.source.read_attached(record.name)
        return documents


# --- select a part of a checkpoint by names. Pure ----------------------------------------------


def select_part(
    catalog: Catalog, main: ObjectsFile, selection: Selection
) -> tuple[Catalog, ObjectsFile]:
    """Return the selected part of a catalog, and of the objects file with all its values.

    Raises ValueError if a pattern matches nothing, if nothing is left, if a tied tensor would lose
    its data, or if a list would lose some of its items.
    """
    names = catalog.names
    if problems := selection.pattern_problems(names):
        raise ValueError(listed(problems, "; "))
    chosen = {name for name in names if whole_or_name(name, catalog) in selection}
    if not chosen:
        raise ValueError(f"{selection} leaves nothing: give other patterns")
    with_groups = {above for name in chosen for above in names_above(name)}
    for node in main.tree:
        lost = [key for key in node.keys if child_name(node.fqn, key) not in with_groups]
        if not is_mapping(node.kind) and 0 < len(lost) < len(node.keys):
            raise ValueError(
                f"{child_name(node.fqn, lost[0])}: an item of a {node.kind} cannot be left out, as "
                f"later items would move: leave all of {node.fqn!r} out"
            )
    # This is the same as to carry the names over into an empty checkpoint.
    nothing = replace(catalog, tensors={}, aliases={}, values={}, per_rank={}, parameters={})
    part = select_carried_names(catalog, chosen, nothing, ())
    if tied := [f"{name} (of {data})" for name, data in part.tensors.items() if name != data]:
        text, rest = names_around_remedy(tied)
        raise ValueError(
            f"tied tensors would lose their data: {text}: include both, or exclude both{rest}"
        )
    values = {fqn: main.values[fqn] for fqn in part.values}
    root = next(node for node in main.tree if not node.fqn)
    left = merge_objects_files(ObjectsFile((Node("", root.kind, ()),)), main, part, values)
    return (
        replace(
            catalog,
            tensors={fqn: catalog.tensors[fqn] for fqn in part.tensors},
            aliases=part.aliases,
            values={fqn: catalog.values[fqn] for fqn in part.values},
            per_rank={fqn: catalog.per_rank[fqn] for fqn in part.per_rank},
            parameters={f: is_on for f, is_on in catalog.parameters.items() if f in part.tensors},
            fused={fqn: of for fqn, of in catalog.fused.items() if fqn in part.tensors},
            versions=versions_of_names(catalog.versions, chosen),
        ),
        replace(left, metadata=main.metadata),
    )
