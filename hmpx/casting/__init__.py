"""How one call is cast: users' rules, the plan of a call, the dtypes of its inputs, the wrappers in torch."""

from __future__ import annotations

from .making import hands_over, make_choosing_wrapper, make_wrapper, make_wrapper_where_lacking
from .observed import make_observed_wrapper
from .plan import (
    CallPlan,
    CallSite,
    OpFacts,
    Options,
    facts_of,
    formats_of,
    is_promotion,
    plan_of,
    site_of,
)
from .retiring import held_by_others, in_force, in_use, retirements, shared
from .rules import (
    RULES,
    CachedRules,
    Registered,
    all_rules,
    are_alike,
    register_rule,
    registered,
    unregister_rule,
)
