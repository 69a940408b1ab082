"""Values that casts to low precision make zero or subnormal, counted on samples."""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ..number_formats import Float, Format, quantize
from ..observers import OpCall
from ..patching import unpatched
from ..tensors import CAST, LOW_DTYPES, is_captured
from ..torch_internals import disable_modes
from ..torch_state import without_casts
from .records import is_measurable, is_off_limits

#: Number of values sampled per tensor.
_SAMPLE: Final = 4096

_detach, _reshape = unpatched(Tensor.detach, Tensor.reshape)
_abs, _lt, _ne, _eq, _sum, _stack = unpatched(
    torch.abs, torch.lt, torch.ne, torch.eq, torch.sum, torch.stack
)
_and, _to = unpatched(torch.logical_and, Tensor.to)


class Underflow(NamedTuple):
    """The losses from casting an op's inputs to low precision, or in results of `Optimizer.step`.

    Attributes:
        op: Op name.
        module: Qualified name of the module; in the step of an optimizer of low-precision parameters, the name
            of the parameter, or with its state ``"weight: exp_avg_sq"``.
        location: ``"train.py:12"``.
        share_zero: Share of the nonzero values that became zero.
        share_subnormal: Share of them that became subnormal, and so lost digits.
        error: The standard error of the larger share.
        samples: Number of nonzero values sampled.
    """

    op: str
    module: str
    location: str
    share_zero: float
    share_subnormal: float
    error: float
    samples: int


class UnderflowCounts:
    """Counts of values, by op, module and line, kept on the devices."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._calls = 0
        self._counts: dict[tuple[str, str, str], Tensor] = {}

    def add(self, call: OpCall, inputs: list[Tensor]) -> None:
        """Counts a call."""
        is_format = isinstance(call.dtype, Format)
        if not self._rate or (call.input_dtypes == call.cast_dtypes and not is_format):
            return
        if not self.is_next() or is_off_limits():
            return
        low = [each for each in (*call.cast_dtypes, call.dtype) if each in LOW_DTYPES]
        target: Any = call.dtype if is_format else next(iter(low), None)
        given = [each for each in inputs if is_measurable(each)]
        if target is None or any(map(is_captured, given)):
            return
        with torch.no_grad(), without_casts(), disable_modes():
            for tensor in given:
                if tensor.dtype in (torch.float32, torch.float64) and tensor.numel():
                    self._count((call.op, call.module, call.location), tensor, target)

    def is_next(self) -> bool:
        """Whether the next call, or step of an optimizer, is one of the sample."""
        self._calls += 1
        return int(self._calls * self._rate) > int((self._calls - 1) * self._rate)

    def add_results(self, key: tuple[str, str, str], low: Tensor, exact: Tensor) -> None:
        """Counts results, given those in float32."""
        values, rounded = _sample(exact), _to(_sample(low), exact.dtype)
        self._tally(key, values, rounded, torch.finfo(low.dtype).smallest_normal)

    def _count(self, key: tuple[str, str, str], tensor: Tensor, target: Any) -> None:
        values = _sample(_detach(tensor))
        if isinstance(target, torch.dtype):
            low = _to(CAST[target](values), values.dtype)
            least = torch.finfo(target).smallest_normal
        else:
            low, least = quantize(values, target), _least_normal(target)
        self._tally(key, values, low, least)

    def _tally(self, key: tuple[str, str, str], values: Tensor, low: Tensor, least: float) -> None:
        is_value, is_zero = _ne(values, 0), _eq(low, 0)
        is_subnormal = _and(_lt(_abs(low), least), _ne(low, 0))
        found = [is_value, _and(is_value, is_zero), _and(is_value, is_subnormal)]
        counts = _stack([_sum(each) for each in found])
        before = self._counts.get(key)
        is_here = before is not None and before.device == counts.device
        self._counts[key] = counts if before is None or not is_here else before + counts

    def rows(self) -> list[Underflow]:
        """Returns a row for each op, module and line, largest losses first; waits for devices."""
        rows = []
        for key, counts in self._counts.items():
            values, zeros, subnormals = counts.tolist()
            if values:
                shares = zeros / values, subnormals / values
                error = math.sqrt(max(share * (1 - share) for share in shares) / values)
                rows.append(Underflow(*key, *shares, error, values))
        return sorted(rows, key=lambda row: (-row.share_zero, -row.share_subnormal))


def _sample(tensor: Tensor) -> Tensor:
    """Returns at most `_SAMPLE` values of ``tensor``, evenly spread."""
    return _reshape(tensor, (-1,))[:: math.ceil(tensor.numel() / _SAMPLE)]


def _least_normal(target: Any) -> float:
    """Returns the smallest normal number of a format; 0 if it has no subnormals."""
    has_subnormals = isinstance(target, Float) and target.subnormals
    return target.smallest_normal if has_subnormals else 0.0
