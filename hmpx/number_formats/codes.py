"""Codes of number formats: the bits in which hardware stores them, as integer tensors.

Knows what a code means; how to round to a format's values is in ``rounding``.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from ..errors import OptionError
from ..tensors import CAST, Constant
from .families import Block, Custom, Fixed, Float, Format, Posit, Table
from .quantization import check_dense, quantize
from .registered import get
from .rounding import FP32, FP64, Binary, BlockPlan, TablePlan, plan, to_float32

#: Formats of up to so many bits are decoded by a table of all their values.
_TABLED: Final = 16

# As they were before anything was patched.
_AND, _OR, _XOR = torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor
_LEFT, _RIGHT = torch.bitwise_left_shift, torch.bitwise_right_shift
_ADD, _SUB, _MUL, _WHERE, _TAKE = torch.add, torch.sub, torch.mul, torch.where, torch.take
_EQ, _LT, _GE, _GT, _NE = torch.eq, torch.lt, torch.ge, torch.gt, torch.ne
_CLAMP, _MOVEDIM, _ARANGE = torch.clamp, torch.movedim, torch.arange


_PLAIN: Final = frozenset({Tensor, torch.nn.Parameter})


def encode(
    x: Tensor,
    format: str | Format,
    rounding: str = "nearest",
    overflow: str | None = None,
    generator: torch.Generator | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns the codes of ``x`` rounded to a format.

    Codes of up to 8 bits are uint8, of up to 16 uint16, of up to 32 int32, whose sign is the highest
    bit, and longer ones int64. Floats have ml_dtypes' codes, posits those of their standard, fixed
    point has two's complement, and a table the indices of its values.

    In blocks, codes are the elements', and their scales have codes, too: uint8, the shared exponent
    plus 127; 255 says that the block held infinity or NaN. Scales have x's shape, but along the axis
    of blocks there are as many as blocks.

    NaN becomes the format's own. Where there is none it becomes a zero, in floats with the other
    sign as ml_dtypes has it; in tables the value nearest to zero.

    Args:
        x: As for `quantize`.
        format: As for `quantize`, but no `Custom` one.
        rounding: As for `quantize`.
        overflow: As for `quantize`.
        generator: As for `quantize`.

    Returns:
        Codes in x's shape; for a `Block` format the pair (codes, scales).

    Raises:
        OptionError: As for `quantize`; or the format is a `Custom` one, which has no codes.

    Example:
        >>> hmpx.formats.encode(torch.tensor([1.0, -2.0]), "float8_e4m3fn")
        tensor([ 56, 192], dtype=torch.uint8)
    """
    format = _coded(get(format))
    if not isinstance(x, Tensor):
        raise OptionError(f"encode takes a tensor, not {type(x).__name__}")
    check_dense(x)
    with torch.no_grad():
        work = x
        if x.dtype in CAST and x.dtype is not torch.float64:
            work = CAST[torch.float32 if holds_in_float32(format) else torch.float64](x)
        rounded = quantize(work.detach(), format, rounding, overflow, generator)
        binary = FP64 if rounded.dtype is torch.float64 else FP32
        if isinstance(format, Block):
            return _encode_blocks(rounded, format, binary)
        if isinstance(format, Float):
            codes = _encode_float(rounded, format, binary)
        elif isinstance(format, Posit):
            codes = _encode_posit(rounded, format, binary)
        elif isinstance(format, Fixed):
            scaled = _MUL(rounded, math.ldexp(1.0, format.fraction_bits))
            codes = scaled.nan_to_num_(nan=0.0).to(torch.int64)
            codes = codes.bitwise_and_((1 << format.bits) - 1)
        else:
            codes = _encode_table(rounded, format, binary)
        return codes.to(code_dtype(format.bits))


