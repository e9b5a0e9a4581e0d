"""Wrong arguments, wrong states and wrong places: the right error, and nothing has changed.

Each message names the thing and ends with what to do next; neither a file nor a live tensor is
other than before.
"""

from __future__ import annotations

import collections
import enum
import json
import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fork_server import forked_python

pytest.importorskip("torch")
pytest.importorskip("numpy")

import numpy as np
import torch

import dist_ckpt as dc
from dist_ckpt.errors import UnequalReplicasError
from dist_ckpt.testing.memory_storage import MemoryStorage
from ranks import errors_of, save_on_threads, try_save_on_threads

# The verbs that the last part of a message, its remedy, has one of.
RESTORE_REMEDY = re.compile(
    r"\b(give|pass|use|choose|convert|store|make|rename|break|flatten|wrap|put|add|check|correct|mend|"
    r"load|map|free|raise|upgrade|save|see|exclude|materialize|run|take)\b",
    re.IGNORECASE,
)


def listing(folder: Path) -> dict[str, bytes | None]:
    """Return everything below a folder, with its content."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder, the current one, with a checkpoint, a file and somebody else's folder."""
    dc.save({"model": {"w": torch.arange(6.0).reshape(2, 3)}, "lr": 0.5}, tmp_path / "good", step=1)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("mine")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(
    place: Path, call: Callable[[], object], error: type[Exception], *facts: str
) -> Exception:
    """Check that a call raises this error with these facts and a remedy, and changes no file."""
    before = listing(place)
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error, repr(caught.value)
    message = str(caught.value)
    for fact in facts:
        assert fact in message, message
    remedy = re.split(r"[:;,.\n]\s", message.rstrip("."), maxsplit=1)[-1]
    assert RESTORE_REMEDY.search(remedy), message
    assert listing(place) == before
    return caught.value


def live() -> dict[str, Any]:
    return {"model": {"w": torch.full((2, 3), 7.0)}, "lr": 7}


def is_untouched(state: Mapping[str, Any]) -> bool:
    return bool((state["model"]["w"] == 7).all()) and state["lr"] == 7


W = {"w": torch.ones(2)}


# --- arguments -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "error"),
    [
        (True, TypeError),
        (1.5, TypeError),
        ("7", TypeError),
        (np.int64(3), TypeError),
        (-1, ValueError),
        (2**63, ValueError),
    ],
)
def test_a_wrong_step_is_refused(place: Path, step: Any, error: type[Exception]) -> None:
    refused(place, lambda: dc.save(W, "new", step=step), error, f"step={step!r}")


DOORS: dict[str, Callable[[Any], object]] = {
    "save": lambda path: dc.save(W, path),
    "overwrite": lambda path: dc.save(W, path, overwrite=True),
    "load": lambda path: dc.load({}, path),
    "open": dc.open,
    "verify": dc.verify,
    "quick": lambda path: dc.verify(path, level="quick"),
    "delete": dc.delete,
    "source": lambda path: dc.reshard(path, "new", world_size=1),
    "target": lambda path: dc.reshard("good", path, world_size=1),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("path", "error", "fact"),
    [
        (3, TypeError, "path is a int"),
        (None, TypeError, "path is a NoneType"),
        (b"ck", TypeError, "path is a bytes"),
        ({"ck"}, TypeError, "path is a set"),
        ("", ValueError, "path is ''"),
        ("a\0b", ValueError, r"path is 'a\x00b'"),
        ("s3://bucket/ck", ValueError, "path begins with s3://"),
        ("file:///tmp/ck", ValueError, "path begins with file://"),
        ("x" * 300, dc.StorageError, "xxx: File name too long"),
    ],
)
def test_what_is_no_path_is_refused(
    place: Path, door: str, path: Any, error: type[Exception], fact: str
) -> None:
    refused(place, lambda: DOORS[door](path), error, fact)


