"""Calls that fail on inputs that were cast: they are tried again in fp32."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

import torch

from ..casting import Recipe, cast_args, floating_inputs, written
from ..compute import computed_in_fp32, rounded
from ..frames import is_ours
from ..policy import INPUT
from ..tensors import CAST, LOW_DTYPES, Args, Kwargs
from ..torch_internals import user_hooks
from ..torch_state import without_casts
from .running import statistics_of

LOGGER: Final = logging.getLogger("hmpx")

_retried: set[tuple[str, torch.dtype | None]] = set()


def retry_in_fp32(
    recipe: Recipe, original: Callable[..., Any], error: Exception, args: Args, kwargs: Kwargs
) -> Any:
    """Returns the call's result computed in fp32 from inputs rounded as ever, and rounded itself.

    Raises:
        Exception: What the call raises in fp32, as it does without casts; ``error`` where a half-done
            in-place update can't be ruled out, where the call has no low-precision input, where
            a hook has raised it, or where memory is exhausted, of which fp32 takes more.
    """
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    if written(recipe, args, kwargs) is not None or _is_from_hook(error):
        raise error
    given = floating_inputs(recipe, args, kwargs)
    args, kwargs = cast_args(recipe, args, kwargs)
    statistics = statistics_of(recipe)
    if statistics is not None:
        original, args, kwargs = statistics.set_apart(original, args, kwargs)
    inputs = floating_inputs(recipe, args, kwargs)
    if not any(t.dtype in LOW_DTYPES for t in inputs):
        raise error
    dtype = inputs[0].dtype
    try:
        with without_casts():
            result = computed_in_fp32(original, args, kwargs, dtype)
    except Exception as same:
        raise same from None
    output = recipe.decision.output_dtype
    if output is not None:
        output = given[0].dtype if output == INPUT else output
        result = rounded(result, CAST[output], dtype)
    if (recipe.site.op, dtype) not in _retried:
        _retried.add((recipe.site.op, dtype))
        LOGGER.warning("%s runs in fp32 and is rounded: %s", recipe.site.op, error)
    return result


def _is_from_hook(error: Exception) -> bool:
    """Whether a saved-tensor hook may have raised ``error``: to stop a checkpoint's recomputation, say.

    Kernels raise where hmpx calls them, with no function of Python's in between.
    """
    if user_hooks() is None:
        return False
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback is None or not is_ours(traceback.tb_frame.f_globals.get("__name__"))
