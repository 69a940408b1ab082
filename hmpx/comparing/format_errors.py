"""The rounding error of a tensor: measured in float64, part by part, and as a table.

For tensors of any size, dtype and device.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from .. import arguments
from ..errors import OptionError, fielded, shown
from ..number_formats import FORMATS, CodedFormat, Format, Table, decode, encode, get, rounder
from ..reports import Column, ReportTable, count, paragraphs
from ..tensors import CAST
from ..torch_state import without_casts

#: Values per part: each part makes some twenty intermediate float64 tensors.
_PART = 1 << 20


#: The figures of each part; the last one is the sum of relative errors.
_COUNTED = (
    "nan", "inf", "finite", "nonzero", "overflow", "saturated", "underflow", "compared", "related",
    "relative",
)  # fmt: skip


def error(
    x: Tensor,
    format: str | torch.dtype | Format,
    rounding: str = "nearest",
    overflow: str | None = None,
    generator: torch.Generator | None = None,
) -> ErrorStatistics:
    """Measures the error of rounding ``x`` to a number format, over every value, in float64.

    Arguments and errors are those of `quantize`. For each layer of a model, use `hmpx.compare`.

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
        given = x.reshape(-1)
        parts = [given, rounded.reshape(-1), _is_clipped(known, x).reshape(-1)]
        sums = dict.fromkeys(_COUNTED, 0.0)
        max_rel = max_abs = noise = signal = 0.0
        for start in range(0, given.numel(), _PART):
            *counts, rel, largest, scale, noise_norm, norm = _measured(
                *[part[start : start + _PART] for part in parts]
            )
            sums = {name: sums[name] + n for name, n in zip(_COUNTED, counts, strict=True)}
            max_rel, max_abs = max(max_rel, rel), max(max_abs, largest)
            noise = math.hypot(noise, largest * noise_norm)
            signal = math.hypot(signal, scale * norm)
    return ErrorStatistics(
        format=known.name,
        bits=getattr(known, "bits", math.nan),
        rounding=str.__str__(rounding),
        count=x.numel(),
        nan=int(sums["nan"]),
        inf=int(sums["inf"]),
        overflow=_ratio(sums["overflow"], sums["finite"]),
        saturated=_ratio(sums["saturated"], sums["finite"]),
        underflow=_ratio(sums["underflow"], sums["nonzero"]),
        sqnr_db=_decibel(signal, noise),
        max_abs=max_abs if sums["compared"] else math.nan,
        max_rel=max_rel if sums["related"] else math.nan,
        mean_rel=sums["relative"] / sums["related"] if sums["related"] else math.nan,
    )


def table(
    x: Tensor,
    formats: Iterable[str | torch.dtype | Format],
    rounding: str = "nearest",
    overflow: str | None = None,
    generator: torch.Generator | None = None,
) -> ErrorTable:
    """Measures the error of rounding ``x`` to several formats, as a table that prints itself.

    ``formats`` are in the order of the rows. Other arguments and errors are those of `quantize`.

    Example:
        >>> x = torch.linspace(-1, 1, 1001)
        >>> found = hmpx.formats.table(x, ["e4m3", "e5m2", "posit8_2"])
        >>> [row.format for row in found.rows]
        ['float8_e4m3fn', 'float8_e5m2', 'posit8_2']
    """
    if isinstance(formats, (str, torch.dtype, *FORMATS)):
        formats = [formats]  # type: ignore[list-item]
    asked = arguments.items("formats", formats, "a list of formats or their names")
    if not asked:
        raise OptionError("formats is empty; name at least one, such as 'float8_e4m3fn'")
    known = [get(each) for each in asked]
    return ErrorTable(tuple([error(x, each, rounding, overflow, generator) for each in known]))


def _is_clipped(format: Format, x: Tensor) -> Tensor:
    element: Any = getattr(format, "element", None)
    if element is None:
        largest = getattr(format, "max", math.inf)
        return (x > largest) | (x < getattr(format, "min", -largest))
    # Beyond the largest element times its scale: products are rounded, the largest itself is fine.
    codes = encode(x, format)
    values, elements = decode(codes, format), decode(codes[0], element)
    least = element.min if isinstance(element, Table) else -element.max
    x, reached = x.double(), values.double() * (1 + 2.0**-20)
    is_above = (elements >= float(element.max)) & (x > reached)
    return is_above | ((elements <= float(least)) & (x < reached))


