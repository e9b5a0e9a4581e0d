"""The option `replicas`: rules for copies of a name that differ between ranks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from dist_ckpt.core.planning.name_selection import Selection

# The copy of the lowest rank that has it, the mean of all copies, or each rank's own copy.
ReplicaRule = Literal["rank0", "mean", "per_rank"]

# The dtypes that have a mean.
MEAN_DTYPES = frozenset(
    {
        *("float64", "float32", "float16", "bfloat16"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    }
)


@dataclass(frozen=True, slots=True)
class ReplicaRules:
    """Rules by pattern. The first pattern that matches a name, or a name above it, decides."""

    rules: tuple[tuple[Selection, ReplicaRule], ...] = ()

    def __str__(self) -> str:
        """Return the rules as an option of a call, or "" if there are none."""
        texts = [f"{pattern!r}: {rule!r}" for pattern, rule in self.patterns()]
        return f"replicas={{{', '.join(texts)}}}" if texts else ""

    def patterns(self) -> list[tuple[str, ReplicaRule]]:
        """Return the patterns with their rules."""
        return [(pattern, rule) for chosen, rule in self.rules for pattern in chosen.include or ()]

    def find(self, name: str) -> ReplicaRule | None:
        """Return the rule of a name; None if no pattern matches."""
        return next((rule for chosen, rule in self.rules if name in chosen), None)

    def pattern_problems(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the problem of each pattern that matches no name."""
        names = [*names]
        return tuple(
            problem.replace("include", "replicas", 1)
            for chosen, _ in self.rules
            for problem in chosen.pattern_problems(names)
        )


def parse_replicas(option: Mapping[str, str] | None) -> ReplicaRules:
    """Check the option `replicas`. Raises TypeError or ValueError."""
    if option is not None and not isinstance(option, Mapping):
        raise TypeError(
            f'replicas={option!r}: give a mapping from patterns to "rank0", "mean" or "per_rank"'
        )
    rules: list[tuple[Selection, ReplicaRule]] = []
    known: tuple[ReplicaRule, ...] = get_args(ReplicaRule)
    for pattern, rule in (option or {}).items():
        if not isinstance(pattern, str) or not pattern:
            raise TypeError(f"replicas has the pattern {pattern!r}: give a glob on names")
        if rule not in known:
            raise ValueError(
                f'replicas has {pattern!r}: {rule!r}: give "rank0", "mean" or "per_rank"'
            )
        rules.append((Selection((pattern,)), known[known.index(rule)]))
    return ReplicaRules(tuple(rules))
