"""How tables show values: counts, bytes, seconds, shares, and users' text."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable
from decimal import Decimal
from typing import Any, Final

import torch

from .. import places
from ..errors import printable
from ..tensors import short_name

#: Maximum width of a text line.
WIDTH: Final = 80

#: The text of a cell without a value.
NOTHING: Final = "-"


# --- numbers -------------------------------------------------------------------------------------


def count(number: int) -> str:
    """Returns ``"12,345"``, ``"1.2 M"``, ``"3.4e+27"``."""
    return f"{number:,}" if number < 1_000_000 else _scaled(number, "")


def size(byte_count: int) -> str:
    """Returns ``"0 B"``, ``"3.8 kB"``, ``"38 MB"``: powers of 1000."""
    return _scaled(byte_count, "B")


def _scaled(number: int, unit: str) -> str:
    for power, prefix in enumerate(("", "k", "M", "G", "T", "P", "E")):
        scale = 1000**power
        tenths = (20 * number + scale) // (2 * scale)
        if power and tenths < 100:
            return f"{tenths // 10}.{tenths % 10} {prefix}{unit}"
        rounded = (2 * number + scale) // (2 * scale)
        if rounded < 1000:
            return f"{rounded} {prefix}{unit}"
    return f"{Decimal(number):.1e} {unit}".rstrip()


def duration(seconds: float | None) -> str:
    """Returns ``"1.2 ms"``; ``"-"`` if not measured."""
    if seconds is None:
        return NOTHING
    unit, scale = next(
        (each for each in (("s", 1.0), ("ms", 1e3)) if abs(seconds) * each[1] >= 1), ("us", 1e6)
    )
    value = seconds * scale
    return f"{value:.1f} {unit}" if abs(value) < 10 else f"{value:.0f} {unit}"


def share(part: float, whole: float) -> str:
    """Returns ``"38 %"``; ``"<1 %"`` and ``">99 %"`` for shares that round to all or nothing."""
    if whole <= 0:
        return NOTHING
    percent = 100 * (part / whole)
    if 0 < percent < 1:
        return "<1 %"
    return ">99 %" if 99 < percent < 100 else f"{percent:.0f} %"


def exponential(value: float) -> str:
    """Returns ``"1.8e-03"``, ``"0"``, ``"inf"``; ``"-"`` for NaN."""
    if math.isnan(value):
        return NOTHING
    return "0" if value == 0 else f"{value:.1e}"


# --- text ----------------------------------------------------------------------------------------


def clean(text: str) -> str:
    """Returns text for a table cell: `printable`, and cut if long."""
    return printable(text[:2_000])


def located(location: str) -> str:
    """Returns a location relative to the current directory or to the folder of installed packages."""
    return clean(places.located(location))


def dtypes(names: Iterable[str]) -> str:
    """Returns the distinct dtypes by short name: ``"fp32+bf16"``; ``"-"`` for none."""
    short = dict.fromkeys(short_dtype(name) for name in names if name)
    return "+".join(short) or NOTHING


def short_dtype(name: str) -> str:
    """Returns ``"bf16"`` for ``"bfloat16"``; a format's own name."""
    dtype = getattr(torch, name, None)
    return short_name(dtype) if isinstance(dtype, torch.dtype) else clean(name)


def without_end(text: str, columns: int) -> str:
    """Returns text with its end cut to fit ``columns``: ``"scaled_dot_prod.."``."""
    if len(text) <= columns:
        return text
    return text[: max(0, columns - 2)] + ".."[:columns]


def without_start(text: str, columns: int) -> str:
    """Returns text with its start cut to fit ``columns``: ``"..models/train.py:12"``."""
    return without_end(text[::-1], columns)[::-1]


def wrapped(text: str, indent: str = "", columns: int = WIDTH) -> list[str]:
    """Returns text in lines of at most ``columns``, broken at spaces if possible."""
    return textwrap.wrap(
        text,
        columns,
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
        replace_whitespace=False,
        expand_tabs=False,
    )


def plain(value: Any) -> Any:
    """Returns a JSON value; non-finite numbers become ``"nan"`` or ``"inf"``."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, (list, tuple)) else value
