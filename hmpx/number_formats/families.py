"""Number formats as data: which values a format has, and how many bits they take.

Knows no tensors: what rounds to a format is in ``rounding``, what a code means in ``encoding``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

from .. import arguments
from ..arguments import is_a
from ..errors import OptionError, shown, suggestion

if TYPE_CHECKING:
    from torch import Tensor

Kind: TypeAlias = Literal["ieee", "fn", "fnuz", "finite"]
Overflow: TypeAlias = Literal["inf", "nan", "saturate"]

#: Kind -> what becomes of values beyond the largest, unless the format says otherwise.
_STANDARD_OVERFLOW: Final[dict[str, Overflow]] = {
    "ieee": "inf",
    "fn": "nan",
    "fnuz": "nan",
    "finite": "saturate",
}

#: Kind -> what may become of them.
_ALLOWED_OVERFLOW: Final[dict[str, tuple[Overflow, ...]]] = {
    "ieee": ("inf", "nan", "saturate"),
    "fn": ("nan", "saturate"),
    "fnuz": ("nan", "saturate"),
    "finite": ("saturate",),
}

_MOST_TABLE_VALUES: Final = 65536
_MOST_NAME: Final = 100


class _Deriving:
    """What all formats have besides their fields."""

    @functools.cached_property
    def derived(self) -> dict[Any, Any]:
        """What others have worked out for this format: it is freed with it, and not copied."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "derived"}


