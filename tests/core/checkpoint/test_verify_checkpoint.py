"""Everything that is wrong with a checkpoint is reported, with its file, rank, tensor and rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dist_ckpt.core.checkpoint import verify_checkpoint as verify_module
from dist_ckpt.core.checkpoint.verify_checkpoint import Level, Problem, VerifyReport, verify
from dist_ckpt.core.commit.attempts import find_checkpoint
from dist_ckpt.core.commit.commit_protocol import claim, commit
from dist_ckpt.core.format.geometry import ByteRange, Flat, Layout
from dist_ckpt.core.format.index.index import Key, Node
from dist_ckpt.core.format.objects.objects_file import ObjectsFile
from dist_ckpt.core.storage.local.local_storage import LocalStorage
from dist_ckpt.errors import IncompatibleError, NotFoundError
from written import Saved, catalog_of, one_cell, random_tensor, rows, save, write_catalog

if TYPE_CHECKING:
    from _collections_abc import dict_items

SHAPE = (40, 8)
FILES = {
    0: {"objects.msgpack": ObjectsFile(values={"lr": 0.5})},
    1: {"objects-00001.msgpack": ObjectsFile(per_rank={"rng": {1: "one"}})},
}
NAMES = (
    "model-00000.safetensors",
    "model-00001.safetensors",
    "objects-00001.msgpack",
    "objects.msgpack",
)


def tensors() -> dict[str, Saved]:
    """Rows 0:13 of `model.w` are rank 0's, 13:40 rank 1's; a block is two rows of it."""
    return {
        "model.w": random_tensor(SHAPE, rows(SHAPE, 13), seed=1),
        "model.f": random_tensor((6, 5), Layout(Flat((0, 11, 30)), ((0,), (1,))), seed=2),
        "model.r": random_tensor((9,), one_cell((9,), 0, 1), rotation=1, seed=3),
        "model.s": random_tensor((), one_cell((), 1), dtype="int16", seed=4),
        "model.e": random_tensor((0, 3), one_cell((0, 3))),
    }


def make(path: Path) -> Path:
    saved = tensors()
    catalog = replace(catalog_of(saved, 2), values={"lr": 0}, per_rank={"rng": ((1, 1),)})
    return save(path, saved, catalog=catalog, objects=FILES, block_nbytes=64)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the attempt's folder of a checkpoint that no test may change."""
    return make(tmp_path_factory.mktemp("made") / "ck")


def flip(file: Path, at: int, bits: int = 1) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= bits
    file.write_bytes(data)


def header_nbytes(file: Path) -> int:
    return 8 + int.from_bytes(file.read_bytes()[:8], "little")


def about(report: VerifyReport, name: str) -> list[Problem]:
    """Return the problems of a report, all of which are about one file."""
    assert not report.ok
    assert {problem.file for problem in report.problems} == {name}
    return list(report.problems)


@pytest.mark.parametrize("level", ["full", "quick"])
def test_a_good_checkpoint_has_no_problems(made: Path, level: str) -> None:
    report = verify(made.parent, level=level)  # type: ignore[arg-type]
    assert report.ok
    assert (report.problems, report.notes) == ((), ())
    assert (report.attempt, report.level, report.num_files) == (made.name, level, 4)
    nbytes = sum((made / name).stat().st_size for name in NAMES)
    if level == "quick":
        shards = [made / name for name in NAMES[:2]]
        nbytes -= sum(file.stat().st_size - header_nbytes(file) for file in shards)
    assert report.nbytes_checked == nbytes


@pytest.mark.parametrize("name", [*NAMES, "index.json", "claim.json"])
def test_any_flipped_bit_of_any_file_is_reported(folder: Path, name: str) -> None:
    file = folder / name
    nbytes = file.stat().st_size
    start = header_nbytes(file) if name.endswith("safetensors") else nbytes
    places = {*range(0, min(start, 700), 53), *range(start, nbytes, 61), nbytes - 1, 9}
    for at in sorted(places | {start - 1} if start < nbytes else places):
        flip(file, at, 1 << at % 8)
        about(verify(folder.parent), name)
        flip(file, at, 1 << at % 8)
    assert verify(folder.parent).ok


