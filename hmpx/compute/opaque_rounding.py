"""Rounding by earlier steps in graphs of torch.compile: operators that look at the histories when they run.

What they note of a tensor is the same however often it is noted within a step, and so is what they return:
compilers may leave out, move and repeat them as they do with functions.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Final

import torch
from torch import Tensor

from ..number_formats import Fixed, Float, Rounder, Rounding, Scaled, Table, rounder
from ..torch_internals import own_operator, run_when_traced, set_kernel
from ..torch_state import without_casts

_ELEMENTS: Final = {family.__name__: family for family in (Float, Fixed, Table)}

#: Rounds by what was told: (rounding, key, whether it counts for later steps, tensor).
Round = Callable[[Rounding, str, bool, Tensor], Tensor]

_round: list[Round] = []
_end: list[Callable[[], None]] = []


def called_by(round_: Round, end_step: Callable[[], None]) -> None:
    """Has the operators call these functions."""
    _round[:], _end[:] = [round_], [end_step]


def _run(x: Tensor, rounding: str, key: str, records: bool) -> Tensor:
    with without_casts():
        found = _round[0](_rounding_of(rounding), key, records, x)
    return found.clone() if found is x else found


def _shaped(x: Tensor, rounding: str, key: str, records: bool) -> Tensor:
    return torch.empty_like(x)


def _run_end(x: Tensor) -> None:
    _end[0]()


def _nothing(x: Tensor) -> None:
    pass


def _defined(signature: str, function: Any, fake: Any, *tags: str) -> Any:
    operator = own_operator(signature, fake, "cudagraph_unsafe", *tags)
    set_kernel(operator, function, "CompositeExplicitAutograd")
    return operator


_SIGNATURE: Final = "(Tensor x, str rounding, str key, bool records) -> Tensor"
_ROUNDED: Final = _defined(f"rounded_delayed{_SIGNATURE}", _run, _shaped)
_ROUNDED_BY_CHANCE: Final = _defined(
    f"rounded_delayed_by_chance{_SIGNATURE}", _run, _shaped, "nondeterministic_seeded"
)
#: Says that it writes to a parameter that was updated, so that it runs, and after that.
_STEP_ENDED: Final = _defined("step_ended(Tensor(a!) x) -> ()", _run_end, _nothing)


def rounded(rounding: Rounding, key: str, records: bool, x: Tensor) -> Tensor:
    """Returns ``x`` rounded in a graph that is being traced."""
    by_chance = rounding.mode == "stochastic"
    operator = _ROUNDED_BY_CHANCE if by_chance else _ROUNDED
    found: Tensor = operator(x.detach(), _text_of(rounding), key, records)
    return found


def step_ended(parameter: Tensor) -> None:
    """Ends a training step in a graph that is being traced."""
    _STEP_ENDED(parameter.detach())


@run_when_traced
def _text_of(rounding: Rounding) -> str:
    """Returns what a graph holds of how to round."""
    format: Any = rounding.format
    given = {each.name: getattr(format, each.name) for each in fields(format)}
    element = given.pop("element")
    of_element = {each.name: getattr(element, each.name) for each in fields(element)}
    family = type(element).__name__
    return json.dumps([rounding.mode, rounding.overflow, family, of_element, given])


@functools.lru_cache(maxsize=1024)
def _rounding_of(text: str) -> Rounding:
    mode, overflow, family, of_element, given = json.loads(text)
    if family == Table.__name__:
        of_element["values"] = tuple(of_element["values"])
    element: Any = _ELEMENTS[family](**of_element)
    found: Rounder = rounder(Scaled(element=element, **given), mode, overflow)
    assert isinstance(found, Rounding)
    return found