def test_credentials_in_a_path_are_not_repeated(place: Path) -> None:
    error = refused(place, lambda: dc.save(W, "http://me:secret@host/ck"), ValueError, "http://")
    assert "secret" not in str(error)


@pytest.mark.parametrize(
    ("options", "error", "fact"),
    [
        ({"overwrite": 1}, TypeError, "overwrite=1"),
        ({"overwrite": "yes"}, TypeError, "overwrite='yes'"),
        ({"metadata": [1]}, TypeError, "metadata is a list"),
        ({"metadata": {"a": print}}, TypeError, "metadata['a']"),
        ({"metadata": {1.5: 1}}, TypeError, "metadata has the key 1.5"),
        ({"sharding": {"dp": 1}}, TypeError, "sharding is a dict"),
        ({"sharding": dc.ShardingConfig(mesh={"dp": 2})}, ValueError, "2 ranks"),
        ({"group": 3}, ValueError, "group= is given"),
    ],
)
def test_wrong_options_of_save_are_refused(
    place: Path, options: dict[str, Any], error: type[Exception], fact: str
) -> None:
    refused(place, lambda: dc.save(W, "new", **options), error, fact)


@pytest.mark.parametrize(
    ("options", "error", "fact"),
    [
        ({"include": []}, ValueError, "include=[]"),
        ({"include": ""}, ValueError, "include has an empty pattern"),
        ({"include": 3}, TypeError, "include=3"),
        ({"include": [3]}, TypeError, "include has 3"),
        ({"include": "nothing"}, dc.IncompatibleError, "include: 'nothing' matches no name"),
        ({"exclude": "nothing"}, dc.IncompatibleError, "exclude: 'nothing' matches no name"),
        ({"include_frozen": 1}, TypeError, "include_frozen=1: give True or False"),
        ({"exclude": [""]}, ValueError, "exclude has an empty pattern"),
        ({"exclude": 5}, TypeError, "exclude=5"),
        ({"rename": 3}, TypeError, "rename=3"),
        ({"rename": {"a": 3}}, TypeError, "rename has 'a': 3"),
        ({"rename": {"a*": "b"}}, ValueError, "rename has 'a*': 'b'"),
        ({"rename": {"nothing": "x"}}, dc.IncompatibleError, "'nothing' matches no saved name"),
        ({"strict": 1}, TypeError, "strict=1"),
        ({"verify": "no"}, TypeError, "verify='no'"),
        ({"check_first": None}, TypeError, "check_first=None"),
        ({"sharding": 3}, TypeError, "sharding is a int"),
        ({"sharding": dc.ShardingConfig(mesh={"dp": 2})}, ValueError, "2 ranks"),
        ({"group": "world"}, ValueError, "group= is given"),
    ],
)
def test_wrong_options_of_load_are_refused(
    place: Path, options: dict[str, Any], error: type[Exception], fact: str
) -> None:
    state = live()
    refused(place, lambda: dc.load(state, "good", **options), error, fact)
    assert is_untouched(state)


@pytest.mark.parametrize("level", ["deep", "", 1, None])
def test_a_wrong_level_of_verify_is_refused(place: Path, level: Any) -> None:
    refused(place, lambda: dc.verify("good", level=level), ValueError, f"level={level!r}")


@pytest.mark.parametrize(
    ("options", "error", "fact"),
    [
        ({}, ValueError, "either sharding= or world_size="),
        ({"world_size": 1, "sharding": dc.ShardingConfig(mesh={"a": 1})}, ValueError, "either"),
        ({"world_size": 0}, ValueError, "world_size=0"),
        ({"world_size": True}, ValueError, "world_size=True"),
        ({"world_size": 1.5}, ValueError, "world_size=1.5"),
        ({"world_size": 10**7}, ValueError, "world_size=10000000"),
        ({"sharding": 3}, TypeError, "sharding is a int"),
        ({"world_size": 1, "max_memory": 1}, ValueError, "max_memory=1"),
        ({"world_size": 1, "max_memory": "1"}, ValueError, "max_memory='1'"),
    ],
)
def test_wrong_options_of_reshard_are_refused(
    place: Path, options: dict[str, Any], error: type[Exception], fact: str
) -> None:
    refused(place, lambda: dc.reshard("good", "new", **options), error, fact)


