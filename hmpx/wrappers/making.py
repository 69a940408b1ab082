"""Wrappers of torch's functions: what `casting` says, with a few identity checks a call.

`make_wrapper` makes, for one call site, the code that decides whether there is anything to cast;
whatever a call does not need was settled when the wrapper was made. Knows neither lists nor how
wrappers get into torch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import has_torch_function, has_torch_function_unary

from .. import compute
from ..casting import Recipe, cast_args, converter, target_dtype
from ..compute import Legalization
from ..policy import CastPolicy, Decision
from ..tensors import ELIGIBLE, LOW_DTYPES, Args, Kwargs
from ..torch_internals import is_any_autocast_enabled, run_when_traced
from ..torch_state import TO_LOW, partly_off
from .factory import factory
from .overriding import is_overridden, override
from .retiring import Variables, cast_nothing, named_after
from .retrying import retry_in_fp32
from .running import Runner, native_runner, runner
from .taking_numbers import callee_of, make_wrapper_taking_numbers, taking_numbers


def make_wrapper(
    original: Callable[..., Any], recipe: Recipe, public: Callable[..., Any] | None = None
) -> Callable[..., Any] | None:
    """Returns the wrapper of ``original`` at ``recipe.site``; None if no call would ever be cast.

    Args:
        original: torch's function.
        recipe: That of the call site.
        public: The wrapper that stands under the function's name, if that is another one.
    """
    is_single = not recipe.site.is_python and not recipe.site.parameters.has_several_tensors
    is_uncast = (recipe.is_relative and is_single) or recipe.decision.cast_policy is CastPolicy.PASS
    if is_uncast and not recipe.composes:
        return make_wrapper_where_lacking(original, recipe)
    dtype = recipe.decision.dtype if isinstance(recipe.decision.dtype, torch.dtype) else None
    legalization = Legalization(
        recipe.facts.kind,
        recipe.facts.first_matrix,
        recipe.options.legalize,
        dtype if recipe.is_low else None,
        recipe.device_types,
        is_linear=recipe.site.op == "linear",
    )

    def cast(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        return cast_args(recipe, args, kwargs)

    def settle() -> None:
        settle_made()

    def narrowed_wrapper(others: Recipe) -> Callable[..., Any] | None:
        return make_wrapper(original, others, public=shown)

    def override_here(wrapper: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        cast_here = functools.partial(cast_where_on, recipe)
        return override(original, cast_here, public or wrapper, args, kwargs)

    run = runner(recipe, legalization, settle)
    made = factory(recipe)(
        original=completed(original, recipe),
        cast=cast,
        run=_selecting(recipe, run) if recipe.selects else run,
        native=native_runner(recipe),
        may_legalize=legalization.may_apply,
        retry=functools.partial(retry_in_fp32, recipe, original),
        override=override_here,
        dtype=dtype,
        other_dtypes=ELIGIBLE - {dtype},
        convert=None if dtype is None else converter(recipe, dtype),
        device_types=recipe.device_types,
        is_autocast_on=is_any_autocast_enabled if recipe.decision.is_named else bool,
        narrowed=narrower(original, recipe, narrowed_wrapper),
        is_open=legalization.is_open,
        legalizes=recipe.legalizes,
    )
    # Not `made` as a whole: a wrapper within an observed one would wait for a collection of garbage.
    settle_made, shown = made.settle, public or made.wrapper
    return named_after(original, made.wrapper, recipe.site.name, made.variables)


def _selecting(recipe: Recipe, run: Runner) -> Runner:
    """Returns a runner that casts what an op selects; where that can't be, ``run`` gets a cast table."""

    def run_selecting(function: Callable[..., Any], args: Args, kwargs: Kwargs, given: Args) -> Any:
        dtype = target_dtype(recipe, args, kwargs)
        inputs = compute.inputs_of(args, kwargs)
        if dtype is torch.float32 and inputs is not None and kwargs.get("out") is None:
            is_here = inputs.first.device.type in recipe.device_types
            call = recipe.site.op, recipe.site.parameters.names, function, args, kwargs
            result = compute.selected(*call, inputs, dtype) if is_here else None
            if result is not None:
                return result
        cast, kwargs = cast_args(recipe, args, kwargs)
        return run(function, cast, kwargs, given)

    return run_selecting


