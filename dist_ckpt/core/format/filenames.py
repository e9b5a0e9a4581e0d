"""Every name of the format, and its grammar. Other names are never read and never removed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

INDEX = "index.json"
CLAIM = "claim.json"
OBJECTS = "objects.msgpack"

# In a root (a folder of checkpoints): which folder it is.
ROOT_ID = "DIST_CKPT_ROOT"

# In a root: annotations of checkpoints, incarnations of runs, requests to the newest incarnation.
ANNOTATIONS = ".annotations"
INCARNATIONS = ".incarnations"
REQUESTS = ".requests"

# The names of annotations and incarnations in dist_ckpt 0.1.0.
OLD_ANNOTATIONS = ".facts"
OLD_INCARNATIONS = ".starts"

# In a root: the folder of checkpoints that no retention policy removes.
BACKUP = "backup"

# Never a checkpoint. "lost+found" is in the root of a mounted file system, and mostly unreadable.
RESERVED_NAMES = frozenset(
    {ANNOTATIONS, INCARNATIONS, REQUESTS, OLD_ANNOTATIONS, OLD_INCARNATIONS, "lost+found"}
)

# The attempts of incarnation n have the numbers from 1000 * n.
MAX_INCARNATION = 999_999
ATTEMPTS_PER_INCARNATION = 1000

# The number of an annotation has at most 18 digits.
MAX_ANNOTATION = 10**18 - 1

# Prefix of files that a user has attached.
_ATTACHED = "attached."

# Hexadecimal digits in the random part of a name.
ID_LENGTH = 16

# Follows the @ after a root, and selects a checkpoint: see `select` in `runs/selectors.py`.
_SELECTOR = re.compile(r"latest|[0-9]{1,19}|(?:min|max|tag):.+", re.DOTALL)

_ATTEMPT = re.compile(r"a([1-9][0-9]{0,8})-([0-9a-f]{16})")
_TRASH = re.compile(r"\.trash-(a[1-9][0-9]{0,8}-[0-9a-f]{16})")
_TEMPORARY = re.compile(r"\.(?:index|claim)-[0-9a-f]{16}\.tmp")
_TEMPORARY_ROOT_ID = re.compile(rf"{ROOT_ID}\.[0-9a-f]{{16}}")
_ANNOTATION = re.compile(r"([a-z]{1,16})-([1-9][0-9]{0,17})-([0-9a-f]{16})\.json")
_STEP = re.compile(r"0|[1-9][0-9]{0,18}")
_INCARNATION = re.compile(r"([1-9][0-9]{0,5})\.json")
_LIVENESS = re.compile(r"([1-9][0-9]{0,5})\.alive-[0-9a-f]{16}")
_REQUEST = re.compile(r"(request|answer)-([0-9a-f]{16})\.json")
_TEMPORARY_RECORD = re.compile(r"\.record-[0-9a-f]{16}\.tmp")
# The folder of a step of a run. Only this folder may be a link to a folder elsewhere.
_STEP_FOLDER = re.compile(r"step-([0-9]{1,19})")
_NFS_FILE = re.compile(r"\.nfs[0-9A-Fa-f]{8,}")
_STEM = re.compile(r"[a-z][a-z0-9_]{0,31}")
_SHARD_FILE = re.compile(r"([a-z][a-z0-9_]{0,31})-([0-9]{5,9})\.safetensors")
_ATTACHED_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_OBJECTS_FILE = re.compile(r"objects-([0-9]{5,9})\.msgpack")


@dataclass(frozen=True, slots=True, order=True)
class Attempt:
    """The name of an attempt to write a checkpoint: its number, then a random id."""

    number: int
    id: str

    @property
    def name(self) -> str:
        """The folder's name."""
        return f"a{self.number}-{self.id}"

    @property
    def incarnation(self) -> int:
        """The number of its incarnation; 0 outside of a run."""
        return self.number // ATTEMPTS_PER_INCARNATION

    @staticmethod
    def from_name(name: str) -> Attempt:
        """Return the attempt with this folder name. ValueError if no attempt has it."""
        if (attempt := parse_attempt(name)) is None:
            raise ValueError(f"{name!r} is not the name of an attempt")
        return attempt

    def __str__(self) -> str:
        return self.name


def parse_attempt(name: str) -> Attempt | None:
    """Return the attempt with this folder name, or None."""
    match = _ATTEMPT.fullmatch(name)
    return Attempt(int(match[1]), match[2]) if match else None


def trash_name(attempt: Attempt) -> str:
    """Return the folder name of an attempt that is being removed."""
    return f".trash-{attempt.name}"


def parse_trash(name: str) -> Attempt | None:
    """Return the attempt in the name of a trash folder, or None."""
    match = _TRASH.fullmatch(name)
    return parse_attempt(match[1]) if match else None


def is_reserved_name(name: str) -> bool:
    """Return True if a folder of this name is never a checkpoint."""
    return name in RESERVED_NAMES or bool(parse_attempt(name) or parse_trash(name))


def is_selector(text: str) -> bool:
    """Return True if this text, after an @, selects a checkpoint in a root."""
    return _SELECTOR.fullmatch(text) is not None


