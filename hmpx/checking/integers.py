"""HP102: whole numbers that a low type does not hold."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from ..comparing import Origins, is_readable, may_read
from ..observers import user_location
from ..tensors import LOW_DTYPES, leaves, short_name
from ..torch_internals import DispatchMode, call_in, dispatch_modes
from ..torch_state import spot
from .findings import Finding
from .lint_trace import CONVERTING, DIFFERENCES, LintedCall, Trace

#: Values read where reading all would be slow, and to see whether it is worth while.
_SAMPLE: Final = 1 << 16
_FEW: Final = 64

#: No position or counter is greater; masks are.
_MOST_COUNTED: Final = 2.0**40


def rounded_integers(seen: LintedCall, trace: Trace, origins: Origins) -> Iterator[Finding]:
    """HP102: integers that a cast to a low type changes."""
    low = next((each.dtype for each in seen.outputs if each.dtype in LOW_DTYPES), seen.low)
    if low is None:
        return
    for each in leaves([*seen.args, *seen.kwargs.values()]):
        if (
            not isinstance(each, Tensor)
            or each.dtype in (*LOW_DTYPES, torch.bool)
            or not each.dim()
        ):
            continue
        is_index = not each.is_floating_point() and seen.call.op not in _ARITHMETIC
        if each.is_complex() or is_index:
            continue
        remedy = f"{seen.line()} in the fp32 list"
        if found := _rounded(seen.place, each, low, remedy):
            yield from found
            return


def _rounded(
    at: tuple[str, str, str], tensor: Tensor, low: torch.dtype, remedy: str
) -> list[Finding]:
    """Returns a finding if the values are integers, and some of them change in ``low``."""
    values = tensor.detach().reshape(-1)
    for count in (_FEW, _SAMPLE):  # few values tell most tensors
        sample = values[:count].double()
        sample = sample[sample.abs() < _MOST_COUNTED]
        if not (sample == sample.round()).all():
            return []
    values = sample
    if not values.numel():
        return []
    changed, remedied = (
        (values.to(each).double() != values).double().mean().item() for each in (low, torch.float32)
    )
    if not changed:
        return []
    evidence = (
        f"{changed:.0%} of the whole numbers up to {values.abs().max().item():,.0f} change in "
        f"{short_name(low)}, which counts to {round(2 / torch.finfo(low).eps):,}"
    )
    return [Finding("HP102", *at, evidence, changed, remedied, remedy)]


#: Ops that compute with integers and low tensors; others take integers as indices.
_ARITHMETIC: Final = CONVERTING | DIFFERENCES | {"mul", "rmul", "imul", "truediv", "div", "pow"}


class IntegerCasts(DispatchMode):
    """HP102 for calls without a floating-point input: casts of integers, and ranges made in a low type."""

    def __init__(self, add: Callable[[Iterable[Finding]], None]) -> None:
        """Takes the function that gets the findings."""
        super().__init__()
        self._add = add
        self._depth = self._thread = 0

    def __enter__(self) -> IntegerCasts:
        self._depth, self._thread = dispatch_modes(), threading.get_ident()
        super().__enter__()
        return self

    def pause(self) -> None:
        """Leaves the mode, unless it is paused, belongs to another thread, or is below one of the program."""
        if self._is_at(self._depth + 1):
            self.__exit__(None, None, None)

    def resume(self) -> None:
        """Enters the mode again where it was."""
        if self._is_at(self._depth):
            self.__enter__()

    def _is_at(self, depth: int) -> bool:
        return threading.get_ident() == self._thread and dispatch_modes() == depth

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = call_in(self, func, args, kwargs)
        name = getattr(func, "overloadpacket", func).__name__
        if name not in ("_to_copy", "arange") or not (may_read() and is_readable(result)):
            return result
        if result.dtype in LOW_DTYPES and result.dim():
            exact = (
                args[0] if name == "_to_copy" else func(*args, **{**kwargs, "dtype": torch.float64})
            )
            if name == "arange" or not exact.is_floating_point():
                place = name.strip("_"), spot()[1], user_location()
                self._add(_rounded(place, exact, result.dtype, "keep them in float32"))
        return result
