"""Casting the inputs of one call: the rule in full, as pure functions of a plan and arguments.

`cast_args` is what every wrapper does, however it does it. Knows neither lists nor how wrappers are
made and get into torch.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.overrides import has_torch_function

from ..compute import SLOW_KINDS
from ..policy import CastPolicy
from ..tensors import (
    CAST,
    ELIGIBLE,
    LOW_DTYPES,
    NUMBERS,
    PLAIN_TENSORS,
    SEQUENCES,
    SPARSE,
    Args,
    Kwargs,
    cast_any_layout,
    cast_as_one,
    is_floating,
    is_low,
    leaves,
    short_name,
    with_items,
)
from ..torch_internals import transforms
from ..torch_state import is_below_dispatcher
from . import cache
from .inputs import (
    DENSE,
    argument,
    counted,
    floating_inputs,
    given_inputs,
    given_out,
    is_eligible,
    is_eligible_tensor,
    is_emulated,
    is_number_from_cpu,
    is_on_device,
    padded_names,
    rounds_into_out,
    widest,
    written,
)
from .plan import CallPlan

if TYPE_CHECKING:
    from ..compute import Emulation


def cast_args(plan: CallPlan, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Returns the arguments that ``plan`` makes of ``args`` and ``kwargs``; changes neither."""
    given = args, kwargs
    if plan.emulation is not None:
        args, kwargs = plan.emulation.decoded(args, kwargs)
    elif args:
        same = getattr(args[0], "dtype", None) if plan.is_relative else plan.decision.dtype
        if is_settled((*args, *kwargs.values()), same):
            return args, kwargs
    dtype = target_dtype(plan, args, kwargs)
    if dtype is None:
        return args, kwargs
    if plan.emulation is None or not is_emulated(plan, args, kwargs):
        return _cast_to(dtype, plan, args, kwargs)
    exact = _decoded_values(given, (args, kwargs))
    return _rounded_inputs(plan.emulation, dtype, plan, args, kwargs, exact)


class unusual:  # noqa: N801  # a value
    """Stands for a value that takes a closer look than `casts_of` give it."""


def casts_of(plan: CallPlan) -> Mapping[int, Callable[[Any], Any]]:
    """Returns how to cast what most calls have at each position: plain tensors, to one dtype; empty if that varies.

    The functions return `unusual` for what they don't cast.
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
            # Numbers are cast with the tensors alongside, wherever they are.
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
    """Returns whether torch computes in fp32 by itself, asked with a call's arguments; None if it never does."""
    if not plan.widens_to_fp32:
        return None
    fp32 = torch.float32

    def widens(*values: Any) -> bool:
        for value in values:
            if type(value) in PLAIN_TENSORS and value.dtype is fp32 and value.dim():
                return True
        return False

    return widens


#: What `usual_caster` returns for a call that is left alone.
ALONE: Final[Args] = ()


def usual_caster(plan: CallPlan) -> Callable[[Args, Kwargs], Args | None] | None:
    """Returns a quick way to cast the arguments of most calls, see `casts_of`; None if the plan has none.

    It returns the arguments, `ALONE`, or None where a closer look is needed.
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
                    # What promotes takes float64 numbers, tensors without dimensions, beside what is cast.
                    is_tensor = type(args[position]) in PLAIN_TENSORS
                    is_alone = is_tensor and args[position].dtype not in ELIGIBLE
                    return ALONE if is_alone and not promotes else None
        return tuple(found)

    return cast_usual


def _device_test(device_types: frozenset[str]) -> Callable[[Tensor], bool]:
    """Returns the test whether a tensor is on one of these; ``device.type`` takes ten times as long."""
    name = f"is_{next(iter(device_types))}" if len(device_types) == 1 else ""
    if hasattr(Tensor, name):
        return operator.attrgetter(name)
    return lambda tensor: tensor.device.type in device_types


def placer(plan: CallPlan) -> Callable[[Args, Kwargs], tuple[Args, Kwargs]] | None:
    """Returns a function that puts optional tensors, given by name, into their places; None if there are none."""
    names, positions = plan.site.parameters.names, plan.fillable
    if not positions or "A" in plan.cast_kinds.values():
        return None

    def place(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        given = len(args)
        if given not in positions or "out" in kwargs:
            return args, kwargs
        if has_torch_function(tuple(kwargs.values())):  # it sees the call as it was given
            return args, kwargs
        placed = names[given : positions.stop]
        left = dict(kwargs)
        return (*args, *[left.pop(name, None) for name in placed]), left

    return place


def is_settled(value: Any, dtype: object) -> bool:
    """Whether no tensor in ``value``, a tensor or a list of them, would be cast to ``dtype``.

    False, too, where that takes a closer look.
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
        # Products of two tensors are new tensors; that of a list may be the one tensor in it.
        is_product = plan.facts.kind in SLOW_KINDS and "A" not in plan.cast_kinds.values()
        is_only_read = is_product and not (plan.site.is_python or plan.may_write)
        return functools.partial(cache.cast, dtype, is_only_read)
    return CAST[dtype]


