"""Reports: a run's record as data, and the table and page of all hmpx results."""

from __future__ import annotations

from .cells import (
    clean,
    count,
    exponential,
    located,
    share,
    short_dtype,
    size,
    without_end,
    without_start,
    wrapped,
)
from .files import Written, write, written
from .groups import Group, Groups, grouped
from .pages import page, paragraphs, section, table_section
from .report import Report, Views, merged, read_json
from .rows import (
    KINDS,
    Memory,
    Moment,
    Row,
    Totals,
    Waste,
    add_up,
    added,
    added_waste,
    totals,
)
from .table import Column, Table

__all__ = [
    "KINDS",
    "Column",
    "Group",
    "Groups",
    "Memory",
    "Moment",
    "Report",
    "Row",
    "Table",
    "Totals",
    "Views",
    "Waste",
    "Written",
    "add_up",
    "added",
    "added_waste",
    "clean",
    "count",
    "exponential",
    "grouped",
    "located",
    "merged",
    "page",
    "paragraphs",
    "read_json",
    "section",
    "share",
    "short_dtype",
    "size",
    "table_section",
    "totals",
    "without_end",
    "without_start",
    "wrapped",
    "write",
    "written",
]
