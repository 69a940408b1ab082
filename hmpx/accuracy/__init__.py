"""Accuracy: the error of rounding to number formats, and effective precision."""

from __future__ import annotations

from .effective import contents, has_values, is_readable, may_read
from .measuring import ErrorStatistics, ErrorTable, error, table
from .origins import Origins
from .picture import plot
