"""Wrappers whose calls are observed: the usual ones, with a layer that notifies observers.

A call runs in the wrapper that `making` makes, whatever observes it. Its description follows from the
same recipe.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch

from ..casting import (
    TARGET,
    Recipe,
    cast_args,
    cast_dtypes,
    decided_by,
    floating_inputs,
    is_widened,
    target_dtype,
    widest,
    written,
)
from ..observers import PAUSED, Attached, CallTensors, OpCall, user_location
from ..ops import facts
from ..policy import CastPolicy
from ..tensors import Args, Kwargs, map_tensors, tensors_in
from ..torch_internals import (
    DisableAutocast,
    disable_modes,
    has_fake_tensors,
    is_any_autocast_enabled,
    is_graph_made,
    run_when_traced,
)
from ..torch_state import (
    is_below_dispatcher,
    is_off,
    is_off_by_program,
    is_unobserved,
    phase,
    place,
    state_of_random_numbers,
    without_casts,
)
from . import overriding
from .making import cast_where_on, completed, make_wrapper, narrower
from .overriding import is_overridden
from .retiring import Variables, named_after


def make_observed_wrapper(
    original: Callable[..., Any], recipe: Recipe, attached: tuple[Attached, ...]
) -> Callable[..., Any]:
    """Returns a wrapper that casts and computes as `make_wrapper`'s does, and tells observers each call.

    Args:
        original: torch's function.
        recipe: That of the call site.
        attached: The observers.
    """
    complete = completed(original, recipe)
    with_tensors = any(each.tensors for each in attached)
    for_every_op = tuple([each for each in attached if each.every_op])
    is_timed = any(each.times for each in attached)
    observers = frozenset(attached)
    is_listed = recipe.decision.cast_policy is not CastPolicy.PASS
    is_cast = recipe.site.op in facts("converting")

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        inner, narrowed, tell = parts  # read together: a running call is reported once
        if (PAUSED and observers <= PAUSED) or is_unobserved():
            return inner(*args, **kwargs)
        if recipe.site.is_overridable and is_overridden(args, kwargs):
            return override(wrapper, args, kwargs)
        is_on = not is_off()
        if is_below_dispatcher() or not (is_on or (for_every_op and is_off_by_program())):
            return inner(*args, **kwargs)
        if is_on and narrowed is not None and (others := narrowed()) is not None:
            return others(*args, **kwargs)
        before = floating_inputs(recipe, *_decoded(recipe, args, kwargs))
        if not before:
            return inner(*args, **kwargs)  # there is nothing to decide
        input_dtypes = tuple([tensor.dtype for tensor in before])
        after, cast_bytes, tensors, seconds = input_dtypes, 0, None, None
        decision: tuple[torch.dtype | None, str, str] = (None, CastPolicy.PASS.name, SWITCHED_OFF)
        if is_on:
            after = tuple(cast_dtypes(recipe, *_decoded(recipe, args, kwargs)))
            decision = _dtype(recipe, before, args, kwargs), *decided_by(recipe, args, kwargs)
        is_traced = torch.compiler.is_dynamo_compiling()  # sizes may be symbols
        if not is_traced:
            if is_cast and _here.is_in_call:  # hmpx's own, handed over to its name by a mode
                return inner(*args, **kwargs)
            cast_bytes = sum(map(_cast_bytes, before, after))
            if with_tensors and not (is_graph_made() or has_fake_tensors()):
                tensors = _tensors(recipe, complete, args, kwargs)
        device_type = before[0].device.type
        if is_traced:
            result = inner(*args, **kwargs)
        else:
            began = _now(device_type) if is_timed else 0.0
            result = _amid_call(inner, *args, **kwargs)
            seconds = _now(device_type) - began if is_timed else None
        output_dtypes = tuple([tensor.dtype for tensor in tensors_in([result])])
        if tensors is not None:
            tensors = dataclasses.replace(tensors, result=result)
        values = None if is_traced or not for_every_op else (before, args, kwargs, result)
        dtypes = (input_dtypes, after, output_dtypes)
        tell(dtypes, device_type, cast_bytes, *decision, seconds, tensors, values, is_on)
        return result

    def tell(  # noqa: PLR0917  # torch.compile passes constants by position
        dtypes: tuple[tuple[torch.dtype, ...], ...],
        device_type: str | None,
        cast_bytes: int,
        dtype: torch.dtype | None,
        cast_policy: str,
        reason: str,
        seconds: float | None,
        tensors: CallTensors | None,
        values: tuple[list[torch.Tensor], Args, Kwargs, Any] | None,
        is_on: bool,
    ) -> None:
        input_dtypes, after, output_dtypes = dtypes
        is_emulated = recipe.emulation is not None and dtype is not None and cast_policy != TARGET
        call = OpCall(
            op=recipe.site.op,
            site=recipe.site.name,
            function=original,
            cast_policy=cast_policy,
            reason=reason,
            dtype=recipe.emulation.format if recipe.emulation and is_emulated else dtype,
            input_dtypes=input_dtypes,
            cast_dtypes=after,
            output_dtypes=output_dtypes,
            device_type=device_type,
            cast_bytes=cast_bytes,
            module=place().path,
            location=user_location(),
            phase=phase(),
            seconds=seconds,
        )
        told = attached if is_on and is_listed else for_every_op
        with_values = [each for each in told if each.values]
        if values is not None:
            for each in with_values:
                each.observer(call, *values)
        if len(with_values) < len(told):
            with _apart():
                for each in told:
                    if not each.values:
                        each.tell(call, tensors if tensors is None else _own(tensors))

    run_when_traced(tell)
    narrowed = None
    if recipe.narrows:
        narrowed = narrower(
            original, recipe, lambda others: make_observed_wrapper(original, others, attached)
        )
    parts = make_wrapper(original, recipe, public=wrapper) or complete, narrowed, tell

    def override(wrapper: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        cast_here = functools.partial(_amid_call, cast_where_on, recipe)
        return overriding.override(original, cast_here, wrapper, args, kwargs)

    def read() -> tuple[Any, ...]:
        return wrapper, parts, override

    def write(values: tuple[Any, ...]) -> None:
        nonlocal wrapper, parts, override
        wrapper, parts, override = values

    variables = Variables(("wrapper", "parts", "override"), read, write)
    return named_after(original, wrapper, recipe.site.name, variables)


class _Here(threading.local):
    """What is running in a thread.

    Attributes:
        is_in_call: An observed call is: conversions amid it are not the program's.
    """

    is_in_call = False


_here: Final = _Here()


def _amid_call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Calls ``function``, a part of an observed call: what it casts is not the program's."""
    if torch.compiler.is_dynamo_compiling():
        return function(*args, **kwargs)
    was_in_call = _here.is_in_call
    try:
        _here.is_in_call = True
        return function(*args, **kwargs)
    finally:
        _here.is_in_call = was_in_call


