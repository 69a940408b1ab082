"""Creates the wrapper of one call site: of an op that is cast, or of one that only needs fallbacks; its general path.

``session.policy_patches`` installs the wrappers in torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import types
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from .. import compute
from ..compute import computed_in_fp32, may_run_again, note_legalized, rounded
from ..errors import raised_here
from ..policy import INPUT, CastPolicy, Decision, LowType, Rule
from ..tensors import CAST, LOW_DTYPES, SEQUENCES, Args, Function, Kwargs, leaves
from ..torch_internals import (
    DisableAutocast,
    DisableTorchFunctionSubclass,
    is_any_autocast_enabled,
    run_when_traced,
)
from ..torch_state import TO_LOW, is_off, is_outside, open_regions, partly_off, without_casts
from .inputs import cast_args, floating_inputs, placer, usual_caster, widener, written
from .plan import CallPlan
from .retiring import Control, in_slot, named_after
from .rules import MOST_VERDICTS, CachedRules
from .running import Statistics, callee_of, keeping_parameters, layered, runner, runs_plainly
from .source import make_generated

LOGGER: Final = logging.getLogger("hmpx")

Call = Callable[[Args, Kwargs], Any]


def call_of(
    original: Function,
    complete: Function,
    plan: CallPlan,
    control: Control,
    narrowed: Callable[[], Function | None] | None,
) -> tuple[Call, Call]:
    """Returns the function that makes any call of a wrapper, and the one for calls that are cast for sure."""
    is_overridable, is_named = plan.site.is_overridable, plan.decision.is_named
    casts_itself, may_be_nested = plan.casts_itself, "A" in plan.site.parameters.kinds.values()
    cast_usual = None if casts_itself else usual_caster(plan)
    is_plain = runs_plainly(plan)
    place, run, computing = placer(plan), runner(plan, control), layered(plan, complete)

    def override_here(args: Args, kwargs: Kwargs) -> Any:
        return override(
            original, plan.site.name, functools.partial(cast_where_on, plan), args, kwargs
        )

    def cast_and_run(args: Args, kwargs: Kwargs) -> Any:
        if kwargs and place is not None:
            args, kwargs = place(args, kwargs)
        cast = None if cast_usual is None else cast_usual(args, kwargs)
        if cast is not None:
            if is_plain or cast is args:
                return complete(*cast, **kwargs) if kwargs else complete(*cast)
            return run(computing, cast, kwargs, args, kwargs)
        if is_overridable and (
            has_torch_function(args) or ((kwargs or may_be_nested) and is_overridden(args, kwargs))
        ):
            return override_here(args, kwargs)
        if casts_itself:
            return run(computing, args, kwargs, args, kwargs)
        return run(computing, *cast_args(plan, args, kwargs), args, kwargs)

    def call(args: Args, kwargs: Kwargs) -> Any:
        if control.forward is not None:
            return control.forward(*args, **kwargs)
        if is_overridable and has_torch_function(args):
            return override_here(args, kwargs)
        if open_regions:
            if is_off():
                return complete(*args, **kwargs)
            if narrowed is not None and (others := narrowed()) is not None:
                return others(*args, **kwargs)
            if is_named and is_any_autocast_enabled():  # the lists override autocast
                with DisableAutocast():
                    return cast_and_run(args, kwargs)
        return cast_and_run(args, kwargs)

    return call, cast_and_run


def cast_where_on(plan: CallPlan, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Like `cast_args`, for device types whose casts are on.

    If the result must have an input's original dtype, the computing call casts instead, since it needs
    to see that dtype.
    """
    if plan.returns_input_dtype:
        return args, kwargs
    off = partly_off() if plan.narrows else None
    return cast_args(_without(plan, off) if off else plan, args, kwargs)


def narrower(
    original: Function, plan: CallPlan, make: Callable[[CallPlan], Function | None]
) -> Callable[[], Function | None] | None:
    """Returns a function that finds the wrapper for the casts that are on, and returns None if all are.

    None if the casts of ``plan`` are on or off together.
    """
    if not plan.narrows:
        return None
    made: dict[frozenset[str], Function] = {}

    def narrowed() -> Function | None:
        off = partly_off()
        if not off:
            return None
        if off not in made:
            made[off] = make(_without(plan, off)) or original
        return made[off]

    return run_when_traced(narrowed)


def _without(plan: CallPlan, off: frozenset[str]) -> CallPlan:
    decision, device_types = plan.decision, plan.device_types - off
    if TO_LOW in off and decision.cast_policy is CastPolicy.LOW:
        decision = Decision(
            CastPolicy.FOLLOW, reason=f"{decision.reason}, in a hook of the backward"
        )
    return dataclasses.replace(plan, decision=decision, device_types=device_types, is_narrowed=True)


_retried: set[tuple[str, torch.dtype | None]] = set()


