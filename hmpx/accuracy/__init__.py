"""Accuracy: the error of rounding a tensor to number formats, as figures, a table and a picture."""

from __future__ import annotations

from .measuring import ErrorStatistics, ErrorTable, error, table
from .picture import plot

__all__ = ["ErrorStatistics", "ErrorTable", "error", "plot", "table"]
