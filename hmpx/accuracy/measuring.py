"""Measures what rounding costs: in float64, part by part, whatever the tensor's size, dtype and device."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import arguments
from ..arguments import is_a
from ..errors import OptionError, shown
from ..number_formats import FORMATS, Format, Table, decode, encode, get, rounder
from ..torch_state import without_casts
from .statistics import ErrorStatistics, ErrorTable

#: Values of a part: some twenty intermediate tensors of float64 are made of one.
_PART = 1 << 20


@dataclass
class _Sums:
    """What is added up over the parts of a tensor."""

    nan: float = 0.0
    inf: float = 0.0
    finite: float = 0.0
    nonzero: float = 0.0
    overflow: float = 0.0
    saturated: float = 0.0
    underflow: float = 0.0
    compared: float = 0.0
    related: float = 0.0
    relative: float = 0.0
    max_abs: float = 0.0
    max_rel: float = 0.0
    signal: float = 0.0
    noise: float = 0.0


def error(
    x: Tensor,
    format: str | torch.dtype | Format,
    rounding: str = "nearest",
    overflow: str | None = None,
    generator: torch.Generator | None = None,
) -> ErrorStatistics:
    """Returns what rounding ``x`` to a number format costs: every value counts, in float64 arithmetic.

    For the calls of a model, layer by layer, `hmpx.compare` says the same.

    Args:
        x: As for `quantize`.
        format: As for `quantize`.
        rounding: As for `quantize`.
        overflow: As for `quantize`.
        generator: As for `quantize`.

    Raises:
        OptionError: As for `quantize`.

    Example:
        >>> x = torch.linspace(-1, 1, 1001)
        >>> round(hmpx.formats.error(x, "float8_e4m3fn").sqnr_db, 2)
        32.55
        >>> print(hmpx.formats.error(x, "mxfp4_e2m1"))
        format     bits SQNR dB mean rel max rel max abs not finite clipped to zero
        mxfp4_e2m1 4.25   18.12    0.102       1   0.232          0  35.7 %  <0.1 %
    """
    if not isinstance(x, Tensor):
        raise OptionError(f"error takes a tensor, not {type(x).__name__}")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise OptionError(f"generator must be a torch.Generator, not {shown(generator)}")
    known = get(format)
    with without_casts(), torch.no_grad():
        x = x.detach()
        rounded = rounder(known, rounding, overflow, generator)(x)
        sums = _Sums()
        given = x.reshape(-1)
        parts = [given, rounded.reshape(-1), _is_clipped(known, x).reshape(-1)]
        for start in range(0, given.numel(), _PART):
            of_x, of_rounded, is_clipped = [part[start : start + _PART] for part in parts]
            _add(sums, of_x.double(), of_rounded.double(), is_clipped)
    return ErrorStatistics(
        format=known.name,
        bits=getattr(known, "bits", math.nan),
        rounding=str.__str__(rounding),
        count=x.numel(),
        nan=int(sums.nan),
        inf=int(sums.inf),
        overflow=_ratio(sums.overflow, sums.finite),
        saturated=_ratio(sums.saturated, sums.finite),
        underflow=_ratio(sums.underflow, sums.nonzero),
        sqnr_db=_decibel(sums.signal, sums.noise),
        max_abs=sums.max_abs if sums.compared else math.nan,
        max_rel=sums.max_rel if sums.related else math.nan,
        mean_rel=sums.relative / sums.related if sums.related else math.nan,
    )


def table(
    x: Tensor,
    formats: Iterable[str | torch.dtype | Format],
    rounding: str = "nearest",
    overflow: str | None = None,
    generator: torch.Generator | None = None,
) -> ErrorTable:
    """Returns what rounding ``x`` to each of several formats costs, as a table that prints itself.

    Args:
        x: As for `quantize`.
        formats: Names or formats, in the order of the rows.
        rounding: As for `quantize`.
        overflow: As for `quantize`.
        generator: As for `quantize`.

    Raises:
        OptionError: As for `quantize`; or ``formats`` is empty.

    Example:
        >>> x = torch.linspace(-1, 1, 1001)
        >>> found = hmpx.formats.table(x, ["e4m3", "e5m2", "posit8_2"])
        >>> [row.format for row in found.rows]
        ['float8_e4m3fn', 'float8_e5m2', 'posit8_2']
    """
    if is_a(formats, (str, torch.dtype, *FORMATS)):
        formats = [formats]  # type: ignore[list-item]
    asked = arguments.items("formats", formats, "a list of formats or their names")
    if not asked:
        raise OptionError("formats is empty; name at least one, such as 'float8_e4m3fn'")
    known = [get(each) for each in asked]
    return ErrorTable(tuple([error(x, each, rounding, overflow, generator) for each in known]))


def _is_clipped(format: Format, x: Tensor) -> Tensor:
    """Returns which values lie beyond what they can become."""
    element: Any = getattr(format, "element", None)
    if element is None:
        largest = getattr(format, "max", math.inf)
        return (x > largest) | (x < getattr(format, "min", -largest))
    # Beyond the largest element times their scale: products are rounded, the largest itself is no more.
    codes = encode(x, format)
    values, elements = decode(codes, format), decode(codes[0], element)
    least = element.min if isinstance(element, Table) else -element.max
    x, reached = x.double(), values.double() * (1 + 2.0**-20)
    is_above = (elements >= float(element.max)) & (x > reached)
    return is_above | ((elements <= float(least)) & (x < reached))


def _add(sums: _Sums, x: Tensor, rounded: Tensor, is_clipped: Tensor) -> None:
    """Adds what one part of a tensor costs: float64, of one dimension."""
    is_finite = x.isfinite()
    is_kept = is_finite & rounded.isfinite()
    is_nonzero = is_finite & (x != 0)
    is_related = is_kept & is_nonzero
    magnitude = torch.where(is_kept, x.abs(), 0.0)
    difference = torch.where(is_kept, (rounded - x).abs(), 0.0)
    relative = torch.where(is_related, difference / torch.where(is_related, magnitude, 1.0), 0.0)
    counted = {
        "nan": x.isnan(),
        "inf": x.isinf(),
        "finite": is_finite,
        "nonzero": is_nonzero,
        "overflow": is_finite & ~is_kept,
        "saturated": is_kept & is_clipped,
        "underflow": is_nonzero & (rounded == 0),
        "compared": is_kept,
        "related": is_related,
    }
    numbers = [each.sum(dtype=torch.float64) for each in counted.values()]
    largest, scale = difference.amax(), magnitude.amax()
    numbers += [relative.sum(), relative.amax(), largest, scale]
    numbers += [_norm(difference, largest), _norm(magnitude, scale)]
    found = torch.stack(numbers).tolist()
    for name, value in zip(counted, found, strict=False):
        setattr(sums, name, getattr(sums, name) + value)
    relative_sum, max_rel, max_abs, most, noise, signal = found[len(counted) :]
    sums.relative += relative_sum
    sums.max_rel, sums.max_abs = max(sums.max_rel, max_rel), max(sums.max_abs, max_abs)
    sums.noise = math.hypot(sums.noise, max_abs * noise)
    sums.signal = math.hypot(sums.signal, most * signal)


def _norm(values: Tensor, largest: Tensor) -> Tensor:
    """Returns the norm of values divided by the largest: their squares neither overflow nor vanish."""
    scaled = values / torch.where(largest == 0, 1.0, largest)
    return (scaled * scaled).sum().sqrt()


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _decibel(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf if signal else math.nan
    return 20 * (math.log10(signal) - math.log10(noise)) if signal else -math.inf
