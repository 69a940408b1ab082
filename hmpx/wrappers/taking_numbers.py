"""Wrappers of functions that nothing casts, to which numbers are given that a low dtype does not hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import compute
from ..casting import Recipe
from ..compute import Callee
from ..ops import Numbers
from .overriding import is_overridden, override
from .retiring import Variables, cast_nothing, named_after


def callee_of(original: Callable[..., Any], recipe: Recipe) -> Callee:
    """Returns what computing a call of ``original`` otherwise requires to know."""
    site, facts = recipe.site, recipe.facts
    return Callee(
        site.op,
        original,
        site.parameters.names,
        frozenset(site.writes),
        site.is_python,
        facts.is_random,
        facts.promotes,
        facts.selects,
    )


def taking_numbers(callee: Callee, numbers: Numbers) -> Callable[..., Any]:
    """Returns the function of ``callee``, such that it takes numbers that its dtype does not hold."""
    complete = compute.completed_by_numbers(callee, numbers)
    return compute.taking_numbers(callee.function, numbers, callee.promotes, complete).function


def make_wrapper_taking_numbers(
    original: Callable[..., Any], recipe: Recipe
) -> Callable[..., Any] | None:
    """Returns the wrapper of a function that nothing casts and whose kernels are all there.

    None if it takes no numbers. Modes and tensor subclasses see the wrapper only where a number has to be
    looked at; torch hands other calls over to them.
    """
    numbers = recipe.site.numbers
    if numbers is None:
        return None
    callee = callee_of(original, recipe)
    inner = compute.completed_by_numbers(callee, numbers)

    def complete(*args: Any, **kwargs: Any) -> Any:
        if is_overridden(args, kwargs):
            return override(original, cast_nothing, made.function, args, kwargs)
        return inner(*args, **kwargs)

    made = compute.taking_numbers(original, numbers, callee.promotes, complete)
    variables = Variables(("original", "complete"), made.read, made.write)
    return named_after(original, made.function, recipe.site.name, variables)
