"""Descriptions of calls without their place: dtypes before and after casting, and the reason.

They are made once for all calls of a site whose arguments are alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from ..compute import names_dtype
from ..ops import facts
from ..policy import CastPolicy
from ..tensors import (
    ELIGIBLE,
    PLAIN_TENSORS,
    SEQUENCES,
    SPARSE,
    Args,
    HasName,
    Kwargs,
    promoted,
    short_name,
    tensors_in,
)
from ..torch_internals import disable_modes, transforms
from .inputs import (
    counted,
    dtypes_after_casts,
    floating_inputs,
    given_out,
    is_emulated,
    is_on_device,
    rounds_into_out,
    target_dtype,
    written,
)
from .plan import CallPlan

#: The reason for calls whose casts the program has switched off.
SWITCHED_OFF: Final = "casts are switched off"

#: The reason for calls whose inputs torch.autocast has cast.
AUTOCAST: Final = "torch.autocast"

#: Used instead of a `CastPolicy`'s name if the argument that a call writes to decides.
TARGET: Final = "TARGET"

#: Policies in which inputs of any dtype decide, or none.
_OF_ANY_DTYPE: Final = frozenset({CastPolicy.FIRST, CastPolicy.WIDEST, CastPolicy.PASS})

#: The most kinds of calls cached per site.
_MOST_KINDS: Final = 256

#: Arguments of these classes are alike if they are equal. Floats always are: no dtype or shape depends on them.
_BY_VALUE: Final = frozenset(
    {bool, int, complex, str, bytes, type(None)}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format}
)


@dataclass(frozen=True, slots=True, eq=False)
class Description:
    """The description of a call; the fields are those of `OpCall`."""

    input_dtypes: tuple[torch.dtype, ...]
    cast_dtypes: tuple[torch.dtype, ...]
    device_type: str
    dtype: torch.dtype | HasName | None
    cast_policy: str
    reason: str


@dataclass(slots=True, eq=False)
class Alike:
    """Calls of a site whose arguments are alike: equal, but for the values of tensors and floats."""

    found: Description | None  # None without a floating input
    positions: tuple[int, ...] | None  # of the floating inputs; None if lists or keywords hold some
    cast_bytes: int  # written by the casts of a call
    calls: dict[Any, Any] = field(default_factory=dict)  # single ones, by their places and results


class Descriptions:
    """The descriptions of a call site's calls."""

    def __init__(self, plan: CallPlan) -> None:
        self._plan = plan
        self._known: dict[Any, Alike] = {}

    def find(self, args: Args, kwargs: Kwargs, *, is_on: bool) -> tuple[Alike, list[Tensor]]:
        plan, kinds = self._plan, list[Any]((is_on, torch.is_grad_enabled(), tuple(kwargs)))
        values = (*args, *kwargs.values()) if kwargs else args
        is_plain = plan.emulation is None and _note_kinds(values, kinds) and transforms() is None
        key, known = tuple(kinds) if is_plain else None, None
        if is_plain:
            try:
                known = self._known.get(key)
            except TypeError:  # sizes are symbols
                is_plain = False
        if known is not None and known.positions is not None:
            return known, [args[position] for position in known.positions]
        before = floating_inputs(plan, *decoded(plan, args, kwargs))
        if known is not None:
            return known, before
        if not before:
            known = Alike(None, (), 0)
        else:
            with disable_modes() if is_plain else contextlib.nullcontext():
                found = describe(plan, before, args, kwargs, is_on=is_on)
            cast_bytes = 0
            dtypes = zip(before, found.input_dtypes, found.cast_dtypes, strict=True)
            for tensor, given, dtype in dtypes:
                if dtype is not given and type(count := tensor.numel()) is int:  # else a symbol
                    cast_bytes += count * dtype.itemsize
            positions = [p for p, each in enumerate(args) if any([each is t for t in before])]  # noqa: C419
            are_all = [*map(id, before)] == [id(args[position]) for position in positions]
            known = Alike(found, tuple(positions) if are_all else None, cast_bytes)
        if is_plain:
            if len(self._known) >= _MOST_KINDS:
                self._known.clear()
            self._known[key] = known
        return known, before

    def as_run(self, found: Description, args: Args, kwargs: Kwargs, result: Any) -> Description:
        """Returns the description of a call made in a region of torch.autocast.

        Its result shows its compute dtype, unless the call names a dtype.
        """
        if self._plan.decision.is_named or self._plan.site.op in facts("converting"):
            return found
        dtype = next((each.dtype for each in tensors_in([result]) if each.dtype in ELIGIBLE), None)
        given = found.dtype or promoted(found.cast_dtypes)
        if dtype in (None, given) or given not in ELIGIBLE or names_dtype(args, kwargs):
            return found
        return _by_autocast(found, dtype)


