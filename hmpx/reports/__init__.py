"""Reports: what was seen of a run, as data, and the views of it."""

from __future__ import annotations

from .cells import located, size
from .groups import Groups, grouped
from .reading import read_json
from .report import Report, merged
from .rows import Group, Row, Totals, Waste, added, added_waste, totals

__all__ = [
    "Group",
    "Groups",
    "Report",
    "Row",
    "Totals",
    "Waste",
    "added",
    "added_waste",
    "grouped",
    "located",
    "merged",
    "read_json",
    "size",
    "totals",
]
