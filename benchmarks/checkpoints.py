"""The scenarios that save and load."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.contenders import Contender, DistCkpt
from benchmarks.peers import PEERS
from benchmarks.pool import Pools
from benchmarks.scenario import Measure, Scenario, Settings
from benchmarks.trials import Case, Load, run_case
from benchmarks.workload import Placement, Spec

CONTENDERS: tuple[Contender, ...] = (DistCkpt(), *PEERS)

LARGE_NBYTES = 32 << 20
SMALL_NBYTES = 16 << 10


def scenarios() -> list[Scenario]:
    """Return all scenarios that move bytes."""
    return [
        Scenario("large", "few large tensors, 1 rank: save, load warm and cold", _large),
        Scenario("small", "thousands of 16 KiB tensors, 1 rank: save, load warm and cold", _small),
        Scenario("gpt", "a GPT with AdamW, 1 rank: save, load warm and cold", _gpt),
        Scenario(
            "ranks", "1, 2, 4 ranks over gloo: row-sharded, row to column, replicated", _ranks
        ),
    ]


def run_cases(
    cases: Sequence[Case], settings: Settings, contenders: Sequence[Contender] = CONTENDERS
) -> Iterator[Measure]:
    """Run cases with real ranks, one after the other."""
    taking_part = [contender for contender in contenders if settings.takes(contender.name)]
    with Pools(settings.folder, taking_part, deadline_s=settings.deadline_s) as pools:
        for case in cases:
            if any(settings.measures(action) for action in case.actions()):
                yield from run_case(case, settings, pools, taking_part)


def _large(settings: Settings) -> Iterator[Measure]:
    spec = large_tensors(settings.nbytes)
    tensors = f"{spec.count} tensors of {_size(spec.shape[0] * spec.shape[1] * 4)}"
    yield from run_cases([_of_one_rank("large", tensors, spec)], settings)


def _small(settings: Settings) -> Iterator[Measure]:
    spec = Spec(settings.num_small, (64, SMALL_NBYTES // 256))
    case = _of_one_rank("small", f"{spec.count:,} tensors of 16 KiB", spec)
    yield from run_cases([case], settings)


def _gpt(settings: Settings) -> Iterator[Measure]:
    width = 128 if settings.quick else 768
    # A block has 12 width^2 parameters; with AdamW each is three numbers of four bytes.
    num_blocks = max(2, round(settings.nbytes / (144 * width**2)))
    spec = Spec(num_blocks, width=width)
    case = _of_one_rank("gpt", f"GPT of {num_blocks} blocks, width {width}, with AdamW", spec)
    yield from run_cases([case], settings)


def _of_one_rank(name: str, what: str, spec: Spec) -> Case:
    return Case(
        scenario=name,
        title=f"save {what}",
        num_ranks=1,
        spec=spec,
        loads=(
            Load("load", f"load {what}, warm", 1, spec),
            Load("load-cold", f"load {what}, cold", 1, spec, cold=True),
        ),
    )


def _ranks(settings: Settings) -> Iterator[Measure]:
    nbytes = settings.nbytes // 2

    def cut(placement: Placement | None) -> Spec:
        return large_tensors(nbytes, placement)

    row, column, replicated = cut("row"), cut("column"), cut("replicated")
    cases = [
        Case(
            "ranks",
            "save on 1 rank",
            1,
            cut(None),
            _loads("1-to-1", "load on 1 rank", 1, cut(None)),
            save_action="save-1",
        ),
        Case(
            "ranks",
            "save row-sharded on 2 ranks",
            2,
            row,
            _loads("2-to-4", "saved row-sharded on 2 ranks, load row-sharded on 4", 4, row),
            save_action="save-2",
        ),
        Case(
            "ranks",
            "save row-sharded on 4 ranks",
            4,
            row,
            (
                *_loads("4-to-4", "saved row-sharded on 4 ranks, load row-sharded on 4", 4, row),
                *_loads("4-to-2", "saved row-sharded on 4 ranks, load row-sharded on 2", 2, row),
                *_loads(
                    "row-to-column", "saved row-sharded, load column-sharded, 4 ranks", 4, column
                ),
            ),
            save_action="save-4",
        ),
        Case(
            "ranks",
            "save replicated on 4 ranks",
            4,
            replicated,
            _loads("replicated", "load replicated on 4 ranks", 4, replicated),
            save_action="save-replicated",
        ),
    ]
    yield from run_cases(cases, settings)


def _loads(action: str, title: str, num_ranks: int, spec: Spec) -> tuple[Load, ...]:
    return (
        Load(action, f"{title}, warm", num_ranks, spec),
        Load(f"{action}-cold", f"{title}, cold", num_ranks, spec, cold=True),
    )


def large_tensors(nbytes: int, placement: Placement | None = None) -> Spec:
    """Return a state of about `nbytes` in tensors of 32 MiB, or of a quarter if that is less."""
    each = min(LARGE_NBYTES, nbytes // 4)
    num_rows = 64
    return Spec(max(1, nbytes // each), (num_rows, each // 4 // num_rows), placement=placement)


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.0f} MiB"
