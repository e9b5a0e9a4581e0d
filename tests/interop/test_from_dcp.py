"""The table of docs/from-dcp.md is what the scenarios of DCP's tests really come to.

Each scenario runs once with DCP alone, which shows that it asks for what DCP does, once with our
adapter below DCP, and once with `dc.save` and `dc.load`. Those of four ranks run one after the
other in one start of them: torch plans an operation of DTensors once a process. Of those the plain
run takes each fourth, through the adapter or without it, others each day; `--long` takes all.
"""

from __future__ import annotations

import inspect
import os
import re
import warnings
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from types import ModuleType

import pytest

# Torch imports it, for seconds, when a process makes its first DTensor.
import torch.distributed as dist

import dcp_scenarios_alone
import dcp_scenarios_ranks
import dcp_scenarios_trained
from dcp_ways import WAYS, Way
from long_mode import IS_LONG, sample
from ranks import run_ranks
from torch_can import average_over_gloo, wrap_several_boxes, write_safetensors_by_dcp

pytestmark = [
    # It says so on each call that there is one process; and its views of storages.
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

# DCP alone changes only with torch: that is not for every change.
BY = [pytest.param("dcp", marks=pytest.mark.long), "adapter", "dist_ckpt"]

# What torch itself must do there, and 2.7 does not.
NEEDS: dict[str, Callable[[], bool]] = {
    "several_pieces_of_one_rank": wrap_several_boxes,
    "trained_under_every_wrapper": average_over_gloo,
    "sharded_in_groups": average_over_gloo,
    "from_groups_to_all": average_over_gloo,
    "a_sharded_model_in_another_group": average_over_gloo,
    "two_dimensions_to_others": average_over_gloo,
    "all_that_safetensors_hold": write_safetensors_by_dcp,
}

# What takes a minute where nothing else runs.
RANKS_S = 1200.0

Scenario = Callable[[Way, str], None]

PAGE = Path(__file__).parents[2] / "docs" / "from-dcp.md"
ROW = r"^\| (\S+\.py) \| `(\w+)`(?:, [^|]+)? \| `(\w+)` \| ([^|]+) \| ([^|]+) \|$"
ROWS = re.findall(ROW, PAGE.read_text(), flags=re.M)

# What each scenario must come to: "passed", or "refused: " and a part of the message.
EXPECTED = {
    (scenario, way): cell
    for _, _, scenario, adapter, ours in ROWS
    for way, cell in (("dcp", "passed"), ("adapter", adapter), ("dist_ckpt", ours))
}


def scenarios_of(module: ModuleType) -> dict[str, Scenario]:
    """Return the functions of a module that take a way and a path."""
    return {
        name: function
        for name, function in vars(module).items()
        if inspect.isfunction(function)
        and function.__module__ == module.__name__
        and [*inspect.signature(function).parameters] == ["way", "path"]
    }


ALONE = scenarios_of(dcp_scenarios_alone)
TOGETHER = {**scenarios_of(dcp_scenarios_ranks), **scenarios_of(dcp_scenarios_trained)}

# The scenarios of four ranks that this run takes, each with its way.
TASKS = [*sample([*product(TOGETHER, [way for way in WAYS if IS_LONG or way != "dcp"])], 8)]
ON_FOUR_RANKS = [
    pytest.param(*task, marks=() if task in TASKS else pytest.mark.long)
    for task in product(TOGETHER, WAYS)
]


def test_every_scenario_has_a_row_and_every_row_a_scenario() -> None:
    assert sorted(scenario for _, _, scenario, _, _ in ROWS) == sorted([*ALONE, *TOGETHER])
    assert not set(ALONE) & set(TOGETHER)


def test_no_test_of_dcp_has_two_rows_for_the_same() -> None:
    lines = re.findall(r"^\| \S+\.py \| `\w+`.*$", PAGE.read_text(), flags=re.M)
    assert len(lines) == len(ROWS)
    assert all(cell == "passed" or cell.startswith("refused: ") for row in ROWS for cell in row[3:])


def outcome_of(call: Scenario, way: str, path: str) -> str:
    """Return "passed", or what was raised; an assertion is not a refusal."""
    os.makedirs(path, exist_ok=True)
    try:
        call(WAYS[way], path)
    except AssertionError as error:
        return f"failed: {error!r}"
    except BaseException as error:  # noqa: BLE001 - those of DCP are no Exception
        return f"refused: {type(error).__name__}: {error}"
    return "passed"


def skip_what_torch_lacks(scenario: str) -> None:
    if scenario in NEEDS and not NEEDS[scenario]():
        pytest.skip("this torch cannot do it, whoever saves")


def check(scenario: str, way: str, outcomes: Sequence[str]) -> None:
    expected = EXPECTED[scenario, way]
    for outcome in outcomes:
        if expected == "passed":
            assert outcome == "passed"
        else:
            assert outcome.startswith("refused: ")
            assert expected.removeprefix("refused: ") in outcome


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", BY)
@pytest.mark.parametrize("scenario", ALONE)
def test_in_one_process(scenario: str, way: str, tmp_path: Path) -> None:
    skip_what_torch_lacks(scenario)
    if way == "dcp" and "safetensors" in scenario and not write_safetensors_by_dcp():
        pytest.skip("this DCP has no safetensors")
    check(scenario, way, [outcome_of(ALONE[scenario], way, f"{tmp_path}")])


def be_rank(rank: int, tasks: list[tuple[str, str]], path: str) -> dict[tuple[str, str], str]:
    """Run scenarios of several ranks, each some way; after each the ranks meet."""
    warnings.simplefilter("ignore")
    outcomes: dict[tuple[str, str], str] = {}
    for name, way in tasks:
        outcomes[name, way] = outcome_of(TOGETHER[name], way, f"{path}/{way}/{name}")
        dist.barrier()
    return outcomes


# A fixture, so that ranks which fail are not started again for each scenario.
@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], str]]:
    """Return the outcomes of the ranks, by scenario and way."""
    folder = tmp_path_factory.mktemp("scenarios")
    return run_ranks(be_rank, TASKS, f"{folder}", world_size=4, timeout_s=RANKS_S)


@pytest.mark.multi_process
@pytest.mark.timeout(RANKS_S + 60)
@pytest.mark.parametrize(("scenario", "way"), ON_FOUR_RANKS)
def test_on_four_ranks(scenario: str, way: str, of_ranks: list[dict[tuple[str, str], str]]) -> None:
    skip_what_torch_lacks(scenario)
    check(scenario, way, [one[scenario, way] for one in of_ranks])
