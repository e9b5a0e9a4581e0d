"""Which attempt is the checkpoint: the one file that decides it, how it is read and put.

An attempt is open until its `index.json` exists. That file says "committed" or "abandoned"; it is
created once, exclusively, and never changes. The checkpoint at a path is its highest attempt
that is committed.

What to do with files of other systems that lie where a checkpoint was looked for. Pure.
"""

from __future__ import annotations

import posixpath
import secrets
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

from dist_ckpt.core.format.filenames import (
    ANNOTATIONS,
    CLAIM,
    INDEX,
    OLD_ANNOTATIONS,
    Attempt,
    parse_attempt,
    parse_trash,
    temporary_index,
    trash_name,
)
from dist_ckpt.core.format.index import index_json
from dist_ckpt.core.format.index.index import Abandoned, Index
from dist_ckpt.core.storage import Entry, Storage
from dist_ckpt.errors import (
    CheckpointError,
    CorruptError,
    IncompatibleError,
    NotFoundError,
    StorageError,
)


def hint_for(names: Set[str]) -> str:
    """Say what to do with files that no save of ours has written."""
    if {"model.safetensors", "model.safetensors.index.json"} & names:
        return (
            "They are of Hugging Face: dc.open and dc.load read them, and `dist-ckpt import --from "
            "hf` makes a checkpoint of them"
        )
    if any(name.endswith(".safetensors") for name in names):
        return "Pass one of these files, or add model.safetensors.index.json"
    if any(name.endswith(".distcp") for name in names):
        return (
            "They are of torch.distributed.checkpoint, without the .metadata that its saves write "
            "last: this one did not end. Use another one"
        )
    return "Pass the folder that was given to save"


# How much is kept of a text that says who abandoned an attempt, or why.
MAX_TEXT = 2000

# How often the attempts at a path may change while somebody looks for the highest.
ROUNDS = 16

AttemptState = Literal["open", "committed", "abandoned", "damaged", "incompatible"]


@dataclass(frozen=True, slots=True)
class Status:
    """What is known of one attempt; `modified_at` is its newest file's, by the storage's clock.

    "damaged": its index cannot be read; "incompatible": a newer dist_ckpt wrote it.
    """

    attempt: Attempt
    state: AttemptState
    modified_at: float
    nbytes: int


# Of a folder that is no checkpoint, so many names are looked into for a message.
MAX_ATTEMPTS_READ = 16


def new_id() -> str:
    """Return a random id, for an attempt or a temporary file."""
    return secrets.token_hex(8)


# --- reading ---------------------------------------------------------------------------------


def find(storage: Storage, path: str) -> tuple[Attempt, Index]:
    """Return the checkpoint at `path`: its highest committed attempt and the index of it.

    Raises NotFoundError, saying what is there instead. Raises CorruptError or IncompatibleError
    if the highest attempt that has an index has one that cannot be read: it is never skipped,
    because what lies below is older than what was reported saved.
    """
    seen: list[Attempt] | None = None
    for _ in range(ROUNDS):
        there = list_attempts(storage, path)
        for attempt in reversed(there):
            document = read_index(storage, path, attempt)
            if isinstance(document, Index):
                return attempt, document
        # One that was open when it was read may have been committed since, and an older one
        # removed before it was read: then the attempts are others now.
        if there == seen:
            raise not_found_error(storage, path)
        seen = there
    raise StorageError(f"{path}: its attempts change faster than they can be read: try again")


def statuses(storage: Storage, path: str) -> tuple[Status, ...]:
    """Return what every attempt at `path` is, lowest first; none if there is no such folder."""
    found = []
    for entry in _entries_of_attempts(storage, path):
        for attempt in attempts_in([entry]):
            with suppress(FileNotFoundError, NotADirectoryError):  # removed since it was listed
                found.append(_status(storage, path, attempt, entry.modified_at))
    return tuple(sorted(found, key=lambda status: status.attempt))


def list_attempts(storage: Storage, path: str) -> list[Attempt]:
    """Return the attempts at `path`, lowest first; none if there is no such folder."""
    return sorted(attempts_in(_entries_of_attempts(storage, path)))


def _entries_of_attempts(storage: Storage, path: str) -> Sequence[Entry]:
    # Facts lie in folders of the names of attempts, and nobody is to remove a pin as a dead save.
    above = posixpath.basename(posixpath.dirname(path))
    is_of_facts = above in (ANNOTATIONS, OLD_ANNOTATIONS)
    return [] if is_of_facts else entries_at(storage, path)


def entries_at(storage: Storage, path: str) -> Sequence[Entry]:
    """Return what is at `path`; nothing if there is no such folder."""
    try:
        return storage.list(path)
    except (FileNotFoundError, NotADirectoryError):
        return []


def attempts_in(entries: Iterable[Entry]) -> Iterator[Attempt]:
    """Pick the attempts out of a folder's entries."""
    for entry in entries:
        if entry.kind == "folder" and (attempt := parse_attempt(entry.name)) is not None:
            yield attempt


