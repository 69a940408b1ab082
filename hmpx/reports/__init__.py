"""Reports: a run's record as data, and the table and page of all hmpx results."""

from __future__ import annotations

from .cells import clean as clean
from .cells import count as count
from .cells import exponential as exponential
from .cells import located as located
from .cells import share as share
from .cells import short_dtype as short_dtype
from .cells import size as size
from .cells import without_end as without_end
from .cells import without_start as without_start
from .cells import wrapped as wrapped
from .groups import Group as Group
from .groups import Groups as Groups
from .groups import grouped as grouped
from .pages import CHART_WIDTH as CHART_WIDTH
from .pages import Written as Written
from .pages import by_depth as by_depth
from .pages import chart_section as chart_section
from .pages import page as page
from .pages import paragraphs as paragraphs
from .pages import section as section
from .pages import svg_chart as svg_chart
from .pages import svg_text as svg_text
from .pages import svg_title as svg_title
from .pages import table_section as table_section
from .pages import written as written
from .report import Report as Report
from .report import Views as Views
from .report import merged as merged
from .report import read_json as read_json
from .rows import KINDS as KINDS
from .rows import Memory as Memory
from .rows import Moment as Moment
from .rows import Row as Row
from .rows import Totals as Totals
from .rows import Waste as Waste
from .rows import add_up as add_up
from .rows import added as added
from .rows import added_waste as added_waste
from .rows import totals as totals
from .table import Column as Column
from .table import Table as Table
