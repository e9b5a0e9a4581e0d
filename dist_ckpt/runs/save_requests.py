"""Requests from other processes: ask the job that writes into a root to save now.

    <root>/.requests/request-<id>.json    the requester, and the incarnation of the run
    <root>/.requests/answer-<id>.json     the outcome, by rank 0 of the job

An incarnation obeys only its own requests. A request that came too late is ended by a later
incarnation. Nothing is locked: each record is created once, exclusively, under a unique id.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from dist_ckpt.core.commit.attempts import MAX_TRIES, list_entries, new_id
from dist_ckpt.core.commit.records.incarnations import last_liveness, newest_incarnation
from dist_ckpt.core.commit.records.protections import CheckpointKey
from dist_ckpt.core.commit.records.record_store import (
    check_upgraded,
    make_record_folders,
    put_record,
    read_record,
    this_process,
)
from dist_ckpt.core.format.filenames import (
    REQUESTS,
    answer_file,
    is_temporary_record,
    parse_request,
    request_file,
)
from dist_ckpt.core.format.run_records import AnswerRecord, Outcome, RequestRecord, encode_record
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import CorruptError, NotFoundError, StorageError

_R = TypeVar("_R", AnswerRecord, RequestRecord)

# The interval at which an answer is polled for.
POLL_S = 0.5

# An incarnation without a heartbeat for this long has ended, or died before its first one.
LIVENESS_EXPIRED_S = 15.0


@dataclass(frozen=True, slots=True)
class RequestNames:
    """The files in a root's folder of requests: ids of requests and of answers, sorted.

    `temporary` are names of files that were not renamed to their final names.
    """

    requests: tuple[str, ...]
    answers: tuple[str, ...]
    temporary: tuple[str, ...]


# --- the requester ---------------------------------------------------------------------------


def find_incarnation_to_ask(storage: Storage, root: str) -> int:
    """Return the number of the newest incarnation of a run, which gets the requests.

    NotFoundError if no job has begun to write there. CorruptError or IncompatibleError if the
    record of the newest incarnation cannot be read, IncompatibleError also if the root needs
    an upgrade.
    """
    check_upgraded(storage, root)
    newest = newest_incarnation(storage, root)
    if newest is None:
        raise NotFoundError(
            f"{root}: no job is writing here, as no incarnation of a run is recorded: give the "
            f"root of a dist_ckpt.Checkpointer"
        )
    return newest.number


def request_save(storage: Storage, root: str, *, stops: bool) -> RequestRecord:
    """Ask the job that writes into a root to save now, and then to end if it `stops`.

    The request is durable on return; the job may be dead. Raises the errors of
    `find_incarnation_to_ask`, and StorageError if the request may not exist.
    """
    incarnation = find_incarnation_to_ask(storage, root)
    request = RequestRecord(new_id(), incarnation, stops, this_process(), time.time())
    folder = f"{root}/{REQUESTS}"
    for _ in range(MAX_TRIES):
        make_record_folders(storage, root, folder)
        with suppress(FileNotFoundError):  # another process removed the folder
            put_record(storage, folder, request_file(request.id), encode_record(request))
            return request
    raise StorageError(f"{folder} is removed again and again: find out what removes it")


def wait_for_answer(
    storage: Storage, root: str, request: RequestRecord, *, timeout_s: float, poll_s: float = POLL_S
) -> AnswerRecord | None:
    """Return the answer to a request; None if there is none after `timeout_s`.

    Return earlier if the incarnation has ended: it answers all requests that it has read, and then
    removes its heartbeat. Without an answer, withdraw the request: a job that wakes up later
    ignores it, unless the save has begun.
    """
    began = seen_alive = time.monotonic()
    while (answer := read_answer(storage, root, request.id)) is None:
        now = time.monotonic()
        if last_liveness(storage, root, request.incarnation) is not None:
            seen_alive = now
        if (left_s := min(began + timeout_s, seen_alive + LIVENESS_EXPIRED_S) - now) <= 0:
            remove_request_file(storage, root, request_file(request.id))
            return read_answer(storage, root, request.id)
        time.sleep(min(poll_s, left_s))
    return answer


def read_answer(storage: Storage, root: str, request_id: str) -> AnswerRecord | None:
    """Return the answer to a request, None if there is none. CorruptError, IncompatibleError."""
    return _read(storage, f"{root}/{REQUESTS}/{answer_file(request_id)}", AnswerRecord, request_id)


# --- the job ---------------------------------------------------------------------------------


def list_requests(storage: Storage, root: str) -> RequestNames:
    """Return the files in the folder of requests; costs one listing, also without a folder."""
    entries = list_entries(storage, f"{root}/{REQUESTS}")
    names = [entry.name for entry in entries if entry.kind == "file"]
    ours = sorted(filter(None, map(parse_request, names)))
    return RequestNames(
        tuple(request_id for kind, request_id in ours if kind == "request"),
        tuple(request_id for kind, request_id in ours if kind == "answer"),
        tuple(name for name in names if is_temporary_record(name)),
    )


def read_request(storage: Storage, root: str, request_id: str) -> RequestRecord | None:
    """Return a request, None if it was withdrawn. CorruptError, IncompatibleError."""
    return _read(
        storage, f"{root}/{REQUESTS}/{request_file(request_id)}", RequestRecord, request_id
    )


def _read(storage: Storage, file: str, cls: type[_R], request_id: str) -> _R | None:
    try:
        record = read_record(storage, file, cls)
    except FileNotFoundError:
        return None
    if record.id != request_id:
        raise CorruptError(f"{file}: it is the record of request {record.id}; remove it")
    return record


def put_answer(
    storage: Storage,
    root: str,
    request_id: str,
    outcome: Outcome,
    why: str,
    saved: CheckpointKey | None = None,
) -> None:
    """Answer a request, unless it has an answer; durable on return. The first answer counts."""
    answer = AnswerRecord(request_id, outcome, saved, why, this_process(), time.time())
    with suppress(FileExistsError, FileNotFoundError):  # or the folder was removed
        put_record(storage, f"{root}/{REQUESTS}", answer_file(request_id), encode_record(answer))


def remove_request_file(storage: Storage, root: str, name: str) -> None:
    """Remove a file from the folder of requests; fine if it is gone."""
    with suppress(FileNotFoundError):
        storage.remove(f"{root}/{REQUESTS}/{name}")
