"""Every file and folder name of the format, and the grammar that recognises them.

A name that does not fit the grammar is not ours: it is never read as ours and never removed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

INDEX = "index.json"
CLAIM = "claim.json"
OBJECTS = "objects.msgpack"

# In a folder of checkpoints, not in one of them: which folder it is.
ROOT_ID = "DIST_CKPT_ROOT"

# In a folder of checkpoints too: what became known of them after their commits; starts of runs;
# what others ask the newest start for.
ANNOTATIONS = ".annotations"
INCARNATIONS = ".incarnations"
REQUESTS = ".requests"

# What the first two were called in dist_ckpt 0.1.0.
OLD_ANNOTATIONS = ".facts"
OLD_INCARNATIONS = ".starts"

# In it as well: the folder of checkpoints that no rule removes.
BACKUP = "backup"

# What in such a folder never is a checkpoint. The last one is a file system's own, where it is
# mounted, and mostly nobody may read it.
NO_CHECKPOINTS = frozenset(
    {ANNOTATIONS, INCARNATIONS, REQUESTS, OLD_ANNOTATIONS, OLD_INCARNATIONS, "lost+found"}
)

# A start's attempts have the numbers from 1000 times its own on.
MAX_INCARNATION = 999_999
ATTEMPTS_PER_INCARNATION = 1000

# The number of a fact has at most 18 digits.
MAX_FACT = 10**18 - 1

# How the name of a file that a user has attached begins.
_ATTACHED = "attached."

# Of the random part of a name: hexadecimal digits.
ID_LENGTH = 16

# What follows an @ after a folder of checkpoints, and chooses one of them.
_SELECTOR = re.compile(r"latest|[0-9]{1,19}|(?:min|max|tag):.+", re.DOTALL)

_ATTEMPT = re.compile(r"a([1-9][0-9]{0,8})-([0-9a-f]{16})")
_TRASH = re.compile(r"\.trash-(a[1-9][0-9]{0,8}-[0-9a-f]{16})")
_TEMPORARY = re.compile(r"\.(?:index|claim)-[0-9a-f]{16}\.tmp")
_TEMPORARY_ROOT_ID = re.compile(rf"{ROOT_ID}\.[0-9a-f]{{16}}")
_FACT = re.compile(r"([a-z]{1,16})-([1-9][0-9]{0,17})-([0-9a-f]{16})\.json")
_STEP = re.compile(r"0|[1-9][0-9]{0,18}")
_START = re.compile(r"([1-9][0-9]{0,5})\.json")
_SIGN = re.compile(r"([1-9][0-9]{0,5})\.alive-[0-9a-f]{16}")
_REQUEST = re.compile(r"(request|answer)-([0-9a-f]{16})\.json")
_TEMPORARY_RECORD = re.compile(r"\.record-[0-9a-f]{16}\.tmp")
_STEM = re.compile(r"[a-z][a-z0-9_]{0,31}")
_SHARD_FILE = re.compile(r"([a-z][a-z0-9_]{0,31})-([0-9]{5,9})\.safetensors")
_ATTACHED_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_OBJECTS_FILE = re.compile(r"objects-([0-9]{5,9})\.msgpack")


@dataclass(frozen=True, slots=True, order=True)
class Attempt:
    """The name of one try to write a checkpoint: number first, then a random id."""

    number: int
    id: str

    @property
    def name(self) -> str:
        """The folder's name."""
        return f"a{self.number}-{self.id}"

    @property
    def incarnation(self) -> int:
        """The number of the incarnation that it belongs to; 0 if it belongs to no run."""
        return self.number // ATTEMPTS_PER_INCARNATION

    def __str__(self) -> str:
        return self.name


def parse_attempt(name: str) -> Attempt | None:
    """Return the attempt that a folder name says, or None if the name is not ours."""
    match = _ATTEMPT.fullmatch(name)
    return Attempt(int(match[1]), match[2]) if match else None


def trash_name(attempt: Attempt) -> str:
    """Return the folder name of an attempt that is being removed."""
    return f".trash-{attempt.name}"


def parse_trash(name: str) -> Attempt | None:
    """Return the attempt that a trash folder was, or None if the name is not one."""
    match = _TRASH.fullmatch(name)
    return parse_attempt(match[1]) if match else None


def is_beside_attempts(name: str) -> bool:
    """Say whether a name is ours beside the attempts of a checkpoint.

    A saver whose root is the checkpoint's own folder puts the root's id there.
    """
    return parse_trash(name) is not None or name == ROOT_ID


def is_reserved_name(name: str) -> bool:
    """Say whether the name of a folder means something else than a checkpoint."""
    is_attempt = parse_attempt(name) is not None or parse_trash(name) is not None
    return is_attempt or name in NO_CHECKPOINTS


def is_selector(text: str) -> bool:
    """Say whether a text, after an @, chooses a checkpoint in a folder of them."""
    return _SELECTOR.fullmatch(text) is not None


