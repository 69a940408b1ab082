"""Wrappers of ops that rules decide: each call goes to the wrapper that its decision has.

Knows neither lists nor how wrappers get into torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.overrides import has_torch_function

from ..casting import CallPlan
from ..policy import Decision, LowType, Rule
from ..rules import MOST_VERDICTS, Judge
from ..tensors import Args, Kwargs
from ..torch_state import switch  # its gate, as it is at each call
from .calls import cast_where_on
from .making import completed
from .overriding import is_overridden, override
from .retiring import Control, named_after

#: Makes the wrapper that follows a decision; None where no call would be cast.
Maker = Callable[[Decision], Callable[..., Any] | None]


def make_choosing_wrapper(
    original: Callable[..., Any],
    plan: CallPlan,
    rules: tuple[Rule, ...],
    low_dtype: LowType,
    make: Maker,
) -> Callable[..., Any]:
    """Returns a wrapper of ``original`` that asks ``rules`` how each call is cast.

    Args:
        original: torch's function.
        plan: That of the call site, with the decision of the lists.
        rules: In the order in which they are asked.
        low_dtype: That of decisions that name none.
        make: Makes the wrappers that calls go to.
    """
    complete = completed(original, plan)
    # By the reason too, which the log names and equality leaves out.
    followed: dict[tuple[Decision, str], Callable[..., Any]] = {}

    def follow(decision: Decision | None) -> Callable[..., Any]:
        decision = plan.decision if decision is None else decision
        key = decision, decision.reason
        found = followed.get(key)
        if found is None:
            if len(followed) >= MOST_VERDICTS:  # reasons may be as many as calls
                followed.clear()
            found = make(decision) or completed(original, replace(plan, decision=decision))
            followed[key] = found
        return found

    by_lists, control = follow(None), Control()

    def cast(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        if choose(args, kwargs) is not by_lists:
            return args, kwargs  # cast once it was asked again, by the dtypes that there are
        return cast_where_on(plan, args, kwargs)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if control.forward is not None:
            return control.forward(*args, **kwargs)
        if (
            has_torch_function(args) or ((kwargs or may_be_nested) and is_overridden(args, kwargs))
        ) and plan.site.is_overridable:
            return override(original, plan.site.name, cast, args, kwargs)
        if switch._looks_closer and switch.is_off():
            return complete(*args, **kwargs)
        if kwargs:
            return choose(args, kwargs)(*args, **kwargs)
        return choose(args, kwargs)(*args)

    may_be_nested = "A" in plan.site.parameters.kinds.values()
    choose = Judge(plan.site.op, plan.site.parameters, rules, low_dtype, follow).judge
    return named_after(original, wrapper, plan.site.name, control)