def target_dtype(plan: CallPlan, args: Args, kwargs: Kwargs) -> torch.dtype | None:
    """Returns the dtype that the eligible inputs are cast to; None to leave the call alone."""
    if is_below_dispatcher():
        return None
    target = written(plan, args, kwargs)
    # The tensor written to keeps its dtype, whatever the lists say.
    if target is not None and not rounds_into_out(plan, args, kwargs):
        if plan.facts.promotes or not isinstance(
            target, Tensor
        ):  # lists of tensors have many dtypes
            return None
        return target.dtype if target.dtype in CAST else None
    inputs = floating_inputs(plan, args, kwargs)
    if not inputs:
        return None
    cast_policy = plan.decision.cast_policy
    if cast_policy is CastPolicy.PASS:
        return None
    sparse = next((t.dtype for t in inputs if t.layout in SPARSE), None)
    if sparse is not None:  # torch's sparse products take no other dtype beside it
        are_eligible = all(t.dtype in ELIGIBLE for t in inputs)
        return sparse if are_eligible and not plan.facts.promotes else None
    if cast_policy is CastPolicy.FIRST:
        dtype = inputs[0].dtype
    elif cast_policy is CastPolicy.WIDEST:
        if plan.widens_itself:
            return None
        dtype = widest(plan, inputs)
    else:
        inputs = counted(plan, inputs)
        if any(t.dtype not in ELIGIBLE or t.layout not in DENSE for t in inputs):
            return None  # float64, complex or sparse: casting the others would mix dtypes
        if cast_policy is CastPolicy.FOLLOW:
            first = inputs[0].dtype
            are_low = is_low(first) and all(t.dtype is first for t in inputs)
            return first if are_low else torch.float32
        if plan.facts.never_narrows and is_low(argument(plan, "dtype", args, kwargs)):
            return None
        decided = plan.decision.dtype
        if plan.emulation is not None or not isinstance(decided, torch.dtype):
            return torch.float32
        dtype = decided
        if is_widened(plan, inputs):
            return None
    return dtype if dtype in CAST else None


def is_widened(plan: CallPlan, inputs: Iterable[Tensor]) -> bool:
    """Whether torch computes a call on these floating inputs in fp32 by itself, as the plan says."""
    fp32 = torch.float32
    return plan.widens_to_fp32 and any(t.dtype is fp32 and t.dim() > 0 for t in inputs)


@dataclass(frozen=True, slots=True)
class _Cast:
    """Stands for a tensor that has been cast."""

    dtype: torch.dtype


def cast_dtypes(plan: CallPlan, args: Args, kwargs: Kwargs) -> list[torch.dtype]:
    """Returns the dtypes in which `floating_inputs` reach torch's function; casts nothing."""
    dtype = target_dtype(plan, args, kwargs)
    if dtype is not None:
        mixes = dtype in LOW_DTYPES and _takes_mixed_parameters(plan, args, kwargs)

        def cast(name: str, tensor: Tensor) -> Any:
            return tensor if tensor.dtype is dtype else _Cast(dtype)

        args, kwargs = _with_inputs(cast, plan, args, kwargs, mixes)
    return [
        value.dtype
        for value in leaves(given_inputs(plan, args, kwargs))
        if isinstance(value, _Cast) or (isinstance(value, Tensor) and is_floating(value))
    ]


