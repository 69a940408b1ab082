"""The changes that a policy makes to torch: the wrappers of its ops, and the patches to install them.

It patches nothing itself, and is independent of sessions.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .. import casting, compute, ops
from ..casting import CallPlan, CallSite, OpFacts, Options, facts_of, is_promotion, plan_of
from ..errors import OptionError
from ..number_formats import is_format
from ..observers import Attached
from ..patches import ForeignSite, foreign_sites_of
from ..patching import Draft, Patch
from ..policy import INPUT, SHIPPED, UNDECIDED, CastPolicy, Decision, Policy, Rule


@dataclass(frozen=True, slots=True)
class Conversion:
    """The settings that wrappers follow."""

    policy: Policy
    device_types: frozenset[str]  # Tensors on these are cast
    options: Options  # How ops compute
    observers: tuple[Attached, ...]  # They are notified of calls


def patches(conversion: Conversion, draft: Draft) -> tuple[list[Patch], list[Callable[..., Any]]]:
    """Returns the patches that make torch follow the policy, and the wrappers in them.

    The wrappers wrap the functions that ``draft`` holds. One builtin in several slots
    (``torch.conv2d`` is ``F.conv2d``) gets one wrapper.
    """
    found: list[Patch] = []
    homes: list[Patch] = []
    made: dict[tuple[int, str], Callable[..., Any] | None] = {}
    policy, device_types, options = conversion.policy, conversion.device_types, conversion.options
    deciding = _deciding(policy)
    # Observers of an unconverted program see it with torch's own kernels.
    lacking = compute.lacking_kernels() if device_types else {}
    completed = [name for name in lacking if name in ops.table()]  # those in this version of torch
    observed: list[str] = []
    if any(each.every_op for each in conversion.observers):
        observed = sorted(ops.computing() | ops.facts("converting").keys())
    if any(each.carries for each in conversion.observers):
        observed += sorted(ops.carrying())
    unobserved = dataclasses.replace(conversion, observers=())
    told_of = {*policy.decisions, *deciding, *observed}
    converting = sorted(ops.converting() & ops.table().keys())
    named = [*policy.decisions, *deciding, *completed, *converting, *observed]
    for name in dict.fromkeys(named):
        decision = policy.decisions.get(name, UNDECIDED)
        op = ops.table().get(name)
        if op is None and ops.resolve(name) == name:
            continue  # it belongs to another library
        if op is None:
            version = torch.__version__
            raise OptionError(f"the policy holds {name!r}, which is not an op of torch {version}")
        facts, asked = facts_of(name), deciding.get(name, ())
        is_seen = name in told_of or (name in lacking and not facts.is_view)
        seen = conversion if is_seen else unobserved
        for site in op.sites:
            lacks = None if site.is_property else lacking.get(name)
            is_complete = lacks is None and not (
                name in ops.converting() and ops.converts_numbers(name, site)
            )
            is_settled = is_complete and (site.in_place or not asked) and not conversion.observers
            if is_settled and _is_settled_by_torch(site, decision, facts):
                continue
            slot = draft.attribute(site.owner, site.attribute)
            function = site.callable_of(slot)
            key = (id(slot), name)
            if key not in made:
                call = (decision.reason, device_types, options, casting.hands_over(function))
                plan = plan_of(name, site, lacks, decision, *call)
                made[key] = _made(seen, function, site, plan, asked)
            wrapper = made[key]
            if wrapper is not None and site.is_property:
                getter = property(wrapper, slot.__set__, slot.__delete__, slot.__doc__)
                found.append(Patch(site.owner, site.attribute, getter))
            elif wrapper is not None:
                found.append(Patch(site.owner, site.attribute, wrapper))
                home = sys.modules.get(getattr(function, "__module__", None) or "")
                if home is not None and home is not site.owner:
                    homes.append(Patch(home, function.__name__, wrapper))
    by_key = {patch.key: patch for patch in found}
    for patch in homes:  # the names by which graph code calls the functions
        if draft.read(patch) is vars(patch.value)["__wrapped__"]:
            by_key.setdefault(patch.key, patch)
    return list(by_key.values()), [wrapper for wrapper in made.values() if wrapper is not None]


def _made(
    conversion: Conversion,
    function: Callable[..., Any],
    site: ops.Site | ForeignSite,
    plan: CallPlan,
    asked: tuple[Rule, ...],
) -> Callable[..., Any] | None:
    observers = conversion.observers

    def make(decision: Decision) -> Callable[..., Any] | None:
        decision = _as_kernels_need_it(decision, plan.site.op, plan.device_types)
        is_same = decision is plan.decision
        decided = plan if is_same else dataclasses.replace(plan, decision=decision)
        if is_format(decision.dtype):
            lowerings = compute.lowerings(plan.site.op, decision.dtype.name)
            decided = dataclasses.replace(decided, lowerings=lowerings)
        if _is_observed(function, site, decision, observers):
            return casting.make_observed_wrapper(function, decided, observers)
        if _is_settled_by_torch(site, decision, plan.facts):
            return casting.make_wrapper_where_lacking(function, plan)
        return casting.make_wrapper(function, decided)

    if (asked or plan.options.within) and not site.in_place:
        low_type = conversion.policy.low_precision_type
        return casting.make_choosing_wrapper(function, plan, asked, low_type, make)
    is_observed = _is_observed(function, site, plan.decision, observers)
    if is_observed or is_format(plan.decision.dtype):  # registered functions may compute in formats
        return make(plan.decision)
    return casting.shared(function, plan, functools.partial(make, plan.decision))


def foreign_names(policy: Policy) -> list[str]:
    return [
        name
        for name in dict.fromkeys([*policy.decisions, *_deciding(policy)])
        if ops.is_foreign(name)
    ]


class Foreign(NamedTuple):
    """Wrappers of other libraries' functions, for the libraries that are loaded."""

    patches: list[Patch]  # They install the wrappers
    made: list[Callable[..., Any]]  # The wrappers
    said: list[str]  # Problems with names in the lists


