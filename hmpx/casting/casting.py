"""Casting the inputs of one call: the rule in full, as pure functions of a plan and arguments.

`cast_args` is what every wrapper does, however it does it. Knows neither lists nor how wrappers are
made and get into torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from .. import compute
from ..compute import PRODUCTS, Emulation, Lacking, Lowering
from ..number_formats import Format
from ..ops import Parameters
from ..policy import INPUT, CastPolicy, Decision
from ..tensors import CAST, ELIGIBLE, cast_as_one, short_name, with_items
from ..torch_internals import transforms
from ..torch_state import is_below_dispatcher
from . import cache

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

LOW_DTYPES = frozenset({torch.bfloat16, torch.float16})
SEQUENCES = (list, tuple)
PLAIN_TENSORS = frozenset({Tensor, torch.nn.Parameter})
NUMBERS = frozenset({type(None), int, float, bool, complex})
_DENSE = frozenset({torch.strided, torch.jagged})
_SPARSE = frozenset(
    {
        torch.sparse_coo,
        torch.sparse_csr,
        torch.sparse_csc,
        torch.sparse_bsr,
        torch.sparse_bsc,
    }
)

#: Ops of these kinds are slow in low precision where the hardware lacks it, whichever list has
#: brought their inputs there.
_SLOW_KINDS = PRODUCTS | {"attention", "rnn"}

_RELATIVE = frozenset({CastPolicy.WIDEST, CastPolicy.FIRST, CastPolicy.FOLLOW})


@dataclass(frozen=True)
class CallPlan:
    """All that is known of a call site when its wrapper is made.

    Attributes:
        op: Op name.
        site: Dotted name of the slot.
        decision: The policy's decision for the op.
        parameters: What the callable's arguments are.
        device_types: Tensors elsewhere are not cast.
        in_place: The callable writes to its first argument.
        promotes: torch's kernel takes mixed dtypes and gives the widest, in place too.
        rounds_mixed: Its gradients don't: of these it computes in the narrower dtype.
        rounds_terms: Its second-order gradients don't: their terms are rounded.
        is_python: The callable is implemented in Python: nothing inside it is cast.
        writes: Names of the arguments that the callable writes to, ``out`` aside.
        statistics: Those of them that are running statistics of a norm.
        updates_if: Name of the argument that says whether these are updated; None if always.
        norm_parameters: Names of a norm's weight and bias, which stay fp32 beside a low-precision
            input on ``mixed_device_types``.
        never_narrows: The callable refuses a ``dtype=`` narrower than its input.
        kind: What the op's speed in low precision depends on: one of `capability.KINDS`.
        first_matrix: Of a product of two matrices, the position of the first.
        legalize: One of `legalize.MODES`.
        reuses_casts: A parameter is cast once within a call of the outermost module.
        is_overridable: Modes and tensor subclasses override the callable, as they do most of torch's.
            They don't another library's functions: those see what it calls in turn.
        is_view: The op computes nothing.
        casts_first: The op takes ``dtype=``, to which its kernel casts the input before computing.
        rounding: How values are rounded to a number format, and
        rounds_gradients: whether gradients are, too.
        lowerings: What computes the op in a number format, instead of torch.
        is_narrowed: The wrapper stands in for one of more device types, where casts of some are off.
        lacking: Where the op's kernels lack a low-precision dtype; None if nowhere.
        is_random: The op draws random numbers.
        target: Name of the argument that decides, since it is written to, what the others are cast
            to; None if there is none in every call.
        never_cast: Names of the arguments that are not even cast to what they are.
        may_write: Some call of it writes to such an argument.
        has_inplace_flag: The callable is a Python function with an ``inplace`` argument.
        statistic_positions: Positions of the running statistics.
        takes_fp32_statistics: Kernels take them in fp32 beside low-precision inputs.
        fp32_positions: Positions of norm parameters that stay fp32; None if that depends on the
            call's device.
        emulation: What computes the op in a number format, if that is its low precision.
        composes: The op computes in an ``accumulate_dtype``, or its outputs are cast.
        legalizes: The op may be computed in fp32 and rounded, where low precision is slow.
        cast_kinds: ``parameters.kinds`` without the buffers.
        skipped: Names whose values are no inputs to cast.
    """

    op: str
    site: str
    decision: Decision
    parameters: Parameters
    device_types: frozenset[str]
    in_place: bool = False
    promotes: bool = False
    rounds_mixed: bool = False
    rounds_terms: bool = False
    is_python: bool = False
    writes: tuple[str, ...] = ()
    statistics: tuple[str, ...] = ()
    updates_if: str | None = None
    norm_parameters: frozenset[str] = frozenset()
    mixed_device_types: frozenset[str] = frozenset()
    never_narrows: bool = False
    kind: str = "elementwise"
    first_matrix: int | None = None
    legalize: str = "never"
    reuses_casts: bool = False
    is_overridable: bool = True
    is_view: bool = False
    casts_first: bool = False
    rounding: str = "nearest"
    rounds_gradients: bool = False
    lowerings: Mapping[str | None, Lowering] = field(default_factory=dict)
    is_narrowed: bool = False
    lacking: Lacking | None = None
    is_random: bool = False

    target: str | None = field(init=False)
    never_cast: frozenset[str] = field(init=False)
    may_write: bool = field(init=False)
    has_inplace_flag: bool = field(init=False)
    emulation: Emulation | None = field(init=False)
    composes: bool = field(init=False)
    legalizes: bool = field(init=False)
    statistic_positions: tuple[int, ...] = field(init=False)
    takes_fp32_statistics: bool = field(init=False)
    fp32_positions: frozenset[int] | None = field(init=False)
    cast_kinds: Mapping[int, str] = field(init=False)
    skipped: frozenset[str] = field(init=False)

    @property
    def narrows(self) -> bool:
        """Whether casts may be off on some of the device types, and on elsewhere."""
        return len(self.device_types) > 1 and not self.is_narrowed

    @property
    def is_low(self) -> bool:
        """Whether the op runs in a low-precision dtype, whatever its inputs are."""
        return self.decision.dtype in LOW_DTYPES and self.target is None

    @property
    def is_relative(self) -> bool:
        """Whether the dtype that inputs are cast to depends on the call."""
        return self.target is not None or self.decision.dtype is None

    @property
    def widens_itself(self) -> bool:
        """Whether torch's kernel computes mixed dtypes, and their gradients, as if cast to the widest."""
        return self.promotes and not self.rounds_mixed

    @property
    def widens_to_fp32(self) -> bool:
        """Whether an fp32 input with dimensions is enough for torch to compute in fp32."""
        is_fp32 = self.decision.dtype is torch.float32 and self.emulation is None
        is_native = not (self.is_python or self.composes or self.rounds_terms or self.never_narrows)
        return self.widens_itself and is_fp32 and is_native and self.target is None

    @property
    def returns_input_dtype(self) -> bool:
        """Whether floating outputs are cast to the dtype that the first input was given in."""
        return self.composes and self.decision.returns_input_dtype

    @property
    def is_retried(self) -> bool:
        """Whether a call that fails on cast inputs is tried in fp32; numbers are drawn only once."""
        is_cast = self.is_low or self.decision.cast_policy in _RELATIVE
        return is_cast and self.target is None and not self.is_random

    @property
    def casts_late(self) -> bool:
        """Whether casts are left to what legalizes the op: it needs the inputs as they are given."""
        if self.returns_input_dtype:
            return True
        if not (self.is_low and self.legalizes):
            return False
        has_own_gradients = self.op in compute.DIMENSIONS and not self.reuses_casts
        return self.legalize == "fast" or has_own_gradients

    def __post_init__(self) -> None:
        """Works out what follows from the rest, here and not in each call."""
        names = self.parameters.names
        targets = [name for name in self.writes if name not in self.statistics]
        if self.in_place:
            targets = [names[0] if names else "self"]
        # The target of an in-place op is cast to its own dtype, which is nothing; any other one need
        # not be the first argument.
        never_cast = frozenset(self.writes) - (set(targets) if self.in_place else set())
        if self.is_python:
            never_cast |= {"out"} & set(names)
        object.__setattr__(self, "target", targets[0] if targets else None)
        object.__setattr__(self, "never_cast", never_cast)
        emulation = None
        if isinstance(self.decision.dtype, Format) and self.target is None:
            emulation = Emulation(
                self.decision.dtype,
                self.rounding,
                self.rounds_gradients,
                self.decision.accumulate_dtype,
                None if self.decision.output_dtype == INPUT else self.decision.output_dtype,
                self.is_view,
                self.lowerings,
                takes_codes=self.kind in PRODUCTS,
            )
        kinds = {p: k for p, k in self.parameters.kinds.items() if names[p] not in self.never_cast}
        positions = tuple(map(names.index, self.statistics))
        takes_fp32 = self.device_types <= self.mixed_device_types
        object.__setattr__(self, "statistic_positions", positions)
        object.__setattr__(self, "takes_fp32_statistics", takes_fp32)
        fp32_positions: frozenset[int] | None = frozenset()
        if self.decision.dtype in LOW_DTYPES and self.norm_parameters:
            if takes_fp32:
                fp32_positions = frozenset(map(names.index, self.norm_parameters))
            elif self.device_types & self.mixed_device_types:
                fp32_positions = None
        may_be_low = self.is_low or (self.decision.dtype is None and self.kind in _SLOW_KINDS)
        may_be_low = may_be_low and self.decision.accumulate_dtype is None
        is_legalized = self.legalize != "never" and may_be_low and self.target is None
        object.__setattr__(self, "legalizes", is_legalized and not self.is_view)
        composes = self.decision.is_composed and self.target is None and emulation is None
        object.__setattr__(self, "emulation", emulation)
        object.__setattr__(self, "composes", composes)
        has_flag = self.is_python and "inplace" in names
        may_write = has_flag or self.target is not None or "out" in never_cast
        object.__setattr__(self, "has_inplace_flag", has_flag)
        object.__setattr__(self, "may_write", may_write)
        object.__setattr__(self, "fp32_positions", fp32_positions)
        object.__setattr__(self, "cast_kinds", kinds)
        object.__setattr__(self, "skipped", self.never_cast | self.parameters.plain | {"out"})


