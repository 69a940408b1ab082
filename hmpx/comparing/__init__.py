"""`compare`: each call in low precision beside float32; errors of formats, and precision that values have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..later import shown_later
from .comparing import compare
from .comparison import Comparison
from .rows import ComparedGradient, ComparedSite, Magnitudes

if TYPE_CHECKING:
    from .effective import (
        BELOW_FP16,
        Origins,
        all_contents,
        contents,
        has_values,
        is_readable,
        may_read,
    )
    from .format_errors import ErrorStatistics, ErrorTable, error, plot, table
else:
    __getattr__ = shown_later(
        __name__,
        {
            "effective": "BELOW_FP16 Origins all_contents contents has_values is_readable may_read",
            "format_errors": "ErrorStatistics ErrorTable error plot table",
        },
    )
