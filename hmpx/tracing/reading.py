"""Reads traces: JSON lines, each an object with one key, its kind.

====================  =====================================================================================
``trace``             the header: what a run depends on besides the program
``site``              op, module, line, phase, decision, its reason, its dtype, other arguments, whether it was
                      compiled; the first is 0
``tensor``            shape, dtype, low contents, number of the tensor that it is a view of, name, sketch
``call``              site, numbers of the tensors given and returned, gain
``gradient``          call, which of its results, tensor
``parameter``         name of a parameter, tensor of its gradient
``optimizer``         class of the optimizer that ends the step, settings of each of its groups; not in older traces
``step``, ``end``     number of the step that ends; number of calls
====================  =====================================================================================
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final, TypeVar

from .. import files
from ..errors import raised_here, short, shown
from .sketches import Sketch

_Item = TypeVar("_Item")

#: The version of the file. In version 2 sketches were others.
FORMAT: Final = 3

#: The op of the gradients of parameters, which are calls without inputs.
PARAMETER: Final = "gradient"


@dataclass(frozen=True, slots=True)
class TracedSite:
    """What calls have in common: op, module, line, phase, decision, arguments other than tensors, graph."""

    op: str
    module: str
    location: str
    phase: str
    cast_policy: str
    reason: str
    dtype: str
    arguments: str
    is_compiled: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class TracedTensor:
    """A tensor of a trace, equal only to itself.

    Attributes:
        shape: Its shape.
        dtype: ``"float32"``.
        contents: ``"bfloat16"`` for fp32 values that were low; ``""`` for others.
        base: The tensor that it is a view of; None for none.
        name: Of a parameter or buffer.
        sketch: Its numbers; None if its values can't be read.
    """

    shape: tuple[int, ...]
    dtype: str
    contents: str
    base: TracedTensor | None
    name: str
    sketch: Sketch | None

    @property
    def kind(self) -> str:
        """``"float32[8, 16]"``."""
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True, eq=False)
class TracedCall:
    """A call of a trace, equal only to itself; a gradient of a parameter is a call without inputs.

    Attributes:
        site: The call's site.
        inputs: The tensors given, and
        outputs: those returned.
        gain: By how much it amplifies relative changes of its inputs; 0 if unknown.
        gradients: Number of a result -> the gradient that came into it.
        step: Number of the step.
    """

    site: TracedSite
    inputs: tuple[TracedTensor, ...]
    outputs: tuple[TracedTensor, ...]
    gain: float
    gradients: dict[int, TracedTensor]
    step: int

    @property
    def dtype(self) -> str:
        """The dtype that it computed in: the decision's, or the first result's."""
        return self.site.dtype or next((each.dtype for each in self.outputs), "")

    @property
    def decision(self) -> str:
        """What decided its dtype: ``"bfloat16 (lists/hmpx/bf16.txt:20)"``."""
        return f"{self.site.dtype or 'left alone'} ({self.site.reason})"


@dataclass(frozen=True, slots=True)
class TracedOptimizer:
    """An optimizer as it steps: its class, and the settings of each of its groups, such as ``lr``, as text."""

    name: str
    groups: tuple[Mapping[str, str], ...]


@dataclass(frozen=True)
class TracedRun:
    """A trace: its header, its calls, and of each step the optimizer."""

    header: Mapping[str, Any]
    calls: tuple[TracedCall, ...]
    optimizers: Mapping[int, TracedOptimizer]

    def __repr__(self) -> str:
        return f"<hmpx.tracing.TracedRun of {self.header['program']}: {len(self.calls)} calls>"


@dataclass(frozen=True)
class Header:
    """What a run depends on besides the program."""

    format: int
    hmpx: str
    program: str
    torch: str
    machine: str
    device: str
    threads: int
    processes: int


#: Kind of line -> the type of its values.
_LINES: Final[Mapping[str, Any]] = {
    "trace": Header,
    "site": TracedSite,
    "tensor": tuple[tuple[int, ...], str, str, int, str, str],
    "call": tuple[int, tuple[int, ...], tuple[int, ...], float],
    "gradient": tuple[int, int, int],
    "parameter": tuple[str, int],
    "optimizer": TracedOptimizer,
    "step": int,
    "end": int,
}


def read(path: str | os.PathLike[str]) -> TracedRun:
    """Returns the trace in a file. Of a run that was killed, the steps that ended.

    Raises:
        OptionError: The file can't be read, or is not a trace.
    """
    where, kind, step = short(os.fspath(path)), "", 0
    headers, sites, tensors = list[Header](), list[TracedSite](), list[TracedTensor]()
    calls, gradients = list[TracedCall](), list[dict[int, TracedTensor]]()  # of traced calls
    last: list[Callable[[int], TracedCall]] = []  # calls of the step that has not ended
    optimizers, stepping = dict[int, TracedOptimizer](), list[TracedOptimizer]()
    try:
        for where, line in files.json_lines(path, files.TRACE):  # noqa: B007  # for the error
            ((kind, found),) = files.shaped(line, Mapping[str, Any]).items()
            if kind not in _LINES or (kind != "trace" and not headers):
                raise ValueError(f"unexpected {shown(kind)}")
            is_header = kind == "trace" and isinstance(found, dict)
            if is_header and (known := found.get("format")) not in (2, FORMAT):
                raise ValueError(f"it has format {known}, this hmpx reads 2 and {FORMAT}")
            values = files.shaped(found, _LINES[kind])
            if kind == "trace":
                headers.append(values)
            elif kind == "site":
                sites.append(values)
            elif kind == "tensor":
                shape, dtype, contents, base, name, text = values
                of = None if base == -1 else _item(tensors, base)
                sketch = Sketch.decoded(text) if text else None
                tensors.append(TracedTensor(shape, dtype, contents, of, name, sketch))
            elif kind == "call":
                number, given, made, gain = values
                inputs, outputs = [
                    tuple([_item(tensors, i) for i in each]) for each in (given, made)
                ]
                gradients.append({})
                site = _item(sites, number)
                last.append(partial(TracedCall, site, inputs, outputs, gain, gradients[-1]))
            elif kind == "gradient":
                call, result, tensor = values
                _item(gradients, call)[result] = _item(tensors, tensor)
            elif kind == "parameter":
                name, tensor = values
                site = TracedSite(PARAMETER, name, "", "backward", "", "", "", "")
                last.append(partial(TracedCall, site, (), (_item(tensors, tensor),), 0.0, {}))
            elif kind == "optimizer":
                stepping.append(values)
            elif kind == "step":
                calls += [each(values) for each in last]
                optimizers.update((values, each) for each in stepping)
                last, stepping, step = [], [], values + 1
        if not headers:
            raise ValueError("it is empty")
    except raised_here(ValueError, struct.error) as error:
        raise files.damaged(where, files.TRACE, error) from None
    if kind == "end" or not step:
        calls += [each(step) for each in last]
    return TracedRun(asdict(headers[0]), tuple(calls), optimizers)


def _item(known: Sequence[_Item], number: int) -> _Item:
    """Returns an item by its number, which a damaged trace may have wrong."""
    if not 0 <= number < len(known):
        raise ValueError(f"there is no number {number} of {len(known)}")
    return known[number]
