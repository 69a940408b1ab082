"""The base of all families of number formats: checks of their fields, rounding, and codes; custom formats."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from ... import arguments
from ...errors import OptionError, shown, suggestion
from ...forks import CachedProperty
from ...tensors import CAST, PLAIN_TENSORS, Constant
from ...torch_internals import run_when_traced
from ..bits import FP32, FP64, Binary
from ..unpatched import AND, ARANGE, taken
from ..vocabulary import ROUNDING_MODES, Overflow, spellings

Rounder: TypeAlias = Callable[[Tensor], Tensor]
Same = TypeVar("Same", bound="NumberFormat")

#: The numbers with which a family rounds in one mode: a named tuple, which compilers treat as constants, with
#: ``binary``, the compute type, and ``mode``.
Params: TypeAlias = Any

_MOST_NAME: Final = 100

FLOAT32_MOST: Final = float(torch.finfo(torch.float32).max)

#: Formats of up to this number of bits are decoded by a table of all their values.
_TABLED: Final = 16


@dataclass(frozen=True)
class NumberFormat:
    """A number format of any family, which is a frozen dataclass, with an identifier as its name."""

    name: str

    @CachedProperty
    def derived(self) -> dict[Any, Any]:
        """Cached objects of other modules for this format: freed with it, and not copied."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "derived"}

    @property
    def own_function(self) -> Rounder | None:
        """The user's rounding function, or None."""
        return None

    @property
    def block_axis(self) -> int | None:
        """The axis along which values are rounded together, or None."""
        return None

    def along(self: Same, axis: int) -> Same:
        """Returns the format with values rounded together along another axis.

        Ops pass the axis over which they reduce. Formats without a `block_axis` are returned unchanged.

        Raises:
            OptionError: The format does not support that axis.

        Example:
            >>> hmpx.formats.get("mxfp4_e2m1").along(0).axis
            0
        """
        if self.block_axis is None:
            return self
        check_int(self.name, "axis", axis, -64, 63)
        if axis == self.block_axis:
            return self
        key = "along", axis
        if key not in self.derived:
            self.derived[key] = replace(self, axis=axis)  # type: ignore[call-arg]  # those with a block_axis
        return self.derived[key]  # type: ignore[no-any-return]

    @property
    def allowed_overflow(self) -> tuple[Overflow, ...]:
        """The supported overflow behaviours."""
        return ("saturate",)

    @property
    def default_overflow(self) -> Overflow:
        """The default overflow behaviour."""
        return "saturate"

    @property
    def fits_in_float32(self) -> bool:
        """Whether float32 has room for all values and for rounding them."""
        return True

    @property
    def is_exact_in_float32(self) -> bool:
        """Whether float32 holds every value exactly."""
        return True

    def check_rounding(self, mode: object, overflow: object) -> None:
        """Raises `OptionError` if the format does not support this rounding or overflow."""
        arguments.choice("rounding", mode, ROUNDING_MODES, spellings("rounding"))
        self.check_overflow(overflow)

    def check_overflow(self, overflow: object) -> None:
        """Raises `OptionError` if the format does not support an overflow behaviour."""
        allowed = self.allowed_overflow
        if overflow is not None and (not isinstance(overflow, str) or overflow not in allowed):
            raise OptionError(
                f"format {self.name}: overflow must be {listed(allowed)} or None, not {shown(overflow)}"
                f"{hint(overflow, allowed)}"
            )

    def check_scale(self, scale: object, x: Tensor) -> None:
        """Raises `OptionError` if these scales don't fit ``x``."""
        raise OptionError(f"format {self.name} has no scales to be given; a Scaled format has")

    # --- rounding: each family defines `params_in` and `round` -----------------------------------

    def params(self, dtype: torch.dtype, mode: str, overflow: str | None) -> Params:
        """Returns the numbers with which tensors of ``dtype`` are rounded; None if rounding changes nothing."""
        is_wide = dtype is torch.float64 or not self.fits_in_float32
        # A copy: Dynamo refuses constants that are also objects of the program.
        binary = Binary(*(FP64 if is_wide else FP32))
        chosen: Overflow = overflow or self.default_overflow  # type: ignore[assignment]  # checked
        return self.params_in(binary, mode, chosen)

    def params_in(self, binary: Binary, mode: str, overflow: Overflow) -> Params:
        """Returns the numbers for a compute type that has room for the format."""
        raise NotImplementedError

    def round(self, x: Tensor, noise: Tensor | None, p: Params) -> Tensor:
        """Returns ``x``, of the dtype of ``p.binary``, rounded by torch ops; ``noise`` is random int32.

        The ops work on bits, since compilers elide round-trip casts.
        """
        raise NotImplementedError

    def kernel(self, p: Params) -> Kernel | None:
        """Returns the C function that rounds as `round` does; None if there is none."""
        return None

    def noise_index(self, index: Tensor, x: Tensor) -> Tensor:
        """Returns the indices of the noise of x's elements, from those of all elements in order."""
        return index.view(x.shape)


