"""A model checker that runs real code: every interleaving of a few programs on one storage.

A program is a chain of functions: each gets a storage and what the one before returned. They are
deterministic, so what one does next follows from the answers that the storage gave it so far: it
is run again from its start with those answers until it asks for something new. A state of the
whole is the files and, of every program, the function, what it was given and the answers; a
breadth-first search visits them all. Where code knows that what it does next depends on less than
all answers so far, it says so (`forget_answers`). A program that takes no further step has died.
Writing and syncing are no steps of their own: others see names, and contents only once renamed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dist_ckpt.core.format.checksums import Buffer
from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.core.storage import Entry, ReadableFile, Storage, WritableFile
from dist_ckpt.errors import StorageError
from dist_ckpt.testing.memory_storage import MemoryStorage

Files = Mapping[str, bytes | None]
Call = tuple[str, ...]
Program = Sequence[Callable[[Storage, Any], object]]

_CHANGES = ("make_folder", "create", "rename", "remove")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a program says at its end: what became of which attempt."""

    what: str
    attempt: Attempt | None = None


@dataclass(frozen=True, slots=True)
class State:
    """What a check sees; `outcomes` are None for programs that still run, or died."""

    files: Files
    outcomes: Mapping[str, Outcome | None]
    notes: frozenset[object]


# The files, the faults that are left, and the notes.
_Scene = tuple[int, int, frozenset[object]]

# A state is one number, for there are millions: that of its scene, and above it those of the nodes.
_BITS = 20
_MASK = (1 << _BITS) - 1


@dataclass(eq=False, slots=True)
class _Node:
    """Where a program is, and where each answer to its question leads: (written, node)."""

    number: int
    function: int
    given: object
    answers: tuple[object, ...]
    keys: tuple[object, ...]
    asked: Call | None = None
    outcome: Outcome | None = None
    next: dict[object, tuple[Mapping[str, bytes], _Node]] = field(default_factory=dict)


