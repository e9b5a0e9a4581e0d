"""The rules of `rename` that have operations: tensors that are made of saved ones. Pure.

    {"h.{n}.attn.c_attn.weight": [dc.Transpose(), "layers.{n}.qkv.weight"]}
    {("e.{e}.gate", "e.{e}.up"): [dc.Concatenate(), dc.Stack("e"), "experts.gate_up"]}

The state of an optimizer moves with its parameter: entries of the parameter's shape get the same
operations. Scalars, such as the step count, must be equal, and one of them is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, partial
from math import prod

from dist_ckpt.core.format.geometry import Shape
from dist_ckpt.core.format.index.index import JOINED, Catalog
from dist_ckpt.core.planning.name_selection import names_above
from dist_ckpt.core.planning.tensor_operations import (
    Concatenate,
    DerivedTensor,
    Operation,
    Split,
    Stack,
    Transpose,
    Unstack,
    concatenate,
    stack,
)
from dist_ckpt.core.planning.weight_scales import WeightScales
from dist_ckpt.core.state.binding.sources.name_patterns import NamePattern, NameTemplate, is_star
from dist_ckpt.core.state.tree.containers import RECORD, child_name
from dist_ckpt.core.state.tree.elementwise_keys import elementwise_keys

STATE_REMEDY = "exclude the optimizer from the load, or drop it with a rule that maps it to None"

# The text of each wildcard of a rule, in the order of their names.
_Values = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class OperationRule:
    """One rule: the names of its sources, its operations in order, and its new names."""

    label: str
    patterns: tuple[NamePattern, ...]
    operations: tuple[Operation, ...]
    targets: tuple[NameTemplate, ...]

    @staticmethod
    def parse(names: object, value: object) -> OperationRule:
        """Check a rule. Raises TypeError or ValueError."""
        label = f"rename has {names!r}: {value!r}"
        sources = names if isinstance(names, tuple) else (names,)
        if not isinstance(value, list | tuple) or not value:
            raise TypeError(f"{label}: give a list of operations that ends with the new name")
        *operations, last = value
        targets = last if isinstance(last, list | tuple) else (last,)
        if not all(isinstance(name, str) and name for name in (*sources, *targets)):
            raise TypeError(
                f"{label}: give saved names, and a list of operations that ends with the new name, "
                "or with a tuple of new names"
            )
        if not sources or not targets:
            raise ValueError(f"{label}: give at least one saved and one new name")
        for operation in operations:
            _check_operation(operation, label)
        rule = OperationRule(
            f"rename: {names!r}",
            tuple(NamePattern.parse(name, label) for name in sources),
            tuple(operations),
            tuple(NameTemplate.parse(name, label) for name in targets),
        )
        rule._check_counts(label)
        rule._check_wildcards(label)
        return rule

    def _check_counts(self, label: str) -> None:
        count = len(self.patterns)
        for operation in self.operations:
            match operation:
                case Concatenate():
                    count = 1
                case Split():
                    if count > 1:
                        raise ValueError(f"{label}: Split takes one tensor: Concatenate them first")
                    count = len(operation.sizes or self.targets)
                case _:
                    pass
        if count != len(self.targets):
            raise ValueError(
                f"{label}: the operations make {count} tensors, and there are "
                f"{len(self.targets)} new names: give a name for each, or use Concatenate or Split"
            )

    def _check_wildcards(self, label: str) -> None:
        first, *further = (frozenset(p.template.wildcards) for p in self.patterns)
        if any(wildcards != first for wildcards in further):
            raise ValueError(f"{label}: give all saved names the same wildcards")
        known = set(first)
        for operation in self.operations:
            if isinstance(operation, Stack):
                if operation.over not in known:
                    raise ValueError(f"{label}: the saved name has no {{{operation.over}}}")
                known.remove(operation.over)
            elif isinstance(operation, Unstack):
                if operation.over in known:
                    raise ValueError(f"{label}: {{{operation.over}}} is already in the saved name")
                known.add(operation.over)
        for target in self.targets:
            if wrong := sorted(known.symmetric_difference(target.wildcards)):
                text = "`*`" if is_star(wrong[0]) else f"{{{wrong[0]}}}"
                raise ValueError(f"{label}: the new name must have each wildcard, but see {text}")

    def apply(self, tables: Sequence[Mapping[_Values, DerivedTensor]]) -> dict[str, DerivedTensor]:
        """Return the new tensors by name, made of the tensors of each saved name.

        ValueError if one is missing, or if the operations do not fit their shapes.
        """
        current = {
            values: [table[values] for table in tables] for values in self._common_values(tables)
        }
        for operation in self.operations:
            current = self._apply_one(operation, current)
        made: dict[str, DerivedTensor] = {}
        for values, tensors in current.items():
            for target, tensor in zip(self.targets, tensors, strict=True):
                if (name := target.fill(dict(values))) in made:
                    raise ValueError(f"{name!r} would be made twice: change the new name")
                made[name] = tensor
        return made

    def _common_values(self, tables: Sequence[Mapping[_Values, DerivedTensor]]) -> list[_Values]:
        all_values = dict.fromkeys(values for table in tables for values in table)
        for pattern, table in zip(self.patterns, tables, strict=True):
            for values in all_values:
                if values not in table:
                    raise ValueError(f"{pattern.template.fill(dict(values))!r} is not saved")
        return list(all_values)

    def _apply_one(
        self, operation: Operation, current: Mapping[_Values, list[DerivedTensor]]
    ) -> dict[_Values, list[DerivedTensor]]:
        match operation:
            case Stack():
                return self._stack(operation, current)
            case Unstack():
                return {
                    _with(values, operation.over, str(index)): [*slices]
                    for values, tensors in current.items()
                    for index, slices in enumerate(_unstack_all(tensors, operation.dim))
                }
            case Transpose():
                dims = operation.dim0, operation.dim1
                return {v: [t.transpose(*dims) for t in tensors] for v, tensors in current.items()}
            case Concatenate():
                return {v: [concatenate(ts, operation.dim)] for v, ts in current.items()}
            case Split():
                return {v: self._split(operation, tensors[0]) for v, tensors in current.items()}

    def _split(self, operation: Split, tensor: DerivedTensor) -> list[DerivedTensor]:
        if operation.sizes is None:
            return tensor.split_evenly(operation.dim, len(self.targets))
        return tensor.split(operation.dim, operation.sizes)

    def _stack(
        self, operation: Stack, current: Mapping[_Values, list[DerivedTensor]]
    ) -> dict[_Values, list[DerivedTensor]]:
        groups: dict[_Values, dict[int, list[DerivedTensor]]] = {}
        for values, tensors in current.items():
            number = dict(values)[operation.over]
            if not number.isdecimal() or number != str(int(number)):
                raise ValueError(f"{{{operation.over}}} is {number!r}, which is not a number")
            rest = tuple(pair for pair in values if pair[0] != operation.over)
            groups.setdefault(rest, {})[int(number)] = tensors
        for rest, by_number in groups.items():
            for index in range(max(by_number)):
                if index not in by_number:
                    absent = self.patterns[0].template.fill(
                        {**dict(rest), **_numbers_of(self.operations, str(index), operation)}
                    )
                    raise ValueError(f"{absent!r} is not saved")
        return {
            rest: [
                stack([by_number[number][position] for number in sorted(by_number)], operation.dim)
                for position in range(len(by_number[0]))
            ]
            for rest, by_number in groups.items()
        }


def _numbers_of(operations: Sequence[Operation], number: str, operation: Stack) -> dict[str, str]:
    """Return a number for a stacked wildcard, and "*" for those that were stacked before it."""
    before = operations[: operations.index(operation)]
    stacked = {op.over: "*" for op in before if isinstance(op, Stack)}
    return {**stacked, operation.over: number}


def _unstack_all(tensors: Sequence[DerivedTensor], dim: int) -> Iterator[tuple[DerivedTensor, ...]]:
    slices = [tensor.unstack(dim) for tensor in tensors]
    if len({len(items) for items in slices}) > 1:
        raise ValueError(f"the sizes of dimension {dim} differ: {[len(items) for items in slices]}")
    return zip(*slices, strict=True)


def _with(values: _Values, name: str, text: str) -> _Values:
    return tuple(sorted((*values, (name, text))))


def _check_operation(operation: object, label: str) -> None:
    if not isinstance(operation, Operation):
        raise TypeError(
            f"{label}: {operation!r} is not an operation: give dc.Stack, dc.Unstack, dc.Transpose, "
            "dc.Concatenate or dc.Split"
        )
    for attribute in fields(operation):
        value = getattr(operation, attribute.name)
        if attribute.name == "over":
            if not isinstance(value, str) or not value.isidentifier():
                raise ValueError(f"{label}: over={value!r}: give the word of a wildcard")
        elif attribute.name == "sizes":
            if value is not None and not (value and all(type(n) is int and n > 0 for n in value)):
                raise ValueError(f"{label}: sizes={value!r}: give positive whole numbers")
        elif type(value) is not int:
            raise TypeError(f"{label}: {attribute.name}={value!r}: give a whole number")


# The operations in a JSON file, by their names, and the fields that the value of a name has.
_IN_JSON: Mapping[str, tuple[Callable[..., object], tuple[str, ...]]] = {
    "stack": (Stack, ("over",)),
    "unstack": (Unstack, ("over",)),
    "transpose": (Transpose, ("dim0", "dim1")),
    "concatenate": (Concatenate, ("dim",)),
    "split": (Split, ("dim",)),
}


def operation_from_json(document: object) -> object:
    """Return the operation of {"stack": "e", "dim": 1}, {"transpose": [0, 1]} or "split".

    ValueError for another document.
    """
    given = {document: ()} if isinstance(document, str) else document
    error = ValueError(
        f'rename has {document!r}: give an operation such as {{"stack": "e", "dim": 0}}, '
        '{"unstack": "e"}, "transpose", {"concatenate": 0} or {"split": 0, "sizes": [2, 1]}'
    )
    if not isinstance(given, dict) or not given:
        raise error
    (name, value), *options = given.items()
    values = value if isinstance(value, list | tuple) else (value,)
    try:
        make, names = _IN_JSON[name]
        fields_given = dict(zip(names[: len(values)], values, strict=True))
        further = {key: tuple(v) if isinstance(v, list) else v for key, v in options}
        return make(**fields_given, **further)
    except (KeyError, TypeError, ValueError):
        raise error from None


# --- the tensors of a checkpoint -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SavedStates:
    """The optimizer state of each parameter.

    `states` maps the name of a parameter's state to the name above it (`optim.state`) and the
    parameter's name. `groups` maps it to its parameter group. `new_stems` has the new names of
    those names above, if a rule without operations renames them. `uncut` is that of `ObjectsFile`.
    """

    states: Mapping[str, tuple[str, str]]
    groups: Mapping[str, str]
    new_stems: Mapping[str, str]
    uncut: Mapping[str, str]


@dataclass(slots=True)
class Derivation:
    """What rules with operations make of a checkpoint.

    - `tensors`: the new tensors by name. Their sources are names in the catalog.
    - `copies`: new names of scalars and values, with their names in the catalog.
    - `equal`: for each of these that has several sources, all of them. They must be equal.
    - `params`: the new names of a parameter's state in its group, by its saved name.
    - `rules`: the rule of each saved name that is used.
    - `state_problems`: the new name of a parameter's state that cannot be made, and why.
    """

    tensors: dict[str, DerivedTensor] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)
    equal: dict[str, tuple[str, ...]] = field(default_factory=dict)
    params: dict[str, list[str]] = field(default_factory=dict)
    rules: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    state_problems: list[tuple[str, str]] = field(default_factory=list)


def derive_tensors(
    rules: Sequence[OperationRule], catalog: Catalog, saved: SavedStates
) -> Derivation:
    """Apply the rules to a checkpoint. All problems are listed."""
    derivation = Derivation()
    if not rules:
        return derivation
    stored = {**{fqn: fqn for fqn in catalog.tensors}, **catalog.aliases}
    state_names, scales = (
        _StateNames.of(catalog, saved),
        WeightScales(catalog.tensors, catalog.aliases),
    )
    for rule in rules:
        match = partial(_match, rule, catalog=catalog, scales=scales, stored=stored)
        tables = [match(pattern, derivation=derivation) for pattern in rule.patterns]
        if derivation.problems:
            continue
        try:
            made = rule.apply(tables)
        except ValueError as error:
            derivation.problems.append(f"{rule.label}: {error}")
            continue
        for name, tensor in made.items():
            if name in derivation.tensors:
                derivation.problems.append(
                    f"{rule.label}: another rule makes {name!r} too: remove one of the two"
                )
            derivation.tensors[name] = tensor.map_sources(stored.__getitem__)
            derivation.state_problems += (
                (state, f"{rule.label}: {problem}: {STATE_REMEDY}")
                for state, problem in state_names.derive(name, tensor, derivation)
            )
    return derivation


def _match(
    rule: OperationRule,
    pattern: NamePattern,
    *,
    catalog: Catalog,
    scales: WeightScales,
    stored: Mapping[str, str],
    derivation: Derivation,
) -> dict[_Values, DerivedTensor]:
    """Return the tensors that a pattern matches, by the texts of its wildcards."""
    table: dict[_Values, DerivedTensor] = {}
    for name, fqn in stored.items():
        if (values := pattern.match(name)) is None:
            continue
        if (other := derivation.rules.setdefault(name, rule.label)) != rule.label:
            derivation.problems.append(
                f"{rule.label}: {name!r} is also matched by {other.removeprefix('rename: ')}: "
                "change the patterns so that only one matches"
            )
        record = catalog.tensors[fqn]
        if found := scales.scales_of(fqn):
            derivation.problems.append(
                f"{rule.label}: {name!r} is quantised ({record.dtype}, with the scale "
                f"{found[0]!r}): load it as it is, and convert it after the load"
            )
        table[tuple(sorted(values.items()))] = DerivedTensor.of(name, record.dtype, record.shape)
    derivation.problems += (
        f"{rule.label}: {name!r} is not saved as a tensor, so it cannot be stacked with the others"
        for name in _find_stacked_values(rule, pattern, catalog, table)
    )
    records = (n.removesuffix(f".{RECORD}") for n in catalog.values if n.endswith(f".{RECORD}"))
    quantised = [name for name in records if pattern.match(name) is not None]
    if quantised:
        derivation.problems.append(
            f"{rule.label}: {quantised[0]!r} is a tensor subclass, such as a quantised tensor. "
            "Operations are for plain tensors: load it as it is, and convert it after the load"
        )
    elif not table:
        derivation.problems.append(
            f"{rule.label}: {pattern.text!r} matches no saved tensor: change or remove the rule"
        )
    return table


def _find_stacked_values(
    rule: OperationRule, pattern: NamePattern, catalog: Catalog, table: Collection[_Values]
) -> list[str]:
    """Return the values that would be stacked with tensors of the table, if they were tensors."""
    stacked = {operation.over for operation in rule.operations if isinstance(operation, Stack)}

    def rest(values: Mapping[str, str]) -> frozenset[tuple[str, str]]:
        return frozenset(item for item in values.items() if item[0] not in stacked)

    groups = {rest(dict(values)) for values in table} if stacked else set()
    return [
        name
        for name in ((*catalog.values, *catalog.per_rank) if groups else ())
        if (values := pattern.match(name)) is not None
        and rest(values) in groups
        and all(values[word].isdecimal() for word in stacked)
    ]


# --- the state of an optimizer ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _StateNames:
    """The entries of each parameter's state: `entries[state]` has the last parts of their names."""

    catalog: Catalog
    saved: SavedStates
    stems: Mapping[str, list[str]]  # the names above the states of a parameter
    entries: Mapping[str, list[str]]
    is_elementwise: Callable[[str, str], bool]

    @staticmethod
    def of(catalog: Catalog, saved: SavedStates) -> _StateNames:
        stems: dict[str, list[str]] = {}
        for stem, parameter in saved.states.values():
            stems.setdefault(parameter, []).append(stem)
        entries: dict[str, list[str]] = {state: [] for state in saved.states}
        for name in catalog.names:
            if (above := next(filter(entries.__contains__, names_above(name)), None)) is not None:
                entries[above].append(name[len(above) + 1 :])
        shapes: dict[tuple[str, str], list[tuple[Shape | None, Shape | None]]] = {}
        for state, keys in entries.items():
            stem, parameter = saved.states[state]
            for key in keys:
                name = _join(state, key)  # parts of single ranks never have the parameter's shape
                shape = None if saved.uncut.get(name) == JOINED else _shape(catalog, name)
                shapes.setdefault((stem, key), []).append((_shape(catalog, parameter), shape))

        @cache
        def is_elementwise(stem: str, key: str) -> bool:
            pairs = shapes[stem, key]
            if key == "step" or any(own is None or own != shape for own, shape in pairs):
                return False
            known = elementwise_keys((key, own, shape) for own, shape in pairs if own and shape)
            return known.get(key, False)

        return _StateNames(catalog, saved, stems, entries, is_elementwise)

    def derive(
        self, name: str, tensor: DerivedTensor, derivation: Derivation
    ) -> Iterator[tuple[str, str]]:
        """Add the state of a new parameter; yield the names of its state and their problems."""
        stems = (stem for p in tensor.sources for stem in self.stems.get(p, ()))
        for stem in dict.fromkeys(stems):
            new = child_name(self.saved.new_stems.get(stem, stem), name)
            for problem in self._derive_state(new, stem, (tensor, derivation)):
                yield new, problem

    def _derive_state(
        self, new: str, stem: str, made: tuple[DerivedTensor, Derivation]
    ) -> Iterator[str]:
        tensor, derivation = made
        states = {parameter: child_name(stem, parameter) for parameter in tensor.sources}
        for state in states.values():
            derivation.rules.setdefault(state, "")
            derivation.params.setdefault(state, []).append(new)
        if lacking := [p for p, state in states.items() if state not in self.saved.states]:
            yield f"{lacking[0]!r} is in no group of {stem!r}, but other parts of {new!r} are"
            return
        if len({self.saved.groups[state] for state in states.values()}) > 1:
            yield f"the parts of {new!r} are in several parameter groups of {stem!r}"
        yield from self._derive_entries(new, stem, states, made)

    def _derive_entries(
        self, new: str, stem: str, states: Mapping[str, str], made: tuple[DerivedTensor, Derivation]
    ) -> Iterator[str]:
        tensor, derivation = made
        keys = dict.fromkeys(key for state in states.values() for key in self.entries[state])
        for key in keys:
            names = {p: _join(state, key) for p, state in states.items()}
            if lacking := [p for p, state in states.items() if key not in self.entries[state]]:
                yield f"{names[lacking[0]]!r} is not saved, but other parts of {new!r} have it"
                continue
            full = _join(new, key)
            tensors = self.catalog.tensors
            fqns = {p: self.catalog.aliases.get(n, n) for p, n in names.items()}
            dtypes = {p: tensors[fqn].dtype for p, fqn in fqns.items() if fqn in tensors}
            if key.endswith(RECORD):
                yield f"{full!r} would be made of quantised tensors"
            elif len(dtypes) == len(fqns) and self.is_elementwise(stem, key):
                if len({*dtypes.values()}) > 1:
                    yield f"{full!r} would have parts of several dtypes"
                moved = tensor.map_sources(fqns.__getitem__)
                first = next(iter(dtypes.values()))
                derivation.tensors[full] = DerivedTensor(first, moved.shape, moved.pieces)
            elif all(self._is_scalar(fqn) for fqn in fqns.values()):
                derivation.copies[full] = next(iter(fqns.values()))
                if len(fqns) > 1:
                    derivation.equal[full] = tuple(fqns.values())
            else:
                shape = _shape(self.catalog, next(iter(names.values())))
                yield (
                    f"{next(iter(names.values()))!r} has shape {shape}, which does not follow the "
                    f"elements of its parameter"
                )

    def _is_scalar(self, fqn: str) -> bool:
        if (record := self.catalog.tensors.get(fqn)) is not None:
            return prod(record.shape) == 1
        return fqn in self.catalog.values


def _join(above: str, key: str) -> str:
    return f"{above}.{key}" if key else above  # state without tensors is one value


def _shape(catalog: Catalog, name: str) -> Shape | None:
    record = catalog.tensors.get(catalog.aliases.get(name, name))
    return None if record is None else record.shape
