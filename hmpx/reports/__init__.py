"""Reports: what was seen of a run, as data, and the views of it."""

from __future__ import annotations

from .cells import (
    clean,
    count,
    located,
    share,
    short_dtype,
    size,
    without_end,
    without_start,
    wrapped,
)
from .export import csv_lines
from .files import plain, write, written
from .groups import Groups, grouped
from .memory import KINDS, Memory, Moment, saved_text
from .pages import page_file, rendered
from .reading import read_json
from .report import Report, merged
from .rows import Group, Row, Totals, Waste, add_up, added, added_waste, totals
from .tables import Column, column_rows

__all__ = [
    "KINDS",
    "Column",
    "Group",
    "Groups",
    "Memory",
    "Moment",
    "Report",
    "Row",
    "Totals",
    "Waste",
    "add_up",
    "added",
    "added_waste",
    "clean",
    "column_rows",
    "count",
    "csv_lines",
    "grouped",
    "located",
    "merged",
    "page_file",
    "plain",
    "read_json",
    "rendered",
    "saved_text",
    "share",
    "short_dtype",
    "size",
    "totals",
    "without_end",
    "without_start",
    "wrapped",
    "write",
    "written",
]
