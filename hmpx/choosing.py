"""Wrappers of ops that rules decide: each call goes to the wrapper that its decision has.

Knows neither lists nor how wrappers get into torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import source, switch, wrappers
from .casting import Args, CallPlan, Kwargs, cast_args
from .decisions import Decision
from .rules import Judge

#: Makes the wrapper that follows a decision; None where no call would be cast.
Maker = Callable[[Decision], Callable[..., Any] | None]


def make_choosing_wrapper(
    original: Callable[..., Any], plan: CallPlan, judge: Judge, make: Maker
) -> Callable[..., Any]:
    """Returns a wrapper of ``original`` that asks ``judge`` how each call is cast.

    Args:
        original: torch's function.
        plan: That of the call site, with the decision of the lists.
        judge: Decides.
        make: Makes the wrappers that calls go to.
    """
    followed: dict[Decision, Callable[..., Any]] = {}

    def following(decision: Decision) -> Callable[..., Any]:
        found = followed.get(decision)
        if found is None:
            found = followed[decision] = make(decision) or original
        return found

    by_lists = following(plan.decision)

    def choose(args: Args, kwargs: Kwargs) -> Callable[..., Any]:
        decision = judge.decide(args, kwargs)
        return by_lists if decision is None else following(decision)

    def cast(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        return cast_args(plan, args, kwargs)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if source.is_overridden(args, kwargs):
            return wrappers.override(original, cast, wrapper, args, kwargs)
        if (switch._looks_closer and switch.is_off()) or switch.is_below_dispatcher():
            return original(*args, **kwargs)
        return choose(args, kwargs)(*args, **kwargs)

    return wrappers.named_after(original, wrapper, plan.site)
