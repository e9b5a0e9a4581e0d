"""A storage that records its operations, and the states that a crash may leave.

`CrashStorage` works in memory and records every operation. `states` reads the recording. For a
crash after each operation it yields every state that a file system may have after a restart:

- The bytes of a file are durable once it is finished. Before, they may be absent, cut off, without
  their beginning, or zeros.
- A change of a name (create, rename, remove) is durable once its folder is synced. Before, each
  change may be lost, in any combination. A change survives only with all earlier changes of that
  name.
- The name of a folder and the names in it are independent.
"""

# ruff: noqa: D102  # the protocol documents the methods

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from posixpath import dirname
from typing import Literal

from dist_ckpt.core.format.checksums import Buffer
from dist_ckpt.core.storage import Entry, ReadableFile, WritableFile
from dist_ckpt.testing.memory_storage import MemoryStorage

Kind = Literal[
    "make_folder", "create", "write", "finish", "rename", "link", "remove", "sync", "mark"
]


@dataclass(frozen=True, slots=True)
class Operation:
    """One recorded call. `path` is the label of a mark; `file` numbers the created files."""

    kind: Kind
    path: str
    client: str = ""
    new: str = ""
    file: int = -1
    offset: int = 0
    data: bytes = b""

    def __str__(self) -> str:
        return f"{self.kind} {self.path}{self.new and ' -> '}{self.new}"


class CrashStorage:
    """A storage in memory that records its operations. Threads may share it.

    `client` returns a view that records the name of a client. `forget` gets the number of each
    finish and sync. If `forget` returns True, the call succeeds but makes nothing durable: a test
    sees what happens if the code lacks this call.
    """

    def __init__(self, *, forget: Callable[[int, Operation], bool] | None = None) -> None:
        self._recording = _Recording(MemoryStorage(), forget or (lambda _, __: False))
        self._client = ""

    @property
    def log(self) -> tuple[Operation, ...]:
        """The operations so far."""
        with self._recording.lock:
            return tuple(self._recording.log)

    @property
    def num_syncs(self) -> int:
        """The number of finishes and syncs."""
        return self._recording.num_syncs

    def client(self, name: str) -> CrashStorage:
        """Return the same storage for another client, such as a rank or a job."""
        view = CrashStorage()
        view._recording = self._recording
        view._client = name
        return view

    def mark(self, label: str) -> None:
        """Add a mark to the log, for example when a save is acknowledged."""
        self._recording.record(Operation("mark", label, self._client), lambda: None)

    def list(self, folder: str, *, follow: bool = True) -> Sequence[Entry]:
        return self._recording.inner.list(folder, follow=follow)

    def open(self, path: str) -> ReadableFile:
        return self._recording.inner.open(path)

    def make_folder(self, folder: str) -> None:
        self._record(Operation("make_folder", folder, self._client))

    def create(self, path: str, nbytes: int) -> WritableFile:
        recording = self._recording
        with recording.lock:
            inner = recording.inner.create(path, nbytes)
            number = recording.num_files
            recording.num_files += 1
            recording.log.append(Operation("create", path, self._client, file=number))
        return _RecordedFile(recording, inner, path, self._client, number)

    def rename(self, old: str, new: str) -> None:
        self._record(Operation("rename", old, self._client, new=new))

    def link(self, old: str, new: str) -> None:
        self._record(Operation("link", old, self._client, new=new))

    def remove(self, path: str) -> None:
        self._record(Operation("remove", path, self._client))

    def sync(self, folder: str) -> None:
        self._record(Operation("sync", folder, self._client))

    def _record(self, operation: Operation) -> None:
        inner = self._recording.inner
        act = getattr(inner, operation.kind)
        names = (operation.path, operation.new) if operation.new else (operation.path,)
        self._recording.record(operation, lambda: act(*names))


@dataclass(eq=False)
class _Recording:
    inner: MemoryStorage
    forget: Callable[[int, Operation], bool]
    log: list[Operation] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)
    num_files: int = 0
    num_syncs: int = 0

    def record(self, operation: Operation, act: Callable[[], object]) -> None:
        """Run `act`. If it succeeds, record the operation, unless `forget` returns True."""
        with self.lock:
            act()
            if operation.kind in ("finish", "sync"):
                self.num_syncs += 1
                if self.forget(self.num_syncs, operation):
                    return
            self.log.append(operation)