def _cast_to(dtype: torch.dtype, plan: CallPlan, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    cast = converter(plan, dtype)
    if "sparse" in plan.skipped and argument(plan, "sparse", args, kwargs):
        cast = cast_any_layout(dtype)

    def convert(name: str, tensor: Tensor) -> Tensor:
        return tensor if tensor.dtype is dtype else cast(tensor)

    def convert_list(tensors: Sequence[Any]) -> list[Tensor] | None:
        if not all([is_eligible_tensor(t, plan) and t.dtype is not dtype for t in tensors]):  # noqa: C419
            return None
        return cast_as_one(tensors, dtype)

    mixes = dtype in LOW_DTYPES and _takes_mixed_parameters(plan, args, kwargs)
    may_be_chunk = plan.facts.kind == "rnn"  # the weights
    return _with_inputs(
        convert, plan, args, kwargs, mixes, convert_list if may_be_chunk else _no_chunk
    )


def _decoded_values(given: tuple[Args, Kwargs], decoded: tuple[Args, Kwargs]) -> list[Any]:
    """Returns the arguments that codes were decoded to: they are values of the format already.

    Args:
        given: The arguments of a call.
        decoded: The same, with values in place of codes.
    """
    if decoded[0] is given[0]:
        return []
    old = (*given[0], *given[1].values())
    new = (*decoded[0], *decoded[1].values())
    return [value for value, code in zip(new, old, strict=True) if value is not code]


def _rounded_inputs(  # noqa: PLR0917  # all there is to one call
    emulation: Emulation,
    dtype: torch.dtype,
    plan: CallPlan,
    args: Args,
    kwargs: Kwargs,
    exact: list[Any],
) -> tuple[Args, Kwargs]:
    """Returns the arguments as an op in number formats takes them; those in ``exact`` need no rounding."""
    cast = CAST[dtype]

    def convert(name: str, tensor: Tensor) -> Tensor:
        # Parameters of norms stay as they are, which no kernel minds: all inputs are of one dtype.
        if name in plan.facts.norm_parameters:
            return cast(tensor)
        if exact and any(tensor is value for value in exact):
            return cast(tensor)
        return emulation.rounded_input(name, tensor, cast(tensor))

    return _with_inputs(convert, plan, args, kwargs, mixes=False)


def _no_chunk(tensors: Sequence[Any]) -> None:
    return None


def _with_inputs(  # noqa: PLR0917  # all there is to one call
    convert: Callable[[str, Tensor], Any],
    plan: CallPlan,
    args: Args,
    kwargs: Kwargs,
    mixes: bool,
    convert_list: Callable[[Sequence[Any]], list[Tensor] | None] = _no_chunk,
) -> tuple[Args, Kwargs]:
    """Returns the arguments with the eligible inputs converted.

    With ``mixes``, a norm's parameters in fp32 stay as they are. Lists of inputs that ``convert_list``
    returns None for are converted one by one.
    """

    def converted(name: str, tensor: Tensor) -> Any:
        if not is_eligible(tensor, plan.device_types) and not (
            is_number_from_cpu(tensor) and is_on_device(plan, args, kwargs)
        ):
            return tensor
        keeps_fp32 = (
            mixes
            and name in plan.facts.norm_parameters
            and tensor.dtype is torch.float32
            and tensor.device.type in plan.facts.mixed_device_types
        )
        return tensor if keeps_fp32 else convert(name, tensor)

    names = padded_names(plan.site.parameters.names, len(args))
    new_args = tuple(
        value if name in plan.never_cast else _with_tensors(name, value, converted, convert_list)
        for name, value in zip(names, args, strict=False)
    )
    new_kwargs = {
        name: value if name in plan.skipped else _with_tensors(name, value, converted, convert_list)
        for name, value in kwargs.items()
    }
    return new_args, new_kwargs


def _with_tensors(
    name: str,
    value: Any,
    convert: Callable[[str, Tensor], Any],
    convert_list: Callable[[Sequence[Any]], list[Tensor] | None],
) -> Any:
    """Returns the argument ``value``, called ``name``, with its tensors converted.

    A function of its own: a nested one that calls itself would keep a call's tensors until the garbage
    is collected.
    """
    if isinstance(value, Tensor):
        return convert(name, value)
    if isinstance(value, SEQUENCES):
        new = convert_list(value) or [
            _with_tensors(name, item, convert, convert_list) for item in value
        ]
        if all(a is b for a, b in zip(new, value, strict=True)):
            return value
        return with_items(value, new)
    return value


def _takes_mixed_parameters(plan: CallPlan, args: Args, kwargs: Kwargs) -> bool:
    """Whether a norm's weight and bias may stay fp32 in this call, if its device type takes that.

    Neither the kernels for nested tensors take it, nor the formulas of torch.func.vmap.
    """
    if not plan.facts.norm_parameters:
        return False
    first = args[0] if args else kwargs.get(plan.site.parameters.names[0])
    return not (isinstance(first, Tensor) and first.is_nested) and transforms() is None


#: What stands for a `CastPolicy` where the argument that a call writes to decides.
TARGET: Final = "TARGET"


def decided_by(plan: CallPlan, args: Args, kwargs: Kwargs) -> tuple[str, str]:
    """Returns the deciding `CastPolicy` of a call by name, or `TARGET`, and the reason: for the log."""
    is_target = written(plan, args, kwargs) is not None
    if is_target and not rounds_into_out(plan, args, kwargs):
        out = given_out(plan, args, kwargs)
        return TARGET, "in-place rule" if out is None else "out= rule"
    cast_policy = plan.decision.cast_policy
    for tensor in counted(plan, floating_inputs(plan, args, kwargs)):
        if tensor.layout in SPARSE:
            return CastPolicy.FIRST.name, "its sparse input"
        if plan.emulation is not None and tensor.is_nested:
            return CastPolicy.FP32.name, "its nested input"
        if cast_policy in _ABSOLUTE and tensor.dtype not in ELIGIBLE:
            return CastPolicy.PASS.name, f"its {short_name(tensor.dtype)} input"
    return cast_policy.name, plan.decision.reason


#: Policies that leave alone a call with an input that is never cast.
_ABSOLUTE: Final = frozenset({CastPolicy.LOW, CastPolicy.FP32, CastPolicy.FOLLOW})
