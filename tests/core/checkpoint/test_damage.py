"""Whatever byte of a checkpoint is damaged, `load` and `verify` say so, and say where.

Over one small checkpoint of four ranks' files; and a load reads little more than what it needs.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest

from dist_ckpt.core.checkpoint.verify_checkpoint import Level
from dist_ckpt.core.format.geometry import Region

pytest.importorskip("torch")

import torch

import dist_ckpt as dc
from dist_ckpt.core.format.checksums import document_digest
from dist_ckpt.core.format.index import index_json
from dist_ckpt.core.format.index.index import Abandoned
from dist_ckpt.core.format.shard_file import ShardFile, decode_header
from dist_ckpt.core.storage.local.local_storage import LocalStorage
from dist_ckpt.errors import CorruptError, IncompatibleError, NotFoundError
from dist_ckpt.testing.memory_storage import MemoryStorage
from long_mode import sample
from ranks import errors_of, load_on_threads, save_on_threads, try_load_on_threads
from sharded_checkpoints import (
    CUTS,
    RANKS,
    Boxes,
    Counting,
    blocks_of,
    random_tensors,
    rank_state,
    save_small,
    values_equal,
)

SHARD_FILES = [
    f"{stem}-{rank:05d}.safetensors" for stem in ("model", "optim") for rank in (0, 1, 3)
]
SHARD_FILES.insert(2, "model-00002.safetensors")
# One process drops what belongs to a rank, so of the per-rank files it reads only rank 3's, which
# has the value `late`.
READ = [*SHARD_FILES, "objects.msgpack", "objects-00003.msgpack", "index.json"]
UNREAD = ["objects-00000.msgpack", "objects-00001.msgpack", "objects-00002.msgpack", "claim.json"]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read by one thread: to start others would be most of the time of so small a load."""
    monkeypatch.setenv("DIST_CKPT_THREADS", "1")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the attempt's folder of a checkpoint that no test leaves changed."""
    path = tmp_path_factory.mktemp("damage") / "ck"
    save_small(LocalStorage(), str(path))
    (folder,) = path.iterdir()
    return folder


