"""Read and write `index.json`, which decides which attempt at a path is the checkpoint.

An attempt is open until it has an `index.json`, which says "committed" or "abandoned". This file is
created exclusively, and never changes. The checkpoint at a path is its highest committed attempt.
"""

from __future__ import annotations

import posixpath
import secrets
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from dist_ckpt.core.format.filenames import (
    ANNOTATIONS,
    CLAIM,
    INCARNATIONS,
    INDEX,
    OLD_ANNOTATIONS,
    RESERVED_NAMES,
    Attempt,
    parse_attempt,
    parse_trash,
    temporary_name,
    trash_name,
)
from dist_ckpt.core.format.index import index_json
from dist_ckpt.core.format.index.index import Abandoned, Index
from dist_ckpt.core.storage import Entry, Storage, is_readable_step
from dist_ckpt.errors import (
    CheckpointError,
    CorruptError,
    ExistsError,
    IncompatibleError,
    NotFoundError,
    StorageError,
)

# The most characters of each text in an abandoned index: who abandoned the attempt, and why.
MAX_TEXT = 2000

# How often to repeat a step because other processes change its folder.
MAX_TRIES = 16

# How many entries of a folder without a checkpoint are examined for the error message.
MAX_ATTEMPTS_READ = 16

# The remedy for the folder of a run whose first save is not committed yet.
NOTHING_YET = "Wait for its first save with dc.Run({!r}).lease_newer()"

AttemptState = Literal["open", "committed", "abandoned", "damaged", "incompatible", "unreadable"]


@dataclass(frozen=True, slots=True)
class Status:
    """The state of one attempt. `modified_at` is the time of its newest file, by the storage.

    "damaged": the index is damaged. "incompatible": a newer dist_ckpt wrote the index. Only the
    listing of a run has "unreadable": the storage cannot read the checkpoint, for example
    because a permission is missing.
    """

    attempt: Attempt
    state: AttemptState
    modified_at: float
    nbytes: int


def new_id() -> str:
    """Return a random id, for an attempt or a temporary file."""
    return secrets.token_hex(8)


# --- reading ---------------------------------------------------------------------------------


def find_checkpoint(storage: Storage, path: str) -> tuple[Attempt, Index]:
    """Return the checkpoint at `path`: its highest committed attempt and that attempt's index.

    Raises NotFoundError without a checkpoint; the message describes the contents of the path.
    Raises CorruptError or IncompatibleError if the highest index cannot be read. That attempt is
    never skipped: a lower attempt is older than the last save that returned.
    """
    seen: list[Attempt] | None = None
    for _ in range(MAX_TRIES):
        attempts = list_attempts(storage, path)
        for attempt in reversed(attempts):
            document = read_index(storage, path, attempt)
            if isinstance(document, Index):
                return attempt, document
        # Meanwhile a save may have committed a higher attempt that was open, and removed an older
        # one. Then the list has changed: look again.
        if attempts == seen:
            raise not_found_error(storage, path)
        seen = attempts
    raise StorageError(f"{path}: its attempts change faster than they can be read: try again")


def list_statuses(storage: Storage, path: str) -> tuple[Status, ...]:
    """Return the state of every attempt at `path`, lowest first; () without the folder."""
    result = []
    for entry in list_attempt_entries(storage, path):
        for attempt in parse_attempts([entry]):
            with suppress(FileNotFoundError, NotADirectoryError):  # removed since it was listed
                result.append(_status(storage, path, attempt, entry.modified_at))
    return tuple(sorted(result, key=attrgetter("attempt")))


def list_attempts(storage: Storage, path: str) -> list[Attempt]:
    """Return the attempts at `path`, lowest first; [] without the folder."""
    return sorted(parse_attempts(list_attempt_entries(storage, path)))


def list_attempt_entries(storage: Storage, path: str) -> Sequence[Entry]:
    """Return the entries of a path that may have attempts; [] for another folder."""
    # A folder of annotations has the name of its attempt. It is not an attempt: `gc` would remove
    # a pin as a dead save.
    above = posixpath.basename(posixpath.dirname(path))
    return [] if above in (ANNOTATIONS, OLD_ANNOTATIONS) else list_entries(storage, path)


