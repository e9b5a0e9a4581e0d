"""`dc.strip`: drop components from a checkpoint, such as an old one's optimizer, without torch.

A committed attempt is never modified: what stays is linked into a new one, which then takes the
place of the old one, as a save that overwrites does.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from dist_ckpt import __version__
from dist_ckpt.core.checkpoint.open_checkpoint import OpenCheckpoint
from dist_ckpt.core.comm.exchange.channel import SingleProcessChannel
from dist_ckpt.core.commit import attempts, removal
from dist_ckpt.core.commit.records import leases
from dist_ckpt.core.commit.records.leases import CheckpointRef, leased_source, protections_at
from dist_ckpt.core.commit.records.protections import PIN, Where, protections_of
from dist_ckpt.core.commit.records.record_store import (
    can_keep_records,
    check_upgraded,
    read_annotations,
)
from dist_ckpt.core.commit.removal import now_at
from dist_ckpt.core.format import filenames
from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.core.format.index.index import (
    Catalog,
    Index,
    Node,
    ObjectsFileRecord,
    ShardFileRecord,
)
from dist_ckpt.core.format.objects import objects_file
from dist_ckpt.core.format.objects.objects_file import ObjectsFile
from dist_ckpt.core.saving.transaction import Transaction
from dist_ckpt.core.shard_io.write.copied_files import files_of
from dist_ckpt.core.shard_io.write.shard_writer import write_objects
from dist_ckpt.core.storage import Storage
from dist_ckpt.core.storage.forwarding import CountingStorage
from dist_ckpt.errors import CheckpointError, ConflictError, StorageError, listed
from dist_ckpt.reports import IoCount, Phases, Progress, SaveReport
from dist_ckpt.runs.annotations import annotations_of, put_metrics
from dist_ckpt.runs.selectors import open_resolved

# In `saved_by`: the attempt that this one has taken the place of.
_STRIPPED_FROM = "stripped_from"


def strip(
    path: str | os.PathLike[str],
    *components: str,
    force: bool = False,
    progress: Progress | None = None,
) -> SaveReport:
    """Drop components, top-level keys of the state, from the checkpoint at `path`, for good.

    What is left is a new attempt with an id of its own, for it holds less than the save did. Its
    shard files are hard links where the storage makes them, else checked copies. What was measured
    of the checkpoint, its pin and its tags are the new attempt's as well; that it was checked, and
    who holds it, are not. On return it is durable, and the old attempt removed; if this raises, the
    checkpoint is what it was, unless the error says otherwise. One process calls it. If it was
    interrupted, or its process died, call it again: that also moves pin and tags that were left.
    `progress` is told of what is copied, maybe by other threads, by one at a time.

    Raises ConflictError if the checkpoint is pinned, tagged or held, unless `force`: what is held
    then stays, beside what takes its place, until it is not, and `dist-ckpt gc` removes it. Raises
    ValueError for a component that is not there, shares its files with others, or has the data of a
    tied tensor that would stay; NotFoundError, CorruptError and StorageError as `dc.reshard` does.
    """
    if type(force) is not bool:
        raise TypeError(f"force={force!r}: give True or False")
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
    """Do so for a checkpoint at a storage's path, in which no link leads elsewhere."""
    counting = CountingStorage(storage)
    check_upgraded(counting, os.path.dirname(path))
    phases = Phases("strip", path, quiet=False)
    found = attempts.find(counting, path)
    _finish_former(counting, path, *found)
    part = _Part.of(OpenCheckpoint(counting, path, *found), names)
    if not force:
        _check_unprotected(protections_at(counting, path, [found[0]], now_at), path)
    with (
        Transaction(SingleProcessChannel(), label="strip") as transaction,
        ExitStack() as lease,
    ):
        attempt = transaction.claim(counting, path, overwrite=True, force=force)
        # Only now: what was committed before the claim is what it will replace.
        source = lease.enter_context(leased_source(counting, path))
        if source != found:
            raise ConflictError(f"{path} was replaced meanwhile: look at it, then strip again")
        with phases.phase("write"):
            records, linked = part.write(transaction.folder, progress)
        with phases.phase("commit"):
            decision = transaction.commit_index(
                part.index(attempt, records),
                seconds=phases.seconds["write"],
                linked=linked,
                before=partial(_copy_annotations, counting, path, source[1], attempt),
            )
        try:
            # At once: if this dies before, only the next strip moves them.
            _move_protections(counting, path, source[1], attempt)
        except CheckpointError as error:
            raise StorageError(
                f"{path} is stripped, but tags may be on {source[0]} still, which stays beside "
                f"it: {error}. Strip it again, which moves them"
            ) from error
        lease.close()
        transaction.supersede()
    return transaction.report(decision, phases, reads=counting.reads, writes=counting.writes)