@dataclass(frozen=True)
class Float(_Deriving):
    """A binary floating-point format with a sign bit.

    Attributes:
        name: An identifier.
        exponent_bits: Width of the exponent field.
        mantissa_bits: Width of the fraction field; the leading 1 is not stored.
        bias: What the exponent field has too much; None: ``2**(exponent_bits - 1) - 1``, for
            ``"fnuz"`` one more.
        kind: ``"ieee"``: the largest exponent field holds infinities and NaNs. ``"fn"``: no
            infinities, NaN is the code with all bits set. ``"fnuz"``: no infinities, no -0, whose
            code is the only NaN. ``"finite"``: neither infinities nor NaN.
        subnormals: Whether an exponent field of 0 holds numbers below the smallest normal one, or
            zero only.
        overflow: What becomes of values beyond the largest: ``"inf"``, ``"nan"`` or ``"saturate"``;
            None: the kind's own.

    Example:
        >>> e3m2 = hmpx.formats.Float("e3m2", exponent_bits=3, mantissa_bits=2, kind="finite")
        >>> hmpx.formats.quantize(torch.tensor([1.1, 1.2, 100.0]), e3m2)
        tensor([ 1.0000,  1.2500, 28.0000])
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int | None = None
    kind: Kind = "ieee"
    subnormals: bool = True
    overflow: Overflow | None = None

    def __post_init__(self) -> None:
        """Refuses what is no format.

        Raises:
            OptionError: A field has a value that it can't have, or the format has values beyond
                those of float64.
        """
        _check_name(self.name)
        _make_plain(self, "kind")
        _make_plain(self, "overflow")
        if not is_a(self.kind, str) or self.kind not in _STANDARD_OVERFLOW:
            raise OptionError(
                f"format {self.name}: kind must be one of {_listed(_STANDARD_OVERFLOW)}, "
                f"not {shown(self.kind)}{_hint(self.kind, _STANDARD_OVERFLOW)}"
            )
        arguments.truth(f"format {self.name}: subnormals", self.subnormals)
        least = 2 if self.kind == "ieee" else 1
        _check_int(self.name, "exponent_bits", self.exponent_bits, least, 11)
        _check_int(self.name, "mantissa_bits", self.mantissa_bits, 1, 52)
        if self.bias is not None:
            _check_int(self.name, "bias", self.bias, -1023, 2046)
        check_overflow(self, self.overflow)
        lowest, highest = self.min_exponent, self.max_exponent
        is_inside = (
            lowest - self.mantissa_bits - 1 >= -1022 and highest + 53 - self.mantissa_bits <= 1023
        )
        is_double = lowest == -1022 and highest <= 1023
        if not (is_inside or is_double):
            raise OptionError(
                f"format {self.name}: exponents from {lowest} to {highest} with {self.mantissa_bits} "
                "mantissa bits are beyond float64, in which formats are computed; "
                "take fewer exponent bits or another bias"
            )

    @property
    def exponent_bias(self) -> int:
        """What the exponent field has too much."""
        if self.bias is not None:
            return self.bias
        return (1 << (self.exponent_bits - 1)) - (self.kind != "fnuz")

    @property
    def min_exponent(self) -> int:
        """The exponent of the smallest normal number."""
        return 1 - self.exponent_bias

    @property
    def max_exponent(self) -> int:
        """The exponent of the largest number."""
        return (1 << self.exponent_bits) - 1 - (self.kind == "ieee") - self.exponent_bias

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def significand_bits(self) -> int:
        """Bits of a normal number's significand, the leading 1 included."""
        return self.mantissa_bits + 1

    @property
    def epsilon(self) -> float:
        """The distance from 1 to the next larger number."""
        return math.ldexp(1.0, -self.mantissa_bits)

    @property
    def max(self) -> float:
        """The largest finite number."""
        # With "fn" the code with all bits set is NaN, so the largest is one below.
        steps = (2 << self.mantissa_bits) - (2 if self.kind == "fn" else 1)
        return math.ldexp(steps, self.max_exponent - self.mantissa_bits)

    @property
    def smallest_normal(self) -> float:
        """The smallest positive number with a full significand."""
        return math.ldexp(1.0, self.min_exponent)

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive number."""
        if not self.subnormals:
            return self.smallest_normal
        return math.ldexp(1.0, self.min_exponent - self.mantissa_bits)

    @property
    def has_inf(self) -> bool:
        """Whether there are infinities."""
        return self.kind == "ieee"

    @property
    def has_nan(self) -> bool:
        """Whether there is a NaN."""
        return self.kind != "finite"

    @property
    def has_negative_zero(self) -> bool:
        """Whether 0 and -0 differ."""
        return self.kind != "fnuz"


@dataclass(frozen=True)
class Posit(_Deriving):
    """A posit as the standard of 2022 has it, which fixes ``es`` at 2; others were in use before.

    Attributes:
        name: An identifier.
        bits: Bits of a code.
        es: Bits of the exponent field.

    Example:
        >>> posit6 = hmpx.formats.Posit("posit6", bits=6, es=2)
        >>> hmpx.formats.quantize(torch.tensor([1.1, 100.0, 1e9]), posit6)
        tensor([1.0000e+00, 1.2800e+02, 6.5536e+04])
    """

    name: str
    bits: int
    es: int

    def __post_init__(self) -> None:
        """Refuses what is no format.

        Raises:
            OptionError: A field has a value that it can't have, or the format has values beyond
                those of float64.
        """
        _check_name(self.name)
        _check_int(self.name, "bits", self.bits, 3, 32)
        _check_int(self.name, "es", self.es, 0, 8)
        if self.max_exponent > 1000:
            raise OptionError(
                f"format {self.name}: its largest value, 2**{self.max_exponent}, is beyond float64, "
                "in which formats are computed; take fewer bits or a smaller es"
            )

    @property
    def max_exponent(self) -> int:
        """The exponent of the largest number; that of the smallest is its negative."""
        return (self.bits - 2) << self.es

    @property
    def significand_bits(self) -> int:
        """Bits of the significand between 1 and 2, where most are left, the leading 1 included."""
        return max(self.bits - 3 - self.es, 0) + 1

    @property
    def epsilon(self) -> float:
        """The distance from 1 to the next larger number."""
        kept = self.bits - 3 - self.es
        return math.ldexp(1.0, -kept) if kept >= 0 else math.ldexp(1.0, 1 << -kept) - 1.0

    @property
    def max(self) -> float:
        """The largest number."""
        return math.ldexp(1.0, self.max_exponent)

    @property
    def smallest_normal(self) -> float:
        """The smallest positive number: posits have no subnormals."""
        return math.ldexp(1.0, -self.max_exponent)

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive number."""
        return self.smallest_normal


