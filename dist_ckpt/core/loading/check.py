"""What one rank does before anything is read: ask, then examine what was found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from msgspec import structs

from dist_ckpt.core.checkpoint.open_checkpoint import MemorySource, OpenCheckpoint, Opener
from dist_ckpt.core.comm.collectives.host_links import HostLinks
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.format.index.model_description import problems_of_description
from dist_ckpt.core.format.objects.objects_file import ObjectsFile
from dist_ckpt.core.loading.load_messages import (
    CheckFindings,
    LoadRequest,
    ResolvedSources,
    bits_of,
)
from dist_ckpt.core.loading.load_options import LoadOptions, Sources, SourceShare, uses_of
from dist_ckpt.core.loading.shared_read_group import listen, runs_of, short
from dist_ckpt.core.planning.load.load_planner import plan_load, problems_of
from dist_ckpt.core.planning.load.read_sharing import BlockRequests
from dist_ckpt.core.planning.plan import ReadItem, TensorRequest
from dist_ckpt.core.planning.selection import SELECT_ALL, Selection, cast_of, selection_of
from dist_ckpt.core.runtime import typed_msgpack
from dist_ckpt.core.runtime.gc_pause import paused_collector
from dist_ckpt.core.shard_io.read.open_files import MAX_OPEN, OpenFile, OpenFiles, open_files
from dist_ckpt.core.shard_io.read.read_work import CellTargets
from dist_ckpt.core.state.binding.bind import Binding, Template, bind, read_template, saved_tree_of
from dist_ckpt.core.state.binding.sources.multi_source import SourceView, merge_sources
from dist_ckpt.core.state.binding.sources.rename import rename_of
from dist_ckpt.core.state.binding.sources.saved_tree import (
    SavedTree,
    Scope,
    Scopes,
    tagged,
    untagged,
)
from dist_ckpt.core.state.tree.containers import MutableState
from dist_ckpt.core.state.tree.leaves import without_frozen
from dist_ckpt.core.storage import Storage
from dist_ckpt.core.storage.forwarding import CountingStorage
from dist_ckpt.core.storage.virtual_files import OverlayStorage
from dist_ckpt.reports import LoadedSource


@dataclass(frozen=True, slots=True)
class LoadCall:
    """What a rank's call of `load` was given."""

    ranks: Session
    state: MutableState
    path: Sources
    options: LoadOptions
    storage: Storage | None
    kept: MemorySource
    opener: Opener


@dataclass(frozen=True, slots=True)
class StorageLocation:
    """Where one checkpoint is read.

    `storage` serves what is kept in memory from there; `counting` counts what is not.
    """

    storage: OverlayStorage
    counting: CountingStorage


@dataclass(frozen=True, slots=True)
class LoadArguments:
    """What a rank asks for, its options checked: the `request`, its template, and its sources.

    `uses` say what is taken of each of the `places`, and `selection` which names that is.
    """

    request: LoadRequest
    template: Template
    places: tuple[StorageLocation, ...]
    uses: tuple[SourceShare, ...]
    selection: Selection | Scopes

    @property
    def storages(self) -> list[OverlayStorage]:
        """The storage of each place."""
        return [place.storage for place in self.places]

    def at(self, paths: Sequence[str]) -> LoadArguments:
        """Return it for checkpoints that were found at `paths`: what was asked may be selectors."""
        path = paths[0] if len(paths) == 1 else tuple(paths)
        return replace(self, request=structs.replace(self.request, path=path))

    def selection_in(self, found: ResolvedSources) -> Selection | Scopes:
        """Return the selection, with the paths of what was found."""
        if not isinstance(self.selection, Scopes):
            return self.selection
        scopes = zip(self.uses, self.selection.scopes, strict=True)
        paths = [one.path for one in found.checkpoints]
        return replace(
            self.selection, scopes=tuple(replace(of, path=paths[u.place]) for u, of in scopes)
        )


def read_arguments(call: LoadCall) -> LoadArguments:
    """Look at what the caller gave. Raises ValueError or TypeError for what makes no sense."""
    options, ranks = call.options, call.ranks
    options.check()
    paths, uses = uses_of(call.path)
    template = read_template(
        call.state,
        sharding=options.sharding,
        rank=ranks.channel.rank,
        world_size=ranks.channel.world_size,
        group_ranks=ranks.group_ranks,
    )
    selection = _selection(options, uses, template)
    request = LoadRequest(
        path=paths[0] if len(paths) == 1 else paths,
        sources=tuple((use.key, paths[use.place]) for use in uses),
        strict=options.strict,
        check_first=options.check_first,
        read_once=options.read_once,
        host=ranks.channel.host,
        keys=tuple(template.keys.items()),
        bulk=ranks.collectives_group.epoch,
    )
    return LoadArguments(
        request, template, tuple(_place(call, path) for path in paths), uses, selection
    )


