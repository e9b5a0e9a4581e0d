"""What is staged is what the writer sees, and an arena that is not whole is never taken for one."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from arena_processes import program
from dist_ckpt.async_save.snapshots import arena_layout as layout
from dist_ckpt.async_save.snapshots.arena import Arena, ArenaPool, ArenaReader
from dist_ckpt.async_save.snapshots.arena_layout import Image, Seal, Snapshot, arena_nbytes
from dist_ckpt.async_save.snapshots.job_folder import JobFolder, RankFolder
from dist_ckpt.async_save.snapshots.recovered_snapshots import RecoveredSnapshot, open_recovered
from dist_ckpt.core.planning.plan import FileReceipt
from dist_ckpt.core.runtime import typed_msgpack
from dist_ckpt.errors import ConflictError, CorruptError, IncompatibleError
from long_mode import examples
from recovered_arenas import kept_in

FILES = (Image("model-00000.safetensors", 10_000), Image("objects.msgpack", 0), Image("b", 4096))
SNAPSHOT = Snapshot("0" * 31 + "1", "/run/step-7", 7, 1, 4, FILES, b"details")
SEAL = Seal(
    "a1-7f3c2a9e0b1d4c55", tuple(FileReceipt(one.name, one.nbytes, 0, "f" * 32) for one in FILES)
)


def snapshot(number: int, *sizes: int) -> Snapshot:
    images = tuple(Image(f"f{n}", size) for n, size in enumerate(sizes))
    return Snapshot(f"{number:032x}", f"/run/step-{number}", number, 0, 1, images)


@pytest.fixture
def rank_folder(tmp_path: Path) -> RankFolder:
    return JobFolder("job", roots=[str(tmp_path)]).rank(1)


def arena_for(arenas: ArenaPool, what: Snapshot, number: int = 0) -> Arena:
    return arenas.open_fitting(number, arena_nbytes(what))


def stage(arena: Arena, what: Snapshot) -> None:
    for number, image in enumerate(arena.begin(what)):
        image[:] = bytes([what.step or 0, number] * len(image))[: len(image)]
    arena.complete()


def bytes_of(kept: RecoveredSnapshot) -> list[bytes]:
    found = []
    for number, image in enumerate(kept.snapshot.images):
        target = bytearray(image.nbytes)
        kept.read_into(number, 0, memoryview(target))
        found.append(bytes(target))
    kept.check()
    return found


def steps_in(rank_folder: RankFolder) -> list[tuple[int | None, bool]]:
    with kept_in(rank_folder) as (found, _):
        return [(kept.snapshot.step, kept.is_complete) for kept in found]


# --- staging and following -------------------------------------------------------------------


def test_the_writer_sees_what_is_staged_as_it_comes(arenas):
    arena = arena_for(arenas, SNAPSHOT)
    images = arena.begin(SNAPSHOT)
    writer = ArenaReader(arena.path, "job")
    followed = writer.follow(SNAPSHOT.id)
    assert followed.snapshot == SNAPSHOT
    assert followed.ready == 0
    assert not followed.is_complete
    images[0][:3] = b"abc"
    arena.advance(arena.spans.images[0].start + 3)
    assert followed.ready == followed.spans.images[0].start + 3
    assert bytes(followed.images[0][:3]) == b"abc"
    arena.complete()
    assert followed.is_complete
    assert followed.ready == followed.spans.nbytes
    writer.close()


def test_images_begin_on_pages_and_have_their_sizes(arenas):
    arena = arena_for(arenas, SNAPSHOT)
    images = arena.begin(SNAPSHOT)
    assert [len(image) for image in images] == [10_000, 0, 4096]
    assert all(span.start % 4096 == 0 for span in arena.spans.images)
    assert arena.spans.nbytes == arena.nbytes == arena_nbytes(SNAPSHOT)


def test_what_was_sealed_is_found_with_its_bytes_and_digests(arenas, rank_folder):
    arena = arena_for(arenas, SNAPSHOT)
    stage(arena, SNAPSHOT)
    writer = ArenaReader(arena.path, "job")
    followed = writer.follow(SNAPSHOT.id)
    followed.images[0][:6] = b"header"
    followed.seal(SEAL)
    writer.close()
    arenas.close()
    with kept_in(rank_folder) as ((kept,), problems):
        assert problems == []
        assert (kept.snapshot, kept.seal, kept.is_complete) == (SNAPSHOT, SEAL, True)
        first, second, third = bytes_of(kept)
    assert (first[:10], second, third) == (b"header\7\0\7\0", b"", b"\7\2" * 2048)


def test_a_seal_is_of_one_snapshot_only(arenas, rank_folder):
    arena = arena_for(arenas, SNAPSHOT)
    stage(arena, SNAPSHOT)
    writer = ArenaReader(arena.path, "job")
    writer.follow(SNAPSHOT.id).seal(SEAL)
    stage(arena, replace(SNAPSHOT, id="2" * 32, step=8))
    writer.close()
    with kept_in(rank_folder) as ((kept,), _):
        assert (kept.snapshot.step, kept.is_complete, kept.seal) == (8, True, None)


def test_a_seal_of_as_many_files_as_there_may_be_fits(arenas):
    files = tuple(Image(f"{n:05d}".ljust(96, "x"), 0) for n in range(layout.MAX_IMAGES))
    many = replace(SNAPSHOT, images=files)
    arena = arena_for(arenas, many)
    stage(arena, many)
    writer = ArenaReader(arena.path, "job")
    big = tuple(FileReceipt(one.name, 2**63, 2**40, "f" * 32) for one in files)
    writer.follow(many.id).seal(Seal("a999999999-7f3c2a9e0b1d4c55", big))
    writer.close()


def test_a_writer_that_is_late_is_told_that_its_snapshot_is_gone(arenas):
    arena = arena_for(arenas, SNAPSHOT)
    stage(arena, SNAPSHOT)
    writer = ArenaReader(arena.path, "job")
    followed = writer.follow(SNAPSHOT.id)
    arena.begin(replace(SNAPSHOT, id="2" * 32))
    for late in (lambda: followed.ready, lambda: followed.is_complete, lambda: followed.seal(SEAL)):
        with pytest.raises(ConflictError, match="was overwritten in memory"):
            late()
    with pytest.raises(ConflictError, match=f"has snapshot {'2' * 32}"):
        writer.follow(SNAPSHOT.id)
    assert writer.follow("2" * 32).ready == 0
    writer.close()


def test_an_arena_grows_under_a_writer_that_has_it_mapped(arenas):
    small, large = snapshot(1, 5000), snapshot(2, 50_000, 1 << 20)
    arena = arena_for(arenas, small)
    stage(arena, small)
    writer = ArenaReader(arena.path, "job")
    old = writer.follow(small.id)
    assert arena_for(arenas, large) is arena
    assert bytes(old.images[0]) == b"\1\0" * 2500
    assert old.is_complete
    stage(arena, large)
    new = writer.follow(large.id)
    assert bytes(new.images[1]) == b"\2\1" * (1 << 19)
    assert bytes(old.images[0][:2]) == b"\2\0"  # the same memory, and no crash
    writer.close()


def test_an_arena_that_is_large_enough_is_used_again(arenas, rank_folder):
    arena = arena_for(arenas, snapshot(1, 50_000))
    before = os.stat(rank_folder.arena_path(0)).st_ino
    assert arena_for(arenas, snapshot(2, 10)) is arena
    assert arena.nbytes == arena_nbytes(snapshot(1, 50_000))
    arenas.close()
    again = ArenaPool(rank_folder)
    again.open_fitting(0, 10)
    assert os.stat(rank_folder.arena_path(0)).st_ino == before
    again.close()


def test_what_an_earlier_run_left_stays_until_it_is_staged_into(arenas, rank_folder):
    stage(arena_for(arenas, SNAPSHOT), SNAPSHOT)
    arenas.close()
    later = ArenaPool(rank_folder)
    arena = later.open_fitting(0, 1 << 20)
    assert steps_in(rank_folder) == [(7, True)]
    stage(arena, snapshot(9, 5))
    assert steps_in(rank_folder) == [(9, True)]
    later.close()


def test_all_memory_of_an_arena_is_there_before_it_is_used(arenas, rank_folder):
    arenas.open_fitting(0, 3 << 20)
    status = os.stat(rank_folder.arena_path(0))
    assert status.st_size == 3 << 20
    assert status.st_blocks * 512 >= status.st_size
    assert status.st_mode & 0o777 == 0o600


# --- torn ------------------------------------------------------------------------------------

TEAR = """
rank = JobFolder("job", roots=[args[0]]).rank(1)
lock = rank.lock("trainer")
arenas = ArenaPool(rank)
for step, number in ((6, 0), (7, 1), (8, 0)):
    images = tuple(Image(f"f{n}", 1 << 20) for n in range(3))
    what = Snapshot(f"{step:032x}", "/run", step, 0, 1, images)
    arena = arenas.open_fitting(number, arena_nbytes(what))
    for n, image in enumerate(arena.begin(what)):
        image[:] = bytes([step]) * len(image)
        if step == 8 and n == int(args[1]):
            say("staging")
            wait()
        arena.advance(arena.spans.images[n].stop)
    arena.complete()
