"""Documents that were changed at random: loaded as they were saved, or refused by our errors.

Some; `scripts/fuzz.py` runs as many as there is time for.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from fork_server import forked_python

pytest.importorskip("torch")
pytest.importorskip("numpy")

import dist_ckpt as dc
import document_fuzz
from document_fuzz import Corpus, FindingError, run_one

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return Corpus(tmp_path_factory.mktemp("fuzz") / "ck")


def run_some(corpus: Corpus, count: int) -> set[str]:
    return {run_one(corpus, f"suite-{number}") for number in range(count)}


@pytest.mark.filterwarnings("ignore")
def test_no_mutated_document_does_more_than_fail(corpus: Corpus) -> None:
    assert {"damaged", "the same", "messages"} <= run_some(corpus, 100)


def test_what_is_loaded_wrongly_is_found(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "saved", {})
    with pytest.raises(FindingError, match=r"^seed \S+, \S+: it loaded, but not what was saved$"):
        run_some(corpus, 100)


def test_what_takes_for_ever_or_raises_anything_is_found(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(*_: object, **__: object) -> str:
        while True:
            pass

    def fail(*_: object, **__: object) -> str:
        raise MemoryError

    monkeypatch.setattr(document_fuzz, "LIMIT_S", 1)
    monkeypatch.setattr(document_fuzz, "_decode_messages", lambda *_: "messages")
    for read, said in ((hang, "more than 1 s"), (fail, "MemoryError")):
        monkeypatch.setattr(document_fuzz, "_read", read)
        with pytest.raises(FindingError, match=said):
            run_some(corpus, 10)
    assert {f.name: f.read_bytes() for f in corpus.folder.iterdir()} == corpus.files


def test_a_value_named_like_the_parameters_of_another_comes_back(tmp_path: Path) -> None:
    # The fuzzer found it: only a list of names is that of an optimizer's group.
    dc.save({"a": 1, "a.params": [1, 2]}, tmp_path / "ck")
    state = {"a": 0, "a.params": []}
    dc.load(state, tmp_path / "ck")
    assert state == {"a": 1, "a.params": [1, 2]}


@pytest.mark.slow
def test_the_script_says_how_many_it_tried() -> None:
    script = [forked_python(), str(ROOT / "scripts" / "fuzz.py"), "--seconds", "3"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " mutants, 0 findings: " in done.stdout
