"""`dc.strip`: remove components from a checkpoint, such as an old optimizer, without torch.

A committed attempt is never modified. The remaining files are linked into a new attempt, which
replaces the old one like a save that overwrites.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from dist_ckpt import __version__
from dist_ckpt.core.checkpoint.open_checkpoint import OpenCheckpoint
from dist_ckpt.core.comm.exchange.channel import SingleProcessChannel
from dist_ckpt.core.commit import attempts, removal
from dist_ckpt.core.commit.records import protection_protocol
from dist_ckpt.core.commit.records.leases import leased_source
from dist_ckpt.core.commit.records.protection_protocol import CheckpointRef
from dist_ckpt.core.commit.records.protections import PIN, CheckpointKey, protections_of
from dist_ckpt.core.commit.records.record_store import (
    can_keep_records,
    check_upgraded,
    read_annotations,
)
from dist_ckpt.core.commit.removal import read_storage_clock
from dist_ckpt.core.commit.transaction import Transaction
from dist_ckpt.core.format import filenames
from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.core.format.index.index import Index, Node, ObjectsFileRecord
from dist_ckpt.core.format.objects import objects_file
from dist_ckpt.core.format.objects.objects_file import ObjectsFile
from dist_ckpt.core.planning.module_versions import versions_of_names
from dist_ckpt.core.runtime.arguments import check_flag
from dist_ckpt.core.shard_io.write.shard_writer import write_document
from dist_ckpt.core.storage import Storage, refuse_linked_step
from dist_ckpt.core.storage.storage_wrappers import CountingStorage
from dist_ckpt.errors import CheckpointError, ConflictError, StorageError
from dist_ckpt.message_text import listed
from dist_ckpt.reports import IoCount, Phases, Progress, SaveReport
from dist_ckpt.runs.metrics import metrics_by_checkpoint, put_metrics
from dist_ckpt.runs.prune import check_unprotected
from dist_ckpt.runs.selectors import open_resolved

# In `saved_by`: the attempt that this one has replaced.
_STRIPPED_FROM = "stripped_from"


def strip(
    path: str | os.PathLike[str],
    *components: str,
    force: bool = False,
    progress: Progress | None = None,
) -> SaveReport:
    """Remove components (top-level keys of the state) from the checkpoint at `path`, for good.

    The remaining components become a new attempt with a new save id, because the content differs
    from the save. Shard files are hard links where the storage supports them, otherwise checked
    copies. The new attempt gets the metrics, the pin and the tags, but not the verifications and
    leases. On return it is durable, and the old attempt is removed. If this raises, the checkpoint
    is unchanged, unless the error says otherwise. After an interrupt or a crash call it again: that
    also moves a remaining pin and tags. One process calls this. `progress` counts copied bytes. It
    may be called from other threads, one call at a time.

    Raises ConflictError if the checkpoint is pinned, tagged or leased, unless `force`. With `force`
    a leased attempt stays next to the new one. `dist-ckpt gc` removes it when the lease has ended.
    Raises ValueError if a component does not exist, shares its files with other components, or has
    the data of a tied tensor that would stay. Raises NotFoundError, CorruptError and StorageError
    as `dc.reshard` does.
    """
    check_flag("force", force)
    if not components or not all(isinstance(name, str) for name in components):
        raise TypeError('give the components to drop, such as strip(path, "optim")')
    storage, folder = open_resolved(path)
    return strip_at(storage, folder, frozenset(components), force=force, progress=progress)


def strip_at(
    storage: Storage,
    path: str,
    names: frozenset[str],
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> SaveReport:
    """Strip the checkpoint at a real path of a storage."""
    counting = CountingStorage(storage)
    check_upgraded(counting, refuse_linked_step(path))
    phases = Phases("strip", path, quiet=False)
    opened = OpenCheckpoint.at(counting, path)
    _finish_earlier_strip(counting, path, opened.attempt, opened.index)
    remaining = _Remaining.of(opened, names)
    if not force:
        check_unprotected(
            counting, path, [opened.attempt], clock=read_storage_clock, change="strip"
        )
    with Transaction(SingleProcessChannel(), label="strip") as transaction, ExitStack() as lease:
        attempt = transaction.claim(counting, path, overwrite=True, force=force)
        # After the claim, because the claim replaces the attempt that was committed before it.
        source = lease.enter_context(leased_source(counting, path))
        if source != (opened.attempt, opened.index):
            raise ConflictError(f"{path} was replaced meanwhile: look at it, then strip again")
        with phases.phase("write"):
            records, linked = remaining.write(transaction, progress)
        with phases.phase("commit"):
            decision = transaction.commit_index(
                remaining.new_index(attempt, records),
                seconds=phases.seconds["write"],
                linked=linked,
                before=partial(_copy_annotations, counting, path, opened.index, attempt),
            )
        try:
            # Right after the commit. After a crash in between, only the next strip moves them.
            _move_protections(counting, path, opened.index, attempt)
        except CheckpointError as error:
            raise StorageError(
                f"{path} is stripped, but {opened.attempt}, which is not removed, may still have "
                f"tags: {error}. Strip it again to move them"
            ) from error
        lease.close()
        transaction.remove_superseded()
    return transaction.report(decision, phases, reads=counting.reads, writes=counting.writes)


def count_remaining(
    storage: Storage, path: str, names: frozenset[str], *, force: bool = False
) -> tuple[int, int]:
    """Return the number of tensors that a strip leaves, and the bytes of their files.

    Nothing is changed. Raises the errors that the strip raises before it writes.
    """
    check_upgraded(storage, refuse_linked_step(path))
    opened = OpenCheckpoint.at(storage, path)
    index = _Remaining.of(opened, names).index
    if not force:  # by the clock of this host: to read the clock of the storage needs a write
        check_unprotected(storage, path, [opened.attempt], change="strip")
    return len(index.catalog.tensors), sum(file.nbytes for file in index.files)


@dataclass(frozen=True, slots=True)
class _Remaining:
    """The remaining part of a checkpoint: its index, and its objects files that are not empty."""

    source: OpenCheckpoint
    index: Index
    objects: Mapping[str, ObjectsFile]

    @staticmethod
    def of(source: OpenCheckpoint, names: frozenset[str]) -> _Remaining:
        """Read the objects files and remove the components. ValueError for a bad component."""
        files = source.all_objects()
        roots = (node for file in files.values() for node in file.tree if not node.fqn)
        keys = {str(key): None for root in roots for key in root.keys}
        index = drop_from_index(source.index, names, keys)
        stripped = {name: _drop_from_objects(file, names, keys) for name, file in files.items()}
        objects = {
            name: file
            for name, file in stripped.items()
            if name == filenames.OBJECTS or file.values or file.per_rank
        }
        return _Remaining(source, index, objects)

    def write(
        self, transaction: Transaction, progress: Progress | None
    ) -> tuple[tuple[ObjectsFileRecord, ...], IoCount]:
        """Write the objects files and link the shard files. Return records, and what was linked."""
        records, target = [], transaction.folder
        for name, file in sorted(self.objects.items()):
            encoded = objects_file.encode(file)
            _, nbytes, _, digest = write_document(self.source.storage, target, name, encoded)
            records.append(ObjectsFileRecord(name, nbytes, digest))
        names = {self.index.file_name(record) for record in self.index.files}
        names |= {record.file_name for record in self.index.attached}
        files = {n: record for n, record in self.source.index.all_files.items() if n in names}
        linked = self.source.link_or_copy(
            target, files, check_room=transaction.check_room, progress=progress
        )
        return tuple(records), linked

    def new_index(self, attempt: Attempt, objects: tuple[ObjectsFileRecord, ...]) -> Index:
        """Return the index of the remaining part, with a new save id."""
        saved_by = {"stripped_by": f"dist_ckpt {__version__}", _STRIPPED_FROM: self.index.attempt}
        return replace(
            self.index,
            attempt=attempt.name,
            save=secrets.token_hex(16),
            objects=objects,
            saved_by={**self.index.saved_by, **saved_by},
        )


def _copy_annotations(storage: Storage, path: str, source: Index, attempt: Attempt) -> None:
    """Copy the metrics and the pin of the source to the new attempt, before its commit."""
    if (refs := _annotated_refs(storage, path, source, attempt)) is not None:
        old, new = refs
        annotations = read_annotations(storage, new.root)
        if metrics := metrics_by_checkpoint(annotations).get(old):
            put_metrics(storage, new.root, new.key, metrics)
        if (reason := protections_of(annotations, 0.0).pins.get(old)) is not None:
            new.put(PIN, {"pinned": True, "why": reason})


def _finish_earlier_strip(storage: Storage, path: str, attempt: Attempt, index: Index) -> None:
    """Finish an earlier strip that died right after its commit."""
    former = filenames.parse_attempt(index.saved_by.get(_STRIPPED_FROM, ""))
    if former is not None and attempts.has_folder(storage, path, former):
        _move_protections(storage, path, replace(index, attempt=former.name), attempt)
        removal.remove_superseded(storage, path, attempt)


def _move_protections(storage: Storage, path: str, source: Index, target: Attempt) -> None:
    """Move the tags of the old attempt to the new one, and remove the old one's pin."""
    if (refs := _annotated_refs(storage, path, source, target)) is None:
        return
    old, new = refs
    protections = protections_of(read_annotations(storage, new.root), 0.0)
    for name in protections.tags.get(old, ()):
        protection_protocol.tag(new, name)
    if old in protections.pins:
        protection_protocol.unpin(CheckpointRef(storage, new.root, path, old))


