"""`dc.load`: index, wanted regions, plan, check; then read and verify, and place."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack

from torch.distributed import ProcessGroup

from dist_ckpt.binding.bind import bind, survey, unexpected_problem
from dist_ckpt.binding.saved_tree import saved_of
from dist_ckpt.binding.selection import selection_of
from dist_ckpt.comm.exchange import Doc
from dist_ckpt.comm.process_group import session_of
from dist_ckpt.comm.session import Session
from dist_ckpt.commit.attempts import ROUNDS
from dist_ckpt.errors import CorruptError, StorageError
from dist_ckpt.format import filenames, objects_file
from dist_ckpt.format.index import Index
from dist_ckpt.loading.load_steps import Findings, Found, LoadRequest, LoadRun, Passed, ReadOnce
from dist_ckpt.loading.options import LoadOptions
from dist_ckpt.loading.read_once import read_shared, verify_shared
from dist_ckpt.loading.read_once_agreement import Agreeing, Agreement
from dist_ckpt.loading.read_once_units import runs_of
from dist_ckpt.memory.protocol import Target
from dist_ckpt.planning.load_planner import plan_load, problems_of
from dist_ckpt.planning.read_sharing import BlockWants, encode
from dist_ckpt.planning.sharding_config import ShardingConfig
from dist_ckpt.reports import LoadReport, Phases
from dist_ckpt.runtime.gc_pause import paused_collector
from dist_ckpt.shard_io.block_reader import Nowhere, Reading, ReadTotals, read, reading_of
from dist_ckpt.shard_io.open_files import OpenFiles, open_files, read_objects
from dist_ckpt.snapshots.kept_files import KeptFiles, KeptOnHost, NoneKept
from dist_ckpt.snapshots.overlay_storage import SnapshotStorage
from dist_ckpt.state.containers import MutableState
from dist_ckpt.state.plain_torch import MAKE
from dist_ckpt.storage import Storage, open_storage
from dist_ckpt.storage.counting import CountingStorage

_log = logging.getLogger("dist_ckpt")

NONE_KEPT = NoneKept()

# The steps of a load that are left out if no rank has anything to do in them.
PREPARE = "prepare"
PLACE = "place"
OBJECTS = "objects"


def load(
    state: MutableState,
    path: str | os.PathLike[str],
    *,
    sharding: ShardingConfig | None = None,
    group: ProcessGroup | None = None,
    strict: bool = True,
    verify: bool = True,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    rename: Mapping[str, str | None] | None = None,
    check_first: bool = False,
    read_once: ReadOnce = "host",
) -> LoadReport:
    """Fill a state from the checkpoint at `path`. Collective: every rank of `group` calls this.

    Any layout loads into any other. Names, shapes, dtypes, coverage, file sizes and headers are
    agreed by all ranks before the first byte lands: until then nothing is touched. Every block is
    checked as it is read. If one is damaged, all ranks raise the same CorruptError, whose
    `touched` names the tensors that may hold partial data; no object's `load_state_dict` has run.
    Tensors of the state that share memory get it as long as what was saved agrees where they do;
    else IncompatibleError names two of them once everything is read.
    With `check_first` all blocks are verified before the first byte lands, by reading twice, all
    of it through the page cache.

    What several ranks want is fetched from storage by one of them, checked, and handed on:
    `read_once="host"` does so among the ranks of each host, through shared memory; "job" among
    all, over the network between hosts, where that is faster than the storage; with "off" each
    rank reads all that it wants, through the page cache. With "host" and "job", what the page
    cache does not hold is read past it. `DIST_CKPT_HOST` renames a host.

    `strict` makes names that are missing or unexpected an error; shape, dtype and coverage always
    are one. `include` and `exclude` are globs that cut both sides, `rename` maps saved names to
    names here, with `*` for any text and `{name}` for one without dots. An empty mapping or None
    in the state takes what was saved there.

    What background saves have left of this very checkpoint in the memory of a host is taken from
    there, checked like what is read from storage, unless another process still trains on it.
    """
    options = LoadOptions(
        sharding=sharding,
        strict=strict,
        verify=verify,
        check_first=check_first,
        include=include,
        exclude=exclude,
        rename=rename,
        read_once=read_once,
    )
    return load_together(session_of(group), state, path, options, kept=KeptOnHost())


def load_together(
    ranks: Session,
    state: MutableState,
    path: str | os.PathLike[str],
    options: LoadOptions,
    storage: Storage | None = None,
    kept: KeptFiles = NONE_KEPT,
) -> LoadReport:
    """Load over a given session. Collective: every rank of the session calls this.

    What `kept` has in memory is not read from the storage; if it proves damaged, all of it is.
    """
    load = _Load(ranks, state, path, options, storage, kept)
    try:
        return load.run()
    except CorruptError as error:
        # Every rank raises it, and knows from the check whether any reads from memory: so they
        # decide alike.
        if kept.is_only_copy or not load.is_from_memory:
            raise
        _log.warning("%s: %s. All of it is read from storage now", path, error)
    return _Load(ranks, state, path, options, storage, NONE_KEPT).run()


class _Load:
    """One rank's side of one load; its methods run inside the exchanges."""

    def __init__(
        self,
        ranks: Session,
        state: MutableState,
        path: str | os.PathLike[str],
        options: LoadOptions,
        storage: Storage | None,
        kept: KeptFiles,
    ) -> None:
        self._ranks = ranks
        self._state = state
        self._options = options
        self._where = path
        self._given = storage
        self._kept = kept
        self._stack = ExitStack()
        self._filled: Collection[str] = ()
        self._asked: LoadRequest | None = None
        self._shared: Agreement | None = None
        self._phases = Phases("load", str(path), quiet=ranks.channel.rank != 0)
        # Whether any rank is to read from memory, as all of them know once they have agreed.
        self.is_from_memory = False

    def run(self) -> LoadReport:
        with self._ranks.operation(f"load of {self._where}"), self._stack:
            return self._run()

    def _run(self) -> LoadReport:
        run = LoadRun(self._ranks)
        passed = self._agree(run)
        self.is_from_memory = passed.from_memory
        try:
            self._fill(run, passed)
        except CorruptError as error:
            # Who met the damage tells what it has touched; only this rank knows of its own.
            filled = self._names_of(self._filled)
            error.touched = tuple(sorted({*error.touched, *filled}))
            raise
        report = self._report(passed.unexpected)
        self._phases.done(report)
        return report

    def _agree(self, run: LoadRun) -> Passed:
        """Find and check a checkpoint, again if an overwrite replaces it meanwhile."""
        for _ in range(ROUNDS):
            with self._phases.phase("open"):
                run.open(self._request)
            with self._phases.phase("check"):
                passed = run.check(self._examine, self._word_unexpected)
            if passed is not None:
                return passed
        raise StorageError(f"{self._path}: it is replaced faster than it is read; try again")

    def _fill(self, run: LoadRun, passed: Passed) -> None:
        """Read, place and load objects, each when the one before has succeeded everywhere."""
        with self._phases.phase("read"):
            if PREPARE in passed.steps or passed.shares:
                self._prepare(run, passed)
            if self._options.check_first:
                run.step("check first", self._read_nowhere)
            self._job = run.read(self._read)
        with self._phases.phase("place"):
            if PLACE in passed.steps:
                run.step(PLACE, self._binding.place)
            if OBJECTS in passed.steps:
                run.step(OBJECTS, self._binding.load_objects)

    def _request(self) -> LoadRequest:
        if self._asked is None:
            self._asked = self._ask()
        return self._asked

    def _ask(self) -> LoadRequest:
        self._options.check()
        # What is read twice, or by several ranks, is left to the page cache to fetch once.
        direct_reads = self._options.read_once != "off" and not self._options.check_first
        own, self._path = open_storage(self._where, direct_reads=direct_reads)
        self._counting = CountingStorage(self._given or own)
        self._storage = SnapshotStorage(self._counting)
        self._storage.serve(self._kept.unfound())
        channel = self._ranks.channel
        self._template = survey(
            self._state,
            sharding=self._options.sharding,
            rank=channel.rank,
            world_size=channel.world_size,
            group_ranks=self._ranks.group_ranks,
        )
        options = self._options
        return LoadRequest(
            storage=self._storage,
            path=self._path,
            strict=options.strict,
            check_first=options.check_first,
            read_once=options.read_once,
            keys=self._template.keys,
        )

    def _examine(self, found: Found) -> Findings:
        """Bind, plan, and open what will be read; nothing live changes."""
        self._found, index, options = found, found.index, self._options
        self._folder = f"{self._path}/{found.attempt.name}"
        self._stack.pop_all().close()  # what an attempt that is gone now has left open
        kept = self._kept.found(self._path, index, self._stack)
        self._storage.serve(kept)
        main = self._read_objects(index, filenames.OBJECTS)
        with paused_collector():
            self._saved = saved_of(index.catalog, main, rename=options.rename)
            self._binding = binding = bind(
                self._template,
                self._saved,
                strict=options.strict,
                selection=selection_of(options.include, options.exclude),
                keys=found.keys,
            )
            problems = (*binding.problems, *problems_of(index.catalog, binding.wanted))
            if not problems:
                self._plan = plan_load(index, binding.wanted)
        if problems:
            return Findings(problems, binding.unclaimed)
        names = [filenames.objects_file(rank) for rank in binding.needs]
        binding.check([self._read_objects(index, name) for name in names])
        self._files = self._open(index)
        if not binding.makes_memory:
            self._allocate()
        self._wants = self._listen(found.meeting) if found.meeting else b""
        steps = {
            PREPARE: binding.makes_memory,
            PLACE: binding.places,
            OBJECTS: binding.loads_objects,
        }
        todo = frozenset(step for step, has_work in steps.items() if has_work)
        return Findings((), binding.unclaimed, todo, self._wants, from_memory=bool(kept))

    def _listen(self, meeting: str) -> bytes:
        """Let the ranks of this host connect; return what this one wants, as a message."""
        between_hosts = self._options.read_once == "job"
        self._agreeing = Agreeing(
            self._ranks, self._files, between_hosts=between_hosts, stack=self._stack
        )
        self._agreeing.listen(meeting)
        return encode(BlockWants(self._ranks.channel.host, runs_of(self._files, self._plan)))

    def _word_unexpected(self, unexpected: Sequence[str]) -> Sequence[str]:
        return (unexpected_problem(unexpected),) if unexpected and self._options.strict else ()

    def _read_objects(self, index: Index, name: str) -> objects_file.ObjectsFile:
        for record in index.objects:
            if record.name == name:
                data = read_objects(self._storage, self._folder, record)
                return objects_file.decode(data, make=MAKE)
        raise CorruptError(f"{self._folder}: the index lists no {name}; load an older checkpoint")

    def _open(self, index: Index) -> OpenFiles:
        threads = self._ranks.config.threads
        files = open_files(self._storage, self._folder, index, self._plan, threads=threads)
        return self._stack.enter_context(files)

    def _read_nowhere(self) -> None:
        """Verify every block that will be read, without touching anything."""
        nowhere = Nowhere()
        targets = {
            (wanted.fqn, part): nowhere
            for wanted in self._binding.wanted
            for part in range(len(wanted.cells))
        }
        if self._shared is None:
            self._read_into(targets, verify=True)
            return
        reading = self._reading(targets, verify=True)
        verify_shared(self._ranks, self._shared, self._files, self._plan, reading)

    def _allocate(self) -> None:
        with paused_collector():
            self._targets = self._binding.allocate()

    def _read(self) -> ReadTotals:
        try:
            if self._shared is None:
                self._totals = self._read_into(self._targets, verify=self._options.verify)
            else:
                self._totals = self._read_shared(self._shared)
        except CorruptError as error:
            error.touched = self._names_of(error.touched)
            raise
        self._filled = {wanted.fqn for wanted in self._binding.wanted if wanted.cells}
        self._binding.settle()
        return self._totals

    def _names_of(self, fqns: Iterable[str]) -> tuple[str, ...]:
        """Return the names under which the state has some tensors of the index."""
        here: dict[str, list[str]] = {}
        for name in self._binding.restored:
            if (tensor := self._saved.tensor(name)) is not None:
                here.setdefault(tensor[0], []).append(name)
        return tuple(name for fqn in fqns for name in here.get(fqn, [fqn]))

    def _read_into(self, targets: Mapping[tuple[str, int], Target], *, verify: bool) -> ReadTotals:
        ranks = self._ranks
        return read(
            self._files,
            self._plan,
            targets,
            verify=verify,
            threads=ranks.config.threads,
            slots=ranks.slots,
        )

    def _reading(self, targets: Mapping[tuple[str, int], Target], *, verify: bool) -> Reading:
        slots = self._ranks.slots
        return reading_of(self._files, self._plan, targets, verify=verify, slots=slots)

    def _prepare(self, run: LoadRun, passed: Passed) -> None:
        """Make the memory that is lacking, and link the ranks that have something to share.

        All have done so before the first byte lands anywhere.
        """
        if not passed.shares:
            run.step(PREPARE, self._make_memory)
            return

        def meet() -> Doc:
            out_of_reach = self._agreeing.meet(passed.wants, self._wants)
            self._make_memory()
            return out_of_reach

        shared = self._agreeing.settle(run.step(PREPARE, meet, self._agreeing.judge))
        if any(shared.units.values()):
            self._shared = shared

    def _make_memory(self) -> None:
        if self._binding.makes_memory:
            self._allocate()

    def _read_shared(self, shared: Agreement) -> ReadTotals:
        reading = self._reading(self._targets, verify=self._options.verify)
        try:
            return read_shared(self._ranks, shared, self._files, self._plan, reading)
        except BaseException:
            shared.give_up()
            # If the error is another rank's, who learns it does not know what is filled here.
            self._filled = reading.touched
            raise

    def _report(self, unexpected: tuple[str, ...]) -> LoadReport:
        binding, found, ranks = self._binding, self._found, self._ranks
        return LoadReport(
            path=self._path,
            step=found.index.step,
            attempt=found.attempt.name,
            world_size=ranks.channel.world_size,
            restored=binding.restored,
            resharded=binding.resharded,
            missing=binding.missing,
            unexpected=unexpected,
            dropped=binding.dropped,
            nbytes_read=self._totals.nbytes_read,
            nbytes_received=self._totals.nbytes_received,
            nbytes_placed=self._totals.nbytes_placed,
            nbytes_from_memory=self._storage.from_memory.nbytes,
            job_nbytes_read=self._job.nbytes_read,
            job_nbytes_placed=self._job.nbytes_placed,
            seconds=self._phases.seconds,
            slowest_rank=self._job.slowest_rank,
            slowest_s=self._job.slowest_s,
            exchanges=ranks.exchanges,
            collectives=ranks.collectives,
            storage_reads=self._counting.reads,
        )
