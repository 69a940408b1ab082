"""Retries a call in fp32 if torch's function rejects its dtypes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

import torch

from ..casting import Recipe, cast_args, floating_inputs, written
from ..compute import computed_in_fp32, may_run_again, note_legalized, rounded
from ..policy import INPUT
from ..tensors import CAST, LOW_DTYPES, Args, Kwargs
from ..torch_state import without_casts
from .running import statistics_of

LOGGER: Final = logging.getLogger("hmpx")

_retried: set[tuple[str, torch.dtype | None]] = set()


def retry_in_fp32(
    recipe: Recipe, original: Callable[..., Any], error: Exception, args: Args, kwargs: Kwargs
) -> Callable[[], Any] | None:
    """Returns a function that computes the call in fp32.

    None if ``error`` does not reject dtypes, if the call writes to a tensor, or if it has no low-precision
    input.
    """
    if not may_run_again(error, recipe.site.name.partition(".")[0]):
        return None
    if written(recipe, args, kwargs) is not None:
        return None
    given = floating_inputs(recipe, args, kwargs)
    args, kwargs = cast_args(recipe, args, kwargs)
    statistics = statistics_of(recipe)
    if statistics is not None:
        original, args, kwargs = statistics.set_apart(original, args, kwargs)
    inputs = floating_inputs(recipe, args, kwargs)
    if not any(t.dtype in LOW_DTYPES for t in inputs):
        return None
    dtype, refusal = inputs[0].dtype, str(error)  # whoever holds the error holds all its frames

    def compute_in_fp32() -> Any:
        note_legalized()
        with without_casts():
            result = computed_in_fp32(original, args, kwargs, dtype)
        output = recipe.decision.output_dtype
        if output is not None:
            output = given[0].dtype if output == INPUT else output
            result = rounded(result, CAST[output], dtype)
        if (recipe.site.op, dtype) not in _retried:
            _retried.add((recipe.site.op, dtype))
            LOGGER.warning("%s runs in fp32 and is rounded: %s", recipe.site.op, refusal)
        return result

    return compute_in_fp32
