"""Writes policies as policy files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import yaml

from ... import ops, tensors
from ...number_formats import Float
from ..decisions import YIELDING, CastPolicy, Decision, LowType
from ..lists.kinds import KEYS, KINDS
from ..sections import Section


def to_yaml(
    decisions: Mapping[str, Decision], low_dtype: LowType, sections: tuple[Section, ...]
) -> str:
    """Returns the policy file that makes these decisions, spelled out one by one."""
    content: dict[str, Any] = {
        "low_precision_type": _type_name(low_dtype),
        "lists": "none",
        **_lists(decisions, low_dtype),
    }
    if sections:
        content["sections"] = [
            {
                **{key: _written(value) for key, value in section.conditions()},
                **_lists(section.decisions, low_dtype),
            }
            for section in sections
        ]
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
            for each in sorted(_operators(op))
            if each not in decisions or _gives_way(decisions[each], decision)
        ]
    return {key: found[key] for key in KEYS if key in found}


def _type_name(low_type: LowType | None) -> str:
    """Returns the name of a low-precision type; a format that is called as a dtype is, as TVM has it."""
    assert low_type is not None
    name = tensors.long_name(low_type)
    if isinstance(low_type, Float) and name in map(tensors.long_name, tensors.LOW_PRECISION):
        return f"custom[{name}]{low_type.bits}"
    return name


def _gives_way(decision: Decision, other: Decision) -> bool:
    """Whether a list of ``decision`` gives way to one of ``other``."""
    return decision.cast_policy in YIELDING and other.cast_policy not in YIELDING


def _operators(op: str) -> frozenset[str]:
    """Returns the operators that a line of ``op`` covers."""
    return ops.covered(op) - {op}


def _written(value: Any) -> Any:
    return (
        [_written(each) for each in value]
        if isinstance(value, tuple)
        else (tensors.long_name(value) if isinstance(value, torch.dtype) else value)
    )