def load_all(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = {}
    dc.load(state, folder.parent)
    return state


def error_of_load(folder: Path) -> dc.CheckpointError:
    state: dict[str, Any] = {}
    with pytest.raises(dc.CheckpointError) as caught:
        dc.load(state, folder.parent)
    assert state == {}
    return caught.value


def header_of(file: Path) -> ShardFile:
    data = file.read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    return decode_header(data[:size], nbytes=len(data))


def flipped(file: Path, places: Sequence[int]) -> Iterator[int]:
    """Flip one bit at each place in turn, and put it back when the loop goes on."""
    fd = os.open(file, os.O_RDWR)
    try:
        for at in places:
            old = os.pread(fd, 1, at)[0]
            os.pwrite(fd, bytes([old ^ 1 << at % 8]), at)
            try:
                yield at
            finally:
                os.pwrite(fd, bytes([old]), at)
    finally:
        os.close(fd)


def test_what_is_damaged_below_is_whole_before(made: Path) -> None:
    assert sorted(file.name for file in made.iterdir()) == sorted([*READ, *UNREAD])
    state = load_all(made)
    assert values_equal(state, random_tensors())
    assert state["model"]["tied"] is state["model"]["bias"]
    assert (state["epoch"], state["late"]) == ({"number": 3, "name": "third"}, [1, 2, 3])
    assert dc.verify(made.parent).ok


# --- flipped bits ----------------------------------------------------------------------------


def places_of(file: Path, *, every: int) -> list[int]:
    """Return places in all parts of a file: header, its padding, data, first and last bytes."""
    nbytes = file.stat().st_size
    return sorted({0, 7, 8, nbytes - 1, *range(nbytes % every, nbytes, every)})


@pytest.mark.parametrize("name", READ)
def test_a_flipped_bit_of_what_a_load_reads_is_reported_by_it(made: Path, name: str) -> None:
    file = made / name
    every = 1 if not name.endswith("safetensors") else 211
    for at in flipped(file, sample(places_of(file, every=every), 9)):
        error = error_of_load(made)
        assert type(error) is CorruptError, at
        assert str(file) in str(error), at
        assert re.search(r"(load|use) (an older|another) checkpoint$", str(error)), at


def test_every_flipped_byte_of_a_header_is_reported_by_a_load(made: Path) -> None:
    file = made / "model-00001.safetensors"
    used = file.read_bytes().index(b"   ")
    assert used > 500
    places = [*range(used + 40), *range(used + 40, 4096, 97), 4095]
    # Reads the header alone of the other files.
    for at in flipped(file, sample(places, 9)):
        state = {"model": {"w": torch.zeros(40, 8)}}
        with pytest.raises(CorruptError, match=re.escape(f"{file} of rank 1: the header")) as error:
            dc.load(state, made.parent, include="model.w")
        assert not state["model"]["w"].any(), at
        assert error.value.touched == ()
        assert "model.w rows 13:20" in str(error.value)


@pytest.mark.parametrize("name", SHARD_FILES)
def test_a_flipped_byte_of_data_is_reported_with_its_tensor_rows_rank_and_file(
    made: Path, name: str
) -> None:
    file = made / name
    header = header_of(file)
    rank = header.rank
    start = header.header_nbytes
    for at in flipped(file, sample(range(start, file.stat().st_size, 7), 9)):
        error = error_of_load(made)
        assert type(error) is CorruptError
        (shard,) = [s for s in header.shards if s.span.start <= at - start < s.span.stop]
        found = re.match(r"(\S+) (?:rows (\d+):(\d+)|\(a scalar\)): damaged", str(error))
        assert found, str(error)
        assert found[1] == shard.fqn
        assert f"{file} of rank {rank}, bytes " in str(error)
        span = re.search(r"bytes (\d+):(\d+)\)", str(error))
        assert span is not None
        first, last = map(int, span.groups())
        assert first <= at < last <= first + 64
        if found[2] is not None:
            rows = range(int(found[2]), int(found[3]))
            assert row_of(shard, at - start) in rows
            assert len(rows) <= len(random_tensors()[shard.fqn])


def row_of(shard: Any, at: int) -> int:
    """Return the row of the whole tensor that a byte of the data section belongs to."""
    whole = random_tensors()[shard.fqn]
    number = (at - shard.span.start) // whole.element_size()
    inner = whole[0].numel()
    if hasattr(shard.cell, "offset"):
        return int(shard.cell.offset[0] + number // inner)
    return int((shard.cell.start + number) // inner)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [*READ, *UNREAD])
def test_a_flipped_bit_of_any_file_is_reported_by_verify(made: Path, name: str) -> None:
    file = made / name
    for at in flipped(file, places_of(file, every=13 if file.suffix != ".safetensors" else 409)):
        report = dc.verify(made.parent)
        assert {problem.file for problem in report.problems} == {name}, at
        assert all(str(file) in str(problem) for problem in report.problems), at


def test_every_flipped_byte_of_the_claim_is_reported_by_verify(made: Path) -> None:
    places = range((made / "claim.json").stat().st_size)
    for at in flipped(made / "claim.json", sample(places, 9)):
        report = dc.verify(made.parent, level="quick")
        assert [problem.file for problem in report.problems] == ["claim.json"], at


@pytest.mark.parametrize("name", UNREAD)
def test_damage_of_what_is_not_needed_does_not_hinder_a_load(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"damage")
    assert values_equal(load_all(folder), random_tensors())


# --- truncated, extended, missing, swapped ---------------------------------------------------


def cuts_of(nbytes: int) -> list[int]:
    return sorted({0, 1, 7, 8, 9, nbytes // 2, 4095, 4096, 4097, nbytes - 1} & set(range(nbytes)))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [*READ, *UNREAD])
def test_every_truncation_is_reported(folder: Path, name: str) -> None:
    file = folder / name
    data = file.read_bytes()
    cuts = cuts_of(len(data))
    every = sample(range(len(data)), 9) if name.startswith("objects") else cuts
    for size in sorted({*every, *cuts}):
        file.write_bytes(data[:size])
        if name in READ:
            error = error_of_load(folder)
            assert type(error) is CorruptError, size
            assert str(file) in str(error), size
        if size in cuts:
            for level in get_args(Level):
                report = dc.verify(folder.parent, level=level)
                assert {problem.file for problem in report.problems} == {name}, size


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [*READ, *UNREAD])
@pytest.mark.parametrize("more", [b"\0", b"\n", b" " * 4096], ids=["zero", "newline", "page"])
def test_every_extension_is_reported(folder: Path, name: str, more: bytes) -> None:
    file = folder / name
    with file.open("ab") as opened:
        opened.write(more)
    if name in READ:
        error = error_of_load(folder)
        assert type(error) is CorruptError
        assert str(file) in str(error)
    for level in get_args(Level):
        report = dc.verify(folder.parent, level=level)
        assert {problem.file for problem in report.problems} == {name}


@pytest.mark.parametrize("name", [*READ, *UNREAD])
def test_a_missing_file_is_reported(folder: Path, name: str) -> None:
    (folder / name).unlink()
    if name == "index.json":  # truly nothing is committed
        assert type(error_of_load(folder)) is NotFoundError
        with pytest.raises(NotFoundError, match=r"1 unfinished.*save again"):
            dc.verify(folder.parent)
        return
    if name in READ:
        error = error_of_load(folder)
        assert type(error) is CorruptError
        assert re.search(rf"{re.escape(str(folder / name))}.* is missing", str(error))
        assert str(error).endswith("load an older checkpoint")
    report = dc.verify(folder.parent)
    assert {problem.file for problem in report.problems} == {name}


def test_all_files_that_are_missing_are_named_at_once_with_what_they_hold(folder: Path) -> None:
    for rank in (1, 3):
        (folder / f"model-{rank:05d}.safetensors").unlink()
    message = str(error_of_load(folder))
    for rank in (1, 3):
        assert f"model-{rank:05d}.safetensors of rank {rank} is missing" in message
        assert f"model.w rows {CUTS[rank]}:{CUTS[rank + 1]}" in message


def put_link(file: Path) -> None:
    file.rename(file.parent.parent / "elsewhere")
    file.symlink_to(file.parent.parent / "elsewhere")


def put_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def put_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize("put", [put_link, put_folder, put_pipe])
@pytest.mark.parametrize("name", ["model-00001.safetensors", "objects.msgpack", "index.json"])
def test_what_is_no_regular_file_is_reported(
    folder: Path, name: str, put: Callable[[Path], None]
) -> None:
    put(folder / name)
    error = error_of_load(folder)
    assert type(error) is CorruptError
    assert str(folder / name) in str(error)
    assert {problem.file for problem in dc.verify(folder.parent).problems} == {name}


def swap(a: Path, b: Path) -> None:
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("model-00000.safetensors", "model-00003.safetensors"),
        ("model-00001.safetensors", "optim-00001.safetensors"),
        ("objects.msgpack", "objects-00003.msgpack"),
        ("objects-00000.msgpack", "objects-00001.msgpack"),
        ("claim.json", "index.json"),
    ],
)
def test_swapped_files_are_reported(folder: Path, a: str, b: str) -> None:
    swap(folder / a, folder / b)
    if "index.json" in (a, b):  # it says that the attempt was given up, and its digest is right
        assert type(error_of_load(folder)) is NotFoundError
        return
    if a in READ:
        error = error_of_load(folder)
        assert type(error) is CorruptError
        assert a in str(error) or b in str(error)
    assert {problem.file for problem in dc.verify(folder.parent).problems} == {a, b}


@pytest.mark.parametrize("name", [SHARD_FILES[1], "objects-00003.msgpack", "objects.msgpack"])
def test_a_file_of_another_save_of_the_same_state_is_reported(
    folder: Path, tmp_path: Path, name: str
) -> None:
    states = [rank_state(rank) for rank in range(RANKS)]
    for state in states:
        for shard in (state["model"]["w"], state["optim"]["moment"]):
            shard.tensor.add_(1)
        state["epoch"]["number"] = 4
        if "late" in state:
            state["late"] = [1, 2, 4]
    with blocks_of(64):
        save_on_threads(LocalStorage(), states, str(tmp_path / "other"), step=5)
    (other,) = (tmp_path / "other").iterdir()
    assert (other / name).stat().st_size == (folder / name).stat().st_size
    shutil.copy(other / name, folder / name)
    error = error_of_load(folder)
    assert type(error) is CorruptError
    assert str(folder / name) in str(error)
    assert {problem.file for problem in dc.verify(folder.parent).problems} == {name}


def test_a_file_that_the_index_does_not_list_is_reported_by_verify(folder: Path) -> None:
    shutil.copy(folder / SHARD_FILES[0], folder / "model-00007.safetensors")
    (folder / "notes.txt").write_text("mine")
    report = dc.verify(folder.parent)
    assert [problem.file for problem in report.problems] == ["model-00007.safetensors"]
    assert [note.rpartition("/")[2] for note in report.notes] == ["notes.txt is not in the index"]
    assert values_equal(load_all(folder), random_tensors())


# --- the index -------------------------------------------------------------------------------


def test_every_prefix_of_an_index_is_reported(folder: Path) -> None:
    file = folder / "index.json"
    data = file.read_bytes()
    for size in sample(range(len(data)), 9):
        file.write_bytes(data[:size])
        error = error_of_load(folder)
        assert type(error) is CorruptError, size
        assert str(file) in str(error), size


def sealed(body: bytes) -> bytes:
    """Return an index whose own digest is right."""
    head = body[: body.rindex(b',"digest":')]
    return head + b',"digest":"' + document_digest(head).encode() + b'"}\n'


def test_an_index_of_a_newer_version_asks_for_an_upgrade(folder: Path) -> None:
    file = folder / "index.json"
    data = file.read_bytes()
    assert sealed(data) == data
    assert data.count(b'"version":1,') == 1
    file.write_bytes(sealed(data.replace(b'"version":1,', b'"version":2,')))
    calls: list[Callable[[], object]] = [
        lambda: load_all(folder),
        lambda: dc.verify(folder.parent),
        lambda: dc.open(folder.parent),
        lambda: dc.reshard(folder.parent, folder.parent.parent / "new", world_size=1),
    ]
    for call in calls:
        with pytest.raises(IncompatibleError, match=r"version 2.*upgrade dist_ckpt") as caught:
            call()
        assert str(file) in str(caught.value)
    assert not (folder.parent.parent / "new").exists()


def test_an_index_that_was_given_up_is_no_checkpoint(folder: Path) -> None:
    gone = Abandoned(folder.name, "rank 0", "no space")
    (folder / "index.json").write_bytes(index_json.encode(gone))
    error = error_of_load(folder)
    assert type(error) is NotFoundError
    assert "1 abandoned" in str(error)


def test_the_index_of_another_attempt_is_reported(folder: Path) -> None:
    folder.rename(folder.parent / "a2-0123456789abcdef")
    moved = folder.parent / "a2-0123456789abcdef"
    error = error_of_load(moved)
    assert type(error) is CorruptError
    assert f"{moved / 'index.json'} is the index of {folder.name}" in str(error)
    assert not dc.verify(folder.parent).ok


def test_a_damaged_index_is_never_skipped_for_an_older_checkpoint(folder: Path) -> None:
    older = folder.parent / "a1-0123456789abcdef"
    newest = folder.rename(folder.parent / f"a2-{folder.name.partition('-')[2]}")
    data = (newest / "index.json").read_bytes()
    body = data.replace(folder.name.encode(), newest.name.encode())
    shutil.copytree(newest, older)
    (older / "index.json").write_bytes(
        sealed(data.replace(folder.name.encode(), older.name.encode()))
    )
    (newest / "index.json").write_bytes(sealed(body))
    assert values_equal(load_all(newest), random_tensors())
    (newest / "index.json").write_bytes(sealed(body)[:-2])
    error = error_of_load(newest)
    assert type(error) is CorruptError
    assert str(newest) in str(error)


# --- what live tensors see -------------------------------------------------------------------


@pytest.mark.parametrize("name", [*SHARD_FILES, "objects.msgpack", "objects-00003.msgpack"])
@pytest.mark.parametrize("change", ["cut", "header", "missing"])
def test_what_can_be_known_without_reading_data_touches_nothing(
    folder: Path, name: str, change: str
) -> None:
    file = folder / name
    data = bytearray(file.read_bytes())
    file.unlink()
    data[30] ^= 4
    if change != "missing":
        file.write_bytes(data[:-1] if change == "cut" else data)
    state = live_state()
    with pytest.raises(CorruptError) as caught:
        dc.load(state, folder.parent)
    assert caught.value.touched == ()
    assert is_untouched(state)


def live_state() -> dict[str, Any]:
    state: dict[str, Any] = {"model": {}, "optim": {}, "epoch": {"number": -1}, "late": []}
    for fqn, tensor in random_tensors().items():
        component, name = fqn.split(".")
        state[component][name] = torch.full_like(tensor, 7)
    state["model"]["tied"] = state["model"]["bias"]
    state["seen"] = dc.PerRank("mine", on_reshard="drop")
    return state


def is_untouched(state: dict[str, Any]) -> bool:
    tensors = [*state["model"].values(), *state["optim"].values()]
    values = (state["epoch"], state["late"], state["seen"].value)
    return all(bool((t == 7).all()) for t in tensors) and values == ({"number": -1}, [], "mine")


def test_damaged_data_is_found_before_anything_is_touched_with_check_first(made: Path) -> None:
    for name in SHARD_FILES:
        file = made / name
        for _ in flipped(file, [file.stat().st_size - 3]):
            state = live_state()
            with pytest.raises(CorruptError, match="damaged") as caught:
                dc.load(state, made.parent, check_first=True)
            assert caught.value.touched == ()
            assert is_untouched(state)


def test_on_ranks_all_raise_the_same_error_for_damage_that_one_of_them_reads(made: Path) -> None:
    file = made / "optim-00003.safetensors"
    for _ in flipped(file, [file.stat().st_size - 1]):
        states = [rank_state(rank) for rank in range(RANKS)]
        errors = errors_of(try_load_on_threads(lambda _: LocalStorage(), states, str(made.parent)))
        assert {type(error) for error in errors} == {CorruptError}
        assert len({str(error) for error in errors}) == 1
        assert "optim.moment rows 38:40: damaged" in str(errors[0])
        assert f"{file} of rank 3" in str(errors[0])


def test_the_error_lists_what_this_rank_has_filled_though_another_met_the_damage(
    made: Path,
) -> None:
    file = made / "model-00003.safetensors"
    header = header_of(file)
    (first, _) = [shard for shard in header.shards if shard.fqn == "model.strided"]
    for _ in flipped(file, [header.header_nbytes + first.span.start]):
        states: list[dict[str, Any]] = [
            {"model": {"strided": torch.zeros(9, 4)}},
            {"optim": {"moment": torch.zeros(40, 8)}},
        ]
        errors = errors_of(
            try_load_on_threads(lambda _: LocalStorage(), states, str(made.parent), strict=False)
        )
        assert all("model.strided rows 3:4: damaged" in str(error) for error in errors)
        moment = random_tensors()["optim.moment"]
        assert torch.equal(states[1]["optim"]["moment"], moment)
        assert "optim.moment" in errors[1].touched  # type: ignore[attr-defined]


def test_the_error_lists_names_as_the_state_has_them(made: Path) -> None:
    file = made / "model-00003.safetensors"
    header = header_of(file)
    (first, _) = [shard for shard in header.shards if shard.fqn == "model.strided"]
    for _ in flipped(file, [header.header_nbytes + first.span.start]):
        states: list[dict[str, Any]] = [
            {"net": {"strided": torch.zeros(9, 4)}},
            {"adam": {"moment": torch.zeros(40, 8)}},
        ]
        errors = errors_of(
            try_load_on_threads(
                lambda _: LocalStorage(),
                states,
                str(made.parent),
                strict=False,
                rename={"model": "net", "optim": "adam"},
            )
        )
        assert errors[1].touched == ("adam.moment", "net.strided")  # type: ignore[attr-defined]


# --- bytes that are read ---------------------------------------------------------------------

ROWS, COLUMNS = 256, 64  # 256 bytes a row, 4 of them in a block of 1 KiB
BLOCK = 1024


@pytest.fixture(scope="module")
def sharded() -> MemoryStorage:
    """Return a storage with a tensor of which each of four ranks has 64 rows, and others."""
    storage = MemoryStorage()
    whole = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)
    states = [
        {
            "model": {
                "w": dc.LocalShard(
                    whole[64 * r : 64 * r + 64].clone(), (ROWS, COLUMNS), (64 * r, 0)
                ),
                "strided": Boxes(whole, range(r, ROWS, RANKS)),
            },
            "other": {"v": dc.LocalShard(torch.ones(4096), (4 * 4096,), (4096 * r,))},
        }
        for r in range(RANKS)
    ]
    with blocks_of(BLOCK):
        save_on_threads(storage, states)
    return storage


def needed_nbytes(storage: MemoryStorage, fqn: str, wanted: torch.Tensor) -> int:
    """Return the size of the blocks that hold wanted elements of a tensor, all marked in a mask."""
    total = 0
    for path, data in storage.tree().items():
        if not path.endswith(".safetensors") or data is None:
            continue
        size = 8 + int.from_bytes(data[:8], "little")
        header = decode_header(data[:size], nbytes=len(data))
        for shard in (shard for shard in header.shards if shard.fqn == fqn):
            assert isinstance(shard.cell, Region)
            box = tuple(map(slice, shard.cell.offset, shard.cell.stop))
            nbytes = wanted[box].flatten().repeat_interleave(4).to(torch.uint8)
            blocks = nbytes.split(header.block_nbytes)
            total += sum(len(block) for block in blocks if block.any())
    return total


# What each of some ranks wants of `model.w`: rows and columns.
WANTED = {
    "a few rows": [(slice(100, 103), slice(0, 64))],
    "one row of each rank's": [(slice(60, 70), slice(0, 64)), (slice(120, 133), slice(0, 64))],
    "one element": [(slice(77, 78), slice(5, 6))],
    "a column slice": [(slice(0, 256), slice(8, 16))],
    "columns of some rows": [(slice(30, 90), slice(0, 32))],
    "other rows on three ranks": [
        (slice(0, 86), slice(0, 64)),
        (slice(86, 172), slice(0, 64)),
        (slice(172, 256), slice(0, 64)),
    ],
    "columns on two ranks": [(slice(0, 256), slice(0, 32)), (slice(0, 256), slice(32, 64))],
}


@pytest.mark.parametrize("case", WANTED)
def test_a_load_reads_no_more_than_the_blocks_that_it_needs(
    sharded: MemoryStorage, case: str
) -> None:
    boxes = WANTED[case]
    whole = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)
    countings = [Counting(sharded) for _ in boxes]
    states = [
        {
            "model": {
                "w": dc.LocalShard(
                    torch.zeros_like(whole[box]), (ROWS, COLUMNS), (box[0].start, box[1].start)
                )
            }
        }
        for box in boxes
    ]
    outcomes = try_load_on_threads(lambda rank: countings[rank], states, include="model.w")
    for box, state, counting, outcome in zip(boxes, states, countings, outcomes, strict=True):
        assert outcome.value is not None, outcome.error
        held: Any = state["model"]["w"].tensor
        assert torch.equal(held, whole[box])
        mask = torch.zeros(ROWS, COLUMNS, dtype=torch.bool)
        mask[box] = True
        needed = needed_nbytes(sharded, "model.w", mask)
        read = {name: n for name, n in counting.nbytes.items() if name.endswith("safetensors")}
        assert needed <= sum(read.values()) <= 1.05 * needed
        assert outcome.value.nbytes_read == sum(read.values())
        assert all(name.startswith("model") for name in read)


