"""Decisions for a part of a model, or for some calls: a section of a policy file, as data.

Each condition is one row of a table, which defines reading, matching and writing. Conditions on tensors are
about the first floating-point tensor of a call, before casts.
"""

from __future__ import annotations

import fnmatch
import functools
import itertools
import re
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from . import regexes
from .calls import Call, Rule
from .decisions import Decision

# --- patterns of modules' qualified names ------------------------------------------------------


class Regexes:
    """Regular expressions for whole names."""

    def __init__(self, patterns: Sequence[str]) -> None:
        """Takes the patterns, in their order."""
        self.patterns = patterns

    def near(self, name: str) -> Iterable[int]:
        """Returns the ascending positions of all patterns that may match ``name`` or a module around it."""
        return range(len(self.patterns))

    def match_around(self, name: str) -> bool:
        """Whether a pattern matches the module of that name, or one that it is in."""
        parts = name.split(".")
        names = ["", *[".".join(parts[: count + 1]) for count in range(len(parts))]]
        return any(
            self.matches(self.patterns[at], each) for at in self.near(name) for each in names
        )

    def matching(self, names: Iterable[str]) -> set[str]:
        """Returns the patterns that match one of these names."""
        found: set[str] = set()
        for name in names:
            tried = {self.patterns[at] for at in self.near(name)}
            found |= {each for each in tried - found if self.matches(each, name)}
        return found

    @staticmethod
    def matches(pattern: str, name: str) -> bool:
        """Whether ``pattern`` matches all of ``name``."""
        return _regex_matches(pattern, name)


class Globs(Regexes):
    """Globs, each indexed by a part between dots that it requires, such as ``3`` in ``layer.3.*``."""

    def __init__(self, patterns: Sequence[str]) -> None:
        """Chooses the rarest part of each glob."""
        super().__init__(patterns)
        parts = [
            [part for part in each.split(".") if part and not _WILD & {*part}] for each in patterns
        ]
        counts = Counter(part for several in parts for part in several)
        self._by_part: dict[str, list[int]] = defaultdict(list)
        for at, several in enumerate(parts):
            self._by_part[min(several, key=counts.__getitem__, default="")].append(at)

    def near(self, name: str) -> Iterable[int]:
        """As in `Regexes`."""
        return sorted([at for part in {"", *name.split(".")} for at in self._by_part.get(part, ())])

    @staticmethod
    def matches(pattern: str, name: str) -> bool:
        """As in `Regexes`."""
        return _compiled(pattern).fullmatch(name) is not None


_WILD: Final = frozenset("*?[")


@functools.lru_cache(maxsize=1 << 16)
def _regex_matches(pattern: str, name: str) -> bool:
    return regexes.compiled(pattern).matches(name)


@functools.lru_cache(maxsize=1 << 12)
def _compiled(glob: str) -> re.Pattern[str]:
    return re.compile(fnmatch.translate(glob))


# --- conditions --------------------------------------------------------------------------------


class Condition(NamedTuple):
    """A condition that a section may have."""

    key: str  # Its name in policy files, and as an argument of `Section`
    kind: str  # The method of the reader in `files` for its value
    # Whether a call meets it. Arguments: its value, as ``patterns`` if it has some, and the call
    holds: Callable[[Any, Call], bool]
    is_placed: bool = False  # It depends on the modules that are running
    # Of adjacent rows with the same group, one must hold; ``""`` for no group
    group: str = ""
    patterns: type[Regexes] | None = None  # For patterns of qualified names: their class


def _of_first(ask: Callable[[Any, Call, int], bool]) -> Callable[[Any, Call], bool]:
    """Returns a predicate about the first floating-point tensor; False for calls without one."""

    def holds(value: Any, call: Call) -> bool:
        floating = [i for i, dtype in enumerate(call.dtypes) if dtype.is_floating_point]
        return bool(floating) and ask(value, call, floating[0])

    return holds


def _around(patterns: Regexes, call: Call) -> bool:
    return patterns.match_around(call.module)


_ROWS: Final = (
    # The call is in a module with a matching qualified name, or inside one.
    Condition("module", "texts", _around, True, "path", Globs),
    Condition("module_regex", "regexes", _around, True, "path", Regexes),
    # Class names: the call is in a module of such a class, or inside one.
    Condition(
        "module_class",
        "texts",
        lambda classes, call: not set(classes).isdisjoint(call.module_classes),
        is_placed=True,
    ),
    # The mode of the innermost module.
    Condition(
        "phase",
        "phase",
        lambda phase, call: call.training is (phase == "train"),
        is_placed=True,
    ),
    # The least number of elements, and the greatest.
    Condition("min_numel", "count", _of_first(lambda n, call, i: call.shapes[i].numel() >= n)),
    Condition("max_numel", "count", _of_first(lambda n, call, i: call.shapes[i].numel() <= n)),
    Condition("ndim", "counts", _of_first(lambda counts, call, i: len(call.shapes[i]) in counts)),
    Condition("device", "devices", _of_first(lambda types, call, i: call.devices[i].type in types)),
    Condition("dtype", "dtypes", _of_first(lambda dtypes, call, i: call.dtypes[i] in dtypes)),
)