@pytest.mark.parametrize("level", ["full", "quick"])
@pytest.mark.parametrize("name", [*NAMES, "index.json", "claim.json"])
@pytest.mark.parametrize("change", [-1, -20, +1, +5000])
def test_any_truncation_or_extension_is_reported(
    folder: Path, name: str, change: int, level: str
) -> None:
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[:change] if change < 0 else data + bytes(change))
    about(verify(folder.parent, level=level), name)  # type: ignore[arg-type]


@pytest.mark.parametrize("level", ["full", "quick"])
@pytest.mark.parametrize("name", [*NAMES, "claim.json"])
def test_a_missing_file_is_reported(folder: Path, name: str, level: str) -> None:
    (folder / name).unlink()
    problems = about(verify(folder.parent, level=level), name)  # type: ignore[arg-type]
    assert all("is missing" in problem.what for problem in problems)


def test_a_damaged_block_is_reported_with_its_rank_tensor_and_rows(folder: Path) -> None:
    file = folder / "model-00001.safetensors"
    start = header_nbytes(file)
    # By item size, then name: `model.f` has elements 11 to 30, then come 9 of `model.r`.
    flip(file, start + 64)
    flip(file, start + 19 * 4 + 9 * 4 + 3 * 64)
    first, second = about(verify(folder.parent), file.name)
    assert (first.rank, first.tensor, first.rows) == (1, "model.f", ByteRange(5, 6))
    assert (second.rank, second.tensor, second.rows) == (1, "model.w", ByteRange(19, 21))
    assert str(second).startswith("model.w rows 19:21: damaged, the block's digest is ")
    assert f"{file} of rank 1, bytes {start + 304}:{start + 368}" in second.what
    assert verify(folder.parent, level="quick").ok


def test_every_problem_is_reported_at_once(folder: Path) -> None:
    (folder / "model-00000.safetensors").unlink()
    flip(folder / "model-00001.safetensors", -1)
    flip(folder / "objects.msgpack", 9)
    (folder / "claim.json").unlink()
    files = [problem.file for problem in verify(folder.parent).problems]
    assert sorted(set(files)) == [
        "claim.json",
        "model-00000.safetensors",
        "model-00001.safetensors",
        "objects.msgpack",
    ]


def test_a_lost_file_names_the_tensors_and_rows_that_are_lost_with_it(folder: Path) -> None:
    (folder / "model-00000.safetensors").unlink()
    report = verify(folder.parent)
    lost = {(problem.tensor, problem.rows) for problem in report.problems}
    assert lost == {
        (None, None),
        ("model.e", ByteRange(0, 0)),
        ("model.f", ByteRange(0, 3)),
        ("model.w", ByteRange(0, 13)),
    }
    assert {problem.rank for problem in report.problems} == {0}


@pytest.mark.parametrize("level", ["full", "quick"])
def test_a_file_that_is_cut_off_names_what_is_lost_and_checks_the_rest(
    folder: Path, level: str
) -> None:
    file = folder / "model-00001.safetensors"
    start = header_nbytes(file)
    with file.open("r+b") as opened:
        # Ends within the second block of `model.w`, which is rows 15 and 16.
        opened.truncate(start + 19 * 4 + 9 * 4 + 100)
    flip(file, start)
    problems = about(verify(folder.parent, level=level), file.name)  # type: ignore[arg-type]
    lost = {(problem.tensor, problem.rows) for problem in problems}
    expected = {(None, None), ("model.w", ByteRange(15, 40)), ("model.s", None)}
    assert lost == expected | ({("model.f", ByteRange(2, 6))} if level == "full" else set())


def test_a_header_that_is_damaged_loses_every_tensor_of_the_file(folder: Path) -> None:
    file = folder / "model-00001.safetensors"
    flip(file, 20)
    problems = about(verify(folder.parent, level="quick"), file.name)
    assert {p.tensor for p in problems} == {None, "model.f", "model.r", "model.s", "model.w"}


