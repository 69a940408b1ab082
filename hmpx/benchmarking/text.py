"""A benchmark as plain text of 80 columns: a table, and a verdict."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..reports import Column, clean, column_rows, size, wrapped
from .variants import BASE
from .verdict import broken, verdict

if TYPE_CHECKING:
    from .result import Bench, Measured

_NOTHING = "-"

#: What is less is shown in the next smaller unit.
_ROUNDED_TO_ONE = 0.9995


def text(bench: Bench) -> str:
    """Returns the benchmark as plain text."""
    return "\n".join(_lines(bench))


def _lines(bench: Bench) -> Iterator[str]:
    yield headline(bench)
    yield ""
    yield from ("".join(cells).rstrip() for cells in column_rows(_columns(bench)))
    yield ""
    yield from wrapped(verdict(bench))
    for line in broken(bench):
        yield from wrapped(line)
    for each in bench.variants:
        if each.error is not None:
            where = f", at {clean(each.error_location)}" if each.error_location else ""
            yield from wrapped(f"{each.label} failed: {clean(each.error)}{where}")
    for note in bench.notes:
        yield from wrapped(note)


def headline(bench: Bench) -> str:
    """Returns what was measured where."""
    runs = "1 run" if bench.runs == 1 else f"{bench.runs} runs"
    threads = "1 thread" if bench.threads == 1 else f"{bench.threads} threads"
    clock = ", processor time" if bench.clock == "cpu" else ""
    return f"{clean(bench.device)}, {threads}: {runs} each, in turns{clock}"


def _columns(bench: Bench) -> list[Column]:
    rows = bench.variants
    found = [
        Column("", tuple([each.label for each in rows]), is_number=False),
        Column("of fp32", tuple([_ratio(each) for each in rows])),
        Column("quartiles", tuple([_range(each) for each in rows])),
        Column("a step", tuple([_time(each) for each in rows])),
    ]
    if any(each.loss is not None for each in rows):
        title = f"loss at {max(each.loss_step for each in rows)}"
        found.append(Column(title, tuple([_number(each.loss, ".5g") for each in rows])))
        differences = [None if each.name == BASE else each.loss_difference for each in rows]
        cells = tuple([_number(each, "+.1e") for each in differences])
        found.append(Column("- fp32's", cells))
    if any(each.output_error is not None for each in rows):
        errors = [None if each.name == BASE else each.output_error for each in rows]
        found.append(Column("error", tuple([_number(each, ".1e") for each in errors])))
    if any(each.memory_bytes is not None for each in rows):
        memories = [each.memory_bytes for each in rows]
        cells = tuple([_NOTHING if each is None else size(each) for each in memories])
        found.append(Column("memory", cells))
    return found


def _ratio(row: Measured) -> str:
    if row.error is not None:
        return "failed"
    return _NOTHING if row.ratio is None else f"{row.ratio.median:.2f}"


def _range(row: Measured) -> str:
    if row.ratio is None or row.name == BASE:
        return _NOTHING
    return f"{row.ratio.low:.2f}-{row.ratio.high:.2f}"


def _time(row: Measured) -> str:
    if row.step_s is None:
        return _NOTHING
    seconds = row.step_s.median
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= _ROUNDED_TO_ONE:
            return f"{_figure(seconds * factor)} {unit}"
    return f"{_figure(seconds * 1e6)} us"


def _figure(value: float) -> str:
    """Returns three figures, and all those before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _number(value: float | None, form: str) -> str:
    return _NOTHING if value is None else format(value, form)