"""


@pytest.mark.multi_process
@pytest.mark.parametrize("files", [0, 1, 2])
def test_a_kill_while_staging_leaves_what_is_torn_and_the_older_one(tmp_path, rank_folder, files):
    with program(TEAR, tmp_path, files) as trainer:
        assert trainer.hear() == "staging"
        trainer.kill()
    assert rank_folder.owner("trainer") is None
    assert steps_in(rank_folder) == [(8, False), (7, True)]
    with kept_in(rank_folder) as ((_, kept), problems):
        assert problems == []
        assert bytes_of(kept) == [b"\7" * (1 << 20)] * 3
    arenas = ArenaPool(rank_folder)
    stage(arenas.open_fitting(0, 5 << 20), snapshot(9, 100))
    assert steps_in(rank_folder) == [(9, True), (7, True)]
    arenas.close()


RACE = """
rank = JobFolder("job", roots=[args[0]]).rank(1)
lock = rank.lock("trainer")
arenas = ArenaPool(rank)
sizes = (100_000, 5, 300_000)
step = 0
while True:
    step += 1
    images = tuple(Image(f"f{n}", size) for n, size in enumerate(sizes))
    what = Snapshot(f"{step:032x}", "/run", step, 0, 1, images)
    arena = arenas.open_fitting(step % 2, arena_nbytes(what))
    for n, image in enumerate(arena.begin(what)):
        image[:] = (step % 251).to_bytes(1, "big") * len(image)
        arena.advance(arena.spans.images[n].stop)
    arena.complete()
    if step == 3:
        say("three")