def cast_args(plan: CallPlan, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Returns the arguments that ``plan`` makes of ``args`` and ``kwargs``; changes neither."""
    if plan.emulation is not None:
        args, kwargs = plan.emulation.decoded(args, kwargs)
    elif args:
        same = getattr(args[0], "dtype", None) if plan.is_relative else plan.decision.dtype
        if is_settled((*args, *kwargs.values()), same):
            return args, kwargs
    dtype = target_dtype(plan, args, kwargs)
    if dtype is None:
        return args, kwargs
    args, kwargs = _cast_to(dtype, plan, args, kwargs)
    if plan.emulation is None or written(plan, args, kwargs) is not None:
        return args, kwargs
    keeps_parameters = _takes_mixed_parameters(plan, args, kwargs)
    return _with_inputs(plan.emulation.round, plan, args, kwargs, keeps_parameters)


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
    """Returns what casts one tensor to ``dtype``."""
    if plan.reuses_casts and dtype in LOW_DTYPES:
        # Products of two tensors are new tensors; that of a list may be the one tensor in it.
        is_product = plan.kind in _SLOW_KINDS and "A" not in plan.cast_kinds.values()
        is_only_read = is_product and not (plan.is_python or plan.may_write)
        return functools.partial(cache.cast, dtype, is_only_read)
    return CAST[dtype]


def target_dtype(plan: CallPlan, args: Args, kwargs: Kwargs) -> torch.dtype | None:
    """Returns the dtype that the eligible inputs are cast to; None to leave the call alone."""
    if is_below_dispatcher():
        return None
    target = written(plan, args, kwargs)
    if target is not None:  # the tensor written to keeps its dtype, whatever the lists say
        if plan.promotes or not isinstance(target, Tensor):  # lists of tensors have many dtypes
            return None
        return target.dtype if target.dtype in CAST else None
    inputs = floating_inputs(plan, args, kwargs)
    if not inputs:
        return None
    cast_policy = plan.decision.cast_policy
    if cast_policy is CastPolicy.PASS:
        return None
    sparse = next((t.dtype for t in inputs if t.layout in _SPARSE), None)
    if sparse is not None:  # torch's sparse products take no other dtype beside it
        is_eligible = all(t.dtype in ELIGIBLE for t in inputs)
        return sparse if is_eligible and not plan.promotes else None
    if cast_policy is CastPolicy.FIRST:
        dtype = inputs[0].dtype
    elif cast_policy is CastPolicy.WIDEST:
        if plan.widens_itself:
            return None
        dtype = widest(inputs)
    else:
        inputs = _counted(plan, inputs)
        if any(t.dtype not in ELIGIBLE or t.layout not in _DENSE for t in inputs):
            return None  # float64, complex or sparse: casting the others would mix dtypes
        if cast_policy is CastPolicy.FOLLOW:
            first = inputs[0].dtype
            is_low = first in LOW_DTYPES and all(t.dtype is first for t in inputs)
            return first if is_low else torch.float32
        if plan.never_narrows and _argument(plan, "dtype", args, kwargs) in LOW_DTYPES:
            return None
        assert plan.decision.dtype is not None
        if plan.emulation is not None or isinstance(plan.decision.dtype, Format):
            return torch.float32
        dtype = plan.decision.dtype
        if is_widened(plan, inputs):
            return None
    return dtype if dtype in CAST else None


def is_widened(plan: CallPlan, inputs: Iterable[Tensor]) -> bool:
    """Whether torch computes a call on these floating inputs in fp32 by itself, as the plan says."""
    fp32 = torch.float32
    return plan.widens_to_fp32 and any(t.dtype is fp32 and t.dim() > 0 for t in inputs)


def _counted(plan: CallPlan, inputs: list[Tensor]) -> list[Tensor]:
    """Returns ``inputs`` without float64 numbers in tensors of no dimension, where kernels promote.

    Beside tensors with dimensions these count as Python's numbers do, which are float64, too.
    """
    if not plan.promotes or not any(t.dim() for t in inputs):
        return inputs
    return [t for t in inputs if t.dtype is not torch.float64 or t.dim()]


def floating_inputs(plan: CallPlan, args: Args, kwargs: Kwargs) -> list[Tensor]:
    """Returns the floating and complex tensors among the inputs, in the parameters' order."""
    found: list[Tensor] = []
    for name, value in zip(_padded(plan.parameters.names, len(args)), args, strict=False):
        if name not in plan.never_cast:
            _collect(value, found)
    order = {name: position for position, name in enumerate(plan.parameters.names)}
    for name in sorted(kwargs, key=lambda name: order.get(name, len(order))):
        if name not in plan.skipped:
            _collect(kwargs[name], found)
    return found


def widest(tensors: Iterable[Tensor]) -> torch.dtype:
    """Returns the dtype that `torch.result_type` gives for these floating tensors together.

    0-dim tensors count only where there are no others.
    """
    tensors = list(tensors)
    dimensioned = [t.dtype for t in tensors if t.dim()] or [t.dtype for t in tensors]
    return functools.reduce(torch.promote_types, dimensioned)


def _cast_to(dtype: torch.dtype, plan: CallPlan, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    cast = converter(plan, dtype)

    def convert(tensor: Tensor) -> Tensor:
        return tensor if tensor.dtype is dtype else cast(tensor)

    def convert_list(tensors: Sequence[Any]) -> list[Tensor] | None:
        if not all([_is_eligible_tensor(t, plan) and t.dtype is not dtype for t in tensors]):  # noqa: C419
            return None
        return cast_as_one(tensors, dtype)

    mixes = dtype in LOW_DTYPES and _takes_mixed_parameters(plan, args, kwargs)
    may_be_chunk = plan.kind == "rnn"  # the weights
    return _with_inputs(
        convert, plan, args, kwargs, mixes, convert_list if may_be_chunk else _no_chunk
    )


def _no_chunk(tensors: Sequence[Any]) -> None:
    return None


def _with_inputs(  # noqa: PLR0917  # all there is to one call
    convert: Callable[[Tensor], Tensor],
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

    def with_value(name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            if not _is_eligible(value, plan.device_types) and not (
                _is_number_from_cpu(value) and is_on_device(plan, args, kwargs)
            ):
                return value
            keeps_fp32 = (
                mixes
                and name in plan.norm_parameters
                and value.dtype is torch.float32
                and value.device.type in plan.mixed_device_types
            )
            return value if keeps_fp32 else convert(value)
        if isinstance(value, SEQUENCES):
            new = convert_list(value) or [with_value(name, item) for item in value]
            if all(a is b for a, b in zip(new, value, strict=True)):
                return value
            return with_items(value, new)
        return value

    names = _padded(plan.parameters.names, len(args))
    new_args = tuple(
        value if name in plan.never_cast else with_value(name, value)
        for name, value in zip(names, args, strict=False)
    )
    new_kwargs = {
        name: value if name in plan.skipped else with_value(name, value)
        for name, value in kwargs.items()
    }
    return new_args, new_kwargs


def _takes_mixed_parameters(plan: CallPlan, args: Args, kwargs: Kwargs) -> bool:
    """Whether a norm's weight and bias may stay fp32 in this call, if its device type takes that.

    Neither the kernels for nested tensors take it, nor the formulas of torch.func.vmap.
    """
    if not plan.norm_parameters:
        return False
    first = args[0] if args else kwargs.get(plan.parameters.names[0])
    return not (isinstance(first, Tensor) and first.is_nested) and transforms() is None


#: Returns the stack of torch.func's transforms that are running; None if there are none.


def written(plan: CallPlan, args: Args, kwargs: Kwargs) -> Tensor | Sequence[Tensor] | None:
    """Returns what the call writes to and what so decides its dtype; None if it has no such argument.

    That is ``out=``, or the argument that the plan or ``inplace=True`` makes the target. The first
    tensor stands for those of ``out=``.
    """
    out = _argument(plan, "out", args, kwargs) if plan.is_python else kwargs.get("out")
    if out is not None:
        first = out[0] if isinstance(out, SEQUENCES) and out else out
        return first if isinstance(first, Tensor) else None
    target = plan.target
    if target is None:
        if not (plan.has_inplace_flag and _argument(plan, "inplace", args, kwargs)):
            return None
        target = plan.parameters.names[0]
    if plan.parameters.names:
        value = _argument(plan, target, args, kwargs)
    else:  # nothing is known of the function's signature
        value = args[0] if args else None
    return value if isinstance(value, (Tensor, list, tuple)) else None


def _argument(plan: CallPlan, name: str, args: Args, kwargs: Kwargs) -> Any:
    """Returns the argument of that name, however it was given; None if it was not."""
    names = plan.parameters.names
    if name in kwargs or name not in names:
        return kwargs.get(name)
    position = names.index(name)
    return args[position] if position < len(args) else None


def _is_eligible(tensor: Tensor, device_types: frozenset[str]) -> bool:
    return (
        tensor.dtype in ELIGIBLE and tensor.layout in _DENSE and tensor.device.type in device_types
    )


def _is_eligible_tensor(value: Any, plan: CallPlan) -> bool:
    return isinstance(value, Tensor) and _is_eligible(value, plan.device_types)


def _is_number_from_cpu(tensor: Tensor) -> bool:
    """Whether kernels take a tensor that may be cast beside those on any device."""
    return (
        tensor.dtype in ELIGIBLE
        and tensor.layout in _DENSE
        and tensor.device.type == "cpu"
        and tensor.dim() == 0
    )


def is_on_device(plan: CallPlan, args: Args, kwargs: Kwargs) -> bool:
    """Whether any tensor among the arguments is on a device whose tensors are cast."""
    return any(
        isinstance(each, Tensor) and each.device.type in plan.device_types
        for value in (*args, *kwargs.values())
        for each in (value if isinstance(value, SEQUENCES) else (value,))
    )


def _collect(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        if value.dtype.is_floating_point or value.dtype.is_complex:
            found.append(value)
    elif isinstance(value, SEQUENCES):
        for item in value:
            _collect(item, found)


def _padded(names: tuple[str, ...], length: int) -> tuple[str, ...]:
    return names if len(names) >= length else names + ("",) * (length - len(names))


#: What stands for a `CastPolicy` where the argument that a call writes to decides.
TARGET: Final = "TARGET"


def decided_by(plan: CallPlan, args: Args, kwargs: Kwargs) -> tuple[str, str]:
    """Returns what decides a call, for the log: the name of a `CastPolicy` or `TARGET`, and why."""
    if written(plan, args, kwargs) is not None:
        out = _argument(plan, "out", args, kwargs) if plan.is_python else kwargs.get("out")
        return TARGET, "in-place rule" if out is None else "out= rule"
    cast_policy = plan.decision.cast_policy
    for tensor in _counted(plan, floating_inputs(plan, args, kwargs)):
        if tensor.layout in _SPARSE:
            return CastPolicy.FIRST.name, "its sparse input"
        if cast_policy in _ABSOLUTE and tensor.dtype not in ELIGIBLE:
            return CastPolicy.PASS.name, f"its {short_name(tensor.dtype)} input"
    return cast_policy.name, plan.decision.reason


#: Policies that leave alone a call with an input that is never cast.
_ABSOLUTE: Final = frozenset({CastPolicy.LOW, CastPolicy.FP32, CastPolicy.FOLLOW})
