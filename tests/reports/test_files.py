"""Reports as files: JSON and back, CSV, data frames; merged reports; damaged files."""

from __future__ import annotations

import csv
import dataclasses
import doctest
import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from hmpx import OptionError
from hmpx.reports import Report, Row, merged, read_json, report

from .samples import large, row, waste


def test_json_gives_the_report_back(tmp_path: Path) -> None:
    found = Report((row(), row(op="mm", seconds=0.5)), (waste(),), {"rank": "0"}, "KeyError: 1")
    found.to_json(tmp_path / "report.json")
    assert read_json(tmp_path / "report.json") == found
    assert json.loads(found.to_json())["hmpx_report"] == 1


def damaged(**changes: Any) -> str:
    """Returns a report as JSON with other values; those that are ``...`` are taken out."""
    found = json.loads(Report((row(),), (waste(),)).to_json())
    for name, value in changes.items():
        place, _, key = name.partition("__")
        inside = found[place][0] if key else found
        key = key or place
        inside[key] = value
        if value is ...:
            del inside[key]
    return json.dumps(found)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ":1: not a report in JSON, or damaged: Expecting value: line 1 column 1"),
        (damaged()[:200], ":1: not a report in JSON, or damaged: Unterminated string"),
        ("[" * 100_000, ":1: not a report in JSON, or damaged: maximum recursion depth exceeded"),
        ("\n\udcff", ":2: not UTF-8 text (byte 1: 0xff); save it as UTF-8"),
        ("[]", ": not a report in JSON, or damaged: must be an object, not []"),
        ('{"hmpx_report": 2}', ": not a report in JSON, or damaged: version 2"),
        (damaged(rows=...), "or damaged: lacks rows"),
        (damaged(waste="x"), "or damaged: ['waste'] must be tuple[hmpx.reports.rows.Waste, ...]"),
        (damaged(rows=[3]), "or damaged: ['rows'][0] must be an object, not 3"),
        (damaged(rows__op=...), "or damaged: ['rows'][0] lacks op"),
        (damaged(rows__opp="x"), "or damaged: ['rows'][0] has an unknown 'opp'"),
        (damaged(rows__calls="3"), "or damaged: ['rows'][0]['calls'] must be int, not '3'"),
        (damaged(about=...), "or damaged: lacks about"),
    ],
    ids=range(13),
)
def test_damaged_files_are_named(text: str, message: str, tmp_path: Path) -> None:
    """With what is wrong in them."""
    path = tmp_path / "report.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(OptionError) as caught:
        read_json(path)
    assert str(caught.value).startswith(f"{path}:")
    assert message in str(caught.value)


def test_files_that_cannot_be_read_or_written_are_named(tmp_path: Path) -> None:
    path = tmp_path / "absent" / "report.json"
    with pytest.raises(OptionError, match=r"report\.json: no such file"):
        read_json(path)
    with pytest.raises(OptionError, match=r"a directory, not a report"):
        read_json(tmp_path)
    for write in (Report(()).to_json, Report(()).to_csv, Report(()).to_html):
        with pytest.raises(OptionError, match=r"can't write .*report\.json: No such file"):
            write(path)


# --- merged --------------------------------------------------------------------------------------


def test_merged_reports_add_rows_up() -> None:
    """Those that differ in more than their sums stay apart."""
    both = merged(
        [
            Report((row(seconds=1.0), row(op="mm")), (waste(),), {"rank": "0", "torch": "2.13, a"}),
            Report((row(),), (waste(),), {"rank": "1", "torch": "2.13, a"}, "x"),
        ]
    )
    assert both.rows == (row(calls=4, casts=8, cast_bytes=8000, flops=1600, bytes=12_000, seconds=1.0), row(op="mm"))  # fmt: skip
    assert both.waste == (waste(times=48, bytes=24_000_000),)
    assert both.about == {"rank": "0, 1", "torch": "2.13, a"}
    assert both.error == "x"
    assert merged([]) == Report(())


# --- CSV and data frames -------------------------------------------------------------------------


def test_csv_has_a_line_for_each_row(tmp_path: Path) -> None:
    found = Report((row(seconds=0.5), row()))
    text = found.to_csv(tmp_path / "report.csv")
    with (tmp_path / "report.csv").open(encoding="utf-8", newline="") as file:
        assert file.read() == text
    first, second = csv.DictReader(text.splitlines())
    assert [*first] == [field.name for field in dataclasses.fields(Row)]
    assert (first["op"], first["input_dtypes"], first["calls"]) == (
        "linear",
        "float32, float32",
        "2",
    )
    assert (first["seconds"], second["seconds"]) == ("0.5", "")


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r", "\n", "＝"])  # noqa: RUF001
def test_csv_holds_no_formulas(start: str, tmp_path: Path) -> None:
    """Text that a spreadsheet would compute is shown as text."""
    found = Report((row(module=f"{start}cmd|' /C calc'!A0", op=f'{start}1",=2'),))
    found.to_csv(tmp_path / "report.csv")
    with (tmp_path / "report.csv").open(encoding="utf-8", newline="") as file:
        (cells,) = csv.DictReader(file)
    assert cells["module"] == f"'{start}cmd|' /C calc'!A0"
    assert cells["op"] == f"'{start}1\",=2"


def test_data_frames_have_the_same_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whatever pandas makes them."""
    pandas = types.ModuleType("pandas")
    pandas.DataFrame = lambda values, columns: (values, columns)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pandas", pandas)
    values, columns = Report((row(),)).to_dataframe()
    assert columns == [field.name for field in dataclasses.fields(Row)]
    found = dict(zip(columns, values[0], strict=True))
    assert (found["op"], found["input_dtypes"], found["flops"]) == (
        "linear",
        "float32, float32",
        800,
    )
    assert found["seconds"] is None


def test_data_frames_need_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(OptionError, match="not installed; pip install pandas"):
        large(2).to_dataframe()


# --- docstrings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "module",
    [report, importlib.import_module("hmpx.reports.table")],
)
def test_docstrings_show_what_happens(module: types.ModuleType) -> None:
    failed, tried = doctest.testmod(module)
    assert tried and not failed
