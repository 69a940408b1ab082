"""The layers around torch's function, made once a call site: what happens to a call after casting.

From the inside out: the function itself, atomic or a norm's; legalized or emulated; composed; beside
running statistics. Layers pass a call on as four arguments: one value that holds them would cost 0.4 us a
call, 2 to 4 % of a small legalized product.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from ..casting import (
    Recipe,
    cast_args,
    counted,
    floating_inputs,
    is_emulated,
    is_on_device,
    rounds_into_out,
    target_dtype,
    widest,
    written,
)
from ..compute import (
    DECIDING_WATCHERS,
    Accumulation,
    Inputs,
    Legalization,
    LegalizedCall,
    Legalizer,
    Statistics,
    computed_in_fp32,
    in_fp32,
    inputs_of,
    is_onnx_made,
    is_watched,
    keeping_parameters,
    names_dtype,
    note_deciding,
    note_legalized,
    note_unrounded,
    rounding_last,
)
from ..policy import INPUT, CastPolicy
from ..tensors import ELIGIBLE, LOW_DTYPES, Args, Kwargs, is_low
from ..torch_state import is_below_dispatcher, without_casts
from .retiring import run_plainly
from .taking_numbers import callee_of

if TYPE_CHECKING:
    from ..compute import Emulation

#: Policies by which all inputs decide a call's dtype, not the first alone.
_BY_ALL_INPUTS: Final = frozenset({CastPolicy.WIDEST, CastPolicy.FOLLOW})

#: Runs torch's function, its first argument, on arguments that are cast; last come those given.
Runner = Callable[[Callable[..., Any], Args, Kwargs, Args], Any]


def runner(recipe: Recipe, legalization: Legalization, settle: Callable[[], None]) -> Runner:
    """Returns the function that runs the op, given torch's function, the cast and the original arguments.

    Args:
        recipe: That of the call site.
        legalization: Which calls are legalized.
        settle: Called when no call is legalized from then on.
    """
    run: Runner = run_plainly
    if recipe.site.is_python:
        run = _rounding_last(recipe, _run_atomically) if recipe.rounds_last else _run_atomically
    elif recipe.facts.norm_parameters:
        run = functools.partial(_run_norm, recipe)
    if recipe.is_fp32 and not recipe.facts.promotes:  # else torch's kernel rounds into it once
        run = _rounding_into_out(recipe, run)
    if recipe.emulation is not None:
        run = _emulated(recipe, recipe.emulation, run)
    else:
        native = run if not recipe.keeps_parameters else native_runner(recipe, run)
        run = _legalized(recipe, run, native, legalization, settle) if recipe.legalizes else native
        if recipe.composes:
            run = _composed(recipe, run)
    statistics = statistics_of(recipe)
    return run if statistics is None else _beside(statistics, recipe, run)


def native_runner(recipe: Recipe, run: Runner = run_plainly) -> Runner:
    """Returns a runner of torch's kernels, such that autograd keeps no casts of parameters.

    It also takes the keyword arguments as they were given.
    """
    is_choosy = recipe.options.keep_weight_casts == "auto"
    if run is run_plainly:
        return functools.partial(keeping_parameters, is_choosy)

    def run_native(function: Callable[..., Any], args: Args, kwargs: Kwargs, given: Args) -> Any:
        wrapped = functools.partial(_run_with, run, function, given)
        return keeping_parameters(is_choosy, wrapped, args, kwargs, given)

    return run_native


def statistics_of(recipe: Recipe) -> Statistics | None:
    """Returns the running statistics of a norm, if it has any."""
    if not recipe.site.statistics:
        return None
    position = {name: position for position, name in enumerate(recipe.site.parameters.names)}
    updates_if = recipe.facts.updates_if
    return Statistics(
        positions={name: position[name] for name in recipe.site.statistics},
        parameters={name: position[name] for name in sorted(recipe.facts.norm_parameters)},
        first=recipe.site.parameters.names[0],
        updates_if=None if updates_if is None else (updates_if, position[updates_if]),
        mixed_device_types=recipe.facts.mixed_device_types,
        are_rounded=recipe.facts.rounds_statistics,
    )


def _beside(statistics: Statistics, recipe: Recipe, run: Runner) -> Runner:
    """Hides the running statistics from ``run``; torch's function still receives them."""
    # They are not cast then, and kernels take them.
    passes_fp32 = not recipe.composes and recipe.emulation is None and recipe.takes_fp32_statistics

    def run_beside(function: Callable[..., Any], args: Args, kwargs: Kwargs, given: Args) -> Any:
        if not (passes_fp32 and statistics.are_fp32(args, kwargs)):
            function, args, kwargs = statistics.set_apart(function, args, kwargs)
        return run(function, args, kwargs, given)

    return run_beside