def _measured(x: Tensor, rounded: Tensor, is_clipped: Tensor) -> list[float]:
    """Returns a part's `_COUNTED`, largest relative and absolute error, largest value, and norms."""
    x, rounded = x.double(), rounded.double()
    is_finite = x.isfinite()
    is_kept = is_finite & rounded.isfinite()
    is_nonzero = is_finite & (x != 0)
    is_related = is_kept & is_nonzero
    magnitude = torch.where(is_kept, x.abs(), 0.0)
    difference = torch.where(is_kept, (rounded - x).abs(), 0.0)
    relative = torch.where(is_related, difference / torch.where(is_related, magnitude, 1.0), 0.0)
    counted = [
        x.isnan(), x.isinf(), is_finite, is_nonzero, is_finite & ~is_kept, is_kept & is_clipped,
        is_nonzero & (rounded == 0), is_kept, is_related,
    ]  # fmt: skip
    largest, scale = difference.amax(), magnitude.amax()
    numbers = [
        *[each.sum(dtype=torch.float64) for each in counted],
        relative.sum(),
        relative.amax(),
    ]
    numbers += [largest, scale, _norm(difference, largest), _norm(magnitude, scale)]
    found: list[float] = torch.stack(numbers).tolist()
    return found


def _norm(values: Tensor, largest: Tensor) -> Tensor:
    """Returns the norm of values divided by the largest: the squares neither overflow nor vanish."""
    scaled = values / torch.where(largest == 0, 1.0, largest)
    return (scaled * scaled).sum().sqrt()


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _decibel(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf if signal else math.nan
    return 20 * (math.log10(signal) - math.log10(noise)) if signal else -math.inf


# --- the table -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ErrorStatistics:
    """The error of rounding one tensor to one number format.

    Errors are of the values that are finite before and after; NaN if there are none.

    Attributes:
        format: The format's name.
        bits: Bits per value, including shared scales; NaN for a `Custom` format.
        rounding: The rounding mode.
        count: Number of values in the tensor.
        nan: Number of values that were NaN before; not counted below.
        inf: Number of values that were infinite before; not counted below.
        overflow: Share of the finite values that became infinity or NaN.
        saturated: Share of the finite values that were clipped to the format's range, or to that of
            their block's scale.
        underflow: Share of the nonzero finite values that became zero.
        sqnr_db: Signal to quantization noise ratio, in decibel. Infinity if rounding changed
            nothing.
        max_abs: The largest difference.
        max_rel: The largest difference relative to the value, over nonzero values.
        mean_rel: The mean difference relative to the value, over nonzero values.

    Example:
        >>> found = hmpx.formats.error(torch.tensor([1.0, 1.1, 500.0, 1e-9]), "float8_e4m3fn")
        >>> found.overflow, found.underflow
        (0.25, 0.25)
        >>> round(found.sqnr_db, 1)
        35.5
    """

    format: str
    bits: float
    rounding: str
    count: int
    nan: int
    inf: int
    overflow: float
    saturated: float
    underflow: float
    sqnr_db: float
    max_abs: float
    max_rel: float
    mean_rel: float

    __repr__ = fielded

    def __str__(self) -> str:
        return str(ErrorTable((self,)))


@dataclass(frozen=True, repr=False)
class ErrorTable:
    """The errors of rounding one tensor to several number formats. Printed, it is a table.

    Attributes:
        rows: A row for each format, in the order given.

    Example:
        >>> print(hmpx.formats.table(torch.tensor([1.0, 1.1, 500.0, 1e-9]), ["e4m3", "e5m2"]))
        format        bits SQNR dB mean rel max rel max abs not finite clipped to zero
        float8_e4m3fn    8   35.49    0.341       1   0.025     25.0 %       0  25.0 %
        float8_e5m2      8   32.40    0.279       1      12          0       0  25.0 %
    """

    rows: tuple[ErrorStatistics, ...]

    def __repr__(self) -> str:
        return f"<hmpx.formats.ErrorTable of {len(self.rows)} formats; print it>"

    def __str__(self) -> str:
        return "\n".join([str(_table(self.rows)), *_notes(self.rows)])

    def _repr_html_(self) -> str:
        return _table(self.rows).to_html() + paragraphs(_notes(self.rows))


def _table(rows: tuple[ErrorStatistics, ...]) -> ReportTable:
    modes = {row.rounding for row in rows}
    names = [row.format if len(modes) == 1 else f"{row.format}, {row.rounding}" for row in rows]
    return ReportTable(
        [
            Column("format", names, is_number=False),
            Column("bits", [row.bits for row in rows], lambda bits: _number(bits, "4g")),
            Column("SQNR dB", [row.sqnr_db for row in rows], lambda each: _number(each, "2f")),
            Column("mean rel", [row.mean_rel for row in rows], _number),
            Column("max rel", [row.max_rel for row in rows], _number),
            Column("max abs", [row.max_abs for row in rows], _number),
            Column("not finite", [row.overflow for row in rows], _share),
            Column("clipped", [row.saturated for row in rows], _share),
            Column("to zero", [row.underflow for row in rows], _share),
        ]
    )


def _notes(rows: tuple[ErrorStatistics, ...]) -> list[str]:
    if not rows or not (rows[0].nan or rows[0].inf):
        return []
    first = rows[0]
    return [
        f"of {count(first.count)} values {count(first.nan)} were NaN and {count(first.inf)} infinite; "
        "they are left out"
    ]


def _number(value: float, how: str = "3g") -> str:
    return "-" if math.isnan(value) else f"{value:.{how}}"


def _share(value: float) -> str:
    """Returns ``"12.3 %"``; ``"0"`` for zero, ``"<0.1 %"`` for very few."""
    if value == 0:
        return "0"
    return "<0.1 %" if value < 0.001 else f"{100 * value:.1f} %"


# --- a picture -----------------------------------------------------------------------------------

#: The smallest binary exponent of float64.
_LEAST: Final = -1074
_EXPONENTS: Final = 1024 - _LEAST

#: Formats with more bits have too many values to list; only their range is drawn.
_LISTED_BITS: Final = 16


def plot(x: Tensor, format: str | torch.dtype | Format) -> Any:
    """Draws where magnitudes of ``x`` lie, and where the format has values.

    Each bar is the share of values between one power of two and the next; the line is the number of
    format values there, or the range for formats with scales or more than 16 bits. Values left of
    it become zero or the smallest value; values right of it overflow.

    Args:
        x: As for `quantize`. Zeros, NaN and infinities are ignored.
        format: As for `quantize`.

    Returns:
        A ``matplotlib.figure.Figure``: notebooks show it; ``.savefig("x.png")`` writes it.

    Raises:
        OptionError: There is no such format, ``x`` is not a tensor of floats or has no value to draw, or
            matplotlib isn't installed.

    Example:
        >>> figure = hmpx.formats.plot(torch.randn(1000), "float8_e4m3fn")
        >>> figure.axes[0].get_xlabel()
        'binary exponent'
    """
    known = get(format)
    if not isinstance(x, Tensor):
        raise OptionError(f"plot takes a tensor, not {type(x).__name__}")
    if x.dtype not in CAST:
        raise OptionError(
            f"plot takes tensors of {', '.join(str(dtype) for dtype in CAST)}, not {x.dtype}; "
            "cast it first"
        )
    try:
        figure_module = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise OptionError(
            "formats.plot needs matplotlib, which is not installed; pip install 'hmpx[plot]'"
        ) from error
    shares = exponent_shares(x)
    if not shares:
        raise OptionError("plot: no value is finite and other than zero: there is nothing to draw")
    figure = figure_module.Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.bar(shares.keys(), shares.values(), width=0.9, align="edge", color="#7aa6c2")
    axes.set(xlabel="binary exponent", ylabel="share of the values", title=known.name)
    steps = values_by_exponent(known)
    if steps:
        line = axes.twinx()
        exponents = range(min(steps), max(steps) + 1)
        heights = [steps.get(exponent, 0) for exponent in exponents]
        line.stairs(heights, [*exponents, max(steps) + 1], color="#b03a2e", linewidth=1.5)
        line.set_ylabel("values of the format", color="#b03a2e")
        line.set_ylim(bottom=0)
    else:
        for end in (getattr(known, each, math.nan) for each in ("smallest_subnormal", "max")):
            if end > 0 and math.isfinite(end):
                axes.axvline(math.log2(end), color="#b03a2e", linewidth=1.5)
    return figure


def exponent_shares(x: Tensor) -> dict[int, float]:
    """Returns binary exponent -> its share of the finite nonzero values."""
    with without_casts(), torch.no_grad():
        flat = x.detach().reshape(-1)
        counts = torch.zeros(_EXPONENTS, dtype=torch.int64)
        for start in range(0, flat.numel(), _PART):
            part = flat[start : start + _PART].double()
            part = part[part.isfinite() & (part != 0)]
            places = torch.frexp(part).exponent.long() - (1 + _LEAST)
            counts += torch.bincount(places, minlength=_EXPONENTS).cpu()
    listed: list[int] = counts.tolist()
    total = sum(listed)
    return {place + _LEAST: each / total for place, each in enumerate(listed) if each}


def values_by_exponent(format: Format) -> dict[int, int]:
    """Returns binary exponent -> number of a format's positive values there; empty if too many."""
    if not isinstance(format, CodedFormat) or format.bits > _LISTED_BITS:
        return {}
    with without_casts():
        values: list[float] = decode(torch.arange(1 << format.bits), format).tolist()
    found: dict[int, int] = {}
    for value in set(values):
        if value > 0 and math.isfinite(value):
            exponent = math.frexp(value)[1] - 1
            found[exponent] = found.get(exponent, 0) + 1
    return found
