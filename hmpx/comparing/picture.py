"""A picture of a tensor's magnitudes and a number format's values."""

from __future__ import annotations

import importlib
import math
from typing import Any, Final

import torch
from torch import Tensor

from ..errors import OptionError
from ..number_formats import CodedFormat, Format, decode, get
from ..tensors import CAST
from ..torch_state import without_casts

#: The smallest binary exponent of float64.
_LEAST: Final = -1074
_EXPONENTS: Final = 1024 - _LEAST

#: Formats with more bits have too many values to list; only their range is drawn.
_LISTED_BITS: Final = 16

_PART: Final = 1 << 20


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
        for edge in _range(known):
            axes.axvline(edge, color="#b03a2e", linewidth=1.5)
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


def _range(format: Format) -> list[float]:
    """Returns the binary logarithms of a format's smallest and largest value, if it has them."""
    ends = [getattr(format, "smallest_subnormal", math.nan), getattr(format, "max", math.nan)]
    return [math.log2(end) for end in ends if end > 0 and math.isfinite(end)]
