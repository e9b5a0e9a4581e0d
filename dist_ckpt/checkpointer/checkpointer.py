"""`dc.Checkpointer`: the checkpoints of a run, from the first save to the last resume."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Self

from torch.distributed import ProcessGroup

from dist_ckpt.async_save.async_saver import open_savers
from dist_ckpt.checkpointer.checkpointer_options import OnFailure, RunOptions
from dist_ckpt.checkpointer.run_session import RunSession, TrainingStopped, open_run_session
from dist_ckpt.checkpointer.save_policy import DEFAULT_SAVE, SavePolicy
from dist_ckpt.core.checkpoint.checkpoint import Checkpoint
from dist_ckpt.core.loading.load_options import Sources
from dist_ckpt.core.planning.replica_rules import ReplicaRule
from dist_ckpt.core.planning.sharding_config import ShardingConfig
from dist_ckpt.core.runtime.arguments import check_whole
from dist_ckpt.core.runtime.public_names import refuse_old_parameters
from dist_ckpt.core.saving.attachments import Attachments
from dist_ckpt.core.saving.save_options import CheckReplicas
from dist_ckpt.core.state.tree.containers import MutableState
from dist_ckpt.runs.metrics import parse_metrics
from dist_ckpt.runs.retention_policy import RetentionPolicy

_log = logging.getLogger("dist_ckpt")

_RESTORE_FIRST = "call restore(state) first: it returns None if the run is fresh"

# A state, or a function that returns it, for wrappers that are made later.
StateOrMaker = MutableState | Callable[[], MutableState]


class Checkpointer:
    """The checkpoints of a run: save them by a policy, prune them, and resume from them.

        with dc.Checkpointer("runs/a", save=dc.every(steps=500), keep=dc.keep.last(3)) as ck:
            for step in ck.steps(state, until=20_000):
                loss = train(state, step)
                ck.metrics(step, {"train/loss": loss})

    A step is a completed optimizer step. Its checkpoint is `root/step-00000500`. `state` is a state
    as for `dc.save`, or a function without arguments that returns it. Every rank of `group` creates
    a checkpointer with the same options, and makes the same calls of `restore`, `step`, `poll`,
    `save` and `steps`. `on_signal` needs the main thread; in another thread the default `save` logs
    that, and does without. A process can have one open checkpointer: in a notebook,
    `dc.close_all()` closes one whose name is lost. With `root=None` nothing is saved.

    `save` is the save policy. Its minutes are counted by rank 0's clock; a signal may come to any
    rank. Saves by time, by a signal or by a request happen at a boundary, a call of `step` or
    `poll`. All ranks agree on the boundary without a collective, and do not wait if no save is due.
    `keep` is the retention policy; None keeps all checkpoints. Rank 0 prunes after a commit, in the
    background.

    `init` is the source of a fresh run, as for `dc.load`: a path, a selector, a `dc.Source`, a list
    or a mapping of them. `init_strict` is its `strict`. If the run has a checkpoint, `init` is
    ignored. `must_exist` refuses a fresh run. `read_only` resumes and changes nothing.

    `config` is saved with each checkpoint, and compared on resume. Values that match a pattern of
    `config_must_match` must be equal; other differences are logged. `kind`, a short text about the
    model, is saved too, and must be equal. `attach` is a function of a step that returns the
    attachments of its checkpoint, as for `dc.save`. It is called on rank 0 when the step is saved.
    `include`, `exclude` and `include_frozen` select the part of the state that is saved and
    resumed, as in `dc.save` and `dc.load`. Tensors that match `link_unchanged`, such as frozen
    weights, are linked instead of written. `check_replicas` and `replicas` are those of `dc.save`.
    `resize` is that of `dc.load`, also for `init`: a run may resume with another padding of its
    vocabulary.

    With `background` a separate process writes: see `dc.AsyncSaver`. A failed save is logged once,
    with the newest durable checkpoint, and tried again. `on_failure` is "warn", "raise", or a
    function that is called too. After more than `max_failures` in a row, the error is raised on all
    ranks in any case. If a save does not fit, what no rule keeps is removed first. `free_first`
    then also removes the oldest kept checkpoints, if a newer one is recorded as checked in full:
    call `dc.verify` in `on_commit`. `on_commit` is called with each new checkpoint, on rank 0, in a
    separate thread. For background saves, that thread also calls `on_failure`. After a signal the
    run saves and stops, within `stop_within_s` seconds from the signal on. This save does not wait
    for older saves, and supersedes a save that has not begun.
    """

    @refuse_old_parameters(
        frozen="include_frozen", reuse="link_unchanged", same="config_must_match"
    )
    def __init__(  # noqa: PLR0913 - each is a policy of its own
        self,
        root: str | os.PathLike[str] | None,
        *,
        save: SavePolicy = DEFAULT_SAVE,
        keep: RetentionPolicy | None = None,
        init: Sources | None = None,
        init_strict: bool = True,
        must_exist: bool = False,
        read_only: bool = False,
        config: Mapping[str, object] | None = None,
        kind: str | None = None,
        config_must_match: Sequence[str] = (),
        attach: Callable[[int], Attachments | None] | None = None,
        sharding: ShardingConfig | None = None,
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
        include_frozen: bool = True,
        link_unchanged: str | Sequence[str] = (),
        check_replicas: CheckReplicas = "sample",
        replicas: Mapping[str, ReplicaRule] | None = None,
        resize: Mapping[str, int] | None = None,
        on_commit: Callable[[Checkpoint], object] | None = None,
        on_failure: OnFailure = "warn",
        max_failures: int = 3,
        free_first: bool = False,
        stop_within_s: float = 25.0,
        background: bool = True,
        group: ProcessGroup | None = None,
    ) -> None:
        self._run: RunSession | None = None
        self._state: StateOrMaker | None = None
        self._step = self._last_saved_by_call = 0
        self._is_closed = self._is_in_loop = False
        self._loop_step: int | None = None
        self._pid = os.getpid()
        if root is None:
            return
        options = RunOptions(
            root=root,
            save=save,
            keep=keep,
            init=init,
            init_strict=init_strict,
            must_exist=must_exist,
            read_only=read_only,
            config=config,
            kind=kind,
            config_must_match=config_must_match,
            attach=attach,
            sharding=sharding,
            include=include,
            exclude=exclude,
            include_frozen=include_frozen,
            link_unchanged=link_unchanged,
            check_replicas=check_replicas,
            replicas=replicas,
            resize=resize,
            on_commit=on_commit,
            on_failure=on_failure,
            max_failures=max_failures,
            free_first=free_first,
            stop_within_s=stop_within_s,
            background=background,
        )
        self._root = str(root)
        try:
            self._run = open_run_session(options, group, partial(_claim_process, self))
        except BaseException:
            with _claiming:
                _checkpointers.discard(self)
            raise
        self._root = self._run.root
        self._dropped = weakref.finalize(self, self._run.drop)
        self._dropped.atexit = False

    def restore(self, state: StateOrMaker, at: str | int | None = None) -> int | None:
        """Fill a state from the restore point of the run. Return its step, None for a fresh run.

        The restore point is the newest checkpoint that is not orphaned, or a newer save in memory.
        With `at`, such as "@8000", it is the checkpoint of that step, and later ones are orphaned.
        Collective. Only damaged checkpoints are skipped; the log has the reason. Raises the errors
        of `dc.load`. Also raises NotFoundError if `must_exist` and the run has no checkpoint,
        IncompatibleError for a configuration that differs but must match, and CorruptError if all
        checkpoints are damaged. Raises TypeError or ValueError for the state of a fresh run if no
        save can take it. After an error the state may be partly filled.
        """
        if (run := self._open_run()) is None:
            return None
        at_step = None if at is None else str(at).removeprefix("@")
        if at_step is not None and not at_step.isdecimal():
            raise ValueError(f'at={at!r}: give the step to resume from, as "@8000"')
        step = run.resume(_make_state(state), at_step).step
        self._state, self._step, self._last_saved_by_call = state, step or 0, step or 0
        return step

    def step(self, step: int, state: StateOrMaker | None = None) -> None:
        """Count a completed optimizer step, and save if a save is due. Every rank makes this call.

        Steps must increase, and may skip numbers. `state` is by default the state of `restore`. The
        call takes a few microseconds if no save is due, else as long as `dc.AsyncSaver.save`.
        Raises the errors of `dc.AsyncSaver.save` for an invalid state, but only before the first
        save of this incarnation: later it is a failed save. Raises RankError if a rank is lost or
        makes another call.
        """
        self._count(step, state)
        if (run := self._open_run()) is not None:
            is_due = run.saves is not None and run.options.save.is_due(step, run.saves.last)
            self._arrive(run, "step", step, is_due=is_due)

    def poll(self, step: int | None = None) -> None:
        """Check for save requests between two steps, as in a long evaluation. All ranks call it.

        If a save is requested, the state is saved as the state of `step`, by default the last step.
        A new `step` is counted, as by the method `step`. In the body of a loop over `steps`, pass
        `poll(step)` after the optimizer step, and `poll(step - 1)` before it, as between the parts
        of a batch. With `poll(step - 1)` no other part of the state may have changed yet: after a
        resume, a data loader or generator would continue behind these parts. Raises ValueError if
        the body of the loop does not pass `step`.
        """
        if step is None and self._loop_step not in (None, self._step):
            raise ValueError(
                f"poll() in the body of step {self._loop_step} needs the step of the state: "
                f"poll(step) after the optimizer step, poll(step - 1) before it"
            )
        if step not in (None, self._step):
            self.step(step)
        elif (run := self._open_run()) is not None:
            self._arrive(run, "poll", self._step)

    def save(self, step: int, state: StateOrMaker | None = None) -> None:
        """Save a step, even if no save is due. Every rank makes this call.

        `step` is the last step or a newer one. A step that the policy has saved is not saved again.
        Raises ValueError if this method has already saved the step.
        """
        if step == self._last_saved_by_call and step:
            raise ValueError(f"step {step} is saved already: save each step once")
        if step != self._step or not step:
            self._count(step, state)
        self._last_saved_by_call = step
        if (run := self._open_run()) is not None:
            self._arrive(run, "save", step, is_due=True)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Add metrics of a step, for `keep` and selectors.

        Only calls on rank 0 count. They may come before the step is saved, or long after. Metrics
        of steps that are not saved are dropped.
        """
        check_whole("step", step)
        if not isinstance(values, Mapping):
            raise TypeError(f'metrics are a {type(values).__name__}: give {{"val/loss": 0.25}}')
        if (run := self._open_run()) is None:
            return
        if self._state is None:
            raise ValueError(_RESTORE_FIRST)
        if (maintenance := run.requests.maintenance) is not None:
            maintenance.add_metrics(step, parse_metrics(values))

    def backup(self, step: int | None = None, *, overwrite: bool = False) -> str | None:
        """Back up the checkpoint of a step, by default the newest durable one: see `dc.backup`.

        Collective. Rank 0 writes the backup while the other ranks wait. All return its path, in
        `root/backup`: `keep` and later incarnations never change the backup. A running save of
        `step` is waited for. Returns None if `root=None`.
        """
        if step is not None:
            check_whole("step", step)
        run = self._open_run()
        return None if run is None else run.backup(step, overwrite=overwrite)

    @property
    def stopped(self) -> TrainingStopped | None:
        """The reason to end the run now, with its exit code; None while the run may continue."""
        return None if self._run is None else self._run.stopped

    @property
    def should_stop(self) -> bool:
        """True if the run must end now. It changes at the same boundary on all ranks."""
        return self.stopped is not None

    def steps(self, state: StateOrMaker, *, until: int) -> Iterator[int]:
        """Restore, then yield each step from the next one to `until`, and save when a save is due.

        Steps are counted from 1. The loop body is the step, even if it ends with `continue` or
        `break`. In a `zip`, pass these steps last: otherwise a step without a batch would count. A
        step also counts if its error is caught around the loop and inside the `with`. It does not
        count if the error leaves the `with`. The loop ends early if the run must stop. The body may
        call `step(step)` or `save(step)` after the optimizer step.
        """
        self._open_run()
        check_whole("until", until)
        if self._is_in_loop:
            raise ValueError(
                "this Checkpointer is in a loop of its steps already. End that loop with `break`; "
                "close() its iterator if a variable or a progress bar still has it"
            )
        self._is_in_loop = True
        try:
            if self._state is None:
                self.restore(state)
                self._state = state
            for step in range(self._step + 1, until + 1):
                if self.should_stop:
                    return
                self._loop_step = step
                try:
                    yield step
                except GeneratorExit:
                    self._count_loop_step()
                    raise
                finally:
                    self._loop_step = None
                if step != self._step:
                    self.step(step, state)
        finally:
            self._is_in_loop = False

    def _count_loop_step(self) -> None:
        """Count the step of a loop that was left in its body."""
        if self._loop_step is not None and self._loop_step > self._step:
            self._step = self._loop_step

    def _arrive(self, run: RunSession, label: str, step: int, *, is_due: bool = False) -> None:
        """Move to the next boundary, and act there if all ranks act."""
        if run.stopped is None:
            boundary = run.rounds.arrive(label, step, is_due=is_due)
            if boundary is not None:
                run.act(boundary, step, self._current_state)
            if label == "step":
                run.check_state(step, self._current_state)

    def _count(self, step: int, state: StateOrMaker | None) -> None:
        check_whole("step", step)
        if step <= self._step:
            raise ValueError(
                f"step {step} is not above the last step, {self._step}: count optimizer steps, "
                f"from {self._step + 1} on, and call poll() between them"
            )
        if self._state is None and self._run is not None:
            raise ValueError(_RESTORE_FIRST)
        self._step = step
        if state is not None:
            self._state = state

    def _open_run(self) -> RunSession | None:
        if self._is_closed:
            raise ValueError("this Checkpointer is closed: make another one")
        if os.getpid() != self._pid:
            raise ValueError(
                f"this Checkpointer belongs to process {self._pid}, and this is {os.getpid()}, "
                f"which was forked from it: save in the process that made it"
            )
        return self._run

    def _current_state(self) -> MutableState:
        assert self._state is not None
        return _make_state(self._state)

    def close(self) -> None:
        """End the run: save the last step if `save` has `at_end`, and wait until it is durable.

        Every rank calls it, or leaves the `with`. Idempotent. Raises the error of the last save.
        """
        self._close(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End the run. After an error no rank waits for another, and snapshots stay in memory."""
        self._close(error)

    def _close(self, error: BaseException | None) -> None:
        if self._is_closed or os.getpid() != self._pid:
            return
        if (run := self._run) is None:
            self._is_closed = True
            return
        try:
            if error is None:
                # After `break`, a variable or a progress bar may still have the iterator.
                self._count_loop_step()
                run.finish(self._step, self._current_state)
        except BaseException as failure:
            error = failure
            raise
        finally:
            self._is_closed = True
            self._dropped.detach()
            run.end(error)


# The checkpointers that are open, or being opened, and some that are closed.
_checkpointers: weakref.WeakSet[Checkpointer] = weakref.WeakSet()
_claiming = threading.Lock()

# A child that is forked while another thread claims would wait for that thread, which it lacks.
os.register_at_fork(
    before=_claiming.acquire, after_in_parent=_claiming.release, after_in_child=_claiming.release
)


def _claim_process(checkpointer: Checkpointer) -> None:
    """Make a checkpointer the only one of this process: a signal is for one run.

    ValueError if another one is open, or is being opened in another thread.
    """
    with _claiming:
        is_taken = bool(_open_checkpointers())
    if is_taken:
        gc.collect()  # a dropped one may be in a cycle
    with _claiming:
        for other in _open_checkpointers():
            raise ValueError(
                f"another Checkpointer of this process is open, for {other._root}: close it, or "
                f"use it in a `with`. If its name is lost, as after an error in a notebook, call "
                f"dc.close_all(). Save several models as parts of one state"
            )
        _checkpointers.add(checkpointer)


def _open_checkpointers() -> list[Checkpointer]:
    """Return the open checkpointers of this process, without those of its parent."""
    own = [each for each in _checkpointers if each._pid == os.getpid()]
    return [each for each in own if not each._is_closed]


class ClosedEarlyError(Exception):
    """The reason of the end of a run that `close_all` has closed."""


def close_all() -> None:
    """Close each Checkpointer and AsyncSaver that is open in this process, as after an error.

    Call it in a notebook after an error or a `break`. The name of the object may be lost, while the
    notebook's traceback keeps it open. Nothing new is saved, as the last step may be half done.
    It waits for the saves in the background, whose snapshots stay in memory, and logs their errors.
    No other thread may use the objects meanwhile.
    """
    reason = ClosedEarlyError("dc.close_all()")
    with _claiming:
        checkpointers = _open_checkpointers()
    for checkpointer in checkpointers:
        checkpointer._close(reason)
    for saver in open_savers():
        saver.__exit__(ClosedEarlyError, reason, None)


def _warn_of_open() -> None:
    """Warn of open checkpointers at exit, as a global variable is not dropped earlier."""
    for checkpointer in _open_checkpointers():
        _log.warning(
            "the process ends with a Checkpointer for %s open: at_end has saved nothing, and the "
            "newest metrics may be lost. Use it in a `with`",
            checkpointer._root,
        )


atexit.register(_warn_of_open)


def _make_state(state: StateOrMaker) -> MutableState:
    value = state() if callable(state) else state
    if not isinstance(value, Mapping):  # otherwise a fresh run fails hours later, at its first save
        kind = type(value).__name__
        raise TypeError(f"the state is a {kind}: give a mapping, or a function that returns one")
    return value