def _annotated_refs(
    storage: Storage, path: str, source: Index, target: Attempt
) -> tuple[CheckpointKey, CheckpointRef] | None:
    """Return the references of the source and of the new attempt. None outside of a run."""
    root = path.rpartition("/")[0] or "/"
    attempt = filenames.parse_attempt(source.attempt)
    if source.step is None or attempt is None or not can_keep_records(storage, root):
        return None
    new = CheckpointRef(storage, root, path, (source.step, target))
    return (source.step, attempt), new


# --- the remaining index. Pure -----------------------------------------------------------------


def drop_from_index(index: Index, names: Collection[str], keys: Collection[str]) -> Index:
    """Return the index without the top-level keys `names`. `keys` are all top-level keys.

    The names of the files do not change. Raises ValueError for an unknown name, for tensors that
    share files with tensors that stay, and for a tied tensor that would lose its data.
    """
    catalog = index.catalog
    if unknown := [name for name in names if name not in keys]:
        raise ValueError(
            f"{listed(unknown)}: not a component of this checkpoint; it has {listed(list(keys))}"
        )
    if not set(keys) - set(names):
        raise ValueError(
            f"{listed(sorted(names))} are all components, so nothing would remain: delete the "
            f"checkpoint instead (dc.delete, on the command line `dist-ckpt rm`)"
        )
    dropped = {fqn for fqn in catalog.tensors if top_level_key(fqn, keys) in names}
    numbers = {catalog.tensors[fqn].component for fqn in dropped}
    for fqn, record in catalog.tensors.items():
        if record.component in numbers and fqn not in dropped:
            raise ValueError(
                f"{fqn} is stored in the same files as tensors of {listed(sorted(names))}, because "
                f"the state has many top-level keys. Load the part that you want, and save it"
            )
    aliases = {f: to for f, to in catalog.aliases.items() if top_level_key(f, keys) not in names}
    if tied := sorted(fqn for fqn, to in aliases.items() if to in dropped):
        raise ValueError(
            f"{listed(tied)} would lose their data, which is stored as "
            f"{listed(sorted({aliases[fqn] for fqn in tied}))}: strip both, or neither"
        )
    values = {f: rank for f, rank in catalog.values.items() if top_level_key(f, keys) not in names}
    per_rank = {f: ks for f, ks in catalog.per_rank.items() if top_level_key(f, keys) not in names}
    rest = replace(catalog, aliases=aliases, values=values, per_rank=per_rank)
    left = _drop_tensors(replace(index, catalog=rest), dropped, numbers)
    versions = versions_of_names(catalog.versions, left.catalog.names)
    return replace(left, catalog=replace(left.catalog, versions=versions))


