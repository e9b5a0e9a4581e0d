"""What other processes ask a run for: seen, taken at a boundary, and answered by rank 0."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import dist_ckpt as dc
from dist_ckpt.checkpointer import rank_requests
from dist_ckpt.checkpointer.rank_requests import ExternalRequests
from dist_ckpt.core.commit.records.incarnations import (
    Incarnation,
    LivenessFile,
    begin_incarnation,
    last_liveness,
)
from dist_ckpt.core.commit.records.protections import CheckpointKey
from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.core.format.run_records import AnswerRecord, RequestRecord
from dist_ckpt.core.storage import Entry
from dist_ckpt.core.storage.local.local_storage import LocalStorage
from dist_ckpt.errors import StorageError
from dist_ckpt.runs.save_requests import (
    list_requests,
    read_answer,
    remove_request_file,
    request_save,
)
from dist_ckpt.testing.memory_storage import MemoryStorage

ROOT = "/runs"
FOLDER = f"{ROOT}/.requests"
ATTEMPT = Attempt(2000, "0123456789abcdef")
END = "the run has ended with RuntimeError"


@dataclass
class FakeMaintenance:
    """Has the outcomes of saves."""

    outcomes: dict[int, CheckpointKey | str] = field(default_factory=dict)
    durable: str = "step 3"

    def outcome(self, step: int) -> CheckpointKey | str | None:
        return self.outcomes.get(step)


@dataclass
class Job:
    """Start 2 of a run, whose storage may refuse everything for a while."""

    storage: FlakyStorage
    maintenance: FakeMaintenance
    requests: ExternalRequests

    def ask(self, *, stops: bool = False) -> RequestRecord:
        """Put a request, and wait until it is seen."""
        request = request_save(self.storage, ROOT, stops=stops)
        wait_until(lambda: request.id in self.requests._open)
        return request

    def answer(self, request: RequestRecord) -> AnswerRecord:
        found: list[AnswerRecord] = []

        def look() -> bool:
            if (answer := read_answer(self.storage, ROOT, request.id)) is not None:
                found.append(answer)
            return bool(found)

        wait_until(look)
        return found[0]

    def is_answered(self, request: RequestRecord) -> bool:
        return read_answer(self.storage, ROOT, request.id) is not None


class FlakyStorage(MemoryStorage):
    """Counts listings; refuses those of requests while it `is_down`."""

    is_down = False
    num_listings = 0

    def list(self, folder: str, *, follow: bool = True) -> Any:
        if folder == FOLDER:
            self.num_listings += 1
            if self.is_down:
                raise StorageError("planted")
        entries: list[Entry] = [*super().list(folder, follow=follow)]
        return entries


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Job]:
    caplog.set_level(logging.INFO, logger="dist_ckpt")
    monkeypatch.setattr(rank_requests, "REQUEST_CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(rank_requests, "REQUESTED_SAVE_CHECK_INTERVAL_S", 0.005)
    job = make_job(FlakyStorage({ROOT: None}))
    yield job
    job.requests.close(END, 5.0)
    assert not job.requests._thread.is_alive()


def make_job(storage: FlakyStorage) -> Job:
    for _ in range(2):
        number = begin_incarnation(
            storage, ROOT, restored=None, why="there was none", by="a job"
        ).number
    maintenance: Any = FakeMaintenance()
    requests = ExternalRequests(storage, Incarnation(ROOT, number), maintenance)
    return Job(storage, maintenance, requests)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def looks(job: Job, count: int = 3) -> None:
    """Wait until the folder was looked at so many times more."""
    until = job.storage.num_listings + count
    wait_until(lambda: job.storage.num_listings >= until)


def test_a_request_is_asked_of_all_ranks_until_its_save_is_begun(job: Job) -> None:
    assert job.requests.proposal() is None
    request = job.ask()
    ask = job.requests.proposal()
    assert ask is not None
    assert (ask.rank, ask.stops, ask.again) == (0, False, False)
    assert ask.why == f"a request of {request.by}"
    assert job.requests.proposal() == ask
    job.requests.begin_save(7, is_last=False)
    assert job.requests.proposal() is None
    looks(job)
    assert not job.is_answered(request)
    job.maintenance.outcomes[7] = (7, ATTEMPT)
    answer = job.answer(request)
    assert (answer.outcome, answer.saved) == ("saved", (7, ATTEMPT))
    looks(job)
    assert job.requests.proposal() is None


def test_two_requests_at_once_are_one_save(job: Job) -> None:
    first, second = job.ask(), job.ask()
    job.maintenance.outcomes[7] = (8, ATTEMPT)
    job.requests.begin_save(7, is_last=False)
    assert job.answer(first).saved == job.answer(second).saved == (8, ATTEMPT)
    assert job.requests.proposal() is None


def test_a_save_is_no_answer_to_who_wants_the_end(job: Job) -> None:
    only_save, stop = job.ask(), job.ask(stops=True)
    ask = job.requests.proposal()
    assert ask is not None
    assert ask.stops
    job.maintenance.outcomes[7] = (7, ATTEMPT)
    job.requests.begin_save(7, is_last=False)
    assert job.answer(only_save).outcome == "saved"
    looks(job)
    assert not job.is_answered(stop)
    assert job.requests.proposal() == ask
    job.requests.begin_save(7, is_last=True)
    assert job.answer(stop).saved == (7, ATTEMPT)


def test_a_save_that_fails_is_told(job: Job) -> None:
    request = job.ask()
    job.requests.begin_save(7, is_last=False)
    job.maintenance.outcomes[7] = "step 7 is not saved: no space"
    answer = job.answer(request)
    assert (answer.outcome, answer.saved, answer.why) == (
        "failed",
        None,
        job.maintenance.outcomes[7],
    )


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_run_that_ends_without_it_says_so(job: Job, is_taken: bool) -> None:
    request = job.ask()
    if is_taken:
        job.requests.begin_save(7, is_last=False)
    job.requests.close(END, 5.0)
    answer = job.answer(request)
    assert (answer.outcome, answer.why) == ("ended", f"{END}. Newest durable save: step 3")


def test_what_comes_after_the_last_step_is_answered_by_that(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.requests.begin_save(9, is_last=True)
    job.maintenance.outcomes[9] = (9, ATTEMPT)
    early = request_save(job.storage, ROOT, stops=False)
    assert job.answer(early).saved == (9, ATTEMPT)
    assert job.requests.proposal() is None
    monkeypatch.setattr(
        rank_requests, "REQUEST_CHECK_INTERVAL_S", 600.0
    )  # only the end looks once more
    looks(job, 1)
    late = request_save(job.storage, ROOT, stops=True)
    job.requests.close(END, 5.0)
    assert job.answer(late).saved == (9, ATTEMPT)


def test_what_was_asked_of_an_older_start_is_not_obeyed() -> None:
    storage = FlakyStorage({ROOT: None})
    begin_incarnation(storage, ROOT, restored=None, why="there was none", by="a job")
    request = request_save(storage, ROOT, stops=True)
    job = make_job(storage)
    answer = job.answer(request)
    assert (answer.outcome, answer.saved) == ("ended", None)
    assert answer.why.startswith("incarnation 3 of the run has begun since")
    assert job.requests.proposal() is None
    job.requests.close(END, 5.0)


def test_what_is_asked_of_a_newer_start_is_left_to_that(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_requests, "ANSWER_TTL_S", 0.0)
    begin_incarnation(job.storage, ROOT, restored=None, why="there was none", by="another")
    request = request_save(job.storage, ROOT, stops=True)
    looks(job)
    assert job.requests.proposal() is None
    job.requests.close(END, 5.0)
    assert not job.is_answered(request)
    assert list_requests(job.storage, ROOT).requests == (request.id,)


def test_a_request_that_is_taken_back_in_time_is_not_obeyed(job: Job) -> None:
    request = job.ask()
    remove_request_file(job.storage, ROOT, f"request-{request.id}.json")
    looks(job)
    assert job.requests.proposal() is None


def test_what_is_damaged_or_not_ours_is_no_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rank_requests, "REQUEST_CHECK_INTERVAL_S", 0.01)
    strange = {f"{FOLDER}/notes": b"", f"{FOLDER}/answer-{'1' * 16}.txt": b"", f"{FOLDER}/x": None}
    damaged = f"{FOLDER}/request-{'0' * 16}.json"
    job = make_job(FlakyStorage({ROOT: None, FOLDER: None, **strange, damaged: b"{}"}))
    looks(job, 5)
    assert job.requests.proposal() is None
    told = [one for one in caplog.records if damaged in one.getMessage()]
    assert [one.levelname for one in told] == ["WARNING"]
    assert "is ignored" in told[0].getMessage()
    assert damaged in job.storage.tree()
    monkeypatch.setattr(rank_requests, "ANSWER_TTL_S", 0.0)
    looks(job)
    assert damaged not in job.storage.tree()
    request = job.ask()
    job.requests.close(END, 5.0)
    assert job.answer(request).outcome == "ended"
    assert strange.keys() <= job.storage.tree().keys()


def test_what_was_answered_goes_after_a_while_the_request_before_the_answer(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered, waiting = job.ask(), job.ask(stops=True)
    job.maintenance.outcomes[7] = (7, ATTEMPT)
    job.requests.begin_save(7, is_last=False)
    job.answer(answered)
    looks(job)
    assert list_requests(job.storage, ROOT).answers == (answered.id,)
    removed: list[str] = []

    def remove(path: str) -> None:
        removed.append(path.rpartition("/")[2])
        MemoryStorage.remove(job.storage, path)

    monkeypatch.setattr(job.storage, "remove", remove)
    monkeypatch.setattr(rank_requests, "ANSWER_TTL_S", 0.0)
    wait_until(lambda: not list_requests(job.storage, ROOT).answers)
    assert removed == [f"request-{answered.id}.json", f"answer-{answered.id}.json"]
    assert list_requests(job.storage, ROOT).requests == (waiting.id,)


def test_a_storage_that_refuses_for_a_while_is_told_once_and_asked_again(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    job.storage.is_down = True
    looks(job, 5)
    told = [one for one in caplog.records if one.levelname == "WARNING"]
    assert [one.getMessage() for one in told] == [
        "requests to save cannot be read or answered now: planted"
    ]
    job.storage.is_down = False
    job.ask()
    assert job.requests.proposal() is not None


def test_an_answer_that_could_not_be_put_is_put_later(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = job.ask()

    def refuse(old: str, new: str) -> None:
        raise StorageError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(job.storage, "rename", refuse)
        job.maintenance.outcomes[7] = (7, ATTEMPT)
        job.requests.begin_save(7, is_last=False)
        looks(job)
        assert not job.is_answered(request)
    assert job.answer(request).outcome == "saved"


def test_a_folder_that_is_not_there_costs_a_listing(job: Job) -> None:
    looks(job)
    assert FOLDER not in job.storage.tree()


def test_a_run_shows_that_it_lives_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_requests, "REQUEST_CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(rank_requests, "LIVENESS_INTERVAL_S", 0.01)
    job = make_job(FlakyStorage({ROOT: None}))
    wait_until(lambda: last_liveness(job.storage, ROOT, 2) is not None)
    first = last_liveness(job.storage, ROOT, 2)
    wait_until(lambda: last_liveness(job.storage, ROOT, 2) not in (None, first))
    job.requests.close(END, 5.0)
    assert last_liveness(job.storage, ROOT, 2) is None


# --- with a real run of one process -------------------------------------------------------------


@contextmanager
def open_run(root: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Iterator[Any]:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(rank_requests, "REQUEST_CHECK_INTERVAL_S", 0.01)
    with dc.Checkpointer(root, **{"save": dc.at(99), "background": False, **options}) as ck:
        yield ck


def asked_while_it_polls(ck: dc.Checkpointer, root: Path, *, stops: bool = False) -> AnswerRecord:
    storage = LocalStorage()
    request = request_save(storage, str(root), stops=stops)
    deadline = time.monotonic() + 20
    while (answer := read_answer(storage, str(root), request.id)) is None:
        assert time.monotonic() < deadline
        ck.poll()
        time.sleep(0.01)
    return answer


def test_a_run_that_has_done_no_step_since_answers_with_what_it_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_run(tmp_path, monkeypatch) as ck:
        assert ck.restore({"x": 1}) is None
        nothing = asked_while_it_polls(ck, tmp_path)
        assert (nothing.outcome, nothing.saved) == ("failed", None)
        assert "has done no step since" in nothing.why
        ck.step(1)
        first, again = (asked_while_it_polls(ck, tmp_path) for _ in range(2))
    (saved,) = dc.checkpoints(tmp_path)
    assert first.saved == again.saved == saved.where
    with open_run(tmp_path, monkeypatch) as ck:
        assert ck.restore({"x": 1}) == 1
        answer = asked_while_it_polls(ck, tmp_path, stops=True)
        assert (answer.outcome, answer.saved) == ("saved", saved.where)
        assert ck.stopped.step == 1
    assert dc.checkpoints(tmp_path)[-1].attempt == saved.attempt


def test_a_save_that_is_given_up_is_told_and_the_next_one_counts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_run(tmp_path, monkeypatch) as ck:
        ck.restore({"x": 1})
        (tmp_path / "step-00000001").write_text("in the way")
        ck.step(1)
        told = [asked_while_it_polls(ck, tmp_path) for _ in range(2)]
        assert [one.outcome for one in told] == ["failed", "failed"]
        assert "step 1 is not saved: " in told[0].why
        ck.step(2)
        answer = asked_while_it_polls(ck, tmp_path)
        assert answer.saved is not None
        assert answer.saved[0] == 2


@pytest.mark.parametrize("error", [None, RuntimeError("planted")])
def test_how_a_run_ends_without_the_save_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    with suppress(RuntimeError), open_run(tmp_path, monkeypatch) as ck:
        ck.restore({"x": 1})
        ck.step(1)
        request = request_save(LocalStorage(), str(tmp_path), stops=False)
        if error is not None:
            raise error
    answer = read_answer(LocalStorage(), str(tmp_path), request.id)
    assert answer is not None
    how = "and its last steps are not saved" if error is None else "with RuntimeError"
    assert answer.outcome == "ended"
    assert (
        f"the run has ended{',' if error is None else ''} {how}. Newest durable save: none"
        in answer.why
    )


def test_a_start_after_one_that_did_not_end_says_when_that_was_last_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="dist_ckpt")
    for _ in range(2):
        with open_run(tmp_path, monkeypatch) as ck:
            ck.restore({"x": 1})
    assert "has not reported its end" not in caplog.text
    LivenessFile(LocalStorage(), str(tmp_path), 2).renew()
    with open_run(tmp_path, monkeypatch) as ck:
        ck.restore({"x": 1})
    assert "incarnation 2 has not reported its end; it was last seen at 2" in caplog.text


def test_who_only_reads_looks_for_no_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_run(tmp_path, monkeypatch) as ck:
        ck.restore({"x": 1})
        ck.step(99)
    with open_run(tmp_path, monkeypatch, read_only=True) as ck:
        ck.restore({"x": 1})
        request = request_save(LocalStorage(), str(tmp_path), stops=True)
        time.sleep(0.1)
        ck.poll()
        assert not ck.should_stop
    assert read_answer(LocalStorage(), str(tmp_path), request.id) is None
