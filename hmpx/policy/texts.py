"""Policies for people: a line, a table in text or HTML, a policy file."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

from .. import number_formats, ops, tensors
from ..errors import lined, shown
from ..tensors import short_name
from .decisions import YIELDING, CastPolicy, Decision, LowType
from .op_lists import KEYS, KINDS
from .sections import Section

if TYPE_CHECKING:
    from .policy import Policy

_MOST_NAME: Final = 24
_TITLES: Final = ("op", "policy", "dtype", "reason")


def policy_line(policy: Policy) -> str:
    """Returns the number of ops by cast policy: ``"bf16: 24 LOW, 15 FP32, 2 sections"``."""
    name = short_name(policy.low_precision_type)
    name = name if len(name) <= _MOST_NAME else f"{name[: _MOST_NAME - 3]}..."
    found = Counter(decision.cast_policy for decision in policy.decisions.values())
    parts = [f"{found[each]} {each.name}" for each in CastPolicy if found[each]] or ["no ops"]
    if count := len(policy.sections):
        parts.append(f"{count:,} section{'s' if count > 1 else ''}")
    return f"{name}: {', '.join(parts)}"


def table(policy: Policy) -> str:
    """Returns a table of all decisions; those of sections follow their conditions."""
    parts = [(f"Policy, {policy_line(policy)}", [*_rows(policy.decisions)])]
    parts += [(_heading(each), [*_rows(each.decisions)]) for each in policy.sections]
    every = [_TITLES, *itertools.chain.from_iterable(rows for _, rows in parts)]
    widths = [max(map(len, column)) for column in zip(*every, strict=True)]
    lines: list[str] = []
    for heading, rows in parts:
        lines.append(heading)
        for row in (_TITLES, *rows) if rows else ():
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append(f"  {'  '.join(cells)}".rstrip())
    return lined(lines)


def _rows(decisions: Mapping[str, Decision]) -> Iterator[tuple[str, str, str, str]]:
    for op in sorted(decisions):
        decision = decisions[op]
        words = [] if decision.dtype is None else [short_name(decision.dtype)]
        words += [f"{word}={short_name(value)}" for word, value in decision.options()]
        yield op, decision.cast_policy.name, " ".join(words), decision.reason


def _heading(section: Section) -> str:
    conditions = [
        f"{name} {shown([*map(str, value)] if isinstance(value, tuple) else value)}"
        for name, value in section.conditions
    ]
    where = f" ({section.where})" if section.where else ""
    return f"where {', '.join(conditions)}{where}"


# --- policy files ------------------------------------------------------------------------------


def to_yaml(policy: Policy) -> str:
    """Returns a policy file with each of these decisions spelled out."""
    low_dtype = policy.low_precision_type
    content: dict[str, Any] = {
        "low_precision_type": _type_name(low_dtype),
        "lists": "none",
        **_lists(policy.decisions, low_dtype),
    }
    if policy.sections:
        content["sections"] = [
            {
                **{key: _written(value) for key, value in section.conditions},
                **_lists(section.decisions, low_dtype),
            }
            for section in policy.sections
        ]
    import yaml

    return yaml.safe_dump(content, sort_keys=False)  # escaped: U+0085 would be a space


def _lists(decisions: Mapping[str, Decision], low_dtype: LowType) -> dict[str, list[str]]:
    keys = {KINDS[key].cast_policy: key for key in KEYS}
    found: dict[str, list[str]] = {}
    for op, decision in sorted(decisions.items()):
        covering = ops.covering(op)
        if covering is not None and decisions.get(covering) == decision:
            continue
        words = [op]
        if decision.cast_policy is CastPolicy.LOW and decision.dtype not in (None, low_dtype):
            words.append(_type_name(decision.dtype))
        words += [f"{word}={tensors.long_name(value)}" for word, value in decision.options()]
        lines = found.setdefault(keys[decision.cast_policy], [])
        lines.append(" ".join(words))
        lines += [
            f"-{each}"
            for each in sorted(ops.covered(op) - {op})
            if each not in decisions
            or (decisions[each].cast_policy in YIELDING and decision.cast_policy not in YIELDING)
        ]
    return {key: found[key] for key in KEYS if key in found}


def _type_name(low_type: LowType | None) -> str:
    """Returns the name of a low-precision type; for a format named like a dtype, TVM's name."""
    assert low_type is not None
    name = tensors.long_name(low_type)
    is_taken = name in map(tensors.long_name, tensors.LOW_PRECISION)
    if is_taken and isinstance(low_type, number_formats.Float):
        return f"custom[{name}]{low_type.bits}"
    return name


def _written(value: Any) -> Any:
    if isinstance(value, tuple):
        return [*map(_written, value)]
    return tensors.long_name(value) if isinstance(value, torch.dtype) else value
