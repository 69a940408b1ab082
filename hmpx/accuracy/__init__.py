"""Accuracy: the error of rounding to number formats, and effective precision."""

from __future__ import annotations

from .effective import contents, is_readable, may_read
from .measuring import ErrorStatistics, ErrorTable, error, table
from .origins import Origins
from .picture import plot

__all__ = [
    "ErrorStatistics",
    "ErrorTable",
    "Origins",
    "contents",
    "error",
    "is_readable",
    "may_read",
    "plot",
    "table",
]
