"""Averages of checkpoints, against torch on whole tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import dist_ckpt as dc
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.storage import Storage
from dist_ckpt.core.storage.local.local_storage import LocalStorage
from dist_ckpt.errors import CheckpointError
from dist_ckpt.testing.crash_storage import CrashStorage, states
from dist_ckpt.testing.faulty_storage import FaultyStorage
from dist_ckpt.testing.memory_storage import MemoryStorage
from dist_ckpt.testing.thread_channel import TEST_CONFIG
from dist_ckpt.tools.average import mean
from dist_ckpt.tools.average.average import AverageCall, average_together
from dist_ckpt.tools.average.checkpoint_selection import AverageOptions
from long_mode import sampled_calls
from ranks import Outcome, try_ranks
from sharded_checkpoints import blocks_of

pytest.importorskip("torch")

import torch

from ranks import load_on_threads, save_on_threads, shared_storage

SUM_DTYPES = {torch.float64: torch.float64}


def tensors(seed: int) -> dict[str, torch.Tensor]:
    make = torch.Generator().manual_seed(seed)
    return {
        "wide": torch.randn(24, 70, generator=make),
        "bias": torch.randn(31, generator=make).to(torch.bfloat16),
        "half": torch.randn(16, 9, generator=make).half(),
        "double": torch.randn(8, 3, generator=make, dtype=torch.float64),
        "tiny": torch.randn(6, generator=make).to(torch.float8_e4m3fn),
        "complex": torch.randn(4, 2, generator=make, dtype=torch.complex64),
        "scalar": torch.randn((), generator=make),
        "empty": torch.zeros(0, 3),
        "count": torch.tensor([seed]),
    }


def expected(sources: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Average whole tensors in the documented order: the sources are the oldest first."""
    dtype = sources[0].dtype
    if dtype.is_complex:
        return torch.view_as_complex(expected([torch.view_as_real(s) for s in sources], weights))
    total: Any = None
    for source, weight in zip(sources, weights, strict=True):
        term = source.to(SUM_DTYPES.get(dtype, torch.float32)) * weight
        total = term if total is None else total + term
    return (total / sum(weights)).to(dtype)  # type: ignore[no-any-return]


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def save_parts(path: Path, seed: int, world_size: int, storage: Storage | None = None) -> None:
    """Save the tensors of a seed, cut by rows among ranks, or flat, or whole."""
    whole = tensors(seed)
    ranks = []
    for rank in range(world_size):
        part: dict[str, Any] = dict(whole)
        rows = slice(rank * 24 // world_size, (rank + 1) * 24 // world_size)
        part["wide"] = dc.LocalShard(whole["wide"][rows].clone(), (24, 70), (rows.start, 0))
        flat = slice(rank * 144 // world_size, (rank + 1) * 144 // world_size)
        part["half"] = dc.FlatShard(whole["half"].flatten()[flat].clone(), (16, 9), flat.start)
        ranks.append({"model": part, "seen": dc.PerRank([seed, rank]), "seed": seed})
    save_on_threads(
        storage or LocalStorage(), ranks, str(path), step=seed, metadata={"loss": seed + 0.5}
    )


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tensors of some KB have several windows and blocks."""
    monkeypatch.setattr(mean, "WINDOW_NBYTES", 4 * 64)


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({}, [1.0, 1.0, 1.0]),
        ({"weights": [3, 1, 2]}, [0.5, 1.0, 1.5]),  # in the order of the list
        ({"decay": 0.7}, [0.7**2, 0.7, 1.0]),
        ({"weights": [-1, 0.0, 2e-300]}, [0.0, 2e-300, -1.0]),
    ],
    ids=["uniform", "weighted", "exponential", "beyond"],
)
def test_an_average_is_to_the_last_bit_what_torch_makes_of_whole_tensors(
    options, weights, tmp_path
):
    with blocks_of(64):
        for seed, world_size in ((1, 4), (2, 1), (3, 3)):
            save_parts(tmp_path / f"{seed}", seed, world_size)
        # The list is in no order; the third is the newest.
        sources = [tmp_path / "3", tmp_path / "1", tmp_path / "2"]
        report = dc.average(sources, to=tmp_path / "mean", include="model.*", **options)
    assert (report.step, dc.verify(tmp_path / "mean").ok) == (3, True)
    wholes = [tensors(seed) for seed in (1, 2, 3)]
    with dc.open(tmp_path / "mean") as mean, dc.open(tmp_path / "3") as newest:
        for name in wholes[0]:
            found = bytes(mean[f"model.{name}"][...].data)
            several = [whole[name] for whole in wholes]
            averaged = several[-1] if name == "count" else expected(several, weights)
            assert found == as_bytes(averaged), name
        assert (mean.world_size, mean.step, dict(mean.metadata)) == (3, 3, {"loss": 3.5})
        assert mean.objects == newest.objects
        assert mean.per_rank == newest.per_rank
        assert mean.index.catalog == newest.index.catalog
        assert mean.index.save != newest.index.save
        told = mean.index.saved_by["averaged"].split("; ")
        assert [text.rpartition(" of step ")[2] for text in told] == ["1", "2", "3"]


def module(seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    made = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    made(torch.randn(5, 3))
    made[0].bias.requires_grad = False
    return made


@pytest.mark.parametrize("dtype", ["float8_e5m2", "float16", "float64"])
def test_of_small_elements_and_of_odd_sizes_every_one_is_averaged(dtype, tmp_path):
    # The sum of a float8 takes four times its room; and names do not come in the order of sizes.
    sizes = {"a": (3, getattr(torch, dtype)), "b": (2, torch.float64), "c": (5, torch.bfloat16)}
    for state in ({"w": (70000, getattr(torch, dtype))}, sizes):
        for value in (1.0, 3.0):
            made = {name: torch.full((n,), value).to(of) for name, (n, of) in state.items()}
            dc.save(made, tmp_path / f"{value}", step=int(value), overwrite=True)
        two = [tmp_path / "1.0", tmp_path / "3.0"]
        dc.average(two, to=tmp_path / "mean", include="*", overwrite=True)
        found: dict[str, Any] = {}
        dc.load(found, tmp_path / "mean")
        assert {name: {*one.double().tolist()} for name, one in found.items()} == {
            name: {2.0} for name in state
        }


def test_what_is_trained_is_averaged_and_all_else_is_of_the_newest(tmp_path):
    modules = [module(seed) for seed in range(3)]
    for seed, made in enumerate(modules):
        optimizer = torch.optim.AdamW([w for w in made.parameters() if w.requires_grad])
        made(torch.randn(5, 3)).sum().backward()
        optimizer.step()
        state = {"model": made, "optim": optimizer}
        dc.save(state, tmp_path / f"{seed}", step=seed, attach={"report": b"of one step"})
    dc.average([tmp_path / f"{seed}" for seed in range(3)], to=tmp_path / "mean")
    averaged = {"0.weight", "1.weight", "1.bias"}
    with dc.open(tmp_path / "mean") as mean, dc.open(tmp_path / "2") as newest:
        for name, _ in modules[0].state_dict().items():
            several = [made.state_dict()[name] for made in modules]
            right = expected(several, [1, 1, 1]) if name in averaged else several[-1]
            assert bytes(mean[f"model.{name}"][...].data) == as_bytes(right), name
        assert (list(newest.attached), list(mean.attached)) == (["report"], [])
        others = [fqn for fqn in newest if fqn.startswith("optim.")]
        assert others
        for fqn in others:
            assert mean[fqn][...] == newest[fqn][...]


def test_nan_in_a_source_is_nan_in_the_average(tmp_path):
    for step, value in enumerate((1.0, float("nan"), float("inf"))):
        dc.save({"w": torch.tensor([value, 2.0])}, tmp_path / f"{step}", step=step)
    dc.average([tmp_path / f"{n}" for n in range(3)], to=tmp_path / "mean", include="w")
    with dc.open(tmp_path / "mean") as mean:
        found = mean["w"][...].torch()
    assert found.isnan().tolist() == [True, False]
    assert found[1] == 2.0


# --- of a run -----------------------------------------------------------------------------------


def run_of(root: Path, steps: Sequence[int], losses: Sequence[float | None] = ()) -> dc.Run:
    for step in steps:
        dc.save({"w": torch.tensor([float(step)])}, root / f"step-{step:08d}", step=step)
    run = dc.Run(root)
    for step, loss in zip(steps, losses, strict=False):
        if loss is not None:
            run.metrics(step, {"loss": loss})
    return run


def steps_of(path: Path) -> list[int]:
    with dc.open(path) as mean:
        told = mean.index.saved_by["averaged"].split("; ")
    return [int(text.rpartition(" of step ")[2]) for text in told]


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"last": 2}, [30, 40]),
        ({"last": 0}, [10, 20, 30, 40]),
        ({"last": 9}, [10, 20, 30, 40]),
        ({"best": 2, "min": "loss"}, [10, 20]),  # of two that are equal the older
        ({"best": 2, "max": "loss"}, [10, 40]),
        ({"best": -1, "min": "loss"}, [10, 20, 40]),
    ],
)
def test_the_last_or_the_best_of_a_run_are_averaged(options, steps, tmp_path):
    run_of(tmp_path / "run", [10, 20, 30, 40], [2.0, 1.0, float("nan"), 2.0])
    dc.average(tmp_path / "run", to=tmp_path / "mean", include="w", **options)
    assert steps_of(tmp_path / "mean") == steps
    with dc.open(tmp_path / "mean") as mean:
        assert mean["w"][...].torch() == torch.tensor(float(sum(steps))) / len(steps)


def test_what_is_chosen_of_a_run_is_held_until_the_average_is_there(tmp_path):
    run = run_of(tmp_path / "run", [1, 2, 3], [1.0, 2.0, 3.0])
    seen: list[list[bool]] = []

    def look(done: int, nbytes: int) -> None:
        del done, nbytes
        seen.append([bool(one.leases) for one in run.checkpoints])

    dc.average(tmp_path / "run", to=tmp_path / "a", last=2, include="w", progress=look)
    sources = [f"{tmp_path}/run@min:loss", f"{tmp_path}/run@latest"]
    dc.average(sources, to=tmp_path / "b", include="w", progress=look)
    assert (seen[0], seen[-1]) == ([False, True, True], [True, False, True])
    assert not any(one.leases for one in run.checkpoints)


# --- what is refused ----------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    for step in (1, 2):
        dc.save({"w": torch.ones(2), "n": torch.tensor(1)}, tmp_path / f"{step}", step=step)
    return [tmp_path / "1", tmp_path / "2"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"weights": [1.0]}, "1 weights for 2 checkpoints"),
        ({"weights": [1.0, -1.0]}, "sum to 0"),
        ({"weights": [1.0, float("nan")]}, "weights=nan: give finite numbers"),
        ({"weights": [1.0, 10**400]}, "give finite numbers"),
        ({"weights": [1e308, -1e308]}, "sum to 0"),
        ({"weights": [1.0, "2"]}, "weights='2': give finite numbers"),
        ({"weights": 2}, "give a list of numbers"),
        ({"weights": [1, 2], "decay": 0.5}, "either weights= or decay="),
        ({"decay": 1.0}, "decay=1.0: give a number above 0 and below 1"),
        ({"decay": float("nan")}, "decay=nan: give a number above 0"),
        ({"last": 2}, "give its folder, not a list"),
        ({"min": "loss"}, "give best=n too"),
        ({"include": "v.*"}, r"floating-point tensors of .*/2: include: 'v\.\*' matches no"),
        ({"include": "n"}, "include: 'n' matches no name"),
        ({"include": "w", "exclude": "v"}, "exclude: 'v' matches no"),
        ({"include": "w", "exclude": "w"}, "is chosen: give other patterns"),
        ({"include": None}, r"does not record which tensors are trainable.*include=\"model\.\*\""),
        ({"overwrite": 1}, "overwrite=1: give True or False"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_written(options, told, two, tmp_path):
    with pytest.raises((ValueError, TypeError), match=told):
        dc.average(two, to=tmp_path / "mean", **{"include": "w", **options})
    assert not (tmp_path / "mean").exists()


def test_sources_without_an_order_and_a_progress_that_is_none_are_refused(two, tmp_path):
    sources: Any
    for sources in ({*two}, dict.fromkeys(two), iter(two), 5, b"run"):
        with pytest.raises(TypeError, match=r"^sources is a \w+: give a list of checkpoints"):
            dc.average(sources, to=tmp_path / "out", include="w")
    five: Any = 5
    with pytest.raises(TypeError, match="progress=5: give a function"):
        dc.average(two, to=tmp_path / "out", include="w", progress=five)
    assert not (tmp_path / "out").exists()


def test_sources_that_make_no_average_are_refused(two, tmp_path):
    run_of(tmp_path / "run", [1, 2])
    first = two[0]
    (tmp_path / "link").symlink_to(first)
    for sources, options, error, told in (
        ([first], {}, ValueError, "only .*/1 to average"),
        ([], {}, ValueError, "nothing to average"),
        ([first, tmp_path / "link"], {}, ValueError, "given twice"),
        ([first, tmp_path / "gone"], {}, dc.NotFoundError, "gone"),
        (first, {"last": 0}, ValueError, "only .*/1 to average"),
        (tmp_path / "run", {}, ValueError, "give last=n or best=n"),
        (tmp_path / "run", {"best": 2}, ValueError, "needs a metric"),
        (tmp_path / "run", {"best": 2, "max": "f1"}, dc.NotFoundError, "metric 'f1'"),
        (tmp_path / "run", {"last": True}, TypeError, "last=True"),
    ):
        with pytest.raises(error, match=told):
            dc.average(sources, to=tmp_path / "mean", include="w", **options)
    assert not (tmp_path / "mean").exists()


def test_a_target_that_would_harm_a_source_or_a_run_is_refused(two, tmp_path):
    run_of(tmp_path / "run", [1, 2])
    for sources, target, options, told in (
        (two, "2", {"overwrite": True}, "2 is the source, or inside"),
        (two, "1/inner", {}, "inner is .* inside the source .*1: give"),
        (two, "", {}, "is inside the target"),
        (tmp_path / "run", "run/mean", {"last": 2}, "would resume from the average"),
    ):
        with pytest.raises(ValueError, match=told):
            dc.average(sources, to=tmp_path / target, include="w", **options)
    dc.Run(tmp_path / "run").pin(1)  # it keeps records now
    with pytest.raises(ValueError, match="would resume from the average"):
        dc.average(two, to=tmp_path / "run" / "mean", include="w")
    dc.save({"w": torch.ones(2)}, tmp_path / "there")
    with pytest.raises(dc.ExistsError):
        dc.average(two, to=tmp_path / "there", include="w")
    dc.average(two, to=tmp_path / "there", include="w", overwrite=True)
    assert steps_of(tmp_path / "there") == [1, 2]


def test_a_damaged_source_is_named_and_nothing_is_committed(two, tmp_path):
    (file,) = two[0].glob("a1-*/state-00000.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(dc.CorruptError, match=r"/1/a1-\w+/state-00000\.safetensors"):
        dc.average(two, to=tmp_path / "mean", include="w")
    assert not (tmp_path / "mean").exists()


@pytest.mark.parametrize("file", ["/1/.*[.]safetensors", "/2/.*/objects[.]msgpack"])
def test_a_source_that_is_replaced_while_it_is_read_is_not_called_damaged(
    file, two, tmp_path, monkeypatch
):
    real = LocalStorage.open
    done: list[str] = []

    def open_late(storage: LocalStorage, path: str) -> Any:
        if re.search(f"{file}$", path) and not done:
            done.append(path)
            one = two[int("/2/" in file)]
            dc.save({"w": torch.zeros(2)}, one, step=int(one.name), overwrite=True)
        return real(storage, path)

    monkeypatch.setattr(LocalStorage, "open", open_late)
    with pytest.raises(dc.NotFoundError, match="was replaced or deleted while it was read"):
        dc.average(two, to=tmp_path / "mean", include="w")
    assert done
    assert not (tmp_path / "mean").exists()


# --- by several ranks, and on storage that fails ------------------------------------------------


def try_average(
    sources: Sequence[str], ranks: int, target: Callable[[int], Storage], source: Storage
) -> list[Outcome]:
    options = AverageOptions(include="model.*", overwrite=True)
    call = [
        AverageCall(sources, "/runs/mean", options, None, source, target(rank))
        for rank in range(ranks)
    ]
    return try_ranks(
        lambda rank, channel, bulk: average_together(
            Session(channel, bulk, TEST_CONFIG), call[rank]
        ),
        world_size=ranks,
        harness="threads",
    )


def in_memory() -> MemoryStorage:
    storage = MemoryStorage({"/runs": None})
    for seed in (1, 2):
        save_parts(Path(f"/runs/{seed}"), seed, 2, storage)
    return storage


def wrong(storage: Storage, *, may_lack: bool) -> str | None:
    """Return what is wrong with what is at the target: nothing, or all of it, must be there."""
    loaded: dict[str, Any] = {}
    try:
        load_on_threads(storage, [loaded], "/runs/mean")
    except dc.NotFoundError:
        return None if may_lack else "it is not there"
    except CheckpointError as error:
        return str(error)
    wholes = [tensors(seed) for seed in (1, 2)]
    right = expected([whole["wide"] for whole in wholes], [1, 1])
    return None if torch.equal(loaded["model"]["wide"], right) else "it is not the average"


@pytest.mark.parametrize("ranks", [1, 3])
def test_an_average_that_crashes_anywhere_is_there_whole_or_not_at_all(ranks):
    sources, disk = in_memory(), CrashStorage()
    disk.make_folder("/runs")
    disk.sync("/")
    outcomes = try_average(
        ["/runs/1", "/runs/2"], ranks, lambda rank: disk.client(f"rank {rank}"), sources
    )
    assert [outcome.error for outcome in outcomes] == [None] * ranks
    disk.mark("averaged")
    problems = [
        f"{point}: {problem}"
        for point, storage in states(disk.log, own_syncs=ranks > 1, limit=20)
        if (problem := wrong(storage, may_lack="averaged" not in point.marks)) is not None
    ]
    assert problems == []


@pytest.mark.parametrize(("ranks", "done"), [(1, False), (1, True), (2, False)])
def test_an_error_at_any_call_of_the_targets_storage_is_raised_on_all_ranks(ranks, done):
    sources = in_memory()
    for number in sampled_calls(4):
        storage = MemoryStorage({"/runs": None})
        faulty = FaultyStorage(storage, fail_at_call=number, done=done)
        outcomes = try_average(["/runs/1", "/runs/2"], ranks, shared_storage(faulty), sources)
        errors = [outcome.error for outcome in outcomes]
        assert len({type(error) for error in errors}) == 1, (faulty.failed, errors)
        assert wrong(storage, may_lack=errors[0] is not None) is None, faulty.failed
        if faulty.calls < number:
            break
    assert errors == [None] * ranks


def test_versions_of_modules_that_differ_are_refused(tmp_path):
    class Layer(torch.nn.Linear):
        _version = 1

    for step in (1, 2):
        Layer._version = step
        model = torch.nn.Sequential(Layer(2, 2), torch.nn.Linear(2, 2))
        dc.save({"model": model}, tmp_path / f"{step}", step=step)
    sources = [tmp_path / "1", tmp_path / "2"]
    message = r"/1: model\.0 has version 1, in the newest 2"
    with pytest.raises(CheckpointError, match=message):
        dc.average(sources, to=tmp_path / "mean")
    assert not (tmp_path / "mean").exists()
    dc.average(sources, to=tmp_path / "mean", exclude="model.0.*")
    dc.save({"model": model}, tmp_path / "1", step=1, overwrite=True)
    dc.average(sources, to=tmp_path / "same")
