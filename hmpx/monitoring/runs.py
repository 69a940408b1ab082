"""Files that `monitor` writes, and their page: lines over steps, and a map of rows and steps."""

from __future__ import annotations

import bisect
import html
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ..errors import HmpxError, OptionError, raised_here, short
from ..files import MONITORED, damaged, parsed, read, shaped
from ..reports import (
    CHART_WIDTH,
    ReportTable,
    Written,
    page,
    section,
    svg_chart,
    svg_text,
    svg_title,
)
from .alarms import ALARMS, limit_of
from .loggers import START

#: What a line of a file is: the header, or a step's figures.
_Line = dict[str, Any]

#: Rows of a map, lines of a chart, and columns of both.
_MOST_ROWS: Final = 40
_MOST_LINES: Final = 8
_MOST_COLUMNS: Final = 120


@dataclass(frozen=True)
class MonitoredRun(Written):
    """The steps of a file that `monitor` wrote; made by `read_run`.

    Attributes:
        name: The file's name.
        steps: Number of a step -> its figures by name.
        about: See [results](#results).
    """

    name: str
    steps: Mapping[int, Mapping[str, float]]
    about: Mapping[str, str] = field(default_factory=dict)

    def series(self, name: str) -> dict[int, float]:
        """Returns a figure by step."""
        return {step: found[name] for step, found in self.steps.items() if name in found}

    def first_beyond(self, alarms: Mapping[str, float] = ALARMS) -> dict[str, int]:
        """Returns the figures that leave their limits -> the first step in which one does, the earliest first."""
        found: dict[str, int] = {}
        for step, figures in sorted(self.steps.items()):
            for name, value in figures.items():
                if name not in found and value > limit_of(name, alarms):
                    found[name] = step
        return found

    def _data(self) -> Mapping[str, Any]:
        return {"hmpx_monitor": 1, "about": self.about, "steps": self.steps}

    def _table(self) -> ReportTable:
        rows = [
            (step, name, value) for step, of in self.steps.items() for name, value in of.items()
        ]
        return ReportTable.of(("step", "name", "value"), rows, ("step", "value"))

    def _page(self) -> str:
        return page_of([self])

    def __str__(self) -> str:
        beyond = self.first_beyond()
        lines = [
            f"{name}: over {limit_of(name, ALARMS):g} from step {step}"
            for name, step in beyond.items()
        ]
        return "\n".join([f"{self.name}: {len(self.steps)} checked steps", *lines])


def read_run(path: str | os.PathLike[str]) -> MonitoredRun:
    """Reads a file that `monitor` wrote; of steps that are there twice, since a run went on, the last one counts.

    Raises:
        OptionError: The file can't be read, or is not such a file.
    """
    name, steps, about = short(os.fspath(path)), dict[int, dict[str, float]](), dict[str, str]()
    lines = read(path, MONITORED).split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            found = shaped(parsed(line, name, MONITORED, number), dict[str, Any]) if line else {}
            if "hmpx_monitor" in found:
                if found["hmpx_monitor"] != 1:
                    raise ValueError(" is of another version of hmpx")
                about = about or shaped(found.get("about"), dict[str, str])
            elif number == 1:
                raise ValueError(" is not the line about the run")
            elif found:
                figures = shaped(found.get("figures"), dict[str, float])
                step = shaped(found.get("step"), int)
                steps[step] = {key: float(value) for key, value in figures.items()}
        except raised_here(HmpxError, ValueError, TypeError, OverflowError) as error:
            is_torn = number == len(lines) or lines[number].startswith(START)
            if number == 1 or not is_torn:
                raise damaged(f"{name}:{number}", MONITORED, error) from None
    if not steps:
        raise OptionError(f"{name}: holds no checked step; {MONITORED.remedy}")
    return MonitoredRun(Path(name).name, dict(sorted(steps.items())), about)


# --- the page ------------------------------------------------------------------------------------


def page_of(runs: Sequence[MonitoredRun]) -> str:
    """Returns the page of a run, or of several above each other."""
    series = [_by_kind(run) for run in runs]
    sections = [_beyond(runs)]
    for kind in dict.fromkeys(kind for each in series for kind in each):
        charts = [
            part
            for run, known in zip(runs, series, strict=True)
            for part in _charts(run, kind, known.get(kind, {}), several=len(runs) > 1)
        ]
        if charts:
            sections.append(section(re.sub(r"\W", "-", kind), _heading(kind), *charts))
    names = " and ".join(each.name for each in runs)
    return page(
        f"hmpx monitor: {names}", f"Precision over time: {names}", "".join(sections), runs[0].about
    )


