"""The reports of `watch`: the op that made a value non-finite, and the remedy."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from ..errors import brief, lined
from ..places import located
from ..tensors import short_name
from ..torch_state import Phase

Kind = Literal["nan", "inf", "overflow", "underflow", "scale"]
Source = Literal["op", "input", "parameter", "gradient"]


class Range(NamedTuple):
    """The values of a call's tensor.

    Attributes:
        name: ``"input 0"``, ``"result"``, ``"gradient"``.
        min: The smallest value.
        max: The largest value.
    """

    name: str
    min: float
    max: float

    @property
    def amax(self) -> float:
        """The largest absolute value."""
        return max(abs(self.min), abs(self.max))


class EarlierCall(NamedTuple):
    """A call before an offence.

    Attributes:
        op: Op name.
        module: Qualified name of the module.
        location: ``"train.py:12"``.
        input_dtypes: Dtypes of the floating inputs, as cast.
        output_dtypes: Dtypes of the tensors returned.
    """

    op: str
    module: str
    location: str
    input_dtypes: tuple[torch.dtype, ...]
    output_dtypes: tuple[torch.dtype, ...]


@dataclass(frozen=True, slots=True)
class Offence:
    """An op that turned finite values into non-finite ones.

    Attributes:
        op: Op name; for a function that is not one of torch's ops, the name of its autograd node.
        module: Qualified name of the module whose forward made the call; ``""`` for none.
        site: The call site: ``"torch.nn.functional.linear"``.
        location: ``"train.py:12"``: the line of the program that made the call.
        kind: ``"nan"``; ``"inf"``, which float32 also gives; ``"overflow"`` of a low-precision type or
            number format; ``"underflow"``: an input that rounding made zero; ``"scale"``: gradients
            overflow at every scale that a `torch.amp.GradScaler` tries.
        phase: ``"forward"``, ``"recompute"`` or ``"backward"``.
        step: Number of the step, from 0.
        source: ``"op"``; or where the values were non-finite before any observed op: in an
            ``"input"``, a ``"parameter"``, a ``"gradient"``.
        context: The last calls before it, the nearest last.
        ranges: Ranges of its finite inputs, and of the result's finite part. If the result is gone by then,
            its extremes, including an infinity.
        remedy: A line for an op list that prevents it, ``"fp32.txt: exp"``, tried on the same values unless
            it says otherwise; or ``"none: ..."``, and the reason.
        parameter: Qualified name of the non-finite parameter for the source ``"parameter"``; ``""`` if no
            running module holds it.

    Example:
        >>> x = torch.full((2,), 300.0, dtype=torch.float16)
        >>> with hmpx.convert(device_types={"cpu"}), hmpx.watch("collect") as w:
        ...     y = x * x
        >>> w.first.kind, w.first.remedy, w.first.ranges[0].amax
        ('overflow', 'fp32.txt: mul', 300.0)
    """

    op: str
    module: str
    site: str
    location: str
    kind: Kind
    phase: Phase
    step: int
    source: Source = "op"
    context: tuple[EarlierCall, ...] = ()
    ranges: tuple[Range, ...] = ()
    remedy: str = ""
    parameter: str = ""

    __repr__ = brief

    def __str__(self) -> str:
        lines = [f"{self._verdict()} in step {self.step}, {self.phase}"]
        if self.module:
            lines.append(f"  module   {self.module}")
        lines.append(f"  at       {located(self.location) or 'unknown'}")
        lines += [f"  {each.name:8} {each.min:.4g} .. {each.max:.4g}" for each in self.ranges]
        for position, each in enumerate(self.context):
            inputs = ", ".join(map(short_name, each.input_dtypes))
            outputs = ", ".join(map(short_name, each.output_dtypes))
            where = each.location.rpartition("/")[2]
            lines.append(
                f"  {'before' if position == 0 else '':8} {each.op}({inputs}) -> {outputs}  {where}"
            )
        lines += textwrap.wrap(
            f"remedy   {self.remedy}", 80, initial_indent="  ", subsequent_indent=" " * 11
        )
        return lined(lines)

    def _verdict(self) -> str:
        named = f"the parameter {self.parameter}" if self.parameter else "a parameter"
        where = {
            "op": "",
            "parameter": f" in {named}",
            "input": " in an input",
            "gradient": " in the gradient of its result",
        }
        return f"{self.op}: {_SHOWN[self.kind]}{where[self.source]}"


_SHOWN = {
    "nan": "NaN",
    "inf": "infinity",
    "overflow": "overflow",
    "underflow": "underflow to zero",
    "scale": "gradient overflow at every loss scale",
}
