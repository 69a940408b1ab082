"""Decisions for a part of a model, or for calls of a kind: a section of a policy file, as data.

Knows neither files nor how wrappers get into torch.
"""

from __future__ import annotations

import fnmatch
import functools
import re
import types
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

import torch

from .calls import Call
from .decisions import Decision

PHASES: Final = ("train", "eval")


@dataclass(frozen=True)
class Section:
    """What is decided for the calls that meet all of its conditions.

    Those on tensors are about the first floating tensor of a call, as it is given.

    Attributes:
        decisions: Op name -> decision.
        module: Globs, in which ``*`` stands for any characters: the call is in a module with such a
            qualified name, or inside of one.
        module_regex: Regular expressions for the whole of such a name.
        module_class: Class names: the call is in a module of one, or inside of one.
        phase: ``"train"`` or ``"eval"``: the mode of the innermost module.
        min_numel: Least number of elements, and
        max_numel: the greatest.
        ndim: Numbers of dimensions.
        device: Device types.
        dtype: Dtypes.
        where: ``"policy.yaml:12"``. Not part of equality.
    """

    decisions: Mapping[str, Decision]
    module: tuple[str, ...] = ()
    module_regex: tuple[str, ...] = ()
    module_class: tuple[str, ...] = ()
    phase: str | None = None
    min_numel: int | None = None
    max_numel: int | None = None
    ndim: tuple[int, ...] = ()
    device: tuple[str, ...] = ()
    dtype: tuple[torch.dtype, ...] = ()
    where: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "decisions", types.MappingProxyType(dict(self.decisions)))

    def __hash__(self) -> int:
        return hash((frozenset(self.decisions.items()), self.conditions()))

    def __reduce__(self) -> tuple[Any, ...]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return _remade, ({**values, "decisions": dict(self.decisions)},)

    def conditions(self) -> tuple[tuple[str, Any], ...]:
        """Returns the conditions that there are, by name."""
        values = [
            (f.name, getattr(self, f.name))
            for f in fields(self)
            if f.name not in ("decisions", "where")
        ]
        return tuple([(name, value) for name, value in values if value not in (None, ())])

    @property
    def is_placed(self) -> bool:
        """Whether it depends on the modules that are running."""
        return bool(self.module or self.module_regex or self.module_class or self.phase)

    def holds_for(self, call: Call) -> bool:
        """Whether ``call`` meets all conditions."""
        is_named = bool(self.module or self.module_regex)
        if is_named and not _holds_in(self.module, self.module_regex, call.module):
            return False
        if self.phase is not None and call.training is not (self.phase == "train"):
            return False
        if self.module_class and set(self.module_class).isdisjoint(call.module_classes):
            return False
        return self._holds_for_tensors(call)

    def _holds_for_tensors(self, call: Call) -> bool:
        if (self.min_numel, self.max_numel) != (None, None) or self.ndim:
            first = _first_floating(call)
            if first is None:
                return False
            shape = call.shapes[first]
            least, greatest = self.min_numel or 0, self.max_numel
            if shape.numel() < least or (greatest is not None and shape.numel() > greatest):
                return False
            if self.ndim and len(shape) not in self.ndim:
                return False
        if self.device or self.dtype:
            first = _first_floating(call)
            if first is None or (self.dtype and call.dtypes[first] not in self.dtype):
                return False
            return not self.device or call.devices[first].type in self.device
        return True


def _remade(values: dict[str, Any]) -> Section:
    return Section(**values)


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
        f"{section.where}: {kind} {pattern!r}"
        for section in sections
        for kind, patterns in (("module", section.module), ("module_regex", section.module_regex))
        for pattern in patterns
        if not any(_compiled(kind, pattern).fullmatch(path) for path in paths)
    ]


@functools.lru_cache(maxsize=1 << 16)
def _holds_in(globs: tuple[str, ...], regexes: tuple[str, ...], path: str) -> bool:
    patterns = [_compiled("module", each) for each in globs]
    patterns += [_compiled("module_regex", each) for each in regexes]
    parts = path.split(".")
    names = ["", *[".".join(parts[: count + 1]) for count in range(len(parts))]]
    return any(pattern.fullmatch(name) for pattern in patterns for name in names)


@functools.lru_cache(maxsize=1 << 12)
def _compiled(kind: str, pattern: str) -> re.Pattern[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return re.compile(fnmatch.translate(pattern) if kind == "module" else pattern)


def _first_floating(call: Call) -> int | None:
    """Returns the position of the first floating tensor."""
    return next((i for i, dtype in enumerate(call.dtypes) if dtype.is_floating_point), None)