def list_entries(storage: Storage, path: str) -> Sequence[Entry]:
    """Return the entries of `path`; [] without the folder."""
    try:
        return storage.list(path)
    except (FileNotFoundError, NotADirectoryError):
        return []


def list_folders(storage: Storage, root: str) -> list[str]:
    """Return the paths of the folders in `root` that may be checkpoints; [] without `root`."""
    names = [entry.name for entry in list_entries(storage, root) if entry.kind == "folder"]
    return [f"{root.rstrip('/')}/{name}" for name in names if name not in RESERVED_NAMES]


def list_readable_folders(storage: Storage, root: str) -> list[str]:
    """Return the result of `list_folders`, and the linked steps that are read."""
    links = [
        f"{root.rstrip('/')}/{entry.name}"
        for entry in list_entries(storage, root)
        if entry.kind == "other"
    ]
    return list_folders(storage, root) + [p for p in links if is_readable_step(storage, p)]


def no_folder_error(path: str, error: OSError) -> NotFoundError:
    """Return the error of a path that could not be listed, because it is not a folder."""
    if isinstance(error, NotADirectoryError):
        return NotFoundError(f"{path} is not a folder: give the folder of a run or a checkpoint")
    folder = posixpath.dirname(path)
    return NotFoundError(f"{path} does not exist: check its spelling, or list {folder}")


def parse_attempts(entries: Iterable[Entry]) -> Iterator[Attempt]:
    """Yield the attempts among a folder's entries."""
    for entry in entries:
        if entry.kind == "folder" and (attempt := parse_attempt(entry.name)) is not None:
            yield attempt


def list_trash(storage: Storage, path: str) -> list[Entry]:
    """Return the entries at a path with a name of trash: folders, files and links."""
    return trash_among(list_entries(storage, path))


def trash_among(entries: Iterable[Entry]) -> list[Entry]:
    """Return those of a folder's entries that have a name of trash."""
    return [entry for entry in entries if parse_trash(entry.name) is not None]


def was_provably_removed(storage: Storage, path: str, attempt: Attempt) -> bool:
    """Return True if a claimed attempt is gone, and its trash or a higher attempt is here.

    Without that evidence return False. If the storage is not shared, this host never had the
    attempt, and its absence proves nothing. Each host then numbers its attempts from 1, so only a
    higher number is evidence.
    """
    entries = list_entries(storage, path)
    attempts = set(parse_attempts(entries))
    is_fenced = any(other.number > attempt.number for other in attempts)
    has_trash = any(entry.name == trash_name(attempt) for entry in entries)
    return attempt not in attempts and (is_fenced or has_trash)


def is_decided(storage: Storage, path: str, attempt: Attempt) -> bool:
    """Return True if an attempt has an index, without reading it."""
    return _exists(storage, f"{path}/{attempt}/{INDEX}")


def has_folder(storage: Storage, path: str, attempt: Attempt) -> bool:
    """Return True if an attempt still has its folder. A removal renames the folder first."""
    return attempt in list_attempts(storage, path)


@contextmanager
def not_found_if_removed(storage: Storage, path: str, attempt: Attempt) -> Iterator[None]:
    """Turn errors of damage in this block into NotFoundError if the attempt was removed.

    An overwrite or a delete may remove an attempt while it is read, which looks like damage. The
    user can open the path again, and gets the newer checkpoint, if there is one.
    """
    try:
        yield
    except (CorruptError, FileNotFoundError) as error:
        if has_folder(storage, path, attempt):
            raise
        raise NotFoundError(
            f"{path}/{attempt} was replaced or deleted while it was read: open {path} again"
        ) from error


def read_index(storage: Storage, path: str, attempt: Attempt) -> Index | Abandoned | None:
    """Return the index of an attempt, or None if the attempt is open or gone."""
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
    """Return the content of a small file. FileNotFoundError without it, CorruptError if too big."""
    reader = storage.open(file)
    try:
        if reader.nbytes > max_nbytes:
            raise CorruptError(
                f"{file} has {reader.nbytes} bytes, the limit is {max_nbytes}: use another "
                "checkpoint"
            )
        data = bytearray(reader.nbytes)
        count = reader.read_into(0, memoryview(data))
    finally:
        reader.close()
    return bytes(data[:count])


