"""What rounding a tensor costs, as data, and as a table for terminals and notebooks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..reports import Column, Table, count, paragraphs

#: No more digits are shown: two tensors of the same kind differ in the next one.
_DIGITS = 3


@dataclass(frozen=True)
class ErrorStatistics:
    """What rounding one tensor to one number format costs.

    Errors are of the values that are finite before and after; NaN where there are none.

    Attributes:
        format: The format's name.
        bits: Bits a value takes, shared scales included; NaN of a `Custom` format.
        rounding: The rounding mode.
        count: How many values the tensor has.
        nan: How many of them were NaN before, and
        inf: how many infinite: neither counts in what follows.
        overflow: Share of the finite values that became infinity or NaN.
        saturated: Share of the finite values that lie beyond the format's largest, or its least, and are
            finite after rounding: clipped. In blocks beyond what their scale allows.
        underflow: Share of the finite values other than zero that became zero.
        sqnr_db: Signal to quantization noise ratio, in decibel: 6 more for each bit of a significand.
            Infinity if nothing was rounded.
        max_abs: The largest difference.
        max_rel: The largest difference relative to the value, and
        mean_rel: their mean, over values other than zero.

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

    def __str__(self) -> str:
        return str(ErrorTable((self,)))


@dataclass(frozen=True, repr=False)
class ErrorTable:
    """What rounding one tensor to several number formats costs. Printed, it is a table.

    Attributes:
        rows: A row for each format, in the order asked for; a list of them makes a pandas.DataFrame.

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
        """Returns the table that notebooks show."""
        return _table(self.rows).to_html() + paragraphs(_notes(self.rows))


def _table(rows: tuple[ErrorStatistics, ...]) -> Table:
    modes = {row.rounding for row in rows}
    names = [row.format if len(modes) == 1 else f"{row.format}, {row.rounding}" for row in rows]
    return Table(
        [
            Column("format", names, is_number=False),
            Column("bits", [row.bits for row in rows], lambda bits: _number(bits, 4)),
            Column("SQNR dB", [row.sqnr_db for row in rows], _decibel),
            Column("mean rel", [row.mean_rel for row in rows], _number),
            Column("max rel", [row.max_rel for row in rows], _number),
            Column("max abs", [row.max_abs for row in rows], _number),
            Column("not finite", [row.overflow for row in rows], _share),
            Column("clipped", [row.saturated for row in rows], _share),
            Column("to zero", [row.underflow for row in rows], _share),
        ]
    )


def _notes(rows: tuple[ErrorStatistics, ...]) -> list[str]:
    """Returns what else there is to say of the tensor, which is the same in all rows."""
    if not rows or not (rows[0].nan or rows[0].inf):
        return []
    first = rows[0]
    return [
        f"of {count(first.count)} values {count(first.nan)} were NaN and {count(first.inf)} infinite; "
        "they are left out"
    ]


def _number(value: float, digits: int = _DIGITS) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}g}"


def _decibel(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"


def _share(value: float) -> str:
    """Returns ``"12.3 %"``; ``"0"`` of none, ``"<0.1 %"`` of few."""
    if value == 0:
        return "0"
    return "<0.1 %" if value < 0.001 else f"{100 * value:.1f} %"
