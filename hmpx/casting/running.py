"""The layers around torch's function that run a call after casting, created once per call site.

From the inside out: the function itself, atomic, a norm's or rounding into ``out``, from `layered`; legalized or
emulated; composed; with running statistics hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from torch import Tensor

from .. import compute
from ..ops import argument
from ..policy import INPUT, CastPolicy
from ..tensors import CAST, ELIGIBLE, LOW_DTYPES, Args, Function, Kwargs
from ..torch_internals import data_of, transforms
from ..torch_state import is_below_dispatcher, without_casts
from .inputs import (
    cast_args,
    counted,
    emulated_args,
    floating_inputs,
    is_on_device,
    rounds_into_out,
    target_dtype,
    written,
)
from .legalized import Legalization, Runner
from .plan import CallPlan
from .retiring import Control


def runner(plan: CallPlan, control: Control) -> Runner:
    """Returns the function that runs the op once its inputs are cast, or casts them if ``plan`` says so.

    It gets the function from `layered`.
    """
    run: Runner = keeping_parameters(plan) if plan.keeps_parameters else _run_plainly
    if plan.emulation is not None:
        run = _emulated(plan)
    elif plan.legalizes:
        run = Legalization(plan, run, control).run
    if plan.composes:
        run = _composed(plan, run)
    if plan.site.statistics:
        run = _beside(Statistics(plan), plan, run)
    return _selecting(plan, run) if plan.selects else run


def layered(plan: CallPlan, function: Function) -> Function:
    """Returns ``function`` with what its kind of op needs wherever it runs."""
    site = plan.site
    if site.is_python:
        function = without_casts()(function)  # ops inside it are not cast again
        if plan.rounds_last:
            function = compute.rounding_last(function, site.parameters.names, plan.device_types)
    elif plan.facts.norm_parameters:
        function = _for_onnx(plan, function)
    if plan.is_fp32 and not plan.facts.promotes:  # else torch's kernel rounds into it once
        function = _rounding_into_out(plan, function)
    return function


def runs_plainly(plan: CallPlan) -> bool:
    """Whether torch's function alone runs a call of plain tensors without ``out=``."""
    return not (
        plan.site.is_python
        or plan.keeps_parameters
        or plan.legalizes
        or plan.composes
        or plan.emulation is not None
        or plan.site.statistics
        or plan.facts.norm_parameters
        or plan.selects
    )


def keeping_parameters(plan: CallPlan) -> Runner:
    """Returns a runner of torch's kernels in which autograd keeps no casts of parameters."""
    is_choosy = plan.options.keep_weight_casts == "auto"

    def run_native(
        function: Function, args: Args, kwargs: Kwargs, given: Args, named: Kwargs
    ) -> Any:
        if is_choosy and kwargs is named:
            for before, cast in zip(given, args, strict=True):
                if cast is not before and getattr(cast, "nbytes", _LARGE) >= _LARGE:
                    break
            else:
                return function(*args, **kwargs)
        return compute.keeping_parameters(is_choosy, function, args, kwargs, given, named)

    return run_native


#: Casts of at least this number of bytes are not kept by autograd.
_LARGE: Final = 2 * compute.LEAST_ELEMENTS


def _beside(statistics: Statistics, plan: CallPlan, run: Runner) -> Runner:
    """Hides the running statistics from ``run``; torch's function still receives them."""
    # Then they are not cast, and kernels accept them.
    passes_fp32 = not plan.composes and plan.emulation is None and plan.takes_fp32_statistics

    def run_beside(
        function: Function, args: Args, kwargs: Kwargs, given: Args, named: Kwargs
    ) -> Any:
        if not (passes_fp32 and statistics.are_fp32(args, kwargs)):
            function, args, kwargs = statistics.set_apart(function, args, kwargs)
        return run(function, args, kwargs, given, named)

    return run_beside


def _emulated(plan: CallPlan) -> Runner:

    def run_emulated(
        function: Function, args: Args, kwargs: Kwargs, given: Args, named: Kwargs
    ) -> Any:
        args, kwargs, is_emulated = emulated_args(plan, args, kwargs)
        # With a dtype, the output has that one.
        if not is_emulated or (compute.names_dtype(args, kwargs) and not plan.lowerings):
            return function(*args, **kwargs)
        return emulation.compute(function, args, kwargs, given)

    emulation: Any = plan.emulation
    return run_emulated


