"""Policies as people read them: a line, a table of text, a table of HTML, a policy file."""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch

from .. import ops, tensors
from ..errors import lined, shown
from ..number_formats import Float
from ..tensors import short_name
from .decisions import YIELDING, CastPolicy, Decision, LowType
from .op_lists import KEYS, KINDS
from .sections import Section

#: A browser shows no more without getting slow; text has no limit.
_MOST_HTML_ROWS: Final = 2000

_MOST_NAME: Final = 24


class Row(NamedTuple):
    """One line of a table."""

    op: str
    policy: str
    dtype: str
    reason: str


_TITLES: Final = Row("op", "policy", "dtype", "reason")


def policy_line(
    decisions: Mapping[str, Decision], low_dtype: LowType, sections: tuple[Section, ...]
) -> str:
    """Returns how many ops have which policy: ``"bf16: 24 LOW, 15 FP32, 2 sections"``."""
    name = short_name(low_dtype)
    name = name if len(name) <= _MOST_NAME else f"{name[: _MOST_NAME - 3]}..."
    parts = [counts(decisions)] if decisions else ["no ops"]
    if sections:
        parts.append(f"{len(sections):,} section{'s' if len(sections) > 1 else ''}")
    return f"{name}: {', '.join(parts)}"


def counts(decisions: Mapping[str, Decision]) -> str:
    """Returns how many ops have which policy: ``"24 LOW, 15 FP32"``."""
    found = dict.fromkeys(CastPolicy, 0)
    for decision in decisions.values():
        found[decision.cast_policy] += 1
    return ", ".join(f"{count} {kind.name}" for kind, count in found.items() if count)


def table(
    decisions: Mapping[str, Decision], low_dtype: LowType, sections: tuple[Section, ...]
) -> str:
    """Returns a table of all decisions, those of sections beneath their conditions."""
    title = f"Policy, {policy_line(decisions, low_dtype, sections)}"
    parts: list[tuple[str, list[Row]]] = [(title, list(_rows(decisions)))]
    parts += [(_heading(each), list(_rows(each.decisions))) for each in sections]
    rows = [_TITLES, *itertools.chain.from_iterable(rows for _, rows in parts)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    for heading, rows in parts:
        lines.append(heading)
        if rows:
            lines += [_aligned(row, widths) for row in (_TITLES, *rows)]
    return lined(lines)


def as_html(
    decisions: Mapping[str, Decision], low_dtype: LowType, sections: tuple[Section, ...]
) -> str:
    """Returns the table of `table` for notebooks; of very long ones the beginning."""
    title = f"Policy, {policy_line(decisions, low_dtype, sections)}"
    rows: Iterator[str] = (_html_row(row, "td") for row in _rows(decisions))
    for section in sections:
        heading = f'<tr><th colspan="4">{html.escape(_heading(section))}</th></tr>'
        rows = itertools.chain(rows, [heading], _html_rows(section.decisions))
    first = list(itertools.islice(rows, _MOST_HTML_ROWS))
    total = len(decisions) + sum(1 + len(section.decisions) for section in sections)
    more = total - len(first)
    if more > 0:
        first.append(f'<tr><td colspan="4">and {more:,} more; print() shows all</td></tr>')
    head = _html_row(_TITLES, "th")
    return (
        f"<table><caption>{html.escape(title)}</caption><thead>{head}</thead>"
        f"<tbody>{''.join(first)}</tbody></table>"
    )


def _rows(decisions: Mapping[str, Decision]) -> Iterator[Row]:
    for op in sorted(decisions):
        decision = decisions[op]
        words = [] if decision.dtype is None else [short_name(decision.dtype)]
        words += [f"{word}={short_name(value)}" for word, value in decision.options()]
        yield Row(op, decision.cast_policy.name, " ".join(words), decision.reason)


def _heading(section: Section) -> str:
    conditions = [f"{name} {_condition(value)}" for name, value in section.conditions()]
    where = f" ({section.where})" if section.where else ""
    return f"where {', '.join(conditions)}{where}"


def _condition(value: Any) -> str:
    return shown([str(each) for each in value] if isinstance(value, tuple) else value)


def _aligned(row: Row, widths: list[int]) -> str:
    cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
    return f"  {'  '.join(cells)}".rstrip()


def _html_rows(decisions: Mapping[str, Decision]) -> Iterator[str]:
    return (_html_row(row, "td") for row in _rows(decisions))


def _html_row(cells: Iterable[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"


# --- policy files ------------------------------------------------------------------------------


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


def _written(value: Any) -> Any:
    return (
        [_written(each) for each in value]
        if isinstance(value, tuple)
        else (tensors.long_name(value) if isinstance(value, torch.dtype) else value)
    )
