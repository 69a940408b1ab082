"""Wrappers whose calls are observed: the same ones as without observers, and what they are told.

A call runs in the wrapper that `making` makes, whatever observes it. What is said of it follows from
the same recipe.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

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
from ..observers import Attached, CallTensors, OpCall, user_location
from ..policy import CastPolicy
from ..tensors import Args, Kwargs, map_tensors, tensors_in
from ..torch_internals import run_when_traced
from ..torch_state import disable_casts, is_below_dispatcher, is_off, place
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

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if recipe.site.is_overridable and is_overridden(args, kwargs):
            return override(wrapper, args, kwargs)
        if is_off() or is_below_dispatcher():
            return inner(*args, **kwargs)
        if narrowed is not None and (others := narrowed()) is not None:
            return others(*args, **kwargs)
        before = floating_inputs(recipe, *_decoded(recipe, args, kwargs))
        if not before:
            return inner(*args, **kwargs)  # there is nothing to decide
        input_dtypes = tuple([tensor.dtype for tensor in before])
        after = tuple(cast_dtypes(recipe, *_decoded(recipe, args, kwargs)))
        cast_bytes, tensors = 0, None
        if not torch.compiler.is_dynamo_compiling():  # where sizes may be symbols
            for tensor, dtype in zip(before, after, strict=True):
                cast_bytes += tensor.numel() * dtype.itemsize if tensor.dtype is not dtype else 0
            if with_tensors:
                tensors = _tensors(recipe, complete, args, kwargs)
        decision = _dtype(recipe, before, args, kwargs), *decided_by(recipe, args, kwargs)
        result = inner(*args, **kwargs)
        output_dtypes = tuple([tensor.dtype for tensor in tensors_in([result])])
        device_type = before[0].device.type
        if tensors is not None:
            tensors = dataclasses.replace(tensors, result=result)
        tell(input_dtypes, after, output_dtypes, device_type, cast_bytes, *decision, tensors)
        return result

    inner = make_wrapper(original, recipe, public=wrapper) or complete
    narrowed = None
    if recipe.narrows:
        narrowed = narrower(
            original, recipe, lambda others: make_observed_wrapper(original, others, attached)
        )

    def tell(  # noqa: PLR0917  # torch.compile passes constants by position
        input_dtypes: tuple[torch.dtype, ...],
        after: tuple[torch.dtype, ...],
        output_dtypes: tuple[torch.dtype, ...],
        device_type: str | None,
        cast_bytes: int,
        dtype: torch.dtype | None,
        cast_policy: str,
        reason: str,
        tensors: CallTensors | None,
    ) -> None:
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
        )
        with disable_casts():  # what observers compute is not observed in turn
            for each in attached:
                each.tell(call, tensors)

    run_when_traced(tell)

    def override(wrapper: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        cast_here = functools.partial(cast_where_on, recipe)
        return overriding.override(original, cast_here, wrapper, args, kwargs)

    def read() -> tuple[Any, ...]:
        return inner, narrowed, tell, override

    def write(values: tuple[Any, ...]) -> None:
        nonlocal inner, narrowed, tell, override
        inner, narrowed, tell, override = values

    variables = Variables(("inner", "narrowed", "tell", "override"), read, write)
    return named_after(original, wrapper, recipe.site.name, variables)


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


def _tensors(
    recipe: Recipe, complete: Callable[..., Any], args: Args, kwargs: Kwargs
) -> CallTensors:
    """Returns the tensors of a call that is to be made, without its result."""
    plain = dataclasses.replace(
        recipe, options=dataclasses.replace(recipe.options, reuse_casts=False)
    )
    with disable_casts(), torch.no_grad():
        if written(recipe, args, kwargs) is not None or recipe.site.writes:
            args, kwargs = map_tensors(args, torch.Tensor.clone), _cloned(kwargs)
        cast, cast_kwargs = cast_args(plain, args, kwargs)

    def run(*args: Any, **kwargs: Any) -> Any:
        with disable_casts():
            return complete(*args, **kwargs)

    return CallTensors(args, kwargs, cast, cast_kwargs, run)


def _cloned(kwargs: Kwargs) -> Kwargs:
    return {name: map_tensors(value, torch.Tensor.clone) for name, value in kwargs.items()}