#: Key -> condition, in the order in which policies are written.
CONDITIONS: Final[Mapping[str, Condition]] = {condition.key: condition for condition in _ROWS}


# --- sections ----------------------------------------------------------------------------------


@dataclass(frozen=True, init=False)
class Section:
    """Decisions for the calls that meet all of its conditions.

    Attributes:
        decisions: Op name -> decision.
        where: ``"policy.yaml:12"``. Not part of equality.
    """

    decisions: Mapping[str, Decision]
    _conditions: tuple[tuple[str, Any], ...]
    where: str = field(compare=False)

    def __init__(
        self, decisions: Mapping[str, Decision], *, where: str = "", **conditions: Any
    ) -> None:
        """Takes the decisions, their origin, and the conditions; None and () mean no condition."""
        for key in conditions.keys() - CONDITIONS.keys():
            raise TypeError(f"a section has no condition {key!r}")
        given = [(key, conditions.get(key)) for key in CONDITIONS]
        kept = tuple([(key, value) for key, value in given if value not in (None, ())])
        object.__setattr__(self, "decisions", types.MappingProxyType(dict(decisions)))
        object.__setattr__(self, "_conditions", kept)
        object.__setattr__(self, "where", where)

    def __hash__(self) -> int:
        return hash((frozenset(self.decisions.items()), self._conditions))

    def __reduce__(self) -> tuple[Any, ...]:
        made = functools.partial(Section, where=self.where, **dict(self._conditions))
        return made, (dict(self.decisions),)

    def with_decisions(self, decisions: Mapping[str, Decision]) -> Section:
        """Returns a section with the same conditions."""
        return Section(decisions, where=self.where, **dict(self._conditions))

    def conditions(self) -> tuple[tuple[str, Any], ...]:
        """Returns its conditions, by name."""
        return self._conditions

    @property
    def is_placed(self) -> bool:
        """Whether it depends on the modules that are running."""
        return any(CONDITIONS[key].is_placed for key, _ in self._conditions)

    def holds_for(self, call: Call) -> bool:
        """Whether ``call`` meets all conditions."""
        return all(
            any(condition.holds(value, call) for condition, value in group)
            for group in self._groups
        )

    @functools.cached_property
    def _groups(self) -> list[list[tuple[Condition, Any]]]:
        rows = [(CONDITIONS[key], value) for key, value in self._conditions]
        made = [(row, row.patterns(value) if row.patterns else value) for row, value in rows]
        groups = itertools.groupby(made, key=lambda each: each[0].group or each[0].key)
        return [[*group] for _, group in groups]

    @property
    def globs(self) -> tuple[str, ...]:
        """Globs, one of which must match the module or one around it; () for none."""
        given = dict(self._conditions)
        return () if "module_regex" in given else given.get("module", ())


@dataclass(frozen=True, slots=True)
class SectionRule:
    """A section's decision for one op, as a rule."""

    section: Section
    decision: Decision

    def __call__(self, call: Call) -> Decision | None:
        """Returns the section's decision if its conditions are met."""
        if not self.section.holds_for(call):
            return None
        return replace(self.decision, reason=str(self))

    def __str__(self) -> str:
        return self.decision.reason or self.section.where


class _ByModule:
    """Rules of adjacent sections with globs. Calls only those whose globs may match the module."""

    def __init__(self, rules: Sequence[SectionRule]) -> None:
        self._rules = rules

    def __call__(self, call: Call) -> Decision | None:
        owners, globs = self._globs
        asked = sorted({owners[at] for at in globs.near(call.module)})
        verdicts = (self._rules[owner](call) for owner in asked)
        return next((verdict for verdict in verdicts if verdict is not None), None)

    @functools.cached_property
    def _globs(self) -> tuple[list[int], Globs]:
        owned = [
            (owner, glob) for owner, rule in enumerate(self._rules) for glob in rule.section.globs
        ]
        return [owner for owner, _ in owned], Globs([glob for _, glob in owned])


def by_module(rules: Iterable[SectionRule]) -> Iterator[Rule]:
    """Yields rules equivalent to ``rules`` that call few of them for a given module."""
    for has_globs, group in itertools.groupby(rules, key=lambda rule: bool(rule.section.globs)):
        several = [*group]
        yield from [_ByModule(several)] if has_globs else several


def unmatched(sections: Iterable[Section], paths: Iterable[str]) -> list[str]:
    """Returns a message for each pattern of the sections that matches none of the qualified names."""
    paths = list(paths)
    given = [
        (key, pattern, section.where)
        for section in sections
        for key, patterns in section.conditions()
        if CONDITIONS[key].patterns is not None
        for pattern in patterns
    ]
    matched = {
        (key, pattern)
        for key, row in CONDITIONS.items()
        if row.patterns is not None
        for pattern in row.patterns([each for of, each, _ in given if of == key]).matching(paths)
    }
    return [
        f"{where}: {key} {pattern!r}"
        for key, pattern, where in given
        if (key, pattern) not in matched
    ]