def describe_claimant(storage: Storage, path: str, attempt: Attempt) -> str:
    """Return "by ...", the process that claimed an attempt, for a message."""
    file = f"{path}/{attempt}/{CLAIM}"
    try:
        document = index_json.decode(read_document(storage, file), label=file)
    except (CheckpointError, FileNotFoundError):
        return "by an unknown job"
    return f"by {document.by if isinstance(document, Abandoned) else 'an unknown job'}"


def not_found_error(storage: Storage, path: str) -> NotFoundError:
    """Return the error of a path without a checkpoint. The message describes its contents."""
    return NotFoundError(f"{path}: no checkpoint is here: {_contents_text(storage, path)}")


def _contents_text(storage: Storage, path: str) -> str:
    try:
        entries = storage.list(path)
    except FileNotFoundError:
        return "no such folder, or a broken link. Check the path"
    except NotADirectoryError:
        return "it is a file. Pass the folder that was given to save"
    states = [status.state for status in list_statuses(storage, path)]
    counts = {
        "unfinished (a save is running, or died)": states.count("open"),
        "abandoned": states.count("abandoned"),
        "being removed": sum(parse_trash(entry.name) is not None for entry in entries),
    }
    if texts := [f"{number} {label}" for label, number in counts.items() if number]:
        return f"its attempts are {', '.join(texts)}. Use another checkpoint, or save again"
    if not entries:
        return "the folder is empty. Check the path"
    if text := _run_text(storage, path, [entry.name for entry in entries]):
        return text
    names = ", ".join(entry.name for entry in entries[:5]) + ", ..." * (len(entries) > 5)
    return f"the folder holds {names}. {_foreign_remedy({entry.name for entry in entries})}"


def _run_text(storage: Storage, path: str, names: Sequence[str]) -> str:
    """Return the remedy for the folder of a run; "" for other folders."""
    below = [f"{path}/{name}" for name in names[:MAX_ATTEMPTS_READ]]
    if any(is_decided(storage, p, attempt) for p in below for attempt in list_attempts(storage, p)):
        return f"it is the folder of a run. Name one of its checkpoints, such as {path}@latest"
    if {INCARNATIONS, ANNOTATIONS} & {*names}:
        return f"its run has saved nothing yet. {NOTHING_YET.format(path)}"
    return ""


def _foreign_remedy(names: Set[str]) -> str:
    """Return the remedy for a folder with files of other systems."""
    is_attempt = bool({INDEX, CLAIM} & names)
    if not is_attempt and any(".safetensors" in name for name in names):
        return (
            "They are from Hugging Face: dc.open and dc.load read them, and `dist-ckpt import "
            "--from hf` converts them to a checkpoint"
        )
    if any(name.endswith(".distcp") for name in names):
        return (
            "They are from torch.distributed.checkpoint, but .metadata is missing, which a save "
            "writes last: this save did not end. Use another one"
        )
    return "Pass the folder that was given to save"


def _status(storage: Storage, path: str, attempt: Attempt, created_at: float) -> Status:
    entries = storage.list(f"{path}/{attempt}", follow=False)
    state: AttemptState = "open"
    try:
        if (document := read_index(storage, path, attempt)) is not None:
            state = "committed" if isinstance(document, Index) else "abandoned"
    except CorruptError:
        state = "damaged"
    except IncompatibleError:
        state = "incompatible"
    modified_at = max((entry.modified_at for entry in entries), default=created_at)
    return Status(attempt, state, modified_at, sum(entry.nbytes for entry in entries))


def _exists(storage: Storage, file: str) -> bool:
    try:
        storage.open(file).close()
    except FileNotFoundError:
        return False
    except CorruptError:  # a link or a folder has the name
        return True
    return True


# --- writing ---------------------------------------------------------------------------------


def try_abandon(storage: Storage, path: str, attempt: Attempt, *, by: str, reason: str) -> bool:
    """Abandon an attempt of this or another process. Return False if it is committed already.

    True: the attempt is abandoned or gone, and will never be committed. Both outcomes are durable.
    StorageError if the outcome is unknown, CorruptError if the index cannot be read.
    """
    folder = f"{path}/{attempt}"
    try:
        document = read_index(storage, path, attempt)
        if document is None:
            data = encode_abandoned(attempt, by=by, reason=reason)
            document = _put_abandoned(storage, path, attempt, data)
        else:
            storage.sync(folder)  # its writer may have died before its own sync
    except FileNotFoundError as error:
        if not is_folder_gone(storage, folder):
            raise StorageError(
                f"{folder}: an index vanished while it was written ({error}): check the storage"
            ) from error
        return True
    return not isinstance(document, Index)


