"""Explanations: what is done with one op, or several, as data and as text of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from ..errors import lined
from ..policy import UNDECIDED, CastPolicy, Decision
from ..reports import Row, located
from ..tensors import short_name
from .names import outcome

#: How wide the text is.
WIDTH: Final = 80

#: How many lines of the program are shown; the others are only counted.
MOST_CALLS: Final = 20

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
    """What is done with one op, why, and where. `print` shows it as text.

    Attributes:
        op: Op name.
        decision: What the policy says.
        policy: Which policy that is: ``"policy in force"``.
        in_place: The call sites that write to their first argument: its dtype decides there.
        takes_out: Some call takes ``out=``, whose dtype decides likewise.
        sites: Every place in torch where the op is called.
        covers: Operators that the same line decides: ``("iadd", "radd")``.
        asked_first: Rules and sections that may decide otherwise, in the order in which they are asked.
        device_notes: What happens on each device type: legalized, emulated, a kernel that is lacking.
        notes: Other facts that decide about its calls.
        calls: Where a recorded program calls it.
        is_recorded: A record was given.

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
        """Where the decision comes from: ``"lists/hmpx/bf16.txt:20"``."""
        return self.decision.reason

    @property
    def cast_policy(self) -> CastPolicy:
        """The rule for its inputs."""
        return self.decision.cast_policy

    def __str__(self) -> str:
        return lined(self._lines())

    def _lines(self) -> Iterator[str]:
        yield from _wrapped(f"{self.op}: {self._what()}", "", 2)
        yield from _field("decided by", f"{self._line()} ({self.policy})")
        if self.asked_first:
            yield from _fields("asked first", self.asked_first)
        if self.covers:
            yield from _field("also decides", ", ".join(self.covers))
        for device_type, note in self.device_notes:
            yield from _field(f"on {device_type}", note)
        yield from _fields("note", self.notes)
        yield from _field("call sites", ", ".join(self.sites))
        if self._writes():
            yield from _field(
                "in place",
                f"{self._writes()}: the dtype of the tensor that is written to decides, not the lists",
            )
        if self.is_recorded:
            yield from self._recorded()

    def _line(self) -> str:
        return "no list" if self.reason in ("", UNDECIDED.reason) else self.reason

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

    def _writes(self) -> str:
        return ", ".join([*self.in_place, *["out="] * self.takes_out])

    def _recorded(self) -> Iterator[str]:
        if not self.calls:
            yield from _field("called", "never, in the recorded run")
            return
        count = sum(row.calls for row in self.calls)
        yield from _field("called", f"{count:,} times" if count != 1 else "once")
        for row in self.calls[:MOST_CALLS]:
            inputs, outputs = (
                ", ".join(map(_short, dtypes)) for dtypes in (row.input_dtypes, row.output_dtypes)
            )
            places = [f"in {row.module}"] if row.module else []
            places += [f"at {located(row.location)}"] if row.location else []
            where = " ".join(places) or "somewhere"
            said = f"{row.calls:,} x {where}: {inputs} -> {_short(row.dtype)} -> {outputs}"
            yield from _wrapped(said, " " * 4, _INDENT)
        more = len(self.calls) - MOST_CALLS
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


_SHORT: Final = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}


def _short(name: str) -> str:
    return _SHORT.get(name, name)


def _field(name: str, text: str) -> Iterable[str]:
    return _wrapped(text, f"  {name}".ljust(_INDENT - 1) + " ", _INDENT)


def _fields(name: str, texts: Iterable[str]) -> Iterator[str]:
    """Yields the lines of a field with several values, each on a line of its own."""
    for position, text in enumerate(texts):
        yield from _field("" if position else name, text)


def _wrapped(text: str, before: str, indent: int) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=before,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