def _by_kind(run: MonitoredRun) -> dict[str, dict[str, dict[int, float]]]:
    """Returns ``"gradient/underflow"`` -> ``"fc1/linear"`` -> the figure by step; and those of whole steps."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    split = {name: name.split("/")[1:] for of in run.steps.values() for name in of}
    for step, figures in run.steps.items():
        for name, value in figures.items():
            parts = split[name]
            rows = found.setdefault("/".join(parts[-2:]), {})
            rows.setdefault("/".join(parts[:-2]) or parts[-1], {})[step] = value
    return found


def _heading(kind: str) -> str:
    *of, figure = kind.split("/")
    return f"{figure} of each {of[0]}" if of else figure


def _beyond(runs: Sequence[MonitoredRun]) -> str:
    rows = [
        (run.name, step, name, f"{run.steps[step][name]:.3g}", limit_of(name, ALARMS))
        for run in runs
        for name, step in run.first_beyond().items()
    ]
    if not rows:
        return section(
            "beyond", "Beyond a limit", "<p>Nothing has left the limits of the default alarms.</p>"
        )
    table = ReportTable.of(
        ("run", "first step", "figure", "value", "limit"), rows, ("first step", "value", "limit")
    )
    return section("beyond", "Beyond a limit", table.to_html())


def _charts(
    run: MonitoredRun, kind: str, found: Mapping[str, dict[int, float]], *, several: bool
) -> Iterator[str]:
    found = {name: values for name, values in found.items() if any(values.values())}
    if not found:
        return
    if several:
        yield f"<h3>{html.escape(run.name)}</h3>"
    worst = sorted(found, key=lambda name: -max(found[name].values()))
    columns = _columns(sorted(run.steps))
    yield f'<div class="scroll chart">{_lines({n: found[n] for n in worst[:_MOST_LINES]}, columns, kind)}</div>'
    if len(found) > 1:
        shown = [name for name in found if name in worst[:_MOST_ROWS]]
        yield f'<div class="scroll chart">{_map({n: found[n] for n in shown}, columns, kind)}</div>'
    if len(found) > _MOST_ROWS:
        yield f'<p class="note">The {_MOST_ROWS} largest of {len(found)} rows are shown.</p>'


def _columns(steps: Sequence[int]) -> list[range]:
    """Returns ranges of checked steps, of which each is a column."""
    size = math.ceil(len(steps) / _MOST_COLUMNS) or 1
    parts = [steps[at : at + size] for at in range(0, len(steps), size)]
    return [range(part[0], part[-1] + 1) for part in parts]


def _in_columns(values: Mapping[int, float], columns: Sequence[range]) -> list[float | None]:
    """Returns the largest value of each column."""
    found: list[float | None] = [None] * len(columns)
    starts = [each.start for each in columns]
    for step, value in values.items():
        at = bisect.bisect_right(starts, step) - 1
        found[at] = max(value, found[at] or value)
    return found


_LEFT: Final = 220


def _x(index: int, columns: Sequence[range]) -> float:
    return _LEFT + index * (CHART_WIDTH - _LEFT - 10) / len(columns)


def _lines(rows: Mapping[str, Mapping[int, float]], columns: Sequence[range], kind: str) -> str:
    values = [value for of in rows.values() for value in of.values()]
    low, high = min(0.0, *values), max(0.0, *values)
    top, bottom = 10, 190

    def y(value: float) -> float:
        return bottom - (value - low) / ((high - low) or 1.0) * (bottom - top)

    parts = []
    for value in (low, (low + high) / 2, high):
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{CHART_WIDTH}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
        )
        parts.append(svg_text(_LEFT - 6, y(value) + 4, f"{value:.3g}", "end"))
    width = (CHART_WIDTH - _LEFT - 10) / len(columns) / 2
    for number, (name, of) in enumerate(rows.items()):
        found = _in_columns(of, columns)
        points = [
            f"{_x(i, columns) + width:.1f},{y(v):.1f}" for i, v in enumerate(found) if v is not None
        ]
        colour = f"hsl({number * 360 // _MOST_LINES} 70% 40%)"
        parts.append(
            f'<polyline points="{" ".join(points)}" fill="none" stroke-width="2" stroke="{colour}">'
            f"{svg_title(name)}</polyline>"
        )
        y_label = bottom + 40 + 16 * number
        key = f'<rect x="{_LEFT}" y="{y_label - 6}" width="16" height="3" fill="{colour}"/>'
        parts += [key, svg_text(_LEFT + 22, y_label, name)]
    parts += _steps(columns, bottom)
    return svg_chart(bottom + 40 + 16 * len(rows), html.escape(f"{kind} by step"), parts)


def _map(rows: Mapping[str, Mapping[int, float]], columns: Sequence[range], kind: str) -> str:
    values = [value for of in rows.values() for value in of.values()]
    low, high = min(values), max(values)
    height, width = 16, (CHART_WIDTH - _LEFT - 10) / len(columns)
    parts = []
    for number, (name, of) in enumerate(rows.items()):
        parts.append(
            svg_text(
                _LEFT - 6, number * height + 12, name if len(name) < 34 else f"…{name[-32:]}", "end"
            )
        )
        for index, value in enumerate(_in_columns(of, columns)):
            if value is not None:
                share = (value - low) / ((high - low) or 1.0)
                at = (
                    f"{columns[index][0]}"
                    if len(columns[index]) == 1
                    else f"{columns[index][0]} to {columns[index][-1]}"
                )
                parts.append(
                    f'<rect x="{_x(index, columns):.1f}" y="{number * height}" width="{width:.2f}" height="{height - 1}" '
                    f'fill="hsl(12 80% {96 - 56 * share:.0f}%)">{svg_title(f"{name}, step {at}: {value:.3g}")}</rect>'
                )
    parts += _steps(columns, height * len(rows))
    return svg_chart(height * len(rows) + 30, html.escape(f"map of {kind}"), parts)


def _steps(columns: Sequence[range], bottom: int) -> Iterable[str]:
    yield svg_text(_LEFT, bottom + 20, f"step {columns[0][0]}")
    yield svg_text(CHART_WIDTH - 4, bottom + 20, f"step {columns[-1][-1]}", "end")
