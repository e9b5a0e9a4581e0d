"""What the adapters know of the place in the data; no framework is needed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import dist_ckpt as dc
from dist_ckpt import integrations
from dist_ckpt.integrations.adapter_state import capture_sources, set_sources
from dist_ckpt.integrations.lightning.fit_position import FitPosition


def test_an_order_that_a_generator_draws_is_drawn_again() -> None:
    generator = torch.Generator().manual_seed(3)
    loader: Any = DataLoader(range(32), shuffle=True, generator=generator)  # type: ignore[arg-type]
    list(loader)
    sources = capture_sources([loader])
    drawn = [int(one) for one in loader]
    assert [int(one) for one in loader] != drawn
    set_sources([loader], sources)
    assert [int(one) for one in loader] == drawn


def test_other_sources_of_an_order_are_refused() -> None:
    plain: Any = DataLoader(range(4), shuffle=True)  # type: ignore[arg-type]
    own: Any = DataLoader(range(4), shuffle=True, generator=torch.Generator())  # type: ignore[arg-type]
    with pytest.raises(dc.IncompatibleError, match=r"and 1 generators, and now from .* and 0 gene"):
        set_sources([plain], capture_sources([own]))


def test_a_seed_that_the_sampler_drew_is_part_of_the_order() -> None:
    loader: Any = DataLoader(range(4), shuffle=True)  # type: ignore[arg-type]
    loader.sampler.initial_seed = 7
    sources = capture_sources([loader])
    loader.sampler.initial_seed = 8
    set_sources([loader], sources)
    assert loader.sampler.initial_seed == 7


def test_a_fit_on_other_ranks_is_refused_in_the_midst_of_an_epoch() -> None:
    counts = {"ready": 2, "started": 2, "processed": 1, "completed": 1}
    whole = {"world_size": 2, "batches": 3, "num_batches": 6}
    loops = {"epoch_progress": {"total": dict(counts), "current": dict(counts)}}
    position = FitPosition(SimpleNamespace(world_size=3), lambda *, is_over: None)
    with pytest.raises(dc.IncompatibleError, match=r"after batch 3 .* 2 ranks, but 3 train now"):
        position.resume_from(whole, None, loops, can_restart=False)
    assert loops["epoch_progress"]["total"] == counts
    position.resume_from(whole, None, loops, can_restart=True)
    assert set(loops["epoch_progress"]["total"].values()) == {1}


@pytest.mark.parametrize("framework", ["lightning", "accelerate", "transformers"])
def test_private_names_of_a_framework_are_those_that_are_looked_for_first(framework: str) -> None:
    room = Path(integrations.__path__[0])
    files = sorted({*room.glob(f"{framework}*.py"), *room.glob(f"{framework}/*.py")})
    trees = [ast.parse(path.read_text()) for path in files]
    needed = {name for tree in trees for name in private_names_needed(tree)}
    assert needed
    assert {name for tree in trees for name in private_names_used(tree)} == needed


def private_names_used(tree: ast.Module) -> Iterator[str]:
    """Yield the private names that a module takes of what is not its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) != "self":
            yield from re.findall(r"^_[a-z]\w*", node.attr)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "self._patch":
            yield from re.findall(r"^_[a-z]\w*", ast.literal_eval(node.args[1]))


def private_names_needed(tree: ast.Module) -> Iterator[str]:
    """Yield the private names that a module looks for: in its tables, or as what may be missing."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            yield from re.findall(r"^'(_[a-z]\w*)'$", ast.unparse(node.args[1]))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("NEEDED"):
            texts = (one.value for one in ast.walk(node) if isinstance(one, ast.Constant))
            for text in texts:
                yield from re.findall(r"\b_[a-z]\w*", str(text))
