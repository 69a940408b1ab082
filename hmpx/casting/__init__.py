"""The rule for one call: what its inputs are cast to."""

from __future__ import annotations

from .arguments import (
    TARGET,
    cast_args,
    cast_dtypes,
    converter,
    decided_by,
    is_settled,
    is_widened,
    target_dtype,
)
from .cache import cache_patches
from .facts import facts_of, is_promotion, recipe_of, site_of
from .inputs import (
    counted,
    floating_inputs,
    given_inputs,
    is_emulated,
    is_on_device,
    rounds_into_out,
    widest,
    written,
)
from .recipe import CallSite, OpFacts, Options, Recipe

__all__ = [
    "TARGET",
    "CallSite",
    "OpFacts",
    "Options",
    "Recipe",
    "cache_patches",
    "cast_args",
    "cast_dtypes",
    "converter",
    "counted",
    "decided_by",
    "facts_of",
    "floating_inputs",
    "given_inputs",
    "is_emulated",
    "is_on_device",
    "is_promotion",
    "is_settled",
    "is_widened",
    "recipe_of",
    "rounds_into_out",
    "site_of",
    "target_dtype",
    "widest",
    "written",
]
