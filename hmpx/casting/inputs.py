"""The inputs of a call: which of its arguments are cast, which are written to, and where they are."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from ..compute import names_dtype
from ..ops import parameter_named
from ..tensors import ELIGIBLE, SEQUENCES, Args, Kwargs, floating_in, is_floating, tensors_in
from .plan import CallPlan

DENSE: Final = frozenset({torch.strided, torch.jagged})

#: Ops that give 0-dim tensors a dimension and then join them with the others.
_JOINING: Final = frozenset({"column_stack", "dstack", "hstack", "vstack"})


def counted(plan: CallPlan, inputs: list[Tensor]) -> list[Tensor]:
    """Returns ``inputs`` without float64 numbers in tensors of no dimension, where kernels promote.

    Beside tensors with dimensions these count as Python's numbers do, which are float64, too.
    """
    if not plan.facts.promotes or not any(t.dim() for t in inputs):
        return inputs
    return [t for t in inputs if t.dtype is not torch.float64 or t.dim()]


def floating_inputs(plan: CallPlan, args: Args, kwargs: Kwargs) -> list[Tensor]:
    """Returns the floating and complex tensors among the inputs, in the parameters' order."""
    return floating_in(given_inputs(plan, args, kwargs))


def given_inputs(plan: CallPlan, args: Args, kwargs: Kwargs) -> list[Any]:
    """Returns the arguments that are inputs, in the parameters' order."""
    names = plan.site.parameters.names
    padded = padded_names(names, len(args))
    inputs = [v for n, v in zip(padded, args, strict=False) if n not in plan.never_cast]
    if kwargs:
        order = {name: position for position, name in enumerate(names)}
        by_position = sorted(
            kwargs, key=lambda name: order.get(parameter_named(name, names), len(order))
        )
        inputs += [kwargs[name] for name in by_position if name not in plan.skipped]
    return inputs


def widest(plan: CallPlan, tensors: list[Tensor]) -> torch.dtype:
    """Returns the dtype that `torch.result_type` gives for these floating tensors together.

    0-dim tensors count if all are 0-dim, or if the op joins them with the others, as `torch.hstack` does.
    """
    are_joined = plan.site.op in _JOINING
    dtypes = [t.dtype for t in tensors if t.dim() or are_joined] or [t.dtype for t in tensors]
    return functools.reduce(torch.promote_types, dtypes)


def written(plan: CallPlan, args: Args, kwargs: Kwargs) -> Tensor | Sequence[Tensor] | None:
    """Returns the argument that the call writes to; None if there is none.

    That is ``out=``, or the argument that the plan or ``inplace=True`` makes the target. The first
    tensor stands for those of ``out=``.
    """
    out = given_out(plan, args, kwargs)
    if out is not None:
        first = out[0] if isinstance(out, SEQUENCES) and out else out
        return first if isinstance(first, Tensor) else None
    target = plan.target
    if target is None:
        if not (plan.has_inplace_flag and argument(plan, "inplace", args, kwargs)):
            return None
        target = plan.site.parameters.names[0]
    if plan.site.parameters.names:
        value = argument(plan, target, args, kwargs)
    else:  # nothing is known of the function's signature
        value = args[0] if args else None
    return value if isinstance(value, (Tensor, list, tuple)) else None


def given_out(plan: CallPlan, args: Args, kwargs: Kwargs) -> Any:
    """Returns the call's ``out=``; None if there is none."""
    return argument(plan, "out", args, kwargs) if plan.site.is_python else kwargs.get("out")


def rounds_into_out(plan: CallPlan, args: Args, kwargs: Kwargs) -> bool:
    """Whether the call computes in fp32, and its result is rounded into ``out=``."""
    if not plan.is_fp32 or given_out(plan, args, kwargs) is None or names_dtype(args, kwargs):
        return False
    target = written(plan, args, kwargs)
    return isinstance(target, Tensor) and target.device.type in plan.device_types


def is_emulated(plan: CallPlan, args: Args, kwargs: Kwargs) -> bool:
    """Whether what is cast is rounded to a number format, too.

    What a call writes to keeps the type of its values, and formats round dense tensors only.
    """
    if plan.emulation is None or written(plan, args, kwargs) is not None:
        return False
    return not (_has_apart(args) or (kwargs and _has_apart(kwargs.values())))


def _has_apart(values: Iterable[Any]) -> bool:
    """Whether any floating tensor among ``values`` is sparse or nested."""
    for value in values:
        if isinstance(value, Tensor):
            if (value.is_nested or value.layout not in DENSE) and is_floating(value):
                return True
        elif isinstance(value, SEQUENCES) and _has_apart(value):
            return True
    return False


def argument(plan: CallPlan, name: str, args: Args, kwargs: Kwargs) -> Any:
    """Returns the argument of that name, however it was given; None if it was not."""
    names = plan.site.parameters.names
    if name in kwargs or name not in names:
        return kwargs.get(name)
    position = names.index(name)
    if position < len(args):
        return args[position]
    return next((kwargs[each] for each in kwargs if parameter_named(each, names) == name), None)


def is_eligible(tensor: Tensor, device_types: frozenset[str]) -> bool:
    """Whether a tensor may be cast, on these device types."""
    return (
        tensor.dtype in ELIGIBLE and tensor.layout in DENSE and tensor.device.type in device_types
    )


def is_eligible_tensor(value: Any, plan: CallPlan) -> bool:
    """Whether ``value`` is a tensor that the plan may cast."""
    return isinstance(value, Tensor) and is_eligible(value, plan.device_types)


def is_number_from_cpu(tensor: Tensor) -> bool:
    """Whether kernels take a tensor that may be cast beside those on any device."""
    return (
        tensor.dtype in ELIGIBLE
        and tensor.layout in DENSE
        and tensor.device.type == "cpu"
        and tensor.dim() == 0
    )


def is_on_device(plan: CallPlan, args: Args, kwargs: Kwargs) -> bool:
    """Whether any tensor among the arguments is on a device whose tensors are cast."""
    found = tensors_in((*args, *kwargs.values()))
    return any(tensor.device.type in plan.device_types for tensor in found)


def padded_names(names: tuple[str, ...], length: int) -> tuple[str, ...]:
    """Returns ``names``, followed by empty ones up to ``length``."""
    return names if len(names) >= length else names + ("",) * (length - len(names))
