"""``hmpx diff-runs``: the first call of two traced runs whose difference nothing explains."""

from __future__ import annotations

import argparse
from typing import Final

from .. import tracing
from . import output

TEXT: Final = """\
compare two traced runs, call by call
---
hmpx diff-runs [--html OUT] [--json OUT] A B
---
A and B are traces that hmpx run --trace or hmpx.trace() wrote: of two precisions, machines,
versions of torch, or programs. Prints the first call whose difference is neither rounding of its
types nor inherited from its inputs, and a table by module.
---
a A  the reference's trace
b B  the other one
--html OUT  write a page that needs no network
--json OUT  write every call
---
exit status:
  0 everything is explained; 1 something is not; 2 a file is not a trace

examples:
  hmpx diff-runs fp32.hmpx bf16.hmpx
  hmpx diff-runs --html diff.html before.hmpx after.hmpx"""


def run(options: argparse.Namespace) -> int:
    """Prints the difference; status 1 if something is unexplained."""
    output.check_writable("--html", options.html)
    output.check_writable("--json", options.json)
    found = tracing.diff_runs(options.a, options.b)
    written = [*output.written(options, html=found.to_html, json=found.to_json)]
    lines = [*str(found).splitlines(), *written]
    return output.show(lines, status=0 if found.first is None and found.rows else 1)
