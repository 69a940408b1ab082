"""Blocks of elements that share a power of two, as in the OCP Microscaling (MX) specification."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from ... import arguments
from ...errors import OptionError, shown
from ..bits import Binary
from .fixed import Fixed
from .floats import Float
from .number_format import Coding, Figures, check_int, check_name
from .shared_scales import RULES, Rule, SharedScales, exponent_of

#: Elements of the largest block in float64 that the kernel encodes, STRIP_ELEMENTS in ``code_kernels.h``.
_MOST_ENCODED: Final = 2048


@dataclass(frozen=True)
class Block(SharedScales):
    """Blocks of elements that share a power of two, as in the OCP Microscaling (MX) specification.

    The shared exponent derives from the block's largest magnitude. It is from -127 to 127 (in fixed
    point from -126), in 8 bits (E8M0).

    Attributes:
        name: An identifier.
        element: The format of the elements; a `Fixed` one, as in MXINT8, is used without its least
            number, so that it is symmetric.
        size: Elements of a block; the last block of a row may be shorter.
        axis: The axis along which elements form blocks.
        rule: How to choose the shared exponent: ``"floor"``, as in the OCP specification,
            ``"rceil"``, ``"ceil"`` or ``"even"``; see [blocks](formats.md#blocks).

    Example:
        >>> element = hmpx.formats.Float("e2m1", exponent_bits=2, mantissa_bits=1, kind="finite")
        >>> pairs = hmpx.formats.Block("pairs", element, size=2)
        >>> hmpx.formats.quantize(torch.tensor([1.1, 6.0, 100.0, 600.0]), pairs)
        tensor([  1.,   6., 128., 512.])
    """

    element: Float | Fixed
    size: int = 32
    axis: int = -1
    rule: Rule = "floor"

    def __post_init__(self) -> None:
        check_name(self.name)
        what, element = f"format {self.name}", self.element
        if not isinstance(element, (Float, Fixed)):
            raise OptionError(
                f"{what}: element must be a Float or Fixed, not {shown(element)}; "
                "get(name) returns a registered one"
            )
        # Then elements are exact in float32, also divided or multiplied by their scale.
        least = 1 if isinstance(element, Float) else -1
        if not (least <= exponent_of(element.max) <= 16 and element.smallest_subnormal >= 2.0**-22):
            raise OptionError(
                f"{what}: element {element.name} must have a largest exponent from {least} to 16 "
                "and no numbers below 2**-22"
            )
        object.__setattr__(self, "rule", arguments.choice(f"{what}: rule", self.rule, RULES))
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

    scale_format: ClassVar[str] = "mx"
    tensor_scale: ClassVar[bool] = False

    @property
    def granularity(self) -> int:
        return self.size

    @property
    def block_axis(self) -> int:
        return self.axis

    @property
    def scale_limits(self) -> tuple[float, float]:
        return 2.0**-126, math.ldexp(1.0, 127 - exponent_of(self.element.max))

    def scales_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return super().scales_shape(shape or (1,))

    def coding(self, binary: Binary) -> Coding | None:
        if binary.width == 32 or not isinstance(self.element, Float):
            return super().coding(binary)
        element = self.element.coding(binary, keeps_sign_of_nan=False)
        return Coding("block", element.spec, can_encode=self.size <= _MOST_ENCODED)