def test_a_damaged_index_is_a_report_and_no_error(folder: Path) -> None:
    flip(folder / "index.json", 300)
    report = verify(folder.parent)
    assert not report.ok
    assert report.attempt is None
    (problem,) = report.problems
    assert problem.file == "index.json"


def test_an_unknown_file_of_ours_is_a_problem_and_a_foreign_one_a_note(folder: Path) -> None:
    (folder / "model-00002.safetensors").write_bytes(b"what is it?")
    (folder / ".index-0123456789abcdef.tmp").write_bytes(b"left over")
    (folder / "README").write_bytes(b"mine")
    report = verify(folder.parent)
    (problem,) = about(report, "model-00002.safetensors")
    assert "is not in the index" in problem.what
    assert len(report.notes) == 2
    assert "README" in report.notes[1]


def test_a_link_in_place_of_a_file_is_a_problem(folder: Path, tmp_path: Path) -> None:
    file = folder / "model-00001.safetensors"
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    problems = about(verify(folder.parent), file.name)
    assert problems[0].rank == 1


def test_shards_that_the_index_does_not_expect_are_reported(tmp_path: Path) -> None:
    saved = tensors()
    storage = LocalStorage()
    claimed = claim(storage, str(tmp_path / "ck"), overwrite=False, by="a test")
    objects = {0: {"objects.msgpack": ObjectsFile()}}
    index = write_catalog(storage, claimed.folder, saved, catalog_of(saved, 2), objects=objects)
    catalog = index.catalog
    tensors_of_index = dict(catalog.tensors)
    tensors_of_index["model.g"] = tensors_of_index.pop("model.f")
    tensors_of_index["model.w"] = replace(catalog.tensors["model.w"], dtype="int32")
    wrong = replace(index, attempt=claimed.attempt.name)
    commit(storage, claimed, replace(wrong, catalog=replace(catalog, tensors=tensors_of_index)))
    report = verify(tmp_path / "ck", level="quick")
    told = {(problem.rank, problem.tensor) for problem in report.problems}
    assert told == {(r, f"model.{name}") for r in (0, 1) for name in "fgw"}
    assert any("has nothing, the index says float32 [6, 5]" in str(p) for p in report.problems)
    assert any("has float32 [40, 8], the index says int32" in str(p) for p in report.problems)


@pytest.mark.parametrize("level", ["full", "quick"])
def test_a_value_that_its_file_lacks_is_reported(tmp_path: Path, level: Level) -> None:
    saved = {"model.w": random_tensor((2,), one_cell((2,)))}
    catalog = replace(
        catalog_of(saved, 2),
        values={"lr": 0, "late": 1},
        per_rank={"rng": ((("dp", 0), 0), (("dp", 1), 1))},
    )
    root = Node("", "dict", ("model", "lr", "late", "rng"))
    whole = {
        0: {
            "objects.msgpack": ObjectsFile((root, Node("model", "dict", ("w",))), {"lr": 1}),
            "objects-00000.msgpack": ObjectsFile(per_rank={"rng": {("dp", 0): 1}}),
        },
        1: {"objects-00001.msgpack": ObjectsFile((), {"late": 1}, {"rng": {("dp", 1): 1}})},
    }
    save(tmp_path / "whole", saved, catalog=catalog, objects=whole)
    assert verify(tmp_path / "whole", level=level).ok
    lacking = {
        0: {
            "objects.msgpack": ObjectsFile(tree=(root, Node("model", "dict", ("w", 0)))),
            "objects-00000.msgpack": ObjectsFile(values={"lr": 1, "late": 1}),
        },
        1: {"objects-00001.msgpack": ObjectsFile(per_rank={"rng": {("dp", 0): 1}})},
    }
    save(tmp_path / "ck", saved, catalog=catalog, objects=lacking)
    problems = verify(tmp_path / "ck", level=level).problems
    told = {(p.file, p.rank, p.what.partition(" lacks ")[2]) for p in problems}
    end = ", which the checkpoint should hold"
    assert told == {
        ("objects.msgpack", 0, f"lr{end}"),
        ("objects.msgpack", 0, f"model.0, a child of model{end}"),
        ("objects-00000.msgpack", 0, f"rng of ('dp', 0){end}"),
        ("objects-00001.msgpack", 1, f"late{end}"),
        ("objects-00001.msgpack", 1, f"rng of ('dp', 1){end}"),
    }