def trash_at(storage: Storage, path: str) -> list[Entry]:
    """Return what is named like trash at a path: folders, and what is not ours."""
    return [entry for entry in entries_at(storage, path) if parse_trash(entry.name) is not None]


def was_removed(storage: Storage, path: str, attempt: Attempt) -> bool:
    """Say whether an attempt that somebody claimed is gone, as its trash or a later one tells.

    False if nothing tells: where storage is not shared, it was never there. Of the same number
    another attempt tells nothing, since numbers begin at 1 on every storage.
    """
    entries = entries_at(storage, path)
    there = set(attempts_in(entries))
    if attempt in there:
        return False
    trash = trash_name(attempt)
    is_fenced = any(other.number > attempt.number for other in there)
    return is_fenced or any(entry.name == trash for entry in entries)


def has_index(storage: Storage, path: str, attempt: Attempt) -> bool:
    """Say whether an attempt is decided, without reading what its index says."""
    return _exists(storage, f"{path}/{attempt}/{INDEX}")


def is_there(storage: Storage, path: str, attempt: Attempt) -> bool:
    """Say whether an attempt has its folder still: to remove it is to rename that first."""
    return attempt in list_attempts(storage, path)


@contextmanager
def not_found_if_removed(storage: Storage, path: str, attempt: Attempt) -> Iterator[None]:
    """Tell a committed attempt that was removed under its reader from one that is damaged.

    An overwrite or a delete removes what somebody may still be reading. What that reader takes
    for damage becomes NotFoundError: whoever looks again finds the newer checkpoint, if any.
    """
    try:
        yield
    except (CorruptError, FileNotFoundError) as error:
        if is_there(storage, path, attempt):
            raise
        raise NotFoundError(
            f"{path}/{attempt} was replaced or deleted while it was read: open {path} again"
        ) from error


def read_index(storage: Storage, path: str, attempt: Attempt) -> Index | Abandoned | None:
    """Return what the index of an attempt says, or None if it is open, or gone."""
    file = f"{path}/{attempt}/{INDEX}"
    try:
        data = read_document(storage, file)
    except FileNotFoundError:
        return None
    document = index_json.decode(data, label=file)
    if document.attempt != attempt.name:
        raise CorruptError(
            f"{file} is the index of {document.attempt}: give the folder back its name, "
            f"or use another checkpoint"
        )
    return document


def read_document(
    storage: Storage, file: str, max_nbytes: int = index_json.MAX_NBYTES_OF_INDEX
) -> bytes:
    """Return the content of a file that ought to be a document. FileNotFoundError if it is not."""
    reader = storage.open(file)
    try:
        if reader.nbytes > max_nbytes:
            raise CorruptError(
                f"{file} has {reader.nbytes} bytes, none of ours has more than {max_nbytes}: use "
                "another checkpoint"
            )
        data = bytearray(reader.nbytes)
        count = reader.read_into(0, memoryview(data))
    finally:
        reader.close()
    return bytes(data[:count])


def claimed_by(storage: Storage, path: str, attempt: Attempt) -> str:
    """Return by whom an attempt was claimed, for a message."""
    file = f"{path}/{attempt}/{CLAIM}"
    try:
        document = index_json.decode(read_document(storage, file), label=file)
    except (CheckpointError, FileNotFoundError):
        return "by somebody who is not known yet"
    return f"by {document.by if isinstance(document, Abandoned) else 'somebody who is not known'}"


def not_found_error(storage: Storage, path: str) -> NotFoundError:
    """Return the error that says what is at a path where no checkpoint is."""
    return NotFoundError(f"{path}: no checkpoint is here: {_what_is_at(storage, path)}")


def _what_is_at(storage: Storage, path: str) -> str:
    try:
        entries = storage.list(path)
    except FileNotFoundError:
        return "there is no such folder, or a link that leads nowhere. Check the path"
    except NotADirectoryError:
        return "it is a file. Pass the folder that was given to save"
    states = [status.state for status in statuses(storage, path)]
    told = [
        f"{number} {what}"
        for number, what in (
            (states.count("open"), "unfinished (a save is running, or died)"),
            (states.count("abandoned"), "abandoned"),
            (sum(parse_trash(entry.name) is not None for entry in entries), "being removed"),
        )
        if number
    ]
    if told:
        return f"its attempts are {', '.join(told)}. Use another checkpoint, or save again"
    if not entries:
        return "the folder is empty. Check the path"
    if any(
        _is_checkpoint(storage, f"{path}/{entry.name}") for entry in entries[:MAX_ATTEMPTS_READ]
    ):
        return f"it is the folder of a run. Name one of its checkpoints, such as {path}@latest"
    names = ", ".join(entry.name for entry in entries[:5]) + ", ..." * (len(entries) > 5)
    return f"the folder holds {names}. {hint_for({entry.name for entry in entries})}"