def _legalized(
    recipe: Recipe,
    run: Runner,
    native: Runner,
    legalization: Legalization,
    settle: Callable[[], None],
) -> Runner:
    """Returns a runner of legalized calls: fp32, with rounded inputs and outputs, by ``run``.

    Others go to ``native``.
    """
    options = recipe.options
    legalizer = Legalizer(recipe.site.op, recipe.facts.kind, options.legalize)
    casts_late, rounds_inputs = recipe.casts_late, legalizer.rounds_inputs

    def run_legalized(function: Callable[..., Any], args: Args, kwargs: Kwargs, given: Args) -> Any:
        is_cast = not casts_late or args is not given
        found = _low_precision(recipe, legalization, args, kwargs, is_cast=is_cast)
        if found is None:
            return native(function, *_cast_late(recipe, args, kwargs), given)
        inputs, dtype = found
        if not legalization.applies(inputs, args, kwargs, dtype):
            if legalization.settles(inputs, dtype):
                settle()
            return native(function, *_cast_late(recipe, args, kwargs), given)
        note_legalized()
        if run is not run_plainly:
            function = functools.partial(_run_with, run, function, given)
        elif not kwargs:
            result = legalizer.compute_layer(function, inputs, args, dtype, is_cast=is_cast)
            if result is not None:
                return result
        if not is_cast and rounds_inputs:
            args, kwargs = cast_args(recipe, args, kwargs)
        elif not is_cast and is_watched():
            note_unrounded(recipe.site.op, _to_be_cast(recipe, args, kwargs))
        return legalizer.compute(LegalizedCall(function, inputs, args, kwargs, given, dtype))

    return run_legalized


def _low_precision(
    recipe: Recipe, legalization: Legalization, args: Args, kwargs: Kwargs, *, is_cast: bool
) -> tuple[Inputs, torch.dtype] | None:
    """Returns a call's floating inputs and the low-precision dtype it runs in.

    None for a call that does not run in any, and for one that is left to torch's kernels anyway.

    Args:
        recipe: That of the call site.
        legalization: Which calls are legalized.
        args: Positional arguments, and
        kwargs: those given by name.
        is_cast: Whether they have been cast.
    """
    if legalization.leaves_inference(args[0] if args else None) or is_below_dispatcher():
        return None
    if (recipe.may_write or kwargs) and written(recipe, args, kwargs) is not None:
        return None
    # Beside a sparse input the others have its dtype.
    if not is_cast and target_dtype(recipe, args, kwargs) not in LOW_DTYPES:
        return None
    inputs = inputs_of(args, kwargs)
    if inputs is None:
        return None
    device_type = inputs.first.device.type
    if device_type not in recipe.device_types or legalization.is_settled(device_type):
        return None
    dtype = None if inputs.low is None else inputs.low.dtype
    if recipe.casts_late and isinstance(recipe.decision.dtype, torch.dtype):
        dtype = recipe.decision.dtype
    if dtype is None:
        return None
    may_be_beside_sparse = is_cast and not inputs.is_plain and recipe.is_low
    if may_be_beside_sparse and target_dtype(recipe, args, kwargs) not in LOW_DTYPES:
        return None
    return inputs, dtype


def _emulated(recipe: Recipe, emulation: Emulation, run: Runner) -> Runner:
    """Returns a runner of the op in a number format."""

    def run_emulated(function: Callable[..., Any], args: Args, kwargs: Kwargs, given: Args) -> Any:
        if target_dtype(recipe, args, kwargs) is None or not is_emulated(recipe, args, kwargs):
            return run(function, args, kwargs, given)
        if not is_on_device(recipe, args, kwargs):
            return run(function, args, kwargs, given)
        if names_dtype(args, kwargs) and not recipe.lowerings:
            return run(function, args, kwargs, given)  # its output is as asked for
        wrapped = functools.partial(_run_with, run, function, given)
        return emulation.compute(wrapped, args, kwargs, given)

    return run_emulated


