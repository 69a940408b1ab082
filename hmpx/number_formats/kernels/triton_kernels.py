"""Rounding on GPUs: what ``rounding_kernels.c`` does for floats, posits and fixed point, in Triton.

Imported where a tensor on a GPU is rounded and Triton is installed, by `gpu`. Bit for bit as torch ops.
"""

# ruff: noqa: PLR0917  # a kernel has the parameters that it has

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")

if TYPE_CHECKING:
    constexpr = Any
else:
    constexpr = tl.constexpr

_TOWARD_ZERO, _UP, _DOWN = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
_NEAREST, _AWAY, _STOCHASTIC = tl.constexpr(0), tl.constexpr(4), tl.constexpr(5)

_MAGNITUDE, _INF = tl.constexpr(0x7FFFFFFF), tl.constexpr(0x7F800000)
_SIGN, _NAN = tl.constexpr(-(2**31)), tl.constexpr(0x7FC00000)

#: Elements of a program.
_SIZE: Final = 1024


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _float_of(bits: Any) -> Any:
    return bits.to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _bits_of(x: Any) -> Any:
    return x.to(tl.int32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _noise(place: Any, keys: Any) -> Any:
    key0 = tl.load(keys).to(tl.int32).to(tl.uint32, bitcast=True)
    key1 = tl.load(keys + 1).to(tl.int32).to(tl.uint32, bitcast=True)
    mixed = place.to(tl.int32).to(tl.uint32, bitcast=True) ^ key0
    mixed = (mixed ^ (mixed >> 16)) * tl.full((), 0x7FEB352D, tl.uint32)
    mixed = mixed ^ key1
    mixed = (mixed ^ (mixed >> 15)) * tl.full((), 0x846CA68B, tl.uint32)
    return mixed ^ (mixed >> 16)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _uniform(noise: Any) -> Any:
    """Above 0 and up to 1."""
    return ((noise >> 8).to(tl.int32) + 1).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _grows(bits: Any, mode: constexpr) -> Any:
    if mode == _UP:
        found = bits >= 0
    elif mode == _DOWN:
        found = bits < 0
    else:
        found = (bits & 0) != 0
    return found


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _signed(found: Any, bits: Any, negative_zero: Any) -> Any:
    return _float_of(found | tl.where((found != 0) | (negative_zero != 0), bits & _SIGN, 0))


@triton.jit(do_not_specialize=list(range(3, 11)))  # type: ignore[untyped-decorator,unused-ignore]
def _round_float(
    source: Any,
    target: Any,
    keys: Any,
    lowest: Any,
    highest: Any,
    lift: Any,
    lowest_power: Any,
    most: Any,
    beyond: Any,
    negative_zero: Any,
    count: Any,
    mode: constexpr,
    size: constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    bits = _bits_of(tl.load(source + place, mask=place < count, other=0.0))
    whole = bits & _MAGNITUDE
    field = bits & _INF
    power_bits = tl.where(field < lowest, lowest_power, tl.minimum(field, highest) + lift)
    power = _float_of(power_bits)
    magnitude = _float_of(whole)
    rounded = (magnitude + power) - power
    over = tl.full((size,), 0, tl.int32) + beyond
    step_bits = power_bits - (23 << 23)
    step = _float_of(step_bits)
    is_below = _bits_of(rounded) < whole
    is_above = _bits_of(rounded) > whole
    if mode == _AWAY:
        rounded = tl.where(magnitude - rounded == step * 0.5, rounded + step, rounded)
    elif mode == _STOCHASTIC:
        # The step is a power of two, by whose inverse is multiplied as exactly as it divides.
        inverse = _float_of((254 << 23) - step_bits)
        below = tl.where(is_above, rounded - step, rounded)
        is_drawn = (magnitude - below) * inverse >= _uniform(_noise(place, keys))
        rounded = tl.where(is_drawn, below + step, below)
    elif mode != _NEAREST:
        grows = _grows(bits, mode)
        higher = tl.where(grows & is_below, rounded + step, rounded)
        rounded = tl.where(~grows & is_above, rounded - step, higher)
        over = tl.where(grows | (whole == _INF), over, most)
    found = tl.where(
        rounded > _float_of(tl.full((size,), 0, tl.int32) + most), over, _bits_of(rounded)
    )
    result = _signed(found, bits, negative_zero)
    tl.store(target + place, result, mask=place < count)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _cut(bits: Any, whole: Any, unit: Any, noise: Any, mode: constexpr) -> Any:
    half = unit >> 1
    if mode == _NEAREST:
        is_odd = tl.where((whole & unit) != 0, 1, 0)
        added = tl.where(half != 0, half - 1 + is_odd, 0)
    elif mode == _AWAY:
        added = half
    elif mode == _STOCHASTIC:
        added = noise.to(tl.int32, bitcast=True) & (unit - 1)
    else:
        added = tl.where(_grows(bits, mode), unit - 1, 0)
    return (whole + added) & -unit


@triton.jit(do_not_specialize=list(range(3, 10)))  # type: ignore[untyped-decorator,unused-ignore]
def _round_bits(
    source: Any,
    target: Any,
    keys: Any,
    unit: Any,
    lowest_unit: Any,
    most: Any,
    beyond: Any,
    negative_zero: Any,
    shift: Any,
    count: Any,
    mode: constexpr,
    size: constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    bits = _bits_of(tl.load(source + place, mask=place < count, other=0.0))
    whole = bits & _MAGNITUDE
    noise = place
    if mode == _STOCHASTIC:
        noise = _noise(place, keys)
    rounded = _cut(bits, whole, tl.where(whole < (1 << 23), lowest_unit, unit), noise, mode)
    over = tl.full((size,), 0, tl.int32) + beyond
    if (mode == _UP) | (mode == _DOWN) | (mode == _TOWARD_ZERO):
        over = tl.where(_grows(bits, mode) | (whole == _INF), over, most)
    rounded = tl.where(rounded > most, over, rounded)
    rounded = tl.where(whole > _INF, whole, rounded)
    result = _signed(rounded, bits, negative_zero)
    tl.store(target + place, result, mask=place < count)


@triton.jit(do_not_specialize=list(range(3, 10)))  # type: ignore[untyped-decorator,unused-ignore]
def _round_posit(
    source: Any,
    target: Any,
    keys: Any,
    code_bits: Any,
    es: Any,
    least: Any,
    most: Any,
    parity: Any,
    last: Any,
    count: Any,
    mode: constexpr,
    size: constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    bits = _bits_of(tl.load(source + place, mask=place < count, other=0.0))
    whole = bits & _MAGNITUDE
    scaled = tl.minimum(tl.maximum(whole, least), most) - (127 << 23)
    regime = scaled >> (23 + es)
    length = tl.minimum(tl.where(regime < 0, ~regime, regime), code_bits - 3)
    shift = length + es + 26 - code_bits
    unit = tl.full((size,), 1, tl.int32) << shift
    grows = _grows(bits, mode)
    added = scaled
    if mode == _NEAREST:
        added += (unit >> 1) - 1 + (((scaled + parity) >> shift) & 1)
    elif mode == _AWAY:
        added += unit >> 1
    elif mode != _STOCHASTIC:
        added += tl.where(grows, unit - 1, 0)
    rounded = tl.minimum((added & -unit) + (127 << 23), most)
    is_tiny = whole < least
    if mode == _STOCHASTIC:
        below = tl.where(is_tiny, 0, rounded)
        above = tl.where(is_tiny, least, rounded + unit)
        low = _float_of(below)
        share = tl.div_rn(_float_of(tl.minimum(whole, most)) - low, _float_of(above) - low)
        rounded = tl.where(share >= _uniform(_noise(place, keys)), above, below)
    elif (mode != _NEAREST) & (mode != _AWAY):
        rounded = tl.where(is_tiny & ~grows, 0, rounded)
    rounded = tl.where(whole == 0, 0, rounded)
    rounded = tl.where(whole > last, _NAN, rounded)
    result = _signed(rounded, bits, 0)
    tl.store(target + place, result, mask=place < count)


@triton.jit(do_not_specialize=list(range(3, 8)))  # type: ignore[untyped-decorator,unused-ignore]
def _round_fixed(
    source: Any,
    target: Any,
    keys: Any,
    scale: Any,
    step: Any,
    least: Any,
    most: Any,
    count: Any,
    mode: constexpr,
    size: constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    x = tl.load(source + place, mask=place < count, other=0.0)
    scaled = x * scale
    below = tl.floor(scaled)
    if mode == _DOWN:
        whole = below
    elif mode == _UP:
        whole = tl.ceil(scaled)
    elif mode == _STOCHASTIC:
        whole = tl.where(scaled - below >= _uniform(_noise(place, keys)), below + 1, below)
    elif mode == _NEAREST:
        magnitude = tl.abs(scaled)
        near = tl.where(magnitude < 8388608.0, (magnitude + 8388608.0) - 8388608.0, magnitude)
        whole = tl.where(scaled < 0, -near, near)
    else:
        whole = tl.where(scaled < 0, tl.ceil(scaled), below)
        if mode == _AWAY:
            away = tl.where(scaled < 0, whole - 1, whole + 1)
            whole = tl.where(tl.abs(scaled - whole) >= 0.5, away, whole)
    whole = tl.where(whole < least, least, whole)
    whole = tl.where(whole > most, most, whole)
    result = whole * step
    result = tl.where(result == 0, 0.0, result)
    tl.store(target + place, result, mask=place < count)


_KERNELS: Final = {
    "float": _round_float,
    "bits": _round_bits,
    "posit": _round_posit,
    "fixed": _round_fixed,
}

#: Kinds of plans that there are kernels for.
KINDS: Final = frozenset(_KERNELS)


def launch(
    kind: str, mode: int, numbers: tuple[Any, ...], source: Any, target: Any, keys: Any
) -> None:
    """Rounds.

    Args:
        kind: One of `KINDS`.
        mode: The number of the rounding mode.
        numbers: Of the plan's spec, without the mode.
        source: float32, without memory between its elements.
        target: The same, of the same strides.
        keys: For stochastic rounding a tensor of two numbers on the same device.
    """
    count = source.numel()
    _KERNELS[kind][(triton.cdiv(count, _SIZE),)](
        source, target, keys, *numbers, count, mode=mode, size=_SIZE
    )
