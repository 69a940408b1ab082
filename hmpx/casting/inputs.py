"""The inputs of one call: which are cast, and to which dtype; the argument it writes to.

`cast_args` defines the result of every wrapper's casts. `casts_of` gives the same for most calls, faster. Pure
functions of a plan and arguments.
"""

from __future__ import annotations

import functools
import numbers
import operator
from collections.abc import Callable, Mapping, Sequence
from types import EllipsisType, GetSetDescriptorType, NoneType
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import has_torch_function

from ..compute import cast_finite, is_onnx_made, names_dtype
from ..ops import argument, parameter_named
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
    floating_in,
    is_floating,
    is_low,
    tensors_in,
    with_items,
)
from ..torch_internals import is_mapped, transforms
from ..torch_state import is_below_dispatcher
from .plan import CallPlan

_DENSE: Final = frozenset({torch.strided, torch.jagged})


# --- the arguments of a call ----------------------------------------------------------------------


def floating_inputs(plan: CallPlan, args: Args, kwargs: Kwargs) -> list[Tensor]:
    """Returns the floating and complex tensors among the inputs, in the parameters' order."""
    return floating_in([value for _, value in _named_inputs(plan, args, kwargs)])


def _named_inputs(plan: CallPlan, args: Args, kwargs: Kwargs) -> list[tuple[str, Any]]:
    """Returns the arguments that are inputs, and their names, in the parameters' order."""
    names, given = plan.site.parameters.names, zip(_names(plan, args), args, strict=False)
    inputs = [(name, value) for name, value in given if name not in plan.never_cast]
    if kwargs:
        order = {name: position for position, name in enumerate(names)}
        by_position = sorted(
            kwargs, key=lambda name: order.get(parameter_named(name, names), len(order))
        )
        inputs += [(name, kwargs[name]) for name in by_position if name not in plan.skipped]
    return inputs


def _names(plan: CallPlan, args: Args) -> tuple[str, ...]:
    """Returns the names of positional arguments, empty ones for those that the signature lacks."""
    names = plan.site.parameters.names
    return names + ("",) * (len(args) - len(names))


def counted(plan: CallPlan, inputs: list[Tensor]) -> list[Tensor]:
    """Returns ``inputs`` without 0-dim float64 tensors, if the kernel promotes.

    Alongside tensors with dimensions they act like Python's numbers, which are float64 too.
    """
    if not plan.facts.promotes or not any(t.dim() for t in inputs):
        return inputs
    return [t for t in inputs if t.dtype is not torch.float64 or t.dim()]


def given_out(plan: CallPlan, args: Args, kwargs: Kwargs) -> Any:
    return (
        argument("out", plan.site.parameters.names, args, kwargs)
        if plan.site.is_python
        else kwargs.get("out")
    )


def written(plan: CallPlan, args: Args, kwargs: Kwargs) -> Tensor | Sequence[Tensor] | None:
    """Returns the argument that the call writes to, or None.

    It is ``out=``, or the target by the plan or by ``inplace=True``. The first tensor represents those of ``out=``.
    """
    out = given_out(plan, args, kwargs)
    if out is not None:
        first = out[0] if isinstance(out, SEQUENCES) and out else out
        return first if isinstance(first, Tensor) else None
    target, names = plan.target, plan.site.parameters.names
    if target is None:
        if not (
            plan.has_inplace_flag and argument("inplace", plan.site.parameters.names, args, kwargs)
        ):
            return None
        target = names[0]
    # Without names, the function's signature is unknown.
    value = argument(target, names, args, kwargs) if names else next(iter(args), None)
    return value if isinstance(value, (Tensor, *SEQUENCES)) else None


def rounds_into_out(plan: CallPlan, args: Args, kwargs: Kwargs) -> bool:
    """Whether the call computes in fp32 and rounds its result into ``out=``."""
    if not plan.is_fp32 or given_out(plan, args, kwargs) is None or names_dtype(args, kwargs):
        return False
    target = written(plan, args, kwargs)
    return isinstance(target, Tensor) and target.device.type in plan.device_types


def is_emulated(plan: CallPlan, args: Args, kwargs: Kwargs) -> bool:
    """Whether the inputs are rounded to a number format.

    Tensors that a call writes to are not rounded, and formats round only dense tensors.
    """
    if (kwargs or plan.may_write) and written(plan, args, kwargs) is not None:
        return False
    return plan.emulation is not None and not any(
        (tensor.is_nested or tensor.layout not in _DENSE) and is_floating(tensor)
        for tensor in tensors_in((*args, *kwargs.values()))
    )


def is_on_device(plan: CallPlan, args: Args, kwargs: Kwargs) -> bool:
    """Whether any tensor argument is on a device whose tensors are cast."""
    found = tensors_in((*args, *kwargs.values()))
    return any(tensor.device.type in plan.device_types for tensor in found)


