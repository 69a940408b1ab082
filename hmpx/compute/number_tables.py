"""Operators of graphs that look bfloat16 numbers up in a table, which the graph makes itself.

Independent of which functions are looked up, and when.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from ..number_formats import bfloat16_kernels
from ..torch_internals import own_operator, set_kernel
from ..torch_state import without_casts

#: Of a table: all numbers of bfloat16, in the order of their bits.
NUMBERS: Final = 1 << 16

_BITS: Final = NUMBERS - 1

#: Elements that a graph is going to look up, so that kernels are there as soon as they can be.
_MANY: Final = 1 << 30


def _run_numbers() -> Tensor:
    with without_casts():
        bits = torch.arange(NUMBERS, dtype=torch.int32, device="cpu")
        return bits.to(torch.int16).view(torch.bfloat16)


def _run(x: Tensor, values: Tensor) -> Tensor:
    with without_casts():
        x, kernels = _dense(x), bfloat16_kernels()
        if kernels is None:
            return _found(x, values)
        return kernels.look_up(x, torch.empty_like(x), values)


def _run_scaled(factors: Tensor, x: Tensor, values: Tensor) -> Tensor:
    with without_casts():
        factors, x, kernels = _dense(factors), _dense(x), bfloat16_kernels()
        if kernels is None:
            return (factors.float() * _found(x, values)).bfloat16()
        return kernels.scale(x, factors, torch.empty_like(x), values)


def _dense(tensor: Tensor) -> Tensor:
    """Returns the values in memory, in their order: a view may stand for negated ones."""
    return tensor.resolve_neg().contiguous()


def _found(x: Tensor, values: Tensor) -> Tensor:
    return values[x.view(torch.int16).int() & _BITS]


def _all_shaped() -> Tensor:
    return torch.empty(NUMBERS, dtype=torch.bfloat16, device="cpu")


def _shaped(x: Tensor, *others: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _defined(signature: str, function: Any, fake: Any = _shaped, key: str = "CPU") -> Any:
    operator = own_operator(signature, fake)
    set_kernel(operator, function, key)
    return operator


#: All numbers of bfloat16, in the order of their bits. They are loaded as others are: inductor
#: has an opinion on the values of what it computes of an index, and fails where that is NaN.
ALL_NUMBERS: Final = _defined(
    "all_numbers() -> Tensor", _run_numbers, _all_shaped, "CompositeExplicitAutograd"
)

#: A function of each element of a bfloat16 tensor; its values at all numbers are bfloat16, too.
LOOKED_UP: Final = _defined("looked_up(Tensor x, Tensor values) -> Tensor", _run)

#: The elements of one bfloat16 tensor, times a function of those of another one, rounded to bfloat16;
#: the function's values at all numbers are float32.
SCALED: Final = _defined("scaled(Tensor factors, Tensor x, Tensor values) -> Tensor", _run_scaled)
