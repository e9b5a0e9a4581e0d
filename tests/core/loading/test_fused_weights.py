"""Fused weights under a rule with pieces: each matrix is cut by itself, on any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dist_ckpt as dc
from dist_ckpt.core.storage.local.local_storage import LocalStorage
from dist_ckpt.testing.memory_storage import MemoryStorage

pytest.importorskip("torch")

import torch
from torch import nn

from long_mode import examples
from ranks import load_on_threads, save_on_threads

WORLDS = (1, 2, 3, 4, 8)
SIZES = [8, 4, 4]  # such as q, k and v


def part_of(
    whole: torch.Tensor, sizes: Sequence[int], dim: int, rank: int, count: int
) -> torch.Tensor:
    """Return what a rank holds: the plain concatenation of its chunk of each piece."""
    chunks = []
    for piece in whole.split(list(sizes), dim):
        parts = piece.chunk(count, dim)
        chunks.append(parts[rank] if rank < len(parts) else piece.narrow(dim, 0, 0))
    return torch.cat(chunks, dim).clone()


def fused(count: int, sizes: Sequence[int] = SIZES, dim: int = 0) -> dc.ShardingConfig:
    return dc.ShardingConfig({"tp": count}, {"qkv.*": {"tp": dim, "pieces": [*sizes]}})


def plain(count: int) -> dc.ShardingConfig:
    return dc.ShardingConfig({"tp": count}, {"qkv.*": {"tp": 0}})


class Attention(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(3, rows)
        self.norm = nn.LayerNorm(3)


def trained() -> dict[str, Any]:
    """Return a whole model with its optimizer, after one step."""
    torch.manual_seed(0)
    model = Attention(sum(SIZES))
    optimizer = torch.optim.AdamW(model.parameters())
    model.qkv(model.norm(torch.randn(5, 3))).square().sum().backward()
    optimizer.step()
    return {"model": model, "optim": optimizer}


def on_rank(state: dict[str, Any], rank: int, count: int) -> dict[str, Any]:
    """Return the part of a rank: weight, bias and moments are cut alike."""

    def part(tensor: torch.Tensor) -> torch.Tensor:
        fits = tensor.ndim > 0 and len(tensor) == sum(SIZES)
        return part_of(tensor.detach(), SIZES, 0, rank, count) if fits else tensor.detach().clone()

    model = Attention(sum(SIZES) // count)
    for name, parameter in state["model"].named_parameters():
        model.get_parameter(name).data = part(parameter)
    optimizer = torch.optim.AdamW(model.parameters())
    for mine, theirs in zip(model.parameters(), state["model"].parameters(), strict=True):
        moments = state["optim"].state[theirs].items()
        optimizer.state[mine] = {key: part(value) for key, value in moments}
    return {"model": model, "optim": optimizer}


def blank(state: dict[str, Any]) -> dict[str, Any]:
    """Return the same state with other numbers, and an optimizer that made no step."""
    for parameter in state["model"].parameters():
        parameter.data.fill_(9)
    return {"model": state["model"], "optim": torch.optim.AdamW(state["model"].parameters())}


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for mine, theirs in zip(
        found["model"].parameters(), expected["model"].parameters(), strict=True
    ):
        assert torch.equal(mine, theirs)
        moments, wanted = found["optim"].state[mine], expected["optim"].state[theirs]
        assert moments.keys() == wanted.keys()
        assert all(torch.equal(moments[key], wanted[key]) for key in wanted)


def saved(tmp_path: Path, count: int = 2, **options: Any) -> str:
    path = str(tmp_path / f"on-{count}")
    states = [on_rank(trained(), rank, count) for rank in range(count)]
    save_on_threads(LocalStorage(), states, path, **{"sharding": fused(count), **options})
    return path


# --- values ----------------------------------------------------------------------------------


@examples(25)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    dim=st.integers(0, 1),
    saved=st.sampled_from(WORLDS),
    loaded=st.sampled_from(WORLDS),
)
def test_any_pieces_saved_on_any_ranks_load_on_any_other(
    sizes: list[int], dim: int, saved: int, loaded: int
) -> None:
    total = sum(sizes)
    whole = torch.arange(3.0 * total).reshape((total, 3) if dim == 0 else (3, total))
    storage = MemoryStorage()
    states = [
        {"model": {"qkv": {"weight": part_of(whole, sizes, dim, rank, saved)}}}
        for rank in range(saved)
    ]
    save_on_threads(storage, states, sharding=fused(saved, sizes, dim))
    targets = [
        {"model": {"qkv": {"weight": part_of(whole * 0, sizes, dim, rank, loaded)}}}
        for rank in range(loaded)
    ]
    load_on_threads(storage, targets, sharding=fused(loaded, sizes, dim))
    for rank, target in enumerate(targets):
        expected = part_of(whole, sizes, dim, rank, loaded)
        assert torch.equal(target["model"]["qkv"]["weight"], expected)
    alone: dict[str, Any] = {}
    load_on_threads(storage, [alone])
    assert torch.equal(alone["model"]["qkv"]["weight"], whole)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_bias_and_moments_follow_the_rule_of_the_weight(count: int, tmp_path: Path) -> None:
    path, whole = saved(tmp_path, count), trained()
    alone = blank(trained())
    dc.load(alone, path)
    assert_equal(alone, whole)
    for other in (1, 2, 4):
        states = [blank(on_rank(whole, rank, other)) for rank in range(other)]
        report = load_on_threads(LocalStorage(), states, path, sharding=fused(other))
        for rank, state in enumerate(states):
            assert_equal(state, on_rank(whole, rank, other))
        assert report.assumed == ()


def test_pieces_that_fewer_axes_cut_are_replicas_along_the_others(tmp_path: Path) -> None:
    """Grouped queries: four ranks share two heads of keys and values."""
    shared = {"size": 4, "axes": ["kv"]}
    rule = {"kv": 0, "rep": 0, "pieces": [8, shared, shared]}
    config = dc.ShardingConfig({"kv": 2, "rep": 2}, {"qkv": rule})
    whole = torch.arange(32.0).reshape(16, 2)
    q, k, v = whole.split([8, 4, 4])
    parts = [
        torch.cat([q.chunk(4)[rank], k.chunk(2)[rank // 2], v.chunk(2)[rank // 2]])
        for rank in range(4)
    ]
    path = str(tmp_path / "ck")
    save_on_threads(LocalStorage(), [{"qkv": part} for part in parts], path, sharding=config)
    alone = {"qkv": torch.zeros(16, 2)}
    dc.load(alone, path)
    assert torch.equal(alone["qkv"], whole)
    states = [{"qkv": torch.zeros_like(part)} for part in parts]
    load_on_threads(LocalStorage(), states, path, sharding=config)
    assert all(torch.equal(s["qkv"], part) for s, part in zip(states, parts, strict=True))
    parts[1][-1] += 1
    with pytest.raises(ValueError, match="qkv"):
        save_on_threads(LocalStorage(), [{"qkv": p} for p in parts], path + "2", sharding=config)


def test_a_rule_that_cuts_two_dimensions_names_the_fused_one(tmp_path: Path) -> None:
    """Experts on one axis, gate and up of each on another."""
    rule = {"ep": 0, "tp": 1, "pieces": {"tp": [6, 6]}}
    config = dc.ShardingConfig({"ep": 2, "tp": 3}, {"w1": rule})
    whole = torch.arange(4 * 12 * 2.0).reshape(4, 12, 2)
    parts = [part_of(whole.chunk(2)[r // 3], [6, 6], 1, r % 3, 3) for r in range(6)]
    path = str(tmp_path / "ck")
    save_on_threads(LocalStorage(), [{"w1": part} for part in parts], path, sharding=config)
    alone = {"w1": torch.zeros(4, 12, 2)}
    dc.load(alone, path)
    assert torch.equal(alone["w1"], whole)
    assert dc.ShardingConfig.from_json(config.to_json()) == config


def test_other_pieces_and_other_cuts_take_the_same_values(tmp_path: Path) -> None:
    path, whole = saved(tmp_path), trained()["model"].qkv.weight
    cuts = {
        "other pieces": fused(2, [2, 14]),
        "one piece, as a plain cut": fused(2, [16]),
        "the default": dc.ShardingConfig.even(2),
    }
    for config in cuts.values():
        sizes = [2, 14] if config == fused(2, [2, 14]) else [16]
        parts = [part_of(whole, sizes, 0, rank, 2) for rank in range(2)]
        states = [{"model": {"qkv": {"weight": torch.zeros_like(part)}}} for part in parts]
        load_on_threads(LocalStorage(), states, path, sharding=config, strict=False)
        for state, part in zip(states, parts, strict=True):
            assert torch.equal(state["model"]["qkv"]["weight"], part)


def test_a_cast_and_a_background_of_rank_one_keep_the_order(tmp_path: Path) -> None:
    path, whole = saved(tmp_path), trained()["model"].qkv.weight
    parts = [part_of(whole.detach().bfloat16(), SIZES, 0, rank, 4) for rank in range(4)]
    states = [{"model": {"qkv": {"weight": torch.zeros_like(part)}}} for part in parts]
    options = {"sharding": fused(4), "strict": False, "cast": True}
    load_on_threads(LocalStorage(), states, path, **options)
    for state, part in zip(states, parts, strict=True):
        assert torch.equal(state["model"]["qkv"]["weight"], part)


# --- what is stored --------------------------------------------------------------------------


def pieces_in(path: object) -> dict[str, tuple[int | None, tuple[int, ...]]]:
    with dc.open(str(path)) as checkpoint:
        tensors = checkpoint.tensors.items()
        return {fqn: (info.fused_dim, info.pieces) for fqn, info in tensors if info.pieces}


def test_a_checkpoint_says_how_its_tensors_are_fused_and_copies_keep_it(tmp_path: Path) -> None:
    path, whole = saved(tmp_path), trained()["model"].qkv.weight
    names = ["qkv.weight", "qkv.bias"]
    moments = [f"model.{name}.{m}" for name in names for m in ("exp_avg", "exp_avg_sq")]
    stored = {f"model.{name}" for name in names} | {f"optim.state.{name}" for name in moments}
    assert pieces_in(path) == dict.fromkeys(stored, (0, (8, 4, 4)))
    dc.copy(path, tmp_path / "copy")
    dc.reshard(path, tmp_path / "even", world_size=3)
    dc.reshard(path, tmp_path / "fused", sharding=fused(4))
    dc.reshard(path, tmp_path / "part", world_size=2, include="model.*")
    dc.average([path, tmp_path / "fused"], to=tmp_path / "mean", include="*")
    for name in ("copy", "even", "fused", "part", "mean"):
        in_it = {fqn for fqn in stored if name != "part" or fqn.startswith("model.")}
        assert pieces_in(tmp_path / name) == dict.fromkeys(in_it, (0, (8, 4, 4))), name
        assert dc.verify(tmp_path / name).ok
        with dc.open(tmp_path / name) as checkpoint:
            assert torch.equal(checkpoint["model.qkv.weight"][...].torch(), whole)
    assert dc.diff(path, tmp_path / "fused", values=True).same
    dc.strip(tmp_path / "copy", "optim")
    assert pieces_in(tmp_path / "copy").keys() == {f"model.{name}" for name in names}


def test_what_a_save_carries_over_stays_fused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    states = [{"model": {"norm": {"weight": torch.zeros(3)}}} for _ in range(2)]
    report = load_on_threads(LocalStorage(), states, path, include="model.norm.weight")
    target = str(tmp_path / "next")
    save_on_threads(LocalStorage(), states, target, carry_over=report)
    assert pieces_in(target) == pieces_in(path)


# --- what is refused -------------------------------------------------------------------------


def test_parts_that_the_pieces_do_not_explain_are_refused(tmp_path: Path) -> None:
    def save(parts: list[int], sizes: list[int]) -> None:
        states = [{"model": {"qkv": {"weight": torch.zeros(n, 2)}}} for n in parts]
        save_on_threads(MemoryStorage(), states, sharding=fused(2, sizes))

    save([4, 2], [3, 3])  # as torch.chunk
    save([3, 1], [1, 1, 2])
    with pytest.raises(ValueError, match=r"qkv\.weight: local shape \(3, 2\) on ranks 0-1"):
        save([3, 3], [3, 3])
    with pytest.raises(ValueError, match=r"local shape \(5, 2\) .*rank 0 has \[2, 2\]: give the"):
        save([5, 3], [4, 4])
    with pytest.raises(ValueError, match=r"qkv\.weight: local shape \(1, 2\) on rank 1"):
        save([2, 1], [1, 1])  # the second rank has nothing of either


def test_pieces_of_another_size_than_the_saved_tensor_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    states = [on_rank(trained(), rank, 2) for rank in range(2)]
    before = [state["model"].qkv.weight.clone() for state in states]
    with pytest.raises(dc.IncompatibleError, match=r"qkv\.weight: .*\[8, 4\] in the rule are 12"):
        load_on_threads(LocalStorage(), states, path, sharding=fused(2, [8, 4]))
    for state, weight in zip(states, before, strict=True):
        assert torch.equal(state["model"].qkv.weight, weight)
    with pytest.raises(ValueError, match=r"qkv\.weight: the pieces \[8, 4\] in the rule are 12"):
        dc.reshard(path, tmp_path / "new", sharding=fused(2, [8, 4]))
    assert not (tmp_path / "new").exists()


def test_a_plain_rule_for_a_tensor_that_was_saved_with_pieces_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    states = [on_rank(trained(), rank, 2) for rank in range(2)]
    sources: list[Any] = [path, {"model": path, "optim": path}]
    for source in sources:
        with pytest.raises(dc.IncompatibleError) as caught:
            load_on_threads(LocalStorage(), states, source, sharding=plain(2))
        text = str(caught.value)
        assert 'give the rule "pieces": [8, 4, 4], or [16] if the ranks have plain parts' in text
        assert "model.qkv.bias" in text
    alone = blank(trained())
    dc.load(alone, path, sharding=plain(1))  # one rank has all of each piece
    assert_equal(alone, trained())


def test_a_checkpoint_of_a_plain_rule_says_what_is_assumed_and_is_repaired(tmp_path: Path) -> None:
    path, whole = saved(tmp_path, 2, sharding=plain(2)), trained()
    states = [blank(on_rank(whole, rank, 4)) for rank in range(4)]
    report = load_on_threads(LocalStorage(), states, path, sharding=fused(4))
    assert "model.qkv.weight, model.qkv.bias: stored in parts" in report.assumed[0]
    assert "load with that rule on the number of ranks that saved" in report.assumed[0]
    # The repair, on the ranks that saved:
    states = [blank(on_rank(whole, rank, 2)) for rank in range(2)]
    load_on_threads(LocalStorage(), states, path, sharding=plain(2))
    save_on_threads(LocalStorage(), states, str(tmp_path / "good"), sharding=fused(2))
    alone = blank(trained())
    assert dc.load(alone, tmp_path / "good").assumed == ()
    assert_equal(alone, whole)


def test_parts_of_a_single_piece_are_taken_without_an_assumption(tmp_path: Path) -> None:
    path, states = saved(tmp_path, 2, sharding=plain(2)), [on_rank(trained(), r, 2) for r in (0, 1)]
    report = load_on_threads(LocalStorage(), states, path, sharding=fused(2, [16]))
    assert report.assumed == ()


def test_whole_tensors_are_taken_without_an_assumption(tmp_path: Path) -> None:
    path, whole = str(tmp_path / "ck"), trained()
    dc.save(whole, path)
    states = [blank(on_rank(whole, rank, 2)) for rank in range(2)]
    report = load_on_threads(LocalStorage(), states, path, sharding=fused(2))
    assert report.assumed == ()
    for rank, state in enumerate(states):
        assert_equal(state, on_rank(whole, rank, 2))