#: Policies in which all inputs decide a call's dtype, not only the first.
_BY_ALL_INPUTS: Final = frozenset({CastPolicy.WIDEST, CastPolicy.FOLLOW})


def _composed(plan: CallPlan, run: Runner) -> Runner:
    """Returns a runner of the op in its ``accumulate_dtype`` that casts the result of ``run``."""
    decision = plan.decision

    def ending_in(output: torch.dtype | None) -> compute.Accumulation:
        op, kind, casts_first = plan.site.op, plan.facts.kind, plan.facts.casts_first
        return compute.Accumulation(op, kind, casts_first, decision.accumulate_dtype, output)

    output = decision.output_dtype
    accumulation = ending_in(None if output == INPUT else output)
    by_input = {each: ending_in(each) for each in ELIGIBLE} if plan.returns_input_dtype else {}
    is_widest = decision.cast_policy is CastPolicy.WIDEST
    # Without an output dtype, the result's dtype follows from the inputs'.
    all_decide = output is None and decision.cast_policy in _BY_ALL_INPUTS
    first_decides = output is None and decision.cast_policy is CastPolicy.FIRST

    def run_composed(
        function: Function, args: Args, kwargs: Kwargs, given: Args, named: Kwargs
    ) -> Any:
        first: list[Tensor] = []
        if by_input:
            first = counted(plan, floating_inputs(plan, args, kwargs))[:1]
            args, kwargs = cast_args(plan, args, kwargs)
        if (
            is_below_dispatcher()
            or written(plan, args, kwargs) is not None
            or compute.names_dtype(args, kwargs)  # its output has the requested dtype
        ):
            return run(function, args, kwargs, given, named)
        inputs = counted(plan, floating_inputs(plan, args, kwargs))
        known = compute.inputs_of(args, kwargs)  # None: all are in lists of lists
        if (
            not inputs
            or any([t.dtype not in ELIGIBLE for t in inputs])  # noqa: C419
            or not is_on_device(plan, args, kwargs)
            or known is None
        ):
            return run(function, args, kwargs, given, named)
        if compute.DECIDING_WATCHERS:
            deciding = first or (inputs if all_decide else inputs[:1] if first_decides else [])
            compute.note_deciding(plan.site.op, deciding)

        def inner(*args: Any, **kwargs: Any) -> Any:
            return run(function, args, kwargs, given, named)

        dtype = plan.widest(inputs) if is_widest else inputs[0].dtype
        ending = by_input[first[0].dtype] if first else accumulation
        return ending.compute(inner, known, args, kwargs, given, dtype)

    return run_composed


def _selecting(plan: CallPlan, run: Runner) -> Runner:
    """Returns a runner that casts the selected elements; if that is impossible, ``run`` gets a cast table."""

    def run_selecting(
        function: Function, args: Args, kwargs: Kwargs, given: Args, named: Kwargs
    ) -> Any:
        dtype = target_dtype(plan, args, kwargs)
        inputs = compute.inputs_of(args, kwargs)
        if dtype is torch.float32 and inputs is not None and kwargs.get("out") is None:
            is_here = inputs.first.device.type in plan.device_types
            call = plan.site.op, plan.site.parameters.names, function, args, kwargs
            result = compute.selected(*call, inputs, dtype) if is_here else None
            if result is not None:
                return result
        return run(function, *cast_args(plan, args, kwargs), given, named)

    return run_selecting


def _rounding_into_out(plan: CallPlan, function: Function) -> Function:
    """Makes a function of an op that computes in fp32 round once into an ``out=`` of any dtype."""
    is_quick, callee = not plan.site.is_python, callee_of(function, plan)

    def into_out(*args: Any, **kwargs: Any) -> Any:
        if is_quick and "out" not in kwargs:
            return function(*args, **kwargs)
        if not rounds_into_out(plan, args, kwargs) or target_dtype(plan, args, kwargs) is None:
            return function(*args, **kwargs)
        return compute.in_fp32(callee, args, kwargs, torch.float32)

    return into_out


def _for_onnx(plan: CallPlan, function: Function) -> Function:
    """Makes a norm run in fp32 during export to ONNX, which rejects fp32 weights alongside bf16.

    The kernels that accept them also compute in fp32, and round the same result.
    """

    def norm(*args: Any, **kwargs: Any) -> Any:
        if compute.is_onnx_made():
            dtype = floating_inputs(plan, args, kwargs)[0].dtype
            if dtype in LOW_DTYPES:
                return compute.computed_in_fp32(function, args, kwargs, dtype)
        return function(*args, **kwargs)

    return norm


