"""Decisions for a part of a model, or for calls of a kind: a section of a policy file, as data."""

from __future__ import annotations

import itertools
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .calls import Call
from .conditions import CONDITIONS
from .decisions import Decision


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
        asked = [(CONDITIONS[key], value) for key, value in self._conditions]
        groups = itertools.groupby(asked, key=lambda each: each[0].group or each[0].key)
        return all(
            any(condition.holds(value, call) for condition, value in group) for _, group in groups
        )


def _remade(decisions: dict[str, Decision], where: str, conditions: dict[str, Any]) -> Section:
    return Section(decisions, where=where, **conditions)


@dataclass(frozen=True, slots=True)
class SectionRule:
    """What a section says of one op, as a rule."""

    section: Section
    decision: Decision

    def __call__(self, call: Call) -> Decision | None:
        """Returns the section's decision where its conditions are met."""
        return self.decision if self.section.holds_for(call) else None

    def __str__(self) -> str:
        return self.decision.reason or self.section.where


def unmatched(sections: Iterable[Section], paths: Iterable[str]) -> list[str]:
    """Returns a message for each pattern of the sections that none of the qualified names matches."""
    paths = list(paths)
    return [
        f"{section.where}: {key} {pattern!r}"
        for section in sections
        for key, patterns in section.conditions()
        if (matches := CONDITIONS[key].matches) is not None
        for pattern in patterns
        if not any(matches(pattern, path) for path in paths)
    ]
