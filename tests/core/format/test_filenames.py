import pytest

from dist_ckpt.core.format import filenames
from dist_ckpt.core.format.filenames import Attempt

ATTEMPT = Attempt(12, "7f3c2a9e0b1d4c55")

# Names that other tools, users and attackers leave behind.
FOREIGN = [
    *("", ".", "..", "../x", "a/b", "a\\b", "/etc/passwd", "C:x", "%2e%2e%2f", "-x", ".x"),
    *("index.json\n", "index.json.bak", "Index.json", "index.json/", "INDEX.JSON", "claim.json~"),
    *(
        "objects.msgpack.1",
        "objects-1.msgpack",
        "objects-00001.MSGPACK",
        "objects.pkl",
        ".metadata",
    ),
    *("model.safetensors", "model-1.safetensors", "Model-00001.safetensors", "model-00001.pt"),
    *("model-00001.safetensors.tmp", "1model-00001.safetensors", "mo-del-00001.safetensors"),
    *(
        "model-0000000001.safetensors",
        "model-0000x.safetensors",
        "model-\u0660\u0660\u0660\u0660\u0661.safetensors",
    ),
    *("attached.", "attached..a", "attached.-a", "attached.a/b", "attached.a\n"),
    *("attached." + "a" * 101, "Attached.a", "attached.a b", "attached.\u00e9"),
    *("m" * 33 + "-00001.safetensors", "model-00001.safetensors\0", "mödel-00001.safetensors"),
]


def test_an_attempts_name_says_its_number_and_id():
    assert ATTEMPT.name == str(ATTEMPT) == "a12-7f3c2a9e0b1d4c55"
    assert filenames.parse_attempt(ATTEMPT.name) == ATTEMPT


def test_the_higher_number_is_the_higher_attempt_then_the_higher_id():
    ordered = [Attempt(2, "f" * 16), Attempt(10, "0" * 16), Attempt(10, "1" * 16)]
    assert sorted([ordered[2], ordered[1], ordered[0]]) == ordered


@pytest.mark.parametrize(
    "name",
    [
        *("a0-7f3c2a9e0b1d4c55", "a01-7f3c2a9e0b1d4c55", "a-7f3c2a9e0b1d4c55", "a1-7f3c", "a1"),
        *(
            "A1-7f3c2a9e0b1d4c55",
            "a1-7F3C2A9E0B1D4C55",
            "a1-7f3c2a9e0b1d4c55x",
            "xa1-7f3c2a9e0b1d4c55",
        ),
        *("a1-7f3c2a9e0b1d4c55\n", "a1000000000-7f3c2a9e0b1d4c55", "a\u0661-7f3c2a9e0b1d4c55"),
        *(".trash-a1-7f3c2a9e0b1d4c55", *FOREIGN),
    ],
)
def test_another_folders_name_is_no_attempt(name):
    assert filenames.parse_attempt(name) is None


def test_an_attempt_that_is_being_removed_is_trash_and_no_attempt():
    name = filenames.trash_name(ATTEMPT)
    assert name == ".trash-a12-7f3c2a9e0b1d4c55"
    assert filenames.parse_trash(name)
    assert filenames.parse_attempt(name) is None
    assert not filenames.parse_trash(".trash-")
    assert not filenames.parse_trash(".trash-mine")


def test_shard_files_are_named_by_component_and_rank():
    assert filenames.shard_file("model", 3) == "model-00003.safetensors"
    assert filenames.shard_file("c00", 1_000_000) == "c00-1000000.safetensors"
    assert filenames.objects_file(7) == "objects-00007.msgpack"
    for rank in (0, 99_999, 100_000, 999_999_999):
        assert filenames.parse_shard_file(filenames.shard_file("optim_1", rank)) == (
            "optim_1",
            rank,
        )


@pytest.mark.parametrize(
    "name",
    [
        *("index.json", "claim.json", "objects.msgpack", "objects-00003.msgpack"),
        *("model-00000.safetensors", filenames.temporary_name("index", "0123456789abcdef")),
        *("attached.a", "attached.training_report.json", "attached.index.json"),
    ],
)
def test_what_a_save_writes_may_stand_in_an_attempt(name):
    assert filenames.is_in_attempt(name)


@pytest.mark.parametrize("name", FOREIGN)
def test_nothing_else_is_ours(name):
    assert not filenames.is_in_attempt(name)
    assert filenames.parse_shard_file(name) is None
    assert not filenames.is_stem(name)


def test_a_component_names_its_files_only_if_every_system_takes_the_name():
    assert all(map(filenames.is_stem, ("model", "optim_2", "a", "a" * 32)))
    assert not any(map(filenames.is_stem, ("Model", "2nd", "a.b", "a-b", "a" * 33, "a\n", "")))


def test_requests_and_answers_are_named_by_their_id():
    assert filenames.request_file(ATTEMPT.id) == f"request-{ATTEMPT.id}.json"
    assert filenames.parse_request(f"request-{ATTEMPT.id}.json") == ("request", ATTEMPT.id)
    name = filenames.answer_file(ATTEMPT.id)
    assert filenames.parse_request(name) == ("answer", ATTEMPT.id)
    for other in ("request-1.json", f"wish-{ATTEMPT.id}.json", f"{name}\n", f".{name}", "1.json"):
        assert filenames.parse_request(other) is None
