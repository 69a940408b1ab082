"""``hmpx report``: prints JSON reports, or converts them to other files."""

from __future__ import annotations

import argparse
from typing import Final

from .. import reports
from . import output

#: Takes the place of a file to merge reports.
_MERGE = "merge"


TEXT: Final = """\
print reports of runs, or turn them into a page or a table
---
hmpx report [--html OUT] [--csv OUT] FILE...
       hmpx report merge FILE... -o OUT
---
Prints the share of work in low precision, avoidable casts, and a table by op.
Several files, such as those of ranks, are merged.
---
files FILE+  a report in JSON, from hmpx run --report x.json or Report.to_json
--html OUT  write a page that needs no network
--csv OUT  write a table
-o --output OUT  the file that merge writes, in JSON
---
exit status:
  0; 2 if a file can't be read or written, holds no report, or the arguments are wrong

examples:
  hmpx report report.json
  hmpx report report.json --html report.html
  hmpx report merge rank0.json rank1.json -o all.json"""


SETTINGS: Final = {"files": {"type": str}}  # one is a word


def run(options: argparse.Namespace) -> int:
    """Prints the report, or writes it to the given path."""
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
    writers = {"output": report.to_json, "html": report.to_html, "csv": report.to_csv}
    written = [*output.written(options, **writers)]
    return output.show(written or str(report).splitlines())
