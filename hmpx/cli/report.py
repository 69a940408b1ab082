"""``hmpx report``: prints reports that were written as JSON, or turns them into other files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

from .. import reports
from . import output
from .options import add_command

#: What, in place of a file, has reports merged.
_MERGE = "merge"


def add_parser(commands: Any) -> None:
    """Adds the parser of ``hmpx report``."""
    parser = add_command(
        commands,
        "report",
        run,
        help="print reports of runs, or turn them into a page or a table",
        usage="hmpx report [--html OUT] [--csv OUT] FILE...\n       hmpx report merge FILE... -o OUT",
        description="Prints what was recorded: how much ran in low precision, casts to do without,\n"
        "and a table by op. Several files, as those of ranks, are added up.",
        epilog="""\
exit status:
  0; 2 if a file can't be read or written, holds no report, or the arguments are wrong

examples:
  hmpx report report.json
  hmpx report report.json --html report.html
  hmpx report merge rank0.json rank1.json -o all.json""",
    )
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="reports as JSON, as Report.to_json writes them"
    )
    parser.add_argument("--html", metavar="OUT", help="write a page that needs no network")
    parser.add_argument("--csv", metavar="OUT", help="write a table with a line for each row")
    parser.add_argument("-o", "--output", metavar="OUT", help="where merge writes JSON")


def run(options: argparse.Namespace) -> int:
    """Prints the report, or writes it where the user asked to."""
    files: list[str] = options.files
    is_merge = files[0] == _MERGE
    if is_merge and len(files) == 1:
        options.parser.error("name the reports to merge")
    if is_merge and options.output is None:
        options.parser.error("merge needs -o OUT, where it writes")
    if options.output is not None and not is_merge:
        options.parser.error("-o says where merge writes: hmpx report merge FILE... -o OUT")
    found = [reports.read_json(path) for path in files[is_merge:]]
    report = found[0] if len(found) == 1 else reports.merged(found)
    written = [*_written(report, options)]
    if not written and sys.stdout.isatty():
        report.print()
        return 0
    return output.show(written or str(report).splitlines())


def _written(report: reports.Report, options: argparse.Namespace) -> Iterator[str]:
    """Writes the files that were asked for and yields a line on each."""
    for path, write in (
        (options.output, report.to_json),
        (options.html, report.to_html),
        (options.csv, report.to_csv),
    ):
        if path is not None:
            write(path)
            yield f"wrote {path}"