def decode(codes: Tensor | tuple[Tensor, Tensor], format: str | Format) -> Tensor:
    """Returns the values that codes stand for.

    Args:
        codes: Integers as `encode` returns them; for a `Block` format the pair (codes, scales).
        format: A format, or the name of a registered one; no `Custom` one.

    Returns:
        float32, or float64 if float32 lacks some of the format's values.

    Raises:
        OptionError: There is no such format, or it has no codes, or ``codes`` are none.

    Example:
        >>> hmpx.formats.decode(torch.tensor([56, 192], dtype=torch.uint8), "float8_e4m3fn")
        tensor([ 1., -2.])
    """
    format = _coded(get(format))
    if isinstance(format, Block):
        if not isinstance(codes, tuple | list) or len(codes) != 2:
            raise OptionError(f"format {format.name}: decode takes the pair (codes, scales)")
        for part in codes:
            _check_codes(part, format)
        return _decode_blocks(codes[0], codes[1], format)
    _check_codes(codes, format)
    assert isinstance(codes, Tensor)
    is_traced = torch.compiler.is_dynamo_compiling() or type(codes) not in _PLAIN
    if format.bits > _TABLED or is_traced:  # a graph can't hold the table
        return _values(codes.to(torch.int64), format)
    table = _table(format).on(codes.device)
    return _TAKE(table, _AND(codes.to(torch.int64), table.numel() - 1))


def holds_in_float32(format: Format) -> bool:
    """Whether every value of a format is one of float32."""
    if isinstance(format, Float):
        return (
            format.mantissa_bits <= 23
            and format.max_exponent <= 127
            and format.smallest_subnormal >= 2.0**-149
        )
    if isinstance(format, Posit):
        return format.significand_bits <= 24 and format.max_exponent <= 126
    if isinstance(format, Fixed):
        return format.bits <= 25
    if isinstance(format, Table):
        limit = torch.finfo(torch.float32).max
        return all(abs(value) <= limit and to_float32(value) == value for value in format.values)
    return True


def _coded(format: Format) -> Float | Posit | Fixed | Block | Table:
    if isinstance(format, Custom):
        raise OptionError(
            f"format {format.name} is given by a function and has no codes; quantize rounds to it"
        )
    return format


def _check_codes(codes: object, format: Format) -> None:
    if (
        not isinstance(codes, Tensor)
        or codes.is_floating_point()
        or codes.is_complex()
        or codes.dtype is torch.bool
    ):
        what = codes.dtype if isinstance(codes, Tensor) else type(codes).__name__
        raise OptionError(f"format {format.name}: codes must be integers, not {what}")


def code_dtype(bits: int) -> torch.dtype:
    """Returns the dtype that holds codes of so many bits."""
    if bits <= 8:
        return torch.uint8
    if bits <= 16:
        return torch.uint16
    return torch.int32 if bits <= 32 else torch.int64


def _encode_float(rounded: Tensor, format: Float, binary: Binary) -> Tensor:
    """Returns the codes of values of the format, as integers of the binary's width."""
    mantissa, dropped = format.mantissa_bits, binary.mantissa - format.mantissa_bits
    bits = rounded.view(binary.integer)
    whole = _AND(bits, binary.magnitude)
    codes = _RIGHT(whole, dropped).sub_((binary.bias - format.exponent_bias) << mantissa)
    if format.min_exponent > 1 - binary.bias:
        # Adding a power of two leaves multiples of the smallest number in the lowest bits.
        power = math.ldexp(1.0, format.min_exponent + dropped)
        low = _ADD(whole.view(binary.dtype), power).view(binary.integer)
        low = low.sub_(binary.bits_of(power))
        is_low = _LT(whole, (format.min_exponent + binary.bias) << binary.mantissa)
        codes = _WHERE(is_low, low, codes)
    sign = _AND(_RIGHT(bits, binary.width - 1), 1)
    top = ((1 << format.exponent_bits) - 1) << mantissa
    is_nan = _GT(whole, binary.infinity)
    if format.kind == "ieee":
        codes = codes.masked_fill_(_EQ(whole, binary.infinity), top)
        codes = codes.masked_fill_(is_nan, top | (1 << (mantissa - 1)))
    elif format.kind == "fn":
        codes = codes.masked_fill_(is_nan, top | ((1 << mantissa) - 1))
    elif format.kind == "fnuz":
        codes = codes.masked_fill_(is_nan, 0)
        sign = sign.masked_fill_(is_nan, 1)
    else:
        codes = codes.masked_fill_(is_nan, 0)
        sign = _WHERE(is_nan, _SUB(1, sign), sign)
    return _OR(codes, _LEFT(sign, format.bits - 1))