def _composed(recipe: Recipe, run: Runner) -> Runner:
    """Returns a runner of the op in its ``accumulate_dtype``, which casts the result of ``run``."""
    decision = recipe.decision

    def ending_in(output: torch.dtype | None) -> Accumulation:
        return Accumulation(
            recipe.site.op,
            recipe.facts.kind,
            recipe.facts.casts_first,
            decision.accumulate_dtype,
            output,
        )

    output = decision.output_dtype
    accumulation = ending_in(None if output == INPUT else output)
    by_input = {each: ending_in(each) for each in ELIGIBLE} if recipe.returns_input_dtype else {}
    is_widest = decision.cast_policy is CastPolicy.WIDEST
    casts_here = recipe.returns_input_dtype and not recipe.legalizes
    # What is cast to no dtype of its own ends in one that follows from the inputs'.
    all_decide = output is None and decision.cast_policy in _BY_ALL_INPUTS
    first_decides = output is None and decision.cast_policy is CastPolicy.FIRST

    def run_composed(function: Callable[..., Any], args: Args, kwargs: Kwargs, given: Args) -> Any:
        if is_below_dispatcher() or written(recipe, args, kwargs) is not None:
            cast, kwargs = cast_args(recipe, args, kwargs) if casts_here else (args, kwargs)
            return run(function, cast, kwargs, given)
        if names_dtype(args, kwargs):
            cast, kwargs = cast_args(recipe, args, kwargs) if casts_here else (args, kwargs)
            return run(function, cast, kwargs, given)  # its output is as asked for
        cast = args
        first = counted(recipe, floating_inputs(recipe, args, kwargs))[:1] if by_input else []
        if recipe.casts_late:
            cast, kwargs = cast_args(recipe, args, kwargs)
        inputs = counted(recipe, floating_inputs(recipe, cast, kwargs))
        if not inputs or any([t.dtype not in ELIGIBLE for t in inputs]):  # noqa: C419
            return run(function, cast, kwargs, given)
        if not is_on_device(recipe, cast, kwargs):
            return run(function, cast, kwargs, given)
        known = inputs_of(cast, kwargs)
        if known is None:  # all are in lists of lists, which are not raised
            return run(function, cast, kwargs, given)
        if DECIDING_WATCHERS:
            deciding = first or (inputs if all_decide else inputs[:1] if first_decides else [])
            note_deciding(recipe.site.op, deciding)
        wrapped = functools.partial(_run_with, run, function, given)
        dtype = widest(recipe, inputs) if is_widest else inputs[0].dtype
        ending = by_input[first[0].dtype] if first else accumulation
        return ending.compute(wrapped, known, cast, kwargs, given, dtype)

    return run_composed


def _run_with(
    run: Runner,
    function: Callable[..., Any],
    given: Args,
    *args: Any,
    **kwargs: Any,
) -> Any:
    return run(function, args, kwargs, given)


def _cast_late(recipe: Recipe, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    return cast_args(recipe, args, kwargs) if recipe.casts_late else (args, kwargs)


def _to_be_cast(recipe: Recipe, args: Args, kwargs: Kwargs) -> list[Tensor]:
    """Returns the inputs that ``recipe`` casts."""
    given = floating_inputs(recipe, args, kwargs)
    cast = floating_inputs(recipe, *cast_args(recipe, args, kwargs))
    return [a for a, b in zip(given, cast, strict=True) if a is not b]


def _rounding_last(recipe: Recipe, run: Runner) -> Runner:
    """Returns a runner of a Python function that computes in fp32, whatever its ``dtype=``."""
    names, device_types = recipe.site.parameters.names, recipe.device_types
    position = names.index("dtype")

    def run_rounding_last(
        function: Callable[..., Any], args: Args, kwargs: Kwargs, given: Args
    ) -> Any:
        if len(args) <= position and not is_low(kwargs.get("dtype")):
            return run(function, args, kwargs, given)
        wrapped = functools.partial(_run_with, run, function, given)
        return rounding_last(wrapped, names, device_types)(*args, **kwargs)

    return run_rounding_last


def _rounding_into_out(recipe: Recipe, run: Runner) -> Runner:
    """Returns a runner of an op that computes in fp32, whatever the dtype of its ``out=``."""

    def run_into_out(function: Callable[..., Any], args: Args, kwargs: Kwargs, given: Args) -> Any:
        rounds = rounds_into_out(recipe, args, kwargs)
        if not rounds or target_dtype(recipe, args, kwargs) is None:
            return run(function, args, kwargs, given)
        wrapped = functools.partial(_run_with, run, function, given)
        return in_fp32(callee_of(wrapped, recipe), args, kwargs, torch.float32)

    return run_into_out


def _run_atomically(function: Callable[..., Any], args: Args, kwargs: Kwargs, given: Args) -> Any:
    """Runs a Python function: what it calls is not cast again."""
    with without_casts():
        return function(*args, **kwargs)


def _run_norm(
    recipe: Recipe, function: Callable[..., Any], args: Args, kwargs: Kwargs, given: Args
) -> Any:
    """Runs a norm, in fp32 where ONNX is to hold it, which takes no fp32 weights beside bf16.

    The kernels that do take them compute in fp32 too, and round the same result.
    """
    if is_onnx_made():
        dtype = floating_inputs(recipe, args, kwargs)[0].dtype
        if dtype in LOW_DTYPES:
            return computed_in_fp32(function, args, kwargs, dtype)
    return function(*args, **kwargs)
