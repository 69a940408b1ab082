"""Faults made in `Optimizer.step`: if its result is not finite, the op of a copy of the step that made it so."""

from __future__ import annotations

import dataclasses
import math
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import passing_over
from ..patching import unpatched
from ..places import with_callers
from ..tensors import LOW_DTYPES, is_captured, tensors_in
from ..torch_internals import foreach_copy, foreach_norm, unseen
from .offences import Kind, Offence, Range
from .records import NAN, bits_of, is_measurable, is_off_limits
from .slots import Slots, exact, exact_finite
from .step_repeats import Key, StepOp, StepStart, StepValue, is_bad, step_values
from .trials import aside, text_of
from .underflow import UnderflowCounts

_isfinite, _stack = unpatched(torch.isfinite, torch.stack)

#: Most bytes copied before a step. Larger optimizers are tried on the values after it, where these are finite.
_MOST_BYTES: Final = 1 << 22

#: The code of `Optimizer.step` as torch wraps it.
_STEPPING: Final = Optimizer.profile_hook_step(lambda _: None).__code__

#: Number of earlier ops shown with an offence.
_CONTEXT: Final = 5

#: A common eps, tried in place of a smaller one.
_EPS: Final = 1e-8

_NOT_SKIPPED: Final = "none: the gradients were not finite; GradScaler.step skips such steps"


def _tensors(optimizer: Optimizer, left_out: str = "") -> list[Tensor]:
    """Returns the tensors of `_values`, faster; ``left_out`` is a state."""
    state = optimizer.state
    found = [each for group in optimizer.param_groups for each in group["params"]]
    for each in found[:]:
        own = state.get(each, {})
        for name, value in own.items() if isinstance(own, dict) else ():
            if type(value) is Tensor:
                if name != left_out:
                    found.append(value)
            elif type(value) in (list, tuple):
                found += tensors_in(value)
    return list(filter(is_measurable, found))