def selections(path: str) -> Iterator[tuple[str, str]]:
    """Yield the ways in which a path may choose a checkpoint: the folder, and the selector."""
    for match in re.finditer("@", path):
        folder, selector = path[: match.start()], path[match.end() :]
        if is_selector(selector):
            yield folder, selector


def temporary_index(nonce: str) -> str:
    """Return the name under which an index is written before it is renamed into place."""
    return f".index-{nonce}.tmp"


def temporary_claim(nonce: str) -> str:
    """Return the name under which a claim is written before it is renamed into place."""
    return f".claim-{nonce}.tmp"


def is_temporary(name: str) -> bool:
    """Say whether a file in an attempt is one that was never renamed into place."""
    return _TEMPORARY.fullmatch(name) is not None


def temporary_root_id(nonce: str) -> str:
    """Return the name under which a folder's id is written before it is renamed into place."""
    return f"{ROOT_ID}.{nonce}"


def is_temporary_root_id(name: str) -> bool:
    """Say whether a file in a folder of checkpoints is an id that was never renamed into place."""
    return _TEMPORARY_ROOT_ID.fullmatch(name) is not None


@dataclass(frozen=True, slots=True, order=True)
class AnnotationName:
    """The name of a fact's file: of a kind, the highest number and then the highest id wins."""

    kind: str
    number: int
    id: str

    def __str__(self) -> str:
        return f"{self.kind}-{self.number}-{self.id}.json"


def parse_annotation_name(name: str) -> AnnotationName | None:
    """Return what the name of a fact's file says, or None if the name is not ours."""
    match = _FACT.fullmatch(name)
    return AnnotationName(match[1], int(match[2]), match[3]) if match else None


def parse_step(name: str) -> int | None:
    """Return the step whose facts a folder has, or None if the name is not ours."""
    return int(name) if _STEP.fullmatch(name) else None


def incarnation_file(number: int) -> str:
    """Return the name of a start's record."""
    return f"{number}.json"


def parse_incarnation(name: str) -> int | None:
    """Return the number of a start, or None if the name is not that of its record."""
    match = _START.fullmatch(name)
    return int(match[1]) if match else None


def liveness_file(number: int, nonce: str) -> str:
    """Return the name of a start's sign of life."""
    return f"{number}.alive-{nonce}"


def parse_liveness(name: str) -> int | None:
    """Return the number of the start that is alive, or None if the name is not that of a sign."""
    match = _SIGN.fullmatch(name)
    return int(match[1]) if match else None


def request_file(own_id: str) -> str:
    """Return the name of a request's record."""
    return f"request-{own_id}.json"


def answer_file(own_id: str) -> str:
    """Return the name of the record that answers a request."""
    return f"answer-{own_id}.json"


def parse_request(name: str) -> tuple[str, str] | None:
    """Return "request" or "answer" and the request's id, or None if the name is not ours."""
    match = _REQUEST.fullmatch(name)
    return (match[1], match[2]) if match else None


def temporary_record(nonce: str) -> str:
    """Return the name under which such a record is written before it is renamed into place."""
    return f".record-{nonce}.tmp"


def is_temporary_record(name: str) -> bool:
    """Say whether a file is such a record that was never renamed into place."""
    return _TEMPORARY_RECORD.fullmatch(name) is not None


def is_stem(text: str) -> bool:
    """Say whether a component may name its files as it is."""
    return _STEM.fullmatch(text) is not None


def shard_file(stem: str, rank: int) -> str:
    """Return the name of one rank's safetensors file of a component."""
    return f"{stem}-{rank:05d}.safetensors"


def objects_file(rank: int) -> str:
    """Return the name of the file with the values that only this rank stores."""
    return f"objects-{rank:05d}.msgpack"


def parse_shard_file(name: str) -> tuple[str, int] | None:
    """Return component stem and rank, or None if the name is not a shard file's."""
    match = _SHARD_FILE.fullmatch(name)
    return (match[1], int(match[2])) if match else None


def parse_objects_file(name: str) -> int | None:
    """Return the rank that wrote an objects file, or None if the name is not one's."""
    match = _OBJECTS_FILE.fullmatch(name)
    return int(match[1]) if match else 0 if name == OBJECTS else None


def is_attached_name(text: str) -> bool:
    """Say whether a file may be attached to a checkpoint under this name."""
    return _ATTACHED_NAME.fullmatch(text) is not None


def attached_file(name: str) -> str:
    """Return the name that an attached file has in an attempt."""
    return f"{_ATTACHED}{name}"


def parse_attached_file(name: str) -> str | None:
    """Return the name under which a file is attached, or None if it is not an attached one's."""
    attached = name.removeprefix(_ATTACHED)
    return attached if name != attached and is_attached_name(attached) else None


def is_in_attempt(name: str) -> bool:
    """Say whether a file name may stand in an attempt folder; nothing else is ever unlinked."""
    return (
        name in (INDEX, CLAIM, OBJECTS)
        or _TEMPORARY.fullmatch(name) is not None
        or _SHARD_FILE.fullmatch(name) is not None
        or _OBJECTS_FILE.fullmatch(name) is not None
        or parse_attached_file(name) is not None
    )
