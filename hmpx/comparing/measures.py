"""How far a low-precision result is from the one in float32; sums only, kept on the device.

Norms do not overflow where sums of squares would.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ..number_formats import Float, Format
from ..tensors import is_floating

#: How many values of a tensor are looked at where all would cost too much.
SAMPLE: Final = 4096

#: Binary exponents that are counted one by one; others count as the nearest of them.
EXPONENTS: Final = range(-64, 64)


class Limits(NamedTuple):
    """The range of a low-precision type: the largest number, the smallest normal one, bits of the significand."""

    max: float
    smallest_normal: float
    bits: int


def limits(dtype: torch.dtype | Format | None) -> Limits | None:
    """Returns the range of a type; None of formats that have none, such as posits."""
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        info = torch.finfo(dtype)
        return Limits(info.max, info.smallest_normal, round(1 - math.log2(info.eps)))
    if isinstance(dtype, Float):
        return Limits(dtype.max, dtype.smallest_normal, dtype.significand_bits)
    return None


class Measured(NamedTuple):
    """What is measured of one result: numbers on its device, as float32.

    Attributes:
        numbers: Norms of difference, reference and low result; their largest difference; the largest and the
            smallest magnitude of the reference; how many results are finite in float32 only; the mean
            error in units in the last place; how many values of the sample are not zero, and how many of
            these are zero in the low result.
        exponents: How many values of the sample have each binary exponent of `EXPONENTS`.
        difference: Low result minus reference, in bfloat16; zero where either is not finite.
    """

    numbers: Tensor
    exponents: Tensor
    difference: Tensor


class Sums(NamedTuple):
    """`Measured.numbers` by name, and added up over calls."""

    difference: float = 0.0
    reference: float = 0.0
    low: float = 0.0
    max_abs: float = 0.0
    largest: float = 0.0
    smallest: float = math.inf
    lost: float = 0.0
    ulp: float = 0.0
    nonzero: float = 0.0
    underflow: float = 0.0

    def plus(self, other: Sums) -> Sums:
        """Returns sums that include one more call."""
        return Sums(*(add(a, b) for add, a, b in zip(_ADDED, self, other, strict=True)))


#: How each of `Sums` is added up.
_ADDED: Final[tuple[Callable[[float, float], float], ...]] = (
    *[math.hypot] * 3,
    max,
    max,
    min,
    *[operator.add] * 4,
)


def sample(tensor: Tensor) -> Tensor:
    """Returns up to `SAMPLE` values, at even distances; a view where that is possible."""
    flat = tensor.reshape(-1)
    return flat[:: -(-flat.numel() // SAMPLE)] if flat.numel() > SAMPLE else flat


def measured(reference: Tensor, low: Tensor, within: Limits | None) -> Measured:
    """Compares a low-precision result with its reference in float32 or float64, of the same shape.

    Equal infinities do not differ, and NaN does not differ from NaN. ``within`` is the low-precision type's
    range.
    """
    if reference.dtype.is_complex:
        reference, low = torch.view_as_real(reference), torch.view_as_real(low)
    low = low.to(reference.dtype)
    difference = low - reference
    norm = torch.linalg.vector_norm(difference)
    lost = torch.zeros_like(norm)
    # On the CPU the exact test costs a hundred times what the norm does, and elsewhere to wait does.
    if norm.device.type != "cpu" or not math.isfinite(norm.item()):
        is_finite = torch.isfinite(reference)
        both = is_finite & torch.isfinite(low)
        lost = (is_finite & ~both).sum().to(norm.dtype)
        zero = torch.zeros((), dtype=reference.dtype, device=reference.device)
        reference, low = torch.where(both, reference, zero), torch.where(both, low, zero)
        difference = low - reference
        norm = torch.linalg.vector_norm(difference)
    values, rounded = sample(reference), sample(low)
    magnitudes = values.abs()
    is_value = magnitudes > 0
    exponents = torch.frexp(magnitudes).exponent - 1
    numbers = torch.stack(
        [
            norm,
            torch.linalg.vector_norm(reference),
            torch.linalg.vector_norm(low),
            largest(difference),
            largest(reference),
            torch.where(is_value, magnitudes, math.inf).min(),
            lost,
            _ulp(values, rounded, exponents, within),
            is_value.sum().to(norm.dtype),
            (is_value & (rounded == 0)).sum().to(norm.dtype),
        ]
    ).float()
    places = (exponents[is_value] if norm.device.type == "cpu" else exponents).clamp(
        EXPONENTS.start, EXPONENTS.stop - 1
    ) - EXPONENTS.start
    weights = None if norm.device.type == "cpu" else is_value.float()
    counts = torch.bincount(places.long(), weights, minlength=len(EXPONENTS))
    return Measured(numbers, counts.float(), difference.bfloat16())


def largest(tensor: Tensor) -> Tensor:
    """Returns the largest magnitude."""
    low, high = torch.aminmax(tensor)
    return torch.maximum(-low, high)


def _ulp(values: Tensor, rounded: Tensor, exponents: Tensor, within: Limits | None) -> Tensor:
    """Returns the mean error in units in the last place of the low-precision type."""
    if within is None:
        return values.new_full((), math.nan)
    least = math.frexp(within.smallest_normal)[1] - 1
    ulps = torch.ldexp(torch.ones_like(values), exponents.clamp(min=least) - (within.bits - 1))
    return ((rounded - values).abs() / ulps).mean()


def effect(gradient: Tensor, difference: Tensor) -> Tensor:
    """Returns what a difference does, to first order: a norm of gradient times difference.

    The root mean square of two estimates. One adds up the squares of all elements, by which NVIDIA's
    AutoQuantize ranks layers, and takes their errors for independent; the other first adds up what belongs to
    one sample, since a rounded weight errs alike wherever it is used. What has no finite gradient counts
    as nothing.
    """
    product = gradient.detach().to(torch.promote_types(gradient.dtype, torch.float32)) * difference
    if product.dtype.is_complex:
        product = torch.view_as_real(product)
    found = _effect(product)
    if found.device.type != "cpu" or not math.isfinite(found.item()):
        found = _effect(torch.nan_to_num(product, nan=0.0, posinf=0.0, neginf=0.0))
    return found.float()


def _effect(product: Tensor) -> Tensor:
    by_sample = product.flatten(1).sum(1) if product.dim() > 1 else product
    norm = torch.linalg.vector_norm
    return torch.hypot(norm(product), norm(by_sample)) / math.sqrt(2)


def disagreements(reference: Tensor, low: Tensor) -> Tensor:
    """Returns how many integers or bools differ, as float32."""
    assert not is_floating(reference)
    return (reference != low).sum().float()