@dataclass(frozen=True)
class Fixed(_Deriving):
    """Fixed point in two's complement: multiples of ``2**-fraction_bits``.

    Attributes:
        name: An identifier.
        integer_bits: Bits before the point, the sign's included.
        fraction_bits: Bits after it.

    Example:
        >>> q2_2 = hmpx.formats.Fixed("q2_2", integer_bits=2, fraction_bits=2)
        >>> hmpx.formats.quantize(torch.tensor([0.3, -1.9, 5.0]), q2_2)
        tensor([ 0.2500, -2.0000,  1.7500])
    """

    name: str
    integer_bits: int
    fraction_bits: int

    def __post_init__(self) -> None:
        """Refuses what is no format.

        Raises:
            OptionError: A field has a value that it can't have.
        """
        _check_name(self.name)
        _check_int(self.name, "integer_bits", self.integer_bits, 1, 32)
        _check_int(self.name, "fraction_bits", self.fraction_bits, 0, 31)
        if not 2 <= self.bits <= 32:
            raise OptionError(
                f"format {self.name}: integer_bits and fraction_bits must be 2 to 32 in all, "
                f"not {self.bits}"
            )

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.integer_bits + self.fraction_bits

    @property
    def significand_bits(self) -> int:
        """Bits of the largest number."""
        return self.bits - 1

    @property
    def epsilon(self) -> float:
        """The distance between neighbours."""
        return math.ldexp(1.0, -self.fraction_bits)

    @property
    def max(self) -> float:
        """The largest number."""
        return math.ldexp((1 << (self.bits - 1)) - 1, -self.fraction_bits)

    @property
    def min(self) -> float:
        """The least number, one step further from zero than the largest."""
        return -math.ldexp(1.0, self.integer_bits - 1)

    @property
    def smallest_normal(self) -> float:
        """The smallest positive number."""
        return self.epsilon

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive number."""
        return self.epsilon


@dataclass(frozen=True)
class Block(_Deriving):
    """Blocks of elements that share a power of two, as in the OCP Microscaling (MX) specification.

    The shared exponent is that of the block's largest magnitude less the element's largest exponent,
    from -127 to 127, stored in 8 bits (E8M0).

    Attributes:
        name: An identifier.
        element: The format of the elements, divided by their block's scale.
        size: Elements of a block; the last block of a row may be shorter.
        axis: The axis along which elements form blocks.

    Example:
        >>> element = hmpx.formats.Float("e2m1", exponent_bits=2, mantissa_bits=1, kind="finite")
        >>> pairs = hmpx.formats.Block("pairs", element, size=2)
        >>> hmpx.formats.quantize(torch.tensor([1.1, 6.0, 100.0, 600.0]), pairs)
        tensor([  1.,   6., 128., 512.])
    """

    name: str
    element: Float
    size: int = 32
    axis: int = -1

    def __post_init__(self) -> None:
        """Refuses what is no format.

        Raises:
            OptionError: A field has a value that it can't have.
        """
        _check_name(self.name)
        if not is_a(self.element, Float):
            raise OptionError(
                f"format {self.name}: element must be a Float, not {shown(self.element)}; "
                "get(name) returns a registered one"
            )
        # So that elements are exact in float32, divided by their scale and multiplied with it.
        if not 1 <= self.element.max_exponent <= 16 or self.element.smallest_subnormal < 2.0**-22:
            raise OptionError(
                f"format {self.name}: element {self.element.name} must have a largest exponent from "
                "1 to 16 and no numbers below 2**-22"
            )
        _check_int(self.name, "size", self.size, 1, 65536)
        _check_int(self.name, "axis", self.axis, -64, 63)

    @property
    def bits(self) -> float:
        """Bits a value, the shared scale's included; codes of elements are whole bytes."""
        return self.element.bits + 8 / self.size

    @property
    def significand_bits(self) -> int:
        """Bits of a normal element's significand, the leading 1 included."""
        return self.element.significand_bits

    @property
    def epsilon(self) -> float:
        """The distance from 1 to the next larger number where the scale is 1."""
        return self.element.epsilon

    @property
    def max(self) -> float:
        """The largest number."""
        return math.ldexp(self.element.max, 127 - self.element.max_exponent)

    @property
    def smallest_normal(self) -> float:
        """The smallest positive normal element times the smallest scale."""
        return math.ldexp(self.element.smallest_normal, -127)

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive element times the smallest scale."""
        return math.ldexp(self.element.smallest_subnormal, -127)


@dataclass(frozen=True)
class Table(_Deriving):
    """A format that is given by its values; a code is a value's index.

    Attributes:
        name: An identifier.
        values: Ascending, finite, distinct; any sequence of numbers, kept as a tuple.

    Example:
        >>> ternary = hmpx.formats.Table("ternary", (-1.0, 0.0, 1.0))
        >>> hmpx.formats.quantize(torch.tensor([-0.7, 0.2, 3.0]), ternary)
        tensor([-1.,  0.,  1.])
    """

    name: str
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        """Takes any sequence of numbers.

        Raises:
            OptionError: The values are no numbers, not finite, not ascending, or too few or many.
        """
        _check_name(self.name)
        what = f"format {self.name}: values"
        given = arguments.items(what, self.values, "a sequence of numbers")
        try:
            values = tuple([float(value) for value in given])
        except Exception:  # of whatever calls itself a number
            raise OptionError(f"{what} must be numbers, not {shown(self.values)}") from None
        if not 2 <= len(values) <= _MOST_TABLE_VALUES:
            raise OptionError(
                f"format {self.name}: a table has 2 to {_MOST_TABLE_VALUES} values, not {len(values)}"
            )
        for index, value in enumerate(values):
            if not math.isfinite(value):
                raise OptionError(
                    f"format {self.name}: values must be finite, but value {index} is {value}"
                )
            if index and not values[index - 1] < value:
                raise OptionError(
                    f"format {self.name}: values must be ascending, but value {index}, {value}, "
                    f"comes after {values[index - 1]}"
                )
        # One zero: -0.0 would otherwise make equal tables round to different bits.
        object.__setattr__(self, "values", tuple(value + 0.0 for value in values))

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return (len(self.values) - 1).bit_length()

    @property
    def significand_bits(self) -> int:
        """Most bits of a significand among the values."""
        return max(_significant_bits(value) for value in self.values)

    @property
    def epsilon(self) -> float:
        """The least distance between neighbours."""
        return min(b - a for a, b in pairwise(self.values))

    @property
    def max(self) -> float:
        """The largest value."""
        return self.values[-1]

    @property
    def min(self) -> float:
        """The least value."""
        return self.values[0]

    @property
    def smallest_normal(self) -> float:
        """The smallest positive value, NaN if there is none."""
        return min((value for value in self.values if value > 0), default=math.nan)

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive value, NaN if there is none."""
        return self.smallest_normal