@run_when_traced
def params_of(
    format: NumberFormat, dtype: torch.dtype, mode: str = "nearest", overflow: str | None = None
) -> Params:
    """Returns `NumberFormat.params`, cached; raises `OptionError` for an unsupported dtype, mode or overflow."""
    format.check_rounding(mode, overflow)
    if dtype not in CAST:
        known = ", ".join(map(str, CAST))
        raise OptionError(f"quantize takes tensors of {known}, not {dtype}; cast it first")
    key = "params", dtype, mode, overflow
    if key not in format.derived:
        format.derived[key] = format.params(dtype, mode, overflow)
    return format.derived[key]


class Kernel(NamedTuple):
    """A function of ``rounding_kernels.c``."""

    name: str
    struct: bytes | Callable[[Tensor, float | None], bytes]  # for a dense tensor, and a given scale
    takes_strides: bool = True  # that is, any order of the dimensions in memory
    takes_scale: bool = False  # of the whole tensor
    memory: Any = None  # to which the struct points

    def struct_for(self, x: Tensor, given: float | None = None) -> bytes:
        return self.struct if isinstance(self.struct, bytes) else self.struct(x, given)


def kernel_of(name: str, p: Params, *numbers: float) -> Kernel:
    """Returns the kernel whose struct is the mode and these numbers."""
    return Kernel(name, packed(p.binary, (ROUNDING_MODES.index(p.mode), *numbers)))


def packed(binary: Binary, numbers: Iterable[float]) -> bytes:
    """Returns numbers as int64: integers, and the bits of floats."""
    bits = [binary.bits_of(each) if isinstance(each, float) else each for each in numbers]
    return struct.pack(f"{len(bits)}q", *bits)


@dataclass(frozen=True)
class Custom(NumberFormat):
    """A format that is defined by a rounding function alone.

    Attributes:
        name: An identifier.
        quantize: Takes a floating tensor, to which it may write, and returns one of the same shape and
            dtype. Casts call it without autograd.

    Example:
        >>> whole = hmpx.formats.Custom("whole", torch.round)
        >>> hmpx.formats.quantize(torch.tensor([1.4, 2.6]), whole)
        tensor([1., 3.])
    """

    quantize: Callable[[Tensor], Tensor]

    def __post_init__(self) -> None:
        check_name(self.name)
        if not callable(self.quantize):
            raise OptionError(
                f"format {self.name}: quantize must be a function of a tensor, not {shown(self.quantize)}"
            )

    def own_function(self, x: Tensor) -> Tensor:
        """The user's function, whose result is checked."""
        found = self.quantize(x.clone())  # it may work in place
        if isinstance(found, Tensor) and found.shape == x.shape and found.dtype == x.dtype:
            return found
        what = type(found).__name__
        if isinstance(found, Tensor):
            what = f"{found.dtype} of shape {tuple(found.shape)}"
        raise OptionError(
            f"format {self.name}: its quantize must return {x.dtype} of shape {tuple(x.shape)}, "
            f"as it was given, not {what}"
        )

    def check_rounding(self, mode: object, overflow: object) -> None:
        super().check_rounding(mode, None)
        if mode != "nearest" or overflow is not None:
            what = "rounding" if mode != "nearest" else "overflow"
            raise OptionError(
                f"format {self.name}: {what} can't be chosen, its own function rounds to it"
            )

    def params(self, dtype: torch.dtype, mode: str, overflow: str | None) -> None:
        """Returns None: the function rounds."""


class Figures(NamedTuple):
    """The figures of a format: its properties of the same names."""

    significand_bits: int
    epsilon: float
    max: float
    smallest_normal: float
    smallest_subnormal: float


class Coding(NamedTuple):
    """How kernels encode values of one binary type, and decode codes."""

    kind: str  # in the names of the C functions
    spec: bytes  # their ``KIND_codes``
    can_encode: bool = True
    can_decode: bool = True
    memory: Any = None  # to which the spec points