def remaining_after(
    storage: Storage, path: str, names: frozenset[str], *, force: bool = False
) -> tuple[int, int]:
    """Return how many tensors a strip would leave, and the bytes of their files; change nothing.

    Raises what the strip would before it writes.
    """
    check_upgraded(storage, os.path.dirname(path))
    attempt, index = attempts.find(storage, path)
    left = _Part.of(OpenCheckpoint(storage, path, attempt, index), names).left
    if not force:  # by our own clock: to ask the storage's, a strip writes
        _check_unprotected(protections_at(storage, path, [attempt], lambda *_: time.time()), path)
    return len(left.catalog.tensors), sum(one.nbytes for one in left.files)


def _check_unprotected(protections: Mapping[Attempt, Sequence[str]], path: str) -> None:
    for why in protections.values():
        raise ConflictError(
            f"{path} is protected: {'; '.join(why)}. Remove the protection first, or strip it "
            f"with force=True (on the command line --force)"
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """What is left of a checkpoint: `files` are its objects files that still hold something."""

    source: OpenCheckpoint
    left: ReducedCheckpoint
    files: Mapping[str, ObjectsFile]

    @staticmethod
    def of(source: OpenCheckpoint, names: frozenset[str]) -> _Part:
        """Read the objects files, and see what is left. ValueError if that makes no sense."""
        files = source.all_objects()
        keys = top_level_keys(node for file in files.values() for node in file.tree)
        left = drop_from_index(source.index, names, keys)
        stripped = {name: _reduce_objects(file, names, keys) for name, file in files.items()}
        kept = {
            name: file
            for name, file in stripped.items()
            if name == filenames.OBJECTS or file.values or file.per_rank
        }
        return _Part(source, left, kept)

    def write(
        self, target: str, progress: Progress | None
    ) -> tuple[tuple[ObjectsFileRecord, ...], IoCount]:
        """Write the objects files, link all others; return the former, and what was linked."""
        records = []
        for name, file in sorted(self.files.items()):
            encoded = objects_file.encode(file)
            _, nbytes, _, digest = write_objects(self.source.storage, target, name, encoded)
            records.append(ObjectsFileRecord(name, nbytes, digest))
        kept = {
            filenames.shard_file(self.left.catalog.components[one.component].stem, one.rank)
            for one in self.left.files
        }
        index = self.source.index
        attached = {record.file_name for record in index.attached}
        carried = {n: file for n, file in files_of(index).items() if n in kept or n in attached}
        linked = self.source.link_or_copy(target, carried, progress=progress)
        return tuple(records), linked

    def index(self, attempt: Attempt, objects: tuple[ObjectsFileRecord, ...]) -> Index:
        """Return the index of what is left, of a save with an id of its own."""
        index = self.source.index
        return replace(
            index,
            attempt=attempt.name,
            save=secrets.token_hex(16),
            catalog=self.left.catalog,
            files=self.left.files,
            objects=objects,
            saved_by={
                **index.saved_by,
                "stripped_by": f"dist_ckpt {__version__}",
                _STRIPPED_FROM: index.attempt,
            },
        )


def _reduce_objects(
    file: ObjectsFile, names: frozenset[str], keys: Mapping[str, None]
) -> ObjectsFile:
    def stays(fqn: str) -> bool:
        return owner_of(fqn, keys) not in names

    return replace(
        file,
        tree=tuple(drop_from_tree(file.tree, names, keys)),
        values={fqn: value for fqn, value in file.values.items() if stays(fqn)},
        per_rank={fqn: values for fqn, values in file.per_rank.items() if stays(fqn)},
        numpy=tuple(fqn for fqn in file.numpy if stays(fqn)),
    )


def _copy_annotations(storage: Storage, path: str, source: Index, attempt: Attempt) -> None:
    """Give the new attempt the metrics and the pin of its source, before it is committed."""
    if (places := _places(storage, path, source, attempt)) is not None:
        old, new = places
        facts = read_annotations(storage, new.root)
        if measured := annotations_of(facts, 0.0).metrics.get(old):
            put_metrics(storage, new.root, new.where, measured)
        if (why := protections_of(facts, 0.0).pins.get(old)) is not None:
            new.put(PIN, {"pinned": True, "why": why})


def _finish_former(storage: Storage, path: str, attempt: Attempt, index: Index) -> None:
    """Do what a strip that died right after its commit has left to do."""
    former = filenames.parse_attempt(index.saved_by.get(_STRIPPED_FROM, ""))
    if former is not None and attempts.is_there(storage, path, former):
        _move_protections(storage, path, replace(index, attempt=former.name), attempt)
        removal.supersede(storage, path, attempt)


def _move_protections(storage: Storage, path: str, source: Index, target: Attempt) -> None:
    """Have the new attempt kept for what the old one was kept for, and the old one no more."""
    if (places := _places(storage, path, source, target)) is None:
        return
    old, new = places
    protections = protections_of(read_annotations(storage, new.root), 0.0)
    for name in protections.tags.get(old, ()):
        leases.tag(new, name)
    if old in protections.pins:
        leases.unpin(CheckpointRef(storage, new.root, path, old))


def _places(
    storage: Storage, path: str, source: Index, target: Attempt
) -> tuple[Where, CheckpointRef] | None:
    """Return what facts are about: the source, and the new attempt. None if there are no facts."""
    root = path.rpartition("/")[0] or "/"
    attempt = filenames.parse_attempt(source.attempt)
    if source.step is None or attempt is None or not can_keep_records(storage, root):
        return None
    new = CheckpointRef(storage, root, path, (source.step, target))
    return (source.step, attempt), new


# --- the index that remains. Pure -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReducedCheckpoint:
    """What is left of an index: its catalog, and its shard files, which keep their names."""

    catalog: Catalog
    files: tuple[ShardFileRecord, ...]


def drop_from_index(
    index: Index, names: Collection[str], keys: Collection[str]
) -> ReducedCheckpoint:
    """Return what is left without these top-level keys of the state; `keys` are those of all. Pure.

    ValueError for a name that is none, for tensors that share files with others that stay, and for
    a tied tensor that stays while its data would go.
    """
    catalog = index.catalog
    if unknown := [name for name in names if name not in keys]:
        raise ValueError(
            f"{listed(unknown)}: no such component is here; there are {listed(list(keys))}"
        )
    if not set(keys) - set(names):
        raise ValueError(
            f"{listed(sorted(names))} are all that is here, and nothing would be left: delete the "
            f"checkpoint instead (dc.delete, on the command line `dist-ckpt rm`)"
        )
    dropped = {fqn for fqn in catalog.tensors if owner_of(fqn, keys) in names}
    numbers = {catalog.tensors[fqn].component for fqn in dropped}
    _check_files(catalog, dropped, numbers, names)
    aliases = {f: to for f, to in catalog.aliases.items() if owner_of(f, keys) not in names}
    if tied := sorted(fqn for fqn, to in aliases.items() if to in dropped):
        raise ValueError(
            f"{listed(tied)} would lose their data, which is stored as "
            f"{listed(sorted({aliases[fqn] for fqn in tied}))}: strip both, or neither"
        )
    return _reduce_index(index, dropped, numbers, aliases, names, keys)


def _check_files(
    catalog: Catalog, dropped: Collection[str], numbers: Collection[int], names: Collection[str]
) -> None:
    """Raise ValueError if a tensor that stays is in a file that goes."""
    for fqn, record in catalog.tensors.items():
        if record.component in numbers and fqn not in dropped:
            raise ValueError(
                f"{fqn} is stored in the same files as tensors of {listed(sorted(names))}, as all "
                f"are of a state with many top-level keys: load what you want of it and save that"
            )


def _reduce_index(
    index: Index,
    dropped: Collection[str],
    numbers: Collection[int],
    aliases: Mapping[str, str],
    names: Collection[str],
    keys: Collection[str],
) -> ReducedCheckpoint:
    catalog = index.catalog
    kept = {fqn: one for fqn, one in catalog.tensors.items() if fqn not in dropped}
    components = [n for n in range(len(catalog.components)) if n not in numbers]
    layouts = sorted({record.layout for record in kept.values()})
    new_component = {old: new for new, old in enumerate(components)}
    new_layout = {old: new for new, old in enumerate(layouts)}
    reduced = replace(
        catalog,
        components=tuple(catalog.components[n] for n in components),
        layouts=tuple(catalog.layouts[n] for n in layouts),
        tensors={
            fqn: replace(one, component=new_component[one.component], layout=new_layout[one.layout])
            for fqn, one in kept.items()
        },
        aliases=aliases,
        values={f: rank for f, rank in catalog.values.items() if owner_of(f, keys) not in names},
        per_rank={f: ks for f, ks in catalog.per_rank.items() if owner_of(f, keys) not in names},
        parameters={f: trained for f, trained in catalog.parameters.items() if f in kept},
    )
    files = tuple(
        replace(file, component=new_component[file.component])
        for file in index.files
        if file.component not in numbers
    )
    return ReducedCheckpoint(reduced, files)


def drop_from_tree(
    tree: Iterable[Node], names: Collection[str], keys: Collection[str]
) -> list[Node]:
    """Return the containers without those of some top-level keys, and the root without the keys."""
    kept = [node for node in tree if owner_of(node.fqn, keys) not in names]
    return [node if node.fqn else _root_without(node, names) for node in kept]


def _root_without(root: Node, names: Collection[str]) -> Node:
    return Node(root.fqn, root.kind, tuple(key for key in root.keys if str(key) not in names))


def top_level_keys(tree: Iterable[Node]) -> dict[str, None]:
    """Return the top-level keys of a state, in order."""
    return {str(key): None for node in tree if not node.fqn for key in node.keys}


def owner_of(fqn: str, keys: Collection[str]) -> str | None:
    """Return the top-level key that a name lies under: of several that fit, the longest."""
    while fqn not in keys:
        if "." not in fqn:
            return None
        fqn = fqn.rpartition(".")[0]
    return fqn