def _place(call: LoadCall, path: str) -> StorageLocation:
    # What is read twice, or by several ranks, is left to the page cache to fetch once.
    direct_reads = call.options.read_once != "off" and not call.options.check_first
    storage = call.storage or call.opener.open(path, direct_reads=direct_reads)[0]
    counting = CountingStorage(storage)
    with_kept = OverlayStorage(counting)
    with_kept.serve(call.kept.unfound)
    return StorageLocation(with_kept, counting)


def _selection(
    options: LoadOptions, uses: Sequence[SourceShare], template: Template
) -> Selection | Scopes:
    """Return the names that a load is about. Raises TypeError or ValueError for bad patterns."""
    asked = without_frozen(options.selection(), template.root)
    own = [selection_of(use.source.include, use.source.exclude) for use in uses]
    for use in uses:
        rename_of(use.source.rename)
        if options.rename is not None and (len(uses) > 1 or use.source.rename is not None):
            raise ValueError(
                "rename is given to a load from several sources, or twice: give each dc.Source "
                "its own"
            )
    if len(uses) == 1 and not uses[0].key and SELECT_ALL in (asked, *own):
        return own[0] if asked == SELECT_ALL else asked
    scopes = (Scope(str(u.source.path), u.key, of) for u, of in zip(uses, own, strict=True))
    return Scopes(asked, tuple(scopes))


@dataclass(frozen=True, slots=True)
class PreparedLoad:
    """Checkpoints that fit this rank's state: what goes where, and the open files with it.

    `targets` are None while memory is yet to be made. `wants` is what this rank reads, as a
    message, and `links` lets others connect; b"" and None if the ranks can share nothing.
    """

    found: ResolvedSources
    saved: SavedTree
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

    def sources(self) -> tuple[LoadedSource, ...]:
        """Return what came from each checkpoint."""
        restored: list[list[str]] = [[] for _ in self.found.checkpoints]
        for name in self.binding.restored:
            restored[self.saved.number_of(name)].append(name)
        return tuple(
            LoadedSource(one.path, one.index.step, one.index.attempt, tuple(names))
            for one, names in zip(self.found.checkpoints, restored, strict=True)
        )


def check_load(
    call: LoadCall, asked: LoadArguments, found: ResolvedSources, stack: ExitStack
) -> tuple[PreparedLoad | None, CheckFindings]:
    """Bind, plan, and open what will be read; nothing live changes.

    None if there are problems. `stack` gets what is to be closed after the load.
    """
    options, ranks = call.options, call.ranks
    from_memory = _serve(call, asked, found, stack)
    selection = asked.selection_in(found)
    contents: list[_MainAndOthers] = [(one.objects(), one.objects) for one in found.checkpoints]
    saved = _saved(options, asked, selection, found, contents)
    with paused_collector():
        binding = bind(
            asked.template,
            saved,
            strict=options.strict,
            selection=selection,
            keys=found.keys,
            cast=cast_of(options.cast),
        )
        wanted = by_checkpoint(binding.wanted, saved)
        problems = (
            *_of_description(options, found, contents),
            *binding.problems,
            *(
                problem
                for one, some in zip(found.checkpoints, wanted, strict=False)
                for problem in problems_of(one.index.catalog, some)
            ),
        )
        unclaimed = bits_of(binding.unclaimed, _names(found, saved))
        if problems:
            return None, CheckFindings(problems, binding.unmatched, unclaimed)
    files = open_all(found.checkpoints, wanted, saved, threads=ranks.config.threads, stack=stack)
    targets = None if binding.makes_memory else binding.allocate()
    links, wants = None, b""
    if found.meeting:
        links = listen(ranks, found.meeting, stack)
        wants = typed_msgpack.encode(BlockRequests.of(ranks.channel.host, runs_of(files)))
    findings = CheckFindings(
        unmatched=binding.unmatched,
        unclaimed=unclaimed,
        makes_memory=binding.makes_memory,
        places=binding.assigns_values,
        loads_objects=binding.loads_objects,
        wants=short(wants, ranks.channel.world_size),
        from_memory=from_memory,
    )
    checked = PreparedLoad(found, saved, binding, files, targets, links, wants)
    return checked, findings