@pytest.mark.parametrize("target", ["good", "./good", "good/inside", "mine/../good"])
def test_reshard_into_its_source_is_refused(place: Path, target: str) -> None:
    refused(place, lambda: dc.reshard("good", target, world_size=1), ValueError, "source")


# --- states ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "state", [[], None, "state", (), torch.ones(2), torch.nn.Linear(2, 2)], ids=repr
)
def test_a_state_that_is_no_mapping_is_refused(place: Path, state: Any) -> None:
    name = type(state).__name__
    refused(place, lambda: dc.save(state, "new"), TypeError, f"the state is a {name}")
    refused(place, lambda: dc.load(state, "good"), TypeError, f"the state is a {name}")


def test_a_state_that_cannot_be_changed_is_refused_by_load(place: Path) -> None:
    state: Any = types.MappingProxyType({"model": None})
    refused(place, lambda: dc.load(state, "good"), TypeError, "read-only")


@pytest.mark.parametrize(
    ("key", "error"),
    [
        (1.5, TypeError),
        (None, TypeError),
        ((1, 2), TypeError),
        (True, TypeError),
        (b"w", TypeError),
        ("", ValueError),
        ("\ud800", ValueError),
        (1 << 64, ValueError),
        (-(1 << 63) - 1, ValueError),
        (1 << 20_000, ValueError),
    ],
    ids=lambda value: repr(value) if type(value) is not int else hex(value)[:20],
)
def test_a_key_that_is_neither_str_nor_int_is_refused(
    place: Path, key: Any, error: type[Exception]
) -> None:
    for state in ({key: torch.ones(1)}, {"model": {key: torch.ones(1)}}):
        refused(place, lambda state=state: dc.save(state, "new"), error, "key")  # type: ignore[misc]
        refused(place, lambda state=state: dc.load(state, "good"), error, "key")  # type: ignore[misc]


def same_names() -> dict[str, tuple[str, dict[Any, Any]]]:
    one, two = torch.ones(1), torch.zeros(1)
    return {
        "dots": ("a.b", {"a.b": one, "a": {"b": two}}),
        "int and str": ("1", {1: one, "1": two}),
        "values": ("a.b", {"a.b": 1, "a": {"b": 2, "w": one}}),
        "deep": ("a.b.c", {"a": {"b.c": one, "b": {"c": two}}}),
        "containers": ("a.b", {"a.b": {"x": one}, "a": {"b": {"y": two}}}),
        "a list's number": ("a.0", {"a": [one], "a.0": two}),
    }


@pytest.mark.parametrize("case", same_names())
def test_names_that_collide_are_refused(place: Path, case: str) -> None:
    name, state = same_names()[case]
    what = f"{name}: two paths of the state have this name"
    refused(place, lambda: dc.save(state, "new"), ValueError, what)
    refused(place, lambda: dc.load(state, "good"), ValueError, what)


class Custom:
    pass


class Wrapped(torch.Tensor):
    pass


def scaled() -> Wrapped:
    tensor = torch.ones(1).as_subclass(Wrapped)
    tensor.scale = torch.ones(1)  # type: ignore[attr-defined]
    return tensor


class Colour(enum.Enum):
    RED = 1


Pair = collections.namedtuple("Pair", "a")


def a_cycle() -> dict[str, Any]:
    cycle: dict[str, Any] = {}
    cycle["me"] = cycle
    return cycle


def a_cycle_with_tensors() -> list[Any]:
    cycle: list[Any] = [torch.ones(1)]
    cycle.append(cycle)
    return cycle


def nested(inner: object) -> object:
    for _ in range(200):
        inner = {"a": inner}
    return inner