class Walked(dict[str, tuple[tuple[Key, int], ...]]):
    """A table of a catalog that counts how often somebody goes through it."""

    walks = 0

    def items(self) -> dict_items[str, tuple[tuple[Key, int], ...]]:
        self.walks += 1
        return super().items()


def test_the_catalog_is_walked_once_for_all_objects_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = 7
    saved = {"model.w": random_tensor((2,), one_cell((2,)))}
    catalog = replace(
        catalog_of(saved, ranks), per_rank={"rng": tuple((r, r) for r in range(ranks))}
    )
    files = {
        r: {f"objects-{r:05d}.msgpack": ObjectsFile(per_rank={"rng": {r: r}})} for r in range(ranks)
    }
    files[0]["objects.msgpack"] = ObjectsFile()
    save(tmp_path / "ck", saved, catalog=catalog, objects=files)
    attempt, index = find_checkpoint(LocalStorage(), str(tmp_path / "ck"))
    walked = Walked(index.catalog.per_rank)
    index = replace(index, catalog=replace(index.catalog, per_rank=walked))
    monkeypatch.setattr(verify_module, "find_checkpoint", lambda *_: (attempt, index))
    assert verify(tmp_path / "ck").ok
    assert walked.walks == 1


def test_a_checkpoint_without_its_global_objects_file_is_a_problem(tmp_path: Path) -> None:
    save(tmp_path / "ck", {"model.w": random_tensor((2,), one_cell((2,)))})
    (problem,) = verify(tmp_path / "ck").problems
    assert problem.what.endswith("the index lists no objects.msgpack")


def test_nothing_to_verify_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        verify(tmp_path / "none")


def test_a_newer_format_is_an_error_and_not_damage(folder: Path) -> None:
    index = folder / "index.json"
    data = index.read_bytes().partition(b',"digest"')[0]
    newer = data.replace(b'"version":1', b'"version":2', 1)
    assert newer != data
    index.write_bytes(newer + b"}\n")
    with pytest.raises(IncompatibleError):
        verify(folder.parent)


def test_an_unknown_level_is_refused(made: Path) -> None:
    with pytest.raises(ValueError, match='give "full" or "quick"'):
        verify(made.parent, level="deep")  # type: ignore[arg-type]


@pytest.mark.parametrize("level", ["full", "quick"])
def test_progress_climbs_to_the_end(made: Path, level: str) -> None:
    calls: list[tuple[int, int]] = []
    report = verify(made.parent, level=level, progress=lambda a, b: calls.append((a, b)))  # type: ignore[arg-type]
    assert calls == sorted(calls)
    assert len(calls) > len(NAMES)
    assert {total for _, total in calls} == {report.nbytes_checked}
    assert calls[-1] == (report.nbytes_checked, report.nbytes_checked)


def test_a_file_that_cannot_be_read_is_a_problem(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dist_ckpt.errors import StorageError

    class Broken(LocalStorage):
        def open(self, path: str) -> object:  # type: ignore[override]
            file = super().open(path)
            if path.endswith("model-00001.safetensors"):
                read_into = file.read_into

                def failing(offset: int, target: memoryview) -> int:
                    if offset:
                        raise StorageError(f"{path}: input/output error")
                    return read_into(offset, target)

                return Wrapped(file, failing)
            return file

    class Wrapped:
        def __init__(self, file: object, read_into: object) -> None:
            self.file = file
            self.nbytes = file.nbytes  # type: ignore[attr-defined]
            self.read_into = read_into
            self.close = file.close  # type: ignore[attr-defined]

    monkeypatch.setattr(verify_module, "open_storage", lambda path, **_: (Broken(), str(path)))
    problems = about(verify(folder.parent), "model-00001.safetensors")
    assert {p.tensor for p in problems} == {None, "model.f", "model.r", "model.s", "model.w"}
    assert all("input/output error" in p.what for p in problems)
