"""Rows for other programs: CSV and pandas."""

from __future__ import annotations

import csv
import importlib
import io
from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any, Final

from ..errors import OptionError
from .rows import Row, is_measured

#: A cell that starts with one of these may be read as a formula by spreadsheets; from OWASP's page on
#: CSV injection, with the full-width signs that it names.
_FORMULA_STARTS: Final = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")  # noqa: RUF001

COLUMNS: Final = tuple(field.name for field in fields(Row))


def csv_text(rows: Iterable[Row]) -> str:
    """Returns the rows as CSV with a header; text that spreadsheets would compute is quoted by ``'``."""
    return csv_lines([COLUMNS, *_values(rows)])


def csv_lines(lines: Iterable[Iterable[object]]) -> str:
    """Returns lines of values as CSV; text that spreadsheets would compute is quoted by ``'``."""
    stream = io.StringIO(newline="")
    writer = csv.writer(stream)
    for values in lines:
        writer.writerow([_inert(value) for value in values])
    return stream.getvalue()


def _inert(value: object) -> object:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA_STARTS) else value


def dataframe(rows: Iterable[Row]) -> Any:
    """Returns the rows as a `pandas.DataFrame`.

    Raises:
        OptionError: pandas isn't installed.
    """
    try:
        pandas = importlib.import_module("pandas")
    except ImportError as error:
        raise OptionError(
            "to_dataframe() needs pandas, which is not installed; pip install pandas"
        ) from error
    return pandas.DataFrame(list(_values(rows)), columns=list(COLUMNS))


def _values(rows: Iterable[Row]) -> Iterator[list[object]]:
    """Yields the values of each row; several dtypes as one text, times that can't be as None."""
    for row in rows:
        yield [_value(getattr(row, name)) for name in COLUMNS]


def _value(value: object) -> object:
    if isinstance(value, tuple):
        return ", ".join(value)
    return None if isinstance(value, float) and not is_measured(value) else value