def selections(path: str) -> Iterator[tuple[str, str]]:
    """Yield each (root, selector) that a path may mean."""
    for match in re.finditer("@", path):
        folder, selector = path[: match.start()], path[match.end() :]
        if is_selector(selector):
            yield folder, selector


def temporary_name(kind: Literal["index", "claim", "record"], nonce: str) -> str:
    """Return the name of a document before it is renamed."""
    return f".{kind}-{nonce}.tmp"


def is_temporary(name: str) -> bool:
    """Return True if this is the temporary name of a document in an attempt."""
    return _TEMPORARY.fullmatch(name) is not None


def temporary_root_id(nonce: str) -> str:
    """Return the name of a root's id before it is renamed."""
    return f"{ROOT_ID}.{nonce}"


def is_temporary_root_id(name: str) -> bool:
    """Return True if this is the temporary name of a root's id."""
    return _TEMPORARY_ROOT_ID.fullmatch(name) is not None


@dataclass(frozen=True, slots=True, order=True)
class AnnotationName:
    """The name of an annotation's file. The highest number of a kind wins, then the highest id."""

    kind: str
    number: int
    id: str

    def __str__(self) -> str:
        return f"{self.kind}-{self.number}-{self.id}.json"


def parse_annotation_name(name: str) -> AnnotationName | None:
    """Parse the name of an annotation's file, or return None."""
    match = _ANNOTATION.fullmatch(name)
    return AnnotationName(match[1], int(match[2]), match[3]) if match else None


def parse_step(name: str) -> int | None:
    """Return the step whose annotations a folder has, or None."""
    return int(name) if _STEP.fullmatch(name) else None


def parse_step_folder(name: str) -> int | None:
    """Return the step in the name `step-N` of a checkpoint's folder in a run, or None."""
    match = _STEP_FOLDER.fullmatch(name)
    return int(match[1]) if match else None


def incarnation_file(number: int) -> str:
    """Return the name of an incarnation's record."""
    return f"{number}.json"


def parse_incarnation(name: str) -> int | None:
    """Return the number in the name of an incarnation's record, or None."""
    match = _INCARNATION.fullmatch(name)
    return int(match[1]) if match else None


def liveness_file(number: int, nonce: str) -> str:
    """Return the name of an incarnation's liveness file."""
    return f"{number}.alive-{nonce}"


def parse_liveness(name: str) -> int | None:
    """Return the incarnation's number in the name of a liveness file, or None."""
    match = _LIVENESS.fullmatch(name)
    return int(match[1]) if match else None


def request_file(request_id: str) -> str:
    """Return the name of a request's record."""
    return f"request-{request_id}.json"


def answer_file(request_id: str) -> str:
    """Return the name of the record that answers a request."""
    return f"answer-{request_id}.json"


def parse_request(name: str) -> tuple[str, str] | None:
    """Return "request" or "answer" and the request's id, or None."""
    match = _REQUEST.fullmatch(name)
    return (match[1], match[2]) if match else None


def is_temporary_record(name: str) -> bool:
    """Return True if this is the temporary name of a record."""
    return _TEMPORARY_RECORD.fullmatch(name) is not None


def is_nfs_file(name: str) -> bool:
    """Return True if an NFS client gave this name to a removed file that a process still reads."""
    return _NFS_FILE.fullmatch(name) is not None


def is_stem(text: str) -> bool:
    """Return True if a component's name can begin its files' names."""
    return _STEM.fullmatch(text) is not None


def shard_file(stem: str, rank: int) -> str:
    """Return the name of a rank's shard file of a component."""
    return f"{stem}-{rank:05d}.safetensors"


def objects_file(rank: int) -> str:
    """Return the name of the objects file with the values that only this rank stores."""
    return f"objects-{rank:05d}.msgpack"


def parse_shard_file(name: str) -> tuple[str, int] | None:
    """Return the component stem and rank of a shard file's name, or None."""
    match = _SHARD_FILE.fullmatch(name)
    return (match[1], int(match[2])) if match else None


def parse_objects_file(name: str) -> int | None:
    """Return the rank that wrote an objects file, or None if the name is not one."""
    match = _OBJECTS_FILE.fullmatch(name)
    return int(match[1]) if match else 0 if name == OBJECTS else None


def is_attached_name(text: str) -> bool:
    """Return True if a file can be attached under this name."""
    return _ATTACHED_NAME.fullmatch(text) is not None


def attached_file(name: str) -> str:
    """Return the name of an attached file in an attempt."""
    return f"{_ATTACHED}{name}"


def parse_attached_file(name: str) -> str | None:
    """Return the name under which a file is attached, or None."""
    attached = name.removeprefix(_ATTACHED)
    return attached if name != attached and is_attached_name(attached) else None


def is_in_attempt(name: str) -> bool:
    """Return True if an attempt can contain this file. No other file is ever unlinked."""
    return (
        name in (INDEX, CLAIM, OBJECTS)
        or any(pattern.fullmatch(name) for pattern in (_TEMPORARY, _SHARD_FILE, _OBJECTS_FILE))
        or parse_attached_file(name) is not None
    )
