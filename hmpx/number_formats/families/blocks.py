"""Blocks of elements that share a power of two."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from ... import arguments
from ...arguments import is_a
from ...errors import OptionError, shown
from ..bits import FP32, Binary
from ..layouts import Layout
from ..plans import Coding
from ..vocabulary import Overflow
from .fixed import Fixed
from .floats import Float
from .number_format import Figures, check_int, check_name
from .scaled_plans import BlockPlan
from .shared_scales import RULES, Rule, SharedScales, carry, exponent_of

#: Elements of the largest block in float64 that the kernel encodes, STRIP_ELEMENTS in ``code_kernels.h``.
_MOST_ENCODED: Final = 2048


@dataclass(frozen=True)
class Block(SharedScales):
    """Blocks of elements that share a power of two, as in the OCP Microscaling (MX) specification.

    The shared exponent derives from the block's largest magnitude (amax), is from -127 to 127 (in fixed point
    from -126), and is stored in 8 bits (E8M0). No element times its scale is infinite.

    Attributes:
        name: An identifier.
        element: The format of the elements, divided by their block's scale: a `Float`, or a `Fixed` one
            as in MXINT8, without its least number, so that it is symmetric.
        size: Elements of a block; the last block of a row may be shorter.
        axis: The axis along which elements form blocks.
        rule: How to choose the shared exponent, by torchao's names (ScaleCalculationMode). ``"floor"``: that
            of amax minus that of the largest element, as in the OCP specification; amax may saturate.
            ``"rceil"``: the least without saturation, as on Blackwell. ``"ceil"``: like ``"floor"``, for amax
            rounded up to a power of two. ``"even"``: like ``"floor"``, for amax rounded to the element's
            mantissa bits.

    Example:
        >>> element = hmpx.formats.Float("e2m1", exponent_bits=2, mantissa_bits=1, kind="finite")
        >>> pairs = hmpx.formats.Block("pairs", element, size=2)
        >>> hmpx.formats.quantize(torch.tensor([1.1, 6.0, 100.0, 600.0]), pairs)
        tensor([  1.,   6., 128., 512.])
    """

    name: str
    element: Float | Fixed
    size: int = 32
    axis: int = -1
    rule: Rule = "floor"

    parts = "the pair (codes, scales)"

    def __post_init__(self) -> None:
        """Checks the fields; raises `OptionError`."""
        check_name(self.name)
        if not is_a(self.element, (Float, Fixed)):
            raise OptionError(
                f"format {self.name}: element must be a Float or Fixed, not {shown(self.element)}; "
                "get(name) returns a registered one"
            )
        # Then elements are exact in float32, also divided or multiplied by their scale.
        least = 1 if is_a(self.element, Float) else -1
        if (
            not least <= exponent_of(self.element.max) <= 16
            or self.element.smallest_subnormal < 2.0**-22
        ):
            raise OptionError(
                f"format {self.name}: element {self.element.name} must have a largest exponent from "
                f"{least} to 16 and no numbers below 2**-22"
            )
        what = f"format {self.name}: rule"
        object.__setattr__(self, "rule", arguments.choice(what, self.rule, RULES))
        check_int(self.name, "size", self.size, 1, 65536)
        check_int(self.name, "axis", self.axis, -64, 63)

    @property
    def bits(self) -> float:
        """Bits per value, including the shared scale's; codes of elements are whole bytes."""
        return self.element.bits + 8 / self.size

    @property
    def _figures(self) -> Figures:
        element = self.element._figures
        lowest = -126 if isinstance(self.element, Fixed) else -127
        return element._replace(
            max=math.ldexp(element.max, 127 - exponent_of(element.max)),
            smallest_normal=math.ldexp(element.smallest_normal, lowest),
            smallest_subnormal=math.ldexp(element.smallest_subnormal, lowest),
        )

    @property
    def layout(self) -> Layout:
        """The layout of blocks along the axis."""
        return Layout("rows", self.axis)

    def plan_in(self, binary: Binary, mode: str, overflow: Overflow) -> BlockPlan:
        """Returns the plan for tensors of a binary type that has room for the format."""
        largest = self.element.max
        exponent = exponent_of(largest)
        added = carry(self.rule, largest, self.significand_bits, binary.mantissa)
        element, limits = (
            self.element_plan(binary, mode),
            (2.0**-126, math.ldexp(1.0, 127 - exponent)),
        )
        shape = self.size, 1
        return BlockPlan(
            binary, mode, element, "rows", *shape, "mx", False, 1.0, *limits, exponent, added
        )

    def scales_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the scales of values of a shape."""
        found = list(shape) or [1]
        self.layout.check(found)
        found[self.axis] = -(-found[self.axis] // self.size)
        return tuple(found)

    def check_shape(self, scales: Tensor, shape: Sequence[int]) -> Tensor:
        """Returns scales; raises `OptionError` if values of a shape have scales of another shape."""
        if not shape and scales.numel() == 1:
            return scales.view(1)
        expected = self.scales_shape(shape)
        if tuple(scales.shape) != expected:
            raise OptionError(
                f"format {self.name}: codes of shape {tuple(shape)} have scales of shape "
                f"{expected}, not {tuple(scales.shape)}"
            )
        return scales

    def coding(self, binary: Binary) -> Coding | None:
        """Returns the coding of values of a binary type, for kernels."""
        if binary is FP32 or not isinstance(self.element, Float):
            return super().coding(binary)
        element = self.element.coding(binary, keeps_sign_of_nan=False)
        return Coding("block", element.spec, can_encode=self.size <= _MOST_ENCODED)
