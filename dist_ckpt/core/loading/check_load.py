"""Prepare a load on one rank: check its arguments, then the checkpoints. No tensor is read yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain

from msgspec import structs

from dist_ckpt.core.checkpoint.open_checkpoint import OpenCheckpoint
from dist_ckpt.core.checkpoint.opener import MemoryFiles, Opener
from dist_ckpt.core.checkpoint.renamed_checkpoint import find_unequal
from dist_ckpt.core.comm.collectives.host_links import HostLinks
from dist_ckpt.core.comm.exchange.channel import COORDINATOR, fits_exchange
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.format.geometry import Shape
from dist_ckpt.core.format.index.model_description import find_description_problems
from dist_ckpt.core.format.objects.objects_file import ObjectsFile
from dist_ckpt.core.loading.load_decisions import (
    CheckFindings,
    LoadProposal,
    ResolvedSources,
    UnrequestedParts,
    encode_bitmap,
)
from dist_ckpt.core.loading.load_options import LoadOptions, Sources, SourceUse, parse_sources
from dist_ckpt.core.loading.shared_read.shared_read_group import open_shared_read
from dist_ckpt.core.planning.load.load_planner import find_request_problems, plan_load
from dist_ckpt.core.planning.name_selection import (
    SELECT_ALL,
    Selection,
    parse_cast,
    parse_resize,
    parse_selection,
)
from dist_ckpt.core.planning.plan import ReadItem, TensorRequest
from dist_ckpt.core.planning.weight_scales import QUANTIZATION, parse_blocks
from dist_ckpt.core.runtime.processes import paused_collector
from dist_ckpt.core.shard_io.read.open_files import MAX_OPEN, OpenFile, OpenFiles, open_files
from dist_ckpt.core.shard_io.read.read_grouping import CellTargets
from dist_ckpt.core.state.binding.bind import (
    Binding,
    Template,
    bind,
    build_saved_tree,
    read_template,
)
from dist_ckpt.core.state.binding.matching.dequantizer import Casting
from dist_ckpt.core.state.binding.sources.multi_source import SourceView, merge_sources
from dist_ckpt.core.state.binding.sources.rename import parse_rename
from dist_ckpt.core.state.binding.sources.saved_tree import (
    SavedTree,
    Scope,
    Scopes,
    split_source,
    with_source,
)
from dist_ckpt.core.state.tree.containers import MutableState
from dist_ckpt.core.state.tree.state_tree import without_frozen
from dist_ckpt.core.storage import Storage
from dist_ckpt.core.storage.overlay_storage import OverlayStorage
from dist_ckpt.core.storage.storage_wrappers import CountingStorage
from dist_ckpt.reports import LoadedSource

# The global objects file of a checkpoint, and a function that reads the file of a rank.
_ObjectsReader = tuple[ObjectsFile, Callable[[int], ObjectsFile]]


@dataclass(frozen=True, slots=True)
class LoadCall:
    """The arguments of a rank's call of `load_together`."""

    session: Session
    state: MutableState
    path: Sources
    options: LoadOptions
    storage: Storage | None
    memory: MemoryFiles
    opener: Opener


@dataclass(frozen=True, slots=True)
class LoadArguments:
    """The checked arguments of one rank.

    `storages` has one storage for each path. It serves the files that are in memory, and reads the
    others through a storage of `counting`, which counts them. `selection` has the names to load.
    """

    proposal: LoadProposal
    template: Template
    storages: tuple[OverlayStorage, ...]
    counting: tuple[CountingStorage, ...]
    source_uses: tuple[SourceUse, ...]
    selection: Selection | Scopes

    def with_paths(self, paths: Sequence[str]) -> LoadArguments:
        """Return the arguments with resolved paths instead of selectors."""
        path = paths[0] if len(paths) == 1 else tuple(paths)
        return replace(self, proposal=structs.replace(self.proposal, path=path))

    def resolve_selection(self, sources: ResolvedSources) -> Selection | Scopes:
        """Return the selection with resolved paths instead of selectors."""
        if not isinstance(self.selection, Scopes):
            return self.selection
        paths = [checkpoint.path for checkpoint in sources.checkpoints]
        scopes = tuple(
            replace(scope, path=paths[use.number])
            for use, scope in zip(self.source_uses, self.selection.scopes, strict=True)
        )
        return replace(self.selection, scopes=scopes)


def read_arguments(call: LoadCall) -> LoadArguments:
    """Check the arguments, and read the template of the state. Raises ValueError or TypeError."""
    options, session = call.options, call.session
    options.check()
    paths, source_uses = parse_sources(call.path)
    template = read_template(
        call.state,
        sharding=options.sharding,
        rank=session.channel.rank,
        world_size=session.channel.world_size,
        group_ranks=session.group_ranks,
    )
    selection = _parse_selections(options, source_uses, template)
    proposal = LoadProposal(
        path=paths[0] if len(paths) == 1 else paths,
        sources=tuple((use.key, paths[use.number]) for use in source_uses),
        strict=options.strict,
        check_first=options.check_first,
        read_once=options.read_once,
        host=session.channel.host,
        keys=tuple(template.keys.items()),
        connection_generation=session.collective.generation,
    )
    # Blocks that are read twice, or by several ranks, come from the page cache the second time.
    direct_reads = options.read_once != "off" and not options.check_first
    counting = tuple(
        CountingStorage(call.storage or call.opener.open(path, direct_reads=direct_reads)[0])
        for path in paths
    )
    storages = tuple(map(OverlayStorage, counting))
    for storage in storages:
        storage.serve(call.memory.uncommitted)
    return LoadArguments(proposal, template, storages, counting, source_uses, selection)