def foreign_patches(
    conversion: Conversion,
    draft: Draft,
    names: Iterable[str],
    module: object = None,
    present: Iterable[Callable[..., Any]] = (),
) -> Foreign:
    """Returns the wrappers of these ops, except of those ``present``; ``module`` is fully executed."""
    found = Foreign([], [], [])
    policy, options = conversion.policy, conversion.options
    deciding = _deciding(policy) if casting.all_rules() or policy.sections else {}
    if options.legalize != "always":
        # How fast another library's function is in low precision is unknown.
        options = dataclasses.replace(options, legalize="never")
    skipped = set(map(id, present))
    taken: dict[tuple[int, str], tuple[str, Decision]] = {}
    for name in names:
        decision = policy.decisions.get(name, UNDECIDED)
        is_shipped = decision.reason.startswith(SHIPPED)
        sites = list(foreign_sites_of(name, draft))
        if not (sites or is_shipped) and (why := ops.lacking(name, module)):
            found.said.append(f"{decision.reason or 'a rule'}: {why}")
        for site in sites:
            if id(site.function) in skipped:
                continue
            of_class = id(site.owner), site.attribute
            key = of_class if isinstance(site.owner, type) else (id(site.function), "")
            first, said = taken.setdefault(key, (name, decision))
            if said != decision and not (is_shipped or said.reason.startswith(SHIPPED)):
                found.said.append(
                    f"{decision.reason}: {name!r} is left out: it is {first!r}, which is decided "
                    f"otherwise at {said.reason}; keep one of the lines"
                )
            if first != name:
                continue
            call_site = CallSite(
                op=name,
                name=site.qualified,
                parameters=site.parameters,
                in_place=site.in_place,
                is_python=True,
                is_overridable=False,
                writes=site.writes,
            )
            plan = CallPlan(call_site, OpFacts(), decision, conversion.device_types, options)
            wrapper = _made(conversion, site.function, site, plan, deciding.get(name, ()))
            if wrapper is not None:
                found.made.append(wrapper)
                found.patches.append(site.holding(wrapper))
    return found


