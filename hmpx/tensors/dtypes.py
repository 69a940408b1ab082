"""The dtypes that hmpx casts between, and their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, Protocol, TypeGuard

import torch
from torch import Tensor

from ..errors import OptionError, shown, suggestion

#: Tensors of these dtypes may be cast; float64, complex, integer and bool never are.
ELIGIBLE: frozenset[torch.dtype] = frozenset({torch.float32, torch.bfloat16, torch.float16})

LOW_PRECISION: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
LOW_DTYPES: Final = frozenset(LOW_PRECISION)


def is_low(dtype: object) -> TypeGuard[torch.dtype]:
    """Whether any value is a low-precision dtype."""
    return isinstance(dtype, torch.dtype) and dtype in LOW_DTYPES


#: The dtypes that an op may compute in, and that its outputs may be cast to.
COMPUTED: tuple[torch.dtype, ...] = (*LOW_PRECISION, torch.float32, torch.float64)

#: The cheapest differentiable cast to each dtype: ``Tensor.bfloat16`` takes half the time of
#: ``Tensor.to``. Taken from torch before anything is patched.
CAST: Mapping[torch.dtype, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        torch.float32: Tensor.float,
        torch.bfloat16: Tensor.bfloat16,
        torch.float16: Tensor.half,
        torch.float64: Tensor.double,
    }
)

_SHORT_NAMES: Mapping[torch.dtype, str] = MappingProxyType(
    {
        torch.float32: "fp32",
        torch.bfloat16: "bf16",
        torch.float16: "fp16",
        torch.float64: "fp64",
    }
)


class Named(Protocol):
    """An object with a name, such as a number format."""

    @property
    def name(self) -> str:
        """Its name."""


def short_name(dtype: torch.dtype | Named | str) -> str:
    """Returns ``"bf16"`` for ``torch.bfloat16``, ``"int64"`` for ``torch.int64``; a format's own name."""
    if isinstance(dtype, str):
        return dtype
    if not isinstance(dtype, torch.dtype):
        return dtype.name
    return _SHORT_NAMES.get(dtype, long_name(dtype))


def long_name(dtype: torch.dtype | Named | str) -> str:
    """Returns ``"bfloat16"`` for ``torch.bfloat16``; a format's own name."""
    if isinstance(dtype, str):
        return dtype
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype.name


def parse_name(name: str, allowed: tuple[torch.dtype, ...] = COMPUTED) -> torch.dtype:
    """Returns the dtype among ``allowed`` with this name, such as ``"float16"`` or ``"fp16"``.

    Raises:
        OptionError: None of them has this name.
    """
    names = {n: d for d in allowed for n in (str(d).removeprefix("torch."), short_name(d))}
    found = names.get(name.removeprefix("torch."))
    if found is None:
        known = ", ".join(str(d).removeprefix("torch.") for d in allowed)
        raise OptionError(f"unknown dtype {shown(name)} ({known}){suggestion(name, names)}")
    return found
