"""Reads traces: JSON lines, each an object with one key, its kind.

====================  =====================================================================================
``trace``             the header: what a run depends on besides the program
``site``              op, module, line, phase, decision, its reason, its dtype, other arguments, whether it was
                      compiled; the first is 0
``tensor``            shape, dtype, low contents, number of the tensor that it is a view of, name, sketch
``call``              site, numbers of the tensors given and returned, gain
``gradient``          call, which of its results, tensor
``parameter``         name of a parameter, tensor of its gradient
``step``, ``end``     number of the step that ends; number of calls
====================  =====================================================================================
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

from .. import files
from ..errors import raised_here, short, shown
from .sketches import Sketch

#: The version of the file.
FORMAT: Final = 2

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


@dataclass(frozen=True, slots=True)
class TracedTensor:
    """A tensor of a trace.

    Attributes:
        shape: Its shape.
        dtype: ``"float32"``.
        contents: ``"bfloat16"`` for fp32 values that were low; ``""`` for others.
        base: Number of the tensor that it is a view of; -1 for none.
        name: Of a parameter or buffer.
        sketch: Its numbers; None if its values can't be read.
    """

    shape: tuple[int, ...]
    dtype: str
    contents: str
    base: int
    name: str
    sketch: Sketch | None


@dataclass(frozen=True, slots=True)
class TracedCall:
    """A call of a trace; a gradient of a parameter is a call without inputs.

    Attributes:
        site: The call's site.
        inputs: Numbers of the tensors given, and
        outputs: of those returned.
        gain: By how much it amplifies relative changes of its inputs; 0 if unknown.
        gradients: Result -> number of the gradient that came into it.
        step: Number of the step.
    """

    site: TracedSite
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    gain: float
    gradients: dict[int, int]
    step: int


@dataclass(frozen=True)
class TracedRun:
    """A trace: header, calls and tensors."""

    header: Mapping[str, Any]
    calls: tuple[TracedCall, ...]
    tensors: tuple[TracedTensor, ...]

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
    calls, gradients = list[TracedCall](), list[dict[int, int]]()  # the latter of traced calls
    last: list[Callable[[int], TracedCall]] = []  # calls of the step that has not ended
    try:
        for where, line in files.json_lines(path, files.TRACE):  # noqa: B007  # for the error
            ((kind, found),) = files.shaped(line, Mapping[str, Any]).items()
            if kind not in _LINES or (kind != "trace" and not headers):
                raise ValueError(f"unexpected {shown(kind)}")
            if kind == "trace" and isinstance(found, dict) and found.get("format") != FORMAT:
                raise ValueError(f"it has format {found.get('format')}, this hmpx reads {FORMAT}")
            values = files.shaped(found, _LINES[kind])
            if kind == "trace":
                headers.append(values)
            elif kind == "site":
                sites.append(values)
            elif kind == "tensor":
                shape, dtype, contents, base, name, text = values
                if base != -1:
                    _check(tensors, base)
                sketch = Sketch.decoded(text) if text else None
                tensors.append(TracedTensor(shape, dtype, contents, base, name, sketch))
            elif kind == "call":
                site, inputs, outputs, gain = values
                _check(sites, site)
                _check(tensors, *inputs, *outputs)
                gradients.append({})
                last.append(partial(TracedCall, sites[site], inputs, outputs, gain, gradients[-1]))
            elif kind == "gradient":
                call, result, tensor = values
                _check(gradients, call)
                _check(tensors, tensor)
                gradients[call][result] = tensor
            elif kind == "parameter":
                name, tensor = values
                _check(tensors, tensor)
                site = TracedSite(PARAMETER, name, "", "backward", "", "", "", "")
                last.append(partial(TracedCall, site, (), (tensor,), 0.0, {}))
            elif kind == "step":
                calls += [each(values) for each in last]
                last, step = [], values + 1
        if not headers:
            raise ValueError("it is empty")
    except raised_here(ValueError, struct.error) as error:
        raise files.damaged(where, files.TRACE, error) from None
    if kind == "end" or not step:
        calls += [each(step) for each in last]
    return TracedRun(asdict(headers[0]), tuple(calls), tuple(tensors))


def _check(known: Sequence[Any], *numbers: int) -> None:
    """Raises a ValueError if a number is not that of an item."""
    for each in numbers:
        if not 0 <= each < len(known):
            raise ValueError(f"there is no number {each} of {len(known)}")