def _parse_selections(
    options: LoadOptions, source_uses: Sequence[SourceUse], template: Template
) -> Selection | Scopes:
    """Return the selection of names. Raises TypeError or ValueError for bad patterns."""
    load_selection = without_frozen(options.selection(), template.root)
    source_selections = [
        parse_selection(use.source.include, use.source.exclude) for use in source_uses
    ]
    for use in source_uses:
        parse_rename(use.source.rename)
        if options.rename is not None and (len(source_uses) > 1 or use.source.rename is not None):
            raise ValueError(
                "rename is given to a load from several sources, or twice: give each dc.Source "
                "its own"
            )
    if (
        len(source_uses) == 1
        and not source_uses[0].key
        and SELECT_ALL in (load_selection, *source_selections)
    ):
        return source_selections[0] if load_selection == SELECT_ALL else load_selection
    scopes = (
        Scope(str(use.source.path), use.key, selection)
        for use, selection in zip(source_uses, source_selections, strict=True)
    )
    return Scopes(load_selection, tuple(scopes))


@dataclass(frozen=True, slots=True)
class CheckedLoad:
    """Checkpoints that fit this rank's state: the binding, and the open files.

    `targets` is None until new tensors are allocated. Other ranks connect to `links`, and
    `encoded_requests` has this rank's block requests. If the ranks can share nothing, `links` is
    None and `encoded_requests` is empty.
    """

    resolved: ResolvedSources
    saved: SavedTree
    binding: Binding
    files: OpenFiles
    targets: CellTargets | None
    links: HostLinks | None
    encoded_requests: bytes

    def state_names(self, fqns: Iterable[str]) -> tuple[str, ...]:
        """Return the names in the state for names in the index."""
        names: dict[str, list[str]] = {}
        for name in self.binding.restored:
            if (tensor := self.saved.tensor(name)) is not None:
                made = self.saved.derived.get(tensor[0])
                for fqn in (tensor[0],) if made is None else made.sources:
                    names.setdefault(fqn, []).append(name)
        return tuple(name for fqn in fqns for name in names.get(fqn, [fqn]))

    def loaded_sources(self) -> tuple[LoadedSource, ...]:
        """Return each checkpoint with the names that it fills."""
        restored: list[list[str]] = [[] for _ in self.resolved.checkpoints]
        for name in self.binding.restored:
            restored[self.saved.source_number(name)].append(name)
        return tuple(
            LoadedSource(source.path, source.index.step, source.index.attempt, tuple(names))
            for source, names in zip(self.resolved.checkpoints, restored, strict=True)
        )


def check_load(
    call: LoadCall, arguments: LoadArguments, sources: ResolvedSources, stack: ExitStack
) -> tuple[CheckedLoad | None, CheckFindings]:
    """Bind the state, plan the reads, and open the files. Nothing of the state changes.

    If there are problems, no load is prepared. `stack` closes the files after the load.
    """
    options, session = call.options, call.session
    from_memory = False
    for storage, checkpoint in zip(arguments.storages, sources.checkpoints, strict=True):
        files_in_memory = call.memory.committed(checkpoint.path, checkpoint.index, stack)
        storage.serve(files_in_memory)
        from_memory = from_memory or bool(files_in_memory)
    contents: list[_ObjectsReader] = [(c.objects(), c.objects) for c in sources.checkpoints]
    selection = arguments.resolve_selection(sources)
    saved = _build_saved_tree(options, arguments, selection, sources, contents)
    with paused_collector():
        binding = bind(
            arguments.template,
            saved,
            strict=options.strict,
            selection=selection,
            keys=sources.keys,
            casting=Casting(
                parse_cast(options.cast),
                options.dequantize,
                _stated_blocks(contents),
                parse_resize(options.resize),
            ),
        )
        wanted = split_requests(binding.wanted, saved)
        problems = (
            *_find_description_problems(options, sources, contents),
            *binding.problems,
            *_find_unequal(session, selection, saved, sources),
            *chain.from_iterable(
                find_request_problems(checkpoint.catalog, requests)
                for checkpoint, requests in zip(sources.checkpoints, wanted, strict=True)
            ),
        )
        unrequested = encode_bitmap(binding.unrequested, _list_saved_names(sources, saved))
        parts = UnrequestedParts.of(binding.unrequested_parts, saved.derived_names)
        if problems:
            return None, CheckFindings(problems, binding.pattern_problems, unrequested, parts)
    files = plan_and_open(
        sources.checkpoints, wanted, saved, threads=session.settings.threads, stack=stack
    )
    targets = None if binding.makes_memory else binding.allocate()
    links, encoded = open_shared_read(session, sources.shared_read_id, files, stack)
    is_short = fits_exchange(len(encoded), session.channel.world_size)
    findings = CheckFindings(
        pattern_problems=binding.pattern_problems,
        unrequested=unrequested,
        parts=parts,
        makes_memory=binding.makes_memory,
        assigns_values=binding.assigns_values,
        loads_objects=binding.loads_objects,
        encoded_requests=encoded if is_short else None,
        from_memory=from_memory,
        resized=tuple((t.name, t.resized.rows, t.resized.live) for t in binding.resized),
    )
    return CheckedLoad(sources, saved, binding, files, targets, links, encoded), findings


