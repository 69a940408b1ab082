"""``hmpx report``: reports read from JSON, printed, merged, and written as other files."""

from __future__ import annotations

from pathlib import Path

import pytest

from hmpx import cli
from hmpx.reports import Report, merged, read_json

from ..reports.samples import row, waste


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Report]:
    """Returns what is in ``0.json`` and ``1.json`` of the current directory."""
    monkeypatch.chdir(tmp_path)
    found = [Report((row(calls=i + 1),), (waste(),), {"rank": str(i)}) for i in range(2)]
    for i, report in enumerate(found):
        report.to_json(f"{i}.json")
    return found


def test_a_report_is_printed(files: list[Report], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", "0.json"]) == 0
    assert capsys.readouterr() == (f"{files[0]}\n", "")


def test_several_reports_are_added_up(
    files: list[Report], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["report", "0.json", "1.json"]) == 0
    assert capsys.readouterr().out == f"{merged(files)}\n"


def test_reports_are_merged_into_a_file(
    files: list[Report], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["report", "merge", "0.json", "1.json", "-o", "all.json"]) == 0
    assert capsys.readouterr().out == "wrote all.json\n"
    assert read_json("all.json") == merged(files)
    assert read_json("all.json").rows[0].calls == 3


def test_pages_and_tables_are_written(
    files: list[Report], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["report", "0.json", "--html", "a.html", "--csv", "a.csv"]) == 0
    assert capsys.readouterr().out == "wrote a.html\nwrote a.csv\n"
    assert Path("a.html").read_text("utf-8") == files[0].to_html()
    assert Path("a.csv").read_bytes().decode() == files[0].to_csv()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.json"], "hmpx: absent.json: no such file; give the path of a report in JSON\n"),
        (
            ["bad.json"],
            "hmpx: bad.json:1: not a report in JSON, or damaged: Expecting property name",
        ),
        (["0.json", "bad.json"], "hmpx: bad.json:1: not a report in JSON, or damaged: "),
        (
            ["0.json", "--html", "absent/a.html"],
            "hmpx: can't write absent/a.html: No such file or directory",
        ),
    ],
)
def test_faults_are_lines_on_stderr(
    files: list[Report],
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("bad.json").write_text('{"hmpx_report": 1,')
    assert cli.main(["report", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err[: len(message)], err.count("\n")) == ("", message, 1)
