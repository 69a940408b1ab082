"""Reports: a run's record as data, and the table and page of all hmpx results."""

from __future__ import annotations

from .cells import (
    NOTHING,
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
from .pages import (
    CHART_WIDTH,
    Written,
    bars,
    by_depth,
    chart_section,
    page,
    paragraphs,
    section,
    svg_chart,
    svg_text,
    svg_title,
    table_section,
    written,
)
from .report import Group, Groups, Report, Views, fixes, grouped, merged, read_json
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
    by_cost,
    totals,
)
from .table import Column, ReportTable
