"""What plans are made of, as the table of ops has it."""

from __future__ import annotations

import functools

from .. import ops
from ..compute import Lacking
from ..policy import CastPolicy, Decision
from .plan import CallPlan, CallSite, OpFacts, Options


@functools.cache
def facts_of(op: str) -> OpFacts:
    """Returns the facts about torch's kernels for ``op``."""
    root, (kind, first_matrix) = ops.root(op), ops.kind(op)
    return OpFacts(
        kind=kind,
        first_matrix=first_matrix,
        promotes=root in ops.facts("promotes"),
        rounds_mixed=root in ops.facts("rounds_mixed"),
        rounds_terms=root in ops.facts("rounds_terms"),
        updates_if=next(iter(ops.facts("writes_if").get(op, ())), None),
        norm_parameters=frozenset(ops.facts("parameters").get(op, ())),
        mixed_device_types=frozenset(ops.facts("mixed_parameters").get(op, ())),
        rounds_statistics=op in ops.facts("rounded_running"),
        never_narrows=op in ops.facts("never_narrow"),
        is_view=ops.is_view(op),
        casts_first=op in ops.facts("casts_first"),
        is_random=op in ops.facts("random"),
        selects=op in ops.facts("selects"),
    )


def is_promotion(decision: Decision, facts: OpFacts) -> bool:
    """Whether torch's own promotion does exactly what the decision says, gradients included."""
    is_widest = decision.cast_policy is CastPolicy.WIDEST and not decision.is_composed
    return is_widest and facts.promotes and not facts.rounds_mixed


def site_of(op: str, site: ops.Site, lacking: Lacking | None, *, is_overridable: bool) -> CallSite:
    """Returns one of torch's call sites of ``op``, as plans have it."""
    return CallSite(
        op=op,
        name=site.qualified,
        parameters=ops.parameters(site),
        in_place=site.in_place,
        is_python=site.is_python,
        is_overridable=is_overridable,
        writes=ops.written(op, site),
        statistics=ops.statistics(op, site),
        lacking=lacking,
        numbers=ops.numbers(op, site),
    )


def plan_of(  # noqa: PLR0917  # the key
    op: str,
    site: ops.Site,
    lacking: Lacking | None,
    decision: Decision,
    device_types: frozenset[str],
    options: Options,
    *,
    is_overridable: bool,
) -> CallPlan:
    """Returns the plan of one of torch's call sites of ``op``; see `CallPlan` and `CallSite`.

    Conversions share plans: to work one out takes longer than all the rest of making a wrapper.
    """
    # Reasons are not part of a decision's equality.
    return _plan_of(
        op, site, lacking, decision, decision.reason, device_types, options, is_overridable
    )


@functools.lru_cache(maxsize=10_000)  # a few policies of all ops
def _plan_of(  # noqa: PLR0917  # the key
    op: str,
    site: ops.Site,
    lacking: Lacking | None,
    decision: Decision,
    reason: str,
    device_types: frozenset[str],
    options: Options,
    is_overridable: bool,
) -> CallPlan:
    call_site = site_of(op, site, lacking, is_overridable=is_overridable)
    return CallPlan(call_site, facts_of(op), decision, device_types, options)
