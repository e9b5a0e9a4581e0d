"""The history of the figures: its lines, who may break them, and what is drawn from them."""

from __future__ import annotations

import json
import multiprocessing
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import pytest

from benchmarks import __main__ as command
from benchmarks import history
from benchmarks.history import HistoryError
from benchmarks.report import SCHEMA, document, machine
from benchmarks.scenario import OURS, Absent, Figure, Measure, Scenario, Settings

SAVE = Measure(
    scenario="tiny",
    name="save",
    title="save a little",
    rows=(
        Figure("raw", (0.5, 0.25, 0.75)),
        Figure(OURS, (1.0, 2.0, 1.5), facts={"MiB": 3.0}, note="durable"),
        Figure("rival", (4.0,)),
        Absent("other", "is not installed"),
    ),
    nbytes=1 << 30,
    limits=("raw",),
    note="by hand",
)
LOAD = replace(SAVE, name="load", title="load a little", limits=())
PLAN = Measure("plan", "steps", "plan a little", (Figure(OURS, (0.001,)),))

FACTS: dict[str, object] = {"cores": 2, "kernel": "6.1.0", "packages": {"torch": "2.13.0"}}


def line(*measures: Measure, day: int = 1, **changes: object) -> dict[str, object]:
    figures = document(measures, Settings(Path("x"), rounds=3), FACTS)
    origin = {"date": f"2026-01-{day:02}T12:00:00+00:00", "commit": "0123456789abcdef"}
    return {**origin, **figures, **changes}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history.jsonl"


# --- lines ------------------------------------------------------------------------------------


def test_what_is_appended_is_read_again(path: Path) -> None:
    history.append(path, line(SAVE, LOAD))
    history.append(path, line(PLAN, day=2, commit=None))
    first, second = history.read(path)
    assert (first.measures, second.measures) == ((SAVE, LOAD), (PLAN,))
    assert first.date.isoformat() == "2026-01-01T12:00:00+00:00"
    assert (first.commit, second.commit) == ("0123456789abcdef", None)
    assert first.machine == FACTS


def test_a_line_says_when_where_and_how_it_was_measured(path: Path) -> None:
    figures = document([SAVE], Settings(path.parent, rounds=3, nbytes=77), machine(path.parent))
    history.append(path, {**history.origin(), **figures})
    text = path.read_text()
    assert text.count("\n") == 1
    values = json.loads(text)
    assert values["schema"] == SCHEMA
    assert values["date"].endswith("+00:00")
    assert values["machine"]["cores"] > 0
    assert (values["rounds"], values["nbytes"]) == (3, 77)
    assert values["measures"] == json.loads(json.dumps(figures))["measures"]


def test_runs_are_read_by_their_date_whatever_a_merge_did_to_their_order(path: Path) -> None:
    for day in (3, 1, 2):
        history.append(path, line(SAVE, day=day))
    assert [run.date.day for run in history.read(path)] == [1, 2, 3]


