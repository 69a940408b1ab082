"""Rounding by shared scales, group by group in numpy: slow, and written from the formats' definitions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from fractions import Fraction

import ml_dtypes
import numpy as np
import numpy.typing as npt

from hmpx.formats import Fixed, Float, Scaled, Table

Floats = npt.NDArray[np.float32]

_MOST = np.finfo(np.float32).max
_FLOATS = {
    "float8_e4m3fn": (ml_dtypes.float8_e4m3fn, 448.0),
    "float8_e5m2": (ml_dtypes.float8_e5m2, 57344.0),
    "float4_e2m1fn": (ml_dtypes.float4_e2m1fn, 6.0),
    "float16": (np.float16, 65504.0),
}


def groups(shape: tuple[int, ...], format: Scaled) -> Iterator[list[tuple[int, ...]]]:
    """Yields the indices of the values that share a scale."""
    found: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    axis = format.axis % len(shape)
    size = format.granularity
    for index in itertools.product(*map(range, shape)):
        if size == "tensor":
            key: tuple[int, ...] = ()
        elif size == "row":
            key = (*index[:axis], *index[axis + 1 :])
        elif size == "column":
            key = (index[axis],)
        else:
            key_list = list(index)
            if isinstance(size, tuple):
                other = len(shape) - 2 if axis == len(shape) - 1 else len(shape) - 1
                if len(shape) > 1:
                    key_list[other] //= size[0]
                key_list[axis] //= size[1]
            else:
                assert isinstance(size, int)
                key_list[axis] //= size
            key = tuple(key_list)
        found.setdefault(key, []).append(index)
    yield from found.values()


def largest_of(element: Float | Fixed | Table) -> float:
    """Returns the largest magnitude."""
    if isinstance(element, Table):
        return float(max(abs(np.float32(value)) for value in element.values))
    if isinstance(element, Fixed):
        return float(Fraction(2 ** (element.bits - 1) - 1, 2**element.fraction_bits))
    return _FLOATS[element.name][1]


def elements_of(x: Floats, element: Float | Fixed | Table) -> Floats:
    """Returns values that are divided by their scale, rounded to elements."""
    most = np.float32(largest_of(element))
    clipped = np.clip(x, -most, most)  # else float64 could not tell which value is nearer
    if isinstance(element, Table):
        known = np.array(element.values, np.float32)
        distance = np.abs(clipped.astype(np.float64)[:, None] - known.astype(np.float64))
        return known[distance.argmin(axis=1)]
    if isinstance(element, Fixed):
        step = np.float32(2.0**-element.fraction_bits)
        return np.rint(clipped / step) * step + np.float32(0)
    return clipped.astype(_FLOATS[element.name][0]).astype(np.float32)


def power_of_two(amax: np.float32, largest: float) -> np.float32:
    """Returns the smallest power of two by which nothing saturates, from 2**-126 on."""
    exponent = -126
    while Fraction(float(amax)) > Fraction(largest) * Fraction(2) ** exponent:
        exponent += 1
    return np.float32(2.0 ** min(exponent, 127 - (math.frexp(largest)[1] - 1)))


def quantized(x: Floats, format: Scaled) -> Floats:
    """Returns finite values rounded."""
    largest = largest_of(format.element)
    divisor = np.float32(largest)
    result = np.empty_like(x)
    whole = np.float32(1)
    if format.tensor_scale:
        whole = np.abs(x).max(initial=0) / np.float32(largest * 448)
        whole = np.clip(whole, np.float32(2.0**-121), None)
    for group in groups(x.shape, format):
        places = tuple(np.array(axis) for axis in zip(*group, strict=True))
        values = x[places]
        amax = np.abs(values).max()
        if format.scale_format == "float32":
            scale = np.clip(amax / divisor, np.float32(2.0**-126), None)
            divided = values / scale
        elif format.scale_format == "e8m0":
            scale = power_of_two(amax, largest)
            divided = values / scale
        else:
            raw = np.clip(amax / divisor / whole, np.float32(2.0**-6), np.float32(448))
            scale = raw.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
            divided = values * (np.float32(1) / whole / scale)
            scale = whole * scale
        result[places] = elements_of(divided.astype(np.float32), format.element) * scale
    return result
