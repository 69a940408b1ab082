"""Fast casts for most calls: plain tensors, given by position, to one fixed dtype."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import has_torch_function

from ..compute import SLOW_KINDS
from ..tensors import CAST, ELIGIBLE, LOW_DTYPES, NUMBERS, PLAIN_TENSORS, SEQUENCES, Args, Kwargs
from ..torch_internals import transforms
from ..torch_state import is_below_dispatcher
from . import cache
from .plan import CallPlan


def is_settled(value: Any, dtype: object) -> bool:
    """Whether no tensor in ``value``, a tensor or a list of them, would be cast to ``dtype``.

    Also False if a closer look is needed.
    """
    if type(value) in PLAIN_TENSORS:
        found = value.dtype
        return found is dtype or not (found.is_floating_point or found.is_complex)
    if isinstance(value, SEQUENCES):
        return all([is_settled(item, dtype) for item in value])  # noqa: C419  # twice as fast
    return type(value) in NUMBERS or type(value) is str


def converter(plan: CallPlan, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Returns the function that casts one tensor to ``dtype``."""
    if plan.options.reuse_casts and dtype in LOW_DTYPES:
        # Products of two tensors are new tensors; that of a list may be the only tensor in it.
        is_product = plan.facts.kind in SLOW_KINDS and "A" not in plan.cast_kinds.values()
        is_only_read = is_product and not (plan.site.is_python or plan.may_write)
        return functools.partial(cache.cast, dtype, is_only_read)
    return CAST[dtype]


class unusual:  # noqa: N801  # a value
    """Stands for a value that `casts_of` does not handle."""


def casts_of(plan: CallPlan) -> Mapping[int, Callable[[Any], Any]]:
    """Returns position -> function that casts plain tensors to the call's one dtype; empty if that varies.

    The functions return `unusual` for values that they don't handle.
    """
    dtype, kinds, parameters = plan.decision.dtype, plan.cast_kinds, plan.site.parameters
    depends_on_call = (
        plan.site.is_python
        or plan.is_relative
        or plan.emulation is not None
        or "A" in kinds.values()
        or plan.fp32_positions is None
        or plan.facts.never_narrows
        or "sparse" in parameters.plain
        or any(parameters.kinds[position] == "N" for position in plan.statistic_positions)
    )
    if depends_on_call or not isinstance(dtype, torch.dtype):
        return {}
    convert, is_here, strided = (
        converter(plan, dtype),
        _device_test(plan.device_types),
        torch.strided,
    )
    other_dtypes, takes_numbers = ELIGIBLE - {dtype}, "cpu" not in plan.device_types
    refuses_nested = bool(plan.fp32_positions)

    def cast(value: Any) -> Any:
        if type(value) not in PLAIN_TENSORS:
            return value if value is None else unusual
        found = value.dtype
        if found in other_dtypes:
            if value.layout is not strided or (refuses_nested and value.is_nested):
                return unusual
            if is_here(value):
                return convert(value)
            # Scalars are cast with the other tensors, on any device.
            return unusual if takes_numbers and not value.dim() else value
        is_left = found is dtype or not (found.is_floating_point or found.is_complex)
        return value if is_left else unusual

    def cast_number(value: Any) -> Any:
        return value if type(value) in NUMBERS else cast(value)

    def keep_fp32(value: Any) -> Any:
        if type(value) in PLAIN_TENSORS and value.dtype is torch.float32 and transforms() is None:
            return value
        return cast(value)

    return {
        position: keep_fp32
        if position in (plan.fp32_positions or ())
        else cast_number
        if kind == "N"
        else cast
        for position, kind in sorted(kinds.items())
    }


def widener(plan: CallPlan) -> Callable[..., bool] | None:
    """Returns a predicate of a call's arguments: whether torch itself computes in fp32. None if it never does."""
    if not plan.widens_to_fp32:
        return None
    fp32 = torch.float32

    def widens(*values: Any) -> bool:
        for value in values:
            if type(value) in PLAIN_TENSORS and value.dtype is fp32 and value.dim():
                return True
        return False

    return widens


#: The result of `usual_caster` for a call that is left alone.
ALONE: Final[Args] = ()


def usual_caster(plan: CallPlan) -> Callable[[Args, Kwargs], Args | None] | None:
    """Returns a fast function that casts the arguments of most calls, see `casts_of`; None if there is none.

    It returns the arguments, `ALONE`, or None if a closer look is needed.
    """
    casts, count, promotes = [*casts_of(plan).items()], plan.position_count, plan.facts.promotes
    if not casts:
        return None
    widens = widener(plan)
    has_keyword_tensors = plan.site.parameters.has_keyword_tensors

    def cast_usual(args: Args, kwargs: Kwargs) -> Args | None:
        if widens is not None and widens(*args[:count]):
            return ALONE
        if kwargs and (len(args) < count or has_keyword_tensors or "out" in kwargs):
            return None
        if is_below_dispatcher():
            return ALONE
        found = list(args)
        for position, cast in casts:
            if position < len(args):
                found[position] = new = cast(args[position])
                if new is unusual:
                    # Kernels that promote accept float64 scalars, tensors without dimensions, with cast inputs.
                    is_tensor = type(args[position]) in PLAIN_TENSORS
                    is_alone = is_tensor and args[position].dtype not in ELIGIBLE
                    return ALONE if is_alone and not promotes else None
        return tuple(found)

    return cast_usual


def _device_test(device_types: frozenset[str]) -> Callable[[Tensor], bool]:
    """Returns a predicate for tensors on these device types; ``device.type`` takes much longer."""
    name = f"is_{next(iter(device_types))}" if len(device_types) == 1 else ""
    if hasattr(Tensor, name):
        return operator.attrgetter(name)
    return lambda tensor: tensor.device.type in device_types


def placer(plan: CallPlan) -> Callable[[Args, Kwargs], tuple[Args, Kwargs]] | None:
    """Returns a function that moves optional tensors given by name to their positions; None if there are none."""
    names, positions = plan.site.parameters.names, plan.fillable
    if not positions or "A" in plan.cast_kinds.values():
        return None

    def place(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        given = len(args)
        if given not in positions or "out" in kwargs:
            return args, kwargs
        if has_torch_function(tuple(kwargs.values())):  # it gets the original arguments
            return args, kwargs
        placed = names[given : positions.stop]
        left = dict(kwargs)
        return (*args, *[left.pop(name, None) for name in placed]), left

    return place
