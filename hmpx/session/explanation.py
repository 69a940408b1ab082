"""Explanations of one op or several, as data and text, and the matching of patterns to ops."""

from __future__ import annotations

import fnmatch
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from .. import ops
from ..errors import brief, lined, shown
from ..policy import UNDECIDED, CastPolicy, Decision, Policy
from ..reports import Row, located, short_dtype
from ..tensors import short_name
from ..torch_internals import VF_NAMESPACE

#: Width of the text.
_WIDTH: Final = 80

#: Most program lines shown; the others are only counted.
_MOST_CALLS: Final = 20

_INDENT: Final = 16

_WHAT: Final = {
    CastPolicy.FP32: "inputs in bf16 or fp16 are cast to fp32",
    CastPolicy.WIDEST: "all floating-point inputs are cast to the widest type among them",
    CastPolicy.FOLLOW: "inputs are cast to fp32, unless all have one low-precision type already",
    CastPolicy.FIRST: "the other inputs are cast to the type of the first floating-point one",
    CastPolicy.PASS: "inputs are left as they are",
}


@dataclass(frozen=True)
class Explanation:
    """How an op is treated, why, and where. `print` shows it as text.

    Attributes:
        op: Op name.
        decision: The policy's decision.
        policy: Name of the policy: ``"policy in force"``.
        in_place: The call sites that write to their first argument: its dtype decides there.
        takes_out: Whether some call takes ``out=``, whose dtype likewise decides.
        sites: Every place in torch where the op is called.
        covers: Operators that the same line decides: ``("iadd", "radd")``.
        asked_first: Rules and sections that may override the decision, in order of precedence.
        device_notes: Notes for each device type: legalized, emulated, or a missing kernel.
        notes: Other facts that affect its calls.
        calls: Call sites in a recorded program.
        is_recorded: Whether a record was given.

    Example:
        >>> explanation = hmpx.explain("torch.nn.functional.softmax")
        >>> explanation.op, explanation.decision.cast_policy
        ('softmax', <CastPolicy.FP32: 'fp32'>)
        >>> "torch.Tensor.softmax" in explanation.sites
        True
    """

    op: str
    decision: Decision
    policy: str
    sites: tuple[str, ...]
    in_place: tuple[str, ...] = ()
    takes_out: bool = False
    covers: tuple[str, ...] = ()
    asked_first: tuple[str, ...] = ()
    device_notes: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    calls: tuple[Row, ...] = ()
    is_recorded: bool = False

    @property
    def reason(self) -> str:
        """The source of the decision: ``"lists/hmpx/bf16.txt:20"``."""
        return self.decision.reason

    @property
    def cast_policy(self) -> CastPolicy:
        """The rule for its inputs."""
        return self.decision.cast_policy

    __repr__ = brief

    def __str__(self) -> str:
        return lined(self._lines())

    def _lines(self) -> Iterator[str]:
        yield from _wrapped(f"{self.op}: {self._what()}", "", 2)
        line = "no list" if self.reason in ("", UNDECIDED.reason) else self.reason
        yield from _field("decided by", f"{line} ({self.policy})")
        yield from _field("asked first", *self.asked_first)
        if self.covers:
            yield from _field("also decides", ", ".join(self.covers))
        for device_type, note in self.device_notes:
            yield from _field(f"on {device_type}", note)
        yield from _field("note", *self.notes)
        yield from _field("call sites", ", ".join(self.sites))
        if writes := ", ".join([*self.in_place, *["out="] * self.takes_out]):
            text = f"{writes}: the dtype of the tensor that is written to decides, not the lists"
            yield from _field("in place", text)
        if self.is_recorded:
            yield from self._recorded()

    def _what(self) -> str:
        decision = self.decision
        said = _WHAT.get(decision.cast_policy)
        if said is None:  # LOW
            low = "the low-precision type" if decision.dtype is None else short_name(decision.dtype)
            is_format = decision.dtype is not None and not hasattr(decision.dtype, "itemsize")
            said = f"inputs are {'rounded' if is_format else 'cast'} to {low}"
        if decision.accumulate_dtype is not None:
            said += f", computed in {short_name(decision.accumulate_dtype)}"
        if decision.output_dtype is not None:
            to = decision.output_dtype
            named = "the first input's type" if isinstance(to, str) else short_name(to)
            said += f", results cast to {named}"
        said += "".join(
            f", {word} {short_name(value)}"
            for word, value in decision.options()
            if word not in ("accumulate", "output")
        )
        return f"{decision.cast_policy.name}, {said}"

    def _recorded(self) -> Iterator[str]:
        if not self.calls:
            yield from _field("called", "never, in the recorded run")
            return
        count = sum(row.calls for row in self.calls)
        yield from _field("called", f"{count:,} times" if count != 1 else "once")
        for row in self.calls[:_MOST_CALLS]:
            inputs, outputs = (
                ", ".join(map(short_dtype, dtypes))
                for dtypes in (row.input_dtypes, row.output_dtypes)
            )
            places = [f"in {row.module}"] if row.module else []
            places += [f"at {located(row.location)}"] if row.location else []
            where = " ".join(places) or "somewhere"
            said = f"{row.calls:,} x {where}: {inputs} -> {short_dtype(row.dtype)} -> {outputs}"
            yield from _wrapped(said, " " * 4, _INDENT)
        more = len(self.calls) - _MOST_CALLS
        if more > 0:
            yield f"    and {more:,} more"