def test_a_torn_last_line_is_left_out_with_a_warning(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    history.append(path, line(SAVE))
    whole = path.read_bytes()
    for kept in (1, len(whole) // 2, len(whole) - 2):
        caplog.clear()
        path.write_bytes(whole + whole[:kept])
        assert [run.measures for run in history.read(path)] == [(SAVE,)]
        assert caplog.messages == [f"{path}: line 2 was cut off, and is left out"]


def test_a_torn_line_spoils_no_run_that_is_added_later(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    history.append(path, line(SAVE))
    path.write_bytes(path.read_bytes()[:-50])
    for day in (2, 3):
        history.append(path, line(LOAD, day=day))
    assert [run.date.day for run in history.read(path)] == [2, 3]
    assert caplog.messages == [f"{path}: line 1 was cut off, and is left out"]


def test_a_last_line_that_lacks_nothing_but_its_end_is_a_run(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_text(json.dumps(line(SAVE)))
    history.append(path, line(LOAD, day=2))
    assert [run.measures for run in history.read(path)] == [(SAVE,), (LOAD,)]
    assert not caplog.messages


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ('{"schema": "dist-ck', "JSONDecodeError"),
        ("[]", "TypeError"),
        (json.dumps(line(SAVE, schema="other/9")), "schema 'other/9'; known is"),
        (json.dumps(line(SAVE, measures=None)), "TypeError"),
        (json.dumps(line(SAVE, measures=[{}])), "KeyError"),
        (json.dumps(line(SAVE, date="2026-01-01T12:00:00")), "no time zone"),
        (json.dumps(line(SAVE)).replace("[4.0]", "[]"), "rival has a figure of no rounds"),
    ],
)
def test_any_other_bad_line_is_an_error_that_names_file_and_line(
    path: Path, bad: str, reason: str
) -> None:
    good = json.dumps(line(SAVE))
    for lines, number in [([good, bad, good], 2), ([good, good, bad], 3)]:
        path.write_text("\n".join(lines) + "\n")
        with pytest.raises(HistoryError) as caught:
            history.read(path)
        assert f"{path}: line {number} is no run: " in str(caught.value)
        assert reason in str(caught.value)


def test_a_history_that_is_not_there_is_named(path: Path) -> None:
    with pytest.raises(HistoryError, match=r"history\.jsonl: there is no history yet"):
        history.read(path)


def test_the_history_of_this_repository_is_whole(caplog: pytest.LogCaptureFixture) -> None:
    assert history.read(history.USUAL_PATH)
    assert not caplog.messages


def append_many(path: Path, name: str, barrier: Barrier) -> None:
    barrier.wait(60)
    for _ in range(50):
        history.append(path, line(replace(SAVE, scenario=name, note="much " * 2000)))


def assert_nothing_lost(path: Path, names: list[str], caplog: pytest.LogCaptureFixture) -> None:
    found = [run.measures[0].scenario for run in history.read(path)]
    assert sorted(found) == sorted(names * 50)
    assert not caplog.messages


def test_threads_that_append_at_once_lose_nothing(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["a", "b", "c"]
    barrier = Barrier(len(names))
    with ThreadPoolExecutor(len(names)) as executor:
        list(executor.map(lambda name: append_many(path, name, barrier), names, timeout=60))
    assert_nothing_lost(path, names, caplog)


@pytest.mark.long
@pytest.mark.multi_process
def test_processes_that_append_at_once_lose_nothing(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["a", "b"]
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(len(names))
    processes = [
        context.Process(target=append_many, args=(path, name, barrier), daemon=True)
        for name in names
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
    assert [process.exitcode for process in processes] == [0, 0]
    assert_nothing_lost(path, names, caplog)


# --- commits ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.multi_process
def test_a_commit_is_marked_if_code_differs_from_it(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        command = ["git", *identity, *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    assert history.commit_of(tmp_path) is None
    git("init")
    inner = tmp_path / "inner"
    inner.mkdir()
    for name in ("a.py", "inner/history.jsonl"):
        (tmp_path / name).write_text("1\n")
    git("add", ".")
    git("commit", "-m", "first")
    (inner / "history.jsonl").write_text("2\n")
    assert history.commit_of(inner) == git("rev-parse", "HEAD")
    (tmp_path / "a.py").write_text("2\n")
    assert history.commit_of(inner) == git("rev-parse", "HEAD") + "+changed"


# --- choosing ---------------------------------------------------------------------------------


def test_each_measure_is_drawn_as_it_was_taken_last(path: Path) -> None:
    again = replace(SAVE, rows=(Figure(OURS, (9.0,)),))
    absent = replace(LOAD, rows=(Absent(OURS, "failed"),))
    history.append(path, line(SAVE, LOAD))
    history.append(path, line(again, absent, PLAN, day=2))
    taken = history.newest(history.read(path))
    assert [measure for _, measure in taken] == [again, LOAD, PLAN]
    assert [run.date.day for run, _ in taken] == [2, 1, 2]


def test_runs_of_another_size_are_another_trend(path: Path) -> None:
    half = replace(SAVE, nbytes=1 << 29)
    absent = replace(SAVE, rows=(Absent(OURS, "failed"),))
    for day, measure in enumerate([SAVE, half, absent, SAVE], start=1):
        history.append(path, line(measure, day=day))
    whole, halves = history.over_time(history.read(path))
    assert [run.date.day for run, _ in whole] == [1, 4]
    assert [run.date.day for run, _ in halves] == [2]


def test_a_scenario_or_one_of_its_measures_is_chosen(path: Path) -> None:
    history.append(path, line(SAVE, LOAD, PLAN))
    runs = history.read(path)
    for only, measures in [
        (["tiny"], (SAVE, LOAD)),
        (["tiny:load", "plan"], (LOAD, PLAN)),
        (["tiny:other"], ()),
    ]:
        (run,) = history.chosen(runs, only)
        assert run.measures == measures


# --- the command ------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Return what is measured, with one scenario in place of those that take minutes."""
    names: list[str] = []

    def run(settings: Settings) -> Iterator[Measure]:
        names.append("tiny")
        yield SAVE

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    monkeypatch.setattr(command, "_scenarios", lambda: [Scenario("tiny", "a little", run)])
    yield names
    signal.signal(signal.SIGTERM, before)


def words(path: Path, *others: str) -> list[str]:
    return ["--history", str(path), "--dir", str(path.parent / "build"), *others]


def test_every_run_adds_a_line_unless_it_is_told_not_to(path: Path, measured: list[str]) -> None:
    for number in (1, 2):
        assert command.main(words(path)) == 0
        runs = history.read(path)
        assert [run.measures for run in runs] == [(SAVE,)] * number
    before = path.read_bytes()
    assert command.main(words(path, "--no-history")) == 0
    assert path.read_bytes() == before
    assert len(measured) == 3


def test_a_quick_run_leaves_the_history_alone(path: Path, measured: list[str]) -> None:
    assert command.main(words(path, "--quick")) == 0
    assert measured
    assert not path.exists()


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (["--draw"], "--draw needs --chart or --trend"),
        (["--draw", "--trend", "x.svg", "--json", "x"], "nothing that --json could write"),
        (["--quick", "--chart", "x.svg"], "this run would not be in it"),
        (["--no-history", "--trend", "x.svg"], "this run would not be in it"),
        (["--history", "nowhere/history.jsonl"], "there is no folder nowhere"),
        (["--only", "tiny", "huge"], "no scenario huge"),
    ],
)
def test_what_could_not_be_drawn_or_kept_is_refused_before_anything_is_measured(
    path: Path,
    measured: list[str],
    capsys: pytest.CaptureFixture[str],
    others: list[str],
    message: str,
) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main(words(path, *others))
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
    assert not measured


def test_pictures_are_drawn_from_the_history_and_nothing_is_measured(
    path: Path, measured: list[str]
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra: bench)")
    slower = replace(SAVE, rows=(Figure("raw", (0.5,)), Figure(OURS, (8.0,))))
    history.append(path, line(SAVE, LOAD, PLAN))
    history.append(path, line(slower, day=2, machine={"cores": 64, "accelerator": None}))
    chart, trend = path.with_name("chart.svg"), path.with_name("trend.svg")
    arguments = words(path, "--draw", "--chart", str(chart), "--trend", str(trend))
    assert command.main(arguments) == 0
    bars, curves = chart.read_text(), trend.read_text()
    # An SVG has each text in a comment, before its outlines.
    for text in ("tiny: save a little", "plan: plan a little", "2026-01-02 0123456", "0.134"):
        assert f"{text} -->" in bars
    assert "<!-- rival -->" in bars  # of the load, which was measured only once
    for text in ("of raw", "seconds", "2026-01-01", "cores 2, kernel 6.1.0", "cores 64"):
        assert f"<!-- {text} -->" in curves
    assert not measured
    assert command.main([*arguments, "--only", "tiny:load"]) == 0
    assert "save a little" not in chart.read_text() + trend.read_text()
    assert "load a little" in chart.read_text()


def test_a_run_is_drawn_beside_those_before_it(path: Path, measured: list[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra: bench)")
    history.append(path, line(replace(SAVE, title="as it was"), PLAN))
    chart = path.with_name("chart.svg")
    assert command.main(words(path, "--chart", str(chart))) == 0
    assert measured
    text = chart.read_text()
    assert "tiny: save a little" in text
    assert "plan: plan a little" in text
    assert "as it was" not in text


def test_a_history_without_such_figures_is_said(path: Path, measured: list[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra: bench)")
    history.append(path, line(PLAN))
    with pytest.raises(SystemExit, match="no figures of what is to be drawn"):
        command.main(words(path, "--draw", "--only", "tiny", "--chart", "x.svg"))
    with pytest.raises(SystemExit, match="there is no history yet"):
        command.main(words(path.with_name("none"), "--draw", "--chart", "x.svg"))
    assert not measured