def retry_in_fp32(  # noqa: PLR0917  # all there is to one call
    original: Function,
    plan: CallPlan,
    control: Control,
    error: Exception,
    args: Args,
    kwargs: Kwargs,
) -> Callable[[], Any] | None:
    """Returns a function that computes in fp32 a call that torch's function has refused for its dtypes.

    None if ``error`` has another cause, if the call writes to a tensor, if it has no low-precision input, or
    if the wrapper passed it to an override.
    """
    if not may_run_again(error, plan.site.name.partition(".")[0]) or control.forward is not None:
        return None
    if plan.site.is_overridable and is_overridden(args, kwargs):
        return None
    if open_regions and (is_off() or (plan.narrows and partly_off())):
        return None
    if written(plan, args, kwargs) is not None:
        return None
    given = floating_inputs(plan, args, kwargs)
    args, kwargs = cast_args(plan, args, kwargs)
    if plan.site.statistics:
        original, args, kwargs = Statistics(plan).set_apart(original, args, kwargs)
    inputs = floating_inputs(plan, args, kwargs)
    if not any(t.dtype in LOW_DTYPES for t in inputs):
        return None
    dtype, refusal = inputs[0].dtype, str(error)  # a reference to the error keeps its frames alive
    is_in_autocast = plan.decision.is_named and is_any_autocast_enabled()

    def compute_in_fp32() -> Any:
        note_legalized()
        with without_casts(), DisableAutocast() if is_in_autocast else contextlib.nullcontext():
            result = computed_in_fp32(original, args, kwargs, dtype)
        output = plan.decision.output_dtype
        if output is not None:
            output = given[0].dtype if output == INPUT else output
            result = rounded(result, CAST[output], dtype)
        if (plan.site.op, dtype) not in _retried:
            _retried.add((plan.site.op, dtype))
            LOGGER.warning("%s runs in fp32 and is rounded: %s", plan.site.op, refusal)
        return result

    return compute_in_fp32


# --- calls that a mode or a tensor subclass overrides by ``__torch_function__`` ------------------


def is_overridden(args: Args, kwargs: Kwargs) -> bool:
    """Whether a mode, or the class of an argument or of one in a list, overrides torch functions."""
    if has_torch_function(args):
        return True
    for value in args:
        if isinstance(value, SEQUENCES) and has_torch_function(value):
            return True
    return bool(kwargs) and is_overridden(tuple(kwargs.values()), {})


def hands_over(function: Function) -> bool:
    """Whether torch lets modes and tensor subclasses override one of its functions.

    Functions in Python handle overrides themselves, or leave them to the functions that they call.
    """
    code = getattr(function, "__code__", None)
    return code is None or handle_torch_function.__name__ in code.co_names


def override(
    original: Function,
    site: str,
    cast: Callable[[Args, Kwargs], tuple[Args, Kwargs]],
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Passes a call of the wrapper in a slot to the ``__torch_function__`` of a mode or an argument.

    The override gets the function that is installed now, and the uncast arguments; its own calls are cast.
    Without an override, tensors of classes that define only ``__torch_dispatch__`` are cast instead.
    """
    wrapper = in_slot(site, original)
    relevant = leaves((*args, *kwargs.values()))
    if not is_off() and _compute_by_dispatch([type(value) for value in relevant]):
        with DisableTorchFunctionSubclass():
            args, kwargs = cast(args, kwargs)
        relevant = leaves((*args, *kwargs.values()))
    if not isinstance(original, (types.FunctionType, types.BuiltinFunctionType)):
        return original(*args, **kwargs)  # torch also looks up methods
    if not hands_over(original):
        return original(*args, **kwargs)  # passes overrides to the functions it calls
    code = getattr(original, "__code__", None)
    if code is None:  # like torch, which otherwise asks subclasses of a plain tensor's class first
        relevant = [value for value in relevant if type(value) is not Tensor]
    if code is None or "NotImplemented" not in code.co_names:
        return handle_torch_function(wrapper, relevant, *args, **kwargs)
    try:  # operators try the other operand
        return handle_torch_function(wrapper, relevant, *args, **kwargs)
    except TypeError:
        return NotImplemented


def _compute_by_dispatch(kinds: list[type]) -> bool:
    """Whether a class defines its computations in ``__torch_dispatch__``, and none in ``__torch_function__``.

    torch's own ``__torch_function__`` methods either call the function that they get or, for jagged
    tensors, compute below all wrappers.
    """
    overriding = [kind for kind in kinds if hasattr(kind, "__torch_function__")]
    modules = [getattr(kind.__torch_function__, "__module__", None) for kind in overriding]
    if any([str(module).partition(".")[0] != "torch" for module in modules]):  # noqa: C419
        return False
    own = Tensor.__torch_dispatch__
    return any([getattr(kind, "__torch_dispatch__", own) is not own for kind in overriding])  # noqa: C419


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
    inner = compute.completed_by_numbers(callee, numbers, plan.device_types)

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
        complete = compute.completed_by_numbers(callee, site.numbers, plan.device_types)
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
