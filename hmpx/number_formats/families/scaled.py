"""Elements that share scales: powers of two in blocks, as in the OCP Microscaling (MX) specification, or of any size.

The latter are those in the recipes of fp8 training and of quantized weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Final, Literal, TypeAlias

import torch
from torch import Tensor

from ... import arguments
from ...errors import OptionError, shown
from ...tensors import CAST, SPARSE
from ..bits import FP32, Binary, to_float32
from ..vocabulary import MOST_STEPS
from .fixed import Fixed
from .floats import Float
from .granularity import Granularity, checked_granularity, split
from .number_format import FLOAT32_MOST, Coding, Figures, check_int, check_name, params_of
from .shared_scales import (
    E4M3_LEAST,
    E4M3_MOST,
    RULES,
    Rule,
    SharedScales,
    amax_of,
    check_scales,
    exponent_of,
)
from .tables import Table

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


AmaxRule: TypeAlias = Literal["max", "most_recent"]
ScaleFormat: TypeAlias = Literal["float32", "e8m0", "e4m3"]

#: The amax of a history that determines the scale; the default first.
_AMAX_RULES: Final[tuple[AmaxRule, ...]] = ("max", "most_recent")

#: The largest margin.
_MOST_MARGIN: Final = 64

#: Scale format -> bits of a scale.
_SCALE_BITS: Final = {"float32": 32, "e8m0": 8, "e4m3": 8}


@dataclass(frozen=True)
class Scaled(SharedScales):
    """Elements that share scales: a value is an element times its scale, rounded to float32.

    A scale is the largest magnitude of the values that share it (amax), divided by the element's
    largest, as in DeepSeek-V3's kernels and torchao. Values are divided by their scale in their own
    precision, rounded to elements, saturated beyond the largest, and multiplied by the scale.

    - All values that share their scale with infinity or NaN become NaN.
    - Zeros stay zeros: a scale is at least ``2**-126``, that of a tensor with e4m3 scales at least
      ``2**-121``, and an e4m3 scale at least ``2**-6``. Values far below become zero.
    - float64 beyond float32's largest number saturates.

    Attributes:
        name: An identifier.
        element: The format of the elements; a `Fixed` one is used without its least number, so that
            it is symmetric.
        granularity: The values that share a scale. ``"tensor"``: all values. ``"row"``: a vector
            along the axis. ``"column"``: those with the same index on the axis. ``n``: n neighbours
            along the axis; the last group may be smaller. ``(m, n)``: n neighbours along the axis
            and m along the last axis, or the second last if the axis is the last.
        scale_format: ``"float32"``; ``"e8m0"``: powers of two from ``2**-126`` to ``2**127``; or
            ``"e4m3"``: numbers from ``2**-6`` to 448.
        rule: How to choose powers of two, as in `Block`; None: ``"rceil"``. For ``"e8m0"`` only.
        tensor_scale: Scales in e4m3 are divided by one of the whole tensor in float32: its amax divided by
            the largest element and by 448, as in NVFP4. For ``"e4m3"`` only.
        axis: The axis; ignored for ``"tensor"``.
        history: Number of earlier training steps that determine the scales of a conversion's ops
            (delayed scaling); None: the tensor's own amax does, as in ``quantize``. For
            ``"tensor"`` only.
        amax_rule: The amax to use: ``"max"``, the largest of the history; or ``"most_recent"``. None:
            ``"max"``. With a history only.
        margin: The amax is multiplied by ``2**margin``. With a history only.

    Example:
        >>> int4 = hmpx.formats.Fixed("int4", integer_bits=4, fraction_bits=0)
        >>> rows = hmpx.formats.Scaled("int4_rows", int4, "row")
        >>> hmpx.formats.quantize(torch.tensor([[0.5, 6.8, -7.0], [0.1, 0.2, 0.7]]), rows)
        tensor([[ 0.0000,  7.0000, -7.0000],
                [ 0.1000,  0.2000,  0.7000]])
    """

    element: Float | Fixed | Table
    granularity: Granularity = "tensor"
    scale_format: ScaleFormat = "float32"
    rule: Rule | None = None
    tensor_scale: bool = False
    axis: int = -1
    history: int | None = None
    amax_rule: AmaxRule | None = None
    margin: int = 0

    def __post_init__(self) -> None:
        check_name(self.name)
        what = f"format {self.name}"
        if not isinstance(self.element, (Float, Fixed, Table)):
            raise OptionError(
                f"{what}: element must be a Float, Fixed or Table, not {shown(self.element)}; "
                "get(name) returns a registered one"
            )
        fits = self.element.fits_in_float32 and (
            isinstance(self.element, Table) or self.element.is_exact_in_float32
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
            if self.rule == "even" and isinstance(self.element, Table):
                raise OptionError(f"{what}: rule 'even' is for floats and fixed point, not tables")
        check_int(self.name, "axis", self.axis, -64, 63)
        object.__setattr__(self, "amax_rule", self._checked_history(what))

    def _checked_history(self, what: str) -> AmaxRule | None:
        """Returns the checked rule for the amax of a history; None without a history."""
        rule: AmaxRule | None = None
        if self.amax_rule is not None:
            rule = arguments.choice(f"{what}: amax_rule", self.amax_rule, _AMAX_RULES)
        check_int(self.name, "margin", self.margin, 0, _MOST_MARGIN)
        if self.history is None:
            for field in ("amax_rule", "margin"):
                if getattr(self, field):
                    raise OptionError(f"{what}: {field} is for a history; add history=16, say")
            return None
        check_int(self.name, "history", self.history, 1, MOST_STEPS)
        if self.granularity != "tensor" or self.tensor_scale:
            have = f"granularity {self.granularity!r}"
            if self.tensor_scale:
                have = "a scale in addition to those of blocks"
            raise OptionError(
                f"{what}: history is for one scale a tensor, granularity 'tensor', not for {have}; "
                "leave history out, for scales by the tensor at hand"
            )
        return rule or "max"

    @property
    def bits(self) -> float:
        """Bits per value, including blocks' scales; other scales are negligible."""
        size = self.granularity
        if isinstance(size, str):
            return self.element.bits
        sharing = size if isinstance(size, int) else size[0] * size[1]
        return self.element.bits + _SCALE_BITS[self.scale_format] / sharing

    @property
    def _figures(self) -> Figures:
        element = self.element._figures
        least, most = self.scale_limits
        if self.tensor_scale:
            least, most = least * E4M3_LEAST, most * E4M3_MOST
        return element._replace(
            max=to_float32(min(self.largest * most, FLOAT32_MOST)),
            smallest_normal=element.smallest_normal * least,
            smallest_subnormal=element.smallest_subnormal * least,
        )

    @property
    def largest(self) -> float:
        """The largest magnitude of an element."""
        return self._largest

    @property
    def scale_limits(self) -> tuple[float, float]:
        most = Fraction(FLOAT32_MOST) / Fraction(self.largest)  # keeps values finite
        if self.scale_format == "e8m0":
            return 2.0**-126, math.ldexp(1.0, min(127 - exponent_of(self.largest), 127))
        if self.scale_format == "float32":
            return 2.0**-126, FP32.floor(min(most, Fraction(FLOAT32_MOST)))
        if self.tensor_scale:  # also the reciprocal of the product of both scales
            return 2.0**-121, FP32.before(FP32.floor(min(most / 448, Fraction(2) ** 117)))
        return E4M3_LEAST, E4M3_MOST

    @property
    def block_axis(self) -> int | None:
        return None if self.granularity == "tensor" else self.axis

    def amax(self, x: Tensor) -> Tensor:
        """Returns the largest magnitudes of the values that share a scale, as in histories.

        Args:
            x: As for `quantize`.

        Returns:
            float32. 0-dim for ``"tensor"`` and with ``tensor_scale``; otherwise x's shape, with each axis
            reduced to its number of scales. NaN for values with infinity or NaN; 0 for empty tensors.

        Raises:
            OptionError: ``x`` lacks the axis, or is not a dense floating tensor.

        Example:
            >>> hmpx.formats.get("nvfp4").amax(torch.tensor([1.0, -3.0]))
            tensor(3.)
        """
        if not isinstance(x, Tensor):
            raise OptionError(f"amax takes a tensor, not {type(x).__name__}")
        if x.dtype not in CAST or x.layout in SPARSE:
            what = x.layout if x.layout in SPARSE else x.dtype
            raise OptionError(
                f"amax takes dense tensors of {', '.join(map(str, CAST))}, not of {what}"
            )
        with torch.no_grad():
            binary, shape = params_of(self, x.dtype).binary, self.scale_shape(x.shape)
            if not x.numel():
                return torch.zeros(shape, dtype=torch.float32, device=x.device)
            granularity = "tensor" if self.tensor_scale else self.granularity
            blocks = split(CAST[binary.dtype](x.detach()), granularity, self.axis)
            return amax_of(blocks, binary).reshape(shape)

    def scale(self, amax: Tensor) -> Tensor:
        """Returns the scales for largest magnitudes, in float32, for the ``scale`` of `quantize`.

        Args:
            amax: A float32 result of `amax`, or the largest of several.

        Raises:
            OptionError: ``amax`` is not float32.

        Example:
            >>> format = hmpx.formats.get("nvfp4")
            >>> format.scale(torch.tensor(2688.0))
            tensor(1.)
        """
        if not isinstance(amax, Tensor) or amax.dtype is not torch.float32:
            what = amax.dtype if isinstance(amax, Tensor) else type(amax).__name__
            raise OptionError(f"format {self.name}: amax must be a tensor of float32, not {what}")
        with torch.no_grad():
            return self.scale_of(amax.detach(), params_of(self, torch.float32))

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the scales, or of the tensor's, for values of a shape."""
        return () if self.tensor_scale else self.scales_shape(shape)

    def check_scale(self, scale: object, x: Tensor) -> None:
        check_scales(scale, self.scale_shape(x.shape), self.name)