def _drop_tensors(index: Index, dropped: Collection[str], numbers: Collection[int]) -> Index:
    """Return the index without some tensors, and without the components of these `numbers`."""
    catalog = index.catalog
    tensors = {fqn: record for fqn, record in catalog.tensors.items() if fqn not in dropped}
    components = [n for n in range(len(catalog.components)) if n not in numbers]
    layouts = sorted({record.layout for record in tensors.values()})
    new_component = {old: new for new, old in enumerate(components)}
    new_layout = {old: new for new, old in enumerate(layouts)}
    return replace(
        index,
        catalog=replace(
            catalog,
            components=tuple(catalog.components[n] for n in components),
            layouts=tuple(catalog.layouts[n] for n in layouts),
            tensors={
                fqn: replace(
                    record,
                    component=new_component[record.component],
                    layout=new_layout[record.layout],
                )
                for fqn, record in tensors.items()
            },
            parameters={f: trained for f, trained in catalog.parameters.items() if f in tensors},
            fused={fqn: of for fqn, of in catalog.fused.items() if fqn in tensors},
        ),
        files=tuple(
            replace(file, component=new_component[file.component])
            for file in index.files
            if file.component not in numbers
        ),
    )


def _drop_from_objects(
    file: ObjectsFile, names: Collection[str], keys: Collection[str]
) -> ObjectsFile:
    def stays(fqn: str) -> bool:
        return top_level_key(fqn, keys) not in names

    return replace(
        file,
        tree=tuple(
            node
            if node.fqn
            else Node("", node.kind, tuple(key for key in node.keys if str(key) not in names))
            for node in file.tree
            if stays(node.fqn)
        ),
        values={fqn: value for fqn, value in file.values.items() if stays(fqn)},
        per_rank={fqn: values for fqn, values in file.per_rank.items() if stays(fqn)},
        numpy=tuple(fqn for fqn in file.numpy if stays(fqn)),
        objects=tuple(fqn for fqn in file.objects if stays(fqn)),
        uncut={fqn: how for fqn, how in file.uncut.items() if stays(fqn)},
    )


def top_level_key(fqn: str, keys: Collection[str]) -> str | None:
    """Return the top-level key above a name. If several match, return the longest."""
    while fqn not in keys:
        if "." not in fqn:
            return None
        fqn = fqn.rpartition(".")[0]
    return fqn
