"""Running statistics, which a norm updates as a side effect, for any cast of its inputs.

They bypass all code that casts, upcasts or rounds arguments, and go straight to torch's function. If
its kernel rejects their dtypes with those of the inputs, it gets copies in another dtype, and the
updated copies are copied back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..tensors import CAST, LOW_DTYPES, Args, Kwargs
from ..torch_internals import data_of, transforms
from ..torch_state import is_below_dispatcher
from .composition import rounded

# Read before anything is patched: op lists may name any of them.
_copy_ = Tensor.copy_


@dataclass(frozen=True)
class Statistics:
    """The running statistics among a norm's arguments, and the dtypes that its kernels accept."""

    positions: Mapping[str, int]  # name of each statistic -> its position among the arguments
    parameters: Mapping[str, int]  # weight and bias, which must have the dtype of the statistics
    first: str  # name of the input
    updates_if: tuple[str, int] | None  # the argument that decides whether statistics are updated
    #: Whose kernels accept fp32 parameters and statistics with a low-precision input.
    mixed_device_types: frozenset[str]
    are_rounded: bool  # torch's function casts statistics to the input's dtype

    def are_fp32(self, args: Args, kwargs: Kwargs) -> bool:
        """Whether statistics and parameters are positional, and fp32 or None; False if it needs a closer look."""
        if kwargs or transforms() is not None:
            return False
        count = len(args)
        for position in (*self.positions.values(), *self.parameters.values()):
            value = args[position] if position < count else None
            # One overload of _native_batch_norm_legit has a bool in the position of a statistic.
            if value is not None and getattr(value, "dtype", None) is not torch.float32:
                return False
        return True

    def set_apart(
        self, function: Callable[..., Any], args: Args, kwargs: Kwargs
    ) -> tuple[Callable[..., Any], Args, Kwargs]:
        """Returns the call with None for the statistics, and a function that supplies them."""
        values, named = list(args), dict(kwargs)
        held = []
        for where, key in _places(self.positions, values, named):
            held.append((key, where[key]))
            where[key] = None
        if not held:
            return function, args, kwargs
        return functools.partial(self._call, function, held), tuple(values), named

    def _call(
        self,
        function: Callable[..., Any],
        held: list[tuple[Any, Tensor]],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        values = list(args)
        for key, statistic in held:
            where: Any = values if isinstance(key, int) else kwargs
            where[key] = statistic
        first = values[0] if values else kwargs[self.first]
        statistics = list(_places(self.positions, values, kwargs))
        parameters = list(_places(self.parameters, values, kwargs))
        dtype = self._dtype(first, {where[key].dtype for where, key in statistics + parameters})
        if dtype is None or is_below_dispatcher():
            return function(*values, **kwargs)
        is_transformed = transforms() is not None
        is_upcast = is_transformed or (self.are_rounded and dtype is not first.dtype)
        if is_upcast:
            parameters.append((values, 0) if values else (kwargs, self.first))
        for where, key in parameters:
            where[key] = CAST[dtype](where[key])
        copied = []
        for where, key in statistics:
            statistic = where[key]
            if statistic.dtype is not dtype:
                where[key] = CAST[dtype](statistic)
                copied.append((statistic, where[key]))
        result = function(*values, **kwargs)
        name, position = self.updates_if or ("", 0)
        is_written = values[position] if position < len(values) else kwargs.get(name)
        if self.updates_if is None or is_written:
            with torch.no_grad():
                for statistic, copy in copied:
                    # Bypasses the version counter, like the kernels, for later gradients.
                    _copy_(statistic if is_transformed else data_of(statistic), copy)
        return rounded(result, CAST[first.dtype], dtype) if is_upcast else result

    def _dtype(self, first: Tensor, found: set[torch.dtype]) -> torch.dtype | None:
        """Returns the dtype for statistics and parameters; None if they need no cast.

        The input gets the same cast in torch.func.vmap, whose formulas reject mixed dtypes, and if torch's
        function would round the statistics.
        """
        dtype = first.dtype
        if dtype not in CAST or found <= {dtype}:
            return None
        if dtype not in LOW_DTYPES:
            return dtype
        if transforms() is not None or self.are_rounded:
            return torch.float32
        if first.device.type not in self.mixed_device_types:
            return dtype
        return None if found <= {torch.float32} else torch.float32


def _places(
    positions: Mapping[str, int], args: list[Any], kwargs: Kwargs
) -> Iterator[tuple[Any, Any]]:
    """Yields the container (``args`` or ``kwargs``) and the key of each of these tensors in the call."""
    for name, position in positions.items():
        if position < len(args):
            if isinstance(args[position], Tensor):
                yield args, position
        elif isinstance(kwargs.get(name), Tensor):
            yield kwargs, name
