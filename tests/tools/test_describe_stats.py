"""`stats`: what torch computes of the same tensors, whatever is cut how, in bounded memory."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import dist_ckpt as dc
from dist_ckpt.core.format.checksums import BLOCK_NBYTES
from dist_ckpt.tools.inspect import describe
from dist_ckpt.tools.inspect.describe import TensorStats, stats


def by_name(path: Path, **options: object) -> dict[str, TensorStats]:
    return {one.name: one for one in stats(path, **options)}  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_it_is_what_torch_computes(tmp_path: Path, dtype: torch.dtype) -> None:
    value = (torch.randn(300, 7, generator=torch.Generator().manual_seed(1)) * 9).to(dtype)
    dc.save({"m": {"w": value}}, tmp_path / "ck")
    dc.reshard(tmp_path / "ck", tmp_path / "wide", world_size=5)
    exact = value.double()
    for path in ("ck", "wide"):
        found = by_name(tmp_path / path)["m.w"]
        assert found.min == exact.min().item()
        assert found.max == exact.max().item()
        assert found.mean == pytest.approx(exact.mean().item(), rel=1e-9)
        assert found.rms == pytest.approx(exact.square().mean().sqrt().item(), rel=1e-9)
        assert (found.zeros, found.nan, found.inf) == (int((exact == 0).sum()), 0, 0)
        assert found.is_finite


def test_what_is_not_finite_is_counted_and_left_out_of_the_rest(tmp_path: Path) -> None:
    value = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 3.0, -4.0])
    dc.save({"w": value, "all": torch.full((3,), math.nan)}, tmp_path / "ck")
    found = by_name(tmp_path / "ck")
    one = found["w"]
    assert (one.min, one.max, one.zeros, one.nan, one.inf) == (-4.0, 3.0, 2, 1, 2)
    assert one.rms == pytest.approx(math.sqrt(25 / 4))
    assert not one.is_finite
    assert (found["all"].min, found["all"].mean, found["all"].nan) == (None, None, 3)


def test_large_values_and_none_are_no_error(tmp_path: Path) -> None:
    state = {
        "large": torch.tensor([1e300, -1e300], dtype=torch.float64),
        "none": torch.zeros(0, 4),
        "complex": torch.tensor([3 + 4j, 0j]),
        "yes": torch.tensor([True, False, False]),
        "scalar": torch.tensor(2.5),
    }
    dc.save(state, tmp_path / "ck")
    found = by_name(tmp_path / "ck")
    assert found["large"].rms == pytest.approx(1e300)
    assert (found["none"].numel, found["none"].min, found["none"].zeros) == (0, None, 0)
    assert (found["complex"].max, found["complex"].zeros) == (5.0, 1)
    for one in found.values():  # which JSON has
        assert {type(n) for n in (one.min, one.max, one.mean, one.rms)} <= {float, int, type(None)}
    assert found["yes"].mean == pytest.approx(1 / 3)
    assert found["yes"].zeros == 2
    assert (found["scalar"].min, found["scalar"].shape) == (2.5, ())


def test_tied_names_and_globs(tmp_path: Path) -> None:
    shared = torch.ones(3)
    dc.save({"m": {"a": shared, "b": shared, "c": torch.zeros(2)}}, tmp_path / "ck")
    found = by_name(tmp_path / "ck", include="m.b")
    assert [*found] == ["m.b"]
    assert found["m.b"].alias_of == "m.a"
    with pytest.raises(ValueError, match="'x' matches no name"):
        stats(tmp_path / "ck", include="x")


def test_a_part_is_in_memory_at_a_time_and_progress_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbytes = 4 * BLOCK_NBYTES
    monkeypatch.setattr(describe, "WINDOW_NBYTES", BLOCK_NBYTES)
    dc.save({"w": torch.arange(nbytes // 4, dtype=torch.int32)}, tmp_path / "ck")
    told: list[tuple[int, int]] = []
    (one,) = stats(tmp_path / "ck", progress=lambda done, total: told.append((done, total)))
    assert (one.min, one.max) == (0, nbytes // 4 - 1)
    assert one.mean == (nbytes // 4 - 1) / 2
    assert told == [(part * BLOCK_NBYTES, nbytes) for part in (1, 2, 3, 4)]


def test_damage_is_named(tmp_path: Path) -> None:
    dc.save({"w": torch.ones(9)}, tmp_path / "ck")
    (file,) = (tmp_path / "ck").glob("a1-*/*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(dc.CorruptError, match="w"):
        stats(tmp_path / "ck")


def test_what_is_deleted_meanwhile_is_no_damage(tmp_path: Path) -> None:
    dc.save({"w": torch.ones(9)}, tmp_path / "one")
    dc.reshard(tmp_path / "one", tmp_path / "ck", world_size=2)

    def delete(*_: object) -> None:
        dc.delete(tmp_path / "ck")

    with pytest.raises(dc.NotFoundError, match="was replaced or deleted while it was read"):
        stats(tmp_path / "ck", progress=delete)
