"""Elements that share scales which follow from their largest magnitude."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Final, Literal, TypeAlias, cast

import torch
from torch import Tensor

from ... import arguments
from ...arguments import is_a
from ...errors import OptionError, shown
from ...tensors import CAST
from ...torch_internals import run_when_traced
from ..bits import FP32, FP64, Binary, to_float32
from ..codings import Coding
from ..layouts import Layout
from ..modes import Overflow
from ..plans import Plan
from .fixed import Fixed, FixedPlan
from .float_plans import BitsPlan, FloatPlan
from .floats import Float
from .number_format import NumberFormat, check_int, check_name
from .scale_checks import (
    AmaxRule,
    Granularity,
    check_floating,
    check_scales,
    checked_granularity,
    checked_history,
    scales_shape,
)
from .scaled_codes import decoded, encoded, scaled_coding
from .scaled_plans import FLOAT32_MOST, ScaledPlan
from .shared_exponents import RULES, Rule, carry, exponent_of
from .tables import Table, TablePlan

ScaleFormat: TypeAlias = Literal["float32", "e8m0", "e4m3"]

#: Scale format -> bits of a scale.
_SCALE_BITS: Final = {"float32": 32, "e8m0": 8, "e4m3": 8}


@dataclass(frozen=True)
class Scaled(NumberFormat):
    """Elements that share scales: a value is an element times its scale, rounded to float32.

    A scale is the largest magnitude of the values that share it (amax), divided by the element's
    largest, so that the one becomes the other; as DeepSeek-V3's kernels and torchao's
    ``_choose_scale_float8`` and ``nvfp4_quantize`` have it. Values are divided by their scale in their
    own precision, rounded to elements, beyond the largest saturated, and multiplied again.

    - Values that share their scale with infinity or NaN become NaN, all of them.
    - Zeros stay zeros: a scale is never below ``2**-126``, that of a tensor with e4m3 scales never below
      ``2**-121``, and an e4m3 scale never below ``2**-6``, so that its reciprocal exists; what is far
      below that becomes zero.
    - float64 beyond float32's largest number saturates.

    Attributes:
        name: An identifier.
        element: The format of the elements: a `Float`, a `Fixed` one, whose least number is left out so
            that it is symmetric, or a `Table`.
        granularity: What shares a scale: ``"tensor"``: all values. ``"row"``: those of a vector along the
            axis. ``"column"``: those with the same place on the axis. ``n``: n neighbours along the
            axis, the last of which may be fewer. ``(m, n)``: n neighbours along the axis and m along the
            last axis, or along the last but one if the axis is the last.
        scale_format: ``"float32"``; ``"e8m0"``: powers of two from ``2**-126`` to ``2**127``; or
            ``"e4m3"``: numbers from ``2**-6`` to 448.
        rule: How powers of two are chosen, as in `Block`; None: ``"rceil"``, the smallest by which nothing
            saturates, which is also what TransformerEngine does to float32 scales. For ``"e8m0"`` only.
        tensor_scale: Scales in e4m3 are divided by one of the whole tensor in float32, its amax by the
            largest element and by 448, as in NVFP4. For ``"e4m3"`` only.
        axis: The axis; of no account for ``"tensor"``.
        history: Ops of a conversion scale by the amaxes of so many training steps that have ended (delayed
            scaling); None: by the amax of the tensor at hand, as `quantize` always does. For ``"tensor"``
            only.
        amax_rule: Which amax of the history: ``"max"``, the largest; or ``"most_recent"``. None:
            ``"max"``. With a history only.
        margin: That amax is multiplied by ``2**margin``. With a history only.

    Example:
        >>> int4 = hmpx.formats.Fixed("int4", integer_bits=4, fraction_bits=0)
        >>> rows = hmpx.formats.Scaled("int4_rows", int4, "row")
        >>> hmpx.formats.quantize(torch.tensor([[0.5, 6.8, -7.0], [0.1, 0.2, 0.7]]), rows)
        tensor([[ 0.0000,  7.0000, -7.0000],
                [ 0.1000,  0.2000,  0.7000]])
    """

    name: str
    element: Float | Fixed | Table
    granularity: Granularity = "tensor"
    scale_format: ScaleFormat = "float32"
    rule: Rule | None = None
    tensor_scale: bool = False
    axis: int = -1
    history: int | None = None
    amax_rule: AmaxRule | None = None
    margin: int = 0

    plans = (ScaledPlan,)

    def __post_init__(self) -> None:
        """Checks the fields.

        Raises:
            OptionError: A field has a value that it can't have.
        """
        check_name(self.name)
        what = f"format {self.name}"
        if not is_a(self.element, (Float, Fixed, Table)):
            raise OptionError(
                f"{what}: element must be a Float, Fixed or Table, not {shown(self.element)}; "
                "get(name) returns a registered one"
            )
        fits = self.element.fits_in_float32 and (
            is_a(self.element, Table) or self.element.is_exact_in_float32
        )
        if not fits:
            raise OptionError(f"{what}: element {self.element.name} does not fit in float32")
        object.__setattr__(self, "granularity", checked_granularity(what, self.granularity))
        scale_format = arguments.choice(f"{what}: scale_format", self.scale_format, _SCALE_BITS)
        object.__setattr__(self, "scale_format", scale_format)
        arguments.truth(f"{what}: tensor_scale", self.tensor_scale)
        if self.tensor_scale and scale_format != "e4m3":
            raise OptionError(f"{what}: tensor_scale is for scales in e4m3, not {scale_format}")
        if self.rule is not None:
            object.__setattr__(self, "rule", arguments.choice(f"{what}: rule", self.rule, RULES))
            if scale_format != "e8m0":
                raise OptionError(f"{what}: rule is for scales in e8m0, not {scale_format}")
            if self.rule == "even" and is_a(self.element, Table):
                raise OptionError(f"{what}: rule 'even' is for floats and fixed point, not tables")
        check_int(self.name, "axis", self.axis, -64, 63)
        object.__setattr__(self, "amax_rule", checked_history(self))

    # --- properties ----------------------------------------------------------------------------

    @property
    def bits(self) -> float:
        """Bits a value; blocks' scales are included, others are too few to count."""
        if isinstance(self.granularity, str):
            return self.element.bits
        shared = (
            self.granularity if isinstance(self.granularity, int) else math.prod(self.granularity)
        )
        return self.element.bits + _SCALE_BITS[self.scale_format] / shared

    @property
    def significand_bits(self) -> int:
        """Bits of a normal element's significand."""
        return self.element.significand_bits

    @property
    def epsilon(self) -> float:
        """The element's: the distance from 1 to the next larger number where the scale is 1."""
        return self.element.epsilon

    @property
    def largest(self) -> float:
        """The largest magnitude of an element."""
        if isinstance(self.element, Table):
            return max(abs(to_float32(value)) for value in self.element.values)
        return self.element.max

    @property
    def scale_limits(self) -> tuple[float, float]:
        """The least and the largest scale: of the tensor if it has one, else of blocks."""
        most = Fraction(FLOAT32_MOST) / Fraction(self.largest)  # then no value becomes infinite
        if self.scale_format == "e8m0":
            return 2.0**-126, math.ldexp(1.0, min(127 - exponent_of(self.largest), 127))
        if self.scale_format == "float32":
            return 2.0**-126, FP32.floor(min(most, Fraction(FLOAT32_MOST)))
        if self.tensor_scale:  # and no reciprocal of a product of both scales
            return 2.0**-121, FP32.before(FP32.floor(min(most / 448, Fraction(2) ** 117)))
        return 2.0**-6, 448.0

    @property
    def max(self) -> float:
        """The largest number."""
        most = self.scale_limits[1] * (448 if self.tensor_scale else 1)
        return to_float32(self.largest * most)

    @property
    def smallest_normal(self) -> float:
        """The smallest positive normal element times the smallest scale."""
        return self.element.smallest_normal * self._least_scale

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive element times the smallest scale."""
        return self.element.smallest_subnormal * self._least_scale

    @property
    def _least_scale(self) -> float:
        return self.scale_limits[0] * (2.0**-6 if self.tensor_scale else 1.0)

    # --- rounding ------------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        """Which values share scales."""
        if isinstance(self.granularity, tuple):
            return Layout("tiles", self.axis)
        if self.granularity == "tensor":
            return Layout("whole")
        return Layout("columns" if self.granularity == "column" else "rows", self.axis)

    def plan_in(self, binary: Binary, mode: str, overflow: Overflow) -> Plan:
        """Returns how to round tensors of a binary type that the format fits in."""
        largest = self.largest
        tile = self.granularity if isinstance(self.granularity, tuple) else (1, self.granularity)
        return ScaledPlan(
            binary,
            mode,
            self.element_plan(binary, mode),
            self.layout.kind,
            0 if isinstance(tile[1], str) else tile[1],
            tile[0],
            self.scale_format,
            self.tensor_scale,
            largest,
            *self.scale_limits,
            exponent_of(largest),
            carry(self.rule or "rceil", largest, self.significand_bits, 23),
        )

    def element_plan(
        self, binary: Binary, mode: str
    ) -> FloatPlan | BitsPlan | FixedPlan | TablePlan:
        """Returns how to round values that are divided by their scale."""
        element = self.element
        if isinstance(element, Table):  # its values are those of float32
            element = replace(element, values=tuple(map(to_float32, element.values)))
        plan = element.plan_in(binary, mode, "saturate")
        assert isinstance(plan, FloatPlan | BitsPlan | FixedPlan | TablePlan)
        return replace(plan, is_symmetric=True) if isinstance(plan, FixedPlan) else plan

    # --- scales --------------------------------------------------------------------------------

    def amax(self, x: Tensor) -> Tensor:
        """Returns the largest magnitudes of the values that share a scale, as a history keeps them.

        Args:
            x: As for `quantize`.

        Returns:
            float32. Of no dimensions for ``"tensor"`` and with ``tensor_scale``; otherwise of x's shape,
            but along each axis as many as there are scales. NaN for what holds infinity or NaN; 0 for
            nothing.

        Raises:
            OptionError: ``x`` lacks the axis, or is not a dense floating tensor.

        Example:
            >>> hmpx.formats.get("nvfp4").amax(torch.tensor([1.0, -3.0]))
            tensor(3.)
        """
        check_floating(x, "amax")
        layout = self._layout_of_scales
        with torch.no_grad():
            plan = self.exact_plan(x.dtype)
            rows = layout.to_rows(CAST[plan.binary.dtype](x.detach()))
            shape = self.scale_shape(x.shape)
            if not x.numel():
                return torch.zeros(shape, dtype=torch.float32, device=x.device)
            blocks = rows if self.tensor_scale else plan.split(rows)
            found = plan.amax(blocks)
            return layout.from_rows(found if layout.kind == "whole" else found.squeeze(-1), shape)

    def scale(self, amax: Tensor) -> Tensor:
        """Returns the scales for largest magnitudes, in float32; what `quantize` takes as ``scale``.

        Args:
            amax: float32, as `amax` returns it, or the largest of several such.

        Raises:
            OptionError: ``amax`` is not of float32.

        Example:
            >>> format = hmpx.formats.get("nvfp4")
            >>> format.scale(torch.tensor(2688.0))
            tensor(1.)
        """
        if not isinstance(amax, Tensor) or amax.dtype is not torch.float32:
            what = amax.dtype if isinstance(amax, Tensor) else type(amax).__name__
            raise OptionError(f"format {self.name}: amax must be a tensor of float32, not {what}")
        with torch.no_grad():
            return self.exact_plan(torch.float32).scale(amax.detach())

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the scales, or of the tensor's, for values of a shape."""
        return self.shape_for(shape, self._layout_of_scales)

    def check_scale(self, scale: object, x: Tensor) -> None:
        """Checks scales that the values of ``x`` are to be rounded by.

        Raises:
            OptionError: They are not floating, or not of the right shape.
        """
        check_scales(scale, self.scale_shape(x.shape), self.name)

    @property
    def _layout_of_scales(self) -> Layout:
        """The layout of those scales that are given."""
        return Layout("whole") if self.tensor_scale else self.layout

    def shape_for(self, shape: Sequence[int], layout: Layout) -> tuple[int, ...]:
        """Returns the shape of scales of a layout."""
        return scales_shape(shape, layout, self.granularity)

    # --- codes ---------------------------------------------------------------------------------

    def encoded(self, values: Tensor, rounded: Tensor, binary: Binary) -> tuple[Tensor, ...]:
        """Returns the codes of the elements, those of the scales, and the tensor's scale if it has one."""
        return encoded(self, values, rounded, binary)

    def decoded(self, codes: Any) -> Tensor:
        """Returns the values of what `encoded` returns; else raises `OptionError`."""
        return decoded(self, codes)

    def coding(self, binary: Binary) -> Coding | None:
        """Returns what kernels are told to make or read the codes of values of a binary type."""
        return scaled_coding(self.element) if binary is FP32 else None

    def exact_plan(self, dtype: torch.dtype) -> ScaledPlan:
        """Returns the plan to the nearest."""
        if torch.compiler.is_dynamo_compiling():
            constants = _constants_of(self, dtype)
            binary = FP64 if dtype is torch.float64 else FP32
            return cast(ScaledPlan, ScaledPlan.from_constants(binary, *constants[2:]))
        found = self.derived.get((ScaledPlan, dtype))
        if found is None:
            made = self.plan(dtype, "nearest", None)
            found = self.derived.setdefault((ScaledPlan, dtype), made)
        assert isinstance(found, ScaledPlan)
        return found


def _constants_of(format: Scaled, dtype: torch.dtype) -> tuple[Any, ...]:
    """Returns the plan that dynamo is to trace as constants."""
    plan = format.plan(dtype, "nearest", None)
    assert plan is not None
    return plan.constants()


run_when_traced(_constants_of)
