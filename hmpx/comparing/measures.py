"""Distance of a low-precision result from the float32 one, as sums that stay on the device.

Norms are computed so that squares can't overflow.
"""

from __future__ import annotations

import math
import operator
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from .. import number_formats

#: Number of values sampled where reading all would be too slow.
SAMPLE: Final = 4096

#: Binary exponents with their own count; others count as the nearest of them.
EXPONENTS: Final = range(-64, 64)


class Limits(NamedTuple):
    """The range of a low-precision type: largest number, smallest normal number, significand bits."""

    max: float
    smallest_normal: float
    bits: int


def limits(dtype: torch.dtype | number_formats.Format | None) -> Limits | None:
    """Returns the range of a type; None for formats without one, such as posits."""
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        info = torch.finfo(dtype)
        return Limits(info.max, info.smallest_normal, round(1 - math.log2(info.eps)))
    if number_formats.is_format(dtype) and isinstance(dtype, number_formats.Float):
        return Limits(dtype.max, dtype.smallest_normal, dtype.significand_bits)
    return None


class Measurement(NamedTuple):
    """Measurements of one result, in float32 on its device."""

    numbers: Tensor  # those of `Sums`
    exponents: Tensor  # number of sampled values with each binary exponent of `EXPONENTS`
    difference: (
        Tensor | None
    )  # low result minus reference, in bfloat16; 0 where either is not finite


class Sums(NamedTuple):
    """`Measurement.numbers` by name, accumulated over calls."""

    difference: float = 0.0  # norms
    reference: float = 0.0
    low: float = 0.0
    max_abs: float = 0.0  # the largest difference
    largest: float = 0.0  # magnitudes of the reference
    smallest: float = math.inf
    lost: float = 0.0  # number of results finite in the reference only
    ulp: float = 0.0  # mean error in units in the last place
    nonzero: float = 0.0  # number of nonzero values in the sample
    underflow: float = 0.0  # of these, of zeros in the low result

    def plus(self, other: Sums) -> Sums:
        """Returns the sums with one more call added."""
        adding: list[Any] = [*[math.hypot] * 3, max, max, min, *[operator.add] * 4]
        return Sums(*(add(a, b) for add, a, b in zip(adding, self, other, strict=True)))


def sample(tensor: Tensor) -> Tensor:
    """Returns up to `SAMPLE` evenly spaced values, as a view where possible."""
    flat = tensor.reshape(-1)
    return flat[:: -(-flat.numel() // SAMPLE)] if flat.numel() > SAMPLE else flat


def measured(reference: Tensor, low: Tensor, within: Limits | None) -> Measurement:
    """Compares a low-precision result with its float32 or float64 reference of the same shape.

    Equal infinities count as equal, and so do two NaNs. ``within`` is the range of the low-precision
    type.
    """
    if reference.dtype.is_complex:
        reference, low = (torch.view_as_real(each.resolve_conj()) for each in (reference, low))
    low = low.to(reference.dtype)
    difference = low - reference
    norm = torch.linalg.vector_norm(difference)
    lost = torch.zeros_like(norm)
    # On the CPU the exact test costs a hundred norms; elsewhere a synchronization costs as much.
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
    ulps = values.new_full((), math.nan)  # the mean error in units in the last place
    if within is not None:
        least = math.frexp(within.smallest_normal)[1] - 1
        steps = torch.ldexp(torch.ones_like(values), exponents.clamp(min=least) - (within.bits - 1))
        ulps = ((rounded - values).abs() / steps).mean()
    numbers = torch.stack(
        [
            norm,
            torch.linalg.vector_norm(reference),
            torch.linalg.vector_norm(low),
            largest(difference),
            largest(reference),
            torch.where(is_value, magnitudes, math.inf).min(),
            lost,
            ulps,
            is_value.sum().to(norm.dtype),
            (is_value & (rounded == 0)).sum().to(norm.dtype),
        ]
    ).float()
    places = exponents.clamp(EXPONENTS.start, EXPONENTS.stop - 1) - EXPONENTS.start
    counts = torch.bincount(places.long(), is_value.float(), minlength=len(EXPONENTS))
    return Measurement(numbers, counts.float(), difference.bfloat16())


def largest(tensor: Tensor) -> Tensor:
    """Returns the largest magnitude."""
    low, high = torch.aminmax(tensor)
    return torch.maximum(-low, high)


def effect(gradient: Tensor, difference: Tensor) -> Tensor:
    """Returns the first-order effect of a difference: a norm of gradient times difference.

    It is the root mean square of two estimates. The first sums the squares of all elements, as NVIDIA's
    AutoQuantize does, and assumes independent errors. The second first sums within each sample, since a
    rounded weight has the same error wherever it is used. NaN if the gradient is not finite where there is a
    difference.
    """
    product = gradient.detach().to(torch.promote_types(gradient.dtype, torch.float32)) * difference
    unknown = gradient - gradient  # NaN where it is not finite, else 0
    product = torch.where(difference == 0, torch.zeros_like(product), product + unknown)
    by_sample = product.flatten(1).sum(1) if product.dim() > 1 else product
    norm = torch.linalg.vector_norm
    return (torch.hypot(norm(product), norm(by_sample)) / math.sqrt(2)).float()