class MeasuredFormat(NumberFormat):
    """A number format with figures and codes."""

    @property
    def _figures(self) -> Figures:
        raise NotImplementedError

    @property
    def significand_bits(self) -> int:
        """The most significand bits of a number, including the leading 1; in blocks, of a normal element."""
        return self._figures.significand_bits

    @property
    def epsilon(self) -> float:
        """The distance from 1 to the next number, or the least between neighbours; in blocks, of elements."""
        return self._figures.epsilon

    @property
    def max(self) -> float:
        """The largest finite number."""
        return self._figures.max

    @property
    def smallest_normal(self) -> float:
        """The smallest positive number with a full significand; the smallest if there are no subnormals."""
        return self._figures.smallest_normal

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive number."""
        return self._figures.smallest_subnormal

    def coding(self, binary: Binary) -> Coding | None:
        """Returns the coding of values of a binary type, for kernels; None if there are no such kernels."""
        return None


class CodedFormat(MeasuredFormat):
    """A number format whose values have one code each, an integer of ``bits`` bits."""

    if TYPE_CHECKING:

        @property  # of a code
        def bits(self) -> int: ...

    @property
    def is_exact_in_float32(self) -> bool:
        figures = self._figures
        is_precise = figures.significand_bits <= 24 and figures.smallest_subnormal >= 2.0**-149
        return is_precise and figures.max <= FLOAT32_MOST

    def codes_of(self, rounded: Tensor, binary: Binary) -> Tensor:
        """Returns the codes of the format's values, as integers of any width."""
        raise NotImplementedError

    def values_of(self, codes: Tensor) -> Tensor:
        """Returns the values of int64 codes, in float64."""
        raise NotImplementedError

    def encoded(self, values: Tensor, rounded: Tensor, binary: Binary) -> Tensor:
        return self.codes_of(rounded, binary).to(code_dtype(self.bits))

    def decoded(self, codes: Any) -> Tensor:
        check_codes(codes, self.name)
        # A graph can't contain the table.
        is_traced = torch.compiler.is_dynamo_compiling() or type(codes) not in PLAIN_TENSORS
        if self.bits > _TABLED or is_traced:
            return self._narrow_values(codes.to(torch.int64))
        if "values" not in self.derived:
            self.derived["values"] = Constant(self._all_values)
        table = self.derived["values"].on(codes.device)
        return taken(table, AND(codes.to(torch.int64), table.numel() - 1))

    def _all_values(self, device: torch.device) -> Tensor:
        codes = ARANGE(1 << self.bits, dtype=torch.int64, device="cpu")
        return self._narrow_values(codes).to(device)

    def _narrow_values(self, codes: Tensor) -> Tensor:
        values = self.values_of(codes)
        return CAST[torch.float32](values) if self.is_exact_in_float32 else values


def code_dtype(bits: int) -> torch.dtype:
    if bits <= 8:
        return torch.uint8
    if bits <= 16:
        return torch.uint16
    return torch.int32 if bits <= 32 else torch.int64


# --- checks of fields --------------------------------------------------------------------------


def check_name(name: object) -> None:
    """Raises `OptionError` if a format's name is not an identifier, or too long."""
    if type(name) is not str or not name.isidentifier():
        raise OptionError(
            f"a format's name must be an identifier such as float10_e5m4, not {shown(name)}"
        )
    if len(name) > _MOST_NAME:
        raise OptionError(
            f"a format's name must have at most {_MOST_NAME} characters, not {shown(name)}"
        )


def check_int(name: str, field: str, value: object, least: int, most: int) -> None:
    """Raises `OptionError` if a field of the format ``name`` is not an integer in these bounds."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise OptionError(
            f"format {name}: {field} must be an integer from {least} to {most}, not {shown(value)}"
        )


def check_codes(codes: object, name: str) -> None:
    """Raises `OptionError` if codes of the format ``name`` are not a tensor of integers."""
    if not isinstance(codes, Tensor):
        what: object = type(codes).__name__
    elif codes.is_floating_point() or codes.is_complex() or codes.dtype is torch.bool:
        what = codes.dtype
    else:
        return
    raise OptionError(f"format {name}: codes must be integers, not {what}")


def listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def hint(value: object, candidates: Iterable[str]) -> str:
    """Returns a suggestion among the candidates, as the end of a message."""
    return suggestion(str.__str__(value), candidates) if isinstance(value, str) else ""