class Explanations(tuple[Explanation, ...]):
    """Explanations of several ops; `print` shows a line for each.

    Example:
        >>> found = hmpx.explain("conv?d")
        >>> [explanation.op for explanation in found]
        ['conv1d', 'conv2d', 'conv3d']
    """

    __slots__ = ()

    __repr__ = brief

    def __str__(self) -> str:
        rows = [(each.op, outcome(each.decision), each.reason) for each in self]
        counts = [sum(row.calls for row in each.calls) for each in self]
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        lines = []
        for (op, said, reason), count, each in zip(rows, counts, self, strict=True):
            called = f"  {count:,} calls" if each.is_recorded else ""
            first = f"+{len(each.asked_first)} asked first" if each.asked_first else ""
            cells = [op.ljust(widths[0]), said.ljust(widths[1]), reason, first]
            lines.append("  ".join([cell for cell in cells if cell]).rstrip() + called)
        policies = dict.fromkeys(each.policy for each in self)
        return lined([*lines, f"by {', '.join(policies)}; a single name says more"])


def _field(name: str, *texts: str) -> Iterator[str]:
    for text in texts:
        yield from _wrapped(text, f"  {name}".ljust(_INDENT - 1) + " ", _INDENT)
        name = ""


def _wrapped(text: str, before: str, indent: int) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=before,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


# --- names ---------------------------------------------------------------------------------------


def listable(policy: Policy) -> list[str]:
    """Returns all op names that a list may hold; those of other libraries only if a list decides them."""
    names = [name for name in ops.table() if ops.is_castable(name)]
    decided = (*policy.decisions, *policy.section_rules())
    names += dict.fromkeys(filter(ops.is_foreign, decided))
    return sorted(names, key=lambda name: (name.startswith("_"), name.lower()))


def is_glob(pattern: str) -> bool:
    return any(character in pattern for character in "*?[")


def matching(pattern: str, names: list[str]) -> list[str]:
    """Returns the ``names`` that ``pattern`` matches: an exact name in any spelling first."""
    if is_glob(pattern):
        return [
            name
            for name in names
            if fnmatch.fnmatchcase(name, pattern)
            or any(fnmatch.fnmatchcase(site, pattern) for site in call_sites(name))
        ]
    resolved = ops.resolve(pattern)
    first = [resolved] if resolved in names else []
    return first + [name for name in names if pattern in name and name != resolved]


def why_no_match(pattern: str, names: list[str], otherwise: str) -> str:
    """Returns a message for a pattern without a match; ``otherwise`` ends it if no name is similar."""
    resolved = ops.resolve(pattern)
    if resolved is not None and ops.is_foreign(resolved):
        return f"{shown(pattern)}, an op of another library, is in no list"
    if resolved is not None:
        return f"{shown(pattern)} computes nothing from tensors, so there is nothing to cast"
    spellings = [spelling for spelling, name in ops.names().items() if name in names]
    return f"no op matches {shown(pattern)}{ops.nearest(pattern, spellings) or otherwise}"


def outcome(decision: Decision) -> str:
    """Returns a decision in a few words: ``"LOW bf16"``; ``"-"`` if inputs are left alone."""
    if decision.cast_policy is CastPolicy.PASS:
        return "-"
    words = [decision.cast_policy.name]
    if decision.cast_policy is CastPolicy.LOW and decision.dtype is not None:
        words.append(short_name(decision.dtype))
    words += [f"{word}={short_name(value)}" for word, value in decision.options()]
    return " ".join(words)


def call_sites(name: str) -> list[str]:
    """Returns the places in torch where op ``name`` is called, including Python functions."""
    if ops.is_foreign(name):
        return [name]
    op = ops.table()[name]
    return _public([site.qualified for site in (*op.sites, *op.followers)])


def in_place_sites(name: str) -> list[str]:
    if ops.is_foreign(name):
        return []
    return _public([site.qualified for site in ops.table()[name].sites if site.in_place])


def takes_out(name: str) -> bool:
    """Whether some call of op ``name`` takes ``out=``; tensor methods don't."""
    if ops.is_foreign(name):
        return False
    sites = [site for site in ops.table()[name].sites if site.namespace != "torch.Tensor"]
    return any("out" in ops.parameters(site).names for site in sites)


def _public(sites: list[str]) -> list[str]:
    """Returns ``sites`` without those of internal namespaces, unless there are only such."""
    return [site for site in sites if not site.startswith(f"{VF_NAMESPACE}.")] or sites