"""


@pytest.mark.multi_process
@pytest.mark.parametrize("reads", [1, 7, 40, 100])
def test_a_kill_at_any_moment_leaves_at_least_one_whole_snapshot(tmp_path, rank_folder, reads):
    with program(RACE, tmp_path) as trainer:
        assert trainer.hear() == "three"
        for _ in range(reads):  # a reader beside it is never given a mixture either
            with suppress(CorruptError), kept_in(rank_folder) as (found, _):
                for kept in (kept for kept in found if kept.is_complete):
                    check_whole(kept)
        trainer.kill()
    with kept_in(rank_folder) as (found, _):
        whole = [kept for kept in found if kept.is_complete]
        for kept in whole:
            check_whole(kept)
        steps = sorted(kept.snapshot.step or 0 for kept in whole)
        assert whole
        assert steps[-1] - steps[0] == len(steps) - 1


def check_whole(kept: RecoveredSnapshot) -> None:
    byte = ((kept.snapshot.step or 0) % 251).to_bytes(1, "big")
    assert bytes_of(kept) == [byte * image.nbytes for image in kept.snapshot.images]


FOLLOW = """
writer = ArenaReader(args[0], "job")
say("open")
for number in range(1, int(args[1]) + 1):
    wait()
    followed = writer.follow(f"{number:032x}")
    spans, done = followed.spans.images, 0
    while done < len(spans):
        ready = followed.ready
        while done < len(spans) and spans[done].stop <= ready:
            image = followed.images[done]
            assert bytes(image) == bytes([number % 251, done % 251] * len(image))[: len(image)]
            done += 1
    while not followed.is_complete:
        pass
    followed.seal(Seal(f"attempt {number}", ()))
    say("sealed", number)