def _encode_posit(rounded: Tensor, format: Posit, binary: Binary) -> Tensor:
    places = binary.mantissa + format.es
    bits = rounded.view(binary.integer)
    whole = _AND(bits, binary.magnitude)
    scaled = _SUB(whole, binary.bias << binary.mantissa)
    scaled = scaled.clamp_(
        *(e << binary.mantissa for e in (-format.max_exponent, format.max_exponent))
    )
    regime = _RIGHT(scaled, places)
    kept = _SUB(format.bits - 3, _XOR(regime, _RIGHT(regime, 31))).clamp_(min=0)
    # 1...10 above 1, 0...01 below
    run = _WHERE(_LT(regime, 0), 1, _SUB(_LEFT(1, _CLAMP(_ADD(regime, 2), min=0)), 2))
    rest = _RIGHT(_AND(scaled, (1 << places) - 1), _SUB(places, kept))
    codes = _OR(_LEFT(run, kept), rest)
    codes = codes.masked_fill_(_EQ(regime, format.bits - 2), (1 << (format.bits - 1)) - 1)
    codes = _WHERE(_LT(bits, 0), -codes, codes).to(torch.int64)
    codes = codes.bitwise_and_((1 << format.bits) - 1).masked_fill_(_EQ(whole, 0), 0)
    return codes.masked_fill_(_GT(whole, binary.infinity), 1 << (format.bits - 1))


def _encode_table(rounded: Tensor, format: Table, binary: Binary) -> Tensor:
    nearest = plan(format, binary.dtype, "nearest", "saturate")
    assert isinstance(nearest, TablePlan)
    return nearest.index(_WHERE(_NE(rounded, rounded), 0.0, rounded))


def _encode_blocks(rounded: Tensor, format: Block, binary: Binary) -> tuple[Tensor, Tensor]:
    # Rounding leaves the shared exponent as it is: the largest element keeps its exponent.
    exact = plan(format, binary.dtype, "nearest", "saturate")
    assert isinstance(exact, BlockPlan)
    rows = _MOVEDIM(rounded.view(1), 0, -1) if rounded.dim() == 0 else rounded
    rows = _MOVEDIM(rows, format.axis if rounded.dim() else -1, -1).contiguous()
    blocks = exact.split(rows)
    exponent, is_bad = exact.exponents(blocks)
    codes = _encode_float(exact.scaled(blocks, exponent, None), format.element, binary)
    codes = codes.flatten(-2)[..., : rows.shape[-1]].to(code_dtype(format.element.bits))
    scales = _ADD(exponent, 127).masked_fill_(is_bad, 255).squeeze(-1).to(torch.uint8)
    if rounded.dim() == 0:
        return codes.view(()), scales
    return _MOVEDIM(codes, -1, format.axis), _MOVEDIM(scales, -1, format.axis)


def _table(format: Float | Posit | Fixed | Table) -> Constant:
    """Returns the values of all codes."""
    table: Constant | None = format.derived.get(_table)
    if table is None:
        codes = 1 << format.bits
        made = Constant(lambda device: _all_values(codes, format).to(device))
        table = format.derived.setdefault(_table, made)
    return table


def _all_values(count: int, format: Float | Posit | Fixed | Table) -> Tensor:
    return _values(_ARANGE(count, dtype=torch.int64, device="cpu"), format)


def _values(codes: Tensor, format: Float | Posit | Fixed | Table) -> Tensor:
    """Returns the values of int64 codes."""
    if isinstance(format, Float):
        values = _decode_float(codes, format)
    elif isinstance(format, Posit):
        values = _decode_posit(codes, format)
    elif isinstance(format, Fixed):
        half = 1 << (format.bits - 1)
        signed = _SUB(_AND(_ADD(codes, half), 2 * half - 1), half)
        values = _MUL(signed.to(torch.float64), format.epsilon)
    else:
        known = torch.tensor(format.values, dtype=torch.float64, device=codes.device)
        values = _TAKE(known, _CLAMP(codes, max=len(format.values) - 1))
        values = values.masked_fill_(_GE(codes, len(format.values)), math.nan)
    return CAST[torch.float32](values) if holds_in_float32(format) else values


