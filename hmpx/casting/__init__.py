"""The rule for one call: the dtypes to which its inputs are cast."""

from __future__ import annotations

from .cache import cache_patches
from .inputs import (
    TARGET,
    cast_args,
    cast_dtypes,
    counted,
    decided_by,
    floating_inputs,
    given_inputs,
    is_emulated,
    is_on_device,
    is_widened,
    rounds_into_out,
    target_dtype,
    widest,
    written,
)
from .plan import (
    CallPlan,
    CallSite,
    OpFacts,
    Options,
    facts_of,
    is_promotion,
    plan_of,
    site_of,
)
from .quick import ALONE, casts_of, is_settled, placer, unusual, usual_caster, widener

__all__ = [
    "ALONE",
    "TARGET",
    "CallPlan",
    "CallSite",
    "OpFacts",
    "Options",
    "cache_patches",
    "cast_args",
    "cast_dtypes",
    "casts_of",
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
    "placer",
    "plan_of",
    "rounds_into_out",
    "site_of",
    "target_dtype",
    "unusual",
    "usual_caster",
    "widener",
    "widest",
    "written",
]