def _serve(call: LoadCall, asked: LoadArguments, found: ResolvedSources, stack: ExitStack) -> bool:
    """Let what is in memory be read from there; say whether anything is."""
    any_kept = False
    for storage, one in zip(asked.storages, found.checkpoints, strict=True):
        kept = call.kept.found(one.path, one.index, stack)
        storage.serve(kept)
        any_kept = any_kept or bool(kept)
    return any_kept


# The main objects file of a checkpoint, and what reads those of its ranks.
_MainAndOthers = tuple[ObjectsFile, Callable[[int], ObjectsFile]]


def _of_description(
    options: LoadOptions, found: ResolvedSources, contents: Sequence[_MainAndOthers]
) -> Iterator[str]:
    """Yield what is otherwise in a checkpoint's kind and configuration than who loads it has."""
    for one, (main, _) in zip(found.checkpoints, contents, strict=True):
        of_one = f"{one.path}, " if len(contents) > 1 else ""
        for problem in problems_of_description(main.metadata, options.config, options.kind):
            yield of_one + problem


def _saved(
    options: LoadOptions,
    asked: LoadArguments,
    selection: Selection | Scopes,
    found: ResolvedSources,
    contents: Sequence[_MainAndOthers],
) -> SavedTree:
    """Return what the checkpoints hold, under the names of the state."""
    with paused_collector():
        each = [
            saved_tree_of(
                found.checkpoints[use.place].index.catalog,
                *contents[use.place],
                rename=options.rename if use.source.rename is None else use.source.rename,
            )
            for use in asked.uses
        ]
        if not isinstance(selection, Scopes):
            return each[0]
        offers = [
            SourceView(use.place, saved, scope)
            for use, saved, scope in zip(asked.uses, each, selection.scopes, strict=True)
        ]
        return merge_sources(offers, [one.path for one in found.checkpoints])


def _names(found: ResolvedSources, saved: SavedTree) -> Sequence[str]:
    """Return the names of all that was saved, as `Binding.unclaimed` has them."""
    if not saved.origins:
        return found.names
    every = enumerate(found.checkpoints)
    return [tagged(number, name) for number, one in every for name in one.names]


# --- the files of several checkpoints --------------------------------------------------------


def by_checkpoint(wanted: Iterable[TensorRequest], saved: SavedTree) -> list[list[TensorRequest]]:
    """Return what is wanted of each checkpoint, by the names there."""
    if not saved.origins:
        return [[*wanted]]
    found: list[list[TensorRequest]] = [[] for _ in saved.origins]
    for want in wanted:
        number, fqn = untagged(want.fqn)
        found[number].append(want._replace(fqn=fqn))
    return found


def open_all(
    checkpoints: Sequence[OpenCheckpoint],
    wanted: Sequence[Sequence[TensorRequest]],
    saved: SavedTree,
    *,
    threads: int,
    stack: ExitStack,
) -> OpenFiles:
    """Open what is to be read; `stack` gets what closes it. Raises what `open_files` does.

    The files of several checkpoints are numbered one after another, alike on all ranks, and what
    is read of them has the names that `saved` has.
    """
    opened: list[OpenFiles] = []
    for one, some in zip(checkpoints, wanted, strict=True):
        with paused_collector():
            plan = plan_load(one.index, some)
        most = MAX_OPEN // len(checkpoints)
        files = open_files(
            one.storage, one.folder, one.index, plan, threads=threads, most_open=most
        )
        stack.callback(files.close)
        opened.append(files)
    return _joined(opened, checkpoints) if saved.origins else opened[0]


def _joined(opened: Sequence[OpenFiles], checkpoints: Sequence[OpenCheckpoint]) -> OpenFiles:
    plan: dict[int, tuple[ReadItem, ...]] = {}
    files: dict[int, OpenFile] = {}
    first = 0
    for number, (one, found) in enumerate(zip(opened, checkpoints, strict=True)):
        for file, items in one.plan.items():
            plan[first + file] = tuple(replace(i, fqn=tagged(number, i.fqn)) for i in items)
            files[first + file] = one.files[file]
        first += len(found.index.files)
    return OpenFiles(plan, files)
