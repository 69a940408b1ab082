"""Decisions for a part of a model, or for calls of a kind: a section of a policy file, as data."""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .calls import Call, Rule
from .conditions import CONDITIONS, Condition
from .decisions import Decision
from .module_names import Globs


@dataclass(frozen=True, init=False)
class Section:
    """What is decided for the calls that meet all of its conditions.

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
        """Takes the decisions, where they are from, and the conditions.

        Args:
            decisions: Op name -> decision.
            where: Where the section is written.
            **conditions: Key in `conditions.CONDITIONS` -> value; None and () are no condition.
        """
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
        return _remade, (dict(self.decisions), self.where, dict(self._conditions))

    def with_decisions(self, decisions: Mapping[str, Decision]) -> Section:
        """Returns a section with the same conditions."""
        return Section(decisions, where=self.where, **dict(self._conditions))

    def conditions(self) -> tuple[tuple[str, Any], ...]:
        """Returns the conditions that there are, by name."""
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
        """The globs of which one must match the module, or one around it; () for none."""
        given = dict(self._conditions)
        return () if "module_regex" in given else given.get("module", ())


def _remade(decisions: dict[str, Decision], where: str, conditions: dict[str, Any]) -> Section:
    return Section(decisions, where=where, **conditions)


@dataclass(frozen=True, slots=True)
class SectionRule:
    """What a section says of one op, as a rule."""

    section: Section
    decision: Decision

    def __call__(self, call: Call) -> Decision | None:
        """Returns the section's decision where its conditions are met."""
        if not self.section.holds_for(call):
            return None
        return replace(self.decision, reason=str(self))

    def __str__(self) -> str:
        return self.decision.reason or self.section.where


class _ByModule:
    """Rules of neighbouring sections with globs: those are asked whose globs may match a call's module."""

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
    """Yields rules that decide as ``rules`` do, and ask few of them about a call's module."""
    for has_globs, group in itertools.groupby(rules, key=lambda rule: bool(rule.section.globs)):
        several = [*group]
        yield from [_ByModule(several)] if has_globs else several


def unmatched(sections: Iterable[Section], paths: Iterable[str]) -> list[str]:
    """Returns a message for each pattern of the sections that none of the qualified names matches."""
    sections, paths = list(sections), list(paths)
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
