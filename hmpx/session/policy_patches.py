"""What a policy puts into torch: the wrappers of its ops, and the patches that put them in place.

Patches nothing itself, and knows of no session.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from .. import compute, ops, rules, wrappers
from ..casting import CallPlan
from ..errors import OptionError
from ..number_formats import Format
from ..observers import Observer
from ..patches import Site, foreign_sites_of
from ..patching import Draft, Patch
from ..policy import SHIPPED, CastPolicy, Decision, Policy, Rule


@dataclass(frozen=True, slots=True)
class Options:
    """How ops compute: see `convert`."""

    legalize: str = "auto"
    reuse_casts: bool = False
    rounding: str = "nearest"
    round_gradients: bool = False


@dataclass(frozen=True, slots=True)
class Conversion:
    """What wrappers are to do.

    Attributes:
        policy: The decision for every op.
        device_types: The device types whose tensors are cast.
        options: How ops compute.
        observers: What is told of calls.
    """

    policy: Policy
    device_types: frozenset[str]
    options: Options
    observers: tuple[Observer, ...]


def patches(conversion: Conversion, draft: Draft) -> tuple[list[Patch], list[Callable[..., Any]]]:
    """Returns the patches that make torch follow the policy, and the wrappers in them.

    They wrap what ``draft`` holds.

    One builtin in several slots (``torch.conv2d`` is ``F.conv2d``) gets one wrapper.
    """
    found: list[Patch] = []
    made: dict[tuple[int, str], Callable[..., Any] | None] = {}
    policy, options, observers = conversion.policy, conversion.options, conversion.observers
    deciding = _deciding(policy)
    lacking = compute.lacking_kernels()
    completed = [name for name in lacking if name in ops.table()]  # of this version of torch
    for name in dict.fromkeys([*policy.decisions, *deciding, *completed]):
        decision = policy.decisions.get(name, _PASS)
        op = ops.table().get(name)
        if op is None and ops.is_known(name):
            continue  # another library's
        if op is None:
            raise OptionError(
                f"the policy holds {name!r}, which is no op of torch {torch.__version__}"
            )
        promotes = ops.root(name) in ops.facts("promotes")
        rounds_mixed = ops.root(name) in ops.facts("rounds_mixed")
        kind, first_matrix = ops.kind(name)
        asked = deciding.get(name, ())
        for site in op.sites:
            lacks = lacking.get(name) if _has_kernels(site, op) else None
            is_settled = lacks is None and (site.in_place or not asked)
            if (
                not observers
                and is_settled
                and _is_settled_by_torch(site, decision, promotes, rounds_mixed)
            ):
                continue
            slot = draft.attribute(site.owner, site.attribute)
            function = site.callable_of(slot)
            key = (id(slot), name)
            if key in made:
                pass
            elif lacks is not None and name not in policy.decisions and not asked:
                callee = compute.Callee(
                    name,
                    function,
                    ops.parameters(site).names,
                    frozenset(ops.written(name, site)),
                    site.is_python,
                    name in ops.facts("random"),
                    promotes,
                )
                made[key] = wrappers.make_completed_wrapper(callee, lacks, site.qualified)
            else:
                plan = CallPlan(
                    op=name,
                    site=site.qualified,
                    decision=decision,
                    parameters=ops.parameters(site),
                    device_types=conversion.device_types,
                    in_place=site.in_place,
                    promotes=promotes,
                    rounds_mixed=rounds_mixed,
                    rounds_terms=ops.root(name) in ops.facts("rounds_terms"),
                    is_python=site.is_python,
                    is_overridable=wrappers.hands_over(function),
                    writes=ops.written(name, site),
                    statistics=ops.statistics(name, site),
                    updates_if=next(iter(ops.facts("writes_if").get(name, ())), None),
                    norm_parameters=frozenset(ops.facts("parameters").get(name, ())),
                    mixed_device_types=frozenset(ops.facts("mixed_parameters").get(name, ())),
                    never_narrows=name in ops.facts("never_narrow"),
                    kind=kind,
                    first_matrix=first_matrix,
                    legalize=options.legalize,
                    reuses_casts=options.reuse_casts,
                    rounding=options.rounding,
                    rounds_gradients=options.round_gradients,
                    is_view=ops.is_view(name),
                    casts_first=name in ops.facts("casts_first"),
                    lacking=lacks,
                    is_random=name in ops.facts("random"),
                )
                make = _maker(function, site, plan, observers)
                if asked and not site.in_place:
                    made[key] = wrappers.make_choosing_wrapper(
                        function, plan, asked, policy.low_precision_type, make
                    )
                else:
                    made[key] = make(decision)
            wrapper = made[key]
            if wrapper is not None and site.is_property:
                getter = property(wrapper, slot.__set__, slot.__delete__, slot.__doc__)
                found.append(Patch(site.owner, site.attribute, getter))
            elif wrapper is not None:
                found.append(Patch(site.owner, site.attribute, wrapper))
    return found, [wrapper for wrapper in made.values() if wrapper is not None]


_PASS = Decision(CastPolicy.PASS, reason="in no list")


def foreign_names(policy: Policy) -> list[str]:
    """Returns the ops of other libraries for which anything is decided."""
    return [
        name
        for name in dict.fromkeys([*policy.decisions, *_deciding(policy)])
        if ops.is_foreign(name)
    ]


class Foreign:
    """Wrappers of other libraries' functions, as far as these are loaded.

    Attributes:
        patches: What puts them in place.
        made: The wrappers.
        said: What is wrong with names in the lists.
    """

    def __init__(
        self,
        conversion: Conversion,
        draft: Draft,
        present: tuple[Callable[..., Any], ...] = (),
    ) -> None:
        """Starts without any; ``present`` are those that are in place already."""
        self.patches: list[Patch] = []
        self.made: list[Callable[..., Any]] = []
        self.said: list[str] = []
        self._conversion, self._draft = conversion, draft
        self._present = {id(wrapper) for wrapper in present}
        self._taken: dict[tuple[int, str], tuple[str, Decision]] = {}
        self._deciding = (
            _deciding(conversion.policy) if rules.all_rules() or conversion.policy.sections else {}
        )

    def take(self, names: Iterable[str], module: object = None) -> None:
        """Makes the wrappers of these ops; ``module`` is executed to its end, as others may not be."""
        for name in names:
            decision = self._conversion.policy.decisions.get(name, _PASS)
            is_shipped = decision.reason.startswith(SHIPPED)
            sites = list(foreign_sites_of(name, self._draft))
            if not (sites or is_shipped) and (why := ops.lacking(name, module)):
                self.said.append(f"{decision.reason or 'a rule'}: {why}")
            for site in sites:
                if id(site.function) not in self._present and self._is_first(site, name, decision):
                    self._wrap(site, name, decision)

    def _is_first(self, site: Site, name: str, decision: Decision) -> bool:
        key = (
            (id(site.owner), site.attribute)
            if isinstance(site.owner, type)
            else (id(site.function), "")
        )
        first, said = self._taken.setdefault(key, (name, decision))
        if (
            said != decision
            and not said.reason.startswith(SHIPPED)
            and (not decision.reason.startswith(SHIPPED))
        ):
            self.said.append(
                f"{decision.reason}: {name!r} is left out: it is {first!r}, which is decided "
                f"otherwise at {said.reason}; keep one of the lines"
            )
        return first == name

    def _wrap(self, site: Site, name: str, decision: Decision) -> None:
        conversion = self._conversion
        # Nobody knows by what the speed of another library's function in low precision is told.
        legalize = "always" if conversion.options.legalize == "always" else "never"
        plan = CallPlan(
            op=name,
            site=site.qualified,
            decision=decision,
            parameters=site.parameters,
            device_types=conversion.device_types,
            in_place=site.in_place,
            is_python=True,
            writes=site.writes,
            legalize=legalize,
            reuses_casts=conversion.options.reuse_casts,
            rounding=conversion.options.rounding,
            rounds_gradients=conversion.options.round_gradients,
            is_overridable=False,
        )
        make = _maker(site.function, site, plan, conversion.observers)
        asked = self._deciding.get(name, ())
        low_type = conversion.policy.low_precision_type
        wrapper = (
            wrappers.make_choosing_wrapper(site.function, plan, asked, low_type, make)
            if asked and not site.in_place
            else make(decision)
        )
        if wrapper is not None:
            self.made.append(wrapper)
            self.patches.append(site.holding(wrapper))


def replacements(
    made: Iterable[Callable[..., Any]], earlier: Iterable[Callable[..., Any]]
) -> dict[int, Callable[..., Any]]:
    """Returns ``id`` of a function, or of an earlier wrapper of it -> the wrapper."""
    found = {id(vars(wrapper)["__wrapped__"]): wrapper for wrapper in made}
    for kept in earlier:
        if (wrapper := found.get(id(vars(kept)["__wrapped__"]))) is not None:
            found[id(kept)] = wrapper
    return found


def _deciding(policy: Policy) -> dict[str, tuple[Rule, ...]]:
    """Returns op -> what decides its calls before the lists do, for ops that have any."""
    by_section = policy.section_rules()
    names = set(by_section)
    for rule in rules.all_rules():
        names |= ops.computing() if rule.op == "*" else ops.covered(rule.op)
        if rule.op == "*":
            names |= set(filter(ops.is_foreign, policy.decisions))
    found: dict[str, tuple[Rule, ...]] = {
        name: (*rules.registered(name), *by_section.get(name, ())) for name in sorted(names)
    }
    return {name: asked for name, asked in found.items() if asked}


def _maker(
    function: Callable[..., Any],
    site: ops.Site | Site,
    plan: CallPlan,
    observers: tuple[Observer, ...],
) -> wrappers.Maker:
    """Returns what makes the wrapper that follows a decision; None for one that does nothing."""
    rounds_statistics = not plan.device_types.isdisjoint(
        ops.facts("rounded_statistics").get(plan.op, ())
    )

    def make(decision: Decision) -> Callable[..., Any] | None:
        if rounds_statistics:
            decision = _with_exact_statistics(decision)
        decided = dataclasses.replace(plan, decision=decision)
        if isinstance(decision.dtype, Format):
            lowerings = compute.lowerings(plan.op, decision.dtype)
            decided = dataclasses.replace(decided, lowerings=lowerings)
        if observers and decision.cast_policy is not CastPolicy.PASS:
            return wrappers.make_observed_wrapper(function, decided, observers)
        if _is_settled_by_torch(site, decision, plan.promotes, plan.rounds_mixed):
            return wrappers.make_wrapper_where_lacking(function, plan)
        return wrappers.make_wrapper(function, decided)

    return make


def _with_exact_statistics(decision: Decision) -> Decision:
    """Returns the decision for a norm whose kernels round its statistics with its input: in fp32."""
    casts_low = decision.cast_policy in _LOW_POLICIES and not isinstance(decision.dtype, Format)
    if not casts_low or decision.accumulate_dtype is not None:
        return decision
    return dataclasses.replace(decision, accumulate_dtype=torch.float32)


#: By these the inputs of an op may be of low precision.
_LOW_POLICIES = frozenset(CastPolicy) - {CastPolicy.FP32, CastPolicy.PASS}


def _has_kernels(site: ops.Site, op: ops.Op) -> bool:
    """Whether the callable at ``site`` is torch's own, or the op has none but those of Python."""
    if site.is_property:
        return False
    return not site.is_python or all(each.is_python for each in op.sites)


def _is_settled_by_torch(
    site: ops.Site | Site, decision: Decision, promotes: bool, rounds_mixed: bool
) -> bool:
    """Whether torch's own kernel does exactly what the decision says, so that none is wrapped."""
    if decision.cast_policy is CastPolicy.PASS:
        return True
    if site.in_place:
        if isinstance(site, Site):
            return False
        return promotes or not (site.is_python or ops.parameters(site).has_several_tensors)
    is_widest = decision.cast_policy is CastPolicy.WIDEST
    return promotes and not rounds_mixed and is_widest and not decision.is_composed