class OptimizerSteps:
    """Looks at the steps of optimizers."""

    def __init__(self, name_of: Callable[[Tensor], str], counts: UnderflowCounts) -> None:
        self._counts = counts
        self._spoiled: dict[Key, weakref.ref[Tensor]] = {}
        self._reported: set[Key] = set()  # of these
        self._name_of = name_of
        self._slots = Slots()
        self._buffers: weakref.WeakKeyDictionary[Optimizer, dict[int, Tensor]]
        self._buffers = weakref.WeakKeyDictionary()
        self._starts: list[StepStart] = []  # of nested ones
        self._is_repeating = False

    def is_inner(self, optimizer: Optimizer) -> bool:
        """Whether the step that has just begun or ended is a part of another one: `super().step()`, or a repeated one."""
        return self._is_repeating or is_inner_step(optimizer)

    @unseen
    def begin(self, optimizer: Optimizer, number: int) -> None:
        """Keeps the state before a step, as far as that is cheap."""
        tensors = _tensors(optimizer)
        if not tensors or is_off_limits() or is_captured(tensors[0]):
            return
        if optimizer not in self._buffers:
            self._add_known(optimizer, tensors)  # not its steps' doing
        is_small = sum([each.nbytes for each in tensors]) <= _MOST_BYTES
        kept = tensors if is_small else [each for each in tensors if each.numel() == 1]
        old = self._buffers.get(optimizer, {})
        buffers = {id(each): _buffer(each, old.get(id(each))) for each in kept}
        self._buffers[optimizer] = buffers
        if kept:
            with torch.no_grad():
                foreach_copy(list(buffers.values()), kept)
        self._starts = [each for each in self._starts if each.optimizer is not optimizer]
        self._starts.append(StepStart(optimizer, number, buffers, is_small))

    def add_closure(self, result: Any) -> None:
        """Notes what the optimizer's closure gave: some optimizers call it several times."""
        if self._starts and self._starts[-1].is_small:
            self._starts[-1].add_closure(result)

    @unseen
    def end(
        self,
        optimizer: Optimizer,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        location: str,
        *,
        may_skip: bool,
    ) -> Offence | None:
        """Returns the fault of the step that has ended; None if its result is finite.

        With ``may_skip`` gradients that are not finite were excused, since the program skips such steps.
        """
        start = next((each for each in self._starts if each.optimizer is optimizer), None)
        if start is None:
            return None
        self._starts.remove(start)
        start.args, start.kwargs = args, kwargs
        try:
            self._is_repeating = True
            return self._found(start, location, may_skip=may_skip)
        finally:
            self._is_repeating = False

    def _found(self, start: StepStart, location: str, *, may_skip: bool) -> Offence | None:
        optimizer = start.optimizer
        tensors = _tensors(optimizer, "step")
        fresh = self._add_known(optimizer, tensors)
        given = [start.gradient_of(each.parameter) for each in fresh]
        if not fresh:
            # A step of the program's own may have effects beyond its optimizer.
            has_low = start.is_torchs and any(each.dtype in LOW_DTYPES for each in tensors)
            if has_low and self._counts.is_next():
                self._count(start)
            return None
        if any(is_measurable(each) and bits_of(exact(each)) for each in given):
            if may_skip:
                self._reported |= {each.key for each in fresh}
                return self._offence(start, fresh[0], location, _NOT_SKIPPED)
            for each in fresh:
                self._spoiled.pop(each.key, None)
            return None  # gradients are reported where they come from
        found = self._fault(start, fresh, location)
        if found is not None:  # else a later call that takes them reports them
            self._reported |= {each.key for each in fresh}
        return found

    def _add_known(self, optimizer: Optimizer, tensors: Sequence[Tensor]) -> list[StepValue]:
        """Returns the parameters and states that are not finite, and were not known to be so."""
        with torch.no_grad():
            if self._are_finite(tensors):
                now_finite = set(map(id, tensors)) if self._spoiled else set()
                for key in [each for each in self._spoiled if each[0] in now_finite]:
                    del self._spoiled[key]
                    self._reported.discard(key)
                return []
            bad = [each for each in step_values(optimizer) if bits_of(exact(each.tensor))]
        fresh = [each for each in bad if not self._is_spoiled(each.parameter, each.state)]
        self._spoiled |= {each.key: weakref.ref(each.parameter) for each in bad}
        return fresh

    def is_known(self, parameter: Tensor | None) -> bool:
        """Whether a parameter is not finite since a step, which was reported."""
        return (id(parameter), "") in self._reported and self._is_spoiled(parameter, "")

    def _is_spoiled(self, parameter: Tensor | None, state: str) -> bool:
        found = self._spoiled.get((id(parameter), state))
        return found is not None and found() is parameter

    def _are_finite(self, tensors: Sequence[Tensor]) -> bool:
        elsewhere: dict[Any, list[Tensor]] = {}
        for each in tensors:
            if each.is_cpu:
                self._slots.measure(each)
            else:
                elsewhere.setdefault((each.device, each.dtype), []).append(each)
        norms = [_stack(foreach_norm(each, math.inf)) for each in elsewhere.values()]
        return self._slots.read() is None and all(bool(_isfinite(each).all()) for each in norms)

    def _count(self, start: StepStart) -> None:
        """Counts the values of parameters and states that the step's ops made zero or subnormal."""
        run = start.run()
        for op in () if run is None else run.ops:
            if LOW_DTYPES.isdisjoint([each.dtype for each in op.results]):
                continue
            with aside([]):
                for memory, (low, high) in zip(op.memory, op.in_fp32(), strict=False):
                    value = run.names.get(memory) if run else None
                    if value is not None and low.dtype in LOW_DTYPES:
                        name = self._name(start, value.parameter)
                        name = f"{name}: {value.state}" if value.state else name
                        self._counts.add_results((op.name, name, op.location), low, high)

    def _name(self, start: StepStart, parameter: Tensor) -> str:
        """Returns a parameter's name in the model or the optimizer, or its position."""
        return self._name_of(parameter) or start.name_of(parameter)

    def _offence(self, start: StepStart, value: StepValue, location: str, remedy: str) -> Offence:
        """Describes a value that is not finite after the step."""
        cls = type(start.optimizer)
        name = self._name(start, value.parameter)
        return Offence(
            op=cls.__name__,
            module=name.rpartition(".")[0],
            site=f"{cls.__module__}.{cls.__qualname__}.step",
            location=location,
            kind="nan" if bits_of(exact(value.tensor)) & NAN else "inf",
            phase="optimizer",
            step=start.number,
            remedy=remedy,
            parameter=name,
            state=value.state,
        )

    def _fault(
        self, start: StepStart, values: Sequence[StepValue], location: str
    ) -> Offence | None:
        """Returns the cause of values that are not finite; None if they were not so before it."""
        value, number = values[0], None
        only: Tensor | None = value.parameter
        for only in (value.parameter, None):  # less memory first
            run = start.run(only)
            found = [] if run is None else [each for each in values if each.key in run.makers]
            if run is not None and found:
                # What the step has made goes before what it found.
                value = min(
                    found, key=lambda each: (run.makers[each.key] < 0, run.makers[each.key])
                )
                number = run.makers[value.key]
                break
        is_chosen = start.has_effects and value.state and not bits_of(exact(value.tensor)) & NAN
        if is_chosen or (number is not None and number < 0):
            return None
        unknown = "unknown: the step could not be repeated"
        if start.has_effects:
            unknown = "unknown: the step is not repeated, as it may change more than its optimizer"
        offence = self._offence(start, value, location, unknown)
        if run is None or number is None:
            return offence

        def helped(eps: float | None = None, *, upcast: bool = False) -> bool:
            trial = start.run(only, eps, upcast=upcast)
            return trial is not None and value.key not in trial.makers

        op = run.ops[number]
        dtypes = [each.dtype for each in (*op.inputs, *op.results)]
        low = next((each for each in dtypes if each in LOW_DTYPES), None)
        in_fp32 = low is not None and helped(upcast=True)
        cause = _cause(run.ops[:number], op) if in_fp32 else None
        tried = [f"{offence.parameter} and its state in float32"] if in_fp32 else []
        eps = max(_EPS, torch.finfo(low or dtypes[0]).smallest_normal)
        settings = [item for group in start.groups for item in group.items()]
        if any(k == "eps" and type(v) is float and v < eps for k, v in settings) and helped(eps):
            tried.append(f"eps={eps:.4g}")
        seen: Kind = "nan" if any(bits_of(exact(each)) & NAN for each in op.results) else "inf"
        if in_fp32:
            seen = "underflow" if cause else "overflow" if seen == "inf" else seen
        wrong = [f"{k} is {v}" for k, v in settings if type(v) is float and not math.isfinite(v)]
        if wrong:
            remedy = f"none: {wrong[0]}"
        elif tried:
            remedy = f"none in op lists, which optimizers don't read; tried: {', or '.join(tried)}"
        else:
            remedy = (
                f"none: {op.name} is not finite in float32, too{_where(op)}"
                if low
                else f"none: {op.name} ran in float32 already{_where(op)}; its inputs have to change"
            )
        inputs = [(f"input {n}", exact(each)) for n, each in enumerate(op.inputs)]
        finite = [exact_finite(each, each._version) for each in op.results]
        return dataclasses.replace(
            offence,
            op=op.name,
            location=op.location,
            through="" if op.location == location else location,
            kind=seen,
            context=tuple([each.call() for each in run.ops[max(0, number - _CONTEXT) : number]]),
            ranges=tuple(
                [Range(name, *each) for name, each in inputs]
                + [Range("result", *each) for each in finite if each is not None]
            ),
            remedy=remedy,
            cause=None if cause is None else cause.call(),
        )