def freed() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def quantized() -> torch.Tensor:
    return torch._empty_affine_quantized([2], scale=0.1, zero_point=0, dtype=torch.qint8)


def jagged() -> torch.Tensor:
    parts = [torch.ones(1), torch.ones(2)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


# What makes it, the error, and a fact of the message.
UNSUPPORTED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "a lambda": (lambda: lambda: 0, TypeError, "builtins.function"),
    "a generator": (lambda: (i for i in [0]), TypeError, "builtins.generator"),
    "an object": (Custom, TypeError, ".Custom"),
    "a class": (lambda: Custom, TypeError, "builtins.type"),
    "a module of python": (lambda: sys, TypeError, "builtins.module"),
    "a set of tensors": (lambda: {torch.ones(1)}, TypeError, "torch.Tensor"),
    "a deque of tensors": (
        lambda: collections.deque([torch.ones(1)]),
        TypeError,
        "must be in dicts",
    ),
    "a named tuple": (lambda: Pair(torch.ones(1)), TypeError, "store value._asdict()"),
    "an enum": (lambda: Colour.RED, TypeError, "store value.value"),
    "a bytearray": (lambda: bytearray(2), TypeError, "store bytes(value)"),
    "an open default": (lambda: collections.defaultdict(lambda: 0), TypeError, "defaultdict"),
    "a generator of numbers": (torch.Generator, TypeError, "Generator"),
    "a storage": (lambda: torch.ones(1).untyped_storage(), TypeError, "UntypedStorage"),
    "a cycle": (a_cycle, ValueError, "contains itself"),
    "a cycle with tensors": (a_cycle_with_tensors, ValueError, "contains itself"),
    "too deep": (lambda: nested(0), ValueError, "nested deeper than"),
    "tensors too deep": (lambda: nested(torch.ones(1)), ValueError, "nested deeper than"),
    "meta": (lambda: torch.ones(2, device="meta"), ValueError, "meta tensor"),
    "sparse": (lambda: torch.eye(2).to_sparse(), TypeError, "sparse_coo"),
    "quantized": (quantized, TypeError, "quantised"),
    "nested tensor": (jagged, TypeError, "NestedTensor"),
    "a subclass with more": (scaled, TypeError, ".Wrapped"),
    "a freed tensor": (freed, ValueError, "the memory of this tensor is missing"),
    "lazy": (lambda: torch.nn.LazyLinear(2), TypeError, "UninitializedParameter"),
    "an array of objects": (lambda: np.array([Custom()]), TypeError, "dtype object"),
    "an array of texts": (lambda: np.array(["a"]), TypeError, "dtype <U1"),
    "a part of nothing": (lambda: dc.LocalShard(torch.ones(2), (4,), (0,)), ValueError, "hole"),
    "an optimizer without its module": (
        lambda: torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1),
        ValueError,
        "is in no module of the state",
    ),
}


@pytest.mark.filterwarnings("ignore")  # torch warns of what it will drop
@pytest.mark.parametrize("case", UNSUPPORTED)
def test_what_cannot_be_saved_is_refused_by_its_place(place: Path, case: str) -> None:
    make, error, fact = UNSUPPORTED[case]
    state: dict[str, Any] = {"first": torch.ones(2), "here": {"inside": make()}}
    refused(place, lambda: dc.save(state, "new"), error, fact, "here", "inside")
    with_old = lambda: dc.save(state, "good", overwrite=True)  # noqa: E731
    refused(place, with_old, error, fact)
    assert torch.equal(state["first"], torch.ones(2))


def test_an_open_file_is_refused_and_stays_open(place: Path) -> None:
    with (place / "file").open() as file:
        refused(place, lambda: dc.save({"log": file}, "new"), TypeError, "log", "TextIOWrapper")
        assert file.read() == "mine"


def test_views_of_complex_numbers_are_saved_as_what_they_show(place: Path) -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    views = {
        "real": torch.view_as_real(numbers),
        "conj": numbers.conj(),
        "neg": torch._neg_view(numbers.real),
    }
    dc.save(views, "new")
    loaded: dict[str, Any] = {}
    dc.load(loaded, "new")
    for name, view in views.items():
        assert torch.equal(loaded[name], view.resolve_conj().resolve_neg())


