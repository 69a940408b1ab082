"""The rule for one call: the dtypes to which its inputs are cast."""

from __future__ import annotations

from .cache import cache_patches
from .inputs import (
    ALONE,
    cast_args,
    cast_dtypes,
    casts_of,
    counted,
    emulated_args,
    floating_inputs,
    given_out,
    is_emulated,
    is_on_device,
    is_settled,
    placer,
    rounds_into_out,
    target_dtype,
    unusual,
    usual_caster,
    widener,
    written,
)
from .plan import (
    LEGALIZE_MODES,
    CallPlan,
    CallSite,
    OpFacts,
    Options,
    facts_of,
    is_promotion,
    plan_of,
    site_of,
)
