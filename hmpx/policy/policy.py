"""A policy: the decision for every op that is cast, as frozen data."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import types
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from .. import arguments, number_formats, ops, tensors
from ..errors import OptionError, lined, shown
from ..tensors import short_name
from . import sections
from .calls import Rule, leaves_pointwise_einsums, pass_pointwise
from .decisions import (
    UNDECIDED,
    YIELDING,
    CastPolicy,
    Decision,
    LowType,
    parse_low_type,
    settled_dtype,
)
from .faults import report
from .lists import parse
from .op_lists import KEYS, KINDS, listed, resolve
from .sections import Section, SectionRule, by_module

if TYPE_CHECKING:
    from ..number_formats import Format
    from .engines import EngineSettings

_DECISIONS: Final = "a dict of op names to hmpx.Decision"


@dataclass(frozen=True, repr=False)
class Policy:
    """A decision for every op that is cast.

    `print` shows a table.

    Attributes:
        decisions: Op name -> decision. Other ops are not cast.
        low_precision_type: The type of the low-precision list.
        sections: Decisions for parts of a model. The first section that matches a call
            and names its op overrides ``decisions``.

    Example:
        >>> policy = hmpx.Policy.from_ops(low=["linear"], fp32=["softmax"])
        >>> policy["linear"].cast_policy
        <CastPolicy.LOW: 'low'>
        >>> with hmpx.convert(policy=policy, device_types={"cpu"}):
        ...     torch.softmax(torch.ones(2, dtype=torch.bfloat16), 0).dtype
        torch.float32
    """

    decisions: Mapping[str, Decision]
    low_precision_type: LowType = torch.bfloat16
    sections: tuple[Section, ...] = ()

    def __post_init__(self) -> None:
        low_dtype = parse_low_type(self.low_precision_type)
        settled: dict[str, Decision] = {}
        given = arguments.mapping("decisions", self.decisions, _DECISIONS)
        for op, said in given.items():
            if not isinstance(op, str) or not isinstance(said, Decision):
                raise OptionError(
                    f"decisions must be {_DECISIONS}; it holds {shown(op)}: {shown(said)}"
                )
            dtype = settled_dtype(said, low_dtype)
            settled[op] = said if dtype is said.dtype else dataclasses.replace(said, dtype=dtype)
        object.__setattr__(self, "decisions", types.MappingProxyType(settled))
        object.__setattr__(self, "low_precision_type", low_dtype)
        object.__setattr__(self, "sections", tuple(self.sections))

    def __repr__(self) -> str:
        return f"<hmpx.Policy {policy_line(self)}>"

    def __str__(self) -> str:
        return _table(self)

    def _repr_html_(self) -> str:
        import html

        line, table = html.escape(repr(self)), html.escape(str(self))
        return f"<details><summary>{line}</summary><pre>{table}</pre></details>"

    def __hash__(self) -> int:
        return hash((frozenset(self.decisions.items()), self.low_precision_type, self.sections))

    def __reduce__(self) -> tuple[Any, ...]:
        return Policy, (dict(self.decisions), self.low_precision_type, self.sections)

    def formats(self) -> frozenset[Format]:
        """Returns the number formats that ops run in, by any decision."""
        dtypes = [each.dtype for each in every_decision(self)]
        return frozenset(filter(number_formats.is_format, dtypes))

    def section_rules(self) -> dict[str, list[SectionRule]]:
        """Returns op -> its decisions in sections, in their order."""
        found: dict[str, list[SectionRule]] = {}
        for section in self.sections:
            rules: dict[int, SectionRule] = {}  # a ``*`` line is one decision for all its ops
            for op, decision in section.decisions.items():
                rule = rules.get(id(decision))
                if rule is None:
                    rule = rules[id(decision)] = SectionRule(section, decision)
                found.setdefault(op, []).append(rule)
        return found

    def asked_rules(self) -> dict[str, tuple[Rule, ...]]:
        """Returns op -> rules equivalent to `section_rules`, but faster, and the rule for einsum."""
        found = {op: (*by_module(rules),) for op, rules in self.section_rules().items()}
        if leaves_pointwise_einsums(self.decisions):
            found["einsum"] = (*found.get("einsum", ()), pass_pointwise)
        return found

    def unmatched(self, paths: Iterable[str]) -> list[str]:
        """Returns a message for each module pattern that matches none of these qualified names.

        Raises:
            OptionError: ``paths`` are not strings.
        """
        return sections.unmatched(self.sections, arguments.texts("paths", paths))

    def fingerprint(self) -> str:
        """Returns a string that equal policies share, in any process."""
        placed = [(each.conditions, _bare(each.decisions)) for each in self.sections]
        state = repr((_bare(self.decisions), placed, self.low_precision_type))
        return hashlib.sha256(state.encode()).hexdigest()

    def to_yaml(self) -> str:
        """Returns a policy file for an equal policy, with every decision spelled out."""
        return _to_yaml(self)

    def export(self, engine: str) -> EngineSettings:
        """Returns the settings of another engine that hold these decisions, as text.

        Args:
            engine: ``"openvino"``, ``"coreml"``, ``"fsdp2"``, ``"deepspeed"`` or ``"gaudi"``
                ([engines](freeze.md#other-engines)).

        Raises:
            OptionError: ``engine`` is none of these.

        Example:
            >>> settings = hmpx.Policy.from_ops(low=["linear"], fp32=["softmax"]).export("gaudi")
            >>> print(settings.text.splitlines()[1])
            cat > lower_precision_ops.txt <<'END'
        """
        from .engines import exported

        return exported(self, engine)

    def __getitem__(self, op: str) -> Decision:
        """Returns the decision for ``op``, in any of its spellings.

        Raises:
            OptionError: torch has no such op.
        """
        spelling = arguments.text("a policy's key", op, "an op name")
        name = ops.resolve(spelling)
        if name is None:
            raise OptionError(ops.unknown(spelling))
        found = self.decisions.get(name)
        if found is None and ops.is_foreign(name):  # perhaps listed by another of its names
            same = ops.same(name, self.decisions)
            found = None if same is None else self.decisions[same]
        return UNDECIDED if found is None else found

    @classmethod
    def from_ops(
        cls,
        *,
        low: Iterable[str] = (),
        fp32: Iterable[str] = (),
        widest: Iterable[str] = (),
        first: Iterable[str] = (),
        low_precision_type: LowType | str = torch.bfloat16,
    ) -> Policy:
        """Returns the policy that holds exactly these ops, without any shipped list.

        If an op is in several arguments, the earliest one decides.

        Raises:
            OpListError: A name is unknown, or is in both ``low`` and ``fp32``.
            OptionError: ``low_precision_type`` is invalid, or a list holds something other than
                strings.
        """
        low_dtype = parse_low_type(low_precision_type)
        given = {"low": low, "fp32": fp32, "widest": widest, "first": first}
        read = {
            kind: parse("\n".join(arguments.texts(kind, names, "a list of op names")), f"<{kind}>")
            for kind, names in given.items()
        }
        lists = listed(read, low_dtype)
        report(lists, strict=True, is_from_files=False)
        return cls(resolve([[each] for each in lists]), low_dtype)


def every_decision(policy: Policy) -> list[Decision]:
    """Returns the decisions for ops, and those of sections."""
    several = (policy.decisions, *[each.decisions for each in policy.sections])
    return [decision for each in several for decision in each.values()]


def _bare(decisions: Mapping[str, Decision]) -> list[tuple[str, str]]:
    return sorted((op, _said(decision)) for op, decision in decisions.items())


@functools.lru_cache(maxsize=1 << 10)
def _said(decision: Decision) -> str:
    return repr((decision.cast_policy.name, decision.dtype, *decision.options()))


# --- for people ----------------------------------------------------------------------------------

_TITLES: Final = ("op", "policy", "dtype", "reason")


def policy_line(policy: Policy) -> str:
    """Returns the number of ops by cast policy: ``"bf16: 24 LOW, 15 FP32, 2 sections"``."""
    name = short_name(policy.low_precision_type)
    name = name if len(name) <= 24 else f"{name[:21]}..."
    found = Counter(decision.cast_policy for decision in policy.decisions.values())
    parts = [f"{found[each]} {each.name}" for each in CastPolicy if found[each]] or ["no ops"]
    if count := len(policy.sections):
        parts.append(f"{count:,} section{'s' if count > 1 else ''}")
    return f"{name}: {', '.join(parts)}"


def _table(policy: Policy) -> str:
    parts = [(f"Policy, {policy_line(policy)}", [*_rows(policy.decisions)])]
    parts += [(section_heading(each), [*_rows(each.decisions)]) for each in policy.sections]
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


def section_heading(section: Section) -> str:
    """Returns a section's conditions and its line."""
    conditions = [
        f"{name} {shown([*map(str, value)] if isinstance(value, tuple) else value)}"
        for name, value in section.conditions
    ]
    where = f" ({section.where})" if section.where else ""
    return f"where {', '.join(conditions)}{where}"


# --- policy files ------------------------------------------------------------------------------


def _to_yaml(policy: Policy) -> str:
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
