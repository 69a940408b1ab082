"""The table of all hmpx reports: text, HTML, CSV and pandas."""

from __future__ import annotations

import csv
import html
import importlib
import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ..errors import OptionError, fielded
from .cells import NOTHING, WIDTH, without_end

#: Spreadsheets may read a cell that starts with one of these as a formula; from OWASP's page on CSV injection,
#: including its full-width signs.
_FORMULA_STARTS: Final = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")  # noqa: RUF001

#: Cells of dtypes that are not low precision.
_WIDE: Final = frozenset({"fp32", "fp64", NOTHING})


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        title: The title.
        values: The values, row by row.
        show: Formats a value as text; None is shown as ``"-"``.
        is_number: Whether its cells are right-aligned.
        cut: Shortens a cell to a number of terminal columns.
        least: The minimum width.
        is_dtype: Whether pages colour its cells: low precision, or fp32 and wider.
    """

    title: str
    values: Sequence[Any]
    show: Callable[[Any], str] = str
    is_number: bool = True
    cut: Callable[[str, int], str] = without_end
    least: int = 4
    is_dtype: bool = False

    __repr__ = fielded

    @property
    def cells(self) -> list[str]:
        """Its values as text."""
        return [NOTHING if value is None else self.show(value) for value in self.values]

    def kind(self, cell: str) -> str:
        """Returns the CSS class of a cell."""
        if self.is_dtype:
            return "wide" if cell in _WIDE else "low"
        return "number" * self.is_number

    def fitted(self, columns: int) -> Column:
        """Returns the column cut to ``columns`` of a terminal."""
        cells = [self.cut(cell, columns) for cell in self.cells]
        return replace(self, title=without_end(self.title, columns), values=cells, show=str)


class ReportTable:
    """Rows of values under titles. Printed, it is text of 80 columns; notebooks show HTML."""

    def __init__(self, columns: Iterable[Column]) -> None:
        self.columns = list(columns)

    @classmethod
    def of(
        cls, titles: Iterable[str], rows: Iterable[Sequence[Any]], numbers: Iterable[str] = ()
    ) -> ReportTable:
        """Returns a table of rows; the columns titled ``numbers`` are right-aligned."""
        titles, rows, numbers = list(titles), list(rows), set(numbers)
        return cls(
            Column(title, [row[index] for row in rows], is_number=title in numbers)
            for index, title in enumerate(titles)
        )

    @classmethod
    def of_fields(
        cls, names: Sequence[str], items: Iterable[Any], between: str = ", "
    ) -> ReportTable:
        """Returns a table of these fields of objects; tuples become strings, joined by ``between``."""

        def cell(value: Any) -> Any:
            return between.join(map(str, value)) if isinstance(value, tuple) else value

        return cls.of(names, [[cell(getattr(item, name)) for name in names] for item in items])

    @property
    def rows(self) -> list[tuple[Any, ...]]:
        """The values, row by row."""
        return [*zip(*(column.values for column in self.columns), strict=True)]

    def __len__(self) -> int:
        return len(self.rows)

    # --- text ------------------------------------------------------------------------------------

    def lines(self, columns: int = WIDTH) -> list[str]:
        """Returns the lines, titles first, each at most ``columns`` wide."""
        found, between = _fitted(self.columns, columns)
        padded = []
        for column in found:
            cells = [column.title, *column.cells]
            widest = max(map(len, cells))
            pad = str.rjust if column.is_number else str.ljust
            padded.append([pad(cell, widest) for cell in cells])
        return [between.join(cells).rstrip() for cells in zip(*padded, strict=True)]

    def __str__(self) -> str:
        return "\n".join(self.lines())

    # --- HTML ------------------------------------------------------------------------------------

    def to_html(self) -> str:
        """Returns the table as HTML, without scripts or styles."""

        def cell(tag: str, kind: str, text: str) -> str:
            start = f'{tag} class="{kind}"' if kind else tag
            return f"<{start}>{html.escape(text)}</{tag[:2]}>"

        head = [cell('th scope="col"', "number" * c.is_number, c.title) for c in self.columns]
        columns = ([cell("td", c.kind(text), text) for text in c.cells] for c in self.columns)
        body = "".join(f"<tr>{''.join(cells)}</tr>" for cells in zip(*columns, strict=True))
        start = f'<table class="table"><thead><tr>{"".join(head)}</tr></thead>'
        return f"{start}<tbody>{body}</tbody></table>"

    def _repr_html_(self) -> str:
        return self.to_html()

    def page_data(self) -> dict[str, Any]:
        """Returns the data of a page's sortable table; numeric columns come last."""
        columns = sorted(self.columns, key=lambda each: each.is_number)
        numbers = [column for column in columns if column.is_number]
        return {
            "titles": [column.title for column in columns],
            "numbers": len(numbers),
            "rows": [*zip(*(column.cells for column in columns), strict=True)],
            "kinds": [*zip(*([*map(each.kind, each.cells)] for each in columns), strict=True)],
            "keys": [*zip(*(map(_key, column.values) for column in numbers), strict=True)],
        }

    # --- data ------------------------------------------------------------------------------------

    def to_csv(self) -> str:
        """Returns the values as CSV; text that spreadsheets would evaluate gets a leading ``'``."""
        stream = io.StringIO(newline="")
        writer = csv.writer(stream)
        for values in ([column.title for column in self.columns], *self.rows):
            writer.writerow(
                [
                    f"'{each}"
                    if isinstance(each, str) and each.startswith(_FORMULA_STARTS)
                    else each
                    for each in values
                ]
            )
        return stream.getvalue()

    def to_dataframe(self) -> Any:
        """Returns the values as a `pandas.DataFrame`.

        Raises:
            OptionError: pandas isn't installed.
        """
        try:
            pandas = importlib.import_module("pandas")
        except ImportError as error:
            raise OptionError(
                "to_dataframe() needs pandas, which is not installed; pip install pandas"
            ) from error
        return pandas.DataFrame(self.rows, columns=[column.title for column in self.columns])


def _fitted(columns: Sequence[Column], line: int) -> tuple[list[Column], str]:
    """Returns the columns, cut to fit ``line``, and the separator between them."""
    found = [*columns]
    widths = [max(map(len, (column.title, *column.cells))) for column in found]
    texts = [index for index, column in enumerate(found) if not column.is_number]
    for between in ("  ", " "):
        excess = sum(widths) - line + len(between) * (len(found) - 1)
        if excess <= sum(max(0, widths[index] - 24) for index in texts):
            break
    while excess > 0 and texts:
        widest = max(texts, key=lambda index: widths[index] - found[index].least)
        others = [widths[index] for index in texts if index != widest]
        target = max(widths[widest] - excess, min(widths[widest] - 1, max(others, default=0)))
        found[widest] = found[widest].fitted(target)
        excess -= widths[widest] - target
        widths[widest] = target
    return found, between


def _key(value: float) -> float | None:
    """Returns a number for JSON: None for NaN, and the largest numbers for infinities."""
    return None if math.isnan(value) else max(-1e308, min(1e308, value))