def _find_unequal(
    session: Session, selection: Selection | Scopes, saved: SavedTree, sources: ResolvedSources
) -> Iterator[str]:
    """Yield the scalars that a rename cannot join, as they differ. Rank 0 reads them, for all."""
    if session.channel.rank != COORDINATOR or not saved.equal or saved.problems:
        return
    selected = {name: fqns for name, fqns in saved.equal.items() if name in selection}
    yield from find_unequal(replace(saved, equal=selected), sources.checkpoints)


def _stated_blocks(contents: Sequence[_ObjectsReader]) -> list[Shape]:
    """Return the sizes of blocks of scales that the files of other systems state."""
    configs = [main.metadata.get(QUANTIZATION) for main, _ in contents]
    return [block for config in configs for block in parse_blocks(config)]


def _find_description_problems(
    options: LoadOptions, sources: ResolvedSources, contents: Sequence[_ObjectsReader]
) -> Iterator[str]:
    """Yield the differences of `kind` and `config` between the checkpoints and the options."""
    for checkpoint, (main, _) in zip(sources.checkpoints, contents, strict=True):
        prefix = f"{checkpoint.path}, " if len(contents) > 1 else ""
        for problem in find_description_problems(main.metadata, options.config, options.kind):
            yield prefix + problem


def _build_saved_tree(
    options: LoadOptions,
    arguments: LoadArguments,
    selection: Selection | Scopes,
    sources: ResolvedSources,
    contents: Sequence[_ObjectsReader],
) -> SavedTree:
    """Return the contents of the checkpoints under the names of the state."""
    with paused_collector():
        trees = [
            build_saved_tree(
                sources.checkpoints[use.number].catalog,
                *contents[use.number],
                rename=options.rename if use.source.rename is None else use.source.rename,
            )
            for use in arguments.source_uses
        ]
        if not isinstance(selection, Scopes):
            return trees[0]
        views = [
            SourceView(use.number, saved, scope)
            for use, saved, scope in zip(
                arguments.source_uses, trees, selection.scopes, strict=True
            )
        ]
        return merge_sources(views, [checkpoint.path for checkpoint in sources.checkpoints])


def _list_saved_names(sources: ResolvedSources, saved: SavedTree) -> Sequence[str]:
    """Return all saved names, in the form that `Binding.unrequested` uses."""
    if not saved.origins:
        return sources.names
    numbered = enumerate(sources.checkpoints)
    return [with_source(number, name) for number, source in numbered for name in source.names]


def split_requests(wanted: Iterable[TensorRequest], saved: SavedTree) -> list[list[TensorRequest]]:
    """Return the requests for each checkpoint, with the names that it uses."""
    if not saved.origins:
        return [[*wanted]]
    requests: list[list[TensorRequest]] = [[] for _ in saved.origins]
    for request in wanted:
        number, fqn = split_source(request.fqn)
        requests[number].append(request._replace(fqn=fqn))
    return requests


def plan_and_open(
    checkpoints: Sequence[OpenCheckpoint],
    wanted: Sequence[Sequence[TensorRequest]],
    saved: SavedTree,
    *,
    threads: int,
    stack: ExitStack,
) -> OpenFiles:
    """Plan the reads, and open the files, which `stack` closes. Raises the errors of `open_files`.

    The files of the second checkpoint are numbered after those of the first, and so on. So the
    numbers are equal on all ranks. The tensors have the names that `saved` uses.
    """
    all_plans: dict[int, tuple[ReadItem, ...]] = {}
    all_files: dict[int, OpenFile] = {}
    first, max_open = 0, MAX_OPEN // len(checkpoints)
    for number, (checkpoint, requests) in enumerate(zip(checkpoints, wanted, strict=True)):
        storage, folder, index = checkpoint.storage, checkpoint.folder, checkpoint.index
        with paused_collector():
            plan = plan_load(index, requests)
        opened = open_files(storage, folder, index, plan, threads=threads, max_open=max_open)
        stack.callback(opened.close)
        if not saved.origins:
            return opened
        for file, items in plan.items():
            all_plans[first + file] = tuple(
                replace(i, fqn=with_source(number, i.fqn)) for i in items
            )
            all_files[first + file] = opened.files[file]
        first += len(index.files)
    return OpenFiles(all_plans, all_files)