def test_holes_between_needed_blocks_are_not_read(sharded: MemoryStorage) -> None:
    whole = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)
    target = Boxes(torch.zeros_like(whole), range(0, ROWS, 8))  # of every second block
    counting = Counting(sharded)
    load_on_threads(counting, [{"model": {"w": target}}], include="model.w")
    assert torch.equal(torch.cat(target.rows), whole[::8])
    assert sum(counting.nbytes.values()) == ROWS // 8 * BLOCK


def test_a_few_rows_never_cost_a_whole_shard(sharded: MemoryStorage) -> None:
    counting = Counting(sharded)
    state = {"model": {"w": dc.LocalShard(torch.zeros(2, 64), (ROWS, COLUMNS), (63, 0))}}
    load_on_threads(counting, [state], include="model.w")
    assert counting.nbytes == {"model-00000.safetensors": BLOCK, "model-00001.safetensors": BLOCK}


def test_include_opens_only_the_files_that_it_needs(sharded: MemoryStorage) -> None:
    counting = Counting(sharded)
    state: dict[str, Any] = {}
    load_on_threads(counting, [state], include="other")
    assert state == {"other": {"v": state["other"]["v"]}}
    assert sum(counting.nbytes.values()) == 4 * 4096 * 4
    assert {name for name in counting.opened if name.endswith("safetensors")} == {
        f"other-{rank:05d}.safetensors" for rank in range(RANKS)
    }


def test_a_load_of_everything_reads_every_byte_once(sharded: MemoryStorage) -> None:
    counting = Counting(sharded)
    report = load_on_threads(counting, [{}])
    total = 2 * ROWS * COLUMNS * 4 + 4 * 4096 * 4
    assert sum(counting.nbytes.values()) == total == report.nbytes_read


def test_blocks_of_full_size_are_counted_as_well() -> None:
    storage = MemoryStorage()
    shape = (4 * 5120, 512)  # 10 MiB a rank, in blocks of 4 MiB
    parts = [torch.full((5120, 512), float(rank)) for rank in range(RANKS)]
    save_on_threads(
        storage,
        [{"m": {"w": dc.LocalShard(part, shape, (5120 * r, 0))}} for r, part in enumerate(parts)],
    )
    counting = Counting(storage)
    target = torch.zeros(100, 512)
    load_on_threads(counting, [{"m": {"w": dc.LocalShard(target, shape, (5120 + 2000, 0))}}])
    assert bool((target == 1).all())
    # Rows 2000 to 2100 of rank 1's shard lie on both sides of its first block's end, 2048.
    assert counting.nbytes == {"m-00001.safetensors": 8 << 20}
