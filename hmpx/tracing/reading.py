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

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ..errors import OptionError, raised_here, short
from .sketches import Sketch

#: The version of the file.
FORMAT: Final = 2

#: The op of the gradients of parameters, which are calls without inputs.
PARAMETER: Final = "gradient"


@dataclass(frozen=True, slots=True)
class Site:
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
        step: Number of the step.
        gradients: Result -> number of the gradient that came into it.
    """

    site: Site
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    gain: float
    step: int
    gradients: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """A trace: header, calls and tensors."""

    header: Mapping[str, Any]
    calls: tuple[TracedCall, ...]
    tensors: tuple[TracedTensor, ...]

    def __repr__(self) -> str:
        return f"<hmpx.tracing.Run of {self.header['program']}: {len(self.calls)} calls>"


def read(path: str | os.PathLike[str]) -> Run:
    """Returns the trace in a file. Of a run that was killed, the steps that ended.

    Raises:
        OptionError: The file can't be read, or is not a trace.
    """
    name = short(os.fspath(path))
    try:
        lines = Path(path).read_text("utf-8").splitlines(keepends=True)
    except raised_here(OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise OptionError(f"can't read the trace {name}: {why}") from None
    try:
        header = json.loads(lines[0])["trace"]
        if header["format"] != FORMAT:
            raise OptionError(
                f"{name} has format {header['format']}, this hmpx reads {FORMAT}; trace it again"
            )
        return _run(header, _ended(lines[1:]))
    except raised_here(ValueError, KeyError, IndexError, TypeError) as error:
        raise OptionError(
            f"{name} is not a trace; hmpx.trace() and hmpx run --trace write them"
        ) from error


def _ended(lines: Iterable[str]) -> list[tuple[str, Any]]:
    """Returns kinds and values up to the last step that ended; all, if the trace or no step did."""
    found = [next(iter(json.loads(line).items())) for line in lines if line.endswith("\n")]
    if found and found[-1][0] != "end":
        steps = [index for index, (kind, _) in enumerate(found) if kind == "step"]
        return found[: steps[-1] + 1] if steps else found
    return found


def _run(header: Mapping[str, Any], lines: Sequence[tuple[str, Any]]) -> Run:
    sites, tensors, calls = list[Site](), list[TracedTensor](), list[TracedCall]()
    of_calls = list[TracedCall]()  # without gradients of parameters
    steps = [values for kind, values in lines if kind == "step"]
    steps.append(steps[-1] + 1 if steps else 0)  # of calls after the last one
    for kind, values in lines:
        if kind == "site":
            sites.append(Site(*values))
        elif kind == "tensor":
            shape, dtype, contents, base, name, text = values
            found = Sketch.decoded(text) if text else None
            tensors.append(TracedTensor(tuple(shape), dtype, contents, base, name, found))
        elif kind == "call":
            site, inputs, outputs, gain = values
            of_calls.append(TracedCall(sites[site], tuple(inputs), tuple(outputs), gain, steps[0]))
            calls.append(of_calls[-1])
        elif kind == "gradient":
            call, result, tensor = values
            of_calls[call].gradients[result] = tensor
        elif kind == "parameter":
            name, tensor = values
            site = Site(PARAMETER, name, "", "backward", "", "", "", "")
            calls.append(TracedCall(site, (), (tensor,), 0.0, steps[0]))
        elif kind == "step":
            steps.pop(0)
    return Run(header, tuple(calls), tuple(tensors))
