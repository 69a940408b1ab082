"""Remedies against figures beyond their limits: worked out from what was counted, and tried at the next checked step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..observers import OpCall
from ..ops import draws
from ..tensors import PLAIN_TENSORS, floating_in, long_name
from ..watching import results_in_fp32, stepped_in_fp32
from .alarms import Alarm, MonitoredRow
from .figures import Counts, Type, figures, limits, measured, measured_step

#: Stands for the format in rows of trials.
TRIED: Final = "tried"


class Remedy(NamedTuple):
    """What helps against a figure.

    Attributes:
        text: Says so; ``""`` for nothing known.
        dtype: The type that helps; None for none.
        scale: The power of two that gradients are multiplied with.
    """

    text: str = ""
    dtype: torch.dtype | None = None
    scale: int = 0


class Remedies:
    """The remedies that the next checked step tries."""

    def __init__(self) -> None:
        """Starts with none."""
        self._waiting: dict[MonitoredRow, dict[str, tuple[Alarm, Remedy]]] = {}

    def add(self, row: MonitoredRow, figure: str, alarm: Alarm, found: Remedy) -> None:
        """Tries the remedy of an alarm at the next checked step."""
        if found.dtype is not None:
            self._waiting.setdefault(row, {})[figure] = alarm, found

    def measured(self, row: MonitoredRow, tensor: Tensor) -> Iterator[tuple[MonitoredRow, Tensor]]:
        """Yields the rows and vectors of trials on measured values: cast to another type, or scaled."""
        for _, found in self._waiting.get(row, {}).values():
            if row.is_cast or found.scale:
                yield _vector(row, found, tensor)

    def measured_call(
        self,
        row: MonitoredRow,
        call: OpCall,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: Any,
    ) -> Iterator[tuple[MonitoredRow, Tensor]]:
        """Yields those of a call that has just run: it runs again in float32 on the same inputs."""
        if row not in self._waiting or draws(call.op):
            return
        inputs, results = floating_in([*args, *kwargs.values()]), floating_in([result])
        is_plain = all(type(each) in PLAIN_TENSORS for each in (*inputs, *results))
        if is_plain and {*map(_memory, inputs)}.isdisjoint(map(_memory, results)):  # not in place
            for each in results_in_fp32(call, args, kwargs):
                if each.itemsize >= 4:  # not of calls that name the type of their result
                    waiting = self._waiting[row].values()
                    yield from [_vector(row, found, each) for _, found in waiting]

    def measured_step(
        self, row: MonitoredRow, optimizer: Optimizer, parameter: Tensor
    ) -> Iterator[tuple[MonitoredRow, Tensor]]:
        """Yields those of a parameter's step, before it runs: a copy runs in float32."""
        waiting, gradient = self._waiting.get(row, {}), parameter.grad
        if "unchanged" in waiting and gradient is not None and type(parameter) in PLAIN_TENSORS:
            after = stepped_in_fp32(optimizer, parameter)
            if after is not None:
                own = _row(row, waiting["unchanged"][1])
                yield own, measured_step(parameter.float(), after, gradient)

    def judged(
        self,
        rows: Mapping[MonitoredRow, Counts],
        found: Mapping[str, float],
        beyond: Container[str],
        step: int,
    ) -> Iterator[tuple[Alarm, Alarm]]:
        """Yields alarms whose remedy was tried, and what they are then; forgets those of figures that are back."""
        for row, waiting in [*self._waiting.items()]:
            for figure, (alarm, remedy) in [*waiting.items()]:
                own, before = _row(row, remedy), found.get(alarm.name)
                counts, is_beyond = rows.get(own), alarm.name in beyond
                if counts is not None and before is not None and is_beyond:
                    way = f"a scale of 2**{remedy.scale}" if remedy.scale else long_name(own.of)
                    after = _figure(figure, own.of, counts)
                    said = f"in step {step} {way} gave {after:.3g} in place of {before:.3g}"
                    yield alarm, dataclasses.replace(alarm, tried=said)
                if counts is not None or not is_beyond:
                    del waiting[figure]
            if not waiting:
                del self._waiting[row]


def _row(row: MonitoredRow, remedy: Remedy) -> MonitoredRow:
    return row._replace(of=remedy.dtype or row.of, is_cast=True, trial=TRIED)


def _vector(row: MonitoredRow, remedy: Remedy, tensor: Tensor) -> tuple[MonitoredRow, Tensor]:
    exact = tensor.float() if tensor.itemsize < 4 else tensor
    return _row(row, remedy), measured(exact * 2.0**remedy.scale, remedy.dtype)


def _figure(name: str, of: Type, counts: Counts) -> float:
    if of is torch.float32:  # its casts round nothing, its ops do
        counts = counts._replace(rounding=counts.norm * (limits(of).epsilon / 4) ** 2)
    return dict(figures(counts, of, is_cast=True, is_tried=False)).get(name, 0.0)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def remedy(row: MonitoredRow, figure: str, counts: Counts) -> Remedy:
    """Returns a remedy against a figure, as far as the values that were counted tell."""
    if figure == "unchanged":
        said = "float32 weights and hmpx.convert(), or stochastic rounding, let small updates count"
        return Remedy(said, torch.float32)
    if figure == "nonfinite":
        return Remedy("hmpx.watch() names the op that made the first one")
    where = f"{row.op} in {row.module}" if row.module else row.op
    ends, limit = f"{counts.least:.2g} to {counts.amax:.2g}", limits(row.of)
    if figure == "saturated":
        return Remedy(f"a larger scale before {where}, or bfloat16", torch.bfloat16)
    if figure in ("error", "error_of_spread"):
        size = counts.norm if figure == "error" else counts.spread
        root = math.sqrt(counts.rounding / size) if size else 0.0
        finer = [each for each in (torch.float16, torch.float32) if _holds(each, counts)]
        for each, epsilon in [(each, limits(each).epsilon) for each in finer]:
            if epsilon * 8 <= limit.epsilon:
                after = root * epsilon / limit.epsilon
                return Remedy(f"{long_name(each)} for {where} makes it about {after:.2g}", each)
    if figure in ("subnormal", "underflow") and row.kind == "gradient":
        low = math.ceil(math.log2(limit.least / counts.least))
        high = math.floor(math.log2(limit.most / 4 / counts.amax))
        if 0 < low <= high and isinstance(row.of, torch.dtype):
            said = f"a loss scale of 2**{low} to 2**{high} makes all values normal ({ends})"
            return Remedy(said, row.of, (low + high) // 2)
    if figure in ("near_max", "overflow", "subnormal", "underflow"):
        for each in (torch.bfloat16, torch.float32):
            if _holds(each, counts):
                return Remedy(f"{long_name(each)} for {where} holds all values ({ends})", each)
    return Remedy()


def _holds(dtype: torch.dtype, counts: Counts) -> bool:
    limit = limits(dtype)
    return counts.amax <= limit.most / 4 and counts.least >= limit.least