@dataclass(eq=False)
class _RecordedFile:
    _recording: _Recording
    _inner: WritableFile
    _path: str
    _client: str
    _number: int

    @property
    def alignment(self) -> int:
        return self._inner.alignment

    def write_at(self, offset: int, data: Buffer) -> None:
        content = bytes(data)
        operation = Operation(
            "write", self._path, self._client, file=self._number, offset=offset, data=content
        )
        self._recording.record(operation, lambda: self._inner.write_at(offset, content))

    def finish(self) -> int:
        nbytes = 0

        def finish() -> None:
            nonlocal nbytes
            nbytes = self._inner.finish()

        operation = Operation("finish", self._path, self._client, file=self._number)
        self._recording.record(operation, finish)
        return nbytes

    def discard(self) -> None:
        self._inner.discard()


@dataclass(frozen=True, slots=True)
class CrashPoint:
    """A crash after the first `number` operations, of which `after` was the last."""

    number: int
    after: Operation
    marks: tuple[str, ...]

    def __str__(self) -> str:
        return f"crash after operation {self.number} ({self.after}), marks {self.marks}"


def states(
    log: Sequence[Operation], *, since: str = "", own_syncs: bool = False, limit: int = 2000
) -> Iterator[tuple[CrashPoint, MemoryStorage]]:
    """Yield every state that a crash may leave, at every point after the mark `since`.

    `own_syncs`: a sync covers only the names that its client changed, as on a network file system
    whose clients delay changes. Each state is yielded once for the same marks. If a point has more
    than `limit` states, a sample is yielded: the first `limit`, the two extremes, all states that
    differ from an extreme in one choice, and `limit` random ones.
    """
    disk = _Disk(own_syncs=own_syncs)
    marks: tuple[str, ...] = ()
    seen: set[tuple[object, ...]] = set()
    for number, operation in enumerate(log, 1):
        disk.apply(operation)
        if operation.kind == "mark":
            marks = (*marks, operation.path)
        if since and since not in marks:
            continue
        if operation.kind in ("finish", "sync"):
            continue  # every state after it is possible before it, and was yielded
        for tree in disk.trees(limit):
            key = (marks, *tree.items())
            if key not in seen:
                seen.add(key)
                yield CrashPoint(number, operation, marks), MemoryStorage(tree)


Node = int


@dataclass(slots=True)
class _Change:
    """One change of the names in a folder: `old` is removed, `new` is a name of `node`."""

    old: str
    new: str
    node: Node
    client: str
    durable: bool = False