def callee_of(function: Function, plan: CallPlan) -> compute.Callee:
    site, facts = plan.site, plan.facts
    return compute.Callee(
        site.op,
        function,
        site.parameters.names,
        frozenset(site.writes),
        site.is_python,
        facts.is_random,
        facts.promotes,
        facts.selects,
    )


def _run_plainly(function: Function, args: Args, kwargs: Kwargs, given: Args, named: Kwargs) -> Any:
    return function(*args, **kwargs)


# --- running statistics ------------------------------------------------------------------------
# They bypass all code that casts, upcasts or rounds arguments, and go straight to torch's function. If its kernel
# rejects their dtypes with those of the inputs, it gets copies in another dtype, and the updated copies are copied back.

_copy_ = Tensor.copy_  # read before anything is patched


class Statistics:
    """The running statistics among a norm's arguments, and the dtypes that its kernels accept."""

    def __init__(self, plan: CallPlan) -> None:
        self._facts, self._names = plan.facts, plan.site.parameters.names
        self._statistics = plan.site.statistics
        self._parameters = sorted(plan.facts.norm_parameters)
        self._positions = [self._names.index(n) for n in (*self._statistics, *self._parameters)]

    def are_fp32(self, args: Args, kwargs: Kwargs) -> bool:
        """Whether statistics and parameters are positional, and fp32 or None; False if it needs a closer look."""
        if kwargs or transforms() is not None:
            return False
        count = len(args)
        for position in self._positions:
            value = args[position] if position < count else None
            # One overload of _native_batch_norm_legit has a bool in the position of a statistic.
            if value is not None and getattr(value, "dtype", None) is not torch.float32:
                return False
        return True

    def set_apart(
        self, function: Function, args: Args, kwargs: Kwargs
    ) -> tuple[Function, Args, Kwargs]:
        """Returns the call with None for the statistics, and a function that supplies them."""
        values, named = list(args), dict(kwargs)
        held = []
        for where, key in self._places(self._statistics, values, named):
            held.append((key, where[key]))
            where[key] = None
        if not held:
            return function, args, kwargs
        return functools.partial(self._call, function, held), tuple(values), named

    def _call(
        self, function: Function, held: list[tuple[Any, Tensor]], *args: Any, **kwargs: Any
    ) -> Any:
        values = list(args)
        for key, statistic in held:
            where: Any = values if isinstance(key, int) else kwargs
            where[key] = statistic
        first = values[0] if values else kwargs[self._names[0]]
        statistics = list(self._places(self._statistics, values, kwargs))
        parameters = list(self._places(self._parameters, values, kwargs))
        dtype = self._dtype(first, {where[key].dtype for where, key in statistics + parameters})
        if dtype is None or is_below_dispatcher():
            return function(*values, **kwargs)
        is_transformed = transforms() is not None
        is_upcast = is_transformed or (self._facts.rounds_statistics and dtype is not first.dtype)
        if is_upcast:
            parameters.append((values, 0) if values else (kwargs, self._names[0]))
        for where, key in parameters:
            where[key] = CAST[dtype](where[key])
        copied = []
        for where, key in statistics:
            statistic = where[key]
            if statistic.dtype is not dtype:
                where[key] = CAST[dtype](statistic)
                copied.append((statistic, where[key]))
        result = function(*values, **kwargs)
        name = self._facts.updates_if
        if name is None or argument(name, self._names, args, kwargs):
            with torch.no_grad():
                for statistic, copy in copied:
                    # Bypasses the version counter, like the kernels, for later gradients.
                    _copy_(statistic if is_transformed else data_of(statistic), copy)
        return compute.rounded(result, CAST[first.dtype], dtype) if is_upcast else result

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
        if transforms() is not None or self._facts.rounds_statistics:
            return torch.float32
        if first.device.type not in self._facts.mixed_device_types:
            return dtype
        return None if found <= {torch.float32} else torch.float32

    def _places(
        self, names: Iterable[str], args: list[Any], kwargs: Kwargs
    ) -> Iterator[tuple[Any, Any]]:
        """Yields the container (``args`` or ``kwargs``) and the key of each of these tensors in the call."""
        for name in names:
            position = self._names.index(name)
            if position < len(args):
                if isinstance(args[position], Tensor):
                    yield args, position
            elif isinstance(kwargs.get(name), Tensor):
                yield kwargs, name
