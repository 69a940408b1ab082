"""Decisions for a part of a model, or for some calls: a section of a policy file, as data."""

from __future__ import annotations

import fnmatch
import functools
import itertools
import re
import types
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from ..errors import fielded
from .calls import Call, Rule
from .decisions import Decision
from .patterns import fullmatcher

# --- patterns of modules' qualified names ------------------------------------------------------


@functools.lru_cache(maxsize=1 << 12)
def regex_of(key: str, pattern: str) -> Callable[[str], object]:
    """Returns the predicate of a ``module`` or ``module_regex``."""
    if key == "module":
        return re.compile(fnmatch.translate(pattern)).match
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return fullmatcher(pattern)


def _is_wild(pattern: str) -> bool:
    return not {*"*?["}.isdisjoint(pattern)


@functools.lru_cache(maxsize=1 << 16)
def matches(key: str, pattern: str, name: str) -> bool:
    """Whether a ``module`` or ``module_regex`` matches the whole of a qualified name."""
    if key == "module" and not _is_wild(pattern):
        return pattern == name
    return bool(regex_of(key, pattern)(name))


def _around(name: str) -> list[str]:
    """Returns the qualified names of the modules that a module is in, and its own."""
    return ["", *itertools.accumulate(name.split("."), "{}.{}".format)]


# --- conditions --------------------------------------------------------------------------------


class Condition(NamedTuple):
    """A condition that a section may have."""

    key: str  # Its name in policy files, and as an argument of `Section`
    kind: str  # The method of the reader in `files` for its value
    # Whether a call meets it. Arguments: its value and the call
    holds: Callable[[Any, Call], bool]
    is_placed: bool = False  # It depends on the modules that are running


def _of_first(ask: Callable[[Any, Call, int], bool]) -> Callable[[Any, Call], bool]:
    """Returns a predicate about the first floating-point tensor; False for calls without one."""

    def holds(value: Any, call: Call) -> bool:
        floating = [i for i, dtype in enumerate(call.dtypes) if dtype.is_floating_point]
        return bool(floating) and ask(value, call, floating[0])

    return holds


def _of_names(key: str) -> Callable[[Any, Call], bool]:
    """Returns a predicate: the call is in a module with a matching qualified name, or inside one."""
    return lambda patterns, call: any(
        matches(key, pattern, name) for name in _around(call.module) for pattern in patterns
    )


#: The conditions on qualified names, of which one has to hold.
_PATHS: Final = ("module", "module_regex")

_ROWS: Final = (
    Condition("module", "texts", _of_names("module"), is_placed=True),
    Condition("module_regex", "regexes", _of_names("module_regex"), is_placed=True),
    # Class names: the call is in a module of such a class, or inside one.
    Condition(
        "module_class",
        "texts",
        lambda classes, call: not set(classes).isdisjoint(call.module_classes),
        is_placed=True,
    ),
    # The mode of the innermost module.
    Condition("mode", "mode", lambda mode, call: call.training is (mode == "train"), True),
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
    """Decisions for the calls that meet all of its conditions."""

    decisions: Mapping[str, Decision]  # Op name -> decision
    conditions: tuple[tuple[str, Any], ...]  # By name
    where: str = field(compare=False)  # ``"policy.yaml:12"``

    __repr__ = fielded

    def __init__(
        self, decisions: Mapping[str, Decision], *, where: str = "", **conditions: Any
    ) -> None:
        for key in conditions.keys() - CONDITIONS.keys():
            raise TypeError(f"a section has no condition {key!r}")
        given = [(key, conditions.get(key)) for key in CONDITIONS]
        kept = tuple([(key, value) for key, value in given if value not in (None, ())])
        object.__setattr__(self, "decisions", types.MappingProxyType(dict(decisions)))
        object.__setattr__(self, "conditions", kept)
        object.__setattr__(self, "where", where)

    def __hash__(self) -> int:
        return hash((frozenset(self.decisions.items()), self.conditions))

    def __reduce__(self) -> tuple[Any, ...]:
        made = functools.partial(Section, where=self.where, **dict(self.conditions))
        return made, (dict(self.decisions),)

    def with_decisions(self, decisions: Mapping[str, Decision]) -> Section:
        """Returns a section with the same conditions."""
        return Section(decisions, where=self.where, **dict(self.conditions))

    @property
    def is_placed(self) -> bool:
        """Whether it depends on the modules that are running."""
        return any(CONDITIONS[key].is_placed for key, _ in self.conditions)

    def holds_for(self, call: Call) -> bool:
        """Whether ``call`` meets all conditions."""
        given = dict(self.conditions)
        paths = [key for key in _PATHS if key in given]
        if paths and not any(CONDITIONS[key].holds(given[key], call) for key in paths):
            return False
        return all(CONDITIONS[key].holds(given[key], call) for key in given if key not in _PATHS)

    @property
    def globs(self) -> tuple[str, ...]:
        """Globs, one of which must match the module or one around it; () for none."""
        given = dict(self.conditions)
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


def by_module(rules: Iterable[SectionRule]) -> Iterator[Rule]:
    """Yields rules equivalent to ``rules`` that call few of them for a given module."""
    for has_globs, group in itertools.groupby(rules, key=lambda rule: bool(rule.section.globs)):
        several = [*group]
        yield from [_of_module(several)] if has_globs else several


def _of_module(rules: Sequence[SectionRule]) -> Rule:
    """Returns a rule that calls only those of ``rules`` whose globs may match the module."""
    wild: set[int] = set()
    named: dict[str, list[int]] = defaultdict(list)
    for at, rule in enumerate(rules):
        for glob in rule.section.globs:
            if _is_wild(glob):
                wild.add(at)
            else:
                named[glob].append(at)

    def decide(call: Call) -> Decision | None:
        asked = wild.union(*[named.get(name, ()) for name in _around(call.module)])
        verdicts = (rules[at](call) for at in sorted(asked))
        return next((verdict for verdict in verdicts if verdict is not None), None)

    return decide


def unmatched(sections: Iterable[Section], paths: Iterable[str]) -> list[str]:
    """Returns a message for each pattern of the sections that matches none of the qualified names."""
    paths = frozenset(paths)
    return [
        f"{section.where}: {key} {pattern!r}"
        for section in sections
        for key, patterns in section.conditions
        if key in _PATHS
        for pattern in patterns
        if not any(matches(key, pattern, path) for path in paths)
    ]