# --- the target dtype ------------------------------------------------------------------------


def target_dtype(plan: CallPlan, args: Args, kwargs: Kwargs) -> torch.dtype | None:
    """Returns the dtype to which the eligible inputs are cast; None to leave the call alone."""
    if is_below_dispatcher():
        return None
    facts, policy = plan.facts, plan.decision.cast_policy
    target = written(plan, args, kwargs) if kwargs or plan.may_write else None
    # The tensor written to keeps its dtype for any policy.
    if target is not None and not rounds_into_out(plan, args, kwargs):
        if facts.promotes or not isinstance(target, Tensor):  # lists of tensors have many dtypes
            return None
        return target.dtype if target.dtype in CAST else None
    inputs = floating_inputs(plan, args, kwargs)
    if not inputs or policy is CastPolicy.PASS:
        return None
    sparse = next((t.dtype for t in inputs if t.layout in SPARSE), None)
    if sparse is not None:  # torch's sparse products reject mixed dtypes
        are_eligible = all(t.dtype in ELIGIBLE for t in inputs)
        return sparse if are_eligible and not facts.promotes else None
    if policy in {CastPolicy.FIRST, CastPolicy.WIDEST}:  # inputs of any dtype decide
        if policy is CastPolicy.WIDEST and plan.widens_itself:
            return None
        dtype = inputs[0].dtype if policy is CastPolicy.FIRST else plan.widest(inputs)
        return dtype if dtype in CAST else None
    if facts.promotes:
        inputs = counted(plan, inputs)
    if any(t.dtype not in ELIGIBLE or t.layout not in _DENSE for t in inputs):
        return None  # float64, complex or sparse: casting the others would mix dtypes
    if policy is CastPolicy.FOLLOW:
        first = inputs[0].dtype
        are_low = is_low(first) and all(t.dtype is first for t in inputs)
        return first if are_low else torch.float32
    if facts.never_narrows and is_low(argument("dtype", plan.site.parameters.names, args, kwargs)):
        return None
    decided = plan.decision.dtype
    if plan.emulation is not None or not isinstance(decided, torch.dtype):
        return torch.float32
    return decided if decided in CAST and not plan.is_widened(inputs) else None


# --- the casts ---------------------------------------------------------------------------------


