"""The data for observers: one frozen `OpCall` per patched call, its tensors, and its place.

Nothing here runs unless an observer is attached.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from ..errors import fielded
from ..places import DIRECTORY
from ..tensors import CAST, LOW_DTYPES, HasName, map_tensors
from ..torch_state import Phase

#: Of torch, hmpx, code without a file, and the frames that decorators and context managers add.
_NOT_USERS = (
    str(Path(torch.__file__).parent),
    str(DIRECTORY),
    "<",
    contextlib.__file__,
    functools.__file__,
)


@dataclass(frozen=True, slots=True)
class OpCall:
    """One call of a patched op.

    Attributes:
        op: Op name.
        site: The patched call site: ``torch.nn.functional.linear``.
        function: The original callable.
        cast_policy: Name of the `CastPolicy` that decided: ``"LOW"``; ``"TARGET"`` if the tensor
            that is written to decided; ``"PASS"`` if the op is never cast.
        reason: The origin of the decision: ``"lists/hmpx/bf16.txt:20"``, ``"in-place rule"``.
        dtype: The dtype, or number format, to which inputs were cast; None for none.
        input_dtypes: Dtypes of the floating inputs, before and
        cast_dtypes: after casting by hmpx.
        output_dtypes: Dtypes of the tensors returned.
        device_type: Device type of the first floating input; None if there is none.
        cast_bytes: Bytes written by the casts of this call.
        module: Qualified name of the innermost module; ``""`` for none and for the outermost.
        location: ``"train.py:12"``: the innermost line outside torch and hmpx.
        phase: ``"forward"``; ``"recompute"`` when a checkpoint reruns its forward; ``"backward"`` in other
            Python code that autograd calls.
        seconds: Duration of the call, with its casts; None if no observer needs times.
        legalized: Whether it computed in fp32 and rounded: legalized, emulated, or for lack of a
            kernel.
        kernels: Dtypes that the kernels computed in, below torch.autocast; () if no observer needs
            them.

    Example:
        >>> def show(call):
        ...     print(call.op, call.cast_policy, call.input_dtypes, call.output_dtypes)
        >>> with hmpx.convert(device_types={"cpu"}), hmpx.attach(show):
        ...     y = torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        mm LOW (torch.float32, torch.float32) (torch.bfloat16,)
    """

    op: str
    site: str
    function: Callable[..., Any]
    cast_policy: str
    reason: str
    dtype: torch.dtype | HasName | None
    input_dtypes: tuple[torch.dtype, ...]
    cast_dtypes: tuple[torch.dtype, ...]
    output_dtypes: tuple[torch.dtype, ...]
    device_type: str | None
    cast_bytes: int
    module: str
    location: str
    phase: Phase = "forward"
    seconds: float | None = None
    legalized: bool = False
    kernels: tuple[torch.dtype, ...] = ()

    __repr__ = fielded

    @property
    def computed(self) -> tuple[torch.dtype | HasName, ...]:
        """What the call computed in: the low type if it was legalized, else the dtypes of its kernels."""
        return (self.dtype,) if self.legalized and self.dtype is not None else self.kernels


@dataclass(frozen=True, slots=True, eq=False)
class CallTensors:
    """The tensors of one call, for observers that ask for them.

    Attributes:
        given: The positional arguments before casts; copies, if the call writes to any.
        given_kwargs: The keyword arguments before casts.
        cast: The positional arguments after casts, without gradients; running statistics are not cast.
        cast_kwargs: The keyword arguments after casts.
        run: Torch's own function, to rerun on any arguments: ``tensors.run(*tensors.given)``. Without
            casts and gradients, and with the random numbers of the call.
        run_cast: The call as hmpx runs it by the policy, to rerun likewise, even if casts are off.
        result: The call's result.
        writes: The call writes to some of its arguments.
        in_graph: A compiled call: its graph may overwrite the tensors later.

    Example:
        >>> def error(call, tensors):
        ...     print(call.op, (tensors.result - tensors.in_fp32()).abs().max().item())
        >>> with hmpx.convert(device_types={"cpu"}), hmpx.attach(error, tensors=True):
        ...     y = torch.mm(torch.full((1, 1), 1.01), torch.ones(1, 1))
        mm 0.002187490463256836
    """

    given: tuple[Any, ...]
    given_kwargs: Mapping[str, Any]
    cast: tuple[Any, ...]
    cast_kwargs: Mapping[str, Any]
    run: Callable[..., Any]
    run_cast: Callable[..., Any]
    result: Any = None
    writes: bool = False
    in_graph: bool = False

    __repr__ = fielded

    def in_fp32(self) -> Any:
        """Reruns the call on the original inputs, with low-precision ones upcast to fp32."""

        def upcast(tensor: Tensor) -> Tensor:
            return CAST[torch.float32](tensor) if tensor.dtype in LOW_DTYPES else tensor

        kwargs = {name: map_tensors(value, upcast) for name, value in self.given_kwargs.items()}
        return self.run(*map_tensors(self.given, upcast), **kwargs)


def user_location(frame: FrameType | None = None) -> str:
    """Returns ``"path:line"`` of the innermost frame outside torch and hmpx; ``""`` if none.

    Typed code has a name instead of a path: ``"<stdin>:3"``.
    """
    path, line = user_line(frame or sys._getframe(1))
    return f"{path}:{line}" if path else ""


def user_line(frame: FrameType | None) -> tuple[str, int]:
    """Returns the path and the number of the line of `user_location`."""
    while frame is not None:
        path = frame.f_code.co_filename
        if is_users(path) or (path[:1] == "<" and _is_typed(frame)):
            return path, frame.f_lineno
        frame = frame.f_back
    return "", 0


@functools.lru_cache(maxsize=1 << 12)
def is_users(path: str) -> bool:
    """Whether a file is neither torch's nor hmpx's."""
    return not path.startswith(_NOT_USERS)


def _is_typed(frame: FrameType) -> bool:
    """Whether code without a file is the program's: from a prompt, ``python -`` or ``python -c``.

    Other such code is generated, for example by dataclasses.
    """
    names, path = frame.f_globals, frame.f_code.co_filename
    return names.get("__name__") == "__main__" and names.get("__file__", path) == path