def _decode_float(codes: Tensor, format: Float) -> Tensor:
    mantissa = format.mantissa_bits
    field = _AND(_RIGHT(codes, mantissa), (1 << format.exponent_bits) - 1)
    fraction = _AND(codes, (1 << mantissa) - 1)
    sign = _AND(_RIGHT(codes, format.bits - 1), 1)
    bits = _LEFT(_ADD(field, FP64.bias - format.exponent_bias), FP64.mantissa)
    normal = _OR(bits, _LEFT(fraction, FP64.mantissa - mantissa)).view(torch.float64)
    step = math.ldexp(1.0, format.min_exponent - mantissa) if format.subnormals else 0.0
    values = _WHERE(_EQ(field, 0), _MUL(fraction.to(torch.float64), step), normal)
    if format.kind == "ieee":
        is_top = _EQ(field, (1 << format.exponent_bits) - 1)
        values = values.masked_fill_(is_top, math.inf)
        values = values.masked_fill_(_AND(is_top, _NE(fraction, 0)), math.nan)
    elif format.kind == "fn":
        whole = _AND(codes, (1 << (format.bits - 1)) - 1)
        values = values.masked_fill_(_EQ(whole, (1 << (format.bits - 1)) - 1), math.nan)
    elif format.kind == "fnuz":
        values = values.masked_fill_(
            _EQ(_AND(codes, (1 << format.bits) - 1), 1 << (format.bits - 1)), math.nan
        )
    return _OR(values.view(torch.int64), _LEFT(sign, 63)).view(torch.float64)


def _decode_posit(codes: Tensor, format: Posit) -> Tensor:
    bits, es = format.bits, format.es
    codes = _AND(codes, (1 << bits) - 1)
    sign = _RIGHT(codes, bits - 1)
    whole = _AND(_WHERE(_EQ(sign, 1), -codes, codes), (1 << (bits - 1)) - 1)
    lead = _RIGHT(whole, bits - 2)
    # The run of leading bits ends at the highest bit that differs from the first.
    differing = _WHERE(_EQ(lead, 1), _XOR(whole, (1 << (bits - 1)) - 1), whole)
    highest = _RIGHT(differing.to(torch.float64).view(torch.int64), FP64.mantissa)
    highest = _WHERE(_EQ(differing, 0), -1, _SUB(highest, FP64.bias))
    run = _SUB(bits - 2, highest)
    regime = _WHERE(_EQ(lead, 1), _SUB(run, 1), -run)
    left = _CLAMP(highest, min=0)
    rest = _AND(whole, _SUB(_LEFT(1, left), 1))
    # Exponent bits that were cut off are zeros: fill up to 63 - es bits, all of which then count.
    rest = _LEFT(rest, _SUB(FP64.mantissa + es, left))
    exponent = _ADD(_LEFT(regime, es), _RIGHT(rest, FP64.mantissa))
    fraction = _AND(rest, (1 << FP64.mantissa) - 1)
    values = _OR(_LEFT(_ADD(exponent, FP64.bias), FP64.mantissa), fraction).view(torch.float64)
    values = _WHERE(_EQ(sign, 1), -values, values)
    values = values.masked_fill_(_EQ(codes, 0), 0.0)
    return values.masked_fill_(_EQ(codes, 1 << (bits - 1)), math.nan)


def _decode_blocks(codes: Tensor, scales: Tensor, format: Block) -> Tensor:
    elements = decode(codes, format.element)
    is_scalar = elements.dim() == 0
    if is_scalar:
        elements, scales = elements.view(1), scales.view(1)
    axis = -1 if is_scalar else format.axis
    length = elements.shape[axis]
    expected = list(elements.shape)
    expected[axis] = -(-length // format.size)
    if list(scales.shape) != expected:
        raise OptionError(
            f"format {format.name}: codes of shape {tuple(codes.shape)} have scales of shape "
            f"{tuple(expected)}, not {tuple(scales.shape)}"
        )
    exponent = _SUB(scales.to(torch.int64), 127)
    power = _LEFT(_ADD(exponent, FP64.bias), FP64.mantissa).view(torch.float64)
    power = power.masked_fill_(_EQ(scales, 255), math.nan)
    power = power.repeat_interleave(format.size, axis).narrow(axis, 0, length)
    values = CAST[torch.float32](_MUL(CAST[torch.float64](elements), power))
    return values.view(()) if is_scalar else values
