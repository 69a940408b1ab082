"""Reports: what was seen of a run, as data, and the views of it."""

from __future__ import annotations

from .report import Group, Report, Row, Totals, Waste, added, grouped, merged, read_json, totals

__all__ = [
    "Group",
    "Report",
    "Row",
    "Totals",
    "Waste",
    "added",
    "grouped",
    "merged",
    "read_json",
    "totals",
]
