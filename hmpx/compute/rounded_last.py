"""Ops of the fp32 list that are asked for a low-precision result: they compute in fp32 first.

torch's kernels cast the input to the ``dtype=`` that a call names, and compute on that: an attention mask
filled with the least number of fp32 is -inf in bfloat16, and a softmax of nothing else is NaN. Independent
of op lists.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..tensors import CAST, is_low
from ..torch_state import is_below_dispatcher, is_off


def rounding_last(
    function: Callable[..., Any], names: tuple[str, ...], device_types: frozenset[str]
) -> Callable[..., Any]:
    """Returns ``function``, such that a low ``dtype=`` says what its result is rounded to.

    ``function`` itself is its ``__wrapped__``. Only where its input is a float32 tensor, on one of ``device_types``.

    Args:
        function: One of torch's, whose kernel casts its input to ``dtype=`` before it computes.
        names: Its parameters by position.
        device_types: Types of devices whose tensors are cast.
    """
    position = names.index("dtype") if "dtype" in names else len(names)

    @functools.wraps(function, updated=())
    def rounded_last(*args: Any, **kwargs: Any) -> Any:
        is_named = "dtype" in kwargs
        if not is_named and len(args) <= position:
            return function(*args, **kwargs)
        dtype = kwargs["dtype"] if is_named else args[position]
        given = args[0] if args else next(filter(_is_tensor, kwargs.values()), None)
        if (
            not is_low(dtype)
            or not isinstance(given, Tensor)
            or given.dtype is not torch.float32
            or given.device.type not in device_types
            or kwargs.get("out") is not None
            or is_below_dispatcher()
            or is_off()
        ):
            return function(*args, **kwargs)
        if is_named:
            result = function(*args, **{**kwargs, "dtype": torch.float32})
        else:
            result = function(*args[:position], torch.float32, *args[position + 1 :], **kwargs)
        return CAST[dtype](result)

    return rounded_last


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)
