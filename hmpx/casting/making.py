"""Creates the wrapper of one call site: of an op that is cast, or of one that only needs fallbacks.

``session.policy_patches`` installs the wrappers in torch.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any, Final

from torch import Tensor
from torch.overrides import has_torch_function

from .. import compute
from ..errors import raised_here
from ..policy import CastPolicy, Decision, LowType, Rule
from ..tensors import LOW_DTYPES, Args, Function, Kwargs
from ..torch_state import is_off, is_outside, open_regions
from .calls import call_of, cast_where_on, is_overridden, narrower, override, retry_in_fp32
from .inputs import widener
from .plan import CallPlan
from .retiring import Control, named_after
from .rules import MOST_VERDICTS, CachedRules
from .running import callee_of, keeping_parameters
from .source import make_generated


def make_wrapper(original: Function, plan: CallPlan, *, fuses: bool = True) -> Function | None:
    """Returns the wrapper of ``original`` at ``plan.site``; None if no call is ever cast.

    Without ``fuses`` autograd's nodes are torch's.
    """
    is_single = not plan.site.is_python and not plan.site.parameters.has_several_tensors
    is_uncast = (plan.is_relative and is_single) or plan.decision.cast_policy is CastPolicy.PASS
    if is_uncast and not plan.composes:
        return make_wrapper_where_lacking(original, plan)
    complete = completed(original, plan)
    is_torchs = isinstance(complete, types.BuiltinFunctionType)
    nodes = None
    if fuses and is_torchs and plan.legalizes and plan.is_low and not plan.composes:
        nodes = compute.legalized(
            plan.site.op, plan.decision.dtype, plan.device_types, plan.options.legalize
        )
    control = Control(plan.legalizes, offered=nodes)
    narrowed = narrower(original, plan, functools.partial(make_wrapper, original))
    call, cast_and_run = call_of(original, complete, plan, control, narrowed)
    fused = None
    if fuses and plan.cast_together and (is_torchs or plan.site.op != "linear"):
        names, positions = plan.site.parameters.names, enumerate(plan.cast_together)
        masks = [n for n, position in positions if names[position] in plan.masks]
        kept = plan.options.keep_weight_casts if plan.keeps_parameters else True
        fused = compute.fused(plan.site.op, plan.decision.dtype, plan.device_types, masks, kept)
        if plan.site.op == "linear":
            control.fused, fused = fused, None
    control.reset()
    wrapper = make_generated(
        plan,
        original=complete,
        call=call,
        cast_and_run=cast_and_run,
        native=keeping_parameters(plan) if plan.keeps_parameters else None,
        widens=widener(plan),
        control=control,
        retry=functools.partial(retry_in_fp32, original, plan, control),
        dtype=plan.decision.dtype,
        fused=fused,
        has_nodes=control.offered is not None or control.fused is not None,
    )
    return named_after(original, wrapper, plan.site.name, control)


def make_wrapper_where_lacking(original: Function, plan: CallPlan) -> Function | None:
    """Returns the wrapper of a function that is never cast: it adds fallbacks to torch's.

    It computes in fp32 if a kernel is missing, and accepts numbers that the dtype does not hold. None if torch's
    function needs no fallback.
    """
    site, control = plan.site, Control()
    if site.lacking is None:
        return _make_wrapper_taking_numbers(original, plan)
    complete = completed(original, plan)
    is_quick = site.lacking.is_of_gradients and site.numbers is None

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if control.forward is not None:
            return control.forward(*args, **kwargs)
        given = (*args, *kwargs.values()) if kwargs else args
        if is_quick and not has_torch_function(given) and not _learns_low(given):
            return original(*args, **kwargs)
        if is_overridden(args, kwargs):
            return override(original, site.name, _cast_nothing, args, kwargs)
        return complete(*args, **kwargs)

    return named_after(original, wrapper, site.name, control)


def _make_wrapper_taking_numbers(original: Function, plan: CallPlan) -> Function | None:
    """Returns the wrapper of a function that is never cast and has all kernels.

    None if it takes no numbers. Modes and tensor subclasses see the wrapper only if a number must be
    checked; torch passes other calls to them.
    """
    numbers = plan.site.numbers
    if plan.adds_in_place:
        control = Control()
        made = compute.adding_masks(original, plan.device_types, control)
        return named_after(original, made, plan.site.name, control)
    if numbers is None:
        return None
    callee, control = callee_of(original, plan), Control()
    inner = compute.completed_by_numbers(callee, numbers)

    def complete(*args: Any, **kwargs: Any) -> Any:
        if is_overridden(args, kwargs):
            return override(original, plan.site.name, _cast_nothing, args, kwargs)
        return inner(*args, **kwargs)

    made = compute.taking_numbers(original, numbers, callee.promotes, complete, control)
    return named_after(original, made, plan.site.name, control)


def _cast_nothing(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    return args, kwargs


def _learns_low(values: Args) -> bool:
    for value in values:
        if isinstance(value, Tensor) and value.requires_grad and value.dtype in LOW_DTYPES:
            return not compute.is_exported()
    return False


def completed(original: Function, plan: CallPlan) -> Function:
    """Adds fallbacks to ``original``: see `make_wrapper_where_lacking`."""
    site = plan.site
    callee = callee_of(original, plan)
    if site.numbers is not None:
        complete = compute.completed_by_numbers(callee, site.numbers)
        taking = compute.taking_numbers(original, site.numbers, callee.promotes, complete)
        callee = callee._replace(function=taking)
    if plan.adds_in_place:
        made = compute.adding_masks(callee.function, plan.device_types)
        callee = callee._replace(function=made)
    if site.lacking is not None:
        callee = callee._replace(function=compute.completed(callee, site.lacking))
    if site.op == "matmul" and plan.is_low:
        return compute.folding(callee.function)
    if not plan.rounds_last or site.is_python:
        return callee.function
    return compute.rounding_last(callee.function, site.parameters.names, plan.device_types)


# --- ops that rules decide ---------------------------------------------------------------------


def _falling_back(
    complete: Function, original: Function, plan: CallPlan, control: Control
) -> Function:
    """Makes ``complete`` compute in fp32 where torch stops: the module that is converted gave it a low result."""

    def outside(*args: Any, **kwargs: Any) -> Any:
        try:
            return complete(*args, **kwargs)
        except raised_here(Exception) as error:
            again = retry_in_fp32(original, plan, control, error, args, kwargs)
            if again is None:
                raise
        return again()

    return outside


_OUTSIDE: Final = Decision(CastPolicy.PASS, reason="outside of the module given as within=")

#: Creates the wrapper for a decision; None if no call would be cast.
Maker = Callable[[Decision], Function | None]


def make_choosing_wrapper(
    original: Function, plan: CallPlan, rules: tuple[Rule, ...], low_dtype: LowType, make: Maker
) -> Function:
    # Also keyed by the reason, which the log shows and equality ignores.
    followed: dict[tuple[Decision, str], Function] = {}

    def follow(decision: Decision | None) -> Function:
        decision = plan.decision if decision is None else decision
        key = decision, decision.reason
        found = followed.get(key)
        if found is None:
            if len(followed) >= MOST_VERDICTS:  # each call may have another reason
                followed.clear()
            found = make(decision)
            found = found or completed(original, dataclasses.replace(plan, decision=decision))
            followed[key] = found
        return found

    by_lists, control = follow(None), Control()
    outside = None
    if plan.options.within is not None:
        uncast = dataclasses.replace(plan, decision=_OUTSIDE)
        outside = _falling_back(follow(_OUTSIDE), original, uncast, control)

    def cast(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        if outside is not None and is_outside():
            return args, kwargs
        if choose(args, kwargs) is not by_lists:
            return args, kwargs  # cast after the rule decided again, by the present dtypes
        return cast_where_on(plan, args, kwargs)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if control.forward is not None:
            return control.forward(*args, **kwargs)
        if (
            has_torch_function(args) or ((kwargs or may_be_nested) and is_overridden(args, kwargs))
        ) and plan.site.is_overridable:
            return override(original, plan.site.name, cast, args, kwargs)
        if open_regions and is_off():
            return by_lists(*args, **kwargs)
        if outside is not None and is_outside():
            return outside(*args, **kwargs)
        if kwargs:
            return choose(args, kwargs)(*args, **kwargs)
        return choose(args, kwargs)(*args)

    may_be_nested = "A" in plan.site.parameters.kinds.values()
    choose = CachedRules(plan.site.op, plan.site.parameters, rules, low_dtype, follow).judge
    return named_after(original, wrapper, plan.site.name, control)
