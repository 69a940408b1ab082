"""Accuracy: the error of rounding to number formats, and effective precision."""

from __future__ import annotations

from .effective import contents as contents
from .effective import has_values as has_values
from .effective import is_readable as is_readable
from .effective import may_read as may_read
from .measuring import ErrorStatistics as ErrorStatistics
from .measuring import ErrorTable as ErrorTable
from .measuring import error as error
from .measuring import table as table
from .origins import Origins as Origins
from .picture import plot as plot