#: The reason of calls whose casts the program has switched off.
SWITCHED_OFF: Final = "casts are switched off"


def _now(device_type: str) -> float:
    """Returns the seconds on a clock, once a device has done what it was given."""
    if device_type not in ("cpu", "meta"):
        torch.accelerator.synchronize()
    return time.perf_counter()


def _decoded(recipe: Recipe, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Returns the arguments, values of a number format instead of its codes."""
    return (args, kwargs) if recipe.emulation is None else recipe.emulation.decoded(args, kwargs)


def _dtype(
    recipe: Recipe, inputs: list[torch.Tensor], args: Args, kwargs: Kwargs
) -> torch.dtype | None:
    """Returns the dtype that a call runs in; None if it is left alone. What torch does itself counts."""
    if recipe.facts.promotes and recipe.target is not None:
        return inputs[0].dtype
    if recipe.facts.promotes and recipe.decision.cast_policy is CastPolicy.WIDEST:
        return widest(inputs)
    if is_widened(recipe, inputs):
        return torch.float32
    return target_dtype(recipe, args, kwargs)


def _cast_bytes(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    """Returns how many bytes the cast of ``tensor`` to ``dtype`` writes; 0 where its size is a symbol."""
    count = tensor.numel()
    return count * dtype.itemsize if type(count) is int and tensor.dtype is not dtype else 0


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """What runs inside is none of the program's: not cast, observed, recorded, or seen by its modes."""
    is_autocast_on = is_any_autocast_enabled()
    # Outermost, since at its end it puts back the switch's marks, too.
    without_autocast = DisableAutocast() if is_autocast_on else contextlib.nullcontext()
    with without_autocast, without_casts(), torch.no_grad(), disable_modes():
        yield


def _tensors(
    recipe: Recipe, complete: Callable[..., Any], args: Args, kwargs: Kwargs
) -> CallTensors:
    """Returns the tensors of a call that is to be made, without its result."""
    options = dataclasses.replace(recipe.options, reuse_casts=False)
    state = (
        state_of_random_numbers(args)
        if recipe.facts.is_random or recipe.emulation is not None
        else None
    )
    with _apart():
        if _writes(recipe, args, kwargs):
            args, kwargs = _copied(args, kwargs)
        cast, cast_kwargs = cast_args(dataclasses.replace(recipe, options=options), args, kwargs)
    if state is not None:
        state.restore()  # which stochastic rounding may have drawn from

    def run(*args: Any, **kwargs: Any) -> Any:
        with _apart():
            if state is None:
                return complete(*args, **kwargs)
            now = state_of_random_numbers(args)
            state.restore()
            try:
                return complete(*args, **kwargs)
            finally:
                now.restore()

    return CallTensors(args, kwargs, cast, cast_kwargs, run, writes=_writes(recipe, args, kwargs))


def _own(tensors: CallTensors) -> CallTensors:
    """Returns tensors for one observer, which may write to copies."""
    if not tensors.writes:
        return tensors
    given, given_kwargs = _copied(tensors.given, tensors.given_kwargs)
    return dataclasses.replace(tensors, given=given, given_kwargs=given_kwargs)


def _writes(recipe: Recipe, args: Args, kwargs: Kwargs) -> bool:
    """Whether the call writes to any of its arguments."""
    return bool(recipe.site.writes) or written(recipe, args, kwargs) is not None


def _copied(args: Args, kwargs: Mapping[str, Any]) -> tuple[Args, Kwargs]:
    copied = {name: map_tensors(value, torch.Tensor.clone) for name, value in kwargs.items()}
    return map_tensors(args, torch.Tensor.clone), copied