@pytest.mark.parametrize("shape", [(1,) * 65, (0, 1 << 62)])
def test_a_shape_that_the_format_cannot_say_is_refused_before_anything_is_written(
    place: Path, shape: tuple[int, ...]
) -> None:
    for value in (torch.empty(shape), dc.PerRank({"x": torch.empty(shape)})):
        state = {"first": torch.ones(2), "here": {"inside": value}}
        refused(place, partial(dc.save, state, "new"), ValueError, "here.inside", "another shape")


def test_a_path_that_is_no_text_is_refused_everywhere(place: Path) -> None:
    state = live()
    for path in ("odd\udcff", Path("odd\udcff"), "", "a\0b"):
        for call in (
            lambda path: dc.save(state, path),
            lambda path: dc.load(state, path),
            dc.open,
            dc.verify,
            lambda path: dc.reshard(path, "new", world_size=1),
            lambda path: dc.reshard("good", path, world_size=1),
            dc.delete,
        ):
            refused(place, lambda call=call, path=path: call(path), ValueError, "path ")  # type: ignore[misc]


# --- what does not fit -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"model": {"w": torch.full((3, 2), 7.0)}}, ("model.w", "(2, 3)", "(3, 2)")),
        ({"model": {"w": torch.full((2, 3), 7.0).double()}}, ("model.w", "float32", "float64")),
        ({"model": {"w": 7}}, ("model.w", "a tensor", "a value without tensors")),
        ({"lr": torch.full((1,), 7.0)}, ("lr", "a value without tensors", "a tensor")),
        ({"extra": torch.ones(1)}, ("lacks extra",)),
        ({"lr": None, "model": {"w": torch.full((2, 3), 7.0), "b": 1}}, ("lacks model.b",)),
    ],
)
def test_a_state_that_does_not_fit_is_not_touched(
    place: Path, change: dict[str, Any], facts: tuple[str, ...]
) -> None:
    state = live() | change
    before = repr(state)
    refused(place, lambda: dc.load(state, "good"), dc.IncompatibleError, *facts)
    assert repr(state) == before


def test_memory_that_cannot_be_loaded_into_is_refused(place: Path) -> None:
    state = live()
    state["model"]["w"] = torch.full((1, 3), 7.0).expand(2, 3)
    refused(place, lambda: dc.load(state, "good"), dc.IncompatibleError, "overlaps itself")
    assert is_untouched(state)


# --- replicas --------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["model.b", "epoch"])
def test_unequal_replicas_are_refused_by_name_and_rank(what: str) -> None:
    storage = MemoryStorage()
    states: list[dict[str, Any]] = [
        {"model": {"b": torch.ones(300), "c": torch.ones(3)}, "epoch": 3} for _ in range(3)
    ]
    save_on_threads(storage, states, "/old")
    before = storage.tree()
    if what == "epoch":
        states[2]["epoch"] = 4
    else:
        states[2]["model"]["b"][17] = 5
    for path, options in (("/new", {}), ("/old", {"overwrite": True})):
        outcomes = try_save_on_threads(lambda _: storage, states, path, **options)
        errors = errors_of(outcomes)
        assert {type(error) for error in errors} == {UnequalReplicasError}
        for error in errors:
            assert f"{what}" in str(error)
            assert "ranks 0-1 differs from rank 2" in str(error)
            assert "wrap values that differ by design in dc.PerRank" in str(error)
    assert storage.tree() == before


# --- places ----------------------------------------------------------------------------------