def narrower(
    original: Callable[..., Any],
    recipe: Recipe,
    make: Callable[[Recipe], Callable[..., Any] | None],
) -> Callable[[], Callable[..., Any] | None]:
    """Returns a function that finds the wrapper for the casts that are on; None if all are."""
    made: dict[frozenset[str], Callable[..., Any]] = {}

    def narrowed() -> Callable[..., Any] | None:
        off = partly_off()
        if not off:
            return None
        if off not in made:
            made[off] = make(_without(recipe, off)) or original
        return made[off]

    run_when_traced(narrowed)
    return narrowed


def _without(recipe: Recipe, off: frozenset[str]) -> Recipe:
    decision, device_types = recipe.decision, recipe.device_types - off
    if TO_LOW in off and decision.cast_policy is CastPolicy.LOW:
        decision = Decision(
            CastPolicy.FOLLOW, reason=f"{decision.reason}, in a hook of the backward"
        )
    return dataclasses.replace(
        recipe, decision=decision, device_types=device_types, is_narrowed=True
    )


def cast_where_on(recipe: Recipe, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Returns the arguments cast as `cast_args` does, on device types whose casts are on.

    Where the result is to have the dtype that an input is given in they are left to the call that
    computes, which must still see it.
    """
    if recipe.returns_input_dtype:
        return args, kwargs
    off = partly_off() if recipe.narrows else None
    return cast_args(_without(recipe, off) if off else recipe, args, kwargs)


def make_wrapper_where_lacking(
    original: Callable[..., Any], recipe: Recipe
) -> Callable[..., Any] | None:
    """Returns the wrapper of a function that nothing casts: it does what torch's lacks.

    It computes in fp32 where a kernel is lacking, takes numbers that the dtype does not hold, and looks up
    activations. None if torch's function lacks nothing.
    """
    if recipe.site.lacking is None and not recipe.looks_up:
        return make_wrapper_taking_numbers(original, recipe)
    complete = completed(original, recipe)

    lacks_gradients = recipe.site.lacking is not None and recipe.site.lacking.is_of_gradients
    is_quick = lacks_gradients and recipe.site.numbers is None and not recipe.looks_up

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values()) if kwargs else args
        if is_quick and not has_torch_function(given) and not _learns_low(given):
            return original(*args, **kwargs)
        if is_overridden(args, kwargs):
            return override(original, cast_nothing, wrapper, args, kwargs)
        return complete(*args, **kwargs)

    def wrapper_of_index(self: Tensor, index: Any, /) -> Any:
        # Programs index more tensors than they compute. One line, by which torch.jit.trace tells calls apart.
        if (
            has_torch_function_unary(self)
            or not self.requires_grad
            or type(index) is int
            or self.dtype not in LOW_DTYPES
            or compute.selects_once(index)
            or is_overridden((index,), {})
            or compute.is_exported()
        ):
            return original(self, index)
        return complete(self, index)

    if recipe.site.op == "getitem":
        wrapper = wrapper_of_index

    def read() -> tuple[Any, ...]:
        return wrapper, original, complete

    def write(values: tuple[Any, ...]) -> None:
        nonlocal wrapper, original, complete
        wrapper, original, complete = values

    variables = Variables(("wrapper", "original", "complete"), read, write)
    named = named_after(original, wrapper, recipe.site.name, variables)
    if recipe.site.lacking is None and recipe.site.numbers is None:
        vars(named)["__hmpx_looks_up__"] = True
    return named


def _learns_low(values: Args) -> bool:
    """Whether an input may need a gradient that lacks a kernel."""
    for value in values:
        if isinstance(value, Tensor) and value.requires_grad and value.dtype in LOW_DTYPES:
            return not compute.is_exported()
    return False


def only_looks_up(wrapper: Callable[..., Any]) -> bool:
    """Whether a wrapper gives what torch's function gives, only faster: what keeps that misses no cast."""
    return "__hmpx_looks_up__" in vars(wrapper)


def completed(original: Callable[..., Any], recipe: Recipe) -> Callable[..., Any]:
    """Returns ``original``, such that it does what it lacks: see `make_wrapper_where_lacking`."""
    site = recipe.site
    if recipe.looks_up:
        original = compute.looked_up(site.op, original)
    callee = callee_of(original, recipe)
    if site.numbers is not None:
        callee = dataclasses.replace(callee, function=taking_numbers(callee, site.numbers))
    if site.lacking is not None:
        callee = dataclasses.replace(callee, function=compute.completed(callee, site.lacking))
    if not recipe.rounds_last or site.is_python:
        return callee.function
    return compute.rounding_last(callee.function, site.parameters.names, recipe.device_types)
