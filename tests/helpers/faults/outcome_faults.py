"""A fault at every system call of what changes checkpoints: is what was said what is there?

As a script it tries every fault of all cases, or of those named, and prints the counts of
docs/reliability.md; on an idle core that takes some 30 ms a fault:

    PYTHONPATH=. python tests/helpers/faults/outcome_faults.py save delete
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path

import torch

import dist_ckpt as dc
from dist_ckpt.core.commit import attempts, commit_protocol, removal
from dist_ckpt.core.format.filenames import Attempt, parse_attempt, parse_trash, trash_name
from dist_ckpt.core.storage.local.local_storage import LocalStorage
from faulty_calls import Fault, Lasting, system_calls

# The last two are what an old NFS server answers to the second of two same requests.
CODES = (
    *(errno.ESTALE, errno.EIO, errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT),
    *(errno.ENOENT, errno.EEXIST),
)
AGAIN = {errno.ENOENT: ("rename", "unlink", "rmdir"), errno.EEXIST: ("mkdir", "link")}
FEW_CODES = (errno.ESTALE, errno.EIO)
LASTING: tuple[Lasting, ...] = ("once", "alike", "all")
WAYS = tuple(product(LASTING, (False, True)))


def save(path: Path, step: int, *, overwrite: bool = False) -> None:
    state = {"model": {"w": torch.full((8,), float(step))}, "lr": step}
    dc.save(state, path, step=step, overwrite=overwrite)


def step_at(path: Path) -> int | None:
    """Return the step of the checkpoint, having read all of it; None if there is none."""
    try:
        with dc.open(path) as found:
            assert dc.verify(path).ok
            return found.step
    except dc.NotFoundError:
        return None


def said(error: Exception | None) -> str:
    """Return what a call has said of its checkpoint: by returning, or in an error."""
    text = str(error)
    if error is None:
        return "done"
    if "it is unknown whether it is" in text:
        return "unknown"
    if "is in place" in text:
        return "in place"
    if "is deleted, but" in text:
        return "deleted"
    return "not done"


# --- the calls -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """A call on the checkpoint `ck` in a folder, which `prepare` has filled.

    `steps`: what may show for each word of `said`, besides "unknown", for which all may. `again` is
    what the user is told to do after an error; `after` is what then shows.
    """

    name: str
    prepare: Callable[[Path], None]
    act: Callable[[Path], object]
    steps: dict[str, int | None]
    again: Callable[[Path], object]
    after: int | None


def nothing(_: Path) -> None:
    pass


def older(folder: Path) -> None:
    save(folder / "ck", 1)


def source(folder: Path) -> None:
    save(folder / "source", 2)


def source_and_older(folder: Path) -> None:
    source(folder)
    older(folder)


def leftovers(folder: Path) -> None:
    """Leave two committed attempts, an open one, an abandoned one and trash."""
    storage, path = LocalStorage(), folder / "ck"
    save(path, 1)
    (first,) = path.iterdir()
    shutil.copytree(first, folder / "first")
    overwrite(folder)
    (folder / "first").rename(first)
    for is_abandoned in (True, False):
        claim = commit_protocol.claim(storage, str(path), overwrite=True, by="a dead save")
        (Path(claim.folder) / "model-00000.safetensors").write_bytes(b"half")
        if is_abandoned:
            attempts.try_abandon(storage, str(path), claim.attempt, by="me", reason="it failed")
    trash = path / trash_name(Attempt(1, "0123456789abcdef"))
    trash.mkdir()
    (trash / "index.json").touch()


def overwrite(folder: Path) -> None:
    save(folder / "ck", 2, overwrite=True)


def overwrite_again(folder: Path) -> None:
    save(folder / "ck", 3, overwrite=True)


def reshard(folder: Path) -> None:
    dc.reshard(folder / "source", folder / "ck", world_size=2)


def reshard_over(folder: Path) -> None:
    dc.reshard(folder / "source", folder / "ck", world_size=2, overwrite=True)


def gc(folder: Path) -> None:
    removal.remove_all_garbage(LocalStorage(), str(folder), grace_s=-1)


def delete(folder: Path) -> None:
    dc.delete(folder / "ck")


def delete_again(folder: Path) -> None:
    path = folder / "ck"
    names = os.listdir(path) if path.exists() else []
    if any(parse_trash(name) or parse_attempt(name) for name in names):
        delete(folder)  # else the last call was done, and reported as failed


WRITES = {"done": 2, "in place": 2}
CASES = (
    Case(
        "save",
        nothing,
        lambda folder: save(folder / "ck", 2),
        {**WRITES, "not done": None},
        overwrite_again,
        3,
    ),
    Case("save(overwrite=True)", older, overwrite, {**WRITES, "not done": 1}, overwrite_again, 3),
    Case("reshard", source, reshard, {**WRITES, "not done": None}, reshard_over, 2),
    Case(
        "reshard(overwrite=True)",
        source_and_older,
        reshard_over,
        {**WRITES, "not done": 1},
        reshard_over,
        2,
    ),
    Case(
        "delete",
        leftovers,
        delete,
        {"done": None, "deleted": None, "not done": 2},
        delete_again,
        None,
    ),
    Case("gc", leftovers, gc, {"done": 2, "not done": 2}, gc, 2),
)


# --- the loop --------------------------------------------------------------------------------


@dataclass(slots=True)
class Prepared:
    """A case and its folder, which is copied for each try."""

    case: Case
    folder: Path
    exclusive: bool

    def calls(self) -> list[str]:
        """Return the calls of a run without a fault, as `SystemCalls.made` names them."""
        planted = system_calls(None, exclusive=self.exclusive)
        with _copy_of(self.folder) as folder, planted as calls:
            self.case.act(folder)
        return calls.made

    def wrong(self, fault: Fault) -> tuple[str, str]:
        """Return what was said after a fault, and what is wrong with it ("" if nothing is)."""
        case = self.case
        with _copy_of(self.folder) as folder:
            error = self._act(folder, fault)
            word = said(error)
            problem = self._problem(folder, error, word)
            told = f"{case.name}, {fault}: {problem} (it said: {error!r})" if problem else ""
        return word, told

    def _act(self, folder: Path, fault: Fault) -> Exception | None:
        with system_calls(fault, exclusive=self.exclusive):
            try:
                self.case.act(folder)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is looked at
                return error
        return None

    def _problem(self, folder: Path, error: Exception | None, word: str) -> str:
        case = self.case
        # Nobody else is at work, so it is nothing but the storage's fault.
        if error is not None and type(error) is not dc.StorageError:
            return f"a {type(error).__name__}"
        try:
            step = step_at(folder / "ck")
            allowed = case.steps.values() if word == "unknown" else [case.steps.get(word, -1)]
            if step not in allowed:
                return f"step {step} shows"
            if case.prepare in (source, source_and_older) and step_at(folder / "source") != 2:
                return "the source is gone"
            return "" if error is None else self._problem_afterwards(folder)
        except dc.CheckpointError as found:
            return f"then {found!r}"

    def _problem_afterwards(self, folder: Path) -> str:
        """Do what the user was told to do, and collect: that must work, and leave nothing else."""
        self.case.again(folder)
        if (step := step_at(folder / "ck")) != self.case.after:
            return f"afterwards step {step} shows"
        gc(folder)
        names = os.listdir(folder / "ck") if (folder / "ck").exists() else []
        return f"afterwards there is {names}" if len(names) > 1 else ""


@contextmanager
def _copy_of(folder: Path) -> Iterator[Path]:
    path = folder.with_name(f"{folder.name} copy")
    shutil.copytree(folder, path)
    try:
        yield path
    finally:
        shutil.rmtree(path)


def prepared(case: Case, root: Path, *, exclusive: bool) -> Prepared:
    folder = root / f"{case.name} {exclusive}"
    folder.mkdir()
    case.prepare(folder)
    return Prepared(case, folder, exclusive)


def every_fault(calls: Sequence[str]) -> Iterator[Fault]:
    """Yield all faults of so many calls."""
    for number, call in enumerate(calls, 1):
        for code in CODES:
            if code in AGAIN:
                if call.startswith(AGAIN[code]):
                    yield Fault(number, code, done=True)
                continue
            for lasting, done in WAYS:
                yield Fault(number, code, lasting, done)


def some_faults(calls: Sequence[str], only: Sequence[str] = ()) -> Iterator[Fault]:
    """Yield a fault of each kind of call, as told by it and the one before."""
    seen = set()
    ways = cycle(product(WAYS, FEW_CODES))
    for number, kind in enumerate(zip(["", *calls], calls, strict=False), 1):
        if kind in seen or not kind[1].startswith(tuple(only) or ""):
            continue
        seen.add(kind)
        (lasting, done), code = next(ways)
        yield Fault(number, code, lasting, done)


def main(names: Sequence[str]) -> int:
    problems = []
    total: Counter[str] = Counter()
    for exclusive in (True, False):
        for case in CASES:
            if names and case.name not in names:
                continue
            with tempfile.TemporaryDirectory() as root:
                one = prepared(case, Path(root), exclusive=exclusive)
                calls = one.calls()
                words: Counter[str] = Counter()
                for fault in every_fault(calls):
                    word, problem = one.wrong(fault)
                    words[word] += 1
                    if problem:
                        problems.append(f"{problem} [{calls[fault.number - 1]}]")
                rename = "renameat2" if exclusive else "link"
                head = f"{case.name}, by {rename}: {len(calls)} calls, {words.total()} faults"
                print(f"{head}: {dict(words)}", flush=True)
                total += words
    print(f"in all {total.total()} faults: {dict(total)}; {len(problems)} wrong")
    print("\n".join(problems), file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    os.environ["DIST_CKPT_THREADS"] = "1"  # so that the calls come in one order
    logging.disable(logging.CRITICAL)
    sys.exit(main(sys.argv[1:]))