@pytest.mark.parametrize("door", ["save", "overwrite", "target"])
@pytest.mark.parametrize(
    ("path", "fact"),
    [
        ("file", "file is a file"),
        ("file/below", "file, or below one"),
        ("mine", "mine has files that dist_ckpt did not write (notes)"),
    ],
)
def test_what_is_not_ours_is_never_written_over(
    place: Path, door: str, path: str, fact: str
) -> None:
    refused(place, lambda: DOORS[door](path), dc.ExistsError, fact, "choose another path")


@pytest.mark.parametrize("door", ["load", "open", "verify", "quick", "delete", "source"])
@pytest.mark.parametrize(
    ("path", "fact"),
    [
        ("file", "it is a file"),
        ("file/below", "it is a file"),
        ("mine", "the folder holds notes"),
        ("none", "no such folder"),
        ("empty", "the folder is empty"),
    ],
)
def test_where_no_checkpoint_is_none_is_found(place: Path, door: str, path: str, fact: str) -> None:
    refused(place, lambda: DOORS[door](path), dc.NotFoundError, str(place / path), fact)


def test_a_checkpoint_is_not_written_over_unless_asked_for(place: Path) -> None:
    call = lambda: dc.save(W, "good")  # noqa: E731
    refused(place, call, dc.ExistsError, "a checkpoint of step 1 is here", "overwrite=True")


# --- storage that refuses --------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    """Return what calls came to in processes with little space or few permissions."""
    script = Path(__file__).parents[2] / "helpers" / "faults" / "refusing_storage.py"
    with tempfile.TemporaryDirectory() as root:
        done = subprocess.run(
            [forked_python(), "-W", "ignore", str(script), root],
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def found_in(outcomes: dict[str, Any], case: str) -> dict[str, Any]:
    found: dict[str, Any] = outcomes[case]
    assert "failed" not in found, found
    if "skipped" in found:
        pytest.skip(f"this machine does not let a test do that: {found['skipped']}")
    return found


@pytest.mark.parametrize("door", ["save", "overwrite"])
@pytest.mark.parametrize(
    ("case", "facts"),
    [
        ("file_limit", ("File too large", "EFBIG", "raise the limit of file sizes")),
        ("full", ("No space left on device", "ENOSPC", "kB are missing", "free space")),
        ("no_space_at_all", ("No space left on device", "ENOSPC", "are missing", "free space")),
        ("read_only", ("Read-only file system", "EROFS", "choose another path")),
    ],
)
def test_a_save_that_finds_no_room_leaves_everything_as_it_was(
    outcomes: dict[str, Any], case: str, door: str, facts: tuple[str, ...]
) -> None:
    one = found_in(outcomes, case)[door]
    assert one["error"] == "StorageError", one
    for fact in facts:
        assert fact in one["message"]
    assert one["same"]
    assert one["untouched"]


def test_a_resumed_run_frees_a_full_disk_before_its_first_save(outcomes: dict[str, Any]) -> None:
    # Step 2 is the newest that was checked in full: the resume has read it.
    assert found_in(outcomes, "little_room") == {"steps": [2, 5], "dead": False}


@pytest.mark.parametrize("door", ["delete", "reshard"])
def test_a_read_only_file_system_is_not_changed(outcomes: dict[str, Any], door: str) -> None:
    one = found_in(outcomes, "read_only")[door]
    assert one["error"] == "StorageError", one
    assert "EROFS" in one["message"]
    assert one["same"]


def test_reading_needs_no_file_system_that_is_writable(outcomes: dict[str, Any]) -> None:
    assert found_in(outcomes, "read_only")["readers"]["error"] is None


@pytest.mark.parametrize(
    "door", ["save", "overwrite", "delete", "model-00000.safetensors", "index.json"]
)
def test_missing_permissions_are_named_with_the_path(outcomes: dict[str, Any], door: str) -> None:
    one = found_in(outcomes, "permissions")[door]
    assert one["error"] == "StorageError", one
    assert "Permission denied (EACCES): give this user the permission" in one["message"]
    assert "/permissions/" in one["message"]
    if "." in door:
        assert one["message"].partition(": ")[0].endswith(door)
    assert one["untouched"]
    assert one["same"]