def _cause(ops: Sequence[StepOp], failed: StepOp) -> StepOp | None:
    """Returns the last op whose rounding made zeros where the failed one is not finite."""
    with aside([]):
        bad = ~_isfinite(next(filter(is_bad, failed.results)))
        return next((each for each in reversed(ops) if each.is_lossy(bad)), None)
    return None


def _buffer(tensor: Tensor, old: Tensor | None) -> Tensor:
    if old is not None and (old.shape, old.dtype) == (tensor.shape, tensor.dtype):
        return old
    return torch.empty_like(tensor, requires_grad=False)


def _where(op: StepOp) -> str:
    """Returns the inputs at the first element that is not finite, as text; ``""`` if these are not elementwise."""
    bad = next(filter(is_bad, op.results))
    position = int((~_isfinite(bad)).flatten().nonzero()[0])
    with passing_over(RuntimeError):
        return (
            f", where {text_of([e.expand_as(bad).flatten()[position].item() for e in op.inputs])}"
        )
    return ""


def is_inner_step(optimizer: Optimizer) -> bool:
    """Whether the optimizer's step, whose hook asks, is a part of another of its steps: `super().step()`."""
    frames = [each for each in with_callers(sys._getframe(1)) if each.f_code is _STEPPING]
    return [each.f_locals["self"] for each in frames].count(optimizer) > 1
