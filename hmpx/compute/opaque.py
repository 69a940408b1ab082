"""Functions of the user's own in graphs: an operator that compilers call and don't look into.

What a library computes with pointers, or with NumPy, can't be traced. The operator finds the function when
the graph runs, by the names of op and format, so a graph that was kept on the disk finds it, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from ..errors import OptionError
from ..tensors import SEQUENCES, Args, Kwargs
from ..torch_internals import HAS_OPERATORS
from ..torch_state import without_casts

#: Returns the result of a registered function: of the op and the format with these names, for an argument's
#: device type, on these arguments.
Call = Callable[[str, str, str, Args, Kwargs], Tensor]

_call: list[Call] = []


def called_by(call: Call) -> Call:
    """Makes ``call`` what the operator calls."""
    _call.append(call)
    return call


def _run(op: str, format: str, given: str, tensors: list[Tensor], like: Tensor) -> Tensor:
    args, kwargs = json.loads(given)
    with torch.no_grad(), without_casts():
        found = _call[0](
            op,
            format,
            like.device.type,
            tuple(_filled(args, tensors)),
            {name: _filled(value, tensors) for name, value in kwargs.items()},
        )
        return found.to(like.dtype, copy=True)


def _shaped(op: str, format: str, given: str, tensors: list[Tensor], like: Tensor) -> Tensor:
    return torch.empty_like(like)


def _defined() -> Any:
    """Returns the operator; None where torch is not as hmpx needs it, and `convert` refuses."""
    if not HAS_OPERATORS:
        return None
    operator = torch.library.custom_op("hmpx::lowered", _run, mutates_args=())
    operator.register_fake(_shaped)
    return operator


_OPERATOR: Final = _defined()


def lowered(op: str, format: str, args: Args, kwargs: Kwargs, like: Tensor) -> Tensor:
    """Returns the result of a registered function in a graph that is being traced.

    Args:
        op: Op name.
        format: Name of the number format.
        args: The function's positional arguments.
        kwargs: Its keyword arguments.
        like: torch's own result.

    Raises:
        OptionError: An argument can't be kept in a graph.
    """
    tensors: list[Tensor] = []
    try:
        given = json.dumps([_emptied(args, tensors), _emptied(kwargs, tensors)])
    except TypeError as error:
        raise OptionError(
            f"{op} in {format}: torch.compile can't hold a call of a registered function with such an "
            f"argument ({error}); run it uncompiled"
        ) from None
    found: Tensor = _OPERATOR(op, format, given, tensors, like.detach())
    return found


#: Key of what stands for a tensor.
_TENSOR: Final = "tensor"


def _emptied(value: Any, tensors: list[Tensor]) -> Any:
    """Returns ``value`` with numbers in place of its tensors, which are added to ``tensors``."""
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        return {_TENSOR: len(tensors) - 1}
    if isinstance(value, SEQUENCES):
        return [_emptied(each, tensors) for each in value]
    if isinstance(value, dict):
        return {name: _emptied(each, tensors) for name, each in value.items()}
    return value


def _filled(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, dict):
        return tensors[value[_TENSOR]]
    if isinstance(value, list):
        return [_filled(each, tensors) for each in value]
    return value