class Model:
    """All interleavings of `programs`, beginning with `files`.

    `num_faults` changes in a run may fail, without effect or with it (a lost reply). `prepare` is
    called with a program's name and function number before that runs. What `note` returns about a
    rename, given who does it, the call and the files before, is kept in the state if not None.
    A call that is `private` is done at once, before anybody else moves.
    """

    def __init__(
        self,
        programs: Mapping[str, Program],
        files: Files,
        *,
        prepare: Callable[[str, int], None],
        note: Callable[[str, Call, Files], object | None] = lambda *_: None,
        num_faults: int = 0,
        private: Callable[[Call], bool] = lambda _: False,
    ) -> None:
        self._private = private
        self._programs = programs
        self._prepare = prepare
        self._note = note
        self._worlds: list[Files] = []
        self._numbers: dict[frozenset[tuple[str, bytes | None]], int] = {}
        self._scenes: list[_Scene] = []
        self._scene_numbers: dict[_Scene, int] = {}
        self._nodes: list[_Node] = []
        self._places: dict[object, _Node] = {}
        self._answers: dict[tuple[int, Call], tuple[object, object, int]] = {}
        self._checked: dict[object, str | None] = {}
        self._first = self._scene((self._world(files), num_faults, frozenset()))
        self.num_states = 0

    def search(self, check: Callable[[State], str | None]) -> Iterator[tuple[str, list[str]]]:
        """Yield what `check` finds wrong, each once, with the shortest way there."""
        programs = [(name, _BITS * i) for i, name in enumerate(self._programs, 1)]
        first = self._first
        for name, shift in programs:
            first += self._run(name, 0, None, (), ())[1].number << shift
        came: dict[int, int] = {first: first}
        queue = deque([first] if (wrong := self._wrong(first, check)) is None else [])
        found = {None, wrong}
        if wrong is not None:
            yield wrong, []
        known: dict[int, list[tuple[int, bool]]] = {}
        while queue:
            state = queue.popleft()
            for name, shift in programs:
                # What a program may do next, whatever the others are about to do.
                place = (state >> shift & _MASK) << _BITS | state & _MASK
                if (moves := known.get(place)) is None:
                    known[place] = moves = [move[:2] for move in self._moves(name, shift, state)]
                for difference, shows in moves:
                    after = state + difference
                    if after in came:
                        continue
                    came[after] = state
                    if not shows or (wrong := self._wrong(after, check)) is None:
                        queue.append(after)
                    elif wrong not in found:
                        found.add(wrong)
                        yield wrong, self._way(programs, came, after)
        self.num_states = len(came)

    def _wrong(self, state: int, check: Callable[[State], str | None]) -> str | None:
        (world, _, notes), nodes = self._unpack(state)
        outcomes = tuple(node.outcome for node in nodes)
        if (world, outcomes, notes) not in self._checked:
            named = dict(zip(self._programs, outcomes, strict=True))
            wrong = check(State(self._worlds[world], named, notes))
            self._checked[world, outcomes, notes] = wrong
        return self._checked[world, outcomes, notes]

    def _unpack(self, state: int) -> tuple[_Scene, list[_Node]]:
        above = range(1, len(self._programs) + 1)
        nodes = [self._nodes[state >> _BITS * i & _MASK] for i in above]
        return self._scenes[state & _MASK], nodes

    def _way(
        self, programs: Sequence[tuple[str, int]], came: Mapping[int, int], state: int
    ) -> list[str]:
        steps: list[str] = []
        while (before := came[state]) != state:
            moves = (move for one in programs for move in self._moves(*one, before))
            steps.append(next(label for change, _, label in moves if before + change == state))
            state = before
        return steps[::-1]

    def _moves(self, name: str, shift: int, state: int) -> Iterator[tuple[int, bool, str]]:
        """Yield how a program may change a state, whether that shows to a check, and its name."""
        old_scene, old_node = state & _MASK, state >> shift & _MASK
        (world, faults, notes), node = self._scenes[old_scene], self._nodes[old_node]
        if node.asked is None:
            return
        for how, answer, key, then, left in self._replies(world, node.asked, faults):
            written, child = self._follow(name, node, answer, key)
            noted = notes
            if node.asked[0] == "rename" and then != world:
                note = self._note(name, node.asked, self._worlds[world])
                noted = notes if note is None else notes | {note}
            after, child = self._go_on(name, self._write(then, written), child)
            scene = self._scene((after, left, noted))
            difference = scene - old_scene + ((child.number - old_node) << shift)
            shows = scene != old_scene or child.outcome is not None
            yield difference, shows, f"{name}: {' '.join(node.asked)}{how}"

    def _go_on(self, name: str, world: int, node: _Node) -> tuple[int, _Node]:
        """Do a program's private calls."""
        while node.asked is not None and self._private(node.asked):
            answer, key, world = self._answer(world, node.asked)
            written, node = self._follow(name, node, answer, key)
            world = self._write(world, written)
        return world, node

    def _follow(
        self, name: str, node: _Node, answer: object, key: object
    ) -> tuple[Mapping[str, bytes], _Node]:
        if key not in node.next:
            answers, keys = (*node.answers, answer), (*node.keys, key)
            node.next[key] = self._run(name, node.function, node.given, answers, keys)
        return node.next[key]

    def _replies(
        self, world: int, call: Call, faults: int
    ) -> Iterator[tuple[str, object, object, int, int]]:
        """Yield what may come of a call: how, the answer and its key, the files, faults left."""
        answer, key, then = self._answer(world, call)
        failed = isinstance(answer, Exception)
        yield f": {type(answer).__name__}" * failed, answer, key, then, faults
        if faults and call[0] in _CHANGES:
            error = StorageError("a planted fault")
            yield ", which fails", error, "fault", world, faults - 1
            if not failed:
                yield ", the reply is lost", error, "fault", then, faults - 1

    def _answer(self, world: int, call: Call) -> tuple[object, object, int]:
        if (world, call) not in self._answers:
            storage = MemoryStorage(self._worlds[world], clock=lambda: 0.0)
            answer = _ask(storage, call)
            failed = isinstance(answer, Exception)
            key = (type(answer), str(answer)) if failed else answer
            changed = call[0] in _CHANGES and not failed
            then = self._world(storage.tree()) if changed else world
            self._answers[world, call] = (answer, key, then)
        return self._answers[world, call]

    def _run(
        self,
        name: str,
        function: int,
        given: object,
        answers: tuple[object, ...],
        keys: tuple[object, ...],
    ) -> tuple[Mapping[str, bytes], _Node]:
        """Run a program up to its next question; return what it wrote since the last one."""
        replay = Replay(answers)
        self._prepare(name, function)
        try:
            result = self._programs[name][function](replay, given)
        except _AskedError:
            place = (name, function, given, replay.knows, keys[replay.num_forgotten :])
            node = _Node(len(self._nodes), function, given, answers, keys, asked=replay.asked)
            return replay.written, self._placed(place, node)
        if isinstance(result, Outcome):
            node = _Node(len(self._nodes), function, given, (), (), outcome=result)
            return replay.written, self._placed((name, result), node)
        written, node = self._run(name, function + 1, result, (), ())
        return {**replay.written, **written}, node

    def _placed(self, place: object, node: _Node) -> _Node:
        if place not in self._places:
            assert node.number <= _MASK
            self._places[place] = node
            self._nodes.append(node)
        return self._places[place]

    def _write(self, world: int, written: Mapping[str, bytes]) -> int:
        files = self._worlds[world]
        # What is written into a file that was removed, or moved with its folder, nobody sees.
        seen = {path: data for path, data in written.items() if path in files}
        return self._world({**files, **seen}) if seen else world

    def _world(self, files: Files) -> int:
        key = frozenset(files.items())
        if key not in self._numbers:
            self._numbers[key] = len(self._worlds)
            self._worlds.append(files)
        return self._numbers[key]

    def _scene(self, scene: _Scene) -> int:
        if scene not in self._scene_numbers:
            assert len(self._scenes) <= _MASK
            self._scene_numbers[scene] = len(self._scenes)
            self._scenes.append(scene)
        return self._scene_numbers[scene]