@dataclass(slots=True)
class _FileOnDisk:
    writes: list[tuple[int, bytes]] = field(default_factory=list)
    num_durable: int = 0

    def contents(self) -> list[bytes]:
        """Return the possible contents after a crash; the complete content comes last."""
        full = _join_writes(self.writes)
        if self.num_durable == len(self.writes):
            return [full]
        least = _join_writes(self.writes[: self.num_durable])
        headless = _join_writes(self.writes[self.num_durable + 1 :])
        cut = full[: (len(least) + len(full)) // 2]
        return list(dict.fromkeys([least, cut, headless, bytes(len(full)), full]))


def _join_writes(writes: Sequence[tuple[int, bytes]]) -> bytes:
    content = bytearray()
    for offset, data in writes:
        content.extend(bytes(max(0, offset - len(content))))
        content[offset : offset + len(data)] = data
    return bytes(content)


class _Disk:
    """Folders and files by number, with all changes and their durability."""

    def __init__(self, *, own_syncs: bool) -> None:
        self._own_syncs = own_syncs
        self._folders: dict[Node, list[_Change]] = {0: []}
        self._files: dict[Node, _FileOnDisk] = {}
        self._opened: dict[int, Node] = {}
        self._names: dict[str, Node] = {"/": 0}

    def apply(self, operation: Operation) -> None:
        """Update folders and files by one operation."""
        match operation.kind:
            case "make_folder" | "create":
                node = len(self._folders) + len(self._files)
                if operation.kind == "create":
                    self._files[node] = _FileOnDisk()
                    self._opened[operation.file] = node
                else:
                    self._folders[node] = []
                self._names[operation.path] = node
                self._change(operation, "", operation.path, node)
            case "rename":
                self._change(operation, operation.path, operation.new, self._move(operation))
            case "link":
                node = self._names[operation.new] = self._names[operation.path]
                self._change(operation, "", operation.new, node)
            case "remove":
                self._change(operation, operation.path, "", self._names.pop(operation.path))
            case "write":
                file = self._files[self._opened[operation.file]]
                file.writes.append((operation.offset, operation.data))
            case "finish":
                file = self._files[self._opened[operation.file]]
                file.num_durable = len(file.writes)
            case "sync":
                self._sync(self._folders[self._names[operation.path]], operation.client)

    def _move(self, operation: Operation) -> Node:
        """Rename a file, or a folder with all paths below it."""
        below = operation.path + "/"
        for path in [p for p in self._names if f"{p}/".startswith(below)]:
            self._names[operation.new + path[len(operation.path) :]] = self._names.pop(path)
        return self._names[operation.new]

    def _sync(self, changes: Sequence[_Change], client: str) -> None:
        """Make changes of the client durable, and the changes that they depend on."""
        needed: set[Node | str] = set()
        for change in reversed(changes):
            is_own = not self._own_syncs or change.client == client
            if is_own or change.durable or not needed.isdisjoint({change.node, change.old}):
                change.durable = True
                needed |= {change.node, change.new}

    def _change(self, operation: Operation, old: str, new: str, node: Node) -> None:
        folder = self._folders[self._names[dirname(old or new)]]
        change = _Change(old.rpartition("/")[2], new.rpartition("/")[2], node, operation.client)
        folder.append(change)

    def trees(self, limit: int) -> Iterator[dict[str, bytes | None]]:
        """Yield the possible trees after a crash now, some of them perhaps twice."""
        numbers: list[int] = []
        for _ in range(limit):
            choices = _Choices(numbers)
            yield self._tree(choices)
            # Count up to the next combination, like an odometer.
            numbers = choices.numbers
            while numbers and numbers[-1] == choices.sizes[len(numbers) - 1] - 1:
                numbers.pop()
            if not numbers:
                return
            numbers[-1] += 1
        yield from self._sample(limit)

    def _sample(self, limit: int) -> Iterator[dict[str, bytes | None]]:
        for default in (_choose_first, lambda size: size - 1):
            choices = _Choices([], default)
            yield self._tree(choices)
            for position, size in enumerate(choices.sizes):
                for choice in range(size):
                    numbers = [*choices.numbers[:position], choice]
                    yield self._tree(_Choices(numbers, default))
        drawn = random.Random(0)
        for _ in range(limit):
            yield self._tree(_Choices([], drawn.randrange))

    def _tree(self, choices: _Choices, path: str = "", folder: Node = 0) -> dict[str, bytes | None]:
        tree: dict[str, bytes | None] = {}
        names: dict[str, Node] = {}
        lost: set[Node] = set()
        for change in self._folders[folder]:
            # A change survives only if all earlier ones of the same node and name did.
            is_possible = change.node not in lost and change.new not in names
            if not is_possible or not (change.durable or choices.choose(2)):
                lost.add(change.node)
                continue
            names.pop(change.old, None)
            if change.new:
                names[change.new] = change.node
        for name, node in sorted(names.items()):
            below = f"{path}/{name}"
            if node in self._files:
                contents = self._files[node].contents()
                tree[below] = contents[choices.choose(len(contents))]
            else:
                tree[below] = None
                tree |= self._tree(choices, below, node)
        return tree


def _choose_first(size: int) -> int:
    return 0


@dataclass(eq=False)
class _Choices:
    """A source of choices: from a list first, then by `default`. It records all choices."""

    _prefix: Sequence[int]
    _default: Callable[[int], int] = _choose_first
    numbers: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def choose(self, size: int) -> int:
        if size == 1:
            return 0
        position = len(self.numbers)
        is_in_prefix = position < len(self._prefix)
        choice = self._prefix[position] if is_in_prefix else self._default(size)
        self.numbers.append(min(choice, size - 1))
        self.sizes.append(size)
        return self.numbers[-1]