@functools.lru_cache(maxsize=16 * _MOST_KINDS)
def _by_autocast(found: Description, dtype: torch.dtype | None) -> Description:
    policy = CastPolicy.PASS.name
    return dataclasses.replace(found, dtype=dtype, cast_policy=policy, reason=AUTOCAST)


def describe(
    plan: CallPlan, before: list[Tensor], args: Args, kwargs: Kwargs, *, is_on: bool
) -> Description:
    input_dtypes = tuple([tensor.dtype for tensor in before])
    device_type = before[0].device.type
    is_listed = plan.decision.cast_policy is not CastPolicy.PASS
    if not is_on or (is_listed and not is_on_device(plan, args, kwargs)):
        reason = f"tensors on {device_type} are not cast" if is_on else SWITCHED_OFF
        policy = CastPolicy.PASS.name
        return Description(input_dtypes, input_dtypes, device_type, None, policy, reason)
    after = [dtype for _, dtype in dtypes_after_casts(plan, *decoded(plan, args, kwargs))]
    dtype = _dtype(plan, before, args, kwargs)
    cast_policy, reason = _decided_by(plan, args, kwargs)
    is_rounded = dtype is not None and is_emulated(plan, args, kwargs)
    return Description(
        input_dtypes,
        tuple(after),
        device_type,
        plan.emulation.formats.result if plan.emulation and is_rounded else dtype,
        cast_policy,
        reason,
    )


def _decided_by(plan: CallPlan, args: Args, kwargs: Kwargs) -> tuple[str, str]:
    """Returns the name of a call's deciding `CastPolicy`, or `TARGET`, and the reason, for the log."""
    is_target = written(plan, args, kwargs) is not None
    if is_target and not rounds_into_out(plan, args, kwargs):
        out = given_out(plan, args, kwargs)
        return TARGET, "in-place rule" if out is None else "out= rule"
    policy = plan.decision.cast_policy
    for tensor in counted(plan, floating_inputs(plan, args, kwargs)):
        if tensor.layout in SPARSE:
            return CastPolicy.FIRST.name, "its sparse input"
        if plan.emulation is not None and tensor.is_nested:
            return CastPolicy.FP32.name, "its nested input"
        if policy not in _OF_ANY_DTYPE and tensor.dtype not in ELIGIBLE:
            return CastPolicy.PASS.name, f"its {short_name(tensor.dtype)} input"
    return policy.name, plan.decision.reason


def decoded(plan: CallPlan, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Returns the arguments with codes of number formats decoded to values."""
    return (args, kwargs) if plan.emulation is None else plan.emulation.decoded(args, kwargs)


def _dtype(plan: CallPlan, inputs: list[Tensor], args: Args, kwargs: Kwargs) -> torch.dtype | None:
    """Returns the dtype that a call runs in, also by torch's own casts; None if it is left alone."""
    if plan.facts.promotes and plan.target is not None:
        return inputs[0].dtype
    if plan.facts.promotes and plan.decision.cast_policy is CastPolicy.WIDEST:
        return plan.widest(inputs)
    if plan.is_widened(inputs):
        return torch.float32
    return target_dtype(plan, args, kwargs)


def _note_kinds(values: Any, kinds: list[Any]) -> bool:
    """Collects by what values are alike; False if unknown."""
    for value in values:
        cls = type(value)
        if cls in PLAIN_TENSORS:
            if value.is_nested:
                return False
            kinds += (
                cls,
                value.dtype,
                value.shape,
                value.device,
                value.layout,
                value.requires_grad,
            )
        elif cls in _BY_VALUE:
            kinds.append(value)
        elif isinstance(value, SEQUENCES):
            kinds += (cls, len(value))
            if not _note_kinds(value, kinds):
                return False
        elif cls is slice:
            kinds.append(cls)
            if not _note_kinds((value.start, value.stop, value.step), kinds):
                return False
        elif isinstance(value, Tensor):
            return False
        else:
            kinds.append(value if isinstance(value, enum.Enum) else cls)
    return True