def _ask(storage: MemoryStorage, call: Call) -> object:
    method, *arguments = call
    try:
        if method == "open":
            reader = storage.open(*arguments)
            data = bytearray(reader.nbytes)
            reader.read_into(0, memoryview(data))
            return bytes(data)
        if method == "create":
            storage.create(arguments[0], 0)
            return None
        answer = getattr(storage, method)(*arguments)
    except Exception as error:  # noqa: BLE001  (whatever it is, it is the answer)
        return error
    return tuple(answer) if method == "list" else answer


class _AskedError(BaseException):
    """The program asks for what it has no answer to yet. No clean-up catches it."""


class Replay:
    """A storage that gives recorded answers, and stops the program at the first new question."""

    def __init__(self, answers: Sequence[object]) -> None:
        self._answers = answers
        self._count = 0
        self.knows: object = None
        self.num_forgotten = 0
        self.asked: Call | None = None
        self.written: dict[str, bytes] = {}

    def forget_answers(self, knows: object) -> None:
        """Note that all that the program does from here on follows from `knows`."""
        self.knows = knows
        self.num_forgotten = self._count

    def _ask(self, *call: str) -> Any:
        if self._count == len(self._answers):
            self.asked = self.asked or call
            raise _AskedError
        self._count += 1
        if self._count == len(self._answers):
            self.written.clear()  # what was written before is in the files already
        answer = self._answers[self._count - 1]
        if isinstance(answer, Exception):
            raise answer.with_traceback(None)  # else it would hold each frame it came through
        return answer

    def list(self, folder: str, *, follow: bool = True) -> Sequence[Entry]:
        entries: Sequence[Entry] = self._ask("list", folder)
        return entries

    def make_folder(self, folder: str) -> None:
        self._ask("make_folder", folder)

    def create(self, path: str, nbytes: int) -> WritableFile:
        self._ask("create", path)
        return _File(self.written, path)

    def open(self, path: str) -> ReadableFile:
        return _Content(self._ask("open", path))

    def rename(self, old: str, new: str) -> None:
        self._ask("rename", old, new)

    def link(self, old: str, new: str) -> None:
        self._ask("link", old, new)

    def remove(self, path: str) -> None:
        self._ask("remove", path)

    def sync(self, folder: str) -> None:
        pass


class _File:
    def __init__(self, written: dict[str, bytes], path: str) -> None:
        self._written = written
        self._path = path
        self._data = bytearray()

    @property
    def alignment(self) -> int:
        return 1

    def write_at(self, offset: int, data: Buffer) -> None:
        self._data.extend(bytes(max(0, offset - len(self._data))))
        self._data[offset : offset + len(data)] = data
        self._written[self._path] = bytes(self._data)

    def finish(self) -> int:
        return len(self._data)

    def discard(self) -> None:
        pass


class _Content:
    num_links = 1

    def __init__(self, data: bytes) -> None:
        self._data = data

    @property
    def nbytes(self) -> int:
        return len(self._data)

    def read_into(self, offset: int, target: memoryview) -> int:
        part = self._data[offset : offset + len(target)]
        target[: len(part)] = part
        return len(part)

    def close(self) -> None:
        pass