def _is_checkpoint(storage: Storage, path: str) -> bool:
    return any(has_index(storage, path, attempt) for attempt in list_attempts(storage, path))


def _status(storage: Storage, path: str, attempt: Attempt, made_at: float) -> Status:
    folder = f"{path}/{attempt}"
    entries = storage.list(folder, follow=False)
    try:
        document = read_index(storage, path, attempt)
    except CorruptError:
        state: AttemptState = "damaged"
    except IncompatibleError:
        state = "incompatible"
    else:
        if document is None:
            state = "open"
        else:
            state = "committed" if isinstance(document, Index) else "abandoned"
    return Status(
        attempt,
        state,
        max((entry.modified_at for entry in entries), default=made_at),
        sum(entry.nbytes for entry in entries),
    )


def _exists(storage: Storage, file: str) -> bool:
    try:
        storage.open(file).close()
    except FileNotFoundError:
        return False
    except CorruptError:  # a link or a folder has the name
        return True
    return True


# --- putting ---------------------------------------------------------------------------------


def abandon(storage: Storage, path: str, attempt: Attempt, *, by: str, reason: str) -> bool:
    """Give up an attempt, whoever's it is; settle what became of it.

    True: it is abandoned, or gone, so that it is certain not to be committed, now or later.
    False: it is committed. Both are durable. Raises StorageError if neither could be
    established, CorruptError if its index cannot be read.
    """
    folder = f"{path}/{attempt}"
    try:
        there = read_index(storage, path, attempt)
        if there is None:
            data = encode_abandoned(attempt, by=by, reason=reason)
            there = _put_abandoned(storage, path, attempt, data)
        else:
            storage.sync(folder)  # whoever put it may have died before doing so
    except FileNotFoundError as error:
        if not is_gone(storage, folder):
            raise StorageError(f"{folder}: an index vanished while it was put: {error}") from error
        return True
    return not isinstance(there, Index)


def encode_abandoned(attempt: Attempt, *, by: str, reason: str) -> bytes:
    """Return the index that says "abandoned"; text that JSON cannot hold never prevents it."""
    by, reason = (
        text[:MAX_TEXT].encode("utf-8", "replace").decode("utf-8") for text in (by, reason)
    )
    return index_json.encode(Abandoned(attempt.name, by, reason))


def _put_abandoned(
    storage: Storage, path: str, attempt: Attempt, data: bytes
) -> Index | Abandoned | None:
    folder = f"{path}/{attempt}"
    temporary = f"{folder}/{temporary_index(new_id())}"
    try:
        store(storage, temporary, data)
    except StorageError:
        # No space is the likeliest reason to give up. The claim was written as an index that
        # says "abandoned", so that putting it needs none.
        if not _exists(storage, f"{folder}/{CLAIM}"):
            raise
        return put_index(storage, path, attempt, f"{folder}/{CLAIM}")
    there = put_index(storage, path, attempt, temporary)
    if isinstance(there, Index):
        _discard(storage, temporary)  # nothing of ours stays in a committed attempt
    return there


def put_index(
    storage: Storage, path: str, attempt: Attempt, temporary: str
) -> Index | Abandoned | None:
    """Rename `temporary` to the attempt's index, unless it has one; return that one, or None.

    Commit and abandon race for this one name, and the storage picks the winner. On return the
    index is durable, whoever put it. FileNotFoundError if the attempt is gone.
    """
    folder = f"{path}/{attempt}"
    there: Index | Abandoned | None = None
    try:
        storage.rename(temporary, f"{folder}/{INDEX}")
    except (StorageError, FileNotFoundError, FileExistsError) as error:
        # The storage may have renamed it and lost the reply: what is there counts.
        there = read_index(storage, path, attempt)
        if there is None:
            if isinstance(error, FileExistsError):  # removed since, with the whole attempt
                raise FileNotFoundError(folder) from error
            raise
    storage.sync(folder)
    return there


def store(storage: Storage, file: str, data: bytes) -> None:
    """Write a small file; its bytes are durable on return, its name is not yet."""
    writer = storage.create(file, len(data))
    try:
        with ExitStack() as stack:
            stack.callback(writer.discard)
            writer.write_at(0, data)
            nbytes = writer.finish()
        if nbytes != len(data):
            raise StorageError(
                f"{file} has {nbytes} bytes after writing {len(data)}: check the storage"
            )
    except StorageError:
        _discard(storage, file)
        raise


def _discard(storage: Storage, file: str) -> None:
    """Remove a temporary file; if that fails, it goes with its attempt."""
    with suppress(StorageError, FileNotFoundError, NotADirectoryError):
        storage.remove(file)


def is_gone(storage: Storage, folder: str) -> bool:
    """Say whether a folder that was there has certainly been removed."""
    try:
        storage.list(folder)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except StorageError:
        return False
    return False