"""


@pytest.mark.multi_process
def test_a_writer_that_follows_never_sees_a_byte_before_it_is_staged(arenas, rank_folder):
    rounds, sizes = 30, [3000] * 100 + [200_000]
    arena = arena_for(arenas, snapshot(1, *sizes))
    arena.begin(snapshot(1000, *sizes))
    with program(FOLLOW, arena.path, rounds) as writer:
        assert writer.hear() == "open"
        for number in range(1, rounds + 1):
            images = arena.begin(snapshot(number, *sizes))
            writer.tell()
            for n, image in enumerate(images):
                image[:] = bytes([number % 251, n % 251] * len(image))[: len(image)]
                arena.advance(arena.spans.images[n].stop)
            arena.complete()
            assert writer.hear() == f"sealed {number}"
    with kept_in(rank_folder) as ((kept,), _):
        assert kept.seal == Seal(f"attempt {rounds}", ())


# --- hostile and foreign ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """Return the path of a sealed arena, and its bytes."""
    folder = JobFolder("job", roots=[str(tmp_path_factory.mktemp("sealed"))]).rank(0)
    arenas = ArenaPool(folder)
    arena = arena_for(arenas, SNAPSHOT)
    stage(arena, SNAPSHOT)
    writer = ArenaReader(arena.path, "job")
    writer.follow(SNAPSHOT.id).seal(SEAL)
    writer.close()
    arenas.close()
    path = Path(arena.path)
    return path, path.read_bytes()


def damaged(sealed: tuple[Path, bytes], data: bytes | bytearray) -> str:
    path = sealed[0].with_name("damaged")
    path.write_bytes(data)
    return str(path)


def check_that_nothing_else_is_believed(path: str) -> None:
    """Whatever the bytes are: the snapshot that was staged, or a clear error, by all readers."""
    try:
        kept = open_recovered(path, "job")
    except (CorruptError, IncompatibleError):
        pass
    else:
        if kept is not None:
            assert kept.snapshot == SNAPSHOT or not kept.is_complete
            assert kept.seal in (None, SEAL)
            kept.close()
    try:
        writer = ArenaReader(path, "job")
    except (CorruptError, IncompatibleError):
        return
    try:
        followed = writer.follow(SNAPSHOT.id)
    except (CorruptError, ConflictError):
        pass
    else:
        assert followed.snapshot == SNAPSHOT
    finally:
        writer.close()


@examples()
@given(data=st.data())
def test_no_flipped_bit_makes_another_snapshot(sealed, data):
    spans = layout.compute_spans(SNAPSHOT, len(typed_msgpack.encode(SNAPSHOT)))
    used = (*range(260), *range(4096, spans.document.stop), *range(*_bounds(spans.seal)))
    place = data.draw(st.sampled_from(used))
    bit = data.draw(st.integers(0, 7))
    raw = bytearray(sealed[1])
    raw[place] ^= 1 << bit
    check_that_nothing_else_is_believed(damaged(sealed, raw))


def _bounds(span):
    return span.start, span.stop


@examples()
@given(st.integers(0, 260), st.binary(max_size=64))
def test_no_bytes_written_over_the_header_crash_a_reader(sealed, start, data):
    raw = bytearray(sealed[1])
    raw[start : start + len(data)] = data
    check_that_nothing_else_is_believed(damaged(sealed, raw))


@pytest.mark.parametrize("nbytes", [0, 1, 40, 4095, 4096, 4097, 8192, 12288, 16384, 20480])
def test_an_arena_that_was_cut_short_is_not_read_beyond_its_end(sealed, nbytes):
    path = damaged(sealed, sealed[1][:nbytes])
    with pytest.raises(CorruptError):
        open_recovered(path, "job")
    check_that_nothing_else_is_believed(path)


def test_an_arena_that_is_cut_short_while_it_is_read_is_an_error(sealed):
    path = damaged(sealed, sealed[1])
    kept = open_recovered(path, "job")
    assert kept is not None
    os.truncate(path, 16384)
    with pytest.raises(CorruptError, match="truncated"):
        bytes_of(kept)
    kept.close()


@pytest.mark.parametrize(
    ("nbytes", "images"),
    [(2**63, ()), (100, ()), (None, (Image("x", 1 << 50),)), (None, (Image("x", (1 << 64) - 1),))],
)
def test_sizes_that_nobody_can_have_are_refused(sealed, nbytes, images):
    raw = bytearray(sealed[1])
    document = typed_msgpack.encode(SNAPSHOT)
    if images:
        document = typed_msgpack.encode(replace(SNAPSHOT, images=images))
        raw[4096 : 4096 + len(document)] = document
    record = layout.make_record(2, document)
    record = record._replace(nbytes=nbytes or record.nbytes)
    raw[128 : 128 + layout.RECORD_NBYTES] = layout.encode_record(record)
    with pytest.raises(CorruptError):
        open_recovered(damaged(sealed, raw), "job")


def test_a_document_that_is_nonsense_but_has_its_digest_is_refused(sealed):
    for document in (b"", b"\xc1", b"\x90", b"\x91" * 5000, typed_msgpack.encode(SEAL)):
        raw = bytearray(sealed[1])
        raw[4096 : 4096 + len(document)] = document
        record = layout.encode_record(layout.make_record(2, document))
        raw[128 : 128 + len(record)] = record
        with pytest.raises(CorruptError):
            open_recovered(damaged(sealed, raw), "job")


def test_a_kill_before_the_first_byte_leaves_a_torn_arena(sealed):
    raw = bytearray(sealed[1])
    raw[64] += 1
    with pytest.raises(CorruptError, match="its staging was not finished"):
        open_recovered(damaged(sealed, raw), "job")


@given(st.binary())
def test_no_bytes_crash_who_decodes_a_document(data):
    for kind in (Snapshot, Seal):
        with suppress(ValueError):
            typed_msgpack.decode(data, kind)


def test_a_link_to_an_arena_is_not_followed(sealed, rank_folder):
    os.symlink(sealed[0], rank_folder.arena_path(0))
    for reader in (open_recovered, ArenaReader):
        with pytest.raises(CorruptError, match="cannot be opened"):
            reader(rank_folder.arena_path(0), "job")


def test_another_jobs_arena_is_not_read_and_not_staged_into(sealed):
    path = str(sealed[0])
    for reader in (open_recovered, ArenaReader):
        with pytest.raises(CorruptError, match="another job than 'other'"):
            reader(path, "other")
    with pytest.raises(CorruptError, match="another job"):
        Arena(path, os.open(path, os.O_RDWR), "other")
    assert sealed[0].read_bytes() == sealed[1]


def test_another_versions_arena_is_not_read(sealed):
    raw = bytearray(sealed[1])
    raw[16] += 1
    with pytest.raises(IncompatibleError, match="arena version 4, and this dist_ckpt reads 3"):
        open_recovered(damaged(sealed, raw), "job")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda p: os.symlink("/dev/zero", p)])
def test_what_is_no_file_is_not_opened_and_not_waited_for(rank_folder, make):
    make(rank_folder.arena_path(0))
    with pytest.raises(CorruptError):
        open_recovered(rank_folder.arena_path(0), "job")
    with kept_in(rank_folder) as (found, problems):
        assert (found, len(problems)) == ([], 1)


def test_what_is_wrong_with_one_arena_hides_no_other(arenas, rank_folder):
    Path(rank_folder.arena_path(0)).write_bytes(b"x" * 5000)
    stage(arena_for(arenas, SNAPSHOT, 1), SNAPSHOT)
    with kept_in(rank_folder) as ((kept,), (problem,)):
        assert kept.snapshot == SNAPSHOT
        assert problem == f"{rank_folder.arena_path(0)} is not an arena: it is left unchanged"


@pytest.mark.parametrize("data", [b"x" * 5000, b"short", b""])
def test_garbage_in_the_place_of_an_own_arena_is_replaced(arenas, rank_folder, data):
    Path(rank_folder.arena_path(0)).write_bytes(data)
    stage(arena_for(arenas, SNAPSHOT), SNAPSHOT)
    assert steps_in(rank_folder) == [(7, True)]


def test_a_sequence_at_its_end_is_not_counted_on_from(sealed, rank_folder):
    raw = bytearray(sealed[1])
    raw[64:72] = b"\xff" * 8
    Path(rank_folder.arena_path(0)).write_bytes(raw)
    arenas = ArenaPool(rank_folder)
    stage(arena_for(arenas, SNAPSHOT), SNAPSHOT)
    assert steps_in(rank_folder) == [(7, True)]
    arenas.close()


def test_an_arena_in_which_nothing_was_staged_yet_is_empty(arenas, rank_folder):
    arena = arenas.open_fitting(0, 10_000)
    assert open_recovered(arena.path, "job") is None
    assert steps_in(rank_folder) == []
    writer = ArenaReader(arena.path, "job")
    with pytest.raises(CorruptError, match="has no snapshot"):
        writer.follow("0" * 32)
    writer.close()


@pytest.mark.parametrize(
    "change",
    [
        {"id": "x"},
        {"path": ""},
        {"step": -1},
        {"rank": 4},
        {"rank": -1},
        {"images": (Image("a", 1), Image("a", 2))},
        {"images": (Image("a/b", 1),)},
        {"images": (Image("", 1),)},
        {"images": (Image("x" * 97, 1),)},
        {"images": (Image("x", -1),)},
    ],
)
def test_a_snapshot_that_makes_no_sense_cannot_be_made(change):
    with pytest.raises(ValueError, match="invalid snapshot"):
        replace(SNAPSHOT, **change)


@given(
    st.builds(
        Snapshot,
        id=st.from_regex(r"[0-9a-f]{32}", fullmatch=True),
        path=st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
        step=st.none() | st.integers(0, 2**62),
        rank=st.just(0),
        world_size=st.integers(1, 2**31),
        images=st.integers(0, 5).map(lambda n: tuple(Image(f"f{i}", i * 5) for i in range(n))),
        details=st.binary(),
    )
)
def test_what_a_document_says_is_what_was_put_into_it(what):
    assert typed_msgpack.decode(typed_msgpack.encode(what), Snapshot) == what


# --- leaks -----------------------------------------------------------------------------------


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_nbytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as text:
        return int(text.read().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="this system does not count them")
def test_a_thousand_snapshots_leave_nothing_behind(arenas, rank_folder):
    sizes = (1 << 20, 5000)
    writers: dict[int, ArenaReader] = {}

    def save(number: int) -> None:
        what = snapshot(number, *sizes)
        arena = arena_for(arenas, what, number % 2)
        arena.begin(what)[1][:] = b"x" * 5000
        arena.complete()
        if number % 2 not in writers:
            writers[number % 2] = ArenaReader(arena.path, "job")
        writers[number % 2].follow(what.id).seal(Seal("a", ()))
        with kept_in(rank_folder) as (found, _):
            assert number in [kept.snapshot.step for kept in found]

    def reopening(number: int) -> None:
        for writer in writers.values():
            writer.close()
        writers.clear()
        save(number)

    for number in range(20):
        save(number)
    before = open_descriptors(), sorted(os.listdir(rank_folder.path))
    resident = resident_nbytes()
    for number in range(20, 1020):
        (save if number % 10 else reopening)(number)
    save(0)
    save(1)
    assert (open_descriptors(), sorted(os.listdir(rank_folder.path))) == before
    assert resident_nbytes() - resident < 8 << 20
    for writer in writers.values():
        writer.close()


def test_closing_lets_go_of_all(arenas, rank_folder):
    before = open_descriptors()
    stage(arena_for(arenas, SNAPSHOT), SNAPSHOT)
    arenas.close()
    arenas.close()
    assert open_descriptors() == before
    assert steps_in(rank_folder) == [(7, True)]


FORKED = """
ArenaPool._allocate = lambda arenas, number, nbytes: ("here", create_anonymous(nbytes))
arena = ArenaPool(JobFolder("job", roots=[args[0]]).rank(1)).open_fitting(0, 1 << 20)
arena.memory[5000] = 7
def held():
    return [n for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")]
def shares():
    fds = [os.readlink(f"/proc/self/fd/{n}") for n in held()]
    return any("memfd:dist_ckpt" in text for text in (open("/proc/self/maps").read(), str(fds)))
if os.fork() == 0:
    view = arena.memory
    found = shares(), view[5000]
    view[5000] = 8  # it is the child's own by now
    new = bytearray(1 << 20)
    arena.close()
    del arena, view
    say(*found, new == bytes(1 << 20))
    os._exit(0)
os.wait()
say(shares(), arena.memory[5000])
"""


@pytest.mark.multi_process
def test_a_forked_child_keeps_none_of_an_arena_and_what_it_does_to_it_is_its_own(tmp_path):
    with program(
        "from dist_ckpt.core.runtime.host_memory import create_anonymous\n" + FORKED, tmp_path
    ) as one:
        assert one.hear() == "False 0 True"
        assert one.hear() == "True 7"
