"""The rule for one call: the dtypes to which its inputs are cast."""

from __future__ import annotations

from .cache import cache_patches as cache_patches
from .inputs import ALONE as ALONE
from .inputs import cast_args as cast_args
from .inputs import cast_dtypes as cast_dtypes
from .inputs import casts_of as casts_of
from .inputs import counted as counted
from .inputs import emulated_args as emulated_args
from .inputs import floating_inputs as floating_inputs
from .inputs import given_out as given_out
from .inputs import is_emulated as is_emulated
from .inputs import is_on_device as is_on_device
from .inputs import is_settled as is_settled
from .inputs import placer as placer
from .inputs import rounds_into_out as rounds_into_out
from .inputs import target_dtype as target_dtype
from .inputs import unusual as unusual
from .inputs import usual_caster as usual_caster
from .inputs import widener as widener
from .inputs import written as written
from .plan import LEGALIZE_MODES as LEGALIZE_MODES
from .plan import CallPlan as CallPlan
from .plan import CallSite as CallSite
from .plan import OpFacts as OpFacts
from .plan import Options as Options
from .plan import facts_of as facts_of
from .plan import is_promotion as is_promotion
from .plan import plan_of as plan_of
from .plan import site_of as site_of