def encode_abandoned(attempt: Attempt, *, by: str, reason: str) -> bytes:
    """Return an index that says "abandoned". Characters that are not UTF-8 become "?"."""
    texts = (text[:MAX_TEXT].encode("utf-8", "replace").decode("utf-8") for text in (by, reason))
    return index_json.encode(Abandoned(attempt.name, *texts))


def _put_abandoned(
    storage: Storage, path: str, attempt: Attempt, data: bytes
) -> Index | Abandoned | None:
    folder = f"{path}/{attempt}"
    temporary = f"{folder}/{temporary_name('index', new_id())}"
    try:
        write_small_file(storage, temporary, data)
    except StorageError:
        # Most often an attempt is abandoned because the disk is full. The claim already is an index
        # that says "abandoned", and its rename needs no space.
        if not _exists(storage, f"{folder}/{CLAIM}"):
            raise
        return put_index(storage, path, attempt, f"{folder}/{CLAIM}")
    document = put_index(storage, path, attempt, temporary)
    if isinstance(document, Index):
        _remove_quietly(storage, temporary)  # a committed attempt has no temporary files
    return document


def put_index(
    storage: Storage, path: str, attempt: Attempt, temporary: str
) -> Index | Abandoned | None:
    """Rename `temporary` to `index.json`, and return None. If an index exists, return that one.

    Commit and abandon race for this name, and the storage picks the winner. On return the index is
    durable, whichever process wrote it. FileNotFoundError if the attempt is gone.
    """
    folder = f"{path}/{attempt}"
    document: Index | Abandoned | None = None
    try:
        storage.rename(temporary, f"{folder}/{INDEX}")
    except (StorageError, FileNotFoundError, FileExistsError) as error:
        # The storage may have renamed it and lost the reply: the file there decides.
        document = read_index(storage, path, attempt)
        if document is None:
            if isinstance(error, FileExistsError):  # another process has removed the attempt
                raise FileNotFoundError(folder) from error
            raise
    storage.sync(folder)
    return document


def write_small_file(storage: Storage, file: str, data: bytes) -> None:
    """Write a small file. On return its bytes are durable; its name needs a sync of the folder."""
    writer = storage.create(file, len(data))
    try:
        with ExitStack() as stack:
            stack.callback(writer.discard)
            writer.write_at(0, data)
            nbytes = writer.finish()
            stack.pop_all()  # it is closed
        if nbytes != len(data):
            raise StorageError(
                f"{file} has {nbytes} bytes after writing {len(data)}: check the storage"
            )
    except StorageError:
        _remove_quietly(storage, file)
        raise


def _remove_quietly(storage: Storage, file: str) -> None:
    with suppress(StorageError, FileNotFoundError, NotADirectoryError):
        storage.remove(file)


def is_folder_gone(storage: Storage, folder: str) -> bool:
    """Return True if a folder is missing, False if it exists or the storage fails."""
    try:
        storage.list(folder)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except StorageError:
        return False
    return False


def make_folders(
    storage: Storage, path: str, new_folders: list[str], *, within: str | None = None
) -> None:
    """Create `path` and its missing parents. Append the new ones to `new_folders`, top first.

    FileNotFoundError if the folder `within` does not exist, which is above `path`.
    """
    try:
        _make_folder(storage, path, new_folders)
    except FileNotFoundError:
        if (parent := posixpath.dirname(path)) == within:
            raise
        make_folders(storage, parent, new_folders, within=within)
        with suppress(FileNotFoundError):  # a delete removed the parent: the caller tries again
            _make_folder(storage, path, new_folders)


def _make_folder(storage: Storage, path: str, new_folders: list[str]) -> None:
    try:
        storage.make_folder(path)
    except FileExistsError:
        return
    except NotADirectoryError:
        raise ExistsError(f"{path} is below a file: choose another path") from None
    except StorageError:
        new_folders.append(path)  # it may exist in spite of the error
        raise
    new_folders.append(path)
