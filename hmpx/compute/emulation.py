"""Emulates ops in number formats: rounded inputs, a wider kernel, rounded outputs.

Values are in fp32 tensors and always representable in the format. The kernel computes in fp32, or in fp64 if
rounding fp32 results a second time would change them. Gradients are straight-through, or rounded too. If an op
has an output dtype, its outputs are not rounded to the format, nor is a product's addend.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from .. import ops, torch_internals
from ..errors import FreezeError, OptionError, warn
from ..number_formats import (
    Block,
    Custom,
    Format,
    FormatRounding,
    Rounder,
    Scaled,
    decode,
    rounder,
    straight_through,
)
from ..patching import unpatched
from ..tensors import CAST, ELIGIBLE, PLAIN_TENSORS, Args, Kwargs, map_tensors
from ..torch_state import in_force, place, without_casts
from .amaxes import has_history
from .composition import call_raised, is_onnx_made, is_traced, rounded, traced
from .emulated_products import ByAxis, EmulatedProduct, factored, has_axis, may_be_factored
from .float8_products import Float8Product, why_not
from .lowering import Lowering
from .watching import EMULATION_WATCHERS, note_data, note_rounding

if TYPE_CHECKING:
    from .delayed import Scaler

#: fp32 results may be rounded again to formats with up to this many significand bits: 2 * 11 + 2 <= 24.
_MOST_BITS: Final = 11
_FP32_BITS: Final = 24

_CODES: Final = frozenset({torch.uint8, torch.uint16, torch.int32})


@dataclass(frozen=True)
class Formats:
    """The number formats of one op."""

    result: Format  # the format of results, unless they have an output dtype
    weights: Format  # the format of weights
    activations: Format  # the format of other inputs
    gradients: Format | None = None  # of incoming and outgoing ones; None leaves them unrounded
    rounding: str = "nearest"  # as in `formats.quantize`
    overflow: str | None = None  # likewise


@dataclass(eq=False)
class Emulation:
    """Computes one op in number formats."""

    formats: Formats
    op: str = ""
    names: tuple[str, ...] = ()  # of the op's parameters, by position
    accumulate_dtype: torch.dtype | None = None  # None for fp32, or fp64 for a wide format
    #: The dtype of outputs, which are then not rounded to a format; None for fp32 with rounding.
    output_dtype: torch.dtype | None = None
    is_view: bool = False  # the op computes nothing, so its outputs need no rounding
    is_product: bool = False  # mostly with weights, which may be frozen to codes
    #: Device type -> the function that computes the op instead of torch; None for every other device type.
    lowerings: Mapping[str | None, Lowering] = field(default_factory=dict)
    line: str = ""  # the origin of the decision
    numbers: frozenset[int] = frozenset()  # the positions that may hold a tensor or a number
    hardware: str = (
        "never"  # or "auto", "require": whether kernels compute products, as in `convert`
    )

    def __post_init__(self) -> None:
        """Sets the derived fields; raises `OptionError` if a format does not support rounding or overflow."""
        formats, gradients = self.formats, self.formats.gradients
        found = ops.product(self.op)
        factors = [formats.weights, formats.activations]
        needs_axes = any(map(has_axis, [*factors, *([] if gradients is None else [gradients])]))
        is_late = needs_axes or (gradients is not None and self.output_dtype is not None)
        is_wide = any(map(_is_wide, [*factors, formats.result]))
        is_factored = self.is_product and may_be_factored(self.op)
        why = "a registered function computes it" if self.lowerings else ""
        why = why or why_not(self.op, formats, self.output_dtype, self.accumulate_dtype)
        if why and self.hardware == "require":
            raise OptionError(
                f'{self.line}: hardware="require": {self.op} would be emulated: {why}'
            )
        self._lowers = self.hardware != "never" and not why
        #: Factors are rounded separately for each product, in `compute`.
        self.rounds_late = is_factored and (is_late or self._lowers)
        self._has_axes = needs_axes
        self._has_history = any(map(has_history, [*factors, formats.result, gradients]))
        differ = formats.weights != formats.activations
        self._tells_weights = differ and not ops.names_weights(self.names)
        self._addend = found.addend if found is not None else None
        self._rounders = {
            "weights": self._looking(formats.weights, "a weight"),
            "activations": self._looking(formats.activations, "an input"),
        }
        self._computes_in = self.accumulate_dtype or (torch.float64 if is_wide else torch.float32)
        if self.output_dtype is None:
            self._rounders["result"] = self._looking(formats.result, "a result")
        if gradients is not None:
            self._rounders["gradients"] = self._rounder(gradients)
        if self._has_history:
            from . import delayed  # noqa: F401  # not in a graph
        self._kinds = {name: self._kind_of(name) for name in ("", *self.names)}

    def _looking(self, format: Format, what: str) -> Rounder:
        found = self._rounder(format)
        if not may_overflow(format, self.formats.overflow):
            return found
        return warning_of_overflow(found, format, self.op, what, self.line)

    def _rounder(self, format: Format, axis: int | None = None) -> Rounder:
        """Returns the function that rounds to ``format``, along ``axis`` if values are rounded together."""
        along = format if axis is None or not has_axis(format) else format.along(axis)
        found = rounder(along, self.formats.rounding, self.formats.overflow)
        # torch functions called inside it must not be cast
        return without_casts()(found) if isinstance(format, Custom) else found

    def _rounder_for(self, role: str, kind: str) -> Rounder | None:
        """Returns the function that rounds a tensor with this role to the field ``kind`` of `Formats`, or None."""
        found = self._rounders.get(kind)
        if found is None or not self._has_history or not has_history(getattr(self.formats, kind)):
            return found
        from .delayed import rounder_for

        return rounder_for(found, self.op, role)

    def _scaler_for(self, format: Format | None, role: str) -> Scaler | None:
        if format is None or not has_history(format):
            return None
        from .delayed import scaler_for

        return scaler_for(format, self.op, role)

    def _straight_through(self, tensor: Tensor, round_: Rounder | None, role: str) -> Tensor:
        """Rounds an input by ``round_``, and its gradient."""
        outgoing = None
        if self.output_dtype is None and self.formats.gradients is not None:
            outgoing = self._rounder_for(f"gradient of {role}", "gradients")
        return straight_through(tensor, round_, outgoing)

    # --- inputs --------------------------------------------------------------------------------

    def rounded_input(self, name: str, given: Tensor, tensor: Tensor) -> Tensor:
        """Returns the argument ``name``, cast from ``given`` and rounded for the op.

        Factors that are rounded separately for each product are left to `compute`.
        """
        if name not in self._kinds and not ops.is_mask(name):
            name = ops.parameter_named(name, self.names)
        kind = self._kinds[name] if name in self._kinds else self._kind_of(name)
        if kind == "" or (self.rounds_late and kind != "result"):
            return tensor
        return self._rounded(name, tensor, kind or self._kind(name, given))

    def check(self) -> None:
        """Raises `OptionError` if the call becomes part of a file that can't contain the rounding."""
        how = traced()
        if how == "jit" or (how and is_onnx_made()):
            what = "ONNX" if is_onnx_made() else "torch.jit.trace"
            raise OptionError(
                f"{self.formats.result.name}: {what} can't hold a number format; use torch.export"
            )

    def _is_watched(self, tensor: Tensor) -> bool:
        return bool(EMULATION_WATCHERS) and self.is_product and type(tensor) is nn.Parameter

    def _rounded(self, role: str, tensor: Tensor, kind: str, axis: int | None = None) -> Tensor:
        round_, format = self._rounder_for(role, kind), getattr(self.formats, kind)
        if axis is not None and has_axis(format):
            round_, format = self._rounder(format, axis), format.along(axis)
        if round_ and self._is_watched(tensor):
            note_rounding(tensor, format, self.formats)
            with torch_internals.disable_modes():
                return round_(tensor)
        return self._straight_through(tensor, round_, role)

    def _kind_of(self, name: str) -> str | None:
        """Returns the field of `Formats` for the argument ``name``: empty if it stays, None if that depends on it."""
        if ops.is_mask(name) or (self.is_view and self._has_axes):
            return ""  # the op that uses a view knows the axis
        if name and name == self._addend:  # unrounded with unrounded sums: hardware adds it to them
            return "result" if self.output_dtype is None else ""
        return self._kind_by_name(name)

    def _kind_by_name(self, name: str) -> str | None:
        if ops.is_weight(name):
            return "weights"
        return "activations" if not self._tells_weights or name.endswith("bias") else None

    def _kind(self, name: str, given: Tensor) -> str:
        """Returns ``"weights"`` for a weight, by name, or for ops without such a name a parameter."""
        found = self._kind_by_name(name)
        if found is not None:
            return found
        if is_traced():
            raise OptionError(
                f"{self.op}: in graphs that are traced nothing tells which of its inputs are weights; leave "
                f"weights= and activations= out of the line of {self.op}, or run it uncompiled"
            )
        while (
            torch_internals.is_of_transform(given)
            and (behind := torch_internals.behind_transform(given)) is not given
        ):
            given = behind
        return "weights" if isinstance(given, nn.Parameter) else "activations"

    # --- the op --------------------------------------------------------------------------------

    def compute(self, function: Callable[..., Any], args: Args, kwargs: Kwargs, given: Args) -> Any:
        """Returns the rounded result of torch's function.

        Its arguments are rounded by `rounded_input`; ``given`` are the original positional ones.
        """
        if self.is_view:
            return function(*args, **kwargs)
        dtype, incoming = self._computes_in, self._rounder_for("gradient", "gradients")
        if self.rounds_late:
            result, args, kwargs, incoming = self._product(function, args, kwargs, given)
        elif dtype is torch.float32:
            result = function(*args, **kwargs)
        else:
            result = call_raised(function, args, kwargs, CAST[dtype], ELIGIBLE)
        lowering = self._lowering(args) if self.lowerings else None
        if lowering is not None:
            if lowering.takes_codes:
                args, kwargs = self._with_tensors_for_numbers(args, kwargs)
            with without_casts():
                result = lowering.in_place_of(result, args, kwargs)

        def finish(tensor: Tensor) -> Tensor:
            if tensor.is_nested or tensor.layout is not torch.strided:
                return tensor
            found = straight_through(tensor, self._rounder_for("result", "result"), incoming)
            return CAST[self.output_dtype or torch.float32](found)

        return rounded(result, finish, dtype)

    def _product(
        self, function: Callable[..., Any], args: Args, kwargs: Kwargs, given: Args
    ) -> tuple[Any, Args, Kwargs, Rounder | None]:
        """Returns a product whose factors are rounded here, and the rounded arguments.

        The last item rounds the result's gradient, if that is still needed.
        """
        if self._computes_in is not torch.float32:
            raise_one = CAST[self._computes_in]
            args, kwargs = call_raised(lambda *a, **k: (a, k), args, kwargs, raise_one, ELIGIBLE)
        call = factored(self.op, self.names, function, args, kwargs)
        gradients, incoming = self.formats.gradients, self._rounder_for("gradient", "gradients")
        if call is None:  # rounded along the last axes, as in other ops
            args, kwargs = self._mapped(self._with_rounded, args, kwargs)
            return function(*args, **kwargs), args, kwargs, incoming
        originals = {id(new): old for new, old in zip(args, given, strict=False)}
        lowers = self._lowers and not EMULATION_WATCHERS
        if lowers and self._has_history:
            from .delayed import has_values  # not in a graph

            lowers = all(map(has_values, call.factors))
            if not lowers and self.hardware == "require":
                raise OptionError(
                    f'hardware="require": {self.op} would be emulated: scales by earlier steps are emulated in graphs, '
                    'and without values; convert with hardware="auto"'
                )
        factors: list[Tensor] = []
        axes = call.contraction.axes()
        formats: list[Format] = []
        rounders: list[ByAxis | None] = []
        scales: list[Tensor | None] = []
        for i, (name, factor) in enumerate(zip(call.names, call.factors, strict=True)):
            role = name or f"factor {i}"
            kind = self._kind(name, originals.get(id(factor), factor))
            format = getattr(self.formats, kind)
            formats.append(format)
            scaler = self._scaler_for(format, role) if lowers else None
            scales.append(None if scaler is None else scaler(factor))
            if has_axis(format) and not self._is_watched(factor):
                factors.append(self._straight_through(factor, None, role))
                rounders.append(functools.partial(self._rounder, format))
            elif lowers:
                factors.append(self._straight_through(factor, None, role))
                # With that scale in the backward, too: a step of another model may have ended meanwhile.
                rounders.append(_by_no_axis(_scaled(self._rounders[kind], scales[-1])))
            else:
                factors.append(self._rounded(role, factor, kind, axes[i]))
                rounders.append(None)
        by_axis: ByAxis | None = None
        if gradients is not None and has_axis(gradients):
            by_axis = functools.partial(self._rounder, gradients)
        elif incoming is not None:
            by_axis = _by_no_axis(incoming)
        product = EmulatedProduct(call.contraction, tuple(rounders), by_axis)
        if lowers:
            product = Float8Product(
                call.contraction,
                tuple(rounders),
                by_axis,
                op=self.op,
                formats=tuple(formats),
                of_gradient=gradients,
                scales=tuple(scales),
                scaler=self._scaler_for(gradients, "gradient"),
                output_dtype=self.output_dtype or torch.float32,
                saturates=self.formats.overflow == "saturate",
                is_required=self.hardware == "require",
                is_added_to=not call.is_result,
            )
        result = call.finish(product.compute(factors))
        if self.lowerings:
            args, kwargs = call.with_factors(product.rounded(factors))
        return result, args, kwargs, None

    def _with_rounded(self, name: str, value: Any) -> Any:
        def round_one(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            return self._rounded(name, tensor, self._kind(name, tensor))

        return value if name == self._addend else map_tensors(value, round_one)

    def _with_tensors_for_numbers(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Returns the arguments with numbers in tensor positions replaced by 0-dim tensors."""
        first = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)), None)
        names = {self.names[position] for position in self.numbers}

        def tensor(name: str, given: Any) -> Any:
            if first is None or name not in names or type(given) not in (int, float):
                return given
            return torch.full((), given, dtype=self._computes_in, device=first.device)

        return self._mapped(tensor, args, kwargs)

    def _mapped(
        self, change: Callable[[str, Any], Any], args: Args, kwargs: Kwargs
    ) -> tuple[Args, Kwargs]:
        names = (*self.names, *("",) * len(args))
        new_args = tuple([change(name, value) for name, value in zip(names, args, strict=False)])
        return new_args, {name: change(name, value) for name, value in kwargs.items()}

    def _lowering(self, args: Args) -> Lowering | None:
        first = next((value for value in args if isinstance(value, Tensor)), None)
        device_type = None if first is None else first.device.type
        return self.lowerings.get(device_type) or self.lowerings.get(None)

    # --- weights frozen to codes ---------------------------------------------------------------

    def decoded(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Returns the arguments, with weights frozen to codes decoded to values.

        Codes do not state their format: it is that of the op's weights.
        """
        format = self.formats.weights
        if EMULATION_WATCHERS:
            note_data(args, kwargs, format)
        if not self.is_product or not any(
            [isinstance(v, Tensor) and v.dtype in _CODES for v in (*args[1:], *kwargs.values())]  # noqa: C419
        ):
            return args, kwargs
        # AOTAutograd's tensors are no longer marked as parameters. But the call was traced before with marked
        # ones, and any other integers alongside floating-point tensors raised an error there.
        is_traced = any(
            isinstance(value, Tensor) and value.dtype.is_floating_point
            for value in (*args, *kwargs.values())
        )
        kinds = (nn.Parameter, torch_internals.FunctionalTensor) if is_traced else nn.Parameter

        def value(given: Any) -> Any:  # no other parameters are integers
            if not (isinstance(given, kinds) and given.dtype in _CODES):
                return given
            if isinstance(
                format, (Block, Scaled)
            ):  # modules decode these where they read their attributes
                raise FreezeError(
                    f"a weight of {place().path or 'the model'} is frozen to codes of {format.name}, and "
                    "read elsewhere than as an attribute of its module, so without its scales; exclude it from "
                    'the lists, or freeze with store="dtype"'
                )
            return decode(given, format)

        new_args = (args[0], *map(value, args[1:])) if args else args
        return new_args, {name: value(given) for name, given in kwargs.items()}


def _scaled(round_: Rounder, scale: Tensor | None) -> Rounder:
    """Returns a rounder that knows a tensor's scale, if there is one."""
    if scale is None:
        return round_
    assert isinstance(round_, FormatRounding)
    return lambda x: round_(x, None, scale)


def _by_no_axis(round_: Rounder | None) -> ByAxis:
    """Returns a rounder for any axis."""
    assert round_ is not None
    return lambda axis: round_


def _is_wide(format: Format) -> bool:
    """Whether fp32 results, rounded again, may differ from results rounded once."""
    return not isinstance(format, Custom) and _MOST_BITS < format.significand_bits < _FP32_BITS


# Unpatched: op lists may name any of them.
_sum, _isfinite, _and, _not = unpatched(
    torch.sum, torch.isfinite, torch.logical_and, torch.logical_not
)
_where, _abs, _amax = unpatched(torch.where, torch.abs, torch.amax)


#: The conversion that has warned.
_warned: object = None


def may_overflow(format: Format, overflow: str | None) -> bool:
    """Whether values beyond the format's largest become infinite or NaN."""
    return (overflow or format.default_overflow) != "saturate"


def warning_of_overflow(round_: Rounder, format: Format, op: str, what: str, line: str) -> Rounder:
    """Makes ``round_`` warn, once per conversion, if it makes finite values infinite or NaN.

    On the CPU only: reading values elsewhere would synchronize the device. It checks the sum of the
    rounded values, in a tenth to a third of the time of rounding. ``what`` is their role: ``"an input"``.
    """

    def round_and_look(tensor: Tensor) -> Tensor:
        global _warned
        result = round_(tensor)
        if torch.compiler.is_dynamo_compiling():
            return result
        if (
            type(result) in PLAIN_TENSORS
            and result.is_cpu
            and _warned is not in_force()
            and not torch_internals.dispatch_modes()
            and torch_internals.transforms() is None
            and not math.isfinite(_sum(result).item())  # NaN and infinity stay in a sum
        ):
            most = _largest_lost(tensor, result)
            if most is not None:
                _warned = in_force()
                warn(_message(format, op, what, line, most))
        return result

    return round_and_look


def _largest_lost(tensor: Tensor, result: Tensor) -> float | None:
    with torch.no_grad(), without_casts():
        is_lost = _and(_isfinite(tensor), _not(_isfinite(result)))
        if not is_lost.any().item():
            return None
        return float(_amax(_abs(_where(is_lost, tensor, 0.0))).item())


def _message(format: Format, op: str, what: str, line: str, most: float) -> str:
    module = place().path
    limit = f", whose largest is {format.max:g}," if hasattr(format, "max") else ""
    return (
        f"{op}{f' in {module}' if module else ''}: {what} of {most:.4g} is beyond {format.name}{limit} and "
        'became infinite or NaN; convert(overflow="saturate"), or overflow=saturate on the op\'s line '
        f"({line or 'a rule'}), keeps the largest value instead. Said once"
    )
