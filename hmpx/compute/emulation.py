"""Ops in number formats that no hardware need have: rounded inputs, a wider kernel, rounded outputs.

Values live in fp32 tensors and are always representable in the format. The kernel computes in fp32,
or in fp64 where rounding the fp32 results a second time would show. Gradients pass as if nothing had
been rounded, or are rounded too. Where an op returns a dtype instead, its outputs are not rounded, nor
what is added to a product. Independent of op lists and of how wrappers are installed in torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from .. import ops
from ..errors import OptionError
from ..number_formats import Custom, Format, Rounder, rounder
from ..tensors import CAST, ELIGIBLE, Args, Kwargs, map_tensors
from ..torch_internals import behind_transform, disable_modes, is_jit_tracing, is_of_transform
from ..torch_state import without_casts
from . import frozen_codes
from .composition import call_raised, rounded
from .emulated_products import ByAxis, EmulatedProduct, has_axis
from .factored import factored, may_be_factored
from .legalize.graphs import is_onnx_made, is_traced
from .lowering import Lowering
from .overflowing import may_overflow, warning_of_overflow
from .straight_through import straight_through

#: fp32 results may be rounded again to formats with up to this many significand bits: 2 * 11 + 2 <= 24.
_MOST_BITS: Final = 11
_FP32_BITS: Final = 24

#: Classes of numbers that are values, as those in tensors are.
_NUMBERS: Final = frozenset({int, float})


@dataclass(frozen=True)
class Formats:
    """The number formats of one op.

    Attributes:
        result: What results are rounded to, unless they are returned in a dtype.
        weights: What weights are rounded to.
        activations: What other inputs are rounded to.
        gradients: What gradients are rounded to, incoming and outgoing; None leaves them alone.
        rounding: How, as `formats.quantize` takes it.
        overflow: What becomes of values beyond the largest, likewise.
    """

    result: Format
    weights: Format
    activations: Format
    gradients: Format | None = None
    rounding: str = "nearest"
    overflow: str | None = None

    def rounder(self, format: Format, axis: int | None = None) -> Rounder:
        """Returns what rounds to ``format``, along ``axis`` where values are rounded together."""
        along = format if axis is None or not has_axis(format) else format.along(axis)
        return rounder(along, self.rounding, self.overflow)


@dataclass(frozen=True)
class Emulation:
    """Computes one op in number formats.

    Attributes:
        formats: The formats.
        op: Op name.
        names: Names of the op's parameters, by position.
        accumulate_dtype: The dtype the op computes in; None for fp32, or fp64 for a wide format.
        output_dtype: The dtype of outputs, which are not rounded to a format then; None for fp32, and
            rounded.
        is_view: The op computes nothing, so its outputs need no rounding.
        is_product: It multiplies and adds, mostly with weights, which may be frozen to codes.
        lowerings: Device type -> the function that computes the op instead of torch; None stands for
            every other device type.
        line: Where the decision comes from.
        numbers: The positions where a tensor may stand, and a number instead.
    """

    formats: Formats
    op: str = ""
    names: tuple[str, ...] = ()
    accumulate_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    is_view: bool = False
    is_product: bool = False
    lowerings: Mapping[str | None, Lowering] = field(default_factory=dict)
    line: str = field(default="", compare=False)
    numbers: frozenset[int] = frozenset()

    rounds_late: bool = field(init=False, repr=False, compare=False)
    _has_axes: bool = field(init=False, repr=False, compare=False)
    _tells_weights: bool = field(init=False, repr=False, compare=False)
    _names_weights: bool = field(init=False, repr=False, compare=False)
    _addend: str | None = field(init=False, repr=False, compare=False)
    _result: Rounder | None = field(init=False, repr=False, compare=False)
    _weight: Rounder = field(init=False, repr=False, compare=False)
    _activation: Rounder = field(init=False, repr=False, compare=False)
    _gradient: Rounder | None = field(init=False, repr=False, compare=False)
    _computes_in: torch.dtype = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Works out what follows from the rest.

        Raises:
            OptionError: A format can't be rounded to in the way that is asked for.
        """
        formats, gradients = self.formats, self.formats.gradients
        found = ops.product(self.op)
        factors = [formats.weights, formats.activations]
        needs_axes = any(map(has_axis, [*factors, *([] if gradients is None else [gradients])]))
        is_late = needs_axes or (gradients is not None and self.output_dtype is not None)
        is_wide = any(map(_is_wide, factors)) or _is_wide(formats.result)
        usual = torch.float64 if is_wide else torch.float32
        derived: dict[str, Any] = {
            "rounds_late": is_late and self.is_product and may_be_factored(self.op),
            "_has_axes": needs_axes,
            "_tells_weights": formats.weights != formats.activations,
            "_names_weights": ops.names_weights(self.names),
            "_addend": found.addend if found is not None else None,
            "_result": (
                self._looking(formats.result, "a result") if self.output_dtype is None else None
            ),
            "_weight": self._looking(formats.weights, "a weight"),
            "_activation": self._looking(formats.activations, "an input"),
            "_gradient": None if gradients is None else self._rounder(gradients),
            "_computes_in": self.accumulate_dtype or usual,
        }
        vars(self).update(derived)

    def _rounder(self, format: Format, axis: int | None = None) -> Rounder:
        found = self.formats.rounder(format, axis)
        # torch functions called inside it must not be cast
        return without_casts()(found) if isinstance(format, Custom) else found

    def _looking(self, format: Format, what: str) -> Rounder:
        found = self._rounder(format)
        if not may_overflow(format, self.formats.overflow):
            return found
        return warning_of_overflow(found, format, self.op, what, self.line)

    @property
    def format(self) -> Format:
        """The format that the op is said to run in."""
        return self.formats.result

    # --- inputs --------------------------------------------------------------------------------

    def rounded_input(self, name: str, given: Tensor, tensor: Tensor) -> Tensor:
        """Returns an input as the op takes it, in its own dtype.

        Factors of products that are rounded for each product anew are left to `compute`.

        Args:
            name: The argument's name, or ``""``.
            given: The input as it was given.
            tensor: The same, cast.

        Raises:
            OptionError: A graph is traced that can't hold the rounding.
        """
        self._check()
        if ops.is_mask(name) or (self.is_view and self._has_axes):  # what takes it knows the axis
            return tensor
        name = ops.parameter_named(name, self.names)
        if name == self._addend and name:
            return self._rounded_addend(tensor)
        return tensor if self.rounds_late else self._rounded_factor(name, given, tensor)

    def _check(self) -> None:
        is_onnx = is_onnx_made()
        if is_onnx or (not torch.compiler.is_dynamo_compiling() and is_jit_tracing()):
            what = "ONNX" if is_onnx else "torch.jit.trace"
            raise OptionError(
                f"{self.format.name}: {what} can't hold a number format; use torch.export"
            )

    def _rounded_addend(self, tensor: Tensor) -> Tensor:
        """Returns what is added to a product: as it is where sums are, for hardware adds it to them."""
        if self._result is None:
            return tensor
        return self._rounded(self._addend or "", tensor, self._result, self.formats.result)

    def _rounded_factor(self, name: str, given: Tensor, tensor: Tensor) -> Tensor:
        if self._is_weight(name, given):
            return self._rounded(name, tensor, self._weight, self.formats.weights)
        return self._rounded(name, tensor, self._activation, self.formats.activations)

    def _rounded(self, role: str, tensor: Tensor, round_: Rounder, format: Format) -> Tensor:
        is_parameter = self.is_product and type(tensor) is nn.Parameter
        if is_parameter and frozen_codes.note_rounding(tensor, format):
            with disable_modes():
                return round_(tensor)
        return straight_through(tensor, round_, self._outgoing(role))

    def _outgoing(self, role: str) -> Rounder | None:
        """Returns what rounds an input's gradient, which is a result as the op's outputs are."""
        return None if self._result is None else self._gradient

    def _incoming(self) -> Rounder | None:
        """Returns what rounds the gradient of the op's result."""
        return self._gradient

    def _is_weight(self, name: str, given: Tensor) -> bool:
        """Whether an input is a weight: by name, or, of ops that name none, since it is a parameter."""
        if ops.is_weight(name):
            return True
        if not self._tells_weights or self._names_weights or name.endswith("bias"):
            return False
        if is_traced():
            raise OptionError(
                f"{self.op}: in graphs that are traced nothing tells which of its inputs are weights; leave "
                f"weights= and activations= out of the line of {self.op}, or run it uncompiled"
            )
        while is_of_transform(given) and (behind := behind_transform(given)) is not given:
            given = behind
        return isinstance(given, nn.Parameter)

    def decoded(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Returns the arguments, with weights that were frozen to codes decoded to values."""
        frozen_codes.note_data(args, kwargs, self.formats.weights)
        if not self.is_product:
            return args, kwargs
        return frozen_codes.decoded(args, kwargs, self.formats.weights)

    # --- the op --------------------------------------------------------------------------------

    def compute(self, function: Callable[..., Any], args: Args, kwargs: Kwargs, given: Args) -> Any:
        """Returns the result of ``function``, rounded.

        Args:
            function: torch's function.
            args: Positional arguments, rounded except as `rounded_input` says.
            kwargs: Keyword arguments, likewise.
            given: The positional arguments before they were cast.
        """
        if self.is_view:
            return function(*args, **kwargs)
        dtype = self._computes_in
        incoming = self._incoming()
        if self.rounds_late:
            result, args, kwargs, incoming = self._product(function, args, kwargs, given)
        elif dtype is torch.float32:
            result = function(*args, **kwargs)
        else:
            result = call_raised(function, args, kwargs, CAST[dtype], ELIGIBLE)
        lowering = self._lowering(args)
        if lowering is not None:
            if lowering.takes_codes:
                args, kwargs = self._with_tensors_for_numbers(args, kwargs)
            with without_casts():
                result = lowering.in_place_of(result, args, kwargs)
        return rounded(result, functools.partial(self._finish, incoming), dtype)

    def _product(
        self, function: Callable[..., Any], args: Args, kwargs: Kwargs, given: Args
    ) -> tuple[Any, Args, Kwargs, Rounder | None]:
        """Returns a product whose factors are rounded here, and the arguments as it has rounded them.

        Last comes what is left to round the result's gradient.
        """
        if self._computes_in is not torch.float32:
            raise_one = CAST[self._computes_in]
            args, kwargs = call_raised(lambda *a, **k: (a, k), args, kwargs, raise_one, ELIGIBLE)
        call = factored(self.op, self.names, function, args, kwargs)
        if call is None:  # its last axes are rounded along, as those of ops that are no products
            args, kwargs = self._with_rounded(args, kwargs, given)
            return function(*args, **kwargs), args, kwargs, self._incoming()
        originals = {id(new): old for new, old in zip(args, given, strict=False)}
        factors: list[Tensor] = []
        rounders: list[ByAxis | None] = []
        for i, (name, factor) in enumerate(zip(call.names, call.factors, strict=True)):
            original = originals.get(id(factor), factor)
            is_weight = self._is_weight(name, original)
            format = self.formats.weights if is_weight else self.formats.activations
            if has_axis(format):
                factors.append(
                    straight_through(factor, None, self._outgoing(name or f"factor {i}"))
                )
                rounders.append(functools.partial(self._rounder, format))
            else:
                factors.append(self._rounded_factor(name or f"factor {i}", original, factor))
                rounders.append(None)
        product = EmulatedProduct(call.multiplication, tuple(rounders), self._incoming_by_axis())
        result = call.finish(product.compute(factors))
        if self.lowerings:
            args, kwargs = call.replace(product.rounded(factors))
        return result, args, kwargs, None

    def _incoming_by_axis(self) -> ByAxis | None:
        """Returns what rounds the gradient of a product, for each product of the backward."""
        gradients = self.formats.gradients
        return None if gradients is None else functools.partial(self._rounder, gradients)

    def _with_rounded(self, args: Args, kwargs: Kwargs, given: Args) -> tuple[Args, Kwargs]:
        names = (*self.names, *("",) * len(args))

        def round_one(name: str, value: Any) -> Any:
            if name == self._addend:
                return value
            return map_tensors(
                value,
                lambda t: self._rounded_factor(name, t, t) if t.is_floating_point() else t,
            )

        new_args = tuple([round_one(n, v) for n, v in zip(names, args, strict=False)])
        return new_args, {name: round_one(name, value) for name, value in kwargs.items()}

    def _with_tensors_for_numbers(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Returns the arguments with numbers that stand where tensors may in tensors of no dimension."""
        first = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)), None)
        names = {self.names[position] for position in self.numbers}

        def value(name: str, given: Any) -> Any:
            if first is None or name not in names or type(given) not in _NUMBERS:
                return given
            return torch.full((), given, dtype=self._computes_in, device=first.device)

        new_args = tuple([value(n, v) for n, v in zip(self.names, args, strict=False)])
        return new_args, {name: value(name, given) for name, given in kwargs.items()}

    def _result_rounder(self) -> Rounder | None:
        return self._result

    def _finish(self, incoming: Rounder | None, tensor: Tensor) -> Tensor:
        self._check()
        if tensor.is_nested or tensor.layout is not torch.strided:
            return tensor
        if (round_ := self._result_rounder()) is not None:
            return CAST[torch.float32](straight_through(tensor, round_, incoming))
        assert self.output_dtype is not None
        return CAST[self.output_dtype](straight_through(tensor, None, incoming))

    def _lowering(self, args: Args) -> Lowering | None:
        if not self.lowerings:
            return None
        first = next((value for value in args if isinstance(value, Tensor)), None)
        device_type = None if first is None else first.device.type
        return self.lowerings.get(device_type) or self.lowerings.get(None)


def _is_wide(format: Format) -> bool:
    """Whether results in fp32, rounded again, would differ from results that are rounded once."""
    return not isinstance(format, Custom) and _MOST_BITS < format.significand_bits < _FP32_BITS