@dataclass(frozen=True)
class Custom(_Deriving):
    """A format that is given by the function that rounds to it; all that it has.

    Attributes:
        name: An identifier.
        quantize: Takes a floating tensor and returns one of the same shape and dtype. Casting calls
            it without autograd.

    Example:
        >>> whole = hmpx.formats.Custom("whole", torch.round)
        >>> hmpx.formats.quantize(torch.tensor([1.4, 2.6]), whole)
        tensor([1., 3.])
    """

    name: str
    quantize: Callable[[Tensor], Tensor]

    def __post_init__(self) -> None:
        """Refuses what is no format.

        Raises:
            OptionError: The name is no identifier, or ``quantize`` can't be called.
        """
        _check_name(self.name)
        if not callable(self.quantize):
            raise OptionError(
                f"format {self.name}: quantize must be a function of a tensor, not {shown(self.quantize)}"
            )


Format: TypeAlias = Float | Posit | Fixed | Block | Table | Custom

#: The classes of formats.
FORMATS: Final[tuple[type, ...]] = get_args(Format)


def resolved_overflow(format: Format, overflow: str | None) -> Overflow:
    """Returns what values beyond the largest become: as asked, or as the format has it.

    In posits that is said of infinities, ``"nan"`` or ``"saturate"``: numbers always saturate.

    Raises:
        OptionError: The format can't do what is asked.
    """
    check_overflow(format, overflow)
    if overflow is None and isinstance(format, Float):
        return format.overflow or _STANDARD_OVERFLOW[format.kind]
    if overflow is None and isinstance(format, Posit):
        return "nan"
    return overflow or "saturate"  # type: ignore[return-value]  # checked


def check_overflow(format: Format, overflow: str | None) -> None:
    """Refuses an overflow behaviour that the format can't have.

    Raises:
        OptionError: So it is.
    """
    if overflow is None:
        return
    if isinstance(format, Custom):
        raise OptionError(
            f"format {format.name}: overflow can't be chosen, its own function rounds to it"
        )
    allowed = _ALLOWED_OVERFLOW[format.kind] if isinstance(format, Float) else ("saturate",)
    if not is_a(overflow, str) or str.__str__(overflow) not in allowed:
        raise OptionError(
            f"format {format.name}: overflow must be {_listed(allowed)} or None, not {shown(overflow)}"
            f"{_hint(overflow, allowed)}"
        )


def _make_plain(format: Float, field: str) -> None:
    """Makes a string of a class of the user's own, which may compare as it likes, a plain one."""
    value = getattr(format, field)
    if is_a(value, str):
        object.__setattr__(format, field, str.__str__(value))


def _check_name(name: object) -> None:
    if type(name) is not str or not name.isidentifier():
        raise OptionError(
            f"a format's name must be an identifier such as float10_e5m4, not {shown(name)}"
        )
    if len(name) > _MOST_NAME:
        raise OptionError(
            f"a format's name must have at most {_MOST_NAME} characters, not {shown(name)}"
        )


def _check_int(name: str, field: str, value: object, least: int, most: int) -> None:
    if not is_a(value, int) or is_a(value, bool) or not least <= value <= most:  # type: ignore[operator]
        raise OptionError(
            f"format {name}: {field} must be an integer from {least} to {most}, not {shown(value)}"
        )


def _significant_bits(value: float) -> int:
    numerator = abs(value.as_integer_ratio()[0])
    return (numerator // (numerator & -numerator)).bit_length() if numerator else 0


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)


def _hint(value: object, candidates: Iterable[str]) -> str:
    return suggestion(str.__str__(value), candidates) if is_a(value, str) else ""