def cast_args(plan: CallPlan, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Returns ``args`` and ``kwargs`` cast by ``plan``; modifies neither."""
    if plan.emulation is not None:
        args, kwargs, _ = emulated_args(plan, args, kwargs)
        return args, kwargs
    if args:
        same = getattr(args[0], "dtype", None) if plan.is_relative else plan.decision.dtype
        if is_settled((*args, *kwargs.values()), same):
            return args, kwargs
    dtype = target_dtype(plan, args, kwargs)
    return (args, kwargs) if dtype is None else _cast_to(dtype, plan, args, kwargs)


def emulated_args(plan: CallPlan, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs, bool]:
    """Returns the arguments rounded for an op in a number format, and whether the call is emulated."""
    emulation, given = plan.emulation, (*args, *kwargs.values())
    assert emulation is not None
    args, kwargs = emulation.decoded(args, kwargs)
    dtype = target_dtype(plan, args, kwargs)
    if dtype is None:
        return args, kwargs, False
    if not is_emulated(plan, args, kwargs):
        return *_cast_to(dtype, plan, args, kwargs), False
    emulation.check()
    # Values decoded from codes are exact in the format.
    decoded = (*args, *kwargs.values())
    exact = [value for value, code in zip(decoded, given, strict=True) if value is not code]
    cast, norm_parameters = CAST[dtype], plan.facts.norm_parameters

    def round_input(name: str, tensor: Tensor) -> Tensor:
        if not _is_eligible(tensor, plan, args, kwargs):
            return tensor
        # Parameters of norms stay: kernels accept them, since all inputs have one dtype.
        if name in norm_parameters or any(tensor is value for value in exact):
            return cast(tensor)
        return emulation.rounded_input(name, tensor, cast(tensor))

    rounded, named = _with_inputs(round_input, plan, args, kwargs)
    return rounded, named, is_on_device(plan, args, kwargs)


def _cast_to(dtype: torch.dtype, plan: CallPlan, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    cast = CAST[dtype]
    if "sparse" in plan.skipped and argument("sparse", plan.site.parameters.names, args, kwargs):
        cast = cast_any_layout(dtype)
    masks = plan.masks if dtype in LOW_DTYPES and not _is_copy(plan, args) else ()
    is_cast = _cast_by(dtype, plan, args, kwargs)

    def convert(name: str, tensor: Tensor) -> Tensor:
        if not is_cast(name, tensor):
            return tensor
        return cast_finite(dtype, tensor) if name in masks else cast(tensor)

    def convert_weights(name: str, values: Sequence[Any]) -> list[Tensor] | None:
        if all([isinstance(value, Tensor) and is_cast(name, value) for value in values]):  # noqa: C419
            return cast_as_one(values, dtype)
        return None

    return _with_inputs(
        convert, plan, args, kwargs, convert_weights if plan.facts.kind == "rnn" else None
    )


def _is_copy(plan: CallPlan, args: Args) -> bool:
    """Whether torch itself casts what a call stores, as by ``x[1:3] = y``: then the program asked for that cast."""
    if plan.site.op != "setitem" or len(args) < 2:
        return False
    return all(map(_is_single, args[1] if isinstance(args[1], tuple) else (args[1],)))


def _is_single(index: Any) -> bool:
    """Whether an index is a number or a range; torch casts nothing that it stores by lists and tensors of indices."""
    if isinstance(index, Tensor):
        return not index.dim() and index.dtype is not torch.bool
    return isinstance(index, (numbers.Integral, slice, NoneType, EllipsisType))


def dtypes_after_casts(
    plan: CallPlan, args: Args, kwargs: Kwargs
) -> list[tuple[Tensor, torch.dtype]]:
    """Returns the `floating_inputs`, each with the dtype in which it reaches torch's function; casts nothing."""
    dtype = target_dtype(plan, args, kwargs)
    if dtype is None:
        return [(tensor, tensor.dtype) for tensor in floating_inputs(plan, args, kwargs)]
    is_cast = _cast_by(dtype, plan, args, kwargs)
    return [
        (tensor, dtype if is_cast(name, tensor) else tensor.dtype)
        for name, value in _named_inputs(plan, args, kwargs)
        for tensor in floating_in([value])
    ]


def _cast_by(
    dtype: torch.dtype, plan: CallPlan, args: Args, kwargs: Kwargs
) -> Callable[[str, Tensor], bool]:
    """Returns a predicate of a tensor in an input of that name: whether the call casts it to ``dtype``."""
    stays_fp32 = _left_in_fp32(dtype, plan, args, kwargs)

    def is_cast(name: str, tensor: Tensor) -> bool:
        if tensor.dtype is dtype or not _is_eligible(tensor, plan, args, kwargs):
            return False
        return stays_fp32 is None or not stays_fp32(name, tensor)

    return is_cast


def _is_eligible(tensor: Tensor, plan: CallPlan, args: Args, kwargs: Kwargs) -> bool:
    """Whether an input of the call may be cast; CPU scalars may go with tensors on any device."""
    if tensor.dtype not in ELIGIBLE or tensor.layout not in _DENSE:
        return False
    device_type = tensor.device.type
    return device_type in plan.device_types or (
        device_type == "cpu" and tensor.dim() == 0 and is_on_device(plan, args, kwargs)
    )


def _left_in_fp32(
    dtype: torch.dtype, plan: CallPlan, args: Args, kwargs: Kwargs
) -> Callable[[str, Tensor], bool] | None:
    """Returns the predicate whether a tensor stays in fp32 alongside inputs of ``dtype``; None if none does.

    Where kernels accept that, a norm's parameters and attention's mask do; the kernels for nested tensors and the
    formulas of torch.func.vmap don't accept it. And what vmap adds to a matrix product: like torch.autocast it
    promotes.
    """
    facts, names = plan.facts, plan.site.parameters.names
    kept, device_types = facts.norm_parameters or plan.masks, facts.mixed_device_types
    if transforms() is not None:
        is_added = any(map(is_mapped, tensors_in((*args, *kwargs.values()))))
        kept, device_types = facts.addends if is_added else frozenset(), plan.device_types
    elif plan.masks and is_onnx_made():  # ONNX rejects mixed dtypes
        return None
    elif kept:
        first = args[0] if args else kwargs.get(names[0])
        if isinstance(first, Tensor) and first.is_nested:
            return None
    if not kept or dtype not in LOW_DTYPES:
        return None

    def stays_fp32(name: str, tensor: Tensor) -> bool:
        is_kept = tensor.dtype is torch.float32 and parameter_named(name, names) in kept
        return is_kept and tensor.device.type in device_types

    return stays_fp32


#: Converts the tensors of an argument of that name together, or returns None.
Together = Callable[[str, Sequence[Any]], "list[Tensor] | None"]


def _with_inputs(
    convert: Callable[[str, Tensor], Tensor],
    plan: CallPlan,
    args: Args,
    kwargs: Kwargs,
    together: Together | None = None,
) -> tuple[Args, Kwargs]:
    new = functools.partial(_with_tensors, convert, together)
    new_args = tuple(
        value if name in plan.never_cast else new(name, value)
        for name, value in zip(_names(plan, args), args, strict=False)
    )
    return new_args, {
        name: value if name in plan.skipped else new(name, value) for name, value in kwargs.items()
    }


def _with_tensors(
    convert: Callable[[str, Tensor], Tensor], together: Together | None, name: str, value: Any
) -> Any:
    """Returns the argument ``value``, called ``name``, with its tensors converted.

    Not nested: a nested function that calls itself would keep a call's tensors alive until garbage
    collection.
    """
    if isinstance(value, Tensor):
        return convert(name, value)
    if not isinstance(value, SEQUENCES):
        return value
    new = None if together is None else together(name, value)
    new = new or [_with_tensors(convert, together, name, item) for item in value]
    if all(a is b for a, b in zip(new, value, strict=True)):
        return value
    return with_items(value, new)


# --- fast casts: plain tensors, given by position, to one fixed dtype ----------------------------


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
    convert, is_here, strided = CAST[dtype], _device_test(plan.device_types), torch.strided
    other_dtypes, takes_numbers = ELIGIBLE - {dtype}, "cpu" not in plan.device_types
    refuses_nested = bool(plan.fp32_positions)
    convert_mask = functools.partial(cast_finite, dtype) if dtype in LOW_DTYPES else convert

    def cast(value: Any, convert: Callable[[Tensor], Tensor] = convert) -> Any:
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

    def cast_mask(value: Any) -> Any:
        if value is None or (may_stay(value) and transforms() is None and not is_onnx_made()):
            return value
        return cast(value, convert_mask)

    def may_stay(value: Any) -> bool:
        is_fp32 = type(value) in PLAIN_TENSORS and value.dtype is torch.float32
        return is_fp32 and value.device.type in plan.facts.mixed_device_types

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
        else cast_mask
        if parameters.names[position] in plan.masks
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


def usual_caster(plan: CallPlan) -> Callable[[Args, Kwargs], Args | None] | None:
    """Returns a fast function that casts the arguments of most calls, see `casts_of`; None if there is none.

    It returns the cast arguments, ``args`` itself for a call that is left alone, or None if a closer look is needed.
    """
    casts, count, promotes = [*casts_of(plan).items()], plan.position_count, plan.facts.promotes
    if not casts:
        return None
    widens = widener(plan)
    has_keyword_tensors = plan.site.parameters.has_keyword_tensors
    has_addend = bool(plan.facts.addends)

    def cast_usual(args: Args, kwargs: Kwargs) -> Args | None:
        if widens is not None and widens(*args[:count]):
            return args
        if kwargs and (len(args) < count or has_keyword_tensors or "out" in kwargs):
            return None
        if is_below_dispatcher():
            return args
        if has_addend and transforms() is not None:
            return None
        found = list(args)
        for position, cast in casts:
            if position < len(args):
                found[position] = new = cast(args[position])
                if new is unusual:
                    # Kernels that promote accept float64 scalars, tensors without dimensions, with cast inputs.
                    is_tensor = type(args[position]) in PLAIN_TENSORS
                    is_alone = is_tensor and args[position].dtype not in ELIGIBLE
                    return args if is_alone and not promotes else None
        return tuple(found)

    return cast_usual


@functools.cache
def _device_test(device_types: frozenset[str]) -> Callable[[Tensor], bool]:
    """Returns a predicate for tensors on these device types; ``device.type`` takes much longer."""
    name = f"is_{next(iter(device_types))}" if len(device_types) == 1 else ""
    if isinstance(getattr(Tensor, name, None), GetSetDescriptorType):
        return operator.attrgetter(name)
    indices = [None, *range(128)]  # all that torch gives to devices
    devices = frozenset([torch.device(each, index) for each in device_types for index in indices])
    return lambda tensor: tensor.device in devices


def are_plain(kwargs: Kwargs) -> bool:
    """Whether these arguments don't override the call, and none of them is written to."""
    return "out" not in kwargs and not has_torch_function(tuple(kwargs.values()))


def placer(plan: CallPlan) -> Callable[[Args, Kwargs], tuple[Args, Kwargs]] | None:
    """Returns a function that moves tensors given by name to their positions; None if no tensor is optional."""
    names, fillable = plan.site.parameters.names, plan.fillable
    if not fillable or "A" in plan.cast_kinds.values():
        return None

    def place(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        if not are_plain(kwargs):  # an override gets the original arguments
            return args, kwargs
        placed, left = list(args), dict(kwargs)
        for position in range(len(args), fillable.stop):
            if names[position] not in left and position not in fillable:
                break
            placed.append(left.pop(names[position], None))
        return tuple(placed), left

    return place