def originals(wrappers: Iterable[Callable[..., Any]]) -> list[Callable[..., Any]]:
    return [vars(wrapper)["__wrapped__"] for wrapper in wrappers]


def replacements(
    made: Iterable[Callable[..., Any]], earlier: Iterable[Callable[..., Any]]
) -> dict[int, Callable[..., Any]]:
    """Maps ``id`` of a function, or of an earlier wrapper of it, to the wrapper."""
    found = {id(vars(wrapper)["__wrapped__"]): wrapper for wrapper in made}
    for kept in earlier:
        if (wrapper := found.get(id(vars(kept)["__wrapped__"]))) is not None:
            found[id(kept)] = wrapper
    return found


def _deciding(policy: Policy) -> dict[str, tuple[Rule, ...]]:
    """Maps each op to the rules that decide its calls before the lists do, if it has any."""
    by_section = policy.asked_rules()
    names = set(by_section)
    for rule in casting.all_rules():
        names |= ops.computing() if rule.op == "*" else ops.covered(rule.op)
        if rule.op == "*":
            names |= set(filter(ops.is_foreign, policy.decisions))
    found: dict[str, tuple[Rule, ...]] = {
        n: (*casting.registered(n), *by_section.get(n, ())) for n in sorted(names)
    }
    return {name: asked for name, asked in found.items() if asked}


def _is_observed(
    function: Callable[..., Any],
    site: ops.Site | ForeignSite,
    decision: Decision,
    observers: tuple[Attached, ...],
) -> bool:
    if decision.cast_policy is not CastPolicy.PASS:
        return bool(observers)
    # A Python function calls other ops, which are observed, or wraps one of torch's C functions, or calls it
    # where no slot is patched, as ``Tensor.__rsub__`` does.
    own = inspect.unwrap(function)
    is_in_python = isinstance(own, types.FunctionType)
    calls_others = (
        site.is_python and is_in_python and "_VariableFunctions" not in own.__code__.co_names
    )
    return not calls_others and any(each.every_op for each in observers)


def _as_kernels_need_it(decision: Decision, op: str, device_types: frozenset[str]) -> Decision:
    """Makes a norm compute in fp32 if its low-input kernels round, or reject fp32 parameters."""
    if decision.accumulate_dtype is not None:
        return decision
    casts_low = decision.cast_policy in _LOW_POLICIES and not is_format(decision.dtype)
    if casts_low and device_types & {*ops.facts("rounded_statistics").get(op, ())}:
        return dataclasses.replace(decision, accumulate_dtype=torch.float32)
    follows = decision.cast_policy is CastPolicy.FIRST and decision.output_dtype is None
    if follows and device_types & {*ops.facts("refused_parameters").get(op, ())}:
        return dataclasses.replace(decision, cast_policy=CastPolicy.WIDEST, output_dtype=INPUT)
    return decision


#: Under these policies the inputs of an op may be in low precision.
_LOW_POLICIES = frozenset(CastPolicy) - {CastPolicy.FP32, CastPolicy.PASS}


def _is_settled_by_torch(site: ops.Site | ForeignSite, decision: Decision, facts: OpFacts) -> bool:
    """Whether torch's own kernel follows the decision exactly, so that no wrapper is needed."""
    if decision.cast_policy is CastPolicy.PASS:
        return True
    if site.in_place:
        if isinstance(site, ForeignSite):
            return False
        return facts.promotes or not (site.is_python or ops.parameters(site).has_several_tensors)
    return is_promotion(decision, facts)
