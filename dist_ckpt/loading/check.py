"""What one rank does before anything is read: ask, then examine what was found."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace

from msgspec import structs

from dist_ckpt.binding.bind import Binding, Template, bind, saved_of, survey
from dist_ckpt.binding.saved_tree import Saved
from dist_ckpt.comm.host_links import HostLinks
from dist_ckpt.comm.session import Session
from dist_ckpt.errors import CorruptError
from dist_ckpt.format import filenames
from dist_ckpt.format.index import Index
from dist_ckpt.format.objects_file import ObjectsFile
from dist_ckpt.loading.load_steps import Findings, Found, LoadRequest, bits_of, short
from dist_ckpt.loading.options import LoadOptions
from dist_ckpt.loading.read_once_agreement import listen
from dist_ckpt.loading.read_once_units import runs_of
from dist_ckpt.planning.load_planner import plan_load, problems_of
from dist_ckpt.planning.read_sharing import BlockWants
from dist_ckpt.planning.selection import Selection
from dist_ckpt.runtime import typed_msgpack
from dist_ckpt.runtime.gc_pause import paused_collector
from dist_ckpt.shard_io.open_files import OpenFiles, open_files, read_objects
from dist_ckpt.shard_io.reading_work import CellTargets
from dist_ckpt.snapshots.kept_files import KeptFiles
from dist_ckpt.snapshots.overlay_storage import SnapshotStorage
from dist_ckpt.state.containers import MutableState
from dist_ckpt.state.plain_torch import make
from dist_ckpt.state.tree import frozen_names
from dist_ckpt.storage import Storage, open_storage
from dist_ckpt.storage.counting import CountingStorage


@dataclass(frozen=True, slots=True)
class LoadCall:
    """What a rank's call of `load` was given."""

    ranks: Session
    state: MutableState
    path: str | os.PathLike[str]
    options: LoadOptions
    storage: Storage | None
    kept: KeptFiles


@dataclass(frozen=True, slots=True)
class Asked:
    """What a rank asks for, its options checked: the `request`, its template and storage.

    `storage` serves what is kept in memory from there; `counting` counts what is not.
    """

    request: LoadRequest
    template: Template
    storage: SnapshotStorage
    counting: CountingStorage

    def at(self, path: str) -> Asked:
        """Return it for a checkpoint that was found at `path`: what was asked may be a selector."""
        return replace(self, request=structs.replace(self.request, path=path))


def ask(call: LoadCall) -> Asked:
    """Look at what the caller gave. Raises ValueError or TypeError for what makes no sense."""
    options, ranks = call.options, call.ranks
    options.check()
    # What is read twice, or by several ranks, is left to the page cache to fetch once.
    direct_reads = options.read_once != "off" and not options.check_first
    own, path = open_storage(call.path, direct_reads=direct_reads)
    counting = CountingStorage(call.storage or own)
    storage = SnapshotStorage(counting)
    storage.serve(call.kept.unfound)
    template = survey(
        call.state,
        sharding=options.sharding,
        rank=ranks.channel.rank,
        world_size=ranks.channel.world_size,
        group_ranks=ranks.group_ranks,
    )
    request = LoadRequest(
        path=path,
        strict=options.strict,
        check_first=options.check_first,
        read_once=options.read_once,
        host=ranks.channel.host,
        keys=tuple(template.keys.items()),
        bulk=ranks.bulk.epoch,
    )
    return Asked(request, template, storage, counting)


@dataclass(frozen=True, slots=True)
class Checked:
    """A checkpoint that fits this rank's state: what goes where, and the open files with it.

    `targets` are None while memory is yet to be made. `wants` is what this rank reads, as a
    message, and `links` lets others connect; b"" and None if the ranks can share nothing.
    """

    found: Found
    saved: Saved
    binding: Binding
    files: OpenFiles
    targets: CellTargets | None
    links: HostLinks | None
    wants: bytes

    def names_of(self, fqns: Iterable[str]) -> tuple[str, ...]:
        """Return the names under which the state has some tensors of the index."""
        here: dict[str, list[str]] = {}
        for name in self.binding.restored:
            if (tensor := self.saved.tensor(name)) is not None:
                here.setdefault(tensor[0], []).append(name)
        return tuple(name for fqn in fqns for name in here.get(fqn, [fqn]))


def examine(
    call: LoadCall, asked: Asked, found: Found, stack: ExitStack
) -> tuple[Checked | None, Findings]:
    """Bind, plan, and open what will be read; nothing live changes.

    None if there are problems. `stack` gets what is to be closed after the load.
    """
    index, options, ranks = found.index, call.options, call.ranks
    folder = f"{asked.request.path}/{found.attempt.name}"

    def read(name: str) -> ObjectsFile:
        return _read_objects(asked.storage, folder, index, name)

    kept = call.kept.found(asked.request.path, index, stack)
    asked.storage.serve(kept)
    main = read(filenames.OBJECTS)
    with paused_collector():
        saved = saved_of(
            index.catalog,
            main,
            lambda rank: read(filenames.objects_file(rank)),
            rename=options.rename,
        )
        binding = bind(
            asked.template,
            saved,
            strict=options.strict,
            selection=_selection(options, asked.template),
            keys=found.keys,
        )
        problems = (*binding.problems, *problems_of(index.catalog, binding.wanted))
        unclaimed = bits_of(binding.unclaimed, found.names)
        if problems:
            return None, Findings(problems, binding.unmatched, unclaimed)
        plan = plan_load(index, binding.wanted)
    threads = ranks.config.threads
    files = open_files(asked.storage, folder, index, plan, threads=threads)
    stack.callback(files.close)
    targets = None if binding.makes_memory else binding.allocate()
    links, wants = None, b""
    if found.meeting:
        links = listen(ranks, found.meeting, stack)
        wants = typed_msgpack.encode(BlockWants.of(ranks.channel.host, runs_of(files)))
    findings = Findings(
        unmatched=binding.unmatched,
        unclaimed=unclaimed,
        makes_memory=binding.makes_memory,
        places=binding.places,
        loads_objects=binding.loads_objects,
        wants=short(wants, ranks.channel.world_size),
        from_memory=bool(kept),
    )
    checked = Checked(found, saved, binding, files, targets, links, wants)
    return checked, findings


def _selection(options: LoadOptions, template: Template) -> Selection:
    selection = options.selection()
    if selection.frozen:
        return selection
    return replace(selection, without=frozen_names(template.root))


def _read_objects(storage: Storage, folder: str, index: Index, name: str) -> ObjectsFile:
    for record in index.objects:
        if record.name == name:
            return read_objects(storage, folder, record, make=make)
    raise CorruptError(f"{folder}: the index lists no {name}; load an older checkpoint")
