"""`dc.Checkpointer`: a run's checkpoints, from the first save to the last resume."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self

from torch.distributed import ProcessGroup

from dist_ckpt.checkpointer import save_policy
from dist_ckpt.checkpointer.checkpointer_options import RunOptions
from dist_ckpt.checkpointer.maintenance import Hooks, OnFailure
from dist_ckpt.checkpointer.resume import ResumeOptions
from dist_ckpt.checkpointer.run_session import RunSession, TrainingStopped, open_run_session
from dist_ckpt.checkpointer.save_policy import SavePolicy
from dist_ckpt.core.checkpoint.checkpoint import Checkpoint
from dist_ckpt.core.loading.load_options import Sources
from dist_ckpt.core.planning.sharding_config import ShardingConfig
from dist_ckpt.core.runtime.public_names import refuse_old_parameters
from dist_ckpt.core.saving.attachments import Attachments
from dist_ckpt.core.state.tree.containers import MutableState
from dist_ckpt.runs.annotations import checked_metrics
from dist_ckpt.runs.retention_policy import RetentionPolicy

DEFAULT_SAVE = save_policy.every(minutes=30) | save_policy.at_end | save_policy.on_signal("TERM")

_log = logging.getLogger("dist_ckpt")

_RESTORE_FIRST = "call restore(state) first: it returns None if the run is fresh"

# A state, or a function that makes one, for wrappers that come later.
StateOrMaker = MutableState | Callable[[], MutableState]


class Checkpointer:
    """A run's checkpoints: saved when it is worth it, kept while they matter, resumed from.

        with dc.Checkpointer("runs/a", save=dc.every(steps=500), keep=dc.keep.last(3)) as ck:
            for step in ck.steps(state, until=20_000):
                loss = train(state, step)
                ck.metrics(step, {"train/loss": loss})

    A step is an optimizer step that is done; its checkpoint is `root/step-00000500`. `state` is
    what `dc.save` takes, or a function without arguments that returns it. Every rank of `group`
    makes a checkpointer with the same options, and calls `restore`, `step`, `poll`, `save` and
    `steps` alike, in the main thread. A process has one at a time.

    `save` says when: steps count on every rank, minutes by rank 0's clock, signals on any rank.
    Who is asked to save besides its steps does so at a boundary, a `step` or `poll`, on which all
    ranks agree without a collective and without waiting when nothing is due. `keep` says which
    checkpoints stay; None keeps all. They are pruned by rank 0 after a commit, in the background.

    `init` is where a fresh run takes what it begins with, all that `dc.load` takes: a path, a
    selector, a `dc.Source`, a list or a mapping of them, with `init_strict` as its `strict`. A
    resume always wins over it. `must_exist` refuses a fresh run; `read_only` resumes and changes
    nothing. `config` is saved with each checkpoint; what of it matches a pattern of
    `config_must_match` must be equal when a run goes on, all else is compared, and a difference
    logged. So is `kind`, a short text that says what the model is, and must be equal. `attach` is a
    function of a step that returns what to attach to its checkpoint, as for `dc.save`; it is called
    on rank 0, when that step is saved, by whatever policy. `include`, `exclude` and
    `include_frozen` say what of the state is saved and resumed, as in `dc.save` and `dc.load`;
    tensors that match `link_unchanged`, such as frozen weights, are linked and not written.

    With `background` a process of its own writes, see `dc.AsyncSaver`. A save that fails is told
    once, with what is safe, and tried again; `on_failure` is "warn", "raise" or a function that is
    called as well, and after `max_failures` in a row the error is raised on all ranks all the same.
    `on_commit` is called with each new checkpoint, on rank 0, in a thread beside the training;
    `on_failure` is as well, for a save in the background. On a signal the run is to stop: it is
    saved, and has `stop_within_s` seconds for that, from the signal on; it waits for no older save,
    and takes the place of one that is not begun. With `root=None` nothing is saved.
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
        on_commit: Callable[[Checkpoint], object] | None = None,
        on_failure: OnFailure = "warn",
        max_failures: int = 3,
        stop_within_s: float = 25.0,
        background: bool = True,
        group: ProcessGroup | None = None,
    ) -> None:
        self._run: RunSession | None = None
        self._state: StateOrMaker | None = None
        self._step = self._last_asked = 0
        self._is_closed = self._is_in_loop = False
        self._body_of: int | None = None
        self._pid = os.getpid()
        if root is None:
            return
        options = RunOptions(
            root=root,
            save=save,
            keep=keep,
            resume=ResumeOptions(
                init=init,
                init_strict=init_strict,
                must_exist=must_exist,
                read_only=read_only,
                config=config,
                kind=kind,
                config_must_match=config_must_match,
                sharding=sharding,
                include=include,
                exclude=exclude,
                include_frozen=include_frozen,
            ),
            hooks=Hooks(on_commit, on_failure, max_failures),
            background=background,
            stop_within_s=stop_within_s,
            attach=attach,
            link_unchanged=link_unchanged,
        )
        self._run = open_run_session(options, group, _check_alone)
        self._dropped = weakref.finalize(self, self._run.let_go)
        self._dropped.atexit = False
        _live.add(self)

    # --- begin -----------------------------------------------------------------------------------

    def restore(self, state: StateOrMaker, at: str | int | None = None) -> int | None:
        """Fill a state with what the run goes on from; return its step, None for a fresh run.

        That is the newest checkpoint that is not orphaned, from memory if a newer save is there.
        With `at`, such as "@8000", it is that of this step, and what is above it is orphaned then.
        Collective. Only one that is damaged is stepped over, with the reason in the
        log. Raises what `dc.load` raises; NotFoundError if `must_exist` and there is none;
        IncompatibleError if the configuration may not differ and does; CorruptError if none is
        whole. After an error the state may be filled in part.
        """
        if (run := self._open_run()) is None:
            return None
        asked = None if at is None else str(at).removeprefix("@")
        if asked is not None and not asked.isdecimal():
            raise ValueError(f'at={at!r}: give the step to go on from, as "@8000"')
        step = run.resume(_made(state), asked).step
        self._state, self._step, self._last_asked = state, step or 0, step or 0
        return step

    # --- boundaries ------------------------------------------------------------------------------

    def step(self, step: int, state: StateOrMaker | None = None) -> None:
        """Say that an optimizer step is done. Saves if it is time to. Every rank calls it alike.

        Steps only grow, and may leave some out. `state`: None for that of `restore`. Costs a few
        microseconds when nothing is due; else what `dc.AsyncSaver.save` costs. Raises what that
        raises for a state that cannot be saved, RankError if a rank is lost or does otherwise.
        """
        self._count(step, state)
        if (run := self._open_run()) is None or run.stopped is not None:
            return
        is_due = run.saves is not None and run.options.save.is_due(step, run.saves.last)
        if (turn := run.rounds.arrive("step", step, is_due=is_due)) is not None:
            run.take(turn, step, self._made_state)

    def poll(self, step: int | None = None) -> None:
        """Look for requests between two steps, as in a long evaluation. Every rank calls it alike.

        If a save was asked for, the state is saved as that of `step`, None for the last one. A step
        that is new is done with this, as with `step`. In the body of a loop over `steps` it has to
        be said: `poll(step)` once the optimizer has changed the state, and `poll(step - 1)` before,
        as between the parts of a batch, if nothing else in the state has changed: a data loader
        and generators would go on after these parts. ValueError if it is not.
        """
        if step is None and self._body_of not in (None, self._step):
            raise ValueError(
                f"poll() in the body of step {self._body_of} must say of which step the state is: "
                f"poll(step) if the optimizer has done it, poll(step - 1) if not yet"
            )
        if step not in (None, self._step):
            self.step(step)
            return
        if (run := self._open_run()) is None or run.stopped is not None:
            return
        if (turn := run.rounds.arrive("poll", self._step)) is not None:
            run.take(turn, self._step, self._made_state)

    def save(self, step: int, state: StateOrMaker | None = None) -> None:
        """Save a step, whatever the policies say. Every rank calls it alike.

        `step` is the last one or a newer one. If a policy has saved it already nothing is done;
        ValueError if this has.
        """
        if step == self._last_asked and step:
            raise ValueError(f"step {step} is saved already: save each step once")
        if step != self._step or not step:
            self._count(step, state)
        self._last_asked = step
        if (run := self._open_run()) is None or run.stopped is not None:
            return
        if (turn := run.rounds.arrive("save", step, is_due=True)) is not None:
            run.take(turn, step, self._made_state)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Say what was measured at a step; `keep` and selectors look at it.

        Rank 0's count, the other ranks may call it or not. It may come before the step is saved,
        or long after; of steps that are not saved it is forgotten.
        """
        if type(step) is not int:
            raise TypeError(f"step={step!r}: give a whole number")
        if not isinstance(values, Mapping):
            raise TypeError(f'metrics are a {type(values).__name__}: give {{"val/loss": 0.25}}')
        if (run := self._open_run()) is None:
            return
        if self._state is None:
            raise ValueError(_RESTORE_FIRST)
        if (keeper := run.requests.keeper) is not None:
            keeper.measured(step, checked_metrics(values))

    def backup(self, step: int | None = None, *, overwrite: bool = False) -> str | None:
        """Keep the checkpoint of a step, None for the newest durable one, as `dc.backup` does.

        Collective. Rank 0 does it while the others wait, and all return where it is: in
        `root/backup`, which `keep` and later incarnations never touch. A step that is being saved
        is waited for. None if there are no checkpoints, with `root=None`.
        """
        if step is not None and type(step) is not int:
            raise TypeError(f"step={step!r}: give a whole number")
        if (run := self._open_run()) is None:
            return None
        return run.backup(step, overwrite=overwrite)

    @property
    def stopped(self) -> TrainingStopped | None:
        """Why the run is to end now, and which exit code makes a scheduler start it again."""
        return None if self._run is None else self._run.stopped

    @property
    def should_stop(self) -> bool:
        """Whether the run is to end now. It changes at boundaries only, on all ranks alike."""
        return self.stopped is not None

    def steps(self, state: StateOrMaker, *, until: int) -> Iterator[int]:
        """Restore, then yield each step to be done, up to `until`; save when it is time to.

        Steps are counted from 1. What the body of the loop has done counts as the step, also when
        it ends with `continue` or `break`; so in a `zip` these steps stand last, or the one that
        has no batch any more would count. So does a step whose error is caught around the loop and
        inside the `with`: let it out of that, and the step does not count. It ends early when the
        run is to stop. The body may call `step(step)` or `save(step)` by itself, once the optimizer
        has stepped.
        """
        self._open_run()
        if type(until) is not int:
            raise TypeError(f"until={until!r}: give a whole number")
        if self._is_in_loop:
            raise ValueError(
                "this Checkpointer is in a loop of its steps already: end that first, by `break`, "
                "and by close() of its iterator if a variable or a progress bar still has it"
            )
        self._is_in_loop = True
        try:
            yield from self._steps(state, until)
        finally:
            self._is_in_loop = False

    def _steps(self, state: StateOrMaker, until: int) -> Iterator[int]:
        if self._state is None:
            self.restore(state)
            self._state = state
        for step in range(self._step + 1, until + 1):
            if self.should_stop:
                return
            self._body_of = step
            try:
                yield step
            except GeneratorExit:
                self._count_body()
                raise
            finally:
                self._body_of = None
            if step != self._step:
                self.step(step, state)

    def _count_body(self) -> None:
        """Count the step whose body the loop was left in."""
        if self._body_of is not None and self._body_of > self._step:
            self._step = self._body_of

    def _count(self, step: int, state: StateOrMaker | None) -> None:
        if type(step) is not int:
            raise TypeError(f"step={step!r}: give a whole number")
        if step <= self._step:
            raise ValueError(
                f"step {step} comes after step {self._step}: count optimizer steps, from "
                f"{self._step + 1} on, and call poll() between them"
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

    def _made_state(self) -> MutableState:
        assert self._state is not None
        return _made(self._state)

    # --- end -------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the run: save the last step if `save` has `at_end`, and wait until it is durable.

        Every rank calls it, or leaves the `with`. May be called again. Raises what the last save
        has failed of.
        """
        self._close(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it. After an error no rank waits for another, and what is in memory is kept."""
        self._close(error)

    def _close(self, error: BaseException | None) -> None:
        if self._is_closed or os.getpid() != self._pid:
            return
        if (run := self._run) is None:
            self._is_closed = True
            return
        try:
            if error is None:
                # After `break` a variable, or a progress bar, may still have the loop's iterator.
                self._count_body()
                run.finish(self._step, self._made_state)
        except BaseException as failure:
            error = failure
            raise
        finally:
            self._is_closed = True
            self._dropped.detach()
            run.end(error)


_live: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


def _check_alone() -> None:
    """Raise ValueError if this process has another one: nobody knows which a signal is for."""
    if _open_roots():
        gc.collect()  # one that was dropped may be part of a cycle
    for root in _open_roots():
        raise ValueError(
            f"another Checkpointer of this process is open, for {root}: close it, or save what "
            f"belongs to several models as parts of one state"
        )


def _open_roots() -> list[str]:
    own = [one for one in _live if one._pid == os.getpid()]  # and not of who forked this one
    return [one._run.root for one in own if not one._is_closed and one._run is not None]


def _tell_open() -> None:
    """Say what was not closed when the process ends: what is a global is not dropped before."""
    for one in _live:
        if one._run is not None and not one._is_closed and one._pid == os.getpid():
            _log.warning(
                "the process ends with a Checkpointer for %s open: at_end has saved nothing, and "
                "what was measured last may be lost. Use it in a `with`",
                one._run.root,
            )


atexit.register(_tell_open)


def _made(state: StateOrMaker) -> MutableState:
    made = state() if callable(state) else state
    if not isinstance(made, Mapping):  # a fresh run would see it hours later, at its first save
        raise TypeError(f"the state is a {type(made).__name__}: give a mapping, or what makes one")
    return made
